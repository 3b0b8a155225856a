//! Messages between the controller and pods about Sensors.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use agentloop_api::SensorSpec;
use agentloop_api::sensor::SensorTotals;

/// A Sensor that a pod has to run. The complete desired state: an unknown Sensor starts, a changed one continues with
/// its new spec, and one that is not listed ends.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct SensorTerms {
    /// Uid of the Sensor.
    pub uid: String,
    /// Name of the Sensor.
    pub name: String,
    /// Generation of its spec.
    pub generation: i64,
    /// The spec, without its receivers.
    #[cfg_attr(test, schemars(with = "serde_json::Value"))]
    pub spec: SensorSpec,
}

/// A pod's report about a Sensor that it runs, or whose events it scores. Totals and current state, so repeats have no
/// effect.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct SensorReport {
    /// Uid of the Sensor.
    pub uid: String,
    /// Generation of the spec in use. 0: the Sensor runs in its own pod, and `totals` contains only what scores did in
    /// this one.
    pub generation: i64,
    /// Totals since the pod's Agent became a receiver; kept with the journal.
    pub totals: SensorTotals,
    /// The last accepted event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<LastEvent>,
    /// Failures since the last success.
    #[serde(default)]
    pub consecutive_failures: i64,
    /// Why events are not received or understood; absent: they are. Never contains text of a payload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// The next retry after a failure, or the next tick.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_attempt_at: Option<Timestamp>,
}

/// The last accepted event.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct LastEvent {
    /// When it was received.
    pub at: Timestamp,
    /// Id of the event.
    pub id: String,
}
