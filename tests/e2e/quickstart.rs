//! The first steps of a new user: apply the quickstart, and look at the Agent.

use std::time::Instant;

use serde_json::Value;

use super::agents::{Agent, status_used};
use super::cluster::{self, Namespace, figure, shared};

#[test]
fn the_quickstart_turns_sleeps_wakes_and_counts_in_a_restricted_namespace() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "quickstart");
    let kubectl = &namespace.kubectl;
    let begun = Instant::now();
    kubectl.ok(&[
        "apply",
        "-f",
        concat!(env!("CARGO_MANIFEST_DIR"), "/examples/quickstart.yaml"),
    ]);
    let agent = Agent::named(&namespace, "quickstart");
    agent.until_turns(1, 90);
    let seconds = format!("{:.1}", begun.elapsed().as_secs_f64());
    figure("quickstart_applied_to_first_turn", seconds, "s");
    kubectl.wait("agents.agentloop.dev/quickstart", "condition=Ready", 90);
    let pod = agent.until_pod(None, 30);
    nothing_of_the_cluster_is_in_the_pod(&pod);

    let asleep = agent.until_state("Sleeping", 60);
    assert!(asleep["status"]["loop"]["resumesAt"].is_string(), "a sleep has an end");
    let turns = asleep["status"]["usage"]["turns"].as_i64().expect("turns are counted");
    let later = agent.until_turns(turns + 3, 90);
    assert_eq!(later["status"]["observedGeneration"], later["metadata"]["generation"]);
    assert!(
        !agent.object()["status"]["summary"]["tokens"]
            .as_str()
            .unwrap_or_default()
            .is_empty()
    );

    columns(&agent);
    agent.stop(60);
    let used = status_used(&agent.object());
    assert!(used.output > 0 && used.input > 0 && used.unknown_calls == 0, "{used:?}");
    agent.until_counts(&cluster.system, 30, || used);
    agent.suspend(false);
    agent.until_turns(turns + 5, 90);
    delete_takes_everything(&agent);
}

/// The one token in the pod is for the link, and only the gateway has it; no account token, no secret for the worker.
fn nothing_of_the_cluster_is_in_the_pod(pod: &Value) {
    assert_eq!(pod["spec"]["automountServiceAccountToken"], false);
    let volumes = pod["spec"]["volumes"].as_array().expect("a pod has volumes");
    let tokens: Vec<_> = volumes
        .iter()
        .filter(|volume| volume.to_string().contains("serviceAccountToken"))
        .collect();
    let [token] = tokens.as_slice() else {
        panic!("one token in the pod, for the link: {tokens:#?}")
    };
    for source in token["projected"]["sources"].as_array().expect("a projected volume") {
        let account = &source["serviceAccountToken"];
        assert!(
            account.is_null() || account["audience"] == "agentloop.dev/link",
            "a token of another audience: {source}"
        );
    }
    for list in ["initContainers", "containers"] {
        for container in pod["spec"][list].as_array().into_iter().flatten() {
            let mounts = container["volumeMounts"].as_array().cloned().unwrap_or_default();
            let has_token = mounts.iter().any(|mount| mount["name"] == token["name"]);
            assert_eq!(
                has_token,
                container["name"] == "gateway",
                "only the gateway has the token: {}",
                container["name"]
            );
            let account = mounts
                .iter()
                .any(|mount| mount["mountPath"].to_string().contains("kubernetes.io/serviceaccount"));
            assert!(!account, "{} has a Kubernetes token", container["name"]);
        }
    }
}

fn columns(agent: &Agent<'_>) {
    let table = agent.kubectl.ok(&["get", "agents.agentloop.dev", "quickstart"]);
    let mut lines = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    assert_eq!(
        lines.next().expect("a header"),
        [
            "NAME", "READY", "STATE", "MODEL", "TURNS", "TOKENS", "COST", "BUDGET", "AGE"
        ]
    );
    let row = lines.next().expect("a row");
    assert_eq!(
        (row[0], row[1], row[3]),
        ("quickstart", "True", "quickstart"),
        "{table}"
    );
    assert!(
        row.len() == 7 && row[4].parse::<i64>().is_ok_and(|turns| turns > 0),
        "{table}"
    );
    let short = agent.kubectl.ok(&["get", "aloop,agentloop"]);
    assert!(short.contains("quickstart"), "short name and category work: {short}");
}

/// Owner references clean up: pod and claim go with the Agent; what the namespace has once stays.
fn delete_takes_everything(agent: &Agent<'_>) {
    agent
        .kubectl
        .ok(&["delete", "agents.agentloop.dev", &agent.name, "--timeout=60s"]);
    let left = agent
        .kubectl
        .list("pods,persistentvolumeclaims", "agentloop.dev/agent=quickstart");
    for object in &left {
        let kind = object["kind"].as_str().unwrap_or_default().to_lowercase();
        agent
            .kubectl
            .until_gone(&kind, object["metadata"]["name"].as_str().unwrap_or_default(), 60);
    }
}

#[test]
fn the_release_runs_two_replicas_and_one_leads() {
    let Some(cluster) = shared() else { return };
    let pods = cluster::settled(&cluster.system);
    assert_eq!(pods.len(), 2, "{pods:#?}");
    let leader = cluster::leader(&cluster.system);
    assert!(
        pods.iter()
            .any(|pod| pod["metadata"]["name"] == leader["metadata"]["name"])
    );
    // After the pods were counted: the test of the release is a pod of it too.
    let said = cluster.system.helm(&["test", cluster::RELEASE, "--timeout", "120s"]);
    assert!(said.contains("Succeeded"), "{said}");
    assert!(
        cluster.system.get("pod", "agentloop-test").is_none(),
        "a test that succeeded leaves nothing"
    );
}
