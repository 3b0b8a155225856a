//! Tests of the worker: real processes against a small gateway.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod budget;
mod calls;
mod deliveries;
mod disk;
mod gateway;
mod goals;
mod memory;
mod precheck;
pub mod process;
mod restarts;
mod scoring;
mod tasks;
mod text;
mod tools;

use std::ffi::OsStr;
use std::time::{Duration, Instant};

use agentloop::api::status::{LoopOutcome, LoopState, PauseReason};
use agentloop::link::messages::LoopReport;
use serde_json::{Value, json};

pub use gateway::{Gateway, answer};
use gateway::{Log, Reply, sleep};
use process::{CANARY, WorkerHarness};

fn is(log: &Log, state: LoopState) -> bool {
    log.last().state == state
}

fn reasons(report: &LoopReport) -> Vec<PauseReason> {
    report.reasons.iter().map(|held| held.reason).collect()
}

fn roles(body: &Value) -> Vec<&str> {
    let messages = body["messages"].as_array().unwrap();
    messages
        .iter()
        .map(|message| message["role"].as_str().unwrap())
        .collect()
}

/// A worker that has turned twice and sleeps.
async fn asleep(harness: &mut WorkerHarness) -> (Gateway, process::Worker, Log) {
    let chunks = vec![
        json!({"choices": [{"index": 0, "delta": {"content": format!("think {CANARY}")}}]}),
        json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}),
    ];
    let gateway = Gateway::start(harness.dir.path(), vec![Reply::Stream(chunks), sleep(3600)]);
    let worker = harness.worker(&gateway);
    let log = gateway
        .until("asleep", |log| is(log, LoopState::Sleeping) && log.acks.len() == 2)
        .await;
    (gateway, worker, log)
}

#[tokio::test]
async fn a_loop_turns_sleeps_wakes_on_a_directive_and_drains_on_sigterm() {
    let mut harness = WorkerHarness::new();
    let (gateway, mut worker, log) = asleep(&mut harness).await;
    assert_eq!(log.call_ids(), ["t1c1a1", "t2c1a1"]);
    assert_eq!(log.sorted_acks(), ["t1c1a1", "t2c1a1"]);
    let request = &log.calls[1].1;
    assert_eq!(roles(request), ["system", "user", "assistant", "user"]);
    assert_eq!(request["messages"][2]["content"], format!("think {CANARY}"));
    assert!(
        request["messages"][0]["content"]
            .as_str()
            .unwrap()
            .starts_with(&format!("Be {CANARY}."))
    );
    assert_eq!(
        (request["model"].clone(), request["stream"].clone()),
        (json!("m"), json!(true))
    );
    assert!(request.get("max_tokens").is_none());
    assert_eq!((log.last().turn, log.last().counts.turns), (2, 2));

    gateway.tell(|event| event.directives.wake = Some("one".into()));
    let log = gateway.until("the third call", |log| log.calls.len() == 3).await;
    assert_eq!(log.call_ids()[2], "t3c1a1");
    gateway.keep("t3c1a1", sleep(60));
    let log = gateway
        .until("asleep again", |log| {
            is(log, LoopState::Sleeping) && log.last().turn == 3
        })
        .await;
    assert_eq!(log.last().handled.wake.as_deref(), Some("one"));

    worker.terminate().await;
    assert!(worker.ended().await.success());
    assert_eq!(gateway.log().last().state, LoopState::Stopped);
    harness.assert_discreet();
    let reports = serde_json::to_string(&gateway.log().reports).unwrap();
    assert!(!reports.contains(CANARY));
}

#[tokio::test]
async fn the_journal_shows_on_stdout_line_by_line_without_any_text() {
    let mut harness = WorkerHarness::new();
    let (_gateway, mut worker, _) = asleep(&mut harness).await;
    worker.terminate().await;
    worker.ended().await;
    let output = worker.output();
    let lines: Vec<Value> = output.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let kinds: Vec<&str> = lines.iter().filter_map(|line| line["kind"].as_str()).collect();
    assert_eq!(kinds.first(), Some(&"Started"));
    let answered = lines.iter().find(|line| line["kind"] == "CallAnswered").unwrap();
    assert_eq!((&answered["turn"], &answered["call"]), (&json!(1), &json!("t1c1a1")));
    let in_file = harness.query("SELECT count(*) FROM journal");
    assert_eq!(i64::try_from(kinds.len()).unwrap(), in_file);
    harness.assert_discreet();
}

#[tokio::test]
async fn the_history_of_a_running_worker_is_exported_from_a_copy_of_its_journal() {
    let mut harness = WorkerHarness::new();
    let (_gateway, mut worker, _) = asleep(&mut harness).await;
    let agentloop = |args: &[&OsStr]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_agentloop"));
        command.args(args).output().unwrap()
    };
    let copied = agentloop(&["journal".as_ref(), "--journal-dir".as_ref(), harness.journal.as_ref()]);
    let copy = harness.dir.path().join("copy.sqlite");
    std::fs::write(&copy, copied.stdout).unwrap();
    let exported = agentloop(&["history".as_ref(), copy.as_ref()]);
    assert!(exported.status.success(), "{exported:?}");
    let text = String::from_utf8(exported.stdout).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let executions: Vec<Value> = lines
        .iter()
        .filter(|line| line["record"] == "execution")
        .map(|line| json!([line["turn"], line["final_status"], line["state_snapshot"]["end"]]))
        .collect();
    assert_eq!(
        executions,
        [json!([1, "success", "continue"]), json!([2, "success", "sleep"])]
    );
    let steps = lines.iter().filter(|line| line["record"] == "step");
    let texts: Vec<&Value> = steps.map(|line| &line["reasoning"]).collect();
    assert_eq!(texts[0], &json!(format!("think {CANARY}")));
    assert!(worker.is_running());
    // The journal itself is the worker's.
    let refused = agentloop(&["history".as_ref(), harness.journal.join("journal.sqlite").as_ref()]);
    let words = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(words.contains("`agentloop journal` has written"), "{words}");
}

#[tokio::test]
async fn after_sigkill_in_a_sleep_transcript_totals_and_deadline_are_intact() {
    let mut harness = WorkerHarness::new();
    let (gateway, worker, before) = asleep(&mut harness).await;
    worker.kill().await;
    harness.epoch = 2;
    let reports = before.reports.len();
    let mut worker = harness.worker(&gateway);
    let after = gateway
        .until("asleep again", |log| {
            log.reports.len() > reports && is(log, LoopState::Sleeping)
        })
        .await;
    assert_eq!(after.last().resumes_at, before.last().resumes_at);
    assert_eq!((after.last().turn, after.last().counts.turns), (2, 2));
    assert_eq!(after.calls.len(), 2, "a sleep makes no call");

    gateway.tell(|event| event.directives.wake = Some("one".into()));
    let log = gateway.until("the third call", |log| log.calls.len() == 3).await;
    let request = &log.calls[2].1;
    assert_eq!(
        roles(request),
        ["system", "user", "assistant", "user", "assistant", "tool", "user"]
    );
    let (old, new) = (&before.calls[1].1["messages"], &request["messages"]);
    assert_eq!(old.as_array().unwrap()[..], new.as_array().unwrap()[..4]);
    worker.terminate().await;
    worker.ended().await;
    harness.assert_discreet();
}

#[tokio::test]
async fn after_sigkill_during_a_call_the_same_call_is_requested_again() {
    let mut harness = WorkerHarness::new();
    let gateway = Gateway::start(harness.dir.path(), vec![]);
    let worker = harness.worker(&gateway);
    gateway.until("the call", |log| log.calls.len() == 1).await;
    worker.kill().await;
    gateway.keep("t1c1a1", sleep(3600));
    let _worker = harness.worker(&gateway);
    let log = gateway.until("asleep", |log| is(log, LoopState::Sleeping)).await;
    assert_eq!(log.call_ids(), ["t1c1a1", "t1c1a1"]);
    assert_eq!(log.calls[0].1, log.calls[1].1, "the same prompt, byte for byte");
    assert_eq!(log.last().counts.turns, 1);
}

#[tokio::test]
async fn suspend_cuts_the_call_at_once_and_the_process_idles_until_sigterm() {
    let mut harness = WorkerHarness::new();
    let gateway = Gateway::start(harness.dir.path(), vec![]);
    let mut worker = harness.worker(&gateway);
    gateway.until("the call", |log| log.calls.len() == 1).await;
    let asked = Instant::now();
    gateway.tell(|event| event.directives.suspend = true);
    gateway.until("the cut", |log| log.cancels == ["t1c1a1"]).await;
    let took = asked.elapsed();
    // Pushed: without it, the worker would open its stream again after 15 s, and look at its clocks after 30 s.
    assert!(took < Duration::from_secs(8), "{took:?}");
    let log = gateway.until("stopped", |log| is(log, LoopState::Stopped)).await;
    assert_eq!(reasons(&log.last()), [PauseReason::SuspendedBySpec]);
    assert!(worker.is_running());
    worker.terminate().await;
    assert!(worker.ended().await.success());
    assert_eq!(gateway.log().calls.len(), 1);
}

#[tokio::test]
async fn a_worker_that_starts_with_a_pending_stop_makes_no_call_and_reports_the_end() {
    let mut harness = WorkerHarness::new();
    let gateway = Gateway::start(harness.dir.path(), vec![]);
    gateway.tell(|event| event.directives.stop = Some("monday".into()));
    let mut worker = harness.worker(&gateway);
    let log = gateway
        .until("the end", |log| !log.reports.is_empty() && log.last().outcome.is_some())
        .await;
    assert_eq!(log.last().outcome, Some(LoopOutcome::Cancelled));
    assert_eq!(log.last().handled.stop.as_deref(), Some("monday"));
    worker.kill().await;

    // That was not reported, and another pod runs the loop.
    gateway.set_epoch(9);
    worker = harness.worker(&gateway);
    let reports = log.reports.len();
    let log = gateway
        .until("the same end", |log| {
            log.reports.len() > reports && log.last().outcome.is_some()
        })
        .await;
    assert_eq!(log.last().outcome, Some(LoopOutcome::Cancelled));
    assert_eq!(gateway.log().calls.len(), 0);
    worker.terminate().await;
    assert!(worker.ended().await.success());
}

#[tokio::test]
async fn a_lifted_suspension_ends_the_process_and_the_next_process_continues() {
    let mut harness = WorkerHarness::new();
    let gateway = Gateway::start(harness.dir.path(), vec![]);
    gateway.tell(|event| event.directives.suspend = true);
    let mut worker = harness.worker(&gateway);
    let log = gateway
        .until("stopped", |log| !log.reports.is_empty() && is(log, LoopState::Stopped))
        .await;
    assert!(
        log.calls.is_empty(),
        "a loop that is to be suspended makes no call first"
    );
    gateway.tell(|event| event.directives.suspend = false);
    assert!(worker.ended().await.success());
    let _worker = harness.worker(&gateway);
    gateway.until("running", |log| is(log, LoopState::Running)).await;
    gateway.until("the call", |log| !log.calls.is_empty()).await;
}

#[tokio::test]
async fn a_fenced_worker_cuts_its_call_and_ends() {
    let mut harness = WorkerHarness::new();
    let gateway = Gateway::start(harness.dir.path(), vec![]);
    let mut worker = harness.worker(&gateway);
    gateway.until("the call", |log| log.calls.len() == 1).await;
    gateway.tell(|event| event.fenced = true);
    assert!(worker.ended().await.success());
    assert_eq!(gateway.log().cancels, ["t1c1a1"]);
}

#[tokio::test]
async fn on_sigterm_the_call_in_flight_completes_and_its_answer_is_journalled() {
    let mut harness = WorkerHarness::new();
    harness.drain_seconds = 20;
    let gateway = Gateway::start(harness.dir.path(), vec![]);
    let mut worker = harness.worker(&gateway);
    gateway.until("the call", |log| log.calls.len() == 1).await;
    worker.terminate().await;
    gateway.until("stopping", |log| is(log, LoopState::Stopping)).await;
    gateway.keep("t1c1a1", sleep(3600));
    assert!(worker.ended().await.success());
    assert!(gateway.log().cancels.is_empty());
    assert_eq!(gateway.log().acks, ["t1c1a1"]);
    let answers = harness.query("SELECT count(*) FROM messages WHERE json LIKE '%\"role\":\"assistant\"%'");
    assert_eq!(answers, 1);
}

#[tokio::test]
async fn sigterm_cuts_the_call_in_flight_when_the_drain_time_is_over_and_not_before() {
    let mut harness = WorkerHarness::new();
    let gateway = Gateway::start(harness.dir.path(), vec![]);
    let mut worker = harness.worker(&gateway);
    gateway.until("the call", |log| log.calls.len() == 1).await;
    let asked = Instant::now();
    worker.terminate().await;
    assert!(worker.ended().await.success());
    assert!(asked.elapsed() >= Duration::from_secs(1), "{:?}", asked.elapsed());
    assert_eq!(gateway.log().cancels, ["t1c1a1"]);
}

#[tokio::test]
async fn sigterm_ends_a_worker_that_still_waits_for_its_gateway() {
    let mut harness = WorkerHarness::new();
    let mut gateway = Gateway::start(harness.dir.path(), vec![]);
    gateway.down();
    let mut worker = harness.worker(&gateway);
    while !worker.output().contains("failed to get the session") {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    worker.terminate().await;
    assert!(worker.ended().await.success());
}

#[tokio::test]
async fn the_run_lease_pauses_the_loop_at_60_s_and_contact_brings_it_back() {
    let mut harness = WorkerHarness::new();
    let gateway = Gateway::start(harness.dir.path(), vec![]);
    let _worker = harness.worker(&gateway);
    gateway.until("the call", |log| log.calls.len() == 1).await;
    let said = Instant::now();
    gateway.tell(|event| event.link_age_milliseconds = 58_000);
    let log = gateway.until("paused", |log| is(log, LoopState::Paused)).await;
    assert!(said.elapsed() >= Duration::from_millis(1_900), "{:?}", said.elapsed());
    assert_eq!(reasons(&log.last()), [PauseReason::LinkLost]);
    // The call that was sent before may end; the next one waits.
    gateway.keep("t1c1a1", answer("done", &[]));
    let log = gateway
        .until("the end of the turn", |log| log.last().counts.turns == 1)
        .await;
    assert_eq!((log.last().state, log.calls.len()), (LoopState::Paused, 1));
    gateway.tell(|event| event.link_age_milliseconds = 0);
    let log = gateway.until("the next call", |log| log.calls.len() == 2).await;
    assert_eq!(log.call_ids()[1], "t2c1a1");
}

#[tokio::test]
async fn a_worker_that_starts_without_contact_makes_no_call_until_there_is_some() {
    let mut harness = WorkerHarness::new();
    let gateway = Gateway::start(harness.dir.path(), vec![]);
    gateway.tell(|event| event.link_age_milliseconds = 60_000);
    let mut worker = harness.worker(&gateway);
    gateway.until("the events", |log| log.listeners == 1).await;
    assert!(
        tokio::time::timeout(Duration::from_millis(300), worker.wait())
            .await
            .is_err()
    );
    assert!(gateway.log().calls.is_empty());
    gateway.tell(|event| event.link_age_milliseconds = 40_000);
    gateway.until("the call", |log| log.calls.len() == 1).await;
}

#[tokio::test]
async fn a_second_worker_on_the_same_journal_exits_with_a_message_and_the_first_continues() {
    let mut harness = WorkerHarness::new();
    let (gateway, mut first, _) = asleep(&mut harness).await;
    let mut second = harness.worker(&gateway);
    assert!(!second.ended().await.success());
    assert!(
        second.output().contains("another worker has locked the journal"),
        "{}",
        second.output()
    );
    assert!(first.is_running());
}

#[tokio::test]
async fn a_pod_with_an_older_epoch_exits_with_a_message() {
    let mut harness = WorkerHarness::new();
    harness.epoch = 3;
    let (gateway, worker, _) = asleep(&mut harness).await;
    worker.kill().await;
    harness.epoch = 2;
    let mut older = harness.worker(&gateway);
    assert!(!older.ended().await.success());
    assert!(
        older.output().contains("pod pod-3 with epoch 3 has taken over"),
        "{}",
        older.output()
    );
}

#[tokio::test]
async fn a_damaged_journal_ends_the_worker_with_a_message_in_its_log_and_in_the_report() {
    let mut harness = WorkerHarness::new();
    let (gateway, mut worker, _) = asleep(&mut harness).await;
    worker.terminate().await;
    worker.ended().await;
    let file = harness.journal.join("journal.sqlite");
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[..16].fill(0xff);
    std::fs::write(&file, bytes).unwrap();
    let mut next = harness.worker(&gateway);
    assert!(!next.ended().await.success());
    assert!(
        next.output().contains("journal.sqlite is corrupted"),
        "{}",
        next.output()
    );
    let error = gateway.log().last().last_error.unwrap();
    assert_eq!(error.kind, "JournalCorrupted");
    assert!(error.message.contains("restore the file from a backup"));
    harness.assert_discreet();
}
