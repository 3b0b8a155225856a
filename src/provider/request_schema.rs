//! What a request of a wire format may contain: the gateway refuses everything else.
//!
//! A table for each format, because a field that is not known may raise the bill in a way that only its server knows.

use agentloop_engine::answer_schema::AnswerSchema;

/// Maximum number of bytes of the JSON schema of an answer.
pub const MAX_ANSWER_SCHEMA: usize = AnswerSchema::MAX_BYTES;

/// The allowed fields of a request.
#[derive(Debug)]
pub struct RequestSchema {
    /// The fields that the worker writes.
    pub fields: &'static [&'static str],
    /// Those of them that `spec.model.extraBody` must not set, in addition to the fields of all formats.
    pub reserved: &'static [&'static str],
    /// All names of the output limit. They are not shown to the model.
    pub output_limits: &'static [&'static str],
    /// Other fields whose content is not shown to the model, in addition to those of all formats.
    pub unseen: &'static [&'static str],
    /// The fields of settings that are objects.
    pub settings: &'static [(&'static str, &'static [&'static str])],
    /// The fields on the way to the JSON schema of the answer, each in the one before, with what each may contain. The
    /// schema is in the field `schema` of the last.
    pub answer: &'static [(&'static str, &'static [&'static str])],
    /// The field with the conversation, a list of entries.
    pub conversation: &'static str,
    /// A field with text in parts that is not a part of the conversation.
    pub text: Option<&'static str>,
    /// What an entry with this `type` may contain (empty: it has none); `None`: its cost is not in the request.
    pub entry: fn(kind: &str) -> Option<PartSchema>,
    /// The same for a part of an entry's content; `false`: of content within that, or outside of the conversation.
    pub part: fn(kind: &str, in_entry: bool) -> Option<PartSchema>,
    /// The `type` of a tool that the client runs; servers run all others.
    pub tool_type: &'static str,
    pub tool_fields: &'static [&'static str],
    /// What the gateway sets in each request: fields and JSON values.
    pub forced: &'static [ForcedField],
}

/// What an entry of the conversation or a part of its content may contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartSchema {
    /// These fields only.
    Fields(&'static [&'static str]),
    /// Reasoning: it is returned to its server unchanged, whatever it contains.
    Reasoning,
    /// An image, in the form that the worker writes, if the spec allows images.
    Image,
}

/// A field that the gateway sets in each request, whatever the worker wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForcedField {
    pub name: &'static str,
    /// Its value, as JSON.
    pub value: &'static str,
    /// Only in requests for a stream.
    pub only_streamed: bool,
}
