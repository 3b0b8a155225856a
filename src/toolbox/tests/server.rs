//! The toolbox as a server of the protocol.

use agentloop_toolbox_protocol::{BANDWIDTH_BYTES_META, DISK_WRITE_BYTES_META};
use pretty_assertions::assert_eq;
use serde_json::json;

use crate::harness::Server;

#[tokio::test]
async fn the_client_of_the_worker_finds_the_offered_tools_by_the_stateless_revision() {
    let server = Server::toolbox(&[]).await;
    let client = server.client().await;
    let version = client.service.peer_info().unwrap().protocol_version.to_string();
    assert_eq!(version, "2026-07-28");
    let names = async |server: &Server| -> Vec<String> {
        let client = server.client().await;
        let tools = agentloop_mcp::tools(client.service.peer()).await.unwrap();
        tools.into_iter().map(|tool| tool.name.to_string()).collect()
    };
    let files = ["read_file", "write_file", "edit_file", "list_directory", "search_files"];
    let default = [&["shell"][..], &files].concat();
    assert_eq!(names(&server).await, default);
    let fewer = Server::toolbox(&["--tools", "files,http", "--http-allowed-host", "example.com"]).await;
    assert_eq!(names(&fewer).await, [&files[..], &["http_request"]].concat());
    let useless = Server::toolbox(&["--tools", "files,http"]).await;
    assert_eq!(names(&useless).await, files, "without hosts, no request could be sent");
    let refused = fewer.client().await.try_call("shell", json!({"command": "true"})).await;
    assert!(refused.is_err(), "a tool that is not offered is not run");
}

#[tokio::test]
async fn a_result_reports_the_bytes_written_and_sent() {
    let server = Server::toolbox(&[]).await;
    let answer = server
        .call("write_file", json!({"path": "a", "content": "12345"}))
        .await;
    let meta = |key| answer.meta(key);
    assert_eq!((meta(DISK_WRITE_BYTES_META), meta(BANDWIDTH_BYTES_META)), (5, 0));
    let answer = server.call("read_file", json!({"path": "a"})).await;
    assert_eq!((answer.ok().as_str(), answer.meta(DISK_WRITE_BYTES_META)), ("12345", 0));
}

#[tokio::test]
async fn wrong_arguments_are_a_result_that_names_the_mistake() {
    let server = Server::toolbox(&[]).await;
    let text = server.call("read_file", json!({"pfad": "a"})).await.error();
    assert!(text.contains("unknown field `pfad`"), "{text}");
}

#[tokio::test]
async fn a_client_of_the_older_revision_works_with_a_session_and_can_cancel_by_notification() {
    let server = Server::toolbox(&[]).await;
    let http = server.http();
    let post = |session: Option<&str>, message: serde_json::Value| {
        let mut request = http
            .post("http://server/mcp")
            .header("accept", "application/json, text/event-stream")
            .json(&message);
        if let Some(session) = session {
            request = request.header("mcp-session-id", session);
        }
        request.send()
    };
    let info = json!({"name": "test", "version": "1"});
    let params = json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": info});
    let opened = post(
        None,
        json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}),
    )
    .await
    .unwrap();
    let session = opened.headers()["mcp-session-id"].to_str().unwrap().to_owned();
    let session = Some(session.as_str());
    post(
        session,
        json!({"jsonrpc": "2.0", "method": "notifications/initialized"}),
    )
    .await
    .unwrap();
    let marker = "sleep 1000.25";
    let call = json!({"name": "shell", "arguments": {"command": marker}});
    let running = post(
        session,
        json!({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call}),
    )
    .await
    .unwrap();
    crate::harness::until("the command runs", || crate::harness::processes(marker).pop()).await;
    let cancel = json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 2}});
    post(session, cancel).await.unwrap();
    crate::harness::until("the command ended", || {
        crate::harness::processes(marker).is_empty().then_some(())
    })
    .await;
    drop(running);
}

#[tokio::test]
async fn a_probe_finds_the_server_healthy_and_it_ends_on_sigterm() {
    let mut server = Server::toolbox(&[]).await;
    let health = server.http().get("http://server/v1/healthz").send().await.unwrap();
    assert_eq!(health.status(), 200);
    let pid = rustix::process::Pid::from_child(&server.process);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let status = crate::harness::until("the process ended", || server.process.try_wait().unwrap()).await;
    assert!(status.success(), "{status}");
}

#[tokio::test]
async fn the_idle_process_is_small_and_stays_so_after_results_of_a_mebibyte() {
    let server = Server::toolbox(&["--max-result-bytes", "1048576"]).await;
    let client = server.client().await;
    let idle = server.memory("RssAnon");
    for _ in 0..5 {
        let answer = client
            .call("shell", json!({"command": "head -c 2000000 /dev/zero | tr '\\0' x"}))
            .await;
        assert!(answer.ok().len() > 1_000_000);
    }
    let after = server.memory("RssAnon");
    println!("RssAnon {idle} KiB idle, {after} KiB after results of 1 MiB");
    assert!(idle < 8 * 1024, "{idle} KiB");
    assert!(after < 24 * 1024, "{after} KiB");
}

#[tokio::test]
async fn the_binary_copies_itself_also_over_an_earlier_copy_that_runs() {
    let folder = tempfile::tempdir().unwrap();
    let install = |program: &std::ffi::OsStr| {
        std::process::Command::new(program)
            .arg("toolbox-install")
            .arg(folder.path())
            .status()
    };
    assert!(install(&crate::harness::binary()).unwrap().success());
    let copy = folder.path().join("agentloop");
    assert!(install(copy.as_os_str()).unwrap().success());
    let same = std::fs::read(&copy).unwrap() == std::fs::read(crate::harness::binary()).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::mode(&copy.metadata().unwrap().permissions());
    assert_eq!((same, mode & 0o777), (true, 0o555));
}
