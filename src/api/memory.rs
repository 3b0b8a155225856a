//! `spec.memory`: notes that an agent keeps beyond its conversation.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The tool `memory`, with which the agent keeps notes that outlast summaries, tasks, restarts, pods and an edit of
/// `mode`. They are part of the journal. Each call shows the model their titles and sizes, and `memory` reads, writes
/// and deletes them. They are the Agent's, not a task's: what is written for one task can be read for another.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct MemorySpec {
    /// Maximum size of all notes together in bytes, titles included, 1,024 to 65,536. There are at most 64 notes. Lowering
    /// it removes nothing: while the notes are larger, only calls that do not enlarge them are accepted. Defaults to
    /// 16,384.
    #[schemars(range(min = 1024, max = 65_536))]
    pub max_bytes: u32,
}

impl Default for MemorySpec {
    fn default() -> Self {
        Self { max_bytes: 16_384 }
    }
}

impl MemorySpec {
    /// [`Self::max_bytes`] as a length.
    #[must_use]
    pub fn max_bytes(&self) -> usize {
        usize::try_from(self.max_bytes).unwrap_or(usize::MAX)
    }
}
