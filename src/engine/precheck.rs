//! The pre-check: after a sleep, and before the turn that follows, the light model is asked whether what has changed
//! since the last turn is worth it. If not, the sleep continues, twice as long, up to `maxSleepSeconds`.
//!
//! Owns when the light model is asked; the mode owns the question, and what its answer means. It fails open: the turn
//! runs unless the answer is a clear no. Its call is journalled, metered and limited like any other; a limit that
//! refuses it pauses the loop as usual.

use jiff::SignedDuration;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::effects::{EffectBuffer, answer_line, journal_line};
use super::machine::Engine;
use super::message::ModelAnswer;
use super::model_call::CallTask;
use super::modes::PreCheckDecision;
use super::snapshot::ChosenSleep;
use super::{CallId, CallPurpose, JournalRecord, RecordDetail, RecordKind};
use crate::context::prompt_size;
use agentloop_api::failure::{CallFailure, FailureKind};

/// Note of a pre-check without a clear answer.
const UNREADABLE: &str = "Unreadable";
/// The note for the model after skipped turns.
const SLEPT_ON: &str = "your sleep was extended, since the pre-check found nothing that matters";

/// How pre-checks are made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PreCheckSettings {
    /// What matters to this agent, in the user's words.
    pub prompt: Option<String>,
    /// Output limit of an answer, in tokens.
    pub max_output_tokens: u32,
}

/// The state of the pre-check before the next turn.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(default)]
pub struct PreCheckState {
    /// The sleep that has ended and may continue. `None`: the turn runs without a pre-check.
    sleep: Option<ChosenSleep>,
}

impl PreCheckState {
    /// The sleep that has ended, if a pre-check may extend it.
    pub(super) fn sleep(&self) -> Option<&ChosenSleep> {
        self.sleep.as_ref()
    }
}

impl Engine {
    /// A sleep ended at its own time, so a pre-check may extend it.
    pub(super) fn may_sleep_on(&mut self, sleep: ChosenSleep) {
        if self.settings.pre_check.is_some() {
            self.state.pre_check.sleep = Some(sleep);
        }
    }

    /// Something other than the end of the sleep requests the turn. Returns whether a pre-check would have held it.
    pub(super) fn skip_pre_check(&mut self) -> bool {
        self.state.pre_check.sleep.take().is_some()
    }

    /// Whether the next turn may begin; otherwise the pre-check has been sent.
    pub(super) fn is_worth_a_turn(&mut self, out: &mut EffectBuffer) -> bool {
        let Some(sleep) = &self.state.pre_check.sleep else {
            return true;
        };
        let diff = self.hot.diff().filter(|_| self.state.inbox.is_empty());
        let Some(diff) = diff else {
            return true;
        };
        let Some(question) = self.mode().pre_check(sleep, &diff, &self.mode_context(out.now)) else {
            return true;
        };
        if let Some(failure) = self.light_model_held(out.now) {
            let note = failure.kind.as_ref();
            out.record(journal_line(RecordKind::PrecheckFailed, self.turn_number(), note));
            return true;
        }
        self.state.counters.idle.awake(out.now);
        self.send_call_before_turn(CallTask::PreCheck(question), out);
        false
    }

    /// Estimated tokens of the largest possible call with this question.
    pub(super) fn largest_pre_check(&self, question: &[String; 2]) -> u64 {
        let settings = self.settings.pre_check.as_ref();
        let max = settings.map_or(0, |check| check.max_output_tokens);
        prompt_size::message_size(&json!(question).to_string()).saturating_add(max.into())
    }

    /// The light model has answered.
    pub(super) fn handle_pre_check_answer(&mut self, call: CallId, answer: &ModelAnswer, out: &mut EffectBuffer) {
        let note = format!("{:?}", answer.finish);
        out.record(answer_line((call, CallPurpose::Precheck), answer, note, Vec::new()));
        let sleep = self
            .state
            .pre_check
            .sleep
            .take()
            .filter(|_| self.state.inbox.is_empty());
        let text = answer.text.as_deref();
        match self.ask_mode(out.now, |mode, context| mode.pre_check_answered(sleep, text, context)) {
            PreCheckDecision::Extended(length) => self.sleep_extended(length, out),
            PreCheckDecision::Begin => {}
            PreCheckDecision::Unreadable => {
                out.record(JournalRecord {
                    detail: RecordDetail::UselessAnswer,
                    ..journal_line(RecordKind::PrecheckFailed, self.turn_number(), UNREADABLE)
                });
            }
        }
    }

    fn sleep_extended(&mut self, length: SignedDuration, out: &mut EffectBuffer) {
        let note = format!("sleep extended by {} s", length.as_secs());
        out.record(journal_line(RecordKind::PrecheckSkipped, self.turn_number(), note));
        self.state.counters.idle.effective_action(out.now);
        self.add_note(SLEPT_ON);
    }

    /// The light model gave no answer: the turn runs. Without the link the turn could not run either, so the question
    /// is asked again.
    pub(super) fn pre_check_failed(&mut self, mut failure: CallFailure, out: &mut EffectBuffer) {
        if failure.kind == FailureKind::LinkLost {
            self.link_refused(out);
            return;
        }
        self.note_light_failure(&failure, out.now);
        self.state.pre_check.sleep = None;
        let note = failure.kind.as_ref();
        out.record(journal_line(RecordKind::PrecheckFailed, self.turn_number(), note));
        failure.message = format!("the pre-check failed, and the turn ran without it: {}", failure.message);
        self.state.last_error = Some((out.now, failure));
    }
}
