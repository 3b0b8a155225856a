//! How runs end, and how the next one continues.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::process::{LocalHarness, agent, script, scripted, various};

fn asleep(line: &Value) -> bool {
    line["state"] == "Sleeping"
}

/// Two turns, and a sleep of an hour.
fn sleeper() -> [Value; 2] {
    let turns = json!([{ "text": "one" }, { "text": "two", "yield": { "sleep": 3600 } }]);
    scripted("a", &turns)
}

#[tokio::test]
async fn an_interrupted_run_drains_and_the_next_one_continues_in_the_same_turn() {
    let mut harness = LocalHarness::new();
    harness.write("all.yaml", &sleeper());
    let mut run = harness.run(&[]);
    let before = run
        .until("a", "asleep", |line| asleep(line) && line["turnsCompleted"] == 2)
        .await;
    let asked = Instant::now();
    run.interrupt().await;
    assert_eq!(run.cause().await, "Interrupted");
    assert!(asked.elapsed() < Duration::from_secs(10));
    assert_eq!(run.agent("a")["state"], "Stopped");
    assert_eq!(harness.left_over(), 0, "the private folder is removed");

    let mut again = harness.run(&[]);
    let after = again.until("a", "asleep", asleep).await;
    for field in ["turn", "turnsCompleted", "tokens", "resumesAt"] {
        assert_eq!(after[field], before[field], "{field}");
    }
    again.interrupt().await;
    again.ended().await;
}

#[tokio::test]
async fn a_call_in_flight_is_cancelled_in_time_and_its_turn_continues_in_the_next_run() {
    let mut harness = LocalHarness::new();
    harness.write(
        "all.yaml",
        &scripted("a", &json!([{ "text": "slow", "delayMilliseconds": 600_000 }])),
    );
    let mut run = harness.run(&[]);
    run.until("a", "in its turn", |line| line["turn"] == 1).await;
    let asked = Instant::now();
    run.interrupt().await;
    assert_eq!(run.cause().await, "Interrupted");
    // The run gives itself nine seconds; the rest is for a machine that stalls.
    assert!(asked.elapsed() < Duration::from_secs(14), "{:?}", asked.elapsed());

    harness.write(
        "all.yaml",
        &scripted("a", &json!([{ "text": "fast", "yield": { "mode": "shutdown" } }])),
    );
    let mut again = harness.run(&[]);
    assert_eq!(again.cause().await, "NothingRuns");
    assert_eq!(
        (&again.agent("a")["turn"], &again.agent("a")["turnsCompleted"]),
        (&json!(1), &json!(1))
    );
}

#[tokio::test]
async fn a_second_interrupt_cuts_at_once_and_leaves_nothing_private_behind() {
    let mut harness = LocalHarness::new();
    harness.write(
        "all.yaml",
        &scripted("a", &json!([{ "text": "slow", "delayMilliseconds": 600_000 }])),
    );
    let mut run = harness.run(&[]);
    run.until("a", "in its turn", |line| line["turn"] == 1).await;
    run.interrupt().await;
    // Before the first one has an effect, the second would count as the same.
    run.until("a", "stopping", |line| line["state"] == "Stopping").await;
    run.interrupt().await;
    assert_eq!(run.ended().await.code(), Some(1), "a run that drains ends with 0");
    assert!(run.lines().iter().all(|line| line["type"] != "end"), "{}", run.out());
    assert_eq!(harness.left_over(), 0);
}

#[tokio::test]
async fn a_run_lasts_for_its_configured_duration() {
    let mut harness = LocalHarness::new();
    harness.write("all.yaml", &sleeper());
    let started = Instant::now();
    let mut run = harness.run(&["--duration", "3"]);
    assert_eq!(run.cause().await, "Duration");
    let took = started.elapsed();
    assert!(
        took >= Duration::from_secs(3) && took < Duration::from_secs(30),
        "{took:?}"
    );
}

#[tokio::test]
async fn a_run_ends_when_no_loop_runs_and_not_while_one_sleeps() {
    let mut harness = LocalHarness::new();
    let one = scripted("one", &json!([{ "yield": { "mode": "shutdown" } }]));
    let two = scripted(
        "two",
        &json!([{ "yield": { "sleep": 6 } }, { "yield": { "mode": "shutdown" } }]),
    );
    harness.write("all.yaml", &[one, two].concat());
    let started = Instant::now();
    let mut run = harness.run(&[]);
    assert_eq!(run.cause().await, "NothingRuns");
    assert!(started.elapsed() >= Duration::from_secs(6));
    for (name, turns) in [("one", 1), ("two", 2)] {
        let line = run.agent(name);
        assert_eq!(
            (&line["outcome"], &line["turnsCompleted"]),
            (&json!("Completed"), &json!(turns))
        );
    }

    // What has ended stays ended.
    let mut again = harness.run(&[]);
    assert_eq!(again.cause().await, "NothingRuns");
    assert_eq!(again.agent("two")["turnsCompleted"], 2);
}

#[tokio::test]
async fn a_failed_loop_causes_exit_code_1_and_other_ends_cause_0() {
    let mut harness = LocalHarness::new();
    let same: Vec<Value> = (0..100).map(|_| json!({ "text": "the same" })).collect();
    let mut looping = agent("looping", &json!({ "continuous": { "maxSleepSeconds": 1 } }));
    looping["spec"]["guardrails"]["loopDetection"]["mode"] = json!("Enforce");
    let done = scripted("done", &json!([{ "yield": { "mode": "shutdown" } }]));
    harness.write(
        "all.yaml",
        &[&[script("looping", &json!(same)), looping][..], &done].concat(),
    );
    let mut run = harness.run(&[]);
    assert_eq!(run.ended().await.code(), Some(1), "{}", run.err());
    assert_eq!(run.agent("looping")["outcome"], "Failed");
    assert!(
        run.err().contains("Agent looping: its loop ended with outcome Failed"),
        "{}",
        run.err()
    );
    assert!(!run.err().contains("Agent done"), "{}", run.err());
}

#[tokio::test]
async fn a_suspended_agent_does_not_run_and_ends_no_run_of_others() {
    let mut harness = LocalHarness::new();
    let [script, mut agent] = scripted("a", &json!([{ "text": "one" }]));
    agent["spec"]["suspend"] = json!(true);
    let other = scripted("b", &json!([{ "yield": { "mode": "shutdown" } }]));
    harness.write("all.yaml", &[&[script, agent][..], &other].concat());
    let mut run = harness.run(&[]);
    assert_eq!(run.cause().await, "NothingRuns");
    assert_eq!(
        (&run.agent("a")["turn"], &run.agent("b")["outcome"]),
        (&json!(0), &json!("Completed"))
    );
}

#[tokio::test]
async fn a_state_serves_one_run_at_a_time() {
    let mut harness = LocalHarness::new();
    harness.write("all.yaml", &sleeper());
    let mut first = harness.run(&[]);
    first.until("a", "asleep", asleep).await;
    let mut second = harness.run(&[]);
    assert_eq!(second.ended().await.code(), Some(1));
    assert!(second.err().contains("in use by another run"), "{}", second.err());
    first.interrupt().await;
    assert_eq!(first.cause().await, "Interrupted");
}

#[tokio::test]
async fn nothing_listens_but_on_loopback() {
    let mut harness = LocalHarness::new();
    harness.write("all.yaml", &sleeper());
    let mut run = harness.run(&[]);
    run.until("a", "asleep", asleep).await;
    let proc = std::path::PathBuf::from(format!("/proc/{}", run.pid()));
    let sockets: Vec<String> = std::fs::read_dir(proc.join("fd"))
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok())
        .filter_map(|link| Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect();
    let mut listening = Vec::new();
    for table in ["net/tcp", "net/tcp6", "net/udp", "net/udp6"] {
        let text = std::fs::read_to_string(proc.join(table)).unwrap_or_default();
        for line in text.lines().skip(1) {
            let cells: Vec<&str> = line.split_whitespace().collect();
            // State 0A is LISTEN; a UDP socket that is open is 07.
            if ["0A", "07"].contains(&cells[3]) && sockets.contains(&cells[9].to_owned()) {
                listening.push(cells[1].to_owned());
            }
        }
    }
    assert_eq!(listening.len(), 1, "{listening:?}");
    assert!(listening[0].starts_with("0100007F:"), "{listening:?}");
    run.interrupt().await;
    assert_eq!(run.cause().await, "Interrupted");
}

#[tokio::test]
async fn after_sigkill_the_next_run_continues_and_removes_private_files() {
    let mut harness = LocalHarness::new();
    harness.write("all.yaml", &sleeper());
    let mut run = harness.run(&[]);
    let before = run
        .until("a", "asleep", |line| asleep(line) && line["turnsCompleted"] == 2)
        .await;
    run.kill().await;
    assert_eq!(harness.left_over(), 1);
    let mut again = harness.run(&[]);
    let after = again.until("a", "asleep", asleep).await;
    assert_eq!(harness.left_over(), 1, "that of the run at hand");
    for field in ["turn", "tokens", "resumesAt"] {
        assert_eq!(after[field], before[field], "{field}");
    }
    again.interrupt().await;
    assert_eq!(again.cause().await, "Interrupted");
    assert_eq!(harness.left_over(), 0);
}

#[tokio::test]
async fn a_run_ends_when_its_output_is_closed() {
    let mut harness = LocalHarness::new();
    harness.write(
        "all.yaml",
        &scripted("a", &various(&json!({ "delayMilliseconds": 100 }))),
    );
    let mut run = harness.unread();
    assert_eq!(run.ended().await.code(), Some(1));
    assert_eq!(harness.left_over(), 0);
}
