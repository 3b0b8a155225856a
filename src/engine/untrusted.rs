//! Untrusted content: what others have written that the model has been shown, and that may contain instructions to it.
//!
//! Owns since when the conversation of a loop has untrusted content, and whose it was first. Decides nothing: which calls then
//! need an approval is decided with their admission.
//!
//! What a model has read can be repeated by all that it writes later, also by its own summaries. So everything from the first
//! untrusted content on counts as untrusted, and a part of it that leaves the conversation with a summary or a digest has not
//! left. Only a failed turn ends this, if its messages are taken out of the conversation and the first untrusted content is
//! among them. Neither time, nor a sleep, a restart, an edit or an approval does.

use std::ops::Range;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::machine::Engine;
use super::tools::batch::ToolRunPlan;

/// The untrusted content of a conversation.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct UntrustedSource {
    /// When the first of it came into the conversation.
    pub since: Timestamp,
    /// Its source: `server/<name>`, or the event of a Sensor, such as `sensor/prices`.
    pub source: String,
    /// How many messages of the transcript are older.
    after: usize,
    /// A part has left the transcript, and may remain in a summary, a digest or the answer of a heartbeat.
    remains: bool,
}

/// Whether the conversation has untrusted content.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(transparent)]
pub struct ContentTrust {
    untrusted: Option<UntrustedSource>,
}

impl ContentTrust {
    pub fn untrusted(&self) -> Option<&UntrustedSource> {
        self.untrusted.as_ref()
    }

    /// The untrusted content that the model had been shown when the transcript had `messages` messages.
    pub fn untrusted_before(&self, messages: usize) -> Option<&UntrustedSource> {
        self.untrusted().filter(|content| content.after < messages)
    }

    /// Untrusted content is, or will be, the message after the first `after` messages of the transcript, or precedes it in the
    /// prompt.
    pub fn add(&mut self, after: usize, source: String, at: Timestamp) {
        match &mut self.untrusted {
            Some(known) => known.after = known.after.min(after),
            None => {
                self.untrusted = Some(UntrustedSource {
                    since: at,
                    source,
                    after,
                    remains: false,
                });
            }
        }
    }

    /// These messages have left the transcript, with a summary or a digest.
    pub fn removed(&mut self, range: &Range<usize>) {
        let Some(known) = &mut self.untrusted else {
            return;
        };
        if range.end <= known.after {
            known.after -= range.len();
        } else {
            known.after = known.after.min(range.start);
            known.remains |= !range.is_empty();
        }
    }

    /// The newest messages have left the conversation, and `messages` are left.
    pub fn retracted(&mut self, messages: usize) {
        if self
            .untrusted
            .as_ref()
            .is_some_and(|known| !known.remains && known.after >= messages)
        {
            self.untrusted = None;
        }
    }

    /// What the model wrote last is kept elsewhere than in the transcript.
    pub fn kept_elsewhere(&mut self) {
        if let Some(known) = &mut self.untrusted {
            known.remains = true;
        }
    }
}

impl Engine {
    /// A run has its result, which joins the transcript behind those of the calls before it.
    pub(crate) fn note_result_source(&mut self, place: usize, plan: &ToolRunPlan, now: Timestamp) {
        if !plan.trusted {
            let after = self.transcript.len().saturating_add(place);
            self.state.trust.add(after, server_source(&plan.tool), now);
        }
    }

    /// A task begins whose text, which has just joined the transcript, may quote data from this source.
    pub(crate) fn note_untrusted_task(&mut self, source: String, now: Timestamp) {
        let after = self.transcript.len().saturating_sub(1);
        self.state.trust.add(after, source, now);
    }

    /// A prompt is sent whose state block shows notifications and values: from the answer on, the transcript has what the model
    /// makes of them.
    pub(crate) fn note_shown_sources(&mut self) {
        let shown = self
            .state
            .turn
            .as_ref()
            .and_then(|turn| self.state.inbox.first_source(turn.shown()));
        let source = shown.or_else(|| self.hot.first_untrusted());
        if let (Some(source), Some(now)) = (source.map(str::to_owned), self.state.life.last_now()) {
            self.state.trust.add(self.transcript.len(), source, now);
        }
    }
}

/// The server of a tool as a source of untrusted content.
pub fn server_source(tool: &str) -> String {
    let server = tool.split_once("__").map_or(tool, |(server, _)| server);
    format!("server/{server}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begun_after(after: usize) -> ContentTrust {
        let mut trust = ContentTrust::default();
        trust.add(after, "server/web".into(), Timestamp::UNIX_EPOCH);
        trust
    }

    #[test]
    fn content_leaves_with_the_messages_of_a_failed_turn_and_not_with_fewer() {
        let mut trust = begun_after(4);
        trust.retracted(5);
        assert!(trust.untrusted().is_some());
        trust.retracted(4);
        assert_eq!(trust.untrusted(), None);
    }

    #[test]
    fn content_that_left_with_a_summary_remains() {
        let mut trust = begun_after(4);
        trust.removed(&(0..5));
        trust.retracted(0);
        assert!(trust.untrusted().is_some());
    }

    #[test]
    fn older_messages_that_leave_move_its_place() {
        let mut trust = begun_after(4);
        trust.removed(&(1..4));
        trust.retracted(2);
        assert!(trust.untrusted().is_some());
        trust.retracted(1);
        assert_eq!(trust.untrusted(), None);
    }

    #[test]
    fn later_content_changes_neither_the_time_nor_the_source() {
        let mut trust = begun_after(4);
        let first = trust.clone();
        trust.add(9, "sensor/prices".into(), Timestamp::MAX);
        assert_eq!(trust, first);
    }
}
