//! Messages of a conversation, as the engine knows them; no vendor's format.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// One message of the conversation.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(tag = "role", rename_all = "lowercase")]
pub enum Message {
    /// The instructions, always first; never part of the transcript.
    System {
        /// Text.
        text: String,
    },
    /// The runtime's word to the model.
    User {
        /// Text.
        text: String,
    },
    /// The model's answer.
    Assistant {
        /// Visible text, when there is any.
        text: Option<String>,
        /// Tools it wants, in its order.
        tool_calls: Vec<ToolCall>,
    },
    /// The result of one tool call; always follows the assistant message that asked for it.
    Tool {
        /// [`ToolCall::id`] of the call.
        id: String,
        /// The result.
        text: String,
        /// Why the model wanted it, in its own words. Kept in the journal's history; sent to nobody.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reasoning: Option<String>,
    },
}

/// A tool the model wants to use.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// The model's id of the call; unique within one answer (the wire layer renames repeats).
    pub id: String,
    /// Name of the tool.
    pub name: String,
    /// Arguments as the JSON text the model wrote; may be malformed.
    pub arguments: String,
}

/// The arguments of a call by name; `None`: they are not one JSON object. Servers write no arguments as an empty text.
#[must_use]
pub fn arguments(text: &str) -> Option<Map<String, Value>> {
    if text.trim().is_empty() {
        return Some(Map::new());
    }
    serde_json::from_str(text).ok()
}

/// A tool offered to the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Name.
    pub name: Cow<'static, str>,
    /// What it does, for the model.
    pub description: Cow<'static, str>,
    /// JSON schema of its arguments.
    pub parameters: Value,
}

/// A model's answer.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// Visible text.
    pub text: Option<String>,
    /// Tools it wants.
    pub tool_calls: Vec<ToolCall>,
    /// Why it ended.
    pub finish: Finish,
    /// What it used by the server's own word: uncached input, cache writes and output. `None`: it did not say.
    #[serde(default)]
    pub tokens: Option<u64>,
    /// What it cost in micro-dollars. `None`: its price or its use is unknown.
    #[serde(default)]
    pub cost: Option<i64>,
}

/// Why an answer ended.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Finish {
    /// It was complete.
    #[default]
    Stop,
    /// The output limit cut it.
    Length,
    /// It waits for tool results.
    ToolCalls,
    /// The provider filtered or refused it.
    Refused,
}
