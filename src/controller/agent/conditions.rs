//! Computes the conditions of an Agent. Pure.
//!
//! `Ready` states whether the Agent needs intervention. `Reconciling` and `Stalled` exist only while True. The condition of a
//! limit is absent until the limit first applies, and stays from then on, False while it does not apply. All others are
//! written on the first visit and stay.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;
use strum::IntoEnumIterator;

use super::apply::PodObstacle;
use super::gateway_loop_detection;
use super::goal_conditions as goal;
use super::intent::{Intent, RestReason};
use super::requests;
use super::status::AgentStatusInput;
use super::validate::plain_http_secrets;
use crate::api::AGENT_LABEL;
use crate::api::condition::ConditionType;
use crate::api::failure::{FailureKind, ModelEvidence};
use crate::api::pause::PauseEnd;
use crate::api::status::{Gate, LoopOutcome, LoopState, LoopStatus, PauseReason};
use crate::controller::plain_http::plain_http_warning;
use crate::controller::runtime::condition_list::ConditionList;
use crate::controller::runtime::pod_state::PodReason;
use crate::link::gate_annotations;
use crate::link::messages::LoopReport;
use crate::support::clock::rfc3339_seconds;

/// Reason of `ModelAvailable=Unknown`.
const NOT_CALLED: &str = "NotCalledYet";
/// Reason of `Ready` while nothing pauses the loop; identical while running and sleeping, so that a short sleep causes
/// no status write.
const LOOP_RUNNING: &str = "LoopRunning";
/// Reason of `Ready` while a budget limit pauses the loop until a known time.
const PAUSED_BY_BUDGET: &str = "PausedByBudget";
/// Reason of `Ready` while the loop waits for a person's approval.
const AWAITING_APPROVAL: &str = "AwaitingApproval";

const EPHEMERAL: &str = "Ephemeral";
const IDLE_TIMEOUT: &str = "IdleTimeout";

/// Message of `Ready` until the first report of the loop; the same before and after the pod is up, so that it causes no
/// extra write.
const STARTING: &str = "the pod and its loop are starting; see PodReady for the state of the pod";

/// The conditions of limits that a worker reports as pause reasons, in the order in which `Ready` names them. Which reason
/// raises which condition is among [`PauseReason::facts`].
const GUARDRAILS: [ConditionType; 7] = [
    ConditionType::BudgetExhausted,
    ConditionType::ApprovalPending,
    ConditionType::ErrorLimitReached,
    ConditionType::ToolFailureLimitReached,
    ConditionType::TurnLimitReached,
    ConditionType::RateLimited,
    ConditionType::OutsideActiveHours,
];

pub(super) fn compute(facts: &AgentStatusInput<'_>, status: &LoopStatus) -> Vec<Condition> {
    let mut conditions = AgentConditions {
        facts,
        list: ConditionList::new(&facts.old.conditions, facts.agent.metadata.generation, facts.now),
    };
    conditions.accepted();
    conditions.pod_ready();
    conditions.durable();
    conditions.suspended();
    conditions.guardrails();
    conditions.idle(status);
    conditions.loop_detected();
    goal::set(&mut conditions, status);
    conditions.link();
    conditions.model();
    conditions.light_model();
    conditions.sensors();
    conditions.standing(status);
    conditions.list.into_conditions()
}

/// The state of an Agent, as the three conditions `Ready`, `Reconciling` and `Stalled` express it for kstatus.
enum AgentReadiness {
    /// `Ready=True`: no intervention is needed.
    Ready(ReasonMessage),
    /// `Ready=True` and `Reconciling=True`: no intervention is needed, and a change is still in progress.
    Settling(ReasonMessage),
    /// `Ready=False` and `Reconciling=True`: the controller retries or waits.
    Reconciling(ReasonMessage),
    /// `Stalled=True`: the Agent needs intervention.
    Stalled(ReasonMessage),
}

struct ReasonMessage {
    reason: String,
    message: String,
}

fn reason_message(reason: &str, message: impl Into<String>) -> ReasonMessage {
    ReasonMessage {
        reason: reason.into(),
        message: message.into(),
    }
}

pub(super) struct AgentConditions<'a> {
    pub(super) facts: &'a AgentStatusInput<'a>,
    pub(super) list: ConditionList,
}

impl AgentConditions<'_> {
    fn holds(&self, type_: ConditionType) -> Option<&Condition> {
        self.list.find(type_).filter(|condition| condition.status == "True")
    }

    fn accepted(&mut self) {
        match self.facts.verdict {
            Err(invalid) => self.list.set(
                ConditionType::Accepted,
                false,
                invalid.reason.as_ref(),
                invalid.message.clone(),
            ),
            // The references of a stopped Agent are not read, so the previous verdict is kept.
            Ok(())
                if !self.facts.looked
                    && self.facts.rest().is_some()
                    && self.list.find(ConditionType::Accepted).is_some() =>
            {
                self.list.keep(ConditionType::Accepted);
            }
            Ok(()) => self.list.set(ConditionType::Accepted, true, "Accepted", self.usable()),
        }
    }

    /// The message of `Accepted=True`, with a warning for a field that has no effect and for a secret that is sent in
    /// clear text.
    fn usable(&self) -> String {
        let spec = &self.facts.agent.spec;
        let asked = spec.continuous.pre_check.as_ref().is_some_and(|check| check.enabled);
        let but = if asked && spec.light_model.is_none() {
            "; spec.continuous.preCheck has no effect because spec.lightModel is not set; turns run without a pre-check"
        } else {
            ""
        };
        let open = plain_http_secrets(spec).map(|(field, secret)| plain_http_warning(&field, "http", secret));
        format!("the spec and its references are valid{but}{}", open.collect::<String>())
    }

    fn pod_ready(&mut self) {
        let (reason, message) = match (self.facts.obstacle, self.facts.pod) {
            (Some(PodObstacle::NodeLost(node)), _) => (PodReason::NodeLost, self.node_lost(node)),
            (Some(PodObstacle::Refused(message)), _) => (
                PodReason::Absent,
                format!("the API server rejected the pod or its volume claim: {message}"),
            ),
            (Some(PodObstacle::SharedTaken(message)), _) => (PodReason::Absent, message.clone()),
            (Some(PodObstacle::Foreign), _) => (
                PodReason::Absent,
                "a pod with this name exists and is not owned by this Agent: delete the pod, or recreate the Agent \
                 under another name"
                    .into(),
            ),
            (Some(PodObstacle::ClaimEnding(name)), _) => (
                PodReason::ClaimEnding,
                format!(
                    "volume claim {name} belongs to an earlier Agent of this name and is being deleted; the pod is \
                     created with a new claim after the deletion"
                ),
            ),
            (Some(PodObstacle::ClaimForeign(name)), _) => (
                PodReason::ClaimForeign,
                format!(
                    "volume claim {name} exists and does not belong to this Agent: delete the claim, or create the Agent \
                     under another name; with spec.storage.retentionPolicy Retain, an Agent resumes from a claim without \
                     owner that has the label {AGENT_LABEL} with its name"
                ),
            ),
            (None, Some(pod)) => (pod.reason, pod.message.clone()),
            (None, None) => (PodReason::Absent, "the pod does not exist".into()),
        };
        let ready = reason == PodReason::Running;
        self.list.set(ConditionType::PodReady, ready, reason.as_ref(), message);
    }

    /// Set only for an Agent with ephemeral storage; any other Agent does not have this condition.
    fn durable(&mut self) {
        if self.facts.agent.spec.storage.ephemeral {
            let message = "spec.storage.ephemeral is true: the journal of the loop is lost with its pod, and the next \
                 pod starts with an empty journal";
            self.list.set(ConditionType::Durable, false, EPHEMERAL, message);
        }
    }

    fn node_lost(&self, node: &str) -> String {
        let pod = self.facts.pod.map_or("", |pod| pod.name.as_str());
        let namespace = self.facts.agent.metadata.namespace.as_deref().unwrap_or_default();
        format!(
            "node {node} is unreachable, so the old pod may still be running and no replacement is started. After \
             verifying that the node is shut down, run: kubectl taint nodes {node} \
             node.kubernetes.io/out-of-service=nodeshutdown:NoExecute, or kubectl delete pod -n {namespace} {pod} \
             --force --grace-period=0"
        )
    }

    fn suspended(&mut self) {
        if self.facts.agent.spec.suspend {
            let reason = PauseReason::SuspendedBySpec.as_ref();
            self.list.set(
                ConditionType::Suspended,
                true,
                reason,
                "set spec.suspend to false to resume",
            );
        } else {
            self.list.clear(ConditionType::Suspended);
        }
    }

    /// Copies the guardrails from the worker's report; without a report, keeps the conditions.
    fn guardrails(&mut self) {
        let Some(report) = self.facts.report() else {
            for type_ in GUARDRAILS {
                self.list.keep(type_);
            }
            return;
        };
        for type_ in GUARDRAILS {
            // The reasons of one condition exclude each other.
            let mut held = report.reasons.iter();
            match held.find(|held| held.reason.facts().condition == Some(type_)) {
                Some(held) => {
                    let is_asked = held.reason.facts().end == PauseEnd::Answer;
                    let ends = if is_asked {
                        "denied unless answered by"
                    } else {
                        "resumes at"
                    };
                    let until = held.until.map(|until| format!("; {ends} {}", rfc3339_seconds(until)));
                    // Several gates can be open. The first one of this kind is not always the one that holds the loop.
                    let is_named = |gate: &&Gate| held.message.ends_with(&format!("(gate {})", gate.id));
                    let gate = report.gates.iter().find(is_named).or(report.gates.first());
                    let answer = self.how_to_answer(report, gate.filter(|_| type_ == ConditionType::ApprovalPending));
                    let message = format!("{}{}{answer}", held.message, until.unwrap_or_default());
                    self.list.set(type_, true, held.reason.as_ref(), message);
                }
                None => match report.gates.first().filter(|_| type_ == ConditionType::ApprovalPending) {
                    // Its run is not the next one yet, or it is for definitions.
                    Some(gate) => {
                        let message = requests::gate_message(gate);
                        let answer = self.how_to_answer(report, Some(gate));
                        self.list
                            .set(type_, true, gate.kind.as_ref(), format!("{message}{answer}"));
                    }
                    None => self.list.clear(type_),
                },
            }
        }
    }

    /// How to answer this gate, and that there are others.
    fn how_to_answer(&self, report: &LoopReport, gate: Option<&Gate>) -> String {
        let Some(gate) = gate else {
            return String::new();
        };
        let agent = self.facts.agent;
        let (namespace, name) = (agent.namespace().unwrap_or_default(), agent.name_any());
        let (id, hash) = (gate.id.as_str(), gate.arguments_hash.as_str());
        let commands = gate_annotations::commands("agents.agentloop.dev", (&namespace, &name), (id, hash));
        let others = match report.gates.len() - 1 {
            0 => String::new(),
            1 => "; 1 more gate is in status.gates".to_owned(),
            others => format!("; {others} more gates are in status.gates"),
        };
        format!(". To approve gate {id}: {commands}{others}")
    }

    /// Derived from the recorded outcome, so that the condition outlives the pod and its report.
    fn idle(&mut self, status: &LoopStatus) {
        let type_ = ConditionType::IdleTimeoutReached;
        if status.outcome == Some(LoopOutcome::Idle) {
            let message = format!(
                "the loop was stopped after {} s (guardrails.idleTimeoutSeconds) awake without an effective action; \
                 change the spec or set the annotation agentloop.dev/wake to restart it",
                self.facts.agent.spec.guardrails.idle_timeout_seconds
            );
            self.list.set(type_, true, IDLE_TIMEOUT, message);
        } else {
            self.list.clear(type_);
        }
    }

    /// A finding of the gateway takes precedence over the worker's report. Without a report, a loop that the worker
    /// detected stays, and an earlier finding of the gateway is cleared, since `finding` would still contain it if it
    /// held.
    fn loop_detected(&mut self) {
        let type_ = ConditionType::LoopDetected;
        if let Some(found) = self.facts.finding {
            self.list.set(type_, true, found.sign.as_ref(), found.message.clone());
            return;
        }
        match self.facts.report().map(|report| &report.detected) {
            Some(Some(detected)) => self
                .list
                .set(type_, true, detected.sign.as_ref(), detected.message.clone()),
            None if !self.holds(type_).is_some_and(gateway_loop_detection::is_from_gateway) => self.list.keep(type_),
            Some(None) | None => self.list.clear(type_),
        }
    }

    fn link(&mut self) {
        let type_ = ConditionType::LinkLost;
        let reported = self
            .facts
            .report()
            .is_some_and(|report| report.reasons.iter().any(|held| held.reason == PauseReason::LinkLost));
        if self.facts.silent || reported {
            let message = "no contact between the pod and the controller for 60 s; the loop is paused until the \
                 contact is restored. Check that network policies allow the pod to reach the controller's link \
                 Service";
            self.list.set(type_, true, PauseReason::LinkLost.as_ref(), message);
        } else if self.facts.last_report.is_some() || !self.facts.same_pod() {
            self.list.clear(type_);
        } else {
            self.list.keep(type_);
        }
    }

    fn model(&mut self) {
        let type_ = ConditionType::ModelAvailable;
        let report = self.facts.last_report.and_then(|last| last.report.model.as_ref());
        let kind = report
            .and_then(|report| report.failure)
            .filter(|kind| concerns_model(*kind));
        if let Some((reason, message)) = self.waits_for_model() {
            self.list.set(type_, false, kind.map_or(reason, Into::into), message);
            return;
        }
        match report.map(|report| (report.failure, report)) {
            Some((None, _)) => self.list.set(type_, true, "Reachable", "the last model call succeeded"),
            Some((Some(kind), report)) if concerns_model(kind) => {
                self.list.set(type_, false, kind.as_ref(), report.message.clone());
            }
            // No report, or a failure that says nothing about the model: keep the last known state.
            Some((Some(_), _)) | None if self.list.find(type_).is_some() => self.list.keep(type_),
            Some((Some(_), _)) | None => {
                self.list.set_unknown(type_, NOT_CALLED, "no call has been made yet");
            }
        }
    }

    /// What the worker reports; without a report it stays as it was.
    fn light_model(&mut self) {
        let type_ = ConditionType::LightModelAvailable;
        if self.facts.agent.spec.light_model.is_none() {
            self.list.remove(type_);
        } else if let Some(report) = self.facts.report() {
            match report.light_model.as_ref().map(|light| (light.failure, light)) {
                Some((Some(kind), light)) => {
                    let message = format!(
                        "spec.lightModel: {}. The loop continues: turns run without a pre-check and signals have no score. A \
                         call is tried at most once a minute; the annotation agentloop.dev/resume allows it at once",
                        light.message
                    );
                    self.list.set(type_, false, kind.as_ref(), message);
                }
                Some((None, _)) | None => self.list.remove(type_),
            }
        } else if self.list.find(type_).is_some() {
            self.list.keep(type_);
        }
    }

    /// The loop waits until its model can be used: the reason and the message of `ModelAvailable`, where the gateway, which
    /// forgets with its process, says nothing.
    fn waits_for_model(&self) -> Option<(&'static str, String)> {
        let reasons = &self.facts.report()?.reasons;
        let waits = |kind: FailureKind| {
            let reason = kind.retried_under()?;
            let held = reasons.iter().find(|held| held.reason == reason)?;
            (reason.facts().condition == Some(ConditionType::ModelAvailable))
                .then(|| (kind.into(), held.message.clone()))
        };
        FailureKind::iter().find_map(waits)
    }

    /// Combines the reports of the Sensors that run in this pod with the problems of Sensors that have their own pod.
    /// If either is unknown, keeps the condition, or leaves it absent if it was never set.
    fn sensors(&mut self) {
        let type_ = ConditionType::SensorsHealthy;
        let (Some(report), Some(problems)) = (self.facts.report(), self.facts.sensor_problems) else {
            if self.list.find(type_).is_some() {
                self.list.keep(type_);
            }
            return;
        };
        let names = self.facts.sensors;
        let here = report
            .sensors
            .iter()
            .filter_map(|report| Some((names.get(&report.uid)?, report.failure.as_ref()?)));
        let own = problems.iter().map(|(name, problem)| (name, problem));
        let failing: Vec<String> = here
            .chain(own)
            .map(|(name, failure)| format!("Sensor {name}: {failure}"))
            .collect();
        match failing.as_slice() {
            [] => self
                .list
                .set(type_, true, "Healthy", "all Sensors of this Agent are healthy"),
            [one] => self.list.set(type_, false, "SensorFailing", one.clone()),
            [first, more @ ..] => {
                let message = format!("{first} (1 of {} failing Sensors)", more.len() + 1);
                self.list.set(type_, false, "SensorFailing", message);
            }
        }
    }

    fn standing(&mut self, status: &LoopStatus) {
        let (ready, also, cause) = match self.find_readiness(status) {
            AgentReadiness::Ready(cause) => (true, None, cause),
            AgentReadiness::Settling(cause) => (true, Some(ConditionType::Reconciling), cause),
            AgentReadiness::Reconciling(cause) => (false, Some(ConditionType::Reconciling), cause),
            AgentReadiness::Stalled(cause) => (false, Some(ConditionType::Stalled), cause),
        };
        for type_ in [ConditionType::Reconciling, ConditionType::Stalled] {
            if also != Some(type_) {
                self.list.remove(type_);
            }
        }
        self.list
            .set(ConditionType::Ready, ready, &cause.reason, cause.message.clone());
        if let Some(also) = also {
            self.list.move_to_end(also);
            self.list.set(also, true, &cause.reason, cause.message);
        }
    }

    fn find_readiness(&self, status: &LoopStatus) -> AgentReadiness {
        let facts = self.facts;
        let pod_ready = self.list.find(ConditionType::PodReady);
        let pod_message = || pod_ready.map_or_else(String::new, |condition| condition.message.clone());
        // In order of precedence: what the user must correct, what prevents the pod, a wanted rest, the pod, the loop.
        if let Err(invalid) = facts.verdict {
            return AgentReadiness::Stalled(reason_message(invalid.reason.as_ref(), invalid.message.clone()));
        }
        match facts.obstacle {
            Some(PodObstacle::NodeLost(_)) => {
                return AgentReadiness::Stalled(reason_message("NodeLost", pod_message()));
            }
            Some(PodObstacle::Foreign) => {
                return AgentReadiness::Stalled(reason_message("PodNameTaken", pod_message()));
            }
            Some(PodObstacle::SharedTaken(_)) => {
                return AgentReadiness::Stalled(reason_message("NameTaken", pod_message()));
            }
            Some(PodObstacle::Refused(_)) => {
                return AgentReadiness::Reconciling(reason_message("PodRefused", pod_message()));
            }
            Some(PodObstacle::ClaimEnding(_)) => {
                return AgentReadiness::Reconciling(reason_message(PodReason::ClaimEnding.as_ref(), pod_message()));
            }
            Some(PodObstacle::ClaimForeign(_)) => {
                return AgentReadiness::Stalled(reason_message(PodReason::ClaimForeign.as_ref(), pod_message()));
            }
            None => {}
        }
        match (facts.rest(), facts.pod) {
            (Some(RestReason::Suspended), None) => {
                let reason = PauseReason::SuspendedBySpec.as_ref();
                return AgentReadiness::Ready(reason_message(reason, "suspended by spec.suspend; the state is kept"));
            }
            (Some(RestReason::Suspended), Some(_)) => {
                let reason = PauseReason::SuspendedBySpec.as_ref();
                return AgentReadiness::Settling(reason_message(
                    reason,
                    "the loop is stopping because spec.suspend is true",
                ));
            }
            // An idle timeout and a yield to the end are regular outcomes; only a detected loop and a goal that was not
            // reached leave a failed Agent.
            (Some(RestReason::Completed), _) => {
                if let Some(idle) = self.holds(ConditionType::IdleTimeoutReached) {
                    return AgentReadiness::Ready(reason_message(&idle.type_, idle.message.clone()));
                }
                if let Some(outcome @ (LoopOutcome::Failed | LoopOutcome::Escalated)) = status.outcome {
                    let succeeded = self.list.find(ConditionType::Succeeded);
                    let held = succeeded.or_else(|| self.holds(ConditionType::LoopDetected));
                    let message = held.map_or(goal::ENDED_WITHOUT_SUCCESS, |held| held.message.as_str());
                    return AgentReadiness::Stalled(reason_message(outcome.as_ref(), message));
                }
                if status.outcome == Some(LoopOutcome::ScaledToZero) {
                    let message =
                        "the agent had no task for spec.task.idlePodSeconds and has no pod; the next task starts it";
                    return AgentReadiness::Ready(reason_message(LoopOutcome::ScaledToZero.as_ref(), message));
                }
                if status.outcome == Some(LoopOutcome::Cancelled) {
                    let message = "a user stopped the loop (annotation agentloop.dev/stop); change the spec or set the \
                                   annotation agentloop.dev/wake to start it again";
                    return AgentReadiness::Ready(reason_message(LoopOutcome::Cancelled.as_ref(), message));
                }
                let message =
                    "the agent ended its loop; change the spec or set the annotation agentloop.dev/wake to restart it";
                return AgentReadiness::Ready(reason_message("Completed", message));
            }
            (None, _) => {}
        }
        if facts.replacing() {
            return AgentReadiness::Reconciling(reason_message(
                "Replacing",
                "the old pod is terminating; a new pod is created afterwards",
            ));
        }
        let Some(pod) = facts.pod else {
            return AgentReadiness::Reconciling(reason_message("Starting", "the pod is about to be created"));
        };
        let troubled = ![PodReason::Starting, PodReason::Running].contains(&pod.reason);
        if troubled {
            return AgentReadiness::Reconciling(reason_message(pod.reason.as_ref(), pod_message()));
        }
        if status.state == LoopState::Starting {
            return AgentReadiness::Reconciling(reason_message("Starting", STARTING));
        }
        self.loop_readiness(facts.intent, status)
    }

    /// The pod is running and its loop has reported. The order of the checks is the precedence of the reasons: link,
    /// model, detected loop, budget, approval, other guardrails, pending update.
    fn loop_readiness(&self, intent: Intent, status: &LoopStatus) -> AgentReadiness {
        if let Some(lost) = self.holds(ConditionType::LinkLost) {
            return AgentReadiness::Reconciling(reason_message(&lost.reason, lost.message.clone()));
        }
        let model = self.list.find(ConditionType::ModelAvailable);
        if let Some(model) = model.filter(|model| model.status == "False") {
            let word = reason_message(&model.reason, model.message.clone());
            let kind = FailureKind::iter().find(|kind| kind.as_ref() == model.reason);
            return if kind.is_some_and(|kind| kind.facts().needs_user) {
                AgentReadiness::Stalled(word)
            } else {
                AgentReadiness::Reconciling(word)
            };
        }
        if let Some(found) = self.facts.finding.filter(|found| found.blocks(self.facts.agent)) {
            return AgentReadiness::Stalled(reason_message(
                ConditionType::LoopDetected.as_ref(),
                found.message.clone(),
            ));
        }
        if let Some(light) = self.list.find(ConditionType::LightModelAvailable) {
            return AgentReadiness::Stalled(reason_message(&light.reason, light.message.clone()));
        }
        if let Some(spent) = self.holds(ConditionType::BudgetExhausted) {
            // Without a time at which it resumes, intervention is needed: a lifetime limit, a stop, or a call that can
            // never fit.
            return if status.resumes_at.is_some() {
                AgentReadiness::Ready(reason_message(PAUSED_BY_BUDGET, spent.message.clone()))
            } else {
                AgentReadiness::Stalled(reason_message(&spent.reason, spent.message.clone()))
            };
        }
        // A gate beside which the loop continues has a condition of its own.
        let pauses = |asked: &&Condition| status.reasons.iter().any(|reason| reason.as_ref() == asked.reason);
        if let Some(asked) = self.holds(ConditionType::ApprovalPending).filter(pauses) {
            return AgentReadiness::Ready(reason_message(AWAITING_APPROVAL, asked.message.clone()));
        }
        let guardrails = GUARDRAILS
            .into_iter()
            .filter(|type_| *type_ != ConditionType::ApprovalPending);
        if let Some(held) = guardrails.into_iter().find_map(|type_| self.holds(type_)) {
            return AgentReadiness::Ready(reason_message(&held.type_, held.message.clone()));
        }
        let asleep = status.reasons.contains(&PauseReason::LoopDetected) && status.resumes_at.is_some();
        if let Some(held) = self.holds(ConditionType::LoopDetected).filter(|_| asleep) {
            return AgentReadiness::Ready(reason_message(&held.type_, held.message.clone()));
        }
        if matches!(intent, Intent::KeepOutdated(true)) {
            let message = "the loop still runs the old spec; the new spec is applied when the loop is idle";
            return AgentReadiness::Settling(reason_message("UpdatePending", message));
        }
        AgentReadiness::Ready(reason_message(LOOP_RUNNING, "the loop is running"))
    }
}

/// Whether the model cannot be used after such a failure.
fn concerns_model(kind: FailureKind) -> bool {
    kind.facts().model == ModelEvidence::Unusable
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_condition_of_every_pause_reason_is_written() {
        let own_rule = [
            ConditionType::Suspended,
            ConditionType::LinkLost,
            ConditionType::LoopDetected,
            ConditionType::ModelAvailable,
        ];
        let written: BTreeSet<_> = GUARDRAILS.into_iter().chain(own_rule).collect();
        let named: BTreeSet<_> = PauseReason::iter()
            .filter_map(|reason| reason.facts().condition)
            .collect();
        assert_eq!(named, written);
    }
}
