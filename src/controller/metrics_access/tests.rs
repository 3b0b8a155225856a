//! Tests of who may read /metrics, against reviews of an API server.

use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Body;
use axum::http::{Request, Response as HttpResponse};
use axum::routing::get;
use pretty_assertions::assert_eq;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::super::review_limiter::MAX_WRONG;
use super::*;

/// An API server that knows the tokens `reader-…`, which may get /metrics, and `other-…`, which may not.
#[derive(Default)]
struct Reviews {
    tokens: AtomicUsize,
    rights: Mutex<Vec<Value>>,
    down: std::sync::atomic::AtomicBool,
}

impl Reviews {
    fn answer(&self, path: &str, review: &mut Value) {
        review["status"] = if path.ends_with("tokenreviews") {
            self.tokens.fetch_add(1, Ordering::SeqCst);
            let token = review["spec"]["token"].as_str().unwrap();
            let known = token.starts_with("reader") || token.starts_with("other");
            let user = json!({"username": token.split('-').next(), "groups": ["g"]});
            if known {
                json!({"authenticated": true, "user": user})
            } else {
                json!({"authenticated": false})
            }
        } else {
            let spec = review["spec"].clone();
            let allowed = spec["user"] == "reader";
            self.rights.lock().unwrap().push(spec);
            json!({"allowed": allowed})
        };
    }

    fn asked(&self) -> usize {
        self.tokens.load(Ordering::SeqCst)
    }
}

struct World {
    reviews: Arc<Reviews>,
    router: Router,
}

impl World {
    fn new(authentication: MetricsAuthentication) -> Self {
        let reviews = Arc::<Reviews>::default();
        let server = reviews.clone();
        let service = tower::service_fn(move |request: Request<kube::client::Body>| {
            let reviews = server.clone();
            async move {
                if reviews.down.load(Ordering::SeqCst) {
                    return Err(std::io::Error::other("down"));
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
        let address: IpAddr = [10, 0, 0, 1].into();
        Self {
            reviews,
            router: router.layer(Extension(address)),
        }
    }

    /// Status and text of a scrape with this header `Authorization`.
    async fn scrape(&self, authorization: Option<&str>) -> (u16, String) {
        let mut request = Request::get("/metrics");
        if let Some(value) = authorization {
            request = request.header("authorization", value);
        }
        let request = request.body(Body::empty()).unwrap();
        let response = self.router.clone().oneshot(request).await.unwrap();
        let status = response.status().as_u16();
        assert_eq!(status == 401, response.headers().contains_key("www-authenticate"));
        let body = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    async fn with_token(&self, token: &str) -> u16 {
        self.scrape(Some(&format!("Bearer {token}"))).await.0
    }
}

#[tokio::test]
async fn without_authentication_anyone_reads() {
    let world = World::new(MetricsAuthentication::None);
    assert_eq!(world.scrape(None).await, (200, "series\n".into()));
    assert_eq!(world.reviews.asked(), 0);
}

#[tokio::test]
async fn a_user_who_may_get_the_url_reads_and_others_are_told_why_they_may_not() {
    let world = World::new(MetricsAuthentication::Token);
    assert_eq!(world.scrape(Some("bearer reader-1")).await, (200, "series\n".into()));
    let asked = world.reviews.rights.lock().unwrap().pop().unwrap();
    assert_eq!(
        asked,
        json!({"user": "reader", "groups": ["g"], "nonResourceAttributes": {"path": "/metrics", "verb": "get"}})
    );
    let (status, text) = world.scrape(Some("Bearer other-1")).await;
    assert_eq!(status, 403);
    assert!(text.starts_with("other may not get /metrics: bind it"), "{text}");
    let (status, text) = world.scrape(Some("Bearer forged")).await;
    assert_eq!((status, text.trim_end()), (401, REJECTED_TOKEN));
    for none in [None, Some("Basic cmVhZGVy"), Some("Bearer "), Some("reader-1")] {
        let (status, text) = world.scrape(none).await;
        assert_eq!(status, 401, "{none:?}");
        assert!(text.contains("Authorization: Bearer <token>"), "{text}");
    }
    assert_eq!(world.reviews.asked(), 3);
}

#[tokio::test(start_paused = true)]
async fn answers_about_valid_tokens_are_kept_for_a_minute() {
    let world = World::new(MetricsAuthentication::Token);
    for _ in 0..3 {
        assert_eq!(world.with_token("reader-1").await, 200);
        assert_eq!(world.with_token("other-1").await, 403);
    }
    assert_eq!(world.reviews.asked(), 2);
    world.reviews.down.store(true, Ordering::SeqCst);
    tokio::time::advance(KEPT.checked_sub(Duration::from_millis(1)).unwrap()).await;
    assert_eq!(world.with_token("reader-1").await, 200);
    tokio::time::advance(Duration::from_millis(1)).await;
    assert_eq!(
        world.with_token("reader-1").await,
        503,
        "what cannot be verified is refused"
    );
    world.reviews.down.store(false, Ordering::SeqCst);
    assert_eq!(world.with_token("reader-1").await, 200);
}

#[tokio::test(start_paused = true)]
async fn so_many_answers_are_kept_and_the_oldest_goes_first() {
    let world = World::new(MetricsAuthentication::Token);
    for number in 0..MAX_KEPT {
        assert_eq!(world.with_token(&format!("reader-{number}")).await, 200);
        tokio::time::advance(Duration::from_millis(1)).await;
    }
    assert_eq!(world.with_token("reader-0").await, 200);
    assert_eq!(world.reviews.asked(), MAX_KEPT);
    assert_eq!(world.with_token("reader-one-more").await, 200);
    assert_eq!(world.with_token("reader-1").await, 200);
    assert_eq!(world.reviews.asked(), MAX_KEPT + 1);
    assert_eq!(world.with_token("reader-0").await, 200);
    assert_eq!(world.reviews.asked(), MAX_KEPT + 2);
}

#[tokio::test(start_paused = true)]
async fn invalid_tokens_are_not_kept_and_after_some_the_address_waits() {
    let world = World::new(MetricsAuthentication::Token);
    assert_eq!(world.with_token("reader-1").await, 200);
    let before = world.reviews.asked();
    for _ in 0..MAX_WRONG {
        assert_eq!(world.with_token("forged").await, 401);
    }
    assert_eq!(world.with_token("reader-2").await, 503);
    assert_eq!(world.reviews.asked() - before, usize::try_from(MAX_WRONG).unwrap());
    assert_eq!(world.with_token("reader-1").await, 200, "its answer is known");
}
