//! Telemetry in OpenTelemetry's data model, and its export over OTLP/HTTP: the ids and spans of turns and reconciles, log
//! records, data points of metrics, and the `OTEL_*` variables.
//!
//! A turn is one trace. The ids of its spans are hashes of names that the journal has anyway, so the worker and the
//! gateway know them without asking each other, and a restarted process continues the trace. Spans hold names, numbers
//! and outcomes; a text of a prompt, an answer, an argument or a result only if the operator asks for it. Exporting is best
//! effort: it never blocks its callers, and its memory is bounded.

mod content;
mod exporter;
mod ids;
mod log_records;
mod metric_export;
mod metric_points;
mod queue;
mod received;
mod reconcile_spans;
mod record_sink;
mod resource;
mod sampler;
mod settings;
mod span_sink;
mod spans;
mod transport;
mod turns;
mod variables;

pub use content::{ContentAttribute, MAX_CONTENT};
pub use exporter::ExportTask;
pub use ids::{TurnName, turn_of};
pub use log_records::{LogFieldValue, LogLine, LogSink};
pub use metric_export::MetricWalk;
pub use metric_points::{HistogramPoint, MetricPoints, PointExemplar, PointHead, PointKind};
pub use opentelemetry_proto::tonic::trace::v1::Span;
pub use queue::DropCount;
pub use reconcile_spans::{ReconcileIds, ReconcileSpan};
pub use resource::TelemetryOrigin;
pub use sampler::TraceSampler;
pub use settings::{CONTROLLER_VARIABLES, LogSettings, MetricSettings, PASSED_VARIABLES, TraceSettings};
pub use span_sink::{SpanSink, encode};
pub use spans::{AgentIdentity, CallSpan, TokenUsage};
pub use turns::{TurnFact, TurnTracer};
pub use variables::SettingsProblem;
