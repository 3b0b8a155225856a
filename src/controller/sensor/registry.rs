//! The Sensors of this leader: the index under one lock, and what a change sets in motion.
//!
//! Told by the Agent reconciler's watches, by the link, and by its own watch; a change is told to the pods at once, and queues
//! the Sensors of which something else is to be shown. No lock is held over an await.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::Selector;
use kube::{Client, ResourceExt};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;

use super::children::{AppliedChild, ChildIndex, ChildKind, ObservedChild, SensorChildren};
use super::drift::{DriftAction, DriftBaselines};
use super::index::{IndexChange, IndexedSensor, ReceiverFacts, ReceiverIndex, SensorKey, SensorReceiver};
use super::pod::{self, SensorPodSettings};
use super::rollout::ReplacementQueue;
use super::validate::validate;
use crate::api::sensor::{SensorStatus, SensorTotals};
use crate::api::{Agent, Sensor};
use crate::controller::agent::namespace_objects::NamespaceObjects;
use crate::controller::agent::status_throttle::StatusThrottle;
use crate::controller::agent::{EventSink, WallClock};
use crate::controller::delivery_relay::DeliveryRelay;
use crate::controller::pod_sessions::{AgentKey, PodSessions};
use crate::controller::reconcile_metrics::ReconcileMetrics;
use crate::link::sensor_messages::SensorReport;

/// What the Sensors of a leader are made of.
pub struct SensorSetup {
    /// Speaks to the API server.
    pub client: Client,
    /// Namespaces that are served; empty: all.
    pub watch_namespaces: Vec<String>,
    /// Sensors reconciled at the same time.
    pub workers: u16,
    /// The live loops, which are told what runs in their pods.
    pub loops: Arc<PodSessions>,
    /// Passes events of sensor pods on, and is told whose they are.
    pub relay: Arc<DeliveryRelay>,
    /// What the chart decides for sensor pods.
    pub pods: SensorPodSettings,
    /// The CA bundle (PEM) that sensor pods must trust.
    pub ca_bundle: watch::Receiver<String>,
    /// Is told which bundle every namespace with sensor pods has.
    pub published: watch::Sender<String>,
    /// Where Events go.
    pub events: EventSink,
    /// Counts reconciles.
    pub reconciles: ReconcileMetrics,
    /// The time.
    pub clock: WallClock,
}

/// The Sensors of this leader.
pub struct SensorRegistry {
    pub(super) setup: SensorSetup,
    pub(super) namespaces: NamespaceObjects,
    /// An Agent, a Sensor or an object of theirs is gone.
    left: Notify,
    state: Mutex<RegistryState>,
    /// Held while a spec is checked.
    checking: tokio::sync::Mutex<()>,
    queue: mpsc::UnboundedSender<SensorKey>,
    pub(super) asked: Mutex<Option<mpsc::UnboundedReceiver<SensorKey>>>,
}

#[derive(Default)]
struct RegistryState {
    index: ReceiverIndex,
    children: ChildIndex,
    memory: HashMap<SensorKey, SensorReconcileState>,
    turns: ReplacementQueue,
}

/// What is remembered of a Sensor between two reconciles.
#[derive(Clone, Debug)]
pub(super) struct SensorReconcileState {
    /// Of this object; another one of the same name starts afresh.
    pub(super) uid: String,
    /// Since when it is looked at.
    pub(super) since: Instant,
    /// The status last written and its resource version, until the watch has caught up.
    pub(super) written: Option<(String, SensorStatus)>,
    /// Totals of receivers for whom status has no room, as last counted.
    pub(super) beyond: BTreeMap<String, SensorTotals>,
    /// How fast status may be written.
    pub(super) pace: StatusThrottle,
    /// Failed reconciles in a row.
    pub(super) errors: u32,
    /// What keeps its own pod from listening, in words.
    pub(super) trouble: Option<String>,
    /// Whether that was looked at.
    pub(super) looked: bool,
    /// Reconciles in a row that found something in the way of its pod.
    pub(super) obstructed: u32,
    /// Its place among those whose pods are to be replaced for the controller's sake.
    pub(super) place: Option<Instant>,
    /// What its objects were when this leader applied them.
    pub(super) baselines: DriftBaselines,
}

/// What is known of a Sensor.
pub(super) struct ObservedSensor {
    pub(super) known: IndexedSensor,
    pub(super) receivers: Vec<SensorReceiver>,
    pub(super) absent: Vec<String>,
    pub(super) agents: BTreeSet<String>,
    pub(super) memory: SensorReconcileState,
    /// Its own objects; `None` while not all are known.
    pub(super) children: Option<SensorChildren>,
}

impl SensorRegistry {
    /// None yet.
    #[must_use]
    pub fn new(setup: SensorSetup) -> Self {
        let (queue, asked) = mpsc::unbounded_channel();
        Self {
            namespaces: NamespaceObjects::new(
                setup.client.clone(),
                setup.ca_bundle.clone(),
                setup.published.clone(),
                pod::service_account,
            ),
            setup,
            left: Notify::new(),
            state: Mutex::default(),
            checking: tokio::sync::Mutex::default(),
            queue,
            asked: Mutex::new(Some(asked)),
        }
    }

    /// An Agent is there, or has changed.
    pub fn agent_seen(&self, agent: &Agent) {
        let key = AgentKey {
            namespace: agent.namespace().unwrap_or_default(),
            name: agent.name_any(),
        };
        self.change(|index| index.agent_seen(&key, ReceiverFacts::of(agent)));
    }

    /// An Agent is there that this version cannot read: it receives by its name and labels, whatever else it says.
    pub fn agent_unreadable(&self, agent: &ObjectMeta) {
        let key = AgentKey {
            namespace: agent.namespace.clone().unwrap_or_default(),
            name: agent.name.clone().unwrap_or_default(),
        };
        self.change(|index| index.agent_unreadable(&key, agent));
    }

    /// An Agent is gone.
    pub fn agent_gone(&self, agent: &AgentKey) {
        self.change(|index| index.agent_gone(agent));
        self.note_left();
    }

    /// These are all Agents of a scope.
    pub fn agents_listed(&self, scope: Option<&str>, present: &BTreeSet<AgentKey>) {
        self.change(|index| index.agents_listed(scope, present));
        self.note_left();
    }

    /// A pod has said what its Sensors do.
    pub fn report_received(&self, agent: &AgentKey, reports: &[SensorReport]) {
        self.change(|index| index.report_received(agent, reports));
    }

    /// Names of an Agent's Sensors, by uid.
    #[must_use]
    pub fn names(&self, agent: &AgentKey) -> BTreeMap<String, String> {
        self.lock().index.names(agent)
    }

    /// What keeps Sensors with pods of their own from listening, of those that an Agent receives from, by name; `None`: not
    /// all have been looked at.
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

    /// Every Sensor as it was last seen.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<Sensor>> {
        self.lock().index.all().cloned().collect()
    }

    pub(super) async fn seen(&self, sensor: Sensor) {
        let object = Arc::new(sensor);
        let (selector, problem) = self.checked(&object).await;
        let known = IndexedSensor {
            object,
            selector,
            problem,
        };
        self.change(|index| index.sensor_seen(known));
    }

    /// What [`validate`] says of a Sensor. Each generation is checked once, one Sensor at a time, and beside the threads that
    /// serve the link: no spec of one tenant may hold up or exhaust what all others need.
    async fn checked(&self, object: &Arc<Sensor>) -> (Option<Selector>, Option<String>) {
        let of = |sensor: &Sensor| (sensor.metadata.uid.clone(), sensor.metadata.generation);
        let before = {
            let state = self.lock();
            let known = state.index.sensor(&SensorKey::of(object.as_ref()));
            known
                .filter(|known| known.object.metadata.generation.is_some() && of(&known.object) == of(object))
                .map(|known| (known.selector.clone(), known.problem.clone()))
        };
        if let Some(before) = before {
            return before;
        }
        let _turn = self.checking.lock().await;
        let sensor = Arc::clone(object);
        let verdict = tokio::task::spawn_blocking(move || validate(&sensor.spec)).await;
        verdict.unwrap_or_else(|_| {
            (
                None,
                Some("spec: an expression could not be checked; make it simpler".into()),
            )
        })
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

    /// An object of a Sensor is there.
    pub(super) fn child_seen(&self, key: &SensorKey, seen: ObservedChild) {
        if self.lock().children.seen(key, seen) {
            self.request_reconcile(key.clone());
        }
    }

    /// An object of a Sensor is gone.
    pub(super) fn child_gone(&self, key: &SensorKey, kind: ChildKind) {
        self.lock().children.gone(key, kind);
        self.note_left();
        self.request_reconcile(key.clone());
    }

    /// These are all objects of a kind in a scope.
    pub(super) fn children_listed(
        &self,
        kind: ChildKind,
        scope: Option<&str>,
        present: BTreeMap<SensorKey, ObservedChild>,
    ) {
        let changed = {
            let mut state = self.lock();
            let mut changed = state.children.listed((kind, scope), present);
            // Those that waited for this.
            let with_pod = state.index.all().filter(|sensor| pod::has_pod(&sensor.spec.source));
            changed.extend(with_pod.map(|sensor| SensorKey::of(sensor.as_ref())));
            changed
        };
        self.note_left();
        for key in changed {
            self.request_reconcile(key);
        }
    }

    /// Something that belongs to an Agent or a Sensor is gone: its namespace may be empty now.
    pub(in crate::controller) fn note_left(&self) {
        self.left.notify_one();
    }

    /// Waits until something is gone.
    pub(in crate::controller) async fn left(&self) {
        self.left.notified().await;
    }

    /// Whether a namespace certainly has no Agent, no Sensor and nothing that was made for a Sensor.
    pub(in crate::controller) fn is_empty(&self, namespace: &str) -> bool {
        let state = self.lock();
        state.index.is_empty(namespace) && state.children.is_empty(namespace)
    }

    /// What namespaces with sensor pods have once.
    pub(in crate::controller) fn namespaces(&self) -> &NamespaceObjects {
        &self.namespaces
    }

    /// Namespaces with sensor pods; `None` while not all Sensors are known.
    pub(super) fn pod_namespaces(&self) -> Option<HashSet<String>> {
        let state = self.lock();
        let whole = match self.setup.watch_namespaces.as_slice() {
            [] => state.index.is_whole(""),
            some => some.iter().all(|namespace| state.index.is_whole(namespace)),
        };
        let with_pod = state.index.all().filter(|sensor| pod::has_pod(&sensor.spec.source));
        whole.then(|| with_pod.filter_map(|sensor| sensor.namespace()).collect())
    }

    /// Asks for a reconcile of a Sensor.
    pub(super) fn request_reconcile(&self, key: SensorKey) {
        // Closed only while the process ends.
        let _ = self.queue.send(key);
    }

    /// What is known of a Sensor; `None`: it is gone, or not everything around it is known yet.
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

    /// Changes what is remembered of this object; nothing when it is another one by now.
    pub(super) fn remember(&self, key: &SensorKey, uid: &str, change: impl FnOnce(&mut SensorReconcileState)) {
        if let Some(memory) = self.lock().memory.get_mut(key)
            && memory.uid == uid
        {
            change(memory);
        }
    }

    /// Whether the pod of a Sensor may be replaced now for the controller's sake, or in how long that is to be asked again.
    pub(super) fn take_turn(&self, key: &SensorKey, runs: bool) -> Result<(), Duration> {
        let mut state = self.lock();
        let RegistryState { turns, memory, .. } = &mut *state;
        match memory.get_mut(key).filter(|_| runs) {
            Some(memory) => turns.take(&mut memory.place, Instant::now()),
            None => turns.take_idle(Instant::now()),
        }
    }

    /// Whether an object of a Sensor was changed by somebody else. `current`: it is said to be as it is wanted.
    pub(super) fn drift(&self, key: &SensorKey, kind: ChildKind, child: &AppliedChild, current: bool) -> DriftAction {
        let mut state = self.lock();
        let memory = state.memory.get_mut(key);
        memory.map_or(DriftAction::None, |memory| {
            memory.baselines.check(kind, child, current, Instant::now())
        })
    }

    /// An object of a Sensor was applied, and is this now. `mended`: because somebody had changed it.
    pub(super) fn child_applied(&self, key: &SensorKey, seen: ObservedChild, mended: bool) {
        if let Some((kind, child)) = seen.child()
            && let Some(memory) = self.lock().memory.get_mut(key)
        {
            memory.baselines.applied(kind, child, mended.then(Instant::now));
        }
        self.child_seen(key, seen);
    }

    /// Counts a failed reconcile: how many in a row now.
    pub(super) fn failed(&self, key: &SensorKey) -> u32 {
        self.lock().memory.get_mut(key).map_or(1, |memory| {
            memory.errors = memory.errors.saturating_add(1);
            memory.errors
        })
    }

    /// Changes the index, tells pods at once what is new for them, and queues what is to be shown.
    fn change(&self, change: impl FnOnce(&mut ReceiverIndex) -> IndexChange) {
        let mut state = self.lock();
        let change = change(&mut state.index);
        // Under the lock, so that a later change is not overtaken by an earlier one.
        for agent in &change.agents {
            let (terms, wake_events) = (state.index.terms(agent), state.index.wake_events(agent));
            self.setup.loops.set_sensors(agent, terms, wake_events);
        }
        drop(state);
        for sensor in change.sensors {
            self.request_reconcile(sensor);
        }
    }

    fn lock(&self) -> MutexGuard<'_, RegistryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
