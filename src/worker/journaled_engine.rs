//! One step of a loop: the engine hears an input, what it records is committed, and only then is anything done.
//!
//! The one place that holds this order. Knows neither clock nor world: the driver brings both.

use std::sync::Arc;

use jiff::Timestamp;

use crate::engine::lifetime_counts::LifetimeCounts;
use crate::engine::machine::{Engine, LoopView};
use crate::engine::{EngineEffect, EngineInput, JournalRecord, Skill, StopCause};

use super::journal::{CommittedBatch, Journal, JournalError, JournalLine, JournalPage, SensorRecord};

/// An engine and its journal.
pub struct JournaledEngine<'a> {
    engine: Engine,
    journal: &'a mut Journal,
}

/// What came of an input.
#[must_use]
pub struct StepOutcome {
    /// What is to be done now, in order; all that it rests on is on disk.
    pub actions: Vec<EngineEffect>,
    /// What was committed, to be told before anything is done.
    pub lines: Vec<JournalLine>,
    /// An error is the journal's: after these actions nothing more can be done.
    pub result: Result<(), JournalError>,
}

impl<'a> JournaledEngine<'a> {
    /// `journal` is claimed, and `engine` new or restored from it.
    pub fn new(engine: Engine, journal: &'a mut Journal) -> Self {
        Self { engine, journal }
    }

    /// What the loop looks like from outside.
    #[must_use]
    pub fn view(&self) -> LoopView {
        self.engine.view()
    }

    /// At most so many lines of the journal after this one.
    pub fn lines_after(&self, seq: i64, most: usize) -> Result<JournalPage, JournalError> {
        self.journal.lines_after(seq, most)
    }

    /// The last so many messages of the model and its tools up to this turn, each cut after so many bytes.
    pub fn recent_messages(&self, turn: i64, most: (usize, usize)) -> Result<Vec<String>, JournalError> {
        self.journal.recent_messages(turn, most)
    }

    /// What a restart would go on from.
    #[cfg(test)]
    pub(super) fn snapshot(&self) -> crate::engine::machine::EngineSnapshot {
        self.engine.snapshot()
    }

    /// Goes on from counts that outlived a journal.
    pub fn adopt(&mut self, known: &LifetimeCounts) {
        self.engine.restore_counts(known);
    }

    /// Takes the newest instructions; used from the next call on.
    pub fn set_instructions(&mut self, text: String) {
        self.engine.set_instructions(text);
    }

    /// Takes the newest skills; used from the next call on.
    pub fn set_skills(&mut self, skills: Arc<[Skill]>) {
        self.engine.set_skills(skills);
    }

    /// Whether an input has an effect now.
    #[must_use]
    pub fn hears(&self) -> bool {
        self.engine.accepts_input()
    }

    /// The outcome of the question for a score, if there is one.
    #[must_use]
    pub fn scored(&self) -> Option<(&str, Option<u8>)> {
        self.engine.score_outcome()
    }

    /// Whether a question for a score is asked whose outcome nobody has taken.
    #[must_use]
    pub fn is_scoring(&self) -> bool {
        self.engine.is_scoring()
    }

    /// Hears one input and commits what the engine records of it.
    pub fn take(&mut self, now: Timestamp, input: EngineInput) -> StepOutcome {
        self.take_with(now, Some(input), None)
    }

    /// Hears what came of a Sensor, if anything, and commits what is to be remembered of it in the same transaction. Only
    /// for a loop that hears.
    pub fn sense(&mut self, now: Timestamp, input: Option<EngineInput>, kept: &SensorRecord) -> StepOutcome {
        self.take_with(now, input, Some(kept))
    }

    fn take_with(&mut self, now: Timestamp, input: Option<EngineInput>, kept: Option<&SensorRecord>) -> StepOutcome {
        let mut taken = StepOutcome {
            actions: Vec::new(),
            lines: Vec::new(),
            result: Ok(()),
        };
        taken.result = match self.step(now, (input, kept), &mut taken) {
            Ok(false) => Ok(()),
            Ok(true) => self.end_on_ballast(now, &mut taken),
            Err(error) => Err(error),
        };
        taken
    }

    /// True: it was committed on the ballast.
    fn step(
        &mut self,
        now: Timestamp,
        (input, kept): (Option<EngineInput>, Option<&SensorRecord>),
        taken: &mut StepOutcome,
    ) -> Result<bool, JournalError> {
        let mut records = Vec::new();
        let mut others = Vec::new();
        let effects = input.map(|input| self.engine.handle(now, input));
        for effect in effects.into_iter().flatten() {
            match effect {
                EngineEffect::Record(record) => records.push(record),
                EngineEffect::CallModel { .. }
                | EngineEffect::CancelCall { .. }
                | EngineEffect::RunTool(..)
                | EngineEffect::CancelTool(_)
                | EngineEffect::Acknowledge { .. }
                | EngineEffect::SetTimer(_)
                | EngineEffect::Report
                | EngineEffect::Stopped => others.push(effect),
            }
        }
        let CommittedBatch { mut lines, on_ballast } = self.commit(now, &records, kept)?;
        taken.lines.append(&mut lines);
        taken.actions.append(&mut others);
        Ok(on_ballast)
    }

    fn commit(
        &mut self,
        now: Timestamp,
        records: &[JournalRecord],
        kept: Option<&SensorRecord>,
    ) -> Result<CommittedBatch, JournalError> {
        // Without a record nothing has changed that a restart would miss; a fenced engine records nothing.
        if records.is_empty() && kept.is_none() {
            return Ok(CommittedBatch::default());
        }
        self.journal.commit(now, records, &self.engine.snapshot(), kept)
    }

    /// The volume is full and the last room is in use: the loop ends in order, without another call or run.
    fn end_on_ballast(&mut self, now: Timestamp, taken: &mut StepOutcome) -> Result<(), JournalError> {
        let stop = EngineInput::Stop {
            cause: StopCause::Drain,
        };
        let ended = self
            .step(now, (Some(stop), None), taken)
            .and_then(|_| self.step(now, (Some(EngineInput::DrainEnded), None), taken));
        taken
            .actions
            .retain(|action| !matches!(action, EngineEffect::CallModel { .. } | EngineEffect::RunTool(..)));
        ended.and_then(|_| Err(self.journal.full_error()))
    }
}
