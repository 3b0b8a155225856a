//! One reconcile: runs the five steps in order and handles their errors.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::NamespaceResourceScope;
use kube::api::Api;
use kube::{Client, Resource, ResourceExt};

use super::apply::apply;
use super::context::{ReconcileObserver, ReconcilerSettings};
use super::desired::desired;
use super::intent::Intent;
use super::observe::observe;
use super::publish::{ReconcileOutcome, publish, unreadable};
use super::reconcile_state::{AgentReconcileState, ReconcileStates};
use super::scopes::AgentScopes;
use super::scripts::ScriptChecker;
use crate::api::{Agent, AgentStatus};
use crate::controller::budget::BudgetLedger;
use crate::controller::pod_sessions::{AgentKey, PodSessions};
use crate::controller::runtime::backoff;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::guarded::{GuardedObject, InvalidObject};
use crate::controller::runtime::namespace_objects::NamespaceObjects;
use crate::controller::runtime::queue::Priority;
use crate::controller::runtime::status_writer::lags;
use crate::controller::runtime::{EventSink, ReconcileResult, Reconciler, Requeue, WallClock};
use crate::controller::sensor::SensorRegistry;

/// Interval between checks of an obstacle that is not watched.
const OBSTACLE_RECHECK: Duration = Duration::from_secs(30);

/// Shared by all scopes.
pub(super) struct SharedContext {
    pub(super) client: Client,
    pub(super) settings: ReconcilerSettings,
    pub(super) loops: Arc<PodSessions>,
    pub(super) budgets: Arc<BudgetLedger>,
    pub(super) sensors: Arc<SensorRegistry>,
    pub(super) memory: ReconcileStates,
    pub(super) namespaces: NamespaceObjects,
    pub(super) scripts: ScriptChecker,
    pub(super) events: EventSink,
    pub(super) observer: Arc<dyn ReconcileObserver>,
    pub(super) clock: WallClock,
}

/// The context of all reconciles.
pub(super) struct ReconcileContext {
    pub(super) shared: Arc<SharedContext>,
    pub(super) scopes: AgentScopes,
}

/// The Agent being reconciled.
pub(super) struct ReconciledAgent<'a> {
    pub(super) agent: &'a Agent,
    pub(super) key: AgentKey,
    pub(super) uid: &'a str,
}

impl ReconciledAgent<'_> {
    /// An API handle for a kind in the Agent's namespace.
    pub(super) fn api<K>(&self, ctx: &ReconcileContext) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(ctx.shared.client.clone(), &self.key.namespace)
    }

    /// Changes the memory of this Agent.
    pub(super) fn update_state(&self, ctx: &ReconcileContext, change: impl FnOnce(&mut AgentReconcileState)) {
        ctx.shared.memory.update(&self.key, self.uid, change);
    }
}

impl Reconciler for ReconcileContext {
    type Object = Agent;
    type Key = AgentKey;

    fn find(&self, key: &AgentKey) -> Option<Arc<GuardedObject<Agent>>> {
        self.scopes.agent(key)
    }

    async fn reconcile(&self, agent: &Agent) -> Result<Requeue, ReconcileError> {
        Box::pin(steps(self, agent)).await
    }

    async fn report_unreadable(&self, object: &InvalidObject) -> Result<Requeue, ReconcileError> {
        unreadable(self, object).await
    }

    fn count_failure(&self, key: &AgentKey) -> u32 {
        self.shared.memory.count_failure(key)
    }

    fn started(&self) {
        self.shared.observer.started();
    }

    fn finished(&self, how: ReconcileResult, took: Duration) {
        self.shared.observer.finished(how, took);
    }
}

async fn steps(ctx: &ReconcileContext, agent: &Agent) -> Result<Requeue, ReconcileError> {
    let subject = ReconciledAgent {
        agent,
        key: AgentKey {
            namespace: agent.namespace().unwrap_or_default(),
            name: agent.name_any(),
        },
        uid: agent.metadata.uid.as_deref().unwrap_or_default(),
    };
    if agent.metadata.deletion_timestamp.is_some() {
        // Kubernetes garbage-collects its children by their owner references.
        ctx.shared.loops.forget(&subject.key);
        ctx.shared.memory.forget(&subject.key);
        return Ok(Requeue::AwaitChange);
    }
    let now = (ctx.shared.clock)();
    let memory = ctx.shared.memory.load(&subject.key, subject.uid, now);
    let (version, old) = last_status(ctx, &subject, &memory);

    let observed = observe(ctx, &subject, &old, &memory, now).await?;
    let plan = desired(agent, &old, &observed, &memory, &ctx.shared.settings, now);
    let applied = Box::pin(apply(ctx, &subject, &observed, &plan, &memory, now)).await?;
    let outcome = ReconcileOutcome {
        old: &old,
        version: version.as_deref(),
        observed: &observed,
        plan: &plan,
        applied: &applied,
        now,
    };
    let next = publish(ctx, &subject, &outcome).await?;

    subject.update_state(ctx, |memory| memory.errors = 0);
    let recalled = ctx.shared.memory.load(&subject.key, subject.uid, now);
    let recheck = recheck_after(&subject, &outcome, &recalled);
    Ok(next.or_sooner(Requeue::after(recheck, Priority::High)))
}

/// The latest status and its resource version. The watch may lag behind the controller's own last write, so the newer
/// of both is used.
fn last_status(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    memory: &AgentReconcileState,
) -> (Option<String>, AgentStatus) {
    let seen = subject.agent.resource_version();
    if let Some((version, status)) = memory.written.as_deref() {
        if lags(seen.as_deref(), version) {
            return (Some(version.clone()), status.clone());
        }
        subject.update_state(ctx, |memory| memory.written = None);
    }
    (seen, subject.agent.status.clone().unwrap_or_default())
}

/// When to reconcile again even if nothing watched changes.
fn recheck_after(
    subject: &ReconciledAgent<'_>,
    outcome: &ReconcileOutcome<'_>,
    memory: &AgentReconcileState,
) -> Option<Duration> {
    let (observed, now) = (outcome.observed, outcome.now);
    if outcome.plan.verdict.is_err() && observed.references.is_some() {
        return Some(backoff::REFERENCES.delay(memory.missing, subject.uid));
    }
    if let Some(moment) = memory
        .no_pod_before
        .filter(|moment| *moment > now && outcome.applied.pod.is_none())
    {
        return Some(until(moment, now));
    }
    if let Some(obstacle) = &outcome.applied.obstacle {
        return Some(if obstacle.is_claim() {
            backoff::REFERENCES.delay(memory.claim_looks, subject.uid)
        } else {
            OBSTACLE_RECHECK
        });
    }
    match observed.intent {
        Intent::AwaitStop(moment) | Intent::CreateLater(moment) => Some(until(moment, now)),
        // In case the watch misses the deletion.
        Intent::Ending { .. } | Intent::Replace(_) | Intent::Remove(_) => Some(OBSTACLE_RECHECK),
        Intent::Create | Intent::Keep | Intent::KeepOutdated(_) | Intent::RecordOutcome | Intent::Rest(_) => None,
    }
}

/// The time from `now` to `moment`; zero if that is in the past.
pub(super) fn until(moment: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(moment.duration_since(now)).unwrap_or(Duration::ZERO)
}
