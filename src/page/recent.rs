//! What loops did last: their newest turns and events, bounded, in memory.
//!
//! Fed with the lines of the journals as they are logged or read over the link, so it holds names, numbers and short notes,
//! and no text of a prompt or an answer. Lines that are received again are recognized by their numbers.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Mutex, PoisonError};

use crate::api::NamespacedName;
use crate::link::event_names;
use crate::link::events::EventLine;
use crate::support::text::{first_chars, with_ellipsis};

/// Turns of one Agent that are kept.
pub const MAX_TURNS: usize = 10;
/// Events of one Agent that are kept.
pub const MAX_EVENTS: usize = 30;
/// Lines of a journal that are read for them.
pub const MAX_LINES: u16 = 300;
/// Tools of one turn that are named.
const MAX_TOOLS: usize = 8;
/// Characters of a note or a message that are kept. A worker may send any text, also one of the size of a frame.
pub(super) const MAX_CHARS: usize = 200;
/// Characters of the name of a tool, a gate or a kind that are kept.
pub(super) const MAX_NAME_CHARS: usize = 64;
/// Characters of the name of an event, a time, an id or an outcome that are kept.
const MAX_WORD_CHARS: usize = 32;

/// One turn, as its events describe it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TurnRecord {
    pub turn: i64,
    /// `heartbeat`, `task` or `chat`; empty for a turn of the loop itself.
    pub kind: String,
    pub started_at: String,
    pub ended_at: Option<String>,
    /// How it ended; `None` while it is in progress.
    pub end: Option<TurnResult>,
    /// Attempts at model calls.
    pub calls: u32,
    /// Tool runs.
    pub runs: u32,
    /// Denied tool calls.
    pub denied: u32,
    /// Names of the first tools that ran.
    pub tools: BTreeSet<String>,
}

/// How a turn ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TurnResult {
    /// With this yield.
    Completed(String),
    /// With this kind of failure.
    Failed(String),
}

/// The newest turns and events of one Agent, the newest last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AgentHistory {
    pub turns: VecDeque<TurnRecord>,
    pub events: VecDeque<EventLine>,
}

/// The newest turns and events of several Agents.
#[derive(Default)]
pub struct RecentEvents(Mutex<BTreeMap<NamespacedName, AgentHistory>>);

impl RecentEvents {
    /// Adds an event, unless it was added before.
    pub fn add(&self, agent: NamespacedName, event: EventLine) {
        let mut agents = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        agents.entry(agent).or_default().add(event);
    }

    /// The number of the newest event of an Agent; 0 without one.
    #[must_use]
    pub fn newest(&self, agent: &NamespacedName) -> i64 {
        let agents = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let last = agents.get(agent).and_then(|history| history.events.back());
        last.map_or(0, |event| event.seq)
    }

    /// Forgets what an Agent did: it has no viewers any more, or the Agent was created again.
    pub fn forget(&self, agent: &NamespacedName) {
        let mut agents = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        agents.remove(agent);
    }

    /// What an Agent did last.
    #[must_use]
    pub fn of(&self, agent: &NamespacedName) -> AgentHistory {
        let agents = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        agents.get(agent).cloned().unwrap_or_default()
    }
}

impl AgentHistory {
    fn add(&mut self, mut event: EventLine) {
        if self.events.back().is_some_and(|last| event.seq <= last.seq) {
            return;
        }
        bound(&mut event);
        self.count(&event);
        self.events.push_back(event);
        while self.events.len() > MAX_EVENTS {
            self.events.pop_front();
        }
    }

    fn count(&mut self, event: &EventLine) {
        if event.event == event_names::TURN_STARTED {
            self.turns.push_back(TurnRecord {
                turn: event.turn,
                kind: event.note.clone(),
                started_at: event.at.clone(),
                ..TurnRecord::default()
            });
            while self.turns.len() > MAX_TURNS {
                self.turns.pop_front();
            }
            return;
        }
        // Absent for a turn that began before the oldest one that is kept.
        let Some(turn) = self.turns.iter_mut().rev().find(|turn| turn.turn == event.turn) else {
            return;
        };
        let end = match event.event.as_str() {
            event_names::TURN_COMPLETED => TurnResult::Completed(event.note.clone()),
            event_names::TURN_FAILED => TurnResult::Failed(event.note.clone()),
            "model:call_started" => return turn.calls += 1,
            event_names::TOOL_DENIED => return turn.denied += 1,
            event_names::TOOL_INTENT => {
                turn.runs += 1;
                if turn.tools.len() < MAX_TOOLS {
                    turn.tools.extend(event.tool.clone());
                }
                return;
            }
            _ => return,
        };
        (turn.end, turn.ended_at) = (Some(end), Some(event.at.clone()));
    }
}

/// The beginning of a text that is longer than this many characters.
pub(super) fn shortened(text: &str, max: usize) -> String {
    with_ellipsis(first_chars(text, max), text)
}

/// Drops what no page shows, and shortens the rest.
fn bound(event: &mut EventLine) {
    let shown = |text: &Option<String>, max| text.as_ref().map(|text| shortened(text, max));
    *event = EventLine {
        seq: event.seq,
        event: shortened(&event.event, MAX_WORD_CHARS),
        at: shortened(&event.at, MAX_WORD_CHARS),
        member: event.member,
        turn: event.turn,
        call: shown(&event.call, MAX_WORD_CHARS),
        run: shown(&event.run, MAX_WORD_CHARS),
        tool: shown(&event.tool, MAX_NAME_CHARS),
        outcome: shown(&event.outcome, MAX_WORD_CHARS),
        note: shortened(&event.note, MAX_CHARS),
        ..EventLine::default()
    };
}

#[cfg(test)]
mod tests {
    use jiff::tz::TimeZone;
    use pretty_assertions::assert_eq;

    use super::*;
    use crate::page::html::parts;
    use crate::page::view::{AgentView, PageView};

    fn event(seq: i64, name: &str, turn: i64, note: &str) -> EventLine {
        EventLine {
            seq,
            event: name.into(),
            at: format!("2026-11-22T12:00:{seq:02}Z"),
            turn,
            note: note.into(),
            ..EventLine::default()
        }
    }

    fn history(events: impl IntoIterator<Item = EventLine>) -> AgentHistory {
        let recent = RecentEvents::default();
        let agent = NamespacedName::new("n", "a");
        for event in events {
            recent.add(agent.clone(), event);
        }
        recent.of(&agent)
    }

    #[test]
    fn a_turn_has_its_calls_tool_runs_denials_and_end() {
        let tool = |seq, name: &str| EventLine {
            tool: Some("files__read".into()),
            ..event(seq, name, 1, "")
        };
        let events = [
            event(1, "autonomy:turn_started", 1, "heartbeat"),
            event(2, "model:call_started", 1, ""),
            tool(3, "tool:intent"),
            tool(4, "tool:outcome"),
            tool(5, "tool:intent"),
            tool(6, "tool:denied"),
            event(7, "model:call_started", 1, ""),
            event(8, "autonomy:turn_completed", 1, "sleep"),
            event(9, "autonomy:turn_started", 2, ""),
            event(10, "autonomy:turn_failed", 2, "Timeout"),
        ];
        let turns = history(events).turns;
        let first = TurnRecord {
            turn: 1,
            kind: "heartbeat".into(),
            started_at: "2026-11-22T12:00:01Z".into(),
            ended_at: Some("2026-11-22T12:00:08Z".into()),
            end: Some(TurnResult::Completed("sleep".into())),
            calls: 2,
            runs: 2,
            denied: 1,
            tools: BTreeSet::from(["files__read".into()]),
        };
        assert_eq!(turns[0], first);
        assert_eq!(turns[1].end, Some(TurnResult::Failed("Timeout".into())));
    }

    #[test]
    fn a_forgotten_agent_starts_again_at_any_number() {
        let (recent, agent) = (RecentEvents::default(), NamespacedName::new("n", "a"));
        assert_eq!(recent.newest(&agent), 0);
        recent.add(agent.clone(), event(7, "autonomy:turn_started", 1, ""));
        assert_eq!(recent.newest(&agent), 7);
        recent.forget(&agent);
        assert_eq!((recent.newest(&agent), recent.of(&agent)), (0, AgentHistory::default()));
        recent.add(agent.clone(), event(1, "autonomy:turn_started", 1, ""));
        assert_eq!(recent.newest(&agent), 1);
    }

    #[test]
    fn lines_that_a_restarted_worker_logs_again_are_counted_once() {
        let lines = [
            event(1, "autonomy:turn_started", 1, ""),
            event(2, "model:call_started", 1, ""),
        ];
        let history = history(lines.clone().into_iter().chain(lines));
        assert_eq!((history.events.len(), history.turns[0].calls), (2, 1));
    }

    #[test]
    fn events_of_a_hostile_worker_are_small_in_memory_and_on_the_page() {
        for letter in ["x", "<", "😀"] {
            let long = letter.repeat(256 * 1024 / letter.len());
            let hostile = |seq, name: &str| EventLine {
                at: long.clone(),
                kind: long.clone(),
                call: Some(long.clone()),
                run: Some(long.clone()),
                tool: Some(long.clone()),
                effect: Some(long.clone()),
                outcome: Some(long.clone()),
                trace_id: Some(long.clone()),
                messages: vec![long.clone(); 3],
                ..event(seq, name, seq / 3, &long)
            };
            let names = ["autonomy:turn_started", "tool:intent", long.as_str()];
            let history = history((0..30).map(|seq| hostile(seq + 1, names[usize::try_from(seq).unwrap() % 3])));
            assert_eq!(history.events.len(), MAX_EVENTS);
            assert!(history.events.iter().all(|event| event.messages.is_empty()));
            let sizes = (
                serde_json::to_string(&history.events).unwrap().len(),
                format!("{:?}", history.turns).len(),
            );
            assert!(sizes.0 < 64 * 1024 && sizes.1 < 64 * 1024, "{sizes:?} bytes in memory");
            let agent = AgentView {
                history: Some(history),
                ..AgentView::default()
            };
            let view = PageView {
                agents: vec![agent],
                ..PageView::default()
            };
            for part in parts(&view, &TimeZone::UTC) {
                assert!(part.html.len() < 64 * 1024, "{}: {} bytes", part.id, part.html.len());
            }
        }
    }

    #[test]
    fn turns_events_tools_and_characters_are_kept_up_to_their_bounds() {
        let turns = |count: i64| history((1..=count).map(|seq| event(seq, "autonomy:turn_started", seq, "")));
        let max = i64::try_from(MAX_TURNS).unwrap();
        for (count, first) in [(max, 1), (max + 1, 2)] {
            let history = turns(count);
            assert_eq!((history.turns.len(), history.turns[0].turn), (MAX_TURNS, first));
        }
        let max = i64::try_from(MAX_EVENTS).unwrap();
        for (count, first) in [(max, 1), (max + 1, 2)] {
            let history = turns(count);
            assert_eq!((history.events.len(), history.events[0].seq), (MAX_EVENTS, first));
        }
        let tools = (2..20).map(|seq| EventLine {
            tool: Some(format!("tool{seq}")),
            ..event(seq, "tool:intent", 1, &"é".repeat(MAX_CHARS + 1))
        });
        let history = history([event(1, "autonomy:turn_started", 1, "")].into_iter().chain(tools));
        assert_eq!((history.turns[0].tools.len(), history.turns[0].runs), (MAX_TOOLS, 18));
        let note = &history.events[1].note;
        assert!(
            note.starts_with(&"é".repeat(MAX_CHARS)) && note.chars().count() <= MAX_CHARS + 3,
            "{note}"
        );
    }
}
