//! Errors that model servers report, in the body of an answer or within a stream.

use std::fmt;

use serde_json::{Map, Value};

/// Maximum number of bytes of a message that are searched.
const MAX_MESSAGE_BYTES: usize = 16 * 1024;

/// An error object in the format of OpenAI, of Anthropic, or of servers that imitate them. Its texts are the server's,
/// which may echo a prompt: they are compared, and never shown.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct ReportedError {
    codes: Vec<String>,
    status: Option<u16>,
    /// In lower case.
    message: String,
}

impl ReportedError {
    /// Parses the body of an answer. Empty if it is not a JSON object.
    #[must_use]
    pub fn from_body(body: &[u8]) -> Self {
        serde_json::from_slice(body)
            .map(|body: Map<String, Value>| Self::from_fields(&body))
            .unwrap_or_default()
    }

    /// Parses the fields of an object that is or contains an error.
    fn from_fields(body: &Map<String, Value>) -> Self {
        // Some servers put the fields of `error` at the top level.
        let fields = match body.get("error") {
            Some(Value::Object(error)) => error,
            _ => body,
        };
        let messages = [fields.get("message"), body.get("error"), body.get("detail")];
        Self {
            codes: ["code", "type"].map(|name| text(fields.get(name)).to_owned()).into(),
            status: fields.get("code").and_then(status),
            message: messages
                .map(|message| beginning(text(message)))
                .join(" ")
                .to_lowercase(),
        }
    }

    /// Parses the value of a field `error`.
    pub(crate) fn from_value(error: Value) -> Self {
        Self::from_fields(&Map::from_iter([("error".to_owned(), error)]))
    }

    /// Whether its code or its type is one of these.
    #[must_use]
    pub fn is_one_of(&self, codes: &[&str]) -> bool {
        self.codes.iter().any(|code| codes.contains(&code.as_str()))
    }

    /// Whether its message, rather than an echo of the request, contains one of these phrases, in lower case.
    #[must_use]
    pub fn says(&self, phrases: &[&str]) -> bool {
        phrases.iter().any(|phrase| self.message.contains(phrase))
    }

    /// The HTTP status that it names as its code, as vLLM, llama.cpp and `OpenRouter` do within a stream.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        self.status
    }
}

/// Shows no text of the server.
impl fmt::Debug for ReportedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReportedError").finish_non_exhaustive()
    }
}

fn text(value: Option<&Value>) -> &str {
    value.and_then(Value::as_str).unwrap_or_default()
}

fn status(code: &Value) -> Option<u16> {
    let number = code.as_u64().or_else(|| code.as_str()?.parse().ok())?;
    u16::try_from(number).ok().filter(|status| (400..600).contains(status))
}

fn beginning(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_MESSAGE_BYTES)]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(body: &Value) -> ReportedError {
        ReportedError::from_body(body.to_string().as_bytes())
    }

    #[test]
    fn codes_and_messages_are_found_wherever_servers_put_them() {
        for body in [
            json!({"error": {"code": "c", "message": "Too LONG"}}),
            json!({"error": {"type": "c", "message": "too long"}}),
            json!({"type": "error", "code": "c", "message": "too long"}),
            json!({"code": "c", "error": "too long"}),
            json!({"code": "c", "detail": "too long"}),
        ] {
            let error = read(&body);
            assert!(error.is_one_of(&["c"]) && error.says(&["too long"]), "{body}");
            assert!(!error.is_one_of(&["d"]) && !error.says(&["too short"]), "{body}");
        }
        assert_eq!(ReportedError::from_body(b"<html>"), ReportedError::default());
    }

    #[test]
    fn a_code_is_a_status_only_if_it_is_the_number_of_an_error() {
        let status = |code: Value| read(&json!({"error": {"code": code}})).status();
        assert_eq!((status(json!(429)), status(json!("503"))), (Some(429), Some(503)));
        for none in [
            json!(200),
            json!(600),
            json!(70_000),
            json!(-1),
            json!("x"),
            json!(null),
        ] {
            assert_eq!(status(none.clone()), None, "{none}");
        }
    }

    #[test]
    fn only_the_beginning_of_a_message_is_searched_and_nothing_of_it_is_shown() {
        let error =
            read(&json!({"error": {"code": "SECRET", "message": format!("{}SECRET", "é".repeat(MAX_MESSAGE_BYTES))}}));
        assert!(error.says(&["é"]) && !error.says(&["secret"]));
        assert!(!format!("{error:?}").contains("SECRET"));
    }
}
