//! Writes the events of all loops as JSON lines to standard output, as in docs/reference/events.md.
//!
//! Reads them from the log records of the workers; the span around a record identifies its loop.

use jiff::Timestamp;
use serde_json::{Map, Value, json};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use super::output::{line, stamp};
use crate::worker::events::TARGET;

/// Fields of an event that are written.
const SHOWN: [&str; 10] = [
    "seq", "event", "kind", "turn", "call", "run", "tool", "effect", "outcome", "note",
];
/// Fields of the span around a loop.
const WHOSE: [&str; 2] = ["namespace", "agent"];

struct EventLayer;

/// The layer that writes them.
#[must_use]
pub fn layer<S>() -> impl Layer<S> + Send + Sync
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let ours = |metadata: &Metadata<'_>| metadata.is_span() || metadata.target() == TARGET;
    EventLayer.with_filter(filter_fn(ours))
}

/// The loop of a span.
struct SpanOwner(Map<String, Value>);

impl<S> Layer<S> for EventLayer
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = FieldVisitor(&WHOSE, Map::new());
        attributes.record(&mut fields);
        if let Some(span) = context.span(id)
            && fields.1.len() == WHOSE.len()
        {
            span.extensions_mut().insert(SpanOwner(fields.1));
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = FieldVisitor(&SHOWN, Map::new());
        event.record(&mut fields);
        if !fields.1.contains_key("event") {
            return;
        }
        let mut shown = Map::new();
        shown.insert("ts".into(), json!(stamp(Timestamp::now())));
        shown.insert("type".into(), json!("event"));
        for span in context.event_scope(event).into_iter().flatten() {
            if let Some(SpanOwner(whose)) = span.extensions().get() {
                shown.extend(whose.clone());
            }
        }
        shown.extend(fields.1);
        // The code that shows the run notices when the output is closed.
        let _ = line(&mut std::io::stdout().lock(), &Value::Object(shown));
    }
}

/// The fields with these names.
struct FieldVisitor<'a>(&'a [&'static str], Map<String, Value>);

impl FieldVisitor<'_> {
    fn put(&mut self, field: &Field, value: Value) {
        if self.0.contains(&field.name()) {
            self.1.insert(field.name().into(), value);
        }
    }
}

impl Visit for FieldVisitor<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.put(field, format!("{value:?}").into());
    }
    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value.into());
    }
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value.into());
    }
}
