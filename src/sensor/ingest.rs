//! What becomes of an arrival: the rules decide, the outbox keeps, and only then is it answered.

use jiff::Timestamp;

use super::deliverer::SharedOutbox;
use super::outbox::{ArrivalRecord, OutboxError, RepeatKey, RestoredOutbox};
use crate::sensing::rules::{RulesOutcome, RulesState, SensorRules};
use crate::sensing::source::{ArrivalOutcome, RepeatRule, SourceCursor, SourceMessage};

/// Keeps what a Sensor hears.
pub struct EventIngester {
    outbox: SharedOutbox,
    rules: SensorRules,
    state: RulesState,
    cursor: SourceCursor,
}

impl EventIngester {
    /// Goes on from what the outbox remembers.
    #[must_use]
    pub fn new(outbox: SharedOutbox, restored: RestoredOutbox<RulesState>, rules: SensorRules) -> Self {
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
    pub fn set_rules(&mut self, rules: SensorRules) {
        self.rules = rules;
    }

    /// Where the source goes on.
    #[must_use]
    pub fn cursor(&self) -> &SourceCursor {
        &self.cursor
    }

    /// What was remembered last.
    #[must_use]
    pub fn state(&self) -> &RulesState {
        &self.state
    }

    /// Says which source it is that is heard; of another one than before it forgets where to go on.
    pub fn set_source(&mut self, source: &str) -> Result<(), OutboxError> {
        if self.outbox.lock().set_source(source)? {
            self.cursor = SourceCursor::default();
        }
        Ok(())
    }

    /// Something came.
    pub fn ingest(&mut self, heard: &SourceMessage, at: Timestamp) -> Result<ArrivalOutcome, OutboxError> {
        // First what waited and is due: what comes now must not take its place.
        self.release_held(at)?;
        let keys = RepeatKeys::of(heard);
        let mut state = self.state.clone();
        let known = keys.look_up(&self.outbox)?;
        let outcome = match known {
            Some(ArrivalOutcome::Known) => {
                state.totals.filtered += 1;
                RulesOutcome::Filtered
            }
            Some(refused) => return Ok(refused),
            None => {
                let (id, payload) = (heard.id.as_deref(), &heard.payload);
                if heard.repeat == RepeatRule::SameAsLast {
                    self.rules.process(&mut state, at, id, payload)
                } else {
                    self.rules.process_new(&mut state, at, id, payload)
                }
            }
        };
        let taken = match outcome {
            // Held is on disk too, with the rest of what the rules remember.
            RulesOutcome::Accepted(_) | RulesOutcome::Held | RulesOutcome::Failed => ArrivalOutcome::OnDisk,
            RulesOutcome::Filtered => ArrivalOutcome::Known,
            RulesOutcome::Dropped => ArrivalOutcome::Dropped,
            RulesOutcome::TooDeep => ArrivalOutcome::TooDeep,
        };
        let moves = !matches!(taken, ArrivalOutcome::Dropped | ArrivalOutcome::TooDeep);
        let cursor = (moves && heard.cursor != self.cursor).then(|| heard.cursor.clone());
        if !matches!(taken, ArrivalOutcome::OnDisk) && cursor.is_none() {
            // Only totals changed: they are written with the next event. A page that stays the same costs no write.
            self.state = state;
            return Ok(taken);
        }
        let ids = if matches!(outcome, RulesOutcome::Accepted(_) | RulesOutcome::Held) {
            keys.all()
        } else {
            Vec::new()
        };
        self.store_arrival(state, cursor, &outcome, (&ids, at))?;
        Ok(taken)
    }

    /// When [`EventIngester::release_held`] is due.
    #[must_use]
    pub fn waits_until(&self) -> Option<Timestamp> {
        self.rules.waits_until(&self.state)
    }

    /// What waited for the end of `minIntervalMilliseconds` takes effect, once that is over.
    pub fn release_held(&mut self, now: Timestamp) -> Result<(), OutboxError> {
        let mut state = self.state.clone();
        match self.rules.release_held(&mut state, now) {
            Some(outcome) => self.store_arrival(state, None, &outcome, (&[], now)),
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

    fn store_arrival(
        &mut self,
        mut state: RulesState,
        cursor: Option<SourceCursor>,
        outcome: &RulesOutcome,
        ids: (&[RepeatKey], Timestamp),
    ) -> Result<(), OutboxError> {
        let event = match outcome {
            RulesOutcome::Accepted(event) => Some(&**event),
            RulesOutcome::Held
            | RulesOutcome::Filtered
            | RulesOutcome::Dropped
            | RulesOutcome::TooDeep
            | RulesOutcome::Failed => None,
        };
        let taking = ArrivalRecord {
            state: &state,
            cursor: cursor.as_ref(),
            event,
            ids,
        };
        let gone = self.outbox.lock().record_arrival(&taking)?;
        // Written with the next event.
        state.totals.dropped += gone;
        self.state = state;
        self.cursor = cursor.unwrap_or_else(|| self.cursor.clone());
        if let Some(event) = event {
            self.outbox.notify_new(event.seq);
        }
        Ok(())
    }
}

/// What a repeat of something is known by.
#[derive(Default)]
struct RepeatKeys {
    /// Its own.
    own: Option<RepeatKey>,
    /// That of its text, where that must not come under another id.
    text: Option<RepeatKey>,
}

impl RepeatKeys {
    fn of(heard: &SourceMessage) -> Self {
        let text = || RepeatKey::of(b't', &[&heard.payload]);
        let own = |id: &String| RepeatKey::of(b'b', &[id.as_bytes(), &heard.payload]);
        let id = heard.id.as_ref();
        match heard.repeat {
            RepeatRule::SameAsLast | RepeatRule::Never => Self::default(),
            RepeatRule::Id => Self {
                own: Some(id.map_or_else(text, |id| RepeatKey::of(b'i', &[id.as_bytes()]))),
                text: None,
            },
            RepeatRule::IdAndText => Self {
                own: Some(id.map_or_else(text, own)),
                text: None,
            },
            RepeatRule::SignedText => Self {
                own: id.map(own),
                text: Some(text()),
            },
        }
    }

    /// What becomes of it because of what came before; `None`: it is new.
    fn look_up(&self, outbox: &SharedOutbox) -> Result<Option<ArrivalOutcome>, OutboxError> {
        let outbox = outbox.lock();
        let knows = |key: &Option<RepeatKey>| key.as_ref().map_or(Ok(false), |key| outbox.knows(key));
        if knows(&self.own)? {
            return Ok(Some(ArrivalOutcome::Known));
        }
        let again = knows(&self.text)?;
        let how = if self.own.is_some() {
            ArrivalOutcome::Replayed
        } else {
            ArrivalOutcome::Known
        };
        Ok(again.then_some(how))
    }

    fn all(&self) -> Vec<RepeatKey> {
        self.own.into_iter().chain(self.text).collect()
    }
}

#[cfg(test)]
mod tests;
