//! The worker as a process of its own, in a temporary directory.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use serde_json::{Value, json};
use tokio::process::{Child, Command};

use super::gateway::{Gateway, WAIT_TIMEOUT};

/// Stands in every instruction and answer; may stand in no output.
pub const CANARY: &str = "canary-7d1f";

/// A directory with a journal, and the settings of the workers that use it.
pub struct WorkerHarness {
    pub dir: tempfile::TempDir,
    pub epoch: i64,
    pub spec: Value,
    pub journal: PathBuf,
    /// How long a call in flight may continue after SIGTERM.
    pub drain_seconds: u32,
    started: u32,
}

impl WorkerHarness {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self {
            journal: dir.path().join("journal"),
            dir,
            epoch: 1,
            spec: json!({
                "instructions": format!("Be {CANARY}."),
                "model": {"api": "OpenAIChat", "name": "m", "baseURL": "http://unused/v1"},
                "loop": {"minDelayMilliseconds": 1, "maxDelayMilliseconds": 10},
            }),
            drain_seconds: 1,
            started: 0,
        }
    }

    /// Starts a worker; its output goes to files.
    pub fn worker(&mut self, gateway: &Gateway) -> Worker {
        self.started += 1;
        gateway.set_epoch(self.epoch);
        let output = self.dir.path().join(format!("output-{}", self.started));
        let config = json!({
            "namespace": "default", "name": "a", "uid": "agent", "epoch": self.epoch,
            "linkUrl": "https://unused", "spec": self.spec,
        });
        let file = File::create(&output).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_agentloop"))
            .arg("worker")
            .env("AGENTLOOP_POD", config.to_string())
            .env("AGENTLOOP_POD_UID", format!("pod-{}", self.epoch))
            .env("AGENTLOOP_SOCKET", gateway.socket())
            .env("AGENTLOOP_JOURNAL_DIR", &self.journal)
            .env("AGENTLOOP_INSTRUCTIONS_FILE", self.instructions_file())
            .env("AGENTLOOP_SKILLS_DIR", self.skills_dir())
            .env("AGENTLOOP_DRAIN_SECONDS", self.drain_seconds.to_string())
            .stdout(file.try_clone().unwrap())
            .stderr(file)
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        Worker { child, output }
    }

    pub fn instructions_file(&self) -> PathBuf {
        self.dir.path().join("instructions")
    }

    pub fn skills_dir(&self) -> PathBuf {
        self.dir.path().join("skills")
    }

    /// One value of the closed journal.
    pub fn query(&self, sql: &str) -> i64 {
        let connection = rusqlite::Connection::open(self.journal.join("journal.sqlite")).unwrap();
        connection.query_row(sql, [], |row| row.get(0)).unwrap()
    }

    /// No output of any worker here has text of instructions or answers.
    pub fn assert_discreet(&self) {
        for number in 1..=self.started {
            let output = read(&self.dir.path().join(format!("output-{number}")));
            assert!(!output.contains(CANARY), "{output}");
        }
    }
}

/// A running worker.
pub struct Worker {
    child: Child,
    output: PathBuf,
}

impl Worker {
    pub fn output(&self) -> String {
        read(&self.output)
    }

    /// SIGTERM, as the kubelet sends it.
    pub async fn terminate(&self) {
        let pid = self.child.id().unwrap().to_string();
        let sent = Command::new("kill").args(["-TERM", &pid]).status().await.unwrap();
        assert!(sent.success());
    }

    /// SIGKILL.
    pub async fn kill(mut self) {
        self.child.kill().await.unwrap();
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub async fn wait(&mut self) -> ExitStatus {
        self.child.wait().await.unwrap()
    }

    pub async fn ended(&mut self) -> ExitStatus {
        let ended = tokio::time::timeout(WAIT_TIMEOUT, self.child.wait()).await;
        assert!(ended.is_ok(), "the worker did not end:\n{}", self.output());
        ended.unwrap().unwrap()
    }
}

fn read(path: &Path) -> String {
    String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned()
}
