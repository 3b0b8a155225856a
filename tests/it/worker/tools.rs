//! The driver's part in runs of tools: a worker in this process, with a source of tools that does what the test says.

use std::collections::HashMap;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use agentloop::api::AgentSpec;
use agentloop::api::status::LoopState;
use agentloop::engine::machine::Engine;
use agentloop::engine::settings::EngineSettings;
use agentloop::engine::tool::{
    DeclaredDefinition, DefinitionParts, ResultArtifacts, StoredImage, ToolEffect, ToolOutcome, ToolRun, ToolSpec,
    UnknownOutcomePolicy,
};
use agentloop::worker::artifacts::ArtifactStore;
use agentloop::worker::driver::{DriveOutcome, DriverInputs, DriverParts, LoopDriver};
use agentloop::worker::gateway_client::GatewayClient;
use agentloop::worker::instructions::InstructionSource;
use agentloop::worker::journal::JournalOwner;
use agentloop::worker::reporter::GatewayReporter;
use agentloop::worker::sensor_receiver::LoopSensors;
use agentloop::worker::sensor_receiver::file_watcher::FileWatchers;
use agentloop::worker::tool_source::{FinishedToolRun, ListedTools, ToolSource};
use futures::FutureExt;
use futures::future::BoxFuture;
use jiff::SignedDuration;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::gateway::{Gateway, Log, Reply, WAIT_TIMEOUT, answer, sleep};
use super::is;
use super::restarts::reopened;

/// What became of the runs so far.
#[derive(Clone, Debug, Default)]
struct Runs {
    sent: Vec<ToolRun>,
    under_way: usize,
    most: usize,
    cut: Vec<String>,
    /// Outcomes that the test has decided on, by run.
    ends: HashMap<String, ToolOutcome>,
    /// What is stored of their results.
    artifacts: HashMap<String, ResultArtifacts>,
}

struct Source {
    offered: watch::Sender<ListedTools>,
    complete: CancellationToken,
    runs: watch::Sender<Runs>,
}

impl Source {
    fn new() -> Arc<Self> {
        let complete = CancellationToken::new();
        complete.cancel();
        Arc::new(Self {
            offered: watch::Sender::new(offer(tools())),
            complete,
            runs: watch::Sender::default(),
        })
    }

    fn end(&self, run: &str, outcome: ToolOutcome) {
        self.runs.send_modify(|runs| {
            runs.ends.insert(run.into(), outcome);
        });
    }

    fn done(&self, run: &str) {
        self.end(
            run,
            ToolOutcome::Done {
                text: format!("{run} is done"),
            },
        );
    }

    async fn until(&self, what: &str, enough: impl Fn(&Runs) -> bool) -> Runs {
        let mut runs = self.runs.subscribe();
        let found = tokio::time::timeout(WAIT_TIMEOUT, runs.wait_for(|runs| enough(runs))).await;
        found
            .unwrap_or_else(|_| panic!("not in time: {what}; {:?}", self.runs.borrow()))
            .unwrap()
            .clone()
    }
}

/// Counts a run as under way, and as cut when it is dropped before its end.
struct UnderWay<'a> {
    source: &'a Source,
    id: String,
    ended: bool,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.source.runs.send_modify(|runs| {
            runs.under_way -= 1;
            if !self.ended {
                runs.cut.push(self.id.clone());
            }
        });
    }
}

/// An offer of servers that have all answered.
fn offer(tools: Vec<ToolSpec>) -> ListedTools {
    ListedTools {
        specs: tools.into(),
        silent: Vec::new(),
    }
}

/// The worker's hold of it.
struct Hold(Arc<Source>);

impl ToolSource for Hold {
    fn offered(&self) -> watch::Receiver<ListedTools> {
        self.0.offered.subscribe()
    }

    fn complete(&self) -> BoxFuture<'static, ()> {
        self.0.complete.clone().cancelled_owned().boxed()
    }

    fn run(&self, run: ToolRun, _: Duration) -> BoxFuture<'static, FinishedToolRun> {
        let source = self.0.clone();
        async move {
            let id = run.id.to_string();
            source.runs.send_modify(|runs| {
                runs.sent.push(run.clone());
                runs.under_way += 1;
                runs.most = runs.most.max(runs.under_way);
            });
            let mut under_way = UnderWay {
                source: &source,
                id: id.clone(),
                ended: false,
            };
            let mut runs = source.runs.subscribe();
            let outcome = runs.wait_for(|runs| runs.ends.contains_key(&id)).await.unwrap().ends[&id].clone();
            assert!(
                !matches!(&outcome, ToolOutcome::Failed { text } if text == "panic"),
                "as the test wants"
            );
            under_way.ended = true;
            let artifacts = source.runs.borrow().artifacts.get(&id).cloned();
            FinishedToolRun {
                artifacts: artifacts.unwrap_or_default(),
                ..outcome.into()
            }
        }
        .boxed()
    }
}

fn tools() -> Vec<ToolSpec> {
    let tool = |name: &str, effect, timeout| ToolSpec {
        name: name.into(),
        description: format!("does {name}"),
        parameters: json!({"type": "object"}),
        effect,
        idempotent: false,
        timeout: SignedDuration::from_secs(timeout),
        on_unknown: UnknownOutcomePolicy::TellModel,
        target: String::new(),
        needs_approval: false,
        needs_approval_after_untrusted: false,
        approval_condition: None,
        trusted: true,
        missing_grant: None,
        definition: None,
    };
    vec![
        tool("files__read", ToolEffect::Read, 60),
        tool("mail__send", ToolEffect::Destructive, 60),
        tool("mail__hang", ToolEffect::Destructive, 0),
    ]
}

/// A worker in this process.
struct Worker {
    terminate: CancellationToken,
    drive: JoinHandle<DriveOutcome>,
}

impl Worker {
    fn start(dir: &tempfile::TempDir, gateway: &Gateway, source: &Arc<Source>) -> Self {
        Self::draining(WAIT_TIMEOUT, dir, gateway, source)
    }

    /// One that lets runs continue for this long after SIGTERM.
    fn draining(drain: Duration, dir: &tempfile::TempDir, gateway: &Gateway, source: &Arc<Source>) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let terminate = CancellationToken::new();
        let (dir, socket) = (dir.path().join("journal"), gateway.socket().to_path_buf());
        let (source, token) = (source.clone(), terminate.clone());
        let drive = tokio::spawn(async move {
            let spec: AgentSpec = serde_json::from_value(json!({
                "instructions": "Be.",
                "model": {"api": "OpenAIChat", "name": "m", "imageInput": {"maxImages": 2}},
                "loop": {"minDelayMilliseconds": 1, "maxDelayMilliseconds": 10},
            }))
            .unwrap();
            let client = GatewayClient::new(&socket).unwrap();
            let (connections, heard) = (watch::Sender::new(0), watch::Sender::new(None));
            let outbox = GatewayReporter::start(&client, connections.subscribe());
            let mut listener = heard.subscribe();
            let events = tokio::spawn(client.clone().run_events(heard, connections));
            let session = client.session().await;
            let first = listener.wait_for(Option::is_some).await.unwrap().clone().unwrap();
            let owner = JournalOwner {
                agent_uid: "agent".into(),
                pod_uid: "pod".into(),
                epoch: 1,
            };
            let (mut journal, restored) = reopened(&dir, &owner);
            journal.claim(&owner).unwrap();
            let engine = match restored.snapshot {
                Some(snapshot) => {
                    Engine::restore(EngineSettings::try_from(&spec).unwrap(), snapshot, restored.transcript)
                }
                None => Engine::new(EngineSettings::try_from(&spec).unwrap()),
            };
            let parts = DriverParts {
                sends_responses: false,
                spans: agentloop::worker::spans::LoopSpans::default(),
                turn: agentloop::worker::turn_context::TurnContext::default(),
                light_model: None,
                agent: "agent".into(),
                engine,
                sensors: LoopSensors::default(),
                lookouts: FileWatchers::new(None),
                tools: Some(Arc::new(Hold(source))),
                artifacts: Arc::new(ArtifactStore::open(&dir)),
                model: &spec.model,
                instructions: InstructionSource::load(spec.instructions.clone(), dir).unwrap(),
                journal: &mut journal,
                gateway: &client,
                outbox: &outbox,
                drain,
            };
            let world = DriverInputs {
                gateway_updates: listener,
                terminate: token,
            };
            let ended = LoopDriver::new(parts, &first).run(&session, world).await.unwrap();
            journal.close(&owner).unwrap();
            outbox.finish().await;
            events.abort();
            ended
        });
        Self { terminate, drive }
    }

    async fn ended(self) -> DriveOutcome {
        tokio::time::timeout(WAIT_TIMEOUT, self.drive)
            .await
            .expect("it ends")
            .unwrap()
    }
}

/// Results in a request, in order.
fn results(request: &Value) -> Vec<String> {
    let messages = request["messages"].as_array().unwrap().iter();
    let tool = messages.filter(|message| message["role"] == "tool");
    tool.map(|message| message["content"].as_str().unwrap().to_owned())
        .collect()
}

#[tokio::test]
async fn read_only_tools_run_four_at_a_time_and_results_are_returned_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let calls: Vec<(&str, Value)> = (0..6).map(|_| ("files__read", json!({}))).collect();
    let gateway = Gateway::start(dir.path(), vec![answer("look", &calls), sleep(3600)]);
    let source = Source::new();
    let worker = Worker::start(&dir, &gateway, &source);
    source.until("four runs", |runs| runs.sent.len() == 4).await;
    for run in ["t1c1r4", "t1c1r1", "t1c1r5", "t1c1r6", "t1c1r3", "t1c1r2"] {
        source
            .until(run, |runs| runs.sent.iter().any(|sent| sent.id.to_string() == run))
            .await;
        source.done(run);
    }
    let log = gateway.until("asleep", |log| is(log, LoopState::Sleeping)).await;
    let expected: Vec<String> = (1..=6).map(|run| format!("t1c1r{run} is done")).collect();
    assert_eq!(results(&log.calls[1].1), expected);
    let names: Vec<&str> = log.calls[0].1["tools"]
        .as_array()
        .unwrap()
        .iter()
        .map(|tool| tool["function"]["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["yield", "files__read", "mail__send", "mail__hang"]);
    assert_eq!((log.last().counts.tool_calls, log.last().counts.actions), (6, 0));
    assert_eq!(source.runs.borrow().most, 4);
    worker.terminate.cancel();
    assert_eq!(worker.ended().await, DriveOutcome::Exit);
}

#[tokio::test]
async fn images_of_results_are_in_the_next_request_and_deleted_ones_are_only_named() {
    let dir = tempfile::tempdir().unwrap();
    let png = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR\0\0\0\x03\0\0\0\x05\x08\x02\0\0\0";
    let store = ArtifactStore::open(&dir.path().join("journal"));
    let stored = store.store("image/png", png).unwrap().to_string();
    let calls = [("files__read", json!({})), ("files__read", json!({}))];
    let gateway = Gateway::start(dir.path(), vec![answer("look", &calls), sleep(3600)]);
    let source = Source::new();
    for (run, name) in [("t1c1r1", "0123456789abcdef.png"), ("t1c1r2", &*stored)] {
        let image = StoredImage {
            name: name.into(),
            width: 3,
            height: 5,
            bytes: png.len(),
        };
        let artifacts = ResultArtifacts {
            text: None,
            images: vec![image],
        };
        source.runs.send_modify(|runs| {
            runs.artifacts.insert(run.into(), artifacts);
        });
        source.done(run);
    }
    let worker = Worker::start(&dir, &gateway, &source);
    let log = gateway.until("asleep", |log| is(log, LoopState::Sleeping)).await;
    let request = &log.calls[1].1;
    assert_eq!(results(request), ["t1c1r1 is done", "t1c1r2 is done"]);
    let last = request["messages"].as_array().unwrap().last().unwrap();
    let parts = last["content"].as_array().unwrap_or_else(|| panic!("{last}"));
    assert!(
        parts[0]["text"]
            .as_str()
            .unwrap()
            .ends_with(&format!("in their order: {stored}.]"))
    );
    let url = parts[1]["image_url"]["url"].as_str().unwrap();
    assert!(url.starts_with("data:image/png;base64,iVBORw0KGgo"), "{url}");
    assert!(!log.calls[0].1.to_string().contains("image_url"));
    worker.terminate.cancel();
    worker.ended().await;
}

#[tokio::test]
async fn sigterm_awaits_an_action_until_the_drain_ends_and_then_its_outcome_is_unknown() {
    let dir = tempfile::tempdir().unwrap();
    let wanted = [("mail__send", json!({})), ("mail__send", json!({}))];
    let gateway = Gateway::start(dir.path(), vec![answer("", &wanted), sleep(3600)]);
    let source = Source::new();
    let worker = Worker::start(&dir, &gateway, &source);
    source.until("the run", |runs| runs.sent.len() == 1).await;
    worker.terminate.cancel();
    gateway.until("stopping", |log| is(log, LoopState::Stopping)).await;
    source.done("t1c1r1");
    assert_eq!(worker.ended().await, DriveOutcome::Exit);
    let runs = source.runs.borrow().clone();
    assert_eq!((runs.sent.len(), runs.cut.len()), (1, 0));

    let worker = Worker::draining(Duration::from_millis(50), &dir, &gateway, &source);
    source.until("the second run", |runs| runs.sent.len() == 2).await;
    worker.terminate.cancel();
    assert_eq!(worker.ended().await, DriveOutcome::Exit);
    source.until("the cut", |runs| runs.cut == ["t1c1r2"]).await;

    let worker = Worker::start(&dir, &gateway, &source);
    let log = gateway.until("asleep", |log| is(log, LoopState::Sleeping)).await;
    let results = results(&log.calls[1].1);
    assert_eq!(results[0], "t1c1r1 is done");
    assert!(results[1].contains("may or may not have happened"), "{results:?}");
    assert_eq!(source.runs.borrow().sent.len(), 2);
    worker.terminate.cancel();
    worker.ended().await;
}

#[tokio::test]
async fn a_read_only_run_is_cancelled_at_once_by_a_suspension_and_by_sigterm() {
    let dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(dir.path(), vec![answer("", &[("files__read", json!({}))])]);
    let source = Source::new();
    let worker = Worker::start(&dir, &gateway, &source);
    source.until("the run", |runs| runs.sent.len() == 1).await;
    gateway.tell(|event| event.directives.suspend = true);
    assert_eq!(worker.ended().await, DriveOutcome::Suspended);
    source.until("the cut", |runs| runs.cut.len() == 1).await;

    gateway.tell(|event| event.directives.suspend = false);
    let worker = Worker::start(&dir, &gateway, &source);
    let runs = source.until("the same run", |runs| runs.sent.len() == 2).await;
    assert_eq!(runs.sent[0], runs.sent[1]);
    worker.terminate.cancel();
    assert_eq!(worker.ended().await, DriveOutcome::Exit);
    source.until("the cut", |runs| runs.cut.len() == 2).await;
}

#[tokio::test]
async fn half_a_run_lease_without_contact_holds_actions_and_contact_releases_them() {
    let dir = tempfile::tempdir().unwrap();
    let wanted = [("files__read", json!({})), ("mail__send", json!({}))];
    let gateway = Gateway::start(dir.path(), vec![answer("", &wanted), sleep(3600)]);
    gateway.tell(|event| event.link_age_milliseconds = 29_500);
    let source = Source::new();
    let worker = Worker::start(&dir, &gateway, &source);
    source.until("the read", |runs| runs.sent.len() == 1).await;
    // Longer than what was left of the half lease.
    tokio::time::sleep(Duration::from_secs(1)).await;
    source.done("t1c1r1");
    let second = source.until("the run that acts", |runs| runs.sent.len() == 2);
    assert!(tokio::time::timeout(Duration::from_millis(300), second).await.is_err());
    assert_eq!(gateway.log().last().state, LoopState::Running);
    gateway.tell(|event| event.link_age_milliseconds = 0);
    source.until("the run that acts", |runs| runs.sent.len() == 2).await;
    source.done("t1c1r2");
    gateway.until("asleep", |log| is(log, LoopState::Sleeping)).await;
    worker.terminate.cancel();
    worker.ended().await;
}

#[tokio::test]
async fn a_source_that_times_out_or_breaks_leaves_an_unknown_outcome() {
    let dir = tempfile::tempdir().unwrap();
    let wanted = [("mail__hang", json!({})), ("mail__send", json!({}))];
    let gateway = Gateway::start(dir.path(), vec![answer("", &wanted), sleep(3600)]);
    let source = Source::new();
    let worker = Worker::start(&dir, &gateway, &source);
    source
        .until("the end of the first", |runs| runs.cut == ["t1c1r1"])
        .await;
    source.end("t1c1r2", ToolOutcome::Failed { text: "panic".into() });
    let log = gateway.until("asleep", |log| is(log, LoopState::Sleeping)).await;
    let results = results(&log.calls[1].1);
    assert!(
        results.iter().all(|text| text.contains("may or may not have happened")),
        "{results:?}"
    );
    worker.terminate.cancel();
    worker.ended().await;
}

#[tokio::test]
async fn a_loop_waits_for_its_sources_and_accepts_tools_that_are_offered_later() {
    let dir = tempfile::tempdir().unwrap();
    let wanted = [("files__late", json!({}))];
    let gateway = Gateway::start(
        dir.path(),
        vec![answer("hm", &[]), answer("", &wanted), sleep(3600), sleep(3600)],
    );
    let source = Source::new();
    let late = ToolSpec {
        name: "files__late".into(),
        ..tools().remove(0)
    };
    let source = Arc::new(Source {
        offered: watch::Sender::new(offer(Vec::new())),
        complete: CancellationToken::new(),
        runs: source.runs.clone(),
    });
    let worker = Worker::start(&dir, &gateway, &source);
    gateway.until("the events", |log| log.listeners == 1).await;
    assert!(gateway.log().calls.is_empty());
    source.offered.send_replace(offer(vec![late]));
    source.complete.cancel();
    source.until("the run", |runs| runs.sent.len() == 1).await;
    source.done("t2c1r1");
    gateway.until("asleep", |log| is(log, LoopState::Sleeping)).await;
    source.offered.send_replace(offer(Vec::new()));
    gateway.tell(|event| event.directives.wake = Some("one".into()));
    let log = gateway.until("the next call", |log| log.calls.len() == 4).await;
    assert_eq!(log.calls[3].1["tools"].as_array().unwrap().len(), 1);
    worker.terminate.cancel();
    worker.ended().await;
}

#[tokio::test]
async fn a_sleeping_loop_opens_a_gate_for_changed_tools_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(dir.path(), vec![sleep(3600)]);
    let source = Source::new();
    let listed = |hash: &str| ToolSpec {
        definition: Some(DeclaredDefinition {
            hash: hash.into(),
            parts: DefinitionParts::default(),
            server: "s".into(),
            holds_changes: true,
            holds_new: true,
        }),
        ..tools().remove(0)
    };
    source.offered.send_replace(offer(vec![listed("one")]));
    let worker = Worker::start(&dir, &gateway, &source);
    gateway.until("asleep", |log| is(log, LoopState::Sleeping)).await;
    source.offered.send_replace(offer(vec![listed("two")]));
    let asks = |log: &Log| {
        let report = log.last();
        report.gates.len() == 1 && report.state == LoopState::Sleeping
    };
    let log = gateway.until("the gate", asks).await;
    let gates = log.last().gates;
    assert_eq!((&*gates[0].tool, gates[0].expires_at.as_ref()), ("files", None));
    worker.terminate.cancel();
    worker.ended().await;
}

/// What is left of the run lease before the answer comes: more than a busy machine takes to decide on it.
const LEFT: Duration = Duration::from_secs(8);

/// Stands still for longer than the lease at the first log line with this text: the journal has the decision, and nothing was
/// done yet.
#[derive(Clone)]
struct Freeze {
    at: &'static str,
    is_over: Arc<AtomicBool>,
}

impl Freeze {
    /// While the guard lives, this thread stands still at such a line.
    fn begin(at: &'static str) -> (Self, tracing::subscriber::DefaultGuard) {
        let freeze = Self {
            at,
            is_over: Arc::default(),
        };
        let writer = freeze.clone();
        let lines = tracing_subscriber::fmt().with_writer(move || writer.clone()).finish();
        (freeze, tracing::subscriber::set_default(lines))
    }
}

impl Write for Freeze {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        if String::from_utf8_lossy(line).contains(self.at) && !self.is_over.swap(true, Ordering::SeqCst) {
            std::thread::sleep(LEFT + Duration::from_millis(200));
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A worker that wants to run a tool, with little left of its run lease; it stands still at such a line of its log.
async fn with_little_left(dir: &tempfile::TempDir) -> (Gateway, Arc<Source>, Worker) {
    let gateway = Gateway::start(dir.path(), vec![Reply::Hang, sleep(3600)]);
    let source = Source::new();
    let worker = Worker::start(dir, &gateway, &source);
    // The lease is short only now, so that the start of the worker is no part of it. The request shows that it knows.
    gateway.until("the first call", |log| log.calls.len() == 1).await;
    let left = u64::try_from(LEFT.as_millis()).unwrap();
    gateway.tell(|event| {
        event.link_age_milliseconds = 60_000 - left;
        event.directives.wake = Some("look".into());
    });
    gateway
        .until("the request", |log| log.last().handled.wake.is_some())
        .await;
    gateway.keep("t1c1a1", answer("", &[("files__read", json!({}))]));
    (gateway, source, worker)
}

#[tokio::test]
async fn a_run_is_not_sent_when_the_driver_stood_still_for_its_lease_after_the_decision() {
    let dir = tempfile::tempdir().unwrap();
    let (freeze, _guard) = Freeze::begin("ToolIntent");
    let (gateway, source, worker) = with_little_left(&dir).await;
    gateway.until("paused", |log| is(log, LoopState::Paused)).await;
    assert!(freeze.is_over.load(Ordering::SeqCst));

    gateway.tell(|event| event.link_age_milliseconds = 0);
    let log = gateway.until("the next call", |log| log.calls.len() == 2).await;
    assert_eq!(source.runs.borrow().sent.len(), 0);
    let results = results(&log.calls[1].1);
    assert!(results[0].contains("it was not sent"), "{results:?}");
    worker.terminate.cancel();
    worker.ended().await;
}

#[tokio::test]
async fn a_call_is_not_sent_when_the_driver_stood_still_for_its_lease_after_the_decision() {
    let dir = tempfile::tempdir().unwrap();
    let (freeze, _guard) = Freeze::begin("t1c2a1");
    let (gateway, source, worker) = with_little_left(&dir).await;
    source.done("t1c1r1");
    let log = gateway.until("paused", |log| is(log, LoopState::Paused)).await;
    assert!(freeze.is_over.load(Ordering::SeqCst));
    assert_eq!((log.call_ids(), source.runs.borrow().sent.len()), (vec!["t1c1a1"], 1));

    gateway.tell(|event| event.link_age_milliseconds = 0);
    let log = gateway.until("the next attempt", |log| log.calls.len() == 2).await;
    assert_eq!(log.call_ids()[1], "t1c2a2", "the first attempt was not sent");
    worker.terminate.cancel();
    worker.ended().await;
}
