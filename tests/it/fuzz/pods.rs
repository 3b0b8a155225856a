//! What the pod of one tenant sends to the controller of all.

use std::time::Duration;

use agentloop::api::Agent;
use agentloop::link::events::PAGE_LINES;
use agentloop::link::messages::PodReport;
use agentloop::link::server::MAX_BODY_BYTES;
use agentloop::page::agent_rows::{StatusOrigin, row};
use agentloop::page::html::{document, parts};
use agentloop::page::view::{AgentView, PageView};
use jiff::tz::TimeZone;
use reqwest::{Client, StatusCode};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::mutation::{amplified, bent, mutated};
use super::rounds;
use crate::events::harness::{EDITOR, EPOCH, EventsHarness, agent_key, wait_until};
use crate::support::agents::agent;
use crate::support::tokens::token;

const AT: &str = "2026-11-22T14:00:00Z";

/// Route and message, each of which is accepted as it is, or needs what the controller of this test does not have.
fn samples() -> Vec<(&'static str, Value)> {
    let last = json!({"microseconds": 1200, "member": 0, "turn": 3});
    let counts = json!({"buckets": [0, 1], "sumMicroseconds": 1500, "last": last});
    let gate = json!({"id": "g1", "kind": "ToolCallNeedsApproval", "tool": "a__b", "argumentsHash": "ab", "openedAt": AT,
        "expiresAt": AT, "untrustedContentSource": "web"});
    let report = json!({"epoch": EPOCH, "loop": {
            "state": "Paused", "reasons": [{"reason": "BudgetExhausted", "until": AT, "message": "wait"}], "since": AT,
            "resumesAt": AT, "turn": 3, "gates": [gate], "waitingTasks": 1, "consecutiveErrors": 1, "consecutiveTurns": 2,
            "turns": 3, "toolCalls": 4, "durations": {"turns": counts, "toolRuns": counts, "approvals": {"denied": counts}},
        },
        "usage": {"calls": 3, "inputTokens": 5, "cost": 7, "byModel": [{"model": "m", "calls": 3, "cost": 7}]},
        "model": {"failure": null, "message": ""}, "budget": {"refusedCalls": 1, "lostLeases": 1},
        "pulse": {"identical": 2, "hash": "0123456789abcdef", "tokens": 9}, "telemetryLoss": {"spans": 1, "logs": 2},
        "callDurations": [{"model": "m", "counts": counts}]});
    let amount = json!({"tokens": 5, "costMicroUSD": 5});
    let ask = json!({"lease": 1, "open": amount, "least": amount, "full": amount});
    let statement = json!({"lease": 1, "spent": amount, "returned": amount, "closed": false});
    let fragment = json!({"task": "t", "call": "t1c1a1", "attempt": 1, "offset": 0, "text": "x"});
    vec![
        ("attach", json!({"protocol": 1, "epoch": EPOCH, "models": []})),
        ("report", report),
        (
            "lease",
            json!({"epoch": EPOCH, "record": "0123456789abcdef0123456789abcdef",
                "accounts": [{"account": "a", "statements": [statement], "ask": ask}]}),
        ),
        ("text", json!({"epoch": EPOCH, "fragment": fragment})),
        (
            "tasks/ack",
            json!({"epoch": EPOCH, "ack": {"id": "t", "receipt": "Accepted", "after": 1, "user": "u"}}),
        ),
        (
            "delivered",
            json!({"epoch": EPOCH, "delivered": {"sensor": "s", "outbox": "o", "through": 1}}),
        ),
    ]
}

/// A page with a line for this subscription.
fn page(reading: u64, after: i64) -> Value {
    let next = after.saturating_add(1);
    let line = json!({"seq": next, "event": "tool:intent", "at": AT, "kind": "ToolIntent", "turn": 3, "call": "t3c1a1",
        "run": "t3c1r1", "tool": "a__b", "effect": "Write", "outcome": "Ok", "note": "n", "traceId": "ab", "messages": ["m"]});
    json!({"epoch": EPOCH, "reading": reading, "after": after, "next": next, "newest": next, "events": [line]})
}

struct PodHarness {
    controller: EventsHarness,
    client: Client,
    token: String,
    /// Those who read the events; each ends with whether the stream did as a stream ends.
    readers: Vec<JoinHandle<reqwest::Result<StatusCode>>>,
    /// Where the reader of the last page is.
    cursor: i64,
}

impl PodHarness {
    async fn start() -> Self {
        let controller = EventsHarness::start().await;
        Self {
            client: controller.client.clone(),
            token: token("agentloop.dev/link a agentloop-agent x pod-of-x"),
            readers: Vec::new(),
            cursor: 0,
            controller,
        }
    }

    /// Sends a message, and returns how it was answered: a handler that panics gives no answer.
    async fn send(&self, route: &str, body: Vec<u8>) -> (StatusCode, Value) {
        let url = format!("{}/v1/{route}", self.controller.url());
        let request = self.client.post(url).bearer_auth(&self.token).body(body.clone());
        let response = request.send().await;
        let response = response.unwrap_or_else(|error| panic!("{route}: {error}: {}", String::from_utf8_lossy(&body)));
        let status = response.status();
        assert_ne!(status, StatusCode::INTERNAL_SERVER_ERROR, "{route}");
        (status, response.json().await.unwrap_or_default())
    }

    /// The subscription of a reader, which starts a reader if there is none.
    async fn reading(&mut self) -> u64 {
        let first = |harness: &EventsHarness| harness.directives().readings.first().copied();
        if first(&self.controller).is_none() {
            let url = self.controller.events_url("a/x", "?after=0&messages=true&text=true");
            let request = self.client.get(url).bearer_auth(EDITOR);
            self.cursor = 0;
            self.readers.push(tokio::spawn(async move {
                let mut response = request.send().await?;
                while response.chunk().await?.is_some() {}
                Ok(response.status())
            }));
            wait_until("the subscription", || first(&self.controller).is_some()).await;
        }
        first(&self.controller).unwrap().id
    }

    async fn send_page(&mut self, change: impl FnOnce(&Value) -> Vec<u8>) -> StatusCode {
        let reading = self.reading().await;
        let body = change(&page(reading, self.cursor));
        let (status, answer) = self.send("events", body).await;
        if status.is_success() {
            self.cursor = answer["after"].as_i64().unwrap_or(0);
        }
        status
    }
}

/// The page of a user shows what a pod has reported.
fn show(report: &PodReport) {
    let agent: Agent = serde_json::from_value(agent("a", "x", &json!({}))).unwrap();
    let row = row(&agent, Some(report), StatusOrigin::Present);
    let view = PageView {
        agents: vec![AgentView::new(&agent, row, Some(report), None)],
        ..PageView::default()
    };
    let parts = parts(&view, &TimeZone::UTC);
    assert!(!document(&parts, &TimeZone::UTC, &maud::html! {}).is_empty());
}

#[test]
fn no_message_of_a_pod_makes_the_controller_panic() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let samples = samples();
    let mut harness = runtime.block_on(PodHarness::start());
    runtime.block_on(async {
        // All is right as it is, so that what is refused below is so for what was changed.
        for (route, body) in &samples {
            let (status, answer) = harness.send(route, body.to_string().into()).await;
            let is_undecided = status == StatusCode::SERVICE_UNAVAILABLE && *route == "lease";
            assert!(status.is_success() || is_undecided, "{route}: {status}: {answer}");
        }
        assert_eq!(harness.send_page(|page| page.to_string().into()).await, StatusCode::OK);
        // An amount below zero would make room that does not exist.
        for amount in [
            "/accounts/0/ask/open/tokens",
            "/accounts/0/ask/least/tokens",
            "/accounts/0/ask/full/tokens",
            "/accounts/0/statements/0/spent/tokens",
            "/accounts/0/statements/0/returned/tokens",
        ] {
            let (route, lease) = &samples[2];
            let mut lease = lease.clone();
            *lease.pointer_mut(amount).unwrap() = json!(-1);
            let (status, answer) = harness.send(route, lease.to_string().into()).await;
            assert_eq!(
                (status, &answer["code"]),
                (StatusCode::BAD_REQUEST, &json!("Malformed")),
                "{amount}"
            );
        }
        // A name that no event has is replaced, and holds up no other event.
        for name in ["x\ny", "x\ry", "end", "", &format!("a:{}", "b".repeat(63))] {
            let renamed = |page: &Value| {
                let mut page = page.clone();
                page["events"][0]["event"] = name.into();
                page.to_string().into()
            };
            assert_eq!(harness.send_page(renamed).await, StatusCode::OK, "{name:?}");
        }
    });
    rounds(4, |random| {
        runtime.block_on(async {
            let other = samples[random.index(samples.len())].1.to_string();
            let (route, sample) = &samples[random.index(samples.len())];
            let mut change = |sample: &Value| {
                if random.index(4) == 0 {
                    return mutated(random, sample.to_string().as_bytes(), other.as_bytes());
                }
                bent(random, sample).to_string().into()
            };
            let body = change(sample);
            if let Ok(report) = serde_json::from_slice::<PodReport>(&body) {
                show(&report);
            }
            harness.send(route, body).await;
            harness.send_page(change).await;
        });
        assert!(!harness.controller.metrics.text().is_empty());
    });
    runtime.block_on(async {
        harness.controller.forget_pod();
        for reader in harness.readers {
            let ended = tokio::time::timeout(Duration::from_mins(1), reader).await.unwrap();
            assert_eq!(ended.unwrap().unwrap(), StatusCode::OK);
        }
    });
}

/// Most bytes of a report that is kept, as JSON. As many as a body may have would be nothing gained.
const MOST_KEPT: usize = MAX_BODY_BYTES / 2;

#[tokio::test]
async fn lists_that_are_long_in_memory_are_answered_and_not_kept() {
    let mut harness = PodHarness::start().await;
    let room = MAX_BODY_BYTES - 4096;
    let mut samples = samples();
    samples.push((
        "history",
        json!({"epoch": EPOCH, "writer": "w", "after": 0, "last": 1, "sentBefore": [{"writer": "v", "last": 1}],
            "executions": [{"id": "e"}], "steps": [{"id": "s", "action": [1], "result": {"a": 1}}], "audit": [{"seq": 1}]}),
    ));
    let (_, report) = samples.iter_mut().find(|(route, _)| *route == "report").unwrap();
    report["loop"]["sensors"] = json!([{"uid": "s", "generation": 1, "totals": {}}]);
    report["loop"]["byTool"] = json!([{"tool": "a__b", "ok": 1}]);
    report["loop"]["guardrailTrips"] = json!([{"guardrail": "IdleTimeout", "action": "kill", "count": 1}]);
    report["loop"]["recentActivations"] = json!([]);
    report["loop"]["goal"] = json!({"criteria": [{"name": "a", "met": true}], "artifacts": []});
    for (route, sample) in &samples {
        for body in amplified(sample, room) {
            assert!(body.len() <= MAX_BODY_BYTES);
            let (status, answer) = harness.send(route, body).await;
            // Too many accounts, rows or the wrong type: the answer says so.
            assert!(
                status != StatusCode::BAD_REQUEST || answer["message"].is_string(),
                "{route}: {answer}"
            );
            let kept = harness.controller.loops.newest_report(&agent_key("x"));
            let bytes = kept.map_or(0, |report| serde_json::to_string(&report).unwrap().len());
            assert!(bytes <= MOST_KEPT, "{route}: {bytes} bytes are kept");
        }
    }
    let reading = harness.reading().await;
    for body in amplified(&page(reading, harness.cursor), room) {
        harness.send_page(|_| body).await;
    }
    // A page has as many lines as a worker sends, and not one more.
    let lines = |length: usize| {
        move |page: &Value| {
            let mut page = page.clone();
            page["events"] = vec![page["events"][0].clone(); length].into();
            page.to_string().into()
        }
    };
    assert_eq!(harness.send_page(lines(PAGE_LINES)).await, StatusCode::OK);
    assert_eq!(harness.send_page(lines(PAGE_LINES + 1)).await, StatusCode::BAD_REQUEST);
    let twice = |accounts: &[&str]| {
        let accounts: Vec<Value> = accounts.iter().map(|account| json!({"account": account})).collect();
        json!({"epoch": EPOCH, "record": "0123456789abcdef0123456789abcdef", "accounts": accounts}).to_string()
    };
    let (status, answer) = harness.send("lease", twice(&["a", "b", "a"]).into()).await;
    assert_eq!(
        (status, &answer["message"]),
        (StatusCode::BAD_REQUEST, &json!("an account is named twice"))
    );
    assert_ne!(
        harness.send("lease", twice(&["a", "b"]).into()).await.0,
        StatusCode::BAD_REQUEST
    );
    // It still serves those that send what is right.
    let (_, report) = samples.iter().find(|(route, _)| *route == "report").unwrap();
    assert_eq!(
        harness.send("report", report.to_string().into()).await.0,
        StatusCode::NO_CONTENT
    );
}
