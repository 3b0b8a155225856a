//! The pages about security: tests that they name exist, threats are those of the list that they map, and ports are those
//! of the code and the chart.

use std::collections::BTreeSet;

use agentloop::link::pod::WEBHOOK_PORT;

use super::page::{Page, code_spans, table_rows};
use crate::chart::render::render;
use crate::schema::reader::repository;

/// OWASP Top 10 for Agentic Applications, version 2026.
const AGENTIC_THREATS: [&str; 10] = [
    "ASI01: Agent Goal Hijack",
    "ASI02: Tool Misuse and Exploitation",
    "ASI03: Identity and Privilege Abuse",
    "ASI04: Agentic Supply Chain Vulnerabilities",
    "ASI05: Unexpected Code Execution (RCE)",
    "ASI06: Memory & Context Poisoning",
    "ASI07: Insecure Inter-Agent Communication",
    "ASI08: Cascading Failures",
    "ASI09: Human-Agent Trust Exploitation",
    "ASI10: Rogue Agents",
];

/// Risks that a loop has because it runs for long.
const LOOP_RISKS: [&str; 6] = [
    "token consumption",
    "runaway agent",
    "growth of the hot state",
    "failures of Sensors",
    "context pressure",
    "two modes at once",
];

/// Names of all functions in the sources and the tests.
fn functions() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for folder in ["src", "tests"] {
        collect(folder, &mut names);
    }
    names
}

fn collect(folder: &str, names: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(repository(folder)).unwrap() {
        let entry = entry.unwrap();
        let path = format!("{folder}/{}", entry.file_name().to_str().unwrap());
        if entry.path().is_dir() {
            collect(&path, names);
        } else if path.strip_suffix(".rs").is_some() {
            let text = std::fs::read_to_string(entry.path()).unwrap();
            let after_fn = text.lines().filter_map(|line| line.split("fn ").nth(1));
            names.extend(after_fn.filter_map(|rest| Some(rest.split_once(['(', '<'])?.0.to_owned())));
        }
    }
}

fn assert_exist(tests: &[&str], functions: &BTreeSet<String>, row: &str) {
    for test in tests {
        assert!(functions.contains(*test), "«{row}»: no test {test}");
    }
}

#[test]
fn every_test_that_the_table_of_threats_names_exists() {
    let page = Page::read("docs/security/threats.md");
    let functions = functions();
    let rows = table_rows(&page.section("## Threats"));
    assert!(rows.len() > 25, "only {} threats", rows.len());
    let mut count = 0;
    for row in &rows {
        assert_eq!(row.len(), 6, "{row:?}");
        assert!(row.iter().all(|cell| !cell.is_empty()), "an empty cell: {row:?}");
        let tests: Vec<&str> = code_spans(&row[4]).collect();
        // A threat that agentloop does not answer says so.
        assert!(!tests.is_empty() || row[4] == "none", "no test: {row:?}");
        count += tests.len();
        assert_exist(&tests, &functions, &row[0]);
    }
    assert!(count > 40, "only {count} tests");
}

#[test]
fn every_risk_of_a_loop_names_tests_that_exist() {
    let page = Page::read("docs/security/threats.md");
    let functions = functions();
    let rows = table_rows(&page.section("## Risks of a loop that runs for long"));
    let risks: Vec<&str> = rows.iter().map(|row| row[0].as_str()).collect();
    assert_eq!(risks, LOOP_RISKS);
    for row in &rows {
        let tests: Vec<&str> = code_spans(&row[2]).collect();
        assert!(!tests.is_empty(), "no test: {row:?}");
        assert_exist(&tests, &functions, &row[0]);
    }
}

#[test]
fn every_agentic_threat_of_owasp_is_mapped_by_its_name_and_to_threats_of_the_table() {
    let page = Page::read("docs/security/threats.md");
    let rows = table_rows(&page.section("## OWASP Top 10 for Agentic Applications"));
    let names: Vec<&str> = rows.iter().map(|row| row[0].as_str()).collect();
    assert_eq!(names, AGENTIC_THREATS);
    let threats = table_rows(&page.section("## Threats"));
    let ids: BTreeSet<&str> = threats.iter().map(|row| row[0].as_str()).collect();
    assert_eq!(ids.len(), threats.len(), "ids of threats are unique");
    let mut mapped = BTreeSet::new();
    for row in &rows {
        let rows_named: Vec<&str> = row[1].split(", ").collect();
        let unknown: Vec<_> = rows_named.iter().filter(|id| !ids.contains(**id)).collect();
        assert!(unknown.is_empty(), "{}: {unknown:?}", row[0]);
        mapped.extend(rows_named);
    }
    for row in &threats {
        let is_mapped = mapped.contains(row[0].as_str());
        assert!(
            is_mapped || row[0].starts_with('P'),
            "{} is in no row of OWASP's list",
            row[0]
        );
    }
}

#[test]
fn the_ports_are_those_of_the_chart_and_of_the_code() {
    let page = Page::read("docs/security/network.md");
    let rows = table_rows(&page.section("## Ports"));
    let port = |name: &str| {
        let wanted = format!("`{name}`");
        let row = rows
            .iter()
            .find(|row| row[0].ends_with(&wanted))
            .unwrap_or_else(|| panic!("no port {name}"));
        row[1].clone()
    };
    assert_eq!(port("webhook"), WEBHOOK_PORT.to_string());
    let Some(rendered) = render(&["page.enabled=true"]) else {
        return;
    };
    let objects = rendered.unwrap();
    let controller = &objects.one("Deployment", "agentloop")["spec"]["template"]["spec"]["containers"][0];
    let ports = controller["ports"].as_array().unwrap();
    for declared in ports {
        assert_eq!(
            port(declared["name"].as_str().unwrap()),
            declared["containerPort"].to_string()
        );
    }
    let of_controller = rows.iter().filter(|row| row[0].starts_with("controller"));
    assert_eq!(of_controller.count(), ports.len());
}
