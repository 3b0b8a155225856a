//! Traces of the controller's reconciles, and which of them the buckets of their durations show as exemplars.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use tracing::Span;

use super::exposition::Exemplar;
use super::metrics::RECONCILE_BUCKETS;
use crate::otlp::{ReconcileIds, ReconcileSpan, SpanSink};
use crate::support::hash::hex;

/// Each bucket, and the unbounded one, with the last trace that was exported.
pub(super) type BucketExemplars = [Option<Exemplar>; RECONCILE_BUCKETS.len() + 1];

/// The traces of all controllers of a process.
#[derive(Debug, Default)]
pub struct ReconcileTraces {
    sink: SpanSink,
    exemplars: Mutex<BTreeMap<&'static str, BucketExemplars>>,
}

impl ReconcileTraces {
    /// Traces that go there.
    #[must_use]
    pub fn new(sink: SpanSink) -> Self {
        Self {
            sink,
            exemplars: Mutex::default(),
        }
    }

    /// Whether the spans of this trace are exported, here and by gateways, which have the same sampler.
    #[must_use]
    pub fn samples(&self, trace_id: &[u8]) -> bool {
        self.sink.samples(trace_id)
    }

    /// The tracer of a controller.
    #[must_use]
    pub fn of(self: &Arc<Self>, controller: &'static str) -> ReconcileTracer {
        let traces = self.sink.is_on().then(|| Arc::clone(self));
        ReconcileTracer { traces, controller }
    }

    /// The exemplars of a controller's durations.
    pub(super) fn exemplars(&self, controller: &str) -> Option<BucketExemplars> {
        let exemplars = self.exemplars.lock().unwrap_or_else(PoisonError::into_inner);
        exemplars.get(controller).cloned()
    }
}

/// Traces the reconciles of one controller; the default traces none.
#[derive(Clone, Debug, Default)]
pub struct ReconcileTracer {
    traces: Option<Arc<ReconcileTraces>>,
    controller: &'static str,
}

/// A reconcile in progress.
#[derive(Debug)]
pub struct ReconcileTrace {
    ids: ReconcileIds,
    from: Timestamp,
}

/// How a reconcile has ended.
#[derive(Clone, Copy, Debug)]
pub struct ReconcileEnd<'a> {
    /// Namespace and name of the object.
    pub object: (&'a str, &'a str),
    /// Its result, by the values of the metric.
    pub result: &'a str,
    /// The kind of its error.
    pub error: Option<&'a str>,
    /// How long it took.
    pub took: Duration,
}

impl ReconcileTracer {
    /// A reconcile begins, now. `None`: traces are not exported.
    #[must_use]
    pub fn begin(&self, now: Timestamp) -> Option<ReconcileTrace> {
        self.traces.as_ref().map(|_| ReconcileTrace {
            ids: ReconcileIds::new(),
            from: now,
        })
    }

    /// The reconcile has ended.
    pub fn end(&self, trace: Option<ReconcileTrace>, end: ReconcileEnd<'_>) {
        let (Some(traces), Some(ReconcileTrace { ids, from })) = (&self.traces, trace) else {
            return;
        };
        let to = Timestamp::now();
        let span = ReconcileSpan {
            ids: &ids,
            controller: self.controller,
            object: end.object,
            time: (from, to),
            result: end.result,
            error: end.error,
        };
        traces.sink.push(span.to_span());
        if traces.sink.samples(&ids.trace_id) {
            let value = end.took.as_secs_f64();
            let bucket = RECONCILE_BUCKETS.iter().position(|bound| value <= *bound);
            let exemplar = Exemplar {
                trace_id: hex(&ids.trace_id),
                value,
                seconds: to.as_duration().as_secs_f64(),
            };
            let mut exemplars = traces.exemplars.lock().unwrap_or_else(PoisonError::into_inner);
            let of_controller = exemplars.entry(self.controller).or_default();
            of_controller[bucket.unwrap_or(RECONCILE_BUCKETS.len())] = Some(exemplar);
        }
    }
}

impl ReconcileTrace {
    /// Gives lines that are logged within it the ids of the trace.
    #[must_use]
    pub fn log_span(trace: Option<&Self>) -> Span {
        trace.map_or_else(Span::none, |trace| {
            let ids = &trace.ids;
            tracing::error_span!("reconcile", traceId = hex(&ids.trace_id), spanId = hex(&ids.span_id))
        })
    }
}
