//! Runs `helm template` and reads what comes out.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;
use serde_json::Value;

use crate::support::clusters::skip;
use crate::support::kubectl::tool;

/// A file or directory of this repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The command `helm`, or `None` after saying loudly that the test is skipped.
pub fn helm() -> Option<Command> {
    let program = tool("helm");
    if Command::new(&program).arg("version").output().is_ok() {
        return Some(Command::new(program));
    }
    skip("helm is missing; `make test` builds it for this test");
    None
}

/// What the chart renders with these settings, or what helm says against them.
pub fn render(settings: &[&str]) -> Option<Result<Rendered, String>> {
    render_chart(&repository("charts/agentloop"), settings)
}

/// The same of the chart in this directory.
pub fn render_chart(chart: &Path, settings: &[&str]) -> Option<Result<Rendered, String>> {
    let mut command = helm()?;
    command
        .args(["template", "agentloop", "--namespace", "agentloop-system"])
        .arg(chart);
    for setting in settings {
        command.args(["--set", setting]);
    }
    let ended = command.output().unwrap();
    if !ended.status.success() {
        return Some(Err(String::from_utf8_lossy(&ended.stderr).into_owned()));
    }
    let text = String::from_utf8(ended.stdout).unwrap();
    // By way of YAML values, which refuse a key that occurs twice, as Kustomize and Flux do.
    let documents = serde_yaml::Deserializer::from_str(&text)
        .map(|document| serde_yaml::Value::deserialize(document).expect("YAML without repeated keys"))
        .map(|document| serde_json::to_value(document).unwrap());
    Some(Ok(Rendered(documents.filter(|document| !document.is_null()).collect())))
}

/// Rendered objects.
#[derive(Debug)]
pub struct Rendered(pub Vec<Value>);

impl Rendered {
    /// The object of that kind and name.
    pub fn one(&self, kind: &str, name: &str) -> &Value {
        self.find(kind, name).unwrap_or_else(|| panic!("no {kind} {name}"))
    }

    /// Whether there is an object of that kind and name.
    pub fn has(&self, kind: &str, name: &str) -> bool {
        self.find(kind, name).is_some()
    }

    fn find(&self, kind: &str, name: &str) -> Option<&Value> {
        self.0
            .iter()
            .find(|object| object["kind"] == kind && object["metadata"]["name"] == name)
    }
}

/// All containers of a pod's spec.
pub fn containers(pod: &Value) -> impl Iterator<Item = &Value> {
    ["containers", "initContainers"]
        .into_iter()
        .flat_map(|list| pod[list].as_array().into_iter().flatten())
}

/// An environment variable of a container.
pub fn variable<'a>(container: &'a Value, name: &str) -> Option<&'a Value> {
    container["env"]
        .as_array()?
        .iter()
        .find(|variable| variable["name"] == name)
}
