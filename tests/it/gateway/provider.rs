//! A model server on loopback that a test controls, and that records its requests.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, Response, StatusCode, Uri};
use futures::stream;
use tokio::sync::watch;

/// A whole answer with usage.
pub const ANSWER: &str = r#"{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"canary-answer"},"finish_reason":"stop"}],"usage":{"prompt_tokens":100,"completion_tokens":20,"total_tokens":120,"prompt_tokens_details":{"cached_tokens":90},"completion_tokens_details":{"reasoning_tokens":15}}}"#;
/// The same as a stream: its beginning, and its end.
pub const STREAM_HEAD: &str = concat!(
    ": hello\n\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"canary-\"},\"finish_reason\":null}]}\n\n",
);
/// The end of the stream.
pub const STREAM_TAIL: &str = concat!(
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"answer\"},\"finish_reason\":\"stop\"}]}\n\n",
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":100,\"completion_tokens\":20,\"prompt_tokens_details\":{\"cached_tokens\":90},\"completion_tokens_details\":{\"reasoning_tokens\":15}}}\n\n",
    "data: [DONE]\n\n",
);

/// What the server does with one request.
#[derive(Clone, Debug)]
pub struct ScriptedResponse {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub steps: Vec<Step>,
}

/// One step of an answer's body.
#[derive(Clone, Debug)]
pub enum Step {
    Send(String),
    /// Waits until the test releases it.
    Hold,
    /// Breaks the connection.
    Cut,
    /// Sends this for ever.
    Endless(String),
}

impl ScriptedResponse {
    pub fn json(status: u16, body: &str) -> Self {
        Self {
            status,
            headers: vec![("content-type", "application/json".into())],
            steps: vec![Step::Send(body.into())],
        }
    }

    pub fn stream(steps: Vec<Step>) -> Self {
        Self {
            status: 200,
            headers: vec![("content-type", "text/event-stream; charset=utf-8".into())],
            steps,
        }
    }

    pub fn steps(self, steps: Vec<Step>) -> Self {
        Self { steps, ..self }
    }

    pub fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }
}

pub fn send(text: &str) -> Step {
    Step::Send(text.into())
}

/// What the server was asked.
#[derive(Clone, Debug)]
pub struct ReceivedRequest {
    pub path: String,
    pub headers: HeaderMap,
    pub body: String,
    pub at: Instant,
}

#[derive(Clone)]
pub struct Provider {
    pub address: SocketAddr,
    state: Arc<Shared>,
}

struct Shared {
    acts: Mutex<VecDeque<ScriptedResponse>>,
    seen: watch::Sender<Vec<ReceivedRequest>>,
    /// Number of holds so far, and of those that are released.
    holds: AtomicUsize,
    released: watch::Sender<usize>,
}

impl Provider {
    pub async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let state = Arc::new(Shared {
            acts: Mutex::default(),
            seen: watch::Sender::default(),
            holds: AtomicUsize::new(0),
            released: watch::Sender::new(0),
        });
        let address = listener.local_addr().unwrap();
        let router = Router::new().fallback(answer).with_state(Arc::clone(&state));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { address, state }
    }

    /// What it does next; without any it gives [`ANSWER`].
    pub fn will(&self, act: ScriptedResponse) {
        self.state.acts.lock().unwrap().push_back(act);
    }

    /// Lets go of what it holds, and holds nothing more.
    pub fn release(&self) {
        self.state.released.send_replace(usize::MAX);
    }

    /// Lets go of what it holds first, now or later.
    pub fn release_one(&self) {
        self.state.released.send_modify(|released| *released += 1);
    }

    pub fn seen(&self) -> Vec<ReceivedRequest> {
        self.state.seen.borrow().clone()
    }

    /// Waits until it was asked so often.
    pub async fn until_asked(&self, times: usize) {
        let mut seen = self.state.seen.subscribe();
        let asked = seen.wait_for(|seen| seen.len() >= times);
        // Generous: it only keeps a test that would wait for ever from doing so.
        tokio::time::timeout(Duration::from_mins(1), asked)
            .await
            .expect("the provider was not asked")
            .unwrap();
    }
}

async fn answer(State(state): State<Arc<Shared>>, uri: Uri, headers: HeaderMap, body: Bytes) -> Response<Body> {
    let seen = ReceivedRequest {
        at: Instant::now(),
        path: uri.path().into(),
        headers,
        body: String::from_utf8(body.to_vec()).unwrap(),
    };
    state.seen.send_modify(|all| all.push(seen));
    let act = state
        .acts
        .lock()
        .unwrap()
        .pop_front()
        .unwrap_or_else(|| ScriptedResponse::json(200, ANSWER));
    let mut response = Response::builder().status(StatusCode::from_u16(act.status).unwrap());
    for (name, value) in act.headers {
        response = response.header(name, value);
    }
    if matches!(act.steps.first(), Some(Step::Hold)) {
        hold(&state).await;
    }
    let steps = stream::unfold((state, VecDeque::from(act.steps)), |(state, mut steps)| async move {
        loop {
            return match steps.pop_front()? {
                Step::Send(text) => Some((Ok(Bytes::from(text)), (state, steps))),
                Step::Hold => {
                    hold(&state).await;
                    continue;
                }
                Step::Cut => Some((Err(std::io::Error::other("cut")), (state, steps))),
                Step::Endless(text) => {
                    steps.push_front(Step::Endless(text.clone()));
                    Some((Ok(Bytes::from(text)), (state, steps)))
                }
            };
        }
    });
    response.body(Body::from_stream(steps)).unwrap()
}

async fn hold(state: &Shared) {
    let number = state.holds.fetch_add(1, Ordering::Relaxed);
    let mut released = state.released.subscribe();
    let _ = released.wait_for(|released| *released > number).await;
}
