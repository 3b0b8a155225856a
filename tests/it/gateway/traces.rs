//! Traces of a real gateway and a real worker: what arrives at a collector, and what a broken one costs.

use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use agentloop::engine::message::call_id;
use agentloop::link::pod::CONFIG_ENV;
use agentloop::support::hash::hex;
use axum::body::Bytes;
use axum::routing::post;
use axum::{Json, Router};
use axum_server::tls_rustls::RustlsConfig;
use opentelemetry_proto::tonic::trace::v1::Span;
use pretty_assertions::assert_eq;
use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::controller::certificates;
use super::harness::GatewayHarness;
use super::loops::{ANSWER_ID, Cell, USED, WAYS, Way};
use super::provider::{ScriptedResponse, Step};
use crate::support::clusters;
use crate::support::otlp::{Collector, Receiver, attribute, is_root};
use crate::support::ports::free_port;

/// In the instructions, an answer, the arguments and the result of a tool, the headers of the collector, and the keys.
pub(super) const CANARY: &str = "canary";

/// A worker as a process of its own.
pub(super) struct WorkerProcess(Child);

impl WorkerProcess {
    pub(super) fn start(harness: &GatewayHarness) -> Self {
        let spec = json!({
            "model": harness.model, "instructions": format!("Be {CANARY}."), "tools": harness.tools,
            "loop": {"minDelayMilliseconds": 1, "maxDelayMilliseconds": 10},
        });
        let config = json!({
            "namespace": "ns", "name": "a", "uid": "agent-uid", "epoch": 3, "linkUrl": "https://unused", "spec": spec,
        });
        let mut options = std::fs::File::options();
        let log = options
            .create(true)
            .append(true)
            .open(harness.path("worker-log"))
            .unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_agentloop"))
            .arg("worker")
            .env_clear()
            .env(CONFIG_ENV, config.to_string())
            .env("AGENTLOOP_POD_UID", "pod")
            .env("AGENTLOOP_SOCKET", harness.path("gateway.sock"))
            .env("AGENTLOOP_JOURNAL_DIR", harness.path("journal"))
            .env("AGENTLOOP_INSTRUCTIONS_FILE", harness.path("instructions"))
            .env("AGENTLOOP_SKILLS_DIR", harness.path("skills"))
            .env("AGENTLOOP_WORKSPACE_DIR", harness.path("workspace"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        Self(child)
    }
}

/// SIGKILL.
impl Drop for WorkerProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(super) fn worker_log(harness: &GatewayHarness) -> String {
    std::fs::read_to_string(harness.path("worker-log")).unwrap_or_default()
}

/// In a Secret with a header of the tool server, which repeats it.
const TOOL_SECRET: &str = "secret-of-the-tool";

/// A server of one tool, whose result has the canary and the header.
async fn tool_server() -> SocketAddr {
    async fn answer(Json(request): Json<Value>) -> Result<Json<Value>, StatusCode> {
        let result = match request["method"].as_str().unwrap() {
            "initialize" => json!({
                "protocolVersion": request["params"]["protocolVersion"], "capabilities": {"tools": {}},
                "serverInfo": {"name": "hub", "version": "1"},
            }),
            "tools/list" => json!({"tools": [{"name": "write", "inputSchema": {"type": "object"}}]}),
            "tools/call" => json!({"content": [{"type": "text", "text": format!("{CANARY} {TOOL_SECRET}")}]}),
            _ if request.get("id").is_none() => return Err(StatusCode::ACCEPTED),
            _ => {
                let error = json!({"code": -32601, "message": "method not found"});
                return Ok(Json(json!({"jsonrpc": "2.0", "id": request["id"], "error": error})));
            }
        };
        Ok(Json(json!({"jsonrpc": "2.0", "id": request["id"], "result": result})))
    }
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = Router::new().route("/mcp", post(answer));
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

/// A gateway that exports to this port, and a provider whose first turn runs a tool. Its second call is held.
async fn traced(collector: u16) -> GatewayHarness {
    traced_with(collector, &[]).await
}

/// Like [`traced`], with further variables.
pub(super) async fn traced_with(collector: u16, more: &[(&'static str, &str)]) -> GatewayHarness {
    let mut harness = GatewayHarness::new().await;
    let tools = tool_server().await;
    harness.tools = json!({"servers": [
        {"name": "hub", "url": format!("http://{tools}/mcp"), "headersSecretRef": {"name": "s"}},
    ]});
    harness.write_header("hub", "x-key", TOOL_SECRET);
    harness.environment = vec![
        ("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://127.0.0.1:{collector}")),
        ("OTEL_EXPORTER_OTLP_HEADERS", format!("authorization=Bearer%20{CANARY}")),
        ("OTEL_BSP_SCHEDULE_DELAY", "20".into()),
        ("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test".into()),
    ];
    let more = more.iter().map(|(name, value)| (*name, (*value).to_owned()));
    harness.environment.extend(more);
    let way = Way::OpenAiWhole;
    let arguments = json!({ "text": CANARY }).to_string();
    let calls = [("c1", "hub__write", arguments.as_str())];
    harness.provider.will(way.answer("", &calls, "tool_calls", true));
    let mut last = way.answer(&format!("I am {CANARY}."), &[], "stop", true);
    last.steps.insert(0, Step::Hold);
    harness.provider.will(last);
    harness.provider.will(way.sleep());
    harness.start().await;
    harness
}

pub(super) fn named<'a>(spans: &'a [Span], name: &str) -> Vec<&'a Span> {
    spans.iter().filter(|span| span.name == name).collect()
}

pub(super) fn two_turns(spans: &[Span]) -> bool {
    spans.iter().filter(|span| is_root(span)).count() == 2 && named(spans, "chat m").len() == 3
}

fn nanoseconds(at: SystemTime) -> u64 {
    let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap();
    u64::try_from(since.as_nanos()).unwrap()
}

/// The first turn, with its tool run, whatever happened to the worker.
fn check_first_turn(spans: &[Span]) {
    let roots: Vec<_> = spans.iter().filter(|span| is_root(span)).collect();
    let (first, second) = (roots[0], roots[1]);
    assert_eq!(
        (first.name.as_str(), second.name.as_str()),
        ("invoke_agent a", "invoke_agent a")
    );
    assert_ne!(first.trace_id, second.trace_id, "one trace a turn");
    let turn = |span: &Span| attribute(&span.attributes, "agentloop.turn").unwrap();
    assert_eq!((turn(first), turn(second)), ("1".into(), "2".into()));
    let of_first: Vec<_> = spans.iter().filter(|span| span.trace_id == first.trace_id).collect();
    let mut names: Vec<_> = of_first.iter().map(|span| span.name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["chat m", "chat m", "execute_tool hub__write", "invoke_agent a"]);
    for span in of_first.iter().filter(|span| !is_root(span)) {
        assert_eq!(span.parent_span_id, first.span_id, "{}", span.name);
        assert!(span.start_time_unix_nano >= first.start_time_unix_nano, "{}", span.name);
        assert!(span.end_time_unix_nano <= first.end_time_unix_nano, "{}", span.name);
    }
    for call in named(spans, "chat m") {
        let number = |key: &str| attribute(&call.attributes, key).unwrap().parse::<i64>().unwrap();
        let tokens = (
            number("gen_ai.usage.input_tokens"),
            number("gen_ai.usage.output_tokens"),
        );
        assert_eq!(tokens, USED);
        assert_eq!(attribute(&call.attributes, "gen_ai.provider.name").unwrap(), "openai");
        assert_eq!(attribute(&call.attributes, "server.address").unwrap(), "127.0.0.1");
        assert_eq!(attribute(&call.attributes, "gen_ai.response.id").unwrap(), ANSWER_ID);
        assert!(attribute(&call.attributes, "gen_ai.response.finish_reasons").is_some());
        assert!(number("gen_ai.request.max_tokens") > 0);
    }
    let run = named(spans, "execute_tool hub__write")[0];
    assert_eq!(attribute(&run.attributes, "agentloop.tool.outcome").unwrap(), "Ok");
    let id = attribute(&run.attributes, "gen_ai.tool.call.id");
    assert_eq!(id.unwrap(), call_id(1, 1, 0));
}

/// No request, and no log, has a text of the loop or a secret.
pub(super) fn check_canary(receiver: &Receiver, harness: &GatewayHarness) {
    for received in receiver.received() {
        let text = String::from_utf8_lossy(&received.body);
        assert!(!text.contains(CANARY) && !text.contains(TOOL_SECRET), "{text}");
    }
    for text in receiver.others() {
        assert!(!text.contains(CANARY), "{text}");
    }
    let log = worker_log(harness);
    assert!(!log.contains(CANARY), "{log}");
    let log = harness.log();
    assert!(!log.contains(CANARY), "{log}");
}

#[tokio::test]
async fn a_turn_is_one_trace_also_when_its_worker_is_killed_in_mid_turn() {
    let receiver = Receiver::start().await;
    let harness = traced(receiver.address.port()).await;
    let worker = WorkerProcess::start(&harness);
    let asked = tokio::time::timeout(Duration::from_secs(30), harness.provider.until_asked(2)).await;
    assert!(asked.is_ok(), "{}\n{}", worker_log(&harness), harness.log());
    receiver
        .until("the tool run is exported", |spans| {
            !named(spans, "execute_tool hub__write").is_empty()
        })
        .await;
    drop(worker);
    let killed = nanoseconds(SystemTime::now());
    let _worker = WorkerProcess::start(&harness);
    harness.provider.release();
    let spans = receiver.until("two turns", two_turns).await;
    check_first_turn(&spans);
    let first = spans.iter().find(|span| is_root(span)).unwrap();
    assert!(first.start_time_unix_nano < killed && first.end_time_unix_nano > killed);
    check_canary(&receiver, &harness);
    let first_request = &receiver.received()[0];
    assert_eq!(first_request.headers["authorization"], format!("Bearer {CANARY}"));
    let resource = first_request.request.resource_spans[0].resource.as_ref().unwrap();
    let of_resource = |key| attribute(&resource.attributes, key).unwrap();
    assert_eq!(of_resource("service.name"), "agentloop");
    assert_eq!(of_resource("k8s.namespace.name"), "ns");
    assert_eq!(of_resource("agentloop.agent.name"), "a");
    assert_eq!(of_resource("deployment.environment.name"), "test");
    // The log leads to the trace.
    let log = worker_log(&harness);
    let id = hex(&first.trace_id);
    assert!(log.contains(&format!("\"traceId\":\"{id}\"")), "{log}");
}

/// An attribute with JSON.
fn json_of(span: &Span, key: &str) -> Value {
    serde_json::from_str(&attribute(&span.attributes, key).unwrap()).unwrap()
}

#[tokio::test]
async fn with_the_variable_spans_have_texts_also_when_the_worker_is_killed_in_mid_turn() {
    let receiver = Receiver::start().await;
    let capture = ("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true");
    let harness = traced_with(receiver.address.port(), &[capture]).await;
    let worker = WorkerProcess::start(&harness);
    let run = "execute_tool hub__write";
    receiver
        .until("the tool run", |spans| !named(spans, run).is_empty())
        .await;
    harness.provider.until_asked(2).await;
    drop(worker);
    let _worker = WorkerProcess::start(&harness);
    harness.provider.release();
    let spans = receiver.until("two turns", two_turns).await;
    check_first_turn(&spans);
    let run = named(&spans, run)[0];
    assert_eq!(json_of(run, "gen_ai.tool.call.arguments"), json!({"text": CANARY}));
    let result = attribute(&run.attributes, "gen_ai.tool.call.result").unwrap();
    assert!(result.contains(&format!("{CANARY} [redacted]")), "{result}");
    let roots: Vec<_> = spans.iter().filter(|span| is_root(span)).collect();
    let input = json_of(roots[0], "gen_ai.input.messages");
    assert_eq!(
        (&input[0]["role"], &input[0]["parts"][0]["type"]),
        (&json!("user"), &json!("text"))
    );
    let output = json_of(roots[0], "gen_ai.output.messages");
    let call = &output[0]["parts"][0];
    assert_eq!(
        (&call["name"], &call["arguments"]),
        (&json!("hub__write"), &json!({"text": CANARY}))
    );
    let id = attribute(&run.attributes, "gen_ai.tool.call.id").unwrap();
    assert_eq!(call["id"], id, "the span leads to the call in the messages");
    let text = json!([{"type": "text", "content": format!("I am {CANARY}.")}]);
    assert_eq!((&output[1]["parts"], output.as_array().unwrap().len()), (&text, 2));
    assert!(
        !json_of(roots[1], "gen_ai.output.messages").to_string().contains(CANARY),
        "a text is sent once"
    );
    let of_texts = ["gen_ai.input.messages", "gen_ai.output.messages"];
    for call in named(&spans, "chat m") {
        assert!(of_texts.iter().all(|key| attribute(&call.attributes, key).is_none()));
    }
    let sent = receiver.received();
    let sent = sent
        .iter()
        .flat_map(|received| &received.request.resource_spans[0].scope_spans[0].spans);
    for again in sent.filter(|span| span.span_id == run.span_id) {
        assert_eq!(again.attributes, run.attributes);
    }
    for received in receiver.received() {
        let text = String::from_utf8_lossy(&received.body);
        assert!(
            !text.contains(TOOL_SECRET) && !text.contains(&format!("Be {CANARY}")),
            "{text}"
        );
    }
    let logs = worker_log(&harness) + &harness.log();
    assert!(!logs.contains(CANARY) && !logs.contains(TOOL_SECRET), "{logs}");
}

#[tokio::test]
async fn a_real_collector_accepts_and_forwards_the_spans() {
    if !clusters::has("otelcol") {
        return;
    }
    let receiver = Receiver::start().await;
    let collector = Collector::start(receiver.address).await;
    let harness = traced(collector.port).await;
    let _worker = WorkerProcess::start(&harness);
    harness.provider.release();
    let spans = receiver.until("two turns", two_turns).await;
    check_first_turn(&spans);
    check_canary(&receiver, &harness);
}

/// Variables of a gateway that exports to this receiver at once.
fn exporting_to(receiver: &Receiver) -> Vec<(&'static str, String)> {
    vec![
        ("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://{}", receiver.address)),
        ("OTEL_BSP_SCHEDULE_DELAY", "20".into()),
    ]
}

/// The spans of this many calls of a loop with these answers, in order.
async fn calls_of(way: Way, acts: Vec<ScriptedResponse>, count: usize) -> (Cell, Vec<Span>) {
    let receiver = Receiver::start().await;
    let cell = Cell::start_with(way, &json!({}), json!({}), acts, exporting_to(&receiver)).await;
    let all = |spans: &[Span]| named(spans, "chat m").len() == count;
    let spans = receiver.until("all calls", all).await;
    let calls = named(&spans, "chat m").into_iter().cloned().collect();
    (cell, calls)
}

#[tokio::test]
async fn a_call_names_its_request_and_its_answer_in_each_api_streamed_or_not() {
    for way in WAYS {
        let reasons = match way {
            Way::OpenAiWhole | Way::OpenAiStreamed => ["length", "tool_calls"],
            Way::AnthropicWhole | Way::AnthropicStreamed => ["max_tokens", "tool_use"],
            Way::ResponsesWhole | Way::ResponsesStreamed => ["content_filter", "stop"],
        };
        let answer = way.answer("partly", &[], reasons[0], true);
        let (cell, calls) = calls_of(way, vec![answer, way.sleep()], 2).await;
        let asked = &cell.harness.provider.seen()[0].body;
        let asked: Value = serde_json::from_str(asked).unwrap();
        let limits = ["max_tokens", "max_completion_tokens", "max_output_tokens"];
        let limit = limits.iter().find_map(|name| asked[*name].as_i64()).unwrap();
        for (call, reason) in calls.iter().zip(reasons) {
            let of = |key: &str| attribute(&call.attributes, key);
            assert_eq!(of("gen_ai.request.max_tokens"), Some(limit.to_string()), "{way:?}");
            let streamed = way.is_streamed().then(|| "true".to_owned());
            assert_eq!(of("gen_ai.request.stream"), streamed, "{way:?}");
            assert_eq!(of("gen_ai.response.id").as_deref(), Some(ANSWER_ID), "{way:?}");
            assert_eq!(of("gen_ai.response.finish_reasons").as_deref(), Some(reason), "{way:?}");
        }
        cell.end().await;
    }
}

#[tokio::test]
async fn an_answer_that_breaks_off_ended_in_an_error_and_one_that_never_began_has_no_end() {
    for way in WAYS {
        // A cut may overtake what was sent before it, so a stream breaks off by what is no event.
        let end = if way.is_streamed() {
            Step::Send("data: {\n\n".into())
        } else {
            Step::Cut
        };
        let acts = vec![way.half("{", end), way.sleep()];
        let (cell, calls) = calls_of(way, acts, 2).await;
        let of = |key: &str| attribute(&calls[0].attributes, key);
        assert!(of("error.type").is_some(), "{way:?}");
        let (id, reason) = (of("gen_ai.response.id"), of("gen_ai.response.finish_reasons"));
        let began = way.is_streamed().then_some((ANSWER_ID, "error"));
        assert_eq!(id.as_deref().zip(reason.as_deref()), began, "{way:?}");
        cell.end().await;
    }
}

#[tokio::test]
async fn no_text_of_a_server_is_exported_as_an_id_or_a_reason() {
    let way = Way::OpenAiWhole;
    let message = json!({"role": "assistant", "content": "hi"});
    let odd = json!({
        "id": format!("a {CANARY} of many words"),
        "choices": [{"index": 0, "message": message, "finish_reason": format!("because_{CANARY}")}],
        "usage": {"prompt_tokens": USED.0, "completion_tokens": USED.1},
    });
    let odd = ScriptedResponse::json(200, &odd.to_string());
    let (cell, calls) = calls_of(way, vec![odd, way.sleep()], 2).await;
    let of = |key: &str| attribute(&calls[0].attributes, key);
    assert_eq!(of("gen_ai.response.id"), None);
    assert_eq!(of("gen_ai.response.finish_reasons").as_deref(), Some("other"));
    assert!(!format!("{:?}", calls[0]).contains(CANARY));
    cell.end().await;
}

/// A collector whose certificate is of an authority of its own: its URL, that authority, and how many requests it received.
async fn private_collector() -> (String, String, watch::Receiver<usize>) {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (ca, certificate, key) = certificates();
    let tls = RustlsConfig::from_pem(certificate.into_bytes(), key.into_bytes())
        .await
        .unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    let (count, received) = watch::channel(0);
    let receive = move |_: Bytes| async move { count.send_modify(|count| *count += 1) };
    let app = Router::new().route("/v1/traces", post(receive));
    let server = axum_server::from_tcp_rustls(listener, tls).unwrap();
    tokio::spawn(async move { server.serve(app.into_make_service()).await.unwrap() });
    (url, ca, received)
}

#[tokio::test]
async fn a_private_authority_of_the_collector_is_trusted_once_it_is_in_the_file() {
    let (url, ca, mut received) = private_collector().await;
    let mut harness = GatewayHarness::new().await;
    let file = harness.path("collector-ca.crt");
    harness.environment = vec![
        ("OTEL_EXPORTER_OTLP_ENDPOINT", url),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", file.to_str().unwrap().to_owned()),
        ("OTEL_BSP_SCHEDULE_DELAY", "20".into()),
    ];
    harness.start().await;
    harness.ask("t1c1a1").await;
    let cause = "OTEL_EXPORTER_OTLP_CERTIFICATE names a file that cannot be read";
    let deadline = Instant::now() + Duration::from_mins(1);
    while !harness.log().contains(cause) {
        assert!(Instant::now() < deadline, "{}", harness.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    std::fs::write(&file, ca).unwrap();
    let arrived = received.wait_for(|count| *count > 0);
    let arrived = tokio::time::timeout(Duration::from_secs(30), arrived).await;
    assert!(arrived.is_ok(), "{}", harness.log());
}

#[tokio::test]
async fn the_last_spans_are_exported_when_the_pod_ends() {
    let receiver = Receiver::start().await;
    let mut harness = GatewayHarness::new().await;
    harness.environment = vec![
        ("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://{}", receiver.address)),
        ("OTEL_BSP_SCHEDULE_DELAY", "3600000".into()),
    ];
    harness.start().await;
    harness.ask("t1c1a1").await;
    assert!(receiver.received().is_empty());
    harness.terminate();
    assert!(harness.exited().await.success(), "{}", harness.log());
    let spans = receiver.until("one call", |spans| spans.len() == 1).await;
    assert_eq!(spans[0].name, "chat m");
}

#[tokio::test]
async fn a_loop_is_as_fast_with_a_hanging_or_unreachable_collector_and_warns_once() {
    // Shorter than one export that hangs, and longer than a busy machine pauses.
    const SOON: Duration = Duration::from_secs(20);
    let hanging = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gone = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let unguarded = json!({"guardrails": {"loopDetection": {"mode": "Disabled"}}});
    for address in [hanging.local_addr().unwrap(), gone] {
        let variables = vec![
            ("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://{address}")),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "25000".into()),
            ("OTEL_BSP_SCHEDULE_DELAY", "1".into()),
        ];
        let way = Way::OpenAiWhole;
        let mut acts: Vec<_> = (0..20)
            .map(|turn| way.answer(&format!("turn {turn} is another one"), &[], "stop", true))
            .collect();
        acts.push(way.sleep());
        let cell = Cell::start_with(way, &json!({}), unguarded.clone(), acts, variables).await;
        let (report, _) = cell.at_rest().await;
        assert_eq!(report.usage.calls, 21);
        // From call to call, so that the starts of gateway and worker do not count.
        let seen = cell.harness.provider.seen();
        let pauses = seen.windows(2).map(|calls| calls[1].at.duration_since(calls[0].at));
        let longest = pauses.max().unwrap();
        assert!(longest < SOON, "{longest:?}");
        let warnings = |log: &str| log.matches("failed to export traces").count();
        let deadline = Instant::now() + Duration::from_mins(1);
        while warnings(&cell.harness.log()) == 0 {
            assert!(Instant::now() < deadline, "{}", cell.harness.log());
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        // Of exports that hang, only one has failed by now; of those to an unused port, many.
        assert_eq!(warnings(&cell.harness.log()), 1, "{address}");
        let ending = Instant::now();
        let mut harness = cell.ended().await;
        harness.terminate();
        assert!(harness.exited().await.success(), "{}", harness.log());
        assert!(ending.elapsed() < SOON, "{:?}", ending.elapsed());
    }
}

#[tokio::test]
async fn without_variables_nothing_is_exported_and_an_invalid_one_is_named() {
    let mut harness = GatewayHarness::started().await;
    assert!(!harness.session().await.traces);
    let body = b"no message".to_vec();
    let request = harness.worker.post(super::harness::url("/v1/traces")).body(body);
    // What is not exported is not read.
    assert_eq!(request.send().await.unwrap().status(), StatusCode::NO_CONTENT);
    let mut harness = GatewayHarness::new().await;
    harness.environment = vec![
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9".into()),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc".into()),
    ];
    harness.start().await;
    assert!(!harness.session().await.traces);
    assert!(
        harness
            .log()
            .contains("OTEL_EXPORTER_OTLP_PROTOCOL is not http/protobuf"),
        "{}",
        harness.log()
    );
}
