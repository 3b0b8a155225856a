//! What of an object, an Event or a log line may be in a report.
//!
//! Strings are left out unless they cannot be free text: values of an enumeration of the schema, times, quantities, names of
//! the objects that the report is about, reasons, and of URLs the scheme and the host. Of messages, the words stay that are
//! names in the API. Keys, numbers and booleans stay. A new field is therefore left out until it is listed here.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use crate::api::crd;

/// Maximum number of digits of a number in a message: fewer than those of a one-time password.
pub const MAX_DIGITS: usize = 4;
/// Fields whose strings are names that no prompt is in, by their path without indices.
const NAMES: [&str; 11] = [
    "apiVersion",
    "kind",
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "metadata.resourceVersion",
    "metadata.creationTimestamp",
    "metadata.deletionTimestamp",
    "spec.model.name",
    "spec.lightModel.name",
    "status.pod.name",
];
/// Parts of `metadata` that say nothing that is needed.
const LEFT_OUT: [&str; 2] = ["managedFields", "ownerReferences"];

/// The schemas of the resources, and the words that they consist of.
pub struct Redaction {
    schemas: Vec<(String, Value)>,
    words: BTreeSet<String>,
}

impl Default for Redaction {
    fn default() -> Self {
        Self::new()
    }
}

impl Redaction {
    /// With the schemas of this version.
    #[must_use]
    pub fn new() -> Self {
        let mut schemas = Vec::new();
        let mut words = BTreeSet::new();
        for definition in crd::all() {
            let kind = definition.spec.names.kind.clone();
            words.insert(kind.clone());
            let versions = definition.spec.versions.first();
            let schema = versions.and_then(|version| version.schema.as_ref()?.open_api_v3_schema.as_ref());
            let schema = schema
                .and_then(|schema| serde_json::to_value(schema).ok())
                .unwrap_or_default();
            collect_words(&schema, &mut words);
            schemas.push((kind, schema));
        }
        Self { schemas, words }
    }

    /// An Agent, a Sensor or an AgentBudget.
    #[must_use]
    pub fn resource(&self, object: &Value) -> Value {
        let kind = object["kind"].as_str().unwrap_or_default();
        let schema = self.schemas.iter().find(|(name, _)| name == kind);
        let schema = schema.map_or(&Value::Null, |(_, schema)| schema);
        self.value(object, schema, "")
    }

    /// `path`: of the value, without indices.
    fn value(&self, value: &Value, schema: &Value, path: &str) -> Value {
        match value {
            Value::Object(fields) if schema["x-kubernetes-preserve-unknown-fields"] != true => {
                let fields = fields
                    .iter()
                    .filter(|(key, _)| path != "metadata" || !LEFT_OUT.contains(&key.as_str()));
                let redacted = fields.map(|(key, inner)| {
                    let inside = if path.is_empty() {
                        key.clone()
                    } else {
                        format!("{path}.{key}")
                    };
                    let own = &schema["properties"][key];
                    let of_all = &schema["additionalProperties"];
                    let schema = if own.is_null() { of_all } else { own };
                    (key.clone(), self.value(inner, schema, &inside))
                });
                redacted.collect::<Map<_, _>>().into()
            }
            Value::Object(fields) => format!("[an object with {} fields]", fields.len()).into(),
            Value::Array(items) => {
                let redacted = items.iter().map(|item| self.value(item, &schema["items"], path));
                redacted.collect::<Vec<_>>().into()
            }
            Value::String(text) => self.text(text, schema, path),
            Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
        }
    }

    fn text(&self, text: &str, schema: &Value, path: &str) -> Value {
        let is_of_enum = schema["enum"]
            .as_array()
            .is_some_and(|values| values.iter().any(|value| value == text));
        let is_time = schema["format"] == "date-time" && text.parse::<jiff::Timestamp>().is_ok();
        let field = path.rsplit('.').next().unwrap_or_default();
        // Digits alone can be a secret, such as a PIN: only where nothing else is allowed.
        let is_amount =
            field == "size" || schema["pattern"].is_string() || schema["x-kubernetes-int-or-string"] == true;
        if is_of_enum || is_time || (is_amount && is_quantity(text)) || NAMES.contains(&path) {
            return text.into();
        }
        match field {
            "type" | "status" | "reason" | "reasons" if path.starts_with("status.") && is_reason(text) => text.into(),
            "message" if path.starts_with("status.") => self.message(text).into(),
            _ if text.starts_with("http://") || text.starts_with("https://") => origin(text).into(),
            _ => left_out(text).into(),
        }
    }

    /// The words of a message that are names in the API, and its small numbers.
    #[must_use]
    pub fn message(&self, text: &str) -> String {
        let mut kept = String::new();
        let mut is_gap = false;
        for word in text.split(|c: char| c.is_whitespace() || ",;:()[]'\"".contains(c)) {
            let word = word.trim_end_matches('.');
            if word.is_empty() {
                continue;
            }
            let is_number = word.len() <= MAX_DIGITS && word.bytes().all(|digit| digit.is_ascii_digit());
            if is_number || word.split(['.', '/', '=']).all(|part| self.words.contains(part)) {
                if !kept.is_empty() {
                    kept.push(' ');
                }
                kept.push_str(word);
                is_gap = false;
            } else if !is_gap {
                kept.push_str(if kept.is_empty() { "…" } else { " …" });
                is_gap = true;
            }
        }
        kept
    }

    /// An Event.
    #[must_use]
    pub fn event(&self, event: &Value) -> Value {
        let involved = &event["involvedObject"];
        json!({
            "type": event["type"].as_str().filter(|text| is_reason(text)),
            "reason": event["reason"].as_str().filter(|text| is_reason(text)),
            "action": event["action"].as_str().filter(|text| is_reason(text)),
            "count": event["count"].as_i64(),
            "firstTimestamp": time(&event["firstTimestamp"]),
            "lastTimestamp": time(&event["lastTimestamp"]),
            "eventTime": time(&event["eventTime"]),
            "involvedObject": {"kind": involved["kind"], "namespace": involved["namespace"], "name": involved["name"]},
            "message": self.message(event["message"].as_str().unwrap_or_default()),
        })
    }

    /// A line of a log of this project: its time, level and place in the source, and the keys of its fields.
    #[must_use]
    pub fn log_line(&self, line: &str) -> String {
        let Ok(Value::Object(fields)) = serde_json::from_str(line) else {
            return json!({"left out": format!("a line of {} bytes", line.len())}).to_string();
        };
        let kept = fields.iter().map(|(key, value)| {
            let value = match (key.as_str(), value) {
                ("ts", value) => time(value),
                ("level", Value::String(level)) if is_level(level) => value.clone(),
                ("target", Value::String(target)) if is_target(target) => value.clone(),
                (_, Value::String(text)) => self.message(text).into(),
                (_, Value::Number(_) | Value::Bool(_) | Value::Null) => value.clone(),
                (_, Value::Array(_) | Value::Object(_)) => "…".into(),
            };
            (key.clone(), value)
        });
        Value::Object(kept.collect()).to_string()
    }
}

/// A pod: which container is in which state, and why.
#[must_use]
pub fn pod(pod: &Value) -> Value {
    let status = &pod["status"];
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let conditions = list(&status["conditions"]).into_iter().map(|condition| {
        json!({"type": reason(&condition["type"]), "status": reason(&condition["status"]), "reason": reason(&condition["reason"]),
            "lastTransitionTime": time(&condition["lastTransitionTime"])})
    });
    let containers = ["initContainerStatuses", "containerStatuses"];
    let containers = containers
        .into_iter()
        .flat_map(|field| list(&status[field]))
        .map(|container| {
            json!({"name": container["name"], "ready": container["ready"].as_bool(),
            "restartCount": container["restartCount"].as_i64(), "state": state(&container["state"]),
            "lastState": state(&container["lastState"])})
        });
    json!({
        "metadata": {"namespace": pod["metadata"]["namespace"], "name": pod["metadata"]["name"],
            "creationTimestamp": time(&pod["metadata"]["creationTimestamp"]),
            "deletionTimestamp": time(&pod["metadata"]["deletionTimestamp"])},
        "phase": reason(&status["phase"]), "reason": reason(&status["reason"]),
        "conditions": conditions.collect::<Vec<_>>(), "containers": containers.collect::<Vec<_>>(),
    })
}

fn state(state: &Value) -> Value {
    let states = state.as_object().into_iter().flatten().map(|(name, inner)| {
        let inner = json!({"reason": reason(&inner["reason"]), "exitCode": inner["exitCode"].as_i64(),
            "signal": inner["signal"].as_i64(), "startedAt": time(&inner["startedAt"]),
            "finishedAt": time(&inner["finishedAt"])});
        (name.clone(), inner)
    });
    Value::Object(states.collect())
}

/// A reason, or nothing.
fn reason(value: &Value) -> Value {
    value
        .as_str()
        .filter(|text| is_reason(text))
        .map_or(Value::Null, Into::into)
}

/// A time, or nothing.
fn time(value: &Value) -> Value {
    let text = value.as_str().filter(|text| text.parse::<jiff::Timestamp>().is_ok());
    text.map_or(Value::Null, Into::into)
}

/// The text that takes the place of another one.
fn left_out(text: &str) -> String {
    format!("[a text of {} bytes]", text.len())
}

/// Scheme, host and port of a URL: user information, path and query may be credentials.
fn origin(text: &str) -> String {
    let Ok(url) = reqwest::Url::parse(text) else {
        return left_out(text);
    };
    let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
    format!("{}://{}{port}/…", url.scheme(), url.host_str().unwrap_or_default())
}

/// An identifier such as `ConfigMapNotFound`.
fn is_reason(text: &str) -> bool {
    text.len() <= 64
        && text.starts_with(|c: char| c.is_ascii_uppercase())
        && text.bytes().all(|byte| byte.is_ascii_alphabetic())
}

/// A quantity or an amount, such as `64Mi` or `2.50`.
fn is_quantity(text: &str) -> bool {
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = text.len() - number.len();
    unit <= 2 && (1..=12).contains(&number.len()) && number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.')
}

fn is_level(text: &str) -> bool {
    ["error", "warn", "info", "debug", "trace"].contains(&text)
}

fn is_target(text: &str) -> bool {
    text.starts_with("agentloop")
        && text
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || b"_:".contains(&byte))
}

/// Names of fields and values of enumerations.
fn collect_words(schema: &Value, words: &mut BTreeSet<String>) {
    let Value::Object(fields) = schema else {
        if let Value::Array(items) = schema {
            for item in items {
                collect_words(item, words);
            }
        }
        return;
    };
    if let Some(Value::Object(properties)) = fields.get("properties") {
        words.extend(properties.keys().cloned());
    }
    if let Some(Value::Array(values)) = fields.get("enum") {
        words.extend(values.iter().filter_map(Value::as_str).map(str::to_owned));
    }
    for inner in fields.values() {
        collect_words(inner, words);
    }
}
