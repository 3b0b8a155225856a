//! Tests of the webhook that announces gates: a real receiver on loopback, and a cache of Agents that is changed by hand.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
// Counters hold whole numbers.
#![allow(clippy::float_cmp)]

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use agentloop::api::Agent;
use agentloop::api::source::SignatureScheme;
use agentloop::controller::agent::AgentsView;
use agentloop::controller::gates::webhook::{GateWebhook, WebhookTimes, initialize_webhook_metrics};
use agentloop::controller::runtime::guarded::GuardedObject;
use agentloop::sensor_pipeline::source::webhook::signature::SignatureRule;
use agentloop::telemetry::metrics::Metrics;
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use jiff::Timestamp;
use kube::runtime::reflector;
use kube::runtime::reflector::store::Writer;
use kube::runtime::watcher::Event;
use pretty_assertions::assert_eq;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::support::agents::agent;
use crate::support::ports::free_port;

const SECRET: &[u8] = b"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
/// Stands in the Agent's instructions; may stand in no request.
const CANARY: &str = "canary-5e21";
const SOON: Duration = Duration::from_mins(1);
const TIMES: WebhookTimes = WebhookTimes {
    look: Duration::from_millis(5),
    request: Duration::from_secs(5),
    waits: (Duration::from_millis(5), Duration::from_millis(20)),
};

/// A request that was verified with the verifier of Sensors.
#[derive(Debug)]
struct Received {
    id: String,
    path: String,
    body: String,
}

impl Received {
    fn kind(&self) -> String {
        let body: Value = serde_json::from_str(&self.body).unwrap();
        body["type"].as_str().unwrap().to_owned()
    }
}

/// A receiver that answers as its script says, and 204 after it.
#[derive(Clone)]
struct Receiver {
    script: Arc<Mutex<VecDeque<u16>>>,
    received: mpsc::UnboundedSender<Received>,
    /// Each answer takes one.
    permits: Arc<Semaphore>,
}

async fn receive(State(receiver): State<Receiver>, headers: HeaderMap, uri: axum::http::Uri, body: Bytes) -> Response {
    let rule = SignatureRule {
        scheme: SignatureScheme::StandardWebhooks,
        id_header: None,
    };
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let id = rule.check(SECRET, header, &body, Timestamp::now()).unwrap().unwrap();
    assert_eq!(headers["content-type"], "application/json");
    let body = String::from_utf8(body.to_vec()).unwrap();
    let path = uri.to_string();
    receiver.received.send(Received { id, path, body }).unwrap();
    receiver.permits.acquire().await.unwrap().forget();
    let status = receiver.script.lock().unwrap().pop_front().unwrap_or(204);
    let status = StatusCode::from_u16(status).unwrap();
    (status, [("location", "/elsewhere")]).into_response()
}

struct GateWebhookHarness {
    received: mpsc::UnboundedReceiver<Received>,
    receiver: Receiver,
    writer: Writer<GuardedObject<Agent>>,
    metrics: Arc<Metrics>,
    agents: Arc<OnceLock<AgentsView>>,
    address: SocketAddr,
    stop: CancellationToken,
}

impl Drop for GateWebhookHarness {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn gates(ids: &[&str]) -> Value {
    let gates: Vec<_> = ids
        .iter()
        .map(|id| {
            json!({
                "id": id, "kind": "ToolCallNeedsApproval", "tool": "bank__pay", "argumentsHash": "5f0c",
                "openedAt": "2026-11-22T13:05:00Z", "expiresAt": "2099-11-22T14:05:00Z",
            })
        })
        .collect();
    json!({ "gates": gates })
}

impl GateWebhookHarness {
    /// A leader whose receiver answers with these statuses first. It does not listen yet.
    fn new(script: &[u16], address: SocketAddr) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let (sender, arrivals) = mpsc::unbounded_channel();
        let (store, writer) = reflector::store();
        let metrics = Arc::new(Metrics::new().unwrap());
        initialize_webhook_metrics(&metrics);
        let receiver = Receiver {
            script: Arc::new(Mutex::new(script.iter().copied().collect())),
            received: sender,
            permits: Arc::new(Semaphore::new(Semaphore::MAX_PERMITS)),
        };
        Self {
            received: arrivals,
            receiver,
            writer,
            metrics,
            agents: Arc::new(OnceLock::from(AgentsView::new(vec![store]))),
            address,
            stop: CancellationToken::new(),
        }
    }

    async fn start(script: &[u16]) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let harness = Self::new(script, listener.local_addr().unwrap());
        harness.listen(listener);
        harness.lead(TIMES);
        harness
    }

    fn listen(&self, listener: tokio::net::TcpListener) {
        let app = Router::new().fallback(receive).with_state(self.receiver.clone());
        let stop = self.stop.clone();
        tokio::spawn(async move {
            let server = axum::serve(listener, app);
            server.with_graceful_shutdown(stop.cancelled_owned()).await
        });
    }

    /// Another leader begins; the same again is a leader after it.
    fn lead(&self, times: WebhookTimes) {
        let url = format!("http://{}/gates", self.address);
        let webhook = GateWebhook::new(&url, SECRET, times).unwrap();
        let (agents, metrics, stop) = (self.agents.clone(), self.metrics.clone(), self.stop.clone());
        tokio::spawn(webhook.run(agents, metrics, Arc::new(Timestamp::now), stop));
    }

    /// Agent `x` has these gates now.
    fn set(&mut self, ids: &[&str]) {
        let mut object = agent("a", "x", &gates(ids));
        object["spec"]["instructions"] = json!(CANARY);
        let object = serde_json::from_value(object).unwrap();
        self.writer.apply_watcher_event(&Event::Apply(object));
    }

    async fn next(&mut self) -> Received {
        let received = timeout(SOON, self.received.recv()).await;
        received.expect("no request came").unwrap()
    }

    async fn next_ids(&mut self, count: usize) -> Vec<String> {
        let mut ids = Vec::new();
        while ids.len() < count {
            ids.push(self.next().await.id);
        }
        ids
    }

    fn count(&self, event: &str, result: &str) -> f64 {
        let series = format!(r#"agentloop_gate_webhook_attempts_total{{event="{event}",result="{result}"}} "#);
        let text = self.metrics.text();
        let line = text.lines().find(|line| line.starts_with(&series));
        line.map_or(-1.0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
    }

    async fn until_count(&self, event: &str, result: &str, count: f64) {
        let reached = async {
            while self.count(event, result) < count {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(SOON, reached).await.expect("the counter stays");
    }
}

#[tokio::test]
async fn a_gate_is_announced_once_with_a_signature_and_no_text_of_the_agent() {
    let mut harness = GateWebhookHarness::start(&[]).await;
    harness.set(&["e1-t1c1r1"]);
    let received = harness.next().await;
    assert_eq!(received.id, "uid-of-x_e1-t1c1r1_opened");
    assert!(!received.body.contains(CANARY), "{}", received.body);
    let body: Value = serde_json::from_str(&received.body).unwrap();
    let data = json!({
        "namespace": "a", "agent": "x", "uid": "uid-of-x", "gate": "e1-t1c1r1", "kind": "ToolCallNeedsApproval",
        "tool": "bank__pay", "argumentsHash": "5f0c", "openedAt": "2026-11-22T13:05:00Z",
        "expiresAt": "2099-11-22T14:05:00Z",
    });
    assert_eq!(
        body,
        json!({"type": "agentloop.gate.opened", "timestamp": "2026-11-22T13:05:00Z", "data": data})
    );
    harness.until_count("opened", "sent", 1.0).await;
    // What is sent next is the next gate: the first one is not sent again.
    harness.set(&["e1-t1c1r1", "e1-t1c1r2"]);
    assert_eq!(harness.next().await.id, "uid-of-x_e1-t1c1r2_opened");
    harness.until_count("opened", "sent", 2.0).await;
    harness.set(&[]);
    let mut closed = [harness.next().await, harness.next().await];
    closed.sort_by(|a, b| a.id.cmp(&b.id));
    assert_eq!(
        closed.each_ref().map(|one| one.id.as_str()),
        ["uid-of-x_e1-t1c1r1_closed", "uid-of-x_e1-t1c1r2_closed"]
    );
    assert_eq!(closed[0].kind(), "agentloop.gate.closed");
    harness.until_count("closed", "sent", 2.0).await;
    assert!(harness.received.try_recv().is_err());
    assert_eq!(
        (harness.count("opened", "failed"), harness.count("closed", "failed")),
        (0.0, 0.0)
    );
}

#[tokio::test]
async fn a_refused_request_is_sent_again_with_the_same_id_until_it_is_accepted() {
    let mut harness = GateWebhookHarness::start(&[500, 429, 503]).await;
    harness.set(&["g"]);
    assert_eq!(harness.next_ids(4).await, ["uid-of-x_g_opened"; 4]);
    harness.until_count("opened", "sent", 1.0).await;
    assert_eq!(harness.count("opened", "failed"), 3.0);
    harness.set(&["g", "h"]);
    assert_eq!(harness.next().await.id, "uid-of-x_h_opened");
}

#[tokio::test]
async fn a_redirect_is_a_failure_and_is_not_followed() {
    let mut harness = GateWebhookHarness::start(&[307, 302]).await;
    harness.set(&["g"]);
    for _ in 0..3 {
        assert_eq!(harness.next().await.path, "/gates");
    }
    harness.until_count("opened", "sent", 1.0).await;
    assert_eq!(harness.count("opened", "failed"), 2.0);
}

#[tokio::test]
async fn an_unreachable_receiver_is_notified_once_it_is_reachable() {
    let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let mut harness = GateWebhookHarness::new(&[], address);
    harness.lead(TIMES);
    harness.set(&["g"]);
    harness.until_count("opened", "failed", 2.0).await;
    harness.listen(tokio::net::TcpListener::bind(address).await.unwrap());
    assert_eq!(harness.next().await.id, "uid-of-x_g_opened");
    harness.until_count("opened", "sent", 1.0).await;
}

#[tokio::test]
async fn a_closed_gate_is_not_announced() {
    let mut harness = GateWebhookHarness::start(&[500; 3]).await;
    harness.set(&["g"]);
    assert_eq!(harness.next_ids(2).await, ["uid-of-x_g_opened"; 2]);
    // The receiver refuses whatever comes until the gate is gone.
    harness.receiver.script.lock().unwrap().extend([500; 1000]);
    harness.set(&[]);
    harness.set(&["h"]);
    while harness.next().await.id != "uid-of-x_h_opened" {}
    harness.receiver.script.lock().unwrap().clear();
    harness.until_count("opened", "sent", 1.0).await;
    while let Ok(received) = harness.received.try_recv() {
        assert_eq!(received.id, "uid-of-x_h_opened");
    }
    assert_eq!(harness.count("closed", "sent"), 0.0, "nobody was told of g");
}

#[tokio::test]
async fn the_next_leader_announces_open_gates_again_with_the_same_ids() {
    let mut harness = GateWebhookHarness::start(&[]).await;
    harness.set(&["g"]);
    let first = harness.next().await;
    harness.lead(TIMES);
    let second = harness.next().await;
    assert_eq!((first.id, first.body), (second.id, second.body));
}

#[tokio::test]
async fn a_slow_receiver_has_eight_requests_at_a_time_and_those_after_its_time_limit_are_repeated() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut harness = GateWebhookHarness::new(&[], listener.local_addr().unwrap());
    harness.listen(listener);
    harness.receiver.permits.forget_permits(Semaphore::MAX_PERMITS);
    // Longer than eight requests take to arrive on a busy machine.
    let slow = WebhookTimes {
        request: Duration::from_secs(8),
        ..TIMES
    };
    harness.lead(slow);
    let names: Vec<_> = (10..20).map(|number| format!("g{number}")).collect();
    harness.set(&names.iter().map(String::as_str).collect::<Vec<_>>());
    let ids = harness.next_ids(8).await;
    assert_eq!(harness.count("opened", "failed"), 0.0);
    let ninth = timeout(Duration::from_millis(300), harness.received.recv()).await;
    assert!(ninth.is_err(), "{ninth:?} does not wait for one of {ids:?}");
    harness.until_count("opened", "failed", 8.0).await;
    harness.receiver.permits.add_permits(1000);
    harness.until_count("opened", "sent", 10.0).await;
}
