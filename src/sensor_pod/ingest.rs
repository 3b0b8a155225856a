//! Handles an arrival: the rules decide, the outbox stores the result, and only then is the arrival acknowledged.

use jiff::Timestamp;

use super::deliverer::SharedOutbox;
use super::outbox::{ArrivalRecord, OutboxError, RepeatKey, RestoredOutbox};
use crate::sensor_pipeline::rules::{RulesOutcome, RulesState, SensorRules};
use crate::sensor_pipeline::source::{ArrivalOutcome, RepeatRule, SourceCursor, SourceMessage};

/// Applies the rules to [`SourceMessage`]s and stores the results.
pub struct EventIngester {
    outbox: SharedOutbox,
    rules: SensorRules,
    state: RulesState,
    cursor: SourceCursor,
}

impl EventIngester {
    /// Continues from the [`RestoredOutbox`].
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

    pub fn set_rules(&mut self, rules: SensorRules) {
        self.rules = rules;
    }

    /// Where the source resumes.
    #[must_use]
    pub fn cursor(&self) -> &SourceCursor {
        &self.cursor
    }

    /// The [`RulesState`] as last stored, with counters that are newer.
    #[must_use]
    pub fn state(&self) -> &RulesState {
        &self.state
    }

    /// Sets the identity of the source. If it changed, the [`SourceCursor`] is reset.
    pub fn set_source(&mut self, source: &str) -> Result<(), OutboxError> {
        if self.outbox.lock().set_source(source)? {
            self.cursor = SourceCursor::default();
        }
        Ok(())
    }

    pub fn ingest(&mut self, message: &SourceMessage, at: Timestamp) -> Result<ArrivalOutcome, OutboxError> {
        // First release a held event that is due, before this arrival replaces it.
        self.release_held(at)?;
        let keys = RepeatKeys::of(message);
        let mut state = self.state.clone();
        let known = keys.look_up(&self.outbox)?;
        let outcome = match known {
            Some(ArrivalOutcome::Known) => {
                state.totals.filtered += 1;
                RulesOutcome::Filtered
            }
            Some(refused) => return Ok(refused),
            None => {
                let (id, payload) = (message.id.as_deref(), &message.payload);
                if message.repeat == RepeatRule::SameAsLast {
                    self.rules.process(&mut state, at, id, payload)
                } else {
                    self.rules.process_new(&mut state, at, id, payload)
                }
            }
        };
        let taken = match outcome {
            // A held event is on disk too, within the rules' state.
            RulesOutcome::Accepted(_) | RulesOutcome::Held | RulesOutcome::Failed => ArrivalOutcome::OnDisk,
            RulesOutcome::Filtered => ArrivalOutcome::Known,
            RulesOutcome::Dropped => ArrivalOutcome::Dropped,
            RulesOutcome::TooDeep => ArrivalOutcome::TooDeep,
        };
        let moves = !matches!(taken, ArrivalOutcome::Dropped | ArrivalOutcome::TooDeep);
        let cursor = (moves && message.cursor != self.cursor).then(|| message.cursor.clone());
        if !matches!(taken, ArrivalOutcome::OnDisk) && cursor.is_none() {
            // Only totals changed: they are stored with the next event, so that an unchanged page costs no write.
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

    /// Processes the event that was held for `minIntervalMilliseconds`, once that is over.
    pub fn release_held(&mut self, now: Timestamp) -> Result<(), OutboxError> {
        let mut state = self.state.clone();
        match self.rules.release_held(&mut state, now) {
            Some(outcome) => self.store_arrival(state, None, &outcome, (&[], now)),
            None => Ok(()),
        }
    }

    /// Adds failures of the source since the last call.
    pub fn count_failures(&mut self, failures: i64) {
        // Stored with the next event.
        self.state.totals.errors = self.state.totals.errors.saturating_add(failures);
    }

    /// Adds refused deliveries since the last call.
    pub fn count_refused(&mut self, refused: i64) {
        self.state.totals.refused = self.state.totals.refused.saturating_add(refused);
    }

    /// Drops the pending events of former receivers after their grace period.
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
        // Stored with the next event.
        state.totals.dropped += gone;
        self.state = state;
        self.cursor = cursor.unwrap_or_else(|| self.cursor.clone());
        if let Some(event) = event {
            self.outbox.notify_new(event.seq);
        }
        Ok(())
    }
}

/// The keys by which a repeated arrival is recognized.
#[derive(Default)]
struct RepeatKeys {
    /// The key of the arrival itself.
    own: Option<RepeatKey>,
    /// The key of its text, where the same text under another id is a repeat too.
    text: Option<RepeatKey>,
}

impl RepeatKeys {
    fn of(message: &SourceMessage) -> Self {
        let text = || RepeatKey::of(b't', &[&message.payload]);
        let own = |id: &String| RepeatKey::of(b'b', &[id.as_bytes(), &message.payload]);
        let id = message.id.as_ref();
        match message.repeat {
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

    /// The [`ArrivalOutcome`] if the arrival is a repeat; `None`: it is new.
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
