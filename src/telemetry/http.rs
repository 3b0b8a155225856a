//! The small HTTP server: `/healthz`, `/readyz`, `/metrics`.
//!
//! Plain HTTP on one port. Knows nothing of what readiness means: whoever knows says so through [`Readiness`].

use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::metrics::Metrics;

/// Media type of the Prometheus text format.
const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Whether the process can do its work, and if not, what it waits for.
#[derive(Clone)]
pub struct Readiness(Arc<Mutex<Option<&'static str>>>);

impl Readiness {
    /// Not ready: waiting for `reason`.
    #[must_use]
    pub fn waiting(reason: &'static str) -> Self {
        Self(Arc::new(Mutex::new(Some(reason))))
    }

    /// Ready when `None`, else waiting for that.
    pub fn set(&self, waiting_for: Option<&'static str>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = waiting_for;
    }

    /// What the process waits for; `None` when it is ready.
    #[must_use]
    pub fn waiting_for(&self) -> Option<&'static str> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Probes and metrics.
pub fn router(metrics: Arc<Metrics>, readiness: Readiness) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready).with_state(readiness))
        .route("/metrics", get(scrape).with_state(metrics))
}

/// Serves [`router`] until `stop`.
pub async fn serve(listener: TcpListener, router: Router, stop: CancellationToken) -> std::io::Result<()> {
    axum::serve(listener, router)
        .with_graceful_shutdown(stop.cancelled_owned())
        .await
}

async fn ready(State(readiness): State<Readiness>) -> Response {
    match readiness.waiting_for() {
        None => "ok\n".into_response(),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("waiting for {reason}\n")).into_response(),
    }
}

async fn scrape(State(metrics): State<Arc<Metrics>>) -> Response {
    match metrics.text() {
        Ok(text) => ([(header::CONTENT_TYPE, TEXT_FORMAT)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
