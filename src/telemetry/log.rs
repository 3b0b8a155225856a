//! Logging: one JSON object per line on standard output.
//!
//! Owns the format (`ts`, `level`, `target`, `msg`, then the fields of the event and of its spans) and the filter.
//! Callers must never log a prompt, an answer or a secret.
//! What is exported over OTLP is the same lines (`log_export.rs`).

use std::fmt;

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Subscriber};
use tracing_subscriber::filter::Directive;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, JsonFields, Writer};
use tracing_subscriber::fmt::writer::BoxMakeWriter;
use tracing_subscriber::fmt::{FmtContext, FormattedFields};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::{LookupSpan, Scope, SpanRef};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry};

use super::log_export::LogExportLayer;
use crate::otlp::LogSink;

/// The environment variable with the filter, such as `info,agentloop=debug`.
const FILTER_ENV: &str = "RUST_LOG";

/// The fields with the ids of the trace and the span that a line belongs to, as hexadecimal digits.
pub(super) const TRACE_FIELD: &str = "traceId";
pub(super) const SPAN_FIELD: &str = "spanId";

/// The default filter of [`init_beside`]: there, a worker that starts before its gateway is not worth a warning.
const BESIDE: &str = "warn,agentloop::worker::gateway_client=error";

/// Initializes logging for the process. `RUST_LOG` sets the filter; the default, also for an invalid value, is `info`.
/// A second call does nothing.
pub fn init() {
    init_exported(&LogSink::default());
}

/// Like [`init`]. The sink gets each line that is written.
pub fn init_exported(sink: &LogSink) {
    let (filter, complaint) = filter(std::env::var(FILTER_ENV).ok().as_deref());
    let lines = tracing_subscriber::fmt::layer()
        .fmt_fields(JsonFields::new())
        .event_format(JsonLineFormat {
            now: jiff::Timestamp::now,
        });
    // The last layer, because it reads what the one before has made of the spans.
    let export = sink.is_on().then(|| LogExportLayer::new(sink.clone()));
    let registry = tracing_subscriber::registry().with(filter);
    let started = registry.with(lines).with(export).try_init();
    if let (Ok(()), Some(complaint)) = (started, complaint) {
        tracing::warn!("{complaint}");
    }
}

/// Initializes logging for a process that uses standard output for something else: writes to `writer` what `RUST_LOG`
/// selects, by default warnings and errors. `beside` is an additional layer that is not subject to this filter.
pub fn init_beside<L>(beside: L, writer: BoxMakeWriter)
where
    L: Layer<Registry> + Send + Sync,
{
    let chosen = std::env::var(FILTER_ENV).ok();
    let (filter, complaint) = filter(Some(chosen.as_deref().unwrap_or(BESIDE)));
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(writer)
        .fmt_fields(JsonFields::new())
        .event_format(JsonLineFormat {
            now: jiff::Timestamp::now,
        })
        .with_filter(filter);
    let started = tracing_subscriber::registry().with(beside).with(lines).try_init();
    if let (Ok(()), Some(complaint)) = (started, complaint) {
        tracing::warn!("{complaint}");
    }
}

/// Parses a filter; returns the default and a warning if it is invalid.
fn filter(text: Option<&str>) -> (EnvFilter, Option<String>) {
    let builder = || EnvFilter::builder().with_default_directive(LevelFilter::INFO.into());
    let (filter, complaint) = match builder().parse(text.unwrap_or_default()) {
        Ok(filter) => (filter, None),
        Err(error) => (
            builder().parse_lossy(""),
            Some(format!(
                "{FILTER_ENV} is invalid and ignored, using level info: {error}"
            )),
        ),
    };
    // The MCP library logs whole messages, with the arguments and results of tools.
    let silent = Directive::from(LevelFilter::OFF);
    (filter.add_directive("rmcp=off".parse().unwrap_or(silent)), complaint)
}

/// The log format. Tests replace the clock.
struct JsonLineFormat {
    now: fn() -> jiff::Timestamp,
}

impl<S, N> FormatEvent<S, N> for JsonLineFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let metadata = event.metadata();
        let spans = context.event_scope().into_iter().flat_map(Scope::from_root);
        let (message, fields) = parts_of::<S, N>(event, spans);
        let mut line = Map::new();
        line.insert("ts".into(), format!("{:.3}", (self.now)()).into());
        line.insert("level".into(), metadata.level().as_str().to_ascii_lowercase().into());
        line.insert("target".into(), metadata.target().into());
        line.insert("msg".into(), message.into());
        line.extend(fields);
        writeln!(writer, "{}", Value::Object(line))
    }
}

/// The message of an event, and its fields with those of the spans around it, of which the innermost wins. None has the
/// name of a fixed key. An empty id of a trace or span is none: a span cannot take back what it has recorded.
pub(super) fn parts_of<'a, S, N>(
    event: &Event<'_>,
    spans: impl Iterator<Item = SpanRef<'a, S>>,
) -> (String, Map<String, Value>)
where
    S: for<'lookup> LookupSpan<'lookup> + 'a,
    N: for<'fields> FormatFields<'fields> + 'static,
{
    let mut own = LogFields::default();
    event.record(&mut own);
    let mut fields = Map::new();
    for span in spans {
        let extensions = span.extensions();
        let formatted = extensions.get::<FormattedFields<N>>();
        if let Some(Ok(Value::Object(inherited))) =
            formatted.map(|text| serde_json::from_str(if text.is_empty() { "{}" } else { text.as_str() }))
        {
            fields.extend(inherited);
        }
    }
    fields.extend(own.rest);
    fields.retain(|key, value| match key.as_str() {
        "ts" | "level" | "target" | "msg" => false,
        TRACE_FIELD | SPAN_FIELD => value.as_str() != Some(""),
        _ => true,
    });
    (own.message, fields)
}

#[derive(Default)]
struct LogFields {
    message: String,
    rest: Map<String, Value>,
}

impl LogFields {
    fn put(&mut self, field: &Field, value: Value) {
        self.rest.insert(field.name().into(), value);
    }
}

impl Visit for LogFields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.message = format!("{value:?}");
        } else {
            self.put(field, format!("{value:?}").into());
        }
    }
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            self.message = value.into();
        } else {
            self.put(field, value.into());
        }
    }
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value.into());
    }
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value.into());
    }
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value.into());
    }
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, value.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::log_buffer::LogBuffer;

    fn lines(log: impl FnOnce()) -> Vec<Value> {
        lines_of(None, log)
    }

    fn lines_of(chosen: Option<&str>, log: impl FnOnce()) -> Vec<Value> {
        let buffer = LogBuffer::default();
        let writer = buffer.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_env_filter(filter(chosen).0)
            .fmt_fields(JsonFields::new())
            .event_format(JsonLineFormat {
                now: || jiff::Timestamp::UNIX_EPOCH,
            })
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, log);
        buffer
            .text()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    #[test]
    fn a_line_holds_time_level_target_message_and_fields() {
        let lines = lines(|| tracing::info!(target: "room", agent = "x", turn = 3, ok = true, "two\nlines"));
        let want = serde_json::json!({
            "ts": "1970-01-01T00:00:00.000Z", "level": "info", "target": "room", "msg": "two\nlines",
            "agent": "x", "turn": 3, "ok": true,
        });
        assert_eq!(lines, [want]);
    }

    #[test]
    fn fields_of_spans_are_inherited_and_the_innermost_wins() {
        let lines = lines(|| {
            let _outer = tracing::info_span!("outer", agent = "x", namespace = "n").entered();
            let _inner = tracing::info_span!("inner", agent = "y").entered();
            tracing::info!("hello");
        });
        assert_eq!((&lines[0]["agent"], &lines[0]["namespace"]), (&"y".into(), &"n".into()));
    }

    #[test]
    fn a_span_whose_trace_is_removed_adds_no_trace_to_its_lines() {
        let lines = lines(|| {
            let span = tracing::error_span!("loop", traceId = tracing::field::Empty).entered();
            span.record("traceId", "1a");
            tracing::info!("within a turn");
            span.record("traceId", "");
            tracing::info!("between turns");
        });
        assert_eq!(lines[0]["traceId"], "1a");
        assert_eq!(lines[1].get("traceId"), None);
    }

    #[test]
    fn fields_cannot_overwrite_the_fixed_keys() {
        let lines = lines(|| tracing::info!(target: "room", msg = "forged", level = "forged", "true"));
        assert_eq!((&lines[0]["msg"], &lines[0]["level"]), (&"true".into(), &"info".into()));
    }

    #[test]
    fn the_mcp_library_is_silent_whatever_is_chosen() {
        let log = || {
            tracing::error!(target: "rmcp::transport", "a result");
            tracing::info!("shown");
        };
        for chosen in [None, Some("trace"), Some("rmcp=trace,info")] {
            let lines = lines_of(chosen, log);
            assert_eq!(lines.len(), 1, "{chosen:?}");
            assert_eq!(lines[0]["msg"], "shown");
        }
    }

    #[test]
    fn debug_is_hidden_by_default_and_a_bad_filter_is_named() {
        assert!(lines(|| tracing::debug!("hidden")).is_empty());
        let (_, complaint) = filter(Some("info,=!x"));
        assert!(complaint.unwrap().starts_with("RUST_LOG is invalid"));
        assert!(filter(Some("debug,kube=warn")).1.is_none());
    }
}
