//! The heartbeat: when it runs, and that it leaves the agent's own turns and sleep unchanged.

use rstest::rstest;

use super::super::modes::continuous::heartbeat::{HeartbeatSettings, MAX_LAST_BYTES};
use super::tasks::{at_work, mode};
use super::work::wants;
use super::*;
use crate::model_call::CallStep;

fn every(seconds: i64) -> EngineSettings {
    EngineSettings {
        heartbeat: Some(HeartbeatSettings {
            every: SignedDuration::from_secs(seconds),
            prompt: "Is all well?".into(),
        }),
        max_sleep: SignedDuration::from_hours(24),
        ..settings()
    }
}

/// A loop that sleeps for an hour, from `00:00:00` on.
fn asleep(settings: EngineSettings) -> Driver {
    let mut driver = Driver::with_tools(settings);
    driver.answer(calls("yield", r#"{"sleep": 3600}"#));
    assert_eq!(driver.state(), LoopState::Sleeping);
    driver
}

fn beats(driver: &Driver) -> usize {
    let started = driver.notes(RecordKind::CallStarted);
    started.iter().filter(|note| **note == "Heartbeat").count()
}

#[test]
fn a_heartbeat_runs_in_a_sleep_at_its_time_and_the_sleep_ends_when_it_would_have() {
    let mut driver = asleep(every(600));
    let (transcript, until) = (driver.transcript.clone(), driver.engine.view().resumes_at);
    let offered = driver.offered.clone();
    driver.pass(seconds(599));
    assert_eq!((driver.in_flight, beats(&driver)), (None, 0));
    driver.pass(seconds(1));
    assert_eq!((beats(&driver), driver.purpose), (1, CallPurpose::Heartbeat));
    assert_eq!(driver.state(), LoopState::Running);
    assert_eq!(driver.prompt.len(), 2, "its own conversation: {:?}", driver.prompt);
    assert!(driver.observed().ends_with("\n\nIs all well?"), "{}", driver.observed());
    assert_eq!(
        driver.offered, offered,
        "the cache of the provider begins with the tools"
    );
    driver.answer(says("All is well."));
    assert_eq!(driver.transcript, transcript);
    assert_eq!(
        (driver.state(), driver.engine.view().resumes_at),
        (LoopState::Sleeping, until)
    );
    driver.pass(seconds(600));
    assert!(
        driver
            .observed()
            .contains("at the previous heartbeat:\nAll is well.\n\nIs all well?")
    );
    driver.answer(says("Still well."));
    assert_eq!((beats(&driver), driver.transcript.len()), (2, transcript.len()));
    // The agent's own next turn does not contain them.
    let mut woken = driver.clone();
    woken.feed(EngineInput::WakeRequested { token: "w".into() });
    assert_eq!(woken.purpose, CallPurpose::Turn);
    assert!(!serde_json::to_string(&woken.prompt).unwrap().contains("well"));
    let history = driver.journal.iter().flat_map(|record| &record.messages);
    assert!(
        history
            .into_iter()
            .any(|message| matches!(&**message, Message::User { text } if text.contains("Is all well?")))
    );
}

#[test]
fn without_the_field_there_is_no_heartbeat_and_a_removed_one_stops() {
    let mut driver = asleep(settings());
    driver.pass(seconds(3000));
    assert_eq!(beats(&driver), 0);
    let mut driver = asleep(every(600));
    driver.settings.heartbeat = None;
    driver.restart(2);
    driver.pass(seconds(3000));
    assert_eq!(beats(&driver), 0);
}

#[test]
fn the_answer_to_a_request_is_not_that_of_the_last_heartbeat() {
    let mut driver = asleep(every(600));
    driver.pass(seconds(600));
    driver.answer(says("All is well."));
    driver.ask("a");
    assert_eq!(driver.purpose, CallPurpose::Chat);
    driver.answer(says("The price is 4."));
    driver.pass(seconds(600));
    let quoted = "at the previous heartbeat:\nAll is well.\n\nIs all well?";
    assert!(driver.observed().ends_with(quoted), "{}", driver.observed());
}

/// The volume of an Agent that was in mode Task can have a task under way.
#[rstest]
#[case::answered(true)]
#[case::failed(false)]
fn a_task_that_ends_after_a_change_of_the_mode_is_no_heartbeat(#[case] is_answered: bool) {
    let mut driver = at_work(mode());
    driver.answer(wants(&["files__write"]));
    driver.done(1, "written");
    driver.settings = every(600);
    driver.restart(2);
    assert_eq!(driver.purpose, CallPurpose::Turn);
    if is_answered {
        driver.answer(says("The price is 4."));
    } else {
        while driver.notes(RecordKind::TurnFailed).is_empty() {
            if driver.in_flight.is_none() {
                driver.next_timer();
            }
            driver.fail(FailureKind::BadResponse);
        }
    }
    while driver.in_flight.is_none() {
        driver.next_timer();
    }
    assert_eq!(
        (driver.purpose, beats(&driver)),
        (CallPurpose::Turn, 0),
        "its own turn is first"
    );
    driver.answer(calls("yield", r#"{"sleep": 3600}"#));
    driver.pass(seconds(600));
    assert_eq!(beats(&driver), 1);
    assert!(
        !driver.observed().contains("previous heartbeat"),
        "{}",
        driver.observed()
    );
}

#[test]
fn a_turn_under_way_is_finished_first_and_the_next_one_waits_for_the_heartbeat() {
    let mut driver = Driver::with_tools(every(60));
    driver.pass(seconds(90));
    assert_eq!((driver.purpose, beats(&driver)), (CallPurpose::Turn, 0));
    driver.answer(says("done"));
    driver.pass(SignedDuration::from_millis(50));
    assert_eq!(driver.purpose, CallPurpose::Heartbeat);
    driver.pass(seconds(5));
    driver.answer(says("All is well."));
    driver.pass(seconds(1));
    assert_eq!(driver.purpose, CallPurpose::Turn);
    assert!(driver.observed().contains("the loop continues"));
    // The next one is due one interval after the start of this one.
    driver.answer(calls("yield", r#"{"sleep": 3600}"#));
    driver.pass(seconds(53));
    assert_eq!(beats(&driver), 1);
    driver.pass(seconds(2));
    assert_eq!(beats(&driver), 2);
}

#[test]
fn a_sleep_that_ends_in_a_heartbeat_is_followed_by_the_agents_own_turn() {
    let mut driver = asleep(every(600));
    driver.pass(seconds(600));
    driver.pass(seconds(3600));
    assert_eq!(beats(&driver), 1, "one at a time");
    driver.answer(says("All is well."));
    assert_eq!(driver.purpose, CallPurpose::Turn);
    assert!(
        driver.observed().contains("the sleep that you chose is over"),
        "{}",
        driver.observed()
    );
}

#[test]
fn heartbeats_as_long_as_their_interval_leave_every_other_turn_to_the_agent() {
    let mut driver = Driver::with_tools(every(60));
    driver.pass(seconds(60));
    driver.answer(says("done"));
    let mut purposes = Vec::new();
    for _ in 0..6 {
        while driver.in_flight.is_none() {
            driver.next_timer();
        }
        purposes.push(driver.purpose);
        driver.pass(seconds(60));
        driver.answer(says("All is well."));
    }
    let pair = [CallPurpose::Heartbeat, CallPurpose::Turn];
    assert_eq!(purposes, [pair, pair, pair].concat());
}

#[test]
fn the_schedule_continues_over_restarts_and_missed_heartbeats_run_once() {
    let mut driver = asleep(every(600));
    driver.pass(seconds(500));
    driver.restart(2);
    driver.pass(seconds(99));
    assert_eq!(beats(&driver), 0);
    driver.pass(seconds(1));
    assert_eq!(beats(&driver), 1);
    driver.answer(says("All is well."));
    driver.now += seconds(2000);
    driver.restart(3);
    assert_eq!((beats(&driver), driver.purpose), (2, CallPurpose::Heartbeat));
    driver.answer(says("All is well."));
    driver.pass(seconds(500));
    assert_eq!(beats(&driver), 2);
}

#[test]
fn a_shorter_interval_and_a_clock_that_was_set_back_hold_from_now_on() {
    let mut driver = asleep(every(1800));
    driver.settings = every(60);
    driver.restart(2);
    driver.pass(seconds(60));
    assert_eq!(beats(&driver), 1);
    driver.answer(says("All is well."));
    driver.now -= seconds(100_000);
    driver.feed(EngineInput::Timer);
    driver.pass(seconds(60));
    assert_eq!(beats(&driver), 2);
}

#[test]
fn a_pause_delays_the_heartbeat_and_then_it_runs_once() {
    let mut driver = asleep(every(60));
    driver.feed(EngineInput::LinkLost);
    driver.pass(seconds(200));
    assert_eq!((beats(&driver), driver.state()), (0, LoopState::Paused));
    driver.feed(EngineInput::LinkBack);
    assert_eq!(beats(&driver), 1);
    driver.answer(says("All is well."));
    driver.pass(seconds(59));
    assert_eq!(beats(&driver), 1);

    let mut driver = asleep(EngineSettings {
        active_hours: Some(hours("UTC", "00:00", "00:05")),
        ..every(400)
    });
    driver.pass(seconds(1000));
    assert_eq!(
        (beats(&driver), driver.reasons()),
        (0, vec![PauseReason::OutsideActiveHours])
    );
}

#[test]
fn its_tools_run_and_its_conversation_leaves_all_the_same() {
    let mut driver = asleep(every(600));
    let transcript = driver.transcript.clone();
    driver.pass(seconds(600));
    driver.answer(work::wants(&["yield", "mail__send"]));
    assert_eq!(driver.sent.len(), 1);
    let run = driver.sent[0].id;
    driver.feed(EngineInput::ToolFinished {
        run,
        outcome: ToolOutcome::Done { text: "sent".into() },
        artifacts: ResultArtifacts::default(),
    });
    assert_eq!(
        (driver.purpose, driver.in_flight.unwrap().call),
        (CallPurpose::Heartbeat, 2)
    );
    let results: Vec<_> = driver.transcript.iter().rev().take(2).collect();
    assert!(
        format!("{results:?}").contains("a heartbeat sets no pace"),
        "{results:?}"
    );
    driver.answer(says("I told them."));
    assert_eq!(
        (driver.transcript.clone(), driver.state()),
        (transcript, LoopState::Sleeping)
    );
    assert_eq!(driver.engine.view().counts.actions, 1);
}

#[test]
fn a_failed_heartbeat_is_no_failure_of_the_loop_and_the_next_one_runs_at_its_time() {
    let mut driver = asleep(every(600));
    let transcript = driver.transcript.clone();
    for round in 1..=5 {
        driver.pass(seconds(599));
        assert_eq!(beats(&driver), round - 1);
        driver.pass(seconds(1));
        assert_eq!(beats(&driver), round);
        driver.fail(FailureKind::BadResponse);
        assert_eq!((driver.in_flight, driver.reasons()), (None, vec![]));
    }
    assert_eq!(driver.engine.view().consecutive_errors, 0);
    assert_eq!(driver.notes(RecordKind::TurnFailed).len(), beats(&driver));
    assert_eq!(
        (driver.transcript.clone(), driver.state()),
        (transcript, LoopState::Sleeping)
    );
}

#[test]
fn a_restart_in_a_heartbeat_repeats_its_call_and_it_ends_normally() {
    let mut driver = asleep(every(600));
    let transcript = driver.transcript.clone();
    driver.pass(seconds(600));
    let (call, prompt) = (driver.in_flight, driver.prompt.clone());
    driver.restart(2);
    assert_eq!((driver.in_flight, &driver.prompt), (call, &prompt));
    driver.answer(says("All is well."));
    assert_eq!(
        (driver.transcript.clone(), driver.state()),
        (transcript, LoopState::Sleeping)
    );
    assert!(
        driver
            .engine
            .state
            .call
            .step()
            .is_none_or(|step| step == CallStep::Open)
    );
}

#[test]
fn the_next_heartbeat_shows_the_beginning_of_a_long_answer() {
    let mut driver = asleep(every(600));
    driver.pass(seconds(600));
    driver.answer(says(&"ä".repeat(10_000)));
    driver.pass(seconds(600));
    let told = driver.observed().matches('ä').count() * 2;
    assert_eq!(told, MAX_LAST_BYTES);
}

#[test]
fn turns_without_a_sleep_are_counted_as_before() {
    let mut driver = Driver::with_tools(EngineSettings {
        max_consecutive_turns: 2,
        ..every(10)
    });
    driver.pass(seconds(10));
    driver.answer(says("one"));
    driver.pass(SignedDuration::from_millis(10));
    assert_eq!(driver.purpose, CallPurpose::Heartbeat);
    driver.answer(says("All is well."));
    driver.pass(seconds(1));
    assert_eq!(driver.engine.view().consecutive_turns, 1);
    driver.answer(says("two"));
    assert_eq!(driver.reasons(), [PauseReason::MaxConsecutiveTurns]);
}

#[test]
fn a_heartbeat_that_is_larger_than_a_limit_costs_the_agent_no_history() {
    let mut driver = Driver::with_tools(every(600));
    for _ in 0..20 {
        driver.answer(says(&"x".repeat(1000)));
        driver.pass(seconds(1));
    }
    driver.answer(calls("yield", r#"{"sleep": 3600}"#));
    let budget = BudgetState {
        tokens: Some(20_000),
        ..BudgetState::default()
    };
    driver.feed(EngineInput::BudgetChanged { budget });
    driver.pass(seconds(600));
    assert_eq!(driver.purpose, CallPurpose::Heartbeat);
    let before = driver.transcript.clone();
    driver.fail(FailureKind::CallExceedsLimit);
    assert_eq!(driver.reasons(), [PauseReason::CallExceedsLimit]);
    assert!(driver.transcript == before, "messages left");
}
