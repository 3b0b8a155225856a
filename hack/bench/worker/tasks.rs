//! Tasks given to a worker process by a gateway that answers at once: how long one waits for its first model call while
//! nothing else does, and how many one Agent completes in a second.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use agentloop::link::deliveries::POLL_SECONDS;
use agentloop::link::task_requests::{RequestedTask, TaskAck, TaskReceipt};
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::Mutex;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::process;
use crate::role::Process;

/// Tasks that are measured one after the other.
const SINGLE: usize = 500;
/// Tasks of the measurement of the rate.
const MANY: usize = 2_000;
/// How many of those have no response at a time.
const OPEN: usize = 12;
/// Longest wait for anything.
const WAIT_TIMEOUT: Duration = Duration::from_mins(1);

/// Figures of tasks.
#[expect(clippy::print_stdout, reason = "figures go to stdout")]
pub async fn figures() {
    for (name, parent) in [("task", env!("CARGO_TARGET_TMPDIR")), ("task_in_memory", "/dev/shm")] {
        let dir = TempDir::new_in(parent).expect("the directory can be written");
        let mut gateway = TaskGateway::start(dir.path());
        let _process = worker(dir.path());
        // The first one waits for the start of the worker.
        gateway.offer(0);
        gateway.until_answered(1).await;
        let mut waits = Vec::new();
        for number in 1..=SINGLE {
            waits.push(gateway.offered_to_first_call(number).await);
        }
        crate::say(&format!("{name}_offered_to_first_call"), &mut waits);

        let start = Instant::now();
        for number in 0..MANY {
            gateway.offer(SINGLE + 1 + number);
            if number >= OPEN {
                gateway.until_answered(1).await;
            }
        }
        gateway.until_answered(OPEN).await;
        let tasks = f64::from(u32::try_from(MANY).expect("few"));
        let rate = tasks / start.elapsed().as_secs_f64();
        println!("FIGURE {name}_rate {rate:.0} tasks/s");
    }
}

/// What the worker did, in the order in which the gateway saw it.
enum Seen {
    Receipt(TaskReceipt),
    Call(Instant),
    Response,
}

/// A gateway that gives tasks to its worker and answers each call at once.
struct TaskGateway {
    offers: UnboundedSender<RequestedTask>,
    seen: UnboundedReceiver<Seen>,
}

struct Shared {
    offers: Mutex<UnboundedReceiver<RequestedTask>>,
    seen: UnboundedSender<Seen>,
}

impl TaskGateway {
    fn start(dir: &Path) -> Self {
        let ((offers, offered), (sender, seen)) = (unbounded_channel(), unbounded_channel());
        let shared = Arc::new(Shared {
            offers: Mutex::new(offered),
            seen: sender,
        });
        let app = Router::new()
            .route("/v1/session", get(process::session))
            .route("/v1/chat/completions", post(call))
            .route("/v1/calls/{id}/ack", post(async || ()))
            .route("/v1/report", put(async |_: Bytes| ()))
            .route("/v1/events", get(process::events))
            .route("/v1/tasks", get(next_task))
            .route("/v1/tasks/ack", post(acknowledge))
            .route("/v1/task-responses", post(respond))
            .with_state(shared);
        let listener = tokio::net::UnixListener::bind(dir.join("socket")).expect("a socket");
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self { offers, seen }
    }

    fn offer(&self, number: usize) {
        let task = RequestedTask {
            receiver: "agent".into(),
            id: format!("request-{number}"),
            user: "ann".into(),
            prompt: "How many items does the queue hold?".into(),
            untrusted_content: None,
        };
        self.offers.send(task).expect("the gateway serves");
    }

    async fn next(&mut self) -> Seen {
        let seen = tokio::time::timeout(WAIT_TIMEOUT, self.seen.recv()).await;
        seen.expect("the worker goes on").expect("the gateway serves")
    }

    /// From the moment when the gateway has a task for the worker until its first call. In between the worker writes the
    /// task and the begin of its turn to the disk. The receipt, by which a client learns of the acceptance, is sent beside
    /// it, so this is at least as long as what follows the acceptance.
    async fn offered_to_first_call(&mut self, number: usize) -> Duration {
        let offered = Instant::now();
        self.offer(number);
        let (mut is_accepted, mut called, mut is_answered) = (false, None, false);
        while !is_accepted || called.is_none() || !is_answered {
            match self.next().await {
                Seen::Receipt(receipt) => {
                    assert_eq!(receipt, TaskReceipt::Accepted);
                    is_accepted = true;
                }
                Seen::Call(at) => called = called.or(Some(at)),
                Seen::Response => is_answered = true,
            }
        }
        called.expect("it was seen") - offered
    }

    async fn until_answered(&mut self, count: usize) {
        let mut left = count;
        while left > 0 {
            if matches!(self.next().await, Seen::Response) {
                left -= 1;
            }
        }
    }
}

async fn next_task(State(shared): State<Arc<Shared>>) -> Response {
    let mut offers = shared.offers.lock().await;
    match tokio::time::timeout(Duration::from_secs(POLL_SECONDS), offers.recv()).await {
        Ok(Some(task)) => Json(task).into_response(),
        _ => StatusCode::NO_CONTENT.into_response(),
    }
}

async fn acknowledge(State(shared): State<Arc<Shared>>, Json(ack): Json<TaskAck>) -> StatusCode {
    let _ = shared.seen.send(Seen::Receipt(ack.receipt));
    StatusCode::NO_CONTENT
}

async fn call(State(shared): State<Arc<Shared>>, _: Bytes) -> Json<Value> {
    let _ = shared.seen.send(Seen::Call(Instant::now()));
    Json(process::answer())
}

async fn respond(State(shared): State<Arc<Shared>>, _: Bytes) -> Json<u16> {
    let _ = shared.seen.send(Seen::Response);
    Json(204)
}

/// A worker in mode `Task` whose responses go to a receiver.
fn worker(dir: &Path) -> Process {
    let spec = json!({
        "mode": "Task",
        "instructions": "You answer questions about a queue.",
        "model": {
            "api": "OpenAIChat", "name": "m", "baseURL": "http://unused/v1",
            "contextTokens": 128_000, "maxOutputTokens": 1_000,
        },
        "task": {"responses": {"http": {"url": "http://unused/"}}},
        "loop": {"minDelayMilliseconds": 0},
        "guardrails": {"loopDetection": {"mode": "Disabled"}},
    });
    process::start_worker(dir, &spec)
}
