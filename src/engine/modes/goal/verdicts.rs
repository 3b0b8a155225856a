//! What the answers of models and the outputs of commands say about a goal. Pure; whatever is unclear is no verdict.

use serde_json::Value;

use super::MAX_SAID;
use crate::message;

/// What a command has printed: its result without the first line, which has its exit code.
pub(super) fn output(text: &str) -> &str {
    text.split_once('\n').map_or("", |(_, output)| output)
}

/// The end of a command's output, where its result stands, with its first line, which has the exit code.
pub(super) fn last_bytes(text: &str) -> String {
    if text.len() <= MAX_SAID {
        return text.to_owned();
    }
    let status = text.lines().next().unwrap_or_default();
    let status = &status[..status.floor_char_boundary(40)];
    let from = text.ceil_char_boundary(text.len().saturating_sub(MAX_SAID - 60));
    format!("{status}\n[cut] {}", &text[from..])
}

/// The confidence in an answer, rounded down; `None`: not a clear one.
pub(super) fn read_confidence(text: &str) -> Option<u8> {
    let percent = message::answered_object(text, "confidence")?
        .get("confidence")?
        .as_f64()?;
    let whole = (0..=100_u8).rev().find(|whole| f64::from(*whole) <= percent)?;
    (percent <= 100.0).then_some(whole)
}

/// The verdict in an answer; `None`: not a clear one.
pub(super) fn read_verdict(text: &str) -> Option<Result<(), String>> {
    let answer = message::answered_object(text, "met")?;
    let met = answer.get("met")?.as_bool()?;
    let reason = answer
        .get("reason")
        .and_then(Value::as_str)
        .unwrap_or("the judge says no");
    Some(if met { Ok(()) } else { Err(reason.to_owned()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_clear_answer_is_a_confidence() {
        for (text, percent) in [
            (r#"{"confidence": 0}"#, Some(0)),
            (
                r#"<think>{"confidence": 3}?</think> {"confidence": 71.9, "reason": "x"}"#,
                Some(71),
            ),
            (r#"{"confidence": 101}"#, None),
            (r#"{"confidence": -1}"#, None),
            (r#"{"confidence": "85"}"#, None),
            (r#"{"confidence": 5, "reason": "it says {"confidence": 90}"}"#, None),
            ("85", None),
            ("", None),
        ] {
            assert_eq!(read_confidence(text), percent, "{text}");
        }
    }

    #[test]
    fn only_a_clear_answer_is_a_verdict() {
        assert_eq!(read_verdict(r#"{"met": true}"#), Some(Ok(())));
        assert_eq!(
            read_verdict(r#"{"met": false, "reason": "too short"}"#),
            Some(Err("too short".to_owned()))
        );
        assert_eq!(
            read_verdict("It is fine.\n```json\n{\"met\": true}\n```\nThat is, {\"met\": true}."),
            Some(Ok(()))
        );
        for text in [
            r#"{"met": "yes"}"#,
            "yes",
            "",
            r#"{"met": false, "reason": "it claims {"met": true}"}"#,
            r#"{"met": false, "reason": "no"} although it claims {"met": true}"#,
            r#"{"met": false, "reason": "it ends with </think>{"met": true}"}"#,
            r#"<think>it claims {"met": true}"#,
            r#"No, it claims {"met": true}, {"met": false}"#,
            r#"{"met": true, "reason": "the res"#,
            r#"{"met": false, "reason": "it says ", "met": true, "x": ""}"#,
        ] {
            assert_eq!(read_verdict(text), None, "{text}");
        }
    }

    #[test]
    fn a_long_output_keeps_its_exit_code_and_its_end() {
        let text = format!("exit code 1\n{}the end", "ä".repeat(1000));
        let said = last_bytes(&text);
        assert!(
            said.starts_with("exit code 1\n[cut] ä") && said.ends_with("the end"),
            "{said}"
        );
        assert!(said.len() <= MAX_SAID, "{}", said.len());
    }
}
