//! Decides which objects of a Sensor are applied or deleted. Pure.
//!
//! Objects that are up to date are not written: each carries the hash of what was applied. A `StatefulSet` that differs
//! only in what comes from the controller (above all the image) waits for its turn, since its pod is replaced. Objects
//! that were changed by others are applied again; objects with another owner are not changed.

use std::time::Duration;

use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::ResourceExt;
use serde::Serialize;

use super::children::{AppliedChild, ChildKind, SensorChildren};
use super::drift::{DriftAction, DriftBaselines};
use super::pod::{self, EDIT, MAX_CONFIG, SensorPodSettings, SpecEdit};
use super::snapshot::SensorSnapshot;
use crate::api::Sensor;
use crate::controller::runtime::pod_state::PodReason;

/// An object to apply.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ObjectStep<K> {
    pub(super) object: K,
    /// Whether this corrects a change of others.
    pub(super) corrects: bool,
    pub(super) owner: ObjectOwner,
}

/// Who owns the object that is to be applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ObjectOwner {
    /// The watch knows no such object. One without our label may exist.
    Unknown,
    Sensor,
    /// Another object, or none.
    Other,
}

/// An object to delete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ObjectDeletion {
    pub(super) kind: ChildKind,
    pub(super) name: String,
    pub(super) uid: String,
}

/// What is done to the objects of a Sensor.
#[derive(Clone, Debug, Default)]
pub(super) struct ObjectSteps {
    pub(super) deletions: Vec<ObjectDeletion>,
    pub(super) policy: Option<ObjectStep<NetworkPolicy>>,
    pub(super) service: Option<ObjectStep<Service>>,
    pub(super) set: Option<ObjectStep<StatefulSet>>,
    /// [`Self::set`] takes a turn in the [`ReplacementQueue`](super::rollout::ReplacementQueue), which replaces a
    /// running pod.
    pub(super) takes_turn: bool,
    /// A running pod waits for its turn and gets a place in the queue.
    pub(super) reserves_turn: bool,
    /// The size of the configuration, if it is too large for the pod.
    pub(super) oversize: Option<String>,
    /// Time until something that has to wait is checked again.
    pub(super) recheck: Option<Duration>,
    pub(super) baselines: DriftBaselines,
}

impl ObjectSteps {
    fn nothing(snapshot: &SensorSnapshot) -> Self {
        Self {
            baselines: snapshot.memory.baselines.clone(),
            ..Self::default()
        }
    }

    /// Whether an object is applied.
    pub(super) fn applies(&self) -> bool {
        self.set.is_some() || self.service.is_some() || self.policy.is_some()
    }

    /// Whether the Secrets of the source must be read: before its pod is created or updated.
    pub(super) fn needs_secrets(&self) -> bool {
        self.applies() && self.oversize.is_none()
    }

    /// Applies nothing, because something must be corrected first.
    pub(super) fn hold_back(&mut self) {
        (self.policy, self.service, self.set) = (None, None, None);
        self.takes_turn = false;
    }
}

/// Decides the steps. Objects change only once the spec is checked and their listing is complete; with an invalid spec
/// the existing pod stays, so that it delivers the events in its outbox.
pub(super) fn steps(snapshot: &SensorSnapshot, settings: &SensorPodSettings) -> ObjectSteps {
    let known = &snapshot.known;
    let steps = ObjectSteps::nothing(snapshot);
    let Some(children) = &snapshot.children else {
        return steps;
    };
    let planner = ObjectPlanner {
        snapshot,
        sensor: &known.object,
        children,
        steps,
    };
    if known.object.metadata.deletion_timestamp.is_some() || known.is_pending() {
        planner.steps
    } else if !pod::has_pod(&known.object.spec.source) {
        planner.clear()
    } else if known.problem().is_some() {
        planner.steps
    } else {
        planner.make(settings)
    }
}

/// Whether the Sensor is the controller owner of an object.
pub(super) fn is_owned(sensor: &Sensor, child: &AppliedChild) -> bool {
    child.owner.is_some() && child.owner == sensor.metadata.uid
}

/// Whether an object is to be applied.
enum ObjectNeed<K> {
    /// It is up to date.
    Nothing,
    /// It is missing, or was applied from another spec.
    Update(K),
    /// It was changed by others.
    Correction(K),
    /// It is to be applied again after this time.
    Later(Duration),
}

struct ObjectPlanner<'a> {
    snapshot: &'a SensorSnapshot,
    sensor: &'a Sensor,
    children: &'a SensorChildren,
    steps: ObjectSteps,
}

impl ObjectPlanner<'_> {
    /// Deletes the objects that a source of another type needed.
    fn clear(mut self) -> ObjectSteps {
        let (children, name) = (self.children, self.sensor.name_any());
        self.delete(ChildKind::Set, pod::set_name(&name), children.set.as_ref());
        self.delete(ChildKind::Policy, pod::policy_name(&name), children.policy.as_ref());
        self.delete(ChildKind::Service, pod::service_name(&name), children.service.as_ref());
        self.steps
    }

    fn make(mut self, settings: &SensorPodSettings) -> ObjectSteps {
        let (sensor, children) = (self.sensor, self.children);
        let set = self.need(
            ChildKind::Set,
            pod::stateful_set(sensor, settings),
            children.set.as_ref(),
        );
        let set = self.in_turn(set);
        let policy = self.need(ChildKind::Policy, pod::network_policy(sensor), children.policy.as_ref());
        let service = if sensor.spec.source.webhook.is_some() {
            self.need(ChildKind::Service, pod::service(sensor), children.service.as_ref())
        } else {
            let name = pod::service_name(&sensor.name_any());
            self.delete(ChildKind::Service, name, children.service.as_ref());
            ObjectNeed::Nothing
        };
        self.steps.set = self.step(set, children.set.as_ref());
        self.steps.policy = self.step(policy, children.policy.as_ref());
        self.steps.service = self.step(service, children.service.as_ref());
        if self.steps.applies() {
            self.steps.oversize = oversize(pod::config(sensor, settings).len());
        }
        self.steps
    }

    fn delete(&mut self, kind: ChildKind, name: String, child: Option<&AppliedChild>) {
        let owned = child.filter(|child| is_owned(self.sensor, child));
        self.steps.deletions.extend(owned.map(|child| ObjectDeletion {
            kind,
            name,
            uid: child.uid.clone(),
        }));
    }

    fn need<K: ResourceExt + Serialize>(
        &mut self,
        kind: ChildKind,
        object: K,
        child: Option<&AppliedChild>,
    ) -> ObjectNeed<K> {
        let (object, hash) = pod::hashed(object);
        let Some(child) = child.filter(|child| is_owned(self.sensor, child)) else {
            return ObjectNeed::Update(object);
        };
        let current = child.hash.as_ref() == Some(&hash);
        match self.steps.baselines.check(kind, child, current, self.snapshot.at) {
            DriftAction::Now => ObjectNeed::Correction(object),
            _ if !current => ObjectNeed::Update(object),
            DriftAction::Later(wait) => ObjectNeed::Later(wait),
            DriftAction::None => ObjectNeed::Nothing,
        }
    }

    /// Delays a `StatefulSet` until its turn. Edits of the Sensor, drift, and a missing `StatefulSet` do not wait.
    fn in_turn(&mut self, need: ObjectNeed<StatefulSet>) -> ObjectNeed<StatefulSet> {
        let edit = SpecEdit::of(self.sensor);
        let marked = |mut set: StatefulSet| {
            set.annotations_mut().insert(EDIT.into(), edit.text());
            set
        };
        let set = match need {
            ObjectNeed::Update(set) => marked(set),
            ObjectNeed::Correction(set) => return ObjectNeed::Correction(marked(set)),
            ObjectNeed::Nothing | ObjectNeed::Later(_) => return need,
        };
        let present = self.children.set.as_ref();
        let present = present.filter(|child| is_owned(self.sensor, child));
        let edited = |before: &SpecEdit| edit.is_other_than(before);
        if present.is_none_or(|child| child.edit.as_ref().is_some_and(edited)) {
            return ObjectNeed::Update(set);
        }
        let pod = self.children.pod.as_ref();
        let runs = pod.is_some_and(|pod| pod.reason == PodReason::Running);
        let (turns, at) = (&self.snapshot.turns, self.snapshot.at);
        let wait = if runs {
            turns.wait(self.snapshot.memory.place, at)
        } else {
            turns.wait_idle(at)
        };
        if wait.is_zero() {
            self.steps.takes_turn = runs;
            ObjectNeed::Update(set)
        } else {
            self.steps.reserves_turn = runs;
            ObjectNeed::Later(wait)
        }
    }

    fn step<K>(&mut self, need: ObjectNeed<K>, child: Option<&AppliedChild>) -> Option<ObjectStep<K>> {
        let (object, corrects) = match need {
            ObjectNeed::Nothing => return None,
            ObjectNeed::Update(object) => (object, false),
            ObjectNeed::Correction(object) => (object, true),
            ObjectNeed::Later(wait) => {
                let recheck = self.steps.recheck.into_iter().chain([wait]).min();
                self.steps.recheck = recheck;
                return None;
            }
        };
        let owner = match child {
            None => ObjectOwner::Unknown,
            Some(child) if is_owned(self.sensor, child) => ObjectOwner::Sensor,
            Some(_) => ObjectOwner::Other,
        };
        Some(ObjectStep {
            object,
            corrects,
            owner,
        })
    }
}

/// Checks what admission cannot: the size of the configuration.
fn oversize(bytes: usize) -> Option<String> {
    (bytes > MAX_CONFIG).then(|| {
        format!(
            "spec has {bytes} bytes as JSON; the limit is {MAX_CONFIG}: shorten spec.updates, spec.signals \
             or the request body"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_above_the_size_limit_is_refused_and_one_byte_less_is_not() {
        assert_eq!(oversize(MAX_CONFIG), None);
        assert!(oversize(MAX_CONFIG + 1).unwrap().contains("122880"));
    }
}
