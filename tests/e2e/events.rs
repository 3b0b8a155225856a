//! Events over the link, read with a token of the cluster, through a port-forward, as the documentation describes.

use serde_json::{Value, json};

use super::agents::{Agent, STARTUP, script, scripted};
use super::cluster::{Namespace, shared};
use super::link_client::{LinkUser, WAIT_TIMEOUT, block_on, bundle};
use super::node;

/// Stands in instructions and answers; may stand in no event.
const CANARY: &str = "canary-answer-2f6b";

#[test]
fn viewers_read_each_event_once_over_a_port_forward_and_others_receive_403() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "events");
    let kubectl = &namespace.kubectl;
    let turns = json!({"turns": [{"text": CANARY, "delayMilliseconds": 200}, {"yield": {"sleep": 1}}]});
    kubectl.apply(&script("script", &turns));
    let spec = json!({"instructions": CANARY, "guardrails": {"maxConsecutiveTurns": 1000}});
    let agent = Agent::apply(&namespace, "told", &scripted("script"), &spec);
    agent.until_turns(1, STARTUP);
    for account in ["reader", "visitor"] {
        kubectl.ok(&["create", "serviceaccount", account]);
    }
    let subject = format!("--serviceaccount={}:reader", kubectl.namespace());
    kubectl.ok(&["create", "rolebinding", "reader", "--clusterrole=view", &subject]);
    let ca = bundle(kubectl);
    // A forward stays with one controller, whichever leads: each client has its own.
    let connect = |token: &str| {
        let forward = cluster.system.forward("service/agentloop-link", 8443);
        (LinkUser::new(forward.address().parse().unwrap(), &ca, token), forward)
    };
    let token = |account: &str| kubectl.ok(&["create", "token", account]).trim().to_owned();
    let reader = token("reader");
    let read = |after: i64, last: i64| {
        let (user, _forward) = connect(&reader);
        let is_last = |event: &Value| event["seq"] == last;
        block_on(user.read(&agent, after, "", WAIT_TIMEOUT, is_last))
    };

    let mut events = read(0, 10);
    let pod = agent.until_pod(None, 30);
    node::kill(&pod, "worker");
    agent.until_restarted("worker", 1, 60);
    events.extend(read(10, 20));
    let numbers: Vec<i64> = events.iter().map(|event| event["seq"].as_i64().unwrap()).collect();
    assert_eq!(numbers, (1..=20).collect::<Vec<_>>());
    assert_eq!(events[0]["event"], "loop:started");
    assert!(
        !events.iter().any(|event| event.to_string().contains(CANARY)),
        "{events:?}"
    );

    for (token, status) in [(token("visitor"), 403), ("nonsense".to_owned(), 401)] {
        let (user, _forward) = connect(&token);
        let refused = block_on(user.events(&agent, "after=0")).expect("an answer");
        assert_eq!(refused.status().as_u16(), status);
    }
}
