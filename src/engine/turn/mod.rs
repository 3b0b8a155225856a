//! One turn: its first message, its calls in order, what their answers mean, and its end.

mod failure;
pub mod kind;
pub mod state;

use std::borrow::Cow;
use std::sync::Arc;

use jiff::Timestamp;

use crate::answer_schema::AnswerSchema;
use crate::calls::CallContent;
use crate::context::{images, prompt, prompt_size};
use crate::effects::{EffectBuffer, answer_line, journal_line, trip_line};
use crate::guardrails::{self, Guardrail, RestKind, TurnLimit};
use crate::machine::{Engine, SentPrompt};
use crate::message::{self, FinishReason, Message, ModelAnswer, ToolCall};
use crate::modes::{LoopPace, NextStep, TextDecision, TurnEnd, TurnOpening};
use crate::notifications;
use crate::precheck::PreCheckState;
use crate::snapshot::{CauseKind, TurnBriefing};
use crate::tasks::TaskEnding;
use crate::turn::kind::{ModeTurnKind, TurnKind};
use crate::{CallId, CallPurpose, JournalRecord, RecordDetail, RecordKind, time_math};
use agentloop_api::agent::{ExhaustionPolicy, LimitedResource};
use agentloop_api::failure::CallFailure;
use agentloop_api::status::LoopOutcome;
use agentloop_api::task::TaskLimit;
use agentloop_api::usage_counts::GuardrailTrip;
pub use state::Turn;
use state::UnseenEvents;

impl Engine {
    /// Begins a turn: its first message and its first call.
    pub(crate) fn begin_turn(&mut self, kind: TurnKind, out: &mut EffectBuffer) {
        let rules = kind.rules();
        let (briefing, hot_state) = if rules.has_briefing {
            (std::mem::take(&mut self.state.briefing), self.hot.summary(out.now))
        } else {
            (TurnBriefing::default(), None)
        };
        if rules.works_on_task && rules.counts_as_turn {
            // Its notes concern the loop, not the task.
            self.state.briefing = TurnBriefing::default();
        }
        let opening = TurnOpening {
            number: self.state.totals.next_turn(),
            briefing: &briefing,
            hot_state,
        };
        let text = if let Some(kind) = kind.of_mode() {
            self.state.tasks.own_turn_begins();
            self.state.requests.own_turn_begins();
            self.ask_mode(out.now, |mode, context| mode.begin_turn(kind, &opening, context))
        } else {
            self.state.requests.request_begins();
            self.ask_mode(out.now, |mode, context| mode.environment_changed(context));
            self.request_opening(out.now)
        };
        if !rules.own_session {
            self.state.next_turn = None;
            self.state.pre_check = PreCheckState::default();
            self.state.call.own_turn_begins();
            self.note_shown_outputs(out.now);
        }
        self.open_turn(text, briefing, kind, out);
    }

    /// Begins a turn with `text` as its first message.
    fn open_turn(&mut self, text: String, briefing: TurnBriefing, kind: TurnKind, out: &mut EffectBuffer) {
        self.offer.turn_begins();
        let number = self.state.totals.begin_turn();
        let message = Arc::new(Message::User { text });
        self.state.turn = Some(Turn::new(number, kind, briefing));
        self.state.call.plan(number, 1, out.now);
        self.transcript.push(message.clone());
        out.record(JournalRecord {
            messages: vec![message],
            detail: RecordDetail::TurnStarted(kind.rules().purpose),
            ..journal_line(RecordKind::TurnStarted, number, kind.rules().note)
        });
        if kind.rules().works_on_task {
            self.begin_task(out);
        }
        self.send_attempt(out);
    }

    /// Sends the next attempt at the current call of the turn.
    pub(crate) fn send_attempt(&mut self, out: &mut EffectBuffer) {
        if self.turn_rules().shows_notifications {
            self.show_notifications();
        }
        // May plan a compaction instead: the attempt below is then the call for the summary.
        if !self.make_room(out) {
            return;
        }
        let is_own_time =
            self.turn_rules().is_of_mode || self.state.turn.as_ref().is_some_and(|turn| turn.own_call() <= 1);
        if is_own_time {
            self.state.counters.idle.count(out.now);
        } else {
            self.state.counters.idle.skip(out.now);
        }
        if self.state.reasons.is_empty() {
            self.state.counters.idle.awake(out.now);
        }
        if let Some(turn) = &mut self.state.turn {
            turn.prompt_is_current();
        }
        self.send_call(out);
    }

    /// What the current call of the turn sends.
    pub(crate) fn turn_content(&mut self) -> CallContent {
        let system = Arc::new(Message::System {
            text: self.system_prompt(),
        });
        let mut conversation = self.conversation();
        let images = images::limit(&mut conversation, self.settings.image_input);
        if self.settings.pre_check.is_some() {
            self.hot.mark_sent();
        }
        let messages: Vec<Arc<Message>> = std::iter::once(system).chain(conversation).collect();
        let state = self.state_block().filter(|_| self.compaction().is_none());
        if state.is_some() {
            self.note_shown_sources();
        }
        let sent = prompt_size::messages_size(&messages, 0) + self.offer.toolbox().tokens();
        let sent = sent + state.as_deref().map_or(0, prompt_size::message_size);
        let answer_schema = self.turn_schema();
        let sent = sent + prompt_size::schema_size(answer_schema.as_deref());
        self.sent_prompt = Some(SentPrompt {
            tokens: sent + self.image_tokens(),
            has_images: images > 0,
        });
        CallContent {
            messages,
            state,
            tools: self.offer.toolbox().offered(),
            answer_schema,
        }
    }

    /// The schema of the answer that ends the turn under way, as sent to the server; `None`: none is sent.
    fn turn_schema(&self) -> Option<Arc<AnswerSchema>> {
        let rules = self.turn_rules();
        let is_response = rules.works_on_task && rules.is_of_mode && self.compaction().is_none();
        self.settings.task().filter(|_| is_response)?.answer_schema.clone()
    }

    fn system_prompt(&self) -> String {
        let mode = self.mode();
        let mut runtime = Cow::Borrowed(mode.runtime_text());
        if let Some(assignment) = mode.assignment(&self.settings) {
            runtime = format!("{runtime}\n\n{assignment}").into();
        }
        prompt::system_prompt(&self.instructions, &runtime, &self.skills)
    }

    /// Estimated tokens of what every prompt contains.
    pub(crate) fn fixed_tokens(&self) -> u64 {
        let state = self.state_block().map_or(0, |block| prompt_size::message_size(&block));
        prompt_size::message_size(&self.system_prompt())
            + self.offer.toolbox().tokens()
            + prompt_size::schema_size(self.turn_schema().as_deref())
            + self.head_tokens()
            + state
            + self.image_tokens()
    }

    /// Estimated tokens of the call last sent, with the longest possible answer.
    pub(crate) fn largest_call(&self) -> u64 {
        let prompt = prompt_size::messages_size(self.session(), self.cleared()).saturating_add(self.fixed_tokens());
        let prompt = self.state.sizes.billed(prompt);
        prompt.saturating_add(self.settings.max_output_tokens.into())
    }

    pub(crate) fn count_use(&mut self, resource: LimitedResource, amount: u64, out: &EffectBuffer) {
        self.state
            .used
            .count(&self.settings.windows(), resource, amount, out.now);
    }

    /// Takes back the count of the call last sent: it was not made.
    pub(crate) fn uncount_call(&mut self, now: Timestamp) {
        self.state
            .used
            .give_back(&self.settings.windows(), LimitedResource::LLMCalls, 1);
        if self.turn_rules().is_of_mode {
            self.ask_mode(now, |mode, _| mode.call_refused());
        }
    }

    /// The next call would have to wait. Under the policy Skip this ends the turn; its work so far stays. A first call
    /// waits in any case.
    pub(crate) fn skip_rest_if_wanted(&mut self, out: &mut EffectBuffer) {
        let has_begun = self.state.turn.as_ref().is_some_and(|turn| turn.own_call() > 1);
        if !has_begun || !self.turn_rules().may_be_skipped || self.settings.exhaustion_policy != ExhaustionPolicy::Skip
        {
            return;
        }
        self.add_note("the last turn was ended early, since guardrails.rateLimits left no room for another call");
        self.complete_turn(&LoopPace::Continue, out);
    }

    /// The turn is dropped; its call is not sent.
    pub(crate) fn take_turn(&mut self) -> Option<Turn> {
        self.state.call.clear();
        self.state.turn.take()
    }

    /// The call of the turn was answered.
    pub(crate) fn handle_turn_answer(
        &mut self,
        (call, purpose): (CallId, CallPurpose),
        answer: &ModelAnswer,
        out: &mut EffectBuffer,
    ) {
        if self.turn_rules().counts_as_turn {
            self.state.counters.idle.count_call(out.now);
        }
        let silent = answer.text.as_deref().is_none_or(|text| text.trim().is_empty()) && answer.tool_calls.is_empty();
        if silent && answer.finish != FinishReason::Refused {
            self.handle_empty_answer((call, purpose), answer, out);
            return;
        }
        let message = Arc::new(Message::Assistant {
            // Servers reject an assistant message without content.
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
        self.confirm_accepted();
        if answer.finish == FinishReason::Length && answer.tool_calls.is_empty() {
            let note = format!(
                "your last answer was cut at the output limit of {} tokens",
                self.settings.max_output_tokens
            );
            self.add_note(&note);
        }
        if answer.tool_calls.is_empty() {
            self.handle_text(answer, out);
        } else {
            self.begin_tool_batch(call, answer, out);
        }
    }

    /// The model answered without a tool call, which ends the turn unless its mode rejects the answer.
    fn handle_text(&mut self, answer: &ModelAnswer, out: &mut EffectBuffer) {
        self.count_text_turn();
        let text = answer.text.as_deref().unwrap_or_default();
        let decision = if self.turn_rules().works_on_task && answer.finish == FinishReason::Length {
            TextDecision::Rejected(format!(
                "Your answer was cut at the output limit of {} tokens. Respond again, in fewer words.",
                self.settings.max_output_tokens
            ))
        } else if !self.turn_rules().is_of_mode {
            TextDecision::EndsTurn
        } else {
            self.mode().decide_text(text, &self.mode_context(out.now))
        };
        let calls = self.state.turn.as_ref().map_or(0, Turn::counted_calls);
        match decision {
            TextDecision::Rejected(text) if !self.ended_by_guardrail(calls, out) => {
                let text = format!("[From the runtime, not from a person.] {text}");
                let message = Arc::new(Message::User { text });
                self.append(std::slice::from_ref(&message));
                out.attach(vec![message], || {
                    journal_line(RecordKind::CallAnswered, self.turn_number(), "")
                });
                self.next_call(out);
            }
            TextDecision::Rejected(_) | TextDecision::EndsTurn => self.complete_turn(&LoopPace::Continue, out),
        }
    }

    pub(crate) fn append(&mut self, messages: &[Arc<Message>]) {
        self.transcript.extend_from_slice(messages);
        if let Some(turn) = &mut self.state.turn {
            turn.add_messages(messages.len());
        }
    }

    pub(crate) fn ended_by_guardrail(&mut self, calls: u32, out: &mut EffectBuffer) -> bool {
        let is_task = self.turn_rules().works_on_task;
        if is_task {
            let limit = self.task_limit();
            if let (Some(limit), Some(turn)) = (limit, &mut self.state.turn) {
                turn.limited(limit);
                return true;
            }
        } else if self.ending().is_some() {
            return true;
        }
        let settings = &self.settings;
        let ask = |guardrail: &&dyn Guardrail| guardrail.before_call(settings, calls);
        let Some(TurnLimit { trip, note }) = guardrails::ALL.iter().find_map(ask) else {
            return false;
        };
        out.record(trip_line(self.turn_number(), Some(trip), &*note));
        self.add_note(&note);
        if let (true, Some(turn)) = (is_task, &mut self.state.turn) {
            turn.limited(TaskLimit::MaxIterations);
        }
        true
    }

    /// The outcome with which a guardrail or a detected loop ends the loop, if any.
    fn ending(&self) -> Option<LoopOutcome> {
        if self.state.watch.has_failed() {
            return Some(LoopOutcome::Failed);
        }
        let (settings, counters) = (&self.settings, &self.state.counters);
        guardrails::ALL
            .iter()
            .find_map(|guardrail| guardrail.ends(settings, counters))
    }

    pub(crate) fn end_loop(&mut self, outcome: LoopOutcome, out: &mut EffectBuffer) {
        self.drop_deferred(out);
        // A request whose turn was cut continues if the loop starts again, and those behind it wait for that.
        let is_request_cut = self.state.turn.is_some() && self.turn_rules().works_on_task;
        if !is_request_cut {
            self.fail_waiting_requests(out);
        }
        self.ask_mode(out.now, |mode, context| mode.loop_ended(context));
        self.state.life.end(outcome);
        self.note_transition(out);
    }

    pub(crate) fn next_call(&mut self, out: &EffectBuffer) {
        if let Some(turn) = &mut self.state.turn {
            let number = turn.begin_call();
            self.state.call.plan(turn.number(), number, out.now);
        }
    }

    pub(crate) fn complete_turn(&mut self, pace: &LoopPace, out: &mut EffectBuffer) {
        if self.turn_rules().own_session {
            self.complete_own_session(pace, out);
            return;
        }
        let note = match pace {
            LoopPace::Continue => "continue",
            LoopPace::Sleep { .. } => "sleep",
            LoopPace::Shutdown => "shutdown",
            LoopPace::Finish { .. } => "finish",
            LoopPace::CheckConfidence { .. } => "check confidence",
        };
        // The kept notifications join the transcript in the record that completes the turn: both are committed, or
        // neither.
        let kept = self.keep_notifications(out.now);
        out.record(JournalRecord {
            messages: kept,
            ..journal_line(RecordKind::TurnCompleted, self.turn_number(), note)
        });
        let rest = match pace {
            LoopPace::Sleep { wait, .. } => self.record_rest(*wait, out.now),
            LoopPace::Continue | LoopPace::Shutdown | LoopPace::Finish { .. } | LoopPace::CheckConfidence { .. } => {
                RestKind::None
            }
        };
        self.inspect_turn(pace, out);
        self.hot.mark_committed();
        let unseen = self.take_turn().map(Turn::into_unseen).unwrap_or_default();
        self.state.totals.complete_turn();
        self.state.counters.streaks.turn_completed();
        self.state.doubt.turn_ended();
        self.state.next_turn = Some(time_math::after(out.now, self.delay()));
        self.state.briefing.set_cause(CauseKind::Loop, prompt::GOES_ON);
        let last_text = self.last_words().to_owned();
        let end = TurnEnd::Completed {
            pace,
            last_text: &last_text,
        };
        // Turns of all other kinds have a conversation of their own.
        let next = self.ask_mode(out.now, |mode, context| {
            mode.turn_ended(ModeTurnKind::Own, &end, context)
        });
        self.record_validation(out);
        self.follow_turn(next, rest, &unseen, out);
    }

    /// Does what the mode says follows a completed turn, as far as the guardrails allow.
    fn follow_turn(&mut self, next: NextStep, rest: RestKind, unseen: &UnseenEvents, out: &mut EffectBuffer) {
        match next {
            NextStep::Begin { .. } | NextStep::Ask | NextStep::Check | NextStep::RequestApproval => {
                if !self.end_by_guardrail(next, out) {
                    self.after_turn(rest, out);
                }
            }
            NextStep::Wait => {
                self.end_sleep_for(unseen, out);
                self.after_turn(rest, out);
            }
            NextStep::Stop(outcome) => self.end_loop(outcome, out),
        }
    }

    /// Ends the loop if a guardrail or a detected loop says so, and nothing is left to be checked before this step: the turn
    /// may have reached the goal.
    pub(crate) fn end_by_guardrail(&mut self, next: NextStep, out: &mut EffectBuffer) -> bool {
        let is_check = match next {
            NextStep::Check => true,
            NextStep::Ask => {
                let question = self.mode().question(&self.mode_context(out.now));
                question.is_some_and(|question| question.purpose.is_judge())
            }
            NextStep::Stop(_) => return false,
            NextStep::Begin { .. } | NextStep::RequestApproval | NextStep::Wait => false,
        };
        let Some(outcome) = self.ending().filter(|_| !is_check) else {
            return false;
        };
        let trip = GuardrailTrip::of_outcome(outcome);
        out.record(trip_line(self.turn_number(), trip, outcome.as_ref()));
        self.end_loop(outcome, out);
        true
    }

    /// Tells the mode that a turn has ended that is not followed by the checks of a completed one: it failed, or had its
    /// own conversation.
    pub(crate) fn mode_turn_ended(&mut self, kind: TurnKind, end: &TurnEnd<'_>, out: &mut EffectBuffer) {
        let Some(kind) = kind.of_mode() else {
            return;
        };
        let next = self.ask_mode(out.now, |mode, context| mode.turn_ended(kind, end, context));
        self.record_validation(out);
        if let NextStep::Stop(outcome) = next {
            self.end_loop(outcome, out);
        }
    }

    fn after_turn(&mut self, rest: RestKind, out: &EffectBuffer) {
        for guardrail in guardrails::ALL {
            if let Some(trip) = guardrail.after_turn(&self.settings, &mut self.state.counters, rest) {
                self.raise_guardrail_pause(trip, out);
            }
        }
    }

    /// Adds a note to the next turn's first message, unless the notes of the current turn do not concern it.
    pub(crate) fn add_note(&mut self, note: &str) {
        if !self.turn_rules().has_briefing {
            return;
        }
        self.state.briefing.add_note(note);
    }

    /// The conversation of the current turn.
    pub(crate) fn session(&self) -> &[Arc<Message>] {
        match &self.state.turn {
            Some(turn) if turn.rules().own_session => {
                let before = self.transcript.len().saturating_sub(turn.messages());
                &self.transcript[before..]
            }
            Some(_) | None => &self.transcript,
        }
    }

    /// The current turn, which has its own conversation, is complete.
    pub(crate) fn complete_own_session(&mut self, pace: &LoopPace, out: &mut EffectBuffer) {
        let last_text = self.session().iter().rev().find_map(|message| match &**message {
            Message::Assistant { text, .. } => text.clone(),
            Message::System { .. } | Message::User { .. } | Message::Tool { .. } => None,
        });
        let Some(turn) = self.take_turn() else {
            return;
        };
        self.state.totals.complete_turn();
        let last_text = last_text.unwrap_or_default();
        if turn.rules().works_on_task {
            let ending = self.task_ending(&turn, pace);
            self.state.inbox.acknowledge(turn.shown());
            let failure = ending.failure().cloned();
            let untrusted = self.state.trust.untrusted().map(|content| content.source.clone());
            self.retract_session(&turn, RecordKind::TurnCompleted, turn.rules().note, out);
            self.end_task(&turn, ending, untrusted, out);
            match failure {
                _ if !turn.rules().counts_as_turn => {}
                // A model that ends every task without an answer is in trouble, although no call of it fails.
                Some(failure) => {
                    self.count_failed_turn(&failure, out);
                    self.state.last_error = Some((out.now, failure));
                }
                None => self.state.counters.streaks.turn_completed(),
            }
        } else {
            // The next turn of this kind begins with its answer.
            self.state.trust.kept_elsewhere();
            self.retract_session(&turn, RecordKind::TurnCompleted, turn.rules().note, out);
        }
        self.mode_turn_ended(
            turn.kind(),
            &TurnEnd::Completed {
                pace,
                last_text: &last_text,
            },
            out,
        );
    }

    /// The current turn, which has its own conversation, failed. This does not count as a failure of the loop.
    pub(crate) fn fail_own_session(&mut self, turn: &Turn, failure: CallFailure, out: &mut EffectBuffer) {
        self.retract_session(turn, RecordKind::TurnFailed, failure.kind.as_ref(), out);
        if turn.rules().works_on_task {
            self.blame_notifications(turn.shown(), &failure, out);
            self.end_task(turn, TaskEnding::Failed(failure.clone()), None, out);
            if turn.rules().counts_as_turn {
                self.count_failed_turn(&failure, out);
            }
        }
        self.state.last_error = Some((out.now, failure));
        self.mode_turn_ended(
            turn.kind(),
            &TurnEnd::Failed {
                acted: turn.has_acted(),
            },
            out,
        );
    }

    fn retract_session(&mut self, turn: &Turn, kind: RecordKind, note: &str, out: &mut EffectBuffer) {
        self.state.counters.idle.skip(out.now);
        let retract = turn.messages().min(self.transcript.len());
        self.transcript.truncate(self.transcript.len() - retract);
        self.state.trust.retracted(self.transcript.len());
        out.record(JournalRecord {
            retract,
            ..journal_line(kind, turn.number(), note)
        });
    }

    /// Adds waiting notifications to the next attempt of the turn.
    fn show_notifications(&mut self) {
        let max_bytes = notifications::max_bytes(&self.settings);
        if let Some(turn) = &mut self.state.turn {
            self.state.inbox.choose(turn.shown_mut(), max_bytes);
        }
    }

    /// What a completed turn leaves in the transcript of the notifications that it has shown, which are done.
    fn keep_notifications(&mut self, now: Timestamp) -> Vec<Arc<Message>> {
        let Some(turn) = &self.state.turn else {
            return Vec::new();
        };
        let text = self.state.inbox.kept(turn.shown(), now);
        self.state.inbox.acknowledge(turn.shown());
        let kept: Vec<_> = text.map(|text| Arc::new(Message::User { text })).into_iter().collect();
        self.append(&kept);
        kept
    }
}

/// The calls with ids of the engine: servers reuse their own ids, and reject those of other servers.
fn named(answer: CallId, calls: &[ToolCall]) -> Vec<ToolCall> {
    let named = |(place, call): (usize, &ToolCall)| ToolCall {
        id: message::call_id(answer.turn, answer.call, place),
        ..call.clone()
    };
    calls.iter().enumerate().map(named).collect()
}
