//! Calls without an answer, and answers that are of no use: what the turn makes of them.
//!
//! A turn is given up only for an answer that makes the turn itself hopeless. Trouble outside it leaves it open, see
//! [`super::retry`]. What answered calls brought stays in the conversation, since it was paid for; what nobody has
//! accepted yet may be the very cause, and leaves when the next turn fails as well.

use super::effects::{EffectBuffer, answer_line, call_line, journal_line};
use super::machine::Engine;
use super::message::{FinishReason, ModelAnswer};
use super::retry::{self, RetryDecision};
use super::snapshot::{CallStep, Turn, TurnBriefing};
use super::yield_tool::LoopPace;
use super::{CallId, CallPurpose, EngineEffect, JournalRecord, RecordKind, budget, time_math};
use crate::api::failure::{CallFailure, FailureKind};

/// Note of a turn that the model or its provider refused.
const REFUSED: &str = "Refused";

impl Engine {
    /// The call in flight gave no answer.
    pub(super) fn handle_call_failure(&mut self, call: CallId, failure: CallFailure, out: &mut EffectBuffer) {
        if self.call_in_flight() != Some(call) {
            return;
        }
        self.in_flight = false;
        if failure.kind == FailureKind::Fenced {
            self.fence(out);
            return;
        }
        let scores = self.state.turn.is_none() && self.state.scoring.is_open();
        match &mut self.state.turn {
            Some(turn) => turn.step = CallStep::Due(out.now),
            None => self.close_call_before_turn(out.now),
        }
        if !scores {
            self.state.counters.idle.interrupted();
        }
        out.push(EngineEffect::Acknowledge { call });
        let note = failure.kind.as_ref();
        out.record(call_line(RecordKind::CallFailed, call, note, Vec::new()));
        // The gateway may have cut it before the worker heard why.
        let failure = match &self.state.budget.stop {
            Some(message) if failure.kind == FailureKind::Cancelled => budget::budget_stop_failure(message.clone()),
            Some(_) | None => failure,
        };
        if let Some(reason) = budget::reason_of(failure.kind) {
            self.uncount_call();
            if scores && failure.kind == FailureKind::CallExceedsLimit {
                // An event that is too large for a limit is not to hold the loop.
                self.give_up_score(failure, out);
            } else {
                self.handle_budget_refusal(reason, failure, out);
            }
            return;
        }
        if matches!(failure.kind, FailureKind::LinkLost | FailureKind::RecordFailed) {
            self.uncount_call();
            self.reschedule_probes(out.now);
        } else {
            self.clear_probed_pauses();
        }
        if scores {
            self.score_failed(call, failure, out);
        } else {
            self.handle_model_failure(call, failure, out);
        }
    }

    /// A call failed that a limit had let through.
    fn handle_model_failure(&mut self, call: CallId, failure: CallFailure, out: &mut EffectBuffer) {
        if self.context_exceeded(&failure, out) || self.compaction_failed(&failure, out) {
            return;
        }
        let Some(turn) = &mut self.state.turn else {
            self.pre_check_failed(failure, out);
            return;
        };
        if failure.kind != FailureKind::LinkLost {
            turn.failures = turn.failures.saturating_add(1);
        }
        let next = retry::decide(&failure, call, turn.failures, out.now);
        self.state.last_error = Some((out.now, failure.clone()));
        match next {
            RetryDecision::Retry(wait) => {
                turn.step = CallStep::Due(time_math::after(out.now, wait));
            }
            RetryDecision::Pause(reason, wait) => {
                let until = time_math::after(out.now, wait);
                let message = format!(
                    "{failure}. The open turn waits and the call is tried again; the annotation agentloop.dev/resume tries \
                     it at once"
                );
                self.raise_pause(reason, Some(until), message);
            }
            RetryDecision::AwaitLink => self.link_refused(out),
            RetryDecision::GiveUp => self.fail_turn(failure, out),
        }
    }

    /// The model answered with neither text nor a tool call. After results of tools that means that it is done. At first it
    /// may be chance, once.
    pub(super) fn handle_empty_answer(
        &mut self,
        of: (CallId, CallPurpose),
        answer: &ModelAnswer,
        out: &mut EffectBuffer,
    ) {
        out.record(answer_line(of, answer, "empty", Vec::new()));
        if answer.finish == FinishReason::Length {
            let message = format!(
                "the answer reached the output limit of {} tokens before it said anything, as models that reason do: raise \
                 spec.model.maxOutputTokens",
                self.settings.max_output_tokens
            );
            self.fail_turn(bad_response(message), out);
            return;
        }
        let Some(turn) = &mut self.state.turn else {
            return;
        };
        if turn.own_call() > 1 {
            self.confirm_accepted(out);
            self.complete_turn(LoopPace::Continue, out);
        } else if turn.silent == 0 {
            turn.silent = 1;
            self.next_call(out);
        } else {
            let message = "the model answered twice with neither text nor a tool call; check that the server's chat \
                           template fits spec.model.name";
            self.fail_turn(bad_response(message.to_owned()), out);
        }
    }

    /// The provider took the conversation as it is.
    pub(super) fn confirm_accepted(&mut self, out: &mut EffectBuffer) {
        self.notifications_seen();
        if !self.is_heartbeat() {
            self.state.unproven = 0;
            self.forget_left_out(out);
        }
    }

    /// The model or its provider refused to answer. The refusal leaves the conversation, since it makes the next one
    /// likely; so does what the turn read, which may be its cause, unless the turn has changed something.
    pub(super) fn handle_model_refusal(&mut self, out: &mut EffectBuffer) {
        let message = "the model or its provider refused or filtered the answer; look at the instructions, and at what \
                       the tools and Sensors of the Agent show it";
        let failure = bad_response(message.to_owned());
        let Some(turn) = self.take_failed(&failure, out) else {
            return;
        };
        let unproven = std::mem::take(&mut self.state.unproven);
        let retract = if turn.acted {
            1
        } else {
            turn.messages.saturating_add(unproven)
        };
        self.give_up(turn, retract, REFUSED, out);
        self.add_note("the provider refused or filtered your last answer, and it was taken out of this conversation");
        let counters = &mut self.state.counters;
        counters.refusals = counters.refusals.saturating_add(1);
        let delay = time_math::doubled(self.settings.min_delay, counters.refusals, self.settings.max_delay);
        self.state.next_turn = Some(time_math::after(out.now, delay));
        self.check_refusals(out);
        self.state.last_error = Some((out.now, failure));
    }

    /// Gives the turn up after a failure that another attempt would not mend.
    pub(super) fn fail_turn(&mut self, failure: CallFailure, out: &mut EffectBuffer) {
        let brought = self.state.turn.as_ref().is_some_and(|turn| turn.own_call() > 1);
        self.fail_turn_and_keep(brought, failure, out);
    }

    /// The same; `brought`: what its answered calls brought stays. What has changed something stays in any case.
    pub(super) fn fail_turn_and_keep(&mut self, brought: bool, failure: CallFailure, out: &mut EffectBuffer) {
        let Some(turn) = self.take_failed(&failure, out) else {
            return;
        };
        let messages = turn.messages;
        if turn.acted {
            self.state.unproven = 0;
            self.give_up(turn, 0, failure.kind.as_ref(), out);
        } else if brought {
            self.give_up(turn, 0, failure.kind.as_ref(), out);
            self.state.unproven = messages;
        } else {
            let unproven = std::mem::take(&mut self.state.unproven);
            self.give_up(turn, messages.saturating_add(unproven), failure.kind.as_ref(), out);
            if unproven > 0 {
                self.add_note(
                    "a turn before this one was taken out of this conversation, since no call went well after it",
                );
            }
        }
        let failure = match self.doubt_history(&failure, out) {
            Some(more) => CallFailure {
                message: format!("{}; {more}", failure.message),
                ..failure
            },
            None => failure,
        };
        let counters = &mut self.state.counters;
        counters.errors = counters.errors.saturating_add(1);
        let delay = time_math::doubled(self.settings.min_delay, counters.errors, self.settings.max_delay);
        self.state.next_turn = Some(time_math::after(out.now, delay.max(retry::retry_after(&failure))));
        self.check_error_limit(&failure.to_string(), out);
        self.state.last_error = Some((out.now, failure));
    }

    /// The agent's own turn that has failed, with what it showed blamed. `None`: there is none, or it was a heartbeat, which
    /// has been seen to.
    fn take_failed(&mut self, failure: &CallFailure, out: &mut EffectBuffer) -> Option<Turn> {
        let turn = self.state.turn.take()?;
        if turn.heartbeat {
            self.fail_heartbeat(&turn, failure.clone(), out);
            return None;
        }
        self.blame_notifications(&turn.shown, failure, out);
        Some(turn)
    }

    /// The turn ends without its purpose, and so many of the newest messages leave the conversation. When all of its own do,
    /// the next turn is told what its first message said.
    fn give_up(&mut self, turn: Turn, retract: usize, note: &str, out: &mut EffectBuffer) {
        self.state.counters.idle.interrupted();
        self.state.watch.turn_failed();
        let retract = retract.min(self.transcript.len());
        self.transcript.truncate(self.transcript.len() - retract);
        self.heed_left(0);
        out.record(JournalRecord {
            retract,
            ..journal_line(RecordKind::TurnFailed, turn.number, note)
        });
        if retract < turn.messages {
            "the last turn failed before its end; what its tools did and said stands"
                .clone_into(&mut self.state.briefing.cause);
        } else {
            let TurnBriefing { cause, mut notes } = turn.briefing;
            notes.append(&mut self.state.briefing.notes);
            notes.dedup();
            self.state.briefing = TurnBriefing { cause, notes };
        }
    }
}

/// A failure that another attempt at the same call would not mend.
pub(super) fn bad_response(message: String) -> CallFailure {
    CallFailure {
        kind: FailureKind::BadResponse,
        message,
        retry_after_milliseconds: None,
        resumes_at: None,
    }
}
