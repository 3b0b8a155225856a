//! Servers behind a private certificate authority: `tls.caSecretRef` of models, tool servers and receivers of responses.

use std::time::Duration;

use agentloop::api::failure::FailureKind;
use agentloop::link::socket::{CALL_HEADER, MCP_FAILURE_HEADER, NOT_SENT, PURPOSE_HEADER};
use axum::Router;
use axum::extract::Request;
use axum::http::header::CONTENT_TYPE;
use axum::middleware::map_request;
use axum::routing::post;
use axum_server::tls_rustls::RustlsConfig;
use pretty_assertions::assert_eq;
use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::controller::certificates;
use super::harness::{GatewayHarness, PROMPT, failure, url, whole};
use super::provider::ANSWER;

/// A model server, tool server and receiver of responses with a certificate of an authority of its own.
pub struct PrivateServer {
    pub base: String,
    pub ca: String,
    asked: watch::Receiver<usize>,
}

impl PrivateServer {
    pub async fn start() -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let (ca, certificate, key) = certificates();
        let tls = RustlsConfig::from_pem(certificate.into_bytes(), key.into_bytes())
            .await
            .unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let base = format!("https://{}", listener.local_addr().unwrap());
        let (asks, asked) = watch::channel(0);
        let json = |body: &'static str| post(move || async move { ([(CONTENT_TYPE, "application/json")], body) });
        let app = Router::new()
            .route("/v1/chat/completions", json(ANSWER))
            .route("/mcp", json("{}"))
            .route("/responses", json("{}"))
            .layer(map_request(move |request: Request| {
                asks.send_modify(|count| *count += 1);
                async { request }
            }));
        let server = axum_server::from_tcp_rustls(listener, tls).unwrap();
        tokio::spawn(async move { server.serve(app.into_make_service()).await.unwrap() });
        Self { base, ca, asked }
    }

    /// Waits for this many requests.
    pub async fn until_asked(&self, times: usize) {
        let mut asked = self.asked.clone();
        let wait = asked.wait_for(|count| *count >= times);
        let waited = tokio::time::timeout(Duration::from_secs(30), wait).await;
        waited.expect("no request").unwrap();
    }
}

/// A gateway whose models, tool server and receiver are this server, without its authority in a file yet. `tls`: whether the spec
/// names one.
async fn started(server: &PrivateServer, tls: bool) -> GatewayHarness {
    let mut harness = GatewayHarness::new().await;
    let tls = if tls {
        json!({"caSecretRef": {"name": "roots"}})
    } else {
        Value::Null
    };
    harness.set(&json!({"baseURL": format!("{}/v1", server.base), "tls": tls}));
    harness.light = harness.model.clone();
    harness.light["name"] = json!("small");
    harness.light["apiKeySecretRef"] = Value::Null;
    harness.tools = json!({"servers": [{"name": "hub", "url": format!("{}/mcp", server.base), "tls": tls}]});
    harness.task = json!({"responses": {"http": {"url": format!("{}/responses", server.base), "tls": tls}}});
    // The system's roots, which a client without an authority needs: of another authority than the server's.
    let roots = harness.path("ca.crt").to_str().unwrap().to_owned();
    harness.environment = vec![("SSL_CERT_FILE", roots)];
    harness.start().await;
    harness
}

/// Mounts an authority for one server, as the kubelet does.
fn mount(harness: &GatewayHarness, server: &str, pem: &str) {
    let dir = harness.path("server-ca").join(server);
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("ca.crt"), pem).unwrap();
}

async fn pre_check(harness: &GatewayHarness, id: &str) -> reqwest::Response {
    let body = json!({"model": "small", "messages": [{"role": "user", "content": PROMPT}]});
    let request = harness.worker.post(url(harness.route)).header(CALL_HEADER, id);
    request
        .header(PURPOSE_HEADER, "Precheck")
        .json(&body)
        .send()
        .await
        .unwrap()
}

async fn tool_call(harness: &GatewayHarness) -> reqwest::Response {
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "t"}});
    harness
        .worker
        .post(url("/v1/mcp/hub"))
        .json(&body)
        .send()
        .await
        .unwrap()
}

/// Has a response to a task sent once: 200 with the status of the receiver, or why there is none.
async fn send_response(harness: &GatewayHarness) -> (StatusCode, String) {
    let body = json!({"id": "task-1", "body": {"outcome": "Completed"}});
    let request = harness.worker.post(url("/v1/task-responses")).json(&body);
    let answer = request.send().await.unwrap();
    (answer.status(), answer.text().await.unwrap())
}

#[tokio::test]
async fn each_server_is_trusted_by_its_own_authority_which_is_read_for_each_request() {
    let server = PrivateServer::start().await;
    let harness = started(&server, true).await;
    mount(&harness, "model", &server.ca);
    assert_eq!(harness.ask("t1c1a1").await, (StatusCode::OK, ANSWER.to_owned()));
    // That of the model serves no other server.
    let absent = failure(pre_check(&harness, "t1c2a1").await).await;
    assert_eq!(absent.kind, FailureKind::Unreachable);
    let says = "cannot be reached: the Secret of spec.lightModel.tls.caSecretRef has no key ca.crt; correct the Secret";
    assert!(absent.message.ends_with(says), "{}", absent.message);
    mount(&harness, "light-model", &server.ca);
    assert_eq!(pre_check(&harness, "t1c2a2").await.status(), StatusCode::OK);
    mount(&harness, "tools/hub", &server.ca);
    let answer = tool_call(&harness).await;
    assert_eq!(
        (answer.status(), answer.text().await.unwrap()),
        (StatusCode::OK, "{}".to_owned())
    );
    let says = "the Secret of spec.task.responses.http.tls.caSecretRef has no key ca.crt; correct the Secret";
    assert_eq!(
        send_response(&harness).await,
        (StatusCode::BAD_GATEWAY, says.to_owned())
    );
    mount(&harness, "task.responses", &server.ca);
    assert_eq!(send_response(&harness).await, (StatusCode::OK, "200".to_owned()));
}

#[tokio::test]
async fn a_server_of_another_authority_is_refused_and_nothing_is_sent_or_charged() {
    let (server, other) = (PrivateServer::start().await, PrivateServer::start().await);
    // The authorities of the tests have the same name, so that the signature is what does not match.
    let rejected = "cannot be reached: invalid peer certificate: BadSignature; check";
    for named in [true, false] {
        let harness = started(&server, named).await;
        for dir in ["model", "light-model", "tools/hub", "task.responses"] {
            mount(&harness, dir, &other.ca);
        }
        let refused = failure(harness.call("t1c1a1", &whole()).await).await;
        assert_eq!(refused.kind, FailureKind::Unreachable);
        let says = format!("the model server at spec.model.baseURL {rejected} spec.model.tls.caSecretRef");
        assert_eq!(refused.message, says, "with a Secret: {named}");
        let refused = tool_call(&harness).await;
        assert_eq!(refused.headers()[MCP_FAILURE_HEADER], NOT_SENT);
        let says =
            format!("the server at spec.tools.servers[hub].url {rejected} spec.tools.servers[hub].tls.caSecretRef");
        assert_eq!(refused.text().await.unwrap(), says, "with a Secret: {named}");
        let says = "invalid peer certificate: BadSignature; check spec.task.responses.http.tls.caSecretRef".to_owned();
        assert_eq!(
            send_response(&harness).await,
            (StatusCode::BAD_GATEWAY, says),
            "with a Secret: {named}"
        );
        assert_eq!(*server.asked.borrow(), 0, "nothing was sent");
        harness.until_counted(0, 0).await;
    }
}

#[tokio::test]
async fn a_secret_without_a_certificate_stops_each_request_until_it_is_corrected() {
    let server = PrivateServer::start().await;
    let harness = started(&server, true).await;
    let dirs = ["model", "tools/hub", "task.responses"];
    for dir in dirs {
        mount(&harness, dir, "canary");
    }
    let what = "has no PEM certificate in ca.crt; correct the Secret";
    let refused = failure(harness.call("t1c1a1", &whole()).await).await;
    let says = format!("the Secret of spec.model.tls.caSecretRef {what}");
    assert!(refused.message.ends_with(&says), "{}", refused.message);
    let refused = tool_call(&harness).await;
    assert_eq!(refused.headers()[MCP_FAILURE_HEADER], NOT_SENT);
    let says = format!("the Secret of spec.tools.servers[hub].tls.caSecretRef {what}");
    let text = refused.text().await.unwrap();
    assert!(text.ends_with(&says), "{text}");
    let says = format!("the Secret of spec.task.responses.http.tls.caSecretRef {what}");
    assert_eq!(send_response(&harness).await, (StatusCode::BAD_GATEWAY, says));
    let report = harness.controller.until("the failure", |report| {
        report
            .model
            .as_ref()
            .is_some_and(|model| model.failure == Some(FailureKind::Unreachable))
    });
    report.await;
    for dir in dirs {
        mount(&harness, dir, &server.ca);
    }
    assert_eq!(harness.ask("t1c1a2").await.0, StatusCode::OK);
    assert_eq!(tool_call(&harness).await.status(), StatusCode::OK);
    assert_eq!(send_response(&harness).await.0, StatusCode::OK);
}
