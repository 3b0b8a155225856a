//! The gateway dies at any moment: no paid answer is lost, none is paid for twice, every call is counted once.

use agentloop::api::failure::FailureKind;
use pretty_assertions::assert_eq;
use reqwest::StatusCode;

use super::harness::{GatewayHarness, failure, streamed, whole, write};
use super::provider::{ANSWER, STREAM_HEAD, STREAM_TAIL, ScriptedResponse, Step, send};

#[tokio::test]
async fn killed_before_the_answer_the_call_is_lost_and_not_repeated() {
    let mut harness = GatewayHarness::started().await;
    harness.provider.will(ScriptedResponse::stream(vec![Step::Hold]));
    let call = harness.call_aside("t1c1a1", &whole());
    harness.provider.until_asked(1).await;
    harness.kill();
    assert!(call.await.is_err(), "the worker sees its connection break");
    harness.start().await;
    assert_eq!(
        failure(harness.call("t1c1a1", &whole()).await).await.kind,
        FailureKind::Interrupted
    );
    assert_eq!(harness.provider.seen().len(), 1);
    let usage = harness.until_counted(1, 1).await.usage;
    assert_eq!((usage.input_tokens, usage.by_model[0].unknown_calls), (0, 1));
    // The next attempt has an id of its own, and is sent.
    assert_eq!(harness.ask("t1c1a2").await.1, ANSWER);
    harness.until_counted(2, 1).await;
}

#[tokio::test]
async fn killed_in_mid_stream_the_call_is_lost_and_not_repeated() {
    let mut harness = GatewayHarness::started().await;
    harness
        .provider
        .will(ScriptedResponse::stream(vec![send(STREAM_HEAD), Step::Hold]));
    let mut response = harness.call("t1c1a1", &streamed()).await;
    response.chunk().await.unwrap().unwrap();
    harness.kill();
    assert!(response.text().await.is_err());
    harness.start().await;
    assert_eq!(
        failure(harness.call("t1c1a1", &streamed()).await).await.kind,
        FailureKind::Interrupted
    );
    assert_eq!(harness.provider.seen().len(), 1);
    harness.until_counted(1, 1).await;
}

#[tokio::test]
async fn after_a_kill_a_stored_answer_is_returned_byte_for_byte_and_paid_once() {
    let mut harness = GatewayHarness::started().await;
    harness
        .provider
        .will(ScriptedResponse::stream(vec![send(STREAM_HEAD), send(STREAM_TAIL)]));
    let first = harness.call("t1c1a1", &streamed()).await.text().await.unwrap();
    harness.kill();
    harness.start().await;
    let again = harness.call("t1c1a1", &streamed()).await;
    assert_eq!(again.headers()["content-type"], "text/event-stream");
    assert_eq!(again.text().await.unwrap(), first);
    assert_eq!(harness.provider.seen().len(), 1);
    let usage = harness.until_counted(1, 0).await.usage;
    assert_eq!((usage.input_tokens, usage.output_tokens), (10, 20));
    assert_eq!(harness.errand("t1c1a1", "ack").await, StatusCode::NO_CONTENT);
    harness.kill();
    harness.start().await;
    assert_eq!(harness.call("t1c1a1", &streamed()).await.status(), StatusCode::CONFLICT);
}

#[tokio::test]
async fn an_answer_that_the_worker_has_whole_is_on_disk() {
    let mut harness = GatewayHarness::new().await;
    // Whatever the moment of the kill: who got the end of an answer can get it again.
    for turn in 1..=10 {
        harness.start().await;
        let id = format!("t{turn}c1a1");
        let (status, first) = harness.ask(&id).await;
        harness.kill();
        assert_eq!(status, StatusCode::OK);
        harness.start().await;
        assert_eq!(harness.ask(&id).await, (status, first));
        harness.kill();
    }
    assert_eq!(harness.provider.seen().len(), 10);
    harness.start().await;
    harness.until_counted(10, 0).await;
}

#[tokio::test]
async fn a_stored_answer_is_returned_without_the_controller() {
    let mut harness = GatewayHarness::started().await;
    harness.ask("t1c1a1").await;
    harness.kill();
    harness.controller.silence(true);
    harness.launch();
    // Until it listens; the session itself has to wait for the controller.
    while std::os::unix::net::UnixStream::connect(harness.path("gateway.sock")).is_err() {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert_eq!(harness.ask("t1c1a1").await, (StatusCode::OK, ANSWER.to_owned()));
    let (status, _) = harness.ask("t1c1a2").await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(harness.provider.seen().len(), 1);
}

#[tokio::test]
async fn a_damaged_record_is_refused_with_a_message() {
    let mut harness = GatewayHarness::new().await;
    write(
        &harness.path("record/calls.db"),
        "this is no database, and nobody can say what was paid for",
    );
    harness.launch();
    assert_eq!(harness.exited().await.code(), Some(1));
    let log = harness.log();
    assert!(log.contains("calls.db cannot be opened"), "{log}");
    assert!(log.contains("it is corrupted: move it away"), "{log}");
}
