//! A pod that is cut off from the controller pauses when its run lease is over, and continues when the link is back.

use serde_json::json;

use super::agents::{Agent, openai};
use super::cluster::{Namespace, figure, shared};
use super::model_server;
use super::node::CutOff;

/// Port of the link's Service, as the pod sees it.
const LINK_PORT: u16 = 8443;
/// The run lease of the link, in seconds.
const RUN_LEASE: f64 = 60.0;

#[test]
fn a_partitioned_pod_makes_no_call_after_its_run_lease_and_recovers() {
    let (Some(cluster), Some(server)) = (shared(), model_server::faulty()) else {
        return;
    };
    let namespace = Namespace::new(&cluster.system, "cut-off");
    let label = namespace.kubectl.namespace();
    server.choose(label, "slow");
    let busy = json!({"guardrails": {"maxConsecutiveTurns": 1000}});
    let agent = Agent::apply(&namespace, "alone", &openai(&server.base_url(label)), &busy);
    let pod = agent.until_pod(None, 60);
    server.until_in_call(label, 90);

    let start = model_server::now();
    let cut = CutOff::start(&pod, LINK_PORT);
    // The cut itself takes a moment, in which there may be a last contact.
    let complete = model_server::now();
    // The controller reports it, since the pod cannot.
    let condition = agent.until_condition("LinkLost", "True", "LinkLost", 100);
    assert!(
        condition["message"].as_str().is_some_and(|text| !text.is_empty()),
        "{condition}"
    );
    let begins = |after: f64| {
        server
            .lines(label)
            .into_iter()
            .filter(|line| line.event == "begin" && line.at > after)
            .map(|line| line.at)
            .collect::<Vec<_>>()
    };
    // The last contact may have been a heartbeat (10 s) before the cut, and a tick of the gateway's clock may follow.
    let last = server.until("silence", label, 100, |_| {
        let now = model_server::now();
        (now > complete + RUN_LEASE + 10.0).then(|| begins(start).last().copied())
    });
    let last = last.expect("the loop went on until the run lease was over");
    let (since_start, since_complete) = (last - start, last - complete);
    figure("cut_off_to_last_call", format!("{since_complete:.1}"), "s");
    assert!(
        since_start >= 40.0 && since_complete < RUN_LEASE + 2.0,
        "the last call began {since_start} s after the beginning of the cut and {since_complete} s after its end"
    );
    let same = agent.until_pod(None, 30);
    assert_eq!(
        same["metadata"]["uid"], pod["metadata"]["uid"],
        "no second pod beside one that may act"
    );

    drop(cut);
    let healed = model_server::now();
    server.until("a call after the link is back", label, 60, |_| {
        begins(healed).first().copied()
    });
    agent.until("LinkLost is cleared", 60, |agent| {
        super::agents::condition(agent, "LinkLost")
            .is_none_or(|one| one["status"] == "False")
            .then_some(())
    });
    agent.until_condition("Ready", "True", "LoopRunning", 60);
}
