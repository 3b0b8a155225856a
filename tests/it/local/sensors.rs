//! Sensors in a run without a cluster.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::process::{Bench, agent, script, scripted};

fn sensor(spec: &Value) -> Value {
    let mut whole = json!({ "agentNames": ["a"], "source": { "schedule": { "cron": "* * * * *" } } });
    for (field, value) in spec.as_object().unwrap() {
        whole[field] = value.clone();
    }
    json!({
        "apiVersion": "agentloop.dev/v1alpha1", "kind": "Sensor", "metadata": { "name": "minute" }, "spec": whole,
    })
}

#[tokio::test]
async fn a_sensor_that_cannot_be_used_is_named_with_its_field_and_nothing_is_started() {
    for (spec, says) in [
        (json!({ "agentNames": [] }), "spec names no receiver"),
        (
            json!({ "source": { "schedule": { "cron": "every five minutes" } } }),
            "spec.source.schedule.cron",
        ),
        (
            json!({ "updates": [{ "field": "hour", "value": "payload.((" }] }),
            "spec.updates[0].value",
        ),
    ] {
        let mut bench = Bench::new();
        let turns = json!([{ "yield": { "sleep": 60 } }]);
        bench.write("all.yaml", &[&scripted("a", &turns)[..], &[sensor(&spec)]].concat());
        let mut run = bench.run(&[]);
        let status = run.ended().await;
        assert_eq!(status.code(), Some(2), "{}\n{}", run.out(), run.err());
        let words = run.err();
        assert!(
            words.contains("(Sensor minute): ") && words.contains(says),
            "{says}: {words}"
        );
        assert!(!bench.state().exists());
    }
}

#[tokio::test]
async fn a_schedule_ends_a_sleep_of_an_hour_within_its_minute() {
    let mut bench = Bench::new();
    let turns = json!([{ "text": "I wait.", "yield": { "sleep": 3600, "wake_early_if": ["sensor/minute"] } }]);
    let fields = json!({ "hotState": { "fields": [{ "name": "lastTick", "type": "String" }] } });
    let spec = json!({ "updates": [{ "field": "lastTick", "value": "payload.scheduledTime" }] });
    bench.write("all.yaml", &[script("a", &turns), agent("a", &fields), sensor(&spec)]);
    let mut run = bench.run(&[]);
    let asleep = run.until("a", "asleep", |line| line["state"] == "Sleeping").await;
    let turns = asleep["turnsCompleted"].as_i64().unwrap();
    let deadline = Instant::now() + Duration::from_secs(75);
    while run.agent("a")["turnsCompleted"].as_i64().unwrap() <= turns {
        assert!(Instant::now() < deadline, "no tick:\n{}\n{}", run.out(), run.err());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    run.interrupt().await;
    assert_eq!(run.cause().await, "Interrupted");
}
