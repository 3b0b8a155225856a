//! The worker as a process on a gateway that answers at once: how late its timer is, and how long it takes to continue from
//! a long history.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use agentloop::link::messages::LoopTotals;
use agentloop::link::socket::{CALL_HEADER, SocketEvent, WorkerSession};
use agentloop::worker::journal::copy;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use futures::StreamExt;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::journal;
use crate::role::Process;

/// Pause between two turns.
pub const DELAY_MILLISECONDS: u32 = 20;
/// Turns whose beginning is measured.
const WAKES: i64 = 500;
/// Starts of each kind.
const STARTS: usize = 10;
/// Longest wait for a call.
const WAIT_TIMEOUT: Duration = Duration::from_mins(1);

/// Figures of worker processes.
pub fn figures() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a runtime starts");
    runtime.block_on(async {
        let on_disk = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).expect("the target directory can be written");
        let in_memory = TempDir::new_in("/dev/shm").expect("/dev/shm can be written");
        crate::say("wake_by_timer", &mut wakes(on_disk.path()).await);
        crate::say("wake_by_timer_in_memory", &mut wakes(in_memory.path()).await);
        for (name, in_order) in [("resume_10000_turns", true), ("resume_10000_turns_after_kill", false)] {
            resumes(name, in_order).await;
        }
        crate::tasks::figures().await;
    });
}

/// How long after each moment at which a turn was due the gateway had its first call.
async fn wakes(dir: &Path) -> Vec<Duration> {
    let mut gateway = Gateway::start(dir, true);
    let process = worker(dir, 128_000);
    let mut asked = Vec::new();
    for _ in 0..=WAKES {
        asked.push(gateway.next().await);
    }
    let path = dir.join("copy.sqlite");
    let mut copied = std::fs::File::create(&path).expect("a file");
    while copy(dir, &mut copied).is_err() {
        copied = std::fs::File::create(&path).expect("a file");
    }
    drop(process);
    let connection = rusqlite::Connection::open(&path).expect("a copy");
    let completed = "SELECT at FROM journal WHERE kind = 'TurnCompleted' ORDER BY turn";
    let mut select = connection.prepare(completed).expect("a table");
    let rows = select.query_map([], |row| row.get::<_, String>(0)).expect("rows");
    let delay = SignedDuration::from_millis(DELAY_MILLISECONDS.into());
    let due = rows.map(|at| at.expect("a row").parse::<Timestamp>().expect("a moment") + delay);
    let late = due.zip(&asked[1..]).map(|(due, asked)| asked.duration_since(due));
    late.map(|late| Duration::try_from(late).unwrap_or_default()).collect()
}

/// From the start of the process until the gateway has the call that was open; and the memory then.
#[expect(clippy::print_stdout, reason = "figures go to stdout")]
async fn resumes(name: &str, in_order: bool) {
    let kept = TempDir::new_in("/dev/shm").expect("/dev/shm can be written");
    journal::leave(kept.path(), in_order);
    let mut times = Vec::new();
    let mut memory = Vec::new();
    for _ in 0..STARTS {
        let dir = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).expect("the target directory can be written");
        for file in std::fs::read_dir(kept.path()).expect("it was made") {
            let file = file.expect("an entry");
            std::fs::copy(file.path(), dir.path().join(file.file_name())).expect("a copy");
        }
        let mut gateway = Gateway::start(dir.path(), false);
        let start = Instant::now();
        let process = worker(dir.path(), 128_000);
        gateway.next().await;
        times.push(start.elapsed());
        memory.push([process.kibibytes("VmRSS:"), process.kibibytes("VmHWM:")]);
    }
    crate::say(name, &mut times);
    memory.sort_unstable();
    let [now, most] = memory[memory.len() / 2].map(|kibibytes| kibibytes / 1024);
    println!("FIGURE {name}_rss {now} MiB, {most} at most");
}

/// A gateway that answers each call at once, or never.
struct Gateway {
    calls: UnboundedReceiver<Timestamp>,
}

struct Shared {
    calls: UnboundedSender<Timestamp>,
    answers: AtomicBool,
}

impl Gateway {
    fn start(dir: &Path, answers: bool) -> Self {
        let (sender, calls) = unbounded_channel();
        let shared = Arc::new(Shared {
            calls: sender,
            answers: AtomicBool::new(answers),
        });
        let app = Router::new()
            .route("/v1/session", get(session))
            .route("/v1/chat/completions", post(call))
            .route("/v1/calls/{id}/ack", post(async || ()))
            .route("/v1/report", put(async |_: Bytes| ()))
            .route("/v1/events", get(events))
            .with_state(shared);
        let listener = tokio::net::UnixListener::bind(dir.join("socket")).expect("a socket");
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self { calls }
    }

    /// When the next call came.
    async fn next(&mut self) -> Timestamp {
        let call = tokio::time::timeout(WAIT_TIMEOUT, self.calls.recv()).await;
        call.expect("the worker calls in time").expect("the gateway serves")
    }
}

pub async fn session() -> Json<WorkerSession> {
    let known = LoopTotals::default();
    Json(WorkerSession {
        epoch: 1,
        known,
        traces: false,
        logs: false,
        content: false,
    })
}

async fn call(State(shared): State<Arc<Shared>>, headers: HeaderMap, _: Bytes) -> Response {
    let came = Timestamp::now();
    // The first one of a turn.
    if headers[CALL_HEADER].as_bytes().ends_with(b"c1a1") {
        let _ = shared.calls.send(came);
    }
    if !shared.answers.load(Ordering::Relaxed) {
        std::future::pending::<()>().await;
    }
    Json(answer()).into_response()
}

/// The answer of a model without tool calls.
pub fn answer() -> Value {
    let message = json!({"role": "assistant", "content": "The queue holds 3 items; none is older than a minute."});
    json!({
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 900, "completion_tokens": 20},
    })
}

pub async fn events() -> Response {
    let event = serde_json::to_string(&SocketEvent::default()).expect("an event");
    let first = futures::stream::iter([Ok::<_, Infallible>(Bytes::from(format!("data: {event}\n\n")))]);
    let body = Body::from_stream(first.chain(futures::stream::pending()));
    ([("content-type", "text/event-stream")], body).into_response()
}

/// A worker of the bench of turns with its files in this directory.
fn worker(dir: &Path, context_tokens: u32) -> Process {
    start_worker(dir, &journal::spec(context_tokens))
}

/// A worker of an Agent with this spec, with its files in this directory.
pub fn start_worker(dir: &Path, spec: &Value) -> Process {
    let config = json!({
        "namespace": "default", "name": "a", "uid": "agent", "epoch": 1, "linkUrl": "https://unused",
        "spec": spec,
    });
    let variables = [
        ("AGENTLOOP_POD_UID", "pod-1".into()),
        ("AGENTLOOP_SOCKET", dir.join("socket").into_os_string()),
        ("AGENTLOOP_JOURNAL_DIR", dir.into()),
    ];
    Process::start("worker", &config, variables)
}
