//! The progress of a loop towards its goal: by tests, or else by artifacts, or else by criteria, or else as a model estimates it.
//!
//! What is measured comes before what is judged or estimated. Files that changed are no measure: how many a goal needs is not
//! known, and commands change them unseen. Artifacts are, since the goal declares them.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::GoalState;
use super::settings::GoalSettings;
use agentloop_api::goal::{ArtifactStatus, GoalEnd, GoalUsage, ProgressSource};

/// The progress of a loop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GoalProgress {
    pub percent: u8,
    /// `None`: nothing is known yet.
    pub source: Option<ProgressSource>,
}

/// The progress of a loop in mode `Goal`, as seen from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GoalView {
    /// Completed steps.
    pub steps: u32,
    pub progress: GoalProgress,
    /// The criteria, and whether each was met at its last check.
    pub criteria: Vec<(String, bool)>,
    /// The artifacts, as they were at their last check.
    pub artifacts: Vec<ArtifactStatus>,
    /// In percent.
    pub last_confidence: Option<u8>,
    /// When the first turn of this run began.
    pub started_at: Option<Timestamp>,
    /// When the loop ended.
    pub ended_at: Option<Timestamp>,
    /// What this run has used, as of the last change of anything else that is seen from outside.
    pub usage: Option<GoalUsage>,
    /// What ended the loop.
    pub end: Option<GoalEnd>,
}

/// Tests of a report.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TestCounts {
    pub(super) passed: u64,
    pub(super) ran: u64,
}

impl GoalState {
    pub(super) fn progress(&self, goal: &GoalSettings) -> GoalProgress {
        let states = goal
            .criteria
            .iter()
            .filter_map(|criterion| self.criteria.get(&criterion.name));
        let (mut passed, mut ran) = (0_u64, 0_u64);
        for tests in states.clone().filter_map(|state| state.tests) {
            passed = passed.saturating_add(tests.passed);
            ran = ran.saturating_add(tests.ran);
        }
        let met = states.clone().filter(|state| state.met).count();
        let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
        let artifacts = self.artifacts.count(&goal.artifacts);
        let (source, percent) = if ran > 0 {
            (ProgressSource::Tests, share(passed, ran))
        } else if self.artifacts.is_known() {
            let percent = share(count(artifacts), count(goal.artifacts.len()));
            (ProgressSource::Artifacts, percent)
        } else if states.count() > 0 {
            (ProgressSource::Criteria, share(count(met), count(goal.criteria.len())))
        } else if let Some(percent) = self.estimate {
            (ProgressSource::Estimate, percent.min(100))
        } else {
            return GoalProgress::default();
        };
        // Whatever is measured, criteria may be unmet and artifacts missing.
        let is_all = met == goal.criteria.len() && artifacts == goal.artifacts.len();
        let max = if is_all { 100 } else { 99 };
        GoalProgress {
            percent: percent.min(max),
            source: Some(source),
        }
    }
}

/// A share in percent, rounded down.
fn share(part: u64, all: u64) -> u8 {
    let percent = u128::from(part) * 100 / u128::from(all.max(1));
    u8::try_from(percent).unwrap_or(100).min(100)
}

#[cfg(test)]
mod tests {
    use super::share;

    #[test]
    fn a_share_is_rounded_down_and_is_at_most_all() {
        for (part, all, percent) in [
            (0, 0, 0),
            (0, 3, 0),
            (2, 3, 66),
            (3, 3, 100),
            (5, 3, 100),
            (u64::MAX, u64::MAX, 100),
        ] {
            assert_eq!(share(part, all), percent, "{part} of {all}");
        }
    }
}
