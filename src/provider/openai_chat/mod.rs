//! OpenAI chat completions, on any compatible server; also the format of scripted models.

pub(super) mod limits;
pub(super) mod meter;
pub(super) mod request;
pub(super) mod response;
pub(super) mod stream;
pub(super) mod usage;

use limits::ENDPOINT;

/// Fields of an answer that hold reasoning; servers use different names.
const REASONING: [&str; 3] = ["reasoning_content", "reasoning", "reasoning_details"];
/// Field of a tool call that holds a reasoning signature at Google.
const EXTRA: &str = "extra_content";
