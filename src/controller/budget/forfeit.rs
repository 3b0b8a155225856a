//! Which gateways have stopped for certain, so that what they hold may be forfeited. Pure.
//!
//! A gateway's record is on its Agent's volume. If the volume outlives the pod, the next pod finds the record and
//! reports exactly what was spent. A holder without a pod is therefore lost only if its record cannot return (the Agent
//! was deleted, its storage was ephemeral, or the Agent's present pod reports with another record). Otherwise it is
//! silent, and each account decides how long it waits. Forfeiting too early costs room in one window and never frees
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
const LONGEST_CALL: SignedDuration = SignedDuration::from_mins(5);

/// The relevant facts about a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodFacts {
    pub uid: String,
    /// Whether it ended for good.
    pub ended: bool,
}

/// What is known about pods and the records that gateways use.
#[derive(Clone, Debug, Default)]
pub struct HolderLiveness {
    /// The pod of each Agent.
    pub pods: BTreeMap<NamespacedName, PodFacts>,
    /// The record that the Agent's present gateway uses, and the uid of its pod.
    pub speakers: BTreeMap<NamespacedName, (String, String)>,
    /// The longest call of each Agent; kept for deleted Agents as long as leases of them are open.
    pub calls: BTreeMap<NamespacedName, SignedDuration>,
    /// Uids of pods that were seen to have ended.
    ended: BTreeSet<String>,
    /// Since when the pod of a record has been missing.
    missing: BTreeMap<String, Timestamp>,
}

/// What is known of a [`LeaseHolder`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HolderFate {
    /// It may call, or its next pod may soon say what it spent.
    Lives,
    /// It makes no more calls, and its record has not returned for so long.
    Silent(SignedDuration),
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

    /// The fate of the gateway with this record.
    pub fn holder_fate(
        &mut self,
        who: &LeaseHolder,
        agent: &NamespacedName,
        hope: RecordPersistence,
        now: Timestamp,
    ) -> HolderFate {
        let alive = self
            .pods
            .get(agent)
            .is_some_and(|pod| pod.uid == who.pod_uid && !pod.ended);
        // The gateways of one pod run one after the other, so another record of the same pod means that the old one is
        // lost.
        let speaker = self.speakers.get(agent).filter(|(record, _)| *record != who.record);
        if speaker.is_some_and(|(_, pod_uid)| *pod_uid == who.pod_uid) {
            return HolderFate::Lost;
        }
        if alive {
            self.missing.remove(&who.record);
            return HolderFate::Lives;
        }
        let since = *self.missing.entry(who.record.clone()).or_insert(now);
        let missing = now.duration_since(since);
        let call = self.calls.get(agent).copied().unwrap_or(LONGEST_CALL);
        let stopped = if self.ended.contains(&who.pod_uid) {
            WATCH_LAG
        } else {
            RUN_LEASE.saturating_add(call)
        };
        match hope {
            _ if missing < stopped => HolderFate::Lives,
            RecordPersistence::Volume if speaker.is_none() && missing < RECORD_WAIT => HolderFate::Lives,
            RecordPersistence::Volume if speaker.is_none() => HolderFate::Silent(missing),
            RecordPersistence::Volume | RecordPersistence::Ephemeral | RecordPersistence::Gone => HolderFate::Lost,
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

    fn witness(pod: Option<(&str, bool)>) -> HolderLiveness {
        let mut witness = HolderLiveness::default();
        if let Some((uid, ended)) = pod {
            witness.pod_seen(&agent(), PodFacts { uid: uid.into(), ended });
        }
        witness
    }

    /// The first of 2,000 seconds in which the fate is not `Lives`, and that fate.
    fn turns(witness: &mut HolderLiveness, hope: RecordPersistence) -> Option<(i64, HolderFate)> {
        let fates = (0..2_000).map(|second| (second, witness.holder_fate(&holder(), &agent(), hope, at(second))));
        fates.into_iter().find(|(_, fate)| *fate != HolderFate::Lives)
    }

    #[test]
    fn a_holder_dies_with_its_pod_when_nobody_comes_back_for_it() {
        // The run lease and the longest call.
        let partitioned = 60 + 300;
        for (pod, hope, turn) in [
            (Some(("pod-1", false)), RecordPersistence::Volume, None),
            (Some(("pod-1", false)), RecordPersistence::Gone, None),
            (
                Some(("pod-1", true)),
                RecordPersistence::Ephemeral,
                Some((10, HolderFate::Lost)),
            ),
            (
                Some(("pod-1", true)),
                RecordPersistence::Volume,
                Some((300, HolderFate::Silent(seconds(300)))),
            ),
            (
                Some(("pod-2", false)),
                RecordPersistence::Ephemeral,
                Some((partitioned, HolderFate::Lost)),
            ),
            (None, RecordPersistence::Gone, Some((partitioned, HolderFate::Lost))),
            (
                None,
                RecordPersistence::Volume,
                Some((partitioned, HolderFate::Silent(seconds(partitioned)))),
            ),
            (
                Some(("pod-2", false)),
                RecordPersistence::Volume,
                Some((partitioned, HolderFate::Silent(seconds(partitioned)))),
            ),
        ] {
            assert_eq!(turns(&mut witness(pod), hope), turn, "{pod:?} {hope:?}");
        }
        let mut slow = witness(None);
        slow.calls.insert(agent(), SignedDuration::from_mins(20));
        assert_eq!(
            turns(&mut slow, RecordPersistence::Gone),
            Some((60 + 1_200, HolderFate::Lost))
        );
        // Its object is gone as well, but it was seen to have ended.
        let mut gone = witness(Some(("pod-1", true)));
        gone.pods.clear();
        assert_eq!(turns(&mut gone, RecordPersistence::Gone), Some((10, HolderFate::Lost)));
    }

    #[test]
    fn another_record_of_the_present_pod_ends_the_old_one() {
        let mut seen = witness(Some(("pod-1", false)));
        seen.speakers.insert(agent(), ("two".into(), "pod-1".into()));
        assert_eq!(turns(&mut seen, RecordPersistence::Volume), Some((0, HolderFate::Lost)));
        // The pod of the old record may still run on an unreachable node.
        let mut seen = witness(Some(("pod-2", false)));
        seen.speakers.insert(agent(), ("two".into(), "pod-2".into()));
        assert_eq!(
            turns(&mut seen, RecordPersistence::Volume),
            Some((360, HolderFate::Lost))
        );
        let mut seen = witness(Some(("pod-2", false)));
        seen.speakers.insert(agent(), ("one".into(), "pod-2".into()));
        assert_eq!(
            turns(&mut seen, RecordPersistence::Volume),
            Some((360, HolderFate::Silent(seconds(360)))),
            "the same record is the same holder"
        );
    }

    #[test]
    fn a_pod_that_comes_back_to_the_watch_starts_the_wait_anew() {
        let mut seen = witness(None);
        let lives = |seen: &mut HolderLiveness, second| {
            seen.holder_fate(&holder(), &agent(), RecordPersistence::Gone, at(second)) == HolderFate::Lives
        };
        assert!(lives(&mut seen, 0));
        seen.pods = witness(Some(("pod-1", false))).pods;
        assert!(lives(&mut seen, 359));
        seen.pods.clear();
        assert!(lives(&mut seen, 361) && lives(&mut seen, 720));
        assert!(!lives(&mut seen, 721));
    }
}
