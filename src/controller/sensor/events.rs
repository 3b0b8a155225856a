//! Kubernetes Events of Sensors: one for each transition that users may want to know about. Pure.

use super::conditions::is_failing;
use super::status::has_condition;
use crate::api::condition::{self, ConditionType};
use crate::api::sensor::SensorStatus;
use crate::controller::runtime::KubeEvent;

/// The Events for a status write. A streak of failures gets one Event when it begins and one when it ends.
pub(super) fn from_status(old: &SensorStatus, new: &SensorStatus) -> Vec<KubeEvent> {
    let mut notices = Vec::new();
    let now = |type_| condition::find(&new.conditions, type_);
    if let Some(accepted) = now(ConditionType::Accepted).filter(|accepted| accepted.status == "False")
        && !has_condition(old, ConditionType::Accepted, "False")
    {
        notices.push(KubeEvent::warning(
            &accepted.reason,
            "Validate",
            accepted.message.clone(),
        ));
    }
    let fails = |status: &SensorStatus| {
        let connected = condition::find(&status.conditions, ConditionType::Connected);
        connected.is_some_and(|connected| is_failing(&connected.reason))
    };
    if fails(new) && !fails(old) {
        let held = now(ConditionType::Connected);
        let (reason, message) = held.map_or(("", ""), |held| (held.reason.as_str(), held.message.as_str()));
        notices.push(KubeEvent::warning(reason, "Listen", message));
    }
    if fails(old) && has_condition(new, ConditionType::Connected, "True") {
        notices.push(KubeEvent::normal("Recovered", "Listen", "receiving events again"));
    }
    if has_condition(new, ConditionType::Suspended, "True") && !has_condition(old, ConditionType::Suspended, "True") {
        notices.push(KubeEvent::normal(
            "Suspended",
            "Suspend",
            "spec.suspend was set; the Sensor is stopped",
        ));
    }
    if has_condition(old, ConditionType::Suspended, "True") && has_condition(new, ConditionType::Suspended, "False") {
        notices.push(KubeEvent::normal("Resumed", "Resume", "spec.suspend was cleared"));
    }
    notices
}
