//! The kinds of turns, and the rules in which they differ. Every branch on the kind of a turn asks one named rule.

use serde::{Deserialize, Serialize};

use crate::CallPurpose;

/// What a turn is for.
///
/// Stored as the flag `heartbeat` where it is one of the first two, so that journals from before there were kinds can be
/// read, and by its name otherwise.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(from = "StoredTurnKind", into = "StoredTurnKind")]
pub enum TurnKind {
    /// Part of the agent's own work.
    #[default]
    Own,
    /// A heartbeat, beside that work.
    Heartbeat,
    /// The whole work on one task.
    Task,
    /// The answer to a request, beside the agent's own work.
    Chat,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum StoredTurnKind {
    IsHeartbeat(bool),
    Named(NamedTurnKind),
}

#[derive(Serialize, Deserialize)]
enum NamedTurnKind {
    Task,
    Chat,
}

impl From<StoredTurnKind> for TurnKind {
    fn from(stored: StoredTurnKind) -> Self {
        match stored {
            StoredTurnKind::IsHeartbeat(false) => Self::Own,
            StoredTurnKind::IsHeartbeat(true) => Self::Heartbeat,
            StoredTurnKind::Named(NamedTurnKind::Task) => Self::Task,
            StoredTurnKind::Named(NamedTurnKind::Chat) => Self::Chat,
        }
    }
}

impl From<TurnKind> for StoredTurnKind {
    fn from(kind: TurnKind) -> Self {
        match kind {
            TurnKind::Own => Self::IsHeartbeat(false),
            TurnKind::Heartbeat => Self::IsHeartbeat(true),
            TurnKind::Task => Self::Named(NamedTurnKind::Task),
            TurnKind::Chat => Self::Named(NamedTurnKind::Chat),
        }
    }
}

/// The kinds of turns that modes begin. One that began in another mode on the same volume may end in any of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModeTurnKind {
    /// Part of the agent's own work.
    Own,
    /// A heartbeat, beside that work.
    Heartbeat,
    /// The whole work on one task.
    Task,
}

impl ModeTurnKind {
    pub const fn rules(self) -> TurnRules {
        match self {
            Self::Own => TurnKind::Own.rules(),
            Self::Heartbeat => TurnKind::Heartbeat.rules(),
            Self::Task => TurnKind::Task.rules(),
        }
    }
}

/// What holds for a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "independent rules, each asked by its name")]
pub struct TurnRules {
    /// The purpose of its calls.
    pub purpose: CallPurpose,
    /// The note of the record that begins it.
    pub note: &'static str,
    /// The mode begins it, sees its calls, and is notified of its end.
    pub is_of_mode: bool,
    /// Before it begins, the hot state is refreshed, and a pre-check may prevent it.
    pub is_prepared: bool,
    /// It has its own conversation, which leaves the transcript when it ends. It neither shows nor changes the
    /// history of the loop, and the agent's own next turn stays scheduled as it is.
    pub own_session: bool,
    /// Its text and its tool calls count towards the loop's streaks, and the idle timeout counts it.
    pub counts_as_turn: bool,
    /// It may call the tools of its mode, such as `yield`.
    pub offers_mode_tools: bool,
    /// It shows the waiting notifications.
    pub shows_notifications: bool,
    /// Its tool calls are inspected for loops.
    pub detects_loops: bool,
    /// What is too large for its prompt is summarized by a separate call.
    pub summarizes: bool,
    /// If rate limits leave no room for its next call, `loop.exhaustionPolicy` may end it.
    pub may_be_skipped: bool,
    /// It is the work on a task: limits of the task end it, and its end is the task's.
    pub works_on_task: bool,
    /// Its first message states the cause and the notes of the loop, and its own notes are shown in the next turn.
    pub has_briefing: bool,
}

impl TurnKind {
    /// `None`: it is beside the work of the mode, which does not know of it.
    pub const fn of_mode(self) -> Option<ModeTurnKind> {
        match self {
            Self::Own => Some(ModeTurnKind::Own),
            Self::Heartbeat => Some(ModeTurnKind::Heartbeat),
            Self::Task => Some(ModeTurnKind::Task),
            Self::Chat => None,
        }
    }

    pub const fn rules(self) -> TurnRules {
        match self {
            Self::Own => TurnRules {
                purpose: CallPurpose::Turn,
                note: "",
                is_of_mode: true,
                is_prepared: true,
                own_session: false,
                counts_as_turn: true,
                offers_mode_tools: true,
                shows_notifications: true,
                detects_loops: true,
                summarizes: true,
                may_be_skipped: true,
                works_on_task: false,
                has_briefing: true,
            },
            Self::Heartbeat => TurnRules {
                purpose: CallPurpose::Heartbeat,
                note: "heartbeat",
                is_of_mode: true,
                is_prepared: false,
                own_session: true,
                counts_as_turn: false,
                // It leaves the sleep as it is.
                offers_mode_tools: false,
                shows_notifications: false,
                // It repeats its calls by design.
                detects_loops: false,
                summarizes: false,
                may_be_skipped: true,
                works_on_task: false,
                has_briefing: false,
            },
            Self::Task => TurnRules {
                purpose: CallPurpose::Turn,
                note: "task",
                is_of_mode: true,
                is_prepared: true,
                own_session: true,
                counts_as_turn: true,
                offers_mode_tools: true,
                shows_notifications: true,
                detects_loops: true,
                summarizes: false,
                // Its requester waits for the response.
                may_be_skipped: false,
                works_on_task: true,
                has_briefing: false,
            },
            Self::Chat => TurnRules {
                purpose: CallPurpose::Chat,
                note: "chat",
                is_of_mode: false,
                is_prepared: false,
                own_session: true,
                counts_as_turn: false,
                // It leaves the sleep as it is.
                offers_mode_tools: false,
                shows_notifications: false,
                // What is detected has consequences for the loop.
                detects_loops: false,
                summarizes: false,
                // A person waits for the response.
                may_be_skipped: false,
                works_on_task: true,
                has_briefing: false,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::TurnKind;

    #[test]
    fn the_rules_state_which_kinds_are_of_the_mode() {
        for kind in [TurnKind::Own, TurnKind::Heartbeat, TurnKind::Task, TurnKind::Chat] {
            assert_eq!(kind.rules().is_of_mode, kind.of_mode().is_some());
        }
    }

    #[test]
    fn a_kind_is_stored_as_the_flag_of_earlier_journals_or_by_its_name() {
        for (kind, stored) in [
            (TurnKind::Own, json!(false)),
            (TurnKind::Heartbeat, json!(true)),
            (TurnKind::Task, json!("Task")),
            (TurnKind::Chat, json!("Chat")),
        ] {
            assert_eq!(serde_json::to_value(kind).unwrap(), stored);
            assert_eq!(serde_json::from_value::<TurnKind>(stored).unwrap(), kind);
        }
    }
}
