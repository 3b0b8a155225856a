//! Model calls through a gateway that dies, fails, or passes on what servers send.

use agentloop::api::condition::LoopSign;
use agentloop::api::failure::{CallFailure, FailureKind};
use agentloop::api::status::{LoopOutcome, LoopState, PauseReason};
use agentloop::link::socket::FAILURE_EVENT;
use serde_json::json;

use super::gateway::{Gateway, Reply, answer, sleep};
use super::process::{CANARY, WorkerHarness};
use super::{asleep, is, reasons};

fn failure(kind: FailureKind) -> Reply {
    Reply::Failure(CallFailure {
        kind,
        message: "what to do".into(),
        retry_after_milliseconds: None,
        resumes_at: None,
    })
}

#[tokio::test]
async fn after_a_gateway_crash_during_a_call_the_same_call_is_requested_and_no_failure_is_counted() {
    let mut harness = WorkerHarness::new();
    let mut gateway = Gateway::start(harness.dir.path(), vec![]);
    let _worker = harness.worker(&gateway);
    gateway.until("the call", |log| log.calls.len() == 1).await;
    gateway.down();
    gateway.keep("t1c1a1", sleep(3600));
    let reports = gateway.log().reports.len();
    gateway.up();
    let log = gateway
        .until("asleep", |log| {
            log.reports.len() > reports && is(log, LoopState::Sleeping)
        })
        .await;
    assert_eq!(log.call_ids(), ["t1c1a1", "t1c1a1"]);
    assert_eq!((log.last().consecutive_errors, log.last().last_error), (0, None));
}

#[tokio::test]
async fn a_restarted_gateway_receives_the_last_report_again() {
    let mut harness = WorkerHarness::new();
    let (mut gateway, _worker, before) = asleep(&mut harness).await;
    gateway.down();
    gateway.up();
    let after = gateway
        .until("the report again", |log| log.reports.len() > before.reports.len())
        .await;
    assert_eq!(after.last(), before.last());
}

#[tokio::test]
async fn a_failed_call_shows_in_the_report_with_its_kind_and_message() {
    let mut harness = WorkerHarness::new();
    let gateway = Gateway::start(harness.dir.path(), vec![failure(FailureKind::AuthenticationFailed)]);
    let _worker = harness.worker(&gateway);
    let log = gateway.until("paused", |log| is(log, LoopState::Paused)).await;
    assert_eq!(reasons(&log.last()), [PauseReason::AuthenticationFailed]);
    let error = log.last().last_error.unwrap();
    assert_eq!(
        (error.kind.as_str(), error.message.as_str()),
        ("AuthenticationFailed", "what to do")
    );
}

#[tokio::test]
async fn tool_calls_with_equal_ids_receive_unique_ids_and_their_own_results() {
    let mut harness = WorkerHarness::new();
    let twice = answer("", &[("nothing", json!({})), ("yield", json!({"sleep": 0}))]);
    let gateway = Gateway::start(harness.dir.path(), vec![twice]);
    let _worker = harness.worker(&gateway);
    let log = gateway.until("the second call", |log| log.calls.len() == 2).await;
    let messages = &log.calls[1].1["messages"];
    let ids = |index: usize| messages[index]["tool_call_id"].as_str().unwrap().to_owned();
    assert_eq!([ids(3), ids(4)], ["000010100", "000010101"]);
}

#[tokio::test]
async fn an_edit_of_the_instructions_file_takes_effect_at_the_next_turn() {
    let mut harness = WorkerHarness::new();
    harness.spec.as_object_mut().unwrap().remove("instructions");
    harness.spec["instructionsFrom"] = json!({"configMapKeyRef": {"name": "c", "key": "k"}});
    std::fs::write(harness.instructions_file(), "one").unwrap();
    let gateway = Gateway::start(harness.dir.path(), vec![]);
    let _worker = harness.worker(&gateway);
    gateway.until("the call", |log| log.calls.len() == 1).await;
    std::fs::write(harness.instructions_file(), "two").unwrap();
    gateway.keep("t1c1a1", answer("done", &[]));
    let log = gateway.until("the second call", |log| log.calls.len() == 2).await;
    let system = |index: usize| {
        log.calls[index].1["messages"][0]["content"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    assert!(system(0).starts_with("one\n") && system(1).starts_with("two\n"));
}

#[tokio::test]
async fn skills_join_the_system_prompt_in_their_order_and_an_edit_is_in_the_next_turn() {
    let mut harness = WorkerHarness::new();
    let skill = |name: &str| json!({"name": name, "configMapKeyRef": {"name": "c", "key": name}});
    harness.spec["skills"] = json!([skill("triage"), skill("answer")]);
    std::fs::create_dir(harness.skills_dir()).unwrap();
    let write = |name: &str, text: &str| std::fs::write(harness.skills_dir().join(name), text).unwrap();
    write("answer", &format!("Be short, {CANARY}."));
    write("triage", "Look first.");
    let gateway = Gateway::start(harness.dir.path(), vec![]);
    let _worker = harness.worker(&gateway);
    gateway.until("the call", |log| log.calls.len() == 1).await;
    std::fs::write(harness.skills_dir().join("triage"), "Look twice.").unwrap();
    gateway.keep("t1c1a1", answer("done", &[]));
    let log = gateway.until("the second call", |log| log.calls.len() == 2).await;
    for (call, look) in log.calls.iter().zip(["first", "twice"]) {
        let system = call.1["messages"][0]["content"].as_str().unwrap();
        let skills = format!("# Skill: triage\n\nLook {look}.\n\n# Skill: answer\n\nBe short, {CANARY}.");
        assert!(
            system.starts_with(&format!("Be {CANARY}.")) && system.ends_with(&skills),
            "{system}"
        );
    }
    harness.assert_discreet();
}

#[tokio::test]
async fn a_broken_stream_is_requested_again_and_counts_as_no_failure() {
    let mut harness = WorkerHarness::new();
    let gateway = Gateway::start(harness.dir.path(), vec![Reply::BrokenOnce(Box::new(sleep(60)))]);
    let _worker = harness.worker(&gateway);
    let log = gateway.until("asleep", |log| is(log, LoopState::Sleeping)).await;
    assert_eq!(log.call_ids(), ["t1c1a1", "t1c1a1"]);
    assert_eq!(log.last().last_error, None);
}

#[tokio::test]
async fn a_stream_that_fails_after_its_start_fails_with_the_message_of_the_gateway() {
    let mut harness = WorkerHarness::new();
    let failure = json!({"kind": "BadResponse", "message": "what to do"});
    let stream = format!("data: {{\"choices\":[]}}\n\nevent: {FAILURE_EVENT}\ndata: {failure}\n\n");
    let gateway = Gateway::start(harness.dir.path(), vec![Reply::Raw(stream), sleep(60)]);
    let _worker = harness.worker(&gateway);
    let log = gateway.until("asleep", |log| is(log, LoopState::Sleeping)).await;
    assert_eq!(log.last().last_error.unwrap().message, "what to do");
}

#[tokio::test]
async fn an_unparseable_answer_is_a_bad_response_and_the_loop_continues() {
    let mut harness = WorkerHarness::new();
    let replies = vec![
        Reply::Raw(format!("{CANARY}\n\n")),
        Reply::Raw(format!("data: {CANARY}\n\n")),
        Reply::Json(json!({"error": CANARY})),
        Reply::Json(json!([CANARY])),
        sleep(60),
    ];
    let gateway = Gateway::start(harness.dir.path(), replies);
    let _worker = harness.worker(&gateway);
    let log = gateway.until("asleep", |log| is(log, LoopState::Sleeping)).await;
    assert_eq!((log.calls.len(), log.last().counts.turns), (5, 1));
    assert_eq!(log.last().last_error.unwrap().kind, "BadResponse");
    assert!(!serde_json::to_string(&log.reports).unwrap().contains(CANARY));
    harness.assert_discreet();
}

#[tokio::test]
async fn a_repeating_loop_is_warned_then_forced_to_sleep_and_continues_on_resume() {
    let mut harness = WorkerHarness::new();
    let gateway = Gateway::start(harness.dir.path(), vec![answer(CANARY, &[]); 4]);
    let _worker = harness.worker(&gateway);
    let log = gateway.until("paused", |log| is(log, LoopState::Paused)).await;
    let told = |call: usize| log.calls[call].1["messages"].to_string().contains("the runtime saw");
    assert_eq!((log.calls.len(), told(2), told(3)), (4, false, true));
    let report = log.last();
    assert_eq!(reasons(&report), [PauseReason::LoopDetected]);
    assert!(report.resumes_at.is_some_and(|at| at > jiff::Timestamp::now()));
    let detected = report.detected.unwrap();
    assert_eq!(detected.sign, LoopSign::NoProgress);
    assert!(!detected.message.contains(CANARY), "{}", detected.message);
    gateway.tell(|event| event.directives.resume = Some("looked".into()));
    let log = gateway.until("the next call", |log| log.calls.len() == 5).await;
    assert!(log.last().detected.is_some(), "only something new ends it");
    harness.assert_discreet();
}

#[tokio::test]
async fn a_call_that_the_gateway_refuses_as_fenced_ends_the_worker() {
    let mut harness = WorkerHarness::new();
    let gateway = Gateway::start(harness.dir.path(), vec![failure(FailureKind::Fenced)]);
    let mut worker = harness.worker(&gateway);
    assert!(worker.ended().await.success());
    assert_eq!(gateway.log().calls.len(), 1);
}

#[tokio::test]
async fn a_loop_that_shuts_itself_down_stays_down_also_after_a_restart_of_its_container() {
    let mut harness = WorkerHarness::new();
    let gateway = Gateway::start(
        harness.dir.path(),
        vec![answer("", &[("yield", json!({"mode": "shutdown"}))])],
    );
    let worker = harness.worker(&gateway);
    let log = gateway.until("the outcome", |log| log.last().outcome.is_some()).await;
    assert_eq!(log.last().state, LoopState::Stopped);
    worker.kill().await;
    let mut worker = harness.worker(&gateway);
    let reports = log.reports.len();
    let log = gateway
        .until("the outcome again", |log| log.reports.len() > reports)
        .await;
    assert_eq!((log.last().outcome, log.calls.len()), (Some(LoopOutcome::Completed), 1));
    worker.terminate().await;
    assert!(worker.ended().await.success());
}

#[tokio::test]
async fn a_loop_with_anthropic_messages_uses_them_on_their_own_route() {
    let mut harness = WorkerHarness::new();
    harness.spec["model"]["api"] = "AnthropicMessages".into();
    let event = |name: &str, data: serde_json::Value| format!("event: {name}\ndata: {data}\n\n");
    let delta = |piece: &str| json!({"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": piece}});
    let text = json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": format!("think {CANARY}")}});
    let tool = json!({"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "id": "toolu_1", "name": "yield", "input": {}}});
    let stream = [
        event(
            "message_start",
            json!({"type": "message_start", "message": {"content": []}}),
        ),
        event("content_block_start", text),
        event("ping", json!({"type": "ping"})),
        event("content_block_start", tool),
        event("content_block_delta", delta("{\"sleep\":")),
        event("content_block_delta", delta(" 1}")),
        event(
            "message_delta",
            json!({"type": "message_delta", "delta": {"stop_reason": "tool_use"}}),
        ),
        event("message_stop", json!({"type": "message_stop"})),
    ];
    let gateway = Gateway::start(harness.dir.path(), vec![Reply::Raw(stream.concat()), Reply::Hang]);
    let _worker = harness.worker(&gateway);
    let log = gateway
        .until("the call after the sleep", |log| log.calls.len() == 2)
        .await;
    assert_eq!(log.routes, ["/v1/messages", "/v1/messages"]);
    let (first, second) = (&log.calls[0].1, &log.calls[1].1);
    assert!(
        first["system"][0]["text"]
            .as_str()
            .unwrap()
            .starts_with(&format!("Be {CANARY}."))
    );
    assert_eq!(first["tools"][0]["name"], "yield");
    // What was sent before is sent again, byte for byte, and the new comes last.
    assert_eq!(second["messages"][0].to_string(), first["messages"][0].to_string());
    let said = json!([
        {"type": "text", "text": format!("think {CANARY}")},
        {"type": "tool_use", "id": "000010100", "name": "yield", "input": {"sleep": 1}},
    ]);
    assert_eq!(second["messages"][1], json!({"role": "assistant", "content": said}));
    assert_eq!(second["messages"][2]["content"][0]["tool_use_id"], "000010100");
    assert_eq!(second["messages"].as_array().unwrap().len(), 3);
    harness.assert_discreet();
}
