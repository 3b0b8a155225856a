//! Decides which changes of an Agent trigger a reconcile: spec, labels, request annotations and deletion. Pure.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use kube::{Resource, ResourceExt};

use crate::controller::runtime::names;
use crate::link::gate_annotations::{ANSWERS, APPROVE, APPROVED_BY, DENY};

/// Annotations with a request or with the answer to a gate.
const REQUESTS: [&str; 7] = [
    names::WAKE,
    names::RESUME,
    names::STOP,
    ANSWERS,
    APPROVE,
    APPROVED_BY,
    DENY,
];

/// A hash of the relevant fields of each object, by UID.
#[derive(Default)]
pub(super) struct ReconcileTriggers {
    seen: HashMap<String, u64>,
}

impl ReconcileTriggers {
    /// Whether the relevant fields differ from those last seen.
    pub(super) fn is_new<K: Resource>(&mut self, object: &K) -> bool {
        let print = print(object);
        self.seen.insert(uid(object), print) != Some(print)
    }

    pub(super) fn forget<K: Resource>(&mut self, object: &K) {
        self.seen.remove(&uid(object));
    }

    /// Replaces everything seen by a complete list.
    pub(super) fn replace<K: Resource>(&mut self, objects: &[Arc<K>]) {
        let prints = objects
            .iter()
            .map(|object| (uid(object.as_ref()), print(object.as_ref())));
        self.seen = prints.collect();
    }
}

fn uid<K: Resource>(object: &K) -> String {
    object.meta().uid.clone().unwrap_or_default()
}

fn print<K: Resource>(object: &K) -> u64 {
    let meta = object.meta();
    let mut hasher = DefaultHasher::new();
    meta.generation.hash(&mut hasher);
    meta.deletion_timestamp.is_some().hash(&mut hasher);
    // AgentBudgets select Agents by label.
    meta.labels.hash(&mut hasher);
    for request in REQUESTS {
        object.annotations().get(request).hash(&mut hasher);
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::Pod;

    fn object(generation: i64, wake: Option<&str>) -> Pod {
        let mut pod = Pod::default();
        pod.metadata.uid = Some("u".into());
        pod.metadata.generation = Some(generation);
        let annotation = |value: &str| [(names::WAKE.to_owned(), value.to_owned())].into();
        pod.metadata.annotations = wake.map(annotation);
        pod
    }

    #[test]
    fn a_status_write_triggers_no_reconcile() {
        let mut triggers = ReconcileTriggers::default();
        assert!(triggers.is_new(&object(1, None)));
        let mut written = object(1, None);
        written.metadata.resource_version = Some("77".into());
        assert!(!triggers.is_new(&written));
    }

    #[test]
    fn each_request_and_each_answer_to_a_gate_triggers_one_reconcile() {
        for annotation in REQUESTS {
            let mut triggers = ReconcileTriggers::default();
            assert!(triggers.is_new(&object(1, None)));
            let mut asked = object(1, None);
            asked.metadata.annotations = Some([(annotation.to_owned(), "x".to_owned())].into());
            assert!(triggers.is_new(&asked), "{annotation}");
            assert!(!triggers.is_new(&asked), "{annotation}");
        }
    }

    #[test]
    fn another_label_triggers_one_reconcile_since_other_budgets_may_select_it() {
        let mut triggers = ReconcileTriggers::default();
        assert!(triggers.is_new(&object(1, None)));
        let mut labelled = object(1, None);
        labelled.metadata.labels = Some([("team".to_owned(), "a".to_owned())].into());
        assert!(triggers.is_new(&labelled));
        assert!(!triggers.is_new(&labelled));
    }

    #[test]
    fn a_new_spec_and_each_new_request_trigger_one_reconcile() {
        let mut triggers = ReconcileTriggers::default();
        assert!(triggers.is_new(&object(1, None)));
        assert!(triggers.is_new(&object(2, None)));
        assert!(triggers.is_new(&object(2, Some("a"))));
        assert!(!triggers.is_new(&object(2, Some("a"))));
        assert!(triggers.is_new(&object(2, Some("b"))));
    }
}
