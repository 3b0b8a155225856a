//! Notes of the tool `memory` over killed workers and new pods.

use serde_json::{Value, json};

use super::Gateway;
use super::gateway::{Reply, answer};
use super::process::{CANARY, WorkerHarness};

fn memory(arguments: &Value) -> Reply {
    answer("", &[("memory", arguments.clone())])
}

#[tokio::test]
async fn each_call_takes_effect_once_and_notes_outlast_killed_workers_and_their_pod() {
    let mut harness = WorkerHarness::new();
    harness.spec["memory"] = json!({"maxBytes": 1024});
    let gateway = Gateway::start(harness.dir.path(), vec![]);
    let worker = harness.worker(&gateway);
    gateway.until("the first call", |log| log.calls.len() == 1).await;
    worker.kill().await;
    // The answer came while no worker was there to commit it.
    let text = format!("{CANARY}: 1");
    gateway.keep(
        "t1c1a1",
        memory(&json!({"operation": "write", "title": "plan", "text": text})),
    );
    gateway.keep(
        "t1c2a1",
        memory(&json!({"operation": "replace", "title": "plan", "old": ": 1", "new": ": 1+"})),
    );
    let worker = harness.worker(&gateway);
    gateway
        .until("the third call", |log| log.call_ids().contains(&"t1c3a1"))
        .await;
    worker.kill().await;
    harness.epoch = 2;
    gateway.keep("t1c3a1", memory(&json!({"operation": "view", "title": "plan"})));
    let mut worker = harness.worker(&gateway);
    let log = gateway
        .until("the fourth call", |log| log.call_ids().contains(&"t1c4a1"))
        .await;
    let (_, request) = log.calls.last().unwrap();
    let request = request["messages"].to_string();
    let viewed = json!(format!("[note \"plan\", 15 bytes: 0 to 15, the end]\n{text}+")).to_string();
    assert!(request.contains(viewed.trim_matches('"')), "{request}");
    let listed = json!("Notes in `memory`, 19 of 1024 bytes:\n\"plan\": 15 bytes").to_string();
    assert!(request.contains(listed.trim_matches('"')), "{request}");
    let tools = log.calls[0].1["tools"].as_array().unwrap();
    let names: Vec<&Value> = tools.iter().map(|tool| &tool["function"]["name"]).collect();
    assert_eq!(names, ["yield", "memory"]);
    worker.terminate().await;
    worker.ended().await;
    harness.assert_discreet();
    let of_memory = "SELECT count(*) FROM agent_execution_audit WHERE tool = 'memory' AND";
    assert_eq!(harness.query(&format!("{of_memory} decision = 'Allowed'")), 3);
    assert_eq!(harness.query(&format!("{of_memory} outcome = 'Ok'")), 3);
}
