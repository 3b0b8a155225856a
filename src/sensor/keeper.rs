//! What becomes of an arrival: the rules decide, the outbox keeps, and only then is it answered.

use jiff::Timestamp;

use super::deliverer::Shared;
use super::outbox::{OutboxError, Restored, Taking};
use crate::sensing::rules::{Outcome, Rules, State};
use crate::sensing::source::{Cursor, Heard, Taken};

/// Keeps what a Sensor hears.
pub struct Keeper {
    outbox: Shared,
    rules: Rules,
    state: State,
    cursor: Cursor,
}

impl Keeper {
    /// Goes on from what the outbox remembers.
    #[must_use]
    pub fn new(outbox: Shared, restored: Restored<State>, rules: Rules) -> Self {
        let mut state = restored.state.unwrap_or_default();
        state.seq = state.seq.max(restored.last);
        Self {
            outbox,
            rules,
            state,
            cursor: restored.cursor,
        }
    }

    /// Goes on by other rules.
    pub fn change(&mut self, rules: Rules) {
        self.rules = rules;
    }

    /// Where the source goes on.
    #[must_use]
    pub fn cursor(&self) -> &Cursor {
        &self.cursor
    }

    /// What was remembered last.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Something came.
    pub fn hear(&mut self, heard: &Heard, at: Timestamp) -> Result<Taken, OutboxError> {
        let mut state = self.state.clone();
        let outcome = self.rules.hear(&mut state, at, heard.id.as_deref(), &heard.payload);
        let taken = match outcome {
            // Held is on disk too, with the rest of what the rules remember.
            Outcome::Accepted(_) | Outcome::Held | Outcome::Failed => Taken::OnDisk,
            Outcome::Filtered => Taken::Known,
            Outcome::Dropped => Taken::Dropped,
        };
        let cursor = (taken != Taken::Dropped && heard.cursor != self.cursor).then(|| heard.cursor.clone());
        if matches!(outcome, Outcome::Filtered | Outcome::Dropped) && cursor.is_none() {
            // Only totals changed: they are written with the next event. A page that stays the same costs no write.
            self.state = state;
            return Ok(taken);
        }
        self.keep(state, cursor, &outcome)?;
        Ok(taken)
    }

    /// When [`Keeper::take_up`] is due.
    #[must_use]
    pub fn waits_until(&self) -> Option<Timestamp> {
        self.rules.waits_until(&self.state)
    }

    /// What waited for the end of `minIntervalMilliseconds` takes effect, once that is over.
    pub fn take_up(&mut self, now: Timestamp) -> Result<(), OutboxError> {
        let mut state = self.state.clone();
        match self.rules.take_up(&mut state, now) {
            Some(outcome) => self.keep(state, None, &outcome),
            None => Ok(()),
        }
    }

    /// The source failed so often since it was last asked.
    pub fn count_failures(&mut self, failures: i64) {
        // Written with the next event.
        self.state.totals.errors = self.state.totals.errors.saturating_add(failures);
    }

    fn keep(&mut self, mut state: State, cursor: Option<Cursor>, outcome: &Outcome) -> Result<(), OutboxError> {
        let event = match outcome {
            Outcome::Accepted(event) => Some(event),
            Outcome::Held | Outcome::Filtered | Outcome::Dropped | Outcome::Failed => None,
        };
        let taking = Taking {
            state: &state,
            cursor: cursor.as_ref(),
            event,
        };
        let gone = self.outbox.lock().take(&taking)?;
        // Written with the next event.
        state.totals.dropped += gone;
        self.state = state;
        self.cursor = cursor.unwrap_or_else(|| self.cursor.clone());
        if let Some(event) = event {
            self.outbox.grew(event.seq);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
