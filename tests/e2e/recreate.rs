//! An Agent that is deleted and applied again, as GitOps tools do: the new Agent gets a journal of its own, and keeps it.

use serde_json::{Value, json};

use super::agents::{Agent, STARTUP, manifest, script, scripted};
use super::cluster::{Namespace, shared};

#[test]
fn an_agent_deleted_and_applied_twenty_times_in_a_row_starts_with_an_empty_journal_and_keeps_it() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "again");
    let kubectl = &namespace.kubectl;
    kubectl.apply(&script("turns", &json!({"turns": [{"text": "nothing new"}]})));
    let manifest = manifest("coast", &scripted("turns"), &json!({}));
    kubectl.apply(&manifest);
    let first = Agent::named(&namespace, "coast").until_turns(1, STARTUP);
    for _ in 0..20 {
        kubectl.ok(&["delete", "agents.agentloop.dev", "coast", "--wait=false"]);
        kubectl.apply(&manifest);
    }
    let agent = Agent::named(&namespace, "coast");
    let life = agent.object();
    assert_ne!(life["metadata"]["uid"], first["metadata"]["uid"]);
    let claim = || kubectl.get("persistentvolumeclaims", "coast-state").unwrap();
    let owner = |object: &Value| object["metadata"]["ownerReferences"][0]["uid"].clone();
    // Until then there may be a ready pod of an earlier life.
    kubectl.until("the pod of this life", STARTUP, "pods", "coast", |pod| {
        (owner(pod) == life["metadata"]["uid"]).then_some(())
    });
    let pod = agent.until_pod(None, STARTUP);
    assert_eq!(owner(&pod), life["metadata"]["uid"]);
    let before = claim();
    assert_eq!(owner(&before), life["metadata"]["uid"]);
    // The next pod finds the claim, and the journal in it.
    let begun = agent.until_turns(1, STARTUP);
    let turns = begun["status"]["usage"]["turns"].as_i64().unwrap();
    kubectl.ok(&["delete", "pod", "coast", "--wait=false"]);
    agent.until_pod(Some(&pod), STARTUP);
    agent.until_turns(turns + 1, 60);
    assert_eq!(claim()["metadata"]["uid"], before["metadata"]["uid"]);
}
