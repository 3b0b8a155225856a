//! Tests of what the queries of panels and annotations mean: rules that all of them follow, and their values for given series.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;

use pretty_assertions::assert_eq;
use regex::{Captures, Regex};

use super::query::metrics_in;
use super::*;
use crate::telemetry::registry::{Metric, MetricSource};

/// What a panel or an annotation asks, with the place to name in a failure.
fn queries() -> Vec<(String, String)> {
    let mut queries = Vec::new();
    for (file, board) in all() {
        for panel in list(&board["panels"]) {
            for target in list(&panel["targets"]) {
                queries.push((format!("{file}: {}", panel["title"]), text(&target["expr"])));
            }
        }
        for annotation in list(&board["annotations"]["list"]) {
            queries.push((format!("{file}: {}", annotation["name"]), text(&annotation["expr"])));
        }
    }
    queries
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

fn is_of_leader(metric: &Metric) -> bool {
    !matches!(metric.source, MetricSource::Controller | MetricSource::Process)
}

/// Otherwise there are two of it around a change of the leader, and a former leader's remains.
#[test]
fn every_selector_of_what_the_leader_exports_is_aggregated() {
    let selector = Regex::new(r"\w+\{[^}]*\}").unwrap();
    let function = Regex::new(r"\b(?:rate|increase|max_over_time|last_over_time)\($").unwrap();
    let aggregation = Regex::new(r"\b(?:sum|max|count)(?: by \([^)]*\))? ?\($").unwrap();
    for (place, query) in queries() {
        for found in selector.find_iter(&query) {
            if metrics_in(found.as_str())
                .into_iter()
                .all(|metric| !is_of_leader(metric))
            {
                continue;
            }
            let before = &query[..found.start()];
            let before = function.replace(before, "");
            // The difference of a counter is one of each replica's series.
            let is_difference = query.contains(&format!("{0} - {0} offset", found.as_str()));
            assert!(aggregation.is_match(&before) || is_difference, "{place}: {query}");
        }
    }
}

/// Each leader exports the same totals: the growth of a replica's series contains what another leader has counted in between.
#[test]
fn totals_of_objects_are_aggregated_before_their_growth_is_taken() {
    let growth = Regex::new(r"\b(?:rate|increase)\(\w+\{").unwrap();
    let of_ledger = ["agentloop_budget_leases_total", "agentloop_budget_ledger_writes_total"];
    for (place, query) in queries() {
        for found in growth.find_iter(&query) {
            let metric = metrics_in(found.as_str())[0];
            let is_of_object = matches!(metric.source, MetricSource::Agents | MetricSource::Sensors);
            assert!(!is_of_object && !of_ledger.contains(&metric.name), "{place}: {query}");
        }
    }
}

/// What the values of a query of a panel over time are: in which unit, and per which time.
fn dimension(query: &str) -> String {
    if query.starts_with("histogram_quantile") {
        return "seconds".into();
    }
    if query.contains(" / ") {
        return "quotient".into();
    }
    let name = metrics_in(query)[0].name;
    let name = name.strip_suffix("_total").unwrap_or(name);
    let is_count = query.contains(&format!("{name}_count{{"));
    let mut units = ["seconds", "bytes", "usd"].into_iter();
    let unit = units.find(|unit| !is_count && name.ends_with(&format!("_{unit}")));
    let per = match query.rsplit_once(" * ") {
        _ if !query.contains("rate(") => "",
        Some((_, "60")) => " per minute",
        Some((_, "3600")) => " per hour",
        _ => " per second",
    };
    format!("{}{per}", unit.unwrap_or("count"))
}

/// An axis has the unit of the panel, whatever the values of a query are.
#[test]
fn the_lines_of_a_panel_have_one_unit() {
    for (file, board) in all() {
        let panels = list(&board["panels"]).iter();
        for panel in panels.filter(|panel| panel["type"] == "timeseries") {
            let queries = list(&panel["targets"]).iter().map(|target| text(&target["expr"]));
            let dimensions: BTreeSet<_> = queries.map(|query| dimension(&query)).collect();
            assert_eq!(dimensions.len(), 1, "{file}: {}: {dimensions:?}", panel["title"]);
            let unit = panel["fieldConfig"]["defaults"]["unit"].as_str().unwrap();
            let units: &[&str] = match dimensions.first().unwrap().as_str() {
                "count per minute" => &["opm"],
                "seconds" => &["s"],
                "bytes" => &["bytes"],
                "usd" | "usd per hour" => &["currencyUSD"],
                "quotient" => &["percentunit", "s"],
                _ => &["short"],
            };
            assert!(units.contains(&unit), "{file}: {}: {unit}", panel["title"]);
        }
    }
}

/// Otherwise 0 is shown of what is not exported, and while nothing is scraped.
#[test]
fn zero_is_shown_only_where_a_series_of_the_same_level_proves_it() {
    let fallback = Regex::new(r" or (?:label_replace\()?0 \* (?:count|max)(?: by \([^)]*\))? ?\(").unwrap();
    for (place, query) in queries() {
        assert!(!query.contains("vector("), "{place}: {query}");
        for found in fallback.find_iter(&query) {
            let of = *metrics_in(&query[..found.start()]).last().unwrap();
            let proof = metrics_in(&query[found.end()..])[0];
            assert_eq!(
                (proof.source, proof.is_minimal()),
                (of.source, of.is_minimal()),
                "{place}: {query}"
            );
        }
    }
}

/// A range query with the last value shows what was the case when its series ended.
#[test]
fn what_shows_the_present_asks_for_it() {
    for (file, board) in all() {
        for panel in list(&board["panels"]) {
            let is_present = ["stat", "bargauge", "table"].contains(&panel["type"].as_str().unwrap());
            for target in list(&panel["targets"]) {
                let asks = (target["instant"] == true, target["range"] == false);
                assert_eq!(asks, (is_present, is_present), "{file}: {}", panel["title"]);
            }
        }
    }
}

/// Grafana's data source assumes scrapes every 15 s unless it is configured otherwise, and a rate over four of these has no data
/// at scrapes of a minute.
#[test]
fn rates_have_data_at_scrapes_of_a_minute_whatever_the_data_source_says() {
    for (file, board) in all() {
        for panel in list(&board["panels"]) {
            for target in list(&panel["targets"]) {
                let interval = (target["instant"] != true).then_some("30s");
                assert_eq!(target["interval"].as_str(), interval, "{file}: {}", panel["title"]);
            }
        }
    }
}

#[test]
fn descriptions_name_the_level_that_a_panel_requires() {
    let boards = all();
    let description = |board: &str, title: &str| {
        let file = format!("agentloop-{board}.json");
        let (_, board) = boards.iter().find(|(name, _)| *name == file).unwrap();
        let mut panels = list(&board["panels"]).iter();
        let panel = panels.find(|panel| panel["type"] != "row" && panel["title"] == title);
        text(&panel.unwrap()["description"])
    };
    for (board, title, level) in [
        (
            "agent",
            "Age of the oldest pending approval",
            "`metrics.perObject: Full`.",
        ),
        ("budgets", "Tokens per hour", "`metrics.perObject: Full`."),
        ("budgets", "Tokens", "`metrics.perObject: Full` or `Minimal`."),
        ("fleet", "Pause reasons", "`metrics.perObject: Full` or `Minimal`."),
        (
            "agent",
            "Tokens by type",
            "`metrics.perObject: Full`; a part of it is shown with `Minimal`.",
        ),
    ] {
        let found = description(board, title);
        assert!(found.ends_with(&format!(" Requires {level}")), "{found}");
    }
    for (board, title) in [
        ("fleet", "Paused"),
        ("fleet", "Duration of turns"),
        ("operator", "Reconciles"),
    ] {
        assert!(!description(board, title).contains("perObject"), "{title}");
    }
}

/// A quantile of durations beyond the last bucket is its bound, and looks as if it were measured.
#[test]
fn panels_of_quantiles_name_the_longest_that_they_can_show() {
    for (file, board) in all() {
        for panel in list(&board["panels"]) {
            let queries = list(&panel["targets"]).iter().map(|target| text(&target["expr"]));
            let shows_quantiles = queries.into_iter().any(|query| query.contains("histogram_quantile"));
            let names_bound = panel["description"]
                .as_str()
                .is_some_and(|text| text.contains(", the longest bound of a bucket"));
            assert_eq!(names_bound, shows_quantiles, "{file}: {}", panel["title"]);
        }
    }
}

/// Grafana passes the values of variables to other dashboards by their names, and the namespace of an Agent is not the controller's.
#[test]
fn replicas_are_chosen_by_variables_that_no_other_board_has() {
    let definitions = |name: &str| {
        let boards = all();
        let (_, board) = boards.iter().find(|(file, _)| file.contains(name)).unwrap();
        let variables = list(&board["templating"]["list"]).iter();
        let queries = variables.filter(|variable| variable["type"] == "query");
        queries
            .map(|variable| (text(&variable["name"]), text(&variable["definition"])))
            .collect::<Vec<_>>()
    };
    let build = "label_values(agentloop_build_info";
    let expected = [
        ("controller_namespace", format!("{build}, namespace)")),
        ("job", format!("{build}{{namespace=~\"$controller_namespace\"}}, job)")),
        (
            "instance",
            format!("{build}{{namespace=~\"$controller_namespace\",job=~\"$job\"}}, instance)"),
        ),
    ];
    assert_eq!(
        definitions("operator"),
        expected.map(|(name, query)| (name.to_owned(), query))
    );
    for board in ["fleet", "agent", "budgets", "sensors"] {
        assert_eq!(definitions(board)[0].0, "namespace");
    }
}

/// A variable's value, as Grafana writes several into a query.
fn any_of(values: &BTreeSet<String>) -> String {
    let special = Regex::new(r"[\\$^*{}\[\]'+?.()|]").unwrap();
    let escaped: Vec<_> = values
        .iter()
        .map(|value| special.replace_all(value, r"\\$0").into_owned())
        .collect();
    match &*escaped {
        [one] => one.clone(),
        _ => format!("({})", escaped.join("|")),
    }
}

/// The values of a label of the test's series of a metric.
fn label_values(test: &Value, metric: &str, label: &str) -> BTreeSet<String> {
    let value = Regex::new(&format!("[{{,]{label}=\"([^\"]*)\"")).unwrap();
    let series = list(&test["input_series"]).iter().map(|series| text(&series["series"]));
    series
        .filter(|series| series.starts_with(&format!("{metric}{{")))
        .filter_map(|series| Some(value.captures(&series)?[1].to_owned()))
        .collect()
}

/// The values of the variables of a board, all at *All*, with a step of two minutes, and a data source of which Grafana believes that
/// it scrapes every 15 s.
fn variables(board: &Value, test: &Value) -> BTreeMap<String, String> {
    let durations = [("__interval", "2m"), ("__rate_interval", "135s"), ("__range", "1h")];
    let mut values: BTreeMap<String, String> = durations.map(|(name, value)| (name.into(), value.into())).into();
    let query = Regex::new(r"^label_values\((\w+)(?:\{.*\})?, (\w+)\)$").unwrap();
    let variables = list(&board["templating"]["list"]).iter();
    for variable in variables.filter(|variable| variable["type"] == "query") {
        let definition = text(&variable["definition"]);
        let parts = query.captures(&definition).unwrap();
        let found = any_of(&label_values(test, &parts[1], &parts[2]));
        let value = variable["allValue"].as_str().map_or(found, ToOwned::to_owned);
        values.insert(text(&variable["name"]), value);
    }
    for (name, value) in test["values"].as_object().into_iter().flatten() {
        values.insert(name.clone(), text(value));
    }
    values
}

/// The board of `board/title`, and the expression of its panel or annotation of this title.
fn expression(boards: &[(String, Value)], asked: &Value) -> (Value, String) {
    let is_panel = asked["panel"].is_string();
    let place = text(&asked[if is_panel { "panel" } else { "annotation" }]);
    let (name, title) = place.split_once('/').unwrap();
    let file = format!("agentloop-{name}.json");
    let (_, board) = boards.iter().find(|(known, _)| *known == file).unwrap();
    let expr = if is_panel {
        let mut row = String::new();
        let panel = list(&board["panels"]).iter().find(|panel| {
            if panel["type"] == "row" {
                row = text(&panel["title"]);
            }
            panel["type"] != "row" && panel["title"] == title && asked["row"].as_str().is_none_or(|asked| asked == row)
        });
        let targets = list(&panel.unwrap_or_else(|| panic!("{place}"))["targets"]);
        let id = asked["query"].as_str().unwrap_or("A");
        let target = targets.iter().find(|target| target["refId"] == id).unwrap();
        text(&target["expr"])
    } else {
        let mut annotations = list(&board["annotations"]["list"]).iter();
        let annotation = annotations.find(|annotation| annotation["name"] == title);
        text(&annotation.unwrap_or_else(|| panic!("{place}"))["expr"])
    };
    (board.clone(), expr)
}

/// A file of tests for promtool, in which queries have taken the place of the names of panels and annotations.
fn for_promtool(mut file: Value) -> Value {
    let (boards, variable) = (all(), Regex::new(r"\$(\w+)").unwrap());
    for test in file["tests"].as_array_mut().unwrap() {
        let input = test.clone();
        for asked in test["promql_expr_test"].as_array_mut().unwrap() {
            let (board, expr) = expression(&boards, asked);
            let values = variables(&board, &input);
            let expr = variable.replace_all(&expr, |found: &Captures<'_>| values[&found[1]].clone());
            let asked = asked.as_object_mut().unwrap();
            asked.retain(|name, _| ["eval_time", "exp_samples"].contains(&name.as_str()));
            asked.insert("expr".into(), expr.into());
        }
        test.as_object_mut().unwrap().remove("values");
    }
    file
}

/// Says loudly that there is no promtool; fails where nothing may be skipped.
fn has_promtool() -> bool {
    let found = Command::new("promtool").arg("--version").output().is_ok();
    let why = "there is no promtool; hack/packages.sh installs it";
    let may_skip = std::env::var_os("AGENTLOOP_REQUIRE_CLUSTERS").is_none();
    assert!(found || may_skip, "{why}");
    if !found {
        eprintln!("SKIPPED: {why}");
    }
    found
}

/// The files describe what Prometheus has; promtool evaluates what Grafana would ask.
#[test]
fn panels_and_annotations_show_what_the_series_say() {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/dashboards"));
    if !has_promtool() {
        return;
    }
    let copies = tempfile::tempdir().unwrap();
    let mut command = Command::new("promtool");
    command.args(["test", "rules"]);
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let file: Value = serde_yaml::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let copy = copies.path().join(path.file_name().unwrap());
        std::fs::write(&copy, for_promtool(file).to_string()).unwrap();
        command.arg(copy);
    }
    let ended = command.output().unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
}
