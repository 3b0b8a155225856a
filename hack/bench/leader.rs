//! A leader for benches: the real server of the link and the real relay of events, for one Agent `a` and one Sensor `s` of
//! the namespace `ns`. It grants one lease of each account, once and for all.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use agentloop::api::amount::Amount;
use agentloop::controller::ca::Authority;
use agentloop::controller::certificates::server_config;
use agentloop::controller::loops::AgentKey;
use agentloop::controller::relay::{Relay, SensorKey};
use agentloop::link::deliveries::{
    DELIVERY_SECONDS, Deliver, Delivered, DeliveredTo, Delivery, SensorDirectives, SensorPodReport,
};
use agentloop::link::events::{EventsAnswer, EventsPage, ReadRefusal, ReadRequest, Telling};
use agentloop::link::messages::{
    AccountAnswer, Attach, Attached, BudgetTerms, Directives, Known, LeaseAnswer, LeaseGrant, LeaseRequest, PROTOCOL,
    Refusal, Report,
};
use agentloop::link::server::{Limits, Link, PodIdentity, PodKind, serve};
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
    let authority = Authority::make(Timestamp::now()).expect("a CA is made");
    let leaf = authority
        .sign(&["127.0.0.1".into()], Timestamp::now())
        .expect("the CA signs");
    let tls = RustlsConfig::from_config(server_config(&leaf).expect("its certificate serves"));
    let directives = watch::Sender::new(Directives {
        budget: Some(terms),
        ..Directives::default()
    });
    // Nobody asks what changed.
    let (relay, _) = Relay::new(Duration::from_secs(DELIVERY_SECONDS));
    if let Some(directives) = sensor {
        let key = SensorKey {
            namespace: "ns".into(),
            name: "s".into(),
        };
        relay.expect(&key, &identity(PodKind::Sensor).uid, directives);
    }
    let (arrived, words) = mpsc::unbounded_channel();
    aside(|| async {
        let listener = TcpListener::from_std(listener).expect("it can be awaited");
        let link = Arc::new(Generous {
            directives,
            relay,
            arrived,
        });
        serve(listener, tls, link, Limits::default(), CancellationToken::new())
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
    relay: Relay,
    arrived: mpsc::UnboundedSender<(Instant, i64)>,
}

impl Link for Generous {
    async fn authenticate(&self, token: &str, _address: IpAddr) -> Result<PodIdentity, Refusal> {
        Ok(identity(match token {
            SENSOR_TOKEN => PodKind::Sensor,
            _ => PodKind::Agent,
        }))
    }

    fn attach(&self, _pod: &PodIdentity, attach: &Attach) -> Result<Attached, Refusal> {
        Ok(Attached {
            protocol: PROTOCOL,
            epoch: attach.epoch,
            known: Known::default(),
            directives: self.directives.borrow().clone(),
        })
    }

    fn report(&self, _pod: &PodIdentity, _report: Report) -> Result<(), Refusal> {
        Ok(())
    }

    async fn lease(&self, _pod: &PodIdentity, request: LeaseRequest) -> Result<LeaseAnswer, Refusal> {
        let granted = LeaseGrant {
            lease: 1,
            granted: Amount::each(|_| PLENTY),
            spent: Amount::ZERO,
            returned: Amount::ZERO,
            valid_milliseconds: None,
        };
        let accounts = request.accounts.into_iter().map(|said| AccountAnswer {
            account: said.account,
            epoch: 1,
            leases: vec![granted.clone()],
            ..AccountAnswer::default()
        });
        Ok(LeaseAnswer {
            accounts: accounts.collect(),
        })
    }

    fn directives(&self, _pod: &PodIdentity, _epoch: i64) -> Result<watch::Receiver<Directives>, Refusal> {
        Ok(self.directives.subscribe())
    }

    async fn events(&self, _pod: &PodIdentity, _page: EventsPage) -> Result<EventsAnswer, Refusal> {
        Ok(EventsAnswer::default())
    }

    async fn read(&self, _token: &str, _address: IpAddr, _request: &ReadRequest) -> Result<Telling, ReadRefusal> {
        Ok(Box::pin(futures::stream::empty()))
    }

    fn deliveries(&self, _pod: &PodIdentity, _epoch: i64) -> Result<mpsc::Receiver<Delivery>, Refusal> {
        Ok(self.relay.listen(&agent()))
    }

    fn delivered(&self, _pod: &PodIdentity, delivered: DeliveredTo) -> Result<(), Refusal> {
        // Who does not measure has dropped the other end.
        let _ = self.arrived.send((Instant::now(), delivered.delivered.through));
        self.relay.delivered(&agent(), delivered.delivered);
        Ok(())
    }

    fn sensor(&self, pod: &PodIdentity) -> Result<watch::Receiver<SensorDirectives>, Refusal> {
        self.relay.attach(pod)
    }

    fn sensor_report(&self, pod: &PodIdentity, report: SensorPodReport) -> Result<(), Refusal> {
        self.relay.report(pod, report)
    }

    async fn deliver(&self, pod: &PodIdentity, deliver: Deliver) -> Result<Delivered, Refusal> {
        self.relay.deliver(pod, deliver).await
    }

    fn refused(&self, _refusal: &Refusal) {}
}

fn agent() -> AgentKey {
    AgentKey {
        namespace: "ns".into(),
        name: "a".into(),
    }
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
