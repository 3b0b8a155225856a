//! Deletes the shared objects of a namespace after its last Agent, its last Sensor and their pods are gone.
//!
//! Checks after each deletion of an Agent, Sensor or pod. It does not search for objects left over from a time without
//! a leader: they hold no secret and grant no permission, and are deleted the next time that an Agent or Sensor is
//! created there and deleted.

use std::collections::BTreeSet;
use std::time::Duration;

use kube::runtime::reflector::Store;

use super::reconcile::SharedContext;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::namespace_objects::NamespaceObjects;
use crate::controller::runtime::watched_pod::WatchedPod;

/// Delay before the check: a recreated object is back within this time, and many deletions often come together.
const SETTLE: Duration = Duration::from_secs(1);
/// Interval between retries of failed deletions.
const AGAIN: Duration = Duration::from_mins(10);

/// Runs until the reconciler ends.
pub(super) async fn clean_up(shared: &SharedContext, pods: &[Store<WatchedPod>]) {
    for store in pods {
        // Fails only if the watch is gone, which ends the run anyway.
        let _ = store.wait_until_ready().await;
    }
    loop {
        tokio::select! {
            () = shared.sensors.wait_for_departure() => {}
            () = tokio::time::sleep(AGAIN) => {}
        }
        tokio::time::sleep(SETTLE).await;
        let made: BTreeSet<String> = kinds(shared)
            .into_iter()
            .flat_map(NamespaceObjects::namespaces)
            .collect();
        for namespace in made.iter().filter(|namespace| is_abandoned(shared, pods, namespace)) {
            if let Err(error) = clear(shared, pods, namespace).await {
                tracing::warn!(namespace, %error, "failed to delete the shared objects of a namespace; retrying");
            }
        }
    }
}

fn kinds(shared: &SharedContext) -> [&NamespaceObjects; 2] {
    [&shared.namespaces, shared.sensors.namespaces()]
}

fn is_abandoned(shared: &SharedContext, pods: &[Store<WatchedPod>], namespace: &str) -> bool {
    let is_here = |pod: &WatchedPod| pod.metadata.namespace.as_deref() == Some(namespace);
    // Short circuit: the pods are searched only in namespaces without Agents and Sensors.
    shared.sensors.is_empty(namespace) && !pods.iter().any(|store| store.find(is_here).is_some())
}

/// Holds both creation locks and checks again under them. An Agent or Sensor that arrives meanwhile waits and then
/// recreates the objects; it is registered before anything is created for it, so the second check sees it.
async fn clear(shared: &SharedContext, pods: &[Store<WatchedPod>], namespace: &str) -> Result<(), ReconcileError> {
    let [agents, sensors] = kinds(shared);
    let _held = (agents.lock_creation().await, sensors.lock_creation().await);
    agents.forget(namespace);
    sensors.forget(namespace);
    if !is_abandoned(shared, pods, namespace) {
        return Ok(());
    }
    agents.clear(namespace).await?;
    sensors.clear(namespace).await
}
