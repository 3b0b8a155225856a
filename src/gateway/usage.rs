//! A server's usage report as disjoint kinds of tokens. What cannot be believed is unknown, never zero.

use serde_json::Value;

use super::dialect::ProviderDialect;
use crate::ledger::bound::CallBill;

/// More than this in one call is absurd, and would endanger exact sums.
const MAX_TOKENS: i64 = 1_000_000_000;

/// Reads the `usage` of an answer. `None` when a count is missing, negative, no whole number, or contradicts another.
pub fn read(dialect: ProviderDialect, usage: &Value) -> Option<CallBill> {
    match dialect {
        ProviderDialect::Chat => of_chat(usage),
        ProviderDialect::Messages => of_messages(usage),
    }
}

/// The same of a server, which cannot have used nothing: no request is empty, and content takes output. Servers that
/// only fill the field in write zeros.
pub fn read_beside(content: bool, dialect: ProviderDialect, usage: &Value) -> Option<CallBill> {
    let bill = read(dialect, usage)?;
    let is_stub = bill.all_input() == Some(0) || (content && bill.output == 0);
    (!is_stub).then_some(bill)
}

/// Of a chat completion: `prompt_tokens` includes what was read from or written to a cache. Reasoning is a part of
/// `completion_tokens`, or beside it, as xAI and gateways to Gemini count: `total_tokens` tells. Of a total that is more
/// than its named parts the rest is output, the dearest that it can be.
fn of_chat(usage: &Value) -> Option<CallBill> {
    let prompt = count(usage.get("prompt_tokens")?)?;
    let completion = count(usage.get("completion_tokens")?)?;
    let total = or(usage.get("total_tokens"), prompt + completion)?;
    let cache_read = detail(usage, "prompt_tokens_details", "cached_tokens")?;
    let reasoning = detail(usage, "completion_tokens_details", "reasoning_tokens")?;
    // LiteLLM, OpenRouter; one of them may be there twice under both names.
    let written = [
        or(usage.get("cache_creation_input_tokens"), 0)?,
        detail(usage, "prompt_tokens_details", "cache_write_tokens")?,
        detail(usage, "prompt_tokens_details", "cache_creation_tokens")?,
    ];
    let cache_write = written.into_iter().fold(0, i64::max);
    let output = total.checked_sub(prompt)?;
    let adds_up = output >= completion && reasoning <= output && cache_read + cache_write <= prompt;
    (adds_up && !searches(usage)).then_some(CallBill {
        input: prompt - cache_read - cache_write,
        output,
        cache_read,
        cache_write,
        reasoning,
        ..CallBill::default()
    })
}

/// Whether it names searches that the server made, which are billed beside tokens.
fn searches(usage: &Value) -> bool {
    const NAMES: [&str; 3] = ["citation_tokens", "num_search_queries", "num_sources_used"];
    NAMES.iter().any(|name| or(usage.get(*name), 0) != Some(0)) || has_unpriced(usage)
}

/// Of an Anthropic message: `input_tokens` excludes what was read from or written to a cache. What went to the cache
/// without a word of the time it stays there was for five minutes, which is the default.
fn of_messages(usage: &Value) -> Option<CallBill> {
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
        let expected = CallBill {
            input: 10,
            output: 20,
            cache_read: 90,
            reasoning: 15,
            ..CallBill::default()
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
            Some(CallBill {
                input: 3,
                output: 4,
                ..CallBill::default()
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
    #[case(json!({"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 6}))]
    #[case(json!({"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": "7"}))]
    #[case(json!({"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "completion_tokens_details": {"reasoning_tokens": 5}}))]
    #[case(json!({"prompt_tokens": 3, "completion_tokens": 4, "cache_creation_input_tokens": 4}))]
    #[case(json!({"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 2}}))]
    #[case(json!({"prompt_tokens": 3, "completion_tokens": 4, "num_search_queries": 1}))]
    #[case(json!({"prompt_tokens": 3, "completion_tokens": 4, "num_sources_used": 1}))]
    #[case(json!({"prompt_tokens": 3, "completion_tokens": 4, "server_tool_use": {"web_search_requests": 2}}))]
    fn what_cannot_be_believed_is_unknown(#[case] usage: Value) {
        assert_eq!(of_chat(&usage), None);
    }

    #[rstest]
    // xAI: 32 + 9 + 117 = 158.
    #[case(json!({"prompt_tokens": 32, "completion_tokens": 9, "total_tokens": 158,
        "completion_tokens_details": {"reasoning_tokens": 117}}), (126, 117))]
    #[case(json!({"prompt_tokens": 32, "completion_tokens": 200, "total_tokens": 349,
        "completion_tokens_details": {"reasoning_tokens": 117}}), (317, 117))]
    // Gemini behind a gateway: thinking shows in the total only.
    #[case(json!({"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 815}), (805, 0))]
    fn reasoning_beside_the_completion_is_output(#[case] usage: Value, #[case] expected: (i64, i64)) {
        let bill = of_chat(&usage).unwrap();
        assert_eq!((bill.output, bill.reasoning), expected);
    }

    #[rstest]
    #[case(json!({"prompt_tokens": 100, "completion_tokens": 4, "cache_creation_input_tokens": 70}))]
    #[case(json!({"prompt_tokens": 100, "completion_tokens": 4, "prompt_tokens_details": {"cache_write_tokens": 70}}))]
    #[case(json!({"prompt_tokens": 100, "completion_tokens": 4, "cache_creation_input_tokens": 70,
        "prompt_tokens_details": {"cache_creation_tokens": 70}}))]
    fn what_a_chat_completion_wrote_to_a_cache_is_priced_so(#[case] usage: Value) {
        let bill = of_chat(&usage).unwrap();
        assert_eq!((bill.input, bill.cache_write, bill.output), (30, 70, 4));
    }

    #[test]
    fn zeros_beside_content_are_no_bill() {
        let chat = |prompt, completion| json!({"prompt_tokens": prompt, "completion_tokens": completion});
        let message = |input, output| json!({"input_tokens": input, "output_tokens": output});
        for (content, input, output, believed) in [
            (true, 0, 0, false),
            (true, 5, 0, false),
            (true, 0, 5, false),
            (false, 0, 5, false),
            (false, 5, 0, true),
            (true, 5, 1, true),
        ] {
            let chat = read_beside(content, ProviderDialect::Chat, &chat(input, output));
            let message = read_beside(content, ProviderDialect::Messages, &message(input, output));
            assert_eq!(
                [chat.is_some(), message.is_some()],
                [believed; 2],
                "{content} {input} {output}"
            );
        }
        let cached = json!({"input_tokens": 0, "output_tokens": 3, "cache_read_input_tokens": 90});
        assert!(read_beside(true, ProviderDialect::Messages, &cached).is_some());
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
        let bill = read(ProviderDialect::Messages, &usage).unwrap();
        let kinds = [
            bill.input,
            bill.cache_read,
            bill.cache_write,
            bill.cache_write_1h,
            bill.output,
        ];
        assert_eq!(kinds, expected);
        assert_eq!(read(ProviderDialect::Chat, &usage), None);
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
        assert_eq!(read(ProviderDialect::Messages, &usage), None);
    }
}
