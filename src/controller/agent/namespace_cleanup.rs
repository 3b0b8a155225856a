//! Takes away what a namespace had for pods of ours once its last Agent, its last Sensor and their pods are gone.
//!
//! Looks whenever somebody left. What was left while nobody led is not looked for: it holds no secret and no right, and goes
//! with the next one who comes and leaves.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::runtime::reflector::Store;

use super::error::ReconcileError;
use super::namespace_objects::NamespaceObjects;
use super::reconcile::SharedContext;

/// Who is replaced by another of its name is back within this time; and many often leave together.
const SETTLE: Duration = Duration::from_secs(1);
/// Time until what could not be taken away is tried again.
const AGAIN: Duration = Duration::from_mins(10);

/// Sweeps until the run ends.
pub(super) async fn clean_up(shared: &SharedContext, pods: &[Store<Pod>]) {
    for store in pods {
        // Fails only when the watch is gone, which ends the run anyway.
        let _ = store.wait_until_ready().await;
    }
    loop {
        tokio::select! {
            () = shared.sensors.left() => {}
            () = tokio::time::sleep(AGAIN) => {}
        }
        tokio::time::sleep(SETTLE).await;
        let made: BTreeSet<String> = kinds(shared).into_iter().flat_map(NamespaceObjects::made).collect();
        for namespace in made.iter().filter(|namespace| is_abandoned(shared, pods, namespace)) {
            if let Err(error) = clear(shared, pods, namespace).await {
                tracing::warn!(namespace, %error, "what Agents and Sensors shared could not be taken away");
            }
        }
    }
}

fn kinds(shared: &SharedContext) -> [&NamespaceObjects; 2] {
    [&shared.namespaces, shared.sensors.namespaces()]
}

fn is_abandoned(shared: &SharedContext, pods: &[Store<Pod>], namespace: &str) -> bool {
    let is_here = |pod: &Pod| pod.metadata.namespace.as_deref() == Some(namespace);
    // The pods are looked through only where nothing else is.
    shared.sensors.is_empty(namespace) && !pods.iter().any(|store| store.find(is_here).is_some())
}

/// Whoever comes meanwhile waits, and makes it all again: it is known here before anything is made for it.
async fn clear(shared: &SharedContext, pods: &[Store<Pod>], namespace: &str) -> Result<(), ReconcileError> {
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
