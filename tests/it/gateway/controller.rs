//! A controller's end of the link on loopback, with a CA of its own.

use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use agentloop::api::amount::LimitAmounts;
use agentloop::link::messages::{
    AttachRequest, AttachResponse, BudgetTerms, Directives, LeaseRequest, LoopTotals, PodRefusal, PodReport,
    PricedModel, RefusalCode,
};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use axum_server::tls_rustls::RustlsConfig;
use futures::{StreamExt, stream};
use tokio::sync::watch;

use super::ledger::Ledger;

/// Longest wait for anything in these tests: a busy machine takes its time to start a process.
pub const WAIT_TIMEOUT: Duration = Duration::from_mins(1);

/// What a controller of version 1 answered to the attach of version 2.
const VERSION_1_REFUSAL: &str = include_str!("../link/version_1/refused.json");

#[derive(Clone)]
pub struct Controller {
    pub address: SocketAddr,
    pub ca: String,
    state: Arc<Shared>,
}

struct Shared {
    known: Mutex<LoopTotals>,
    /// Of the last attach.
    models: Mutex<Vec<PricedModel>>,
    /// What it does with every message; `None` takes it, 0 as status says nothing at all.
    refuses: watch::Sender<Option<RefusalCode>>,
    silent: watch::Sender<bool>,
    directives: watch::Sender<Directives>,
    reports: watch::Sender<Vec<PodReport>>,
    tokens: watch::Sender<Vec<String>>,
    ledger: watch::Sender<Ledger>,
    /// Leases get no answer.
    frozen: watch::Sender<bool>,
    /// It is a controller of version 1, which takes no other version.
    is_version_1: watch::Sender<bool>,
}

impl Controller {
    pub async fn start() -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let (ca, certificate, key) = certificates();
        let tls = RustlsConfig::from_pem(certificate.into_bytes(), key.into_bytes())
            .await
            .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(Shared {
            known: Mutex::default(),
            models: Mutex::default(),
            refuses: watch::Sender::default(),
            silent: watch::Sender::default(),
            directives: watch::Sender::default(),
            reports: watch::Sender::default(),
            tokens: watch::Sender::default(),
            ledger: watch::Sender::default(),
            frozen: watch::Sender::default(),
            is_version_1: watch::Sender::default(),
        });
        // Nothing limits the calls.
        state
            .directives
            .send_modify(|directives| directives.budget = Some(BudgetTerms::default()));
        let router = Router::new()
            .route("/v1/attach", post(attach))
            .route("/v1/report", post(report))
            .route("/v1/directives", get(directives))
            .route("/v1/lease", post(lease))
            .with_state(Arc::clone(&state));
        let server = axum_server::from_tcp_rustls(listener, tls).unwrap();
        tokio::spawn(server.serve(router.into_make_service()));
        Self { address, ca, state }
    }

    pub fn knows(&self, known: LoopTotals) {
        *self.state.known.lock().unwrap() = known;
    }

    /// The models that the gateway said it calls.
    pub fn models(&self) -> Vec<PricedModel> {
        self.state.models.lock().unwrap().clone()
    }

    pub fn refuse(&self, code: Option<RefusalCode>) {
        self.state.refuses.send_replace(code);
    }

    /// Answers an attach as a controller of version 1 does, or no more.
    pub fn be_version_1(&self, is_version_1: bool) {
        self.state.is_version_1.send_replace(is_version_1);
    }

    /// Takes no message and sends none.
    pub fn silence(&self, silent: bool) {
        self.state.silent.send_replace(silent);
    }

    /// Says what to do; what limits the calls stays as it is.
    pub fn direct(&self, directives: Directives) {
        self.state.directives.send_modify(|said| {
            let budget = said.budget.take();
            *said = Directives { budget, ..directives };
        });
    }

    /// Says what limits the calls.
    pub fn limit(&self, id: &str, limits: LimitAmounts) {
        self.ledger(|ledger| ledger.limit(id, limits));
    }

    /// What was last said.
    pub fn said(&self) -> Directives {
        self.state.directives.borrow().clone()
    }

    /// Takes the word back.
    pub fn undecide(&self) {
        self.state.directives.send_modify(|said| said.budget = None);
    }

    /// Changes or reads the ledger, and sends the result to the gateway.
    pub fn ledger<T>(&self, act: impl FnOnce(&mut Ledger) -> T) -> T {
        self.state.ledger(act)
    }

    pub fn freeze(&self, frozen: bool) {
        self.state.frozen.send_replace(frozen);
    }

    /// Waits for a ledger like this.
    pub async fn until_ledger(&self, what: &str, wanted: impl Fn(&Ledger) -> bool) {
        let mut ledger = self.state.ledger.subscribe();
        let found = ledger.wait_for(|ledger| wanted(ledger));
        let found = tokio::time::timeout(WAIT_TIMEOUT, found).await;
        assert!(found.is_ok(), "no ledger with {what}");
    }

    pub fn reports(&self) -> Vec<PodReport> {
        self.state.reports.borrow().clone()
    }

    pub fn tokens(&self) -> Vec<String> {
        self.state.tokens.borrow().clone()
    }

    /// Waits for a report like this; gives it.
    pub async fn until(&self, what: &str, wanted: impl Fn(&PodReport) -> bool) -> PodReport {
        let mut reports = self.state.reports.subscribe();
        let found = reports.wait_for(|all| all.last().is_some_and(&wanted));
        match tokio::time::timeout(WAIT_TIMEOUT, found).await {
            Ok(all) => all.unwrap().last().unwrap().clone(),
            Err(late) => panic!("{late}, no report with {what}: {:?}", self.reports().last()),
        }
    }

    pub fn write_ca(&self, path: &Path) {
        std::fs::write(path, &self.ca).unwrap();
    }
}

pub fn certificates() -> (String, String, String) {
    let ca_key = rcgen::KeyPair::generate().unwrap();
    let mut ca = rcgen::CertificateParams::new(vec![]).unwrap();
    ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca_pem = ca.self_signed(&ca_key).unwrap().pem();
    let issuer = rcgen::Issuer::new(ca, ca_key);
    let key = rcgen::KeyPair::generate().unwrap();
    let server = rcgen::CertificateParams::new(vec!["127.0.0.1".into()]).unwrap();
    let certificate = server.signed_by(&key, &issuer).unwrap();
    (ca_pem, certificate.pem(), key.serialize_pem())
}

impl Shared {
    async fn meet(&self, headers: &HeaderMap) -> Result<(), Response> {
        let token = headers
            .get("authorization")
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default();
        self.tokens.send_modify(|tokens| tokens.push(token.into()));
        let _ = self.silent.subscribe().wait_for(|silent| !silent).await;
        let refused = *self.refuses.borrow();
        match refused {
            None => Ok(()),
            Some(code) => {
                let status = if code == RefusalCode::Fenced {
                    StatusCode::CONFLICT
                } else {
                    StatusCode::SERVICE_UNAVAILABLE
                };
                Err((
                    status,
                    Json(PodRefusal {
                        code,
                        message: "the test says so".into(),
                    }),
                )
                    .into_response())
            }
        }
    }
}

impl Shared {
    fn ledger<T>(&self, act: impl FnOnce(&mut Ledger) -> T) -> T {
        let mut done = None;
        let mut told = BudgetTerms::default();
        self.ledger.send_modify(|ledger| {
            done = Some(act(ledger));
            told = ledger.told();
        });
        self.directives.send_if_modified(|said| {
            let new = said.budget.as_ref() != Some(&told);
            said.budget = Some(told);
            new
        });
        done.unwrap()
    }
}

async fn lease(State(state): State<Arc<Shared>>, headers: HeaderMap, Json(request): Json<LeaseRequest>) -> Response {
    if let Err(refused) = state.meet(&headers).await {
        return refused;
    }
    let _ = state.frozen.subscribe().wait_for(|frozen| !frozen).await;
    let (answer, lost) = state.ledger(|ledger| {
        let lost = ledger.lose > 0;
        ledger.lose = ledger.lose.saturating_sub(1);
        (ledger.lease(&request), lost)
    });
    if lost {
        return StatusCode::BAD_GATEWAY.into_response();
    }
    Json(answer).into_response()
}

async fn attach(State(state): State<Arc<Shared>>, headers: HeaderMap, Json(attach): Json<AttachRequest>) -> Response {
    if let Err(refused) = state.meet(&headers).await {
        return refused;
    }
    if *state.is_version_1.borrow() && attach.protocol != 1 {
        let headers = [(header::CONTENT_TYPE, "application/json")];
        return (StatusCode::BAD_REQUEST, headers, VERSION_1_REFUSAL).into_response();
    }
    let known = state.known.lock().unwrap().clone();
    *state.models.lock().unwrap() = attach.models;
    let directives = state.directives.borrow().clone();
    Json(AttachResponse {
        protocol: attach.protocol,
        epoch: attach.epoch,
        known,
        directives,
    })
    .into_response()
}

async fn report(State(state): State<Arc<Shared>>, headers: HeaderMap, Json(report): Json<PodReport>) -> Response {
    if let Err(refused) = state.meet(&headers).await {
        return refused;
    }
    state.reports.send_modify(|reports| reports.push(report));
    StatusCode::NO_CONTENT.into_response()
}

async fn directives(State(state): State<Arc<Shared>>, headers: HeaderMap) -> Response {
    if let Err(refused) = state.meet(&headers).await {
        return refused;
    }
    let news = state.directives.subscribe();
    let mut silent = state.silent.subscribe();
    let levels = stream::unfold((news, true), |(mut news, first)| async move {
        if !first {
            news.changed().await.ok()?;
        }
        let event = Event::default()
            .event("directives")
            .json_data(news.borrow_and_update().clone())
            .unwrap();
        Some((event, (news, false)))
    });
    let beats = stream::unfold((), |()| async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        Some((Event::default().event("heartbeat").data(""), ()))
    });
    let end = async move {
        let _ = silent.wait_for(|silent| *silent).await;
    };
    let events = stream::select(levels, beats).take_until(end);
    Sse::new(events.map(Ok::<_, Infallible>)).into_response()
}
