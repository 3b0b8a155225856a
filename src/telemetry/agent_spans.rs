//! How traces name an Agent and its models, and what this process exports.

use crate::api::agent::{ModelApi, ModelSpec};
use crate::otlp::{AgentIdentity, MetricSettings, SettingsProblem, TraceSettings};

/// The Agent of this namespace, name and uid.
#[must_use]
pub fn identity((namespace, name, uid): (&str, &str, &str), model: &ModelSpec) -> AgentIdentity {
    AgentIdentity {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        uid: uid.to_owned(),
        provider: provider(model.api),
        model: model.name.clone(),
    }
}

/// The provider of an API, by the names of OpenTelemetry's conventions: the flavour of the API, not the company that serves it.
#[must_use]
pub fn provider(api: ModelApi) -> &'static str {
    match api {
        ModelApi::OpenAIChat | ModelApi::OpenAIResponses => "openai",
        ModelApi::AnthropicMessages => "anthropic",
        ModelApi::Scripted => "agentloop.scripted",
    }
}

/// The settings from this process's `OTEL_*` variables. Invalid ones are logged, and nothing is exported: a loop does not
/// stop for its traces.
#[must_use]
pub fn settings() -> Option<TraceSettings> {
    or_warn(TraceSettings::from_env())
}

/// How this process exports its metrics, like [`settings`].
#[must_use]
pub fn metric_settings() -> Option<MetricSettings> {
    or_warn(MetricSettings::from_env())
}

fn or_warn<T>(settings: Result<Option<T>, SettingsProblem>) -> Option<T> {
    settings.unwrap_or_else(|problem| {
        tracing::warn!("{problem}");
        None
    })
}
