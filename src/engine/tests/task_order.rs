//! Which task is next when tasks of several origins wait: the origins take turns, also over failures and restarts.

use pretty_assertions::assert_eq;
use rstest::rstest;
use serde_json::{Value, json};

use super::goal::{finish, goal};
use super::requests::request_of;
use super::tasks::{mode, with};
use super::*;
use crate::settings::TaskSettings;
use crate::tasks::{TaskOffer, TaskOrigin};
use agentloop_api::task::TaskOutcome;

/// A task of this origin, `mail`, `spec` or a user, whose id is without `request-`.
fn task_of(origin: &str, id: &str) -> TaskOffer {
    let task = request_of(origin, id);
    TaskOffer {
        id: id.into(),
        origin: match origin {
            "mail" => TaskOrigin::Sensor(origin.into()),
            _ => task.origin,
        },
        ..task
    }
}

impl Driver {
    fn offers(&mut self, tasks: &[(&str, &str)]) {
        for (origin, id) in tasks {
            self.feed(EngineInput::TaskOffered(task_of(origin, id)));
        }
    }

    /// Answers one task after the other.
    fn answer_all(&mut self) {
        while self.engine.next_task().is_some() || self.in_flight.is_some() {
            if self.in_flight.is_none() {
                self.next_timer();
            } else {
                self.answer(says("done"));
            }
        }
    }

    fn order(&self) -> Vec<&str> {
        self.answered_tasks().into_iter().map(|(id, _)| id).collect()
    }
}

/// Tasks of three origins, the first of which is at work already.
const BURST: [(&str, &str); 7] = [
    ("mail", "m1"),
    ("mail", "m2"),
    ("mail", "m3"),
    ("ann", "a1"),
    ("ann", "a2"),
    ("bob", "b1"),
    ("mail", "m4"),
];
const TURNS: [&str; 7] = ["m1", "a1", "b1", "m2", "a2", "m3", "m4"];

#[test]
fn a_sensor_and_two_users_take_turns_and_each_keeps_its_order() {
    let mut driver = Driver::with_tools(with(mode()));
    driver.offers(&BURST);
    driver.answer_all();
    assert_eq!(driver.order(), TURNS);
}

#[test]
fn a_sensor_that_fills_the_queue_keeps_neither_a_user_nor_another_sensor_out() {
    let mut driver = Driver::with_tools(with(mode()));
    let of_mail = |number: usize| task_of("mail", &format!("m{number}"));
    let ann = TaskOrigin::Request("ann".into());
    driver.engine.restore_tasks((0..999).map(of_mail).collect());
    assert!(driver.engine.accepts_events_of("mail"));
    driver.engine.restore_tasks((0..1000).map(of_mail).collect());
    assert!(!driver.engine.accepts_events_of("mail"));
    assert!(driver.engine.accepts_events_beyond() && driver.engine.accepts_events_of("news"));
    assert!(driver.engine.accepts_task_of(&ann));
    let waiting = (0..1000).map(of_mail).chain([task_of("ann", "a1")]);
    driver.engine.restore_tasks(waiting.collect());
    assert!(!driver.engine.accepts_task_of(&ann), "one waits");
    assert!(driver.engine.accepts_events_of("news"));
    let others = (0..64).map(|number| task_of(&format!("user-{number}"), &format!("u{number}")));
    driver
        .engine
        .restore_tasks((0..1000).map(of_mail).chain(others).collect());
    assert!(!driver.engine.accepts_events_beyond() && !driver.engine.accepts_task_of(&ann));
}

#[test]
fn a_hundred_tasks_of_a_sensor_delay_a_user_by_the_one_under_way() {
    let mut driver = Driver::with_tools(with(mode()));
    let noise: Vec<String> = (0..100).map(|number| format!("m{number}")).collect();
    for id in &noise {
        driver.offers(&[("mail", id)]);
    }
    for (place, id) in ["a1", "a2", "a3"].into_iter().enumerate() {
        driver.offers(&[("ann", id)]);
        driver.answer(says("done"));
        driver.answer(says("done"));
        assert_eq!(driver.order()[2 * place..], [noise[place].as_str(), id]);
    }
}

#[rstest]
#[case::failed(FailureKind::BadResponse)]
#[case::does_not_fit(FailureKind::CallExceedsLimit)]
fn a_task_that_fails_counts_as_one_that_was_served(#[case] failure: FailureKind) {
    let mut driver = Driver::with_tools(with(mode()));
    driver.offers(&[("mail", "m1"), ("mail", "m2"), ("ann", "a1"), ("ann", "a2")]);
    for _ in 0..2 {
        while driver.in_flight.is_none() {
            driver.next_timer();
        }
        driver.fail(failure);
    }
    driver.answer_all();
    let (failed, done) = (TaskOutcome::Failed, TaskOutcome::Completed);
    let expected = [("m1", failed), ("a1", failed), ("m2", done), ("a2", done)];
    assert_eq!(driver.answered_tasks(), expected);
}

#[test]
fn a_task_that_reaches_a_limit_counts_as_one_that_was_served() {
    let mut driver = Driver::with_tools(with(TaskSettings {
        max_iterations: 1,
        ..mode()
    }));
    driver.offers(&[("mail", "m1"), ("mail", "m2"), ("ann", "a1")]);
    driver.answer(calls("files__read", "{}"));
    driver.done(1, "a file");
    driver.answer_all();
    assert_eq!(driver.answered_tasks()[0], ("m1", TaskOutcome::LimitReached));
    assert_eq!(driver.order(), ["m1", "a1", "m2"]);
}

#[test]
fn a_kill_at_any_point_leaves_the_order_as_it_is() {
    for kill in 0..=TURNS.len() {
        for epoch in [1, 2] {
            let mut driver = Driver::with_tools(with(mode()));
            driver.offers(&BURST);
            for _ in 0..kill {
                driver.answer(says("done"));
            }
            driver.restart(epoch);
            driver.answer_all();
            assert_eq!(driver.order(), TURNS, "killed after {kill} tasks");
        }
    }
}

#[test]
fn origins_served_before_the_queue_was_empty_count_after_a_restart() {
    let mut driver = Driver::with_tools(with(mode()));
    for (origin, id) in [("mail", "m1"), ("ann", "a1"), ("mail", "m2")] {
        driver.offers(&[(origin, id)]);
        driver.answer(says("done"));
    }
    driver.restart(2);
    driver.offers(&[("bob", "b1"), ("mail", "m3"), ("ann", "a2"), ("cleo", "c1")]);
    driver.answer_all();
    assert_eq!(driver.order()[3..], ["b1", "c1", "a2", "m3"]);
}

#[test]
fn a_snapshot_without_the_last_served_origin_begins_with_the_order_of_arrival() {
    let mut driver = Driver::with_tools(with(mode()));
    driver.offers(&BURST);
    let mut saved = serde_json::to_value(&driver.saved).unwrap();
    let served = saved["tasks"].as_object_mut().and_then(|tasks| tasks.remove("served"));
    assert_eq!(served.as_ref().and_then(Value::as_array).map(Vec::len), Some(1));
    driver.saved = serde_json::from_value(saved).unwrap();
    // The test's own table has no memory of it either.
    driver.tasks.forget_served();
    driver.restart(2);
    driver.answer_all();
    assert_eq!(driver.order(), ["m1", "m2", "a1", "b1", "m3", "a2", "m4"]);
}

#[test]
fn the_task_of_a_new_spec_waits_behind_earlier_tasks() {
    let own = TaskSettings {
        prompt: Some("count the stars".into()),
        ..mode()
    };
    let mut driver = Driver::with_tools(with(own));
    driver.offers(&[("mail", "m1"), ("mail", "m2")]);
    driver.answer(says("9096"));
    driver.settings.spec = 1;
    driver.restart(2);
    driver.answer_all();
    let order = driver.order();
    assert_eq!(
        order,
        ["spec-0000000000000000-1", "m1", "spec-0000000000000001-3", "m2"]
    );
}

#[test]
fn users_take_turns_beside_the_work_of_a_loop_in_another_mode() {
    let mut driver = Driver::with_tools(settings());
    driver.offers(&[
        ("ann", "a1"),
        ("ann", "a2"),
        ("ann", "a3"),
        ("bob", "b1"),
        ("bob", "b2"),
    ]);
    while driver.tasks.responses.len() < 5 {
        if driver.in_flight.is_none() {
            driver.next_timer();
        }
        driver.answer(says("Hm."));
    }
    assert_eq!(driver.order(), ["a1", "b1", "a2", "b2", "a3"]);
}

#[test]
fn requests_of_several_users_that_wait_when_the_loop_ends_fail_in_the_order_of_their_arrival() {
    let mut driver = Driver::with_goal(goal(|_| {}));
    driver.offers(&[("ann", "a1"), ("ann", "a2"), ("bob", "b1"), ("ann", "a3")]);
    driver.answer(finish("done"));
    assert_eq!(driver.order(), ["a1", "a2", "b1", "a3"]);
    assert_eq!(json!(driver.saved)["tasks"]["served"], Value::Null);
}
