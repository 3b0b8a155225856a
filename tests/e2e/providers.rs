//! What an Agent reports about a failing provider, and that it continues once the provider works again.

use serde_json::json;

use super::agents::{Agent, STARTUP, anthropic, condition, openai, status_used};
use super::cluster::{AGENTS, Namespace, shared};
use super::model_server::{self, ModelServer};

/// One way to fail: the fault, the reason of `ModelAvailable=False`, the status of `Ready`.
struct ProviderFault {
    fault: &'static str,
    reason: &'static str,
    ready: &'static str,
}

const fn provider_fault(fault: &'static str, reason: &'static str, ready: &'static str) -> ProviderFault {
    ProviderFault { fault, reason, ready }
}

/// A person must act only where no attempt can ever help.
const PROVIDER_FAULTS: &[ProviderFault] = &[
    provider_fault("401", "AuthenticationFailed", "False"),
    provider_fault("429-quota", "QuotaExceeded", "False"),
    provider_fault("404", "BadResponse", ""),
    provider_fault("garbage", "BadResponse", ""),
    provider_fault("500", "Unreachable", ""),
    provider_fault("529", "Unreachable", ""),
    provider_fault("cut", "Unreachable", ""),
];

/// The same of a server that speaks Anthropic messages.
const MESSAGES_FAULTS: &[ProviderFault] = &[
    provider_fault("401", "AuthenticationFailed", "False"),
    provider_fault("402", "QuotaExceeded", "False"),
    provider_fault("529", "Unreachable", ""),
    provider_fault("cut", "Unreachable", ""),
];

#[test]
fn each_provider_fault_has_its_reason_and_clears_after_the_next_success() {
    let (Some(cluster), Some(server)) = (shared(), model_server::faulty()) else {
        return;
    };
    let namespace = Namespace::new(&cluster.system, "providers");
    let agents: Vec<_> = PROVIDER_FAULTS
        .iter()
        .map(|fault| (fault, start(&namespace, server, fault.fault)))
        .chain(
            MESSAGES_FAULTS
                .iter()
                .map(|fault| (fault, start_messages(&namespace, server, fault.fault))),
        )
        .collect();
    for (fault, (agent, _)) in &agents {
        let found = agent.until_condition("ModelAvailable", "False", fault.reason, STARTUP);
        let message = found["message"].as_str().unwrap_or_default();
        assert!(
            message.len() > 20 && !message.contains("canary"),
            "{}: {message}",
            fault.fault
        );
        if !fault.ready.is_empty() {
            agent.until("Ready", 30, |agent| {
                (condition(agent, "Ready")?["status"] == fault.ready).then_some(())
            });
        }
    }
    for (fault, (agent, label)) in &agents {
        server.choose(label, "sleep");
        let resume = json!({"metadata": {"annotations": {"agentloop.dev/resume": fault.fault}}});
        agent.kubectl.patch(AGENTS, &agent.name, &resume);
    }
    for (_, (agent, _)) in &agents {
        agent.until_condition("ModelAvailable", "True", "Reachable", 120);
        agent.until("Ready again", 60, |agent| {
            (condition(agent, "Ready")?["status"] == "True").then_some(())
        });
    }
}

#[test]
fn retry_after_is_honoured_in_seconds_and_as_a_date() {
    let (Some(cluster), Some(server)) = (shared(), model_server::faulty()) else {
        return;
    };
    let namespace = Namespace::new(&cluster.system, "retry-after");
    for fault in ["429", "429-date"] {
        let (_agent, label) = start(&namespace, server, fault);
        let begins = server.until("three attempts", &label, STARTUP, |lines| {
            let begins: Vec<_> = lines
                .iter()
                .filter(|line| line.event == "begin")
                .map(|line| line.at)
                .collect();
            (begins.len() >= 3).then_some(begins)
        });
        let shortest = begins.windows(2).map(|pair| pair[1] - pair[0]).fold(f64::MAX, f64::min);
        // A date has whole seconds, so that up to one of the three it names may be gone already.
        assert!(
            shortest >= 1.95,
            "{fault}: an attempt came {shortest:.2} s after the last, the server asked for 2"
        );
    }
}

#[test]
fn an_answer_without_usage_is_unknown_and_not_zero() {
    let (Some(cluster), Some(server)) = (shared(), model_server::faulty()) else {
        return;
    };
    let namespace = Namespace::new(&cluster.system, "no-usage");
    let (agent, label) = start(&namespace, server, "no-usage");
    let used = status_used(&agent.until_turns(3, STARTUP));
    assert!(used.unknown_calls >= 3 && used.output == 0, "{used:?}");
    // No call is in flight then: of one that is cut, the server may know nothing.
    server.choose(&label, "sleep");
    agent.until_state("Sleeping", 60);
    agent.stop(60);
    agent.until_counts(&cluster.system, 45, || server.used(&label));
}

#[test]
fn an_endless_stream_ends_with_the_calls_own_timeout() {
    let (Some(cluster), Some(server)) = (shared(), model_server::faulty()) else {
        return;
    };
    let namespace = Namespace::new(&cluster.system, "endless");
    let label = format!("{}-endless", namespace.kubectl.namespace());
    server.choose(&label, "endless");
    let timeout = json!({"model": {"timeoutSeconds": 3, "streamIdleTimeoutSeconds": 3}});
    let agent = Agent::apply(&namespace, "endless", &openai(&server.base_url(&label)), &timeout);
    let end = server.until("a cut call", &label, STARTUP, |lines| {
        lines.iter().find(|line| line.event == "end").cloned()
    });
    let begin = server
        .lines(&label)
        .into_iter()
        .find(|line| line.event == "begin" && line.id == end.id);
    let took = end.at - begin.expect("each end has a begin").at;
    assert!((2.5..15.0).contains(&took), "the call took {took} s, its limit is 3");
    agent.until("its name", 60, |agent| {
        (agent["status"]["lastError"]["kind"] == "Timeout").then_some(())
    });
}

fn start<'a>(namespace: &'a Namespace, server: &ModelServer, fault: &str) -> (Agent<'a>, String) {
    let label = format!("{}-{fault}", namespace.kubectl.namespace());
    let model = openai(&server.base_url(&label));
    start_with(namespace, server, fault, label, &model)
}

/// The same of a server that speaks Anthropic messages.
fn start_messages<'a>(namespace: &'a Namespace, server: &ModelServer, fault: &str) -> (Agent<'a>, String) {
    let label = format!("{}-messages-{fault}", namespace.kubectl.namespace());
    let model = anthropic(&server.anthropic_url(&label));
    start_with(namespace, server, fault, label, &model)
}

fn start_with<'a>(
    namespace: &'a Namespace,
    server: &ModelServer,
    fault: &str,
    label: String,
    model: &serde_json::Value,
) -> (Agent<'a>, String) {
    server.choose(&label, fault);
    let fast = json!({"loop": {"maxDelayMilliseconds": 1000}});
    let format = model["api"].as_str().unwrap_or_default().to_lowercase();
    let agent = Agent::apply(namespace, &format!("{format}-{fault}"), model, &fast);
    (agent, label)
}
