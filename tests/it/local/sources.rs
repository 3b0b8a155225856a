//! Sensors that a cluster runs in pods of their own, in a run without a cluster: against third-party peers.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use pretty_assertions::assert_eq;
use serde_json::{Value, json};
use tokio::process::{Child, Command};

use super::process::{CANARY, LocalHarness, Run, WAIT_TIMEOUT, agent, records, script};
use crate::support::clusters::has;
use crate::support::ports::free_port;

const KEY: &str = "canary-3c9a-key";

/// Writes what the stream has said so far into a file; each line of the file `events` is an event. `/now` has its last line,
/// for those who bring the key.
const SERVER: &str = r#"
import http.server, sys, time, pathlib
events = pathlib.Path(sys.argv[2])
class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.headers.get("Authorization") != "Bearer canary-3c9a-key":
            return self.send_error(401)
        if self.path == "/now":
            body = events.read_text().splitlines()[-1].encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            return self.wfile.write(body)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        last = int(self.headers.get("Last-Event-ID", "0"))
        while True:
            for line in events.read_text().splitlines()[last:]:
                last += 1
                self.wfile.write(f"id: {last}\ndata: {line}\n\n".encode())
            time.sleep(0.05)
    def log_message(self, *words):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Server).serve_forever()
"#;

fn serve(port: u16, events: &Path) -> Child {
    Command::new("python3")
        .args(["-c", SERVER, &port.to_string(), events.to_str().unwrap()])
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}

fn secret() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "keys" },
        "stringData": { "Authorization": format!("Bearer {KEY}"), "hook": KEY },
    })
}

/// A Sensor `world` for Agent `a` that stores what it receives and wakes.
fn sensor(source: &Value) -> Value {
    json!({
        "apiVersion": "agentloop.dev/v1alpha1", "kind": "Sensor", "metadata": { "name": "world" },
        "spec": {
            "agentNames": ["a"], "source": source,
            "updates": [{ "field": "last", "value": "payload.n" }],
            "notification": { "text": "'It is now ' + string(payload.n)" },
        },
    })
}

/// An Agent that sleeps until the Sensor wakes it, and all that belongs to it.
fn waiting(harness: &LocalHarness, source: &Value) {
    let turns = json!([{ "yield": { "sleep": 3600, "wake_early_if": ["sensor/world"] } }]);
    let fields = json!({ "hotState": { "fields": [{ "name": "last", "type": "Number" }] } });
    let all = [script("a", &turns), agent("a", &fields), secret(), sensor(source)];
    harness.write("all.yaml", &all);
}

/// How many events of the Sensor took effect in this run.
pub fn updates(run: &Run) -> usize {
    let lines = run.lines().into_iter();
    lines.filter(|line| line["event"] == "autonomy:sensor_updated").count()
}

/// How many events of the Sensor the journal has, over all runs: of a copy, as a person takes one.
fn in_journal(harness: &LocalHarness) -> usize {
    let journal = harness.state().join("volumes/default/a-state/worker");
    let copy = harness.path("copy.sqlite");
    let out = std::fs::File::create(&copy).unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_agentloop"));
    let copied = command
        .arg("journal")
        .arg("--journal-dir")
        .arg(journal)
        .stdout(out)
        .stderr(Stdio::null())
        .status();
    if !copied.unwrap().success() {
        return 0;
    }
    let kinds = records(&copy).into_iter();
    kinds.filter(|(kind, ..)| kind == "SensorUpdated").count()
}

pub async fn until<T>(run: &Run, what: &str, mut find: impl FnMut(&Run) -> Option<T>) -> T {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    loop {
        if let Some(found) = find(run) {
            return found;
        }
        assert!(Instant::now() < deadline, "never {what}:\n{}\n{}", run.out(), run.err());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits for `events` events in all, each of which woke the loop.
async fn until_events(run: &mut Run, events: usize) {
    until(run, &format!("{events} events"), |run| {
        (updates(run) >= events).then_some(())
    })
    .await;
    assert_eq!(updates(run), events);
    run.until("a", "asleep again", |line| line["state"] == "Sleeping").await;
}

/// The last line about the Sensor.
pub fn said(run: &Run) -> Value {
    let mut lines = run.lines().into_iter().filter(|line| line["type"] == "sensor");
    lines.next_back().unwrap_or(Value::Null)
}

#[tokio::test]
async fn a_page_is_requested_with_the_headers_of_a_secret_and_each_change_wakes_once() {
    if !has("python3") {
        return;
    }
    let mut harness = LocalHarness::new();
    let (port, events) = (free_port(), harness.path("events"));
    std::fs::write(&events, "{\"n\": 1}\n").unwrap();
    let _server = serve(port, &events);
    let http = json!({ "url": format!("http://127.0.0.1:{port}/now"), "headersSecretRef": { "name": "keys" } });
    waiting(&harness, &json!({ "poll": { "intervalSeconds": 1, "http": http } }));
    let mut run = harness.run(&["--events"]);
    until_events(&mut run, 1).await;
    std::fs::write(&events, "{\"n\": 2}\n").unwrap();
    until_events(&mut run, 2).await;
    until(&run, "ready", |run| (said(run)["ready"] == "True").then_some(())).await;
    assert_eq!(said(&run)["source"], "Poll");
    run.interrupt().await;
    assert_eq!(run.cause().await, "Interrupted");
    assert!(!format!("{}{}", run.out(), run.err()).contains(CANARY));
}

#[tokio::test]
async fn a_stream_continues_after_its_last_event_when_the_run_was_killed() {
    if !has("python3") {
        return;
    }
    let mut harness = LocalHarness::new();
    let (port, events) = (free_port(), harness.path("events"));
    std::fs::write(&events, "{\"n\": 1}\n{\"n\": 2}\n").unwrap();
    let _server = serve(port, &events);
    let sse = json!({ "url": format!("http://127.0.0.1:{port}/events"), "headersSecretRef": { "name": "keys" } });
    waiting(&harness, &json!({ "stream": { "sse": sse } }));
    let mut run = harness.run(&["--events"]);
    until(&run, "two events", |run| (updates(run) == 2).then_some(())).await;
    run.kill().await;
    std::fs::write(&events, "{\"n\": 1}\n{\"n\": 2}\n{\"n\": 3}\n").unwrap();
    let mut again = harness.run(&["--events"]);
    until(&again, "one more", |_| (in_journal(&harness) >= 3).then_some(())).await;
    again
        .until("a", "asleep again", |line| line["state"] == "Sleeping")
        .await;
    assert_eq!(in_journal(&harness), 3, "the first two are known:\n{}", again.out());
    again.interrupt().await;
    assert_eq!(again.cause().await, "Interrupted");
}

/// Signs as the docs say, with the real openssl, and sends.
pub async fn send(url: &str, id: &str, body: &str, key: &str) -> u16 {
    let script = r#"printf %s "$BODY" | openssl dgst -sha256 -hmac "$KEY" -hex -r | cut -d' ' -f1"#;
    let signed = Command::new("sh")
        .args(["-c", script])
        .envs([("BODY", body), ("KEY", key)])
        .output()
        .await
        .unwrap();
    let tag = String::from_utf8(signed.stdout).unwrap();
    let client = reqwest::Client::builder()
        .no_proxy()
        .tls_certs_only([])
        .build()
        .unwrap();
    let request = || {
        client
            .post(url)
            .header("X-Hub-Signature-256", format!("sha256={}", tag.trim()))
            .header("X-GitHub-Delivery", id)
            .body(body.to_owned())
            .send()
    };
    let deadline = Instant::now() + WAIT_TIMEOUT;
    loop {
        match request().await {
            // Senders send again what is answered so.
            Ok(answer) if answer.status().as_u16() != 503 => return answer.status().as_u16(),
            _ => assert!(Instant::now() < deadline, "nobody listens at {url}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_signed_webhook_wakes_once_and_an_accepted_one_survives_a_kill() {
    if !has("openssl") {
        return;
    }
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut harness = LocalHarness::new();
    let webhook = json!({ "scheme": "GitHub", "secretKeyRef": { "name": "keys", "key": "hook" } });
    waiting(&harness, &json!({ "webhook": webhook }));
    let port = free_port().to_string();
    let mut run = harness.run(&["--events", "--webhook-port", &port]);
    let find = |run: &Run| said(run)["url"].as_str().map(str::to_owned);
    let url = until(&run, "said where to send", find).await;
    assert_eq!(url, format!("http://127.0.0.1:{port}/"));
    assert_eq!(send(&url, "1", r#"{"n": 1}"#, "another key").await, 401);
    assert_eq!(send(&url, "1", r#"{"n": 1}"#, KEY).await, 202);
    assert_eq!(send(&url, "1", r#"{"n": 1}"#, KEY).await, 200);
    until_events(&mut run, 1).await;
    assert_eq!(send(&url, "2", r#"{"n": 2}"#, KEY).await, 202);
    // With its controller, gateway, worker and sensor, whatever they were at.
    run.kill().await;
    let mut again = harness.run(&["--events", "--webhook-port", &port]);
    assert_eq!(send(&url, "2", r#"{"n": 2}"#, KEY).await, 200);
    assert_eq!(send(&url, "3", r#"{"n": 3}"#, KEY).await, 202);
    until(&again, "the rest", |_| (in_journal(&harness) >= 3).then_some(())).await;
    again
        .until("a", "asleep again", |line| line["state"] == "Sleeping")
        .await;
    assert_eq!(in_journal(&harness), 3, "{}", again.out());
    again.interrupt().await;
    assert_eq!(again.cause().await, "Interrupted");
}

#[tokio::test]
async fn a_missing_secret_and_a_port_in_use_are_errors() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let webhook = |name: &str, key: &str| json!({ "webhook": { "scheme": "GitHub", "secretKeyRef": { "name": name, "key": key } } });
    let page = json!({ "poll": { "http": { "url": "https://example.com/", "headersSecretRef": { "name": "none" } } } });
    for (source, says) in [
        (
            page,
            "spec.source.poll.http.headersSecretRef: Secret none not found in these files",
        ),
        (
            webhook("none", "hook"),
            "spec.source.webhook.secretKeyRef: Secret none not found in these files",
        ),
        (
            webhook("keys", "other"),
            "spec.source.webhook.secretKeyRef: Secret keys has no key other",
        ),
        (webhook("keys", "hook"), "--webhook-port: Sensor world would listen on"),
    ] {
        let mut harness = LocalHarness::new();
        waiting(&harness, &source);
        let mut run = harness.run(&["--webhook-port", &port]);
        let status = run.ended().await;
        assert_eq!(status.code(), Some(2), "{says}:\n{}\n{}", run.out(), run.err());
        assert!(run.err().contains(says), "{says}: {}", run.err());
    }
}
