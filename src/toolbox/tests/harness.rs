//! A process of this crate, and clients of it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use agentloop_mcp::http::{McpHttpClient, McpTransport, McpTransportError};
use agentloop_mcp::{McpRequestError, own_config};
use reqwest::{Client, RequestBuilder, Response};
use rmcp::ClientHandler;
use rmcp::model::{CallToolRequestParams, CallToolResponse, CallToolResult, ClientConfig, JsonObject};
use rmcp::service::{NotificationContext, RoleClient, RunningService};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

pub const WAIT_TIMEOUT: Duration = Duration::from_secs(20);

/// The small process of this crate, or the product's binary, which has the same roles.
pub fn binary() -> OsString {
    std::env::var_os("AGENTLOOP_TEST_BINARY").unwrap_or_else(|| env!("CARGO_BIN_EXE_toolbox-under-test").into())
}

/// Waits until something holds.
pub async fn until<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(Instant::now() < deadline, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A process that listens on a socket.
pub struct Server {
    pub folder: tempfile::TempDir,
    pub process: Child,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Server {
    /// A toolbox with an empty workspace and additional flags.
    pub async fn toolbox(flags: &[&str]) -> Self {
        Self::toolbox_with(flags, |_| {}).await
    }

    pub async fn toolbox_with(flags: &[&str], change: impl FnOnce(&mut Command)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("workspace")).unwrap();
        // For tests with another user.
        for path in [folder.path(), &folder.path().join("workspace")] {
            std::fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
        }
        // Another user may not reach the directory of the build, such as one below /root.
        let program = folder.path().join("agentloop");
        if std::fs::hard_link(binary(), &program).is_err() {
            std::fs::copy(binary(), &program).unwrap();
        }
        let mut command = Command::new(program);
        command
            .arg("toolbox")
            .arg("--root")
            .arg(folder.path().join("workspace"));
        command.args(flags);
        change(&mut command);
        Self::start(folder, command).await
    }

    /// A bridge to a program.
    pub async fn bridge(program: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new(binary());
        command.arg("mcp-bridge");
        let mut last = Command::new("");
        last.arg("--").args(program);
        let listen = format!("unix:{}", socket(folder.path()).display());
        command.args(["--listen", &listen]).args(last.get_args());
        let process = command.stdin(Stdio::null()).spawn().unwrap();
        let server = Self { folder, process };
        server.until_listening().await;
        server
    }

    async fn start(folder: tempfile::TempDir, mut command: Command) -> Self {
        let listen = format!("unix:{}", socket(folder.path()).display());
        let process = command
            .args(["--listen", &listen])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let server = Self { folder, process };
        server.until_listening().await;
        server
    }

    async fn until_listening(&self) {
        let path = socket(self.folder.path());
        until("the server listens", || {
            std::os::unix::net::UnixStream::connect(&path).ok()
        })
        .await;
    }

    pub fn workspace(&self) -> PathBuf {
        self.folder.path().join("workspace")
    }

    /// Writes a file of the workspace.
    pub fn put(&self, name: &str, content: impl AsRef<[u8]>) {
        let path = self.workspace().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }

    /// Sets the time of the last change of a file back. Times of files are exact to some milliseconds: one that a test has just
    /// written may seem to be as new as the command after it.
    pub fn age(&self, name: &str, by: Duration) {
        let file = std::fs::File::options()
            .write(true)
            .open(self.workspace().join(name))
            .unwrap();
        file.set_modified(std::time::SystemTime::now() - by).unwrap();
    }

    pub fn get(&self, name: &str) -> String {
        std::fs::read_to_string(self.workspace().join(name)).unwrap()
    }

    pub fn http(&self) -> Client {
        let builder = Client::builder().unix_socket(socket(self.folder.path()));
        let _ = rustls_provider();
        builder
            .no_proxy()
            .tls_certs_only([])
            .pool_max_idle_per_host(0)
            .build()
            .unwrap()
    }

    pub async fn client(&self) -> TestClient {
        self.try_client().await.unwrap()
    }

    pub async fn try_client(&self) -> Result<TestClient, McpRequestError> {
        let (sender, changed) = mpsc::channel(16);
        let http = McpHttpClient::new(self.http(), Direct, CancellationToken::new());
        let listener = Listener { changes: sender };
        let service = agentloop_mcp::connect(listener, http, "http://server/mcp".into()).await?;
        Ok(TestClient { service, changed })
    }

    /// Calls a tool with a client of its own.
    pub async fn call(&self, tool: &str, arguments: Value) -> Answer {
        self.client().await.call(tool, arguments).await
    }

    /// A value of `/proc/PID/status` in KiB.
    pub fn memory(&self, name: &str) -> u64 {
        let path = format!("/proc/{}/status", self.process.id());
        let text = std::fs::read_to_string(path).unwrap();
        let values: BTreeMap<_, _> = text.lines().filter_map(|line| line.split_once(':')).collect();
        values[name].trim().trim_end_matches(" kB").parse().unwrap()
    }
}

fn socket(folder: &Path) -> PathBuf {
    folder.join("socket")
}

fn rustls_provider() -> Result<(), impl Sized> {
    rustls::crypto::ring::default_provider().install_default()
}

#[derive(Clone)]
struct Direct;

impl McpTransport for Direct {
    fn prepare(&self, request: RequestBuilder) -> Result<RequestBuilder, McpTransportError> {
        Ok(request)
    }

    fn unanswered(&self, error: &reqwest::Error) -> McpTransportError {
        if error.is_connect() {
            McpTransportError::NotSent("unreachable".into())
        } else {
            McpTransportError::NoAnswer("broken".into())
        }
    }

    async fn judge(&self, response: Response) -> Result<Response, McpTransportError> {
        Ok(response)
    }
}

/// Notes that the list of tools has changed.
pub struct Listener {
    changes: mpsc::Sender<()>,
}

impl ClientHandler for Listener {
    async fn on_tool_list_changed(&self, _: NotificationContext<RoleClient>) {
        let _ = self.changes.send(()).await;
    }

    fn get_info(&self) -> ClientConfig {
        own_config()
    }
}

pub struct TestClient {
    pub service: RunningService<RoleClient, Listener>,
    pub changed: mpsc::Receiver<()>,
}

impl TestClient {
    pub async fn call(&self, tool: &str, arguments: Value) -> Answer {
        Answer(self.try_call(tool, arguments).await.unwrap())
    }

    /// Dropping the future cancels the call.
    pub async fn try_call(&self, tool: &str, arguments: Value) -> Result<CallToolResult, McpRequestError> {
        let Value::Object(arguments) = arguments else { panic!() };
        let params = CallToolRequestParams::new(tool.to_owned()).with_arguments(arguments);
        let answer = self.service.call_tool_once(params).await;
        match answer.map_err(|error| McpRequestError::from_service_error(&error))? {
            CallToolResponse::Complete(result) => Ok(result),
            CallToolResponse::InputRequired(_) | CallToolResponse::Task(_) | _ => panic!("not a result"),
        }
    }
}

pub struct Answer(pub CallToolResult);

impl Answer {
    pub fn text(&self) -> String {
        agentloop_mcp::text::of(&self.0)
    }

    pub fn is_error(&self) -> bool {
        self.0.is_error == Some(true)
    }

    /// The text of a call that succeeded.
    #[track_caller]
    pub fn ok(&self) -> String {
        assert!(!self.is_error(), "{}", self.text());
        self.text()
    }

    /// The text of a call that failed.
    #[track_caller]
    pub fn error(&self) -> String {
        assert!(self.is_error(), "{}", self.text());
        self.text()
    }

    pub fn meta(&self, key: &str) -> u64 {
        let meta: &JsonObject = self.0.meta.as_ref().unwrap();
        meta[key].as_u64().unwrap()
    }
}

/// Processes whose command line contains a text, by `/proc`.
pub fn processes(with: &str) -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(with)
    })
    .collect()
}
