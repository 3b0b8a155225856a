//! Reduces a pod to the fields that the reconcilers need. Pure.

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus as KubePodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};

use super::names;
use super::owner::controlling;
use crate::api::status::PodStatus;
use crate::api::{AGENT_LABEL, Agent};

/// Reasons of the condition `PodReady`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::AsRefStr, strum::IntoStaticStr, strum::EnumIter)]
pub(in crate::controller) enum PodReason {
    /// Its containers are starting.
    Starting,
    /// Its containers are ready.
    Running,
    /// The scheduler found no node for it.
    Unschedulable,
    /// An image cannot be pulled.
    ImagePullFailed,
    /// A container terminates repeatedly.
    CrashLooping,
    /// The pod terminated; its node or the cluster ended it.
    Evicted,
    /// Its node is unreachable.
    NodeLost,
    /// Its volume claim still belongs to an earlier Agent with the same name, and is being deleted.
    ClaimEnding,
    /// Its volume claim is owned by another object.
    ClaimForeign,
    /// It does not exist, or is terminating.
    Absent,
}

/// Waiting reasons of a container whose image cannot be pulled.
const IMAGE_TROUBLE: [&str; 6] = [
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "RegistryUnavailable",
];

#[derive(Clone, Debug, PartialEq)]
pub(in crate::controller) struct PodState {
    pub(in crate::controller) name: String,
    pub(in crate::controller) uid: String,
    /// UID of the Agent that it belongs to.
    pub(in crate::controller) owner: Option<String>,
    /// UID of the `StatefulSet` that it belongs to.
    pub(in crate::controller) set: Option<String>,
    /// Fencing epoch.
    pub(in crate::controller) epoch: i64,
    /// Image of the container `worker`.
    pub(in crate::controller) image: Option<String>,
    /// While it is terminating: the time by which it should be gone, its deletion timestamp.
    pub(in crate::controller) gone_by: Option<Timestamp>,
    /// It has terminated and will never run again.
    pub(in crate::controller) ended: bool,
    /// Reason of `PodReady`.
    pub(in crate::controller) reason: PodReason,
    /// Message of `PodReady`; unchanged as long as the cause is, so that it causes no status writes.
    pub(in crate::controller) message: String,
    pub(in crate::controller) node: Option<String>,
    started_at: Option<Time>,
    restarts: i32,
}

impl PodState {
    pub(in crate::controller) fn of(pod: &Pod) -> Self {
        let meta = &pod.metadata;
        let empty = KubePodStatus::default();
        let status = pod.status.as_ref().unwrap_or(&empty);
        let gone_by = meta.deletion_timestamp.as_ref().map(|time| time.0);
        let (reason, message) = if gone_by.is_some() {
            (PodReason::Absent, "the pod is terminating".into())
        } else {
            readiness(status)
        };
        let containers = || containers(status);
        let worker = containers().find(|container| container.name == names::WORKER);
        Self {
            name: meta.name.clone().unwrap_or_default(),
            uid: meta.uid.clone().unwrap_or_default(),
            owner: agent(pod),
            set: controlling::<StatefulSet>(owners(pod)).map(str::to_owned),
            epoch: epoch(pod),
            image: image(pod),
            gone_by,
            ended: matches!(status.phase.as_deref(), Some("Failed" | "Succeeded")),
            reason,
            message,
            node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
            started_at: worker
                .and_then(|worker| worker.state.as_ref()?.running.as_ref()?.started_at.clone())
                .or_else(|| status.start_time.clone()),
            restarts: containers().map(|container| container.restart_count).sum(),
        }
    }

    /// Whether it is being deleted.
    pub(in crate::controller) fn ending(&self) -> bool {
        self.gone_by.is_some()
    }

    /// Converts it to `status.pod`.
    pub(in crate::controller) fn status(&self) -> PodStatus {
        PodStatus {
            name: self.name.clone(),
            node: self.node.clone(),
            started_at: self.started_at.clone(),
            restarts: self.restarts,
        }
    }
}

/// The fencing epoch; 0 if the annotation is missing or invalid.
fn epoch(pod: &Pod) -> i64 {
    let annotations = pod.metadata.annotations.as_ref();
    let text = annotations.and_then(|annotations| annotations.get(names::EPOCH));
    text.and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// The uid of the Agent that controls it, if it has the label with that Agent's name, which is the name of its pod.
fn agent(pod: &Pod) -> Option<String> {
    let label = pod.metadata.labels.as_ref().and_then(|labels| labels.get(AGENT_LABEL));
    let is_labelled = label.is_some() && label == pod.metadata.name.as_ref();
    let owner = controlling::<Agent>(owners(pod)).filter(|_| is_labelled);
    owner.map(str::to_owned)
}

fn owners(pod: &Pod) -> &[OwnerReference] {
    pod.metadata.owner_references.as_deref().unwrap_or_default()
}

fn image(pod: &Pod) -> Option<String> {
    let containers = &pod.spec.as_ref()?.containers;
    containers
        .iter()
        .find(|container| container.name == names::WORKER)?
        .image
        .clone()
}

fn containers(status: &KubePodStatus) -> impl Iterator<Item = &ContainerStatus> {
    let sidecars = status.init_container_statuses.as_deref().unwrap_or_default();
    let containers = status.container_statuses.as_deref().unwrap_or_default();
    sidecars.iter().chain(containers)
}

fn readiness(status: &KubePodStatus) -> (PodReason, String) {
    let condition = |type_: &str| status.conditions.iter().flatten().find(move |c| c.type_ == type_);
    match status.phase.as_deref() {
        Some("Failed" | "Succeeded") => {
            let cause = status.reason.as_deref().unwrap_or("Failed");
            let message = status.message.as_deref().unwrap_or("the pod has terminated");
            return (PodReason::Evicted, format!("{cause}: {message}"));
        }
        Some("Unknown") => return (PodReason::NodeLost, "the pod's node is unreachable".into()),
        _ => {}
    }
    if let Some(scheduled) = condition("PodScheduled")
        && scheduled.status == "False"
        && scheduled.reason.as_deref() == Some("Unschedulable")
    {
        let message = scheduled.message.clone().unwrap_or_default();
        return (PodReason::Unschedulable, message);
    }
    if let Some(problem) = containers(status).find_map(waiting_problem) {
        return problem;
    }
    if condition("Ready").is_some_and(|ready| ready.status == "True") {
        return (PodReason::Running, "the pod's containers are running".into());
    }
    (PodReason::Starting, "the pod is starting".into())
}

/// Uses its own messages because the kubelet's text changes with every attempt, and each change would be a status
/// write.
fn waiting_problem(container: &ContainerStatus) -> Option<(PodReason, String)> {
    let waiting = container.state.as_ref()?.waiting.as_ref()?.reason.as_deref()?;
    let name = &container.name;
    if IMAGE_TROUBLE.contains(&waiting) {
        let message = format!(
            "image {} of container {name} cannot be pulled; see the pod's Events and check spec.pod.imagePullSecrets, or \
             agents.imagePullSecrets of the chart",
            container.image
        );
        return Some((PodReason::ImagePullFailed, message));
    }
    if waiting == "CrashLoopBackOff" {
        let last = container.last_state.as_ref().and_then(|last| last.terminated.as_ref());
        let how = last.map_or_else(String::new, |end| {
            let reason = end.reason.as_deref().unwrap_or("Error");
            format!(" (last: {reason}, exit code {})", end.exit_code)
        });
        let message = format!("container {name} is crash-looping{how}; see `kubectl logs --previous -c {name}`");
        return Some((PodReason::CrashLooping, message));
    }
    let known_steps = ["ContainerCreating", "PodInitializing"];
    (!known_steps.contains(&waiting)).then(|| {
        let message = format!("container {name} cannot start: {waiting}; see the pod's Events");
        (PodReason::Starting, message)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn owner_of(name: &str, labels: &Value, owners: &Value) -> Option<String> {
        let metadata = json!({"name": name, "uid": "pod", "labels": labels, "ownerReferences": owners});
        PodState::of(&serde_json::from_value(json!({"metadata": metadata})).unwrap()).owner
    }

    fn reference(api_version: &str, kind: &str, controller: bool) -> Value {
        json!({"apiVersion": api_version, "kind": kind, "name": "coast", "uid": "u", "controller": controller})
    }

    #[test]
    fn the_pod_of_an_agent_has_it_as_controlling_owner_and_the_label_with_its_name() {
        let (labels, agent) = (
            json!({AGENT_LABEL: "coast"}),
            reference("agentloop.dev/v1alpha1", "Agent", true),
        );
        assert_eq!(owner_of("coast", &labels, &json!([agent])).as_deref(), Some("u"));
        let later = reference("agentloop.dev/v1", "Agent", true);
        assert_eq!(owner_of("coast", &labels, &json!([later])).as_deref(), Some("u"));
        let second = json!([reference("v1", "ConfigMap", false), agent]);
        assert_eq!(owner_of("coast", &labels, &second).as_deref(), Some("u"));

        for foreign in [
            reference("v1", "Agent", true),
            reference("agentloop.dev", "Agent", true),
            reference("agentloop.dev.example.com/v1", "Agent", true),
            reference("example.com/v1", "Agent", true),
            reference("agentloop.dev/v1alpha1", "Sensor", true),
            reference("batch/v1", "Job", true),
            reference("agentloop.dev/v1alpha1", "Agent", false),
        ] {
            assert_eq!(owner_of("coast", &labels, &json!([foreign])), None, "{foreign}");
        }
        for labels in [
            json!(null),
            json!({}),
            json!({AGENT_LABEL: ""}),
            json!({AGENT_LABEL: "other"}),
        ] {
            assert_eq!(owner_of("coast", &labels, &json!([agent])), None, "{labels}");
        }
        assert_eq!(owner_of("other", &labels, &json!([agent])), None);
    }

    #[test]
    fn the_pod_of_a_stateful_set_belongs_to_no_agent_and_that_of_an_agent_to_no_set() {
        let of = |reference: &Value| {
            let metadata = json!({"name": "coast", "labels": {AGENT_LABEL: "coast"}, "ownerReferences": [reference]});
            let pod = PodState::of(&serde_json::from_value(json!({"metadata": metadata})).unwrap());
            (pod.owner, pod.set)
        };
        let u = || Some("u".to_owned());
        assert_eq!(of(&reference("apps/v1", "StatefulSet", true)), (None, u()));
        assert_eq!(of(&reference("example.com/v1", "StatefulSet", true)), (None, None));
        assert_eq!(of(&reference("agentloop.dev/v1alpha1", "Agent", true)), (u(), None));
    }
}
