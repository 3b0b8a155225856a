//! Rules of the simulation on small histories.

use serde_json::{Value, json};

use super::report::SimulationReport;
use super::{changes, past, replay};
use crate::plugin::failure::{ExitStatus, PluginError};

/// A history with one call of 100 tokens and $0.01 at each of these seconds, each in a turn of its own.
fn history(seconds: &[i64]) -> String {
    let at = |second: i64| {
        jiff::Timestamp::from_second(1_764_000_000 + second)
            .unwrap()
            .to_string()
    };
    let lines = seconds.iter().zip(1..).flat_map(|(second, turn)| {
        let execution = format!("e{turn:03}");
        [
            json!({"record": "execution", "id": execution, "turn": turn, "started_at": at(*second),
                "completed_at": at(*second), "state_snapshot": {"end": "continue"}}),
            json!({"record": "step", "execution_id": execution, "timestamp": at(*second), "call": format!("t{turn}c1a1"),
                "purpose": "Turn", "duration_milliseconds": 0, "action": [], "tokens_used": 100, "cost_micro_usd": 10_000}),
        ]
    });
    lines.map(|line: Value| line.to_string()).collect::<Vec<_>>().join("\n")
}

fn simulate(history: &str, set: &[&str]) -> Result<SimulationReport, PluginError> {
    let set: Vec<String> = set.iter().map(|text| (*text).to_owned()).collect();
    let limits = changes::read(None, &set)?;
    replay::run(&limits, &[("helper".into(), past::read(history).unwrap())])
}

/// The number of the first call that is refused, how many are, and when the first stop ends.
fn first(history: &str, set: &[&str]) -> (Option<u64>, u64, Option<i64>) {
    let report = simulate(history, set).unwrap();
    let stop = report.stops.iter().find(|stop| stop.refused.calls > 0);
    let until = stop
        .and_then(|stop| stop.until)
        .map(|until| until.as_second() - 1_764_000_000);
    (stop.and_then(|stop| stop.number), report.refused.calls, until)
}

#[test]
fn a_limit_refuses_at_n_and_not_at_n_minus_1() {
    let calls = history(&[0, 10, 20, 30]);
    for (set, refused) in [
        ("limits.calls=3", (Some(4), 1)),
        ("limits.calls=4", (None, 0)),
        ("limits.tokens=399", (Some(4), 1)),
        ("limits.tokens=400", (None, 0)),
        ("limits.costUSD=0.039999", (Some(4), 1)),
        ("limits.costUSD=0.04", (None, 0)),
        ("limits.calls=0", (Some(1), 4)),
        ("guardrails.tokensPerHour=399", (Some(4), 1)),
        ("guardrails.total={tokens: 400}", (None, 0)),
        ("guardrails.total.costUSD=0.02", (Some(3), 2)),
    ] {
        let (number, calls, _) = first(&calls, &[set]);
        assert_eq!((number, calls), refused, "{set}");
    }
}

#[test]
fn a_rolling_window_lets_calls_through_again_when_earlier_ones_have_left_it() {
    let calls = history(&[0, 10, 20, 4_000, 4_010]);
    let (number, refused, until) = first(&calls, &["limits.calls=2", "window.rolling.seconds=3600"]);
    assert_eq!((number, refused), (Some(3), 1));
    // A slice of the window leaves as a whole.
    assert!(until.is_some_and(|until| (3_600..=3_680).contains(&until)), "{until:?}");
    let days = [
        "limits.calls=2",
        "window.calendar.period=Daily",
        "window.calendar.timeZone=Europe/Vienna",
    ];
    assert_eq!(first(&calls, &days).0, Some(3));
    let forever = first(&calls, &["limits.calls=2"]);
    assert_eq!(forever, (Some(3), 3, None));
}

#[test]
fn a_history_may_begin_later_with_the_call_of_that_moment() {
    let whole = past::read(&history(&[0, 10, 20])).unwrap();
    let calls = |second: i64| {
        let mut part = whole.clone();
        part.begin_at(jiff::Timestamp::from_second(1_764_000_000 + second).unwrap());
        let is_call = |event: &&(jiff::Timestamp, past::PastEvent)| matches!(event.1, past::PastEvent::Call(_));
        part.events.iter().filter(is_call).count()
    };
    assert_eq!([0, 10, 11, 21].map(calls), [3, 2, 1, 0]);
}

#[test]
fn on_exhausted_stop_holds_although_the_window_has_room_again() {
    let calls = history(&[0, 10, 20, 4_000]);
    let set = ["limits.calls=2", "window.rolling.seconds=3600", "onExhausted=Stop"];
    assert_eq!(first(&calls, &set), (Some(3), 2, None));
}

#[test]
fn the_guardrails_of_the_engine_decide() {
    let calls = history(&[0, 10, 20, 30]);
    let rate = "guardrails.rateLimits=[{resource: LLMCalls, amount: 3, windowSeconds: 3600}]";
    let (number, refused, until) = first(&calls, &[rate]);
    assert_eq!((number, refused), (Some(4), 1));
    assert!(until.is_some_and(|until| (3_600..=3_720).contains(&until)), "{until:?}");
    // After two turns without a sleep, one of 60 s is forced.
    assert_eq!(
        first(&history(&[0, 10, 20, 100]), &["guardrails.maxConsecutiveTurns=2"]),
        (Some(3), 1, Some(70))
    );
    assert_eq!(first(&calls, &["guardrails.maxConsecutiveTurns=5"]), (None, 0, None));
}

#[test]
fn what_a_history_does_not_tell_is_refused_by_name() {
    for (set, says) in [
        (
            "guardrails.idleTimeoutSeconds=60",
            "idleTimeoutSeconds cannot be simulated",
        ),
        (
            "guardrails.loopDetection.mode=Enforce",
            "loopDetection cannot be simulated",
        ),
        (
            "guardrails.maxTurnsPerHour=1",
            "maxTurnsPerHour is not known; those that can be simulated are",
        ),
        ("limits.inputTokens=1", "limits.inputTokens cannot be simulated"),
        ("perAgent.outputTokens=1", "perAgent.outputTokens cannot be simulated"),
        ("limits.tokens=many", "AgentBudget:"),
        ("limits.calls.each=1", "AgentBudget:"),
        ("model.name=x", "a limit begins with"),
        ("limits", "write PATH=VALUE"),
    ] {
        let refused = simulate(&history(&[0]), &[set]).unwrap_err();
        assert_eq!(refused.exit_status(), ExitStatus::Usage, "{set}");
        assert!(refused.to_string().contains(says), "{set}: {refused}");
    }
    assert!(simulate(&history(&[0]), &[]).is_err(), "nothing is changed");
}

#[test]
fn a_limit_on_cost_needs_a_known_cost_of_each_call() {
    let unpriced = history(&[0, 10]).replacen("10000", "null", 1);
    let refused = simulate(&unpriced, &["limits.costUSD=1"]).unwrap_err().to_string();
    assert!(refused.contains("the cost of 1 of 2 calls is not known"), "{refused}");
    assert!(simulate(&unpriced, &["limits.calls=1"]).is_ok());
}

#[test]
fn a_line_that_cannot_be_read_is_named_and_kinds_of_later_versions_are_skipped() {
    assert!(past::read("{\"record\": \"later\"}\n\n").unwrap().events.is_empty());
    let wrong = past::read("{\"record\": \"later\"}\n{").unwrap_err();
    assert!(wrong.starts_with("line 2: "), "{wrong}");
}

#[test]
fn the_screen_of_a_simulation() {
    let calls = history(&[0, 10, 20, 80_000]);
    let report = simulate(&calls, &["limits.calls=2", "window.rolling.seconds=3600"]).unwrap();
    insta::assert_snapshot!(report.text());
    assert_eq!(
        simulate("", &["limits.calls=2"]).unwrap().text(),
        "The history has no calls.\n"
    );
}
