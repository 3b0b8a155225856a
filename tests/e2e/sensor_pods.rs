//! A Sensor with a pod of its own, from `kubectl apply` to the loops that its webhooks wake.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use pretty_assertions::assert_eq;
use ring::hmac;
use rusqlite::Connection;
use serde_json::{Value, json};

use super::agents::{Agent, condition, script, scripted};
use super::cluster::{Namespace, figure, shared};
use super::node;
use crate::support::http;
use crate::support::kubectl::{Kubectl, Proxy};

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/webhook.yaml");
pub const SENSORS: &str = "sensors.agentloop.dev";
/// The Sensor's pod.
pub const POD: &str = "orders-sensor-0";
/// The key in the Secret of the example.
pub const KEY: &str = "only-to-try-it-out";

/// Longest time that a sender waits for an answer.
const WAIT_TIMEOUT: Duration = Duration::from_secs(30);

/// Who sends to the Service of a Sensor, by way of the API server.
pub struct Sender {
    proxy: Proxy,
    path: String,
}

impl Sender {
    /// To Sensor `orders`.
    pub fn of(kubectl: &Kubectl) -> Self {
        Self::to(kubectl, "orders")
    }

    pub fn to(kubectl: &Kubectl, sensor: &str) -> Self {
        let namespace = kubectl.namespace();
        Self {
            proxy: kubectl.proxy(),
            path: format!("/api/v1/namespaces/{namespace}/services/{sensor}-webhook:80/proxy/"),
        }
    }

    /// Status of a request signed with this key; `None`: no answer.
    pub fn post(&self, key: &str, id: &str, body: &str) -> Option<u16> {
        let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key.as_bytes()), body.as_bytes());
        let tag = tag
            .as_ref()
            .iter()
            .fold("sha256=".to_owned(), |tag, byte| format!("{tag}{byte:02x}"));
        let (address, path) = (self.proxy.address(), &self.path);
        let head = format!(
            "POST {path} HTTP/1.0\r\nHost: {address}\r\nContent-Type: application/json\r\n\
             X-Hub-Signature-256: {tag}\r\nX-GitHub-Delivery: {id}\r\n"
        );
        let connection = TcpStream::connect(address).expect("kubectl proxy listens");
        connection.set_read_timeout(Some(WAIT_TIMEOUT)).expect("a time above 0");
        let answer = http::try_exchange(connection, &head, body);
        answer.map(|(status, _)| status).ok()
    }

    /// The same, again while it cannot be kept, as senders do.
    pub fn send(&self, key: &str, id: &str, body: &str) -> u16 {
        let deadline = Instant::now() + Duration::from_secs(40);
        loop {
            let status = self.post(key, id, body);
            // The API server's own words for a pod that does not listen are 502 and 503.
            if let Some(status) = status.filter(|status| ![502, 503].contains(status)) {
                return status;
            }
            assert!(Instant::now() < deadline, "{id}: {status:?}");
            std::thread::park_timeout(Duration::from_millis(200));
        }
    }
}

/// Waits until the pod of Sensor `orders` takes webhooks; its pod.
pub fn until_listening(kubectl: &Kubectl) -> Value {
    until_sensor_listens(kubectl, "orders")
}

/// Waits until the pod of a Sensor takes webhooks; its pod.
pub fn until_sensor_listens(kubectl: &Kubectl, sensor: &str) -> Value {
    kubectl.wait(&format!("{SENSORS}/{sensor}"), "condition=Connected", 90);
    let pod = format!("{sensor}-sensor-0");
    kubectl.wait(&format!("pod/{pod}"), "condition=Ready", 30);
    kubectl.get("pod", &pod).expect("the pod exists")
}

/// Events that took effect, by a copy of the Agent's journal.
fn updates(agent: &Agent<'_>) -> i64 {
    let args = ["exec", &agent.name, "-c", "worker", "--", "/agentloop", "journal"];
    let copy = agent.kubectl.command(&args).output().expect("kubectl starts");
    assert!(copy.status.success(), "{}", String::from_utf8_lossy(&copy.stderr));
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), copy.stdout).unwrap();
    let journal = Connection::open(file.path()).unwrap();
    let count = "SELECT count(*) FROM journal WHERE kind = 'SensorUpdated'";
    journal.query_row(count, [], |row| row.get(0)).unwrap()
}

#[test]
fn a_signed_webhook_updates_the_hot_state_and_wakes_the_loop_and_its_key_stays_in_the_sensor_pod() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "webhook");
    let kubectl = &namespace.kubectl;
    kubectl.ok(&["apply", "-f", EXAMPLE]);
    let agent = Agent::named(&namespace, "webhook");
    until_listening(kubectl);
    let sensor = kubectl.get(SENSORS, "orders").expect("the Sensor exists");
    let url = format!("http://orders-webhook.{}.svc/", kubectl.namespace());
    assert_eq!(sensor["status"]["url"], url);
    let asleep = agent.until_state("Sleeping", 90);
    let turns = asleep["status"]["usage"]["turns"].as_i64().unwrap_or_default();

    let (sender, body) = (Sender::of(kubectl), r#"{"order": 4711, "total": 250}"#);
    assert_eq!(sender.send("another key", "17", body), 401);
    assert_eq!(sender.send(KEY, "17", body), 202);
    assert_eq!(sender.send(KEY, "17", body), 200, "known");
    agent.until_turns(turns + 1, 40);
    kubectl.until("one event", 30, SENSORS, "orders", |sensor| {
        (sensor["status"]["events"] == 1 && sensor["status"]["pendingDeliveries"] == 0).then_some(())
    });
    let told = kubectl.get(SENSORS, "orders").expect("the Sensor exists");
    let totals = (&told["status"]["updates"], &told["status"]["notifications"]);
    assert_eq!(totals, (&json!(1), &json!(1)), "lastOrder was written");
    assert_eq!(updates(&agent), 1);

    let of_agent = kubectl.get("pod", "webhook").expect("its pod runs");
    let volumes = of_agent["spec"]["volumes"].to_string();
    assert!(!volumes.contains("\"orders\""), "an Agent's pod has no key: {volumes}");
    for args in [
        &[
            "get",
            "agents.agentloop.dev,sensors.agentloop.dev,statefulsets,pods,events",
            "-o",
            "yaml",
        ][..],
        &["logs", "webhook", "--all-containers", "--tail=-1"],
        &["logs", POD, "--tail=-1"],
    ] {
        assert!(!kubectl.ok(args).contains(KEY), "kubectl {}", args.join(" "));
    }
}

#[test]
fn each_webhook_reaches_two_agents_once_though_the_sensor_is_killed_in_the_middle() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "webhooks");
    let kubectl = &namespace.kubectl;
    let turn = json!({"text": "I wait.", "yield": {"sleep": 3600, "wake_early_if": ["sensor/orders"]}});
    kubectl.apply(&script("waits", &json!({"turns": [turn]})));
    kubectl.ok(&[
        "create",
        "secret",
        "generic",
        "orders",
        &format!("--from-literal=webhook={KEY}"),
    ]);
    let agents = ["one", "two"].map(|name| Agent::apply(&namespace, name, &scripted("waits"), &json!({})));
    kubectl.apply(&sensor());
    let pod = until_listening(kubectl);
    let sender = Sender::of(kubectl);
    for number in 1..=20 {
        if number == 11 {
            node::kill(&pod, "sensor");
        }
        let status = sender.send(KEY, &number.to_string(), &format!("{{\"number\": {number}}}"));
        // 200: it was taken, and the answer was lost with the process.
        assert!([202, 200].contains(&status), "{number}: {status}");
    }
    kubectl.until("20 events that all have", 60, SENSORS, "orders", |sensor| {
        (sensor["status"]["events"] == 20 && sensor["status"]["pendingDeliveries"] == 0).then_some(())
    });
    let again = kubectl.get("pod", POD).expect("the pod exists");
    assert_eq!(again["metadata"]["uid"], pod["metadata"]["uid"], "the same pod");
    assert_eq!(again["status"]["containerStatuses"][0]["restartCount"], 1);
    for agent in &agents {
        assert_eq!(updates(agent), 20, "{}", agent.name);
    }
}

#[test]
fn a_hung_sensor_pod_is_reported_within_a_minute_and_recovers() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "frozen-sensor");
    let kubectl = &namespace.kubectl;
    kubectl.ok(&["apply", "-f", EXAMPLE]);
    let agent = Agent::named(&namespace, "webhook");
    let pod = until_listening(kubectl);
    let begun = Instant::now();
    let frozen = node::Frozen::of(&pod, "sensor").expect("its process runs");
    let connected = |status: &'static str, seconds| {
        kubectl.until(&format!("Connected={status}"), seconds, SENSORS, "orders", |sensor| {
            let found = condition(sensor, "Connected")?;
            (found["status"] == status).then(|| found.clone())
        })
    };
    let silent = connected("Unknown", 60);
    figure("frozen_sensor_to_silent", begun.elapsed().as_secs(), "s");
    assert_eq!(silent["reason"], "Silent");
    assert!(
        silent["message"].as_str().is_some_and(|text| text.contains(POD)),
        "{silent}"
    );
    agent.until_condition("SensorsHealthy", "False", "SensorFailing", 30);
    drop(frozen);
    // The kubelet may have started it again meanwhile.
    connected("True", 90);
    agent.until_condition("SensorsHealthy", "True", "Healthy", 30);
}

/// A webhook for both Agents.
fn sensor() -> String {
    let webhook = json!({"scheme": "GitHub", "secretKeyRef": {"name": "orders", "key": "webhook"}});
    json!({"apiVersion": "agentloop.dev/v1alpha1", "kind": "Sensor", "metadata": {"name": "orders"}, "spec": {
        "agentNames": ["one", "two"], "source": {"webhook": webhook},
        "notification": {"text": "'Order ' + string(payload.number)"},
    }})
    .to_string()
}
