//! The gateway as a real process between a provider, a controller over TLS, and a worker on the socket.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod anthropic;
pub mod authorities;
mod budgets;
pub mod controller;
mod costs;
mod crashes;
mod faults;
pub mod harness;
mod ledger;
mod light;
mod link;
mod logs;
mod loops;
mod matrix;
mod prefix;
pub mod provider;
mod real;
mod responses;
mod scripted;
pub mod strict;
mod tools;
mod traces;

use pretty_assertions::assert_eq;
use reqwest::StatusCode;
use serde_json::json;

use self::harness::{GatewayHarness, KEY, PROMPT, failure, streamed, url, whole};
use self::provider::{ANSWER, STREAM_HEAD, STREAM_TAIL, ScriptedResponse, Step, send};
use agentloop::api::failure::FailureKind;

#[tokio::test]
async fn a_whole_answer_passes_byte_for_byte_and_is_metered() {
    let harness = GatewayHarness::started().await;
    assert_eq!(harness.ask("t1c1a1").await, (StatusCode::OK, ANSWER.to_owned()));
    let usage = harness.until_counted(1, 0).await.usage;
    assert_eq!((usage.input_tokens, usage.output_tokens), (10, 20));
    assert_eq!((usage.cache_read_tokens, usage.reasoning_tokens), (90, 15));
    assert_eq!(
        (usage.by_model[0].model.as_str(), usage.by_model[0].input_tokens),
        ("m", 10)
    );
}

#[tokio::test]
async fn a_stream_passes_unbuffered_and_byte_for_byte_and_is_metered() {
    let harness = GatewayHarness::started().await;
    harness.provider.will(ScriptedResponse::stream(vec![
        send(STREAM_HEAD),
        Step::Hold,
        send(STREAM_TAIL),
    ]));
    let mut response = harness.call("t1c1a1", &streamed()).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    // The beginning is here while the provider still holds the end.
    assert_eq!(response.chunk().await.unwrap().unwrap(), STREAM_HEAD);
    harness.provider.release();
    assert_eq!(response.text().await.unwrap(), STREAM_TAIL);
    let usage = harness.until_counted(1, 0).await.usage;
    assert_eq!(
        (usage.input_tokens, usage.output_tokens, usage.cache_read_tokens),
        (10, 20, 90)
    );
}

#[tokio::test]
async fn a_request_reaches_the_provider_changed_in_exactly_the_named_fields() {
    let harness = GatewayHarness::started().await;
    let body = json!({"temperature": 0.5, "model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": PROMPT}],
        "tools": [{"type": "function"}], "stream": true});
    harness.call("t4c2a3", &body).await;
    let seen = &harness.provider.seen()[0];
    let expected = body.to_string().replace("\"max_tokens\":9", "\"max_tokens\":77");
    let expected = expected.replace(
        "\"stream\":true",
        "\"stream\":true,\"stream_options\":{\"include_usage\":true}",
    );
    assert_eq!(seen.body, expected);
    assert_eq!(seen.path, "/v1/chat/completions");
    assert_eq!(seen.headers["authorization"], format!("Bearer {KEY}"));
    assert_eq!(seen.headers["idempotency-key"], "agent-uid-t4c2a3");
    assert!(seen.headers["user-agent"].to_str().unwrap().starts_with("agentloop/"));
    assert!(!seen.headers.contains_key("x-agentloop-call"));
}

#[tokio::test]
async fn the_key_is_read_for_each_call_and_a_missing_one_is_named() {
    let harness = GatewayHarness::started().await;
    harness::write(&harness.path("key"), "rotated");
    harness.ask("t1c1a1").await;
    assert_eq!(harness.provider.seen()[0].headers["authorization"], "Bearer rotated");
    for (call, key) in [
        ("t2c1a1", Some(" \n")),
        ("t3c1a1", Some("two\nlines")),
        ("t4c1a1", None),
    ] {
        match key {
            Some(key) => harness::write(&harness.path("key"), key),
            None => std::fs::remove_file(harness.path("key")).unwrap(),
        }
        let failure = failure(harness.call(call, &whole()).await).await;
        assert_eq!(failure.kind, FailureKind::AuthenticationFailed);
        assert!(
            failure.message.contains("spec.model.apiKeySecretRef"),
            "{}",
            failure.message
        );
        assert!(!failure.message.contains("lines"), "{}", failure.message);
    }
    assert_eq!(harness.provider.seen().len(), 1);
    let report = harness.controller.until("the missing key", |report| {
        report
            .model
            .as_ref()
            .is_some_and(|model| model.failure == Some(FailureKind::AuthenticationFailed))
    });
    assert_eq!(report.await.usage.calls, 1);
}

#[tokio::test]
async fn without_a_key_in_the_spec_no_authorization_is_sent() {
    let harness = GatewayHarness::started_with(json!({"apiKeySecretRef": null})).await;
    harness.ask("t1c1a1").await;
    assert!(!harness.provider.seen()[0].headers.contains_key("authorization"));
}

#[tokio::test]
async fn a_request_that_could_raise_the_bill_is_not_sent() {
    let harness = GatewayHarness::started().await;
    let body = json!({"model": "m", "messages": [], "n": 2});
    let failure = failure(harness.call("t1c1a1", &body).await).await;
    assert_eq!(failure.kind, FailureKind::BadResponse);
    assert!(failure.message.contains("field n"), "{}", failure.message);
    assert!(harness.provider.seen().is_empty());
}

#[tokio::test]
async fn a_call_without_an_id_is_refused() {
    let harness = GatewayHarness::started().await;
    for id in ["", "t1", "t1c1a1 ", "t01c1a1", "x"] {
        let request = harness
            .worker
            .post(url("/v1/chat/completions"))
            .header("x-agentloop-call", id)
            .json(&whole());
        let status = request.send().await.unwrap().status();
        // A header's outer blanks are not part of its value.
        assert_eq!(
            status,
            if id == "t1c1a1 " {
                StatusCode::OK
            } else {
                StatusCode::BAD_REQUEST
            },
            "{id:?}"
        );
    }
    assert_eq!(harness.provider.seen().len(), 1);
}

#[tokio::test]
async fn a_disconnecting_worker_does_not_cancel_its_call() {
    let harness = GatewayHarness::started().await;
    harness.provider.will(ScriptedResponse::stream(vec![
        send(STREAM_HEAD),
        Step::Hold,
        send(STREAM_TAIL),
    ]));
    let mut response = harness.call("t1c1a1", &streamed()).await;
    response.chunk().await.unwrap().unwrap();
    drop(response);
    harness.provider.release();
    harness.until_counted(1, 0).await;
    let (status, body) = harness.ask("t1c1a1").await;
    assert_eq!((status, body), (StatusCode::OK, format!("{STREAM_HEAD}{STREAM_TAIL}")));
    assert_eq!(harness.provider.seen().len(), 1);
}

#[tokio::test]
async fn a_repeat_joins_the_call_in_flight() {
    let harness = GatewayHarness::started().await;
    harness.provider.will(ScriptedResponse::stream(vec![
        send(STREAM_HEAD),
        Step::Hold,
        send(STREAM_TAIL),
    ]));
    let first = harness.call_aside("t1c1a1", &streamed());
    harness.provider.until_asked(1).await;
    let second = harness.call_aside("t1c1a1", &streamed());
    harness.provider.release();
    let (first, second) = (first.await.unwrap(), second.await.unwrap());
    assert_eq!(first, second);
    assert_eq!(first.1, format!("{STREAM_HEAD}{STREAM_TAIL}"));
    assert_eq!(harness.provider.seen().len(), 1);
}

#[tokio::test]
async fn a_cancel_cuts_the_call_in_flight_and_its_use_is_unknown() {
    let harness = GatewayHarness::started().await;
    harness.provider.will(ScriptedResponse::stream(vec![Step::Hold]));
    let call = harness.call_aside("t1c1a1", &whole());
    harness.provider.until_asked(1).await;
    assert_eq!(harness.errand("t1c1a1", "ack").await, StatusCode::CONFLICT);
    assert_eq!(harness.errand("t1c1a1", "cancel").await, StatusCode::NO_CONTENT);
    let (status, body) = call.await.unwrap();
    assert_eq!(status, StatusCode::BAD_GATEWAY);
    assert!(body.contains("Cancelled"), "{body}");
    harness.until_counted(1, 1).await;
    // Its end is kept like any other, and a second cancel does nothing.
    assert_eq!(harness.errand("t1c1a1", "cancel").await, StatusCode::NO_CONTENT);
    assert_eq!(
        failure(harness.call("t1c1a1", &whole()).await).await.kind,
        FailureKind::Cancelled
    );
    assert_eq!(harness.errand("t1c1a1", "ack").await, StatusCode::NO_CONTENT);
}

#[tokio::test]
async fn an_acknowledged_answer_is_deleted_and_requesting_it_again_costs_nothing() {
    let harness = GatewayHarness::started().await;
    harness.ask("t2c1a1").await;
    for _ in 0..2 {
        assert_eq!(harness.errand("t2c1a1", "ack").await, StatusCode::NO_CONTENT);
    }
    for id in ["t2c1a1", "t1c9a9"] {
        let response = harness.call(id, &whole()).await;
        assert_eq!(response.status(), StatusCode::CONFLICT);
        assert_eq!(failure(response).await.kind, FailureKind::BadResponse);
    }
    assert_eq!(harness.provider.seen().len(), 1);
}

#[tokio::test]
async fn at_the_end_of_the_pod_the_call_in_flight_lands_and_the_last_report_has_it() {
    let mut harness = GatewayHarness::started().await;
    harness.provider.will(ScriptedResponse::stream(vec![
        Step::Hold,
        send(STREAM_HEAD),
        send(STREAM_TAIL),
    ]));
    let call = harness.call_aside("t1c1a1", &streamed());
    harness.provider.until_asked(1).await;
    harness.terminate();
    harness.provider.release();
    let (status, body) = call.await.unwrap();
    assert_eq!((status, body), (StatusCode::OK, format!("{STREAM_HEAD}{STREAM_TAIL}")));
    assert!(harness.exited().await.success(), "{}", harness.log());
    let last = harness.controller.reports().pop().unwrap();
    assert_eq!((last.usage.calls, last.usage.output_tokens), (1, 20));
}

#[tokio::test]
async fn at_the_end_of_the_pod_a_call_that_does_not_land_is_cut_and_counted() {
    let mut harness = GatewayHarness::started().await;
    harness.provider.will(ScriptedResponse::stream(vec![Step::Hold]));
    let call = harness.call_aside("t1c1a1", &whole());
    harness.provider.until_asked(1).await;
    harness.terminate();
    assert!(call.await.unwrap().1.contains("Cancelled"));
    assert!(harness.exited().await.success(), "{}", harness.log());
    let last = harness.controller.reports().pop().unwrap();
    assert_eq!((last.usage.calls, last.usage.unknown_calls), (1, 1));
}

#[tokio::test]
async fn logs_and_errors_of_the_gateway_contain_no_key_prompt_or_answer() {
    let harness = GatewayHarness::started().await;
    harness.ask("t1c1a1").await;
    harness
        .provider
        .will(ScriptedResponse::stream(vec![send(STREAM_HEAD), send(STREAM_TAIL)]));
    harness.call("t2c1a1", &streamed()).await.text().await.unwrap();
    let echo = format!("{{\"error\":{{\"message\":\"{KEY} {PROMPT}\"}}}}");
    for (turn, status) in (3..).zip([400, 401, 403, 404, 429, 500]) {
        harness.provider.will(ScriptedResponse::json(status, &echo));
        let failure = failure(harness.call(&format!("t{turn}c1a1"), &whole()).await).await;
        assert!(!failure.message.contains("canary"), "{failure:?}");
    }
    harness.provider.will(ScriptedResponse::json(200, &echo));
    assert!(
        !failure(harness.call("t20c1a1", &whole()).await)
            .await
            .message
            .contains("canary")
    );
    // The 500 does not say that nothing was processed, and the last answer says nothing of what it used.
    harness.until_counted(9, 2).await;
    let reports = serde_json::to_string(&harness.controller.reports()).unwrap();
    let log = harness.log();
    assert!(log.contains("call answered"), "{log}");
    for canary in ["canary", "link-token"] {
        assert!(!log.contains(canary), "{log}");
        assert!(!reports.contains(canary), "{reports}");
    }
}

#[tokio::test]
async fn the_probe_reports_whether_the_gateway_serves() {
    let mut harness = GatewayHarness::new().await;
    let probe = |harness: &GatewayHarness| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_agentloop"));
        command
            .arg("probe")
            .env_clear()
            .env("AGENTLOOP_SOCKET", harness.path("gateway.sock"))
            .output()
            .unwrap()
    };
    let output = probe(&harness);
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot connect to"));
    harness.start().await;
    assert!(probe(&harness).status.success());
    harness.kill();
    assert!(!probe(&harness).status.success());
}
