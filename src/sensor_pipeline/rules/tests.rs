//! Tests of the rules.
#![allow(clippy::wildcard_enum_match_arm)]

use pretty_assertions::assert_eq;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use agentloop_api::sensor::SensorTotals;

const SECOND: SignedDuration = SignedDuration::from_secs(1);

fn rules(more: Value) -> SensorRules {
    SensorRules::compile("prices", &spec(more)).expect("rules")
}

fn spec(more: Value) -> SensorSpec {
    let mut spec = json!({"agentNames": ["a"], "source": {"schedule": {"cron": "* * * * *"}}});
    let Value::Object(more) = more else {
        panic!("no fields");
    };
    spec.as_object_mut().expect("fields").extend(more);
    serde_json::from_value(spec).expect("a spec")
}

fn at(milliseconds: i64) -> Timestamp {
    Timestamp::from_millisecond(1_767_596_400_000 + milliseconds).expect("a moment")
}

/// One Sensor and its state.
struct Sensor(SensorRules, RulesState);

impl Sensor {
    fn new(more: Value) -> Self {
        Self(rules(more), RulesState::default())
    }

    fn process(&mut self, milliseconds: i64, payload: &Value) -> RulesOutcome {
        self.0
            .process(&mut self.1, at(milliseconds), None, payload.to_string().as_bytes())
    }

    fn accepts(&mut self, milliseconds: i64, payload: &Value) -> SensorEvent {
        match self.process(milliseconds, payload) {
            RulesOutcome::Accepted(event) => *event,
            other => panic!("{other:?} at {milliseconds}: {:?}", self.1.failure),
        }
    }
}

#[test]
fn a_payload_that_would_fill_the_memory_is_a_failure_and_the_next_one_is_accepted() {
    let mut sensor = Sensor::new(json!({
        "limits": {"maxPayloadBytes": 1_048_576},
        "notification": {"text": "'was ' + json(previous).slice(0, 9)"},
    }));
    let list = |items: usize| json!(vec![0; items]);
    assert_eq!(sensor.process(0, &list(500_000)), RulesOutcome::Failed);
    let failure = sensor.1.failure.clone().expect("a failure");
    assert!(failure.contains("more than 12 MiB of memory"), "{failure}");
    assert_eq!((sensor.1.totals.errors, sensor.1.previous.is_none()), (1, true));
    sensor.accepts(1_000, &list(390_000));
    let event = sensor.accepts(2_000, &json!(1));
    assert_eq!(event.notifications[0].text, "was [0,0,0,0,");
}

fn sources(event: &SensorEvent) -> Vec<&str> {
    event.notifications.iter().map(|notice| &*notice.source).collect()
}

#[test]
fn an_event_writes_its_fields_and_names_what_it_wakes() {
    let mut sensor = Sensor::new(json!({"updates": [
        {"field": "last", "value": "payload.prices.slice(0, 2)"}, {"field": "change", "value": "payload.change"},
    ]}));
    let event = sensor.accepts(0, &json!({"prices": [1, 2, 3], "change": 0.5}));
    let expected = json!({
        "seq": 1, "id": event.id, "at": at(0), "wakes": ["sensor/prices"],
        "updates": [{"field": "last", "value": [1, 2]}, {"field": "change", "value": 0.5}],
    });
    assert_eq!(serde_json::to_value(&event).expect("JSON"), expected);
    assert!(event.id.starts_with("sha256:") && event.id.len() == 39, "{}", event.id);
}

#[test]
fn without_updates_and_signals_an_event_adds_a_notification_of_its_payload() {
    let mut sensor = Sensor::new(json!({}));
    let event = sensor.accepts(0, &json!({"a": "b"}));
    assert_eq!(sources(&event), ["sensor/prices"]);
    assert_eq!(event.notifications[0].text, "{\"a\":\"b\"}");
    let text = match sensor.0.process(&mut sensor.1, at(1), None, b"no json") {
        RulesOutcome::Accepted(event) => event.notifications[0].text.clone(),
        other => panic!("{other:?}"),
    };
    assert_eq!(text, "\"no json\"");
}

#[test]
fn with_updates_an_event_adds_a_notification_where_one_is_set() {
    let updates = json!([{"field": "x", "value": "payload"}]);
    assert!(sources(&Sensor::new(json!({"updates": updates})).accepts(0, &json!(1))).is_empty());
    let text = json!({"text": "'now ' + string(payload)"});
    let event = Sensor::new(json!({"updates": updates, "notification": text})).accepts(0, &json!(1));
    assert_eq!(event.notifications[0].text, "now 1");
}

#[test]
fn a_text_may_have_2048_bytes_and_of_a_longer_one_the_beginning_is_kept() {
    let of = |length: usize| {
        let event = Sensor::new(json!({})).accepts(0, &json!("x".repeat(length - 2)));
        event.notifications[0].text.clone()
    };
    assert!(!of(MAX_TEXT_BYTES).contains("[cut]"));
    let text = of(MAX_TEXT_BYTES + 1);
    assert!(
        text.ends_with("x [cut]") && text.len() == MAX_TEXT_BYTES,
        "{}",
        text.len()
    );
}

#[test]
fn a_message_equal_to_the_previous_event_is_filtered() {
    let mut sensor = Sensor::new(json!({}));
    let first = sensor.accepts(0, &json!({"a": 1}));
    assert_eq!(sensor.process(1, &json!({"a": 1})), RulesOutcome::Filtered);
    let second = sensor.accepts(2, &json!({"a": 2}));
    // The same content after something else is a new event.
    let third = sensor.accepts(3, &json!({"a": 1}));
    assert_eq!((first.seq, second.seq, third.seq), (1, 2, 3));
    assert_eq!(first.id, third.id);
    assert_eq!(sensor.1.totals.filtered, 1);
}

#[test]
fn an_id_of_the_sender_is_accepted_once_while_256_are_remembered() {
    let mut sensor = Sensor::new(json!({"limits": {"perMinute": 1000}}));
    let mut hear = |id: usize| sensor.0.process(&mut sensor.1, at(0), Some(&format!("id {id}")), b"{}");
    assert!(matches!(hear(0), RulesOutcome::Accepted(event) if event.id == "id 0"));
    for id in 1..256 {
        assert!(matches!(hear(id), RulesOutcome::Accepted(_)));
    }
    assert_eq!(hear(0), RulesOutcome::Filtered);
    assert!(matches!(hear(256), RulesOutcome::Accepted(_)));
    assert!(matches!(hear(0), RulesOutcome::Accepted(_)));
}

#[test]
fn a_payload_may_have_its_maximum_size_and_depth_and_no_more() {
    let mut sensor = Sensor::new(json!({"limits": {"maxPayloadBytes": 100}}));
    assert!(matches!(
        sensor.process(0, &json!("x".repeat(98))),
        RulesOutcome::Accepted(_)
    ));
    assert_eq!(sensor.process(1, &json!("x".repeat(99))), RulesOutcome::Dropped);
    assert!(matches!(
        sensor.process(2, &json!("y".repeat(98))),
        RulesOutcome::Accepted(_)
    ));
    let nested = |levels| (0..levels).fold(json!(1), |inner, _| json!([inner]));
    assert!(matches!(
        sensor.process(3, &nested(MAX_DEPTH)),
        RulesOutcome::Accepted(_)
    ));
    assert_eq!(sensor.process(4, &nested(MAX_DEPTH + 1)), RulesOutcome::TooDeep);
    assert_eq!(sensor.1.totals.dropped, 2);
}

#[test]
fn a_payload_nested_too_deeply_is_rejected() {
    let mut sensor = Sensor::new(json!({}));
    let nested = |levels| (0..levels).fold(json!(1), |inner, _| json!([inner]));
    for levels in [126, 127, 128, 1_000] {
        assert_eq!(sensor.process(levels, &nested(levels)), RulesOutcome::TooDeep);
    }
    assert_eq!(sensor.1.totals.dropped, 4);
}

#[test]
fn the_newest_event_within_the_interval_is_delivered_at_its_end() {
    let mut sensor = Sensor::new(json!({"limits": {"minIntervalMilliseconds": 1000}}));
    sensor.accepts(0, &json!(1));
    assert_eq!(sensor.process(100, &json!(2)), RulesOutcome::Held);
    assert_eq!(sensor.process(999, &json!(3)), RulesOutcome::Held);
    assert_eq!(sensor.0.waits_until(&sensor.1), Some(at(1000)));
    assert_eq!(sensor.0.release_held(&mut sensor.1, at(999)), None);
    let Some(RulesOutcome::Accepted(event)) = sensor.0.release_held(&mut sensor.1, at(1000)) else {
        panic!("it does not come");
    };
    assert_eq!((event.seq, event.at, &*event.notifications[0].text), (2, at(1000), "3"));
    assert_eq!(sensor.0.waits_until(&sensor.1), None);
    // The interval starts over, and is over at its end.
    assert_eq!(sensor.process(1999, &json!(4)), RulesOutcome::Held);
    let event = sensor.accepts(2000, &json!(5));
    assert_eq!(event.seq, 3);
    assert_eq!(
        sensor.1.totals,
        SensorTotals {
            events: 3,
            notifications: 3,
            dropped: 2,
            ..SensorTotals::default()
        }
    );
}

#[test]
fn a_held_event_is_filtered_if_it_equals_the_previous_event() {
    let mut sensor = Sensor::new(json!({"limits": {"minIntervalMilliseconds": 1000}}));
    sensor.accepts(0, &json!(1));
    assert_eq!(sensor.process(100, &json!(2)), RulesOutcome::Held);
    assert_eq!(sensor.process(101, &json!(2)), RulesOutcome::Filtered);
    assert_eq!(sensor.process(200, &json!(1)), RulesOutcome::Held);
    assert_eq!(
        sensor.0.release_held(&mut sensor.1, at(1000)),
        Some(RulesOutcome::Filtered)
    );
    assert_eq!((sensor.1.totals.filtered, sensor.1.totals.dropped), (2, 1));
}

#[test]
fn in_any_minute_at_most_the_limit_of_events_is_accepted() {
    let mut sensor = Sensor::new(json!({"limits": {"perMinute": 2}}));
    sensor.accepts(0, &json!(1));
    sensor.accepts(30_000, &json!(2));
    assert_eq!(sensor.process(30_001, &json!(3)), RulesOutcome::Dropped);
    assert_eq!(sensor.process(60_000, &json!(3)), RulesOutcome::Dropped);
    sensor.accepts(61_000, &json!(3));
    assert_eq!(sensor.process(61_001, &json!(4)), RulesOutcome::Dropped);
    assert_eq!(sensor.1.totals.dropped, 3);
}

#[test]
fn a_signal_notifies_where_it_holds_and_fields_are_written_all_the_same() {
    let mut sensor = Sensor::new(json!({
        "updates": [{"field": "x", "value": "payload"}],
        "signals": [{"name": "high", "when": "payload > 5", "priority": "High"}],
    }));
    let event = sensor.accepts(0, &json!(5));
    assert_eq!(
        (sources(&event).len(), event.updates.len(), &*event.wakes),
        (0, 1, &["sensor/prices".to_owned()][..])
    );
    let event = sensor.accepts(1, &json!(6));
    assert_eq!(sources(&event), ["signal/prices/high"]);
    assert_eq!(
        (event.updates.len(), event.notifications[0].priority),
        (1, SignalPriority::High)
    );
    assert_eq!(event.wakes, ["sensor/prices", "signal/prices/high"]);
}

#[test]
fn a_signal_that_gates_updates_notifies_of_each_event_and_one_that_gates_both_of_none_without_it() {
    let of = |gate: &str| {
        Sensor::new(json!({
            "updates": [{"field": "x", "value": "payload"}],
            "signals": [{"name": "high", "when": "payload > 5", "gate": gate}],
        }))
    };
    let event = of("Update").accepts(0, &json!(1));
    assert_eq!((sources(&event), event.updates.len()), (vec!["sensor/prices"], 0));
    let event = of("Update").accepts(0, &json!(6));
    assert_eq!((sources(&event), event.updates.len()), (vec!["signal/prices/high"], 1));
    let event = of("Both").accepts(0, &json!(1));
    assert_eq!((sources(&event).len(), event.updates.len()), (0, 0));
    let event = of("Both").accepts(0, &json!(6));
    assert_eq!((sources(&event), event.updates.len()), (vec!["signal/prices/high"], 1));
}

#[test]
fn a_signal_that_does_not_notify_only_wakes() {
    let mut sensor = Sensor::new(json!({"signals": [{"name": "high", "when": "true", "notify": false}]}));
    let event = sensor.accepts(0, &json!(1));
    assert_eq!((sources(&event).len(), &*event.wakes[1]), (0, "signal/prices/high"));
}

#[test]
fn a_signal_holds_again_at_the_end_of_its_cooldown_and_not_before() {
    let mut sensor = Sensor::new(json!({"signals": [{"name": "high", "when": "payload > 5", "cooldownSeconds": 60}]}));
    assert_eq!(sources(&sensor.accepts(0, &json!(6))).len(), 1);
    assert_eq!(sources(&sensor.accepts(59_999, &json!(7))).len(), 0);
    assert_eq!(sources(&sensor.accepts(60_000, &json!(8))).len(), 1);
    // A signal that did not hold starts no cooldown.
    let mut sensor = Sensor::new(json!({"signals": [{"name": "high", "when": "payload > 5", "cooldownSeconds": 60}]}));
    assert_eq!(sources(&sensor.accepts(0, &json!(5))).len(), 0);
    assert_eq!(sources(&sensor.accepts(1, &json!(6))).len(), 1);
}

#[test]
fn an_expression_can_use_the_payload_of_the_last_accepted_event() {
    let mut sensor = Sensor::new(json!({"updates": [
        {"field": "change", "value": "previous == null ? 0 : payload.price - previous.price"},
    ]}));
    let mut change = |milliseconds, price: i64| {
        sensor.accepts(milliseconds, &json!({"price": price})).updates[0]
            .value
            .clone()
    };
    assert_eq!(
        (change(0, 10), change(1, 15), change(2, 12)),
        (json!(0), json!(5), json!(-3))
    );
    // Without an expression that uses it, the previous payload is not kept.
    let mut sensor = Sensor::new(json!({}));
    sensor.accepts(0, &json!({"price": 1}));
    assert_eq!(sensor.1.previous, None);
}

#[test]
fn an_event_that_is_not_understood_changes_nothing_and_names_the_field() {
    let mut sensor = Sensor::new(json!({
        "updates": [{"field": "ok", "value": "1"}, {"field": "x", "value": "payload.price"}],
    }));
    for streak in 1..=2 {
        assert_eq!(sensor.process(0, &json!({"secret": "hunter2"})), RulesOutcome::Failed);
        assert_eq!(sensor.1.consecutive_failures, streak);
    }
    let failure = sensor.1.failure.clone().expect("a failure");
    assert!(
        failure.starts_with("spec.updates[1].value: refers to a field"),
        "{failure}"
    );
    assert!(!failure.contains("hunter2"));
    assert_eq!((sensor.1.seq, sensor.1.totals.updates), (0, 0));
    sensor.accepts(1, &json!({"price": 1}));
    assert_eq!((sensor.1.consecutive_failures, &sensor.1.failure), (0, &None));
    let mut sensor = Sensor::new(json!({"signals": [{"name": "a", "when": "payload"}]}));
    assert_eq!(sensor.process(0, &json!(1)), RulesOutcome::Failed);
    assert_eq!(
        sensor.1.failure.as_deref(),
        Some("spec.signals[0].when: must be true or false")
    );
    let mut sensor = Sensor::new(json!({"notification": {"text": "payload"}}));
    assert_eq!(sensor.process(0, &json!(1)), RulesOutcome::Failed);
    assert_eq!(
        sensor.0.process(&mut sensor.1, at(1), None, b"\xff"),
        RulesOutcome::Failed
    );
}

#[test]
fn a_value_may_have_8_kib_and_not_one_byte_more() {
    let mut sensor = Sensor::new(json!({"updates": [{"field": "x", "value": "payload"}]}));
    assert!(matches!(
        sensor.process(0, &json!("x".repeat(MAX_VALUE_BYTES - 2))),
        RulesOutcome::Accepted(_)
    ));
    assert_eq!(
        sensor.process(1, &json!("x".repeat(MAX_VALUE_BYTES - 1))),
        RulesOutcome::Failed
    );
    let failure = sensor.1.failure.clone().expect("a failure");
    assert_eq!(
        failure,
        "spec.updates[0].value: must be at most 8192 bytes as JSON, and has 8193"
    );
}

#[test]
fn an_error_of_compilation_names_its_field() {
    let of = |more| {
        SensorRules::compile("prices", &spec(more)).expect_err("an error").0[0]
            .field
            .clone()
    };
    assert_eq!(
        of(json!({"updates": [{"field": "a", "value": "1"}, {"field": "b", "value": "1 +"}]})),
        "spec.updates[1].value"
    );
    assert_eq!(
        of(json!({"signals": [{"name": "a", "when": "nothing"}]})),
        "spec.signals[0].when"
    );
    assert_eq!(of(json!({"notification": {"text": "'"}})), "spec.notification.text");
}

#[test]
fn a_clock_that_was_set_back_holds_nothing_for_longer_than_its_own_limit() {
    let mut sensor = Sensor::new(json!({
        "limits": {"minIntervalMilliseconds": 1000, "perMinute": 1},
        "signals": [{"name": "a", "when": "true", "cooldownSeconds": 60}],
    }));
    let year = 365 * 86_400_000;
    sensor.accepts(year, &json!(1));
    assert_eq!(sensor.process(0, &json!(2)), RulesOutcome::Held);
    assert_eq!(sensor.0.waits_until(&sensor.1), Some(at(1000)));
    let Some(RulesOutcome::Accepted(event)) = sensor.0.release_held(&mut sensor.1, at(1000)) else {
        panic!("it does not come");
    };
    assert!(sources(&event).is_empty());
    assert_eq!(sources(&sensor.accepts(62_000, &json!(3))).len(), 1);
}

/// One step of a random history: milliseconds since the last, payload, the sender's id.
fn step() -> impl Strategy<Value = (i64, i64, Option<u8>)> {
    (0..5_000_i64, 0..6_i64, prop::option::of(0..4_u8))
}

proptest! {
    #[test]
    fn each_event_counts_in_one_total_and_numbers_have_no_gaps(
        steps in prop::collection::vec(step(), 1..80),
        interval in prop::sample::select(vec![0, 700, 4_000]),
        per_minute in 1..30_u32,
    ) {
        let mut sensor = Sensor::new(json!({
            "limits": {"minIntervalMilliseconds": interval, "perMinute": per_minute, "maxPayloadBytes": 8},
            "updates": [{"field": "x", "value": "10 / payload"}],
            "signals": [{"name": "a", "when": "payload > 2", "cooldownSeconds": 2}],
        }));
        let (mut now, mut arrived, mut seq) = (at(0), 0, 0);
        let mut accepted: Vec<Timestamp> = Vec::new();
        for (after, payload, id) in steps {
            now = now.checked_add(SignedDuration::from_millis(after)).expect("a moment");
            let mut seen = Vec::new();
            seen.extend(sensor.0.release_held(&mut sensor.1, now));
            let body = if payload == 5 { json!("too large") } else { json!(payload) };
            let id = id.map(|id| id.to_string());
            seen.push(sensor.0.process(&mut sensor.1, now, id.as_deref(), body.to_string().as_bytes()));
            arrived += 1;
            for outcome in seen {
                if let RulesOutcome::Accepted(event) = outcome {
                    seq += 1;
                    prop_assert_eq!(event.seq, seq);
                    accepted.push(now);
                }
            }
            // The stored state is the complete state.
            let kept = serde_json::to_string(&sensor.1).expect("JSON");
            sensor.1 = serde_json::from_str(&kept).expect("a state");
            let totals = sensor.1.totals;
            let waiting = i64::from(sensor.1.held.is_some());
            prop_assert_eq!(totals.events + totals.filtered + totals.dropped + totals.errors + waiting, arrived);
            prop_assert_eq!(totals.events, seq);
            let minute = accepted.iter().filter(|then| now.duration_since(**then) < SECOND * 60);
            prop_assert!(minute.count() <= usize::try_from(per_minute).expect("small"));
        }
    }
}

/// As many large patterns as the schema allows: 6,400, each with two automata of up to 256 KiB.
fn bomb() -> SensorSpec {
    let many = format!("[{}]", vec![r"matches('','\\w{5}')"; 194].join(","));
    assert!(many.len() <= crate::expression::MAX_BYTES);
    let updates: Vec<_> = (0..16)
        .map(|place| json!({"field": format!("f{place}"), "value": many}))
        .collect();
    let signals: Vec<_> = (0..16)
        .map(|place| json!({"name": format!("s{place}"), "when": many}))
        .collect();
    spec(json!({"updates": updates, "signals": signals, "notification": {"text": many}}))
}

#[test]
fn a_spec_full_of_large_patterns_is_refused_after_the_first_32_of_them() {
    let begun = std::time::Instant::now();
    let mistakes = SensorRules::check(&bomb()).expect_err("mistakes").to_string();
    assert!(
        mistakes.contains("spec.updates[0].value: calls matches too often"),
        "{mistakes}"
    );
    assert!(
        mistakes.contains("spec.notification.text: calls matches too often"),
        "{mistakes}"
    );
    // Only a small part of them is compiled before the spec is rejected; all take two hundred times as long.
    assert!(
        begun.elapsed() < std::time::Duration::from_mins(1),
        "{:?}",
        begun.elapsed()
    );
}

#[test]
fn a_check_finds_what_compiling_finds() {
    for more in [
        json!({}),
        json!({"updates": [{"field": "a", "value": "payload."}], "signals": [{"name": "s", "when": "playload"}]}),
        json!({"updates": [{"field": "a", "value": "payload.a"}], "notification": {"text": "now +"}}),
        json!({"task": {"prompt": "nobody()"}}),
    ] {
        let spec = spec(more);
        assert_eq!(
            SensorRules::check(&spec),
            SensorRules::compile("prices", &spec).map(drop)
        );
    }
}

#[test]
fn a_text_is_cut_by_its_bytes_and_by_those_that_it_has_as_json() {
    let escaped = |text: &str| serde_json::to_string(text).expect("a text").len() - 2;
    for (one, max) in [("a", 2_048), ("é", 1_024), ("\"", 2_048), ("\u{1}", 682)] {
        let text = one.repeat(max);
        assert_eq!(truncate(text.clone()), text, "{one:?}");
        let longer = truncate(one.repeat(max + 1));
        assert!(longer.ends_with(CUT) && longer.starts_with(one), "{one:?}");
        assert!(
            longer.len() <= MAX_TEXT_BYTES && escaped(&longer) <= MAX_ESCAPED_BYTES,
            "{one:?}"
        );
    }
    assert_eq!(truncate(String::new()), "");
}

/// The largest event that an ASCII spec and any payload can produce.
#[test]
fn the_largest_event_has_room_in_one_delivery() {
    let control = "\u{1}".repeat(4_000);
    let updates: Vec<_> = (0..16)
        .map(|place| json!({"field": format!("f{place}"), "value": "payload.long"}))
        .collect();
    let signals: Vec<_> = (0..16)
        .map(|place| json!({"name": format!("s{place}"), "gate": "Both", "model": {"prompt": "p".repeat(2_048)}}))
        .collect();
    let mut sensor = Sensor::new(json!({
        "updates": updates, "signals": signals, "notification": {"text": "payload.control"},
        "limits": {"maxPayloadBytes": 1_048_576},
    }));
    let event = sensor.accepts(0, &json!({"long": "x".repeat(MAX_VALUE_BYTES - 2), "control": control}));
    assert_eq!(event.trial.as_ref().expect("a trial").questions.len(), 16);
    let bytes = serde_json::to_string(&event).expect("JSON").len();
    assert!(bytes < 256 * 1024 - 1024, "{bytes}");
    assert!(event.is_plausible());
}
