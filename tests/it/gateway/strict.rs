//! Servers that check a conversation as real ones do: roles, ids, calls with their results, fields, and above all that
//! reasoning is returned unchanged.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use rstest::rstest;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::loops::{Cell, Way};

/// Answers with calls of a tool before the one that ends the turn.
const ROUNDS: usize = 3;
/// The answer that is cut at its output limit, of the servers that cut one.
const CUT_ROUND: usize = 2;

/// Whose checks a server makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProviderFlavor {
    /// Thinking blocks and their signatures, in their places.
    Claude,
    /// `reasoning_content` in each message with tool calls, also where it is empty.
    DeepSeek,
    /// A signature on the first call of each answer.
    Gemini,
    /// Ids of nine letters and digits, and no user after a tool.
    Mistral,
    /// Items: each call with its output, and reasoning before what it led to. Nothing is stored. The first request is
    /// answered by a refusal, the first one of the second round by an error in a stream, and the third by an answer that
    /// is cut at its output limit.
    Responses,
}

#[derive(Clone, Debug, Default)]
pub struct Seen {
    answered: usize,
    pub refused: Option<String>,
    pub bodies: Vec<Value>,
}

#[derive(Clone)]
pub struct StrictProvider {
    kind: ProviderFlavor,
    /// The first request of this round is never answered.
    mute: Option<usize>,
    seen: Arc<watch::Sender<Seen>>,
}

impl StrictProvider {
    /// A server on a port of this host, and its address.
    pub async fn start(host: &str, kind: ProviderFlavor, mute: Option<usize>) -> (Self, SocketAddr) {
        let strict = Self {
            kind,
            mute,
            seen: Arc::default(),
        };
        let listener = tokio::net::TcpListener::bind((host, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().fallback(respond).with_state(strict.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        (strict, address)
    }

    /// What was seen once the turn is over, or at the first request that was refused.
    pub async fn judged(&self, seconds: u64) -> Seen {
        self.until(seconds, |seen| seen.answered > ROUNDS).await
    }

    /// What was seen once `requests` requests had come, or at the first that was refused.
    pub async fn asked(&self, requests: usize, seconds: u64) -> Seen {
        self.until(seconds, |seen| seen.bodies.len() >= requests).await
    }

    async fn until(&self, seconds: u64, enough: impl Fn(&Seen) -> bool) -> Seen {
        let mut seen = self.seen.subscribe();
        let over = seen.wait_for(|seen| enough(seen) || seen.refused.is_some());
        let over = tokio::time::timeout(Duration::from_secs(seconds), over).await;
        over.expect("the turn did not end").unwrap().clone()
    }

    /// Whether this is the request that is never answered.
    fn is_mute(&self, round: usize) -> bool {
        self.mute == Some(round) && self.is_first(round)
    }

    /// Whether no other request of this round was seen.
    fn is_first(&self, round: usize) -> bool {
        let of_round = |body: &&Value| rounds(body) == round;
        self.seen.borrow().bodies.iter().filter(of_round).count() == 1
    }
}

/// Answers that a request repeats.
fn rounds(body: &Value) -> usize {
    let messages = array(&body["messages"]).iter();
    let items = array(&body["input"]).iter();
    messages.filter(|message| message["role"] == "assistant").count()
        + items.filter(|item| item["type"] == "reasoning").count()
}

/// The model of a spec that speaks to such a server.
pub fn model(kind: ProviderFlavor, address: SocketAddr) -> Value {
    if kind == ProviderFlavor::Claude {
        let reasoning = json!({"budgetTokens": 1024});
        json!({"baseURL": format!("http://{address}"), "reasoning": reasoning, "maxOutputTokens": 2048})
    } else {
        let reasoning = json!({"effort": "Low"});
        json!({"baseURL": format!("http://{address}/v1"), "reasoning": reasoning, "maxOutputTokens": 2048})
    }
}

/// What the model thought before its answer. Nothing before the second: some servers say so with an empty text.
fn thought(round: usize) -> String {
    if round == 1 {
        String::new()
    } else {
        format!("thought {round}")
    }
}

fn signature(round: usize) -> String {
    format!("c2lnbmF0dXJl{round}")
}

/// Each answer has the same ids, as some servers give them.
fn calls(round: usize) -> Vec<(String, &'static str, Value)> {
    if round < ROUNDS {
        ["a.1", "a_1"]
            .map(|id| (id.to_owned(), "look", json!({"at": round})))
            .to_vec()
    } else {
        vec![("a.1".into(), "yield", json!({"sleep": 3600}))]
    }
}

async fn respond(State(strict): State<StrictProvider>, body: String) -> Response {
    let body: Value = serde_json::from_str(&body).unwrap();
    let round = rounds(&body);
    let judged = match strict.kind {
        ProviderFlavor::Claude => judge_messages(&body),
        ProviderFlavor::Responses => judge_responses(&body),
        ProviderFlavor::DeepSeek | ProviderFlavor::Gemini | ProviderFlavor::Mistral => judge_chat(strict.kind, &body),
    };
    strict.seen.send_modify(|seen| {
        seen.bodies.push(body.clone());
        match &judged {
            Ok(()) => seen.answered = round + 1,
            Err(why) => seen.refused = seen.refused.take().or(Some(why.clone())),
        }
    });
    if let Err(message) = judged {
        let error = json!({"type": "error", "error": {"type": "invalid_request_error", "message": message}});
        return (StatusCode::BAD_REQUEST, axum::Json(error)).into_response();
    }
    if strict.is_mute(round) {
        return std::future::pending().await;
    }
    let streamed = body["stream"] == true;
    let text = match (strict.kind, streamed) {
        (ProviderFlavor::Claude, false) => claude(round).to_string(),
        (ProviderFlavor::Claude, true) => claude_stream(round),
        (ProviderFlavor::Responses, streamed) => {
            let whole = match round {
                0 if strict.is_first(0) => refusal(),
                1 if strict.is_first(1) => rate_limited(),
                round => response(round),
            };
            if streamed {
                response_stream(&whole)
            } else {
                whole.to_string()
            }
        }
        (kind, false) => chat(kind, round).to_string(),
        (kind, true) => chat_stream(kind, round),
    };
    let kind = if streamed {
        "text/event-stream"
    } else {
        "application/json"
    };
    ([(CONTENT_TYPE, kind)], text).into_response()
}

fn check(holds: bool, message: impl Into<String>) -> Result<(), String> {
    if holds { Ok(()) } else { Err(message.into()) }
}

fn known_fields(body: &Value, known: &[&str]) -> Result<(), String> {
    let unknown = body
        .as_object()
        .unwrap()
        .keys()
        .find(|name| !known.contains(&name.as_str()));
    unknown.map_or(Ok(()), |name| Err(format!("{name}: extra inputs are not permitted")))
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

/// Ids of one answer's calls: new, and well formed.
fn fresh(used: &mut Vec<String>, ids: &[String], nine: bool) -> Result<(), String> {
    for id in ids {
        let letters = id
            .bytes()
            .all(|letter| letter.is_ascii_alphanumeric() || b"_-".contains(&letter));
        check(letters && (1..=40).contains(&id.len()), format!("{id}: not an id"))?;
        let is_nine = id.len() == 9 && id.bytes().all(|letter| letter.is_ascii_alphanumeric());
        check(
            !nine || is_nine,
            format!("{id} must be a-z, A-Z, 0-9, with a length of 9"),
        )?;
        check(!used.contains(id), format!("{id}: ids must be unique"))?;
        used.push(id.clone());
    }
    Ok(())
}

fn texts(values: impl Iterator<Item = Value>) -> Vec<String> {
    values
        .map(|value| value.as_str().unwrap_or_default().to_owned())
        .collect()
}

fn judge_messages(body: &Value) -> Result<(), String> {
    known_fields(
        body,
        &[
            "model",
            "max_tokens",
            "messages",
            "stream",
            "system",
            "thinking",
            "tools",
        ],
    )?;
    let budget = body["thinking"]["budget_tokens"].as_u64().unwrap_or(0);
    check(budget >= 1024, "thinking.budget_tokens must be at least 1024")?;
    check(
        budget < body["max_tokens"].as_u64().unwrap(),
        "max_tokens must be greater than the budget",
    )?;
    check(
        body.to_string().matches("cache_control").count() <= 4,
        "at most 4 blocks with cache_control",
    )?;
    let (mut used, mut open, mut round) = (Vec::new(), Vec::new(), 0);
    for (place, message) in array(&body["messages"]).iter().enumerate() {
        let role = if place.is_multiple_of(2) { "user" } else { "assistant" };
        check(message["role"] == role, "roles must alternate")?;
        let blocks = array(&message["content"]);
        let of = |kind: &'static str| blocks.iter().filter(move |block| block["type"] == kind);
        if role == "user" {
            let results = texts(of("tool_result").map(|block| block["tool_use_id"].clone()));
            check(results == open, "tool_use without its tool_result")?;
            let after = blocks.iter().skip_while(|block| block["type"] != "tool_result");
            check(
                after.clone().all(|block| block["type"] == "tool_result"),
                "text after tool_result",
            )?;
            open.clear();
            continue;
        }
        let (mut first, second) = (blocks[0].clone(), &blocks[1]);
        let mut expected = claude(round)["content"][0].clone();
        for block in [&mut first, &mut expected] {
            block.as_object_mut().unwrap().remove("cache_control");
        }
        check(first == expected, "Expected `thinking` as it was, with its signature")?;
        check(second["type"] == "tool_use", "blocks must be in their order")?;
        open = texts(of("tool_use").map(|block| block["id"].clone()));
        fresh(&mut used, &open, false)?;
        round += 1;
    }
    check(open.is_empty(), "the last message must be the user's")
}

fn judge_chat(kind: ProviderFlavor, body: &Value) -> Result<(), String> {
    known_fields(
        body,
        &[
            "model",
            "max_tokens",
            "messages",
            "stream",
            "stream_options",
            "tools",
            "reasoning_effort",
        ],
    )?;
    let (mut used, mut open, mut round) = (Vec::new(), Vec::new(), 0);
    let mut before = "";
    for message in array(&body["messages"]) {
        let role = message["role"].as_str().unwrap();
        match role {
            "tool" => {
                let id = message["tool_call_id"].as_str().unwrap().to_owned();
                check(open.first() == Some(&id), "a result without its call")?;
                open.remove(0);
            }
            _ => check(open.is_empty(), "a call without its result")?,
        }
        check(role != before || role == "tool", "roles must alternate")?;
        if kind == ProviderFlavor::Mistral {
            check(
                (before, role) != ("tool", "user"),
                "Unexpected role 'user' after role 'tool'",
            )?;
        }
        before = role;
        if role != "assistant" {
            continue;
        }
        let wanted = array(&message["tool_calls"]);
        open = texts(wanted.iter().map(|call| call["id"].clone()));
        fresh(&mut used, &open, kind == ProviderFlavor::Mistral)?;
        let extra = |place: usize| wanted[place].get("extra_content").cloned();
        match kind {
            ProviderFlavor::DeepSeek => check(
                message["reasoning_content"] == json!(thought(round)),
                "The `reasoning_content` in the thinking mode must be passed back to the API.",
            )?,
            ProviderFlavor::Gemini => {
                let signed = json!({"google": {"thought_signature": signature(round)}});
                check(extra(0) == Some(signed), "Function call is missing a thought_signature")?;
                check(extra(1).is_none(), "a signature where none was")?;
            }
            ProviderFlavor::Mistral | ProviderFlavor::Claude | ProviderFlavor::Responses => {}
        }
        let known = ["role", "content", "tool_calls"];
        let own = (kind == ProviderFlavor::DeepSeek).then_some("reasoning_content");
        known_fields(message, &known.into_iter().chain(own).collect::<Vec<_>>())?;
        round += 1;
    }
    Ok(())
}

fn judge_responses(body: &Value) -> Result<(), String> {
    known_fields(
        body,
        &[
            "model",
            "instructions",
            "tools",
            "input",
            "reasoning",
            "include",
            "max_output_tokens",
            "store",
            "stream",
        ],
    )?;
    check(body["store"] == false, "nothing is to be stored")?;
    check(
        body["include"] == json!(["reasoning.encrypted_content"]),
        "without its content, reasoning cannot come back",
    )?;
    check(
        body["max_output_tokens"].as_u64().unwrap() >= 16,
        "integer below minimum value",
    )?;
    for tool in array(&body["tools"]) {
        known_fields(tool, &["type", "name", "description", "parameters", "strict"])?;
        check(
            tool["strict"] == false,
            "'required' must include every key in properties",
        )?;
    }
    let (mut used, mut open, mut round) = (Vec::new(), Vec::new(), 0);
    let mut before = "";
    for item in array(&body["input"]) {
        let kind = item["type"].as_str().unwrap();
        check(
            before != "reasoning" || kind == "function_call" || item["role"] == "assistant",
            "reasoning without its required following item",
        )?;
        let result = kind == "function_call_output";
        let follows_calls = result || (kind == "function_call" && before == "function_call");
        check(
            open.is_empty() || follows_calls,
            "No tool output found for function call",
        )?;
        let id = item["call_id"].as_str().unwrap_or_default().to_owned();
        match kind {
            "message" => judge_message(item, round)?,
            "reasoning" => {
                let as_it_was = *item == response(round)["output"][0];
                check(as_it_was, "The encrypted content could not be verified")?;
                round += 1;
            }
            "function_call" => {
                known_fields(item, &["type", "call_id", "name", "arguments"])?;
                let led_to = ["reasoning", "message", "function_call"].contains(&before);
                check(led_to, "function_call without its required reasoning item")?;
                fresh(&mut used, std::slice::from_ref(&id), false)?;
                open.push(id);
            }
            "function_call_output" => {
                known_fields(item, &["type", "call_id", "output"])?;
                check(open.first() == Some(&id), "No tool call found for function call output")?;
                open.remove(0);
            }
            other => return Err(format!("{other}: no such item")),
        }
        before = kind;
    }
    check(open.is_empty(), "No tool output found for function call")
}

/// A message of the user, or one of the model: a string, or parts as they were with the id and the status of the message.
fn judge_message(item: &Value, round: usize) -> Result<(), String> {
    if item["role"] == "user" {
        return known_fields(item, &["type", "role", "content"]);
    }
    check(item["role"] == "assistant", "no such role")?;
    if let Some(text) = item["content"].as_str() {
        known_fields(item, &["type", "role", "content"])?;
        return check(
            text == format!("text {}", round - 1),
            "the text is not that of the answer",
        );
    }
    let of_original = item["id"].is_string() && item["status"].is_string();
    let annotated = array(&item["content"])
        .iter()
        .all(|part| part["annotations"].is_array());
    check(of_original && annotated, "output_text without the id of its message")
}

fn claude(round: usize) -> Value {
    let thinking = if round == 1 {
        json!({"type": "redacted_thinking", "data": signature(round)})
    } else {
        json!({"type": "thinking", "thinking": thought(round), "signature": signature(round)})
    };
    let calls = calls(round)
        .into_iter()
        .map(|(id, name, input)| json!({"type": "tool_use", "id": id, "name": name, "input": input}));
    let content: Vec<Value> = std::iter::once(thinking).chain(calls).collect();
    json!({"type": "message", "role": "assistant", "content": content, "stop_reason": "tool_use",
        "usage": {"input_tokens": 900, "output_tokens": 90}})
}

fn claude_stream(round: usize) -> String {
    let whole = claude(round);
    let mut events = vec![json!({"type": "message_start", "message": {"content": [], "usage": whole["usage"]}})];
    for (index, block) in array(&whole["content"]).iter().enumerate() {
        let mut begin = block.clone();
        let mut deltas = Vec::new();
        match block["type"].as_str().unwrap() {
            "thinking" => {
                begin = json!({"type": "thinking", "thinking": "", "signature": ""});
                let (one, two) = block["thinking"].as_str().unwrap().split_at(3);
                deltas.extend([one, two].map(|piece| json!({"type": "thinking_delta", "thinking": piece})));
                deltas.push(json!({"type": "signature_delta", "signature": block["signature"]}));
            }
            "tool_use" => {
                begin["input"] = json!({});
                deltas.push(json!({"type": "input_json_delta", "partial_json": block["input"].to_string()}));
            }
            _ => {}
        }
        events.push(json!({"type": "content_block_start", "index": index, "content_block": begin}));
        let deltas = deltas.into_iter();
        events.extend(deltas.map(|delta| json!({"type": "content_block_delta", "index": index, "delta": delta})));
        events.push(json!({"type": "content_block_stop", "index": index}));
    }
    events.push(json!({"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": whole["usage"]}));
    events.push(json!({"type": "message_stop"}));
    let event = |event: &Value| format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap());
    events.iter().map(event).collect()
}

fn response(round: usize) -> Value {
    let thought = json!({"type": "reasoning", "id": format!("rs_{round}"), "encrypted_content": signature(round),
        "summary": [{"type": "summary_text", "text": thought(round)}], "of_a_later_version": [null]});
    let later = json!({"type": "of_a_later_version", "content": "text", "arguments": {"a": 1}});
    let part = json!({"type": "output_text", "text": format!("text {round}"), "annotations": []});
    let said = json!({"type": "message", "id": format!("msg_{round}"), "role": "assistant", "status": "completed",
        "content": [part]});
    let mut calls: Vec<Value> = calls(round)
        .into_iter()
        .map(|(id, name, arguments)| {
            json!({"type": "function_call", "id": format!("fc_{id}"), "call_id": id, "name": name,
                "arguments": arguments.to_string(), "status": "completed"})
        })
        .collect();
    let is_cut = round == CUT_ROUND;
    if let Some(last) = calls.last_mut().filter(|_| is_cut) {
        last["arguments"] = "{\"at".into();
        last["status"] = "incomplete".into();
    }
    let output: Vec<Value> = [thought, later, said].into_iter().chain(calls).collect();
    let mut whole = json!({"object": "response", "status": "completed", "error": null, "output": output,
        "usage": {"input_tokens": 900, "output_tokens": 90, "total_tokens": 990}});
    if is_cut {
        whole["status"] = "incomplete".into();
        whole["incomplete_details"] = json!({"reason": "max_output_tokens"});
    }
    whole
}

/// An answer in which the model refuses.
fn refusal() -> Value {
    let said = json!({"type": "message", "id": "msg_refused", "role": "assistant", "status": "completed",
        "content": [{"type": "refusal", "refusal": "I cannot help with that."}]});
    json!({"object": "response", "status": "completed", "error": null, "output": [said],
        "usage": {"input_tokens": 900, "output_tokens": 9, "total_tokens": 909}})
}

/// A response that failed before it was processed.
fn rate_limited() -> Value {
    let error = json!({"code": "rate_limit_exceeded", "message": "Rate limit reached for m"});
    json!({"object": "response", "status": "failed", "error": error, "output": [], "usage": null})
}

fn response_stream(whole: &Value) -> String {
    let mut events = vec![json!({"type": "response.created", "response": {"status": "in_progress", "output": []}})];
    for (index, item) in array(&whole["output"]).iter().enumerate() {
        events.extend(item_events(index, item));
    }
    let status = whole["status"].as_str().unwrap();
    events.push(json!({"type": format!("response.{status}"), "response": whole}));
    let event = |event: &Value| format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap());
    events.iter().map(event).collect()
}

/// The events of an item. A call that is cut has no last one.
fn item_events(index: usize, item: &Value) -> Vec<Value> {
    let mut begin = item.clone();
    let event = |kind: &str, name: &str, value: &Value| json!({"type": format!("response.{kind}"), "output_index": index, name: value});
    let delta = match item["type"].as_str().unwrap() {
        "reasoning" => {
            begin = json!({"type": "reasoning", "id": item["id"], "summary": []});
            event("reasoning_summary_text.delta", "delta", &"thought".into())
        }
        "function_call" => {
            begin["arguments"] = "".into();
            event("function_call_arguments.delta", "delta", &item["arguments"])
        }
        "message" => {
            begin["content"] = json!([]);
            let part = &item["content"][0];
            match part["type"].as_str().unwrap() {
                "refusal" => event("refusal.delta", "delta", &part["refusal"]),
                _ => event("output_text.delta", "delta", &part["text"]),
            }
        }
        _ => event("of_a_later_version.delta", "delta", &json!({"a": 1})),
    };
    let added = event("output_item.added", "item", &begin);
    let done = (item["status"] != "incomplete").then(|| event("output_item.done", "item", item));
    [added, delta].into_iter().chain(done).collect()
}

/// The message of a chat completion.
fn said(kind: ProviderFlavor, round: usize) -> Value {
    let calls = calls(round)
        .into_iter()
        .enumerate()
        .map(|(place, (id, name, arguments))| {
            let function = json!({"name": name, "arguments": arguments.to_string()});
            let mut call = json!({"id": id, "type": "function", "function": function});
            if kind == ProviderFlavor::Gemini && place == 0 {
                call["extra_content"] = json!({"google": {"thought_signature": signature(round)}});
            }
            call
        });
    let mut message = json!({"role": "assistant", "content": null, "tool_calls": calls.collect::<Vec<_>>()});
    if kind == ProviderFlavor::DeepSeek {
        message["reasoning_content"] = thought(round).into();
    }
    message
}

fn chat(kind: ProviderFlavor, round: usize) -> Value {
    json!({"choices": [{"index": 0, "message": said(kind, round), "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 900, "completion_tokens": 90}})
}

fn chat_stream(kind: ProviderFlavor, round: usize) -> String {
    let mut message = said(kind, round);
    let mut deltas = Vec::new();
    if let Some(thought) = message.as_object_mut().unwrap().remove("reasoning_content") {
        let (one, two) = thought.as_str().unwrap().split_at(thought.as_str().unwrap().len() / 2);
        deltas.extend([one, two].map(|piece| json!({"reasoning_content": piece})));
    }
    for (index, call) in array(&message["tool_calls"]).iter().enumerate() {
        let mut call = call.clone();
        call["index"] = index.into();
        deltas.push(json!({"tool_calls": [call]}));
    }
    let chunk = |delta: Value, reason: Value| {
        format!(
            "data: {}\n\n",
            json!({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})
        )
    };
    let chunks: String = deltas.into_iter().map(|delta| chunk(delta, Value::Null)).collect();
    let usage = json!({"choices": [], "usage": {"prompt_tokens": 900, "completion_tokens": 90}});
    chunks + &chunk(json!({}), json!("tool_calls")) + &format!("data: {usage}\n\ndata: [DONE]\n\n")
}

#[rstest]
#[tokio::test]
async fn a_turn_of_many_calls_passes_the_checks_of_servers_that_want_back_what_the_model_thought(
    #[values(
        ProviderFlavor::Claude,
        ProviderFlavor::DeepSeek,
        ProviderFlavor::Gemini,
        ProviderFlavor::Mistral,
        ProviderFlavor::Responses
    )]
    kind: ProviderFlavor,
    #[values(false, true)] stream: bool,
) {
    let (strict, address) = StrictProvider::start("127.0.0.1", kind, None).await;
    let way = match kind {
        ProviderFlavor::Claude => Way::AnthropicWhole,
        ProviderFlavor::Responses => Way::ResponsesWhole,
        ProviderFlavor::DeepSeek | ProviderFlavor::Gemini | ProviderFlavor::Mistral => Way::OpenAiWhole,
    };
    let mut model = model(kind, address);
    model["stream"] = stream.into();
    let spec = json!({"guardrails": {"rateLimits": [{"resource": "LLMCalls", "amount": 1000, "windowSeconds": 3600}]}});
    let cell = Cell::start(way, &model, spec, vec![]).await;
    let seen = strict.judged(30).await;
    cell.end().await;
    assert_eq!(seen.refused, None, "{:#}", seen.bodies.last().unwrap());
    // A refusal and an error take one request each.
    let more = if kind == ProviderFlavor::Responses { 2 } else { 0 };
    assert_eq!(seen.bodies.len(), ROUNDS + 1 + more);
}
