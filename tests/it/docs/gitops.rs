//! The health check for Argo CD, run by a Lua interpreter on the conditions that the controller writes, and the verdicts of
//! kstatus, by which Flux and Helm wait, on the same.

use std::fmt::Write as _;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::schema::reader::{documents, repository};
use crate::support::clusters::skip;
use crate::support::kubectl::tool;

/// A value as a literal of Lua.
fn literal(value: &Value) -> String {
    match value {
        Value::Null => "nil".into(),
        Value::Object(fields) => {
            let fields = fields
                .iter()
                .map(|(key, value)| format!("[{}] = {}", json!(key), literal(value)));
            format!("{{{}}}", fields.collect::<Vec<_>>().join(", "))
        }
        Value::Array(items) => format!("{{{}}}", items.iter().map(literal).collect::<Vec<_>>().join(", ")),
        scalar @ (Value::Bool(_) | Value::Number(_) | Value::String(_)) => scalar.to_string(),
    }
}

/// What the check says of each object: its health and the message. `None`: there is no interpreter.
fn health(objects: &[Value]) -> Option<Vec<(String, String)>> {
    let check = repository("deploy/argocd/health.lua");
    let mut script = String::new();
    for object in objects {
        writeln!(script, "obj = {}", literal(object)).unwrap();
        writeln!(script, "result = dofile({})", json!(check)).unwrap();
        writeln!(script, "print(result.status .. '\\t' .. result.message)").unwrap();
    }
    let Ok(ended) = Command::new("lua5.4").args(["-e", &script]).output() else {
        skip("lua5.4 is missing; hack/packages.sh installs it");
        return None;
    };
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let lines = String::from_utf8(ended.stdout).unwrap();
    let pairs = lines.lines().map(|line| line.split_once('\t').unwrap());
    Some(
        pairs
            .map(|(status, message)| (status.to_owned(), message.to_owned()))
            .collect(),
    )
}

/// What kstatus says of each object. `None`: it is not built.
fn kstatus(objects: &[Value]) -> Option<Vec<String>> {
    let mut command = Command::new(tool("kstatus"));
    let Ok(mut child) = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn() else {
        skip("kstatus is missing; hack/devcluster/tools.sh builds it");
        return None;
    };
    let mut stdin = child.stdin.take().unwrap();
    let mut input = String::new();
    for object in objects {
        let mut object = object.clone();
        object["apiVersion"] = json!("agentloop.dev/v1alpha1");
        object["kind"] = json!("Agent");
        writeln!(input, "{object}").unwrap();
    }
    let writer = std::thread::spawn(move || std::io::Write::write_all(&mut stdin, input.as_bytes()));
    let ended = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(ended.status.success());
    let lines = String::from_utf8(ended.stdout).unwrap();
    Some(
        lines
            .lines()
            .map(|line| line.split('\t').next().unwrap().to_owned())
            .collect(),
    )
}

fn condition(type_: &str, status: &str, reason: &str) -> Value {
    json!({"type": type_, "status": status, "reason": reason, "message": "why"})
}

fn object(conditions: &[Value]) -> Value {
    json!({"metadata": {"generation": 3}, "status": {"observedGeneration": 3, "conditions": conditions}})
}

/// Every state that the controller publishes as `Ready`, from the texts of its own tests, with the health that follows.
fn published() -> Vec<(Value, String, &'static str)> {
    let mut all = Vec::new();
    for name in ["agent-conditions", "budget-conditions", "sensor-conditions"] {
        let text = std::fs::read_to_string(repository(&format!("tests/texts/{name}.snap"))).unwrap();
        let ready = text
            .split("\n## ")
            .find_map(|section| section.strip_prefix("Ready\n"))
            .unwrap();
        for line in ready.lines().filter_map(|line| line.strip_prefix("- `")) {
            // `False Failed, Stalled`
            let words: Vec<&str> = line
                .split('`')
                .next()
                .unwrap()
                .split([' ', ','])
                .filter(|word| !word.is_empty())
                .collect();
            let (status, reason, also) = (words[0], words[1], words.get(2).copied());
            let mut conditions = vec![
                condition("Accepted", "True", "Accepted"),
                condition("Ready", status, reason),
            ];
            conditions.extend(also.map(|also| condition(also, "True", reason)));
            if reason == "SuspendedBySpec" {
                conditions.push(condition("Suspended", "True", reason));
            }
            let expected = match also {
                Some("Stalled") => "Degraded",
                Some("Reconciling") => "Progressing",
                Some(other) => panic!("{other}"),
                None if reason == "SuspendedBySpec" => "Suspended",
                None => "Healthy",
            };
            all.push((object(&conditions), format!("{name}: {line}"), expected));
        }
    }
    all
}

#[test]
fn argo_cd_assesses_each_published_state_correctly() {
    let published = published();
    let objects: Vec<Value> = published.iter().map(|(object, ..)| object.clone()).collect();
    let Some(found) = health(&objects) else { return };
    assert_eq!(found.len(), published.len());
    for ((status, message), (_, place, expected)) in found.iter().zip(&published) {
        assert_eq!(status, expected, "{place}");
        assert!(message.ends_with(": why"), "{place}: {message}");
    }
    for health in ["Healthy", "Progressing", "Degraded", "Suspended"] {
        let count = published.iter().filter(|(.., expected)| *expected == health).count();
        assert!(count >= 2, "{count} samples are {health}");
    }
}

#[test]
fn argo_cd_waits_for_an_object_that_the_controller_has_not_seen() {
    let ready = [condition("Ready", "True", "LoopRunning")];
    let mut stale = object(&ready);
    stale["status"]["observedGeneration"] = json!(2);
    let unknown = object(&[condition("Ready", "Unknown", "Starting")]);
    let without_ready = object(&[condition("Accepted", "True", "Accepted")]);
    let new = json!({"metadata": {"generation": 1}});
    let empty = json!({"metadata": {"generation": 1}, "status": {}});
    let mut resumed = object(&ready);
    let cleared = condition("Suspended", "False", "Inactive");
    resumed["status"]["conditions"].as_array_mut().unwrap().push(cleared);
    let Some(found) = health(&[stale, unknown, without_ready, new, empty, resumed]) else {
        return;
    };
    let found: Vec<&str> = found.iter().map(|(status, _)| status.as_str()).collect();
    let waiting = ["Progressing"; 5];
    assert_eq!(found, [&waiting[..], &["Healthy"]].concat());
}

/// The state in which a reason of `Ready` leaves an object, as users of GitOps expect it.
const EXPECTED: [(&str, &str, &str); 19] = [
    ("agent-conditions", "True LoopRunning", "Current"),
    ("agent-conditions", "True Completed", "Current"),
    ("agent-conditions", "True SuspendedBySpec", "Current"),
    ("agent-conditions", "True RateLimited", "Current"),
    ("agent-conditions", "True PausedByBudget", "Current"),
    ("agent-conditions", "True AwaitingApproval", "Current"),
    ("agent-conditions", "False Starting, Reconciling", "InProgress"),
    ("agent-conditions", "True UpdatePending, Reconciling", "InProgress"),
    ("agent-conditions", "False Unreachable, Reconciling", "InProgress"),
    ("agent-conditions", "False Failed, Stalled", "Failed"),
    ("agent-conditions", "False InvalidSpec, Stalled", "Failed"),
    ("agent-conditions", "False TotalCost, Stalled", "Failed"),
    ("budget-conditions", "True Accepted", "Current"),
    ("budget-conditions", "True Exhausted", "Current"),
    ("budget-conditions", "False Exhausted, Stalled", "Failed"),
    ("budget-conditions", "False InvalidSpec, Stalled", "Failed"),
    ("sensor-conditions", "True Listening", "Current"),
    ("sensor-conditions", "False SensorFailing, Reconciling", "InProgress"),
    ("sensor-conditions", "False InvalidSpec, Stalled", "Failed"),
];

#[test]
fn kstatus_and_argo_cd_agree_on_each_published_state() {
    let published = published();
    let mut objects: Vec<Value> = published.iter().map(|(object, ..)| object.clone()).collect();
    // The same, of an earlier generation of the spec.
    objects.extend(published.iter().map(|(object, ..)| {
        let mut edited = object.clone();
        edited["metadata"]["generation"] = json!(4);
        edited
    }));
    let Some(found) = kstatus(&objects) else { return };
    let (found, stale) = found.split_at(published.len());
    for (status, (_, place, health)) in found.iter().zip(&published) {
        let expected = match *health {
            "Healthy" | "Suspended" => "Current",
            "Progressing" => "InProgress",
            _ => "Failed",
        };
        assert_eq!(status, expected, "{place}");
    }
    assert_eq!(stale, vec!["InProgress"; published.len()]);
    for (texts, state, expected) in EXPECTED {
        let line = format!("{texts}: {state}`");
        let at = published.iter().position(|(_, place, _)| place.starts_with(&line));
        assert_eq!(
            found[at.unwrap_or_else(|| panic!("{line} is not published"))],
            expected,
            "{line}"
        );
    }
}

#[test]
fn kstatus_waits_for_an_object_that_was_just_created() {
    let definitions = documents("crds").into_iter().map(|(_, definition)| definition);
    let new: Vec<Value> = definitions
        .map(|definition| {
            let status = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"];
            json!({"metadata": {"generation": 1}, "status": status["default"]})
        })
        .collect();
    assert_eq!(new.len(), 3);
    let Some(found) = kstatus(&new) else { return };
    assert_eq!(found, ["InProgress"; 3]);
}
