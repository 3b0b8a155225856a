//! Length of an account's record, which must stay far below what the API server accepts: 1.5 MiB for the whole object.

use strum::IntoEnumIterator;

use super::lease::Lease;
use crate::window::SettledUsage;
use agentloop_api::NamespacedName;
use agentloop_api::amount::{Amount, AmountKind};

/// Bytes of all leases from which on no more are created.
pub(super) const LEASES: usize = 420_000;
/// Bytes of all Agents' lines from which on the Agents with the least [`SettledUsage`] share one line.
pub(super) const SHARES: usize = 230_000;
/// Field names, punctuation and a timestamp around the variable parts.
const LEASE: usize = 180;
const SHARE: usize = 42;
const BUCKET: usize = 50;

/// Length of a written lease; a closed one is not written.
pub(super) fn of_lease(lease: &Lease) -> usize {
    if lease.closed {
        return 0;
    }
    let who = &lease.who;
    let amounts = [lease.outstanding(), lease.spent, lease.returned];
    LEASE + who.record.len() + who.pod_uid.len() + of_agent(&who.agent) + amounts.iter().map(of_amount).sum::<usize>()
}

/// Length of an Agent's line.
pub(super) fn of_share(agent: &NamespacedName, settled: &SettledUsage) -> usize {
    let buckets = settled.amounts().map(|amount| BUCKET + of_amount(amount));
    SHARE + of_agent(agent) + buckets.sum::<usize>()
}

fn of_agent(agent: &NamespacedName) -> usize {
    agent.namespace.len() + agent.name.len()
}

fn of_amount(amount: &Amount) -> usize {
    let digits = |number: i64| {
        number
            .checked_ilog10()
            .map_or(1, |log| usize::try_from(log).unwrap_or(0) + 1)
    };
    let kinds = AmountKind::iter().filter(|kind| amount.get(*kind) != 0);
    // Quotes, a colon and a comma.
    kinds
        .map(|kind| kind.as_ref().len() + 4 + digits(amount.get(kind)))
        .sum()
}
