//! A server's usage report as disjoint kinds of tokens. What cannot be believed is unknown, never zero.

use serde_json::Value;

use super::dialect::Dialect;
use crate::ledger::bound::Bill;

/// More than this in one call is absurd, and would endanger exact sums.
const MAX_TOKENS: i64 = 1_000_000_000;

/// Reads the `usage` of an answer. `None` when a count is missing, negative, no whole number, or contradicts another.
pub fn read(dialect: Dialect, usage: &Value) -> Option<Bill> {
    match dialect {
        Dialect::Chat => of_chat(usage),
        Dialect::Messages => of_messages(usage),
    }
}

/// Of a chat completion: `prompt_tokens` includes cached ones, `completion_tokens` reasoning.
fn of_chat(usage: &Value) -> Option<Bill> {
    let prompt = count(usage.get("prompt_tokens")?)?;
    let output = count(usage.get("completion_tokens")?)?;
    let cache_read = detail(usage, "prompt_tokens_details", "cached_tokens")?;
    let reasoning = detail(usage, "completion_tokens_details", "reasoning_tokens")?;
    (cache_read <= prompt && reasoning <= output).then(|| Bill {
        input: prompt - cache_read,
        output,
        cache_read,
        reasoning,
        ..Bill::default()
    })
}

/// Of an Anthropic message: `input_tokens` excludes what was read from or written to a cache. What went to the cache
/// without a word of the time it stays there was for five minutes, which is the default.
fn of_messages(usage: &Value) -> Option<Bill> {
    let input = count(usage.get("input_tokens")?)?;
    let output = count(usage.get("output_tokens")?)?;
    let short = detail(usage, "cache_creation", "ephemeral_5m_input_tokens")?;
    let long = detail(usage, "cache_creation", "ephemeral_1h_input_tokens")?;
    let written = or(usage.get("cache_creation_input_tokens"), short + long)?;
    let reasoning = detail(usage, "output_tokens_details", "thinking_tokens")?;
    (short + long <= written && reasoning <= output && !has_unpriced(usage)).then_some(Bill {
        input,
        cache_read: or(usage.get("cache_read_input_tokens"), 0)?,
        cache_write: written - long,
        cache_write_1h: long,
        output,
        reasoning,
    })
}

/// Whether it names something that is billed beside the tokens above: tools run by the server, or more than one pass of
/// a model. Requests that ask for those are refused, so this is a server that does not do what it was asked.
fn has_unpriced(usage: &Value) -> bool {
    let tools = usage.get("server_tool_use").and_then(Value::as_object);
    let used = tools.is_some_and(|tools| tools.values().any(|uses| uses.as_i64() != Some(0) && !uses.is_null()));
    let passes = usage.get("iterations").and_then(Value::as_array);
    used || passes.is_some_and(|passes| passes.len() > 1)
}

/// A count, or `missing` where there is none. `None`: it is there and cannot be believed.
fn or(value: Option<&Value>, missing: i64) -> Option<i64> {
    match value {
        None | Some(Value::Null) => Some(missing),
        Some(value) => count(value),
    }
}

fn count(value: &Value) -> Option<i64> {
    value.as_i64().filter(|count| (0..=MAX_TOKENS).contains(count))
}

/// A detail that a server does not give is none of that kind.
fn detail(usage: &Value, group: &str, name: &str) -> Option<i64> {
    or(usage.get(group).and_then(|group| group.get(name)), 0)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    #[test]
    fn kinds_are_disjoint_and_reasoning_is_a_part_of_the_output() {
        let usage = json!({
            "prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120,
            "prompt_tokens_details": {"cached_tokens": 90}, "completion_tokens_details": {"reasoning_tokens": 15},
        });
        let expected = Bill {
            input: 10,
            output: 20,
            cache_read: 90,
            reasoning: 15,
            ..Bill::default()
        };
        assert_eq!(of_chat(&usage), Some(expected));
    }

    #[rstest]
    #[case(json!({"prompt_tokens": 3, "completion_tokens": 4}))]
    #[case(json!({"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": null}))]
    #[case(json!({"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": null}}))]
    fn details_may_be_missing(#[case] usage: Value) {
        assert_eq!(
            of_chat(&usage),
            Some(Bill {
                input: 3,
                output: 4,
                ..Bill::default()
            })
        );
    }

    #[rstest]
    #[case(json!(null))]
    #[case(json!({}))]
    #[case(json!({"prompt_tokens": 3}))]
    #[case(json!({"completion_tokens": 3}))]
    #[case(json!({"prompt_tokens": -1, "completion_tokens": 4}))]
    #[case(json!({"prompt_tokens": 1.5, "completion_tokens": 4}))]
    #[case(json!({"prompt_tokens": "3", "completion_tokens": 4}))]
    #[case(json!({"prompt_tokens": 3, "completion_tokens": 1_000_000_001}))]
    #[case(json!({"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 4}}))]
    #[case(json!({"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": -1}}))]
    #[case(json!({"prompt_tokens": 3, "completion_tokens": 4, "completion_tokens_details": {"reasoning_tokens": 5}}))]
    fn what_cannot_be_believed_is_unknown(#[case] usage: Value) {
        assert_eq!(of_chat(&usage), None);
    }

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
        let bill = read(Dialect::Messages, &usage).unwrap();
        let kinds = [
            bill.input,
            bill.cache_read,
            bill.cache_write,
            bill.cache_write_1h,
            bill.output,
        ];
        assert_eq!(kinds, expected);
        assert_eq!(read(Dialect::Chat, &usage), None);
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
    fn what_cannot_be_believed_of_a_message_is_unknown(#[case] usage: Value) {
        assert_eq!(read(Dialect::Messages, &usage), None);
    }
}
