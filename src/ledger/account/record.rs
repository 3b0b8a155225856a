//! Conversion between an account and its written record.

use std::collections::BTreeMap;

use jiff::Timestamp;

use super::lease::{Lease, LeaseTable};
use super::shares::AgentShares;
use super::{Account, CatchUpClock, DurableGrant, LeaseHolder, LeaseId, LedgerTerms};
use crate::sum::saturating_sum;
use crate::window::{PIECES, SettledUsage, WindowRule};
use agentloop_api::NamespacedName;
use agentloop_api::amount::Amount;
use agentloop_api::budget::{LeaseRecord, LedgerRecord};

impl Account {
    /// Restores an account at the start of a term. The whole amount of every lease is outstanding until its gateway
    /// reports. A window that differs from the record's was edited between terms, which means the same as
    /// [`Account::set_terms`].
    #[must_use]
    pub fn restore(terms: LedgerTerms, record: &LedgerRecord, now: Timestamp) -> Self {
        let mut leases = LeaseTable::default();
        for holder in &record.holders {
            leases.insert(holder.lease, held(holder));
        }
        let mut account = Self {
            epoch: record.epoch,
            time: record.watermark.max(now),
            slow: (record.watermark > now).then_some(CatchUpClock {
                from: record.watermark,
                since: now,
            }),
            window: (Timestamp::UNIX_EPOCH, None),
            due: Timestamp::MIN,
            next_lease: record.next_lease,
            charged: Amount::ZERO,
            settled: SettledUsage::restore(PIECES, &record.buckets),
            shares: AgentShares::restore(&record.shares),
            leases,
            top_ups: record.top_ups.clone(),
            waiting: Vec::new(),
            large: None,
            urgent: false,
            changed: false,
            terms,
        };
        if let Some(window) = &record.window
            && *window != account.terms.window.write()
        {
            // A window that cannot be parsed any more counts as the longest: nothing has expired.
            let old = WindowRule::read(window).unwrap_or(WindowRule::Lifetime);
            account.recount(&old, &account.terms.window.clone());
            account.changed = true;
        }
        account.refresh();
        account
    }

    /// The record to write over [`Account::epoch`], and only over it. From this call on it may have been written, so
    /// its grants are no longer withdrawn.
    #[must_use]
    pub fn compose(&mut self) -> LedgerRecord {
        self.leases.compose();
        self.record()
    }

    pub(super) fn record(&self) -> LedgerRecord {
        let live = self.leases.iter().filter(|(_, lease)| !lease.closed);
        let holders = live.map(|(id, lease)| LeaseRecord {
            lease: id,
            record: lease.who.record.clone(),
            pod_uid: lease.who.pod_uid.clone(),
            epoch: lease.who.epoch,
            namespace: lease.who.agent.namespace.clone(),
            name: lease.who.agent.name.clone(),
            window: lease.window,
            amount: lease.outstanding(),
            spent: lease.spent,
            returned: lease.returned,
        });
        LedgerRecord {
            epoch: self.epoch + 1,
            watermark: self.time,
            window: Some(self.terms.window.write()),
            next_lease: self.next_lease,
            buckets: self.settled.buckets(),
            holders: holders.collect(),
            top_ups: self.top_ups.clone(),
            shares: self.shares.record(),
        }
    }

    /// The record is written: its [`DurableGrant`]s may be sent to gateways.
    pub fn confirm_record(&mut self, record: &LedgerRecord) {
        self.epoch = record.epoch;
        let written: BTreeMap<LeaseId, Amount> = record
            .holders
            .iter()
            .map(|holder| (holder.lease, granted(holder)))
            .collect();
        self.leases
            .retain(|id, lease| !lease.closed || written.contains_key(&id));
        for (id, granted) in &written {
            self.leases
                .change(*id, |lease| lease.durable = lease.durable.max(granted));
        }
        // The account may have changed while the record was being written: compare instead of just resetting the flags.
        let now = self.record();
        let granted = self
            .leases
            .iter()
            .all(|(_, lease)| lease.durable.covers(&lease.granted));
        self.urgent = !granted || now.top_ups != record.top_ups;
        self.changed = self.urgent
            || (&now.window, &now.buckets, &now.holders, &now.shares)
                != (&record.window, &record.buckets, &record.holders, &record.shares);
    }

    /// No record was written since the last confirmed one: its grants may be withdrawn.
    pub fn discard_record(&mut self) {
        self.leases.discard_composed();
    }

    /// The leases of a gateway as written; those of past windows only so that they can be closed.
    #[must_use]
    pub fn durable_grants(&self, record: &str) -> Vec<DurableGrant> {
        let (start, end) = self.window;
        // A lease that is in no written record is not sent: its number is not final.
        let told = |lease: &Lease| !lease.closed && !lease.durable.is_zero();
        let live = self.leases.leases_of_record(record).filter(|(_, lease)| told(lease));
        live.map(|(id, lease)| DurableGrant {
            lease: id,
            granted: lease.durable,
            spent: lease.spent,
            returned: lease.returned,
            ends: if lease.window == start { end } else { Some(self.time) },
        })
        .collect()
    }
}

/// The total granted to a [`LeaseHolder`].
fn granted(holder: &LeaseRecord) -> Amount {
    saturating_sum(&holder.amount, &saturating_sum(&holder.spent, &holder.returned))
}

fn held(holder: &LeaseRecord) -> Lease {
    let who = LeaseHolder {
        record: holder.record.clone(),
        agent: NamespacedName::new(&holder.namespace, &holder.name),
        pod_uid: holder.pod_uid.clone(),
        epoch: holder.epoch,
    };
    Lease {
        granted: granted(holder),
        durable: granted(holder),
        spent: holder.spent,
        returned: holder.returned,
        ..Lease::new(who, holder.window)
    }
}
