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

#[cfg(test)]
mod tests {
    use agentloop_api::budget::{LeaseRecord, ShareRecord};
    use jiff::Timestamp;
    use rstest::rstest;

    use super::super::LeaseHolder;
    use super::*;
    use crate::window::{SHARE_PIECES, WindowRule};

    fn tokens(tokens: i64) -> Amount {
        Amount { tokens, ..Amount::ZERO }
    }

    fn lease() -> Lease {
        let who = LeaseHolder {
            record: "r".into(),
            agent: NamespacedName::new("n", "a"),
            pod_uid: "p".into(),
            epoch: 1,
        };
        Lease {
            granted: tokens(999),
            spent: tokens(333),
            returned: tokens(333),
            ..Lease::new(who, Timestamp::UNIX_EPOCH)
        }
    }

    fn written_lease(lease: &Lease) -> usize {
        let record = LeaseRecord {
            lease: 1,
            record: lease.who.record.clone(),
            pod_uid: lease.who.pod_uid.clone(),
            epoch: lease.who.epoch,
            namespace: lease.who.agent.namespace.clone(),
            name: lease.who.agent.name.clone(),
            window: lease.window,
            amount: lease.outstanding(),
            spent: lease.spent,
            returned: lease.returned,
        };
        serde_json::to_string(&record).unwrap().len()
    }

    /// A change of a lease, and how many more bytes are written then.
    type Growth = (fn(&mut Lease), usize);

    #[test]
    fn the_length_of_a_lease_grows_by_each_byte_that_is_written_for_it() {
        let growths: [Growth; 8] = [
            (|lease| lease.who.record.push('r'), 1),
            (|lease| lease.who.pod_uid.push('p'), 1),
            (|lease| lease.who.agent.namespace.push('n'), 1),
            (|lease| lease.who.agent.name.push('a'), 1),
            // Another digit of what is outstanding, spent and returned.
            (|lease| lease.granted.tokens += 667, 1),
            (|lease| (lease.granted.tokens, lease.spent.tokens) = (1_666, 1_000), 1),
            (
                |lease| (lease.granted.tokens, lease.returned.tokens) = (1_666, 1_000),
                1,
            ),
            // Another kind.
            (|lease| lease.granted.calls = 7, r#","calls":7"#.len()),
        ];
        for (grow, more) in growths {
            let (before, mut after) = (lease(), lease());
            grow(&mut after);
            assert_eq!(written_lease(&after), written_lease(&before) + more);
            assert_eq!(of_lease(&after), of_lease(&before) + more);
            assert!(of_lease(&after) >= written_lease(&after));
        }
    }

    #[test]
    fn a_closed_lease_has_no_length_because_it_is_not_written() {
        let closed = Lease {
            closed: true,
            ..lease()
        };
        assert_eq!(of_lease(&closed), 0);
    }

    #[rstest]
    #[case::namespace("nn", "a", 100)]
    #[case::name("n", "aa", 100)]
    #[case::a_digit("n", "a", 1_000)]
    fn the_length_of_a_share_grows_by_each_byte_that_is_written_for_it(
        #[case] namespace: &str,
        #[case] name: &str,
        #[case] used: i64,
    ) {
        let lengths = |namespace: &str, name: &str, used: i64| {
            let agent = NamespacedName::new(namespace, name);
            let mut settled = SettledUsage::new(SHARE_PIECES);
            settled.add(&WindowRule::Lifetime, Timestamp::UNIX_EPOCH, &tokens(used));
            let length = of_share(&agent, &settled);
            let share = ShareRecord {
                namespace: agent.namespace,
                name: agent.name,
                buckets: settled.buckets(),
            };
            (length, serde_json::to_string(&share).unwrap().len())
        };
        let (before, after) = (lengths("n", "a", 100), lengths(namespace, name, used));
        assert_eq!(after, (before.0 + 1, before.1 + 1));
        assert!(after.0 >= after.1, "{after:?}");
    }
}
