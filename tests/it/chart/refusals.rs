//! Values that are refused: by the schema, with their name, or for contradicting each other; and that the schema knows no other ones.

use serde_json::Value;

use super::EVERYTHING;
use super::render::render;
use super::values::{WHOLE, schema, values_text};

/// Keys that one of both has and the other does not, below a value.
fn differences(path: &str, values: &Value, place: &Value, whole: &Value, found: &mut Vec<String>) {
    let place = match place["$ref"].as_str() {
        Some(reference) => whole.pointer(reference.trim_start_matches('#')).unwrap(),
        None => place,
    };
    let Some(known) = place["properties"].as_object() else {
        return;
    };
    let given = values.as_object().filter(|given| !given.is_empty());
    let Some(given) = given.filter(|_| !WHOLE.contains(&path)) else {
        return;
    };
    for key in known.keys().filter(|key| !given.contains_key(*key)) {
        found.push(format!("{path}.{key}"));
    }
    for (key, value) in given {
        let path = if path.is_empty() {
            key.clone()
        } else {
            format!("{path}.{key}")
        };
        differences(&path, value, &known[key], whole, found);
    }
}

#[test]
fn the_schema_has_no_value_that_values_yaml_does_not_describe() {
    let schema = schema();
    let values = serde_yaml::from_str(&values_text()).unwrap();
    let mut found = Vec::new();
    differences("", &values, &schema, &schema, &mut found);
    // What a parent chart passes.
    assert_eq!(found, [".enabled", ".global"]);
}

#[test]
fn a_misspelt_or_invalid_value_of_the_deployment_is_refused_by_name() {
    let refused = [
        ("nameOverride=Mark", "/nameOverride"),
        ("fullnameOverride=-a", "/fullnameOverride"),
        ("namespaceOverride=a.b", "/namespaceOverride"),
        ("image.registry=https://x/", "/image/registry"),
        // Its tag would be a part of the name, and the name a part of a policy's expression.
        ("image.repository=registry/agentloop:1.0", "/image/repository"),
        ("image.repository=agent'loop", "/image/repository"),
        ("strategy.type=OnDelete", "/strategy/type"),
        (
            "strategy.rollingUpdate.maxSurge=half",
            "/strategy/rollingUpdate/maxSurge",
        ),
        ("revisionHistoryLimit=-1", "/revisionHistoryLimit"),
        (
            "leaderElection.leaseDurationSeconds=2",
            "/leaderElection/leaseDurationSeconds",
        ),
        ("leaderElection.retryPeriod=2", "retryPeriod"),
        ("extraArgs[0]=metrics", "/extraArgs/0"),
        ("extraEnvFrom[0].secret.name=x", "secret"),
        ("extraVolumes[0].hostPath.path=/", "hostPath"),
        ("extraVolumeMounts[0].path=/", "path"),
        ("podSecurityContext.runasUser=1", "runasUser"),
        ("securityContext.capabilities.dropped={ALL}", "dropped"),
        ("livenessProbe.period=1", "period"),
        ("readinessProbe.periodSeconds=0", "/readinessProbe/periodSeconds"),
        ("terminationGracePeriodSeconds=0", "/terminationGracePeriodSeconds"),
        ("hostAliases[0].ip=192.0.2.7", "hostnames"),
        ("dnsConfig.search={a}", "search"),
        ("extraObjects[0].kind=ConfigMap", "apiVersion"),
        ("metrics.podMonitor.honorLabels=true", "honorLabels"),
        // `null` removes a section.
        ("metrics=null", "metrics"),
        ("metrics.serviceMonitor=null", "serviceMonitor"),
        // Services, policies and the plugin find the controller by these.
        (
            r"commonLabels.app\.kubernetes\.io/part-of=x",
            "/commonLabels/app.kubernetes.io~1part-of",
        ),
        (
            r"commonLabels.app\.kubernetes\.io/name=x",
            "/commonLabels/app.kubernetes.io~1name",
        ),
        (r"commonLabels.helm\.sh/chart=x", "/commonLabels/helm.sh~1chart"),
        (
            r"podLabels.app\.kubernetes\.io/component=x",
            "/podLabels/app.kubernetes.io~1component",
        ),
        (
            r"metrics.serviceMonitor.labels.app\.kubernetes\.io/part-of=x",
            "/metrics/serviceMonitor/labels/app.kubernetes.io~1part-of",
        ),
        (
            r"dashboards.labels.helm\.sh/chart=x",
            "/dashboards/labels/helm.sh~1chart",
        ),
        (
            r"podLabels.agentloop\.dev/leader=true",
            "/podLabels/agentloop.dev~1leader",
        ),
    ];
    for (setting, named) in refused {
        let Some(rendered) = render(&[setting]) else { return };
        let error = rendered.expect_err(setting);
        assert!(error.contains("schema") && error.contains(named), "{setting}: {error}");
    }
}

#[test]
fn labels_that_only_resemble_those_of_the_chart_are_accepted() {
    let labels = [
        r"commonLabels.app\.kubernetes\.io/owner=x",
        r"podLabels.helm\.sh/chartist=x",
        r"podLabels.agentloop\.development/a=x",
    ];
    let Some(rendered) = render(&labels) else { return };
    assert!(rendered.is_ok(), "{rendered:?}");
}

#[test]
fn a_disruption_budget_that_permits_a_drain_is_accepted() {
    for settings in [
        &["podDisruptionBudget.minAvailable=50%"][..],
        &["podDisruptionBudget.minAvailable=2", "replicaCount=3"],
        // Without a second replica there is no PodDisruptionBudget.
        &["podDisruptionBudget.minAvailable=2", "replicaCount=1"],
    ] {
        let Some(rendered) = render(settings) else { return };
        assert!(rendered.is_ok(), "{rendered:?}");
    }
}

#[test]
fn a_probe_that_is_null_is_left_out() {
    let Some(rendered) = render(&["livenessProbe=null"]) else {
        return;
    };
    let rendered = rendered.unwrap();
    let container = &rendered.one("Deployment", "agentloop")["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(container.get("livenessProbe"), None);
    assert!(container["readinessProbe"].is_object());
}

#[test]
fn a_lease_that_no_second_renewal_could_save_is_refused() {
    let refused = ["leaderElection.leaseDurationSeconds=10"];
    let Some(rendered) = render(&refused) else { return };
    let error = rendered.unwrap_err();
    assert!(error.contains("must be more than twice"), "{error}");
    assert!(render(&["leaderElection.leaseDurationSeconds=11"]).unwrap().is_ok());
}

#[test]
fn values_that_contradict_each_other_are_refused_with_what_to_do() {
    let cases: [(&[&str], &str); 9] = [
        (
            &["watchNamespaces={team-a,kube-system}"],
            "lets the controller write nothing in the namespaces kube-*; remove kube-system",
        ),
        (
            &["metrics.serviceMonitor.enabled=true", "metrics.podMonitor.enabled=true"],
            "enable one",
        ),
        // The API server would refuse two variables of one name, and say nothing of values.
        (
            &["extraEnv[0].name=AGENTLOOP_LEASE_RENEW_SECONDS,extraEnv[0].value=x"],
            "AGENTLOOP_LEASE_RENEW_SECONDS is set by the chart",
        ),
        (
            &["extraEnv[0].name=RUST_LOG,extraEnv[0].value=debug"],
            "RUST_LOG is set by the chart",
        ),
        (&["rbac.clusterScoped=false"], "watchNamespaces is required"),
        (
            &[
                "strategy.rollingUpdate.maxSurge=0",
                "strategy.rollingUpdate.maxUnavailable=0%",
            ],
            "no pod could be replaced",
        ),
        (
            &["podDisruptionBudget.minAvailable=2"],
            "2 of 2 replicas would block every drain",
        ),
        // 1.02 replicas, rounded up.
        (
            &["podDisruptionBudget.minAvailable=51%"],
            "51% of 2 replicas would block every drain",
        ),
        (
            &["rbac.clusterScoped=false", "watchNamespaces={a}"],
            "crds.enabled=false is required",
        ),
    ];
    for (settings, named) in cases {
        let Some(rendered) = render(settings) else { return };
        let error = rendered.unwrap_err();
        assert!(error.contains(named), "{error}");
    }
}

#[test]
fn a_value_without_what_it_needs_is_refused_with_settings_that_are_accepted() {
    let cases: [(&[&str], &str); 9] = [
        (
            &["telemetry.content=true"],
            "telemetry.otlp.endpoint is required with telemetry.content:",
        ),
        (
            &["telemetry.otlp.logs=true"],
            "telemetry.otlp.endpoint is required with telemetry.otlp.logs:",
        ),
        (
            &["telemetry.otlp.metrics=true"],
            "telemetry.otlp.endpoint is required with telemetry.otlp.metrics:",
        ),
        (
            &["telemetry.otlp.headersSecretName=otlp"],
            "telemetry.otlp.endpoint is required with telemetry.otlp.headersSecretName:",
        ),
        (
            &["telemetry.otlp.caSecretName=collector"],
            "telemetry.otlp.endpoint is required with telemetry.otlp.caSecretName:",
        ),
        // An upgrade that turns the export off learns of all of them at once.
        (
            &[
                "telemetry.otlp.endpoint=",
                "telemetry.otlp.headersSecretName=otlp",
                "telemetry.otlp.logs=true",
            ],
            "is required with telemetry.otlp.headersSecretName, telemetry.otlp.logs:",
        ),
        (
            &["page.hosts={loops.example.com}"],
            "page.enabled=true is required with page.hosts:",
        ),
        (
            &["history.retentionDays=7"],
            "history.postgres.existingSecret is required with a history.retentionDays other than 90:",
        ),
        (
            &["history.retentionDays=0"],
            "history.postgres.existingSecret is required with a history.retentionDays other than 90:",
        ),
    ];
    for (settings, named) in cases {
        let Some(rendered) = render(settings) else { return };
        let error = rendered.unwrap_err();
        assert!(error.contains(named), "{settings:?}: {error}");
        let (_, advice) = error.split_once("--set ").unwrap();
        let advice = advice.split_whitespace().next().unwrap();
        let reset = render(&[settings, &[advice]].concat()).unwrap();
        assert!(reset.is_ok(), "{settings:?} with {advice}: {reset:?}");
    }
}

#[test]
fn values_that_are_off_or_as_by_default_need_no_others() {
    for setting in [
        "history.retentionDays=90",
        "page.hosts=null",
        "telemetry.otlp.logs=false",
        // They may stay when the export is turned off.
        "telemetry.otlp.resourceAttributes.team=a",
        "telemetry.otlp.tracesSampler=always_off",
    ] {
        let Some(rendered) = render(&[setting]) else { return };
        assert!(rendered.is_ok(), "{setting}: {rendered:?}");
    }
}

#[test]
fn a_namespace_that_its_policy_does_not_close_to_the_controller_is_accepted() {
    for settings in [
        &["watchNamespaces={kube-system}", "rbac.controllerPolicy=false"][..],
        &["watchNamespaces={kube-agents}", "namespaceOverride=kube-agents"],
        &["watchNamespaces={kubernetes-team}"],
    ] {
        let Some(rendered) = render(settings) else { return };
        assert!(rendered.is_ok(), "{settings:?}: {rendered:?}");
    }
}

/// The API server would refuse two variables of one name, and say nothing of values.
#[test]
fn every_variable_that_the_chart_sets_is_refused_among_the_additional_ones() {
    let add = |name: &str| format!("extraEnv[0].name={name},extraEnv[0].value=x");
    let Some(all) = render(EVERYTHING) else { return };
    let all = all.unwrap();
    let set = all.one("Deployment", "agentloop")["spec"]["template"]["spec"]["containers"][0]["env"].clone();
    for variable in set.as_array().unwrap() {
        let name = variable["name"].as_str().unwrap();
        // What the setting replaces is not of the chart.
        if name == "HTTPS_PROXY" {
            continue;
        }
        let addition = add(name);
        let error = render(&[EVERYTHING, &[&addition]].concat()).unwrap().expect_err(name);
        let expected = format!("extraEnv: {name} is set by the chart");
        assert!(error.contains(&expected), "{error}");
    }
    // Variables that the chart sets only together with others may be added without these.
    for name in ["OTEL_TRACES_SAMPLER", "POD_IP"] {
        let rendered = render(&[&add(name)]).unwrap();
        assert!(rendered.is_ok(), "{rendered:?}");
    }
}
