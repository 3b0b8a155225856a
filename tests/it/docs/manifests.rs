//! YAML in pages: manifests and parts of manifests are what the API server takes, values are those of the chart.

use agentloop::provider::scripted::ModelScript;
use serde::Deserialize;
use serde_json::{Value, json};

use super::page::{Block, current_pages};
use crate::schema::reader::{Schema, repository};

const GROUP: &str = "agentloop.dev/v1alpha1";

fn documents(block: &Block) -> Vec<Value> {
    let documents = serde_yaml::Deserializer::from_str(&block.text);
    let read = |document| Value::deserialize(document).unwrap_or_else(|error| panic!("{}: {error}", block.place));
    documents.map(read).filter(|document| !document.is_null()).collect()
}

/// Merges `change` into `base`.
fn merge(base: &mut Value, change: &Value) {
    match (base, change) {
        (Value::Object(base), Value::Object(change)) => {
            for (key, value) in change {
                merge(base.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (base, change) => *base = change.clone(),
    }
}

/// Objects into which the part of a manifest may fit. What a page leaves out is not checked, so each part needs only one.
fn bases() -> Vec<Value> {
    let model = json!({"api": "OpenAIChat", "name": "m", "baseURL": "https://api.example.com/v1"});
    let object = |kind: &str, spec: Value| json!({"apiVersion": GROUP, "kind": kind, "metadata": {"name": "x", "namespace": "n"}, "spec": spec});
    let claude = json!({"api": "AnthropicMessages", "name": "m", "baseURL": "https://api.example.com"});
    let mut bases = Vec::new();
    for extra in [
        json!({}),
        json!({"model": claude}),
        json!({"lightModel": model}),
        json!({"hotState": {"fields": {"healthy": {"type": "Boolean"}}}}),
        json!({"workspace": {}}),
        json!({"mode": "Goal", "goal": {"description": "d", "acceptanceCriteria": [{"name": "a", "regex": "b"}]}}),
        json!({"mode": "Task", "task": {}}),
    ] {
        let mut agent = object("Agent", json!({"instructions": "i", "model": model}));
        merge(&mut agent["spec"], &extra);
        bases.push(agent);
    }
    for source in [
        json!({}),
        json!({"schedule": {"cron": "0 8 * * 1-5"}}),
        json!({"poll": {"http": {"url": "https://example.com/"}}}),
        json!({"stream": {"sse": {"url": "https://example.com/"}}}),
    ] {
        bases.push(object("Sensor", json!({"agentNames": ["a"], "source": source})));
    }
    let window = json!({"rolling": {"seconds": 3600}});
    for spec in [
        json!({"limits": {"tokens": 1}, "window": window}),
        json!({"limits": {"tokens": 1}}),
    ] {
        bases.push(object("AgentBudget", spec));
    }
    bases
}

fn problems(object: &Value) -> Vec<String> {
    let schema = Schema::of_kind(object["kind"].as_str().unwrap());
    let mut problems = schema.unknown_fields(object);
    problems.extend(schema.problems(object, None));
    problems
}

/// Places in a manifest where the parts begin that pages show.
const PLACES: [&str; 4] = ["", "/spec", "/spec/tools", "/spec/source/poll/http"];

/// A part of a manifest: which object it is a part of, and where it begins, follows from what it has.
fn assert_fits(place: &str, part: &Value) {
    let wrapped = |path: &&str| {
        let names = path.rsplit('/').filter(|name| !name.is_empty());
        names.fold(part.clone(), |value, name| json!({ name: value }))
    };
    let attempts = PLACES.iter().map(wrapped).flat_map(|part| {
        bases().into_iter().map(move |mut base| {
            merge(&mut base, &part);
            problems(&base)
        })
    });
    let fewest = attempts.min_by_key(Vec::len).unwrap();
    assert!(fewest.is_empty(), "{place}: fits no kind: {fewest:?}");
}

/// Keys that are not in the chart's values.yaml.
fn values_unknown(values: &Value) -> Vec<String> {
    let text = std::fs::read_to_string(repository("charts/agentloop/values.yaml")).unwrap();
    let known: Value = serde_yaml::from_str(&text).unwrap();
    unknown_values("", values, &known)
}

/// Keys that are not in the chart's values. Below an empty map, such as `prices`, any key is allowed.
pub(super) fn unknown_values(path: &str, values: &Value, known: &Value) -> Vec<String> {
    let (Value::Object(values), Value::Object(known)) = (values, known) else {
        return Vec::new();
    };
    if known.is_empty() {
        return Vec::new();
    }
    let below = |(key, value): (&String, &Value)| {
        let path = if path.is_empty() {
            key.clone()
        } else {
            format!("{path}.{key}")
        };
        match known.get(key) {
            Some(known) => unknown_values(&path, value, known),
            None => vec![path],
        }
    };
    values.iter().flat_map(below).collect()
}

fn assert_script(place: &str, text: &str) {
    ModelScript::parse(text).unwrap_or_else(|error| panic!("{place}: no script: {error}"));
}

fn check(block: &Block, document: &Value) -> Kind {
    let place = &block.place;
    match (document["apiVersion"].as_str(), document["kind"].as_str()) {
        // A manifest that leaves something out says so.
        (Some(GROUP), Some(_)) if block.text.lines().any(|line| line.trim() == "# ...") => {
            assert_fits(place, document);
            Kind::Part
        }
        (Some(GROUP), Some(_)) => {
            let found = problems(document);
            assert!(found.is_empty(), "{place}: {found:?}");
            Kind::Manifest
        }
        (Some(_), Some(kind)) => {
            if kind == "ConfigMap" {
                let texts = document["data"].as_object().into_iter().flatten();
                let scripts = texts
                    .filter_map(|(_, text)| text.as_str())
                    .filter(|text| text.starts_with("turns:"));
                scripts.for_each(|text| assert_script(place, text));
            }
            if kind == "HelmRelease" {
                let unknown = values_unknown(&document["spec"]["values"]);
                assert!(unknown.is_empty(), "{place}: not in values.yaml: {unknown:?}");
            }
            Kind::Other
        }
        _ if document["turns"].is_array() => {
            assert_script(place, &block.text);
            Kind::Other
        }
        _ if values_unknown(document).is_empty() => Kind::Values,
        _ if document["rules"][0]["apiGroups"].is_array() => Kind::Other,
        _ => {
            assert_fits(place, document);
            Kind::Part
        }
    }
}

/// An object of ours that a page has as a whole.
pub(crate) struct PageManifest {
    /// `path:line` of its block.
    pub(crate) place: String,
    pub(crate) object: Value,
}

/// The complete manifests of our kinds in all pages that describe the product as it is.
pub(crate) fn page_manifests() -> Vec<PageManifest> {
    let mut found = Vec::new();
    for block in yaml_blocks() {
        for object in documents(&block) {
            if check(&block, &object) == Kind::Manifest {
                let place = block.place.clone();
                found.push(PageManifest { place, object });
            }
        }
    }
    found
}

fn yaml_blocks() -> Vec<Block> {
    let blocks = current_pages().into_iter().flat_map(|page| page.blocks());
    blocks
        .filter(|block| !block.is_unchecked && block.language.as_deref() == Some("yaml"))
        .collect()
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Manifest,
    Part,
    Values,
    Other,
}

#[test]
fn every_yaml_block_is_a_valid_manifest_or_values_of_the_chart() {
    let mut kinds = Vec::new();
    for block in yaml_blocks() {
        for document in documents(&block) {
            kinds.push(check(&block, &document));
        }
    }
    for (kind, least) in [(Kind::Manifest, 5), (Kind::Part, 15), (Kind::Values, 2)] {
        let count = kinds.iter().filter(|other| **other == kind).count();
        assert!(count >= least, "only {count} blocks of one kind were found");
    }
}

#[test]
fn a_misspelt_field_and_a_misspelt_value_are_found() {
    let part = json!({"spec": {"guardrails": {"maxCallPerTurn": 3}}});
    assert!(std::panic::catch_unwind(|| assert_fits("p", &part)).is_err());
    let known = json!({"policy": {"requireBudget": false}, "prices": {}});
    let values = json!({"policy": {"requireBudgets": true}, "prices": {"m": {"x": "1"}}});
    assert_eq!(unknown_values("", &values, &known), ["policy.requireBudgets"]);
}
