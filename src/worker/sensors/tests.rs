//! Tests of the Sensors of a loop.

use jiff::SignedDuration;
use pretty_assertions::assert_eq;
use serde_json::json;

use super::*;

fn at(text: &str) -> Timestamp {
    text.parse().expect("a moment")
}

fn clock(generation: i64, more: Value) -> SensorTerms {
    let mut spec = json!({"agentNames": ["a"], "source": {"schedule": {"cron": "0 * * * *"}}});
    let Value::Object(more) = more else {
        panic!("no fields");
    };
    spec.as_object_mut().expect("fields").extend(more);
    SensorTerms {
        uid: "uid".into(),
        name: "clock".into(),
        generation,
        spec: serde_json::from_value(spec).expect("a spec"),
    }
}

/// The Sensors of a worker, and what its journal holds.
struct Worker {
    sensors: Sensors,
    journal: BTreeMap<String, Kept>,
}

impl Worker {
    fn new() -> Self {
        Self {
            sensors: Sensors::default(),
            journal: BTreeMap::new(),
        }
    }

    fn restart(&mut self) {
        self.sensors = Sensors::restore(self.journal.values().cloned().collect());
    }

    fn direct(&mut self, now: &str, terms: &[SensorTerms]) {
        for happened in self.sensors.direct(at(now), Some(terms)) {
            assert_eq!(happened.input(), None);
            self.keep(happened);
        }
    }

    fn keep(&mut self, happened: Happened) {
        let kept = happened.kept();
        self.journal.insert(kept.sensor.clone(), kept);
        self.sensors.accept(happened);
    }

    /// What the loop hears by this moment.
    fn hears(&mut self, now: &str) -> Vec<Input> {
        let mut heard = Vec::new();
        while let Some(happened) = self.sensors.due(at(now)) {
            heard.extend(happened.input().cloned());
            self.keep(happened);
        }
        heard
    }

    /// Ids of the events that the loop hears by this moment, and what they say.
    fn ticks(&mut self, now: &str) -> Vec<(String, String)> {
        let tick = |input| {
            let Input::Sensed(event) = input else {
                panic!("{input:?}");
            };
            (event.id, event.notices[0].text.clone())
        };
        self.hears(now).into_iter().map(tick).collect()
    }
}

fn tick(seq: i64, moment: &str) -> (String, String) {
    (format!("uid/{seq}"), json!({"scheduledTime": moment}).to_string())
}

#[test]
fn a_tick_comes_at_its_moment_once_and_is_said_in_the_report() {
    let mut worker = Worker::new();
    worker.direct("2026-01-05T07:30:00Z", &[clock(1, json!({}))]);
    assert_eq!(
        worker.sensors.next(at("2026-01-05T07:30:00Z")),
        Some(at("2026-01-05T08:00:00Z"))
    );
    assert_eq!(worker.ticks("2026-01-05T07:59:59.999Z"), []);
    assert_eq!(
        worker.ticks("2026-01-05T08:00:00.01Z"),
        [tick(1, "2026-01-05T08:00:00Z")]
    );
    assert_eq!(worker.ticks("2026-01-05T08:59:59Z"), []);
    let reports = worker.sensors.reports();
    let report = &reports[0];
    assert_eq!((report.totals.events, report.totals.notifications), (1, 1));
    let last = report.last.clone().expect("an event");
    assert_eq!(last.id, "uid/2026-01-05T08:00:00Z");
    assert_eq!(last.at, at("2026-01-05T08:00:00.01Z"));
    assert_eq!(report.next_attempt_at, Some(at("2026-01-05T09:00:00Z")));
    assert_eq!((report.generation, &report.failure), (1, &None));
}

#[test]
fn a_worker_that_was_down_hears_the_last_tick_late_and_none_twice() {
    let mut worker = Worker::new();
    let terms = [clock(1, json!({}))];
    worker.direct("2026-01-05T07:30:00Z", &terms);
    assert_eq!(worker.ticks("2026-01-05T08:00:00Z").len(), 1);
    worker.restart();
    worker.direct("2026-01-05T08:00:01Z", &terms);
    assert_eq!(worker.ticks("2026-01-05T08:00:01Z"), []);
    worker.restart();
    worker.direct("2026-01-06T09:30:00Z", &terms);
    assert_eq!(worker.ticks("2026-01-06T09:30:00Z"), [tick(2, "2026-01-06T09:00:00Z")]);
    assert_eq!(worker.ticks("2026-01-06T10:00:00Z"), [tick(3, "2026-01-06T10:00:00Z")]);
}

#[test]
fn a_tick_that_was_not_written_comes_again_as_the_same_event() {
    let mut worker = Worker::new();
    let terms = [clock(1, json!({}))];
    worker.direct("2026-01-05T07:30:00Z", &terms);
    let lost = worker.sensors.due(at("2026-01-05T08:00:00Z")).expect("a tick");
    let Some(Input::Sensed(lost)) = lost.input().cloned() else {
        panic!("no event");
    };
    worker.restart();
    worker.direct("2026-01-05T08:00:05Z", &terms);
    assert_eq!(worker.ticks("2026-01-05T08:00:05Z")[0].0, lost.id);
}

#[test]
fn missed_ticks_are_skipped_where_the_schedule_says_so() {
    let mut worker = Worker::new();
    let terms = [clock(
        1,
        json!({"source": {"schedule": {"cron": "0 * * * *", "missed": "Skip"}}}),
    )];
    worker.direct("2026-01-05T07:30:00Z", &terms);
    worker.restart();
    worker.direct("2026-01-05T09:30:00Z", &terms);
    assert_eq!(worker.ticks("2026-01-05T09:30:00Z"), []);
    assert_eq!(worker.ticks("2026-01-05T10:00:00Z"), [tick(1, "2026-01-05T10:00:00Z")]);
}

#[test]
fn an_edit_of_anything_but_the_schedule_loses_and_repeats_nothing() {
    let mut worker = Worker::new();
    worker.direct("2026-01-05T07:30:00Z", &[clock(1, json!({}))]);
    assert_eq!(worker.ticks("2026-01-05T08:00:00Z").len(), 1);
    let edited = clock(2, json!({"notification": {"text": "'tick'"}}));
    worker.direct("2026-01-05T08:00:01Z", &[edited]);
    assert_eq!(worker.ticks("2026-01-05T08:00:01Z"), []);
    assert_eq!(
        worker.ticks("2026-01-05T09:00:00Z"),
        [("uid/2".to_owned(), "tick".to_owned())]
    );
    assert_eq!(worker.sensors.reports()[0].generation, 2);
}

#[test]
fn another_schedule_counts_from_when_it_was_set() {
    let mut worker = Worker::new();
    worker.direct("2026-01-05T07:30:00Z", &[clock(1, json!({}))]);
    let edited = clock(2, json!({"source": {"schedule": {"cron": "0 7 * * *"}}}));
    worker.direct("2026-01-05T07:45:00Z", &[edited]);
    assert_eq!(worker.ticks("2026-01-05T08:00:00Z"), []);
    assert_eq!(
        worker.sensors.next(at("2026-01-05T07:30:00Z")),
        Some(at("2026-01-06T07:00:00Z"))
    );
}

#[test]
fn a_suspended_sensor_does_not_tick_and_says_the_last_missed_tick_once_it_goes_on() {
    let mut worker = Worker::new();
    worker.direct("2026-01-05T07:30:00Z", &[clock(1, json!({}))]);
    worker.direct("2026-01-05T07:40:00Z", &[clock(2, json!({"suspend": true}))]);
    assert_eq!(worker.sensors.next(at("2026-01-05T07:30:00Z")), None);
    assert_eq!(worker.ticks("2026-01-05T10:30:00Z"), []);
    worker.direct("2026-01-05T10:30:00Z", &[clock(3, json!({}))]);
    assert_eq!(worker.ticks("2026-01-05T10:30:00Z"), [tick(1, "2026-01-05T10:00:00Z")]);
}

#[test]
fn a_sensor_that_is_not_named_any_more_ends_and_one_that_comes_back_goes_on() {
    let mut worker = Worker::new();
    worker.direct("2026-01-05T07:30:00Z", &[clock(1, json!({}))]);
    assert_eq!(worker.ticks("2026-01-05T08:00:00Z").len(), 1);
    // What is not decided changes nothing.
    assert!(worker.sensors.direct(at("2026-01-05T08:10:00Z"), None).is_empty());
    assert_eq!(worker.sensors.reports().len(), 1);
    worker.direct("2026-01-05T08:30:00Z", &[]);
    assert_eq!(
        (
            worker.sensors.next(at("2026-01-05T07:30:00Z")),
            worker.sensors.reports().len()
        ),
        (None, 0)
    );
    assert_eq!(worker.ticks("2026-01-05T09:00:00Z"), []);
    worker.direct("2026-01-05T09:30:00Z", &[clock(1, json!({}))]);
    assert_eq!(worker.ticks("2026-01-05T09:30:00Z"), [tick(2, "2026-01-05T09:00:00Z")]);
    assert_eq!(worker.sensors.reports()[0].totals.events, 2);
}

#[test]
fn a_sensor_that_fails_is_said_once_until_it_succeeds() {
    let mut worker = Worker::new();
    let failing = |generation, text: &str| clock(generation, json!({"notification": {"text": text}}));
    worker.direct("2026-01-05T07:30:00Z", &[failing(1, "payload.missing")]);
    let failed = [Input::SensorFailed { sensor: "clock".into() }];
    assert_eq!(worker.hears("2026-01-05T08:00:00Z"), failed);
    assert_eq!(worker.hears("2026-01-05T09:00:00Z"), []);
    let report = &worker.sensors.reports()[0];
    assert_eq!((report.consecutive_failures, report.totals.errors), (2, 2));
    assert!(
        report
            .failure
            .as_deref()
            .is_some_and(|why| why.starts_with("spec.notification.text: "))
    );
    worker.direct("2026-01-05T09:30:00Z", &[failing(2, "'well'")]);
    assert_eq!(worker.hears("2026-01-05T10:00:00Z").len(), 1);
    assert_eq!(worker.sensors.reports()[0].failure, None);
    worker.direct("2026-01-05T10:30:00Z", &[failing(3, "payload.missing")]);
    assert_eq!(worker.hears("2026-01-05T11:00:00Z"), failed);
}

#[test]
fn a_spec_that_cannot_be_compiled_is_said_and_nothing_ticks() {
    let mut worker = Worker::new();
    worker.direct(
        "2026-01-05T07:30:00Z",
        &[clock(1, json!({"notification": {"text": "1 +"}}))],
    );
    assert_eq!(worker.sensors.next(at("2026-01-05T07:30:00Z")), None);
    let failure = worker.sensors.reports()[0].failure.clone().expect("a failure");
    assert!(
        failure.starts_with("spec.notification.text: is no expression"),
        "{failure}"
    );
}

#[test]
fn values_come_back_after_a_restart_with_their_moments() {
    let mut worker = Worker::new();
    let spec = json!({"updates": [{"field": "last", "value": "payload.scheduledTime"}]});
    worker.direct("2026-01-05T07:30:00Z", &[clock(1, spec)]);
    let heard = worker.hears("2026-01-05T08:00:00Z");
    assert!(matches!(&heard[..], [Input::Sensed(event)] if event.updates[0].0 == "last" && event.notices.is_empty()));
    worker.restart();
    let moment = at("2026-01-05T08:00:00Z");
    assert_eq!(
        worker.sensors.values(),
        [("last", &json!("2026-01-05T08:00:00Z"), moment)]
    );
}

#[test]
fn a_clock_that_was_set_back_makes_no_tick_come_twice_and_none_wait_for_a_year() {
    let mut worker = Worker::new();
    worker.direct("2027-01-05T07:30:00Z", &[clock(1, json!({}))]);
    assert_eq!(worker.ticks("2027-01-05T08:00:00Z").len(), 1);
    assert_eq!(worker.ticks("2026-01-05T07:45:00Z"), []);
    assert_eq!(worker.ticks("2026-01-05T08:00:00Z"), [tick(2, "2026-01-05T08:00:00Z")]);
    // A little back: the same instant again.
    assert_eq!(worker.ticks("2026-01-05T07:59:59Z"), []);
    assert_eq!(worker.ticks("2026-01-05T08:00:00Z"), []);
    assert_eq!(worker.sensors.reports()[0].totals.filtered, 1);
    let later = at("2026-01-05T08:00:00Z") + SignedDuration::from_hours(1);
    assert_eq!(worker.sensors.next(at("2026-01-05T07:30:00Z")), Some(later));
}

#[test]
fn a_tick_within_the_interval_comes_at_its_end() {
    let mut worker = Worker::new();
    let spec = json!({
        "source": {"schedule": {"cron": "* * * * *"}}, "limits": {"minIntervalMilliseconds": 90_000},
    });
    worker.direct("2026-01-05T07:59:30Z", &[clock(1, spec)]);
    assert_eq!(worker.ticks("2026-01-05T08:00:00Z"), [tick(1, "2026-01-05T08:00:00Z")]);
    assert_eq!(worker.ticks("2026-01-05T08:01:00Z"), []);
    assert_eq!(
        worker.sensors.next(at("2026-01-05T07:30:00Z")),
        Some(at("2026-01-05T08:01:30Z"))
    );
    assert_eq!(worker.ticks("2026-01-05T08:01:30Z"), [tick(2, "2026-01-05T08:01:00Z")]);
}

#[test]
fn events_of_a_pod_take_effect_once_each_though_they_come_again_and_the_worker_restarts() {
    let event = |seq: i64| Event {
        seq,
        id: format!("id-{seq}"),
        at: at("2026-01-05T08:00:00Z"),
        updates: vec![crate::sensing::delivery::FieldValue {
            field: "price".into(),
            value: json!(seq),
        }],
        notifications: Vec::new(),
        wakes: vec!["sensor/prices".into()],
        trial: None,
    };
    let of = |numbers: &[i64]| Delivery {
        sensor: "uid".into(),
        name: "prices".into(),
        events: numbers.iter().copied().map(event).collect(),
    };
    let take = |worker: &mut Worker, numbers: &[i64]| {
        let mut ids = Vec::new();
        while let Some(happened) = worker.sensors.take(&of(numbers)) {
            let Some(Input::Sensed(sensed)) = happened.input().cloned() else {
                panic!("no event");
            };
            ids.push(sensed.id);
            worker.keep(happened);
        }
        ids
    };
    let mut worker = Worker::new();
    assert_eq!(worker.sensors.through("uid"), 0);
    assert_eq!(take(&mut worker, &[3, 5]), ["uid/3", "uid/5"]);
    assert_eq!(take(&mut worker, &[3, 5]), Vec::<String>::new());
    worker.restart();
    assert_eq!(worker.sensors.through("uid"), 5);
    assert_eq!(take(&mut worker, &[4, 5, 6]), ["uid/6"]);
    assert_eq!(
        worker.sensors.values(),
        [("price", &json!(6), at("2026-01-05T08:00:00Z"))]
    );
    assert_eq!(worker.sensors.reports(), [], "the Sensor does not run here");
}
