//! Names that `spec.model.headers` and `spec.model.extraBody` may and may not contain, and their schema.
//!
//! The gateway checks the same lists again, ignoring case. A worker may write only its own fields.

use schemars::Schema;
use serde_json::{Map, Value, json};

/// Maximum number of headers.
const MAX_HEADERS: u64 = 16;
/// Maximum number of fields in the extra body.
const MAX_FIELDS: u64 = 64;

/// Headers that the gateway writes itself, that carry a key, or that change the cost or the transfer of an answer.
pub const RESERVED_HEADERS: [&str; 20] = [
    "accept-encoding",
    "anthropic-beta",
    "anthropic-version",
    "api-key",
    "authorization",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "cookie",
    "expect",
    "host",
    "idempotency-key",
    "keep-alive",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-api-key",
];

/// Fields of a request that other fields of the spec set, or that the loop and the gateway write; with their types.
pub const OWN_FIELDS: [(&str, &str); 14] = [
    ("cache_control", "object"),
    ("max_completion_tokens", "integer"),
    ("max_tokens", "integer"),
    ("messages", "objects"),
    ("model", "string"),
    ("output_config", "object"),
    ("prompt_cache_key", "string"),
    ("reasoning_effort", "string"),
    ("response_format", "object"),
    ("stream", "boolean"),
    ("stream_options", "object"),
    ("system", "string"),
    ("temperature", "number"),
    ("tools", "objects"),
];

/// Fields of a request, in any wire format and on any of its servers, that raise the bill above its bound, bypass the
/// output limit, or return the answer in a way that is not metered; with their types.
pub const REFUSED_FIELDS: [(&str, &str); 47] = [
    ("n", "integer"),
    ("anthropic_beta", "strings"),
    ("audio", "object"),
    ("background", "boolean"),
    ("best_of", "integer"),
    ("betas", "strings"),
    ("chat_template", "string"),
    ("compound_custom", "object"),
    ("container", "string"),
    ("context_management", "object"),
    ("conversation", "string"),
    ("data_sources", "objects"),
    ("documents", "objects"),
    ("enable_enhancement", "boolean"),
    ("enable_search", "boolean"),
    ("fallback_credit_token", "string"),
    ("fallbacks", "objects"),
    ("inference_geo", "string"),
    ("max_new_tokens", "integer"),
    ("max_output_tokens", "integer"),
    ("mcp_servers", "objects"),
    ("modalities", "strings"),
    ("models", "strings"),
    ("n_cmpl", "integer"),
    ("n_predict", "integer"),
    ("num_predict", "integer"),
    ("options", "object"),
    ("plugins", "objects"),
    ("prediction", "object"),
    ("preset", "string"),
    ("previous_response_id", "string"),
    ("prompt", "string"),
    ("prompt_mode", "string"),
    ("provider", "object"),
    ("route", "string"),
    ("safety_model", "string"),
    ("search_options", "object"),
    ("search_parameters", "object"),
    ("search_settings", "object"),
    ("service_tier", "string"),
    ("speed", "string"),
    ("store", "boolean"),
    ("tier", "string"),
    ("transforms", "strings"),
    ("use_beam_search", "boolean"),
    ("web_search", "boolean"),
    ("web_search_options", "object"),
];

/// A field that `spec.model.reasoning` sets for Anthropic, and that OpenAI-compatible servers interpret differently.
const THINKING: &str = "thinking";

/// The schema of headers.
pub(super) fn headers(schema: &mut Schema) {
    schema.insert("maxProperties".into(), MAX_HEADERS.into());
    schema.insert(
        "additionalProperties".into(),
        json!({"type": "string", "maxLength": 1024, "pattern": r"^[!-~]([ -~]*[!-~])?$"}),
    );
    let reserved = RESERVED_HEADERS.join("|");
    schema.insert(
        "x-kubernetes-validations".into(),
        json!([{
            "rule": "self.all(name, name.matches('^[A-Za-z0-9][-_A-Za-z0-9]{0,63}$'))",
            "message": "spec.model.headers has an invalid header name: use at most 64 letters, digits, '-' and '_'",
        }, {
            "rule": format!("self.all(name, !name.matches('(?i)^({reserved}|x-agentloop-.*)$'))"),
            "message": format!("spec.model.headers must not set any of {}: the gateway sets these, or they carry a key or change the cost; reference the key in spec.model.apiKeySecretRef", RESERVED_HEADERS.join(", ")),
        }]),
    );
}

/// The schema of the extra fields: free, except for the names above. A CEL rule sees only declared fields, so these are
/// declared, each with the type it would have.
pub(super) fn extra_body(schema: &mut Schema) {
    // A bare `n` is a boolean to older YAML readers, kubectl's among them: this one is left to the gateway.
    let declared = || {
        OWN_FIELDS
            .iter()
            .chain(&REFUSED_FIELDS)
            .filter(|(name, _)| *name != "n")
    };
    let mut properties: Map<String, Value> = declared()
        .map(|(name, kind)| ((*name).to_owned(), declaration(kind)))
        .collect();
    let mut thinking = declaration("object");
    thinking["description"] =
        "Thinking switch of some `OpenAIChat` servers. Not allowed with `AnthropicMessages`.".into();
    properties.insert(THINKING.into(), thinking);
    let absent = |fields: &[(&str, &str)]| {
        let names = fields.iter().filter(|(name, _)| *name != "n");
        names
            .map(|(name, _)| format!("!has(self.{name})"))
            .collect::<Vec<_>>()
            .join(" && ")
    };
    let named = |fields: &[(&str, &str)]| fields.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    let rules = json!([{
        "rule": absent(&OWN_FIELDS),
        "message": format!("spec.model.extraBody must not set {}: other fields of the spec set these (such as spec.model.reasoning and spec.model.promptCache), or the loop sets them", named(&OWN_FIELDS)),
    }, {
        "rule": absent(&REFUSED_FIELDS),
        "message": format!("spec.model.extraBody must not set {}: they could raise the cost above its bound, or change what is metered", named(&REFUSED_FIELDS)),
    }]);
    for (key, value) in [
        ("type", json!("object")),
        ("x-kubernetes-preserve-unknown-fields", json!(true)),
        ("maxProperties", json!(MAX_FIELDS)),
        ("properties", Value::Object(properties)),
        ("x-kubernetes-validations", rules),
    ] {
        schema.insert(key.into(), value);
    }
    schema.remove("additionalProperties");
}

fn declaration(kind: &str) -> Value {
    let object = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let mut field = match kind {
        "object" => object,
        // What is in a list has a type too, or rules cannot see the list.
        "objects" => json!({"type": "array", "items": object}),
        "strings" => json!({"type": "array", "items": {"type": "string"}}),
        _ => json!({ "type": kind }),
    };
    field["description"] = "Not allowed.".into();
    field
}
