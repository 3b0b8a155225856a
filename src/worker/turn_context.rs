//! Which trace the open turn is: the ids that log lines and events of the worker carry.
//!
//! The ids are derived from names, so they are the same whether spans are exported or not. Lines have them if the gateway
//! exports traces or logs.

use tracing::Span;
use tracing::field::Empty;

use super::journal::JournalLine;
use crate::engine::{RecordKind, ids};
use crate::otlp::TurnName;
use crate::support::hash::hex;

/// The trace of the open turn; the default has none.
#[derive(Debug)]
pub struct TurnContext {
    /// Uid of the Agent.
    agent: Option<String>,
    span: Span,
}

/// The ids of a trace and of a span within it, as hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LineIds {
    /// Id of the trace.
    pub trace: String,
    /// Id of the span.
    pub span: String,
}

impl Default for TurnContext {
    fn default() -> Self {
        Self {
            agent: None,
            span: Span::none(),
        }
    }
}

impl TurnContext {
    /// The context of a loop whose telemetry is exported. `open`: the lines of its newest turn.
    #[must_use]
    pub fn new(agent: &str, open: &[JournalLine]) -> Self {
        let context = Self {
            agent: Some(agent.to_owned()),
            // Of the highest level, so that no filter disables it.
            span: tracing::error_span!("turn", traceId = Empty, spanId = Empty),
        };
        for line in open {
            context.follow(line);
        }
        context
    }

    /// The span around everything that the loop does.
    #[must_use]
    pub fn span(&self) -> Span {
        self.span.clone()
    }

    /// Uid of the Agent, if its telemetry is exported.
    #[must_use]
    pub fn agent(&self) -> Option<&str> {
        self.agent.as_deref()
    }

    /// The ids that a line belongs to. `None`: nothing is exported, or it is before the first turn.
    #[must_use]
    pub fn ids(&self, line: &JournalLine) -> Option<LineIds> {
        line_ids(self.agent()?, line)
    }

    /// Takes a committed line: a turn of the Agent itself may begin or end with it.
    pub fn follow(&self, line: &JournalLine) {
        if line.member != ids::MAIN {
            return;
        }
        if line.kind == RecordKind::TurnStarted {
            if let Some(ids) = self.ids(line) {
                self.record(&ids.trace, &ids.span);
            }
        } else if matches!(line.kind, RecordKind::TurnCompleted | RecordKind::TurnFailed) {
            // What is recorded cannot be taken back: the log leaves out empty ids.
            self.record("", "");
        }
    }

    fn record(&self, trace: &str, span: &str) {
        self.span.record("traceId", trace);
        self.span.record("spanId", span);
    }
}

/// The ids of a line of this Agent: of the span of its run or its call, otherwise of its turn.
#[must_use]
pub fn line_ids(agent: &str, line: &JournalLine) -> Option<LineIds> {
    let turn = TurnName {
        agent,
        member: line.member,
        turn: line.turn,
    };
    let part = line.run.as_deref().or(line.call.as_deref());
    (line.turn > 0).then(|| LineIds {
        trace: hex(&turn.trace_id()),
        span: hex(&part.map_or_else(|| turn.root_id(), |part| turn.span_id(part))),
    })
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;
    use tracing_subscriber::fmt::format::JsonFields;

    use super::*;
    use crate::telemetry::log_buffer::LogBuffer;

    /// What a line of the log shows of the span around it.
    fn logged(context: impl FnOnce() -> TurnContext) -> String {
        let buffer = LogBuffer::default();
        let writer = buffer.clone();
        let subscriber = tracing_subscriber::fmt()
            .fmt_fields(JsonFields::new())
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            let context = context();
            context.span().in_scope(|| tracing::info!("said"));
        });
        buffer.text()
    }

    #[test]
    fn lines_within_a_turn_have_its_trace_also_after_a_restart() {
        let ids = line_ids("uid", &JournalLine::bare(RecordKind::TurnStarted, 3)).unwrap();
        let open = [
            JournalLine::bare(RecordKind::TurnStarted, 3),
            JournalLine::bare(RecordKind::CallStarted, 3),
        ];
        let within = logged(|| TurnContext::new("uid", &open));
        assert!(within.contains(&ids.trace) && within.contains(&ids.span), "{within}");
        let mut ended = open.to_vec();
        ended.push(JournalLine::bare(RecordKind::TurnFailed, 3));
        let between = logged(|| TurnContext::new("uid", &ended));
        assert!(!between.contains(&ids.trace), "{between}");
        let other = JournalLine {
            member: 1,
            ..JournalLine::bare(RecordKind::TurnStarted, 3)
        };
        let of_member = logged(|| TurnContext::new("uid", &[other]));
        assert!(!of_member.contains(&ids.trace[..4]), "{of_member}");
    }

    #[test]
    fn lines_before_the_first_turn_belong_to_no_trace() {
        assert_eq!(line_ids("uid", &JournalLine::bare(RecordKind::Started, 0)), None);
        assert_eq!(
            TurnContext::default().ids(&JournalLine::bare(RecordKind::TurnStarted, 1)),
            None
        );
    }

    #[test]
    fn the_span_of_a_line_is_that_of_its_run_or_call_or_turn() {
        let turn = TurnName {
            agent: "uid",
            member: 0,
            turn: 3,
        };
        let of_turn = JournalLine::bare(RecordKind::TurnStarted, 3);
        let of_call = JournalLine {
            call: Some("t3c1a1".into()),
            ..of_turn.clone()
        };
        let of_run = JournalLine {
            run: Some("t3c1r1".into()),
            ..of_call.clone()
        };
        let span = |line: &JournalLine| line_ids("uid", line).unwrap().span;
        assert_eq!(span(&of_turn), hex(&turn.root_id()));
        assert_eq!(span(&of_call), hex(&turn.span_id("t3c1a1")));
        assert_eq!(span(&of_run), hex(&turn.span_id("t3c1r1")));
    }
}
