//! A script as written in YAML, before its bounds are checked.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::script::{AtEnd, TurnUsage};

#[derive(Deserialize, Debug)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct ScriptFile {
    #[serde(default)]
    pub at_end: AtEnd,
    pub turns: Vec<TurnFile>,
}

#[derive(Deserialize, Debug, Default)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(super) struct TurnFile {
    pub text: Option<String>,
    pub tool_calls: Vec<ToolCallFile>,
    pub r#yield: Option<YieldFile>,
    pub usage: Option<TurnUsage>,
    pub fail: Option<FailFile>,
    pub delay_milliseconds: u64,
}

#[derive(Deserialize, Debug)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct ToolCallFile {
    pub name: String,
    #[serde(default)]
    pub arguments: Map<String, Value>,
}

/// Short for a call of the tool `yield`; its fields are the arguments of that tool.
#[derive(Deserialize, Debug, Default)]
#[serde(default, deny_unknown_fields)]
pub(super) struct YieldFile {
    pub mode: Option<YieldMode>,
    pub sleep: Option<u64>,
    pub wake_early_if: Vec<String>,
    pub reason: Option<String>,
}

/// The arguments of a yield.
#[derive(Deserialize, Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub(super) enum YieldMode {
    Continue,
    Sleep,
    Shutdown,
}

#[derive(Deserialize, Debug)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct FailFile {
    pub status: u16,
    #[serde(default)]
    pub retry_after_seconds: Option<u64>,
}

impl YieldFile {
    /// The arguments of the tool call that this abbreviates. A sleep without a mode has mode `sleep`.
    pub(super) fn arguments(self) -> Map<String, Value> {
        let mode = self.mode.or_else(|| self.sleep.map(|_| YieldMode::Sleep));
        let mut arguments = Map::new();
        if let Some(mode) = mode {
            arguments.insert("mode".into(), <&'static str>::from(mode).into());
        }
        if let Some(sleep) = self.sleep {
            arguments.insert("sleep".into(), sleep.into());
        }
        if !self.wake_early_if.is_empty() {
            arguments.insert("wake_early_if".into(), self.wake_early_if.into());
        }
        if let Some(reason) = self.reason {
            arguments.insert("reason".into(), reason.into());
        }
        arguments
    }
}
