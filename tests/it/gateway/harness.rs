//! A gateway between a provider, a controller and a worker, each of them the test's.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use agentloop::api::failure::{CallFailure, FailureKind};
use agentloop::gateway::{GatewayOptions, ServerDirs};
use agentloop::link::messages::PodReport;
use agentloop::link::pod::CONFIG_ENV;
use agentloop::link::socket::{CALL_HEADER, FAILURE_EVENT, FAILURE_HEADER, WorkerSession};
use reqwest::{Client, Response, StatusCode};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::controller::{Controller, WAIT_TIMEOUT};
use super::provider::Provider;

pub const KEY: &str = "canary-key";
pub const PROMPT: &str = "canary-prompt";

pub struct GatewayHarness {
    pub provider: Provider,
    pub controller: Controller,
    pub directory: TempDir,
    pub model: Value,
    /// `spec.lightModel`; null: there is none.
    pub light: Value,
    /// `spec.tools`.
    pub tools: Value,
    /// `spec.task`; null: there is none.
    pub task: Value,
    /// Where the gateway may connect to.
    pub egress: Value,
    pub worker: Client,
    /// Further environment variables of the gateway.
    pub environment: Vec<(&'static str, String)>,
    /// Where calls go on the socket.
    pub route: &'static str,
    gateway: Option<Child>,
}

impl GatewayHarness {
    /// Everything but the gateway.
    pub async fn new() -> Self {
        let (provider, controller) = (Provider::start().await, Controller::start().await);
        let directory = TempDir::new().unwrap();
        std::fs::create_dir(directory.path().join("record")).unwrap();
        std::fs::write(directory.path().join("key"), format!("{KEY}\n")).unwrap();
        std::fs::write(directory.path().join("token"), "link-token\n").unwrap();
        controller.write_ca(&directory.path().join("ca.crt"));
        let model = json!({
            "api": "OpenAIChat", "name": "m", "baseURL": format!("http://{}/v1/", provider.address),
            "apiKeySecretRef": {"name": "s", "key": "k"}, "maxOutputTokens": 77, "timeoutSeconds": 30,
        });
        let socket = directory.path().join("gateway.sock");
        let worker = Client::builder()
            .unix_socket(socket)
            .no_proxy()
            .tls_certs_only([])
            .build()
            .unwrap();
        Self {
            provider,
            controller,
            directory,
            model,
            light: Value::Null,
            tools: json!({}),
            task: Value::Null,
            egress: json!({}),
            environment: Vec::new(),
            worker,
            route: "/v1/chat/completions",
            gateway: None,
        }
    }

    /// Everything, the gateway attached.
    pub async fn started() -> Self {
        Self::started_with(json!({})).await
    }

    /// The same with other fields of the model.
    pub async fn started_with(fields: Value) -> Self {
        let mut harness = Self::new().await;
        harness.set(&fields);
        harness.start().await;
        harness
    }

    /// Calls of another wire format: `base` is the path of the provider's base URL.
    pub async fn of_format(api: &str, base: &str, route: &'static str, fields: &Value) -> Self {
        let mut harness = Self::new().await;
        harness.set(&json!({"api": api, "baseURL": format!("http://{}{base}", harness.provider.address)}));
        harness.set(fields);
        harness.route = route;
        harness.start().await;
        harness
    }

    pub fn set(&mut self, fields: &Value) {
        for (name, value) in fields.as_object().unwrap() {
            self.model[name] = value.clone();
        }
    }

    pub async fn start(&mut self) {
        self.launch();
        self.session().await;
    }

    /// Starts the process; says nothing of whether it serves.
    pub fn launch(&mut self) {
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.path("log"))
            .unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_agentloop"));
        command
            .arg("gateway")
            .env_clear()
            .envs(self.environment.iter().cloned())
            .env("RUST_LOG", "trace,hyper=info,h2=info,rustls=info")
            .env(CONFIG_ENV, self.config().to_string())
            .env("AGENTLOOP_SOCKET", self.path("gateway.sock"))
            .env("AGENTLOOP_RECORD_DIR", self.path("record"))
            .env("AGENTLOOP_SCRIPT_FILE", self.path("script"))
            .env("AGENTLOOP_API_KEY_FILE", self.path("key"))
            .env("AGENTLOOP_LIGHT_SCRIPT_FILE", self.path("light-script"))
            .env("AGENTLOOP_LIGHT_API_KEY_FILE", self.path("light-key"))
            .env("AGENTLOOP_TOOL_HEADERS_DIR", self.path("tool-headers"))
            .env("AGENTLOOP_TOOL_SOCKETS_DIR", self.path("tool-sockets"))
            .env("AGENTLOOP_SERVER_CA_DIR", self.path("server-ca"))
            .env("AGENTLOOP_LINK_TOKEN_FILE", self.path("token"))
            .env("AGENTLOOP_LINK_CA_FILE", self.path("ca.crt"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        self.gateway = Some(command.spawn().unwrap());
    }

    /// The same gateway in this process, with a run lease that a test can wait for.
    pub fn options(&self, run_lease: Duration) -> GatewayOptions {
        GatewayOptions {
            config: serde_json::from_value(self.config()).unwrap(),
            socket: self.path("gateway.sock"),
            record_dir: self.path("record"),
            script_file: self.path("script"),
            api_key_file: self.path("key"),
            light_script_file: self.path("light-script"),
            light_api_key_file: self.path("light-key"),
            server_dirs: ServerDirs {
                headers: self.path("tool-headers"),
                sockets: self.path("tool-sockets"),
                ca: self.path("server-ca"),
            },
            link_token_file: self.path("token"),
            link_ca_file: self.path("ca.crt"),
            run_lease,
            traces: None,
            log: agentloop::telemetry::log_export::ProcessLog::default(),
        }
    }

    fn config(&self) -> Value {
        json!({
            "namespace": "ns", "name": "a", "uid": "agent-uid", "epoch": 3,
            "linkUrl": format!("https://{}", self.controller.address),
            "spec": {"model": self.model, "lightModel": self.light, "tools": self.tools, "task": self.task},
            "egress": self.egress,
        })
    }

    /// Writes a file of the Secret with a tool server's headers, as the kubelet does.
    pub fn write_header(&self, server: &str, header: &str, value: &str) {
        let directory = self.path("tool-headers").join(server);
        std::fs::create_dir_all(&directory).unwrap();
        std::fs::write(directory.join(header), value).unwrap();
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        let mut gateway = self.gateway.take().unwrap();
        gateway.kill().unwrap();
        gateway.wait().unwrap();
    }

    /// SIGTERM.
    pub fn terminate(&self) {
        let pid = self.gateway.as_ref().unwrap().id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    }

    pub async fn exited(&mut self) -> ExitStatus {
        let mut gateway = self.gateway.take().unwrap();
        let wait = tokio::task::spawn_blocking(move || gateway.wait().unwrap());
        tokio::time::timeout(WAIT_TIMEOUT, wait)
            .await
            .expect("the gateway does not end")
            .unwrap()
    }

    pub async fn session(&mut self) -> WorkerSession {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            if let Some(status) = self.gateway.as_mut().and_then(|gateway| gateway.try_wait().unwrap()) {
                panic!("the gateway ended with {status}: {}", self.log());
            }
            if let Ok(response) = self.worker.get(url("/v1/session")).send().await
                && response.status() == StatusCode::OK
            {
                return response.json().await.unwrap();
            }
            assert!(Instant::now() < deadline, "no session: {}", self.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub async fn call(&self, id: &str, body: &Value) -> Response {
        let request = self.worker.post(url(self.route)).header(CALL_HEADER, id).json(body);
        tokio::time::timeout(WAIT_TIMEOUT, request.send())
            .await
            .expect("no answer")
            .unwrap()
    }

    /// A call whose end the test does not wait for.
    pub fn call_aside(&self, id: &str, body: &Value) -> tokio::task::JoinHandle<(StatusCode, String)> {
        let request = self.worker.post(url(self.route)).header(CALL_HEADER, id).json(body);
        tokio::spawn(async move {
            let response = request.send().await.unwrap();
            (response.status(), response.text().await.unwrap())
        })
    }

    pub async fn ask(&self, id: &str) -> (StatusCode, String) {
        let response = self.call(id, &whole()).await;
        (response.status(), response.text().await.unwrap())
    }

    pub async fn errand(&self, id: &str, what: &str) -> StatusCode {
        self.worker
            .post(url(&format!("/v1/calls/{id}/{what}")))
            .send()
            .await
            .unwrap()
            .status()
    }

    /// The newest totals: calls, unknown calls, input, output, cached and reasoning tokens.
    pub async fn until_counted(&self, calls: i64, unknown: i64) -> PodReport {
        let what = format!("{calls} calls, {unknown} unknown");
        self.controller
            .until(&what, |report| {
                (report.usage.calls, report.usage.unknown_calls) == (calls, unknown)
            })
            .await
    }
}

impl Drop for GatewayHarness {
    fn drop(&mut self) {
        if let Some(gateway) = &mut self.gateway {
            let _ = gateway.kill();
            let _ = gateway.wait();
        }
    }
}

pub fn url(path: &str) -> String {
    format!("http://gateway{path}")
}

/// A request for a whole answer.
pub fn whole() -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": PROMPT}]})
}

/// A request for a stream.
pub fn streamed() -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": PROMPT}], "stream": true})
}

/// The failure that an answer without a stream carries.
pub async fn failure(response: Response) -> CallFailure {
    let status = response.status();
    assert!(status.is_server_error() || status == StatusCode::CONFLICT, "{status}");
    let header = response
        .headers()
        .get(FAILURE_HEADER)
        .expect("a failure says so in a header")
        .clone();
    let failure: CallFailure = response.json().await.unwrap();
    assert_eq!(header.to_str().unwrap(), failure.kind.as_ref());
    failure
}

/// The failure at the end of a stream that had begun, and what came before.
pub fn stream_failure(body: &str) -> (String, CallFailure) {
    let mark = format!("\nevent: {FAILURE_EVENT}\ndata: ");
    let (before, json) = body
        .split_once(&mark)
        .unwrap_or_else(|| panic!("no failure in {body:?}"));
    (before.into(), serde_json::from_str(json).unwrap())
}

pub fn kinds(failure: &CallFailure) -> (FailureKind, Option<u64>) {
    (failure.kind, failure.retry_after_milliseconds)
}

pub fn write(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
}
