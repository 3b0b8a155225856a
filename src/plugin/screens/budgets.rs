//! AgentBudgets: each limit with what is used, reserved and left, and the Agents that use most.

use std::fmt::Write as _;

use jiff::Timestamp;
use kube::ResourceExt;
use serde::Serialize;
use strum::IntoEnumIterator;

use super::figures::{amount, duration};
use super::table::TextTable;
use crate::api::AgentBudget;
use crate::api::amount::{Amount, AmountKind};
use crate::api::budget::{AgentBudgetStatus, TopAgent};
use crate::api::condition::{self, ConditionType};
use crate::api::money::dollars;
use crate::support::text::short_number;

/// One limit of a budget.
#[derive(Serialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct BudgetLimitRow {
    /// Namespace of the budget.
    pub namespace: String,
    /// Name of the budget.
    pub budget: String,
    /// Reason of `Ready`, if that is not True; otherwise whether it is exhausted or near its limit. `Pending` before the
    /// controller has reconciled it.
    pub state: String,
    /// The window.
    pub window: String,
    /// The limit. Absent: the status has none.
    #[serde(flatten)]
    pub figures: Option<LimitFigures>,
    /// Time at which there is room again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resets_at: Option<Timestamp>,
    /// The Agents that use most, the first one of each budget only in the table.
    pub top_agents: Vec<TopAgent>,
}

/// What is used of one limit, and what is left.
#[derive(Serialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct LimitFigures {
    /// Kind of the limit.
    pub limit_of: String,
    /// The limit, including top-ups; cost in millionths of a US dollar.
    pub limit: i64,
    /// Used in this window.
    pub used: i64,
    /// Leased and not yet settled.
    pub reserved: i64,
    /// What is left.
    pub remaining: i64,
    #[serde(skip)]
    kind: AmountKind,
}

/// The limits of a budget, or one row without figures if its status has none.
#[must_use]
pub fn rows(budget: &AgentBudget) -> Vec<BudgetLimitRow> {
    let status = budget.status.clone().unwrap_or_default();
    let figures = figures(&status);
    let row = |figures| BudgetLimitRow {
        namespace: budget.namespace().unwrap_or_default(),
        budget: budget.name_any(),
        state: state(budget),
        window: status.summary.clone().unwrap_or_default().window,
        figures,
        resets_at: status
            .window
            .as_ref()
            .and_then(|window| Some(window.resets_at.as_ref()?.0)),
        top_agents: status.top_agents.clone(),
    };
    if figures.is_empty() {
        return vec![row(None)];
    }
    figures.into_iter().map(|figures| row(Some(figures))).collect()
}

fn figures(status: &AgentBudgetStatus) -> Vec<LimitFigures> {
    let limits = status.limits.unwrap_or_default();
    let of_kind = |kind: AmountKind| {
        let of = |amounts: Option<Amount>| amounts.map_or(0, |amounts| amounts.get(kind));
        let left = status.remaining.and_then(|remaining| remaining.get(kind));
        Some(LimitFigures {
            limit_of: kind.to_string(),
            limit: limits.get(kind)?,
            used: of(status.used),
            reserved: of(status.reserved),
            remaining: left.unwrap_or(0),
            kind,
        })
    };
    AmountKind::iter().filter_map(of_kind).collect()
}

fn state(budget: &AgentBudget) -> String {
    if budget.status.is_none() {
        return "Pending".into();
    }
    let conditions = budget.status.iter().flat_map(|status| &status.conditions);
    let conditions: Vec<_> = conditions.cloned().collect();
    let holds = |type_| condition::find(&conditions, type_).is_some_and(|found| found.status == "True");
    if let Some(ready) = condition::find(&conditions, ConditionType::Ready).filter(|ready| ready.status != "True") {
        return ready.reason.clone();
    }
    if holds(ConditionType::Exhausted) {
        return "Exhausted".into();
    }
    if holds(ConditionType::NearLimit) {
        return "NearLimit".into();
    }
    "Ready".into()
}

/// The table of limits, and of the Agents that use most.
#[must_use]
pub fn text(rows: &[BudgetLimitRow], now: Timestamp) -> String {
    if rows.is_empty() {
        return "There are no AgentBudgets.\n".into();
    }
    let mut table = TextTable::new(vec![
        "NAMESPACE",
        "BUDGET",
        "STATE",
        "WINDOW",
        "LIMIT OF",
        "LIMIT",
        "USED",
        "USED%",
        "RESERVED",
        "REMAINING",
        "RESETS IN",
    ]);
    let mut agents = TextTable::new(vec!["NAMESPACE", "BUDGET", "AGENT", "TOKENS", "COST"]);
    let mut last = None;
    for row in rows {
        let cell = |shown: &dyn Fn(&LimitFigures) -> String| row.figures.as_ref().map_or_else(String::new, shown);
        let number = |of: &dyn Fn(&LimitFigures) -> i64| cell(&|figures| amount(figures.kind, of(figures)));
        let resets = row.resets_at.map(|at| duration(at.duration_since(now)));
        table.push(vec![
            row.namespace.clone(),
            row.budget.clone(),
            row.state.clone(),
            row.window.clone(),
            cell(&|figures| figures.kind.limit_field().to_owned()),
            number(&|figures| figures.limit),
            number(&|figures| figures.used),
            cell(&|figures| percent(figures.used, figures.limit)),
            number(&|figures| figures.reserved),
            number(&|figures| figures.remaining),
            resets.unwrap_or_default(),
        ]);
        // Once for each budget, whatever it limits.
        if last.replace((&row.namespace, &row.budget)) != Some((&row.namespace, &row.budget)) {
            for agent in &row.top_agents {
                agents.push(vec![
                    row.namespace.clone(),
                    row.budget.clone(),
                    format!("{}/{}", agent.namespace, agent.name),
                    short_number(agent.tokens),
                    dollars(agent.cost),
                ]);
            }
        }
    }
    let mut text = table.to_string();
    if !agents.is_empty() {
        let _ = write!(text, "\n{agents}");
    }
    text
}

/// Rounded down, so that 100% is reached only at the limit.
fn percent(used: i64, limit: i64) -> String {
    if limit <= 0 {
        return "100%".into();
    }
    let percent = i128::from(used) * 100 / i128::from(limit);
    format!("{percent}%")
}
