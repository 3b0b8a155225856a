//! Invalid specs are rejected at admission or become a condition that states the fix.

use serde_json::json;

use super::agents::{Agent, STARTUP, condition, manifest, openai, script, scripted};
use super::cluster::{Namespace, shared};

#[test]
fn a_misspelt_field_is_refused_with_its_name() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "misspelt");
    let model = openai("http://198.18.0.1:1/v1");
    let message = namespace
        .kubectl
        .refused(&manifest("typo", &model, &json!({"continuous": {"maxSleepSecond": 5}})));
    assert!(message.contains("spec.continuous.maxSleepSecond"), "{message}");
    let message = namespace
        .kubectl
        .refused(&manifest("typo", &openai("example.com/v1"), &json!({})));
    assert!(message.contains("spec.model.baseURL"), "{message}");
    assert!(namespace.kubectl.get("agents.agentloop.dev", "typo").is_none());
}

#[test]
fn a_missing_secret_is_a_condition_and_no_pod_until_it_appears() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "no-secret");
    let kubectl = &namespace.kubectl;
    let mut model = openai("http://198.18.0.1:1/v1");
    model["apiKeySecretRef"] = json!({"name": "provider", "key": "api-key"});
    let agent = Agent::apply(&namespace, "keyless", &model, &json!({}));

    stuck(&agent, "SecretNotFound", &["provider", "Secret"]);
    let event = agent.until_event("Warning", "SecretNotFound", 20);
    assert!(event.contains("provider"), "{event}");
    let empty = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "provider"}});
    kubectl.apply(&empty.to_string());
    agent.until("a message about the key", 30, |agent| {
        let message = condition(agent, "Accepted")?["message"].as_str()?;
        message.contains("api-key").then_some(())
    });
    assert!(kubectl.get("pods", "keyless").is_none(), "no pod without its key");

    kubectl.patch("secret", "provider", &json!({"stringData": {"api-key": "sk-test"}}));
    heals(&agent);
}

#[test]
fn an_unknown_key_and_a_bad_script_are_conditions_that_heal() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "no-key");
    let kubectl = &namespace.kubectl;
    kubectl.ok(&["create", "configmap", "plan", "--from-literal=other=text"]);
    let agent = Agent::apply(&namespace, "scripted", &scripted("plan"), &json!({}));
    stuck(&agent, "ConfigMapNotFound", &["plan", "script"]);

    kubectl.patch(
        "configmap",
        "plan",
        &json!({"data": {"script": "turns: [{txet: hello}]"}}),
    );
    // The place is named, not the word: what stands in a ConfigMap is not for the status.
    stuck(&agent, "InvalidSpec", &["plan", "turns[0]", "unknown field"]);

    kubectl.apply(&script(
        "plan",
        &json!({"turns": [{"text": "hello"}, {"yield": {"sleep": 3600}}]}),
    ));
    heals(&agent);
    agent.until_state("Sleeping", 60);
}

/// The Agent says what is wrong, needs a person, and has no pod.
fn stuck(agent: &Agent<'_>, reason: &str, words: &[&str]) {
    let accepted = agent.until_condition("Accepted", "False", reason, 30);
    let message = accepted["message"].as_str().unwrap_or_default().to_owned();
    assert!(
        words.iter().all(|word| message.contains(word)),
        "{message} does not name {words:?}"
    );
    agent.until("Ready=False, Stalled=True", 30, |agent| {
        let is = |type_, status| condition(agent, type_).is_some_and(|one| one["status"] == status);
        (is("Ready", "False") && is("Stalled", "True")).then_some(())
    });
    assert!(
        agent.kubectl.get("pods", &agent.name).is_none(),
        "no pod while the Agent is not accepted"
    );
}

/// The pod comes up and nothing of the mistake is left.
fn heals(agent: &Agent<'_>) {
    // References are checked again after up to 30 s.
    agent.until_condition("Accepted", "True", "Accepted", 90);
    agent.until_pod(None, STARTUP);
    agent.until("no Stalled condition", 30, |agent| {
        condition(agent, "Stalled").is_none().then_some(())
    });
}
