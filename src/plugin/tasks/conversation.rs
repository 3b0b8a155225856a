//! A conversation as the prompt of its next task. The agent remembers nothing between two tasks, so each prompt contains
//! what was said before, up to a limit.

use serde_json::json;

/// Most bytes of a prompt.
pub const MOST_PROMPT_BYTES: usize = 48 * 1024;
const BEFORE: &str =
    "This is a conversation. Its earlier messages follow, the oldest first, as one JSON object a line.\n";
const NEXT: &str = "\nAnswer the next message of the user:\n";

/// What was said so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conversation {
    /// Each message of the user with the answer of the agent, as lines of JSON.
    exchanges: Vec<String>,
}

impl Conversation {
    /// The prompt for the next message. The oldest exchanges are left out when they do not fit. An error states why the
    /// message alone does not.
    pub fn prompt(&self, message: &str) -> Result<String, String> {
        if message.len() > MOST_PROMPT_BYTES {
            return Err(format!(
                "the message has {} bytes, and a prompt at most {MOST_PROMPT_BYTES}: shorten it",
                message.len()
            ));
        }
        let mut room = MOST_PROMPT_BYTES.saturating_sub(BEFORE.len() + NEXT.len() + message.len());
        let newest = self.exchanges.iter().rev().take_while(|exchange| {
            let fits = exchange.len() <= room;
            room = room.saturating_sub(exchange.len());
            fits
        });
        let first = self.exchanges.len() - newest.count();
        let kept = self.exchanges.get(first..).unwrap_or_default().concat();
        if kept.is_empty() {
            return Ok(message.to_owned());
        }
        Ok(format!("{BEFORE}{kept}{NEXT}{message}"))
    }

    /// Adds a message and its answer.
    pub fn add(&mut self, message: &str, answer: &str) {
        self.exchanges
            .push(format!("{}\n{}\n", json!({"user": message}), json!({"agent": answer})));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_message_is_the_prompt_and_the_next_one_follows_what_was_said() {
        let mut conversation = Conversation::default();
        assert_eq!(conversation.prompt("Hello").unwrap(), "Hello");
        conversation.add("Hello", "Hi\n{\"user\":\"not said\"}");
        insta::assert_snapshot!(conversation.prompt("And now?").unwrap());
    }

    #[test]
    fn the_oldest_exchanges_are_left_out_when_they_do_not_fit() {
        let exchange = |text: &str| {
            let mut one = Conversation::default();
            one.add("m", text);
            one.exchanges.concat().len()
        };
        let frame = BEFORE.len() + NEXT.len() + 1;
        let answer = "a".repeat(MOST_PROMPT_BYTES - frame - exchange(""));
        let mut conversation = Conversation::default();
        conversation.add("m", "forgotten");
        conversation.add("m", &answer);
        let prompt = conversation.prompt("x").unwrap();
        assert_eq!(prompt.len(), MOST_PROMPT_BYTES, "the newest exchange fits exactly");
        assert!(!prompt.contains("forgotten"));
        assert_eq!(conversation.prompt("xy").unwrap(), "xy", "one byte more does not");
    }

    #[test]
    fn a_message_of_48_kib_is_the_longest() {
        let conversation = Conversation::default();
        assert!(conversation.prompt(&"m".repeat(MOST_PROMPT_BYTES)).is_ok());
        assert!(conversation.prompt(&"m".repeat(MOST_PROMPT_BYTES + 1)).is_err());
    }
}
