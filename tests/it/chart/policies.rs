//! Admission policies of the chart, installed on a real API server.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::kubectl::Kubectl;

const SOON: Duration = Duration::from_mins(1);

/// Objects of the chart, and a namespace with Agents. Both are deleted with this value.
pub struct InstalledPolicies {
    pub cluster: Kubectl,
    pub objects: Vec<Value>,
    /// The namespace.
    pub tenant: String,
    _one: MutexGuard<'static, ()>,
}

impl InstalledPolicies {
    /// Waits for `one`, which the tests that install the same objects share, and applies `objects` after the namespace
    /// and what else they need.
    pub fn install(
        one: &'static Mutex<()>,
        cluster: Kubectl,
        tenant: String,
        (needs, objects): (&[Value], Vec<Value>),
    ) -> Self {
        let one = one.lock().unwrap_or_else(PoisonError::into_inner);
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": tenant}});
        for object in [&namespace].into_iter().chain(needs).chain(&objects) {
            cluster.apply(&object.to_string());
        }
        Self {
            cluster,
            objects,
            tenant,
            _one: one,
        }
    }

    /// What the API server answers to a user with these options of kubectl; empty if it allows the request.
    pub fn answer(&self, user: &[&str], args: &[&str], input: Option<&Value>) -> String {
        let mut command = self.cluster.command(args);
        command.args(user).arg("--dry-run=server");
        let directory = tempfile::tempdir().unwrap();
        if let Some(input) = input {
            let file = directory.path().join("object.json");
            std::fs::write(&file, input.to_string()).unwrap();
            command.arg("-f").arg(file);
        }
        let ended = command.output().unwrap();
        let error = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(
            ended.status.success() || error.contains("orbidden"),
            "{args:?}: {error}"
        );
        if ended.status.success() { String::new() } else { error }
    }

    /// The API server's warnings about the expressions of a policy; null if there are none.
    pub fn expression_warnings(&self, policy: &str) -> Value {
        self.cluster
            .until("checked", 60, "validatingadmissionpolicy", policy, |policy| {
                let checked = policy["status"].get("typeChecking")?;
                Some(checked["expressionWarnings"].clone())
            })
    }
}

impl Drop for InstalledPolicies {
    fn drop(&mut self) {
        for object in &self.objects {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let (kind, name) = (text(&object["kind"]), text(&object["metadata"]["name"]));
            let cluster = self.cluster.in_namespace(&text(&object["metadata"]["namespace"]));
            cluster.run(&["delete", &kind, &name, "--wait=false"]);
        }
        self.cluster.run(&["delete", "namespace", &self.tenant, "--wait=false"]);
    }
}

/// Waits until policies and roles are in effect. The server takes a moment to know them, and no event announces when it does.
pub fn wait_until(mut are_in_effect: impl FnMut() -> bool) {
    let start = Instant::now();
    while !are_in_effect() {
        assert!(start.elapsed() < SOON, "the policies have no effect");
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Expects a refusal that contains `text`.
#[track_caller]
#[expect(clippy::needless_pass_by_value, reason = "callers pass the answer of a call")]
pub fn expect_refusal(answer: String, text: &str) {
    assert!(answer.contains(text), "«{text}»: {answer}");
}
