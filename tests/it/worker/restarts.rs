//! A crash at every commit boundary: the loop goes on as if nothing had happened.

use std::collections::{BTreeSet, VecDeque};
use std::path::Path;
use std::time::Instant;

use agentloop::api::AgentSpec;
use agentloop::api::failure::{Failure, FailureKind};
use agentloop::engine::budget::Budget;
use agentloop::engine::machine::Engine;
use agentloop::engine::message::{Answer, Message, ToolCall};
use agentloop::engine::settings::Settings;
use agentloop::engine::{CallId, Effect, Input};
use agentloop::worker::journal::{Committed, Journal, JournalError, Owner, Restored};
use jiff::Timestamp;
use serde_json::json;

use super::gateway::PATIENCE;

const TURNS: i64 = 6;

/// A driver without processes, sockets and clocks; time passes only between inputs.
struct Simulation<'a> {
    dir: &'a Path,
    owner: Owner,
    settings: Settings,
    engine: Engine,
    journal: Journal,
    now: Timestamp,
    timer: Option<Timestamp>,
    arrived: VecDeque<Input>,
    asked: BTreeSet<CallId>,
    commits: usize,
}

fn open(dir: &Path, owner: &Owner, settings: &Settings) -> (Engine, Journal) {
    let (mut journal, restored) = reopened(dir, owner);
    journal.claim(owner).unwrap();
    let engine = match restored.snapshot {
        Some(snapshot) => Engine::restore(settings.clone(), snapshot, restored.transcript),
        None => Engine::new(settings.clone()),
    };
    (engine, journal)
}

/// Other tests of this process start processes, which share its locks for a moment.
fn reopened(dir: &Path, owner: &Owner) -> (Journal, Restored) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match Journal::open(dir, owner) {
            Err(JournalError::Locked { .. }) if Instant::now() < deadline => std::thread::yield_now(),
            opened => return opened.unwrap(),
        }
    }
}

impl<'a> Simulation<'a> {
    fn new(dir: &'a Path) -> Self {
        let spec: AgentSpec = serde_json::from_value(json!({"model": {"api": "OpenAIChat", "name": "m"}})).unwrap();
        let settings = Settings::from(&spec);
        let owner = Owner {
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
            arrived: VecDeque::from([STARTED]),
            asked: BTreeSet::new(),
            commits: 0,
        }
    }

    /// Runs all turns; the process dies right after commit number `crash_at`. Gives back the transcript.
    fn run(mut self, crash_at: Option<usize>) -> (Vec<Message>, BTreeSet<CallId>, usize) {
        while self.engine.view().turns_completed < TURNS {
            let effects = self.step();
            if crash_at == Some(self.commits) {
                self = self.crash();
                continue;
            }
            for effect in &effects {
                self.act(effect);
            }
        }
        let Self {
            dir,
            owner,
            journal,
            asked,
            commits,
            ..
        } = self;
        journal.close(&owner).unwrap();
        let (_, restored) = reopened(dir, &owner);
        (restored.transcript, asked, commits)
    }

    /// The next input, handled and committed.
    fn step(&mut self) -> Vec<Effect> {
        let input = self.arrived.pop_front().unwrap_or_else(|| {
            self.now = self.now.max(self.timer.take().expect("something to wait for"));
            Input::Timer
        });
        let effects = self.engine.handle(self.now, input);
        let records: Vec<_> = effects
            .iter()
            .filter_map(|effect| {
                if let Effect::Record(record) = effect {
                    Some(record.clone())
                } else {
                    None
                }
            })
            .collect();
        let committed = self
            .journal
            .commit(self.now, &records, &self.engine.snapshot())
            .unwrap();
        assert_eq!(committed, Committed::Normally);
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
            arrived: VecDeque::from([STARTED]),
            ..self
        }
    }

    fn act(&mut self, effect: &Effect) {
        if let Effect::CallModel { call, .. } = effect {
            self.asked.insert(*call);
            self.arrived.push_back(reply(*call));
        }
        if let Effect::SetTimer(at) = effect {
            self.timer = *at;
        }
    }
}

const STARTED: Input = Input::Started {
    epoch: 1,
    known_turn: 0,
    budget: Budget {
        revision: 0,
        tokens: None,
        held: false,
        stop: None,
    },
};

/// What the model says: turns with text, tools, several calls, a sleep, and failed attempts.
fn reply(call: CallId) -> Input {
    let tool = |name: &str, arguments: &str| ToolCall {
        id: format!("{name}-{call}"),
        name: name.into(),
        arguments: arguments.into(),
    };
    let (text, tool_calls) = match (call.turn, call.call, call.attempt) {
        (_, _, 1) if call.turn % 3 == 0 => {
            return Input::Failed {
                call,
                failure: Failure {
                    kind: FailureKind::Unreachable,
                    message: "gone".into(),
                    retry_after_milliseconds: Some(2_000),
                    resumes_at: None,
                },
            };
        }
        (2, 1, _) => (None, vec![tool("unknown", "{}"), tool("other", "{")]),
        (2 | 4, _, _) => (None, vec![tool("yield", "{\"sleep\": 10, \"reason\": \"rest\"}")]),
        (turn, _, _) => (Some(format!("thought {turn}")), vec![]),
    };
    Input::Answered {
        call,
        answer: Answer {
            text,
            tool_calls,
            ..Answer::default()
        },
    }
}

#[test]
fn a_crash_after_any_commit_changes_neither_the_transcript_nor_the_calls() {
    let dir = tempfile::tempdir().unwrap();
    let (transcript, asked, commits) = Simulation::new(dir.path()).run(None);
    assert!(transcript.len() > 12 && commits > 12, "{commits} {transcript:?}");
    for crash_at in 1..commits {
        let dir = tempfile::tempdir().unwrap();
        let (again, asked_again, _) = Simulation::new(dir.path()).run(Some(crash_at));
        pretty_assertions::assert_eq!(again, transcript, "crash after commit {crash_at}");
        assert_eq!(asked_again, asked, "crash after commit {crash_at}");
    }
}

#[test]
fn a_turn_without_tools_costs_two_commits() {
    let dir = tempfile::tempdir().unwrap();
    let mut simulation = Simulation::new(dir.path());
    let mut spent = Vec::new();
    for turn in 1..=TURNS {
        let before = simulation.commits;
        while simulation.engine.view().turns_completed < turn {
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
