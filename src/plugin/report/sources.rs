//! What a report is made from, as far as the user may read it.

use axum::http::Request;
use jiff::Timestamp;
use kube::Client;
use serde::Serialize;
use serde_json::{Value, json};

use crate::api::GROUP;
use crate::plugin::failure::is_forbidden;
use crate::plugin::session::PluginSession;

/// Maximum number of Events, counted from the newest.
pub const MAX_EVENTS: usize = 500;
/// Maximum number of lines of the log of one container, counted from the newest.
pub const MAX_LINES: usize = 2_000;
/// Maximum number of bytes of it.
pub const MAX_LOG_BYTES: usize = 1024 * 1024;
/// Maximum number of pods whose logs are read.
const MAX_LOGS: usize = 4;
/// Label of the pods of the chart and of those that the controller creates. Their names may be other ones.
const PROJECT_LABEL: &str = "app.kubernetes.io/part-of";
/// Label of the part that a pod is.
const COMPONENT_LABEL: &str = "app.kubernetes.io/component";

/// What could not be read.
#[derive(Serialize, Clone, Debug, PartialEq, Eq)]
pub struct Unread {
    /// The objects.
    pub what: String,
    /// Why, without words of the server.
    pub problem: String,
}

/// What a report is made from. Absent: it could not be read, see [`Self::missing`].
#[derive(Clone, Debug, Default)]
pub struct ReportSources {
    /// The time.
    pub now: Timestamp,
    /// Versions of the API server and of the images.
    pub versions: Value,
    /// The Agents.
    pub agents: Option<Vec<Value>>,
    /// The Sensors.
    pub sensors: Option<Vec<Value>>,
    /// The AgentBudgets.
    pub budgets: Option<Vec<Value>>,
    /// Events of these and of their pods.
    pub events: Option<Vec<Value>>,
    /// Pods of Agents and Sensors, and of the controller.
    pub pods: Option<Vec<Value>>,
    /// Logs of the controller, by pod.
    pub logs: Vec<(String, String)>,
    /// The result of `check`.
    pub check: Option<Value>,
    /// What could not be read.
    pub missing: Vec<Unread>,
}

impl ReportSources {
    /// Reads what the user may read.
    pub async fn read(session: &PluginSession) -> Self {
        let mut sources = Self {
            now: session.now(),
            ..Self::default()
        };
        let (client, namespace) = (&session.client, &session.namespace);
        let own = |plural: &str| format!("/apis/{GROUP}/v1alpha1/namespaces/{namespace}/{plural}");
        for (kind, plural) in [
            ("Agent", "agents"),
            ("Sensor", "sensors"),
            ("AgentBudget", "agentbudgets"),
        ] {
            let found = sources.list(client, plural, &own(plural)).await;
            // Items of a list have no kind.
            let found = found.map(|items| items.into_iter().map(|item| with_kind(item, kind)).collect());
            match kind {
                "Agent" => sources.agents = found,
                "Sensor" => sources.sensors = found,
                _ => sources.budgets = found,
            }
        }
        let pods = sources
            .list(client, "pods", &format!("/api/v1/namespaces/{namespace}/pods"))
            .await;
        let system = &session.controller_namespace;
        let path = format!("/api/v1/namespaces/{system}/pods");
        let what = format!("pods of namespace {system}");
        let controllers = sources.list(client, &what, &path).await;
        let controllers = controllers.map(|pods| pods.into_iter().filter(is_controller).collect::<Vec<_>>());
        // Those of the controller are added below.
        let is_other = |pod: &Value| is_ours(pod) && (namespace != system || !is_controller(pod));
        let ours = pods.map(|pods| pods.into_iter().filter(is_other).collect::<Vec<_>>());
        sources.pods = match (ours, controllers.clone()) {
            (None, None) => None,
            (one, other) => Some(one.into_iter().chain(other).flatten().collect()),
        };
        let events = sources
            .list(client, "events", &format!("/api/v1/namespaces/{namespace}/events"))
            .await;
        sources.events = events.map(newest);
        for pod in controllers.iter().flatten().take(MAX_LOGS) {
            sources.read_log(client, system, pod).await;
        }
        sources.versions = json!({
            "apiServer": client.apiserver_version().await.ok().map(|version| version.git_version),
            "controller": controllers.iter().flatten().filter_map(image).collect::<Vec<_>>(),
        });
        sources
    }

    /// The objects of a list, or an entry of [`Self::missing`].
    async fn list(&mut self, client: &Client, what: &str, path: &str) -> Option<Vec<Value>> {
        let request = Request::get(path).body(Vec::new()).ok()?;
        match client.request::<Value>(request).await {
            Ok(mut list) => Some(list["items"].as_array_mut().map(std::mem::take).unwrap_or_default()),
            Err(error) => {
                self.miss(what, &error);
                None
            }
        }
    }

    async fn read_log(&mut self, client: &Client, namespace: &str, pod: &Value) {
        let Some(name) = pod["metadata"]["name"].as_str() else {
            return;
        };
        let path =
            format!("/api/v1/namespaces/{namespace}/pods/{name}/log?tailLines={MAX_LINES}&limitBytes={MAX_LOG_BYTES}");
        let Ok(request) = Request::get(path).body(Vec::new()) else {
            return;
        };
        match client.request_text(request).await {
            Ok(text) => self.logs.push((name.to_owned(), text)),
            Err(error) => self.miss(&format!("log of pod {namespace}/{name}"), &error),
        }
    }

    /// Notes what could not be read. The message of the server may contain anything.
    pub fn miss(&mut self, what: &str, error: &kube::Error) {
        let problem = if is_forbidden(error) {
            "you may not read it".to_owned()
        } else if let kube::Error::Api(status) = error {
            format!("the API server answered {}", status.code)
        } else {
            "the API server did not respond in time, or its response could not be parsed".to_owned()
        };
        self.missing.push(Unread {
            what: what.to_owned(),
            problem,
        });
    }
}

fn with_kind(mut item: Value, kind: &str) -> Value {
    item["kind"] = kind.into();
    item
}

fn label<'a>(pod: &'a Value, label: &str) -> Option<&'a str> {
    pod["metadata"]["labels"][label].as_str()
}

fn is_ours(pod: &Value) -> bool {
    label(pod, PROJECT_LABEL) == Some("agentloop")
}

fn is_controller(pod: &Value) -> bool {
    is_ours(pod) && label(pod, COMPONENT_LABEL) == Some("controller")
}

fn image(pod: &Value) -> Option<String> {
    let image = pod["spec"]["containers"][0]["image"].as_str()?;
    // The name of a registry may be private; the tag is what is needed.
    Some(image.rsplit('/').next()?.to_owned())
}

/// The Events about objects of this project, the newest last.
fn newest(events: Vec<Value>) -> Vec<Value> {
    let is_of_project = |event: &Value| {
        let involved = &event["involvedObject"];
        let group = involved["apiVersion"].as_str().unwrap_or_default();
        group.starts_with(GROUP) || involved["kind"] == "Pod"
    };
    let mut events: Vec<Value> = events.into_iter().filter(is_of_project).collect();
    let at = |event: &Value| {
        let times = ["lastTimestamp", "eventTime", "firstTimestamp"];
        let time = times.into_iter().find_map(|field| event[field].as_str());
        time.unwrap_or_default().to_owned()
    };
    events.sort_by_key(at);
    let more = events.len().saturating_sub(MAX_EVENTS);
    events.drain(..more);
    events
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_of_agents_of_sensors_and_of_a_controller_with_another_name_belong_to_a_report() {
        let controller = |name: &str, part_of: &str, component: &str| {
            json!({"metadata": {"labels": {"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": part_of,
                "app.kubernetes.io/component": component, "app.kubernetes.io/managed-by": "Helm"}}})
        };
        let created = |name: &str, component: &str| {
            json!({"metadata": {"labels": {"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": "agentloop",
                "app.kubernetes.io/component": component, "app.kubernetes.io/managed-by": "agentloop-controller"}}})
        };
        for pod in [created("agent", "loop"), created("sensor", "sensor")] {
            assert!(is_ours(&pod) && !is_controller(&pod), "{pod}");
        }
        for name in ["agentloop", "loops"] {
            let pod = controller(name, "agentloop", "controller");
            assert!(is_ours(&pod) && is_controller(&pod), "{pod}");
        }
        for other in [controller("agentloop", "shop", "controller"), json!({"metadata": {}})] {
            assert!(!is_ours(&other) && !is_controller(&other), "{other}");
        }
    }
}
