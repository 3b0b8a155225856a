//! What a history says about its calls, from the JSON lines of `agentloop history`.

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};
use serde::Deserialize;
use serde_json::Value;

use super::account::IDLE;
use crate::api::amount::{Amount, AmountKind};

/// A call that was made and answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoricalCall {
    /// Its turn.
    pub turn: i64,
    /// Its number in the turn.
    pub number: u32,
    /// Its name, such as `t12c1a1`.
    pub name: String,
    /// Whether it counts in `maxCallsPerTurn`.
    pub is_of_turn: bool,
    /// When it was sent.
    pub starts: Timestamp,
    /// When its answer was committed.
    pub ends: Timestamp,
    /// Uncached input, cache writes and output, if reported.
    pub tokens: Option<i64>,
    /// All input tokens, if known. Earlier releases did not record them.
    pub input_tokens: Option<i64>,
    /// All output tokens, likewise.
    pub output_tokens: Option<i64>,
    /// Cost in micro-dollars, if known.
    pub cost: Option<i64>,
}

impl HistoricalCall {
    /// What is known of an amount.
    #[must_use]
    pub const fn known(&self, kind: AmountKind) -> Option<i64> {
        match kind {
            AmountKind::Tokens => self.tokens,
            AmountKind::InputTokens => self.input_tokens,
            AmountKind::OutputTokens => self.output_tokens,
            AmountKind::Calls => Some(1),
            AmountKind::Cost => self.cost,
        }
    }

    /// What it used. What is not known counts as none.
    #[must_use]
    pub fn amount(&self) -> Amount {
        Amount::from_fn(|kind| self.known(kind).unwrap_or(0))
    }
}

/// What happened, at one place of a history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PastEvent {
    /// A model call.
    Call(HistoricalCall),
    /// A tool run with side effects began, requested by this call.
    Action {
        /// Turn and call.
        of: (i64, u32),
    },
    /// A tool run ended, requested by this call.
    RunEnded {
        /// Turn and call.
        of: (i64, u32),
        /// Name of the tool.
        tool: String,
        /// Its outcome.
        outcome: String,
    },
    /// A turn of the agent was completed.
    TurnEnded {
        /// The turn.
        turn: i64,
        /// The sleep that the agent chose.
        sleep: Option<SignedDuration>,
    },
    /// After a turn, the loop began to sleep or to wait for so long that its gateway closes its leases, or ended.
    Rested {
        /// The turn.
        turn: i64,
    },
}

/// The history of one Agent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PastLoop {
    /// What happened and when, in order.
    pub events: Vec<(Timestamp, PastEvent)>,
    /// The first turn that the history still has.
    pub first_turn: i64,
}

impl PastLoop {
    /// Leaves out what was before.
    pub fn begin_at(&mut self, begin: Timestamp) {
        self.events.retain(|(at, _)| *at >= begin);
    }
}

/// A line of the export.
#[derive(Deserialize)]
#[serde(tag = "record", rename_all = "lowercase")]
enum HistoryLine {
    Execution(ExecutionLine),
    Step(StepLine),
    Audit(AuditLine),
    /// A kind of a later version.
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct ExecutionLine {
    id: String,
    turn: i64,
    completed_at: Option<Timestamp>,
    state_snapshot: Option<Value>,
}

#[derive(Deserialize)]
struct StepLine {
    execution_id: String,
    timestamp: Timestamp,
    call: String,
    purpose: String,
    duration_milliseconds: Option<i64>,
    #[serde(default)]
    action: Value,
    tokens_used: Option<i64>,
    input_tokens: Option<i64>,
    output_tokens: Option<i64>,
    cost_micro_usd: Option<i64>,
}

#[derive(Deserialize)]
struct AuditLine {
    at: Timestamp,
    call: Option<String>,
    tool: Option<String>,
    effect: Option<String>,
    decision: Option<String>,
    outcome: Option<String>,
    #[serde(default)]
    note: Option<String>,
}

/// The purpose of calls beside the work of the mode, whose tool runs belong to no row of failures.
const CHAT: &str = "Chat";
/// Purposes whose calls count in `maxCallsPerTurn`.
const OF_TURNS: [&str; 3] = ["Turn", "Heartbeat", CHAT];

/// Reads the lines of a history. The error names the line.
pub fn read(text: &str) -> Result<PastLoop, String> {
    let mut executions = Vec::new();
    let mut steps = Vec::new();
    let mut events = Vec::new();
    for (place, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let wrong = |problem: String| format!("line {}: {problem}", place + 1);
        match serde_json::from_str(line).map_err(|error| wrong(error.to_string()))? {
            HistoryLine::Execution(execution) => executions.push(execution),
            HistoryLine::Step(step) => {
                let of = call_of(&step.call).ok_or_else(|| wrong(format!("{} is not a call", step.call)))?;
                let call = past_call(&step, of);
                events.push((call.starts, PastEvent::Call(call)));
                steps.push(step);
            }
            HistoryLine::Audit(audit) => events.extend(audit_event(audit)),
            HistoryLine::Other => {}
        }
    }
    let first_turn = executions.iter().map(|execution| execution.turn).min().unwrap_or(1);
    let last_call = steps.iter().map(|step| step.timestamp).max();
    for execution in executions {
        let calls = steps.iter().rev().filter(|step| step.execution_id == execution.id);
        events.extend(turn_end(&execution, calls, last_call));
    }
    let chats: BTreeSet<(i64, u32)> = steps
        .iter()
        .filter(|step| step.purpose == CHAT)
        .filter_map(|step| call_of(&step.call))
        .collect();
    events.retain(|(_, event)| !matches!(event, PastEvent::RunEnded { of, .. } if chats.contains(of)));
    events.sort_by_key(|(at, event)| (*at, order(event)));
    Ok(PastLoop { events, first_turn })
}

fn past_call(step: &StepLine, (turn, number): (i64, u32)) -> HistoricalCall {
    let took = SignedDuration::from_millis(step.duration_milliseconds.unwrap_or(0).max(0));
    HistoricalCall {
        turn,
        number,
        name: step.call.clone(),
        is_of_turn: OF_TURNS.contains(&step.purpose.as_str()),
        starts: step.timestamp.checked_sub(took).unwrap_or(step.timestamp),
        ends: step.timestamp,
        tokens: step.tokens_used,
        input_tokens: step.input_tokens,
        output_tokens: step.output_tokens,
        cost: step.cost_micro_usd,
    }
}

fn audit_event(audit: AuditLine) -> Option<(Timestamp, PastEvent)> {
    let of = call_of(audit.call.as_deref()?)?;
    let acts = audit.effect.as_deref().is_some_and(|effect| effect != "Read");
    // Of a run that a restart interrupted, the first sending and the last outcome count.
    let note = audit.note.as_deref().unwrap_or_default();
    if note == "repeated" || note.starts_with("will be repeated") {
        return None;
    }
    match (audit.decision.as_deref(), audit.outcome) {
        (Some("Allowed"), _) if acts => Some((audit.at, PastEvent::Action { of })),
        (None, Some(outcome)) => {
            let tool = audit.tool.unwrap_or_default();
            Some((audit.at, PastEvent::RunEnded { of, tool, outcome }))
        }
        _ => None,
    }
}

/// The end of a turn: of one of the agent's own, with the sleep that was chosen, and whether the loop rests. `calls`: its
/// calls, last first. `last_call`: when the last call of the loop was answered.
fn turn_end<'a>(
    execution: &ExecutionLine,
    mut calls: impl Iterator<Item = &'a StepLine>,
    last_call: Option<Timestamp>,
) -> Vec<(Timestamp, PastEvent)> {
    let end = execution
        .state_snapshot
        .as_ref()
        .and_then(|state| state["end"].as_str());
    let (Some(at), Some(end)) = (execution.completed_at, end) else {
        return Vec::new();
    };
    let (sleep, rests) = match end {
        "continue" => (Some(None), false),
        // A result that was refused, or a question: the loop went on.
        "finish" | "check confidence" if last_call.is_some_and(|last| last > at) => (Some(None), false),
        "sleep" => {
            let chosen = calls.find_map(|step| chosen_sleep(&step.action, at));
            let chosen = chosen.unwrap_or(SignedDuration::MAX);
            (Some(Some(chosen)), chosen >= IDLE)
        }
        // Turns beside the mode, and pre-checks that skip a turn: the loop waits for the next one.
        "finish" | "check confidence" | "shutdown" | "task" | "chat" | "heartbeat" | "skip" => (None, true),
        _ => return Vec::new(),
    };
    let turn = execution.turn;
    let ended = sleep.map(|sleep| (at, PastEvent::TurnEnded { turn, sleep }));
    ended
        .into_iter()
        .chain(rests.then_some((at, PastEvent::Rested { turn })))
        .collect()
}

/// The sleep that a call requested. One without a time is the longest; what is longer than that is cut.
fn chosen_sleep(action: &Value, at: Timestamp) -> Option<SignedDuration> {
    let called = action
        .as_array()?
        .iter()
        .rev()
        .find(|called| called["tool"] == "yield")?;
    // Arguments are JSON, or a text of it.
    let read = called["arguments"]
        .as_str()
        .and_then(|text| serde_json::from_str(text).ok());
    let arguments: Value = read.unwrap_or_else(|| called["arguments"].clone());
    if let Some(until) = arguments["until"].as_str() {
        let until = until.parse::<Timestamp>().ok();
        let chosen = until.map(|until| until.duration_since(at).max(SignedDuration::ZERO));
        return Some(chosen.unwrap_or(SignedDuration::MAX));
    }
    let seconds = arguments["sleep"].as_f64();
    let chosen = seconds.and_then(|seconds| SignedDuration::try_from_secs_f64(seconds).ok());
    Some(chosen.unwrap_or(SignedDuration::MAX))
}

/// Turn and number of a call such as `t12c1a2` or `t12c1`.
fn call_of(name: &str) -> Option<(i64, u32)> {
    let (turn, rest) = name.strip_prefix('t')?.split_once('c')?;
    let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
    Some((turn.parse().ok()?, digits.parse().ok()?))
}

/// The order of events with the same time: by turn, then a call, what it requested, and the end of the turn.
fn order(event: &PastEvent) -> (i64, u32, u8) {
    match event {
        PastEvent::Call(call) => (call.turn, call.number, 0),
        PastEvent::Action { of } => (of.0, of.1, 1),
        PastEvent::RunEnded { of, .. } => (of.0, of.1, 2),
        PastEvent::TurnEnded { turn, .. } => (*turn, u32::MAX, 3),
        PastEvent::Rested { turn } => (*turn, u32::MAX, 4),
    }
}
