//! Traces of Agents: the ids and spans of turns, the `OTEL_*` variables, and the export over OTLP/HTTP.
//!
//! A turn is one trace. The ids of its spans are hashes of names that the journal has anyway, so the worker and the
//! gateway know them without asking each other, and a restarted process continues the trace. Spans hold names, numbers
//! and outcomes, never a text of a prompt, an answer, an argument or a result. Exporting is best effort: it never blocks
//! its callers, and its memory is bounded.

mod exporter;
mod ids;
mod sampler;
mod settings;
mod spans;
mod turns;

pub use exporter::{SpanExport, SpanSink, decode, encode};
pub use ids::{TurnName, turn_of};
pub use opentelemetry_proto::tonic::trace::v1::Span;
pub use settings::{PASSED_VARIABLES, SettingsProblem, TraceSettings};
pub use spans::{AgentIdentity, CallSpan, TokenUsage};
pub use turns::{TurnFact, TurnTracer};
