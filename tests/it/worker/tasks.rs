//! Requested tasks: what the worker says of them, and that a loop that ends still delivers its responses.

use agentloop::api::status::{LoopOutcome, LoopState};
use agentloop::link::sensor_messages::SensorTerms;
use agentloop::link::task_requests::{RequestedTask, TaskAck, TaskReceipt, TaskRefusal};
use pretty_assertions::assert_eq;
use serde_json::json;

use super::gateway::{Gateway, answer};
use super::is;
use super::process::{Worker, WorkerHarness};

fn task(id: &str, user: &str) -> RequestedTask {
    RequestedTask {
        receiver: "agent".into(),
        id: id.into(),
        user: user.into(),
        prompt: "how are you?".into(),
        untrusted_content: None,
    }
}

/// An Agent in mode Task whose responses have a receiver, at work on the task `request-a` of ann.
async fn at_work() -> (WorkerHarness, Gateway, Worker) {
    let mut harness = WorkerHarness::new();
    harness.spec["mode"] = json!("Task");
    harness.spec["task"] = json!({"responses": {"http": {"url": "https://unused/"}}});
    let gateway = Gateway::start(harness.dir.path(), vec![]);
    let worker = harness.worker(&gateway);
    let sleeps = |log: &super::gateway::Log| !log.reports.is_empty() && is(log, LoopState::Sleeping);
    gateway.until("asleep", sleeps).await;
    gateway.request(task("request-a", "ann"));
    gateway.until("the call", |log| log.calls.len() == 1).await;
    (harness, gateway, worker)
}

/// The loop is stopped while it works on the task, and the task is answered.
async fn stop(gateway: &Gateway) {
    gateway.tell(|event| event.directives.stop = Some("monday".into()));
    gateway.keep("t1c1a1", answer("fine", &[]));
    let log = gateway.until("the end", |log| log.last().outcome.is_some()).await;
    assert_eq!(log.last().outcome, Some(LoopOutcome::Cancelled));
}

#[tokio::test]
async fn a_loop_that_is_stopped_delivers_the_response_of_the_task_that_it_has_waited_for() {
    let (harness, gateway, mut worker) = at_work().await;
    stop(&gateway).await;
    let log = gateway.until("the response", |log| !log.responses.is_empty()).await;
    assert_eq!(log.responses, ["request-a"]);
    worker.terminate().await;
    assert!(worker.ended().await.success());
    assert_eq!(gateway.log().responses, ["request-a"], "once");
    assert_eq!(harness.query("SELECT count(*) FROM tasks WHERE undelivered = 1"), 0);
}

#[tokio::test]
async fn a_receiver_that_refuses_delays_the_end_for_a_while_and_the_journal_keeps_the_response() {
    let (mut harness, gateway, mut worker) = at_work().await;
    gateway.answer_responses(503);
    stop(&gateway).await;
    worker.terminate().await;
    assert!(worker.ended().await.success());
    assert!(!gateway.log().responses.is_empty(), "it was tried");
    assert_eq!(harness.query("SELECT count(*) FROM tasks WHERE undelivered = 1"), 1);
    // The next pod delivers it.
    gateway.answer_responses(204);
    gateway.tell(|event| event.directives.stop = None);
    let before = gateway.log().responses.len();
    harness.epoch = 2;
    let mut worker = harness.worker(&gateway);
    gateway
        .until("the response", |log| log.responses.len() == before + 1)
        .await;
    worker.terminate().await;
    assert!(worker.ended().await.success());
    assert_eq!(harness.query("SELECT count(*) FROM tasks WHERE undelivered = 1"), 0);
}

#[tokio::test]
async fn the_id_of_a_task_is_that_of_its_user_and_another_one_is_refused() {
    let (_bench, gateway, _worker) = at_work().await;
    gateway.request(task("request-a", "bob"));
    gateway.request(task("request-a", "ann"));
    let log = gateway.until("receipts", |log| log.receipts.len() == 3).await;
    let mut receipts: Vec<(&str, TaskReceipt, Option<TaskRefusal>)> = Vec::new();
    for TaskAck {
        receipt, refusal, user, ..
    } in &log.receipts
    {
        receipts.push((user.as_deref().unwrap(), *receipt, *refusal));
    }
    // They are sent side by side.
    receipts.sort_by_key(|(user, receipt, _)| (user.to_owned(), *receipt == TaskReceipt::Repeated));
    assert_eq!(
        receipts,
        [
            ("ann", TaskReceipt::Accepted, None),
            ("ann", TaskReceipt::Repeated, None),
            ("bob", TaskReceipt::Stopped, Some(TaskRefusal::IdOfAnotherUser)),
        ]
    );
}

#[tokio::test]
async fn a_schedule_that_arrives_while_the_queue_is_full_starts() {
    let (harness, gateway, mut worker) = at_work().await;
    for number in 0..1000 {
        gateway.request(task(&format!("request-{number}"), "ann"));
    }
    let log = gateway.until("receipts", |log| log.receipts.len() == 1001).await;
    assert!(log.receipts.iter().all(|ack| ack.receipt == TaskReceipt::Accepted));
    gateway.request(task("request-more", "ann"));
    let log = gateway.until("a refusal", |log| log.receipts.len() == 1002).await;
    assert_eq!(log.receipts[1001].receipt, TaskReceipt::QueueFull);
    let spec =
        json!({"agentNames": ["a"], "source": {"schedule": {"cron": "0 * * * *"}}, "task": {"prompt": "'look'"}});
    let clock = SensorTerms {
        uid: "uid-clock".into(),
        name: "clock".into(),
        generation: 1,
        spec: serde_json::from_value(spec).unwrap(),
    };
    gateway.tell(|event| event.directives.sensors = Some(vec![clock]));
    let is_scheduled = |log: &super::gateway::Log| {
        let sensors = log.last().sensors;
        sensors.iter().any(|sensor| sensor.next_attempt_at.is_some())
    };
    gateway.until("a schedule", is_scheduled).await;
    worker.terminate().await;
    worker.ended().await;
    let records = "SELECT count(*) FROM deliveries WHERE sensor = 'uid-clock'";
    assert_eq!(harness.query(records), 1, "its start is on disk");
}
