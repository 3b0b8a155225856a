//! Events over the link, read with a token of the cluster, through a port-forward, as the documentation describes.

use serde_json::{Value, json};

use super::agents::{Agent, STARTUP, script, scripted};
use super::cluster::{Namespace, shared};
use super::link_client::{LinkUser, block_on, bundle};
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
    let forward = cluster.system.forward("service/agentloop-link", 8443);
    let user = |token: &str| LinkUser::new(forward.address().parse().unwrap(), &ca, token);
    let token = |account: &str| kubectl.ok(&["create", "token", account]).trim().to_owned();
    let reader = user(&token("reader"));

    let up_to = |seq: i64| move |event: &Value| event["seq"] == seq;
    let mut events = block_on(reader.read(&agent, 0, "", up_to(10)));
    let pod = agent.until_pod(None, 30);
    node::kill(&pod, "worker");
    agent.until_restarted("worker", 1, 60);
    events.extend(block_on(reader.read(&agent, 10, "", up_to(20))));
    let numbers: Vec<i64> = events.iter().map(|event| event["seq"].as_i64().unwrap()).collect();
    assert_eq!(numbers, (1..=20).collect::<Vec<_>>());
    assert_eq!(events[0]["event"], "loop:started");
    assert!(
        !events.iter().any(|event| event.to_string().contains(CANARY)),
        "{events:?}"
    );

    for (token, status) in [(token("visitor"), 403), ("nonsense".to_owned(), 401)] {
        let refused = block_on(user(&token).events(&agent, "after=0"));
        assert_eq!(refused.status().as_u16(), status);
    }
}
