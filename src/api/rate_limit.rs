//! `spec.guardrails.rateLimits`: how much of a resource a loop may use in a rolling window.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A limit of one resource in a rolling window.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct RateLimit {
    /// The limited resource: `LLMCalls`, `LLMTokens`, `Actions`, `DiskWriteBytes` or `BandwidthBytes`.
    pub resource: LimitedResource,
    /// Maximum amount in any `windowSeconds`, 1 to 1,000,000,000,000.
    #[schemars(range(min = 1, max = 1_000_000_000_000_i64))]
    pub amount: u64,
    /// Length of the window in seconds, 1 to 86,400. With an amount above 60, usage may leave the window up to a
    /// sixtieth of its length late.
    #[schemars(range(min = 1, max = 86_400))]
    pub window_seconds: u32,
}

/// Resource that a loop uses.
#[derive(
    Serialize,
    Deserialize,
    JsonSchema,
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    strum::AsRefStr,
    strum::EnumString,
    strum::Display,
)]
pub enum LimitedResource {
    /// Model calls; each attempt counts. Calls refused by a budget do not count.
    LLMCalls,
    /// Tokens of answered calls: uncached input, cache writes and output, as reported by the server, or else estimated
    /// conservatively. A call starts while fewer than `amount` are in the window, so that the last one may exceed it; a
    /// budget is never exceeded.
    LLMTokens,
    /// Tool runs with an effect other than `Read`, counted when they are sent; the repetition of one that a restart
    /// interrupted does not count again. The next one waits within its turn, regardless of `loop.exhaustionPolicy`.
    Actions,
    /// Bytes that built-in tools wrote to disk, counted when a call ends. The next tool run with an effect other than
    /// `Read` starts while fewer than `amount` are in the window, so that the last one may exceed it. Writes to a
    /// `tmpfs`, and those of tool servers of the spec, are not measured.
    DiskWriteBytes,
    /// Bytes that the built-in tool `http_request` sent, without TLS, counted as `DiskWriteBytes`. What commands of
    /// `shell` send is not measured.
    BandwidthBytes,
}

impl LimitedResource {
    /// Whether tool runs use it; model calls use the others.
    #[must_use]
    pub fn is_of_tools(self) -> bool {
        match self {
            Self::LLMCalls | Self::LLMTokens => false,
            Self::Actions | Self::DiskWriteBytes | Self::BandwidthBytes => true,
        }
    }
}
