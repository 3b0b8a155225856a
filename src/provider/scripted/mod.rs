//! The built-in Scripted model: a deterministic script of answers, for demos and tests without a key.
//!
//! Pure: the text of a script in, answers out. A scripted answer is recognizable: it names this model, and its usage is
//! counted from real bytes by a documented rule. Imports only `api` from this crate.
//!
//! [`ModelScript::parse`] parses and checks a script; [`ModelScript::turn`] selects the next turn; [`wire`] writes it
//! as the chat-completions answer that a server would have sent. `docs/reference/scripted.md` describes the format of a
//! script.

mod file;
mod script;
#[cfg(test)]
mod text_tests;
pub mod wire;
mod yaml_size;

pub use script::{
    AtEnd, ModelScript, ScriptError, ScriptedAnswer, ScriptedFailure, ScriptedReply, ScriptedToolCall, ScriptedTurn,
    TurnUsage,
};
