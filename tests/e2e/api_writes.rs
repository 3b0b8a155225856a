//! How much the controller writes to the API server: little for each Agent, nothing at rest.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::json;

use super::agents::{Agent, condition, manifest, script, scripted};
use super::cluster::{self, AGENTS, Namespace, alone, figure};
use super::node;
use crate::support::{http, kubectl::Kubectl};

/// Seconds between two writes of a status that only update its counters (`SLOW` of the controller).
const STATUS_STEP: u64 = 15;

/// Writes to the API server so far, by `resource/subresource verb`.
type Writes = BTreeMap<String, u64>;

/// What the API server itself counted. Leases and what only the node and Kubernetes' own controllers write are left out.
fn writes(kubectl: &Kubectl) -> Writes {
    let page = kubectl.raw("/metrics");
    let mut all = Writes::new();
    for line in page.lines().filter(|line| line.starts_with("apiserver_request_total{")) {
        let label = |name: &str| {
            let at = line.find(&format!("{name}=\"")).map(|at| at + name.len() + 2);
            at.and_then(|at| line[at..].split('"').next())
                .unwrap_or_default()
                .to_owned()
        };
        let (resource, subresource, verb) = (label("resource"), label("subresource"), label("verb"));
        let is_write = ["POST", "PUT", "PATCH", "APPLY", "DELETE"].contains(&verb.as_str());
        let may_be_ours = match resource.as_str() {
            "agents" | "events" => true,
            "configmaps" | "networkpolicies" | "pods" | "secrets" | "serviceaccounts" => subresource.is_empty(),
            // Kubernetes' own controllers bind claims and volumes with PUT.
            "persistentvolumeclaims" => subresource.is_empty() && verb != "PUT",
            _ => false,
        };
        // A refused write writes nothing: Kubernetes' own controllers create a ConfigMap in namespaces that end meanwhile.
        let is_done = label("code").starts_with('2');
        if is_write && may_be_ours && is_done {
            let count = line.rsplit(' ').next().and_then(|text| text.parse().ok()).unwrap_or(0);
            *all.entry(format!("{resource}/{subresource} {verb}")).or_default() += count;
        }
    }
    all
}

fn difference(before: &Writes, after: &Writes) -> Writes {
    let changed = after
        .iter()
        .map(|(key, count)| (key.clone(), count - before.get(key).unwrap_or(&0)));
    changed.filter(|(_, count)| *count > 0).collect()
}

/// Events the controller wrote in this namespace: the API server counts those of kubelet and scheduler too.
fn our_events(kubectl: &Kubectl) -> u64 {
    let events = kubectl.ok(&["get", "events", "-o", "json"]);
    let events: serde_json::Value = serde_json::from_str(&events).expect("kubectl prints JSON");
    let all = events["items"].as_array().into_iter().flatten();
    all.filter(|event| {
        event["reportingComponent"]
            .as_str()
            .is_some_and(|name| name.contains("agentloop"))
    })
    .count() as u64
}

#[test]
fn an_agent_costs_few_writes_and_a_sleeping_fleet_none() {
    let Some(cluster) = alone() else { return };
    let namespace = Namespace::new(&cluster.system, "writes");
    let kubectl = &namespace.kubectl;
    kubectl.apply(&script(
        "plan",
        &json!({"turns": [{"text": "hello", "delayMilliseconds": 3000}, {"yield": {"sleep": 3600}}]}),
    ));
    // The first Agent brings what a namespace has once: service account, CA bundle.
    Agent::apply(&namespace, "first", &scripted("plan"), &json!({})).until_state("Sleeping", 90);

    one_agent(kubectl);
    let fleet: Vec<_> = (0..18)
        .map(|n| Agent::apply(&namespace, &format!("fleet-{n}"), &scripted("plan"), &json!({})))
        .collect();
    for agent in &fleet {
        agent.until_state("Sleeping", 180);
    }
    memory(kubectl, &cluster.system);
    rest(kubectl);
}

/// Creates one Agent and counts what it costs until it runs, and until it sleeps.
fn one_agent(kubectl: &Kubectl) {
    let before = (writes(kubectl), our_events(kubectl));
    let pods = kubectl.watch("pods", &["--watch-only"]);
    let statuses = kubectl.watch(AGENTS, &[]);
    statuses
        .next(Instant::now() + Duration::from_secs(30))
        .expect("the first Agent: the watch stands");
    let proxy = kubectl.proxy();
    let path = format!("/apis/agentloop.dev/v1alpha1/namespaces/{}/agents", kubectl.namespace());
    let body = manifest("measured", &scripted("plan"), &json!({}));
    let created = Instant::now();
    let (status, answer) = http::request(proxy.address(), "POST", &path, "application/json", &body);
    assert_eq!(status, 201, "{answer}");
    pods.next(created + Duration::from_secs(30)).expect("a pod is created");
    figure(
        "created_to_pod_object_seen",
        format!("{:.0}", created.elapsed().as_secs_f64() * 1000.0),
        "ms",
    );

    let mut patches = 0;
    for (state, name) in [("Running", "running"), ("Sleeping", "first_sleep")] {
        loop {
            let event = statuses
                .next(created + Duration::from_secs(90))
                .unwrap_or_else(|| panic!("never {state}"));
            if event.object["metadata"]["name"] != "measured" {
                continue;
            }
            patches += u64::from(event.kind == "MODIFIED");
            let is_ready = condition(&event.object, "Ready").is_some_and(|ready| ready["status"] == "True");
            if is_ready && event.object["status"]["loop"]["state"] == state {
                break;
            }
        }
        let took = created.elapsed();
        figure(
            &format!("created_to_{name}_in_status"),
            format!("{:.1}", took.as_secs_f64()),
            "s",
        );
        let mut cost = difference(&before.0, &writes(kubectl));
        // Of Agents only the status of this one counts, and of Events those of the controller. A new Agent deletes nothing: what is
        // deleted is of the namespaces of earlier tests, which end meanwhile.
        cost.retain(|key, _| !key.starts_with("agents") && !key.starts_with("events") && !key.ends_with(" DELETE"));
        cost.insert("its status".into(), patches);
        figure(
            &format!("api_writes_per_agent_to_{name}"),
            total(&cost),
            &format!("writes {cost:?}"),
        );
        figure(
            &format!("events_per_agent_to_{name}"),
            our_events(kubectl) - before.1,
            "Events",
        );
        // An Agent that takes longer to start has more to report.
        let most = 4 + took.as_secs() / STATUS_STEP;
        assert!(
            name != "running" || total(&cost) <= most,
            "pod, claim, two status, at most {most} in {took:?}: {cost:?}"
        );
    }
}

/// Nothing is written while nothing changes. The first half minute lets the last reports of the fleet settle.
fn rest(kubectl: &Kubectl) {
    let seconds = std::env::var("AGENTLOOP_E2E_IDLE_SECONDS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(20);
    let deadline = Instant::now() + Duration::from_secs(90);
    loop {
        let before = writes(kubectl);
        std::thread::park_timeout(Duration::from_secs(seconds));
        let idle = difference(&before, &writes(kubectl));
        figure(
            &format!("controller_writes_in_{seconds}_idle_seconds_with_20_agents"),
            total(&idle),
            "writes",
        );
        if idle.is_empty() {
            return;
        }
        assert!(Instant::now() < deadline, "the controller writes at rest: {idle:?}");
    }
}

/// Resident memory of each role.
fn memory(kubectl: &Kubectl, system: &Kubectl) {
    let pods = kubectl.list("pods", "agentloop.dev/agent=measured");
    for role in ["worker", "gateway"] {
        let pid = node::pid(&pods[0], role);
        figure(&format!("rss_{role}_asleep"), node::resident_kib(pid), "KiB");
    }
    let pid = node::pid(&cluster::leader(system), "controller");
    figure("rss_controller_with_20_agents", node::resident_kib(pid), "KiB");
}

fn total(writes: &Writes) -> u64 {
    writes.values().sum()
}
