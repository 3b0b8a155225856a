//! A line for people for each event of an Agent that matters to them.

use jiff::Timestamp;

use super::event_usage::AnsweredCalls;
use super::figures::duration;
use super::printable::one_line;
use crate::api::money::dollars;
use crate::api::status::LoopUsage;
use crate::link::event_names;
use crate::link::events::EventLine;
use crate::support::text::short_number;

/// Events that `logs` leaves out: they are steps of what another line says.
const STEPS: [&str; 3] = [
    "model:call_started",
    event_names::RESULTS_CLEARED,
    event_names::TOOL_INTENT,
];

/// Makes lines of events. Keeps when the open turn and the open tool runs began, and what the calls of the turn used.
#[derive(Clone, Debug, Default)]
pub struct EventPrinter {
    turn: Option<ShownTurn>,
    runs: Vec<(String, Timestamp)>,
}

#[derive(Clone, Debug)]
struct ShownTurn {
    number: i64,
    began: Timestamp,
    calls: AnsweredCalls,
}

impl EventPrinter {
    /// The line of an event; `None`: it has none.
    pub fn line(&mut self, event: &EventLine) -> Option<String> {
        let at: Timestamp = event.at.parse().unwrap_or_default();
        let took = self.results(event, at);
        if STEPS.contains(&event.event.as_str()) || self.is_counted(event) {
            return None;
        }
        let time = at.strftime("%Y-%m-%dT%H:%M:%SZ");
        let member = if event.member == 0 {
            String::new()
        } else {
            format!("#{}", event.member)
        };
        let turn = if event.turn > 0 {
            format!("t{}{member}", event.turn)
        } else {
            String::new()
        };
        let name = event.event.strip_prefix("autonomy:").unwrap_or(&event.event);
        let mut details: Vec<String> = Vec::new();
        details.extend(event.tool.clone());
        details.extend(event.outcome.clone());
        details.extend(event.model.clone());
        details.extend(Some(event.note.clone()).filter(|note| !note.is_empty()));
        details.extend(took);
        let text = format!("{time}  {turn:<6}  {name:<19}  {}", details.join("  "));
        Some(one_line(text.trim_end()))
    }

    /// Whether the line of the turn's end says what this call used.
    fn is_counted(&self, event: &EventLine) -> bool {
        event.event == event_names::CALL_ANSWERED && self.turn.as_ref().is_some_and(|turn| turn.number == event.turn)
    }

    /// How long the turn or the tool run took that this event ends, and what the turn, or a call outside of it, used.
    fn results(&mut self, event: &EventLine, at: Timestamp) -> Vec<String> {
        let after = |began: Timestamp| format!("after {}", duration(at.duration_since(began)));
        match (event.event.as_str(), &event.run) {
            (event_names::TURN_STARTED, _) => {
                self.turn = Some(ShownTurn {
                    number: event.turn,
                    began: at,
                    calls: AnsweredCalls::default(),
                });
                Vec::new()
            }
            (event_names::CALL_ANSWERED, _) => match &mut self.turn {
                Some(turn) if turn.number == event.turn => {
                    turn.calls.add(event);
                    Vec::new()
                }
                // Before or between turns, such as a pre-check or a judge, or of a turn that began before the first event.
                _ => {
                    let mut call = AnsweredCalls::default();
                    call.add(event);
                    used(&call)
                }
            },
            (event_names::TURN_COMPLETED | event_names::TURN_FAILED, _) => {
                let open = self.turn.take().filter(|turn| turn.number == event.turn);
                open.map_or_else(Vec::new, |turn| {
                    std::iter::once(after(turn.began)).chain(used(&turn.calls)).collect()
                })
            }
            (event_names::TOOL_INTENT, Some(run)) => {
                self.runs.push((run.clone(), at));
                Vec::new()
            }
            (event_names::TOOL_OUTCOME, Some(run)) => {
                let open = self.runs.iter().position(|(open, _)| open == run);
                open.map(|index| after(self.runs.swap_remove(index).1))
                    .into_iter()
                    .collect()
            }
            _ => Vec::new(),
        }
    }
}

/// Tokens and cost, as far as they are known.
fn used(calls: &AnsweredCalls) -> Vec<String> {
    let tokens = calls.tokens_text().map(|tokens| format!("{tokens} tokens"));
    tokens.into_iter().chain(calls.cost_text()).collect()
}

/// The line with what the loop used since its Agent was created.
#[must_use]
pub fn total_line(usage: &LoopUsage, now: Timestamp) -> String {
    let tokens = [
        usage.input_tokens,
        usage.output_tokens,
        usage.cache_read_tokens,
        usage.cache_write_tokens,
    ];
    let tokens = tokens.into_iter().fold(0, i64::saturating_add);
    let (time, name) = (now.strftime("%Y-%m-%dT%H:%M:%SZ"), "usage");
    let (tokens, cost) = (short_number(tokens), dollars(usage.cost));
    format!("{time}  {:<6}  {name:<19}  total {tokens} tokens, {cost}", "")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Events as the stream has them.
    pub(crate) fn events() -> Vec<EventLine> {
        let rows = json!([
            {"seq": 1, "event": "loop:started", "at": "2026-11-22T14:00:00Z", "note": "4"},
            {"seq": 2, "event": "autonomy:turn_started", "at": "2026-11-22T14:00:01Z", "turn": 3},
            {"seq": 3, "event": "model:call_started", "at": "2026-11-22T14:00:01Z", "turn": 3, "call": "t3c1a1", "note": "Turn"},
            {"seq": 4, "event": "model:call_answered", "at": "2026-11-22T14:00:04Z", "turn": 3, "call": "t3c1a1", "model": "large",
                "inputTokens": 3_000, "outputTokens": 400, "costMicroUSD": 12_000},
            {"seq": 5, "event": "tool:intent", "at": "2026-11-22T14:00:04Z", "turn": 3, "run": "t3c1r1", "tool": "files__write", "effect": "Write"},
            {"seq": 6, "event": "tool:outcome", "at": "2026-11-22T14:00:06Z", "turn": 3, "run": "t3c1r1", "tool": "files__write", "outcome": "Ok"},
            {"seq": 7, "event": "tool:denied", "at": "2026-11-22T14:00:06Z", "turn": 3, "tool": "bad\u{1b}[2J", "note": "unknown tool"},
            {"seq": 8, "event": "gate:opened", "at": "2026-11-22T14:00:07Z", "turn": 3, "tool": "bank__pay", "note": "e3-t3c1r2"},
            {"seq": 9, "event": "autonomy:turn_completed", "at": "2026-11-22T14:02:01Z", "turn": 3, "note": "sleep"},
            {"seq": 10, "event": "loop:state_changed", "at": "2026-11-22T14:02:01Z", "turn": 3, "note": "Running -> Sleeping"},
            {"seq": 11, "event": "autonomy:turn_failed", "at": "2026-11-22T14:03:00Z", "turn": 4, "member": 2, "note": "Timeout"},
        ]);
        serde_json::from_value(rows).unwrap()
    }

    #[test]
    fn the_lines_of_events() {
        let mut printer = EventPrinter::default();
        let lines: Vec<String> = events().iter().filter_map(|event| printer.line(event)).collect();
        insta::assert_snapshot!(lines.join("\n"));
    }

    #[test]
    fn the_total_is_that_of_the_status() {
        let now: Timestamp = "2026-11-22T14:00:00Z".parse().unwrap();
        let usage = LoopUsage {
            input_tokens: 1_000,
            cache_read_tokens: 500,
            cost: 10_000,
            ..LoopUsage::default()
        };
        let line = "2026-11-22T14:00:00Z          usage                total 1.5k tokens, $0.01";
        assert_eq!(total_line(&usage, now), line);
    }

    /// Lines of events with these fields, without their times.
    fn lines(rows: &serde_json::Value) -> Vec<String> {
        let mut events: Vec<EventLine> = serde_json::from_value(rows.clone()).unwrap();
        let mut printer = EventPrinter::default();
        for event in &mut events {
            event.at = "2026-11-22T14:00:00Z".into();
        }
        let lines = events.iter().filter_map(|event| printer.line(event));
        lines
            .map(|line| line["2026-11-22T14:00:00Z  ".len()..].to_owned())
            .collect()
    }

    #[test]
    fn calls_outside_of_the_open_turn_have_lines_and_are_not_in_its_sum() {
        let rows = json!([
            {"event": "model:call_answered", "turn": 2, "model": "small", "inputTokens": 90, "outputTokens": 2, "costMicroUSD": 500},
            {"event": "autonomy:turn_completed", "turn": 2, "note": "sleep"},
            {"event": "autonomy:turn_started", "turn": 3},
            {"event": "model:call_answered", "turn": 3, "model": "large", "inputTokens": 3_000, "outputTokens": 400, "costMicroUSD": 12_000},
            {"event": "model:call_answered", "turn": 4, "model": "small", "inputTokens": 10, "outputTokens": 1},
            {"event": "autonomy:turn_completed", "turn": 3, "note": "sleep"},
            {"event": "model:call_answered", "turn": 3, "model": "judge\u{1b}[2J"},
        ]);
        let expected = [
            "t2      model:call_answered  small  92 tokens  $0.0005",
            "t2      turn_completed       sleep",
            "t3      turn_started",
            "t4      model:call_answered  small  11 tokens",
            "t3      turn_completed       sleep  after 0s  3.4k tokens  $0.012",
            "t3      model:call_answered  judge [2J",
        ];
        assert_eq!(lines(&rows), expected);
    }

    #[test]
    fn a_turn_of_a_worker_that_sends_no_usage_has_no_sum() {
        let rows = json!([
            {"event": "autonomy:turn_started", "turn": 3},
            {"event": "model:call_answered", "turn": 3},
            {"event": "autonomy:turn_failed", "turn": 3, "note": "Timeout"},
        ]);
        let expected = ["t3      turn_started", "t3      turn_failed          Timeout  after 0s"];
        assert_eq!(lines(&rows), expected);
    }
}
