//! Collects the effects of one input, journal lines first.

use std::sync::Arc;

use jiff::Timestamp;

use super::message::{Message, ModelAnswer};
use super::{CallId, CallPurpose, EngineEffect, JournalRecord, RecordKind, RecordedUsage};

/// The effects of one input.
pub struct EffectBuffer {
    /// The moment of the input.
    pub now: Timestamp,
    records: Vec<JournalRecord>,
    effects: Vec<EngineEffect>,
    stopped: bool,
}

/// A journal line of `kind`, to be completed by the caller.
pub fn journal_line(kind: RecordKind, turn: i64, note: impl Into<String>) -> JournalRecord {
    JournalRecord {
        kind,
        turn,
        call: None,
        note: note.into(),
        tool: None,
        used: None,
        messages: Vec::new(),
        retract: 0,
        forget: 0,
    }
}

/// A journal line about a call.
pub fn call_line(
    kind: RecordKind,
    call: CallId,
    note: impl Into<String>,
    messages: Vec<Arc<Message>>,
) -> JournalRecord {
    JournalRecord {
        call: Some(call),
        messages,
        ..journal_line(kind, call.turn, note)
    }
}

/// The journal line of a call that was answered.
pub fn answer_line(
    (call, purpose): (CallId, CallPurpose),
    answer: &ModelAnswer,
    note: impl Into<String>,
    messages: Vec<Arc<Message>>,
) -> JournalRecord {
    let used = RecordedUsage {
        purpose,
        tokens: answer.tokens,
        cost: answer.cost,
    };
    JournalRecord {
        used: Some(used),
        ..call_line(RecordKind::CallAnswered, call, note, messages)
    }
}

impl EffectBuffer {
    /// An empty one.
    pub fn new(now: Timestamp) -> Self {
        Self {
            now,
            records: Vec::new(),
            effects: Vec::new(),
            stopped: false,
        }
    }

    /// The journal lines so far.
    pub fn records(&self) -> &[JournalRecord] {
        &self.records
    }

    /// Adds a journal line.
    pub fn record(&mut self, record: JournalRecord) {
        self.records.push(record);
    }

    /// Lets messages join the transcript with the newest line; with one of its own where there is none.
    pub fn attach(&mut self, mut messages: Vec<Arc<Message>>, line: impl FnOnce() -> JournalRecord) {
        if self.records.is_empty() {
            self.records.push(line());
        }
        if let Some(last) = self.records.last_mut() {
            last.messages.append(&mut messages);
        }
    }

    /// Adds any other effect.
    pub fn push(&mut self, effect: EngineEffect) {
        self.effects.push(effect);
    }

    /// The loop has stopped: the last effect of all.
    pub fn stopped(&mut self) {
        self.stopped = true;
    }

    /// Drops the journal lines: this pod may write nothing any more.
    pub fn drop_records(&mut self) {
        self.records.clear();
    }

    /// All effects, in the order to act on.
    pub fn into_effects(self) -> Vec<EngineEffect> {
        let records = self.records.into_iter().map(EngineEffect::Record);
        let stopped = self.stopped.then_some(EngineEffect::Stopped);
        records.chain(self.effects).chain(stopped).collect()
    }
}
