//! The plugin as a program with an API server that rejects what is asked for, and with readers that go away: what it says, and
//! its exit codes.

use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use pretty_assertions::assert_eq;
use serde_json::json;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use super::harness::{NOW, TOKEN};
use super::link::{Answer, FakeController, OpenStream, Stream, accepted, event, start};
use super::program::{Program, text};
use super::unreachable::{Plugin, answer, server};

#[tokio::test]
async fn rejected_credentials_are_said_to_be_so() {
    const EXPIRED: &str = "HTTP/1.1 401 Unauthorized\r\nconnection: close\r\n\r\n\
        {\"kind\":\"Status\",\"apiVersion\":\"v1\",\"message\":\"Unauthorized\",\"reason\":\"Unauthorized\",\"code\":401,\
        \"status\":\"Failure\"}";
    let (_server, address) = server(|stream| answer(stream, EXPIRED)).await;
    let plugin = Plugin::new(&[("prod", format!("http://{address}"))]);
    let fix = "the API server rejects the credentials (status 401: Unauthorized): they are wrong or have expired. Log in again, or \
               name another --context or --kubeconfig";
    for (line, action) in [
        ("status", "list Agents"),
        ("explain helper", "read Agent team-a/helper"),
        ("pause helper", "read Agent team-a/helper"),
        ("approve helper", "get your user name"),
        ("budget top", "list AgentBudgets"),
        ("logs helper -f", "read Agent team-a/helper"),
    ] {
        assert_eq!(
            plugin.error(line).await,
            format!("error: cannot {action}: {fix}\n"),
            "{line}"
        );
    }
    for line in ["events helper", "run helper -p x", "chat helper"] {
        let error = plugin.error(line).await;
        assert!(
            error.contains("cannot read ConfigMap") && error.contains(fix),
            "{error}"
        );
    }
}

#[tokio::test]
async fn a_report_without_an_api_server_is_not_written() {
    let (_server, address) =
        server(|stream| answer(stream, "HTTP/1.1 401 Unauthorized\r\nconnection: close\r\n\r\n")).await;
    let (_gone, closed) = server(|stream| answer(stream, "")).await;
    let plugin = Plugin::new(&[
        ("prod", format!("http://{address}")),
        ("closed", format!("http://{closed}")),
    ]);
    let path = plugin.dir.path().join("report.zip");
    for context in ["prod", "closed"] {
        let line = format!("report --context {context} --file {}", path.display());
        let error = plugin.error(&line).await;
        assert!(error.contains(&format!("(context \"{context}\")")), "{error}");
        assert!(!path.exists(), "{context}");
    }
}

#[tokio::test]
async fn a_kind_that_is_not_installed_is_no_missing_object() {
    const UNKNOWN: &str = "HTTP/1.1 404 Not Found\r\nconnection: close\r\n\r\n404 page not found\n";
    let (_server, address) = server(|stream| answer(stream, UNKNOWN)).await;
    let plugin = Plugin::new(&[("prod", format!("http://{address}"))]);
    for (line, plural) in [
        ("status", "agents"),
        ("status helper", "agents"),
        ("explain helper", "agents"),
        ("pause helper", "agents"),
        ("budget top", "agentbudgets"),
        ("budget top-up team --calls 1", "agentbudgets"),
    ] {
        assert_eq!(
            plugin.error(line).await,
            format!(
                "error: the cluster does not serve {plural}.agentloop.dev: agentloop is not installed; see kubectl agentloop \
                 check\n"
            ),
            "{line}"
        );
    }
}

#[tokio::test]
async fn the_page_of_a_proxy_is_shown_as_its_status_and_first_line() {
    const PAGE: &str = "HTTP/1.1 502 Bad Gateway\r\nconnection: close\r\n\r\n<html>\n<body>no upstream</body>\n";
    const NOTHING: &str = "HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    let (_page, page) = server(|stream| answer(stream, PAGE)).await;
    let (_nothing, nothing) = server(|stream| answer(stream, NOTHING)).await;
    let plugin = Plugin::new(&[
        ("prod", format!("http://{page}")),
        ("empty", format!("http://{nothing}")),
    ]);
    assert_eq!(
        plugin.error("status").await,
        "error: cannot list Agents: the server answered with status 502: <html>\n"
    );
    assert_eq!(
        plugin.error("status --context empty").await,
        "error: cannot list Agents: the server answered with status 500\n"
    );
}

#[tokio::test]
async fn a_request_is_repeated_only_if_the_api_server_asks_for_it() {
    const AWAY: &str = "HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\n\r\nno upstream\n";
    const LATER: &str = "HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\nconnection: close\r\n\r\n{}";
    const EMPTY: &str = "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n\
        {\"kind\":\"AgentList\",\"apiVersion\":\"agentloop.dev/v1alpha1\",\"metadata\":{},\"items\":[]}";
    let (_away, away) = server(|stream| answer(stream, AWAY)).await;
    let (_busy, busy) = server(|stream| answer(stream, LATER)).await;
    let requests = Arc::new(AtomicUsize::new(0));
    let (_loading, loading) = server(move |stream| {
        let is_first = requests.fetch_add(1, Ordering::Relaxed) == 0;
        answer(stream, if is_first { LATER } else { EMPTY })
    })
    .await;
    let plugin = Plugin::new(&[
        ("away", format!("http://{away}")),
        ("busy", format!("http://{busy}")),
        ("loading", format!("http://{loading}")),
    ]);
    assert_eq!(
        plugin.error("status").await,
        "error: cannot list Agents: the server answered with status 503: no upstream\n"
    );
    assert_eq!(
        plugin.error("status --context busy --request-timeout 2").await,
        format!(
            "error: cannot list Agents: http://{busy} (context \"busy\"): asked to try again later (status 429) for 2s \
             (--request-timeout)\n"
        )
    );
    let done = plugin.command("status --context loading").output().await.unwrap();
    assert_eq!(
        (done.status.code(), text(&done.stderr)),
        (Some(0), "No Agents were found in namespace team-a.\n".into())
    );
}

/// A controller with these answers, and an API server that answers requests with this end of the path with this status.
async fn program(answers: Vec<Answer>, end: &'static str, status: StatusCode) -> Program {
    let fake = FakeController::start(answers).await;
    let gate = json!({"id": "g1", "kind": "ToolCallNeedsApproval", "tool": "a", "argumentsHash": "h", "openedAt": NOW});
    fake.harness.put_agent("helper", &json!({"gates": [gate]}));
    let reject = from_fn(move |request: Request, next: Next| async move {
        if !request.uri().path().ends_with(end) {
            return next.run(request).await;
        }
        let body = json!({"kind": "Status", "apiVersion": "v1", "message": "no budgets", "reason": "x", "code": status.as_u16(),
            "status": "Failure"});
        (status, Response::new(Body::from(body.to_string()))).into_response()
    });
    let router: Router = fake.harness.server.router().layer(reject);
    Program::serving(fake, router, &json!({"token": TOKEN})).await
}

#[tokio::test]
async fn gates_are_shown_and_the_command_fails_if_those_of_budgets_cannot_be_read() {
    for (status, code, kind) in [
        (StatusCode::FORBIDDEN, 0, "warning"),
        (StatusCode::INTERNAL_SERVER_ERROR, 1, "error"),
    ] {
        let program = program(Vec::new(), "/agentbudgets", status).await;
        let done = program.run("kubectl-agentloop", &["approvals", "-o", "json"], "").await;
        assert_eq!(
            (done.status.code(), text(&done.stderr)),
            (Some(code), format!("{kind}: cannot list AgentBudgets: no budgets\n"))
        );
        assert!(
            text(&done.stdout).contains("\"gate\": \"g1\""),
            "{}",
            text(&done.stdout)
        );
    }
}

#[tokio::test]
async fn a_name_with_its_kind_is_refused_and_nothing_is_written() {
    let program = program(Vec::new(), "/none", StatusCode::OK).await;
    for arguments in [
        &["pause", "agents/helper"][..],
        &["pause", "helper/status"],
        &["status", "-n", "../kube-system"],
    ] {
        let refused = program.run("kubectl-agentloop", arguments, "").await;
        assert_eq!(refused.status.code(), Some(64), "{arguments:?}");
        assert!(
            text(&refused.stderr).contains("helper, not agents/helper"),
            "{}",
            text(&refused.stderr)
        );
    }
    assert!(program.fake.harness.server.take_writes().is_empty());
}

fn turn(seq: i64) -> (&'static str, i64, serde_json::Value) {
    event("autonomy:turn_started", seq, &json!({}))
}

#[tokio::test]
async fn a_reader_that_has_read_enough_is_no_failure() {
    for line in [
        "status",
        "status -o yaml",
        "explain helper",
        "approvals",
        "cost",
        "budget top",
        "events helper -f",
        "events helper",
        "logs helper -f",
        "history helper",
        "history helper -o json",
        "pause helper",
        "completion bash",
        "--help",
        "status --help",
    ] {
        // An open stream would keep a command alive that does not notice.
        let last = if line.ends_with("-f") {
            OpenStream(vec![turn(1), turn(2)])
        } else {
            Stream(vec![turn(1), turn(2)])
        };
        let program = program(vec![start(2), last], "/none", StatusCode::OK).await;
        let link = program.fake.harness.link.clone();
        let mut arguments: Vec<&str> = line.split(' ').collect();
        arguments.extend(["--link-url", &link]);
        let mut child = program.spawn("kubectl-agentloop", &arguments);
        drop(child.stdout.take());
        let done = child.wait_with_output().await.unwrap();
        assert_eq!(
            (done.status.code(), text(&done.stderr)),
            (Some(0), String::new()),
            "{line}"
        );
    }
}

#[tokio::test]
async fn an_interrupt_ends_a_command_that_follows() {
    for command in ["events", "logs"] {
        let program = program(vec![start(1), OpenStream(vec![turn(1)])], "/none", StatusCode::OK).await;
        let link = program.fake.harness.link.clone();
        let arguments = [command, "helper", "-f", "--link-url", &link];
        let mut child = program.spawn("kubectl-agentloop", &arguments);
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.next_line().await.unwrap().is_some());
        let id = child.id().unwrap().to_string();
        assert!(
            Command::new("kill")
                .args(["-INT", &id])
                .status()
                .await
                .unwrap()
                .success()
        );
        assert_eq!(child.wait().await.unwrap().signal(), Some(2), "{command}");
    }
}

#[tokio::test]
async fn a_chat_that_fails_after_its_request_says_that_the_agent_continues() {
    let refusal = Answer::Json(403, json!({"code": "Forbidden", "message": "no longer"}));
    let answers = vec![start(0), accepted("Accepted"), Stream(Vec::new()), refusal];
    let program = program(answers, "/none", StatusCode::OK).await;
    let link = program.fake.harness.link.clone();
    let arguments = ["chat", "helper", "--link-url", &link];
    let done = program.run("kubectl-agentloop", &arguments, "Hello\n").await;
    assert_eq!(done.status.code(), Some(1));
    let error = text(&done.stderr);
    assert!(
        error.starts_with("the agent continues with the last message"),
        "{error}"
    );
    assert!(
        error.ends_with("error: the controller rejected the request: no longer\n"),
        "{error}"
    );
}
