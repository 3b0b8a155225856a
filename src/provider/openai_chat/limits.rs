//! Where chat completions are requested, and what a request may contain.

use crate::endpoint::{KeyHeader, ModelEndpoint};
use crate::request_schema::{ForcedField, PartSchema, RequestSchema};
use agentloop_api::agent::{ModelSpec, OutputLimitParameter};
use agentloop_ledger::bound::RequestOverhead;

pub(crate) static ENDPOINT: ModelEndpoint = ModelEndpoint {
    route: "/v1/chat/completions",
    path: "/chat/completions",
    format: "chat completions",
    base_url_advice: "with /v1 for OpenAI",
    server: "an OpenAI chat-completions server",
    header: None,
    key: KeyHeader::Bearer,
    overhead: RequestOverhead::CHAT_COMPLETIONS,
};

pub(crate) static SCHEMA: RequestSchema = RequestSchema {
    fields: &[
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "model",
        "prompt_cache_key",
        "reasoning_effort",
        "response_format",
        "stream",
        "stream_options",
        "temperature",
        "tool_choice",
        "tools",
    ],
    reserved: &[],
    output_limits: &["max_tokens", "max_completion_tokens"],
    unseen: &[],
    settings: &[],
    answer: &[
        ("response_format", &["json_schema", "type"]),
        ("json_schema", &["name", "schema", "strict"]),
    ],
    conversation: "messages",
    text: None,
    // Messages have roles, and no types.
    entry: |_| Some(MESSAGE),
    part,
    tool_type: "function",
    tool_fields: &["cache_control", "function", "type"],
    forced: &[ForcedField {
        name: "stream_options",
        value: r#"{"include_usage":true}"#,
        only_streamed: true,
    }],
};

const MESSAGE: PartSchema = PartSchema::Fields(&[
    "content",
    "extra_content",
    "name",
    "reasoning",
    "reasoning_content",
    "reasoning_details",
    "role",
    "tool_call_id",
    "tool_calls",
]);

fn part(kind: &str, _: bool) -> Option<PartSchema> {
    match kind {
        "text" => Some(PartSchema::Fields(&["cache_control", "text", "type"])),
        "image_url" => Some(PartSchema::Image),
        _ => None,
    }
}

/// Name of the output limit: OpenAI's own recent models accept only the new name, other servers the old one.
pub(crate) fn output_limit(model: &ModelSpec, host: Option<&str>) -> &'static str {
    const OLD: &str = "max_tokens";
    const NEW: &str = "max_completion_tokens";
    match model.output_limit_parameter {
        OutputLimitParameter::MaxCompletionTokens => NEW,
        OutputLimitParameter::Auto if host == Some("api.openai.com") => NEW,
        OutputLimitParameter::Auto | OutputLimitParameter::MaxTokens => OLD,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::WireFormat;

    fn model(api: &str, parameter: &str) -> ModelSpec {
        serde_json::from_value(json!({"api": api, "name": "m", "outputLimitParameter": parameter})).unwrap()
    }

    #[test]
    fn only_openai_receives_the_new_name_of_the_limit_unless_the_spec_overrides_it() {
        let limit = |api, parameter, host| {
            let model = model(api, parameter);
            WireFormat::of_api(model.api).output_limit(&model, host)
        };
        let openai = Some("api.openai.com");
        assert_eq!(limit("OpenAIChat", "Auto", openai), "max_completion_tokens");
        assert_eq!(limit("OpenAIChat", "MaxTokens", openai), "max_tokens");
        assert_eq!(
            limit("OpenAIChat", "Auto", Some("api.openai.com.example.org")),
            "max_tokens"
        );
        assert_eq!(limit("OpenAIChat", "Auto", None), "max_tokens");
        assert_eq!(
            limit("OpenAIChat", "MaxCompletionTokens", None),
            "max_completion_tokens"
        );
        assert_eq!(limit("AnthropicMessages", "Auto", openai), "max_tokens");
    }
}
