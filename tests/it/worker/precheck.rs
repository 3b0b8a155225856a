//! The pre-check in a whole worker: another model, another format, and a sleep that continues.

use agentloop::api::status::LoopState;
use serde_json::{Value, json};

use super::gateway::{Gateway, Reply, sleep};
use super::is;
use super::process::WorkerHarness;

/// An answer in the light model's format.
fn says(text: &str) -> Reply {
    Reply::Json(
        json!({"type": "message", "role": "assistant", "content": [{"type": "text", "text": text}],
        "stop_reason": "end_turn", "usage": {"input_tokens": 10, "output_tokens": 5}}),
    )
}

fn harness() -> WorkerHarness {
    let mut harness = WorkerHarness::new();
    harness.spec["hotState"] = json!({"fields": [{"name": "price", "type": "Number"}]});
    harness.spec["continuous"] = json!({"preCheck": {"prompt": "Only a new price matters."}});
    harness.spec["lightModel"] =
        json!({"api": "AnthropicMessages", "name": "small", "baseURL": "http://unused", "maxOutputTokens": 64});
    harness
}

#[tokio::test]
async fn an_ended_sleep_is_pre_checked_and_extended_until_a_turn_is_needed() {
    let mut harness = harness();
    let replies = vec![
        sleep(1),
        says(r#"{"wake": false}"#),
        says(r#"{"wake": true}"#),
        sleep(600),
    ];
    let gateway = Gateway::start(harness.dir.path(), replies);
    let mut worker = harness.worker(&gateway);
    let log = gateway
        .until("asleep after the second turn", |log| {
            log.last().counts.turns == 2 && is(log, LoopState::Sleeping) && log.acks.len() == 4
        })
        .await;
    assert_eq!(log.call_ids(), ["t1c1a1", "t2c0a1", "t2c0a2", "t2c1a1"]);
    let chat = "/v1/chat/completions";
    assert_eq!(log.routes, [chat, "/v1/messages", "/v1/messages", chat]);
    let asked: &Value = &log.calls[1].1;
    assert_eq!((asked["model"].as_str(), asked.get("tools")), (Some("small"), None));
    let text = asked.to_string();
    assert!(
        text.contains("Only a new price matters.") && text.contains("Unchanged: price"),
        "{text}"
    );
    assert_eq!(log.calls[3].1["model"], "m");
    assert_eq!(log.sorted_acks(), log.call_ids());
    worker.terminate().await;
    worker.ended().await;
    let skipped = "SELECT count(*) FROM journal WHERE kind = 'PrecheckSkipped'";
    assert_eq!(harness.query(skipped), 1);
    harness.assert_discreet();
}

#[tokio::test]
async fn an_unreadable_answer_of_the_light_model_starts_the_turn() {
    let mut harness = harness();
    let replies = vec![sleep(1), Reply::Raw("data: nonsense\n\n".into()), sleep(600)];
    let gateway = Gateway::start(harness.dir.path(), replies);
    let _worker = harness.worker(&gateway);
    let log = gateway.until("two turns", |log| log.last().counts.turns == 2).await;
    assert_eq!(log.call_ids(), ["t1c1a1", "t2c0a1", "t2c1a1"]);
    let error = log.last().last_error.expect("an error");
    assert!(error.message.starts_with("the pre-check failed"), "{}", error.message);
}
