//! Sources against third-party peers: Debian's Prometheus, an MCP server, and streams that Python serves.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod tool;
mod web_socket;

use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use agentloop::egress::AddressPolicy;
use agentloop::sensor_pipeline::source::http::SourceTarget;
use agentloop::sensor_pipeline::source::ndjson::NdjsonListener;
use agentloop::sensor_pipeline::source::poll::{PollQuery, SourcePoller};
use agentloop::sensor_pipeline::source::sse::SseListener;
use agentloop::sensor_pipeline::source::tls::TlsFiles;
use agentloop::sensor_pipeline::source::{ArrivalOutcome, SourceArrival, SourceCursor, SourceFeed, SourceMessage};
use pretty_assertions::assert_eq;
use serde_json::json;
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::support::clusters::has;
use crate::support::ports::free_port;

const SOON: Duration = Duration::from_secs(30);

fn place(url: &str) -> SourceTarget {
    let _ = rustls::crypto::ring::default_provider().install_default();
    SourceTarget {
        url: url.parse().unwrap(),
        headers_dir: None,
        tls: TlsFiles::default(),
        policy: Arc::new(AddressPolicy::new(vec!["127.0.0.0/8".parse().unwrap()], vec![])),
        max_bytes: 10_000,
    }
}

async fn next(arrivals: &mut mpsc::Receiver<SourceArrival>) -> SourceMessage {
    let arrival = timeout(SOON, arrivals.recv()).await.unwrap().unwrap();
    arrival.answer.send(ArrivalOutcome::OnDisk).unwrap();
    arrival.message
}

/// A Prometheus that scrapes nothing.
fn prometheus(dir: &TempDir) -> (Child, String) {
    let port = free_port();
    let config = dir.path().join("prometheus.yaml");
    std::fs::write(&config, "global: {}\n").unwrap();
    let child = Command::new("prometheus")
        .arg(format!("--config.file={}", config.display()))
        .arg(format!("--storage.tsdb.path={}", dir.path().join("data").display()))
        .arg(format!("--web.listen-address=127.0.0.1:{port}"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    (child, format!("http://127.0.0.1:{port}/api/v1/query"))
}

fn poller(url: &str, query: &str) -> SourcePoller {
    SourcePoller {
        place: place(url),
        question: PollQuery::Prometheus { query: query.into() },
        interval: Duration::from_millis(100),
        timeout: Duration::from_secs(5),
    }
}

#[tokio::test]
async fn a_real_prometheus_is_queried_and_its_errors_are_reported() {
    if !has("prometheus") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (_prometheus, url) = prometheus(&dir);
    let (feed, mut arrivals) = SourceFeed::new();
    let query = r#"label_replace(vector(42.5), "a", "b", "", "")"#;
    let task = tokio::spawn(poller(&url, query).run(SourceCursor::default(), feed));
    // It may not listen yet: the poller tries again.
    let first = next(&mut arrivals).await;
    let expected = json!({"resultType": "vector", "result": [{"metric": {"a": "b"}, "value": 42.5}]});
    assert_eq!(
        serde_json::from_slice::<serde_json::Value>(&first.payload).unwrap(),
        expected
    );
    // The same at another time is byte for byte the same.
    assert_eq!(next(&mut arrivals).await.payload, first.payload);
    task.abort();

    let (feed, _arrivals) = SourceFeed::new();
    let mut condition = feed.condition();
    let task = tokio::spawn(poller(&url, "sum(").run(SourceCursor::default(), feed));
    let failed = timeout(SOON, condition.wait_for(|condition| condition.failure.is_some())).await;
    let said = failed.unwrap().unwrap().failure.clone().unwrap();
    let expected = "Prometheus rejected the query (bad_data); check spec.source.poll.prometheus.query";
    assert_eq!(said, expected);
    task.abort();
}

/// Serves numbered lines in chunks, and breaks off in the middle of a line.
const LINES: &str = r#"
import http.server, sys
class Lines(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served = 0
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "application/json;stream=watch")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        first, Lines.served = Lines.served, Lines.served + 3
        for n in range(first + 1, first + 4):
            self.chunk(f'{{"n": {n}')
            self.chunk("}\r\n\n")
        self.chunk('{"n": ')
        self.close_connection = True
    def chunk(self, text):
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())
    def log_message(self, *words):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Lines).serve_forever()
"#;

#[tokio::test]
async fn each_line_of_a_python_server_that_breaks_off_is_one_event() {
    if !has("python3") {
        return;
    }
    let port = free_port();
    let _server = Command::new("python3")
        .args(["-c", LINES, &port.to_string()])
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let listener = NdjsonListener {
        place: place(&format!("http://127.0.0.1:{port}/changes")),
        idle: Duration::from_secs(10),
    };
    let (feed, mut arrivals) = SourceFeed::new();
    let task = tokio::spawn(listener.run(feed));
    for n in 1..=7 {
        let payload: serde_json::Value = serde_json::from_slice(&next(&mut arrivals).await.payload).unwrap();
        assert_eq!(payload, json!({"n": n}));
    }
    task.abort();
}

/// Serves numbers as events and breaks off after every third; continues after the id that it is given.
const STREAM: &str = r#"
import http.server, sys
class Stream(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()
        last = int(self.headers.get("Last-Event-ID", "0"))
        self.wfile.write(b": hello\nretry: 10\n\n")
        for n in range(last + 1, last + 4):
            self.wfile.write(f"id: {n}\ndata: {{\"n\":\ndata: {n}}}\n\n".encode())
        self.wfile.write(b"data: cut off")
    def log_message(self, *words):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Stream).serve_forever()
"#;

#[tokio::test]
async fn a_python_stream_that_breaks_is_read_without_gaps_or_repeats() {
    if !has("python3") {
        return;
    }
    let port = free_port();
    let _server = Command::new("python3")
        .args(["-c", STREAM, &port.to_string()])
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let listener = SseListener {
        place: place(&format!("http://127.0.0.1:{port}/events")),
        idle: Duration::from_secs(10),
    };
    let (feed, mut arrivals) = SourceFeed::new();
    let task = tokio::spawn(listener.run(SourceCursor::default(), feed));
    for n in 1..=10 {
        let heard = next(&mut arrivals).await;
        assert_eq!(heard.id, Some(n.to_string()));
        let payload: serde_json::Value = serde_json::from_slice(&heard.payload).unwrap();
        assert_eq!(payload, json!({"n": n}));
    }
    task.abort();
}
