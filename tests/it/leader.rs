//! Tests of the controller's process: election against a real API server, and an API server that is unavailable.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use agentloop::controller::agent::ReconcilerSettings;
use agentloop::controller::connection;
use agentloop::controller::leadership::election::{LEADER_LABEL, LEASE_NAME, LeaderCandidate, LeaseTimes};
use agentloop::controller::process::{ControllerError, ControllerOptions, ElectionOptions, run};
use agentloop::telemetry::metrics::Metrics;
use axum::http::Request;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Pod, ServiceAccount};
use kube::api::{DeleteParams, ObjectMeta, PostParams};
use kube::client::ClientBuilder;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config, ResourceExt};
use pretty_assertions::assert_eq;
use serde_json::json;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use crate::support::api_server::ApiServer;
use crate::support::clusters::control_plane;
use crate::support::ports::free_port;
use crate::support::proxy::Proxy;

const SECOND: Duration = Duration::from_secs(1);
/// Longest wait for what is not timed here.
const WAIT_TIMEOUT: Duration = Duration::from_mins(1);
/// How long a Lease is valid here. It is renewed each second and given up after eight, so a busy machine may pause.
const VALID: Duration = Duration::from_secs(10);
/// Less than is left of a Lease that was renewed a second ago: whoever leads by then did not wait for its end.
const BEFORE_ITS_END: Duration = Duration::from_secs(8);

fn lease_times() -> LeaseTimes {
    LeaseTimes::new(u32::try_from(VALID.as_secs()).unwrap(), 1).unwrap()
}

/// A namespace of its own on the control plane, deleted at the end.
struct Cluster {
    config: Config,
    client: Client,
    namespace: String,
}

impl Cluster {
    async fn start() -> Option<Self> {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let kubeconfig = Kubeconfig::read_from(control_plane()?).unwrap();
        let options = KubeConfigOptions::default();
        let config = Config::from_custom_kubeconfig(kubeconfig, &options).await.unwrap();
        let client = Client::try_from(config.clone()).unwrap();
        let mut object = Namespace::default();
        object.metadata.generate_name = Some("leader-".into());
        let made = Api::<Namespace>::all(client.clone())
            .create(&PostParams::default(), &object)
            .await
            .unwrap();
        Some(Self {
            config,
            client,
            namespace: made.metadata.name.unwrap(),
        })
    }

    async fn end(self) {
        let namespaces = Api::<Namespace>::all(self.client);
        namespaces
            .delete(&self.namespace, &DeleteParams::background())
            .await
            .unwrap();
    }

    /// A replica; while `cut` is true its requests about the Lease fail.
    fn candidate(&self, identity: &str, cut: &Arc<AtomicBool>) -> LeaderCandidate {
        let cut = cut.clone();
        let layer = tower::layer::layer_fn(move |inner| {
            let cut = cut.clone();
            ServiceExt::<Request<kube::client::Body>>::filter(inner, move |request| {
                if cut.load(Ordering::SeqCst) {
                    return Err(tower::BoxError::from("cut off"));
                }
                Ok::<_, tower::BoxError>(request)
            })
        });
        let writer = ClientBuilder::try_from(self.config.clone()).unwrap().with_layer(&layer);
        LeaderCandidate {
            client: self.client.clone(),
            writer: writer.build(),
            namespace: self.namespace.clone(),
            identity: identity.into(),
            times: lease_times(),
        }
    }

    async fn holder(&self) -> Option<String> {
        let leases = Api::<Lease>::namespaced(self.client.clone(), &self.namespace);
        leases.get(LEASE_NAME).await.unwrap().spec?.holder_identity
    }
}

fn connected() -> Arc<AtomicBool> {
    Arc::default()
}

#[tokio::test]
async fn the_second_candidate_takes_over_at_once_after_a_release() {
    let Some(cluster) = Cluster::start().await else { return };
    let first = cluster.candidate("a", &connected()).win(|| {}).await;
    let seen = Arc::new(AtomicUsize::new(0));
    let count = seen.clone();
    let second = cluster.candidate("b", &connected());
    let mut second = Box::pin(second.win(move || {
        count.fetch_add(1, Ordering::SeqCst);
    }));
    // Longer than the Lease is valid: it is renewed, and the follower stays one.
    tokio::select! {
        lost = first.hold() => panic!("{lost}"),
        _ = &mut second => panic!("two leaders"),
        () = tokio::time::sleep(VALID + 2 * SECOND) => {}
    }
    assert_eq!(
        seen.load(Ordering::SeqCst),
        1,
        "a follower has seen the Lease and rests"
    );
    assert_eq!(cluster.holder().await.as_deref(), Some("a"));
    first.release().await.unwrap();
    let released = Instant::now();
    timeout(WAIT_TIMEOUT, second).await.unwrap();
    assert!(
        released.elapsed() < BEFORE_ITS_END,
        "{:?}, though the Lease was released",
        released.elapsed()
    );
    assert_eq!(cluster.holder().await.as_deref(), Some("b"));
    cluster.end().await;
}

#[tokio::test]
async fn a_leader_that_died_is_replaced_when_its_lease_ends() {
    let Some(cluster) = Cluster::start().await else { return };
    drop(cluster.candidate("a", &connected()).win(|| {}).await);
    let died = Instant::now();
    timeout(3 * VALID, cluster.candidate("b", &connected()).win(|| {}))
        .await
        .expect("no leader long after the Lease ended");
    assert!(died.elapsed() >= VALID, "{:?}: before the Lease ended", died.elapsed());
    cluster.end().await;
}

#[tokio::test]
async fn a_restarted_leader_reacquires_the_lease_under_its_own_name() {
    let Some(cluster) = Cluster::start().await else { return };
    drop(cluster.candidate("a", &connected()).win(|| {}).await);
    let restarted = Instant::now();
    timeout(WAIT_TIMEOUT, cluster.candidate("a", &connected()).win(|| {}))
        .await
        .unwrap();
    assert!(restarted.elapsed() < BEFORE_ITS_END, "{:?}", restarted.elapsed());
    cluster.end().await;
}

/// All pods of the controller begin again at once, and the Lease of one of them is over.
#[tokio::test]
async fn after_an_expired_lease_exactly_one_of_the_restarted_replicas_leads() {
    let Some(cluster) = Cluster::start().await else { return };
    let names = ["a", "b", "c", "d"];
    drop(cluster.candidate("a", &connected()).win(|| {}).await);
    for _ in 0..3 {
        tokio::time::sleep(VALID + SECOND / 2).await;
        let (leaders, mut won) = tokio::sync::mpsc::unbounded_channel();
        let replicas = names.map(|name| {
            let (replica, leaders) = (cluster.candidate(name, &connected()), leaders.clone());
            tokio::spawn(async move {
                let leadership = replica.win(|| {}).await;
                leaders.send(name).unwrap();
                leadership.hold().await
            })
        });
        let first = timeout(WAIT_TIMEOUT, won.recv()).await.unwrap();
        let second = timeout(3 * SECOND, won.recv()).await;
        assert!(second.is_err(), "{first:?} and {second:?} lead");
        for replica in replicas {
            assert!(!replica.is_finished(), "the leader lost its Lease");
            replica.abort();
        }
    }
    cluster.end().await;
}

#[tokio::test]
async fn a_partitioned_leader_resigns_before_another_leads() {
    let Some(cluster) = Cluster::start().await else { return };
    let cut = connected();
    let first = cluster.candidate("a", &cut).win(|| {}).await;
    let follower = cluster.candidate("b", &connected());
    let follower = tokio::spawn(async move {
        follower.win(|| {}).await;
        Instant::now()
    });
    cut.store(true, Ordering::SeqCst);
    let lost = timeout(WAIT_TIMEOUT, first.hold()).await.unwrap();
    let gave_up = Instant::now();
    assert_eq!(lost, "the Lease could not be renewed in time");
    let took_over = timeout(WAIT_TIMEOUT, follower).await.unwrap().unwrap();
    assert!(gave_up < took_over, "two leaders for {:?}", gave_up - took_over);
    cluster.end().await;
}

#[tokio::test]
async fn a_leader_whose_lease_was_taken_over_detects_it_at_its_next_renewal() {
    let Some(cluster) = Cluster::start().await else { return };
    let first = cluster.candidate("a", &connected()).win(|| {}).await;
    let leases = Api::<Lease>::namespaced(cluster.client.clone(), &cluster.namespace);
    let mut lease = leases.get(LEASE_NAME).await.unwrap();
    lease.spec.as_mut().unwrap().holder_identity = Some("a person".into());
    leases
        .replace(LEASE_NAME, &PostParams::default(), &lease)
        .await
        .unwrap();
    let lost = timeout(WAIT_TIMEOUT, first.hold()).await.unwrap();
    assert_eq!(lost, "another replica holds the Lease");
    cluster.end().await;
}

#[tokio::test]
async fn a_stopping_leader_exits_cleanly_and_removes_its_lease_and_its_label() {
    let Some(cluster) = Cluster::start().await else { return };
    let pods = Api::<Pod>::namespaced(cluster.client.clone(), &cluster.namespace);
    let pod = json!({
        "metadata": {"name": "a"},
        "spec": {"automountServiceAccountToken": false, "containers": [{"name": "c", "image": "none"}]},
    });
    let account = ServiceAccount {
        metadata: ObjectMeta {
            name: Some("default".into()),
            ..ObjectMeta::default()
        },
        ..ServiceAccount::default()
    };
    // A cluster's controller manager creates it too; the first one counts.
    let accounts = Api::<ServiceAccount>::namespaced(cluster.client.clone(), &cluster.namespace);
    let _ = accounts.create(&PostParams::default(), &account).await;
    pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap())
        .await
        .unwrap();
    // Its tasks end within their grace period, or are aborted with a warning.
    let log = tempfile::NamedTempFile::new().unwrap();
    let lines = tracing_subscriber::fmt().with_writer(log.reopen().unwrap());
    let _guard = tracing::subscriber::set_default(lines.finish());
    let mut options = options(true);
    options.settings.controller_namespace.clone_from(&cluster.namespace);
    options.settings.watch_namespaces = vec![cluster.namespace.clone()];
    let (address, stop) = (options.probe_address, CancellationToken::new());
    let running = tokio::spawn(run(options, cluster.config.clone(), stop.clone()));
    let leads = async || pods.get("a").await.unwrap().labels().get(LEADER_LABEL).cloned();
    timeout(WAIT_TIMEOUT, async {
        while leads().await.is_none() || cluster.holder().await.is_none() {
            tokio::time::sleep(SECOND / 10).await;
        }
    })
    .await
    .unwrap();
    assert_eq!(probe(address, "/healthz").await.0, 200);
    stop.cancel();
    assert!(timeout(WAIT_TIMEOUT, running).await.unwrap().unwrap().is_ok());
    let log = std::fs::read_to_string(log.path()).unwrap();
    let (is_released, is_aborted) = (log.contains("released the Lease"), log.contains("aborted the "));
    assert!(is_released && !is_aborted, "{log}");
    assert_eq!((leads().await, cluster.holder().await), (None, None));
    cluster.end().await;
}

/// An unused port of this machine.
fn free_address() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], free_port()))
}

pub fn options(election: bool) -> ControllerOptions {
    ControllerOptions {
        settings: ReconcilerSettings {
            image: "agentloop:test".into(),
            image_pull_policy: None,
            link_url: "https://127.0.0.1:8443".into(),
            egress: agentloop::link::pod::AgentEgress::default(),
            controller_namespace: "default".into(),
            policy: agentloop::controller::policy::PlatformPolicy::default(),
            watch_namespaces: Vec::new(),
            gateway_resources: k8s_openapi::api::core::v1::ResourceRequirements::default(),
            gateway_environment: Vec::new(),
            otlp_ca_secret: None,
            worker_resources: k8s_openapi::api::core::v1::ResourceRequirements::default(),
            image_pull_secrets: Vec::new(),
            workers: 1,
        },
        sensor_pods: agentloop::controller::sensor::pod::SensorPodSettings::default(),
        metrics_address: free_address(),
        metrics_authentication: agentloop::controller::auth::metrics_access::MetricsAuthentication::None,
        metrics_hosts: Vec::new(),
        per_object: agentloop::telemetry::families::PerObject::Full,
        probe_address: free_address(),
        link_address: free_address(),
        link_hosts: vec!["127.0.0.1".into()],
        page: None,
        pod_name: election.then(|| "a".into()),
        election: election.then(|| ElectionOptions {
            identity: "a".into(),
            times: lease_times(),
        }),
        gate_webhook: None,
        history: None,
        telemetry: agentloop::controller::process::ExportOptions::default(),
    }
}

/// Status and text of a probe, once the server listens.
async fn probe(address: SocketAddr, path: &str) -> (u16, String) {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    loop {
        match reqwest::get(format!("http://{address}{path}")).await {
            Ok(response) => return (response.status().as_u16(), response.text().await.unwrap()),
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        tokio::time::sleep(SECOND / 100).await;
    }
}

/// An API server that refuses every connection.
fn absent() -> Config {
    let _ = rustls::crypto::ring::default_provider().install_default();
    Config::new(format!("http://{}", free_address()).parse().unwrap())
}

#[tokio::test]
async fn without_an_api_server_the_controller_is_alive_but_not_ready_and_stops_on_request() {
    for election in [true, false] {
        let (options, stop) = (options(election), CancellationToken::new());
        let (address, scrapes) = (options.probe_address, options.metrics_address);
        let running = tokio::spawn(run(options, absent(), stop.clone()));
        assert_eq!(probe(address, "/healthz").await.0, 200);
        let (status, body) = probe(address, "/readyz").await;
        assert_eq!(status, 503);
        assert!(body.starts_with("waiting for "), "{body}");
        let counted = async {
            loop {
                let (_, metrics) = probe(scrapes, "/metrics").await;
                if metrics.contains(r#"code="<error>""#) {
                    return metrics;
                }
                tokio::time::sleep(SECOND / 50).await;
            }
        };
        let metrics = timeout(WAIT_TIMEOUT, counted).await;
        let metrics = metrics.expect("the failed requests are not counted");
        let leads = format!(
            r#"leader_election_master_status{{name="{LEASE_NAME}"}} {}"#,
            u8::from(!election)
        );
        assert!(metrics.contains(&leads), "{metrics}");
        stop.cancel();
        let ended = timeout(3 * SECOND, running).await.expect("it waits for nothing");
        assert!(ended.unwrap().is_ok());
    }
}

#[tokio::test]
async fn a_port_in_use_ends_the_process_with_its_number() {
    let options = options(false);
    let taken = tokio::net::TcpListener::bind(options.metrics_address).await.unwrap();
    let error = run(options, absent(), CancellationToken::new()).await.unwrap_err();
    assert!(matches!(error, ControllerError::Listen { .. }));
    assert!(
        error.to_string().contains(&taken.local_addr().unwrap().to_string()),
        "{error}"
    );
}

/// An API server that answers every request with 503, as one that is overloaded or starting.
#[tokio::test]
async fn an_overloaded_api_server_is_retried_at_a_bounded_rate() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let requests = Arc::new(AtomicUsize::new(0));
    let count = requests.clone();
    let app = axum::Router::new().fallback(async move || {
        count.fetch_add(1, Ordering::SeqCst);
        axum::http::StatusCode::SERVICE_UNAVAILABLE
    });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let config = Config::new(format!("http://{}", listener.local_addr().unwrap()).parse().unwrap());
    let server = tokio::spawn(async move {
        axum::serve(listener, app).await.unwrap();
    });
    let stop = CancellationToken::new();
    let began = Instant::now();
    let running = tokio::spawn(run(options(true), config, stop.clone()));
    timeout(WAIT_TIMEOUT, async {
        while requests.load(Ordering::SeqCst) < 4 {
            tokio::time::sleep(SECOND / 50).await;
        }
    })
    .await
    .expect("it is not retried");
    // With pauses of 0.5, 1 and 2 s between them.
    let took = began.elapsed();
    assert!(took > 2 * SECOND, "four requests in {took:?}");
    stop.cancel();
    assert!(timeout(WAIT_TIMEOUT, running).await.unwrap().unwrap().is_ok());
    server.abort();
}

/// An API server behind a proxy that can become a black hole.
async fn behind_a_proxy() -> (ApiServer, Proxy, Config, Config) {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let server = ApiServer::new(Arc::new(jiff::Timestamp::now));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = server.router();
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    let proxy = Proxy::to(address).await;
    let config = |address: SocketAddr| Config::new(format!("http://{address}").parse().unwrap());
    let proxied = config(proxy.address);
    (server, proxy, config(address), proxied)
}

/// Tests with a dead connection take as long as it takes to notice one.
const NOTICED: Duration = Duration::from_secs(45);

/// Its Lease is valid for 15 s and renewed each second: a follower that reads it sees a release long before its end.
fn candidate_of(config: &Config, identity: &str) -> LeaderCandidate {
    let metrics = Metrics::new().unwrap();
    let client = |timeout| connection::client(config.clone(), timeout, &metrics).unwrap();
    LeaderCandidate {
        client: client(connection::READ_TIMEOUT),
        writer: client(2 * SECOND),
        namespace: "default".into(),
        identity: identity.into(),
        times: LeaseTimes::new(15, 1).unwrap(),
    }
}

#[tokio::test]
async fn a_follower_with_a_dead_watch_still_detects_renewals_and_the_release_of_the_lease() {
    let (_server, proxy, direct, proxied) = behind_a_proxy().await;
    let first = candidate_of(&direct, "a").win(|| {}).await;
    let (told, mut following) = tokio::sync::mpsc::unbounded_channel();
    let second = candidate_of(&proxied, "b");
    let mut second = Box::pin(second.win(move || told.send(()).unwrap()));
    tokio::select! {
        _ = &mut second => panic!("two leaders"),
        told = following.recv() => assert!(told.is_some()),
    }
    proxy.swallow_connections();
    // Longer than the Lease is valid.
    tokio::select! {
        lost = first.hold() => panic!("{lost}"),
        _ = &mut second => panic!("two leaders"),
        () = tokio::time::sleep(18 * SECOND) => {}
    }
    first.release().await.unwrap();
    let released = Instant::now();
    timeout(WAIT_TIMEOUT, second).await.unwrap();
    // It reads every 2 s; without that, it would wait for the end of the Lease, at least 12 s.
    assert!(released.elapsed() < 10 * SECOND, "{:?}", released.elapsed());
}

#[tokio::test]
async fn a_leader_with_dead_connections_receives_changes_within_45_seconds_and_keeps_the_lead() {
    let (server, proxy, _direct, proxied) = behind_a_proxy().await;
    let mut options = options(true);
    options.election.as_mut().unwrap().times = LeaseTimes::new(15, 5).unwrap();
    let stop = CancellationToken::new();
    let own = json!({"name": "a", "namespace": "default"});
    server.put(
        "/pods",
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": own, "spec": {"containers": []}}),
    );
    let running = tokio::spawn(run(options, proxied, stop.clone()));
    let put = |name: &str| {
        let model =
            json!({"api": "Scripted", "name": "m", "scripted": {"configMapKeyRef": {"name": "script", "key": "s"}}});
        let spec = json!({"instructions": "i", "storage": {"ephemeral": true}, "model": model});
        let metadata = json!({"name": name, "namespace": "team-a"});
        server.put(
            "agentloop.dev/agents",
            json!({"apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent", "metadata": metadata, "spec": spec}),
        );
    };
    let metadata = json!({"name": "script", "namespace": "team-a"});
    server.put(
        "/configmaps",
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"s": "turns:\n- text: done\n"}}),
    );
    let has_pod = async |name: &str| {
        while server.get("/pods", "team-a", name).is_none() {
            tokio::time::sleep(SECOND / 10).await;
        }
    };
    put("before");
    timeout(WAIT_TIMEOUT, has_pod("before")).await.unwrap();
    proxy.swallow_connections();
    put("after");
    timeout(NOTICED, has_pod("after")).await.unwrap();
    assert!(!running.is_finished(), "it lost the lead");
    stop.cancel();
    assert!(timeout(WAIT_TIMEOUT, running).await.unwrap().unwrap().is_ok());
}
