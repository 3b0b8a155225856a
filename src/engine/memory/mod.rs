//! The tool `memory`: notes of the agent that outlast its conversation.
//!
//! Owns when a call takes effect, and what of the notes a prompt shows. The engine runs such a call itself, in the order of the
//! calls and at once when the answer arrives, unless its result would wait behind those of too many others: the notes are part
//! of the snapshot, so the result of a call and its effect are in one commit, and a crash repeats or loses neither. A call is no
//! action: it changes nothing outside.
//!
//! A note that was written after untrusted content brings that content back when the model views it, and so does the list of
//! all titles. The state block therefore shows such a title only in a conversation that has untrusted content already.

pub mod notes;
pub mod tool;

use super::context::prompt_size;
use super::effects::EffectBuffer;
use super::loop_detection::ToolCallEnding;
use super::machine::Engine;
use super::message::{self, ToolCall};
use super::tools::batch::ToolBatch;
use super::tools::{admission, tool_line};
use super::{OutcomeKind, RecordKind};
use notes::{NoteLimits, NoteOperation, NoteRefusal, NoteResult};

/// Maximum number of bytes of the titles in a state block.
const MAX_LISTED_BYTES: usize = 2048;

impl Engine {
    pub(crate) fn is_memory_call(&self, wanted: &ToolCall) -> bool {
        self.settings.memory_bytes.is_some() && wanted.name == tool::NAME
    }

    /// Runs the calls of `memory` whose results do not wait behind too many others. Returns whether there were any.
    pub(crate) fn run_memory_calls(&mut self, out: &mut EffectBuffer) -> bool {
        let mut any = false;
        while let Some(place) = self.tool_batch().and_then(ToolBatch::next_memory_call) {
            self.run_memory_call(place, out);
            any = true;
        }
        any
    }

    fn run_memory_call(&mut self, place: usize, out: &mut EffectBuffer) {
        let (Some(id), Some(wanted)) = (self.run_id(place), self.wanted_call(place)) else {
            return;
        };
        let arguments = message::arguments(&wanted.arguments);
        let arguments = arguments.as_ref().map(admission::arguments_hash);
        let result = tool::parse(&wanted.arguments).and_then(|operation| self.apply_to_memory(operation));
        // To the loop detection every call is a look: rewriting a note is no progress.
        let (outcome, ending, text) = match result {
            Ok(NoteResult { text, untrusted }) => {
                if let Some(source) = untrusted {
                    let after = self.transcript.len().saturating_add(place);
                    self.state.trust.add(after, source, out.now);
                }
                (OutcomeKind::Ok, ToolCallEnding::Looked, text)
            }
            Err(refusal) => (OutcomeKind::Error, ToolCallEnding::Failed, tool::refused(&refusal)),
        };
        for (kind, outcome) in [(RecordKind::ToolIntent, None), (RecordKind::ToolOutcome, Some(outcome))] {
            out.record(tool_line(kind, id, "", |line| {
                line.tool = Some(tool::NAME.to_owned());
                line.arguments.clone_from(&arguments);
                line.outcome = outcome;
            }));
        }
        self.state.totals.count_run(false);
        if let Some(batch) = self.batch_mut() {
            batch.end(place, ending, text);
        }
    }

    fn apply_to_memory(&mut self, operation: NoteOperation) -> Result<NoteResult, NoteRefusal> {
        let Some(bytes) = self.settings.memory_bytes else {
            let fix = "the memory was switched off after you requested this: continue without it";
            return Err(NoteRefusal::new("operation", fix));
        };
        // A call beside the one that brings untrusted content in was requested without it.
        let joined = self.tool_batch().map_or(0, ToolBatch::joined);
        let requested = self.transcript.len().saturating_sub(joined);
        let shown = self.state.trust.untrusted_before(requested);
        let limits = NoteLimits {
            bytes,
            result_bytes: self.max_result_bytes(),
            untrusted: shown.map(|content| &*content.source),
        };
        self.state.memory.apply(operation, limits)
    }

    /// The titles of the notes, for the state block. In a small window they get a sixteenth of it.
    pub(crate) fn memory_block(&self) -> Option<String> {
        let limit = self.settings.memory_bytes?;
        let prompt = usize::try_from(prompt_size::prompt_limit(&self.settings)).unwrap_or(usize::MAX);
        let max_bytes = MAX_LISTED_BYTES.min(prompt / 4);
        let untrusted = self.state.trust.untrusted().is_some();
        self.state.memory.block(limit, max_bytes, untrusted)
    }
}
