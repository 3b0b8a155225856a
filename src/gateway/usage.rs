//! A server's usage report as disjoint kinds of tokens. What cannot be believed is unknown, never zero.

use serde_json::Value;

use crate::ledger::bound::Bill;

/// More than this in one call is absurd, and would endanger exact sums.
const MAX_TOKENS: i64 = 1_000_000_000;

/// Reads the `usage` of a chat completion. `prompt_tokens` includes cached ones, `completion_tokens` reasoning.
/// `None` when a count is missing, negative, no whole number, or contradicts another.
pub fn of_chat(usage: &Value) -> Option<Bill> {
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

fn count(value: &Value) -> Option<i64> {
    value.as_i64().filter(|count| (0..=MAX_TOKENS).contains(count))
}

/// A detail that a server does not give is none of that kind.
fn detail(usage: &Value, group: &str, name: &str) -> Option<i64> {
    match usage.get(group).and_then(|group| group.get(name)) {
        None | Some(Value::Null) => Some(0),
        Some(value) => count(value),
    }
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
}
