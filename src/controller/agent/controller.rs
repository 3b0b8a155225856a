//! Runs the Agent reconciler: watches, queue and shutdown.
//!
//! It drives the watches itself instead of using kube's `Controller`. The store is replaced only when a list is
//! complete, and changes during an interrupted watch produce no events, so every completed list, of Agents or of pods,
//! enqueues all Agents. The first reconcile waits until both stores are filled and the AgentBudgets are listed.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures::future;
use kube::runtime::WatchStreamExt;
use kube::runtime::reflector::{Store, store::Writer};
use kube::runtime::watcher::{Event, watcher};
use kube::{Client, ResourceExt};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::context::{AgentsView, ReconcileObserver, ReconcilerSettings};
use super::liveness;
use super::namespace_cleanup;
use super::objects::{network_policy, service_account};
use super::reconcile::{ReconcileContext, SharedContext};
use super::reconcile_state::ReconcileStates;
use super::scopes::{AgentScope, AgentScopes, pod_priority};
use super::text_checks::TextChecker;
use super::triggers::ReconcileTriggers;
use crate::api::{AGENT_LABEL, Agent, NamespacedName};
use crate::controller::budget::BudgetLedger;
use crate::controller::connection::watching;
use crate::controller::pod_sessions::PodSessions;
use crate::controller::runtime::guarded::GuardedObject;
use crate::controller::runtime::namespace_objects::{NamespaceObjects, SharedObjects};
use crate::controller::runtime::queue::Priority;
use crate::controller::runtime::watch::{follow, join, scoped_api, scopes};
use crate::controller::runtime::watch_backoff::WatchBackoff;
use crate::controller::runtime::watched_pod::WatchedPod;
use crate::controller::runtime::{self, EventSink, WallClock};
use crate::controller::sensor::SensorRegistry;
use crate::telemetry::metrics::Metrics;

/// How long the first reconcile waits for the AgentBudgets. After that, suspends and deletions are handled without
/// them, and reported budget problems are kept.
const BUDGETS_WAIT: Duration = Duration::from_secs(15);

/// The inputs of [`run`].
pub struct ReconcilerParts {
    /// Client of the API server.
    pub client: Client,
    /// Settings from the chart.
    pub settings: ReconcilerSettings,
    /// The sessions of the pods, shared with the link server.
    pub loops: Arc<PodSessions>,
    /// The ledger; it is notified of Agents and pods.
    pub budgets: Arc<BudgetLedger>,
    /// The Sensors; they are notified of Agents and of the reports of their pods.
    pub sensors: Arc<SensorRegistry>,
    /// Agents whose pods have sent a new report; the receiver of [`PodSessions::new`].
    pub changed: mpsc::UnboundedReceiver<NamespacedName>,
    /// The CA bundle (PEM) that pods must trust; published in every namespace with Agents.
    pub ca_bundle: watch::Receiver<String>,
    /// Receives each bundle once it is published in every namespace with Agents.
    pub published: watch::Sender<String>,
    /// Observes every reconcile.
    pub observer: Arc<dyn ReconcileObserver>,
    /// What the queue counts.
    pub metrics: Arc<Metrics>,
    pub clock: WallClock,
    /// Takes Events, also those of reconciles that run when the stop comes: its publisher must end after this run.
    pub events: EventSink,
    /// Ends the run. Running reconciles may take up to 4 s more, then they are aborted.
    pub shutdown: CancellationToken,
}

/// Reconciles Agents until `shutdown`. Only the leader may run this, once per process.
pub async fn run(parts: ReconcilerParts) {
    let shared = Arc::new(SharedContext {
        namespaces: NamespaceObjects::new(
            parts.client.clone(),
            parts.ca_bundle,
            parts.published,
            SharedObjects {
                account: service_account,
                network_policy: Some(network_policy),
            },
        ),
        client: parts.client,
        loops: parts.loops,
        budgets: parts.budgets,
        sensors: parts.sensors,
        memory: ReconcileStates::default(),
        texts: TextChecker::new(),
        events: parts.events,
        observer: parts.observer,
        clock: parts.clock,
        settings: parts.settings,
    });
    let (scopes, writers): (Vec<_>, Vec<_>) = scopes(&shared.settings.watch_namespaces)
        .into_iter()
        .map(AgentScope::new)
        .unzip();
    let queue = runtime::queue(&parts.metrics, "agent");
    let scopes = AgentScopes::new(scopes.into_iter().map(Arc::new).collect(), queue);
    let context = Arc::new(ReconcileContext { shared, scopes });
    let mut watches = JoinSet::new();
    for (scope, writers) in context.scopes.all().zip(writers) {
        watches.spawn(watch_agents(context.clone(), scope.clone(), writers.agents));
        watches.spawn(watch_pods(context.clone(), scope.clone(), writers.pods));
        watches.spawn(open_when_listed(context.clone(), scope.clone()));
    }
    let queue = context.scopes.queue.clone();
    let workers = context.shared.settings.workers;
    tokio::select! {
        () = runtime::run(context.clone(), queue, workers, parts.shutdown) => {}
        () = join(watches) => {}
        () = shared_work(&context, parts.changed) => {}
    }
}

/// The tasks shared by all scopes; they end only with the run.
async fn shared_work(context: &ReconcileContext, changed: mpsc::UnboundedReceiver<NamespacedName>) {
    let scopes = &context.scopes;
    let view = AgentsView::new(scopes.all().map(|scope| scope.agents.clone()).collect());
    let pods: Vec<Store<WatchedPod>> = scopes.all().map(|scope| scope.pods.clone()).collect();
    tokio::join!(
        route(changed, scopes),
        sweep(context),
        show(&context.shared, &view, &pods),
        namespace_cleanup::clean_up(&context.shared, &pods),
        publish_bundle(&context.shared, &view),
    );
}

/// Passes the Agents to the observer once all Agents and pods are listed. Any earlier, the link would reject pods
/// because their Agent seems not to exist.
async fn show(shared: &SharedContext, view: &AgentsView, pods: &[Store<WatchedPod>]) {
    view.ready().await;
    for store in pods {
        // Fails only if the watch is gone, which ends the run anyway.
        let _ = store.wait_until_ready().await;
    }
    shared.observer.agents(view.clone());
}

/// Enqueues the Agents whose pods have sent a new report.
async fn route(mut changed: mpsc::UnboundedReceiver<NamespacedName>, scopes: &AgentScopes) {
    while let Some(agent) = changed.recv().await {
        scopes.request(agent, Priority::Low);
    }
    future::pending::<()>().await;
}

async fn sweep(context: &ReconcileContext) {
    let shared = &context.shared;
    loop {
        tokio::time::sleep(liveness::SWEEP).await;
        for agent in liveness::changed_agents(&shared.memory, &shared.loops, (shared.clock)()) {
            context.scopes.request(agent, Priority::Low);
        }
    }
}

/// Keeps the CA bundle published in every namespace with Agents.
async fn publish_bundle(shared: &SharedContext, view: &AgentsView) {
    view.ready().await;
    let namespaces = || {
        let mut namespaces = HashSet::new();
        view.for_each(|agent| namespaces.extend(agent.namespace()));
        Some(namespaces)
    };
    shared.namespaces.maintain(namespaces).await;
}

/// Opens a scope once its Agents and pods, and the AgentBudgets, are listed.
async fn open_when_listed(context: Arc<ReconcileContext>, scope: Arc<AgentScope>) {
    scope.listed().await;
    let budgets = context.shared.budgets.decided();
    if tokio::time::timeout(BUDGETS_WAIT, budgets).await.is_err() {
        tracing::warn!("failed to list AgentBudgets in time; reconciling Agents without them");
    }
    context.scopes.open(&scope);
}

/// Enqueues an Agent when its spec, a request or its deletion is new, but not for the controller's own status writes.
async fn watch_agents(
    context: Arc<ReconcileContext>,
    scope: Arc<AgentScope>,
    mut writer: Writer<GuardedObject<Agent>>,
) {
    let (shared, namespace) = (&context.shared, scope.namespace.as_deref());
    let stream = watcher(scoped_api(&shared.client, namespace), watching()).backoff(WatchBackoff::default());
    let mut seen = ReconcileTriggers::default();
    let mut listed = BTreeSet::new();
    let handle = |event: Event<GuardedObject<Agent>>| {
        // Ledger and Sensors learn of an Agent before a reconcile can find it, and of all before the first reconcile.
        match &event {
            Event::Init => listed.clear(),
            Event::InitApply(agent) => {
                agent_seen(shared, agent);
                listed.insert(NamespacedName::of(agent));
            }
            Event::InitDone => {
                shared.budgets.agents_listed(namespace, &listed);
                shared.sensors.agents_listed(namespace, &listed);
            }
            Event::Apply(agent) => agent_seen(shared, agent),
            Event::Delete(agent) => {
                // The last state has what was counted since the one before.
                if let Ok(agent) = &agent.0 {
                    shared.observer.agent_seen(agent);
                }
            }
        }
        writer.apply_watcher_event(&event);
        match event {
            Event::Apply(agent) if seen.is_new(&agent) => {
                context.scopes.request(NamespacedName::of(&agent), Priority::High);
            }
            Event::Delete(agent) => {
                seen.forget(&agent);
                shared.observer.agent_deleted(&NamespacedName::of(&agent));
                forget(shared, &NamespacedName::of(&agent));
            }
            Event::InitDone => {
                shared.observer.agents_listed(namespace, &listed);
                for gone in shared.memory.retain(namespace, &listed) {
                    forget(shared, &gone);
                }
                seen.replace(&scope.agents.state());
                listed.clear();
                scope.agents_listed();
                context.scopes.request_all(&scope);
            }
            Event::Init | Event::InitApply(_) | Event::Apply(_) => {}
        }
    };
    follow(stream, "Agents", handle).await;
}

/// Registers an Agent with the ledger and the Sensors before its pod receives any directives. For an unparseable Agent,
/// the ledger keeps the last known limits.
fn agent_seen(shared: &SharedContext, agent: &GuardedObject<Agent>) {
    match &agent.0 {
        Ok(agent) => {
            shared.observer.agent_seen(agent);
            shared.budgets.agent_seen(agent);
            shared.sensors.agent_seen(agent);
        }
        // It stays a receiver, so that its pending deliveries are not dropped.
        Err(invalid) => shared.sensors.agent_unreadable(&invalid.metadata),
    }
}

fn forget(shared: &SharedContext, agent: &NamespacedName) {
    shared.budgets.agent_gone(agent);
    shared.sensors.agent_gone(agent);
    shared.loops.forget(agent);
    shared.memory.forget(agent);
}

/// Enqueues the Agent whose pod changed, and all Agents after a complete list of pods.
async fn watch_pods(context: Arc<ReconcileContext>, scope: Arc<AgentScope>, writer: Writer<WatchedPod>) {
    let (shared, namespace) = (&context.shared, scope.namespace.as_deref());
    let config = watching().labels(AGENT_LABEL);
    let stream = watcher(scoped_api(&shared.client, namespace), config)
        .backoff(WatchBackoff::default())
        .reflect(writer);
    let mut listed = BTreeSet::new();
    let handle = |event: Event<WatchedPod>| match event {
        Event::Apply(pod) => {
            let agent = NamespacedName::of(&pod);
            pod_seen(shared, &agent, &pod);
            context.scopes.request(agent, pod_priority(&pod));
        }
        Event::Delete(pod) => {
            let agent = NamespacedName::of(&pod);
            shared.budgets.pod_gone(&agent);
            shared.sensors.note_left();
            shared.memory.pod_seen(&agent, pod.metadata.uid.as_ref());
            context.scopes.request(agent, Priority::High);
        }
        Event::Init => listed.clear(),
        Event::InitApply(pod) => {
            let agent = NamespacedName::of(&pod);
            pod_seen(shared, &agent, &pod);
            listed.insert(agent);
        }
        Event::InitDone => {
            shared.budgets.pods_listed(namespace, &listed);
            listed.clear();
            shared.memory.pods_listed(namespace);
            shared.sensors.note_left();
            scope.pods_listed();
            context.scopes.request_all(&scope);
        }
    };
    follow(stream, "pods", handle).await;
}

fn pod_seen(shared: &SharedContext, agent: &NamespacedName, pod: &WatchedPod) {
    shared.budgets.pod_seen(agent, pod);
    shared.memory.pod_seen(agent, pod.metadata.uid.as_ref());
}
