//! The settings that can be simulated, and whether a value is one that an API server would accept.

use std::fmt::Display;
use std::sync::LazyLock;

use kube::ResourceExt;
use serde_json::Value;

use crate::api::crd;
use crate::api::money::micro_usd;
use crate::plugin::failure::PluginError;
use crate::support::json_schema;

/// All fields that `--set` accepts, with what is below them.
pub const SETTINGS: [&str; 24] = [
    "guardrails.actionsPerMinute",
    "guardrails.activeHours",
    "guardrails.maxCallsPerTurn",
    "guardrails.maxConsecutiveToolFailures",
    "guardrails.maxConsecutiveTurns",
    "guardrails.rateLimits",
    "guardrails.tokensPerHour",
    "guardrails.total.costUSD",
    "guardrails.total.tokens",
    "limits.calls",
    "limits.costUSD",
    "limits.inputTokens",
    "limits.outputTokens",
    "limits.tokens",
    "onExhausted",
    "perAgent.calls",
    "perAgent.costUSD",
    "perAgent.inputTokens",
    "perAgent.outputTokens",
    "perAgent.tokens",
    "window.calendar.period",
    "window.calendar.timeZone",
    "window.lifetime",
    "window.rolling.seconds",
];
/// Guardrails that cannot be simulated, and what is missing.
pub const NOT_COMPUTABLE: [(&str, &str); 2] = [
    (
        "guardrails.idleTimeoutSeconds",
        "a history does not record whether a tool result is new",
    ),
    (
        "guardrails.loopDetection",
        "a history records only the beginning of long arguments and results",
    ),
];

/// A mistake in the flags.
#[must_use]
pub fn usage(text: String) -> PluginError {
    PluginError::Usage(text)
}

/// Whether `--set` may have this path: a setting, a part of one, or an object of some.
pub fn check_path(path: &str) -> Result<(), PluginError> {
    if SETTINGS
        .iter()
        .any(|known| is_within(path, known) || is_within(known, path))
    {
        return Ok(());
    }
    if let Some((field, why)) = NOT_COMPUTABLE.iter().find(|(field, _)| is_within(path, field)) {
        return Err(usage(format!("{field} cannot be simulated: {why}")));
    }
    Err(usage(format!(
        "--set {path}: there is no such limit; those that can be simulated are {}",
        SETTINGS.join(", ")
    )))
}

/// Whether a path is this field, or below it.
#[must_use]
pub fn is_within(path: &str, field: &str) -> bool {
    path.strip_prefix(field)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Fails for guardrails that cannot be simulated, although an API server accepts them.
pub fn check_computable(guardrails: &Value) -> Result<(), PluginError> {
    let found = NOT_COMPUTABLE.iter().find(|(field, _)| {
        let name = field.strip_prefix("guardrails.").unwrap_or_default();
        guardrails.get(name).is_some()
    });
    found.map_or(Ok(()), |(field, _)| check_path(field))
}

/// The schemas of what `--set` changes, which take a while to generate.
pub static SCHEMAS: LazyLock<SettingSchemas> = LazyLock::new(|| SettingSchemas {
    budget: schema("agentbudgets.agentloop.dev", "spec"),
    guardrails: schema("agents.agentloop.dev", "spec/properties/guardrails"),
});

/// As an API server has them.
pub struct SettingSchemas {
    /// The spec of an AgentBudget.
    pub budget: Value,
    /// `spec.guardrails` of an Agent.
    pub guardrails: Value,
}

/// The schema of a part of a kind.
fn schema(definition: &str, part: &str) -> Value {
    let mut found = crd::all().into_iter().filter(|found| found.name_any() == definition);
    let whole = found.find_map(|found| serde_json::to_value(found).ok());
    let place = format!("/spec/versions/0/schema/openAPIV3Schema/properties/{part}");
    whole
        .and_then(|mut whole| Some(whole.pointer_mut(&place)?.take()))
        .unwrap_or_default()
}

/// Whether the API server accepts these fields. `prefix`: what is above them in messages, with a point.
pub fn check_fields(prefix: &str, schema: &Value, object: &Value) -> Result<(), PluginError> {
    if let Some((field, known)) = unknown(prefix, schema, object) {
        return Err(usage(format!("{field} is not known; the fields there are {known}")));
    }
    if let Some(problem) = json_schema::violation(schema, object) {
        let (place, problem) = match problem.strip_prefix('/').and_then(|below| below.split_once(": ")) {
            Some((below, rest)) => (format!("{prefix}{}", below.replace('/', ".")), rest.to_owned()),
            None => (prefix.trim_end_matches('.').to_owned(), problem),
        };
        let place = if place.is_empty() { "spec".to_owned() } else { place };
        return Err(usage(format!("{place}: {problem}")));
    }
    check_money(prefix, object)
}

/// The first field that is not in the schema, and the names of those that are.
fn unknown(prefix: &str, schema: &Value, value: &Value) -> Option<(String, String)> {
    match value {
        // Of another type, which the schema says.
        Value::Object(_) if schema["type"] != "object" => None,
        Value::Object(fields) => fields.iter().find_map(|(name, field)| {
            let place = format!("{prefix}{name}");
            let free = &schema["additionalProperties"];
            match schema["properties"].get(name) {
                Some(known) => unknown(&format!("{place}."), known, field),
                None if free.is_object() || schema["x-kubernetes-preserve-unknown-fields"] == true => None,
                None => {
                    let known = schema["properties"].as_object().into_iter().flatten();
                    let names: Vec<&str> = known.map(|(name, _)| name.as_str()).collect();
                    Some((place, names.join(", ")))
                }
            }
        }),
        Value::Array(items) => items.iter().enumerate().find_map(|(index, item)| {
            let place = format!("{}[{index}].", prefix.trim_end_matches('.'));
            unknown(&place, &schema["items"], item)
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => None,
    }
}

fn check_money(prefix: &str, object: &Value) -> Result<(), PluginError> {
    for (name, value) in object.as_object().into_iter().flatten() {
        let place = format!("{prefix}{name}");
        let wrong = |problem: &dyn Display| usage(format!("{place} {problem}"));
        match value.as_str() {
            Some(text) if name == "costUSD" => drop(micro_usd(text).map_err(|problem| wrong(&problem))?),
            _ => check_money(&format!("{place}."), value)?,
        }
    }
    Ok(())
}
