//! The conditions of a Sensor. Pure.
//!
//! `Ready` answers whether it needs anyone: a spec that cannot be used does; a failure that it tries again after is being
//! worked on; receivers that are not there, or rest, need nobody.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;

use super::pod;
use super::status::{OwnPod, SensorStatusInput};
use crate::api::condition::{self, ConditionType};
use crate::controller::agent::pod_state::{PodReason, PodState};
use crate::controller::delivery_relay::SILENCE;
use crate::link::pod::SENSOR_SERVICE_ACCOUNT;

/// Reason of a condition that does not hold.
const INACTIVE: &str = "Inactive";
/// Reason of `Accepted=False`, and of `Ready` then.
pub(super) const INVALID_SPEC: &str = "InvalidSpec";
/// Reason of `Accepted=False` while a Secret or its key is missing.
pub(super) const SECRET_NOT_FOUND: &str = "SecretNotFound";
/// Reason of `Accepted=False` while the key of a webhook cannot be one.
pub(super) const SECRET_UNUSABLE: &str = "SecretUnusable";
/// Reason of `Connected=False` while somebody else's object has the name of one of its own.
pub(super) const NAME_TAKEN: &str = "NameTaken";
/// Reason of `Connected=False` while the API server refuses one of its objects.
pub(super) const REFUSED: &str = "Refused";
/// Reason of `Connected=False` while it fails, and of `Ready` then.
pub(super) const SENSOR_FAILING: &str = "SensorFailing";
/// Reason while `spec.suspend` is true.
const SUSPENDED: &str = "SuspendedBySpec";
/// Reason of `Connected=True`.
const LISTENING: &str = "Listening";
/// Reason of `Connected=Unknown` until it was heard of.
const STARTING: &str = "Starting";
/// Reason of `Connected=Unknown` while its pod says nothing, though it did before or runs.
pub(super) const SILENT: &str = "Silent";
/// Reason of `Ready=False` while a receiver cannot score a signal.
const NO_LIGHT_MODEL: &str = "NoLightModel";
/// Names in one message.
const MOST_NAMES: usize = 3;

/// All conditions.
pub(super) fn compute(facts: &SensorStatusInput<'_>) -> Vec<Condition> {
    let mut list = SensorConditions {
        facts,
        conditions: facts.old.conditions.clone(),
    };
    list.accepted();
    list.suspended();
    list.connected();
    list.durable();
    list.standing();
    list.conditions
}

struct SensorConditions<'a> {
    facts: &'a SensorStatusInput<'a>,
    conditions: Vec<Condition>,
}

impl SensorConditions<'_> {
    fn set(&mut self, type_: ConditionType, status: &str, reason: &str, message: impl Into<String>) {
        let generation = self.facts.sensor.metadata.generation;
        let mut new = condition::condition(type_, false, reason, message, generation, self.facts.now);
        new.status = status.into();
        condition::set(&mut self.conditions, new);
    }

    fn accepted(&mut self) {
        let type_ = ConditionType::Accepted;
        if let Some((reason, problem)) = self.facts.mistake() {
            let message = format!("{problem}. It does not listen until that is corrected");
            self.set(type_, "False", reason, message);
        } else {
            let message = format!("the spec is usable{}", self.absent());
            self.set(type_, "True", "Accepted", message);
        }
    }

    /// Named Agents that are not there: no mistake, they may come.
    fn absent(&self) -> String {
        match self.facts.absent {
            [] => String::new(),
            [one] => format!("; Agent {one} is not there, it receives what comes once it is"),
            many => format!(
                "; Agents {} are not there, they receive what comes once they are",
                names(many)
            ),
        }
    }

    fn suspended(&mut self) {
        if self.facts.sensor.spec.suspend {
            let message = "set spec.suspend to false to go on";
            self.set(ConditionType::Suspended, "True", SUSPENDED, message);
        } else {
            self.set(ConditionType::Suspended, "False", INACTIVE, "");
        }
    }

    fn connected(&mut self) {
        let (type_, facts) = (ConditionType::Connected, self.facts);
        if let Some((reason, _)) = facts.mistake() {
            let message = "it does not listen: its spec, or what that refers to, cannot be used";
            return self.set(type_, "False", reason, message);
        }
        if facts.sensor.spec.suspend {
            return self.set(type_, "False", SUSPENDED, "it does not listen: spec.suspend is true");
        }
        if let Some(own) = facts.own {
            return self.own(&own);
        }
        if facts.receivers.is_empty() {
            let message = "no Agent receives from it: none that it names or selects is there";
            return self.set(type_, "False", "NoReceiver", message);
        }
        if facts.awake().next().is_none() {
            let message = "it runs in its receivers' pods, and all of them are suspended";
            return self.set(type_, "False", "ReceiversSuspended", message);
        }
        let failing: Vec<_> = facts
            .spoken()
            .filter_map(|speaker| Some((speaker.name, speaker.report.failure.as_ref()?)))
            .collect();
        match failing.as_slice() {
            [] if facts.spoken().next().is_some() => self.set(type_, "True", LISTENING, "it listens"),
            [] => self.waiting("it runs in its receivers' pods, and none has said yet that it does"),
            [(agent, failure), rest @ ..] => {
                let more = match rest.len() {
                    0 => String::new(),
                    more => format!(", and in {more} more"),
                };
                let message = format!("in the pod of Agent {agent}{more}: {failure}");
                self.set(type_, "False", SENSOR_FAILING, message);
            }
        }
    }

    /// One with a pod of its own.
    fn own(&mut self, own: &OwnPod<'_>) {
        let type_ = ConditionType::Connected;
        if let Some(obstacle) = own.obstacle {
            return self.set(type_, "False", obstacle.reason, obstacle.message.clone());
        }
        let trouble = own.pod.filter(|pod| is_trouble(pod.reason.as_ref()));
        if let Some(pod) = trouble {
            let message = if pod.reason == PodReason::ImagePullFailed {
                format!(
                    "the image of its pod cannot be pulled: see the pod's events; a Secret for its registry is named by the service \
                     account {SENSOR_SERVICE_ACCOUNT} of the namespace"
                )
            } else {
                format!("its pod: {}", pod.message)
            };
            return self.set(type_, "False", pod.reason.as_ref(), message);
        }
        if own.silent {
            return self.silent(own);
        }
        let (facts, spoken) = (self.facts, self.facts.spoken().next());
        match (spoken, own.pod) {
            (Some(speaker), _) => match &speaker.report.failure {
                Some(failure) => self.set(type_, "False", SENSOR_FAILING, failure.clone()),
                None if facts.receivers.is_empty() => {
                    let message = if facts.sensor.spec.source.webhook.is_some() {
                        "it listens, but no Agent receives from it: none that it names or selects is there; senders are told to \
                         send again (503)"
                    } else {
                        "it listens, but no Agent receives from it: none that it names or selects is there"
                    };
                    self.set(type_, "True", LISTENING, message);
                }
                None => self.set(type_, "True", LISTENING, "it listens"),
            },
            (None, Some(pod)) if pod.reason == PodReason::Unschedulable => {
                self.waiting(&format!("its pod: {}", pod.message));
            }
            (None, _) => self.waiting("its pod has not said yet that it listens"),
        }
    }

    /// Its own pod has been silent for too long: whatever it said before, nobody knows whether it listens.
    fn silent(&mut self, own: &OwnPod<'_>) {
        let type_ = ConditionType::Connected;
        let pod = pod::pod_name(&self.facts.sensor.name_any());
        if own.pod.is_some_and(PodState::ending) {
            let message = format!(
                "its pod {pod} is to end, and its node does not say that it has: if the node is gone for good, delete its \
                 Node object, or taint it with node.kubernetes.io/out-of-service; the pod is then made anew"
            );
            return self.set(type_, "False", PodReason::NodeLost.as_ref(), message);
        }
        let held = condition::find(&self.conditions, type_).map_or("", |held| held.reason.as_str());
        let runs = own.pod.is_some_and(|pod| pod.reason == PodReason::Running);
        let message = match own.pod {
            Some(_) if runs => format!(
                "its pod {pod} has said nothing for {} s: see its log, and whether its node is ready",
                SILENCE.as_secs()
            ),
            Some(state) => format!("its pod {pod} does not come up: {}; see its events", state.message),
            None => format!(
                "it has no pod: see the events of StatefulSet {}",
                pod.trim_end_matches("-0")
            ),
        };
        if !runs && held == PodReason::CrashLooping.as_ref() {
            // Between two tries.
        } else if !runs && ["", STARTING].contains(&held) {
            self.set(type_, "Unknown", STARTING, message);
        } else {
            self.set(type_, "Unknown", SILENT, message);
        }
    }

    /// No pod has spoken of this spec: what was said before stands for now, with the generation that it was said of, since
    /// pods come and go.
    fn waiting(&mut self, message: &str) {
        let type_ = ConditionType::Connected;
        let spoken = [LISTENING, SENSOR_FAILING, PodReason::CrashLooping.as_ref()];
        match condition::find(&self.conditions, type_) {
            Some(held) if spoken.contains(&held.reason.as_str()) => {}
            Some(_) | None => self.set(type_, "Unknown", STARTING, message),
        }
    }

    /// `Connected` says how it was by an older spec.
    fn is_stale(&self) -> bool {
        let held = condition::find(&self.conditions, ConditionType::Connected);
        held.is_some_and(|held| held.observed_generation != self.facts.sensor.metadata.generation)
    }

    fn durable(&mut self) {
        let type_ = ConditionType::Durable;
        let receivers = self.facts.receivers.iter();
        let forgetful: Vec<String> = receivers
            .filter(|receiver| receiver.facts.ephemeral)
            .map(|receiver| receiver.name.clone())
            .collect();
        if self.facts.own.is_some() && self.facts.sensor.spec.storage.ephemeral {
            let message = "what its receivers do not have yet is lost when its pod goes (spec.storage.ephemeral)";
            self.set(type_, "False", "EphemeralOutbox", message);
        } else if forgetful.is_empty() {
            let message = "what it has given, and what it has missed, is known after a restart";
            self.set(type_, "True", "Durable", message);
        } else {
            let message = format!(
                "{} {} with the pod what came (spec.storage.ephemeral): what is missed meanwhile is not made up for",
                names(&forgetful),
                if forgetful.len() == 1 { "forgets" } else { "forget" },
            );
            self.set(type_, "False", "EphemeralReceiver", message);
        }
    }

    /// Receivers that are to score a signal and cannot.
    fn unscored(&self) -> Option<String> {
        let signals = &self.facts.sensor.spec.signals;
        let place = signals.iter().position(|signal| signal.model.is_some())?;
        let without = self.facts.receivers.iter().filter(|receiver| !receiver.facts.scores);
        let without: Vec<String> = without.map(|receiver| receiver.name.clone()).collect();
        (!without.is_empty()).then(|| {
            format!(
                "spec.signals[{place}].model: set spec.lightModel of {}, or remove model; until then the signal is told \
                 unscored, the first time as if it held and then without waking",
                names(&without)
            )
        })
    }

    fn standing(&mut self) {
        let held = |type_| {
            let held = condition::find(&self.conditions, type_);
            held.map_or_else(Default::default, |held| (held.reason.clone(), held.message.clone()))
        };
        let (accepted, connected) = (held(ConditionType::Accepted), held(ConditionType::Connected));
        let starts = self.facts.own.is_some() && connected.0 == STARTING;
        let stale = self.facts.own.is_some() && self.is_stale();
        let (ready, also, (reason, message)) = if self.facts.mistake().is_some() {
            ("False", Some(ConditionType::Stalled), accepted)
        } else if connected.0 == NAME_TAKEN {
            ("False", Some(ConditionType::Stalled), connected)
        } else if let Some(message) = self.unscored() {
            ("False", Some(ConditionType::Stalled), (NO_LIGHT_MODEL.into(), message))
        } else if starts || is_failing(&connected.0) {
            ("False", Some(ConditionType::Reconciling), connected)
        } else if stale {
            let message = "its pod has not said yet that it listens by the spec as it is now";
            (
                "False",
                Some(ConditionType::Reconciling),
                (STARTING.into(), message.into()),
            )
        } else {
            ("True", None, connected)
        };
        for gone in [ConditionType::Reconciling, ConditionType::Stalled] {
            if also != Some(gone) {
                condition::remove(&mut self.conditions, gone);
            }
        }
        self.set(ConditionType::Ready, ready, &reason, message.clone());
        if let Some(also) = also {
            self.set(also, "True", &reason, message);
        }
    }
}

/// Whether it does not listen for a reason that is tried again after, or needs a person: a streak of these is one Event.
pub(super) fn is_failing(reason: &str) -> bool {
    [SENSOR_FAILING, NAME_TAKEN, REFUSED, SILENT].contains(&reason) || is_trouble(reason)
}

/// Whether a pod with this reason is not coming up by itself.
fn is_trouble(reason: &str) -> bool {
    let trouble = [
        PodReason::ImagePullFailed,
        PodReason::CrashLooping,
        PodReason::Evicted,
        PodReason::NodeLost,
    ];
    trouble.iter().any(|trouble| trouble.as_ref() == reason)
}

fn names(all: &[String]) -> String {
    let shown = all.iter().take(MOST_NAMES).cloned().collect::<Vec<_>>().join(", ");
    match all.len().saturating_sub(MOST_NAMES) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}
