//! Signals that a model scores, in a whole worker: each event is asked about once, and does what its score says.

use agentloop::api::sensor::{SignalGate, SignalPriority};
use agentloop::api::status::LoopState;
use agentloop::link::deliveries::{Delivery, SensorEvent};
use agentloop::sensor_pipeline::delivery::SensorNotification;
use agentloop::sensor_pipeline::scored_effects::{ScoredEffects, SignalScoreRequest};
use pretty_assertions::assert_eq;
use serde_json::json;

use super::gateway::{Gateway, Reply, answer, sleep};
use super::is;
use super::process::WorkerHarness;

fn event(seq: i64) -> SensorEvent {
    let question = SignalScoreRequest {
        signal: "signal/buoy/storm".into(),
        prompt: "How likely is a storm?".into(),
        threshold_percent: 80,
        gate: SignalGate::Notify,
        cooldown_seconds: 0,
        notice: Some(SensorNotification {
            is_task: false,
            source: "sensor/buoy".into(),
            text: format!("swell-{seq}."),
            priority: SignalPriority::High,
        }),
    };
    SensorEvent {
        seq,
        id: format!("id-{seq}"),
        at: jiff::Timestamp::now(),
        wakes: vec!["sensor/buoy".into()],
        trial: Some(ScoredEffects {
            questions: vec![question],
            data: format!("{{\"height\":{seq}}}"),
            ..ScoredEffects::default()
        }),
        ..SensorEvent::default()
    }
}

fn of(numbers: &[i64]) -> Delivery {
    Delivery {
        sensor: "buoy-uid".into(),
        name: "buoy".into(),
        events: numbers.iter().copied().map(event).collect(),
        ..Delivery::default()
    }
}

fn scores(score: u8) -> Reply {
    answer(&json!({ "score": score }).to_string(), &[])
}

fn harness() -> WorkerHarness {
    let mut harness = WorkerHarness::new();
    harness.spec["lightModel"] = json!({"api": "OpenAIChat", "name": "small", "baseURL": "http://unused"});
    harness
}

#[tokio::test]
async fn an_event_scored_below_the_threshold_does_not_wake_the_loop_and_one_at_it_does() {
    let mut harness = harness();
    let replies = vec![sleep(3600), scores(79), scores(80), sleep(3600)];
    let gateway = Gateway::start(harness.dir.path(), replies);
    let mut worker = harness.worker(&gateway);
    gateway.until("asleep", |log| is(log, LoopState::Sleeping)).await;
    gateway.deliver(of(&[1, 2]));
    let log = gateway
        .until("asleep after the second turn", |log| {
            log.last().counts.turns == 2 && is(log, LoopState::Sleeping) && log.acks.len() == 4
        })
        .await;
    assert_eq!(log.call_ids(), ["t1c1a1", "t2c0a1", "t2c0a2", "t2c1a1"]);
    assert_eq!(log.sorted_acks(), log.call_ids());
    assert_eq!(log.delivered[0].through, 2, "they are on disk before they are scored");
    for (place, height) in [(1, 1), (2, 2)] {
        let asked = &log.calls[place].1;
        assert_eq!((asked["model"].as_str(), asked.get("tools")), (Some("small"), None));
        let text = asked.to_string();
        assert!(
            text.contains("How likely is a storm?") && text.contains(&format!("{{\\\"height\\\":{height}}}")),
            "{text}"
        );
    }
    let turn = log.calls[3].1.to_string();
    assert!(turn.contains("swell-2.") && !turn.contains("swell-1."), "{turn}");
    assert!(turn.contains("signal/buoy/storm"), "{turn}");
    worker.terminate().await;
    worker.ended().await;
    let count = |kind: &str| harness.query(&format!("SELECT count(*) FROM journal WHERE kind = '{kind}'"));
    assert_eq!((count("SignalScored"), count("SensorUpdated")), (2, 2));
    let steps = "SELECT count(*) FROM agent_execution_steps WHERE purpose = 'Signal'";
    assert_eq!(harness.query(steps), 2);
}

#[tokio::test]
async fn a_worker_killed_during_a_score_request_repeats_the_same_request() {
    let mut harness = harness();
    let gateway = Gateway::start(harness.dir.path(), vec![sleep(3600), Reply::Hang]);
    let worker = harness.worker(&gateway);
    gateway.until("asleep", |log| is(log, LoopState::Sleeping)).await;
    gateway.deliver(of(&[1]));
    gateway.until("a question", |log| log.calls.len() == 2).await;
    worker.kill().await;
    harness.epoch = 2;
    let _worker = harness.worker(&gateway);
    let log = gateway.until("the question again", |log| log.calls.len() == 3).await;
    assert_eq!(log.call_ids(), ["t1c1a1", "t2c0a1", "t2c0a1"]);
    assert_eq!(log.calls[1].1, log.calls[2].1);
}
