//! Tests of what a score leads to.

use pretty_assertions::assert_eq;
use rstest::rstest;
use serde_json::json;

use super::*;

fn question(gate: Gate, priority: Priority) -> Question {
    Question {
        signal: "signal/prices/spike".into(),
        prompt: "How likely is a spike?".into(),
        threshold_percent: 80,
        gate,
        cooldown_seconds: 0,
        notice: Some(Notice {
            source: "sensor/prices".into(),
            text: "up".into(),
            priority,
        }),
    }
}

fn event(questions: Vec<Question>, task: bool) -> Event {
    Event {
        seq: 1,
        wakes: vec!["sensor/prices".into()],
        trial: Some(Trial {
            questions,
            data: "{}".into(),
            updates: vec![FieldValue {
                field: "last".into(),
                value: json!(1),
            }],
            task,
        }),
        ..Event::default()
    }
}

/// Source, text and priority of each notification, and whether fields are written and the signal wakes.
fn does(event: &Event) -> (Vec<(&str, &str, Priority)>, bool, bool) {
    let told = event.notifications.iter();
    let told = told.map(|notice| (&*notice.source, &*notice.text, notice.priority));
    let wakes = event.wakes.contains(&"signal/prices/spike".to_owned());
    assert_eq!(event.trial, None);
    (told.collect(), !event.updates.is_empty(), wakes)
}

#[rstest]
#[case(79, Verdict::HoldsNot)]
#[case(80, Verdict::Holds)]
#[case(0, Verdict::HoldsNot)]
#[case(100, Verdict::Holds)]
fn a_signal_holds_from_its_threshold_on_and_not_one_below(#[case] score: u8, #[case] expected: Verdict) {
    assert_eq!(question(Gate::Notify, Priority::Normal).verdict(score), expected);
}

#[rstest]
#[case(Gate::Notify, &[], true)]
#[case(Gate::Update, &[("sensor/prices", "up", Priority::High)], false)]
#[case(Gate::Both, &[], false)]
fn a_signal_that_does_not_hold_closes_its_gate(
    #[case] gate: Gate,
    #[case] told: &[(&str, &str, Priority)],
    #[case] writes: bool,
) {
    let event = event(vec![question(gate, Priority::High)], false).settled(&[Verdict::HoldsNot]);
    assert_eq!(does(&event), (told.to_vec(), writes, false));
}

#[rstest]
#[case(Gate::Notify)]
#[case(Gate::Update)]
#[case(Gate::Both)]
fn a_signal_that_holds_tells_writes_and_wakes(#[case] gate: Gate) {
    let event = event(vec![question(gate, Priority::High)], false).settled(&[Verdict::Holds]);
    let told = vec![("signal/prices/spike", "up", Priority::High)];
    assert_eq!(does(&event), (told, true, true));
}

#[test]
fn the_first_signal_without_a_score_is_told_as_if_it_held_and_the_next_ones_wake_nobody() {
    let of = |first| {
        let event = event(vec![question(Gate::Both, Priority::High)], false);
        event.settled(&[Verdict::Unscored { first }])
    };
    let text = "[not scored: the light model gave no answer] up";
    let told = vec![("signal/prices/spike", text, Priority::High)];
    assert_eq!(does(&of(true)), (told, true, true));
    let told = vec![("sensor/prices", text, Priority::Normal)];
    assert_eq!(does(&of(false)), (told, true, false));
}

#[test]
fn one_gate_that_is_closed_keeps_the_fields() {
    let questions = vec![
        question(Gate::Update, Priority::Low),
        question(Gate::Notify, Priority::Low),
    ];
    let of = |verdicts: &[Verdict]| !event(questions.clone(), false).settled(verdicts).updates.is_empty();
    assert!(of(&[Verdict::Holds, Verdict::HoldsNot]));
    assert!(!of(&[Verdict::HoldsNot, Verdict::Holds]));
}

#[test]
fn a_task_is_given_once_by_its_most_urgent_signal() {
    let questions = vec![
        question(Gate::Notify, Priority::Normal),
        question(Gate::Notify, Priority::High),
    ];
    let of = |verdicts: &[Verdict]| event(questions.clone(), true).settled(verdicts).notifications;
    let both = of(&[Verdict::Holds, Verdict::Holds]);
    assert_eq!((both.len(), both[0].priority), (1, Priority::High));
    assert_eq!(of(&[Verdict::Holds, Verdict::HoldsNot])[0].priority, Priority::Normal);
    assert!(of(&[Verdict::HoldsNot, Verdict::HoldsNot]).is_empty());
}

#[test]
fn a_model_is_shown_8192_bytes_of_a_payload_and_whole_characters() {
    let of = |length: usize| Trial::data(&json!("ü".repeat(length)));
    assert_eq!(of(4095).len(), MOST_DATA_BYTES);
    assert_eq!(of(4096).len(), MOST_DATA_BYTES - 1);
    assert!(of(4095).ends_with('"') && !of(4096).ends_with('"'));
}
