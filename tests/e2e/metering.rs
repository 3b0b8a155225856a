//! The reported usage of an Agent equals that of the model server, whatever is killed during a call.

use std::collections::BTreeMap;

use super::agents::{Agent, COMPUTED_TOKENS, anthropic, computed, openai, status_used};
use super::cluster::{Namespace, shared};
use super::model_server::{self, Line, ModelServer, Used};
use super::node;
use crate::support::kubectl::Kubectl;
use serde_json::json;

/// Waits until `more` further calls of the label have ended.
fn until_more_calls(server: &ModelServer, label: &str, more: usize) {
    let known = server.ends(label).len();
    server.until("further calls", label, 900, |lines| {
        (lines.iter().filter(|line| line.event == "end").count() >= known + more).then_some(())
    });
}

/// Ends a loop, most likely in a call, which is the one that may be unknown beyond those that the server saw cut; all others
/// are counted as the server says.
fn stop_and_compare(agent: &Agent<'_>, system: &Kubectl, server: &ModelServer, label: &str) {
    let stopped = model_server::now();
    agent.stop(90);
    agent.until_counts(system, 45, || {
        let unknown = status_used(&agent.object()).unknown_calls;
        let seen = server.used(label).unknown_calls;
        server.used_but_for_cut(label, stopped, unknown.min(seen + 1))
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
    server.until_in_call(label, 120);
    agent.kubectl.ok(&["delete", "pod", &agent.name, "--wait=false"]);
    let pod = agent.until_pod(Some(&pod), 90);
    until_more_calls(server, label, 2);

    let in_flight = server.until_in_call(label, 120);
    node::kill(&pod, "worker");
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

    stop_and_compare(&agent, &cluster.system, server, label);
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
fn a_real_models_tokens_are_counted_exactly_in_both_wire_formats_streamed_and_whole() {
    let (Some(cluster), Some(server)) = (shared(), model_server::real()) else {
        return;
    };
    let namespace = Namespace::new(&cluster.system, "formats");
    let mut agents = Vec::new();
    for stream in [true, false] {
        for format in ["openai", "anthropic"] {
            let name = format!("{format}-{}", if stream { "streamed" } else { "whole" });
            let label = format!("{}-{name}", namespace.kubectl.namespace());
            let mut model = computed(match format {
                "openai" => openai(&server.base_url(&label)),
                _ => anthropic(&server.anthropic_url(&label)),
            });
            model["stream"] = stream.into();
            agents.push((Agent::apply(&namespace, &name, &model, &busy()), label));
        }
    }
    for (agent, label) in &agents {
        until_more_calls(server, label, 3);
        stop_and_compare(agent, &cluster.system, server, label);
        let used = server.used(label);
        assert!(used.output > 0 && used.input > 0, "{label}: {used:?}");
        no_key_twice(&server.lines(label));
    }
}

#[test]
fn after_gateway_kills_each_missing_token_belongs_to_a_call_of_unknown_usage() {
    let (Some(cluster), Some(server)) = (shared(), model_server::real()) else {
        return;
    };
    let namespace = Namespace::new(&cluster.system, "gateway-kills");
    let label = namespace.kubectl.namespace();
    let agent = Agent::apply(
        &namespace,
        "counted",
        &computed(openai(&server.base_url(label))),
        &busy(),
    );
    until_more_calls(server, label, 2);
    let pod = agent.until_pod(None, 30);
    let mut in_flight = Vec::new();
    for kill in 1..=2 {
        in_flight.extend(server.until_in_call(label, 120).key);
        node::kill(&pod, "gateway");
        agent.until_restarted("gateway", kill, 60);
        until_more_calls(server, label, 2);
    }
    agent.stop(60);

    let states = gateway_record(&agent);
    let ends = server.ends(label);
    let state = |line: &Line| {
        states
            .get(line.key.as_deref().unwrap_or_default())
            .map_or("absent", String::as_str)
    };
    let settled: Used = ends
        .iter()
        .filter(|line| state(line) == "Settled")
        .map(Line::used)
        .sum();
    let lost: Vec<_> = ends.iter().filter(|line| state(line) == "Lost").collect();
    assert!(
        ends.iter().all(|line| state(line) != "absent"),
        "a call was sent without a record: {states:?}"
    );
    assert!(
        !lost.is_empty(),
        "a call cut by SIGKILL of its gateway is unknown, not free: {states:?}"
    );
    for line in lost {
        assert!(
            in_flight.contains(&line.key.clone().unwrap_or_default()),
            "lost, yet not in flight: {line:?}"
        );
    }
    // A call that was cut before the server saw it has a record, and is counted only if it may have left.
    let seen = i64::try_from(ends.len()).expect("few");
    let recorded = i64::try_from(states.len()).expect("few");
    let counted = agent.until(
        &format!("{seen} to {recorded} calls, the counts of the server"),
        45,
        |agent| {
            let counted = status_used(agent);
            (counted.calls >= seen).then_some(counted)
        },
    );
    let unseen = counted.calls - seen;
    assert!(
        unseen <= recorded - seen,
        "{unseen} calls are counted without a record: {states:?}"
    );
    let lost = states.values().filter(|state| *state == "Lost").count();
    let cut = ends
        .iter()
        .filter(|line| state(line) == "Failed" && line.used().unknown_calls == 1);
    let lost_unseen = lost - ends.iter().filter(|line| state(line) == "Lost").count();
    assert!(
        unseen >= i64::try_from(lost_unseen).expect("few"),
        "a lost call is free: {states:?}"
    );
    let expected = Used {
        calls: seen + unseen,
        unknown_calls: i64::try_from(lost - lost_unseen + cut.count()).expect("few") + unseen,
        ..settled
    };
    assert_eq!(
        counted, expected,
        "counted (left) and the server's sums of all settled calls (right): {states:?}"
    );
    no_key_twice(&server.lines(label));
}

/// What the gateway's own record says of each call, by its key: read from the node, once the pod is gone.
fn gateway_record(agent: &Agent<'_>) -> BTreeMap<String, String> {
    let file = node::volume(agent.kubectl, &agent.name).join("gateway/calls.db");
    let uid = agent.object()["metadata"]["uid"]
        .as_str()
        .expect("an Agent has a uid")
        .to_owned();
    let record = rusqlite::Connection::open(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let mut select = record
        .prepare("SELECT turn, call, attempt, state FROM calls")
        .expect("it has calls");
    let rows = select.query_map([], |row| {
        let (turn, call, attempt) = (row.get::<_, i64>(0)?, row.get::<_, i64>(1)?, row.get::<_, i64>(2)?);
        Ok((format!("{uid}-t{turn}c{call}a{attempt}"), row.get(3)?))
    });
    rows.expect("rows").map(|row| row.expect("a row")).collect()
}

/// The example as a user fills it in, with limits that suit a model of 135 million parameters.
fn example(base_url: &str) -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/openai-compatible.yaml");
    let mut text = std::fs::read_to_string(path).expect("the example is there");
    for (from, to) in [
        ("https://api.openai.com/v1 ", &format!("{base_url} ")),
        ("gpt-4.1-mini ", &"smollm2 ".into()),
        ("maxOutputTokens: 1024", &format!("maxOutputTokens: {COMPUTED_TOKENS}")),
        ("contextTokens: 128000", &"contextTokens: 3000".into()),
        // So small a model does repeat itself, and its loop would be made to sleep.
        (
            "maxCallsPerTurn: 10",
            &"maxCallsPerTurn: 10\n    loopDetection: {mode: Disabled}".into(),
        ),
    ] {
        assert!(text.contains(from), "the example has {from}");
        text = text.replace(from, to);
    }
    text
}

/// Turns without a pause, each with one call, though so small a model repeats itself.
fn busy() -> serde_json::Value {
    json!({"guardrails": {"maxConsecutiveTurns": 1000, "loopDetection": {"mode": "Disabled"}}})
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
