//! What pods report about durations, turned into what is new since the report before.
//!
//! Each process counts from its start, and only one leader may add what it has counted. So the counts of the first report are
//! added if no other leader can have received an earlier one of them: that of a pod that this leader has created, and that of
//! a worker that has started since this leader received a report of the one before in the same pod. This includes what
//! happened without a pod: a worker reads the answers to its gates when it starts, and its first report has them.
//!
//! The first report of a pod that another leader has created cannot be decided: whether that leader has added the counts is
//! not known, no matter whether the leader changed before the report or after it. Such counts are not added. A change of the
//! leader while there is no pod loses nothing, since the next leader creates the pod.

use jiff::Timestamp;
use strum::IntoEnumIterator as _;

use crate::controller::durations::totals::DurationGrowth;
use crate::link::durations::{
    APPROVAL_BOUNDS, ApprovalDecision, CALL_BOUNDS, CallDurations, DurationCounts, LoopDurations, MAX_MODELS,
    TURN_BOUNDS,
};
use crate::link::messages::PodReport;

/// Longest name of a model in bytes: the 256 characters of a spec.
const MAX_NAME: usize = 1024;

/// The durations that a pod has reported last.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::controller) struct ReportedDurations {
    /// `None`: there was no report.
    calls: Option<Vec<CallDurations>>,
    /// `None`: there was no report of a worker.
    of_loop: Option<LoopDurations>,
    /// Start of the worker before the present one. A report of it that arrives late adds nothing.
    former_start: Option<Timestamp>,
    /// Whether a report had a gate, open or closed.
    has_gates: bool,
}

impl ReportedDurations {
    /// Of a pod that no other leader has had: its counts begin with 0.
    pub(in crate::controller) fn of_new_pod() -> Self {
        Self {
            calls: Some(Vec::new()),
            of_loop: Some(LoopDurations::default()),
            ..Self::default()
        }
    }

    /// Takes the durations out of a report, and returns what is new. Unless the pod is [new](Self::of_new_pod), the first
    /// report only says where the counts are: a former leader has added those.
    pub(in crate::controller) fn take(&mut self, report: &mut PodReport) -> DurationGrowth {
        let mut growth = DurationGrowth::default();
        let calls = first_models(std::mem::take(&mut report.call_durations));
        if let Some(before) = &self.calls {
            let none = DurationCounts::default();
            growth.calls = calls
                .iter()
                .map(|CallDurations { model, counts }| {
                    let before = before.iter().find(|before| before.model == *model);
                    let before = before.map_or(&none, |before| &before.counts);
                    (model.clone(), counts.since(before))
                })
                .collect();
        }
        self.calls = Some(calls);
        if let Some(said) = &mut report.loop_ {
            let mut durations = std::mem::take(&mut said.durations);
            bound(&mut durations.turns, TURN_BOUNDS);
            bound(&mut durations.tool_runs, CALL_BOUNDS);
            for decision in ApprovalDecision::iter() {
                bound(durations.approvals.of_mut(decision), APPROVAL_BOUNDS);
            }
            let has_gates = !said.gates.is_empty() || !durations.approvals.is_none();
            growth.first_gate = has_gates && !self.has_gates;
            self.has_gates |= has_gates;
            self.take_loop(durations, &mut growth);
        }
        growth
    }

    /// Adds what the loop has more.
    fn take_loop(&mut self, now: LoopDurations, growth: &mut DurationGrowth) {
        let is_late = now.start.is_some() && now.start == self.former_start;
        // The report of a worker that cannot run its loop counts nothing: one that is late must not begin at 0 after it.
        let has_no_counts = now.start.is_none() && self.of_loop.as_ref().is_some_and(|before| before.start.is_some());
        if is_late || has_no_counts {
            return;
        }
        if let Some(before) = &mut self.of_loop {
            // A worker that does not say when it started is of an older version, and recognized by lower counts only.
            if before.start != now.start && now.start.is_some() {
                self.former_start = before.start;
                *before = LoopDurations::default();
            }
            growth.turns = now.turns.since(&before.turns);
            growth.tool_runs = now.tool_runs.since(&before.tool_runs);
            for decision in ApprovalDecision::iter() {
                let (now, before) = (now.approvals.of(decision), before.approvals.of(decision));
                *growth.approvals.of_mut(decision) = now.since(before);
            }
        }
        self.of_loop = Some(now);
    }
}

/// The models of a report, each of them once and no more than there can be, in memory of its own.
fn first_models(said: Vec<CallDurations>) -> Vec<CallDurations> {
    let mut models: Vec<CallDurations> = Vec::new();
    for mut said in said.into_iter().take(MAX_MODELS) {
        if said.model.len() <= MAX_NAME && models.iter().all(|model| model.model != said.model) {
            bound(&mut said.counts, CALL_BOUNDS);
            models.push(said);
        }
    }
    models
}

/// Counts in more buckets than there are mean nothing.
fn bound(counts: &mut DurationCounts, bounds: &[u64]) {
    if counts.buckets.len() > bounds.len() + 1 {
        *counts = DurationCounts::default();
    }
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;

    use super::*;
    use crate::link::messages::LoopReport;

    fn counts(buckets: &[u64]) -> DurationCounts {
        DurationCounts {
            buckets: buckets.into(),
            sum_microseconds: buckets.iter().sum::<u64>() * 1_000,
            last: None,
        }
    }

    fn calls(models: &[(&str, &[u64])]) -> PodReport {
        let models = models.iter().map(|(model, buckets)| CallDurations {
            model: (*model).into(),
            counts: counts(buckets),
        });
        PodReport {
            call_durations: models.collect(),
            ..PodReport::default()
        }
    }

    fn of_loop(turns: &[u64], tool_runs: &[u64]) -> PodReport {
        let durations = LoopDurations {
            turns: counts(turns),
            tool_runs: counts(tool_runs),
            ..LoopDurations::default()
        };
        PodReport {
            loop_: Some(LoopReport {
                durations,
                ..LoopReport::default()
            }),
            ..PodReport::default()
        }
    }

    /// The new calls by model.
    fn new_calls(reported: &mut ReportedDurations, mut report: PodReport) -> Vec<(String, Vec<u64>)> {
        let growth = reported.take(&mut report);
        assert_eq!(report.call_durations, [], "not kept with the report");
        let calls = growth.calls.into_iter();
        calls.map(|(model, counts)| (model, counts.buckets)).collect()
    }

    fn new(calls: &[(&str, &[u64])]) -> Vec<(String, Vec<u64>)> {
        let calls = calls.iter();
        calls
            .map(|(model, buckets)| ((*model).into(), (*buckets).into()))
            .collect()
    }

    #[test]
    fn calls_count_from_the_first_report_on_and_a_repeat_adds_nothing() {
        let mut reported = ReportedDurations::default();
        // Another leader may have added these.
        assert_eq!(new_calls(&mut reported, calls(&[("m", &[5])])), []);
        let report = calls(&[("m", &[5, 2]), ("light", &[1])]);
        let grown = new(&[("m", &[0, 2]), ("light", &[1])]);
        assert_eq!(new_calls(&mut reported, report.clone()), grown);
        let nothing = new(&[("m", &[0, 0]), ("light", &[0])]);
        assert_eq!(new_calls(&mut reported, report), nothing);
        // The gateway has started again, and a call later.
        assert_eq!(new_calls(&mut reported, calls(&[])), []);
        assert_eq!(new_calls(&mut reported, calls(&[("m", &[1])])), new(&[("m", &[1])]));
    }

    #[test]
    fn a_late_report_adds_nothing_and_is_the_new_baseline() {
        let mut reported = ReportedDurations::default();
        assert_eq!(new_calls(&mut reported, calls(&[("m", &[500])])), []);
        assert_eq!(new_calls(&mut reported, calls(&[("m", &[502])])), new(&[("m", &[2])]));
        assert_eq!(new_calls(&mut reported, calls(&[("m", &[501])])), new(&[("m", &[])]));
        assert_eq!(new_calls(&mut reported, calls(&[("m", &[503])])), new(&[("m", &[2])]));
    }

    #[test]
    fn a_model_that_a_report_names_twice_counts_once() {
        let mut reported = ReportedDurations::default();
        assert_eq!(new_calls(&mut reported, calls(&[])), []);
        let twice = calls(&[("m", &[1]), ("m", &[1])]);
        assert_eq!(new_calls(&mut reported, twice), new(&[("m", &[1])]));
    }

    #[test]
    fn the_memory_of_a_long_report_is_released() {
        let mut reported = ReportedDurations::default();
        new_calls(&mut reported, calls(&vec![("m", [].as_slice()); 10_000]));
        // The smallest that a vector grows to.
        assert!(reported.calls.unwrap().capacity() <= 4);
    }

    #[test]
    fn turns_and_tool_runs_count_from_the_first_report_of_a_worker_on() {
        let mut reported = ReportedDurations::default();
        let mut grown = |mut report: PodReport| {
            let growth = reported.take(&mut report);
            assert!(report.loop_.is_none_or(|said| said.durations.is_none()));
            (growth.turns.buckets, growth.tool_runs.buckets)
        };
        assert_eq!(grown(calls(&[])), (vec![], vec![]));
        assert_eq!(grown(of_loop(&[7], &[3])), (vec![], vec![]));
        assert_eq!(grown(of_loop(&[8], &[3, 1])), (vec![1], vec![0, 1]));
        // The gateway has no report of its worker yet.
        assert_eq!(grown(calls(&[])), (vec![], vec![]));
        assert_eq!(grown(of_loop(&[9], &[3, 1])), (vec![1], vec![0, 0]));
    }

    /// Gates that were denied.
    fn denied(buckets: &[u64]) -> PodReport {
        let mut report = of_loop(&[], &[]);
        if let Some(said) = &mut report.loop_ {
            said.durations.approvals.denied = counts(buckets);
        }
        report
    }

    #[test]
    fn waits_for_approvals_count_from_the_first_report_on_and_the_first_gate_is_known_once() {
        let mut reported = ReportedDurations::default();
        let mut grown = |mut report: PodReport| {
            let growth = reported.take(&mut report);
            assert!(report.loop_.is_none_or(|said| said.durations.is_none()));
            (growth.first_gate, growth.approvals.denied.buckets)
        };
        assert_eq!(grown(of_loop(&[], &[])), (false, vec![]));
        let mut open = of_loop(&[], &[]);
        let gate = serde_json::json!({
            "id": "g", "kind": "ToolCallNeedsApproval", "tool": "t", "argumentsHash": "h", "openedAt": "2026-01-02T03:04:05Z",
        });
        open.loop_.as_mut().unwrap().gates = vec![serde_json::from_value(gate).unwrap()];
        assert_eq!(grown(open.clone()), (true, vec![]));
        assert_eq!(grown(open), (false, vec![]));
        assert_eq!(grown(denied(&[0, 2])), (false, vec![0, 2]));
        assert_eq!(grown(denied(&[0, 2])), (false, vec![0, 0]));
        // What another leader may have added only says that there are gates.
        let mut reported = ReportedDurations::default();
        let growth = reported.take(&mut denied(&[5]));
        assert_eq!((growth.first_gate, growth.approvals.is_none()), (true, true));
    }

    /// A worker that started at this second has seen gates approved, and turns completed.
    fn of_worker(second: i64, approved: &[u64], turns: &[u64]) -> PodReport {
        let mut report = of_loop(turns, &[]);
        if let Some(said) = &mut report.loop_ {
            said.durations.start = Some(Timestamp::from_second(second).unwrap());
            said.durations.approvals.approved = counts(approved);
        }
        report
    }

    /// The new approvals and turns.
    fn grown(reported: &mut ReportedDurations, mut report: PodReport) -> (Vec<u64>, Vec<u64>) {
        let growth = reported.take(&mut report);
        (growth.approvals.approved.buckets, growth.turns.buckets)
    }

    #[test]
    fn the_first_report_of_a_new_pod_counts_in_full_and_that_of_a_known_pod_does_not() {
        let first = || of_worker(7, &[0, 2], &[1]);
        let mut of_new = ReportedDurations::of_new_pod();
        assert_eq!(
            grown(&mut of_new, calls(&[])),
            (vec![], vec![]),
            "no worker has reported"
        );
        assert_eq!(grown(&mut of_new, first()), (vec![0, 2], vec![1]));
        assert_eq!(grown(&mut of_new, first()), (vec![0, 0], vec![0]));
        let mut of_new = ReportedDurations::of_new_pod();
        assert_eq!(new_calls(&mut of_new, calls(&[("m", &[5])])), new(&[("m", &[5])]));
        let mut known = ReportedDurations::default();
        assert_eq!(grown(&mut known, first()), (vec![], vec![]));
        assert_eq!(grown(&mut known, of_worker(7, &[0, 3], &[1])), (vec![0, 1], vec![0]));
    }

    #[test]
    fn a_worker_that_starts_again_in_its_pod_counts_in_full() {
        let mut reported = ReportedDurations::default();
        assert_eq!(grown(&mut reported, of_worker(7, &[5], &[9])), (vec![], vec![]));
        // It approved as many as the one before, or fewer.
        assert_eq!(grown(&mut reported, of_worker(8, &[5], &[1])), (vec![5], vec![1]));
        assert_eq!(grown(&mut reported, of_worker(9, &[1], &[])), (vec![1], vec![]));
        // The clock was set back meanwhile.
        assert_eq!(grown(&mut reported, of_worker(2, &[1], &[])), (vec![1], vec![]));
        assert_eq!(grown(&mut reported, of_worker(2, &[2], &[])), (vec![1], vec![]));
    }

    #[test]
    fn a_late_report_of_the_worker_before_and_one_without_counts_change_nothing() {
        let mut reported = ReportedDurations::default();
        assert_eq!(grown(&mut reported, of_worker(7, &[5], &[])), (vec![], vec![]));
        assert_eq!(grown(&mut reported, of_worker(8, &[2], &[])), (vec![2], vec![]));
        assert_eq!(grown(&mut reported, of_worker(7, &[5], &[])), (vec![], vec![]));
        assert_eq!(grown(&mut reported, of_worker(8, &[2], &[])), (vec![0], vec![]));
        // Another one cannot open the journal.
        assert_eq!(grown(&mut reported, of_loop(&[], &[])), (vec![], vec![]));
        assert_eq!(grown(&mut reported, of_worker(8, &[3], &[])), (vec![1], vec![]));
    }

    #[test]
    fn a_report_is_read_up_to_the_maximum_of_models_and_buckets() {
        let mut reported = ReportedDurations::default();
        assert_eq!(new_calls(&mut reported, calls(&[])), []);
        let models = calls(&[("a", &[1]), ("b", &[1]), ("c", &[1])]);
        assert_eq!(new_calls(&mut reported, models), new(&[("a", &[1]), ("b", &[1])]));
        let (max, more) = ([1; CALL_BOUNDS.len() + 1], [1; CALL_BOUNDS.len() + 2]);
        let buckets = calls(&[("x", &max), ("y", &more)]);
        assert_eq!(new_calls(&mut reported, buckets), new(&[("x", &max), ("y", &[])]));
        let (name, longer) = ("n".repeat(MAX_NAME), "n".repeat(MAX_NAME + 1));
        let names = calls(&[(&longer, &[1]), (&name, &[1])]);
        assert_eq!(new_calls(&mut reported, names), new(&[(&name, &[1])]));
        let (max, more) = ([1; TURN_BOUNDS.len() + 1], [1; TURN_BOUNDS.len() + 2]);
        reported.take(&mut of_loop(&[], &[]));
        let (most_waits, more_waits) = ([1; APPROVAL_BOUNDS.len() + 1], [1; APPROVAL_BOUNDS.len() + 2]);
        let mut grown = |buckets: &[u64]| reported.take(&mut denied(buckets)).approvals.denied.buckets;
        assert_eq!(grown(&most_waits), most_waits);
        assert_eq!(grown(&more_waits), [0; 0]);
        assert_eq!(reported.take(&mut of_loop(&max, &[])).turns.buckets, max);
        assert_eq!(reported.take(&mut of_loop(&more, &[])).turns.buckets, [0; 0]);
    }
}
