//! The tools of mode `Goal`: `finish` and `request_confidence_check`. Both end the turn, and with it the step.

use serde_json::{Value, json};

use crate::message::{self, ToolCall, ToolDefinition};
use crate::modes::{LoopPace, ModeCallDecision};

pub const FINISH: &str = "finish";
pub const REQUEST_CHECK: &str = "request_confidence_check";
/// Maximum number of bytes of a result.
pub const MAX_RESULT: usize = 64 * 1024;
/// Maximum number of bytes of a reason.
const MAX_REASON: usize = 1024;

pub fn definitions() -> Vec<ToolDefinition> {
    vec![
        ToolDefinition {
            name: FINISH.into(),
            description:
                "Ends the step and hands in the result of the whole goal, which is then checked against all criteria. \
                          If one is not met, the next step begins and says which."
                    .into(),
            parameters: parameters(
                "result",
                "The result, complete: nothing else that you wrote is checked.",
            ),
        },
        ToolDefinition {
            name: REQUEST_CHECK.into(),
            description:
                "Ends the step and requests a confidence check, when you doubt that the goal can be reached. If the \
                          confidence is low, a person decides whether you continue."
                    .into(),
            parameters: parameters("reason", "Why you doubt it."),
        },
    ]
}

fn parameters(name: &str, description: &str) -> Value {
    json!({
        "type": "object",
        "properties": {name: {"type": "string", "description": description}},
        "required": [name],
        "additionalProperties": false,
    })
}

/// Decides on a call; `None`: it is of no tool of the mode.
pub fn decide(call: &ToolCall) -> Option<ModeCallDecision> {
    let (field, max) = match &*call.name {
        FINISH => ("result", MAX_RESULT),
        REQUEST_CHECK => ("reason", MAX_REASON),
        _ => return None,
    };
    let arguments = message::arguments(&call.arguments);
    let text = arguments.as_ref().and_then(|arguments| arguments.get(field)?.as_str());
    let Some(text) = text.filter(|text| !text.trim().is_empty()) else {
        let fix = format!("{} takes one argument, {field}, a text that is not empty", call.name);
        return Some(ModeCallDecision::Rejected(fix));
    };
    if text.len() > max {
        let fix = format!("{field} has {} bytes; the limit is {max}: shorten it", text.len());
        return Some(ModeCallDecision::Rejected(fix));
    }
    let text = text.to_owned();
    let (pace, result) = match &*call.name {
        FINISH => (
            LoopPace::Finish { result: text.into() },
            "The result is checked; the next step says what is not met.",
        ),
        _ => (
            LoopPace::CheckConfidence { reason: text },
            "The confidence is checked before the next step.",
        ),
    };
    Some(ModeCallDecision::EndsTurn {
        pace,
        result: result.to_owned(),
        result_after_runs: None,
    })
}
