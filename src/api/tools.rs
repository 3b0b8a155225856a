//! The tools of an Agent: their servers, and the rules of each tool.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::bounds::{DNS_LABEL, DNS_SUBDOMAIN};
use super::server_tls::ServerTls;
use super::toolbox::{BuiltinTools, DEFAULT_MCP_PATH, SHELL_TOOL, TOOLBOX, ToolContainer, ToolboxSpec};

/// A tool's name, as servers choose it.
pub(super) const TOOL: &str = "^[!-~]+$";

/// Headers that the protocol and the connection set themselves.
const OWN_HEADERS: [&str; 15] = [
    "accept",
    "accept-encoding",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "expect",
    "host",
    "keep-alive",
    "last-event-id",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "user-agent",
];

/// Whether a key of the Secret of [`ToolServer::headers_secret_ref`] can be sent as a header: a name of letters,
/// digits, `-`, `_` and `.` that the protocol does not set itself.
#[must_use]
pub fn is_tool_header(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let spelt = name
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    let own = OWN_HEADERS.contains(&name.as_str()) || name.starts_with("mcp-") || name.starts_with("x-agentloop-");
    !name.is_empty() && spelt && !own
}

/// Tools of an Agent.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.builtin) || !('Shell' in self.builtin) || has(self.toolbox) && has(self.toolbox.image)").message(
        "spec.tools.builtin has Shell, which needs spec.tools.toolbox.image: an image with /bin/sh and the programs that commands need"
    ),
    validation = Rule::new("!has(self.builtin) || !('HTTP' in self.builtin) || has(self.toolbox) && has(self.toolbox.http)").message(
        "spec.tools.builtin has HTTP, which needs spec.tools.toolbox.http.allowedHosts: the hosts that requests may go to"
    ),
    validation = Rule::new("!has(self.toolbox) || has(self.builtin) && size(self.builtin) > 0").message(
        "spec.tools.toolbox has no effect without spec.tools.builtin: add Shell, Files or HTTP there, or remove toolbox"
    )
)]
pub struct ToolsSpec {
    /// Built-in tools: `Shell`, `Files` and `HTTP`. They run in a container of their own, the toolbox, whose directory
    /// `/workspace` is `spec.workspace`, or else is lost with the pod. The model calls them `toolbox__<tool>`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 3), extend("x-kubernetes-list-type" = "set"))]
    pub builtin: Vec<BuiltinTools>,
    /// The container of the built-in tools.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub toolbox: Option<ToolboxSpec>,
    /// MCP servers whose tools the model may call, at most 16. Their order is that of the tools in the prompt.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub servers: Vec<ToolServer>,
    /// Maximum size of a tool result shown to the model, in bytes, 256 to 1,048,576. Longer results are truncated and
    /// marked as such. Defaults to 32,768.
    #[serde(default = "default_max_result_bytes")]
    #[schemars(range(min = 256, max = 1_048_576))]
    pub max_result_bytes: u32,
    /// Which calls of the model a person must approve before they run.
    #[serde(default)]
    pub approval: ApprovalRules,
    /// Grants of the Agent, at most 32: names that servers require in `requiredGrant`. The tools of a server whose grant is
    /// missing are offered, but every call of them is denied with a result that names the missing grant.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "set", "items" = {
        "type": "string",
        "description": "Name of a grant.",
        "minLength": 1,
        "maxLength": 63,
        "pattern": DNS_LABEL,
    }))]
    pub grants: Vec<String>,
}

fn default_max_result_bytes() -> u32 {
    32_768
}

/// Which tool calls need an approval.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct ApprovalRules {
    /// Calls that need an approval, by the effect of their tool, unless a rule of the tool has `approval`. `Never`: none.
    /// `Destructive`, the default: those of tools with this effect. `Write`: those of tools with any side effect. `Always`:
    /// all.
    pub default: ApprovalDefault,
    /// Calls that need an approval in addition, once the model has been shown untrusted content: a result of the
    /// toolbox or of a server that is not `trusted`, a notification of a Sensor, or the text of a hot state field that
    /// either of them has set. `Never`, the default: none. `Destructive`, `Write` and `Always`: as in `default`. The
    /// `approval` of a tool takes precedence. Content stays untrusted for as long as anything that the model wrote
    /// after it may be in its context, which is usually for the life of the loop; see `status.loop.untrustedContent`.
    #[serde(skip_serializing_if = "ApprovalDefault::is_never")]
    pub after_untrusted_content: ApprovalDefault,
    /// Time in which a call must be approved, in seconds, 60 to 604,800 (a week); then it is denied. Defaults to 3,600.
    #[schemars(range(min = 60, max = 604_800))]
    pub timeout_seconds: u32,
    /// What the loop does while a call waits for its approval. `Pause`, the default: the loop is paused. `Continue`:
    /// the call gets a result which states that it waits, and the loop continues. An approved call runs when no other
    /// tool runs; a notification of high priority then shows the model its result, of which at most 1.5 KiB are shown,
    /// and ends a sleep. At most 8 calls wait in this way, with arguments of at most 64 KiB in total; with more, the
    /// loop is paused.
    #[serde(skip_serializing_if = "WhilePending::is_pause")]
    pub while_pending: WhilePending,
}

impl Default for ApprovalRules {
    fn default() -> Self {
        Self {
            default: ApprovalDefault::default(),
            after_untrusted_content: ApprovalDefault::Never,
            timeout_seconds: 3600,
            while_pending: WhilePending::Pause,
        }
    }
}

/// What a loop does while a tool call waits for its approval.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhilePending {
    /// It is paused.
    #[default]
    Pause,
    /// It continues without the result of the call.
    Continue,
}

impl WhilePending {
    /// Left out of the serialized spec, so that its hash is the same as before the field existed.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde requires")]
    fn is_pause(&self) -> bool {
        *self == Self::Pause
    }
}

/// Tool calls that need an approval, by effect.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ApprovalDefault {
    /// None.
    Never,
    /// Those of tools that may remove or overwrite something.
    #[default]
    Destructive,
    /// Those of tools with any side effect.
    Write,
    /// All.
    Always,
}

impl ApprovalDefault {
    /// Left out of the serialized spec, so that its hash is the same as before the field existed.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde requires")]
    fn is_never(&self) -> bool {
        *self == Self::Never
    }
}

/// Whether calls of a tool need an approval.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolApproval {
    /// They need none.
    Never,
    /// Each call needs one.
    Always,
}

impl ToolsSpec {
    /// Maximum timeout of all tools, in seconds; 0 without tools.
    #[must_use]
    pub fn longest_timeout_seconds(&self) -> u32 {
        let builtin = self.toolbox.iter().flat_map(|toolbox| &toolbox.tools);
        let rules = self.servers.iter().flat_map(|server| &server.tools).chain(builtin);
        let timeouts = rules.map(|rules| rules.timeout_seconds);
        let has_tools = !self.servers.is_empty() || !self.builtin.is_empty();
        let other = has_tools.then_some(DEFAULT_TIMEOUT_SECONDS);
        timeouts.chain(other).max().unwrap_or(0)
    }

    /// All servers in the order of the prompt: the toolbox, if there are built-in tools, and those of the spec.
    #[must_use]
    pub fn all_servers(&self) -> Vec<ToolServer> {
        let toolbox = (!self.builtin.is_empty()).then(|| ToolServer {
            name: TOOLBOX.into(),
            trusted: true,
            tools: self.toolbox.iter().flat_map(|toolbox| toolbox.tools.clone()).collect(),
            ..ToolServer::default()
        });
        toolbox.into_iter().chain(self.servers.iter().cloned()).collect()
    }

    /// The approval conditions, each with its field.
    pub fn approval_conditions(&self) -> impl Iterator<Item = (String, &str)> {
        let servers = self.servers.iter().flat_map(|server| {
            let field = format!("spec.tools.servers[{}]", server.name);
            server.tools.iter().map(move |rules| (field.clone(), rules))
        });
        let builtin = self.toolbox.iter().flat_map(|toolbox| &toolbox.tools);
        let builtin = builtin.map(|rules| ("spec.tools.toolbox".to_owned(), rules));
        builtin.chain(servers).filter_map(|(field, rules)| {
            let condition = rules.approval_condition.as_deref()?;
            Some((format!("{field}.tools[{}].approvalCondition", rules.name), condition))
        })
    }

    /// Longest time of a call of the built-in tool `shell`, in seconds.
    #[must_use]
    pub fn shell_timeout_seconds(&self) -> u32 {
        let rules = self.toolbox.iter().flat_map(|toolbox| &toolbox.tools);
        let mut shell = rules.filter(|rules| rules.name == SHELL_TOOL);
        shell
            .next()
            .map_or(DEFAULT_TIMEOUT_SECONDS, |rules| rules.timeout_seconds)
    }
}

impl Default for ToolsSpec {
    fn default() -> Self {
        Self {
            builtin: Vec::new(),
            toolbox: None,
            servers: Vec::new(),
            max_result_bytes: default_max_result_bytes(),
            approval: ApprovalRules::default(),
            grants: Vec::new(),
        }
    }
}

/// An MCP server: one with streamable HTTP transport at a URL, or a container of the Agent's pod.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.url) != has(self.container)").message(
        "spec.tools.servers[] must have either url or container"
    ),
    validation = Rule::new("!has(self.container) || !has(self.headersSecretRef)").message(
        "spec.tools.servers[].headersSecretRef is for servers with a url: name the Secret in container.envFrom"
    ),
    validation = Rule::new("!has(self.tls) || has(self.url) && self.url.startsWith('https://')").message(
        "spec.tools.servers[].tls requires a url that starts with https://"
    )
)]
pub struct ToolServer {
    /// Name of the server, at most 32 lower-case letters, digits and '-'. The model calls its tools `<name>__<tool>`.
    #[schemars(length(min = 1, max = 32), regex(pattern = DNS_LABEL))]
    #[x_kube(validation = Rule::new("self != 'toolbox'").message(
        "spec.tools.servers[].name must not be toolbox, which is the name of the built-in tools: choose another name"
    ))]
    pub name: String,
    /// The server as a container of the Agent's pod. Either this or `url` is required.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<ToolContainer>,
    /// URL of the MCP endpoint: http or https, a host, no user. Redirects are not followed. Either this or `container` is
    /// required.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 2048))]
    #[x_kube(
        validation = Rule::new("self.startsWith('http://') || self.startsWith('https://')").message(
            "spec.tools.servers[].url must start with http:// or https://, such as https://mcp.example.com/mcp"
        ),
        validation = Rule::new(r"self.matches('^[a-zA-Z]+://(\\[[0-9a-fA-F:.]+\\]|[-_.a-zA-Z0-9]+)(:[0-9]{1,5})?([/?][!-~]*)?$')").message(
            "spec.tools.servers[].url must be scheme://host[:port][/path] without spaces, such as https://mcp.example.com/mcp"
        ),
        validation = Rule::new("!self.matches('^[^/]*//[^/?]*:(6553[6-9]|655[4-9][0-9]|65[6-9][0-9]{2}|6[6-9][0-9]{3}|[7-9][0-9]{4})([/?]|$)')").message(
            "spec.tools.servers[].url has a port above 65535: correct the port"
        ),
        validation = Rule::new("!self.matches('^[^/]*//[^/?]*@')").message(
            "spec.tools.servers[].url must not contain a user or password: put them into a Secret as the header Authorization and reference it in headersSecretRef"
        ),
        validation = Rule::new("!self.contains('#')").message(
            "spec.tools.servers[].url must not have a fragment: remove everything from '#' on"
        )
    )]
    pub url: Option<String>,
    /// A Secret whose keys are header names, such as `Authorization`, and whose values are sent with each request. Only
    /// the server receives them; the model and the loop never see them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers_secret_ref: Option<SecretRef>,
    /// TLS settings of the server. Allowed only if `url` starts with https://.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<ServerTls>,
    /// Name of the grant that calls of this server's tools require: lower-case letters, digits and '-', at most 63. It must
    /// be in `spec.tools.grants`; otherwise each call is denied. Absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63), regex(pattern = DNS_LABEL))]
    pub required_grant: Option<String>,
    /// Whether the server's annotations of its tools (`readOnlyHint`, `destructiveHint`, `idempotentHint`) are trusted.
    /// If false, the default, each of its tools counts as `Write` and not idempotent, unless `tools` says otherwise, and its
    /// results are untrusted content for `spec.tools.approval.afterUntrustedContent`. Results with text that others write, such
    /// as web pages, mail or issues, are untrusted content whoever runs the server: declare the effects in `tools` instead.
    #[serde(default)]
    pub trusted: bool,
    /// Names of the only tools of this server that are offered to the model, as the server names them, at most 128.
    /// Absent or empty: all of them. List only the tools that the Agent needs: each offered tool costs tokens in every
    /// call, and a tool that is not offered cannot be called. An Agent is offered at most 125 tools in total.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128), extend("x-kubernetes-list-type" = "set", "items" = {
        "type": "string",
        "description": "Name of a tool as its server has it, without the server's name.",
        "minLength": 1,
        "maxLength": 128,
        "pattern": TOOL,
    }))]
    pub only: Vec<String>,
    /// What happens when the server changes the definition of a tool (its description, its input schema or its annotations), or
    /// adds a tool. `Allow`, the default: the change is recorded. `Ask`: the tool is withheld from the model until a person has
    /// approved the change; so is a new tool, unless `only` names the tools. The first definitions of a server are accepted, and
    /// so are those after an edit of its `url`, `headersSecretRef` or `container`.
    #[serde(default, skip_serializing_if = "DefinitionChanges::is_allow")]
    pub definition_changes: DefinitionChanges,
    /// Rules for single tools, at most 128. Tools without a rule are offered too, with the defaults, unless `only`
    /// excludes them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub tools: Vec<ToolRules>,
}

/// What happens when a server changes the definition of a tool, or adds one.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DefinitionChanges {
    /// It is recorded.
    #[default]
    Allow,
    /// The tool is withheld until a person has approved the change.
    Ask,
}

impl DefinitionChanges {
    /// Left out of the serialized spec, so that its hash is the same as before the field existed.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde requires")]
    fn is_allow(&self) -> bool {
        *self == Self::Allow
    }
}

/// Where a server is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerEndpoint<'a> {
    /// The toolbox, on its Unix socket.
    Toolbox,
    /// The bridge to a container that uses standard input and output, on its Unix socket.
    Bridge,
    /// A port of the pod, and the path there.
    Port(u16, &'a str),
    /// A URL. Empty in an object that admission did not check.
    Url(&'a str),
}

impl ToolServer {
    /// Where the server is reached.
    #[must_use]
    pub fn endpoint(&self) -> ServerEndpoint<'_> {
        match (&self.container, &self.url) {
            (Some(container), _) => match container.port {
                None => ServerEndpoint::Bridge,
                Some(port) => ServerEndpoint::Port(port, container.path.as_deref().unwrap_or(DEFAULT_MCP_PATH)),
            },
            (None, None) if self.name == TOOLBOX => ServerEndpoint::Toolbox,
            (None, url) => ServerEndpoint::Url(url.as_deref().unwrap_or_default()),
        }
    }
}

/// Reference to a Secret in the same namespace, all of whose keys are used.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct SecretRef {
    /// Name of the Secret in the same namespace.
    #[schemars(length(min = 1, max = 253), regex(pattern = DNS_SUBDOMAIN))]
    pub name: String,
}

/// Rules for one tool.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.approvalCondition) || !has(self.approval) || self.approval != 'Always'").message(
        "tools[].approvalCondition has no effect with approval: Always: remove one of them"
    )
)]
pub struct ToolRules {
    /// Name of the tool on its server, without the server's name.
    #[schemars(length(min = 1, max = 128), regex(pattern = TOOL))]
    pub name: String,
    /// Effect of the tool. `Read`: it changes nothing; up to four such calls run in parallel, and one that a crash
    /// interrupted is repeated. `Write`: it changes something. `Destructive`: it may remove or overwrite something.
    /// Defaults to what a trusted server declares, or else `Write`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub effect: Option<DeclaredEffect>,
    /// Whether a repetition with the same arguments and idempotency key has no further effect, so that a call
    /// interrupted by a crash is repeated. Defaults to what a trusted server declares, or else false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idempotent: Option<bool>,
    /// Maximum duration of a call, in seconds, 1 to 3,600, after which its outcome is unknown. Defaults to 60.
    #[serde(default = "default_timeout_seconds")]
    #[schemars(range(min = 1, max = 3600))]
    pub timeout_seconds: u32,
    /// What happens when the outcome of a call is unknown. `TellModel`, the default: the model is informed. `Retry`:
    /// the call is repeated with the same idempotency key. `Ask`: the call is repeated if a person approves it, otherwise
    /// the model is informed.
    #[serde(default)]
    pub on_unknown_outcome: OnUnknownOutcome,
    /// Whether a person must approve each call: `Never` or `Always`. `Never` takes precedence over
    /// `spec.tools.approval.afterUntrustedContent` too. Defaults to the rules in `spec.tools.approval`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub approval: Option<ToolApproval>,
    /// CEL expression over the `arguments` of a call, such as `arguments.amount > 100`, at most 1,024 bytes. A call for
    /// which it is true, or for which it cannot be evaluated, needs an approval in addition to those that other rules ask
    /// for, `approval: Never` included. Functions and limits are those of the expressions of a Sensor. An Agent has at most
    /// 32 such expressions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub approval_condition: Option<String>,
}

/// Maximum number of approval conditions of an Agent.
pub const MAX_APPROVAL_CONDITIONS: usize = 32;

/// Default timeout of a tool call, in seconds.
pub const DEFAULT_TIMEOUT_SECONDS: u32 = 60;
/// Maximum timeout of a tool call, in seconds.
pub const MAX_TIMEOUT_SECONDS: u32 = 3600;

fn default_timeout_seconds() -> u32 {
    DEFAULT_TIMEOUT_SECONDS
}

/// The effect of a tool, as declared in the spec.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeclaredEffect {
    /// It changes nothing.
    Read,
    /// It changes something.
    Write,
    /// It may remove or overwrite something.
    Destructive,
}

/// What happens when the outcome of a call is unknown.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnUnknownOutcome {
    /// The model is informed.
    #[default]
    TellModel,
    /// The call is repeated with the same idempotency key.
    Retry,
    /// The call is repeated if a person approves it.
    Ask,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rules_without_newer_fields_are_serialized_as_before_there_were_any() {
        let written = |rules: &ApprovalRules| serde_json::to_value(rules).unwrap();
        let mut rules = ApprovalRules::default();
        assert_eq!(
            written(&rules),
            json!({"default": "Destructive", "timeoutSeconds": 3600})
        );
        rules.after_untrusted_content = ApprovalDefault::Write;
        rules.while_pending = WhilePending::Continue;
        assert_eq!(written(&rules)["afterUntrustedContent"], "Write");
        assert_eq!(written(&rules)["whilePending"], "Continue");
        assert_eq!(serde_json::from_value::<ApprovalRules>(written(&rules)).unwrap(), rules);
    }

    #[test]
    fn a_server_without_a_rule_for_definitions_is_serialized_as_before_there_was_one() {
        let read = |value| serde_json::from_value::<ToolServer>(value).unwrap();
        let plain = json!({"name": "files", "url": "http://files", "trusted": false});
        assert_eq!(serde_json::to_value(read(plain.clone())).unwrap(), plain);
        let mut asks = plain;
        asks["definitionChanges"] = json!("Ask");
        assert_eq!(read(asks.clone()).definition_changes, DefinitionChanges::Ask);
        assert_eq!(serde_json::to_value(read(asks.clone())).unwrap(), asks);
    }

    #[test]
    fn a_header_of_a_tool_server_is_any_that_the_protocol_does_not_write() {
        for name in ["Authorization", "X-API-Key", "x.y_z", "Cookie"] {
            assert!(is_tool_header(name), "{name}");
        }
        for name in [
            "",
            "two words",
            "Host",
            "MCP-Session-Id",
            "Content-Type",
            "X-Agentloop-Call",
            "a:b",
        ] {
            assert!(!is_tool_header(name), "{name}");
        }
    }
}
