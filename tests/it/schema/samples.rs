//! For each rule of the schema: objects that it takes, objects that it refuses, and what it says then.

use super::tool_samples;
use agentloop::api::extra::{OWN_FIELDS, REFUSED_FIELDS, RESERVED_HEADERS};
use serde_json::{Value, json};

/// A rule with its samples.
pub struct Row {
    /// A part of the rule's message that no other rule has.
    pub says: &'static str,
    /// What a real API server says instead where it never comes to ask the rule.
    pub server_says: Option<&'static str>,
    /// The object before the change, for rules about changes.
    pub before: Option<Value>,
    /// Objects that keep all rules.
    pub passes: Vec<Value>,
    /// Objects that break this rule.
    pub fails: Vec<Value>,
    /// More of them, of which only a real server knows: the local CEL takes `_` in a field's name for something else.
    pub server_fails: Vec<Value>,
}

/// The smallest Agent with the Scripted model.
pub fn scripted() -> Value {
    json!({
        "apiVersion": "agentloop.dev/v1alpha1",
        "kind": "Agent",
        "metadata": {"name": "x"},
        "spec": {
            "instructions": "You watch.",
            "model": {
                "api": "Scripted",
                "name": "scripted",
                "scripted": {"configMapKeyRef": {"name": "script", "key": "script.yaml"}},
            },
        },
    })
}

/// The smallest Agent with a model of an OpenAI-compatible server.
pub fn openai() -> Value {
    let mut agent = scripted();
    agent["spec"]["model"] = json!({"api": "OpenAIChat", "name": "m", "baseURL": "https://api.example.com/v1"});
    agent
}

/// The smallest Agent with a model of an Anthropic server.
pub fn anthropic() -> Value {
    let mut agent = scripted();
    agent["spec"]["model"] = json!({"api": "AnthropicMessages", "name": "m", "baseURL": "https://api.example.com"});
    agent
}

/// The smallest Agent with a model of an OpenAI Responses server.
pub fn responses() -> Value {
    let mut agent = openai();
    agent["spec"]["model"]["api"] = "OpenAIResponses".into();
    agent
}

/// `agent` with a change: `null` removes a field.
pub fn with(mut agent: Value, change: &Value) -> Value {
    merge(&mut agent, change);
    agent
}

fn merge(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                if value.is_null() {
                    into.remove(key);
                } else {
                    merge(into.entry(key).or_insert(json!({})), value);
                }
            }
        }
        (into, from) => *into = from.clone(),
    }
}

fn base_url(url: &str) -> Value {
    with(openai(), &json!({"spec": {"model": {"baseURL": url}}}))
}
fn model(change: &Value) -> Value {
    with(openai(), &json!({"spec": {"model": change}}))
}
/// TLS settings of a model or a tool server.
pub(super) fn authority() -> Value {
    json!({"caSecretRef": {"name": "roots"}})
}
fn named(name: &str) -> Value {
    with(scripted(), &json!({"metadata": {"name": name}}))
}
fn temperature(value: &str) -> Value {
    model(&json!({"temperature": value}))
}
fn workspace(workspace: &Value) -> Value {
    with(scripted(), &json!({"spec": {"workspace": workspace}}))
}

fn storage(change: &Value) -> Value {
    with(scripted(), &json!({"spec": {"storage": change}}))
}
fn pod(change: &Value) -> Value {
    with(scripted(), &json!({"spec": {"pod": change}}))
}

pub fn row(says: &'static str, passes: Vec<Value>, fails: Vec<Value>) -> Row {
    Row {
        says,
        server_says: None,
        before: None,
        passes,
        fails,
        server_fails: Vec::new(),
    }
}

pub fn change(says: &'static str, before: Value, passes: Vec<Value>, fails: Vec<Value>) -> Row {
    Row {
        before: Some(before),
        ..row(says, passes, fails)
    }
}

fn hot_field(field: &Value) -> Value {
    let field = with(json!({"name": "positions"}), field);
    with(scripted(), &json!({"spec": {"hotState": {"fields": [field]}}}))
}

fn total(change: &Value) -> Value {
    with(scripted(), &json!({"spec": {"guardrails": {"total": change}}}))
}

/// All rules.
pub fn rows() -> Vec<Row> {
    let mut all = top();
    all.extend(of_tasks());
    all.extend(super::goals::rows());
    all.extend(models());
    all.extend(models().iter().map(light));
    all.extend(storages());
    all.extend(workspaces());
    all.extend(pods());
    all.extend(totals());
    all.extend(tool_servers());
    all.extend(tool_samples::rows());
    all.extend(active_hours());
    all.extend(super::budgets::rows());
    all.extend(super::sensors::rows());
    all
}

/// The same rule for `spec.lightModel`: the object's model becomes its light one.
fn light(row: &Row) -> Row {
    let moved = |object: &Value| {
        let mut moved = object.clone();
        moved["spec"]["lightModel"] = object["spec"]["model"].clone();
        moved["spec"]["model"] = scripted()["spec"]["model"].clone();
        moved
    };
    let all = |objects: &[Value]| objects.iter().map(moved).collect();
    let renamed = |text: &'static str| -> &'static str { text.replace("spec.model", "spec.lightModel").leak() };
    Row {
        says: renamed(row.says),
        server_says: row.server_says.map(renamed),
        before: row.before.as_ref().map(moved),
        passes: all(&row.passes),
        fails: all(&row.fails),
        server_fails: all(&row.server_fails),
    }
}

fn pre_check(check: &Value) -> Value {
    with(scripted(), &json!({"spec": {"continuous": {"preCheck": check}}}))
}

fn tasks(task: &Value) -> Value {
    with(scripted(), &json!({"spec": {"mode": "Task", "task": task}}))
}

fn response_server(url: &str) -> Value {
    tasks(&json!({"responses": {"http": {"url": url}}}))
}

fn of_tasks() -> Vec<Row> {
    let deferring = json!({"spec": {"tools": {"approval": {"whilePending": "Continue"}}}});
    let private = json!({"spec": {"task": {"responses": {"http": {"tls": authority()}}}}});
    let heartbeat = json!({"spec": {"continuous": {"heartbeat": {"everySeconds": 60, "prompt": "look"}}}});
    vec![
        row(
            "spec.task is supported in mode Task only",
            vec![scripted(), tasks(&json!({"maxIterations": 5}))],
            vec![with(scripted(), &json!({"spec": {"task": {"maxIterations": 5}}}))],
        ),
        row(
            "spec.task.minIntervalSeconds repeats spec.task.prompt",
            vec![
                tasks(&json!({"prompt": "look", "minIntervalSeconds": 900})),
                tasks(&json!({"prompt": "look"})),
            ],
            vec![tasks(&json!({"minIntervalSeconds": 900}))],
        ),
        row(
            "spec.task.idlePodSeconds and spec.task.minIntervalSeconds exclude each other",
            vec![tasks(&json!({"prompt": "look", "idlePodSeconds": 60}))],
            vec![tasks(
                &json!({"prompt": "look", "idlePodSeconds": 60, "minIntervalSeconds": 900}),
            )],
        ),
        row(
            "spec.task.idlePodSeconds needs a volume that outlives the pod",
            vec![with(
                tasks(&json!({})),
                &json!({"spec": {"storage": {"ephemeral": true}}}),
            )],
            vec![with(
                tasks(&json!({"idlePodSeconds": 60})),
                &json!({"spec": {"storage": {"ephemeral": true}}}),
            )],
        ),
        row(
            "spec.continuous.heartbeat and spec.continuous.preCheck are supported in mode Continuous only",
            vec![with(scripted(), &heartbeat), tasks(&json!({}))],
            vec![with(tasks(&json!({})), &heartbeat)],
        ),
        row(
            "spec.tools.approval.whilePending must be Pause in mode Task",
            vec![
                with(scripted(), &deferring),
                with(
                    tasks(&json!({})),
                    &json!({"spec": {"tools": {"approval": {"whilePending": "Pause"}}}}),
                ),
            ],
            vec![with(tasks(&json!({})), &deferring)],
        ),
        row(
            "spec.task.responses.http.url must be http(s)://host[:port][/path]",
            vec![
                response_server("https://example.com/responses"),
                response_server("http://10.0.0.1:8080"),
            ],
            vec![
                response_server("ftp://example.com"),
                response_server("https://ann:secret@example.com/"),
                response_server("https://example.com/a b"),
            ],
        ),
        row(
            "spec.task.responses.http.url must not have a fragment",
            vec![response_server("https://example.com/?set=all")],
            vec![response_server("https://example.com/#all")],
        ),
        row(
            "spec.task.responses.http.tls requires a url that starts with https://",
            vec![with(response_server("https://example.com/"), &private)],
            vec![with(response_server("http://example.com/"), &private)],
        ),
    ]
}

fn top() -> Vec<Row> {
    let from = json!({"configMapKeyRef": {"name": "texts", "key": "prompt"}});
    let elsewhere = json!({"spec": {"instructions": null, "instructionsFrom": from}});
    let both = json!({"spec": {"instructionsFrom": from}});
    vec![
        row(
            "metadata.name must be at most 53 characters",
            vec![named(&"a".repeat(53))],
            vec![named(&"a".repeat(54)), named(&"a".repeat(253))],
        ),
        row(
            "metadata.name must not contain a dot",
            vec![named("team-a")],
            vec![named("team.a")],
        ),
        row(
            "spec.instructions and spec.instructionsFrom are both set",
            vec![scripted(), with(scripted(), &elsewhere)],
            vec![with(scripted(), &both)],
        ),
        row(
            "the agent has no instructions",
            vec![scripted(), with(scripted(), &elsewhere)],
            vec![with(scripted(), &json!({"spec": {"instructions": null}}))],
        ),
        row(
            "spec.continuous.preCheck evaluates changes of spec.hotState.fields",
            vec![
                pre_check(&json!({"enabled": false, "prompt": "all"})),
                with(
                    pre_check(&json!({"prompt": "all"})),
                    &json!({"spec": {"hotState": {"fields": [{"name": "n", "type": "Number"}]}}}),
                ),
            ],
            vec![
                pre_check(&json!({})),
                pre_check(&json!({"enabled": true})),
                with(pre_check(&json!({})), &json!({"spec": {"hotState": {"fields": []}}})),
            ],
        ),
        row(
            "spec.hotState.fields[].maxItems is supported with type Array only",
            vec![
                hot_field(&json!({"type": "Array", "maxItems": 20})),
                hot_field(&json!({"type": "Number", "ttlSeconds": 30, "refreshTool": "get_balance"})),
            ],
            vec![hot_field(&json!({"type": "Object", "maxItems": 20}))],
        ),
        change(
            "spec.mode is immutable",
            scripted(),
            vec![scripted(), with(scripted(), &json!({"spec": {"mode": "Continuous"}}))],
            vec![with(scripted(), &json!({"spec": {"mode": "Task"}}))],
        ),
        row(
            "spec.loop.minDelayMilliseconds (default 100) must not exceed",
            vec![with(
                scripted(),
                &json!({"spec": {"loop": {"minDelayMilliseconds": 10_000}}}),
            )],
            vec![
                with(scripted(), &json!({"spec": {"loop": {"minDelayMilliseconds": 10_001}}})),
                with(scripted(), &json!({"spec": {"loop": {"maxDelayMilliseconds": 99}}})),
            ],
        ),
    ]
}

fn totals() -> Vec<Row> {
    vec![
        row(
            "spec.guardrails.total is empty",
            vec![total(&json!({"tokens": 0})), total(&json!({"costUSD": "1"}))],
            vec![total(&json!({}))],
        ),
        row(
            "spec.guardrails.total.costUSD must be a decimal number",
            vec![
                total(&json!({"costUSD": "0"})),
                total(&json!({"costUSD": "25.00"})),
                total(&json!({"costUSD": "999999999.999999"})),
            ],
            vec![
                total(&json!({"costUSD": "25.0000001"})),
                total(&json!({"costUSD": "1000000000"})),
                total(&json!({"costUSD": "$25"})),
                total(&json!({"costUSD": "-1"})),
                total(&json!({"costUSD": ".5"})),
                total(&json!({"costUSD": "1e3"})),
            ],
        ),
    ]
}

fn tls() -> Row {
    row(
        "spec.model.tls requires a baseURL that starts with https://",
        vec![
            model(&json!({"baseURL": "https://m/v1", "tls": authority()})),
            model(&json!({"baseURL": "https://m/v1"})),
            model(&json!({"baseURL": "http://m/v1"})),
        ],
        vec![
            model(&json!({"baseURL": "http://m/v1", "tls": authority()})),
            with(scripted(), &json!({"spec": {"model": {"tls": authority()}}})),
        ],
    )
}

fn models() -> Vec<Row> {
    let key = json!({"name": "key", "key": "value"});
    let mut rows = base_urls();
    rows.extend(wire_formats());
    rows.push(tool_calling());
    rows.push(tls());
    rows.extend(image_input());
    rows.extend(structured_output());
    rows.extend(reasoning());
    rows.extend(prices());
    rows.extend([
        row(
            "spec.model.baseURL is required with api OpenAIChat",
            vec![openai()],
            vec![model(&json!({"baseURL": null}))],
        ),
        row(
            "spec.model.baseURL is not supported with api Scripted",
            vec![scripted()],
            vec![with(
                scripted(),
                &json!({"spec": {"model": {"baseURL": "https://api.example.com"}}}),
            )],
        ),
        row(
            "spec.model.scripted is required with api Scripted",
            vec![scripted()],
            vec![with(scripted(), &json!({"spec": {"model": {"scripted": null}}}))],
        ),
        row(
            "spec.model.scripted is supported with api Scripted only",
            vec![openai()],
            vec![model(
                &json!({"scripted": {"configMapKeyRef": {"name": "a", "key": "b"}}}),
            )],
        ),
        row(
            "spec.model.apiKeySecretRef is not supported with api Scripted",
            vec![
                model(&json!({"apiKeySecretRef": key})),
                with(anthropic(), &json!({"spec": {"model": {"apiKeySecretRef": key}}})),
            ],
            vec![with(scripted(), &json!({"spec": {"model": {"apiKeySecretRef": key}}}))],
        ),
        row(
            "spec.model.streamIdleTimeoutSeconds (default 60) must not exceed",
            vec![model(&json!({"timeoutSeconds": 60}))],
            vec![
                model(&json!({"timeoutSeconds": 59})),
                model(&json!({"streamIdleTimeoutSeconds": 301})),
            ],
        ),
        row(
            "spec.model.temperature must be a decimal number from 0 to 2",
            vec![
                temperature("0"),
                temperature("0.7"),
                temperature("1.25"),
                temperature("2"),
                temperature("2.0"),
            ],
            vec![
                temperature("2.1"),
                temperature("3"),
                temperature("-1"),
                temperature("hot"),
                temperature("1."),
                temperature(".5"),
                temperature("0,7"),
                temperature("1e0"),
            ],
        ),
    ]);
    rows
}

#[expect(clippy::too_many_lines, reason = "a table")]
fn wire_formats() -> Vec<Row> {
    let header = |name: &str| model(&json!({"headers": {name: "v"}}));
    let refuses = |fields: &[(&str, &str)]| -> (Vec<Value>, Vec<Value>) {
        let fields = fields.iter().filter(|(name, _)| *name != "n");
        let extra = fields.map(|(name, kind)| {
            (
                name.contains('_'),
                model(&json!({"extraBody": {*name: value_of(kind)}})),
            )
        });
        let (server, both): (Vec<_>, Vec<_>) = extra.partition(|(odd, _)| *odd);
        let samples = |some: Vec<(bool, Value)>| some.into_iter().map(|(_, object)| object).collect();
        (samples(both), samples(server))
    };
    let extras = || model(&json!({"extraBody": {"rag_enabled": true, "think": {"deep": [1, null]}, "top_k": 40}}));
    let extra = |says, (fails, server_fails)| Row {
        server_fails,
        ..row(says, vec![extras()], fails)
    };
    vec![
        row(
            "spec.model.baseURL is required with api OpenAIResponses",
            vec![responses()],
            vec![with(responses(), &json!({"spec": {"model": {"baseURL": null}}}))],
        ),
        row(
            "spec.model.maxOutputTokens must be at least 16 with api OpenAIResponses",
            vec![
                with(responses(), &json!({"spec": {"model": {"maxOutputTokens": 16}}})),
                model(&json!({"maxOutputTokens": 15})),
            ],
            vec![with(responses(), &json!({"spec": {"model": {"maxOutputTokens": 15}}}))],
        ),
        row(
            "spec.model.baseURL is required with api AnthropicMessages",
            vec![anthropic()],
            vec![with(anthropic(), &json!({"spec": {"model": {"baseURL": null}}}))],
        ),
        row(
            "spec.model.baseURL must not end in /v1 with api AnthropicMessages",
            vec![anthropic(), openai()],
            vec![
                with(
                    anthropic(),
                    &json!({"spec": {"model": {"baseURL": "https://api.example.com/v1"}}}),
                ),
                with(
                    anthropic(),
                    &json!({"spec": {"model": {"baseURL": "http://host/v1//"}}}),
                ),
            ],
        ),
        row(
            "spec.model.temperature must be from 0 to 1 with api AnthropicMessages",
            ["0", "0.99", "1", "1.0"]
                .map(|text| with(anthropic(), &json!({"spec": {"model": {"temperature": text}}})))
                .into(),
            ["1.1", "2", "1.0001"]
                .map(|text| with(anthropic(), &json!({"spec": {"model": {"temperature": text}}})))
                .into(),
        ),
        row(
            "spec.model.outputLimitParameter is supported with api OpenAIChat only",
            vec![
                model(&json!({"outputLimitParameter": "MaxTokens"})),
                model(&json!({"outputLimitParameter": "MaxCompletionTokens"})),
                with(
                    anthropic(),
                    &json!({"spec": {"model": {"outputLimitParameter": "Auto"}}}),
                ),
            ],
            vec![with(
                anthropic(),
                &json!({"spec": {"model": {"outputLimitParameter": "MaxTokens"}}}),
            )],
        ),
        row(
            "spec.model.headers and spec.model.extraBody are not supported with api Scripted",
            vec![
                scripted(),
                extras(),
                with(anthropic(), &json!({"spec": {"model": {"headers": {"X-A": "b"}}}})),
            ],
            vec![
                with(scripted(), &json!({"spec": {"model": {"headers": {"X-A": "b"}}}})),
                with(scripted(), &json!({"spec": {"model": {"extraBody": {"a": 1}}}})),
            ],
        ),
        row(
            "spec.model.headers has an invalid header name",
            vec![header("X-Session-ID"), header(&"a".repeat(64))],
            vec![header(&"a".repeat(65)), header("two words"), header("a:b"), header("")],
        ),
        row(
            "spec.model.headers must not set any of",
            vec![header("X-Authorization"), header("X-No-Session")],
            RESERVED_HEADERS
                .iter()
                .map(|name| header(name))
                .chain(["Authorization", "X-API-Key", "HOST", "x-agentloop-call"].map(header))
                .collect(),
        ),
        extra("spec.model.extraBody must not set cache_control", refuses(&OWN_FIELDS)),
        extra("spec.model.extraBody must not set n,", refuses(&REFUSED_FIELDS)),
    ]
}

/// Reasoning and the prompt cache, by wire format.
fn reasoning() -> Vec<Row> {
    let claude = |more: Value| with(anthropic(), &json!({"spec": {"model": more}}));
    let effort = |effort: &str| json!({"reasoning": {"effort": effort}});
    let budget = |tokens: u32, most: u32| json!({"maxOutputTokens": most, "reasoning": {"budgetTokens": tokens}});
    vec![
        row(
            "spec.model.reasoning must have exactly one of effort and budgetTokens",
            vec![claude(effort("High")), claude(budget(1024, 1025))],
            vec![
                claude(json!({"reasoning": {}})),
                claude(json!({"maxOutputTokens": 9000, "reasoning": {"effort": "High", "budgetTokens": 2048}})),
            ],
        ),
        row(
            "spec.model.reasoning.budgetTokens is supported with api AnthropicMessages only",
            vec![model(&effort("Minimal"))],
            vec![model(&budget(1024, 2048))],
        ),
        row(
            "spec.model.reasoning.effort Minimal is not supported with api AnthropicMessages",
            vec![
                claude(effort("Low")),
                claude(effort("Medium")),
                with(responses(), &json!({"spec": {"model": effort("Minimal")}})),
            ],
            vec![claude(effort("Minimal"))],
        ),
        row(
            "spec.model.reasoning.budgetTokens must be less than spec.model.maxOutputTokens",
            vec![claude(budget(2047, 2048))],
            vec![claude(budget(2048, 2048))],
        ),
        row(
            "spec.model.reasoning.budgetTokens must be less than half of spec.model.contextTokens",
            vec![claude(
                json!({"contextTokens": 8193, "maxOutputTokens": 4097, "reasoning": {"budgetTokens": 4096}}),
            )],
            vec![claude(
                json!({"contextTokens": 8192, "maxOutputTokens": 4097, "reasoning": {"budgetTokens": 4096}}),
            )],
        ),
        row(
            "spec.model.temperature must be absent with spec.model.reasoning",
            vec![with(
                model(&effort("High")),
                &json!({"spec": {"model": {"temperature": "1"}}}),
            )],
            vec![with(
                claude(effort("High")),
                &json!({"spec": {"model": {"temperature": "1"}}}),
            )],
        ),
        row(
            "spec.model.extraBody must not set thinking with api AnthropicMessages",
            vec![model(&json!({"extraBody": {"thinking": {"type": "disabled"}}}))],
            vec![claude(json!({"extraBody": {"thinking": {"type": "enabled"}}}))],
        ),
        row(
            "spec.model.promptCache FiveMinutes and OneHour are supported with api AnthropicMessages only",
            vec![
                model(&json!({"promptCache": "Disabled"})),
                claude(json!({"promptCache": "OneHour"})),
                claude(json!({"promptCache": "FiveMinutes"})),
            ],
            vec![model(&json!({"promptCache": "OneHour"}))],
        ),
        row(
            "spec.model.reasoning and spec.model.promptCache are not supported with api Scripted",
            vec![scripted()],
            vec![
                with(scripted(), &json!({"spec": {"model": {"promptCache": "Disabled"}}})),
                with(scripted(), &json!({"spec": {"model": effort("Low")}})),
            ],
        ),
    ]
}

fn tool_calling() -> Row {
    row(
        "spec.model.toolCalling Structured is supported with api OpenAIChat only",
        vec![
            model(&json!({"toolCalling": "Structured"})),
            model(&json!({"toolCalling": "Native"})),
            with(anthropic(), &json!({"spec": {"model": {"toolCalling": "Native"}}})),
        ],
        vec![
            with(anthropic(), &json!({"spec": {"model": {"toolCalling": "Structured"}}})),
            with(scripted(), &json!({"spec": {"model": {"toolCalling": "Structured"}}})),
        ],
    )
}

fn image_input() -> Vec<Row> {
    let shown = |context: u32, input: Value| json!({"contextTokens": context, "imageInput": input});
    vec![
        row(
            "spec.model.imageInput is not supported with api Scripted and toolCalling Structured",
            vec![
                model(&json!({"imageInput": {}})),
                with(
                    anthropic(),
                    &json!({"spec": {"model": {"imageInput": {"maxImages": 1}}}}),
                ),
            ],
            vec![
                with(scripted(), &json!({"spec": {"model": {"imageInput": {}}}})),
                model(&json!({"imageInput": {}, "toolCalling": "Structured"})),
            ],
        ),
        row(
            "spec.model.imageInput: maxImages (default 4) times tokensPerImage (default 5000)",
            vec![
                model(&shown(40_000, json!({}))),
                model(&shown(4_000, json!({"maxImages": 20, "tokensPerImage": 100}))),
            ],
            vec![
                model(&shown(39_999, json!({}))),
                model(&shown(3_999, json!({"maxImages": 20, "tokensPerImage": 100}))),
            ],
        ),
    ]
}

fn structured_output() -> Vec<Row> {
    vec![
        row(
            "spec.model.structuredOutput is not supported with api Scripted",
            vec![
                model(&json!({"structuredOutput": "Always"})),
                with(
                    anthropic(),
                    &json!({"spec": {"model": {"structuredOutput": "WithoutTools"}}}),
                ),
                with(
                    scripted(),
                    &json!({"spec": {"model": {"structuredOutput": "Disabled"}}}),
                ),
            ],
            vec![with(
                scripted(),
                &json!({"spec": {"model": {"structuredOutput": "WithoutTools"}}}),
            )],
        ),
        row(
            "spec.model.structuredOutput Always is not supported with toolCalling Structured",
            vec![model(
                &json!({"structuredOutput": "WithoutTools", "toolCalling": "Structured"}),
            )],
            vec![model(
                &json!({"structuredOutput": "Always", "toolCalling": "Structured"}),
            )],
        ),
    ]
}

fn value_of(kind: &str) -> Value {
    match kind {
        "integer" | "number" => json!(1),
        "string" => json!("x"),
        "boolean" => json!(false),
        "strings" => json!(["x"]),
        "objects" => json!([{"x": 1}]),
        "object" => json!({"x": 1}),
        other => panic!("a field of type {other}"),
    }
}

fn prices() -> Vec<Row> {
    let fields = [
        "inputPerMillion",
        "outputPerMillion",
        "cacheReadPerMillion",
        "cacheWritePerMillion",
        "cacheWrite1hPerMillion",
    ];
    let price = |long: bool, field: &str, text: &str| {
        let mut price = json!({"inputPerMillion": "3.00", "outputPerMillion": "15.00"});
        if long {
            price["longContext"] =
                json!({"aboveInputTokens": 200_000, "inputPerMillion": "6", "outputPerMillion": "22.5"});
            price["longContext"][field] = text.into();
        } else {
            price[field] = text.into();
        }
        model(&json!({"price": price}))
    };
    let mut rows = Vec::new();
    for long in [false, true] {
        for field in fields {
            let path = if long { "longContext." } else { "" };
            let sample = |text: &str| price(long, field, text);
            rows.push(row(
                // Rows live as long as the test.
                format!("spec.model.price.{path}{field} must be US dollars").leak(),
                ["0", "3.00", "0.000001", "9999999.999999"].map(sample).into(),
                ["-1", "3,00", "1.", ".5", "0.0000001", "1e3", "$3", "10000000"]
                    .map(sample)
                    .into(),
            ));
        }
    }
    rows
}

fn base_urls() -> Vec<Row> {
    vec![
        row(
            "spec.model.baseURL must start with http:// or https://",
            vec![base_url("http://10.0.0.7:8080"), base_url("https://api.example.com/v1")],
            vec![
                base_url("api.example.com/v1"),
                base_url("ftp://example.com"),
                base_url("//example.com"),
            ],
        ),
        row(
            "spec.model.baseURL must be scheme://host[:port][/path]",
            vec![
                base_url("http://ollama.models.svc:11434/v1"),
                base_url("http://[::1]:8080/v1"),
                base_url("https://host/"),
            ],
            vec![
                base_url("http://"),
                base_url("https:///v1"),
                base_url("http://two words/v1"),
                base_url("http://host/a b"),
                base_url("http://host:port/"),
                base_url("http://:8080/v1"),
            ],
        ),
        row(
            "spec.model.baseURL has a port above 65535",
            vec![base_url("http://host:65535/v1"), base_url("http://host:59999")],
            vec![
                base_url("http://host:65536/v1"),
                base_url("http://host:65540"),
                base_url("http://host:65600"),
                base_url("http://host:66000"),
                base_url("http://host:99999"),
            ],
        ),
        row(
            "spec.model.baseURL must not contain a user or password",
            vec![base_url("https://host/v1/@cf")],
            vec![base_url("https://user:secret@host/v1"), base_url("https://token@host")],
        ),
        row(
            "spec.model.baseURL must not have a query or fragment",
            vec![base_url("https://host/v1")],
            vec![
                base_url("https://host/v1?api-version=1"),
                base_url("https://host/v1#chat"),
            ],
        ),
    ]
}

fn tool_server(url: &str) -> Value {
    let server = json!({"name": "github", "url": url});
    with(scripted(), &json!({"spec": {"tools": {"servers": [server]}}}))
}

fn tool_servers() -> Vec<Row> {
    vec![
        row(
            "spec.tools.servers[].url must start with http:// or https://",
            vec![
                tool_server("http://10.0.0.7:8080/mcp"),
                tool_server("https://mcp.example.com"),
            ],
            vec![tool_server("mcp.example.com/mcp"), tool_server("stdio://mcp")],
        ),
        row(
            "spec.tools.servers[].url must be scheme://host[:port][/path]",
            vec![
                tool_server("http://tools.team-a.svc:8000/mcp"),
                tool_server("http://[::1]:8080/mcp?set=all"),
                tool_server("https://host/"),
            ],
            vec![
                tool_server("https://"),
                tool_server("https:///mcp"),
                tool_server("http://two words/mcp"),
                tool_server("http://host/a b"),
                tool_server("http://host:port/"),
            ],
        ),
        row(
            "spec.tools.servers[].url has a port above 65535",
            vec![tool_server("http://host:65535/mcp")],
            vec![
                tool_server("http://host:65536/mcp"),
                tool_server("http://host:70000"),
                tool_server("http://host:65540?a=b"),
            ],
        ),
        row(
            "spec.tools.servers[].url must not contain a user or password",
            vec![tool_server("https://host/mcp/@cf"), tool_server("https://host?a=@b")],
            vec![
                tool_server("https://user:secret@host/mcp"),
                tool_server("https://token@host"),
            ],
        ),
        row(
            "spec.tools.servers[].url must not have a fragment",
            vec![tool_server("https://host/mcp?set=all")],
            vec![tool_server("https://host/mcp#tools")],
        ),
    ]
}

fn storages() -> Vec<Row> {
    vec![
        row(
            "spec.storage.size must be a quantity from 16Mi to 16Ti",
            vec![
                storage(&json!({"size": "16Mi"})),
                storage(&json!({"size": "1.5Gi"})),
                storage(&json!({"size": "16Ti"})),
            ],
            vec![
                storage(&json!({"size": "16777215"})),
                storage(&json!({"size": "15Mi"})),
                storage(&json!({"size": "17Ti"})),
                storage(&json!({"size": "-1Gi"})),
                storage(&json!({"size": "big"})),
            ],
        ),
        change(
            "spec.storage.size is immutable",
            storage(&json!({"size": "2Gi"})),
            vec![storage(&json!({"size": "2Gi", "retentionPolicy": "Delete"}))],
            vec![storage(&json!({"size": "3Gi"})), scripted()],
        ),
        change(
            "spec.storage.storageClassName is immutable",
            storage(&json!({"storageClassName": "fast"})),
            vec![storage(&json!({"storageClassName": "fast"}))],
            vec![storage(&json!({"storageClassName": "slow"})), scripted()],
        ),
        change(
            "spec.storage.accessMode is immutable",
            scripted(),
            vec![storage(&json!({"accessMode": "ReadWriteOnce"}))],
            vec![storage(&json!({"accessMode": "ReadWriteOncePod"}))],
        ),
        change(
            "spec.storage.ephemeral is immutable",
            scripted(),
            vec![storage(&json!({"ephemeral": false}))],
            vec![storage(&json!({"ephemeral": true}))],
        ),
        change(
            "spec.storage.retentionPolicy is immutable",
            storage(&json!({"retentionPolicy": "Retain"})),
            vec![storage(&json!({"retentionPolicy": "Retain"}))],
            vec![storage(&json!({"retentionPolicy": "Delete"})), scripted()],
        ),
    ]
}

fn workspaces() -> Vec<Row> {
    let named = workspace(&json!({"claimName": "shared"}));
    vec![
        row(
            "spec.workspace.size must be a quantity from 1Mi to 16Ti",
            vec![
                scripted(),
                workspace(&json!({})),
                workspace(&json!({"size": "1Mi"})),
                workspace(&json!({"size": "16Ti"})),
            ],
            vec![
                workspace(&json!({"size": "1023Ki"})),
                workspace(&json!({"size": "17Ti"})),
                workspace(&json!({"size": "big"})),
            ],
        ),
        row(
            "spec.workspace.claimName names an existing claim",
            vec![named.clone()],
            vec![
                workspace(&json!({"claimName": "shared", "size": "1Gi"})),
                workspace(&json!({"claimName": "shared", "storageClassName": "fast"})),
            ],
        ),
        change(
            "spec.workspace.size is immutable",
            workspace(&json!({"size": "2Gi"})),
            vec![workspace(&json!({"size": "2Gi"})), named.clone(), scripted()],
            vec![workspace(&json!({"size": "3Gi"})), workspace(&json!({}))],
        ),
        change(
            "spec.workspace.storageClassName is immutable",
            workspace(&json!({"storageClassName": "fast"})),
            vec![workspace(&json!({"storageClassName": "fast"})), named, scripted()],
            vec![workspace(&json!({"storageClassName": "slow"})), workspace(&json!({}))],
        ),
    ]
}

fn pods() -> Vec<Row> {
    let label = |key: &str| pod(&json!({"labels": {key: "v"}}));
    let annotation = |key: &str| pod(&json!({"annotations": {key: "v"}}));
    vec![
        row(
            "spec.pod.labels must not set keys under agentloop.dev/",
            vec![label("team"), label("example.com/agentloop.dev")],
            vec![label("agentloop.dev/agent"), label("app.kubernetes.io/name")],
        ),
        row(
            "spec.pod.labels has an invalid key",
            vec![label("a"), label(&format!("example.com/{}", "a".repeat(63)))],
            vec![label(&"a".repeat(64)), label("two words"), label("a/b/c"), label("")],
        ),
        row(
            "spec.pod.annotations must not set keys under agentloop.dev/",
            vec![annotation("example.com/note"), annotation("app.kubernetes.io/name")],
            vec![annotation("agentloop.dev/epoch")],
        ),
        row(
            "spec.pod.annotations must not change AppArmor or seccomp",
            vec![annotation("prometheus.io/scrape")],
            vec![
                annotation("container.apparmor.security.beta.kubernetes.io/worker"),
                annotation("seccomp.security.alpha.kubernetes.io/pod"),
                annotation("container.seccomp.security.alpha.kubernetes.io/worker"),
            ],
        ),
        row(
            "spec.pod.annotations has an invalid key",
            vec![annotation("a")],
            vec![annotation(&"a".repeat(64)), annotation("a b"), annotation("a/b/c")],
        ),
    ]
}

fn hours(change: &Value) -> Value {
    let hours = json!({"start": "08:00", "end": "23:00"});
    let agent = with(scripted(), &json!({"spec": {"guardrails": {"activeHours": hours}}}));
    with(agent, &json!({"spec": {"guardrails": {"activeHours": change}}}))
}

fn active_hours() -> Vec<Row> {
    let each = |field: &str, values: &[&str]| values.iter().map(|value| hours(&json!({field: value}))).collect();
    vec![
        row(
            "spec.guardrails.activeHours.timeZone must be a name",
            each("timeZone", &["UTC", "Europe/Berlin", "America/Argentina/Buenos_Aires"]),
            each("timeZone", &["+02:00", "Europe/", "Europe Berlin"]),
        ),
        row(
            "spec.guardrails.activeHours.start must be a time of day",
            each("start", &["00:00", "07:59", "23:59"]),
            each("start", &["24:00", "8:00", "08:60", "8 am"]),
        ),
        row(
            "spec.guardrails.activeHours.end must be a time of day",
            each("end", &["00:00", "07:59", "23:59", "24:00"]),
            each("end", &["24:01", "8:00", "08:60", "8 pm"]),
        ),
        row(
            "spec.guardrails.activeHours.start and end are the same",
            vec![
                hours(&json!({"start": "00:00", "end": "24:00"})),
                hours(&json!({"end": "07:59"})),
            ],
            vec![hours(&json!({"end": "08:00"}))],
        ),
    ]
}
