//! Builds the pod of an Agent. Pure: the same Agent, epoch and settings give the same pod.
//!
//! The mounts decide which container can read what: the API keys, the link token and the scripts only the gateway; the
//! instructions, the journal and the workspace only the worker; the socket both.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    ConfigMapProjection, ConfigMapVolumeSource, Container, EmptyDirVolumeSource, EnvVar, EnvVarSource, ExecAction,
    KeyToPath, LocalObjectReference, ObjectFieldSelector, PersistentVolumeClaimVolumeSource, Pod, PodSpec, Probe,
    ProjectedVolumeSource, ResourceRequirements, SecretVolumeSource, ServiceAccountTokenProjection, Volume,
    VolumeMount, VolumeProjection,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource, ResourceExt};

use super::context::ReconcilerSettings;
use super::objects;
use super::server_authorities;
use super::tool_containers;
use crate::api::agent::{HeadersSecretRef, KeyRef, PodSettings, RESPONSES_SECRET, SkillSpec, UpdateStrategy};
use crate::api::{Agent, AgentSpec, LINK_AUDIENCE};
use crate::controller::pod_mounts::{GROUP_READABLE, directory, file, mount, otlp_ca_mount, otlp_ca_volume};
use crate::controller::pod_security;
use crate::controller::runtime::names;
pub(super) use crate::link::pod::BINARY;
use crate::link::pod::{
    API_KEY_FILE, AgentEgress, CONFIG_ENV, GATEWAY_UID, GRACE_SECONDS, INSTRUCTIONS_FILE, JOURNAL_DIR,
    LIGHT_API_KEY_FILE, LIGHT_SCRIPT_FILE, LINK_CA_CONFIGMAP, LINK_CA_FILE, LINK_TOKEN_FILE, PodConfig, RECORD_DIR,
    SCRIPT_FILE, SERVICE_ACCOUNT, SKILLS_DIR, SOCKET_DIR, TOOL_HEADERS_DIR, WORKER_UID, WORKSPACE_DIR,
    WORKSPACE_VOLUME,
};
use crate::support::hash::sha256_hex;

/// Lifetime of a link token in seconds; the kubelet rotates it.
const TOKEN_SECONDS: i64 = 3600;

pub(super) fn pod(agent: &Agent, epoch: i64, settings: &ReconcilerSettings) -> Pod {
    let chosen = &agent.spec.pod;
    let mut labels = chosen.labels.clone();
    labels.extend(objects::labels(agent));
    labels.insert("app.kubernetes.io/component".into(), "loop".into());
    labels.insert("app.kubernetes.io/version".into(), env!("CARGO_PKG_VERSION").into());
    let mut annotations = chosen.annotations.clone();
    annotations.insert(names::SPEC_HASH.into(), spec_hash(&agent.spec));
    annotations.insert(names::EPOCH.into(), epoch.to_string());
    annotations.insert(
        names::GENERATION.into(),
        agent.metadata.generation.unwrap_or_default().to_string(),
    );
    Pod {
        metadata: ObjectMeta {
            name: agent.metadata.name.clone(),
            namespace: agent.namespace(),
            labels: Some(labels),
            annotations: Some(annotations),
            owner_references: Some(agent.controller_owner_ref(&()).into_iter().collect()),
            ..ObjectMeta::default()
        },
        spec: Some(pod_spec(agent, epoch, settings)),
        ..Pod::default()
    }
}

/// Hash of all fields of a spec that determine the pod; `suspend` and the [`UpdateStrategy`] do not.
pub(super) fn spec_hash(spec: &AgentSpec) -> String {
    let mut spec = spec.clone();
    spec.suspend = false;
    spec.pod.update_strategy = UpdateStrategy::default();
    let text = serde_json::to_vec(&spec).unwrap_or_default();
    sha256_hex(text, 8)
}

/// The configuration of a container, as JSON in an environment variable. The gateway's does not contain the
/// instructions.
pub(super) fn config(agent: &Agent, epoch: i64, settings: &ReconcilerSettings, container: &str) -> String {
    let mut spec = agent.spec.clone();
    spec.pod = PodSettings::default();
    let is_gateway = container == names::GATEWAY;
    if is_gateway {
        spec.instructions = None;
    }
    let config = PodConfig {
        namespace: agent.namespace().unwrap_or_default(),
        name: agent.name_any(),
        uid: agent.uid().unwrap_or_default(),
        epoch,
        link_url: settings.link_url.clone(),
        spec,
        egress: if is_gateway {
            settings.egress.clone()
        } else {
            AgentEgress::default()
        },
    };
    // The kubelet expands `$(NAME)` and unescapes `$$` in values. Written as a JSON escape, no `$` is left to expand.
    serde_json::to_string(&config)
        .unwrap_or_default()
        .replace('$', "\\u0024")
}

fn pod_spec(agent: &Agent, epoch: i64, settings: &ReconcilerSettings) -> PodSpec {
    let chosen = agent.spec.pod.clone();
    let gateway = std::iter::once(gateway(agent, epoch, settings));
    let tools = tool_containers::containers(&agent.spec, settings);
    PodSpec {
        service_account_name: Some(SERVICE_ACCOUNT.into()),
        automount_service_account_token: Some(false),
        enable_service_links: Some(false),
        restart_policy: Some("Always".into()),
        termination_grace_period_seconds: Some(GRACE_SECONDS),
        security_context: Some(pod_security::pod()),
        init_containers: Some(gateway.chain(tools).collect()),
        containers: vec![worker(agent, epoch, settings)],
        volumes: Some(volumes(agent, settings)),
        node_selector: (!chosen.node_selector.is_empty()).then_some(chosen.node_selector),
        tolerations: some(chosen.tolerations),
        affinity: chosen.affinity,
        topology_spread_constraints: some(chosen.topology_spread_constraints),
        runtime_class_name: chosen.runtime_class_name,
        priority_class_name: chosen.priority_class_name,
        image_pull_secrets: some(pull_secrets(chosen.image_pull_secrets, &settings.image_pull_secrets)),
        ..PodSpec::default()
    }
}

/// The Agent's own secrets, and those of the chart that it does not name: their list is keyed by the name.
fn pull_secrets(own: Vec<LocalObjectReference>, of_chart: &[LocalObjectReference]) -> Vec<LocalObjectReference> {
    let mut secrets = own;
    for secret in of_chart {
        if !secrets.contains(secret) {
            secrets.push(secret.clone());
        }
    }
    secrets
}

/// A list as Kubernetes serializes it: an empty one is absent.
pub(super) fn some<T>(list: Vec<T>) -> Option<Vec<T>> {
    (!list.is_empty()).then_some(list)
}

/// A native sidecar: it serves before the worker starts and terminates after it.
fn gateway(agent: &Agent, epoch: i64, settings: &ReconcilerSettings) -> Container {
    let mut mounts = vec![
        mount("socket", SOCKET_DIR, false),
        sub_path("state", RECORD_DIR, names::GATEWAY),
        mount("link-token", directory(LINK_TOKEN_FILE), true),
        mount("link-ca", directory(LINK_CA_FILE), true),
    ];
    if agent.spec.model.api_key_secret_ref.is_some() {
        mounts.push(mount("key", directory(API_KEY_FILE), true));
    }
    if agent.spec.model.scripted.is_some() {
        mounts.push(mount("script", directory(SCRIPT_FILE), true));
    }
    if let Some(light) = &agent.spec.light_model {
        if light.api_key_secret_ref.is_some() {
            mounts.push(mount("light-key", directory(LIGHT_API_KEY_FILE), true));
        }
        if light.scripted.is_some() {
            mounts.push(mount("light-script", directory(LIGHT_SCRIPT_FILE), true));
        }
    }
    for HeadersSecretRef { dir, .. } in agent.spec.header_secrets() {
        let directory = format!("{TOOL_HEADERS_DIR}/{dir}");
        mounts.push(mount(&header_volume(dir), &directory, true));
    }
    mounts.extend(server_authorities::gateway_mount(&agent.spec));
    mounts.extend(tool_containers::gateway_mounts(&agent.spec.tools));
    mounts.extend(settings.otlp_ca_secret.as_ref().map(|_| otlp_ca_mount()));
    let common = container(agent, epoch, settings, names::GATEWAY, GATEWAY_UID);
    let environment = common.env.into_iter().flatten();
    let environment = environment.chain(settings.gateway_environment.iter().cloned());
    Container {
        restart_policy: Some("Always".into()),
        env: Some(environment.collect()),
        startup_probe: Some(Probe {
            exec: Some(ExecAction {
                command: Some(vec![BINARY.into(), "probe".into()]),
            }),
            period_seconds: Some(1),
            timeout_seconds: Some(2),
            failure_threshold: Some(60),
            ..Probe::default()
        }),
        volume_mounts: Some(mounts),
        resources: Some(settings.gateway_resources.clone()),
        ..common
    }
}

fn worker(agent: &Agent, epoch: i64, settings: &ReconcilerSettings) -> Container {
    let mut mounts = vec![
        mount("socket", SOCKET_DIR, false),
        sub_path("state", JOURNAL_DIR, names::WORKER),
    ];
    if agent.spec.instructions_from.is_some() {
        mounts.push(mount("instructions", directory(INSTRUCTIONS_FILE), true));
    }
    if !agent.spec.skills.is_empty() {
        mounts.push(mount("skills", SKILLS_DIR, true));
    }
    if agent.spec.workspace.is_some() {
        mounts.push(mount(WORKSPACE_VOLUME, WORKSPACE_DIR, true));
    }
    let resources: Option<&ResourceRequirements> = agent.spec.pod.resources.as_ref();
    Container {
        volume_mounts: Some(mounts),
        resources: Some(resources.unwrap_or(&settings.worker_resources).clone()),
        ..container(agent, epoch, settings, names::WORKER, WORKER_UID)
    }
}

/// Common fields of both containers: the image, the configuration, and the `restricted` profile.
fn container(agent: &Agent, epoch: i64, settings: &ReconcilerSettings, name: &str, uid: i64) -> Container {
    Container {
        name: name.into(),
        image: Some(settings.image.clone()),
        image_pull_policy: settings.image_pull_policy.clone(),
        command: Some(vec![BINARY.into()]),
        args: Some(vec![name.into()]),
        env: Some(vec![
            EnvVar {
                name: CONFIG_ENV.into(),
                value: Some(config(agent, epoch, settings, name)),
                ..EnvVar::default()
            },
            EnvVar {
                name: "AGENTLOOP_POD_UID".into(),
                value_from: Some(EnvVarSource {
                    field_ref: Some(ObjectFieldSelector {
                        field_path: "metadata.uid".into(),
                        ..ObjectFieldSelector::default()
                    }),
                    ..EnvVarSource::default()
                }),
                ..EnvVar::default()
            },
        ]),
        security_context: Some(pod_security::container(uid)),
        ..Container::default()
    }
}

fn volumes(agent: &Agent, settings: &ReconcilerSettings) -> Vec<Volume> {
    let mut volumes = vec![
        memory_volume("socket"),
        state_volume(agent),
        token_volume(),
        ca_volume(),
    ];
    let light = agent.spec.light_model.as_ref();
    let models = [("", Some(&agent.spec.model)), ("light-", light)];
    for (prefix, model) in models.into_iter().filter_map(|(prefix, model)| Some((prefix, model?))) {
        if let Some(key) = &model.api_key_secret_ref {
            volumes.push(key_volume(&format!("{prefix}key"), key));
        }
        if let Some(script) = &model.scripted {
            volumes.push(text_volume(&format!("{prefix}script"), &script.config_map_key_ref));
        }
    }
    if let Some(instructions) = &agent.spec.instructions_from {
        volumes.push(text_volume("instructions", &instructions.config_map_key_ref));
    }
    if !agent.spec.skills.is_empty() {
        volumes.push(skills_volume(&agent.spec.skills));
    }
    volumes.extend(workspace_volume(agent));
    volumes.extend(tool_containers::volumes(&agent.spec));
    volumes.extend(agent.spec.header_secrets().into_iter().map(|headers| Volume {
        name: header_volume(headers.dir),
        secret: Some(SecretVolumeSource {
            secret_name: Some(headers.secret.into()),
            default_mode: Some(GROUP_READABLE),
            ..SecretVolumeSource::default()
        }),
        ..Volume::default()
    }));
    volumes.extend(server_authorities::volume(&agent.spec));
    volumes.extend(settings.otlp_ca_secret.as_deref().map(otlp_ca_volume));
    volumes
}

fn header_volume(dir: &str) -> String {
    match dir {
        RESPONSES_SECRET => "task-responses".to_owned(),
        server => format!("tool-{server}"),
    }
}

/// An empty volume of limited size, in memory or on the node's disk.
pub(super) fn empty_volume(name: &str, medium: Option<&str>, size: &str) -> Volume {
    Volume {
        name: name.into(),
        empty_dir: Some(EmptyDirVolumeSource {
            medium: medium.map(Into::into),
            size_limit: Some(Quantity(size.into())),
        }),
        ..Volume::default()
    }
}

/// For a socket.
pub(super) fn memory_volume(name: &str) -> Volume {
    empty_volume(name, Some("Memory"), "1Mi")
}

fn state_volume(agent: &Agent) -> Volume {
    let storage = &agent.spec.storage;
    if storage.ephemeral {
        return empty_volume("state", None, &storage.size);
    }
    Volume {
        name: "state".into(),
        persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
            claim_name: names::claim(&agent.name_any()),
            ..PersistentVolumeClaimVolumeSource::default()
        }),
        ..Volume::default()
    }
}

fn workspace_volume(agent: &Agent) -> Option<Volume> {
    let named = agent.spec.workspace.as_ref()?.claim_name.clone();
    Some(Volume {
        name: WORKSPACE_VOLUME.into(),
        persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
            claim_name: named.unwrap_or_else(|| names::workspace_claim(&agent.name_any())),
            ..PersistentVolumeClaimVolumeSource::default()
        }),
        ..Volume::default()
    })
}

fn token_volume() -> Volume {
    projected(
        "link-token",
        vec![VolumeProjection {
            service_account_token: Some(ServiceAccountTokenProjection {
                audience: Some(LINK_AUDIENCE.into()),
                expiration_seconds: Some(TOKEN_SECONDS),
                path: file(LINK_TOKEN_FILE).into(),
            }),
            ..VolumeProjection::default()
        }],
    )
}

fn ca_volume() -> Volume {
    projected(
        "link-ca",
        vec![VolumeProjection {
            config_map: Some(ConfigMapProjection {
                name: LINK_CA_CONFIGMAP.into(),
                ..ConfigMapProjection::default()
            }),
            ..VolumeProjection::default()
        }],
    )
}

/// One projected volume for all skills, so that edits become visible together.
fn skills_volume(skills: &[SkillSpec]) -> Volume {
    let source = |skill: &SkillSpec| VolumeProjection {
        config_map: Some(ConfigMapProjection {
            name: skill.config_map_key_ref.name.clone(),
            items: Some(vec![item(&skill.config_map_key_ref, &skill.name)]),
            ..ConfigMapProjection::default()
        }),
        ..VolumeProjection::default()
    };
    projected("skills", skills.iter().map(source).collect())
}

pub(super) fn projected(name: &str, sources: Vec<VolumeProjection>) -> Volume {
    Volume {
        name: name.into(),
        projected: Some(ProjectedVolumeSource {
            default_mode: Some(GROUP_READABLE),
            sources: Some(sources),
        }),
        ..Volume::default()
    }
}

fn key_volume(name: &str, reference: &KeyRef) -> Volume {
    Volume {
        name: name.into(),
        secret: Some(SecretVolumeSource {
            secret_name: Some(reference.name.clone()),
            items: Some(vec![item(reference, API_KEY_FILE)]),
            default_mode: Some(GROUP_READABLE),
            ..SecretVolumeSource::default()
        }),
        ..Volume::default()
    }
}

fn text_volume(name: &str, reference: &KeyRef) -> Volume {
    Volume {
        name: name.into(),
        config_map: Some(ConfigMapVolumeSource {
            name: reference.name.clone(),
            items: Some(vec![item(reference, SCRIPT_FILE)]),
            default_mode: Some(GROUP_READABLE),
            ..ConfigMapVolumeSource::default()
        }),
        ..Volume::default()
    }
}

fn item(reference: &KeyRef, path: &str) -> KeyToPath {
    KeyToPath {
        key: reference.key.clone(),
        path: file(path).into(),
        ..KeyToPath::default()
    }
}

fn sub_path(volume: &str, path: &str, sub_path: &str) -> VolumeMount {
    VolumeMount {
        sub_path: Some(sub_path.into()),
        ..mount(volume, path, false)
    }
}

/// Reads back the annotations of a pod that this module wrote.
pub(super) struct PodAnnotations<'a>(pub(super) Option<&'a BTreeMap<String, String>>);

impl PodAnnotations<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0?.get(key).map(String::as_str)
    }

    /// Whether the pod was created from another spec. The same generation means the same spec, even if a newer
    /// controller computes a different hash, so that an upgrade alone replaces no pod.
    pub(super) fn outdated(&self, agent: &Agent) -> bool {
        let generation = agent.metadata.generation.unwrap_or_default().to_string();
        self.get(names::GENERATION) != Some(generation.as_str())
            && self.get(names::SPEC_HASH) != Some(spec_hash(&agent.spec).as_str())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::decide_tests::settings;
    use super::*;

    /// The names of the pull secrets of a pod, with these of the Agent and those of the chart.
    fn pulled_with(own: &[&str], of_chart: &[&str]) -> Option<Vec<String>> {
        let secrets = |names: &[&str]| names.iter().map(|name| json!({"name": name})).collect::<Value>();
        let agent: Agent = serde_json::from_value(json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
            "metadata": {"name": "coast", "namespace": "team-a", "uid": "u"},
            "spec": {"model": {"api": "OpenAIChat", "name": "m"}, "pod": {"imagePullSecrets": secrets(own)}},
        }))
        .unwrap();
        let settings = ReconcilerSettings {
            image_pull_secrets: serde_json::from_value(secrets(of_chart)).unwrap(),
            ..settings()
        };
        let pod = pod(&agent, 1, &settings);
        let annotations = PodAnnotations(pod.metadata.annotations.as_ref());
        assert!(!annotations.outdated(&agent));
        let hash = annotations.get(names::SPEC_HASH).map(str::to_owned);
        assert_eq!(hash, Some(spec_hash(&agent.spec)), "whatever the chart sets");
        let secrets = pod.spec.unwrap().image_pull_secrets?;
        Some(secrets.into_iter().map(|secret| secret.name).collect())
    }

    #[test]
    fn the_pull_secrets_of_the_chart_follow_those_of_the_agent_and_each_is_named_once() {
        assert_eq!(pulled_with(&[], &[]), None);
        assert_eq!(pulled_with(&["own"], &[]).unwrap(), ["own"]);
        assert_eq!(pulled_with(&[], &["registry"]).unwrap(), ["registry"]);
        assert_eq!(
            pulled_with(&["mirror", "own"], &["registry", "mirror"]).unwrap(),
            ["mirror", "own", "registry"]
        );
    }

    /// The pod of an Agent without anything special, with this Secret for the authorities of the collector.
    fn pod_with_authorities(secret: Option<&str>) -> Value {
        let agent: Agent = serde_json::from_value(json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
            "metadata": {"name": "coast", "namespace": "team-a", "uid": "u"},
            "spec": {"model": {"api": "OpenAIChat", "name": "m"}},
        }))
        .unwrap();
        let settings = ReconcilerSettings {
            otlp_ca_secret: secret.map(str::to_owned),
            ..settings()
        };
        serde_json::to_value(pod(&agent, 1, &settings)).unwrap()["spec"].clone()
    }

    #[test]
    fn the_gateway_alone_reads_the_authorities_of_the_collector_and_only_them() {
        let pod = pod_with_authorities(Some("collector"));
        let items = json!([{"key": "ca.crt", "path": "ca.crt"}]);
        let secret = json!({"secretName": "collector", "items": items, "defaultMode": 0o440, "optional": true});
        let volume = json!({"name": "otlp-ca", "secret": secret});
        assert!(pod["volumes"].as_array().unwrap().contains(&volume), "{pod}");
        let mount = json!({"name": "otlp-ca", "mountPath": "/etc/agentloop/otlp-ca", "readOnly": true});
        let gateway = pod["initContainers"][0]["volumeMounts"].as_array().unwrap();
        assert!(gateway.contains(&mount), "{pod}");
        let worker = pod["containers"].to_string();
        assert!(!worker.contains("otlp-ca"), "{worker}");
        let without = pod_with_authorities(None).to_string();
        assert!(!without.contains("otlp-ca"), "{without}");
    }
}
