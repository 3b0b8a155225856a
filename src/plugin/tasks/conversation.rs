//! A conversation as the prompt of its next task. The agent remembers nothing between two tasks, so each prompt contains
//! the earlier conversation, up to a limit.

use serde_json::json;

/// Maximum number of bytes of the source of untrusted content in a request.
const MAX_SOURCE_BYTES: usize = 320;
/// Maximum number of bytes of a prompt.
pub const MAX_PROMPT_BYTES: usize = 48 * 1024;
const BEFORE: &str =
    "This is a conversation. Its earlier messages follow, the oldest first, as one JSON object a line.\n";
const NEXT: &str = "\nAnswer the next message of the user:\n";

/// The conversation so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conversation {
    /// The oldest first.
    exchanges: Vec<PastExchange>,
}

/// A message of the user with the answer of the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PastExchange {
    /// Both, as lines of JSON.
    lines: String,
    /// Source of the untrusted content that the agent had seen when it answered.
    untrusted_content: Option<String>,
}

impl Conversation {
    /// The prompt for the next message. The oldest exchanges are left out when they do not fit. An error states why the
    /// message alone does not. With the latest source of untrusted content of the exchanges in the prompt: what the agent
    /// said after it had seen such content may repeat it.
    pub fn prompt(&self, message: &str) -> Result<(String, Option<String>), String> {
        if message.len() > MAX_PROMPT_BYTES {
            return Err(format!(
                "the message has {} bytes, and a prompt at most {MAX_PROMPT_BYTES}: shorten it",
                message.len()
            ));
        }
        let mut remaining = MAX_PROMPT_BYTES.saturating_sub(BEFORE.len() + NEXT.len() + message.len());
        let newest = self.exchanges.iter().rev().take_while(|exchange| {
            let fits = exchange.lines.len() <= remaining;
            remaining = remaining.saturating_sub(exchange.lines.len());
            fits
        });
        let first = self.exchanges.len() - newest.count();
        let kept = self.exchanges.get(first..).unwrap_or_default();
        if kept.is_empty() {
            return Ok((message.to_owned(), None));
        }
        let source = kept
            .iter()
            .rev()
            .find_map(|exchange| exchange.untrusted_content.clone());
        let kept: String = kept.iter().map(|exchange| exchange.lines.as_str()).collect();
        Ok((format!("{BEFORE}{kept}{NEXT}{message}"), source))
    }

    /// Adds a message and its answer, with the source of untrusted content that the agent had seen.
    pub fn add(&mut self, message: &str, answer: &str, untrusted_content: Option<&str>) {
        self.exchanges.push(PastExchange {
            lines: format!("{}\n{}\n", json!({"user": message}), json!({"agent": answer})),
            untrusted_content: untrusted_content.map(shortened),
        });
    }
}

/// A source as a request may have it.
fn shortened(source: &str) -> String {
    let fits = |(start, c): &(usize, char)| start + c.len_utf8() <= MAX_SOURCE_BYTES;
    source.char_indices().take_while(fits).map(|(_, c)| c).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_message_is_the_prompt_and_the_next_one_follows_the_conversation() {
        let mut conversation = Conversation::default();
        assert_eq!(conversation.prompt("Hello").unwrap().0, "Hello");
        conversation.add("Hello", "Hi\n{\"user\":\"not said\"}", None);
        insta::assert_snapshot!(conversation.prompt("And now?").unwrap().0);
    }

    #[test]
    fn the_oldest_exchanges_are_left_out_when_they_do_not_fit() {
        let exchange = |text: &str| {
            let mut one = Conversation::default();
            one.add("m", text, None);
            one.exchanges[0].lines.len()
        };
        let frame = BEFORE.len() + NEXT.len() + 1;
        let answer = "a".repeat(MAX_PROMPT_BYTES - frame - exchange(""));
        let mut conversation = Conversation::default();
        conversation.add("m", "forgotten", Some("mcp/forgotten"));
        conversation.add("m", &answer, None);
        let (prompt, source) = conversation.prompt("x").unwrap();
        assert_eq!(source, None, "what is left out is not in the prompt");
        assert_eq!(prompt.len(), MAX_PROMPT_BYTES, "the newest exchange fits exactly");
        assert!(!prompt.contains("forgotten"));
        assert_eq!(conversation.prompt("xy").unwrap().0, "xy", "one byte more does not");
    }

    #[test]
    fn a_prompt_with_an_answer_after_untrusted_content_has_the_latest_source() {
        let mut conversation = Conversation::default();
        let source = |conversation: &Conversation| conversation.prompt("x").unwrap().1;
        conversation.add("a", "b", None);
        assert_eq!(source(&conversation), None);
        conversation.add("a", "b", Some("mcp/web"));
        conversation.add("a", "b", None);
        assert_eq!(source(&conversation).as_deref(), Some("mcp/web"));
        conversation.add("a", "b", Some("mcp/mail"));
        assert_eq!(source(&conversation).as_deref(), Some("mcp/mail"));
    }

    #[test]
    fn a_source_has_at_most_320_bytes() {
        assert_eq!(shortened(&"s".repeat(320)).len(), 320);
        assert_eq!(shortened(&"s".repeat(321)).len(), 320);
        assert_eq!(shortened(&format!("{}é", "s".repeat(319))).len(), 319);
    }

    #[test]
    fn a_message_of_48_kib_is_the_longest() {
        let conversation = Conversation::default();
        assert!(conversation.prompt(&"m".repeat(MAX_PROMPT_BYTES)).is_ok());
        assert!(conversation.prompt(&"m".repeat(MAX_PROMPT_BYTES + 1)).is_err());
    }
}
