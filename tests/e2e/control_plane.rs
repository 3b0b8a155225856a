//! The API server unavailable, the controller killed, the whole node restarted: loops continue, and the status is right
//! afterwards.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant, UNIX_EPOCH};

use serde_json::{Value, json};

use super::agents::{Agent, STARTUP, condition, openai, status_used};
use super::cluster::{self, Namespace, alone, figure};
use super::model_server::{self, Line, ModelServer, Used, now};
use super::node;
use crate::support::clusters;

/// How long the API server is unavailable, in seconds.
const OUTAGE_SECONDS: f64 = 30.0;

#[test]
fn loops_continue_during_an_api_server_outage_and_the_status_is_updated_afterwards() {
    let (Some(cluster), Some(server)) = (alone(), model_server::faulty()) else {
        return;
    };
    let namespace = Namespace::new(&cluster.system, "api-away");
    let (agent, label) = busy(&namespace, server, "going-on");
    let pod = agent.until_pod(None, STARTUP);
    agent.until_condition("Ready", "True", "LoopRunning", 60);

    let pid = std::fs::read_to_string(directory().join("pid/apiserver")).expect("the API server has a pid file");
    let away = node::Frozen::start(pid.trim().parse().expect("a pid"));
    let start = now();
    server.until(
        "a call after half a minute without the API server",
        &label,
        60,
        |lines| {
            lines
                .iter()
                .any(|line| line.event == "begin" && line.at > start + OUTAGE_SECONDS)
                .then_some(())
        },
    );
    drop(away);
    let back = now();
    let calls = begins(server, &label, start, back);
    let longest = longest_gap(&calls);
    figure("api_server_away_longest_pause_of_a_loop", format!("{longest:.1}"), "s");
    assert!(
        longest < 10.0,
        "a loop stood still for {longest} s while the API server was away"
    );

    cluster::leader(&cluster.system);
    server.until("calls after the API server is back", &label, 60, |lines| {
        (lines
            .iter()
            .filter(|line| line.event == "begin" && line.at > back)
            .count()
            >= 3)
            .then_some(())
    });
    until_reported(&agent, server, &label);
    agent.until_condition("Ready", "True", "LoopRunning", 90);
    same_pod(&agent, &pod);
    stop_at_rest(&agent, server, &label);
    agent.until_counts(&cluster.system, 60, || server.used(&label));
}

#[test]
fn a_controller_killed_at_any_moment_stops_no_loop_and_keeps_the_status_correct() {
    let (Some(cluster), Some(server)) = (alone(), model_server::faulty()) else {
        return;
    };
    let namespace = Namespace::new(&cluster.system, "killed");
    let (first, first_label) = busy(&namespace, server, "first");
    let pod = first.until_pod(None, 60);
    let mut agents = Vec::new();
    for round in 0..3 {
        let leader = cluster::leader(&cluster.system);
        // Another Agent is being created when the controller dies, each time at another moment of it.
        agents.push(busy(&namespace, server, &format!("new-{round}")));
        let moment = Duration::from_millis(u64::from(UNIX_EPOCH.elapsed().expect("after 1970").subsec_micros()) % 400);
        std::thread::park_timeout(moment);
        node::kill(&leader, "controller");
        let killed = Instant::now();
        let (agent, label) = &agents[round];
        let pod = agent.until_pod(None, 60);
        figure(
            "controller_killed_to_new_pod_ready",
            format!("{:.1}", killed.elapsed().as_secs_f64()),
            "s",
        );
        server.until("its first call", label, 60, |lines| (!lines.is_empty()).then_some(()));
        same_pod(agent, &pod);
    }
    cluster::leader(&cluster.system);
    same_pod(&first, &pod);
    agents.push((first, first_label));
    for (agent, label) in &agents {
        until_reported(agent, server, label);
        agent.until_condition("Ready", "True", "LoopRunning", 90);
        assert!(condition(&agent.object(), "LinkLost").is_none_or(|one| one["status"] == "False"));
    }
    for (_, label) in &agents {
        server.choose(label, "sleep");
    }
    for (agent, label) in &agents {
        stop_at_rest(agent, server, label);
        agent.until_counts(&cluster.system, 60, || server.used(label));
    }
}

#[test]
fn loops_resume_after_the_whole_node_was_restarted() {
    let (Some(cluster), Some(server)) = (alone(), model_server::faulty()) else {
        return;
    };
    let namespace = Namespace::new(&cluster.system, "restart");
    let (turning, label) = busy(&namespace, server, "turning");
    let sleep_label = format!("{label}-asleep");
    server.choose(&sleep_label, "sleep");
    let sleeping = Agent::apply(
        &namespace,
        "sleeping",
        &openai(&server.base_url(&sleep_label)),
        &json!({}),
    );
    let asleep = sleeping.until_state("Sleeping", 90);
    turning.until_turns(3, 90);
    let before = server.lines(&label);

    let start = Instant::now();
    for (script, args) in [("down.sh", &["--keep"][..]), ("up.sh", &[])] {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .join("hack/devcluster")
            .join(script);
        let done = Command::new(path)
            .args(args)
            .env("RUN", directory())
            .status()
            .expect("the script starts");
        assert!(done.success(), "{script} failed");
    }
    let restarted = now();
    // Calls went on until the node was down: only the time says that one is of the restarted pod.
    server.until("a call after the restart", &label, 180, |lines| {
        let mut begun = lines.iter().filter(|line| line.event == "begin");
        begun.any(|line| line.at > restarted).then_some(())
    });
    figure(
        "node_restart_to_loop_turning",
        format!("{:.0}", start.elapsed().as_secs_f64()),
        "s",
    );
    let old = last_begun(&before).expect("a call before").messages.clone();
    // The call that the restart cut is sent again as it was: only a longer request is of a later turn.
    let new = server.until("a later turn after the restart", &label, 180, |lines| {
        let newest = last_begun(lines)?;
        (newest.at > restarted && newest.messages.len() > old.len()).then(|| newest.messages.clone())
    });
    let same = old.iter().zip(&new).take_while(|(old, new)| old == new).count();
    assert!(same + 1 >= old.len(), "the transcript was lost: {old:?}, {new:?}");

    until_reported(&turning, server, &label);
    turning.until_condition("Ready", "True", "LoopRunning", 120);
    sleeping.until_pod(None, 60);
    sleeping.until_condition("PodReady", "True", "Running", 60);
    let still = sleeping.until_state("Sleeping", 60);
    assert_eq!(
        still["status"]["loop"]["resumesAt"], asleep["status"]["loop"]["resumesAt"],
        "the deadline moved"
    );
    assert_eq!(server.used(&sleep_label).calls, 1, "a sleeping loop called its model");
    turning.stop(90);
    turning.until("the counts of the server", 60, |agent| {
        counts_but_for_one(&status_used(agent), &server.used(&label)).then_some(())
    });
}

/// The call that began last.
fn last_begun(lines: &[Line]) -> Option<&Line> {
    lines.iter().rev().find(|line| line.event == "begin")
}

/// Whether the counts are the server's, but for the call that the restart cut: it may have been on its gateway's disk and
/// not yet at the server, or over at the server and not yet on that disk. Either way it is called unknown. All calls
/// that are known cost the same.
fn counts_but_for_one(counted: &Used, real: &Used) -> bool {
    let known = |used: &Used| used.calls - used.unknown_calls;
    let one = 0..=1;
    let alike = |of: fn(&Used) -> i64| of(counted) * known(real) == of(real) * known(counted);
    one.contains(&(counted.unknown_calls - real.unknown_calls))
        && one.contains(&(known(real) - known(counted)))
        && one.contains(&(counted.calls - real.calls))
        && alike(|used| used.input)
        && alike(|used| used.output)
        && alike(|used| used.cache_read)
}

/// An Agent that calls its model without a pause.
fn busy<'a>(namespace: &'a Namespace, server: &ModelServer, name: &str) -> (Agent<'a>, String) {
    let label = format!("{}-{name}", namespace.kubectl.namespace());
    server.choose(&label, "slow");
    let limits = json!({"guardrails": {"maxConsecutiveTurns": 1000}, "model": {"contextTokens": 128_000}});
    let agent = Agent::apply(namespace, name, &openai(&server.base_url(&label)), &limits);
    (agent, label)
}

/// Waits until a call that ends from now on is in the status. Conditions and the label of the leader may be those of before
/// a failure; this shows that a replica leads and that the pod is connected to it.
fn until_reported(agent: &Agent<'_>, server: &ModelServer, label: &str) {
    let calls = server.used(label).calls;
    agent.until("a report of a later call", 120, |agent| {
        (status_used(agent).calls > calls).then_some(())
    });
}

/// Stops the Agent while no call is in flight: of a call that is cut, the server may know more than the gateway.
fn stop_at_rest(agent: &Agent<'_>, server: &ModelServer, label: &str) {
    server.choose(label, "sleep");
    agent.until_state("Sleeping", 60);
    agent.stop(90);
}

/// The pod is the one it was, and none of its containers was restarted.
fn same_pod(agent: &Agent<'_>, before: &Value) {
    let now = agent.until_pod(None, 30);
    assert_eq!(
        now["metadata"]["uid"], before["metadata"]["uid"],
        "the pod of {} was replaced",
        agent.name
    );
    for list in ["containerStatuses", "initContainerStatuses"] {
        for container in now["status"][list].as_array().into_iter().flatten() {
            assert_eq!(
                container["restartCount"], 0,
                "{} of {} was restarted",
                container["name"], agent.name
            );
        }
    }
}

/// When the calls of a label began, between two moments.
fn begins(server: &ModelServer, label: &str, from: f64, to: f64) -> Vec<f64> {
    let lines = server.lines(label).into_iter().filter(|line| line.event == "begin");
    lines.map(|line| line.at).filter(|at| (from..to).contains(at)).collect()
}

fn longest_gap(moments: &[f64]) -> f64 {
    moments.windows(2).map(|pair| pair[1] - pair[0]).fold(0.0, f64::max)
}

/// The directory of the development cluster, which is where its kubeconfig lies.
fn directory() -> PathBuf {
    let kubeconfig = clusters::node().expect("there is a cluster");
    kubeconfig.parent().expect("a file is in a folder").into()
}
