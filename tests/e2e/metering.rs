//! What an Agent is said to have used is what the model server says, whatever is killed in the middle of a call.

use super::agents::{Agent, openai, status_used};
use super::cluster::{Namespace, shared};
use super::host;
use super::model_server::{self, Line, ModelServer};
use serde_json::json;

/// Waits until `more` further calls of the label have ended.
fn until_more_calls(server: &ModelServer, label: &str, more: usize) {
    let known = server.ends(label).len();
    server.until("further calls", label, 120, |lines| {
        (lines.iter().filter(|line| line.event == "end").count() >= known + more).then_some(())
    });
}

#[test]
fn a_real_models_tokens_are_counted_exactly_through_pod_deletion_and_worker_kills() {
    let (Some(cluster), Some(server)) = (shared(), model_server::real()) else {
        return;
    };
    let namespace = Namespace::new(&cluster.system, "metering");
    let label = namespace.kubectl.namespace();
    namespace.kubectl.apply(&example(&server.base_url(label)));
    let agent = Agent::named(&namespace, "openai-compatible");
    until_more_calls(server, label, 3);

    let pod = agent.until_pod(None, 30);
    server.until_in_call(label, 60);
    agent.kubectl.ok(&["delete", "pod", &agent.name, "--wait=false"]);
    let pod = agent.until_pod(Some(&pod), 90);
    until_more_calls(server, label, 2);

    let in_flight = server.until_in_call(label, 60);
    host::kill(&pod, "worker");
    agent.until_restarted("worker", 1, 60);
    until_more_calls(server, label, 2);
    let key = in_flight.key.expect("the gateway names its calls");
    let sent = server
        .lines(label)
        .iter()
        .filter(|line| line.event == "begin" && line.key.as_ref() == Some(&key))
        .count();
    assert_eq!(
        sent, 1,
        "the answer was paid for once: a worker that comes back gets the gateway's copy"
    );

    agent.stop(60);
    agent.until_counts(&cluster.system, 45, || server.used(label));
    let used = server.used(label);
    assert!(
        used.output > 0 && used.input > 0,
        "a real model was really used: {used:?}"
    );
    let whole = server.ends(label).into_iter().filter(|line| line.complete);
    assert!(
        whole.map(|line| line.status).all(|status| status == Some(200)),
        "every call was a good one"
    );
    no_key_twice(&server.lines(label));
}

#[test]
fn after_gateway_kills_each_missing_token_belongs_to_a_call_that_is_called_unknown() {
    let (Some(cluster), Some(server)) = (shared(), model_server::real()) else {
        return;
    };
    let namespace = Namespace::new(&cluster.system, "gateway-kills");
    let label = namespace.kubectl.namespace();
    let agent = Agent::apply(&namespace, "counted", &openai(&server.base_url(label)), &busy());
    until_more_calls(server, label, 2);
    let pod = agent.until_pod(None, 30);
    let mut cut = Vec::new();
    for kill in 1..=2 {
        cut.extend(server.until_in_call(label, 90).key);
        host::kill(&pod, "gateway");
        agent.until_restarted("gateway", kill, 60);
        until_more_calls(server, label, 2);
    }
    agent.stop(60);

    // Only the calls that were in flight at a kill, or cut by the stop, may be unknown; all others count exactly.
    let ends = server.ends(label);
    cut.extend(
        ends.iter()
            .filter(|line| line.usage.is_none())
            .filter_map(|line| line.key.clone()),
    );
    cut.sort();
    cut.dedup();
    let is_cut = |line: &&Line| line.key.as_ref().is_some_and(|key| cut.contains(key));
    let known = ends
        .iter()
        .filter(|line| !is_cut(line))
        .map(Line::used)
        .sum::<model_server::Used>();
    let counted = agent.until("the counts of the server", 45, |agent| {
        let counted = status_used(agent);
        (counted.calls - counted.unknown_calls >= known.calls).then_some(counted)
    });
    // A call that was killed may have been settled in the very moment before: then it is counted, with its own tokens.
    let settled = counted.calls - counted.unknown_calls - known.calls;
    let candidates: Vec<_> = ends
        .iter()
        .filter(is_cut)
        .filter(|line| line.usage.is_some())
        .map(Line::used)
        .collect();
    let explained = subsets(&candidates, usize::try_from(settled).expect("not negative"))
        .into_iter()
        .any(|sum| known.input + sum.input == counted.input && known.output + sum.output == counted.output);
    assert!(
        explained,
        "counted {counted:?}, known {known:?}, cut calls {candidates:?}, unknown keys {cut:?}"
    );
    assert!(
        counted.unknown_calls >= 1,
        "a call cut by SIGKILL of its gateway is unknown, not free: {counted:?}"
    );
    no_key_twice(&server.lines(label));
}

/// The example as a user fills it in, with limits that suit a model of 135 million parameters.
fn example(base_url: &str) -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/openai-compatible.yaml");
    let mut text = std::fs::read_to_string(path).expect("the example is there");
    for (from, to) in [
        ("https://api.openai.com/v1 ", &format!("{base_url} ")),
        ("gpt-4.1-mini ", &"smollm2 ".into()),
        ("maxOutputTokens: 1024", &"maxOutputTokens: 96".into()),
        ("contextTokens: 128000", &"contextTokens: 3000".into()),
    ] {
        assert!(text.contains(from), "the example has {from}");
        text = text.replace(from, to);
    }
    text
}

/// Turns without a pause, each with one call.
fn busy() -> serde_json::Value {
    json!({"guardrails": {"maxConsecutiveTurns": 1000}})
}

/// Each attempt is a call of its own, so that no key may reach the server twice.
fn no_key_twice(lines: &[Line]) {
    let mut keys: Vec<_> = lines
        .iter()
        .filter(|line| line.event == "begin")
        .map(|line| line.key.clone())
        .collect();
    let all = keys.len();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), all, "a call was sent twice under one key");
}

/// The sums of all choices of `size` of these.
fn subsets(all: &[model_server::Used], size: usize) -> Vec<model_server::Used> {
    (0..1_u32 << all.len())
        .filter(|choice| choice.count_ones() as usize == size)
        .map(|choice| {
            (0..all.len())
                .filter(|at| choice & (1 << at) != 0)
                .map(|at| all[at])
                .sum()
        })
        .collect()
}
