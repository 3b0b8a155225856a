//! The built-in Scripted model: a deterministic script of answers, for demos and tests without a key.
//!
//! Pure: a script's text in, answers out. It is a product feature and honest about it: its answers say which model
//! gave them, and its usage is counted from real bytes by a stated rule. Imports nothing of ours but `api`.
//!
//! [`ModelScript::parse`] reads and checks a script; [`ModelScript::turn`] says which turn is next; [`wire`] writes it as the
//! chat-completions answer that a server would have sent. What a script may say: `docs/reference/scripted.md`.

mod file;
mod script;
pub mod wire;
mod yaml_size;

pub use script::{
    AtEnd, ModelScript, ScriptError, ScriptedAnswer, ScriptedFailure, ScriptedReply, ScriptedToolCall, ScriptedTurn,
    TurnUsage,
};
