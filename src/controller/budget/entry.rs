//! One account at the leader, and who waits for room in it.
//!
//! Owns what is said of an account: what is left, whether it is spent, whom it lets go. What is counted is the ledger's.

use std::collections::BTreeMap;

use jiff::Timestamp;

use crate::api::amount::LimitAmounts;
use crate::ledger::account::{Account, AgentName, Ask, Refused, Who};

/// An Agent whose last ask was refused, and has no room yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocked {
    /// Its gateway.
    pub who: Who,
    /// What it asked for.
    pub ask: Ask,
    /// Why it got nothing.
    pub refused: Refused,
    /// When, by the ledger's time.
    pub at: Timestamp,
}

/// One account and who waits for room in it.
#[derive(Clone, Debug)]
pub struct Entry {
    pub(super) account: Account,
    pub(super) blocked: BTreeMap<AgentName, Blocked>,
    pub(super) revision: i64,
}

impl Entry {
    /// The account: used, reserved, limits, shares.
    #[must_use]
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Agents that were refused and have no room yet.
    #[must_use]
    pub fn blocked(&self) -> &BTreeMap<AgentName, Blocked> {
        &self.blocked
    }

    /// Changes whenever a refused call may have become possible.
    #[must_use]
    pub fn revision(&self) -> i64 {
        self.revision
    }

    /// Limits less settled and reserved, zero where that is more.
    #[must_use]
    pub fn remaining(&self) -> LimitAmounts {
        let account = &self.account;
        account
            .limits()
            .left_after(&account.used())
            .left_after(&account.reserved())
    }

    /// The refusal that shows that the account as a whole is spent: not of one Agent's part, not of a call that can
    /// never fit, not while others hold enough unspent. Of several the one that has room last.
    #[must_use]
    pub fn exhausted(&self) -> Option<(&AgentName, &Blocked)> {
        let whole = |refused: &Refused| !refused.per_agent && !refused.never && !refused.contended;
        let spent = self.blocked.iter().filter(|(_, blocked)| whole(&blocked.refused));
        spent.max_by_key(|(_, blocked)| {
            let resets = blocked.refused.resets_at;
            (resets.is_none(), resets, blocked.at)
        })
    }

    /// Lets go who has room by now, or knows better when.
    pub(super) fn look_again(&mut self) {
        let (before, account) = (self.blocked.len(), &self.account);
        self.blocked.retain(|_, blocked| {
            blocked.refused.resets_at = account.resets_at(&blocked.who, &blocked.ask);
            !account.has_room(&blocked.who, &blocked.ask)
        });
        if self.blocked.len() < before {
            self.revision += 1;
        }
    }
}
