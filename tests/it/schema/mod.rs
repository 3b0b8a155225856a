//! Tests of the schema: what the API server takes, what it refuses, and what it then says.
//!
//! Every rule has a passing and a failing sample in [`samples`]; they run here against a local implementation of CEL,
//! and in [`server`] against a real API server.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod budgets;
mod descriptions;
mod explain;
mod goals;
pub mod reader;
mod samples;
mod sensors;
mod server;
pub mod shape;
mod tool_samples;
mod valid;

use std::collections::BTreeSet;

use agentloop::api::{Agent, AgentBudget, Sensor, crd, reference};
use agentloop::provider::scripted::ModelScript;
use kube::ResourceExt;

use reader::{Schema, documents, repository};

#[test]
fn the_files_in_crds_match_the_code() {
    for definition in crd::all() {
        let path = repository(&format!("crds/{}.yaml", definition.name_any()));
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            text == crd::to_yaml(&definition).unwrap(),
            "{} is out of date: run `make generate`",
            path.display()
        );
    }
}

#[test]
fn the_api_reference_matches_the_code() {
    let page = std::fs::read_to_string(repository("docs/reference/api.md")).unwrap_or_default();
    assert!(
        page == reference::markdown(&crd::all()),
        "docs/reference/api.md is out of date: run `make generate`"
    );
}

#[test]
fn every_rule_accepts_its_valid_samples_and_rejects_its_invalid_ones_with_its_message() {
    for row in samples::rows() {
        let schema = Schema::of_kind(row.passes[0]["kind"].as_str().unwrap());
        for object in &row.passes {
            let verdict = schema.check_rules(object, row.before.as_ref());
            assert!(verdict.is_ok(), "{}: {verdict:?} of {object}", row.says);
        }
        for object in &row.fails {
            let verdict = schema.check_rules(object, row.before.as_ref());
            let errors = verdict.expect_err(&format!("{}: takes {object}", row.says));
            let said = errors.iter().any(|error| error.message.contains(row.says));
            assert!(said, "{}: {errors} of {object}", row.says);
        }
    }
}

#[test]
fn a_run_without_a_cluster_accepts_and_rejects_the_same_samples() {
    for row in samples::rows() {
        let schema = Schema::of_kind(row.passes[0]["kind"].as_str().unwrap());
        for object in &row.passes {
            assert_eq!(
                schema.problems(object, row.before.as_ref()),
                Vec::<String>::new(),
                "{object}"
            );
        }
        for object in &row.fails {
            let problems = schema.problems(object, row.before.as_ref());
            assert!(!problems.is_empty(), "{}: takes {object}", row.says);
        }
    }
}

#[test]
fn every_rule_of_the_schema_has_samples() {
    // A type that several fields share brings its rule to each of them: one row has the samples of all.
    let rules: BTreeSet<String> = Schema::all().iter().flat_map(|schema| schema.rules()).collect();
    let rows = samples::rows();
    for rule in &rules {
        let named = rows.iter().filter(|row| rule.contains(row.says)).count();
        assert_eq!(named, 1, "rows with samples for the rule «{rule}»");
    }
    assert_eq!(rows.len(), rules.len(), "each row belongs to one rule");
    for row in &rows {
        assert!(
            !row.passes.is_empty() && !row.fails.is_empty(),
            "{} has no sample",
            row.says
        );
    }
}

#[test]
fn every_example_has_only_known_fields_keeps_all_rules_and_a_script_that_can_be_read() {
    let mut agents = 0;
    for (path, document) in documents("examples") {
        match document["kind"].as_str() {
            Some("AgentBudget") => {
                let schema = Schema::of_budgets();
                assert_eq!(schema.unknown_fields(&document), Vec::<String>::new(), "{path}");
                serde_json::from_value::<AgentBudget>(document.clone())
                    .unwrap_or_else(|error| panic!("{path}: {error}"));
                let verdict = schema.check_rules(&document, None);
                assert!(verdict.is_ok(), "{path}: {verdict:?}");
            }
            Some("Sensor") => {
                let schema = Schema::of_sensors();
                assert_eq!(schema.unknown_fields(&document), Vec::<String>::new(), "{path}");
                serde_json::from_value::<Sensor>(document.clone()).unwrap_or_else(|error| panic!("{path}: {error}"));
                let verdict = schema.check_rules(&document, None);
                assert!(verdict.is_ok(), "{path}: {verdict:?}");
            }
            Some("Agent") => {
                agents += 1;
                let schema = Schema::of_agents();
                assert_eq!(schema.unknown_fields(&document), Vec::<String>::new(), "{path}");
                serde_json::from_value::<Agent>(document.clone()).unwrap_or_else(|error| panic!("{path}: {error}"));
                let verdict = schema.check_rules(&document, None);
                assert!(verdict.is_ok(), "{path}: {verdict:?}");
            }
            Some("ConfigMap") => {
                for text in document["data"]
                    .as_object()
                    .into_iter()
                    .flatten()
                    .filter_map(|(_, text)| text.as_str())
                {
                    ModelScript::parse(text).unwrap_or_else(|error| panic!("{path}: {error}"));
                }
            }
            other => assert!(matches!(other, Some("Secret" | "Namespace")), "{path}: {other:?}"),
        }
    }
    assert!(agents >= 2, "examples/ has {agents} Agents");
}

#[test]
fn a_misspelt_field_is_found() {
    let mut agent = samples::scripted();
    agent["spec"]["guardrails"] = serde_json::json!({"maxCallPerTurn": 3});
    assert_eq!(
        Schema::of_agents().unknown_fields(&agent),
        ["spec.guardrails.maxCallPerTurn"]
    );
}
