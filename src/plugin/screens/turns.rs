//! The turns of an Agent, from its events.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::Serialize;

use super::event_usage::AnsweredCalls;
use super::figures::duration;
use super::table::TextTable;
use crate::api::amount::is_zero;
use crate::link::event_names;
use crate::link::events::EventLine;

/// Maximum number of names of tools that a row of the table shows.
const MAX_TOOLS: usize = 4;

/// One turn.
#[derive(Serialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct TurnRow {
    /// Number of the turn.
    pub turn: i64,
    /// Time at which it began.
    pub started_at: Option<Timestamp>,
    /// Time at which it ended. Absent: it is open.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<Timestamp>,
    /// Answered model calls.
    pub calls: u32,
    /// Failed attempts at model calls.
    pub failed_calls: u32,
    /// Answered calls whose tokens are not known: not in the tokens of this row.
    #[serde(skip_serializing_if = "is_zero")]
    pub unknown_calls: i64,
    /// Input tokens of the answered calls, including those read from or written to a cache. Absent: not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input_tokens: Option<i64>,
    /// Output tokens of the answered calls. Absent: not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_tokens: Option<i64>,
    /// Cost of the answered calls in millionths of a US dollar, as far as prices are known. Absent: not known.
    #[serde(rename = "costMicroUSD", skip_serializing_if = "Option::is_none")]
    pub cost: Option<i64>,
    #[serde(skip)]
    used: AnsweredCalls,
    /// Tool runs, by tool.
    pub tool_runs: BTreeMap<String, u32>,
    /// Tool runs that did not end with outcome `Ok`.
    pub failed_tool_runs: u32,
    /// Denied tool calls.
    pub denied_tool_calls: u32,
    /// `completed`, `failed` or `open`.
    pub end: &'static str,
    /// The yield, or the kind of the failure.
    pub note: String,
}

/// The turns that these events are of, oldest first, at most `max` of the newest.
#[must_use]
pub fn rows(events: &[EventLine], max: usize) -> Vec<TurnRow> {
    let mut turns: BTreeMap<i64, TurnRow> = BTreeMap::new();
    for event in events.iter().filter(|event| event.turn > 0 && event.member == 0) {
        if event.event == event_names::TURN_STARTED {
            let row = TurnRow {
                turn: event.turn,
                started_at: event.at.parse().ok(),
                end: "open",
                ..TurnRow::default()
            };
            turns.entry(event.turn).or_insert(row);
        } else if let Some(row) = turns.get_mut(&event.turn) {
            count(row, event);
        }
    }
    let skipped = turns.len().saturating_sub(max);
    turns.into_values().skip(skipped).collect()
}

fn count(row: &mut TurnRow, event: &EventLine) {
    match event.event.as_str() {
        event_names::CALL_ANSWERED => answered(row, event),
        "model:call_failed" => row.failed_calls += 1,
        event_names::TOOL_OUTCOME => {
            let tool = event.tool.clone().unwrap_or_default();
            *row.tool_runs.entry(tool).or_default() += 1;
            row.failed_tool_runs += u32::from(event.outcome.as_deref() != Some("Ok"));
        }
        event_names::TOOL_DENIED => row.denied_tool_calls += 1,
        event_names::TURN_COMPLETED => end(row, event, "completed"),
        event_names::TURN_FAILED => end(row, event, "failed"),
        _ => {}
    }
}

fn answered(row: &mut TurnRow, event: &EventLine) {
    row.calls += 1;
    row.used.add(event);
    let used = row.used;
    row.unknown_calls = used.unknown_calls;
    row.input_tokens = used.has_tokens().then_some(used.input_tokens);
    row.output_tokens = used.has_tokens().then_some(used.output_tokens);
    row.cost = used.has_cost().then_some(used.cost);
}

fn end(row: &mut TurnRow, event: &EventLine, how: &'static str) {
    row.ended_at = event.at.parse().ok();
    row.end = how;
    row.note.clone_from(&event.note);
}

/// The table.
#[must_use]
pub fn table(rows: &[TurnRow], now: Timestamp) -> TextTable {
    let mut table = TextTable::new(vec![
        "TURN",
        "STARTED",
        "DURATION",
        "CALLS",
        "TOKENS",
        "COST",
        "TOOL RUNS",
        "FAILED",
        "DENIED",
        "END",
        "NOTE",
    ]);
    for row in rows {
        let started = row.started_at.map(|at| at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
        let took = row.started_at.map(|at| row.ended_at.unwrap_or(now).duration_since(at));
        let failed = if row.failed_calls > 0 {
            format!("{}+{}", row.calls, row.failed_calls)
        } else {
            row.calls.to_string()
        };
        table.push(vec![
            row.turn.to_string(),
            started.unwrap_or_default(),
            took.map(duration).unwrap_or_default(),
            failed,
            row.used.tokens_text().unwrap_or_default(),
            row.used.cost_text().unwrap_or_default(),
            tools(&row.tool_runs),
            row.failed_tool_runs.to_string(),
            row.denied_tool_calls.to_string(),
            row.end.to_owned(),
            row.note.clone(),
        ]);
    }
    table
}

fn tools(runs: &BTreeMap<String, u32>) -> String {
    let name = |(tool, runs): (&String, &u32)| {
        if *runs == 1 {
            tool.clone()
        } else {
            format!("{tool} ×{runs}")
        }
    };
    let mut names: Vec<String> = runs.iter().take(MAX_TOOLS).map(name).collect();
    if runs.len() > MAX_TOOLS {
        names.push(format!("and {} more", runs.len() - MAX_TOOLS));
    }
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn events() -> Vec<EventLine> {
        let at = |second: u32| format!("2026-11-22T14:00:{second:02}Z");
        let rows = json!([
            {"event": "tool:outcome", "turn": 1, "tool": "of_an_older_turn", "at": at(0)},
            {"event": "autonomy:turn_started", "turn": 2, "at": at(1)},
            {"event": "model:call_failed", "turn": 2, "at": at(2), "note": "Timeout"},
            {"event": "model:call_answered", "turn": 2, "at": at(3), "inputTokens": 3_000, "outputTokens": 400, "costMicroUSD": 12_000},
            {"event": "model:call_answered", "turn": 2, "at": at(3)},
            {"event": "tool:outcome", "turn": 2, "tool": "read", "outcome": "Ok", "at": at(4)},
            {"event": "tool:outcome", "turn": 2, "tool": "read", "outcome": "Error", "at": at(5)},
            {"event": "tool:outcome", "turn": 2, "tool": "a", "outcome": "Ok", "at": at(5)},
            {"event": "tool:outcome", "turn": 2, "tool": "b", "outcome": "Ok", "at": at(5)},
            {"event": "tool:outcome", "turn": 2, "tool": "c", "outcome": "Ok", "at": at(5)},
            {"event": "tool:outcome", "turn": 2, "tool": "d", "outcome": "Ok", "at": at(5)},
            {"event": "tool:denied", "turn": 2, "tool": "x", "at": at(6)},
            {"event": "autonomy:turn_completed", "turn": 2, "note": "sleep", "at": at(9)},
            {"event": "autonomy:turn_started", "turn": 3, "at": at(10)},
            {"event": "autonomy:turn_failed", "turn": 3, "note": "Unreachable", "at": at(12)},
            {"event": "autonomy:turn_started", "turn": 4, "at": at(20)},
            {"event": "model:call_answered", "turn": 4, "member": 1, "at": at(21)},
            {"event": "model:call_answered", "turn": 4, "at": at(22), "inputTokens": 10, "outputTokens": 1, "costMicroUSD": 0},
        ]);
        serde_json::from_value(rows).unwrap()
    }

    #[test]
    fn the_table_of_turns() {
        let now = "2026-11-22T14:01:00Z".parse().unwrap();
        insta::assert_snapshot!(table(&rows(&events(), 20), now));
    }

    #[test]
    fn the_newest_turns_are_kept() {
        let turns = |max| rows(&events(), max).iter().map(|row| row.turn).collect::<Vec<_>>();
        assert_eq!(turns(3), [2, 3, 4]);
        assert_eq!(turns(2), [3, 4]);
    }
}
