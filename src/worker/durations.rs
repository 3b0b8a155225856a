//! How long the loop's turns and tool runs take and its gates are open, from committed lines of the journal.
//!
//! Counts what begins and ends while this worker runs: how long no worker ran in between says nothing about a
//! turn. Gates that an earlier worker opened count as well: they wait for a person, not for a worker.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use strum::IntoEnumIterator as _;

use super::journal::JournalLine;
use crate::engine::{OpenGate, OutcomeKind, RecordKind};
use crate::link::durations::{APPROVAL_BOUNDS, ApprovalDecision, CALL_BOUNDS, LoopDurations, MAX_MEAN, TURN_BOUNDS};

/// Tool runs, and gates, that are open at most. The oldest one beyond is not counted.
const MAX_OPEN: usize = 256;

/// Measures one loop.
#[derive(Default)]
pub struct LoopTimes {
    counted: LoopDurations,
    /// The open turn, a member and a number, and when it began.
    turn: Option<((u16, i64), Timestamp)>,
    runs: BTreeMap<String, Timestamp>,
    gates: BTreeMap<String, Timestamp>,
}

impl LoopTimes {
    /// Begins with the gates that are open when this worker starts.
    #[must_use]
    pub fn new(open: &[OpenGate], start: Timestamp) -> Self {
        let mut times = Self::default();
        times.counted.start = Some(start);
        for OpenGate { gate, .. } in open {
            begin(&mut times.gates, &gate.id, gate.opened_at);
        }
        times
    }

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
                begin(&mut self.runs, run, line.at);
            }
            (RecordKind::ToolOutcome, Some(run)) => {
                // One that was not available has not run.
                let has_run = line.outcome.as_deref() != Some(OutcomeKind::Unavailable.as_ref());
                if let Some(from) = self.runs.remove(run).filter(|_| has_run) {
                    let took = between(from, line.at);
                    self.counted.tool_runs.observe(CALL_BOUNDS, took, key);
                }
            }
            (RecordKind::GateOpened, _) => begin(&mut self.gates, gate_of(&line.note).0, line.at),
            (RecordKind::GateResolved, _) => {
                let (id, how) = gate_of(&line.note);
                if let Some((from, decision)) = self.gates.remove(id).zip(decision(how)) {
                    let took = between(from, line.at).min(Duration::from_micros(MAX_MEAN));
                    let waits = self.counted.approvals.of_mut(decision);
                    waits.observe(APPROVAL_BOUNDS, took, key);
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

/// Adds one to those that are open.
fn begin(open: &mut BTreeMap<String, Timestamp>, id: &str, at: Timestamp) {
    if open.len() >= MAX_OPEN
        && let Some(oldest) = open.iter().min_by_key(|(_, from)| **from)
    {
        let oldest = oldest.0.clone();
        open.remove(&oldest);
    }
    open.insert(id.to_owned(), at);
}

/// The id in the note of a line about a gate, and how the gate closed.
fn gate_of(note: &str) -> (&str, &str) {
    let (id, rest) = note.split_once(' ').unwrap_or((note, ""));
    (id.trim_end_matches(':'), rest)
}

/// The view of the audit reads the same words. What follows them, such as who answered, is for people.
fn decision(how: &str) -> Option<ApprovalDecision> {
    let mut all = ApprovalDecision::iter();
    all.find(|decision| how.starts_with(&decision.as_ref().to_lowercase()))
}

/// The clock may have been set back meanwhile: a negative duration counts as zero.
fn between(from: Timestamp, to: Timestamp) -> Duration {
    to.duration_since(from).try_into().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;

    use super::*;
    use crate::api::status::GateKind;
    use crate::engine::GateTerms;

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

    fn of_gate(kind: RecordKind, note: &str, seconds: i64) -> JournalLine {
        JournalLine {
            note: note.into(),
            ..line(seconds * 1_000, kind, 3)
        }
    }

    /// Number of gates that closed in each way, and their times in seconds.
    fn waits(times: &LoopTimes) -> Vec<(&'static str, u64, u64)> {
        let waits = times.report().approvals;
        let all = ApprovalDecision::iter().map(|decision| (decision, waits.of(decision)));
        let counted = all.filter(|(_, counts)| counts.count() > 0);
        counted
            .map(|(decision, counts)| {
                let name: &'static str = decision.into();
                (name, counts.count(), counts.sum_microseconds / 1_000_000)
            })
            .collect()
    }

    #[test]
    fn gates_count_from_their_opening_by_how_they_closed() {
        let (opened, closed) = (RecordKind::GateOpened, RecordKind::GateResolved);
        let mut times = LoopTimes::default();
        times.observe(&[
            of_gate(opened, "e1-t1c1r1", 0),
            of_gate(opened, "e1-t1c1r2", 0),
            of_gate(opened, "tools-files-e1-1: changed files__read", 1),
            of_gate(closed, "e1-t1c1r2 denied by bob", 5),
            of_gate(closed, "e1-t1c1r1 approved by an unknown user", 7_200),
            of_gate(closed, "tools-files-e1-1 superseded", 11),
            of_gate(opened, "goal-e1-1", 20),
            of_gate(closed, "goal-e1-1 withdrawn: the task has ended", 21),
            of_gate(opened, "goal-e1-2", 20),
            of_gate(closed, "goal-e1-2 expired", 3_620),
            // Closed again, or opened before the journal began, or in a way of a later version.
            of_gate(closed, "goal-e1-2 expired", 9_999),
            of_gate(closed, "e1-t9c1r1 denied", 9_999),
            of_gate(opened, "e1-t2c1r1", 0),
            of_gate(closed, "e1-t2c1r1 forwarded", 9_999),
        ]);
        let counted = [
            ("Approved", 1, 7_200),
            ("Denied", 1, 5),
            ("Expired", 1, 3_600),
            ("Withdrawn", 1, 1),
            ("Superseded", 1, 10),
        ];
        assert_eq!(waits(&times), counted);
        assert_eq!(times.report().approvals.approved.last.unwrap().turn, 3);
    }

    #[test]
    fn a_gate_of_an_earlier_worker_counts_from_its_opening_and_one_beyond_a_month_as_a_month() {
        let open = |id: &str, opened_at| OpenGate {
            gate: GateTerms {
                id: id.into(),
                kind: GateKind::ToolCallNeedsApproval,
                opened_at: Timestamp::from_second(opened_at).unwrap(),
                expires_at: None,
            },
            tool: String::new(),
            arguments: String::new(),
            because_of: None,
        };
        let month = i64::try_from(MAX_MEAN / 1_000_000).unwrap();
        for (age, counted) in [(month - 1, month - 1), (month, month), (month + 1, month)] {
            let start = Timestamp::from_second(2_000).unwrap();
            let mut times = LoopTimes::new(&[open("a", 1_000), open("b", 0)], start);
            let nothing = LoopDurations {
                start: Some(start),
                ..LoopDurations::default()
            };
            assert_eq!(times.report(), nothing);
            times.observe(&[of_gate(RecordKind::GateResolved, "a denied", 1_000 + age)]);
            assert_eq!(waits(&times), [("Denied", 1, u64::try_from(counted).unwrap())]);
        }
    }

    #[test]
    fn the_oldest_of_too_many_open_runs_is_evicted() {
        for (others, counted) in [(MAX_OPEN - 1, 1), (MAX_OPEN, 0)] {
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
