//! The table of Agents: what `kubectl get` shows, and what each one waits for.

use jiff::Timestamp;
use kube::ResourceExt;

use super::explanation::is_stop_pending;
use super::figures::{age, duration, run_duration};
use super::table::TextTable;
use crate::api::agent::AgentMode;
use crate::api::condition::{self, ConditionType};
use crate::api::status::{LoopState, LoopStatus, WakeType};
use crate::api::{Agent, AgentStatus};

/// Which columns the table has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatusColumns {
    /// The Agents are of several namespaces.
    pub namespaces: bool,
    /// Also model, pod and last failure.
    pub wide: bool,
}

/// The table.
#[must_use]
pub fn table(agents: &[Agent], columns: StatusColumns, now: Timestamp) -> TextTable {
    let mut head = vec![
        "NAME",
        "READY",
        "STATE",
        "WAITS FOR",
        "MODE",
        "PROGRESS",
        "TASKS",
        "GATES",
        "TURNS",
        "TOKENS",
        "COST",
        "BUDGET",
        "AGE",
    ];
    if columns.namespaces {
        head.insert(0, "NAMESPACE");
    }
    if columns.wide {
        head.extend(["MODEL", "POD", "NODE", "RESTARTS", "LAST ERROR"]);
    }
    let mut table = TextTable::new(head);
    for agent in agents {
        table.push(row(agent, columns, now));
    }
    table
}

fn row(agent: &Agent, columns: StatusColumns, now: Timestamp) -> Vec<String> {
    let none = AgentStatus::default();
    let status = agent.status.as_ref().unwrap_or(&none);
    let summary = status.summary.clone().unwrap_or_default();
    let state = status.r#loop.as_ref().map(|state| state.state);
    let ready = condition::find(&status.conditions, ConditionType::Ready);
    let turns = status.usage.as_ref().map(|usage| usage.counts.turns.to_string());
    let mut row = vec![
        agent.name_any(),
        ready.map_or_else(|| "Unknown".to_owned(), |ready| ready.status.clone()),
        state.map_or_else(String::new, |state| state.to_string()),
        waits_for(agent, now),
        mode(agent.spec.mode).to_owned(),
        progress(status, now),
        waiting_tasks(agent, status),
        status.gates.len().to_string(),
        turns.unwrap_or_default(),
        summary.tokens,
        summary.cost.unwrap_or_default(),
        summary.budget.unwrap_or_default(),
        age(agent.metadata.creation_timestamp.as_ref(), now),
    ];
    if columns.namespaces {
        row.insert(0, agent.namespace().unwrap_or_default());
    }
    if columns.wide {
        let pod = status.pod.clone().unwrap_or_default();
        let error = status.last_error.as_ref();
        row.extend([
            agent.spec.model.name.clone(),
            pod.name.clone(),
            pod.node.unwrap_or_default(),
            if pod.name.is_empty() {
                String::new()
            } else {
                pod.restarts.to_string()
            },
            error.map_or_else(String::new, |error| {
                format!("{} ({} ago)", error.kind, age(Some(&error.at), now))
            }),
        ]);
    }
    row
}

/// The name of a mode.
#[must_use]
pub const fn mode(mode: AgentMode) -> &'static str {
    match mode {
        AgentMode::Continuous => "Continuous",
        AgentMode::Task => "Task",
        AgentMode::Goal => "Goal",
    }
}

/// What the loop waits for, in a few words; empty while it runs.
fn waits_for(agent: &Agent, now: Timestamp) -> String {
    let Some(status) = &agent.status else {
        return "the controller".into();
    };
    let refused = condition::find(&status.conditions, ConditionType::Accepted);
    if let Some(refused) = refused.filter(|accepted| accepted.status == "False") {
        return refused.reason.clone();
    }
    let state = status.r#loop.clone().unwrap_or_default();
    if let Some(outcome) = state.outcome {
        return outcome.to_string();
    }
    let until = state.resumes_at.as_ref().map(|at| duration(at.0.duration_since(now)));
    let until = until.map(|until| format!(" ({until})")).unwrap_or_default();
    let held = match state.state {
        LoopState::Paused | LoopState::Stopped => {
            let reasons: Vec<&str> = state.reasons.iter().map(AsRef::as_ref).collect();
            let suspended = agent.spec.suspend && reasons.is_empty();
            let reasons = if suspended {
                "SuspendedBySpec".to_owned()
            } else {
                reasons.join(", ")
            };
            format!("{reasons}{until}")
        }
        LoopState::Sleeping => format!("{}{until}", wake(&state)),
        LoopState::Starting => unready(status),
        LoopState::Running | LoopState::Stopping => String::new(),
    };
    match (is_stop_pending(agent, status), held.is_empty()) {
        (false, _) => held,
        (true, true) => "stop requested".into(),
        (true, false) => format!("{held}; stop requested"),
    }
}

/// Why the pod is not ready, if it is not.
fn unready(status: &AgentStatus) -> String {
    let pod = condition::find(&status.conditions, ConditionType::PodReady);
    pod.filter(|pod| pod.status == "False" && pod.reason != "Starting")
        .map_or_else(String::new, |pod| pod.reason.clone())
}

fn wake(state: &LoopStatus) -> String {
    match &state.wake {
        Some(wake) if wake.r#type != WakeType::Time => wake.value.clone(),
        Some(_) | None => "time".into(),
    }
}

/// Progress of a goal, and what its run has taken.
fn progress(status: &AgentStatus, now: Timestamp) -> String {
    let goal = status.goal.as_ref();
    goal.map_or_else(String::new, |goal| {
        let confidence = goal.last_confidence_percent;
        let confidence = confidence.map_or_else(String::new, |percent| format!(", confidence {percent}%"));
        let unit = if goal.steps == 1 { "step" } else { "steps" };
        let took = run_duration(goal, now).map_or_else(String::new, |took| format!(", {took}"));
        format!("{}% ({} {unit}{confidence}{took})", goal.progress_percent, goal.steps)
    })
}

/// Number of tasks that wait. In other modes than `Task`, only if there are any.
fn waiting_tasks(agent: &Agent, status: &AgentStatus) -> String {
    let waiting = status.r#loop.as_ref().and_then(|state| state.waiting_tasks);
    let waiting = waiting.or_else(|| (agent.spec.mode == AgentMode::Task).then_some(0));
    waiting.map_or_else(String::new, |waiting| waiting.to_string())
}
