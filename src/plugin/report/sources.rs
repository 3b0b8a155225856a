//! What a report is made from, as far as the user may read it.

use std::collections::BTreeSet;
use std::fmt;

use axum::http::Request;
use jiff::Timestamp;
use kube::Client;
use serde::Serialize;
use serde_json::{Value, json};

use crate::api::GROUP;
use crate::link::pod::WORKER_CONTAINER;
use crate::plugin::failure::is_forbidden;
use crate::plugin::session::PluginSession;

/// Maximum number of Events, counted from the newest.
pub const MAX_EVENTS: usize = 500;
/// Maximum number of lines of the log of one container, counted from the newest.
pub const MAX_LINES: usize = 2_000;
/// Maximum number of bytes of it.
pub const MAX_LOG_BYTES: usize = 1024 * 1024;
/// Maximum number of pods of the controller whose logs are read.
const MAX_LOGS: usize = 4;
/// Maximum number of containers whose logs from before their last restart are read.
pub const MAX_PREVIOUS_LOGS: usize = 8;
/// Container of the controller.
const CONTROLLER_CONTAINER: &str = "controller";
/// The containers that write the log of this project, which a redaction can be made of. Those of tools write anything.
const OWN_CONTAINERS: [&str; 4] = [CONTROLLER_CONTAINER, WORKER_CONTAINER, "gateway", "sensor"];
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
    /// Logs of the controller, by pod, and those of containers from before their last restart.
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
        let others = pods.map(|pods| pods.into_iter().filter(is_other).collect::<Vec<_>>());
        sources.pods = match (others.clone(), controllers.clone()) {
            (None, None) => None,
            (one, other) => Some(one.into_iter().chain(other).flatten().collect()),
        };
        let events = sources
            .list(client, "events", &format!("/api/v1/namespaces/{namespace}/events"))
            .await;
        let own_pods = sources.own_pods(namespace);
        sources.events = events.map(|events| newest(events, &own_pods));
        for pod in controllers.iter().flatten().take(MAX_LOGS) {
            sources.read_log(client, &ContainerLog::current(pod)).await;
        }
        // Those of the controller first.
        let pods = controllers.iter().flatten();
        let pods = pods.chain(others.iter().flatten());
        let previous: Vec<ContainerLog<'_>> = pods.flat_map(ContainerLog::previous).collect();
        for log in previous.iter().take(MAX_PREVIOUS_LOGS) {
            sources.read_log(client, log).await;
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

    /// The names of the pods of this project in a namespace, and of those of its Agents that may be gone.
    fn own_pods(&self, namespace: &str) -> BTreeSet<String> {
        let pods = self.pods.iter().flatten();
        let pods = pods.filter(|pod| pod["metadata"]["namespace"] == namespace);
        // A pod has the name of its Agent.
        let objects = pods.chain(self.agents.iter().flatten());
        let names = objects.filter_map(|object| object["metadata"]["name"].as_str());
        names.map(str::to_owned).collect()
    }

    async fn read_log(&mut self, client: &Client, log: &ContainerLog<'_>) {
        let Ok(request) = Request::get(log.path()).body(Vec::new()) else {
            return;
        };
        match client.request_text(request).await {
            Ok(text) => self.logs.push((log.name(), text)),
            Err(error) => self.miss(&log.to_string(), &error),
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

/// The log of a container.
struct ContainerLog<'a> {
    namespace: &'a str,
    pod: &'a str,
    container: &'a str,
    /// Of the run before the last restart.
    is_previous: bool,
}

impl<'a> ContainerLog<'a> {
    /// What the container of a controller writes.
    fn current(pod: &'a Value) -> Self {
        Self::of(pod, CONTROLLER_CONTAINER, false)
    }

    /// What containers of a pod wrote that were restarted: the end of it is why.
    fn previous(pod: &'a Value) -> Vec<Self> {
        let lists = ["initContainerStatuses", "containerStatuses"];
        let containers = lists
            .into_iter()
            .flat_map(|list| pod["status"][list].as_array().into_iter().flatten());
        let restarted =
            containers.filter(|container| container["restartCount"].as_i64().is_some_and(|count| count > 0));
        let names = restarted.filter_map(|container| container["name"].as_str());
        let own = names.filter(|name| OWN_CONTAINERS.contains(name));
        own.map(|name| Self::of(pod, name, true)).collect()
    }

    fn of(pod: &'a Value, container: &'a str, is_previous: bool) -> Self {
        let text = |field: &str| pod["metadata"][field].as_str().unwrap_or_default();
        Self {
            namespace: text("namespace"),
            pod: text("name"),
            container,
            is_previous,
        }
    }

    fn path(&self) -> String {
        let Self {
            namespace,
            pod,
            container,
            is_previous,
        } = self;
        format!(
            "/api/v1/namespaces/{namespace}/pods/{pod}/log?container={container}&previous={is_previous}\
             &tailLines={MAX_LINES}&limitBytes={MAX_LOG_BYTES}"
        )
    }

    /// Its name in the report.
    fn name(&self) -> String {
        if self.is_previous {
            format!("{}.{}.previous", self.pod, self.container)
        } else {
            self.pod.to_owned()
        }
    }
}

impl fmt::Display for ContainerLog<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_previous {
            write!(formatter, "previous log of container {} in pod ", self.container)?;
        } else {
            write!(formatter, "log of pod ")?;
        }
        write!(formatter, "{}/{}", self.namespace, self.pod)
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

/// The Events about objects and pods of this project, the newest last.
fn newest(events: Vec<Value>, pods: &BTreeSet<String>) -> Vec<Value> {
    let is_of_project = |event: &Value| {
        let involved = &event["involvedObject"];
        let group = involved["apiVersion"].as_str().unwrap_or_default();
        let is_own_pod = || involved["name"].as_str().is_some_and(|name| pods.contains(name));
        group.starts_with(GROUP) || involved["kind"] == "Pod" && is_own_pod()
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

    #[test]
    fn events_of_pods_of_others_are_left_out() {
        let event = |name: &str, kind: &str, version: &str, at: &str| {
            json!({"metadata": {"name": name}, "lastTimestamp": at,
                "involvedObject": {"apiVersion": version, "kind": kind, "name": name}})
        };
        let events = vec![
            event("shop", "Pod", "v1", "2026-11-22T14:00:03Z"),
            event("helper", "Pod", "v1", "2026-11-22T14:00:02Z"),
            event("helper", "ConfigMap", "v1", "2026-11-22T14:00:01Z"),
            event("team", "AgentBudget", "agentloop.dev/v1alpha1", "2026-11-22T14:00:00Z"),
        ];
        let kept = newest(events, &BTreeSet::from(["helper".to_owned()]));
        let names = kept.iter().map(|event| event["metadata"]["name"].as_str().unwrap());
        assert_eq!(names.collect::<Vec<_>>(), ["team", "helper"]);
    }

    #[test]
    fn the_pods_whose_events_are_kept_are_those_of_the_namespace_and_of_agents_without_one() {
        let object = |namespace: &str, name: &str| json!({"metadata": {"namespace": namespace, "name": name}});
        let sources = ReportSources {
            pods: Some(vec![
                object("team-a", "s-sensor-0"),
                object("agentloop-system", "agentloop-0"),
            ]),
            agents: Some(vec![object("team-a", "helper")]),
            ..ReportSources::default()
        };
        let own = sources.own_pods("team-a").into_iter().collect::<Vec<_>>();
        assert_eq!(own, ["helper", "s-sensor-0"]);
    }

    #[test]
    fn containers_of_this_project_that_were_restarted_have_a_previous_log() {
        let container = |name: &str, restarts: i64| json!({"name": name, "restartCount": restarts});
        let pod = json!({"metadata": {"namespace": "team-a", "name": "helper"}, "status": {
            "initContainerStatuses": [container("gateway", 1), container("mcp-web", 3)],
            "containerStatuses": [container("worker", 0), container("sidecar", 1)]}});
        let logs = ContainerLog::previous(&pod);
        let logs: Vec<_> = logs
            .iter()
            .map(|log| [log.name(), log.path(), log.to_string()])
            .collect();
        let path = "/api/v1/namespaces/team-a/pods/helper/log?container=gateway&previous=true&tailLines=2000&limitBytes=1048576";
        let shown = "previous log of container gateway in pod team-a/helper";
        assert_eq!(logs, [["helper.gateway.previous", path, shown]]);
        let now = ContainerLog::current(&pod);
        assert!(
            now.path().contains("container=controller&previous=false&"),
            "{}",
            now.path()
        );
        assert_eq!([now.name(), now.to_string()], ["helper", "log of pod team-a/helper"]);
        assert!(ContainerLog::previous(&json!({})).is_empty());
    }
}
