//! The chart's values: each is described, has its place in the schema, changes something, and is spelt right or refused.

use serde_json::Value;

use super::render::{render, repository};

/// For each value, a setting other than its default, and a text that then appears in what is rendered.
const EFFECTS: &[(&str, &[&str], &str)] = &[
    (
        "image.repository",
        &["image.repository=example.com/a"],
        "image: example.com/a:0.1.0",
    ),
    ("image.tag", &["image.tag=v9"], "localhost/agentloop:v9"),
    (
        "image.digest",
        &[
            "image.tag=v9",
            "image.digest=sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb",
        ],
        "localhost/agentloop@sha256:bbbb",
    ),
    (
        "image.pullPolicy",
        &["image.pullPolicy=Never"],
        "imagePullPolicy: Never",
    ),
    (
        "imagePullSecrets",
        &["imagePullSecrets[0].name=registry"],
        "- name: registry",
    ),
    ("replicas", &["replicas=7"], "replicas: 7"),
    (
        "watchNamespaces",
        &["watchNamespaces={team-a,team-b}"],
        "value: team-a,team-b",
    ),
    ("workers", &["workers=77"], "value: '77'"),
    ("logLevel", &["logLevel=debug"], "value: debug"),
    (
        "extraEnv",
        &["extraEnv[0].name=NO_PROXY", "extraEnv[0].value=.svc"],
        "- name: NO_PROXY",
    ),
    ("resources", &["resources.limits.memory=777Mi"], "memory: 777Mi"),
    (
        "agents.gateway.resources",
        &["agents.gateway.resources.limits.memory=771Mi"],
        "771Mi",
    ),
    (
        "agents.worker.resources",
        &["agents.worker.resources.limits.memory=772Mi"],
        "772Mi",
    ),
    ("sensor.resources", &["sensor.resources.limits.memory=773Mi"], "773Mi"),
    (
        "egress.allowedCIDRs",
        &["egress.allowedCIDRs={10.96.0.0/12,fd00::/8}"],
        "value: 10.96.0.0/12,fd00::/8",
    ),
    (
        "egress.deniedCIDRs",
        &["egress.deniedCIDRs={203.0.113.0/24}"],
        "value: 203.0.113.0/24",
    ),
    (
        "egress.agents.privateAddresses",
        &["egress.agents.privateAddresses=Deny"],
        "value: Deny",
    ),
    (
        "egress.agents.allowedCIDRs",
        &["egress.agents.allowedCIDRs={10.97.0.0/16}"],
        "value: 10.97.0.0/16",
    ),
    (
        "egress.agents.deniedCIDRs",
        &["egress.agents.deniedCIDRs={203.0.114.0/24}"],
        "value: 203.0.114.0/24",
    ),
    (
        "prices",
        &[
            "prices.a-model.inputPerMillion=3.00",
            "prices.a-model.outputPerMillion=15.00",
        ],
        r#"{"a-model":{"inputPerMillion":"3.00","outputPerMillion":"15.00"}}"#,
    ),
    ("policy.requireBudget", &["policy.requireBudget=true"], "value: 'true'"),
    ("policy.agentPrices", &["policy.agentPrices=Deny"], "value: Deny"),
    ("policy.minOutputTokens", &["policy.minOutputTokens=77"], "value: '77'"),
    (
        "policy.allowedPriorityClasses",
        &["policy.allowedPriorityClasses={agents,batch}"],
        "value: agents,batch",
    ),
    (
        "policy.allowedAnnotationPrefixes",
        &["policy.allowedAnnotationPrefixes={example.com/,team.}"],
        "value: example.com/,team.",
    ),
    (
        "policy.allowedToolImages",
        &["policy.allowedToolImages={registry.example.com/,mcp/}"],
        "value: registry.example.com/,mcp/",
    ),
    (
        "approvals.webhook.url",
        &[
            "approvals.webhook.url=https://bridge.example.com/gates",
            "approvals.webhook.secretName=any",
        ],
        "value: https://bridge.example.com/gates",
    ),
    (
        "approvals.webhook.secretName",
        &[
            "approvals.webhook.url=https://bridge.example.com/gates",
            "approvals.webhook.secretName=mark",
        ],
        "secretName: mark",
    ),
    (
        "history.postgres.existingSecret",
        &["history.postgres.existingSecret=mark"],
        "secretName: mark",
    ),
    (
        "history.postgres.key",
        &["history.postgres.existingSecret=any", "history.postgres.key=mark"],
        "key: mark",
    ),
    (
        "history.postgres.caKey",
        &["history.postgres.existingSecret=any", "history.postgres.caKey=mark"],
        "key: mark",
    ),
    (
        "history.retentionDays",
        &["history.postgres.existingSecret=any", "history.retentionDays=7"],
        "value: '7'",
    ),
    (
        "telemetry.otlp.endpoint",
        &["telemetry.otlp.endpoint=http://collector:4318"],
        "value: http://collector:4318",
    ),
    (
        "telemetry.otlp.headersSecretName",
        &[
            "telemetry.otlp.endpoint=http://c:4318",
            "telemetry.otlp.headersSecretName=mark",
        ],
        "value: mark",
    ),
    (
        "telemetry.otlp.resourceAttributes",
        &[
            "telemetry.otlp.endpoint=http://c:4318",
            "telemetry.otlp.resourceAttributes.cluster=a b",
        ],
        "value: cluster=a%20b",
    ),
    (
        "telemetry.otlp.tracesSampler",
        &[
            "telemetry.otlp.endpoint=http://c:4318",
            "telemetry.otlp.tracesSampler=traceidratio",
        ],
        "value: traceidratio",
    ),
    (
        "telemetry.otlp.tracesSamplerArg",
        &[
            "telemetry.otlp.endpoint=http://c:4318",
            "telemetry.otlp.tracesSamplerArg=0.25",
        ],
        "0.25",
    ),
    ("crds.enabled", &["crds.enabled=false"], ""),
    ("crds.keep", &["crds.keep=false"], ""),
    (
        "serviceAccount.create",
        &["serviceAccount.create=false", "serviceAccount.name=mine"],
        "serviceAccountName: mine",
    ),
    (
        "serviceAccount.name",
        &["serviceAccount.name=mine"],
        "serviceAccountName: mine",
    ),
    (
        "serviceAccount.annotations",
        &["serviceAccount.annotations.a=mark"],
        "a: mark",
    ),
    ("rbac.create", &["rbac.create=false"], ""),
    ("rbac.aggregate", &["rbac.aggregate=false"], ""),
    ("rbac.approvalPolicy", &["rbac.approvalPolicy=false"], ""),
    ("rbac.controllerPolicy", &["rbac.controllerPolicy=false"], ""),
    ("rbac.identityPolicy", &["rbac.identityPolicy=false"], ""),
    (
        "rbac.sidecarImages",
        &["rbac.sidecarImages={docker.io/istio/}"],
        "c.image.startsWith('docker.io/istio/')",
    ),
    ("networkPolicy.enabled", &["networkPolicy.enabled=false"], ""),
    (
        "networkPolicy.linkFrom",
        &["networkPolicy.linkFrom[0].ipBlock.cidr=10.9.0.0/16"],
        "cidr: 10.9.0.0/16",
    ),
    (
        "networkPolicy.metricsFrom",
        &["networkPolicy.metricsFrom[0].podSelector.matchLabels.a=mark"],
        "a: mark",
    ),
    (
        "podDisruptionBudget.enabled",
        &["podDisruptionBudget.enabled=false"],
        "",
    ),
    (
        "podDisruptionBudget.minAvailable",
        &["podDisruptionBudget.minAvailable=50%"],
        "minAvailable: 50%",
    ),
    (
        "metrics.serviceMonitor.enabled",
        &["metrics.serviceMonitor.enabled=true"],
        "honorLabels: true",
    ),
    (
        "metrics.serviceMonitor.labels",
        &[
            "metrics.serviceMonitor.enabled=true",
            "metrics.serviceMonitor.labels.release=mark",
        ],
        "release: mark",
    ),
    (
        "metrics.serviceMonitor.interval",
        &[
            "metrics.serviceMonitor.enabled=true",
            "metrics.serviceMonitor.interval=77s",
        ],
        "interval: 77s",
    ),
    (
        "metrics.serviceMonitor.scrapeTimeout",
        &[
            "metrics.serviceMonitor.enabled=true",
            "metrics.serviceMonitor.scrapeTimeout=7s",
        ],
        "scrapeTimeout: 7s",
    ),
    (
        "metrics.serviceMonitor.metricRelabelings",
        &[
            "metrics.serviceMonitor.enabled=true",
            "metrics.serviceMonitor.metricRelabelings[0].action=drop",
            "metrics.serviceMonitor.metricRelabelings[0].regex=agentloop_agent_.*",
            "metrics.serviceMonitor.metricRelabelings[0].sourceLabels={__name__}",
        ],
        "regex: agentloop_agent_.*",
    ),
    (
        "dashboards.enabled",
        &["dashboards.enabled=true"],
        "grafana_dashboard: '1'",
    ),
    (
        "dashboards.labels",
        &["dashboards.enabled=true", "dashboards.labels.a=mark"],
        "a: mark",
    ),
    (
        "dashboards.annotations",
        &["dashboards.enabled=true", "dashboards.annotations.grafana_folder=mark"],
        "grafana_folder: mark",
    ),
    (
        "dashboards.namespace",
        &["dashboards.enabled=true", "dashboards.namespace=monitoring"],
        "namespace: monitoring",
    ),
    ("commonLabels", &["commonLabels.a=mark"], "a: mark"),
    ("podLabels", &["podLabels.a=mark"], "a: mark"),
    ("podAnnotations", &["podAnnotations.a=mark"], "a: mark"),
    ("nodeSelector", &["nodeSelector.a=mark"], "a: mark"),
    ("tolerations", &["tolerations[0].key=mark"], "- key: mark"),
    ("affinity", &["affinity.nodeAffinity.a=mark"], "a: mark"),
    (
        "topologySpreadConstraints",
        &[
            "topologySpreadConstraints[0].maxSkew=1",
            "topologySpreadConstraints[0].topologyKey=mark",
            "topologySpreadConstraints[0].whenUnsatisfiable=DoNotSchedule",
        ],
        "topologyKey: mark",
    ),
    (
        "priorityClassName",
        &["priorityClassName=mark"],
        "priorityClassName: mark",
    ),
];

/// Values that are one thing, although they have parts.
const WHOLE: &[&str] = &[
    "resources",
    "agents.gateway.resources",
    "agents.worker.resources",
    "sensor.resources",
    "dashboards.labels",
];

fn values_text() -> String {
    std::fs::read_to_string(repository("charts/agentloop/values.yaml")).unwrap()
}

fn schema() -> Value {
    let text = std::fs::read_to_string(repository("charts/agentloop/values.schema.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// The names of all values: those without parts, and those that are one thing.
fn names() -> Vec<String> {
    fn collect(path: &str, value: &Value, names: &mut Vec<String>) {
        match value
            .as_object()
            .filter(|fields| !fields.is_empty() && !WHOLE.contains(&path))
        {
            Some(fields) => {
                for (key, field) in fields {
                    let path = if path.is_empty() {
                        key.clone()
                    } else {
                        format!("{path}.{key}")
                    };
                    collect(&path, field, names);
                }
            }
            None => names.push(path.into()),
        }
    }
    let mut names = Vec::new();
    collect("", &serde_yaml::from_str(&values_text()).unwrap(), &mut names);
    names
}

#[test]
fn every_value_changes_what_is_rendered() {
    let tested: Vec<_> = EFFECTS.iter().map(|(name, ..)| (*name).to_owned()).collect();
    assert_eq!(names(), tested, "values.yaml (left) and this table (right)");
    let Some(default) = render(&[]) else { return };
    let default = text(&default.unwrap());
    for (name, settings, mark) in EFFECTS {
        let changed = text(
            &render(settings)
                .unwrap()
                .unwrap_or_else(|error| panic!("{name}: {error}")),
        );
        assert_ne!(changed, default, "{name} changes nothing");
        assert!(
            changed.contains(mark) && (mark.is_empty() || !default.contains(mark)),
            "{name}: no «{mark}»"
        );
    }
}

/// Objects as YAML, so that the marks can be written as one reads them.
fn text(rendered: &super::Rendered) -> String {
    let documents = rendered.0.iter().map(|object| serde_yaml::to_string(object).unwrap());
    documents.collect::<Vec<_>>().join("---\n")
}

#[test]
fn every_value_is_described() {
    let text = values_text();
    let lines: Vec<_> = text.lines().collect();
    for (number, line) in lines.iter().enumerate() {
        let Some((key, rest)) = line
            .split_once(':')
            .filter(|(key, _)| !key.trim_start().starts_with('#'))
        else {
            continue;
        };
        let inside = ["requests", "limits"].contains(&key.trim());
        let group = rest.is_empty() && key.trim() != "resources";
        let described = number > 0 && lines[number - 1].trim_start().starts_with("# ");
        assert!(
            described || inside || group,
            "values.yaml:{}: {line} has no comment",
            number + 1
        );
    }
}

#[test]
fn the_schema_has_every_value_and_closes_every_object() {
    let schema = schema();
    let places = |place: &Value| -> Value {
        match place["$ref"].as_str() {
            Some(reference) => schema.pointer(reference.trim_start_matches('#')).unwrap().clone(),
            None => place.clone(),
        }
    };
    for name in names() {
        let mut place = schema.clone();
        for key in name.split('.') {
            let next = place["properties"]
                .get(key)
                .unwrap_or_else(|| panic!("{name} is not in the schema"));
            place = places(next);
        }
    }
    // Parts of Kubernetes' own types, and what a parent chart passes.
    let free = [
        "global",
        "valueFrom",
        "nodeAffinity",
        "podAffinity",
        "podAntiAffinity",
        "labelSelector",
    ];
    assert_closed("", &schema, &free);
}

#[test]
fn a_misspelt_or_senseless_value_is_refused_by_name() {
    let refused = [
        ("replica=3", "replica"),
        ("image.repo=x", "repo"),
        ("crds.enable=false", "enable"),
        ("agents.worker.resource.limits.memory=1Gi", "resource"),
        ("metrics.serviceMonitor.honorLabels=true", "honorLabels"),
        ("resources.limit.memory=1Gi", "limit"),
        ("tolerations[0].keys=a", "keys"),
        ("policy.requireBudgets=true", "requireBudgets"),
        ("policy.agentPrices=Maybe", "/policy/agentPrices"),
        ("policy.minOutputTokens=0", "/policy/minOutputTokens"),
        (
            "policy.allowedPriorityClasses={a b}",
            "/policy/allowedPriorityClasses/0",
        ),
        (
            "policy.allowedAnnotationPrefixes={a b}",
            "/policy/allowedAnnotationPrefixes/0",
        ),
        ("policy.allowedToolImages={'a b'}", "/policy/allowedToolImages/0"),
        ("approvals.webhook.secret=x", "secret"),
        ("approvals.webhook.url=bridge.example.com", "/approvals/webhook/url"),
        ("approvals.webhook.url=https://user@x/", "/approvals/webhook/url"),
        ("approvals.webhook.secretName=Mine", "/approvals/webhook/secretName"),
        ("history.postgres.uri=x", "uri"),
        (
            "history.postgres.existingSecret=Mine",
            "/history/postgres/existingSecret",
        ),
        ("history.postgres.key=", "/history/postgres/key"),
        ("history.postgres.caKey=a/b", "/history/postgres/caKey"),
        ("history.retentionDays=36501", "/history/retentionDays"),
        ("telemetry.otlp.endpoint=collector:4318", "/telemetry/otlp/endpoint"),
        ("telemetry.otlp.endpoint=https://user@x/", "/telemetry/otlp/endpoint"),
        (
            "telemetry.otlp.tracesSampler=sometimes",
            "/telemetry/otlp/tracesSampler",
        ),
        (
            "telemetry.otlp.tracesSamplerArg=1.1",
            "/telemetry/otlp/tracesSamplerArg",
        ),
        ("telemetry.otlp.protocol=grpc", "protocol"),
        ("networkPolicy.metricsFrom[0].namespaces=x", "namespaces"),
        ("metrics.serviceMonitor.metricRelabelings[0].regexp=x", "regexp"),
        ("rbac.sidecarImages={it's}", "/rbac/sidecarImages/0"),
        ("sensor.resource.limits.memory=1Gi", "resource"),
        ("egress.allowedCIDRs={10.0.0.1}", "/egress/allowedCIDRs/0"),
        (
            "egress.agents.privateAddresses=Maybe",
            "/egress/agents/privateAddresses",
        ),
        ("prices.m.input=1", "input"),
        ("prices.m.inputPerMillion=cheap", "/prices/m/inputPerMillion"),
        ("dashboards.namespace=Team_A", "/dashboards/namespace"),
        ("replicas=0", "/replicas"),
        ("replicas=two", "/replicas"),
        ("workers=257", "/workers"),
        ("image.pullPolicy=Sometimes", "/image/pullPolicy"),
        ("image.digest=latest", "/image/digest"),
        ("watchNamespaces={Team_A}", "/watchNamespaces/0"),
        ("resources.limits.memory=lots", "/resources/limits/memory"),
        (
            "metrics.serviceMonitor.interval=often",
            "/metrics/serviceMonitor/interval",
        ),
    ];
    for (setting, named) in refused {
        let Some(rendered) = render(&[setting]) else { return };
        let error = rendered.expect_err(setting);
        assert!(error.contains("schema") && error.contains(named), "{setting}: {error}");
    }
    let error = render(&["serviceAccount.create=false"]).unwrap().unwrap_err();
    assert!(error.contains("serviceAccount.name is required"), "{error}");
    for (setting, missing) in [
        (
            "approvals.webhook.url=https://x/",
            "approvals.webhook.secretName is required",
        ),
        ("approvals.webhook.secretName=x", "approvals.webhook.url is required"),
        (
            "history.postgres.caKey=x",
            "history.postgres.existingSecret is required",
        ),
    ] {
        let error = render(&[setting]).unwrap().unwrap_err();
        assert!(error.contains(missing), "{error}");
    }
}

/// No object of the schema takes keys that it does not know.
fn assert_closed(key: &str, place: &Value, free: &[&str]) {
    if place["type"] == "object" {
        let closed = !place["additionalProperties"].is_null() && place["additionalProperties"] != true;
        assert!(closed || free.contains(&key), "{key} takes misspelt keys");
    }
    if let Value::Object(fields) = place {
        fields.iter().for_each(|(key, field)| assert_closed(key, field, free));
    }
}
