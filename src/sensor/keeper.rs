//! What becomes of an arrival: the rules decide, the outbox keeps, and only then is it answered.

use jiff::Timestamp;

use super::deliverer::Shared;
use super::outbox::{Key, OutboxError, Restored, Taking};
use crate::sensing::rules::{Outcome, Rules, State};
use crate::sensing::source::{Cursor, Heard, Repeat, Taken};

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

    /// Says which source it is that is heard; of another one than before it forgets where to go on.
    pub fn listen_to(&mut self, source: &str) -> Result<(), OutboxError> {
        if self.outbox.lock().listen_to(source)? {
            self.cursor = Cursor::default();
        }
        Ok(())
    }

    /// Something came.
    pub fn hear(&mut self, heard: &Heard, at: Timestamp) -> Result<Taken, OutboxError> {
        // First what waited and is due: what comes now must not take its place.
        self.take_up(at)?;
        let keys = Keys::of(heard);
        let mut state = self.state.clone();
        let known = keys.look_up(&self.outbox)?;
        let outcome = match known {
            Some(Taken::Known) => {
                state.totals.filtered += 1;
                Outcome::Filtered
            }
            Some(refused) => return Ok(refused),
            None => {
                let (id, payload) = (heard.id.as_deref(), &heard.payload);
                if heard.repeat == Repeat::SameAsLast {
                    self.rules.hear(&mut state, at, id, payload)
                } else {
                    self.rules.hear_news(&mut state, at, id, payload)
                }
            }
        };
        let taken = match outcome {
            // Held is on disk too, with the rest of what the rules remember.
            Outcome::Accepted(_) | Outcome::Held | Outcome::Failed => Taken::OnDisk,
            Outcome::Filtered => Taken::Known,
            Outcome::Dropped => Taken::Dropped,
            Outcome::TooDeep => Taken::TooDeep,
        };
        let moves = !matches!(taken, Taken::Dropped | Taken::TooDeep);
        let cursor = (moves && heard.cursor != self.cursor).then(|| heard.cursor.clone());
        if !matches!(taken, Taken::OnDisk) && cursor.is_none() {
            // Only totals changed: they are written with the next event. A page that stays the same costs no write.
            self.state = state;
            return Ok(taken);
        }
        let ids = if matches!(outcome, Outcome::Accepted(_) | Outcome::Held) {
            keys.all()
        } else {
            Vec::new()
        };
        self.keep(state, cursor, &outcome, (&ids, at))?;
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
            Some(outcome) => self.keep(state, None, &outcome, (&[], now)),
            None => Ok(()),
        }
    }

    /// The source failed so often since it was last asked.
    pub fn count_failures(&mut self, failures: i64) {
        // Written with the next event.
        self.state.totals.errors = self.state.totals.errors.saturating_add(failures);
    }

    /// So many deliveries were refused since it was last asked.
    pub fn count_refused(&mut self, refused: i64) {
        self.state.totals.refused = self.state.totals.refused.saturating_add(refused);
    }

    /// Gives up what waits for receivers that ceased to be some a while ago.
    pub fn expire(&mut self, now: Timestamp) -> Result<(), OutboxError> {
        let lost = self.outbox.lock().expire(now)?;
        self.state.totals.dropped = self.state.totals.dropped.saturating_add(lost);
        Ok(())
    }

    fn keep(
        &mut self,
        mut state: State,
        cursor: Option<Cursor>,
        outcome: &Outcome,
        ids: (&[Key], Timestamp),
    ) -> Result<(), OutboxError> {
        let event = match outcome {
            Outcome::Accepted(event) => Some(&**event),
            Outcome::Held | Outcome::Filtered | Outcome::Dropped | Outcome::TooDeep | Outcome::Failed => None,
        };
        let taking = Taking {
            state: &state,
            cursor: cursor.as_ref(),
            event,
            ids,
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

/// What a repeat of something is known by.
#[derive(Default)]
struct Keys {
    /// Its own.
    own: Option<Key>,
    /// That of its text, where that must not come under another id.
    text: Option<Key>,
}

impl Keys {
    fn of(heard: &Heard) -> Self {
        let text = || Key::of(b't', &[&heard.payload]);
        let own = |id: &String| Key::of(b'b', &[id.as_bytes(), &heard.payload]);
        let id = heard.id.as_ref();
        match heard.repeat {
            Repeat::SameAsLast | Repeat::Never => Self::default(),
            Repeat::Id => Self {
                own: Some(id.map_or_else(text, |id| Key::of(b'i', &[id.as_bytes()]))),
                text: None,
            },
            Repeat::IdAndText => Self {
                own: Some(id.map_or_else(text, own)),
                text: None,
            },
            Repeat::SignedText => Self {
                own: id.map(own),
                text: Some(text()),
            },
        }
    }

    /// What becomes of it because of what came before; `None`: it is new.
    fn look_up(&self, outbox: &Shared) -> Result<Option<Taken>, OutboxError> {
        let outbox = outbox.lock();
        let knows = |key: &Option<Key>| key.as_ref().map_or(Ok(false), |key| outbox.knows(key));
        if knows(&self.own)? {
            return Ok(Some(Taken::Known));
        }
        let again = knows(&self.text)?;
        let how = if self.own.is_some() {
            Taken::Replayed
        } else {
            Taken::Known
        };
        Ok(again.then_some(how))
    }

    fn all(&self) -> Vec<Key> {
        self.own.into_iter().chain(self.text).collect()
    }
}

#[cfg(test)]
mod tests;
