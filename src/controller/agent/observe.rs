//! Reads the objects that a reconcile needs from the API server, and decides nothing.
//!
//! References are read when they matter, before a pod is created. ADR 0002 explains why they are not watched.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{ConfigMap, Node, PersistentVolumeClaim, Secret};
use kube::ResourceExt;
use kube::api::Api;
use kube::core::Status;

use super::claims::{self, ClaimState, VolumeClaim};
use super::preflight::ReferenceKind;
use super::reads::NeededReads;
use super::reconcile::{ReconcileContext, ReconciledAgent};
use super::server_authorities;
use super::snapshot::AgentSnapshot;
use super::text_checks::TextKind;
use super::validate::{AgentReferences, ModelReferences, ReferenceLookup, environment_references};
use crate::api::agent::{KeyRef, ModelSpec};
use crate::controller::runtime::error::{ReconcileError, call, find};

/// The state of the node of an overdue pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NodeState {
    /// Deleted, or tainted as out-of-service: nothing runs there.
    Gone,
    /// Ready.
    There,
    /// Not ready, or not readable for lack of permission: what runs there is unknown.
    Silent,
}

/// Everything that was read for one reconcile.
pub(super) struct ObservedAgent {
    pub(super) snapshot: AgentSnapshot,
    /// The results of reading the references; `None` if they were not needed.
    pub(super) references: Option<AgentReferences>,
    /// The volume claims and the objects found under their names; empty if they were not needed.
    pub(super) claims: Vec<VolumeClaim>,
    /// The node of an overdue pod.
    pub(super) node: Option<NodeState>,
}

/// Completes the observation. Independent reads run concurrently.
pub(super) async fn observe(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    snapshot: AgentSnapshot,
    needed: NeededReads,
) -> Result<ObservedAgent, ReconcileError> {
    let references = async {
        if needed.references {
            return Box::pin(references(ctx, subject)).await.map(Some);
        }
        Ok(None)
    };
    let node = async {
        match &needed.node {
            Some(name) => node(ctx, name).await.map(Some),
            None => Ok(None),
        }
    };
    let (references, claims, node) = tokio::try_join!(references, claims(ctx, subject, needed.claims), node)?;
    Ok(ObservedAgent {
        snapshot,
        references,
        claims,
        node,
    })
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
    let headers = spec
        .header_secrets()
        .into_iter()
        .map(|headers| async move { Ok((headers.dir.to_owned(), keys(ctx, subject, headers.secret).await?)) });
    let headers = futures::future::try_join_all(headers);
    let authorities = spec.ca_secrets().into_iter().map(|authority| async move {
        let looked = secret(ctx, subject, &server_authorities::required_key(&authority)).await?;
        Ok::<_, ReconcileError>((authority.field, looked))
    });
    let authorities = futures::future::try_join_all(authorities);
    let environment = environment_references(spec).map(|(field, kind, name)| async move {
        Ok::<_, ReconcileError>((field, exists(ctx, subject, kind, name).await?))
    });
    let environment = futures::future::try_join_all(environment);
    let texts = async {
        for (kind, text) in TextKind::of_spec(spec) {
            if let Err(error) = ctx.shared.texts.check(&subject.key.namespace, kind, text).await {
                return Ok(Some(error));
            }
        }
        Ok(None)
    };
    let (model, light, instructions, skills, workspace, headers, authorities, environment, texts) = tokio::try_join!(
        model,
        light,
        instructions,
        skills(ctx, subject),
        workspace(ctx, subject),
        headers,
        authorities,
        environment,
        texts
    )?;
    Ok(AgentReferences {
        model,
        light,
        instructions,
        skills,
        workspace,
        headers: headers.into_iter().collect(),
        authorities: authorities.into_iter().collect(),
        environment: environment.into_iter().collect(),
        texts,
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
                ReferenceLookup::Found(text) => ReferenceLookup::Found(
                    ctx.shared
                        .texts
                        .check(&subject.key.namespace, TextKind::Script, text)
                        .await,
                ),
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

async fn exists(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    kind: ReferenceKind,
    name: &str,
) -> Result<bool, ReconcileError> {
    Ok(match kind {
        ReferenceKind::Secret => keys(ctx, subject, name).await? != ReferenceLookup::NoObject,
        ReferenceKind::ConfigMap => texts(ctx, subject, name).await?.is_some(),
    })
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
