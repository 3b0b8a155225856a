//! Spans of the controller's reconciles: each is a trace of its own, of one span.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

use jiff::Timestamp;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;

use crate::resource::text;
use crate::spans::{fail, nanoseconds};

/// The ids of a trace of one span. They are random, unlike those of turns: nothing continues a reconcile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReconcileIds {
    /// Id of the trace.
    pub trace_id: Vec<u8>,
    /// Id of its span.
    pub span_id: Vec<u8>,
}

impl ReconcileIds {
    /// New ids.
    #[must_use]
    pub fn new() -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        // Its keys are random, and different in each call.
        let hash = RandomState::new();
        let part = |part: u64| hash.hash_one((number, part)).to_be_bytes();
        Self {
            trace_id: [part(0), part(1)].concat(),
            span_id: part(2).to_vec(),
        }
    }
}

impl Default for ReconcileIds {
    fn default() -> Self {
        Self::new()
    }
}

/// A reconcile that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReconcileSpan<'a> {
    /// Its ids.
    pub ids: &'a ReconcileIds,
    /// The controller, such as `agent`.
    pub controller: &'a str,
    /// Namespace and name of the object.
    pub object: (&'a str, &'a str),
    /// When it began and ended.
    pub time: (Timestamp, Timestamp),
    /// The result, as the metric `controller_runtime_reconcile_total` names it.
    pub result: &'a str,
    /// The kind of its error.
    pub error: Option<&'a str>,
}

impl ReconcileSpan<'_> {
    /// The span.
    #[must_use]
    pub fn to_span(&self) -> Span {
        let (namespace, name) = self.object;
        let mut span = Span {
            trace_id: self.ids.trace_id.clone(),
            span_id: self.ids.span_id.clone(),
            kind: SpanKind::Internal.into(),
            name: format!("reconcile {}", self.controller),
            start_time_unix_nano: nanoseconds(self.time.0),
            // A clock that was set back makes no span of negative length.
            end_time_unix_nano: nanoseconds(self.time.1.max(self.time.0)),
            attributes: vec![
                // Not k8s.namespace.name, which is the controller's in the resource.
                text("agentloop.object.namespace", namespace),
                text("agentloop.object.name", name),
                text("agentloop.reconcile.controller", self.controller),
                text("agentloop.reconcile.result", self.result),
            ],
            ..Span::default()
        };
        if let Some(error) = self.error {
            fail(&mut span, error);
        }
        span
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
    use pretty_assertions::assert_eq;

    use super::*;
    use crate::spans::tests::attributes;

    #[test]
    fn each_reconcile_has_ids_of_its_own() {
        let (one, two) = (ReconcileIds::new(), ReconcileIds::new());
        assert_eq!((one.trace_id.len(), one.span_id.len()), (16, 8));
        assert_ne!(one.trace_id, two.trace_id);
        assert_ne!(one.span_id, two.span_id);
    }

    #[test]
    fn a_reconcile_names_its_object_and_its_result() {
        let ids = ReconcileIds::new();
        let ended = ReconcileSpan {
            ids: &ids,
            controller: "agent",
            object: ("team-a", "watcher"),
            time: (Timestamp::UNIX_EPOCH, Timestamp::from_second(1).unwrap()),
            result: "error",
            error: Some("Timeout"),
        };
        let span = ended.to_span();
        assert_eq!(
            (span.name.as_str(), span.kind()),
            ("reconcile agent", SpanKind::Internal)
        );
        assert!(span.parent_span_id.is_empty());
        assert_eq!(
            (span.trace_id.clone(), span.span_id.clone()),
            (ids.trace_id.clone(), ids.span_id.clone())
        );
        assert_eq!((span.start_time_unix_nano, span.end_time_unix_nano), (0, 1_000_000_000));
        let expected = [
            ("agentloop.object.namespace", "team-a"),
            ("agentloop.object.name", "watcher"),
            ("agentloop.reconcile.controller", "agent"),
            ("agentloop.reconcile.result", "error"),
            ("error.type", "Timeout"),
        ];
        assert_eq!(
            attributes(&span.attributes),
            expected.map(|(key, value)| (key.into(), value.into()))
        );
        assert_eq!(span.status.unwrap().code(), StatusCode::Error);
    }
}
