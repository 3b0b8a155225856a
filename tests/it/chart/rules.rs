//! The recording rules and alerts of the chart: what is rendered, what `promtool` says of it, that each rule is tested, and
//! that each alert has its runbook.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use agentloop::telemetry::registry::{self, Metric, MetricKind, MetricSource};
use pretty_assertions::assert_eq;
use regex::Regex;
use serde_json::{Value, json};

use super::render::{render, repository};
use crate::support::clusters::has;

const RULES: &str = "charts/agentloop/files/rules.yaml";
const RUNBOOKS: &str = "docs/runbooks";
/// Labels that a scrape adds.
const TARGET_LABELS: [&str; 3] = ["job", "instance", "pod"];
/// Matchers of the rules that the chart replaces by those of its release.
const ANY_TARGET: &str = r#"job=~".+""#;

fn read_yaml(path: impl AsRef<Path>) -> Value {
    let text = std::fs::read_to_string(repository(&path.as_ref().to_string_lossy())).unwrap();
    serde_yaml::from_str(&text).unwrap()
}

/// All rules, in order.
fn rules() -> Vec<Value> {
    let file = read_yaml(RULES);
    let groups = file["groups"].as_array().unwrap();
    groups.iter().flat_map(|group| list(&group["rules"]).to_vec()).collect()
}

/// The alerts by name; two rules may have one name.
fn alerts() -> Vec<(String, Value)> {
    let named = |rule: Value| Some((rule["alert"].as_str()?.to_owned(), rule));
    rules().into_iter().filter_map(named).collect()
}

fn recorded() -> BTreeSet<String> {
    let name = |rule: &Value| Some(rule["record"].as_str()?.to_owned());
    rules().iter().filter_map(name).collect()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// The files of a directory with this ending, in order.
fn files(folder: &str, ending: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(repository(folder)).unwrap();
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|found| found == ending));
    paths.sort();
    assert!(!paths.is_empty(), "{folder} has no {ending}");
    paths
}

/// All tests of rules.
fn rule_tests() -> Vec<Value> {
    let files = files("tests/fixtures/rules", "yaml");
    files
        .iter()
        .flat_map(|path| list(&read_yaml(path)["tests"]).to_vec())
        .collect()
}

/// The metric of a series, whose name may have a suffix.
fn metric_of(series: &str) -> Option<&'static Metric> {
    registry::ALL.iter().find(|metric| {
        let suffixes: &[&str] = match metric.kind {
            MetricKind::Histogram => &["_bucket", "_sum", "_count"],
            MetricKind::Summary => &["_sum", "_count"],
            MetricKind::Counter | MetricKind::Gauge => &[""],
        };
        suffixes
            .iter()
            .any(|suffix| series.strip_suffix(suffix) == Some(metric.name))
    })
}

/// The names of series in an expression or a text, each with its matchers.
fn series_in(text: &str) -> Vec<(String, String)> {
    let name = Regex::new(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{([^}]*)\})?").unwrap();
    let ours = Regex::new("^(agentloop|controller_runtime|workqueue|rest_client|leader_election|process)_").unwrap();
    let all = name.captures_iter(text).map(|found| {
        let matchers = found.get(2).map_or("", |matchers| matchers.as_str());
        (found[1].to_owned(), matchers.to_owned())
    });
    all.filter(|(name, _)| ours.is_match(name) || is_recorded_name(name))
        .collect()
}

fn is_recorded_name(name: &str) -> bool {
    name.matches(':').count() == 2
}

/// The labels that matchers, or the labels of a series, name.
fn labels_in(matchers: &str) -> Vec<String> {
    let label = Regex::new(r#"([a-z_]+)\s*(?:=~|!~|!=|=)\s*"[^"]*""#).unwrap();
    label.captures_iter(matchers).map(|found| found[1].to_owned()).collect()
}

/// Whether a scrape adds this label to the series. The namespace of the target remains where the series have none of their own.
fn is_of_target(metric: &Metric, label: &str) -> bool {
    let of_controller = matches!(metric.source, MetricSource::Controller | MetricSource::Process);
    TARGET_LABELS.contains(&label) || (label == "namespace" && of_controller)
}

/// That the text names only series that exist, with labels that they have.
fn assert_known(at: &str, text: &str) {
    for (name, matchers) in series_in(text) {
        if is_recorded_name(&name) {
            assert!(recorded().contains(&name), "{at}: {name} is not recorded");
            continue;
        }
        let metric = metric_of(&name).unwrap_or_else(|| panic!("{at}: {name} is not in the registry"));
        for label in labels_in(&matchers) {
            let known = metric.labels.contains(&label.as_str()) || label == "le" || is_of_target(metric, &label);
            assert!(known, "{at}: {name} has no label {label}");
        }
    }
    // The labels of an aggregation are those of the first series in it.
    let grouped = Regex::new(r"\bby \(([^)]*)\)").unwrap();
    for found in grouped.captures_iter(text) {
        let after = &text[found.get(0).unwrap().end()..];
        let Some((name, _)) = series_in(after).into_iter().next() else {
            continue;
        };
        let Some(metric) = metric_of(&name) else { continue };
        for label in found[1].split(',').map(str::trim) {
            let known = metric.labels.contains(&label) || label == "le" || is_of_target(metric, label);
            assert!(known, "{at}: {name} has no label {label}");
        }
    }
}

/// The rules that the chart renders with these settings, besides being enabled.
fn rendered_rules(settings: &[&str]) -> Option<Value> {
    let rendered = render(&[&["metrics.prometheusRule.enabled=true"], settings].concat())?;
    let objects = rendered.unwrap();
    Some(objects.one("PrometheusRule", "agentloop")["spec"].clone())
}

/// The rules as a file, with another text in place of one that is in it.
fn rules_with(text: &str, other: &str) -> Value {
    let rules = std::fs::read_to_string(repository(RULES)).unwrap();
    assert!(rules.contains(text), "{text}");
    let comments = rules.lines().filter(|line| !line.trim_start().starts_with('#'));
    serde_yaml::from_str(&comments.collect::<Vec<_>>().join("\n").replace(text, other)).unwrap()
}

#[test]
fn the_chart_renders_the_rules_as_they_are_but_for_the_release_and_the_place_of_the_runbooks() {
    let Some(rendered) = rendered_rules(&[]) else {
        return;
    };
    let of_release = r#"namespace="agentloop-system""#;
    assert_eq!(rendered, rules_with(ANY_TARGET, of_release));

    let moved = rendered_rules(&["namespaceOverride=elsewhere"]).unwrap();
    assert_eq!(moved, rules_with(ANY_TARGET, r#"namespace="elsewhere""#));
    let selected = rendered_rules(&[r#"metrics.prometheusRule.selector=job="a"\,cluster=~"b|c""#]).unwrap();
    assert_eq!(selected, rules_with(ANY_TARGET, r#"job="a",cluster=~"b|c""#));

    // What YAML takes for a comment or a mapping outside of a block.
    for selector in [r#"cluster="a #1""#, r#"cluster="a: 1""#] {
        let selected = rendered_rules(&[&format!("metrics.prometheusRule.selector={selector}")]).unwrap();
        let escaped = format!("{}}}) == 0", selector.replace('"', r#"\""#));
        assert!(selected.to_string().contains(&escaped), "{selected}");
        assert_eq!(selected, rules_with(ANY_TARGET, selector));
    }

    let base = "metrics.prometheusRule.runbookBaseURL=https://wiki.example.com/runbooks";
    for slash in ["", "/"] {
        let text = rendered_rules(&[&format!("{base}{slash}")]).unwrap().to_string();
        let back = text.replace("https://wiki.example.com/runbooks/", "docs/runbooks/");
        assert_ne!(text, back);
        assert_eq!(serde_json::from_str::<Value>(&back).unwrap(), rendered);
    }
    assert!(!render(&[]).unwrap().unwrap().has("PrometheusRule", "agentloop"));
}

/// The tests of these files are about the rules of a release, beside another one in the same Prometheus.
#[test]
fn promtool_accepts_the_rules_of_a_release_and_every_test_of_them_passes() {
    let Some(rendered) = rendered_rules(&[]) else {
        return;
    };
    if !has("promtool") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("rules.yaml"), rendered.to_string()).unwrap();
    let tests = files("tests/fixtures/rules/release", "yaml");
    let copies = tests.iter().map(|test| {
        let copy = folder.path().join(test.file_name().unwrap());
        std::fs::copy(test, &copy).unwrap();
        copy
    });
    promtool(&["test", "rules"], &copies.collect::<Vec<_>>());
}

fn promtool(arguments: &[&str], paths: &[PathBuf]) {
    let ended = Command::new("promtool").args(arguments).args(paths).output().unwrap();
    let said = [ended.stdout, ended.stderr].concat();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&said));
}

#[test]
fn promtool_accepts_the_rules_and_every_test_of_them_passes() {
    if !has("promtool") {
        return;
    }
    promtool(&["check", "rules", "--lint-fatal"], &[repository(RULES)]);
    promtool(&["test", "rules"], &files("tests/fixtures/rules", "yaml"));
}

#[test]
fn each_alert_has_a_test_in_which_it_fires_and_one_in_which_it_does_not() {
    let mut fires: BTreeMap<String, [bool; 2]> = BTreeMap::new();
    for check in rule_tests().iter().flat_map(|test| list(&test["alert_rule_test"])) {
        let seen = fires.entry(check["alertname"].as_str().unwrap().into()).or_default();
        seen[usize::from(!list(&check["exp_alerts"]).is_empty())] = true;
    }
    let expected: BTreeMap<_, _> = alerts().into_iter().map(|(name, _)| (name, [true, true])).collect();
    assert_eq!(fires, expected);
}

#[test]
fn each_recording_rule_has_a_test_of_its_value() {
    let mut tested = BTreeSet::new();
    for check in rule_tests().iter().flat_map(|test| list(&test["promql_expr_test"])) {
        assert!(!list(&check["exp_samples"]).is_empty(), "{check}");
        tested.extend(
            series_in(check["expr"].as_str().unwrap())
                .into_iter()
                .map(|(name, _)| name),
        );
    }
    let missing: Vec<_> = recorded().into_iter().filter(|name| !tested.contains(name)).collect();
    assert_eq!(missing, Vec::<String>::new());
}

#[test]
fn rules_and_their_tests_use_metrics_of_the_registry_with_their_labels() {
    for rule in rules() {
        let name = rule["alert"].as_str().or(rule["record"].as_str()).unwrap();
        assert_known(name, rule["expr"].as_str().unwrap());
    }
    let series = Regex::new(r"^([A-Za-z0-9_:]+)(?:\{(.*)\})?$").unwrap();
    for input in rule_tests().iter().flat_map(|test| list(&test["input_series"])) {
        let text = input["series"].as_str().unwrap();
        let found = series.captures(text).unwrap();
        let metric = metric_of(&found[1]).unwrap_or_else(|| panic!("{text}"));
        let mut labels = labels_in(found.get(2).map_or("", |labels| labels.as_str()));
        labels.retain(|label| !is_of_target(metric, label) && label != "le");
        labels.sort();
        let mut expected: Vec<_> = metric.labels.iter().map(|label| (*label).to_owned()).collect();
        expected.sort();
        assert_eq!(labels, expected, "{text}");
    }
}

#[test]
fn each_alert_has_a_severity_and_a_runbook() {
    let sections = ["Meaning", "Impact", "Diagnosis", "Mitigation", "Resolution"];
    let index = std::fs::read_to_string(repository(&format!("{RUNBOOKS}/README.md"))).unwrap();
    let mut pages = BTreeSet::from(["README.md".to_owned()]);
    for (name, rule) in alerts() {
        assert!(name.starts_with("Agentloop"), "{name}");
        let severity = rule["labels"]["severity"].as_str().unwrap();
        assert!(["critical", "warning", "info"].contains(&severity), "{name}");
        let annotations = &rule["annotations"];
        for text in ["summary", "description"] {
            let text = annotations[text].as_str().unwrap();
            assert!(text.ends_with('.') && !text.contains('\n'), "{name}: {text}");
        }
        let url = format!("{RUNBOOKS}/{name}.md");
        assert_eq!(annotations["runbook_url"], json!(url));
        let page = std::fs::read_to_string(repository(&url)).unwrap_or_else(|_| panic!("no {url}"));
        assert!(page.starts_with(&format!("# {name}\n")), "{url}");
        assert!(page.contains(&format!("Severity: {severity}.")), "{url}: severity");
        let found: Vec<_> = page.lines().filter_map(|line| line.strip_prefix("## ")).collect();
        assert_eq!(found, sections, "{url}");
        assert!(
            index.contains(&format!("[{name}]({name}.md)")),
            "the index has no {name}"
        );
        pages.insert(format!("{name}.md"));
    }
    let there: BTreeSet<_> = files(RUNBOOKS, "md")
        .iter()
        .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
        .collect();
    assert_eq!(there, pages);
}

#[test]
fn runbooks_name_commands_and_series_that_exist() {
    let plugin = std::fs::read_to_string(repository("docs/reference/kubectl-plugin.md")).unwrap();
    let command = Regex::new(r"kubectl agentloop ([a-z]+(?: top(?:-up)?)?)").unwrap();
    let mut pages = files(RUNBOOKS, "md");
    pages.push(repository("docs/tasks/monitoring.md"));
    for path in pages {
        let (at, text) = (path.display().to_string(), std::fs::read_to_string(&path).unwrap());
        for found in command.captures_iter(&text) {
            let known = plugin.contains(&format!("\n### {}\n", &found[1]));
            assert!(known, "{at}: there is no command {}", &found[0]);
        }
        for block in text.split("```promql\n").skip(1) {
            assert_known(&at, block.split("```").next().unwrap());
        }
    }
}

#[test]
fn the_page_about_monitoring_names_the_alerts_that_minimal_metrics_leave_without_effect() {
    let recorded: BTreeMap<_, _> = rules()
        .iter()
        .filter_map(|rule| Some((rule["record"].as_str()?.to_owned(), rule["expr"].to_string())))
        .collect();
    let is_left_out = |name: &str| {
        let per_object = [MetricSource::Agents, MetricSource::Budgets, MetricSource::Sensors];
        metric_of(name).is_some_and(|metric| per_object.contains(&metric.source) && !metric.is_minimal())
    };
    let mut expected = BTreeSet::new();
    for (alert, rule) in alerts() {
        let mut texts = vec![rule["expr"].to_string()];
        while let Some(text) = texts.pop() {
            for (name, _) in series_in(&text) {
                texts.extend(recorded.get(&name).cloned());
                if is_left_out(&name) {
                    expected.insert(alert.clone());
                }
            }
        }
    }
    let page = std::fs::read_to_string(repository("docs/tasks/monitoring.md")).unwrap();
    let rows = page.lines().filter(|line| line.starts_with("| `Minimal` | Agentloop"));
    let alert = Regex::new("Agentloop[A-Za-z]+").unwrap();
    let named: BTreeSet<_> = rows
        .flat_map(|row| alert.find_iter(row))
        .map(|found| found.as_str().to_owned())
        .collect();
    assert_eq!(named, expected);
}
