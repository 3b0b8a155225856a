//! Answers of models, whole and streamed, in each wire format.

use agentloop::api::failure::CallFailure;
use agentloop::engine::message::ModelAnswer;
use agentloop::provider::WireFormat;
use serde_json::{Value, json};

use super::mutation::mutated;
use super::rounds;

const FORMATS: [WireFormat; 4] = [
    WireFormat::OpenAiChat,
    WireFormat::JsonTools,
    WireFormat::AnthropicMessages,
    WireFormat::OpenAiResponses,
];

/// Usage reports whose counts contradict each other, by the names of each format.
fn contradictory_usage() -> Vec<Value> {
    let mut all = vec![
        json!({"input_tokens": 3, "output_tokens": 4, "cache_creation_input_tokens": 20,
            "cache_creation": {"ephemeral_5m_input_tokens": 15, "ephemeral_1h_input_tokens": 15}}),
        json!({"input_tokens": 3, "output_tokens": 4, "cache_creation_input_tokens": 0,
            "cache_creation": {"ephemeral_1h_input_tokens": 7}}),
        json!({"input_tokens": 0, "output_tokens": 4, "output_tokens_details": {"thinking_tokens": 5}}),
        json!({"input_tokens": 3, "output_tokens": 4, "cache_read_input_tokens": -1}),
    ];
    for (input, output) in [
        ("prompt_tokens", "completion_tokens"),
        ("input_tokens", "output_tokens"),
    ] {
        let (inputs, outputs) = (format!("{input}_details"), format!("{output}_details"));
        all.extend([
            json!({input: 12, output: 3, "total_tokens": 14}),
            json!({input: 12, output: 3, "total_tokens": 11}),
            json!({input: 12, output: 3, inputs.as_str(): {"cached_tokens": 13}}),
            json!({input: 12, output: 3, inputs.as_str(): {"cached_tokens": 8, "cache_write_tokens": 5}}),
            json!({input: 12, output: 3, outputs.as_str(): {"reasoning_tokens": 4}}),
            json!({input: 12, output: 3, "total_tokens": 16, outputs.as_str(): {"reasoning_tokens": 5}}),
            json!({input: 0, output: 3, "total_tokens": 1_000_000_000}),
        ]);
    }
    all
}

/// Each of these bodies with each of these reports.
fn with_usage(bodies: &[Value]) -> impl Iterator<Item = Value> + '_ {
    bodies.iter().flat_map(|body| {
        contradictory_usage().into_iter().map(|usage| {
            let mut body = body.clone();
            body["usage"] = usage;
            body
        })
    })
}

fn whole() -> Vec<Vec<u8>> {
    let said = json!({"text": "hm", "tool_calls": [{"name": "look", "arguments": {"at": 1}}]}).to_string();
    let all = [
        json!({"choices": [{"finish_reason": "tool_calls", "message": {"content": "hi", "refusal": null, "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "yield", "arguments": "{\"sleep\": 30}"}}]}}],
            "usage": {"prompt_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}}),
        json!({"choices": [{"finish_reason": "stop", "message": {"content": said}}], "usage": {"prompt_tokens": 1}}),
        json!({"type": "message", "stop_reason": "tool_use", "content": [{"type": "thinking", "thinking": "hm"},
            {"type": "text", "text": "hi"}, {"type": "tool_use", "id": "x", "name": "look", "input": {"at": 1}}],
            "usage": {"input_tokens": 3, "output_tokens": 4, "cache_creation_input_tokens": 20}}),
        json!({"status": "completed", "error": null, "output": [
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{\"at\": 1}"}],
            "usage": {"input_tokens": 12, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 8}}}),
    ];
    let all = all.iter().cloned().chain(with_usage(&all));
    all.map(|body| body.to_string().into_bytes()).collect()
}

fn streams() -> Vec<Vec<String>> {
    let plain = plain_streams();
    let contradictory = contradictory_usage().into_iter().flat_map(|usage| {
        let last = [
            json!({"choices": [], "usage": usage}),
            json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage}),
            json!({"type": "response.completed", "response": {"status": "completed", "output": [], "usage": usage}}),
        ];
        // Before the event that ends the stream, if there is one after the report of usage.
        let streams = plain.iter().cloned().zip(last).zip([1, 1, 0]);
        let streams = streams.map(|((mut events, last), after)| {
            let place = events.len() - after;
            events.insert(place, last.to_string());
            events
        });
        streams.collect::<Vec<_>>()
    });
    let contradictory: Vec<Vec<String>> = contradictory.collect();
    plain.into_iter().chain(contradictory).collect()
}

fn plain_streams() -> Vec<Vec<String>> {
    let chat =
        |delta: Value, finish: Value| json!({"choices": [{"delta": delta, "finish_reason": finish}]}).to_string();
    let call = |arguments: &str| {
        chat(
            json!({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "look", "arguments": arguments}}]}),
            Value::Null,
        )
    };
    vec![
        vec![
            chat(json!({"content": "hi"}), Value::Null),
            call("{\"at\""),
            call(": 1}"),
            chat(json!({}), json!("tool_calls")),
            json!({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}).to_string(),
            "[DONE]".into(),
        ],
        vec![
            json!({"type": "message_start", "message": {"usage": {"input_tokens": 3}}}).to_string(),
            json!({"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use", "id": "x", "name": "look"}})
                .to_string(),
            json!({"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": "{\"at\""}})
                .to_string(),
            json!({"type": "content_block_stop", "index": 0}).to_string(),
            json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 4}}).to_string(),
            json!({"type": "message_stop"}).to_string(),
        ],
        vec![
            json!({"type": "response.created", "response": {"status": "in_progress"}}).to_string(),
            json!({"type": "response.output_item.added", "output_index": 0, "item": {"type": "function_call", "call_id": "x", "name": "look"}})
                .to_string(),
            json!({"type": "response.function_call_arguments.delta", "output_index": 0, "delta": "{\"at\""}).to_string(),
            json!({"type": "response.output_text.delta", "output_index": 1, "delta": "hi"}).to_string(),
            json!({"type": "response.incomplete", "response": {"status": "incomplete", "usage": {"input_tokens": 3}}}).to_string(),
        ],
    ]
}

/// Calls have ids of their own, and no error repeats what the server said.
fn judge(read: Result<ModelAnswer, CallFailure>) {
    match read {
        Ok(answer) => {
            let mut ids: Vec<&str> = answer.tool_calls.iter().map(|call| call.id.as_str()).collect();
            let all = ids.len();
            ids.sort_unstable();
            ids.dedup();
            assert_eq!(ids.len(), all, "{answer:?}");
            assert!(all <= 128);
        }
        Err(failure) => {
            assert!(
                !failure.message.is_empty() && failure.message.len() < 200,
                "{failure:?}"
            );
            assert!(!failure.message.contains("canary"), "{failure:?}");
        }
    }
}

/// What is billed is a sum of parts that are not negative, however the report contradicts itself.
fn judge_bill(format: WireFormat, usage: &Value) {
    let Some(bill) = format.bill(usage) else {
        return;
    };
    let parts = [
        bill.input,
        bill.cache_read,
        bill.cache_write,
        bill.cache_write_1h,
        bill.output,
        bill.reasoning,
    ];
    assert!(parts.iter().all(|part| *part >= 0), "{usage}: {bill:?}");
    assert!(
        bill.reasoning <= bill.output && bill.all_input().is_some(),
        "{usage}: {bill:?}"
    );
}

#[test]
fn no_answer_of_a_model_makes_a_worker_panic() {
    let samples = whole();
    rounds(1, |random| {
        let (one, other) = (
            &samples[random.index(samples.len())],
            &samples[random.index(samples.len())],
        );
        let mut body = mutated(random, one, other);
        if random.percent(10) {
            body.extend_from_slice(b"canary");
        }
        let usage = serde_json::from_slice::<Value>(&body).map(|body| body["usage"].clone());
        for format in FORMATS {
            judge(format.answer(&body));
            if let Ok(usage) = &usage {
                judge_bill(format, usage);
            }
        }
    });
}

#[test]
fn no_contradictory_usage_is_billed_with_a_negative_part() {
    for usage in contradictory_usage() {
        for format in FORMATS {
            judge_bill(format, &usage);
        }
        let understood = FORMATS.iter().filter(|format| format.bill(&usage).is_some());
        assert!(understood.count() < FORMATS.len(), "{usage}");
    }
}

#[test]
fn no_stream_of_a_model_makes_a_worker_panic() {
    let samples = streams();
    rounds(1, |random| {
        let mut events = samples[random.index(samples.len())].clone();
        for _ in 0..random.range(0, 4) {
            let (at, from) = (random.index(events.len()), random.index(events.len()));
            match random.index(4) {
                0 => events.swap(at, from),
                1 => events.insert(at, events[from].clone()),
                2 if events.len() > 1 => drop(events.remove(at)),
                _ => {
                    let bytes = mutated(random, events[at].as_bytes(), events[from].as_bytes());
                    events[at] = String::from_utf8_lossy(&bytes).into_owned();
                }
            }
        }
        for format in FORMATS {
            let mut aggregate = format.aggregate();
            let mut done = false;
            let broken = events.iter().find_map(|event| match aggregate.push(event) {
                Ok(last) => {
                    done |= last;
                    None
                }
                Err(failure) => Some(failure),
            });
            judge(broken.map_or_else(|| aggregate.finish(done), Err));
        }
    });
}
