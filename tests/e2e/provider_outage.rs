//! A provider that is unavailable for a minute and a half in the middle of a turn: the turn waits, and nothing of it is lost.

use pretty_assertions::assert_eq;
use serde_json::json;

use super::agents::{Agent, anthropic, openai};
use super::cluster::{Namespace, figure, shared};
use super::model_server::{self, Line};
use crate::tools::python::{self, Edition, McpServer};

/// Seconds for which the provider is unavailable.
const OUTAGE: f64 = 90.0;

#[test]
fn an_outage_of_90_s_during_a_turn_pauses_it_and_repeats_no_answered_call_and_no_tool_run() {
    let (Some(cluster), Some(server)) = (shared(), model_server::faulty().filter(|_| python::is_there())) else {
        return;
    };
    let namespace = Namespace::new(&cluster.system, "outage");
    let agents = ["chat", "messages"].map(|format| {
        let label = format!("{}-{format}", namespace.kubectl.namespace());
        server.choose(&label, "outage");
        let tools = McpServer::for_pods(Edition::Newer);
        let model = match format {
            "chat" => openai(&server.base_url(&label)),
            _ => anthropic(&server.anthropic_url(&label)),
        };
        let hub = json!({"name": "hub", "url": tools.url(), "trusted": true});
        let agent = Agent::apply(&namespace, format, &model, &json!({"tools": {"servers": [hub]}}));
        (agent, label, tools)
    });
    let begins = |label: &str| -> Vec<Line> {
        let lines = server.lines(label).into_iter();
        lines.filter(|line| line.event == "begin").collect()
    };
    for (agent, label, _) in &agents {
        agent.until_condition("ModelAvailable", "False", "Unreachable", 90);
        let paused = agent.until_state("Paused", 60);
        let status = &paused["status"]["loop"];
        assert_eq!(status["reasons"], json!(["ModelUnreachable"]));
        assert!(status["resumesAt"].is_string(), "it says when it tries again: {status}");
        let went = begins(label)[1].at;
        server.until("the end of the outage", label, 120, |_| {
            (model_server::now() > went + OUTAGE).then_some(())
        });
    }
    for (_, label, _) in &agents {
        server.choose(label, "sleep");
    }
    let back = model_server::now();
    for (agent, label, tools) in &agents {
        let asleep = agent.until_state("Sleeping", 150);
        let status = &asleep["status"];
        let told = (&status["usage"]["turns"], &status["loop"]["consecutiveErrors"]);
        assert_eq!(told, (&json!(1), &json!(0)), "one turn, and it did not fail");
        let calls = begins(label);
        let last = calls.last().expect("a good call");
        assert_eq!(
            calls[1].messages, last.messages,
            "the same call, from the first try to the good one"
        );
        assert!(calls[1..].iter().all(|call| call.messages == last.messages));
        assert_eq!(tools.records().len(), 1, "the tool ran once");
        figure("outage_over_to_next_call", format!("{:.1}", last.at - back), "s");
        agent.until_condition("ModelAvailable", "True", "Reachable", 30);
    }
}
