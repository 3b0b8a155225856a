//! One turn: its first message, its calls one after the other, what their answers mean, and its end.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;

use super::guardrails::{self, Guardrail, Rest};
use super::heartbeat::HEARTBEAT;
use super::machine::Engine;
use super::message::{self, Answer, Finish, Message, ToolCall};
use super::notifications::Shown;
use super::outbox::{Outbox, answer_line, call_line, line};
use super::precheck::PreCheck;
use super::snapshot::{Briefing, Lifecycle, Step, Turn, Unseen};
use super::yield_tool::Pace;
use super::{CallId, Effect, Purpose, Record, RecordKind, clock, context, prompt};
use crate::api::agent::Resource;
use crate::api::status::Outcome;

impl Engine {
    /// Begins the next turn with its first message and its first call.
    pub(super) fn begin_turn(&mut self, out: &mut Outbox) {
        let number = self.state.turns_begun.saturating_add(1);
        let briefing = std::mem::take(&mut self.state.briefing);
        let text = prompt::observe(number, out.now, &briefing, self.hot.summary(out.now));
        self.state.next_turn = None;
        self.state.beat.own_first = false;
        self.state.pre_check = PreCheck::default();
        self.open_turn(text, briefing, false, out);
    }

    /// Begins a turn with this message.
    pub(super) fn open_turn(&mut self, text: String, briefing: Briefing, heartbeat: bool, out: &mut Outbox) {
        self.take_tools();
        let number = self.state.turns_begun.saturating_add(1);
        let message = Arc::new(Message::User { text });
        self.state.turns_begun = number;
        self.state.turn = Some(Turn {
            number,
            call: 1,
            attempt: 0,
            failures: 0,
            step: Step::Due(out.now),
            messages: 1,
            crashes: 0,
            asked_under: 0,
            work: None,
            compaction: None,
            compactions: 0,
            unsummed: false,
            refusals: 0,
            cleared: 0,
            denials: BTreeMap::new(),
            acted: false,
            shown: Shown::default(),
            unseen: Unseen::default(),
            heartbeat,
            silent: 0,
            outdated: None,
            briefing,
        });
        self.transcript.push(message.clone());
        out.record(Record {
            messages: vec![message],
            ..line(RecordKind::TurnStarted, number, if heartbeat { HEARTBEAT } else { "" })
        });
        self.send_attempt(out);
    }

    /// Sends the next attempt at the present call of the turn.
    pub(super) fn send_attempt(&mut self, out: &mut Outbox) {
        if !self.is_heartbeat() {
            self.show_notifications();
        }
        if !self.make_room(out) {
            return;
        }
        self.probes_sent(out.now);
        self.state.counters.idle.count(out.now);
        if self.state.reasons.is_empty() {
            self.state.counters.idle.awake(out.now);
        }
        let Some(turn) = &mut self.state.turn else {
            return;
        };
        turn.attempt = turn.attempt.saturating_add(1);
        turn.step = Step::Open;
        turn.unseen = Unseen::default();
        let call = turn.call_id();
        let purpose = turn.purpose();
        self.count_use(Resource::LLMCalls, 1, out);
        out.record(call_line(RecordKind::CallStarted, call, purpose.as_ref(), Vec::new()));
        self.issue(call, out);
    }

    /// Hands the open attempt to the driver; after a restart once more, under the same id.
    pub(super) fn issue(&mut self, call: CallId, out: &mut Outbox) {
        let system = Arc::new(Message::System {
            text: prompt::system(&self.instructions, &self.skills),
        });
        self.in_flight = true;
        let (purpose, conversation) = self.conversation();
        if self.settings.pre_check.is_some() {
            self.hot.sent();
        }
        let messages: Vec<Arc<Message>> = std::iter::once(system).chain(conversation).collect();
        let state = self.block().filter(|_| purpose != Purpose::Compaction);
        let sent = context::size(&messages, 0) + self.toolbox.tokens();
        self.sent_tokens = Some(sent + state.as_deref().map_or(0, context::system));
        out.push(Effect::CallModel {
            call,
            purpose,
            messages,
            state,
            tools: self.toolbox.offered(),
        });
    }

    /// Estimated tokens of what is in every prompt.
    pub(super) fn fixed_tokens(&self) -> u64 {
        let state = self.block().map_or(0, |block| context::system(&block));
        context::system(&prompt::system(&self.instructions, &self.skills))
            + self.toolbox.tokens()
            + self.head_tokens()
            + state
    }

    /// Estimated tokens of the call last sent, its answer as long as it may be.
    fn largest_call(&self) -> u64 {
        let prompt = context::size(self.session(), self.cleared()).saturating_add(self.fixed_tokens());
        let prompt = self.state.sizes.billed(prompt);
        prompt.saturating_add(self.settings.max_output_tokens.into())
    }

    pub(super) fn count_use(&mut self, resource: Resource, amount: u64, out: &Outbox) {
        self.state
            .used
            .count(&self.settings.windows(), resource, amount, out.now);
    }

    /// The call last sent was not made after all.
    pub(super) fn was_not_made(&mut self) {
        self.state
            .used
            .give_back(&self.settings.windows(), Resource::LLMCalls, 1);
    }

    /// Ends a turn whose next call would have to wait; what it has done so far stays.
    pub(super) fn skip_rest(&mut self, out: &mut Outbox) {
        self.note(
            "the last turn was ended before it was done, since guardrails.rateLimits left no room for another call",
        );
        self.complete_turn(Pace::Continue, out);
    }

    /// The call in flight gave an answer. Any other call's answer is late and means nothing any more.
    pub(super) fn answered(&mut self, call: CallId, answer: &Answer, out: &mut Outbox) {
        if self.call_in_flight() != Some(call) {
            return;
        }
        self.in_flight = false;
        self.was_let_through();
        let Some(purpose) = self.state.turn.as_ref().map(Turn::purpose) else {
            self.answered_before_turn(call, answer, out);
            return;
        };
        out.push(Effect::Acknowledge { call });
        self.learn_size(answer.input_tokens);
        let tokens = answer.tokens.unwrap_or_else(|| self.largest_call());
        self.count_use(Resource::LLMTokens, tokens, out);
        if let Some(compaction) = self.compaction() {
            self.summarised(compaction, call, answer, out);
            return;
        }
        if !self.is_heartbeat() {
            self.state.counters.idle.count_call(out.now);
        }
        let silent = answer.text.as_deref().is_none_or(|text| text.trim().is_empty()) && answer.tool_calls.is_empty();
        if silent && answer.finish != Finish::Refused {
            self.said_nothing((call, purpose), answer, out);
            return;
        }
        let message = Arc::new(Message::Assistant {
            // Servers refuse an assistant message with nothing in it.
            text: if silent {
                Some("[no text]".to_owned())
            } else {
                answer.text.clone()
            },
            tool_calls: named(call, &answer.tool_calls),
            reasoning: answer.reasoning.clone(),
        });
        self.append(std::slice::from_ref(&message));
        let note = format!("{:?}", answer.finish);
        out.record(answer_line((call, purpose), answer, note, vec![message]));
        if answer.finish == Finish::Refused {
            self.refused_to_answer(out);
            return;
        }
        self.was_accepted(out);
        if answer.finish == Finish::Length && answer.tool_calls.is_empty() {
            let note = format!(
                "your last answer was cut at the output limit of {} tokens",
                self.settings.max_output_tokens
            );
            self.note(&note);
        }
        if answer.tool_calls.is_empty() {
            self.count_words();
            self.complete_turn(Pace::Continue, out);
        } else {
            self.begin_work(call, answer, out);
        }
    }

    fn answered_before_turn(&mut self, call: CallId, answer: &Answer, out: &mut Outbox) {
        if self.state.scoring.is_open() {
            self.score_answered(call, answer, out);
        } else {
            self.pre_checked(call, answer, out);
        }
    }

    /// The call before the coming turn has an outcome, or is not to have one.
    pub(super) fn close_call_before_turn(&mut self, now: Timestamp) {
        self.state.pre_check.close();
        self.state.scoring.reopen(now);
    }

    pub(super) fn append(&mut self, messages: &[Arc<Message>]) {
        self.transcript.extend_from_slice(messages);
        if let Some(turn) = &mut self.state.turn {
            turn.messages = turn.messages.saturating_add(messages.len());
        }
    }

    pub(super) fn ended_by_guardrail(&mut self, calls: u32, out: &mut Outbox) -> bool {
        if self.ending().is_some() {
            return true;
        }
        let settings = &self.settings;
        let ask = |guardrail: &&dyn Guardrail| guardrail.before_call(settings, calls);
        let Some(note) = guardrails::ALL.iter().find_map(ask) else {
            return false;
        };
        out.record(line(RecordKind::GuardrailTriggered, self.turn_number(), &*note));
        self.note(&note);
        true
    }

    /// How a guardrail, or a loop that was detected, ends the loop, if one does.
    fn ending(&self) -> Option<Outcome> {
        if self.state.watch.has_failed() {
            return Some(Outcome::Failed);
        }
        let (settings, counters) = (&self.settings, &self.state.counters);
        guardrails::ALL
            .iter()
            .find_map(|guardrail| guardrail.ends(settings, counters))
    }

    fn end(&mut self, outcome: Outcome, out: &mut Outbox) {
        self.state.outcome = Some(outcome);
        self.state.lifecycle = Lifecycle::Stopping;
        self.note_transition(out);
    }

    pub(super) fn next_call(&mut self, out: &Outbox) {
        if let Some(turn) = &mut self.state.turn {
            turn.call = turn.call.saturating_add(1);
            turn.attempt = 0;
            turn.failures = 0;
            turn.step = Step::Due(out.now);
        }
    }

    pub(super) fn complete_turn(&mut self, pace: Pace, out: &mut Outbox) {
        if self.is_heartbeat() {
            self.complete_heartbeat(out);
            return;
        }
        let note = match &pace {
            Pace::Continue => "continue",
            Pace::Sleep { .. } => "sleep",
            Pace::Shutdown => "shutdown",
        };
        let kept = self.keep_notifications(out.now);
        out.record(Record {
            messages: kept,
            ..line(RecordKind::TurnCompleted, self.turn_number(), note)
        });
        self.acknowledge_notifications();
        let rest = match &pace {
            Pace::Sleep { wait, .. } => self.rest(*wait, out.now),
            Pace::Continue | Pace::Shutdown => Rest::None,
        };
        self.look_at_turn(&pace, out);
        self.hot.committed();
        let unseen = self.state.turn.take().map(|turn| turn.unseen).unwrap_or_default();
        self.state.turns_completed = self.state.turns_completed.saturating_add(1);
        let counters = &mut self.state.counters;
        (counters.errors, counters.error_cooldowns, counters.crash_cooldowns) = (0, 0, 0);
        counters.refusals = 0;
        self.trust_history();
        self.state.next_turn = Some(clock::after(out.now, self.delay()));
        prompt::GOES_ON.clone_into(&mut self.state.briefing.cause);
        match pace {
            Pace::Continue => match self.ending() {
                Some(outcome) => {
                    out.record(line(
                        RecordKind::GuardrailTriggered,
                        self.turn_number(),
                        outcome.as_ref(),
                    ));
                    self.end(outcome, out);
                }
                None => self.after_turn(Rest::None, out),
            },
            Pace::Sleep {
                wait,
                wake_early_if,
                reason,
            } => {
                self.begin_sleep(wait, wake_early_if, reason, out.now);
                self.end_sleep_for(&unseen, out);
                self.after_turn(rest, out);
            }
            Pace::Shutdown => self.end(Outcome::Completed, out),
        }
    }

    fn after_turn(&mut self, rest: Rest, out: &Outbox) {
        for guardrail in guardrails::ALL {
            if let Some(trip) = guardrail.after_turn(&self.settings, &mut self.state.counters, rest) {
                self.hold_for(trip, out);
            }
        }
    }

    /// The next turn's first message says so; what concerns a heartbeat is not the next turn's business.
    pub(super) fn note(&mut self, note: &str) {
        if self.is_heartbeat() {
            return;
        }
        let notes = &mut self.state.briefing.notes;
        if !notes.iter().any(|known| known == note) {
            notes.push(note.to_owned());
        }
    }
}

/// The calls under ids of our own: servers repeat theirs, and refuse those of others.
fn named(answer: CallId, calls: &[ToolCall]) -> Vec<ToolCall> {
    let named = |(place, call): (usize, &ToolCall)| ToolCall {
        id: message::call_id(answer.turn, answer.call, place),
        ..call.clone()
    };
    calls.iter().enumerate().map(named).collect()
}
