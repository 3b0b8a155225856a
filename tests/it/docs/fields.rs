//! Names in the text of pages: fields of resources, values of the chart, and metrics.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use agentloop::telemetry::registry;
use serde_json::Value;

use super::page::{code_spans, current_pages};
use crate::schema::reader::{Schema, repository};
use crate::schema::shape::EMBEDDED;

/// Names that begin as metrics do and are tables of the history in Postgres.
const TABLES: [&str; 2] = ["agentloop_history_positions", "agentloop_migrations"];
/// Values of the chart with these first keys are not confused with anything else.
const CHART_KEYS: [&str; 11] = [
    "approvals",
    "crds",
    "dashboards",
    "egress",
    "history",
    "metrics",
    "networkPolicy",
    "podDisruptionBudget",
    "policy",
    "rbac",
    "serviceAccount",
];

/// Fields of objects of Kubernetes.
const OF_OTHERS: [&str; 3] = [
    "spec.resources.requests.storage",
    "spec.holderIdentity",
    "spec.renewTime",
];

/// Every field of every kind, without `[]` and `.*`; the flag says that any name may follow.
static FIELDS: LazyLock<Vec<BTreeMap<String, bool>>> = LazyLock::new(|| Schema::all().map(fields).into());

fn fields(schema: &Schema) -> BTreeMap<String, bool> {
    let mut fields = BTreeMap::new();
    schema.walk(&mut |path, schema| {
        let is_open = schema["additionalProperties"].is_object() || EMBEDDED.contains(&path);
        fields.insert(plain(&path.replace(".*", "")), is_open);
        true
    });
    fields
}

/// `a[].b` as `a.b`.
fn plain(path: &str) -> String {
    let names = path.split('.').map(|part| part.split('[').next().unwrap_or(part));
    names.collect::<Vec<_>>().join(".")
}

/// Whether these are the fields of a kind that has a field at this path, such as `spec.tools.servers[].url`.
fn contains(fields: &BTreeMap<String, bool>, path: &str) -> bool {
    let path = plain(path);
    let mut above = path.as_str();
    while let Some((parent, _)) = above.rsplit_once('.') {
        if fields.get(parent).is_some_and(|is_open| *is_open) {
            return true;
        }
        above = parent;
    }
    path.is_empty() || fields.contains_key(&path)
}

/// Whether the schema of a kind has a field at this path.
pub(super) fn has(schema: &Schema, path: &str) -> bool {
    let at = Schema::all().iter().position(|other| std::ptr::eq(*other, schema));
    at.is_some_and(|at| contains(&FIELDS[at], path))
}

#[test]
fn every_field_that_a_page_names_is_in_a_schema() {
    let mut unknown = BTreeSet::new();
    let mut count = 0;
    for page in current_pages() {
        for (line, text) in page.prose() {
            for span in code_spans(text) {
                let path = span.split([':', ' ', '=', '{', '(']).next().unwrap_or_default();
                let is_path = path.starts_with("spec.") || path.starts_with("status.");
                let letters = |letter: char| letter.is_ascii_alphanumeric() || ".[]".contains(letter);
                if !is_path || !path.chars().all(letters) || path.ends_with('.') {
                    continue;
                }
                count += 1;
                if !OF_OTHERS.contains(&path) && !Schema::all().iter().any(|schema| has(schema, path)) {
                    unknown.insert(format!("{}:{line}: {path}", page.path));
                }
            }
        }
    }
    assert!(unknown.is_empty(), "{unknown:#?}");
    assert!(count > 200, "only {count} fields were found");
}

#[test]
fn every_value_of_the_chart_that_a_page_names_exists() {
    let text = std::fs::read_to_string(repository("charts/agentloop/values.yaml")).unwrap();
    let known: Value = serde_yaml::from_str(&text).unwrap();
    let mut unknown = BTreeSet::new();
    let mut count = 0;
    for page in current_pages() {
        for (line, text) in page.prose() {
            for span in code_spans(text) {
                let path = span.split([':', ' ', '=']).next().unwrap_or_default();
                let mut parts = path.split('.');
                let is_value = parts.next().is_some_and(|first| CHART_KEYS.contains(&first)) && path.contains('.');
                let letters = |letter: char| letter.is_ascii_alphanumeric() || letter == '.';
                if !is_value || !path.chars().all(letters) || parts.next_back() == Some("md") {
                    continue;
                }
                count += 1;
                let pointer = format!("/{}", path.replace('.', "/"));
                if known.pointer(&pointer).is_none() {
                    unknown.insert(format!("{}:{line}: {path}", page.path));
                }
            }
        }
    }
    assert!(unknown.is_empty(), "{unknown:#?}");
    assert!(count > 20, "only {count} values were found");
}

#[test]
fn every_metric_that_a_page_names_is_in_the_registry() {
    let known: BTreeSet<&str> = registry::ALL.iter().map(|metric| metric.name).collect();
    let is_known = |name: &str| {
        let base = ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|suffix| name.strip_suffix(suffix));
        known.contains(name) || base.is_some_and(|base| known.contains(base)) || TABLES.contains(&name)
    };
    let mut unknown = BTreeSet::new();
    let mut count = 0;
    for page in current_pages() {
        for (line, text) in (1..).zip(page.text.lines()) {
            let is_part =
                |letter: char| letter.is_ascii_lowercase() || "_:".contains(letter) || letter.is_ascii_digit();
            let words = text
                .split(|letter| !is_part(letter))
                .map(|word| word.trim_end_matches(':'));
            // A word with a colon is a recorded series.
            let names = words.filter(|word| word.starts_with("agentloop_") && !word.contains(':'));
            for name in names {
                // A name with another ending, such as in `agentloop_agent_*`, is a prefix of some.
                let is_prefix = name.ends_with('_') && known.iter().any(|metric| metric.starts_with(name));
                count += 1;
                if !is_prefix && !is_known(name) {
                    unknown.insert(format!("{}:{line}: {name}", page.path));
                }
            }
        }
    }
    assert!(unknown.is_empty(), "{unknown:#?}");
    assert!(count > 20, "only {count} metrics were found");
}

#[test]
fn unknown_fields_are_found() {
    let agents = Schema::of_agents();
    for path in [
        "spec.tools.servers[].url",
        "spec.guardrails",
        "spec.pod.tolerations[].key",
    ] {
        assert!(has(agents, path), "{path}");
    }
    for path in ["spec.guardrail", "spec.tools.servers[].address", "status.loops"] {
        assert!(!has(agents, path), "{path}");
    }
}
