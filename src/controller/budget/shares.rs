//! What its limits have left for one Agent, as its own status shows it.

use strum::IntoEnumIterator;

use super::entry::Entry;
use super::facts::ledger_name;
use super::ledger::Budgets;
use crate::api::amount::{Amount, Kind};
use crate::api::status::BudgetShare;
use crate::controller::loops::AgentKey;
use crate::ledger::account::AgentName;
use crate::link::messages::LimitName;

/// What an Agent's limits have left.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shares {
    /// The AgentBudgets that it draws on.
    pub budgets: Vec<BudgetShare>,
    /// Percent used of the limit nearest to being spent, its own limits included.
    pub used_percent: Option<i64>,
}

impl Budgets {
    /// What the limits of an Agent have left.
    #[must_use]
    pub fn shares(&self, agent: &AgentKey) -> Shares {
        self.look(|state| {
            let mut shares = Shares::default();
            let decision = state.scope.decision(agent);
            let accounts = decision.into_iter().flat_map(|decision| &decision.accounts);
            for (account, limit) in accounts {
                let Some((_, entry)) = state.book.entry(account) else {
                    continue;
                };
                shares.add(limit, entry, &ledger_name(agent));
            }
            shares
        })
    }
}

impl Shares {
    fn add(&mut self, limit: &LimitName, entry: &Entry, agent: &AgentName) {
        let account = entry.account();
        let own = account.shares().into_iter().find(|(name, _)| name == agent);
        let own = own.map_or(Amount::ZERO, |(_, used)| used);
        let (all, used, part) = (account.limits(), account.used(), account.per_agent());
        for (limits, used) in [(&all, &used), (&part, &own)] {
            let percents = Kind::iter().filter_map(|kind| percent(used.get(kind), limits.get(kind)?));
            self.used_percent = self.used_percent.max(percents.max());
        }
        if let LimitName::Budget(name) = limit {
            let (of_all, of_own) = (entry.remaining(), part.left_after(&own));
            let left = |kind| least(of_all.get(kind), of_own.get(kind));
            self.budgets.push(BudgetShare {
                name: name.clone(),
                remaining_tokens: left(Kind::Tokens),
                remaining_cost_micro_usd: left(Kind::Cost),
                exhausted: entry.exhausted().is_some() || entry.blocked().contains_key(agent),
            });
        }
    }
}

fn least(a: Option<i64>, b: Option<i64>) -> Option<i64> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// Whole percent, rounded down; all of a limit of 0.
fn percent(used: i64, limit: i64) -> Option<i64> {
    if limit == 0 {
        return Some(100);
    }
    i64::try_from(i128::from(used) * 100 / i128::from(limit)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percent_is_rounded_down_and_all_of_nothing() {
        assert_eq!((percent(999, 1000), percent(1000, 1000)), (Some(99), Some(100)));
        assert_eq!((percent(0, 0), percent(0, 5)), (Some(100), Some(0)));
        assert_eq!(percent(i64::MAX, 1), None);
    }

    #[test]
    fn the_smaller_of_both_is_left() {
        assert_eq!(least(Some(3), Some(5)), Some(3));
        assert_eq!(least(None, Some(5)), Some(5));
        assert_eq!(least(None, None), None);
    }
}
