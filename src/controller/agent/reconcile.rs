//! One reconcile: the five steps in order, and what follows from their failure.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Patch, PatchParams};
use kube::core::DeserializeGuard;
use kube::runtime::controller::Action;
use kube::runtime::reflector::Store;
use kube::{Client, Resource, ResourceExt};
use serde_json::{Value, json};

use super::apply::{Applied, apply};
use super::backoff;
use super::context::{Clock, Finished, Observer, Settings};
use super::desired::desired;
use super::error::{Error, find};
use super::intent::Intent;
use super::memory::{Memory, Remembered};
use super::namespaces::Namespaces;
use super::observe::{Observed, observe};
use super::pace::Due;
use super::pod_state::PodReason;
use super::status::{Facts, compute};
use super::validate::{Invalid, References, validate};
use super::{events, silence};
use crate::api::condition::{ConditionType, condition};
use crate::api::{Agent, AgentStatus};
use crate::controller::loops::{AgentKey, Loops};

/// Longest time a whole reconcile may take.
const WHOLE: Duration = Duration::from_secs(60);
/// How often an obstacle that nobody watches is looked at again.
const OBSTACLE: Duration = Duration::from_secs(30);

/// What all scopes share.
pub(super) struct Shared {
    pub(super) client: Client,
    pub(super) settings: Settings,
    pub(super) loops: Arc<Loops>,
    pub(super) memory: Memory,
    pub(super) namespaces: Namespaces,
    pub(super) events: events::Sink,
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
            Ok(agent) => steps(&ctx, agent).await,
            Err(invalid) => unreadable(&ctx, &invalid.metadata, &invalid.error).await,
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
    let old = last_status(agent, &memory);

    let observed = observe(ctx, &subject, &old, &memory, now).await?;
    let none = References::default();
    let references = observed.references.as_ref();
    let verdict = validate(agent, references.unwrap_or(&none), &ctx.shared.settings);
    note_verdict(ctx, &subject, references.is_some(), &verdict);
    let plan = desired(agent, &old, &observed, &verdict, &memory, &ctx.shared.settings);
    let applied = apply(ctx, &subject, &observed, plan, &memory, now).await?;
    let next = publish(ctx, &subject, &old, &observed, &verdict, &applied, now).await?;

    subject.remember(ctx, |memory| memory.errors = 0);
    let recalled = ctx.shared.memory.recall(&subject.key, subject.uid, now);
    let delays = [next, follow_up(&subject, &observed, &verdict, &applied, &recalled, now)];
    Ok(delays
        .into_iter()
        .flatten()
        .min()
        .map_or_else(Action::await_change, Action::requeue))
}

/// The status as it is: the watch may lag behind our own last write.
fn last_status(agent: &Agent, memory: &Remembered) -> AgentStatus {
    let seen: Option<u64> = agent.resource_version().and_then(|version| version.parse().ok());
    if let Some((version, status)) = &memory.written
        && seen < version.parse().ok()
    {
        return status.clone();
    }
    agent.status.clone().unwrap_or_default()
}

fn note_verdict(ctx: &Context, subject: &Subject<'_>, looked: bool, verdict: &Result<(), Invalid>) {
    subject.remember(ctx, |memory| match verdict {
        Ok(()) => {
            memory.missing = 0;
            if looked {
                memory.accepted_generation = subject.agent.metadata.generation;
            }
        }
        Err(_) => {
            memory.missing = memory.missing.saturating_add(1);
            memory.accepted_generation = None;
        }
    });
}

/// Writes the status when it is due, tells its transitions, and says when to look again.
async fn publish(
    ctx: &Context,
    subject: &Subject<'_>,
    old: &AgentStatus,
    observed: &Observed,
    verdict: &Result<(), Invalid>,
    applied: &Applied,
    now: Timestamp,
) -> Result<Option<Duration>, Error> {
    let memory = ctx.shared.memory.recall(&subject.key, subject.uid, now);
    let silent = applied.pod.as_ref().is_some_and(|pod| {
        let contact = ctx.shared.loops.last_contact(&subject.key, &pod.uid);
        let since = memory
            .listening
            .as_ref()
            .filter(|(uid, _)| *uid == pod.uid)
            .map(|(_, since)| *since);
        pod.reason == PodReason::Running && since.is_some_and(|since| silence::is_silent(contact, since, now))
    });
    subject.remember(ctx, |memory| {
        memory.silent = silent;
        if applied.pod.as_ref().is_some_and(|pod| pod.reason == PodReason::Running) {
            memory.failed_pods = 0;
        }
    });
    let new = compute(&Facts {
        agent: subject.agent,
        old,
        verdict,
        looked: observed.references.is_some(),
        intent: observed.intent,
        pod: applied.pod.as_ref(),
        heard: observed.heard.as_ref(),
        obstacle: applied.obstacle.as_ref(),
        silent,
        now,
    });
    let about = subject.agent.object_ref(&());
    ctx.shared.events.send(events::of_pod(applied), &about);
    match memory.pace.due(old, &new, now) {
        Due::Never => Ok(None),
        Due::At(moment) => Ok(Some(until(moment, now))),
        Due::Now => {
            let notices = events::of_status(old, &new);
            write(ctx, subject, old, new, now).await?;
            ctx.shared.events.send(notices, &about);
            // The pod of a loop that ended goes once that is written.
            Ok((observed.intent == Intent::RecordOutcome).then_some(Duration::ZERO))
        }
    }
}

async fn write(
    ctx: &Context,
    subject: &Subject<'_>,
    old: &AgentStatus,
    new: AgentStatus,
    now: Timestamp,
) -> Result<(), Error> {
    let api: Api<Agent> = subject.api(ctx);
    let patch = json!({ "status": difference(&json!(old), &json!(new)) });
    let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
    let patched = api.patch_status(&subject.key.name, &params, &patch);
    // Not found: the Agent was deleted meanwhile.
    if let Some(written) = find("write the status", patched).await? {
        subject.remember(ctx, |memory| {
            memory.pace.wrote(now);
            memory.written = written.resource_version().map(|version| (version, new));
        });
    }
    Ok(())
}

/// A JSON merge patch that makes `new` of `old`: what is gone is set to null.
fn difference(old: &Value, new: &Value) -> Value {
    let (Value::Object(old), Value::Object(new)) = (old, new) else {
        return new.clone();
    };
    let gone = old
        .keys()
        .filter(|key| !new.contains_key(*key))
        .map(|key| (key.clone(), Value::Null));
    let changed = new
        .iter()
        .filter(|(key, value)| old.get(*key) != Some(*value))
        .map(|(key, value)| (key.clone(), difference(old.get(key).unwrap_or(&Value::Null), value)));
    gone.chain(changed).collect()
}

/// When to look again although nothing that is watched changed.
fn follow_up(
    subject: &Subject<'_>,
    observed: &Observed,
    verdict: &Result<(), Invalid>,
    applied: &Applied,
    memory: &Remembered,
    now: Timestamp,
) -> Option<Duration> {
    if verdict.is_err() && observed.references.is_some() {
        return Some(backoff::REFERENCES.delay(memory.missing, subject.uid));
    }
    if let Some(moment) = memory
        .no_pod_before
        .filter(|moment| *moment > now && applied.pod.is_none())
    {
        return Some(until(moment, now));
    }
    if applied.obstacle.is_some() {
        return Some(OBSTACLE);
    }
    match observed.intent {
        Intent::AwaitStop(moment) | Intent::CreateLater(moment) => Some(until(moment, now)),
        Intent::Ending { .. } => Some(OBSTACLE),
        Intent::Create
        | Intent::Keep
        | Intent::KeepOutdated(_)
        | Intent::Replace(_)
        | Intent::RecordOutcome
        | Intent::Remove(_)
        | Intent::Rest(_) => None,
    }
}

fn until(moment: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(moment.duration_since(now)).unwrap_or(Duration::ZERO)
}

/// An object that this version cannot read says so itself, once per version of the object.
async fn unreadable(ctx: &Context, meta: &kube::core::ObjectMeta, error: &str) -> Result<Action, Error> {
    let key = AgentKey {
        namespace: meta.namespace.clone().unwrap_or_default(),
        name: meta.name.clone().unwrap_or_default(),
    };
    let now = (ctx.shared.clock)();
    let uid = meta.uid.as_deref().unwrap_or_default();
    let memory = ctx.shared.memory.recall(&key, uid, now);
    if memory.accepted_generation == meta.generation {
        return Ok(Action::await_change());
    }
    let message = format!("this version of the controller cannot read the object: {error}");
    let reason = super::validate::InvalidReason::InvalidSpec;
    let conditions: Vec<_> = [
        (ConditionType::Ready, false),
        (ConditionType::Stalled, true),
        (ConditionType::Accepted, false),
    ]
    .map(|(type_, status)| condition(type_, status, reason.as_ref(), message.clone(), meta.generation, now))
    .into();
    let patch = json!({ "status": { "observedGeneration": meta.generation, "conditions": conditions } });
    let api: Api<kube::core::DynamicObject> = Api::namespaced_with(
        ctx.shared.client.clone(),
        &key.namespace,
        &kube::core::ApiResource::erase::<Agent>(&()),
    );
    let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
    let patched = api.patch_status(&key.name, &params, &patch);
    find("write the status", patched).await?;
    tracing::error!(
        namespace = key.namespace,
        agent = key.name,
        error,
        "an Agent cannot be read"
    );
    ctx.shared
        .memory
        .update(&key, uid, |memory| memory.accepted_generation = meta.generation);
    Ok(Action::await_change())
}
