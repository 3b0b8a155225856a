//! What the platform decides for every Agent: prices, and whether calls without a budget are made.

use std::collections::BTreeMap;

use crate::api::price::Price;

/// Prices by model, as the spec of an Agent names it.
pub type PriceTable = BTreeMap<String, Price>;

/// What the platform decides for every Agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// What models cost; wins over an Agent's own price.
    pub prices: PriceTable,
    /// An Agent that no AgentBudget selects and that names none makes no call.
    pub require_budget: bool,
    /// Whether an Agent's own price counts where the table has none.
    pub agent_prices: AgentPrices,
    /// An answer is clipped to what is left of a limit, but not below so many tokens.
    pub min_output_tokens: u32,
}

/// Whether `spec.model.price` counts for models that the table does not price.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, strum::EnumString, strum::Display)]
pub enum AgentPrices {
    /// It does.
    #[default]
    Allow,
    /// It does not: such a model has no price.
    Deny,
}

/// An answer of fewer tokens is seldom of use.
pub const MIN_OUTPUT_TOKENS: u32 = 256;

impl Default for Policy {
    fn default() -> Self {
        Self {
            prices: PriceTable::new(),
            require_budget: false,
            agent_prices: AgentPrices::Allow,
            min_output_tokens: MIN_OUTPUT_TOKENS,
        }
    }
}
