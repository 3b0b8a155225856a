//! The wire format of events from a Sensor to its receivers.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::rules::{MAX_TEXT_BYTES, MAX_VALUE_BYTES};
use super::scored_effects::ScoredEffects;
use agentloop_api::first_elements::first_elements;
use agentloop_api::sensor::SignalPriority;

/// One accepted event and all that it does to a receiver. Takes effect once: a receiver has a number for each Sensor, and
/// passes over events up to it.
#[derive(schemars::JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct SensorEvent {
    /// Number among the Sensor's events, from 1; gaps are events that were dropped or not meant for the receiver.
    pub seq: i64,
    /// The outbox that assigned the number, set when a receiver takes the event; empty if the sender has no outbox id.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub outbox: String,
    /// Identifies the event: its tick, the sender's id, or a hash of its content.
    pub id: String,
    /// When it arrived.
    pub at: Timestamp,
    /// Fields of the hot state and their values, in order.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "first_elements::<READ_PARTS, _, _>"
    )]
    pub updates: Vec<FieldValue>,
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "first_elements::<READ_PARTS, _, _>"
    )]
    pub notifications: Vec<SensorNotification>,
    /// The names that `wake_early_if` may contain: `sensor/<name>`, and `signal/<sensor>/<signal>` of each signal that
    /// holds.
    #[serde(deserialize_with = "first_elements::<READ_PARTS, _, _>")]
    pub wakes: Vec<String>,
    /// Effects that depend on scores of the receiver's light model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trial: Option<ScoredEffects>,
}

/// Highest number of an event: the largest integer that every JSON parser reads exactly.
pub const MAX_SEQ: i64 = (1 << 53) - 1;
/// Maximum number of updates, notifications or questions of one event: the maximum number of updates or signals of a
/// Sensor, plus one of its own.
pub(super) const MAX_PARTS: usize = 17;
/// How many updates, notifications or questions are read: one more, which shows that there are too many.
pub(super) const READ_PARTS: usize = MAX_PARTS + 1;
/// Maximum number of events of one [`Delivery`]: a receiver takes this many before it does anything else.
pub const MAX_DELIVERY_EVENTS: usize = 64;
/// Maximum number of bytes of a field's name.
const MAX_FIELD_BYTES: usize = 63;
/// Maximum number of bytes of an event's name: `signal/<sensor>/<signal>`.
pub(super) const MAX_NAME_BYTES: usize = 512;
/// Maximum number of bytes of an id. The longest is that of a file event, which contains the path.
const MAX_ID_BYTES: usize = 8 * 1024;

impl SensorEvent {
    /// Whether the rules could have produced it. A receiver does not trust the sending pod: an attacker who took it
    /// over must not flood the model's context, nor exhaust the numbers.
    #[must_use]
    pub fn is_plausible(&self) -> bool {
        let asked = self.trial.as_ref();
        let questions = asked.map_or(&[][..], |trial| &trial.questions);
        let notices = self.notifications.iter();
        let mut notices = notices.chain(questions.iter().filter_map(|question| question.notice.as_ref()));
        let mut updates = self.updates.iter().chain(asked.iter().flat_map(|trial| &trial.updates));
        (1..=MAX_SEQ).contains(&self.seq)
            && self.id.len() <= MAX_ID_BYTES
            && [
                self.updates.len(),
                self.notifications.len(),
                self.wakes.len(),
                questions.len(),
            ]
            .iter()
            .all(|parts| *parts <= MAX_PARTS)
            && self.wakes.iter().all(|name| name.len() <= MAX_NAME_BYTES)
            && notices.all(|notice| notice.text.len() <= MAX_TEXT_BYTES && notice.source.len() <= MAX_NAME_BYTES)
            && updates.all(|update| {
                update.field.len() <= MAX_FIELD_BYTES && update.value.to_string().len() <= MAX_VALUE_BYTES
            })
            && asked.is_none_or(ScoredEffects::is_plausible)
    }
}

/// A field of the hot state and its value.
#[derive(schemars::JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct FieldValue {
    pub field: String,
    pub value: Value,
}

/// A text for the model.
#[derive(schemars::JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct SensorNotification {
    /// The event's name: `sensor/<name>` or `signal/<sensor>/<signal>`.
    pub source: String,
    pub text: String,
    pub priority: SignalPriority,
    /// It is a task, see [`TASK_PREFIX`](super::rules::TASK_PREFIX).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_task: bool,
}

/// Events of one Sensor for one receiver, in order.
#[derive(schemars::JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Delivery {
    pub sensor: String,
    pub name: String,
    /// Uid of the receiving Agent; empty if not set.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub receiver: String,
    /// Id of the outbox that assigned the numbers; numbers of different outboxes are not comparable.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub outbox: String,
    /// `limits.perMinute` of the Sensor, set by the controller; a value from the sensor pod is ignored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_minute: Option<u32>,
    /// Those beyond the first [`MAX_DELIVERY_EVENTS`] are not read: they are not acknowledged either, so they are sent again.
    #[serde(deserialize_with = "first_elements::<MAX_DELIVERY_EVENTS, _, _>")]
    pub events: Vec<SensorEvent>,
}
