//! Days of the chart's alerts in a minute: a real Prometheus scrapes a real controller and evaluates the rules.
//!
//! The API server is the one in memory, and the tests stand in for kubelets and pods. Every duration of the rules is divided
//! by 60, and so are the thresholds of an hour and half an hour in seconds, so that an hour passes in a minute. `promtool` tests
//! the rules with the times that they have; these tests show that what the controller exports is what they ask for. They wait
//! for alerts, and say nothing of when one fires.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod agents;
mod faults;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;
use pretty_assertions::assert_eq;
use regex::{Captures, Regex};
use serde_json::{Value, json};

use crate::chart::render::repository;
use crate::support::prometheus::Prometheus;

/// By how much the rules are faster.
const SPEED: u64 = 60;
const SECOND: Duration = Duration::from_secs(1);

/// An Agent by namespace and name.
type AgentId = (&'static str, &'static str);

/// An alert, and the values of the labels that name its object, in the order of their names.
type FiredAlert = (String, String);

/// Alerts that have fired, with the first time.
type Fired = BTreeMap<FiredAlert, Duration>;

/// The rules with every duration divided by [`SPEED`].
fn fast_rules() -> Value {
    let text = std::fs::read_to_string(repository("charts/agentloop/files/rules.yaml")).unwrap();
    let mut rules: Value = serde_yaml::from_str(&text).unwrap();
    for group in rules["groups"].as_array_mut().unwrap() {
        for rule in group["rules"].as_array_mut().unwrap() {
            for field in ["expr", "for", "keep_firing_for"] {
                if let Some(Value::String(text)) = rule.get_mut(field) {
                    *text = faster(text);
                }
            }
        }
    }
    rules
}

/// An expression or a duration, divided by [`SPEED`]. An hour in seconds is a threshold or a factor of the rules.
fn faster(text: &str) -> String {
    let duration = Regex::new(r"\b(\d+)([smhd])\b").unwrap();
    let text = duration.replace_all(text, |found: &Captures<'_>| {
        let unit = match &found[2] {
            "s" => 1000,
            "m" => 60_000,
            "h" => 3_600_000,
            _ => 86_400_000,
        };
        format!("{}ms", found[1].parse::<u64>().unwrap() * unit / SPEED)
    });
    let seconds = Regex::new(r"\b(3600|1800)\b").unwrap();
    let seconds = seconds.replace_all(&text, |found: &Captures<'_>| {
        (found[1].parse::<u64>().unwrap() / SPEED).to_string()
    });
    seconds.into_owned()
}

#[test]
fn durations_and_hours_in_seconds_are_divided_and_nothing_else() {
    assert_eq!(faster("15m"), "15000ms");
    assert_eq!(
        faster("3 * 3600 * avg_over_time(a:b:rate5m[1d] offset 1h) > 1800 and c{d=\"e1h\"} > 10"),
        "3 * 60 * avg_over_time(a:b:rate5m[1440000ms] offset 60000ms) > 30 and c{d=\"e1h\"} > 10"
    );
}

/// A new alert needs a day on which it fires.
#[test]
fn each_alert_of_the_rules_fires_on_one_of_the_days() {
    let rules = fast_rules();
    let groups = rules["groups"].as_array().unwrap().iter();
    let all = groups.flat_map(|group| group["rules"].as_array().unwrap());
    let names: BTreeSet<_> = all.filter_map(|rule| rule["alert"].as_str()).collect();
    let days = agents::DAY.into_iter().chain([agents::DOWN]).chain(faults::DAY);
    assert_eq!(days.map(|(name, _)| name).collect::<BTreeSet<_>>(), names);
}

/// What a kubelet says of a pod.
fn pod_status((namespace, name): AgentId, crashes: bool) -> Value {
    let container = |container: &str, crashes: bool| {
        let state = if crashes {
            json!({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}})
        } else {
            json!({"running": {"startedAt": Timestamp::now()}})
        };
        json!({
            "name": container, "image": "agentloop:test", "imageID": "", "ready": !crashes,
            "restartCount": if crashes { 7 } else { 0 }, "state": state,
        })
    };
    json!({
        "metadata": {"name": name, "namespace": namespace}, "spec": {"nodeName": "node-1"},
        "status": {
            "phase": "Running", "startTime": Timestamp::now(),
            "conditions": [{"type": "Ready", "status": if crashes { "False" } else { "True" }}],
            "initContainerStatuses": [container("gateway", false)],
            "containerStatuses": [container("worker", crashes)],
        },
    })
}

/// Usage of the model by the second, with more counts.
fn usage(second: u64, more: &Value) -> Value {
    let mut used = json!({"calls": second, "inputTokens": 100 * second, "outputTokens": 10 * second});
    used.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let mut model = used.clone();
    model["model"] = json!("demo");
    used["byModel"] = json!([model]);
    used
}

/// Adds the alerts that fire now.
fn look(prometheus: &Prometheus, fired: &mut Fired, time: Duration) {
    let answer = prometheus.get("/api/v1/alerts");
    let alerts = answer["data"]["alerts"].as_array().cloned().unwrap_or_default();
    for alert in alerts.iter().filter(|alert| alert["state"] == "firing") {
        let mut labels: BTreeMap<String, String> = serde_json::from_value(alert["labels"].clone()).unwrap();
        let name = labels.remove("alertname").unwrap();
        labels.remove("severity");
        let object: Vec<_> = labels.into_values().collect();
        fired.entry((name, object.join(" "))).or_insert(time);
    }
}

/// The expected alerts that have not fired yet.
fn missing(fired: &Fired, expected: &[(&str, &str)]) -> Vec<FiredAlert> {
    let expected = expected.iter().map(|(name, object)| ((*name).into(), (*object).into()));
    expected.filter(|alert| !fired.contains_key(alert)).collect()
}

/// The alerts that have fired and are not among these.
fn unexpected(fired: &Fired, expected: &[(&str, &str)]) -> Vec<FiredAlert> {
    let is_expected = |(name, object): &&FiredAlert| expected.contains(&(name.as_str(), object.as_str()));
    fired.keys().filter(|alert| !is_expected(alert)).cloned().collect()
}
