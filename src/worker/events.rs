//! Events: the lines of the journal under their public names, one line each on standard output.
//!
//! Derived only from the journal and logged after its commit: every event has a line in the journal. The number of the
//! line is the event's cursor. A worker that restarts after a kill logs the last batch again, because it may not have
//! logged all of it. Consumers deduplicate by the highest number that they have seen.

use crate::engine::RecordKind;

use crate::link::event_names;
use crate::link::events::EventLine;

use super::journal::JournalLine;
use super::turn_context::LineIds;

/// Target of the log lines that are events.
pub const TARGET: &str = module_path!();

/// Returns the event's name; docs/reference/events.md lists when each is emitted.
#[must_use]
pub fn name(kind: RecordKind) -> &'static str {
    match kind {
        RecordKind::Started => "loop:started",
        RecordKind::Transition => "loop:state_changed",
        RecordKind::TurnStarted => event_names::TURN_STARTED,
        RecordKind::TurnCompleted => event_names::TURN_COMPLETED,
        RecordKind::TurnFailed => event_names::TURN_FAILED,
        RecordKind::GuardrailTriggered => "autonomy:guardrail_triggered",
        RecordKind::LoopDetected => "autonomy:loop_detected",
        RecordKind::Notified => "autonomy:notification_pushed",
        RecordKind::NotificationDropped => "autonomy:notification_dropped",
        RecordKind::StepChecked => "goal:step_checked",
        RecordKind::QuestionFailed => "goal:question_failed",
        RecordKind::PrecheckSkipped => "autonomy:precheck_skipped",
        RecordKind::PrecheckFailed => "autonomy:precheck_failed",
        RecordKind::SensorUpdated => "autonomy:sensor_updated",
        RecordKind::SensorFailed => "autonomy:sensor_error",
        RecordKind::SignalScored => "autonomy:signal_scored",
        RecordKind::SignalUnscored => "autonomy:signal_unscored",
        RecordKind::HotStateRefused => "autonomy:hot_state_refused",
        RecordKind::ResultsCleared => event_names::RESULTS_CLEARED,
        RecordKind::HistoryDoubted => "autonomy:context_doubted",
        RecordKind::Trimmed => "autonomy:context_trimmed",
        RecordKind::Compacted => "autonomy:context_compacted",
        RecordKind::CallStarted => "model:call_started",
        RecordKind::CallAnswered => event_names::CALL_ANSWERED,
        RecordKind::CallFailed => "model:call_failed",
        RecordKind::ToolIntent => event_names::TOOL_INTENT,
        RecordKind::ToolOutcome => event_names::TOOL_OUTCOME,
        RecordKind::ToolDenied => event_names::TOOL_DENIED,
        RecordKind::ToolsPinned => "tools:pinned",
        RecordKind::ToolsChanged => "tools:changed",
        RecordKind::GateOpened => event_names::GATE_OPENED,
        RecordKind::GateResolved => "gate:resolved",
        RecordKind::TaskAccepted => event_names::TASK_ACCEPTED,
        RecordKind::TaskStarted => event_names::TASK_STARTED,
        RecordKind::TaskEnded => event_names::TASK_ENDED,
        RecordKind::RequestHandled => "loop:request_handled",
    }
}

#[must_use]
pub fn from_line(line: JournalLine, trace_id: Option<String>) -> EventLine {
    EventLine {
        trace_id,
        seq: line.seq,
        event: name(line.kind).to_owned(),
        at: line.at.to_string(),
        kind: line.kind.as_ref().to_owned(),
        member: line.member,
        turn: line.turn,
        call: line.call,
        run: line.run,
        tool: line.tool,
        effect: line.effect,
        outcome: line.outcome,
        model: line.usage.model,
        input_tokens: line.usage.input_tokens,
        output_tokens: line.usage.output_tokens,
        cost: line.usage.cost,
        note: line.note,
        messages: Vec::new(),
    }
}

pub fn log_line(line: &JournalLine, ids: Option<&LineIds>) {
    tracing::info!(
        seq = line.seq,
        event = name(line.kind),
        at = %line.at,
        kind = line.kind.as_ref(),
        turn = line.turn,
        call = line.call,
        run = line.run,
        tool = line.tool,
        effect = line.effect,
        outcome = line.outcome,
        model = line.usage.model,
        inputTokens = line.usage.input_tokens,
        outputTokens = line.usage.output_tokens,
        costMicroUSD = line.usage.cost,
        note = line.note,
        traceId = ids.map(|ids| ids.trace.as_str()),
        spanId = ids.map(|ids| ids.span.as_str()),
        "journal"
    );
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use strum::IntoEnumIterator;

    use serde_json::{Value, json};

    use super::*;
    use crate::link::events::is_event_name;
    use crate::worker::journal::LineUsage;

    #[test]
    fn the_event_of_an_answered_call_has_what_is_known_of_its_usage() {
        let event = |usage: LineUsage| {
            let line = JournalLine {
                usage,
                ..JournalLine::bare(RecordKind::CallAnswered, 1)
            };
            serde_json::to_value(from_line(line, None)).unwrap()
        };
        let known = event(LineUsage {
            model: Some("large".into()),
            input_tokens: Some(100),
            output_tokens: Some(10),
            cost: Some(0),
        });
        let found = ["model", "inputTokens", "outputTokens", "costMicroUSD"].map(|field| known[field].clone());
        assert_eq!(found, [json!("large"), json!(100), json!(10), json!(0)]);
        let unknown = event(LineUsage::default());
        let absent = ["model", "inputTokens", "outputTokens", "costMicroUSD"].map(|field| unknown.get(field));
        assert_eq!(absent, [None::<&Value>; 4]);
    }

    #[test]
    fn each_kind_of_line_has_a_name_of_its_own() {
        let names: HashSet<&str> = RecordKind::iter().map(name).collect();
        assert_eq!(names.len(), RecordKind::iter().count());
        let reference = include_str!("../../docs/reference/events.md");
        for name in names {
            assert!(is_event_name(name), "the controller would replace the name {name}");
            assert!(
                reference.contains(&format!("| `{name}` |")),
                "docs/reference/events.md has no {name}"
            );
        }
    }
}
