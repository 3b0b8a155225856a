//! The limits to simulate, from an AgentBudget and from `--set`.

use serde_json::{Value, json};

use crate::api::AgentSpec;
use crate::api::budget::{AgentBudgetSpec, BudgetLimits};
use crate::engine::settings::EngineSettings;
use crate::plugin::failure::PluginError;

/// The guardrails that a history has the input of.
const COMPUTABLE: [&str; 8] = [
    "actionsPerMinute",
    "activeHours",
    "maxCallsPerTurn",
    "maxConsecutiveToolFailures",
    "maxConsecutiveTurns",
    "rateLimits",
    "tokensPerHour",
    "total",
];
/// The others, and what is missing.
const NOT_COMPUTABLE: [(&str, &str); 2] = [
    (
        "idleTimeoutSeconds",
        "a history does not record whether a tool result is new",
    ),
    (
        "loopDetection",
        "a history records only the beginning of long arguments and results",
    ),
];

/// What is simulated.
#[derive(Clone, Debug)]
pub struct SimulatedLimits {
    /// The AgentBudget.
    pub budget: Option<AgentBudgetSpec>,
    /// The guardrails, with all others off.
    pub settings: EngineSettings,
    /// `guardrails.tokensPerHour` and `guardrails.total` are accounts of the ledger.
    pub own: OwnLimits,
    /// The names of the limits, for readers.
    pub names: Vec<String>,
}

/// The guardrails that the ledger enforces.
#[derive(Clone, Debug, Default)]
pub struct OwnLimits {
    /// `guardrails.tokensPerHour`.
    pub tokens_per_hour: Option<i64>,
    /// `guardrails.total.tokens`.
    pub total_tokens: Option<i64>,
    /// `guardrails.total.costUSD`.
    pub total_cost: Option<String>,
}

/// Reads the manifest of an AgentBudget and the values of `--set`.
pub fn read(budget: Option<&str>, set: &[String]) -> Result<SimulatedLimits, PluginError> {
    let mut spec = budget.map(budget_spec).transpose()?;
    let mut guardrails = json!({});
    let mut names = Vec::new();
    for change in set {
        let (path, value) = parsed(change)?;
        match path.split('.').next() {
            Some("limits" | "perAgent" | "window" | "onExhausted") => {
                let spec = spec.get_or_insert_with(|| json!({"limits": {}, "window": {"lifetime": {}}}));
                // Exactly one kind of window.
                let kind = path.strip_prefix("window.").and_then(|below| below.split('.').next());
                if kind.is_some_and(|kind| spec["window"].get(kind).is_none()) {
                    spec["window"] = json!({});
                }
                put(spec, path, value)?;
            }
            Some("guardrails") => {
                let below = path.strip_prefix("guardrails.").unwrap_or_default();
                check_guardrail(below.split('.').next().unwrap_or_default())?;
                put(&mut guardrails, below, value)?;
            }
            _ => {
                return Err(usage(format!(
                    "--set {path}: a limit begins with limits, perAgent, window, onExhausted (of an AgentBudget) or \
                     guardrails (of an Agent)"
                )));
            }
        }
        names.push(change.clone());
    }
    if names.is_empty() && spec.is_none() {
        return Err(usage("nothing is changed: give --budget or --set".into()));
    }
    let budget = spec.map(serde_json::from_value).transpose();
    let budget: Option<AgentBudgetSpec> = budget.map_err(|error| usage(format!("AgentBudget: {error}")))?;
    if let Some(budget) = &budget {
        check_kinds(budget)?;
    }
    let agent: AgentSpec = serde_json::from_value(json!({
        "instructions": "-", "model": {"api": "Scripted", "name": "-"}, "guardrails": guardrails,
    }))
    .map_err(|error| usage(format!("guardrails: {error}")))?;
    let total = agent.guardrails.total.clone().unwrap_or_default();
    let own = OwnLimits {
        tokens_per_hour: agent.guardrails.tokens_per_hour,
        total_tokens: total.tokens,
        total_cost: total.cost_usd,
    };
    let settings = EngineSettings::try_from(&agent).map_err(|error| usage(error.to_string()))?;
    Ok(SimulatedLimits {
        budget,
        settings: only_named(settings, &guardrails),
        own,
        names,
    })
}

/// Defaults that were not named hold nothing: the history was made under limits of its own.
fn only_named(mut settings: EngineSettings, named: &Value) -> EngineSettings {
    let is_named = |name: &str| named.get(name).is_some();
    if !is_named("maxCallsPerTurn") {
        settings.max_calls_per_turn = u32::MAX;
    }
    if !is_named("maxConsecutiveTurns") {
        settings.max_consecutive_turns = u32::MAX;
    }
    if !is_named("actionsPerMinute") {
        settings.actions_per_minute = u32::MAX;
    }
    settings
}

fn usage(text: String) -> PluginError {
    PluginError::Usage(text)
}

/// The spec of an AgentBudget, from a manifest.
fn budget_spec(text: &str) -> Result<Value, PluginError> {
    let object: Value = serde_yaml::from_str(text).map_err(|error| usage(format!("--budget: {error}")))?;
    if object["kind"] != "AgentBudget" || !object["spec"].is_object() {
        return Err(usage("--budget: this is not the manifest of one AgentBudget".into()));
    }
    Ok(object["spec"].clone())
}

fn parsed(change: &str) -> Result<(&str, Value), PluginError> {
    let (path, text) = change.split_once('=').ok_or_else(|| {
        usage(format!(
            "--set {change}: write PATH=VALUE, such as limits.tokens=1000000"
        ))
    })?;
    if path.ends_with("costUSD") {
        return Ok((path, text.into()));
    }
    let value = serde_yaml::from_str(text).map_err(|error| usage(format!("--set {path}: {error}")))?;
    Ok((path, value))
}

/// Sets a field, and the objects above it.
fn put(object: &mut Value, path: &str, value: Value) -> Result<(), PluginError> {
    let mut place = object;
    for part in path.split('.') {
        if part.is_empty() || !(place.is_object() || place.is_null()) {
            return Err(usage(format!("--set {path}: there is no such field")));
        }
        place = &mut place[part];
    }
    *place = value;
    Ok(())
}

fn check_guardrail(name: &str) -> Result<(), PluginError> {
    if COMPUTABLE.contains(&name) {
        return Ok(());
    }
    let missing = NOT_COMPUTABLE.iter().find(|(other, _)| *other == name);
    Err(usage(match missing {
        Some((_, why)) => format!("guardrails.{name} cannot be simulated: {why}"),
        None => format!(
            "guardrails.{name} is not known; those that can be simulated are {}",
            COMPUTABLE.join(", ")
        ),
    }))
}

/// A history has tokens as `tokens` counts them, and neither input nor output alone.
fn check_kinds(budget: &AgentBudgetSpec) -> Result<(), PluginError> {
    let none = BudgetLimits::default();
    for (part, limits) in [
        ("limits", &budget.limits),
        ("perAgent", budget.per_agent.as_ref().unwrap_or(&none)),
    ] {
        for (kind, is_set) in [
            ("inputTokens", limits.input_tokens.is_some()),
            ("outputTokens", limits.output_tokens.is_some()),
        ] {
            if is_set {
                return Err(usage(format!(
                    "{part}.{kind} cannot be simulated: a history records only tokens, calls and cost"
                )));
            }
        }
    }
    Ok(())
}
