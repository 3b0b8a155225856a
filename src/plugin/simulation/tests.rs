//! Rules of the simulation on small histories.

use serde_json::{Value, json};

use super::report::SimulationReport;
use super::{changes, past, replay, settings};
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
                "purpose": "Turn", "duration_milliseconds": 0, "action": [], "tokens_used": 100,
                "input_tokens": 250, "output_tokens": 20, "cost_micro_usd": 10_000}),
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
        ("limits.inputTokens=999", (Some(4), 1)),
        ("limits.inputTokens=1000", (None, 0)),
        ("perAgent.outputTokens=79", (Some(4), 1)),
        ("perAgent.outputTokens=80", (None, 0)),
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
fn a_rolling_window_admits_calls_again_when_earlier_ones_have_left_it() {
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
fn what_a_history_does_not_record_is_refused_by_name() {
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
            "guardrails.maxTurnsPerHour: there is no such limit; those that can be simulated are guardrails.actionsPerMinute, ",
        ),
        (
            "guardrails={actionsPerMinute: 1, idleTimeoutSeconds: 60}",
            "guardrails.idleTimeoutSeconds cannot be simulated",
        ),
        (
            "guardrails.rateLimits=[{resource: DiskWriteBytes, amount: 1, windowSeconds: 60}]",
            "guardrails.rateLimits of DiskWriteBytes cannot be simulated",
        ),
        ("limits.tokens=many", "limits.tokens: \"many\" is not of type"),
        ("limits.calls.each=1", "limits.calls: "),
        ("model.name=x", "model.name: there is no such limit"),
        ("limits", "write PATH=VALUE"),
        ("=1", "there is no such limit"),
    ] {
        let refused = simulate(&history(&[0]), &[set]).unwrap_err();
        assert_eq!(refused.exit_status(), ExitStatus::Usage, "{set}");
        assert!(refused.to_string().contains(says), "{set}: {refused}");
    }
    assert!(simulate(&history(&[0]), &[]).is_err(), "nothing is changed");
}

#[test]
fn a_name_that_is_wrong_is_refused_and_not_ignored() {
    for (set, says) in [
        ("limits.token=1", "--set limits.token: there is no such limit; "),
        (
            "limits={token: 1}",
            "limits.token is not known; the fields there are calls, costUSD, inputTokens, outputTokens, tokens",
        ),
        (
            "guardrails.total={cost: 1}",
            "guardrails.total.cost is not known; the fields there are costUSD, tokens",
        ),
        (
            "guardrails.activeHours.from=08:00",
            "guardrails.activeHours.from is not known",
        ),
        (
            "guardrails.rateLimits=[{resource: LLMCalls, amount: 1, seconds: 60}]",
            "guardrails.rateLimits[0].seconds is not known",
        ),
        (
            "window.rolling.minutes=1",
            "window.rolling.minutes: there is no such limit",
        ),
        ("window.rolling={minutes: 1}", "window.rolling.minutes is not known"),
    ] {
        let refused = simulate(&history(&[0]), &[set]).unwrap_err();
        assert_eq!(refused.exit_status(), ExitStatus::Usage, "{set}");
        assert!(refused.to_string().contains(says), "{set}: {refused}");
    }
    let manifest = "{kind: AgentBudget, spec: {limits: {tokens: 1}, window: {lifetime: {}}, onExhaustd: Stop}}";
    let refused = changes::read(Some(manifest), &[]).unwrap_err().to_string();
    assert!(refused.starts_with("onExhaustd is not known"), "{refused}");
}

#[test]
fn a_value_that_an_api_server_rejects_is_refused() {
    for (set, says) in [
        ("limits.calls=-1", "limits.calls: -1 is less than the minimum"),
        (
            "limits.tokens=1000000000000001",
            "limits.tokens: 1000000000000001 is greater than the maximum",
        ),
        ("limits.tokens=99999999999999999999", "limits.tokens: "),
        ("limits.tokens=", "limits.tokens: null is not of type"),
        ("limits.tokens=1.5", "limits.tokens: 1.5 is not of type"),
        ("limits.costUSD=-1", "limits.costUSD must be US dollars"),
        ("limits.costUSD=much", "limits.costUSD must be US dollars"),
        (
            "limits.costUSD=0.0000001",
            "limits.costUSD must have at most six decimals",
        ),
        ("perAgent.costUSD=1e3", "perAgent.costUSD must be US dollars"),
        ("guardrails.total.costUSD=", "guardrails.total.costUSD"),
        (
            "guardrails.maxCallsPerTurn=0",
            "guardrails.maxCallsPerTurn: 0 is less than the minimum",
        ),
        (
            "guardrails.maxCallsPerTurn=1001",
            "guardrails.maxCallsPerTurn: 1001 is greater than the maximum",
        ),
        (
            "guardrails.actionsPerMinute=0",
            "guardrails.actionsPerMinute: 0 is less",
        ),
        ("guardrails.tokensPerHour=-1", "guardrails.tokensPerHour: -1 is less"),
        ("guardrails.rateLimits=[]", "guardrails.rateLimits is empty"),
        ("guardrails.total={}", "guardrails.total"),
        ("guardrails=5", "guardrails: 5 is not of type"),
        ("window.rolling.seconds=60", "the AgentBudget has no limit"),
        ("onExhausted=Never", "onExhausted: "),
    ] {
        let refused = simulate(&history(&[0]), &[set]).unwrap_err();
        assert_eq!(refused.exit_status(), ExitStatus::Usage, "{set}");
        assert!(refused.to_string().contains(says), "{set}: {refused}");
    }
    for (set, says) in [
        (
            "window.rolling.seconds=0",
            "window.rolling.seconds: 0 is less than the minimum",
        ),
        ("window={}", "spec.window must have exactly one of"),
        (
            "window.calendar={period: Daily, timeZone: Mars/Olympus}",
            "is not an IANA time zone",
        ),
        (
            "window.calendar.timeZone=UTC",
            "window.calendar: \"period\" is a required property",
        ),
    ] {
        let refused = simulate(&history(&[0]), &["limits.calls=1", set]).unwrap_err();
        assert!(refused.to_string().contains(says), "{set}: {refused}");
    }
}

#[test]
fn a_field_that_is_set_twice_is_refused() {
    for (set, says) in [
        (
            ["limits.calls=1", "limits.calls=2"],
            "--set limits.calls and --set limits.calls set the same field",
        ),
        (["limits.calls=1", "limits={tokens: 2}"], "set the same field: keep one"),
        (
            ["guardrails={tokensPerHour: 1}", "guardrails.total.tokens=2"],
            "set the same field: keep one",
        ),
        (
            ["window.rolling.seconds=60", "window.calendar.period=Daily"],
            "--set window.rolling.seconds and --set window.calendar.period are two kinds of window",
        ),
    ] {
        let refused = simulate(&history(&[0]), &set).unwrap_err().to_string();
        assert!(refused.contains(says), "{set:?}: {refused}");
    }
    let twice = "guardrails.rateLimits=[{resource: LLMCalls, amount: 1, windowSeconds: 60}, {resource: LLMCalls, amount: 2, windowSeconds: 60}]";
    let refused = simulate(&history(&[0]), &[twice]).unwrap_err().to_string();
    assert!(refused.contains("has two limits on LLMCalls in 60 s"), "{refused}");
    // A budget and a guardrail with the same limit: the first that refuses is named.
    let both = simulate(
        &history(&[0, 10, 20]),
        &["limits.tokens=200", "guardrails.total.tokens=200"],
    )
    .unwrap();
    assert_eq!((both.stops.len(), both.refused.calls), (1, 1));
}

#[test]
fn every_limit_of_the_api_is_simulated_or_says_why_not() {
    let (budget, agent) = (&settings::SCHEMAS.budget, &settings::SCHEMAS.guardrails);
    let mut fields = Vec::new();
    for part in ["limits", "perAgent", "window"] {
        let names = budget["properties"][part]["properties"].as_object().unwrap().keys();
        fields.extend(names.map(|name| format!("{part}.{name}")));
    }
    fields.extend(
        agent["properties"]
            .as_object()
            .unwrap()
            .keys()
            .map(|name| format!("guardrails.{name}")),
    );
    let known = |field: &String| {
        let all = settings::SETTINGS.iter();
        all.chain(settings::NOT_COMPUTABLE.iter().map(|(name, _)| name))
            .any(|known| settings::is_within(known, field))
    };
    let missing: Vec<&String> = fields.iter().filter(|field| !known(field)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn top_ups_of_a_budget_add_to_its_first_window() {
    let manifest =
        "{kind: AgentBudget, spec: {limits: {calls: 2}, window: {lifetime: {}}, topUps: [{id: a, calls: 1}]}}";
    let limits = changes::read(Some(manifest), &[]).unwrap();
    let histories = [("helper".to_owned(), past::read(&history(&[0, 10, 20, 30])).unwrap())];
    let report = replay::run(&limits, &histories).unwrap();
    assert_eq!((report.refused.calls, report.stops[0].number), (1, Some(4)));
    assert!(report.approximations.iter().any(|text| text.contains("topUps")));
}

#[test]
fn an_agent_that_has_used_its_own_share_does_not_stop_the_others_and_an_exhausted_budget_does() {
    let histories = [
        ("one".to_owned(), past::read(&history(&[0, 10, 20])).unwrap()),
        ("two".to_owned(), past::read(&history(&[30, 40, 50])).unwrap()),
    ];
    let refused = |set: &[&str]| {
        let set: Vec<String> = set.iter().map(|text| (*text).to_owned()).collect();
        let report = replay::run(&changes::read(None, &set).unwrap(), &histories).unwrap();
        let stops: Vec<(String, Option<u64>)> = report
            .stops
            .iter()
            .map(|stop| (stop.agent.clone(), stop.number))
            .collect();
        (report.refused.calls, stops)
    };
    let stop = |agent: &str, number| (agent.to_owned(), Some(number));
    assert_eq!(
        refused(&["limits.calls=100", "perAgent.calls=2", "onExhausted=Stop"]),
        (2, vec![stop("one", 3), stop("two", 3)])
    );
    assert_eq!(
        refused(&["limits.calls=4", "onExhausted=Stop"]),
        (2, vec![stop("two", 2)])
    );
    // The budget has room for the calls of the other Agent, which are smaller.
    let large = history(&[0, 10, 20]).replace("\"tokens_used\":100", "\"tokens_used\":400");
    let histories = [
        ("large".to_owned(), past::read(&large).unwrap()),
        ("small".to_owned(), past::read(&history(&[1, 11, 21])).unwrap()),
    ];
    let set = ["limits.tokens=1100".to_owned(), "onExhausted=Stop".to_owned()];
    let report = replay::run(&changes::read(None, &set).unwrap(), &histories).unwrap();
    let stops: Vec<(&str, Option<u64>)> = report
        .stops
        .iter()
        .map(|stop| (stop.agent.as_str(), stop.number))
        .collect();
    assert_eq!((report.refused.calls, stops), (1, vec![("large", Some(3))]));
}

#[test]
fn the_budget_of_a_manifest_is_named_with_the_limits_that_no_flag_changes() {
    let manifest = "
kind: AgentBudget
metadata: {name: team}
spec:
  limits: {tokens: 1000, calls: 2, costUSD: \"5\"}
  window: {rolling: {seconds: 3600}}
  selector: {}
";
    let names = |set: &[&str]| {
        let set: Vec<String> = set.iter().map(|text| (*text).to_owned()).collect();
        changes::read(Some(manifest), &set).unwrap().names
    };
    let (calls, cost, tokens) = ("limits.calls=2", "limits.costUSD=5", "limits.tokens=1000");
    let window = "window.rolling.seconds=3600";
    assert_eq!(names(&[]), ["AgentBudget team", calls, cost, tokens, window]);
    let set = ["limits.tokens=7", "window.calendar.period=Daily"];
    assert_eq!(names(&set), ["AgentBudget team", calls, cost, set[0], set[1]]);
    assert_eq!(
        names(&["limits={calls: 1}"]),
        ["AgentBudget team", window, "limits={calls: 1}"]
    );
    let unnamed = manifest.replace("metadata: {name: team}\n", "");
    let unnamed = changes::read(Some(&unnamed), &[]).unwrap().names;
    assert_eq!(unnamed, ["AgentBudget", calls, cost, tokens, window]);
}

#[test]
fn the_stops_of_several_histories_have_the_names_of_their_agents() {
    let manifest = "{kind: AgentBudget, metadata: {name: team}, spec: {limits: {calls: 2}, window: {lifetime: {}}}}";
    let limits = changes::read(Some(manifest), &[]).unwrap();
    let of = |name: &str, seconds: &[i64]| (name.to_owned(), past::read(&history(seconds)).unwrap());
    let both = [of("one", &[0, 10, 20]), of("two", &[30])];
    let report = replay::run(&limits, &both).unwrap();
    assert_eq!(report.agents, ["one", "two"]);
    let text = report.text();
    let first = "With AgentBudget team, limits.calls=2, window.lifetime={}, from ";
    assert!(text.starts_with(first), "{text}");
    assert!(text.contains("\nSTOP                   AGENT   LIMIT "), "{text}");
    for line in [
        "\n2025-11-24T16:00:20Z   one     AgentBudget ",
        "\n2025-11-24T16:00:30Z   two     AgentBudget ",
    ] {
        assert!(text.contains(line), "{text}");
    }
    let text = replay::run(&limits, &both[..1]).unwrap().text();
    assert!(text.contains("\nSTOP                   LIMIT "), "{text}");
}

#[test]
fn two_histories_of_one_name_are_refused() {
    let one = ("helper".to_owned(), past::read(&history(&[0])).unwrap());
    let limits = changes::read(None, &["limits.calls=1".to_owned()]).unwrap();
    let refused = replay::run(&limits, &[one.clone(), one]).unwrap_err();
    assert_eq!(refused.exit_status(), ExitStatus::Usage);
    assert!(refused.to_string().contains("two histories are of helper"), "{refused}");
}

/// A line of the audit about a run of this call.
fn audit(call: &str, second: i64, fields: &Value) -> String {
    let at = jiff::Timestamp::from_second(1_764_000_000 + second).unwrap();
    let mut line = json!({"record": "audit", "at": at.to_string(), "call": call, "tool": "t", "effect": "Write",
        "decision": null, "outcome": null, "note": ""});
    for (name, value) in fields.as_object().unwrap() {
        line[name] = value.clone();
    }
    line.to_string()
}

#[test]
fn a_run_that_was_sent_again_is_one_action_and_fails_once() {
    let sent = |note: &str| audit("t1c1r1", 1, &json!({"decision": "Allowed", "note": note}));
    let ended = |outcome: &str, note: &str| audit("t1c1r1", 2, &json!({"outcome": outcome, "note": note}));
    let lines = [
        history(&[0, 10]),
        sent(""),
        ended("Unknown", "will be repeated"),
        sent("repeated"),
        ended("Unknown", "will be repeated if approved"),
        sent("repeated"),
        ended("Error", ""),
    ]
    .join("\n");
    let stops = |set: &str| simulate(&lines, &[set]).unwrap().stops.len();
    assert_eq!(
        stops("guardrails.rateLimits=[{resource: Actions, amount: 1, windowSeconds: 60}]"),
        0
    );
    assert_eq!(stops("guardrails.actionsPerMinute=1"), 0);
    assert_eq!(stops("guardrails.maxConsecutiveToolFailures=2"), 0);
    assert_eq!(stops("guardrails.maxConsecutiveToolFailures=1"), 1);
}

#[test]
fn runs_of_chats_fail_in_no_row() {
    let chat = history(&[0, 10]).replace("\"Turn\"", "\"Chat\"");
    let lines = [chat, audit("t1c1r1", 1, &json!({"outcome": "Error"}))].join("\n");
    let set = "guardrails.maxConsecutiveToolFailures=1";
    assert_eq!(simulate(&lines, &[set]).unwrap().stops.len(), 0);
}

#[test]
fn a_turn_of_a_goal_that_was_followed_by_another_counts_whatever_ended_it() {
    let goal = history(&[0, 10, 20]).replace("continue", "finish");
    let report = simulate(&goal, &["guardrails.maxConsecutiveTurns=2"]).unwrap();
    assert_eq!((report.stops.len(), report.stops[0].number), (1, Some(3)));
    // The last one ended the loop.
    assert_eq!(
        simulate(&goal, &["guardrails.maxConsecutiveTurns=3"])
            .unwrap()
            .stops
            .len(),
        0
    );
    let task = history(&[0, 10, 20]).replace("continue", "task");
    assert_eq!(
        simulate(&task, &["guardrails.maxConsecutiveTurns=2"])
            .unwrap()
            .stops
            .len(),
        0
    );
}

#[test]
fn a_limit_on_cost_needs_a_known_cost_of_each_call() {
    let unpriced = history(&[0, 10]).replacen("10000", "null", 1);
    let refused = simulate(&unpriced, &["limits.costUSD=1"]).unwrap_err().to_string();
    assert!(refused.ends_with("does not have the cost of 1 of 2 calls"), "{refused}");
    assert!(simulate(&unpriced, &["limits.calls=1"]).is_ok());
}

#[test]
fn a_limit_on_input_or_output_needs_that_of_each_call_and_the_error_says_how_to_leave_calls_out() {
    let of_earlier = history(&[0, 10])
        .replacen("250", "null", 1)
        .replacen(":20,", ":null,", 1);
    for (set, words) in [
        ("perAgent.inputTokens=1", "the input tokens of 1 of 2 calls"),
        ("limits.outputTokens=1", "the output tokens of 1 of 2 calls"),
    ] {
        let refused = simulate(&of_earlier, &[set]).unwrap_err().to_string();
        assert!(refused.contains(words) && refused.ends_with("--since"), "{refused}");
    }
    assert!(simulate(&of_earlier, &["limits.tokens=1"]).is_ok());
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
