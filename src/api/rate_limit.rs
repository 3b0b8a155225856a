//! `spec.guardrails.rateLimits`: how much of a resource a loop may use in any stretch of time.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A limit of one resource in a rolling window.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct RateLimit {
    /// What is limited.
    pub resource: Resource,
    /// How much of it in any `windowSeconds`, 1 to 1,000,000,000.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub amount: u32,
    /// Length of the window in seconds, 1 to 86,400. What was used leaves it at its end; with an
    /// amount above 60, up to a sixtieth of it later.
    #[schemars(range(min = 1, max = 86_400))]
    pub window_seconds: u32,
}

/// What a loop uses.
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
pub enum Resource {
    /// Model calls, each attempt for itself. Calls that a budget refuses were not made.
    LLMCalls,
    /// Tokens of answers: uncached input, cache writes and output, as the server reports them, else estimated high. A
    /// call begins while fewer than `amount` are in the window, so the last one may go beyond; a budget never does.
    LLMTokens,
    /// Tool runs with side effects (all but those of tools with effect `Read`), each from the moment it is sent; a repeat of
    /// one that a restart cut is no new one. The next one waits in its turn, whatever `loop.exhaustionPolicy` says.
    Actions,
}
