//! The input of a model call, independent of any wire format.

use agentloop_api::agent::ModelSpec;
use agentloop_engine::message::{ReasoningContent, ToolDefinition};

/// The temperature of a model, which was validated on admission as a decimal number.
pub(super) fn temperature(model: &ModelSpec) -> Option<f64> {
    model.temperature.as_ref()?.parse().ok()
}

/// The input of a model call.
#[derive(Clone, Copy, Debug)]
pub struct ModelPrompt<'a, M> {
    pub messages: &'a [M],
    /// The current hot state, appended to the last message. The next request replaces it, so no cached prefix may
    /// include it.
    pub state: Option<&'a str>,
    pub tools: &'a [ToolDefinition],
    /// How long the server is asked to cache the prompt; `None` for no caching.
    pub lifetime: Option<CacheLifetime>,
    /// Routes calls with the same prefix to the same server, whose cache holds it; `None` for no affinity.
    pub cache_key: Option<&'a str>,
}

impl<'a, M> ModelPrompt<'a, M> {
    /// Creates a prompt of a conversation and its tools only.
    #[must_use]
    pub fn of(messages: &'a [M], tools: &'a [ToolDefinition]) -> Self {
        Self {
            messages,
            state: None,
            tools,
            lifetime: None,
            cache_key: None,
        }
    }
}

/// The lifetime of a cached prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheLifetime {
    /// Five minutes after the last use.
    FiveMinutes,
    /// An hour after the last use.
    OneHour,
}

/// Returns the reasoning of a message if this model wrote it, with the present API.
pub(super) fn own<'a>(model: &ModelSpec, reasoning: Option<&'a ReasoningContent>) -> Option<&'a ReasoningContent> {
    reasoning.filter(|reasoning| reasoning.api == model.api && reasoning.model == model.name)
}
