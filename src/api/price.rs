//! Prices of a model as users write them: US dollars per million tokens, decimal strings.

use kube::KubeSchema;
use kube::core::Rule;
use serde::{Deserialize, Serialize};

/// Prices of one model in US dollars per million tokens, decimal strings with at most six decimals, such as "3.00".
/// Zero is a valid price.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ModelPrice {
    /// Uncached input.
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(validation = decimal("inputPerMillion"))]
    pub input_per_million: String,
    /// Output, including reasoning.
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(validation = decimal("outputPerMillion"))]
    pub output_per_million: String,
    /// Input read from a cache. Defaults to the price of uncached input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(validation = decimal("cacheReadPerMillion"))]
    pub cache_read_per_million: Option<String>,
    /// Input written to a cache for five minutes. Defaults to 1.25 times the price of uncached input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(validation = decimal("cacheWritePerMillion"))]
    pub cache_write_per_million: Option<String>,
    /// Input written to a cache for one hour. Defaults to twice the price of uncached input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "cacheWrite1hPerMillion")]
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(validation = decimal("cacheWrite1hPerMillion"))]
    pub cache_write_1h_per_million: Option<String>,
    /// Prices of calls with a long input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub long_context: Option<LongContextPrice>,
}

/// Prices of calls whose total input exceeds a threshold. They apply to all tokens of such a call.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct LongContextPrice {
    /// Number of input tokens, including cached ones, above which these prices apply.
    #[schemars(range(min = 1, max = 10_000_000))]
    pub above_input_tokens: i64,
    /// Uncached input.
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(validation = decimal("longContext.inputPerMillion"))]
    pub input_per_million: String,
    /// Output, including reasoning.
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(validation = decimal("longContext.outputPerMillion"))]
    pub output_per_million: String,
    /// Input read from a cache. Defaults to the price of uncached input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(validation = decimal("longContext.cacheReadPerMillion"))]
    pub cache_read_per_million: Option<String>,
    /// Input written to a cache for five minutes. Defaults to 1.25 times the price of uncached input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(validation = decimal("longContext.cacheWritePerMillion"))]
    pub cache_write_per_million: Option<String>,
    /// Input written to a cache for one hour. Defaults to twice the price of uncached input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "cacheWrite1hPerMillion")]
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(validation = decimal("longContext.cacheWrite1hPerMillion"))]
    pub cache_write_1h_per_million: Option<String>,
}

/// Validation rule of one price.
fn decimal(field: &str) -> Rule {
    Rule::new(r"self.matches('^[0-9]{1,7}(\\.[0-9]{1,6})?$')").message(
        format!("spec.model.price.{field} must be US dollars per million tokens in quotes, with at most six decimals, such as '3.00'")
            .as_str(),
    )
}
