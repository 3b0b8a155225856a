//! What servers accept as a prompt.

use super::*;

/// A prompt that servers accept: the system message first, turns begun by a user message, each tool call followed by
/// its result and each result preceded by its call.
pub(super) fn check_prompt(messages: &[Arc<Message>]) {
    assert!(matches!(*messages[0], Message::System { .. }));
    assert!(matches!(*messages[1], Message::User { .. }), "{:?}", messages[1]);
    let mut open: Vec<&str> = Vec::new();
    for message in &messages[1..] {
        match &**message {
            Message::System { .. } => panic!("a second system message"),
            Message::Tool { id, .. } => assert_eq!(open.remove(0), id),
            Message::User { .. } => assert!(open.is_empty(), "no result for {open:?}"),
            Message::Assistant { tool_calls, .. } => {
                assert!(open.is_empty(), "no result for {open:?}");
                open = tool_calls.iter().map(|call| call.id.as_str()).collect();
            }
        }
    }
    assert!(open.is_empty(), "no result for {open:?}");
}
