//! How events of a sensor pod reach a receiver's worker, and the word that they did comes back.
//!
//! | hop | carries |
//! |---|---|
//! | sensor pod → controller | `POST /v1/deliver` [`DeliveryRequest`] → [`DeliveryAck`], once the receiver has it on disk |
//! | controller → gateway | the event `delivery` of `GET /v1/directives`, a [`Delivery`] |
//! | gateway → worker | `GET /v1/deliveries` on the socket |
//! | worker → gateway | `POST /v1/deliveries/ack` [`DeliveryAck`] |
//! | gateway → controller | `POST /v1/delivered` [`RelayedDeliveryAck`] |
//!
//! Nobody on the way keeps anything: what is lost is sent again by the sensor pod's outbox, and what comes twice has no
//! effect, since a worker passes over numbers of an outbox that it knows and acknowledges them again.
//!
//! A sensor pod hears what it is to do on `GET /v1/sensor`, server-sent events `directives` with [`SensorDirectives`], and
//! reports on `POST /v1/sensor/report` a [`SensorPodReport`].

use serde::{Deserialize, Serialize};

use super::sensor_messages::{SensorReport, SensorTerms};
pub use crate::sensing::delivery::{Delivery, SensorEvent};

/// Most bytes of the events of one [`DeliveryRequest`]; an event is never so long.
pub const MOST_DELIVERY_BYTES: usize = 192 * 1024;
/// Most events of one [`DeliveryRequest`]: a receiver takes so many before it looks at anything else.
pub const MOST_DELIVERY_EVENTS: usize = 64;
/// Notifications that an outbox keeps for receivers that are away.
pub const MOST_NOTIFICATIONS: i64 = 10_000;
/// Events that an outbox keeps: those beyond have lost their values and notifications before, or have none before they are
/// scored.
pub const MOST_EVENTS: i64 = 10_000;
/// Seconds that the controller waits for a receiver's word.
pub const DELIVERY_SECONDS: u64 = 5;
/// Seconds that a gateway lets its worker wait for a delivery.
pub const POLL_SECONDS: u64 = 20;

/// What a sensor pod is to do. A level, sent whole.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct SensorDirectives {
    /// The Sensor. `None`: not decided yet, so it goes on as it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub terms: Option<SensorTerms>,
    /// Who gets its events. `None`: not decided yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub receivers: Option<Vec<ReceiverTerms>>,
}

/// An Agent that gets events.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ReceiverTerms {
    /// Its uid.
    pub uid: String,
    /// Its name.
    pub name: String,
    /// Changes whenever it may have become reachable: who waits to try again does so at once.
    #[serde(default)]
    pub revision: u64,
}

/// What a sensor pod says of itself. Totals and levels: repeats do no harm.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct SensorPodReport {
    /// Of its Sensor.
    pub report: SensorReport,
    /// Events that some receiver does not have yet.
    #[serde(default)]
    pub pending_deliveries: i64,
}

/// Events for one receiver.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct DeliveryRequest {
    /// Uid of the receiver.
    pub receiver: String,
    /// What it gets.
    pub delivery: Delivery,
}

/// A receiver has all events of a Sensor through a number on disk.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct DeliveryAck {
    /// Uid of the Sensor.
    pub sensor: String,
    /// Id of the outbox that gave the number; empty where it is not said.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub outbox: String,
    /// The number.
    pub through: i64,
}

/// A gateway passes its worker's word on.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct RelayedDeliveryAck {
    /// Epoch of the pod.
    pub epoch: i64,
    /// What the worker said.
    pub delivered: DeliveryAck,
}
