//! The objects that all pods of a namespace share: they are deleted with the last pod, created again with the next one, and
//! never taken from a user.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use crate::support::rig::{AGENTS, NAMESPACE, Rig};

const SENSORS: &str = "agentloop.dev/sensors";
const CONFIG_MAPS: &str = "/configmaps";
const ACCOUNTS: &str = "/serviceaccounts";
const POLICIES: &str = "networking.k8s.io/networkpolicies";
const CA: &str = "agentloop-link-ca";

/// Names of what is there.
fn shared(rig: &Rig) -> Vec<String> {
    let all = [CONFIG_MAPS, ACCOUNTS]
        .map(|resource| rig.server.list(resource))
        .concat();
    let names = all
        .iter()
        .map(|object| object["metadata"]["name"].as_str().unwrap().to_owned());
    names.filter(|name| name.starts_with("agentloop-")).collect()
}

fn put_sensor(rig: &Rig, name: &str) {
    let poll = json!({"http": {"url": "https://example.com/prices"}});
    let sensor = json!({
        "apiVersion": "agentloop.dev/v1alpha1", "kind": "Sensor",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"agentNames": ["coast"], "source": {"poll": poll}},
    });
    rig.server.put(SENSORS, sensor);
}

/// A user's own object of a name that the controller would use.
fn put_own(rig: &Rig, resource: &str, kind: &str, name: &str, rest: &Value) -> Value {
    let mut object = json!({"apiVersion": "v1"});
    object
        .as_object_mut()
        .unwrap()
        .extend(rest.as_object().unwrap().clone());
    object["kind"] = kind.into();
    object["metadata"] = json!({"name": name, "namespace": NAMESPACE, "labels": {"team": "blue"}});
    rig.server.put(resource, object)
}

#[tokio::test(start_paused = true)]
async fn what_agents_share_goes_with_the_last_of_their_pods_and_comes_again() {
    let rig = Rig::start_with_sensors().await;
    rig.bring_up("coast", &json!({})).await;
    rig.bring_up("river", &json!({})).await;
    let both = [CA, "agentloop-agent"];
    assert_eq!(shared(&rig), both);
    rig.server.delete(AGENTS, NAMESPACE, "coast");
    rig.server.finish_pod(NAMESPACE, "coast");
    rig.pass(30).await;
    assert_eq!(shared(&rig), both, "river is there");
    rig.server.delete(AGENTS, NAMESPACE, "river");
    rig.pass(30).await;
    assert_eq!(shared(&rig), both, "its pod still ends");
    rig.server.finish_pod(NAMESPACE, "river");
    rig.pass(2).await;
    assert_eq!(shared(&rig), [""; 0]);
    rig.server.take_writes();
    rig.pass(1200).await;
    assert_eq!(rig.server.take_writes(), [""; 0], "at rest");
    rig.bring_up("coast", &json!({})).await;
    assert_eq!(shared(&rig), both);
    assert_eq!(rig.ready("coast").0, "True");
}

#[tokio::test(start_paused = true)]
async fn one_who_comes_while_it_goes_has_it_in_the_end() {
    let rig = Rig::start_with_sensors().await;
    for millis in [900, 990, 1000, 1005, 1010, 1100] {
        rig.bring_up("coast", &json!({})).await;
        rig.server.delete(AGENTS, NAMESPACE, "coast");
        rig.server.finish_pod(NAMESPACE, "coast");
        rig.server.set_slow(std::time::Duration::from_millis(10));
        tokio::time::sleep(std::time::Duration::from_millis(millis)).await;
        rig.apply("river", &json!({}));
        rig.pass(5).await;
        assert!(rig.pod("river").is_some());
        assert_eq!(shared(&rig), [CA, "agentloop-agent"], "after {millis} ms");
        rig.server.set_slow(std::time::Duration::ZERO);
        rig.server.delete(AGENTS, NAMESPACE, "river");
        rig.pass(5).await;
        assert_eq!(shared(&rig), [""; 0]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_sensor_with_a_pod_keeps_what_it_shares_with_agents_until_it_goes() {
    let rig = Rig::start_with_sensors().await;
    rig.bring_up("coast", &json!({})).await;
    put_sensor(&rig, "page");
    rig.settle().await;
    let all = [CA, "agentloop-agent", "agentloop-sensor"];
    assert_eq!(shared(&rig), all);
    rig.server.delete(AGENTS, NAMESPACE, "coast");
    rig.server.finish_pod(NAMESPACE, "coast");
    rig.pass(30).await;
    assert_eq!(shared(&rig), all, "of one who is not there");
    rig.server.delete(SENSORS, NAMESPACE, "page");
    rig.pass(2).await;
    assert_eq!(shared(&rig), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_config_map_that_a_user_made_is_neither_changed_nor_deleted_and_the_agent_says_so() {
    let rig = Rig::start_with_sensors().await;
    let theirs = put_own(&rig, CONFIG_MAPS, "ConfigMap", CA, &json!({"data": {"mine": "all"}}));
    rig.apply("coast", &json!({}));
    put_sensor(&rig, "page");
    rig.pass(5).await;
    assert_eq!(rig.pod("coast"), None, "it could not trust the link");
    assert_eq!(rig.ready("coast"), ("False".into(), "NameTaken".into()));
    let conditions = rig.status("coast").conditions;
    let pod = conditions.iter().find(|held| held.type_ == "PodReady").unwrap();
    assert!(
        pod.message.contains("ConfigMap agentloop-link-ca exists"),
        "{}",
        pod.message
    );
    let sensor = rig.server.get(SENSORS, NAMESPACE, "page").unwrap();
    assert!(sensor["status"].to_string().contains("NameTaken"), "{sensor}");
    // It does not delay the next authority of other namespaces.
    rig.running().bundle.send_replace("CA two".into());
    rig.pass(5).await;
    assert_eq!(*rig.running().published.borrow(), "CA two");
    rig.server.delete(AGENTS, NAMESPACE, "coast");
    rig.server.delete(SENSORS, NAMESPACE, "page");
    rig.pass(30).await;
    assert_eq!(rig.server.get(CONFIG_MAPS, NAMESPACE, CA), Some(theirs));
    assert_eq!(shared(&rig), [CA], "the accounts were the controller's");

    rig.server.delete(CONFIG_MAPS, NAMESPACE, CA);
    rig.bring_up("coast", &json!({})).await;
    assert_eq!(rig.ready("coast").0, "True");
}

#[tokio::test(start_paused = true)]
async fn a_service_account_that_a_user_made_is_used_as_it_is() {
    let rig = Rig::start_with_sensors().await;
    let own = json!({"imagePullSecrets": [{"name": "registry"}]});
    let theirs = put_own(&rig, ACCOUNTS, "ServiceAccount", "agentloop-agent", &own);
    rig.bring_up("coast", &json!({})).await;
    let spec = rig.pod("coast").unwrap()["spec"].clone();
    assert_eq!(spec["serviceAccountName"], "agentloop-agent");
    assert_eq!(spec["automountServiceAccountToken"], false);
    rig.server.delete(AGENTS, NAMESPACE, "coast");
    rig.server.finish_pod(NAMESPACE, "coast");
    rig.pass(30).await;
    assert_eq!(rig.server.get(ACCOUNTS, NAMESPACE, "agentloop-agent"), Some(theirs));
    assert_eq!(shared(&rig), ["agentloop-agent"]);
}

fn policy(rig: &Rig) -> Option<Value> {
    rig.server.get(POLICIES, NAMESPACE, "agentloop-agent")
}

#[tokio::test(start_paused = true)]
async fn a_network_policy_admits_no_connection_to_agents_and_goes_with_the_last_of_them() {
    let rig = Rig::start_with_sensors().await;
    rig.bring_up("coast", &json!({})).await;
    let created = policy(&rig).unwrap();
    let isolation = json!({
        "podSelector": {"matchExpressions": [{"key": "agentloop.dev/agent", "operator": "Exists"}]},
        "policyTypes": ["Ingress"], "ingress": [],
    });
    assert_eq!(created["spec"], isolation);
    let labels = &rig.pod("coast").unwrap()["metadata"]["labels"];
    assert_eq!(labels["agentloop.dev/agent"], "coast", "the policy selects the pod");

    let mut edited = created;
    edited["spec"]["ingress"] = json!([{}]);
    rig.server.put(POLICIES, edited.clone());
    rig.pass(601).await;
    assert_eq!(policy(&rig).unwrap()["spec"], isolation);
    // An API server omits the empty list.
    edited["spec"]["ingress"] = Value::Null;
    rig.server.put(POLICIES, edited);
    rig.server.take_writes();
    rig.pass(601).await;
    assert_eq!(rig.server.take_writes(), [""; 0], "it says the same");

    rig.server.delete(AGENTS, NAMESPACE, "coast");
    rig.server.finish_pod(NAMESPACE, "coast");
    rig.pass(2).await;
    assert_eq!(policy(&rig), None);
}

#[tokio::test(start_paused = true)]
async fn a_network_policy_of_that_name_that_a_user_created_is_neither_changed_nor_deleted() {
    let rig = Rig::start_with_sensors().await;
    let spec = json!({"podSelector": {}, "ingress": [{}], "policyTypes": ["Ingress"]});
    let own = json!({"apiVersion": "networking.k8s.io/v1", "spec": spec});
    let theirs = put_own(&rig, POLICIES, "NetworkPolicy", "agentloop-agent", &own);
    rig.bring_up("coast", &json!({})).await;
    assert_eq!(policy(&rig), Some(theirs.clone()));
    rig.server.delete(AGENTS, NAMESPACE, "coast");
    rig.server.finish_pod(NAMESPACE, "coast");
    rig.pass(30).await;
    assert_eq!(policy(&rig), Some(theirs));
}
