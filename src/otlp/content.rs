//! Attributes of spans that hold texts of a loop: its messages, and the arguments and results of tools. They are opt-in: the
//! operator sets one variable, the worker adds them only if the gateway says so, and a gateway without it removes them.

use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::trace::v1::Span;

use crate::resource::text;
use crate::variables::{SettingsProblem, VariableReader};

/// Longest value of one of these attributes, in bytes.
pub const MAX_CONTENT: usize = 16 * 1024;
/// Most of these attributes that one span has.
const MAX_OF_SPAN: usize = 2;
/// Longest content of one span.
pub(crate) const MAX_CONTENT_OF_SPAN: usize = MAX_OF_SPAN * MAX_CONTENT;

const VARIABLE: &str = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT";

/// An attribute with texts of a loop, by the names of the conventions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentAttribute {
    /// What is new for the model in a turn.
    InputMessages,
    /// What the model answered in a turn.
    OutputMessages,
    /// The arguments of a tool run.
    ToolArguments,
    /// The result of a tool run.
    ToolResult,
}

impl ContentAttribute {
    const fn key(self) -> &'static str {
        match self {
            Self::InputMessages => "gen_ai.input.messages",
            Self::OutputMessages => "gen_ai.output.messages",
            Self::ToolArguments => "gen_ai.tool.call.arguments",
            Self::ToolResult => "gen_ai.tool.call.result",
        }
    }

    /// Adds the attribute to a span, unless its value is longer than [`MAX_CONTENT`].
    pub fn add_to(self, span: &mut Span, value: String) {
        if value.len() <= MAX_CONTENT {
            span.attributes.push(text(self.key(), value));
        }
    }
}

/// Removes attributes with texts, which a worker may send although it was not asked to.
pub(crate) fn remove_content(attributes: &mut Vec<KeyValue>) {
    let own = [
        ContentAttribute::InputMessages,
        ContentAttribute::OutputMessages,
        ContentAttribute::ToolArguments,
        ContentAttribute::ToolResult,
    ]
    .map(ContentAttribute::key);
    attributes.retain(|pair| !own.contains(&pair.key.as_str()));
}

/// Whether spans get texts. Some values of the instrumentations ask for events, which this exporter does not have.
pub(crate) fn is_asked_for(reader: &VariableReader<'_>) -> Result<bool, SettingsProblem> {
    let value = reader.get(VARIABLE).unwrap_or_default();
    match value.trim().to_ascii_lowercase().as_str() {
        "true" | "span_only" | "span_and_event" => Ok(true),
        "" | "false" | "no_content" | "event_only" => Ok(false),
        _ => Err(SettingsProblem {
            signal: "texts in spans",
            variable: VARIABLE,
            problem: "is neither true nor false",
        }),
    }
}
