//! The objects that all pods of a namespace share: they are deleted with the last pod, created again with the next one, and
//! never taken from a user.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use crate::support::harness::{AGENTS, ControllerHarness, NAMESPACE};

const SENSORS: &str = "agentloop.dev/sensors";
const CONFIG_MAPS: &str = "/configmaps";
const ACCOUNTS: &str = "/serviceaccounts";
const POLICIES: &str = "networking.k8s.io/networkpolicies";
const CA: &str = "agentloop-link-ca";

/// Names of what is there.
fn shared(harness: &ControllerHarness) -> Vec<String> {
    let all = [CONFIG_MAPS, ACCOUNTS]
        .map(|resource| harness.server.list(resource))
        .concat();
    let names = all
        .iter()
        .map(|object| object["metadata"]["name"].as_str().unwrap().to_owned());
    names.filter(|name| name.starts_with("agentloop-")).collect()
}

fn put_sensor(harness: &ControllerHarness, name: &str) {
    let poll = json!({"http": {"url": "https://example.com/prices"}});
    let sensor = json!({
        "apiVersion": "agentloop.dev/v1alpha1", "kind": "Sensor",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"agentNames": ["coast"], "source": {"poll": poll}},
    });
    harness.server.put(SENSORS, sensor);
}

/// A user's own object of a name that the controller would use.
fn put_own(harness: &ControllerHarness, resource: &str, kind: &str, name: &str, rest: &Value) -> Value {
    let mut object = json!({"apiVersion": "v1"});
    object
        .as_object_mut()
        .unwrap()
        .extend(rest.as_object().unwrap().clone());
    object["kind"] = kind.into();
    object["metadata"] = json!({"name": name, "namespace": NAMESPACE, "labels": {"team": "blue"}});
    harness.server.put(resource, object)
}

#[tokio::test(start_paused = true)]
async fn objects_shared_by_agents_are_deleted_with_their_last_pod_and_recreated() {
    let harness = ControllerHarness::start_with_sensors().await;
    harness.bring_up("coast", &json!({})).await;
    harness.bring_up("river", &json!({})).await;
    let both = [CA, "agentloop-agent"];
    assert_eq!(shared(&harness), both);
    harness.server.delete(AGENTS, NAMESPACE, "coast");
    harness.server.finish_pod(NAMESPACE, "coast");
    harness.pass(30).await;
    assert_eq!(shared(&harness), both, "river is there");
    harness.server.delete(AGENTS, NAMESPACE, "river");
    harness.pass(30).await;
    assert_eq!(shared(&harness), both, "its pod still ends");
    harness.server.finish_pod(NAMESPACE, "river");
    harness.pass(2).await;
    assert_eq!(shared(&harness), [""; 0]);
    harness.server.take_writes();
    harness.pass(1200).await;
    assert_eq!(harness.server.take_writes(), [""; 0], "at rest");
    harness.bring_up("coast", &json!({})).await;
    assert_eq!(shared(&harness), both);
    assert_eq!(harness.ready("coast").0, "True");
}

#[tokio::test(start_paused = true)]
async fn an_agent_created_during_the_deletion_has_the_shared_objects_in_the_end() {
    let harness = ControllerHarness::start_with_sensors().await;
    for millis in [900, 990, 1000, 1005, 1010, 1100] {
        harness.bring_up("coast", &json!({})).await;
        harness.server.delete(AGENTS, NAMESPACE, "coast");
        harness.server.finish_pod(NAMESPACE, "coast");
        harness.server.set_slow(std::time::Duration::from_millis(10));
        tokio::time::sleep(std::time::Duration::from_millis(millis)).await;
        harness.apply("river", &json!({}));
        harness.pass(5).await;
        assert!(harness.pod("river").is_some());
        assert_eq!(shared(&harness), [CA, "agentloop-agent"], "after {millis} ms");
        harness.server.set_slow(std::time::Duration::ZERO);
        harness.server.delete(AGENTS, NAMESPACE, "river");
        harness.pass(5).await;
        assert_eq!(shared(&harness), [""; 0]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_sensor_with_a_pod_keeps_the_objects_it_shares_with_agents_until_its_deletion() {
    let harness = ControllerHarness::start_with_sensors().await;
    harness.bring_up("coast", &json!({})).await;
    put_sensor(&harness, "page");
    harness.settle().await;
    let all = [CA, "agentloop-agent", "agentloop-sensor"];
    assert_eq!(shared(&harness), all);
    harness.server.delete(AGENTS, NAMESPACE, "coast");
    harness.server.finish_pod(NAMESPACE, "coast");
    harness.pass(30).await;
    assert_eq!(shared(&harness), all, "of one who is not there");
    harness.server.delete(SENSORS, NAMESPACE, "page");
    harness.pass(2).await;
    assert_eq!(shared(&harness), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_config_map_of_a_user_is_neither_changed_nor_deleted_and_the_agent_reports_the_conflict() {
    let harness = ControllerHarness::start_with_sensors().await;
    let theirs = put_own(
        &harness,
        CONFIG_MAPS,
        "ConfigMap",
        CA,
        &json!({"data": {"mine": "all"}}),
    );
    harness.apply("coast", &json!({}));
    put_sensor(&harness, "page");
    harness.pass(5).await;
    assert_eq!(harness.pod("coast"), None, "it could not trust the link");
    assert_eq!(harness.ready("coast"), ("False".into(), "NameTaken".into()));
    let conditions = harness.status("coast").conditions;
    let pod = conditions.iter().find(|held| held.type_ == "PodReady").unwrap();
    assert!(
        pod.message.contains("ConfigMap agentloop-link-ca exists"),
        "{}",
        pod.message
    );
    let sensor = harness.server.get(SENSORS, NAMESPACE, "page").unwrap();
    assert!(sensor["status"].to_string().contains("NameTaken"), "{sensor}");
    // It does not delay the next authority of other namespaces.
    harness.running().bundle.send_replace("CA two".into());
    harness.pass(5).await;
    assert_eq!(*harness.running().published.borrow(), "CA two");
    harness.server.delete(AGENTS, NAMESPACE, "coast");
    harness.server.delete(SENSORS, NAMESPACE, "page");
    harness.pass(30).await;
    assert_eq!(harness.server.get(CONFIG_MAPS, NAMESPACE, CA), Some(theirs));
    assert_eq!(shared(&harness), [CA], "the accounts were the controller's");

    harness.server.delete(CONFIG_MAPS, NAMESPACE, CA);
    harness.bring_up("coast", &json!({})).await;
    assert_eq!(harness.ready("coast").0, "True");
}

#[tokio::test(start_paused = true)]
async fn a_service_account_that_a_user_made_is_used_as_it_is() {
    let harness = ControllerHarness::start_with_sensors().await;
    let own = json!({"imagePullSecrets": [{"name": "registry"}]});
    let theirs = put_own(&harness, ACCOUNTS, "ServiceAccount", "agentloop-agent", &own);
    harness.bring_up("coast", &json!({})).await;
    let spec = harness.pod("coast").unwrap()["spec"].clone();
    assert_eq!(spec["serviceAccountName"], "agentloop-agent");
    assert_eq!(spec["automountServiceAccountToken"], false);
    harness.server.delete(AGENTS, NAMESPACE, "coast");
    harness.server.finish_pod(NAMESPACE, "coast");
    harness.pass(30).await;
    assert_eq!(harness.server.get(ACCOUNTS, NAMESPACE, "agentloop-agent"), Some(theirs));
    assert_eq!(shared(&harness), ["agentloop-agent"]);
}

fn policy(harness: &ControllerHarness) -> Option<Value> {
    harness.server.get(POLICIES, NAMESPACE, "agentloop-agent")
}

#[tokio::test(start_paused = true)]
async fn a_network_policy_admits_no_connection_to_agents_and_is_deleted_with_the_last_of_them() {
    let harness = ControllerHarness::start_with_sensors().await;
    harness.bring_up("coast", &json!({})).await;
    let created = policy(&harness).unwrap();
    let isolation = json!({
        "podSelector": {"matchExpressions": [{"key": "agentloop.dev/agent", "operator": "Exists"}]},
        "policyTypes": ["Ingress"], "ingress": [],
    });
    assert_eq!(created["spec"], isolation);
    let labels = &harness.pod("coast").unwrap()["metadata"]["labels"];
    assert_eq!(labels["agentloop.dev/agent"], "coast", "the policy selects the pod");

    let mut edited = created;
    edited["spec"]["ingress"] = json!([{}]);
    harness.server.put(POLICIES, edited.clone());
    harness.pass(601).await;
    assert_eq!(policy(&harness).unwrap()["spec"], isolation);
    // An API server omits the empty list.
    edited["spec"]["ingress"] = Value::Null;
    harness.server.put(POLICIES, edited);
    harness.server.take_writes();
    harness.pass(601).await;
    assert_eq!(harness.server.take_writes(), [""; 0], "it says the same");

    harness.server.delete(AGENTS, NAMESPACE, "coast");
    harness.server.finish_pod(NAMESPACE, "coast");
    harness.pass(2).await;
    assert_eq!(policy(&harness), None);
}

#[tokio::test(start_paused = true)]
async fn a_network_policy_of_that_name_that_a_user_created_is_neither_changed_nor_deleted() {
    let harness = ControllerHarness::start_with_sensors().await;
    let spec = json!({"podSelector": {}, "ingress": [{}], "policyTypes": ["Ingress"]});
    let own = json!({"apiVersion": "networking.k8s.io/v1", "spec": spec});
    let theirs = put_own(&harness, POLICIES, "NetworkPolicy", "agentloop-agent", &own);
    harness.bring_up("coast", &json!({})).await;
    assert_eq!(policy(&harness), Some(theirs.clone()));
    harness.server.delete(AGENTS, NAMESPACE, "coast");
    harness.server.finish_pod(NAMESPACE, "coast");
    harness.pass(30).await;
    assert_eq!(policy(&harness), Some(theirs));
}
