//! Step one: what there is. All reads of a reconcile, and no decision.
//!
//! Pods come from the watch. Everything else is read only when it matters: references before a pod is made, the node of
//! a pod that should be gone. ADR 0002 says why references are not watched.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Node, PersistentVolumeClaim, Pod, Secret};
use kube::ResourceExt;
use kube::api::Api;
use kube::core::Status;
use kube::runtime::reflector::ObjectRef;

use super::claims::{self, Claim, Standing};
use super::error::{Error, call, find};
use super::intent::{Intent, Situation};
use super::manifest::Marks;
use super::memory::Remembered;
use super::outside::{self, Finding};
use super::pod_state::{PodReason, PodState};
use super::reconcile::{Context, Subject};
use super::totals;
use super::validate::{Looked, ModelReferences, References};
use crate::api::AgentStatus;
use crate::api::agent::{KeyRef, Model};
use crate::controller::loops::Heard;
use crate::link::messages::Known;

/// What is known of the node of a pod that should be gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NodeState {
    /// Deleted, or marked out-of-service: nothing runs there.
    Gone,
    /// It answers, or nothing is known of it.
    There,
    /// It does not answer: what runs there is unknown.
    Silent,
    /// It does not answer, but what runs there can act no more, and has kept nothing that a second pod would use too.
    Spent,
}

/// All that was read.
pub(super) struct Observed {
    /// The pod.
    pub(super) pod: Option<PodState>,
    /// What the pod last said.
    pub(super) heard: Option<Heard>,
    /// What is to become of the pod.
    pub(super) intent: Intent,
    /// What the references led to; `None` when they did not matter.
    pub(super) references: Option<References>,
    /// The volume claims and what was found under their names; empty when they did not matter.
    pub(super) claims: Vec<Claim>,
    /// The node of a pod that should be gone.
    pub(super) node: Option<NodeState>,
    /// All that is known to have been used: written, remembered, and just said.
    pub(super) known: Known,
    /// A loop that is seen from outside.
    pub(super) finding: Option<Finding>,
}

/// Reads what this Agent needs.
pub(super) async fn observe(
    ctx: &Context,
    subject: &Subject<'_>,
    status: &AgentStatus,
    memory: &Remembered,
    now: Timestamp,
) -> Result<Observed, Error> {
    let found = current_pod(ctx, subject, memory);
    let pod = found.as_deref().map(PodState::of);
    let heard = pod
        .as_ref()
        .and_then(|pod| ctx.shared.loops.heard(&subject.key, &pod.uid));
    let last_contact = pod
        .as_ref()
        .and_then(|pod| ctx.shared.loops.last_contact(&subject.key, &pod.uid));
    let situation = Situation {
        agent: subject.agent,
        status,
        pod: pod.as_ref(),
        marks: Marks(found.as_ref().and_then(|pod| pod.metadata.annotations.as_ref())),
        heard: heard.as_ref(),
        last_contact,
        memory,
        settings: &ctx.shared.settings,
        now,
    };
    let intent = situation.intent();
    let looked = async {
        if matter(intent, subject, memory) {
            return Box::pin(references(ctx, subject)).await.map(Some);
        }
        Ok(None)
    };
    let needed = claims_to_look_at(intent, subject, pod.as_ref(), memory);
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
    let parted = parting_word(ctx, subject, memory, pod.as_ref());
    let known = totals::known(status, memory.known.as_ref(), heard.as_ref().or(parted.as_ref()));
    if parted.is_some() {
        subject.remember(ctx, |memory| memory.known = Some(known.clone()));
    }
    let finding = outside::look(
        subject.agent,
        status,
        heard.as_ref(),
        &ctx.shared.budgets.windows(&subject.key),
    );
    Ok(Observed {
        pod,
        heard,
        intent,
        references,
        claims,
        node,
        known,
        finding,
    })
}

/// Claims are looked at before a pod is made, and while one waits for a node: one may be gone by then.
fn claims_to_look_at(
    intent: Intent,
    subject: &Subject<'_>,
    pod: Option<&PodState>,
    memory: &Remembered,
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

async fn claims(ctx: &Context, subject: &Subject<'_>, wanted: Vec<PersistentVolumeClaim>) -> Result<Vec<Claim>, Error> {
    let looks = wanted.into_iter().map(|wanted| async move {
        let standing = claim(ctx, subject, &wanted.name_any()).await?;
        Ok(Claim { wanted, standing })
    });
    futures::future::try_join_all(looks).await
}

/// What there is under the name of a claim. Only its metadata is read.
pub(super) async fn claim(ctx: &Context, subject: &Subject<'_>, name: &str) -> Result<Standing, Error> {
    let api: Api<PersistentVolumeClaim> = subject.api(ctx);
    let found = find("get a volume claim", api.get_metadata(name)).await?;
    Ok(found.map_or(Standing::Absent, |found| claims::judge(&found, subject.agent)))
}

/// What this Agent's pod said last, when it is gone since: both may have come while something else was done.
fn parting_word(ctx: &Context, subject: &Subject<'_>, memory: &Remembered, pod: Option<&PodState>) -> Option<Heard> {
    let (parted, heard) = ctx.shared.loops.part(&subject.key, pod.map(|pod| pod.uid.as_str()))?;
    // An Agent of the same name before this one had a pod that this one never listened to.
    let listened = memory.listening.as_ref().is_some_and(|(uid, _)| *uid == parted.uid);
    listened.then_some(heard)
}

/// The pod as the watch has it, or the one just made that the watch does not have yet.
fn current_pod(ctx: &Context, subject: &Subject<'_>, memory: &Remembered) -> Option<Arc<Pod>> {
    let reference = ObjectRef::new(&subject.key.name).within(&subject.key.namespace);
    ctx.pods.get(&reference).or_else(|| memory.created.clone())
}

/// References are looked at when a pod is about to be made of them, and once per generation of a spec that waits.
fn matter(intent: Intent, subject: &Subject<'_>, memory: &Remembered) -> bool {
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

async fn references(ctx: &Context, subject: &Subject<'_>) -> Result<References, Error> {
    let spec = &subject.agent.spec;
    let model = of_model(ctx, subject, Some(&spec.model));
    let light = of_model(ctx, subject, spec.light_model.as_ref());
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
    Ok(References {
        model,
        light,
        instructions,
        skills,
        workspace,
        headers: headers.into_iter().collect(),
    })
}

async fn of_model(ctx: &Context, subject: &Subject<'_>, model: Option<&Model>) -> Result<ModelReferences, Error> {
    let key = async {
        match model.and_then(|model| model.api_key_secret_ref.as_ref()) {
            Some(reference) => secret(ctx, subject, reference).await.map(Some),
            None => Ok(None),
        }
    };
    let script = async {
        match model.and_then(|model| model.scripted.as_ref()) {
            Some(source) => Ok(Some(match text(ctx, subject, &source.config_map_key_ref).await? {
                Looked::Found(text) => Looked::Found(ctx.shared.scripts.check(text).await),
                Looked::NoObject => Looked::NoObject,
                Looked::NoKey => Looked::NoKey,
            })),
            None => Ok(None),
        }
    };
    let (key, script) = tokio::try_join!(key, script)?;
    Ok(ModelReferences { key, script })
}

/// Only whether the key is there; what it says is dropped at once.
async fn secret(ctx: &Context, subject: &Subject<'_>, reference: &KeyRef) -> Result<Looked<()>, Error> {
    let api: Api<Secret> = subject.api(ctx);
    let secret = find("get a Secret", api.get(&reference.name)).await?;
    Ok(match secret {
        None => Looked::NoObject,
        Some(secret) if secret.data.iter().flatten().any(|(key, _)| *key == reference.key) => Looked::Found(()),
        Some(_) => Looked::NoKey,
    })
}

/// The keys of a Secret; what they hold is dropped at once.
async fn keys(ctx: &Context, subject: &Subject<'_>, name: &str) -> Result<Looked<Vec<String>>, Error> {
    let api: Api<Secret> = subject.api(ctx);
    let secret = find("get a Secret", api.get(name)).await?;
    Ok(secret.map_or(Looked::NoObject, |secret| {
        Looked::Found(secret.data.unwrap_or_default().into_keys().collect())
    }))
}

async fn text(ctx: &Context, subject: &Subject<'_>, reference: &KeyRef) -> Result<Looked<String>, Error> {
    Ok(key_of(
        texts(ctx, subject, &reference.name).await?.as_ref(),
        &reference.key,
    ))
}

/// The texts of the skills, in their order. They often share a ConfigMap, which is read once.
async fn skills(ctx: &Context, subject: &Subject<'_>) -> Result<Vec<Looked<String>>, Error> {
    let references = || {
        let skills = subject.agent.spec.skills.iter();
        skills.map(|skill| &skill.config_map_key_ref)
    };
    let names: BTreeSet<&String> = references().map(|reference| &reference.name).collect();
    let reads = names.into_iter().map(|name| async move {
        let texts = texts(ctx, subject, name).await?;
        Ok::<_, Error>((name, texts))
    });
    let read = futures::future::try_join_all(reads).await?;
    let maps: BTreeMap<_, _> = read.into_iter().collect();
    let looked = |reference: &KeyRef| key_of(maps.get(&reference.name).and_then(Option::as_ref), &reference.key);
    Ok(references().map(looked).collect())
}

/// The claim that the workspace names.
async fn workspace(ctx: &Context, subject: &Subject<'_>) -> Result<Option<Looked<Option<String>>>, Error> {
    let workspace = subject.agent.spec.workspace.as_ref();
    let Some(name) = workspace.and_then(|workspace| workspace.claim_name.as_ref()) else {
        return Ok(None);
    };
    let api: Api<PersistentVolumeClaim> = subject.api(ctx);
    let claim = find("get a volume claim", api.get_metadata(name)).await?;
    Ok(Some(claim.map_or(Looked::NoObject, |claim| {
        Looked::Found(claims::not_a_workspace(&claim, subject.agent))
    })))
}

/// The data of a ConfigMap; `None`: there is none of this name.
async fn texts(ctx: &Context, subject: &Subject<'_>, name: &str) -> Result<Option<BTreeMap<String, String>>, Error> {
    let api: Api<ConfigMap> = subject.api(ctx);
    let config_map = find("get a ConfigMap", api.get(name)).await?;
    Ok(config_map.map(|config_map| config_map.data.unwrap_or_default()))
}

fn key_of(texts: Option<&BTreeMap<String, String>>, key: &str) -> Looked<String> {
    texts.map_or(Looked::NoObject, |texts| {
        texts.get(key).map_or(Looked::NoKey, |text| Looked::Found(text.clone()))
    })
}

async fn node(ctx: &Context, name: &str) -> Result<NodeState, Error> {
    let api: Api<Node> = Api::all(ctx.shared.client.clone());
    let node = match call("get a Node", api.get(name)).await {
        Ok(node) => node,
        Err(error) if error.is(Status::is_not_found) => {
            return Ok(NodeState::Gone);
        }
        // An install for some namespaces only may not read nodes: a person decides then.
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
