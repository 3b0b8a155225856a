//! Events over the link, read with a token of the cluster, through a port-forward, as the manual says.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use futures::StreamExt;
use reqwest::{Client, Response, StatusCode};
use serde_json::{Value, json};
use sse_stream::SseStream;
use tokio::time::timeout;

use super::agents::{Agent, script, scripted};
use super::cluster::{Namespace, SYSTEM, shared};
use super::host;

/// Longest wait for anything.
const PATIENCE: Duration = Duration::from_secs(90);
/// Stands in instructions and answers; may stand in no event.
const CANARY: &str = "canary-answer-2f6b";

struct Link {
    client: Client,
    base: String,
}

impl Link {
    fn new(address: SocketAddr, ca: &str) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let host = format!("agentloop-link.{SYSTEM}.svc");
        let root = reqwest::Certificate::from_pem_bundle(ca.as_bytes()).unwrap();
        let client = Client::builder()
            .tls_certs_only(root)
            .resolve(&host, address)
            .no_proxy();
        Self {
            client: client.build().unwrap(),
            base: format!("https://{host}:{}/v1/namespaces", address.port()),
        }
    }

    async fn get(&self, token: &str, agent: &Agent<'_>, after: i64) -> Response {
        let url = format!(
            "{}/{}/agents/{}/events?after={after}",
            self.base,
            agent.kubectl.namespace(),
            agent.name
        );
        let request = self.client.get(url).bearer_auth(token);
        timeout(PATIENCE, request.send()).await.unwrap().unwrap()
    }

    /// The next so many events after one.
    async fn read(&self, token: &str, agent: &Agent<'_>, mut after: i64, count: usize) -> Vec<Value> {
        let deadline = Instant::now() + PATIENCE;
        let mut events = Vec::new();
        loop {
            assert!(Instant::now() < deadline, "{} of {count} events came", events.len());
            let response = self.get(token, agent, after).await;
            if response.status() != StatusCode::OK {
                // Roles are aggregated a moment after the chart, and a pod that starts does not answer yet.
                tokio::time::sleep(Duration::from_millis(500)).await;
                continue;
            }
            let mut stream = Box::pin(SseStream::from_bytes_stream(response.bytes_stream()));
            while let Ok(Some(Ok(event))) = timeout(PATIENCE, stream.next()).await {
                let Some(id) = event.id else { continue };
                after = id.parse().unwrap();
                events.push(serde_json::from_str(&event.data.unwrap()).unwrap());
                if events.len() == count {
                    return events;
                }
            }
        }
    }
}

#[test]
fn who_may_view_reads_each_event_once_over_a_port_forward_and_who_may_not_gets_403() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "events");
    let kubectl = &namespace.kubectl;
    let turns = json!({"turns": [{"text": CANARY, "delayMilliseconds": 200}, {"yield": {"sleep": 1}}]});
    kubectl.apply(&script("script", &turns));
    let spec = json!({"instructions": CANARY, "guardrails": {"maxConsecutiveTurns": 1000}});
    let agent = Agent::apply(&namespace, "told", &scripted("script"), &spec);
    agent.until_turns(1, 60);
    for account in ["reader", "visitor"] {
        kubectl.ok(&["create", "serviceaccount", account]);
    }
    let subject = format!("--serviceaccount={}:reader", kubectl.namespace());
    kubectl.ok(&["create", "rolebinding", "reader", "--clusterrole=view", &subject]);
    let token = |account: &str| kubectl.ok(&["create", "token", account]).trim().to_owned();
    let (reader, visitor) = (token("reader"), token("visitor"));
    let bundle = kubectl
        .get("configmap", "agentloop-link-ca")
        .expect("the namespace has the bundle");
    let forward = cluster.system.forward("service/agentloop-link", 8443);
    let link = Link::new(
        forward.address().parse().unwrap(),
        bundle["data"]["ca.crt"].as_str().unwrap(),
    );

    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let mut events = runtime.block_on(link.read(&reader, &agent, 0, 10));
    let pod = agent.until_pod(None, 30);
    host::kill(&pod, "worker");
    agent.until_restarted("worker", 1, 60);
    events.extend(runtime.block_on(link.read(&reader, &agent, 10, 10)));
    let numbers: Vec<i64> = events.iter().map(|event| event["seq"].as_i64().unwrap()).collect();
    assert_eq!(numbers, (1..=20).collect::<Vec<_>>());
    assert_eq!(events[0]["event"], "loop:started");
    assert!(
        !events.iter().any(|event| event.to_string().contains(CANARY)),
        "{events:?}"
    );

    for (token, status) in [(&visitor, 403), (&"nonsense".to_owned(), 401)] {
        let refused = runtime.block_on(link.get(token, &agent, 0));
        assert_eq!(refused.status().as_u16(), status);
    }
}
