//! A checked script: its turns, its bounds, and which turn answers which call.

use std::time::Duration;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::file::{FailFile, ScriptFile, ToolCallFile, TurnFile};
use super::yaml_size;
use agentloop_api::unreadable::describe;

/// The longest script, in bytes.
pub const MAX_SCRIPT_BYTES: usize = 256 * 1024;
/// The largest script once its aliases are followed: one for each node, and one for each byte of text. No script
/// without aliases reaches it, since a node takes two bytes, and an escape at most doubles what it stands for.
pub const MAX_SCRIPT_UNITS: usize = 2 * MAX_SCRIPT_BYTES;
/// Maximum number of turns of a script.
pub const MAX_TURNS: usize = 1000;
/// Maximum number of tool calls of one turn.
pub const MAX_TOOL_CALLS: usize = 32;
/// The longest text of one turn, in bytes.
pub const MAX_TEXT_BYTES: usize = 64 * 1024;
/// The longest delay of one turn, in milliseconds.
pub const MAX_DELAY_MILLISECONDS: u64 = 600_000;
/// The longest `retryAfterSeconds`.
pub const MAX_RETRY_AFTER_SECONDS: u64 = 86_400;
/// Maximum number of tokens of one kind that a turn may claim.
pub const MAX_TOKENS: u64 = 10_000_000;

#[derive(Clone, Debug, PartialEq)]
pub struct ModelScript {
    turns: Vec<ScriptedTurn>,
    at_end: AtEnd,
}

/// What follows the last turn.
#[derive(Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AtEnd {
    /// Starts again with the first turn.
    #[default]
    StartOver,
    /// Repeats the last turn.
    RepeatLast,
    /// Fails every further call.
    Fail,
}

/// The reply to one call.
#[derive(Clone, Debug, PartialEq)]
pub struct ScriptedTurn {
    /// The delay before the reply.
    pub delay: Duration,
    pub reply: ScriptedReply,
}

/// An answer or a failure.
#[derive(Clone, Debug, PartialEq)]
pub enum ScriptedReply {
    Answer(ScriptedAnswer),
    /// A failure, as a server would have returned it.
    Fail(ScriptedFailure),
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScriptedAnswer {
    pub text: Option<String>,
    /// Tool calls, in order.
    pub tool_calls: Vec<ScriptedToolCall>,
    /// The usage that the answer claims. Absent: counted from bytes, see [`super::wire`].
    pub usage: Option<TurnUsage>,
}

/// A tool call of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct ScriptedToolCall {
    /// Name of the tool.
    pub name: String,
    pub arguments: Map<String, Value>,
}

/// Usage claimed by a turn, in disjoint kinds; reasoning is a part of the output.
#[derive(Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TurnUsage {
    /// Input tokens not read from a cache.
    pub input_tokens: u64,
    /// Output tokens, reasoning included.
    pub output_tokens: u64,
    /// Input tokens read from a cache.
    #[serde(default)]
    pub cache_read_tokens: u64,
    /// Output tokens spent on reasoning.
    #[serde(default)]
    pub reasoning_tokens: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScriptedFailure {
    /// HTTP status, 400 to 599.
    pub status: u16,
    /// Value of `Retry-After`.
    pub retry_after_seconds: Option<u64>,
}

/// Why a text is not a valid script. The message names the field and the fix.
#[cfg_attr(test, derive(strum::EnumCount))]
#[derive(thiserror::Error, Clone, Debug, PartialEq, Eq)]
pub enum ScriptError {
    /// It exceeds the length limit.
    #[error("the script has {bytes} bytes; the maximum is {MAX_SCRIPT_BYTES}: shorten it")]
    TooLong { bytes: usize },
    /// Its aliases expand to too much.
    #[error(
        "the script has more than {MAX_SCRIPT_UNITS} nodes and bytes after its aliases are expanded: use fewer aliases (*name)"
    )]
    TooLarge,
    /// It is not YAML, or does not have the shape of a script. Says where and what was expected, and quotes nothing: the
    /// ConfigMap may hold something else.
    #[error("the script cannot be parsed: {0}")]
    Shape(String),
    /// A value is outside its bounds.
    #[error("{path}: {problem}")]
    Field {
        /// The field, such as `turns[2].toolCalls[0].name`.
        path: String,
        /// The problem and the fix.
        problem: String,
    },
}

impl ModelScript {
    /// Parses and checks a script.
    pub fn parse(text: &str) -> Result<Self, ScriptError> {
        if text.len() > MAX_SCRIPT_BYTES {
            return Err(ScriptError::TooLong { bytes: text.len() });
        }
        if !yaml_size::fits(text, MAX_SCRIPT_UNITS) {
            return Err(ScriptError::TooLarge);
        }
        let file: ScriptFile = serde_yaml::from_str(text).map_err(|error| shape(&error))?;
        let count = file.turns.len();
        if count == 0 || count > MAX_TURNS {
            return Err(field(
                "turns".into(),
                format!("has {count} entries; write 1 to {MAX_TURNS}"),
            ));
        }
        let turns = file
            .turns
            .into_iter()
            .enumerate()
            .map(|(index, turn)| ScriptedTurn::check(&format!("turns[{index}]"), turn));
        Ok(Self {
            turns: turns.collect::<Result<_, _>>()?,
            at_end: file.at_end,
        })
    }

    /// The turn for the call before which `taken` turns have been taken; `None`: the script has ended.
    #[must_use]
    pub fn turn(&self, taken: u64) -> Option<&ScriptedTurn> {
        let count = self.turns.len() as u64;
        let index = match self.at_end {
            AtEnd::StartOver => taken % count,
            AtEnd::RepeatLast => taken.min(count - 1),
            AtEnd::Fail => taken,
        };
        self.turns.get(usize::try_from(index).ok()?)
    }
}

impl ScriptedTurn {
    fn check(path: &str, file: TurnFile) -> Result<Self, ScriptError> {
        if file.delay_milliseconds > MAX_DELAY_MILLISECONDS {
            return Err(field(
                format!("{path}.delayMilliseconds"),
                format!("is {}; write at most {MAX_DELAY_MILLISECONDS}", file.delay_milliseconds),
            ));
        }
        let delay = Duration::from_millis(file.delay_milliseconds);
        let says = file.text.is_some() || !file.tool_calls.is_empty() || file.r#yield.is_some();
        let reply = match file.fail {
            Some(_) if says || file.usage.is_some() => {
                return Err(field(
                    path.into(),
                    "combines fail with text, toolCalls, yield or usage; a failed call has no answer: keep one".into(),
                ));
            }
            Some(fail) => ScriptedReply::Fail(ScriptedFailure::check(path, &fail)?),
            None if says => ScriptedReply::Answer(ScriptedAnswer::check(path, file)?),
            None => {
                return Err(field(
                    path.into(),
                    "is empty; set text, toolCalls, yield or fail".into(),
                ));
            }
        };
        Ok(Self { delay, reply })
    }
}

impl ScriptedAnswer {
    fn check(path: &str, file: TurnFile) -> Result<Self, ScriptError> {
        if let Some(text) = file.text.as_ref().filter(|text| text.len() > MAX_TEXT_BYTES) {
            return Err(field(
                format!("{path}.text"),
                format!("has {} bytes; write at most {MAX_TEXT_BYTES}", text.len()),
            ));
        }
        let mut tool_calls = Vec::with_capacity(file.tool_calls.len() + 1);
        for (index, call) in file.tool_calls.into_iter().enumerate() {
            tool_calls.push(ScriptedToolCall::check(&format!("{path}.toolCalls[{index}]"), call)?);
        }
        if let Some(pause) = file.r#yield {
            tool_calls.push(ScriptedToolCall {
                name: "yield".into(),
                arguments: pause.arguments(),
            });
        }
        if tool_calls.len() > MAX_TOOL_CALLS {
            return Err(field(
                format!("{path}.toolCalls"),
                format!(
                    "has {} calls, yield included; write at most {MAX_TOOL_CALLS}",
                    tool_calls.len()
                ),
            ));
        }
        if let Some(usage) = &file.usage {
            usage.check(path)?;
        }
        Ok(Self {
            text: file.text,
            tool_calls,
            usage: file.usage,
        })
    }
}

impl ScriptedToolCall {
    fn check(path: &str, file: ToolCallFile) -> Result<Self, ScriptError> {
        let legal = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        if file.name.is_empty() || file.name.len() > 64 || !file.name.chars().all(legal) {
            return Err(field(
                format!("{path}.name"),
                "is not a valid tool name; write 1 to 64 letters, digits, _ or -".into(),
            ));
        }
        Ok(Self {
            name: file.name,
            arguments: file.arguments,
        })
    }
}

impl TurnUsage {
    fn check(&self, path: &str) -> Result<(), ScriptError> {
        let kinds = [
            ("inputTokens", self.input_tokens),
            ("outputTokens", self.output_tokens),
            ("cacheReadTokens", self.cache_read_tokens),
        ];
        for (name, tokens) in kinds {
            if tokens > MAX_TOKENS {
                return Err(field(
                    format!("{path}.usage.{name}"),
                    format!("is {tokens}; write at most {MAX_TOKENS}"),
                ));
            }
        }
        if self.reasoning_tokens > self.output_tokens {
            return Err(field(
                format!("{path}.usage.reasoningTokens"),
                "is more than outputTokens, which includes it; write at most outputTokens".into(),
            ));
        }
        Ok(())
    }
}

impl ScriptedFailure {
    fn check(path: &str, file: &FailFile) -> Result<Self, ScriptError> {
        if !(400..=599).contains(&file.status) {
            return Err(field(
                format!("{path}.fail.status"),
                format!("is {}; write an HTTP error status, 400 to 599", file.status),
            ));
        }
        if let Some(seconds) = file
            .retry_after_seconds
            .filter(|seconds| *seconds > MAX_RETRY_AFTER_SECONDS)
        {
            return Err(field(
                format!("{path}.fail.retryAfterSeconds"),
                format!("is {seconds}; write at most {MAX_RETRY_AFTER_SECONDS}"),
            ));
        }
        Ok(Self {
            status: file.status,
            retry_after_seconds: file.retry_after_seconds,
        })
    }
}

fn field(path: String, problem: String) -> ScriptError {
    ScriptError::Field { path, problem }
}

fn shape(error: &serde_yaml::Error) -> ScriptError {
    let text = error.to_string();
    let place = error
        .location()
        .map(|place| format!(" at line {} column {}", place.line(), place.column()));
    let place = place.unwrap_or_default();
    let text = text.strip_suffix(&place).unwrap_or(&text);
    let (path, words) = match text.split_once(": ") {
        Some((path, words)) if is_path(path) => (own_part(path), words),
        _ => ("", text),
    };
    let colon = if path.is_empty() { "" } else { ": " };
    ScriptError::Shape(format!("{path}{colon}{}{place}", describe(words)))
}

fn is_path(text: &str) -> bool {
    text.chars()
        .all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '[' | ']'))
}

/// A path as far as its names are those of a script: below `arguments` they are the author's.
fn own_part(path: &str) -> &str {
    match path.find("arguments.") {
        Some(at) => &path[..at + "arguments".len()],
        None => path,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use rstest::rstest;
    use serde_json::json;

    use super::*;

    fn texts(script: &str, calls: u64) -> Vec<Option<String>> {
        let script = ModelScript::parse(script).unwrap();
        let text = |turn: &ScriptedTurn| match &turn.reply {
            ScriptedReply::Answer(answer) => answer.text.clone().unwrap(),
            ScriptedReply::Fail(fail) => fail.status.to_string(),
        };
        (0..calls).map(|taken| script.turn(taken).map(text)).collect()
    }

    #[test]
    fn a_script_starts_over_by_default() {
        let turns = "turns: [{text: a}, {text: b}]";
        let a = || Some("a".to_owned());
        let b = || Some("b".to_owned());
        assert_eq!(texts(turns, 4), [a(), b(), a(), b()]);
        assert_eq!(texts(&format!("atEnd: StartOver\n{turns}"), 3), [a(), b(), a()]);
        assert_eq!(texts(&format!("atEnd: RepeatLast\n{turns}"), 4), [a(), b(), b(), b()]);
        assert_eq!(texts(&format!("atEnd: Fail\n{turns}"), 4), [a(), b(), None, None]);
    }

    #[test]
    fn yield_is_short_for_a_call_of_that_tool_after_all_others() {
        let script = ModelScript::parse(
            "turns:\n- toolCalls: [{name: look, arguments: {deep: {n: 1.5}}}]\n  yield: {sleep: 5, wake_early_if: [x], reason: tired}\n- yield: {mode: shutdown}\n- yield: {}",
        )
        .unwrap();
        let calls = |taken| match &script.turn(taken).unwrap().reply {
            ScriptedReply::Answer(answer) => answer.tool_calls.clone(),
            ScriptedReply::Fail(_) => vec![],
        };
        let as_json = |call: &ScriptedToolCall| json!({"name": call.name, "arguments": call.arguments});
        assert_eq!(
            as_json(&calls(0)[0]),
            json!({"name": "look", "arguments": {"deep": {"n": 1.5}}})
        );
        let pause = json!({"mode": "sleep", "sleep": 5, "wake_early_if": ["x"], "reason": "tired"});
        assert_eq!(as_json(&calls(0)[1]), json!({"name": "yield", "arguments": pause}));
        assert_eq!(
            as_json(&calls(1)[0]),
            json!({"name": "yield", "arguments": {"mode": "shutdown"}})
        );
        assert_eq!(as_json(&calls(2)[0]), json!({"name": "yield", "arguments": {}}));
    }

    #[rstest]
    #[case("", "missing field `turns`")]
    #[case("turns: []", "turns: has 0 entries; write 1 to 1000")]
    #[case("turns: [{text: a, txt: b}]", "turns[0]: unknown field, expected one of `text`")]
    #[case(
        "repeat: Never\nturns: [{text: a}]",
        "cannot be parsed: unknown field, expected `atEnd` or `turns`"
    )]
    #[case(
        "atEnd: Stop\nturns: [{text: a}]",
        "atEnd: unknown variant, expected one of `StartOver`, `RepeatLast`, `Fail` at line 1 column 8"
    )]
    #[case("turns: [{}]", "turns[0]: is empty; set text, toolCalls, yield or fail")]
    #[case("turns: [{text: a}, {delayMilliseconds: 5}]", "turns[1]: is empty")]
    #[case("turns: [{text: a, fail: {status: 500}}]", "turns[0]: combines fail with text")]
    #[case(
        "turns: [{fail: {status: 500}, usage: {inputTokens: 1, outputTokens: 1}}]",
        "turns[0]: combines fail with"
    )]
    #[case(
        "turns: [{fail: {status: 399}}]",
        "turns[0].fail.status: is 399; write an HTTP error status, 400 to 599"
    )]
    #[case("turns: [{fail: {status: 600}}]", "turns[0].fail.status: is 600")]
    #[case(
        "turns: [{fail: {status: 429, retryAfterSeconds: 86401}}]",
        "turns[0].fail.retryAfterSeconds: is 86401"
    )]
    #[case(
        "turns: [{text: a, delayMilliseconds: 600001}]",
        "turns[0].delayMilliseconds: is 600001; write at most 600000"
    )]
    #[case(
        "turns: [{text: a, delayMilliseconds: -1}]",
        "turns[0].delayMilliseconds: invalid type"
    )]
    #[case(
        "turns: [{toolCalls: [{name: 'a b'}]}]",
        "turns[0].toolCalls[0].name: is not a valid tool name"
    )]
    #[case(
        "turns: [{toolCalls: [{name: a, arguments: [1]}]}]",
        "turns[0].toolCalls[0].arguments: invalid type"
    )]
    #[case(
        "turns: [{yield: {seconds: 5}}]",
        "turns[0].yield: unknown field, expected one of `mode`, `sleep`"
    )]
    #[case(
        "turns: [{text: a, usage: {inputTokens: 5}}]",
        "turns[0].usage: missing field `outputTokens`"
    )]
    #[case(
        "turns: [{text: a, usage: {inputTokens: 10000001, outputTokens: 1}}]",
        "turns[0].usage.inputTokens: is 10000001"
    )]
    #[case(
        "turns: [{text: a, usage: {inputTokens: 5, outputTokens: 5, reasoningTokens: 6}}]",
        "turns[0].usage.reasoningTokens: is more than outputTokens"
    )]
    #[case("turns: [{text: a}", "cannot be parsed: malformed at line 2 column 1")]
    #[case("- text: a", "cannot be parsed")]
    fn a_mistake_is_named_with_its_place_and_the_fix(#[case] script: &str, #[case] expected: &str) {
        let error = ModelScript::parse(script).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }

    #[rstest]
    #[case("canary")]
    #[case("- canary")]
    #[case("password: canary")]
    #[case("canary: [1]\nturns: []")]
    #[case("turns: canary")]
    #[case("turns: [canary]")]
    #[case("turns: [{canary: 1}]")]
    #[case("turns: [{text: {canary: canary}}]")]
    #[case("turns: [{text: [canary, expected canary]}]")]
    #[case("turns: [{delayMilliseconds: canary}]")]
    #[case("turns: [{yield: {mode: canary}}]")]
    #[case("turns: [{toolCalls: [{name: canary canary}]}]")]
    #[case("turns: [{toolCalls: [{name: a, arguments: canary}]}]")]
    #[case("turns: [{toolCalls: [{name: a, arguments: {canary: {[canary]: 1}}}]}]")]
    #[case("turns: [{toolCalls: [{name: a, arguments: {canary: 1, canary: 2}, canary: 3}]}]")]
    #[case("atEnd: canary\nturns: [{text: a}]")]
    #[case("turns: [*canary]")]
    #[case("turns: &canary [\"canary]")]
    #[case("turns: [\u{1}canary]")]
    #[case("canary: canary: canary")]
    #[case("%canary canary")]
    #[case("a: 1\n---\ncanary: 1")]
    fn an_error_contains_nothing_of_the_text(#[case] text: &str) {
        let error = ModelScript::parse(text).unwrap_err().to_string();
        assert!(!error.contains("canary"), "{error}");
    }

    #[test]
    fn each_bound_trips_at_its_number_and_not_before() {
        let turns = |n: usize| format!("turns: [{}]", vec!["{text: a}"; n].join(","));
        assert!(ModelScript::parse(&turns(MAX_TURNS)).is_ok());
        assert!(ModelScript::parse(&turns(MAX_TURNS + 1)).is_err());
        let text = |n: usize| format!("turns: [{{text: {}}}]", "a".repeat(n));
        assert!(ModelScript::parse(&text(MAX_TEXT_BYTES)).is_ok());
        assert!(ModelScript::parse(&text(MAX_TEXT_BYTES + 1)).is_err());
        let calls = |n: usize| {
            format!(
                "turns: [{{yield: {{}}, toolCalls: [{}]}}]",
                vec!["{name: a}"; n].join(",")
            )
        };
        assert!(ModelScript::parse(&calls(MAX_TOOL_CALLS - 1)).is_ok());
        assert!(ModelScript::parse(&calls(MAX_TOOL_CALLS)).is_err());
        let padded = |n: usize| "turns: [{text: a}]".to_owned() + &"\n".repeat(n - 18);
        assert!(ModelScript::parse(&padded(MAX_SCRIPT_BYTES)).is_ok());
        let long = ModelScript::parse(&padded(MAX_SCRIPT_BYTES + 1)).unwrap_err();
        assert_eq!(
            long,
            ScriptError::TooLong {
                bytes: MAX_SCRIPT_BYTES + 1
            }
        );
    }

    #[test]
    fn a_yaml_bomb_is_refused() {
        let mut bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n".to_owned();
        for level in 1..12 {
            let inner = vec![format!("*a{}", level - 1); 9].join(",");
            bomb = format!("{bomb}a{level}: &a{level} [{inner}]\n");
        }
        let script = format!("turns: [{{toolCalls: [{{name: a, arguments: {{b: *a11}}}}]}}]\n{bomb}");
        assert!(ModelScript::parse(&script).is_err());
        let arguments = format!("{bomb}turns: [{{toolCalls: [{{name: a, arguments: {{b: *a11}}}}]}}]");
        assert!(ModelScript::parse(&arguments).is_err());
    }

    /// One long value with many aliases: each alias is one step for the parser, and another copy in memory.
    fn flat_bomb(value: &str, aliases: usize) -> String {
        let aliases = vec!["*a"; aliases].join(",");
        format!("turns: [{{toolCalls: [{{name: a, arguments: {{a: &a {value}, b: [{aliases}]}}}}]}}]")
    }

    #[rstest]
    #[case::a_list(&format!("[{}]", vec!["0"; 40_000].join(",")), 420)]
    #[case::empty_lists(&format!("[{}]", vec!["[]"; 40_000].join(",")), 420)]
    #[case::a_text(&"x".repeat(100_000), 420)]
    fn a_flat_yaml_bomb_is_refused_before_it_allocates_memory(#[case] value: &str, #[case] aliases: usize) {
        let bomb = flat_bomb(value, aliases);
        assert!(bomb.len() < MAX_SCRIPT_BYTES);
        let since = Instant::now();
        let few = ModelScript::parse(&flat_bomb(value, 1));
        let took_few = since.elapsed();
        assert!(few.is_ok(), "a few aliases are fine");
        let since = Instant::now();
        assert_eq!(ModelScript::parse(&bomb), Err(ScriptError::TooLarge));
        let took = since.elapsed();
        // All of its aliases would take hundreds of times as long as one; the seconds are for a machine that stalls.
        assert!(
            took < took_few * 30 + Duration::from_secs(5),
            "{took:?}, and with one alias {took_few:?}"
        );
    }

    #[test]
    fn the_largest_script_without_aliases_is_not_too_large() {
        let call = |arguments: String| format!("turns: [{{toolCalls: [{{name: a, arguments: {{b: {arguments}}}}}]}}]");
        let available = MAX_SCRIPT_BYTES - call(String::new()).len() - 2;
        let nodes = call(format!("[{}]", vec!["1"; available / 2].join(",")));
        assert!(nodes.len() > MAX_SCRIPT_BYTES - 4 && ModelScript::parse(&nodes).is_ok());
        let escapes = call(format!("\"{}\"", "\\L".repeat(available / 2)));
        assert!(escapes.len() > MAX_SCRIPT_BYTES - 4 && ModelScript::parse(&escapes).is_ok());
    }
}
