//! A goal over a crash of the worker: what its run took is reported as if the process had not changed.

use agentloop::api::goal::{GoalEnd, GoalStatus};
use agentloop::api::status::LoopState;
use serde_json::{Value, json};

use super::gateway::{Gateway, Log, Reply, answer};
use super::process::{CANARY, WorkerHarness};

/// An answer whose call used these tokens, and cost a millionth of a dollar for each of the input and two for each of the output.
fn used(reply: Reply, input: i64, output: i64) -> Reply {
    let Reply::Json(mut body) = reply else {
        return reply;
    };
    body["usage"] = json!({"prompt_tokens": input, "completion_tokens": output, "total_tokens": input + output});
    Reply::Priced(body, input + 2 * output)
}

fn goal(log: &Log) -> GoalStatus {
    log.last().goal.unwrap_or_default()
}

#[tokio::test]
async fn the_start_and_the_usage_of_a_goals_run_outlast_the_process_and_its_end_is_reported() {
    let mut harness = WorkerHarness::new();
    let (mode, criteria) = (json!("Goal"), json!([{"name": "text", "regex": "^done"}]));
    harness.spec["mode"] = mode;
    harness.spec["goal"] = json!({"description": CANARY, "acceptanceCriteria": criteria});
    let replies = vec![used(answer("Not yet.", &[]), 100, 10), Reply::Hang];
    let mut gateway = Gateway::start(harness.dir.path(), replies);
    let worker = harness.worker(&gateway);
    let first = gateway
        .until("a step", |log| goal(log).steps == 1 && log.calls.len() == 2)
        .await;
    let began = goal(&first).started_at.expect("a start");
    worker.kill().await;
    gateway.down();
    gateway.up();
    let (id, _) = first.calls.last().cloned().unwrap();
    let result = json!({"result": "done"});
    gateway.keep(&id, used(answer("", &[("finish", result)]), 200, 20));
    let _worker = harness.worker(&gateway);
    let ended = gateway
        .until("the end", |log| log.last().state == LoopState::Stopped)
        .await;
    let status = goal(&ended);
    assert_eq!(status.end, Some(GoalEnd::CriteriaMet));
    assert_eq!(status.started_at, Some(began.clone()));
    assert!(status.ended_at.is_some_and(|end| end.0 >= began.0));
    let usage: Value = serde_json::to_value(status.usage).unwrap();
    assert_eq!(usage, json!({"calls": 2, "tokens": 330, "costMicroUSD": 360}));
    harness.assert_discreet();
}
