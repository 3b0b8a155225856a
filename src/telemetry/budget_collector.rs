//! Metrics of AgentBudgets, read from the controller's cache at each scrape. All values but the amounts spent equal those
//! in the status.

use std::sync::Arc;

use super::exposition::MetricWriter;
use super::families::{PerObject, Samples, SeriesSource, TakeSnapshot, dollars, number, write_conditions};
use super::registry::{self, Metric};
use crate::api::amount::{Amount, AmountKind};
use crate::api::budget::{AgentBudget, AgentBudgetStatus};

/// An AgentBudget, and what was spent of it since this replica became the leader.
pub struct SpentBudget {
    pub object: Arc<AgentBudget>,
    pub spent: Amount,
}

/// Writes the series of the AgentBudgets in the cache.
pub struct BudgetCollector {
    budgets: TakeSnapshot<SpentBudget>,
    level: PerObject,
}

impl BudgetCollector {
    /// `budgets` takes a snapshot of the AgentBudgets at a scrape.
    #[must_use]
    pub fn new(budgets: TakeSnapshot<SpentBudget>, level: PerObject) -> Self {
        Self { budgets, level }
    }
}

impl SeriesSource for BudgetCollector {
    fn write(&self, out: &mut MetricWriter<'_>) {
        let budgets = (self.budgets)();
        for (metric, write) in FAMILIES.iter().filter(|(metric, _)| self.level.includes(metric)) {
            let mut family = out.family((*metric).into());
            budgets(&mut |budget| {
                let Some(status) = &budget.object.status else { return };
                let metadata = &budget.object.metadata;
                let namespace = metadata.namespace.as_deref().unwrap_or_default();
                let name = metadata.name.as_deref().unwrap_or_default();
                let created = metadata.creation_timestamp.as_ref();
                let facts = BudgetNumbers {
                    created: created.map_or(0, |time| time.0.as_second()),
                    status,
                    spent: &budget.spent,
                };
                write(&facts, &mut Samples::new(&mut family, metric, &[namespace, name]));
            });
        }
    }
}

/// What the series of one AgentBudget show.
struct BudgetNumbers<'a> {
    /// In seconds since the Unix epoch.
    created: i64,
    status: &'a AgentBudgetStatus,
    spent: &'a Amount,
}

/// Writes the series of one AgentBudget in one family.
type WriteBudget = fn(&BudgetNumbers<'_>, &mut Samples<'_, '_, '_>);

/// The families of AgentBudgets, in the order of their names.
const FAMILIES: &[(&Metric, WriteBudget)] = &[
    (&registry::BUDGET_AGENTS, |budget, out| {
        out.put(&[], budget.status.agents.into());
    }),
    (&registry::BUDGET_CREATED, |budget, out| {
        out.put(&[], number(budget.created));
    }),
    (&registry::BUDGET_LEASES, |budget, out| {
        let record = budget.status.ledger.as_ref();
        out.put(&[], number(record.map_or(0, |record| record.next_lease)));
    }),
    (&registry::BUDGET_WRITES, |budget, out| {
        let record = budget.status.ledger.as_ref();
        out.put(&[], number(record.map_or(0, |record| record.epoch)));
    }),
    (&registry::BUDGET_LIMIT_CALLS, |budget, out| {
        put_limit(budget, AmountKind::Calls, out);
    }),
    (&registry::BUDGET_LIMIT_INPUT, |budget, out| {
        put_limit(budget, AmountKind::InputTokens, out);
    }),
    (&registry::BUDGET_LIMIT_OUTPUT, |budget, out| {
        put_limit(budget, AmountKind::OutputTokens, out);
    }),
    (&registry::BUDGET_LIMIT_TOKENS, |budget, out| {
        put_limit(budget, AmountKind::Tokens, out);
    }),
    (&registry::BUDGET_LIMIT_USD, |budget, out| {
        put_limit(budget, AmountKind::Cost, out);
    }),
    (&registry::BUDGET_RESERVED_CALLS, |budget, out| {
        put_reserved(budget, AmountKind::Calls, out);
    }),
    (&registry::BUDGET_RESERVED_INPUT, |budget, out| {
        put_reserved(budget, AmountKind::InputTokens, out);
    }),
    (&registry::BUDGET_RESERVED_OUTPUT, |budget, out| {
        put_reserved(budget, AmountKind::OutputTokens, out);
    }),
    (&registry::BUDGET_RESERVED_TOKENS, |budget, out| {
        put_reserved(budget, AmountKind::Tokens, out);
    }),
    (&registry::BUDGET_RESERVED_USD, |budget, out| {
        put_reserved(budget, AmountKind::Cost, out);
    }),
    (&registry::BUDGET_SPENT_CALLS, |budget, out| {
        put_spent(budget, AmountKind::Calls, out);
    }),
    (&registry::BUDGET_SPENT_INPUT, |budget, out| {
        put_spent(budget, AmountKind::InputTokens, out);
    }),
    (&registry::BUDGET_SPENT_OUTPUT, |budget, out| {
        put_spent(budget, AmountKind::OutputTokens, out);
    }),
    (&registry::BUDGET_SPENT_TOKENS, |budget, out| {
        put_spent(budget, AmountKind::Tokens, out);
    }),
    (&registry::BUDGET_SPENT_USD, |budget, out| {
        put_spent(budget, AmountKind::Cost, out);
    }),
    (&registry::BUDGET_CONDITION, |budget, out| {
        write_conditions(&budget.status.conditions, out);
    }),
    (&registry::BUDGET_USED_CALLS, |budget, out| {
        put_used(budget, AmountKind::Calls, out);
    }),
    (&registry::BUDGET_USED_INPUT, |budget, out| {
        put_used(budget, AmountKind::InputTokens, out);
    }),
    (&registry::BUDGET_USED_OUTPUT, |budget, out| {
        put_used(budget, AmountKind::OutputTokens, out);
    }),
    (&registry::BUDGET_USED_TOKENS, |budget, out| {
        put_used(budget, AmountKind::Tokens, out);
    }),
    (&registry::BUDGET_USED_USD, |budget, out| {
        put_used(budget, AmountKind::Cost, out);
    }),
    (&registry::BUDGET_RESETS, |budget, out| {
        let window = budget.status.window.as_ref();
        if let Some(resets) = window.and_then(|window| window.resets_at.as_ref()) {
            out.put(&[], number(resets.0.as_second()));
        }
    }),
];

fn put_limit(budget: &BudgetNumbers<'_>, kind: AmountKind, out: &mut Samples<'_, '_, '_>) {
    if let Some(limit) = budget.status.limits.and_then(|limits| limits.get(kind)) {
        out.put(&[], value(kind, limit));
    }
}

fn put_reserved(budget: &BudgetNumbers<'_>, kind: AmountKind, out: &mut Samples<'_, '_, '_>) {
    put_limited(budget, kind, &budget.status.reserved.unwrap_or_default(), out);
}

fn put_spent(budget: &BudgetNumbers<'_>, kind: AmountKind, out: &mut Samples<'_, '_, '_>) {
    put_limited(budget, kind, budget.spent, out);
}

fn put_used(budget: &BudgetNumbers<'_>, kind: AmountKind, out: &mut Samples<'_, '_, '_>) {
    put_limited(budget, kind, &budget.status.used.unwrap_or_default(), out);
}

/// Writes an amount if its kind is limited.
fn put_limited(budget: &BudgetNumbers<'_>, kind: AmountKind, amount: &Amount, out: &mut Samples<'_, '_, '_>) {
    if budget.status.limits.is_some_and(|limits| limits.get(kind).is_some()) {
        out.put(&[], value(kind, amount.get(kind)));
    }
}

/// An amount in the unit of its metric: costs in dollars, the others as counts.
pub(super) fn value(kind: AmountKind, amount: i64) -> f64 {
    match kind {
        AmountKind::Cost => dollars(amount),
        AmountKind::Tokens | AmountKind::InputTokens | AmountKind::OutputTokens | AmountKind::Calls => number(amount),
    }
}
