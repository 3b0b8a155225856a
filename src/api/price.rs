//! What a model costs, as people write it: US dollars per million tokens, decimal strings.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

/// Prices of one model in US dollars per million tokens, such as "3.00"; at most six decimals. Zero is a price.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Price {
    /// Input that came from no cache.
    pub input_per_million: String,
    /// Output, reasoning included.
    pub output_per_million: String,
    /// Input read from a cache; absent: as other input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_read_per_million: Option<String>,
    /// Input written to a cache for five minutes; absent: 1.25 times other input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_write_per_million: Option<String>,
    /// Input written to a cache for an hour; absent: twice other input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "cacheWrite1hPerMillion")]
    pub cache_write_1h_per_million: Option<String>,
    /// Prices of calls with a long input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub long_context: Option<LongContext>,
}

/// Prices of calls whose whole input is longer than a threshold; they hold for all tokens of such a call.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct LongContext {
    /// Input tokens, cached ones included, above which these prices hold.
    #[schemars(range(min = 1, max = 10_000_000))]
    pub above_input_tokens: i64,
    /// Input that came from no cache.
    pub input_per_million: String,
    /// Output, reasoning included.
    pub output_per_million: String,
    /// Input read from a cache; absent: as other input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_read_per_million: Option<String>,
    /// Input written to a cache for five minutes; absent: 1.25 times other input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_write_per_million: Option<String>,
    /// Input written to a cache for an hour; absent: twice other input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "cacheWrite1hPerMillion")]
    pub cache_write_1h_per_million: Option<String>,
}
