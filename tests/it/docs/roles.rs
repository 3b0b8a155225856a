//! The page about roles has every rule of every role that the chart renders, with a reason, and no other.

use std::collections::BTreeMap;

use serde_json::Value;

use super::page::{Page, code_spans, table_rows};
use crate::chart::render::{Rendered, render};

const PAGE: &str = "docs/security/rbac.md";

/// «group resource name» → verbs, sorted.
type Rules = BTreeMap<String, Vec<String>>;

fn words(list: &Value) -> Vec<String> {
    list.as_array()
        .into_iter()
        .flatten()
        .map(|word| word.as_str().unwrap().to_owned())
        .collect()
}

fn add(rules: &mut Rules, key: String, verbs: impl IntoIterator<Item = String>) {
    let all = rules.entry(key).or_default();
    all.extend(verbs);
    all.sort();
    all.dedup();
}

/// The rules of one role, one entry for each resource and each name, or for each URL.
fn rendered_rules(role: &Value) -> Rules {
    let mut rules = Rules::new();
    for rule in role["rules"].as_array().unwrap() {
        for url in words(&rule["nonResourceURLs"]) {
            add(&mut rules, format!("URL {url} "), words(&rule["verbs"]));
        }
        let names = match words(&rule["resourceNames"]) {
            none if none.is_empty() => vec![String::new()],
            some => some,
        };
        for group in words(&rule["apiGroups"]) {
            for resource in words(&rule["resources"]) {
                for name in &names {
                    add(&mut rules, format!("{group} {resource} {name}"), words(&rule["verbs"]));
                }
            }
        }
    }
    rules
}

/// The rules in the section of a role: group, resources, names, verbs and the reason.
fn documented_rules(page: &Page, heading: &str) -> Rules {
    let mut rules = Rules::new();
    for row in table_rows(&page.section(heading)) {
        assert!(
            row.len() == 5 && row[4].len() > 20,
            "{heading}: a rule without a reason: {row:?}"
        );
        let cell = |at: usize| code_spans(&row[at]).map(str::to_owned).collect::<Vec<_>>();
        let group = match row[0].as_str() {
            "core" => String::new(),
            "URL" => "URL".to_owned(),
            _ => cell(0).concat(),
        };
        let names = if row[2] == "any" { vec![String::new()] } else { cell(2) };
        assert!(!names.is_empty(), "{heading}: {row:?}");
        for resource in cell(1) {
            for name in &names {
                add(&mut rules, format!("{group} {resource} {name}"), cell(3));
            }
        }
    }
    rules
}

/// With every role that a value adds.
const ALL_ROLES: &str = "metrics.authentication=Token";

fn roles(objects: &Rendered) -> impl Iterator<Item = &Value> {
    let is_role = |object: &&Value| ["Role", "ClusterRole"].contains(&object["kind"].as_str().unwrap());
    objects.0.iter().filter(is_role)
}

#[test]
fn every_rule_of_every_role_has_its_reason_and_no_rule_is_described_that_is_not_there() {
    let Some(rendered) = render(&[ALL_ROLES]) else {
        return;
    };
    let page = Page::read(PAGE);
    let objects = rendered.unwrap();
    for role in roles(&objects) {
        let heading = format!(
            "## {} `{}`",
            role["kind"].as_str().unwrap(),
            role["metadata"]["name"].as_str().unwrap()
        );
        assert_eq!(documented_rules(&page, &heading), rendered_rules(role), "{heading}");
    }
    let described = page
        .text
        .lines()
        .filter(|line| line.starts_with("## Role `") || line.starts_with("## ClusterRole `"));
    assert_eq!(described.count(), roles(&objects).count(), "sections of roles");
}

#[test]
fn with_named_namespaces_no_rule_is_without_a_reason_either() {
    let Some(rendered) = render(&["watchNamespaces={team-a}", ALL_ROLES]) else {
        return;
    };
    let page = Page::read(PAGE);
    let mut described = Rules::new();
    for line in page
        .text
        .lines()
        .filter(|line| line.starts_with("## Role `") || line.starts_with("## ClusterRole `"))
    {
        for (key, verbs) in documented_rules(&page, line) {
            add(&mut described, key, verbs);
        }
    }
    for role in roles(&rendered.unwrap()) {
        for (key, verbs) in rendered_rules(role) {
            let known = described.get(&key).unwrap_or_else(|| panic!("no reason for {key}"));
            assert!(verbs.iter().all(|verb| known.contains(verb)), "{key}: {verbs:?}");
        }
    }
}
