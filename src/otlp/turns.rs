//! Spans of turns, tool runs and waits, made from what a journal records about them.
//!
//! The tracer has no clock and no I/O. The lines of the open turn yield the same spans when they are fed again, so a
//! restarted worker continues where the last one ended.

use std::collections::BTreeMap;

use jiff::Timestamp;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::Event;

use crate::ids::TurnName;
use crate::resource::{int, text};
use crate::spans::{AgentIdentity, child, fail, nanoseconds};

/// Events of one span at most; the rest is counted.
const MAX_EVENTS: usize = 128;
/// Tool runs and waits that are open at most. An older one that never ends is forgotten.
const MAX_OPEN: usize = 256;

/// Something that was recorded about a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TurnFact<'a> {
    /// The turn began.
    Started {
        /// Its kind, such as `heartbeat`; empty for a turn of the agent's own.
        kind: &'a str,
    },
    /// The turn ended.
    Completed {
        /// What follows, such as `sleep`.
        then: &'a str,
    },
    /// The turn failed.
    Failed {
        /// The kind of failure.
        kind: &'a str,
    },
    /// A tool is about to be run.
    RunStarted {
        run: &'a str,
        tool: &'a str,
        effect: &'a str,
    },
    /// The run ended.
    RunEnded {
        run: &'a str,
        tool: &'a str,
        /// The id of the call in the messages; `None`: the model did not request the run.
        call: Option<&'a str>,
        outcome: &'a str,
    },
    /// A call of a tool was denied: nothing was run.
    RunDenied { run: &'a str, why: &'a str },
    /// A person is asked. The note begins with the id of the gate.
    GateOpened { note: &'a str },
    /// The question is settled. The note begins with the id of the gate, then says how.
    GateResolved { note: &'a str },
    /// The state of the loop changed, such as `Running -> Paused (RateWindow)`.
    StateChanged { note: &'a str },
}

/// Makes spans from [`TurnFact`]s, in the order of the journal.
pub struct TurnTracer {
    agent: AgentIdentity,
    /// The turn that is open, by member and number.
    turn: Option<OpenTurn>,
    runs: BTreeMap<String, OpenRun>,
    gates: BTreeMap<String, OpenWait>,
    pause: Option<(OpenWait, String)>,
}

struct OpenTurn {
    key: (u16, i64),
    from: Timestamp,
    kind: String,
    events: Vec<Event>,
    dropped: u32,
}

struct OpenRun {
    from: Timestamp,
    effect: String,
}

/// A wait, and the turn in which it began.
struct OpenWait {
    key: (u16, i64),
    from: Timestamp,
}

impl TurnTracer {
    #[must_use]
    pub fn new(agent: AgentIdentity) -> Self {
        Self {
            agent,
            turn: None,
            runs: BTreeMap::new(),
            gates: BTreeMap::new(),
            pause: None,
        }
    }

    /// Takes a fact about a turn, `key`, of a member and a number. Returns the spans that end with it.
    pub fn observe(&mut self, key: (u16, i64), at: Timestamp, fact: TurnFact<'_>) -> Vec<Span> {
        match fact {
            TurnFact::Started { kind } => {
                self.turn = Some(OpenTurn {
                    key,
                    from: at,
                    kind: kind.to_owned(),
                    events: Vec::new(),
                    dropped: 0,
                });
                Vec::new()
            }
            TurnFact::Completed { then } => self.end(key, at, Ok(then)),
            TurnFact::Failed { kind } => self.end(key, at, Err(kind)),
            TurnFact::RunStarted { run, effect, .. } => {
                let effect = effect.to_owned();
                // A run that is repeated after a restart is one span, from its first attempt.
                insert(&mut self.runs, run, OpenRun { from: at, effect });
                Vec::new()
            }
            TurnFact::RunEnded {
                run,
                tool,
                call,
                outcome,
            } => vec![self.end_run(key, at, (run, tool, call), outcome)],
            TurnFact::RunDenied { run, why } => {
                self.add_event(
                    key,
                    at,
                    "tool_denied",
                    &[("agentloop.run", run), ("agentloop.reason", first_word(why))],
                );
                Vec::new()
            }
            TurnFact::GateOpened { note } => {
                insert(&mut self.gates, first_word(note), OpenWait { key, from: at });
                Vec::new()
            }
            TurnFact::GateResolved { note } => self.end_gate(at, note).into_iter().collect(),
            TurnFact::StateChanged { note } => self.change_state(key, at, note).into_iter().collect(),
        }
    }

    fn turn_name(&self, (member, turn): (u16, i64)) -> TurnName<'_> {
        TurnName {
            agent: &self.agent.uid,
            member,
            turn,
        }
    }

    fn end(&mut self, key: (u16, i64), at: Timestamp, result: Result<&str, &str>) -> Vec<Span> {
        let pause = self.pause.take_if(|(pause, _)| pause.key == key);
        let mut spans: Vec<_> = pause.map(|pause| self.pause_span(pause, at)).into_iter().collect();
        // Without its beginning, which the journal no longer has, the turn is a moment.
        let open = self.turn.take_if(|turn| turn.key == key).unwrap_or(OpenTurn {
            key,
            from: at,
            kind: String::new(),
            events: Vec::new(),
            dropped: 0,
        });
        let turn = self.turn_name(key);
        let name = format!("invoke_agent {}", self.agent.name);
        let mut span = Span {
            span_id: turn.root_id(),
            parent_span_id: Vec::new(),
            events: open.events,
            dropped_events_count: open.dropped,
            ..child(turn, "turn", name, (open.from, at))
        };
        span.attributes = vec![
            text("gen_ai.operation.name", "invoke_agent"),
            text("gen_ai.provider.name", self.agent.provider),
            text("gen_ai.agent.name", &self.agent.name),
            text("gen_ai.agent.id", &self.agent.uid),
            text("gen_ai.request.model", &self.agent.model),
            text("k8s.namespace.name", &self.agent.namespace),
            int("agentloop.turn", key.1),
            text(
                "agentloop.turn.kind",
                if open.kind.is_empty() { "own" } else { &open.kind },
            ),
        ];
        if key.0 != 0 {
            span.attributes.push(int("agentloop.member", i64::from(key.0)));
        }
        match result {
            Ok(then) => span.attributes.extend([
                text("agentloop.turn.outcome", "completed"),
                text("agentloop.turn.then", then),
            ]),
            Err(kind) => {
                span.attributes.push(text("agentloop.turn.outcome", "failed"));
                fail(&mut span, first_word(kind));
            }
        }
        spans.push(span);
        spans
    }

    fn end_run(
        &mut self,
        key: (u16, i64),
        at: Timestamp,
        (run, tool, call): (&str, &str, Option<&str>),
        outcome: &str,
    ) -> Span {
        let open = self.runs.remove(run);
        let from = open.as_ref().map_or(at, |open| open.from);
        let mut span = child(self.turn_name(key), run, format!("execute_tool {tool}"), (from, at));
        span.attributes = vec![
            text("gen_ai.operation.name", "execute_tool"),
            text("gen_ai.tool.name", tool),
            text("gen_ai.tool.type", "function"),
            text("gen_ai.agent.name", &self.agent.name),
            text("gen_ai.agent.id", &self.agent.uid),
            text("agentloop.run", run),
            text("agentloop.tool.outcome", outcome),
        ];
        span.attributes
            .extend(call.map(|call| text("gen_ai.tool.call.id", call)));
        let effect = open.map(|open| open.effect).filter(|effect| !effect.is_empty());
        span.attributes
            .extend(effect.map(|effect| text("agentloop.tool.effect", effect)));
        if outcome != "Ok" {
            fail(&mut span, outcome);
        }
        span
    }

    /// Who answered is not part of the span.
    fn end_gate(&mut self, at: Timestamp, note: &str) -> Option<Span> {
        let id = first_word(note);
        let how = first_word(note.get(id.len()..).unwrap_or_default());
        let OpenWait { key, from } = self.gates.remove(id)?;
        let unique = format!("gate {id}");
        let mut span = child(self.turn_name(key), &unique, "wait_for_approval".into(), (from, at));
        span.attributes = vec![text("agentloop.gate", id), text("agentloop.gate.outcome", how)];
        Some(span)
    }

    /// A pause of an open turn is a span; one between turns belongs to no trace.
    fn change_state(&mut self, key: (u16, i64), at: Timestamp, note: &str) -> Option<Span> {
        let ended = self.pause.take().map(|pause| self.pause_span(pause, at));
        let (_, after) = note.split_once(" -> ").unwrap_or_default();
        if let Some(reasons) = after.strip_prefix("Paused")
            && self.turn.as_ref().is_some_and(|turn| turn.key == key)
        {
            let reasons = reasons.trim().trim_matches(['(', ')']).to_owned();
            self.pause = Some((OpenWait { key, from: at }, reasons));
        }
        self.add_event(key, at, "state_changed", &[("agentloop.state", after)]);
        ended
    }

    fn pause_span(&self, (OpenWait { key, from }, reasons): (OpenWait, String), at: Timestamp) -> Span {
        let unique = format!("pause {}", nanoseconds(from));
        let mut span = child(self.turn_name(key), &unique, "wait_paused".into(), (from, at));
        span.attributes = vec![text("agentloop.pause.reasons", reasons)];
        span
    }

    fn add_event(&mut self, key: (u16, i64), at: Timestamp, name: &str, attributes: &[(&str, &str)]) {
        let Some(turn) = self.turn.as_mut().filter(|turn| turn.key == key) else {
            return;
        };
        if turn.events.len() == MAX_EVENTS {
            turn.dropped = turn.dropped.saturating_add(1);
            return;
        }
        turn.events.push(Event {
            time_unix_nano: nanoseconds(at),
            name: name.into(),
            attributes: attributes.iter().map(|(key, value)| text(key, *value)).collect(),
            ..Event::default()
        });
    }
}

/// Adds what is not there yet. Room is made by forgetting the first one by name.
fn insert<T>(open: &mut BTreeMap<String, T>, name: &str, new: T) {
    if open.contains_key(name) {
        return;
    }
    if open.len() >= MAX_OPEN {
        open.pop_first();
    }
    open.insert(name.to_owned(), new);
}

/// Notes begin with an id or one of few words; what follows may be longer.
fn first_word(note: &str) -> &str {
    note.split_whitespace().next().unwrap_or_default()
}

#[cfg(test)]
#[path = "turns_tests.rs"]
mod tests;
