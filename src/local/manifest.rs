//! Manifests from files: the objects of a run, and all mistakes in them.
//!
//! Reads everything before it reports anything, so that one run shows every mistake. Starts nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

use k8s_openapi::ByteString;
use serde_json::{Map, Value, json};

use crate::api::sensor::SensorSource;
use crate::api::{Agent, AgentBudget, Sensor};
use crate::api_server::object_key::{AGENTS, BUDGETS, CONFIG_MAPS, NAMESPACES, SECRETS, SENSORS};
use crate::api_server::{ObjectKey, ObjectSchema};
use crate::controller::agent::{ReconcilerSettings, ReferenceKind, find_problem};
use crate::controller::sensor::secrets::required;
use crate::sensor_pipeline;

use super::documents::{self, YamlDocument};

/// Namespace of objects without one.
pub const DEFAULT_NAMESPACE: &str = "default";
/// Group and version of the project's kinds.
const OURS: &str = "agentloop.dev/v1alpha1";

/// One object of a file.
#[derive(Clone, Debug)]
pub struct ManifestObject {
    pub key: ObjectKey,
    /// The object, with its namespace.
    pub object: Value,
    /// Its position, for messages.
    pub place: String,
}

/// Mistakes in the user's input: nothing was started.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ManifestError(pub Vec<String>);

impl fmt::Display for ManifestError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.0.len();
        let noun = if count == 1 { "error" } else { "errors" };
        write!(formatter, "{count} {noun}, nothing was started")?;
        self.0.iter().try_for_each(|mistake| write!(formatter, "\n  {mistake}"))
    }
}

impl std::error::Error for ManifestError {}

/// A key of a Secret whose value comes from the environment: `<secret>/<key>=<variable>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretSource {
    /// Name of the Secret, in every namespace with Agents.
    pub secret: String,
    pub key: String,
    pub variable: String,
}

impl std::str::FromStr for SecretSource {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts = text.split_once('=').and_then(|(left, variable)| {
            let (secret, key) = left.split_once('/')?;
            let all = [secret, key, variable];
            all.iter()
                .all(|part| !part.is_empty())
                .then_some((secret, key, variable))
        });
        let (secret, key, variable) =
            parts.ok_or("must be <secret>/<key>=<variable>, such as openai/api-key=OPENAI_API_KEY")?;
        Ok(Self {
            secret: secret.into(),
            key: key.into(),
            variable: variable.into(),
        })
    }
}

/// What the checks need from outside.
pub struct CheckContext<'a> {
    /// An object as an earlier run left it.
    pub kept: &'a dyn Fn(&ObjectKey) -> Option<Value>,
    /// A variable of the environment.
    pub variable: &'a dyn Fn(&str) -> Option<String>,
    /// The settings of the platform.
    pub settings: &'a ReconcilerSettings,
}

/// The name of a file, and its text or why it cannot be read.
pub type ManifestText = (String, Result<String, String>);

/// Reads files (`-`: standard input; a directory: its YAML and JSON files).
#[must_use]
pub fn texts(files: &[PathBuf]) -> Vec<ManifestText> {
    let read = |name: String, text: std::io::Result<String>| (name, text.map_err(|error| error.to_string()));
    let mut all = Vec::new();
    for file in files {
        let name = file.display().to_string();
        if file == Path::new("-") {
            let mut text = String::new();
            let whole = std::io::stdin().read_to_string(&mut text).map(|_| text);
            all.push(read("standard input".into(), whole));
        } else if file.is_dir() {
            match in_directory(file) {
                Ok(files) => all.extend(
                    files
                        .iter()
                        .map(|file| read(file.display().to_string(), std::fs::read_to_string(file))),
                ),
                Err(error) => all.push((name, Err(error.to_string()))),
            }
        } else {
            all.push(read(name, std::fs::read_to_string(file)));
        }
    }
    all
}

fn in_directory(directory: &Path) -> std::io::Result<Vec<PathBuf>> {
    let entries: std::io::Result<Vec<_>> = std::fs::read_dir(directory)?.collect();
    let mut files: Vec<PathBuf> = entries?.into_iter().map(|entry| entry.path()).collect();
    files.retain(|file| {
        let extension = file.extension().and_then(|extension| extension.to_str());
        extension.is_some_and(|extension| ["yaml", "yml", "json"].contains(&extension))
    });
    files.sort();
    Ok(files)
}

/// Parses the objects in these texts, and checks them.
pub fn read(
    texts: &[ManifestText],
    secrets: &[SecretSource],
    world: &CheckContext<'_>,
) -> Result<Vec<ManifestObject>, ManifestError> {
    let mut mistakes = Vec::new();
    let mut manifests = Vec::new();
    for (name, text) in texts {
        match text {
            Ok(text) => documents(name, text, &mut manifests, &mut mistakes),
            Err(error) => mistakes.push(format!("{name}: {error}")),
        }
    }
    unique(&manifests, &mut mistakes);
    from_environment(&mut manifests, secrets, world, &mut mistakes);
    if mistakes.is_empty() {
        check(&manifests, world, &mut mistakes);
    }
    if mistakes.is_empty() {
        Ok(with_namespaces(manifests))
    } else {
        Err(ManifestError(mistakes))
    }
}

fn documents(file: &str, text: &str, manifests: &mut Vec<ManifestObject>, mistakes: &mut Vec<String>) {
    for (index, document) in documents::parse(text).enumerate() {
        let place = format!("{file}, document {}", index + 1);
        match document {
            Ok(document) if document.value.is_null() => {}
            Ok(document) => objects(document, &place, manifests, mistakes),
            Err(reason) => {
                mistakes.push(format!(
                    "{place}: invalid YAML: {reason}; correct it, the rest of the file was not read"
                ));
                return;
            }
        }
    }
}

/// The object of a document, or the items of its List, each like a document of its own.
fn objects(mut document: YamlDocument, place: &str, manifests: &mut Vec<ManifestObject>, mistakes: &mut Vec<String>) {
    let is_list = document.value["apiVersion"] == "v1" && document.value["kind"] == "List";
    if !is_list {
        return object(document, place, manifests, mistakes);
    }
    // Another type is reported below.
    let items = match document.value["items"].take() {
        Value::Array(items) => Some(items),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Object(_) => None,
    };
    let is_sequence = items.is_some();
    for (index, value) in items.into_iter().flatten().enumerate() {
        let item = YamlDocument {
            value,
            mistakes: document.take_mistakes(&format!("items[{index}]")),
        };
        object(item, &format!("{place}, item {}", index + 1), manifests, mistakes);
    }
    mistakes.extend(document.mistakes.iter().map(|mistake| format!("{place}: {mistake}")));
    if !is_sequence {
        mistakes.push(format!("{place}: items of a List must be a list of objects"));
    }
}

fn object(document: YamlDocument, place: &str, manifests: &mut Vec<ManifestObject>, mistakes: &mut Vec<String>) {
    mistakes.extend(document.mistakes.iter().map(|mistake| format!("{place}: {mistake}")));
    match manifest(document.value, place) {
        Ok(manifest) => manifests.push(manifest),
        Err(mistake) => mistakes.push(format!("{place}: {mistake}")),
    }
}

fn manifest(mut object: Value, place: &str) -> Result<ManifestObject, String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (version, kind) = (text(&object["apiVersion"]), text(&object["kind"]));
    let resource = match (version.as_str(), kind.as_str()) {
        (OURS, "Agent") => AGENTS,
        (OURS, "AgentBudget") => BUDGETS,
        (OURS, "Sensor") => SENSORS,
        ("v1", "ConfigMap") => CONFIG_MAPS,
        ("v1", "Secret") => SECRETS,
        ("v1", "Namespace") => NAMESPACES,
        _ => {
            return Err(format!(
                "apiVersion {version:?} with kind {kind:?} is not supported locally: use Agent, AgentBudget or Sensor of {OURS}, or \
                 ConfigMap, Secret or Namespace of v1"
            ));
        }
    };
    let name = text(&object["metadata"]["name"]);
    if !is_name(&name) {
        return Err(format!(
            "metadata.name of this {kind} must consist of 1 to 253 lower-case letters, digits, '-' and '.'"
        ));
    }
    for field in ["labels", "annotations"] {
        let entries = mapping(&object["metadata"], field)
            .map_err(|_| format!("metadata.{field} of {kind} {name} must be a mapping of names to strings"))?;
        if entries.is_some_and(|entries| entries.values().any(|value| !value.is_string())) {
            return Err(format!(
                "metadata.{field} of {kind} {name} must have string values: put the value in quotes"
            ));
        }
    }
    let namespace = match text(&object["metadata"]["namespace"]) {
        _ if resource == NAMESPACES => String::new(),
        namespace if namespace.is_empty() => DEFAULT_NAMESPACE.into(),
        namespace => namespace,
    };
    match resource {
        SECRETS => secret(&mut object).map_err(|mistake| format!("Secret {name}: {mistake}"))?,
        CONFIG_MAPS => config_map(&object).map_err(|mistake| format!("ConfigMap {name}: {mistake}"))?,
        _ => {}
    }
    if let Some(fields) = object.as_object_mut() {
        fields.remove("status");
    }
    Ok(ManifestObject {
        key: ObjectKey::new(resource, &namespace, &name),
        object,
        place: format!("{place} ({kind} {name})"),
    })
}

fn is_name(name: &str) -> bool {
    let fine = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-' || byte == b'.';
    let ends = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = name.as_bytes();
    bytes.len() <= 253 && bytes.iter().all(|byte| fine(*byte)) && ends(bytes.first()) && ends(bytes.last())
}

/// The entries of a field that may be absent.
fn mapping<'a>(object: &'a Value, field: &str) -> Result<Option<&'a Map<String, Value>>, String> {
    match &object[field] {
        Value::Null => Ok(None),
        Value::Object(entries) => Ok(Some(entries)),
        Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
            Err(format!("{field} must be a mapping of keys to values"))
        }
    }
}

/// Moves the values of `stringData` to `data`, as an API server does.
fn secret(object: &mut Value) -> Result<(), String> {
    for (key, value) in mapping(object, "data")?.into_iter().flatten() {
        serde_json::from_value::<ByteString>(value.clone())
            .map_err(|_| format!("data.{key} is not valid base64: use stringData for plain text"))?;
    }
    let texts = mapping(object, "stringData")?.cloned().unwrap_or_default();
    for (key, value) in texts {
        let text = value
            .as_str()
            .ok_or_else(|| format!("stringData.{key} is not a string: put it in quotes"))?;
        object["data"][key.as_str()] = json!(ByteString(text.as_bytes().to_vec()));
    }
    if let Some(fields) = object.as_object_mut() {
        fields.remove("stringData");
    }
    Ok(())
}

fn config_map(object: &Value) -> Result<(), String> {
    let mut data = mapping(object, "data")?.into_iter().flatten();
    data.find(|(_, value)| !value.is_string()).map_or(Ok(()), |(key, _)| {
        Err(format!("data.{key} is not a string: put it in quotes"))
    })
}

fn unique(manifests: &[ManifestObject], mistakes: &mut Vec<String>) {
    let mut places: BTreeMap<&ObjectKey, &str> = BTreeMap::new();
    for manifest in manifests {
        if let Some(before) = places.insert(&manifest.key, &manifest.place) {
            mistakes.push(format!(
                "{}: duplicate of the object in {before}: remove one of them",
                manifest.place
            ));
        }
    }
}

/// Adds the keys of Secrets whose values come from the environment.
fn from_environment(
    manifests: &mut Vec<ManifestObject>,
    secrets: &[SecretSource],
    world: &CheckContext<'_>,
    mistakes: &mut Vec<String>,
) {
    let agents = manifests.iter().filter(|manifest| manifest.key.resource == AGENTS);
    let namespaces: BTreeSet<String> = agents.map(|manifest| manifest.key.namespace.clone()).collect();
    for source in secrets {
        let Some(value) = (world.variable)(&source.variable) else {
            mistakes.push(format!(
                "--secret-from-env {}/{}: environment variable {} is not set or not UTF-8",
                source.secret, source.key, source.variable
            ));
            continue;
        };
        for namespace in &namespaces {
            let key = ObjectKey::new(SECRETS, namespace, &source.secret);
            let encoded = json!(ByteString(value.as_bytes().to_vec()));
            match manifests.iter_mut().find(|manifest| manifest.key == key) {
                Some(known) => known.object["data"][source.key.as_str()] = encoded,
                None => manifests.push(ManifestObject {
                    object: json!({
                        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": source.secret},
                        "data": {source.key.as_str(): encoded},
                    }),
                    key,
                    place: "--secret-from-env".into(),
                }),
            }
        }
    }
}

/// What an API server and the controller would reject.
fn check(manifests: &[ManifestObject], world: &CheckContext<'_>, mistakes: &mut Vec<String>) {
    let schemas = [
        (AGENTS, ObjectSchema::of("agents.agentloop.dev")),
        (BUDGETS, ObjectSchema::of("agentbudgets.agentloop.dev")),
        (SENSORS, ObjectSchema::of("sensors.agentloop.dev")),
    ];
    let mut agents = 0;
    for manifest in manifests {
        let (key, place) = (&manifest.key, &manifest.place);
        let found = schemas.iter().find(|(resource, _)| *resource == key.resource);
        let Some((_, schema)) = found else { continue };
        let Some(schema) = schema else {
            mistakes.push(format!("{place}: cannot parse its schema; this is a bug in agentloop"));
            continue;
        };
        let problems = schema.problems(&manifest.object, (world.kept)(key).as_ref());
        let sound = problems.is_empty();
        mistakes.extend(problems.into_iter().map(|problem| format!("{place}: {problem}")));
        if key.resource == AGENTS {
            agents += 1;
        }
        if sound && let Err(mistake) = meaning(manifest, manifests, world) {
            mistakes.push(format!("{place}: {mistake}"));
        }
    }
    if agents == 0 && mistakes.is_empty() {
        mistakes.push("no Agent in these files: add one with -f".into());
    }
}

/// Checks that the controller makes: unusable objects, and references to objects that do not exist.
fn meaning(manifest: &ManifestObject, all: &[ManifestObject], world: &CheckContext<'_>) -> Result<(), String> {
    let key = &manifest.key;
    if key.resource == BUDGETS {
        return serde_json::from_value::<AgentBudget>(manifest.object.clone())
            .map(drop)
            .map_err(unreadable);
    }
    if key.resource == SENSORS {
        let sensor: Sensor = serde_json::from_value(manifest.object.clone()).map_err(unreadable)?;
        sensor_pipeline::check(&sensor.spec).map_err(|invalid| invalid.to_string())?;
        return secrets(&sensor.spec.source, |name| {
            let wanted = ObjectKey::new(SECRETS, &key.namespace, name);
            all.iter().find(|other| other.key == wanted).map(|found| &found.object)
        });
    }
    let agent: Agent = serde_json::from_value(manifest.object.clone()).map_err(unreadable)?;
    let find = |resource: &str, name: &str| {
        let wanted = ObjectKey::new(resource, &key.namespace, name);
        all.iter().find(|other| other.key == wanted)
    };
    for reference in &agent.spec.budget_refs {
        if find(BUDGETS, &reference.name).is_none() {
            return Err(format!(
                "spec.budgetRefs: AgentBudget {} not found in these files: add it, or correct the name",
                reference.name
            ));
        }
    }
    if let Some(field) = container_field(&agent) {
        return Err(format!(
            "{field}: agentloop run starts no containers: remove it, use a server with a url, or apply the Agent to a cluster"
        ));
    }
    let found = find_problem(&agent, world.settings, |kind, name| {
        let resource = match kind {
            ReferenceKind::ConfigMap => CONFIG_MAPS,
            ReferenceKind::Secret => SECRETS,
        };
        let data = find(resource, name)?.object["data"]
            .as_object()
            .cloned()
            .unwrap_or_default();
        let text = |value: Value| value.as_str().unwrap_or_default().to_owned();
        Some(data.into_iter().map(|(name, value)| (name, text(value))).collect())
    });
    found.map_or(Ok(()), Err)
}

/// The first field that asks for a container besides those of the loop.
fn container_field(agent: &Agent) -> Option<String> {
    let tools = &agent.spec.tools;
    let mut servers = tools.servers.iter().filter(|server| server.container.is_some());
    let builtin = (!tools.builtin.is_empty()).then(|| "spec.tools.builtin".to_owned());
    builtin.or_else(|| {
        servers
            .next()
            .map(|server| format!("spec.tools.servers[{}].container", server.name))
    })
}

/// Whether the Secrets of a source exist.
fn secrets<'a>(source: &SensorSource, find: impl Fn(&str) -> Option<&'a Value>) -> Result<(), String> {
    for needed in required(source) {
        let (field, name) = (&needed.field, needed.name);
        let secret = find(name).ok_or_else(|| {
            format!(
                "{field}: Secret {name} not found in these files: add it (or --secret-from-env), or correct the name"
            )
        })?;
        let keys: Vec<_> = secret["data"]
            .as_object()
            .into_iter()
            .flat_map(Map::keys)
            .cloned()
            .collect();
        if let Some(message) = needed.missing_keys(&keys) {
            return Err(message);
        }
    }
    Ok(())
}

/// The schema accepts the object and the type does not. The parser's message may repeat a text of the object.
#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn unreadable(error: serde_json::Error) -> String {
    format!(
        "cannot parse the object ({:?}); this is a bug in agentloop",
        error.classify()
    )
}

/// Adds every namespace that is used, with its label as in a cluster.
fn with_namespaces(mut manifests: Vec<ManifestObject>) -> Vec<ManifestObject> {
    let mut names: BTreeSet<String> = manifests
        .iter()
        .map(|manifest| manifest.key.namespace.clone())
        .collect();
    names.extend(
        manifests
            .iter()
            .filter(|m| m.key.resource == NAMESPACES)
            .map(|m| m.key.name.clone()),
    );
    names.remove("");
    for name in names {
        let key = ObjectKey::of_namespace(&name);
        if !manifests.iter().any(|manifest| manifest.key == key) {
            manifests.push(ManifestObject {
                object: json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": {} }),
                place: format!("namespace {name}"),
                key: key.clone(),
            });
        }
        for manifest in manifests.iter_mut().filter(|manifest| manifest.key == key) {
            manifest.object["metadata"]["labels"]["kubernetes.io/metadata.name"] = json!(name);
        }
    }
    manifests
}

#[cfg(test)]
mod tests;
