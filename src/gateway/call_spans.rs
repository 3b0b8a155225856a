//! Spans of model calls. The gateway makes them, since only it knows what was sent and what was billed.

use jiff::Timestamp;
use reqwest::Url;

use super::in_flight::InFlightCall;
use super::store::{CallUsage, StoredCallKey};
use crate::api::agent::ModelSpec;
use crate::api::failure::CallFailure;
use crate::ledger::bound::CallBill;
use crate::link::pod::PodConfig;
use crate::otlp::{AgentIdentity, CallSpan, SpanSink, TokenUsage, TurnName, turn_of};
use crate::provider::meter::AnswerMetadata;
use crate::support::hash::hex;
use crate::support::text::first_chars;
use crate::telemetry::agent_spans;

/// Longest name of a model that a server gives.
const MAX_NAME: usize = 200;

/// Makes the spans of one Agent's calls.
pub struct CallSpans {
    sink: SpanSink,
    has_ids: bool,
    agent: AgentIdentity,
    main: TracedModel,
    light: Option<TracedModel>,
}

/// A model as spans name it.
struct TracedModel {
    provider: &'static str,
    name: String,
    server: Option<(String, u16)>,
}

impl TracedModel {
    fn new(model: &ModelSpec) -> Self {
        let url = model.base_url.as_deref().and_then(|url| Url::parse(url).ok());
        Self {
            provider: agent_spans::provider(model.api),
            name: model.name.clone(),
            server: url.and_then(|url| Some((url.host_str()?.to_owned(), url.port_or_known_default()?))),
        }
    }
}

impl CallSpans {
    /// `has_ids`: whether lines of the log get the ids of traces.
    pub fn new(config: &PodConfig, sink: SpanSink, has_ids: bool) -> Self {
        let PodConfig {
            namespace,
            name,
            uid,
            spec,
            ..
        } = config;
        Self {
            sink,
            has_ids,
            agent: agent_spans::identity((namespace, name, uid), &spec.model),
            main: TracedModel::new(&spec.model),
            light: spec.light_model.as_ref().map(TracedModel::new),
        }
    }

    /// Gives lines that are logged about a call the ids of its trace and its span, if telemetry is exported.
    pub fn log_span(&self, call: &str) -> tracing::Span {
        let turn = turn_of(call).filter(|_| self.has_ids);
        turn.map_or_else(tracing::Span::none, |(member, turn)| {
            let turn = TurnName {
                agent: &self.agent.uid,
                member,
                turn,
            };
            let (trace, span) = (hex(&turn.trace_id()), hex(&turn.span_id(call)));
            tracing::error_span!("call", traceId = trace, spanId = span)
        })
    }

    /// A call that began at `from` has ended.
    pub fn ended(&self, call: StoredCallKey, from: Timestamp, flight: &InFlightCall, failure: Option<&CallFailure>) {
        if !self.sink.is_on() {
            return;
        }
        let light = self.light.as_ref().filter(|_| call.purpose.uses_light_model());
        let model = light.unwrap_or(&self.main);
        let answered = flight.answered();
        let usage = match flight.metered() {
            CallUsage::Billed(bill, _) => Some(tokens(&bill)),
            CallUsage::NotSent | CallUsage::Free | CallUsage::Unknown => None,
        };
        // An answer that began and broke off ended in an error, by the conventions.
        let broke_off = failure
            .filter(|_| answered != AnswerMetadata::default())
            .map(|_| "error");
        let request = flight.request();
        let span = CallSpan {
            call: call.id.to_string(),
            purpose: call.purpose.as_ref(),
            provider: model.provider,
            model: &model.name,
            max_tokens: request.and_then(|request| request.max_output),
            is_streamed: request.is_some_and(|request| request.is_streamed),
            answered: first_chars(&answered.model, MAX_NAME),
            answer_id: &answered.id,
            finish_reason: answered.finish_reason.or(broke_off),
            server: model.server.clone(),
            time: (from, Timestamp::now()),
            usage,
            cost: flight.cost(),
            error: failure.map(|failure| failure.kind.as_ref()),
        };
        if let Some(span) = span.to_span(&self.agent) {
            self.sink.push(span);
        }
    }
}

fn tokens(bill: &CallBill) -> TokenUsage {
    TokenUsage {
        input: bill.input,
        cache_read: bill.cache_read,
        cache_write: bill.cache_write.saturating_add(bill.cache_write_1h),
        output: bill.output,
        reasoning: bill.reasoning,
    }
}
