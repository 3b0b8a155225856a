//! A day of faults: the API server fails in one namespace, and the database, the receiver of announcements and pods do too.
//!
//! The whole process of a controller runs here, and what pods say reaches it over the link, with their tokens.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use agentloop::api::amount::Amount;
use agentloop::api::sensor::SensorTotals;
use agentloop::controller::gates::webhook::{GateWebhook, WebhookTimes};
use agentloop::controller::history::HistorySettings;
use agentloop::controller::process::{ControllerError, run};
use agentloop::history::HistoryStore;
use agentloop::ledger::account::{GrantRequest, LeaseStatement};
use agentloop::link::client::LinkClient;
use agentloop::link::deliveries::SensorPodReport;
use agentloop::link::history::HistoryBatch;
use agentloop::link::messages::{AccountRequest, AttachRequest, LeaseRequest, PROTOCOL, PodReport};
use agentloop::link::sensor_messages::SensorReport;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use kube::Config;
use pretty_assertions::assert_eq;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpSocket};
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::{AgentId, Fired, SECOND, fast_rules, look, missing, pod_status, unexpected, usage};
use crate::support::api_server::ApiServer;
use crate::support::clusters::has;
use crate::support::harness::AGENTS;
use crate::support::ports::free_port;
use crate::support::prometheus::Prometheus;
use crate::support::tokens::{token, unknown};

/// The longest day. It takes a good minute where the machine has time.
const MAX_WAIT: Duration = Duration::from_mins(4);

/// Spends most of its budget, and more each second, but never all of it.
const SPENDER: AgentId = ("shop", "spender");
/// Spends of its budget what lasts for a day.
const SAVER: AgentId = ("shop", "saver");
/// Has gates, and uploads its history.
const ASKER: AgentId = ("shop", "asker");
/// Holds a lease when its pod fails.
const VANISHER: AgentId = ("lab", "vanisher");
const ALL: [AgentId; 4] = [SPENDER, SAVER, ASKER, VANISHER];

/// The namespace in which the API server answers nothing but 503, each time after [`SLOW`].
const BROKEN: &str = "broken";
const SLOW: Duration = Duration::from_millis(300);
/// So many Agents are in it that an Agent waits longer than ten seconds for the only worker.
const CROWD: usize = 60;

/// The limit in tokens of each budget.
const LIMIT: i64 = 1_000_000_000;
/// A Sensor whose events are not delivered, and one that delivers all.
const SENSORS: [(&str, i64); 2] = [("stuck", 3), ("busy", 0)];
/// The gate whose announcement is refused.
const LAST_GATE: &str = "g-last";
/// Gates that are announced when they open; one closes every few seconds.
const GATES: u64 = 8;
const SECRET: &[u8] = b"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

/// What fires.
pub(super) const DAY: [(&str, &str); 9] = [
    ("AgentloopApprovalWebhookFailing", "opened"),
    ("AgentloopBudgetExhaustedSoon", "fast shop"),
    ("AgentloopHistoryDatabaseUnavailable", ""),
    ("AgentloopLeasesForfeited", ""),
    ("AgentloopLinkRefusals", "Fenced"),
    ("AgentloopOperatorAPIErrors", ""),
    ("AgentloopOperatorQueueSlow", "agent"),
    ("AgentloopOperatorReconcileErrors", "agent"),
    ("AgentloopSensorDeliveriesStuck", "shop stuck"),
];
/// What may fire besides, if the day lasts so long: the gates wait for an answer, and the next pod of an Agent for the queue. No
/// Agent of the broken namespace is ready either.
const BESIDES: [(&str, &str); 2] = [
    ("AgentloopAgentApprovalPending", "asker shop"),
    ("AgentloopAgentNotReady", "vanisher lab"),
];

/// Answers reviews of tokens, and fails in one namespace.
async fn with_faults(request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    if path.contains(&format!("/namespaces/{BROKEN}/")) {
        tokio::time::sleep(SLOW).await;
        let status = json!({
            "apiVersion": "v1", "kind": "Status", "status": "Failure", "message": "the server is away",
            "reason": "ServiceUnavailable", "code": 503,
        });
        return (StatusCode::SERVICE_UNAVAILABLE, Json(status)).into_response();
    }
    if path.ends_with("/tokenreviews") {
        let body = axum::body::to_bytes(request.into_body(), usize::MAX).await.unwrap();
        let mut review: Value = serde_json::from_slice(&body).unwrap();
        review["status"] = crate::link::review(review["spec"]["token"].as_str().unwrap());
        return (StatusCode::CREATED, Json(review)).into_response();
    }
    next.run(request).await
}

/// Types and gates of the announcements so far.
type Announced = Arc<Mutex<BTreeSet<String>>>;

/// Takes no announcement that the last gate is open, and one that a gate has closed only when it is repeated.
async fn announced(State(seen): State<Announced>, Json(body): Json<Value>) -> StatusCode {
    let (kind, gate) = (body["type"].as_str().unwrap(), body["data"]["gate"].as_str().unwrap());
    let is_first = seen.lock().unwrap().insert(format!("{kind} {gate}"));
    let fails = match kind {
        "agentloop.gate.opened" => gate == LAST_GATE,
        _ => is_first,
    };
    if fails {
        StatusCode::INTERNAL_SERVER_ERROR
    } else {
        StatusCode::NO_CONTENT
    }
}

/// Serves routes on loopback for as long as the runtime lives.
async fn serve(router: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

/// The gateway of one pod.
struct Gateway {
    uid: String,
    epoch: i64,
    client: LinkClient,
    /// What it says of the leases that it has.
    statements: Vec<LeaseStatement>,
    /// Tokens that it has spent.
    spent: i64,
}

/// The controller, and those it works with.
struct Day {
    server: ApiServer,
    /// Tokens, the CA, and the address of the database.
    directory: TempDir,
    link: String,
    metrics: String,
    /// The address of the database: an unused port, bound without a listener.
    _database: TcpSocket,
    gateways: BTreeMap<&'static str, Gateway>,
    /// Pods of Sensors.
    sensors: BTreeMap<&'static str, LinkClient>,
    /// A pod that another one has replaced, and an unknown one.
    strangers: Option<[LinkClient; 2]>,
    stop: CancellationToken,
    controller: JoinHandle<Result<(), ControllerError>>,
}

impl Day {
    async fn begin() -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let server = ApiServer::new(Arc::new(Timestamp::now));
        put_objects(&server);
        let api = serve(server.router().layer(from_fn(with_faults))).await;
        let receiver = Router::new()
            .route("/", post(announced))
            .with_state(Announced::default());
        let receiver = serve(receiver).await;
        let database = TcpSocket::new_v4().unwrap();
        database.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let (file, address) = (directory.path().join("database"), database.local_addr().unwrap());
        std::fs::write(
            &file,
            format!("postgresql://agentloop:none@{address}/h?sslmode=disable"),
        )
        .unwrap();

        let mut options = crate::leader::options(false);
        options.metrics_address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        options.probe_address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        options.link_address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        options.sensor_pods.image = "agentloop:test".into();
        let times = WebhookTimes {
            look: SECOND / 10,
            request: 5 * SECOND,
            waits: (SECOND / 5, SECOND),
        };
        options.gate_webhook = Some(GateWebhook::new(&format!("http://{receiver}/"), SECRET, times).unwrap());
        options.history = Some(HistorySettings {
            store: Arc::new(HistoryStore::new(file, None).unwrap()),
            retention_days: 0,
        });
        let (link, metrics) = (
            format!("https://{}", options.link_address),
            options.metrics_address.to_string(),
        );
        let (config, stop) = (
            Config::new(format!("http://{api}").parse().unwrap()),
            CancellationToken::new(),
        );
        let ends = stop.clone();
        let controller = tokio::spawn(async move { Box::pin(run(options, config, ends)).await });
        Self {
            server,
            directory,
            link,
            metrics,
            _database: database,
            gateways: BTreeMap::new(),
            sensors: BTreeMap::new(),
            strangers: None,
            stop,
            controller,
        }
    }

    /// A client whose token has these words.
    fn client(&self, words: &str) -> LinkClient {
        let path = |name: &str| self.directory.path().join(name);
        let name = format!("token-{}", words.replace(['/', ' '], "-"));
        std::fs::write(path(&name), token(words)).unwrap();
        LinkClient::new(&self.link, path("ca.crt"), path(&name))
    }

    /// What kubelets and pods do in a second, once the controller has published its CA.
    async fn step(&mut self, second: u64) {
        let bundle = |object: Value| Some(object["data"]["ca.crt"].as_str()?.to_owned());
        let Some(bundle) = self.server.list("/configmaps").into_iter().find_map(bundle) else {
            return;
        };
        std::fs::write(self.directory.path().join("ca.crt"), bundle).unwrap();
        for agent in ALL {
            self.run_agent(agent, second).await;
        }
        for (name, pending) in SENSORS {
            self.run_sensor(name, pending, second).await;
        }
        self.intrude(second).await;
        // The others have pods by then: they do not wait for a place in the queue before they begin.
        if self.is_complete() {
            self.push_crowd(second);
        }
    }

    fn is_complete(&self) -> bool {
        self.gateways.len() == ALL.len() && self.sensors.len() == SENSORS.len()
    }

    /// Runs the pod of an Agent, if there is one.
    async fn run_agent(&mut self, agent: AgentId, second: u64) {
        let (namespace, name) = agent;
        let Some(pod) = self.server.get("/pods", namespace, name) else {
            return;
        };
        if pod["metadata"]["deletionTimestamp"].is_string() {
            self.server.finish_pod(namespace, name);
            return;
        }
        match pod["status"]["phase"].as_str() {
            Some("Failed") => return,
            Some("Running") => {}
            _ => drop(self.server.put("/pods", pod_status(agent, false))),
        }
        let uid = pod["metadata"]["uid"].as_str().unwrap();
        let epoch = pod["metadata"]["annotations"]["agentloop.dev/epoch"].as_str();
        let epoch: i64 = epoch.unwrap().parse().unwrap();
        if self.gateways.get(name).is_none_or(|gateway| gateway.uid != uid) {
            let client = self.client(&format!("agentloop.dev/link {namespace} agentloop-agent {name} {uid}"));
            // The controller may not expect this pod yet.
            if client.attach(&attach(epoch)).await.is_err() {
                return;
            }
            let gateway = Gateway {
                uid: uid.into(),
                epoch,
                client,
                statements: Vec::new(),
                spent: 0,
            };
            self.gateways.insert(name, gateway);
        }
        let gateway = self.gateways.get_mut(name).unwrap();
        let mut report: PodReport = serde_json::from_value(report_of(agent, second)).unwrap();
        report.epoch = epoch;
        let _ = gateway.client.report(&report).await;
        let account = |budget: &str| account_of(&self.server, budget);
        match agent {
            SPENDER => gateway.spend(&account("fast"), (LIMIT - gateway.spent) / 14).await,
            SAVER => gateway.spend(&account("slow"), LIMIT / 1000).await,
            VANISHER if gateway.spent == 0 => {
                gateway.spend(&account("lost"), LIMIT / 100).await;
                if gateway.spent > 0 {
                    // It has not reported what it did with its lease.
                    let metadata = json!({"name": name, "namespace": namespace});
                    let failed = json!({"metadata": metadata, "status": {"phase": "Failed"}});
                    self.server.put("/pods", failed);
                }
            }
            ASKER => {
                let batch = HistoryBatch {
                    epoch,
                    writer: "w".into(),
                    last: 1,
                    ..HistoryBatch::default()
                };
                let _ = gateway.client.history(&batch).await;
            }
            _ => {}
        }
    }

    /// Runs the pod of a Sensor, as its StatefulSet does, and reports for it.
    async fn run_sensor(&mut self, name: &'static str, pending: i64, second: u64) {
        let (namespace, pod) = ("shop", format!("{name}-sensor-0"));
        let Some(set) = self
            .server
            .get("apps/statefulsets", namespace, &format!("{name}-sensor"))
        else {
            return;
        };
        if !self.sensors.contains_key(name) {
            let pod = self
                .server
                .put("/pods", sensor_pod(name, &pod, &set["metadata"]["uid"]));
            let uid = pod["metadata"]["uid"].as_str().unwrap();
            let words = format!("agentloop.dev/link {namespace} agentloop-sensor {name}-sensor-0 {uid}");
            let client = self.client(&words);
            self.sensors.insert(name, client);
        }
        let sensor = self.server.get("agentloop.dev/sensors", namespace, name).unwrap();
        let report = SensorPodReport {
            report: SensorReport {
                uid: sensor["metadata"]["uid"].as_str().unwrap().into(),
                generation: sensor["metadata"]["generation"].as_i64().unwrap(),
                totals: SensorTotals {
                    events: i64::try_from(second).unwrap(),
                    ..SensorTotals::default()
                },
                last: None,
                consecutive_failures: 0,
                failure: None,
                next_attempt_at: None,
            },
            pending_deliveries: pending,
        };
        // The controller may not know this pod yet.
        let _ = self.sensors[name].sensor_report(&report).await;
    }

    /// A pod that another has replaced attaches again and again, and an unknown one attaches now and then.
    async fn intrude(&mut self, second: u64) {
        if self.strangers.is_none() {
            let (namespace, name) = SPENDER;
            let former = format!("agentloop.dev/link {namespace} agentloop-agent {name} uid-of-former");
            let path = |name: &str| self.directory.path().join(name);
            std::fs::write(path("unknown"), unknown(1)).unwrap();
            let nobody = LinkClient::new(&self.link, path("ca.crt"), path("unknown"));
            self.strangers = Some([self.client(&former), nobody]);
        }
        let [former, nobody] = self.strangers.as_ref().unwrap();
        if !self.gateways.contains_key(SPENDER.1) {
            return;
        }
        for _ in 0..10 {
            let _ = former.attach(&attach(1)).await;
        }
        if second.is_multiple_of(2) {
            let _ = nobody.attach(&attach(1)).await;
        }
    }

    /// Makes the Agents of the broken namespace due, which cannot be reconciled.
    fn push_crowd(&self, second: u64) {
        for number in 0..CROWD {
            let (name, time) = (format!("crowd-{number}"), second.to_string());
            put_agent(&self.server, (BROKEN, name.as_str()), &json!({"time": time}));
        }
    }

    async fn end(self) {
        self.stop.cancel();
        self.controller.await.unwrap().unwrap();
    }
}

impl Gateway {
    /// States what it has spent and returns the rest of each lease, and takes a lease to spend this many tokens.
    async fn spend(&mut self, account: &str, wanted: i64) {
        let tokens = |tokens: i64| Amount { tokens, ..Amount::ZERO };
        let request = LeaseRequest {
            epoch: self.epoch,
            record: format!(
                "{:0>32}",
                self.uid.replace(|digit: char| !digit.is_ascii_hexdigit(), "")
            ),
            accounts: vec![AccountRequest {
                account: account.into(),
                statements: self.statements.clone(),
                ask: Some(GrantRequest {
                    lease: None,
                    open: Amount::ZERO,
                    least: tokens(1),
                    full: tokens(wanted),
                }),
            }],
        };
        let Ok(response) = self.client.lease(&request).await else {
            return;
        };
        let answered = response.accounts.into_iter().next().unwrap_or_default();
        self.statements
            .retain(|stated| answered.leases.iter().any(|lease| lease.lease == stated.lease));
        for lease in answered.leases {
            if self.statements.iter().any(|stated| stated.lease == lease.lease) {
                continue;
            }
            let spent = lease.granted.tokens.min(wanted);
            self.spent += spent;
            self.statements.push(LeaseStatement {
                lease: lease.lease,
                spent: tokens(spent),
                returned: tokens(lease.granted.tokens - spent),
                closed: true,
            });
        }
    }
}

fn attach(epoch: i64) -> AttachRequest {
    AttachRequest {
        protocol: PROTOCOL,
        oldest_protocol: None,
        epoch,
        models: vec![],
    }
}

fn account_of(server: &ApiServer, budget: &str) -> String {
    let namespace = if budget == "lost" { VANISHER.0 } else { "shop" };
    let budget = server.get("agentloop.dev/agentbudgets", namespace, budget).unwrap();
    budget["metadata"]["uid"].as_str().unwrap().to_owned()
}

fn put_objects(server: &ApiServer) {
    for namespace in ["shop", "lab"] {
        server.put(
            "/configmaps",
            json!({
                "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "script", "namespace": namespace},
                "data": {"turns": "turns:\n- text: done\n"},
            }),
        );
    }
    for agent in ALL {
        put_agent(server, agent, &json!({"agent": agent.1}));
    }
    // The window of no budget ends on this day.
    let hour = Timestamp::now().to_zoned(TimeZone::UTC).hour();
    let zone = if hour == 23 { "Asia/Tokyo" } else { "UTC" };
    let calendar = json!({"calendar": {"period": "Monthly", "timeZone": zone}});
    for (name, (namespace, agent), window) in [
        ("fast", SPENDER, &calendar),
        ("slow", SAVER, &calendar),
        ("lost", VANISHER, &json!({"rolling": {"seconds": 86_400}})),
    ] {
        server.put(
            "agentloop.dev/agentbudgets",
            json!({
                "apiVersion": "agentloop.dev/v1alpha1", "kind": "AgentBudget",
                "metadata": {"name": name, "namespace": namespace},
                "spec": {
                    "selector": {"matchLabels": {"agent": agent}}, "limits": {"tokens": LIMIT}, "window": window,
                    "warnAtPercent": 100,
                },
            }),
        );
    }
    for (name, _) in SENSORS {
        server.put(
            "agentloop.dev/sensors",
            json!({
                "apiVersion": "agentloop.dev/v1alpha1", "kind": "Sensor", "metadata": {"name": name, "namespace": "shop"},
                "spec": {"agentNames": [ASKER.1], "source": {"stream": {"url": "https://feed.example.com/events"}}},
            }),
        );
    }
}

fn put_agent(server: &ApiServer, (namespace, name): (&str, &str), labels: &Value) {
    let source = json!({"configMapKeyRef": {"name": "script", "key": "turns"}});
    let spec = json!({
        "model": {"api": "Scripted", "name": "demo", "scripted": source}, "instructions": "Be brief.",
        "storage": {"ephemeral": true},
    });
    let metadata = json!({"name": name, "namespace": namespace, "labels": labels});
    let object = json!({"apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent", "metadata": metadata, "spec": spec});
    server.put(AGENTS, object);
}

/// The pod of a Sensor, which runs.
fn sensor_pod(sensor: &str, name: &str, owner: &Value) -> Value {
    let container = json!({
        "name": "sensor", "image": "agentloop:test", "imageID": "", "ready": true, "restartCount": 0,
        "state": {"running": {"startedAt": Timestamp::now()}},
    });
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": name, "namespace": "shop", "labels": {"agentloop.dev/sensor": sensor},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "s", "uid": owner, "controller": true}],
        },
        "spec": {"containers": []},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}], "containerStatuses": [container]},
    })
}

/// What the gateway of an Agent reports in a second of the day.
fn report_of(agent: AgentId, second: u64) -> Value {
    let gate = |id: String| {
        json!({
            "id": id, "kind": "ToolCallNeedsApproval", "tool": "files__write", "argumentsHash": "aa",
            "openedAt": "2026-01-02T03:04:05Z",
        })
    };
    let open = (second / 6..GATES).map(|number| format!("g{number}"));
    let gates: Vec<_> = open.chain([LAST_GATE.to_owned()]).map(gate).collect();
    let mut told = json!({"state": "Sleeping", "turn": second, "turns": second});
    if agent == ASKER {
        told["gates"] = json!(gates);
    }
    json!({"loop": told, "usage": usage(second, &json!({}))})
}

#[tokio::test(flavor = "multi_thread")]
async fn a_day_of_faults_fires_the_alerts_about_them_and_none_about_what_works() {
    if !has("prometheus") {
        return;
    }
    let mut day = Day::begin().await;
    let target = json!({"targets": [day.metrics], "labels": {"namespace": "agentloop-system"}});
    let config = json!([{"job_name": "agentloop", "honor_labels": true, "static_configs": [target]}]);
    let mut prometheus = Prometheus::start(&config);
    tokio::task::block_in_place(|| {
        // Totals that begin before the first scrape do not grow.
        prometheus.until_some("the controller", "agentloop_link_refusals_total");
        prometheus.load_rules(&fast_rules());
    });

    let (began, mut fired) = (Instant::now(), Fired::new());
    let mut ticks = tokio::time::interval(SECOND);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for second in 0.. {
        if began.elapsed() >= MAX_WAIT || missing(&fired, &DAY).is_empty() {
            break;
        }
        ticks.tick().await;
        day.step(second).await;
        tokio::task::block_in_place(|| look(&prometheus, &mut fired, began.elapsed()));
    }
    assert_eq!(missing(&fired, &DAY), [], "fired: {fired:#?}");
    let crowd: Vec<_> = (0..CROWD).map(|number| format!("crowd-{number} {BROKEN}")).collect();
    let crowd = crowd.iter().map(|agent| ("AgentloopAgentNotReady", agent.as_str()));
    let expected: Vec<_> = DAY.into_iter().chain(BESIDES).chain(crowd).collect();
    assert_eq!(unexpected(&fired, &expected), [], "fired: {fired:#?}");
    day.end().await;
}
