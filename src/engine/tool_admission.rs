//! The gate of every tool call: whether a call that a model wants becomes a run. Here: what is offered, and the rules
//! that need nothing but the call itself. Runs nothing; limits over time are guardrails.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use jsonschema::{PatternOptions, Validator};
use ring::digest::{SHA256, digest};
use serde_json::{Map, Value, json};
use strum::AsRefStr;

use super::message::{self, ToolCall, ToolDefinition};
use super::tool::{ToolEffect, ToolSpec};
use super::{prompt_size, yield_tool};

/// Denials of one tool in one turn after which all its calls are denied until the turn ends.
pub const MOST_DENIALS: u32 = 3;
/// Most characters of a name, a path or a problem that are told back to the model.
const MAX_TOLD: usize = 500;
/// Names that are told to a model that called an unknown tool.
const MAX_NAMES: usize = 64;
/// Steps that a pattern of a tool's schema may take on one text: a server's pattern must not hold the loop up.
const MAX_BACKTRACKS: usize = 100_000;

/// Why a call does not become a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, AsRefStr)]
pub enum DenialReason {
    /// There is no such tool.
    UnknownTool,
    /// Its server has not answered yet, so nobody knows.
    ServerSilent,
    /// The arguments do not fit the tool's schema.
    BadArguments,
    /// The tool was denied too often in this turn.
    Hidden,
    /// The answer was cut at the output limit in the middle of it.
    Cut,
    /// A pause, a suspension or an edit of the spec came between the call and its run.
    Outdated,
    /// It is part of a detected loop.
    Repeated,
}

/// A call that does not become a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeniedCall {
    /// Why; safe to log.
    pub why: DenialReason,
    /// The result for the model.
    pub text: String,
}

/// What is offered to the model.
#[derive(Clone, Debug)]
pub struct Toolbox {
    offered: Arc<[ToolDefinition]>,
    known: BTreeMap<String, Arc<KnownTool>>,
    /// Servers that have not answered yet: what they offer is not known.
    silent: Vec<String>,
    /// A source has said what it offers, if only that it offers nothing.
    is_offered: bool,
    tokens: u64,
}

/// One tool of a source.
#[derive(Clone, Debug)]
pub struct KnownTool {
    /// Its rules.
    pub spec: ToolSpec,
    schema: Validator,
}

impl Toolbox {
    /// `yield` alone, since no source has said yet what it offers.
    pub fn before_any_offer(yields: ToolDefinition) -> Self {
        Self {
            is_offered: false,
            ..Self::new(Vec::new(), Vec::new(), yields)
        }
    }

    /// `yield`, and these. One whose schema cannot be used is left out, and so is one that takes another's name.
    pub fn new(specs: Vec<ToolSpec>, silent: Vec<String>, yields: ToolDefinition) -> Self {
        let mut offered = vec![yields];
        let mut known = BTreeMap::new();
        for spec in specs {
            if spec.name == yield_tool::NAME || known.contains_key(&spec.name) {
                continue;
            }
            let Ok(schema) = compile(&spec.parameters) else {
                continue;
            };
            offered.push(ToolDefinition {
                name: spec.name.clone().into(),
                description: spec.description.clone().into(),
                parameters: spec.parameters.clone(),
            });
            known.insert(spec.name.clone(), Arc::new(KnownTool { spec, schema }));
        }
        Self {
            tokens: prompt_size::tools_size(&offered),
            offered: offered.into(),
            known,
            silent,
            is_offered: true,
        }
    }

    /// Estimated tokens of all tools.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// The tools for the model. They stand first in each prompt, so they are the same in all calls of all turns, also where
    /// one of them is refused: another list would cost all that the provider has in its cache.
    pub fn offered(&self) -> Arc<[ToolDefinition]> {
        self.offered.clone()
    }

    /// Resolves a call and checks its arguments.
    pub fn admit(
        &self,
        call: &ToolCall,
        denials: &BTreeMap<String, u32>,
    ) -> Result<(Arc<KnownTool>, Map<String, Value>), DeniedCall> {
        let Some(known) = self.known.get(&call.name) else {
            return Err(self.unknown(&call.name));
        };
        if is_hidden(&call.name, denials) {
            let error = format!(
                "{} was denied {MOST_DENIALS} times and is closed until the next turn: do without it",
                call.name
            );
            return Err(denied(DenialReason::Hidden, &json!({ "error": error })));
        }
        let arguments = message::arguments(&call.arguments)
            .ok_or_else(|| bad("(all)", "write the arguments as one JSON object, and nothing else"))?;
        known.check(arguments).map(|arguments| (known.clone(), arguments))
    }

    /// The full name of the tool that a spec means: its name as it is offered, or its name at its server where only one
    /// server has it.
    pub fn resolve(&self, wanted: &str) -> Option<&str> {
        if let Some((name, _)) = self.known.get_key_value(wanted) {
            return Some(name);
        }
        let mut ends = self
            .known
            .keys()
            .filter(|name| name.split_once("__").is_some_and(|(_, tool)| tool == wanted));
        let found = ends.next()?;
        ends.next().is_none().then_some(found)
    }

    /// What a tool may do; `None`: it is not known.
    pub fn effect(&self, name: &str) -> Option<ToolEffect> {
        self.known.get(name).map(|known| known.spec.effect)
    }

    /// Whether a tool may have changed something, as far as is known.
    pub fn may_act(&self, name: &str) -> bool {
        self.effect(name) != Some(ToolEffect::Read)
    }

    /// Whether a denial of a call by this name counts against a tool.
    pub fn knows(&self, name: &str) -> bool {
        self.known.contains_key(name)
    }

    /// Whether any source has said what it offers.
    pub fn is_offered(&self) -> bool {
        self.is_offered
    }

    /// The same with another `yield`.
    pub fn with_yield(mut self, yields: ToolDefinition) -> Self {
        self.offered = std::iter::once(yields)
            .chain(self.offered.iter().skip(1).cloned())
            .collect();
        self.tokens = prompt_size::tools_size(&self.offered);
        self
    }

    /// Servers that have not answered yet.
    pub fn silent(&self) -> &[String] {
        &self.silent
    }

    fn unknown(&self, name: &str) -> DeniedCall {
        let server = name.split_once("__").map(|(server, _)| server);
        if let Some(server) = self.silent.iter().find(|silent| server == Some(silent)) {
            let error = format!("not run: the tool server {server} has not answered yet; try again later");
            return denied(DenialReason::ServerSilent, &json!({ "error": error }));
        }
        let name: String = name.chars().take(64).collect();
        let names: Vec<&str> = self.offered.iter().take(MAX_NAMES).map(|tool| &*tool.name).collect();
        let error = format!("unknown tool {name}; available: {}", names.join(", "));
        denied(DenialReason::UnknownTool, &json!({ "error": error }))
    }
}

impl KnownTool {
    /// The arguments back, when they fit the schema.
    fn check(&self, arguments: Map<String, Value>) -> Result<Map<String, Value>, DeniedCall> {
        let arguments = Value::Object(arguments);
        if let Err(problem) = self.schema.validate(&arguments) {
            let path = match problem.instance_path().as_str() {
                "" => "(all)",
                path => path,
            };
            return Err(bad(path, &problem.to_string()));
        }
        match arguments {
            Value::Object(arguments) => Ok(arguments),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => Ok(Map::new()),
        }
    }
}

/// Whether a tool's schema can be used; what is wrong with it else. A source leaves such a tool out, and says so.
pub fn check_schema(parameters: &Value) -> Result<(), String> {
    compile(parameters).map(|_| ())
}

/// Nothing is fetched: a schema that refers to another document cannot be used.
fn compile(parameters: &Value) -> Result<Validator, String> {
    jsonschema::options()
        .with_pattern_options(PatternOptions::fancy_regex().backtrack_limit(MAX_BACKTRACKS))
        .build(parameters)
        .map_err(|error| truncate(&error.to_string()).into_owned())
}

/// The last call of an answer that was cut at its limit of so many tokens.
pub fn truncated_call(tokens: u32) -> DeniedCall {
    let error = json!({
        "error": "not run",
        "detail": format!("your answer was cut at its limit of {tokens} tokens in the middle of this call"),
        "fix": "write less in one call: split the work into several smaller calls",
    });
    denied(DenialReason::Cut, &error)
}

/// The hash of a run's arguments: the first 32 hexadecimal digits of SHA-256 over them as JSON with sorted names.
pub fn arguments_hash(arguments: &Map<String, Value>) -> String {
    hash(&sorted(arguments))
}

/// A key that each repeat of a run has and no other run. `of` says whose and which.
pub fn idempotency_key(of: &Value, tool: &str, arguments: &Map<String, Value>) -> String {
    hash(&json!([of, tool, sorted(arguments)]))
}

pub(super) fn sorted(arguments: &Map<String, Value>) -> Value {
    let mut value = Value::Object(arguments.clone());
    value.sort_all_objects();
    value
}

fn hash(value: &Value) -> String {
    let digest = digest(&SHA256, value.to_string().as_bytes());
    let first = digest.as_ref().first_chunk().copied().unwrap_or_default();
    format!("{:032x}", u128::from_be_bytes(first))
}

fn is_hidden(name: &str, denials: &BTreeMap<String, u32>) -> bool {
    denials.get(name).is_some_and(|denials| *denials >= MOST_DENIALS)
}

fn bad(argument: &str, fix: &str) -> DeniedCall {
    let (argument, fix) = (truncate(argument), truncate(fix));
    denied(
        DenialReason::BadArguments,
        &json!({"error": "invalid argument", "argument": argument, "fix": fix}),
    )
}

fn denied(why: DenialReason, text: &Value) -> DeniedCall {
    DeniedCall {
        why,
        text: text.to_string(),
    }
}

fn truncate(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(MAX_TOLD) {
        Some((end, _)) => format!("{}...", &text[..end]).into(),
        None => text.into(),
    }
}
