//! Dependencies of the reconciler: settings, clock and observer.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{EnvVar, LocalObjectReference, ObjectReference, ResourceRequirements};
use kube::Resource as _;
use kube::runtime::reflector::{ObjectRef, Store};

use crate::api::status::LoopOutcome;
use crate::api::{Agent, NamespacedName};
use crate::controller::durations::totals::AgentLabels;
use crate::controller::policy::PlatformPolicy;
use crate::controller::runtime::ReconcileResult;
use crate::controller::runtime::guarded::GuardedObject;
use crate::link::pod::AgentEgress;
use crate::telemetry::reconcile_traces::ReconcileTracer;

/// Settings from the chart, the same for every Agent.
#[derive(Clone, Debug, PartialEq)]
pub struct ReconcilerSettings {
    /// Image of the pods; the same as the controller's.
    pub image: String,
    /// `imagePullPolicy` of the pods; if absent, the default of the cluster.
    pub image_pull_policy: Option<String>,
    /// Base URL of the link, `https://agentloop-link.<namespace>.svc:8443`.
    pub link_url: String,
    /// The destinations that gateways may connect to.
    pub egress: AgentEgress,
    pub controller_namespace: String,
    /// Namespaces whose Agents are reconciled; empty: all.
    pub watch_namespaces: Vec<String>,
    /// Resources of the gateway container.
    pub gateway_resources: ResourceRequirements,
    /// Resources of the worker container, for Agents that do not set them.
    pub worker_resources: ResourceRequirements,
    /// Secrets for pulling the images of every pod, besides those of the Agent.
    pub image_pull_secrets: Vec<LocalObjectReference>,
    /// Environment variables of the gateway container besides its own.
    pub gateway_environment: Vec<EnvVar>,
    /// Secret of the Agent's namespace with the authorities of the OTLP collector, for the gateway.
    pub otlp_ca_secret: Option<String>,
    /// Number of concurrent reconciles.
    pub workers: u16,
    /// Restrictions that the platform sets for every Agent.
    pub policy: PlatformPolicy,
}

/// Observes the reconciler; the metrics are built from it.
pub trait ReconcileObserver: Send + Sync {
    fn started(&self);
    fn finished(&self, how: ReconcileResult, took: Duration);

    /// Traces reconciles.
    fn tracer(&self) -> ReconcileTracer {
        ReconcileTracer::default()
    }
    /// Passes a live view of the Agents. Called once, when all Agents and pods are listed.
    fn agents(&self, agents: AgentsView);
    /// The watch shows this version of an Agent; also the last one, just before [`Self::agent_deleted`].
    fn agent_seen(&self, agent: &Agent);
    /// The Agent is gone, also from the view.
    fn agent_deleted(&self, agent: &NamespacedName);
    /// These are all Agents of the scope, parseable or not; the view has no others of it.
    fn agents_listed(&self, scope: Option<&str>, listed: &BTreeSet<NamespacedName>);
}

/// A live view of all Agents that this process watches.
#[derive(Clone, Default)]
pub struct AgentsView {
    stores: Vec<Store<GuardedObject<Agent>>>,
}

impl AgentsView {
    #[must_use]
    pub fn new(stores: Vec<Store<GuardedObject<Agent>>>) -> Self {
        Self { stores }
    }

    /// Whether this Agent exists, parseable or not.
    #[must_use]
    pub fn contains(&self, agent: &NamespacedName) -> bool {
        let reference = ObjectRef::new(&agent.name).within(&agent.namespace);
        self.stores.iter().any(|store| store.get(&reference).is_some())
    }

    /// The reference of Events to this Agent, parseable or not.
    #[must_use]
    pub fn reference(&self, agent: &NamespacedName) -> Option<ObjectReference> {
        let reference = ObjectRef::new(&agent.name).within(&agent.namespace);
        let found = self.stores.iter().find_map(|store| store.get(&reference))?;
        Some(found.object_ref(&()))
    }

    /// Whether this Agent has no pod because it has no task.
    #[must_use]
    pub fn is_scaled_to_zero(&self, agent: &NamespacedName) -> bool {
        let reference = ObjectRef::new(&agent.name).within(&agent.namespace);
        let found = self.stores.iter().find_map(|store| store.get(&reference));
        let status = found
            .as_ref()
            .and_then(|found| found.0.as_ref().ok()?.status.as_ref()?.r#loop.as_ref());
        status.is_some_and(|status| status.outcome == Some(LoopOutcome::ScaledToZero))
    }

    /// What the labels of an Agent's durations are; `None` if it does not exist or cannot be parsed.
    #[must_use]
    pub fn labels(&self, agent: &NamespacedName) -> Option<AgentLabels> {
        let reference = ObjectRef::new(&agent.name).within(&agent.namespace);
        let found = self.stores.iter().find_map(|store| store.get(&reference))?;
        let spec = &found.0.as_ref().ok()?.spec;
        let models = [Some(&spec.model), spec.light_model.as_ref()];
        Some(AgentLabels {
            mode: spec.mode.as_ref().to_owned(),
            models: models.into_iter().flatten().map(|model| model.name.clone()).collect(),
        })
    }

    /// Waits until every store has been filled once.
    pub(super) async fn ready(&self) {
        for store in &self.stores {
            // Fails only if the watch is gone, which ends the run anyway.
            let _ = store.wait_until_ready().await;
        }
    }

    /// Calls `visit` with each Agent. Skips objects that could not be parsed.
    pub fn for_each(&self, visit: impl FnMut(&Agent)) {
        self.snapshot().for_each(visit);
    }

    /// The Agents as they are now.
    #[must_use]
    pub fn snapshot(&self) -> AgentsSnapshot {
        AgentsSnapshot(self.stores.iter().flat_map(Store::state).collect())
    }
}

/// The Agents at one moment.
pub struct AgentsSnapshot(Vec<Arc<GuardedObject<Agent>>>);

impl AgentsSnapshot {
    /// Calls `visit` with each Agent. Skips objects that could not be parsed.
    pub fn for_each(&self, visit: impl FnMut(&Agent)) {
        self.0.iter().filter_map(|guard| guard.0.as_ref().ok()).for_each(visit);
    }
}
