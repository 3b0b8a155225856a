//! The conditions of an Agent (API.md, table «Conditions»). Pure.
//!
//! `Ready` answers whether the Agent needs anyone. `Reconciling` and `Stalled` exist only while True; all others are
//! written on the first visit and stay, False when they do not hold.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::apply::PodObstacle;
use super::gateway_loop_detection;
use super::intent::{Intent, RestReason};
use super::pod_state::PodReason;
use super::status::AgentStatusInput;
use super::validate::plain_http_secrets;
use crate::api::condition::{self, ConditionType};
use crate::api::failure::FailureKind;
use crate::api::status::{LoopOutcome, LoopState, LoopStatus, PauseReason};

/// Reason of a guardrail that does not hold.
const INACTIVE: &str = "Inactive";
/// Reason of `ModelAvailable=Unknown`.
const NOT_CALLED: &str = "NotCalledYet";
/// Reason of `Ready` while nothing holds the loop; the same awake and asleep, so that a nap is no news.
const LOOP_RUNNING: &str = "LoopRunning";
/// Reason of `Ready` while a limit holds the loop until a known moment.
const PAUSED_BY_BUDGET: &str = "PausedByBudget";
/// Reason of `Ready` while a person has been asked.
const AWAITING_APPROVAL: &str = "AwaitingApproval";

/// Reason of `Durable=False`.
const EPHEMERAL: &str = "Ephemeral";
/// Reason of `IdleTimeoutReached`.
const IDLE_TIMEOUT: &str = "IdleTimeout";

/// Message of `Ready` until the loop has spoken; the same before and after the pod is up.
const STARTING: &str = "the pod and its loop are starting; PodReady says how far the pod is";

/// The guardrails that a worker reports, and the reasons that raise each.
const GUARDRAILS: [(ConditionType, &[PauseReason]); 6] = [
    (
        ConditionType::BudgetExhausted,
        &[
            PauseReason::CallExceedsLimit,
            PauseReason::TotalTokens,
            PauseReason::TotalCost,
            PauseReason::BudgetExhausted,
            PauseReason::TokensPerHour,
        ],
    ),
    (ConditionType::ApprovalPending, &[PauseReason::BudgetAsk]),
    (
        ConditionType::ErrorLimitReached,
        &[
            PauseReason::ConsecutiveErrors,
            PauseReason::CrashLoop,
            PauseReason::ModelRefused,
        ],
    ),
    (ConditionType::TurnLimitReached, &[PauseReason::MaxConsecutiveTurns]),
    (
        ConditionType::RateLimited,
        &[
            PauseReason::ActionsPerMinute,
            PauseReason::RateWindow,
            PauseReason::ProviderRateLimit,
        ],
    ),
    (ConditionType::OutsideActiveHours, &[PauseReason::OutsideActiveHours]),
];

/// All conditions.
pub(super) fn compute(facts: &AgentStatusInput<'_>, status: &LoopStatus) -> Vec<Condition> {
    let mut list = AgentConditions {
        facts,
        conditions: facts.old.conditions.clone(),
    };
    list.accepted();
    list.pod_ready();
    list.durable();
    list.suspended();
    list.guardrails();
    list.idle(status);
    list.loop_detected();
    list.link();
    list.model();
    list.sensors();
    list.standing(status);
    list.conditions
}

/// Where an Agent stands, for the three conditions of kstatus.
enum AgentReadiness {
    /// Nobody is needed.
    Ready(ReasonMessage),
    /// Nobody is needed, and something is still under way.
    Settling(ReasonMessage),
    /// It is being worked on.
    Reconciling(ReasonMessage),
    /// A person must act.
    Stalled(ReasonMessage),
}

/// Reason and message.
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

struct AgentConditions<'a> {
    facts: &'a AgentStatusInput<'a>,
    conditions: Vec<Condition>,
}

impl AgentConditions<'_> {
    fn set(&mut self, type_: ConditionType, status: bool, reason: &str, message: impl Into<String>) {
        let generation = self.facts.agent.metadata.generation;
        let new = condition::condition(type_, status, reason, message, generation, self.facts.now);
        condition::set(&mut self.conditions, new);
    }

    /// Leaves what a condition says, or says for the first time that it does not hold.
    fn keep(&mut self, type_: ConditionType) {
        match self.conditions.iter_mut().find(|old| old.type_ == type_.as_ref()) {
            Some(old) => old.observed_generation = self.facts.agent.metadata.generation,
            None => self.set(type_, false, INACTIVE, ""),
        }
    }

    fn holds(&self, type_: ConditionType) -> Option<&Condition> {
        condition::find(&self.conditions, type_).filter(|condition| condition.status == "True")
    }

    fn accepted(&mut self) {
        match self.facts.verdict {
            Err(invalid) => self.set(
                ConditionType::Accepted,
                false,
                invalid.reason.as_ref(),
                invalid.message.clone(),
            ),
            // A stopped Agent's references are not looked at: what was said of them stands.
            Ok(())
                if !self.facts.looked
                    && self.facts.rest().is_some()
                    && condition::find(&self.conditions, ConditionType::Accepted).is_some() =>
            {
                self.keep(ConditionType::Accepted);
            }
            Ok(()) => self.set(ConditionType::Accepted, true, "Accepted", self.usable()),
        }
    }

    /// Says so where a field has no effect, or a secret is open to the network.
    fn usable(&self) -> String {
        let spec = &self.facts.agent.spec;
        let asked = spec.continuous.pre_check.as_ref().is_some_and(|check| check.enabled);
        let but = if asked && spec.light_model.is_none() {
            "; spec.continuous.preCheck has no effect, each turn runs without it: it needs spec.lightModel"
        } else {
            ""
        };
        let open = plain_http_secrets(spec).map(|(field, secret)| {
            format!("; {field} begins with http://, so what Secret {secret} holds crosses the network in clear text: use https://")
        });
        format!(
            "the spec and all it refers to are usable{but}{}",
            open.collect::<String>()
        )
    }

    fn pod_ready(&mut self) {
        let (reason, message) = match (self.facts.obstacle, self.facts.pod) {
            (Some(PodObstacle::NodeLost(node)), _) => (PodReason::NodeLost, self.node_lost(node)),
            (Some(PodObstacle::Refused(message)), _) => (
                PodReason::Absent,
                format!("the API server refuses the pod or its volume claim: {message}"),
            ),
            (Some(PodObstacle::SharedTaken(message)), _) => (PodReason::Absent, message.clone()),
            (Some(PodObstacle::Foreign), _) => (
                PodReason::Absent,
                "a pod of this name exists and belongs to something else: delete it, or make the Agent under another name"
                    .into(),
            ),
            (Some(PodObstacle::ClaimEnding(name)), _) => (
                PodReason::ClaimEnding,
                format!(
                    "volume claim {name} belongs to an earlier Agent of this name and is being deleted; the pod is made \
                     with a new claim once it is gone"
                ),
            ),
            (Some(PodObstacle::ClaimForeign(name)), _) => (
                PodReason::ClaimForeign,
                format!(
                    "volume claim {name} exists and does not belong to this Agent: delete the claim, or make the Agent \
                     under another name; with spec.storage.retentionPolicy Retain, an Agent takes up a claim without owner"
                ),
            ),
            (None, Some(pod)) => (pod.reason, pod.message.clone()),
            (None, None) => (PodReason::Absent, "there is no pod".into()),
        };
        let ready = reason == PodReason::Running;
        self.set(ConditionType::PodReady, ready, reason.as_ref(), message);
    }

    /// Said only of an Agent whose state is lost with its pod.
    fn durable(&mut self) {
        if self.facts.agent.spec.storage.ephemeral {
            let message = "spec.storage.ephemeral is true: the journal of the loop is lost when its pod goes, and the next pod \
                           starts with an empty one";
            self.set(ConditionType::Durable, false, EPHEMERAL, message);
        }
    }

    fn node_lost(&self, node: &str) -> String {
        let pod = self.facts.pod.map_or("", |pod| pod.name.as_str());
        let namespace = self.facts.agent.metadata.namespace.as_deref().unwrap_or_default();
        format!(
            "node {node} does not answer, so the old pod may still act and no second one is started. When the node is \
             surely off: kubectl taint nodes {node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute, or \
             kubectl delete pod -n {namespace} {pod} --force --grace-period=0"
        )
    }

    fn suspended(&mut self) {
        if self.facts.agent.spec.suspend {
            let reason = PauseReason::SuspendedBySpec.as_ref();
            self.set(
                ConditionType::Suspended,
                true,
                reason,
                "set spec.suspend to false to go on",
            );
        } else {
            self.set(ConditionType::Suspended, false, INACTIVE, "");
        }
    }

    /// Each guardrail is what the worker says; without its word it stays as it was.
    fn guardrails(&mut self) {
        let Some(report) = self.facts.report() else {
            for (type_, _) in GUARDRAILS {
                self.keep(type_);
            }
            return;
        };
        for (type_, reasons) in GUARDRAILS {
            let held = reasons
                .iter()
                .find_map(|reason| report.reasons.iter().find(|held| held.reason == *reason));
            match held {
                Some(held) => {
                    let until = held.until.map(|until| format!("; goes on at {}", seconds(until)));
                    let message = format!("{}{}", held.message, until.unwrap_or_default());
                    self.set(type_, true, held.reason.as_ref(), message);
                }
                None => self.set(type_, false, INACTIVE, ""),
            }
        }
    }

    /// The loop has ended, so the status knows it, whoever speaks.
    fn idle(&mut self, status: &LoopStatus) {
        let type_ = ConditionType::IdleTimeoutReached;
        if status.outcome == Some(LoopOutcome::Idle) {
            let message = format!(
                "the loop was awake for {} s (guardrails.idleTimeoutSeconds) without an effective action and was ended; \
                 a changed spec or the annotation agentloop.dev/wake starts it again",
                self.facts.agent.spec.guardrails.idle_timeout_seconds
            );
            self.set(type_, true, IDLE_TIMEOUT, message);
        } else {
            self.set(type_, false, INACTIVE, "");
        }
    }

    /// What is seen from outside comes first; else it is what the worker says, and without its word it stays as it was.
    fn loop_detected(&mut self) {
        let type_ = ConditionType::LoopDetected;
        if let Some(found) = self.facts.finding {
            self.set(type_, true, found.sign.as_ref(), found.message.clone());
            return;
        }
        match self.facts.report().map(|report| &report.detected) {
            Some(Some(detected)) => self.set(type_, true, detected.sign.as_ref(), detected.message.clone()),
            None if !self.holds(type_).is_some_and(gateway_loop_detection::is_from_gateway) => self.keep(type_),
            Some(None) | None => self.set(type_, false, INACTIVE, ""),
        }
    }

    fn link(&mut self) {
        let type_ = ConditionType::LinkLost;
        let reported = self
            .facts
            .report()
            .is_some_and(|report| report.reasons.iter().any(|held| held.reason == PauseReason::LinkLost));
        if self.facts.silent || reported {
            let message = "no contact between the pod and the controller for 60 s; the loop does nothing until it is \
                           back. Check that the network lets the pod reach the controller's link Service";
            self.set(type_, true, PauseReason::LinkLost.as_ref(), message);
        } else if self.facts.heard.is_some() || !self.facts.same_pod() {
            self.set(type_, false, INACTIVE, "");
        } else {
            self.keep(type_);
        }
    }

    fn model(&mut self) {
        let type_ = ConditionType::ModelAvailable;
        let report = self.facts.heard.and_then(|heard| heard.report.model.as_ref());
        let kind = report
            .and_then(|report| report.failure)
            .filter(|kind| concerns_model(*kind));
        if let Some((reason, message)) = self.waits_for_model() {
            self.set(type_, false, kind.map_or(reason, Into::into), message);
            return;
        }
        match report.map(|report| (report.failure, report)) {
            Some((None, _)) => self.set(type_, true, "Reachable", "the model answers"),
            Some((Some(kind), report)) if concerns_model(kind) => {
                self.set(type_, false, kind.as_ref(), report.message.clone());
            }
            Some((Some(_), _)) | None if condition::find(&self.conditions, type_).is_some() => self.keep(type_),
            Some((Some(_), _)) | None => {
                self.set(type_, false, NOT_CALLED, "no call has been made yet");
                if let Some(unknown) = self.conditions.last_mut() {
                    unknown.status = "Unknown".into();
                }
            }
        }
    }

    /// The loop waits until its model can be used: the reason and the message of `ModelAvailable`, where the gateway, which
    /// forgets with its process, says nothing.
    fn waits_for_model(&self) -> Option<(&'static str, String)> {
        let kinds = [
            (PauseReason::AuthenticationFailed, FailureKind::AuthenticationFailed),
            (PauseReason::QuotaExceeded, FailureKind::QuotaExceeded),
            (PauseReason::ModelUnreachable, FailureKind::Unreachable),
        ];
        let reasons = &self.facts.report()?.reasons;
        kinds.into_iter().find_map(|(reason, kind)| {
            let held = reasons.iter().find(|held| held.reason == reason)?;
            Some((kind.into(), held.message.clone()))
        })
    }

    /// What the worker says of the Sensors that run in its pod, and how those with pods of their own are. Without a word of
    /// either it stays as it was, and is not there before the first.
    fn sensors(&mut self) {
        let type_ = ConditionType::SensorsHealthy;
        let (Some(report), Some(troubles)) = (self.facts.report(), self.facts.troubles) else {
            if condition::find(&self.conditions, type_).is_some() {
                self.keep(type_);
            }
            return;
        };
        let names = self.facts.sensors;
        let here = report
            .sensors
            .iter()
            .filter_map(|report| Some((names.get(&report.uid)?, report.failure.as_ref()?)));
        let own = troubles.iter().map(|(name, trouble)| (name, trouble));
        let failing: Vec<String> = here
            .chain(own)
            .map(|(name, failure)| format!("Sensor {name}: {failure}"))
            .collect();
        match failing.as_slice() {
            [] => self.set(type_, true, "Healthy", "no Sensor of this Agent fails"),
            [one] => self.set(type_, false, "SensorFailing", one.clone()),
            [first, more @ ..] => {
                let message = format!("{first}; {} more fail", more.len());
                self.set(type_, false, "SensorFailing", message);
            }
        }
    }

    fn standing(&mut self, status: &LoopStatus) {
        let standing = self.find_readiness(status);
        condition::remove(&mut self.conditions, ConditionType::Reconciling);
        condition::remove(&mut self.conditions, ConditionType::Stalled);
        let (ready, also, word) = match standing {
            AgentReadiness::Ready(word) => (true, None, word),
            AgentReadiness::Settling(word) => (true, Some(ConditionType::Reconciling), word),
            AgentReadiness::Reconciling(word) => (false, Some(ConditionType::Reconciling), word),
            AgentReadiness::Stalled(word) => (false, Some(ConditionType::Stalled), word),
        };
        self.set(ConditionType::Ready, ready, &word.reason, word.message.clone());
        if let Some(also) = also {
            let since = condition::find(&self.facts.old.conditions, also).cloned();
            self.conditions.extend(since);
            self.set(also, true, &word.reason, word.message);
        }
    }

    fn find_readiness(&self, status: &LoopStatus) -> AgentReadiness {
        let facts = self.facts;
        let pod_ready = condition::find(&self.conditions, ConditionType::PodReady);
        let pod_message = || pod_ready.map_or_else(String::new, |condition| condition.message.clone());
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
                return AgentReadiness::Settling(reason_message(reason, "the loop is being stopped for spec.suspend"));
            }
            (Some(RestReason::Completed), _) => {
                if let Some(idle) = self.holds(ConditionType::IdleTimeoutReached) {
                    return AgentReadiness::Ready(reason_message(&idle.type_, idle.message.clone()));
                }
                if status.outcome == Some(LoopOutcome::Failed) {
                    let held = self.holds(ConditionType::LoopDetected);
                    let message = held.map_or_else(String::new, |held| held.message.clone());
                    return AgentReadiness::Stalled(reason_message(LoopOutcome::Failed.as_ref(), message));
                }
                let message = "the agent ended its loop; a changed spec or a wake request starts it again";
                return AgentReadiness::Ready(reason_message("Completed", message));
            }
            (None, _) => {}
        }
        if facts.replacing() {
            return AgentReadiness::Reconciling(reason_message(
                "Replacing",
                "the old pod is ending; the next one follows",
            ));
        }
        let Some(pod) = facts.pod else {
            return AgentReadiness::Reconciling(reason_message("Starting", "the pod is about to be made"));
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

    /// The pod runs and its loop has spoken.
    fn loop_readiness(&self, intent: Intent, status: &LoopStatus) -> AgentReadiness {
        if let Some(lost) = self.holds(ConditionType::LinkLost) {
            return AgentReadiness::Reconciling(reason_message(&lost.reason, lost.message.clone()));
        }
        let model = condition::find(&self.conditions, ConditionType::ModelAvailable);
        if let Some(model) = model.filter(|model| model.status == "False") {
            let word = reason_message(&model.reason, model.message.clone());
            let needs_person = [
                FailureKind::AuthenticationFailed,
                FailureKind::QuotaExceeded,
                FailureKind::BoundViolated,
            ];
            return if needs_person.iter().any(|kind| kind.as_ref() == model.reason) {
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
        if let Some(spent) = self.holds(ConditionType::BudgetExhausted) {
            // Without a moment only a person can help: a lifetime, a stop, a call that can never fit.
            return if status.resumes_at.is_some() {
                AgentReadiness::Ready(reason_message(PAUSED_BY_BUDGET, spent.message.clone()))
            } else {
                AgentReadiness::Stalled(reason_message(&spent.reason, spent.message.clone()))
            };
        }
        if let Some(asked) = self.holds(ConditionType::ApprovalPending) {
            return AgentReadiness::Ready(reason_message(AWAITING_APPROVAL, asked.message.clone()));
        }
        if let Some(held) = GUARDRAILS.iter().find_map(|(type_, _)| self.holds(*type_)) {
            return AgentReadiness::Ready(reason_message(&held.type_, held.message.clone()));
        }
        let asleep = status.reasons.contains(&PauseReason::LoopDetected) && status.resumes_at.is_some();
        if let Some(held) = self.holds(ConditionType::LoopDetected).filter(|_| asleep) {
            return AgentReadiness::Ready(reason_message(&held.type_, held.message.clone()));
        }
        if matches!(intent, Intent::KeepOutdated(true)) {
            let message = "the loop still runs the old spec; the new one takes over when it is idle";
            return AgentReadiness::Settling(reason_message("UpdatePending", message));
        }
        AgentReadiness::Ready(reason_message(LOOP_RUNNING, "the loop runs"))
    }
}

/// Whether a failed call says something of the model; the others are about the pod, or clear by themselves.
fn concerns_model(kind: FailureKind) -> bool {
    match kind {
        FailureKind::Unreachable
        | FailureKind::Timeout
        | FailureKind::QuotaExceeded
        | FailureKind::AuthenticationFailed
        | FailureKind::BadResponse
        | FailureKind::ContextExceeded
        | FailureKind::BoundViolated => true,
        FailureKind::RateLimited
        | FailureKind::Cancelled
        | FailureKind::LinkLost
        | FailureKind::Fenced
        | FailureKind::Interrupted
        | FailureKind::RecordFailed
        | FailureKind::BudgetExhausted
        | FailureKind::TokensPerHour
        | FailureKind::TotalTokens
        | FailureKind::TotalCost
        | FailureKind::CallExceedsLimit
        | FailureKind::BudgetAsk
        | FailureKind::BudgetUnavailable
        | FailureKind::LoopDetected => false,
    }
}

fn seconds(moment: jiff::Timestamp) -> String {
    moment.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
