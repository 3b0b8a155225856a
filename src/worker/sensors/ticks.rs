//! Which ticks of a schedule are done with.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::sensing::schedule::TickCalendar;

/// Runs of ticks that are remembered.
const MOST_RUNS: usize = 16;

/// Which ticks are done with.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub(super) struct TickHistory {
    /// Of this schedule: another one begins anew.
    pub(super) schedule: String,
    /// Ticks up to this moment.
    pub(super) through: Timestamp,
    /// Ticks that came, each run from its first to its last one without a gap, the newest run last. A clock that is set back
    /// meets them again, however many they are.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    runs: Vec<(Timestamp, Timestamp)>,
}

impl TickHistory {
    /// Of a schedule that is heard of for the first time now.
    pub(super) fn begin(schedule: String, now: Timestamp) -> Self {
        Self {
            schedule,
            through: now,
            runs: Vec::new(),
        }
    }

    /// A tick comes. False: it came before.
    pub(super) fn come(&mut self, tick: Timestamp, calendar: &TickCalendar) -> bool {
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
        let surplus = self.runs.len().saturating_sub(MOST_RUNS);
        self.runs.drain(..surplus);
        true
    }
}
