//! Reads what this process already has about an Agent: the pod of the watch, the session of the pod, the ledger, the
//! Sensors, the reconciler's memory, the clock and the queue. Sends no request and decides nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use kube::ResourceExt;

use super::manifest::PodAnnotations;
use super::reconcile::{ReconcileContext, ReconciledAgent};
use super::reconcile_state::AgentReconcileState;
use crate::api::AgentStatus;
use crate::controller::budget::assignment::{CallObstacle, WindowedLimit};
use crate::controller::budget::shares::LimitShares;
use crate::controller::pod_sessions::{LivePod, ReceivedReport};
use crate::controller::runtime::pod_state::PodState;
use crate::controller::runtime::status_writer::{LastStatus, last_status};
use crate::controller::runtime::watched_pod::WatchedPod;

/// The first half of an observation.
pub(super) struct AgentSnapshot {
    pub(super) now: Timestamp,
    pub(super) memory: AgentReconcileState,
    pub(super) last: LastStatus<AgentStatus>,
    pub(super) pod: Option<PodState>,
    /// The object that [`Self::pod`] was read from.
    pub(super) watched: Option<Arc<WatchedPod>>,
    /// The last report of the pod.
    pub(super) report: Option<ReceivedReport>,
    /// The last report of another pod, whose session still exists: the pod is gone.
    pub(super) final_report: Option<(LivePod, ReceivedReport)>,
    /// Something for the Agent has arrived while it had no pod.
    pub(super) is_wanted: bool,
    /// The last contact with the pod.
    pub(super) last_contact: Option<Timestamp>,
    /// The token limits that apply.
    pub(super) windows: Vec<WindowedLimit>,
    /// What the ledger says; `None` until the AgentBudgets are listed.
    pub(super) limits: Option<ObservedLimits>,
    pub(super) sensors: ObservedSensors,
    /// Whether other Agents wait for urgent work, such as the creation of their pods.
    pub(super) others_wait: bool,
}

/// The state of an Agent's limits in the ledger.
pub(super) struct ObservedLimits {
    /// Why it may make no call at all.
    pub(super) obstacle: Option<CallObstacle>,
    /// What remains of its limits.
    pub(super) shares: LimitShares,
}

/// The Sensors that deliver to an Agent.
pub(super) struct ObservedSensors {
    /// Their names, by UID.
    pub(super) names: BTreeMap<String, String>,
    /// Problems of those with their own pod, by name; `None` until all of them were read.
    pub(super) problems: Option<Vec<(String, String)>>,
}

impl AgentSnapshot {
    pub(super) fn take(ctx: &ReconcileContext, subject: &ReconciledAgent<'_>) -> Self {
        let (shared, key) = (&ctx.shared, &subject.key);
        let now = (shared.clock)();
        let memory = shared.memory.load(key, subject.uid, now);
        // The watch may not have delivered the pod yet that was just created.
        let watched = ctx.scopes.pod(key).or_else(|| memory.created.clone());
        let pod = watched.as_deref().map(|pod| PodState::of(pod));
        let uid = pod.as_ref().map(|pod| pod.uid.as_str());
        Self {
            now,
            last: last_status(
                subject.agent.resource_version(),
                subject.agent.status.as_ref(),
                memory.written.as_deref(),
            ),
            report: uid.and_then(|uid| shared.loops.last_report(key, uid)),
            is_wanted: shared.loops.is_wanted(key),
            final_report: shared.loops.final_report(key, uid),
            last_contact: uid.and_then(|uid| shared.loops.last_contact(key, uid)),
            windows: shared.budgets.windows(key),
            limits: limits(ctx, subject),
            sensors: ObservedSensors {
                names: shared.sensors.names(key),
                problems: shared.sensors.pod_problems(key),
            },
            others_wait: ctx.scopes.queue.has_urgent(),
            pod,
            watched,
            memory,
        }
    }

    pub(super) fn status(&self) -> &AgentStatus {
        &self.last.status
    }

    /// The epoch of the next pod: higher than that of every earlier one.
    pub(super) fn next_epoch(&self) -> i64 {
        let recorded = self.status().r#loop.as_ref().map_or(0, |status| status.epoch);
        recorded.max(self.memory.epoch) + 1
    }

    pub(super) fn annotations(&self) -> PodAnnotations<'_> {
        PodAnnotations(self.watched.as_ref().and_then(|pod| pod.metadata.annotations.as_ref()))
    }
}

fn limits(ctx: &ReconcileContext, subject: &ReconciledAgent<'_>) -> Option<ObservedLimits> {
    let budgets = &ctx.shared.budgets;
    budgets.has_decided().then(|| ObservedLimits {
        obstacle: budgets.decision(&subject.key).and_then(|decision| decision.obstacle),
        shares: budgets.shares(&subject.key),
    })
}
