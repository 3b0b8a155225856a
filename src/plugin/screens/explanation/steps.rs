//! What ends each cause, and the commands that a user can run.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;

use super::Cause;
use crate::api::pause::{PauseEnd, PauseReason};
use crate::api::status::LoopOutcome;
use crate::api::{Agent, AgentStatus};

/// The Agent, as commands name it.
pub(super) struct AgentTarget {
    pub(super) namespace: String,
    pub(super) name: String,
}

impl AgentTarget {
    pub(super) fn of(agent: &Agent) -> Self {
        Self {
            namespace: agent.namespace().unwrap_or_default(),
            name: agent.name_any(),
        }
    }

    /// A command of the plugin for this Agent.
    fn command(&self, command: &str) -> String {
        format!("kubectl agentloop {command} -n {} {}", self.namespace, self.name)
    }

    fn edit(&self) -> String {
        format!("kubectl edit agents.agentloop.dev -n {} {}", self.namespace, self.name)
    }
}

pub(super) fn not_reconciled() -> Cause {
    Cause {
        reason: "Pending".into(),
        message: "the controller has not reconciled this Agent yet".into(),
        ends: "within seconds, if the controller is running".into(),
        steps: vec!["kubectl agentloop check".into()],
    }
}

pub(super) fn refused(accepted: &Condition) -> Cause {
    Cause {
        reason: accepted.reason.clone(),
        message: accepted.message.clone(),
        ends: "when the spec, or the object that the message names, is corrected".into(),
        steps: Vec::new(),
    }
}

pub(super) fn ended(outcome: LoopOutcome, message: &str, target: &AgentTarget) -> Cause {
    let (ends, step) = if outcome == LoopOutcome::ScaledToZero {
        (
            "with the next task, when the spec is changed, or on a wake request",
            run(target),
        )
    } else {
        ("when the spec is changed, or on a wake request", target.command("wake"))
    };
    Cause {
        reason: outcome.to_string(),
        message: message.to_owned(),
        ends: ends.into(),
        steps: vec![step],
    }
}

pub(super) fn pod(pod: &Condition, target: &AgentTarget) -> Cause {
    let events = format!(
        "kubectl get events -n {} --field-selector involvedObject.name={}",
        target.namespace, target.name
    );
    Cause {
        reason: pod.reason.clone(),
        message: pod.message.clone(),
        ends: "when the pod is ready".into(),
        steps: vec![events],
    }
}

pub(super) fn model(model: &Condition) -> Cause {
    Cause {
        reason: model.reason.clone(),
        message: model.message.clone(),
        ends: "with the first call that succeeds".into(),
        steps: Vec::new(),
    }
}

pub(super) fn detected(detected: &Condition, target: &AgentTarget) -> Cause {
    Cause {
        reason: detected.reason.clone(),
        message: detected.message.clone(),
        ends: "on a resume request".into(),
        steps: vec![target.command("logs"), target.command("resume")],
    }
}

pub(super) fn lost(lost: &Condition) -> Cause {
    Cause {
        reason: lost.reason.clone(),
        message: lost.message.clone(),
        ends: end(PauseEnd::Contact).into(),
        steps: vec!["kubectl agentloop check".into()],
    }
}

fn run(target: &AgentTarget) -> String {
    format!("{} --prompt TEXT", target.command("run"))
}

pub(super) fn waits_for_task(target: &AgentTarget) -> Cause {
    Cause {
        reason: "Waiting".into(),
        message: "the agent has no task".into(),
        ends: "with the next task, of a Sensor or of a user".into(),
        steps: vec![run(target)],
    }
}

pub(super) fn sleeps(events: Option<&str>, target: &AgentTarget) -> Cause {
    Cause {
        reason: "Sleeping".into(),
        message: "the agent chose to sleep".into(),
        ends: match events {
            Some(events) => format!("with one of these: {}; or at the time below", events.replace(',', ", ")),
            None => "at the time below, or with a notification of high priority".into(),
        },
        steps: vec![target.command("wake")],
    }
}

pub(super) fn of_pause(reason: PauseReason, message: &str, status: &AgentStatus, target: &AgentTarget) -> Cause {
    Cause {
        reason: reason.to_string(),
        message: message.to_owned(),
        ends: if reason == PauseReason::BudgetAsk {
            "when a person answers, or the window of the budget has room".into()
        } else {
            end(reason.facts().end).into()
        },
        steps: steps(reason, status, target),
    }
}

/// What ends a pause, in words.
const fn end(end: PauseEnd) -> &'static str {
    match end {
        PauseEnd::Spec => "when spec.suspend is set to false",
        PauseEnd::ForcedSleep => "at the end of a forced sleep",
        PauseEnd::ActionWindow => "when the oldest of the counted actions is 60 s old",
        PauseEnd::Recheck => "when its limit allows it again",
        PauseEnd::NextAttempt => "with the next attempt at the call, if that succeeds",
        PauseEnd::Cooldown => "at the end of a cool-down",
        PauseEnd::Contact => "when the pod reaches the controller again",
        PauseEnd::Room { probed: true } => {
            "when the limit has room for the next call: by its window, or when it is raised"
        }
        PauseEnd::Room { probed: false } => "when the limit is raised",
        PauseEnd::Answer => "when a person answers, or the gate expires",
        PauseEnd::User => "only on a resume request",
    }
}

/// What a user can do about a pause.
fn steps(reason: PauseReason, status: &AgentStatus, target: &AgentTarget) -> Vec<String> {
    use PauseReason as Held;
    let mut steps = match reason {
        Held::SuspendedBySpec => vec![target.command("resume")],
        Held::BudgetExhausted | Held::BudgetAsk => of_budgets(reason, status, target),
        Held::CallExceedsLimit => {
            let mut steps = of_budgets(reason, status, target);
            steps.push(target.edit());
            steps
        }
        Held::TokensPerHour => vec![format!("raise spec.guardrails.tokensPerHour: {}", target.edit())],
        Held::TotalTokens | Held::TotalCost => vec![format!("raise spec.guardrails.total: {}", target.edit())],
        Held::ToolCallNeedsApproval | Held::UnknownOutcome | Held::LowConfidence | Held::Escalated => {
            of_gates(status, target)
        }
        Held::LinkLost => vec!["kubectl agentloop check".to_owned()],
        Held::BudgetUnavailable => vec!["kubectl agentloop budget top -A".to_owned()],
        Held::BoundViolated => vec!["correct the bounds of spec.model, or replace its server".to_owned()],
        Held::AuthenticationFailed => vec!["correct the Secret in spec.model.apiKeySecretRef".to_owned()],
        Held::LoopDetected => vec![target.command("logs")],
        Held::ProviderRateLimit
        | Held::ModelUnreachable
        | Held::QuotaExceeded
        | Held::ModelRefused
        | Held::MaxConsecutiveTurns
        | Held::ActionsPerMinute
        | Held::RateWindow
        | Held::OutsideActiveHours
        | Held::ConsecutiveErrors
        | Held::ConsecutiveToolFailures
        | Held::CrashLoop => Vec::new(),
    };
    if reason.facts().ends_on_resume {
        steps.push(format!("to end it now: {}", target.command("resume")));
    }
    steps
}

/// The commands for the budgets that have no room, or that ask for more.
fn of_budgets(reason: PauseReason, status: &AgentStatus, target: &AgentTarget) -> Vec<String> {
    let exhausted = status.budgets.iter().filter(|budget| budget.exhausted);
    let command = |name: &str| {
        let (namespace, name) = name.split_once('/').unwrap_or((&target.namespace, name));
        if reason == PauseReason::BudgetAsk {
            format!("kubectl agentloop approve --budget -n {namespace} {name}")
        } else {
            format!("kubectl agentloop budget top-up -n {namespace} {name} --tokens NUMBER, or another amount")
        }
    };
    exhausted.map(|budget| command(&budget.name)).collect()
}

fn of_gates(status: &AgentStatus, target: &AgentTarget) -> Vec<String> {
    let command = |id: &str| {
        format!(
            "{approve} {id}, or {deny} {id}",
            approve = target.command("approve"),
            deny = target.command("deny")
        )
    };
    let read = format!("review the request: {}", target.command("events --messages"));
    let answers = status.gates.iter().map(|gate| command(&gate.id));
    std::iter::once(read).chain(answers).collect()
}
