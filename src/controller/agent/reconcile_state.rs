//! The reconciler's memory of each Agent between reconciles. A cache: losing it costs a few reads and nothing else.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;

use super::apply::{AppliedPlan, PodObstacle};
use super::decide::ReconcilePlan;
use super::publish::PublishedAgentStatus;
use crate::api::{AgentStatus, NamespacedName};
use crate::controller::runtime::backoff;
use crate::controller::runtime::pod_state::PodReason;
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

/// What a plan makes of the memory of an Agent, whatever its requests result in.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MemoryChange {
    /// The watch has not delivered the status last written yet.
    pub(super) awaits_watch: bool,
    pub(super) known: LoopTotals,
    pub(super) missing: u32,
    pub(super) accepted_generation: Option<i64>,
    pub(super) listening: Option<(String, Timestamp)>,
    pub(super) silent: bool,
    pub(super) suspend_asked: Option<Timestamp>,
}

/// The delay of the next creation after a pod that failed or was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CreationBackoff {
    pub(super) failed_pods: u32,
    pub(super) no_pod_before: Timestamp,
}

impl AgentReconcileState {
    /// The backoff after one more failure.
    pub(super) fn next_backoff(&self, now: Timestamp) -> CreationBackoff {
        let failed_pods = self.failed_pods.saturating_add(1);
        CreationBackoff {
            failed_pods,
            no_pod_before: now + backoff::PODS.delay(failed_pods, &self.uid),
        }
    }

    /// Before the plan is carried out, so that no request that fails or hangs can lose a final report.
    pub(super) fn record_plan(&mut self, change: &MemoryChange) {
        if !change.awaits_watch {
            self.written = None;
        }
        self.known = Some(change.known.clone());
        self.missing = change.missing;
        self.accepted_generation = change.accepted_generation;
        self.listening.clone_from(&change.listening);
        self.silent = change.silent;
        self.suspend_asked = change.suspend_asked;
    }

    /// After the plan was carried out, also if that failed halfway.
    pub(super) fn record_applied(&mut self, plan: &ReconcilePlan<'_>, applied: &AppliedPlan) {
        if let Some(created) = &applied.created {
            self.no_pod_before = None;
            // The watch may already have delivered its creation, and even its deletion, before the API server answered.
            if self.seen_pod != created.metadata.uid {
                self.created = Some(created.clone());
            }
        }
        let running = applied.pod.as_ref().is_some_and(|pod| pod.reason == PodReason::Running);
        if applied.held_back {
            self.failed_pods = plan.backoff.failed_pods;
            self.no_pod_before = Some(plan.backoff.no_pod_before);
        } else if running {
            self.failed_pods = 0;
        }
        self.epoch = self.epoch.max(applied.pod.as_ref().map_or(0, |pod| pod.epoch));
        self.known_claims.extend(applied.made_claims.iter().cloned());
        if applied.failure.is_some() {
            return;
        }
        self.obstacle.clone_from(&applied.obstacle);
        if applied.has_claim_obstacle() {
            self.claim_looks = self.claim_looks.saturating_add(1);
            self.known_claims.clear();
        } else {
            self.claim_looks = 0;
            self.known_claims.extend(plan.usable_claims.iter().cloned());
        }
    }

    /// After the last step of a reconcile that has succeeded. `seen`: the resource version that the status was written over.
    pub(super) fn record_published(&mut self, published: PublishedAgentStatus, seen: Option<&str>, now: Timestamp) {
        self.errors = 0;
        let Some((version, status)) = published.written else {
            return;
        };
        self.pace.record_write(now);
        // An unchanged version means that the API server dropped every changed field, for example because its CRD is older.
        if version.as_deref() == seen {
            self.not_kept = Some(Arc::new(status));
        } else {
            self.not_kept = None;
            self.written = version.map(|version| Arc::new((version, status)));
        }
    }
}

/// The memory of all Agents. Each Agent is reconciled by one task at a time; the lock is held only to copy or change an
/// entry.
#[derive(Default)]
pub(super) struct ReconcileStates {
    agents: Mutex<HashMap<NamespacedName, AgentReconcileState>>,
}

impl ReconcileStates {
    /// A copy of this Agent's entry; created if absent, and replaced if the UID differs.
    pub(super) fn load(&self, agent: &NamespacedName, uid: &str, now: Timestamp) -> AgentReconcileState {
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
    pub(super) fn update(&self, agent: &NamespacedName, uid: &str, change: impl FnOnce(&mut AgentReconcileState)) {
        if let Some(known) = self.lock().get_mut(agent)
            && known.uid == uid
        {
            change(known);
        }
    }

    /// Counts a failed reconcile and returns the number of consecutive failures.
    pub(super) fn count_failure(&self, agent: &NamespacedName) -> u32 {
        self.lock().get_mut(agent).map_or(1, |known| {
            known.errors = known.errors.saturating_add(1);
            known.errors
        })
    }

    /// The watch delivered a change of the pod: the copy of the created pod is obsolete.
    pub(super) fn pod_seen(&self, agent: &NamespacedName, uid: Option<&String>) {
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

    pub(super) fn forget(&self, agent: &NamespacedName) {
        self.lock().remove(agent);
    }

    /// Removes the Agents of a scope that are not in `present`, and returns them.
    pub(super) fn retain(&self, namespace: Option<&str>, present: &BTreeSet<NamespacedName>) -> Vec<NamespacedName> {
        let mut agents = self.lock();
        let gone: Vec<NamespacedName> = agents
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
    pub(super) fn listening(&self) -> Vec<(NamespacedName, String, Timestamp, bool)> {
        let agents = self.lock();
        agents
            .iter()
            .filter_map(|(agent, known)| {
                let (uid, since) = known.listening.clone()?;
                Some((agent.clone(), uid, since, known.silent))
            })
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<NamespacedName, AgentReconcileState>> {
        self.agents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
