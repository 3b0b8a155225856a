//! Tests of the effects of scores.

use pretty_assertions::assert_eq;
use rstest::rstest;
use serde_json::json;

use super::*;

fn question(gate: SignalGate, priority: SignalPriority) -> SignalScoreRequest {
    SignalScoreRequest {
        signal: "signal/prices/spike".into(),
        prompt: "How likely is a spike?".into(),
        threshold_percent: 80,
        gate,
        cooldown_seconds: 0,
        notice: Some(SensorNotification {
            is_task: false,
            source: "sensor/prices".into(),
            text: "up".into(),
            priority,
        }),
    }
}

fn event(questions: Vec<SignalScoreRequest>, task: bool) -> SensorEvent {
    SensorEvent {
        seq: 1,
        wakes: vec!["sensor/prices".into()],
        trial: Some(ScoredEffects {
            questions,
            data: "{}".into(),
            updates: vec![FieldValue {
                field: "last".into(),
                value: json!(1),
            }],
            task,
        }),
        ..SensorEvent::default()
    }
}

/// Source, text and priority of each notification, and whether fields are written and the signal wakes.
fn does(event: &SensorEvent) -> (Vec<(&str, &str, SignalPriority)>, bool, bool) {
    let told = event.notifications.iter();
    let told = told.map(|notice| (&*notice.source, &*notice.text, notice.priority));
    let wakes = event.wakes.contains(&"signal/prices/spike".to_owned());
    assert_eq!(event.trial, None);
    (told.collect(), !event.updates.is_empty(), wakes)
}

#[rstest]
#[case(79, SignalVerdict::HoldsNot)]
#[case(80, SignalVerdict::Holds)]
#[case(0, SignalVerdict::HoldsNot)]
#[case(100, SignalVerdict::Holds)]
fn a_signal_holds_from_its_threshold_on_and_not_one_below(#[case] score: u8, #[case] expected: SignalVerdict) {
    assert_eq!(
        question(SignalGate::Notify, SignalPriority::Normal).verdict(score),
        expected
    );
}

#[rstest]
#[case(SignalGate::Notify, &[], true)]
#[case(SignalGate::Update, &[("sensor/prices", "up", SignalPriority::High)], false)]
#[case(SignalGate::Both, &[], false)]
fn a_signal_that_does_not_hold_closes_its_gate(
    #[case] gate: SignalGate,
    #[case] told: &[(&str, &str, SignalPriority)],
    #[case] writes: bool,
) {
    let event = event(vec![question(gate, SignalPriority::High)], false).settled(&[SignalVerdict::HoldsNot]);
    assert_eq!(does(&event), (told.to_vec(), writes, false));
}

#[rstest]
#[case(SignalGate::Notify)]
#[case(SignalGate::Update)]
#[case(SignalGate::Both)]
fn a_signal_that_holds_notifies_writes_and_wakes(#[case] gate: SignalGate) {
    let event = event(vec![question(gate, SignalPriority::High)], false).settled(&[SignalVerdict::Holds]);
    let told = vec![("signal/prices/spike", "up", SignalPriority::High)];
    assert_eq!(does(&event), (told, true, true));
}

#[test]
fn the_first_signal_without_a_score_notifies_as_if_it_held_and_later_ones_wake_no_loop() {
    let of = |first| {
        let event = event(vec![question(SignalGate::Both, SignalPriority::High)], false);
        event.settled(&[SignalVerdict::Unscored { first }])
    };
    let text = "[not scored: the light model gave no answer] up";
    let told = vec![("signal/prices/spike", text, SignalPriority::High)];
    assert_eq!(does(&of(true)), (told, true, true));
    let told = vec![("sensor/prices", text, SignalPriority::Normal)];
    assert_eq!(does(&of(false)), (told, true, false));
}

#[test]
fn a_single_closed_gate_keeps_the_fields() {
    let questions = vec![
        question(SignalGate::Update, SignalPriority::Low),
        question(SignalGate::Notify, SignalPriority::Low),
    ];
    let of = |verdicts: &[SignalVerdict]| !event(questions.clone(), false).settled(verdicts).updates.is_empty();
    assert!(of(&[SignalVerdict::Holds, SignalVerdict::HoldsNot]));
    assert!(!of(&[SignalVerdict::HoldsNot, SignalVerdict::Holds]));
}

#[test]
fn a_task_is_added_once_by_its_most_urgent_signal() {
    let questions = vec![
        question(SignalGate::Notify, SignalPriority::Normal),
        question(SignalGate::Notify, SignalPriority::High),
    ];
    let of = |verdicts: &[SignalVerdict]| event(questions.clone(), true).settled(verdicts).notifications;
    let both = of(&[SignalVerdict::Holds, SignalVerdict::Holds]);
    assert_eq!((both.len(), both[0].priority), (1, SignalPriority::High));
    assert_eq!(
        of(&[SignalVerdict::Holds, SignalVerdict::HoldsNot])[0].priority,
        SignalPriority::Normal
    );
    assert!(of(&[SignalVerdict::HoldsNot, SignalVerdict::HoldsNot]).is_empty());
}

#[test]
fn a_model_is_shown_8192_bytes_of_a_payload_and_whole_characters() {
    let of = |length: usize| ScoredEffects::data(&json!("ü".repeat(length)));
    assert_eq!(of(4095).len(), MAX_DATA_BYTES);
    assert_eq!(of(4096).len(), MAX_DATA_BYTES - 1);
    assert!(of(4095).ends_with('"') && !of(4096).ends_with('"'));
}
