//! Budgets that several Agents share, and calls that last: what a gateway and a leader know at each moment.

use serde_json::json;

use super::past::PastLoop;
use super::report::SimulationReport;
use super::{changes, past, replay};

/// 2025-11-24T16:00:00Z.
const START: i64 = 1_764_000_000;
/// The midnight after it.
const MIDNIGHT: i64 = 28_800;

/// A call in a turn of its own.
#[derive(Clone)]
struct Call {
    at: i64,
    lasts: i64,
    tokens: i64,
    /// Arguments of the yield with which its turn ends, and how the turn ends.
    then: (serde_json::Value, &'static str),
}

/// A call of this many tokens, after which the loop continues.
fn call(at: i64, tokens: i64) -> Call {
    Call {
        at,
        lasts: 0,
        tokens,
        then: (json!({"mode": "continue"}), "continue"),
    }
}

impl Call {
    fn lasts(self, seconds: i64) -> Self {
        Self { lasts: seconds, ..self }
    }

    fn then(self, arguments: serde_json::Value, end: &'static str) -> Self {
        Self {
            then: (arguments, end),
            ..self
        }
    }

    fn then_sleeps(self, seconds: i64) -> Self {
        self.then(json!({"sleep": seconds}), "sleep")
    }
}

fn history(calls: &[Call]) -> PastLoop {
    let time = |second: i64| jiff::Timestamp::from_second(START + second).unwrap().to_string();
    let lines = calls.iter().zip(1..).flat_map(|(call, turn)| {
        let (execution, ends) = (format!("e{turn:03}"), call.at + call.lasts);
        let (arguments, end) = &call.then;
        [
            json!({"record": "execution", "id": execution, "turn": turn, "started_at": time(call.at),
                "completed_at": time(ends), "state_snapshot": {"end": end}}),
            json!({"record": "step", "execution_id": execution, "timestamp": time(ends), "call": format!("t{turn}c1a1"),
                "purpose": "Turn", "duration_milliseconds": call.lasts * 1000, "tokens_used": call.tokens,
                "action": [{"tool": "yield", "arguments": arguments}], "cost_micro_usd": 1}),
        ]
    });
    let lines: Vec<String> = lines.map(|line| line.to_string()).collect();
    past::read(&lines.join("\n")).unwrap()
}

fn simulate(histories: &[(&str, &[Call])], set: &[&str]) -> SimulationReport {
    let set: Vec<String> = set.iter().map(|text| (*text).to_owned()).collect();
    let histories: Vec<(String, PastLoop)> = histories
        .iter()
        .map(|(name, calls)| ((*name).to_owned(), history(calls)))
        .collect();
    replay::run(&changes::read(None, &set).unwrap(), &histories).unwrap()
}

/// The first refused call of each stop.
fn stops(report: &SimulationReport) -> Vec<(&str, u64)> {
    let first = report
        .stops
        .iter()
        .filter_map(|stop| Some((&*stop.agent, stop.number?)));
    first.collect()
}

/// Two calls of 400, and one that has no room.
fn large() -> Vec<Call> {
    vec![call(0, 400), call(10, 400), call(20, 400)]
}

fn with_small(small: &[Call], set: &[&str]) -> Vec<(String, u64)> {
    let report = simulate(&[("large", &large()), ("small", small)], set);
    stops(&report)
        .into_iter()
        .map(|(name, number)| (name.to_owned(), number))
        .collect()
}

fn all_of(stops: &[(&str, u64)]) -> Vec<(String, u64)> {
    stops
        .iter()
        .map(|(name, number)| ((*name).to_owned(), *number))
        .collect()
}

#[test]
fn in_the_last_quarter_of_a_limit_an_agent_that_sleeps_does_not_keep_the_others_going() {
    let small = [call(1, 100).then_sleeps(99), call(100, 100)];
    // Of 1200 tokens 900 are used, so just a quarter is left: less than the large call, more than the small one.
    let both = all_of(&[("large", 3), ("small", 2)]);
    assert_eq!(with_small(&small, &["limits.tokens=1200", "onExhausted=Stop"]), both);
    let large_only = all_of(&[("large", 3)]);
    assert_eq!(
        with_small(&small, &["limits.tokens=1201", "onExhausted=Stop"]),
        large_only,
        "more than a quarter is left"
    );
    assert_eq!(
        with_small(&small, &["limits.tokens=1200"]),
        large_only,
        "Pause holds each on its own"
    );
}

#[test]
fn an_agent_is_awake_until_it_sleeps_for_half_a_minute_or_has_made_no_call_for_as_long() {
    let set = ["limits.tokens=1200", "onExhausted=Stop"];
    let (both, large_only) = (all_of(&[("large", 3), ("small", 2)]), all_of(&[("large", 3)]));
    assert_eq!(with_small(&[call(1, 100).then_sleeps(30), call(31, 100)], &set), both);
    assert_eq!(
        with_small(&[call(1, 100).then_sleeps(29), call(30, 100)], &set),
        large_only
    );
    // A tool runs in between.
    assert_eq!(with_small(&[call(1, 100), call(31, 100)], &set), both);
    assert_eq!(with_small(&[call(1, 100), call(30, 100)], &set), large_only);
    // The call is not over before 40.
    assert_eq!(with_small(&[call(1, 100).lasts(39), call(69, 100)], &set), large_only);
    assert_eq!(with_small(&[call(1, 100).lasts(39), call(70, 100)], &set), both);
    // Once its loop or its task has ended, it waits for others to wake it.
    assert_eq!(
        with_small(&[call(1, 100).then(json!({}), "task"), call(21, 100)], &set),
        both
    );
}

#[test]
fn a_loop_that_a_guardrail_pauses_is_not_awake() {
    // The third call is held until 11.
    let small = [call(1, 100), call(2, 100), call(3, 100), call(12, 100)];
    let rate = "guardrails.rateLimits=[{resource: LLMCalls, amount: 2, windowSeconds: 10}]";
    let stopped = |limit: &str| {
        let large = [call(4, 800), call(5, 400)];
        let report = simulate(
            &[("large", &large), ("small", &small)],
            &[limit, "onExhausted=Stop", rate],
        );
        let of_budget = report.stops.iter().filter(|stop| stop.limit.starts_with("AgentBudget"));
        let stops = of_budget.map(|stop| (stop.agent.clone(), stop.number.unwrap()));
        stops.collect::<Vec<_>>()
    };
    assert_eq!(stopped("limits.tokens=1333"), all_of(&[("large", 2), ("small", 4)]));
    assert_eq!(
        stopped("limits.tokens=1334"),
        all_of(&[("large", 2)]),
        "more than a quarter is left"
    );
}

#[test]
fn a_limit_that_is_used_up_stops_for_good_although_nobody_asks_before_the_window_moves() {
    let calls = [call(0, 1), call(10, 1), call(4_000, 1)];
    for (limit, refused) in [("limits.calls=2", vec![("a", 3)]), ("limits.calls=3", vec![])] {
        let set = [limit, "window.rolling.seconds=3600", "onExhausted=Stop"];
        assert_eq!(stops(&simulate(&[("a", &calls)], &set)), refused, "{limit}");
    }
    let report = simulate(&[("a", &calls)], &["limits.calls=2", "window.rolling.seconds=3600"]);
    assert_eq!(stops(&report), [], "Pause ends with the window");
}

#[test]
fn a_budget_that_asks_holds_all_its_agents_while_it_is_exhausted() {
    let small = [call(1, 100).then_sleeps(99), call(100, 100), call(4_000, 100)];
    let set = ["limits.tokens=1200", "onExhausted=Ask", "window.rolling.seconds=3600"];
    assert_eq!(with_small(&small, &set), all_of(&[("large", 3), ("small", 2)]));
    let set = ["limits.tokens=1201", "onExhausted=Ask", "window.rolling.seconds=3600"];
    assert_eq!(with_small(&small, &set), all_of(&[("large", 3)]));
    let report = simulate(
        &[("large", &large()), ("small", &small)],
        &["limits.tokens=1200", "onExhausted=Ask", "window.rolling.seconds=3600"],
    );
    assert_eq!(report.refused.calls, 2, "the window has moved before the last call");
}

#[test]
fn a_call_in_flight_moves_no_window_for_the_others() {
    let straddles = [call(MIDNIGHT - 10, 1).lasts(26)];
    let daily = |limit, other: &[Call]| {
        let set = [limit, "window.calendar={period: Daily, timeZone: UTC}"];
        simulate(&[("one", &straddles), ("two", other)], &set)
    };
    let report = daily("limits.calls=1", &[call(MIDNIGHT - 5, 1)]);
    assert_eq!(stops(&report), [("two", 1)], "the day has room for one");
    // What is in flight is held, although it counts in the day before.
    assert_eq!(report.stops[0].until.unwrap().as_second() - START, MIDNIGHT + 16);
    assert_eq!(stops(&daily("limits.calls=2", &[call(MIDNIGHT - 5, 1)])), []);
    // A gateway waits for 10 s.
    assert_eq!(stops(&daily("limits.calls=1", &[call(MIDNIGHT + 5, 1)])), [("two", 1)]);
    assert_eq!(stops(&daily("limits.calls=1", &[call(MIDNIGHT + 6, 1)])), []);
    // A rolling window forgets the first call after an hour and not before.
    let one = [call(0, 1), call(3_000, 1).lasts(1_000)];
    let rolling = |at| {
        let set = ["limits.calls=2", "window.rolling.seconds=3600"];
        simulate(&[("one", &one), ("two", &[call(at, 1)])], &set)
    };
    let report = rolling(3_590);
    assert_eq!(stops(&report), [("two", 1)]);
    let until = report.stops[0].until.unwrap().as_second() - START;
    assert!((3_600..=3_661).contains(&until), "{until}");
    assert_eq!(stops(&rolling(3_661)), []);
}

#[test]
fn a_sleep_without_a_time_is_the_longest() {
    let asleep = |at| call(at, 1).then(json!({"mode": "sleep"}), "sleep");
    let calls = [asleep(0), asleep(10), asleep(20), asleep(30)];
    assert_eq!(
        stops(&simulate(&[("a", &calls)], &["guardrails.maxConsecutiveTurns=2"])),
        []
    );
    let awake = [call(0, 1), call(10, 1), call(20, 1)];
    assert_eq!(
        stops(&simulate(&[("a", &awake)], &["guardrails.maxConsecutiveTurns=2"])),
        [("a", 3)]
    );
}

#[test]
fn a_history_that_has_lost_its_first_turns_says_so() {
    let lines = |first: i64| {
        let execution = json!({"record": "execution", "id": "e", "turn": first, "started_at": "2026-01-01T00:00:00Z",
            "completed_at": null, "state_snapshot": null});
        let step = json!({"record": "step", "execution_id": "e", "timestamp": "2026-01-01T00:00:01Z",
            "call": format!("t{first}c1a1"), "purpose": "Turn", "tokens_used": 1, "cost_micro_usd": 1});
        format!("{execution}\n{step}")
    };
    for (first, says) in [(1, false), (2, true)] {
        let histories = [("a".to_owned(), past::read(&lines(first)).unwrap())];
        let report = replay::run(
            &changes::read(None, &["limits.calls=9".to_owned()]).unwrap(),
            &histories,
        )
        .unwrap();
        let text = "The history of a begins with turn 2: what earlier turns used is not counted.";
        assert_eq!(report.approximations.iter().any(|line| line == text), says, "{first}");
    }
}
