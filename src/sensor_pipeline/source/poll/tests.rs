//! Tests of pages and queries on loopback with the real client.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::any;
use rstest::rstest;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::*;
use crate::source::tls::TlsFiles;
use crate::source::{SourceArrival, SourceCondition};
use agentloop_egress::AddressPolicy;

type Answers = Arc<Mutex<VecDeque<Response>>>;
type Seen = Arc<Mutex<Vec<(String, HeaderMap)>>>;

/// A server that gives these answers in turn, and reports the requests.
struct Server {
    url: String,
    seen: Seen,
    task: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn server(answers: Vec<Response>) -> Server {
    async fn answer(State((answers, seen)): State<(Answers, Seen)>, request: Request) -> Response {
        let asked = format!("{} {}", request.method(), request.uri());
        seen.lock().unwrap().push((asked, request.headers().clone()));
        let answer = answers.lock().unwrap().pop_front();
        match answer {
            Some(answer) => answer,
            None => std::future::pending().await,
        }
    }
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (answers, seen) = (Answers::new(Mutex::new(answers.into())), Seen::default());
    let app = Router::new()
        .fallback(any(answer))
        .with_state((answers, Arc::clone(&seen)));
    let task = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    Server { url, seen, task }
}

fn poller(url: &str, allowed: &str, question: PollQuery) -> SourcePoller {
    // Fails if another test installed a provider first, which is fine.
    let _ = rustls::crypto::ring::default_provider().install_default();
    SourcePoller {
        place: SourceTarget {
            url: url.parse().unwrap(),
            headers_dir: None,
            tls: TlsFiles::default(),
            policy: Arc::new(AddressPolicy::new(vec![allowed.parse().unwrap()], vec![])),
            max_bytes: 100,
        },
        question,
        interval: Duration::from_millis(20),
        timeout: Duration::from_secs(5),
    }
}

fn page() -> PollQuery {
    PollQuery::Page {
        method: HttpMethod::Get,
        body: None,
    }
}

const LOOPBACK: &str = "127.0.0.0/8";

/// Runs a poller until `take`, which decides the outcome of each arrival, has seen enough; returns the arrivals.
async fn messages(
    poller: SourcePoller,
    cursor: SourceCursor,
    answers: &[ArrivalOutcome],
) -> (Vec<SourceMessage>, SourceCondition) {
    let (feed, mut arrivals) = SourceFeed::new();
    let condition = feed.condition();
    let task = tokio::spawn(poller.run(cursor, feed));
    let mut changes = condition.clone();
    let mut messages = Vec::new();
    for answer in answers {
        let arrival = tokio::time::timeout(Duration::from_secs(10), arrivals.recv());
        let SourceArrival {
            message: new,
            answer: to,
            ..
        } = arrival.await.unwrap().unwrap();
        messages.push(new);
        changes.mark_unchanged();
        to.send(*answer).unwrap();
    }
    // Give the last outcome time to take effect.
    let _ = tokio::time::timeout(Duration::from_secs(1), changes.changed()).await;
    task.abort();
    let condition = condition.borrow().clone();
    (messages, condition)
}

async fn failure(poller: SourcePoller) -> SourceCondition {
    let (feed, _arrivals) = SourceFeed::new();
    let mut condition = feed.condition();
    let task = tokio::spawn(poller.run(SourceCursor::default(), feed));
    let failed = condition.wait_for(|condition| condition.failure.is_some());
    let failed = tokio::time::timeout(Duration::from_secs(10), failed)
        .await
        .unwrap()
        .unwrap()
        .clone();
    task.abort();
    failed
}

#[tokio::test]
async fn a_page_is_requested_with_the_validator_that_is_on_disk() {
    let page_of = |tag: &str, text: &'static str| ([("etag", tag.to_owned())], text).into_response();
    let server = server(vec![
        page_of("\"1\"", "one"),
        StatusCode::NOT_MODIFIED.into_response(),
        page_of("\"2\"", "two"),
        page_of("\"3\"", "three"),
        page_of("\"4\"", "four"),
    ])
    .await;
    let start = SourceCursor {
        etag: Some("\"0\"".into()),
        ..SourceCursor::default()
    };
    let answers = [
        ArrivalOutcome::OnDisk,
        ArrivalOutcome::Dropped,
        ArrivalOutcome::Known,
        ArrivalOutcome::OnDisk,
    ];
    let (messages, _) = messages(poller(&server.url, LOOPBACK, page()), start, &answers).await;
    let texts: Vec<_> = messages
        .iter()
        .map(|message| String::from_utf8_lossy(&message.payload).into_owned())
        .collect();
    assert_eq!(texts, ["one", "two", "three", "four"]);
    assert_eq!(messages[0].cursor.etag.as_deref(), Some("\"1\""));
    let seen = server.seen.lock().unwrap();
    let asked: Vec<_> = seen
        .iter()
        .map(|(_, headers)| headers["if-none-match"].to_str().unwrap())
        .collect();
    // A dropped page is requested again.
    assert_eq!(asked[..5], ["\"0\"", "\"1\"", "\"1\"", "\"1\"", "\"3\""]);
}

#[tokio::test]
async fn an_endless_page_is_read_to_one_byte_beyond_the_limit() {
    let endless = futures::stream::repeat_with(|| Ok::<_, std::io::Error>("0123456789"));
    let exact = "x".repeat(100);
    let server = server(vec![
        exact.clone().into_response(),
        axum::body::Body::from_stream(endless).into_response(),
    ])
    .await;
    let answers = [ArrivalOutcome::OnDisk, ArrivalOutcome::Dropped];
    let (messages, condition) =
        messages(poller(&server.url, LOOPBACK, page()), SourceCursor::default(), &answers).await;
    assert_eq!(messages[0].payload, exact.as_bytes());
    assert_eq!(messages[1].payload.len(), 101);
    assert!(condition.connected);
}

#[rstest]
#[case::gone(StatusCode::NOT_FOUND, "the server answers with status 404; check url")]
#[case::no_right(StatusCode::FORBIDDEN, "the server answers with status 403; check headersSecretRef")]
#[case::broken(StatusCode::BAD_GATEWAY, "the server answers with status 502")]
#[tokio::test]
async fn a_status_is_a_failure_without_the_text_of_the_answer(#[case] status: StatusCode, #[case] expected: &str) {
    let server = server(vec![(status, "SECRET").into_response()]).await;
    let condition = failure(poller(&server.url, LOOPBACK, page())).await;
    assert_eq!(condition.failure.as_deref(), Some(expected));
    assert_eq!((condition.failures, condition.consecutive_failures), (1, 1));
    assert!(condition.next_attempt_at.is_some());
}

#[tokio::test]
async fn a_streak_ends_with_the_first_success_and_its_failures_stay_counted() {
    let bad = || StatusCode::BAD_GATEWAY.into_response();
    let server = server(vec![bad(), bad(), "fine".into_response()]).await;
    let (_, condition) = messages(
        poller(&server.url, LOOPBACK, page()),
        SourceCursor::default(),
        &[ArrivalOutcome::OnDisk],
    )
    .await;
    assert!(condition.connected);
    assert_eq!((condition.failures, condition.consecutive_failures), (2, 0));
    assert_eq!((condition.failure, condition.next_attempt_at), (None, None));
}

#[tokio::test]
async fn an_answer_that_does_not_come_is_a_failure_after_the_timeout() {
    let server = server(vec![]).await;
    let poller = SourcePoller {
        timeout: Duration::from_millis(50),
        ..poller(&server.url, LOOPBACK, page())
    };
    let message = failure(poller).await.failure.unwrap();
    assert_eq!(message, "no complete response within 0 s (timeoutSeconds)");
}

#[tokio::test]
async fn a_page_that_cannot_be_stored_is_a_failure_and_is_requested_again() {
    let server = server(vec!["a".into_response(), "a".into_response()]).await;
    let answers = [ArrivalOutcome::NotNow, ArrivalOutcome::OnDisk];
    let (messages, condition) =
        messages(poller(&server.url, LOOPBACK, page()), SourceCursor::default(), &answers).await;
    assert_eq!(messages[0], messages[1]);
    assert_eq!(condition.failures, 1);
}

#[tokio::test]
async fn a_forbidden_address_is_not_requested() {
    let server = server(vec!["a".into_response()]).await;
    let message = failure(poller(&server.url, "10.0.0.0/8", page()))
        .await
        .failure
        .unwrap();
    assert!(
        message.starts_with("Sensors may not connect to 127.0.0.1:"),
        "{message}"
    );
    assert!(server.seen.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_host_name_that_resolves_to_a_forbidden_address_is_not_requested() {
    let server = server(vec!["a".into_response()]).await;
    let url = server.url.replace("127.0.0.1", "localhost");
    let message = failure(poller(&url, "10.0.0.0/8", page())).await.failure.unwrap();
    assert!(
        message.contains("Sensors may not connect to any address of the host"),
        "{message}"
    );
    assert!(server.seen.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_redirect_to_a_forbidden_address_is_not_followed() {
    for target in [
        "http://127.0.0.2:9/",
        "http://[::1]:9/",
        "http://169.254.169.254/latest",
    ] {
        let server = server(vec![Redirect::temporary(target).into_response()]).await;
        let message = failure(poller(&server.url, "127.0.0.1/32", page()))
            .await
            .failure
            .unwrap();
        assert!(message.contains("Sensors may not connect to "), "{message}");
    }
}

#[tokio::test]
async fn redirects_are_followed_five_times_and_not_six() {
    let redirects = |count: usize| {
        let mut answers: Vec<Response> = (0..count)
            .map(|_| Redirect::temporary("/next").into_response())
            .collect();
        answers.push("there".into_response());
        answers
    };
    let server_of_five = server(redirects(5)).await;
    let answers = [ArrivalOutcome::OnDisk];
    let (messages, _) = messages(
        poller(&server_of_five.url, LOOPBACK, page()),
        SourceCursor::default(),
        &answers,
    )
    .await;
    assert_eq!(messages[0].payload, b"there");
    let server_of_six = server(redirects(6)).await;
    let message = failure(poller(&server_of_six.url, LOOPBACK, page()))
        .await
        .failure
        .unwrap();
    assert_eq!(message, "no answer: more than 5 redirects in a row");
}

#[tokio::test]
async fn a_redirect_to_tls_names_the_url_that_is_to_be_mended() {
    let server = server(vec![Redirect::temporary("https://127.0.0.1:9/").into_response()]).await;
    let failed = failure(poller(&server.url, LOOPBACK, page())).await;
    let expected = "no answer: the server redirects to https: set url to that address";
    assert_eq!(failed.failure.as_deref(), Some(expected));
}

#[tokio::test]
async fn headers_of_a_secret_are_sent_to_its_host_only() {
    let other = server(vec!["stolen".into_response()]).await;
    let server = server(vec![
        Redirect::temporary("/here").into_response(),
        "fine".into_response(),
        Redirect::temporary(&other.url).into_response(),
    ])
    .await;
    let secret = tempfile::tempdir().unwrap();
    std::fs::write(secret.path().join("X-Api-Key"), "k3y\n").unwrap();
    std::fs::create_dir(secret.path().join("..data")).unwrap();
    let mut poller = poller(&server.url, LOOPBACK, page());
    poller.place.headers_dir = Some(secret.path().into());
    let (_, condition) = messages(poller, SourceCursor::default(), &[ArrivalOutcome::OnDisk]).await;
    let seen = server.seen.lock().unwrap();
    assert!(seen.iter().all(|(_, headers)| headers["x-api-key"] == "k3y"));
    assert!(other.seen.lock().unwrap().is_empty());
    drop((seen, condition));
}

#[rstest]
#[case::no_name("a b", "x")]
#[case::the_connections_own("Host", "x")]
#[case::two_lines("X-A", "x\ny")]
#[tokio::test]
async fn a_key_that_is_no_header_is_named(#[case] key: &str, #[case] value: &str) {
    let server = server(vec!["a".into_response()]).await;
    let secret = tempfile::tempdir().unwrap();
    std::fs::write(secret.path().join(key), value).unwrap();
    let mut poller = poller(&server.url, LOOPBACK, page());
    poller.place.headers_dir = Some(secret.path().into());
    let message = failure(poller).await.failure.unwrap();
    assert_eq!(
        message,
        format!("the Secret of headersSecretRef has a key '{key}' that cannot be sent as a header")
    );
}

#[tokio::test]
async fn a_page_can_be_requested_with_a_body() {
    let server = server(vec!["a".into_response()]).await;
    let question = PollQuery::Page {
        method: HttpMethod::Post,
        body: Some("{}".into()),
    };
    messages(
        poller(&server.url, LOOPBACK, question),
        SourceCursor::default(),
        &[ArrivalOutcome::OnDisk],
    )
    .await;
    let seen = server.seen.lock().unwrap();
    assert_eq!(seen[0].0, "POST /");
    assert_eq!(seen[0].1["content-type"], "application/json");
}

fn prometheus() -> PollQuery {
    PollQuery::Prometheus {
        query: "sum(up) > 1".into(),
    }
}

#[tokio::test]
async fn a_query_returns_numbers_without_times() {
    let vector = r#"{"status":"success","data":{"resultType":"vector","result":[
        {"metric":{"job":"a"},"value":[1700000000.1,"1.5"]},{"metric":{},"value":[1700000000.1,"NaN"]}]}}"#;
    let server = server(vec![vector.into_response()]).await;
    let mut poller = poller(&format!("{}/api/v1/query", server.url), LOOPBACK, prometheus());
    poller.place.max_bytes = 1000;
    let (messages, _) = messages(poller, SourceCursor::default(), &[ArrivalOutcome::OnDisk]).await;
    let expected =
        r#"{"resultType":"vector","result":[{"metric":{"job":"a"},"value":1.5},{"metric":{},"value":"NaN"}]}"#;
    assert_eq!(String::from_utf8_lossy(&messages[0].payload), expected);
    assert_eq!(
        server.seen.lock().unwrap()[0].0,
        "GET /api/v1/query?query=sum%28up%29+%3E+1"
    );
}

#[test]
fn every_kind_of_result_loses_its_times() {
    assert_eq!(without_times(json!([1_700_000_000.5, "3"])), json!(3.0));
    assert_eq!(without_times(json!([1_700_000_000, "text"])), json!("text"));
    let matrix = json!([{"metric": {"a": "b"}, "values": [[1, "1"], [2, "+Inf"]]}]);
    assert_eq!(
        without_times(matrix),
        json!([{"metric": {"a": "b"}, "values": [1.0, "+Inf"]}])
    );
    assert_eq!(without_times(json!([])), json!([]));
}

#[rstest]
#[case::a_wrong_query(
    (StatusCode::BAD_REQUEST, r#"{"status":"error","errorType":"bad_data","error":"TEXT"}"#).into_response(),
    "Prometheus rejected the query (bad_data); check spec.source.poll.prometheus.query"
)]
#[case::another_server("<html>".into_response(), "the response is not from the Prometheus API; check url")]
#[case::away(StatusCode::SERVICE_UNAVAILABLE.into_response(), "the server answers with status 503")]
#[tokio::test]
async fn a_failed_query_names_what_to_check(#[case] answer: Response, #[case] expected: &str) {
    let server = server(vec![answer]).await;
    let condition = failure(poller(&server.url, LOOPBACK, prometheus())).await;
    assert_eq!(condition.failure.as_deref(), Some(expected));
}
