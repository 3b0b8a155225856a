//! Why a message cannot be parsed, without any of its text: a message of the peer may hold prompts, answers or secrets.

use serde_json::error::Category;

/// What is wrong with a message, and where.
#[must_use]
pub fn describe(error: &serde_json::Error) -> String {
    let problem = match error.classify() {
        Category::Syntax => "it is not JSON",
        Category::Eof => "it ends too early",
        Category::Data => "a value has another form than expected",
        Category::Io => "it could not be read",
    };
    format!("{problem}, at line {} column {}", error.line(), error.column())
}
