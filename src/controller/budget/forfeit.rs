//! Which gateways have stopped for certain, so that what they hold may be forfeited. Pure.
//!
//! A gateway's record is on its Agent's volume. If the volume outlives the pod, the next pod finds the record and
//! reports exactly what was spent. A holder without a pod is therefore lost only if its record cannot return (the Agent
//! was deleted, its storage was ephemeral, or the Agent's present pod reports with another record). Otherwise it is
//! missing, and each account decides how long it waits. Forfeiting too early costs room in one window and never frees
//! any. It must never happen to a gateway that may still make calls: what it spends later would count in no window. A
//! pod that ended makes no more calls. One whose object is gone may still run, on an unreachable node: for its run
//! lease, and the duration of a call.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};

use crate::api::NamespacedName;
use crate::ledger::account::LeaseHolder;
use crate::link::messages::RUN_LEASE_SECONDS;

/// How long a pod must have ended before its end counts, since watches may lag behind.
pub const WATCH_LAG: SignedDuration = SignedDuration::from_secs(10);
/// Shortest wait for a record on a volume that outlives its pod.
pub const RECORD_WAIT: SignedDuration = SignedDuration::from_mins(5);
/// How long a gateway without contact may make calls.
const RUN_LEASE: SignedDuration = SignedDuration::from_secs(RUN_LEASE_SECONDS.cast_signed());
/// Longest call of an Agent that is no longer known: the default of `spec.model.timeoutSeconds`.
const MAX_CALL: SignedDuration = SignedDuration::from_mins(5);

/// The relevant facts about a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodFacts {
    pub uid: String,
    /// Whether it ended for good.
    pub ended: bool,
}

/// The record that a gateway uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CurrentRecord {
    pub record: String,
    pub pod_uid: String,
}

/// What is known about pods and the records that gateways use.
#[derive(Clone, Debug, Default)]
pub struct HolderLiveness {
    /// The pod of each Agent.
    pub pods: BTreeMap<NamespacedName, PodFacts>,
    /// The record that each Agent's present gateway uses.
    pub current_records: BTreeMap<NamespacedName, CurrentRecord>,
    /// The longest call of each Agent; kept for deleted Agents as long as leases of them are open.
    pub calls: BTreeMap<NamespacedName, SignedDuration>,
    /// Uids of pods that were seen to have ended.
    ended: BTreeSet<String>,
    /// Since when the pod of a record has been missing.
    missing: BTreeMap<String, Timestamp>,
}

/// What is known of a [`LeaseHolder`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HolderState {
    /// It may call, or its next pod may soon report what it spent.
    MayCall,
    /// It makes no more calls, and its record has not returned for this long.
    Missing(SignedDuration),
    /// It makes no more calls, and its record cannot return.
    Lost,
}

/// Whether an Agent, and with it the gateway's record, may return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordPersistence {
    /// The volume outlives the pod.
    Volume,
    /// The storage was deleted with the pod.
    Ephemeral,
    /// The Agent was deleted.
    Gone,
}

impl HolderLiveness {
    pub fn pod_seen(&mut self, agent: &NamespacedName, pod: PodFacts) {
        if pod.ended {
            self.ended.insert(pod.uid.clone());
        }
        self.pods.insert(agent.clone(), pod);
    }

    /// The state of the gateway with this record.
    pub fn holder_state(
        &mut self,
        holder: &LeaseHolder,
        agent: &NamespacedName,
        persistence: RecordPersistence,
        now: Timestamp,
    ) -> HolderState {
        let alive = self
            .pods
            .get(agent)
            .is_some_and(|pod| pod.uid == holder.pod_uid && !pod.ended);
        // The gateways of one pod run one after the other, so another record of the same pod means that the old one is
        // lost.
        let successor = self
            .current_records
            .get(agent)
            .filter(|current| current.record != holder.record);
        if successor.is_some_and(|current| current.pod_uid == holder.pod_uid) {
            return HolderState::Lost;
        }
        if alive {
            self.missing.remove(&holder.record);
            return HolderState::MayCall;
        }
        let since = *self.missing.entry(holder.record.clone()).or_insert(now);
        let missing = now.duration_since(since);
        let call = self.calls.get(agent).copied().unwrap_or(MAX_CALL);
        let stopped = if self.ended.contains(&holder.pod_uid) {
            WATCH_LAG
        } else {
            RUN_LEASE.saturating_add(call)
        };
        match persistence {
            _ if missing < stopped => HolderState::MayCall,
            RecordPersistence::Volume if successor.is_none() && missing < RECORD_WAIT => HolderState::MayCall,
            RecordPersistence::Volume if successor.is_none() => HolderState::Missing(missing),
            RecordPersistence::Volume | RecordPersistence::Ephemeral | RecordPersistence::Gone => HolderState::Lost,
        }
    }

    /// Drops what is no longer needed. `holders`: the records with open leases, each with its Agent and its pod.
    pub fn retain(
        &mut self,
        holders: &BTreeMap<String, (NamespacedName, String)>,
        known: impl Fn(&NamespacedName) -> bool,
    ) {
        self.missing.retain(|record, _| holders.contains_key(record));
        if !self.ended.is_empty() {
            let held = holders.values().map(|(_, uid)| uid);
            let uids: BTreeSet<&String> = held.chain(self.pods.values().map(|pod| &pod.uid)).collect();
            self.ended.retain(|uid| uids.contains(uid));
        }
        let agents: BTreeSet<&NamespacedName> = holders.values().map(|(agent, _)| agent).collect();
        self.calls.retain(|agent, _| agents.contains(agent) || known(agent));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent() -> NamespacedName {
        NamespacedName::new("ns", "a")
    }

    fn holder() -> LeaseHolder {
        LeaseHolder {
            record: "one".into(),
            agent: agent(),
            pod_uid: "pod-1".into(),
            epoch: 1,
        }
    }

    fn at(seconds: i64) -> Timestamp {
        Timestamp::constant(seconds, 0)
    }

    fn seconds(seconds: i64) -> SignedDuration {
        SignedDuration::from_secs(seconds)
    }

    fn current(record: &str, pod_uid: &str) -> CurrentRecord {
        CurrentRecord {
            record: record.into(),
            pod_uid: pod_uid.into(),
        }
    }

    fn liveness(pod: Option<(&str, bool)>) -> HolderLiveness {
        let mut liveness = HolderLiveness::default();
        if let Some((uid, ended)) = pod {
            liveness.pod_seen(&agent(), PodFacts { uid: uid.into(), ended });
        }
        liveness
    }

    /// The first of 2,000 seconds in which the state is not `MayCall`, and that state.
    fn turns(liveness: &mut HolderLiveness, persistence: RecordPersistence) -> Option<(i64, HolderState)> {
        let states = (0..2_000).map(|second| {
            (
                second,
                liveness.holder_state(&holder(), &agent(), persistence, at(second)),
            )
        });
        states.into_iter().find(|(_, state)| *state != HolderState::MayCall)
    }

    #[test]
    fn a_holder_without_a_pod_is_lost_if_its_record_cannot_return() {
        // The run lease and the longest call.
        let partitioned = 60 + 300;
        for (pod, persistence, turn) in [
            (Some(("pod-1", false)), RecordPersistence::Volume, None),
            (Some(("pod-1", false)), RecordPersistence::Gone, None),
            (
                Some(("pod-1", true)),
                RecordPersistence::Ephemeral,
                Some((10, HolderState::Lost)),
            ),
            (
                Some(("pod-1", true)),
                RecordPersistence::Volume,
                Some((300, HolderState::Missing(seconds(300)))),
            ),
            (
                Some(("pod-2", false)),
                RecordPersistence::Ephemeral,
                Some((partitioned, HolderState::Lost)),
            ),
            (None, RecordPersistence::Gone, Some((partitioned, HolderState::Lost))),
            (
                None,
                RecordPersistence::Volume,
                Some((partitioned, HolderState::Missing(seconds(partitioned)))),
            ),
            (
                Some(("pod-2", false)),
                RecordPersistence::Volume,
                Some((partitioned, HolderState::Missing(seconds(partitioned)))),
            ),
        ] {
            assert_eq!(turns(&mut liveness(pod), persistence), turn, "{pod:?} {persistence:?}");
        }
        let mut slow = liveness(None);
        slow.calls.insert(agent(), SignedDuration::from_mins(20));
        assert_eq!(
            turns(&mut slow, RecordPersistence::Gone),
            Some((60 + 1_200, HolderState::Lost))
        );
        // Its object is gone as well, but it was seen to have ended.
        let mut gone = liveness(Some(("pod-1", true)));
        gone.pods.clear();
        assert_eq!(turns(&mut gone, RecordPersistence::Gone), Some((10, HolderState::Lost)));
    }

    #[test]
    fn another_record_of_the_present_pod_ends_the_old_one() {
        let mut seen = liveness(Some(("pod-1", false)));
        seen.current_records.insert(agent(), current("two", "pod-1"));
        assert_eq!(
            turns(&mut seen, RecordPersistence::Volume),
            Some((0, HolderState::Lost))
        );
        // The pod of the old record may still run on an unreachable node.
        let mut seen = liveness(Some(("pod-2", false)));
        seen.current_records.insert(agent(), current("two", "pod-2"));
        assert_eq!(
            turns(&mut seen, RecordPersistence::Volume),
            Some((360, HolderState::Lost))
        );
        let mut seen = liveness(Some(("pod-2", false)));
        seen.current_records.insert(agent(), current("one", "pod-2"));
        assert_eq!(
            turns(&mut seen, RecordPersistence::Volume),
            Some((360, HolderState::Missing(seconds(360)))),
            "the same record is the same holder"
        );
    }

    #[test]
    fn a_pod_that_reappears_in_the_watch_restarts_the_wait() {
        let mut seen = liveness(None);
        let lives = |seen: &mut HolderLiveness, second| {
            seen.holder_state(&holder(), &agent(), RecordPersistence::Gone, at(second)) == HolderState::MayCall
        };
        assert!(lives(&mut seen, 0));
        seen.pods = liveness(Some(("pod-1", false))).pods;
        assert!(lives(&mut seen, 359));
        seen.pods.clear();
        assert!(lives(&mut seen, 361) && lives(&mut seen, 720));
        assert!(!lives(&mut seen, 721));
    }
}
