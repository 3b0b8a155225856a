//! The conditions of a Sensor. Pure.
//!
//! `Ready` answers whether the Sensor needs attention. It is false for an invalid spec (`Stalled`) and for a failure
//! that is being retried (`Reconciling`). Absent or suspended receivers need no action and leave it true.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;

use super::pod;
use super::status::{OwnPod, SensorStatusInput};
use super::validate::plain_http;
use crate::api::condition::ConditionType;
use crate::controller::delivery_relay::REPORT_TIMEOUT;
use crate::controller::runtime::condition_list::ConditionList;
use crate::controller::runtime::pod_state::{PodReason, PodState};

/// Reason of `Accepted=False`, and of `Ready=False` at that time.
pub(super) const INVALID_SPEC: &str = "InvalidSpec";
/// Reason of `Accepted=False` while a Secret or a key in it is missing.
pub(super) const SECRET_NOT_FOUND: &str = "SecretNotFound";
/// Reason of `Accepted=False` while the key in the webhook's Secret is not valid for its scheme.
pub(super) const SECRET_UNUSABLE: &str = "SecretUnusable";
/// Reason of `Connected=False` while a child object's name is used by an object with another owner.
pub(super) const NAME_TAKEN: &str = "NameTaken";
/// Reason of `Connected=False` while the API server rejects a child object.
pub(super) const REFUSED: &str = "Refused";
/// Reason of `Connected=False` while the source fails, and of `Ready=False` at that time.
pub(super) const SENSOR_FAILING: &str = "SensorFailing";
/// Reason while `spec.suspend` is true.
const SUSPENDED: &str = "SuspendedBySpec";
/// Reason of `Connected=True`.
const LISTENING: &str = "Listening";
/// Reason of `Connected=Unknown` until the first report.
const STARTING: &str = "Starting";
/// Reason of `Connected=Unknown` while the sensor pod sends no reports, although it runs or did before.
pub(super) const SILENT: &str = "Silent";
/// Reason of `Ready=False` while a receiver cannot score a signal.
const NO_LIGHT_MODEL: &str = "NoLightModel";
/// Maximum number of names in one message.
const MAX_NAMES: usize = 3;

pub(super) fn compute(facts: &SensorStatusInput<'_>) -> Vec<Condition> {
    let mut conditions = SensorConditions {
        facts,
        list: ConditionList::new(&facts.old.conditions, facts.sensor.metadata.generation, facts.now),
    };
    conditions.accepted();
    conditions.suspended();
    conditions.connected();
    conditions.durable();
    conditions.standing();
    conditions.list.into_conditions()
}

struct SensorConditions<'a> {
    facts: &'a SensorStatusInput<'a>,
    list: ConditionList,
}

impl SensorConditions<'_> {
    fn accepted(&mut self) {
        let type_ = ConditionType::Accepted;
        if let Some((reason, problem)) = self.facts.mistake() {
            let until = if self.facts.problem.is_some() {
                "The Sensor receives no events until this is corrected"
            } else {
                "No sensor pod is created or updated until this is corrected; an existing one keeps running"
            };
            let message = format!("{problem}. {until}");
            self.list.set(type_, false, reason, message);
        } else {
            let open = plain_http(&self.facts.sensor.spec).unwrap_or_default();
            let message = format!("the spec is valid{}{open}", self.absent());
            self.list.set(type_, true, "Accepted", message);
        }
    }

    /// Agents that are named and do not exist. Not an error: they may be created later.
    fn absent(&self) -> String {
        match self.facts.absent {
            [] => String::new(),
            [one] => format!("; Agent {one} does not exist and receives events once it is created"),
            many => format!(
                "; Agents {} do not exist and receive events once they are created",
                names(many)
            ),
        }
    }

    fn suspended(&mut self) {
        if self.facts.sensor.spec.suspend {
            let message = "set spec.suspend to false to resume";
            self.list.set(ConditionType::Suspended, true, SUSPENDED, message);
        } else {
            self.list.clear(ConditionType::Suspended);
        }
    }

    fn connected(&mut self) {
        // The first cause that applies: reports of pods count only if the spec lets the source run and someone
        // receives.
        let (type_, facts) = (ConditionType::Connected, self.facts);
        if let Some((reason, _)) = facts.mistake() {
            let message = if facts.problem.is_some() {
                "the Sensor receives no events because its spec is invalid; see the condition Accepted"
            } else {
                "no sensor pod is created or updated; an existing one keeps running; see the condition Accepted"
            };
            return self.list.set(type_, false, reason, message);
        }
        if facts.sensor.spec.suspend {
            return self
                .list
                .set(type_, false, SUSPENDED, "the Sensor is stopped: spec.suspend is true");
        }
        if let Some(own) = facts.own {
            return self.own(&own);
        }
        if facts.receivers.is_empty() {
            let message = "no receivers: no Agent matches spec.agentNames or spec.agentSelector";
            return self.list.set(type_, false, "NoReceiver", message);
        }
        if facts.awake().next().is_none() {
            let message = "the Sensor runs in the pods of its receivers, and all receivers are suspended";
            return self.list.set(type_, false, "ReceiversSuspended", message);
        }
        let failing: Vec<_> = facts
            .spoken()
            .filter_map(|speaker| Some((speaker.name, speaker.report.failure.as_ref()?)))
            .collect();
        match failing.as_slice() {
            [] if facts.spoken().next().is_some() => self.list.set(type_, true, LISTENING, "listening for events"),
            [] => self.waiting("waiting for a receiver's pod to report that the Sensor runs"),
            [(agent, failure), rest @ ..] => {
                let more = match rest.len() {
                    0 => String::new(),
                    more => format!(", and in {more} more"),
                };
                let message = format!("in the pod of Agent {agent}{more}: {failure}");
                self.list.set(type_, false, SENSOR_FAILING, message);
            }
        }
    }

    /// `Connected` of a Sensor that has its own pod.
    fn own(&mut self, own: &OwnPod<'_>) {
        let type_ = ConditionType::Connected;
        if let Some(obstacle) = own.obstacle {
            return self.list.set(type_, false, obstacle.reason, obstacle.message.clone());
        }
        let problem = own.pod.filter(|pod| is_problem(pod.reason.as_ref()));
        if let Some(pod) = problem {
            let message = if pod.reason == PodReason::ImagePullFailed {
                "the image of the sensor pod cannot be pulled; see the pod's Events. For a private registry, set \
                 sensor.imagePullSecrets of the chart and create the Secret in this namespace"
                    .to_owned()
            } else {
                format!("sensor pod: {}", pod.message)
            };
            return self.list.set(type_, false, pod.reason.as_ref(), message);
        }
        // Silence overrides the last report, which may be out of date.
        if own.silent {
            return self.silent(own);
        }
        let (facts, spoken) = (self.facts, self.facts.spoken().next());
        match (spoken, own.pod) {
            (Some(speaker), _) => match &speaker.report.failure {
                Some(failure) => self.list.set(type_, false, SENSOR_FAILING, failure.clone()),
                None if facts.receivers.is_empty() => {
                    let message = if facts.sensor.spec.source.webhook.is_some() {
                        "listening for events, but no Agent matches spec.agentNames or spec.agentSelector; deliveries are \
                         refused with 503"
                    } else {
                        "listening for events, but no Agent matches spec.agentNames or spec.agentSelector"
                    };
                    self.list.set(type_, true, LISTENING, message);
                }
                None => self.list.set(type_, true, LISTENING, "listening for events"),
            },
            (None, Some(pod)) if pod.reason == PodReason::Unschedulable => {
                self.waiting(&format!("sensor pod: {}", pod.message));
            }
            (None, _) => self.waiting("waiting for the sensor pod to report that it listens"),
        }
    }

    /// The sensor pod has been silent for too long: whatever it reported before, its current state is unknown.
    fn silent(&mut self, own: &OwnPod<'_>) {
        let type_ = ConditionType::Connected;
        let pod = pod::pod_name(&self.facts.sensor.name_any());
        if own.pod.is_some_and(PodState::ending) {
            let message = format!(
                "pod {pod} is terminating, but its node does not confirm the termination: if the node is permanently lost, delete its \
                 Node object, or taint it with node.kubernetes.io/out-of-service; the pod is then recreated"
            );
            return self.list.set(type_, false, PodReason::NodeLost.as_ref(), message);
        }
        let held = self.list.find(type_).map_or("", |held| held.reason.as_str());
        let runs = own.pod.is_some_and(|pod| pod.reason == PodReason::Running);
        let message = match own.pod {
            Some(_) if runs => format!(
                "pod {pod} has not reported for {} s: check its log and whether its node is ready",
                REPORT_TIMEOUT.as_secs()
            ),
            Some(state) => format!("pod {pod} is not ready: {}; see its Events", state.message),
            None => format!(
                "the sensor pod does not exist; see the Events of StatefulSet {}",
                pod.trim_end_matches("-0")
            ),
        };
        if !runs && held == PodReason::CrashLooping.as_ref() {
            // Between two restarts the pod is not running: keep the reason, or it would flap.
        } else if !runs && ["", STARTING].contains(&held) {
            self.list.set_unknown(type_, STARTING, message);
        } else {
            self.list.set_unknown(type_, SILENT, message);
        }
    }

    /// No pod has reported on this generation yet. A condition from earlier reports stays, with the generation that it
    /// was observed at, since pods come and go and a restart of the controller must not change the status.
    fn waiting(&mut self, message: &str) {
        let type_ = ConditionType::Connected;
        let spoken = [LISTENING, SENSOR_FAILING, PodReason::CrashLooping.as_ref()];
        match self.list.find(type_) {
            Some(held) if spoken.contains(&held.reason.as_str()) => {}
            Some(_) | None => self.list.set_unknown(type_, STARTING, message),
        }
    }

    /// Whether `Connected` was observed at an older generation of the spec.
    fn is_stale(&self) -> bool {
        let held = self.list.find(ConditionType::Connected);
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
            let message = "undelivered events are lost with the sensor pod (spec.storage.ephemeral)";
            self.list.set(type_, false, "EphemeralOutbox", message);
        } else if forgetful.is_empty() {
            let message = "the record of delivered and missed events survives restarts";
            self.list.set(type_, true, "Durable", message);
        } else {
            let message = format!(
                "spec.storage.ephemeral is true for {}: the record of delivered events is lost with the pod, and events that \
                 are missed meanwhile are not delivered later",
                names(&forgetful),
            );
            self.list.set(type_, false, "EphemeralReceiver", message);
        }
    }

    /// The message if a signal is scored and at least one receiver has no light model.
    fn unscored(&self) -> Option<String> {
        let signals = &self.facts.sensor.spec.signals;
        let place = signals.iter().position(|signal| signal.model.is_some())?;
        let without = self.facts.receivers.iter().filter(|receiver| !receiver.facts.scores);
        let without: Vec<String> = without.map(|receiver| receiver.name.clone()).collect();
        (!without.is_empty()).then(|| {
            format!(
                "spec.signals[{place}].model: set spec.lightModel of {}, or remove model; until then the signal is \
                 delivered unscored: the first time as if it were confirmed, afterwards without waking the Agent",
                names(&without)
            )
        })
    }

    fn standing(&mut self) {
        let held = |type_| {
            let held = self.list.find(type_);
            held.map_or_else(Default::default, |held| (held.reason.clone(), held.message.clone()))
        };
        let (accepted, connected) = (held(ConditionType::Accepted), held(ConditionType::Connected));
        let starts = self.facts.own.is_some() && connected.0 == STARTING;
        let stale = self.facts.own.is_some() && self.is_stale();
        // `Stalled` if only a change by the user helps, `Reconciling` if it is retried; the first that applies.
        let (ready, also, (reason, message)) = if self.facts.mistake().is_some() {
            (false, Some(ConditionType::Stalled), accepted)
        } else if connected.0 == NAME_TAKEN {
            (false, Some(ConditionType::Stalled), connected)
        } else if let Some(message) = self.unscored() {
            (false, Some(ConditionType::Stalled), (NO_LIGHT_MODEL.into(), message))
        } else if starts || is_failing(&connected.0) {
            (false, Some(ConditionType::Reconciling), connected)
        } else if stale {
            let message = "waiting for the sensor pod to report on the current generation of the spec";
            (
                false,
                Some(ConditionType::Reconciling),
                (STARTING.into(), message.into()),
            )
        } else {
            (true, None, connected)
        };
        for gone in [ConditionType::Reconciling, ConditionType::Stalled] {
            if also != Some(gone) {
                self.list.remove(gone);
            }
        }
        self.list.set(ConditionType::Ready, ready, &reason, message.clone());
        if let Some(also) = also {
            self.list.set(also, true, &reason, message);
        }
    }
}

/// Whether the source is down for a reason that is retried or needs attention. A streak of these is reported as one
/// Event.
pub(super) fn is_failing(reason: &str) -> bool {
    [SENSOR_FAILING, NAME_TAKEN, REFUSED, SILENT].contains(&reason) || is_problem(reason)
}

/// Whether a pod with this reason does not recover without a change from outside.
fn is_problem(reason: &str) -> bool {
    let problem = [
        PodReason::ImagePullFailed,
        PodReason::CrashLooping,
        PodReason::Evicted,
        PodReason::NodeLost,
    ];
    problem.iter().any(|problem| problem.as_ref() == reason)
}

fn names(all: &[String]) -> String {
    let shown = all.iter().take(MAX_NAMES).cloned().collect::<Vec<_>>().join(", ");
    match all.len().saturating_sub(MAX_NAMES) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}
