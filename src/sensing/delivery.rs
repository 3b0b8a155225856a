//! What a Sensor gives its receivers.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::trial::Trial;
use crate::api::sensor::Priority;

/// One accepted event and all that it does to a receiver. Takes effect once: a receiver has a number for each Sensor, and
/// passes over events up to it.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    /// Its number among the events of its Sensor, from 1; gaps are events that were dropped or not meant for the receiver.
    pub seq: i64,
    /// What makes it one event: the tick, the sender's own id, or a hash of what it says.
    pub id: String,
    /// When it came.
    pub at: Timestamp,
    /// Fields of the hot state and their values, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub updates: Vec<FieldValue>,
    /// Notifications, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notifications: Vec<Notice>,
    /// What a sleep may have named in `wake_early_if`: `sensor/<name>`, and `signal/<sensor>/<signal>` of each that holds.
    pub wakes: Vec<String>,
    /// What else it does, once a model of the receiver's has scored it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trial: Option<Trial>,
}

/// A field of the hot state and its value.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct FieldValue {
    /// The field.
    pub field: String,
    /// The value.
    pub value: Value,
}

/// What the model is told.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Notice {
    /// The event that it is: `sensor/<name>` or `signal/<sensor>/<signal>`.
    pub source: String,
    /// What it says.
    pub text: String,
    /// How urgent it is.
    pub priority: Priority,
}

/// Events of one Sensor for one receiver, in order.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Delivery {
    /// Uid of the Sensor.
    pub sensor: String,
    /// Name of the Sensor.
    pub name: String,
    /// The events.
    pub events: Vec<Event>,
}
