//! The report of the worker about its loop, from the engine's view.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::api::goal::{CriterionStatus, GoalStatus};
use crate::api::status::{Gate, LastError, UntrustedContent};
use crate::api::task::Activation;
use crate::engine::machine::LoopView;
use crate::engine::tasks::EndedTask;
use crate::engine::{GoalView, OpenGate};
use crate::link::durations::LoopDurations;
use crate::link::messages::{DetectedLoop, HeldReason, LoopReport, ModelReport};
use crate::support::text::truncate_bytes;

/// Maximum length of an error message in bytes.
const MAX_MESSAGE: usize = 1024;

#[must_use]
pub fn from_view(view: LoopView) -> LoopReport {
    LoopReport {
        state: view.state,
        reasons: view
            .reasons
            .into_iter()
            .map(|held| HeldReason {
                reason: held.reason,
                until: held.until,
                message: held.message,
            })
            .collect(),
        since: view.since,
        resumes_at: view.resumes_at,
        wake: view.wake,
        outcome: view.outcome,
        turn: view.turn,
        gates: view.gates.into_iter().map(gate).collect(),
        untrusted_content: view.untrusted.map(|content| UntrustedContent {
            since: Time(content.since),
            source: content.source,
        }),
        recent_activations: view.recent_tasks.into_iter().map(activation).collect(),
        waiting_tasks: view.waiting_tasks.try_into().unwrap_or(i64::MAX),
        counts: view.counts,
        consecutive_errors: view.consecutive_errors.try_into().unwrap_or(i32::MAX),
        consecutive_turns: view.consecutive_turns.try_into().unwrap_or(i32::MAX),
        handled: view.handled,
        last_error: view
            .last_error
            .map(|(at, failure)| error(at, failure.kind.as_ref(), failure.message)),
        detected: view.detected.map(|detected| DetectedLoop {
            sign: detected.sign,
            message: detected.message,
        }),
        goal: view.goal.map(goal),
        light_model: view.light_model.map(|failure| ModelReport {
            failure: Some(failure.kind),
            message: failure.message,
        }),
        sensors: Vec::new(),
        durations: LoopDurations::default(),
    }
}

fn goal(view: GoalView) -> GoalStatus {
    let criteria = view.criteria.into_iter();
    GoalStatus {
        progress_percent: view.progress.percent.into(),
        progress_source: view.progress.source,
        steps: view.steps.try_into().unwrap_or(i32::MAX),
        criteria: criteria.map(|(name, met)| CriterionStatus { name, met }).collect(),
        artifacts: view.artifacts,
        last_confidence_percent: view.last_confidence.map(Into::into),
        started_at: view.started_at.map(Time),
        ended_at: view.ended_at.map(Time),
        usage: view.usage,
        end: view.end,
    }
}

fn gate(open: OpenGate) -> Gate {
    let OpenGate {
        gate,
        tool,
        arguments,
        because_of,
    } = open;
    Gate {
        id: gate.id,
        kind: gate.kind,
        tool,
        arguments_hash: arguments,
        opened_at: Time(gate.opened_at),
        expires_at: gate.expires_at.map(Time),
        untrusted_content_source: because_of,
    }
}

fn activation(task: EndedTask) -> Activation {
    Activation {
        id: task.id,
        kind: task.kind,
        started_at: Time(task.started_at),
        completed_at: Time(task.completed_at),
        outcome: task.outcome,
        reason: task.reason,
        iterations: task.iterations,
        tokens: task.tokens.try_into().unwrap_or(i64::MAX),
        cost_micro_usd: task.cost,
    }
}

/// Builds the error for the status, with its message truncated to [`MAX_MESSAGE`] bytes.
#[must_use]
pub fn error(at: Timestamp, kind: &str, mut message: String) -> LastError {
    truncate_bytes(&mut message, MAX_MESSAGE);
    LastError {
        at: Time(at),
        kind: kind.into(),
        message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_message_is_cut_at_1_kib_between_characters() {
        let cut = error(Timestamp::UNIX_EPOCH, "Timeout", format!("x{}", "ä".repeat(600)));
        assert_eq!(cut.message.len(), 1023);
        assert_eq!(
            error(Timestamp::UNIX_EPOCH, "Timeout", "y".repeat(1024)).message.len(),
            1024
        );
    }
}
