//! The leases of one account, with outstanding sums in total, per Agent and per gateway record.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use super::{LeaseHolder, LeaseId, MAX_LEASES, record_size};
use crate::sum::{AmountSum, saturating_sum};
use agentloop_api::NamespacedName;
use agentloop_api::amount::Amount;

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Lease {
    pub(super) who: LeaseHolder,
    /// Beginning of the window it was granted in; 1970: it counts in whatever window it is spent.
    pub(super) window: Timestamp,
    pub(super) granted: Amount,
    /// The part of [`Self::granted`] that is written.
    pub(super) durable: Amount,
    /// The part of [`Self::granted`] in a record that may be written at any moment.
    pub(super) composed: Amount,
    pub(super) spent: Amount,
    pub(super) returned: Amount,
    /// Closed leases are kept until that is written: a gateway that forgot one earlier could not report it to the next
    /// leader.
    pub(super) closed: bool,
}

impl Lease {
    pub(super) fn new(who: LeaseHolder, window: Timestamp) -> Self {
        Self {
            who,
            window,
            granted: Amount::ZERO,
            durable: Amount::ZERO,
            composed: Amount::ZERO,
            spent: Amount::ZERO,
            returned: Amount::ZERO,
            closed: false,
        }
    }

    /// What the gateway was granted, or may still be granted without another decision.
    fn committed(&self) -> Amount {
        self.durable.max(&self.composed)
    }

    pub(super) fn base(&self) -> Amount {
        saturating_sum(&self.spent, &self.returned)
    }

    pub(super) fn outstanding(&self) -> Amount {
        if self.closed {
            Amount::ZERO
        } else {
            self.granted.saturating_sub(&self.base())
        }
    }
}

/// All leases of an account. Every change goes through this type, so that the sums match the leases.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct LeaseTable {
    all: BTreeMap<LeaseId, Lease>,
    of_record: BTreeMap<String, BTreeSet<LeaseId>>,
    of_agent: BTreeMap<NamespacedName, AmountSum>,
    outstanding: AmountSum,
    /// Approximate length of all leases in a record, in bytes.
    length: usize,
}

impl LeaseTable {
    pub(super) fn get(&self, id: LeaseId) -> Option<&Lease> {
        self.all.get(&id)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (LeaseId, &Lease)> {
        self.all.iter().map(|(id, lease)| (*id, lease))
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether another lease might be too much for a record.
    pub(super) fn are_full(&self) -> bool {
        self.all.len() >= MAX_LEASES || self.length >= record_size::LEASES
    }

    /// The leases of one gateway's record, newest last.
    pub(super) fn leases_of_record(&self, record: &str) -> impl DoubleEndedIterator<Item = (LeaseId, &Lease)> {
        let ids = self.of_record.get(record).into_iter().flatten();
        ids.filter_map(|id| Some((*id, self.all.get(id)?)))
    }

    pub(super) fn insert(&mut self, id: LeaseId, lease: Lease) {
        self.remove(id);
        self.of_record.entry(lease.who.record.clone()).or_default().insert(id);
        self.count(&lease.who.agent, &Amount::ZERO, &lease.outstanding());
        self.length += record_size::of_lease(&lease);
        self.all.insert(id, lease);
    }

    /// Changes a lease, but never its record or Agent.
    pub(super) fn change<T>(&mut self, id: LeaseId, change: impl FnOnce(&mut Lease) -> T) -> Option<T> {
        let mut lease = self.all.remove(&id)?;
        let before = lease.outstanding();
        self.length = self.length.saturating_sub(record_size::of_lease(&lease));
        let result = change(&mut lease);
        self.length += record_size::of_lease(&lease);
        let after = lease.outstanding();
        if before != after {
            self.count(&lease.who.agent, &before, &after);
        }
        self.all.insert(id, lease);
        Some(result)
    }

    /// Detaches all leases from their windows after a change of the window rule: they count when they are spent.
    pub(super) fn detach_windows(&mut self) {
        for lease in self.all.values_mut() {
            lease.window = Timestamp::UNIX_EPOCH;
        }
    }

    /// Withdraws grants that are in no record yet.
    pub(super) fn drop_planned(&mut self) {
        let planned = self.iter().filter(|(_, lease)| lease.granted != lease.committed());
        let planned: Vec<LeaseId> = planned.map(|(id, _)| id).collect();
        for id in planned {
            self.change(id, |lease| lease.granted = lease.committed());
        }
        self.retain(|_, lease| lease.closed || !lease.granted.is_zero());
    }

    /// All grants are in a record from now on.
    pub(super) fn compose(&mut self) {
        for lease in self.all.values_mut() {
            lease.composed = lease.granted;
        }
    }

    /// Forgets the records that were composed but not written.
    pub(super) fn discard_composed(&mut self) {
        for lease in self.all.values_mut() {
            lease.composed = lease.durable;
        }
    }

    pub(super) fn retain(&mut self, keep: impl Fn(LeaseId, &Lease) -> bool) {
        let over: Vec<LeaseId> = self
            .iter()
            .filter(|(id, lease)| !keep(*id, lease))
            .map(|(id, _)| id)
            .collect();
        for id in over {
            self.remove(id);
        }
    }

    fn remove(&mut self, id: LeaseId) {
        let Some(lease) = self.all.remove(&id) else { return };
        self.count(&lease.who.agent, &lease.outstanding(), &Amount::ZERO);
        self.length = self.length.saturating_sub(record_size::of_lease(&lease));
        if let Some(ids) = self.of_record.get_mut(&lease.who.record) {
            ids.remove(&id);
            if ids.is_empty() {
                self.of_record.remove(&lease.who.record);
            }
        }
    }

    fn count(&mut self, agent: &NamespacedName, before: &Amount, after: &Amount) {
        self.outstanding.take(before);
        self.outstanding.add(after);
        if !self.of_agent.contains_key(agent) {
            self.of_agent.insert(agent.clone(), AmountSum::default());
        }
        if let Some(sum) = self.of_agent.get_mut(agent) {
            sum.take(before);
            sum.add(after);
            if sum.is_zero() {
                self.of_agent.remove(agent);
            }
        }
    }

    /// Outstanding in total.
    pub(super) fn outstanding(&self) -> Amount {
        self.outstanding.amount()
    }

    /// Number of Agents with outstanding amounts.
    pub(super) fn agents(&self) -> usize {
        self.of_agent.len()
    }

    /// The same, including this Agent.
    pub(super) fn agents_with(&self, agent: &NamespacedName) -> usize {
        self.of_agent.len() + usize::from(!self.of_agent.contains_key(agent))
    }

    /// Outstanding of one Agent.
    pub(super) fn outstanding_of(&self, agent: &NamespacedName) -> Amount {
        self.of_agent.get(agent).map_or(Amount::ZERO, AmountSum::amount)
    }

    /// Outstanding of one gateway's record.
    pub(super) fn outstanding_at(&self, record: &str) -> Amount {
        let mut sum = AmountSum::default();
        for (_, lease) in self.leases_of_record(record) {
            sum.add(&lease.outstanding());
        }
        sum.amount()
    }
}
