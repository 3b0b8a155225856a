//! What a model costs, as people write it: US dollars per million tokens, decimal strings.

use kube::KubeSchema;
use kube::core::Rule;
use serde::{Deserialize, Serialize};

/// Prices of one model in US dollars per million tokens, such as "3.00"; at most six decimals. Zero is a price.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Price {
    /// Input that came from no cache.
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(validation = decimal("inputPerMillion"))]
    pub input_per_million: String,
    /// Output, reasoning included.
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(validation = decimal("outputPerMillion"))]
    pub output_per_million: String,
    /// Input read from a cache; absent: as other input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(validation = decimal("cacheReadPerMillion"))]
    pub cache_read_per_million: Option<String>,
    /// Input written to a cache for five minutes; absent: 1.25 times other input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(validation = decimal("cacheWritePerMillion"))]
    pub cache_write_per_million: Option<String>,
    /// Input written to a cache for an hour; absent: twice other input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "cacheWrite1hPerMillion")]
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(validation = decimal("cacheWrite1hPerMillion"))]
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
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(validation = decimal("longContext.inputPerMillion"))]
    pub input_per_million: String,
    /// Output, reasoning included.
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(validation = decimal("longContext.outputPerMillion"))]
    pub output_per_million: String,
    /// Input read from a cache; absent: as other input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(validation = decimal("longContext.cacheReadPerMillion"))]
    pub cache_read_per_million: Option<String>,
    /// Input written to a cache for five minutes; absent: 1.25 times other input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(validation = decimal("longContext.cacheWritePerMillion"))]
    pub cache_write_per_million: Option<String>,
    /// Input written to a cache for an hour; absent: twice other input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "cacheWrite1hPerMillion")]
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(validation = decimal("longContext.cacheWrite1hPerMillion"))]
    pub cache_write_1h_per_million: Option<String>,
}

/// The rule of one price.
fn decimal(field: &str) -> Rule {
    Rule::new(r"self.matches('^[0-9]{1,7}(\\.[0-9]{1,6})?$')").message(
        format!("spec.model.price.{field} must be US dollars per million tokens in quotes, with at most six decimals, such as '3.00'")
            .as_str(),
    )
}
