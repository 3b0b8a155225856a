//! The settings of the loops under test.

use jiff::SignedDuration;

use super::{detection, seconds};
use crate::guardrails::active_hours::ActiveHours;
use crate::settings::{EngineSettings, ModeSettings};
use agentloop_api::agent::{DetectionMode, ExhaustionPolicy, StructuredOutput};

pub(super) fn settings() -> EngineSettings {
    EngineSettings {
        mode: ModeSettings::Continuous,
        min_delay: SignedDuration::from_millis(100),
        max_delay: SignedDuration::from_secs(10),
        max_consecutive_errors: 5,
        max_sleep: SignedDuration::from_hours(1),
        heartbeat: None,
        max_consecutive_turns: 50,
        max_calls_per_turn: 25,
        idle_timeout: SignedDuration::from_secs(600),
        rate_limits: Vec::new(),
        exhaustion_policy: ExhaustionPolicy::Skip,
        active_hours: None,
        context_tokens: 128_000,
        max_output_tokens: 4096,
        history_tokens: 1_000_000,
        actions_per_minute: 10,
        max_consecutive_tool_failures: None,
        pre_check: None,
        light_output_tokens: None,
        light_context_tokens: 128_000,
        toolbox_image: None,
        hot_state: Vec::new(),
        max_result_bytes: 32 * 1024,
        memory_bytes: None,
        image_input: None,
        structured_output: StructuredOutput::Disabled,
        light_structured_output: StructuredOutput::Disabled,
        approval_timeout: seconds(3600),
        defers_approvals: false,
        // Tests of other rules repeat the same text.
        loop_detection: detection(DetectionMode::Disabled),
        spec: 0,
        // Tests of other rules use any text.
        quick_text_turns: 0,
        longest_text_delay: SignedDuration::ZERO,
    }
}

pub(super) fn hours(zone: &str, start: &str, end: &str) -> ActiveHours {
    ActiveHours::read(&agentloop_api::agent::ActiveHoursSpec {
        time_zone: zone.into(),
        days: Vec::new(),
        start: start.into(),
        end: end.into(),
    })
    .unwrap()
}
