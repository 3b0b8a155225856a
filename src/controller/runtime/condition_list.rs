//! The conditions of one object while its status is computed. Pure.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use crate::api::condition::{self, ConditionType};

/// The conditions of the written status, and the changes made to them. Every condition that is set gets the generation and
/// the time of this computation.
pub(in crate::controller) struct ConditionList {
    conditions: Vec<Condition>,
    generation: Option<i64>,
    now: Timestamp,
}

impl ConditionList {
    /// Starts from the conditions as written.
    pub(in crate::controller) fn new(written: &[Condition], generation: Option<i64>, now: Timestamp) -> Self {
        Self {
            conditions: written.to_vec(),
            generation,
            now,
        }
    }

    pub(in crate::controller) fn set(
        &mut self,
        type_: ConditionType,
        status: bool,
        reason: &str,
        message: impl Into<String>,
    ) {
        let new = condition::condition(type_, status, reason, message, self.generation, self.now);
        condition::set(&mut self.conditions, new);
    }

    /// Sets the status to `Unknown`.
    pub(in crate::controller) fn set_unknown(
        &mut self,
        type_: ConditionType,
        reason: &str,
        message: impl Into<String>,
    ) {
        let mut new = condition::condition(type_, false, reason, message, self.generation, self.now);
        new.status = "Unknown".into();
        condition::set(&mut self.conditions, new);
    }

    /// Sets a present condition to False; see [`condition::clear`].
    pub(in crate::controller) fn clear(&mut self, type_: ConditionType) {
        condition::clear(&mut self.conditions, type_, self.generation, self.now);
    }

    /// Keeps a present condition unchanged except for its generation.
    pub(in crate::controller) fn keep(&mut self, type_: ConditionType) {
        let mut present = self.conditions.iter_mut();
        if let Some(present) = present.find(|present| present.type_ == type_.as_ref()) {
            present.observed_generation = self.generation;
        }
    }

    pub(in crate::controller) fn remove(&mut self, type_: ConditionType) {
        condition::remove(&mut self.conditions, type_);
    }

    /// Moves a condition to the end of the list.
    pub(in crate::controller) fn move_to_end(&mut self, type_: ConditionType) {
        let present = self.find(type_).cloned();
        self.remove(type_);
        self.conditions.extend(present);
    }

    pub(in crate::controller) fn find(&self, type_: ConditionType) -> Option<&Condition> {
        condition::find(&self.conditions, type_)
    }

    pub(in crate::controller) fn into_conditions(self) -> Vec<Condition> {
        self.conditions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn a_kept_condition_changes_only_its_generation_and_an_absent_one_stays_absent() {
        let mut list = ConditionList::new(&[], Some(1), at(1));
        list.set(ConditionType::Accepted, true, "Accepted", "valid");
        let written = list.into_conditions();
        let mut list = ConditionList::new(&written, Some(2), at(2));
        list.keep(ConditionType::Accepted);
        list.keep(ConditionType::Suspended);
        let mut expected = written;
        expected[0].observed_generation = Some(2);
        assert_eq!(list.into_conditions(), expected);
    }

    #[test]
    fn unknown_is_a_transition_of_its_own() {
        let mut list = ConditionList::new(&[], None, at(1));
        list.set(ConditionType::Connected, false, "Failing", "why");
        let mut list = ConditionList::new(&list.into_conditions(), None, at(2));
        list.set_unknown(ConditionType::Connected, "Silent", "no report");
        let connected = list.find(ConditionType::Connected).unwrap();
        assert_eq!(
            (connected.status.as_str(), connected.last_transition_time.0),
            ("Unknown", at(2))
        );
    }
}
