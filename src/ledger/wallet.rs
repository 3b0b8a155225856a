//! What a gateway holds: leases of every account that its Agent draws on, and reservations of the calls in flight.
//!
//! Order, for whoever drives this: a change of `spent`, `returned` or of the open reservations is on the gateway's
//! disk ([`Wallet::rows`], and the reservation with its call) **before** it is acted on or said. `granted` need not
//! be: the leader says it again. So work on a clone, commit, then put the clone in its place.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::account::{DurableGrant, GrantRequest, LeaseId, LeaseStatement};
use super::sum::saturating_sum;
use crate::api::amount::{Amount, AmountKind, LimitAmounts};

/// Identity of an account: the uid of a budget, or of an Agent with the name of its own limit.
pub type AccountId = String;

/// What a gateway knows of one account.
#[derive(Clone, Debug, Default, PartialEq)]
struct AccountLeases {
    /// Of the newest record that the leader spoke from; what an older one says is a deposed leader's word.
    epoch: i64,
    leases: BTreeMap<LeaseId, HeldLease>,
}

/// One lease as its gateway knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct HeldLease {
    granted: Amount,
    spent: Amount,
    returned: Amount,
    open: Amount,
    /// Of `spent`, what was billed above reservations since calls are open on it: said once none is, or the leader would
    /// take it from what those still hold.
    over: Amount,
    /// Calls open on it.
    calls: u32,
    /// Use for new calls ends at this moment of the boot-time clock, in milliseconds. `None`: not by time.
    until: Option<u64>,
    /// Nothing more is spent from it; kept until the leader knows its last numbers.
    closed: bool,
}

impl HeldLease {
    fn available(&self) -> Amount {
        let gone = saturating_sum(&self.spent, &saturating_sum(&self.returned, &self.open));
        self.granted.saturating_sub(&gone)
    }

    fn statement(&self, lease: LeaseId) -> LeaseStatement {
        LeaseStatement {
            lease,
            spent: self.spent.saturating_sub(&self.over),
            returned: self.returned,
            closed: self.closed,
        }
    }

    fn give_back(&mut self) -> bool {
        let rest = self.available();
        self.returned = saturating_sum(&self.returned, &rest);
        !rest.is_zero()
    }

    /// What was written of it is lost: all that the leader does not know to be given back counts as spent.
    fn write_off(&mut self, grant: &DurableGrant) {
        self.returned = self.returned.max(&grant.returned);
        let rest = self.granted.saturating_sub(&self.returned);
        self.spent = self.spent.max(&grant.spent).max(&rest);
        self.over = Amount::ZERO;
        self.closed = true;
    }

    fn usable(&self, now: u64) -> bool {
        !self.closed && self.until.is_none_or(|until| now < until)
    }
}

/// One lease on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseRow {
    /// Its account.
    pub account: AccountId,
    /// Its number.
    pub lease: LeaseId,
    /// Settled.
    pub spent: Amount,
    /// Given back.
    pub returned: Amount,
    /// Never used again.
    pub closed: bool,
}

/// What became of the leader's word.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GrantUpdate {
    /// What is on disk must change **before** anything is spent. `false` also for a deposed leader's word.
    pub changed: bool,
    /// Leases of which the leader knew more than the disk.
    pub lost: Vec<LeaseId>,
}

/// What one call holds until it is settled: the same amount of every lease.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Reservation {
    /// How much.
    pub amount: Amount,
    /// Of which leases, by account.
    pub leases: Vec<(AccountId, LeaseId)>,
}

/// An account that applies, and the kinds that it limits, per Agent or in all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccountDraw<'a> {
    /// Which.
    pub account: &'a str,
    /// Its limits; only the kinds matter here, and whether there may be nothing at all of one.
    pub limits: LimitAmounts,
}

/// Everything that a gateway holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Wallet {
    purses: BTreeMap<AccountId, AccountLeases>,
}

impl Wallet {
    /// From disk. Nothing can be spent until the leader has said what is granted.
    #[must_use]
    pub fn restore(
        epochs: impl IntoIterator<Item = (AccountId, i64)>,
        rows: impl IntoIterator<Item = LeaseRow>,
    ) -> Self {
        let mut wallet = Self::default();
        for (account, epoch) in epochs {
            wallet.purses.entry(account).or_default().epoch = epoch;
        }
        for row in rows {
            let held = HeldLease {
                spent: row.spent,
                returned: row.returned,
                closed: row.closed,
                ..HeldLease::default()
            };
            wallet
                .purses
                .entry(row.account)
                .or_default()
                .leases
                .insert(row.lease, held);
        }
        wallet
    }

    /// As it is on disk.
    pub fn rows(&self) -> impl Iterator<Item = LeaseRow> {
        self.purses.iter().flat_map(|(account, purse)| {
            purse.leases.iter().map(|(lease, held)| LeaseRow {
                account: account.clone(),
                lease: *lease,
                spent: held.spent,
                returned: held.returned,
                closed: held.closed,
            })
        })
    }

    /// Reserves `amount` in every account; all of them or none. The accounts that have too little, when some have.
    pub fn reserve(
        &mut self,
        draws: &[AccountDraw<'_>],
        amount: &Amount,
        now: u64,
    ) -> Result<Reservation, BTreeSet<AccountId>> {
        let mut leases = Vec::new();
        let mut short = BTreeSet::new();
        for draw in draws {
            let needed = amount.limited_by(&draw.limits);
            let found = self
                .purses
                .get(draw.account)
                .into_iter()
                .flat_map(|purse| purse.leases.iter().rev())
                .find(|(_, held)| held.usable(now) && held.available().covers(&needed))
                .filter(|_| draw.limits.zero_kind().is_none());
            match found {
                Some((lease, _)) => leases.push((draw.account.to_owned(), *lease)),
                None => {
                    short.insert(draw.account.to_owned());
                }
            }
        }
        if !short.is_empty() {
            return Err(short);
        }
        for (account, lease) in &leases {
            if let Some(held) = self.held_mut(account, *lease) {
                held.open = saturating_sum(&held.open, amount);
                held.calls = held.calls.saturating_add(1);
            }
        }
        Ok(Reservation {
            amount: *amount,
            leases,
        })
    }

    /// A call of a gateway that ended is open again, as its record says.
    pub fn reopen(&mut self, reservation: &Reservation) {
        for (account, lease) in &reservation.leases {
            let held = self
                .purses
                .entry(account.clone())
                .or_default()
                .leases
                .entry(*lease)
                .or_default();
            held.open = saturating_sum(&held.open, &reservation.amount);
            held.calls = held.calls.saturating_add(1);
        }
    }

    /// The call is over: `bill` of its reservation counts as spent, the rest may be spent again. A bill above the
    /// reservation is charged as it is.
    pub fn settle(&mut self, reservation: &Reservation, bill: &Amount) {
        for (account, lease) in &reservation.leases {
            if let Some(held) = self.held_mut(account, *lease) {
                held.open = held.open.saturating_sub(&reservation.amount);
                held.calls = held.calls.saturating_sub(1);
                held.spent = saturating_sum(&held.spent, bill);
                held.over = if held.calls == 0 {
                    Amount::ZERO
                } else {
                    saturating_sum(&held.over, &bill.saturating_sub(&reservation.amount))
                };
            }
        }
    }

    /// Gives back what no open call needs: of one account, or of all. Whether anything changed.
    pub fn give_back(&mut self, account: Option<&str>) -> bool {
        let mut changed = false;
        for (_, purse) in self
            .purses
            .iter_mut()
            .filter(|(id, _)| account.is_none_or(|account| account == id.as_str()))
        {
            for held in purse.leases.values_mut().filter(|held| !held.closed) {
                changed |= held.give_back();
            }
        }
        changed
    }

    /// Closes leases that are of no more use: of accounts that do not apply any more, or of a window that is over. Where
    /// a call is open, all that it does not need is given back. Whether anything changed.
    pub fn close_idle(&mut self, draws: &[AccountDraw<'_>], now: u64) -> bool {
        let mut changed = false;
        for (account, purse) in &mut self.purses {
            let applies = draws.iter().any(|draw| draw.account == account);
            for held in purse.leases.values_mut() {
                if held.closed || (applies && held.usable(now)) {
                    continue;
                }
                if held.calls == 0 {
                    (held.closed, changed) = (true, true);
                } else {
                    changed |= held.give_back();
                }
            }
        }
        changed
    }

    /// Closes every lease with nothing open: the loop sleeps, or the pod ends. Whether anything changed.
    pub fn close_all(&mut self) -> bool {
        self.close_idle(&[], 0)
    }

    /// What to say of every lease.
    pub fn statements(&self) -> impl Iterator<Item = (&str, LeaseStatement)> {
        self.purses.iter().flat_map(|(account, purse)| {
            let said = |(lease, held): (&LeaseId, &HeldLease)| (account.as_str(), held.statement(*lease));
            purse.leases.iter().map(said)
        })
    }

    /// What to ask of an account for one more call.
    #[must_use]
    pub fn grant_request(&self, account: &str, least: Amount, full: Amount, now: u64) -> GrantRequest {
        let current = self
            .purses
            .get(account)
            .and_then(|purse| purse.leases.iter().rev().find(|(_, held)| held.usable(now)));
        GrantRequest {
            lease: current.map(|(id, _)| *id),
            open: current.map_or(Amount::ZERO, |(_, held)| held.open),
            least,
            full,
        }
    }

    /// The leader's word about one account, from its record `epoch`: what is granted, and leases that it knows nothing
    /// of (any more), because all about them is accounted for. Each lease comes with its end on the boot-time clock.
    ///
    /// Where the leader heard of more than is on disk, the disk went back to an earlier state, such as a snapshot. Nobody
    /// knows what was spent since: the lease is closed, and all that was not given back counts as spent.
    pub fn apply_grants(
        &mut self,
        account: &str,
        epoch: i64,
        granted: &[(DurableGrant, Option<u64>)],
        forgotten: &[LeaseId],
    ) -> GrantUpdate {
        let purse = self.purses.entry(account.to_owned()).or_default();
        if epoch < purse.epoch {
            return GrantUpdate::default();
        }
        let mut changed = epoch > purse.epoch;
        let mut lost = Vec::new();
        purse.epoch = epoch;
        for (grant, until) in granted {
            let held = purse.leases.entry(grant.lease).or_insert_with(|| {
                changed = true;
                HeldLease::default()
            });
            held.granted = held.granted.max(&grant.granted);
            held.until = *until;
            if !held.spent.covers(&grant.spent) || !held.returned.covers(&grant.returned) {
                held.write_off(grant);
                lost.push(grant.lease);
                changed = true;
            }
        }
        for lease in forgotten {
            match purse.leases.get_mut(lease) {
                // What is in flight was counted as spent with it; its settlement will be said to nobody.
                Some(held) if held.calls > 0 => held.closed = true,
                Some(_) => {
                    purse.leases.remove(lease);
                }
                None => continue,
            }
            changed = true;
        }
        GrantUpdate { changed, lost }
    }

    /// The newest record heard of, by account.
    pub fn epochs(&self) -> impl Iterator<Item = (&str, i64)> {
        self.purses
            .iter()
            .map(|(account, purse)| (account.as_str(), purse.epoch))
    }

    /// What could be reserved of an account now.
    #[must_use]
    pub fn available(&self, account: &str, now: u64) -> Amount {
        self.purses
            .get(account)
            .and_then(|purse| purse.leases.values().rev().find(|held| held.usable(now)))
            .map_or(Amount::ZERO, HeldLease::available)
    }

    /// The kind of which an account has too little for `amount`.
    #[must_use]
    pub fn lacking(&self, draw: &AccountDraw<'_>, amount: &Amount, now: u64) -> Option<AmountKind> {
        let available = self.available(draw.account, now);
        draw.limits
            .kinds()
            .find(|kind| amount.get(*kind) > available.get(*kind) || draw.limits.get(*kind) == Some(0))
    }

    fn held_mut(&mut self, account: &str, lease: LeaseId) -> Option<&mut HeldLease> {
        self.purses.get_mut(account)?.leases.get_mut(&lease)
    }
}

#[cfg(test)]
#[path = "wallet_tests.rs"]
mod tests;
