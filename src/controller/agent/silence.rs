//! Notices pods that fell silent, and those that speak again. One sweep for all Agents instead of a timer for each.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use super::memory::Memory;
use crate::controller::loops::{AgentKey, Loops};
use crate::link::messages::RUN_LEASE_SECONDS;

/// Time between two sweeps.
pub(super) const SWEEP: Duration = Duration::from_secs(5);

/// Whether a pod that is listened to since `since` has been silent for the whole run lease.
pub(super) fn is_silent(last_contact: Option<Timestamp>, since: Timestamp, now: Timestamp) -> bool {
    let lease = SignedDuration::from_secs(i64::try_from(RUN_LEASE_SECONDS).unwrap_or(i64::MAX));
    let heard = last_contact.map_or(since, |contact| contact.max(since));
    now.duration_since(heard) >= lease
}

/// Agents whose silence began or ended since it was last looked at.
pub(super) fn changed(memory: &Memory, loops: &Loops, now: Timestamp) -> Vec<AgentKey> {
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
    fn a_restarted_controller_counts_from_its_own_start() {
        assert!(!is_silent(None, at(100), at(159)));
        assert!(is_silent(None, at(100), at(160)));
    }
}
