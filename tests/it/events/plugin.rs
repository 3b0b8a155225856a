//! The kubectl plugin against the controller's link, with a real worker and gateway.

use std::io::Write;
use std::sync::Arc;

use agentloop::plugin::api_requests::ServerAddress;
use agentloop::plugin::link::{LinkRoute, UserToken};
use agentloop::plugin::{ExitStatus, PluginArgs, PluginSession, Screen, commands};
use clap::FromArgMatches;
use jiff::Timestamp;
use kube::Config;
use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use super::harness::{EDITOR, EventsHarness, READER};
use crate::support::agents::agent;
use crate::support::api_server::ApiServer;

/// Runs a command line as this user; returns the status, the output and the error.
async fn run(harness: &EventsHarness, token: &str, line: &str) -> (ExitStatus, String, String) {
    let mut out = Vec::new();
    let (status, err) = run_into(harness, token, line, &mut out).await;
    (status, String::from_utf8(out).unwrap(), err)
}

/// The same with the output to `out`.
pub(super) async fn run_into(
    harness: &EventsHarness,
    token: &str,
    line: &str,
    out: &mut (dyn Write + Send),
) -> (ExitStatus, String) {
    let server = ApiServer::new(Arc::new(Timestamp::now));
    server.put("agentloop.dev/agents", agent("a", "x", &json!({})));
    let map =
        json!({"metadata": {"namespace": "a", "name": "agentloop-link-ca"}, "data": {"ca.crt": harness.authorities()}});
    server.put("/configmaps", map);
    let mut config = Config::new("http://127.0.0.1:1".parse().unwrap());
    config.auth_info = serde_json::from_value(json!({"token": token})).unwrap();
    let session = PluginSession {
        client: server.client(),
        impersonated_user: None,
        address: ServerAddress::new(&config, Some("test".into())),
        namespace: "a".into(),
        all_namespaces: false,
        format: None,
        controller_namespace: "agentloop-system".into(),
        route: LinkRoute::Direct(harness.url()),
        token: UserToken::Kubeconfig(Box::new(config)),
        clock: Arc::new(Timestamp::now),
        export: agentloop::cli::history_of,
        is_terminal: false,
    };
    let words = std::iter::once("kubectl-agentloop").chain(line.split(' '));
    let matches = agentloop::plugin::command().try_get_matches_from(words).unwrap();
    let arguments = PluginArgs::from_arg_matches(&matches).unwrap();
    let session = session.with_flags(&arguments.connection);
    let mut err = Vec::new();
    let mut screen = Screen { out, err: &mut err };
    let ended = commands::execute(&session, arguments.command, &mut screen).await;
    let status = ended.unwrap_or_else(|error| {
        writeln!(screen.err, "error: {error}").unwrap();
        error.exit_status()
    });
    (status, String::from_utf8(err).unwrap())
}

#[tokio::test]
async fn the_plugin_requests_a_task_and_reads_events_and_turns() {
    let mut harness = EventsHarness::start().await;
    harness.start_pod();
    super::wait_until("the pod is connected", || {
        harness.output("worker").contains("loop:started")
    })
    .await;
    let (status, result, err) = run(&harness, EDITOR, "run x --prompt count --id once -o json").await;
    assert_eq!(status, ExitStatus::Success, "{err}");
    let response: Value = serde_json::from_str(&result).unwrap();
    assert_eq!(
        (&response["id"], &response["outcome"]),
        (&json!("request-once"), &json!("Completed"))
    );
    // The same request has the same response, and is not worked on again.
    let (status, again, err) = run(&harness, EDITOR, "run x --prompt count --id once -o json").await;
    assert_eq!(status, ExitStatus::Success, "{err}");
    assert_eq!(again, result);

    let (_, events, _) = run(&harness, READER, "events x").await;
    let ended = events.lines().filter(|line| line.contains("task:ended"));
    assert_eq!(ended.count(), 1, "{events}");
    let (status, logs, err) = run(&harness, READER, "logs x --tail 30").await;
    assert_eq!(status, ExitStatus::Success, "{err}");
    assert!(
        logs.contains("turn_completed") && logs.contains("total 0 tokens"),
        "{logs}"
    );
    let (_, history, _) = run(&harness, READER, "history x --turns 2").await;
    assert_eq!(history.lines().count(), 3, "{history}");
    let (status, _, err) = run(&harness, READER, "run x --prompt count").await;
    assert_eq!(status, ExitStatus::Failure);
    assert!(
        err.contains("the controller rejected the request: reader may not get agents/messages"),
        "{err}"
    );
}
