//! `guardrails.rateLimits`: counts calls, each attempt for itself, and tokens of answers in rolling windows; without room
//! the next call waits. Clears when there is room for it, and by nothing else. `loop.exhaustionPolicy` says whether its
//! turn waits with it or ends. Usage that a server does not report is estimated high.

use jiff::Timestamp;

use super::{Guardrail, Trip};
use crate::api::status::PauseReason;
use crate::engine::resources::{Limit, Tracker};
use crate::engine::settings::Settings;

/// The limits.
pub struct RateLimits;

impl Guardrail for RateLimits {
    fn before_attempt(&self, settings: &Settings, used: &Tracker, now: Timestamp) -> Option<Trip> {
        let full = |limit: &Limit| Some((used.room_at(*limit, 1, now)?, *limit));
        let (room_at, limit) = settings.rate_limits.iter().filter_map(full).max_by_key(|(at, _)| *at)?;
        Some(Trip {
            reason: PauseReason::RateWindow,
            wait: room_at.duration_since(now),
            message: format!(
                "guardrails.rateLimits: {limit} are used up; the next call waits until there is room. Raise the amount, \
                 or tell the agent in its instructions to sleep longer"
            ),
        })
    }
}
