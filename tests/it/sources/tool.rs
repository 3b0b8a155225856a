//! Tools of a real MCP server, of both generations of the protocol.

use std::time::Duration;

use agentloop::sensor_pipeline::source::poll::{PollQuery, SourcePoller};
use agentloop::sensor_pipeline::source::{ArrivalOutcome, SourceArrival, SourceCondition, SourceCursor, SourceFeed};
use pretty_assertions::assert_eq;
use rstest::rstest;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use super::{SOON, next, place};
use crate::tools::python::{self, Edition, McpServer};

struct Polling {
    arrivals: mpsc::Receiver<SourceArrival>,
    condition: watch::Receiver<SourceCondition>,
    task: JoinHandle<()>,
}

impl Drop for Polling {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Polling {
    fn new(server: &McpServer, name: &str, arguments: &Value, change: impl FnOnce(&mut SourcePoller)) -> Self {
        let tool = json!({"server": {"url": server.url(), "trusted": true}, "name": name, "arguments": arguments});
        let mut poller = SourcePoller {
            place: place(&server.url()),
            question: PollQuery::Tool(serde_json::from_value(tool).unwrap()),
            interval: Duration::from_millis(50),
            timeout: Duration::from_secs(20),
        };
        change(&mut poller);
        let (feed, arrivals) = SourceFeed::new();
        let condition = feed.condition();
        let task = tokio::spawn(poller.run(SourceCursor::default(), feed));
        Self {
            arrivals,
            condition,
            task,
        }
    }

    async fn payload(&mut self) -> Value {
        serde_json::from_slice(&next(&mut self.arrivals).await.payload).unwrap()
    }

    /// The next failure; what comes before it is taken.
    async fn failure(&mut self) -> String {
        let failed = async {
            loop {
                tokio::select! {
                    Some(arrival) = self.arrivals.recv() => arrival.answer.send(ArrivalOutcome::OnDisk).unwrap(),
                    Ok(condition) = self.condition.wait_for(|condition| condition.failure.is_some()) => {
                        return condition.failure.clone().unwrap();
                    }
                }
            }
        };
        tokio::time::timeout(SOON, failed).await.unwrap()
    }
}

fn doubtful(read_only: bool) -> impl FnOnce(&mut SourcePoller) {
    move |poller| {
        if let PollQuery::Tool(tool) = &mut poller.question {
            tool.server.trusted = false;
            tool.read_only = read_only;
        }
    }
}

#[rstest]
#[case::newer(Edition::Newer)]
#[case::older(Edition::Older)]
#[tokio::test]
async fn a_tool_is_polled_over_one_connection_with_secret_headers_also_after_an_outage(#[case] edition: Edition) {
    if !python::is_there() {
        return;
    }
    let secret = tempfile::tempdir().unwrap();
    std::fs::write(secret.path().join("Authorization"), "Bearer t0ken").unwrap();
    let mut server = McpServer::start(edition, &[]);
    let mut polling = Polling::new(&server, "add", &json!({"a": 2, "b": 3}), |poller| {
        poller.place.headers_dir = Some(secret.path().into());
    });
    for _ in 0..3 {
        assert_eq!(polling.payload().await, json!({"result": 5}));
    }
    let records = server.records();
    assert_eq!(records[0]["authorization"], "Bearer t0ken");
    assert_eq!(records[0]["protocol"], edition.protocol());
    server.kill();
    assert!(!polling.failure().await.is_empty());
    server.go();
    assert_eq!(polling.payload().await, json!({"result": 5}));
    let well = polling.condition.wait_for(|condition| condition.connected);
    drop(tokio::time::timeout(SOON, well).await.unwrap().unwrap());
}

#[tokio::test]
async fn a_tool_is_polled_only_if_its_user_or_a_trusted_server_declares_it_read_only() {
    if !python::is_there() {
        return;
    }
    let server = McpServer::start(Edition::Newer, &[]);
    let numbers = json!({"a": 1, "b": 1});
    // A trusted server does not say it of this one.
    let mut note = Polling::new(&server, "note", &json!({"text": "x"}), |_| {});
    let mut doubted = Polling::new(&server, "add", &numbers, doubtful(false));
    for polling in [&mut note, &mut doubted] {
        let said = polling.failure().await;
        assert!(
            said.starts_with("the tool may have side effects and is not called: "),
            "{said}"
        );
    }
    assert_eq!(server.did(), Vec::<String>::new());
    let mut vouched = Polling::new(&server, "add", &numbers, doubtful(true));
    assert_eq!(vouched.payload().await, json!({"result": 2}));
}

#[tokio::test]
async fn the_error_of_a_tool_is_not_repeated_and_a_long_answer_is_cut_to_be_dropped() {
    if !python::is_there() {
        return;
    }
    let server = McpServer::start(Edition::Newer, &[]);
    let said = async |name: &str| Polling::new(&server, name, &json!({}), doubtful(true)).failure().await;
    assert_eq!(
        said("fail").await,
        "the tool returned an error; check spec.source.poll.tool"
    );
    assert_eq!(
        said("bake").await,
        "the server has no such tool; check spec.source.poll.tool.name"
    );
    let mut huge = Polling::new(&server, "huge", &json!({"bytes": 100_000}), doubtful(true));
    let heard = next(&mut huge.arrivals).await;
    // What is allowed in these tests, and a byte more.
    assert_eq!(heard.payload.len(), 10_001);
}
