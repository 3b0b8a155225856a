//! A third-party MCP server: the protocol's own package for Python.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use crate::support::clusters::{has, host_for_pods};

/// Which generation of the protocol the server speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edition {
    /// Both, and 2026-07-28 to those who ask.
    Newer,
    /// 2025-11-25 and before, with sessions.
    Older,
}

impl Edition {
    pub fn protocol(self) -> &'static str {
        match self {
            Self::Newer => "2026-07-28",
            Self::Older => "2025-11-25",
        }
    }

    fn interpreter(self) -> &'static str {
        static INTERPRETERS: [OnceLock<String>; 2] = [OnceLock::new(), OnceLock::new()];
        let (place, file) = match self {
            Self::Newer => (0, "mcp-server/requirements.txt"),
            Self::Older => (1, "mcp-server/requirements-older.txt"),
        };
        INTERPRETERS[place].get_or_init(|| interpreter(file))
    }
}

/// The interpreter of an environment with the packages of a file under hack/.
pub fn interpreter(file: &str) -> String {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/hack/python-env.sh");
    let output = Command::new(script)
        .arg(file)
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    assert!(output.status.success(), "hack/python-env.sh {file} failed");
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().last().expect("it prints an interpreter").trim().to_owned()
}

/// Whether there is a Python for such servers. Says so when there is none.
pub fn is_there() -> bool {
    has("python3")
}

pub struct McpServer {
    edition: Edition,
    args: Vec<&'static str>,
    directory: TempDir,
    host: String,
    pub port: u16,
    process: Option<(Child, ChildStdin)>,
}

impl McpServer {
    pub fn start(edition: Edition, args: &[&'static str]) -> Self {
        let mut server = Self::on("127.0.0.1", 0, edition, args);
        server.go();
        server
    }

    /// One that pods of the test cluster reach too, where the model servers are.
    pub fn for_pods(edition: Edition) -> Self {
        let mut server = Self::on(&host_for_pods(), 0, edition, &[]);
        server.go();
        server
    }

    /// One that has a port and does not run yet.
    pub fn stopped(edition: Edition, args: &[&'static str]) -> Self {
        let port = std::net::TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        Self::on("127.0.0.1", port, edition, args)
    }

    /// Port 0: whichever is free when it starts.
    fn on(host: &str, port: u16, edition: Edition, args: &[&'static str]) -> Self {
        Self {
            edition,
            args: args.to_vec(),
            directory: TempDir::new().unwrap(),
            host: host.into(),
            port,
            process: None,
        }
    }

    /// Starts it, also again, on the same port.
    pub fn go(&mut self) {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/hack/mcp-server/serve.py");
        let log = std::fs::File::create(self.directory.path().join("log")).unwrap();
        let mut child = Command::new(self.edition.interpreter())
            .args([
                "-B",
                script,
                "--stop-with-stdin",
                "--port",
                &self.port.to_string(),
                "--host",
                &self.host,
                "--record",
            ])
            .arg(self.record())
            .args(&self.args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let port = line.trim().parse().unwrap_or_else(|_| panic!("{}", self.log()));
        assert!(self.port == 0 || self.port == port, "{}", self.log());
        self.port = port;
        let stdin = child.stdin.take().unwrap();
        self.process = Some((child, stdin));
    }

    pub fn url(&self) -> String {
        format!("http://{}:{}/mcp", self.host, self.port)
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        let (mut child, _stdin) = self.process.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// What it did, in order.
    pub fn records(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.record()).unwrap_or_default();
        // The last line may be half written.
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    pub fn did(&self) -> Vec<String> {
        let records = self.records();
        records
            .iter()
            .map(|record| record["what"].as_str().unwrap().to_owned())
            .collect()
    }

    /// Waits until it did this last.
    pub async fn until(&self, what: &str) {
        for _ in 0..2000 {
            if self.did().last().is_some_and(|did| did == what) {
                return;
            }
            // The record is a file written by another program: looking again is the only event there is.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{what} is not the last of {:?}: {}", self.did(), self.log());
    }

    fn record(&self) -> PathBuf {
        self.directory.path().join("record")
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }
}

impl Drop for McpServer {
    fn drop(&mut self) {
        if let Some((child, _)) = &mut self.process {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
