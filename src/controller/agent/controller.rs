//! Streams in, reconciles out: wires watches, queue and shutdown.
//!
//! The watches are driven here and not by kube's `Controller`: a listing puts its objects into the store only when it is
//! whole, so each listing, of Agents or of pods, is followed by a pass over all Agents: what happened while a watch was
//! interrupted comes with no event. The first pass waits until both stores are filled and the budgets are listed.

use std::collections::{BTreeSet, HashSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, future};
use k8s_openapi::api::core::v1::Pod;
use kube::core::DeserializeGuard;
use kube::runtime::WatchStreamExt;
use kube::runtime::controller::{self, Action, ReconcileRequest, applier};
use kube::runtime::events::{Recorder, Reporter};
use kube::runtime::reflector::{self, ObjectRef, Store, store::Writer};
use kube::runtime::watcher::{Event, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_util::sync::CancellationToken;

use super::context::{AgentsView, ReconcileObserver, ReconcilerSettings, WallClock};
use super::events;
use super::liveness;
use super::namespace_cleanup;
use super::namespace_objects::NamespaceObjects;
use super::objects::service_account;
use super::pod_state::trim;
use super::reconcile::{ReconcileContext, SharedContext, on_error, reconcile};
use super::reconcile_state::ReconcileStates;
use super::scripts::ScriptChecker;
use crate::api::{AGENT_LABEL, Agent};
use crate::controller::budget::BudgetLedger;
use crate::controller::connection::watching;
use crate::controller::pod_sessions::{AgentKey, PodSessions};
use crate::controller::sensor::SensorRegistry;

/// Time for reconciles under way when the run ends.
const GRACE: Duration = Duration::from_secs(10);
/// How long the first pass waits for the budgets. Without them suspends and deletions are followed, and what was said of
/// budgets stands.
const BUDGETS_WAIT: Duration = Duration::from_secs(15);

type GuardedAgent = DeserializeGuard<Agent>;

/// All that the reconciler is made of.
pub struct ReconcilerParts {
    /// Speaks to the API server.
    pub client: Client,
    /// What the chart decides.
    pub settings: ReconcilerSettings,
    /// The live loops, shared with the link server.
    pub loops: Arc<PodSessions>,
    /// The ledger, which is told of Agents and pods.
    pub budgets: Arc<BudgetLedger>,
    /// The Sensors, which are told of Agents and of what their pods say.
    pub sensors: Arc<SensorRegistry>,
    /// Agents whose pods said something new; the other end of [`PodSessions::new`].
    pub changed: mpsc::UnboundedReceiver<AgentKey>,
    /// The CA bundle (PEM) that pods must trust; published in every namespace with Agents.
    pub ca_bundle: watch::Receiver<String>,
    /// Is told which bundle every namespace with Agents has.
    pub published: watch::Sender<String>,
    /// Is told of each reconcile.
    pub observer: Arc<dyn ReconcileObserver>,
    /// The time.
    pub clock: WallClock,
    /// Name of this process in Events: the pod's name.
    pub instance: String,
    /// Ends the run; reconciles under way may finish within 10 s.
    pub shutdown: CancellationToken,
}

/// Sends Events in the name of this process.
#[must_use]
pub fn recorder(client: Client, instance: String) -> Recorder {
    let reporter = Reporter {
        controller: super::names::MANAGER.into(),
        instance: Some(instance),
    };
    Recorder::new(client, reporter)
}

/// Reconciles Agents until `shutdown`. Only the leader may run this, once per process.
pub async fn run(parts: ReconcilerParts) {
    let (events, queue) = events::EventSink::new();
    let recorder = recorder(parts.client.clone(), parts.instance);
    let shared = Arc::new(SharedContext {
        namespaces: NamespaceObjects::new(parts.client.clone(), parts.ca_bundle, parts.published, service_account),
        client: parts.client,
        loops: parts.loops,
        budgets: parts.budgets,
        sensors: parts.sensors,
        memory: ReconcileStates::default(),
        scripts: ScriptChecker::new(),
        events,
        observer: parts.observer,
        clock: parts.clock,
        settings: parts.settings,
    });
    let scopes: Vec<ReconcileScope> = match shared.settings.watch_namespaces.as_slice() {
        [] => vec![ReconcileScope::new(None)],
        some => some
            .iter()
            .map(|namespace| ReconcileScope::new(Some(namespace.clone())))
            .collect(),
    };
    let view = AgentsView::new(scopes.iter().map(|scope| scope.agents.clone()).collect());
    let pods = scopes.iter().map(|scope| scope.pods.clone()).collect();
    let doors: Vec<ScopeQueue> = scopes.iter().map(ReconcileScope::scope_queue).collect();
    let served = future::join_all(
        scopes
            .into_iter()
            .map(|scope| scope.serve(shared.clone(), parts.shutdown.clone())),
    );
    tokio::select! {
        _ = served => {}
        () = shared_work(&shared, (view, pods), parts.changed, &doors) => {}
        () = events::publish(recorder, queue) => {}
        // A list that never succeeded would hold the shutdown for ever.
        () = async { parts.shutdown.cancelled().await; tokio::time::sleep(GRACE).await } => {}
    }
}

/// What serves all scopes at once; ends only with the run.
async fn shared_work(
    shared: &SharedContext,
    (view, pods): (AgentsView, Vec<Store<Pod>>),
    changed: mpsc::UnboundedReceiver<AgentKey>,
    doors: &[ScopeQueue],
) {
    tokio::join!(
        route(changed, doors),
        sweep(shared, doors),
        show(shared, &view, &pods),
        namespace_cleanup::clean_up(shared, &pods),
        publish_bundle(shared, &view),
    );
}

/// Shows the Agents once all that is there is known: until then a pod would be told that it has no Agent.
async fn show(shared: &SharedContext, view: &AgentsView, pods: &[Store<Pod>]) {
    view.ready().await;
    for store in pods {
        // Fails only when the watch is gone, which ends the run anyway.
        let _ = store.wait_until_ready().await;
    }
    shared.observer.agents(view.clone());
}

/// Where a reconcile of an Agent of one scope is asked for.
struct ScopeQueue {
    namespace: Option<String>,
    queue: mpsc::UnboundedSender<ObjectRef<GuardedAgent>>,
}

impl ScopeQueue {
    fn enqueue(doors: &[Self], agent: &AgentKey) {
        let serves = |door: &&Self| {
            door.namespace
                .as_ref()
                .is_none_or(|namespace| *namespace == agent.namespace)
        };
        if let Some(door) = doors.iter().find(serves) {
            // Closed only while the process ends.
            let _ = door.queue.send(reference(agent));
        }
    }
}

fn reference(agent: &AgentKey) -> ObjectRef<GuardedAgent> {
    ObjectRef::new(&agent.name).within(&agent.namespace)
}

/// What pods said wakes the reconciler of their Agent.
async fn route(mut changed: mpsc::UnboundedReceiver<AgentKey>, doors: &[ScopeQueue]) {
    while let Some(agent) = changed.recv().await {
        ScopeQueue::enqueue(doors, &agent);
    }
    future::pending::<()>().await;
}

async fn sweep(shared: &SharedContext, doors: &[ScopeQueue]) {
    loop {
        tokio::time::sleep(liveness::SWEEP).await;
        for agent in liveness::changed_agents(&shared.memory, &shared.loops, (shared.clock)()) {
            ScopeQueue::enqueue(doors, &agent);
        }
    }
}

/// Publishes the CA bundle where Agents are.
async fn publish_bundle(shared: &SharedContext, view: &AgentsView) {
    view.ready().await;
    let namespaces = || {
        let mut namespaces = HashSet::new();
        view.for_each(|agent| namespaces.extend(agent.namespace()));
        Some(namespaces)
    };
    shared.namespaces.maintain(namespaces).await;
}

/// All Agents, or those of one namespace.
struct ReconcileScope {
    namespace: Option<String>,
    agents: Store<GuardedAgent>,
    agents_writer: Writer<GuardedAgent>,
    pods: Store<Pod>,
    pods_writer: Writer<Pod>,
    queue: mpsc::UnboundedSender<ObjectRef<GuardedAgent>>,
    asked: mpsc::UnboundedReceiver<ObjectRef<GuardedAgent>>,
}

impl ReconcileScope {
    fn new(namespace: Option<String>) -> Self {
        let (agents, agents_writer) = reflector::store();
        let (pods, pods_writer) = reflector::store();
        let (queue, asked) = mpsc::unbounded_channel();
        Self {
            namespace,
            agents,
            agents_writer,
            pods,
            pods_writer,
            queue,
            asked,
        }
    }

    fn scope_queue(&self) -> ScopeQueue {
        ScopeQueue {
            namespace: self.namespace.clone(),
            queue: self.queue.clone(),
        }
    }

    /// Watches and reconciles until `shutdown`, then lets what is under way finish.
    async fn serve(self, shared: Arc<SharedContext>, shutdown: CancellationToken) {
        let (pods, namespace) = (self.pods, self.namespace.as_deref());
        let context = Arc::new(ReconcileContext {
            shared: shared.clone(),
            pods: pods.clone(),
        });
        let watches = future::join(
            watch_agents(&shared, namespace, self.agents_writer, &self.agents, &self.queue),
            watch_pods(&shared, namespace, self.pods_writer, &self.agents, &self.queue),
        );
        let agents = self.agents.clone();
        let requests = UnboundedReceiverStream::new(self.asked)
            .map(|agent| Ok::<_, Infallible>(ReconcileRequest::from(agent)))
            .take_until(shutdown.cancelled_owned());
        let config = controller::Config::default().concurrency(shared.settings.workers);
        let budgets = shared.budgets.clone();
        let reconciles = async move {
            if agents.wait_until_ready().await.is_err() || pods.wait_until_ready().await.is_err() {
                return;
            }
            if tokio::time::timeout(BUDGETS_WAIT, budgets.decided()).await.is_err() {
                tracing::warn!("AgentBudgets cannot be listed; Agents are looked after without them");
            }
            applier(
                |agent, context| Box::pin(reconcile(agent, context)),
                |agent: Arc<GuardedAgent>, error, context: Arc<ReconcileContext>| -> Action {
                    on_error(&agent, error, &context)
                },
                context,
                agents,
                requests,
                config,
            )
            // An Agent that is gone by now is nothing to do; errors were logged by the error policy.
            .for_each(|_| future::ready(()))
            .await;
        };
        tokio::select! {
            _ = watches => {}
            () = reconciles => {}
        }
    }
}

fn api<K>(client: &Client, namespace: Option<&str>) -> Api<K>
where
    K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
{
    match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

fn key(object: &impl ResourceExt) -> AgentKey {
    AgentKey {
        namespace: object.namespace().unwrap_or_default(),
        name: object.name_any(),
    }
}

/// Asks for a reconcile when a spec, a request or a deletion is new: our own status writes are not.
async fn watch_agents(
    shared: &SharedContext,
    namespace: Option<&str>,
    writer: Writer<GuardedAgent>,
    store: &Store<GuardedAgent>,
    queue: &mpsc::UnboundedSender<ObjectRef<GuardedAgent>>,
) {
    let api: Api<GuardedAgent> = api(&shared.client, namespace);
    let stream = watcher(api, watching())
        .default_backoff()
        .modify(|agent| agent.meta_mut().managed_fields = None)
        .reflect(writer);
    let mut seen = super::triggers::ReconcileTriggers::default();
    let mut stream = std::pin::pin!(stream);
    while let Some(event) = stream.next().await {
        match event {
            Ok(Event::Apply(agent)) => {
                agent_seen(shared, &agent);
                if seen.is_new(&agent) {
                    let _ = queue.send(reference(&key(&agent)));
                }
            }
            Ok(Event::Delete(agent)) => {
                seen.forget(&agent);
                forget(shared, &key(&agent));
            }
            Ok(Event::InitDone) => {
                let all = store.state();
                let present: BTreeSet<AgentKey> = all.iter().map(|agent| key(agent.as_ref())).collect();
                for agent in &all {
                    agent_seen(shared, agent);
                }
                shared.budgets.agents_listed(namespace, &present);
                shared.sensors.agents_listed(namespace, &present);
                for gone in shared.memory.retain(namespace, &present) {
                    forget(shared, &gone);
                }
                seen.replace(&all);
                for agent in &present {
                    let _ = queue.send(reference(agent));
                }
            }
            Ok(Event::Init | Event::InitApply(_)) => {}
            Err(error) => tracing::warn!(%error, "the watch of Agents was interrupted; it is resumed"),
        }
    }
}

/// Ledger and Sensors must know an Agent before its pod is told anything. One that cannot be read limits as before.
fn agent_seen(shared: &SharedContext, agent: &GuardedAgent) {
    match &agent.0 {
        Ok(agent) => {
            shared.budgets.agent_seen(agent);
            shared.sensors.agent_seen(agent);
        }
        // It receives as before: what waits for it must not be thrown away.
        Err(invalid) => shared.sensors.agent_unreadable(&invalid.metadata),
    }
}

fn forget(shared: &SharedContext, agent: &AgentKey) {
    shared.budgets.agent_gone(agent);
    shared.sensors.agent_gone(agent);
    shared.loops.forget(agent);
    shared.memory.forget(agent);
}

/// Asks for a reconcile of the Agent whose pod changed, and of all when pods were listed again.
async fn watch_pods(
    shared: &SharedContext,
    namespace: Option<&str>,
    writer: Writer<Pod>,
    agents: &Store<GuardedAgent>,
    queue: &mpsc::UnboundedSender<ObjectRef<GuardedAgent>>,
) {
    let api: Api<Pod> = api(&shared.client, namespace);
    let stream = watcher(api, watching().labels(AGENT_LABEL))
        .default_backoff()
        .modify(trim)
        .reflect(writer);
    let budgets = &shared.budgets;
    let mut listed = BTreeSet::new();
    let mut stream = std::pin::pin!(stream);
    while let Some(event) = stream.next().await {
        match event {
            Ok(event @ (Event::Apply(_) | Event::Delete(_))) => {
                let (Event::Apply(pod) | Event::Delete(pod)) = &event else {
                    continue;
                };
                // A pod has its Agent's name.
                let agent = key(pod);
                if matches!(event, Event::Apply(_)) {
                    budgets.pod_seen(&agent, pod);
                } else {
                    budgets.pod_gone(&agent);
                    shared.sensors.note_left();
                }
                shared.memory.pod_seen(&agent, pod.metadata.uid.as_ref());
                let _ = queue.send(reference(&agent));
            }
            Ok(Event::Init) => listed.clear(),
            Ok(Event::InitApply(pod)) => {
                let agent = key(&pod);
                budgets.pod_seen(&agent, &pod);
                shared.memory.pod_seen(&agent, pod.metadata.uid.as_ref());
                listed.insert(agent);
            }
            Ok(Event::InitDone) => {
                budgets.pods_listed(namespace, &listed);
                listed.clear();
                shared.memory.pods_listed(namespace);
                shared.sensors.note_left();
                for agent in agents.state() {
                    let _ = queue.send(reference(&key(agent.as_ref())));
                }
            }
            Err(error) => tracing::warn!(%error, "the watch of pods was interrupted; it is resumed"),
        }
    }
}
