//! Spans with the attributes of OpenTelemetry's conventions for generative AI, and how their parts are encoded.

use jiff::Timestamp;
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span, Status};

use crate::ids::{TurnName, turn_of};
use crate::resource::{boolean, int, scope, text, texts};

/// The Agent that spans belong to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentIdentity {
    /// Namespace of the Agent.
    pub namespace: String,
    /// Name of the Agent.
    pub name: String,
    /// Uid of the Agent.
    pub uid: String,
    /// The provider whose API its model has, by the names of the conventions.
    pub provider: &'static str,
    /// Name of its model.
    pub model: String,
}

/// Tokens as billed, in disjoint kinds; reasoning is a part of the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenUsage {
    /// Input that was neither read from nor written to a cache.
    pub input: i64,
    /// Input read from a cache.
    pub cache_read: i64,
    /// Input written to a cache.
    pub cache_write: i64,
    /// Output, including reasoning.
    pub output: i64,
    /// Output spent on reasoning.
    pub reasoning: i64,
}

/// One attempt at a model call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallSpan<'a> {
    /// Name of the call, such as `t12c1a1`.
    pub call: String,
    /// The purpose of the call.
    pub purpose: &'a str,
    /// The provider whose API the model has.
    pub provider: &'a str,
    /// The requested model.
    pub model: &'a str,
    /// Maximum number of output tokens that was asked for, if there is one.
    pub max_tokens: Option<u32>,
    /// Whether a streamed answer was asked for.
    pub is_streamed: bool,
    /// The model that answered; empty if it is not named.
    pub answered: &'a str,
    /// The id of the answer; empty if there is none.
    pub answer_id: &'a str,
    /// Why the answer ended.
    pub finish_reason: Option<&'static str>,
    /// Host and port of the server, if there is one.
    pub server: Option<(String, u16)>,
    /// When the request was made, and when it ended.
    pub time: (Timestamp, Timestamp),
    /// `None`: nothing was reported.
    pub usage: Option<TokenUsage>,
    /// Cost in micro-dollars, if it is known.
    pub cost: Option<i64>,
    /// The kind of its failure.
    pub error: Option<&'a str>,
}

impl CallSpan<'_> {
    /// The span `chat {model}`, a child of its turn. `None`: the name is not that of a call.
    #[must_use]
    pub fn to_span(&self, agent: &AgentIdentity) -> Option<Span> {
        let (member, number) = turn_of(&self.call)?;
        let turn = TurnName {
            agent: &agent.uid,
            member,
            turn: number,
        };
        let mut span = child(turn, &self.call, format!("chat {}", self.model), self.time);
        span.kind = SpanKind::Client.into();
        let attributes = &mut span.attributes;
        attributes.extend([
            text("gen_ai.operation.name", "chat"),
            text("gen_ai.provider.name", self.provider),
            text("gen_ai.request.model", self.model),
            text("gen_ai.agent.name", &agent.name),
            text("gen_ai.agent.id", &agent.uid),
            text("agentloop.call", &self.call),
            text("agentloop.call.purpose", self.purpose),
        ]);
        attributes.extend(self.max_tokens.map(|max| int("gen_ai.request.max_tokens", max.into())));
        // By the conventions, absent unless it is streamed.
        attributes.extend(self.is_streamed.then(|| boolean("gen_ai.request.stream", true)));
        for (key, value) in [
            ("gen_ai.response.model", self.answered),
            ("gen_ai.response.id", self.answer_id),
        ] {
            attributes.extend(
                Some(value)
                    .filter(|value| !value.is_empty())
                    .map(|value| text(key, value)),
            );
        }
        // One for each choice; requests for more than one are refused.
        let reason = self.finish_reason;
        attributes.extend(reason.map(|reason| texts("gen_ai.response.finish_reasons", [reason])));
        if let Some((host, port)) = &self.server {
            attributes.extend([text("server.address", host), int("server.port", i64::from(*port))]);
        }
        if let Some(usage) = self.usage {
            // By the conventions, the input includes what was cached.
            let input = usage
                .input
                .saturating_add(usage.cache_read)
                .saturating_add(usage.cache_write);
            attributes.extend([
                int("gen_ai.usage.input_tokens", input),
                int("gen_ai.usage.output_tokens", usage.output),
                int("gen_ai.usage.cache_read.input_tokens", usage.cache_read),
                int("gen_ai.usage.cache_write.input_tokens", usage.cache_write),
                int("gen_ai.usage.reasoning.output_tokens", usage.reasoning),
            ]);
        }
        attributes.extend(self.cost.map(|cost| int("agentloop.cost.micro_usd", cost)));
        if let Some(error) = self.error {
            fail(&mut span, error);
        }
        Some(span)
    }
}

/// A span within a turn, under a name that is unique there. It is internal unless the caller says otherwise.
pub(crate) fn child(turn: TurnName<'_>, unique: &str, name: String, time: (Timestamp, Timestamp)) -> Span {
    Span {
        trace_id: turn.trace_id(),
        span_id: turn.span_id(unique),
        parent_span_id: turn.root_id(),
        kind: SpanKind::Internal.into(),
        name,
        start_time_unix_nano: nanoseconds(time.0),
        // A clock that was set back makes no span of negative length.
        end_time_unix_nano: nanoseconds(time.1.max(time.0)),
        ..Span::default()
    }
}

/// Marks the span as failed. `kind` is one of few values, never a message.
pub(crate) fn fail(span: &mut Span, kind: &str) {
    span.attributes.push(text("error.type", kind));
    span.status = Some(Status {
        message: kind.to_owned(),
        code: StatusCode::Error.into(),
    });
}

pub(crate) fn nanoseconds(at: Timestamp) -> u64 {
    u64::try_from(at.as_nanosecond()).unwrap_or(0)
}

pub(crate) fn resource_spans(resource: Option<Resource>, spans: Vec<Span>) -> ResourceSpans {
    ResourceSpans {
        resource,
        scope_spans: vec![ScopeSpans {
            scope: Some(scope("agentloop")),
            spans,
            ..ScopeSpans::default()
        }],
        ..ResourceSpans::default()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use opentelemetry_proto::tonic::common::v1::any_value::Value;
    use opentelemetry_proto::tonic::common::v1::{AnyValue, ArrayValue, KeyValue};
    use pretty_assertions::assert_eq;

    use super::*;

    pub(crate) fn agent() -> AgentIdentity {
        AgentIdentity {
            namespace: "team-a".into(),
            name: "watcher".into(),
            uid: "uid".into(),
            provider: "openai",
            model: "m".into(),
        }
    }

    fn string(value: &AnyValue) -> &str {
        match &value.value {
            Some(Value::StringValue(text)) => text,
            other => panic!("{other:?}"),
        }
    }

    /// The attributes as text, in order.
    pub(crate) fn attributes(attributes: &[KeyValue]) -> Vec<(String, String)> {
        let value = |value: &KeyValue| match value.value.as_ref().and_then(|value| value.value.as_ref()) {
            Some(Value::StringValue(text)) => text.clone(),
            Some(Value::IntValue(number)) => number.to_string(),
            Some(Value::BoolValue(value)) => value.to_string(),
            Some(Value::ArrayValue(ArrayValue { values })) => {
                format!("{:?}", values.iter().map(string).collect::<Vec<_>>())
            }
            other => panic!("{other:?}"),
        };
        attributes.iter().map(|pair| (pair.key.clone(), value(pair))).collect()
    }

    fn call() -> CallSpan<'static> {
        CallSpan {
            call: "t12c1a2".into(),
            purpose: "Turn",
            provider: "openai",
            model: "m",
            max_tokens: Some(4096),
            is_streamed: true,
            answered: "m-2026",
            answer_id: "chatcmpl-1",
            finish_reason: Some("stop"),
            server: Some(("api.example.com".into(), 443)),
            time: (Timestamp::UNIX_EPOCH, "1970-01-01T00:00:02Z".parse().unwrap()),
            usage: Some(TokenUsage {
                input: 100,
                cache_read: 20,
                cache_write: 3,
                output: 9,
                reasoning: 4,
            }),
            cost: Some(7),
            error: None,
        }
    }

    #[test]
    fn a_call_has_the_attributes_of_the_conventions() {
        let span = call().to_span(&agent()).unwrap();
        let turn = TurnName {
            agent: "uid",
            member: 0,
            turn: 12,
        };
        assert_eq!(span.name, "chat m");
        assert_eq!(span.kind(), SpanKind::Client);
        assert_eq!((span.trace_id, span.parent_span_id), (turn.trace_id(), turn.root_id()));
        assert_eq!(span.span_id, turn.span_id("t12c1a2"));
        assert_eq!((span.start_time_unix_nano, span.end_time_unix_nano), (0, 2_000_000_000));
        let expected = [
            ("gen_ai.operation.name", "chat"),
            ("gen_ai.provider.name", "openai"),
            ("gen_ai.request.model", "m"),
            ("gen_ai.agent.name", "watcher"),
            ("gen_ai.agent.id", "uid"),
            ("agentloop.call", "t12c1a2"),
            ("agentloop.call.purpose", "Turn"),
            ("gen_ai.request.max_tokens", "4096"),
            ("gen_ai.request.stream", "true"),
            ("gen_ai.response.model", "m-2026"),
            ("gen_ai.response.id", "chatcmpl-1"),
            ("gen_ai.response.finish_reasons", r#"["stop"]"#),
            ("server.address", "api.example.com"),
            ("server.port", "443"),
            ("gen_ai.usage.input_tokens", "123"),
            ("gen_ai.usage.output_tokens", "9"),
            ("gen_ai.usage.cache_read.input_tokens", "20"),
            ("gen_ai.usage.cache_write.input_tokens", "3"),
            ("gen_ai.usage.reasoning.output_tokens", "4"),
            ("agentloop.cost.micro_usd", "7"),
        ];
        assert_eq!(
            attributes(&span.attributes),
            expected.map(|(key, value)| (key.into(), value.into()))
        );
        assert_eq!(span.status, None);
    }

    #[test]
    fn what_is_not_known_of_a_call_is_no_attribute() {
        let bare = CallSpan {
            max_tokens: None,
            is_streamed: false,
            answered: "",
            answer_id: "",
            finish_reason: None,
            ..call()
        };
        let attributes = attributes(&bare.to_span(&agent()).unwrap().attributes);
        let (absent, own) = (["max_tokens", "stream", "response"], "gen_ai.request.model");
        let found = attributes
            .iter()
            .filter(|(key, _)| absent.iter().any(|part| key.contains(part)));
        assert_eq!(found.count(), 0, "{attributes:?}");
        assert!(attributes.contains(&(own.into(), "m".into())));
    }

    #[test]
    fn a_failed_call_has_its_kind_and_no_usage() {
        let failed = CallSpan {
            usage: None,
            error: Some("RateLimited"),
            ..call()
        };
        let span = failed.to_span(&agent()).unwrap();
        let attributes = attributes(&span.attributes);
        assert!(attributes.contains(&("error.type".into(), "RateLimited".into())));
        assert!(
            !attributes.iter().any(|(key, _)| key.contains("usage")),
            "{attributes:?}"
        );
        assert_eq!(span.status.unwrap().code(), StatusCode::Error);
    }
}
