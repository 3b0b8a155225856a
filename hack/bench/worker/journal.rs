//! The journal under a real engine: what one turn writes and flushes, and whether it takes longer the more turns there
//! were.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use agentloop::api::AgentSpec;
use agentloop::engine::budget::BudgetState;
use agentloop::engine::machine::Engine;
use agentloop::engine::message::{FinishReason, ModelAnswer, ToolCall};
use agentloop::engine::settings::EngineSettings;
use agentloop::engine::{CallId, CallPurpose, EngineEffect, EngineInput, KnownTotals, OpenRequests, StopCause};
use agentloop::worker::journal::{Journal, JournalOwner};
use agentloop::worker::journaled_engine::JournaledEngine;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Turns of a long history.
pub const TURNS: usize = 10_000;
/// Turns that are compared at either end of it.
const PART: usize = 1_000;
/// Names the directory of the journal to a process whose system calls are counted.
pub const TRACED: &str = "AGENTLOOP_BENCH_TRACED";
/// Turns before the first that is counted, and those that are.
const TRACED_TURNS: (usize, usize) = (200, 1_000);
/// File whose flushes say where the count begins and ends.
const MARK: &str = "mark";

/// Figures of the journal alone.
pub fn figures() {
    let dir = TempDir::new_in("/dev/shm").expect("/dev/shm can be written");
    let mut times = Vec::new();
    with_loop(dir.path(), 4_000, |turns| times = turns.pass(TURNS));
    crate::say("journal_turn_in_memory_first_1000", &mut times[..PART]);
    crate::say("journal_turn_in_memory_after_9000", &mut times[TURNS - PART..]);
    count();
}

/// Counts the flushes and the bytes of a turn at the border to the system.
#[expect(clippy::print_stdout, clippy::print_stderr, reason = "figures go to stdout")]
fn count() {
    let dir = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).expect("the target directory can be written");
    let log = dir.path().join("calls");
    let traced = Command::new("strace")
        .args([
            "-f",
            "-y",
            "-s",
            "0",
            "-e",
            "trace=fsync,fdatasync,write,pwrite64",
            "-o",
        ])
        .arg(&log)
        .arg(std::env::current_exe().expect("this is a program"))
        .env(TRACED, dir.path())
        .status();
    if !traced.is_ok_and(|status| status.success()) {
        eprintln!("flushes and bytes of a turn are not counted: there is no strace, or it may not trace");
        return;
    }
    let log = std::fs::read_to_string(log).expect("strace wrote it");
    let is_flush = |line: &&str| line.contains(" fsync(") || line.contains(" fdatasync(");
    let counted = log.lines().skip_while(|line| !line.contains(MARK)).skip(1);
    let counted: Vec<&str> = counted
        .take_while(|line| !line.contains(MARK))
        .filter(|line| line.contains("journal.sqlite"))
        .collect();
    let flushes = counted.iter().filter(|line| is_flush(line)).count();
    let written = counted
        .iter()
        .filter(|line| !is_flush(line))
        .filter_map(|line| line.rsplit(" = ").next());
    let bytes: usize = written.filter_map(|bytes| bytes.trim().parse::<usize>().ok()).sum();
    let turns = TRACED_TURNS.1;
    println!(
        "FIGURE journal_flushes_per_turn {}.{:03}",
        flushes / turns,
        flushes % turns * 1000 / turns
    );
    println!("FIGURE journal_written_per_turn {} bytes", bytes / turns);
}

/// The process whose system calls are counted.
pub fn traced(dir: &Path) {
    let mark = File::create(dir.join(MARK)).expect("a file");
    with_loop(dir, 128_000, |turns| {
        turns.pass(TRACED_TURNS.0);
        mark.sync_all().expect("it can be flushed");
        turns.pass(TRACED_TURNS.1);
        mark.sync_all().expect("it can be flushed");
    });
}

/// Leaves a journal of a number of turns and one that waits for an answer. `in_order`: it is closed.
pub fn leave(dir: &Path, in_order: bool) {
    with_loop(dir, 128_000, |turns| {
        turns.pass(TURNS);
        turns.begin();
        if in_order {
            for input in [
                EngineInput::Stop {
                    cause: StopCause::Drain,
                },
                EngineInput::DrainEnded,
            ] {
                turns.feed(input);
            }
        }
    });
    let (journal, _) = Journal::open(dir, &owner()).expect("a journal");
    if in_order {
        journal.close(&owner()).expect("it closes");
    }
}

pub fn spec(context_tokens: u32) -> Value {
    json!({
        "instructions": "You watch a queue. Yield when it is empty.",
        "model": {
            "api": "OpenAIChat", "name": "m", "baseURL": "http://unused/v1",
            "contextTokens": context_tokens, "maxOutputTokens": 1_000,
        },
        "loop": {"minDelayMilliseconds": crate::process::DELAY_MILLISECONDS, "historyTokens": context_tokens},
        "guardrails": {"maxConsecutiveTurns": 10_000, "idleTimeoutSeconds": 2_592_000, "loopDetection": {"mode": "Disabled"}},
    })
}

fn owner() -> JournalOwner {
    JournalOwner {
        agent_uid: "agent".into(),
        pod_uid: "pod-1".into(),
        epoch: 1,
    }
}

/// A loop that turns once a minute, up to now.
pub struct Turns<'a> {
    steps: JournaledEngine<'a>,
    now: Timestamp,
}

fn with_loop(dir: &Path, context_tokens: u32, run: impl FnOnce(&mut Turns<'_>)) {
    let (mut journal, _) = Journal::open(dir, &owner()).expect("a journal");
    journal.claim(&owner()).expect("it is ours");
    let spec: AgentSpec = serde_json::from_value(spec(context_tokens)).expect("a spec");
    let engine = Engine::new(EngineSettings::try_from(&spec).expect("settings"));
    let minutes = i64::try_from(TURNS).expect("a small number") + 1;
    let mut turns = Turns {
        steps: JournaledEngine::new(engine, &mut journal),
        now: Timestamp::now() - SignedDuration::from_mins(minutes),
    };
    turns
        .steps
        .set_instructions("You watch a queue. Yield when it is empty.".to_owned());
    let first = turns.feed(EngineInput::Started {
        agent: "agent".into(),
        epoch: 1,
        known: KnownTotals::default(),
        budget: BudgetState::default(),
        link_silent: false,
        open: OpenRequests::default(),
    });
    turns.end(first);
    run(&mut turns);
}

impl Turns<'_> {
    /// The call that follows.
    fn feed(&mut self, input: EngineInput) -> Option<(CallId, CallPurpose)> {
        let taken = self.steps.take(self.now, input);
        taken.result.expect("it is written");
        taken.actions.iter().find_map(|action| {
            if let EngineEffect::CallModel { call, purpose, .. } = action {
                Some((*call, *purpose))
            } else {
                None
            }
        })
    }

    /// A turn up to its call.
    fn begin(&mut self) -> (CallId, CallPurpose) {
        self.now += SignedDuration::from_mins(1);
        self.feed(EngineInput::Timer)
            .or_else(|| self.feed(EngineInput::Timer))
            .expect("a turn is due")
    }

    /// So many whole ones, and what each took.
    fn pass(&mut self, count: usize) -> Vec<Duration> {
        (0..count).map(|_| self.turn()).collect()
    }

    /// A whole one, and what it took.
    fn turn(&mut self) -> Duration {
        let start = Instant::now();
        let first = self.begin();
        self.end(Some(first));
        start.elapsed()
    }

    /// Answers until no call follows.
    fn end(&mut self, mut next: Option<(CallId, CallPurpose)>) {
        while let Some((call, purpose)) = next {
            let answer = answer(purpose);
            next = self.feed(EngineInput::Answered { call, answer });
        }
    }
}

fn answer(purpose: CallPurpose) -> ModelAnswer {
    if purpose == CallPurpose::Compaction {
        return ModelAnswer {
            text: Some("The queue was short all the time. ".repeat(20)),
            ..ModelAnswer::default()
        };
    }
    ModelAnswer {
        reasoning: None,
        text: Some("The queue holds 3 items; none is older than a minute. ".repeat(4)),
        tool_calls: vec![ToolCall {
            id: "call_1".to_owned(),
            name: "yield".to_owned(),
            arguments: r#"{"sleep": 30, "reason": "nothing to do"}"#.to_owned(),
        }],
        finish: FinishReason::ToolCalls,
        tokens: Some(900),
        input_tokens: None,
        output_tokens: None,
        cost: None,
    }
}
