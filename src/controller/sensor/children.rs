//! The child objects of Sensors, as the watches report them. Pure.
//!
//! An object is matched by its label and its name; callers check whether the Sensor owns it.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use super::drift::FieldOwnership;
use super::pod::{self, EDIT, HASH, SpecEdit};
use crate::api::{NamespacedName, Sensor};
use crate::controller::runtime::owner::controlling;
use crate::controller::runtime::pod_state::PodState;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, strum::EnumIter)]
pub(super) enum ChildKind {
    Set,
    Service,
    Policy,
    Pod,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AppliedChild {
    pub(super) uid: String,
    /// Uid of the Sensor that it belongs to.
    pub(super) owner: Option<String>,
    /// The hash of what was applied, from the annotation [`HASH`].
    pub(super) hash: Option<String>,
    /// Only on a `StatefulSet`: the edit of the Sensor that it was built from.
    pub(super) edit: Option<SpecEdit>,
    pub(super) fields: FieldOwnership,
}

impl AppliedChild {
    pub(super) fn of(object: &impl ResourceExt) -> Self {
        let owner = controlling::<Sensor>(object.owner_references());
        Self {
            uid: object.uid().unwrap_or_default(),
            owner: owner.map(str::to_owned),
            hash: object.annotations().get(HASH).cloned(),
            edit: object.annotations().get(EDIT).and_then(|text| SpecEdit::parse(text)),
            fields: FieldOwnership::of(object.managed_fields()),
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum ObservedChild {
    Set(AppliedChild),
    Service(AppliedChild),
    Policy(AppliedChild),
    Pod(PodState),
}

impl ObservedChild {
    pub(super) fn set(object: &impl ResourceExt) -> Self {
        Self::Set(AppliedChild::of(object))
    }

    pub(super) fn service(object: &impl ResourceExt) -> Self {
        Self::Service(AppliedChild::of(object))
    }

    pub(super) fn policy(object: &impl ResourceExt) -> Self {
        Self::Policy(AppliedChild::of(object))
    }

    pub(super) fn pod(object: &Pod) -> Self {
        Self::Pod(PodState::of(object))
    }

    pub(super) fn child(&self) -> Option<(ChildKind, &AppliedChild)> {
        match self {
            Self::Set(child) => Some((ChildKind::Set, child)),
            Self::Service(child) => Some((ChildKind::Service, child)),
            Self::Policy(child) => Some((ChildKind::Policy, child)),
            Self::Pod(_) => None,
        }
    }
}

/// The Sensor that an object of this kind was created for.
pub(super) fn key(object: &impl ResourceExt, kind: ChildKind) -> Option<NamespacedName> {
    let sensor = pod::sensor_of(object)?;
    let name = match kind {
        ChildKind::Set => pod::set_name(&sensor),
        ChildKind::Service => pod::service_name(&sensor),
        ChildKind::Policy => pod::policy_name(&sensor),
        ChildKind::Pod => pod::pod_name(&sensor),
    };
    (object.name_any() == name).then(|| NamespacedName::new(object.namespace().unwrap_or_default(), sensor))
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct SensorChildren {
    pub(super) set: Option<AppliedChild>,
    pub(super) service: Option<AppliedChild>,
    pub(super) policy: Option<AppliedChild>,
    pub(super) pod: Option<PodState>,
}

impl SensorChildren {
    /// Returns whether anything changed.
    fn put(&mut self, seen: ObservedChild) -> bool {
        let before = self.clone();
        match seen {
            ObservedChild::Set(set) => self.set = Some(set),
            ObservedChild::Service(service) => self.service = Some(service),
            ObservedChild::Policy(policy) => self.policy = Some(policy),
            ObservedChild::Pod(pod) => self.pod = Some(pod),
        }
        *self != before
    }

    fn remove(&mut self, kind: ChildKind) {
        match kind {
            ChildKind::Set => self.set = None,
            ChildKind::Service => self.service = None,
            ChildKind::Policy => self.policy = None,
            ChildKind::Pod => self.pod = None,
        }
    }

    fn has(&self, kind: ChildKind) -> bool {
        match kind {
            ChildKind::Set => self.set.is_some(),
            ChildKind::Service => self.service.is_some(),
            ChildKind::Policy => self.policy.is_some(),
            ChildKind::Pod => self.pod.is_some(),
        }
    }
}

#[derive(Default)]
pub(super) struct ChildIndex {
    all: BTreeMap<NamespacedName, SensorChildren>,
    /// Kinds and scopes (`None`: all namespaces) that have been listed at least once.
    listed: BTreeSet<(ChildKind, Option<String>)>,
}

impl ChildIndex {
    /// The objects of a Sensor; `None` until all kinds have been listed.
    pub(super) fn of(&self, key: &NamespacedName) -> Option<SensorChildren> {
        self.is_whole(&key.namespace)
            .then(|| self.all.get(key).cloned().unwrap_or_default())
    }

    /// Whether a namespace certainly contains no object of a Sensor.
    pub(super) fn is_empty(&self, namespace: &str) -> bool {
        let first = NamespacedName::first_in(namespace);
        let next = self.all.range(first..).next();
        self.is_whole(namespace) && next.is_none_or(|(key, _)| key.namespace != namespace)
    }

    fn is_whole(&self, namespace: &str) -> bool {
        let scopes = [None, Some(namespace.to_owned())];
        let known = |kind| scopes.iter().any(|scope| self.listed.contains(&(kind, scope.clone())));
        <ChildKind as strum::IntoEnumIterator>::iter().all(known)
    }

    /// Records an object; returns whether it changed.
    pub(super) fn seen(&mut self, key: &NamespacedName, seen: ObservedChild) -> bool {
        self.all.entry(key.clone()).or_default().put(seen)
    }

    pub(super) fn remove_child(&mut self, key: &NamespacedName, kind: ChildKind) {
        if let Some(children) = self.all.get_mut(key) {
            children.remove(kind);
            if *children == SensorChildren::default() {
                self.all.remove(key);
            }
        }
    }

    /// Replaces the objects of a kind in a scope; returns the Sensors whose objects changed.
    pub(super) fn listed(
        &mut self,
        (kind, scope): (ChildKind, Option<&str>),
        present: BTreeMap<NamespacedName, ObservedChild>,
    ) -> BTreeSet<NamespacedName> {
        let within = |key: &NamespacedName| scope.is_none_or(|scope| scope == key.namespace);
        let here = self
            .all
            .iter()
            .filter(|(key, children)| within(key) && children.has(kind));
        let gone: BTreeSet<NamespacedName> = here
            .map(|(key, _)| key.clone())
            .filter(|key| !present.contains_key(key))
            .collect();
        for key in &gone {
            self.remove_child(key, kind);
        }
        let mut changed = gone;
        for (key, seen) in present {
            if self.seen(&key, seen) {
                changed.insert(key);
            }
        }
        self.listed.insert((kind, scope.map(str::to_owned)));
        changed
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::apps::v1::StatefulSet;
    use serde_json::json;

    use super::*;

    fn of(namespace: &str) -> NamespacedName {
        NamespacedName::new(namespace, "s")
    }

    fn set(name: &str, owner: &str) -> StatefulSet {
        let owner = json!({"apiVersion": "agentloop.dev/v1alpha1", "kind": "Sensor", "name": "s", "uid": owner, "controller": true});
        serde_json::from_value(json!({"metadata": {
            "name": name, "namespace": "n", "uid": "u", "labels": {"agentloop.dev/sensor": "s"},
            "annotations": {"agentloop.dev/spec-hash": "h"}, "ownerReferences": [owner],
        }}))
        .unwrap()
    }

    #[test]
    fn an_object_is_identified_by_label_and_name_and_has_its_owner() {
        assert_eq!(key(&set("s-sensor", "o"), ChildKind::Set), Some(of("n")));
        assert_eq!(key(&set("s-sensor", "o"), ChildKind::Service), None);
        assert_eq!(key(&set("other", "o"), ChildKind::Set), None);
        let child = AppliedChild::of(&set("s-sensor", "o"));
        assert_eq!((child.owner.as_deref(), child.hash.as_deref()), (Some("o"), Some("h")));
        for (field, foreign) in [("apiVersion", "example.com/v1"), ("kind", "Agent")] {
            let mut object = serde_json::to_value(set("s-sensor", "o")).unwrap();
            object["metadata"]["ownerReferences"][0][field] = foreign.into();
            let object: StatefulSet = serde_json::from_value(object).unwrap();
            assert_eq!(AppliedChild::of(&object).owner, None, "{field}");
        }
    }

    #[test]
    fn nothing_is_known_before_each_kind_was_listed_and_a_list_reveals_deletions() {
        let mut table = ChildIndex::default();
        let here = || BTreeMap::from([(of("n"), ObservedChild::set(&set("s-sensor", "o")))]);
        assert_eq!(table.listed((ChildKind::Set, None), here()), [of("n")].into());
        assert_eq!(table.of(&of("n")), None);
        table.listed((ChildKind::Service, None), BTreeMap::new());
        table.listed((ChildKind::Policy, None), BTreeMap::new());
        table.listed((ChildKind::Pod, Some("n")), BTreeMap::new());
        assert!(table.of(&of("n")).unwrap().set.is_some());
        assert_eq!(table.of(&of("m")), None, "the pods of that namespace were not listed");
        assert_eq!(
            table.listed((ChildKind::Set, None), here()),
            BTreeSet::new(),
            "no change"
        );
        assert_eq!(
            table.listed((ChildKind::Set, Some("m")), BTreeMap::new()),
            BTreeSet::new(),
            "another namespace"
        );
        assert_eq!(table.listed((ChildKind::Set, None), BTreeMap::new()), [of("n")].into());
        assert_eq!(table.of(&of("n")), Some(SensorChildren::default()));
    }
}
