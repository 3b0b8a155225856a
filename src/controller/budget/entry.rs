//! One account at the leader, and who waits for room in it.
//!
//! Owns what is said of an account: what is left, whether it is spent, whom it lets go. What is counted is the ledger's.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};

use crate::api::amount::{Amount, AmountKind, LimitAmounts};
use crate::ledger::account::{Account, AccountRoom, AgentName, GrantRefusal, GrantRequest, LeaseHolder};

/// A limit of which not more than one part in so many is left can be found spent by the Agents that asked; with more
/// left, only by all that draw on it.
const LAST_PART: i64 = 4;
/// In the first so many seconds of a leader's term not even then: it has not heard of the smallest calls yet.
const FIRST_ASKS: SignedDuration = SignedDuration::from_secs(30);

/// An Agent whose last ask was refused, and has no room yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockedAgent {
    /// Its gateway.
    pub who: LeaseHolder,
    /// What it asked for.
    pub ask: GrantRequest,
    /// Why it got nothing.
    pub refused: GrantRefusal,
    /// When, by the ledger's time.
    pub at: Timestamp,
}

/// One account and who waits for room in it.
#[derive(Clone, Debug)]
pub struct AccountEntry {
    pub(super) account: Account,
    /// When this leader began to keep it, by the ledger's time.
    pub(super) begun: Timestamp,
    pub(super) blocked: BTreeMap<AgentName, BlockedAgent>,
    /// The least that each Agent wanted for its last call.
    pub(super) asks: BTreeMap<AgentName, Amount>,
    /// The room that `blocked` was last looked at with.
    pub(super) looked: Option<AccountRoom>,
    /// Somebody was blocked in this term and is not any more.
    pub(super) released: bool,
    pub(super) revision: i64,
}

impl AccountEntry {
    /// The account: used, reserved, limits, shares.
    #[must_use]
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Agents that were refused and have no room yet.
    #[must_use]
    pub fn blocked(&self) -> &BTreeMap<AgentName, BlockedAgent> {
        &self.blocked
    }

    /// Whether somebody was blocked in this leader's term and is not any more: what an earlier leader saw counts no more.
    #[must_use]
    pub fn released(&self) -> bool {
        self.released
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

    /// The refusal that shows that the account as a whole is spent, when `agents` draw on it: not of one Agent's part,
    /// not of a call that can never fit, not while others hold enough unspent. Of several the one that has room last.
    ///
    /// One refusal alone shows nothing: the account is spent when what is left is less than the smallest call that any
    /// Agent last asked for. As long as more than a quarter of the limit is left, all Agents must have asked; with less
    /// left, Agents that sleep do not count, since nobody knows when they ask again.
    #[must_use]
    pub fn exhausted(&self, agents: usize) -> Option<(&AgentName, &BlockedAgent)> {
        if self.blocked.is_empty() {
            return None;
        }
        let awake = self.account.holders().map(|who| &who.agent);
        let awake: BTreeSet<&AgentName> = awake.chain(self.blocked.keys()).collect();
        let shows = |refused: &GrantRefusal| {
            !refused.per_agent && !refused.never && !refused.contended && self.fits_nobody(refused.kind, agents, &awake)
        };
        let spent = self.blocked.iter().filter(|(_, blocked)| shows(&blocked.refused));
        spent.max_by_key(|(_, blocked)| {
            let resets = blocked.refused.resets_at;
            (resets.is_none(), resets, blocked.at)
        })
    }

    /// Whether there is too little of a kind for the smallest call that was last asked for.
    fn fits_nobody(&self, kind: AmountKind, agents: usize, awake: &BTreeSet<&AgentName>) -> bool {
        let limits = self.account.limits();
        let left = limits.left_after(&self.account.used());
        let (Some(limit), Some(left)) = (limits.get(kind), left.get(kind)) else {
            return false;
        };
        let fits_none = |who: &dyn Fn(&AgentName) -> bool| {
            let asks = self.asks.iter().filter(|(agent, _)| who(agent));
            let smallest = asks.map(|(_, least)| least.get(kind)).min();
            smallest.is_some_and(|smallest| left < smallest)
        };
        let all_asked = self.asks.len() >= agents;
        let all_known = self.account.time().duration_since(self.begun) >= FIRST_ASKS;
        (all_asked && fits_none(&|_| true))
            || (all_known && left <= limit / LAST_PART && fits_none(&|agent| awake.contains(agent)))
    }

    /// An Agent wants a call, or waits for none any more.
    pub(super) fn asked(&mut self, who: &LeaseHolder, ask: &GrantRequest, refused: Option<&GrantRefusal>) {
        // Who asks ahead wants no call yet.
        if !ask.least.is_zero() {
            self.asks.insert(who.agent.clone(), ask.least);
        }
        match refused {
            Some(refused) => {
                let blocked = BlockedAgent {
                    who: who.clone(),
                    ask: ask.clone(),
                    refused: refused.clone(),
                    at: self.account.time(),
                };
                self.blocked.insert(who.agent.clone(), blocked);
            }
            None => self.released |= self.blocked.remove(&who.agent).is_some(),
        }
    }

    /// An Agent draws on this no more, or waits for a call that nobody makes any more.
    pub(super) fn withdraw(&mut self, agent: &AgentName) {
        self.asks.remove(agent);
        self.account.withdraw(agent);
        self.released |= self.blocked.remove(agent).is_some();
    }

    /// Lets go who has room by now, or knows better when.
    pub(super) fn release_blocked(&mut self) {
        let room = self.account.room();
        if self.looked.as_ref() == Some(&room) {
            return;
        }
        let (before, account) = (self.blocked.len(), &self.account);
        self.blocked.retain(|_, blocked| {
            blocked.refused.resets_at = account.resets_at(&blocked.who, &blocked.ask);
            !account.has_room(&blocked.who, &blocked.ask)
        });
        if self.blocked.len() < before {
            (self.released, self.revision) = (true, self.revision + 1);
        }
        self.looked = Some(room);
    }
}
