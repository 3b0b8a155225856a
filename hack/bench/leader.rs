//! A leader for benches: the real server of the link and the real relay of events, for one Agent `a` and one Sensor `s` of
//! the namespace `ns`. It grants one lease of each account, once.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use agentloop::api::NamespacedName;
use agentloop::api::amount::Amount;
use agentloop::controller::delivery_relay::DeliveryRelay;
use agentloop::controller::task_relay::TaskRelay;
use agentloop::controller::tls::ca::CertificateAuthority;
use agentloop::controller::tls::certificates::server_config;
use agentloop::link::answers::{AnsweredGate, GateAnswerRequest};
use agentloop::link::deliveries::{
    DELIVERY_SECONDS, Delivery, DeliveryAck, DeliveryRequest, RelayedDeliveryAck, SensorDirectives, SensorPodReport,
};
use agentloop::link::events::{ClientRefusal, EventStream, EventsPage, EventsResponse, ReadRequest};
use agentloop::link::history::{HistoryAck, HistoryBatch};
use agentloop::link::messages::{
    AccountResponse, AttachRequest, AttachResponse, BudgetTerms, Directives, LeaseGrant, LeaseRequest, LeaseResponse,
    LoopTotals, PROTOCOL, PodRefusal, PodReport,
};
use agentloop::link::server::{LinkHandler, LinkLimits, PodIdentity, PodKind, serve};
use agentloop::link::task_requests::{ACCEPT_SECONDS, AcceptedTask, RelayedTaskAck, RequestedTask, TaskRequest};
use agentloop::link::text_fragments::RelayedTextFragment;
use axum_server::tls_rustls::RustlsConfig;
use jiff::Timestamp;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

/// More than any bench uses.
pub const PLENTY: i64 = 1_000_000_000_000;
/// What the Sensor's pod shows as its token; every other one is the Agent's.
pub const SENSOR_TOKEN: &str = "sensor-token";

/// A leader that runs.
pub struct Leader {
    /// Its address.
    pub address: SocketAddr,
    /// The CA of its certificate, PEM.
    pub ca: String,
}

/// Each word of the Agent that it has events of the Sensor on disk: when it came, and through which number.
pub type Words = mpsc::UnboundedReceiver<(Instant, i64)>;

/// Runs a leader with these limits in a thread of its own, until the process ends. `sensor`: what its pod is to do.
pub fn start(terms: BudgetTerms, sensor: Option<SensorDirectives>) -> (Leader, Words) {
    let (listener, address) = listen();
    let authority = CertificateAuthority::make(Timestamp::now()).expect("a CA is made");
    let leaf = authority
        .sign(&["127.0.0.1".into()], Timestamp::now())
        .expect("the CA signs");
    let tls = RustlsConfig::from_config(server_config(&leaf).expect("its certificate serves"));
    let directives = watch::Sender::new(Directives {
        budget: Some(terms),
        ..Directives::default()
    });
    // No reconciler reads the changes.
    let (relay, _) = DeliveryRelay::new(Duration::from_secs(DELIVERY_SECONDS));
    if let Some(directives) = sensor {
        let key = NamespacedName::new("ns", "s");
        relay.expect_pod(&key, &identity(PodKind::Sensor).uid, directives);
    }
    let (arrived, words) = mpsc::unbounded_channel();
    aside(|| async {
        let listener = TcpListener::from_std(listener).expect("it can be awaited");
        let link = Arc::new(Generous {
            directives,
            relay,
            tasks: TaskRelay::new(Duration::from_secs(ACCEPT_SECONDS)),
            arrived,
        });
        serve(listener, tls, link, LinkLimits::default(), CancellationToken::new())
            .await
            .expect("the link serves");
    });
    let leader = Leader {
        address,
        ca: authority.certificate,
    };
    (leader, words)
}

struct Generous {
    directives: watch::Sender<Directives>,
    relay: DeliveryRelay,
    tasks: TaskRelay,
    arrived: mpsc::UnboundedSender<(Instant, i64)>,
}

impl LinkHandler for Generous {
    async fn authenticate(&self, token: &str, _address: IpAddr) -> Result<PodIdentity, PodRefusal> {
        Ok(identity(match token {
            SENSOR_TOKEN => PodKind::Sensor,
            _ => PodKind::Agent,
        }))
    }

    fn attach(&self, _pod: &PodIdentity, attach: &AttachRequest) -> Result<AttachResponse, PodRefusal> {
        Ok(AttachResponse {
            protocol: PROTOCOL,
            epoch: attach.epoch,
            known: LoopTotals::default(),
            directives: self.directives.borrow().clone(),
        })
    }

    fn report(&self, _pod: &PodIdentity, _report: PodReport) -> Result<(), PodRefusal> {
        Ok(())
    }

    async fn lease(&self, _pod: &PodIdentity, request: LeaseRequest) -> Result<LeaseResponse, PodRefusal> {
        let granted = LeaseGrant {
            lease: 1,
            granted: Amount::from_fn(|_| PLENTY),
            spent: Amount::ZERO,
            returned: Amount::ZERO,
            valid_milliseconds: None,
        };
        let accounts = request.accounts.into_iter().map(|said| AccountResponse {
            account: said.account,
            epoch: 1,
            leases: vec![granted.clone()],
            ..AccountResponse::default()
        });
        Ok(LeaseResponse {
            accounts: accounts.collect(),
        })
    }

    fn directives(&self, _pod: &PodIdentity, _epoch: i64) -> Result<watch::Receiver<Directives>, PodRefusal> {
        Ok(self.directives.subscribe())
    }

    async fn events(&self, _pod: &PodIdentity, _page: EventsPage) -> Result<EventsResponse, PodRefusal> {
        Ok(EventsResponse::default())
    }

    fn text(&self, _pod: &PodIdentity, _fragment: RelayedTextFragment) -> Result<(), PodRefusal> {
        Ok(())
    }

    async fn answer(
        &self,
        _token: &str,
        _address: IpAddr,
        _request: &GateAnswerRequest,
    ) -> Result<AnsweredGate, ClientRefusal> {
        unreachable!("nobody answers gates here")
    }

    async fn authorize_task(
        &self,
        _token: &str,
        _address: IpAddr,
        _agent: (&str, &str),
    ) -> Result<String, ClientRefusal> {
        unreachable!("nobody requests tasks here")
    }

    async fn request_task(&self, _user: &str, _request: &TaskRequest) -> Result<AcceptedTask, ClientRefusal> {
        unreachable!("nobody requests tasks here")
    }

    fn requested_tasks(&self, _pod: &PodIdentity, _epoch: i64) -> Result<mpsc::Receiver<RequestedTask>, PodRefusal> {
        Ok(self.tasks.register_gateway(&agent()))
    }

    fn task_acknowledged(&self, _pod: &PodIdentity, ack: RelayedTaskAck) -> Result<(), PodRefusal> {
        self.tasks.acknowledged(&agent(), &ack.ack);
        Ok(())
    }

    async fn history(&self, _: &PodIdentity, batch: HistoryBatch) -> Result<HistoryAck, PodRefusal> {
        Ok(HistoryAck {
            stored: batch.last,
            restart: false,
        })
    }

    async fn read(&self, _token: &str, _address: IpAddr, _request: &ReadRequest) -> Result<EventStream, ClientRefusal> {
        Ok(Box::pin(futures::stream::empty()))
    }

    fn deliveries(&self, _pod: &PodIdentity, _epoch: i64) -> Result<mpsc::Receiver<Delivery>, PodRefusal> {
        Ok(self.relay.register_gateway(&agent()))
    }

    fn delivered(&self, _pod: &PodIdentity, delivered: RelayedDeliveryAck) -> Result<(), PodRefusal> {
        // Who does not measure has dropped the other end.
        let _ = self.arrived.send((Instant::now(), delivered.delivered.through));
        self.relay.delivered(&agent(), delivered.delivered);
        Ok(())
    }

    fn sensor(&self, pod: &PodIdentity) -> Result<watch::Receiver<SensorDirectives>, PodRefusal> {
        self.relay.attach(pod)
    }

    fn sensor_report(&self, pod: &PodIdentity, report: SensorPodReport) -> Result<(), PodRefusal> {
        self.relay.report(pod, report)
    }

    async fn deliver(&self, pod: &PodIdentity, deliver: DeliveryRequest) -> Result<DeliveryAck, PodRefusal> {
        self.relay.deliver(pod, deliver).await
    }

    fn refused(&self, _refusal: &PodRefusal) {}
}

fn agent() -> NamespacedName {
    NamespacedName::new("ns", "a")
}

fn identity(kind: PodKind) -> PodIdentity {
    let (name, uid) = match kind {
        PodKind::Agent => ("a", "pod"),
        PodKind::Sensor => ("s-sensor-0", "sensor-pod"),
    };
    PodIdentity {
        namespace: "ns".into(),
        name: name.into(),
        uid: uid.into(),
        kind,
    }
}

/// Runs a future in a thread of its own, until the process ends.
pub fn aside<F: Future>(future: impl FnOnce() -> F + Send + 'static) {
    std::thread::spawn(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime starts").block_on(future());
    });
}

/// A socket of loopback.
pub fn listen() -> (std::net::TcpListener, SocketAddr) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback can be listened on");
    listener.set_nonblocking(true).expect("a socket need not block");
    let address = listener.local_addr().expect("it has an address");
    (listener, address)
}
