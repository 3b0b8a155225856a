//! Anthropic messages, on any compatible server.

pub(super) mod limits;
pub(super) mod meter;
pub(super) mod request;
pub(super) mod response;
pub(super) mod stream;
pub(super) mod usage;

use limits::ENDPOINT;
