//! `guardrails.rateLimits`: counts calls (each attempt separately), tokens of answers, and tool runs with side effects
//! or bytes that tools wrote and sent, in rolling windows. Without room the next call or run waits. Clears only when there is
//! room for it.
//! `loop.exhaustionPolicy` decides whether the turn of a call waits with it or ends; a run waits within its turn. Usage
//! that a server does not report is estimated high.

use jiff::Timestamp;

use super::{Guardrail, TrippedGuardrail};
use crate::resources::{ResourceLimit, ResourceTracker};
use crate::settings::EngineSettings;
use agentloop_api::agent::LimitedResource;
use agentloop_api::status::PauseReason;

pub struct RateLimits;

impl Guardrail for RateLimits {
    fn before_attempt(
        &self,
        settings: &EngineSettings,
        used: &ResourceTracker,
        now: Timestamp,
    ) -> Option<TrippedGuardrail> {
        let (wait, limit) = fullest(settings, used, now, |resource| !resource.is_of_tools())?;
        Some(TrippedGuardrail {
            reason: PauseReason::RateWindow,
            wait,
            message: format!(
                "guardrails.rateLimits: {limit} reached; the next call waits for room. Raise the amount, \
                 or instruct the agent to sleep longer"
            ),
        })
    }

    fn before_action(
        &self,
        settings: &EngineSettings,
        used: &ResourceTracker,
        now: Timestamp,
    ) -> Option<TrippedGuardrail> {
        let (wait, limit) = fullest(settings, used, now, LimitedResource::is_of_tools)?;
        let other_way = match limit.resource {
            LimitedResource::DiskWriteBytes => "instruct the agent to write less",
            LimitedResource::BandwidthBytes => "instruct the agent to send less",
            LimitedResource::Actions | LimitedResource::LLMCalls | LimitedResource::LLMTokens => {
                "declare read-only tools with effect: Read"
            }
        };
        Some(TrippedGuardrail {
            reason: PauseReason::RateWindow,
            wait,
            message: format!(
                "guardrails.rateLimits: {limit} reached; the next tool run with side effects waits for \
                 room. Raise the amount, or {other_way}"
            ),
        })
    }
}

/// The limit that has room last, among those that have none now.
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
