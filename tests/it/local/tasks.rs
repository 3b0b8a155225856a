//! Mode Task in a run without a cluster: tasks come in as webhooks, and responses go out to a server of the test.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use axum::{Json, Router};
use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use super::examples::{example, sender};
use super::process::{LocalHarness, WAIT_TIMEOUT, agent, script};
use super::sources;
use crate::gateway::provider::{Provider, ScriptedResponse};
use crate::support::clusters::has;
use crate::support::ports::free_port;

const KEY: &str = "canary-3c9a-key";

/// What a receiver was sent: the idempotency key, the header of the Secret and the body, also of what it refused.
#[derive(Default)]
struct Received {
    all: Vec<(String, Option<String>, Value)>,
    /// Keys that were accepted, in order.
    accepted: Vec<String>,
    /// Answers this many requests with 503, after it has read them.
    unavailable: u32,
}

type Shared = Arc<Mutex<Received>>;

async fn receive(State(received): State<Shared>, headers: HeaderMap, Json(body): Json<Value>) -> StatusCode {
    let mut received = received.lock().unwrap();
    let header = |name: &str| headers.get(name).map(|value| value.to_str().unwrap().to_owned());
    let key = header("idempotency-key").expect("a key");
    received.all.push((key.clone(), header("authorization"), body));
    if received.unavailable > 0 {
        received.unavailable -= 1;
        return StatusCode::SERVICE_UNAVAILABLE;
    }
    if !received.accepted.contains(&key) {
        received.accepted.push(key);
    }
    StatusCode::NO_CONTENT
}

/// A server that receives responses, and its port.
async fn receiver(unavailable: u32) -> (Shared, u16) {
    let received = Shared::default();
    received.lock().unwrap().unavailable = unavailable;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let router = Router::new()
        .route("/responses", post(receive))
        .with_state(received.clone());
    tokio::spawn(async move { axum::serve(listener, router).await });
    (received, port)
}

async fn until_accepted(received: &Shared, count: usize) {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while received.lock().unwrap().accepted.len() < count {
        let so_far = received.lock().unwrap().accepted.len();
        assert!(Instant::now() < deadline, "{so_far} of {count} responses");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn the_example_of_a_triage_answers_each_webhook_once_in_its_form() {
    if !has("openssl") || !has("curl") {
        return;
    }
    let (received, to) = receiver(1).await;
    let (mut harness, port) = (LocalHarness::new(), free_port().to_string());
    let text = example(&harness, "triage.yaml", &[(":8905", format!(":{to}"))]);
    let mut run = harness.run(&["--events", "--webhook-port", &port]);
    let script = sender(&text, &port);
    for expected in ["202", "200"] {
        super::examples::send(&run, &script, expected).await;
    }
    until_accepted(&received, 1).await;
    run.until("triage", "asleep", |line| line["state"] == "Sleeping").await;
    run.interrupt().await;
    assert_eq!(run.cause().await, "Interrupted");
    let received = received.lock().unwrap();
    let [(first, None, refused), (second, None, body)] = &received.all[..] else {
        panic!("{:?}", received.all);
    };
    assert_eq!((first, refused), (second, body), "the same until it is accepted");
    assert_eq!(
        body["result"],
        json!({"severity": "high", "summary": "The shop is down."})
    );
    assert_eq!(
        (&body["channel"], &body["outcome"], &body["iterations"]),
        (&json!("responses"), &json!("Completed"), &json!(2)),
        "the text was no response of the required form"
    );
    assert_eq!(body["agent"]["name"], "triage");
    assert!(first.ends_with(body["id"].as_str().unwrap()));
}

/// An Agent in mode Task whose tasks are signed webhooks, with the script `turns`.
fn answering(harness: &LocalHarness, turns: &Value, task: &Value) {
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "keys" },
        "stringData": { "hook": KEY, "Authorization": format!("Bearer {KEY}") },
    });
    let sensor = json!({
        "apiVersion": "agentloop.dev/v1alpha1", "kind": "Sensor", "metadata": { "name": "tickets" },
        "spec": {
            "agentNames": ["a"],
            "source": { "webhook": { "scheme": "GitHub", "secretKeyRef": { "name": "keys", "key": "hook" } } },
            "task": { "prompt": "'Ticket ' + string(payload.n)" },
            "limits": { "perMinute": 60_000 },
        },
    });
    let spec = agent("a", &json!({ "mode": "Task", "task": task }));
    harness.write("all.yaml", &[script("a", turns), secret, spec, sensor]);
}

#[tokio::test]
async fn each_of_60_tasks_of_three_clients_is_answered_once_although_all_parts_are_killed() {
    if !has("openssl") {
        return;
    }
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (received, to) = receiver(0).await;
    let mut harness = LocalHarness::new();
    let responses = json!({ "http": { "url": format!("http://127.0.0.1:{to}/responses") } });
    answering(
        &harness,
        &json!([{ "text": "done", "delayMilliseconds": 20 }]),
        &json!({ "responses": responses }),
    );
    let port = free_port().to_string();
    let url = format!("http://127.0.0.1:{port}/");
    let clients = ["a", "b", "c"].map(|client| {
        let url = url.clone();
        tokio::spawn(async move {
            for n in 0..20 {
                let status = sources::send(
                    &url,
                    &format!("{client}-{n}"),
                    &json!({ "n": format!("{client}-{n}") }).to_string(),
                    KEY,
                )
                .await;
                assert!([200, 202].contains(&status), "{client}-{n}: {status}");
            }
        })
    });
    let mut run = harness.run(&["--events", "--webhook-port", &port]);
    for killed_after in [5, 15, 30, 45] {
        until_accepted(&received, killed_after).await;
        run.kill().await;
        run = harness.run(&["--events", "--webhook-port", &port]);
    }
    for client in clients {
        client.await.unwrap();
    }
    until_accepted(&received, 60).await;
    run.until("a", "asleep", |line| line["state"] == "Sleeping").await;
    run.interrupt().await;
    assert_eq!(run.cause().await, "Interrupted");
    let received = received.lock().unwrap();
    assert_eq!(received.accepted.len(), 60, "no task has a second response");
    let mut of: BTreeMap<&str, &Value> = BTreeMap::new();
    for (key, _, body) in &received.all {
        assert_eq!(body["outcome"], "Completed", "{body}");
        let before = of.insert(key, body);
        assert!(before.is_none_or(|before| before == body), "another response to {key}");
    }
    // Their ids end with the numbers that the Sensor gave them, in the order of their arrival.
    let numbers = received.accepted.iter().map(|key| {
        let mut parts = key.rsplit('/').skip(1);
        parts.next().unwrap().parse::<u64>().unwrap()
    });
    assert!(numbers.is_sorted(), "{:?}", received.accepted);
}

#[tokio::test]
async fn an_agent_without_tasks_has_no_pod_until_the_next_one_arrives() {
    if !has("openssl") {
        return;
    }
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (received, to) = receiver(0).await;
    let mut harness = LocalHarness::new();
    let responses = json!({ "http": { "url": format!("http://127.0.0.1:{to}/responses") } });
    answering(
        &harness,
        &json!([{ "text": "done" }]),
        &json!({ "responses": responses, "idlePodSeconds": 1 }),
    );
    let port = free_port().to_string();
    let url = format!("http://127.0.0.1:{port}/");
    let mut run = harness.run(&["--events", "--webhook-port", &port]);
    let gone = |turns: usize| {
        move |line: &Value| line["outcome"] == "ScaledToZero" && line["state"] == "Stopped" && line["turn"] == turns
    };
    for n in 1..=3 {
        run.until("a", "without a pod", gone(n - 1)).await;
        let status = sources::send(&url, &n.to_string(), &json!({ "n": n }).to_string(), KEY).await;
        assert_eq!(status, 202);
        until_accepted(&received, n).await;
    }
    run.until("a", "without a pod", gone(3)).await;
    // A run that is started later leaves it without one.
    run.interrupt().await;
    assert_eq!(run.cause().await, "Interrupted");
    let mut run = harness.run(&["--events", "--webhook-port", &port]);
    assert_eq!(sources::send(&url, "4", &json!({ "n": 4 }).to_string(), KEY).await, 202);
    until_accepted(&received, 4).await;
    run.until("a", "without a pod", gone(4)).await;
    run.interrupt().await;
    assert_eq!(run.cause().await, "Interrupted");
    assert_eq!(received.lock().unwrap().all.len(), 4);
}

#[tokio::test]
async fn a_response_has_the_headers_of_the_secret_and_a_failure_is_sent_to_the_error_channel() {
    if !has("openssl") {
        return;
    }
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (received, to) = receiver(0).await;
    let mut harness = LocalHarness::new();
    let http = json!({
        "url": format!("http://127.0.0.1:{to}/responses"), "headersSecretRef": { "name": "headers" },
    });
    answering(
        &harness,
        &json!([{ "fail": { "status": 400 } }, { "text": "done" }]),
        &json!({ "responses": { "http": http } }),
    );
    let text = std::fs::read_to_string(harness.path("all.yaml")).unwrap();
    let headers = format!(
        "apiVersion: v1\nkind: Secret\nmetadata: {{name: headers}}\nstringData: {{Authorization: Bearer {KEY}}}\n"
    );
    std::fs::write(harness.path("all.yaml"), format!("{text}---\n{headers}")).unwrap();
    let port = free_port().to_string();
    let url = format!("http://127.0.0.1:{port}/");
    let mut run = harness.run(&["--events", "--webhook-port", &port]);
    for n in ["1", "2"] {
        assert_eq!(sources::send(&url, n, &json!({ "n": n }).to_string(), KEY).await, 202);
        until_accepted(&received, n.parse().unwrap()).await;
    }
    run.interrupt().await;
    assert_eq!(run.cause().await, "Interrupted");
    let received = received.lock().unwrap();
    let sent = received.all.iter().map(|(_, authorization, body)| {
        assert_eq!(authorization.as_deref(), Some(format!("Bearer {KEY}").as_str()));
        (body["channel"].as_str().unwrap(), body["outcome"].as_str().unwrap())
    });
    assert_eq!(
        sent.collect::<Vec<_>>(),
        [("agent-errors", "Failed"), ("responses", "Completed")]
    );
    assert!(!run.out().contains(KEY) && !run.err().contains(KEY));
}

#[tokio::test]
async fn a_schema_that_cannot_be_used_is_named_and_nothing_is_started() {
    let mut harness = LocalHarness::new();
    answering(
        &harness,
        &json!([{ "text": "done" }]),
        &json!({ "responseSchema": { "type": "tree" } }),
    );
    let mut run = harness.run(&[]);
    assert_eq!(run.ended().await.code(), Some(2));
    assert!(run.err().contains("spec.task.responseSchema"), "{}", run.err());
}

#[tokio::test]
async fn the_schema_of_a_response_reaches_the_model_server_beside_the_tools_and_the_answer_is_validated() {
    let provider = Provider::start().await;
    let says = |text: &str| {
        let message = json!({"role": "assistant", "content": text});
        let usage = json!({"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15});
        let choice = json!({"index": 0, "message": message, "finish_reason": "stop"});
        ScriptedResponse::json(200, &json!({"choices": [choice], "usage": usage}).to_string())
    };
    provider.will(says("It is bad."));
    provider.will(says(r#"{"severity": "high"}"#));
    let schema = json!({
        "type": "object",
        "properties": {"severity": {"type": "string", "enum": ["low", "high"]}},
        "required": ["severity"],
        "additionalProperties": false,
    });
    let spec = json!({
        "mode": "Task",
        "model": {
            "api": "OpenAIChat", "name": "m", "baseURL": format!("http://{}/v1", provider.address), "stream": false,
            "structuredOutput": "Always",
        },
        "task": {"prompt": "The shop is down.", "responseSchema": schema},
    });
    let mut harness = LocalHarness::new();
    harness.write("all.yaml", &[agent("a", &spec)]);
    let mut run = harness.run(&[]);
    provider.until_asked(2).await;
    run.until("a", "the task completed", |line| {
        line["state"] == "Sleeping" || line["outcome"] == "Completed"
    })
    .await;
    run.interrupt().await;
    let form = json!({"name": "response", "schema": schema, "strict": true});
    let seen = provider.seen();
    assert_eq!(
        seen.len(),
        2,
        "the first answer has not the form, and no other follows the second"
    );
    for call in seen {
        let body: Value = serde_json::from_str(&call.body).unwrap();
        assert_eq!(
            body["response_format"],
            json!({"type": "json_schema", "json_schema": form})
        );
        assert_eq!(body["tools"][0]["function"]["name"], "finish");
    }
}
