//! The support matrix has the versions that the code and the chart have.

use serde_json::Value;

use super::page::{Page, code_spans, table_rows};
use crate::schema::reader::{Schema, repository};

fn text(path: &str) -> String {
    std::fs::read_to_string(repository(path)).unwrap()
}

fn cell<'a>(rows: &'a [Vec<String>], name: &str) -> &'a str {
    let row = rows
        .iter()
        .find(|row| row[0] == name)
        .unwrap_or_else(|| panic!("no row {name}"));
    &row[1]
}

#[test]
fn the_versions_of_kubernetes_and_of_the_protocol_of_tools_are_those_of_the_code() {
    let page = Page::read("docs/reference/support-matrix.md");
    let chart: Value = serde_yaml::from_str(&text("charts/agentloop/Chart.yaml")).unwrap();
    let oldest = chart["kubeVersion"]
        .as_str()
        .unwrap()
        .trim_start_matches(">=")
        .trim_end_matches(".0-0")
        .to_owned();
    let platform = table_rows(&page.section("## Platform"));
    assert!(
        cell(&platform, "Kubernetes").starts_with(&format!("{oldest} and newer")),
        "{oldest}"
    );
    let readme = text("README.md");
    assert!(readme.contains(&format!("Kubernetes {oldest} or newer")), "README.md");
    let tested = text("hack/devcluster/tools/k8s/go.mod");
    let tested = tested
        .split("k8s.io/kubernetes v")
        .nth(1)
        .unwrap()
        .rsplit_once('.')
        .map(|(version, _)| version);
    let minor: Vec<&str> = tested.unwrap().split('.').take(2).collect();
    let row = platform.iter().find(|row| row[0] == "Kubernetes").unwrap();
    assert_eq!(row[2], minor.join("."), "the tested version");
    let client = text("src/mcp/mod.rs");
    let revisions: Vec<String> = client
        .split("ProtocolVersion::V_")
        .skip(1)
        .map(|rest| rest[..10].replace('_', "-"))
        .collect();
    let tools = table_rows(&page.section("## Tool servers (MCP)"));
    for revision in &revisions {
        assert!(
            cell(&tools, "revisions of the protocol").contains(revision),
            "{revision}"
        );
    }
    assert!(!revisions.is_empty());
}

#[test]
fn every_wire_format_of_models_is_listed() {
    let page = Page::read("docs/reference/support-matrix.md");
    let rows = table_rows(&page.section("## Model servers"));
    let mut listed: Vec<&str> = rows.iter().flat_map(|row| code_spans(&row[0])).collect();
    let mut known = Vec::new();
    Schema::of_agents().walk(&mut |path, schema| {
        if path == "spec.model.api" {
            let values = schema["enum"].as_array().unwrap();
            known.extend(values.iter().map(|value| value.as_str().unwrap().to_owned()));
        }
        true
    });
    listed.sort_unstable();
    known.sort();
    assert_eq!(listed, known);
}
