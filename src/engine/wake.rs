//! Sleeping and waking: how a sleep of the agent's own choice begins and what ends it.

use jiff::{SignedDuration, Timestamp};

use super::effects::{EffectBuffer, journal_line};
use super::guardrails::RestKind;
use super::machine::Engine;
use super::resources::ResourceWait;
use super::snapshot::{ChosenSleep, LifecyclePhase, UnseenEvents};
use super::{RecordKind, time_math, yield_tool};
use crate::api::status::LoopState;

/// A sleep of the agent's own choice after which limits count anew.
pub const WHOLE_SLEEP: SignedDuration = SignedDuration::from_secs(60);
/// The delay after the first of several turns in a row without a tool call; each further one is twice as long.
const FIRST_DELAY: SignedDuration = SignedDuration::from_secs(1);
/// What the model is told after the first of them.
const SLOWER: &str = "your last turn called no tool. Nobody reads your text; after each further turn without a tool call the \
                      next one comes later, up to 60 s. Call `yield` to set your own pace";

impl Engine {
    /// The sleep's own end has come; one that passed while the worker was down ends now, once.
    pub(super) fn end_sleep_if_over(&mut self, out: &mut EffectBuffer) {
        let Some(sleep) = self.state.sleep.clone().filter(|sleep| sleep.ends() <= out.now) else {
            return;
        };
        if sleep.until <= out.now {
            self.end_sleep("the sleep that you chose is over", out);
            self.may_sleep_on(sleep);
        } else {
            self.end_sleep("there is the room again that you waited for", out);
        }
    }

    /// A named event ends a sleep that named it, also one that lies under a pause, and one that a turn under way is about
    /// to begin: the event will not come again.
    pub(super) fn wake_on_event(&mut self, name: &str, out: &mut EffectBuffer) {
        let cause = format!("the event {name} ended your sleep");
        if self.sleeps_until(name) {
            self.end_sleep(&cause, out);
        }
        if let Some(turn) = &mut self.state.turn
            && !turn.unseen.events.iter().any(|known| known == name)
        {
            turn.unseen.events.push(name.to_owned());
        }
        let kept = self.state.pre_check.wake_early_if();
        if kept.iter().any(|wanted| matches_event(wanted, name)) {
            self.open_pre_check(&cause, out);
        }
    }

    /// A notification of high priority ends each sleep, as [`Self::wake_on_event`] ends one that named it.
    pub(super) fn wake_on_urgent(&mut self, out: &mut EffectBuffer) {
        self.end_sleep("a notification of high priority ended your sleep", out);
        if let Some(turn) = &mut self.state.turn {
            turn.unseen.urgent = true;
        }
    }

    /// The sleep that was just chosen ends for what came after its turn's last prompt: whoever chose it did not know.
    pub(super) fn end_sleep_for(&mut self, unseen: &UnseenEvents, out: &mut EffectBuffer) {
        if unseen.urgent {
            self.end_sleep("a notification of high priority came while you chose to sleep", out);
        } else if let Some(name) = unseen.events.iter().find(|name| self.sleeps_until(name)) {
            self.end_sleep(&format!("the event {name} came while you chose to sleep"), out);
        }
    }

    fn sleeps_until(&self, event: &str) -> bool {
        let named = |sleep: &ChosenSleep| sleep.wake_early_if.iter().any(|wanted| matches_event(wanted, event));
        self.state.sleep.as_ref().is_some_and(named)
    }

    /// The request `wake`, once per token: it acts on a Sleeping loop only.
    pub(super) fn wake_requested(&mut self, token: String, out: &mut EffectBuffer) {
        if self.state.handled.wake.as_ref() == Some(&token) {
            return;
        }
        self.state.handled.wake = Some(token);
        out.record(journal_line(RecordKind::RequestHandled, self.turn_number(), "wake"));
        if self.public_state().state == LoopState::Sleeping {
            self.end_sleep("you were asked to wake", out);
        }
        self.open_pre_check("you were asked to wake", out);
    }

    /// A sleep that waits for room which is there already lasts as long as the shortest.
    pub(super) fn begin_sleep(
        &mut self,
        wait: SignedDuration,
        wake_early_if: Vec<String>,
        reason: String,
        now: Timestamp,
    ) {
        let rooms = wake_early_if.iter().filter_map(|name| ResourceWait::read(name));
        let (used, limits) = (&self.state.used, &self.settings.rate_limits);
        let shortest = time_math::after(now, yield_tool::SHORTEST_SLEEP);
        let room_at = rooms
            .map(|room| room.comes_at(used, limits, now).map_or(shortest, |at| at.max(shortest)))
            .min();
        self.state.sleep = Some(ChosenSleep {
            until: time_math::after(now, wait),
            length: wait,
            wake_early_if,
            room_at,
            reason,
        });
    }

    /// The agent rests for so long. A minute begins anew what limits count; naps do so once they come to a minute together,
    /// so that nobody naps past the limits.
    pub(super) fn record_rest(&mut self, wait: SignedDuration, now: Timestamp) -> RestKind {
        let counters = &mut self.state.counters;
        counters.words = 0;
        let rest = if wait >= WHOLE_SLEEP {
            counters.napped = SignedDuration::ZERO;
            RestKind::Sleep
        } else {
            counters.napped += wait;
            if counters.napped < WHOLE_SLEEP {
                return RestKind::None;
            }
            counters.napped -= WHOLE_SLEEP;
            RestKind::Naps
        };
        counters.idle.effective_action(now);
        rest
    }

    /// The time from a completed turn to the next. After turns that called no tool it grows, since nobody reads their words.
    pub(super) fn delay(&self) -> SignedDuration {
        let own = self.settings.min_delay;
        match self.slow_turns().checked_sub(1) {
            Some(earlier) => time_math::doubled(FIRST_DELAY, earlier, self.settings.longest_text_delay).max(own),
            None => own,
        }
    }

    /// Turns in a row without a tool call, but for those that may be quick.
    fn slow_turns(&self) -> u32 {
        let words = self.state.counters.words;
        words.saturating_sub(self.settings.quick_text_turns)
    }

    /// The present turn ends with words. The model is told once what follows from that.
    pub(super) fn count_text_turn(&mut self) {
        let Some(turn) = self.state.turn.as_ref().filter(|turn| !turn.heartbeat) else {
            return;
        };
        // Whoever has done something, or hears of something, may well say a word.
        if turn.own_call() > 1 || turn.shown.is_seen() {
            self.state.counters.words = 0;
            return;
        }
        self.state.counters.words = self.state.counters.words.saturating_add(1);
        if self.slow_turns() == 1 && self.settings.longest_text_delay > self.settings.min_delay {
            self.add_note(SLOWER);
        }
    }

    /// Something came from outside: a turn that only waits because of many words begins now.
    pub(super) fn hasten_next_turn(&mut self, now: Timestamp) {
        if self.state.turn.is_none() && self.slow_turns() > 0 {
            let soon = time_math::after(now, self.settings.min_delay);
            self.state.next_turn = self.state.next_turn.map(|at| at.min(soon));
        }
    }

    /// What would have ended a sleep ends the pre-check after it too: it will not come again.
    fn open_pre_check(&mut self, cause: &str, out: &mut EffectBuffer) {
        if self.skip_pre_check() {
            cause.clone_into(&mut self.state.briefing.cause);
            out.record(journal_line(
                RecordKind::Transition,
                self.turn_number(),
                "the turn runs in any case",
            ));
        }
    }

    pub(super) fn end_sleep(&mut self, cause: &str, out: &mut EffectBuffer) {
        let Some(sleep) = self.state.sleep.take() else {
            return;
        };
        // Under a pause the public state stays as it is; without a line of its own the end would not be journalled.
        if self.state.lifecycle != LifecyclePhase::Active || !self.state.reasons.is_empty() {
            let note = format!("{}: the sleep ended", self.public_state());
            out.record(journal_line(RecordKind::Transition, self.turn_number(), note));
        }
        let reason = if sleep.reason.is_empty() {
            String::new()
        } else {
            format!(", you slept because: {}", sleep.reason)
        };
        self.state.briefing.cause = format!(
            "{cause} (it was to last until {}{reason})",
            time_math::format_moment(sleep.until)
        );
    }
}

/// Whether an event is the one wanted. A bare name stands for a sensor or a signal of that name.
pub(super) fn matches_event(wanted: &str, event: &str) -> bool {
    if wanted == event {
        return true;
    }
    match event.split('/').collect::<Vec<_>>()[..] {
        ["sensor", sensor] => wanted == sensor,
        ["signal", _, signal] => wanted == signal,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::matches_event;

    #[test]
    fn a_bare_name_matches_a_sensor_or_a_signal_of_that_name_and_nothing_else() {
        assert!(matches_event("spike", "sensor/spike"));
        assert!(matches_event("spike", "signal/prices/spike"));
        assert!(matches_event("spike", "spike"));
        assert!(!matches_event("prices", "signal/prices/spike"));
        assert!(!matches_event("sensor/spike", "signal/prices/spike"));
        assert!(!matches_event("chat", "notification"));
    }
}
