//! Waking: which inputs may end a sleep, and what its end leads to. When a sleep begins and ends is up to the mode.
//! Also the delays between turns without a tool call.

use jiff::{SignedDuration, Timestamp};

use super::effects::{EffectBuffer, journal_line};
use super::guardrails::RestKind;
use super::machine::Engine;
use super::modes::WakeTrigger;
use super::snapshot::CauseKind;
use super::turn::state::UnseenEvents;
use super::{RecordKind, time_math};

/// The delay after the first of the slow turns in a row without a tool call; each further one doubles it.
const FIRST_DELAY: SignedDuration = SignedDuration::from_secs(1);

impl Engine {
    /// Ends a sleep whose time has come, including one that ended while the worker was down.
    pub(super) fn end_sleep_if_over(&mut self, out: &mut EffectBuffer) {
        let Some(end) = self.ask_mode(out.now, |mode, context| mode.end_sleep_if_over(context)) else {
            return;
        };
        self.sleep_ended(end.cause, out);
        if let Some(sleep) = end.extendable {
            self.may_sleep_on(sleep);
        }
    }

    /// A named event ends a sleep that waits for it. This includes a sleep under a pause and one that the turn under
    /// way is about to begin, since the event is not delivered again.
    pub(super) fn wake_on_event(&mut self, name: &str, out: &mut EffectBuffer) {
        let cause = format!("the event {name} ended your sleep");
        self.wake(WakeTrigger::Event(name), &cause, out);
        if let Some(turn) = &mut self.state.turn {
            turn.miss_event(name);
        }
        let ended = self.state.pre_check.sleep();
        if ended.is_some_and(|sleep| self.mode().would_end(sleep, WakeTrigger::Event(name))) {
            self.open_pre_check(&cause, out);
        }
    }

    /// A high-priority notification ends every sleep, as [`Self::wake_on_event`] does for a named event.
    pub(super) fn wake_on_urgent(&mut self, out: &mut EffectBuffer) {
        self.wake(
            WakeTrigger::Urgent,
            "a notification of high priority ended your sleep",
            out,
        );
        if let Some(turn) = &mut self.state.turn {
            turn.miss_urgent();
        }
    }

    /// Ends the sleep that was just chosen if something that ends it arrived after the turn's last prompt: the model
    /// did not know of it.
    pub(super) fn end_sleep_for(&mut self, unseen: &UnseenEvents, out: &mut EffectBuffer) {
        if unseen.urgent {
            let cause = "a notification of high priority came while you chose to sleep";
            self.wake(WakeTrigger::Urgent, cause, out);
            return;
        }
        for name in &unseen.events {
            let cause = format!("the event {name} came while you chose to sleep");
            if self.wake(WakeTrigger::Event(name), &cause, out) {
                return;
            }
        }
    }

    /// Handles the request `wake`, once per token. It affects only a sleep and the pre-check after it. A turn beside the sleep,
    /// such as a heartbeat, does not matter.
    pub(super) fn wake_requested(&mut self, token: String, out: &mut EffectBuffer) {
        // A loop that is about to end leaves the request open: it starts the loop again.
        if self.state.handled.wake.as_ref() == Some(&token) || self.state.life.outcome().is_some() {
            return;
        }
        self.state.life.withdraw_stop_request();
        self.state.handled.wake = Some(token);
        out.record(journal_line(RecordKind::RequestHandled, self.turn_number(), "wake"));
        let cause = "a wake request ended your sleep";
        let sleeps = self.mode().sleep().is_some() && self.state.reasons.is_empty();
        if sleeps && self.state.life.is_active() {
            self.wake(WakeTrigger::Request, cause, out);
        }
        self.open_pre_check(cause, out);
    }

    /// Ends the sleep if the mode says that this ends it. Returns whether it did.
    fn wake(&mut self, trigger: WakeTrigger<'_>, cause: &str, out: &mut EffectBuffer) -> bool {
        match self.ask_mode(out.now, |mode, _| mode.wake(trigger, cause)) {
            Some(cause) => {
                self.sleep_ended(cause, out);
                true
            }
            None => false,
        }
    }

    /// A sleep has ended. `cause`: of the next turn.
    fn sleep_ended(&mut self, cause: String, out: &mut EffectBuffer) {
        // Under a pause the public state does not change; without its own line the end would not be journalled.
        if !self.state.life.is_active() || !self.state.reasons.is_empty() {
            let note = format!("{}: the sleep ended", self.public_state());
            out.record(journal_line(RecordKind::Transition, self.turn_number(), note));
        }
        self.state.briefing.set_cause(CauseKind::Event, cause);
    }

    /// Records a rest that the agent chose.
    pub(super) fn record_rest(&mut self, wait: SignedDuration, now: Timestamp) -> RestKind {
        let counters = &mut self.state.counters;
        let rest = counters.rest.rested(wait);
        if rest != RestKind::None {
            counters.idle.effective_action(now);
        }
        rest
    }

    /// The delay between a completed turn and the next. It grows after turns that called no tool, since their text is
    /// never read.
    pub(super) fn delay(&self) -> SignedDuration {
        let own = self.settings.min_delay;
        match self.slow_turns().checked_sub(1) {
            Some(earlier) => time_math::doubled(FIRST_DELAY, earlier, self.settings.longest_text_delay).max(own),
            None => own,
        }
    }

    /// Turns in a row without a tool call, beyond those that are not slowed down.
    fn slow_turns(&self) -> u32 {
        self.state.counters.rest.slow_turns(self.settings.quick_text_turns)
    }

    /// Counts a turn that ended with text, if the mode delays such turns. The model sees a note about the consequence once.
    pub(super) fn count_text_turn(&mut self) {
        let turn = self.state.turn.as_ref().filter(|turn| turn.rules().counts_as_turn);
        let (Some(turn), Some(note)) = (turn, self.mode().text_turn_note()) else {
            return;
        };
        // Text is legitimate after a tool call, or in reply to a notification.
        if turn.own_call() > 1 || turn.shown().is_seen() {
            self.state.counters.rest.end_text_turns();
            return;
        }
        self.state.counters.rest.count_text_turn();
        if self.slow_turns() == 1 && self.settings.longest_text_delay > self.settings.min_delay {
            self.add_note(note);
        }
    }

    /// Input arrived: a turn that waits only because of earlier text-only turns begins now.
    pub(super) fn hasten_next_turn(&mut self, now: Timestamp) {
        if self.state.turn.is_none() && self.slow_turns() > 0 {
            let soon = time_math::after(now, self.settings.min_delay);
            self.state.next_turn = self.state.next_turn.map(|at| at.min(soon));
        }
    }

    /// What would have ended a sleep also skips the pre-check after it, since it is not delivered again.
    fn open_pre_check(&mut self, cause: &str, out: &mut EffectBuffer) {
        if self.skip_pre_check() {
            self.state.briefing.set_cause(CauseKind::Event, cause);
            out.record(journal_line(
                RecordKind::Transition,
                self.turn_number(),
                "the pre-check is skipped, the turn runs",
            ));
        }
    }
}
