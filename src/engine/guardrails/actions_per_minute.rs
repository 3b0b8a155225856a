//! `guardrails.actionsPerMinute`: counts the runs of tools with side effects in any 60 seconds, each from the moment it
//! is sent; a repeat of a run that a restart cut is no new one. At the limit the loop pauses before the next one until
//! the oldest of them is 60 seconds old, and by nothing else.

use std::collections::VecDeque;

use jiff::{SignedDuration, Timestamp};

use super::{Guardrail, Trip};
use crate::api::status::PauseReason;
use crate::engine::settings::Settings;

/// The minute.
pub const MINUTE: SignedDuration = SignedDuration::from_secs(60);

/// The limit.
pub struct ActionsPerMinute;

impl Guardrail for ActionsPerMinute {
    fn before_action(&self, settings: &Settings, recent: &VecDeque<Timestamp>, now: Timestamp) -> Option<Trip> {
        let limit = usize::try_from(settings.actions_per_minute)
            .unwrap_or(usize::MAX)
            .max(1);
        let ages = recent.iter().map(|at| now.duration_since(*at));
        let young: Vec<SignedDuration> = ages.filter(|age| *age < MINUTE).collect();
        // Once this one is a minute old, one less than the limit is left; with a limit that was lowered more must go.
        let last_to_go = young.get(young.len().checked_sub(limit)?)?;
        Some(Trip {
            reason: PauseReason::ActionsPerMinute,
            wait: MINUTE - *last_to_go,
            message: format!(
                "{} tool runs with side effects in 60 s reached guardrails.actionsPerMinute; the next one waits until \
                 one of them is 60 s old. Raise the limit, or declare tools that only look with effect: Read",
                young.len()
            ),
        })
    }
}
