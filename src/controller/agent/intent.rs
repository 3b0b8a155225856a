//! Decides what to do with an Agent's pod. Pure.
//!
//! The invariant: never start a second pod while the first one may act. The pod's name is fixed, so the API server
//! enforces it. The controller waits for a terminating pod. It forces a deletion only if the node is known to be gone,
//! or if a pod without persistent state has been silent for so long that it can no longer act.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use super::context::ReconcilerSettings;
use super::snapshot::AgentSnapshot;
use super::{liveness, requests};
use crate::api::Agent;
use crate::api::agent::UpdateStrategy;
use crate::api::status::{LoopOutcome, LoopState, PauseReason};
use crate::api::tools::MAX_TIMEOUT_SECONDS;
use crate::controller::runtime::pod_state::{PodReason, PodState};
use crate::link::messages::LoopReport;

/// How long a pod may take to report that it stopped before the pod of a suspended Agent is deleted.
pub(super) const SUSPEND_GRACE_PERIOD: Duration = Duration::from_secs(3);
/// How long a running pod that this leader has not heard yet may take to attach before it is deleted for a suspend. A
/// gateway without a link tries again every five seconds at most, and a new leader becomes reachable within seconds. A pod
/// that is deleted earlier cannot report its last calls.
const ATTACH_PERIOD: SignedDuration = SignedDuration::from_secs(15);
/// How long after its grace period a terminating pod is overdue, so that its node is checked.
const OVERDUE: Duration = Duration::from_secs(30);

/// Why no pod is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RestReason {
    /// `spec.suspend`.
    Suspended,
    Completed,
}

/// Why a pod is deleted and recreated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplaceReason {
    Outdated,
    /// Its loop stopped and should resume.
    Stopped,
    /// It terminated permanently: evicted, or its node shut down.
    Ended,
    /// It was created for an earlier Agent with the same name.
    Foreign,
}

/// The decision about the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Intent {
    /// No pod exists: create one.
    Create,
    /// No pod exists; create one no earlier than this time (backoff).
    CreateLater(Timestamp),
    /// The pod matches the spec.
    Keep,
    /// The pod runs an older spec. It stays until its loop is idle (true) or until a user deletes it (false).
    KeepOutdated(bool),
    /// Delete the pod; a new one is created afterwards.
    Replace(ReplaceReason),
    /// The pod was directed to suspend: wait until it reports that it stopped, but no longer than until this time.
    AwaitStop(Timestamp),
    /// The loop has ended: write the outcome to the status first, delete the pod afterwards. A crash in between repeats
    /// the write and loses nothing.
    RecordOutcome,
    /// Delete the pod; no other is created.
    Remove(RestReason),
    /// No pod exists, and none is wanted.
    Rest(RestReason),
    /// The pod is terminating: wait.
    Ending {
        /// Why no other pod is created; `None`: one is created.
        rest: Option<RestReason>,
        /// It should be gone by now: check its node.
        overdue: bool,
    },
}

/// The input of the decision.
pub(super) struct PodSituation<'a> {
    pub(super) agent: &'a Agent,
    pub(super) snapshot: &'a AgentSnapshot,
    pub(super) settings: &'a ReconcilerSettings,
}

impl PodSituation<'_> {
    pub(super) fn intent(&self) -> Intent {
        match &self.snapshot.pod {
            None => self.without_pod(),
            Some(pod) if pod.owner.as_deref() != self.agent.metadata.uid.as_deref() && !pod.ending() => {
                Intent::Replace(ReplaceReason::Foreign)
            }
            Some(pod) if pod.ending() => Intent::Ending {
                rest: self.rest_reason(),
                overdue: pod.gone_by.is_some_and(|gone_by| self.snapshot.now > gone_by + OVERDUE),
            },
            Some(pod) => self.with_pod(pod),
        }
    }

    /// Whether the pod can no longer act, judging by its silence alone, and shares no volume with its successor. A pod
    /// of another spec may have other tools, so the largest timeout that the API allows applies.
    pub(super) fn is_spent(&self) -> bool {
        let spec = &self.agent.spec;
        let shares = !spec.storage.ephemeral || spec.workspace.is_some();
        let Some(pod) = self.snapshot.pod.as_ref().filter(|_| !shares) else {
            return false;
        };
        let longest_run = if self.snapshot.annotations().outdated(self.agent) {
            MAX_TIMEOUT_SECONDS
        } else {
            self.agent.spec.tools.longest_timeout_seconds()
        };
        let listening = self
            .snapshot
            .memory
            .listening
            .as_ref()
            .filter(|(uid, _)| *uid == pod.uid);
        listening.is_some_and(|(_, since)| {
            let longest_run = SignedDuration::from_secs(longest_run.into());
            liveness::can_act_no_more(self.snapshot.last_contact, *since, longest_run, self.snapshot.now)
        })
    }

    fn without_pod(&self) -> Intent {
        match (self.rest_reason(), self.snapshot.memory.no_pod_before) {
            (Some(rest), _) => Intent::Rest(rest),
            (None, Some(moment)) if moment > self.snapshot.now => Intent::CreateLater(moment),
            (None, _) => Intent::Create,
        }
    }

    fn with_pod(&self, pod: &PodState) -> Intent {
        if self.agent.spec.suspend {
            return self.suspend(pod);
        }
        if pod.ended {
            return Intent::Replace(ReplaceReason::Ended);
        }
        let outdated = self.outdated(pod);
        let strategy = self.agent.spec.pod.update_strategy;
        if outdated && (strategy == UpdateStrategy::Immediate || strategy == UpdateStrategy::WhenIdle && self.idle(pod))
        {
            return Intent::Replace(ReplaceReason::Outdated);
        }
        let report = self.report();
        let outcome = report.is_some_and(|report| report.outcome.is_some());
        let recorded = self.recorded_outcome() && self.recorded_epoch() == pod.epoch;
        // Delete the pod only if its outcome is in the status already: otherwise a crash of the controller between the
        // deletion and the write would lose the outcome, and the completed loop would be started again.
        let unreported = report.is_none();
        if (outcome || unreported) && recorded {
            return if self.restart_wanted() {
                Intent::Replace(ReplaceReason::Stopped)
            } else {
                Intent::Remove(RestReason::Completed)
            };
        }
        if outcome {
            return Intent::RecordOutcome;
        }
        let suspended = report.is_some_and(|report| {
            report.state == LoopState::Stopped
                && report
                    .reasons
                    .iter()
                    .any(|held| held.reason == PauseReason::SuspendedBySpec)
        });
        // The spec no longer asks for a suspend, but this pod has stopped for one: only a new pod resumes the loop.
        if suspended {
            return Intent::Replace(ReplaceReason::Stopped);
        }
        if outdated {
            return Intent::KeepOutdated(strategy == UpdateStrategy::WhenIdle);
        }
        Intent::Keep
    }

    /// Suspends in two steps: the directive first, so that the loop can stop cleanly; then the deletion, once the pod has
    /// reported that it stopped, or [`SUSPEND_GRACE_PERIOD`] is over, or [`ATTACH_PERIOD`] for a running pod without contact.
    fn suspend(&self, pod: &PodState) -> Intent {
        let (memory, now) = (&self.snapshot.memory, self.snapshot.now);
        let stopped = self.report().is_some_and(|report| report.state == LoopState::Stopped);
        if stopped || pod.ended {
            return Intent::Remove(RestReason::Suspended);
        }
        let patience = if self.snapshot.last_contact.is_some() {
            Some(memory.suspend_asked.unwrap_or(now) + SUSPEND_GRACE_PERIOD)
        } else if pod.reason == PodReason::Running {
            let listening = memory.listening.as_ref().filter(|(uid, _)| *uid == pod.uid);
            Some(listening.map_or(now, |(_, since)| *since) + ATTACH_PERIOD)
        } else {
            None
        };
        match patience.filter(|moment| now < *moment) {
            Some(moment) => Intent::AwaitStop(moment),
            None => Intent::Remove(RestReason::Suspended),
        }
    }

    /// The reason why no pod is wanted, if any.
    fn rest_reason(&self) -> Option<RestReason> {
        if self.agent.spec.suspend {
            return Some(RestReason::Suspended);
        }
        (self.recorded_outcome() && !self.restart_wanted()).then_some(RestReason::Completed)
    }

    /// A completed loop restarts for a new spec or an open request, and one that was scaled to zero for a task. An idle one
    /// does not restart for a resume request: it has nothing to resume. None restarts while a request to stop is open.
    fn restart_wanted(&self) -> bool {
        let open = requests::open(self.agent, self.snapshot.status());
        if open.stop.is_some() {
            return false;
        }
        let scaled = self.outcome() == Some(LoopOutcome::ScaledToZero);
        if scaled && self.snapshot.is_wanted {
            return true;
        }
        let idle = scaled || self.outcome() == Some(LoopOutcome::Idle);
        self.snapshot.status().observed_generation != self.agent.metadata.generation
            || open.wake.is_some()
            || open.resume.is_some() && !idle
    }

    fn report(&self) -> Option<&LoopReport> {
        self.snapshot.report.as_ref()?.report.loop_.as_ref()
    }

    fn outcome(&self) -> Option<LoopOutcome> {
        self.snapshot.status().r#loop.as_ref().and_then(|status| status.outcome)
    }

    fn recorded_outcome(&self) -> bool {
        self.outcome().is_some()
    }

    fn recorded_epoch(&self) -> i64 {
        self.snapshot.status().r#loop.as_ref().map_or(0, |status| status.epoch)
    }

    /// Whether the pod was created from another spec or, with `Immediate`, from another image.
    fn outdated(&self, pod: &PodState) -> bool {
        self.snapshot.annotations().outdated(self.agent)
            || self.agent.spec.pod.update_strategy == UpdateStrategy::Immediate
                && pod.image.as_ref().is_some_and(|image| *image != self.settings.image)
    }

    /// Whether the pod can be deleted without interrupting a turn.
    fn idle(&self, pod: &PodState) -> bool {
        let report = self.report();
        match report {
            Some(report) => matches!(
                report.state,
                LoopState::Sleeping | LoopState::Paused | LoopState::Stopped
            ),
            // Before the first report, a pod that cannot start is idle; one that runs may be in a turn.
            None => pod.reason != PodReason::Running,
        }
    }
}
