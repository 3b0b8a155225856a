//! A gateway's wallet: leases in every account that its Agent draws on, and the reservations of calls in flight.
//!
//! Required order: a change of `spent`, `returned` or the open reservations must be on the gateway's disk
//! ([`Wallet::rows`], and the reservation with its call) **before** it is acted on or reported. `granted` need not be:
//! the leader sends it again. So change a clone, commit it, then replace the wallet by the clone.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::account::{DurableGrant, GrantRequest, LeaseId, LeaseStatement};
use super::sum::saturating_sum;
use agentloop_api::amount::{Amount, AmountKind, LimitAmounts};

/// Id of an account: the uid of a budget, or the uid of an Agent with the name of its own limit.
pub type AccountId = String;

#[derive(Clone, Debug, Default, PartialEq)]
struct AccountLeases {
    /// Epoch of the newest ledger record seen; an answer with an older one is from a deposed leader.
    epoch: i64,
    leases: BTreeMap<LeaseId, HeldLease>,
}

/// One lease at its gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct HeldLease {
    granted: Amount,
    spent: Amount,
    returned: Amount,
    open: Amount,
    /// The part of [`Self::spent`] billed above reservations while calls are open on the lease. It is reported once
    /// none is open; before that, the leader would deduct it from what those calls still hold.
    over: Amount,
    /// Number of calls open on the lease.
    calls: u32,
    /// End of its use for new calls, in milliseconds of the lease clock. `None`: no end by time.
    until: Option<u64>,
    /// Never spent from again; kept until the leader has its final numbers.
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

    /// Handles lost data about the lease: everything not known to be returned counts as spent.
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

/// One [`HeldLease`] on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseRow {
    /// Id of its account.
    pub account: AccountId,
    /// Its number.
    pub lease: LeaseId,
    /// Total settled.
    pub spent: Amount,
    /// Total returned.
    pub returned: Amount,
    /// Whether it is closed for good.
    pub closed: bool,
}

/// The result of applying an answer of the leader.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GrantUpdate {
    /// Whether the change must be written to disk **before** anything is spent. `false` for a deposed leader's answer.
    pub changed: bool,
    /// Leases about which the leader knew more than the disk.
    pub lost: Vec<LeaseId>,
}

/// What one call holds until it is settled: the same amount of every [`HeldLease`].
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Reservation {
    /// The amount.
    pub amount: Amount,
    /// The leases, by account.
    pub leases: Vec<(AccountId, LeaseId)>,
}

/// An account that applies to a call, and the kinds that it limits, per Agent or in total.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccountDraw<'a> {
    /// Id of the account.
    pub account: &'a str,
    /// Its limits; only the set of kinds matters here, and which limits are 0.
    pub limits: LimitAmounts,
}

/// All leases and reservations of a gateway.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Wallet {
    purses: BTreeMap<AccountId, AccountLeases>,
}

impl Wallet {
    /// Restores the wallet from disk. Nothing can be spent until the leader has confirmed the [`DurableGrant`]s.
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

    /// The [`HeldLease`]s to be written to disk.
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

    /// Reserves `amount` in every account, or in none. `Err`: the accounts that hold too little.
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
            // One lease per account must cover the whole call, newest first: a call that is split over two leases could
            // not be settled against numbers of each.
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

    /// Reopens a call that was recorded as open by an earlier gateway.
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

    /// Settles a call: `bill` counts as spent, the rest of the reservation becomes available. A bill above the
    /// reservation is charged in full.
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

    /// Returns what no open call needs, of one account or of all. Returns whether anything changed.
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

    /// Closes leases of accounts that no longer apply, and of windows that have ended. If calls are open on a lease,
    /// returns what they do not need instead. Returns whether anything changed.
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

    /// Closes every [`HeldLease`] without open calls, because the loop sleeps or the pod ends. Returns whether anything
    /// changed.
    pub fn close_all(&mut self) -> bool {
        self.close_idle(&[], 0)
    }

    /// The [`LeaseStatement`]s about all leases.
    pub fn statements(&self) -> impl Iterator<Item = (&str, LeaseStatement)> {
        self.purses.iter().flat_map(|(account, purse)| {
            let statement = |(lease, held): (&LeaseId, &HeldLease)| (account.as_str(), held.statement(*lease));
            purse.leases.iter().map(statement)
        })
    }

    /// The [`GrantRequest`] for one more call to an account.
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

    /// Applies the leader's answer for one account from its record `epoch`: the [`DurableGrant`]s, and the leases it
    /// does not know (any more) because they are completely accounted for. Each grant comes with its end on the lease
    /// clock.
    ///
    /// If the leader knows more than the disk, the disk was restored to an earlier state, for example from a snapshot,
    /// and what was spent since is unknown: the lease is closed, and everything not returned counts as spent.
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
            // Grants only grow, so a repeated answer changes nothing.
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
                // Open calls were counted as spent with the lease, so their settlement is not reported any more.
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

    /// The newest ledger epoch seen, by account.
    pub fn epochs(&self) -> impl Iterator<Item = (&str, i64)> {
        self.purses
            .iter()
            .map(|(account, purse)| (account.as_str(), purse.epoch))
    }

    /// The amount that could be reserved in an account now.
    #[must_use]
    pub fn available(&self, account: &str, now: u64) -> Amount {
        self.purses
            .get(account)
            .and_then(|purse| purse.leases.values().rev().find(|held| held.usable(now)))
            .map_or(Amount::ZERO, HeldLease::available)
    }

    /// The first kind of which an account holds too little for `amount`.
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
