//! The link to the controller: attach, directives, the run lease, fencing, reports.

use std::time::{Duration, Instant};

use agentloop::api::failure::FailureKind;
use agentloop::api::status::{LoopState, LoopUsage, ModelUsage};
use agentloop::api::usage_counts::LoopCounts;
use agentloop::link::messages::{Directives, LoopReport, LoopTotals, RefusalCode};
use agentloop::link::socket::SocketEvent;
use futures::StreamExt;
use pretty_assertions::assert_eq;
use reqwest::StatusCode;
use tokio::sync::oneshot;

use super::controller::{Controller, WAIT_TIMEOUT};
use super::harness::{GatewayHarness, failure, stream_failure, streamed, url, whole};
use super::provider::{ANSWER, STREAM_HEAD, ScriptedResponse, Step, send};

fn suspend() -> Directives {
    Directives {
        suspend: true,
        ..Directives::default()
    }
}

#[tokio::test]
async fn a_new_record_continues_from_the_totals_of_the_controller() {
    let mut harness = GatewayHarness::new().await;
    let model = ModelUsage {
        model: "m".into(),
        calls: 5,
        input_tokens: 1000,
        ..ModelUsage::default()
    };
    let usage = LoopUsage {
        calls: 5,
        input_tokens: 1000,
        counts: LoopCounts {
            turns: 4,
            ..LoopCounts::default()
        },
        by_model: vec![model],
        ..LoopUsage::default()
    };
    harness.controller.knows(LoopTotals {
        usage: usage.clone(),
        turn: 6,
    });
    harness.start().await;
    let session = harness.session().await;
    assert_eq!((session.epoch, session.known.turn), (3, 6));
    assert_eq!(
        harness
            .controller
            .until("the known totals", |report| report.usage.calls == 5)
            .await
            .usage,
        usage
    );
    harness.ask("t7c1a1").await;
    let report = harness.until_counted(6, 0).await;
    assert_eq!(
        (report.epoch, report.usage.input_tokens, report.usage.counts.turns),
        (3, 1010, 4)
    );
    assert_eq!(report.usage.by_model[0].input_tokens, 1010);
    // A record that has its own totals keeps them.
    harness.kill();
    harness.start().await;
    harness.ask("t8c1a1").await;
    harness.until_counted(7, 0).await;
}

#[tokio::test]
async fn until_the_controller_accepts_the_pod_there_is_no_session_and_no_call() {
    let mut harness = GatewayHarness::new().await;
    harness.controller.refuse(Some(RefusalCode::NotLeading));
    harness.launch();
    while harness.controller.tokens().len() < 2 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let session = harness.worker.get(url("/v1/session")).send().await.unwrap();
    assert_eq!(session.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(harness.ask("t1c1a1").await.0, StatusCode::SERVICE_UNAVAILABLE);
    assert!(harness.provider.seen().is_empty());
    harness.controller.refuse(None);
    harness.session().await;
    assert_eq!(harness.ask("t1c1a1").await.1, ANSWER);
}

#[tokio::test]
async fn under_a_controller_of_version_1_no_call_is_made_and_the_log_advises_an_upgrade() {
    let mut harness = GatewayHarness::new().await;
    harness.controller.be_version_1(true);
    harness.launch();
    let advice = "upgrade the controller, or delete the pod";
    tokio::time::timeout(WAIT_TIMEOUT, async {
        while !harness.log().contains(advice) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
    .expect("the log does not say what to do");
    assert_eq!(harness.ask("t1c1a1").await.0, StatusCode::SERVICE_UNAVAILABLE);
    assert!(harness.provider.seen().is_empty() && harness.controller.reports().is_empty());
    harness.controller.be_version_1(false);
    harness.session().await;
    assert_eq!(harness.ask("t1c1a1").await.1, ANSWER);
}

/// Resumes, and suspends once this call is in flight. Returns how long the call went on.
async fn cut_by_a_suspension(harness: &GatewayHarness, call: &str) -> Duration {
    harness.controller.direct(Directives::default());
    until_event(harness, |event| !event.directives.suspend).await;
    harness
        .provider
        .will(ScriptedResponse::stream(vec![send(STREAM_HEAD), Step::Hold]));
    let mut response = harness.call(call, &streamed()).await;
    response.chunk().await.unwrap().unwrap();
    let start = Instant::now();
    harness.controller.direct(suspend());
    let rest = response.text().await.unwrap();
    let taken = start.elapsed();
    assert_eq!(stream_failure(&rest).1.kind, FailureKind::Cancelled);
    taken
}

#[tokio::test]
async fn suspend_cuts_the_call_in_flight_at_once() {
    let harness = GatewayHarness::started().await;
    let mut taken = Vec::new();
    for turn in 1..=5 {
        taken.push(cut_by_a_suspension(&harness, &format!("t{turn}c1a1")).await);
    }
    taken.sort_unstable();
    // A busy machine may pause in one or two of them. What looked only every few seconds would be late in most.
    assert!(taken[2] < Duration::from_secs(2), "{taken:?}");
    let refused = failure(harness.call("t6c1a1", &whole()).await).await;
    assert_eq!(refused.kind, FailureKind::Cancelled);
    assert!(refused.message.contains("spec.suspend"), "{}", refused.message);
    assert_eq!(harness.provider.seen().len(), 5);
    harness.until_counted(5, 5).await;
    harness.controller.direct(Directives::default());
    until_event(&harness, |event| !event.directives.suspend).await;
    assert_eq!(harness.ask("t6c1a1").await.1, ANSWER);
}

#[tokio::test]
async fn a_pod_attached_while_suspended_makes_no_call() {
    let mut harness = GatewayHarness::new().await;
    harness.controller.direct(suspend());
    harness.start().await;
    assert_eq!(
        failure(harness.call("t1c1a1", &whole()).await).await.kind,
        FailureKind::Cancelled
    );
    assert!(harness.provider.seen().is_empty());
}

#[tokio::test]
async fn a_fenced_gateway_cancels_its_call_notifies_its_worker_and_makes_no_further_calls() {
    let harness = GatewayHarness::started().await;
    harness.provider.will(ScriptedResponse::stream(vec![Step::Hold]));
    let call = harness.call_aside("t1c1a1", &whole());
    harness.provider.until_asked(1).await;
    harness.controller.refuse(Some(RefusalCode::Fenced));
    // The next thing it says is refused.
    let report = LoopReport {
        turn: 1,
        ..LoopReport::default()
    };
    harness
        .worker
        .put(url("/v1/report"))
        .json(&report)
        .send()
        .await
        .unwrap();
    assert!(call.await.unwrap().1.contains("\"kind\":\"Fenced\""));
    until_event(&harness, |event| event.fenced).await;
    let reports = harness.controller.reports().len();
    harness.controller.refuse(None);
    assert_eq!(
        failure(harness.call("t2c1a1", &whole()).await).await.kind,
        FailureKind::Fenced
    );
    assert_eq!(
        (harness.provider.seen().len(), harness.controller.reports().len()),
        (1, reports)
    );
}

#[tokio::test]
async fn without_contact_for_the_run_lease_no_call_is_made_until_it_is_back() {
    let harness = GatewayHarness::new().await;
    let (end, ended) = oneshot::channel::<()>();
    // Reports renew it four times in this time, so that the pauses of a busy machine do not end it.
    let options = harness.options(Duration::from_secs(6));
    let gateway = tokio::spawn(agentloop::gateway::run(options, async move {
        let _ = ended.await;
    }));
    until_event(&harness, |event| event.link_age_milliseconds < 3_000).await;
    while harness.ask("t1c1a1").await.0 != StatusCode::OK {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // Answered reports keep the lease, though nothing changes.
    tokio::time::sleep(Duration::from_secs(8)).await;
    assert_eq!(harness.ask("t2c1a1").await.0, StatusCode::OK);
    harness.controller.silence(true);
    tokio::time::sleep(Duration::from_millis(6_500)).await;
    let lost = failure(harness.call("t3c1a1", &whole()).await).await;
    assert_eq!(lost.kind, FailureKind::LinkLost);
    assert_eq!(harness.provider.seen().len(), 2);
    harness.controller.silence(false);
    until_event(&harness, |event| event.link_age_milliseconds < 3_000).await;
    // A refusal leaves nothing behind: the same id is sent now.
    assert_eq!(harness.ask("t3c1a1").await.1, ANSWER);
    end.send(()).unwrap();
    gateway.await.unwrap().unwrap();
}

#[tokio::test]
async fn reports_of_the_worker_are_relayed_and_frequent_changes_are_coalesced() {
    let harness = GatewayHarness::started().await;
    let before = harness.controller.reports().len();
    let began = Instant::now();
    for turn in 1..=50 {
        let report = LoopReport {
            state: LoopState::Running,
            turn,
            counts: LoopCounts {
                turns: turn - 1,
                ..LoopCounts::default()
            },
            ..LoopReport::default()
        };
        harness
            .worker
            .put(url("/v1/report"))
            .json(&report)
            .send()
            .await
            .unwrap();
    }
    let report = harness.controller.until("turn 50", |report| {
        report.loop_.as_ref().is_some_and(|said| said.turn == 50)
    });
    assert_eq!(report.await.usage.counts.turns, 49);
    let reports = harness.controller.reports().len() - before;
    // One each 250 ms, and the first.
    let most = 2 + began.elapsed().as_millis() / 250;
    assert!(
        u128::try_from(reports).unwrap() <= most,
        "{reports} reports, not {most}"
    );
}

#[tokio::test]
async fn the_token_is_read_for_each_request_and_the_ca_bundle_when_it_changes() {
    let mut harness = GatewayHarness::started().await;
    assert!(
        harness
            .controller
            .tokens()
            .iter()
            .all(|token| token == "Bearer link-token")
    );
    super::harness::write(&harness.path("token"), "fresh");
    harness.ask("t1c1a1").await;
    harness.until_counted(1, 0).await;
    assert_eq!(harness.controller.tokens().last().unwrap(), "Bearer fresh");
    // A controller of another CA is not spoken to until the bundle holds that CA.
    harness.kill();
    let old = std::mem::replace(&mut harness.controller, Controller::start().await);
    harness.launch();
    while !harness.log().contains("invalid peer certificate") {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(harness.controller.tokens().is_empty());
    let both = format!("{}{}", old.ca, harness.controller.ca);
    super::harness::write(&harness.path("ca.crt"), &both);
    harness.session().await;
    assert!(!harness.controller.tokens().is_empty());
}

/// Waits until the gateway sends its worker an event like this.
pub async fn until_event(harness: &GatewayHarness, wanted: impl Fn(&SocketEvent) -> bool) {
    let look = async {
        loop {
            let Ok(response) = harness.worker.get(url("/v1/events")).send().await else {
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            };
            let events = sse_stream::SseStream::from_bytes_stream(response.bytes_stream());
            let mut events = events
                .filter_map(|event| async { serde_json::from_str(&event.ok()?.data?).ok() })
                .boxed();
            while let Some(event) = events.next().await {
                if wanted(&event) {
                    return;
                }
            }
        }
    };
    tokio::time::timeout(WAIT_TIMEOUT, look)
        .await
        .expect("the worker is not told");
}
