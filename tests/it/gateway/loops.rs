//! A real gateway with a real worker: what a server must send so that the loop receives it, in each format.

use std::time::Duration;

use agentloop::api::status::LoopState;
use agentloop::link::messages::{LoopReport, PodReport};
use agentloop::worker::startup::{self, WorkerOptions};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::harness::GatewayHarness;
use super::provider::{ReceivedRequest, ScriptedResponse, Step, send};

/// Input from no cache and output of each answer here that has usage.
pub const USED: (i64, i64) = (30, 8);

/// The id of each answer here.
pub const ANSWER_ID: &str = "answer-1";

/// How answers come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    OpenAiWhole,
    OpenAiStreamed,
    AnthropicWhole,
    AnthropicStreamed,
    ResponsesWhole,
    ResponsesStreamed,
}

pub const WAYS: [Way; 6] = [
    Way::OpenAiWhole,
    Way::OpenAiStreamed,
    Way::AnthropicWhole,
    Way::AnthropicStreamed,
    Way::ResponsesWhole,
    Way::ResponsesStreamed,
];

impl Way {
    /// What its name says.
    pub fn is_anthropic(self) -> bool {
        matches!(self, Self::AnthropicWhole | Self::AnthropicStreamed)
    }

    /// What its name says.
    pub fn is_streamed(self) -> bool {
        matches!(
            self,
            Self::OpenAiStreamed | Self::AnthropicStreamed | Self::ResponsesStreamed
        )
    }

    /// An answer with this text and these calls (id, name, arguments), ended for this reason; with usage or without.
    pub fn answer(self, text: &str, calls: &[(&str, &str, &str)], reason: &str, usage: bool) -> ScriptedResponse {
        match self {
            Self::OpenAiWhole => ScriptedResponse::json(200, &completion(text, calls, reason, usage).to_string()),
            Self::AnthropicWhole => ScriptedResponse::json(200, &message(text, calls, reason, usage).to_string()),
            Self::OpenAiStreamed => {
                ScriptedResponse::stream(vec![send(&chunks(text, calls)), send(&last_chunks(reason, usage))])
            }
            Self::AnthropicStreamed => ScriptedResponse::stream(vec![
                send(&events(text, calls, usage)),
                send(&last_events(reason, usage)),
            ]),
            Self::ResponsesWhole => ScriptedResponse::json(200, &response(text, calls, reason, usage).to_string()),
            Self::ResponsesStreamed => ScriptedResponse::stream(vec![
                send(&items(text, calls)),
                send(&last_item(&response(text, calls, reason, usage))),
            ]),
        }
    }

    /// The call of a tool whose arguments stop like this in the middle, and then this.
    pub fn half(self, arguments: &str, then: Step) -> ScriptedResponse {
        let calls = [("a", "yield", arguments)];
        match self {
            Self::OpenAiStreamed => ScriptedResponse::stream(vec![send(&chunks("", &calls)), then]),
            Self::AnthropicStreamed => ScriptedResponse::stream(vec![send(&events("", &calls, true)), then]),
            Self::ResponsesStreamed => ScriptedResponse::stream(vec![send(&items("", &calls)), then]),
            Self::ResponsesWhole => {
                ScriptedResponse::json(200, "").steps(vec![send("{\"status\":\"completed\",\"output\":[{"), then])
            }
            Self::OpenAiWhole => {
                ScriptedResponse::json(200, "").steps(vec![send("{\"choices\":[{\"message\":{\"tool_calls\":"), then])
            }
            Self::AnthropicWhole => {
                ScriptedResponse::json(200, "").steps(vec![send("{\"type\":\"message\",\"content\":[{"), then])
            }
        }
    }

    /// A long sleep.
    pub fn sleep(self) -> ScriptedResponse {
        let reason = if self.is_anthropic() { "tool_use" } else { "tool_calls" };
        self.answer("", &[("s", "yield", "{\"sleep\":3600}")], reason, true)
    }
}

fn completion(text: &str, calls: &[(&str, &str, &str)], reason: &str, usage: bool) -> Value {
    let calls: Vec<Value> = calls
        .iter()
        .map(|(id, name, arguments)| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}))
        .collect();
    let message = json!({"role": "assistant", "content": text, "tool_calls": calls});
    let choices = json!([{"index": 0, "message": message, "finish_reason": reason}]);
    let mut body = json!({"id": ANSWER_ID, "choices": choices});
    if usage {
        body["usage"] = chat_usage();
    }
    body
}

fn chat_usage() -> Value {
    json!({"prompt_tokens": USED.0, "completion_tokens": USED.1})
}

fn chunks(text: &str, calls: &[(&str, &str, &str)]) -> String {
    let chunk = |delta: Value| {
        let choices = json!([{"index": 0, "delta": delta, "finish_reason": null}]);
        format!("data: {}\n\n", json!({"id": ANSWER_ID, "choices": choices}))
    };
    let calls = calls.iter().enumerate().map(|(index, (id, name, arguments))| {
        let function = json!({"name": name, "arguments": arguments});
        chunk(json!({"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}))
    });
    std::iter::once(chunk(json!({"role": "assistant", "content": text})))
        .chain(calls)
        .collect()
}

fn last_chunks(reason: &str, usage: bool) -> String {
    let end = json!({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]});
    let usage = if usage {
        format!("data: {}\n\n", json!({"choices": [], "usage": chat_usage()}))
    } else {
        String::new()
    };
    format!("data: {end}\n\n{usage}data: [DONE]\n\n")
}

fn message(text: &str, calls: &[(&str, &str, &str)], reason: &str, usage: bool) -> Value {
    // Arguments that are no object come as what they are: text.
    let input = |arguments: &str| serde_json::from_str(arguments).unwrap_or_else(|_| json!(arguments));
    let calls = calls
        .iter()
        .map(|(id, name, arguments)| json!({"type": "tool_use", "id": id, "name": name, "input": input(arguments)}));
    let text = (!text.is_empty()).then(|| json!({"type": "text", "text": text}));
    let content: Vec<Value> = text.into_iter().chain(calls).collect();
    let mut body = json!({
        "type": "message", "id": ANSWER_ID, "role": "assistant", "content": content, "stop_reason": reason,
    });
    if usage {
        body["usage"] = json!({"input_tokens": USED.0, "output_tokens": USED.1});
    }
    body
}

fn event(event: &Value) -> String {
    format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap())
}

fn events(text: &str, calls: &[(&str, &str, &str)], usage: bool) -> String {
    let mut head = json!({
        "type": "message", "id": ANSWER_ID, "role": "assistant", "content": [], "stop_reason": null,
    });
    if usage {
        head["usage"] = json!({"input_tokens": USED.0, "output_tokens": 1});
    }
    let mut all = event(&json!({"type": "message_start", "message": head}));
    let text = (!text.is_empty()).then(|| {
        (
            json!({"type": "text", "text": ""}),
            json!({"type": "text_delta", "text": text}),
        )
    });
    let calls = calls.iter().map(|(id, name, arguments)| {
        let block = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
        (block, json!({"type": "input_json_delta", "partial_json": arguments}))
    });
    for (index, (block, delta)) in text.into_iter().chain(calls).enumerate() {
        all += &event(&json!({"type": "content_block_start", "index": index, "content_block": block}));
        all += &event(&json!({"type": "content_block_delta", "index": index, "delta": delta}));
    }
    all
}

fn last_events(reason: &str, usage: bool) -> String {
    let mut end = json!({"type": "message_delta", "delta": {"stop_reason": reason}});
    if usage {
        end["usage"] = json!({"output_tokens": USED.1});
    }
    event(&end) + &event(&json!({"type": "message_stop"}))
}

fn response(text: &str, calls: &[(&str, &str, &str)], reason: &str, usage: bool) -> Value {
    let output = output(text, calls);
    let mut body = json!({
        "object": "response", "id": ANSWER_ID, "status": "completed", "error": null, "output": output,
    });
    if reason == "content_filter" {
        body["status"] = "incomplete".into();
        body["incomplete_details"] = json!({ "reason": reason });
    }
    if usage {
        body["usage"] = json!({"input_tokens": USED.0, "output_tokens": USED.1, "total_tokens": USED.0 + USED.1});
    }
    body
}

fn output(text: &str, calls: &[(&str, &str, &str)]) -> Vec<Value> {
    let calls = calls.iter().map(
        |(id, name, arguments)| json!({"type": "function_call", "id": format!("fc_{id}"), "call_id": id, "name": name, "arguments": arguments}),
    );
    let content = json!([{"type": "output_text", "text": text}]);
    let text = (!text.is_empty()).then(|| json!({"type": "message", "role": "assistant", "content": content}));
    text.into_iter().chain(calls).collect()
}

/// The items of a streamed response. Calls are not complete yet: their last event is not among these.
fn items(text: &str, calls: &[(&str, &str, &str)]) -> String {
    let created = json!({"id": ANSWER_ID, "status": "in_progress", "output": []});
    let mut all = event(&json!({"type": "response.created", "response": created}));
    for (index, item) in output(text, calls).into_iter().enumerate() {
        let (mut begun, mut kind, mut delta) = (item.clone(), "output_text", json!(text));
        if item["type"] == "function_call" {
            begun["arguments"] = "".into();
            (kind, delta) = ("function_call_arguments", item["arguments"].clone());
        } else {
            begun["content"] = json!([]);
        }
        all += &event(&json!({"type": "response.output_item.added", "output_index": index, "item": begun}));
        all += &event(&json!({"type": format!("response.{kind}.delta"), "output_index": index, "delta": delta}));
    }
    all
}

fn last_item(response: &Value) -> String {
    let items = response["output"].as_array().unwrap().iter().enumerate();
    let done =
        items.map(|(index, item)| json!({"type": "response.output_item.done", "output_index": index, "item": item}));
    let end = format!("response.{}", response["status"].as_str().unwrap());
    done.map(|done| event(&done)).collect::<String>() + &event(&json!({"type": end, "response": response}))
}

/// A harness with a worker in it.
pub struct Cell {
    pub harness: GatewayHarness,
    terminate: CancellationToken,
    worker: tokio::task::JoinHandle<Result<(), startup::WorkerError>>,
}

impl Cell {
    /// A loop with these fields of its model and its spec, and a server that does this.
    pub async fn start(way: Way, model: &Value, spec: Value, acts: Vec<ScriptedResponse>) -> Self {
        Self::start_with(way, model, spec, acts, Vec::new()).await
    }

    /// The same, with further environment variables of the gateway.
    pub async fn start_with(
        way: Way,
        model: &Value,
        spec: Value,
        acts: Vec<ScriptedResponse>,
        environment: Vec<(&'static str, String)>,
    ) -> Self {
        let mut harness = GatewayHarness::new().await;
        harness.environment = environment;
        let (api, version) = match way {
            Way::AnthropicWhole | Way::AnthropicStreamed => ("AnthropicMessages", ""),
            Way::OpenAiWhole | Way::OpenAiStreamed => ("OpenAIChat", "/v1"),
            Way::ResponsesWhole | Way::ResponsesStreamed => ("OpenAIResponses", "/v1"),
        };
        let address = format!("http://{}{version}", harness.provider.address);
        harness.set(&json!({"api": api, "baseURL": address, "stream": way.is_streamed()}));
        harness.set(model);
        for act in acts {
            harness.provider.will(act);
        }
        harness.start().await;
        let terminate = CancellationToken::new();
        let worker = tokio::spawn(startup::run(options(&harness, spec), terminate.clone()));
        Self {
            harness,
            terminate,
            worker,
        }
    }

    /// The loop is at rest: asleep, or held.
    pub async fn at_rest(&self) -> (PodReport, LoopReport) {
        let rests = |report: &LoopReport| matches!(report.state, LoopState::Sleeping | LoopState::Paused);
        let report = self.harness.controller.until("a loop at rest", |report| {
            let asked = i64::try_from(self.harness.provider.seen().len()).unwrap();
            report.loop_.as_ref().is_some_and(rests) && report.usage.calls == asked
        });
        let report = report.await;
        let of_loop = report.loop_.clone().unwrap();
        (report, of_loop)
    }

    pub async fn end(self) {
        self.ended().await;
    }

    /// Ends the worker; the gateway stays.
    pub async fn ended(self) -> GatewayHarness {
        self.terminate.cancel();
        self.worker.await.unwrap().unwrap();
        self.harness
    }
}

fn options(harness: &GatewayHarness, more: Value) -> WorkerOptions {
    let mut spec = json!({
        "model": harness.model, "instructions": "Be brief.",
        "loop": {"minDelayMilliseconds": 1, "maxDelayMilliseconds": 10},
    });
    let Value::Object(more) = more else { panic!() };
    spec.as_object_mut().unwrap().extend(more);
    let config = json!({
        "namespace": "ns", "name": "a", "uid": "agent-uid", "epoch": 3, "linkUrl": "https://unused",
        "spec": spec,
    });
    WorkerOptions {
        config: serde_json::from_value(config).unwrap(),
        pod_uid: "pod".into(),
        socket: harness.path("gateway.sock"),
        journal_dir: harness.path("journal"),
        instructions_file: harness.path("instructions"),
        skills_dir: harness.path("skills"),
        workspace_dir: harness.path("workspace"),
        drain: Duration::from_secs(1),
        log: agentloop::telemetry::log_export::ProcessLog::default(),
    }
}

/// The id of the call that a server was asked.
pub fn call_of(seen: &ReceivedRequest) -> &str {
    seen.headers["idempotency-key"]
        .to_str()
        .unwrap()
        .trim_start_matches("agent-uid-")
}
