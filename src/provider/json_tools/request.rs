//! Requests that describe the tools in the system message and ask for an answer of a JSON schema.
//!
//! Writes the tools into the system message and past calls into the conversation. The schema sent is looser than the
//! schemas of the tools and uses only keywords that every server supports. As with all calls, the engine's
//! admission validates the arguments. It takes the place of [`ModelPrompt::answer_schema`]: the schema of a response is a part of that
//! of the tool `finish`.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use crate::openai_chat;
use crate::prompt::ModelPrompt;
use agentloop_api::agent::ModelSpec;
use agentloop_engine::message::{self, Message, ToolCall, ToolDefinition};

/// Instructions for the format of an answer; the tools follow.
const FORM: &str = "Answer with one JSON object and nothing else: {\"text\": what you say, may be empty, \
\"tool_calls\": [{\"name\": a tool's name, \"arguments\": an object}], may be empty}. Results come in the next message. \
Tools, each with the JSON schema of its arguments:";

/// Maximum calls per answer in the schema: a weak model repeats itself until its output limit cuts the object.
const MAX_CALLS: usize = 8;

/// Builds the body of a request. Without tools it is an ordinary chat completion.
#[must_use]
pub fn request<M: Borrow<Message>>(model: &ModelSpec, prompt: &ModelPrompt<'_, M>) -> Value {
    if prompt.tools.is_empty() {
        return openai_chat::request::request(model, prompt);
    }
    let messages = conversation(prompt.messages, prompt.tools);
    let plain = ModelPrompt {
        images: None,
        messages: &messages[..],
        state: prompt.state,
        tools: &[],
        lifetime: prompt.lifetime,
        cache_key: prompt.cache_key,
        answer_schema: None,
    };
    let mut body = openai_chat::request::request(model, &plain);
    if let Some(body) = body.as_object_mut() {
        body.insert("response_format".into(), response_format(prompt.tools));
    }
    body
}

fn response_format(tools: &[ToolDefinition]) -> Value {
    let calls: Vec<Value> = tools.iter().map(call).collect();
    let schema = json!({
        "type": "object",
        "properties": {"text": {"type": "string"}, "tool_calls": {"type": "array", "items": {"anyOf": calls}, "maxItems": MAX_CALLS}},
        "required": ["text", "tool_calls"],
        "additionalProperties": false,
    });
    json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}})
}

fn call(tool: &ToolDefinition) -> Value {
    let mut arguments = loosen_schema(&tool.parameters);
    if let Some(schema) = arguments.as_object_mut() {
        schema.insert("type".into(), "object".into());
    }
    json!({
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [tool.name]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": false,
    })
}

/// Removes keywords that servers refuse or interpret differently (references, patterns, bounds). The result accepts
/// everything that the original schema accepts.
fn loosen_schema(schema: &Value) -> Value {
    let Some(schema) = schema.as_object() else {
        return json!({});
    };
    let mut kept = Map::new();
    for (word, value) in schema {
        let value = match (word.as_str(), value) {
            ("type" | "enum" | "required", _) | ("additionalProperties", Value::Bool(_)) => value.clone(),
            ("items", Value::Object(_)) => loosen_schema(value),
            ("properties", Value::Object(fields)) => fields
                .iter()
                .map(|(name, field)| (name.clone(), loosen_schema(field)))
                .collect(),
            _ => continue,
        };
        kept.insert(word.clone(), value);
    }
    Value::Object(kept)
}

/// Converts the conversation to roles that every template supports: system, then alternating user and assistant.
fn conversation(messages: &[impl Borrow<Message>], tools: &[ToolDefinition]) -> Vec<Message> {
    let form = form(tools);
    let mut names: HashMap<&str, &str> = HashMap::new();
    let mut all: Vec<Message> = Vec::new();
    for message in messages {
        let next = match message.borrow() {
            Message::System { text } => Message::System {
                text: format!("{text}\n\n{form}"),
            },
            Message::User { text } => Message::User { text: text.clone() },
            Message::Assistant { text, tool_calls, .. } => {
                names.extend(tool_calls.iter().map(|call| (call.id.as_str(), call.name.as_str())));
                assistant(text.as_deref().unwrap_or_default(), tool_calls)
            }
            Message::Tool { id, text, .. } => {
                let name = names.get(id.as_str()).copied().unwrap_or_default();
                Message::User {
                    text: format!("Result of {name}:\n{text}"),
                }
            }
        };
        match (all.last_mut(), next) {
            (Some(Message::User { text }), Message::User { text: more }) => {
                text.push_str("\n\n");
                text.push_str(&more);
            }
            (_, next) => all.push(next),
        }
    }
    if !all.iter().any(|message| matches!(message, Message::System { .. })) {
        all.insert(0, Message::System { text: form });
    }
    all
}

fn form(tools: &[ToolDefinition]) -> String {
    let mut text = FORM.to_owned();
    for tool in tools {
        // Writing to a String cannot fail.
        let _ = write!(text, "\n- {}: {} {}", tool.name, tool.description, tool.parameters);
    }
    text
}

/// Writes a past answer in the form in which the model gave it.
fn assistant(text: &str, calls: &[ToolCall]) -> Message {
    let calls: Vec<Value> = calls
        .iter()
        .map(|call| {
            let arguments = message::arguments(&call.arguments)
                .unwrap_or_else(|| Map::from_iter([("malformed".to_owned(), call.arguments.clone().into())]));
            json!({"name": call.name, "arguments": arguments})
        })
        .collect();
    Message::Assistant {
        text: Some(json!({"text": text, "tool_calls": calls}).to_string()),
        tool_calls: Vec::new(),
        reasoning: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(model: &ModelSpec, messages: &[Message], tools: &[ToolDefinition]) -> Value {
        super::request(model, &ModelPrompt::of(messages, tools))
    }

    fn model() -> ModelSpec {
        serde_json::from_value(json!({"api": "OpenAIChat", "name": "m", "toolCalling": "Structured"})).unwrap()
    }

    fn look() -> ToolDefinition {
        ToolDefinition {
            name: "look".into(),
            description: "Looks.".into(),
            parameters: json!({"type": "object"}),
        }
    }

    fn user(text: &str) -> Message {
        Message::User { text: text.into() }
    }

    #[test]
    fn tools_are_described_as_text_roles_alternate_and_the_schema_names_each_tool() {
        let messages = [
            Message::System { text: "be".into() },
            user("go"),
            Message::Assistant {
                reasoning: None,
                text: Some("I look.".into()),
                tool_calls: vec![
                    ToolCall {
                        id: "a".into(),
                        name: "look".into(),
                        arguments: r#"{"at":1}"#.into(),
                    },
                    ToolCall {
                        id: "b".into(),
                        name: "look".into(),
                        arguments: "{\"at\"".into(),
                    },
                ],
            },
            Message::Tool {
                id: "a".into(),
                text: "seen".into(),
                failed: false,
                reasoning: None,
                artifacts: agentloop_engine::tool::ResultArtifacts::default(),
            },
            Message::Tool {
                id: "b".into(),
                text: "not run".into(),
                failed: false,
                reasoning: None,
                artifacts: agentloop_engine::tool::ResultArtifacts::default(),
            },
            user("next"),
        ];
        let body = request(&model(), &messages, &[look()]);
        let sent = body["messages"].as_array().unwrap();
        let roles: Vec<&str> = sent.iter().map(|message| message["role"].as_str().unwrap()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "user"]);
        let system = sent[0]["content"].as_str().unwrap();
        assert!(
            system.starts_with("be\n\n") && system.ends_with("\n- look: Looks. {\"type\":\"object\"}"),
            "{system}"
        );
        let assistant: Value = serde_json::from_str(sent[2]["content"].as_str().unwrap()).unwrap();
        assert_eq!(
            assistant,
            json!({"text": "I look.", "tool_calls": [
                {"name": "look", "arguments": {"at": 1}},
                {"name": "look", "arguments": {"malformed": "{\"at\""}}]})
        );
        assert_eq!(
            sent[3]["content"],
            "Result of look:\nseen\n\nResult of look:\nnot run\n\nnext"
        );
        let calls = &body["response_format"]["json_schema"]["schema"]["properties"]["tool_calls"]["items"]["anyOf"];
        assert_eq!(calls[0]["properties"]["name"]["enum"], json!(["look"]));
        assert_eq!(calls[0]["properties"]["arguments"], json!({"type": "object"}));
        assert_eq!(body.get("tools"), None);
    }

    #[test]
    fn the_schema_of_a_tool_loses_unsupported_keywords_and_stays_as_permissive() {
        let schema = json!({"type": "object", "$defs": {"d": {}}, "required": ["a"], "additionalProperties": false, "properties": {
            "a": {"type": "string", "pattern": "^x", "maxLength": 3}, "pattern": {"$ref": "#/$defs/d"},
            "list": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2}, "any": true}});
        let expected = json!({"type": "object", "required": ["a"], "additionalProperties": false, "properties": {
            "a": {"type": "string"}, "pattern": {}, "list": {"type": "array", "items": {"enum": [1, 2]}}, "any": {}}});
        assert_eq!(loosen_schema(&schema), expected);
        assert_eq!(loosen_schema(&json!(true)), json!({}));
    }

    #[test]
    fn without_tools_it_is_a_request_like_any_other() {
        let messages = [user("go")];
        assert_eq!(
            request(&model(), &messages, &[]),
            crate::WireFormat::OpenAiChat.request(&model(), &messages, &[])
        );
    }
}
