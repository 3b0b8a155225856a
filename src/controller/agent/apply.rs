//! Step four: what is done. The pod and its claims are made at the same time: the pod waits for them, and none of them was
//! there a moment ago.
//!
//! Pods are created and deleted, never patched; each delete names the uid it means.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, PostParams, Preconditions};
use kube::core::Status;

use super::backoff;
use super::claims::{ClaimState, VolumeClaim};
use super::desired::{LinkGrant, PodStep, ReconcilePlan, claim_obstacle};
use super::error::{ReconcileError, call, find};
use super::intent::{Intent, ReplaceReason};
use super::observe::{NodeState, ObservedAgent, claim_state};
use super::pod_state::{self, PodState};
use super::reconcile::{ReconcileContext, ReconciledAgent};
use super::reconcile_state::AgentReconcileState;

/// What stands in the way of the plan and is not the API server's trouble.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PodObstacle {
    /// An object of that name exists and is not ours.
    Foreign,
    /// The API server refuses the pod or the claim: quota, admission, an unusable field.
    Refused(String),
    /// An object that all pods of a namespace share is somebody else's; in words.
    SharedTaken(String),
    /// The node of the ending pod does not answer.
    NodeLost(String),
    /// The claim of this name is being deleted, with the earlier Agent that it was made for.
    ClaimEnding(String),
    /// The claim of this name belongs to something else.
    ClaimForeign(String),
}

impl PodObstacle {
    /// Whether it is a claim that may not be used.
    pub(super) fn is_claim(&self) -> bool {
        matches!(self, Self::ClaimEnding(_) | Self::ClaimForeign(_))
    }
}

/// What was done.
#[derive(Debug, Default)]
pub(super) struct AppliedPlan {
    /// The pod that is there now.
    pub(super) pod: Option<PodState>,
    /// A pod was made.
    pub(super) created: bool,
    /// A pod was deleted so that another follows.
    pub(super) replaced: Option<ReplaceReason>,
    /// What stands in the way.
    pub(super) obstacle: Option<PodObstacle>,
}

/// Carries out a plan.
pub(super) async fn apply(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    observed: &ObservedAgent,
    plan: ReconcilePlan,
    memory: &AgentReconcileState,
    now: Timestamp,
) -> Result<AppliedPlan, ReconcileError> {
    grant_link(ctx, subject, plan.voice.as_ref(), now);
    let mut applied = AppliedPlan {
        pod: observed.pod.clone(),
        obstacle: plan.obstacle.or_else(|| standing_obstacle(observed, memory)),
        ..AppliedPlan::default()
    };
    match plan.pod {
        PodStep::Nothing => applied.add(make_claims(ctx, subject, plan.claims).await?),
        PodStep::Create(pod) => {
            let (made, claims) = tokio::join!(
                Box::pin(create(ctx, subject, &pod, now, &mut applied)),
                make_claims(ctx, subject, plan.claims)
            );
            made?;
            applied.add(claims?);
            // Somebody made that claim a moment ago: the pod may not start on it.
            if let Some(pod) = applied.pod.as_ref().filter(|_| applied.has_claim_obstacle()) {
                delete(ctx, subject, &pod.uid, false).await?;
            }
        }
        PodStep::Delete { uid, force } => {
            delete(ctx, subject, &uid, force).await?;
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
    /// The first obstacle is the one that is told.
    fn add(&mut self, obstacle: Option<PodObstacle>) {
        if self.obstacle.is_none() {
            self.obstacle = obstacle;
        }
    }

    fn has_claim_obstacle(&self) -> bool {
        self.obstacle.as_ref().is_some_and(PodObstacle::is_claim)
    }
}

/// The obstacle that still stands while nothing new is attempted.
fn standing_obstacle(observed: &ObservedAgent, memory: &AgentReconcileState) -> Option<PodObstacle> {
    if matches!(observed.intent, Intent::CreateLater(_)) {
        return memory.obstacle.clone();
    }
    let node = observed.pod.as_ref().and_then(|pod| pod.node.clone());
    (observed.node == Some(NodeState::Silent)).then(|| PodObstacle::NodeLost(node.unwrap_or_default()))
}

/// Tells the link who may speak, and remembers since when it is listened to.
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
    let mut created = match call("create a pod", api.create(&PostParams::default(), pod)).await {
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
            // The service account of the namespace may have been deleted: make sure of it next time.
            ctx.shared.namespaces.forget(&subject.key.namespace);
            hold_back(ctx, subject, now);
            return Ok(());
        }
    };
    pod_state::trim(&mut created);
    applied.pod = Some(PodState::of(&created));
    applied.created = true;
    subject.update_state(ctx, |memory| {
        memory.no_pod_before = None;
        // The watch may have seen it come, and go again, before the answer was here.
        if memory.seen_pod != created.metadata.uid {
            memory.created = Some(Arc::new(created));
        }
    });
    Ok(())
}

fn controlled_by(pod: &Pod, subject: &ReconciledAgent<'_>) -> bool {
    PodState::of(pod).owner.as_deref() == Some(subject.uid)
}

/// A refusal that is the user's or the cluster's business becomes an obstacle; anything else is tried again.
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
        // Another pod has that name by now: the one that was meant is gone.
        Err(error) if error.is(Status::is_conflict) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Makes the claims that were not there when they were looked at.
async fn make_claims(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    claims: Vec<PersistentVolumeClaim>,
) -> Result<Option<PodObstacle>, ReconcileError> {
    let api: Api<PersistentVolumeClaim> = subject.api(ctx);
    for wanted in claims {
        let name = wanted.name_any();
        let standing = match call("create a volume claim", api.create(&PostParams::default(), &wanted)).await {
            Ok(_) => ClaimState::Ours,
            Err(error) if error.is(Status::is_already_exists) => claim_state(ctx, subject, &name).await?,
            Err(error) => return Ok(Some(refusal_as_obstacle(error)?)),
        };
        if let Some(obstacle) = claim_obstacle(&VolumeClaim { wanted, standing }) {
            return Ok(Some(obstacle));
        }
        subject.update_state(ctx, |memory| memory.known_claims.extend([name]));
    }
    Ok(None)
}

/// No pod is made for a while, longer each time, until one runs.
fn hold_back(ctx: &ReconcileContext, subject: &ReconciledAgent<'_>, now: Timestamp) {
    subject.update_state(ctx, |memory| {
        memory.failed_pods = memory.failed_pods.saturating_add(1);
        memory.no_pod_before = Some(now + backoff::PODS.delay(memory.failed_pods, subject.uid));
    });
}
