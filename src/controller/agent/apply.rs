//! Carries out the plan, and returns the results. The pod and its claims are created concurrently: the pod waits for its
//! claims anyway, and each claim to create was absent a moment ago.
//!
//! Pods are created and deleted, never patched. Each deletion has the UID as a precondition.

use std::sync::Arc;

use futures::future;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, PostParams, Preconditions};
use kube::core::Status;

use super::claims::{ClaimState, VolumeClaim};
use super::decide::{LinkGrant, PodStep, ReconcilePlan, claim_obstacle};
use super::intent::ReplaceReason;
use super::observe::{ObservedAgent, claim_state};
use super::reconcile::{ReconcileContext, ReconciledAgent};
use crate::controller::runtime::error::{ReconcileError, both, call, find};
use crate::controller::runtime::pod_state::PodState;
use crate::controller::runtime::watched_pod::{WatchedPod, create_pod};

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
    /// The pod that was created.
    pub(super) created: Option<Arc<WatchedPod>>,
    /// Why a pod was deleted to be replaced.
    pub(super) replaced: Option<ReplaceReason>,
    pub(super) obstacle: Option<PodObstacle>,
    /// Whether the pod failed or was rejected, so that the next one has to wait.
    pub(super) held_back: bool,
    /// The claims that now exist.
    pub(super) made_claims: Vec<String>,
    /// The request that failed. What was done before it is recorded all the same.
    pub(super) failure: Option<ReconcileError>,
}

pub(super) async fn apply(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    observed: &ObservedAgent,
    plan: &ReconcilePlan<'_>,
) -> AppliedPlan {
    if let Some(reported) = plan.reported {
        ctx.shared.sensors.report_received(&subject.key, reported);
    }
    // Set before the directives are sent, so that a resume request and the removal of the block reach the pod together.
    ctx.shared.budgets.block(&subject.key, plan.block.clone());
    grant_link(ctx, subject, plan.link_grant.as_ref());
    let mut applied = AppliedPlan {
        pod: observed.snapshot.pod.clone(),
        obstacle: plan.obstacle.clone(),
        ..AppliedPlan::default()
    };
    applied.failure = requests(ctx, subject, plan, &mut applied).await.err();
    applied
}

async fn requests(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    plan: &ReconcilePlan<'_>,
    applied: &mut AppliedPlan,
) -> Result<(), ReconcileError> {
    match &plan.pod {
        PodStep::Nothing => {
            let claims = make_claims(ctx, subject, &plan.claims).await;
            applied.add_claims(claims)
        }
        PodStep::Create(pod) => {
            let (pod, claims) = tokio::join!(
                Box::pin(create(ctx, subject, pod)),
                make_claims(ctx, subject, &plan.claims)
            );
            let pod = pod.map(|pod| applied.add_pod(pod));
            both(pod, applied.add_claims(claims))?;
            // Another client created that claim since it was observed: the pod must not start on it.
            if let Some(pod) = applied.pod.as_ref().filter(|_| applied.has_claim_obstacle()) {
                delete(ctx, subject, &pod.uid, false).await?;
            }
            Ok(())
        }
        PodStep::Delete { uid, force, replaces } => {
            delete(ctx, subject, uid, *force).await?;
            applied.replaced = *replaces;
            applied.held_back = *replaces == Some(ReplaceReason::Ended);
            Ok(())
        }
    }
}

impl AppliedPlan {
    /// The first obstacle is the one that is reported.
    fn add_obstacle(&mut self, obstacle: Option<PodObstacle>) {
        if self.obstacle.is_none() {
            self.obstacle = obstacle;
        }
    }

    fn add_pod(&mut self, pod: Result<WatchedPod, PodObstacle>) {
        match pod {
            Ok(pod) => {
                self.pod = Some(PodState::of(&pod));
                self.created = Some(Arc::new(pod));
            }
            Err(obstacle) => {
                self.obstacle = Some(obstacle);
                self.held_back = true;
            }
        }
    }

    /// Adds each claim, also if another one failed.
    fn add_claims(
        &mut self,
        claims: Vec<Result<Result<String, PodObstacle>, ReconcileError>>,
    ) -> Result<(), ReconcileError> {
        let mut result = Ok(());
        for claim in claims {
            let claim = claim.map(|claim| match claim {
                Ok(name) => self.made_claims.push(name),
                Err(obstacle) => self.add_obstacle(Some(obstacle)),
            });
            result = both(result, claim).map(|_| ());
        }
        result
    }

    pub(super) fn has_claim_obstacle(&self) -> bool {
        self.obstacle.as_ref().is_some_and(PodObstacle::is_claim)
    }
}

/// Registers the pod that may attach with the link.
fn grant_link(ctx: &ReconcileContext, subject: &ReconciledAgent<'_>, grant: Option<&LinkGrant>) {
    let loops = &ctx.shared.loops;
    match grant {
        Some(grant) => loops.expect_pod(
            (&subject.key, subject.uid),
            grant.pod.clone(),
            grant.known.clone(),
            grant.directives.clone(),
        ),
        None => loops.forget(&subject.key),
    }
}

/// Creates the pod, or returns what prevents it.
async fn create(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    pod: &Pod,
) -> Result<Result<WatchedPod, PodObstacle>, ReconcileError> {
    let namespace = &subject.key.namespace;
    if let Some(message) = ctx.shared.namespaces.ensure(namespace).await? {
        return Ok(Err(PodObstacle::SharedTaken(message)));
    }
    match call("create a pod", create_pod(&ctx.shared.client, namespace, pod)).await {
        Ok(created) => {
            ctx.shared
                .loops
                .pod_created(&subject.key, created.metadata.uid.as_deref().unwrap_or_default());
            Ok(Ok(created))
        }
        Err(error) if error.is(Status::is_already_exists) => {
            let api: Api<WatchedPod> = subject.api(ctx);
            let existing = find("get a pod", api.get(&subject.key.name)).await?;
            let ours = |pod: &WatchedPod| PodState::of(pod).owner.as_deref() == Some(subject.uid);
            Ok(existing.filter(ours).ok_or(PodObstacle::Foreign))
        }
        Err(error) => {
            let obstacle = refusal_as_obstacle(error)?;
            // The service account may have been deleted: check the namespace's objects again before the next attempt.
            ctx.shared.namespaces.forget(namespace);
            Ok(Err(obstacle))
        }
    }
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
    let api: Api<WatchedPod> = subject.api(ctx);
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

/// Creates the claims that did not exist when they were observed, all at once. Returns the name of each, or what keeps the
/// pod from using it.
async fn make_claims(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    claims: &[PersistentVolumeClaim],
) -> Vec<Result<Result<String, PodObstacle>, ReconcileError>> {
    future::join_all(claims.iter().map(|wanted| make_claim(ctx, subject, wanted))).await
}

async fn make_claim(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    wanted: &PersistentVolumeClaim,
) -> Result<Result<String, PodObstacle>, ReconcileError> {
    let api: Api<PersistentVolumeClaim> = subject.api(ctx);
    let name = wanted.name_any();
    let standing = match call("create a volume claim", api.create(&PostParams::default(), wanted)).await {
        Ok(_) => ClaimState::Ours,
        Err(error) if error.is(Status::is_already_exists) => claim_state(ctx, subject, &name).await?,
        Err(error) => return refusal_as_obstacle(error).map(Err),
    };
    let obstacle = claim_obstacle(&VolumeClaim {
        wanted: wanted.clone(),
        standing,
    });
    Ok(obstacle.map_or(Ok(name), Err))
}
