//! The input of a model call, independent of any wire format.

use agentloop_api::agent::ModelSpec;
use agentloop_engine::answer_schema::AnswerSchema;
use agentloop_engine::message::{ReasoningContent, ToolDefinition};
use agentloop_engine::tool::{ResultArtifacts, StoredImage};

use crate::images::{EncodedImage, PromptImages};

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
    /// The images that the messages name, as far as they are stored; `None`: none is shown.
    pub images: Option<&'a PromptImages>,
    /// How long the server is asked to cache the prompt; `None` for no caching.
    pub lifetime: Option<CacheLifetime>,
    /// Routes calls with the same prefix to the same server, whose cache holds it; `None` for no affinity.
    pub cache_key: Option<&'a str>,
    /// The schema of the answer, as sent to the server; `None`: none is sent.
    pub answer_schema: Option<&'a AnswerSchema>,
}

impl<'a, M> ModelPrompt<'a, M> {
    /// Creates a prompt of a conversation and its tools only.
    #[must_use]
    pub fn of(messages: &'a [M], tools: &'a [ToolDefinition]) -> Self {
        Self {
            messages,
            state: None,
            tools,
            images: None,
            lifetime: None,
            cache_key: None,
            answer_schema: None,
        }
    }
}

impl<'a, M> ModelPrompt<'a, M> {
    /// The images of a result, in its order, each with its name.
    pub(super) fn shown(&self, artifacts: &'a ResultArtifacts) -> impl Iterator<Item = (&'a str, &'a EncodedImage)> {
        let images = self.images;
        let shown = move |image: &'a StoredImage| Some((&*image.name, images?.get(&image.name)?));
        artifacts.images.iter().filter_map(shown)
    }
}

/// What precedes the images of results, where they are in a message of the user.
pub(super) fn images_text(names: &[&str]) -> String {
    format!(
        "[From the runtime, not from a person: the images of the results above, in their order: {}.]",
        names.join(", ")
    )
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
