//! What the reconciler is given from outside: settings, clock, observer.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ResourceRequirements;
use kube::core::DeserializeGuard;
use kube::runtime::reflector::{ObjectRef, Store};

use crate::api::Agent;
use crate::controller::pod_sessions::AgentKey;
use crate::controller::policy::PlatformPolicy;
use crate::link::pod::AgentEgress;

/// Where the time comes from.
pub type WallClock = Arc<dyn Fn() -> Timestamp + Send + Sync>;

/// What the chart decides for every Agent.
#[derive(Clone, Debug, PartialEq)]
pub struct ReconcilerSettings {
    /// Image of the pods: the controller's own.
    pub image: String,
    /// `imagePullPolicy` of the pods; absent: the cluster's default.
    pub image_pull_policy: Option<String>,
    /// Base address of the link, `https://agentloop-link.<namespace>.svc:8443`.
    pub link_url: String,
    /// Where the gateways may connect to.
    pub egress: AgentEgress,
    /// The controller's own namespace.
    pub controller_namespace: String,
    /// Namespaces whose Agents are served; empty: all.
    pub watch_namespaces: Vec<String>,
    /// Resources of the gateway container.
    pub gateway_resources: ResourceRequirements,
    /// Resources of the worker container of Agents that set none.
    pub worker_resources: ResourceRequirements,
    /// Agents reconciled at the same time.
    pub workers: u16,
    /// What the platform decides for every Agent.
    pub policy: PlatformPolicy,
}

/// How one reconcile ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReconcileResult {
    /// Nothing more to do until something changes.
    Success,
    /// Nothing more to do until a known moment.
    RequeueAfter,
    /// It is tried again with backoff.
    Error(ReconcileErrorKind),
}

/// Kinds of reconcile errors. A closed set: a label and a log field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::AsRefStr, strum::IntoStaticStr, strum::EnumIter)]
pub enum ReconcileErrorKind {
    /// The API server did not answer in time, or the whole reconcile took too long.
    Timeout,
    /// The API server could not be reached or failed.
    Unavailable,
    /// The API server refused a request of the controller.
    Refused,
}

/// Is told what the reconciler does; the metrics are made of it.
pub trait ReconcileObserver: Send + Sync {
    /// A reconcile starts.
    fn started(&self);
    /// A reconcile ended.
    fn finished(&self, how: ReconcileResult, took: Duration);
    /// The Agents, readable at any time from now on. Called once, as soon as all Agents and pods are known.
    fn agents(&self, agents: AgentsView);
}

/// A view of all Agents that this process watches.
#[derive(Clone, Default)]
pub struct AgentsView {
    stores: Vec<Store<DeserializeGuard<Agent>>>,
}

impl AgentsView {
    /// A view of these stores.
    #[must_use]
    pub fn new(stores: Vec<Store<DeserializeGuard<Agent>>>) -> Self {
        Self { stores }
    }

    /// Whether this Agent exists, readable or not.
    #[must_use]
    pub fn contains(&self, agent: &AgentKey) -> bool {
        let reference = ObjectRef::new(&agent.name).within(&agent.namespace);
        self.stores.iter().any(|store| store.get(&reference).is_some())
    }

    /// Waits until every store has been filled once.
    pub(super) async fn ready(&self) {
        for store in &self.stores {
            // Fails only when the watch is gone, which ends the run anyway.
            let _ = store.wait_until_ready().await;
        }
    }

    /// Calls `visit` with each Agent. Objects that could not be read are left out.
    pub fn for_each(&self, mut visit: impl FnMut(&Agent)) {
        for store in &self.stores {
            for guard in store.state() {
                if let Ok(agent) = &guard.0 {
                    visit(agent);
                }
            }
        }
    }
}
