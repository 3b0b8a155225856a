//! One reconcile: the five steps in order, and what follows from their failure.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::Pod;
use kube::api::Api;
use kube::core::DeserializeGuard;
use kube::runtime::controller::Action;
use kube::runtime::reflector::Store;
use kube::{Client, Resource, ResourceExt};

use super::apply::apply;
use super::backoff;
use super::context::{ReconcileObserver, ReconcileResult, ReconcilerSettings, WallClock};
use super::desired::desired;
use super::error::ReconcileError;
use super::events::EventSink;
use super::gateway_loop_detection;
use super::intent::Intent;
use super::namespace_objects::NamespaceObjects;
use super::observe::observe;
use super::publish::{ReconcileOutcome, publish, unreadable};
use super::reconcile_state::{AgentReconcileState, ReconcileStates};
use super::scripts::ScriptChecker;
use super::validate::{AgentReferences, reported_budget_problem, validate};
use crate::api::{Agent, AgentStatus};
use crate::controller::budget::BudgetLedger;
use crate::controller::pod_sessions::{AgentKey, PodSessions};
use crate::controller::sensor::SensorRegistry;

/// Longest time a whole reconcile may take.
const RECONCILE_TIMEOUT: Duration = Duration::from_mins(1);
/// How often an obstacle that nobody watches is looked at again.
const OBSTACLE_RECHECK: Duration = Duration::from_secs(30);

/// What all scopes share.
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

/// What a reconcile works with.
pub(super) struct ReconcileContext {
    pub(super) shared: Arc<SharedContext>,
    /// The pods of this scope, trimmed.
    pub(super) pods: Store<Pod>,
}

/// The Agent at hand.
pub(super) struct ReconciledAgent<'a> {
    pub(super) agent: &'a Agent,
    pub(super) key: AgentKey,
    pub(super) uid: &'a str,
}

impl ReconciledAgent<'_> {
    /// The API of a kind in the Agent's namespace.
    pub(super) fn api<K>(&self, ctx: &ReconcileContext) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(ctx.shared.client.clone(), &self.key.namespace)
    }

    /// Changes what is remembered of this Agent.
    pub(super) fn update_state(&self, ctx: &ReconcileContext, change: impl FnOnce(&mut AgentReconcileState)) {
        ctx.shared.memory.update(&self.key, self.uid, change);
    }
}

/// Reconciles one Agent.
pub(super) async fn reconcile(
    guard: Arc<DeserializeGuard<Agent>>,
    ctx: Arc<ReconcileContext>,
) -> Result<Action, ReconcileError> {
    let observer = &ctx.shared.observer;
    observer.started();
    let start = tokio::time::Instant::now();
    let whole = async {
        match &guard.0 {
            Ok(agent) => Box::pin(steps(&ctx, agent)).await,
            Err(invalid) => unreadable(&ctx, invalid).await,
        }
    };
    let result = tokio::time::timeout(RECONCILE_TIMEOUT, whole)
        .await
        .unwrap_or(Err(ReconcileError::Timeout {
            action: "reconcile",
            limit: RECONCILE_TIMEOUT,
        }));
    let how = match &result {
        Ok(action) if *action == Action::await_change() => ReconcileResult::Success,
        Ok(_) => ReconcileResult::RequeueAfter,
        Err(error) => ReconcileResult::Error(error.kind()),
    };
    observer.finished(how, start.elapsed());
    result
}

/// Says when a failed reconcile is tried again.
pub(super) fn on_error(guard: &DeserializeGuard<Agent>, error: &ReconcileError, ctx: &ReconcileContext) -> Action {
    let meta = guard.meta();
    let key = AgentKey {
        namespace: meta.namespace.clone().unwrap_or_default(),
        name: meta.name.clone().unwrap_or_default(),
    };
    let attempts = ctx.shared.memory.count_failure(&key);
    let delay = backoff::ERRORS.delay(attempts, meta.uid.as_deref().unwrap_or_default());
    tracing::warn!(
        namespace = key.namespace,
        agent = key.name,
        kind = error.kind().as_ref(),
        attempts,
        delay_seconds = delay.as_secs_f32(),
        %error,
        "reconcile failed; it is tried again"
    );
    Action::requeue(delay)
}

async fn steps(ctx: &ReconcileContext, agent: &Agent) -> Result<Action, ReconcileError> {
    let subject = ReconciledAgent {
        agent,
        key: AgentKey {
            namespace: agent.namespace().unwrap_or_default(),
            name: agent.name_any(),
        },
        uid: agent.metadata.uid.as_deref().unwrap_or_default(),
    };
    if agent.metadata.deletion_timestamp.is_some() {
        // Its children go by their owner references.
        ctx.shared.loops.forget(&subject.key);
        ctx.shared.memory.forget(&subject.key);
        return Ok(Action::await_change());
    }
    let now = (ctx.shared.clock)();
    let memory = ctx.shared.memory.load(&subject.key, subject.uid, now);
    let (version, old) = last_status(ctx, &subject, &memory);

    let observed = observe(ctx, &subject, &old, &memory, now).await?;
    if let Some(said) = observed.heard.as_ref().and_then(|heard| heard.report.loop_.as_ref()) {
        ctx.shared.sensors.report_received(&subject.key, &said.sensors);
    }
    // Before the directives, so that a request to go on and the end of the block come together.
    let block = gateway_loop_detection::call_block(agent, observed.finding.as_ref());
    ctx.shared.budgets.block(&subject.key, block);
    let none = AgentReferences::default();
    let references = observed.references.as_ref();
    let verdict = validate(agent, references.unwrap_or(&none), &ctx.shared.settings).and_then(|()| {
        if !ctx.shared.budgets.has_decided() {
            return reported_budget_problem(&old).map_or(Ok(()), Err);
        }
        let decision = ctx.shared.budgets.decision(&subject.key);
        let obstacle = decision.and_then(|decision| decision.obstacle);
        obstacle.map_or(Ok(()), |obstacle| Err(obstacle.into()))
    });
    record_verdict(ctx, &subject, references.is_some(), verdict.is_ok());
    let plan = desired(agent, &old, &observed, &verdict, &memory, &ctx.shared.settings);
    let applied = Box::pin(apply(ctx, &subject, &observed, plan, &memory, now)).await?;
    let outcome = ReconcileOutcome {
        old: &old,
        version: version.as_deref(),
        observed: &observed,
        verdict: &verdict,
        applied: &applied,
        now,
    };
    let next = publish(ctx, &subject, &outcome).await?;

    subject.update_state(ctx, |memory| memory.errors = 0);
    let recalled = ctx.shared.memory.load(&subject.key, subject.uid, now);
    let delays = [next, recheck_after(&subject, &outcome, &recalled)];
    Ok(delays
        .into_iter()
        .flatten()
        .min()
        .map_or_else(Action::await_change, Action::requeue))
}

/// The status as it is, and the version of the object that has it: the watch may lag behind our own last write.
fn last_status(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    memory: &AgentReconcileState,
) -> (Option<String>, AgentStatus) {
    let seen = subject.agent.resource_version();
    if let Some((version, status)) = memory.written.as_deref() {
        if seen.as_deref().and_then(number) < number(version) {
            return (Some(version.clone()), status.clone());
        }
        subject.update_state(ctx, |memory| memory.written = None);
    }
    (seen, subject.agent.status.clone().unwrap_or_default())
}

fn number(version: &str) -> Option<u64> {
    version.parse().ok()
}

fn record_verdict(ctx: &ReconcileContext, subject: &ReconciledAgent<'_>, looked: bool, valid: bool) {
    subject.update_state(ctx, |memory| {
        if !valid {
            memory.missing = memory.missing.saturating_add(1);
            memory.accepted_generation = None;
        } else if looked {
            memory.missing = 0;
            memory.accepted_generation = subject.agent.metadata.generation;
        }
    });
}

/// When to look again although nothing that is watched changed.
fn recheck_after(
    subject: &ReconciledAgent<'_>,
    outcome: &ReconcileOutcome<'_>,
    memory: &AgentReconcileState,
) -> Option<Duration> {
    let (observed, now) = (outcome.observed, outcome.now);
    if outcome.verdict.is_err() && observed.references.is_some() {
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
        // A deletion of which no event comes is noticed even so.
        Intent::Ending { .. } | Intent::Replace(_) | Intent::Remove(_) => Some(OBSTACLE_RECHECK),
        Intent::Create | Intent::Keep | Intent::KeepOutdated(_) | Intent::RecordOutcome | Intent::Rest(_) => None,
    }
}

/// From `now` to `moment`, or no time when that is past.
pub(super) fn until(moment: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(moment.duration_since(now)).unwrap_or(Duration::ZERO)
}
