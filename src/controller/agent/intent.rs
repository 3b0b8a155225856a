//! What is to become of an Agent's pod. Pure: the heart of the step `desired`.
//!
//! The rule above all others: never a second pod while the first may act. The name is fixed, so the API server holds
//! it; an ending pod is waited for; force is used only where the node is known to be gone, or where a pod without a volume
//! has been silent for so long that it can act no more.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use super::context::ReconcilerSettings;
use super::manifest::PodAnnotations;
use super::pod_state::PodState;
use super::reconcile_state::AgentReconcileState;
use super::{liveness, requests};
use crate::api::agent::UpdateStrategy;
use crate::api::status::{LoopOutcome, LoopState, PauseReason};
use crate::api::tools::MAX_TIMEOUT_SECONDS;
use crate::api::{Agent, AgentStatus};
use crate::controller::pod_sessions::ReceivedReport;

/// How long a pod has to say that it stopped before a suspended Agent's pod is deleted.
pub(super) const SUSPEND_PATIENCE: Duration = Duration::from_secs(3);
/// How long after the grace period an ending pod is given before its node is looked at.
const OVERDUE: Duration = Duration::from_secs(30);

/// Why there is to be no pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RestReason {
    /// `spec.suspend`.
    Suspended,
    /// The agent ended its loop itself.
    Completed,
}

/// Why a pod is deleted so that another can follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplaceReason {
    /// The spec changed.
    Outdated,
    /// Its loop stopped and is to go on.
    Stopped,
    /// It ended for good: evicted, or its node shut down.
    Ended,
    /// It was made for an earlier Agent of the same name.
    Foreign,
}

/// What is to become of the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Intent {
    /// There is none: make it.
    Create,
    /// There is none, and none is made before this moment.
    CreateLater(Timestamp),
    /// It is right.
    Keep,
    /// It is of an older spec; it stays until its loop is idle (true) or somebody deletes it (false).
    KeepOutdated(bool),
    /// Delete it; another follows.
    Replace(ReplaceReason),
    /// It was told to suspend: wait until it says that it stopped, or until this moment.
    AwaitStop(Timestamp),
    /// The loop has ended; first write that down, then delete the pod.
    RecordOutcome,
    /// Delete it; none follows.
    Remove(RestReason),
    /// There is none, and none is wanted.
    Rest(RestReason),
    /// It is ending: wait.
    Ending {
        /// None follows.
        rest: Option<RestReason>,
        /// It should be gone long since: look at its node.
        overdue: bool,
    },
}

/// What the decision is made of.
pub(super) struct PodSituation<'a> {
    pub(super) agent: &'a Agent,
    pub(super) status: &'a AgentStatus,
    pub(super) pod: Option<&'a PodState>,
    pub(super) marks: PodAnnotations<'a>,
    pub(super) heard: Option<&'a ReceivedReport>,
    pub(super) last_contact: Option<Timestamp>,
    pub(super) memory: &'a AgentReconcileState,
    pub(super) settings: &'a ReconcilerSettings,
    pub(super) now: Timestamp,
}

impl PodSituation<'_> {
    /// The decision.
    pub(super) fn intent(&self) -> Intent {
        match self.pod {
            None => self.without_pod(),
            Some(pod) if pod.owner.as_deref() != self.agent.metadata.uid.as_deref() && !pod.ending() => {
                Intent::Replace(ReplaceReason::Foreign)
            }
            Some(pod) if pod.ending() => Intent::Ending {
                rest: self.rest_reason(),
                overdue: pod.gone_by.is_some_and(|gone_by| self.now > gone_by + OVERDUE),
            },
            Some(pod) => self.with_pod(pod),
        }
    }

    /// Whether the pod can act no more, by its silence alone, and shares nothing with the next one. A pod of another spec may
    /// have tools that take as long as any may.
    pub(super) fn is_spent(&self) -> bool {
        let spec = &self.agent.spec;
        let shares = !spec.storage.ephemeral || spec.workspace.is_some();
        let Some(pod) = self.pod.filter(|_| !shares) else {
            return false;
        };
        let longest_run = if self.marks.outdated(self.agent) {
            MAX_TIMEOUT_SECONDS
        } else {
            self.agent.spec.tools.longest_timeout_seconds()
        };
        let listening = self.memory.listening.as_ref().filter(|(uid, _)| *uid == pod.uid);
        listening.is_some_and(|(_, since)| {
            let longest_run = SignedDuration::from_secs(longest_run.into());
            liveness::can_act_no_more(self.last_contact, *since, longest_run, self.now)
        })
    }

    fn without_pod(&self) -> Intent {
        match (self.rest_reason(), self.memory.no_pod_before) {
            (Some(rest), _) => Intent::Rest(rest),
            (None, Some(moment)) if moment > self.now => Intent::CreateLater(moment),
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
        let report = self.heard.and_then(|heard| heard.report.loop_.as_ref());
        let outcome = report.is_some_and(|report| report.outcome.is_some());
        let recorded = self.recorded_outcome() && self.recorded_epoch() == pod.epoch;
        let unheard = report.is_none();
        if (outcome || unheard) && recorded {
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
        if suspended {
            return Intent::Replace(ReplaceReason::Stopped);
        }
        if outdated {
            return Intent::KeepOutdated(strategy == UpdateStrategy::WhenIdle);
        }
        Intent::Keep
    }

    /// The directive goes out first; the pod is deleted once it said that it stopped, or does not answer.
    fn suspend(&self, pod: &PodState) -> Intent {
        let stopped = self
            .heard
            .and_then(|heard| heard.report.loop_.as_ref())
            .is_some_and(|report| report.state == LoopState::Stopped);
        let patience = SUSPEND_PATIENCE;
        let asked = self.memory.suspend_asked.unwrap_or(self.now);
        let listens = self.last_contact.is_some();
        if listens && !stopped && !pod.ended && self.now < asked + patience {
            return Intent::AwaitStop(asked + patience);
        }
        Intent::Remove(RestReason::Suspended)
    }

    /// Why no pod is wanted, if so.
    fn rest_reason(&self) -> Option<RestReason> {
        if self.agent.spec.suspend {
            return Some(RestReason::Suspended);
        }
        (self.recorded_outcome() && !self.restart_wanted()).then_some(RestReason::Completed)
    }

    /// A loop that ended starts again for a new spec or a new request; an idle one has nothing to resume.
    fn restart_wanted(&self) -> bool {
        let open = requests::open(self.agent, self.status);
        let idle = self.outcome() == Some(LoopOutcome::Idle);
        self.status.observed_generation != self.agent.metadata.generation
            || open.wake.is_some()
            || open.resume.is_some() && !idle
    }

    fn outcome(&self) -> Option<LoopOutcome> {
        self.status.r#loop.as_ref().and_then(|status| status.outcome)
    }

    fn recorded_outcome(&self) -> bool {
        self.outcome().is_some()
    }

    fn recorded_epoch(&self) -> i64 {
        self.status.r#loop.as_ref().map_or(0, |status| status.epoch)
    }

    /// Whether the pod is of another spec; with `Immediate` also of another image.
    fn outdated(&self, pod: &PodState) -> bool {
        self.marks.outdated(self.agent)
            || self.agent.spec.pod.update_strategy == UpdateStrategy::Immediate
                && pod.image.as_ref().is_some_and(|image| *image != self.settings.image)
    }

    /// Whether nothing is lost by ending the pod now: no turn is being taken.
    fn idle(&self, pod: &PodState) -> bool {
        use super::pod_state::PodReason;
        let report = self.heard.and_then(|heard| heard.report.loop_.as_ref());
        match report {
            Some(report) => matches!(
                report.state,
                LoopState::Sleeping | LoopState::Paused | LoopState::Stopped
            ),
            // Nobody spoke yet: a pod that cannot start is idle, one that runs may be in a turn.
            None => pod.reason != PodReason::Running,
        }
    }
}
