//! Failed calls and unusable answers: what they do to the turn.
//!
//! A turn is given up only for an answer that no retry can improve. A failure outside the turn leaves it open, see
//! [`crate::retry`]. The messages of answered calls stay in the conversation, since they were paid for. Messages that
//! no later call has confirmed may themselves be the cause, and leave if the next turn fails as well.

use super::Turn;
use crate::context::history_exclusion::{HistoryExclusion, TrialStep};
use crate::effects::{EffectBuffer, answer_line, journal_line};
use crate::machine::Engine;
use crate::message::{FinishReason, ModelAnswer};
use crate::modes::{LoopPace, TurnEnd};
use crate::notifications::{MAX_FAILURES, ShownNotifications};
use crate::retry::{self, RetryDecision};
use crate::snapshot::CauseKind;
use crate::{CallId, CallPurpose, JournalRecord, RecordDetail, RecordKind, time_math};
use agentloop_api::failure::{CallFailure, FailureKind};
use agentloop_api::pause::PauseReason;

/// Note of a turn that the model or its provider refused.
const REFUSED: &str = "Refused";

impl Engine {
    /// Handles a failed call of the turn that the limits had let through.
    pub(crate) fn handle_model_failure(&mut self, call: CallId, failure: CallFailure, out: &mut EffectBuffer) {
        if self.context_exceeded(&failure, out) || self.compaction_failed(&failure, out) {
            return;
        }
        let failures = if failure.kind == FailureKind::LinkLost {
            self.state.call.failures()
        } else {
            self.state.call.count_failure()
        };
        let next = retry::decide(&failure, call, failures, out.now);
        self.state.last_error = Some((out.now, failure.clone()));
        match next {
            RetryDecision::Retry(wait) => self.state.call.retry_at(time_math::after(out.now, wait)),
            RetryDecision::Pause(reason, wait) => {
                let until = time_math::after(out.now, wait);
                let message = format!(
                    "{failure}. The open turn waits and the call is retried; the annotation agentloop.dev/resume retries \
                     it at once"
                );
                self.raise_pause(reason, Some(until), message);
            }
            RetryDecision::AwaitLink => self.link_refused(out),
            RetryDecision::GiveUp => self.fail_turn(failure, out),
        }
    }

    /// The model answered with neither text nor a tool call. After tool results this means that it is done. In a first
    /// call it may be chance, so the call is made once again.
    pub(crate) fn handle_empty_answer(
        &mut self,
        of: (CallId, CallPurpose),
        answer: &ModelAnswer,
        out: &mut EffectBuffer,
    ) {
        out.record(JournalRecord {
            detail: RecordDetail::UselessAnswer,
            ..answer_line(of, answer, "empty", Vec::new())
        });
        if answer.finish == FinishReason::Length {
            let message = format!(
                "the answer reached the output limit of {} tokens before any text or tool call, as reasoning models may: raise \
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
            self.confirm_accepted();
            self.complete_turn(&LoopPace::Continue, out);
        } else if turn.is_first_silence() {
            self.call_again_after_silence(out);
        } else {
            let message = "the model answered twice with neither text nor a tool call; check that the server's chat \
                           template fits spec.model.name";
            self.fail_turn(bad_response(message.to_owned()), out);
        }
    }

    /// The first answer of the turn was empty: the call is made once again, unless a limit ends the turn before it.
    fn call_again_after_silence(&mut self, out: &mut EffectBuffer) {
        let calls = self.state.turn.as_ref().map_or(0, Turn::counted_calls);
        if !self.ended_by_guardrail(calls, out) {
            self.next_call(out);
        } else if self.state.turn.as_ref().is_some_and(|turn| turn.limit().is_some()) {
            self.complete_turn(&LoopPace::Continue, out);
        } else {
            let message =
                "the model answered with neither text nor a tool call, and the limits of the turn allow no other call";
            self.fail_turn(bad_response(message.to_owned()), out);
        }
    }

    /// The provider accepted the conversation as it is.
    pub(crate) fn confirm_accepted(&mut self) {
        if let Some(turn) = &mut self.state.turn {
            turn.shown_mut().confirm();
        }
        if !self.turn_rules().own_session {
            self.state.unproven = 0;
            self.state.doubt.call_accepted();
        }
    }

    /// The model or its provider refused to answer. The refusal leaves the conversation, since it makes the next one
    /// likely; so does what the turn read, which may be its cause, unless the turn has changed something.
    pub(crate) fn handle_model_refusal(&mut self, out: &mut EffectBuffer) {
        let message = "the model or its provider refused or filtered the answer; check the instructions, and what \
                       the tools and Sensors of the Agent return";
        let failure = bad_response(message.to_owned());
        let Some(turn) = self.take_failed(&failure, out) else {
            return;
        };
        let unproven = std::mem::take(&mut self.state.unproven);
        let (kind, acted) = (turn.kind(), turn.has_acted());
        let retract = if turn.has_acted() {
            1
        } else {
            turn.messages().saturating_add(unproven)
        };
        if unproven > 0 && !turn.has_acted() {
            self.state.doubt = HistoryExclusion::default();
        }
        self.give_up(turn, retract, REFUSED, out);
        let failure = self.with_doubt(failure, out);
        self.add_note("the provider refused or filtered your last answer, and it was taken out of this conversation");
        let refusals = self.state.counters.streaks.add(PauseReason::ModelRefused);
        let delay = time_math::doubled(self.settings.min_delay, refusals, self.settings.max_delay);
        self.state.next_turn = Some(time_math::after(out.now, delay));
        self.check_refusals(out);
        self.state.last_error = Some((out.now, failure));
        self.mode_turn_ended(kind, &TurnEnd::Failed { acted }, out);
    }

    /// The failure of a turn that was given up, and what its message says about the history.
    fn with_doubt(&mut self, failure: CallFailure, out: &mut EffectBuffer) -> CallFailure {
        match self.doubt_history(&failure, out) {
            Some(more) => CallFailure {
                message: format!("{}; {more}", failure.message),
                ..failure
            },
            None => failure,
        }
    }

    /// A turn has failed. Returns what to add to the failure's message: a refusal may be caused by the history, and any other
    /// failure ends the series of refused turns unless a part was accepted to be missing.
    fn doubt_history(&mut self, failure: &CallFailure, out: &mut EffectBuffer) -> Option<String> {
        if failure.kind != FailureKind::BadResponse {
            self.state.doubt.turn_ended();
            return None;
        }
        if self.state.doubt.is_verifying() && self.forget_suspected(out) {
            self.state.doubt = HistoryExclusion::default();
            return Some(
                "it was accepted without a part of the history and refused with it again, so that part was removed"
                    .to_owned(),
            );
        }
        if !self.state.doubt.count_refusal() {
            return None;
        }
        let (parts, all) = (self.trials(), self.transcript.len());
        match self.state.doubt.begin_trial(parts, all) {
            TrialStep::None => None,
            TrialStep::NoMore => Some(
                "leaving out parts of the history did not help, so the history was restored: check spec.model and the \
                 instructions"
                    .to_owned(),
            ),
            TrialStep::Begun { note, message } => {
                out.record(journal_line(RecordKind::HistoryDoubted, self.turn_number(), note));
                Some(message)
            }
        }
    }

    /// Gives the turn up after a failure that a retry would not fix.
    pub(crate) fn fail_turn(&mut self, failure: CallFailure, out: &mut EffectBuffer) {
        let brought = self.state.turn.as_ref().is_some_and(|turn| turn.own_call() > 1);
        self.fail_turn_and_keep(brought, failure, out);
    }

    /// The same. `brought`: the messages of its answered calls stay. After side effects they stay in any case.
    pub(crate) fn fail_turn_and_keep(&mut self, brought: bool, failure: CallFailure, out: &mut EffectBuffer) {
        let Some(turn) = self.take_failed(&failure, out) else {
            return;
        };
        let messages = turn.messages();
        let (kind, acted) = (turn.kind(), turn.has_acted());
        if turn.has_acted() {
            self.state.unproven = 0;
            self.give_up(turn, 0, failure.kind.as_ref(), out);
        } else if brought {
            self.give_up(turn, 0, failure.kind.as_ref(), out);
            self.state.unproven = messages;
        } else {
            let unproven = std::mem::take(&mut self.state.unproven);
            self.give_up(turn, messages.saturating_add(unproven), failure.kind.as_ref(), out);
            if unproven > 0 {
                // What was suspected has just left: the rest was not refused without it.
                self.state.doubt = HistoryExclusion::default();
                self.add_note(
                    "a turn before this one was taken out of this conversation, since no call after it succeeded",
                );
            }
        }
        let failure = self.with_doubt(failure, out);
        self.count_failed_turn(&failure, out);
        self.state.last_error = Some((out.now, failure));
        self.mode_turn_ended(kind, &TurnEnd::Failed { acted }, out);
    }

    /// A failed turn delays the next one, and pauses the loop at the limit of failed turns in a row.
    pub(crate) fn count_failed_turn(&mut self, failure: &CallFailure, out: &mut EffectBuffer) {
        let errors = self.state.counters.streaks.add(PauseReason::ConsecutiveErrors);
        let delay = time_math::doubled(self.settings.min_delay, errors, self.settings.max_delay);
        self.state.next_turn = Some(time_math::after(out.now, delay.max(retry::retry_after(failure))));
        self.check_error_limit(&failure.to_string(), out);
    }

    /// Takes the agent's own failed turn, and blames the notifications that it showed. `None`: there is no turn, or it
    /// had its own conversation, and its failure is handled here.
    fn take_failed(&mut self, failure: &CallFailure, out: &mut EffectBuffer) -> Option<Turn> {
        let turn = self.take_turn()?;
        if turn.rules().own_session {
            self.fail_own_session(&turn, failure.clone(), out);
            return None;
        }
        self.blame_notifications(turn.shown(), failure, out);
        Some(turn)
    }

    /// A turn failed. Only a refusal of the prompt can be caused by what it showed; trouble of the server or the network
    /// cannot.
    pub(crate) fn blame_notifications(
        &mut self,
        shown: &ShownNotifications,
        failure: &CallFailure,
        out: &mut EffectBuffer,
    ) {
        if failure.kind != FailureKind::BadResponse {
            return;
        }
        let fair = self.state.counters.streaks.count(PauseReason::ConsecutiveErrors) == 0;
        let dropped = self.state.inbox.blame(shown, fair);
        if dropped > 0 {
            let note = format!("{dropped} dropped: {MAX_FAILURES} turns that showed them were refused");
            out.record(journal_line(RecordKind::NotificationDropped, self.turn_number(), note));
        }
    }

    /// Ends the turn as failed: the newest `retract` messages leave the conversation. If all of the turn's own messages
    /// leave, the next turn inherits its briefing.
    fn give_up(&mut self, turn: Turn, retract: usize, note: &str, out: &mut EffectBuffer) {
        self.state.counters.idle.interrupted();
        self.state.watch.turn_failed();
        let retract = retract.min(self.transcript.len());
        self.transcript.truncate(self.transcript.len() - retract);
        self.state.doubt.removed(&(0..0), self.transcript.len());
        self.state.trust.retracted(self.transcript.len());
        out.record(JournalRecord {
            retract,
            ..journal_line(RecordKind::TurnFailed, turn.number(), note)
        });
        if retract < turn.messages() {
            let text = "the last turn failed before it ended; its tool calls and their results stand";
            self.state.briefing.set_cause(CauseKind::Event, text);
        } else {
            self.state.briefing.repeat(turn.into_briefing());
        }
    }
}

/// A failure that a retry of the same call would not fix.
pub(crate) fn bad_response(message: String) -> CallFailure {
    CallFailure::new(FailureKind::BadResponse, message)
}
