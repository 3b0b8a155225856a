//! Decides who may read /metrics, if the chart value `metrics.authentication` is `Token`: a TokenReview identifies the user,
//! a `SubjectAccessReview` checks the verb `get` on the URL `/metrics`.
//!
//! The answers about valid tokens are kept for a minute, since scrapes are frequent. Whatever cannot be verified is
//! refused.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Router};
use clap::ValueEnum;
use k8s_openapi::api::authentication::v1::TokenReview;
use k8s_openapi::api::authorization::v1::{NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::time::{Instant, timeout};

use super::access::{REJECTED_TOKEN, review_of, token_review, token_user};
use super::review_limiter::ReviewLimiter;
use crate::support::hash;

/// Time limit for both reviews together. Shorter than that of a scrape.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Most concurrent authorizations; further ones wait.
const MAX_QUESTIONS: usize = 4;
/// How long an answer is kept.
const KEPT: Duration = Duration::from_mins(1);
/// Most answers that are kept; beyond them, the oldest is dropped.
const MAX_KEPT: usize = 256;

/// What a reader of /metrics must present.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "PascalCase")]
pub enum MetricsAuthentication {
    /// Nothing.
    #[default]
    None,
    /// A token of the Kubernetes API whose user may get the URL `/metrics`.
    Token,
}

/// Why a reader is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ScrapeRefusal {
    status: StatusCode,
    message: String,
}

impl ScrapeRefusal {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
        }
    }

    fn unverified() -> Self {
        Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "the token cannot be verified now; retry",
        )
    }
}

impl IntoResponse for ScrapeRefusal {
    fn into_response(self) -> Response {
        let body = format!("{}\n", self.message);
        if self.status == StatusCode::UNAUTHORIZED {
            return (self.status, [(header::WWW_AUTHENTICATE, "Bearer")], body).into_response();
        }
        (self.status, body).into_response()
    }
}

/// The answer about a valid token.
#[derive(Clone)]
struct KnownAnswer {
    since: Instant,
    answer: Result<(), ScrapeRefusal>,
}

/// Authorizes the readers of /metrics.
struct MetricsAuthorizer {
    tokens: Api<TokenReview>,
    rights: Api<SubjectAccessReview>,
    gate: ReviewLimiter,
    /// By the hash of the token, so that no token is kept.
    known: Mutex<HashMap<[u8; hash::BYTES], KnownAnswer>>,
}

/// Requires what `authentication` says of every request to the router.
pub fn protect(router: Router, authentication: MetricsAuthentication, client: Client) -> Router {
    match authentication {
        MetricsAuthentication::None => router,
        MetricsAuthentication::Token => {
            let authorizer = Arc::new(MetricsAuthorizer::new(client));
            router.layer(middleware::from_fn_with_state(authorizer, require_token))
        }
    }
}

async fn require_token(
    State(authorizer): State<Arc<MetricsAuthorizer>>,
    Extension(address): Extension<IpAddr>,
    request: Request,
    next: Next,
) -> Response {
    let answer = match bearer(request.headers()) {
        Some(token) => authorizer.check(token, address).await,
        None => Err(ScrapeRefusal::new(
            StatusCode::UNAUTHORIZED,
            "a token of the Kubernetes API is required: Authorization: Bearer <token>",
        )),
    };
    match answer {
        Ok(()) => next.run(request).await,
        Err(refusal) => refusal.into_response(),
    }
}

/// The token of a request.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

impl MetricsAuthorizer {
    fn new(client: Client) -> Self {
        Self {
            tokens: Api::all(client.clone()),
            rights: Api::all(client),
            gate: ReviewLimiter::new(MAX_QUESTIONS),
            known: Mutex::default(),
        }
    }

    async fn check(&self, token: &str, address: IpAddr) -> Result<(), ScrapeRefusal> {
        let key = hash::sha256(token);
        let known = self.known().get(&key).cloned();
        if let Some(known) = known.filter(|known| known.since.elapsed() < KEPT) {
            return known.answer;
        }
        timeout(ANSWER_TIMEOUT, self.ask(token, key, address))
            .await
            .unwrap_or_else(|_| {
                let seconds = ANSWER_TIMEOUT.as_secs();
                tracing::warn!("authorizing a reader of /metrics timed out after {seconds} s");
                Err(ScrapeRefusal::unverified())
            })
    }

    async fn ask(&self, token: &str, key: [u8; hash::BYTES], address: IpAddr) -> Result<(), ScrapeRefusal> {
        let _pass = self.gate.acquire(address).await.ok_or_else(|| {
            ScrapeRefusal::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "too many tokens from this address are pending or invalid; retry in a few seconds",
            )
        })?;
        let since = Instant::now();
        let failed = |error: kube::Error| {
            tracing::warn!(%error, "failed to authorize a reader of /metrics");
            ScrapeRefusal::unverified()
        };
        let review = self.tokens.create(&PostParams::default(), &token_review(token)).await;
        let Some(user) = token_user(review.map_err(failed)?.status.unwrap_or_default()) else {
            self.gate.record_failure(address);
            return Err(ScrapeRefusal::new(StatusCode::UNAUTHORIZED, REJECTED_TOKEN));
        };
        let name = user.username.clone().unwrap_or_default();
        let question = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                non_resource_attributes: Some(NonResourceAttributes {
                    path: Some("/metrics".into()),
                    verb: Some("get".into()),
                }),
                ..review_of(user)
            },
            ..SubjectAccessReview::default()
        };
        let review = self.rights.create(&PostParams::default(), &question).await;
        let allowed = review
            .map_err(failed)?
            .status
            .is_some_and(|status| status.allowed && status.denied != Some(true));
        let answer = if allowed {
            Ok(())
        } else {
            Err(ScrapeRefusal::new(
                StatusCode::FORBIDDEN,
                format!("{name} may not get /metrics: bind it to the chart's ClusterRole <release>-metrics-reader"),
            ))
        };
        self.keep(
            key,
            KnownAnswer {
                since,
                answer: answer.clone(),
            },
        );
        answer
    }

    fn keep(&self, key: [u8; hash::BYTES], answer: KnownAnswer) {
        let mut known = self.known();
        known.retain(|_, known| known.since.elapsed() < KEPT);
        if known.len() >= MAX_KEPT
            && let Some(oldest) = known.iter().min_by_key(|(_, known)| known.since).map(|(key, _)| *key)
        {
            known.remove(&oldest);
        }
        known.insert(key, answer);
    }

    fn known(&self) -> MutexGuard<'_, HashMap<[u8; hash::BYTES], KnownAnswer>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
