//! How soon an event is in the hot state of an Agent of another pod, how many of them pass, and how much memory a sensor pod uses:
//! `cargo bench --bench sensor`, part of `make bench`.
//!
//! Signed webhooks to a sensor pod on loopback; from there the whole way: outbox, TLS to the leader's relay, gateway, worker,
//! and back the acknowledgement that the event is in the worker's journal, where the field changes with it. Sensor, gateway and worker
//! are processes, as in their pods; each keeps its files on the disk.
#![allow(clippy::expect_used, reason = "a bench that cannot run ends")]

use std::fmt::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use agentloop::link::deliveries::{ReceiverTerms, SensorDirectives};
use agentloop::link::messages::BudgetTerms;
use agentloop::link::pod::SensorPodConfig;
use agentloop::link::sensor_messages::SensorTerms;
use futures::StreamExt;
use reqwest::{Client, StatusCode};
use ring::hmac;
use serde_json::{Value, json};
use tempfile::TempDir;

#[path = "figures.rs"]
mod figures;
#[path = "leader.rs"]
mod leader;
#[path = "process.rs"]
mod process;

use figures::{figures, say};
use leader::{SENSOR_TOKEN, Words};
use process::Process;

/// Events one by one; those before the first that is measured.
const EVENTS: usize = 1_000;
const WARM: usize = 100;
/// Events that come as fast as they are taken, and how many senders there are.
const CROWD: usize = 5_000;
const SENDERS: usize = 16;
const KEY: &str = "a key of the bench";
/// Longest wait for anything.
const WAIT_TIMEOUT: Duration = Duration::from_mins(1);

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut harness = SensorHarness::start();
    harness.attached().await;
    let idle = harness.sensor.kibibytes("VmRSS:");
    let (mut taken, mut arrived) = (Vec::new(), Vec::new());
    for number in 0..WARM + EVENTS {
        let start = Instant::now();
        assert_eq!(harness.sender.send(number).await, StatusCode::ACCEPTED);
        let answered = start.elapsed();
        let (at, _) = harness.word().await;
        if number >= WARM {
            taken.push(answered);
            arrived.push(at - start);
        }
    }
    figures("webhook_taken", taken);
    figures("webhook_to_hot_state_across_pods", arrived);
    harness.crowd().await;
    say(&format!("FIGURE sensor_pod_rss_idle {:.1} MiB", mebibytes(idle)));
    let (now, most) = (harness.sensor.kibibytes("VmRSS:"), harness.sensor.kibibytes("VmHWM:"));
    say(&format!(
        "FIGURE sensor_pod_rss_after_{} {:.1} MiB, {:.1} at most, {:.1} of them its own",
        WARM + EVENTS + CROWD,
        mebibytes(now),
        mebibytes(most),
        mebibytes(harness.sensor.kibibytes("RssAnon:"))
    ));
}

fn mebibytes(kibibytes: u64) -> f64 {
    f64::from(u32::try_from(kibibytes).expect("less than 4 TiB")) / 1024.0
}

/// The three processes and who they speak to.
struct SensorHarness {
    words: Words,
    sensor: Process,
    _gateway: Process,
    _worker: Process,
    sender: Sender,
    _directory: TempDir,
}

impl SensorHarness {
    fn start() -> Self {
        let directory = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).expect("the target directory can be written");
        let terms = terms();
        let receiver = ReceiverTerms {
            uid: "agent-uid".into(),
            name: "a".into(),
            revision: 0,
        };
        let directives = SensorDirectives {
            terms: Some(terms.clone()),
            receivers: Some(vec![receiver]),
        };
        let (leader, words) = leader::start(BudgetTerms::default(), Some(directives));
        let link = format!("https://{}", leader.address);
        let dir = directory.path();
        for name in ["journal", "record", "outbox"] {
            std::fs::create_dir(dir.join(name)).expect("a directory is made");
        }
        for (name, text) in [
            ("ca.crt", leader.ca.as_str()),
            ("token", "token"),
            ("sensor-token", SENSOR_TOKEN),
            ("key", KEY),
            ("script", SCRIPT),
        ] {
            std::fs::write(dir.join(name), text).expect("a file is written");
        }
        // Free at this moment: the sensor pod takes it right away.
        let (listener, webhook) = leader::listen();
        drop(listener);
        let config = SensorPodConfig {
            namespace: "ns".into(),
            link_url: link.clone(),
            terms,
            allowed_ranges: Vec::new(),
            denied_ranges: Vec::new(),
        };
        let agent =
            json!({"namespace": "ns", "name": "a", "uid": "agent-uid", "epoch": 1, "linkUrl": link, "spec": spec()});
        Self {
            words,
            sensor: start(
                "sensor",
                dir,
                &json!(config),
                &[("AGENTLOOP_WEBHOOK_ADDRESS", webhook.to_string())],
            ),
            _gateway: start("gateway", dir, &agent, &[]),
            _worker: start("worker", dir, &agent, &[("AGENTLOOP_POD_UID", "pod-1".into())]),
            sender: Sender {
                client: Client::builder()
                    .no_proxy()
                    .tls_certs_only([])
                    .build()
                    .expect("a client needs nothing"),
                url: format!("http://{webhook}/"),
                key: hmac::Key::new(hmac::HMAC_SHA256, KEY.as_bytes()),
            },
            _directory: directory,
        }
    }

    /// Waits until one event has gone the whole way.
    async fn attached(&mut self) {
        let start = Instant::now();
        while self.sender.try_send("first").await != Some(StatusCode::ACCEPTED) {
            assert!(start.elapsed() < WAIT_TIMEOUT, "the sensor pod takes nothing");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.word().await;
    }

    /// The next word of the worker.
    async fn word(&mut self) -> (Instant, i64) {
        let word = tokio::time::timeout(WAIT_TIMEOUT, self.words.recv()).await;
        word.expect("the worker has it in time").expect("the leader runs")
    }

    /// As many events as are taken at once.
    async fn crowd(&mut self) {
        let start = Instant::now();
        let sender = &self.sender;
        let sent = futures::stream::iter(WARM + EVENTS..WARM + EVENTS + CROWD)
            .map(|number| async move { assert_eq!(sender.send(number).await, StatusCode::ACCEPTED) })
            .buffer_unordered(SENDERS)
            .count();
        let sent = sent.await;
        let taken = start.elapsed();
        // The last event has a number of its own: when it arrives, all before it have arrived.
        assert_eq!(self.sender.send(WARM + EVENTS + sent).await, StatusCode::ACCEPTED);
        let mut last = self.word().await;
        while let Ok(Some(word)) = tokio::time::timeout(Duration::from_secs(2), self.words.recv()).await {
            last = word;
        }
        let per_second = |time: Duration| f64::from(u32::try_from(CROWD).expect("few")) / time.as_secs_f64();
        say(&format!("FIGURE webhooks_taken_per_second {:.0}", per_second(taken)));
        say(&format!(
            "FIGURE events_delivered_per_second {:.0}",
            per_second(last.0 - start)
        ));
    }
}

/// Looks around once, and sleeps.
const SCRIPT: &str = r#"{"turns": [{"text": "I wait.", "yield": {"sleep": 86400, "reason": "nothing to do"}}]}"#;

fn spec() -> Value {
    json!({
        "instructions": "You watch a queue.",
        "model": {"api": "Scripted", "name": "waits", "scripted": {"configMapKeyRef": {"name": "waits", "key": "script"}}},
        "hotState": {"fields": [{"name": "last", "type": "Object"}]},
    })
}

/// Each event writes a field.
fn terms() -> SensorTerms {
    let spec = json!({
        "agentNames": ["a"],
        "source": {"webhook": {"scheme": "GitHub", "secretKeyRef": {"name": "key", "key": "key"}}},
        "updates": [{"field": "last", "value": "payload"}],
        "limits": {"perMinute": 60_000},
    });
    SensorTerms {
        uid: "sensor-uid".into(),
        name: "s".into(),
        generation: 1,
        spec: serde_json::from_value(spec).expect("a Sensor"),
    }
}

/// Sends webhooks as GitHub signs them.
struct Sender {
    client: Client,
    url: String,
    key: hmac::Key,
}

impl Sender {
    async fn send(&self, number: usize) -> StatusCode {
        self.try_send(&number.to_string())
            .await
            .expect("the sensor pod answers")
    }

    async fn try_send(&self, id: &str) -> Option<StatusCode> {
        let body = json!({"id": id, "text": "something happened ".repeat(20)}).to_string();
        let mut signature = String::from("sha256=");
        for byte in hmac::sign(&self.key, body.as_bytes()).as_ref() {
            write!(signature, "{byte:02x}").expect("a String takes it");
        }
        let request = self
            .client
            .post(&self.url)
            .header("x-hub-signature-256", signature)
            .header("x-github-delivery", id)
            .header("content-type", "application/json")
            .body(body);
        request.send().await.ok().map(|response| response.status())
    }
}

/// A role with its files in this directory.
fn start(role: &str, dir: &Path, config: &Value, more: &[(&str, String)]) -> Process {
    let token = if role == "sensor" { "sensor-token" } else { "token" };
    let files = [
        ("AGENTLOOP_SOCKET", "socket"),
        ("AGENTLOOP_RECORD_DIR", "record"),
        ("AGENTLOOP_JOURNAL_DIR", "journal"),
        ("AGENTLOOP_OUTBOX_DIR", "outbox"),
        ("AGENTLOOP_SCRIPT_FILE", "script"),
        ("AGENTLOOP_SENSOR_KEY_FILE", "key"),
        ("AGENTLOOP_LINK_TOKEN_FILE", token),
        ("AGENTLOOP_LINK_CA_FILE", "ca.crt"),
    ];
    let files = files.map(|(name, file)| (name, dir.join(file).into_os_string()));
    let more = more.iter().map(|(name, value)| (*name, value.into()));
    Process::start(role, config, files.into_iter().chain(more))
}
