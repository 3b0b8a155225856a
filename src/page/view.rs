//! What the page shows at one moment: plain values, taken from objects, reports and recent events.
//!
//! Contains no text of a prompt or an answer, no instructions, and no argument of a tool call.

use jiff::Timestamp;

use super::agent_rows::AgentRow;
use super::html::MAX_ROWS;
use super::recent::{AgentHistory, MAX_NAME_CHARS, shortened};
use super::sensor_rows::SensorRow;
use crate::api::budget::BudgetSummary;
use crate::api::money::dollars;
use crate::api::status::{Gate, LoopUsage};
use crate::api::{Agent, AgentBudget};
use crate::link::messages::PodReport;

/// Loops, AgentBudgets and Sensors at one moment.
#[derive(Clone, Debug, Default)]
pub struct PageView {
    pub agents: Vec<AgentView>,
    pub budgets: Vec<BudgetRow>,
    pub sensors: Vec<SensorRow>,
    /// What is not shown, and why.
    pub notes: Vec<String>,
}

#[derive(Clone, Debug, Default)]
pub struct AgentView {
    pub row: AgentRow,
    /// Name of the model in the spec.
    pub model: String,
    pub usage: LoopUsage,
    /// Total cost; absent if no price is known.
    pub cost: Option<String>,
    /// Used share of the tightest limit, such as `62%`.
    pub budget: Option<String>,
    /// What is waiting for an approval.
    pub gates: Vec<Gate>,
    /// What it did last; `None`: not shown.
    pub history: Option<AgentHistory>,
}

/// What a page shows of a budget.
#[derive(Clone, Debug, Default)]
pub struct BudgetRow {
    pub namespace: String,
    pub budget: String,
    /// Whether it works: `True`, `False` or `Unknown`.
    pub ready: String,
    /// Why it does not work, and how to fix it.
    pub message: Option<String>,
    pub summary: BudgetSummary,
    pub agents: i32,
    /// Id and time of the open request for more.
    pub gate: Option<(String, Timestamp)>,
}

impl AgentView {
    /// From an Agent, its row, the last report of its gateway, and what it did last.
    #[must_use]
    pub fn new(agent: &Agent, row: AgentRow, report: Option<&PodReport>, history: Option<AgentHistory>) -> Self {
        let status = agent.status.as_ref();
        let written = status.and_then(|status| status.usage.as_ref());
        // A report is newer than the status, except before the first call of a new pod.
        let usage = match (report, written) {
            (Some(report), Some(written)) if report.usage.calls < written.calls => written.clone(),
            (Some(report), _) => report.usage.clone(),
            (None, written) => written.cloned().unwrap_or_default(),
        };
        let reported = report.and_then(|report| report.loop_.as_ref());
        Self {
            model: agent.spec.model.name.clone(),
            cost: (usage.cost > 0).then(|| dollars(usage.cost)),
            usage,
            budget: status.and_then(|status| status.summary.as_ref()?.budget.clone()),
            gates: match reported {
                Some(loop_) => loop_.gates.iter().take(MAX_ROWS).map(bounded).collect(),
                None => status.map(|status| status.gates.clone()).unwrap_or_default(),
            },
            history,
            row,
        }
    }
}

/// What is shown of a gate: a worker may report any texts.
fn bounded(gate: &Gate) -> Gate {
    Gate {
        id: shortened(&gate.id, MAX_NAME_CHARS),
        kind: gate.kind,
        tool: shortened(&gate.tool, MAX_NAME_CHARS),
        arguments_hash: String::new(),
        opened_at: gate.opened_at.clone(),
        expires_at: gate.expires_at.clone(),
        untrusted_content_source: None,
    }
}

impl BudgetRow {
    #[must_use]
    pub fn new(budget: &AgentBudget) -> Self {
        let status = budget.status.clone().unwrap_or_default();
        let ready = status.conditions.iter().find(|condition| condition.type_ == "Ready");
        let broken = ready.filter(|condition| condition.status == "False");
        Self {
            namespace: budget.metadata.namespace.clone().unwrap_or_default(),
            budget: budget.metadata.name.clone().unwrap_or_default(),
            ready: ready.map_or_else(|| "Unknown".into(), |condition| condition.status.clone()),
            message: broken.map(|condition| format!("{}: {}", condition.reason, condition.message)),
            summary: status.summary.unwrap_or_default(),
            agents: status.agents,
            gate: status.gates.into_iter().next().map(|gate| (gate.id, gate.opened_at.0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use jiff::tz::TimeZone;
    use serde_json::json;

    use super::*;
    use crate::api::status::{LoopState, PauseReason, WakeCondition};
    use crate::link::messages::{HeldReason, LoopReport};
    use crate::page::agent_rows::{StatusOrigin, row};
    use crate::page::html::parts;

    #[test]
    fn a_report_of_a_hostile_worker_is_small_in_memory_and_on_the_page() {
        let agent: Agent = serde_json::from_value(json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
            "metadata": { "name": "a", "namespace": "n" },
            "spec": {
                "instructions": "Watch.",
                "model": { "api": "Scripted", "name": "m", "scripted": { "configMapKeyRef": { "name": "s", "key": "k" } } },
            },
        }))
        .unwrap();
        let long = "<".repeat(256 * 1024);
        let text = &long[..8 * 1024];
        let gate = json!({
            "id": text, "kind": "ToolCallNeedsApproval", "tool": text, "argumentsHash": text,
            "openedAt": "2026-11-22T12:00:00Z", "untrustedContentSource": text,
        });
        let gate: Gate = serde_json::from_value(gate).unwrap();
        let held = HeldReason {
            reason: PauseReason::LoopDetected,
            until: None,
            message: long.clone(),
        };
        let wake = json!({ "type": "Event", "value": &long });
        let error = json!({ "kind": &long, "message": &long, "at": "2026-11-22T12:00:00Z" });
        let report = PodReport {
            loop_: Some(LoopReport {
                state: LoopState::Paused,
                reasons: vec![held; 20],
                gates: vec![gate; MAX_ROWS + 1],
                wake: serde_json::from_value::<WakeCondition>(wake).ok(),
                consecutive_errors: 1,
                last_error: Some(serde_json::from_value(error).unwrap()),
                ..LoopReport::default()
            }),
            ..PodReport::default()
        };
        let row = row(&agent, Some(&report), StatusOrigin::Present);
        assert_eq!(row.reasons.len(), 16);
        assert!(row.wakes_on.is_some() && row.last_error.is_some() && row.message.is_some());
        let agent = AgentView::new(&agent, row, Some(&report), None);
        assert_eq!(agent.gates.len(), MAX_ROWS);
        let size = format!("{agent:?}").len();
        assert!(size < 64 * 1024, "{size} bytes in memory");
        let view = PageView {
            agents: vec![agent],
            ..PageView::default()
        };
        for part in parts(&view, &TimeZone::UTC) {
            assert!(part.html.len() < 128 * 1024, "{}: {} bytes", part.id, part.html.len());
        }
    }
}
