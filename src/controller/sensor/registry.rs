//! The Sensors of this leader: the index under one lock, and the effects of its changes.
//!
//! Fed by the Agent reconciler's watches, by the link, and by its own watch. A change is sent to the pods at once, and
//! queues the Sensors whose status it affects. No lock is held across an await.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Client, ResourceExt};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::children::{AppliedChild, ChildIndex, ChildKind, ObservedChild, SensorChildren};
use super::drift::{DriftAction, DriftBaselines};
use super::index::{IndexChange, IndexedSensor, ReceiverFacts, ReceiverIndex, SensorKey, SensorReceiver};
use super::pod::{self, SensorPodSettings};
use super::rollout::ReplacementQueue;
use super::spec_checks::SpecCheckQueue;
use crate::api::sensor::{SensorStatus, SensorTotals};
use crate::api::{Agent, Sensor};
use crate::controller::delivery_relay::DeliveryRelay;
use crate::controller::pod_sessions::{AgentKey, PodSessions};
use crate::controller::runtime::namespace_objects::{NamespaceObjects, SharedObjects};
use crate::controller::runtime::queue::{Priority, WorkQueue};
use crate::controller::runtime::status_throttle::StatusThrottle;
use crate::controller::runtime::{EventSink, ReconcileMetrics, WallClock};
use crate::link::sensor_messages::SensorReport;

pub struct SensorSetup {
    pub client: Client,
    /// Namespaces that are watched; empty: all.
    pub watch_namespaces: Vec<String>,
    pub workers: u16,
    /// The sessions of the Agents' pods, which receive the terms of their Sensors.
    pub loops: Arc<PodSessions>,
    /// Relays events of sensor pods; knows which pod may act for which Sensor.
    pub relay: Arc<DeliveryRelay>,
    /// Settings of sensor pods from the chart.
    pub pods: SensorPodSettings,
    pub ca_bundle: watch::Receiver<String>,
    /// Publishes the CA bundle that every namespace with sensor pods has.
    pub published: watch::Sender<String>,
    pub events: EventSink,
    pub reconciles: ReconcileMetrics,
    pub clock: WallClock,
}

pub struct SensorRegistry {
    pub(super) setup: SensorSetup,
    pub(super) namespaces: NamespaceObjects,
    /// Notified when an Agent, a Sensor or an object of theirs is gone.
    left: Notify,
    state: Mutex<RegistryState>,
    /// A spec waits for its check.
    pub(super) unchecked: Notify,
    pub(super) queue: Arc<WorkQueue<SensorKey>>,
}

#[derive(Default)]
pub(super) struct RegistryState {
    pub(super) index: ReceiverIndex,
    children: ChildIndex,
    memory: HashMap<SensorKey, SensorReconcileState>,
    turns: ReplacementQueue,
    /// Sensors whose specs wait for their check.
    pub(super) checks: SpecCheckQueue,
}

/// The state of a Sensor between two reconciles.
#[derive(Clone, Debug)]
pub(super) struct SensorReconcileState {
    /// Uid of the Sensor; a new one of the same name starts afresh.
    pub(super) uid: String,
    /// When it was first observed.
    pub(super) since: Instant,
    /// The status last written and its resource version, until the watch has caught up.
    pub(super) written: Option<(String, SensorStatus)>,
    /// Totals, as last counted, of receivers for which status has no room.
    pub(super) beyond: BTreeMap<String, SensorTotals>,
    pub(super) pace: StatusThrottle,
    /// Consecutive failed reconciles.
    pub(super) errors: u32,
    /// The message of a failure of its own pod.
    pub(super) trouble: Option<String>,
    /// Whether `trouble` was computed at least once.
    pub(super) looked: bool,
    /// Consecutive reconciles that found an obstacle.
    pub(super) obstructed: u32,
    /// Its place in the [`ReplacementQueue`].
    pub(super) place: Option<Instant>,
    /// The drift baselines of its child objects.
    pub(super) baselines: DriftBaselines,
}

/// The input of a reconcile.
pub(super) struct ObservedSensor {
    pub(super) known: IndexedSensor,
    pub(super) receivers: Vec<SensorReceiver>,
    pub(super) absent: Vec<String>,
    pub(super) agents: BTreeSet<String>,
    pub(super) memory: SensorReconcileState,
    /// Its child objects; `None` until all kinds have been listed.
    pub(super) children: Option<SensorChildren>,
}

impl SensorRegistry {
    #[must_use]
    pub fn new(setup: SensorSetup) -> Self {
        Self {
            namespaces: NamespaceObjects::new(
                setup.client.clone(),
                setup.ca_bundle.clone(),
                setup.published.clone(),
                SharedObjects {
                    account: pod::service_account,
                    network_policy: None,
                },
            ),
            setup,
            left: Notify::new(),
            state: Mutex::default(),
            unchecked: Notify::new(),
            queue: Arc::new(WorkQueue::new()),
        }
    }

    pub fn agent_seen(&self, agent: &Agent) {
        let key = AgentKey {
            namespace: agent.namespace().unwrap_or_default(),
            name: agent.name_any(),
        };
        self.change(|index| index.agent_seen(&key, ReceiverFacts::of(agent)));
    }

    /// Records an Agent that this version cannot parse: it still receives events by its name and labels.
    pub fn agent_unreadable(&self, agent: &ObjectMeta) {
        let key = AgentKey {
            namespace: agent.namespace.clone().unwrap_or_default(),
            name: agent.name.clone().unwrap_or_default(),
        };
        self.change(|index| index.agent_unreadable(&key, agent));
    }

    pub fn agent_gone(&self, agent: &AgentKey) {
        self.change(|index| index.agent_gone(agent));
        self.note_left();
    }

    /// Removes the Agents of a scope that are not in `present`.
    pub fn agents_listed(&self, scope: Option<&str>, present: &BTreeSet<AgentKey>) {
        self.change(|index| index.agents_listed(scope, present));
        self.note_left();
    }

    /// Records the reports of an Agent's pod on its Sensors.
    pub fn report_received(&self, agent: &AgentKey, reports: &[SensorReport]) {
        self.change(|index| index.report_received(agent, reports));
    }

    /// Names of an Agent's Sensors, by uid.
    #[must_use]
    pub fn names(&self, agent: &AgentKey) -> BTreeMap<String, String> {
        self.lock().index.names(agent)
    }

    /// The Sensors with their own pods that an Agent receives from and whose pods fail, with the failure; `None` until
    /// all of them have been checked.
    #[must_use]
    pub fn pod_problems(&self, agent: &AgentKey) -> Option<Vec<(String, String)>> {
        let state = self.lock();
        if !state.index.is_whole(&agent.namespace) {
            return None;
        }
        let mut troubles = Vec::new();
        for key in state.index.with_pod(agent) {
            let memory = state.memory.get(key).filter(|memory| memory.looked)?;
            troubles.extend(memory.trouble.clone().map(|trouble| (key.name.clone(), trouble)));
        }
        Some(troubles)
    }

    /// Every Sensor as last read.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<Sensor>> {
        self.lock().index.all().cloned().collect()
    }

    /// A Sensor is there, or has changed. Its spec is checked later, see [`spec_checks`](super::spec_checks).
    pub(super) fn seen(&self, sensor: Sensor) {
        let (key, sensor) = (SensorKey::of(&sensor), Arc::new(sensor));
        let mut state = self.lock();
        let known = IndexedSensor::new(sensor, state.index.sensor(&key));
        let pending = known.is_pending();
        let change = state.index.sensor_seen(known);
        // In the same critical section, so that no check ends between the two.
        if pending {
            state.checks.push(key);
        }
        self.publish(state, change);
        if pending {
            self.unchecked.notify_one();
        }
    }

    pub(super) fn gone(&self, key: &SensorKey) {
        self.lock().memory.remove(key);
        self.setup.relay.forget(key);
        self.change(|index| index.sensor_gone(key));
        self.note_left();
    }

    pub(super) fn listed(&self, scope: Option<&str>, present: &BTreeSet<SensorKey>) {
        self.change(|index| index.sensors_listed(scope, present));
        self.note_left();
        let gone = |key: &SensorKey| scope.is_none_or(|scope| scope == key.namespace) && !present.contains(key);
        let mut state = self.lock();
        for key in state.memory.keys().filter(|key| gone(key)) {
            self.setup.relay.forget(key);
        }
        state.memory.retain(|key, _| !gone(key));
    }

    pub(super) fn child_seen(&self, key: &SensorKey, seen: ObservedChild) {
        if self.lock().children.seen(key, seen) {
            self.request_reconcile(key.clone());
        }
    }

    pub(super) fn child_gone(&self, key: &SensorKey, kind: ChildKind) {
        self.lock().children.gone(key, kind);
        self.note_left();
        self.request_reconcile(key.clone());
    }

    /// Replaces the objects of a kind in a scope.
    pub(super) fn children_listed(
        &self,
        kind: ChildKind,
        scope: Option<&str>,
        present: BTreeMap<SensorKey, ObservedChild>,
    ) {
        let changed = {
            let mut state = self.lock();
            let mut changed = state.children.listed((kind, scope), present);
            // Sensors with a pod wait for the first complete list.
            let with_pod = state.index.all().filter(|sensor| pod::has_pod(&sensor.spec.source));
            changed.extend(with_pod.map(|sensor| SensorKey::of(sensor.as_ref())));
            changed
        };
        self.note_left();
        for key in changed {
            self.request_reconcile(key);
        }
    }

    /// Notes that something in a namespace is gone, which may be empty now.
    pub(in crate::controller) fn note_left(&self) {
        self.left.notify_one();
    }

    /// Waits for [`Self::note_left`].
    pub(in crate::controller) async fn left(&self) {
        self.left.notified().await;
    }

    /// Whether a namespace certainly contains no Agent, no Sensor and no child object of a Sensor.
    pub(in crate::controller) fn is_empty(&self, namespace: &str) -> bool {
        let state = self.lock();
        state.index.is_empty(namespace) && state.children.is_empty(namespace)
    }

    /// The objects that each namespace with sensor pods has once.
    pub(in crate::controller) fn namespaces(&self) -> &NamespaceObjects {
        &self.namespaces
    }

    /// Namespaces with sensor pods; `None` until all Sensors have been listed.
    pub(super) fn pod_namespaces(&self) -> Option<HashSet<String>> {
        let state = self.lock();
        let whole = match self.setup.watch_namespaces.as_slice() {
            [] => state.index.is_whole(""),
            some => some.iter().all(|namespace| state.index.is_whole(namespace)),
        };
        let with_pod = state.index.all().filter(|sensor| pod::has_pod(&sensor.spec.source));
        whole.then(|| with_pod.filter_map(|sensor| sensor.namespace()).collect())
    }

    pub(super) fn request_reconcile(&self, key: SensorKey) {
        self.queue.add(key, Priority::High);
    }

    /// The input of a reconcile; `None` if the Sensor is gone or its namespace has not been listed completely.
    pub(super) fn observe(&self, key: &SensorKey) -> Option<ObservedSensor> {
        let mut state = self.lock();
        if !state.index.is_whole(&key.namespace) {
            return None;
        }
        let known = state.index.sensor(key)?.clone();
        let uid = known.object.uid().unwrap_or_default();
        let memory = state.memory.entry(key.clone());
        let fresh = || SensorReconcileState {
            uid: uid.clone(),
            since: Instant::now(),
            written: None,
            beyond: BTreeMap::new(),
            pace: StatusThrottle::new((self.setup.clock)()),
            errors: 0,
            trouble: None,
            looked: false,
            obstructed: 0,
            place: None,
            baselines: DriftBaselines::default(),
        };
        let memory = memory.or_insert_with(fresh);
        // A Sensor that was recreated under the same name starts without state.
        if memory.uid != uid {
            *memory = fresh();
        }
        let memory = memory.clone();
        Some(ObservedSensor {
            receivers: state.index.receivers(&known),
            absent: state.index.absent(&known),
            agents: state.index.agent_uids(&key.namespace),
            children: state.children.of(key),
            known,
            memory,
        })
    }

    /// Changes the state of a Sensor, unless it was replaced by one with another uid.
    pub(super) fn remember(&self, key: &SensorKey, uid: &str, change: impl FnOnce(&mut SensorReconcileState)) {
        if let Some(memory) = self.lock().memory.get_mut(key)
            && memory.uid == uid
        {
            change(memory);
        }
    }

    /// Takes the turn of a Sensor's pod in the [`ReplacementQueue`], or returns how long it waits. `runs`: whether the
    /// pod is running.
    pub(super) fn take_turn(&self, key: &SensorKey, runs: bool) -> Result<(), Duration> {
        let mut state = self.lock();
        let RegistryState { turns, memory, .. } = &mut *state;
        match memory.get_mut(key).filter(|_| runs) {
            Some(memory) => turns.take(&mut memory.place, Instant::now()),
            None => turns.take_idle(Instant::now()),
        }
    }

    /// Checks an object for drift. `current`: its hash annotation matches the desired object.
    pub(super) fn drift(&self, key: &SensorKey, kind: ChildKind, child: &AppliedChild, current: bool) -> DriftAction {
        let mut state = self.lock();
        let memory = state.memory.get_mut(key);
        memory.map_or(DriftAction::None, |memory| {
            memory.baselines.check(kind, child, current, Instant::now())
        })
    }

    /// Records an object after an apply. `mended`: whether the apply corrected a drift.
    pub(super) fn child_applied(&self, key: &SensorKey, seen: ObservedChild, mended: bool) {
        if let Some((kind, child)) = seen.child()
            && let Some(memory) = self.lock().memory.get_mut(key)
        {
            memory.baselines.applied(kind, child, mended.then(Instant::now));
        }
        self.child_seen(key, seen);
    }

    /// Counts a failed reconcile; returns the number of consecutive failures.
    pub(super) fn failed(&self, key: &SensorKey) -> u32 {
        self.lock().memory.get_mut(key).map_or(1, |memory| {
            memory.errors = memory.errors.saturating_add(1);
            memory.errors
        })
    }

    /// Changes the index, sends the new terms to the pods at once, and queues the affected Sensors.
    pub(super) fn change(&self, change: impl FnOnce(&mut ReceiverIndex) -> IndexChange) {
        let mut state = self.lock();
        let change = change(&mut state.index);
        self.publish(state, change);
    }

    /// Publishes a change that was made under this lock.
    fn publish(&self, state: MutexGuard<'_, RegistryState>, change: IndexChange) {
        // Under the lock, so that terms are sent in the order of the changes.
        for agent in &change.agents {
            let (terms, wake_events) = (state.index.terms(agent), state.index.wake_events(agent));
            self.setup.loops.set_sensors(agent, terms, wake_events);
        }
        drop(state);
        for sensor in change.sensors {
            self.request_reconcile(sensor);
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, RegistryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
