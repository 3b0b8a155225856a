//! Reads everything that a reconcile needs, and derives the intent from it.
//!
//! Pods come from the watch. Everything else is read only when it matters: references before a pod is created, the node
//! of an overdue pod. ADR 0002 explains why references are not watched.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Node, PersistentVolumeClaim, Secret};
use kube::ResourceExt;
use kube::api::Api;
use kube::core::Status;

use super::claims::{self, ClaimState, VolumeClaim};
use super::gateway_loop_detection::{self, LoopFinding};
use super::intent::{Intent, PodSituation};
use super::manifest::PodAnnotations;
use super::reconcile::{ReconcileContext, ReconciledAgent};
use super::reconcile_state::AgentReconcileState;
use super::totals;
use super::validate::{AgentReferences, ModelReferences, ReferenceLookup};
use crate::api::AgentStatus;
use crate::api::agent::{KeyRef, ModelSpec};
use crate::controller::budget::assignment::CallObstacle;
use crate::controller::budget::shares::LimitShares;
use crate::controller::pod_sessions::ReceivedReport;
use crate::controller::runtime::error::{ReconcileError, call, find};
use crate::controller::runtime::pod_state::{PodReason, PodState};
use crate::controller::runtime::watched_pod::WatchedPod;
use crate::link::messages::LoopTotals;

/// The state of the node of an overdue pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NodeState {
    /// Deleted, or tainted as out-of-service: nothing runs there.
    Gone,
    /// Ready.
    There,
    /// Not ready, or not readable for lack of permission: what runs there is unknown.
    Silent,
    /// Like `Silent`, but the pod can no longer act, and has no volume that a second pod would use too.
    Spent,
}

/// What was read and derived.
pub(super) struct ObservedAgent {
    pub(super) pod: Option<PodState>,
    /// The last report of the pod.
    pub(super) heard: Option<ReceivedReport>,
    /// The decision about the pod.
    pub(super) intent: Intent,
    /// The results of reading the references; `None` if they were not needed.
    pub(super) references: Option<AgentReferences>,
    /// The volume claims and the objects found under their names; empty if they were not needed.
    pub(super) claims: Vec<VolumeClaim>,
    /// The node of an overdue pod.
    pub(super) node: Option<NodeState>,
    /// The merged totals: written, remembered and just reported.
    pub(super) known: LoopTotals,
    /// A loop detected from the gateway's counters.
    pub(super) finding: Option<LoopFinding>,
    /// The last contact with the pod.
    pub(super) last_contact: Option<Timestamp>,
    /// What the ledger says; `None` until the AgentBudgets are listed.
    pub(super) limits: Option<ObservedLimits>,
    pub(super) sensors: ObservedSensors,
}

/// What the ledger says about an Agent.
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

/// Reads the state of one Agent and decides about its pod.
pub(super) async fn observe(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    status: &AgentStatus,
    memory: &AgentReconcileState,
    now: Timestamp,
) -> Result<ObservedAgent, ReconcileError> {
    let found = current_pod(ctx, subject, memory);
    let pod = found.as_deref().map(|pod| PodState::of(pod));
    let heard = pod
        .as_ref()
        .and_then(|pod| ctx.shared.loops.last_report(&subject.key, &pod.uid));
    let last_contact = pod
        .as_ref()
        .and_then(|pod| ctx.shared.loops.last_contact(&subject.key, &pod.uid));
    let situation = PodSituation {
        agent: subject.agent,
        status,
        pod: pod.as_ref(),
        marks: PodAnnotations(found.as_ref().and_then(|pod| pod.metadata.annotations.as_ref())),
        heard: heard.as_ref(),
        last_contact,
        memory,
        settings: &ctx.shared.settings,
        now,
    };
    let intent = situation.intent();
    // Independent reads run concurrently: references, and claims.
    let looked = async {
        if needs_references(intent, subject, memory) {
            return Box::pin(references(ctx, subject)).await.map(Some);
        }
        Ok(None)
    };
    let needed = claims_to_check(intent, subject, pod.as_ref(), memory);
    let (references, claims) = tokio::try_join!(looked, claims(ctx, subject, needed))?;
    let node = match (intent, pod.as_ref().and_then(|pod| pod.node.as_deref())) {
        (Intent::Ending { overdue: true, .. }, Some(name)) => Some(node(ctx, name).await?),
        _ => None,
    };
    let node = node.map(|node| {
        if node == NodeState::Silent && situation.is_spent() {
            NodeState::Spent
        } else {
            node
        }
    });
    // The session of a deleted pod still holds its final report. Merge and remember its totals now, because
    // `final_report` returns it only once and the status may not be written in this reconcile.
    let parted = final_report(ctx, subject, memory, pod.as_ref());
    let known = totals::known(status, memory.known.as_ref(), heard.as_ref().or(parted.as_ref()));
    if parted.is_some() {
        subject.update_state(ctx, |memory| memory.known = Some(known.clone()));
    }
    let finding = gateway_loop_detection::detect(
        subject.agent,
        status,
        heard.as_ref(),
        &ctx.shared.budgets.windows(&subject.key),
    );
    Ok(ObservedAgent {
        pod,
        heard,
        intent,
        references,
        claims,
        node,
        known,
        finding,
        last_contact,
        limits: limits(ctx, subject),
        sensors: ObservedSensors {
            names: ctx.shared.sensors.names(&subject.key),
            problems: ctx.shared.sensors.pod_problems(&subject.key),
        },
    })
}

fn limits(ctx: &ReconcileContext, subject: &ReconciledAgent<'_>) -> Option<ObservedLimits> {
    let budgets = &ctx.shared.budgets;
    budgets.has_decided().then(|| ObservedLimits {
        obstacle: budgets.decision(&subject.key).and_then(|decision| decision.obstacle),
        shares: budgets.shares(&subject.key),
    })
}

/// The claims to read. They are read before a pod is created, and while a pod waits for a node, because one may have
/// been deleted since.
fn claims_to_check(
    intent: Intent,
    subject: &ReconciledAgent<'_>,
    pod: Option<&PodState>,
    memory: &AgentReconcileState,
) -> Vec<PersistentVolumeClaim> {
    let wanted = claims::wanted(subject.agent);
    if intent == Intent::Create {
        return wanted;
    }
    let ours = |pod: &&PodState| pod.owner.as_deref() == Some(subject.uid) && !pod.ending() && !pod.ended;
    let Some(waiting) = pod.filter(ours).filter(|pod| pod.node.is_none()) else {
        return Vec::new();
    };
    if waiting.reason == PodReason::Unschedulable {
        return wanted;
    }
    let unknown = |claim: &PersistentVolumeClaim| !memory.known_claims.contains(&claim.name_any());
    wanted.into_iter().filter(unknown).collect()
}

async fn claims(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    wanted: Vec<PersistentVolumeClaim>,
) -> Result<Vec<VolumeClaim>, ReconcileError> {
    let looks = wanted.into_iter().map(|wanted| async move {
        let standing = claim_state(ctx, subject, &wanted.name_any()).await?;
        Ok(VolumeClaim { wanted, standing })
    });
    futures::future::try_join_all(looks).await
}

/// Reads the metadata of a claim and judges whether it may be used.
pub(super) async fn claim_state(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    name: &str,
) -> Result<ClaimState, ReconcileError> {
    let api: Api<PersistentVolumeClaim> = subject.api(ctx);
    let found = find("get a volume claim", api.get_metadata(name)).await?;
    Ok(found.map_or(ClaimState::Absent, |found| claims::judge(&found, subject.agent)))
}

/// The last report of a pod that is gone. The report and the deletion may both have arrived since the previous
/// reconcile.
fn final_report(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    memory: &AgentReconcileState,
    pod: Option<&PodState>,
) -> Option<ReceivedReport> {
    let (parted, heard) = ctx
        .shared
        .loops
        .detach_other(&subject.key, pod.map(|pod| pod.uid.as_str()))?;
    // A pod of an earlier Agent with the same name was never monitored by this one: its report does not count.
    let listened = memory.listening.as_ref().is_some_and(|(uid, _)| *uid == parted.uid);
    listened.then_some(heard)
}

/// The pod from the watch, or the one just created that the watch has not delivered yet.
fn current_pod(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    memory: &AgentReconcileState,
) -> Option<Arc<WatchedPod>> {
    ctx.scopes.pod(&subject.key).or_else(|| memory.created.clone())
}

/// References are read when a pod is about to be created from them, and once per generation of a spec that is not
/// applied yet.
fn needs_references(intent: Intent, subject: &ReconciledAgent<'_>, memory: &AgentReconcileState) -> bool {
    let unseen = memory.accepted_generation != subject.agent.metadata.generation;
    match intent {
        Intent::Create | Intent::Replace(_) => true,
        Intent::KeepOutdated(_) | Intent::CreateLater(_) | Intent::Ending { rest: None, .. } => unseen,
        Intent::Keep
        | Intent::AwaitStop(_)
        | Intent::RecordOutcome
        | Intent::Remove(_)
        | Intent::Rest(_)
        | Intent::Ending { rest: Some(_), .. } => false,
    }
}

async fn references(ctx: &ReconcileContext, subject: &ReconciledAgent<'_>) -> Result<AgentReferences, ReconcileError> {
    let spec = &subject.agent.spec;
    let model = model_references(ctx, subject, Some(&spec.model));
    let light = model_references(ctx, subject, spec.light_model.as_ref());
    let instructions = async {
        match &spec.instructions_from {
            Some(source) => text(ctx, subject, &source.config_map_key_ref).await.map(Some),
            None => Ok(None),
        }
    };
    let servers = spec.tools.servers.iter();
    let headers = futures::future::try_join_all(servers.filter_map(|server| {
        let secret = server.headers_secret_ref.as_ref()?;
        Some(async move { Ok((server.name.clone(), keys(ctx, subject, &secret.name).await?)) })
    }));
    let (model, light, instructions, skills, workspace, headers) = tokio::try_join!(
        model,
        light,
        instructions,
        skills(ctx, subject),
        workspace(ctx, subject),
        headers
    )?;
    Ok(AgentReferences {
        model,
        light,
        instructions,
        skills,
        workspace,
        headers: headers.into_iter().collect(),
    })
}

async fn model_references(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    model: Option<&ModelSpec>,
) -> Result<ModelReferences, ReconcileError> {
    let key = async {
        match model.and_then(|model| model.api_key_secret_ref.as_ref()) {
            Some(reference) => secret(ctx, subject, reference).await.map(Some),
            None => Ok(None),
        }
    };
    let script = async {
        match model.and_then(|model| model.scripted.as_ref()) {
            Some(source) => Ok(Some(match text(ctx, subject, &source.config_map_key_ref).await? {
                ReferenceLookup::Found(text) => ReferenceLookup::Found(ctx.shared.scripts.check(text).await),
                ReferenceLookup::NoObject => ReferenceLookup::NoObject,
                ReferenceLookup::NoKey => ReferenceLookup::NoKey,
            })),
            None => Ok(None),
        }
    };
    let (key, script) = tokio::try_join!(key, script)?;
    Ok(ModelReferences { key, script })
}

/// Reads only whether the key exists; its value is dropped at once.
async fn secret(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    reference: &KeyRef,
) -> Result<ReferenceLookup<()>, ReconcileError> {
    let api: Api<Secret> = subject.api(ctx);
    let secret = find("get a Secret", api.get(&reference.name)).await?;
    Ok(match secret {
        None => ReferenceLookup::NoObject,
        Some(secret) if secret.data.iter().flatten().any(|(key, _)| *key == reference.key) => {
            ReferenceLookup::Found(())
        }
        Some(_) => ReferenceLookup::NoKey,
    })
}

/// Reads the keys of a Secret; the values are dropped at once.
async fn keys(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    name: &str,
) -> Result<ReferenceLookup<Vec<String>>, ReconcileError> {
    let api: Api<Secret> = subject.api(ctx);
    let secret = find("get a Secret", api.get(name)).await?;
    Ok(secret.map_or(ReferenceLookup::NoObject, |secret| {
        ReferenceLookup::Found(secret.data.unwrap_or_default().into_keys().collect())
    }))
}

async fn text(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    reference: &KeyRef,
) -> Result<ReferenceLookup<String>, ReconcileError> {
    Ok(key_of(
        texts(ctx, subject, &reference.name).await?.as_ref(),
        &reference.key,
    ))
}

/// Reads the texts of the skills, in their order. Skills often share a ConfigMap, which is then read once.
async fn skills(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
) -> Result<Vec<ReferenceLookup<String>>, ReconcileError> {
    let references = || {
        let skills = subject.agent.spec.skills.iter();
        skills.map(|skill| &skill.config_map_key_ref)
    };
    let names: BTreeSet<&String> = references().map(|reference| &reference.name).collect();
    let reads = names.into_iter().map(|name| async move {
        let texts = texts(ctx, subject, name).await?;
        Ok::<_, ReconcileError>((name, texts))
    });
    let read = futures::future::try_join_all(reads).await?;
    let maps: BTreeMap<_, _> = read.into_iter().collect();
    let looked = |reference: &KeyRef| key_of(maps.get(&reference.name).and_then(Option::as_ref), &reference.key);
    Ok(references().map(looked).collect())
}

/// Reads the claim that `spec.workspace.claimName` names.
async fn workspace(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
) -> Result<Option<ReferenceLookup<Option<claims::WorkspaceProblem>>>, ReconcileError> {
    let workspace = subject.agent.spec.workspace.as_ref();
    let Some(name) = workspace.and_then(|workspace| workspace.claim_name.as_ref()) else {
        return Ok(None);
    };
    let api: Api<PersistentVolumeClaim> = subject.api(ctx);
    let claim = find("get a volume claim", api.get_metadata(name)).await?;
    Ok(Some(claim.map_or(ReferenceLookup::NoObject, |claim| {
        ReferenceLookup::Found(claims::workspace_problem(&claim, subject.agent))
    })))
}

/// Reads the data of a ConfigMap; `None` if it does not exist.
async fn texts(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    name: &str,
) -> Result<Option<BTreeMap<String, String>>, ReconcileError> {
    let api: Api<ConfigMap> = subject.api(ctx);
    let config_map = find("get a ConfigMap", api.get(name)).await?;
    Ok(config_map.map(|config_map| config_map.data.unwrap_or_default()))
}

fn key_of(texts: Option<&BTreeMap<String, String>>, key: &str) -> ReferenceLookup<String> {
    texts.map_or(ReferenceLookup::NoObject, |texts| {
        texts
            .get(key)
            .map_or(ReferenceLookup::NoKey, |text| ReferenceLookup::Found(text.clone()))
    })
}

async fn node(ctx: &ReconcileContext, name: &str) -> Result<NodeState, ReconcileError> {
    let api: Api<Node> = Api::all(ctx.shared.client.clone());
    let node = match call("get a Node", api.get(name)).await {
        Ok(node) => node,
        Err(error) if error.is(Status::is_not_found) => {
            return Ok(NodeState::Gone);
        }
        // A namespaced installation may not read nodes: a user must decide.
        Err(error) if error.is(Status::is_forbidden) => {
            return Ok(NodeState::Silent);
        }
        Err(error) => return Err(error),
    };
    let taints = node.spec.and_then(|spec| spec.taints).unwrap_or_default();
    if taints
        .iter()
        .any(|taint| taint.key == "node.kubernetes.io/out-of-service")
    {
        return Ok(NodeState::Gone);
    }
    let conditions = node.status.and_then(|status| status.conditions).unwrap_or_default();
    let ready = conditions
        .iter()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True");
    Ok(if ready { NodeState::There } else { NodeState::Silent })
}
