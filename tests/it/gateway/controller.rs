//! A controller's end of the link on loopback, with a CA of its own.

use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use agentloop::link::messages::{Attach, Attached, Directives, Known, Refusal, RefusalCode, Report};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use axum_server::tls_rustls::RustlsConfig;
use futures::{StreamExt, stream};
use tokio::sync::watch;

#[derive(Clone)]
pub struct Controller {
    pub address: SocketAddr,
    pub ca: String,
    state: Arc<Shared>,
}

struct Shared {
    known: Mutex<Known>,
    /// What it does with every message; `None` takes it, 0 as status says nothing at all.
    refuses: watch::Sender<Option<RefusalCode>>,
    silent: watch::Sender<bool>,
    directives: watch::Sender<Directives>,
    reports: watch::Sender<Vec<Report>>,
    tokens: watch::Sender<Vec<String>>,
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
            refuses: watch::Sender::default(),
            silent: watch::Sender::default(),
            directives: watch::Sender::default(),
            reports: watch::Sender::default(),
            tokens: watch::Sender::default(),
        });
        let router = Router::new()
            .route("/v1/attach", post(attach))
            .route("/v1/report", post(report))
            .route("/v1/directives", get(directives))
            .with_state(Arc::clone(&state));
        let server = axum_server::from_tcp_rustls(listener, tls).unwrap();
        tokio::spawn(server.serve(router.into_make_service()));
        Self { address, ca, state }
    }

    pub fn knows(&self, known: Known) {
        *self.state.known.lock().unwrap() = known;
    }

    pub fn refuse(&self, code: Option<RefusalCode>) {
        self.state.refuses.send_replace(code);
    }

    /// Takes no message and sends none.
    pub fn silence(&self, silent: bool) {
        self.state.silent.send_replace(silent);
    }

    pub fn direct(&self, directives: Directives) {
        self.state.directives.send_replace(directives);
    }

    pub fn reports(&self) -> Vec<Report> {
        self.state.reports.borrow().clone()
    }

    pub fn tokens(&self) -> Vec<String> {
        self.state.tokens.borrow().clone()
    }

    /// Waits for a report like this; gives it.
    pub async fn until(&self, what: &str, wanted: impl Fn(&Report) -> bool) -> Report {
        let mut reports = self.state.reports.subscribe();
        let found = reports.wait_for(|all| all.last().is_some_and(&wanted));
        match tokio::time::timeout(Duration::from_secs(10), found).await {
            Ok(all) => all.unwrap().last().unwrap().clone(),
            Err(late) => panic!("{late}, no report with {what}: {:?}", self.reports().last()),
        }
    }

    pub fn write_ca(&self, path: &Path) {
        std::fs::write(path, &self.ca).unwrap();
    }
}

fn certificates() -> (String, String, String) {
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
                    Json(Refusal {
                        code,
                        message: "the test says so".into(),
                    }),
                )
                    .into_response())
            }
        }
    }
}

async fn attach(State(state): State<Arc<Shared>>, headers: HeaderMap, Json(attach): Json<Attach>) -> Response {
    if let Err(refused) = state.meet(&headers).await {
        return refused;
    }
    let known = state.known.lock().unwrap().clone();
    let directives = state.directives.borrow().clone();
    Json(Attached {
        epoch: attach.epoch,
        known,
        directives,
    })
    .into_response()
}

async fn report(State(state): State<Arc<Shared>>, headers: HeaderMap, Json(report): Json<Report>) -> Response {
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
