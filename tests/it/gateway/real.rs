//! The gateway before a real model: what it counts is what the server's own answers say, in both wire formats.

use agentloop::api::agent::ModelSpec;
use agentloop::engine::CallPurpose;
use agentloop::engine::message::{FinishReason, Message, ToolDefinition};
use agentloop::provider::WireFormat;
use agentloop::worker::gateway_client::GatewayClient;
use serde_json::{Value, json};

use super::harness::GatewayHarness;
use crate::e2e::model_server::{self, Used};

/// A conversation that grows, so that the server reads its beginning from its cache.
fn request(stream: bool, words: &[&str]) -> Value {
    let messages: Vec<_> = words
        .iter()
        .enumerate()
        .map(|(number, word)| json!({"role": if number % 2 == 0 { "user" } else { "assistant" }, "content": word}))
        .collect();
    json!({"model": "smollm2", "messages": messages, "stream": stream, "max_tokens": 5})
}

#[tokio::test]
async fn the_counted_usage_is_what_a_real_server_reports() {
    let Some(server) = tokio::task::spawn_blocking(model_server::local).await.unwrap() else {
        return;
    };
    let conversation = [
        "Say hello to the people of the harbour.",
        "Hello!",
        "And once more.",
        "Hello!",
        "Now sing.",
    ];
    for (api, route) in [
        ("OpenAIChat", "/v1/chat/completions"),
        ("AnthropicMessages", "/v1/messages"),
    ] {
        for stream in [true, false] {
            let label = format!("{api}-{stream}");
            let address = if api == "OpenAIChat" {
                server.base_url(&label)
            } else {
                server.anthropic_url(&label)
            };
            let mut harness = GatewayHarness::new().await;
            harness.set(&json!({"api": api, "name": "smollm2", "baseURL": address, "maxOutputTokens": 12}));
            harness.route = route;
            harness.start().await;
            for (call, length) in [("t1c1a1", 1), ("t2c1a1", 3), ("t3c1a1", 5)] {
                let response = harness.call(call, &request(stream, &conversation[..length])).await;
                let (status, body) = (response.status(), response.text().await.unwrap());
                assert!(
                    status.is_success() && !body.contains("agentloop.failure"),
                    "{label}: {status} {body}"
                );
            }
            let usage = harness.until_counted(3, 0).await.usage;
            let counted = Used {
                calls: usage.calls,
                unknown_calls: usage.unknown_calls,
                input: usage.input_tokens,
                output: usage.output_tokens,
                cache_read: usage.cache_read_tokens,
                cache_write: usage.cache_write_tokens,
            };
            assert_eq!(
                counted,
                server.used(&label),
                "{label}: counted (left), said by the server (right)"
            );
            assert!(counted.input > 0 && counted.output > 0, "{label}: {counted:?}");
            assert!(
                counted.output <= 36,
                "{label}: the output limit is the gateway's: {counted:?}"
            );
            assert!(
                counted.cache_read > 0,
                "{label}: the second call begins as the first: {counted:?}"
            );
        }
    }
}

/// The model is too small to choose well. That it answers in the schema's form is the server's doing.
#[tokio::test]
async fn a_real_server_without_tool_calls_answers_in_the_form_of_the_schema_streamed_and_whole() {
    let Some(server) = tokio::task::spawn_blocking(model_server::local).await.unwrap() else {
        return;
    };
    let look: ToolDefinition = ToolDefinition {
        name: "look".into(),
        description: "Looks out of the window.".into(),
        parameters: json!({"type": "object", "properties": {}, "additionalProperties": false}),
    };
    let messages = [
        Message::System {
            text: "You look out of the window by calling the tool look.".into(),
        },
        Message::User {
            text: "Look out of the window now: call look.".into(),
        },
    ];
    for stream in [true, false] {
        let mut harness = GatewayHarness::new().await;
        let label = format!("structured-{stream}");
        harness.set(
            &json!({"name": "smollm2", "baseURL": server.base_url(&label), "maxOutputTokens": 400, "temperature": "0",
                "toolCalling": "Structured", "stream": stream, "timeoutSeconds": 300, "streamIdleTimeoutSeconds": 300}),
        );
        harness.start().await;
        let model: ModelSpec = serde_json::from_value(harness.model.clone()).unwrap();
        let format = WireFormat::of(&model, std::slice::from_ref(&look));
        assert_eq!(format, WireFormat::JsonTools);
        let body = format.request(&model, &messages, std::slice::from_ref(&look));
        let client = GatewayClient::new(&harness.path("gateway.sock")).unwrap();
        let call = ("t1c1a1".parse().unwrap(), CallPurpose::Turn);
        let answer = client.call(call, format, body, None).await.unwrap();
        let form = |text: &str| text.trim_start().starts_with('{');
        assert!(
            !answer.text.as_deref().is_some_and(form),
            "read as the object it is: {answer:?}"
        );
        assert!(answer.tool_calls.iter().all(|call| call.name == "look"), "{answer:?}");
        assert!(
            matches!(answer.finish, FinishReason::Stop | FinishReason::ToolCalls),
            "{answer:?}"
        );
    }
}
