//! Usage reports of Anthropic messages.

use serde_json::Value;

use crate::usage::{billed_output, count, detail, has_unpriced, or};
use agentloop_ledger::bound::CallBill;

/// The usage of an Anthropic message: `input_tokens` excludes cache reads and writes. A cache write without a stated
/// lifetime is one of five minutes, the default.
pub(crate) fn bill(usage: &Value) -> Option<CallBill> {
    let input = count(usage.get("input_tokens")?)?;
    let output = count(usage.get("output_tokens")?)?;
    let short = detail(usage, "cache_creation", "ephemeral_5m_input_tokens")?;
    let long = detail(usage, "cache_creation", "ephemeral_1h_input_tokens")?;
    let written = or(usage.get("cache_creation_input_tokens"), short + long)?;
    let reasoning = detail(usage, "output_tokens_details", "thinking_tokens")?;
    (short + long <= written && reasoning <= output && !has_unpriced(usage)).then_some(CallBill {
        input,
        cache_read: or(usage.get("cache_read_input_tokens"), 0)?,
        cache_write: written - long,
        cache_write_1h: long,
        output,
        reasoning,
    })
}

/// Counts the tokens of a usage report. Cache reads are excluded, cache writes included.
pub(super) fn tokens(usage: &Value) -> Option<u64> {
    let count = |name: &str| usage.get(name).and_then(Value::as_u64);
    let written = count("cache_creation_input_tokens").unwrap_or(0);
    let input = count("input_tokens")?.checked_add(written)?;
    input.checked_add(count("output_tokens")?)
}

/// Counts all input tokens of a usage report, cached or not. Zero is treated as unknown.
pub(super) fn input_tokens(usage: &Value) -> Option<u64> {
    let cache = ["cache_creation_input_tokens", "cache_read_input_tokens"];
    let cache = cache.map(|name| usage.get(name).and_then(Value::as_u64).unwrap_or(0));
    let plain = usage.get("input_tokens")?.as_u64()?;
    let all = cache.into_iter().try_fold(plain, u64::checked_add)?;
    (all > 0).then_some(all)
}

/// The output tokens of a usage report, as they are billed.
pub(super) fn output_tokens(usage: &Value) -> Option<u64> {
    bill(usage).and_then(billed_output)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;
    use crate::openai_chat;

    #[rstest]
    #[case(json!({"input_tokens": 3, "output_tokens": 4}), [3, 0, 0, 0, 4])]
    #[case(
        json!({"input_tokens": 3, "output_tokens": 4, "cache_creation_input_tokens": null, "cache_creation": null,
            "cache_read_input_tokens": null, "server_tool_use": null, "service_tier": "standard"}),
        [3, 0, 0, 0, 4]
    )]
    #[case(
        json!({"input_tokens": 3, "output_tokens": 4, "cache_creation_input_tokens": 20, "cache_read_input_tokens": 500}),
        [3, 500, 20, 0, 4]
    )]
    #[case(
        json!({"input_tokens": 3, "output_tokens": 4, "cache_creation_input_tokens": 30, "cache_read_input_tokens": 5,
            "cache_creation": {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 20},
            "server_tool_use": {"web_search_requests": 0}, "iterations": [{"type": "message"}]}),
        [3, 5, 10, 20, 4]
    )]
    #[case(
        json!({"input_tokens": 3, "output_tokens": 4,
            "cache_creation": {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 20}}),
        [3, 0, 10, 20, 4]
    )]
    fn cached_input_is_beside_the_input_of_a_message(#[case] usage: Value, #[case] expected: [i64; 5]) {
        let bill = super::bill(&usage).unwrap();
        let kinds = [
            bill.input,
            bill.cache_read,
            bill.cache_write,
            bill.cache_write_1h,
            bill.output,
        ];
        assert_eq!(kinds, expected);
        assert_eq!(openai_chat::usage::bill(&usage), None);
    }

    #[rstest]
    #[case(json!({"input_tokens": 3}))]
    #[case(json!({"output_tokens": 3}))]
    #[case(json!({"input_tokens": null, "output_tokens": 3}))]
    #[case(json!({"input_tokens": -3, "output_tokens": 3}))]
    #[case(json!({"input_tokens": 3, "output_tokens": 1_000_000_001}))]
    #[case(json!({"input_tokens": 3, "output_tokens": 4, "cache_read_input_tokens": "5"}))]
    #[case(json!({"input_tokens": 3, "output_tokens": 4, "cache_read_input_tokens": -5}))]
    #[case(json!({"input_tokens": 3, "output_tokens": 4, "cache_creation_input_tokens": 1.5}))]
    #[case(json!({"input_tokens": 3, "output_tokens": 4, "cache_creation_input_tokens": 29,
        "cache_creation": {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 20}}))]
    #[case(json!({"input_tokens": 3, "output_tokens": 4, "output_tokens_details": {"thinking_tokens": 5}}))]
    #[case(json!({"input_tokens": 3, "output_tokens": 4, "server_tool_use": {"web_search_requests": 1}}))]
    #[case(json!({"input_tokens": 3, "output_tokens": 4, "iterations": [{"type": "compaction"}, {"type": "message"}]}))]
    #[case(json!({"prompt_tokens": 3, "completion_tokens": 4}))]
    fn implausible_usage_of_a_message_is_unknown(#[case] usage: Value) {
        assert_eq!(bill(&usage), None);
    }

    #[test]
    fn tokens_are_all_that_were_not_read_from_a_cache() {
        let usage = json!({"input_tokens": 3, "output_tokens": 4, "cache_creation_input_tokens": 20, "cache_read_input_tokens": 500});
        assert_eq!(tokens(&usage), Some(27));
        assert_eq!(input_tokens(&usage), Some(523));
        assert_eq!(
            tokens(&json!({"input_tokens": 3, "output_tokens": 4, "cache_creation_input_tokens": null})),
            Some(7)
        );
        assert_eq!(tokens(&json!({"input_tokens": 3})), None);
    }

    #[test]
    fn an_input_of_nothing_is_unknown_and_one_token_from_a_cache_is_not() {
        assert_eq!(
            input_tokens(&json!({"input_tokens": 0, "cache_read_input_tokens": 0})),
            None
        );
        assert_eq!(
            input_tokens(&json!({"input_tokens": 0, "cache_read_input_tokens": 1})),
            Some(1)
        );
    }
}
