//! Each limit that is reached has one journal record, once, and nothing else has one.

use super::work::wants;
use super::*;

fn trips(driver: &Driver) -> Vec<&str> {
    driver.notes(RecordKind::GuardrailTriggered)
}

#[test]
fn a_limit_that_holds_the_loop_is_journalled_once_each_time_it_is_reached() {
    let mut driver = Driver::started(settings());
    for round in 1..=2 {
        while driver.state() != LoopState::Paused {
            assert_eq!(trips(&driver).len(), round - 1, "not before it is reached");
            driver.failed_turn();
            if driver.state() != LoopState::Paused {
                driver.next_timer();
            }
        }
        assert_eq!(trips(&driver), vec!["ConsecutiveErrors"; round]);
        driver.next_timer();
    }
}

#[test]
fn a_limit_that_ends_a_turn_or_the_loop_is_journalled_too() {
    let mut driver = Driver::started(EngineSettings {
        max_calls_per_turn: 2,
        ..settings()
    });
    driver.answer(calls("shell", "{}"));
    assert!(trips(&driver).is_empty());
    driver.answer(calls("shell", "{}"));
    assert_eq!(trips(&driver).len(), 1);
    assert!(trips(&driver)[0].contains("maxCallsPerTurn (2)"));

    let mut driver = Driver::started(EngineSettings {
        idle_timeout: seconds(30),
        ..settings()
    });
    driver.pass(seconds(31));
    driver.answer(says("hm"));
    assert_eq!(trips(&driver), ["Idle"]);
}

#[test]
fn a_suspension_and_a_lost_link_are_no_limits() {
    let mut driver = Driver::started(settings());
    driver.feed(EngineInput::LinkLost);
    driver.feed(EngineInput::Stop {
        cause: StopCause::Suspend,
    });
    assert!(trips(&driver).is_empty());
}

#[test]
fn failed_turns_are_counted_apart_from_completed_ones_and_across_restarts() {
    let mut driver = Driver::started(settings());
    driver.failed_turn();
    driver.next_timer();
    driver.answer(says("hm"));
    let counts = driver.engine.view().counts;
    assert_eq!((counts.turns, counts.failed_turns), (1, 1));
    let restored = Engine::restore(settings(), driver.engine.snapshot(), Vec::<Message>::new());
    assert_eq!(restored.view().counts, counts);
    let mut driver = Driver::fresh(settings());
    let known = KnownTotals {
        turn: 2,
        counts: Box::new(counts.clone()),
    };
    driver.start_with(1, known);
    assert_eq!(
        driver.engine.view().counts,
        counts,
        "a new journal continues the known counts"
    );
}

#[test]
fn trips_of_limits_and_outcomes_of_tools_are_counted_across_restarts() {
    let mut driver = Driver::with_tools(EngineSettings {
        max_calls_per_turn: 2,
        ..settings()
    });
    driver.answer(wants(&["files__read", "files__read", "invented"]));
    driver.pass(seconds(2));
    driver.done(1, "so it is");
    driver.pass(seconds(1));
    driver.end(2, ToolOutcome::Failed { text: "no".into() });
    driver.answer(says("hm"));
    let counts = driver.engine.view().counts;
    let count = |tool: &str| {
        let found = counts.by_tool.iter().find(|used| used.tool == tool).unwrap();
        (found.ok, found.error, found.denied)
    };
    let time = |tool: &str| {
        let found = counts.by_tool.iter().find(|used| used.tool == tool).unwrap();
        (found.timed, found.milliseconds)
    };
    assert_eq!(time("files__read"), (2, 2_000 + 3_000));
    assert_eq!(time("other"), (0, 0), "nothing was run");
    assert_eq!(count("files__read"), (1, 1, 0));
    assert_eq!(
        count("other"),
        (0, 0, 1),
        "a name that no source offers is the model's text"
    );
    let restored = Engine::restore(settings(), driver.engine.snapshot(), Vec::<Message>::new());
    assert_eq!(restored.view().counts, counts);
    let mut driver = Driver::fresh(settings());
    for epoch in 1..=2 {
        let known = KnownTotals {
            turn: 1,
            counts: Box::new(counts.clone()),
        };
        driver.start_with(epoch, known);
        assert_eq!(
            driver.engine.view().counts,
            counts,
            "a new journal continues the known counts"
        );
    }
}

fn denied(engine: &Engine) -> i64 {
    engine.view().counts.denied_tool_calls
}

fn bad_arguments() -> ModelAnswer {
    let mut answer = wants(&["files__write"]);
    answer.tool_calls[0].arguments = r#"{"path": 1}"#.into();
    answer
}

#[test]
fn each_call_that_is_not_admitted_is_counted_and_one_that_is_admitted_is_not() {
    let mut driver = Driver::fresh(settings());
    driver.start(1);
    driver.feed(EngineInput::ToolsChanged {
        tools: super::work::tools(),
        silent: vec!["mail2".into()],
    });
    driver.answer(says("hm"));
    driver.next_timer();
    let counts = |driver: &mut Driver, answer: ModelAnswer, reason: &str| {
        let before = denied(&driver.engine);
        driver.answer(answer);
        assert_eq!(driver.notes(RecordKind::ToolDenied).last(), Some(&reason));
        denied(&driver.engine) - before
    };
    assert_eq!(counts(&mut driver, wants(&["invented"]), "UnknownTool"), 1);
    assert_eq!(counts(&mut driver, wants(&["mail2__send"]), "ServerSilent"), 1);
    for _ in 0..3 {
        assert_eq!(counts(&mut driver, bad_arguments(), "BadArguments"), 1);
    }
    assert_eq!(counts(&mut driver, wants(&["files__write"]), "Hidden"), 1);
    let cut = ModelAnswer {
        finish: FinishReason::Length,
        ..wants(&["files__read"])
    };
    assert_eq!(counts(&mut driver, cut, "Cut"), 1);
    driver.answer(wants(&["invented", "files__read", "invented"]));
    assert_eq!(denied(&driver.engine), 9, "two of three");
    driver.done(2, "read");
    driver.answer(calls("yield", r#"{"sleep": 60, "reason": "to wait"}"#));
    assert_eq!(denied(&driver.engine), 9);
}

#[test]
fn a_call_that_was_admitted_and_is_denied_later_is_not_counted_as_rejected() {
    let mut driver = Driver::with_tools(settings());
    driver.answer(wants(&["mail__send", "files__write"]));
    driver.feed(EngineInput::LinkLost);
    driver.done(1, "sent");
    driver.pass(seconds(301));
    driver.feed(EngineInput::LinkBack);
    assert_eq!(driver.notes(RecordKind::ToolDenied), ["Outdated"]);
    assert_eq!(denied(&driver.engine), 0);
}

#[test]
fn rejected_calls_are_counted_once_across_a_crash_a_restart_and_a_new_pod() {
    let mut driver = Driver::with_tools(settings());
    let call = driver.in_flight.unwrap();
    let (mut crashed, answer) = (driver.clone(), bad_arguments());
    driver.answer(answer.clone());
    assert_eq!(denied(&driver.engine), 1);
    // The process ended before it had committed the answer: the next one gets the same answer again.
    crashed.restart(1);
    assert_eq!((crashed.in_flight, denied(&crashed.engine)), (Some(call), 0));
    crashed.answer(answer.clone());
    assert_eq!(denied(&crashed.engine), 1);
    // It ended after that.
    driver.restart(1);
    driver.feed(EngineInput::Answered { call, answer });
    assert_eq!(denied(&driver.engine), 1);
    let known = KnownTotals {
        turn: 1,
        counts: Box::new(driver.engine.view().counts),
    };
    // The same volume in a new pod, and a new volume.
    driver.start_with(2, known.clone());
    assert_eq!(denied(&driver.engine), 1);
    let mut driver = Driver::fresh(settings());
    driver.start_with(3, known);
    driver.answer(wants(&["invented"]));
    assert_eq!(denied(&driver.engine), 2);
}

#[test]
fn the_time_of_a_run_is_counted_for_each_attempt_that_was_sent_and_ended_here() {
    let mut driver = Driver::with_tools(settings());
    let time = |driver: &Driver| {
        let tools = driver.engine.view().counts.by_tool;
        let found = tools.iter().find(|used| used.tool == "files__read");
        found.map_or((0, 0), |found| (found.timed, found.milliseconds))
    };
    driver.answer(wants(&["files__read"]));
    driver.pass(seconds(1));
    let gone = ToolOutcome::Unavailable { message: "x".into() };
    driver.end(1, gone);
    assert_eq!(time(&driver), (0, 0), "nothing was sent");
    driver.answer(wants(&["files__read"]));
    driver.pass(seconds(3));
    driver.restart(1);
    assert_eq!(time(&driver), (0, 0), "its end is not known");
    driver.pass(seconds(2));
    driver.done(1, "x");
    assert_eq!(time(&driver), (1, 2_000), "the attempt that ended");
}

#[test]
fn a_limit_is_counted_each_time_it_is_reached_and_not_while_it_holds() {
    let mut driver = Driver::started(settings());
    let count = |driver: &Driver| {
        let trips = driver.engine.view().counts.guardrail_trips;
        trips
            .iter()
            .map(|trip| (trip.guardrail.clone(), trip.action.clone(), trip.count))
            .collect::<Vec<_>>()
    };
    for round in 1..=2 {
        while driver.state() != LoopState::Paused {
            assert_eq!(count(&driver).first().map_or(0, |trip| trip.2), round - 1);
            driver.failed_turn();
            if driver.state() != LoopState::Paused {
                driver.next_timer();
            }
        }
        driver.feed(EngineInput::Timer);
        assert_eq!(
            count(&driver),
            [("ConsecutiveErrors".to_owned(), "pause".to_owned(), round)]
        );
        driver.next_timer();
    }
}
