//! Parses a server's usage report into disjoint kinds of tokens. Counts that are not credible are unknown, never zero.

use serde_json::Value;

use super::WireFormat;
use agentloop_ledger::bound::CallBill;

/// A larger count in one call is absurd, and would endanger exact sums.
const MAX_TOKENS: i64 = 1_000_000_000;

/// Parses the usage report of a server, which cannot be zero: no request is empty, and content takes output. Servers
/// that only fill in the field write zeros.
#[must_use]
pub fn read_beside(content: bool, format: WireFormat, usage: &Value) -> Option<CallBill> {
    let bill = format.bill(usage)?;
    let is_stub = bill.all_input() == Some(0) || (content && bill.output == 0);
    (!is_stub).then_some(bill)
}

/// Whether the usage includes items billed in addition to the tokens above: server-side tools, or more than one pass of
/// a model. Requests for those are rejected, so such a server does not do what it was asked.
pub(super) fn has_unpriced(usage: &Value) -> bool {
    let tools = usage.get("server_tool_use").and_then(Value::as_object);
    let used = tools.is_some_and(|tools| tools.values().any(|uses| uses.as_i64() != Some(0) && !uses.is_null()));
    let passes = usage.get("iterations").and_then(Value::as_array);
    used || passes.is_some_and(|passes| passes.len() > 1)
}

/// A count, or `missing` if absent. `None`: present but not credible.
pub(super) fn or(value: Option<&Value>, missing: i64) -> Option<i64> {
    match value {
        None | Some(Value::Null) => Some(missing),
        Some(value) => count(value),
    }
}

pub(super) fn count(value: &Value) -> Option<i64> {
    value.as_i64().filter(|count| (0..=MAX_TOKENS).contains(count))
}

/// Output tokens as they are billed, with reasoning.
pub(super) fn billed_output(bill: CallBill) -> Option<u64> {
    u64::try_from(bill.output).ok()
}

/// A detail in a nested object; 0 if absent.
pub(super) fn detail(usage: &Value, group: &str, name: &str) -> Option<i64> {
    or(usage.get(group).and_then(|group| group.get(name)), 0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

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
            let chat = read_beside(content, WireFormat::OpenAiChat, &chat(input, output));
            let message = read_beside(content, WireFormat::AnthropicMessages, &message(input, output));
            assert_eq!(
                [chat.is_some(), message.is_some()],
                [believed; 2],
                "{content} {input} {output}"
            );
        }
        let cached = json!({"input_tokens": 0, "output_tokens": 3, "cache_read_input_tokens": 90});
        assert!(read_beside(true, WireFormat::AnthropicMessages, &cached).is_some());
    }
}
