//! Kubernetes Events of Sensors: one for each transition that a person may want to know of. Pure.

use super::conditions::is_failing;
use super::status::says;
use crate::api::condition::{self, ConditionType};
use crate::api::sensor::SensorStatus;
use crate::controller::agent::Notice;

/// What a written status has to tell. A streak of failures is one Event when it begins, and one when it ends.
pub(super) fn of_status(old: &SensorStatus, new: &SensorStatus) -> Vec<Notice> {
    let mut notices = Vec::new();
    let now = |type_| condition::find(&new.conditions, type_);
    if let Some(accepted) = now(ConditionType::Accepted).filter(|accepted| accepted.status == "False")
        && !says(old, ConditionType::Accepted, "False")
    {
        notices.push(Notice::warning(&accepted.reason, "Validate", accepted.message.clone()));
    }
    let fails = |status: &SensorStatus| {
        let connected = condition::find(&status.conditions, ConditionType::Connected);
        connected.is_some_and(|connected| is_failing(&connected.reason))
    };
    if fails(new) && !fails(old) {
        let held = now(ConditionType::Connected);
        let (reason, message) = held.map_or(("", ""), |held| (held.reason.as_str(), held.message.as_str()));
        notices.push(Notice::warning(reason, "Listen", message));
    }
    if fails(old) && says(new, ConditionType::Connected, "True") {
        notices.push(Notice::normal(
            "Recovered",
            "Listen",
            "it hears and understands what comes again",
        ));
    }
    if says(new, ConditionType::Suspended, "True") && !says(old, ConditionType::Suspended, "True") {
        notices.push(Notice::normal(
            "Suspended",
            "Suspend",
            "spec.suspend was set; it does not listen",
        ));
    }
    if says(old, ConditionType::Suspended, "True") && says(new, ConditionType::Suspended, "False") {
        notices.push(Notice::normal("Resumed", "Resume", "spec.suspend was cleared"));
    }
    notices
}
