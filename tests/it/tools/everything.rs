//! Another real MCP server: the MCP project's own, in JavaScript, unchanged but for the address it listens on.

use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use agentloop::engine::tool::ToolOutcome;
use serde_json::json;
use tempfile::TempDir;

use super::{LONG, ToolsHarness, artifact, done, names, run};
use crate::support::clusters::has;

/// Whether there is an npm for it. Says so when there is none.
pub fn is_there() -> bool {
    has("npm")
}

pub struct Everything {
    packages: PathBuf,
    directory: TempDir,
    port: u16,
    process: Option<(Child, ChildStdin)>,
}

impl Everything {
    pub async fn start() -> Self {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/hack/node-env.sh");
        let output = Command::new(script)
            .arg("mcp-server/everything")
            .stderr(Stdio::inherit())
            .output()
            .unwrap();
        assert!(output.status.success(), "hack/node-env.sh failed");
        let text = String::from_utf8(output.stdout).unwrap();
        let packages = text.lines().last().expect("it prints a folder").trim().into();
        let mut server = Self {
            packages,
            directory: TempDir::new().unwrap(),
            port: 0,
            process: None,
        };
        server.go().await;
        server
    }

    /// Starts it, also again, on the same port.
    pub async fn go(&mut self) {
        let log = std::fs::File::create(self.log()).unwrap();
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/hack/mcp-server/everything/start.mjs");
        let mut child = Command::new("node")
            .arg(script)
            .env("EVERYTHING_DIR", &self.packages)
            .env("PORT", self.port.to_string())
            .stdin(Stdio::piped())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        self.process = Some((child, stdin));
        let line = self.until("its port", |log| {
            log.lines()
                .find_map(|line| line.strip_prefix("port ").map(str::to_owned))
        });
        self.port = line.await.parse().unwrap();
    }

    fn log(&self) -> PathBuf {
        self.directory.path().join("log")
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}/mcp", self.port)
    }

    /// Waits until its log shows what is looked for.
    async fn until<T>(&self, what: &str, seen: impl Fn(&str) -> Option<T>) -> T {
        let deadline = Instant::now() + LONG;
        loop {
            let log = std::fs::read_to_string(self.log()).unwrap();
            if let Some(found) = seen(&log) {
                return found;
            }
            assert!(Instant::now() < deadline, "{what} is not in its log: {log}");
            // The log is a file written by another program: looking again is the only event there is.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Requests that reached it.
    fn requests(&self) -> usize {
        let log = std::fs::read_to_string(self.log()).unwrap();
        log.matches("Received MCP POST request").count()
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        let (mut child, _stdin) = self.process.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

impl Drop for Everything {
    fn drop(&mut self) {
        if let Some((child, _)) = &mut self.process {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[tokio::test]
async fn the_mcp_projects_own_server_is_listed_and_its_tools_run() {
    if !is_there() {
        return;
    }
    let server = Everything::start().await;
    let harness = ToolsHarness::at(&server.url(), json!({})).await;
    let offered = harness.until_known().await;
    for tool in ["hub__echo", "hub__get-sum", "hub__get-structured-content"] {
        assert!(names(&offered).contains(&tool), "{:?}", names(&offered));
    }
    assert_eq!(harness.run("echo", json!({"message": "hi"})).await, done("Echo: hi"));
    let sum = harness.run("get-sum", json!({"a": 2, "b": 3})).await;
    assert!(
        matches!(&sum, ToolOutcome::Done { text } if text.contains('5')),
        "{sum:?}"
    );
    let wrong = harness.run("get-sum", json!({"a": "two"})).await;
    assert!(matches!(&wrong, ToolOutcome::Failed { .. }), "{wrong:?}");
    let image = harness.run("get-tiny-image", json!({})).await;
    let name = artifact(&image);
    assert!(
        matches!(&image, ToolOutcome::Done { text } if text.contains("[image image/png, ") && text.len() < 1000),
        "an image is named: {image:?}"
    );
    let stored = std::fs::read(harness.harness.path("state/artifacts").join(name)).unwrap();
    assert!(stored.starts_with(b"\x89PNG\r\n\x1a\n"), "and stored as it is");
    let resource = harness
        .run(
            "get-resource-reference",
            json!({"resourceType": "Blob", "resourceId": 1}),
        )
        .await;
    assert!(
        matches!(&resource, ToolOutcome::Done { text } if text.contains("[resource demo://resource/dynamic/blob/1, ")),
        "{resource:?}"
    );
    let stored = std::fs::read(harness.harness.path("state/artifacts").join(artifact(&resource))).unwrap();
    assert!(!stored.is_empty());
    let links = harness.run("get-resource-links", json!({"count": 3})).await;
    assert!(
        matches!(&links, ToolOutcome::Done { text } if text.matches("[link to resource ").count() == 3),
        "{links:?}"
    );
    let weather = harness
        .run("get-structured-content", json!({"location": "Chicago"}))
        .await;
    assert!(
        matches!(&weather, ToolOutcome::Done { text } if text.matches("temperature").count() == 1),
        "{weather:?}"
    );
}

#[tokio::test]
async fn the_mcp_projects_own_server_killed_in_mid_call_leaves_the_outcome_unknown() {
    if !is_there() {
        return;
    }
    let mut server = Everything::start().await;
    let harness = ToolsHarness::at(&server.url(), json!({})).await;
    harness.until_known().await;
    let before = server.requests();
    let tools = Arc::clone(&harness.tools);
    let long = run("trigger-long-running-operation", json!({"duration": 600, "steps": 6}));
    let call = tokio::spawn(async move { tools.run(long, LONG).await.outcome });
    server
        .until("the call", |log| {
            (log.matches("Received MCP POST request").count() > before).then_some(())
        })
        .await;
    server.kill();
    let outcome = call.await.unwrap();
    assert!(matches!(outcome, ToolOutcome::Unknown { .. }), "{outcome:?}");
    server.go().await;
    assert_eq!(
        harness.run("echo", json!({"message": "back"})).await,
        done("Echo: back")
    );
}
