//! The model of an Agent: wire format, server, and limits of one call.

use std::collections::BTreeMap;

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::agent::{KeyRef, TextSource};
use super::extra;
use super::price::ModelPrice;
use super::server_tls::ServerTls;

/// Wire format, independent of the vendor.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelApi {
    /// OpenAI chat completions, on any compatible server (vLLM, Ollama, llama.cpp, …).
    OpenAIChat,
    /// Anthropic messages, on any compatible server.
    AnthropicMessages,
    /// OpenAI Responses, on any compatible server, without storage at the server.
    OpenAIResponses,
    /// Built-in deterministic model that takes its answers from a script in a ConfigMap. No key, no network.
    Scripted,
}

impl ModelApi {
    /// The name in a resource.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::OpenAIChat => "OpenAIChat",
            Self::AnthropicMessages => "AnthropicMessages",
            Self::OpenAIResponses => "OpenAIResponses",
            Self::Scripted => "Scripted",
        }
    }
}

/// Name of the output limit in requests of `OpenAIChat`.
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

/// How tools are offered to a model and called by it.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ToolCalling {
    /// Tool calls of the wire format.
    #[default]
    Native,
    /// Tools described in the system prompt and called by JSON objects of a schema that is sent with each request
    /// (`response_format`).
    Structured,
}

/// Which requests carry the JSON schema of their answer.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StructuredOutput {
    /// None: the form of an answer is only described in the prompt.
    #[default]
    Disabled,
    /// Those without tools: questions of the runtime that are answered with one JSON object.
    WithoutTools,
    /// Also those with tools.
    Always,
}

impl StructuredOutput {
    /// Whether no request carries a schema.
    #[must_use]
    pub fn is_disabled(&self) -> bool {
        *self == Self::Disabled
    }
}

/// How much a model reasons before an answer.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningEffort {
    /// Minimal effort. Not with `AnthropicMessages`.
    Minimal,
    /// Low effort.
    Low,
    /// Medium effort.
    Medium,
    /// High effort.
    High,
}

/// Reasoning before an answer, as an effort or as a number of tokens.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(
    validation = Rule::new("has(self.effort) != has(self.budgetTokens)").message(
        "spec.model.reasoning must have exactly one of effort and budgetTokens"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct ReasoningSpec {
    /// Reasoning effort. `OpenAIChat`: sent as `reasoning_effort`. `OpenAIResponses`: sent as `reasoning.effort`, with a
    /// request for the encrypted reasoning, which tool calls need; set it for every model that reasons.
    /// `AnthropicMessages`: sent as `output_config.effort` with adaptive thinking, for Claude 4.6 and later; `Minimal` is
    /// not supported there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub effort: Option<ReasoningEffort>,
    /// Maximum number of reasoning tokens in one answer, 1,024 to 1,000,000; must be less than maxOutputTokens, of
    /// which they are a part. `AnthropicMessages` only: extended thinking, for Claude up to version 4.6.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1024, max = 1_000_000))]
    pub budget_tokens: Option<u32>,
}

/// How long a provider is asked to cache the conversation.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PromptCache {
    /// The setting that would have cost least for the last calls.
    #[default]
    Auto,
    /// Five minutes.
    FiveMinutes,
    /// One hour.
    OneHour,
    /// No caching is requested.
    Disabled,
}

/// Images that the model is shown.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct ImageInput {
    /// Maximum number of images in a prompt, 1 to 20. The newest are shown; when there are more, the older half leaves at
    /// once, since each change misses the provider's prompt cache. Defaults to 4.
    #[schemars(range(min = 1, max = 20))]
    pub max_images: u32,
    /// Maximum number of tokens that the server bills for an image, 100 to 100,000. Each image that is shown counts with
    /// it before a call, and an image with more squares of 28 x 28 pixels is not shown. Defaults to 5,000, which is enough
    /// for current models of Anthropic (at most 4,784) and OpenAI (at most 3,779, but 48,169 for gpt-4o-mini).
    #[schemars(range(min = 100, max = 100_000))]
    pub tokens_per_image: u32,
}

impl ImageInput {
    /// Maximum number of bytes of an image that is shown: a request has at most 32 MiB, with 20 images in base64.
    pub const MAX_BYTES: usize = 1024 * 1024;
    /// Maximum width and height of an image that is shown, in pixels: Anthropic rejects more.
    const MAX_EDGE: u32 = 8_000;
    /// Edge of the squares by which servers that do not reduce an image count its tokens, in pixels: 28 for Claude and
    /// Qwen2-VL, 32 for OpenAI and Qwen3-VL. Servers with tiles bill less for large images and a fixed number for small
    /// ones.
    const SQUARE: u32 = 28;

    /// Whether an image of this size may be shown: the server certainly bills no more than `tokensPerImage` for it.
    #[must_use]
    pub fn allows(self, width: u32, height: u32, bytes: usize) -> bool {
        let squares = u64::from(width.div_ceil(Self::SQUARE)) * u64::from(height.div_ceil(Self::SQUARE));
        bytes <= Self::MAX_BYTES && width.max(height) <= Self::MAX_EDGE && squares <= self.tokens_per_image.into()
    }
}

impl Default for ImageInput {
    fn default() -> Self {
        Self {
            max_images: 4,
            tokens_per_image: 5_000,
        }
    }
}

/// The model of an Agent.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[x_kube(
    validation = Rule::new("self.api != 'OpenAIChat' || has(self.baseURL)").message(
        "spec.model.baseURL is required with api OpenAIChat: set the server's address, such as https://api.example.com/v1"
    ),
    validation = Rule::new("self.api != 'OpenAIResponses' || has(self.baseURL)").message(
        "spec.model.baseURL is required with api OpenAIResponses: set the server's address, such as https://api.example.com/v1"
    ),
    validation = Rule::new("self.api != 'OpenAIResponses' || self.maxOutputTokens >= 16").message(
        "spec.model.maxOutputTokens must be at least 16 with api OpenAIResponses, which rejects less: raise it"
    ),
    validation = Rule::new("self.api != 'AnthropicMessages' || has(self.baseURL)").message(
        "spec.model.baseURL is required with api AnthropicMessages: set the server's address, such as https://api.example.com"
    ),
    validation = Rule::new("self.api != 'AnthropicMessages' || !has(self.baseURL) || !self.baseURL.matches('/v1/*$')").message(
        "spec.model.baseURL must not end in /v1 with api AnthropicMessages, which adds it: remove /v1"
    ),
    validation = Rule::new("self.api != 'AnthropicMessages' || !has(self.temperature) || self.temperature.matches('^(0|1([.]0+)?$)')").message(
        "spec.model.temperature must be from 0 to 1 with api AnthropicMessages: lower it"
    ),
    validation = Rule::new("self.api == 'OpenAIChat' || self.outputLimitParameter == 'Auto'").message(
        "spec.model.outputLimitParameter is supported with api OpenAIChat only: remove it"
    ),
    validation = Rule::new("self.api != 'Scripted' || (!has(self.headers) && !has(self.extraBody))").message(
        "spec.model.headers and spec.model.extraBody are not supported with api Scripted: remove them"
    ),
    validation = Rule::new("self.api != 'Scripted' || !has(self.baseURL)").message(
        "spec.model.baseURL is not supported with api Scripted: remove it"
    ),
    validation = Rule::new("self.api != 'Scripted' || has(self.scripted)").message(
        "spec.model.scripted is required with api Scripted: set spec.model.scripted.configMapKeyRef to the script"
    ),
    validation = Rule::new("self.api == 'Scripted' || !has(self.scripted)").message(
        "spec.model.scripted is supported with api Scripted only: remove it, or set spec.model.api to Scripted"
    ),
    validation = Rule::new("self.api != 'Scripted' || !has(self.apiKeySecretRef)").message(
        "spec.model.apiKeySecretRef is not supported with api Scripted: remove it"
    ),
    validation = Rule::new("self.api == 'OpenAIChat' || self.toolCalling == 'Native'").message(
        "spec.model.toolCalling Structured is supported with api OpenAIChat only: remove it"
    ),
    validation = Rule::new("self.api != 'Scripted' || (!has(self.reasoning) && self.promptCache == 'Auto')").message(
        "spec.model.reasoning and spec.model.promptCache are not supported with api Scripted: remove them"
    ),
    validation = Rule::new("self.api == 'AnthropicMessages' || !has(self.reasoning) || !has(self.reasoning.budgetTokens)").message(
        "spec.model.reasoning.budgetTokens is supported with api AnthropicMessages only: set spec.model.reasoning.effort instead"
    ),
    validation = Rule::new("self.api != 'AnthropicMessages' || !has(self.reasoning) || !has(self.reasoning.effort) || self.reasoning.effort != 'Minimal'").message(
        "spec.model.reasoning.effort Minimal is not supported with api AnthropicMessages: set Low"
    ),
    validation = Rule::new("!has(self.reasoning) || !has(self.reasoning.budgetTokens) || self.reasoning.budgetTokens < self.maxOutputTokens").message(
        "spec.model.reasoning.budgetTokens must be less than spec.model.maxOutputTokens, which includes it: lower the first or raise the second"
    ),
    validation = Rule::new("!has(self.reasoning) || !has(self.reasoning.budgetTokens) || self.reasoning.budgetTokens * 2 < self.contextTokens").message(
        "spec.model.reasoning.budgetTokens must be less than half of spec.model.contextTokens: an answer may use at most half of the context window"
    ),
    validation = Rule::new("self.api != 'AnthropicMessages' || !has(self.reasoning) || !has(self.temperature)").message(
        "spec.model.temperature must be absent with spec.model.reasoning and api AnthropicMessages, which rejects both together: remove it"
    ),
    validation = Rule::new("self.api != 'AnthropicMessages' || !has(self.extraBody) || !has(self.extraBody.thinking)").message(
        "spec.model.extraBody must not set thinking with api AnthropicMessages: set spec.model.reasoning instead"
    ),
    validation = Rule::new("self.api == 'AnthropicMessages' || self.promptCache in ['Auto', 'Disabled']").message(
        "spec.model.promptCache FiveMinutes and OneHour are supported with api AnthropicMessages only: set Auto or Disabled"
    ),
    validation = Rule::new("!has(self.imageInput) || (self.api != 'Scripted' && self.toolCalling == 'Native')").message(
        "spec.model.imageInput is not supported with api Scripted and toolCalling Structured: remove it"
    ),
    validation = Rule::new("!has(self.imageInput) || self.imageInput.maxImages * self.imageInput.tokensPerImage * 2 <= self.contextTokens").message(
        "spec.model.imageInput: maxImages (default 4) times tokensPerImage (default 5000) must not exceed half of spec.model.contextTokens: lower one of them"
    ),
    validation = Rule::new("!has(self.structuredOutput) || self.structuredOutput == 'Disabled' || self.api != 'Scripted'").message(
        "spec.model.structuredOutput is not supported with api Scripted: remove it"
    ),
    validation = Rule::new("!has(self.structuredOutput) || self.structuredOutput != 'Always' || self.toolCalling == 'Native'").message(
        "spec.model.structuredOutput Always is not supported with toolCalling Structured, whose requests with tools carry a schema of their own: set WithoutTools"
    ),
    validation = Rule::new("!has(self.tls) || has(self.baseURL) && self.baseURL.startsWith('https://')").message(
        "spec.model.tls requires a baseURL that starts with https://"
    ),
    validation = Rule::new("self.streamIdleTimeoutSeconds <= self.timeoutSeconds").message(
        "spec.model.streamIdleTimeoutSeconds (default 60) must not exceed spec.model.timeoutSeconds (default 300): lower the first or raise the second"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct ModelSpec {
    /// Wire format, independent of the vendor. `OpenAIChat`: OpenAI chat completions, on any compatible server (vLLM,
    /// Ollama, llama.cpp, …). `AnthropicMessages`: Anthropic messages, on any compatible server. `OpenAIResponses`:
    /// OpenAI Responses, on any compatible server, without storage at the server. `Scripted`: built-in deterministic model
    /// that takes its answers from a script in a ConfigMap, without a key or a network.
    pub api: ModelApi,
    /// Name of the model on its server, at most 256 characters.
    #[schemars(length(min = 1, max = 256), regex(pattern = r"^\S(.*\S)?$"))]
    pub name: String,
    /// Base URL as in the vendor's own SDK, with `/v1` for OpenAI, without it for Anthropic: http or https, a host, no
    /// user, no query. Required unless `api` is `Scripted`.
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
            "spec.model.baseURL has a port above 65535: correct the port"
        ),
        validation = Rule::new("!self.matches('^[^/]*//[^/]*@')").message(
            "spec.model.baseURL must not contain a user or password: put the key into a Secret and reference it in spec.model.apiKeySecretRef"
        ),
        validation = Rule::new("!self.contains('?') && !self.contains('#')").message(
            "spec.model.baseURL must not have a query or fragment: remove everything from '?' or '#' on"
        )
    )]
    pub base_url: Option<String>,
    /// API key, sent as `Authorization: Bearer` with `OpenAIChat` and `OpenAIResponses`, and as `x-api-key` with
    /// `AnthropicMessages`. Absent: no such header is sent, as for local servers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key_secret_ref: Option<KeyRef>,
    /// TLS settings of the server. Allowed only if `baseURL` starts with https://.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<ServerTls>,
    /// Headers added to each request, at most 16. Headers that carry a key or that the gateway writes are rejected. Do
    /// not put secrets here: everyone who may read the Agent can read them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(transform = extra::headers)]
    pub headers: BTreeMap<String, String>,
    /// Fields added to the body of each request, such as server-specific options, at most 64. Fields that the loop
    /// writes, and those that could raise the bill or change what is metered, are rejected.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    #[schemars(transform = extra::extra_body)]
    pub extra_body: Map<String, Value>,
    /// Maximum number of tokens in one answer, including reasoning, 1 to 1,000,000; with `OpenAIResponses` at least 16.
    /// The gateway writes it into each request, capped at half of `contextTokens`, so that the prompt fits beside the answer. Defaults to 16,384.
    #[serde(default = "default_max_output_tokens")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_output_tokens: u32,
    /// Name of the output limit in requests of `OpenAIChat`. `Auto`, the default: `max_completion_tokens` at
    /// api.openai.com, `max_tokens` elsewhere. `MaxTokens`, `MaxCompletionTokens`: always that one.
    #[serde(default)]
    pub output_limit_parameter: OutputLimitParameter,
    /// Size of the context window in tokens, 256 to 10,000,000. Defaults to 128,000.
    /// The oldest turns are replaced with a summary before it is full.
    #[serde(default = "default_context_tokens")]
    #[schemars(range(min = 256, max = 10_000_000))]
    pub context_tokens: u32,
    /// Sampling temperature from 0 to 2, a decimal string such as "0.7". Absent: the server's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 8))]
    #[x_kube(validation = Rule::new(r"self.matches('^([01](\\.[0-9]{1,4})?|2(\\.0{1,4})?)$')").message(
        "spec.model.temperature must be a decimal number from 0 to 2 in quotes, such as '0.7'"
    ))]
    pub temperature: Option<String>,
    /// Reasoning before an answer. Reasoning tokens are output and count against maxOutputTokens. Absent: the server's
    /// default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<ReasoningSpec>,
    /// How long the provider is asked to cache the conversation, which makes the input of the next call cheaper.
    /// `AnthropicMessages`: `FiveMinutes`, `OneHour`, `Disabled`, or `Auto`, the default, which selects the setting
    /// that would have cost least for the last calls, by their intervals, their sizes and the model's prices.
    /// `OpenAIChat` and `OpenAIResponses`, where servers cache automatically: `Auto` sends a `prompt_cache_key` to
    /// api.openai.com, `Disabled` does not.
    #[serde(default)]
    pub prompt_cache: PromptCache,
    /// Whether the server streams its answers. Defaults to true.
    #[serde(default = "default_true")]
    pub stream: bool,
    /// Maximum duration of one call, in seconds, 1 to 3,600. Defaults to 300.
    #[serde(default = "default_timeout_seconds")]
    #[schemars(range(min = 1, max = 3600))]
    pub timeout_seconds: u32,
    /// Maximum time without data within a streamed answer, in seconds, 1 to 3,600. Defaults to 60.
    #[serde(default = "default_stream_idle_timeout_seconds")]
    #[schemars(range(min = 1, max = 3600))]
    pub stream_idle_timeout_seconds: u32,
    /// How tools are offered to the model and called by it. `Native`, the default: tool calls of the wire format.
    /// `Structured`, for `OpenAIChat` servers without tool calling: tools are described in the system prompt, and each
    /// answer is a JSON object of a schema that is sent as `response_format`.
    #[serde(default)]
    pub tool_calling: ToolCalling,
    /// Which requests carry the JSON schema that their answer must match, so that the server enforces it
    /// (`response_format` with `OpenAIChat`, `text.format` with `OpenAIResponses`, `output_config.format` with
    /// `AnthropicMessages`). `Disabled`, the default: none, since servers without the feature reject it.
    /// `WithoutTools`: questions of the runtime, such as pre-checks, scores, and judges of a goal. `Always`: also the
    /// calls of a task with `spec.task.responseSchema`, which have tools; only for servers that still let the model call
    /// tools then. Answers are validated in any case.
    #[serde(default, skip_serializing_if = "StructuredOutput::is_disabled")]
    pub structured_output: StructuredOutput,
    /// Shows the model the newest images of tool results, for models that take images: PNG and JPEG, at most 1 MiB each.
    /// Absent: images are only named in words. An empty object: shown, with the default limits. Prompts of `lightModel`
    /// contain no tool results, so it has no effect there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_input: Option<ImageInput>,
    /// Price of the model, which budgets and limits in US dollars require. Used only if the controller's own table has
    /// no price for the model and the platform allows prices in Agents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price: Option<ModelPrice>,
    /// Script of the model. Required if `api` is `Scripted`, and allowed only then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scripted: Option<TextSource>,
}

impl ModelSpec {
    /// Maximum number of tokens in one answer: `maxOutputTokens`, capped at half of the context window.
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
