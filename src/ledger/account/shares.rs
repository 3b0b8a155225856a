//! Usage of one account by each Agent in the current window.

use std::collections::BTreeMap;

use jiff::Timestamp;

use super::record_size;
use crate::window::{SHARE_PIECES, SettledUsage, WindowRule};
use agentloop_api::NamespacedName;
use agentloop_api::amount::Amount;
use agentloop_api::budget::ShareRecord;

/// Maximum number of Agents whose usage is tracked separately; fewer if names and amounts are long, since the record
/// must stay far below what the API server accepts. The Agents with the least usage then share one line: each of them
/// counts as if it had used the most of any of them, so that its limit is never exceeded.
pub const MAX_SHARES: usize = 1_000;

#[derive(Clone, Debug, PartialEq)]
pub(super) struct AgentShares {
    of: BTreeMap<NamespacedName, SettledUsage>,
    /// Usage for Agents without their own line: at least that of any of them.
    others: SettledUsage,
    /// Approximate length of all lines in a record, in bytes.
    length: usize,
}

impl AgentShares {
    pub(super) fn restore(shares: &[ShareRecord]) -> Self {
        let mut restored = Self {
            of: BTreeMap::new(),
            others: SettledUsage::new(SHARE_PIECES),
            length: 0,
        };
        for share in shares {
            let agent = NamespacedName::new(&share.namespace, &share.name);
            let settled = SettledUsage::restore(SHARE_PIECES, &share.buckets);
            if agent == NamespacedName::default() {
                restored.others = settled;
            } else {
                restored.of.insert(agent, settled);
            }
        }
        restored.measure();
        restored
    }

    fn measure(&mut self) {
        self.length = self
            .of
            .iter()
            .map(|(agent, share)| record_size::of_share(agent, share))
            .sum();
    }

    /// The lines to be written; that of the others has no name.
    pub(super) fn record(&self) -> Vec<ShareRecord> {
        let others = (NamespacedName::default(), &self.others);
        let lines = self.of.iter().map(|(agent, settled)| (agent.clone(), settled));
        std::iter::once(others)
            .filter(|(_, settled)| !settled.total().is_zero())
            .chain(lines)
            .map(|(agent, settled)| ShareRecord {
                namespace: agent.namespace,
                name: agent.name,
                buckets: settled.buckets(),
            })
            .collect()
    }

    pub(super) fn of(&self, agent: &NamespacedName) -> &SettledUsage {
        self.of.get(agent).unwrap_or(&self.others)
    }

    pub(super) fn add(&mut self, rule: &WindowRule, now: Timestamp, agent: &NamespacedName, amount: &Amount) {
        let known = self.of.remove(agent);
        let before = known.as_ref().map_or(0, |share| record_size::of_share(agent, share));
        let mut share = known.unwrap_or_else(|| self.others.clone());
        share.add(rule, now, amount);
        self.length = (self.length + record_size::of_share(agent, &share)).saturating_sub(before);
        self.of.insert(agent.clone(), share);
        while self.of.len() > MAX_SHARES || self.length > record_size::SHARES {
            self.join_least();
        }
    }

    fn join_least(&mut self) {
        let used = |settled: &SettledUsage| (settled.total().tokens, settled.total().cost);
        let smallest = self.of.iter().min_by_key(|(_, settled)| used(settled));
        let smallest = smallest.map(|(agent, _)| agent.clone());
        if let Some((agent, share)) = smallest.and_then(|agent| self.of.remove_entry(&agent)) {
            self.length = self.length.saturating_sub(record_size::of_share(&agent, &share));
            self.others.raise_to(&share);
        }
    }

    /// Drops what has expired. Returns when the next [`SettledUsage`] expires.
    pub(super) fn advance(&mut self, rule: &WindowRule, now: Timestamp) -> Option<Timestamp> {
        self.others.advance(rule, now);
        let mut next = self.others.expiries(rule).next();
        self.of.retain(|_, share| {
            share.advance(rule, now);
            next = share.expiries(rule).next().into_iter().chain(next).min();
            !share.total().is_zero()
        });
        self.measure();
        next
    }

    pub(super) fn translate(&mut self, old: &WindowRule, new: &WindowRule, now: Timestamp) {
        self.others.translate(old, new, now);
        for share in self.of.values_mut() {
            share.translate(old, new, now);
        }
        self.measure();
    }

    /// In descending order by tokens, then by cost.
    pub(super) fn sorted(&self) -> Vec<(NamespacedName, Amount)> {
        let lines = self.of.iter();
        let mut shares: Vec<_> = lines.map(|(agent, share)| (agent.clone(), share.total())).collect();
        shares.sort_by(|(a, x), (b, y)| (y.tokens, y.cost).cmp(&(x.tokens, x.cost)).then_with(|| a.cmp(b)));
        shares
    }
}
