//! What the API server says of a pod, reduced to what matters here. Pure.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus as KubePodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::manifest::PodAnnotations;
use super::names;
use crate::api::status::PodStatus;
use crate::api::{AGENT_LABEL, SENSOR_LABEL};

/// Reasons of the condition `PodReady`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::AsRefStr, strum::IntoStaticStr, strum::EnumIter)]
pub(in crate::controller) enum PodReason {
    /// It is coming up.
    Starting,
    /// Its containers run.
    Running,
    /// No node takes it.
    Unschedulable,
    /// The image cannot be had.
    ImagePullFailed,
    /// A container ends again and again.
    CrashLooping,
    /// The node or the cluster ended it.
    Evicted,
    /// Its node does not answer.
    NodeLost,
    /// Its volume claim is still that of an earlier Agent of the same name, and is being deleted.
    ClaimEnding,
    /// Its volume claim belongs to something else.
    ClaimForeign,
    /// There is none, or it is ending.
    Absent,
}

/// Waiting reasons of a container whose image cannot be had.
const IMAGE_TROUBLE: [&str; 6] = [
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "RegistryUnavailable",
];

/// A pod, reduced.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::controller) struct PodState {
    /// Its name.
    pub(super) name: String,
    /// Its uid.
    pub(in crate::controller) uid: String,
    /// Uid of the object that controls it.
    pub(in crate::controller) owner: Option<String>,
    /// Its fencing epoch.
    pub(super) epoch: i64,
    /// The image of its worker.
    pub(super) image: Option<String>,
    /// The moment by which it should be gone, when it is ending.
    pub(super) gone_by: Option<Timestamp>,
    /// It ended for good and will never run again.
    pub(super) ended: bool,
    /// Why it is ready or not.
    pub(in crate::controller) reason: PodReason,
    /// In words; stable while the cause is.
    pub(in crate::controller) message: String,
    /// Its node.
    pub(super) node: Option<String>,
    started_at: Option<Time>,
    restarts: i32,
}

impl PodState {
    /// Reads a pod.
    pub(in crate::controller) fn of(pod: &Pod) -> Self {
        let meta = &pod.metadata;
        let empty = KubePodStatus::default();
        let status = pod.status.as_ref().unwrap_or(&empty);
        let gone_by = meta.deletion_timestamp.as_ref().map(|time| time.0);
        let (reason, message) = if gone_by.is_some() {
            (PodReason::Absent, "the pod is ending".into())
        } else {
            readiness(status)
        };
        let containers = || containers(status);
        let worker = containers().find(|container| container.name == names::WORKER);
        Self {
            name: meta.name.clone().unwrap_or_default(),
            uid: meta.uid.clone().unwrap_or_default(),
            owner: owner(pod),
            epoch: PodAnnotations(meta.annotations.as_ref()).epoch(),
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

    /// The same for `status.pod`.
    pub(super) fn status(&self) -> PodStatus {
        PodStatus {
            name: self.name.clone(),
            node: self.node.clone(),
            started_at: self.started_at.clone(),
            restarts: self.restarts,
        }
    }
}

/// Leaves in a pod what [`PodState::of`] reads, so that the cache of thousands of pods stays small.
pub(in crate::controller) fn trim(pod: &mut Pod) {
    pod.metadata.managed_fields = None;
    if let Some(annotations) = &mut pod.metadata.annotations {
        annotations.retain(|key, _| [names::SPEC_HASH, names::EPOCH, names::GENERATION].contains(&key.as_str()));
    }
    if let Some(labels) = &mut pod.metadata.labels {
        labels.retain(|key, _| [AGENT_LABEL, SENSOR_LABEL].contains(&key.as_str()));
    }
    if let Some(spec) = &mut pod.spec {
        let node_name = spec.node_name.take();
        let mut containers = std::mem::take(&mut spec.containers);
        for container in &mut containers {
            *container = k8s_openapi::api::core::v1::Container {
                name: std::mem::take(&mut container.name),
                image: container.image.take(),
                ..Default::default()
            };
        }
        *spec = k8s_openapi::api::core::v1::PodSpec {
            node_name,
            containers,
            ..Default::default()
        };
    }
}

fn owner(pod: &Pod) -> Option<String> {
    let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
    owners
        .iter()
        .find(|owner| owner.controller == Some(true))
        .map(|owner| owner.uid.clone())
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
            let message = status.message.as_deref().unwrap_or("the pod ended");
            return (PodReason::Evicted, format!("{cause}: {message}"));
        }
        Some("Unknown") => return (PodReason::NodeLost, "the node of the pod does not answer".into()),
        _ => {}
    }
    if let Some(scheduled) = condition("PodScheduled")
        && scheduled.status == "False"
        && scheduled.reason.as_deref() == Some("Unschedulable")
    {
        let message = scheduled.message.clone().unwrap_or_default();
        return (PodReason::Unschedulable, message);
    }
    if let Some(trouble) = containers(status).find_map(waiting_trouble) {
        return trouble;
    }
    if condition("Ready").is_some_and(|ready| ready.status == "True") {
        return (PodReason::Running, "the containers of the pod run".into());
    }
    (PodReason::Starting, "the pod is starting".into())
}

/// Own words, since the kubelet's change with every attempt.
fn waiting_trouble(container: &ContainerStatus) -> Option<(PodReason, String)> {
    let waiting = container.state.as_ref()?.waiting.as_ref()?.reason.as_deref()?;
    let name = &container.name;
    if IMAGE_TROUBLE.contains(&waiting) {
        let message = format!(
            "image {} of container {name} cannot be pulled; see the pod's events, and spec.pod.imagePullSecrets",
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
        let message = format!("container {name} ends again and again{how}; see `kubectl logs --previous -c {name}`");
        return Some((PodReason::CrashLooping, message));
    }
    let known_steps = ["ContainerCreating", "PodInitializing"];
    (!known_steps.contains(&waiting)).then(|| {
        let message = format!("container {name} cannot start: {waiting}; see the pod's events");
        (PodReason::Starting, message)
    })
}
