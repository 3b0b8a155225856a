//! Takes the events of all loops, as in docs/reference/events.md: writes them as JSON lines to standard output, and keeps
//! the newest for the page.
//!
//! Reads them from the log records of the workers; the span around a record identifies its loop.

use std::sync::Arc;

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
use crate::api::NamespacedName;
use crate::page::recent::RecentEvents;
use crate::worker::events::TARGET;

/// Fields of an event that are read.
const READ: [&str; 11] = [
    "seq", "event", "at", "kind", "turn", "call", "run", "tool", "effect", "outcome", "note",
];
/// The one of them that is not written: a line has the time at which it is written.
const UNWRITTEN: &str = "at";
/// Fields of the span around a loop.
const WHOSE: [&str; 2] = ["namespace", "agent"];

/// Where events go.
#[derive(Default)]
pub struct EventSinks {
    /// To standard output.
    pub print: bool,
    /// To the page.
    pub recent: Option<Arc<RecentEvents>>,
}

struct EventLayer(EventSinks);

/// The layer that takes them; `None` if they go nowhere.
#[must_use]
pub fn layer<S>(sinks: EventSinks) -> Option<impl Layer<S> + Send + Sync>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let ours = |metadata: &Metadata<'_>| metadata.is_span() || metadata.target() == TARGET;
    let is_used = sinks.print || sinks.recent.is_some();
    is_used.then(|| EventLayer(sinks).with_filter(filter_fn(ours)))
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
        let mut fields = FieldVisitor(&READ, Map::new());
        event.record(&mut fields);
        let mut fields = fields.1;
        if !fields.contains_key("event") {
            return;
        }
        let mut whose = Map::new();
        for span in context.event_scope(event).into_iter().flatten() {
            if let Some(SpanOwner(owner)) = span.extensions().get() {
                whose.extend(owner.clone());
            }
        }
        if let Some(recent) = &self.0.recent
            && let [Some(namespace), Some(agent)] = WHOSE.map(|name| whose.get(name).and_then(Value::as_str))
            && let Ok(line) = serde_json::from_value(Value::Object(fields.clone()))
        {
            recent.add(NamespacedName::new(namespace, agent), line);
        }
        if self.0.print {
            fields.shift_remove(UNWRITTEN);
            let mut shown = Map::new();
            shown.insert("ts".into(), json!(stamp(Timestamp::now())));
            shown.insert("type".into(), json!("event"));
            shown.extend(whose);
            shown.extend(fields);
            // The code that shows the run notices when the output is closed.
            let _ = line(&mut std::io::stdout().lock(), &Value::Object(shown));
        }
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
