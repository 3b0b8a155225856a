//! Journals whose file or rows were changed: they are refused with a message, or the loop continues from their content.

use std::path::Path;

use agentloop::api::AgentSpec;
use agentloop::engine::budget::BudgetState;
use agentloop::engine::machine::Engine;
use agentloop::engine::message::{ModelAnswer, ToolCall};
use agentloop::engine::settings::EngineSettings;
use agentloop::engine::tool::{ToolEffect, ToolOutcome, ToolSpec, UnknownOutcomePolicy};
use agentloop::engine::{EngineEffect, EngineInput, KnownTotals, OpenRequests};
use agentloop::worker::journal::{Journal, JournalError, JournalOwner};
use agentloop::worker::journaled_engine::JournaledEngine;
use jiff::{SignedDuration, Timestamp};
use rusqlite::Connection;
use serde_json::json;

use super::mutation::mutated;
use super::rounds;
use crate::support::random::Random;

pub fn settings() -> EngineSettings {
    let spec: AgentSpec = serde_json::from_value(json!({
        "instructions": "be", "model": {"api": "Scripted", "name": "m"},
        "hotState": {"fields": [{"name": "price", "type": "Number"}]},
    }))
    .unwrap();
    EngineSettings::try_from(&spec).unwrap()
}

pub fn started(epoch: i64) -> EngineInput {
    EngineInput::Started {
        agent: "agent".into(),
        epoch,
        known: KnownTotals::default(),
        budget: BudgetState::default(),
        link_silent: false,
        open: OpenRequests::default(),
    }
}

fn owner(epoch: i64) -> JournalOwner {
    JournalOwner {
        agent_uid: "agent".into(),
        pod_uid: format!("pod-{epoch}"),
        epoch,
    }
}

fn look() -> ToolSpec {
    ToolSpec {
        name: "look".into(),
        description: "Looks.".into(),
        parameters: json!({"type": "object"}),
        effect: ToolEffect::Write,
        idempotent: false,
        timeout: SignedDuration::from_secs(60),
        on_unknown: UnknownOutcomePolicy::TellModel,
        target: String::new(),
        needs_approval: false,
        needs_approval_after_untrusted: false,
        approval_condition: None,
        trusted: true,
        missing_grant: None,
        definition: None,
    }
}

/// Runs for `inputs` inputs: answers calls, ends runs, and lets an hour pass where nothing is under way.
fn live(engine: Engine, journal: &mut Journal, epoch: i64, inputs: usize) -> Result<(), JournalError> {
    let mut steps = JournaledEngine::new(engine, journal);
    let mut now: Timestamp = "2026-01-05T07:00:00Z".parse().unwrap();
    let mut next = vec![
        started(epoch),
        EngineInput::ToolsChanged {
            tools: vec![look()],
            silent: Vec::new(),
        },
    ];
    for number in 0..inputs {
        let input = next.pop().unwrap_or(EngineInput::Timer);
        if input == EngineInput::Timer {
            now += SignedDuration::from_hours(1);
        }
        let taken = steps.take(now, input);
        taken.result?;
        for action in taken.actions {
            match action {
                EngineEffect::CallModel { call, .. } => next.push(EngineInput::Answered {
                    call,
                    answer: answer(number),
                }),
                EngineEffect::RunTool(run, _) => next.push(EngineInput::ToolFinished {
                    run: run.id,
                    outcome: ToolOutcome::Done {
                        text: format!("seen {number}"),
                    },
                    artifacts: agentloop::engine::tool::ResultArtifacts::default(),
                }),
                EngineEffect::Record(_)
                | EngineEffect::CancelTool(_)
                | EngineEffect::CancelCall { .. }
                | EngineEffect::Acknowledge { .. }
                | EngineEffect::SetTimer(_)
                | EngineEffect::Report
                | EngineEffect::Stopped => {}
            }
        }
    }
    Ok(())
}

fn answer(number: usize) -> ModelAnswer {
    let call = |name: &str, arguments: &str| ToolCall {
        id: format!("{name}{number}"),
        name: name.into(),
        arguments: arguments.into(),
    };
    ModelAnswer {
        text: Some(format!("thought {number}")),
        tool_calls: match number % 3 {
            0 => vec![call("look", "{}"), call("look", r#"{"at": 2}"#)],
            1 => vec![call("yield", r#"{"sleep": 60}"#)],
            _ => vec![],
        },
        ..ModelAnswer::default()
    }
}

/// A journal of some turns; `closed`: its last worker ended in order.
fn lived(dir: &Path, closed: bool) {
    let (mut journal, _) = Journal::open(dir, &owner(1)).unwrap();
    journal.claim(&owner(1)).unwrap();
    live(Engine::new(settings()), &mut journal, 1, 25).unwrap();
    if closed {
        journal.close(&owner(1)).unwrap();
    }
}

/// Opens it and continues.
fn reopened(dir: &Path) {
    let opened = Journal::open(dir, &owner(2)).and_then(|(mut journal, restored)| {
        journal.claim(&owner(2))?;
        let engine = match restored.snapshot {
            Some(snapshot) => Engine::restore(settings(), snapshot, restored.transcript),
            None => Engine::new(settings()),
        };
        live(engine, &mut journal, 2, 12)
    });
    if let Err(error) = opened {
        assert!(!error.kind().is_empty() && error.to_string().len() > 20, "{error}");
        assert!(!error.to_string().contains("thought"), "no word of the model: {error}");
    }
}

fn copied(from: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    dir
}

fn with_changed_bytes(random: &mut Random, dir: &Path) {
    let name = if random.percent(50) {
        "journal.sqlite-wal"
    } else {
        "journal.sqlite"
    };
    let path = [name, "journal.sqlite"]
        .map(|name| dir.join(name))
        .into_iter()
        .find(|path| path.exists())
        .unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    for _ in 0..random.range(1, 20) {
        if !bytes.is_empty() {
            let at = random.index(bytes.len());
            bytes[at] ^= 1 << random.index(8);
        }
    }
    if random.percent(20) {
        bytes.truncate(random.index(bytes.len() + 1));
    }
    std::fs::write(&path, bytes).unwrap();
}

fn with_a_changed_row(random: &mut Random, dir: &Path) {
    let connection = Connection::open(dir.join("journal.sqlite")).unwrap();
    let (table, column) = [
        ("kv", "value"),
        ("kv", "value"),
        ("messages", "json"),
        ("journal", "kind"),
        ("journal", "at"),
    ][random.index(5)];
    let texts: Vec<String> = connection
        .prepare(&format!("SELECT {column} FROM {table}"))
        .and_then(|mut select| select.query_map([], |row| row.get(0))?.collect())
        .unwrap();
    let old = &texts[random.index(texts.len())];
    let new = String::from_utf8_lossy(&mutated(random, old.as_bytes(), texts[0].as_bytes())).into_owned();
    connection
        .execute(
            &format!("UPDATE {table} SET {column} = ?1 WHERE {column} = ?2"),
            [&new, old],
        )
        .unwrap();
}

#[test]
fn no_changed_byte_of_a_journal_makes_a_worker_panic() {
    let dir = tempfile::tempdir().unwrap();
    lived(dir.path(), false);
    let closed = tempfile::tempdir().unwrap();
    lived(closed.path(), true);
    rounds(20, |random| {
        let copy = copied(if random.percent(50) { dir.path() } else { closed.path() });
        with_changed_bytes(random, copy.path());
        reopened(copy.path());
    });
}

#[test]
fn no_changed_row_of_a_journal_makes_a_worker_panic() {
    let dir = tempfile::tempdir().unwrap();
    lived(dir.path(), true);
    rounds(20, |random| {
        let copy = copied(dir.path());
        with_a_changed_row(random, copy.path());
        reopened(copy.path());
    });
}
