//! Spans of turns, tool runs and waits, made from committed lines of the journal and sent to the gateway, which exports
//! them.
//!
//! Never waits and never fails: without room in the queue, spans are dropped. A restarted worker reads the lines of its
//! open turn again, so the spans of that turn are complete. Lines of the last batch of a killed worker give their spans
//! again, with the same ids. Texts are in spans only if the gateway says so, see [`SpanTexts`]; then the runs since the last
//! answer give their spans again, too.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::gateway_client::GatewayClient;
use super::journal::{self, Journal, JournalLine};
use super::span_texts::SpanTexts;
use crate::engine::RecordKind;
use crate::engine::tool::ToolRunId;
use crate::otlp::{AgentIdentity, DropCount, Span, TurnFact, TurnTracer};

/// Spans that wait for the gateway at most.
const QUEUE: usize = 512;
/// While this many wait, further spans get no texts, which bounds the memory.
const QUEUE_WITH_TEXTS: usize = 64;
/// Longest wait at exit for the gateway to take the last spans.
const SHUTDOWN_SPANS_TIMEOUT: Duration = Duration::from_secs(1);

/// The spans of one loop; the default makes none.
#[derive(Default)]
pub struct LoopSpans(Option<SpanParts>);

struct SpanParts {
    tracer: TurnTracer,
    queue: mpsc::Sender<Span>,
    dropped: DropCount,
    task: JoinHandle<()>,
    /// `None`: spans have no texts.
    texts: Option<SpanTexts>,
}

impl LoopSpans {
    /// Starts the sending task.
    #[must_use]
    pub fn start(gateway: &GatewayClient, agent: AgentIdentity) -> Self {
        let (queue, to_send) = mpsc::channel(QUEUE);
        let dropped = DropCount::default();
        Self(Some(SpanParts {
            tracer: TurnTracer::new(agent),
            queue,
            task: tokio::spawn(gateway.clone().run_spans(to_send, dropped.clone())),
            dropped,
            texts: None,
        }))
    }

    /// Like [`Self::start`], for spans with texts of prompts, answers, arguments and results.
    #[must_use]
    pub fn start_with_texts(gateway: &GatewayClient, agent: AgentIdentity) -> Self {
        let mut spans = Self::start(gateway, agent);
        if let Some(parts) = &mut spans.0 {
            parts.texts = Some(SpanTexts::default());
        }
        spans
    }

    /// Continues where an earlier process ended. `open`: the lines of the open turn, whose spans were sent before;
    /// `unlogged_lines`: those of the last batch of a killed process, whose spans may not have been. With texts, spans of
    /// the runs before it may have waited for a result in that batch: those since the last answer are sent again. The
    /// results of all earlier runs were committed before that answer.
    #[must_use]
    pub fn resume(mut self, (open, unlogged_lines): (&[JournalLine], &[JournalLine]), journal: &Journal) -> Self {
        let first = unlogged_lines.first().map_or(i64::MAX, |line| line.seq);
        let sent: Vec<&JournalLine> = open.iter().filter(|line| line.seq < first).collect();
        let answered = sent.iter().rposition(|line| line.kind == RecordKind::CallAnswered);
        let (before, since) = sent.split_at(answered.unwrap_or(0));
        if let Some(parts) = &mut self.0 {
            drop(parts.spans_of(before.iter().copied(), journal));
            let complete = parts.spans_of(since.iter().copied(), journal);
            if parts.texts.is_some() && !unlogged_lines.is_empty() {
                parts.send(complete);
            }
        }
        self.observe(unlogged_lines, journal);
        self
    }

    /// Takes lines that were committed to this journal.
    pub fn observe(&mut self, lines: &[JournalLine], journal: &Journal) {
        let Some(parts) = &mut self.0 else { return };
        let complete = parts.spans_of(lines, journal);
        parts.send(complete);
    }

    /// Waits until the gateway has taken what is queued, for at most [`SHUTDOWN_SPANS_TIMEOUT`].
    pub async fn finish(self) {
        let Some(SpanParts {
            queue,
            dropped,
            mut task,
            ..
        }) = self.0
        else {
            return;
        };
        drop(queue);
        if timeout(SHUTDOWN_SPANS_TIMEOUT, &mut task).await.is_err() {
            task.abort();
            tracing::info!("timed out sending the last spans to the gateway");
        }
        let dropped_count = dropped.get();
        if dropped_count > 0 {
            tracing::info!(
                dropped = dropped_count,
                "spans were dropped because the gateway did not take them in time"
            );
        }
    }
}

impl SpanParts {
    fn send(&self, complete: Vec<Span>) {
        for span in complete {
            if self.queue.try_send(span).is_err() {
                self.dropped.add(1);
            }
        }
    }

    /// The spans that are complete with these lines.
    fn spans_of<'a>(&mut self, lines: impl IntoIterator<Item = &'a JournalLine>, journal: &Journal) -> Vec<Span> {
        let mut complete = Vec::new();
        for line in lines {
            let ended = ended_with(line, &mut self.tracer);
            match &mut self.texts {
                Some(texts) => ended.into_iter().for_each(|span| texts.take(line, span)),
                None => complete.extend(ended),
            }
        }
        if let Some(texts) = &mut self.texts {
            let room = QUEUE_WITH_TEXTS.saturating_sub(QUEUE - self.queue.capacity());
            complete.extend(texts.complete(room, |turn| {
                journal.messages_of_turn(turn).unwrap_or_else(|error| {
                    tracing::warn!(%error, "failed to read the texts of spans; they are exported without");
                    Vec::new()
                })
            }));
        }
        complete
    }
}

/// The spans that end with a line.
fn ended_with(line: &JournalLine, tracer: &mut TurnTracer) -> Vec<Span> {
    let call = call_of(line);
    let Some(fact) = fact(line, call.as_deref()) else {
        return Vec::new();
    };
    tracer.observe((line.member, line.turn), line.at, fact)
}

/// The id that the messages have for the call of a line's run. `None`: it is of no run that the model requested.
fn call_of(line: &JournalLine) -> Option<String> {
    let run: ToolRunId = line.run.as_deref()?.parse().ok()?;
    (!run.is_refresh()).then(|| journal::call_id(run))
}

/// What a line means for spans. `call`: see [`call_of`].
fn fact<'a>(line: &'a JournalLine, call: Option<&'a str>) -> Option<TurnFact<'a>> {
    let note = line.note.as_str();
    let (run, tool) = (line.run.as_deref(), line.tool.as_deref().unwrap_or("other"));
    Some(match line.kind {
        RecordKind::TurnStarted => TurnFact::Started { kind: note },
        RecordKind::TurnCompleted => TurnFact::Completed { then: note },
        RecordKind::TurnFailed => TurnFact::Failed { kind: note },
        RecordKind::ToolIntent => TurnFact::RunStarted {
            run: run?,
            tool,
            effect: line.effect.as_deref().unwrap_or_default(),
        },
        RecordKind::ToolOutcome => TurnFact::RunEnded {
            run: run?,
            tool,
            call,
            outcome: line.outcome.as_deref().unwrap_or_default(),
        },
        RecordKind::ToolDenied => TurnFact::RunDenied { run: run?, why: note },
        RecordKind::GateOpened => TurnFact::GateOpened { note },
        RecordKind::GateResolved => TurnFact::GateResolved { note },
        RecordKind::Transition => TurnFact::StateChanged { note },
        RecordKind::Started
        | RecordKind::GuardrailTriggered
        | RecordKind::LoopDetected
        | RecordKind::Notified
        | RecordKind::NotificationDropped
        | RecordKind::QuestionFailed
        | RecordKind::PrecheckSkipped
        | RecordKind::PrecheckFailed
        | RecordKind::SensorUpdated
        | RecordKind::SensorFailed
        | RecordKind::SignalScored
        | RecordKind::SignalUnscored
        | RecordKind::HotStateRefused
        | RecordKind::ResultsCleared
        | RecordKind::HistoryDoubted
        | RecordKind::Trimmed
        | RecordKind::Compacted
        | RecordKind::CallStarted
        | RecordKind::CallAnswered
        | RecordKind::CallFailed
        | RecordKind::ToolsPinned
        | RecordKind::ToolsChanged
        | RecordKind::TaskAccepted
        | RecordKind::TaskStarted
        | RecordKind::TaskEnded
        | RecordKind::StepChecked
        | RecordKind::RequestHandled => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use jiff::Timestamp;
    use opentelemetry_proto::tonic::common::v1::any_value::Value;
    use pretty_assertions::assert_eq;

    use super::*;
    use crate::engine::message::call_id;
    use crate::worker::journal::JournalOwner;

    fn line(seq: i64, kind: RecordKind, note: &str) -> JournalLine {
        let of_run = matches!(kind, RecordKind::ToolIntent | RecordKind::ToolOutcome);
        JournalLine {
            seq,
            at: Timestamp::from_second(seq).unwrap(),
            run: of_run.then(|| "t3c1r1".into()),
            outcome: (kind == RecordKind::ToolOutcome).then(|| "Ok".into()),
            note: note.into(),
            ..JournalLine::bare(kind, 3)
        }
    }

    fn agent() -> AgentIdentity {
        AgentIdentity {
            namespace: "n".into(),
            name: "a".into(),
            uid: "uid".into(),
            provider: "openai",
            model: "m".into(),
        }
    }

    fn gateway() -> GatewayClient {
        let _ = rustls::crypto::ring::default_provider().install_default();
        GatewayClient::new(Path::new("/nonexistent")).unwrap()
    }

    /// What a tracer would send of the lines of a turn.
    fn spans(lines: &[JournalLine]) -> Vec<Span> {
        let mut tracer = TurnTracer::new(agent());
        lines.iter().flat_map(|line| ended_with(line, &mut tracer)).collect()
    }

    #[test]
    fn lines_become_spans_and_a_tool_without_a_name_is_another_one() {
        let lines = [
            line(1, RecordKind::TurnStarted, "heartbeat"),
            line(2, RecordKind::CallAnswered, "canary"),
            line(3, RecordKind::ToolIntent, ""),
            line(4, RecordKind::ToolOutcome, ""),
            line(5, RecordKind::TurnCompleted, "sleep"),
        ];
        let spans = spans(&lines);
        let names: Vec<_> = spans.iter().map(|span| span.name.as_str()).collect();
        assert_eq!(names, ["execute_tool other", "invoke_agent a"]);
        assert!(!format!("{spans:?}").contains("canary"));
    }

    /// The id of the call in the span of this run.
    fn id_of_call(run: &str) -> Option<String> {
        let outcome = JournalLine {
            run: Some(run.into()),
            ..line(1, RecordKind::ToolOutcome, "")
        };
        let spans = spans(&[outcome]);
        assert_eq!(spans.len(), 1);
        let mut attributes = spans[0].attributes.iter();
        let found = attributes.find(|pair| pair.key == "gen_ai.tool.call.id")?;
        let value = found.value.as_ref()?.value.as_ref()?;
        let Value::StringValue(id) = value else {
            panic!("{value:?}")
        };
        Some(id.clone())
    }

    #[test]
    fn a_run_has_the_id_that_the_messages_have_for_its_call() {
        assert_eq!(id_of_call("t3c1r1"), Some(call_id(3, 1, 0)));
        assert_eq!(id_of_call("t3c2r11"), Some(call_id(3, 2, 10)));
        assert_eq!(id_of_call("m1-t3c1r1"), Some(call_id(3, 1, 0)));
        assert_eq!(id_of_call("t3c0r1"), None, "the model did not request it");
    }

    fn journal(dir: &Path) -> Journal {
        let owner = JournalOwner {
            agent_uid: "uid".into(),
            pod_uid: "pod".into(),
            epoch: 1,
        };
        Journal::open(dir, &owner).unwrap().0
    }

    #[tokio::test]
    async fn a_restarted_worker_sends_the_spans_of_the_last_batch_again_and_with_texts_those_since_the_last_answer() {
        let open = [
            line(1, RecordKind::TurnStarted, ""),
            line(2, RecordKind::ToolIntent, ""),
            line(3, RecordKind::ToolOutcome, ""),
            line(4, RecordKind::TurnFailed, "Timeout"),
        ];
        let dir = tempfile::tempdir().unwrap();
        let journal = journal(dir.path());
        let queued_of = |spans: LoopSpans, lines: (&[JournalLine], &[JournalLine])| {
            let spans = spans.resume(lines, &journal);
            let parts = spans.0.unwrap();
            parts.task.abort();
            QUEUE - parts.queue.capacity()
        };
        let queued = |spans, unlogged_lines| queued_of(spans, (&open, unlogged_lines));
        let bare = || LoopSpans::start(&gateway(), agent());
        assert_eq!(queued(bare(), &[]), 0);
        assert_eq!(queued(bare(), &open[3..]), 1);
        assert_eq!(queued(bare(), &open[2..]), 2);
        // The run's span may have waited for the result that the last batch has.
        let with_texts = || LoopSpans::start_with_texts(&gateway(), agent());
        assert_eq!(queued(with_texts(), &[]), 0);
        assert_eq!(queued(with_texts(), &open[3..]), 2);
        let answer = line(4, RecordKind::CallAnswered, "");
        let sent = [&open[..3], &[answer]].concat();
        let last = [line(5, RecordKind::TurnFailed, "Timeout")];
        let again = queued_of(with_texts(), (&sent, &last));
        assert_eq!(again, 1, "its result was there before the answer");
    }

    #[tokio::test]
    async fn a_full_queue_drops_spans() {
        let dir = tempfile::tempdir().unwrap();
        let journal = journal(dir.path());
        let mut spans = LoopSpans::start(&gateway(), agent());
        let ended: Vec<_> = (1..)
            .map(|seq| line(seq, RecordKind::TurnCompleted, ""))
            .take(QUEUE + 1)
            .collect();
        let dropped = |spans: &LoopSpans| spans.0.as_ref().unwrap().dropped.get();
        // The sending task cannot run before an await.
        spans.observe(&ended[1..], &journal);
        assert_eq!(dropped(&spans), 0);
        spans.observe(&ended[..1], &journal);
        assert_eq!(dropped(&spans), 1);
    }
}
