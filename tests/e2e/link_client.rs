//! A client of the controller's API for users: the events of an Agent, and requests to it.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use futures::StreamExt;
use reqwest::{Client, Response, StatusCode};
use serde_json::{Value, json};
use sse_stream::SseStream;
use tokio::time::timeout;

use super::agents::Agent;
use super::cluster::SYSTEM;
use crate::support::kubectl::Kubectl;

/// Longest wait for an answer, and for events of a model that does not compute.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(90);
/// Longest wait for the receipt of a request: the controller itself waits less.
const RECEIPT: Duration = Duration::from_secs(15);
const SERVICE: &str = "agentloop-link";
const PORT: u16 = 8443;

pub struct LinkUser {
    client: Client,
    base: String,
    token: String,
}

impl LinkUser {
    /// A user with this token; `address` leads to the leader, `ca` is the bundle of a namespace.
    pub fn new(address: SocketAddr, ca: &str, token: &str) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let host = format!("{SERVICE}.{SYSTEM}.svc");
        let root = reqwest::Certificate::from_pem_bundle(ca.as_bytes()).unwrap();
        let client = Client::builder()
            .tls_certs_only(root)
            .resolve(&host, address)
            .no_proxy();
        Self {
            client: client.build().unwrap(),
            base: format!("https://{host}:{}/v1/namespaces", address.port()),
            token: token.to_owned(),
        }
    }

    /// A service account of the namespace that has the role `edit`, by way of the Service, which follows the leader.
    pub fn editor(system: &Kubectl, kubectl: &Kubectl, account: &str) -> Self {
        kubectl.ok(&["create", "serviceaccount", account]);
        let subject = format!("--serviceaccount={}:{account}", kubectl.namespace());
        kubectl.ok(&["create", "rolebinding", account, "--clusterrole=edit", &subject]);
        let service = system.get("service", SERVICE).expect("the release has it");
        let address = service["spec"]["clusterIP"].as_str().expect("it has an address");
        let address = SocketAddr::new(address.parse().unwrap(), PORT);
        let token = kubectl.ok(&["create", "token", account, "--duration=3h"]);
        Self::new(address, &bundle(kubectl), token.trim())
    }

    /// `None`: no answer.
    pub async fn events(&self, agent: &Agent<'_>, query: &str) -> Option<Response> {
        let url = format!("{}/events?{query}", self.url(agent));
        let request = self.client.get(url).bearer_auth(&self.token);
        timeout(WAIT_TIMEOUT, request.send()).await.ok()?.ok()
    }

    /// The events after one up to the first for which `is_last` holds, which comes within `limit`.
    pub async fn read(
        &self,
        agent: &Agent<'_>,
        mut after: i64,
        query: &str,
        limit: Duration,
        mut is_last: impl FnMut(&Value) -> bool,
    ) -> Vec<Value> {
        let deadline = Instant::now() + limit;
        let left = || deadline.saturating_duration_since(Instant::now());
        let mut events = Vec::new();
        loop {
            assert!(!left().is_zero(), "only {} events within {limit:?}", events.len());
            let response = self.events(agent, &format!("after={after}{query}")).await;
            let Some(response) = response.filter(|response| response.status() == StatusCode::OK) else {
                // Roles are aggregated a moment after the chart, and a pod that starts does not answer yet.
                tokio::time::sleep(Duration::from_millis(500)).await;
                continue;
            };
            let mut stream = Box::pin(SseStream::from_bytes_stream(response.bytes_stream()));
            while let Ok(Some(Ok(event))) = timeout(left(), stream.next()).await {
                let Some(id) = event.id else { continue };
                after = id.parse().unwrap();
                let event: Value = serde_json::from_str(&event.data.unwrap()).unwrap();
                let ends = is_last(&event);
                events.push(event);
                if ends {
                    return events;
                }
            }
        }
    }

    /// Sends a request once; status and answer. `None`: no answer.
    pub async fn request(&self, agent: &Agent<'_>, id: &str, prompt: &str) -> Option<(u16, Value)> {
        let url = format!("{}/tasks", self.url(agent));
        let body = json!({"id": id, "prompt": prompt});
        let request = self.client.post(url).bearer_auth(&self.token).json(&body);
        let response = timeout(RECEIPT, request.send()).await.ok()?.ok()?;
        let status = response.status().as_u16();
        Some((status, response.json().await.unwrap_or_default()))
    }

    /// Sends a request until it is accepted, as the manual says; the answer, and how often it was sent.
    pub async fn until_accepted(&self, agent: &Agent<'_>, id: &str, prompt: &str, limit: Duration) -> (Value, usize) {
        let deadline = Instant::now() + limit;
        for tries in 1.. {
            let answer = self.request(agent, id, prompt).await;
            match answer {
                Some((202, answer)) => return (answer, tries),
                // 403: roles are aggregated a moment after the chart.
                None | Some((403 | 429 | 503, _)) => {}
                Some(other) => panic!("{id}: {other:?}"),
            }
            assert!(Instant::now() < deadline, "{id} is not accepted: {answer:?}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        unreachable!("tries do not end")
    }

    /// The response to a request within `limit`, from the events after it was accepted.
    pub async fn response(&self, agent: &Agent<'_>, accepted: &Value, limit: Duration) -> Value {
        let id = accepted["id"].as_str().expect("an id");
        let after = accepted["after"].as_i64().expect("a cursor");
        let ends = |event: &Value| {
            let note = event["note"].as_str().unwrap_or_default();
            event["event"] == "task:ended" && note.starts_with(&format!("{id}: "))
        };
        let events = self.read(agent, after, "&messages=true", limit, ends).await;
        let end = events.last().expect("the end");
        let text = end["messages"][0].as_str().expect("a response");
        serde_json::from_str(text).expect("JSON")
    }

    fn url(&self, agent: &Agent<'_>) -> String {
        format!("{}/{}/agents/{}", self.base, agent.kubectl.namespace(), agent.name)
    }
}

/// The link's certificate authority, as each namespace with Agents has it.
pub fn bundle(kubectl: &Kubectl) -> String {
    kubectl.until("the bundle", 60, "configmaps", "agentloop-link-ca", |bundle| {
        bundle["data"]["ca.crt"].as_str().map(str::to_owned)
    })
}

/// Runs a client to its end.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_all().build().unwrap().block_on(future)
}
