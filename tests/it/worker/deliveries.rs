//! Events of a sensor pod: each takes effect once, however often it comes, and whenever the worker dies.

use agentloop::api::sensor::SignalPriority;
use agentloop::api::status::LoopState;
use agentloop::link::deliveries::{Delivery, SensorEvent};
use agentloop::sensor_pipeline::delivery::SensorNotification;
use pretty_assertions::assert_eq;

use super::gateway::{Gateway, Log, sleep};
use super::is;
use super::process::WorkerHarness;

fn event(seq: i64, priority: SignalPriority) -> SensorEvent {
    SensorEvent {
        seq,
        id: format!("id-{seq}"),
        at: jiff::Timestamp::now(),
        updates: Vec::new(),
        notifications: vec![SensorNotification {
            is_task: false,
            source: "sensor/buoy".into(),
            text: format!("swell-{seq}"),
            priority,
        }],
        wakes: vec!["sensor/buoy".into()],
        ..SensorEvent::default()
    }
}

fn of(events: Vec<SensorEvent>) -> Delivery {
    Delivery {
        sensor: "buoy-uid".into(),
        name: "buoy".into(),
        events,
        ..Delivery::default()
    }
}

fn words(log: &Log) -> Vec<i64> {
    log.delivered.iter().map(|word| word.through).collect()
}

#[tokio::test]
async fn a_delivery_repeated_over_a_restart_is_applied_once_and_acknowledged_each_time() {
    let mut harness = WorkerHarness::new();
    let gateway = Gateway::start(harness.dir.path(), vec![sleep(3600), sleep(3600)]);
    let worker = harness.worker(&gateway);
    gateway.until("asleep", |log| is(log, LoopState::Sleeping)).await;
    let first = of(vec![event(1, SignalPriority::Normal), event(2, SignalPriority::Normal)]);
    gateway.deliver(first.clone());
    gateway.until("a word", |log| words(log) == [2]).await;
    gateway.deliver(first);
    let log = gateway.until("the word again", |log| words(log) == [2, 2]).await;
    assert_eq!(log.delivered[0].sensor, "buoy-uid");
    assert_eq!(log.calls.len(), 1, "nothing of it ends a sleep");

    worker.kill().await;
    harness.epoch = 2;
    let mut worker = harness.worker(&gateway);
    let reports = log.reports.len();
    gateway
        .until("asleep again", |log| {
            log.reports.len() > reports && is(log, LoopState::Sleeping)
        })
        .await;
    gateway.deliver(of(vec![event(2, SignalPriority::High), event(3, SignalPriority::High)]));
    let log = gateway
        .until("a word and a call", |log| {
            words(log) == [2, 2, 3] && log.calls.len() == 2
        })
        .await;
    let request = log.calls[1].1.to_string();
    for seq in 1..=3 {
        assert_eq!(request.matches(&format!("swell-{seq}")).count(), 1, "{request}");
    }
    worker.terminate().await;
    worker.ended().await;
    assert_eq!(
        harness.query("SELECT count(*) FROM journal WHERE kind = 'SensorUpdated'"),
        3
    );
    harness.assert_discreet();
}
