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

/// The Sensors of a worker, and the records in its journal.
struct Worker {
    sensors: LoopSensors,
    journal: BTreeMap<String, SensorRecord>,
}

impl Worker {
    fn new() -> Self {
        Self {
            sensors: LoopSensors::default(),
            journal: BTreeMap::new(),
        }
    }

    fn restart(&mut self) {
        self.sensors = LoopSensors::restore(self.journal.values().cloned().collect());
    }

    fn direct(&mut self, now: &str, terms: &[SensorTerms]) {
        for happened in self.sensors.apply_terms(at(now), Some(terms)) {
            assert_eq!(happened.input(), None);
            self.keep(happened);
        }
    }

    fn keep(&mut self, happened: SensorTransition) {
        let kept = happened.record();
        self.journal.insert(kept.sensor.clone(), kept);
        self.sensors.confirm(happened);
    }

    /// Returns the inputs of the loop until this time.
    fn inputs_until(&mut self, now: &str) -> Vec<EngineInput> {
        let mut inputs = Vec::new();
        while let Some(happened) = self.sensors.due(at(now), |_| true) {
            inputs.extend(happened.input().cloned());
            self.keep(happened);
        }
        inputs
    }

    /// Returns the ids and texts of the events until this time.
    fn ticks(&mut self, now: &str) -> Vec<(String, String)> {
        let tick = |input| {
            let EngineInput::Sensed(event) = input else {
                panic!("{input:?}");
            };
            (event.id, event.notices[0].text.clone())
        };
        self.inputs_until(now).into_iter().map(tick).collect()
    }
}

fn tick(seq: i64, moment: &str) -> (String, String) {
    (format!("uid/{seq}"), json!({"scheduledTime": moment}).to_string())
}

#[test]
fn a_tick_fires_once_at_its_time_and_is_in_the_report() {
    let mut worker = Worker::new();
    worker.direct("2026-01-05T07:30:00Z", &[clock(1, json!({}))]);
    assert_eq!(
        worker.sensors.next(at("2026-01-05T07:30:00Z"), |_| true),
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
fn a_worker_that_was_down_receives_the_last_tick_late_and_none_twice() {
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
fn an_unwritten_tick_is_repeated_as_the_same_event() {
    let mut worker = Worker::new();
    let terms = [clock(1, json!({}))];
    worker.direct("2026-01-05T07:30:00Z", &terms);
    let lost = worker
        .sensors
        .due(at("2026-01-05T08:00:00Z"), |_| true)
        .expect("a tick");
    let Some(EngineInput::Sensed(lost)) = lost.input().cloned() else {
        panic!("no event");
    };
    worker.restart();
    worker.direct("2026-01-05T08:00:05Z", &terms);
    assert_eq!(worker.ticks("2026-01-05T08:00:05Z")[0].0, lost.id);
}

#[test]
fn missed_ticks_are_skipped_where_the_schedule_specifies_it() {
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
        worker.sensors.next(at("2026-01-05T07:30:00Z"), |_| true),
        Some(at("2026-01-06T07:00:00Z"))
    );
}

#[test]
fn a_suspended_sensor_does_not_tick_and_fires_the_last_missed_tick_on_resume() {
    let mut worker = Worker::new();
    worker.direct("2026-01-05T07:30:00Z", &[clock(1, json!({}))]);
    worker.direct("2026-01-05T07:40:00Z", &[clock(2, json!({"suspend": true}))]);
    assert_eq!(worker.sensors.next(at("2026-01-05T07:30:00Z"), |_| true), None);
    assert_eq!(worker.ticks("2026-01-05T10:30:00Z"), []);
    worker.direct("2026-01-05T10:30:00Z", &[clock(3, json!({}))]);
    assert_eq!(worker.ticks("2026-01-05T10:30:00Z"), [tick(1, "2026-01-05T10:00:00Z")]);
}

#[test]
fn a_sensor_that_is_no_longer_named_ends_and_a_restored_one_continues() {
    let mut worker = Worker::new();
    worker.direct("2026-01-05T07:30:00Z", &[clock(1, json!({}))]);
    assert_eq!(worker.ticks("2026-01-05T08:00:00Z").len(), 1);
    // Terms that are not decided yet change nothing.
    assert!(worker.sensors.apply_terms(at("2026-01-05T08:10:00Z"), None).is_empty());
    assert_eq!(worker.sensors.reports().len(), 1);
    worker.direct("2026-01-05T08:30:00Z", &[]);
    assert_eq!(
        (
            worker.sensors.next(at("2026-01-05T07:30:00Z"), |_| true),
            worker.sensors.reports().len()
        ),
        (None, 0)
    );
    assert_eq!(worker.ticks("2026-01-05T09:00:00Z"), []);
    worker.direct("2026-01-05T09:30:00Z", &[clock(1, json!({}))]);
    assert_eq!(worker.ticks("2026-01-05T09:30:00Z"), [tick(2, "2026-01-05T09:00:00Z")]);
    assert_eq!(worker.sensors.reports()[0].totals.events, 2);
}

/// While the queue is full, ticks are missed as while the pod does not run.
#[test]
fn the_last_tick_fires_once_or_not_at_all_after_a_wait_for_room_as_the_schedule_says() {
    let ticks = |missed: &str, now: &str| {
        let mut worker = Worker::new();
        let source = json!({"schedule": {"cron": "0 * * * *", "missed": missed}});
        worker.direct("2026-01-05T07:30:00Z", &[clock(1, json!({ "source": source }))]);
        assert!(worker.sensors.due(at("2026-01-05T08:00:00Z"), |_| false).is_none());
        let wait = worker.sensors.next(at("2026-01-05T08:00:00Z"), |_| false);
        assert_eq!(wait, None, "it waits for room, not for a time");
        worker.ticks(now)
    };
    let last = [tick(1, "2026-01-05T11:00:00Z")];
    assert_eq!(ticks("RunOnce", "2026-01-05T11:30:00Z"), last);
    assert_eq!(ticks("Skip", "2026-01-05T11:30:00Z"), []);
    assert_eq!(ticks("Skip", "2026-01-05T11:01:00Z"), last, "that one is not late");
}

#[test]
fn a_sensor_without_room_holds_up_no_other() {
    let mut worker = Worker::new();
    let other = SensorTerms {
        uid: "uid-2".into(),
        name: "other".into(),
        ..clock(1, json!({}))
    };
    worker.direct("2026-01-05T07:30:00Z", &[clock(1, json!({})), other]);
    let now = at("2026-01-05T08:00:00Z");
    let has_room = |name: &str| name == "other";
    assert_eq!(worker.sensors.next(at("2026-01-05T07:30:00Z"), has_room), Some(now));
    let happened = worker.sensors.due(now, has_room).expect("a tick");
    assert_eq!(happened.record().sensor, "uid-2");
    worker.keep(happened);
    assert!(worker.sensors.due(now, has_room).is_none());
    assert_eq!(worker.ticks("2026-01-05T08:00:00Z"), [tick(1, "2026-01-05T08:00:00Z")]);
}

#[test]
fn a_failing_sensor_is_reported_once_until_it_succeeds() {
    let mut worker = Worker::new();
    let failing = |generation, text: &str| clock(generation, json!({"notification": {"text": text}}));
    worker.direct("2026-01-05T07:30:00Z", &[failing(1, "payload.missing")]);
    let failed = [EngineInput::SensorFailed { sensor: "clock".into() }];
    assert_eq!(worker.inputs_until("2026-01-05T08:00:00Z"), failed);
    assert_eq!(worker.inputs_until("2026-01-05T09:00:00Z"), []);
    let report = &worker.sensors.reports()[0];
    assert_eq!((report.consecutive_failures, report.totals.errors), (2, 2));
    assert!(
        report
            .failure
            .as_deref()
            .is_some_and(|why| why.starts_with("spec.notification.text: "))
    );
    worker.direct("2026-01-05T09:30:00Z", &[failing(2, "'well'")]);
    assert_eq!(worker.inputs_until("2026-01-05T10:00:00Z").len(), 1);
    assert_eq!(worker.sensors.reports()[0].failure, None);
    worker.direct("2026-01-05T10:30:00Z", &[failing(3, "payload.missing")]);
    assert_eq!(worker.inputs_until("2026-01-05T11:00:00Z"), failed);
}

#[test]
fn a_spec_that_does_not_compile_is_reported_and_nothing_ticks() {
    let mut worker = Worker::new();
    worker.direct(
        "2026-01-05T07:30:00Z",
        &[clock(1, json!({"notification": {"text": "1 +"}}))],
    );
    assert_eq!(worker.sensors.next(at("2026-01-05T07:30:00Z"), |_| true), None);
    let failure = worker.sensors.reports()[0].failure.clone().expect("a failure");
    assert!(
        failure.starts_with("spec.notification.text: is not a valid expression"),
        "{failure}"
    );
}

#[test]
fn values_are_restored_after_a_restart_with_their_times() {
    let mut worker = Worker::new();
    let spec = json!({"updates": [{"field": "last", "value": "payload.scheduledTime"}]});
    worker.direct("2026-01-05T07:30:00Z", &[clock(1, spec)]);
    let inputs = worker.inputs_until("2026-01-05T08:00:00Z");
    assert!(
        matches!(&inputs[..], [EngineInput::Sensed(event)] if event.updates[0].0 == "last" && event.notices.is_empty())
    );
    worker.restart();
    let moment = at("2026-01-05T08:00:00Z");
    assert_eq!(
        worker.sensors.values(),
        [("last", &json!("2026-01-05T08:00:00Z"), moment)]
    );
}

#[test]
fn a_clock_that_was_set_back_repeats_no_tick_and_delays_none() {
    let mut worker = Worker::new();
    worker.direct("2027-01-05T07:30:00Z", &[clock(1, json!({}))]);
    assert_eq!(worker.ticks("2027-01-05T08:00:00Z").len(), 1);
    assert_eq!(worker.ticks("2026-01-05T07:45:00Z"), []);
    assert_eq!(worker.ticks("2026-01-05T08:00:00Z"), [tick(2, "2026-01-05T08:00:00Z")]);
    // A small step back: the same tick again.
    assert_eq!(worker.ticks("2026-01-05T07:59:59Z"), []);
    assert_eq!(worker.ticks("2026-01-05T08:00:00Z"), []);
    assert_eq!(worker.sensors.reports()[0].totals.filtered, 1);
    let later = at("2026-01-05T08:00:00Z") + SignedDuration::from_hours(1);
    assert_eq!(worker.sensors.next(at("2026-01-05T07:30:00Z"), |_| true), Some(later));
}

#[test]
fn a_clock_set_back_by_more_than_256_ticks_repeats_none() {
    let mut worker = Worker::new();
    let spec = json!({"source": {"schedule": {"cron": "* * * * *"}}});
    worker.direct("2026-01-05T00:00:30Z", &[clock(1, spec)]);
    let minute = |minute: i64| (at("2026-01-05T00:00:00Z") + SignedDuration::from_mins(minute)).to_string();
    for n in 1..=300 {
        assert_eq!(worker.ticks(&minute(n)).len(), 1, "{n}");
    }
    for n in 1..=300 {
        assert_eq!(worker.ticks(&minute(n)), [], "{n}");
        if n % 100 == 0 {
            worker.restart();
            worker.direct(
                &minute(n),
                &[clock(1, json!({"source": {"schedule": {"cron": "* * * * *"}}}))],
            );
        }
    }
    assert_eq!(worker.ticks(&minute(301)), [tick(301, &minute(301))]);
    // The clock was set back to the first of them, so that one is skipped.
    assert_eq!(worker.sensors.reports()[0].totals.filtered, 299);
}

#[test]
fn a_tick_within_the_interval_fires_at_its_end() {
    let mut worker = Worker::new();
    let spec = json!({
        "source": {"schedule": {"cron": "* * * * *"}}, "limits": {"minIntervalMilliseconds": 90_000},
    });
    worker.direct("2026-01-05T07:59:30Z", &[clock(1, spec)]);
    assert_eq!(worker.ticks("2026-01-05T08:00:00Z"), [tick(1, "2026-01-05T08:00:00Z")]);
    assert_eq!(worker.ticks("2026-01-05T08:01:00Z"), []);
    assert_eq!(
        worker.sensors.next(at("2026-01-05T07:30:00Z"), |_| true),
        Some(at("2026-01-05T08:01:30Z"))
    );
    assert_eq!(worker.ticks("2026-01-05T08:01:30Z"), [tick(2, "2026-01-05T08:01:00Z")]);
}

#[test]
fn events_of_a_pod_take_effect_once_each_over_repetitions_and_restarts() {
    let event = |seq: i64| SensorEvent {
        seq,
        id: format!("id-{seq}"),
        at: at("2026-01-05T08:00:00Z"),
        updates: vec![crate::sensor_pipeline::delivery::FieldValue {
            field: "price".into(),
            value: json!(seq),
        }],
        notifications: Vec::new(),
        wakes: vec!["sensor/prices".into()],
        ..SensorEvent::default()
    };
    let of = |numbers: &[i64]| Delivery {
        sensor: "uid".into(),
        name: "prices".into(),
        events: numbers.iter().copied().map(event).collect(),
        ..Delivery::default()
    };
    let take = |worker: &mut Worker, numbers: &[i64]| {
        let mut ids = Vec::new();
        while let Some(happened) = worker.sensors.take(Timestamp::UNIX_EPOCH, &of(numbers)) {
            let Some(EngineInput::Sensed(sensed)) = happened.input().cloned() else {
                panic!("no event");
            };
            ids.push(sensed.id);
            worker.keep(happened);
        }
        ids
    };
    let mut worker = Worker::new();
    assert_eq!(worker.sensors.delivered_through(&of(&[])).through, 0);
    assert_eq!(take(&mut worker, &[3, 5]), ["uid/3", "uid/5"]);
    assert_eq!(take(&mut worker, &[3, 5]), Vec::<String>::new());
    worker.restart();
    assert_eq!(worker.sensors.delivered_through(&of(&[])).through, 5);
    assert_eq!(take(&mut worker, &[4, 5, 6]), ["uid/6"]);
    assert_eq!(
        worker.sensors.values(),
        [("price", &json!(6), at("2026-01-05T08:00:00Z"))]
    );
    assert_eq!(worker.sensors.reports(), [], "the Sensor does not run here");
}

/// Builds an event of this outbox with this number and text.
fn event_of(outbox: &str, seq: i64) -> Delivery {
    let notice = crate::sensor_pipeline::delivery::SensorNotification {
        is_task: false,
        source: "sensor/prices".into(),
        text: format!("{outbox}-{seq}"),
        priority: SignalPriority::Normal,
    };
    Delivery {
        sensor: "uid".into(),
        name: "prices".into(),
        outbox: outbox.into(),
        events: vec![SensorEvent {
            seq,
            notifications: vec![notice],
            ..SensorEvent::default()
        }],
        ..Delivery::default()
    }
}

/// Returns the ids of the events that take effect.
fn takes(worker: &mut Worker, delivery: &Delivery) -> Vec<String> {
    takes_at(Timestamp::UNIX_EPOCH, worker, delivery)
}

fn takes_at(now: Timestamp, worker: &mut Worker, delivery: &Delivery) -> Vec<String> {
    let mut ids = Vec::new();
    while let Some(happened) = worker.sensors.take(now, delivery) {
        if let Some(EngineInput::Sensed(sensed)) = happened.input().cloned() {
            ids.push(sensed.id);
        }
        worker.keep(happened);
    }
    ids
}

#[test]
fn an_outbox_that_was_lost_and_begins_below_the_numbers_of_the_one_before_hides_nothing() {
    let mut worker = Worker::new();
    assert_eq!(takes(&mut worker, &event_of("a", 1_000)), ["uid/a/1000"]);
    // The clock of the next node is behind.
    assert_eq!(takes(&mut worker, &event_of("b", 900)), ["uid/b/900"]);
    worker.restart();
    assert_eq!(takes(&mut worker, &event_of("b", 900)), [""; 0]);
    // Late events of the first outbox are recognized, and are acknowledged again.
    assert_eq!(takes(&mut worker, &event_of("a", 1_000)), [""; 0]);
    assert_eq!(worker.sensors.delivered_through(&event_of("a", 1)).through, 1_000);
    assert_eq!(worker.sensors.delivered_through(&event_of("b", 1)).through, 900);
    assert_eq!(takes(&mut worker, &event_of("a", 1_001)), ["uid/a/1001"]);
    assert_eq!(takes(&mut worker, &event_of("b", 901)), ["uid/b/901"]);
    assert_eq!(worker.sensors.delivered_through(&event_of("c", 1)).through, 0);
}

#[test]
fn the_numbers_of_seventeen_outboxes_of_a_sensor_are_remembered_and_no_more() {
    let mut worker = Worker::new();
    let through = |worker: &Worker, outbox: usize| {
        worker
            .sensors
            .delivered_through(&event_of(&outbox.to_string(), 1))
            .through
    };
    for outbox in 0..=super::memory::MAX_OUTBOXES {
        takes(&mut worker, &event_of(&outbox.to_string(), 7));
    }
    assert_eq!(through(&worker, 0), 7);
    takes(&mut worker, &event_of("another", 7));
    assert_eq!((through(&worker, 0), through(&worker, 1)), (0, 7));
}

#[test]
fn an_event_that_no_rules_could_have_produced_has_no_effect_and_is_counted() {
    let mut worker = Worker::new();
    let with = |change: &dyn Fn(&mut SensorEvent)| {
        let mut delivery = event_of("a", 1);
        change(&mut delivery.events[0]);
        delivery
    };
    for seq in [i64::MAX, (1 << 53), 0, -1] {
        let delivery = with(&|event| event.seq = seq);
        assert!(worker.sensors.take(Timestamp::UNIX_EPOCH, &delivery).is_none(), "{seq}");
    }
    let long = with(&|event| event.notifications[0].text = "x".repeat(2_049));
    let many = with(&|event| event.wakes = vec!["sensor/prices".into(); 18]);
    let large = with(&|event| {
        event.updates = vec![crate::sensor_pipeline::delivery::FieldValue {
            field: "price".into(),
            value: json!("x".repeat(8_191)),
        }];
    });
    let field = with(&|event| {
        event.updates = vec![crate::sensor_pipeline::delivery::FieldValue {
            field: "f".repeat(64),
            value: json!(1),
        }];
    });
    let wake = with(&|event| event.wakes = vec!["s".repeat(513)]);
    let asks = |prompt: usize, data: usize| {
        with(&|event| {
            let question = json!({
                "signal": "signal/prices/a", "prompt": "x".repeat(prompt), "thresholdPercent": 50, "gate": "Both",
            });
            let trial = json!({"questions": [question], "data": "x".repeat(data)});
            event.trial = Some(serde_json::from_value(trial).expect("a trial"));
        })
    };
    let all = [long, many, large, field, wake, asks(8_193, 1), asks(1, 8_193)];
    for (n, mut delivery) in (1..).zip(all) {
        delivery.events[0].seq = n;
        assert_eq!(takes(&mut worker, &delivery), [""; 0], "{n}");
        assert_eq!(
            worker.sensors.delivered_through(&delivery).through,
            n,
            "it does not come again"
        );
    }
    let exact = with(&|event| {
        event.seq = 9;
        event.notifications[0].text = "x".repeat(2_048);
        event.wakes = vec!["sensor/prices".into(); 17];
    });
    assert_eq!(takes(&mut worker, &exact), ["uid/a/9"]);
}

/// Builds a delivery with this many events of the Sensor, starting with this number, as the controller forwards them.
fn flood(first: i64, count: i64) -> Delivery {
    Delivery {
        per_minute: Some(60),
        events: (first..first + count)
            .map(|seq| event_of("a", seq).events.remove(0))
            .collect(),
        ..event_of("a", 0)
    }
}

#[test]
fn a_flood_above_the_limit_of_a_sensor_is_dropped_and_counted_and_the_limit_holds_afterwards() {
    let mut worker = Worker::new();
    let begin = at("2026-01-05T08:00:00Z");
    let max = event_quota::BACKLOG + 60;
    let step = |worker: &mut Worker, now, first, count| takes_at(now, worker, &flood(first, count)).len();
    assert_eq!(step(&mut worker, begin, 1, max - 1), 20_059);
    assert_eq!(worker.sensors.reports(), []);
    worker.restart();
    assert_eq!(step(&mut worker, begin, max, 3), 1);
    assert_eq!(
        worker.sensors.delivered_through(&flood(0, 0)).through,
        max + 2,
        "they do not come again"
    );
    let report = &worker.sensors.reports()[0];
    assert_eq!((report.totals.dropped, report.generation), (2, 0));
    worker.restart();
    let later = begin + SignedDuration::from_secs(60);
    assert_eq!(step(&mut worker, later, max + 3, 60), 60);
    assert_eq!(worker.sensors.reports()[0].totals.dropped, 2);
    // A controller of an earlier version sends no limit.
    let unsaid = Delivery {
        per_minute: None,
        ..flood(max + 100, 5)
    };
    assert_eq!(takes_at(later, &mut worker, &unsaid).len(), 5);
}

#[test]
fn the_newest_values_are_kept_of_a_sensor_that_names_ever_new_fields() {
    let mut worker = Worker::new();
    let begin = at("2026-01-05T08:00:00Z");
    for n in 1..=66 {
        let mut delivery = event_of("a", n);
        delivery.events[0].at = begin + SignedDuration::from_secs(n);
        delivery.events[0].updates = vec![crate::sensor_pipeline::delivery::FieldValue {
            field: format!("f{n}"),
            value: json!(n),
        }];
        takes(&mut worker, &delivery);
    }
    let values = worker.sensors.values();
    assert_eq!((values.len(), values[0].0, values[63].0), (64, "f3", "f66"));
}

#[test]
fn the_errors_of_a_watch() {
    use super::files::WatchError;
    let rows = variants!(
        "spec.source.watch",
        [
            WatchError::Absent,
            WatchError::Link,
            WatchError::TooMany,
            WatchError::TooDeep,
            WatchError::Nameless,
            WatchError::Denied,
            WatchError::Other("input/output error".into()),
        ]
    );
    assert_texts!("watch", "Errors of Sensors that watch files", rows);
}
