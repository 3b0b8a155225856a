//! The chart's values: each is described, has its place in the schema, changes something, and is spelt right or refused.

use serde_json::Value;

use super::effects::EFFECTS;
use super::render::{render, repository};

/// Values that are one thing, although they have parts.
pub(super) const WHOLE: &[&str] = &[
    "podSecurityContext",
    "securityContext",
    "startupProbe",
    "livenessProbe",
    "readinessProbe",
    "resources",
    "agents.gateway.resources",
    "agents.worker.resources",
    "sensor.resources",
    "dashboards.labels",
    "dashboards.grafanaOperator.instanceSelector",
];

pub(super) fn values_text() -> String {
    std::fs::read_to_string(repository("charts/agentloop/values.yaml")).unwrap()
}

pub(super) fn schema() -> Value {
    let text = std::fs::read_to_string(repository("charts/agentloop/values.schema.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// The names of all values: those without parts, and those that are one thing.
pub(super) fn names() -> Vec<String> {
    collected().names
}

/// The names of all groups of values.
pub(super) fn groups() -> Vec<String> {
    collected().groups
}

/// The names in `values.yaml`, in its order.
#[derive(Default)]
struct CollectedNames {
    names: Vec<String>,
    groups: Vec<String>,
}

impl CollectedNames {
    fn collect(&mut self, path: &str, value: &Value) {
        let parts = value.as_object().filter(|parts| !parts.is_empty());
        let Some(parts) = parts.filter(|_| !WHOLE.contains(&path)) else {
            self.names.push(path.into());
            return;
        };
        for (key, part) in parts {
            let path = if path.is_empty() {
                key.clone()
            } else {
                format!("{path}.{key}")
            };
            if part.as_object().is_some_and(|parts| !parts.is_empty()) && !WHOLE.contains(&path.as_str()) {
                self.groups.push(path.clone());
            }
            self.collect(&path, part);
        }
    }
}

fn collected() -> CollectedNames {
    let mut collected = CollectedNames::default();
    collected.collect("", &serde_yaml::from_str(&values_text()).unwrap());
    collected
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
        // Parts of a value that is one thing as a whole.
        let inside = inside || line.starts_with("  ") && whole(&lines[..number]);
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
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "image",
        "persistentVolumeClaim",
        "projected",
        "secret",
    ];
    assert_closed("", &schema, &free);
}

/// Each setting is refused by the schema, with a message that names this.
fn check_refused(refused: &[(&str, &str)]) {
    for &(setting, named) in refused {
        let Some(rendered) = render(&[setting]) else { return };
        let error = rendered.expect_err(setting);
        assert!(error.contains("schema") && error.contains(named), "{setting}: {error}");
    }
}

#[test]
fn a_senseless_value_of_telemetry_is_refused_by_name() {
    check_refused(&[
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
        ("telemetry.content=some", "/telemetry/content"),
        ("telemetry.otlp.logs=debug", "/telemetry/otlp/logs"),
        ("telemetry.otlp.metrics=push", "/telemetry/otlp/metrics"),
        (
            "telemetry.otlp.metricsIntervalSeconds=0",
            "/telemetry/otlp/metricsIntervalSeconds",
        ),
        ("telemetry.otlp.protocol=grpc", "protocol"),
    ]);
}

/// Settings that are refused, with the name that the refusal has.
const REFUSED: &[(&str, &str)] = &[
    ("replicas=3", "replicas"),
    ("image.repo=x", "repo"),
    ("crds.enable=false", "enable"),
    ("agents.worker.resource.limits.memory=1Gi", "resource"),
    ("metrics.serviceMonitor.honorLabels=true", "honorLabels"),
    ("metrics.prometheusRule.groups[0].name=x", "groups"),
    (
        "metrics.prometheusRule.runbookBaseURL=wiki/runbooks",
        "/metrics/prometheusRule/runbookBaseURL",
    ),
    (
        "metrics.prometheusRule.selector=agentloop",
        "/metrics/prometheusRule/selector",
    ),
    ("metrics.perObject=Some", "/metrics/perObject"),
    ("metrics.authentication=Basic", "/metrics/authentication"),
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
    ("networkPolicy.metricsFrom[0].namespaces=x", "namespaces"),
    ("page.hosts={a b}", "/page/hosts/0"),
    ("metrics.serviceMonitor.metricRelabelings[0].regexp=x", "regexp"),
    ("rbac.sidecarImages={it's}", "/rbac/sidecarImages/0"),
    ("sensor.resource.limits.memory=1Gi", "resource"),
    ("sensor.tolerations[0].keys=a", "keys"),
    ("sensor.imagePullSecrets={registry}", "/sensor/imagePullSecrets/0"),
    (
        r"sensor.podAnnotations.agentloop\.dev/epoch=1",
        "/sensor/podAnnotations/agentloop.dev~1epoch",
    ),
    ("agents.imagePullSecrets={registry}", "/agents/imagePullSecrets/0"),
    ("egress.allowedCIDRs={10.0.0.1}", "/egress/allowedCIDRs/0"),
    (
        "egress.agents.privateAddresses=Maybe",
        "/egress/agents/privateAddresses",
    ),
    ("prices.m.input=1", "input"),
    ("prices.m.inputPerMillion=cheap", "/prices/m/inputPerMillion"),
    ("dashboards.namespace=Team_A", "/dashboards/namespace"),
    ("dashboards.grafanaOperator.instanceSelector.labels.a=b", "labels"),
    ("dashboards.grafanaOperator.folderRef=a", "folderRef"),
    ("replicaCount=0", "/replicaCount"),
    ("replicaCount=11", "/replicaCount"),
    ("replicaCount=two", "/replicaCount"),
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

#[test]
fn a_misspelt_or_invalid_value_is_refused_by_name() {
    check_refused(REFUSED);
    if render(&[]).is_none() {
        return;
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
    let error = render(&["metrics.authentication=Token", "metrics.serviceMonitor.enabled=true"]);
    let error = error.unwrap().unwrap_err();
    assert!(error.contains("bearerTokenSecret.name is required"), "{error}");
}

/// Whether the last line at the margin is a value that is one thing.
fn whole(before: &[&str]) -> bool {
    let key = before
        .iter()
        .rev()
        .find(|line| !line.is_empty() && !line.starts_with([' ', '#']));
    let name = key.and_then(|line| line.split(':').next()).unwrap_or_default();
    name == "strategy" || WHOLE.contains(&name)
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
