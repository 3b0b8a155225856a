//! Collects the effects of one input, journal records first.

use std::sync::Arc;

use jiff::Timestamp;

use super::message::{FinishReason, Message, ModelAnswer};
use super::{CallId, CallPurpose, EngineEffect, JournalRecord, RecordDetail, RecordKind, RecordedUsage, ids};
use agentloop_api::usage_counts::GuardrailTrip;

/// The effects of one input, in the order to act on.
pub struct EffectBuffer {
    /// The time of the input.
    pub now: Timestamp,
    records: Vec<JournalRecord>,
    effects: Vec<EngineEffect>,
    stopped: bool,
}

/// A [`JournalRecord`] of `kind`, to be completed by the caller.
pub fn journal_line(kind: RecordKind, turn: i64, note: impl Into<String>) -> JournalRecord {
    JournalRecord {
        kind,
        member: ids::MAIN,
        turn,
        call: None,
        note: note.into(),
        detail: RecordDetail::None,
        tool: None,
        used: None,
        messages: Vec::new(),
        retract: 0,
        forget: 0..0,
        task: None,
        validation: None,
    }
}

/// The [`JournalRecord`] of a limit that was reached, with what is counted of it, if anything.
pub fn trip_line(turn: i64, trip: Option<GuardrailTrip>, note: impl Into<String>) -> JournalRecord {
    JournalRecord {
        detail: trip.map_or(RecordDetail::None, RecordDetail::Trip),
        ..journal_line(RecordKind::GuardrailTriggered, turn, note)
    }
}

/// A [`JournalRecord`] about a call.
pub fn call_line(
    kind: RecordKind,
    call: CallId,
    note: impl Into<String>,
    messages: Vec<Arc<Message>>,
) -> JournalRecord {
    JournalRecord {
        member: call.member,
        call: Some(call),
        messages,
        ..journal_line(kind, call.turn, note)
    }
}

/// The [`JournalRecord`] of an answered call.
pub fn answer_line(
    (call, purpose): (CallId, CallPurpose),
    answer: &ModelAnswer,
    note: impl Into<String>,
    messages: Vec<Arc<Message>>,
) -> JournalRecord {
    let used = RecordedUsage {
        purpose,
        tokens: answer.tokens,
        // Servers that only fill in the fields write zeros.
        input_and_output: answer
            .input_tokens
            .zip(answer.output_tokens.filter(|output| *output > 0)),
        cost: answer.cost,
    };
    let detail = match answer.finish {
        FinishReason::Refused => RecordDetail::UselessAnswer,
        FinishReason::Stop | FinishReason::Length | FinishReason::ToolCalls => RecordDetail::None,
    };
    JournalRecord {
        used: Some(used),
        detail,
        ..call_line(RecordKind::CallAnswered, call, note, messages)
    }
}

impl EffectBuffer {
    pub fn new(now: Timestamp) -> Self {
        Self {
            now,
            records: Vec::new(),
            effects: Vec::new(),
            stopped: false,
        }
    }

    /// The [`JournalRecord`]s so far.
    pub fn records(&self) -> &[JournalRecord] {
        &self.records
    }

    pub fn record(&mut self, record: JournalRecord) {
        self.records.push(record);
    }

    /// Appends messages to the transcript with the newest record, or with a record from `line` if there is none.
    pub fn attach(&mut self, mut messages: Vec<Arc<Message>>, line: impl FnOnce() -> JournalRecord) {
        if self.records.is_empty() {
            self.records.push(line());
        }
        if let Some(last) = self.records.last_mut() {
            last.messages.append(&mut messages);
        }
    }

    /// Adds any effect other than a record.
    pub fn push(&mut self, effect: EngineEffect) {
        self.effects.push(effect);
    }

    /// The loop has stopped: adds the last effect of all.
    pub fn stopped(&mut self) {
        self.stopped = true;
    }

    /// Drops the [`JournalRecord`]s: this pod must not write any more.
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
