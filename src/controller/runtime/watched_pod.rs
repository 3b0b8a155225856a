//! A pod of a watch, with no more than the controllers read: [`PodState`](super::pod_state::PodState) and the annotations
//! of the pods of Agents. A whole pod of an Agent is large, and each of its changes is an event.

use std::borrow::Cow;
use std::ops::Deref;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::core::Request;
use kube::{Client, Resource};
use serde::{Deserialize, Deserializer};

use super::guarded::WireMeta;
use super::names;
use crate::api::{AGENT_LABEL, SENSOR_LABEL};

/// A pod without the fields that nothing reads.
#[derive(Clone, Debug)]
pub(in crate::controller) struct WatchedPod(Pod);

#[derive(Deserialize)]
struct WirePod {
    metadata: WireMeta,
    #[serde(default)]
    spec: WireSpec,
    status: Option<PodStatus>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireSpec {
    node_name: Option<String>,
    #[serde(default)]
    containers: Vec<WireContainer>,
}

#[derive(Deserialize)]
struct WireContainer {
    name: String,
    image: Option<String>,
}

impl<'de> Deserialize<'de> for WatchedPod {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let wire = WirePod::deserialize(deserializer)?;
        let containers = wire.spec.containers.into_iter().map(|container| Container {
            name: container.name,
            image: container.image,
            ..Container::default()
        });
        let spec = PodSpec {
            node_name: wire.spec.node_name,
            containers: containers.collect(),
            ..PodSpec::default()
        };
        Ok(Self::new(wire.metadata.into(), spec, wire.status))
    }
}

impl WatchedPod {
    fn new(mut metadata: ObjectMeta, spec: PodSpec, status: Option<PodStatus>) -> Self {
        metadata.managed_fields = None;
        if let Some(annotations) = &mut metadata.annotations {
            annotations.retain(|key, _| [names::SPEC_HASH, names::EPOCH, names::GENERATION].contains(&key.as_str()));
        }
        if let Some(labels) = &mut metadata.labels {
            labels.retain(|key, _| [AGENT_LABEL, SENSOR_LABEL].contains(&key.as_str()));
        }
        Self(Pod {
            metadata,
            spec: Some(spec),
            status,
        })
    }
}

/// Creates a pod. Of the answer, which contains the whole pod, only what a [`WatchedPod`] has is kept.
pub(in crate::controller) async fn create_pod(
    client: &Client,
    namespace: &str,
    pod: &Pod,
) -> Result<WatchedPod, kube::Error> {
    let body = serde_json::to_vec(pod).map_err(kube::Error::SerdeError)?;
    let pods = Request::new(Pod::url_path(&(), Some(namespace)));
    let mut request = pods
        .create(&PostParams::default(), body)
        .map_err(kube::Error::BuildRequest)?;
    request.extensions_mut().insert("create");
    client.request(request).await
}

impl Deref for WatchedPod {
    type Target = Pod;

    fn deref(&self) -> &Pod {
        &self.0
    }
}

impl Resource for WatchedPod {
    type DynamicType = ();
    type Scope = <Pod as Resource>::Scope;

    fn kind((): &()) -> Cow<'_, str> {
        Pod::kind(&())
    }

    fn group((): &()) -> Cow<'_, str> {
        Pod::group(&())
    }

    fn version((): &()) -> Cow<'_, str> {
        Pod::version(&())
    }

    fn plural((): &()) -> Cow<'_, str> {
        Pod::plural(&())
    }

    fn meta(&self) -> &ObjectMeta {
        &self.0.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.0.metadata
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::pod_state::PodState;
    use super::*;

    #[test]
    fn a_decoded_pod_has_the_state_of_the_whole_pod_and_nothing_that_is_not_read() {
        let object = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": "a", "namespace": "n", "uid": "u", "resourceVersion": "5",
                "deletionTimestamp": "2026-01-02T03:04:05Z",
                "labels": {AGENT_LABEL: "a", "other": "x"},
                "annotations": {names::EPOCH: "3", names::SPEC_HASH: "h", names::GENERATION: "2", "other": "x"},
                "ownerReferences": [{"apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent", "name": "a", "uid": "o", "controller": true}],
                "managedFields": [{"manager": "kubelet", "operation": "Update"}],
            },
            "spec": {
                "nodeName": "node",
                "volumes": [{"name": "v", "emptyDir": {}}],
                "initContainers": [{"name": "gateway", "image": "g"}],
                "containers": [{"name": "worker", "image": "i", "env": [{"name": "E", "value": "x"}]}],
            },
            "status": {
                "phase": "Running",
                "startTime": "2026-01-02T03:04:00Z",
                "conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": [{
                    "name": "worker", "image": "i", "imageID": "", "ready": true, "restartCount": 2,
                    "state": {"running": {"startedAt": "2026-01-02T03:04:01Z"}},
                }],
            },
        });
        let whole: Pod = serde_json::from_value(object.clone()).unwrap();
        let decoded: WatchedPod = serde_json::from_value(object).unwrap();
        let state = PodState::of(&decoded);
        assert_eq!(state, PodState::of(&whole));
        assert_eq!((state.epoch, state.node.as_deref()), (3, Some("node")));
        assert_eq!(state.owner.as_deref(), Some("o"));
        let kept = serde_json::to_string(&*decoded).unwrap();
        for dropped in ["other", "volumes", "env", "managedFields", "initContainers"] {
            assert!(!kept.contains(&format!("\"{dropped}\"")), "{dropped}: {kept}");
        }
    }

    #[test]
    fn a_pod_that_has_not_been_scheduled_is_decoded() {
        let object = json!({"metadata": {"name": "a"}, "spec": {"containers": [{"name": "worker"}]}});
        let decoded: WatchedPod = serde_json::from_value(object).unwrap();
        assert_eq!(PodState::of(&decoded).node, None);
    }
}
