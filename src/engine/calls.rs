//! Model calls: how a call is sent, and which module handles its answer or failure.
//!
//! Owns what holds for every call: it is journalled before it is sent, counted against the limits, acknowledged once its
//! outcome is recorded, and probes the pauses that wait for room. What its answer means is up to its owner: `turn`,
//! `compaction`, `precheck`, `scoring`, `mode_requests`.

use std::sync::Arc;

use super::answer_schema::AnswerSchema;
use super::effects::{EffectBuffer, call_line};
use super::machine::Engine;
use super::message::{Message, ModelAnswer, ToolDefinition};
use super::model_call::{CallStep, CallTask, FailedAttempt};
use super::modes::ModeQuestion;
use super::pauses::budget;
use super::{CallId, CallPurpose, EngineEffect, RecordKind};
use crate::context::prompt_size;
use agentloop_api::agent::LimitedResource;
use agentloop_api::failure::{CallFailure, FailureKind};

/// What one attempt sends.
pub struct CallContent {
    pub messages: Vec<Arc<Message>>,
    /// The state block, after the messages.
    pub state: Option<String>,
    pub tools: Arc<[ToolDefinition]>,
    /// What the answer must look like.
    pub answer_schema: Option<Arc<AnswerSchema>>,
}

impl CallContent {
    /// A question, whose answer calls no tools.
    fn question(messages: [Message; 2], answer_schema: Option<Arc<AnswerSchema>>) -> Self {
        Self {
            messages: messages.map(Arc::new).into(),
            state: None,
            tools: Arc::from([]),
            answer_schema,
        }
    }
}

impl Engine {
    /// The attempt whose outcome this process awaits.
    pub(super) fn call_in_flight(&self) -> Option<CallId> {
        self.state.call.open_id().filter(|_| self.in_flight)
    }

    /// What the current call is for.
    pub(super) fn call_purpose(&self) -> CallPurpose {
        let rules = self.turn_rules();
        self.state.call.task().map_or(rules.purpose, |task| task.purpose(rules))
    }

    /// Sends the next attempt at the current call.
    pub(super) fn send_call(&mut self, out: &mut EffectBuffer) {
        self.state.reasons.probes_sent(out.now);
        let revision = self.state.budget.revision;
        let Some(call) = self.state.call.send(revision) else {
            return;
        };
        self.count_use(LimitedResource::LLMCalls, 1, out);
        if self.turn_rules().is_of_mode {
            self.ask_mode(out.now, |mode, _| mode.call_sent());
        }
        let note = self.call_purpose();
        out.record(call_line(RecordKind::CallStarted, call, note.as_ref(), Vec::new()));
        self.dispatch_call(out);
    }

    /// Sends a call before the next turn.
    pub(super) fn send_call_before_turn(&mut self, task: CallTask, out: &mut EffectBuffer) {
        let turn = self.state.totals.next_turn();
        self.state.call.plan_before(turn, task, out.now);
        self.send_call(out);
    }

    /// Hands the open attempt to the driver; after a restart again, under the same id.
    pub(super) fn dispatch_call(&mut self, out: &mut EffectBuffer) {
        let Some(call) = self.state.call.open_id() else {
            return;
        };
        self.in_flight = true;
        let purpose = self.call_purpose();
        let CallContent {
            messages,
            state,
            tools,
            answer_schema,
        } = self.call_content();
        out.push(EngineEffect::CallModel {
            call,
            purpose,
            messages,
            state,
            tools,
            answer_schema,
        });
    }

    fn call_content(&mut self) -> CallContent {
        let schema = self.settings.question_schema(self.call_purpose());
        match self.state.call.task() {
            Some(CallTask::PreCheck([text, data]) | CallTask::Question(_, [text, data])) => {
                let messages = [
                    Message::System { text: text.clone() },
                    Message::User { text: data.clone() },
                ];
                CallContent::question(messages, schema)
            }
            Some(CallTask::Score) => CallContent::question(self.state.scoring.messages(&self.settings), schema),
            Some(CallTask::Turn | CallTask::Summary(_)) | None => self.turn_content(),
        }
    }

    /// The call in flight was answered. The answer to any other call is late and is ignored.
    pub(super) fn handle_answer(&mut self, call: CallId, answer: &ModelAnswer, out: &mut EffectBuffer) {
        if self.call_in_flight() != Some(call) {
            return;
        }
        self.in_flight = false;
        self.clear_probed_pauses();
        let purpose = self.call_purpose();
        let Some(task) = self.state.call.answered() else {
            return;
        };
        out.push(EngineEffect::Acknowledge { call });
        if purpose.uses_light_model() {
            self.note_light_answer();
        } else if task.is_of_turn() {
            self.calibrate_sizes(answer.input_tokens);
        }
        if self.turn_rules().is_of_mode {
            self.ask_mode(out.now, |mode, _| mode.call_answered(answer));
        }
        // Usage that the server does not report counts as the largest possible call, so that rate limits hold.
        let tokens = answer.tokens.unwrap_or_else(|| self.largest_use(&task, purpose));
        self.count_use(LimitedResource::LLMTokens, tokens, out);
        if let (CallTask::Turn | CallTask::Summary(_), Some(turn)) = (&task, &mut self.state.turn) {
            turn.count_usage(answer.tokens, tokens, answer.cost.unwrap_or(0));
        }
        match task {
            CallTask::Turn => self.handle_turn_answer((call, purpose), answer, out),
            CallTask::Summary(compaction) => self.handle_summary(compaction, call, answer, out),
            CallTask::PreCheck(_) => self.handle_pre_check_answer(call, answer, out),
            CallTask::Score => self.handle_score_answer(call, answer, out),
            CallTask::Question(_, [text, data]) => {
                let question = ModeQuestion { purpose, text, data };
                self.handle_mode_answer(call, question, answer, out);
            }
        }
    }

    /// Estimated tokens of the largest possible call for this task.
    fn largest_use(&self, task: &CallTask, purpose: CallPurpose) -> u64 {
        let question = match task {
            CallTask::Turn | CallTask::Summary(_) => return self.largest_call(),
            CallTask::PreCheck(question) => self.largest_pre_check(question),
            CallTask::Score => self.state.scoring.largest_use(&self.settings),
            CallTask::Question(purpose, question) => self.largest_question(*purpose, question),
        };
        let schema = self.settings.question_schema(purpose);
        question.saturating_add(prompt_size::schema_size(schema.as_deref()))
    }

    pub(super) fn handle_call_failure(&mut self, call: CallId, failure: CallFailure, out: &mut EffectBuffer) {
        if self.call_in_flight() != Some(call) {
            return;
        }
        self.in_flight = false;
        if failure.kind == FailureKind::Fenced {
            self.fence(out);
            return;
        }
        let Some(failed) = self.close_attempt(out) else {
            return;
        };
        if failed.task != CallTask::Score {
            self.state.counters.idle.interrupted();
        }
        out.push(EngineEffect::Acknowledge { call });
        let note = failure.kind.as_ref();
        out.record(call_line(RecordKind::CallFailed, call, note, Vec::new()));
        // The gateway may have cancelled it before the worker learned why.
        let failure = match &self.state.budget.stop {
            Some(message) if failure.kind == FailureKind::Cancelled => budget::budget_stop_failure(message.clone()),
            Some(_) | None => failure,
        };
        if let Some(reason) = failure.kind.refused_by() {
            self.uncount_call(out.now);
            if failed.task == CallTask::Score && failure.kind == FailureKind::CallExceedsLimit {
                // An event that is too large for a limit must not hold the loop.
                self.give_up_score(failure, out);
            } else {
                self.handle_budget_refusal(reason, failure, failed.asked_under, out);
            }
            return;
        }
        if matches!(failure.kind, FailureKind::LinkLost | FailureKind::RecordFailed) {
            self.uncount_call(out.now);
            self.state.reasons.reschedule_probes(out.now);
        } else {
            self.clear_probed_pauses();
        }
        match failed.task {
            CallTask::Score => self.score_failed(call, failure, out),
            CallTask::PreCheck(_) => self.pre_check_failed(failure, out),
            CallTask::Question(purpose, [text, data]) => {
                let question = ModeQuestion { purpose, text, data };
                self.mode_question_failed(call, question, &failure, out);
            }
            CallTask::Turn | CallTask::Summary(_) => self.handle_model_failure(call, failure, out),
        }
    }

    /// The attempt in flight ends without an answer.
    pub(super) fn close_attempt(&mut self, out: &EffectBuffer) -> Option<FailedAttempt> {
        let failed = self.state.call.failed(out.now)?;
        if failed.task == CallTask::Score {
            self.state.scoring.due_at(out.now);
        }
        Some(failed)
    }

    /// Does what the current call needs next.
    pub(super) fn advance_call(&mut self, step: CallStep, out: &mut EffectBuffer) {
        match step {
            CallStep::Open => self.dispatch_call(out),
            CallStep::Due(_) if self.may_attempt(out) => self.send_attempt(out),
            // The next call has no room: under the policy Skip the turn ends instead of waiting.
            CallStep::Due(_) => self.skip_rest_if_wanted(out),
        }
    }
}
