//! OpenAI Responses, on any compatible server.
//!
//! Stateless: each request carries the whole conversation as a list of items, and the server is asked to store nothing.
//! Reasoning comes as items with encrypted content, which go back as they came.

pub(super) mod limits;
pub(super) mod meter;
pub(super) mod request;
pub(super) mod response;
pub(super) mod stream;
pub(super) mod usage;

use limits::ENDPOINT;
