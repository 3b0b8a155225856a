//! What the page shows at one moment: plain values, taken from objects, reports and recent events.
//!
//! Contains no text of a prompt or an answer, no instructions, and no argument of a tool call.

use jiff::Timestamp;

use super::agent_rows::AgentRow;
use super::recent::AgentHistory;
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
    pub budgets: Vec<BudgetView>,
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
    /// What waits for the answer of a person.
    pub gates: Vec<Gate>,
    /// What it did last; `None`: not shown.
    pub history: Option<AgentHistory>,
}

#[derive(Clone, Debug, Default)]
pub struct BudgetView {
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
                Some(loop_) => loop_.gates.clone(),
                None => status.map(|status| status.gates.clone()).unwrap_or_default(),
            },
            history,
            row,
        }
    }
}

impl BudgetView {
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
