//! Keeps the prompt within the context window: whole oldest turns leave, and no call is parted from its result.

use std::sync::Arc;

use super::message::{Message, Tool};
use super::settings::Settings;

/// Tokens that a message costs beside its text.
const PER_MESSAGE: u64 = 8;

/// The prompt cannot fit, whatever leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLarge {
    /// What the newest turn needs.
    pub needed: u64,
    /// What there is for the transcript.
    pub room: u64,
}

/// How many of the oldest messages must leave so that the transcript fits beside `fixed` tokens; 0 when it fits.
///
/// When something must leave, a quarter of the room is freed at once: a prompt that lost its head every turn would
/// never be read from the server's cache.
pub fn surplus(transcript: &[Arc<Message>], fixed: u64, settings: &Settings) -> Result<usize, TooLarge> {
    let room = u64::from(settings.context_tokens)
        .saturating_sub(settings.max_output_tokens.into())
        .saturating_sub(fixed);
    let mut needed: u64 = transcript.iter().map(|message| tokens(message)).sum();
    if needed <= room {
        return Ok(0);
    }
    let starts: Vec<usize> = (0..transcript.len()).filter(|&i| begins_turn(&transcript[i])).collect();
    let newest = starts.last().copied().unwrap_or(0);
    let newest_needs: u64 = transcript[newest..].iter().map(|message| tokens(message)).sum();
    if newest_needs > room {
        return Err(TooLarge {
            needed: newest_needs,
            room,
        });
    }
    let goal = (room - room / 4).max(newest_needs);
    let mut gone = 0;
    for &start in starts.iter().skip_while(|&&start| start == 0) {
        needed -= transcript[gone..start]
            .iter()
            .map(|message| tokens(message))
            .sum::<u64>();
        gone = start;
        if needed <= goal {
            break;
        }
    }
    Ok(gone)
}

/// Estimated tokens of what every prompt carries: the system message and the tools.
pub fn fixed(system: &str, tools: &[Tool]) -> u64 {
    let tools: u64 = tools
        .iter()
        .map(|tool| text_tokens(tool.name) + text_tokens(tool.description) + text_tokens(&tool.parameters.to_string()))
        .sum();
    PER_MESSAGE + text_tokens(system) + tools
}

fn begins_turn(message: &Message) -> bool {
    matches!(message, Message::User { .. })
}

fn tokens(message: &Message) -> u64 {
    PER_MESSAGE
        + match message {
            Message::System { text } | Message::User { text } => text_tokens(text),
            Message::Tool { id, text } => text_tokens(id) + text_tokens(text),
            Message::Assistant { text, tool_calls } => {
                let calls: u64 = tool_calls
                    .iter()
                    .map(|call| text_tokens(&call.id) + text_tokens(&call.name) + text_tokens(&call.arguments))
                    .sum();
                text.as_deref().map_or(0, text_tokens) + calls
            }
        }
}

/// Four bytes a token, rounded up: a little high for most texts and tokenizers.
fn text_tokens(text: &str) -> u64 {
    u64::try_from(text.len().div_ceil(4)).unwrap_or(u64::MAX)
}
