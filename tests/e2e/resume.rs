//! A loop continues from its journal after any container of its pod is killed.

use serde_json::{Value, json};

use super::agents::{Agent, STARTUP, openai};
use super::cluster::{AGENTS, Namespace, shared};
use super::model_server::{self, Line};
use super::node;

#[test]
fn transcript_and_turns_survive_pod_deletion_and_kills_of_each_container() {
    let (Some(cluster), Some(server)) = (shared(), model_server::faulty()) else {
        return;
    };
    let namespace = Namespace::new(&cluster.system, "resume");
    let label = namespace.kubectl.namespace();
    server.choose(label, "slow");
    let agent = Agent::apply(
        &namespace,
        "loop",
        &openai(&server.base_url(label)),
        &json!({
            "guardrails": {"maxConsecutiveTurns": 1000}, "model": {"contextTokens": 128_000}
        }),
    );
    let pod = agent.until_pod(None, STARTUP);
    server.until_in_call(label, 60);
    node::kill(&pod, "worker");
    agent.until_restarted("worker", 1, 60);
    server.until_in_call(label, 60);
    node::kill(&pod, "gateway");
    agent.until_restarted("gateway", 1, 60);
    server.until_in_call(label, 60);
    agent.kubectl.ok(&["delete", "pod", &agent.name, "--wait=false"]);
    agent.until_pod(Some(&pod), 90);
    server.until_in_call(label, 60);
    server.choose(label, "good");
    let seen = server.lines(label);
    agent.until_turns(4, 60);
    no_message_is_lost(&seen);
}

/// Each request carries all that an earlier one carried, but for its last message, which may speak of the moment.
fn no_message_is_lost(lines: &[Line]) {
    let requests: Vec<_> = lines.iter().filter(|line| line.event == "begin").collect();
    assert!(requests.len() >= 4, "there were calls to compare: {requests:#?}");
    for pair in requests.windows(2) {
        let (old, new) = (&pair[0].messages, &pair[1].messages);
        let same = old.iter().zip(new).take_while(|(old, new)| old == new).count();
        assert!(
            same + 1 >= old.len() && new.len() >= old.len(),
            "messages were lost between {pair:#?}"
        );
    }
}

#[test]
fn a_sleep_keeps_its_deadline_through_pod_deletion_and_kills() {
    let (Some(cluster), Some(server)) = (shared(), model_server::faulty()) else {
        return;
    };
    let namespace = Namespace::new(&cluster.system, "sleep");
    let label = namespace.kubectl.namespace();
    server.choose(label, "sleep");
    let agent = Agent::apply(&namespace, "sleeper", &openai(&server.base_url(label)), &json!({}));
    let asleep = agent.until_state("Sleeping", 60);
    let deadline = asleep["status"]["loop"]["resumesAt"].clone();
    assert!(deadline.is_string(), "a sleep has an end: {}", asleep["status"]["loop"]);
    let calls = server.lines(label).len();

    let pod = agent.until_pod(None, 30);
    node::kill(&pod, "worker");
    agent.until_restarted("worker", 1, 60);
    node::kill(&pod, "gateway");
    agent.until_restarted("gateway", 1, 60);
    agent.kubectl.ok(&["delete", "pod", &agent.name, "--wait=false"]);
    agent.until_pod(Some(&pod), 90);
    let epoch = asleep["status"]["loop"]["epoch"].as_i64().unwrap_or(0);
    let again = agent.until("the new pod's report", 60, |agent| {
        let told = &agent["status"]["loop"];
        (told["epoch"].as_i64()? > epoch && told["state"] == "Sleeping").then(|| agent.clone())
    });
    assert_eq!(again["status"]["loop"]["resumesAt"], deadline, "the deadline moved");
    assert_eq!(
        again["status"]["loop"]["turn"], asleep["status"]["loop"]["turn"],
        "the turn counter moved"
    );
    assert_eq!(server.lines(label).len(), calls, "a sleeping loop called its model");

    wake(&agent, "w1");
    server.until("a call after the wake request", label, 30, |lines| {
        (lines.len() > calls).then_some(())
    });
    let awake = agent.until("a later deadline", 60, |agent| {
        let told = &agent["status"]["loop"];
        (told["state"] == "Sleeping" && told["resumesAt"] != deadline).then(|| agent.clone())
    });
    assert_eq!(awake["status"]["lastHandledRequests"]["wake"], "w1");
}

fn wake(agent: &Agent<'_>, token: &str) {
    let patch: Value = json!({"metadata": {"annotations": {"agentloop.dev/wake": token}}});
    agent.kubectl.patch(AGENTS, &agent.name, &patch);
}
