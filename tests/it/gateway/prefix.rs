//! How much of a prompt a provider's cache can read again: the bytes that follow one another on the wire.

use rstest::rstest;
use serde_json::json;

use super::loops::{Cell, Way};

/// Begins the runtime's word on how things stand.
const STATE: &str = "What is left of your limits";
/// Begins what is asked of a call for a summary.
const SUMMARISE: &str = "[From the runtime, not from a person.] All of the conversation above";
/// Calls that are looked at.
const CALLS: usize = 16;

/// One request as it came.
struct Sent {
    /// Without the marks of the cache, which are no content.
    text: String,
    /// So many bytes of it, from the first, are to be read from the cache by a later call.
    lasts: usize,
    summary: bool,
}

impl Sent {
    fn read(body: &str) -> Self {
        let text = body.replace(r#","cache_control":{"type":"ephemeral"}"#, "");
        let summary = text.contains(SUMMARISE);
        let last = text.rfind(if summary { SUMMARISE } else { STATE }).unwrap();
        // The last message, or the last block of it, begins after the one before it.
        // The first of a list without instructions has none before it.
        let (after, first) = (text[..last].rfind("},{"), text.find("\"input\":["));
        let lasts = after.map(|place| place + 1).or(first).unwrap();
        Self { text, lasts, summary }
    }

    /// Bytes that it shares with a later one.
    fn shared(&self, later: &Self) -> usize {
        let pairs = self.text.bytes().zip(later.text.bytes());
        pairs.take_while(|(one, two)| one == two).count()
    }
}

/// A conversation of turns that each say a little, until two summaries were made.
async fn conversation(way: Way) -> Vec<Sent> {
    let stop = if way.is_anthropic() { "end_turn" } else { "stop" };
    let words = "The harbour is quiet tonight and nothing has come in. ".repeat(30);
    let acts = (0..CALLS).map(|_| way.answer(&words, &[], stop, true)).collect();
    let rate_limits = json!([{"resource": "LLMCalls", "amount": 1000, "windowSeconds": 3600}]);
    let spec = json!({"guardrails": {"rateLimits": rate_limits, "loopDetection": {"mode": "Disabled"}, "maxConsecutiveTurns": 100}});
    let cell = Cell::start(way, &json!({"contextTokens": 5000}), spec, acts).await;
    cell.harness.provider.until_asked(CALLS).await;
    let seen = cell.harness.provider.seen();
    cell.end().await;
    let bodies = seen.iter().take(CALLS).map(|seen| seen.body.as_str());
    bodies.map(Sent::read).collect()
}

#[rstest]
#[case(Way::OpenAiStreamed)]
#[case(Way::AnthropicStreamed)]
#[case(Way::ResponsesStreamed)]
#[tokio::test]
async fn a_prompt_begins_with_all_of_the_one_before_it_but_the_state_and_again_after_a_summary(#[case] way: Way) {
    let sent = conversation(way).await;
    let summaries = sent.iter().filter(|sent| sent.summary).count();
    assert!(summaries >= 2, "{summaries} summaries in {CALLS} calls");
    for pair in sent.windows(2) {
        let [before, after] = pair else { unreachable!() };
        let shared = before.shared(after);
        if after.summary {
            // It is of the oldest turns: they are all there, and only what asks for the summary is new.
            assert!(shared >= after.lasts, "{shared} of {}", after.lasts);
        } else if before.summary {
            // Instructions and tools stay; the conversation starts again with the summary.
            let begins = before
                .text
                .find("Turn 1,")
                .or_else(|| before.text.find("[From the runtime"))
                .unwrap();
            assert!(shared >= begins, "{shared} of {begins}");
        } else {
            assert!(shared >= before.lasts, "{shared} of {}", before.lasts);
        }
    }
}
