//! A crash at every commit boundary: the loop continues as if nothing had happened.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::time::{Duration, Instant};

use agentloop::api::AgentSpec;
use agentloop::api::failure::{CallFailure, FailureKind};
use agentloop::engine::budget::BudgetState;
use agentloop::engine::machine::Engine;
use agentloop::engine::message::{Message, ModelAnswer, ToolCall};
use agentloop::engine::settings::EngineSettings;
use agentloop::engine::tool::{ToolEffect, ToolOutcome, ToolRun, ToolRunId, ToolSpec, UnknownOutcomePolicy};
use agentloop::engine::{CallId, EngineEffect, EngineInput, KnownTotals, OpenRequests};
use agentloop::worker::journal::{Journal, JournalError, JournalOwner, RestoredJournal};
use jiff::{SignedDuration, Timestamp};
use serde_json::json;

use super::gateway::WAIT_TIMEOUT;

const TURNS: i64 = 6;

/// A driver without processes, sockets and clocks; time passes only between inputs.
struct Simulation<'a> {
    dir: &'a Path,
    owner: JournalOwner,
    settings: EngineSettings,
    engine: Engine,
    journal: Journal,
    now: Timestamp,
    timer: Option<Timestamp>,
    arrived: VecDeque<EngineInput>,
    asked: BTreeSet<CallId>,
    /// Runs of tools, as often as they were sent.
    ran: BTreeMap<ToolRunId, Vec<ToolRun>>,
    commits: usize,
}

fn open(dir: &Path, owner: &JournalOwner, settings: &EngineSettings) -> (Engine, Journal) {
    let (mut journal, restored) = reopened(dir, owner);
    journal.claim(owner).unwrap();
    let mut engine = match restored.snapshot {
        Some(snapshot) => Engine::restore(settings.clone(), snapshot, restored.transcript),
        None => Engine::new(settings.clone()),
    };
    let silent = Vec::new();
    engine.handle(
        Timestamp::UNIX_EPOCH,
        EngineInput::ToolsChanged { tools: tools(), silent },
    );
    (engine, journal)
}

/// Other tests of this process start processes, which share its locks for a moment.
pub(super) fn reopened(dir: &Path, owner: &JournalOwner) -> (Journal, RestoredJournal) {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    loop {
        match Journal::open(dir, owner) {
            Err(JournalError::Locked { .. }) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(1));
            }
            opened => return opened.unwrap(),
        }
    }
}

impl<'a> Simulation<'a> {
    fn new(dir: &'a Path) -> Self {
        let spec: AgentSpec = serde_json::from_value(json!({"model": {"api": "OpenAIChat", "name": "m"}})).unwrap();
        let settings = EngineSettings::try_from(&spec).unwrap();
        let owner = JournalOwner {
            agent_uid: "agent".into(),
            pod_uid: "pod".into(),
            epoch: 1,
        };
        let (engine, journal) = open(dir, &owner, &settings);
        Self {
            dir,
            owner,
            settings,
            engine,
            journal,
            now: Timestamp::UNIX_EPOCH,
            timer: None,
            arrived: VecDeque::from([started()]),
            asked: BTreeSet::new(),
            ran: BTreeMap::new(),
            commits: 0,
        }
    }

    /// Runs all turns. The process dies right after commit number `crash_at`: before it acts, or when all that it has
    /// started is done and nothing of it has come back.
    fn run(mut self, crash_at: Option<(usize, Moment)>) -> Ran {
        while self.engine.view().counts.turns < TURNS {
            let effects = self.step();
            if crash_at == Some((self.commits, Moment::BeforeActing)) {
                self = self.crash();
                continue;
            }
            for effect in &effects {
                self.act(effect);
            }
            if crash_at == Some((self.commits, Moment::AfterActing)) {
                self = self.crash();
            }
        }
        let Self {
            dir,
            owner,
            journal,
            asked,
            ran,
            commits,
            ..
        } = self;
        journal.close(&owner).unwrap();
        let (_, restored) = reopened(dir, &owner);
        Ran {
            transcript: restored.transcript,
            asked,
            runs: ran,
            commits,
        }
    }

    /// The next input, handled and committed.
    fn step(&mut self) -> Vec<EngineEffect> {
        let input = self.arrived.pop_front().unwrap_or_else(|| {
            self.now = self.now.max(self.timer.take().expect("something to wait for"));
            EngineInput::Timer
        });
        let effects = self.engine.handle(self.now, input);
        let records: Vec<_> = effects
            .iter()
            .filter_map(|effect| {
                if let EngineEffect::Record(record) = effect {
                    Some(record.clone())
                } else {
                    None
                }
            })
            .collect();
        let committed = self
            .journal
            .commit(self.now, &records, &self.engine.snapshot(), None)
            .unwrap();
        assert!(!committed.on_ballast);
        self.commits += 1;
        effects
    }

    /// Nothing is left but the journal's files and what the gateway was asked.
    fn crash(self) -> Self {
        drop(self.journal);
        let (engine, journal) = open(self.dir, &self.owner, &self.settings);
        Self {
            engine,
            journal,
            timer: None,
            arrived: VecDeque::from([started()]),
            ..self
        }
    }

    fn act(&mut self, effect: &EngineEffect) {
        if let EngineEffect::CallModel { call, .. } = effect {
            self.asked.insert(*call);
            self.arrived.push_back(reply(*call));
        }
        if let EngineEffect::RunTool(run, _) = effect {
            self.ran.entry(run.id).or_default().push(run.clone());
            self.arrived.push_back(EngineInput::ToolFinished {
                run: run.id,
                outcome: ToolOutcome::Done {
                    text: format!("{} of {}", run.name, run.id),
                },
                artifacts: agentloop::engine::tool::ResultArtifacts::default(),
            });
        }
        if let EngineEffect::SetTimer(at) = effect {
            self.timer = *at;
        }
    }
}

/// When a process dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    BeforeActing,
    AfterActing,
}

/// What a simulation leaves behind.
struct Ran {
    transcript: Vec<Message>,
    asked: BTreeSet<CallId>,
    runs: BTreeMap<ToolRunId, Vec<ToolRun>>,
    commits: usize,
}

fn tools() -> Vec<ToolSpec> {
    let tool = |name: &str, effect, idempotent| ToolSpec {
        name: name.into(),
        description: String::new(),
        parameters: json!({"type": "object"}),
        effect,
        idempotent,
        timeout: SignedDuration::from_secs(60),
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
        tool("files__read", ToolEffect::Read, false),
        tool("db__put", ToolEffect::Write, true),
        tool("mail__send", ToolEffect::Destructive, false),
    ]
}

/// Of a tool whose runs may not be repeated a crash may leave the outcome unknown, which the model then sees. All else is
/// the same.
fn is_as_without_a_crash(message: &Message, without: &Message) -> bool {
    if let (Message::Tool { id, text, .. }, Message::Tool { id: same, .. }) = (message, without)
        && text.contains("outcome unknown")
    {
        return id == same;
    }
    message == without
}

fn started() -> EngineInput {
    EngineInput::Started {
        agent: String::new(),
        epoch: 1,
        known: KnownTotals::default(),
        link_silent: false,
        open: OpenRequests::default(),
        budget: BudgetState::default(),
    }
}

/// What the model says: turns with text, tools, several calls, a sleep, and failed attempts.
fn reply(call: CallId) -> EngineInput {
    // A number makes the id another one, not the tool.
    let tool = |name: &str, arguments: &str| ToolCall {
        id: format!("{name}-{call}"),
        name: name.trim_end_matches(char::is_numeric).into(),
        arguments: arguments.into(),
    };
    let (text, tool_calls) = match (call.turn, call.call, call.attempt) {
        (_, _, 1) if call.turn % 3 == 0 => {
            return EngineInput::Failed {
                call,
                failure: CallFailure {
                    kind: FailureKind::Unreachable,
                    message: "gone".into(),
                    retry_after_milliseconds: Some(2_000),
                    resumes_at: None,
                },
            };
        }
        (1, 1, _) => (
            Some("look first".into()),
            vec![
                tool("files__read", "{}"),
                tool("files__read2", "{}"),
                tool("db__put", "{}"),
                tool("mail__send", "{}"),
                tool("files__read3", "{}"),
            ],
        ),
        // The sleep has a call of its own: beside a run whose outcome is unknown it would wait until the model has seen that.
        (4, 1, _) => (None, vec![tool("mail__send", "{}"), tool("db__put", "{}")]),
        (2, 1, _) => (None, vec![tool("unknown", "{}"), tool("other", "{")]),
        (2 | 4, _, _) => (None, vec![tool("yield", "{\"sleep\": 10, \"reason\": \"rest\"}")]),
        (turn, _, _) => (Some(format!("thought {turn}")), vec![]),
    };
    EngineInput::Answered {
        call,
        answer: ModelAnswer {
            text,
            tool_calls,
            ..ModelAnswer::default()
        },
    }
}

#[test]
fn a_crash_after_any_commit_keeps_transcript_and_calls_and_repeats_no_action() {
    let dir = tempfile::tempdir().unwrap();
    let calm = Simulation::new(dir.path()).run(None);
    assert!(
        calm.transcript.len() > 20 && calm.commits > 20,
        "{} {:?}",
        calm.commits,
        calm.transcript
    );
    assert_eq!(calm.runs.len(), 7);
    let mut unknown = 0;
    for crash_at in 1..calm.commits {
        for moment in [Moment::BeforeActing, Moment::AfterActing] {
            let dir = tempfile::tempdir().unwrap();
            let crashed = Simulation::new(dir.path()).run(Some((crash_at, moment)));
            let crash = format!("crash {moment:?}, after commit {crash_at}");
            assert_eq!(crashed.transcript.len(), calm.transcript.len(), "{crash}");
            for (message, without) in crashed.transcript.iter().zip(&calm.transcript) {
                assert!(is_as_without_a_crash(message, without), "{crash}: {message:?}");
                unknown += i32::from(message != without);
            }
            assert_eq!(crashed.asked, calm.asked, "{crash}");
            for (id, runs) in &crashed.runs {
                let first = &runs[0];
                assert!(runs.iter().all(|run| run == first), "{crash}: {id} had another key");
                assert_eq!(*first, calm.runs[id][0], "{crash}");
                assert!(
                    runs.len() == 1 || first.name != "mail__send",
                    "{crash}: {id} was sent twice"
                );
            }
        }
    }
    // Two runs, each cut before and after it was sent.
    assert_eq!(unknown, 4);
}

#[test]
fn a_turn_without_tools_costs_two_commits() {
    let dir = tempfile::tempdir().unwrap();
    let mut simulation = Simulation::new(dir.path());
    let mut spent = Vec::new();
    for turn in 1..=TURNS {
        let before = simulation.commits;
        while simulation.engine.view().counts.turns < turn {
            let effects = simulation.step();
            for effect in &effects {
                simulation.act(effect);
            }
        }
        spent.push(simulation.commits - before);
    }
    // Turn 5 is the plain one: it follows a sleep, has one call and no failure.
    assert_eq!(spent[4], 2, "{spent:?}");
}
