//! Requests of Anthropic messages.

use std::borrow::Borrow;

use serde_json::{Map, Value, json};

use crate::images::EncodedImage;
use crate::prompt::{CacheLifetime, ModelPrompt, own, temperature};
use crate::tool_call_ids::ToolCallIds;
use agentloop_api::agent::{self, ModelSpec, ReasoningEffort};
use agentloop_engine::message::{Message, MessagePart, ReasoningContent, ToolCall, ToolDefinition};

/// Builds the body of a request. The API requires an output limit; the gateway may lower it.
#[must_use]
pub fn request<M: Borrow<Message>>(model: &ModelSpec, prompt: &ModelPrompt<'_, M>) -> Value {
    let mut body = Map::new();
    body.insert("model".into(), model.name.clone().into());
    body.insert("max_tokens".into(), model.output_limit().into());
    match &model.reasoning {
        Some(reasoning) => body.extend(thinking(model, reasoning, prompt.messages)),
        // Validated on admission: never together with reasoning.
        None => {
            if let Some(temperature) = temperature(model) {
                body.insert("temperature".into(), temperature.into());
            }
        }
    }
    // The API rejects other schemas.
    if let Some(schema) = prompt.answer_schema.filter(|schema| schema.is_exact) {
        let config = body.entry("output_config").or_insert_with(|| json!({}));
        config["format"] = json!({"type": "json_schema", "schema": schema.schema});
    }
    body.insert("stream".into(), model.stream.into());
    let mark = prompt.lifetime.map(mark);
    if !prompt.tools.is_empty() {
        let mut tools: Vec<Value> = prompt.tools.iter().map(tool).collect();
        put(tools.last_mut(), mark.as_ref());
        body.insert("tools".into(), tools.into());
    }
    let system: Vec<&str> = prompt
        .messages
        .iter()
        .filter_map(|message| match message.borrow() {
            Message::System { text } if !text.trim().is_empty() => Some(text.as_str()),
            Message::System { .. } | Message::User { .. } | Message::Assistant { .. } | Message::Tool { .. } => None,
        })
        .collect();
    if !system.is_empty() {
        let mut block = json!({"type": "text", "text": system.join("\n\n")});
        put(Some(&mut block), mark.as_ref());
        body.insert("system".into(), json!([block]));
    }
    body.insert("messages".into(), conversation(model, prompt, mark.as_ref()));
    Value::Object(body)
}

/// Builds a cache breakpoint, which caches everything before it. A request may have four, and longer lifetimes must
/// come first, so all breakpoints of one request have the same lifetime.
fn mark(lifetime: CacheLifetime) -> Value {
    match lifetime {
        CacheLifetime::FiveMinutes => json!({"type": "ephemeral"}),
        CacheLifetime::OneHour => json!({"type": "ephemeral", "ttl": "1h"}),
    }
}

/// Adds a cache breakpoint to a block. It is not content: it does not change what is cached.
fn put(block: Option<&mut Value>, mark: Option<&Value>) {
    if let (Some(block), Some(mark)) = (block.and_then(Value::as_object_mut), mark) {
        block.insert("cache_control".into(), mark.clone());
    }
}

/// Builds the fields for extended thinking.
fn thinking(
    model: &ModelSpec,
    reasoning: &agent::ReasoningSpec,
    messages: &[impl Borrow<Message>],
) -> Map<String, Value> {
    let mut fields = Map::new();
    if let Some(effort) = reasoning.effort {
        let effort = match effort {
            ReasoningEffort::Minimal | ReasoningEffort::Low => "low",
            ReasoningEffort::Medium => "medium",
            ReasoningEffort::High => "high",
        };
        fields.insert("thinking".into(), json!({"type": "adaptive"}));
        fields.insert("output_config".into(), json!({ "effort": effort }));
    } else if let Some(tokens) = reasoning.budget_tokens
        && may_think(model, messages)
    {
        fields.insert("thinking".into(), json!({"type": "enabled", "budget_tokens": tokens}));
    }
    fields
}

/// Whether thinking with a budget may be enabled. If the current turn began with [`ToolCall`]s without thinking, for
/// example before an edit of the spec, the API refuses it until the turn is over.
fn may_think(model: &ModelSpec, messages: &[impl Borrow<Message>]) -> bool {
    let turn = messages
        .rsplit(|message| matches!(message.borrow(), Message::User { .. }))
        .next();
    let first = turn
        .unwrap_or_default()
        .iter()
        .find_map(|message| match message.borrow() {
            Message::Assistant { reasoning, .. } => Some(reasoning),
            Message::System { .. } | Message::User { .. } | Message::Tool { .. } => None,
        });
    first.is_none_or(|reasoning| own(model, reasoning.as_ref()).is_some())
}

fn tool(tool: &ToolDefinition) -> Value {
    json!({"name": tool.name, "description": tool.description, "input_schema": tool.parameters})
}

/// Builds messages with alternating roles.
#[derive(Default)]
struct ConversationBuilder {
    messages: Vec<(&'static str, Vec<Value>)>,
}

impl ConversationBuilder {
    /// Adds blocks. Consecutive blocks of one role form one message. Empty messages are skipped, because the API
    /// refuses them.
    fn push(&mut self, role: &'static str, mut blocks: Vec<Value>) {
        match self.messages.last_mut() {
            Some((last, joined)) if *last == role => joined.append(&mut blocks),
            _ if blocks.is_empty() => {}
            _ => self.messages.push((role, blocks)),
        }
    }

    /// Returns the position of the block that has this many blocks after it.
    fn place(&self, mut before_end: usize) -> Option<(usize, usize)> {
        for (at, (_, blocks)) in self.messages.iter().enumerate().rev() {
            if let Some(block) = blocks.len().checked_sub(before_end + 1) {
                return Some((at, block));
            }
            before_end -= blocks.len();
        }
        None
    }

    fn ends_with_result(&self) -> bool {
        let last = self.messages.last().and_then(|(_, blocks)| blocks.last());
        last.is_some_and(|block| block["type"] == "tool_result")
    }

    /// Returns the last block that the hot state will not change, and that can therefore be cached.
    fn stays(&self, has_state: bool) -> Option<(usize, usize)> {
        self.place(usize::from(has_state && self.ends_with_result()))
    }

    /// Adds the hot state. After tool results it goes into the last result: a separate text there makes the model end
    /// its turn with an empty answer, and the server drop its thinking.
    fn add_state(&mut self, state: &str) {
        let Some(state) = text_block(state) else { return };
        if !self.ends_with_result() {
            self.push("user", vec![state]);
            return;
        }
        let last = self.messages.last_mut().and_then(|(_, blocks)| blocks.last_mut());
        if let Some(result) = last {
            let before = result["content"].take();
            let mut content: Vec<Value> = match before.as_str() {
                Some(text) => text_block(text).into_iter().collect(),
                None => before.as_array().cloned().unwrap_or_default(),
            };
            content.push(state);
            result["content"] = content.into();
        }
    }

    fn mark(&mut self, place: Option<(usize, usize)>, mark: Option<&Value>) {
        let block = place.and_then(|(message, block)| self.messages.get_mut(message)?.1.get_mut(block));
        // Thinking blocks cannot have a cache breakpoint.
        let takes_it = |block: &&mut Value| matches!(block["type"].as_str(), Some("text" | "tool_use" | "tool_result"));
        put(block.filter(takes_it), mark);
    }
}

/// Builds the messages. Tool results have the role `user`. Two blocks get a breakpoint: the last stable one, and the
/// one that was last in the previous call. The server looks back only twenty blocks from a breakpoint, and an answer
/// with ten calls adds more.
fn conversation<M: Borrow<Message>>(model: &ModelSpec, prompt: &ModelPrompt<'_, M>, mark: Option<&Value>) -> Value {
    let mut all = ConversationBuilder::default();
    let mut ids = ToolCallIds::default();
    let mut before = None;
    for message in prompt.messages {
        match message.borrow() {
            Message::System { .. } => {}
            Message::User { text } => all.push("user", text_block(text).into_iter().collect()),
            Message::Tool {
                id,
                text,
                failed,
                artifacts,
                ..
            } => {
                let images = prompt.shown(artifacts).map(|(_, image)| image_block(image));
                let result = tool_result(&ids.result(id), text, *failed, images.collect());
                all.push("user", vec![result]);
            }
            Message::Assistant {
                text,
                tool_calls,
                reasoning,
            } => {
                // An answer follows here, so the previous call ended at this position.
                before = all.stays(prompt.state.is_some());
                ids.answer();
                let calls = tool_calls
                    .iter()
                    .map(|call| tool_use(&ids.call(&call.id), call))
                    .collect();
                let text = text.as_deref().unwrap_or_default();
                all.push("assistant", blocks(text, calls, own(model, reasoning.as_ref())));
            }
        }
    }
    let last = all.stays(prompt.state.is_some());
    all.mark(before, mark);
    all.mark(last.filter(|_| before != last), mark);
    if let Some(state) = prompt.state {
        all.add_state(state);
    }
    all.messages
        .into_iter()
        .map(|(role, content)| json!({"role": role, "content": content}))
        .collect()
}

/// Rebuilds the blocks of an answer in their original order.
fn blocks(text: &str, calls: Vec<Value>, reasoning: Option<&ReasoningContent>) -> Vec<Value> {
    let mut all = Vec::new();
    let (mut text, mut calls) = (text, calls.into_iter());
    for part in reasoning.map(|reasoning| &reasoning.parts).into_iter().flatten() {
        match part {
            MessagePart::Opaque(block) => all.push(block.clone()),
            MessagePart::Text(bytes) => {
                let (piece, rest) = text.split_at_checked(*bytes).unwrap_or((text, ""));
                all.extend(text_block(piece));
                text = rest;
            }
            MessagePart::Call => all.extend(calls.next()),
        }
    }
    all.extend(text_block(text));
    all.extend(calls);
    all
}

/// Builds a text block, unless the text is blank: the API refuses blank text.
fn text_block(text: &str) -> Option<Value> {
    (!text.trim().is_empty()).then(|| json!({"type": "text", "text": text}))
}

fn tool_use(id: &str, call: &ToolCall) -> Value {
    json!({"type": "tool_use", "id": id, "name": call.name, "input": input(&call.arguments)})
}

fn tool_result(id: &str, text: &str, failed: bool, images: Vec<Value>) -> Value {
    let mut result = json!({"type": "tool_result", "tool_use_id": id, "content": text});
    if !images.is_empty() {
        result["content"] = text_block(text).into_iter().chain(images).collect();
    }
    if failed {
        result["is_error"] = true.into();
    }
    result
}

fn image_block(image: &EncodedImage) -> Value {
    json!({"type": "image", "source": {"type": "base64", "media_type": image.media_type, "data": image.data}})
}

/// Parses arguments, which must be an object; malformed ones are wrapped in one.
fn input(arguments: &str) -> Value {
    match serde_json::from_str::<Map<String, Value>>(arguments) {
        Ok(object) => Value::Object(object),
        Err(_) if arguments.trim().is_empty() => json!({}),
        Err(_) => json!({"malformed": arguments}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::call;
    use agentloop_api::agent::ModelApi;

    fn request(model: &ModelSpec, messages: &[Message], tools: &[ToolDefinition]) -> Value {
        super::request(model, &ModelPrompt::of(messages, tools))
    }

    fn model() -> ModelSpec {
        let model = json!({"api": "AnthropicMessages", "name": "m", "temperature": "0.7", "maxOutputTokens": 9});
        serde_json::from_value(model).unwrap()
    }

    #[test]
    fn roles_alternate_and_results_are_the_users() {
        let messages = [
            Message::System { text: "be".into() },
            Message::User { text: "go".into() },
            Message::Assistant {
                reasoning: None,
                text: Some("I look.".into()),
                tool_calls: vec![call("a.1", r#"{"sleep":1}"#), call("b", "{\"a\": "), call("c", " ")],
            },
            Message::Tool {
                id: "a.1".into(),
                text: "ok".into(),
                failed: false,
                reasoning: Some("kept here".into()),
                artifacts: agentloop_engine::tool::ResultArtifacts::default(),
            },
            Message::Tool {
                id: "b".into(),
                text: String::new(),
                failed: false,
                reasoning: None,
                artifacts: agentloop_engine::tool::ResultArtifacts::default(),
            },
            Message::User { text: "next".into() },
            Message::Assistant {
                reasoning: None,
                text: Some(" ".into()),
                tool_calls: vec![],
            },
            Message::User { text: "more".into() },
        ];
        let tools = [ToolDefinition {
            name: "yield".into(),
            description: "d".into(),
            parameters: json!({"type": "object"}),
        }];
        assert_eq!(
            request(&model(), &messages, &tools),
            json!({
                "model": "m",
                "max_tokens": 9,
                "temperature": 0.7,
                "stream": true,
                "tools": [{"name": "yield", "description": "d", "input_schema": {"type": "object"}}],
                "system": [{"type": "text", "text": "be"}],
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "go"}]},
                    {"role": "assistant", "content": [
                        {"type": "text", "text": "I look."},
                        {"type": "tool_use", "id": "a_1", "name": "yield", "input": {"sleep": 1}},
                        {"type": "tool_use", "id": "b", "name": "yield", "input": {"malformed": "{\"a\": "}},
                        {"type": "tool_use", "id": "c", "name": "yield", "input": {}}]},
                    {"role": "user", "content": [
                        {"type": "tool_result", "tool_use_id": "a_1", "content": "ok"},
                        {"type": "tool_result", "tool_use_id": "b", "content": ""},
                        {"type": "text", "text": "next"},
                        {"type": "text", "text": "more"}]},
                ],
            })
        );
    }

    #[test]
    fn empty_content_is_left_out_because_servers_refuse_it() {
        let body = request(&model(), &[Message::System { text: " ".into() }], &[]);
        assert_eq!((body.get("system"), body.get("tools")), (None, None));
        assert_eq!(body["messages"], json!([]));
    }

    fn thought(model: &str) -> Vec<Message> {
        vec![
            Message::User { text: "go".into() },
            Message::Assistant {
                text: Some("I look.Now.".into()),
                tool_calls: vec![call("a", "{}")],
                reasoning: Some(ReasoningContent {
                    api: ModelApi::AnthropicMessages,
                    model: model.into(),
                    parts: vec![
                        MessagePart::Opaque(json!({"type": "thinking", "thinking": "hm", "signature": "s"})),
                        MessagePart::Text(7),
                        MessagePart::Opaque(json!({"type": "redacted_thinking", "data": "x"})),
                        MessagePart::Call,
                    ],
                    calls: vec![],
                }),
            },
            Message::Tool {
                id: "a".into(),
                text: "no".into(),
                failed: true,
                reasoning: None,
                artifacts: agentloop_engine::tool::ResultArtifacts::default(),
            },
        ]
    }

    #[test]
    fn reasoning_is_returned_verbatim_in_its_place_only_to_the_model_that_wrote_it() {
        let sent = |wrote: &str| request(&model(), &thought(wrote), &[])["messages"][1]["content"].clone();
        let call = json!({"type": "tool_use", "id": "a", "name": "yield", "input": {}});
        assert_eq!(
            sent("m"),
            json!([{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "I look."},
                {"type": "redacted_thinking", "data": "x"}, call, {"type": "text", "text": "Now."}])
        );
        assert_eq!(sent("other"), json!([{"type": "text", "text": "I look.Now."}, call]));
    }

    #[test]
    fn a_failed_tool_result_is_marked_as_an_error() {
        let result = &request(&model(), &thought("m"), &[])["messages"][2]["content"][0];
        assert_eq!(
            *result,
            json!({"type": "tool_result", "tool_use_id": "a", "content": "no", "is_error": true})
        );
    }

    #[test]
    fn reasoning_is_requested_by_effort_or_budget_and_then_without_a_temperature() {
        let model = |reasoning: Value| {
            let model = json!({"api": "AnthropicMessages", "name": "m", "temperature": "1", "reasoning": reasoning});
            serde_json::from_value::<ModelSpec>(model).unwrap()
        };
        let body = request(&model(json!({"effort": "Medium"})), &thought("other"), &[]);
        assert_eq!(body["thinking"], json!({"type": "adaptive"}));
        assert_eq!(body["output_config"], json!({"effort": "medium"}));
        assert_eq!(body.get("temperature"), None);
        let budget = model(json!({"budgetTokens": 2048}));
        let body = request(&budget, &thought("m"), &[]);
        assert_eq!(body["thinking"], json!({"type": "enabled", "budget_tokens": 2048}));
        // The turn under way called tools without thinking, so thinking begins with the next turn.
        let mut messages = thought("other");
        assert_eq!(request(&budget, &messages, &[]).get("thinking"), None);
        messages.push(Message::User { text: "next".into() });
        assert!(request(&budget, &messages, &[]).get("thinking").is_some());
    }

    /// Builds calls with results, with this many in each answer. Returns the breakpoints on tools, system, and message
    /// blocks.
    fn marks(answers: &[usize], state: Option<&str>) -> (Value, Vec<(usize, usize)>) {
        let mut messages = vec![
            Message::System { text: "be".into() },
            Message::User { text: "go".into() },
        ];
        for (answer, calls) in answers.iter().enumerate() {
            let id = |place: usize| format!("c{answer}-{place}");
            messages.push(Message::Assistant {
                text: None,
                tool_calls: (0..*calls).map(|place| call(&id(place), "{}")).collect(),
                reasoning: None,
            });
            messages.extend((0..*calls).map(|place| Message::Tool {
                id: id(place),
                text: "seen".into(),
                failed: false,
                reasoning: None,
                artifacts: agentloop_engine::tool::ResultArtifacts::default(),
            }));
        }
        let tool = || ToolDefinition {
            name: "yield".into(),
            description: "d".into(),
            parameters: json!({"type": "object"}),
        };
        let tools = [tool(), tool()];
        let prompt = ModelPrompt {
            images: None,
            messages: &messages[..],
            state,
            tools: &tools,
            lifetime: Some(CacheLifetime::OneHour),
            cache_key: None,
            answer_schema: None,
        };
        let body = super::request(&model(), &prompt);
        let mark = json!({"type": "ephemeral", "ttl": "1h"});
        assert_eq!(
            (
                body["tools"][0].get("cache_control"),
                &body["tools"][1]["cache_control"]
            ),
            (None, &mark)
        );
        assert_eq!(body["system"][0]["cache_control"], mark);
        let mut marked = Vec::new();
        for (message, content) in body["messages"].as_array().unwrap().iter().enumerate() {
            for (block, value) in content["content"].as_array().unwrap().iter().enumerate() {
                if value.get("cache_control") == Some(&mark) {
                    marked.push((message, block));
                }
            }
        }
        assert_eq!(body.to_string().matches("cache_control").count(), 2 + marked.len());
        (body, marked)
    }

    #[test]
    fn a_prompt_has_at_most_four_marks_and_one_of_two_is_at_the_last_mark_of_the_previous_call() {
        for state in [None, Some("now")] {
            let mut last = None;
            for answers in [&[][..], &[1], &[1, 10], &[1, 10, 3], &[1, 10, 3, 1]] {
                let (_, marked) = marks(answers, state);
                assert_eq!(marked.len(), if answers.is_empty() { 1 } else { 2 });
                assert!(last.is_none_or(|last| last == marked[0]), "{answers:?}");
                last = marked.last().copied();
            }
        }
    }

    #[test]
    fn the_state_follows_a_runtime_message_or_joins_the_last_result_behind_the_last_mark() {
        let (body, marked) = marks(&[], Some("now"));
        assert_eq!(
            body["messages"][0]["content"][1],
            json!({"type": "text", "text": "now"})
        );
        assert_eq!(marked, [(0, 0)]);
        let (body, marked) = marks(&[2], Some("now"));
        let content = json!([{"type": "text", "text": "seen"}, {"type": "text", "text": "now"}]);
        assert_eq!(body["messages"][2]["content"][1]["content"], content);
        assert_eq!(body["messages"][2]["content"].as_array().unwrap().len(), 2);
        assert_eq!(marked, [(0, 0), (2, 0)]);
        let (body, _) = marks(&[2], None);
        assert_eq!(body["messages"][2]["content"][1]["content"], "seen");
    }
}
