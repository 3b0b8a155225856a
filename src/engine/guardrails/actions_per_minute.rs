//! `guardrails.actionsPerMinute`: counts the runs of tools with side effects in any 60 seconds, each from the moment it
//! is sent; a repeat of a run that a restart cut is no new one. At the limit the loop pauses before the next one until
//! the oldest of them is 60 seconds old, and by nothing else.

use jiff::{SignedDuration, Timestamp};

use super::{Guardrail, TrippedGuardrail};
use crate::api::status::PauseReason;
use crate::engine::resources::ResourceTracker;
use crate::engine::settings::EngineSettings;

/// The longest that it holds: the minute, and a piece of it.
pub const LONGEST: SignedDuration = SignedDuration::from_secs(61);

/// The limit.
pub struct ActionsPerMinute;

impl Guardrail for ActionsPerMinute {
    fn before_action(
        &self,
        settings: &EngineSettings,
        used: &ResourceTracker,
        now: Timestamp,
    ) -> Option<TrippedGuardrail> {
        let limit = settings.actions();
        let room_at = used.room_at(limit, 1, now)?;
        Some(TrippedGuardrail {
            reason: PauseReason::ActionsPerMinute,
            wait: room_at.duration_since(now),
            message: format!(
                "{} tool runs with side effects in 60 s reached guardrails.actionsPerMinute; the next one waits until \
                 one of them is 60 s old. Raise the limit, or declare tools that only look with effect: Read",
                used.used(limit, now)
            ),
        })
    }
}
