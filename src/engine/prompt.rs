//! The texts that the runtime itself says to the model. What changes from turn to turn is only in the newest message,
//! so that everything before it can be read from the server's cache.

use jiff::Timestamp;

use super::{clock, snapshot::Briefing};

/// How the loop works, after the user's instructions.
const RUNTIME: &str = "You run in a loop of turns, without a person at the other end. Each turn begins with a message \
from the runtime. Call the tool `yield` when a turn's work is done, to set your own pace: sleep for some seconds, be \
woken early by named events, or shut the loop down for good. Without `yield` the next turn begins at once.";

/// Why a turn begins that follows another.
pub const GOES_ON: &str = "the loop goes on";
/// Why the first turn begins.
pub const STARTS: &str = "the loop starts";

/// The system message: the instructions and the word about the runtime.
pub fn system(instructions: &str) -> String {
    if instructions.trim().is_empty() {
        RUNTIME.to_owned()
    } else {
        format!("{}\n\n{RUNTIME}", instructions.trim_end())
    }
}

/// The message that begins a turn. `hot_state`: one line about what is known of the moment.
pub fn observe(turn: i64, now: Timestamp, briefing: &Briefing, hot_state: Option<String>) -> String {
    let mut text = format!("Turn {turn}, {}: {}.", clock::text(now), briefing.cause);
    for note in &briefing.notes {
        text.push_str("\nNote: ");
        text.push_str(note);
        text.push('.');
    }
    if let Some(line) = hot_state {
        text.push('\n');
        text.push_str(&line);
        text.push('.');
    }
    text.push_str("\nObserve, think, act.");
    text
}
