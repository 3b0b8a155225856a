//! What is remembered of a Sensor: how far its events were taken, its rules' state, the values that it gave.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::event_quota::EventQuota;
use super::scoring::ScoreQueue;
use super::ticks::TickHistory;
use crate::sensing::delivery::{Delivery, SensorEvent};
use crate::sensing::rules::RulesState;

/// Outboxes of one Sensor whose numbers are remembered beside those of the newest one.
pub(super) const MOST_OUTBOXES: usize = 16;
/// Fields of one Sensor whose values are remembered: more than its spec ever names at a time.
const MOST_FIELDS: usize = 64;

/// What is kept of a Sensor.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct SensorMemory {
    /// Number of the last event that was taken: it took effect, or waits below.
    pub(super) through: i64,
    /// The outbox that gave it; empty: this process did, or one without an id.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) outbox: String,
    /// The same of outboxes before it, the newest last: what is still on its way from them is known.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) earlier: Vec<(String, i64)>,
    pub(super) rules: RulesState,
    pub(super) ticks: Option<TickHistory>,
    /// Why files cannot be seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) trouble: Option<String>,
    /// The newest value that it gave each field.
    pub(super) values: BTreeMap<String, GivenValue>,
    /// Events that wait for a score.
    pub(super) waiting: ScoreQueue,
    /// How many came from a pod of its own.
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

    /// What comes next is from this outbox.
    pub(super) fn counts_by(&mut self, outbox: &str) {
        if self.outbox == outbox {
            return;
        }
        let through = self.through_of(outbox);
        self.earlier.retain(|(known, _)| known != outbox);
        let before = std::mem::replace(&mut self.outbox, outbox.to_owned());
        self.earlier.push((before, self.through));
        let surplus = self.earlier.len().saturating_sub(MOST_OUTBOXES);
        self.earlier.drain(..surplus);
        self.through = through;
    }

    /// An event of another pod was taken. One that no rules could have made, or not so soon, takes no effect.
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

    /// An event was taken. It takes effect, or else waits.
    pub(super) fn take(&mut self, sensor: &str, event: SensorEvent) -> Option<SensorEvent> {
        self.through = event.seq;
        let event = self.waiting.keep(sensor, event)?;
        self.note(&event);
        Some(event)
    }

    /// An event takes effect.
    pub(super) fn note(&mut self, event: &SensorEvent) {
        for update in &event.updates {
            let given = GivenValue {
                value: update.value.clone(),
                at: event.at,
            };
            self.values.insert(update.field.clone(), given);
        }
        while self.values.len() > MOST_FIELDS {
            let oldest = self.values.iter().min_by_key(|(_, given)| given.at);
            let Some(oldest) = oldest.map(|(field, _)| field.clone()) else {
                break;
            };
            self.values.remove(&oldest);
        }
    }
}
