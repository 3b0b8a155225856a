//! `guardrails.maxConsecutiveToolFailures`: counts tool runs in a row that ended in failure; at the limit the loop pauses for
//! a cool-down. A successful run ends the streak. Denied calls, tools of the mode, refreshes of the hot state and
//! the calls of requests do not count.
//! Clears when the cool-down ends or by a resume request; it counts from zero then.

use super::{EndedToolRun, Guardrail, TrippedGuardrail};
use crate::{counters::StreakCounters, settings::EngineSettings};
use agentloop_api::pause::PauseReason;
use agentloop_support::text::counted;

const REASON: PauseReason = PauseReason::ConsecutiveToolFailures;

pub struct ToolFailures;

impl Guardrail for ToolFailures {
    fn after_tool_run(
        &self,
        settings: &EngineSettings,
        counters: &mut StreakCounters,
        run: &EndedToolRun<'_>,
    ) -> Option<TrippedGuardrail> {
        if !run.of_mode {
            return None;
        }
        if !run.has_failed() {
            counters.streaks.end(REASON);
            return None;
        }
        let failures = counters.streaks.add(REASON);
        let limit = settings.max_consecutive_tool_failures?;
        let wait = counters.streaks.cooldown_at(REASON, limit)?;
        Some(TrippedGuardrail {
            reason: REASON,
            wait,
            message: format!(
                "{} in a row failed and reached guardrails.maxConsecutiveToolFailures ({limit}), the last \
                 one of {} with the outcome {}. Check the server of the tool, or raise the limit. The loop resumes after a \
                 cool-down; the annotation agentloop.dev/resume ends it at once",
                counted(failures, "tool run", "tool runs"),
                run.tool,
                run.outcome.as_ref()
            ),
        })
    }
}
