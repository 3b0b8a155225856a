//! Carries out the plan. The pod and its claims are created concurrently: the pod waits for its claims anyway, and each
//! claim to create was absent a moment ago.
//!
//! Pods are created and deleted, never patched. Each deletion has the UID as a precondition.

use std::sync::Arc;

use futures::future;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, PostParams, Preconditions};
use kube::core::Status;

use super::claims::{ClaimState, VolumeClaim};
use super::desired::{LinkGrant, PodStep, ReconcilePlan, claim_obstacle};
use super::intent::{Intent, ReplaceReason};
use super::observe::{NodeState, ObservedAgent, claim_state};
use super::reconcile::{ReconcileContext, ReconciledAgent};
use super::reconcile_state::AgentReconcileState;
use crate::controller::runtime::backoff;
use crate::controller::runtime::error::{ReconcileError, both, call, find};
use crate::controller::runtime::pod_state::PodState;

/// What prevents the plan, other than a failure of the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PodObstacle {
    /// A pod with this name exists and is not owned by the Agent.
    Foreign,
    /// The API server rejects the pod or the claim (quota, admission, an invalid field), with this message.
    Refused(String),
    /// An object that all pods of a namespace share is owned by someone else; the message for the user.
    SharedTaken(String),
    /// The node of the terminating pod, which is unreachable.
    NodeLost(String),
    /// The name of a claim that is being deleted with the earlier Agent that it was created for.
    ClaimEnding(String),
    /// The name of a claim that belongs to another object.
    ClaimForeign(String),
}

impl PodObstacle {
    /// Whether a claim is the obstacle.
    pub(super) fn is_claim(&self) -> bool {
        matches!(self, Self::ClaimEnding(_) | Self::ClaimForeign(_))
    }
}

/// The result of [`apply`].
#[derive(Debug, Default)]
pub(super) struct AppliedPlan {
    /// The pod that now exists.
    pub(super) pod: Option<PodState>,
    /// Whether a pod was created.
    pub(super) created: bool,
    /// Why a pod was deleted to be replaced.
    pub(super) replaced: Option<ReplaceReason>,
    pub(super) obstacle: Option<PodObstacle>,
}

pub(super) async fn apply(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    observed: &ObservedAgent,
    plan: &ReconcilePlan<'_>,
    memory: &AgentReconcileState,
    now: Timestamp,
) -> Result<AppliedPlan, ReconcileError> {
    if let Some(reported) = plan.reported {
        ctx.shared.sensors.report_received(&subject.key, reported);
    }
    // Set before the directives are sent, so that a resume request and the removal of the block reach the pod together.
    ctx.shared.budgets.block(&subject.key, plan.block.clone());
    record_verdict(ctx, subject, observed.references.is_some(), plan.verdict.is_ok());
    grant_link(ctx, subject, plan.voice.as_ref(), now);
    let mut applied = AppliedPlan {
        pod: observed.pod.clone(),
        obstacle: plan.obstacle.clone().or_else(|| standing_obstacle(observed, memory)),
        ..AppliedPlan::default()
    };
    match &plan.pod {
        PodStep::Nothing => applied.add(make_claims(ctx, subject, &plan.claims).await?),
        PodStep::Create(pod) => {
            let (made, claims) = tokio::join!(
                Box::pin(create(ctx, subject, pod, now, &mut applied)),
                make_claims(ctx, subject, &plan.claims)
            );
            let ((), obstacle) = both(made, claims)?;
            applied.add(obstacle);
            // Another client created that claim since it was observed: the pod must not start on it.
            if let Some(pod) = applied.pod.as_ref().filter(|_| applied.has_claim_obstacle()) {
                delete(ctx, subject, &pod.uid, false).await?;
            }
        }
        PodStep::Delete { uid, force } => {
            delete(ctx, subject, uid, *force).await?;
            if let Intent::Replace(why) = observed.intent {
                applied.replaced = Some(why);
                if why == ReplaceReason::Ended {
                    hold_back(ctx, subject, now);
                }
            }
        }
    }
    let usable = observed
        .claims
        .iter()
        .filter(|claim| claim.standing == ClaimState::Ours);
    subject.update_state(ctx, |memory| {
        memory.epoch = memory.epoch.max(applied.pod.as_ref().map_or(0, |pod| pod.epoch));
        memory.obstacle.clone_from(&applied.obstacle);
        memory.known_claims.extend(usable.map(VolumeClaim::name));
        if applied.has_claim_obstacle() {
            memory.claim_looks = memory.claim_looks.saturating_add(1);
            memory.known_claims.clear();
        } else {
            memory.claim_looks = 0;
        }
    });
    Ok(applied)
}

impl AppliedPlan {
    /// The first obstacle is the one that is reported.
    fn add(&mut self, obstacle: Option<PodObstacle>) {
        if self.obstacle.is_none() {
            self.obstacle = obstacle;
        }
    }

    fn has_claim_obstacle(&self) -> bool {
        self.obstacle.as_ref().is_some_and(PodObstacle::is_claim)
    }
}

/// The obstacle that still applies while nothing new is attempted.
fn standing_obstacle(observed: &ObservedAgent, memory: &AgentReconcileState) -> Option<PodObstacle> {
    if matches!(observed.intent, Intent::CreateLater(_)) {
        return memory.obstacle.clone();
    }
    let node = observed.pod.as_ref().and_then(|pod| pod.node.clone());
    (observed.node == Some(NodeState::Silent)).then(|| PodObstacle::NodeLost(node.unwrap_or_default()))
}

/// Remembers what the references that were read mean for the next look at them.
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

/// Registers the pod that may attach with the link, and remembers since when its silence is measured.
fn grant_link(ctx: &ReconcileContext, subject: &ReconciledAgent<'_>, voice: Option<&LinkGrant>, now: Timestamp) {
    let Some(voice) = voice else {
        ctx.shared.loops.forget(&subject.key);
        subject.update_state(ctx, |memory| memory.listening = None);
        return;
    };
    let loops = &ctx.shared.loops;
    loops.expect_pod(
        &subject.key,
        voice.pod.clone(),
        voice.known.clone(),
        voice.directives.clone(),
    );
    subject.update_state(ctx, |memory| {
        if memory.listening.as_ref().is_none_or(|(uid, _)| *uid != voice.pod.uid) {
            memory.listening = Some((voice.pod.uid.clone(), now));
            memory.silent = false;
        }
        memory.suspend_asked = voice.directives.suspend.then(|| memory.suspend_asked.unwrap_or(now));
    });
}

async fn create(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    pod: &Pod,
    now: Timestamp,
    applied: &mut AppliedPlan,
) -> Result<(), ReconcileError> {
    if let Some(message) = ctx.shared.namespaces.ensure(&subject.key.namespace).await? {
        applied.obstacle = Some(PodObstacle::SharedTaken(message));
        hold_back(ctx, subject, now);
        return Ok(());
    }
    let api: Api<Pod> = subject.api(ctx);
    let created = match call("create a pod", api.create(&PostParams::default(), pod)).await {
        Ok(created) => created,
        Err(error) if error.is(Status::is_already_exists) => {
            match find("get a pod", api.get(&subject.key.name)).await? {
                Some(existing) if controlled_by(&existing, subject) => existing,
                _ => {
                    applied.obstacle = Some(PodObstacle::Foreign);
                    hold_back(ctx, subject, now);
                    return Ok(());
                }
            }
        }
        Err(error) => {
            applied.obstacle = Some(refusal_as_obstacle(error)?);
            // The service account may have been deleted: check the namespace's objects again before the next attempt.
            ctx.shared.namespaces.forget(&subject.key.namespace);
            hold_back(ctx, subject, now);
            return Ok(());
        }
    };
    applied.pod = Some(PodState::of(&created));
    applied.created = true;
    subject.update_state(ctx, |memory| {
        memory.no_pod_before = None;
        // The watch may already have delivered its creation, and even its deletion, before this response arrived.
        if memory.seen_pod != created.metadata.uid {
            memory.created = Some(Arc::new(created.into()));
        }
    });
    Ok(())
}

fn controlled_by(pod: &Pod, subject: &ReconciledAgent<'_>) -> bool {
    PodState::of(pod).owner.as_deref() == Some(subject.uid)
}

/// A rejection that the user or a cluster administrator must resolve becomes an obstacle; any other error is retried.
fn refusal_as_obstacle(error: ReconcileError) -> Result<PodObstacle, ReconcileError> {
    match error.answer() {
        Some(status) if status.is_forbidden() || status.is_invalid() || status.code == 400 => {
            Ok(PodObstacle::Refused(status.message.clone()))
        }
        _ => Err(error),
    }
}

async fn delete(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    uid: &str,
    force: bool,
) -> Result<(), ReconcileError> {
    let api: Api<Pod> = subject.api(ctx);
    let params = DeleteParams {
        grace_period_seconds: force.then_some(0),
        preconditions: Some(Preconditions {
            uid: Some(uid.into()),
            resource_version: None,
        }),
        ..DeleteParams::default()
    };
    match find("delete a pod", api.delete(&subject.key.name, &params)).await {
        Ok(_) => Ok(()),
        // A different pod has that name: the intended one is gone.
        Err(error) if error.is(Status::is_conflict) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Creates the claims that did not exist when they were observed, all at once. Returns the first obstacle.
async fn make_claims(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    claims: &[PersistentVolumeClaim],
) -> Result<Option<PodObstacle>, ReconcileError> {
    let made = claims.iter().map(|wanted| make_claim(ctx, subject, wanted));
    let mut obstacle = Ok(None);
    for made in future::join_all(made).await {
        obstacle = both(obstacle, made).map(|(first, next)| first.or(next));
    }
    obstacle
}

async fn make_claim(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    wanted: &PersistentVolumeClaim,
) -> Result<Option<PodObstacle>, ReconcileError> {
    let api: Api<PersistentVolumeClaim> = subject.api(ctx);
    let name = wanted.name_any();
    let standing = match call("create a volume claim", api.create(&PostParams::default(), wanted)).await {
        Ok(_) => ClaimState::Ours,
        Err(error) if error.is(Status::is_already_exists) => claim_state(ctx, subject, &name).await?,
        Err(error) => return refusal_as_obstacle(error).map(Some),
    };
    let obstacle = claim_obstacle(&VolumeClaim {
        wanted: wanted.clone(),
        standing,
    });
    if obstacle.is_none() {
        subject.update_state(ctx, |memory| memory.known_claims.extend([name]));
    }
    Ok(obstacle)
}

/// Delays the next creation, longer with each failure, until a pod runs.
fn hold_back(ctx: &ReconcileContext, subject: &ReconciledAgent<'_>, now: Timestamp) {
    subject.update_state(ctx, |memory| {
        memory.failed_pods = memory.failed_pods.saturating_add(1);
        memory.no_pod_before = Some(now + backoff::PODS.delay(memory.failed_pods, subject.uid));
    });
}
