//! Answers of tools, with what they cost.

use agentloop_toolbox_protocol::{BANDWIDTH_BYTES_META, DISK_WRITE_BYTES_META};
use rmcp::model::{CallToolResult, ContentBlock, JsonObject, MetaObject};
use serde_json::json;

/// What a call did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ToolAnswer {
    pub(crate) text: String,
    pub(crate) is_error: bool,
    pub(crate) disk_write_bytes: u64,
    pub(crate) bandwidth_bytes: u64,
}

impl ToolAnswer {
    pub(crate) fn text(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            ..Self::default()
        }
    }

    /// The call failed. The text states the cause and, if there is one, the fix.
    pub(crate) fn error(text: impl std::fmt::Display) -> Self {
        Self {
            text: text.to_string(),
            is_error: true,
            ..Self::default()
        }
    }

    pub(crate) fn wrote(self, disk_write_bytes: u64) -> Self {
        Self {
            disk_write_bytes,
            ..self
        }
    }

    pub(crate) fn sent(self, bandwidth_bytes: u64) -> Self {
        Self {
            bandwidth_bytes,
            ..self
        }
    }

    pub(crate) fn into_result(self) -> CallToolResult {
        let content = vec![ContentBlock::text(self.text)];
        let mut result = if self.is_error {
            CallToolResult::error(content)
        } else {
            CallToolResult::success(content)
        };
        let mut meta = JsonObject::new();
        meta.insert(DISK_WRITE_BYTES_META.into(), json!(self.disk_write_bytes));
        meta.insert(BANDWIDTH_BYTES_META.into(), json!(self.bandwidth_bytes));
        result.meta = Some(MetaObject::from(meta));
        result
    }
}
