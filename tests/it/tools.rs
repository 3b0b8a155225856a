//! Tools of real MCP servers, through a real gateway.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod containers;
mod definitions;
pub mod everything;
mod example;
pub mod python;

use std::sync::Arc;
use std::time::{Duration, Instant};

use agentloop::api::tools::ToolsSpec;
use agentloop::engine::tool::{ToolEffect, ToolOutcome, ToolRun, ToolRunId, ToolSpec};
use agentloop::worker::artifacts::{ArtifactStore, READ_TOOL};
use agentloop::worker::tools::McpTools;
use futures::FutureExt;
use pretty_assertions::assert_eq;
use rstest::rstest;
use serde_json::{Value, json};

use self::python::Edition::{self, Newer, Older};
use self::python::McpServer;
use crate::gateway::harness::GatewayHarness;

const TOKEN: &str = "Bearer canary-tool-token";
const LONG: Duration = Duration::from_mins(1);
/// Bytes of a result that a prompt has room for.
const MAX_RESULT_BYTES: usize = 32_768;

/// A gateway, and the tools of a worker behind it.
struct ToolsHarness {
    harness: GatewayHarness,
    tools: Arc<McpTools>,
}

impl ToolsHarness {
    async fn start(server: &McpServer, fields: Value) -> Self {
        Self::at(&server.url(), fields).await
    }

    async fn at(url: &str, fields: Value) -> Self {
        let mut harness = GatewayHarness::new().await;
        let mut spec = json!({"name": "hub", "url": url, "headersSecretRef": {"name": "s"}});
        let Value::Object(fields) = fields else { panic!() };
        spec.as_object_mut().unwrap().extend(fields);
        harness.tools = json!({"servers": [spec]});
        harness.write_header("hub", "Authorization", TOKEN);
        harness.start().await;
        let spec = serde_json::from_value(harness.tools.clone()).unwrap();
        let tools = tools(&harness, &spec);
        Self { harness, tools }
    }

    /// The same tools in another process of the worker.
    fn restart(&mut self) {
        let spec = serde_json::from_value(self.harness.tools.clone()).unwrap();
        self.tools = tools(&self.harness, &spec);
    }

    /// Waits until the tools of servers that are offered are as wanted.
    async fn until(&self, what: &str, wanted: impl Fn(&[ToolSpec]) -> bool) -> Arc<[ToolSpec]> {
        let mut offered = self.tools.watch();
        let found = tokio::time::timeout(LONG, offered.wait_for(|offer| wanted(&of_servers(&offer.specs)))).await;
        let found = found.unwrap_or_else(|_| panic!("not offered: {what}")).unwrap();
        of_servers(&found.specs)
    }

    /// The tools of servers that are offered now.
    fn offered(&self) -> Arc<[ToolSpec]> {
        of_servers(&self.tools.watch().borrow().specs)
    }

    async fn until_known(&self) -> Arc<[ToolSpec]> {
        self.until("anything", |offered| !offered.is_empty()).await
    }

    async fn run(&self, tool: &str, arguments: Value) -> ToolOutcome {
        self.tools.run(run(tool, arguments), LONG).await.outcome
    }
}

/// The tools of a worker whose artifacts are beside the gateway's socket.
fn tools(harness: &GatewayHarness, spec: &ToolsSpec) -> Arc<McpTools> {
    let artifacts = Arc::new(ArtifactStore::open(&harness.path("state")));
    Arc::new(McpTools::new(spec, &harness.path("gateway.sock"), artifacts).unwrap())
}

/// The offer without the tool of the runtime, which is the last one.
fn of_servers(offered: &[ToolSpec]) -> Arc<[ToolSpec]> {
    let (last, rest) = offered.split_last().expect("it is always offered");
    assert_eq!(last.name, READ_TOOL);
    rest.into()
}

/// The name of the only artifact that a result names.
fn artifact(outcome: &ToolOutcome) -> &str {
    let (ToolOutcome::Done { text } | ToolOutcome::Failed { text }) = outcome else {
        panic!("{outcome:?}")
    };
    let (_, rest) = text.split_once(": artifact ").unwrap_or_else(|| panic!("{text}"));
    assert!(!rest.contains(": artifact "), "{text}");
    rest.split_once(']').unwrap().0
}

fn run(tool: &str, arguments: Value) -> ToolRun {
    let Value::Object(arguments) = arguments else { panic!() };
    ToolRun {
        target: String::new(),
        definition: String::new(),
        id: ToolRunId {
            member: 0,
            turn: 1,
            call: 1,
            index: 1,
        },
        name: format!("hub__{tool}"),
        arguments,
        idempotency_key: "0123456789abcdef".into(),
        max_result_bytes: MAX_RESULT_BYTES,
    }
}

fn names(offered: &[ToolSpec]) -> Vec<&str> {
    offered.iter().map(|spec| spec.name.as_str()).collect()
}

fn done(text: &str) -> ToolOutcome {
    ToolOutcome::Done { text: text.into() }
}

fn three() -> Value {
    json!({"a": 1, "b": 2})
}

#[rstest]
#[case(Newer, &[])]
#[case(Newer, &["--json"])]
#[case(Older, &[])]
#[case(Older, &["--json"])]
#[tokio::test]
async fn tools_of_both_generations_are_offered_and_their_results_become_text(
    #[case] edition: Edition,
    #[case] args: &[&'static str],
) {
    if !python::is_there() {
        return;
    }
    let server = McpServer::start(edition, args);
    let harness = ToolsHarness::start(&server, json!({"trusted": true})).await;
    harness.tools.complete().await;
    let offered = harness.offered();
    let odd = offered
        .iter()
        .find(|spec| spec.name.starts_with("hub__odd_name_"))
        .unwrap();
    let rest: Vec<_> = names(&offered).into_iter().filter(|name| *name != odd.name).collect();
    let expected = ["add", "fail", "grow", "huge", "note", "picture", "slow"].map(|name| format!("hub__{name}"));
    assert_eq!(rest, expected);
    assert!(offered.is_sorted_by_key(|spec| &spec.name));
    assert_eq!(offered[0].description, "Adds two numbers.");
    assert_eq!(offered[0].parameters["required"], json!(["a", "b"]));
    let rules = |name: &str| {
        let spec = offered.iter().find(|spec| spec.name.ends_with(name)).unwrap();
        (spec.effect, spec.idempotent)
    };
    assert_eq!(rules("__add"), (ToolEffect::Read, false));
    assert_eq!(rules("__note"), (ToolEffect::Write, true));
    assert_eq!(rules("__slow"), (ToolEffect::Destructive, false));

    assert_eq!(harness.run("add", three()).await, done("3"));
    let record = &server.records()[0];
    assert_eq!(
        *record,
        json!({"what": "add", "key": "0123456789abcdef", "authorization": TOKEN, "protocol": edition.protocol()})
    );
    assert_eq!(
        harness.run(odd.name.trim_start_matches("hub__"), json!({})).await,
        done("odd")
    );
    let picture = harness.run("picture", json!({})).await;
    let name = artifact(&picture);
    assert_eq!(picture, done(&format!("[image image/png, 20 bytes: artifact {name}]")));
    let stored = std::fs::read(harness.harness.path("state/artifacts").join(name)).unwrap();
    assert_eq!(stored, b"not really a picture");
    let ToolOutcome::Failed { text } = harness.run("fail", json!({})).await else {
        panic!()
    };
    assert!(text.contains("there is no bread"), "{text}");
    let ToolOutcome::Failed { text } = harness.run("add", json!({"a": "x"})).await else {
        panic!()
    };
    assert!(!text.is_empty());
    let ToolOutcome::Done { text } = harness.run("huge", json!({"bytes": 1_000_000})).await else {
        panic!()
    };
    assert_eq!(text.len(), 1_000_000);
    let ToolOutcome::Failed { text } = harness.run("huge", json!({"bytes": 5_000_000})).await else {
        panic!()
    };
    assert!(text.contains("longer than 4 MiB"), "{text}");
    assert_eq!(harness.run("add", three()).await, done("3"), "after all that");
    assert!(!harness.harness.log().contains("canary-tool-token"));
}

#[tokio::test]
async fn a_list_in_pages_is_read_whole_and_a_server_that_is_not_trusted_only_writes() {
    if !python::is_there() {
        return;
    }
    let server = McpServer::start(Newer, &["--page", "3"]);
    let harness = ToolsHarness::start(&server, json!({"tools": [{"name": "add", "effect": "Read"}]})).await;
    let offered = harness.until_known().await;
    assert_eq!(offered.len(), 8);
    for spec in offered.iter() {
        let effect = if spec.name == "hub__add" {
            ToolEffect::Read
        } else {
            ToolEffect::Write
        };
        assert_eq!((spec.effect, spec.idempotent), (effect, false), "{}", spec.name);
    }
}

#[rstest]
#[case(Newer)]
#[case(Older)]
#[tokio::test]
async fn a_changed_list_is_received(#[case] edition: Edition) {
    if !python::is_there() {
        return;
    }
    let server = McpServer::start(edition, &[]);
    let harness = ToolsHarness::start(&server, json!({})).await;
    let before = harness.until_known().await;
    assert_eq!(harness.run("grow", json!({"name": "fresh"})).await, done("grown"));
    let after = harness
        .until("fresh", |offered| names(offered).contains(&"hub__fresh"))
        .await;
    let kept: Vec<_> = after.iter().filter(|spec| spec.name != "hub__fresh").cloned().collect();
    assert_eq!(kept, before.to_vec());
    assert_eq!(harness.run("fresh", json!({})).await, done("new"));
}

#[rstest]
#[case(Newer, &[])]
#[case(Older, &[])]
#[case(Older, &["--json"])]
#[tokio::test]
async fn a_server_killed_in_mid_call_leaves_the_outcome_unknown_and_serves_again_when_it_is_back(
    #[case] edition: Edition,
    #[case] args: &[&'static str],
) {
    if !python::is_there() {
        return;
    }
    let mut server = McpServer::start(edition, args);
    let harness = ToolsHarness::start(&server, json!({})).await;
    let offered = harness.until_known().await;
    let tools = Arc::clone(&harness.tools);
    let call = tokio::spawn(async move { tools.run(run("slow", json!({"seconds": 600})), LONG).await.outcome });
    server.until("slow began").await;
    let killed = Instant::now();
    server.kill();
    let outcome = call.await.unwrap();
    assert!(matches!(outcome, ToolOutcome::Unknown { .. }), "{outcome:?}");
    assert!(killed.elapsed() < LONG / 3, "known at once, not at its timeout");
    assert_eq!(harness.offered(), offered, "prompts stay the same");
    let away = harness
        .tools
        .run(run("add", three()), Duration::from_millis(300))
        .await
        .outcome;
    assert!(matches!(away, ToolOutcome::Unavailable { .. }), "{away:?}");
    server.go();
    // Begun while the server may still be unavailable: it waits.
    assert_eq!(harness.run("add", three()).await, done("3"));
    assert_eq!(server.did(), ["slow began", "add"], "nothing ran twice");
}

#[rstest]
#[case(Newer)]
#[case(Older)]
#[tokio::test]
async fn a_server_that_restarted_between_two_calls_is_met_again_without_a_lost_or_repeated_call(
    #[case] edition: Edition,
) {
    if !python::is_there() {
        return;
    }
    let mut server = McpServer::start(edition, &[]);
    let harness = ToolsHarness::start(&server, json!({})).await;
    assert_eq!(harness.run("note", json!({"text": "one"})).await, done("noted"));
    server.kill();
    server.go();
    assert_eq!(harness.run("note", json!({"text": "two"})).await, done("noted"));
    assert_eq!(server.did(), ["note one", "note two"]);
}

#[rstest]
#[case(Newer, &[])]
// That server has no way to cancel what it answers as JSON in the newer generation.
#[case(Older, &[])]
#[case(Older, &["--json"])]
#[tokio::test]
async fn a_call_that_times_out_or_is_dropped_is_cancelled_at_the_server(
    #[case] edition: Edition,
    #[case] args: &[&'static str],
) {
    if !python::is_there() {
        return;
    }
    let server = McpServer::start(edition, args);
    let harness = ToolsHarness::start(&server, json!({})).await;
    harness.until_known().await;
    let slow = || run("slow", json!({"seconds": 600}));
    let outcome = harness.tools.run(slow(), Duration::from_secs(2)).await.outcome;
    assert!(matches!(outcome, ToolOutcome::Unknown { .. }), "{outcome:?}");
    server.until("slow cancelled").await;
    let tools = Arc::clone(&harness.tools);
    let dropped = tokio::spawn(async move { tools.run(slow(), LONG).await.outcome });
    server.until("slow began").await;
    dropped.abort();
    server.until("slow cancelled").await;
    assert_eq!(harness.run("slow", json!({"seconds": 0.01})).await, done("at last"));
}

#[tokio::test]
async fn a_server_that_never_answered_is_waited_for_within_the_runs_own_time() {
    if !python::is_there() {
        return;
    }
    let mut server = McpServer::stopped(Newer, &[]);
    let harness = ToolsHarness::start(&server, json!({})).await;
    let outcome = harness
        .tools
        .run(run("add", three()), Duration::from_millis(500))
        .await
        .outcome;
    assert!(matches!(outcome, ToolOutcome::Unavailable { .. }), "{outcome:?}");
    assert!(harness.offered().is_empty());
    assert!(harness.tools.complete().now_or_never().is_none());
    let tools = Arc::clone(&harness.tools);
    let waiting = tokio::spawn(async move { tools.run(run("add", three()), LONG).await.outcome });
    server.go();
    assert_eq!(waiting.await.unwrap(), done("3"));
    assert_eq!(server.did(), ["add"]);
}

#[tokio::test]
async fn a_run_of_an_unoffered_tool_is_unavailable_at_once() {
    if !python::is_there() {
        return;
    }
    let server = McpServer::start(Older, &[]);
    let harness = ToolsHarness::start(&server, json!({})).await;
    harness.until_known().await;
    for name in ["hub__absent", "other__add", "yield"] {
        let mut wanted = run("add", three());
        wanted.name = name.into();
        let outcome = harness.tools.run(wanted, LONG).await.outcome;
        assert!(
            matches!(outcome, ToolOutcome::Unavailable { .. }),
            "{name}: {outcome:?}"
        );
    }
    assert!(server.did().is_empty());
}

#[tokio::test]
async fn a_long_result_is_stored_whole_and_read_in_parts_also_by_the_next_process() {
    if !python::is_there() {
        return;
    }
    let server = McpServer::start(Newer, &[]);
    let mut harness = ToolsHarness::start(&server, json!({})).await;
    harness.until_known().await;
    assert_eq!(
        harness.run("huge", json!({"bytes": MAX_RESULT_BYTES})).await,
        done(&"x".repeat(MAX_RESULT_BYTES))
    );
    assert!(
        !harness.harness.path("state/artifacts").exists(),
        "there is room for it"
    );
    let finished = harness.tools.run(run("huge", json!({"bytes": 100_000})), LONG).await;
    let name = finished.artifacts.text.expect("it is stored");
    harness.restart();
    let (mut offset, mut parts) = (0, 0);
    while offset < 100_000 {
        let mut part = run("", json!({"name": name, "offset": offset}));
        part.name = READ_TOOL.into();
        let finished = harness.tools.run(part, LONG).await;
        assert_eq!(finished.artifacts.text, None, "a part is not stored again");
        let ToolOutcome::Done { text } = finished.outcome else {
            panic!()
        };
        let (header, part) = text.split_once('\n').unwrap();
        assert!(
            header.starts_with(&format!("[artifact {name}, text/plain, 100,000 bytes: {offset} to ")),
            "{header}"
        );
        offset += part.len();
        parts += 1;
        assert!(text.len() <= MAX_RESULT_BYTES && part.bytes().all(|byte| byte == b'x'));
    }
    assert_eq!((offset, parts), (100_000, 4));
}
