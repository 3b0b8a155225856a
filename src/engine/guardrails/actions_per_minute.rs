//! `guardrails.actionsPerMinute`: counts tool runs with side effects in any 60 seconds, each from the moment it is
//! sent; the repeat of a run that a restart interrupted is not counted again. At the limit the loop pauses before the
//! next run. Clears only when the oldest of them is 60 seconds old.

use jiff::{SignedDuration, Timestamp};

use super::{Guardrail, TrippedGuardrail};
use crate::resources::ResourceTracker;
use crate::settings::EngineSettings;
use agentloop_api::status::PauseReason;
use agentloop_support::text::counted;

/// The longest pause: the minute, and one piece of it.
pub const MAX_HOLD: SignedDuration = SignedDuration::from_secs(61);

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
                "{} in 60 s reached guardrails.actionsPerMinute; the next one waits until \
                 the oldest is 60 s old. Raise the limit, or declare read-only tools with effect: Read",
                counted(
                    used.used(limit, now),
                    "tool run with side effects",
                    "tool runs with side effects"
                )
            ),
        })
    }
}
