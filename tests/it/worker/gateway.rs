//! A small gateway on a Unix socket that answers from a list and records everything that it receives.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use agentloop::api::failure::CallFailure;
use agentloop::engine::CallPurpose;
use agentloop::link::deliveries::{Delivery, DeliveryAck};
use agentloop::link::events::{EventsPage, EventsResponse};
use agentloop::link::messages::{LoopReport, LoopTotals};
use agentloop::link::socket::{
    CALL_HEADER, COST_HEADER, FAILURE_HEADER, OutgoingResponse, PURPOSE_HEADER, SocketEvent, WorkerSession,
};
use agentloop::link::task_requests::{RequestedTask, TaskAck};
use agentloop::link::text_fragments::TextFragment;
use axum::body::{Body, Bytes};
use axum::extract::{Path as UrlPath, State};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use futures::StreamExt;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;

/// Longest wait for anything in these tests: a busy machine takes its time to start a process.
pub const WAIT_TIMEOUT: Duration = Duration::from_mins(1);

/// Text of a stream that breaks.
pub const BROKEN_OFF: &str = "All is ";

/// What the gateway answers to one call.
#[derive(Clone)]
pub enum Reply {
    /// An answer in one piece.
    Json(Value),
    /// An answer in one piece, with the cost of its call in millionths of a dollar.
    Priced(Value, i64),
    /// An answer in pieces, `[DONE]` after them.
    Stream(Vec<Value>),
    /// A stream with exactly this text.
    Raw(String),
    /// The first time a stream that breaks after [`BROKEN_OFF`], each later time the other.
    BrokenOnce(Box<Reply>),
    /// A failure.
    Failure(CallFailure),
    /// Nothing, for ever.
    Hang,
}

/// An answer with this text and these tool calls.
pub fn answer(text: &str, calls: &[(&str, Value)]) -> Reply {
    let calls: Vec<Value> = calls
        .iter()
        .map(|(name, arguments)| {
            json!({"id": "same", "type": "function",
                "function": {"name": name, "arguments": arguments.to_string()}})
        })
        .collect();
    let message = json!({"role": "assistant", "content": text, "tool_calls": calls});
    Reply::Json(json!({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}))
}

/// An answer that sleeps.
pub fn sleep(seconds: u32) -> Reply {
    answer("", &[("yield", json!({"sleep": seconds}))])
}

/// All that the gateway received.
#[derive(Clone, Default)]
pub struct Log {
    /// Calls, each time they came.
    pub calls: Vec<(String, Value)>,
    /// Routes of the calls.
    pub routes: Vec<String>,
    pub acks: Vec<String>,
    pub cancels: Vec<String>,
    pub reports: Vec<LoopReport>,
    /// Through which event of which Sensor it has all of them.
    pub delivered: Vec<DeliveryAck>,
    /// Event streams opened.
    pub listeners: u32,
    /// Subscriptions that pages came for, each time.
    pub readings: Vec<u64>,
    pub fragments: Vec<TextFragment>,
    /// Ids of the tasks whose responses came, each time.
    pub responses: Vec<String>,
    /// What became of requested tasks.
    pub receipts: Vec<TaskAck>,
}

impl Log {
    pub fn last(&self) -> LoopReport {
        self.reports.last().cloned().unwrap_or_default()
    }

    /// What was acknowledged. Errands go side by side: they come in any order.
    pub fn sorted_acks(&self) -> Vec<&str> {
        let mut acks: Vec<&str> = self.acks.iter().map(String::as_str).collect();
        acks.sort_unstable();
        acks
    }

    pub fn call_ids(&self) -> Vec<&str> {
        self.calls.iter().map(|(id, _)| id.as_str()).collect()
    }
}

struct Shared {
    replies: Mutex<VecDeque<Reply>>,
    kept: Mutex<HashMap<String, Reply>>,
    log: watch::Sender<Log>,
    events: watch::Sender<SocketEvent>,
    deliveries: watch::Sender<VecDeque<Delivery>>,
    tasks: watch::Sender<VecDeque<RequestedTask>>,
    /// What the receiver of responses answers.
    response_status: AtomicU16,
    epoch: AtomicI64,
}

/// The gateway.
pub struct Gateway {
    shared: Arc<Shared>,
    socket: PathBuf,
    server: Option<Runtime>,
}

impl Gateway {
    /// Starts serving; after the last of `replies` calls hang.
    pub fn start(dir: &Path, replies: Vec<Reply>) -> Self {
        let shared = Arc::new(Shared {
            replies: Mutex::new(replies.into()),
            kept: Mutex::default(),
            log: watch::Sender::default(),
            events: watch::Sender::default(),
            deliveries: watch::Sender::default(),
            tasks: watch::Sender::default(),
            response_status: AtomicU16::new(204),
            epoch: AtomicI64::new(1),
        });
        let mut gateway = Self {
            shared,
            socket: dir.join("gateway.sock"),
            server: None,
        };
        gateway.up();
        gateway
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Serves, after [`Gateway::down`] again; what it has answered before, it still has.
    pub fn up(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
        let app = Router::new()
            .route("/v1/session", get(session))
            .route("/v1/chat/completions", post(call))
            .route("/v1/messages", post(call))
            .route("/v1/calls/{id}/ack", post(ack))
            .route("/v1/calls/{id}/cancel", post(cancel))
            .route("/v1/report", put(report))
            .route("/v1/events", get(events))
            .route("/v1/deliveries", get(delivery))
            .route("/v1/deliveries/ack", post(delivered))
            .route("/v1/tasks", get(task))
            .route("/v1/tasks/ack", post(receipt))
            .route("/v1/task-responses", post(response))
            .route("/v1/readings", post(page))
            .route("/v1/text", post(text))
            .with_state(self.shared.clone());
        // A runtime of its own: when it ends, all its connections end.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let entered = runtime.enter();
        let listener = tokio::net::UnixListener::bind(&self.socket).unwrap();
        drop(entered);
        runtime.spawn(async move { axum::serve(listener, app).await.unwrap() });
        self.server = Some(runtime);
    }

    /// Dies: all connections break.
    pub fn down(&mut self) {
        if let Some(runtime) = self.server.take() {
            // On a thread of its own, since an async one may not wait for it.
            let down = std::thread::spawn(move || runtime.shutdown_timeout(WAIT_TIMEOUT));
            down.join().unwrap();
        }
    }

    /// The epoch of its pod.
    pub fn set_epoch(&self, epoch: i64) {
        self.shared.epoch.store(epoch, Ordering::Relaxed);
    }

    /// The receiver of responses answers with this status from now on.
    pub fn answer_responses(&self, status: u16) {
        self.shared.response_status.store(status, Ordering::Relaxed);
    }

    /// The kept answer of a call that hung so far.
    pub fn keep(&self, id: &str, reply: Reply) {
        self.shared.kept.lock().unwrap().insert(id.into(), reply);
        self.shared.log.send_modify(|_| {});
    }

    /// Changes what the gateway sends to the worker.
    pub fn tell(&self, change: impl FnOnce(&mut SocketEvent)) {
        self.shared.events.send_modify(change);
    }

    /// Events of a Sensor's pod come for the worker.
    pub fn deliver(&self, delivery: Delivery) {
        self.shared
            .deliveries
            .send_modify(|waiting| waiting.push_back(delivery));
    }

    /// A user requests a task of the worker.
    pub fn request(&self, task: RequestedTask) {
        self.shared.tasks.send_modify(|waiting| waiting.push_back(task));
    }

    /// Waits until what was received satisfies `enough`.
    pub async fn until(&self, what: &str, mut enough: impl FnMut(&Log) -> bool) -> Log {
        let mut log = self.shared.log.subscribe();
        if let Ok(log) = tokio::time::timeout(WAIT_TIMEOUT, log.wait_for(|log| enough(log))).await {
            return log.unwrap().clone();
        }
        let log = self.log();
        panic!(
            "not in time: {what}; calls {:?}, last report {:?}",
            log.call_ids(),
            log.last()
        )
    }

    pub fn log(&self) -> Log {
        self.shared.log.borrow().clone()
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.down();
    }
}

async fn session(State(shared): State<Arc<Shared>>) -> Json<WorkerSession> {
    Json(WorkerSession {
        epoch: shared.epoch.load(Ordering::Relaxed),
        known: LoopTotals::default(),
        traces: false,
        content: false,
        logs: false,
    })
}

async fn call(State(shared): State<Arc<Shared>>, uri: Uri, headers: HeaderMap, Json(body): Json<Value>) -> Response {
    let id = headers[CALL_HEADER].to_str().unwrap().to_owned();
    let _: CallPurpose = headers[PURPOSE_HEADER].to_str().unwrap().parse().unwrap();
    let mut log = shared.log.subscribe();
    shared.log.send_modify(|log| {
        log.routes.push(uri.path().into());
        log.calls.push((id.clone(), body));
    });
    let known = shared.kept.lock().unwrap().get(&id).cloned();
    let reply = known.unwrap_or_else(|| {
        let reply = shared.replies.lock().unwrap().pop_front().unwrap_or(Reply::Hang);
        shared.kept.lock().unwrap().insert(id.clone(), reply.clone());
        reply
    });
    let mut reply = reply;
    while matches!(reply, Reply::Hang) {
        log.changed().await.unwrap();
        reply = shared.kept.lock().unwrap()[&id].clone();
    }
    if let Reply::BrokenOnce(whole) = reply {
        shared.kept.lock().unwrap().insert(id, *whole);
        let choice = json!({"index": 0, "delta": {"content": BROKEN_OFF}});
        let first = Bytes::from(format!("data: {}\n\n", json!({"choices": [choice]})));
        // Not before a worker that is to send text has sent it.
        let sends_text = shared.events.borrow().directives.readings.iter().any(|one| one.text);
        let cut = async move {
            let _ = log.wait_for(|log| !sends_text || !log.fragments.is_empty()).await;
            Err(std::io::Error::other("broken"))
        };
        let pieces = futures::stream::iter([Ok(first)]).chain(futures::stream::once(cut));
        return stream(Body::from_stream(pieces));
    }
    match reply {
        Reply::Json(body) => Json(body).into_response(),
        Reply::Priced(body, cost) => ([(COST_HEADER, cost.to_string())], Json(body)).into_response(),
        Reply::Stream(chunks) => {
            let chunks: Vec<String> = chunks.iter().map(|chunk| format!("data: {chunk}\n\n")).collect();
            stream(Body::from(chunks.concat() + "data: [DONE]\n\n"))
        }
        Reply::Raw(text) => stream(Body::from(text)),
        Reply::Failure(failure) => (
            StatusCode::BAD_GATEWAY,
            [(FAILURE_HEADER, failure.kind.to_string())],
            Json(failure),
        )
            .into_response(),
        Reply::Hang | Reply::BrokenOnce(_) => unreachable!(),
    }
}

fn stream(body: Body) -> Response {
    ([("content-type", "text/event-stream")], body).into_response()
}

async fn ack(State(shared): State<Arc<Shared>>, UrlPath(id): UrlPath<String>) {
    shared.log.send_modify(|log| log.acks.push(id));
}

async fn cancel(State(shared): State<Arc<Shared>>, UrlPath(id): UrlPath<String>) {
    shared.log.send_modify(|log| log.cancels.push(id));
}

async fn report(State(shared): State<Arc<Shared>>, Json(report): Json<LoopReport>) {
    shared.log.send_modify(|log| log.reports.push(report));
}

async fn events(State(shared): State<Arc<Shared>>) -> Response {
    shared.log.send_modify(|log| log.listeners += 1);
    let events = WatchStream::new(shared.events.subscribe()).map(|event| {
        let data = serde_json::to_string(&event).unwrap();
        Ok::<_, Infallible>(Bytes::from(format!("data: {data}\n\n")))
    });
    stream(Body::from_stream(events))
}

async fn delivery(State(shared): State<Arc<Shared>>) -> Json<Delivery> {
    let mut waiting = shared.deliveries.subscribe();
    waiting.wait_for(|waiting| !waiting.is_empty()).await.unwrap();
    let mut next = None;
    shared.deliveries.send_modify(|waiting| next = waiting.pop_front());
    Json(next.unwrap())
}

async fn delivered(State(shared): State<Arc<Shared>>, Json(word): Json<DeliveryAck>) {
    shared.log.send_modify(|log| log.delivered.push(word));
}

async fn task(State(shared): State<Arc<Shared>>) -> Json<RequestedTask> {
    let mut waiting = shared.tasks.subscribe();
    waiting.wait_for(|waiting| !waiting.is_empty()).await.unwrap();
    let mut next = None;
    shared.tasks.send_modify(|waiting| next = waiting.pop_front());
    Json(next.unwrap())
}

/// Accepts each page.
async fn page(State(shared): State<Arc<Shared>>, Json(page): Json<EventsPage>) -> Json<EventsResponse> {
    shared.log.send_modify(|log| log.readings.push(page.reading));
    Json(EventsResponse { after: Some(page.next) })
}

async fn text(State(shared): State<Arc<Shared>>, Json(fragment): Json<TextFragment>) -> StatusCode {
    shared.log.send_modify(|log| log.fragments.push(fragment));
    StatusCode::NO_CONTENT
}

async fn receipt(State(shared): State<Arc<Shared>>, Json(ack): Json<TaskAck>) -> StatusCode {
    shared.log.send_modify(|log| log.receipts.push(ack));
    StatusCode::NO_CONTENT
}

async fn response(State(shared): State<Arc<Shared>>, Json(response): Json<OutgoingResponse>) -> Json<u16> {
    shared.log.send_modify(|log| log.responses.push(response.id));
    Json(shared.response_status.load(Ordering::Relaxed))
}
