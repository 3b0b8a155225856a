//! A server that receives the responses to tasks, on this machine where pods of the test cluster reach it.

use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use axum::{Json, Router};
use serde_json::Value;
use tokio::runtime::Runtime;

use super::cluster::runtime;
use crate::support::clusters::host_for_pods;

/// One request, whether it was accepted or not.
#[derive(Clone, Debug)]
pub struct ReceivedResponse {
    /// The idempotency key.
    pub key: String,
    pub body: Value,
}

#[derive(Default)]
struct Received {
    all: Vec<ReceivedResponse>,
    /// The first accepted request of each key, in order: what a server that ignores known keys has.
    accepted: Vec<ReceivedResponse>,
}

struct Shared {
    received: Mutex<Received>,
    news: Condvar,
    /// Each request whose number is a multiple of this is answered with 503 after it was read; 0: none.
    refuses_each: usize,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Received> {
        self.received.lock().expect("no test has panicked with it")
    }
}

/// A running server; ends with its value.
pub struct ResponseReceiver {
    shared: Arc<Shared>,
    address: SocketAddr,
    _runtime: Runtime,
}

impl ResponseReceiver {
    /// A server that answers every request whose number is a multiple of `refuses_each` with 503, after it has read it.
    pub fn start(refuses_each: usize) -> Self {
        let host = host_for_pods();
        let shared = Arc::new(Shared {
            received: Mutex::default(),
            news: Condvar::new(),
            refuses_each,
        });
        let runtime = runtime();
        let listener = tokio::net::TcpListener::bind((host, 0));
        let listener = runtime.block_on(listener).expect("the address of the node");
        let address = listener.local_addr().expect("it listens");
        let router = Router::new()
            .route("/responses", post(receive))
            .with_state(Arc::clone(&shared));
        runtime.spawn(async move { axum::serve(listener, router).await });
        Self {
            shared,
            address,
            _runtime: runtime,
        }
    }

    pub fn url(&self) -> String {
        format!("http://{}/responses", self.address)
    }

    /// Every request, in order.
    pub fn all(&self) -> Vec<ReceivedResponse> {
        self.shared.lock().all.clone()
    }

    /// The first accepted request of each key, in order.
    pub fn accepted(&self) -> Vec<ReceivedResponse> {
        self.shared.lock().accepted.clone()
    }

    /// Waits until `count` responses are accepted; whether they were within this time.
    pub fn wait_for(&self, count: usize, limit: Duration) -> bool {
        let too_few = |received: &mut Received| received.accepted.len() < count;
        let waited = self.shared.news.wait_timeout_while(self.shared.lock(), limit, too_few);
        !waited.expect("no test has panicked with it").1.timed_out()
    }

    /// The same, which must happen.
    pub fn until_accepted(&self, count: usize, seconds: u64) -> Vec<ReceivedResponse> {
        let begun = Instant::now();
        let is_there = self.wait_for(count, Duration::from_secs(seconds));
        let accepted = self.accepted();
        let so_far = accepted.len();
        assert!(is_there, "{so_far} of {count} responses after {:?}", begun.elapsed());
        accepted
    }
}

async fn receive(State(shared): State<Arc<Shared>>, headers: HeaderMap, Json(body): Json<Value>) -> StatusCode {
    let key = headers.get("idempotency-key").and_then(|key| key.to_str().ok());
    let Some(key) = key.map(str::to_owned) else {
        return StatusCode::BAD_REQUEST;
    };
    let response = ReceivedResponse { key, body };
    let mut received = shared.lock();
    received.all.push(response.clone());
    if shared.refuses_each > 0 && received.all.len().is_multiple_of(shared.refuses_each) {
        return StatusCode::SERVICE_UNAVAILABLE;
    }
    if !received.accepted.iter().any(|known| known.key == response.key) {
        received.accepted.push(response);
    }
    drop(received);
    shared.news.notify_all();
    StatusCode::NO_CONTENT
}
