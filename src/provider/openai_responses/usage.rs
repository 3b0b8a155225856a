//! Usage reports of OpenAI Responses.

use serde_json::Value;

use crate::openai_usage::UsageNames;
use crate::usage::{billed_output, detail, or};
use agentloop_ledger::bound::CallBill;

const NAMES: UsageNames = UsageNames {
    input: "input_tokens",
    output: "output_tokens",
    input_details: "input_tokens_details",
    output_details: "output_tokens_details",
};

/// The usage of a response; see [`UsageNames::bill`].
pub(crate) fn bill(usage: &Value) -> Option<CallBill> {
    // xAI counts the tools that it ran, which are billed in addition to tokens.
    if or(usage.get("num_server_side_tools_used"), 0) != Some(0) {
        return None;
    }
    let cache_write = detail(usage, NAMES.input_details, "cache_write_tokens")?;
    NAMES.bill(usage, cache_write)
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
            "input_tokens": 100, "output_tokens": 20, "total_tokens": 120,
            "input_tokens_details": {"cached_tokens": 90}, "output_tokens_details": {"reasoning_tokens": 15},
        });
        let expected = CallBill {
            input: 10,
            output: 20,
            cache_read: 90,
            reasoning: 15,
            ..CallBill::default()
        };
        assert_eq!(bill(&usage), Some(expected));
        assert_eq!((tokens(&usage), input_tokens(&usage)), (Some(30), Some(100)));
    }

    #[rstest]
    #[case(json!({"input_tokens": 3, "output_tokens": 4}), [3, 0, 4])]
    #[case(json!({"input_tokens": 3, "output_tokens": 4, "input_tokens_details": null}), [3, 0, 4])]
    #[case(json!({"input_tokens": 30, "output_tokens": 4, "input_tokens_details": {"cache_write_tokens": 20}}), [10, 20, 4])]
    #[case(json!({"input_tokens": 3, "output_tokens": 4, "total_tokens": 17}), [3, 0, 14])]
    fn details_may_be_missing_and_what_has_no_name_is_output(#[case] usage: Value, #[case] expected: [i64; 3]) {
        let bill = bill(&usage).unwrap();
        assert_eq!([bill.input, bill.cache_write, bill.output], expected);
    }

    #[rstest]
    #[case(json!(null))]
    #[case(json!({"input_tokens": 3}))]
    #[case(json!({"output_tokens": 3}))]
    #[case(json!({"input_tokens": -1, "output_tokens": 4}))]
    #[case(json!({"input_tokens": "3", "output_tokens": 4}))]
    #[case(json!({"input_tokens": 3, "output_tokens": 1_000_000_001}))]
    #[case(json!({"input_tokens": 3, "output_tokens": 4, "total_tokens": 6}))]
    #[case(json!({"input_tokens": 3, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 4}}))]
    #[case(json!({"input_tokens": 3, "output_tokens": 4, "input_tokens_details": {"cached_tokens": -1}}))]
    #[case(json!({"input_tokens": 3, "output_tokens": 4, "output_tokens_details": {"reasoning_tokens": 5}}))]
    #[case(json!({"input_tokens": 3, "output_tokens": 4, "num_server_side_tools_used": 1}))]
    #[case(json!({"input_tokens": 3, "output_tokens": 4, "num_sources_used": 1}))]
    #[case(json!({"prompt_tokens": 3, "completion_tokens": 4}))]
    fn implausible_usage_is_unknown(#[case] usage: Value) {
        assert_eq!(bill(&usage), None);
    }

    #[test]
    fn tokens_of_a_report_that_contradicts_itself_are_unknown() {
        let absurd = json!({"input_tokens": 3, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 4}});
        assert_eq!(tokens(&absurd), None);
        assert_eq!(input_tokens(&json!({"input_tokens": 0})), None);
    }
}
