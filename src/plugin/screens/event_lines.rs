//! A line for people for each event of an Agent that matters to them.

use jiff::Timestamp;

use super::figures::duration;
use super::printable::one_line;
use crate::api::money::dollars;
use crate::api::status::LoopUsage;
use crate::link::event_names;
use crate::link::events::EventLine;
use crate::support::text::short_number;

/// Events that `logs` leaves out: they are steps of what another line says.
const STEPS: [&str; 4] = [
    "model:call_started",
    "model:call_answered",
    event_names::RESULTS_CLEARED,
    event_names::TOOL_INTENT,
];

/// Makes lines of events. Keeps when the open turn and the open tool runs began.
#[derive(Clone, Debug, Default)]
pub struct EventPrinter {
    turn: Option<(i64, Timestamp)>,
    runs: Vec<(String, Timestamp)>,
}

impl EventPrinter {
    /// The line of an event; `None`: it has none.
    pub fn line(&mut self, event: &EventLine) -> Option<String> {
        let at: Timestamp = event.at.parse().unwrap_or_default();
        let took = self.duration(event, at);
        if STEPS.contains(&event.event.as_str()) {
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
        details.extend(Some(event.note.clone()).filter(|note| !note.is_empty()));
        details.extend(took);
        let text = format!("{time}  {turn:<6}  {name:<19}  {}", details.join("  "));
        Some(one_line(text.trim_end()))
    }

    /// How long the turn or the tool run took that this event ends.
    fn duration(&mut self, event: &EventLine, at: Timestamp) -> Option<String> {
        let began = match (event.event.as_str(), &event.run) {
            (event_names::TURN_STARTED, _) => {
                self.turn = Some((event.turn, at));
                None
            }
            (event_names::TURN_COMPLETED | event_names::TURN_FAILED, _) => {
                let open = self.turn.take();
                open.filter(|(turn, _)| *turn == event.turn).map(|(_, began)| began)
            }
            (event_names::TOOL_INTENT, Some(run)) => {
                self.runs.push((run.clone(), at));
                None
            }
            (event_names::TOOL_OUTCOME, Some(run)) => {
                let open = self.runs.iter().position(|(open, _)| open == run);
                open.map(|index| self.runs.swap_remove(index).1)
            }
            _ => None,
        }?;
        Some(format!("after {}", duration(at.duration_since(began))))
    }
}

/// What was used since the last time that this was said: counts lag behind the events by up to 15 s.
#[derive(Clone, Debug, Default)]
pub struct UsagePrinter {
    last: Option<LoopUsage>,
}

impl UsagePrinter {
    /// Begins with what was used before. Returns a line about it.
    pub fn begin(&mut self, usage: &LoopUsage, now: Timestamp) -> String {
        self.last = Some(usage.clone());
        let (tokens, cost) = (short_number(all_tokens(usage)), dollars(usage.cost));
        format!("{}total {tokens} tokens, {cost}", head(now))
    }

    /// The line, if something was used since the last one.
    pub fn line(&mut self, usage: &LoopUsage, now: Timestamp) -> Option<String> {
        let last = self.last.replace(usage.clone()).unwrap_or_default();
        let (calls, tokens) = (usage.calls - last.calls, all_tokens(usage) - all_tokens(&last));
        if calls <= 0 && tokens <= 0 {
            return None;
        }
        Some(format!(
            "{}+{calls} calls  +{} tokens  +{}  total {} tokens, {}",
            head(now),
            short_number(tokens),
            dollars((usage.cost - last.cost).max(0)),
            short_number(all_tokens(usage)),
            dollars(usage.cost),
        ))
    }
}

fn all_tokens(usage: &LoopUsage) -> i64 {
    usage.input_tokens + usage.output_tokens + usage.cache_read_tokens + usage.cache_write_tokens
}

/// The columns of a line about usage.
fn head(now: Timestamp) -> String {
    format!("{}  {:<6}  {:<19}  ", now.strftime("%Y-%m-%dT%H:%M:%SZ"), "", "usage")
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
            {"seq": 4, "event": "model:call_answered", "at": "2026-11-22T14:00:04Z", "turn": 3, "call": "t3c1a1"},
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
    fn usage_is_shown_as_what_was_added() {
        let now: Timestamp = "2026-11-22T14:00:00Z".parse().unwrap();
        let usage = |calls, input_tokens, cost| LoopUsage {
            calls,
            input_tokens,
            cost,
            ..LoopUsage::default()
        };
        let mut printer = UsagePrinter::default();
        let begin = printer.begin(&usage(3, 1_000, 10_000), now);
        assert!(
            begin.ends_with("usage                total 1k tokens, $0.01"),
            "{begin}"
        );
        assert_eq!(printer.line(&usage(3, 1_000, 10_000), now), None);
        let line = printer.line(&usage(5, 2_500, 22_500), now).unwrap();
        assert!(
            line.ends_with("+2 calls  +1.5k tokens  +$0.0125  total 2.5k tokens, $0.0225"),
            "{line}"
        );
    }
}
