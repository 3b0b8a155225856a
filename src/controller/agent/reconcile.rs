//! One reconcile: runs the steps in order, and records in the memory what each of them leaves behind.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::NamespaceResourceScope;
use kube::api::Api;
use kube::{Client, Resource};

use super::apply::apply;
use super::context::{ReconcileObserver, ReconcilerSettings};
use super::decide::decide;
use super::intent::PodSituation;
use super::observe::observe;
use super::publish::publish;
use super::reads;
use super::reconcile_state::{AgentReconcileState, ReconcileStates};
use super::scopes::AgentScopes;
use super::snapshot::AgentSnapshot;
use super::text_checks::TextChecker;
use super::unreadable::report_unreadable;
use crate::api::{Agent, NamespacedName};
use crate::controller::budget::BudgetLedger;
use crate::controller::pod_sessions::PodSessions;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::guarded::{GuardedObject, InvalidObject};
use crate::controller::runtime::namespace_objects::NamespaceObjects;
use crate::controller::runtime::queue::Priority;
use crate::controller::runtime::{EventSink, ReconcileResult, Reconciler, Requeue, WallClock};
use crate::controller::sensor::SensorRegistry;
use crate::telemetry::reconcile_traces::ReconcileTracer;

/// Shared by all scopes.
pub(super) struct SharedContext {
    pub(super) client: Client,
    pub(super) settings: ReconcilerSettings,
    pub(super) loops: Arc<PodSessions>,
    pub(super) budgets: Arc<BudgetLedger>,
    pub(super) sensors: Arc<SensorRegistry>,
    pub(super) memory: ReconcileStates,
    pub(super) namespaces: NamespaceObjects,
    pub(super) texts: TextChecker,
    pub(super) events: EventSink,
    pub(super) observer: Arc<dyn ReconcileObserver>,
    pub(super) clock: WallClock,
}

pub(super) struct ReconcileContext {
    pub(super) shared: Arc<SharedContext>,
    pub(super) scopes: AgentScopes,
}

/// The Agent being reconciled.
pub(super) struct ReconciledAgent<'a> {
    pub(super) agent: &'a Agent,
    pub(super) key: NamespacedName,
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
    pub(super) fn update_memory(&self, ctx: &ReconcileContext, change: impl FnOnce(&mut AgentReconcileState)) {
        ctx.shared.memory.update(&self.key, self.uid, change);
    }
}

impl Reconciler for ReconcileContext {
    type Object = Agent;
    type Key = NamespacedName;

    fn find(&self, key: &NamespacedName) -> Option<Arc<GuardedObject<Agent>>> {
        self.scopes.agent(key)
    }

    async fn reconcile(&self, agent: &Agent) -> Result<Requeue, ReconcileError> {
        Box::pin(steps(self, agent)).await
    }

    async fn report_unreadable(&self, object: &InvalidObject) -> Result<Requeue, ReconcileError> {
        report_unreadable(self, object).await
    }

    fn count_failure(&self, key: &NamespacedName) -> u32 {
        self.shared.memory.count_failure(key)
    }

    fn started(&self) {
        self.shared.observer.started();
    }

    fn finished(&self, how: ReconcileResult, took: Duration) {
        self.shared.observer.finished(how, took);
    }

    fn tracer(&self) -> ReconcileTracer {
        self.shared.observer.tracer()
    }
}

async fn steps(ctx: &ReconcileContext, agent: &Agent) -> Result<Requeue, ReconcileError> {
    let subject = ReconciledAgent {
        agent,
        key: NamespacedName::of(agent),
        uid: agent.metadata.uid.as_deref().unwrap_or_default(),
    };
    if agent.metadata.deletion_timestamp.is_some() {
        // Kubernetes garbage-collects its children by their owner references.
        ctx.shared.loops.forget(&subject.key);
        ctx.shared.memory.forget(&subject.key);
        return Ok(Requeue::AwaitChange);
    }
    let snapshot = AgentSnapshot::take(ctx, &subject);
    let settings = &ctx.shared.settings;
    let situation = PodSituation {
        agent,
        snapshot: &snapshot,
        settings,
    };
    let intent = situation.intent();
    let needed = reads::needed(agent, intent, &snapshot);
    let observed = observe(ctx, &subject, snapshot, needed).await?;
    let plan = decide(agent, intent, &observed, settings);
    // No other code changes the memory of this Agent during a reconcile, apart from the watch of its pods.
    subject.update_memory(ctx, |memory| memory.record_plan(&plan.memory));

    let mut applied = Box::pin(apply(ctx, &subject, &observed, &plan)).await;
    subject.update_memory(ctx, |memory| memory.record_applied(&plan, &applied));
    if let Some(failure) = applied.failure.take() {
        return Err(failure);
    }

    let published = publish(ctx, &subject, &observed, &plan, &applied).await?;
    let requeue = published.requeue;
    let (seen, now) = (observed.snapshot.last.version.as_deref(), observed.snapshot.now);
    subject.update_memory(ctx, |memory| memory.record_published(published, seen, now));
    Ok(requeue.or_sooner(Requeue::after(plan.recheck_after(&applied), Priority::High)))
}
