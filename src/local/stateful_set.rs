//! Keeps one pod for each `StatefulSet`, like the `StatefulSet` controller of a cluster.
//!
//! The controller creates a set for each Sensor that runs in its own pod. A pod whose template has changed is replaced
//! once the old pod has ended; claims keep their names, and so their directories. Runs no pods.

use std::sync::Arc;

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::api_server::object_key::{PODS, STATEFUL_SETS};
use crate::api_server::{ObjectKey, ObjectStore};

/// Label of a pod: the generation of its set when it was created.
const REVISION: &str = "controller-revision-hash";

/// Maintains the pods until `stop`.
pub async fn run(store: Arc<ObjectStore>, stop: CancellationToken) {
    let mut news = store.news();
    loop {
        // Mark as seen before reading: a change in the meantime wakes this again.
        news.mark_unchanged();
        reconcile_sets(&store);
        tokio::select! {
            Ok(()) = news.changed() => {}
            () = stop.cancelled() => return,
        }
    }
}

/// Creates missing pods, and terminates those that are outdated or not wanted.
fn reconcile_sets(store: &ObjectStore) {
    let (_, sets) = store.list(STATEFUL_SETS, "");
    let (_, pods) = store.list(PODS, "");
    for (key, pod) in &pods {
        let Some(owner) = owner(pod) else { continue };
        let set = sets.iter().find(|(_, set)| set["metadata"]["uid"] == owner);
        let stays =
            set.is_some_and(|(_, set)| runs(set) && pod["metadata"]["labels"][REVISION] == revision(set).as_str());
        if !stays && pod["metadata"]["deletionTimestamp"].is_null() {
            // It may have been removed in the meantime.
            let _ = store.delete(key, pod["metadata"]["uid"].as_str(), None);
        }
    }
    for (key, set) in sets.iter().filter(|(_, set)| runs(set)) {
        let name = format!("{}-0", key.name);
        let pod = ObjectKey::new(PODS, &key.namespace, &name);
        if store.get(&pod).is_none()
            && let Err(error) = store.create(pod, pod_from_template(set, &key.name))
        {
            tracing::error!(%error, name, "failed to create a pod");
        }
    }
}

/// The uid of the set that a pod belongs to.
fn owner(pod: &Value) -> Option<&str> {
    let owners = pod["metadata"]["ownerReferences"].as_array()?;
    let set = owners.iter().find(|owner| owner["kind"] == "StatefulSet")?;
    set["uid"].as_str()
}

fn runs(set: &Value) -> bool {
    set["spec"]["replicas"].as_i64() != Some(0)
}

fn revision(set: &Value) -> String {
    set["metadata"]["generation"].to_string()
}

/// The pod of a set.
fn pod_from_template(set: &Value, name: &str) -> Value {
    let mut pod = set["spec"]["template"].clone();
    pod["apiVersion"] = json!("v1");
    pod["kind"] = json!("Pod");
    pod["metadata"]["labels"][REVISION] = json!(revision(set));
    pod["metadata"]["ownerReferences"] = json!([{
        "apiVersion": "apps/v1", "kind": "StatefulSet", "name": name, "uid": set["metadata"]["uid"], "controller": true,
    }]);
    let claims = set["spec"]["volumeClaimTemplates"].as_array().into_iter().flatten();
    let claims = claims.filter_map(|claim| claim["metadata"]["name"].as_str());
    let claimed = claims
        .map(|claim| json!({ "name": claim, "persistentVolumeClaim": { "claimName": format!("{claim}-{name}-0") } }));
    let mut volumes = pod["spec"]["volumes"].as_array().cloned().unwrap_or_default();
    volumes.extend(claimed);
    pod["spec"]["volumes"] = json!(volumes);
    pod
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;

    use super::*;
    use crate::api_server::{ObjectPatch, PatchRequest, PatchScope};

    fn set() -> ObjectKey {
        ObjectKey::new(STATEFUL_SETS, "n", "s")
    }

    fn pod(store: &ObjectStore) -> Option<Value> {
        store.get(&ObjectKey::new(PODS, "n", "s-0"))
    }

    fn patch(store: &ObjectStore, key: &ObjectKey, patch: Value) {
        let (scope, patch, manager) = (PatchScope::Object, &ObjectPatch::Merge(patch), "test");
        store.patch(key, &PatchRequest { scope, patch, manager }).unwrap();
    }

    /// Removes a terminating pod, as the runner of pods does.
    fn ends(store: &ObjectStore) {
        let old = pod(store).unwrap();
        assert!(old["metadata"]["deletionTimestamp"].is_string(), "{old}");
        store.delete(&ObjectKey::new(PODS, "n", "s-0"), None, Some(0)).unwrap();
    }

    fn with_a_set() -> ObjectStore {
        let store = ObjectStore::in_memory(std::sync::Arc::new(jiff::Timestamp::now));
        let template = json!({ "metadata": { "labels": { "a": "b" } }, "spec": { "volumes": [{ "name": "token" }] } });
        let claims = json!([{ "metadata": { "name": "outbox" } }]);
        let spec = json!({ "replicas": 1, "template": template, "volumeClaimTemplates": claims });
        store.create(set(), json!({ "spec": spec })).unwrap();
        reconcile_sets(&store);
        // It runs from now on.
        patch(
            &store,
            &ObjectKey::new(PODS, "n", "s-0"),
            json!({ "spec": { "nodeName": "local" } }),
        );
        store
    }

    #[test]
    fn a_set_has_one_pod_with_its_labels_and_the_claim_that_stays() {
        let store = with_a_set();
        let made = pod(&store).unwrap();
        assert_eq!(made["metadata"]["labels"]["a"], "b");
        assert_eq!(made["spec"]["volumes"][0]["name"], "token");
        assert_eq!(
            made["spec"]["volumes"][1],
            json!({ "name": "outbox", "persistentVolumeClaim": { "claimName": "outbox-s-0" } })
        );
        reconcile_sets(&store);
        assert_eq!(pod(&store), Some(made));
    }

    #[test]
    fn another_template_replaces_the_pod_once_the_old_one_has_ended() {
        let store = with_a_set();
        let old = pod(&store).unwrap();
        patch(&store, &set(), json!({ "metadata": { "annotations": { "x": "y" } } }));
        reconcile_sets(&store);
        assert_eq!(pod(&store), Some(old.clone()), "the template is the same");
        let other = json!({ "spec": { "template": { "spec": { "containers": [{ "name": "x" }] } } } });
        patch(&store, &set(), other);
        reconcile_sets(&store);
        ends(&store);
        reconcile_sets(&store);
        let new = pod(&store).unwrap();
        assert_eq!(new["spec"]["containers"][0]["name"], "x");
        assert_ne!(new["metadata"]["uid"], old["metadata"]["uid"]);
    }

    #[test]
    fn without_its_set_a_pod_ends_and_pods_of_others_stay() {
        let store = with_a_set();
        let other = ObjectKey::new(PODS, "n", "agent");
        store.create(other.clone(), json!({ "spec": {} })).unwrap();
        store.delete(&set(), None, None).unwrap();
        reconcile_sets(&store);
        ends(&store);
        reconcile_sets(&store);
        assert_eq!(pod(&store), None);
        assert!(store.get(&other).unwrap()["metadata"]["deletionTimestamp"].is_null());
    }

    #[test]
    fn a_set_of_none_has_no_pod() {
        let store = with_a_set();
        patch(&store, &set(), json!({ "spec": { "replicas": 0 } }));
        reconcile_sets(&store);
        ends(&store);
        reconcile_sets(&store);
        assert_eq!(pod(&store), None);
    }
}
