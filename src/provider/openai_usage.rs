//! What the usage reports of OpenAI's two wire formats have in common: the same counts under other names.

use serde_json::Value;

use super::usage::{count, detail, has_unpriced, or};
use agentloop_ledger::bound::CallBill;

/// The names of the counts in a report.
pub(super) struct UsageNames {
    /// All input, with what was read from and written to a cache.
    pub(super) input: &'static str,
    pub(super) output: &'static str,
    pub(super) input_details: &'static str,
    pub(super) output_details: &'static str,
}

impl UsageNames {
    /// The usage of an answer. Reasoning is a part of the named output, or is in addition to it, as xAI and gateways to
    /// Gemini count; `total_tokens` shows which. If the total is more than its named parts, the rest counts as output,
    /// the most expensive kind. `cache_write`: the part of the input that was written to a cache.
    pub(super) fn bill(&self, usage: &Value, cache_write: i64) -> Option<CallBill> {
        let all_input = count(usage.get(self.input)?)?;
        let named_output = count(usage.get(self.output)?)?;
        let total = or(usage.get("total_tokens"), all_input + named_output)?;
        let cache_read = detail(usage, self.input_details, "cached_tokens")?;
        let reasoning = detail(usage, self.output_details, "reasoning_tokens")?;
        let output = total.checked_sub(all_input)?;
        let adds_up = output >= named_output && reasoning <= output && cache_read + cache_write <= all_input;
        (adds_up && !searches(usage)).then_some(CallBill {
            input: all_input - cache_read - cache_write,
            output,
            cache_read,
            cache_write,
            reasoning,
            ..CallBill::default()
        })
    }

    /// Counts the tokens of a usage report. Cache reads are excluded.
    pub(super) fn tokens(&self, usage: &Value) -> Option<u64> {
        let count = |name: &str| usage.get(name).and_then(Value::as_u64);
        let details = usage.get(self.input_details);
        let cached = details.and_then(|details| details.get("cached_tokens")?.as_u64());
        let input = count(self.input)?.checked_sub(cached.unwrap_or(0))?;
        input.checked_add(count(self.output)?)
    }

    /// Counts all input tokens of a usage report, cached or not. Zero is treated as unknown.
    pub(super) fn input_tokens(&self, usage: &Value) -> Option<u64> {
        usage.get(self.input)?.as_u64().filter(|tokens| *tokens > 0)
    }
}

/// Whether the usage includes searches of the server, which are billed in addition to tokens.
fn searches(usage: &Value) -> bool {
    const NAMES: [&str; 3] = ["citation_tokens", "num_search_queries", "num_sources_used"];
    NAMES.iter().any(|name| or(usage.get(*name), 0) != Some(0)) || has_unpriced(usage)
}
