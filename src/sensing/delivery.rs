//! What a Sensor gives its receivers.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::rules::{MOST_TEXT_BYTES, MOST_VALUE_BYTES};
use super::scored_effects::ScoredEffects;
use crate::api::sensor::SignalPriority;

/// One accepted event and all that it does to a receiver. Takes effect once: a receiver has a number for each Sensor, and
/// passes over events up to it.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct SensorEvent {
    /// Its number among the events of its Sensor, from 1; gaps are events that were dropped or not meant for the receiver.
    pub seq: i64,
    /// The outbox that gave the number, once a receiver has taken the event; empty for one that gives no id of its own.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub outbox: String,
    /// What makes it one event: the tick, the sender's own id, or a hash of what it says.
    pub id: String,
    /// When it came.
    pub at: Timestamp,
    /// Fields of the hot state and their values, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub updates: Vec<FieldValue>,
    /// Notifications, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notifications: Vec<SensorNotification>,
    /// What a sleep may have named in `wake_early_if`: `sensor/<name>`, and `signal/<sensor>/<signal>` of each that holds.
    pub wakes: Vec<String>,
    /// What else it does, once a model of the receiver's has scored it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trial: Option<ScoredEffects>,
}

/// Highest number of an event; JSON carries numbers up to it everywhere.
pub const MOST_SEQ: i64 = (1 << 53) - 1;
/// Most updates, notifications or questions of one event: as many as a Sensor may have updates or signals, and its own.
pub(super) const MOST_PARTS: usize = 17;
/// Most bytes of the name of a field.
const MOST_FIELD_BYTES: usize = 63;
/// Most bytes of the name of an event: `signal/<sensor>/<signal>`.
pub(super) const MOST_NAME_BYTES: usize = 512;
/// Most bytes of an id. The longest is that of a file, which has its path in it.
const MOST_ID_BYTES: usize = 8 * 1024;

impl SensorEvent {
    /// Whether rules could have made it. A receiver does not rely on the pod that sent it: whoever took that pod over must
    /// not flood what a model reads, nor use up the numbers.
    #[must_use]
    pub fn is_plausible(&self) -> bool {
        let asked = self.trial.as_ref();
        let questions = asked.map_or(&[][..], |trial| &trial.questions);
        let notices = self.notifications.iter();
        let mut notices = notices.chain(questions.iter().filter_map(|question| question.notice.as_ref()));
        let mut updates = self.updates.iter().chain(asked.iter().flat_map(|trial| &trial.updates));
        (1..=MOST_SEQ).contains(&self.seq)
            && self.id.len() <= MOST_ID_BYTES
            && [
                self.updates.len(),
                self.notifications.len(),
                self.wakes.len(),
                questions.len(),
            ]
            .iter()
            .all(|parts| *parts <= MOST_PARTS)
            && self.wakes.iter().all(|name| name.len() <= MOST_NAME_BYTES)
            && notices.all(|notice| notice.text.len() <= MOST_TEXT_BYTES && notice.source.len() <= MOST_NAME_BYTES)
            && updates.all(|update| {
                update.field.len() <= MOST_FIELD_BYTES && update.value.to_string().len() <= MOST_VALUE_BYTES
            })
            && asked.is_none_or(ScoredEffects::is_plausible)
    }
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
pub struct SensorNotification {
    /// The event that it is: `sensor/<name>` or `signal/<sensor>/<signal>`.
    pub source: String,
    /// What it says.
    pub text: String,
    /// How urgent it is.
    pub priority: SignalPriority,
}

/// Events of one Sensor for one receiver, in order.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Delivery {
    /// Uid of the Sensor.
    pub sensor: String,
    /// Name of the Sensor.
    pub name: String,
    /// Uid of the Agent that is to get them; empty where it is not said.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub receiver: String,
    /// Id of the outbox whose numbers these are: those of another one say nothing of them.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub outbox: String,
    /// `limits.perMinute` of the Sensor, by the controller's word; what the sensor's pod says here is nobody's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_minute: Option<u32>,
    /// The events.
    pub events: Vec<SensorEvent>,
}
