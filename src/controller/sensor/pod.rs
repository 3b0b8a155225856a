//! The objects of a Sensor that has its own pod. Pure: the same Sensor and settings give the same objects.
//!
//! A `StatefulSet` with one replica: the cluster never runs two pods of one identity, and the claim of the outbox stays
//! with it. Secrets are mounted only into this pod. It has no Kubernetes token; its only port is the webhook's, and a
//! network policy closes all others.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::{StatefulSet, StatefulSetPersistentVolumeClaimRetentionPolicy, StatefulSetSpec};
use k8s_openapi::api::core::v1::{
    Affinity, ConfigMapProjection, Container, ContainerPort, EmptyDirVolumeSource, EnvVar, ExecAction,
    LocalObjectReference, PersistentVolumeClaim, PersistentVolumeClaimSpec, PodSpec, PodTemplateSpec, Probe,
    ProjectedVolumeSource, ResourceRequirements, Service, ServiceAccount, ServiceAccountTokenProjection, ServicePort,
    ServiceSpec, Toleration, Volume, VolumeProjection, VolumeResourceRequirements,
};
use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicyIngressRule, NetworkPolicyPort, NetworkPolicySpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::{Resource, ResourceExt};
use serde::{Deserialize, Serialize};

use super::secrets::{self, RequiredSecret};
use crate::api::sensor::SensorSource;
use crate::api::{LINK_AUDIENCE, SENSOR_LABEL, Sensor};
use crate::controller::pod_mounts::{GROUP_READABLE, directory, file, mount, otlp_ca_mount, otlp_ca_volume};
use crate::controller::pod_security;
use crate::controller::runtime::shared_objects::{shared_labels, shared_meta};
use crate::link::pod::{
    CONFIG_ENV, LINK_CA_CONFIGMAP, LINK_CA_FILE, LINK_TOKEN_FILE, OUTBOX_DIR, SENSOR_HEALTH_SOCKET,
    SENSOR_SERVICE_ACCOUNT, SensorPodConfig, WEBHOOK_PORT, WORKER_UID,
};
use crate::link::sensor_messages::SensorTerms;
use crate::support::hash::sha256_hex;

/// Annotation: hash of the object that was applied.
pub(super) const HASH: &str = "agentloop.dev/spec-hash";
/// Annotation on a `StatefulSet`: the [`SpecEdit`] of the Sensor that it was built from.
pub(super) const EDIT: &str = "agentloop.dev/sensor-edit";
/// Longest configuration of a container: Linux allows 128 KiB for one variable, including its name.
pub(super) const MAX_CONFIG: usize = 120 * 1024;
/// The binary in the image, and its role.
const COMMAND: [&str; 2] = ["/agentloop", "sensor"];
/// Lifetime of a link token in seconds; the kubelet renews it.
const TOKEN_SECONDS: i64 = 3600;
/// Termination grace period in seconds.
const GRACE_SECONDS: i64 = 10;

/// Operator-wide settings of sensor pods.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SensorPodSettings {
    pub image: String,
    /// `imagePullPolicy`; absent: the cluster's default.
    pub image_pull_policy: Option<String>,
    pub link_url: String,
    pub resources: ResourceRequirements,
    /// What the chart sets on the pods besides their container.
    pub template: SensorPodTemplate,
    /// CIDR ranges that Sensors may connect to although they are denied by default.
    pub allowed_ranges: Vec<String>,
    /// CIDR ranges that Sensors may not connect to.
    pub denied_ranges: Vec<String>,
    /// Variables that say how logs are exported; empty: they are not.
    pub environment: Vec<EnvVar>,
    /// Secret of the Sensor's namespace with the authorities of the OTLP collector.
    pub otlp_ca_secret: Option<String>,
}

impl SensorPodSettings {
    /// The Secret with the authorities of the OTLP collector, if logs are exported to it.
    fn ca_of_logs(&self) -> Option<&str> {
        let secret = self.otlp_ca_secret.as_deref();
        secret.filter(|_| !self.environment.is_empty())
    }
}

/// Scheduling, pull secrets and annotations of sensor pods. What is empty is absent from the pods, so that the pods of
/// an earlier version are not replaced for it.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct SensorPodTemplate {
    pub node_selector: BTreeMap<String, String>,
    pub tolerations: Vec<Toleration>,
    pub affinity: Option<Affinity>,
    pub priority_class_name: Option<String>,
    pub image_pull_secrets: Vec<LocalObjectReference>,
    pub pod_annotations: BTreeMap<String, String>,
}

/// Whether a source runs in a pod of its own rather than in the pods of its receivers.
#[must_use]
pub fn has_pod(source: &SensorSource) -> bool {
    source.poll.is_some() || source.stream.is_some() || source.webhook.is_some()
}

#[must_use]
pub fn set_name(sensor: &str) -> String {
    format!("{sensor}-sensor")
}

#[must_use]
pub fn pod_name(sensor: &str) -> String {
    format!("{}-0", set_name(sensor))
}

/// The Sensor without its receivers, so that a change of receivers does not restart the sensor pod.
#[must_use]
pub fn terms(sensor: &Sensor) -> SensorTerms {
    let mut spec = sensor.spec.clone();
    spec.agent_names.clear();
    spec.agent_selector = None;
    SensorTerms {
        uid: sensor.uid().unwrap_or_default(),
        name: sensor.name_any(),
        generation: sensor.metadata.generation.unwrap_or_default(),
        spec,
    }
}

/// The name of the Sensor that an object belongs to, by its label.
pub(super) fn sensor_of(object: &impl ResourceExt) -> Option<String> {
    object.labels().get(SENSOR_LABEL).cloned()
}

/// Adds the hash of the object as an annotation, and returns it too.
pub(super) fn hashed<K: ResourceExt + Serialize>(mut object: K) -> (K, String) {
    let hash = hash(&object);
    object.annotations_mut().insert(HASH.into(), hash.clone());
    (object, hash)
}

/// The first 64 bits of the SHA-256 of a value's JSON, in hex.
pub(super) fn hash(value: &impl Serialize) -> String {
    let text = serde_json::to_vec(value).unwrap_or_default();
    sha256_hex(text, 8)
}

/// Identifies an edit of a Sensor by its user, as far as it concerns the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SpecEdit {
    generation: i64,
    hash: String,
}

impl SpecEdit {
    pub(super) fn of(sensor: &Sensor) -> Self {
        let mut terms = terms(sensor);
        let generation = std::mem::take(&mut terms.generation);
        let hash = hash(&terms);
        Self { generation, hash }
    }

    /// Reads the annotation.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (generation, hash) = text.split_once('-')?;
        Some(Self {
            generation: generation.parse().ok()?,
            hash: hash.into(),
        })
    }

    /// The value of the annotation.
    pub(super) fn text(&self) -> String {
        format!("{}-{}", self.generation, self.hash)
    }

    /// Whether the user changed the pod's part of the spec. An edit of the receivers alone changes the generation and
    /// not the hash; a field that a new version of the controller knows and defaults changes the hash and not the
    /// generation.
    pub(super) fn is_other_than(&self, before: &Self) -> bool {
        self.generation != before.generation && self.hash != before.hash
    }
}

#[must_use]
pub fn stateful_set(sensor: &Sensor, settings: &SensorPodSettings) -> StatefulSet {
    let labels = labels(sensor);
    let storage = &sensor.spec.storage;
    let claim = (!storage.ephemeral).then(|| vec![claim(&storage.size)]);
    StatefulSet {
        metadata: meta(sensor, set_name(&sensor.name_any())),
        spec: Some(StatefulSetSpec {
            replicas: Some(1),
            // With OrderedReady, a pod that never becomes ready would block its replacement.
            pod_management_policy: Some("Parallel".into()),
            service_name: Some(service_name(&sensor.name_any())),
            selector: LabelSelector {
                match_labels: Some(BTreeMap::from([(SENSOR_LABEL.into(), sensor.name_any())])),
                ..LabelSelector::default()
            },
            persistent_volume_claim_retention_policy: Some(StatefulSetPersistentVolumeClaimRetentionPolicy {
                when_deleted: Some("Delete".into()),
                when_scaled: Some("Retain".into()),
            }),
            template: PodTemplateSpec {
                metadata: Some(ObjectMeta {
                    labels: Some(labels),
                    annotations: some(settings.template.pod_annotations.clone()),
                    ..ObjectMeta::default()
                }),
                spec: Some(pod_spec(sensor, settings)),
            },
            volume_claim_templates: claim,
            ..StatefulSetSpec::default()
        }),
        ..StatefulSet::default()
    }
}

#[must_use]
pub fn service(sensor: &Sensor) -> Service {
    Service {
        metadata: meta(sensor, service_name(&sensor.name_any())),
        spec: Some(ServiceSpec {
            selector: Some(BTreeMap::from([(SENSOR_LABEL.into(), sensor.name_any())])),
            ports: Some(vec![ServicePort {
                name: Some("webhook".into()),
                port: 80,
                target_port: Some(IntOrString::String("webhook".into())),
                ..ServicePort::default()
            }]),
            ..ServiceSpec::default()
        }),
        ..Service::default()
    }
}

#[must_use]
pub fn service_name(sensor: &str) -> String {
    format!("{sensor}-webhook")
}

pub(super) fn policy_name(sensor: &str) -> String {
    set_name(sensor)
}

/// Allows ingress to the webhook's port only. The pod enforces its own egress, since host names are not known here.
#[must_use]
pub fn network_policy(sensor: &Sensor) -> NetworkPolicy {
    let port = NetworkPolicyPort {
        protocol: Some("TCP".into()),
        port: Some(IntOrString::Int(WEBHOOK_PORT.into())),
        end_port: None,
    };
    let webhook = NetworkPolicyIngressRule {
        ports: Some(vec![port]),
        from: None,
    };
    let is_webhook = sensor.spec.source.webhook.is_some();
    NetworkPolicy {
        metadata: meta(sensor, policy_name(&sensor.name_any())),
        spec: Some(NetworkPolicySpec {
            pod_selector: Some(LabelSelector {
                match_labels: Some(BTreeMap::from([(SENSOR_LABEL.into(), sensor.name_any())])),
                ..LabelSelector::default()
            }),
            policy_types: Some(vec!["Ingress".into()]),
            ingress: Some(is_webhook.then_some(webhook).into_iter().collect()),
            egress: None,
        }),
    }
}

/// The service account of sensor pods, without permissions or token.
#[must_use]
pub fn service_account(namespace: &str) -> ServiceAccount {
    ServiceAccount {
        metadata: shared_meta(namespace, SENSOR_SERVICE_ACCOUNT),
        automount_service_account_token: Some(false),
        ..ServiceAccount::default()
    }
}

fn labels(sensor: &Sensor) -> BTreeMap<String, String> {
    let mut labels = shared_labels();
    labels.insert("app.kubernetes.io/name".into(), "sensor".into());
    labels.insert("app.kubernetes.io/instance".into(), sensor.name_any());
    labels.insert("app.kubernetes.io/component".into(), "sensor".into());
    labels.insert(SENSOR_LABEL.into(), sensor.name_any());
    labels
}

fn meta(sensor: &Sensor, name: String) -> ObjectMeta {
    ObjectMeta {
        name: Some(name),
        namespace: sensor.namespace(),
        labels: Some(labels(sensor)),
        owner_references: Some(sensor.controller_owner_ref(&()).into_iter().collect()),
        ..ObjectMeta::default()
    }
}

fn claim(size: &str) -> PersistentVolumeClaim {
    PersistentVolumeClaim {
        metadata: ObjectMeta {
            name: Some("outbox".into()),
            ..ObjectMeta::default()
        },
        spec: Some(PersistentVolumeClaimSpec {
            access_modes: Some(vec!["ReadWriteOnce".into()]),
            resources: Some(VolumeResourceRequirements {
                requests: Some(BTreeMap::from([("storage".into(), Quantity(size.into()))])),
                ..VolumeResourceRequirements::default()
            }),
            ..PersistentVolumeClaimSpec::default()
        }),
        ..PersistentVolumeClaim::default()
    }
}

/// A list or a map as Kubernetes serializes it: an empty one is absent.
fn some<C>(items: C) -> Option<C>
where
    for<'a> &'a C: IntoIterator,
{
    let is_empty = (&items).into_iter().next().is_none();
    (!is_empty).then_some(items)
}

fn pod_spec(sensor: &Sensor, settings: &SensorPodSettings) -> PodSpec {
    let template = settings.template.clone();
    PodSpec {
        service_account_name: Some(SENSOR_SERVICE_ACCOUNT.into()),
        automount_service_account_token: Some(false),
        enable_service_links: Some(false),
        termination_grace_period_seconds: Some(GRACE_SECONDS),
        security_context: Some(pod_security::pod()),
        containers: vec![container(sensor, settings)],
        volumes: Some(volumes(sensor, settings)),
        node_selector: some(template.node_selector),
        tolerations: some(template.tolerations),
        affinity: template.affinity,
        priority_class_name: template.priority_class_name,
        image_pull_secrets: some(template.image_pull_secrets),
        ..PodSpec::default()
    }
}

fn container(sensor: &Sensor, settings: &SensorPodSettings) -> Container {
    let source = &sensor.spec.source;
    let mut mounts = vec![
        mount("outbox", OUTBOX_DIR, false),
        mount("link-token", directory(LINK_TOKEN_FILE), true),
        mount("link-ca", directory(LINK_CA_FILE), true),
    ];
    mounts.extend(secrets::required(source).iter().map(RequiredSecret::mount));
    mounts.extend(settings.ca_of_logs().map(|_| otlp_ca_mount()));
    let webhook = source.webhook.is_some();
    let configuration = EnvVar {
        name: CONFIG_ENV.into(),
        value: Some(config(sensor, settings)),
        ..EnvVar::default()
    };
    let environment = std::iter::once(configuration).chain(settings.environment.iter().cloned());
    Container {
        name: "sensor".into(),
        image: Some(settings.image.clone()),
        image_pull_policy: settings.image_pull_policy.clone(),
        command: Some(vec![COMMAND[0].into()]),
        args: Some(vec![COMMAND[1].into()]),
        env: Some(environment.collect()),
        ports: webhook.then(|| {
            vec![ContainerPort {
                name: Some("webhook".into()),
                container_port: WEBHOOK_PORT.into(),
                ..ContainerPort::default()
            }]
        }),
        // Senders cannot reach the probe's socket, so they cannot block the probe.
        readiness_probe: webhook.then(|| probe(5, 3)),
        // A pod that hangs is restarted after a minute; a slow disk alone does not cause a restart.
        liveness_probe: Some(probe(10, 6)),
        resources: Some(settings.resources.clone()),
        volume_mounts: Some(mounts),
        security_context: Some(pod_security::container(WORKER_UID)),
        ..Container::default()
    }
}

fn probe(period_seconds: i32, failure_threshold: i32) -> Probe {
    let command = [COMMAND[0], "probe", "--socket", SENSOR_HEALTH_SOCKET];
    Probe {
        exec: Some(ExecAction {
            command: Some(command.map(str::to_owned).into()),
        }),
        period_seconds: Some(period_seconds),
        timeout_seconds: Some(5),
        failure_threshold: Some(failure_threshold),
        ..Probe::default()
    }
}

/// Configuration of the pod. Excludes the generation, so that an edit of the receivers alone replaces no pod.
pub(super) fn config(sensor: &Sensor, settings: &SensorPodSettings) -> String {
    let mut terms = terms(sensor);
    terms.generation = 0;
    let config = SensorPodConfig {
        namespace: sensor.namespace().unwrap_or_default(),
        link_url: settings.link_url.clone(),
        terms,
        allowed_ranges: settings.allowed_ranges.clone(),
        denied_ranges: settings.denied_ranges.clone(),
    };
    // The kubelet expands `$(NAME)` and halves `$$` in values; a JSON escape leaves no `$` to expand.
    serde_json::to_string(&config)
        .unwrap_or_default()
        .replace('$', "\\u0024")
}

fn volumes(sensor: &Sensor, settings: &SensorPodSettings) -> Vec<Volume> {
    let storage = &sensor.spec.storage;
    let mut volumes = vec![
        projected(
            "link-token",
            VolumeProjection {
                service_account_token: Some(ServiceAccountTokenProjection {
                    audience: Some(LINK_AUDIENCE.into()),
                    expiration_seconds: Some(TOKEN_SECONDS),
                    path: file(LINK_TOKEN_FILE).into(),
                }),
                ..VolumeProjection::default()
            },
        ),
        projected(
            "link-ca",
            VolumeProjection {
                config_map: Some(ConfigMapProjection {
                    name: LINK_CA_CONFIGMAP.into(),
                    ..ConfigMapProjection::default()
                }),
                ..VolumeProjection::default()
            },
        ),
    ];
    if storage.ephemeral {
        volumes.push(Volume {
            name: "outbox".into(),
            empty_dir: Some(EmptyDirVolumeSource {
                size_limit: Some(Quantity(storage.size.clone())),
                ..EmptyDirVolumeSource::default()
            }),
            ..Volume::default()
        });
    }
    volumes.extend(
        secrets::required(&sensor.spec.source)
            .iter()
            .map(RequiredSecret::volume),
    );
    volumes.extend(settings.ca_of_logs().map(otlp_ca_volume));
    volumes
}

fn projected(name: &str, source: VolumeProjection) -> Volume {
    Volume {
        name: name.into(),
        projected: Some(ProjectedVolumeSource {
            default_mode: Some(GROUP_READABLE),
            sources: Some(vec![source]),
        }),
        ..Volume::default()
    }
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;
    use serde_json::{Value, json};

    use super::*;

    fn sensor(spec: &Value) -> Sensor {
        let object = json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "Sensor", "spec": spec,
            "metadata": {"name": "s", "namespace": "n", "uid": "u", "generation": 3},
        });
        serde_json::from_value(object).unwrap()
    }

    fn webhook() -> Sensor {
        let source = json!({"webhook": {"scheme": "GitHub", "secretKeyRef": {"name": "hooks", "key": "main"}}});
        sensor(&json!({"agentNames": ["x"], "source": source}))
    }

    fn poll() -> Sensor {
        let http = json!({"url": "https://example.com", "headersSecretRef": {"name": "keys"}});
        sensor(&json!({"agentNames": ["x"], "source": {"poll": {"http": http}}, "storage": {"ephemeral": true}}))
    }

    fn set(sensor: &Sensor) -> Value {
        serde_json::to_value(stateful_set(sensor, &SensorPodSettings::default())).unwrap()
    }

    fn template(sensor: &Sensor) -> Value {
        set(sensor)["spec"]["template"]["spec"].clone()
    }

    fn names(list: &Value) -> Vec<&str> {
        let list = list.as_array().map(Vec::as_slice).unwrap_or_default();
        list.iter().filter_map(|item| item["name"].as_str()).collect()
    }

    #[test]
    fn the_pod_is_restricted_and_has_no_kubernetes_token() {
        let pod = template(&webhook());
        assert_eq!(pod["automountServiceAccountToken"], false);
        assert_eq!(pod["serviceAccountName"], "agentloop-sensor");
        assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
        assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
        let security = &pod["containers"][0]["securityContext"];
        assert_eq!(security["allowPrivilegeEscalation"], false);
        assert_eq!(security["readOnlyRootFilesystem"], true);
        assert_eq!(security["capabilities"]["drop"], json!(["ALL"]));
        let token = &pod["volumes"][0]["projected"]["sources"][0]["serviceAccountToken"];
        assert_eq!(token["audience"], "agentloop.dev/link");
    }

    #[test]
    fn each_source_mounts_its_own_secret_and_no_other() {
        let pod = template(&webhook());
        assert_eq!(names(&pod["volumes"]), ["link-token", "link-ca", "key"]);
        assert_eq!(
            pod["volumes"][2]["secret"]["items"],
            json!([{"key": "main", "path": "value"}])
        );
        assert_eq!(
            names(&pod["containers"][0]["volumeMounts"]),
            ["outbox", "link-token", "link-ca", "key"]
        );
        assert_eq!(names(&pod["containers"][0]["ports"]), ["webhook"]);
        let pod = template(&poll());
        assert_eq!(names(&pod["volumes"]), ["link-token", "link-ca", "outbox", "headers"]);
        assert_eq!(pod["volumes"][3]["secret"]["secretName"], "keys");
        assert_eq!(pod["containers"][0]["ports"], Value::Null);
    }

    #[test]
    fn the_pod_mounts_only_the_keys_of_tls_secrets_that_it_needs() {
        let tls = json!({"caSecretRef": {"name": "roots"}, "clientCertificateSecretRef": {"name": "me"}});
        let socket = json!({"url": "wss://example.com", "tls": tls});
        let pod = template(&sensor(
            &json!({"agentNames": ["x"], "source": {"stream": {"webSocket": socket}}}),
        ));
        assert_eq!(
            names(&pod["volumes"]),
            ["link-token", "link-ca", "tls-ca", "tls-certificate"]
        );
        let items = |keys: &[&str]| {
            let items = keys.iter().map(|key| json!({"key": key, "path": key}));
            items.collect::<Vec<_>>()
        };
        let ca = &pod["volumes"][2]["secret"];
        assert_eq!(ca["secretName"], "roots");
        assert_eq!(ca["items"], json!(items(&["ca.crt"])));
        assert_eq!(
            pod["volumes"][3]["secret"]["items"],
            json!(items(&["tls.crt", "tls.key"]))
        );
        let mounts = &pod["containers"][0]["volumeMounts"];
        assert_eq!(mounts[3]["mountPath"], "/etc/agentloop/tls/ca");
        assert_eq!(mounts[4]["mountPath"], "/etc/agentloop/tls/certificate");
    }

    #[test]
    fn the_outbox_has_a_claim_that_is_deleted_with_the_sensor_unless_it_is_ephemeral() {
        let durable = set(&webhook());
        let claim = &durable["spec"]["volumeClaimTemplates"][0];
        assert_eq!(claim["metadata"]["name"], "outbox");
        assert_eq!(claim["spec"]["resources"]["requests"]["storage"], "100Mi");
        assert_eq!(
            durable["spec"]["persistentVolumeClaimRetentionPolicy"]["whenDeleted"],
            "Delete"
        );
        let ephemeral = set(&poll());
        assert_eq!(ephemeral["spec"]["volumeClaimTemplates"], Value::Null);
        let volume = &template(&poll())["volumes"][2];
        assert_eq!(volume["emptyDir"]["sizeLimit"], "100Mi");
    }

    #[test]
    fn another_receiver_or_generation_replaces_no_pod_and_another_rule_does() {
        let before = template(&webhook());
        let mut sensor = webhook();
        sensor.spec.agent_names.push("y".into());
        sensor.metadata.generation = Some(4);
        assert_eq!(template(&sensor), before);
        sensor.spec.limits.per_minute = 7;
        assert_ne!(template(&sensor), before);
    }

    #[test]
    fn only_changes_of_the_spec_by_a_user_are_an_edit() {
        let before = SpecEdit::of(&webhook());
        assert_eq!(SpecEdit::parse(&before.text()), Some(before.clone()));
        assert_eq!(SpecEdit::parse("of another version"), None);
        let edit = |generation: i64, change: fn(&mut Sensor)| {
            let mut sensor = webhook();
            sensor.metadata.generation = Some(generation);
            change(&mut sensor);
            SpecEdit::of(&sensor)
        };
        assert!(edit(4, |sensor| sensor.spec.limits.per_minute = 7).is_other_than(&before));
        assert!(!edit(4, |sensor| sensor.spec.agent_names.push("y".into())).is_other_than(&before));
        let filled_in = edit(3, |sensor| sensor.spec.limits.per_minute = 7);
        assert!(!filled_in.is_other_than(&before), "the user did not write that");
    }

    #[test]
    fn nothing_in_the_configuration_is_left_to_expand() {
        let mut sensor = webhook();
        sensor.spec.notification = Some(crate::api::sensor::NotificationSpec {
            text: "'$(HOME) $$'".into(),
        });
        let config = config(&sensor, &SensorPodSettings::default());
        assert!(!config.contains('$'));
        let read: SensorPodConfig = serde_json::from_str(&config).unwrap();
        assert_eq!(read.terms.spec.notification, sensor.spec.notification);
    }

    #[test]
    fn the_pod_has_the_variables_of_the_settings_after_its_configuration() {
        let variable = EnvVar {
            name: "OTEL_LOGS_EXPORTER".into(),
            value: Some("otlp".into()),
            ..EnvVar::default()
        };
        let settings = SensorPodSettings {
            environment: vec![variable],
            ..SensorPodSettings::default()
        };
        let set = serde_json::to_value(stateful_set(&poll(), &settings)).unwrap();
        let environment = &set["spec"]["template"]["spec"]["containers"][0]["env"];
        let names: Vec<_> = environment.as_array().unwrap().iter().map(|one| &one["name"]).collect();
        assert_eq!(names, [CONFIG_ENV, "OTEL_LOGS_EXPORTER"]);
    }

    /// The pod with this Secret for the authorities of the collector.
    fn template_with_authorities(secret: Option<&str>, logs: bool) -> Value {
        let variable = EnvVar {
            name: "OTEL_LOGS_EXPORTER".into(),
            ..EnvVar::default()
        };
        let settings = SensorPodSettings {
            environment: logs.then_some(variable).into_iter().collect(),
            otlp_ca_secret: secret.map(str::to_owned),
            ..SensorPodSettings::default()
        };
        let set = serde_json::to_value(stateful_set(&poll(), &settings)).unwrap();
        set["spec"]["template"]["spec"].clone()
    }

    #[test]
    fn the_authorities_of_the_collector_are_mounted_if_logs_are_exported_and_without_them_no_pod_is_replaced() {
        let pod = template_with_authorities(Some("collector"), true);
        let items = json!([{"key": "ca.crt", "path": "ca.crt"}]);
        let secret = json!({"secretName": "collector", "items": items, "defaultMode": 0o440, "optional": true});
        let volume = json!({"name": "otlp-ca", "secret": secret});
        assert_eq!(pod["volumes"].as_array().unwrap().last(), Some(&volume));
        let mount = json!({"name": "otlp-ca", "mountPath": "/etc/agentloop/otlp-ca", "readOnly": true});
        let mounts = &pod["containers"][0]["volumeMounts"];
        assert_eq!(mounts.as_array().unwrap().last(), Some(&mount));
        let unused = template_with_authorities(Some("collector"), false);
        assert_eq!(unused, template_with_authorities(None, false));
        assert_eq!(unused, template(&poll()), "as without the setting");
        let logs = template_with_authorities(None, true);
        assert!(!logs.to_string().contains("otlp-ca"), "{logs}");
        let hash = |secret: Option<&str>| {
            let settings = SensorPodSettings {
                otlp_ca_secret: secret.map(str::to_owned),
                ..SensorPodSettings::default()
            };
            hashed(stateful_set(&poll(), &settings)).1
        };
        assert_eq!(hash(None), hash(Some("collector")));
    }

    #[test]
    fn the_pod_has_what_the_template_sets_and_without_it_the_stateful_set_is_as_before() {
        let of = |template: &Value| {
            let settings = SensorPodSettings {
                template: serde_json::from_value(template.clone()).unwrap(),
                ..SensorPodSettings::default()
            };
            serde_json::to_value(stateful_set(&webhook(), &settings)).unwrap()["spec"]["template"].clone()
        };
        let tolerations = json!([{"key": "dedicated", "operator": "Exists", "effect": "NoSchedule"}]);
        let term = json!({"matchExpressions": [{"key": "disk", "operator": "In", "values": ["ssd"]}]});
        let affinity =
            json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}});
        let pod = of(&json!({
            "nodeSelector": {"pool": "small"}, "tolerations": tolerations, "affinity": affinity, "priorityClassName": "low",
            "imagePullSecrets": [{"name": "registry"}], "podAnnotations": {"sidecar.istio.io/inject": "false"},
        }));
        assert_eq!(pod["spec"]["nodeSelector"], json!({"pool": "small"}));
        assert_eq!(pod["spec"]["tolerations"], tolerations);
        assert_eq!(pod["spec"]["affinity"], affinity);
        assert_eq!(pod["spec"]["priorityClassName"], "low");
        assert_eq!(pod["spec"]["imagePullSecrets"], json!([{"name": "registry"}]));
        assert_eq!(
            pod["metadata"]["annotations"],
            json!({"sidecar.istio.io/inject": "false"})
        );
        let bare = of(&json!({}));
        let unset = [
            "nodeSelector",
            "tolerations",
            "affinity",
            "priorityClassName",
            "imagePullSecrets",
        ];
        assert!(unset.iter().all(|field| bare["spec"].get(field).is_none()), "{bare}");
        assert_eq!(bare["metadata"].get("annotations"), None);
    }

    #[test]
    fn the_network_policy_admits_only_senders_to_the_webhook() {
        let policy = |sensor: &Sensor| serde_json::to_value(network_policy(sensor)).unwrap()["spec"].clone();
        let hook = policy(&webhook());
        assert_eq!(hook["podSelector"]["matchLabels"], json!({"agentloop.dev/sensor": "s"}));
        assert_eq!(hook["ingress"], json!([{"ports": [{"protocol": "TCP", "port": 8080}]}]));
        let page = policy(&poll());
        assert_eq!(
            (&page["policyTypes"], &page["ingress"]),
            (&json!(["Ingress"]), &json!([]))
        );
    }

    #[test]
    fn the_service_leads_to_the_pod() {
        let service = serde_json::to_value(service(&webhook())).unwrap();
        assert_eq!(service["metadata"]["name"], "s-webhook");
        assert_eq!(service["spec"]["ports"][0]["port"], 80);
        let labels = set(&webhook())["spec"]["template"]["metadata"]["labels"].clone();
        assert_eq!(service["spec"]["selector"], json!({"agentloop.dev/sensor": "s"}));
        assert_eq!(labels["agentloop.dev/sensor"], "s");
        assert_eq!(pod_name("s"), "s-sensor-0");
        assert!(has_pod(&webhook().spec.source));
    }
}
