//! Upgrade, rollback, failover and uninstall of the release do not affect running loops.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::agents::{Agent, script, scripted};
use super::cluster::{self, AGENTS, LEADER, Namespace, RELEASE, alone, figure};
use super::node;

/// An Agent that turns a few times a second, for ever.
pub(super) fn turning(namespace: &Namespace) -> Agent<'_> {
    namespace.kubectl.apply(&script(
        "plan",
        &json!({"turns": [{"text": "hello", "delayMilliseconds": 300}]}),
    ));
    let busy = json!({"guardrails": {"maxConsecutiveTurns": 10_000}});
    Agent::apply(namespace, "turning", &scripted("plan"), &busy)
}

/// The pod and its first container: a started one has another id.
pub(super) fn uid(pod: &Value) -> (String, String) {
    (
        pod["metadata"]["uid"].to_string(),
        pod["status"]["containerStatuses"][0]["containerID"].to_string(),
    )
}

pub(super) fn turns(agent: &Agent<'_>) -> i64 {
    agent.object()["status"]["usage"]["turns"].as_i64().unwrap_or(0)
}

#[test]
fn an_upgrade_of_the_controller_and_its_rollback_restart_no_loop() {
    let Some(cluster) = alone() else { return };
    let namespace = Namespace::new(&cluster.system, "upgrade");
    let agent = turning(&namespace);
    let pod = agent.until_pod(None, 60);
    agent.until_turns(3, 60);
    let old = cluster::leader(&cluster.system);
    cluster::install(&cluster.system, &["--set", "logLevel=debug"]);
    let new = cluster::leader(&cluster.system);
    assert_ne!(uid(&old), uid(&new), "the upgrade replaced the controller");
    agent.until_turns(turns(&agent) + 10, 60);
    agent.until_condition("Ready", "True", "LoopRunning", 60);
    assert_eq!(
        uid(&agent.until_pod(None, 30)),
        uid(&pod),
        "the upgrade restarted a loop"
    );
    cluster
        .system
        .helm(&["rollback", RELEASE, "--wait", "--timeout", "120s"]);
    let back = cluster::leader(&cluster.system);
    assert_ne!(uid(&new), uid(&back), "the rollback replaced the controller");
    agent.until_turns(turns(&agent) + 10, 60);
    agent.until_condition("Ready", "True", "LoopRunning", 60);
    assert_eq!(
        uid(&agent.until_pod(None, 30)),
        uid(&pod),
        "the rollback restarted a loop"
    );
}

#[test]
fn when_the_leader_freezes_the_other_replica_leads_within_half_a_minute() {
    let Some(cluster) = alone() else { return };
    let namespace = Namespace::new(&cluster.system, "failover");
    let agent = turning(&namespace);
    let pod = agent.until_pod(None, 60);
    agent.until_turns(3, 60);
    let deployment = format!("deployment/{RELEASE}");
    cluster.system.wait(&deployment, "condition=Available", 60);
    let leader = cluster::leader(&cluster.system);
    let watch = cluster.system.watch("pods", &["-l", LEADER]);
    let frozen = node::Frozen::start(node::pid(&leader, "controller"));
    let start = Instant::now();
    let deadline = start + Duration::from_secs(30);
    loop {
        let event = watch.next(deadline).expect("another replica leads within 30 s");
        if event.kind != "DELETED" && event.object["metadata"]["uid"] != leader["metadata"]["uid"] {
            break;
        }
    }
    figure(
        "leader_frozen_to_new_leader",
        format!("{:.1}", start.elapsed().as_secs_f64()),
        "s",
    );
    agent.until_turns(turns(&agent) + 10, 60);
    // The old leader wakes up and believes to lead: it must find out before it does harm.
    drop(frozen);
    let new = cluster::leader(&cluster.system);
    assert_ne!(
        new["metadata"]["uid"], leader["metadata"]["uid"],
        "the woken leader leads again"
    );
    agent.until_turns(turns(&agent) + 10, 60);
    assert_eq!(
        uid(&agent.until_pod(None, 30)),
        uid(&pod),
        "a failover restarted a loop"
    );
    agent.until_condition("Ready", "True", "LoopRunning", 60);
    cluster.system.wait(&deployment, "condition=Available", 120);
}

#[test]
fn uninstall_keeps_the_definition_the_agents_and_their_pods() {
    let Some(cluster) = alone() else { return };
    let namespace = Namespace::new(&cluster.system, "uninstall");
    let agent = turning(&namespace);
    let pod = agent.until_pod(None, 60);
    let before = agent.until_turns(3, 60);
    cluster
        .system
        .helm(&["uninstall", RELEASE, "--wait", "--timeout", "120s"]);
    let kept = agent.object();
    assert_eq!(kept["spec"], before["spec"]);
    assert!(
        cluster.system.get("crd", AGENTS).is_some(),
        "the definition is gone, and with it every Agent"
    );
    // The definitions name the release that they belonged to: one with another name must be told to take them over.
    let renamed = ["install", "renamed", cluster::CHART, "--dry-run=server"];
    let refused = cluster.system.try_helm(&renamed);
    assert!(
        !refused.success && refused.stderr.contains("invalid ownership metadata"),
        "{}",
        refused.stderr
    );
    cluster.system.helm(&[&renamed[..], &["--take-ownership"]].concat());
    cluster::install(&cluster.system, &[]);
    agent.until_turns(turns(&agent) + 10, 90);
    assert_eq!(
        uid(&agent.until_pod(None, 30)),
        uid(&pod),
        "uninstall and install restarted a loop"
    );
    agent.until_condition("Ready", "True", "LoopRunning", 60);
}

#[test]
fn an_upgrade_brings_the_definitions_of_its_version() {
    let Some(cluster) = alone() else { return };
    let copy = tempfile::tempdir().unwrap();
    let chart = copy.path().join("agentloop");
    let copied = std::process::Command::new("cp")
        .arg("-r")
        .arg(cluster::CHART)
        .arg(&chart)
        .status()
        .unwrap();
    assert!(copied.success());
    let file = chart.join("files/crds/agents.agentloop.dev.yaml");
    let text = std::fs::read_to_string(&file).unwrap();
    let (old, new) = ("Time since creation", "Time since it was made");
    std::fs::write(&file, text.replacen(old, new, 1)).unwrap();
    let described = |text: &str| {
        let definition = cluster.system.get("crd", AGENTS).unwrap();
        definition["spec"]["versions"][0]["additionalPrinterColumns"]
            .to_string()
            .contains(text)
    };
    cluster::install_chart(&cluster.system, chart.to_str().unwrap(), &[]);
    assert!(described(new), "the upgrade left the definition as it was");
    cluster::install(&cluster.system, &[]);
    assert!(described(old) && !described(new), "the next upgrade left it as it was");
}
