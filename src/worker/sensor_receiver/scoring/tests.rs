//! Tests of events that wait for a score.
#![allow(clippy::wildcard_enum_match_arm)]

use pretty_assertions::assert_eq;
use serde_json::json;

use super::super::SensorRecord;
use super::*;
use crate::api::sensor::{SignalGate, SignalPriority};
use crate::sensor_pipeline::delivery::{Delivery, FieldValue, SensorNotification};
use crate::sensor_pipeline::scored_effects::ScoredEffects;

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_767_596_400 + seconds).expect("a moment")
}

fn question(signal: &str, cooldown_seconds: u32) -> SignalScoreRequest {
    SignalScoreRequest {
        signal: format!("signal/prices/{signal}"),
        prompt: "How likely?".into(),
        threshold_percent: 80,
        gate: SignalGate::Both,
        cooldown_seconds,
        notice: Some(SensorNotification {
            is_task: false,
            source: "sensor/prices".into(),
            text: "up".into(),
            priority: SignalPriority::Normal,
        }),
    }
}

fn event(seq: i64, questions: Vec<SignalScoreRequest>) -> SensorEvent {
    let updates = vec![FieldValue {
        field: "last".into(),
        value: json!(seq),
    }];
    let trial = ScoredEffects {
        questions,
        data: format!("{{\"n\":{seq}}}"),
        updates: updates.clone(),
        task: false,
    };
    let is_plain = trial.questions.is_empty();
    SensorEvent {
        seq,
        at: at(seq),
        updates: if is_plain { updates } else { Vec::new() },
        trial: (!is_plain).then_some(trial),
        ..SensorEvent::default()
    }
}

/// The Sensors of a worker and its journal, restarted after each step.
#[derive(Default)]
struct Worker {
    journal: BTreeMap<String, SensorRecord>,
    /// The state of the engine: a request for a score, and its outcome.
    asked: Option<String>,
    scored: Option<(String, Option<u8>)>,
    /// Whether the queue has no room for its events.
    is_full: bool,
}

/// Builds a delivery of the Sensor without events.
fn nothing() -> Delivery {
    Delivery {
        sensor: "uid".into(),
        ..Delivery::default()
    }
}

impl Worker {
    fn sensors(&self) -> LoopSensors {
        LoopSensors::restore(self.journal.values().cloned().collect())
    }

    fn keep(&mut self, happened: &SensorTransition) -> Option<EngineInput> {
        let kept = happened.record();
        self.journal.insert(kept.sensor.clone(), kept);
        happened.input().cloned()
    }

    /// Whether an event is taken.
    fn takes(&mut self, sensor: &str, event: SensorEvent) -> bool {
        let delivery = Delivery {
            sensor: sensor.into(),
            name: "prices".into(),
            events: vec![event],
            ..Delivery::default()
        };
        let happened = self.sensors().take(at(0), &delivery);
        happened.is_some_and(|happened| {
            let input = self.keep(&happened);
            assert!(input.is_none(), "it took effect at once: {input:?}");
            true
        })
    }

    /// Returns what takes effect until a score is needed: event numbers, and how many fields and notifications.
    fn settles(&mut self, now: i64) -> Vec<(String, usize, usize)> {
        let mut settled = Vec::new();
        loop {
            let scored = self.scored.clone();
            let scored = scored.as_ref().map(|(id, score)| (&**id, *score));
            let scoring = (scored, self.asked.is_some());
            let step = self.sensors().step(at(now), scoring, |_| !self.is_full);
            let input = match step {
                None => return settled,
                Some(ScoringStep::Happened(happened)) => self.keep(&happened).expect("an input"),
                Some(ScoringStep::Hear(input)) => *input,
            };
            match input {
                EngineInput::Sensed(event) => settled.push((event.id, event.updates.len(), event.notices.len())),
                EngineInput::Score(question) => self.asked = Some(question.id),
                EngineInput::ScoreTaken { id } => {
                    assert_eq!(self.asked.take(), Some(id));
                    self.scored = None;
                }
                other => panic!("{other:?}"),
            }
        }
    }

    fn scores(&mut self, now: i64, score: Option<u8>) -> Vec<(String, usize, usize)> {
        self.scored = Some((self.asked.clone().expect("a question"), score));
        self.settles(now)
    }
}

fn settled(seq: i64, updates: usize, notices: usize) -> Vec<(String, usize, usize)> {
    vec![(format!("uid/{seq}"), updates, notices)]
}

#[test]
fn an_event_takes_effect_once_all_its_signals_are_scored_and_later_ones_keep_their_order() {
    let mut worker = Worker::default();
    assert!(worker.takes("uid", event(1, vec![question("a", 0), question("b", 0)])));
    assert!(worker.takes("uid", event(2, Vec::new())));
    assert!(worker.takes("uid", event(3, vec![question("a", 0)])));
    assert_eq!(
        worker.sensors().delivered_through(&nothing()).through,
        3,
        "all of them are on disk here"
    );
    assert!(!worker.takes("uid", event(3, Vec::new())), "it is known");
    assert_eq!(worker.settles(10), []);
    assert_eq!(worker.asked.as_deref(), Some("uid/1/signal/prices/a"));
    assert_eq!(worker.scores(10, Some(80)), []);
    assert_eq!(worker.asked.as_deref(), Some("uid/1/signal/prices/b"));
    let both = [("uid/1".to_owned(), 1, 2), ("uid/2".to_owned(), 1, 0)];
    assert_eq!(worker.scores(10, Some(100)), both);
    assert_eq!(worker.asked.as_deref(), Some("uid/3/signal/prices/a"));
    assert_eq!(worker.scores(10, Some(79)), settled(3, 0, 0));
    assert_eq!(worker.asked, None);
    assert_eq!(
        worker.sensors().values(),
        [("last", &json!(2), at(2))],
        "what was kept out is no value"
    );
}

#[test]
fn a_signal_that_held_is_not_scored_again_before_its_cooldown_is_over() {
    let mut worker = Worker::default();
    assert!(worker.takes("uid", event(1, vec![question("a", 60)])));
    worker.settles(0);
    assert_eq!(worker.scores(0, Some(80)), settled(1, 1, 1));
    assert!(worker.takes("uid", event(2, vec![question("a", 60)])));
    assert_eq!(worker.settles(59), settled(2, 0, 0));
    assert_eq!(worker.asked, None);
    assert!(worker.takes("uid", event(3, vec![question("a", 60)])));
    assert_eq!(worker.settles(60), []);
    assert_eq!(worker.scores(60, Some(79)), settled(3, 0, 0));
    // A signal that did not hold has no cooldown.
    assert!(worker.takes("uid", event(4, vec![question("a", 60)])));
    worker.settles(61);
    assert!(worker.asked.is_some());
}

#[test]
fn a_cooldown_that_ends_while_a_later_signal_is_scored_costs_no_second_question() {
    let mut worker = Worker::default();
    assert!(worker.takes("uid", event(1, vec![question("a", 60)])));
    worker.settles(0);
    worker.scores(0, Some(80));
    assert!(worker.takes("uid", event(2, vec![question("a", 60), question("b", 0)])));
    worker.settles(59);
    assert_eq!(worker.asked.as_deref(), Some("uid/2/signal/prices/b"));
    assert_eq!(worker.scores(61, Some(80)), settled(2, 0, 1));
}

#[test]
fn a_clock_that_was_set_back_makes_no_cooldown_longer() {
    let mut worker = Worker::default();
    assert!(worker.takes("uid", event(1, vec![question("a", 60)])));
    worker.settles(1000);
    worker.scores(1000, Some(80));
    assert!(worker.takes("uid", event(2, vec![question("a", 60)])));
    assert_eq!(worker.settles(0), []);
    assert!(worker.asked.is_some());
}

#[test]
fn sixteen_events_of_a_sensor_may_wait_and_another_one_once_one_has_taken_effect() {
    let mut worker = Worker::default();
    for seq in 1..=16 {
        assert!(worker.takes("uid", event(seq, vec![question("a", 0)])), "{seq}");
    }
    assert!(!worker.takes("uid", event(17, vec![question("a", 0)])));
    assert!(!worker.takes("uid", event(17, Vec::new())), "order is kept");
    assert_eq!(worker.sensors().delivered_through(&nothing()).through, 16);
    assert!(
        worker.takes("other", event(5, vec![question("a", 0)])),
        "another Sensor has room"
    );
    worker.settles(100);
    worker.scores(100, Some(1));
    assert!(worker.takes("uid", event(17, vec![question("a", 0)])));
}

#[test]
fn the_event_that_came_first_is_scored_first_of_all_sensors() {
    let mut worker = Worker::default();
    assert!(worker.takes("a", event(2, vec![question("x", 0)])));
    assert!(worker.takes("b", event(1, vec![question("x", 0)])));
    worker.settles(10);
    assert_eq!(worker.asked.as_deref(), Some("b/1/signal/prices/x"));
}

#[test]
fn signals_without_a_score_count_as_errors_and_the_streak_ends_with_a_score() {
    let mut worker = Worker::default();
    let priorities = |worker: &mut Worker, seq, score| {
        assert!(worker.takes("uid", event(seq, vec![question("a", 0)])));
        worker.settles(10);
        worker.scores(10, score)
    };
    assert_eq!(priorities(&mut worker, 1, None), settled(1, 1, 1));
    assert_eq!(priorities(&mut worker, 2, None), settled(2, 1, 1));
    let memory = |worker: &Worker| worker.sensors().memories["uid"].clone();
    assert_eq!(memory(&worker).rules.totals.errors, 2);
    let failure = memory(&worker).waiting.failure().expect("a failure");
    assert!(
        failure.starts_with("the last 2 signals in a row were not scored"),
        "{failure}"
    );
    priorities(&mut worker, 3, Some(1));
    assert_eq!(memory(&worker).waiting.failure(), None);
    assert_eq!(memory(&worker).rules.totals.errors, 2);
}

#[test]
fn effects_of_scores_are_reported_for_at_most_64_sensors_with_their_own_pod() {
    let mut worker = Worker::default();
    assert!(worker.takes("uid", event(1, vec![question("a", 0)])));
    worker.settles(10);
    assert_eq!(worker.scores(10, Some(80)), settled(1, 1, 1));
    assert!(worker.takes("uid", event(2, vec![question("a", 0)])));
    worker.settles(10);
    worker.scores(10, None);
    let report = worker.sensors().reports().remove(0);
    let totals = (report.totals.events, report.totals.notifications, report.totals.errors);
    assert_eq!((&*report.uid, report.generation, totals), ("uid", 0, (0, 2, 1)));
    for seq in 3..=65 {
        assert!(worker.takes(&format!("uid-{seq}"), event(seq, vec![question("a", 0)])));
    }
    let state = |worker: &Worker| {
        let reports = worker.sensors().reports();
        (reports.len(), reports.iter().any(|report| report.uid == "uid"))
    };
    assert_eq!(state(&worker), (64, true));
    assert!(worker.takes("uid-66", event(66, vec![question("a", 0)])));
    assert_eq!(state(&worker), (64, false), "the oldest");
}

#[test]
fn an_outcome_for_no_pending_question_is_accepted_and_changes_nothing() {
    let mut worker = Worker::default();
    assert!(worker.takes("uid", event(1, vec![question("a", 0)])));
    for stale in [
        "uid/1/signal/prices/z",
        "uid/2/signal/prices/a",
        "gone/1/signal/prices/a",
        "nonsense",
    ] {
        worker.asked = Some(stale.into());
        assert_eq!(worker.scores(0, Some(100)), [], "{stale}");
        assert_eq!(worker.asked.take().as_deref(), Some("uid/1/signal/prices/a"), "{stale}");
    }
}

#[test]
fn a_scored_event_without_room_waits_and_holds_up_no_score_of_another_sensor() {
    let mut worker = Worker::default();
    assert!(worker.takes("uid", event(1, vec![question("a", 0)])));
    assert_eq!(worker.settles(10), []);
    worker.is_full = true;
    assert_eq!(worker.scores(10, Some(100)), [], "it has its score, and waits for room");
    assert!(worker.takes("uid-2", event(1, vec![question("a", 0)])));
    assert_eq!(worker.settles(20), []);
    assert_eq!(worker.asked.as_deref(), Some("uid-2/1/signal/prices/a"));
    worker.is_full = false;
    assert_eq!(worker.settles(30), settled(1, 1, 1), "as soon as there is room");
}
