//! A light model with a rejected key or an exhausted account: it is reported, tried at most once a minute, and holds nothing.

use rstest::rstest;
use serde_json::json;

use super::super::hot_state::FieldSchema;
use super::super::precheck::PreCheckSettings;
use super::super::scoring::ScoreQuestion;
use super::*;
use agentloop_api::hot_state::FieldType;

fn light() -> EngineSettings {
    EngineSettings {
        light_output_tokens: Some(64),
        pre_check: Some(PreCheckSettings {
            prompt: None,
            max_output_tokens: 64,
        }),
        hot_state: vec![FieldSchema {
            name: "rsi".into(),
            kind: FieldType::Number,
            ttl: None,
            max_items: None,
            refresh_tool: None,
        }],
        max_sleep: seconds(10_000),
        ..settings()
    }
}

/// A loop that sleeps for so long.
fn asleep(sleep: i64) -> Driver {
    let mut driver = Driver::started(light());
    driver.answer(calls("yield", &json!({"sleep": sleep}).to_string()));
    assert_eq!(driver.state(), LoopState::Sleeping);
    driver
}

/// An event wants a score. True: a call was sent for it.
fn event(driver: &mut Driver, number: u32) -> bool {
    driver.feed(EngineInput::Score(ScoreQuestion {
        id: format!("uid/{number}/signal/prices/spike"),
        signal: "signal/prices/spike".into(),
        prompt: "How likely is a spike?".into(),
        data: "{}".into(),
    }));
    driver.in_flight.is_some()
}

/// The outcome of the last question is kept.
fn taken(driver: &mut Driver) -> Option<u8> {
    let (id, score) = driver.engine.score_outcome().expect("an outcome");
    let id = id.to_owned();
    driver.feed(EngineInput::ScoreTaken { id });
    score
}

fn reported(driver: &Driver) -> Option<FailureKind> {
    driver.engine.view().light_model.map(|failure| failure.kind)
}

fn refused(kind: FailureKind) -> Driver {
    let mut driver = asleep(9000);
    assert!(event(&mut driver, 0));
    driver.fail(kind);
    assert_eq!(taken(&mut driver), None);
    driver
}

#[rstest]
#[case(FailureKind::AuthenticationFailed)]
#[case(FailureKind::QuotaExceeded)]
fn no_event_sends_a_call_for_a_minute_and_the_next_one_does(#[case] kind: FailureKind) {
    let mut driver = refused(kind);
    assert_eq!((reported(&driver), driver.state()), (Some(kind), LoopState::Sleeping));
    for number in 1..60 {
        driver.pass(seconds(1));
        assert!(!event(&mut driver, number), "after {number} s");
        assert_eq!(taken(&mut driver), None);
    }
    let noted = driver.notes(RecordKind::SignalUnscored);
    assert!(noted.len() == 60 && noted[59].ends_with(kind.as_ref()), "{noted:?}");
    driver.pass(seconds(1));
    assert!(event(&mut driver, 60), "after a minute");
    assert_eq!(reported(&driver), Some(kind), "until a call is answered");
    driver.answer(says(r#"{"score": 7}"#));
    assert_eq!((taken(&mut driver), reported(&driver)), (Some(7), None));
    assert!(event(&mut driver, 61), "at once again");
}

#[rstest]
#[case(FailureKind::BadResponse)]
#[case(FailureKind::ContextExceeded)]
fn a_failure_of_one_call_is_no_outage(#[case] kind: FailureKind) {
    let mut driver = refused(kind);
    assert_eq!(reported(&driver), None);
    assert!(event(&mut driver, 1));
}

#[test]
fn a_longer_wait_of_the_provider_is_kept_and_a_clock_that_was_set_back_does_not_prolong_it() {
    let mut driver = asleep(9000);
    event(&mut driver, 0);
    driver.fail_with(CallFailure {
        retry_after_milliseconds: Some(300_000),
        ..failure(FailureKind::QuotaExceeded)
    });
    taken(&mut driver);
    driver.pass(seconds(299));
    assert!(!event(&mut driver, 1));
    taken(&mut driver);
    driver.now -= SignedDuration::from_hours(24);
    driver.feed(EngineInput::Timer);
    driver.pass(seconds(900));
    assert!(event(&mut driver, 2));
}

#[test]
fn a_restart_and_a_resume_request_allow_a_call_at_once_and_the_outage_stays_reported() {
    for resumes in [false, true] {
        let mut driver = refused(FailureKind::AuthenticationFailed);
        assert!(!event(&mut driver, 1));
        taken(&mut driver);
        if resumes {
            resume(&mut driver, "mended");
        } else {
            driver.restart(2);
            // That it was taken was not journalled.
            taken(&mut driver);
        }
        assert_eq!(reported(&driver), Some(FailureKind::AuthenticationFailed));
        assert!(event(&mut driver, 2));
    }
}

#[test]
fn an_edit_of_the_spec_ends_the_outage_and_a_restart_alone_does_not() {
    for edited in [false, true] {
        let mut driver = refused(FailureKind::AuthenticationFailed);
        driver.settings.spec += u64::from(edited);
        driver.restart(2);
        assert_eq!(reported(&driver).is_none(), edited);
        driver.restart(3);
        assert_eq!(reported(&driver).is_none(), edited);
    }
}

#[rstest]
#[case(FailureKind::BadResponse, true)]
#[case(FailureKind::ContextExceeded, true)]
#[case(FailureKind::Timeout, false)]
#[case(FailureKind::BudgetExhausted, false)]
#[case(FailureKind::LinkLost, false)]
fn a_later_failure_ends_the_outage_if_the_server_accepted_the_key(#[case] kind: FailureKind, #[case] ends: bool) {
    let mut driver = refused(FailureKind::AuthenticationFailed);
    driver.pass(seconds(60));
    assert!(event(&mut driver, 1));
    driver.fail(kind);
    assert_eq!(reported(&driver).is_none(), ends);
}

#[test]
fn an_agent_without_a_light_model_reports_none() {
    let mut driver = refused(FailureKind::AuthenticationFailed);
    driver.settings = settings();
    driver.restart(2);
    assert_eq!(reported(&driver), None);
}

#[test]
fn a_turn_begins_without_the_pre_check_while_the_key_is_rejected() {
    let mut driver = Driver::fresh(light());
    driver.start(1);
    driver.feed(value_of("rsi", json!(55)));
    driver.answer(calls("yield", "nonsense"));
    for (round, calls_made) in [(1, true), (2, false), (3, false), (4, true)] {
        driver.answer(calls("yield", r#"{"sleep": 25}"#));
        driver.feed(value_of("rsi", json!(round)));
        driver.pass(seconds(25));
        let asked = driver.purpose == CallPurpose::Precheck;
        assert_eq!(asked, calls_made, "round {round}");
        if asked {
            driver.fail(FailureKind::AuthenticationFailed);
        }
        assert_eq!(driver.purpose, CallPurpose::Turn, "round {round}");
    }
    assert_eq!(driver.notes(RecordKind::PrecheckFailed), ["AuthenticationFailed"; 4]);
    assert_eq!((driver.engine.view().consecutive_errors, driver.reasons()), (0, vec![]));
}
