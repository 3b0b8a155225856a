//! The usual alternative, on the same schedules: check settled usage before a call, and count the call afterwards.
//!
//! The comparison favors it: settled usage is known everywhere at once, nothing is ever lost, and a call counts in the window
//! in which it was settled.

use agentloop::ledger::account::LedgerTerms;
use agentloop::ledger::window::WindowRule;

use super::oracle::at;

#[derive(Clone, Debug)]
struct Account {
    limit: i64,
    rule: WindowRule,
    /// When each call ended, and its bill.
    calls: Vec<(i64, i64)>,
}

/// Accounting after the fact.
#[derive(Clone, Debug)]
pub struct Afterwards {
    accounts: Vec<Account>,
}

impl Account {
    fn from(&self, now: i64) -> i64 {
        match &self.rule {
            WindowRule::Rolling(length) => now - i64::try_from(length.as_millis()).unwrap(),
            WindowRule::Calendar(..) => self.rule.start(at(now)).as_millisecond() - 1,
            WindowRule::Lifetime => i64::MIN,
        }
    }

    fn settled(&self, now: i64) -> i64 {
        let from = self.from(now);
        let inside = self.calls.iter().filter(|(end, _)| *end > from && *end <= now);
        inside.map(|(_, bill)| bill).sum()
    }
}

impl Afterwards {
    /// With the limits and windows that a schedule begins with.
    pub fn new(terms: &[LedgerTerms]) -> Self {
        let account = |terms: &LedgerTerms| Account {
            limit: terms.limits.tokens.unwrap_or(i64::MAX),
            rule: terms.window.clone(),
            calls: Vec::new(),
        };
        Self {
            accounts: terms.iter().map(account).collect(),
        }
    }

    /// Another account begins.
    pub fn add(&mut self, terms: &LedgerTerms) {
        self.accounts.extend(Self::new(std::slice::from_ref(terms)).accounts);
    }

    /// A call is wanted; it is made where less than the limit is settled.
    pub fn attempt(&mut self, now: i64, lasts: i64, bill: i64, accounts: impl Iterator<Item = usize> + Clone) {
        if accounts.clone().all(|account| {
            let account = &self.accounts[account];
            account.settled(now) < account.limit
        }) {
            for account in accounts {
                self.accounts[account].calls.push((now + lasts, bill));
            }
        }
    }

    /// By how many percent of its limit the worst window was overspent.
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    pub fn overspent(&self) -> f64 {
        let worst = self.accounts.iter().flat_map(|account| {
            let ends = account.calls.iter().map(|(end, _)| *end);
            ends.map(|end| (account.settled(end) - account.limit) as f64 * 100.0 / account.limit as f64)
        });
        worst.fold(0.0, f64::max)
    }
}
