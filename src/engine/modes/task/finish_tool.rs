//! The tool `finish`: the response to a task, and what it must look like.

use serde_json::{Value, json};

use crate::message::{self, ToolDefinition};
use crate::modes::{LoopPace, ModeCallDecision, TextDecision};
use agentloop_support::json_schema;

pub const NAME: &str = "finish";

pub fn tool(schema: Option<&Value>) -> ToolDefinition {
    let mut result = schema.cloned().unwrap_or_else(|| {
        json!({
            "type": "string",
            "minLength": 1,
            "description": "The response, complete in itself: whoever gave the task sees nothing else.",
        })
    });
    // References such as `#/$defs/item` are relative to the root.
    let shared = ["$defs", "definitions"].map(|name| Some((name, result.as_object_mut()?.remove(name)?)));
    let mut parameters = json!({
        "type": "object",
        "properties": {"result": result},
        "required": ["result"],
        "additionalProperties": false,
    });
    for (name, definitions) in shared.into_iter().flatten() {
        parameters[name] = definitions;
    }
    ToolDefinition {
        name: NAME.into(),
        description: "Ends the task with this response. Call it when the task is done, or when it cannot be done; no \
                      further call follows."
            .into(),
        parameters,
    }
}

/// Decides on a call of the tool with these arguments.
pub fn decide(arguments: &str, schema: Option<&Value>) -> ModeCallDecision {
    let Some(mut fields) = message::arguments(arguments) else {
        return ModeCallDecision::Rejected(
            "the arguments are not a JSON object; call finish with {\"result\": …}".into(),
        );
    };
    let Some(result) = fields.remove("result").filter(|_| fields.is_empty()) else {
        return ModeCallDecision::Rejected("finish takes one argument, result; call finish again".into());
    };
    // The schema of the spec itself, whose references are relative to its own root.
    let text = json!({"type": "string", "minLength": 1});
    if let Some(violation) = json_schema::violation(schema.unwrap_or(&text), &result) {
        return ModeCallDecision::Rejected(format!("the response was not accepted: {violation}. Call finish again"));
    }
    ModeCallDecision::EndsTurn {
        pace: LoopPace::Finish { result },
        result: "The task is finished.".to_owned(),
        result_after_runs: None,
    }
}

/// Decides on an answer without a tool call, which must be JSON of this schema.
pub fn decide_text(text: &str, schema: &Value) -> TextDecision {
    let violation = match serde_json::from_str::<Value>(text.trim()) {
        Ok(value) => match json_schema::violation(schema, &value) {
            None => return TextDecision::EndsTurn,
            Some(violation) => violation,
        },
        Err(_) => "it is not JSON".to_owned(),
    };
    TextDecision::Rejected(format!(
        "Your answer is not a response of the required form: {violation}. Call {NAME} with the response."
    ))
}

/// The result that a text completes the task with.
pub fn result_of(text: &str, schema: Option<&Value>) -> Value {
    let read = schema.and_then(|_| serde_json::from_str(text.trim()).ok());
    read.unwrap_or_else(|| Value::String(text.to_owned()))
}
