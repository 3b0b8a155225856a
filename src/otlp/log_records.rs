//! Log records in OpenTelemetry's data model, and where they go: into the queue of the export, and between worker and
//! gateway as a message.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use opentelemetry_proto::tonic::collector::logs::v1::{ExportLogsServiceRequest, ExportLogsServiceResponse};
use opentelemetry_proto::tonic::common::v1::AnyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::logs::v1::{LogRecord, ResourceLogs, ScopeLogs, SeverityNumber};
use opentelemetry_proto::tonic::resource::v1::Resource;
use prost::Message;
use prost::bytes::Bytes;
use tracing::Level;

use crate::exporter::BatchedSignal;
use crate::queue::{DropCount, DropQueue, QueuedRecord};
use crate::received::{MAX_BYTES, MAX_ENTRIES, MAX_TEXT, cut, limit_attributes};
use crate::record_sink::RecordSink;
use crate::resource::{attribute, scope, text};
use crate::settings::LogSettings;

/// Attribute of the resource: which process of a pod a record is from.
const COMPONENT: &str = "agentloop.component";

/// Value of a field of a log line.
#[derive(Clone, Debug, PartialEq)]
pub enum LogFieldValue {
    /// A text.
    Text(String),
    /// A whole number.
    Int(i64),
    /// Another number.
    Float(f64),
    /// Yes or no.
    Bool(bool),
}

/// A line of the log.
#[derive(Clone, Debug, PartialEq)]
pub struct LogLine<'a> {
    /// When it was logged.
    pub at: Timestamp,
    /// Its level.
    pub level: Level,
    /// What has logged it: the path of a module.
    pub target: &'a str,
    /// The message.
    pub message: String,
    /// Its other fields, also those of the spans around it.
    pub fields: Vec<(String, LogFieldValue)>,
    /// The trace that it belongs to, and the span within it, each as bytes or empty.
    pub trace: (Vec<u8>, Vec<u8>),
}

/// A record, with the component and the target that it shares with others.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LogEntry {
    component: &'static str,
    target: String,
    record: LogRecord,
}

impl QueuedRecord for LogEntry {
    fn bytes(&self) -> usize {
        size_of::<Self>() + self.target.len() + 4 * self.record.encoded_len()
    }
}

impl LogEntry {
    /// The record of a line, whose message and fields are cut after [`MAX_TEXT`].
    fn new(component: &'static str, line: LogLine<'_>) -> Self {
        let nanoseconds = u64::try_from(line.at.as_nanosecond()).unwrap_or(0);
        let (trace_id, span_id) = line.trace;
        let message = cut(line.message, MAX_TEXT);
        let mut remaining = MAX_TEXT - message.len();
        let attributes = line.fields.into_iter().take(MAX_ENTRIES).map(|(key, value)| {
            let value = match value {
                LogFieldValue::Text(text) => {
                    let text = cut(text, remaining);
                    remaining -= text.len();
                    Value::StringValue(text)
                }
                LogFieldValue::Int(number) => Value::IntValue(number),
                LogFieldValue::Float(number) => Value::DoubleValue(number),
                LogFieldValue::Bool(is) => Value::BoolValue(is),
            };
            attribute(&key, value)
        });
        let record = LogRecord {
            time_unix_nano: nanoseconds,
            observed_time_unix_nano: nanoseconds,
            severity_number: severity(line.level).into(),
            severity_text: line.level.as_str().to_owned(),
            body: Some(AnyValue {
                value: Some(Value::StringValue(message)),
            }),
            attributes: attributes.collect(),
            trace_id,
            span_id,
            ..LogRecord::default()
        };
        Self {
            component,
            target: line.target.to_owned(),
            record,
        }
    }
}

/// The severity of a level, as the specification maps them.
fn severity(level: Level) -> SeverityNumber {
    match level {
        Level::TRACE => SeverityNumber::Trace,
        Level::DEBUG => SeverityNumber::Debug,
        Level::INFO => SeverityNumber::Info,
        Level::WARN => SeverityNumber::Warn,
        Level::ERROR => SeverityNumber::Error,
    }
}

/// Groups records by component and target. Without a resource, the receiver adds one.
fn encode(resource: Option<&Resource>, entries: Vec<LogEntry>) -> Vec<u8> {
    let mut groups: BTreeMap<&'static str, BTreeMap<String, Vec<LogRecord>>> = BTreeMap::new();
    for entry in entries {
        let targets = groups.entry(entry.component).or_default();
        targets.entry(entry.target).or_default().push(entry.record);
    }
    let of_component = |(component, targets): (_, BTreeMap<String, Vec<LogRecord>>)| ResourceLogs {
        resource: resource.map(|resource| {
            let mut resource = resource.clone();
            resource.attributes.push(text(COMPONENT, component));
            resource
        }),
        scope_logs: targets
            .into_iter()
            .map(|(target, log_records)| ScopeLogs {
                scope: Some(scope(target)),
                log_records,
                ..ScopeLogs::default()
            })
            .collect(),
        ..ResourceLogs::default()
    };
    let request = ExportLogsServiceRequest {
        resource_logs: groups.into_iter().map(of_component).collect(),
    };
    request.encode_to_vec()
}

pub(crate) struct LogsSignal;

impl BatchedSignal for LogsSignal {
    type Record = LogEntry;
    const NAME: &'static str = "logs";

    fn encode(resource: &Resource, entries: Vec<LogEntry>) -> Vec<u8> {
        encode(Some(resource), entries)
    }

    fn rejected(response: Bytes) -> Option<u64> {
        let partial = ExportLogsServiceResponse::decode(response).ok()?.partial_success?;
        u64::try_from(partial.rejected_log_records).ok()
    }
}

/// Takes log lines for export, or discards them. It may be filled before anything exports.
#[derive(Clone, Debug, Default)]
pub struct LogSink(RecordSink<LogEntry, ProcessName>);

/// The name of the process that a record is from.
type ProcessName = &'static str;

impl LogSink {
    /// A sink of a process with this name.
    #[must_use]
    pub fn new(component: &'static str, settings: &LogSettings) -> Self {
        Self::with_capacity(component, settings.batch.queue)
    }

    /// A sink that keeps `capacity` lines.
    #[must_use]
    pub fn with_capacity(component: &'static str, capacity: usize) -> Self {
        let queue = Arc::new(DropQueue::new(capacity));
        Self(RecordSink::new(queue, component))
    }

    pub(crate) fn queue(&self) -> Option<Arc<DropQueue<LogEntry>>> {
        self.0.parts().map(|parts| Arc::clone(&parts.queue))
    }

    /// Whether lines are exported, or may be.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.0.is_on()
    }

    /// Discards what is queued, and all that follows.
    pub fn close(&self) {
        if let Some(parts) = self.0.parts() {
            parts.queue.close();
        }
    }

    /// Queues a line.
    pub fn push(&self, line: LogLine<'_>) {
        if let Some(parts) = self.0.parts() {
            parts.queue.push(LogEntry::new(parts.settings, line));
        }
    }

    /// Queues the records in the message of a worker, which has dropped `dropped` others. `false`: this is no message.
    #[must_use]
    pub fn push_received(&self, message: &[u8], dropped: usize) -> bool {
        self.0
            .push_received(message, (dropped, MAX_BYTES), |parts, target, mut record: LogRecord| {
                // A worker's message is a text.
                let is_text = |body: &AnyValue| matches!(body.value, Some(Value::StringValue(_)));
                record.body = record.body.filter(is_text);
                limit_attributes(&mut record.attributes);
                parts.queue.push(LogEntry {
                    component: "worker",
                    target,
                    record,
                });
            })
    }

    /// Counts the lines that were not exported.
    #[must_use]
    pub fn dropped(&self) -> DropCount {
        self.0.dropped()
    }

    /// Waits for lines and returns them as a message with their number, for a process that exports. `None`: closing, and
    /// none are left.
    pub async fn next_message(&self, closing: &tokio_util::sync::CancellationToken) -> Option<(Vec<u8>, usize)> {
        const MAX_BATCH: usize = 128;
        const DELAY: std::time::Duration = std::time::Duration::from_millis(500);
        let parts = self.0.parts()?;
        let entries = parts.queue.next_batch(MAX_BATCH, DELAY, closing).await?;
        let count = entries.len();
        Some((encode(None, entries), count))
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry_proto::tonic::common::v1::InstrumentationScope;
    use pretty_assertions::assert_eq;
    use rstest::rstest;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::received::MAX_RECEIVED;

    fn line(level: Level, target: &str) -> LogLine<'_> {
        LogLine {
            at: Timestamp::from_second(1).unwrap(),
            level,
            target,
            message: "said".into(),
            fields: vec![
                ("name".into(), LogFieldValue::Text("a".into())),
                ("count".into(), LogFieldValue::Int(3)),
                ("share".into(), LogFieldValue::Float(0.5)),
                ("ok".into(), LogFieldValue::Bool(true)),
            ],
            trace: (vec![1; 16], vec![2; 8]),
        }
    }

    #[rstest]
    #[case(Level::TRACE, 1)]
    #[case(Level::DEBUG, 5)]
    #[case(Level::INFO, 9)]
    #[case(Level::WARN, 13)]
    #[case(Level::ERROR, 17)]
    fn levels_have_the_severity_of_the_specification(#[case] level: Level, #[case] number: i32) {
        let record = LogEntry::new("gateway", line(level, "t")).record;
        assert_eq!(record.severity_number, number);
        assert_eq!(record.severity_text, level.as_str());
    }

    #[test]
    fn a_record_has_the_message_the_fields_and_the_trace() {
        let entry = LogEntry::new("gateway", line(Level::INFO, "t"));
        let record = entry.record;
        assert_eq!(
            (record.time_unix_nano, record.observed_time_unix_nano),
            (1_000_000_000, 1_000_000_000)
        );
        assert_eq!(record.body.unwrap().value, Some(Value::StringValue("said".into())));
        let expected = [
            attribute("name", Value::StringValue("a".into())),
            attribute("count", Value::IntValue(3)),
            attribute("share", Value::DoubleValue(0.5)),
            attribute("ok", Value::BoolValue(true)),
        ];
        assert_eq!(record.attributes, expected);
        assert_eq!((record.trace_id, record.span_id), (vec![1; 16], vec![2; 8]));
    }

    #[tokio::test]
    async fn a_message_of_a_worker_is_read_back_and_grouped_by_process_and_target() {
        let worker = LogSink::with_capacity("worker", 9);
        worker.push(line(Level::INFO, "b"));
        worker.push(line(Level::WARN, "a"));
        worker.push(line(Level::ERROR, "b"));
        let closing = CancellationToken::new();
        closing.cancel();
        let (message, count) = worker.next_message(&closing).await.unwrap();
        assert_eq!(count, 3);
        let gateway = LogSink::with_capacity("gateway", 9);
        gateway.push(line(Level::INFO, "g"));
        assert!(gateway.push_received(&message, 2));
        assert!(!gateway.push_received(b"no message", 0));
        assert_eq!(gateway.dropped().get(), 2);
        let entries = gateway
            .queue()
            .unwrap()
            .next_batch(9, std::time::Duration::ZERO, &closing)
            .await;
        let request = LogsSignal::encode(&Resource::default(), entries.unwrap());
        let request = ExportLogsServiceRequest::decode(&*request).unwrap();
        let groups: Vec<_> = request
            .resource_logs
            .iter()
            .map(|logs| {
                let resource = &logs.resource.as_ref().unwrap().attributes;
                let targets = logs.scope_logs.iter().map(|logs| {
                    let scope = logs.scope.as_ref().unwrap().name.as_str();
                    (scope, logs.log_records.len())
                });
                (resource[0].clone(), targets.collect::<Vec<_>>())
            })
            .collect();
        let expected = [
            (text(COMPONENT, "gateway"), vec![("g", 1)]),
            (text(COMPONENT, "worker"), vec![("a", 1), ("b", 2)]),
        ];
        assert_eq!(groups, expected);
    }

    #[tokio::test]
    async fn a_worker_sends_as_many_records_as_fit_a_message() {
        let records = vec![LogRecord::default(); MAX_RECEIVED + 1];
        let message = |records: &[LogRecord]| {
            let scope_logs = vec![ScopeLogs {
                log_records: records.to_vec(),
                ..ScopeLogs::default()
            }];
            let resource_logs = vec![ResourceLogs {
                scope_logs,
                ..ResourceLogs::default()
            }];
            ExportLogsServiceRequest { resource_logs }.encode_to_vec()
        };
        let sink = LogSink::with_capacity("gateway", 9_999);
        assert!(sink.push_received(&message(&records[1..]), 0));
        assert_eq!(sink.dropped().get(), 0);
        assert!(sink.push_received(&message(&records), 0));
        assert_eq!(sink.dropped().get(), 1);
    }

    fn message(scope: InstrumentationScope, log_records: Vec<LogRecord>) -> Vec<u8> {
        let scope_logs = vec![ScopeLogs {
            scope: Some(scope),
            log_records,
            ..ScopeLogs::default()
        }];
        let resource_logs = vec![ResourceLogs {
            scope_logs,
            ..ResourceLogs::default()
        }];
        ExportLogsServiceRequest { resource_logs }.encode_to_vec()
    }

    /// Two million bytes of a message must not become gigabytes.
    #[tokio::test]
    async fn the_memory_used_by_a_message_is_bounded_whatever_it_contains() {
        let sink = LogSink::with_capacity("gateway", 9_999);
        let closing = CancellationToken::new();
        closing.cancel();
        let records = vec![LogRecord::default(); 500_000];
        assert!(sink.push_received(&message(scope("x".repeat(1_000_000)), records), 0));
        assert_eq!(sink.dropped().take(), 500_000 - 1_024);
        let queue = sink.queue().unwrap();
        let batch = queue
            .next_batch(9_999, std::time::Duration::ZERO, &closing)
            .await
            .unwrap();
        assert!(batch.iter().all(|entry| entry.target.len() == 256));

        let of_body = |bytes: usize| LogRecord {
            body: Some(AnyValue {
                value: Some(Value::StringValue("x".repeat(bytes))),
            }),
            ..LogRecord::default()
        };
        let records = vec![of_body(2 * MAX_TEXT - 8), of_body(2 * MAX_TEXT)];
        assert!(sink.push_received(&message(scope("t"), records), 0));
        assert_eq!(sink.dropped().take(), 1);
        let attributes = vec![attribute("", Value::BoolValue(true)); MAX_ENTRIES + 1];
        let lists = LogRecord {
            attributes,
            ..LogRecord::default()
        };
        assert!(sink.push_received(&message(scope("t"), vec![lists]), 0));
        let batch = queue.next_batch(9, std::time::Duration::ZERO, &closing).await.unwrap();
        assert_eq!(batch[1].record.attributes.len(), MAX_ENTRIES);
    }

    #[test]
    fn a_line_is_cut_to_what_a_gateway_accepts() {
        let long = |message: usize, field: usize| {
            let line = LogLine {
                message: "x".repeat(message),
                fields: vec![("a".into(), LogFieldValue::Text("y".repeat(field)))],
                ..line(Level::INFO, "t")
            };
            let record = LogEntry::new("worker", line).record;
            let text = |value: Option<AnyValue>| match value.unwrap().value {
                Some(Value::StringValue(text)) => text.len(),
                other => panic!("{other:?}"),
            };
            (text(record.body), text(record.attributes[0].value.clone()))
        };
        assert_eq!(long(MAX_TEXT - 1, 1), (MAX_TEXT - 1, 1));
        assert_eq!(long(MAX_TEXT - 1, 2), (MAX_TEXT - 1, 1));
        assert_eq!(long(MAX_TEXT + 1, 2), (MAX_TEXT, 0));
    }

    #[test]
    fn a_sink_that_is_off_reads_no_message() {
        let sink = LogSink::with_capacity("gateway", 9);
        sink.close();
        assert!(sink.push_received(b"no message", 3));
        assert!(LogSink::default().push_received(b"no message", 0));
        assert_eq!(sink.dropped().get(), 0);
    }

    #[test]
    fn a_closed_or_absent_sink_accepts_nothing() {
        let sink = LogSink::with_capacity("worker", 1);
        assert!(sink.is_on());
        sink.close();
        sink.push(line(Level::INFO, "t"));
        assert!(!sink.is_on());
        assert!(!LogSink::default().is_on());
        assert_eq!(LogSink::default().dropped().get(), 0);
    }
}
