//! The messages of pauses and detected loops, and the errors of the engine, as users read them.

use agentloop_texts::TextRows;
use strum::IntoEnumIterator;

use super::rates::limit;
use super::work::wants;
use super::*;
use crate::guardrails::active_hours::ActiveHoursError;
use crate::hot_state::FieldWriteError;
use agentloop_api::agent::LimitedResource;
use agentloop_api::hot_state::FieldType;

fn with(change: impl FnOnce(&mut EngineSettings)) -> Driver {
    let mut settings = settings();
    change(&mut settings);
    Driver::with_tools(settings)
}

/// Adds what holds the loop now, unless it differs from an earlier row in numbers only.
fn note(rows: &mut TextRows, driver: &Driver) {
    let view = driver.engine.view();
    let held = view.reasons.into_iter();
    let mut found: TextRows = held.map(|held| text!("Pauses", held.reason, held.message)).collect();
    let detected = view.detected.into_iter();
    found.extend(detected.map(|found| text!("Detected loops", found.sign.as_ref(), found.message)));
    let words = |row: &(String, String, String)| {
        let text = row.2.replace(|letter: char| letter.is_ascii_digit(), "");
        (row.0.clone(), row.1.clone(), text)
    };
    for row in found {
        if !rows.iter().any(|known| words(known) == words(&row)) {
            rows.push(row);
        }
    }
}

/// Feeds a loop until it has had this many inputs, and adds what held it.
fn drive(rows: &mut TextRows, mut driver: Driver, inputs: usize, feed: impl Fn(&mut Driver)) {
    note(rows, &driver);
    for _ in 0..inputs {
        if driver.in_flight.is_some() {
            feed(&mut driver);
        } else if driver.timer.is_some() {
            driver.next_timer();
        }
        note(rows, &driver);
    }
}

fn acts(driver: &mut Driver, name: &str) {
    driver.answer(wants(&[name]));
    if !driver.running().is_empty() {
        driver.done(1, "the same");
    }
}

fn pauses(rows: &mut TextRows) {
    for kind in FailureKind::iter() {
        let failure = CallFailure {
            message: "<message of the gateway>".into(),
            ..failure(kind)
        };
        drive(rows, with(|_| {}), 12, |driver| {
            driver.fail_with(failure.clone());
        });
    }
    drive(rows, with(|_| {}), 4, Driver::refused_turn);
    drive(
        rows,
        with(|settings| settings.max_consecutive_turns = 2),
        4,
        Driver::turn,
    );
    let acting = |driver: &mut Driver| acts(driver, "files__write");
    drive(rows, with(|settings| settings.actions_per_minute = 1), 2, acting);
    for resource in [LimitedResource::LLMCalls, LimitedResource::Actions] {
        let limited = with(|settings| settings.rate_limits = vec![limit(resource, 1, 60)]);
        drive(rows, limited, 2, acting);
    }
    let limited = with(|settings| settings.max_consecutive_tool_failures = Some(2));
    drive(rows, limited, 4, |driver| {
        driver.answer(wants(&["files__read"]));
        driver.end(1, ToolOutcome::Failed { text: "exit 1".into() });
    });
    let closed = with(|settings| settings.active_hours = Some(hours("UTC", "08:00", "23:00")));
    drive(rows, closed, 0, |_| {});
    note(rows, &approvals::waiting());
    note(rows, &approvals::of_unknown_outcome());
    note(rows, &goal_gates::doubtful());
    note(rows, &goal_gates::looping());
    let mut driver = with(|_| {});
    for _ in 0..3 {
        driver.restart(1);
        note(rows, &driver);
    }
    for input in [
        EngineInput::LinkLost,
        EngineInput::Stop {
            cause: StopCause::Suspend,
        },
    ] {
        driver.feed(input);
        note(rows, &driver);
    }
}

fn loops(rows: &mut TextRows) {
    let watched = || {
        with(|settings| {
            settings.loop_detection = detection(DetectionMode::Enforce);
            settings.max_calls_per_turn = 1000;
        })
    };
    drive(rows, watched(), 100, |driver| acts(driver, "files__read"));
    drive(rows, watched(), 8, |driver| {
        driver.answer(wants(&["files__read"]));
        if !driver.running().is_empty() {
            driver.end(1, ToolOutcome::Failed { text: "exit 1".into() });
        }
    });
    drive(rows, watched(), 16, |driver| {
        driver.answer(says("I am done."));
    });
}

#[test]
fn the_texts_of_the_engine() {
    let mut rows = TextRows::new();
    pauses(&mut rows);
    loops(&mut rows);
    for reason in PauseReason::iter() {
        assert!(
            rows.iter()
                .any(|(section, name, _)| section == "Pauses" && name == reason.as_ref()),
            "{reason} has no example"
        );
    }
    rows.extend(variants!(
        "guardrails.activeHours",
        [
            ActiveHoursError::Zone("Mars/Base".into()),
            ActiveHoursError::Time("25:00".into()),
        ]
    ));
    rows.extend(variants!(
        "Refused values of the hot state",
        [
            FieldWriteError::NoSuchField,
            FieldWriteError::Type {
                wanted: FieldType::Number,
                given: "a string",
            },
            FieldWriteError::TooLarge(20_000),
            FieldWriteError::Full(100_000),
        ]
    ));
    assert_texts!("engine", "Pauses, detected loops and errors of the engine", rows);
}
