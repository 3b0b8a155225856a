//! Tests of /metrics with tokens: over TLS only, with a certificate that readers can verify and that is renewed.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use agentloop::controller::auth::metrics_access::MetricsAuthentication;
use agentloop::controller::process::run;
use agentloop::controller::tls::ca::CertificateAuthority;
use agentloop::controller::tls::certificates::{CA_SECRET, LinkCertificates, server_config};
use agentloop::controller::tls::metrics::{METRICS_CA_CONFIGMAP, MetricsCertificate};
use agentloop::support::connections::ConnectionBounds;
use agentloop::telemetry::http::{self, HttpLimits};
use axum::routing::{get, post};
use axum::{Json, Router};
use axum_server::tls_rustls::RustlsConfig;
use jiff::{SignedDuration, Timestamp};
use pretty_assertions::assert_eq;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use crate::leader;
use crate::support::api_server::ApiServer;
use crate::support::prometheus::Prometheus;

const SOON: Duration = Duration::from_secs(30);
/// The metrics Service of the release.
const SERVICE: &str = "agentloop-metrics.default.svc";

/// A controller that leads, whose readers need a token; the API server knows those of `reader` and `stranger`.
struct TokenController {
    address: SocketAddr,
    /// What its ConfigMap has.
    bundle: String,
    stop: CancellationToken,
}

impl TokenController {
    async fn start() -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let server = ApiServer::new(Arc::new(Timestamp::now));
        let router = Router::new()
            .route("/apis/authentication.k8s.io/v1/tokenreviews", post(token_review))
            .route(
                "/apis/authorization.k8s.io/v1/subjectaccessreviews",
                post(access_review),
            )
            .fallback_service(server.router());
        let config = kube::Config::new(format!("http://{}", serve(router).await).parse().unwrap());
        let mut options = leader::options(false);
        options.metrics_authentication = MetricsAuthentication::Token;
        options.metrics_hosts = vec![SERVICE.into(), "localhost".into()];
        let (address, stop) = (options.metrics_address, CancellationToken::new());
        tokio::spawn(run(options, config, stop.clone()));
        let deadline = Instant::now() + SOON;
        let bundle = loop {
            if let Some(map) = server.get("/configmaps", "default", METRICS_CA_CONFIGMAP) {
                assert_eq!(map["data"].as_object().unwrap().len(), 1);
                assert!(!map.to_string().contains("PRIVATE"), "{map}");
                break map["data"]["ca.crt"].as_str().unwrap().to_owned();
            }
            assert!(Instant::now() < deadline, "the CA is never published");
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        Self { address, bundle, stop }
    }

    /// Status and text of a scrape of this host.
    async fn scrape(&self, host: &str, token: Option<&str>) -> (u16, String) {
        let request = client(&self.bundle, host, self.address).get(format!("https://{host}/metrics"));
        let request = match token {
            Some(token) => request.bearer_auth(token),
            None => request,
        };
        let response = request.send().await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    }
}

impl Drop for TokenController {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn token_review(Json(mut review): Json<Value>) -> Json<Value> {
    let token = review["spec"]["token"].as_str().unwrap_or_default().to_owned();
    review["status"] = if ["reader", "stranger"].contains(&token.as_str()) {
        json!({"authenticated": true, "user": {"username": token}})
    } else {
        json!({"authenticated": false})
    };
    Json(review)
}

async fn access_review(Json(mut review): Json<Value>) -> Json<Value> {
    let url = json!({"path": "/metrics", "verb": "get"});
    let is_allowed = review["spec"]["user"] == "reader" && review["spec"]["nonResourceAttributes"] == url;
    review["status"] = json!({"allowed": is_allowed});
    Json(review)
}

/// Serves a router on loopback.
async fn serve(router: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    address
}

/// A client that trusts these authorities only, and finds the host at the address.
pub fn client(bundle: &str, host: &str, address: SocketAddr) -> reqwest::Client {
    let roots = reqwest::Certificate::from_pem_bundle(bundle.as_bytes()).unwrap();
    let builder = reqwest::Client::builder().tls_certs_only(roots).no_proxy();
    builder.resolve(host, address).timeout(SOON).build().unwrap()
}

#[tokio::test]
async fn metrics_with_tokens_are_served_over_tls_to_who_may_read_them() {
    let controller = TokenController::start().await;
    let (status, text) = controller.scrape(SERVICE, Some("reader")).await;
    assert_eq!(status, 200, "{text}");
    assert!(text.contains("\nagentloop_build_info{"), "{text}");
    assert_eq!(
        controller.scrape("localhost", Some("reader")).await.0,
        200,
        "a port-forward"
    );
    for (token, status) in [(None, 401), (Some("unknown"), 401), (Some("stranger"), 403)] {
        let (answer, text) = controller.scrape(SERVICE, token).await;
        assert_eq!(answer, status, "{token:?}: {text}");
        assert!(!text.contains("agentloop_build_info"), "{text}");
    }
    let other = CertificateAuthority::make(Timestamp::now()).unwrap().certificate;
    let refused = client(&other, SERVICE, controller.address).get(format!("https://{SERVICE}/metrics"));
    assert!(refused.send().await.unwrap_err().is_connect());
}

#[tokio::test]
async fn plain_http_is_refused_on_the_port_of_metrics_with_tokens() {
    let controller = TokenController::start().await;
    // The first scrape waits for the certificate.
    assert_eq!(controller.scrape(SERVICE, Some("reader")).await.0, 200);
    let url = format!("http://{}/metrics", controller.address);
    let response = reqwest::Client::new().get(url).bearer_auth("reader").send().await;
    let response = response.unwrap();
    assert_eq!(response.status(), 400);
    assert_eq!(response.text().await.unwrap(), "this port serves HTTPS only\n");
}

#[tokio::test]
async fn prometheus_scrapes_over_tls_with_a_token() {
    let controller = TokenController::start().await;
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        std::fs::write(directory.path().join(name), text).unwrap();
        directory.path().join(name)
    };
    let (ca, token) = (file("ca.crt", &controller.bundle), file("token", "reader"));
    let job = |name: &str, more: Value| {
        let mut job = json!({
            "job_name": name,
            "scheme": "https",
            "tls_config": {"ca_file": ca, "server_name": SERVICE},
            "static_configs": [{"targets": [controller.address.to_string()]}],
        });
        job.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        job
    };
    let scrapes = json!([
        job("reader", json!({"authorization": {"credentials_file": token}})),
        job("anonymous", json!({})),
        job(
            "plain",
            json!({"scheme": "http", "authorization": {"credentials_file": token}})
        ),
        job(
            "nameless",
            json!({"authorization": {"credentials_file": token}, "tls_config": {"ca_file": ca}})
        ),
    ]);
    let found = tokio::task::spawn_blocking(move || {
        let prometheus = Prometheus::start(&scrapes);
        prometheus.until_some("the build", r#"agentloop_build_info{job="reader"}"#);
        ["reader", "anonymous", "plain", "nameless"].map(|job| prometheus.until_value(&format!(r#"up{{job="{job}"}}"#)))
    });
    assert_eq!(found.await.unwrap(), ["1", "0", "0", "0"]);
}

/// A clock that can be moved.
#[derive(Clone)]
struct MovableClock(Arc<Mutex<Timestamp>>);

impl MovableClock {
    fn new() -> Self {
        Self(Arc::new(Mutex::new(Timestamp::now())))
    }

    fn forward(&self, by: SignedDuration) {
        *self.0.lock().unwrap() += by;
    }

    fn wall(&self) -> Arc<dyn Fn() -> Timestamp + Send + Sync> {
        let clock = self.clone();
        Arc::new(move || *clock.0.lock().unwrap())
    }
}

/// The authorities of a leader, which begin with this call if there are none.
async fn lead(server: &ApiServer, clock: &MovableClock) -> String {
    let hosts = vec!["127.0.0.1".into()];
    let link = LinkCertificates::start(server.client(), "default", hosts, clock.wall()).await;
    let bundle = link.unwrap().bundle();
    bundle.borrow().clone()
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_does_not_lead_waits_for_the_authorities_and_writes_none() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (server, clock) = (ApiServer::new(Arc::new(Timestamp::now)), MovableClock::new());
    let obtained = MetricsCertificate::obtain(server.client(), "default", vec![SERVICE.into()], clock.wall());
    let mut obtained = Box::pin(obtained);
    assert!(timeout(Duration::from_mins(1), &mut obtained).await.is_err());
    assert_eq!(server.take_writes(), [""; 0]);
    lead(&server, &clock).await;
    server.take_writes();
    assert!(timeout(Duration::from_secs(2), &mut obtained).await.is_ok());
    assert_eq!(server.take_writes(), [""; 0]);
}

#[tokio::test]
async fn the_certificate_is_renewed_while_it_is_served_and_follows_new_authorities() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (server, clock) = (ApiServer::new(Arc::new(Timestamp::now)), MovableClock::new());
    let first = lead(&server, &clock).await;
    let hosts = vec![SERVICE.to_owned()];
    let certificate = MetricsCertificate::obtain(server.client(), "default", hosts, clock.wall()).await;
    let tls = certificate.tls();
    let address = served_over_tls(tls.clone(), HttpLimits::default()).await;
    tokio::spawn(certificate.maintain());
    let answers = async |bundle: &str| {
        let get = client(bundle, SERVICE, address).get(format!("https://{SERVICE}/"));
        get.send().await.is_ok()
    };
    let pass = async || {
        tokio::time::pause();
        tokio::time::sleep(Duration::from_secs(61)).await;
        tokio::time::resume();
    };
    assert!(answers(&first).await);
    let before = tls.get_inner();
    pass().await;
    assert!(Arc::ptr_eq(&before, &tls.get_inner()), "nothing is due");
    // A month before its end.
    clock.forward(SignedDuration::from_hours(24 * 61));
    pass().await;
    assert!(!Arc::ptr_eq(&before, &tls.get_inner()));
    assert!(answers(&first).await);
    // The old one is served until there are others.
    server.delete("/secrets", "default", CA_SECRET);
    pass().await;
    assert!(answers(&first).await);
    let second = lead(&server, &clock).await;
    assert_ne!(first, second);
    pass().await;
    assert!(answers(&second).await);
    assert!(!answers(&first).await);
}

/// Serves one page over TLS on loopback.
async fn served_over_tls(tls: RustlsConfig, limits: HttpLimits) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = Router::new().route("/", get(|| async { "page\n" }));
    tokio::spawn(http::serve_tls(listener, router, limits, tls));
    address
}

/// Waits until the peer closes a connection; returns what it sent.
async fn rest(connection: &mut TcpStream) -> Vec<u8> {
    let mut received = Vec::new();
    let _ = timeout(SOON, connection.read_to_end(&mut received)).await.unwrap();
    received
}

#[tokio::test]
async fn a_handshake_that_takes_too_long_ends_and_leaves_its_slot_to_others() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let authority = CertificateAuthority::make(Timestamp::now()).unwrap();
    let leaf = authority.sign(&[SERVICE.into()], Timestamp::now()).unwrap();
    let limits = HttpLimits {
        head: Duration::from_millis(200),
        connections: ConnectionBounds::of_strangers(9, 1),
        ..HttpLimits::default()
    };
    let address = served_over_tls(RustlsConfig::from_config(server_config(&leaf).unwrap()), limits).await;
    for start in [&b""[..], &[22, 3, 1, 2]] {
        let since = Instant::now();
        let mut slow = TcpStream::connect(address).await.unwrap();
        slow.write_all(start).await.unwrap();
        let mut other = TcpStream::connect(address).await.unwrap();
        assert_eq!(rest(&mut other).await, b"", "the slot is taken");
        rest(&mut slow).await;
        assert!(since.elapsed() >= limits.head, "{start:?}");
        let client = client(&authority.certificate, SERVICE, address);
        let deadline = Instant::now() + SOON;
        while client.get(format!("https://{SERVICE}/")).send().await.is_err() {
            assert!(Instant::now() < deadline, "never room after {start:?}");
        }
    }
}
