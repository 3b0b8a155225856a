//! The texts that the runtime itself says to the model. What changes from turn to turn is only in the newest message,
//! so that everything before it can be read from the server's cache.

use std::fmt::Write as _;

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

/// A text of the system prompt that several loops can share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skill {
    /// Its heading.
    pub name: String,
    /// Its text.
    pub text: String,
}

/// The system message: the instructions, the word about the runtime, and each skill under its name.
pub fn system(instructions: &str, skills: &[Skill]) -> String {
    let mut text = instructions.trim_end().to_owned();
    if text.trim().is_empty() {
        text.clear();
    } else {
        text.push_str("\n\n");
    }
    text.push_str(RUNTIME);
    for skill in skills {
        let _ = write!(text, "\n\n# Skill: {}\n\n{}", skill.name, skill.text.trim());
    }
    text
}

/// The message that begins a heartbeat. `last`: what the one before it came to.
pub fn heartbeat(turn: i64, now: Timestamp, prompt: &str, last: &str) -> String {
    let mut text = format!(
        "Turn {turn}, {}: your heartbeat, a turn of its own beside your other work. It ends with your first answer that \
         calls no tool.",
        clock::text(now)
    );
    if !last.is_empty() {
        text.push_str("\nWhat you said at the heartbeat before:\n");
        text.push_str(last);
    }
    text.push_str("\n\n");
    text.push_str(prompt);
    text
}

/// Asks for a summary of what is before it, in at most so many words.
pub fn summarise(words: u64) -> String {
    format!(
        "[From the runtime, not from a person.] All of the conversation above leaves your context now, and what you write \
         here takes its place: it is all that you will know of it. Sum it up for yourself in at most {words} words: what \
         you are to do and why, what was done and what came of it, what is under way, what you must not forget (names, \
         numbers, promises, what did not work). Write text only. Call no tool, and do not go on with the work yet."
    )
}

/// A summary, before the turns that are still there.
pub fn summary(text: &str) -> String {
    format!(
        "[From the runtime, not from a person: the turns before these left your context. This is your own summary of \
         them.]\n{text}"
    )
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skills_stand_after_the_instructions_under_their_names_and_in_their_order() {
        let skill = |name: &str, text: &str| Skill {
            name: name.into(),
            text: text.into(),
        };
        let text = system(
            "Be kind.\n",
            &[skill("triage", "Look first.\n"), skill("answer", "Be short.")],
        );
        let skills = "\n\n# Skill: triage\n\nLook first.\n\n# Skill: answer\n\nBe short.";
        assert_eq!(text, format!("Be kind.\n\n{RUNTIME}{skills}"));
        assert_eq!(system("Be kind.\n", &[]), format!("Be kind.\n\n{RUNTIME}"));
        assert_eq!(system(" ", &[]), RUNTIME);
    }
}
