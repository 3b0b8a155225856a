//! Text of answers while it arrives: which of it a worker sends, and when.

use agentloop::api::status::LoopState;
use agentloop::link::events::EventSubscription;
use agentloop::link::task_requests::RequestedTask;
use pretty_assertions::assert_eq;
use serde_json::json;

use super::gateway::{BROKEN_OFF, Gateway, Log, Reply, sleep};
use super::is;
use super::process::{CANARY, WorkerHarness};

/// An answer in pieces.
fn says(pieces: &[&str]) -> Reply {
    let piece = |text: &&str| json!({"choices": [{"index": 0, "delta": {"content": text}}]});
    let end = json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]});
    Reply::Stream(pieces.iter().map(piece).chain([end]).collect())
}

/// Requests a task and waits until it is answered by this call.
async fn request(gateway: &Gateway, id: &str, call: &str) {
    gateway.request(RequestedTask {
        receiver: "agent".into(),
        id: id.into(),
        user: "ann".into(),
        prompt: "how are you?".into(),
        untrusted_content: None,
    });
    gateway.until(id, |log| log.acks.iter().any(|ack| ack == call)).await;
}

/// Replaces the subscriptions by this one, and waits until the worker knows it.
async fn subscribe(gateway: &Gateway, id: u64, text: bool) {
    let reading = EventSubscription {
        id,
        after: 0,
        messages: true,
        text,
    };
    gateway.tell(|event| event.directives.readings = vec![reading]);
    gateway
        .until("the subscription", |log| log.readings.contains(&id))
        .await;
}

#[tokio::test]
async fn text_is_sent_only_for_answers_to_requested_tasks_while_a_subscription_requests_it() {
    let mut harness = WorkerHarness::new();
    let replies = vec![
        sleep(3600),
        says(&["nobody ", "listens"]),
        says(&["no text is ", "wanted"]),
        says(&["an own turn ", "of the loop"]),
        sleep(3600),
        says(&["All is ", "well, ", CANARY]),
        says(&["nobody listens ", "any more"]),
    ];
    let gateway = Gateway::start(harness.dir.path(), replies);
    let _worker = harness.worker(&gateway);
    gateway.until("asleep", |log| is(log, LoopState::Sleeping)).await;
    request(&gateway, "request-a", "t2c1a1").await;
    subscribe(&gateway, 1, false).await;
    request(&gateway, "request-b", "t3c1a1").await;
    subscribe(&gateway, 2, true).await;
    gateway.tell(|event| event.directives.wake = Some("now".into()));
    gateway
        .until("two own turns", |log| log.acks.iter().any(|ack| ack == "t5c1a1"))
        .await;
    request(&gateway, "request-c", "t6c1a1").await;
    let whole = format!("All is well, {CANARY}");
    gateway
        .until("all of the text", |log| {
            log.fragments
                .last()
                .is_some_and(|last| last.end() == whole.len() as u64)
        })
        .await;
    subscribe(&gateway, 3, false).await;
    request(&gateway, "request-d", "t7c1a1").await;
    let fragments = gateway.log().fragments;
    let mut text = String::new();
    for fragment in &fragments {
        let of = (fragment.task.as_str(), fragment.call.as_str(), fragment.attempt);
        assert_eq!(of, ("request-c", "t6c1a1", 1));
        assert_eq!(fragment.offset, text.len() as u64);
        text.push_str(&fragment.text);
    }
    assert_eq!(text, whole);
    assert!(fragments.len() <= 3, "{fragments:?}");
    harness.assert_discreet();
}

#[tokio::test]
async fn an_answer_that_is_read_again_from_its_beginning_is_sent_from_its_beginning() {
    let mut harness = WorkerHarness::new();
    let broken = Reply::BrokenOnce(Box::new(says(&[BROKEN_OFF, "well."])));
    let gateway = Gateway::start(harness.dir.path(), vec![sleep(3600), broken]);
    let worker = harness.worker(&gateway);
    gateway.until("asleep", |log| is(log, LoopState::Sleeping)).await;
    subscribe(&gateway, 1, true).await;
    request(&gateway, "request-a", "t2c1a1").await;
    let ends = |log: &Log| log.fragments.last().is_some_and(|last| last.text.ends_with("well."));
    let fragments = gateway.until("text", ends).await.fragments;
    let (first, again) = (&fragments[0], &fragments[1]);
    assert_eq!(
        (first.call.as_str(), first.offset, first.text.as_str()),
        ("t2c1a1", 0, BROKEN_OFF)
    );
    assert_eq!((again.call.as_str(), again.offset), ("t2c1a1", 0));
    let whole: String = fragments[1..].iter().map(|fragment| fragment.text.as_str()).collect();
    assert_eq!(whole, "All is well.");
    assert!(!worker.output().contains(BROKEN_OFF));
}
