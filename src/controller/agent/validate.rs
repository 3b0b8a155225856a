//! Validates an Agent beyond what admission can check: references, policy and sizes. Pure. Each mistake gets a reason,
//! and a message with the field and the fix.

use std::collections::BTreeMap;

use jiff::tz::TimeZone;
use kube::ResourceExt;
use serde_json::json;

use super::claims::WorkspaceProblem;
use super::context::ReconcilerSettings;
use super::manifest;
use super::preflight::ReferenceKind;
use super::server_authorities;
use crate::api::agent::{AgentSpec, KeyRef, ModelSpec, SkillSpec};
use crate::api::condition::{self, ConditionType};
use crate::api::tools::{MAX_APPROVAL_CONDITIONS, ToolsSpec, is_tool_header};
use crate::api::{Agent, AgentStatus, WORKSPACE_LABEL};
use crate::controller::budget::assignment::{CallObstacle as Unlimited, CallObstacleReason};
use crate::controller::runtime::names;
use crate::link::pod::MAX_SKILL_BYTES;
use crate::sensor_pipeline::expression::{Expression, ExpressionScope, PatternAllowance};
use crate::support::json_schema;

/// Limit of a label value and of a pod's host name.
const MAX_NAME: usize = 63;
/// Longest configuration of a container, in bytes. Linux limits one environment variable to 128 KiB, including its
/// name.
const MAX_CONFIG: usize = 120 * 1024;
/// Longest system prompt, without skills, in bytes.
const MAX_INSTRUCTIONS: usize = 32 * 1024;

/// The result of reading a reference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ReferenceLookup<T> {
    /// The object does not exist.
    NoObject,
    /// The object does not have the key.
    NoKey,
    Found(T),
}

/// The results of reading an Agent's references; `None` if a field is not set or was not read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct AgentReferences {
    /// `spec.model`.
    pub(super) model: ModelReferences,
    /// `spec.lightModel`.
    pub(super) light: ModelReferences,
    /// `spec.instructionsFrom`.
    pub(super) instructions: Option<ReferenceLookup<String>>,
    /// `spec.skills`, in their order.
    pub(super) skills: Vec<ReferenceLookup<String>>,
    /// `workspace.claimName`: whether it exists, and why it cannot be mounted.
    pub(super) workspace: Option<ReferenceLookup<Option<WorkspaceProblem>>>,
    /// `spec.tools.servers[].headersSecretRef`, by server name: only the keys of the Secret, never their values.
    pub(super) headers: BTreeMap<String, ReferenceLookup<Vec<String>>>,
    /// `tls.caSecretRef` of models, tool servers and the receiver of responses, by field; only whether the key exists, never its value.
    pub(super) authorities: BTreeMap<String, ReferenceLookup<()>>,
    /// Whether the objects of [`environment_references`] exist, by field.
    pub(super) environment: BTreeMap<String, bool>,
    /// The first error of the texts that are long to check, if any: see [`TextKind`](super::text_checks::TextKind).
    pub(super) texts: Option<String>,
}

/// The results of reading the references of one model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ModelReferences {
    /// `apiKeySecretRef`; only its existence, never its value.
    pub(super) key: Option<ReferenceLookup<()>>,
    /// `scripted`: the parse error of the script, if any.
    pub(super) script: Option<ReferenceLookup<Result<(), String>>>,
}

/// Reasons of `Accepted=False`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::AsRefStr, strum::EnumIter)]
pub(super) enum InvalidReason {
    /// The spec itself cannot be used.
    InvalidSpec,
    /// A Secret or its key is missing.
    SecretNotFound,
    /// A ConfigMap or its key is missing.
    ConfigMapNotFound,
    /// The volume claim that `spec.workspace.claimName` names is missing.
    VolumeClaimNotFound,
    /// The volume claim that `spec.workspace.claimName` names belongs to an Agent or a Sensor, or is being deleted.
    VolumeClaimInUse,
    /// The volume claim that `spec.workspace.claimName` names does not have the label for workspaces.
    VolumeClaimNotLabelled,
    /// An AgentBudget that `spec.budgetRefs` names is missing.
    BudgetNotFound,
    /// The platform requires a budget, and no budget applies.
    BudgetRequired,
    /// A cost limit applies, and the price of the model is unknown.
    PriceUnknown,
    /// An AgentBudget that applies, or may apply, is unusable.
    BudgetUnavailable,
    /// The platform's policy does not allow a setting of the spec.
    NotAllowed,
}

impl From<Unlimited> for InvalidAgent {
    fn from(obstacle: Unlimited) -> Self {
        let reason = match obstacle.reason {
            CallObstacleReason::BudgetNotFound => InvalidReason::BudgetNotFound,
            CallObstacleReason::BudgetRequired => InvalidReason::BudgetRequired,
            CallObstacleReason::PriceUnknown => InvalidReason::PriceUnknown,
            CallObstacleReason::BudgetUnavailable => InvalidReason::BudgetUnavailable,
        };
        Self {
            reason,
            message: obstacle.message,
        }
    }
}

/// Reads back the budget problem in `Accepted=False`. It is kept until the AgentBudgets are listed, so that a restart
/// of the controller does not clear it for a moment.
pub(super) fn reported_budget_problem(status: &AgentStatus) -> Option<InvalidAgent> {
    let of_budgets = [
        InvalidReason::BudgetNotFound,
        InvalidReason::BudgetRequired,
        InvalidReason::PriceUnknown,
        InvalidReason::BudgetUnavailable,
    ];
    let accepted =
        condition::find(&status.conditions, ConditionType::Accepted).filter(|accepted| accepted.status == "False")?;
    let reason = of_budgets
        .into_iter()
        .find(|reason| reason.as_ref() == accepted.reason)?;
    Some(InvalidAgent {
        reason,
        message: accepted.message.clone(),
    })
}

/// A user's mistake: reported as a condition, never as an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InvalidAgent {
    pub(super) reason: InvalidReason,
    /// States the field and the fix.
    pub(super) message: String,
}

impl InvalidAgent {
    fn spec(message: impl Into<String>) -> Self {
        Self {
            reason: InvalidReason::InvalidSpec,
            message: message.into(),
        }
    }
}

pub(super) fn validate(
    agent: &Agent,
    references: &AgentReferences,
    settings: &ReconcilerSettings,
) -> Result<(), InvalidAgent> {
    // Only the first problem is reported: first the spec itself, then its references.
    name(agent)?;
    size(agent, settings)?;
    zone(agent)?;
    let pods = &settings.policy.pods;
    let refused = pods
        .problem(&agent.spec.pod)
        .or_else(|| pods.image_problem(&agent.spec.tools));
    if let Some(message) = refused {
        return Err(InvalidAgent {
            reason: InvalidReason::NotAllowed,
            message,
        });
    }
    if let Some(error) = &references.texts {
        return Err(InvalidAgent::spec(error));
    }
    of_model("spec.model", &agent.spec.model, &references.model)?;
    if let Some(light) = &agent.spec.light_model {
        of_model("spec.lightModel", light, &references.light)?;
    }
    if let (Some(source), Some(looked)) = (&agent.spec.instructions_from, &references.instructions) {
        let field = "spec.instructionsFrom.configMapKeyRef";
        let reference = &source.config_map_key_ref;
        let text = found(looked, "ConfigMap", InvalidReason::ConfigMapNotFound, field, reference)?;
        instructions(text, field, reference)?;
    }
    skills(&agent.spec.skills, &references.skills)?;
    workspace(agent, references.workspace.as_ref())?;
    for secret in agent.spec.header_secrets() {
        if let Some(looked) = references.headers.get(secret.dir) {
            headers(looked, &secret.field, secret.secret)?;
        }
    }
    for authority in agent.spec.ca_secrets() {
        if let Some(looked) = references.authorities.get(&authority.field) {
            server_authorities::check(&authority, looked)?;
        }
    }
    for (field, kind, name) in environment_references(&agent.spec) {
        if references.environment.get(&field) == Some(&false) {
            return Err(environment(&field, kind, name));
        }
    }
    Ok(())
}

fn of_model(path: &str, model: &ModelSpec, references: &ModelReferences) -> Result<(), InvalidAgent> {
    if let (Some(reference), Some(looked)) = (&model.api_key_secret_ref, &references.key) {
        let field = format!("{path}.apiKeySecretRef");
        found(looked, "Secret", InvalidReason::SecretNotFound, &field, reference)?;
    }
    if let (Some(source), Some(looked)) = (&model.scripted, &references.script) {
        let field = format!("{path}.scripted.configMapKeyRef");
        let reference = &source.config_map_key_ref;
        let verdict = found(looked, "ConfigMap", InvalidReason::ConfigMapNotFound, &field, reference)?;
        verdict.as_ref().map_err(|error| {
            let (name, key) = (&reference.name, &reference.key);
            InvalidAgent::spec(format!(
                "{field}: key {key} of ConfigMap {name} is not a valid script: {error}"
            ))
        })?;
    }
    Ok(())
}

/// The fields with an `http://` URL to which a Secret is sent, each with the name of the Secret.
pub(super) fn plain_http_secrets(spec: &AgentSpec) -> impl Iterator<Item = (String, &str)> {
    let models = [
        ("spec.model", Some(&spec.model)),
        ("spec.lightModel", spec.light_model.as_ref()),
    ];
    let models = models.into_iter().filter_map(|(path, model)| {
        let model = model?;
        let secret = model.api_key_secret_ref.as_ref()?;
        Some((
            format!("{path}.baseURL"),
            model.base_url.as_deref()?,
            secret.name.as_str(),
        ))
    });
    let headers = spec.header_secrets().into_iter();
    let headers = headers.filter_map(|headers| Some((headers.url_field, headers.url?, headers.secret)));
    models
        .chain(headers)
        .filter(|(_, url, _)| url.starts_with("http://"))
        .map(|(field, _, secret)| (field, secret))
}

fn headers(looked: &ReferenceLookup<Vec<String>>, field: &str, secret: &str) -> Result<(), InvalidAgent> {
    let missing = |message| InvalidAgent {
        reason: InvalidReason::SecretNotFound,
        message,
    };
    let keys = match looked {
        ReferenceLookup::NoObject => {
            return Err(missing(format!(
                "{field}: Secret {secret} does not exist in this namespace: create it with a key for each header, \
                 such as Authorization, or correct the name"
            )));
        }
        ReferenceLookup::Found(keys) if !keys.is_empty() => keys,
        ReferenceLookup::Found(_) | ReferenceLookup::NoKey => {
            return Err(missing(format!(
                "{field}: Secret {secret} has no key: add one for each header, such as Authorization"
            )));
        }
    };
    if keys.iter().all(|key| is_tool_header(key)) {
        return Ok(());
    }
    // Without the key, which may be a credential in the wrong place.
    Err(InvalidAgent::spec(format!(
        "{field}: Secret {secret} has a key that is not an allowed header name, and each key is sent as a header: remove \
         each key with other characters than letters, digits, -, _ and ., and headers that are set automatically, such as \
         Host, or reference another Secret"
    )))
}

/// The objects of `container.envFrom` of all servers: the field, the kind and the name.
pub(super) fn environment_references(spec: &AgentSpec) -> impl Iterator<Item = (String, ReferenceKind, &str)> {
    let containers = spec
        .tools
        .servers
        .iter()
        .filter_map(|server| Some((&server.name, server.container.as_ref()?)));
    containers.flat_map(|(server, container)| {
        container
            .env_from
            .iter()
            .enumerate()
            .filter_map(move |(index, source)| {
                let field = format!("spec.tools.servers[{server}].container.envFrom[{index}]");
                let secret = source
                    .secret_ref
                    .as_ref()
                    .map(|secret| (ReferenceKind::Secret, &secret.name));
                let map = source
                    .config_map_ref
                    .as_ref()
                    .map(|map| (ReferenceKind::ConfigMap, &map.name));
                let (kind, name) = secret.or(map)?;
                Some((field, kind, name.as_str()))
            })
    })
}

fn environment(field: &str, kind: ReferenceKind, name: &str) -> InvalidAgent {
    let (reason, reference) = match kind {
        ReferenceKind::Secret => (InvalidReason::SecretNotFound, "Secret"),
        ReferenceKind::ConfigMap => (InvalidReason::ConfigMapNotFound, "ConfigMap"),
    };
    InvalidAgent {
        reason,
        message: format!(
            "{field}: {reference} {name} does not exist in this namespace: create it with a key for each variable, or correct \
             the name"
        ),
    }
}

fn workspace(agent: &Agent, looked: Option<&ReferenceLookup<Option<WorkspaceProblem>>>) -> Result<(), InvalidAgent> {
    let spec = agent.spec.workspace.as_ref();
    let Some(name) = spec.and_then(|workspace| workspace.claim_name.as_ref()) else {
        return Ok(());
    };
    let (reason, problem) = match looked {
        Some(ReferenceLookup::NoObject) => (
            InvalidReason::VolumeClaimNotFound,
            "does not exist in this namespace: create it, correct the name, or remove claimName to have a claim created"
                .to_owned(),
        ),
        Some(ReferenceLookup::Found(Some(WorkspaceProblem::InUse(why)))) => (
            InvalidReason::VolumeClaimInUse,
            format!("{why}: name another claim, or remove claimName to have a claim created"),
        ),
        Some(ReferenceLookup::Found(Some(WorkspaceProblem::NotLabelled))) => (
            InvalidReason::VolumeClaimNotLabelled,
            format!(
                "does not have the label {WORKSPACE_LABEL}=true: if Agents of this namespace may read it, run `kubectl label \
                 pvc {name} {WORKSPACE_LABEL}=true`, or remove claimName to have a claim created"
            ),
        ),
        _ => return Ok(()),
    };
    Err(InvalidAgent {
        reason,
        message: format!("spec.workspace.claimName: PersistentVolumeClaim {name} {problem}"),
    })
}

fn name(agent: &Agent) -> Result<(), InvalidAgent> {
    let length = agent.name_any().len();
    if length <= MAX_NAME {
        return Ok(());
    }
    Err(InvalidAgent::spec(format!(
        "metadata.name has {length} characters, and a pod name may have at most {MAX_NAME}: recreate the Agent \
         under a shorter name"
    )))
}

fn size(agent: &Agent, settings: &ReconcilerSettings) -> Result<(), InvalidAgent> {
    let length = manifest::config(agent, i64::MAX, settings, names::WORKER).len();
    if length <= MAX_CONFIG {
        return Ok(());
    }
    Err(InvalidAgent::spec(format!(
        "spec has {length} bytes as JSON; the maximum is {MAX_CONFIG}: move spec.instructions to a \
         ConfigMap and reference it in spec.instructionsFrom"
    )))
}

fn zone(agent: &Agent) -> Result<(), InvalidAgent> {
    let Some(hours) = &agent.spec.guardrails.active_hours else {
        return Ok(());
    };
    TimeZone::get(&hours.time_zone).map(|_| ()).map_err(|_| {
        InvalidAgent::spec(format!(
            "spec.guardrails.activeHours.timeZone {} is not an IANA time zone: use for example Europe/Berlin or UTC",
            hours.time_zone
        ))
    })
}

/// Parses a script of the scripted model; the error is the message for the user.
pub(super) fn script(text: &str) -> Result<(), String> {
    crate::provider::scripted::ModelScript::parse(text)
        .map(|_| ())
        .map_err(|error| error.to_string())
}

/// `spec.task.responseSchema` as a text; `None`: it has none.
pub(super) fn response_schema_text(spec: &AgentSpec) -> Option<String> {
    Some(spec.task.as_ref()?.schema()?.to_string())
}

/// Compiles what [`response_schema_text`] returned; the error is the message for the user.
pub(super) fn response_schema(text: &str) -> Result<(), String> {
    let schema = serde_json::from_str(text).map_err(|error| error.to_string())?;
    json_schema::check(&schema)
        .map_err(|error| format!("spec.task.responseSchema is not a usable JSON schema: {error}"))
}

/// The approval conditions of a spec as one text; `None`: it has none.
pub(super) fn approval_conditions_text(tools: &ToolsSpec) -> Option<String> {
    let conditions: Vec<_> = tools.approval_conditions().collect();
    (!conditions.is_empty()).then(|| json!(conditions).to_string())
}

/// Compiles what [`approval_conditions_text`] returned; the error is the message for the user.
pub(super) fn approval_conditions(text: &str) -> Result<(), String> {
    let conditions: Vec<(String, String)> = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let count = conditions.len();
    if count > MAX_APPROVAL_CONDITIONS {
        return Err(format!(
            "spec.tools has {count} approval conditions, and {MAX_APPROVAL_CONDITIONS} are allowed: remove some, or join \
             them with ||"
        ));
    }
    let mut allowance = PatternAllowance::default();
    for (field, condition) in conditions {
        Expression::compile_within(&condition, ExpressionScope::ToolCall, &mut allowance)
            .map_err(|detail| format!("{field} {detail}"))?;
    }
    Ok(())
}

fn instructions(text: &str, field: &str, reference: &KeyRef) -> Result<(), InvalidAgent> {
    let (name, key) = (&reference.name, &reference.key);
    if text.trim().is_empty() {
        return Err(InvalidAgent::spec(format!(
            "{field}: key {key} of ConfigMap {name} is empty: write the system prompt into it"
        )));
    }
    if text.len() > MAX_INSTRUCTIONS {
        return Err(InvalidAgent::spec(format!(
            "{field}: key {key} of ConfigMap {name} has {} bytes; the maximum for a system prompt is \
             {MAX_INSTRUCTIONS}: shorten it",
            text.len()
        )));
    }
    Ok(())
}

/// `looked` is empty if the skills were not read; `zip` then checks none of them.
fn skills(skills: &[SkillSpec], looked: &[ReferenceLookup<String>]) -> Result<(), InvalidAgent> {
    let mut all = 0;
    for (skill, looked) in skills.iter().zip(looked) {
        let field = format!("spec.skills[{}].configMapKeyRef", skill.name);
        let reference = &skill.config_map_key_ref;
        let text = found(looked, "ConfigMap", InvalidReason::ConfigMapNotFound, &field, reference)?;
        if text.trim().is_empty() {
            let (name, key) = (&reference.name, &reference.key);
            return Err(InvalidAgent::spec(format!(
                "{field}: key {key} of ConfigMap {name} is empty: write the skill into it, or remove it from \
                 spec.skills"
            )));
        }
        all += text.len();
    }
    if all > MAX_SKILL_BYTES {
        return Err(InvalidAgent::spec(format!(
            "spec.skills: the skills have {all} bytes in total; the maximum is {MAX_SKILL_BYTES}: shorten or remove \
             skills"
        )));
    }
    Ok(())
}

fn found<'a, T>(
    looked: &'a ReferenceLookup<T>,
    kind: &str,
    reason: InvalidReason,
    field: &str,
    reference: &KeyRef,
) -> Result<&'a T, InvalidAgent> {
    let (name, key) = (&reference.name, &reference.key);
    let message = match looked {
        ReferenceLookup::Found(value) => return Ok(value),
        ReferenceLookup::NoObject => {
            format!(
                "{field}: {kind} {name} does not exist in this namespace: create it with the key {key}, or correct \
                 the name"
            )
        }
        ReferenceLookup::NoKey => format!("{field}: {kind} {name} has no key {key}: add it, or correct the key"),
    };
    Err(InvalidAgent { reason, message })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_sent_over_plain_http_is_reported_with_its_field() {
        let spec = |scheme: &str, secret: &serde_json::Value| -> AgentSpec {
            let model = serde_json::json!({
                "api": "OpenAIChat", "name": "m", "baseURL": format!("{scheme}://models/v1"), "apiKeySecretRef": secret,
            });
            let headers = (!secret.is_null()).then(|| serde_json::json!({"name": "hub"}));
            let server =
                serde_json::json!({"name": "hub", "url": format!("{scheme}://hub/mcp"), "headersSecretRef": headers});
            serde_json::from_value(
                serde_json::json!({"model": model, "lightModel": model, "tools": {"servers": [server]}}),
            )
            .unwrap()
        };
        let key = serde_json::json!({"name": "key", "key": "k"});
        let open = spec("http", &key);
        let told: Vec<_> = plain_http_secrets(&open).collect();
        let fields = [
            ("spec.model.baseURL", "key"),
            ("spec.lightModel.baseURL", "key"),
            ("spec.tools.servers[hub].url", "hub"),
        ];
        assert_eq!(told, fields.map(|(field, secret)| (field.to_owned(), secret)));
        assert_eq!(plain_http_secrets(&spec("https", &key)).count(), 0);
        assert_eq!(
            plain_http_secrets(&spec("http", &serde_json::Value::Null)).count(),
            0,
            "nothing is sent"
        );
    }

    #[test]
    fn an_unknown_time_zone_is_reported_with_its_field_and_the_fix() {
        let agent = |hours: serde_json::Value| -> Agent {
            serde_json::from_value(serde_json::json!({
                "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent", "metadata": {"name": "a"},
                "spec": {"model": {"api": "Scripted", "name": "m"}, "guardrails": hours},
            }))
            .unwrap()
        };
        let hours = |zone: &str| {
            agent(serde_json::json!({"activeHours": {"timeZone": zone, "start": "08:00", "end": "23:00"}}))
        };
        assert_eq!(zone(&agent(serde_json::json!({}))), Ok(()));
        assert_eq!(zone(&hours("Europe/Berlin")), Ok(()));
        let refused = zone(&hours("Mars/Base")).unwrap_err();
        assert_eq!(refused.reason, InvalidReason::InvalidSpec);
        assert!(
            refused
                .message
                .contains("spec.guardrails.activeHours.timeZone Mars/Base"),
            "{}",
            refused.message
        );
    }
}
