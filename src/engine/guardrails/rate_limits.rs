//! `guardrails.rateLimits`: counts calls, each attempt for itself, tokens of answers, and tool runs with side effects in
//! rolling windows; without room the next call or run waits. Clears when there is room for it, and by nothing else.
//! `loop.exhaustionPolicy` says whether the turn of a call waits with it or ends; a run waits in its turn. Usage that a
//! server does not report is estimated high.

use jiff::Timestamp;

use super::{Guardrail, TrippedGuardrail};
use crate::api::agent::LimitedResource;
use crate::api::status::PauseReason;
use crate::engine::resources::{ResourceLimit, ResourceTracker};
use crate::engine::settings::EngineSettings;

/// The limits.
pub struct RateLimits;

impl Guardrail for RateLimits {
    fn before_attempt(
        &self,
        settings: &EngineSettings,
        used: &ResourceTracker,
        now: Timestamp,
    ) -> Option<TrippedGuardrail> {
        let (wait, limit) = fullest(settings, used, now, |resource| resource != LimitedResource::Actions)?;
        Some(TrippedGuardrail {
            reason: PauseReason::RateWindow,
            wait,
            message: format!(
                "guardrails.rateLimits: {limit} are used up; the next call waits until there is room. Raise the amount, \
                 or tell the agent in its instructions to sleep longer"
            ),
        })
    }

    fn before_action(
        &self,
        settings: &EngineSettings,
        used: &ResourceTracker,
        now: Timestamp,
    ) -> Option<TrippedGuardrail> {
        let (wait, limit) = fullest(settings, used, now, |resource| resource == LimitedResource::Actions)?;
        Some(TrippedGuardrail {
            reason: PauseReason::RateWindow,
            wait,
            message: format!(
                "guardrails.rateLimits: {limit} are used up; the next tool run with side effects waits until there is \
                 room. Raise the amount, or declare tools that only look with effect: Read"
            ),
        })
    }
}

/// The limit that has room last, of those that have none now.
fn fullest(
    settings: &EngineSettings,
    used: &ResourceTracker,
    now: Timestamp,
    of: impl Fn(LimitedResource) -> bool,
) -> Option<(jiff::SignedDuration, ResourceLimit)> {
    let full = |limit: &ResourceLimit| Some((used.room_at(*limit, 1, now)?, *limit));
    let limits = settings.rate_limits.iter().filter(|limit| of(limit.resource));
    let (room_at, limit) = limits.filter_map(full).max_by_key(|(at, _)| *at)?;
    Some((room_at.duration_since(now), limit))
}
