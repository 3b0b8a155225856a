//! What the reconciler remembers of each Agent between two reconciles. Losing it costs a few reads and nothing else.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;

use super::apply::PodObstacle;
use super::status_throttle::StatusThrottle;
use crate::api::AgentStatus;
use crate::controller::pod_sessions::AgentKey;
use crate::link::messages::LoopTotals;

/// What is remembered of one Agent.
#[derive(Clone, Debug)]
pub(super) struct AgentReconcileState {
    /// Of this object; another one of the same name starts afresh.
    pub(super) uid: String,
    /// The status last written and its resource version, until the watch has caught up.
    pub(super) written: Option<Arc<(String, AgentStatus)>>,
    /// A status of which the API server keeps nothing that is new, as one with an older definition of Agents does.
    pub(super) not_kept: Option<Arc<AgentStatus>>,
    /// What its pods have said of their totals.
    pub(super) known: Option<LoopTotals>,
    /// How fast status may be written.
    pub(super) pace: StatusThrottle,
    /// The pod just made, until the watch has it.
    pub(super) created: Option<Arc<Pod>>,
    /// Uid of the pod that the watch last saw.
    pub(super) seen_pod: Option<String>,
    /// The volume claims that are there and belong to the Agent.
    pub(super) known_claims: BTreeSet<String>,
    /// Looks in a row that found a claim that may not be used.
    pub(super) claim_looks: u32,
    /// The references of this generation were found once.
    pub(super) accepted_generation: Option<i64>,
    /// Attempts in a row that found a reference missing.
    pub(super) missing: u32,
    /// Pods in a row that failed or were refused, and when the next may be made.
    pub(super) failed_pods: u32,
    /// No pod is made before.
    pub(super) no_pod_before: Option<Timestamp>,
    /// What the last attempt to make a pod met.
    pub(super) obstacle: Option<PodObstacle>,
    /// The highest epoch seen on a pod.
    pub(super) epoch: i64,
    /// When the pod was first told to suspend.
    pub(super) suspend_asked: Option<Timestamp>,
    /// The pod whose silence is measured, since when at least.
    pub(super) listening: Option<(String, Timestamp)>,
    /// The silence was noticed.
    pub(super) silent: bool,
    /// Failed reconciles in a row.
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

/// All Agents. Each is reconciled by one task at a time; locks are held for the copy only.
#[derive(Default)]
pub(super) struct ReconcileStates {
    agents: Mutex<HashMap<AgentKey, AgentReconcileState>>,
}

impl ReconcileStates {
    /// What is remembered of this Agent.
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

    /// Changes what is remembered of this object; nothing when it is another one by now.
    pub(super) fn update(&self, agent: &AgentKey, uid: &str, change: impl FnOnce(&mut AgentReconcileState)) {
        if let Some(known) = self.lock().get_mut(agent)
            && known.uid == uid
        {
            change(known);
        }
    }

    /// Counts a failed reconcile: how many in a row now.
    pub(super) fn count_failure(&self, agent: &AgentKey) -> u32 {
        self.lock().get_mut(agent).map_or(1, |known| {
            known.errors = known.errors.saturating_add(1);
            known.errors
        })
    }

    /// The watch has seen a pod of this name come, change or go: the copy of the created one is no longer needed.
    pub(super) fn pod_seen(&self, agent: &AgentKey, uid: Option<&String>) {
        if let Some(known) = self.lock().get_mut(agent) {
            known.created = None;
            known.seen_pod = uid.cloned();
        }
    }

    /// The pods of a scope are listed again: the list will say what is there.
    pub(super) fn pods_listed(&self, namespace: Option<&str>) {
        for (agent, known) in self.lock().iter_mut() {
            if namespace.is_none_or(|namespace| namespace == agent.namespace) {
                known.created = None;
            }
        }
    }

    /// Forgets one Agent.
    pub(super) fn forget(&self, agent: &AgentKey) {
        self.lock().remove(agent);
    }

    /// Forgets Agents of a scope that are not in `present`, and says which.
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

    /// Agents with a pod that is listened to: key, pod uid, since when, and whether silence was noticed.
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
