//! The tools that a server offers, with the rules of the spec applied. Pure.
//!
//! Sorted by name and deterministic, so that prompts stay the same and prompt caches stay valid.

use std::collections::{BTreeMap, HashMap};

use jiff::SignedDuration;
use rmcp::model::{Tool, ToolAnnotations};
use serde_json::{Value, json};

use super::name;
use crate::api::toolbox::{ToolContainer, ToolboxSpec};
use crate::api::tools::{
    self as api, ApprovalDefault, DEFAULT_TIMEOUT_SECONDS, DefinitionChanges, ServerEndpoint, ToolApproval, ToolServer,
};
use crate::engine::tool::{
    ApprovalCondition, DeclaredDefinition, DefinitionParts, ToolEffect, ToolSpec, UnknownOutcomePolicy,
};
use crate::sensor_pipeline::expression::{Expression, ExpressionScope, ExpressionVariables};
use crate::support::hash::sha256_hex;
use crate::support::json_schema;
use crate::support::text::first_bytes;

pub(super) const MAX_TOOLS: usize = 128;
/// Maximum number of tools of all servers: `OpenAIChat` servers accept 128 per request, up to four of which are the runtime's:
/// two of the mode, `memory` and `artifact_read`.
pub(super) const MAX_TOOLS_IN_ALL: usize = 124;
/// Maximum bytes of names, descriptions and schemas of all tools together. They are part of every prompt.
pub(super) const MAX_DEFINITIONS: usize = 256 * 1024;
/// Maximum length of a tool's description in bytes; a longer one is truncated.
const MAX_DESCRIPTION: usize = 4096;
/// Maximum size of the schema of a tool's arguments, in bytes of JSON; a tool with a larger one is left out.
const MAX_SCHEMA: usize = 16 * 1024;
/// Maximum number of tools that were left out that a log line names.
const MAX_NAMED: usize = 10;

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct ToolCatalog {
    pub(super) specs: Vec<ToolSpec>,
    /// The server's own tool names, by the names that models call.
    pub(super) own_names: HashMap<String, String>,
    /// The allowed tools that were left out.
    pub(super) left_out: Vec<LeftOutTool>,
    /// Names in `only` that the server does not offer.
    pub(super) absent: Vec<String>,
}

/// A tool that a server lists and that is not offered.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct LeftOutTool {
    /// The name by which models would call it.
    name: String,
    why: LeftOutReason,
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
enum LeftOutReason {
    #[error("another tool of the server has this name; rename one at the server")]
    Repeated,
    #[error("a server may have {MAX_TOOLS} tools; list the required ones in spec.tools.servers[].only")]
    TooMany,
    #[error("its input schema has {0} bytes, and {MAX_SCHEMA} are allowed; shorten it at the server")]
    SchemaBytes(usize),
    #[error("its input schema cannot be used: {0}; change it at the server")]
    Schema(String),
}

impl ToolCatalog {
    /// Which tools were left out and why, for the log; `None`: none. Has names and numbers, and nothing of a schema.
    pub(super) fn left_out_text(&self) -> Option<String> {
        let named = self.left_out.iter().take(MAX_NAMED);
        let named: Vec<String> = named
            .map(|LeftOutTool { name, why }| format!("{name}: {why}"))
            .collect();
        let more = self.left_out.len() - named.len();
        let more = (more > 0).then(|| format!("and {more} more"));
        let all: Vec<String> = named.into_iter().chain(more).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    fn leave_out(&mut self, name: String, why: LeftOutReason) {
        self.left_out.push(LeftOutTool { name, why });
    }

    /// Why a tool with this name and schema is not offered.
    fn refusal(&self, name: &str, parameters: &Value) -> Option<LeftOutReason> {
        if self.own_names.contains_key(name) {
            return Some(LeftOutReason::Repeated);
        }
        if self.specs.len() == MAX_TOOLS {
            return Some(LeftOutReason::TooMany);
        }
        let bytes = parameters.to_string().len();
        if bytes > MAX_SCHEMA {
            return Some(LeftOutReason::SchemaBytes(bytes));
        }
        json_schema::unusable_reason(parameters).map(LeftOutReason::Schema)
    }

    /// Hash of the definition of a tool, by the name that models call.
    pub(super) fn definition(&self, name: &str) -> Option<&str> {
        let spec = self.specs.iter().find(|spec| spec.name == name)?;
        Some(&spec.definition.as_ref()?.hash)
    }

    /// Selects the offered tools from a server's list.
    pub(super) fn new(server: &ToolServer, rules: &AccessRules, tools: Vec<Tool>) -> Self {
        let allowed = |tool: &Tool| server.only.is_empty() || server.only.iter().any(|name| *name == *tool.name);
        let mut catalog = Self::default();
        // Sorts and deduplicates: a server may list a name twice.
        let mut by_name: BTreeMap<String, Tool> = BTreeMap::new();
        for tool in tools.into_iter().filter(allowed) {
            if let Some(repeated) = by_name.insert(tool.name.to_string(), tool) {
                catalog.leave_out(name::of(&server.name, &repeated.name), LeftOutReason::Repeated);
            }
        }
        let absent = server.only.iter().filter(|name| !by_name.contains_key(*name));
        catalog.absent = absent.cloned().collect();
        for (own, tool) in by_name {
            let name = name::of(&server.name, &own);
            let parameters = Value::Object((*tool.input_schema).clone());
            if let Some(why) = catalog.refusal(&name, &parameters) {
                catalog.leave_out(name, why);
                continue;
            }
            catalog
                .specs
                .push(spec((server, rules), name.clone(), &own, &tool, parameters));
            catalog.own_names.insert(name, own);
        }
        catalog.specs.sort_by(|one, other| one.name.cmp(&other.name));
        catalog
    }
}

/// Selects the offered tools of all servers in their order, and counts those left out. A later tool never displaces an
/// earlier one.
pub(super) fn bounded<'a>(catalogs: impl IntoIterator<Item = &'a ToolCatalog>) -> (Vec<ToolSpec>, usize) {
    let (mut offered, mut left_out, mut bytes) = (Vec::new(), 0, 0_usize);
    for spec in catalogs.into_iter().flat_map(|catalog| &catalog.specs) {
        let size = spec.name.len() + spec.description.len() + spec.parameters.to_string().len();
        if offered.len() < MAX_TOOLS_IN_ALL && bytes.saturating_add(size) <= MAX_DEFINITIONS {
            bytes += size;
            offered.push(spec.clone());
        } else {
            left_out += 1;
        }
    }
    (offered, left_out)
}

/// What the spec says about the tools of all servers: which calls need an approval, and the grants of the Agent.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct AccessRules {
    pub(super) approval: ApprovalDefault,
    /// The same for calls that the model requests once it has been shown untrusted content.
    pub(super) after_untrusted: ApprovalDefault,
    pub(super) grants: Vec<String>,
    pub(super) toolbox: ToolboxSpec,
}

impl AccessRules {
    pub(super) fn new(spec: &api::ToolsSpec) -> Self {
        Self {
            approval: spec.approval.default,
            after_untrusted: spec.approval.after_untrusted_content,
            grants: spec.grants.clone(),
            toolbox: spec.toolbox.clone().unwrap_or_default(),
        }
    }

    /// The grant that the server requires and the Agent does not have.
    pub(super) fn missing_grant(&self, server: &ToolServer) -> Option<String> {
        let required = server.required_grant.as_ref()?;
        (!self.grants.contains(required)).then(|| required.clone())
    }

    /// Identifies what a call of a tool reaches: a person approves a call at this server, with these credentials.
    pub(super) fn target(&self, server: &ToolServer, own: &str) -> String {
        let reached = match server.endpoint() {
            ServerEndpoint::Url(url) => {
                let secret = server.headers_secret_ref.as_ref().map(|secret| &secret.name);
                json!([url, secret, own])
            }
            ServerEndpoint::Toolbox => json!([self.toolbox.image, self.toolbox.http, own]),
            ServerEndpoint::Bridge | ServerEndpoint::Port(..) => {
                let program = server.container.clone().map(|container| ToolContainer {
                    resources: None,
                    ..container
                });
                json!([program, own])
            }
        };
        sha256_hex(reached.to_string(), 32)
    }
}

/// Whether a call of a tool with this effect needs an approval. `own`: the rule of the tool.
fn asks_for(effect: ToolEffect, own: Option<ToolApproval>, default: ApprovalDefault) -> bool {
    match (own, default) {
        (Some(ToolApproval::Never), _) | (None, ApprovalDefault::Never) => false,
        (Some(ToolApproval::Always), _) | (None, ApprovalDefault::Always) => true,
        (None, ApprovalDefault::Destructive) => effect == ToolEffect::Destructive,
        (None, ApprovalDefault::Write) => effect != ToolEffect::Read,
    }
}

fn spec(
    (server, access): (&ToolServer, &AccessRules),
    name: String,
    own: &str,
    tool: &Tool,
    parameters: Value,
) -> ToolSpec {
    let rules = server.tools.iter().find(|rules| rules.name == own);
    let hints = tool.annotations.as_ref().filter(|_| server.trusted);
    let effect = rules.and_then(|rules| rules.effect).map(effect_of);
    let idempotent = rules.and_then(|rules| rules.idempotent);
    let seconds = rules.map_or(DEFAULT_TIMEOUT_SECONDS, |rules| rules.timeout_seconds);
    let on_unknown = rules.map(|rules| rules.on_unknown_outcome).unwrap_or_default();
    let effect = effect.unwrap_or_else(|| {
        if server.trusted {
            hinted(hints)
        } else {
            ToolEffect::Write
        }
    });
    let approval = rules.and_then(|rules| rules.approval);
    ToolSpec {
        name,
        description: description(tool),
        parameters,
        effect,
        idempotent: idempotent.unwrap_or_else(|| hints.and_then(|hints| hints.idempotent_hint).unwrap_or(false)),
        timeout: SignedDuration::from_secs(seconds.into()),
        on_unknown: match on_unknown {
            api::OnUnknownOutcome::TellModel => UnknownOutcomePolicy::TellModel,
            api::OnUnknownOutcome::Retry => UnknownOutcomePolicy::Retry,
            api::OnUnknownOutcome::Ask => UnknownOutcomePolicy::Ask,
        },
        target: access.target(server, own),
        needs_approval: asks_for(effect, approval, access.approval),
        needs_approval_after_untrusted: asks_for(effect, approval, access.after_untrusted),
        approval_condition: rules
            .and_then(|rules| rules.approval_condition.as_deref())
            .map(approval_condition),
        // What the toolbox reads may come from anywhere: from a host, a program, or a file that one of them left.
        trusted: server.trusted && server.endpoint() != ServerEndpoint::Toolbox,
        missing_grant: access.missing_grant(server),
        definition: declared(server, access, own, tool),
    }
}

/// What a server declares a tool to be. The toolbox is a part of the runtime, and is not pinned.
fn declared(server: &ToolServer, access: &AccessRules, own: &str, tool: &Tool) -> Option<DeclaredDefinition> {
    let holds = server.definition_changes == DefinitionChanges::Ask;
    (server.endpoint() != ServerEndpoint::Toolbox).then(|| DeclaredDefinition {
        hash: definition_hash(own, tool),
        parts: DefinitionParts::of(whole_description(tool), &tool.input_schema, &json!(tool.annotations)),
        server: access.target(server, ""),
        holds_changes: holds,
        // A name in `only` was chosen by a person.
        holds_new: holds && server.only.is_empty(),
    })
}

/// Hash of everything that a server declares about a tool and that the model or the rules depend on.
fn definition_hash(own: &str, tool: &Tool) -> String {
    let mut definition = json!([own, whole_description(tool), tool.input_schema, tool.annotations]);
    definition.sort_all_objects();
    sha256_hex(definition.to_string(), 16)
}

/// An expression that cannot be compiled, or not be evaluated for the arguments of a call, asks for an approval. The
/// controller does not accept the former.
fn approval_condition(text: &str) -> ApprovalCondition {
    let Ok(condition) = Expression::compile(text, ExpressionScope::ToolCall) else {
        return ApprovalCondition::new(text, |_| true);
    };
    ApprovalCondition::new(text, move |arguments| {
        condition.evaluate(&ExpressionVariables::of_call(arguments)) != Ok(Value::Bool(false))
    })
}

fn effect_of(effect: api::DeclaredEffect) -> ToolEffect {
    match effect {
        api::DeclaredEffect::Read => ToolEffect::Read,
        api::DeclaredEffect::Write => ToolEffect::Write,
        api::DeclaredEffect::Destructive => ToolEffect::Destructive,
    }
}

/// Derives the effect from a trusted server's hints. The protocol's defaults are: not read-only, destructive.
fn hinted(hints: Option<&ToolAnnotations>) -> ToolEffect {
    let read_only = hints.and_then(|hints| hints.read_only_hint).unwrap_or(false);
    let destructive = hints.and_then(|hints| hints.destructive_hint).unwrap_or(true);
    match (read_only, destructive) {
        (true, _) => ToolEffect::Read,
        (false, true) => ToolEffect::Destructive,
        (false, false) => ToolEffect::Write,
    }
}

fn description(tool: &Tool) -> String {
    first_bytes(whole_description(tool), MAX_DESCRIPTION).to_owned()
}

fn whole_description(tool: &Tool) -> &str {
    let text = tool.description.as_deref().or(tool.title.as_deref());
    text.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pretty_assertions::assert_eq;

    fn server(change: Value) -> ToolServer {
        let mut server = json!({"name": "s", "url": "http://s"});
        let Value::Object(change) = change else { panic!() };
        server.as_object_mut().unwrap().extend(change);
        serde_json::from_value(server).unwrap()
    }

    #[expect(clippy::needless_pass_by_value, reason = "it is written in place")]
    fn tool(name: &str, annotations: Value) -> Tool {
        serde_json::from_value(json!({
            "name": name, "description": "does it", "inputSchema": {"type": "object"}, "annotations": annotations,
        }))
        .unwrap()
    }

    fn no_rules() -> AccessRules {
        AccessRules::new(&api::ToolsSpec::default())
    }

    /// The catalog of an Agent without further rules.
    fn of_server(server: &ToolServer, tools: Vec<Tool>) -> ToolCatalog {
        ToolCatalog::new(server, &no_rules(), tools)
    }

    fn one(server: &ToolServer, annotations: Value) -> (ToolEffect, bool) {
        let catalog = of_server(server, vec![tool("t", annotations)]);
        (catalog.specs[0].effect, catalog.specs[0].idempotent)
    }

    #[test]
    fn hints_of_an_untrusted_server_are_ignored() {
        let says = json!({"readOnlyHint": true, "idempotentHint": true, "destructiveHint": false});
        assert_eq!(one(&server(json!({})), says), (ToolEffect::Write, false));
        assert_eq!(
            one(&server(json!({})), json!({"destructiveHint": true})),
            (ToolEffect::Write, false)
        );
    }

    #[test]
    fn hints_of_a_trusted_server_are_used_with_the_defaults_of_the_protocol() {
        let trusted = server(json!({"trusted": true}));
        assert_eq!(one(&trusted, json!({"readOnlyHint": true})), (ToolEffect::Read, false));
        assert_eq!(
            one(&trusted, json!({"idempotentHint": true})),
            (ToolEffect::Destructive, true)
        );
        assert_eq!(
            one(&trusted, json!({"destructiveHint": false})),
            (ToolEffect::Write, false)
        );
        assert_eq!(one(&trusted, json!({})), (ToolEffect::Destructive, false));
    }

    #[test]
    fn rules_of_the_spec_win_over_hints_and_only_for_their_tool() {
        let rules = json!([{"name": "t", "effect": "Write", "idempotent": false, "timeoutSeconds": 7, "onUnknownOutcome": "Retry"}]);
        let server = server(json!({"trusted": true, "tools": rules}));
        let says = json!({"readOnlyHint": true, "idempotentHint": true});
        let catalog = of_server(&server, vec![tool("t", says.clone()), tool("u", says)]);
        let [t, u] = &catalog.specs[..] else { panic!() };
        assert_eq!(
            (t.effect, t.idempotent, t.timeout),
            (ToolEffect::Write, false, SignedDuration::from_secs(7))
        );
        assert_eq!(t.on_unknown, UnknownOutcomePolicy::Retry);
        assert_eq!(
            (u.effect, u.idempotent, u.timeout),
            (ToolEffect::Read, true, SignedDuration::from_secs(60))
        );
        assert_eq!(u.on_unknown, UnknownOutcomePolicy::TellModel);
    }

    #[test]
    fn the_same_tools_in_any_order_yield_the_same_list_and_a_repeated_one_counts_once() {
        let plain = server(json!({}));
        let list = |names: &[&str]| of_server(&plain, names.iter().map(|name| tool(name, json!({}))).collect());
        let (one, other) = (list(&["b", "a.x", "c"]), list(&["c", "b", "a.x", "b"]));
        assert_eq!(one.specs, other.specs);
        assert_eq!((one.left_out.len(), other.left_out.len()), (0, 1));
        assert_eq!(one.own_names[&name::of("s", "a.x")], "a.x");
    }

    #[test]
    fn too_many_tools_and_schemas_too_large_are_left_out_and_counted() {
        let plain = server(json!({}));
        let many = |count: usize| {
            (0..count)
                .map(|number| tool(&format!("t{number:03}"), json!({})))
                .collect()
        };
        let catalog = of_server(&plain, many(MAX_TOOLS));
        assert_eq!((catalog.specs.len(), catalog.left_out.len()), (MAX_TOOLS, 0));
        let catalog = of_server(&plain, many(MAX_TOOLS + 1));
        assert_eq!((catalog.specs.len(), catalog.left_out.len()), (MAX_TOOLS, 1));
        let sized = |bytes: usize| {
            let mut tool = tool("t", json!({}));
            let bare = json!({"a": ""}).to_string().len();
            tool.input_schema =
                std::sync::Arc::new(serde_json::from_value(json!({"a": "x".repeat(bytes - bare)})).unwrap());
            of_server(&plain, vec![tool]).left_out.len()
        };
        assert_eq!((sized(MAX_SCHEMA), sized(MAX_SCHEMA + 1)), (0, 1));
    }

    /// A schema with this many levels of JSON.
    fn nested(levels: usize) -> Value {
        (1..levels).fold(json!({}), |inner, _| json!({"not": inner}))
    }

    #[test]
    fn a_tool_whose_schema_is_beyond_a_bound_is_left_out_with_a_reason_that_names_both_until_it_is_smaller() {
        let plain = server(json!({}));
        let pattern = |count: usize| json!({"canary": 1, "allOf": vec![json!({"pattern": "canary"}); count]});
        let unevaluated = |levels: usize| {
            (0..levels).fold(
                json!({"title": "canary"}),
                |inner, _| json!({"anyOf": [inner], "unevaluatedItems": false}),
            )
        };
        for (at, above, bound) in [
            (nested(48), nested(49), "48 levels"),
            (pattern(256), pattern(257), "256 are allowed"),
            (unevaluated(8), unevaluated(15), "unevaluatedItems"),
        ] {
            let of = |schema: Value| {
                let mut tool = tool("write", json!({}));
                tool.input_schema = std::sync::Arc::new(serde_json::from_value(schema).unwrap());
                of_server(&plain, vec![tool])
            };
            let (within, beyond) = (of(at), of(above));
            assert_eq!((within.specs.len(), within.left_out_text()), (1, None), "{bound}");
            let text = beyond.left_out_text().unwrap();
            assert_eq!((beyond.specs.len(), beyond.left_out.len()), (0, 1), "{text}");
            assert!(
                text.starts_with("s__write: its input schema cannot be used: "),
                "{text}"
            );
            assert!(
                text.contains(bound) && text.ends_with("change it at the server"),
                "{text}"
            );
            assert!(!text.contains("canary"), "{text}");
        }
    }

    #[test]
    fn the_reasons_for_which_tools_are_left_out_are_a_short_text() {
        let plain = server(json!({}));
        let tools: Vec<_> = (0..MAX_TOOLS + 12)
            .map(|number| tool(&format!("t{number:03}"), json!({})))
            .collect();
        let text = of_server(&plain, tools).left_out_text().unwrap();
        assert!(
            text.starts_with("s__t128: a server may have 128 tools; list the required ones"),
            "{text}"
        );
        assert!(text.ends_with("; and 2 more") && text.len() < 2048, "{text}");
        let twice = vec![tool("t", json!({})), tool("t", json!({}))];
        let text = of_server(&plain, twice).left_out_text().unwrap();
        assert!(
            text.starts_with("s__t: another tool of the server has this name"),
            "{text}"
        );
    }

    #[test]
    fn only_the_tools_of_the_allow_list_are_offered_and_names_that_the_server_lacks_are_known() {
        let tools = || ["read", "delete", "list"].map(|name| tool(name, json!({}))).to_vec();
        let names = |catalog: &ToolCatalog| {
            catalog
                .own_names
                .values()
                .cloned()
                .collect::<std::collections::BTreeSet<_>>()
        };
        let narrow = of_server(&server(json!({"only": ["list", "read", "stat"]})), tools());
        assert_eq!(names(&narrow), ["list", "read"].map(str::to_owned).into());
        assert_eq!(
            (narrow.left_out.len(), &narrow.absent[..]),
            (0, &["stat".to_owned()][..])
        );
        let wide = of_server(&server(json!({"only": []})), tools());
        assert_eq!((names(&wide).len(), wide.absent.len()), (3, 0));
    }

    #[test]
    fn all_servers_together_offer_a_limited_number_of_tools_and_bytes_and_the_first_ones_stay() {
        let catalog = |name: &str, count: usize, bytes: usize| {
            let mut sized = tool("t", json!({}));
            sized.description = Some("x".repeat(bytes).into());
            let tools = (0..count).map(|number| {
                let mut tool = sized.clone();
                tool.name = format!("t{number:03}").into();
                tool
            });
            of_server(&server(json!({"name": name})), tools.collect())
        };
        let all = |count: usize| {
            let (offered, left_out) = bounded([&catalog("a", 100, 1), &catalog("b", count, 1)]);
            (offered.len(), left_out)
        };
        assert_eq!((all(24), all(25)), ((124, 0), (124, 1)));
        let (offered, left_out) = bounded([&catalog("a", 70, MAX_DESCRIPTION), &catalog("b", 1, 1)]);
        assert!(left_out > 0 && offered.len() + left_out == 71);
        let size = |spec: &ToolSpec| spec.name.len() + spec.description.len() + spec.parameters.to_string().len();
        assert!(offered.iter().map(size).sum::<usize>() <= MAX_DEFINITIONS);
        assert_eq!(offered.last().unwrap().name, "b__t000", "a small one still fits");
    }

    #[test]
    fn a_long_description_is_cut_at_a_character() {
        let mut long = tool("t", json!({}));
        long.description = Some("ä".repeat(MAX_DESCRIPTION).into());
        let catalog = of_server(&server(json!({})), vec![long]);
        assert_eq!(catalog.specs[0].description, "ä".repeat(MAX_DESCRIPTION / 2));
    }

    fn needs_approval(access: &AccessRules, change: Value, annotations: Value) -> bool {
        let catalog = ToolCatalog::new(&server(change), access, vec![tool("t", annotations)]);
        catalog.specs[0].needs_approval
    }

    #[test]
    fn the_default_decides_by_effect_which_calls_need_an_approval() {
        let effects = ["Read", "Write", "Destructive"];
        for (default, asked) in [
            (ApprovalDefault::Never, [false, false, false]),
            (ApprovalDefault::Destructive, [false, false, true]),
            (ApprovalDefault::Write, [false, true, true]),
            (ApprovalDefault::Always, [true, true, true]),
        ] {
            let access = AccessRules {
                approval: default,
                ..no_rules()
            };
            for (effect, asked) in effects.into_iter().zip(asked) {
                let rules = json!({"tools": [{"name": "t", "effect": effect}]});
                assert_eq!(needs_approval(&access, rules, json!({})), asked, "{default:?} {effect}");
            }
        }
    }

    #[test]
    fn a_rule_of_a_tool_takes_precedence_over_the_default() {
        let of = |default| AccessRules {
            approval: default,
            ..no_rules()
        };
        let rule = |approval: &str| json!({"tools": [{"name": "t", "effect": "Read", "approval": approval}]});
        assert!(needs_approval(&of(ApprovalDefault::Never), rule("Always"), json!({})));
        assert!(!needs_approval(&of(ApprovalDefault::Always), rule("Never"), json!({})));
    }

    /// Whether calls need an approval before and after untrusted content, by a spec's rules.
    fn asks(approval: &Value, change: Value) -> (bool, bool) {
        let spec: api::ToolsSpec = serde_json::from_value(json!({"approval": approval})).unwrap();
        let tools = vec![tool("t", json!({}))];
        let catalog = ToolCatalog::new(&server(change), &AccessRules::new(&spec), tools);
        let spec = &catalog.specs[0];
        (spec.needs_approval, spec.needs_approval_after_untrusted)
    }

    #[test]
    fn after_untrusted_content_the_second_rule_decides_by_effect_too_and_is_off_by_default() {
        let effects = ["Read", "Write", "Destructive"];
        for (rule, asked) in [
            (json!({}), [false, false, false]),
            (json!({"afterUntrustedContent": "Never"}), [false, false, false]),
            (json!({"afterUntrustedContent": "Destructive"}), [false, false, true]),
            (json!({"afterUntrustedContent": "Write"}), [false, true, true]),
            (json!({"afterUntrustedContent": "Always"}), [true, true, true]),
        ] {
            for (effect, asked) in effects.into_iter().zip(asked) {
                let change = json!({"tools": [{"name": "t", "effect": effect}]});
                let by_default = effect == "Destructive";
                assert_eq!(asks(&rule, change), (by_default, asked), "{rule} {effect}");
            }
        }
    }

    #[test]
    fn a_rule_of_a_tool_takes_precedence_over_the_rule_for_untrusted_content() {
        let rule = |approval: &str| json!({"tools": [{"name": "t", "effect": "Write", "approval": approval}]});
        let strict = json!({"default": "Never", "afterUntrustedContent": "Always"});
        assert_eq!(asks(&strict, rule("Never")), (false, false));
        assert_eq!(asks(&json!({"default": "Never"}), rule("Always")), (true, true));
    }

    fn declared_as(change: Value, tool: Tool) -> DeclaredDefinition {
        of_server(&server(change), vec![tool]).specs[0]
            .definition
            .clone()
            .unwrap()
    }

    /// A tool of which everything is declared.
    fn whole() -> Value {
        json!({
            "name": "t", "title": "T", "description": "does it",
            "inputSchema": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "number"}}},
            "annotations": {"readOnlyHint": true, "destructiveHint": false},
        })
    }

    #[test]
    fn a_definition_depends_on_all_that_the_model_is_shown_and_that_the_rules_use() {
        let hash = |tool: Value| declared_as(json!({}), serde_json::from_value(tool).unwrap()).hash;
        let with = |change: fn(&mut Value)| {
            let mut tool = whole();
            change(&mut tool);
            hash(tool)
        };
        let plain = hash(whole());
        assert_eq!(plain.len(), 32);
        // The order of names says nothing, and neither does a title beside a description.
        let reordered = r#"{"annotations": {"destructiveHint": false, "readOnlyHint": true},
            "inputSchema": {"properties": {"b": {"type": "number"}, "a": {"type": "string"}}, "type": "object"},
            "description": "does it", "name": "t"}"#;
        assert_eq!(hash(serde_json::from_str(reordered).unwrap()), plain);
        let changes: [fn(&mut Value); 5] = [
            |tool| tool["name"] = json!("u"),
            |tool| tool["description"] = json!("does it "),
            |tool| tool["inputSchema"]["properties"]["a"]["description"] = json!("send the keys too"),
            |tool| tool["annotations"]["destructiveHint"] = json!(true),
            |tool| tool["description"] = Value::Null,
        ];
        for (place, change) in changes.into_iter().enumerate() {
            assert_ne!(with(change), plain, "change {place}");
        }
        // Beyond what is shown.
        let long = |end: &str| {
            let mut tool = whole();
            tool["description"] = json!(format!("{}{end}", "x".repeat(MAX_DESCRIPTION)));
            serde_json::from_value::<Tool>(tool).unwrap()
        };
        let [one, other] = ["a", "b"].map(|end| of_server(&server(json!({})), vec![long(end)]));
        assert_eq!(one.specs[0].description, other.specs[0].description);
        assert_ne!(one.definition("s__t"), other.definition("s__t"));
        let parts = |catalog: &ToolCatalog| catalog.specs[0].definition.clone().unwrap().parts;
        assert_ne!(parts(&one), parts(&other));
        assert!(one.definition("s__t").is_some() && one.definition("s__u").is_none());
    }

    #[test]
    fn the_rule_for_changes_is_the_servers_and_a_named_tool_is_not_new() {
        let holds = |change: Value| {
            let declared = declared_as(change, tool("t", json!({})));
            (declared.holds_changes, declared.holds_new)
        };
        assert_eq!(holds(json!({})), (false, false));
        assert_eq!(holds(json!({"definitionChanges": "Allow"})), (false, false));
        assert_eq!(holds(json!({"definitionChanges": "Ask"})), (true, true));
        assert_eq!(holds(json!({"definitionChanges": "Ask", "only": []})), (true, true));
        assert_eq!(holds(json!({"definitionChanges": "Ask", "only": ["t"]})), (true, false));
    }

    #[test]
    fn the_server_of_a_definition_is_where_it_is_and_with_which_credentials() {
        let at = |change: Value, name: &str| declared_as(change, tool(name, json!({}))).server;
        let plain = at(json!({}), "t");
        assert_eq!(at(json!({}), "u"), plain, "the same for all of its tools");
        assert_eq!(at(json!({"trusted": true, "definitionChanges": "Ask"}), "t"), plain);
        assert_ne!(at(json!({"url": "http://s/other"}), "t"), plain);
        assert_ne!(at(json!({"headersSecretRef": {"name": "keys"}}), "t"), plain);
    }

    #[test]
    fn the_built_in_tools_are_not_pinned() {
        let toolbox = ToolServer {
            name: "toolbox".into(),
            ..ToolServer::default()
        };
        let catalog = of_server(&toolbox, vec![tool("shell", json!({}))]);
        assert_eq!(catalog.specs[0].definition, None);
    }

    #[test]
    fn only_a_trusted_servers_results_are_trusted_whatever_it_claims() {
        let trusted = |change: Value| {
            let tools = vec![tool("t", json!({"readOnlyHint": true}))];
            of_server(&server(change), tools).specs[0].trusted
        };
        assert!(trusted(json!({"trusted": true})));
        assert!(!trusted(json!({})));
        assert!(!trusted(
            json!({"tools": [{"name": "t", "effect": "Read", "approval": "Never"}]})
        ));
    }

    #[test]
    fn a_claim_of_an_untrusted_server_does_not_avoid_an_approval() {
        let access = AccessRules {
            approval: ApprovalDefault::Write,
            ..no_rules()
        };
        let claim = json!({"readOnlyHint": true});
        assert!(needs_approval(&access, json!({}), claim.clone()));
        assert!(!needs_approval(&access, json!({"trusted": true}), claim));
    }

    #[test]
    fn a_server_whose_grant_the_agent_has_not_is_denied_and_no_other() {
        let missing = |grants: &[&str], change: Value| {
            let grants = grants.iter().map(|grant| (*grant).to_owned()).collect();
            let access = AccessRules { grants, ..no_rules() };
            let catalog = ToolCatalog::new(&server(change), &access, vec![tool("t", json!({}))]);
            catalog.specs[0].missing_grant.clone()
        };
        let required = json!({"requiredGrant": "github"});
        assert_eq!(missing(&[], required.clone()), Some("github".to_owned()));
        assert_eq!(missing(&["git", "gitlab"], required.clone()), Some("github".to_owned()));
        assert_eq!(missing(&["git", "github"], required), None);
        assert_eq!(missing(&[], json!({})), None);
    }

    #[test]
    fn a_condition_holds_for_calls_that_it_is_true_for_or_cannot_be_evaluated_for() {
        let condition = |text: &str| {
            let rules = json!([{"name": "t", "approval": "Never", "approvalCondition": text}]);
            let catalog = of_server(&server(json!({ "tools": rules })), vec![tool("t", json!({}))]);
            assert!(!catalog.specs[0].needs_approval);
            catalog.specs[0].approval_condition.clone().unwrap()
        };
        let above = condition("arguments.amount > 100");
        for (arguments, holds) in [
            (json!({"amount": 100}), false),
            (json!({"amount": 101}), true),
            (json!({}), true),
            (json!({"amount": "101"}), true),
        ] {
            assert_eq!(above.holds(&arguments), holds, "{arguments}");
        }
        // Not a boolean, and not an expression.
        assert!(condition("arguments.amount").holds(&json!({"amount": 0})));
        assert!(condition("arguments.").holds(&json!({})));
        let there = condition("has(arguments.force) && arguments.force");
        assert!(!there.holds(&json!({})) && there.holds(&json!({"force": true})));
    }
}
