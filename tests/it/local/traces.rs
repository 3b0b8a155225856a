//! Traces of a run: the variables of the process reach the gateways of its Agents.

use opentelemetry_proto::tonic::trace::v1::Span;
use serde_json::json;

use super::process::{CANARY, LocalHarness, scripted};
use crate::support::otlp::{Receiver, attribute, is_root};

#[tokio::test]
async fn a_run_exports_a_trace_for_each_turn() {
    let receiver = Receiver::start().await;
    let mut harness = LocalHarness::new();
    let usage = json!({ "inputTokens": 7, "outputTokens": 3 });
    let turns = json!([
        { "text": CANARY, "usage": usage }, { "text": "two", "usage": usage },
        { "yield": { "mode": "shutdown" }, "usage": usage },
    ]);
    harness.write("all.yaml", &scripted("a", &turns));
    let endpoint = format!("http://{}", receiver.address);
    let variables = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
        ("OTEL_SERVICE_NAME", "mine"),
    ];
    let mut run = harness.run_with(&[], &variables);
    assert_eq!(run.cause().await, "NothingRuns");
    let spans = receiver
        .until("all turns", |spans| {
            spans.iter().filter(|span| is_root(span)).count() == 3
        })
        .await;
    for root in spans.iter().filter(|span| is_root(span)) {
        let call = spans.iter().find(|span| span.parent_span_id == root.span_id).unwrap();
        assert_eq!(
            (root.name.as_str(), call.name.as_str()),
            ("invoke_agent a", "chat scripted")
        );
        assert_eq!(call.trace_id, root.trace_id);
        let of_call = |key| attribute(&call.attributes, key);
        assert_eq!(of_call("gen_ai.usage.output_tokens").unwrap(), "3");
        let turn: i64 = attribute(&root.attributes, "agentloop.turn").unwrap().parse().unwrap();
        assert_eq!(
            of_call("gen_ai.response.id").unwrap(),
            format!("chatcmpl-scripted-{}", turn - 1)
        );
        let reason = if turn == 3 { "tool_calls" } else { "stop" };
        assert_eq!(of_call("gen_ai.response.finish_reasons").unwrap(), reason);
        assert_eq!(of_call("gen_ai.response.model").unwrap(), "scripted");
        assert_eq!(of_call("gen_ai.request.stream").unwrap(), "true");
        assert_eq!(of_call("gen_ai.request.max_tokens"), None, "a script has no limit");
    }
    for received in receiver.received() {
        assert!(!String::from_utf8_lossy(&received.body).contains(CANARY));
        let resource = received.request.resource_spans[0].resource.as_ref().unwrap();
        assert_eq!(attribute(&resource.attributes, "service.name").unwrap(), "mine");
    }
}

#[tokio::test]
async fn a_run_with_the_variable_for_content_exports_texts() {
    let receiver = Receiver::start().await;
    let mut harness = LocalHarness::new();
    let turns = json!([{ "text": CANARY }, { "yield": { "mode": "shutdown" } }]);
    harness.write("all.yaml", &scripted("a", &turns));
    let endpoint = format!("http://{}", receiver.address);
    let variables = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
        ("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true"),
    ];
    let mut run = harness.run_with(&[], &variables);
    assert_eq!(run.cause().await, "NothingRuns");
    let all = |spans: &[Span]| spans.iter().filter(|span| is_root(span)).count() == 2;
    let spans = receiver.until("all turns", all).await;
    let first = spans.iter().find(|span| is_root(span)).unwrap();
    let output = attribute(&first.attributes, "gen_ai.output.messages").unwrap();
    assert!(output.contains(CANARY), "{output}");
    assert!(attribute(&first.attributes, "gen_ai.input.messages").is_some());
}
