//! The export of the log over OTLP: each line that is written, with the same message and fields, and nothing more.
//!
//! Lines about the export itself, and those of the libraries that carry it, are not exported: each export would cause
//! another one.

use jiff::Timestamp;
use serde_json::Value;
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::fmt::format::JsonFields;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::{LookupSpan, Scope};

use super::log::{SPAN_FIELD, TRACE_FIELD, init_exported, parts_of};
use crate::otlp::{ExportTask, LogFieldValue, LogLine, LogSettings, LogSink, TelemetryOrigin};

/// The field with the target of a line of the crate `log`.
const LOG_TARGET: &str = "log.target";

/// Crates whose lines are not exported.
const SILENT: [&str; 9] = [
    "agentloop_otlp",
    "h2",
    "hyper",
    "hyper_util",
    "mio",
    "reqwest",
    "rustls",
    "tokio_util",
    "tower",
];

/// The log of a process that may export it.
#[derive(Clone, Debug, Default)]
pub struct ProcessLog {
    sink: LogSink,
    settings: Option<LogSettings>,
}

impl ProcessLog {
    /// Initializes logging. Lines wait in a bounded queue until [`ProcessLog::start`], if the `OTEL_*` variables ask for an
    /// export. Invalid ones are logged, and nothing is exported.
    #[must_use]
    pub fn init(component: &'static str) -> Self {
        let settings = LogSettings::from_env();
        let sink = match &settings {
            Ok(Some(settings)) => LogSink::new(component, settings),
            Ok(None) | Err(_) => LogSink::default(),
        };
        init_exported(&sink);
        let settings = settings.unwrap_or_else(|problem| {
            tracing::warn!("{problem}");
            None
        });
        Self { sink, settings }
    }

    /// Initializes logging for a process whose lines another one exports. They wait in a queue of this size, and are
    /// discarded once that one exports none.
    #[must_use]
    pub fn init_relayed(component: &'static str, capacity: usize) -> Self {
        let sink = LogSink::with_capacity(component, capacity);
        init_exported(&sink);
        Self { sink, settings: None }
    }

    /// The lines.
    #[must_use]
    pub fn sink(&self) -> LogSink {
        self.sink.clone()
    }

    /// Starts the export.
    #[must_use]
    pub fn start(self, origin: &TelemetryOrigin) -> (LogSink, ExportTask) {
        let task = match self.settings {
            Some(settings) => ExportTask::of_logs(settings, &self.sink, origin),
            None => ExportTask::none(),
        };
        (self.sink, task)
    }
}

/// Gives each line to a sink.
pub(super) struct LogExportLayer {
    sink: LogSink,
}

impl LogExportLayer {
    pub(super) fn new(sink: LogSink) -> Self {
        Self { sink }
    }
}

impl<S> Layer<S> for LogExportLayer
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let metadata = event.metadata();
        if !self.sink.is_on() {
            return;
        }
        let spans = context.event_scope(event).into_iter().flat_map(Scope::from_root);
        let (message, mut fields) = parts_of::<S, JsonFields>(event, spans);
        // Lines of libraries that use the crate `log` have another target, and theirs in a field.
        let target = fields.get(LOG_TARGET).and_then(Value::as_str);
        if is_silent(target.unwrap_or(metadata.target())) {
            return;
        }
        let mut id = |field| {
            fields
                .remove(field)
                .and_then(|id| bytes(id.as_str()?))
                .unwrap_or_default()
        };
        let trace = (id(TRACE_FIELD), id(SPAN_FIELD));
        let fields = fields
            .into_iter()
            .filter_map(|(key, value)| Some((key, field_value(value)?)));
        self.sink.push(LogLine {
            at: Timestamp::now(),
            level: *metadata.level(),
            target: metadata.target(),
            message,
            fields: fields.collect(),
            trace,
        });
    }
}

fn is_silent(target: &str) -> bool {
    let of = target.split_once("::").map_or(target, |(of, _)| of);
    SILENT.contains(&of)
}

/// Fields are primitives.
fn field_value(value: Value) -> Option<LogFieldValue> {
    Some(match value {
        Value::Bool(is) => LogFieldValue::Bool(is),
        Value::String(text) => LogFieldValue::Text(text),
        Value::Number(number) => match number.as_i64() {
            Some(number) => LogFieldValue::Int(number),
            None => LogFieldValue::Float(number.as_f64()?),
        },
        Value::Null | Value::Array(_) | Value::Object(_) => return None,
    })
}

/// The bytes that hexadecimal digits stand for.
pub(super) fn bytes(digits: &str) -> Option<Vec<u8>> {
    let pairs = digits.as_bytes().chunks(2);
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    (digits.len().is_multiple_of(2)).then(|| pairs.map(byte).collect())?
}

#[cfg(test)]
mod tests {

    use pretty_assertions::assert_eq;
    use tracing_subscriber::fmt::TestWriter;
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    /// How many lines are exported of those that `log` writes.
    fn exported(log: impl FnOnce()) -> String {
        let sink = LogSink::with_capacity("gateway", 99);
        let lines = tracing_subscriber::fmt::layer()
            .fmt_fields(JsonFields::new())
            .with_writer(TestWriter::new());
        let layers = tracing_subscriber::registry()
            .with(lines)
            .with(LogExportLayer::new(sink.clone()));
        tracing::subscriber::with_default(layers, log);
        format!("{sink:?}")
    }

    #[test]
    fn a_line_is_exported_with_its_fields_and_ids() {
        let exported = exported(|| {
            let _span = tracing::error_span!("loop", traceId = "0102", spanId = "03", agent = "x").entered();
            tracing::warn!(turn = 3, share = 0.5, is = true, nothing = Option::<&str>::None, "said");
        });
        for expected in [
            "StringValue(\"said\")",
            "key: \"agent\"",
            "IntValue(3)",
            "DoubleValue(0.5)",
            "BoolValue(true)",
            "trace_id: [1, 2]",
            "span_id: [3]",
            "severity_number: Warn",
        ] {
            assert!(exported.contains(expected), "{expected} is not in {exported}");
        }
        assert!(!exported.contains("traceId"), "{exported}");
    }

    #[test]
    fn lines_about_the_export_are_not_exported() {
        let exported = exported(|| {
            tracing::warn!(target: "agentloop_otlp::exporter", "canary");
            tracing::warn!(target: "hyper_util::client", "canary");
            tracing::warn!(target: "h2", "canary");
            tracing::warn!(log.target = "reqwest::connect", "canary");
            tracing::warn!(log.target = "other", "of another");
            tracing::warn!(target: "hyperbole", "said");
        });
        assert!(!exported.contains("canary"), "{exported}");
        assert!(
            exported.contains("said") && exported.contains("of another"),
            "{exported}"
        );
    }

    #[test]
    fn digits_are_read_in_pairs() {
        assert_eq!(bytes("00ff"), Some(vec![0, 255]));
        assert_eq!(bytes(""), Some(vec![]));
        for wrong in ["0", "0g", "+1é"] {
            assert_eq!(bytes(wrong), None, "{wrong}");
        }
    }
}
