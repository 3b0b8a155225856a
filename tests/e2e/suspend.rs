//! `spec.suspend` stops the traffic at once; once it is removed, the loop continues where it stopped.

use serde_json::json;

use super::agents::{Agent, STARTUP, openai};
use super::cluster::{Namespace, alone, figure};
use super::model_server;
use crate::support::http;

/// Longest time from `spec.suspend` to the end of all model traffic.
const GOAL_MILLISECONDS: f64 = 250.0;

#[test]
fn suspend_ends_model_traffic_within_a_quarter_second_and_unsuspend_continues() {
    // Other tests would be part of the figure.
    let (Some(cluster), Some(server)) = (alone(), model_server::faulty()) else {
        return;
    };
    let namespace = Namespace::new(&cluster.system, "suspend");
    let label = namespace.kubectl.namespace();
    let agent = Agent::apply(&namespace, "endless", &openai(&server.base_url(label)), &json!({}));
    let proxy = namespace.kubectl.proxy();
    let path = format!("/apis/agentloop.dev/v1alpha1/namespaces/{label}/agents/endless");
    let mut took = Vec::new();
    for _ in 0..3 {
        server.choose(label, "endless");
        let call = server.until_in_call(label, STARTUP);
        agent.until_state("Running", 30);
        let asked = model_server::now();
        let (status, body) = http::request(
            proxy.address(),
            "PATCH",
            &path,
            "application/merge-patch+json",
            r#"{"spec":{"suspend":true}}"#,
        );
        assert_eq!(status, 200, "{body}");
        let end = server.until("the end of the call", label, 30, |lines| {
            lines
                .iter()
                .find(|line| line.event == "end" && line.id == call.id)
                .cloned()
        });
        assert!(!end.complete, "the call was cut");
        took.push((end.at - asked) * 1000.0);
        let calls = server.lines(label).len();
        agent.kubectl.until_gone("pod", &agent.name, 60);
        let stopped = agent.until_condition("Suspended", "True", "SuspendedBySpec", 30);
        assert!(
            stopped["message"].as_str().is_some_and(|text| text.contains("suspend")),
            "{stopped}"
        );
        assert_eq!(server.lines(label).len(), calls, "traffic after suspend");
        let claims = agent
            .kubectl
            .list("persistentvolumeclaims", "agentloop.dev/agent=endless");
        assert_eq!(claims.len(), 1, "the state is kept");
        agent.suspend(false);
    }
    server.choose(label, "good");
    server.until("a good call", label, 60, |lines| {
        lines.iter().rev().find(|line| line.complete).map(|_| ())
    });
    agent.until("no Suspended condition", 30, |agent| {
        super::agents::condition(agent, "Suspended")
            .is_none_or(|one| one["status"] == "False")
            .then_some(())
    });
    took.sort_by(f64::total_cmp);
    figure("suspend_to_silence_median", format!("{:.0}", took[1]), "ms");
    figure("suspend_to_silence_worst", format!("{:.0}", took[2]), "ms");
    assert!(
        took.iter().all(|one| *one <= GOAL_MILLISECONDS),
        "suspend → silence took {took:?} ms; goal {GOAL_MILLISECONDS}"
    );
}
