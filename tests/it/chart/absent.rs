//! Values that are taken away: set to `null`, as Helm removes a default, or not passed by a parent chart. What remains is refused or
//! renders what the default does.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::render::{Rendered, helm, render, render_chart, repository};
use super::values::{groups, names};

/// Settings that render what is off by default, so that the values of it have an effect.
const SWITCHES: &[&str] = &[
    "page.enabled=true",
    "approvals.webhook.url=https://bridge.example.com/gates",
    "approvals.webhook.secretName=gates",
    "history.postgres.existingSecret=history",
    "telemetry.otlp.endpoint=http://otel-collector.observability:4318",
    "telemetry.otlp.metrics=true",
    "metrics.prometheusRule.enabled=true",
    "dashboards.enabled=true",
    "dashboards.grafanaOperator.enabled=true",
];
/// Values whose absence has a meaning of its own: no probe, no peers, and Kubernetes' own pace of a rollout.
const MEANINGFUL: &[&str] = &[
    "startupProbe",
    "livenessProbe",
    "readinessProbe",
    "networkPolicy.metricsFrom",
    "strategy.rollingUpdate",
];

/// The settings that a value is removed from: all switches but the value itself, and those that need it.
fn switches(removed: &str) -> Vec<String> {
    let needed = match removed {
        // A URL needs a key, and a key a URL.
        _ if removed.starts_with("approvals.webhook.") => "approvals.webhook",
        // What is exported needs the endpoint.
        "telemetry.otlp.endpoint" => "telemetry.otlp",
        _ => removed,
    };
    let monitor = if removed.starts_with("metrics.podMonitor") {
        "podMonitor"
    } else {
        "serviceMonitor"
    };
    let mut switches = vec![format!("metrics.{monitor}.enabled=true")];
    switches.extend(SWITCHES.iter().map(|&switch| switch.to_owned()));
    switches.retain(|switch| {
        let rest = switch.strip_prefix(needed);
        !rest.is_some_and(|rest| rest.starts_with(['.', '=']))
    });
    switches
}

fn rendered(settings: &[String]) -> Option<Result<Rendered, String>> {
    render(&settings.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Also the state after an upgrade with `--reuse-values` to a version of the chart with another value.
#[test]
fn a_value_that_is_null_is_refused_by_name_or_means_its_default() {
    let mut defaults = BTreeMap::new();
    for name in groups().into_iter().chain(names()) {
        let settings = switches(&name);
        if !defaults.contains_key(&settings) {
            let Some(default) = rendered(&settings) else { return };
            let default = default.unwrap_or_else(|error| panic!("{name}: {error}"));
            defaults.insert(settings.clone(), default);
        }
        let default = &defaults[&settings];
        let removed = [settings, vec![format!("{name}=null")]].concat();
        match rendered(&removed).unwrap() {
            Ok(without) if MEANINGFUL.contains(&name.as_str()) => assert_ne!(without.0, default.0, "{name}"),
            Ok(without) => assert!(
                without.0 == default.0,
                "{name}=null renders something else than its default"
            ),
            Err(error) => {
                let key = name.rsplit('.').next().unwrap_or_default();
                let named = error.contains("schema") && error.contains(key);
                assert!(named, "{name}=null is not refused by the schema: {error}");
            }
        }
    }
}

/// A chart that has this one as its dependency, on a condition.
fn umbrella(directory: &Path, values: &str) -> PathBuf {
    let chart = std::fs::read_to_string(repository("charts/agentloop/Chart.yaml")).unwrap();
    let version = chart.lines().find_map(|line| line.strip_prefix("version: ")).unwrap();
    let text = format!(
        "apiVersion: v2\nname: platform\nversion: 1.0.0\ndependencies:\n\
         - {{name: agentloop, version: {version}, condition: agentloop.enabled}}\n"
    );
    std::fs::create_dir(directory.join("charts")).unwrap();
    std::fs::write(directory.join("Chart.yaml"), text).unwrap();
    std::fs::write(directory.join("values.yaml"), values).unwrap();
    std::os::unix::fs::symlink(repository("charts/agentloop"), directory.join("charts/agentloop")).unwrap();
    directory.into()
}

#[test]
fn a_parent_chart_may_switch_it_by_a_condition_and_leave_globals_empty() {
    let directory = tempfile::tempdir().unwrap();
    let chart = umbrella(directory.path(), "global:\nagentloop:\n  enabled: true\n  workers: 9\n");
    let Some(on) = render_chart(&chart, &[]) else { return };
    assert!(on.unwrap().has("Deployment", "agentloop"));
    let off = render_chart(&chart, &["agentloop.enabled=false"]).unwrap().unwrap();
    assert!(off.0.is_empty(), "{off:?}");
    let error = render_chart(&chart, &["agentloop.enable=true"]).unwrap().unwrap_err();
    assert!(error.contains("additional properties 'enable' not allowed"), "{error}");
}

#[test]
fn helm_finds_nothing_to_complain_of_in_empty_globals() {
    let Some(mut lint) = helm() else { return };
    let values = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(values.path(), "global: null\n").unwrap();
    let ended = lint
        .args(["lint", "--strict", "--values"])
        .args([values.path(), &repository("charts/agentloop")])
        .output()
        .unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));
}
