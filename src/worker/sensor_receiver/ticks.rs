//! The ticks of a schedule that have been handled.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::sensor_pipeline::schedule::TickCalendar;

/// Maximum number of remembered runs of ticks.
const MAX_RUNS: usize = 16;

#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub(super) struct TickHistory {
    /// The schedule to which the ticks belong; a changed schedule starts over.
    pub(super) schedule: String,
    /// Ticks up to this time are handled.
    pub(super) through: Timestamp,
    /// Handled ticks as runs without gaps (first, last), the newest run last. They recognize ticks that come again
    /// after the clock was set back, however many there are.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    runs: Vec<(Timestamp, Timestamp)>,
}

impl TickHistory {
    /// Starts a schedule at `now`.
    pub(super) fn begin(schedule: String, now: Timestamp) -> Self {
        Self {
            schedule,
            through: now,
            runs: Vec::new(),
        }
    }

    /// Handles a tick. Returns false if it was handled before.
    pub(super) fn record_tick(&mut self, tick: Timestamp, calendar: &TickCalendar) -> bool {
        self.through = tick;
        if self.runs.iter().any(|(first, last)| (*first..=*last).contains(&tick)) {
            return false;
        }
        let before = self
            .runs
            .iter()
            .position(|(_, last)| calendar.after(*last) == Some(tick));
        let first = before.map_or(tick, |place| self.runs.remove(place).0);
        self.runs.push((first, tick));
        let surplus = self.runs.len().saturating_sub(MAX_RUNS);
        self.runs.drain(..surplus);
        true
    }
}
