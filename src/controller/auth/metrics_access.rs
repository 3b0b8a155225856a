//! Decides who may read /metrics, if the chart value `metrics.authentication` is `Token`: a TokenReview identifies the user,
//! a `SubjectAccessReview` checks the verb `get` on the URL `/metrics`.
//!
//! The answers about valid tokens are kept for a minute, since scrapes are frequent. While the API server is unreachable, who
//! was allowed within the last hour may still read: the metrics are needed most then. Whatever else cannot be verified is
//! refused. ADR 0103 explains these times and limits.

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
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use crate::controller::auth::access::{REJECTED_TOKEN, review_of, token_review, token_user};
use crate::controller::auth::review_limiter::{RejectedTokens, ReviewLimiter, SHARED_ROOM, TokenHash};
use crate::support::hash;

/// Time limit for both reviews together. Shorter than that of a scrape.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// The same for a reader that the API server authorized within [`STALE_ANSWER_LIFETIME`], and that may read without an answer as well.
const RECHECK_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of concurrent authorizations of unknown tokens, and of known ones; further ones wait.
const MAX_QUESTIONS: usize = 4;
/// How long an answer is kept.
const ANSWER_LIFETIME: Duration = Duration::from_mins(1);
/// How long a reader that the API server authorized may read without another answer, while the API server is unreachable.
const STALE_ANSWER_LIFETIME: Duration = Duration::from_hours(1);
/// How long the API server counts as unreachable after a failed review: no reader waits for it again before.
const UNREACHABLE: Duration = Duration::from_secs(10);
/// How long an answer to a review of a known reader is still recorded, though the reader waits no longer.
const LATE_REVIEW_TIMEOUT: Duration = UNREACHABLE;
/// Maximum number of answers that are kept; beyond them, the oldest is dropped.
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

impl KnownAnswer {
    /// Whether the answer holds without another one.
    fn is_fresh(&self) -> bool {
        self.since.elapsed() < ANSWER_LIFETIME
    }

    /// Whether it allows to read while there is no other one.
    fn allows_stale(&self) -> bool {
        self.answer.is_ok() && self.since.elapsed() < STALE_ANSWER_LIFETIME
    }
}

/// Why a review has no answer.
#[derive(Debug)]
enum ReviewFailure {
    /// The API server does not respond, or says that it cannot now.
    Unreachable,
    /// It refuses the review, such as for a missing permission of the controller.
    Refused,
}

impl From<kube::Error> for ReviewFailure {
    fn from(error: kube::Error) -> Self {
        tracing::warn!(%error, "failed to authorize a reader of /metrics");
        if matches!(error, kube::Error::Api(status) if status.code < 500 && status.code != 429) {
            Self::Refused
        } else {
            Self::Unreachable
        }
    }
}

/// Authorizes the readers of /metrics.
struct MetricsAuthorizer {
    tokens: Api<TokenReview>,
    rights: Api<SubjectAccessReview>,
    /// Limits the reviews of unknown tokens.
    review_limiter: ReviewLimiter,
    /// Limits those of known readers, which others must not keep out.
    rechecks: Arc<Semaphore>,
    known: Mutex<HashMap<TokenHash, KnownAnswer>>,
    rejected: RejectedTokens,
    /// Time of the last review that the API server did not answer.
    unanswered: Mutex<Option<Instant>>,
}

/// Applies `authentication` to every request to the router.
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
            review_limiter: ReviewLimiter::new(MAX_QUESTIONS).with_shared_room(SHARED_ROOM),
            rechecks: Arc::new(Semaphore::new(MAX_QUESTIONS)),
            known: Mutex::default(),
            rejected: RejectedTokens::default(),
            unanswered: Mutex::default(),
        }
    }

    async fn check(self: &Arc<Self>, token: &str, address: IpAddr) -> Result<(), ScrapeRefusal> {
        let key = hash::sha256(token);
        let known = lock(&self.known).get(&key).cloned();
        match known {
            Some(known) if known.is_fresh() => known.answer,
            Some(known) if known.allows_stale() => self.recheck(token, key).await,
            _ => self.check_unknown(token, key, address).await,
        }
    }

    /// Asks again about a reader who was allowed before, and allows the read if the API server is unreachable.
    async fn recheck(self: &Arc<Self>, token: &str, key: TokenHash) -> Result<(), ScrapeRefusal> {
        if self.is_unreachable() {
            return Ok(());
        }
        match timeout(RECHECK_TIMEOUT, self.review_known(token, key)).await {
            Ok(Ok(answer)) => return answer,
            Ok(Err(ReviewFailure::Refused)) => return Err(ScrapeRefusal::unverified()),
            Ok(Err(ReviewFailure::Unreachable)) => {}
            Err(_) => timed_out(RECHECK_TIMEOUT),
        }
        *lock(&self.unanswered) = Some(Instant::now());
        // Another review may have been answered meanwhile.
        let known = lock(&self.known).get(&key).cloned();
        match known {
            Some(known) if known.allows_stale() => Ok(()),
            Some(KnownAnswer {
                answer: Err(denial), ..
            }) => Err(denial),
            None if self.rejected.contain(&key) => Err(rejection()),
            _ => Err(ScrapeRefusal::unverified()),
        }
    }

    /// Asks about a reader who was allowed before. The review continues when no reader waits for it any more, and its answer is
    /// remembered.
    async fn review_known(
        self: &Arc<Self>,
        token: &str,
        key: TokenHash,
    ) -> Result<Result<(), ScrapeRefusal>, ReviewFailure> {
        let permit = self.rechecks.clone().acquire_owned().await;
        let (authorizer, token) = (self.clone(), token.to_owned());
        let review = tokio::spawn(async move {
            let _permit = permit;
            let answer = timeout(LATE_REVIEW_TIMEOUT, authorizer.review(&token, key)).await;
            answer.unwrap_or(Err(ReviewFailure::Unreachable))
        });
        review.await.unwrap_or(Err(ReviewFailure::Unreachable))
    }

    fn is_unreachable(&self) -> bool {
        lock(&self.unanswered).is_some_and(|at| at.elapsed() < UNREACHABLE)
    }

    async fn check_unknown(&self, token: &str, key: TokenHash, address: IpAddr) -> Result<(), ScrapeRefusal> {
        if self.rejected.contain(&key) {
            return Err(rejection());
        }
        let review = async {
            let _pass = self.review_limiter.acquire(address).await.ok_or_else(|| {
                ScrapeRefusal::new(
                    StatusCode::SERVICE_UNAVAILABLE,
                    "too many tokens from this address are pending or invalid; retry in a few seconds",
                )
            })?;
            let answer = self.review(token, key).await;
            let answer = answer.unwrap_or_else(|_| Err(ScrapeRefusal::unverified()));
            if answer == Err(rejection()) {
                self.review_limiter.record_failure(address);
            }
            answer
        };
        timeout(ANSWER_TIMEOUT, review).await.unwrap_or_else(|_| {
            timed_out(ANSWER_TIMEOUT);
            Err(ScrapeRefusal::unverified())
        })
    }

    /// Asks the API server, and remembers its answer.
    async fn review(&self, token: &str, key: TokenHash) -> Result<Result<(), ScrapeRefusal>, ReviewFailure> {
        let since = Instant::now();
        let review = self.tokens.create(&PostParams::default(), &token_review(token)).await?;
        let Some(user) = token_user(review.status.unwrap_or_default()) else {
            let mut known = lock(&self.known);
            known.remove(&key);
            self.rejected.add(key, since);
            return Ok(Err(rejection()));
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
        let review = self.rights.create(&PostParams::default(), &question).await?;
        let is_allowed = review
            .status
            .is_some_and(|status| status.allowed && status.denied != Some(true));
        let answer = if is_allowed {
            Ok(())
        } else {
            Err(ScrapeRefusal::new(
                StatusCode::FORBIDDEN,
                format!(
                    "{name} may not get /metrics: bind it to the chart's ClusterRole whose name ends in -metrics-reader"
                ),
            ))
        };
        Ok(self.keep(key, KnownAnswer { since, answer }))
    }

    /// Remembers an answer, unless that to a later review, or a rejection, was faster. Returns the one that holds.
    fn keep(&self, key: TokenHash, answer: KnownAnswer) -> Result<(), ScrapeRefusal> {
        let mut known = lock(&self.known);
        if let Some(later) = known.get(&key).filter(|known| known.since > answer.since) {
            return later.answer.clone();
        }
        if self.rejected.contain(&key) {
            return Err(rejection());
        }
        known.retain(|_, known| known.is_fresh() || known.allows_stale());
        known.remove(&key);
        // Anyone with an account can have valid tokens, so refusals go first.
        let first = |(_, known): &(&TokenHash, &KnownAnswer)| (known.answer.is_ok(), known.since);
        if known.len() >= MAX_KEPT
            && let Some(dropped) = known.iter().min_by_key(first).map(|(key, _)| *key)
        {
            known.remove(&dropped);
        }
        let holds = answer.answer.clone();
        known.insert(key, answer);
        holds
    }
}

fn rejection() -> ScrapeRefusal {
    ScrapeRefusal::new(StatusCode::UNAUTHORIZED, REJECTED_TOKEN)
}

fn timed_out(after: Duration) {
    let seconds = after.as_secs();
    tracing::warn!("authorizing a reader of /metrics timed out after {seconds} s");
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
