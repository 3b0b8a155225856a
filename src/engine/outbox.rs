//! Collects the effects of one input, journal lines first.

use std::sync::Arc;

use jiff::Timestamp;

use super::message::{Answer, Message};
use super::{CallId, Effect, Purpose, Record, RecordKind, Used};

/// The effects of one input.
pub struct Outbox {
    /// The moment of the input.
    pub now: Timestamp,
    records: Vec<Record>,
    effects: Vec<Effect>,
    stopped: bool,
}

/// A journal line of `kind`, to be completed by the caller.
pub fn line(kind: RecordKind, turn: i64, note: impl Into<String>) -> Record {
    Record {
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
pub fn call_line(kind: RecordKind, call: CallId, note: impl Into<String>, messages: Vec<Arc<Message>>) -> Record {
    Record {
        call: Some(call),
        messages,
        ..line(kind, call.turn, note)
    }
}

/// The journal line of a call that was answered.
pub fn answer_line(
    (call, purpose): (CallId, Purpose),
    answer: &Answer,
    note: impl Into<String>,
    messages: Vec<Arc<Message>>,
) -> Record {
    let used = Used {
        purpose,
        tokens: answer.tokens,
        cost: answer.cost,
    };
    Record {
        used: Some(used),
        ..call_line(RecordKind::CallAnswered, call, note, messages)
    }
}

impl Outbox {
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
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// Adds a journal line.
    pub fn record(&mut self, record: Record) {
        self.records.push(record);
    }

    /// Lets messages join the transcript with the newest line; with one of its own where there is none.
    pub fn attach(&mut self, mut messages: Vec<Arc<Message>>, line: impl FnOnce() -> Record) {
        if self.records.is_empty() {
            self.records.push(line());
        }
        if let Some(last) = self.records.last_mut() {
            last.messages.append(&mut messages);
        }
    }

    /// Adds any other effect.
    pub fn push(&mut self, effect: Effect) {
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
    pub fn into_effects(self) -> Vec<Effect> {
        let records = self.records.into_iter().map(Effect::Record);
        let stopped = self.stopped.then_some(Effect::Stopped);
        records.chain(self.effects).chain(stopped).collect()
    }
}
