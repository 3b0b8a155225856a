//! What an Agent's limits have left, for the status of the Agent.

use strum::IntoEnumIterator;

use super::entry::AccountEntry;
use super::format;
use super::ledger::BudgetLedger;
use crate::api::NamespacedName;
use crate::api::amount::{AmountKind, LimitAmounts};
use crate::api::status::BudgetShare;
use crate::link::messages::{AccountRemaining, LimitName};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LimitShares {
    /// The AgentBudgets that the Agent draws on.
    pub budgets: Vec<BudgetShare>,
    /// Highest share used of any of its limits, its own included, in percent.
    pub used_percent: Option<i64>,
}

impl BudgetLedger {
    /// Whether everything that determines an Agent's budgets has been listed. Before that its budgets would seem to be
    /// none.
    #[must_use]
    pub fn has_decided(&self) -> bool {
        self.inspect(|state| self.can_decide(state))
    }

    #[must_use]
    pub fn shares(&self, agent: &NamespacedName) -> LimitShares {
        self.inspect(|state| {
            let mut shares = LimitShares::default();
            let decision = state.assignments.decision(agent);
            let accounts = decision.into_iter().flat_map(|decision| &decision.accounts);
            for (account, limit) in accounts {
                let Some((_, entry)) = state.book.entry(account) else {
                    continue;
                };
                let agents = state.assignments.members_of(account);
                shares.add(limit, (entry, agents), agent);
            }
            shares
        })
    }
}

impl LimitShares {
    fn add(&mut self, limit: &LimitName, (entry, agents): (&AccountEntry, usize), agent: &NamespacedName) {
        let account = entry.account();
        let own = account.share_of(agent);
        let (all, used, part) = (account.limits(), account.used(), account.per_agent());
        for (limits, used) in [(&all, &used), (&part, &own)] {
            let percents = AmountKind::iter()
                .filter_map(|kind| i64::try_from(format::percent(used.get(kind), limits.get(kind)?)).ok());
            self.used_percent = self.used_percent.max(percents.max());
        }
        if let LimitName::Budget(name) = limit {
            let (of_all, of_own) = (entry.remaining(), part.left_after(&own));
            let left = |kind| smaller(of_all.get(kind), of_own.get(kind));
            self.budgets.push(BudgetShare {
                name: name.clone(),
                remaining_tokens: left(AmountKind::Tokens),
                remaining_cost_micro_usd: left(AmountKind::Cost),
                exhausted: entry.exhausted(agents).is_some() || entry.blocked().contains_key(agent),
            });
        }
    }
}

/// What is left of a limit for one Agent, counting settled amounts only: leases held by gateways count as left.
pub(super) fn left(entry: &AccountEntry, agent: &NamespacedName) -> AccountRemaining {
    let account = entry.account();
    let tenths = |limits: LimitAmounts, left: LimitAmounts| {
        LimitAmounts::from_fn(|kind| {
            let limit = i128::from(limits.get(kind)?.max(1));
            i64::try_from(i128::from(left.get(kind)?) * 10 / limit).ok()
        })
    };
    let (limits, part) = (account.limits(), account.per_agent());
    let window = &account.terms().window;
    let resets_at = window.end(account.time());
    AccountRemaining {
        of_limits: tenths(limits, limits.left_after(&account.used())),
        of_per_agent: tenths(part, part.left_after(&account.share_of(agent))),
        rolling_seconds: window.seconds(account.time()).filter(|_| resets_at.is_none()),
        resets_at,
    }
}

fn smaller(a: Option<i64>, b: Option<i64>) -> Option<i64> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

#[cfg(test)]
mod tests {
    use super::super::accounts::{AccountBook, DocumentId, DocumentKind, DocumentPart};
    use super::*;
    use crate::api::amount::Amount;
    use crate::api::budget::{LedgerRecord, ShareRecord, UsageBucket};
    use crate::ledger::account::LedgerTerms;
    use crate::ledger::window::WindowRule;

    /// What is left of a budget of 1000 tokens, 100 of them per Agent.
    fn left_of(window: &serde_json::Value, used: i64, own: i64) -> AccountRemaining {
        let start = jiff::Timestamp::constant(1_800_000_000, 0);
        let document = DocumentId {
            kind: DocumentKind::Budget,
            object: NamespacedName::new("ns", "team"),
            uid: "b".into(),
        };
        let agent = NamespacedName::new("ns", "coast");
        let tokens = |tokens| LimitAmounts {
            tokens: Some(tokens),
            ..LimitAmounts::default()
        };
        let bucket = |tokens| UsageBucket {
            start,
            amount: Amount { tokens, ..Amount::ZERO },
        };
        let terms = LedgerTerms {
            limits: tokens(1000),
            per_agent: tokens(100),
            window: WindowRule::read(&serde_json::from_value(window.clone()).unwrap()).unwrap(),
        };
        let record = LedgerRecord {
            watermark: start,
            buckets: vec![bucket(used)],
            shares: vec![ShareRecord {
                namespace: "ns".into(),
                name: "coast".into(),
                buckets: vec![bucket(own)],
            }],
            ..LedgerRecord::default()
        };
        let mut book = AccountBook::default();
        book.load(&document, DocumentPart::Budget, terms, Some(&record), start);
        left(book.entry("b").unwrap().1, &agent)
    }

    #[test]
    fn the_remaining_share_changes_by_tenths_of_each_limit() {
        let rolling = serde_json::json!({"rolling": {"seconds": 3600}});
        let tenths = |used, own| {
            let left = left_of(&rolling, used, own);
            (left.of_limits.tokens, left.of_per_agent.tokens)
        };
        assert_eq!(tenths(0, 0), (Some(10), Some(10)));
        assert_eq!(tenths(1, 1), (Some(9), Some(9)));
        assert_eq!(tenths(600, 50), (Some(4), Some(5)));
        assert_eq!(tenths(601, 51), (Some(3), Some(4)));
        assert_eq!(tenths(1000, 100), (Some(0), Some(0)));
        let left = left_of(&rolling, 1, 0);
        assert_eq!((left.rolling_seconds, left.resets_at), (Some(3600), None));
        assert_eq!(left.of_limits.cost, None, "cost is not limited");
    }

    #[test]
    fn a_window_with_an_end_has_a_reset_time_and_a_lifetime_window_has_none() {
        let daily = serde_json::json!({"calendar": {"period": "Daily", "timeZone": "UTC"}});
        let left = left_of(&daily, 1, 0);
        assert_eq!(
            (left.rolling_seconds, left.resets_at.map(|at| at.to_string())),
            (None, Some("2027-01-16T00:00:00Z".to_owned()))
        );
        let left = left_of(&serde_json::json!({"lifetime": {}}), 1, 0);
        assert_eq!((left.rolling_seconds, left.resets_at), (None, None));
    }

    #[test]
    fn the_smaller_of_both_is_left() {
        assert_eq!(smaller(Some(3), Some(5)), Some(3));
        assert_eq!(smaller(None, Some(5)), Some(5));
        assert_eq!(smaller(None, None), None);
    }
}
