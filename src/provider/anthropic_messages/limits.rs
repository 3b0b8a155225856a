//! Where messages are requested, and what a request may contain.

use http::header::{HeaderName, HeaderValue};

use crate::endpoint::{KeyHeader, ModelEndpoint};
use crate::request_schema::{PartSchema, RequestSchema};
use agentloop_ledger::bound::RequestOverhead;

pub(crate) static ENDPOINT: ModelEndpoint = ModelEndpoint {
    route: "/v1/messages",
    path: "/v1/messages",
    format: "Anthropic messages",
    base_url_advice: "without /v1",
    server: "an Anthropic messages server",
    header: Some((
        HeaderName::from_static("anthropic-version"),
        HeaderValue::from_static("2023-06-01"),
    )),
    key: KeyHeader::XApiKey,
    overhead: RequestOverhead::MESSAGES,
};

/// Name of the output limit.
pub(crate) const OUTPUT_LIMIT: &str = "max_tokens";

pub(crate) static SCHEMA: RequestSchema = RequestSchema {
    fields: &[
        "cache_control",
        "max_tokens",
        "messages",
        "model",
        "output_config",
        "stream",
        "system",
        "temperature",
        "thinking",
        "tool_choice",
        "tools",
    ],
    reserved: &[],
    output_limits: &[OUTPUT_LIMIT],
    unseen: &[],
    settings: &[],
    answer: &[
        ("output_config", &["effort", "format"]),
        ("format", &["schema", "type"]),
    ],
    conversation: "messages",
    text: Some("system"),
    // Messages have roles, and no types.
    entry: |_| Some(MESSAGE),
    part,
    tool_type: "custom",
    tool_fields: &["cache_control", "description", "input_schema", "name", "type"],
    forced: &[],
};

const MESSAGE: PartSchema = PartSchema::Fields(&["content", "role"]);

fn part(kind: &str, in_entry: bool) -> Option<PartSchema> {
    match kind {
        "text" => Some(PartSchema::Fields(&["cache_control", "text", "type"])),
        "image" => Some(PartSchema::Image),
        "thinking" | "redacted_thinking" if in_entry => Some(PartSchema::Reasoning),
        "tool_use" if in_entry => Some(PartSchema::Fields(&["cache_control", "id", "input", "name", "type"])),
        "tool_result" if in_entry => Some(PartSchema::Fields(&[
            "cache_control",
            "content",
            "is_error",
            "tool_use_id",
            "type",
        ])),
        _ => None,
    }
}
