//! Wire formats of models: the engine's messages out, its [`Answer`](crate::engine::message::Answer) back in.
//!
//! Pure; owns no connection. Whatever a server sends, the result is an answer or a failure, never a panic.

pub mod openai;
mod stream;

pub use stream::Aggregate;
