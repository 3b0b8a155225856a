//! The model of an Agent: which wire format, which server, which limits of one call.

use std::collections::BTreeMap;

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::agent::{KeyRef, TextSource};
use super::extra;
use super::price::Price;

/// The wire format spoken, not the vendor.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelApi {
    /// OpenAI chat completions; any compatible server works (vLLM, Ollama, llama.cpp, …).
    OpenAIChat,
    /// Anthropic messages; any compatible server works.
    AnthropicMessages,
    /// The built-in deterministic model: answers come from a script in a ConfigMap. No key, no network.
    Scripted,
}

/// Name of the output limit in a request of `OpenAIChat`.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OutputLimitParameter {
    /// `max_completion_tokens` at api.openai.com, `max_tokens` elsewhere.
    #[default]
    Auto,
    /// `max_tokens`.
    MaxTokens,
    /// `max_completion_tokens`.
    MaxCompletionTokens,
}

/// How tools are offered to a model, and how it asks for them.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ToolCalling {
    /// By the wire format's own tool calls.
    #[default]
    Native,
    /// In words, answered by JSON objects of a schema that is sent with each request (`response_format`).
    Structured,
}

/// How much a model reasons before it answers.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningEffort {
    /// As little as the model can. Of `OpenAIChat` only.
    Minimal,
    /// Little.
    Low,
    /// In between.
    Medium,
    /// Much.
    High,
}

/// How much a model may reason before it answers: by a word, or by a number of tokens.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(
    validation = Rule::new("has(self.effort) != has(self.budgetTokens)").message(
        "spec.model.reasoning must have exactly one of effort and budgetTokens"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct Reasoning {
    /// How much the model reasons, in a word. `OpenAIChat`: sent as `reasoning_effort`. `AnthropicMessages`: sent as
    /// `output_config.effort` with adaptive thinking, for Claude 4.6 and later; `Minimal` does not exist there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub effort: Option<ReasoningEffort>,
    /// Most tokens of reasoning in one answer, 1,024 to 1,000,000, less than maxOutputTokens, of which they are a part.
    /// For `AnthropicMessages` only: extended thinking, as Claude has it up to version 4.6.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1024, max = 1_000_000))]
    pub budget_tokens: Option<u32>,
}

/// How long a provider is asked to keep the conversation in its cache.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PromptCache {
    /// What would have cost least for the last calls.
    #[default]
    Auto,
    /// Five minutes.
    FiveMinutes,
    /// An hour.
    OneHour,
    /// Not at all.
    Disabled,
}

/// The model of an Agent.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[x_kube(
    validation = Rule::new("self.api != 'OpenAIChat' || has(self.baseURL)").message(
        "spec.model.baseURL is required with api OpenAIChat: set the server's address, such as https://api.example.com/v1"
    ),
    validation = Rule::new("self.api != 'AnthropicMessages' || has(self.baseURL)").message(
        "spec.model.baseURL is required with api AnthropicMessages: set the server's address, such as https://api.example.com"
    ),
    validation = Rule::new("self.api != 'AnthropicMessages' || !has(self.baseURL) || !self.baseURL.matches('/v1/*$')").message(
        "spec.model.baseURL ends in /v1, which api AnthropicMessages adds by itself: remove it"
    ),
    validation = Rule::new("self.api != 'AnthropicMessages' || !has(self.temperature) || self.temperature.matches('^(0|1([.]0+)?$)')").message(
        "spec.model.temperature must be from 0 to 1 with api AnthropicMessages: lower it"
    ),
    validation = Rule::new("self.api == 'OpenAIChat' || self.outputLimitParameter == 'Auto'").message(
        "spec.model.outputLimitParameter is for api OpenAIChat only: remove it"
    ),
    validation = Rule::new("self.api != 'Scripted' || (!has(self.headers) && !has(self.extraBody))").message(
        "spec.model.headers and spec.model.extraBody have no meaning with api Scripted: remove them"
    ),
    validation = Rule::new("self.api != 'Scripted' || !has(self.baseURL)").message(
        "spec.model.baseURL has no meaning with api Scripted: remove it"
    ),
    validation = Rule::new("self.api != 'Scripted' || has(self.scripted)").message(
        "spec.model.scripted is required with api Scripted: set spec.model.scripted.configMapKeyRef to the script"
    ),
    validation = Rule::new("self.api == 'Scripted' || !has(self.scripted)").message(
        "spec.model.scripted is for api Scripted only: remove it, or set spec.model.api to Scripted"
    ),
    validation = Rule::new("self.api != 'Scripted' || !has(self.apiKeySecretRef)").message(
        "spec.model.apiKeySecretRef has no meaning with api Scripted: remove it"
    ),
    validation = Rule::new("self.api == 'OpenAIChat' || self.toolCalling == 'Native'").message(
        "spec.model.toolCalling Structured is for api OpenAIChat only: remove it"
    ),
    validation = Rule::new("self.api != 'Scripted' || (!has(self.reasoning) && self.promptCache == 'Auto')").message(
        "spec.model.reasoning and spec.model.promptCache have no meaning with api Scripted: remove them"
    ),
    validation = Rule::new("self.api == 'AnthropicMessages' || !has(self.reasoning) || !has(self.reasoning.budgetTokens)").message(
        "spec.model.reasoning.budgetTokens is for api AnthropicMessages only: set spec.model.reasoning.effort instead"
    ),
    validation = Rule::new("self.api != 'AnthropicMessages' || !has(self.reasoning) || !has(self.reasoning.effort) || self.reasoning.effort != 'Minimal'").message(
        "spec.model.reasoning.effort Minimal is for api OpenAIChat only: set Low"
    ),
    validation = Rule::new("!has(self.reasoning) || !has(self.reasoning.budgetTokens) || self.reasoning.budgetTokens < self.maxOutputTokens").message(
        "spec.model.reasoning.budgetTokens must be less than spec.model.maxOutputTokens, of which it is a part: raise the second or lower the first"
    ),
    validation = Rule::new("!has(self.reasoning) || !has(self.reasoning.budgetTokens) || self.reasoning.budgetTokens * 2 < self.contextTokens").message(
        "spec.model.reasoning.budgetTokens must be less than half of spec.model.contextTokens: an answer takes at most half of the window"
    ),
    validation = Rule::new("self.api != 'AnthropicMessages' || !has(self.reasoning) || !has(self.temperature)").message(
        "spec.model.temperature must be absent with spec.model.reasoning and api AnthropicMessages, which refuses both together: remove it"
    ),
    validation = Rule::new("self.api != 'AnthropicMessages' || !has(self.extraBody) || !has(self.extraBody.thinking)").message(
        "spec.model.extraBody must not set thinking with api AnthropicMessages: set spec.model.reasoning instead"
    ),
    validation = Rule::new("self.api == 'AnthropicMessages' || self.promptCache in ['Auto', 'Disabled']").message(
        "spec.model.promptCache FiveMinutes and OneHour are for api AnthropicMessages only: set Auto or Disabled"
    ),
    validation = Rule::new("self.streamIdleTimeoutSeconds <= self.timeoutSeconds").message(
        "spec.model.streamIdleTimeoutSeconds (default 60) must not exceed spec.model.timeoutSeconds (default 300): lower the first or raise the second"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct Model {
    /// The wire format spoken, not the vendor. `OpenAIChat`: OpenAI chat completions, as any compatible server has them
    /// (vLLM, Ollama, llama.cpp, …). `AnthropicMessages`: Anthropic messages, as any compatible server has them.
    /// `Scripted`: the built-in deterministic model; answers come from a script in a ConfigMap, with no key and no
    /// network.
    pub api: ModelApi,
    /// The model's name as the server knows it, at most 256 characters.
    #[schemars(length(min = 1, max = 256), regex(pattern = r"^\S(.*\S)?$"))]
    pub name: String,
    /// Base address as the vendor's own SDK takes it, with `/v1` for OpenAI, without for Anthropic: http or https, a
    /// host, no user, no query. Required but for `Scripted`.
    #[serde(default, rename = "baseURL", skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 2048))]
    #[x_kube(
        validation = Rule::new("self.startsWith('http://') || self.startsWith('https://')").message(
            "spec.model.baseURL must start with http:// or https://, such as https://api.example.com/v1"
        ),
        validation = Rule::new(r"self.matches('^[a-zA-Z]+://(\\[[0-9a-fA-F:.]+\\]|[-_.a-zA-Z0-9]+)(:[0-9]{1,5})?(/[!-~]*)?$')").message(
            "spec.model.baseURL must be scheme://host[:port][/path] without spaces, such as https://api.example.com/v1"
        ),
        validation = Rule::new("!self.matches('^[^/]*//[^/]*:(6553[6-9]|655[4-9][0-9]|65[6-9][0-9]{2}|6[6-9][0-9]{3}|[7-9][0-9]{4})(/|$)')").message(
            "spec.model.baseURL has a port above 65535: correct the number"
        ),
        validation = Rule::new("!self.matches('^[^/]*//[^/]*@')").message(
            "spec.model.baseURL must not carry a user or password: put the key into a Secret and name it in spec.model.apiKeySecretRef"
        ),
        validation = Rule::new("!self.contains('?') && !self.contains('#')").message(
            "spec.model.baseURL must have no query and no fragment: remove everything from '?' or '#' on"
        )
    )]
    pub base_url: Option<String>,
    /// The API key: sent as `Authorization: Bearer` to `OpenAIChat`, as `x-api-key` to `AnthropicMessages`. Absent: no
    /// such header is sent, as local servers want it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key_secret_ref: Option<KeyRef>,
    /// Headers added to each request; at most 16. Those that carry a key, or that the gateway writes, are refused.
    /// They are no place for a secret: everybody who may read the Agent reads them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(transform = extra::headers)]
    pub headers: BTreeMap<String, String>,
    /// Fields added to the body of each request, such as a server's own switches; at most 64. Fields that the loop
    /// writes, and those that could raise the bill or change what is metered, are refused.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    #[schemars(transform = extra::extra_body)]
    pub extra_body: Map<String, Value>,
    /// Most tokens one answer may have, reasoning included, 1 to 1,000,000; written into each request by the gateway. At most
    /// half of `contextTokens` is used: the prompt has to fit beside the answer.
    #[serde(default = "default_max_output_tokens")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_output_tokens: u32,
    /// Name of the output limit in a request of `OpenAIChat`. `Auto`: `max_completion_tokens` at api.openai.com,
    /// `max_tokens` elsewhere. `MaxTokens`, `MaxCompletionTokens`: always that one.
    #[serde(default)]
    pub output_limit_parameter: OutputLimitParameter,
    /// The context window in tokens, 256 to 10,000,000. A summary takes the place of the oldest turns before it is full.
    #[serde(default = "default_context_tokens")]
    #[schemars(range(min = 256, max = 10_000_000))]
    pub context_tokens: u32,
    /// Sampling temperature from 0 to 2 as a decimal string, such as "0.7". Absent: the server's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 8))]
    #[x_kube(validation = Rule::new(r"self.matches('^([01](\\.[0-9]{1,4})?|2(\\.0{1,4})?)$')").message(
        "spec.model.temperature must be a decimal number from 0 to 2 in quotes, such as '0.7'"
    ))]
    pub temperature: Option<String>,
    /// How much the model reasons before it answers. Its reasoning is output and counts against maxOutputTokens. Absent:
    /// the server's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<Reasoning>,
    /// How long the provider is asked to keep the conversation in its cache, so that the next call reads it at a lower
    /// price. `AnthropicMessages`: `FiveMinutes`, `OneHour`, `Disabled`, or `Auto`, which takes what would have cost least for
    /// the last calls, by their pauses, their sizes and the model's prices. `OpenAIChat`, where servers cache by
    /// themselves: `Auto` sends a `prompt_cache_key` to api.openai.com, `Disabled` does not.
    #[serde(default)]
    pub prompt_cache: PromptCache,
    /// Whether answers are streamed from the server.
    #[serde(default = "default_true")]
    pub stream: bool,
    /// Longest time one call may take, in seconds, 1 to 3,600.
    #[serde(default = "default_timeout_seconds")]
    #[schemars(range(min = 1, max = 3600))]
    pub timeout_seconds: u32,
    /// Longest silence within a streamed answer, in seconds, 1 to 3,600.
    #[serde(default = "default_stream_idle_timeout_seconds")]
    #[schemars(range(min = 1, max = 3600))]
    pub stream_idle_timeout_seconds: u32,
    /// How the model is offered tools and asks for them. `Native`: by tool calls of the wire format. `Structured`: for
    /// servers of `OpenAIChat` without tool calling: tools are described in the system prompt, and each answer is a JSON
    /// object of a schema that is sent as `response_format`.
    #[serde(default)]
    pub tool_calling: ToolCalling,
    /// What the model costs. A price in the controller's own table wins; this one counts where that has none and the
    /// platform allows it. Needed by budgets and limits in US dollars.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price: Option<Price>,
    /// The script of api `Scripted`. Required for it, and only there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scripted: Option<TextSource>,
}

impl Model {
    /// Most tokens of one answer: `maxOutputTokens`, and at most half of the window.
    #[must_use]
    pub fn output_limit(&self) -> u32 {
        self.max_output_tokens.min(self.context_tokens / 2).max(1)
    }
}

fn default_max_output_tokens() -> u32 {
    16_384
}
fn default_context_tokens() -> u32 {
    128_000
}
fn default_timeout_seconds() -> u32 {
    300
}
fn default_stream_idle_timeout_seconds() -> u32 {
    60
}
fn default_true() -> bool {
    true
}
