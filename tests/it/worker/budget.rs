//! Calls that a budget refuses: the loop pauses with its reason, and the same call continues when there is room.

use agentloop::api::amount::LimitAmounts;
use agentloop::api::failure::{CallFailure, FailureKind};
use agentloop::api::status::{LoopState, PauseReason};
use agentloop::link::messages::{AccountRemaining, AccountTerms, BudgetTerms, LimitName};
use jiff::{SignedDuration, Timestamp};

use super::gateway::{Gateway, Log, Reply, answer, sleep};
use super::process::WorkerHarness;
use super::{is, reasons};

fn refusal(kind: FailureKind, resumes_at: Option<Timestamp>) -> CallFailure {
    CallFailure {
        kind,
        message: "add to spec.topUps".into(),
        retry_after_milliseconds: None,
        resumes_at,
    }
}

fn refused(kind: FailureKind, resumes_at: Option<Timestamp>) -> Reply {
    Reply::Failure(refusal(kind, resumes_at))
}

fn in_an_hour() -> Timestamp {
    Timestamp::now() + SignedDuration::from_hours(1)
}

fn terms(revision: i64, held: Option<CallFailure>) -> BudgetTerms {
    BudgetTerms {
        cut: held.is_some(),
        accounts: vec![AccountTerms {
            account: "uid".into(),
            limit: LimitName::Budget("team".into()),
            limits: LimitAmounts::default(),
            per_agent: LimitAmounts::default(),
            recall: false,
            held,
            revision,
            left: AccountRemaining::default(),
        }],
        ..BudgetTerms::default()
    }
}

fn tell(gateway: &Gateway, terms: BudgetTerms) {
    gateway.tell(|event| event.directives.budget = Some(terms));
}

/// A worker whose first turn is done and whose second was refused.
async fn paused(
    harness: &mut WorkerHarness,
    kind: FailureKind,
    until: Option<Timestamp>,
) -> (Gateway, super::process::Worker, Log) {
    let gateway = Gateway::start(
        harness.dir.path(),
        vec![answer("one", &[]), refused(kind, until), sleep(3600)],
    );
    tell(&gateway, terms(1, None));
    let worker = harness.worker(&gateway);
    let log = gateway
        .until("paused", |log| is(log, LoopState::Paused) && log.acks.len() == 2)
        .await;
    assert_eq!(log.call_ids(), ["t1c1a1", "t2c1a1"]);
    (gateway, worker, log)
}

/// The second turn's call was made again, with the same prompt, and the loop continued with its answer.
async fn assert_progress(gateway: &Gateway, attempt: &str) {
    let log = gateway
        .until("asleep", |log| {
            is(log, LoopState::Sleeping) && log.last().counts.turns == 2
        })
        .await;
    let calls: Vec<_> = log.calls.iter().filter(|(id, _)| id.starts_with("t2c1")).collect();
    assert_eq!(calls.last().unwrap().0, attempt);
    assert_eq!(calls[0].1, calls.last().unwrap().1, "the same prompt, byte for byte");
    assert_eq!((log.last().consecutive_errors, log.last().last_error), (0, None));
    assert_eq!(log.last().turn, 2);
}

#[tokio::test]
async fn a_refused_call_waits_for_its_moment_also_over_a_sigkill_and_is_made_then() {
    let mut harness = WorkerHarness::new();
    let gateway = Gateway::start(harness.dir.path(), vec![answer("one", &[]), Reply::Hang, sleep(3600)]);
    tell(&gateway, terms(1, None));
    let worker = harness.worker(&gateway);
    gateway.until("the second call", |log| log.calls.len() == 2).await;
    // Counted from here, so that only the start of the second worker lies before it.
    let moment = Timestamp::now() + SignedDuration::from_secs(15);
    gateway.keep("t2c1a1", refused(FailureKind::BudgetExhausted, Some(moment)));
    let log = gateway
        .until("paused", |log| is(log, LoopState::Paused) && log.acks.len() == 2)
        .await;
    assert_eq!(log.call_ids(), ["t1c1a1", "t2c1a1"]);
    let report = log.last();
    assert_eq!(reasons(&report), [PauseReason::BudgetExhausted]);
    assert_eq!(report.reasons[0].until, Some(moment));
    assert_eq!(report.reasons[0].message, "add to spec.topUps");
    assert_eq!(report.resumes_at, Some(moment));
    worker.kill().await;
    let reports = log.reports.len();
    let _worker = harness.worker(&gateway);
    let log = gateway
        .until("paused again", |log| {
            log.reports.len() > reports && is(log, LoopState::Paused)
        })
        .await;
    assert_eq!(log.last().resumes_at, Some(moment));
    assert_eq!(log.calls.len(), 2, "the pause is in the journal");
    let log = gateway.until("the same call", |log| log.calls.len() == 3).await;
    assert!(Timestamp::now() >= moment);
    assert_eq!(log.call_ids()[2], "t2c1a2");
    assert_progress(&gateway, "t2c1a2").await;
    harness.assert_discreet();
}

#[tokio::test]
async fn a_changed_budget_retries_the_refused_call_at_once() {
    let mut harness = WorkerHarness::new();
    let (gateway, _worker, _) = paused(&mut harness, FailureKind::TotalTokens, None).await;
    // The same again is no change.
    tell(&gateway, terms(1, None));
    gateway.tell(|event| event.directives.wake = Some("look".into()));
    gateway
        .until("the request", |log| log.last().handled.wake.is_some())
        .await;
    assert_eq!(gateway.log().calls.len(), 2);
    tell(&gateway, terms(2, None));
    assert_progress(&gateway, "t2c1a2").await;
}

#[tokio::test]
async fn the_next_worker_retries_a_call_whose_budget_changed_in_between() {
    let mut harness = WorkerHarness::new();
    let (gateway, worker, _) = paused(&mut harness, FailureKind::CallExceedsLimit, None).await;
    worker.kill().await;
    tell(&gateway, terms(2, None));
    harness.epoch = 2;
    let _worker = harness.worker(&gateway);
    assert_progress(&gateway, "t2c1a2").await;
}

#[tokio::test]
async fn a_refusal_that_needs_a_person_waits_for_a_resume_and_for_nothing_else() {
    for kind in [FailureKind::BoundViolated, FailureKind::LoopDetected] {
        let mut harness = WorkerHarness::new();
        let (gateway, _worker, _) = paused(&mut harness, kind, Some(in_an_hour())).await;
        tell(&gateway, terms(2, None));
        gateway.tell(|event| event.directives.wake = Some("look".into()));
        let log = gateway
            .until("the request", |log| log.last().handled.wake.is_some())
            .await;
        assert_eq!((log.calls.len(), log.last().resumes_at), (2, None));
        gateway.tell(|event| event.directives.resume = Some("looked".into()));
        assert_progress(&gateway, "t2c1a2").await;
    }
}

#[tokio::test]
async fn a_stopping_budget_cancels_the_call_in_flight_and_the_pod_continues_after_a_top_up() {
    let mut harness = WorkerHarness::new();
    let gateway = Gateway::start(harness.dir.path(), vec![answer("one", &[])]);
    tell(&gateway, terms(1, None));
    let mut worker = harness.worker(&gateway);
    gateway.until("the call", |log| log.calls.len() == 2).await;
    tell(&gateway, terms(2, Some(refusal(FailureKind::BudgetExhausted, None))));
    let log = gateway.until("stopped", |log| is(log, LoopState::Stopped)).await;
    assert_eq!(reasons(&log.last()), [PauseReason::BudgetExhausted]);
    assert_eq!(log.last().reasons[0].message, "add to spec.topUps");
    gateway.until("the cut", |log| log.cancels == ["t2c1a1"]).await;
    assert!(worker.is_running());
    gateway.keep("t2c1a2", sleep(3600));
    tell(&gateway, terms(3, None));
    assert_progress(&gateway, "t2c1a2").await;
}
