//! Which holders are dead for certain, so that what they hold counts as spent. Pure.
//!
//! A gateway's record lies on its Agent's volume. A pod that is gone is no reason yet: where the volume stays, the next
//! pod finds the record and says exactly what was spent. So a holder whose pod is gone is buried at once when nobody
//! can come back for it (the Agent is gone, or its storage died with the pod), and after [`RETURN`] otherwise, and when
//! the Agent's present pod speaks with another record. Too early costs room in one window; it never frees any. It must
//! never be done to a gateway that may still call: what it spends later would count in no window.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};

use crate::controller::loops::AgentKey;
use crate::ledger::account::Who;

/// How long a pod must have been missing, for watches that lag behind.
pub const CERTAIN: SignedDuration = SignedDuration::from_secs(10);
/// How long a record on a volume that outlives its pod is waited for.
pub const RETURN: SignedDuration = SignedDuration::from_mins(5);

/// A pod, as far as it matters here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodFact {
    /// Its uid.
    pub uid: String,
    /// It ended for good.
    pub ended: bool,
}

/// What is known of pods and speakers.
#[derive(Clone, Debug, Default)]
pub struct Witness {
    /// The pod of each Agent.
    pub pods: BTreeMap<AgentKey, PodFact>,
    /// The record with which the Agent's present pod speaks, and the pod's uid.
    pub speakers: BTreeMap<AgentKey, (String, String)>,
    /// Since when the pod of a record is missing.
    missing: BTreeMap<String, Timestamp>,
}

/// Whether an Agent, and with it its record, may come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hope {
    /// Its volume stays.
    Volume,
    /// Its storage died with its pod.
    Ephemeral,
    /// There is no such Agent any more.
    Gone,
}

impl Witness {
    /// Whether the gateway of this record is dead for certain and nobody comes back for it.
    pub fn is_dead(&mut self, who: &Who, agent: &AgentKey, hope: Hope, now: Timestamp) -> bool {
        let alive = self
            .pods
            .get(agent)
            .is_some_and(|pod| pod.uid == who.pod_uid && !pod.ended);
        // One pod's gateways come one after the other; another record means that the old one is lost.
        let replaced = self
            .speakers
            .get(agent)
            .is_some_and(|(record, pod_uid)| *record != who.record && (!alive || *pod_uid == who.pod_uid));
        if replaced {
            return true;
        }
        if alive {
            self.missing.remove(&who.record);
            return false;
        }
        let since = *self.missing.entry(who.record.clone()).or_insert(now);
        let patience = match hope {
            Hope::Volume => RETURN,
            Hope::Ephemeral | Hope::Gone => CERTAIN,
        };
        now.duration_since(since) >= patience
    }

    /// Forgets records that hold nothing any more.
    pub fn keep(&mut self, live: impl Fn(&str) -> bool) {
        self.missing.retain(|record, _| live(record));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::budget::facts::ledger_name;

    fn agent() -> AgentKey {
        AgentKey {
            namespace: "ns".into(),
            name: "a".into(),
        }
    }

    fn holder() -> Who {
        Who {
            record: "one".into(),
            agent: ledger_name(&agent()),
            pod_uid: "pod-1".into(),
            epoch: 1,
        }
    }

    fn at(seconds: i64) -> Timestamp {
        Timestamp::constant(seconds, 0)
    }

    fn witness(pod: Option<(&str, bool)>) -> Witness {
        let pods = pod.map(|(uid, ended)| {
            let fact = PodFact { uid: uid.into(), ended };
            (agent(), fact)
        });
        Witness {
            pods: pods.into_iter().collect(),
            ..Witness::default()
        }
    }

    /// The first second at which the holder is dead, of 400.
    fn dies(witness: &mut Witness, hope: Hope) -> Option<i64> {
        (0..400).find(|second| witness.is_dead(&holder(), &agent(), hope, at(*second)))
    }

    #[test]
    fn a_holder_dies_with_its_pod_when_nobody_comes_back_for_it() {
        for (pod, hope, second) in [
            (Some(("pod-1", false)), Hope::Volume, None),
            (Some(("pod-1", false)), Hope::Gone, None),
            (Some(("pod-1", true)), Hope::Ephemeral, Some(10)),
            (Some(("pod-2", false)), Hope::Ephemeral, Some(10)),
            (None, Hope::Gone, Some(10)),
            (None, Hope::Volume, Some(300)),
            (Some(("pod-2", false)), Hope::Volume, Some(300)),
        ] {
            assert_eq!(dies(&mut witness(pod), hope), second, "{pod:?} {hope:?}");
        }
    }

    #[test]
    fn another_record_of_the_present_pod_ends_the_old_one_at_once() {
        let mut seen = witness(Some(("pod-2", false)));
        seen.speakers.insert(agent(), ("two".into(), "pod-2".into()));
        assert_eq!(dies(&mut seen, Hope::Volume), Some(0));
        seen.speakers.insert(agent(), ("one".into(), "pod-2".into()));
        assert_eq!(
            dies(&mut seen, Hope::Volume),
            Some(300),
            "the same record is the same holder"
        );
    }

    #[test]
    fn a_pod_that_comes_back_to_the_watch_starts_the_wait_anew() {
        let mut seen = witness(None);
        assert!(!seen.is_dead(&holder(), &agent(), Hope::Gone, at(0)));
        seen.pods = witness(Some(("pod-1", false))).pods;
        assert!(!seen.is_dead(&holder(), &agent(), Hope::Gone, at(9)));
        seen.pods.clear();
        assert!(!seen.is_dead(&holder(), &agent(), Hope::Gone, at(11)));
        assert!(seen.is_dead(&holder(), &agent(), Hope::Gone, at(21)));
    }
}
