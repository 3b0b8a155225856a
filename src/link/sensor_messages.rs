//! What the controller and the pods say to each other about Sensors.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::api::SensorSpec;
use crate::api::sensor::SensorTotals;

/// A Sensor that a pod is to run. A level: an unknown one starts, a changed one goes on with its new spec, one that is
/// not named any more ends.
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
    pub spec: SensorSpec,
}

/// What a pod says of a Sensor that it runs, or that has events scored there. Totals and levels: repeats do no harm.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct SensorReport {
    /// Uid of the Sensor.
    pub uid: String,
    /// Generation of the spec that it runs by. 0: it runs in a pod of its own, and of `totals` only what scores did in
    /// this one is said.
    pub generation: i64,
    /// What it did since the pod's Agent first heard of it; kept with the journal.
    pub totals: SensorTotals,
    /// When the last accepted event came, and its id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<LastEvent>,
    /// Failures since the last success.
    #[serde(default)]
    pub consecutive_failures: i64,
    /// Why it does not hear or understand what comes; absent: it does. Never text of a payload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// When it tries again after a failure, or ticks next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_attempt_at: Option<Timestamp>,
}

/// The last accepted event.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct LastEvent {
    /// When it came.
    pub at: Timestamp,
    /// Its id.
    pub id: String,
}
