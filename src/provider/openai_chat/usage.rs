//! Usage reports of OpenAI chat completions.

use serde_json::Value;

use crate::openai_usage::UsageNames;
use crate::usage::{billed_output, detail, or};
use agentloop_ledger::bound::CallBill;

const NAMES: UsageNames = UsageNames {
    input: "prompt_tokens",
    output: "completion_tokens",
    input_details: "prompt_tokens_details",
    output_details: "completion_tokens_details",
};

/// The usage of a chat completion; see [`UsageNames::bill`].
pub(crate) fn bill(usage: &Value) -> Option<CallBill> {
    // LiteLLM, OpenRouter; the same count may appear under both names.
    let written = [
        or(usage.get("cache_creation_input_tokens"), 0)?,
        detail(usage, NAMES.input_details, "cache_write_tokens")?,
        detail(usage, NAMES.input_details, "cache_creation_tokens")?,
    ];
    // The maximum, not the sum: the same tokens may be reported under several names.
    NAMES.bill(usage, written.into_iter().fold(0, i64::max))
}

/// Counts the tokens of a usage report. Cache reads are excluded.
pub(super) fn tokens(usage: &Value) -> Option<u64> {
    NAMES.tokens(usage)
}

/// Counts all input tokens of a usage report, cached or not. Zero is treated as unknown.
pub(super) fn input_tokens(usage: &Value) -> Option<u64> {
    NAMES.input_tokens(usage)
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
        assert_eq!(bill(&usage), Some(expected));
    }

    #[rstest]
    #[case(json!({"prompt_tokens": 3, "completion_tokens": 4}))]
    #[case(json!({"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": null}))]
    #[case(json!({"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": null}}))]
    fn details_may_be_missing(#[case] usage: Value) {
        assert_eq!(
            bill(&usage),
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
    fn implausible_usage_is_unknown(#[case] usage: Value) {
        assert_eq!(bill(&usage), None);
    }

    #[rstest]
    // xAI: 32 + 9 + 117 = 158.
    #[case(json!({"prompt_tokens": 32, "completion_tokens": 9, "total_tokens": 158,
        "completion_tokens_details": {"reasoning_tokens": 117}}), (126, 117))]
    #[case(json!({"prompt_tokens": 32, "completion_tokens": 200, "total_tokens": 349,
        "completion_tokens_details": {"reasoning_tokens": 117}}), (317, 117))]
    // Gemini behind a gateway: thinking is visible only in the total.
    #[case(json!({"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 815}), (805, 0))]
    fn reasoning_beside_the_completion_is_output(#[case] usage: Value, #[case] expected: (i64, i64)) {
        let bill = super::bill(&usage).unwrap();
        assert_eq!((bill.output, bill.reasoning), expected);
    }

    #[rstest]
    #[case(json!({"prompt_tokens": 100, "completion_tokens": 4, "cache_creation_input_tokens": 70}))]
    #[case(json!({"prompt_tokens": 100, "completion_tokens": 4, "prompt_tokens_details": {"cache_write_tokens": 70}}))]
    #[case(json!({"prompt_tokens": 100, "completion_tokens": 4, "cache_creation_input_tokens": 70,
        "prompt_tokens_details": {"cache_creation_tokens": 70}}))]
    fn cache_writes_of_a_chat_completion_are_priced_as_such(#[case] usage: Value) {
        let bill = super::bill(&usage).unwrap();
        assert_eq!((bill.input, bill.cache_write, bill.output), (30, 70, 4));
    }

    #[test]
    fn input_tokens_are_all_of_the_prompt() {
        let usage =
            json!({"prompt_tokens": 500, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 480}});
        assert_eq!(input_tokens(&usage), Some(500));
        assert_eq!(input_tokens(&json!({"prompt_tokens": 0})), None);
        assert_eq!(input_tokens(&json!({"completion_tokens": 4})), None);
    }

    #[test]
    fn tokens_are_all_that_were_not_read_from_a_cache_and_unknown_where_the_server_contradicts_itself() {
        let read = |usage: Value| tokens(&usage);
        assert_eq!(read(json!({"prompt_tokens": 10, "completion_tokens": 5})), Some(15));
        let cached =
            json!({"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 8}});
        assert_eq!(read(cached), Some(7));
        let absurd = json!({"prompt_tokens": 1, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 8}});
        for unknown in [
            absurd,
            json!({}),
            json!(null),
            json!({"prompt_tokens": 3}),
            json!({"prompt_tokens": -1, "completion_tokens": 5}),
        ] {
            assert_eq!(read(unknown), None);
        }
    }
}
