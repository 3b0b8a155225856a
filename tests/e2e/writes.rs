//! How much the controller writes to the API server: little for each Agent, nothing at rest.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::json;

use super::agents::{Agent, script, scripted};
use super::cluster::{self, Namespace, alone, figure};
use super::host;
use crate::support::kubectl::Kubectl;

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
            "agents" | "configmaps" | "serviceaccounts" | "networkpolicies" | "secrets" | "events" => true,
            "pods" => subresource.is_empty(),
            // Kubernetes' own controllers bind claims and volumes with PUT.
            "persistentvolumeclaims" => subresource.is_empty() && verb != "PUT",
            _ => false,
        };
        if is_write && may_be_ours {
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

    let (before, events) = (writes(kubectl), our_events(kubectl));
    let created = Instant::now();
    let watch = kubectl.watch("pods", &["--watch-only"]);
    let agent = Agent::apply(&namespace, "measured", &scripted("plan"), &json!({}));
    let deadline = Instant::now() + Duration::from_secs(30);
    watch.next(deadline).expect("a pod is created");
    figure(
        "apply_started_to_pod_object",
        format!("{:.0}", created.elapsed().as_secs_f64() * 1000.0),
        "ms",
    );
    agent.until_condition("Ready", "True", "LoopRunning", 60);
    figure(
        "apply_started_to_running",
        format!("{:.1}", created.elapsed().as_secs_f64()),
        "s",
    );
    let running = ours(&difference(&before, &writes(kubectl)), our_events(kubectl) - events);
    agent.until_state("Sleeping", 60);
    let asleep = ours(&difference(&before, &writes(kubectl)), our_events(kubectl) - events);
    figure(
        "api_writes_per_agent_to_running",
        total(&running),
        &format!("writes {running:?}"),
    );
    figure(
        "api_writes_per_agent_to_first_sleep",
        total(&asleep),
        &format!("writes {asleep:?}"),
    );
    assert!(
        total(&running) - running["events"] <= 4,
        "pod, claim, two status: {running:?}"
    );

    let fleet: Vec<_> = (0..18)
        .map(|n| Agent::apply(&namespace, &format!("fleet-{n}"), &scripted("plan"), &json!({})))
        .collect();
    for agent in &fleet {
        agent.until_state("Sleeping", 180);
    }
    memory(kubectl, &cluster.system);
    rest(kubectl);
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
    let uid = |pod: &serde_json::Value| pod["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
    for role in ["worker", "gateway"] {
        let pid = host::process(&uid(&pods[0]), role).expect("it runs");
        figure(&format!("rss_{role}_asleep"), host::resident_kib(pid), "KiB");
    }
    let pid = host::process(&uid(&cluster::leader(system)), "controller").expect("it runs");
    figure("rss_controller_with_20_agents", host::resident_kib(pid), "KiB");
}

/// The counts of what the controller wrote, events told apart; the user's own `apply` left out.
fn ours(all: &Writes, events: u64) -> Writes {
    let mut ours: Writes = all
        .iter()
        .filter(|(key, _)| !key.starts_with("events"))
        .map(|(key, n)| (key.clone(), *n))
        .collect();
    ours.remove("agents/ POST");
    ours.insert("events".into(), events);
    ours
}

fn total(writes: &Writes) -> u64 {
    writes.values().sum()
}
