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
use super::context::{Clock, Finished, Observer, Settings};
use super::desired::desired;
use super::error::Error;
use super::events::Sink;
use super::intent::Intent;
use super::memory::{Memory, Remembered};
use super::namespaces::Namespaces;
use super::observe::observe;
use super::outside;
use super::publish::{Outcome, publish, unreadable};
use super::scripts::Scripts;
use super::validate::{References, said_of_budgets, validate};
use crate::api::{Agent, AgentStatus};
use crate::controller::budget::Budgets;
use crate::controller::loops::{AgentKey, Loops};
use crate::controller::sensor::Sensors;

/// Longest time a whole reconcile may take.
const WHOLE: Duration = Duration::from_mins(1);
/// How often an obstacle that nobody watches is looked at again.
const OBSTACLE: Duration = Duration::from_secs(30);

/// What all scopes share.
pub(super) struct Shared {
    pub(super) client: Client,
    pub(super) settings: Settings,
    pub(super) loops: Arc<Loops>,
    pub(super) budgets: Arc<Budgets>,
    pub(super) sensors: Arc<Sensors>,
    pub(super) memory: Memory,
    pub(super) namespaces: Namespaces,
    pub(super) scripts: Scripts,
    pub(super) events: Sink,
    pub(super) observer: Arc<dyn Observer>,
    pub(super) clock: Clock,
}

/// What a reconcile works with.
pub(super) struct Context {
    pub(super) shared: Arc<Shared>,
    /// The pods of this scope, trimmed.
    pub(super) pods: Store<Pod>,
}

/// The Agent at hand.
pub(super) struct Subject<'a> {
    pub(super) agent: &'a Agent,
    pub(super) key: AgentKey,
    pub(super) uid: &'a str,
}

impl Subject<'_> {
    /// The API of a kind in the Agent's namespace.
    pub(super) fn api<K>(&self, ctx: &Context) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(ctx.shared.client.clone(), &self.key.namespace)
    }

    /// Changes what is remembered of this Agent.
    pub(super) fn remember(&self, ctx: &Context, change: impl FnOnce(&mut Remembered)) {
        ctx.shared.memory.update(&self.key, self.uid, change);
    }
}

/// Reconciles one Agent.
pub(super) async fn reconcile(guard: Arc<DeserializeGuard<Agent>>, ctx: Arc<Context>) -> Result<Action, Error> {
    let observer = &ctx.shared.observer;
    observer.started();
    let start = tokio::time::Instant::now();
    let whole = async {
        match &guard.0 {
            Ok(agent) => Box::pin(steps(&ctx, agent)).await,
            Err(invalid) => unreadable(&ctx, invalid).await,
        }
    };
    let result = tokio::time::timeout(WHOLE, whole).await.unwrap_or(Err(Error::Timeout {
        action: "reconcile",
        limit: WHOLE,
    }));
    let how = match &result {
        Ok(action) if *action == Action::await_change() => Finished::Success,
        Ok(_) => Finished::RequeueAfter,
        Err(error) => Finished::Error(error.kind()),
    };
    observer.finished(how, start.elapsed());
    result
}

/// Says when a failed reconcile is tried again.
pub(super) fn on_error(guard: &DeserializeGuard<Agent>, error: &Error, ctx: &Context) -> Action {
    let meta = guard.meta();
    let key = AgentKey {
        namespace: meta.namespace.clone().unwrap_or_default(),
        name: meta.name.clone().unwrap_or_default(),
    };
    let attempts = ctx.shared.memory.failed(&key);
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

async fn steps(ctx: &Context, agent: &Agent) -> Result<Action, Error> {
    let subject = Subject {
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
    let memory = ctx.shared.memory.recall(&subject.key, subject.uid, now);
    let (version, old) = last_status(ctx, &subject, &memory);

    let observed = observe(ctx, &subject, &old, &memory, now).await?;
    if let Some(said) = observed.heard.as_ref().and_then(|heard| heard.report.loop_.as_ref()) {
        ctx.shared.sensors.reported(&subject.key, &said.sensors);
    }
    // Before the directives, so that a request to go on and the end of the block come together.
    let block = outside::blocked(agent, observed.finding.as_ref());
    ctx.shared.budgets.block(&subject.key, block);
    let none = References::default();
    let references = observed.references.as_ref();
    let verdict = validate(agent, references.unwrap_or(&none), &ctx.shared.settings).and_then(|()| {
        if !ctx.shared.budgets.has_decided() {
            return said_of_budgets(&old).map_or(Ok(()), Err);
        }
        let decision = ctx.shared.budgets.decision(&subject.key);
        let obstacle = decision.and_then(|decision| decision.obstacle);
        obstacle.map_or(Ok(()), |obstacle| Err(obstacle.into()))
    });
    note_verdict(ctx, &subject, references.is_some(), verdict.is_ok());
    let plan = desired(agent, &old, &observed, &verdict, &memory, &ctx.shared.settings);
    let applied = Box::pin(apply(ctx, &subject, &observed, plan, &memory, now)).await?;
    let outcome = Outcome {
        old: &old,
        version: version.as_deref(),
        observed: &observed,
        verdict: &verdict,
        applied: &applied,
        now,
    };
    let next = publish(ctx, &subject, &outcome).await?;

    subject.remember(ctx, |memory| memory.errors = 0);
    let recalled = ctx.shared.memory.recall(&subject.key, subject.uid, now);
    let delays = [next, follow_up(&subject, &outcome, &recalled)];
    Ok(delays
        .into_iter()
        .flatten()
        .min()
        .map_or_else(Action::await_change, Action::requeue))
}

/// The status as it is, and the version of the object that has it: the watch may lag behind our own last write.
fn last_status(ctx: &Context, subject: &Subject<'_>, memory: &Remembered) -> (Option<String>, AgentStatus) {
    let seen = subject.agent.resource_version();
    if let Some((version, status)) = memory.written.as_deref() {
        if seen.as_deref().and_then(number) < number(version) {
            return (Some(version.clone()), status.clone());
        }
        subject.remember(ctx, |memory| memory.written = None);
    }
    (seen, subject.agent.status.clone().unwrap_or_default())
}

fn number(version: &str) -> Option<u64> {
    version.parse().ok()
}

fn note_verdict(ctx: &Context, subject: &Subject<'_>, looked: bool, valid: bool) {
    subject.remember(ctx, |memory| {
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
fn follow_up(subject: &Subject<'_>, outcome: &Outcome<'_>, memory: &Remembered) -> Option<Duration> {
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
            OBSTACLE
        });
    }
    match observed.intent {
        Intent::AwaitStop(moment) | Intent::CreateLater(moment) => Some(until(moment, now)),
        // A deletion of which no event comes is noticed even so.
        Intent::Ending { .. } | Intent::Replace(_) | Intent::Remove(_) => Some(OBSTACLE),
        Intent::Create | Intent::Keep | Intent::KeepOutdated(_) | Intent::RecordOutcome | Intent::Rest(_) => None,
    }
}

/// From `now` to `moment`, or no time when that is past.
pub(super) fn until(moment: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(moment.duration_since(now)).unwrap_or(Duration::ZERO)
}
