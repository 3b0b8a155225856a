//! Decides everything that a reconcile of a Sensor changes, from what was observed. Pure.
//!
//! What only the answers of the API server show, `apply` returns as data; the status follows from both.

use super::conditions::{INVALID_SPEC, SECRET_NOT_FOUND, SECRET_UNUSABLE};
use super::objects::{ObjectSteps, is_owned};
use super::observe::ObservedSensor;
use super::pod;
use super::secrets::{self, SecretProblem};
use super::snapshot::SensorSnapshot;
use crate::link::deliveries::{ReceiverTerms, SensorDirectives};
use crate::link::sensor_messages::SensorTerms;

/// Why there is no pod that matches the spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SensorObstacle {
    pub(super) reason: &'static str,
    /// The problem and its fix.
    pub(super) message: String,
    /// Whether the user must correct the spec or an object it references; `Accepted` is then false.
    pub(super) of_spec: bool,
}

impl SensorObstacle {
    fn spec(reason: &'static str, message: String) -> Self {
        Self {
            reason,
            message,
            of_spec: true,
        }
    }

    pub(super) fn cluster(reason: &'static str, message: String) -> Self {
        Self {
            reason,
            message,
            of_spec: false,
        }
    }
}

/// Which pod may act for the Sensor.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum RelayStep {
    /// As before.
    Keep,
    /// No pod.
    Forget,
    /// This pod, with these directives.
    Expect {
        pod_uid: String,
        directives: Box<SensorDirectives>,
    },
}

/// The plan of a reconcile.
pub(super) struct SensorPlan {
    pub(super) relay: RelayStep,
    pub(super) objects: ObjectSteps,
    pub(super) obstacle: Option<SensorObstacle>,
    /// Whether the status is computed. Otherwise it stays as it is, and another request follows once more is known.
    pub(super) reports_status: bool,
}

/// Computes the plan. `objects` is the result of [`objects::steps`](super::objects::steps) for the same snapshot.
pub(super) fn decide(observed: &ObservedSensor, mut objects: ObjectSteps) -> SensorPlan {
    let obstacle = obstacle(observed, &objects);
    if obstacle.is_some() {
        objects.hold_back();
    }
    let snapshot = &observed.snapshot;
    let sensor = &snapshot.known.object;
    let has_pod = pod::has_pod(&sensor.spec.source);
    // The objects of a Sensor that is being deleted are garbage-collected through their owner references.
    let deleted = sensor.metadata.deletion_timestamp.is_some();
    SensorPlan {
        relay: if deleted || !has_pod && !snapshot.known.is_pending() && snapshot.children.is_some() {
            RelayStep::Forget
        } else {
            expected_pod(snapshot)
        },
        objects,
        obstacle,
        // Until the spec is checked, the status stays that of the generation that it names.
        reports_status: !deleted && !snapshot.known.is_pending() && (!has_pod || snapshot.children.is_some()),
    }
}

/// What keeps the objects from being applied.
fn obstacle(observed: &ObservedSensor, objects: &ObjectSteps) -> Option<SensorObstacle> {
    if let Some(message) = &objects.oversize {
        return Some(SensorObstacle::spec(INVALID_SPEC, message.clone()));
    }
    let source = &observed.snapshot.known.object.spec.source;
    let problem = secrets::problem(source, observed.secrets.as_deref()?)?;
    Some(match problem {
        SecretProblem::Missing(message) => SensorObstacle::spec(SECRET_NOT_FOUND, message),
        SecretProblem::Unusable(message) => SensorObstacle::spec(SECRET_UNUSABLE, message),
    })
}

/// The pod that may act for the Sensor: the pod of the `StatefulSet` that the Sensor owns. It delivers also while the spec is
/// still to be checked.
fn expected_pod(snapshot: &SensorSnapshot) -> RelayStep {
    let Some(children) = &snapshot.children else {
        return RelayStep::Keep;
    };
    match (&children.set, &children.pod) {
        (Some(set), Some(pod)) if is_owned(&snapshot.known.object, set) && pod.set.as_ref() == Some(&set.uid) => {
            RelayStep::Expect {
                pod_uid: pod.uid.clone(),
                directives: Box::new(directives(snapshot)),
            }
        }
        _ => RelayStep::Keep,
    }
}

fn directives(snapshot: &SensorSnapshot) -> SensorDirectives {
    let receivers = snapshot.receivers.iter().map(|receiver| ReceiverTerms {
        uid: receiver.facts.uid.clone(),
        name: receiver.name.clone(),
        // Set by the relay.
        revision: 0,
    });
    SensorDirectives {
        terms: terms(snapshot),
        receivers: Some(receivers.collect()),
    }
}

/// A Sensor that cannot be used is suspended, and without its rules, so that the pod can follow that. `None`: no generation
/// of it has been checked.
fn terms(snapshot: &SensorSnapshot) -> Option<SensorTerms> {
    let mut terms = snapshot.known.terms()?;
    if snapshot.known.problem().is_some() {
        terms.spec.updates.clear();
        terms.spec.signals.clear();
        terms.spec.notification = None;
        terms.spec.task = None;
    }
    Some(terms)
}
