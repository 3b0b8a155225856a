//! Tests of scored signals and of tasks.
#![allow(clippy::wildcard_enum_match_arm)]

use jiff::Timestamp;
use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use super::super::delivery::SensorEvent;
use super::super::rules::{RulesOutcome, RulesState, SensorRules};
use super::super::{check, scored_effects::ScoredEffects};
use super::*;
use agentloop_api::SensorSpec;

fn spec(more: &Value) -> SensorSpec {
    let mut spec = json!({"agentNames": ["a"], "source": {"schedule": {"cron": "* * * * *"}}});
    let fields = spec.as_object_mut().expect("fields");
    fields.extend(more.as_object().expect("fields").clone());
    serde_json::from_value(spec).expect("a spec")
}

/// The events of one Sensor for these payloads.
fn events(more: &Value, payloads: &[Value]) -> Vec<SensorEvent> {
    let rules = SensorRules::compile("prices", &spec(more)).expect("rules");
    let mut state = RulesState::default();
    let hear = |(place, payload): (usize, &Value)| {
        let now = Timestamp::from_second(i64::try_from(place).expect("few")).expect("a moment");
        match rules.process(&mut state, now, None, payload.to_string().as_bytes()) {
            RulesOutcome::Accepted(event) => *event,
            other => panic!("{other:?}: {:?}", state.failure),
        }
    };
    payloads.iter().enumerate().map(hear).collect()
}

fn scored(gate: &str) -> Value {
    json!({
        "updates": [{"field": "last", "value": "payload"}],
        "signals": [{
            "name": "spike", "when": "payload > 5", "model": {"prompt": "A spike?"}, "gate": gate, "priority": "High",
            "cooldownSeconds": 60,
        }],
    })
}

#[test]
fn only_events_that_match_the_expression_are_scored() {
    let events = events(&scored("Notify"), &[json!(5), json!(6)]);
    assert_eq!((&events[0].trial, events[0].updates.len()), (&None, 1));
    let trial = events[1].trial.as_ref().expect("a question");
    let expected = SignalScoreRequest {
        signal: "signal/prices/spike".into(),
        prompt: "A spike?".into(),
        threshold_percent: 80,
        gate: SignalGate::Notify,
        cooldown_seconds: 60,
        notice: Some(SensorNotification {
            is_task: false,
            source: "sensor/prices".into(),
            text: "6".into(),
            priority: SignalPriority::High,
        }),
    };
    assert_eq!(
        (trial.questions.as_slice(), &*trial.data, trial.task),
        (&[expected][..], "6", false)
    );
    assert_eq!(events[1].wakes, ["sensor/prices"]);
    assert_eq!(events[1].notifications, []);
}

#[test]
fn fields_wait_for_the_score_that_gates_them_and_for_no_other() {
    let of = |gate: &str| {
        let event = events(&scored(gate), &[json!(6)]).remove(0);
        let trial = event.trial.map_or(0, |trial| trial.updates.len());
        (event.updates.len(), trial)
    };
    assert_eq!((of("Notify"), of("Update"), of("Both")), ((1, 0), (0, 1), (0, 1)));
    // The expression alone already excludes the others.
    let event = events(&scored("Both"), &[json!(5)]).remove(0);
    assert_eq!((event.updates.len(), event.trial), (0, None));
}

#[test]
fn without_an_expression_each_event_is_scored_and_the_sender_applies_no_cooldown() {
    let signals = json!({"signals": [{"name": "spike", "model": {"prompt": "?"}, "cooldownSeconds": 60}]});
    let asked = events(&signals, &[json!(1), json!(2)]);
    let asked = asked.iter().filter(|event| event.trial.is_some());
    assert_eq!(asked.count(), 2, "the receivers apply the cooldown");
}

#[test]
fn a_signal_without_notify_is_scored_without_a_notice() {
    let signals = json!({"signals": [{"name": "spike", "model": {"prompt": "?"}, "notify": false}]});
    let trial = events(&signals, &[json!(1)]).remove(0).trial.expect("a question");
    assert_eq!(trial.questions[0].notice, None);
    assert_eq!(
        trial,
        ScoredEffects {
            data: "1".into(),
            questions: trial.questions.clone(),
            ..ScoredEffects::default()
        }
    );
}

#[test]
fn each_event_adds_a_task_in_place_of_its_payload() {
    let task = json!({
        "updates": [{"field": "last", "value": "payload"}], "task": {"prompt": "'Look into ' + payload.name"},
    });
    let event = events(&task, &[json!({"name": "disk"})]).remove(0);
    assert_eq!(event.notifications[0].text, "Task: Look into disk");
    assert_eq!(
        (event.notifications.len(), &*event.notifications[0].source),
        (1, "sensor/prices")
    );
}

#[test]
fn several_signals_add_one_task_the_most_urgent_and_none_adds_none() {
    let task = json!({
        "task": {"prompt": "'look'"},
        "signals": [
            {"name": "low", "when": "payload > 1", "priority": "Low"}, {"name": "high", "when": "payload > 2", "priority": "High"},
            {"name": "asked", "when": "payload > 3", "model": {"prompt": "?"}},
        ],
    });
    let events = events(&task, &[json!(1), json!(2), json!(3), json!(4)]);
    let sources = |event: &SensorEvent| {
        event
            .notifications
            .iter()
            .map(|notice| notice.source.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(sources(&events[0]), [""; 0]);
    assert_eq!(sources(&events[1]), ["signal/prices/low"]);
    assert_eq!(sources(&events[2]), ["signal/prices/high"]);
    assert!(events[3].trial.as_ref().is_some_and(|trial| trial.task));
}

#[test]
fn all_mistakes_are_named_each_with_its_field_and_place() {
    let mistakes = json!({
        "source": {"schedule": {"cron": "61 * * * *", "timeZone": "Europe/Atlantis"}},
        "updates": [{"field": "a", "value": "1"}, {"field": "b", "value": "1 +"}],
        "signals": [{"name": "a", "when": "nothing"}, {"name": "b", "when": "true"}, {"name": "c", "when": "size()"}],
        "task": {"prompt": "'"},
    });
    let error = check(&spec(&mistakes)).expect_err("mistakes").to_string();
    let parts: Vec<&str> = error.split("; spec.").collect();
    let starts = [
        "spec.source.schedule.timeZone: Europe/Atlantis is not an IANA time zone: use for example Europe/Berlin or UTC",
        "source.schedule.cron: ",
        "updates[1].value: is not a valid expression: line 1, column 4: unexpected end",
        "signals[0].when: refers to unknown variable nothing",
        "signals[2].when: passes 0 arguments to size",
        "task.prompt: is not a valid expression: line 1, column 1: ",
    ];
    assert_eq!(parts.len(), starts.len(), "{error}");
    for (part, start) in parts.iter().zip(starts) {
        assert!(part.starts_with(start), "{part}");
    }
}
