//! The Grafana dashboards of the chart: as a ConfigMap for Grafana's sidecar, and as resources of the grafana-operator.

use agentloop::link::durations::{APPROVAL_BOUNDS, CALL_BOUNDS, TURN_BOUNDS};
use agentloop::support::json_schema::violation;
use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use super::render::{Rendered, render, repository};

const ON: &str = "dashboards.grafanaOperator.enabled=true";

fn of_kind<'r>(rendered: &'r Rendered, kind: &str) -> Vec<&'r Value> {
    rendered.0.iter().filter(|object| object["kind"] == kind).collect()
}

/// The names of the dashboards, with their text.
fn boards() -> Vec<(String, String)> {
    let entries = std::fs::read_dir(repository("charts/agentloop/dashboards")).unwrap();
    let mut boards: Vec<_> = entries
        .map(|entry| {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            (name, std::fs::read_to_string(path).unwrap())
        })
        .collect();
    boards.sort();
    assert!(boards.len() > 1, "{boards:?}");
    boards
}

/// What the resource says of the field.
fn schema() -> Value {
    let text = std::fs::read_to_string(repository("hack/foreign-crds/grafanadashboards.yaml")).unwrap();
    let definition: Value = serde_yaml::from_str(&text).unwrap();
    let version = &definition["spec"]["versions"][0];
    assert_eq!(version["name"], "v1beta1");
    closed(version["schema"]["openAPIV3Schema"]["properties"]["spec"].clone())
}

/// The schema, in which unknown fields are errors.
fn closed(mut schema: Value) -> Value {
    if let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) {
        for part in properties.values_mut() {
            *part = closed(part.take());
        }
        schema["additionalProperties"] = json!(false);
    }
    if let Some(items) = schema.get_mut("items") {
        *items = closed(items.take());
    }
    schema
}

#[test]
fn the_grafana_operator_receives_each_dashboard_as_its_resource() {
    let Some(rendered) = render(&[ON]) else { return };
    let rendered = rendered.unwrap();
    assert!(
        !rendered.has("ConfigMap", "agentloop-dashboards"),
        "that is another value"
    );
    let resources = of_kind(&rendered, "GrafanaDashboard");
    assert_eq!(resources.len(), boards().len());
    for ((name, text), resource) in boards().iter().zip(resources) {
        assert_eq!(resource["apiVersion"], "grafana.integreatly.org/v1beta1");
        assert_eq!(resource["metadata"]["name"], json!(name));
        assert_eq!(resource["metadata"]["namespace"], "agentloop-system");
        assert_eq!(
            resource["spec"],
            json!({
                "instanceSelector": {"matchLabels": {"dashboards": "grafana"}},
                "allowCrossNamespaceImport": false,
                "json": text,
            })
        );
        assert_eq!(violation(&schema(), &resource["spec"]), None);
    }
    assert!(of_kind(&render(&[]).unwrap().unwrap(), "GrafanaDashboard").is_empty());
}

#[test]
fn folder_selector_and_namespace_are_values() {
    let settings = [
        ON,
        "dashboards.enabled=true",
        "dashboards.namespace=monitoring",
        "dashboards.grafanaOperator.folder=Agents: all",
        "dashboards.grafanaOperator.allowCrossNamespaceImport=true",
        "dashboards.grafanaOperator.instanceSelector.matchLabels=null",
        "dashboards.grafanaOperator.instanceSelector.matchExpressions[0].key=team",
        "dashboards.grafanaOperator.instanceSelector.matchExpressions[0].operator=In",
        "dashboards.grafanaOperator.instanceSelector.matchExpressions[0].values={a,b}",
    ];
    let Some(rendered) = render(&settings) else { return };
    let rendered = rendered.unwrap();
    assert!(rendered.has("ConfigMap", "agentloop-dashboards"));
    for resource in of_kind(&rendered, "GrafanaDashboard") {
        let mut spec = resource["spec"].clone();
        assert_eq!(violation(&schema(), &spec), None);
        spec.as_object_mut().unwrap().remove("json");
        assert_eq!(
            spec,
            json!({
                "instanceSelector": {"matchExpressions": [{"key": "team", "operator": "In", "values": ["a", "b"]}]},
                "allowCrossNamespaceImport": true,
                "folder": "Agents: all",
            })
        );
        assert_eq!(resource["metadata"]["namespace"], "monitoring");
    }
}

/// Seconds of a bound in milliseconds.
fn seconds(bounds: &[u64]) -> u64 {
    (bounds.last().unwrap() + 500) / 1000
}

#[test]
fn panels_of_quantiles_name_the_bounds_that_pods_measure_with() {
    assert_eq!(seconds(APPROVAL_BOUNDS), 7 * 24 * 3600);
    let bounds = [
        ("call_duration", format!("{} s", seconds(CALL_BOUNDS))),
        ("tool_call_duration", format!("{} s", seconds(CALL_BOUNDS))),
        ("turn_duration", format!("{} s", seconds(TURN_BOUNDS))),
        ("approval_wait", "a week".to_owned()),
    ];
    let (_, text) = boards()
        .into_iter()
        .find(|(name, _)| name == "agentloop-fleet")
        .unwrap();
    let board: Value = serde_json::from_str(&text).unwrap();
    let panels = board["panels"].as_array().unwrap();
    for (metric, bound) in bounds {
        let bucket = format!("agentloop_namespace_{metric}_seconds_bucket{{");
        let mut shown = 0;
        for panel in panels
            .iter()
            .filter(|panel| panel["targets"].to_string().contains(&bucket))
        {
            let text = format!("at most {bound}, the longest bound of a bucket");
            assert!(
                panel["description"].as_str().unwrap().contains(&text),
                "{}",
                panel["title"]
            );
            shown += 1;
        }
        assert!(shown > 0, "{metric}");
    }
}

#[test]
fn a_misspelt_field_would_be_found() {
    for (field, value) in [("folders", json!("a")), ("folder", json!(1))] {
        let mut spec = json!({"instanceSelector": {}, "json": "{}"});
        assert_eq!(violation(&schema(), &spec), None);
        spec[field] = value;
        assert!(violation(&schema(), &spec).is_some(), "{field}");
    }
    assert!(violation(&schema(), &json!({"json": "{}"})).is_some());
}
