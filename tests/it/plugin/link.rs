//! The plugin against a fake controller over HTTP: streams of events, tasks, conversations.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use agentloop::plugin::ExitStatus;
use axum::body::{Body, Bytes};
use axum::extract::{Path, RawQuery, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures::StreamExt;
use pretty_assertions::assert_eq;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::harness::{NOW, PluginHarness, TOKEN};

/// A response to one request.
pub enum Answer {
    /// A stream of these server-sent events, which then ends.
    Stream(Vec<(&'static str, i64, Value)>),
    /// A stream of these events that stays open.
    OpenStream(Vec<(&'static str, i64, Value)>),
    /// A status with a JSON body.
    Json(u16, Value),
    /// The connection breaks before a response.
    Broken,
}

use Answer::{Broken, Json as Reply};
pub use Answer::{OpenStream, Stream};

/// Server-sent events after a comment, as the controller's heartbeats are.
fn sse(events: Vec<(&'static str, i64, Value)>) -> String {
    let lines = events
        .into_iter()
        .map(|(name, id, data)| format!("event: {name}\nid: {id}\ndata: {data}\n\n"));
    format!(": alive\n\n{}", lines.collect::<String>())
}

#[derive(Clone, Default)]
pub struct Controller {
    answers: Arc<Mutex<VecDeque<Answer>>>,
    /// Requests: path with query, and body.
    requests: Arc<Mutex<Vec<(String, Value)>>>,
}

impl Controller {
    fn answer(&self, line: String, headers: &HeaderMap, body: Value) -> Response {
        assert_eq!(headers["authorization"], format!("Bearer {TOKEN}"));
        self.requests.lock().unwrap().push((line, body));
        match self
            .answers
            .lock()
            .unwrap()
            .pop_front()
            .expect("an answer for each request")
        {
            Stream(events) => Response::new(Body::from(sse(events))),
            OpenStream(events) => {
                let first = futures::stream::iter([Ok::<_, std::io::Error>(Bytes::from(sse(events)))]);
                Response::new(Body::from_stream(first.chain(futures::stream::pending())))
            }
            Reply(status, body) => (StatusCode::from_u16(status).unwrap(), Json(body)).into_response(),
            Broken => {
                let broken = futures::stream::iter([Err::<Bytes, _>(std::io::Error::other("broken"))]);
                Response::new(Body::from_stream(broken))
            }
        }
    }

    pub fn lines(&self) -> Vec<String> {
        self.requests
            .lock()
            .unwrap()
            .iter()
            .map(|(line, _)| line.clone())
            .collect()
    }

    pub fn tasks(&self) -> Vec<Value> {
        let requests = self.requests.lock().unwrap();
        requests
            .iter()
            .filter(|(_, body)| !body.is_null())
            .map(|(_, body)| body.clone())
            .collect()
    }
}

/// A fake controller that gives these answers in order, and the plugin that reaches it.
pub struct FakeController {
    pub controller: Controller,
    pub harness: PluginHarness,
    server: JoinHandle<()>,
}

impl Drop for FakeController {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl FakeController {
    pub async fn start(answers: Vec<Answer>) -> Self {
        let controller = Controller {
            answers: Arc::new(Mutex::new(answers.into())),
            ..Controller::default()
        };
        let events = async |State(fake): State<Controller>,
                            Path((ns, name)): Path<(String, String)>,
                            RawQuery(query): RawQuery,
                            headers: HeaderMap| {
            fake.answer(
                format!("GET {ns}/{name}/events?{}", query.unwrap_or_default()),
                &headers,
                Value::Null,
            )
        };
        let tasks = async |State(fake): State<Controller>,
                           Path((ns, name)): Path<(String, String)>,
                           headers: HeaderMap,
                           Json(body): Json<Value>| {
            fake.answer(format!("POST {ns}/{name}/tasks"), &headers, body)
        };
        let router = Router::new()
            .route("/v1/namespaces/{namespace}/agents/{name}/events", get(events))
            .route("/v1/namespaces/{namespace}/agents/{name}/tasks", post(tasks))
            .with_state(controller.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        let harness = PluginHarness::with_link(&format!("http://{address}"));
        harness.put_agent("helper", &json!({"usage": {"inputTokens": 1000, "costMicroUSD": 5000}}));
        Self {
            controller,
            harness,
            server,
        }
    }
}

pub fn start(seq: i64) -> Answer {
    Stream(vec![("start", seq, json!({"seq": seq}))])
}

pub fn event(name: &'static str, seq: i64, more: &Value) -> (&'static str, i64, Value) {
    let mut data = json!({"seq": seq, "event": name, "at": NOW, "kind": "x", "turn": 1, "note": ""});
    for (field, value) in more.as_object().unwrap() {
        data[field] = value.clone();
    }
    (name, seq, data)
}

pub fn accepted(state: &str) -> Answer {
    Reply(202, json!({"id": "request-a", "state": state}))
}

pub fn ended(seq: i64, response: &Value) -> (&'static str, i64, Value) {
    let mut response = response.clone();
    response["id"] = json!("request-a");
    let note = format!("request-a: {}", response["outcome"].as_str().unwrap());
    event(
        "task:ended",
        seq,
        &json!({"note": note, "messages": [response.to_string()]}),
    )
}

pub fn completed(seq: i64, result: &Value) -> (&'static str, i64, Value) {
    ended(
        seq,
        &json!({"outcome": "Completed", "result": result, "iterations": 2, "tokensUsed": 30}),
    )
}

#[tokio::test]
async fn a_run_follows_its_task_over_connections_from_the_event_that_it_read_last() {
    let fake = FakeController::start(vec![
        start(7),
        accepted("Accepted"),
        // The first connection ended; these continue where it did.
        Stream(vec![
            event("task:accepted", 8, &json!({"note": "request-a"})),
            event("task:started", 9, &json!({"note": "request-a"})),
            ("end", 0, json!({"reason": "the limit of one hour is reached"})),
        ]),
        Stream(vec![
            event("tool:intent", 10, &json!({"tool": "files__read"})),
            event("tool:outcome", 11, &json!({"tool": "files__read", "outcome": "Ok"})),
            ended(12, &json!({"outcome": "Completed", "result": "done"})),
        ]),
    ])
    .await;
    let done = fake.harness.run("run helper --prompt \"Do it.\" --id once -v").await;
    assert_eq!(
        (done.status, done.out.as_str()),
        (ExitStatus::Success, "done\n"),
        "{}",
        done.err
    );
    assert!(
        done.err.contains("runs files__read\nran files__read: Ok\n"),
        "{}",
        done.err
    );
    assert_eq!(
        fake.controller.lines(),
        [
            "GET team-a/helper/events?after=latest&messages=true",
            "POST team-a/helper/tasks",
            "GET team-a/helper/events?after=7&messages=true",
            "GET team-a/helper/events?after=9&messages=true",
        ]
    );
    assert_eq!(fake.controller.tasks(), [json!({"prompt": "Do it.", "id": "once"})]);
}

#[tokio::test]
async fn the_outcome_of_the_task_is_the_exit_status_and_the_response_can_be_data() {
    let run = async |response: Value, line: &str| {
        let fake = FakeController::start(vec![start(0), accepted("Accepted"), Stream(vec![ended(1, &response)])]).await;
        fake.harness.run(line).await
    };
    let failed = run(json!({"outcome": "Failed", "error": "no model"}), "run helper -p x").await;
    assert_eq!((failed.status, failed.out.as_str()), (ExitStatus::Failure, ""));
    assert_eq!(failed.err, "error: request-a: Failed: no model\n");
    let limit = json!({"outcome": "LimitReached", "reason": "MaxTokens", "result": {"a": 1}});
    let limit = run(limit, "run helper -p x -o json").await;
    assert_eq!(limit.status, ExitStatus::LimitReached);
    let data: Value = serde_json::from_str(&limit.out).unwrap();
    assert_eq!(
        (&data["reason"], &data["result"]["a"]),
        (&json!("MaxTokens"), &json!(1))
    );
}

#[tokio::test]
async fn a_request_without_an_answer_is_repeated_with_the_same_id() {
    let fake = FakeController::start(vec![
        start(3),
        Broken,
        Reply(
            503,
            json!({"code": "Unavailable", "message": "another replica is becoming the leader"}),
        ),
        accepted("Accepted"),
        Stream(vec![completed(4, &json!("done"))]),
    ])
    .await;
    let done = fake.harness.run("run helper -p x").await;
    assert_eq!(
        (done.status, done.out.as_str()),
        (ExitStatus::Success, "done\n"),
        "{}",
        done.err
    );
    let tasks = fake.controller.tasks();
    assert_eq!(tasks.len(), 3);
    assert!(tasks.iter().all(|task| task == &tasks[0]), "{tasks:?}");
    assert!(tasks[0]["id"].as_str().unwrap().starts_with("kubectl-"));
}

#[tokio::test]
async fn a_request_is_sent_even_if_the_pod_of_its_agent_is_replaced_before() {
    let replaced = json!({"reason": "the pod of this Agent was deleted or replaced; reconnect with the last id"});
    let fake = FakeController::start(vec![
        Stream(vec![("end", 0, replaced.clone())]),
        Reply(202, json!({"id": "request-a", "state": "Accepted", "after": 5})),
        Stream(vec![completed(6, &json!("done"))]),
    ])
    .await;
    let done = fake.harness.run("run helper -p x").await;
    let shown = (done.status, done.out.as_str());
    assert_eq!(shown, (ExitStatus::Success, "done\n"), "{}", done.err);
    assert_eq!(
        fake.controller.lines()[2],
        "GET team-a/helper/events?after=5&messages=true"
    );

    // Without a request there is nothing to wait for.
    let fake = FakeController::start(vec![Stream(vec![("end", 0, replaced)])]).await;
    let done = fake.harness.run("logs helper --tail 0 -f").await;
    assert_eq!(done.status, ExitStatus::Failure);
    assert!(
        done.err.contains("the events of this Agent have ended: the pod"),
        "{}",
        done.err
    );
}

#[tokio::test]
async fn a_task_that_was_requested_before_is_found_in_the_events_that_are_kept() {
    let fake = FakeController::start(vec![
        start(9),
        accepted("Repeated"),
        start(9),
        Stream(vec![
            event("task:accepted", 4, &json!({"note": "request-a"})),
            completed(6, &json!("as before")),
        ]),
    ])
    .await;
    let done = fake.harness.run("run helper -p x --id once").await;
    assert_eq!(
        (done.status, done.out.as_str()),
        (ExitStatus::Success, "as before\n"),
        "{}",
        done.err
    );
    assert_eq!(
        fake.controller.lines()[2..],
        [
            "GET team-a/helper/events?after=latest&messages=false",
            "GET team-a/helper/events?after=0&messages=true"
        ]
    );
}

#[tokio::test]
async fn a_task_whose_events_are_deleted_is_not_awaited_and_its_end_is_read_from_the_status() {
    let repeated = |after: i64| Reply(202, json!({"id": "request-a", "state": "Repeated", "after": after}));
    let unavailable = || {
        Reply(
            503,
            json!({"code": "Unavailable", "message": "this Agent has no pod now"}),
        )
    };
    let other = |seq| {
        event(
            "task:ended",
            seq,
            &json!({"note": "request-b: Completed", "messages": ["{}"]}),
        )
    };
    let ways = [
        // Nothing was written since.
        vec![start(9), repeated(9), start(9)],
        // The events that are kept are of others.
        vec![start(9), repeated(2), start(9), OpenStream(vec![other(8), other(9)])],
        // The Agent had no pod when the command began.
        vec![unavailable(), repeated(0), start(4), OpenStream(vec![other(4)])],
    ];
    for answers in ways {
        let fake = FakeController::start(answers).await;
        let done = fake.harness.run("run helper -p x --id a").await;
        assert_eq!((done.status, done.out.as_str()), (ExitStatus::Failure, ""));
        assert_eq!(
            done.err,
            "error: request-a was requested before, and its events are no longer kept, so its result cannot be read: it has \
             ended, or waits behind others. Use another --id to request it again\n"
        );
    }
    let fake = FakeController::start(vec![start(9), repeated(9), start(9)]).await;
    let ended = json!({"id": "request-a", "kind": "Request", "startedAt": NOW, "completedAt": NOW, "outcome": "Completed",
        "iterations": 2, "tokens": 30, "costMicroUSD": 0});
    fake.harness.put_agent("helper", &json!({"recentActivations": [ended]}));
    let done = fake.harness.run("run helper -p x --id a").await;
    assert!(
        done.err.contains("it has ended: Completed at 2026-11-22T14:00:00Z"),
        "{}",
        done.err
    );
}

#[tokio::test]
async fn a_request_starts_the_pod_of_an_agent_and_its_events_begin_after_the_receipt() {
    let unavailable = || {
        Reply(
            503,
            json!({"code": "Unavailable", "message": "this Agent has no pod now"}),
        )
    };
    let receipt = json!({"id": "request-a", "state": "Accepted", "after": 41});
    let fake = FakeController::start(vec![
        unavailable(),
        Reply(202, receipt),
        unavailable(),
        Stream(vec![completed(43, &json!("done"))]),
    ])
    .await;
    let done = fake.harness.run("run helper -p x").await;
    assert_eq!(
        (done.status, done.out.as_str()),
        (ExitStatus::Success, "done\n"),
        "{}",
        done.err
    );
    let expected = "GET team-a/helper/events?after=41&messages=true";
    assert_eq!(fake.controller.lines()[2..], [expected, expected]);
}

#[tokio::test]
async fn a_refusal_is_shown_with_its_fix_and_no_task_is_requested() {
    let refusal = json!({"code": "Forbidden", "message": "ann may not get agents/messages of Agent team-a/helper"});
    let fake = FakeController::start(vec![Reply(403, refusal)]).await;
    let done = fake.harness.run("run helper -p x").await;
    assert_eq!(done.status, ExitStatus::Failure);
    assert_eq!(
        done.err,
        "error: the controller rejected the request: ann may not get agents/messages of Agent team-a/helper\n"
    );
    assert_eq!(fake.controller.tasks(), Vec::<Value>::new());
    let fake = FakeController::start(vec![
        start(0),
        Reply(429, json!({"code": "TooManyTasks", "message": "1000 tasks wait"})),
    ])
    .await;
    let done = fake.harness.run("run helper -p x").await;
    assert_eq!(
        done.err,
        "error: the controller rejected the request: 1000 tasks wait\n"
    );
}

#[tokio::test]
async fn logs_show_the_newest_events_and_the_usage_and_end() {
    let fake = FakeController::start(vec![
        start(5),
        Stream(vec![
            event("autonomy:turn_started", 4, &json!({})),
            event("autonomy:turn_completed", 5, &json!({"note": "sleep"})),
        ]),
    ])
    .await;
    let done = fake.harness.run("logs helper --tail 2").await;
    assert_eq!(done.status, ExitStatus::Success, "{}", done.err);
    let lines: Vec<&str> = done.out.lines().collect();
    assert_eq!(lines.len(), 3);
    assert!(
        lines[1].ends_with("turn_completed       sleep  after 0s"),
        "{}",
        lines[1]
    );
    assert!(lines[2].ends_with("total 1k tokens, $0.005"), "{}", lines[2]);
    assert_eq!(
        fake.controller.lines()[1],
        "GET team-a/helper/events?after=3&messages=false"
    );
}

/// The sixth connection is opened 7.75 s after the first one ended: longer than the next event of an open one may take.
#[tokio::test]
async fn events_are_complete_after_an_outage_of_the_controller() {
    let unavailable = || Reply(503, json!({"message": "no leader"}));
    let started = event("autonomy:turn_started", 1, &json!({}));
    let mut answers = vec![start(2), Stream(vec![started])];
    answers.extend((0..4).map(|_| unavailable()));
    answers.push(Stream(vec![event("autonomy:turn_completed", 2, &json!({}))]));
    let fake = FakeController::start(answers).await;
    let done = fake.harness.run("events helper").await;
    assert_eq!(done.status, ExitStatus::Success, "{}", done.err);
    assert_eq!(done.out.lines().count(), 2, "{}", done.out);
    assert_eq!(
        fake.controller.lines().last().unwrap(),
        "GET team-a/helper/events?after=1&messages=false"
    );
}

#[tokio::test]
async fn events_are_json_lines_and_the_history_has_turns() {
    let turn = || {
        Stream(vec![
            event("autonomy:turn_started", 1, &json!({})),
            event("gate:opened", 2, &json!({"messages": ["{}"]})),
            event("autonomy:turn_completed", 3, &json!({})),
        ])
    };
    let fake = FakeController::start(vec![start(3), turn(), start(3), turn(), start(0)]).await;
    let events = fake.harness.run("events helper --messages").await.out;
    let rows: Vec<Value> = events.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((rows.len(), &rows[1]["messages"]), (3, &json!(["{}"])));
    let history: Value = serde_json::from_str(&fake.harness.run("history helper -o json").await.out).unwrap();
    assert_eq!(
        (&history[0]["turn"], &history[0]["end"]),
        (&json!(1), &json!("completed"))
    );
    assert_eq!(fake.harness.run("events helper").await.out, "", "an empty journal");
}

#[tokio::test]
async fn a_token_is_sent_to_https_and_to_this_machine_only() {
    let mut harness = PluginHarness::start();
    harness.put_agent("helper", &json!({}));
    harness.link = "http://agentloop.example.com".into();
    let done = harness.run("events helper").await;
    assert!(done.err.contains("must start with https://"), "{}", done.err);
}
