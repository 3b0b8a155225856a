//! Tests of what is asked of the API server about a user, and how often.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use axum::http::{Request, Response};
use jiff::Timestamp;
use k8s_openapi::api::authentication::v1::UserInfo;
use pretty_assertions::assert_eq;
use serde_json::{Value, json};
use tokio::time::{advance, sleep};

use super::super::session::PageSessionTable;
use super::*;

/// An API server that allows what is in namespace `a`, and counts.
#[derive(Default)]
struct FakeReviewServer {
    asked: Mutex<Vec<Value>>,
    is_down: AtomicBool,
    open: AtomicUsize,
    most_open: AtomicUsize,
}

impl FakeReviewServer {
    fn asked(&self) -> usize {
        self.asked.lock().unwrap().len()
    }

    async fn answer(&self, request: Request<kube::client::Body>) -> Result<Response<axum::body::Body>, std::io::Error> {
        let body = request.into_body().collect_bytes().await.unwrap();
        let mut review: Value = serde_json::from_slice(&body).unwrap();
        let asked = review["spec"]["resourceAttributes"].clone();
        review["status"] = json!({ "allowed": asked["namespace"] == "a" });
        self.asked.lock().unwrap().push(asked);
        if self.is_down.load(Ordering::SeqCst) {
            return Err(std::io::Error::other("down"));
        }
        let open = self.open.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_open.fetch_max(open, Ordering::SeqCst);
        sleep(Duration::from_millis(5)).await;
        self.open.fetch_sub(1, Ordering::SeqCst);
        Ok(Response::new(axum::body::Body::from(review.to_string())))
    }
}

struct RightsHarness {
    reviews: Arc<FakeReviewServer>,
    access: ClientAuthorizer,
    sessions: PageSessionTable,
}

impl RightsHarness {
    fn new() -> Self {
        let reviews = Arc::<FakeReviewServer>::default();
        let server = reviews.clone();
        let service = tower::service_fn(move |request: Request<kube::client::Body>| {
            let reviews = server.clone();
            async move { reviews.answer(request).await }
        });
        Self {
            reviews,
            access: ClientAuthorizer::new(kube::Client::new(service, "default")),
            sessions: PageSessionTable::default(),
        }
    }

    fn session(&self, name: &str) -> Arc<PageSession> {
        let user = UserInfo {
            username: Some(name.into()),
            ..UserInfo::default()
        };
        let id = self
            .sessions
            .begin((user, "opaque"), &[], Timestamp::UNIX_EPOCH)
            .unwrap();
        self.sessions.get(&id).unwrap()
    }

    async fn look(&self, session: &PageSession, filter: Option<&str>) -> Result<Arc<ViewRights>, ClientRefusal> {
        rights(
            &self.access,
            session,
            filter.map(ToOwned::to_owned).as_ref(),
            &agents(filter),
        )
        .await
    }
}

/// An Agent in each of six namespaces, or in one of them.
fn agents(filter: Option<&str>) -> ViewedObjects {
    let all = ["a", "b", "c", "d", "e", "f"].into_iter();
    let asked = all.filter(|namespace| filter.is_none_or(|filter| filter == *namespace));
    let names = asked.map(|namespace| NamespacedName::new(namespace, "x")).collect();
    BTreeMap::from([(ViewedResource::Agents, names)])
}

fn sees(rights: &ViewRights, namespace: &str) -> bool {
    rights.include(ViewedResource::Agents, &NamespacedName::new(namespace, "x"))
}

#[tokio::test(start_paused = true)]
async fn a_session_that_cycles_through_namespaces_causes_one_review_in_ten_seconds() {
    let harness = RightsHarness::new();
    let session = harness.session("ann");
    let first = harness.look(&session, Some("b")).await.unwrap();
    assert!(!first.is_pending && !sees(&first, "b"));
    let asked = harness.reviews.asked();
    assert!(asked > 0);
    for _ in 0..10 {
        for namespace in ["a", "b", "c", "d", "e", "f"] {
            let rights = harness.look(&session, Some(namespace)).await.unwrap();
            assert_eq!((rights.is_pending, sees(&rights, namespace)), (namespace != "b", false));
        }
    }
    assert_eq!(harness.reviews.asked(), asked);
    advance(PAUSE).await;
    let rights = harness.look(&session, Some("a")).await.unwrap();
    assert!(!rights.is_pending && sees(&rights, "a"));
    assert!(harness.reviews.asked() > asked);
}

#[tokio::test(start_paused = true)]
async fn before_its_access_review_a_namespace_is_shown_as_far_as_cluster_access_is_known() {
    let harness = RightsHarness::new();
    let session = harness.session("ann");
    let all = harness.look(&session, None).await.unwrap();
    assert!(!all.is_pending && sees(&all, "a") && !sees(&all, "b"));
    let asked = harness.reviews.asked();
    let one = harness.look(&session, Some("a")).await.unwrap();
    assert!(one.is_pending && sees(&one, "a") && !sees(&one, "b"));
    assert_eq!(harness.reviews.asked(), asked);
}

#[tokio::test(start_paused = true)]
async fn a_failure_is_the_answer_for_a_few_seconds() {
    let harness = RightsHarness::new();
    let session = harness.session("ann");
    harness.reviews.is_down.store(true, Ordering::SeqCst);
    assert!(harness.look(&session, None).await.is_err());
    let asked = harness.reviews.asked();
    harness.reviews.is_down.store(false, Ordering::SeqCst);
    for filter in [None, Some("a")] {
        assert!(harness.look(&session, filter).await.is_err());
    }
    assert_eq!(harness.reviews.asked(), asked);
    advance(FAILED).await;
    assert!(sees(&harness.look(&session, None).await.unwrap(), "a"));
}

#[tokio::test(start_paused = true)]
async fn a_disconnected_browser_has_used_its_access_review() {
    let harness = RightsHarness::new();
    let session = harness.session("ann");
    let asked = timeout(Duration::from_millis(2), harness.look(&session, None)).await;
    assert!(asked.is_err(), "it was answered");
    let asked = harness.reviews.asked();
    assert!(harness.look(&session, None).await.unwrap().is_pending);
    assert_eq!(harness.reviews.asked(), asked);
}

#[tokio::test(start_paused = true)]
async fn access_reviews_of_all_users_share_one_concurrency_limit() {
    let harness = RightsHarness::new();
    let sessions: Vec<_> = (0..5).map(|number| harness.session(&format!("user{number}"))).collect();
    let looks = sessions.iter().map(|session| harness.look(session, None));
    for rights in futures::future::join_all(looks).await {
        assert!(sees(&rights.unwrap(), "a"));
    }
    assert_eq!(harness.reviews.most_open.load(Ordering::SeqCst), AT_ONCE);
}
