//! The runtime's texts for the model. Only the newest message changes from turn to turn, so that everything before it
//! can be read from the provider's prompt cache.

use std::fmt::Write as _;

use jiff::Timestamp;

use crate::snapshot::TurnBriefing;
use agentloop_support::clock::rfc3339_seconds;

/// The cause of a turn that follows another.
pub const GOES_ON: &str = "the loop continues";
/// The cause of the first turn.
pub const STARTS: &str = "the loop starts";

/// A text of the system prompt that several loops can share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skill {
    pub name: String,
    pub text: String,
}

/// The system message: the instructions, the text `runtime` about how the loop works, and each skill under its name.
pub fn system_prompt(instructions: &str, runtime: &str, skills: &[Skill]) -> String {
    let mut text = instructions.trim_end().to_owned();
    if text.trim().is_empty() {
        text.clear();
    } else {
        text.push_str("\n\n");
    }
    text.push_str(runtime);
    for skill in skills {
        let _ = write!(text, "\n\n# Skill: {}\n\n{}", skill.name, skill.text.trim());
    }
    text
}

/// Truncates a text to `max` bytes, and marks it as truncated.
pub fn truncate(text: &str, max: usize) -> String {
    if text.len() <= max {
        return text.to_owned();
    }
    format!("{} [cut]", &text[..text.floor_char_boundary(max)])
}

/// Requests a summary of the messages before it, in at most `words` words. The headings are fixed, since each summary
/// also covers the previous one: without them the oldest facts are lost first.
pub fn summary_request(words: u64) -> String {
    format!(
        "[From the runtime, not from a person.] All of the conversation above leaves your context now, and what you write here \
         takes its place: it is all that you will know of it. Sum it up for yourself in at most {words} words, under these \
         headings:\n\
         Task: what you are to do and why, and how you set out to do it.\n\
         Done: what was done and what came of it.\n\
         Open: what is under way, and the next step.\n\
         Facts: names, ids, numbers, places and states that you need again, written out.\n\
         Promises: what you said that you would do, to whom and by when.\n\
         Failed: what was tried and did not work, so that you do not try it again.\n\
         Keep what still holds of the previous summary, if there is one. Write text only. Call no tool, and \
         do not continue the work yet."
    )
}

/// A summary, before the remaining messages.
pub fn summary(text: &str) -> String {
    format!(
        "[From the runtime, not from a person: the messages before these left your context. This is your own summary of \
         them.]\n{text}"
    )
}

/// The first message of a conversation that messages have left: the summary, and what is known of messages that it does
/// not cover.
pub fn head(summary: Option<String>, digest: Option<String>) -> Option<String> {
    let digest = digest.map(|text| format!("[From the runtime, not from a person.] {text}"));
    let parts: Vec<String> = summary.into_iter().chain(digest).collect();
    (!parts.is_empty()).then(|| parts.join("\n\n"))
}

/// The message that begins a turn. `hot_state`: one line about the hot state.
pub fn turn_opening(turn: i64, now: Timestamp, briefing: &TurnBriefing, hot_state: Option<String>) -> String {
    let mut text = format!("Turn {turn}, {}: {}.", rfc3339_seconds(now), briefing.cause());
    for note in briefing.notes() {
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
    use crate::modes::continuous::RUNTIME;

    #[test]
    fn skills_stand_after_the_instructions_under_their_names_and_in_their_order() {
        let skill = |name: &str, text: &str| Skill {
            name: name.into(),
            text: text.into(),
        };
        let text = system_prompt(
            "Be kind.\n",
            RUNTIME,
            &[skill("triage", "Look first.\n"), skill("answer", "Be short.")],
        );
        let skills = "\n\n# Skill: triage\n\nLook first.\n\n# Skill: answer\n\nBe short.";
        assert_eq!(text, format!("Be kind.\n\n{RUNTIME}{skills}"));
        assert_eq!(
            system_prompt("Be kind.\n", RUNTIME, &[]),
            format!("Be kind.\n\n{RUNTIME}")
        );
        assert_eq!(system_prompt(" ", RUNTIME, &[]), RUNTIME);
    }
}
