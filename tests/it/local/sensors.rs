//! Sensors in a run without a cluster.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::process::{LocalHarness, agent, script, scripted};

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
        (json!({ "agentNames": [] }), "spec has no receivers"),
        (
            json!({ "source": { "schedule": { "cron": "every five minutes" } } }),
            "spec.source.schedule.cron",
        ),
        (
            json!({ "updates": [{ "field": "hour", "value": "payload.((" }] }),
            "spec.updates[0].value",
        ),
    ] {
        let mut harness = LocalHarness::new();
        let turns = json!([{ "yield": { "sleep": 60 } }]);
        harness.write("all.yaml", &[&scripted("a", &turns)[..], &[sensor(&spec)]].concat());
        let mut run = harness.run(&[]);
        let status = run.ended().await;
        assert_eq!(status.code(), Some(2), "{}\n{}", run.out(), run.err());
        let words = run.err();
        assert!(
            words.contains("(Sensor minute): ") && words.contains(says),
            "{says}: {words}"
        );
        assert!(!harness.state().exists());
    }
}

#[tokio::test]
async fn a_schedule_ends_a_sleep_of_an_hour_within_its_minute() {
    let mut harness = LocalHarness::new();
    let turns = json!([{ "text": "I wait.", "yield": { "sleep": 3600, "wake_early_if": ["sensor/minute"] } }]);
    let fields = json!({ "hotState": { "fields": [{ "name": "lastTick", "type": "String" }] } });
    let spec = json!({ "updates": [{ "field": "lastTick", "value": "payload.scheduledTime" }] });
    harness.write("all.yaml", &[script("a", &turns), agent("a", &fields), sensor(&spec)]);
    let mut run = harness.run(&[]);
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

/// Puts a file into a directory as programs do that write it elsewhere first.
fn put(folder: &Path, name: &str) {
    let (aside, inbox) = (folder.join(name), folder.join("inbox"));
    std::fs::create_dir_all(&inbox).unwrap();
    std::fs::write(&aside, name).unwrap();
    std::fs::rename(aside, inbox.join(name)).unwrap();
}

#[tokio::test]
async fn the_watch_example_reports_each_file_of_the_named_directory_once_over_two_runs() {
    let mut harness = LocalHarness::new();
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/watch.yaml");
    std::fs::copy(example, harness.path("all.yaml")).unwrap();
    let folder = harness.path("files");
    put(&folder, "first");
    let flags = ["--workspace", folder.to_str().unwrap()];
    let told = |harness: &LocalHarness| {
        let lines = harness.journal("reader");
        lines.iter().filter(|(kind, ..)| kind == "SensorUpdated").count()
    };
    for (file, events) in [("second", 2), ("third", 3)] {
        let mut run = harness.run(&flags);
        let asleep = run.until("reader", "asleep", |line| line["state"] == "Sleeping").await;
        // What was there, or came meanwhile, has settled and is reported.
        tokio::time::sleep(Duration::from_secs(3)).await;
        let asleep = run.until("reader", "asleep", |line| line["state"] == "Sleeping").await["turnsCompleted"]
            .as_i64()
            .max(asleep["turnsCompleted"].as_i64());
        put(&folder, file);
        run.until("reader", "awake", |line| line["turnsCompleted"].as_i64() > asleep)
            .await;
        run.interrupt().await;
        assert_eq!(run.cause().await, "Interrupted");
        assert_eq!(told(&harness), events, "{}", run.err());
    }
}

#[tokio::test]
async fn a_workspace_without_a_folder_of_ones_own_is_in_the_state_also_when_its_claim_is_named() {
    for (workspace, claim) in [(json!({}), "a-workspace"), (json!({ "claimName": "shared" }), "shared")] {
        let mut harness = LocalHarness::new();
        let turns = json!([{ "text": "I wait.", "yield": { "sleep": 3600, "wake_early_if": ["sensor/minute"] } }]);
        let watch = sensor(&json!({ "source": { "watch": { "path": "inbox" } } }));
        harness.write(
            "all.yaml",
            &[
                script("a", &turns),
                agent("a", &json!({ "workspace": workspace })),
                watch,
            ],
        );
        let mut run = harness.run(&[]);
        let asleep = run.until("a", "asleep", |line| line["state"] == "Sleeping").await;
        put(&harness.state().join("volumes/default").join(claim), "first");
        let turns = asleep["turnsCompleted"].as_i64();
        run.until("a", "awake", |line| line["turnsCompleted"].as_i64() > turns)
            .await;
        run.interrupt().await;
        assert_eq!(run.cause().await, "Interrupted");
    }
}
