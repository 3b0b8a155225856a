//! How long a task has been under way: the time in which the loop runs, without pauses and without the time between two
//! processes.

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::time_math;

#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub struct TaskClock {
    counted: SignedDuration,
    /// Since when the loop runs; not counted yet.
    from: Option<Timestamp>,
}

impl TaskClock {
    /// The loop runs.
    pub fn runs(&mut self, now: Timestamp) {
        self.from.get_or_insert(now);
    }

    /// The loop runs no more.
    pub fn halts(&mut self, now: Timestamp) {
        if let Some(from) = self.from.take() {
            self.counted += now.duration_since(from).max(SignedDuration::ZERO);
        }
    }

    /// The process ended at an unknown time: what was not counted is lost.
    pub fn interrupted(&mut self) {
        self.from = None;
    }

    /// The clock was set back by this much.
    pub fn moved(&mut self, back: SignedDuration) {
        self.from = self.from.map(|from| from.checked_sub(back).unwrap_or(from));
    }

    /// When it will have counted this long; `None`: it does not run.
    pub fn reaches(&self, length: SignedDuration) -> Option<Timestamp> {
        let left = length.saturating_sub(self.counted).max(SignedDuration::ZERO);
        Some(time_math::after(self.from?, left))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(seconds).unwrap()
    }

    #[test]
    fn it_counts_only_while_the_loop_runs() {
        let length = SignedDuration::from_secs(10);
        let mut clock = TaskClock::default();
        assert_eq!(clock.reaches(length), None);
        clock.runs(at(100));
        clock.runs(at(101));
        assert_eq!(clock.reaches(length), Some(at(110)));
        clock.halts(at(104));
        assert_eq!(clock.reaches(length), None);
        clock.runs(at(500));
        assert_eq!(clock.reaches(length), Some(at(506)));
        clock.moved(SignedDuration::from_secs(100));
        assert_eq!(clock.reaches(length), Some(at(406)));
        clock.interrupted();
        clock.runs(at(1000));
        assert_eq!(clock.reaches(length), Some(at(1006)));
    }
}
