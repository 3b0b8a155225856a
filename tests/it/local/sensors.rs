//! Sensors in a run without a cluster.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::process::{LocalHarness, Run, agent, script, scripted};
use super::sources::{until, updates};

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
    // Less than the two minutes in which a later tick would end it.
    let deadline = Instant::now() + Duration::from_secs(90);
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

/// Whether a turn was completed after the last of this many events of the Sensor.
fn has_turn_after(run: &Run, events: usize) -> Option<()> {
    let lines = run.lines().into_iter();
    let mut names = lines.filter_map(|line| line["event"].as_str().map(str::to_owned));
    for _ in 0..events {
        names.find(|name| name == "autonomy:sensor_updated")?;
    }
    names.find(|name| name == "autonomy:turn_completed").map(drop)
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
    for (file, before, all) in [("second", 1, 2), ("third", 0, 3)] {
        let mut run = harness.run(&[&flags[..], &["--events"]].concat());
        // In the first run, the file that was there.
        until(&run, "told of it", |run| (updates(run) == before).then_some(())).await;
        run.until("reader", "asleep", |line| line["state"] == "Sleeping").await;
        put(&folder, file);
        until(&run, "awake", |run| has_turn_after(run, before + 1)).await;
        run.interrupt().await;
        assert_eq!(run.cause().await, "Interrupted");
        assert_eq!(told(&harness), all, "{}", run.err());
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
