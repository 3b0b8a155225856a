//! Tests of the link's server, over real TLS on loopback: who may speak, what is refused, what streams do.
//!
//! The API server is a function that answers reviews of tokens; tokens say in clear what it is to answer.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
// Counters hold whole numbers.
#![allow(clippy::float_cmp)]

mod deliveries;
mod processes;
mod version_1;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use agentloop::api::NamespacedName;
use agentloop::controller::auth::access::ClientAuthorizer;
use agentloop::controller::auth::identity::PodAuthenticator;
use agentloop::controller::delivery_relay::DeliveryRelay;
use agentloop::controller::gates::answers::GateAnswerRecorder;
use agentloop::controller::link_service::ControllerLink;
use agentloop::controller::pod_sessions::{LivePod, PodSessions};
use agentloop::controller::runtime::{EventQueue, EventSink};
use agentloop::controller::tls::ca::CertificateAuthority;
use agentloop::controller::tls::certificates::server_config;
use agentloop::link::body_room::BodyBounds;
use agentloop::link::messages::{
    AttachRequest, AttachResponse, Directives, LoopTotals, PROTOCOL, PodRefusal, PodReport, REPORT_SECONDS, RefusalCode,
};
use agentloop::link::server::{LinkLimits, MAX_BODY_BYTES, serve};
use agentloop::support::connections::ConnectionBounds;
use agentloop::telemetry::metrics::Metrics;
use axum::http::{Request, Response, StatusCode};
use axum_server::tls_rustls::RustlsConfig;
use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::api::authentication::v1::TokenReview;
use pretty_assertions::assert_eq;
use rstest::rstest;
use serde_json::{Value, json};
use sse_stream::{Sse, SseStream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::support::agents::{agent, idle_ledger, view};
use crate::support::tokens::{token as token_of, unknown, words};

/// A token that the API server takes for the pod of Agent `x` in namespace `a`, uid `u2`.
const TOKEN: &str = "agentloop.dev/link a agentloop-agent x u2";
/// The epoch of that pod.
const EPOCH: i64 = 4;
/// Longest wait for anything that is to happen at once, also on a busy machine.
const SOON: Duration = Duration::from_secs(30);

/// Answers a review as the token says: audience, namespace, account, pod, uid.
pub fn review(token: &str) -> Value {
    let token = words(token);
    let words: Vec<&str> = token.split(' ').collect();
    let [audience, namespace, account, pod, uid] = words[..] else {
        return json!({"authenticated": false});
    };
    json!({
        "authenticated": true,
        "audiences": [audience],
        "user": {
            "username": format!("system:serviceaccount:{namespace}:{account}"),
            "extra": {
                "authentication.kubernetes.io/pod-name": [pod],
                "authentication.kubernetes.io/pod-uid": [uid],
            },
        },
    })
}

/// A client of an API server that knows reviews of tokens only, and counts them.
pub fn api_server(reviews: Arc<AtomicUsize>) -> kube::Client {
    let answer = tower::service_fn(move |request: Request<kube::client::Body>| {
        let reviews = reviews.clone();
        async move {
            assert_eq!(request.uri().path(), "/apis/authentication.k8s.io/v1/tokenreviews");
            reviews.fetch_add(1, Ordering::SeqCst);
            let body = request.into_body().collect_bytes().await.unwrap();
            let asked: TokenReview = serde_json::from_slice(&body).unwrap();
            assert_eq!(asked.spec.audiences.unwrap(), ["agentloop.dev/link"]);
            let mut answer: Value = serde_json::from_slice(&body).unwrap();
            answer["status"] = review(&asked.spec.token.unwrap());
            Ok::<_, Infallible>(Response::new(axum::body::Body::from(answer.to_string())))
        }
    });
    kube::Client::new(answer, "default")
}

/// A running server, and all that its tests look at.
struct LinkHarness {
    address: SocketAddr,
    client: reqwest::Client,
    loops: Arc<PodSessions>,
    relay: Arc<DeliveryRelay>,
    /// Certificate of the authority.
    ca: String,
    metrics: Arc<Metrics>,
    events: EventQueue,
    reviews: Arc<AtomicUsize>,
    stop: CancellationToken,
}

impl Drop for LinkHarness {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn x() -> NamespacedName {
    NamespacedName::new("a", "x")
}

/// The pod that the reconciler expects.
fn expected() -> LivePod {
    LivePod {
        uid: "u2".into(),
        epoch: EPOCH,
    }
}

impl LinkHarness {
    /// A leader with Agents `x` (whose pod is expected) and `y` (not looked at yet) in namespace `a`.
    async fn start() -> Self {
        Self::with(LinkLimits::default(), true).await
    }

    async fn with(limits: LinkLimits, leads: bool) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let authority = CertificateAuthority::make(Timestamp::now()).unwrap();
        let leaf = authority.sign(&["127.0.0.1".into()], Timestamp::now()).unwrap();
        let tls = RustlsConfig::from_config(server_config(&leaf).unwrap());
        let root = reqwest::Certificate::from_pem(authority.certificate.as_bytes()).unwrap();
        let client = reqwest::Client::builder().tls_certs_only([root]).build().unwrap();

        let (loops, changed) = PodSessions::new();
        // No reconciler runs in this test.
        drop(changed);
        let loops = Arc::new(loops);
        let known = LoopTotals {
            turn: 7,
            ..LoopTotals::default()
        };
        loops.expect_pod((&x(), "uid-of-x"), expected(), known, Directives::default());
        let agents = Arc::new(OnceLock::new());
        if leads {
            let status = json!({});
            assert!(
                agents
                    .set(view(&[agent("a", "x", &status), agent("a", "y", &status)]))
                    .is_ok()
            );
        }
        let relay = Arc::new(DeliveryRelay::new(Duration::from_secs(1)).0);
        let (sink, events) = EventSink::new();
        let (metrics, reviews) = (Arc::new(Metrics::new().unwrap()), Arc::new(AtomicUsize::new(0)));
        let link = ControllerLink {
            identities: PodAuthenticator::new(api_server(reviews.clone())),
            access: ClientAuthorizer::new(api_server(reviews.clone())),
            answers: GateAnswerRecorder::new(api_server(reviews.clone())),
            loops: loops.clone(),
            relay: relay.clone(),
            tasks: Arc::new(agentloop::controller::task_relay::TaskRelay::new(Duration::from_secs(
                5,
            ))),
            agents,
            budgets: idle_ledger(api_server(reviews.clone()), &loops),
            history: None,
            metrics: metrics.clone(),
            events: sink,
            clock: Arc::new(Timestamp::now),
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        tokio::spawn(serve(listener, tls, Arc::new(link), limits, stop.clone()));
        Self {
            address,
            client,
            loops,
            relay,
            ca: authority.certificate.clone(),
            metrics,
            events,
            reviews,
            stop,
        }
    }

    fn url(&self, path: &str) -> String {
        format!("https://{}{path}", self.address)
    }

    async fn post(&self, path: &str, token: &str, body: impl Into<reqwest::Body>) -> reqwest::Response {
        let request = self.client.post(self.url(path)).bearer_auth(token_of(token)).body(body);
        timeout(SOON, request.send()).await.unwrap().unwrap()
    }

    async fn attach(&self, token: &str, epoch: i64) -> reqwest::Response {
        let attach = AttachRequest {
            protocol: PROTOCOL,
            oldest_protocol: None,
            epoch,
            models: vec![],
        };
        self.post("/v1/attach", token, serde_json::to_string(&attach).unwrap())
            .await
    }

    async fn listen(&self, epoch: i64) -> reqwest::Response {
        let request = self
            .client
            .get(self.url(&format!("/v1/directives?epoch={epoch}")))
            .bearer_auth(token_of(TOKEN));
        timeout(SOON, request.send()).await.unwrap().unwrap()
    }

    /// Says again what the pod is to do.
    fn direct(&self, directives: Directives) {
        self.loops
            .expect_pod((&x(), "uid-of-x"), expected(), LoopTotals::default(), directives);
    }

    fn sample(&self, series: &str) -> f64 {
        let text = self.metrics.text();
        let line = text.lines().find(|line| line.starts_with(&format!("{series} ")));
        line.map_or(0.0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
    }
}

async fn refusal(response: reqwest::Response) -> (StatusCode, PodRefusal) {
    (response.status(), response.json().await.unwrap())
}

/// The next event of a stream; `None` when it ended.
async fn next(
    events: &mut (impl StreamExt<Item = Result<Sse, sse_stream::Error>> + Unpin),
) -> Option<(String, String)> {
    let event = timeout(SOON, events.next()).await.unwrap()?.unwrap();
    Some((event.event.unwrap_or_default(), event.data.unwrap_or_default()))
}

fn suspended() -> Directives {
    Directives {
        suspend: true,
        ..Directives::default()
    }
}

#[tokio::test]
async fn a_pod_attaches_and_learns_what_is_known_and_what_to_do() {
    let harness = LinkHarness::start().await;
    harness.loops.expect_pod(
        (&x(), "uid-of-x"),
        expected(),
        LoopTotals {
            turn: 9,
            ..LoopTotals::default()
        },
        suspended(),
    );
    let response = harness.attach(TOKEN, EPOCH).await;
    assert_eq!(response.status(), StatusCode::OK);
    let want = AttachResponse {
        protocol: PROTOCOL,
        epoch: EPOCH,
        known: LoopTotals {
            turn: 9,
            ..LoopTotals::default()
        },
        directives: suspended(),
    };
    assert_eq!(response.json::<AttachResponse>().await.unwrap(), want);
    assert!(harness.loops.last_contact(&x(), "u2").is_some());
    assert_eq!(harness.sample("agentloop_link_attaches_total"), 1.0);
}

#[tokio::test]
async fn a_gateway_of_the_next_version_is_answered_in_a_common_version() {
    let harness = LinkHarness::start().await;
    let attach = |protocol: u32, oldest: Option<u32>| {
        let attach = AttachRequest {
            protocol,
            oldest_protocol: oldest,
            epoch: EPOCH,
            models: Vec::new(),
        };
        serde_json::to_string(&attach).unwrap()
    };
    let next = harness
        .post("/v1/attach", TOKEN, attach(PROTOCOL + 1, Some(PROTOCOL)))
        .await;
    assert_eq!(next.json::<AttachResponse>().await.unwrap().protocol, PROTOCOL);
    for (protocol, oldest) in [(PROTOCOL + 1, None), (PROTOCOL + 2, Some(PROTOCOL + 1)), (0, None)] {
        let (status, refusal) = refusal(harness.post("/v1/attach", TOKEN, attach(protocol, oldest)).await).await;
        assert_eq!(
            (status, refusal.code),
            (StatusCode::BAD_REQUEST, RefusalCode::Malformed)
        );
        assert!(refusal.message.contains("delete the pod"), "{}", refusal.message);
    }
}

#[tokio::test]
async fn a_report_is_stored_and_unknown_fields_are_ignored() {
    let harness = LinkHarness::start().await;
    let body = json!({"epoch": EPOCH, "usage": {"calls": 3}, "fieldOfALaterVersion": {"a": 1}});
    let response = harness.post("/v1/report", TOKEN, body.to_string()).await;
    assert_eq!(response.status(), StatusCode::NO_CONTENT);
    let mut want = PodReport {
        epoch: EPOCH,
        ..PodReport::default()
    };
    want.usage.calls = 3;
    assert_eq!(harness.loops.last_report(&x(), "u2").unwrap().report, want);
    assert_eq!(harness.sample("agentloop_link_reports_total"), 1.0);
}

#[tokio::test]
async fn a_restored_volume_of_an_agent_causes_one_event_with_its_lost_leases() {
    let mut harness = LinkHarness::start().await;
    let report = async |harness: &LinkHarness, lost: i64, epoch: i64| {
        let body = json!({"epoch": epoch, "budget": {"lostLeases": lost}, "usage": {"calls": lost}});
        let response = harness.post("/v1/report", TOKEN, body.to_string()).await;
        assert_eq!(response.status(), StatusCode::NO_CONTENT);
    };
    // A former leader knew of this one.
    report(&harness, 1, EPOCH).await;
    report(&harness, 1, EPOCH).await;
    assert!(harness.events.try_recv().is_none());
    report(&harness, 3, EPOCH).await;
    report(&harness, 3, EPOCH).await;
    let (event, about) = harness.events.try_recv().unwrap();
    assert_eq!((event.warning, event.reason.as_str()), (true, "VolumeRestored"));
    assert!(
        event.note.contains("the rest of its 2 leases counts as spent"),
        "{}",
        event.note
    );
    let about = (about.kind.as_deref(), about.namespace.as_deref(), about.name.as_deref());
    assert_eq!(about, (Some("Agent"), Some("a"), Some("x")));
    assert!(harness.events.try_recv().is_none(), "the same count again is no news");
    // The next pod reads the count from the volume.
    let next = LivePod {
        epoch: EPOCH + 1,
        ..expected()
    };
    harness
        .loops
        .expect_pod((&x(), "uid-of-x"), next, LoopTotals::default(), Directives::default());
    report(&harness, 3, EPOCH + 1).await;
    assert!(harness.events.try_recv().is_none());
    report(&harness, 4, EPOCH + 1).await;
    let (event, _) = harness.events.try_recv().unwrap();
    assert!(
        event.note.contains("the rest of its 1 lease counts as spent"),
        "{}",
        event.note
    );
    assert_eq!(harness.sample("agentloop_ledger_lost_leases_total"), 3.0);
}

#[rstest]
#[case::unreadable_token("nonsense", EPOCH, 401, RefusalCode::Unauthenticated)]
#[case::another_audience(
    "https://kubernetes.default.svc a agentloop-agent x u2",
    EPOCH,
    401,
    RefusalCode::Unauthenticated
)]
#[case::another_account("agentloop.dev/link a default x u2", EPOCH, 403, RefusalCode::Unknown)]
#[case::a_pod_of_no_agent("agentloop.dev/link a agentloop-agent z u2", EPOCH, 403, RefusalCode::Unknown)]
#[case::the_same_name_in_another_namespace(
    "agentloop.dev/link b agentloop-agent x u2",
    EPOCH,
    403,
    RefusalCode::Unknown
)]
#[case::an_agent_not_looked_at_yet("agentloop.dev/link a agentloop-agent y u2", EPOCH, 503, RefusalCode::NotLeading)]
#[case::another_pod_of_the_name("agentloop.dev/link a agentloop-agent x u1", EPOCH, 409, RefusalCode::Fenced)]
#[case::an_older_epoch(TOKEN, EPOCH - 1, 409, RefusalCode::Fenced)]
#[case::a_newer_epoch(TOKEN, EPOCH + 1, 409, RefusalCode::Fenced)]
#[tokio::test]
async fn an_unauthorized_request_is_refused_on_every_route(
    #[case] token: &str,
    #[case] epoch: i64,
    #[case] status: u16,
    #[case] code: RefusalCode,
) {
    let harness = LinkHarness::start().await;
    let report = json!({"epoch": epoch}).to_string();
    let lease = json!({"epoch": epoch, "record": "0".repeat(32)}).to_string();
    let listen = harness
        .client
        .get(harness.url(&format!("/v1/directives?epoch={epoch}")))
        .bearer_auth(token_of(token));
    for response in [
        harness.attach(token, epoch).await,
        harness.post("/v1/report", token, report).await,
        harness.post("/v1/lease", token, lease).await,
        listen.send().await.unwrap(),
    ] {
        let (got, refusal) = refusal(response).await;
        assert_eq!((got.as_u16(), refusal.code), (status, code));
        assert!(!refusal.message.contains(token), "a refusal never repeats a token");
    }
    assert_eq!(harness.loops.last_report(&x(), "u2"), None);
    let series = format!(r#"agentloop_link_refusals_total{{code="{code}"}}"#);
    assert_eq!(harness.sample(&series), 4.0);
}

#[tokio::test]
async fn a_request_without_a_token_causes_no_request_to_the_api_server() {
    let harness = LinkHarness::start().await;
    for authorization in ["", "Bearer ", "Basic eDp5"] {
        let request = harness
            .client
            .post(harness.url("/v1/attach"))
            .header("authorization", authorization);
        let (status, refusal) = refusal(request.send().await.unwrap()).await;
        assert_eq!((status.as_u16(), refusal.code), (401, RefusalCode::Unauthenticated));
    }
    assert_eq!(harness.reviews.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_replica_with_unfilled_caches_requests_a_retry_from_pods() {
    let harness = LinkHarness::with(LinkLimits::default(), false).await;
    let (status, refusal) = refusal(harness.attach(TOKEN, EPOCH).await).await;
    assert_eq!((status.as_u16(), refusal.code), (503, RefusalCode::NotLeading));
}

#[tokio::test]
async fn a_token_is_reviewed_once_and_then_cached() {
    let harness = LinkHarness::start().await;
    for _ in 0..3 {
        assert_eq!(harness.attach(TOKEN, EPOCH).await.status(), StatusCode::OK);
    }
    assert_eq!(harness.reviews.load(Ordering::SeqCst), 1);
    for _ in 0..3 {
        assert_eq!(
            harness.attach(&unknown(1), EPOCH).await.status(),
            StatusCode::UNAUTHORIZED
        );
    }
    assert_eq!(harness.reviews.load(Ordering::SeqCst), 2, "so is a refusal");
    harness.attach("nonsense", EPOCH).await;
    harness
        .attach("https://kubernetes.default.svc a agentloop-agent x u2", EPOCH)
        .await;
    harness.attach("agentloop.dev/link a default x u2", EPOCH).await;
    assert_eq!(
        harness.reviews.load(Ordering::SeqCst),
        2,
        "what is no pod's token is not asked about"
    );
}

#[tokio::test]
async fn an_address_with_many_invalid_tokens_is_not_reviewed_for_a_while_and_known_pods_continue() {
    let harness = LinkHarness::start().await;
    assert_eq!(harness.attach(TOKEN, EPOCH).await.status(), StatusCode::OK);
    for number in 0..20 {
        assert_eq!(
            harness.attach(&unknown(number), EPOCH).await.status(),
            StatusCode::UNAUTHORIZED
        );
    }
    let (status, refusal) = refusal(harness.attach(&unknown(20), EPOCH).await).await;
    assert_eq!((status.as_u16(), refusal.code), (503, RefusalCode::NotLeading));
    assert!(refusal.message.contains("too many tokens"), "{refusal}");
    assert_eq!(harness.reviews.load(Ordering::SeqCst), 21);
    assert_eq!(harness.attach(TOKEN, EPOCH).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn idle_unauthenticated_connections_displace_no_pod() {
    let connections = ConnectionBounds {
        all: 9,
        strangers: 2,
        per_address: 9,
        strangers_per_address: 2,
    };
    let limits = LinkLimits {
        connections,
        ..LinkLimits::default()
    };
    let harness = LinkHarness::with(limits, true).await;
    let stream = harness.listen(EPOCH).await;
    assert_eq!(stream.status(), StatusCode::OK);
    let closes = async |stranger: &mut tokio::net::TcpStream| {
        let mut nothing = Vec::new();
        let closed = timeout(SOON, stranger.read_to_end(&mut nothing)).await;
        assert!(closed.unwrap().is_err() || nothing.is_empty());
    };
    let mut strangers = Vec::new();
    for _ in 0..3 {
        strangers.push(tokio::net::TcpStream::connect(harness.address).await.unwrap());
    }
    closes(&mut strangers[0]).await;
    // A pod that is not known yet: its client has no open connection, and all places of strangers are taken.
    let root = reqwest::Certificate::from_pem(harness.ca.as_bytes()).unwrap();
    let client = reqwest::Client::builder().tls_certs_only([root]).build().unwrap();
    let attach = client
        .post(harness.url("/v1/attach"))
        .bearer_auth(token_of(TOKEN))
        .body(r#"{"protocol":2,"epoch":4}"#);
    assert_eq!(attach.send().await.unwrap().status(), StatusCode::OK);
    closes(&mut strangers[1]).await;
    let mut byte = [0];
    assert_eq!(
        strangers[2].try_read(&mut byte).unwrap_err().kind(),
        std::io::ErrorKind::WouldBlock,
        "the newest stranger is still connected"
    );
    let mut events = SseStream::from_bytes_stream(stream.bytes_stream());
    assert_eq!(
        next(&mut events).await.unwrap().0,
        "directives",
        "the known pod's stream continues"
    );
}

/// Passes connections on to the server, and counts them.
async fn passage(server: SocketAddr) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, count) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
    let counted = count.clone();
    tokio::spawn(async move {
        while let Ok((mut near, _)) = listener.accept().await {
            counted.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(async move {
                let mut far = tokio::net::TcpStream::connect(server).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
            });
        }
    });
    (address, count)
}

#[rstest]
#[case::a_pause_within_the_bound(Duration::from_mins(1), 1)]
#[case::a_pause_over_the_bound(Duration::from_secs(3), 2)]
#[tokio::test]
async fn a_connection_outlives_the_pause_between_two_reports(#[case] idle: Duration, #[case] connections: usize) {
    assert!(LinkLimits::default().idle > Duration::from_secs(2 * REPORT_SECONDS));
    let limits = LinkLimits {
        read_timeout: Duration::from_secs(5),
        idle,
        ..LinkLimits::default()
    };
    let harness = LinkHarness::with(limits, true).await;
    let (address, count) = passage(harness.address).await;
    // Longer than the time for a body, and than the shorter bound by more than a busy machine pauses.
    for pause in [Duration::from_secs(8), Duration::ZERO] {
        let report = json!({"epoch": EPOCH}).to_string();
        let request = harness.client.post(format!("https://{address}/v1/report"));
        let response = request.bearer_auth(token_of(TOKEN)).body(report).send().await.unwrap();
        assert_eq!(response.status(), StatusCode::NO_CONTENT);
        // The pause itself is what is tested.
        tokio::time::sleep(pause).await;
    }
    assert_eq!(count.load(Ordering::SeqCst), connections);
}

#[tokio::test]
async fn an_unauthenticated_connection_is_answered_once_and_closed() {
    let harness = LinkHarness::start().await;
    let (address, count) = passage(harness.address).await;
    for _ in 0..2 {
        let request = harness.client.post(format!("https://{address}/v1/report"));
        let response = request.bearer_auth("nonsense").send().await.unwrap();
        assert_eq!(response.status(), StatusCode::UNAUTHORIZED);
        assert_eq!(response.headers()["connection"], "close");
        response.bytes().await.unwrap();
    }
    assert_eq!(count.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn directives_are_sent_at_once_and_again_at_once_after_each_change() {
    let harness = LinkHarness::start().await;
    let response = harness.listen(EPOCH).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let mut events = SseStream::from_bytes_stream(response.bytes_stream());
    assert_eq!(
        next(&mut events).await.unwrap(),
        ("directives".into(), r#"{"suspend":false}"#.into())
    );
    harness.direct(suspended());
    let changed = Instant::now();
    assert_eq!(
        next(&mut events).await.unwrap(),
        ("directives".into(), r#"{"suspend":true}"#.into())
    );
    // Pushed: what is sent only at intervals is a heartbeat, after 10 s.
    assert!(changed.elapsed() < Duration::from_secs(8), "{:?}", changed.elapsed());
    harness.direct(suspended());
    let silence = timeout(Duration::from_millis(300), events.next()).await;
    assert!(silence.is_err(), "the same directives are not sent twice");
}

#[tokio::test]
async fn a_quiet_stream_has_heartbeats() {
    assert_eq!(LinkLimits::default().heartbeat, Duration::from_secs(10));
    let limits = LinkLimits {
        heartbeat: Duration::from_millis(50),
        ..LinkLimits::default()
    };
    let harness = LinkHarness::with(limits, true).await;
    let mut events = SseStream::from_bytes_stream(harness.listen(EPOCH).await.bytes_stream());
    assert_eq!(next(&mut events).await.unwrap().0, "directives");
    for _ in 0..3 {
        assert_eq!(next(&mut events).await.unwrap(), ("heartbeat".into(), String::new()));
    }
}

#[tokio::test]
async fn a_replaced_pod_loses_its_stream_and_is_fenced_from_then_on() {
    let harness = LinkHarness::start().await;
    let mut events = SseStream::from_bytes_stream(harness.listen(EPOCH).await.bytes_stream());
    next(&mut events).await.unwrap();
    let newer = LivePod {
        uid: "u3".into(),
        epoch: EPOCH + 1,
    };
    harness
        .loops
        .expect_pod((&x(), "uid-of-x"), newer, LoopTotals::default(), Directives::default());
    assert_eq!(next(&mut events).await, None);
    let (status, refusal) = refusal(harness.attach(TOKEN, EPOCH).await).await;
    assert_eq!((status.as_u16(), refusal.code), (409, RefusalCode::Fenced));
    let newer = harness
        .attach("agentloop.dev/link a agentloop-agent x u3", EPOCH + 1)
        .await;
    assert_eq!(newer.status(), StatusCode::OK);
}

#[tokio::test]
async fn streams_end_when_the_server_stops() {
    let harness = LinkHarness::start().await;
    let mut events = SseStream::from_bytes_stream(harness.listen(EPOCH).await.bytes_stream());
    next(&mut events).await.unwrap();
    harness.stop.cancel();
    assert_eq!(next(&mut events).await, None);
}

#[rstest]
#[case::not_json("/v1/attach", "epoch 4", "it is not valid JSON")]
#[case::cut("/v1/attach", r#"{"protocol":1,"#, "it is truncated")]
#[case::a_field_is_missing("/v1/attach", r#"{"protocol":1}"#, "a field is missing or has the wrong type")]
#[case::another_type("/v1/report", r#"{"epoch":"secret"}"#, "a field is missing or has the wrong type")]
#[case::another_protocol("/v1/attach", r#"{"protocol":9,"epoch":4}"#, "protocol version 9 is not supported")]
#[tokio::test]
async fn an_unparseable_request_is_refused_with_a_message_that_does_not_quote_it(
    #[case] path: &str,
    #[case] body: &'static str,
    #[case] words: &str,
) {
    let harness = LinkHarness::start().await;
    let (status, refusal) = refusal(harness.post(path, TOKEN, body).await).await;
    assert_eq!((status.as_u16(), refusal.code), (400, RefusalCode::Malformed));
    assert!(refusal.message.contains(words), "{refusal}");
    assert!(!refusal.message.contains("secret"), "{refusal}");
}

#[tokio::test]
async fn a_stream_needs_an_epoch() {
    let harness = LinkHarness::start().await;
    for query in ["", "?epoch=", "?epoch=four"] {
        let request = harness
            .client
            .get(harness.url(&format!("/v1/directives{query}")))
            .bearer_auth(token_of(TOKEN));
        let (status, refusal) = refusal(request.send().await.unwrap()).await;
        assert_eq!((status.as_u16(), refusal.code), (400, RefusalCode::Malformed));
    }
}

#[tokio::test]
async fn a_body_may_have_256_kib_and_not_a_byte_more() {
    let harness = LinkHarness::start().await;
    let report = json!({"epoch": EPOCH}).to_string();
    let body = |length: usize| report.clone() + &" ".repeat(length - report.len());
    let at_limit = harness.post("/v1/report", TOKEN, body(MAX_BODY_BYTES)).await;
    assert_eq!(at_limit.status(), StatusCode::NO_CONTENT);
    let (status, refusal) = refusal(harness.post("/v1/report", TOKEN, body(MAX_BODY_BYTES + 1)).await).await;
    assert_eq!((status.as_u16(), refusal.code), (400, RefusalCode::Malformed));
    assert!(refusal.message.contains("262144 bytes"), "{refusal}");
}

#[tokio::test]
async fn bodies_that_a_pod_sends_slowly_hold_up_no_other_pod() {
    let harness = LinkHarness::start().await;
    let never = || reqwest::Body::wrap_stream(futures::stream::pending::<Result<Vec<u8>, Infallible>>());
    let slow: Vec<_> = (0..3)
        .map(|_| Box::pin(harness.post("/v1/report", TOKEN, never())))
        .collect();
    let report = json!({"epoch": EPOCH}).to_string();
    // They have the share of their pod by then: the third one is not even asked for its body.
    let mut slow = futures::future::select_all(slow);
    assert!(
        timeout(Duration::from_secs(1), &mut slow).await.is_err(),
        "one was answered"
    );
    let other = "agentloop.dev/link a agentloop-agent y u9";
    let (status, refusal) = refusal(harness.post("/v1/report", other, report).await).await;
    assert_eq!((status.as_u16(), refusal.code), (503, RefusalCode::NotLeading));
    assert!(refusal.message.contains("not reconciled"), "{refusal}");
}

#[tokio::test]
async fn a_pod_without_room_for_another_body_is_told_to_retry() {
    let limits = LinkLimits {
        // Also how long a body waits for room, up to 3 s.
        read_timeout: Duration::from_secs(5),
        bodies: BodyBounds {
            pod: MAX_BODY_BYTES - 1,
            ..BodyBounds::default()
        },
        ..LinkLimits::default()
    };
    let harness = LinkHarness::with(limits, true).await;
    let report = json!({"epoch": EPOCH}).to_string();
    let body = |length: usize| report.clone() + &" ".repeat(length - report.len());
    let answer = harness.post("/v1/report", TOKEN, body(MAX_BODY_BYTES - 1)).await;
    assert_eq!(answer.status(), StatusCode::NO_CONTENT);
    let (status, refusal) = refusal(harness.post("/v1/report", TOKEN, body(MAX_BODY_BYTES)).await).await;
    assert_eq!((status.as_u16(), refusal.code), (503, RefusalCode::NotLeading));
    assert!(refusal.message.contains("retry"), "{refusal}");
}

#[tokio::test]
async fn a_body_that_does_not_arrive_times_out() {
    let limits = LinkLimits {
        read_timeout: Duration::from_millis(200),
        ..LinkLimits::default()
    };
    let harness = LinkHarness::with(limits, true).await;
    let never = reqwest::Body::wrap_stream(futures::stream::pending::<Result<Vec<u8>, Infallible>>());
    let (status, refusal) = refusal(harness.post("/v1/report", TOKEN, never).await).await;
    assert_eq!((status.as_u16(), refusal.code), (400, RefusalCode::Malformed));
    assert!(refusal.message.contains("did not arrive"), "{refusal}");
}

#[tokio::test]
async fn a_connection_above_the_limit_of_authenticated_ones_is_closed_and_the_others_stay() {
    let limits = LinkLimits {
        connections: ConnectionBounds {
            all: 2,
            strangers: 1,
            per_address: 2,
            strangers_per_address: 1,
        },
        ..LinkLimits::default()
    };
    let harness = LinkHarness::with(limits, true).await;
    let mut oldest = SseStream::from_bytes_stream(harness.listen(EPOCH).await.bytes_stream());
    next(&mut oldest).await.unwrap();
    let newcomer = harness
        .client
        .post(harness.url("/v1/report"))
        .bearer_auth(token_of(TOKEN))
        .body(json!({"epoch": EPOCH}).to_string());
    // Its connection may end before the answer arrives.
    if let Ok(answer) = timeout(SOON, newcomer.send()).await.unwrap() {
        let (status, refusal) = refusal(answer).await;
        assert_eq!((status.as_u16(), refusal.code), (503, RefusalCode::NotLeading));
        assert!(refusal.message.contains("too many connections"), "{refusal}");
    }
    harness.direct(suspended());
    let (_, directives) = next(&mut oldest).await.expect("the oldest connection to stay");
    assert_eq!(directives, r#"{"suspend":true}"#);
}

#[tokio::test]
async fn plain_http_is_not_answered() {
    let harness = LinkHarness::start().await;
    let mut plain = tokio::net::TcpStream::connect(harness.address).await.unwrap();
    plain
        .write_all(b"GET /v1/directives?epoch=4 HTTP/1.1\r\nHost: x\r\n\r\n")
        .await
        .unwrap();
    let mut answer = Vec::new();
    let _ = timeout(SOON, plain.read_to_end(&mut answer)).await.unwrap();
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
}

#[tokio::test]
async fn a_client_that_trusts_another_authority_does_not_send_its_token() {
    let harness = LinkHarness::start().await;
    let other = CertificateAuthority::make(Timestamp::now()).unwrap();
    let root = reqwest::Certificate::from_pem(other.certificate.as_bytes()).unwrap();
    let client = reqwest::Client::builder().tls_certs_only([root]).build().unwrap();
    let request = client.post(harness.url("/v1/attach")).bearer_auth(token_of(TOKEN));
    assert!(request.send().await.is_err());
    assert_eq!(harness.reviews.load(Ordering::SeqCst), 0);
}
