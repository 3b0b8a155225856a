//! The limits to simulate, from an AgentBudget and from `--set`.

use serde_json::{Value, json};

use super::settings::{SCHEMAS, SETTINGS, check_computable, check_fields, check_path, is_within, usage};
use crate::api::AgentSpec;
use crate::api::agent::LimitedResource;
use crate::api::budget::{AgentBudgetSpec, BudgetLimits};
use crate::engine::settings::EngineSettings;
use crate::plugin::failure::PluginError;
use crate::plugin::screens::printable::one_line;

/// What is simulated.
#[derive(Clone, Debug)]
pub struct SimulatedLimits {
    /// The AgentBudget.
    pub budget: Option<AgentBudgetSpec>,
    /// The guardrails, with all others off.
    pub settings: EngineSettings,
    /// `guardrails.tokensPerHour` and `guardrails.total` are accounts of the ledger.
    pub own: OwnLimits,
    /// The limits, for readers: the AgentBudget with what its manifest sets, and what `--set` does.
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

/// The objects that `--set` changes.
struct ChangedObjects {
    budget: Option<Value>,
    guardrails: Value,
}

/// Reads the manifest of an AgentBudget and the values of `--set`.
pub fn read(budget: Option<&str>, set: &[String]) -> Result<SimulatedLimits, PluginError> {
    let (name, spec) = budget.map(named_spec).transpose()?.unzip();
    let mut objects = ChangedObjects {
        budget: spec,
        guardrails: json!({}),
    };
    let changes = set.iter().map(|change| parsed(change));
    let changes = changes.collect::<Result<Vec<(&str, Value)>, PluginError>>()?;
    check_overlap(&changes)?;
    let paths: Vec<&str> = changes.iter().map(|(path, _)| *path).collect();
    for (path, value) in changes {
        objects.put(path, value)?;
    }
    if set.is_empty() && objects.budget.is_none() {
        return Err(usage("nothing is changed: give --budget or --set".into()));
    }
    let ChangedObjects { budget, guardrails } = objects;
    let mut names = Vec::new();
    if let (Some(name), Some(spec)) = (name, &budget) {
        names.push(name);
        names.extend(unchanged(spec, &paths));
    }
    names.extend_from_slice(set);
    let budget = budget.map(checked_budget).transpose()?;
    check_fields("guardrails.", &SCHEMAS.guardrails, &guardrails)?;
    let agent: AgentSpec = serde_json::from_value(json!({
        "instructions": "-", "model": {"api": "Scripted", "name": "-"}, "guardrails": guardrails,
    }))
    .map_err(|error| usage(format!("guardrails: {error}")))?;
    check_guardrails(&agent, &guardrails)?;
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

impl ChangedObjects {
    fn put(&mut self, path: &str, value: Value) -> Result<(), PluginError> {
        if let Some(below) = path.strip_prefix("guardrails.") {
            return put(&mut self.guardrails, path, below, value);
        }
        if path == "guardrails" {
            self.guardrails = value;
            return Ok(());
        }
        let spec = self
            .budget
            .get_or_insert_with(|| json!({"limits": {}, "window": {"lifetime": {}}}));
        // Exactly one kind of window.
        let kind = path.strip_prefix("window.").and_then(|below| below.split('.').next());
        if kind.is_some_and(|kind| spec["window"].get(kind).is_none()) {
            spec["window"] = json!({});
        }
        put(spec, path, path, value)
    }
}

/// Two changes of one field are a mistake: only one of them would be simulated.
fn check_overlap(changes: &[(&str, Value)]) -> Result<(), PluginError> {
    let kind = |path: &str| {
        path.strip_prefix("window.")
            .map(|below| below.split('.').next().map(str::to_owned))
    };
    for (place, (path, _)) in changes.iter().enumerate() {
        for (earlier, _) in changes.get(..place).unwrap_or_default() {
            if is_within(path, earlier) || is_within(earlier, path) {
                return Err(usage(format!(
                    "--set {earlier} and --set {path} set the same field: keep one"
                )));
            }
            if let (Some(one), Some(other)) = (kind(earlier), kind(path))
                && one != other
            {
                return Err(usage(format!(
                    "--set {earlier} and --set {path} are two kinds of window: keep one"
                )));
            }
        }
    }
    Ok(())
}

fn checked_budget(spec: Value) -> Result<AgentBudgetSpec, PluginError> {
    check_fields("", &SCHEMAS.budget, &spec)?;
    let budget: AgentBudgetSpec =
        serde_json::from_value(spec).map_err(|error| usage(format!("AgentBudget: {error}")))?;
    let none = BudgetLimits::default();
    if budget.limits == none && budget.per_agent.as_ref().is_none_or(|limits| *limits == none) {
        return Err(usage(
            "the AgentBudget has no limit: set one, such as limits.tokens=1000000".into(),
        ));
    }
    Ok(budget)
}

/// What an API server accepts and a history does not have, and what would limit nothing.
fn check_guardrails(agent: &AgentSpec, named: &Value) -> Result<(), PluginError> {
    check_computable(named)?;
    let limits = &agent.guardrails.rate_limits;
    let bytes = [LimitedResource::DiskWriteBytes, LimitedResource::BandwidthBytes];
    if let Some(limit) = limits.iter().find(|limit| bytes.contains(&limit.resource)) {
        return Err(usage(format!(
            "guardrails.rateLimits of {} cannot be simulated: a history does not record what tools wrote and sent",
            limit.resource
        )));
    }
    for (place, limit) in limits.iter().enumerate() {
        let window = (limit.resource, limit.window_seconds);
        let mut earlier = limits.iter().take(place);
        if earlier.any(|other| (other.resource, other.window_seconds) == window) {
            return Err(usage(format!(
                "guardrails.rateLimits has two limits on {} in {} s: keep one",
                window.0, window.1
            )));
        }
    }
    let empty = |value: &Value| value.as_object().is_some_and(serde_json::Map::is_empty) || *value == json!([]);
    for name in ["rateLimits", "total"] {
        if named.get(name).is_some_and(empty) {
            return Err(usage(format!("guardrails.{name} is empty: it limits nothing")));
        }
    }
    Ok(())
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

/// The limits of a spec, and what belongs to them, that no path changes; as `--set` has them.
fn unchanged(spec: &Value, paths: &[&str]) -> Vec<String> {
    let is_changed = |setting: &str| paths.iter().any(|path| is_within(setting, path));
    let kept = SETTINGS.iter().filter(|setting| !is_changed(setting));
    let shown = kept.filter_map(|setting| {
        let value = spec.pointer(&format!("/{}", setting.replace('.', "/")))?;
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        Some(format!("{setting}={text}"))
    });
    shown.collect()
}

/// The name and the spec of an AgentBudget, from a manifest.
fn named_spec(text: &str) -> Result<(String, Value), PluginError> {
    let object: Value = serde_yaml::from_str(text).map_err(|error| usage(format!("--budget: {error}")))?;
    if object["kind"] != "AgentBudget" || !object["spec"].is_object() {
        return Err(usage("--budget: this is not the manifest of one AgentBudget".into()));
    }
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    let name = one_line(&format!("AgentBudget {name}"));
    Ok((name.trim_end().to_owned(), object["spec"].clone()))
}

fn parsed(change: &str) -> Result<(&str, Value), PluginError> {
    let (path, text) = change.split_once('=').ok_or_else(|| {
        usage(format!(
            "--set {change}: write PATH=VALUE, such as limits.tokens=1000000"
        ))
    })?;
    check_path(path)?;
    if path.ends_with("costUSD") {
        return Ok((path, text.into()));
    }
    let value = serde_yaml::from_str(text).map_err(|error| usage(format!("--set {path}: {error}")))?;
    Ok((path, value))
}

/// Sets a field, and the objects above it. `below`: the path in this object.
fn put(object: &mut Value, path: &str, below: &str, value: Value) -> Result<(), PluginError> {
    let mut place = object;
    for part in below.split('.') {
        if part.is_empty() || !(place.is_object() || place.is_null()) {
            return Err(usage(format!("--set {path}: there is no such field")));
        }
        place = &mut place[part];
    }
    *place = value;
    Ok(())
}
