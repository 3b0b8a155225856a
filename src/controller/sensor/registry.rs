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

use super::children::{ChildIndex, ChildKind, ObservedChild};
use super::index::{IndexChange, IndexedSensor, ReceiverFacts, ReceiverIndex};
use super::pod::{self, SensorPodSettings};
use super::reconcile_state::{PodHealth, SensorReconcileState};
use super::rollout::ReplacementQueue;
use super::spec_checks::SpecCheckQueue;
use crate::api::{Agent, NamespacedName, Sensor};
use crate::controller::delivery_relay::DeliveryRelay;
use crate::controller::pod_sessions::PodSessions;
use crate::controller::runtime::namespace_objects::{NamespaceObjects, SharedObjects};
use crate::controller::runtime::queue::{Priority, WorkQueue};
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
    pub(super) queue: Arc<WorkQueue<NamespacedName>>,
}

#[derive(Default)]
pub(super) struct RegistryState {
    pub(super) index: ReceiverIndex,
    pub(super) children: ChildIndex,
    pub(super) memory: HashMap<NamespacedName, SensorReconcileState>,
    pub(super) turns: ReplacementQueue,
    /// Sensors whose specs wait for their check.
    pub(super) checks: SpecCheckQueue,
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
            queue: setup.reconciles.queue(),
            setup,
            left: Notify::new(),
            state: Mutex::default(),
            unchecked: Notify::new(),
        }
    }

    pub fn agent_seen(&self, agent: &Agent) {
        let key = NamespacedName::of(agent);
        self.change(|index| index.agent_seen(&key, ReceiverFacts::of(agent)));
    }

    /// Records an Agent that this version cannot parse: it still receives events by its name and labels.
    pub fn agent_unreadable(&self, agent: &ObjectMeta) {
        let key = NamespacedName::of_metadata(agent);
        self.change(|index| index.agent_unreadable(&key, agent));
    }

    pub fn agent_gone(&self, agent: &NamespacedName) {
        self.change(|index| index.agent_gone(agent));
        self.note_left();
    }

    /// Removes the Agents of a scope that are not in `present`.
    pub fn agents_listed(&self, scope: Option<&str>, present: &BTreeSet<NamespacedName>) {
        self.change(|index| index.agents_listed(scope, present));
        self.note_left();
    }

    /// Records the reports of an Agent's pod on its Sensors.
    pub fn report_received(&self, agent: &NamespacedName, reports: &[SensorReport]) {
        self.change(|index| index.report_received(agent, reports));
    }

    /// Names of an Agent's Sensors, by uid.
    #[must_use]
    pub fn names(&self, agent: &NamespacedName) -> BTreeMap<String, String> {
        self.lock().index.names(agent)
    }

    /// The Sensors with their own pods that an Agent receives from and whose pods fail, with the failure; `None` until
    /// all of them have been checked.
    #[must_use]
    pub fn pod_problems(&self, agent: &NamespacedName) -> Option<Vec<(String, String)>> {
        let state = self.lock();
        if !state.index.is_whole(&agent.namespace) {
            return None;
        }
        let mut problems = Vec::new();
        for key in state.index.with_pod(agent) {
            match &state.memory.get(key)?.pod_health {
                PodHealth::Unknown => return None,
                PodHealth::Healthy => {}
                PodHealth::Failing(problem) => problems.push((key.name.clone(), problem.clone())),
            }
        }
        Some(problems)
    }

    /// Every Sensor as last read.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<Sensor>> {
        self.lock().index.all().cloned().collect()
    }

    /// A Sensor is there, or has changed. Its spec is checked later, see [`spec_checks`](super::spec_checks).
    pub(super) fn seen(&self, sensor: Sensor) {
        let (key, sensor) = (NamespacedName::of(&sensor), Arc::new(sensor));
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

    pub(super) fn remove_sensor(&self, key: &NamespacedName) {
        self.lock().memory.remove(key);
        self.setup.relay.forget(key);
        self.change(|index| index.sensor_gone(key));
        self.note_left();
    }

    pub(super) fn listed(&self, scope: Option<&str>, present: &BTreeSet<NamespacedName>) {
        self.change(|index| index.sensors_listed(scope, present));
        self.note_left();
        let gone = |key: &NamespacedName| scope.is_none_or(|scope| scope == key.namespace) && !present.contains(key);
        let mut state = self.lock();
        for key in state.memory.keys().filter(|key| gone(key)) {
            self.setup.relay.forget(key);
        }
        state.memory.retain(|key, _| !gone(key));
    }

    pub(super) fn child_seen(&self, key: &NamespacedName, seen: ObservedChild) {
        if self.lock().children.seen(key, seen) {
            self.request_reconcile(key.clone());
        }
    }

    pub(super) fn child_gone(&self, key: &NamespacedName, kind: ChildKind) {
        self.lock().children.remove_child(key, kind);
        self.note_left();
        self.request_reconcile(key.clone());
    }

    /// Replaces the objects of a kind in a scope.
    pub(super) fn children_listed(
        &self,
        kind: ChildKind,
        scope: Option<&str>,
        present: BTreeMap<NamespacedName, ObservedChild>,
    ) {
        let changed = {
            let mut state = self.lock();
            let mut changed = state.children.listed((kind, scope), present);
            // Sensors with a pod wait for the first complete list.
            let with_pod = state.index.all().filter(|sensor| pod::has_pod(&sensor.spec.source));
            changed.extend(with_pod.map(|sensor| NamespacedName::of(sensor.as_ref())));
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
    pub(in crate::controller) async fn wait_for_departure(&self) {
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

    pub(super) fn request_reconcile(&self, key: NamespacedName) {
        self.queue.add(key, Priority::High);
    }

    /// Changes the memory of a Sensor, unless it was replaced by one with another uid.
    pub(super) fn update_memory(
        &self,
        key: &NamespacedName,
        uid: &str,
        change: impl FnOnce(&mut SensorReconcileState),
    ) {
        if let Some(memory) = self.lock().memory.get_mut(key)
            && memory.uid == uid
        {
            change(memory);
        }
    }

    /// Gives the running pod of a Sensor a place in the [`ReplacementQueue`].
    pub(super) fn reserve_turn(&self, key: &NamespacedName) {
        let mut state = self.lock();
        let RegistryState { turns, memory, .. } = &mut *state;
        if let Some(memory) = memory.get_mut(key) {
            turns.reserve(&mut memory.place, Instant::now());
        }
    }

    /// Takes the turn of the running pod of a Sensor in the [`ReplacementQueue`], or returns how long it waits.
    pub(super) fn take_turn(&self, key: &NamespacedName) -> Result<(), Duration> {
        let mut state = self.lock();
        let RegistryState { turns, memory, .. } = &mut *state;
        memory
            .get_mut(key)
            .map_or(Ok(()), |memory| turns.take(&mut memory.place, Instant::now()))
    }

    /// Counts a failed reconcile; returns the number of consecutive failures.
    pub(super) fn failed(&self, key: &NamespacedName) -> u32 {
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
