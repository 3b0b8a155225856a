//! Tests of the generated dashboards.

use std::collections::BTreeSet;

use pretty_assertions::assert_eq;

use super::*;
use crate::telemetry::registry;

fn targets(board: &Value) -> Vec<&str> {
    let panels = board["panels"].as_array().unwrap();
    let targets = panels
        .iter()
        .flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    targets
        .map(|panel_query| panel_query["expr"].as_str().unwrap())
        .collect()
}

#[test]
fn every_metric_of_the_registry_is_on_a_board() {
    let boards = all();
    let queries: Vec<&str> = boards.iter().flat_map(|(_, board)| targets(board)).collect();
    let missing: Vec<&str> = registry::ALL
        .iter()
        .map(|metric| metric.name)
        .filter(|name| !queries.iter().any(|query| query.contains(name)))
        .collect();
    assert_eq!(missing, [""; 0]);
}

#[test]
fn panels_of_a_board_do_not_overlap_and_have_titles_of_their_own() {
    for (file, board) in all() {
        let (mut cells, mut titles, mut ids) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        let mut row = String::new();
        for panel in board["panels"].as_array().unwrap() {
            let place = |name: &str| panel["gridPos"][name].as_u64().unwrap();
            let title = panel["title"].as_str().unwrap();
            if panel["type"] == "row" {
                row = title.to_owned();
            } else {
                assert!(titles.insert((row.clone(), title)), "{file}: {title}");
            }
            assert!(ids.insert(panel["id"].as_u64().unwrap()), "{file}: {title}");
            assert!(place("x") + place("w") <= 24, "{file}: {title}");
            for x in place("x")..place("x") + place("w") {
                for y in place("y")..place("y") + place("h") {
                    assert!(cells.insert((x, y)), "{file}: {title} covers another panel");
                }
            }
        }
    }
}

#[test]
fn every_panel_has_a_description_a_unit_and_targets() {
    for (file, board) in all() {
        for panel in board["panels"].as_array().unwrap() {
            if panel["type"] == "row" {
                continue;
            }
            let title = &panel["title"];
            let description = panel["description"].as_str().unwrap();
            assert!(description.ends_with('.'), "{file}: {title}");
            assert!(panel["fieldConfig"]["defaults"]["unit"].is_string(), "{file}: {title}");
            assert!(!panel["targets"].as_array().unwrap().is_empty(), "{file}: {title}");
        }
    }
}

/// Panels of all dashboards of a type, with the names of their files.
fn panels_of(kind: &str) -> Vec<(String, Value)> {
    let panels = all().into_iter().flat_map(|(file, board)| {
        let panels = board["panels"].as_array().unwrap().clone();
        panels.into_iter().map(move |panel| (file.clone(), panel))
    });
    panels.filter(|(_, panel)| panel["type"] == kind).collect()
}

/// Grafana's own thresholds turn red at 80, which a count of turns soon is.
#[test]
fn a_number_is_red_or_green_by_thresholds_of_its_own_only() {
    for (file, panel) in panels_of("stat") {
        let (title, defaults) = (&panel["title"], &panel["fieldConfig"]["defaults"]);
        let own = defaults["color"]["mode"] == "thresholds" && defaults["thresholds"].is_object();
        assert!(own || defaults["color"]["mode"] == "fixed", "{file}: {title}");
    }
}

/// A query without `by` also has columns for the labels of the scrape, such as `pod` and `endpoint`.
#[test]
fn columns_of_tables_are_labels_that_the_board_names() {
    for (file, panel) in panels_of("table") {
        for panel_query in panel["targets"].as_array().unwrap() {
            let expr = panel_query["expr"].as_str().unwrap();
            let named = ["sum by (", "max by ("].iter().any(|start| expr.starts_with(start));
            assert!(named, "{file}: {}: {expr}", panel["title"]);
        }
    }
}

/// A type that hack/dashboards/shot cannot draw would be missed only when the pictures are made.
#[test]
fn the_page_of_the_pictures_has_every_type_of_panel() {
    let page = include_str!("../../../hack/dashboards/shot/src/panels.jsx");
    let drawings = page
        .lines()
        .find(|line| line.starts_with("export const DRAWINGS"))
        .unwrap();
    for (file, board) in all() {
        for panel in board["panels"].as_array().unwrap() {
            let kind = panel["type"].as_str().unwrap();
            let drawn = [format!(" {kind}:"), format!("'{kind}':")];
            let known = kind == "row" || drawn.iter().any(|name| drawings.contains(name));
            assert!(
                known,
                "{file}: {kind} has no drawing in hack/dashboards/shot/src/panels.jsx"
            );
        }
    }
}

#[test]
fn uids_and_files_are_stable() {
    let names: Vec<(String, String)> = all()
        .into_iter()
        .map(|(file, board)| (file, board["uid"].as_str().unwrap().to_owned()))
        .collect();
    let expected = ["fleet", "agent", "budgets", "sensors", "operator"]
        .map(|name| (format!("agentloop-{name}.json"), format!("agentloop-{name}")));
    assert_eq!(names, expected);
}
