//! One step of a loop: the engine handles an input, its records are committed, and only then are its effects returned.
//!
//! The only place that enforces this order. Has no clock and no I/O but the journal: the driver provides both.

use std::sync::Arc;

use jiff::Timestamp;

use crate::engine::machine::{Engine, LoopView};
use crate::engine::tasks::TaskOrigin;
use crate::engine::tool::ToolRunId;
use crate::engine::{EngineEffect, EngineInput, JournalRecord, Skill, StopCause};
use crate::link::history::HistoryAck;

use super::journal::{
    CommittedBatch, Journal, JournalError, JournalLine, JournalPage, KnownTask, SensorRecord, UploadBatch,
    WaitingResponse,
};

pub struct JournaledEngine<'a> {
    engine: Engine,
    journal: &'a mut Journal,
}

#[must_use]
pub struct StepOutcome {
    /// Effects to carry out now, in order. Every [`JournalRecord`] that they depend on is on disk.
    pub actions: Vec<EngineEffect>,
    /// The committed [`JournalLine`]s, to be logged before any action is carried out.
    pub lines: Vec<JournalLine>,
    /// An error is the journal's. The actions are still valid and are carried out, but no further step is possible.
    pub result: Result<(), JournalError>,
}

impl<'a> JournaledEngine<'a> {
    /// `journal` must be claimed, and `engine` new or restored from it.
    pub fn new(engine: Engine, journal: &'a mut Journal) -> Self {
        Self { engine, journal }
    }

    #[must_use]
    pub fn view(&self) -> LoopView {
        self.engine.view()
    }

    /// Returns at most `max` lines of the [`Journal`] after line `seq`.
    pub fn lines_after(&self, seq: i64, max: usize) -> Result<JournalPage, JournalError> {
        self.journal.lines_after(seq, max)
    }

    /// Where the steps are committed.
    #[must_use]
    pub fn journal(&self) -> &Journal {
        self.journal
    }

    /// Returns the last messages of the model and its tools up to this turn. `max`: their number, and the bytes of
    /// each.
    pub fn recent_messages(&self, turn: i64, max: (usize, usize)) -> Result<Vec<String>, JournalError> {
        self.journal.recent_messages(turn, max)
    }

    /// Returns the call behind a tool run, truncated to `bytes`.
    pub fn requested_call(&self, run: ToolRunId, bytes: usize) -> Result<Option<String>, JournalError> {
        self.journal.requested_call(run, bytes)
    }

    /// Whether the loop takes input.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.engine.accepts_input()
    }

    /// When the loop has had no task for so long that its pod is deleted; `None`: not as it is.
    #[must_use]
    pub fn scale_down_due(&self) -> Option<Timestamp> {
        self.engine.scale_down_due()
    }

    /// Whether a task of this origin would be accepted now.
    #[must_use]
    pub fn accepts_task_of(&self, origin: &TaskOrigin) -> bool {
        self.engine.accepts_task_of(origin)
    }

    /// Returns the id of the task under way, if a user requested it.
    #[must_use]
    pub fn requested_task(&self) -> Option<&str> {
        self.engine.requested_task()
    }

    /// Returns the task with this id; `None`: it is not known.
    pub fn find_task(&self, id: &str) -> Result<Option<KnownTask>, JournalError> {
        self.journal.find_task(id)
    }

    /// Returns the response to a task as JSON, with its result shortened to about `bytes` bytes; `None`: it is no longer
    /// kept.
    pub fn task_response(&self, id: &str, bytes: usize) -> Result<Option<String>, JournalError> {
        self.journal.task_response(id, bytes)
    }

    /// Returns the number of the newest line.
    pub fn last_line(&self) -> Result<i64, JournalError> {
        Ok(self.journal.lines_after(0, 0)?.newest)
    }

    /// Returns the state that a restart would continue from.
    #[cfg(test)]
    pub(super) fn snapshot(&self) -> crate::engine::machine::EngineSnapshot {
        self.engine.snapshot()
    }

    /// Lets the journal grow by `more` pages.
    #[cfg(test)]
    pub(super) fn limit_pages(&self, more: i64) {
        self.journal.limit_pages(more);
    }

    /// Takes effect with the next call.
    pub fn set_instructions(&mut self, text: String) {
        self.engine.set_instructions(text);
    }

    /// Takes effect with the next call.
    pub fn set_skills(&mut self, skills: Arc<[Skill]>) {
        self.engine.set_skills(skills);
    }

    /// Whether an event of the Sensor of this name would have an effect now.
    #[must_use]
    pub fn accepts_events_of(&self, sensor: &str) -> bool {
        self.engine.accepts_events_of(sensor)
    }

    /// Whether an event of a Sensor would have an effect now of which no task waits.
    #[must_use]
    pub fn accepts_events_beyond(&self) -> bool {
        self.engine.accepts_events_beyond()
    }

    /// Returns the oldest response to a task that has not been delivered.
    pub fn next_response(&self) -> Result<Option<WaitingResponse>, JournalError> {
        self.journal.next_response()
    }

    /// Returns how many responses have not been delivered.
    pub fn count_responses(&self) -> Result<usize, JournalError> {
        self.journal.count_responses()
    }

    /// Records that a response was delivered.
    pub fn response_delivered(&self, seq: i64) -> Result<(), JournalError> {
        self.journal.response_delivered(seq)
    }

    /// Returns the oldest changes of the history that have not been acknowledged, and records that they are sent.
    pub fn history_batch(&mut self) -> Result<Option<UploadBatch>, JournalError> {
        self.journal.history_batch()
    }

    /// Records which changes of the history are stored.
    pub fn history_stored(&mut self, ack: HistoryAck) -> Result<(), JournalError> {
        self.journal.history_stored(ack)
    }

    /// Returns the outcome of the last request for a score, if there is one.
    #[must_use]
    pub fn scored(&self) -> Option<(&str, Option<u8>)> {
        self.engine.score_outcome()
    }

    /// Whether a score is requested and its outcome has not been taken yet.
    #[must_use]
    pub fn is_scoring(&self) -> bool {
        self.engine.is_scoring()
    }

    /// Handles one input and commits its [`JournalRecord`]s.
    pub fn take(&mut self, now: Timestamp, input: EngineInput) -> StepOutcome {
        self.take_with(now, Some(input), None)
    }

    /// Handles the effect of a Sensor event, if any, and commits the Sensor's record in the same transaction. Call it
    /// only while [`Self::is_live`] is true, and with an effect while [`Self::accepts_events_of`] is.
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

    /// Returns true if the batch was committed on the ballast.
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
        // If the commit fails, the engine is ahead of the journal and this step's effects are dropped. The driver then
        // ends the process, and the next one restores the engine from the last committed snapshot.
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
        // Without a record, nothing has changed that a restart would miss. A fenced engine records nothing.
        if records.is_empty() && kept.is_none() {
            return Ok(CommittedBatch::default());
        }
        self.journal.commit(now, records, &self.engine.snapshot(), kept)
    }

    /// Ends the loop in order on a full volume, whose reserve is now in use: no further call and no further tool run.
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
