//! Where spans go: into the queue of the export if their trace is sampled, and between worker and gateway as a message.

use std::sync::Arc;

use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use prost::bytes::Bytes;

use crate::content::{MAX_CONTENT_OF_SPAN, remove_content};
use crate::exporter::BatchedSignal;
use crate::queue::{DropCount, DropQueue, QueuedRecord};
use crate::received::{MAX_BYTES, limit, limit_attributes};
use crate::record_sink::{RecordSink, SinkParts};
use crate::sampler::TraceSampler;
use crate::spans::resource_spans;

/// Encodes spans without a resource, which the gateway adds.
#[must_use]
pub fn encode(spans: Vec<Span>) -> Vec<u8> {
    let request = ExportTraceServiceRequest {
        resource_spans: vec![resource_spans(None, spans)],
    };
    request.encode_to_vec()
}

impl QueuedRecord for Span {
    fn bytes(&self) -> usize {
        size_of::<Self>() + 4 * self.encoded_len()
    }
}

pub(crate) struct SpansSignal;

impl BatchedSignal for SpansSignal {
    type Record = Span;
    const NAME: &'static str = "traces";

    fn encode(resource: &Resource, spans: Vec<Span>) -> Vec<u8> {
        let request = ExportTraceServiceRequest {
            resource_spans: vec![resource_spans(Some(resource.clone()), spans)],
        };
        request.encode_to_vec()
    }

    fn rejected(response: Bytes) -> Option<u64> {
        let partial = ExportTraceServiceResponse::decode(response).ok()?.partial_success?;
        u64::try_from(partial.rejected_spans).ok()
    }
}

/// Takes spans for export, or discards them.
#[derive(Clone, Debug, Default)]
pub struct SpanSink(RecordSink<Span, SpanRules>);

/// Which spans are exported, and with what.
#[derive(Clone, Copy, Debug)]
struct SpanRules {
    sampler: TraceSampler,
    has_content: bool,
}

impl SpanSink {
    pub(crate) fn new(queue: Arc<DropQueue<Span>>, sampler: TraceSampler, has_content: bool) -> Self {
        Self(RecordSink::new(queue, SpanRules { sampler, has_content }))
    }

    /// Whether spans are exported at all.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.0.is_on()
    }

    /// Whether the spans of this trace are exported.
    #[must_use]
    pub fn samples(&self, trace_id: &[u8]) -> bool {
        self.0
            .parts()
            .is_some_and(|parts| parts.settings.sampler.samples(trace_id))
    }

    /// Whether spans may have texts of prompts, answers, arguments and results.
    #[must_use]
    pub fn takes_content(&self) -> bool {
        self.is_on() && self.0.parts().is_some_and(|parts| parts.settings.has_content)
    }

    /// Queues a span, unless its trace is not sampled.
    pub fn push(&self, span: Span) {
        if let Some(parts) = self.0.parts() {
            push(parts, span);
        }
    }

    /// Queues the spans in the message of a worker, which has dropped `dropped` others. `false`: this is no message.
    #[must_use]
    pub fn push_received(&self, message: &[u8], dropped: usize) -> bool {
        let max = if self.takes_content() {
            MAX_BYTES + MAX_CONTENT_OF_SPAN
        } else {
            MAX_BYTES
        };
        self.0
            .push_received(message, (dropped, max), |parts, _, mut span: Span| {
                if !parts.settings.has_content {
                    remove_content(&mut span.attributes);
                }
                limit_attributes(&mut span.attributes);
                limit(&mut span.events);
                limit(&mut span.links);
                let events = span.events.iter_mut().map(|event| &mut event.attributes);
                let links = span.links.iter_mut().map(|link| &mut link.attributes);
                events.chain(links).for_each(limit_attributes);
                push(parts, span);
            })
    }

    /// Counts the spans that were not exported.
    #[must_use]
    pub fn dropped(&self) -> DropCount {
        self.0.dropped()
    }
}

fn push(parts: &SinkParts<Span, SpanRules>, span: Span) {
    if parts.settings.sampler.samples(&span.trace_id) {
        parts.queue.push(span);
    }
}
