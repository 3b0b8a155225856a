//! What a provider with a prompt cache charges for a conversation. A model of the published rules, and no more:
//!
//! - A request is a row of blocks: the tools, the system prompt, the blocks of the messages, and last what changes with each
//!   call. Marks say after which blocks the provider is to keep the beginning of the request.
//! - A beginning that was kept and is not older than its time to live is read for a tenth of the price, and its time begins
//!   again. A mark finds a beginning that ends at most 20 blocks before it.
//! - What comes after that, up to the last mark, is written for more than the price; the rest is plain input.
//!
//! Left out, since both sides gain the same from it: the least size of what is kept, and the time until a write can be read.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use agentloop::engine::message::Message;
use jiff::{SignedDuration, Timestamp};

/// Blocks before a mark in which a provider looks for what it has kept.
const LOOKBACK: usize = 20;
/// Bytes of a token of this server, in sevenths: three and a half.
const SEVENTHS_OF_BYTES: u64 = 2;

/// Micro-dollars for a million tokens are picodollars for one: prices in whole dollars a million times a thousand.
#[derive(Clone, Copy)]
pub struct Prices {
    /// Input that no cache knows.
    pub input: u64,
    /// Output.
    pub output: u64,
    /// Input read from the cache.
    pub read: u64,
    /// Input written to it.
    pub write: u64,
}

/// Which beginnings a request marks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Marks {
    /// The end of the conversation.
    Last,
    /// The tools, the system prompt, the end of the request before, and the end of the conversation.
    Four,
}

/// How a loop uses the provider's cache, and what that costs, in thousandths of a dollar for a million tokens.
#[derive(Clone, Copy)]
pub struct Caching {
    /// How long something stays in it.
    pub ttl: SignedDuration,
    /// Marks.
    pub marks: Marks,
    /// Prices.
    pub prices: Prices,
}

/// One mark, for five minutes.
pub const FIVE_MINUTES_ONE_MARK: Caching = Caching {
    ttl: SignedDuration::from_mins(5),
    marks: Marks::Last,
    prices: Prices {
        input: 3_000,
        output: 15_000,
        read: 300,
        write: 3_750,
    },
};

/// Four marks, for five minutes.
pub const FIVE_MINUTES: Caching = Caching {
    marks: Marks::Four,
    ..FIVE_MINUTES_ONE_MARK
};

/// Four marks, for an hour.
pub const ONE_HOUR: Caching = Caching {
    ttl: SignedDuration::from_hours(1),
    marks: Marks::Four,
    prices: Prices {
        write: 6_000,
        ..FIVE_MINUTES_ONE_MARK.prices
    },
};

/// Tokens of a text.
pub fn tokens(bytes: usize) -> u64 {
    u64::try_from(bytes).unwrap_or(0) * SEVENTHS_OF_BYTES / 7
}

/// A provider that one loop calls.
pub struct Provider {
    caching: Caching,
    /// Until when it keeps the beginning with this hash.
    kept: HashMap<u64, Timestamp>,
    /// Blocks of the request before.
    before: usize,
}

/// What a request was billed.
#[derive(Clone, Copy, Default)]
pub struct Bill {
    /// All input tokens.
    pub input: u64,
    /// Billionths of a dollar.
    pub nanodollars: u64,
}

impl Provider {
    /// One that knows nothing yet.
    pub fn new(caching: Caching) -> Self {
        Self {
            caching,
            kept: HashMap::new(),
            before: 0,
        }
    }

    /// Charges a request whose tools have `tools` bytes, with `state` as its last block, and an answer of `answer` bytes.
    pub fn charge(
        &mut self,
        now: Timestamp,
        (tools, state): (usize, usize),
        messages: &[impl AsRef<Message>],
        answer: usize,
    ) -> Bill {
        let blocks = blocks(tools, messages);
        let end = blocks.len() - 1;
        let marks = match self.caching.marks {
            Marks::Last => vec![end],
            Marks::Four => vec![0, 1.min(end), self.before.min(end), end],
        };
        self.kept.retain(|_, until| *until > now);
        let is_kept = |place: &usize| self.kept.contains_key(&blocks[*place].0);
        let near = |mark: &usize| (mark.saturating_sub(LOOKBACK)..=*mark).rev().find(is_kept);
        let hit = marks.iter().filter_map(near).max();
        let until = now + self.caching.ttl;
        for place in marks.iter().copied().chain(hit) {
            self.kept.insert(blocks[place].0, until);
        }
        self.before = end;
        let sum = |range: &[(u64, u64)]| range.iter().map(|(_, tokens)| tokens).sum::<u64>();
        let read = hit.map_or(0, |hit| sum(&blocks[..=hit]));
        let written = sum(&blocks) - read;
        let plain = tokens_of(state);
        let Prices {
            input,
            output,
            read: read_price,
            write,
        } = self.caching.prices;
        let nanodollars = read * read_price + written * write + plain * input + tokens_of(answer) * output;
        Bill {
            input: read + written + plain,
            nanodollars,
        }
    }
}

fn tokens_of(bytes: usize) -> u64 {
    tokens(bytes)
}

/// The blocks of a request: the hash of all up to it, and its tokens.
fn blocks(tools: usize, messages: &[impl AsRef<Message>]) -> Vec<(u64, u64)> {
    let mut hasher = DefaultHasher::new();
    let mut blocks = Vec::new();
    let mut block = |text: &str| {
        text.hash(&mut hasher);
        blocks.push((hasher.clone().finish(), tokens(text.len())));
    };
    block(&"t".repeat(tools));
    for message in messages {
        match message.as_ref() {
            Message::System { text } | Message::User { text } | Message::Tool { text, .. } => block(text),
            Message::Assistant { text, tool_calls, .. } => {
                if let Some(text) = text {
                    block(text);
                }
                for call in tool_calls {
                    block(&format!("{}{}{}", call.id, call.name, call.arguments));
                }
            }
        }
    }
    blocks
}
