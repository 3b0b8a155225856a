//! The persistent state of a Sensor: how far its events were taken, the state of its rules, and its values.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::event_quota::EventQuota;
use super::scoring::ScoreQueue;
use super::ticks::TickHistory;
use crate::sensor_pipeline::delivery::{Delivery, SensorEvent};
use crate::sensor_pipeline::rules::RulesState;

/// Maximum number of earlier outboxes of a Sensor whose event numbers are kept.
pub(super) const MAX_OUTBOXES: usize = 16;
/// Maximum number of fields of a Sensor whose values are kept: more than a spec can name at a time.
const MAX_FIELDS: usize = 64;

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct SensorMemory {
    /// Number of the last event that was taken: it took effect, or is in [`Self::waiting`].
    pub(super) through: i64,
    /// The outbox of that event; empty if this process produced it, or if the outbox has no id.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) outbox: String,
    /// The same for earlier outboxes, the newest last, so that late deliveries from them are recognized.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) earlier: Vec<(String, i64)>,
    pub(super) rules: RulesState,
    pub(super) ticks: Option<TickHistory>,
    /// Why files cannot be read.
    #[serde(rename = "trouble", skip_serializing_if = "Option::is_none")]
    pub(super) watch_problem: Option<String>,
    /// The newest value of each field that it sets.
    pub(super) values: BTreeMap<String, GivenValue>,
    /// Events that wait for a score.
    pub(super) waiting: ScoreQueue,
    /// Quota for events that a sensor pod delivers.
    #[serde(skip_serializing_if = "is_nothing")]
    pub(super) pace: EventQuota,
}

fn is_nothing(pace: &EventQuota) -> bool {
    *pace == EventQuota::default()
}

#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub(super) struct GivenValue {
    pub(super) value: Value,
    pub(super) at: Timestamp,
}

impl SensorMemory {
    pub(super) fn through_of(&self, outbox: &str) -> i64 {
        let earlier = || self.earlier.iter().find(|(known, _)| known == outbox);
        if self.outbox == outbox {
            self.through
        } else {
            earlier().map_or(0, |(_, through)| *through)
        }
    }

    /// Switches to the event numbers of this outbox.
    pub(super) fn counts_by(&mut self, outbox: &str) {
        if self.outbox == outbox {
            return;
        }
        let through = self.through_of(outbox);
        self.earlier.retain(|(known, _)| known != outbox);
        let before = std::mem::replace(&mut self.outbox, outbox.to_owned());
        self.earlier.push((before, self.through));
        let surplus = self.earlier.len().saturating_sub(MAX_OUTBOXES);
        self.earlier.drain(..surplus);
        self.through = through;
    }

    /// Takes an event of a sensor pod. An event that the rules cannot have produced, or not at this rate, is dropped.
    pub(super) fn take_from_pod(
        &mut self,
        now: Timestamp,
        delivery: &Delivery,
        event: SensorEvent,
    ) -> Option<SensorEvent> {
        let is_in_time = |pace: &mut EventQuota| delivery.per_minute.is_none_or(|limit| pace.try_take(limit, now));
        if event.is_plausible() && is_in_time(&mut self.pace) {
            return self.take(&delivery.name, event);
        }
        self.through = event.seq;
        self.rules.totals.dropped += 1;
        None
    }

    /// Takes an event. Returns it if it takes effect now, and queues it otherwise.
    pub(super) fn take(&mut self, sensor: &str, event: SensorEvent) -> Option<SensorEvent> {
        self.through = event.seq;
        let event = self.waiting.keep(sensor, event)?;
        self.note(&event);
        Some(event)
    }

    /// Records the values of an event that takes effect.
    pub(super) fn note(&mut self, event: &SensorEvent) {
        for update in &event.updates {
            let given = GivenValue {
                value: update.value.clone(),
                at: event.at,
            };
            self.values.insert(update.field.clone(), given);
        }
        while self.values.len() > MAX_FIELDS {
            let oldest = self.values.iter().min_by_key(|(_, given)| given.at);
            let Some(oldest) = oldest.map(|(field, _)| field.clone()) else {
                break;
            };
            self.values.remove(&oldest);
        }
    }
}
