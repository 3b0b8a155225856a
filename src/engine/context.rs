//! Keeps the prompt within the context window: whole oldest turns leave, and no call is parted from its result.

use std::sync::Arc;

use super::message::{Message, Tool};
use super::settings::Settings;

/// Tokens that a message costs beside its text.
const PER_MESSAGE: u64 = 8;

/// Bytes that count as a token: a little few for most texts and tokenizers.
const BYTES_PER_TOKEN: u64 = 4;

/// The prompt cannot fit, whatever leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLarge {
    /// What the newest turn needs.
    pub needed: u64,
    /// What there is for the transcript.
    pub room: u64,
}

/// What must leave so that the rest fits, in whole turns: so many of the oldest messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Surplus {
    /// When they leave for nothing: three quarters of the room stay in use.
    pub trimmed: usize,
    /// When a summary takes their place: half of it, since that has its price.
    pub summarised: usize,
    /// Tokens that there are for the transcript.
    pub room: u64,
}

/// What must leave so that the transcript fits beside `fixed` tokens; `None` when it fits.
///
/// The newest turn may fill the window. With older ones a prompt takes at most 80 % of it, and at most 40 % of `limit`,
/// the smallest limit that a whole call must fit into: a history that fills a limit would leave no second call to its
/// window (C39).
///
/// When something must leave, much of the room is freed at once: a prompt that lost its head every turn would never be
/// read from the server's cache.
pub fn surplus(
    transcript: &[Arc<Message>],
    fixed: u64,
    settings: &Settings,
    limit: Option<u64>,
) -> Result<Option<Surplus>, TooLarge> {
    let needed: u64 = transcript.iter().map(|message| tokens(message)).sum();
    let starts: Vec<usize> = (0..transcript.len()).filter(|&i| begins_turn(&transcript[i])).collect();
    let newest = starts.last().copied().unwrap_or(0);
    let newest_needs: u64 = transcript[newest..].iter().map(|message| tokens(message)).sum();
    let window = u64::from(settings.context_tokens);
    let most = window.saturating_sub(settings.max_output_tokens.into());
    // A limit that no call fits into would only cost the history: zero is how people block an Agent.
    let limit = limit.filter(|limit| fixed.saturating_add(newest_needs) <= *limit);
    let share = (window / 5 * 4).min(limit.map_or(u64::MAX, |limit| limit / 5 * 2));
    let room = most.min(share).saturating_sub(fixed);
    if needed <= room {
        return Ok(None);
    }
    let most = most.saturating_sub(fixed);
    if newest_needs > most {
        return Err(TooLarge {
            needed: newest_needs,
            room: most,
        });
    }
    let cut = |most: u64| oldest(transcript, &starts, needed, most.max(newest_needs));
    let surplus = Surplus {
        trimmed: cut(room - room / 4),
        summarised: cut(room / 2),
        room,
    };
    // The newest turn alone is too much for its share, and may be.
    Ok((surplus.trimmed > 0).then_some(surplus))
}

/// How many of the oldest messages must leave until the rest, of `needed` tokens now, has at most so many.
fn oldest(transcript: &[Arc<Message>], starts: &[usize], mut needed: u64, most: u64) -> usize {
    let mut gone = 0;
    for &start in starts.iter().skip_while(|&&start| start == 0) {
        needed -= transcript[gone..start]
            .iter()
            .map(|message| tokens(message))
            .sum::<u64>();
        gone = start;
        if needed <= most {
            break;
        }
    }
    gone
}

/// How many of the oldest messages to drop from a prompt that was refused as larger than a whole `limit`: about half,
/// in whole turns. 0 when that cannot help.
///
/// What a call costs at most is counted by bytes where the server has not billed the same text before, so a history
/// within its share of the limit can be too much all the same, for instance after a restart.
pub fn half(transcript: &[Arc<Message>], fixed: u64, limit: u64) -> usize {
    let bytes = |messages: &[Arc<Message>]| {
        messages
            .iter()
            .map(|message| tokens(message) * BYTES_PER_TOKEN)
            .sum::<u64>()
    };
    let starts: Vec<usize> = (1..transcript.len()).filter(|&i| begins_turn(&transcript[i])).collect();
    let Some(&newest) = starts.last() else {
        return 0;
    };
    let all = bytes(transcript);
    let is_why = all > limit / 4 && bytes(&transcript[newest..]).saturating_add(fixed * BYTES_PER_TOKEN) <= limit;
    if !is_why {
        return 0;
    }
    let halves = |&&start: &&usize| bytes(&transcript[..start]) >= all / 2;
    starts.iter().find(halves).copied().unwrap_or(newest)
}

/// Where the newest whole turns of these messages begin that have at most so many tokens together; `None`: not even the last
/// one does.
pub fn newest(messages: &[Arc<Message>], most: u64) -> Option<usize> {
    let mut starts = (0..messages.len()).filter(|&place| place == 0 || begins_turn(&messages[place]));
    starts.find(|&start| prompt(&messages[start..], 0) <= most)
}

/// Estimated tokens of the system message.
pub fn system(text: &str) -> u64 {
    PER_MESSAGE + text_tokens(text)
}

/// Estimated tokens of a whole prompt.
pub fn prompt(transcript: &[Arc<Message>], fixed: u64) -> u64 {
    transcript
        .iter()
        .fold(fixed, |sum, message| sum.saturating_add(tokens(message)))
}

/// Estimated tokens of the tools that every prompt carries.
pub fn tools(tools: &[Tool]) -> u64 {
    tools
        .iter()
        .map(|tool| {
            text_tokens(&tool.name) + text_tokens(&tool.description) + text_tokens(&tool.parameters.to_string())
        })
        .sum()
}

fn begins_turn(message: &Message) -> bool {
    matches!(message, Message::User { .. })
}

fn tokens(message: &Message) -> u64 {
    PER_MESSAGE
        + match message {
            Message::System { text } | Message::User { text } => text_tokens(text),
            Message::Tool { id, text, .. } => text_tokens(id) + text_tokens(text),
            Message::Assistant { text, tool_calls } => {
                let calls: u64 = tool_calls
                    .iter()
                    .map(|call| text_tokens(&call.id) + text_tokens(&call.name) + text_tokens(&call.arguments))
                    .sum();
                text.as_deref().map_or(0, text_tokens) + calls
            }
        }
}

/// Rounded up.
fn text_tokens(text: &str) -> u64 {
    u64::try_from(text.len()).unwrap_or(u64::MAX).div_ceil(BYTES_PER_TOKEN)
}
