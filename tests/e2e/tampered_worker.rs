//! A worker that was tampered with is detected from outside: the requests that its gateway sees decide, not its reports.
//!
//! The test is that worker: it speaks to the gateway through the pod's own socket, beside the real one.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use agentloop::link::pod::SOCKET_PATH;
use agentloop::link::socket::CALL_HEADER;
use serde_json::{Value, json};

use super::agents::{Agent, condition, script, scripted, status_used};
use super::cluster::{self, AGENTS, Namespace, figure, shared};
use super::node;
use crate::support::http;

/// What the tampered worker asks again and again.
const AGAIN: &str = "Do it again.";

/// A worker that sends what it likes.
struct Tampered {
    socket: PathBuf,
    asked: std::cell::Cell<u32>,
}

impl Tampered {
    /// In the pod of an Agent that runs.
    fn of(agent: &Agent<'_>) -> Self {
        let pod = agent.until_pod(None, 120);
        let gateway = node::pid(&pod, "gateway");
        Self {
            socket: format!("/proc/{gateway}/root{SOCKET_PATH}").into(),
            // Far beyond the turns of the real worker.
            asked: std::cell::Cell::new(1_000_000),
        }
    }

    /// Status and body of one call with this prompt.
    fn ask(&self, prompt: &str) -> (u16, String) {
        let call = self.asked.replace(self.asked.get() + 1);
        let connection = UnixStream::connect(&self.socket).expect("the gateway listens");
        let head = format!(
            "POST /v1/chat/completions HTTP/1.0\r\nHost: gateway\r\nContent-Type: application/json\r\n\
             {CALL_HEADER}: t{call}c1a1\r\n"
        );
        let message = json!({"role": "user", "content": prompt});
        let body = json!({"model": "scripted", "messages": [message]}).to_string();
        http::exchange(connection, &head, &body)
    }

    fn answered(&self, prompt: &str) {
        let (status, body) = self.ask(prompt);
        assert_eq!(status, 200, "{body}");
    }
}

/// An Agent that makes an honest call every eight seconds: few enough to keep the tampered worker's among the last twenty
/// while a status is waited for.
fn honest<'a>(namespace: &'a Namespace, name: &str, mode: &str) -> Agent<'a> {
    let turn = json!({"text": "One more.", "yield": {"sleep": 8}});
    namespace.kubectl.apply(&script("plan", &json!({"turns": [turn]})));
    let watched = json!({"guardrails": {"loopDetection": {"mode": mode}}});
    let agent = Agent::apply(namespace, name, &scripted("plan"), &watched);
    agent.until_turns(1, 120);
    agent
}

fn turns(agent: &Value) -> i64 {
    agent["status"]["usage"]["turns"].as_i64().unwrap_or(0)
}

fn is_detected(agent: &Value) -> bool {
    condition(agent, "LoopDetected").is_some_and(|held| held["status"] == "True")
}

/// The metric of `RepeatedRequest`, as Prometheus would read it.
fn measured(agent: &Agent<'_>, system: &crate::support::kubectl::Kubectl) -> Option<f64> {
    let labels = [
        ("namespace", agent.kubectl.namespace()),
        ("agent", agent.name.as_str()),
        ("sign", "RepeatedRequest"),
    ];
    cluster::series(&cluster::metrics(system), "agentloop_agent_loop_detected", &labels)
}

/// The status that includes the calls made so far: the loop's own turns continued meanwhile.
fn status_with_calls(agent: &Agent<'_>, extra: i64) -> Value {
    let before = turns(&agent.object());
    agent.until("a status that tells of the calls", 90, |agent| {
        let more = status_used(agent).calls - turns(agent);
        (more >= extra && turns(agent) > before).then(|| agent.clone())
    })
}

#[test]
fn a_repeated_request_raises_a_warning_and_the_loop_continues() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "outside-warn");
    let agent = honest(&namespace, "warned", "Warn");
    let tampered = Tampered::of(&agent);
    for _ in 0..4 {
        tampered.answered(AGAIN);
    }
    let near_miss = status_with_calls(&agent, 4);
    assert!(
        !is_detected(&near_miss),
        "four can be retries: {:#}",
        near_miss["status"]
    );
    assert_eq!(measured(&agent, &cluster.system), None);

    tampered.answered(AGAIN);
    let asked = std::time::Instant::now();
    let held = agent.until_condition("LoopDetected", "True", "RepeatedRequest", 30);
    figure(
        "loop_seen_from_outside_after",
        format!("{:.1}", asked.elapsed().as_secs_f64()),
        "s",
    );
    let message = held["message"].as_str().unwrap_or_default();
    assert!(
        message.contains("byte for byte") && !message.contains(AGAIN),
        "{message}"
    );
    agent.until_event("Warning", "LoopDetected", 30);
    assert_eq!(measured(&agent, &cluster.system), Some(1.0));
    let seen = agent.object();
    let later = agent.until_turns(turns(&seen) + 2, 90);
    assert_ne!(later["status"]["loop"]["state"], "Paused", "a warning stops nothing");
    tampered.answered(AGAIN);

    // Eighteen others push all but two out of the last twenty.
    for other in 0..18 {
        tampered.answered(&format!("Something else: {other}."));
    }
    agent.until("the warning taken back", 60, |agent| {
        (!is_detected(agent)).then_some(())
    });
    assert_eq!(measured(&agent, &cluster.system), None);
}

#[test]
fn a_repeated_request_is_blocked_in_mode_enforce_until_resume() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "outside-stop");
    let agent = honest(&namespace, "enforced", "Enforce");
    let tampered = Tampered::of(&agent);
    for _ in 0..5 {
        tampered.answered(AGAIN);
    }
    agent.until_condition("LoopDetected", "True", "RepeatedRequest", 30);
    let paused = agent.until_state("Paused", 60);
    assert_eq!(paused["status"]["loop"]["reasons"], json!(["LoopDetected"]));
    assert!(paused["status"]["loop"]["resumesAt"].is_null(), "not by itself");
    let ready = condition(&paused, "Ready").expect("Ready");
    assert_eq!(
        (&ready["status"], &ready["reason"]),
        (&json!("False"), &json!("LoopDetected"))
    );
    assert!(condition(&paused, "Stalled").is_some(), "it needs a person");
    agent.until_event("Warning", "LoopDetected", 30);
    for prompt in [AGAIN, "Something else."] {
        let (status, body) = tampered.ask(prompt);
        assert!(status >= 500 && body.contains("LoopDetected"), "{status}: {body}");
    }

    let before = turns(&agent.object());
    agent
        .kubectl
        .ok(&["annotate", AGENTS, &agent.name, "agentloop.dev/resume=1"]);
    let resumed = agent.until_turns(before + 2, 90);
    assert!(!is_detected(&resumed), "{:#}", resumed["status"]);
    assert_ne!(resumed["status"]["loop"]["state"], "Paused");
    // The count starts again: four more are no loop, a fifth is.
    for _ in 0..4 {
        tampered.answered(AGAIN);
    }
    assert!(
        !is_detected(&status_with_calls(&agent, 9)),
        "what was before the request counts no more"
    );
    tampered.answered(AGAIN);
    agent.until_condition("LoopDetected", "True", "RepeatedRequest", 30);
}
