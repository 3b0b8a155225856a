//! Messages that carry events of a sensor pod to a receiver's worker, and the acknowledgements back.
//!
//! | hop | carries |
//! |---|---|
//! | sensor pod → controller | `POST /v1/deliver` [`DeliveryRequest`] → [`DeliveryAck`], once the receiver has it on disk |
//! | controller → gateway | the event `delivery` of `GET /v1/directives`, a [`Delivery`] |
//! | gateway → worker | `GET /v1/deliveries` on the socket |
//! | worker → gateway | `POST /v1/deliveries/ack` [`DeliveryAck`] |
//! | gateway → controller | `POST /v1/delivered` [`RelayedDeliveryAck`] |
//!
//! No hop stores anything: what is lost is resent from the sensor pod's outbox. Duplicates have no effect, since a
//! worker skips and re-acknowledges numbers of an outbox that it already has.
//!
//! A sensor pod gets its directives from `GET /v1/sensor`, server-sent events `directives` with [`SensorDirectives`],
//! and reports to `POST /v1/sensor/report` with a [`SensorPodReport`].

use serde::{Deserialize, Serialize};

use super::sensor_messages::{SensorReport, SensorTerms};
pub use agentloop_sensor_pipeline::delivery::{Delivery, MAX_DELIVERY_EVENTS, SensorEvent};

/// Maximum number of bytes of the events of one [`DeliveryRequest`]; a single event is always shorter.
pub const MAX_DELIVERY_BYTES: usize = 192 * 1024;
/// Maximum number of notifications that an outbox keeps for receivers that are not reachable.
pub const MAX_NOTIFICATIONS: i64 = 10_000;
/// Maximum number of events that an outbox keeps. Older ones have already lost their values and notifications, or have
/// none before they are scored.
pub const MAX_EVENTS: i64 = 10_000;
/// Seconds that the controller waits for a receiver's [`DeliveryAck`].
pub const DELIVERY_SECONDS: u64 = 5;
/// Seconds of a worker's long poll for a [`Delivery`] at its gateway.
pub const POLL_SECONDS: u64 = 20;

/// What a sensor pod has to do. The complete desired state, so repeats have no effect.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct SensorDirectives {
    /// The Sensor. `None`: not decided yet, so the pod continues as before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub terms: Option<SensorTerms>,
    /// The receivers of its events. `None`: not decided yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub receivers: Option<Vec<ReceiverTerms>>,
}

/// An Agent that receives events.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ReceiverTerms {
    /// Uid of the Agent.
    pub uid: String,
    /// Name of the Agent.
    pub name: String,
    /// Changes whenever the Agent may have become reachable: a sender that waits for a retry then retries at once.
    #[serde(default)]
    pub revision: u64,
}

/// A report of a sensor pod. Totals and current state, so repeats have no effect.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct SensorPodReport {
    /// The report of its Sensor.
    pub report: SensorReport,
    /// Number of events that some receiver does not have yet.
    #[serde(default)]
    pub pending_deliveries: i64,
}

/// Events for one receiver.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct DeliveryRequest {
    /// Uid of the receiver.
    pub receiver: String,
    /// What the receiver gets.
    pub delivery: Delivery,
}

/// A receiver has all events of a Sensor up to a number on disk.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct DeliveryAck {
    /// Uid of the Sensor.
    pub sensor: String,
    /// Id of the outbox that assigned the number; empty if unknown.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub outbox: String,
    /// Number of the last event that the receiver has on disk.
    pub through: i64,
}

/// An acknowledgement of a worker, relayed by its gateway.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct RelayedDeliveryAck {
    /// Epoch of the pod.
    pub epoch: i64,
    /// The worker's acknowledgement.
    pub delivered: DeliveryAck,
}
