//! Detects pods that have lost contact or regained it, and decides when a silent pod can no longer act. One sweep
//! covers all Agents, instead of one timer each.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use super::reconcile_state::ReconcileStates;
use crate::api::NamespacedName;
use crate::controller::pod_sessions::PodSessions;
use crate::link::messages::RUN_LEASE_SECONDS;

/// Interval between two sweeps.
pub(super) const SWEEP: Duration = Duration::from_secs(5);

/// Whether a pod that is monitored since `since` has been silent for the whole run lease.
pub(super) fn is_silent(last_contact: Option<Timestamp>, since: Timestamp, now: Timestamp) -> bool {
    now.duration_since(silent_since(last_contact, since)) >= run_lease()
}

/// Whether nothing of a silent pod can still act, wherever it runs. A worker starts nothing after its run lease has
/// expired, and what it started before ends within the longest timeout of its tools.
pub(super) fn can_act_no_more(
    last_contact: Option<Timestamp>,
    since: Timestamp,
    longest_run: SignedDuration,
    now: Timestamp,
) -> bool {
    now.duration_since(silent_since(last_contact, since)) >= run_lease().saturating_add(longest_run)
}

fn silent_since(last_contact: Option<Timestamp>, since: Timestamp) -> Timestamp {
    last_contact.map_or(since, |contact| contact.max(since))
}

fn run_lease() -> SignedDuration {
    SignedDuration::from_secs(i64::try_from(RUN_LEASE_SECONDS).unwrap_or(i64::MAX))
}

/// Agents whose silence began or ended since the last reconcile noticed it.
pub(super) fn changed_agents(memory: &ReconcileStates, loops: &PodSessions, now: Timestamp) -> Vec<NamespacedName> {
    let listening = memory.listening();
    listening
        .into_iter()
        .filter(|(agent, uid, since, noticed)| is_silent(loops.last_contact(agent, uid), *since, now) != *noticed)
        .map(|(agent, ..)| agent)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + second).unwrap()
    }

    #[test]
    fn silence_starts_at_sixty_seconds_and_not_at_fifty_nine() {
        assert!(!is_silent(Some(at(10)), at(0), at(69)));
        assert!(is_silent(Some(at(10)), at(0), at(70)));
    }

    #[test]
    fn a_silent_pod_can_act_for_the_run_lease_and_its_longest_tool_run_and_not_a_second_more() {
        let over = |run: i64, now: i64| can_act_no_more(Some(at(10)), at(0), SignedDuration::from_secs(run), at(now));
        assert!(!over(0, 69) && over(0, 70));
        assert!(!over(300, 369) && over(300, 370));
        let unseen = |now: i64| can_act_no_more(None, at(100), SignedDuration::from_secs(5), at(now));
        assert!(
            !unseen(164) && unseen(165),
            "a restarted controller counts from its own start"
        );
    }

    #[test]
    fn a_restarted_controller_counts_from_its_own_start() {
        assert!(!is_silent(None, at(100), at(159)));
        assert!(is_silent(None, at(100), at(160)));
    }
}
