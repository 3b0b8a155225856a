//! Where responses are requested, and what a request may contain.

use crate::endpoint::{KeyHeader, ModelEndpoint};
use crate::request_schema::{ForcedField, PartSchema, RequestSchema};
use agentloop_ledger::bound::RequestOverhead;

pub(crate) static ENDPOINT: ModelEndpoint = ModelEndpoint {
    route: "/v1/responses",
    path: "/responses",
    format: "OpenAI Responses",
    base_url_advice: "with /v1 for OpenAI",
    server: "an OpenAI Responses server",
    header: None,
    key: KeyHeader::Bearer,
    // The same models with the same templates.
    overhead: RequestOverhead::CHAT_COMPLETIONS,
};

/// Name of the output limit.
pub(crate) const OUTPUT_LIMIT: &str = "max_output_tokens";

/// Not among the fields: `previous_response_id`, `conversation` and `prompt`, which add input that the request does not
/// show, and `background`, whose answer is fetched by another request.
pub(crate) static SCHEMA: RequestSchema = RequestSchema {
    fields: &[
        "include",
        "input",
        "instructions",
        OUTPUT_LIMIT,
        "model",
        "prompt_cache_key",
        "reasoning",
        "store",
        "stream",
        "temperature",
        "text",
        "tool_choice",
        "tools",
    ],
    reserved: &["include", "input", "instructions", "reasoning"],
    output_limits: &[OUTPUT_LIMIT],
    unseen: &["include", "store"],
    // Modes of reasoning with several passes are billed for each of them.
    settings: &[("reasoning", &["effort"])],
    answer: &[("text", &["format"]), ("format", &["name", "schema", "strict", "type"])],
    conversation: "input",
    text: Some("instructions"),
    entry,
    part,
    tool_type: "function",
    tool_fields: &["description", "name", "parameters", "strict", "type"],
    // A stored response would keep the conversation at the provider.
    forced: &[ForcedField {
        name: "store",
        value: "false",
        only_streamed: false,
    }],
};

/// Items. A reference to a stored item is not among them: it adds input that the request does not show.
fn entry(kind: &str) -> Option<PartSchema> {
    match kind {
        "message" => Some(PartSchema::Fields(&["content", "role", "type"])),
        "function_call" => Some(PartSchema::Fields(&["arguments", "call_id", "name", "type"])),
        "function_call_output" => Some(PartSchema::Fields(&["call_id", "output", "type"])),
        "reasoning" => Some(PartSchema::Reasoning),
        _ => None,
    }
}

fn part(kind: &str, _: bool) -> Option<PartSchema> {
    match kind {
        "input_text" => Some(PartSchema::Fields(&["text", "type"])),
        "input_image" => Some(PartSchema::Image),
        _ => None,
    }
}
