//! How long the loop's turns and tool runs take, from committed lines of the journal.
//!
//! Counts what begins and ends while this worker runs: how long no worker ran in between says nothing about a
//! turn.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;

use super::journal::JournalLine;
use crate::engine::{OutcomeKind, RecordKind};
use crate::link::durations::{CALL_BOUNDS, LoopDurations, TURN_BOUNDS};

/// Tool runs that are open at most. The oldest one beyond is not counted.
const MOST_OPEN: usize = 256;

/// Measures one loop.
#[derive(Default)]
pub struct LoopTimes {
    counted: LoopDurations,
    /// The open turn, a member and a number, and when it began.
    turn: Option<((u16, i64), Timestamp)>,
    runs: BTreeMap<String, Timestamp>,
}

impl LoopTimes {
    /// Takes lines that were committed.
    pub fn observe(&mut self, lines: &[JournalLine]) {
        for line in lines {
            self.observe_line(line);
        }
    }

    fn observe_line(&mut self, line: &JournalLine) {
        let key = (line.member, line.turn);
        match (line.kind, line.run.as_deref()) {
            (RecordKind::TurnStarted, _) => self.turn = Some((key, line.at)),
            (RecordKind::TurnCompleted, _) => {
                if let Some((_, from)) = self.turn.take_if(|(turn, _)| *turn == key) {
                    self.counted.turns.observe(TURN_BOUNDS, between(from, line.at), key);
                }
            }
            (RecordKind::TurnFailed, _) => self.turn = None,
            (RecordKind::ToolIntent, Some(run)) => {
                if self.runs.len() >= MOST_OPEN
                    && let Some(oldest) = self.runs.iter().min_by_key(|(_, from)| **from)
                {
                    let oldest = oldest.0.clone();
                    self.runs.remove(&oldest);
                }
                self.runs.insert(run.to_owned(), line.at);
            }
            (RecordKind::ToolOutcome, Some(run)) => {
                // One that was not available has not run.
                let has_run = line.outcome.as_deref() != Some(OutcomeKind::Unavailable.as_ref());
                if let Some(from) = self.runs.remove(run).filter(|_| has_run) {
                    let took = between(from, line.at);
                    self.counted.tool_runs.observe(CALL_BOUNDS, took, key);
                }
            }
            _ => {}
        }
    }

    /// The durations to report.
    #[must_use]
    pub fn report(&self) -> LoopDurations {
        self.counted.clone()
    }
}

/// The clock may have been set back meanwhile: a negative duration counts as zero.
fn between(from: Timestamp, to: Timestamp) -> Duration {
    to.duration_since(from).try_into().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;

    use super::*;

    fn line(milliseconds: i64, kind: RecordKind, turn: i64) -> JournalLine {
        JournalLine {
            at: Timestamp::from_millisecond(milliseconds).unwrap(),
            ..JournalLine::bare(kind, turn)
        }
    }

    fn of_run(run: &str, outcome: Option<&str>, milliseconds: i64) -> JournalLine {
        let kind = outcome.map_or(RecordKind::ToolIntent, |_| RecordKind::ToolOutcome);
        JournalLine {
            run: Some(run.into()),
            outcome: outcome.map(Into::into),
            ..line(milliseconds, kind, 1)
        }
    }

    #[test]
    fn a_completed_turn_counts_from_its_start_to_its_end() {
        let mut times = LoopTimes::default();
        times.observe(&[
            line(0, RecordKind::TurnStarted, 1),
            line(100, RecordKind::TurnCompleted, 1),
            line(1_000, RecordKind::TurnStarted, 2),
            line(1_101, RecordKind::TurnCompleted, 2),
            // The clock was set back.
            line(2_000, RecordKind::TurnStarted, 3),
            line(1_500, RecordKind::TurnCompleted, 3),
        ]);
        let turns = times.report().turns;
        assert_eq!(
            (turns.buckets.as_slice(), turns.sum_microseconds),
            ([2, 1].as_slice(), 201_000)
        );
        assert_eq!(turns.last.unwrap().turn, 3);
    }

    #[test]
    fn a_turn_that_failed_or_began_before_this_worker_does_not_count() {
        let mut times = LoopTimes::default();
        times.observe(&[
            line(0, RecordKind::TurnCompleted, 1),
            line(1_000, RecordKind::TurnStarted, 2),
            line(2_000, RecordKind::TurnFailed, 2),
            line(3_000, RecordKind::TurnCompleted, 2),
            line(4_000, RecordKind::TurnStarted, 3),
            line(5_000, RecordKind::TurnCompleted, 4),
        ]);
        assert!(times.report().is_none());
    }

    #[test]
    fn tool_runs_count_unless_nothing_was_sent_or_the_start_is_unknown() {
        let mut times = LoopTimes::default();
        times.observe(&[
            of_run("t1c1r1", None, 0),
            of_run("t1c1r2", None, 5),
            of_run("t1c1r2", Some("Error"), 26),
            of_run("t1c1r1", Some("Ok"), 20),
            of_run("t1c1r1", Some("Ok"), 30),
            of_run("t1c1r3", None, 30),
            of_run("t1c1r3", Some("Unavailable"), 40),
            of_run("t1c1r4", Some("Unknown"), 50),
        ]);
        let runs = times.report().tool_runs;
        assert_eq!(
            (runs.buckets.as_slice(), runs.sum_microseconds),
            ([0, 1, 1].as_slice(), 41_000)
        );
    }

    #[test]
    fn the_oldest_of_too_many_open_runs_is_forgotten() {
        for (others, counted) in [(MOST_OPEN - 1, 1), (MOST_OPEN, 0)] {
            let mut times = LoopTimes::default();
            times.observe(&[of_run("first", None, 0)]);
            for number in 0..others {
                times.observe(&[of_run(&format!("r{number}"), None, 1)]);
            }
            times.observe(&[of_run("first", Some("Ok"), 2)]);
            assert_eq!(times.report().tool_runs.count(), counted, "{others}");
        }
    }
}
