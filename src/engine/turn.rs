//! One turn: its first message, its calls one after the other, what their answers mean, and its end.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;

use super::effects::{EffectBuffer, answer_line, call_line, journal_line};
use super::guardrails::{self, Guardrail, RestKind};
use super::heartbeat::HEARTBEAT;
use super::machine::Engine;
use super::message::{self, FinishReason, Message, ModelAnswer, ToolCall};
use super::notifications::ShownNotifications;
use super::precheck::PreCheckState;
use super::snapshot::{CallStep, LifecyclePhase, Turn, TurnBriefing, UnseenEvents};
use super::yield_tool::LoopPace;
use super::{CallId, CallPurpose, EngineEffect, JournalRecord, RecordKind, prompt, prompt_size, time_math};
use crate::api::agent::LimitedResource;
use crate::api::status::LoopOutcome;

impl Engine {
    /// Begins the next turn with its first message and its first call.
    pub(super) fn begin_turn(&mut self, out: &mut EffectBuffer) {
        let number = self.state.turns_begun.saturating_add(1);
        let briefing = std::mem::take(&mut self.state.briefing);
        let text = prompt::turn_opening(number, out.now, &briefing, self.hot.summary(out.now));
        self.state.next_turn = None;
        self.state.beat.own_first = false;
        self.state.pre_check = PreCheckState::default();
        self.open_turn(text, briefing, false, out);
    }

    /// Begins a turn with this message.
    pub(super) fn open_turn(&mut self, text: String, briefing: TurnBriefing, heartbeat: bool, out: &mut EffectBuffer) {
        self.take_tools();
        let number = self.state.turns_begun.saturating_add(1);
        let message = Arc::new(Message::User { text });
        self.state.turns_begun = number;
        self.state.turn = Some(Turn {
            number,
            call: 1,
            attempt: 0,
            failures: 0,
            step: CallStep::Due(out.now),
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
            shown: ShownNotifications::default(),
            unseen: UnseenEvents::default(),
            heartbeat,
            silent: 0,
            outdated: None,
            briefing,
        });
        self.transcript.push(message.clone());
        out.record(JournalRecord {
            messages: vec![message],
            ..journal_line(RecordKind::TurnStarted, number, if heartbeat { HEARTBEAT } else { "" })
        });
        self.send_attempt(out);
    }

    /// Sends the next attempt at the present call of the turn.
    pub(super) fn send_attempt(&mut self, out: &mut EffectBuffer) {
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
        turn.step = CallStep::Open;
        turn.unseen = UnseenEvents::default();
        let call = turn.call_id();
        let purpose = turn.purpose();
        self.count_use(LimitedResource::LLMCalls, 1, out);
        out.record(call_line(RecordKind::CallStarted, call, purpose.as_ref(), Vec::new()));
        self.dispatch_attempt(call, out);
    }

    /// Hands the open attempt to the driver; after a restart once more, under the same id.
    pub(super) fn dispatch_attempt(&mut self, call: CallId, out: &mut EffectBuffer) {
        let system = Arc::new(Message::System {
            text: prompt::system_prompt(&self.instructions, &self.skills),
        });
        self.in_flight = true;
        let (purpose, conversation) = self.conversation();
        if self.settings.pre_check.is_some() {
            self.hot.mark_sent();
        }
        let messages: Vec<Arc<Message>> = std::iter::once(system).chain(conversation).collect();
        let state = self.state_block().filter(|_| purpose != CallPurpose::Compaction);
        let sent = prompt_size::messages_size(&messages, 0) + self.toolbox.tokens();
        self.sent_tokens = Some(sent + state.as_deref().map_or(0, prompt_size::message_size));
        out.push(EngineEffect::CallModel {
            call,
            purpose,
            messages,
            state,
            tools: self.toolbox.offered(),
        });
    }

    /// Estimated tokens of what is in every prompt.
    pub(super) fn fixed_tokens(&self) -> u64 {
        let state = self.state_block().map_or(0, |block| prompt_size::message_size(&block));
        prompt_size::message_size(&prompt::system_prompt(&self.instructions, &self.skills))
            + self.toolbox.tokens()
            + self.head_tokens()
            + state
    }

    /// Estimated tokens of the call last sent, its answer as long as it may be.
    fn largest_call(&self) -> u64 {
        let prompt = prompt_size::messages_size(self.session(), self.cleared()).saturating_add(self.fixed_tokens());
        let prompt = self.state.sizes.billed(prompt);
        prompt.saturating_add(self.settings.max_output_tokens.into())
    }

    pub(super) fn count_use(&mut self, resource: LimitedResource, amount: u64, out: &EffectBuffer) {
        self.state
            .used
            .count(&self.settings.windows(), resource, amount, out.now);
    }

    /// The call last sent was not made after all.
    pub(super) fn uncount_call(&mut self) {
        self.state
            .used
            .give_back(&self.settings.windows(), LimitedResource::LLMCalls, 1);
    }

    /// Ends a turn whose next call would have to wait; what it has done so far stays.
    pub(super) fn skip_rest(&mut self, out: &mut EffectBuffer) {
        self.add_note(
            "the last turn was ended before it was done, since guardrails.rateLimits left no room for another call",
        );
        self.complete_turn(LoopPace::Continue, out);
    }

    /// The call in flight gave an answer. Any other call's answer is late and means nothing any more.
    pub(super) fn handle_answer(&mut self, call: CallId, answer: &ModelAnswer, out: &mut EffectBuffer) {
        if self.call_in_flight() != Some(call) {
            return;
        }
        self.in_flight = false;
        self.clear_probed_pauses();
        let Some(purpose) = self.state.turn.as_ref().map(Turn::purpose) else {
            self.handle_pre_turn_answer(call, answer, out);
            return;
        };
        out.push(EngineEffect::Acknowledge { call });
        self.calibrate_sizes(answer.input_tokens);
        let tokens = answer.tokens.unwrap_or_else(|| self.largest_call());
        self.count_use(LimitedResource::LLMTokens, tokens, out);
        if let Some(compaction) = self.compaction() {
            self.handle_summary(compaction, call, answer, out);
            return;
        }
        if !self.is_heartbeat() {
            self.state.counters.idle.count_call(out.now);
        }
        let silent = answer.text.as_deref().is_none_or(|text| text.trim().is_empty()) && answer.tool_calls.is_empty();
        if silent && answer.finish != FinishReason::Refused {
            self.handle_empty_answer((call, purpose), answer, out);
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
        if answer.finish == FinishReason::Refused {
            self.handle_model_refusal(out);
            return;
        }
        self.confirm_accepted(out);
        if answer.finish == FinishReason::Length && answer.tool_calls.is_empty() {
            let note = format!(
                "your last answer was cut at the output limit of {} tokens",
                self.settings.max_output_tokens
            );
            self.add_note(&note);
        }
        if answer.tool_calls.is_empty() {
            self.count_text_turn();
            self.complete_turn(LoopPace::Continue, out);
        } else {
            self.begin_tool_batch(call, answer, out);
        }
    }

    fn handle_pre_turn_answer(&mut self, call: CallId, answer: &ModelAnswer, out: &mut EffectBuffer) {
        if self.state.scoring.is_open() {
            self.handle_score_answer(call, answer, out);
        } else {
            self.handle_pre_check_answer(call, answer, out);
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

    pub(super) fn ended_by_guardrail(&mut self, calls: u32, out: &mut EffectBuffer) -> bool {
        if self.ending().is_some() {
            return true;
        }
        let settings = &self.settings;
        let ask = |guardrail: &&dyn Guardrail| guardrail.before_call(settings, calls);
        let Some(note) = guardrails::ALL.iter().find_map(ask) else {
            return false;
        };
        out.record(journal_line(RecordKind::GuardrailTriggered, self.turn_number(), &*note));
        self.add_note(&note);
        true
    }

    /// How a guardrail, or a loop that was detected, ends the loop, if one does.
    fn ending(&self) -> Option<LoopOutcome> {
        if self.state.watch.has_failed() {
            return Some(LoopOutcome::Failed);
        }
        let (settings, counters) = (&self.settings, &self.state.counters);
        guardrails::ALL
            .iter()
            .find_map(|guardrail| guardrail.ends(settings, counters))
    }

    fn end_loop(&mut self, outcome: LoopOutcome, out: &mut EffectBuffer) {
        self.state.outcome = Some(outcome);
        self.state.lifecycle = LifecyclePhase::Stopping;
        self.note_transition(out);
    }

    pub(super) fn next_call(&mut self, out: &EffectBuffer) {
        if let Some(turn) = &mut self.state.turn {
            turn.call = turn.call.saturating_add(1);
            turn.attempt = 0;
            turn.failures = 0;
            turn.step = CallStep::Due(out.now);
        }
    }

    pub(super) fn complete_turn(&mut self, pace: LoopPace, out: &mut EffectBuffer) {
        if self.is_heartbeat() {
            self.complete_heartbeat(out);
            return;
        }
        let note = match &pace {
            LoopPace::Continue => "continue",
            LoopPace::Sleep { .. } => "sleep",
            LoopPace::Shutdown => "shutdown",
        };
        let kept = self.keep_notifications(out.now);
        out.record(JournalRecord {
            messages: kept,
            ..journal_line(RecordKind::TurnCompleted, self.turn_number(), note)
        });
        self.acknowledge_notifications();
        let rest = match &pace {
            LoopPace::Sleep { wait, .. } => self.record_rest(*wait, out.now),
            LoopPace::Continue | LoopPace::Shutdown => RestKind::None,
        };
        self.inspect_turn(&pace, out);
        self.hot.mark_committed();
        let unseen = self.state.turn.take().map(|turn| turn.unseen).unwrap_or_default();
        self.state.turns_completed = self.state.turns_completed.saturating_add(1);
        let counters = &mut self.state.counters;
        (counters.errors, counters.error_cooldowns, counters.crash_cooldowns) = (0, 0, 0);
        counters.refusals = 0;
        self.trust_history();
        self.state.next_turn = Some(time_math::after(out.now, self.delay()));
        prompt::GOES_ON.clone_into(&mut self.state.briefing.cause);
        match pace {
            LoopPace::Continue => match self.ending() {
                Some(outcome) => {
                    out.record(journal_line(
                        RecordKind::GuardrailTriggered,
                        self.turn_number(),
                        outcome.as_ref(),
                    ));
                    self.end_loop(outcome, out);
                }
                None => self.after_turn(RestKind::None, out),
            },
            LoopPace::Sleep {
                wait,
                wake_early_if,
                reason,
            } => {
                self.begin_sleep(wait, wake_early_if, reason, out.now);
                self.end_sleep_for(&unseen, out);
                self.after_turn(rest, out);
            }
            LoopPace::Shutdown => self.end_loop(LoopOutcome::Completed, out),
        }
    }

    fn after_turn(&mut self, rest: RestKind, out: &EffectBuffer) {
        for guardrail in guardrails::ALL {
            if let Some(trip) = guardrail.after_turn(&self.settings, &mut self.state.counters, rest) {
                self.raise_guardrail_pause(trip, out);
            }
        }
    }

    /// The next turn's first message says so; what concerns a heartbeat is not the next turn's business.
    pub(super) fn add_note(&mut self, note: &str) {
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
