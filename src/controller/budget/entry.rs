//! One account at the leader, with the Agents that wait for room in it.
//!
//! Owns the derived state of an account: what is left, whether it is exhausted, who is released. Counting is up to the
//! ledger.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};

use crate::api::NamespacedName;
use crate::api::amount::{Amount, AmountKind, LimitAmounts};
use crate::ledger::account::{Account, AccountAvailability, GrantRefusal, GrantRequest, LeaseHolder};

/// If at most this fraction (1/4) of a limit is left, the requests of Agents that are awake can show exhaustion; if
/// more is left, all Agents that draw on the account must have requested.
const LAST_FRACTION: i64 = 4;
/// Initial part of a leader's term in which the requests of awake Agents do not suffice, because the
/// smallest calls are not known yet.
const INITIAL_PERIOD: SignedDuration = SignedDuration::from_secs(30);

/// An Agent whose last request was refused and that has no room yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockedAgent {
    /// Its gateway.
    pub holder: LeaseHolder,
    /// Its request.
    pub request: GrantRequest,
    /// Why it was refused.
    pub refused: GrantRefusal,
    /// When it was refused, by the ledger's time.
    pub at: Timestamp,
}

#[derive(Clone, Debug)]
pub struct AccountEntry {
    pub(super) account: Account,
    /// When this leader loaded the account, by the ledger's time.
    pub(super) loaded_at: Timestamp,
    pub(super) blocked: BTreeMap<NamespacedName, BlockedAgent>,
    /// The smallest amount that each Agent last requested for a call.
    pub(super) smallest_requests: BTreeMap<NamespacedName, Amount>,
    /// The room with which [`Self::blocked`] was last checked.
    pub(super) checked_availability: Option<AccountAvailability>,
    /// An Agent was blocked in this term and no longer is.
    pub(super) released: bool,
    pub(super) revision: i64,
}

impl AccountEntry {
    #[must_use]
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Agents that were refused and have no room yet.
    #[must_use]
    pub fn blocked(&self) -> &BTreeMap<NamespacedName, BlockedAgent> {
        &self.blocked
    }

    /// Whether an Agent was blocked in this leader's term and no longer is: exhaustion seen by an earlier leader is
    /// then obsolete.
    #[must_use]
    pub fn released(&self) -> bool {
        self.released
    }

    /// Changes whenever a refused call may have become possible.
    #[must_use]
    pub fn revision(&self) -> i64 {
        self.revision
    }

    /// Limits minus settled and reserved [`Amount`]s, at least zero.
    #[must_use]
    pub fn remaining(&self) -> LimitAmounts {
        let account = &self.account;
        account
            .limits()
            .left_after(&account.used())
            .left_after(&account.reserved())
    }

    /// The refusal that shows that the [`Account`] as a whole is exhausted, given that `agents` draw on it. Refusals
    /// because of a limit per Agent, of calls that can never fit, or while others hold enough unspent do not count. Of
    /// several, the one that has room last.
    ///
    /// A single refusal shows nothing: the account is exhausted when less is left than the smallest call that any Agent
    /// last requested. While more than a quarter of the limit is left, all Agents must have requested; with less left,
    /// sleeping Agents are ignored, since it is unknown when they will request again.
    #[must_use]
    pub fn exhausted(&self, agents: usize) -> Option<(&NamespacedName, &BlockedAgent)> {
        if self.blocked.is_empty() {
            return None;
        }
        let awake = self.account.holders().map(|holder| &holder.agent);
        let awake: BTreeSet<&NamespacedName> = awake.chain(self.blocked.keys()).collect();
        let shows = |refused: &GrantRefusal| {
            !refused.per_agent
                && !refused.never
                && !refused.contended
                && self.fits_no_call(refused.kind, agents, &awake)
        };
        let spent = self.blocked.iter().filter(|(_, blocked)| shows(&blocked.refused));
        spent.max_by_key(|(_, blocked)| {
            let resets = blocked.refused.resets_at;
            (resets.is_none(), resets, blocked.at)
        })
    }

    /// Whether less of a kind is left than the smallest call that was last requested.
    fn fits_no_call(&self, kind: AmountKind, agents: usize, awake: &BTreeSet<&NamespacedName>) -> bool {
        let limits = self.account.limits();
        let left = limits.left_after(&self.account.used());
        let (Some(limit), Some(left)) = (limits.get(kind), left.get(kind)) else {
            return false;
        };
        let fits_none = |holder: &dyn Fn(&NamespacedName) -> bool| {
            let requests = self.smallest_requests.iter().filter(|(agent, _)| holder(agent));
            let smallest = requests.map(|(_, least)| least.get(kind)).min();
            smallest.is_some_and(|smallest| left < smallest)
        };
        let all_requested = self.smallest_requests.len() >= agents;
        let all_known = self.account.time().duration_since(self.loaded_at) >= INITIAL_PERIOD;
        (all_requested && fits_none(&|_| true))
            || (all_known && left <= limit / LAST_FRACTION && fits_none(&|agent| awake.contains(agent)))
    }

    /// Records a request of an Agent and its result.
    pub(super) fn record_request(
        &mut self,
        holder: &LeaseHolder,
        request: &GrantRequest,
        refused: Option<&GrantRefusal>,
    ) {
        // A prefetch is not for a call yet.
        if !request.least.is_zero() {
            self.smallest_requests.insert(holder.agent.clone(), request.least);
        }
        match refused {
            Some(refused) => {
                let blocked = BlockedAgent {
                    holder: holder.clone(),
                    request: request.clone(),
                    refused: refused.clone(),
                    at: self.account.time(),
                };
                self.blocked.insert(holder.agent.clone(), blocked);
            }
            None => self.released |= self.blocked.remove(&holder.agent).is_some(),
        }
    }

    /// The Agent no longer draws on the [`Account`], or no longer waits for a call.
    pub(super) fn withdraw(&mut self, agent: &NamespacedName) {
        self.smallest_requests.remove(agent);
        self.account.withdraw(agent);
        self.released |= self.blocked.remove(agent).is_some();
    }

    /// Releases Agents that have room now, and updates when the others will have some.
    pub(super) fn release_blocked(&mut self) {
        let availability = self.account.availability();
        if self.checked_availability.as_ref() == Some(&availability) {
            return;
        }
        let (before, account) = (self.blocked.len(), &self.account);
        self.blocked.retain(|_, blocked| {
            blocked.refused.resets_at = account.resets_at(&blocked.holder, &blocked.request);
            !account.has_room(&blocked.holder, &blocked.request)
        });
        if self.blocked.len() < before {
            (self.released, self.revision) = (true, self.revision + 1);
        }
        self.checked_availability = Some(availability);
    }
}
