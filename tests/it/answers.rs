//! Tests of answers to gates over the link: who may answer, what is refused, and what is written on the Agent.
//!
//! The API server in memory keeps the Agents; reviews of tokens and of permissions are answered by a function, and tokens
//! say in clear whose they are.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use agentloop::controller::auth::access::ClientAuthorizer;
use agentloop::controller::auth::identity::PodAuthenticator;
use agentloop::controller::delivery_relay::DeliveryRelay;
use agentloop::controller::gates::answers::GateAnswerRecorder;
use agentloop::controller::link_service::ControllerLink;
use agentloop::controller::pod_sessions::PodSessions;
use agentloop::controller::runtime::EventSink;
use agentloop::controller::tls::ca::CertificateAuthority;
use agentloop::controller::tls::certificates::server_config;
use agentloop::link::server::{LinkLimits, serve};
use agentloop::telemetry::metrics::Metrics;
use axum::http::{Request, Response};
use axum_server::tls_rustls::RustlsConfig;
use futures::future::join_all;
use jiff::Timestamp;
use pretty_assertions::assert_eq;
use rstest::rstest;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use crate::support::agents::{agent, idle_ledger, view};
use crate::support::api_server::ApiServer;

const AGENTS: &str = "agentloop.dev/agents";
const ANSWERS: &str = "agentloop.dev/answers";
const NOW: &str = "2026-11-22T14:00:00Z";

struct AnswerHarness {
    server: ApiServer,
    client: reqwest::Client,
    address: SocketAddr,
    /// What was asked of permissions.
    asked: Arc<Mutex<Vec<Value>>>,
    /// How often another client still writes the Agent after it was read.
    interferences: Arc<AtomicUsize>,
    stop: CancellationToken,
}

impl Drop for AnswerHarness {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// `person NAME` is a user of this cluster; `pod NAMESPACE ACCOUNT` a service account's token for the API server.
fn review(token: &str) -> Value {
    match token.split(' ').collect::<Vec<_>>()[..] {
        ["person", name] => json!({"authenticated": true, "user": {
            "username": name, "uid": format!("uid-of-{name}"), "groups": ["people"], "extra": {"scopes": ["all"]},
        }}),
        ["pod", namespace, account] => json!({"authenticated": true, "user": {
            "username": format!("system:serviceaccount:{namespace}:{account}"),
        }}),
        _ => json!({"authenticated": false}),
    }
}

/// Whether the user has this verb. Pods' accounts have it too: it must not help them.
fn allowed(question: &Value) -> bool {
    let user = question["user"].as_str().unwrap();
    let verb = question["resourceAttributes"]["verb"].as_str().unwrap();
    match user {
        "editor" => ["get", "patch", "update"].contains(&verb),
        "visitor" => false,
        _ => verb == "approve",
    }
}

/// A client of the API server that has these doubles for reviews.
fn api(server: &ApiServer, asked: Arc<Mutex<Vec<Value>>>, interferences: Arc<AtomicUsize>) -> kube::Client {
    let server = server.clone();
    let answer = tower::service_fn(move |request: Request<kube::client::Body>| {
        let (server, asked, interferences) = (server.clone(), asked.clone(), interferences.clone());
        async move {
            let path = request.uri().path().to_owned();
            let reviews = path.ends_with("reviews");
            if !reviews {
                let reads = request.method() == axum::http::Method::GET;
                let answer = server.router().oneshot(request.map(axum::body::Body::new)).await;
                let left = interferences.load(Ordering::SeqCst);
                if reads && left > 0 {
                    interferences.store(left - 1, Ordering::SeqCst);
                    annotate(&server, &json!({"note": left.to_string()}));
                }
                return answer;
            }
            let body = request.into_body().collect_bytes().await.unwrap();
            let mut answer: Value = serde_json::from_slice(&body).unwrap();
            answer["status"] = if path.ends_with("tokenreviews") {
                assert!(answer["spec"]["audiences"].is_null(), "the audience of the API server");
                review(answer["spec"]["token"].as_str().unwrap())
            } else {
                asked.lock().unwrap().push(answer["spec"].clone());
                json!({"allowed": allowed(&answer["spec"])})
            };
            Ok::<_, Infallible>(Response::new(axum::body::Body::from(answer.to_string())))
        }
    });
    kube::Client::new(answer, "default")
}

/// Another client sets annotations of Agent `x`.
fn annotate(server: &ApiServer, annotations: &Value) {
    let object = json!({"metadata": {"namespace": "a", "name": "x", "annotations": annotations}});
    server.put(AGENTS, object);
}

fn gate(id: &str, hash: &str) -> Value {
    json!({
        "id": id, "kind": "ToolCallNeedsApproval", "tool": "bank__pay", "argumentsHash": hash,
        "openedAt": "2026-11-22T13:05:00Z", "expiresAt": "2026-11-22T14:05:00Z",
    })
}

impl AnswerHarness {
    /// A leader with Agent `x`, which has these gates.
    async fn start(gates: &[Value]) -> Self {
        Self::with(gates, true).await
    }

    async fn with(gates: &[Value], leads: bool) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let authority = CertificateAuthority::make(Timestamp::now()).unwrap();
        let leaf = authority.sign(&["127.0.0.1".into()], Timestamp::now()).unwrap();
        let tls = RustlsConfig::from_config(server_config(&leaf).unwrap());
        let root = reqwest::Certificate::from_pem(authority.certificate.as_bytes()).unwrap();
        let client = reqwest::Client::builder().tls_certs_only([root]).build().unwrap();
        let server = ApiServer::new(Arc::new(Timestamp::now));
        let (asked, interferences) = (Arc::default(), Arc::default());
        let api = api(&server, Arc::clone(&asked), Arc::clone(&interferences));
        let object = agent("a", "x", &json!({"gates": gates}));
        server.put(AGENTS, object.clone());
        let agents = OnceLock::new();
        if leads {
            assert!(agents.set(view(&[object])).is_ok());
        }
        let (loops, changed) = PodSessions::new();
        drop(changed);
        let loops = Arc::new(loops);
        let now: Timestamp = NOW.parse().unwrap();
        let link = ControllerLink {
            identities: PodAuthenticator::new(api.clone()),
            access: ClientAuthorizer::new(api.clone()),
            answers: GateAnswerRecorder::new(api.clone()),
            loops: loops.clone(),
            relay: Arc::new(DeliveryRelay::new(Duration::from_secs(1)).0),
            tasks: Arc::new(agentloop::controller::task_relay::TaskRelay::new(Duration::from_secs(
                5,
            ))),
            agents: Arc::new(agents),
            budgets: idle_ledger(api, &loops),
            history: None,
            metrics: Arc::new(Metrics::new().unwrap()),
            events: EventSink::new().0,
            clock: Arc::new(move || now),
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        tokio::spawn(serve(
            listener,
            tls,
            Arc::new(link),
            LinkLimits::default(),
            stop.clone(),
        ));
        Self {
            server,
            client,
            address,
            asked,
            interferences,
            stop,
        }
    }

    async fn send(&self, token: Option<&str>, path: &str, body: String) -> (u16, Value) {
        let mut request = self
            .client
            .post(format!("https://{}/v1/namespaces/{path}", self.address));
        if let Some(token) = token {
            request = request.bearer_auth(token);
        }
        let response = request.body(body).send().await.unwrap();
        (response.status().as_u16(), response.json().await.unwrap())
    }

    /// Answers a gate of Agent `x`.
    async fn answers(&self, token: &str, gate: &str, answer: &str, hash: &str) -> (u16, Value) {
        let body = json!({"answer": answer, "argumentsHash": hash});
        self.send(Some(token), &format!("a/agents/x/gates/{gate}"), body.to_string())
            .await
    }

    fn annotations(&self) -> Value {
        self.server.get(AGENTS, "a", "x").unwrap()["metadata"]["annotations"].clone()
    }

    /// The answers on the Agent.
    fn recorded(&self) -> Value {
        let value = self.annotations()[ANSWERS].as_str().map(str::to_owned);
        value.map_or(Value::Null, |json| serde_json::from_str(&json).unwrap())
    }

    fn annotate(&self, annotations: &Value) {
        annotate(&self.server, annotations);
    }
}

#[tokio::test]
async fn an_answer_is_confirmed_once_it_is_on_the_agent_with_the_user_of_the_token() {
    let harness = AnswerHarness::start(&[gate("e1-t1c1r1", "aa"), gate("e1-t1c1r2", "bb")]).await;
    let (status, answered) = harness.answers("person ann", "e1-t1c1r1", "Approve", "aa").await;
    assert_eq!(
        (status, answered),
        (202, json!({"gate": "e1-t1c1r1", "answer": "Approve", "by": "ann"}))
    );
    let (status, answered) = harness.answers("person bob", "e1-t1c1r2", "Deny", "bb").await;
    assert_eq!(
        (status, answered),
        (202, json!({"gate": "e1-t1c1r2", "answer": "Deny", "by": "bob"}))
    );
    assert_eq!(
        harness.recorded(),
        json!({
            "e1-t1c1r1": {"answer": "Approve", "argumentsHash": "aa", "by": "ann", "at": NOW},
            "e1-t1c1r2": {"answer": "Deny", "argumentsHash": "bb", "by": "bob", "at": NOW},
        })
    );
}

#[tokio::test]
async fn the_access_review_names_the_exact_agent_and_all_attributes_of_the_user() {
    let harness = AnswerHarness::start(&[gate("g", "aa")]).await;
    harness.answers("person ann", "g", "Approve", "aa").await;
    let want = json!({
        "user": "ann", "groups": ["people"], "uid": "uid-of-ann", "extra": {"scopes": ["all"]},
        "resourceAttributes": {"verb": "approve", "group": "agentloop.dev", "resource": "agents",
            "namespace": "a", "name": "x"},
    });
    assert_eq!(*harness.asked.lock().unwrap(), [want]);
}

#[rstest]
#[case::no_token(None, "a/agents/x/gates/g", 401, "Unauthenticated", "the token is missing")]
#[case::no_token_of_this_cluster(Some("nonsense"), "a/agents/x/gates/g", 401, "Unauthenticated", "rejected the token")]
#[case::an_editor(
    Some("person editor"),
    "a/agents/x/gates/g",
    403,
    "Forbidden",
    "editor may not answer gates of Agent a/x: this needs the verb approve on agents.agentloop.dev"
)]
#[case::an_agents_own_pod(
    Some("pod a agentloop-agent"),
    "a/agents/x/gates/g",
    403,
    "Forbidden",
    "the account of pods of Agents or Sensors"
)]
#[case::another_agents_pod(
    Some("pod b agentloop-agent"),
    "a/agents/x/gates/g",
    403,
    "Forbidden",
    "may not answer gates"
)]
#[case::a_sensors_pod(
    Some("pod a agentloop-sensor"),
    "a/agents/x/gates/g",
    403,
    "Forbidden",
    "may not answer gates"
)]
#[case::without_the_verb_for_what_is_not_there(
    Some("person visitor"),
    "a/agents/none/gates/g",
    403,
    "Forbidden",
    "the verb approve"
)]
#[case::no_agent(
    Some("person ann"),
    "a/agents/none/gates/g",
    404,
    "NotFound",
    "Agent a/none does not exist"
)]
#[case::a_name_that_is_a_path(
    Some("person ann"),
    "a%2Fagents%2Fx%3F/agents/x/gates/g",
    404,
    "NotFound",
    "does not exist"
)]
#[case::no_gate(
    Some("person ann"),
    "a/agents/x/gates/h",
    404,
    "NotFound",
    "gate h is not open; open gates: g, e1-t1c1r2"
)]
#[tokio::test]
async fn an_unauthorized_or_malformed_answer_is_refused_with_a_message(
    #[case] token: Option<&str>,
    #[case] path: &str,
    #[case] status: u16,
    #[case] code: &str,
    #[case] words: &str,
) {
    let harness = AnswerHarness::start(&[gate("g", "aa"), gate("e1-t1c1r2", "bb")]).await;
    let body = json!({"answer": "Approve", "argumentsHash": "aa"}).to_string();
    let (got, refusal) = harness.send(token, path, body).await;
    assert_eq!((got, refusal["code"].as_str()), (status, Some(code)), "{refusal}");
    assert!(refusal["message"].as_str().unwrap().contains(words), "{refusal}");
    assert_eq!(harness.annotations(), Value::Null);
}

#[tokio::test]
async fn a_pods_account_that_may_approve_other_things_is_another_account() {
    let harness = AnswerHarness::start(&[gate("g", "aa")]).await;
    let (status, answered) = harness.answers("pod tools slack-bridge", "g", "Deny", "aa").await;
    assert_eq!(
        (status, answered["by"].as_str()),
        (202, Some("system:serviceaccount:tools:slack-bridge"))
    );
}

#[rstest]
#[case::no_json("approve", "it is not valid JSON")]
#[case::another_word(r#"{"answer": "Yes", "argumentsHash": "aa"}"#, "the wrong type")]
#[case::no_hash(r#"{"answer": "Approve"}"#, "a field is missing")]
#[case::a_misspelt_field(r#"{"answer": "Approve", "argumentsHash": "aa", "hash": "aa"}"#, "the wrong type")]
#[case::too_long(&" ".repeat(4097), "larger than 4096 bytes")]
#[tokio::test]
async fn a_body_that_is_no_answer_is_refused_with_the_form_of_one(#[case] body: &str, #[case] words: &str) {
    let harness = AnswerHarness::start(&[gate("g", "aa")]).await;
    let (status, refusal) = harness
        .send(Some("person ann"), "a/agents/x/gates/g", body.to_owned())
        .await;
    assert_eq!(
        (status, refusal["code"].as_str()),
        (400, Some("Malformed")),
        "{refusal}"
    );
    let message = refusal["message"].as_str().unwrap();
    assert!(
        message.contains(words) && message.contains("argumentsHash"),
        "{message}"
    );
    assert_eq!(harness.annotations(), Value::Null);
}

#[tokio::test]
async fn an_answer_about_other_arguments_is_refused() {
    let harness = AnswerHarness::start(&[gate("g", "aa")]).await;
    for answer in ["Approve", "Deny"] {
        let (status, refusal) = harness.answers("person ann", "g", answer, "bb").await;
        assert_eq!((status, refusal["code"].as_str()), (409, Some("Conflict")), "{refusal}");
        let message = refusal["message"].as_str().unwrap();
        assert!(message.contains("other arguments: their hash is aa"), "{message}");
    }
    assert_eq!(harness.annotations(), Value::Null);
}

#[tokio::test]
async fn an_answer_without_an_open_gate_is_refused_with_that_reason() {
    let harness = AnswerHarness::start(&[]).await;
    let (status, refusal) = harness.answers("person ann", "g", "Approve", "aa").await;
    assert_eq!((status, refusal["code"].as_str()), (404, Some("NotFound")));
    assert_eq!(refusal["message"], "gate g is not open, and no other one is");
}

#[tokio::test]
async fn an_equal_answer_is_recorded_once_and_keeps_the_first_name() {
    let harness = AnswerHarness::start(&[gate("g", "aa")]).await;
    for user in ["person ann", "person ann", "person bob"] {
        let (status, answered) = harness.answers(user, "g", "Approve", "aa").await;
        assert_eq!((status, answered["by"].as_str()), (202, Some("ann")));
    }
    let writes = harness.server.take_writes();
    assert_eq!(writes, ["patch agentloop.dev/agents"]);
}

#[tokio::test]
async fn a_denial_takes_precedence_however_it_was_given() {
    let harness = AnswerHarness::start(&[gate("g", "aa"), gate("h", "bb")]).await;
    assert_eq!(harness.answers("person ann", "g", "Approve", "aa").await.0, 202);
    assert_eq!(harness.answers("person bob", "g", "Deny", "aa").await.0, 202);
    assert_eq!(harness.recorded()["g"]["by"], "bob");
    let (status, refusal) = harness.answers("person ann", "g", "Approve", "aa").await;
    assert_eq!(status, 409);
    let message = refusal["message"].as_str().unwrap();
    assert!(message.contains("was denied by bob already"), "{message}");
    // The same with kubectl.
    harness.annotate(&json!({"agentloop.dev/deny": "h"}));
    assert_eq!(harness.answers("person ann", "h", "Approve", "bb").await.0, 409);
    let (status, answered) = harness.answers("person ann", "h", "Deny", "bb").await;
    assert_eq!((status, answered), (202, json!({"gate": "h", "answer": "Deny"})));
    assert_eq!(harness.recorded()["h"], Value::Null);
}

#[tokio::test]
async fn an_answer_leaves_annotations_of_others_alone() {
    let harness = AnswerHarness::start(&[gate("g", "aa"), gate("h", "bb")]).await;
    let others = json!({"agentloop.dev/approve": "h:bb", "agentloop.dev/approved-by": "carl", "note": "x"});
    harness.annotate(&others);
    assert_eq!(harness.answers("person ann", "g", "Approve", "aa").await.0, 202);
    let mut annotations = harness.annotations();
    annotations.as_object_mut().unwrap().remove(ANSWERS);
    assert_eq!(annotations, others);
    let (_, answered) = harness.answers("person ann", "h", "Approve", "bb").await;
    assert_eq!(answered["by"], "carl", "it is answered");
}

#[tokio::test]
async fn answers_to_twenty_gates_at_once_are_all_recorded() {
    let gates: Vec<_> = (0..20).map(|number| gate(&format!("g{number}"), "aa")).collect();
    let harness = AnswerHarness::start(&gates).await;
    let users: Vec<_> = (0..20)
        .map(|number| (format!("person p{number}"), format!("g{number}")))
        .collect();
    let sent = users
        .iter()
        .map(|(user, gate)| harness.answers(user, gate, "Approve", "aa"));
    for (status, answered) in join_all(sent).await {
        assert_eq!(status, 202, "{answered}");
    }
    let recorded = harness.recorded();
    for number in 0..20 {
        assert_eq!(recorded[format!("g{number}")]["by"], format!("p{number}"));
    }
}

#[tokio::test]
async fn an_answer_survives_nine_conflicting_writes_and_after_a_tenth_the_client_must_retry() {
    let harness = AnswerHarness::start(&[gate("g", "aa")]).await;
    harness.interferences.store(10, Ordering::SeqCst);
    let (status, refusal) = harness.answers("person ann", "g", "Approve", "aa").await;
    assert_eq!((status, refusal["code"].as_str()), (503, Some("Unavailable")));
    assert_eq!(harness.recorded(), Value::Null);
    harness.interferences.store(9, Ordering::SeqCst);
    let (status, answered) = harness.answers("person ann", "g", "Approve", "aa").await;
    assert_eq!(status, 202, "{answered}");
    assert_eq!(harness.recorded()["g"]["by"], "ann");
    assert_eq!(harness.annotations()["note"], "1", "and the other writes remain");
    assert_eq!(harness.server.take_writes().len(), 20);
}

#[tokio::test]
async fn nothing_is_confirmed_while_the_api_server_is_unavailable_or_another_replica_leads() {
    let harness = AnswerHarness::start(&[gate("g", "aa")]).await;
    harness.server.set_closed(AGENTS, true);
    let (status, refusal) = harness.answers("person ann", "g", "Approve", "aa").await;
    assert_eq!((status, refusal["code"].as_str()), (503, Some("Unavailable")));
    harness.server.set_closed(AGENTS, false);
    assert_eq!(harness.annotations(), Value::Null);
    assert_eq!(harness.answers("person ann", "g", "Approve", "aa").await.0, 202);
    let follower = AnswerHarness::with(&[gate("g", "aa")], false).await;
    let (status, refusal) = follower.answers("person ann", "g", "Approve", "aa").await;
    assert_eq!((status, refusal["code"].as_str()), (503, Some("Unavailable")));
    assert_eq!(*follower.asked.lock().unwrap(), Vec::<Value>::new());
}
