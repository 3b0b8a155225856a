//! How each wire format sends the schema of an answer to the server.

use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use crate::WireFormat;
use crate::prompt::ModelPrompt;
use agentloop_api::agent::ModelSpec;
use agentloop_engine::answer_schema::AnswerSchema;
use agentloop_engine::message::{Message, ToolDefinition};

const FORMATS: [(&str, WireFormat); 4] = [
    ("OpenAIChat", WireFormat::OpenAiChat),
    ("OpenAIChat", WireFormat::JsonTools),
    ("OpenAIResponses", WireFormat::OpenAiResponses),
    ("AnthropicMessages", WireFormat::AnthropicMessages),
];

fn exact() -> Value {
    json!({"type": "object", "properties": {"wake": {"type": "boolean"}}, "required": ["wake"], "additionalProperties": false})
}

/// A schema that not all providers enforce.
fn open() -> Value {
    json!({"type": "object", "properties": {"wake": {"type": "boolean"}}})
}

fn tool() -> ToolDefinition {
    ToolDefinition {
        name: "look".into(),
        description: "Looks.".into(),
        parameters: json!({"type": "object"}),
    }
}

fn body(format: WireFormat, model: &Value, tools: &[ToolDefinition], schema: Option<&Value>) -> Value {
    let model: ModelSpec = serde_json::from_value(model.clone()).unwrap();
    let schema = schema.map(|schema| AnswerSchema::new("decision", schema).unwrap());
    let messages = [
        Message::System { text: "be".into() },
        Message::User { text: "go".into() },
    ];
    let prompt = ModelPrompt {
        answer_schema: schema.as_ref(),
        ..ModelPrompt::of(&messages[..], tools)
    };
    format.body(&model, &prompt)
}

/// What the schema adds to a request with these tools: its fields that are not in the request without a schema.
fn added(api: &str, format: WireFormat, tools: &[ToolDefinition], schema: &Value) -> Value {
    let model = json!({"api": api, "name": "m"});
    let without = body(format, &model, tools, None);
    let with = body(format, &model, tools, Some(schema));
    for (name, value) in without.as_object().unwrap() {
        assert_eq!(with[name], *value, "{api}: {name}");
    }
    let fields = with.as_object().unwrap().clone().into_iter();
    fields.filter(|(name, _)| without.get(name).is_none()).collect()
}

#[test]
fn a_schema_is_sent_in_the_form_of_each_format_with_and_without_tools() {
    for tools in [&[][..], &[tool()][..]] {
        for (schema, strict) in [(exact(), true), (open(), false)] {
            let chat = json!({"response_format": {
                "type": "json_schema", "json_schema": {"name": "decision", "schema": schema, "strict": strict}}});
            let responses = json!({"text": {"format": {
                "type": "json_schema", "name": "decision", "schema": schema, "strict": strict}}});
            let messages = if strict {
                json!({"output_config": {"format": {"type": "json_schema", "schema": schema}}})
            } else {
                json!({})
            };
            for ((api, format), expected) in FORMATS.into_iter().zip([&chat, &chat, &responses, &messages]) {
                // Its own schema contains those of the tools.
                let expected = if format == WireFormat::JsonTools && !tools.is_empty() {
                    json!({})
                } else {
                    expected.clone()
                };
                assert_eq!(added(api, format, tools, &schema), expected, "{format:?}");
            }
        }
    }
}

#[test]
fn a_schema_and_an_effort_share_the_settings_of_the_output() {
    let model = json!({"api": "AnthropicMessages", "name": "m", "reasoning": {"effort": "Low"}});
    let body = body(WireFormat::AnthropicMessages, &model, &[tool()], Some(&exact()));
    let expected = json!({"effort": "low", "format": {"type": "json_schema", "schema": exact()}});
    assert_eq!(body["output_config"], expected);
}

#[test]
fn every_field_of_a_schema_is_allowed_by_the_gateway() {
    for (api, format) in FORMATS {
        let body = body(format, &json!({"api": api, "name": "m"}), &[tool()], Some(&exact()));
        let mut inner = &body;
        for (name, known) in format.schema().answer {
            inner = &inner[*name];
            let fields = inner.as_object().unwrap();
            assert!(
                fields.keys().all(|field| known.contains(&field.as_str())),
                "{format:?}: {inner}"
            );
        }
        assert!(inner["schema"].is_object(), "{format:?}: {inner}");
        let known = |name: &String| format.schema().fields.contains(&name.as_str());
        assert!(body.as_object().unwrap().keys().all(known), "{body}");
    }
}
