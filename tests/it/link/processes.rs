//! An event on its whole way through real processes: sensor, gateway and worker, each of which is killed in the middle.

use std::process::Stdio;

use agentloop::api::status::LoopState;
use agentloop::link::messages::BudgetTerms;
use pretty_assertions::assert_eq;
use tempfile::TempDir;
use tokio::process::{Child, Command};

use super::deliveries::{SensorPod, WAIT_TIMEOUT, directives, pod, sensor, until_reported, webhook};
use super::*;

/// Sleeps for an hour, again and again, unless the Sensor wakes it.
const SCRIPT: &str = "turns: [{yield: {sleep: 3600, wake_early_if: [sensor/s]}}]";
const EVENTS: i64 = 30;
/// So many of them come to a loop that sleeps.
const ALONE: i64 = 5;

/// Gateway and worker of Agent `x`.
struct AgentPod {
    dir: TempDir,
    url: String,
    gateway: Child,
    worker: Child,
}

impl AgentPod {
    fn start(harness: &LinkHarness) -> Self {
        let dir = pod(harness, TOKEN);
        std::fs::write(dir.path().join("script"), SCRIPT).unwrap();
        for volume in ["record", "journal"] {
            std::fs::create_dir(dir.path().join(volume)).unwrap();
        }
        let url = harness.url("");
        Self {
            gateway: role(&dir, &url, "gateway"),
            worker: role(&dir, &url, "worker"),
            dir,
            url,
        }
    }

    async fn kill_gateway(&mut self) {
        self.gateway.kill().await.unwrap();
        self.gateway = role(&self.dir, &self.url, "gateway");
    }

    async fn kill_worker(&mut self) {
        self.worker.kill().await.unwrap();
        self.worker = role(&self.dir, &self.url, "worker");
    }

    /// One value of the journal, once it has no writer any more.
    async fn query(&mut self, sql: &str) -> i64 {
        self.worker.kill().await.unwrap();
        let journal = rusqlite::Connection::open(self.dir.path().join("journal/journal.sqlite")).unwrap();
        journal.query_row(sql, [], |row| row.get(0)).unwrap()
    }
}

fn role(dir: &TempDir, link: &str, role: &str) -> Child {
    let config = json!({
        "namespace": "a", "name": "x", "uid": "x-uid", "epoch": EPOCH, "linkUrl": link,
        "spec": {
            "instructions": "Wait.", "loop": {"minDelayMilliseconds": 1, "maxDelayMilliseconds": 10},
            "guardrails": {"loopDetection": {"mode": "Disabled"}},
            "model": {
                "api": "Scripted", "name": "scripted", "maxOutputTokens": 200,
                "scripted": {"configMapKeyRef": {"name": "s", "key": "script"}},
            },
        },
    });
    let path = |name: &str| dir.path().join(name);
    Command::new(env!("CARGO_BIN_EXE_agentloop"))
        .arg(role)
        .env("AGENTLOOP_POD", config.to_string())
        .env("AGENTLOOP_POD_UID", "u2")
        .env("AGENTLOOP_SOCKET", path("gateway.sock"))
        .env("AGENTLOOP_RECORD_DIR", path("record"))
        .env("AGENTLOOP_JOURNAL_DIR", path("journal"))
        .env("AGENTLOOP_SCRIPT_FILE", path("script"))
        .env("AGENTLOOP_LINK_TOKEN_FILE", path("token"))
        .env("AGENTLOOP_LINK_CA_FILE", path("ca.crt"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}

/// Waits until the loop sleeps, and says how many turns it has completed.
async fn until_asleep(harness: &LinkHarness, after: i64) -> i64 {
    let asleep = async {
        loop {
            let said = harness
                .loops
                .last_report(&x(), "u2")
                .and_then(|heard| heard.report.loop_);
            match said {
                Some(said) if said.state == LoopState::Sleeping && said.counts.turns > after => {
                    return said.counts.turns;
                }
                _ => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    };
    let turns = timeout(WAIT_TIMEOUT, asleep).await;
    turns.unwrap_or_else(|_| panic!("it does not sleep: {:?}", harness.loops.last_report(&x(), "u2")))
}

/// Sends one event and waits until it was taken: 202, or 200 when the answer was lost with the process.
async fn send(heard: &SensorPod, n: i64) {
    let (id, text) = (n.to_string(), format!("{{\"n\": {n}}}"));
    let taken = heard.send(&id, &text).await;
    assert!([StatusCode::ACCEPTED, StatusCode::OK].contains(&taken), "{n}: {taken}");
}

#[tokio::test]
async fn each_webhook_takes_effect_and_wakes_once_under_kills_of_sensor_worker_and_gateway() {
    let harness = LinkHarness::start().await;
    // As ledger and reconciler of Sensors say it: nothing limits the calls, and no Sensor runs in the pod.
    harness.loops.set_budget_terms(&x(), Some(BudgetTerms::default()));
    harness.loops.set_sensors(&x(), Some(Vec::new()), None);
    harness.relay.expect_pod(&sensor(), "p1", directives(&webhook()));
    let mut heard = SensorPod::start(&harness);
    let mut agent = AgentPod::start(&harness);
    let mut turns = until_asleep(&harness, 0).await;
    assert_eq!(turns, 1);
    // One by one, each to a sleeping loop: an event is one wake and one turn, whichever process died just before.
    for n in 1..=ALONE {
        match n {
            2 => heard.kill().await,
            3 => agent.kill_worker().await,
            4 => agent.kill_gateway().await,
            _ => {}
        }
        send(&heard, n).await;
        turns = until_asleep(&harness, turns).await;
        assert_eq!(turns, 1 + n);
    }
    for n in ALONE + 1..=EVENTS {
        match n {
            10 => heard.kill().await,
            18 => agent.kill_worker().await,
            26 => agent.kill_gateway().await,
            _ => {}
        }
        send(&heard, n).await;
    }
    let report = until_reported(&harness, "an empty outbox", |report| report.pending_deliveries == 0).await;
    assert_eq!(report.report.totals.events, EVENTS);
    let turns = until_asleep(&harness, turns).await;
    assert!(turns <= 1 + EVENTS, "{turns} turns of {EVENTS} events");
    let updates = "SELECT count(*) FROM journal WHERE kind = 'SensorUpdated'";
    assert_eq!(agent.query(updates).await, EVENTS);
}
