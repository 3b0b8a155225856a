//! What is in a report, and what is not.

use std::io::Read;

use serde_json::{Map, Value, json};

use super::archive::{self, ReportFile};
use super::redaction::Redaction;
use super::sources::{ReportSources, Unread};
use crate::api::crd;

/// Stands in every text; may stand in no file.
const CANARY: &str = "canary-3c9a";

/// An object in which each string that is free has the canary.
fn planted(schema: &Value, name: &str, depth: usize) -> Value {
    if schema["x-kubernetes-preserve-unknown-fields"] == true {
        return json!({CANARY: {"deep": [CANARY]}});
    }
    if let Some(values) = schema["enum"].as_array() {
        return values[0].clone();
    }
    let first = schema["type"].as_str().unwrap_or("string");
    match first {
        "object" => {
            let mut object = Map::new();
            for (name, inner) in schema["properties"].as_object().into_iter().flatten() {
                if depth < 20 {
                    object.insert(name.clone(), planted(inner, name, depth + 1));
                }
            }
            if schema["additionalProperties"].is_object() {
                object.insert("KEY".into(), planted(&schema["additionalProperties"], name, depth + 1));
            }
            object.into()
        }
        "array" => json!([planted(&schema["items"], name, depth + 1)]),
        "integer" | "number" => json!(7),
        "boolean" => json!(true),
        _ if name.to_ascii_lowercase().ends_with("url") => {
            json!(format!("https://user:{CANARY}@example.com/{CANARY}?token={CANARY}"))
        }
        _ => json!(format!("{CANARY} says {CANARY}")),
    }
}

/// One object of each kind.
fn resources() -> Vec<(String, Value)> {
    let definitions = crd::all().into_iter().map(|definition| {
        let kind = definition.spec.names.kind;
        let schema = definition.spec.versions[0]
            .schema
            .clone()
            .unwrap()
            .open_api_v3_schema
            .unwrap();
        let mut object = planted(&serde_json::to_value(schema).unwrap(), "", 0);
        object["apiVersion"] = "agentloop.dev/v1alpha1".into();
        object["kind"] = kind.clone().into();
        object["metadata"] = json!({"name": "helper", "namespace": "team-a", "labels": {"KEY": CANARY},
            "annotations": {"KEY": CANARY}, "managedFields": [{"manager": CANARY}]});
        for path in ["/spec/model/name", "/spec/lightModel/name", "/status/pod/name"] {
            if let Some(name) = object.pointer_mut(path) {
                *name = "known".into();
            }
        }
        (kind, object)
    });
    definitions.collect()
}

fn sources() -> ReportSources {
    let of = |kind: &str| {
        Some(
            resources()
                .into_iter()
                .filter(|(name, _)| name == kind)
                .map(|(_, object)| object)
                .collect(),
        )
    };
    let event = json!({"type": "Warning", "reason": "BudgetExhausted", "message": format!("{CANARY}: limits.tokens are used, 12 left"),
        "note": CANARY, "lastTimestamp": "2026-11-22T14:00:00Z", "reportingComponent": CANARY,
        "involvedObject": {"kind": "Agent", "namespace": "team-a", "name": "helper", "fieldPath": CANARY}});
    let log = json!({"ts": "2026-11-22T14:00:00.000Z", "level": "warn", "target": "agentloop::controller", "msg": CANARY,
        "error": format!("Bearer {CANARY}"), "agent": {"prompt": CANARY}, "attempt": 3});
    let pod = json!({"metadata": {"name": "agent-helper-0", "namespace": "team-a", "annotations": {"KEY": CANARY}},
        "spec": {"containers": [{"image": CANARY, "env": [{"name": "A", "value": CANARY}]}]},
        "status": {"phase": "Running", "message": CANARY, "containerStatuses": [{"name": "worker", "ready": false,
            "restartCount": 2, "state": {"waiting": {"reason": "CrashLoopBackOff", "message": CANARY}},
            "lastState": {"terminated": {"reason": CANARY, "exitCode": 1, "message": CANARY}}}]}});
    ReportSources {
        now: "2026-11-22T14:00:00Z".parse().unwrap(),
        versions: json!({"apiServer": "v1.33.0"}),
        agents: of("Agent"),
        sensors: of("Sensor"),
        budgets: of("AgentBudget"),
        events: Some(vec![event]),
        pods: Some(vec![pod]),
        logs: vec![("agentloop-0".into(), format!("{log}\nplain {CANARY}\n"))],
        check: Some(json!([{"check": "Kubernetes", "result": "ok"}])),
        missing: vec![Unread {
            what: "secrets".into(),
            problem: "you may not read it".into(),
        }],
    }
}

#[test]
fn no_text_of_the_resources_events_and_logs_is_in_the_archive() {
    let files = archive::files(&sources());
    let names: Vec<&str> = files.iter().map(|file| file.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "index.json",
            "agents.json",
            "sensors.json",
            "agentbudgets.json",
            "events.json",
            "pods.json",
            "logs/agentloop-0.jsonl",
            "check.json"
        ]
    );
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("report.zip");
    archive::write(&path, &files).unwrap();
    let mut archive = zip::ZipArchive::new(std::fs::File::open(&path).unwrap()).unwrap();
    assert_eq!(archive.len(), names.len());
    for name in names {
        let mut text = String::new();
        archive.by_name(name).unwrap().read_to_string(&mut text).unwrap();
        assert!(!text.contains(CANARY) && !text.contains("3c9a"), "{name}: {text}");
    }
}

#[test]
fn the_archive_has_the_kept_fields_of_each_kind_of_object() {
    let files = archive::files(&sources());
    let content = |name: &str| files.iter().find(|file| file.name == name).unwrap().content.clone();
    insta::assert_snapshot!("agents", content("agents.json"));
    insta::assert_snapshot!(
        "others",
        ["events.json", "pods.json", "logs/agentloop-0.jsonl", "index.json"]
            .map(content)
            .join("\n")
    );
}

#[test]
fn names_numbers_times_and_quantities_stay_and_urls_lose_what_may_be_a_credential() {
    let object = json!({"kind": "Agent", "metadata": {"name": "helper"},
        "spec": {"instructions": "Buy milk.", "suspend": true, "model": {"api": "OpenAIChat", "name": "gpt-5",
            "baseURL": "https://ann:secret@models.example.com:8443/v1/secret?key=secret", "maxOutputTokens": 9},
            "storage": {"size": "64Mi"}},
        "status": {"conditions": [{"type": "Ready", "status": "False", "reason": "ConfigMapNotFound",
            "message": "spec.model.scripted: Buy milk, 3 times, 1234567", "lastTransitionTime": "2026-11-22T14:00:00Z"}]}});
    let redacted = Redaction::new().resource(&object);
    assert_eq!(redacted["spec"]["instructions"], "[a text of 9 bytes]");
    assert_eq!(
        redacted["spec"]["model"]["baseURL"],
        "https://models.example.com:8443/…"
    );
    assert_eq!(redacted["spec"]["storage"]["size"], "64Mi");
    assert_eq!(redacted["spec"]["model"]["name"], "gpt-5");
    let condition = &redacted["status"]["conditions"][0];
    assert_eq!(condition["reason"], "ConfigMapNotFound");
    assert_eq!(condition["message"], "spec.model.scripted … 3 …");
}

#[test]
fn an_archive_is_never_overwritten_and_none_is_left_where_none_can_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("report.zip");
    let files = [ReportFile {
        name: "index.json".into(),
        content: "{}".into(),
    }];
    archive::write(&path, &files).unwrap();
    let before = std::fs::read(&path).unwrap();
    let refused = archive::write(&path, &[]).unwrap_err().to_string();
    assert!(refused.contains("exists already"), "{refused}");
    assert_eq!(std::fs::read(&path).unwrap(), before);
    assert!(archive::write(&dir.path().join("no/report.zip"), &files).is_err());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn digits_are_left_out_where_any_text_may_be() {
    let agent = json!({
        "kind": "Agent",
        "metadata": {"name": "a", "annotations": {"pin": "483920"}, "labels": {"card": "4929123456ab"}},
        "spec": {"instructions": "2026-11-25T10:00:00Z", "pod": {"resources": {"limits": {"memory": "128Mi"}}}},
        "status": {"conditions": [{"type": "Ready", "status": "False", "message": "the code 483920 is wrong"}]},
    });
    let text = Redaction::new().resource(&agent).to_string();
    for secret in ["483920", "4929123456ab", "2026-11-25"] {
        assert!(!text.contains(secret), "{text}");
    }
    assert!(text.contains("128Mi"), "{text}");
}
