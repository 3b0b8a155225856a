//! The tasks of a simulated loop by their ids: whose they are, and what they say.

use crate::engine::tasks::{TaskOffer, TaskOrigin};

pub(super) const OUTBOX: &str = "box";
pub(super) const SENSOR: &str = "news";
/// Who sends requests: the client of each request is one of them, by its number.
const USERS: [&str; 3] = ["ann", "bob", "cleo"];

/// Id of the task of an event.
pub(super) fn task_of(seq: i64) -> String {
    format!("{SENSOR}/{OUTBOX}/{seq}/0")
}

/// The request with this number.
pub(super) fn request(number: usize) -> TaskOffer {
    let id = format!("request-{number}");
    TaskOffer {
        prompt: format!("task={id}; How are you?"),
        origin: origin_of(&id),
        id,
        untrusted: None,
    }
}

/// Whose task has this id.
pub(super) fn origin_of(id: &str) -> TaskOrigin {
    if let Some(number) = id.strip_prefix("request-") {
        let number: usize = number.parse().expect("a number");
        TaskOrigin::Request(USERS[number % USERS.len()].into())
    } else if id.starts_with("spec-") {
        TaskOrigin::Spec
    } else {
        TaskOrigin::Sensor(SENSOR.into())
    }
}
