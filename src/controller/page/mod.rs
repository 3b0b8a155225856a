//! The page of the controller: [`crate::page`] for users with a token of the Kubernetes API, over HTTPS.
//!
//! Off by default, and served by the leader only, since only it has what the page shows. A TokenReview signs a user in; what
//! the page shows is what `SubjectAccessReview`s allow that user. There is no route that changes anything but the session.

mod content;
mod login;
mod rights;
mod routes;
mod session;
mod streams;
mod turns;

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use axum_server::tls_rustls::RustlsConfig;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::agent::AgentsView;
use super::auth::access::ClientAuthorizer;
use super::budget::BudgetLedger;
use super::pod_sessions::PodSessions;
use super::runtime::WallClock;
use super::sensor::SensorRegistry;
use crate::telemetry::http;

pub use routes::LIMITS;
use routes::PageServer;
pub use session::{IDLE, MAX_SESSION, MAX_SESSIONS, MAX_SESSIONS_OF_ONE};
pub use streams::{MAX_READERS, MAX_READERS_OF_ONE};
pub use turns::{MAX_FOLLOWED, MAX_WITH_TURNS};

/// How the page is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageSettings {
    /// Where it listens.
    pub address: SocketAddr,
    /// Names and addresses that its certificate has beside those of the link.
    pub hosts: Vec<String>,
}

/// Where the page gets what it shows.
pub struct PageSources {
    /// Identifies users, and authorizes them.
    pub access: ClientAuthorizer,
    /// The Agents, once the caches are filled. Until then, every request is refused.
    pub agents: Arc<OnceLock<AgentsView>>,
    /// The sessions of the pods: their reports and events.
    pub loops: Arc<PodSessions>,
    pub budgets: Arc<BudgetLedger>,
    pub sensors: Arc<SensorRegistry>,
    pub clock: WallClock,
}

/// Serves the page until `stop`.
pub async fn serve(listener: TcpListener, tls: RustlsConfig, sources: PageSources, stop: CancellationToken) {
    let server = PageServer::new(sources, stop.clone());
    let serving = http::serve_tls(listener, routes::router(server.clone()), LIMITS, tls);
    tokio::select! {
        () = stop.cancelled() => {}
        never = serving => match never {},
        never = server.turns.end_unread() => match never {},
    }
}
