//! Tests of who may read /metrics, against reviews of an API server.

use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Body;
use axum::http::{Request, Response as HttpResponse};
use axum::routing::get;
use pretty_assertions::assert_eq;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::*;
use crate::controller::auth::review_limiter::{MAX_WRONG, WINDOW};

/// An API server that knows the tokens `reader-…`, which may get /metrics, and `other-…`, which may not.
#[derive(Default)]
struct FakeReviewServer {
    tokens: AtomicUsize,
    rights: Mutex<Vec<Value>>,
    failure: Mutex<Option<ServerFailure>>,
    revoked: Mutex<Vec<&'static str>>,
}

/// How an API server fails.
#[derive(Clone, Copy, Debug)]
enum ServerFailure {
    /// Nothing accepts connections.
    Down,
    /// Requests get no response.
    Silent,
    /// Requests are answered after this many seconds.
    Slow(u64),
    /// Requests are answered with this status.
    Status(u16),
}

impl FakeReviewServer {
    fn answer(&self, path: &str, review: &mut Value) {
        review["status"] = if path.ends_with("tokenreviews") {
            self.tokens.fetch_add(1, Ordering::SeqCst);
            let token = review["spec"]["token"].as_str().unwrap();
            let revoked = self.revoked.lock().unwrap();
            let known = (token.starts_with("reader") || token.starts_with("other")) && !revoked.contains(&token);
            let user = json!({"username": token.split('-').next(), "groups": ["g"]});
            if known {
                json!({"authenticated": true, "user": user})
            } else {
                json!({"authenticated": false})
            }
        } else {
            let spec = review["spec"].clone();
            let revoked = self.revoked.lock().unwrap().contains(&"the role");
            let allowed = spec["user"] == "reader" && !revoked;
            self.rights.lock().unwrap().push(spec);
            json!({"allowed": allowed})
        };
    }

    fn asked(&self) -> usize {
        self.tokens.load(Ordering::SeqCst)
    }

    fn fail(&self, failure: impl Into<Option<ServerFailure>>) {
        *self.failure.lock().unwrap() = failure.into();
    }

    /// Rejects this token from now on; "the role" refuses everyone the URL.
    fn revoke(&self, token: &'static str) {
        self.revoked.lock().unwrap().push(token);
    }
}

struct AccessHarness {
    reviews: Arc<FakeReviewServer>,
    router: Router,
}

impl AccessHarness {
    fn new(authentication: MetricsAuthentication) -> Self {
        let reviews = Arc::<FakeReviewServer>::default();
        let server = reviews.clone();
        let service = tower::service_fn(move |request: Request<kube::client::Body>| {
            let reviews = server.clone();
            async move {
                let failure = *reviews.failure.lock().unwrap();
                match failure {
                    Some(ServerFailure::Down) => return Err(std::io::Error::other("down")),
                    Some(ServerFailure::Silent) => std::future::pending().await,
                    Some(ServerFailure::Status(code)) => {
                        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code});
                        let response = HttpResponse::builder()
                            .status(code)
                            .body(Body::from(status.to_string()));
                        return Ok(response.unwrap());
                    }
                    Some(ServerFailure::Slow(seconds)) => tokio::time::sleep(Duration::from_secs(seconds)).await,
                    None => {}
                }
                let path = request.uri().path().to_owned();
                let body = request.into_body().collect_bytes().await.unwrap();
                let mut review: Value = serde_json::from_slice(&body).unwrap();
                reviews.answer(&path, &mut review);
                Ok(HttpResponse::new(Body::from(review.to_string())))
            }
        });
        let router = Router::new().route("/metrics", get(|| async { "series\n" }));
        let router = protect(router, authentication, Client::new(service, "default"));
        Self { reviews, router }
    }

    /// Status and text of a scrape with this header `Authorization`.
    async fn scrape(&self, authorization: Option<&str>) -> (u16, String) {
        self.scrape_from(1, authorization).await
    }

    /// A scrape from the address with this last part.
    async fn scrape_from(&self, address: u8, authorization: Option<&str>) -> (u16, String) {
        let mut request = Request::get("/metrics");
        if let Some(value) = authorization {
            request = request.header("authorization", value);
        }
        let request = request.body(Body::empty()).unwrap();
        let address: IpAddr = [10, 0, 0, address].into();
        let router = self.router.clone().layer(Extension(address));
        let response = router.oneshot(request).await.unwrap();
        let status = response.status().as_u16();
        assert_eq!(status == 401, response.headers().contains_key("www-authenticate"));
        let body = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    async fn with_token(&self, token: &str) -> u16 {
        self.with_token_from(1, token).await
    }

    async fn with_token_from(&self, address: u8, token: &str) -> u16 {
        self.scrape_from(address, Some(&format!("Bearer {token}"))).await.0
    }

    /// Presents `count` tokens, each once, that the API server rejects.
    async fn present_forged_tokens(&self, address: u8, count: u32) {
        for number in 0..count {
            let token = format!("forged-{address}-{number}-{}", self.reviews.asked());
            assert_eq!(self.with_token_from(address, &token).await, 401, "{number}");
        }
    }
}

#[tokio::test]
async fn without_authentication_anyone_reads() {
    let harness = AccessHarness::new(MetricsAuthentication::None);
    assert_eq!(harness.scrape(None).await, (200, "series\n".into()));
    assert_eq!(harness.reviews.asked(), 0);
}

#[tokio::test]
async fn a_user_with_access_to_the_url_reads_metrics_and_others_receive_the_reason() {
    let harness = AccessHarness::new(MetricsAuthentication::Token);
    assert_eq!(harness.scrape(Some("bearer reader-1")).await, (200, "series\n".into()));
    let asked = harness.reviews.rights.lock().unwrap().pop().unwrap();
    assert_eq!(
        asked,
        json!({"user": "reader", "groups": ["g"], "nonResourceAttributes": {"path": "/metrics", "verb": "get"}})
    );
    let (status, text) = harness.scrape(Some("Bearer other-1")).await;
    assert_eq!(status, 403);
    assert!(text.starts_with("other may not get /metrics: bind it"), "{text}");
    let (status, text) = harness.scrape(Some("Bearer forged")).await;
    assert_eq!((status, text.trim_end()), (401, REJECTED_TOKEN));
    for none in [None, Some("Basic cmVhZGVy"), Some("Bearer "), Some("reader-1")] {
        let (status, text) = harness.scrape(none).await;
        assert_eq!(status, 401, "{none:?}");
        assert!(text.contains("Authorization: Bearer <token>"), "{text}");
    }
    assert_eq!(harness.reviews.asked(), 3);
}

const MOMENT: Duration = Duration::from_millis(1);

#[tokio::test(start_paused = true)]
async fn answers_about_valid_tokens_are_kept_for_a_minute() {
    let harness = AccessHarness::new(MetricsAuthentication::Token);
    for _ in 0..3 {
        assert_eq!(harness.with_token("reader-1").await, 200);
        assert_eq!(harness.with_token("other-1").await, 403);
    }
    assert_eq!(harness.reviews.asked(), 2);
    tokio::time::advance(ANSWER_LIFETIME.checked_sub(MOMENT).unwrap()).await;
    assert_eq!(harness.with_token("reader-1").await, 200);
    assert_eq!(harness.with_token("other-1").await, 403);
    assert_eq!(harness.reviews.asked(), 2);
    tokio::time::advance(MOMENT).await;
    assert_eq!(harness.with_token("reader-1").await, 200);
    assert_eq!(harness.with_token("other-1").await, 403);
    assert_eq!(harness.reviews.asked(), 4);
}

#[tokio::test(start_paused = true)]
async fn while_the_api_server_is_unreachable_a_reader_it_allowed_within_the_last_hour_reads() {
    for failure in [
        ServerFailure::Down,
        ServerFailure::Silent,
        ServerFailure::Status(503),
        ServerFailure::Status(429),
    ] {
        let harness = AccessHarness::new(MetricsAuthentication::Token);
        assert_eq!(harness.with_token("reader-1").await, 200);
        assert_eq!(harness.with_token("other-1").await, 403);
        let began = Instant::now();
        harness.reviews.fail(failure);
        tokio::time::advance(ANSWER_LIFETIME).await;
        assert_eq!(harness.with_token("reader-1").await, 200, "{failure:?}");
        assert_eq!(
            harness.with_token("other-1").await,
            503,
            "{failure:?}: it was never allowed"
        );
        assert_eq!(
            harness.with_token("reader-2").await,
            503,
            "{failure:?}: it is not known"
        );

        // A silent server delays the answer.
        tokio::time::advance(
            STALE_ANSWER_LIFETIME
                .checked_sub(began.elapsed() + MOMENT + RECHECK_TIMEOUT)
                .unwrap(),
        )
        .await;
        assert_eq!(harness.with_token("reader-1").await, 200, "{failure:?}");
        tokio::time::advance(STALE_ANSWER_LIFETIME.saturating_sub(began.elapsed())).await;
        assert_eq!(
            harness.with_token("reader-1").await,
            503,
            "{failure:?}: an hour has passed"
        );
        harness.reviews.fail(None);
        assert_eq!(harness.with_token("reader-1").await, 200);
    }
}

#[tokio::test(start_paused = true)]
async fn an_hour_of_an_outage_begins_with_the_last_answer_of_the_api_server() {
    let harness = AccessHarness::new(MetricsAuthentication::Token);
    assert_eq!(harness.with_token("reader-1").await, 200);
    harness.reviews.fail(ServerFailure::Down);
    tokio::time::advance(STALE_ANSWER_LIFETIME.checked_sub(MOMENT).unwrap()).await;
    assert_eq!(harness.with_token("reader-1").await, 200);
    tokio::time::advance(UNREACHABLE).await;
    assert_eq!(harness.with_token("reader-1").await, 503);
}

#[tokio::test(start_paused = true)]
async fn a_denial_ends_what_was_allowed_before_also_during_an_outage() {
    for (revoked, status) in [("reader-1", 401), ("the role", 403)] {
        let harness = AccessHarness::new(MetricsAuthentication::Token);
        assert_eq!(harness.with_token("reader-1").await, 200);
        harness.reviews.revoke(revoked);
        tokio::time::advance(ANSWER_LIFETIME).await;
        assert_eq!(harness.with_token("reader-1").await, status);
        harness.reviews.fail(ServerFailure::Down);
        tokio::time::advance(ANSWER_LIFETIME).await;
        assert_eq!(harness.with_token("reader-1").await, 503, "{revoked}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_known_rejection_of_a_token_also_ends_pending_requests() {
    let harness = AccessHarness::new(MetricsAuthentication::Token);
    assert_eq!(harness.with_token("reader-a").await, 200);
    tokio::time::advance(ANSWER_LIFETIME).await;
    harness.reviews.fail(ServerFailure::Silent);
    let mut waiting = Box::pin(harness.with_token("reader-a"));
    assert!(timeout(MOMENT, &mut waiting).await.is_err(), "nothing was answered");
    harness.reviews.fail(None);
    harness.reviews.revoke("reader-a");
    assert_eq!(harness.with_token("reader-a").await, 401);
    assert_eq!(waiting.await, 401);
}

#[tokio::test(start_paused = true)]
async fn a_late_answer_is_cached() {
    for (revoked, expected) in [("reader-a", 401), ("the role", 403), ("another", 200)] {
        let harness = AccessHarness::new(MetricsAuthentication::Token);
        assert_eq!(harness.with_token("reader-a").await, 200);
        tokio::time::advance(ANSWER_LIFETIME).await;
        harness.reviews.revoke(revoked);
        let asked = harness.reviews.asked();
        // For each of the two reviews.
        harness.reviews.fail(ServerFailure::Slow(3));
        assert_eq!(harness.with_token("reader-a").await, 200, "it was answered too early");
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(harness.with_token("reader-a").await, expected, "{revoked}");
        assert_eq!(harness.reviews.asked(), asked + 1, "{revoked}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_refuses_the_review_itself_is_not_unreachable() {
    let harness = AccessHarness::new(MetricsAuthentication::Token);
    assert_eq!(harness.with_token("reader-1").await, 200);
    harness.reviews.fail(ServerFailure::Status(403));
    tokio::time::advance(ANSWER_LIFETIME).await;
    assert_eq!(harness.with_token("reader-1").await, 503);
}

#[tokio::test(start_paused = true)]
async fn during_an_outage_the_api_server_is_retried_every_few_seconds() {
    let harness = AccessHarness::new(MetricsAuthentication::Token);
    assert_eq!(harness.with_token("reader-1").await, 200);
    harness.reviews.fail(ServerFailure::Silent);
    tokio::time::advance(ANSWER_LIFETIME).await;
    let began = Instant::now();
    assert_eq!(harness.with_token("reader-1").await, 200);
    assert_eq!(began.elapsed(), RECHECK_TIMEOUT);
    assert_eq!(harness.with_token("reader-1").await, 200);
    assert_eq!(began.elapsed(), RECHECK_TIMEOUT, "the second scrape does not wait");

    harness.reviews.fail(None);
    tokio::time::advance(UNREACHABLE.checked_sub(MOMENT).unwrap()).await;
    assert_eq!(harness.with_token("reader-1").await, 200);
    assert_eq!(harness.reviews.asked(), 1);
    tokio::time::advance(MOMENT).await;
    assert_eq!(harness.with_token("reader-1").await, 200);
    assert_eq!(harness.reviews.asked(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_bounded_number_of_answers_is_cached_and_the_oldest_is_evicted_first() {
    let harness = AccessHarness::new(MetricsAuthentication::Token);
    for number in 0..MAX_KEPT {
        assert_eq!(harness.with_token(&format!("reader-{number}")).await, 200);
        tokio::time::advance(Duration::from_millis(1)).await;
    }
    assert_eq!(harness.with_token("reader-0").await, 200);
    assert_eq!(harness.reviews.asked(), MAX_KEPT);
    assert_eq!(harness.with_token("reader-one-more").await, 200);
    assert_eq!(harness.with_token("reader-1").await, 200);
    assert_eq!(harness.reviews.asked(), MAX_KEPT + 1);
    assert_eq!(harness.with_token("reader-0").await, 200);
    assert_eq!(harness.reviews.asked(), MAX_KEPT + 2);
}

#[tokio::test(start_paused = true)]
async fn refusals_never_replace_what_is_known_of_readers() {
    let harness = AccessHarness::new(MetricsAuthentication::Token);
    assert_eq!(harness.with_token("reader-1").await, 200);
    for number in 0..2 * MAX_KEPT {
        tokio::time::advance(MOMENT).await;
        assert_eq!(harness.with_token(&format!("other-{number}")).await, 403);
    }
    let asked = harness.reviews.asked();
    assert_eq!(harness.with_token("reader-1").await, 200);
    assert_eq!(harness.reviews.asked(), asked);
}

#[tokio::test(start_paused = true)]
async fn a_rejected_token_is_reviewed_again_after_ten_seconds() {
    let harness = AccessHarness::new(MetricsAuthentication::Token);
    for _ in 0..100 {
        assert_eq!(harness.with_token("late").await, 401);
    }
    assert_eq!(harness.reviews.asked(), 1);
    tokio::time::advance(WINDOW.checked_sub(MOMENT).unwrap()).await;
    assert_eq!(harness.with_token("late").await, 401);
    assert_eq!(harness.reviews.asked(), 1);
    tokio::time::advance(MOMENT).await;
    assert_eq!(harness.with_token("late").await, 401);
    assert_eq!(harness.reviews.asked(), 2);
}

#[tokio::test(start_paused = true)]
async fn forged_tokens_of_a_neighbor_do_not_keep_a_known_reader_out() {
    let harness = AccessHarness::new(MetricsAuthentication::Token);
    assert_eq!(harness.with_token("reader-1").await, 200);
    tokio::time::advance(ANSWER_LIFETIME).await;
    harness.present_forged_tokens(1, SHARED_ROOM).await;
    assert_eq!(harness.with_token("forged").await, 503, "the limit is reached");
    let asked = harness.reviews.asked();
    assert_eq!(harness.with_token("reader-1").await, 200);
    assert_eq!(harness.reviews.asked(), asked + 1, "it was verified again");
}

#[tokio::test(start_paused = true)]
async fn forged_tokens_of_a_neighbor_keep_a_new_token_out_only_beyond_what_all_share() {
    const { assert!(SHARED_ROOM > MAX_WRONG) }
    let harness = AccessHarness::new(MetricsAuthentication::Token);
    harness.present_forged_tokens(1, SHARED_ROOM - 1).await;
    assert_eq!(harness.with_token("reader-1").await, 200);
    harness.present_forged_tokens(1, 1).await;
    assert_eq!(harness.with_token("reader-2").await, 503);
    assert_eq!(harness.with_token_from(2, "reader-2").await, 200, "another address");
    tokio::time::advance(WINDOW).await;
    assert_eq!(harness.with_token("reader-3").await, 200);
}

#[tokio::test(start_paused = true)]
async fn tokens_that_wait_for_a_silent_api_server_do_not_keep_a_known_reader_out() {
    let harness = AccessHarness::new(MetricsAuthentication::Token);
    assert_eq!(harness.with_token("reader-1").await, 200);
    harness.reviews.fail(ServerFailure::Silent);
    tokio::time::advance(ANSWER_LIFETIME).await;
    let tokens: Vec<_> = (0..100).map(|number| format!("forged-{number}")).collect();
    let strangers = tokens.iter().map(|token| harness.with_token(token));
    let (strangers, reader) = tokio::join!(futures::future::join_all(strangers), harness.with_token("reader-1"));
    assert!(strangers.iter().all(|status| *status == 503), "{strangers:?}");
    assert_eq!(reader, 200);
}
