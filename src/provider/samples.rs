//! What the tests of several wire formats need.

use super::WireFormat;
use agentloop_api::failure::CallFailure;
use agentloop_engine::message::{ModelAnswer, ToolCall};

/// A call of `yield`.
pub(super) fn call(id: &str, arguments: &str) -> ToolCall {
    ToolCall {
        id: id.into(),
        name: "yield".into(),
        arguments: arguments.into(),
    }
}

/// Reads a stream of these events, up to its end mark.
pub(super) fn read_stream(format: WireFormat, events: &[impl ToString]) -> Result<ModelAnswer, CallFailure> {
    let mut aggregate = format.aggregate();
    for event in events {
        if aggregate.push(&event.to_string())? {
            return aggregate.finish(true);
        }
    }
    aggregate.finish(false)
}
