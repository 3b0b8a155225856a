//! A scripted answer as the chat-completions bytes that a server would have sent.
//!
//! Token rule, if a turn claims no usage: one token for every 4 bytes, rounded up. Input: the bytes of the request's
//! `messages` as compact JSON. Output: the bytes of the text, and of each tool call's name and arguments.

use serde_json::{Value, json};

use super::script::{ScriptedAnswer, TurnUsage};

/// The model name in every answer.
pub const MODEL: &str = "scripted";
/// `system_fingerprint` of every answer.
pub const FINGERPRINT: &str = "agentloop-scripted";
const BYTES_PER_TOKEN: usize = 4;

/// One answer, ready to be serialized.
pub struct ScriptedCompletion<'a> {
    pub answer: &'a ScriptedAnswer,
    /// Turns taken before this one; makes the ids of answers and tool calls unique and reproducible.
    pub taken: u64,
    /// The current time, in Unix seconds.
    pub created: i64,
    /// `messages` of the request.
    pub messages: &'a Value,
}

impl ScriptedCompletion<'_> {
    /// The answer as one JSON body.
    #[must_use]
    pub fn body(&self) -> String {
        let mut message = json!({"role": "assistant", "content": self.answer.text});
        if !self.answer.tool_calls.is_empty() {
            message["tool_calls"] = self.tool_calls(false);
        }
        let choice = json!({"index": 0, "message": message, "logprobs": null, "finish_reason": self.finish_reason()});
        let mut body = self.envelope("chat.completion", json!([choice]));
        body["usage"] = self.usage();
        body.to_string()
    }

    /// The answer as server-sent events, each ready to be sent; the usage comes last, before `[DONE]`.
    #[must_use]
    pub fn events(&self) -> Vec<String> {
        let mut deltas = vec![json!({"role": "assistant", "content": null})];
        // Word by word, so that a reader of the stream sees it arrive.
        let words = self.answer.text.iter().flat_map(|text| text.split_inclusive(' '));
        deltas.extend(words.map(|word| json!({"content": word})));
        if !self.answer.tool_calls.is_empty() {
            deltas.push(json!({"tool_calls": self.tool_calls(true)}));
        }
        let chunk = |delta: Value, finish: Value| {
            let choice = json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish});
            self.envelope("chat.completion.chunk", json!([choice]))
        };
        let mut chunks: Vec<Value> = deltas.into_iter().map(|delta| chunk(delta, Value::Null)).collect();
        chunks.push(chunk(json!({}), self.finish_reason().into()));
        let mut last = self.envelope("chat.completion.chunk", json!([]));
        last["usage"] = self.usage();
        chunks.push(last);
        let mut events: Vec<String> = chunks.iter().map(|chunk| format!("data: {chunk}\n\n")).collect();
        events.push("data: [DONE]\n\n".into());
        events
    }

    fn envelope(&self, object: &str, choices: Value) -> Value {
        let mut envelope = json!({
            "id": format!("chatcmpl-{MODEL}-{}", self.taken),
            "object": object,
            "created": self.created,
            "model": MODEL,
            "system_fingerprint": FINGERPRINT,
        });
        envelope["choices"] = choices;
        envelope
    }

    fn finish_reason(&self) -> &'static str {
        if self.answer.tool_calls.is_empty() {
            "stop"
        } else {
            "tool_calls"
        }
    }

    /// Only deltas number their calls.
    fn tool_calls(&self, numbered: bool) -> Value {
        let calls = self.answer.tool_calls.iter().enumerate().map(|(index, call)| {
            let mut wire = json!({
                "id": format!("call_{}_{index}", self.taken),
                "type": "function",
                "function": {"name": call.name, "arguments": Value::from(call.arguments.clone()).to_string()},
            });
            if numbered {
                wire["index"] = index.into();
            }
            wire
        });
        calls.collect()
    }

    fn usage(&self) -> Value {
        let usage = used(self.answer, self.messages);
        let prompt = usage.input_tokens + usage.cache_read_tokens;
        json!({
            "prompt_tokens": prompt,
            "completion_tokens": usage.output_tokens,
            "total_tokens": prompt + usage.output_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cache_read_tokens},
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        })
    }
}

/// The usage that an answer to a request with these messages reports.
#[must_use]
pub fn used(answer: &ScriptedAnswer, messages: &Value) -> TurnUsage {
    answer.usage.unwrap_or_else(|| {
        let call_bytes = answer
            .tool_calls
            .iter()
            .map(|call| call.name.len() + Value::from(call.arguments.clone()).to_string().len());
        let output = answer.text.as_ref().map_or(0, String::len) + call_bytes.sum::<usize>();
        TurnUsage {
            input_tokens: tokens(messages.to_string().len()),
            output_tokens: tokens(output),
            ..TurnUsage::default()
        }
    })
}

fn tokens(bytes: usize) -> u64 {
    bytes.div_ceil(BYTES_PER_TOKEN) as u64
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;

    use super::super::{ModelScript, ScriptedReply};
    use super::*;

    fn with(script: &str, look: impl Fn(&ScriptedCompletion<'_>)) {
        let script = ModelScript::parse(script).unwrap();
        let ScriptedReply::Answer(answer) = &script.turn(0).unwrap().reply else {
            panic!("a failure")
        };
        let messages = json!([{"role": "user", "content": "hello"}]);
        look(&ScriptedCompletion {
            answer,
            taken: 7,
            created: 1_700_000_000,
            messages: &messages,
        });
    }

    #[test]
    fn an_answer_identifies_itself_as_scripted() {
        with("turns: [{text: 'hello there'}]", |completion| {
            let body: Value = serde_json::from_str(&completion.body()).unwrap();
            assert_eq!(body["model"], "scripted");
            assert_eq!(body["system_fingerprint"], "agentloop-scripted");
            assert_eq!(body["id"], "chatcmpl-scripted-7");
            assert_eq!(body["created"], 1_700_000_000);
            assert_eq!(body["choices"][0]["message"]["content"], "hello there");
            assert_eq!(body["choices"][0]["finish_reason"], "stop");
        });
    }

    #[test]
    fn tokens_are_a_quarter_of_the_bytes_rounded_up() {
        with("turns: [{text: '12345', yield: {sleep: 5}}]", |completion| {
            let body: Value = serde_json::from_str(&completion.body()).unwrap();
            let messages = r#"[{"role":"user","content":"hello"}]"#.len() as u64;
            let output = ("12345".len() + "yield".len() + r#"{"mode":"sleep","sleep":5}"#.len()) as u64;
            assert_eq!(body["usage"]["prompt_tokens"], messages.div_ceil(4));
            assert_eq!(body["usage"]["completion_tokens"], output.div_ceil(4));
        });
    }

    #[test]
    fn claimed_usage_is_written_the_way_providers_do() {
        let usage = "{inputTokens: 10, outputTokens: 5, cacheReadTokens: 90, reasoningTokens: 3}";
        with(&format!("turns: [{{text: a, usage: {usage}}}]"), |completion| {
            let body: Value = serde_json::from_str(&completion.body()).unwrap();
            let expected = json!({
                "prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 105,
                "prompt_tokens_details": {"cached_tokens": 90},
                "completion_tokens_details": {"reasoning_tokens": 3},
            });
            assert_eq!(body["usage"], expected);
        });
    }

    #[test]
    fn a_stream_adds_up_to_the_whole_answer() {
        with(
            "turns: [{text: 'one two three', toolCalls: [{name: look, arguments: {at: me}}]}]",
            |completion| {
                let events = completion.events();
                assert_eq!(events.last().unwrap(), "data: [DONE]\n\n");
                let chunks: Vec<Value> = events[..events.len() - 1]
                    .iter()
                    .map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap())
                    .collect();
                let text: String = chunks
                    .iter()
                    .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
                    .collect();
                assert_eq!(text, "one two three");
                let calls: Vec<&Value> = chunks
                    .iter()
                    .map(|chunk| &chunk["choices"][0]["delta"]["tool_calls"])
                    .filter(|calls| !calls.is_null())
                    .collect();
                let call = json!({
                    "id": "call_7_0", "type": "function", "index": 0,
                    "function": {"name": "look", "arguments": "{\"at\":\"me\"}"},
                });
                assert_eq!(calls, [&json!([call])]);
                let whole: Value = serde_json::from_str(&completion.body()).unwrap();
                assert_eq!(chunks.last().unwrap()["usage"], whole["usage"]);
                assert_eq!(chunks[chunks.len() - 2]["choices"][0]["finish_reason"], "tool_calls");
            },
        );
    }
}
