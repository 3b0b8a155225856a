//! The watched Agents and pods, by scope, and the requests to reconcile them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kube::runtime::reflector::{self, ObjectRef, Store, store::Writer};
use tokio::sync::watch;

use crate::api::{Agent, NamespacedName};
use crate::controller::runtime::guarded::GuardedObject;
use crate::controller::runtime::queue::{Priority, WorkQueue};
use crate::controller::runtime::watched_pod::WatchedPod;

/// What is known of one namespace, or of all.
pub(super) struct AgentScope {
    /// The namespace; `None`: all.
    pub(super) namespace: Option<String>,
    pub(super) agents: Store<GuardedObject<Agent>>,
    pub(super) pods: Store<WatchedPod>,
    /// Whether its Agents may be reconciled. Until then requests are dropped: [`AgentScopes::open`] makes up for them.
    open: AtomicBool,
    /// Which kinds were listed. Not a store's own signal: of several tasks that wait for that, it wakes only one.
    listed: watch::Sender<ListedKinds>,
}

#[derive(Clone, Copy, Default)]
struct ListedKinds {
    agents: bool,
    pods: bool,
}

/// The halves of the stores that the watches write.
pub(super) struct ScopeWriters {
    pub(super) agents: Writer<GuardedObject<Agent>>,
    pub(super) pods: Writer<WatchedPod>,
}

impl AgentScope {
    pub(super) fn new(namespace: Option<String>) -> (Self, ScopeWriters) {
        let (agents, agents_writer) = reflector::store();
        let (pods, pods_writer) = reflector::store();
        let scope = Self {
            namespace,
            agents,
            pods,
            open: AtomicBool::new(false),
            listed: watch::Sender::default(),
        };
        let writers = ScopeWriters {
            agents: agents_writer,
            pods: pods_writer,
        };
        (scope, writers)
    }

    pub(super) fn agents_listed(&self) {
        self.listed.send_modify(|listed| listed.agents = true);
    }

    pub(super) fn pods_listed(&self) {
        self.listed.send_modify(|listed| listed.pods = true);
    }

    /// Waits until Agents and pods were listed once.
    pub(super) async fn listed(&self) {
        let mut listed = self.listed.subscribe();
        // The sender lives as long as this scope.
        let _ = listed.wait_for(|listed| listed.agents && listed.pods).await;
    }
}

/// All scopes, and the queue that they share.
pub(super) struct AgentScopes {
    scopes: Vec<Arc<AgentScope>>,
    pub(super) queue: Arc<WorkQueue<NamespacedName>>,
}

impl AgentScopes {
    pub(super) fn new(scopes: Vec<Arc<AgentScope>>, queue: Arc<WorkQueue<NamespacedName>>) -> Self {
        Self { scopes, queue }
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<AgentScope>> {
        self.scopes.iter()
    }

    pub(super) fn agent(&self, key: &NamespacedName) -> Option<Arc<GuardedObject<Agent>>> {
        let reference = ObjectRef::new(&key.name).within(&key.namespace);
        self.of(key)?.agents.get(&reference)
    }

    /// The pod of an Agent. It has the same name.
    pub(super) fn pod(&self, key: &NamespacedName) -> Option<Arc<WatchedPod>> {
        let reference = ObjectRef::new(&key.name).within(&key.namespace);
        self.of(key)?.pods.get(&reference)
    }

    /// Asks for a reconcile.
    pub(super) fn request(&self, agent: NamespacedName, priority: Priority) {
        // A watch changes the store first: a request that finds the scope closed is among those that `open` makes.
        if self.of(&agent).is_some_and(|scope| scope.open.load(Ordering::SeqCst)) {
            self.queue.add(agent, priority);
        }
    }

    /// Asks for a reconcile of every Agent of a scope.
    pub(super) fn request_all(&self, scope: &AgentScope) {
        for agent in scope.agents.state() {
            let key = NamespacedName::of(agent.as_ref());
            let priority = listed_priority(&agent, self.pod(&key).is_some());
            self.request(key, priority);
        }
    }

    /// Begins to reconcile the Agents of a scope.
    pub(super) fn open(&self, scope: &AgentScope) {
        scope.open.store(true, Ordering::SeqCst);
        self.request_all(scope);
    }

    fn of(&self, agent: &NamespacedName) -> Option<&AgentScope> {
        let serves = |scope: &&Arc<AgentScope>| scope.namespace.as_ref().is_none_or(|one| *one == agent.namespace);
        self.scopes.iter().find(serves).map(AsRef::as_ref)
    }
}

/// The priority of an Agent in a complete list: most of a new leader's Agents have their pods, and the others wait for
/// theirs.
fn listed_priority(agent: &GuardedObject<Agent>, has_pod: bool) -> Priority {
    let is_current = agent.0.as_ref().is_ok_and(|agent| {
        let written = agent.status.as_ref().and_then(|status| status.observed_generation);
        agent.metadata.deletion_timestamp.is_none() && written.is_some() && written == agent.metadata.generation
    });
    if is_current && has_pod {
        Priority::Low
    } else {
        Priority::High
    }
}

/// The priority of a changed pod: one that has terminated is replaced, everything else is shown in the status.
pub(super) fn pod_priority(pod: &WatchedPod) -> Priority {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    match phase {
        Some("Failed" | "Succeeded") => Priority::High,
        _ => Priority::Low,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn every_task_that_waits_for_the_lists_continues_after_them() {
        let (scope, _writers) = AgentScope::new(None);
        let scope = Arc::new(scope);
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..3 {
            let scope = scope.clone();
            tasks.spawn(async move { scope.listed().await });
        }
        tokio::task::yield_now().await;
        scope.agents_listed();
        tokio::task::yield_now().await;
        assert!(tasks.try_join_next().is_none(), "the pods are not listed");
        scope.pods_listed();
        assert_eq!(tasks.join_all().await.len(), 3);
    }
}
