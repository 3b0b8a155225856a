//! A leader's link over TLS, an API server that knows tokens and permissions, and one pod as two processes.

use std::convert::Infallible;
use std::fs::File;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use agentloop::api::NamespacedName;
use agentloop::controller::agent::AgentsView;
use agentloop::controller::auth::access::ClientAuthorizer;
use agentloop::controller::auth::identity::PodAuthenticator;
use agentloop::controller::delivery_relay::DeliveryRelay;
use agentloop::controller::gates::answers::GateAnswerRecorder;
use agentloop::controller::history::{HistoryReceiver, initialize_history_metrics};
use agentloop::controller::link_service::ControllerLink;
use agentloop::controller::page::{self, PageSources};
use agentloop::controller::pod_sessions::{LivePod, PodSessions};
use agentloop::controller::runtime::{EventSink, WallClock};
use agentloop::controller::tls::ca::CertificateAuthority;
use agentloop::controller::tls::certificates::server_config;
use agentloop::history::HistoryStore;
use agentloop::link::client::LinkClient;
use agentloop::link::messages::{BudgetTerms, Directives, LoopTotals};
use agentloop::link::server::{LinkLimits, serve};
use agentloop::telemetry::metrics::Metrics;
use axum::http::{Request, Response};
use axum_server::tls_rustls::RustlsConfig;
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::process::{Child, Command};
use tokio_util::sync::CancellationToken;

use crate::support::agents::{agent, idle_ledger, idle_sensors, view};
use crate::support::tokens::{token as token_of, words};

/// Token of one who may read.
pub const READER: &str = "person reader";
/// Token of one who may read words too.
pub const EDITOR: &str = "person editor";
/// Stands in instructions and answers; may stand in no event.
pub const CANARY: &str = "canary-5e21";
/// The epoch of every pod.
pub const EPOCH: i64 = 4;
/// Longest wait for anything. A slow machine needs tens of seconds for as many turns as some tests count.
pub const WAIT_TIMEOUT: Duration = Duration::from_mins(1);

/// Longer texts than an event would have.
const SCRIPT: &str = "
turns:
- {text: I look at canary-5e21., delayMilliseconds: 20}
- {text: And again at canary-5e21., delayMilliseconds: 20}
- {toolCalls: [{name: unheard_of, arguments: {what: canary-5e21}}], delayMilliseconds: 20}
";

pub struct EventsHarness {
    pub client: reqwest::Client,
    pub loops: Arc<PodSessions>,
    pub metrics: Arc<Metrics>,
    address: SocketAddr,
    dir: tempfile::TempDir,
    asked: Arc<Mutex<Vec<Value>>>,
    stop: CancellationToken,
    gateway: Option<Child>,
    worker: Option<Child>,
    /// Spec of Agent `x`.
    pub spec: Value,
    api: kube::Client,
    /// What the page knows of Agents.
    pub agents: AgentsView,
    tls: RustlsConfig,
}

impl Drop for EventsHarness {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

pub fn agent_key(name: &str) -> NamespacedName {
    NamespacedName::new("a", name)
}

pub fn pod_of(name: &str) -> LivePod {
    LivePod {
        uid: format!("pod-of-{name}"),
        epoch: EPOCH,
    }
}

/// Waits until it is so.
pub async fn wait_until(what: &str, so: impl Fn() -> bool) {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while !so() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Tokens say in clear whose they are: `person NAME`, or `AUDIENCE NAMESPACE ACCOUNT POD UID`.
fn review(spec: &Value) -> Value {
    let token = words(spec["token"].as_str().unwrap());
    let words: Vec<&str> = token.split(' ').collect();
    match words[..] {
        ["person", name] if spec["audiences"].is_null() => json!({"authenticated": true, "user": {
            "username": name, "uid": format!("uid-of-{name}"), "groups": ["people"], "extra": {"scopes": ["all"]},
        }}),
        [audience, namespace, account, pod, uid] if spec["audiences"] == json!([audience]) => json!({
            "authenticated": true, "audiences": [audience],
            "user": {"username": format!("system:serviceaccount:{namespace}:{account}"), "extra": {
                "authentication.kubernetes.io/pod-name": [pod], "authentication.kubernetes.io/pod-uid": [uid],
            }},
        }),
        _ => json!({"authenticated": false}),
    }
}

fn api_server(asked: Arc<Mutex<Vec<Value>>>) -> kube::Client {
    let answer = tower::service_fn(move |request: Request<kube::client::Body>| {
        let asked = asked.clone();
        async move {
            let path = request.uri().path().to_owned();
            let body = request.into_body().collect_bytes().await.unwrap();
            let mut answer: Value = serde_json::from_slice(&body).unwrap();
            answer["status"] = match path.as_str() {
                "/apis/authentication.k8s.io/v1/tokenreviews" => review(&answer["spec"]),
                "/apis/authorization.k8s.io/v1/subjectaccessreviews" => {
                    asked.lock().unwrap().push(answer["spec"].clone());
                    {
                        let asked = &answer["spec"]["resourceAttributes"];
                        let rights = &asked["subresource"];
                        let allowed = match answer["spec"]["user"].as_str().unwrap() {
                            "reader" => rights == "events",
                            "editor" => true,
                            "viewer" => asked["namespace"] == "a" && rights != "messages",
                            "watcher" => asked["namespace"] == "a" && rights.is_null(),
                            "namer" => asked["name"] == "z" && rights.is_null(),
                            _ => false,
                        };
                        json!({ "allowed": allowed })
                    }
                }
                other => panic!("{other}"),
            };
            Ok::<_, Infallible>(Response::new(axum::body::Body::from(answer.to_string())))
        }
    });
    kube::Client::new(answer, "default")
}

impl EventsHarness {
    /// A leader with Agents `x`, whose pod is expected, and `y`, which has none. No pod runs yet.
    pub async fn start() -> Self {
        Self::with_history(None).await
    }

    /// The same with a database for histories. Agent `z` in namespace `b` has a pod as well, in name only.
    pub async fn with_history(store: Option<Arc<HistoryStore>>) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let authority = CertificateAuthority::make(Timestamp::now()).unwrap();
        let leaf = authority.sign(&["127.0.0.1".into()], Timestamp::now()).unwrap();
        let tls = RustlsConfig::from_config(server_config(&leaf).unwrap());
        let root = reqwest::Certificate::from_pem(authority.certificate.as_bytes()).unwrap();
        let client = reqwest::Client::builder().tls_certs_only([root]).build().unwrap();
        let (loops, changed) = PodSessions::new();
        drop(changed);
        let loops = Arc::new(loops.with_history(store.is_some()));
        loops.set_budget_terms(&agent_key("x"), Some(BudgetTerms::default()));
        for (key, name) in [(agent_key("x"), "x"), (NamespacedName::new("b", "z"), "z")] {
            let owner = format!("uid-of-{name}");
            loops.expect_pod(
                (&key, &owner),
                pod_of(name),
                LoopTotals::default(),
                Directives::default(),
            );
        }
        let status = json!({});
        let agents = view(&[
            agent("a", "x", &status),
            agent("a", "y", &status),
            agent("b", "z", &status),
        ]);
        let metrics = Arc::new(Metrics::new().unwrap());
        initialize_history_metrics(&metrics);
        let asked = Arc::default();
        let api = api_server(Arc::clone(&asked));
        let link = ControllerLink {
            identities: PodAuthenticator::new(api.clone()),
            access: ClientAuthorizer::new(api.clone()),
            answers: GateAnswerRecorder::new(api.clone()),
            loops: loops.clone(),
            relay: Arc::new(DeliveryRelay::new(Duration::from_secs(1)).0),
            tasks: Arc::new(agentloop::controller::task_relay::TaskRelay::new(Duration::from_secs(
                5,
            ))),
            agents: Arc::new(OnceLock::from(agents.clone())),
            budgets: idle_ledger(api.clone(), &loops),
            history: store.map(|store| HistoryReceiver::new(store, metrics.clone())),
            metrics: metrics.clone(),
            events: EventSink::new().0,
            clock: Arc::new(Timestamp::now),
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        tokio::spawn(serve(
            listener,
            tls.clone(),
            Arc::new(link),
            LinkLimits::default(),
            stop.clone(),
        ));
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("record")).unwrap();
        std::fs::write(dir.path().join("ca.crt"), &authority.certificate).unwrap();
        std::fs::write(dir.path().join("script"), SCRIPT).unwrap();
        Self {
            client,
            loops,
            metrics,
            address,
            dir,
            asked,
            stop,
            gateway: None,
            worker: None,
            api,
            agents,
            tls,
            spec: json!({
                "instructions": format!("Be {CANARY}."),
                "model": {"api": "Scripted", "name": "s"},
                "loop": {"minDelayMilliseconds": 1, "maxDelayMilliseconds": 10},
                "guardrails": {"maxConsecutiveTurns": 1000, "loopDetection": {"mode": "Warn"}},
            }),
        }
    }

    pub fn events_url(&self, agent: &str, query: &str) -> String {
        let (namespace, name) = agent.split_once('/').unwrap();
        let address = self.address;
        format!("https://{address}/v1/namespaces/{namespace}/agents/{name}/events{query}")
    }

    /// Serves the page; returns where. `is_ready`: the caches are filled.
    pub async fn serve_page(&self, is_ready: bool) -> SocketAddr {
        let agents = is_ready
            .then(|| self.agents.clone())
            .map_or_else(OnceLock::new, OnceLock::from);
        let clock: WallClock = Arc::new(Timestamp::now);
        let relay = Arc::new(DeliveryRelay::new(Duration::from_secs(1)).0);
        let sources = PageSources {
            access: ClientAuthorizer::new(self.api.clone()),
            agents: Arc::new(agents),
            loops: self.loops.clone(),
            budgets: idle_ledger(self.api.clone(), &self.loops),
            sensors: idle_sensors(self.api.clone(), "image", (&self.loops, &relay), clock.clone()),
            clock,
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(page::serve(listener, self.tls.clone(), sources, self.stop.clone()));
        address
    }

    /// The URL of the link.
    pub fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    /// The CA bundle of the link.
    pub fn authorities(&self) -> String {
        std::fs::read_to_string(self.path("ca.crt")).unwrap()
    }

    /// What the model says, from the next start of the gateway on.
    pub fn set_script(&self, script: &str) {
        std::fs::write(self.path("script"), script).unwrap();
    }

    pub fn tasks_url(&self, agent: &str) -> String {
        self.events_url(agent, "").replace("/events", "/tasks")
    }

    /// What the pod of Agent `x` is to do.
    pub fn directives(&self) -> Directives {
        let attached = self.loops.attach(&agent_key("x"), &pod_of("x"), Timestamp::now());
        attached.unwrap().1.borrow().clone()
    }

    /// What was asked of rights.
    pub fn asked(&self) -> Vec<Value> {
        self.asked.lock().unwrap().clone()
    }

    /// The Agent has no pod any more.
    pub fn forget_pod(&self) {
        self.loops.forget(&agent_key("x"));
    }

    pub fn link_client(&self) -> LinkClient {
        self.link_client_of("x")
    }

    /// Speaks as the gateway of this Agent's pod.
    pub fn link_client_of(&self, name: &str) -> LinkClient {
        self.link_client_in("a", name)
    }

    /// The same in this namespace.
    pub fn link_client_in(&self, namespace: &str, name: &str) -> LinkClient {
        let token = match namespace {
            "a" => self.path(&format!("token-of-{name}")),
            other => self.path(&format!("token-of-{name}-in-{other}")),
        };
        let text = format!("agentloop.dev/link {namespace} agentloop-agent {name} pod-of-{name}");
        std::fs::write(&token, token_of(&text)).unwrap();
        LinkClient::new(&format!("https://{}", self.address), self.path("ca.crt"), token)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts the pod of Agent `x`.
    pub fn start_pod(&mut self) {
        let _ = self.link_client();
        self.gateway = Some(self.role("gateway"));
        self.worker = Some(self.role("worker"));
    }

    /// Kills both processes of the pod.
    pub async fn kill_pod(&mut self) {
        for role in [&mut self.worker, &mut self.gateway] {
            role.take().unwrap().kill().await.unwrap();
        }
    }

    /// Waits for the worker to exit.
    pub async fn worker_ended(&mut self) {
        let ended = self.worker.as_mut().unwrap().wait();
        tokio::time::timeout(WAIT_TIMEOUT, ended).await.unwrap().unwrap();
    }

    pub async fn restart_worker(&mut self) {
        self.worker.take().unwrap().kill().await.unwrap();
        self.worker = Some(self.role("worker"));
    }

    pub async fn restart_gateway(&mut self) {
        self.gateway.take().unwrap().kill().await.unwrap();
        self.gateway = Some(self.role("gateway"));
    }

    /// SIGTERM.
    pub async fn terminate_worker(&mut self) {
        let pid = self.worker.as_ref().unwrap().id().unwrap().to_string();
        let sent = Command::new("kill").args(["-TERM", &pid]).status().await.unwrap();
        assert!(sent.success());
    }

    pub fn output(&self, role: &str) -> String {
        std::fs::read_to_string(self.path(role)).unwrap()
    }

    fn role(&self, role: &str) -> Child {
        let config = json!({
            "namespace": "a", "name": "x", "uid": "uid-of-x", "epoch": EPOCH,
            "linkUrl": format!("https://{}", self.address),
            "spec": self.spec,
        });
        let log = File::options().create(true).append(true).open(self.path(role)).unwrap();
        Command::new(env!("CARGO_BIN_EXE_agentloop"))
            .arg(role)
            .env_clear()
            .env("RUST_LOG", "info")
            .env("AGENTLOOP_POD", config.to_string())
            .env("AGENTLOOP_POD_UID", "pod-of-x")
            .env("AGENTLOOP_SOCKET", self.path("gateway.sock"))
            .env("AGENTLOOP_JOURNAL_DIR", self.path("journal"))
            .env("AGENTLOOP_INSTRUCTIONS_FILE", self.path("none"))
            .env("AGENTLOOP_SKILLS_DIR", self.path("none"))
            .env("AGENTLOOP_RECORD_DIR", self.path("record"))
            .env("AGENTLOOP_SCRIPT_FILE", self.path("script"))
            .env("AGENTLOOP_API_KEY_FILE", self.path("none"))
            .env("AGENTLOOP_TOOL_HEADERS_DIR", self.path("none"))
            .env("AGENTLOOP_LINK_TOKEN_FILE", self.path("token-of-x"))
            .env("AGENTLOOP_LINK_CA_FILE", self.path("ca.crt"))
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .unwrap()
    }
}
