//! How long model calls, turns and tool runs took, and how long requests for approval waited, as counts by bucket that pods
//! report.
//!
//! Each process counts from its start, in a fixed number of buckets. The reader adds up what is new.

use std::time::Duration;

use agentloop_api::first_elements::first_elements;
use serde::{Deserialize, Serialize};
use strum::{AsRefStr, EnumIter, IntoStaticStr};

/// Upper bounds of the buckets of model calls and tool runs in milliseconds: those of OpenTelemetry's
/// `gen_ai.client.operation.duration`. Part of the protocol, as [`TURN_BOUNDS`] is.
pub const CALL_BOUNDS: &[u64] = &[
    10, 20, 40, 80, 160, 320, 640, 1_280, 2_560, 5_120, 10_240, 20_480, 40_960, 81_920,
];
/// Upper bounds of the buckets of turns in milliseconds: those of `gen_ai.invoke_agent.duration`.
pub const TURN_BOUNDS: &[u64] = &[
    100, 200, 400, 800, 1_600, 3_200, 6_400, 12_800, 25_600, 51_200, 102_400, 204_800, 409_600,
];
/// Upper bounds of the buckets of waits for approvals in milliseconds: from a second over the default time of an hour to the
/// longest one, a week.
pub const APPROVAL_BOUNDS: &[u64] = &[
    1_000,
    10_000,
    60_000,
    300_000,
    900_000,
    3_600_000,
    14_400_000,
    43_200_000,
    86_400_000,
    259_200_000,
    604_800_000,
];
/// The longest mean of the durations that a reader adds, in microseconds: 30 days.
pub const MAX_MEAN: u64 = 30 * 24 * 3600 * 1_000_000;
/// Maximum number of models of a report: an Agent has a model and a light model.
pub const MAX_MODELS: usize = 2;
/// Maximum number of counts that a reader keeps: one more than there are buckets, so that it sees that there are too many.
const READ_BUCKETS: usize = CALL_BOUNDS.len() + 2;

/// Durations since the start of the process that counts them.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct DurationCounts {
    /// Number of durations in each bucket, in the order of its upper bound, which is included. The last bucket has no
    /// bound. Zeros at the end are left out.
    #[serde(deserialize_with = "first_elements::<READ_BUCKETS, _, _>")]
    pub buckets: Vec<u64>,
    /// Sum of all durations in microseconds.
    pub sum_microseconds: u64,
    /// The duration that was counted last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last: Option<LastDuration>,
}

/// A duration, and the turn that it belongs to.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct LastDuration {
    /// Its length in microseconds.
    pub microseconds: u64,
    /// The member of the Agent.
    pub member: u16,
    /// Number of the turn.
    pub turn: i64,
}

/// How long the answered calls of a model took.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct CallDurations {
    /// Name of the model.
    pub model: String,
    /// Their durations, in buckets of [`CALL_BOUNDS`].
    pub counts: DurationCounts,
}

/// How a gate closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, EnumIter, AsRefStr, IntoStaticStr)]
pub enum ApprovalDecision {
    /// A person approved it.
    Approved,
    /// A person denied it.
    Denied,
    /// There was no answer in time.
    Expired,
    /// What it was for no longer needs an approval.
    Withdrawn,
    /// Another request took its place.
    Superseded,
}

/// How long gates were open, by how they closed, in buckets of [`APPROVAL_BOUNDS`].
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct ApprovalWaits {
    /// A person approved them.
    #[serde(skip_serializing_if = "DurationCounts::is_none")]
    pub approved: DurationCounts,
    /// A person denied them.
    #[serde(skip_serializing_if = "DurationCounts::is_none")]
    pub denied: DurationCounts,
    /// There was no answer in time.
    #[serde(skip_serializing_if = "DurationCounts::is_none")]
    pub expired: DurationCounts,
    /// What they were for no longer needed an approval.
    #[serde(skip_serializing_if = "DurationCounts::is_none")]
    pub withdrawn: DurationCounts,
    /// Other requests took their places.
    #[serde(skip_serializing_if = "DurationCounts::is_none")]
    pub superseded: DurationCounts,
}

impl ApprovalWaits {
    /// Whether nothing was counted.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// The gates that closed in this way.
    #[must_use]
    pub fn of(&self, decision: ApprovalDecision) -> &DurationCounts {
        match decision {
            ApprovalDecision::Approved => &self.approved,
            ApprovalDecision::Denied => &self.denied,
            ApprovalDecision::Expired => &self.expired,
            ApprovalDecision::Withdrawn => &self.withdrawn,
            ApprovalDecision::Superseded => &self.superseded,
        }
    }

    /// The same, to change.
    pub fn of_mut(&mut self, decision: ApprovalDecision) -> &mut DurationCounts {
        match decision {
            ApprovalDecision::Approved => &mut self.approved,
            ApprovalDecision::Denied => &mut self.denied,
            ApprovalDecision::Expired => &mut self.expired,
            ApprovalDecision::Withdrawn => &mut self.withdrawn,
            ApprovalDecision::Superseded => &mut self.superseded,
        }
    }
}

/// How long the turns and tool runs of a loop took, and how long its gates were open.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct LoopDurations {
    /// When the worker that counts them started, by its clock. The reader only compares it: another time is another worker,
    /// whose counts begin with 0. Absent from a worker of an older version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<jiff::Timestamp>,
    /// Completed turns, in buckets of [`TURN_BOUNDS`].
    pub turns: DurationCounts,
    /// Tool runs, in buckets of [`CALL_BOUNDS`].
    pub tool_runs: DurationCounts,
    /// Closed gates.
    #[serde(skip_serializing_if = "ApprovalWaits::is_none")]
    pub approvals: ApprovalWaits,
}

impl LoopDurations {
    /// Whether nothing was counted.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

impl DurationCounts {
    /// Counts a duration of this turn, a member and a number.
    pub fn observe(&mut self, bounds: &[u64], took: Duration, (member, turn): (u16, i64)) {
        let bucket = bucket_of(bounds, took);
        if self.buckets.len() <= bucket {
            self.buckets.resize(bucket + 1, 0);
        }
        if let Some(count) = self.buckets.get_mut(bucket) {
            *count = count.saturating_add(1);
        }
        let microseconds = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.sum_microseconds = self.sum_microseconds.saturating_add(microseconds);
        self.last = Some(LastDuration {
            microseconds,
            member,
            turn,
        });
    }

    /// Whether nothing was counted.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Number of durations.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets
            .iter()
            .fold(0, |sum: u64, count| sum.saturating_add(*count))
    }

    /// What is new since `before`: the difference, or nothing if a count is lower than before. Then the process has
    /// started again since, or this was reported earlier and arrives late: adding all of it would count most of it twice.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let was = |at: usize| before.buckets.get(at).copied().unwrap_or_default();
        let places = 0..self.buckets.len().max(before.buckets.len());
        let now = |at: usize| self.buckets.get(at).copied().unwrap_or_default();
        let is_lower =
            self.sum_microseconds < before.sum_microseconds || places.into_iter().any(|at| now(at) < was(at));
        if is_lower {
            return Self::default();
        }
        let buckets = self.buckets.iter().enumerate();
        Self {
            buckets: buckets.map(|(at, count)| count.saturating_sub(was(at))).collect(),
            sum_microseconds: self.sum_microseconds.saturating_sub(before.sum_microseconds),
            last: self.last,
        }
    }
}

/// The bucket of a duration. A bound is included, to its last nanosecond.
#[must_use]
pub fn bucket_of(bounds: &[u64], took: Duration) -> usize {
    let found = bounds.iter().position(|bound| took <= Duration::from_millis(*bound));
    found.unwrap_or(bounds.len())
}

#[cfg(test)]
mod tests {
    use strum::IntoEnumIterator as _;

    use super::*;
    use crate::messages::PodReport;

    fn counts(buckets: &[u64], sum_microseconds: u64) -> DurationCounts {
        DurationCounts {
            buckets: buckets.into(),
            sum_microseconds,
            last: None,
        }
    }

    #[test]
    fn a_bound_is_in_its_bucket_and_a_nanosecond_more_is_in_the_next() {
        for bounds in [CALL_BOUNDS, TURN_BOUNDS, APPROVAL_BOUNDS] {
            assert!(bounds.len() + 1 < READ_BUCKETS);
            assert!(bounds.is_sorted());
            for (at, bound) in bounds.iter().enumerate() {
                let bound = Duration::from_millis(*bound);
                assert_eq!(bucket_of(bounds, bound), at);
                assert_eq!(bucket_of(bounds, bound + Duration::from_nanos(1)), at + 1);
            }
            assert_eq!(bucket_of(bounds, Duration::ZERO), 0);
            assert_eq!(bucket_of(bounds, Duration::MAX), bounds.len());
        }
    }

    #[test]
    fn durations_are_counted_without_zeros_at_the_end() {
        let mut durations = DurationCounts::default();
        durations.observe(CALL_BOUNDS, Duration::from_millis(20), (0, 1));
        assert_eq!(durations.buckets, [0, 1]);
        durations.observe(CALL_BOUNDS, Duration::from_millis(5), (2, 7));
        assert_eq!(durations.buckets, [1, 1]);
        assert_eq!((durations.count(), durations.sum_microseconds), (2, 25_000));
        let last = LastDuration {
            microseconds: 5_000,
            member: 2,
            turn: 7,
        };
        assert_eq!(durations.last, Some(last));
        durations.observe(CALL_BOUNDS, Duration::from_secs(82), (0, 8));
        assert_eq!(durations.buckets.len(), CALL_BOUNDS.len() + 1);
        // A length that no number holds.
        durations.observe(CALL_BOUNDS, Duration::MAX, (0, 9));
        assert_eq!(durations.sum_microseconds, u64::MAX);
    }

    #[test]
    fn new_counts_are_the_difference_and_none_if_a_count_is_lower() {
        let before = counts(&[2, 1], 30_000);
        assert_eq!(before.since(&before), counts(&[0, 0], 0));
        assert_eq!(counts(&[2, 3, 1], 95_000).since(&before), counts(&[0, 2, 1], 65_000));
        // Lower in one bucket, in the number of buckets, or in the sum.
        for lower in [
            counts(&[1, 5], 40_000),
            counts(&[9], 90_000),
            counts(&[2, 1], 29_999),
            counts(&[], 0),
        ] {
            assert_eq!(lower.since(&before), DurationCounts::default());
        }
    }

    /// A list of this many elements.
    fn list(element: &str, length: usize) -> String {
        format!("[{}]", vec![element; length].join(","))
    }

    #[test]
    fn oversized_lists_use_no_memory() {
        let models = |length| -> PodReport {
            let models = list("{}", length);
            serde_json::from_str(&format!(r#"{{"callDurations": {models}, "epoch": 1}}"#)).unwrap()
        };
        for length in [MAX_MODELS - 1, MAX_MODELS] {
            assert_eq!(models(length).call_durations.len(), length);
        }
        for length in [MAX_MODELS + 1, 80_000] {
            let report = models(length);
            assert_eq!((report.call_durations.len(), report.epoch), (MAX_MODELS, 1));
            // The smallest that a vector grows to.
            assert!(report.call_durations.capacity() <= 4);
        }
        let buckets = |length| -> Vec<u64> {
            let buckets = list("1", length);
            let counts = format!(r#"{{"buckets": {buckets}, "sumMicroseconds": 1}}"#);
            serde_json::from_str::<DurationCounts>(&counts).unwrap().buckets
        };
        for length in [READ_BUCKETS - 1, READ_BUCKETS] {
            assert_eq!(buckets(length), vec![1; length]);
        }
        for length in [READ_BUCKETS + 1, 80_000] {
            let buckets = buckets(length);
            assert_eq!(buckets.len(), READ_BUCKETS, "more than there are");
            assert!(buckets.capacity() <= READ_BUCKETS.next_power_of_two());
        }
    }

    /// Older readers know nothing of waits for approvals, and older pods say nothing of them.
    #[test]
    fn waits_for_approvals_are_left_out_while_there_are_none_and_bounded_like_the_others() {
        let mut durations = LoopDurations::default();
        let text = serde_json::to_string(&durations).unwrap();
        assert!(!text.contains("approvals"), "{text}");
        assert_eq!(serde_json::from_str::<LoopDurations>(&text).unwrap(), durations);
        for (at, decision) in ApprovalDecision::iter().enumerate() {
            let waits = durations.approvals.of_mut(decision);
            waits.observe(APPROVAL_BOUNDS, Duration::from_secs(10), (0, 1));
            assert_eq!(
                durations.approvals.of(decision).buckets,
                [0, 1],
                "{}",
                decision.as_ref()
            );
            let counted = ApprovalDecision::iter().map(|decision| durations.approvals.of(decision).count());
            assert_eq!(counted.sum::<u64>(), u64::try_from(at).unwrap() + 1);
        }
        let text = serde_json::to_string(&durations).unwrap();
        assert_eq!(serde_json::from_str::<LoopDurations>(&text).unwrap(), durations);
        let hostile = format!(r#"{{"approvals": {{"denied": {{"buckets": {}}}}}}}"#, list("1", 80_000));
        let read: LoopDurations = serde_json::from_str(&hostile).unwrap();
        assert_eq!(read.approvals.denied.buckets.len(), READ_BUCKETS);
    }

    #[test]
    fn a_report_whose_durations_are_no_list_is_refused() {
        assert!(serde_json::from_str::<PodReport>(r#"{"callDurations": {}}"#).is_err());
        assert!(serde_json::from_str::<DurationCounts>(r#"{"buckets": [-1]}"#).is_err());
    }
}
