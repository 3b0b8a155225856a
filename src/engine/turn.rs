//! One turn: its first message, its calls one after the other, what their answers mean, and its end.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;

use super::guardrails::{self, Guardrail};
use super::heartbeat::HEARTBEAT;
use super::machine::Engine;
use super::message::{Answer, Finish, Message, Tool};
use super::notifications::Shown;
use super::outbox::{Outbox, answer_line, call_line, line};
use super::precheck::PreCheck;
use super::retry::{self, Next};
use super::snapshot::{Briefing, Lifecycle, Step, Turn, Unseen};
use super::yield_tool::{self, Pace};
use super::{CallId, Effect, Purpose, Record, RecordKind, budget, clock, context, prompt};
use crate::api::agent::Resource;
use crate::api::failure::{Failure, FailureKind};
use crate::api::status::{Outcome, PauseReason};

impl Engine {
    /// Begins the next turn with its first message and its first call.
    pub(super) fn begin_turn(&mut self, out: &mut Outbox) {
        let number = self.state.turns_begun.saturating_add(1);
        let briefing = std::mem::take(&mut self.state.briefing);
        let text = prompt::observe(number, out.now, &briefing, self.hot.summary(out.now));
        self.state.next_turn = None;
        self.state.pre_check = PreCheck::default();
        self.open_turn(text, briefing, false, out);
    }

    /// Begins a turn with this message.
    pub(super) fn open_turn(&mut self, text: String, briefing: Briefing, heartbeat: bool, out: &mut Outbox) {
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
            denials: BTreeMap::new(),
            acted: false,
            shown: Shown::default(),
            unseen: Unseen::default(),
            heartbeat,
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
        out.push(Effect::CallModel {
            call,
            purpose,
            messages: std::iter::once(system).chain(conversation).collect(),
            state: self.block().filter(|_| purpose != Purpose::Compaction),
            tools: self.offered(),
        });
    }

    /// Estimated tokens of what is in every prompt.
    pub(super) fn fixed_tokens(&self) -> u64 {
        let state = self.block().map_or(0, |block| context::system(&block));
        context::system(&prompt::system(&self.instructions, &self.skills))
            + self.toolbox.tokens()
            + self.summary_tokens()
            + state
    }

    fn offered(&self) -> Arc<[Tool]> {
        let denials = self.state.turn.as_ref().map(|turn| &turn.denials);
        let all = self.toolbox.offered(denials.unwrap_or(&BTreeMap::new()));
        if !self.is_heartbeat() {
            return all;
        }
        all.iter()
            .filter(|tool| tool.name != yield_tool::NAME)
            .cloned()
            .collect()
    }

    /// Estimated tokens of the call last sent, its answer as long as it may be.
    fn largest_call(&self) -> u64 {
        let prompt = context::prompt(self.session(), self.fixed_tokens());
        prompt.saturating_add(self.settings.max_output_tokens.into())
    }

    pub(super) fn count_use(&mut self, resource: Resource, amount: u64, out: &Outbox) {
        self.state
            .used
            .count(&self.settings.windows(), resource, amount, out.now);
    }

    /// The call last sent was not made after all.
    fn was_not_made(&mut self) {
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

    /// Lets oldest turns leave until the prompt fits, or has them summed up first. False: it cannot fit, and the turn has
    /// failed.
    fn make_room(&mut self, out: &mut Outbox) -> bool {
        if self.compaction().is_some() {
            return true;
        }
        match context::surplus(
            self.session(),
            self.fixed_tokens(),
            &self.settings,
            self.state.budget.tokens,
        ) {
            Ok(None) => true,
            Ok(Some(surplus)) => {
                if !self.plan_compaction(&surplus, out) {
                    self.forget(surplus.trimmed, out);
                }
                true
            }
            Err(_) if !self.is_heartbeat() && self.drop_summary(out) => self.make_room(out),
            Err(too_large) => {
                let message = format!(
                    "the newest turn alone needs about {} tokens and {} are left for it; raise spec.model.contextTokens, \
                     lower spec.model.maxOutputTokens or shorten the instructions",
                    too_large.needed, too_large.room
                );
                self.fail_turn(failure(message), out);
                false
            }
        }
    }

    /// The oldest messages leave the transcript, and the model is told.
    pub(super) fn forget(&mut self, surplus: usize, out: &mut Outbox) {
        self.transcript.drain(..surplus);
        self.state.watch.forgets();
        self.note("old turns left the context");
        out.record(Record {
            forget: surplus,
            ..line(RecordKind::Trimmed, self.turn_number(), "")
        });
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
        let tokens = answer.tokens.unwrap_or_else(|| self.largest_call());
        self.count_use(Resource::LLMTokens, tokens, out);
        if let Some(compaction) = self.compaction() {
            self.summarised(compaction, call, answer, out);
            return;
        }
        let silent = answer.text.as_deref().is_none_or(|text| text.trim().is_empty()) && answer.tool_calls.is_empty();
        if silent && matches!(answer.finish, Finish::Stop | Finish::ToolCalls) {
            out.record(answer_line((call, purpose), answer, "empty", Vec::new()));
            let message = "the model answered with neither text nor a tool call; check that the server's chat template \
                           fits spec.model.name";
            self.fail_turn(failure(message.to_owned()), out);
            return;
        }
        let message = Arc::new(Message::Assistant {
            // Servers refuse an assistant message with nothing in it.
            text: if silent {
                Some("[no text]".to_owned())
            } else {
                answer.text.clone()
            },
            tool_calls: answer.tool_calls.clone(),
        });
        self.append(std::slice::from_ref(&message));
        self.notifications_seen();
        let note = format!("{:?}", answer.finish);
        out.record(answer_line((call, purpose), answer, note, vec![message]));
        if !self.is_heartbeat() {
            self.state.counters.idle.count(out.now);
        }
        match answer.finish {
            Finish::Length => self.note("your last answer was cut at the output limit"),
            Finish::Refused => self.note("the provider refused or filtered your last answer"),
            Finish::Stop | Finish::ToolCalls => {}
        }
        if answer.tool_calls.is_empty() {
            self.complete_turn(Pace::Continue, out);
        } else {
            self.begin_work(call, answer, out);
        }
    }

    /// The call in flight gave no answer.
    pub(super) fn failed(&mut self, call: CallId, failure: Failure, out: &mut Outbox) {
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
            Some(turn) => turn.step = Step::Due(out.now),
            None => self.close_call_before_turn(out.now),
        }
        if !scores {
            self.state.counters.idle.interrupted();
        }
        out.push(Effect::Acknowledge { call });
        let note = failure.kind.as_ref();
        out.record(call_line(RecordKind::CallFailed, call, note, Vec::new()));
        // The gateway may have cut it before the worker heard why.
        let failure = match &self.state.budget.stop {
            Some(message) if failure.kind == FailureKind::Cancelled => budget::stopped(message.clone()),
            Some(_) | None => failure,
        };
        if let Some(reason) = budget::reason_of(failure.kind) {
            self.was_not_made();
            if scores && failure.kind == FailureKind::CallExceedsLimit {
                // An event that is too large for a limit is not to hold the loop.
                self.score_given_up(failure, out);
            } else {
                self.refused(reason, failure, out);
            }
            return;
        }
        if matches!(failure.kind, FailureKind::LinkLost | FailureKind::RecordFailed) {
            self.was_not_made();
            self.was_not_asked(out.now);
        } else {
            self.was_let_through();
        }
        if scores {
            self.score_failed(call, failure, out);
        } else {
            self.failed_in_truth(call, failure, out);
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

    /// A call failed that a limit had let through.
    fn failed_in_truth(&mut self, call: CallId, failure: Failure, out: &mut Outbox) {
        if self.compaction_failed(&failure, out) {
            return;
        }
        let Some(turn) = &mut self.state.turn else {
            self.pre_check_failed(failure, out);
            return;
        };
        if failure.kind != FailureKind::LinkLost {
            turn.failures = turn.failures.saturating_add(1);
        }
        let next = retry::next(&failure, call, turn.failures, out.now);
        self.state.last_error = Some((out.now, failure.clone()));
        match next {
            Next::Retry(wait) => {
                if let Some(turn) = &mut self.state.turn {
                    turn.step = Step::Due(clock::after(out.now, wait));
                }
                self.hold_if_rate_limited(&failure, out);
            }
            Next::AwaitLink => self.link_refused(out),
            Next::GiveUp => {
                self.hold_if_rate_limited(&failure, out);
                self.fail_turn(failure, out);
            }
        }
    }

    /// A provider that asks for a long wait pauses the loop until then, so that people see why nothing happens.
    fn hold_if_rate_limited(&mut self, failure: &Failure, out: &Outbox) {
        let wait = retry::retry_after(failure);
        if failure.kind == FailureKind::RateLimited && wait > retry::LONG_WAIT {
            let message = format!("the provider asked to wait: {}", failure.message);
            self.hold(
                PauseReason::ProviderRateLimit,
                Some(clock::after(out.now, wait)),
                message,
            );
        }
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
        out.record(line(RecordKind::TurnCompleted, self.turn_number(), note));
        self.acknowledge_notifications();
        self.look_at_turn(&pace, out);
        self.hot.committed();
        let unseen = self.state.turn.take().map(|turn| turn.unseen).unwrap_or_default();
        self.state.turns_completed = self.state.turns_completed.saturating_add(1);
        let counters = &mut self.state.counters;
        (counters.errors, counters.error_cooldowns, counters.crash_cooldowns) = (0, 0, 0);
        self.state.next_turn = Some(clock::after(out.now, self.settings.min_delay));
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
                None => self.after_turn(false, out),
            },
            Pace::Sleep {
                wait,
                wake_early_if,
                reason,
            } => {
                self.begin_sleep(wait, wake_early_if, reason, out.now);
                self.end_sleep_for(&unseen, out);
                self.state.counters.idle.effective_action(out.now);
                self.after_turn(true, out);
            }
            Pace::Shutdown => self.end(Outcome::Completed, out),
        }
    }

    fn after_turn(&mut self, sleeps: bool, out: &Outbox) {
        for guardrail in guardrails::ALL {
            if let Some(trip) = guardrail.after_turn(&self.settings, &mut self.state.counters, sleeps) {
                self.hold_for(trip, out);
            }
        }
    }

    /// Gives the turn up. Its messages leave the transcript: half a turn would confuse the model more than none. Unless it
    /// has changed something: who forgets that does it again.
    fn fail_turn(&mut self, failure: Failure, out: &mut Outbox) {
        self.state.counters.idle.interrupted();
        let Some(turn) = self.state.turn.take() else {
            return;
        };
        if turn.heartbeat {
            self.fail_heartbeat(&turn, failure, out);
            return;
        }
        self.state.watch.turn_failed();
        let retract = if turn.acted {
            0
        } else {
            turn.messages.min(self.transcript.len())
        };
        self.transcript.truncate(self.transcript.len() - retract);
        let note = failure.kind.to_string();
        out.record(Record {
            retract,
            ..line(RecordKind::TurnFailed, turn.number, note)
        });
        if turn.acted {
            "the last turn failed before its end; what its tools did stands".clone_into(&mut self.state.briefing.cause);
        } else {
            let Briefing { cause, mut notes } = turn.briefing;
            notes.append(&mut self.state.briefing.notes);
            notes.dedup();
            self.state.briefing = Briefing { cause, notes };
        }
        self.blame_notifications(&turn.shown, &failure, out);
        let counters = &mut self.state.counters;
        counters.errors = counters.errors.saturating_add(1);
        let delay = clock::doubled(self.settings.min_delay, counters.errors, self.settings.max_delay);
        self.state.next_turn = Some(clock::after(out.now, delay.max(retry::retry_after(&failure))));
        self.check_error_limit(&failure.to_string(), out);
        self.state.last_error = Some((out.now, failure));
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

fn failure(message: String) -> Failure {
    Failure {
        kind: FailureKind::BadResponse,
        message,
        retry_after_milliseconds: None,
        resumes_at: None,
    }
}
