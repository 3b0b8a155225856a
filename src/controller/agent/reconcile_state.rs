//! The reconciler's memory of each Agent between reconciles. A cache: losing it costs a few reads and nothing else.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;

use super::apply::PodObstacle;
use crate::api::AgentStatus;
use crate::controller::pod_sessions::AgentKey;
use crate::controller::runtime::status_throttle::StatusThrottle;
use crate::controller::runtime::watched_pod::WatchedPod;
use crate::link::messages::LoopTotals;

/// The memory of one Agent.
#[derive(Clone, Debug)]
pub(super) struct AgentReconcileState {
    /// UID of the Agent; a recreated Agent starts with an empty memory.
    pub(super) uid: String,
    /// The status last written and its resource version, until the watch has delivered it.
    pub(super) written: Option<Arc<(String, AgentStatus)>>,
    /// A status that the API server stored without any change, as happens with an older CRD. It is not written again.
    pub(super) not_kept: Option<Arc<AgentStatus>>,
    /// Totals that its pods have reported.
    pub(super) known: Option<LoopTotals>,
    /// Throttle of status writes.
    pub(super) pace: StatusThrottle,
    /// The pod just created, until the watch has delivered it.
    pub(super) created: Option<Arc<WatchedPod>>,
    /// UID of the pod that the watch last delivered.
    pub(super) seen_pod: Option<String>,
    /// Names of the volume claims that exist and belong to the Agent.
    pub(super) known_claims: BTreeSet<String>,
    /// Number of consecutive reads that found an unusable claim.
    pub(super) claim_looks: u32,
    /// The last generation whose references were all found.
    pub(super) accepted_generation: Option<i64>,
    /// Number of consecutive attempts with an invalid result.
    pub(super) missing: u32,
    /// Number of consecutive pods that failed or were rejected.
    pub(super) failed_pods: u32,
    /// Earliest time to create the next pod.
    pub(super) no_pod_before: Option<Timestamp>,
    /// Obstacle of the last attempt to create a pod.
    pub(super) obstacle: Option<PodObstacle>,
    /// The highest epoch of its pods.
    pub(super) epoch: i64,
    /// When the pod was first directed to suspend.
    pub(super) suspend_asked: Option<Timestamp>,
    /// UID of the pod whose silence is measured, and the time from which it is measured.
    pub(super) listening: Option<(String, Timestamp)>,
    /// Whether the silence has been noticed.
    pub(super) silent: bool,
    /// Number of consecutive failed reconciles.
    pub(super) errors: u32,
}

impl AgentReconcileState {
    fn new(uid: &str, now: Timestamp) -> Self {
        Self {
            uid: uid.into(),
            written: None,
            not_kept: None,
            known: None,
            pace: StatusThrottle::new(now),
            created: None,
            seen_pod: None,
            known_claims: BTreeSet::new(),
            claim_looks: 0,
            accepted_generation: None,
            missing: 0,
            failed_pods: 0,
            no_pod_before: None,
            obstacle: None,
            epoch: 0,
            suspend_asked: None,
            listening: None,
            silent: false,
            errors: 0,
        }
    }
}

/// The memory of all Agents. Each Agent is reconciled by one task at a time; the lock is held only to copy or change an
/// entry.
#[derive(Default)]
pub(super) struct ReconcileStates {
    agents: Mutex<HashMap<AgentKey, AgentReconcileState>>,
}

impl ReconcileStates {
    /// A copy of this Agent's entry; created if absent, and replaced if the UID differs.
    pub(super) fn load(&self, agent: &AgentKey, uid: &str, now: Timestamp) -> AgentReconcileState {
        let mut agents = self.lock();
        let known = agents
            .entry(agent.clone())
            .or_insert_with(|| AgentReconcileState::new(uid, now));
        if known.uid != uid {
            *known = AgentReconcileState::new(uid, now);
        }
        known.clone()
    }

    /// Changes the entry of this Agent; no effect if the entry belongs to another UID by now.
    pub(super) fn update(&self, agent: &AgentKey, uid: &str, change: impl FnOnce(&mut AgentReconcileState)) {
        if let Some(known) = self.lock().get_mut(agent)
            && known.uid == uid
        {
            change(known);
        }
    }

    /// Counts a failed reconcile and returns the number of consecutive failures.
    pub(super) fn count_failure(&self, agent: &AgentKey) -> u32 {
        self.lock().get_mut(agent).map_or(1, |known| {
            known.errors = known.errors.saturating_add(1);
            known.errors
        })
    }

    /// The watch delivered a change of the pod: the copy of the created pod is obsolete.
    pub(super) fn pod_seen(&self, agent: &AgentKey, uid: Option<&String>) {
        if let Some(known) = self.lock().get_mut(agent) {
            known.created = None;
            known.seen_pod = uid.cloned();
        }
    }

    /// The pods of a scope were listed: the store now contains every pod that exists.
    pub(super) fn pods_listed(&self, namespace: Option<&str>) {
        for (agent, known) in self.lock().iter_mut() {
            if namespace.is_none_or(|namespace| namespace == agent.namespace) {
                known.created = None;
            }
        }
    }

    pub(super) fn forget(&self, agent: &AgentKey) {
        self.lock().remove(agent);
    }

    /// Removes the Agents of a scope that are not in `present`, and returns them.
    pub(super) fn retain(&self, namespace: Option<&str>, present: &BTreeSet<AgentKey>) -> Vec<AgentKey> {
        let mut agents = self.lock();
        let gone: Vec<AgentKey> = agents
            .keys()
            .filter(|agent| namespace.is_none_or(|namespace| namespace == agent.namespace))
            .filter(|agent| !present.contains(agent))
            .cloned()
            .collect();
        for agent in &gone {
            agents.remove(agent);
        }
        gone
    }

    /// Agents with a monitored pod: key, pod UID, start of monitoring, and whether its silence was noticed.
    pub(super) fn listening(&self) -> Vec<(AgentKey, String, Timestamp, bool)> {
        let agents = self.lock();
        agents
            .iter()
            .filter_map(|(agent, known)| {
                let (uid, since) = known.listening.clone()?;
                Some((agent.clone(), uid, since, known.silent))
            })
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<AgentKey, AgentReconcileState>> {
        self.agents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
