//! Admission of tool calls: whether a call that the model requests becomes a run. Owns what is offered, and the rules
//! that need only the call itself. Runs nothing; limits over time are guardrails.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jsonschema::Validator;
use serde_json::{Map, Value, json};
use strum::AsRefStr;

use super::batch::ToolRunPlan;
use crate::GateCause;
use crate::approvals::RunApproval;
use crate::context::prompt_size;
use crate::ids;
use crate::message::{self, ToolCall, ToolDefinition};
use crate::runtime_mark::without_marks;
use crate::tool::{ToolEffect, ToolRunId, ToolSpec};
use agentloop_api::status::GateKind;
use agentloop_support::hash::sha256_hex;
use agentloop_support::json_schema;

/// Denials of one tool in one turn after which all its calls are denied until the turn ends.
pub const MAX_DENIALS: u32 = 3;
/// Maximum number of characters of a name, a path or a problem that are returned to the model.
const MAX_TOLD: usize = 500;
/// Maximum number of bytes of the arguments of a call that a person must approve, since all of them are shown.
pub const MAX_SHOWN_ARGUMENTS: usize = 48 * 1024;
/// Tool names that are listed to a model that called an unknown tool.
const MAX_NAMES: usize = 64;

/// Why a call is not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, AsRefStr)]
pub enum DenialReason {
    /// No source offers the tool.
    UnknownTool,
    /// Its server has not answered yet, so its tools are unknown.
    ServerSilent,
    /// The arguments do not fit the tool's schema.
    BadArguments,
    /// The tool was denied too often in this turn.
    Hidden,
    /// The answer was truncated at the output limit within this call.
    Cut,
    /// A pause, a suspension or an edit of the spec came between the request and its run.
    Outdated,
    /// In mode `Goal`, the same call was denied earlier in the step.
    DeniedBefore,
    /// It is part of a detected loop.
    Repeated,
    /// The server of the tool requires a grant that the Agent does not have.
    MissingGrant,
    /// A person denied it.
    NotApproved,
    /// It expired without an approval.
    ApprovalExpired,
    /// The same call waits for an approval already.
    AlreadyDeferred,
    /// The time of its task is over.
    TaskEnded,
    /// Its definition has changed, or it is new, and the rules of its server ask for an approval of that.
    DefinitionChanged,
}

impl DenialReason {
    /// Whether the rules or a person have decided that the call must not be run. Otherwise it was wrong, or came at the wrong
    /// time.
    pub const fn is_decision(self) -> bool {
        match self {
            Self::MissingGrant
            | Self::NotApproved
            | Self::ApprovalExpired
            | Self::Repeated
            | Self::Hidden
            | Self::DeniedBefore => true,
            Self::UnknownTool
            | Self::ServerSilent
            | Self::BadArguments
            | Self::Cut
            | Self::Outdated
            | Self::AlreadyDeferred
            | Self::TaskEnded
            | Self::DefinitionChanged => false,
        }
    }
}

/// A call that is not run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeniedCall {
    /// Safe to log.
    pub why: DenialReason,
    /// The result for the model.
    pub text: String,
}

impl DeniedCall {
    /// A valid call that is not run: why, and what the model can do.
    pub fn not_run(why: DenialReason, detail: &str, fix: &str) -> Self {
        denied(why, &json!({"error": "not run", "detail": detail, "fix": fix}))
    }
}

/// The tools offered to the model.
#[derive(Clone, Debug)]
pub struct Toolbox {
    offered: Arc<[ToolDefinition]>,
    /// Names of the runtime's own tools, which are the first of those offered.
    own: BTreeSet<String>,
    known: BTreeMap<String, Arc<KnownTool>>,
    /// Servers that have not answered yet: their tools are unknown.
    silent: Vec<String>,
    /// A source has declared its tools, even if it has none.
    is_offered: bool,
    tokens: u64,
}

/// What the admission of a call depends on besides the call.
#[derive(Clone, Copy, Debug)]
pub struct AdmissionContext<'a> {
    /// How often each tool was denied in this turn.
    pub denials: &'a BTreeMap<String, u32>,
    /// The source of the untrusted content that the model has been shown; `None`: it has been shown none.
    pub untrusted: Option<&'a str>,
}

/// One tool of a source.
#[derive(Clone, Debug)]
pub struct KnownTool {
    pub spec: ToolSpec,
    schema: Validator,
}

impl Toolbox {
    /// Only the runtime's own tools, since no source has declared its tools yet.
    pub fn before_any_offer(own_tools: Vec<ToolDefinition>) -> Self {
        Self {
            is_offered: false,
            ..Self::new(Vec::new(), Vec::new(), own_tools)
        }
    }

    /// The runtime's own tools and these. A tool with an unusable schema or a name that is taken is left out.
    pub fn new(specs: Vec<ToolSpec>, silent: Vec<String>, own_tools: Vec<ToolDefinition>) -> Self {
        let own = names(&own_tools);
        let mut offered = own_tools;
        let mut known = BTreeMap::new();
        for spec in specs {
            if own.contains(&spec.name) || known.contains_key(&spec.name) {
                continue;
            }
            let Ok(schema) = json_schema::compile(&spec.parameters) else {
                continue;
            };
            offered.push(ToolDefinition {
                name: spec.name.clone().into(),
                description: without_marks(&spec.description).into_owned().into(),
                parameters: without_marks_in(&spec.parameters),
            });
            known.insert(spec.name.clone(), Arc::new(KnownTool { spec, schema }));
        }
        Self {
            tokens: prompt_size::tools_size(&offered),
            offered: offered.into(),
            own,
            known,
            silent,
            is_offered: true,
        }
    }

    /// Estimated tokens of all tools.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// The tools for the model. They come first in each prompt and include denied tools, so that the list stays the
    /// same: another list would miss the provider's prompt cache.
    pub fn offered(&self) -> Arc<[ToolDefinition]> {
        self.offered.clone()
    }

    /// Resolves a call and checks its arguments.
    pub fn admit(
        &self,
        call: &ToolCall,
        context: AdmissionContext<'_>,
    ) -> Result<(Arc<KnownTool>, Map<String, Value>), DeniedCall> {
        let Some(known) = self.known.get(&call.name) else {
            return Err(self.unknown(&call.name));
        };
        if is_hidden(&call.name, context.denials) {
            let error = format!(
                "{} was denied {MAX_DENIALS} times and is unavailable until the next turn: continue without it",
                call.name
            );
            return Err(denied(DenialReason::Hidden, &json!({ "error": error })));
        }
        if let Some(grant) = &known.spec.missing_grant {
            return Err(missing_grant(grant));
        }
        let arguments = message::arguments(&call.arguments)
            .ok_or_else(|| bad("(all)", "write the arguments as one JSON object, and nothing else"))?;
        let arguments = known.check(arguments)?;
        let is_gated = known.always_asks(&arguments) || known.asks_because_of(context.untrusted).is_some();
        if is_gated && sorted(&arguments).to_string().len() > MAX_SHOWN_ARGUMENTS {
            let fix = format!("a person must approve this call and see all of it: at most {MAX_SHOWN_ARGUMENTS} bytes");
            return Err(bad("(all)", &fix));
        }
        Ok((known.clone(), arguments))
    }

    /// The full name of the tool that a spec refers to: its name as offered, or its name at its server if only one
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

    /// The first of these arguments that a tool does not name in its schema. It may ignore such a one.
    pub fn unknown_argument<'a>(&self, name: &str, arguments: &'a Map<String, Value>) -> Option<&'a str> {
        let properties = self.known.get(name)?.spec.parameters.get("properties");
        let is_known = |argument: &str| properties.is_some_and(|properties| properties.get(argument).is_some());
        arguments
            .keys()
            .map(String::as_str)
            .find(|argument| !is_known(argument))
    }

    /// What a tool may do; `None`: unknown tool.
    pub fn effect(&self, name: &str) -> Option<ToolEffect> {
        self.known.get(name).map(|known| known.spec.effect)
    }

    /// Whether a tool may have had side effects, as far as is known. The runtime's own have none.
    pub fn may_act(&self, name: &str) -> bool {
        !self.is_own(name) && self.effect(name) != Some(ToolEffect::Read)
    }

    /// Hash of the definition of a tool, as offered; `None`: unknown tool.
    pub fn definition(&self, name: &str) -> Option<&str> {
        Some(self.known.get(name)?.definition())
    }

    /// Whether a denial of this name counts against a tool.
    pub fn knows(&self, name: &str) -> bool {
        self.known.contains_key(name)
    }

    /// Whether it is one of the runtime's own tools.
    pub fn is_own(&self, name: &str) -> bool {
        self.own.contains(name)
    }

    /// Whether any source has declared its tools.
    pub fn is_offered(&self) -> bool {
        self.is_offered
    }

    /// The same with other definitions of the runtime's own tools.
    pub fn with_own_tools(mut self, own_tools: Vec<ToolDefinition>) -> Self {
        let others = self.offered.iter().skip(self.own.len()).cloned();
        self.own = names(&own_tools);
        self.offered = own_tools.into_iter().chain(others).collect();
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
    /// The run of this tool with these arguments. `of`: see [`run_identity`]; `untrusted`: see [`AdmissionContext`].
    pub fn plan(&self, of: &Value, arguments: &Map<String, Value>, untrusted: Option<&str>) -> ToolRunPlan {
        let asks = self.always_asks(arguments);
        let because_of = self.asks_because_of(untrusted).filter(|_| !asks);
        ToolRunPlan {
            tool: self.spec.name.clone(),
            target: self.spec.target.clone(),
            definition: self.definition().to_owned(),
            effect: self.spec.effect,
            idempotent: self.spec.idempotent,
            on_unknown: self.spec.on_unknown,
            timeout: self.spec.timeout,
            key: idempotency_key(of, &self.spec.name, arguments),
            arguments: arguments_hash(arguments),
            tries: 0,
            trusted: self.spec.trusted,
            because_of: because_of.map(str::to_owned),
            asked_by: match because_of {
                Some(_) => GateCause::UntrustedContent,
                None if asks && !self.spec.needs_approval => GateCause::ApprovalCondition,
                None => GateCause::ToolPolicy,
            },
            approval: if asks || because_of.is_some() {
                RunApproval::Needed(GateKind::ToolCallNeedsApproval)
            } else {
                RunApproval::NotNeeded
            },
        }
    }

    /// Hash of its definition; empty: it is not pinned.
    fn definition(&self) -> &str {
        self.spec.definition.as_ref().map_or("", |definition| &definition.hash)
    }

    /// Whether a run with these arguments needs an approval, whatever the model has been shown.
    fn always_asks(&self, arguments: &Map<String, Value>) -> bool {
        let condition = self.spec.approval_condition.as_ref();
        self.spec.needs_approval || condition.is_some_and(|condition| condition.holds(&arguments.clone().into()))
    }

    /// The source of untrusted content, if a run needs an approval because of it.
    fn asks_because_of<'a>(&self, untrusted: Option<&'a str>) -> Option<&'a str> {
        untrusted.filter(|_| self.spec.needs_approval_after_untrusted)
    }

    /// Returns the arguments if they fit the schema.
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

/// The schema for the model, with no mark of the runtime in any text or name. Calls are checked against the original: only a
/// server that imitates a mark in what its tool requires makes that tool useless.
fn without_marks_in(schema: &Value) -> Value {
    match schema {
        Value::String(text) => Value::String(without_marks(text).into_owned()),
        Value::Array(items) => items.iter().map(without_marks_in).collect(),
        Value::Object(fields) => {
            let fields = fields.iter();
            let clean = fields.map(|(name, value)| (without_marks(name).into_owned(), without_marks_in(value)));
            Value::Object(clean.collect())
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => schema.clone(),
    }
}

/// Denies the last call of an answer that was truncated at its limit of `tokens` tokens.
pub fn truncated_call(tokens: u32) -> DeniedCall {
    DeniedCall::not_run(
        DenialReason::Cut,
        &format!("your answer was cut at its limit of {tokens} tokens in the middle of this call"),
        "write less in one call: split the work into several smaller calls",
    )
}

/// The hash of a run's arguments: the first 32 hexadecimal digits of SHA-256 over them as JSON with sorted names.
pub fn arguments_hash(arguments: &Map<String, Value>) -> String {
    hash(&sorted(arguments))
}

/// What identifies a run among those of all Agents. The number of the main member is left out, as before there were others:
/// a run that an upgrade interrupts is repeated under the same key.
pub(crate) fn run_identity(agent: &str, epoch: i64, id: ToolRunId) -> Value {
    let ToolRunId {
        member,
        turn,
        call,
        index,
    } = id;
    match member {
        ids::MAIN => json!([agent, epoch, turn, call, index]),
        member => json!([agent, epoch, turn, call, index, member]),
    }
}

/// A key that all repeats of a run share, and no other run has. `of` identifies the run.
pub fn idempotency_key(of: &Value, tool: &str, arguments: &Map<String, Value>) -> String {
    hash(&json!([of, tool, sorted(arguments)]))
}

pub(crate) fn sorted(arguments: &Map<String, Value>) -> Value {
    let mut value = Value::Object(arguments.clone());
    value.sort_all_objects();
    value
}

fn hash(value: &Value) -> String {
    sha256_hex(value.to_string(), 16)
}

fn names(tools: &[ToolDefinition]) -> BTreeSet<String> {
    tools.iter().map(|tool| tool.name.to_string()).collect()
}

fn is_hidden(name: &str, denials: &BTreeMap<String, u32>) -> bool {
    denials.get(name).is_some_and(|denials| *denials >= MAX_DENIALS)
}

/// A problem may quote the schema, which the server wrote.
fn bad(argument: &str, fix: &str) -> DeniedCall {
    let (argument, fix) = (truncate(argument), truncate(fix));
    denied(
        DenialReason::BadArguments,
        &json!({"error": "invalid argument", "argument": without_marks(&argument), "fix": without_marks(&fix)}),
    )
}

fn missing_grant(grant: &str) -> DeniedCall {
    let error = json!({
        "error": format!("Missing grant {grant}"),
        "fix": "continue without this tool; a person can add the grant to spec.tools.grants",
    });
    denied(DenialReason::MissingGrant, &error)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_the_main_member_are_as_before_there_were_others_and_those_of_others_differ() {
        let run = ToolRunId {
            member: ids::MAIN,
            turn: 12,
            call: 1,
            index: 2,
        };
        let key = |id| idempotency_key(&run_identity("uid", 4, id), "files__write", &Map::new());
        let before = idempotency_key(&json!(["uid", 4, 12, 1, 2]), "files__write", &Map::new());
        assert_eq!(key(run), before);
        assert_ne!(key(ToolRunId { member: 3, ..run }), before);
    }
}
