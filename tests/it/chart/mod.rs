//! Tests of the chart, with the real `helm`: what it renders, what it refuses, and what a real API server says to it.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod absent;
mod answers;
mod approval;
mod controller_policy;
mod dashboards;
mod effects;
mod identity;
mod metrics;
mod pods;
mod policies;
mod refusals;
mod release;
pub mod render;
mod rights;
mod rules;
mod values;

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::{Value, json};

use crate::support::clusters;
use crate::support::kubectl::Kubectl;
use render::{Rendered, containers, helm, render, repository};

/// Settings that each make something of their own; all of them together must fit as well.
const MATRIX: &[&[&str]] = &[
    &[],
    &["replicaCount=1"],
    &["watchNamespaces={team-a,team-b}"],
    &[
        "rbac.create=false",
        "serviceAccount.create=false",
        "serviceAccount.name=mine",
    ],
    &["crds.enabled=false"],
    &["crds.keep=false"],
    NAMESPACED,
    EVERYTHING,
];
/// Namespaces of the release and of those Agents that the settings name.
const NAMESPACES: [&str; 3] = ["agentloop-system", "team-a", "team-b"];
/// A release without objects outside namespaces.
const NAMESPACED: &[&str] = &[
    "rbac.clusterScoped=false",
    "crds.enabled=false",
    "watchNamespaces={team-a,team-b}",
    "metrics.podMonitor.enabled=true",
];
const EVERYTHING: &[&str] = &[
    "replicaCount=3",
    "namespaceOverride=agentloop-system",
    "image.registry=registry.example.com",
    "revisionHistoryLimit=3",
    "leaderElection.leaseDurationSeconds=30",
    "leaderElection.renewIntervalSeconds=10",
    "extraArgs[0]=--metrics-address=[::]:8080",
    "extraEnvFrom[0].configMapRef.name=proxy",
    "extraVolumes[0].name=roots",
    "extraVolumes[0].configMap.name=roots",
    "extraVolumeMounts[0].name=roots",
    "extraVolumeMounts[0].mountPath=/etc/ssl/extra",
    "podSecurityContext.fsGroup=65532",
    "livenessProbe.failureThreshold=5",
    "terminationGracePeriodSeconds=60",
    "deploymentAnnotations.note=c",
    "hostAliases[0].ip=192.0.2.7",
    "hostAliases[0].hostnames={proxy}",
    "dnsConfig.searches={example.com}",
    "watchNamespaces={team-a}",
    "image.digest=sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "imagePullSecrets[0].name=registry",
    "agents.imagePullSecrets[0].name=registry",
    "sensor.imagePullSecrets[0].name=registry",
    "sensor.nodeSelector.pool=small",
    "sensor.tolerations[0].key=dedicated",
    "sensor.priorityClassName=low",
    "extraEnv[0].name=HTTPS_PROXY",
    "extraEnv[0].value=http://proxy:3128",
    "metrics.authentication=Token",
    "metrics.serviceMonitor.enabled=true",
    "metrics.serviceMonitor.bearerTokenSecret.name=prometheus-token",
    "metrics.serviceMonitor.labels.release=prometheus",
    "metrics.prometheusRule.enabled=true",
    "serviceAccount.annotations.team=a",
    "podDisruptionBudget.minAvailable=2",
    "commonLabels.team=a",
    "podLabels.tier=system",
    "podAnnotations.note=b",
    "nodeSelector.disk=ssd",
    "tolerations[0].key=dedicated",
    "tolerations[0].operator=Exists",
    "affinity.podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution=null",
    "topologySpreadConstraints[0].maxSkew=2",
    "topologySpreadConstraints[0].topologyKey=rack",
    "topologySpreadConstraints[0].whenUnsatisfiable=DoNotSchedule",
    "priorityClassName=system-cluster-critical",
    "prices.a-model.inputPerMillion=3.00",
    "prices.a-model.outputPerMillion=15.00",
    "policy.requireBudget=true",
    "dashboards.enabled=true",
    "dashboards.grafanaOperator.enabled=true",
    "networkPolicy.linkFrom[0].podSelector.matchLabels.reads=events",
    "page.enabled=true",
    "page.hosts={loops.example.com}",
    "networkPolicy.pageFrom[0].podSelector.matchLabels.shows=page",
    "rbac.sidecarImages={docker.io/istio/}",
    "approvals.webhook.url=https://bridge.example.com/gates",
    "approvals.webhook.secretName=gates",
    "history.postgres.existingSecret=history",
    "history.postgres.caKey=ca.crt",
    "telemetry.otlp.endpoint=https://otel-collector.observability:4318",
    "telemetry.otlp.headersSecretName=otlp",
    "telemetry.otlp.caSecretName=collector",
    "telemetry.content=true",
    "telemetry.otlp.logs=true",
    "telemetry.otlp.metrics=true",
];

/// Every place with labels of its own, which all have one key in common. Rendering refuses a key that occurs twice.
#[test]
fn labels_of_an_object_take_precedence_over_common_labels() {
    let settings = [
        "commonLabels.team=common",
        "podLabels.team=own",
        "metrics.serviceMonitor.enabled=true",
        "metrics.serviceMonitor.bearerTokenSecret.name=scraper",
        "metrics.serviceMonitor.labels.team=own",
        "metrics.prometheusRule.enabled=true",
        "metrics.prometheusRule.labels.team=own",
        "dashboards.enabled=true",
        "dashboards.labels.team=own",
        r"podAnnotations.kubectl\.kubernetes\.io/default-container=other",
    ];
    let Some(rendered) = render(&settings) else { return };
    let rendered = rendered.unwrap();
    for (kind, name) in [
        ("ServiceMonitor", "agentloop"),
        ("PrometheusRule", "agentloop"),
        ("ConfigMap", "agentloop-dashboards"),
    ] {
        assert_eq!(rendered.one(kind, name)["metadata"]["labels"]["team"], "own", "{kind}");
    }
    let deployment = rendered.one("Deployment", "agentloop");
    assert_eq!(deployment["metadata"]["labels"]["team"], "common");
    let pod = &deployment["spec"]["template"]["metadata"];
    assert_eq!(pod["labels"]["team"], "own");
    assert_eq!(pod["annotations"]["kubectl.kubernetes.io/default-container"], "other");
    let settings = [
        "commonLabels.team=common",
        "metrics.podMonitor.enabled=true",
        "metrics.podMonitor.labels.team=",
    ];
    let rendered = render(&settings).unwrap().unwrap();
    assert_eq!(
        rendered.one("PodMonitor", "agentloop")["metadata"]["labels"]["team"],
        "",
        "an empty one too"
    );
}

#[test]
fn helm_finds_nothing_to_complain_of() {
    let Some(mut lint) = helm() else { return };
    let ended = lint
        .args(["lint", "--strict"])
        .arg(repository("charts/agentloop"))
        .output()
        .unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));
}

#[test]
fn every_setting_renders_what_belongs_together() {
    for settings in MATRIX {
        let Some(rendered) = render(settings) else { return };
        let objects = rendered.unwrap();
        let mut seen = BTreeSet::new();
        for object in &objects.0 {
            let labels = &object["metadata"]["labels"];
            assert_eq!(labels["app.kubernetes.io/name"], "agentloop", "{settings:?}: {object}");
            assert_eq!(
                labels["app.kubernetes.io/part-of"], "agentloop",
                "{settings:?}: {object}"
            );
            let id = ["kind", "metadata/name", "metadata/namespace"].map(|path| object.pointer(&format!("/{path}")));
            assert!(seen.insert(format!("{id:?}")), "{settings:?}: twice {id:?}");
        }
        let deployment = objects.one("Deployment", "agentloop");
        let selector = &deployment["spec"]["selector"]["matchLabels"];
        let labels = &deployment["spec"]["template"]["metadata"]["labels"];
        for selected in [
            selector,
            &objects.one("Service", "agentloop-metrics")["spec"]["selector"],
        ] {
            for (key, value) in selected.as_object().unwrap() {
                assert_eq!(&labels[key], value, "{settings:?}: {key}");
            }
        }
        let replicas = deployment["spec"]["replicas"].as_u64().unwrap();
        assert_eq!(
            objects.has("PodDisruptionBudget", "agentloop"),
            replicas > 1,
            "{settings:?}"
        );
    }
}

#[test]
fn agent_pods_reach_the_leader_alone_and_under_the_name_in_its_certificate() {
    let Some(rendered) = render(&[]) else { return };
    let objects = rendered.unwrap();
    let link = objects.one("Service", "agentloop-link");
    assert_eq!(link["spec"]["selector"]["agentloop.dev/leader"], "true");
    let port = &link["spec"]["ports"][0];
    assert_eq!((&port["port"], &port["targetPort"]), (&json!(8443), &json!("link")));
    let controller = &objects.one("Deployment", "agentloop")["spec"]["template"]["spec"]["containers"][0];
    let ports: Vec<_> = controller["ports"].as_array().unwrap().iter().collect();
    assert!(
        ports
            .iter()
            .any(|port| port["name"] == "link" && port["containerPort"] == 8443)
    );
    assert!(
        ports
            .iter()
            .any(|port| port["name"] == "metrics" && port["containerPort"] == 8080)
    );
    let probes = |port: &&&Value| port["name"] == "probes" && port["containerPort"] == 8081;
    assert!(ports.iter().any(|port| probes(&port)));
    for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
        assert_eq!(controller[probe]["httpGet"]["port"], "probes", "{probe}");
    }
    let url = render::variable(controller, "AGENTLOOP_LINK_URL").unwrap();
    assert_eq!(url["value"], "https://agentloop-link.agentloop-system.svc:8443");
}

#[test]
fn only_agent_and_sensor_pods_and_the_peers_in_link_from_reach_the_link() {
    let Some(rendered) = render(&[]) else { return };
    let objects = rendered.unwrap();
    let policy = &objects.one("NetworkPolicy", "agentloop")["spec"];
    let labels = &objects.one("Deployment", "agentloop")["spec"]["selector"]["matchLabels"];
    assert_eq!(&policy["podSelector"]["matchLabels"], labels);
    assert_eq!(policy["policyTypes"], json!(["Ingress"]));
    let wears = |label: &str| json!({"matchExpressions": [{"key": label, "operator": "Exists"}]});
    let labels = ["agentloop.dev/agent", "agentloop.dev/sensor"];
    let link_from = |namespaces: &Value| {
        let peers = labels.map(|label| json!({"namespaceSelector": namespaces, "podSelector": wears(label)}));
        json!({"from": peers, "ports": [{"port": "link", "protocol": "TCP"}]})
    };
    let link = link_from(&json!({}));
    let monitoring = json!({"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}});
    let metrics =
        json!({"from": [{"namespaceSelector": monitoring}], "ports": [{"port": "metrics", "protocol": "TCP"}]});
    assert_eq!(policy["ingress"], json!([link, metrics]), "and none to the probes");
    let closed = render(&["networkPolicy.metricsFrom=null"]).unwrap().unwrap();
    assert_eq!(
        closed.one("NetworkPolicy", "agentloop")["spec"]["ingress"],
        json!([link])
    );
    let watched = render(&["watchNamespaces={team-a,team-b}"]).unwrap().unwrap();
    let selected = json!({"matchExpressions": [
        {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["team-a", "team-b"]},
    ]});
    assert_eq!(
        watched.one("NetworkPolicy", "agentloop")["spec"]["ingress"][0],
        link_from(&selected)
    );
    let without = render(&["networkPolicy.enabled=false"]).unwrap().unwrap();
    assert!(!without.has("NetworkPolicy", "agentloop"));
}

#[test]
fn the_page_is_off_by_default_and_only_configured_peers_reach_the_leader() {
    let Some(rendered) = render(&[]) else { return };
    let objects = rendered.unwrap();
    assert!(!objects.has("Service", "agentloop-page"));
    let text = objects.one("Deployment", "agentloop").to_string();
    assert!(!text.contains("PAGE") && !text.contains("8444"), "{text}");
    // Peers alone open nothing.
    let peer = "networkPolicy.pageFrom[0].podSelector.matchLabels.shows=page";
    let ingress = |settings: &[&str]| {
        let objects = render(settings).unwrap().unwrap();
        objects.one("NetworkPolicy", "agentloop")["spec"]["ingress"].clone()
    };
    assert_eq!(ingress(&[peer]), ingress(&[]));
    assert_eq!(ingress(&["page.enabled=true"]), ingress(&[]));
    let page = json!({"from": [{"podSelector": {"matchLabels": {"shows": "page"}}}], "ports": [{"port": "page", "protocol": "TCP"}]});
    assert_eq!(ingress(&["page.enabled=true", peer])[2], page);

    let objects = render(&["page.enabled=true", "page.hosts={loops.example.com}"])
        .unwrap()
        .unwrap();
    let service = &objects.one("Service", "agentloop-page")["spec"];
    assert_eq!(service["selector"]["agentloop.dev/leader"], "true");
    assert_eq!(
        (&service["ports"][0]["port"], &service["ports"][0]["targetPort"]),
        (&json!(8444), &json!("page"))
    );
    let controller = &objects.one("Deployment", "agentloop")["spec"]["template"]["spec"]["containers"][0];
    let value = |name| render::variable(controller, name).unwrap()["value"].clone();
    assert_eq!(value("AGENTLOOP_PAGE_ADDRESS"), "[::]:8444");
    assert_eq!(
        value("AGENTLOOP_PAGE_HOSTS"),
        "agentloop-page.agentloop-system.svc,loops.example.com"
    );
}

#[test]
fn a_rollout_moves_the_leadership_to_a_standby_replica() {
    let Some(rendered) = render(&[]) else { return };
    let objects = rendered.unwrap();
    let spec = &objects.one("Deployment", "agentloop")["spec"];
    let strategy = json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}});
    assert_eq!((&spec["strategy"], &spec["minReadySeconds"]), (&strategy, &json!(10)));
}

#[test]
fn the_controller_has_a_flag_for_every_variable_of_the_chart() {
    let Some(rendered) = render(EVERYTHING) else { return };
    let objects = rendered.unwrap();
    let controller = objects.one("Deployment", "agentloop")["spec"]["template"]["spec"]["containers"][0].clone();
    assert_eq!(controller["args"], json!(["controller", "--metrics-address=[::]:8080"]));
    let help = Command::new(env!("CARGO_BIN_EXE_agentloop"))
        .args(["controller", "--help"])
        .output()
        .unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    // Not flags: the filter of the log, what the test itself added, and what is passed on to gateways.
    let mut others = vec!["RUST_LOG", "HTTPS_PROXY"];
    others.extend(agentloop::otlp::PASSED_VARIABLES);
    others.extend(agentloop::otlp::CONTROLLER_VARIABLES);
    for variable in controller["env"].as_array().unwrap() {
        let name = variable["name"].as_str().unwrap();
        assert!(
            others.contains(&name) || help.contains(&format!("[env: {name}=")),
            "`agentloop controller` has no flag with the variable {name}"
        );
    }
}

#[test]
fn the_key_of_the_webhook_about_gates_is_a_file_of_its_secret_alone() {
    let Some(rendered) = render(EVERYTHING) else { return };
    let objects = rendered.unwrap();
    let pod = &objects.one("Deployment", "agentloop")["spec"]["template"]["spec"];
    let volumes = pod["volumes"].as_array().unwrap();
    let secrets: Vec<_> = volumes.iter().filter(|volume| volume["secret"].is_object()).collect();
    let items = json!([{"key": "secret", "path": "secret"}]);
    assert_eq!(
        secrets[0],
        &json!({"name": "approval-webhook", "secret": {"secretName": "gates", "items": items}})
    );
    let controller = &pod["containers"][0];
    let file = render::variable(controller, "AGENTLOOP_APPROVAL_WEBHOOK_SECRET_FILE").unwrap();
    assert_eq!(file["value"], "/etc/agentloop-webhook/secret");
    let mounts = controller["volumeMounts"].as_array().unwrap();
    let mount = json!({"name": "approval-webhook", "mountPath": "/etc/agentloop-webhook", "readOnly": true});
    assert!(mounts.contains(&mount));
    let without = render(&[]).unwrap().unwrap();
    let pod = &without.one("Deployment", "agentloop")["spec"]["template"]["spec"];
    assert!(pod["volumes"].is_null() && pod["containers"][0]["volumeMounts"].is_null());
}

#[test]
fn the_credential_of_the_database_of_histories_is_mounted_in_the_controller_and_in_no_variable() {
    let Some(rendered) = render(EVERYTHING) else { return };
    let objects = rendered.unwrap();
    let pod = &objects.one("Deployment", "agentloop")["spec"]["template"]["spec"];
    let items = json!([{"key": "uri", "path": "uri"}, {"key": "ca.crt", "path": "ca.crt"}]);
    let volume = json!({"name": "history", "secret": {"secretName": "history", "items": items}});
    assert!(pod["volumes"].as_array().unwrap().contains(&volume));
    let controller = &pod["containers"][0];
    let mount = json!({"name": "history", "mountPath": "/etc/agentloop-history", "readOnly": true});
    assert!(controller["volumeMounts"].as_array().unwrap().contains(&mount));
    for (name, value) in [
        ("AGENTLOOP_HISTORY_POSTGRES_FILE", "/etc/agentloop-history/uri"),
        ("AGENTLOOP_HISTORY_POSTGRES_CA_FILE", "/etc/agentloop-history/ca.crt"),
        ("AGENTLOOP_HISTORY_RETENTION_DAYS", "90"),
    ] {
        assert_eq!(render::variable(controller, name).unwrap()["value"], value);
    }
    let without = render(&[]).unwrap().unwrap();
    let controller = &without.one("Deployment", "agentloop")["spec"]["template"]["spec"]["containers"][0];
    assert!(render::variable(controller, "AGENTLOOP_HISTORY_POSTGRES_FILE").is_none());
}

#[test]
fn the_authorities_of_the_collector_are_a_file_of_the_controller_and_their_secret_a_flag() {
    let Some(rendered) = render(EVERYTHING) else { return };
    let objects = rendered.unwrap();
    let pod = &objects.one("Deployment", "agentloop")["spec"]["template"]["spec"];
    let items = json!([{"key": "ca.crt", "path": "ca.crt"}]);
    let volume = json!({"name": "otlp-ca", "secret": {"secretName": "collector", "items": items, "optional": true}});
    assert!(pod["volumes"].as_array().unwrap().contains(&volume), "{pod}");
    let controller = &pod["containers"][0];
    let mount = json!({"name": "otlp-ca", "mountPath": "/etc/agentloop-otlp", "readOnly": true});
    assert!(controller["volumeMounts"].as_array().unwrap().contains(&mount));
    for (name, value) in [
        ("AGENTLOOP_OTLP_CA_SECRET", "collector"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/etc/agentloop-otlp/ca.crt"),
    ] {
        assert_eq!(render::variable(controller, name).unwrap()["value"], value);
    }
    let exported = render(&["telemetry.otlp.endpoint=https://collector:4318"]);
    let exported = exported.unwrap().unwrap();
    let pod = &exported.one("Deployment", "agentloop")["spec"]["template"]["spec"];
    assert!(pod["volumes"].is_null() && pod["containers"][0]["volumeMounts"].is_null());
    let text = pod.to_string();
    assert!(!text.contains("OTLP_CA") && !text.contains("CERTIFICATE"), "{text}");
}

#[test]
fn every_pod_of_the_chart_keeps_the_restricted_profile() {
    for settings in MATRIX {
        let Some(rendered) = render(settings) else { return };
        let objects = rendered.unwrap();
        let pods: Vec<_> = objects
            .0
            .iter()
            .filter_map(|object| match object["kind"].as_str() {
                Some("Pod") => object.pointer("/spec"),
                _ => object.pointer("/spec/template/spec"),
            })
            .collect();
        let test = !settings.contains(&"rbac.create=false");
        assert_eq!(pods.len(), 1 + usize::from(test), "{settings:?}");
        for pod in pods {
            assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
            assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
            for host in ["hostNetwork", "hostPID", "hostIPC"] {
                assert!(pod[host].is_null(), "{host}");
            }
            for volume in pod["volumes"].as_array().into_iter().flatten() {
                let is_file = volume["configMap"].is_object() || volume["secret"].is_object();
                assert!(is_file, "{volume}");
            }
            for container in containers(pod) {
                let context = &container["securityContext"];
                assert_eq!(context["allowPrivilegeEscalation"], false);
                assert_eq!(context["readOnlyRootFilesystem"], true);
                assert_eq!(context["capabilities"], json!({"drop": ["ALL"]}));
                assert!(!container["resources"]["limits"]["memory"].is_null());
            }
        }
    }
}

#[test]
fn the_definitions_of_the_chart_are_those_in_crds_and_outlive_a_release() {
    let Some(rendered) = render(&[]) else { return };
    let mut definition = rendered
        .unwrap()
        .one("CustomResourceDefinition", "agents.agentloop.dev")
        .clone();
    assert_eq!(
        definition["metadata"]["annotations"],
        json!({"helm.sh/resource-policy": "keep"})
    );
    definition["metadata"] = json!({"name": "agents.agentloop.dev"});
    let text = std::fs::read_to_string(repository("crds/agents.agentloop.dev.yaml")).unwrap();
    let expected: Value = serde_yaml::from_str(&text).unwrap();
    assert!(definition == expected, "run `make generate`");

    let free = render(&["crds.keep=false"]).unwrap().unwrap();
    let definition = free.one("CustomResourceDefinition", "agents.agentloop.dev");
    assert!(definition["metadata"]["annotations"].is_null());
    let without = render(&["crds.enabled=false"]).unwrap().unwrap();
    assert!(!without.has("CustomResourceDefinition", "agents.agentloop.dev"));
}

#[test]
fn the_manifest_in_deploy_is_what_the_chart_renders() {
    let Some(mut template) = helm() else { return };
    let ended = template
        .args([
            "template",
            "agentloop",
            "--namespace",
            "agentloop-system",
            "--skip-tests",
        ])
        .arg(repository("charts/agentloop"))
        .output()
        .unwrap();
    let deployed = std::fs::read_to_string(repository("deploy/agentloop.yaml")).unwrap();
    assert!(
        String::from_utf8_lossy(&ended.stdout) == deployed,
        "run `make generate`"
    );
}

#[test]
fn a_real_api_server_accepts_every_rendered_object_under_the_restricted_profile() {
    let Some(kubeconfig) = clusters::control_plane() else {
        return;
    };
    let cluster = Kubectl::new(&kubeconfig, "default");
    for namespace in NAMESPACES {
        let labels = json!({"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/warn": "restricted"});
        let object =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels}});
        cluster.apply(&object.to_string());
    }
    // A pod is admitted only with its account, which a dry run does not create.
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "agentloop-test"}});
    cluster.in_namespace(NAMESPACES[0]).apply(&account.to_string());
    for settings in MATRIX {
        let Some(rendered) = render(settings) else { return };
        let Rendered(mut objects) = rendered.unwrap();
        // Their definitions are those of the Prometheus Operator and of the Grafana Operator.
        let foreign = ["ServiceMonitor", "PodMonitor", "PrometheusRule", "GrafanaDashboard"];
        objects.retain(|object| !foreign.iter().any(|kind| object["kind"] == *kind));
        for namespace in NAMESPACES {
            // What is outside namespaces goes with the release's own.
            let of = |object: &&Value| object["metadata"]["namespace"].as_str().unwrap_or(NAMESPACES[0]) == namespace;
            let items: Vec<_> = objects.iter().filter(of).collect();
            if items.is_empty() {
                continue;
            }
            let list = json!({"apiVersion": "v1", "kind": "List", "items": items});
            let there = cluster.in_namespace(namespace);
            let ended = there.try_apply_with(&list.to_string(), &["--dry-run=server"]);
            assert!(ended.success, "{settings:?}: {}", ended.stderr);
            assert!(!ended.stderr.contains("PodSecurity"), "{settings:?}: {}", ended.stderr);
        }
    }
}
