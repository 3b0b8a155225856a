//! Usage and cost: over the life of Agents from their status, and since a time from the records of AgentBudgets; by model see
//! [`super::calls_since`].

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use kube::core::{Selector, SelectorExt};
use serde::Serialize;

use super::printable::one_line;
use super::table::TextTable;
use crate::api::amount::Amount;
use crate::api::budget::{BudgetWindow, ShareRecord, UsageBucket};
use crate::api::money::dollars;
use crate::api::status::ModelUsage;
use crate::api::{Agent, AgentBudget, NamespacedName};
use crate::support::text::short_number;

/// What is said below a table without deleted Agents.
const NOT_DELETED: &str = "
Deleted Agents are not counted. To count those that an AgentBudget has recorded: kubectl agentloop cost --since DURATION
";

/// What a row sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CostSum {
    /// An Agent.
    Agent,
    /// A model.
    Model,
    /// A namespace.
    Namespace,
}

/// Usage of one Agent, model or namespace.
#[derive(Serialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct CostRow {
    /// The Agent as `namespace/name`, the model, or the namespace.
    pub of: String,
    /// It is of an Agent that is deleted.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub deleted: bool,
    /// Model calls.
    pub calls: i64,
    /// Calls whose usage the server never reported: not in any other number of this row.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unknown_calls: Option<i64>,
    /// Input tokens, including those read from or written to a cache.
    pub input_tokens: i64,
    /// Output tokens.
    pub output_tokens: i64,
    /// Cost in millionths of a US dollar, as far as prices are known.
    #[serde(rename = "costMicroUSD")]
    pub cost: i64,
    /// From when on it counts. Absent: since the Agents were created.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<Timestamp>,
}

impl CostRow {
    fn add(&mut self, more: &Self) {
        // Pods and budgets report them: a sum of absurd numbers ends at the largest one.
        let add = |sum: &mut i64, more: i64| *sum = sum.saturating_add(more);
        add(&mut self.calls, more.calls);
        self.unknown_calls = match (self.unknown_calls, more.unknown_calls) {
            (Some(a), Some(b)) => Some(a.saturating_add(b)),
            (a, b) => a.or(b),
        };
        add(&mut self.input_tokens, more.input_tokens);
        add(&mut self.output_tokens, more.output_tokens);
        add(&mut self.cost, more.cost);
        self.from = self.from.into_iter().chain(more.from).min();
    }

    fn used_nothing(&self) -> bool {
        [self.calls, self.input_tokens, self.output_tokens, self.cost] == [0; 4]
    }
}

/// Usage since the Agents were created, the highest cost first.
#[must_use]
pub fn of_agents(agents: &[Agent], by: CostSum) -> Vec<CostRow> {
    let mut sums = CostSums::default();
    for agent in agents {
        let usage = agent.status.as_ref().and_then(|status| status.usage.clone());
        let usage = usage.unwrap_or_default();
        let name = NamespacedName::of(agent);
        match by {
            CostSum::Agent => sums.add(name.to_string(), &of_model(&usage.of_all_models())),
            CostSum::Namespace => sums.add(name.namespace, &of_model(&usage.of_all_models())),
            CostSum::Model => {
                let others = Some(usage.of_other_models()).filter(|others| others.calls > 0);
                for model in usage.by_model.iter().chain(&others) {
                    sums.add(model.model.clone(), &of_model(model));
                }
            }
        }
    }
    sums.sorted()
}

fn of_model(usage: &ModelUsage) -> CostRow {
    CostRow {
        calls: usage.calls,
        unknown_calls: Some(usage.unknown_calls),
        input_tokens: usage.input_tokens + usage.cache_read_tokens + usage.cache_write_tokens,
        output_tokens: usage.output_tokens,
        cost: usage.cost,
        ..CostRow::default()
    }
}

/// Usage since about `since` before now, and the Agents of which no budget knows it. Deleted Agents that a budget has recorded
/// count too. `namespace`: of the Agents; `None`: of all namespaces.
#[must_use]
pub fn of_budgets(
    (agents, budgets): (&[Agent], &[AgentBudget]),
    namespace: Option<&str>,
    by: CostSum,
    (since, now): (SignedDuration, Timestamp),
) -> (Vec<CostRow>, Vec<String>) {
    let mut sums = CostSums::default();
    let mut unknown = Vec::new();
    for agent in agents {
        let name = NamespacedName::of(agent);
        let known = budgets
            .iter()
            .filter_map(|budget| in_budget(budget, agent, (since, now)));
        match (closest(known), by) {
            (None, _) => unknown.push(name.to_string()),
            (Some(row), CostSum::Agent | CostSum::Model) => sums.add(name.to_string(), &row),
            (Some(row), CostSum::Namespace) => sums.add(name.namespace, &row),
        }
    }
    for name in deleted(agents, budgets, namespace) {
        let known = budgets
            .iter()
            .filter_map(|budget| recorded(budget, &name, (since, now)));
        let shown = format!("{name} (deleted)");
        match (closest(known), by) {
            (None, _) => unknown.push(shown),
            (Some(row), _) if row.used_nothing() => {}
            (Some(row), CostSum::Agent | CostSum::Model) => sums.add(shown, &CostRow { deleted: true, ..row }),
            (Some(row), CostSum::Namespace) => sums.add(name.namespace, &row),
        }
    }
    (sums.sorted(), unknown)
}

/// The row of the budget that knows best what an Agent used. Each budget counts all calls of the Agent. One that has none of
/// those in this time counts the Agent for a shorter time; of the others, the one that begins last is the closest to what was
/// asked.
fn closest(known: impl Iterator<Item = PeriodUsage>) -> Option<CostRow> {
    let best = known.max_by_key(|PeriodUsage { is_certain, row }| (*is_certain, row.from, row.cost, row.input_tokens));
    best.map(|known| known.row)
}

/// Agents that budgets have recorded and that do not exist.
fn deleted(agents: &[Agent], budgets: &[AgentBudget], namespace: Option<&str>) -> BTreeSet<NamespacedName> {
    let listed: BTreeSet<NamespacedName> = agents.iter().map(NamespacedName::of).collect();
    let shares = budgets.iter().flat_map(shares);
    // The Agents with the least usage share a line, which has no name.
    let single = shares.filter(|share| !share.name.is_empty());
    let asked = single.filter(|share| namespace.is_none_or(|namespace| share.namespace == namespace));
    let names = asked.map(|share| NamespacedName::new(&share.namespace, &share.name));
    names.filter(|name| !listed.contains(name)).collect()
}

/// Usage of an Agent as a budget records it.
struct PeriodUsage {
    /// Whether some of it is certainly in the time that was asked for, and not before it.
    is_certain: bool,
    row: CostRow,
}

/// Usage of an Agent as a budget records it; `None`: its records do not reach back that far, or the Agent does not draw on it.
fn in_budget(budget: &AgentBudget, agent: &Agent, (since, now): (SignedDuration, Timestamp)) -> Option<PeriodUsage> {
    let asked = now.checked_sub(since).ok()?;
    budget.status.as_ref()?.ledger.as_ref()?;
    if !reaches_back_to(budget)(asked, now) {
        return None;
    }
    if let Some(share) = share_of(budget, &NamespacedName::of(agent)) {
        return of_share(budget, share, asked);
    }
    // Usage in its window would be recorded, unless the Agents with the least usage share a line, which has no name.
    if shares(budget).iter().any(|share| share.name.is_empty()) {
        return None;
    }
    let row = CostRow {
        from: Some(asked),
        ..CostRow::default()
    };
    let unused = PeriodUsage { is_certain: false, row };
    (draws_on(agent, budget) && was_idle(agent, asked)).then_some(unused)
}

/// Usage of an Agent that has a line of its own in the records of a budget, if they reach back that far.
fn recorded(
    budget: &AgentBudget,
    name: &NamespacedName,
    (since, now): (SignedDuration, Timestamp),
) -> Option<PeriodUsage> {
    let asked = now.checked_sub(since).ok()?;
    let share = share_of(budget, name).filter(|_| reaches_back_to(budget)(asked, now))?;
    of_share(budget, share, asked)
}

fn of_share(budget: &AgentBudget, share: &ShareRecord, asked: Timestamp) -> Option<PeriodUsage> {
    let mut later = share.buckets.iter().filter(|bucket| bucket.start >= asked);
    Some(PeriodUsage {
        is_certain: later.any(|bucket| !bucket.amount.is_zero()),
        row: summed(&share.buckets, asked, begun(budget)?),
    })
}

/// What a budget has recorded of each Agent.
fn shares(budget: &AgentBudget) -> &[ShareRecord] {
    let ledger = budget.status.as_ref().and_then(|status| status.ledger.as_ref());
    ledger.map(|ledger| ledger.shares.as_slice()).unwrap_or_default()
}

fn share_of<'a>(budget: &'a AgentBudget, name: &NamespacedName) -> Option<&'a ShareRecord> {
    let mut shares = shares(budget).iter();
    shares.find(|share| (&share.namespace, &share.name) == (&name.namespace, &name.name))
}

/// Whether an Agent began no turn since a time. One that did may have drawn on this budget only later.
fn was_idle(agent: &Agent, since: Timestamp) -> bool {
    let state = agent.status.as_ref().and_then(|status| status.r#loop.as_ref());
    let last = state.and_then(|state| state.last_turn_time.as_ref());
    last.is_none_or(|last| last.0 < since)
}

/// Whether an Agent draws on a budget: its status says so, or both are in one namespace and the specs do.
fn draws_on(agent: &Agent, budget: &AgentBudget) -> bool {
    let (name, of) = (NamespacedName::of(budget), NamespacedName::of(agent));
    let is_local = name.namespace == of.namespace;
    let shown = if is_local { name.name.clone() } else { name.to_string() };
    let mut listed = agent.status.iter().flat_map(|status| &status.budgets);
    let is_selected = || {
        let selector = budget.spec.selector.clone();
        let selector = selector.and_then(|selector| Selector::try_from(selector).ok());
        budget.spec.namespace_selector.is_none() && selector.is_some_and(|selector| selector.matches(agent.labels()))
    };
    let is_named = || agent.spec.budget_refs.iter().any(|named| named.name == name.name);
    listed.any(|share| share.name == shown) || is_local && (is_named() || is_selected())
}

/// Whether the records of a budget contain what was used since a time.
fn reaches_back_to(budget: &AgentBudget) -> impl Fn(Timestamp, Timestamp) -> bool + '_ {
    let BudgetWindow {
        rolling,
        calendar,
        lifetime,
    } = &budget.spec.window;
    move |asked, now| {
        let existed = begun(budget).is_some_and(|begun| begun <= asked);
        let rolls = rolling
            .as_ref()
            .is_some_and(|rolling| now.duration_since(asked).as_secs() <= rolling.seconds);
        let window = budget.status.as_ref().and_then(|status| status.window.as_ref());
        let started = window.and_then(|window| window.started_at.as_ref());
        let in_calendar = calendar.is_some() && started.is_some_and(|started| started.0 <= asked);
        existed && (rolls || in_calendar || lifetime.is_some())
    }
}

fn begun(budget: &AgentBudget) -> Option<Timestamp> {
    budget.creation_timestamp().map(|time| time.0)
}

/// The buckets that began since then, and the one before them, which reaches into that time.
fn summed(buckets: &[UsageBucket], asked: Timestamp, begun: Timestamp) -> CostRow {
    let before = buckets.iter().rposition(|bucket| bucket.start <= asked);
    let counted = buckets.get(before.unwrap_or(0)..).unwrap_or_default();
    let from = counted.first().map_or(asked, |first| first.start.min(asked).max(begun));
    let mut row = CostRow {
        from: Some(from),
        ..CostRow::default()
    };
    for Amount {
        input_tokens,
        output_tokens,
        calls,
        cost,
        ..
    } in counted.iter().map(|bucket| bucket.amount)
    {
        row.add(&CostRow {
            calls,
            input_tokens,
            output_tokens,
            cost,
            ..CostRow::default()
        });
    }
    row
}

/// Rows by what they are of.
#[derive(Default)]
pub struct CostSums(BTreeMap<String, CostRow>);

impl CostSums {
    /// Adds to the row of this Agent, model or namespace.
    pub fn add(&mut self, of: String, more: &CostRow) {
        let row = self.0.entry(of.clone()).or_insert_with(|| CostRow {
            of,
            deleted: more.deleted,
            ..CostRow::default()
        });
        row.add(more);
    }

    /// The rows, the highest cost first.
    #[must_use]
    pub fn sorted(self) -> Vec<CostRow> {
        let mut rows: Vec<CostRow> = self.0.into_values().collect();
        rows.sort_by(|a, b| (b.cost, b.input_tokens, &a.of).cmp(&(a.cost, a.input_tokens, &b.of)));
        rows
    }
}

/// What is said below a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CostNotes<'a> {
    /// Where the usage was looked for.
    pub source: &'a str,
    /// Agents of which no such source has the usage.
    pub unknown: &'a [String],
    /// Whether deleted Agents are in the rows, as far as they were recorded.
    pub counts_deleted: bool,
}

/// The table with its total.
#[must_use]
pub fn text(rows: &[CostRow], by: CostSum, notes: CostNotes<'_>) -> String {
    let head = match by {
        CostSum::Agent => "AGENT",
        CostSum::Model => "MODEL",
        CostSum::Namespace => "NAMESPACE",
    };
    let since = rows.iter().any(|row| row.from.is_some());
    let mut columns = vec![head, "CALLS", "UNKNOWN", "INPUT", "OUTPUT", "COST"];
    if since {
        columns.push("FROM");
    }
    let mut table = TextTable::new(columns);
    let mut total = CostRow {
        of: "TOTAL".into(),
        ..CostRow::default()
    };
    for row in rows {
        total.add(row);
    }
    for row in rows.iter().chain([&total]) {
        let mut cells = vec![
            row.of.clone(),
            row.calls.to_string(),
            row.unknown_calls.map_or_else(String::new, |calls| calls.to_string()),
            short_number(row.input_tokens),
            short_number(row.output_tokens),
            dollars(row.cost),
        ];
        if since {
            let from = row.from.map(|from| from.strftime("%Y-%m-%dT%H:%MZ").to_string());
            cells.push(from.unwrap_or_default());
        }
        table.push(cells);
    }
    let mut text = table.to_string();
    if !notes.unknown.is_empty() {
        let (source, names) = (notes.source, one_line(&notes.unknown.join(", ")));
        let _ = writeln!(text, "\nNo {source} records the usage of this time for: {names}");
    }
    if !notes.counts_deleted {
        text.push_str(NOT_DELETED);
    }
    text
}
