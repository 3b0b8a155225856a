//! What the gateway adds to a model call: `cargo bench --bench gateway`, part of `make bench`.
//!
//! One worker asks a server on loopback that answers at once: directly, through a gateway without limits, through one
//! with two, and through one with two whose record lies in memory, where a flush is free. In turns, so that all see the
//! same machine. Gateways are processes, as in a pod. Beside them the disk itself: one page written over and flushed.
#![allow(clippy::expect_used, reason = "a bench that cannot run ends")]

use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use agentloop::api::amount::LimitAmounts;
use agentloop::api::price::ModelPrice;
use agentloop::link::messages::{AccountRemaining, AccountTerms, BudgetTerms, LimitName};
use agentloop::link::socket::CALL_HEADER;
use axum::body::Bytes;
use axum::http::header::CONTENT_TYPE;
use axum::routing::post;
use axum::serve::ListenerExt;
use axum::{Json, Router};
use reqwest::Client;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;

const CALLS: usize = 2_000;
/// Calls before the first that is measured: the record's log gets its size.
const WARM: usize = 500;
/// Messages of a request, and bytes of each.
const MESSAGES: usize = 40;
const MESSAGE_BYTES: usize = 500;
const PAGE: usize = 4096;

#[path = "leader.rs"]
mod leader;

#[path = "gateway_process.rs"]
mod gateway_process;

use gateway_process::GatewayProcess;
use leader::{PLENTY, aside, listen};

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let model = model();
    let direct = Way {
        client: Client::builder()
            .no_proxy()
            .tls_certs_only([])
            .build()
            .expect("a client needs nothing"),
        url: format!("http://{model}"),
    };
    let on_disk = || TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).expect("the target directory can be written");
    let in_memory = TempDir::new_in("/dev/shm").expect("/dev/shm can be written");
    let gateways = [
        Gateway::start(model, on_disk(), BudgetTerms::default()).await,
        Gateway::start(model, on_disk(), limits()).await,
        Gateway::start(model, in_memory, limits()).await,
    ];
    let disk = Disk::new(gateways[0].process.directory.path());
    let mut times: [Vec<Duration>; 5] = Default::default();
    for call in 0..WARM + CALLS {
        let body = request(call);
        let mut taken = vec![disk.flush(), direct.ask(call, &body).await];
        for gateway in &gateways {
            taken.push(gateway.way.ask(call, &body).await);
            gateway.acknowledge(call).await;
        }
        if call >= WARM {
            for (all, one) in times.iter_mut().zip(taken) {
                all.push(one);
            }
        }
    }
    let [disk, direct, free, limited, no_disk] = times.map(percentiles);
    say("disk_flush", disk);
    say("model_call_direct", direct);
    say("gateway_adds_without_limits", less(free, direct));
    say("gateway_adds_with_limits", less(limited, direct));
    say("gateway_adds_with_limits_in_memory", less(no_disk, direct));
}

/// p50 and p99 in milliseconds.
fn percentiles(mut times: Vec<Duration>) -> [f64; 2] {
    times.sort_unstable();
    [50, 99].map(|share| times[(times.len() - 1) * share / 100].as_secs_f64() * 1e3)
}

fn less(all: [f64; 2], direct: [f64; 2]) -> [f64; 2] {
    [all[0] - direct[0], all[1] - direct[1]]
}

#[expect(clippy::print_stdout, reason = "figures go to stdout")]
fn say(name: &str, [p50, p99]: [f64; 2]) {
    println!("FIGURE {name}_p50 {p50:.3} ms");
    println!("FIGURE {name}_p99 {p99:.3} ms");
}

/// A conversation that grows by one message with each call.
fn request(call: usize) -> Vec<u8> {
    let message = |number: usize| {
        let role = if number.is_multiple_of(2) { "user" } else { "assistant" };
        json!({"role": role, "content": format!("{number:09} ").repeat(MESSAGE_BYTES / 10)})
    };
    let messages: Vec<Value> = (call..call + MESSAGES).map(message).collect();
    let tool = json!({"type": "function", "function": {"name": "yield", "parameters": {"type": "object"}}});
    json!({"model": "m", "messages": messages, "tools": [tool]})
        .to_string()
        .into_bytes()
}

/// A model that needs no time. Its bill stays below the bound of each request.
fn model() -> SocketAddr {
    let (listener, address) = listen();
    let answer = json!({
        "id": "a", "object": "chat.completion", "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Nothing to do. ".repeat(60)}}],
        "usage": {"prompt_tokens": 5_000, "completion_tokens": 100, "total_tokens": 5_100},
    });
    let answer = move |_: Bytes| async move { Json(answer) };
    aside(|| async {
        let listener = TcpListener::from_std(listener).expect("it can be awaited");
        let router = Router::new().route("/v1/chat/completions", post(answer));
        axum::serve(listener.tap_io(|stream| drop(stream.set_nodelay(true))), router)
            .await
            .expect("the model serves");
    });
    address
}

/// How the worker comes to the model.
struct Way {
    client: Client,
    url: String,
}

impl Way {
    /// From the first byte sent to the last one read.
    async fn ask(&self, call: usize, body: &[u8]) -> Duration {
        let request = self
            .client
            .post(format!("{}/v1/chat/completions", self.url))
            .header(CALL_HEADER, format!("t{}c1a1", call + 1))
            .header(CONTENT_TYPE, "application/json")
            .body(body.to_vec());
        let start = Instant::now();
        let response = request.send().await.expect("it answers");
        let status = response.status();
        let answer = response.bytes().await.expect("it answers whole");
        let taken = start.elapsed();
        assert!(status.is_success(), "{}", String::from_utf8_lossy(&answer));
        taken
    }
}

struct Gateway {
    process: GatewayProcess,
    way: Way,
}

impl Gateway {
    /// A gateway with these limits.
    async fn start(model: SocketAddr, directory: TempDir, terms: BudgetTerms) -> Self {
        let spec = json!({"model": {
            "api": "OpenAIChat", "name": "m", "baseURL": format!("http://{model}/v1/"), "maxOutputTokens": 1_000,
        }});
        let process = GatewayProcess::start(spec, directory, terms).await;
        let way = Way {
            client: process.client.clone(),
            url: "http://gateway".into(),
        };
        Self { process, way }
    }

    /// As the worker does once the answer is in its journal.
    async fn acknowledge(&self, call: usize) {
        let url = format!("http://gateway/v1/calls/t{}c1a1/ack", call + 1);
        let response = self.way.client.post(url).send().await;
        assert!(response.is_ok_and(|response| response.status().is_success()));
    }
}

/// A budget of tokens and one of money, both far away.
fn limits() -> BudgetTerms {
    let account = |name: &str, limits| AccountTerms {
        account: name.into(),
        limit: LimitName::Budget(name.into()),
        limits,
        per_agent: LimitAmounts::default(),
        recall: false,
        held: None,
        revision: 1,
        left: AccountRemaining::default(),
    };
    let tokens = LimitAmounts {
        tokens: Some(PLENTY),
        ..LimitAmounts::default()
    };
    let cost = LimitAmounts {
        cost: Some(PLENTY),
        ..LimitAmounts::default()
    };
    let price = ModelPrice {
        input_per_million: "3.00".into(),
        output_per_million: "15.00".into(),
        ..ModelPrice::default()
    };
    BudgetTerms {
        accounts: vec![account("team", tokens), account("platform", cost)],
        prices: [("m".to_owned(), price)].into(),
        min_output_tokens: 100,
        ..BudgetTerms::default()
    }
}

/// The disk that the records lie on.
struct Disk(File);

impl Disk {
    fn new(directory: &Path) -> Self {
        let file = File::create(directory.join("page")).expect("a file is made");
        let disk = Self(file);
        disk.flush();
        disk
    }

    /// What one commit costs at least: a page written over, and on the disk.
    fn flush(&self) -> Duration {
        let start = Instant::now();
        self.0.write_all_at(&[7; PAGE], 0).expect("a page is written");
        self.0.sync_all().expect("it is flushed");
        start.elapsed()
    }
}
