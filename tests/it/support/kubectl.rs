//! `kubectl` and `helm` as a user runs them: the real programs, from PATH or from the development cluster's cache.
//!
//! Waiting is done by watches with a deadline, never by sleeping. Knows nothing of agentloop.
#![allow(dead_code)]

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde_json::Value;

/// One cluster, seen through `kubectl`, by default in one namespace.
#[derive(Clone, Debug)]
pub struct Kubectl {
    kubeconfig: PathBuf,
    namespace: String,
}

/// How a command ended.
#[derive(Clone, Debug)]
pub struct Ended {
    pub success: bool,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        Self {
            success: output.status.success(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

/// The program of that name: the one of the development cluster when it is there, else the one on PATH.
pub fn tool(name: &str) -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").map_or_else(
        || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache"),
        PathBuf::from,
    );
    let cached = cache.join("agentloop/bin").join(name);
    if cached.exists() { cached } else { name.into() }
}

impl Kubectl {
    pub fn new(kubeconfig: &Path, namespace: &str) -> Self {
        Self {
            kubeconfig: kubeconfig.into(),
            namespace: namespace.into(),
        }
    }

    /// The same cluster, another namespace; an empty one leaves it to the manifests.
    pub fn in_namespace(&self, namespace: &str) -> Self {
        Self::new(&self.kubeconfig, namespace)
    }

    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// A `kubectl` command that has not been started.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(tool("kubectl"));
        command.arg("--kubeconfig").arg(&self.kubeconfig);
        if !self.namespace.is_empty() {
            command.args(["--namespace", &self.namespace]);
        }
        command.args(args);
        command
    }

    /// Runs `kubectl` to its end.
    pub fn run(&self, args: &[&str]) -> Ended {
        self.command(args).output().expect("kubectl starts").into()
    }

    /// Runs `kubectl`, which must succeed; its standard output.
    pub fn ok(&self, args: &[&str]) -> String {
        let ended = self.run(args);
        assert!(ended.success, "kubectl {} failed: {}", args.join(" "), ended.stderr);
        ended.stdout
    }

    /// Runs `helm`, which must succeed; its standard output.
    pub fn helm(&self, args: &[&str]) -> String {
        self.helm_with_warnings(args).stdout
    }

    /// Runs helm, whatever comes of it.
    pub fn try_helm(&self, args: &[&str]) -> Ended {
        let mut command = Command::new(tool("helm"));
        command
            .env("KUBECONFIG", &self.kubeconfig)
            .args(["--namespace", &self.namespace])
            .args(args);
        command.output().expect("helm starts").into()
    }

    /// As [`Self::helm`], with what it has said on standard error, where warnings of the API server are.
    pub fn helm_with_warnings(&self, args: &[&str]) -> Ended {
        let ended = self.try_helm(args);
        assert!(
            ended.success,
            "helm {} failed: {}{}",
            args.join(" "),
            ended.stdout,
            ended.stderr
        );
        ended
    }

    /// `kubectl apply` of a manifest, whatever comes of it.
    pub fn try_apply(&self, manifest: &str) -> Ended {
        self.try_apply_with(manifest, &[])
    }

    /// The same with further arguments, such as `--dry-run=server`.
    pub fn try_apply_with(&self, manifest: &str, arguments: &[&str]) -> Ended {
        let mut child = self
            .command(&["apply", "-f", "-"])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("kubectl starts");
        let mut stdin = child.stdin.take().expect("stdin is piped");
        stdin.write_all(manifest.as_bytes()).expect("kubectl reads its input");
        drop(stdin);
        child.wait_with_output().expect("kubectl ends").into()
    }

    /// `kubectl apply`, which must succeed.
    pub fn apply(&self, manifest: &str) {
        let ended = self.try_apply(manifest);
        assert!(ended.success, "apply failed: {}\n{manifest}", ended.stderr);
    }

    /// `kubectl apply`, which must be refused; the message.
    pub fn refused(&self, manifest: &str) -> String {
        let ended = self.try_apply(manifest);
        assert!(!ended.success, "this should have been refused:\n{manifest}");
        ended.stderr
    }

    /// One object, or `None` when there is none.
    pub fn get(&self, kind: &str, name: &str) -> Option<Value> {
        let text = self.ok(&["get", kind, name, "-o", "json", "--ignore-not-found"]);
        (!text.trim().is_empty()).then(|| serde_json::from_str(&text).expect("kubectl prints JSON"))
    }

    /// All objects of a kind that match a label selector.
    pub fn list(&self, kind: &str, selector: &str) -> Vec<Value> {
        let text = self.ok(&["get", kind, "-l", selector, "-o", "json"]);
        let list: Value = serde_json::from_str(&text).expect("kubectl prints JSON");
        list["items"].as_array().cloned().unwrap_or_default()
    }

    /// A merge patch on an object.
    pub fn patch(&self, kind: &str, name: &str, patch: &Value) {
        self.ok(&["patch", kind, name, "--type", "merge", "-p", &patch.to_string()]);
    }

    /// `kubectl wait`.
    pub fn wait(&self, object: &str, condition: &str, seconds: u32) {
        let timeout = format!("--timeout={seconds}s");
        self.ok(&["wait", object, &format!("--for={condition}"), &timeout]);
    }

    /// A path of the API server, such as a metrics page through its proxy.
    pub fn raw(&self, path: &str) -> String {
        self.ok(&["get", "--raw", path])
    }

    /// Watches all objects of a kind, from the present state on.
    pub fn watch(&self, kind: &str, args: &[&str]) -> Watch {
        let mut command = self.command(&["get", kind, "--watch", "--output-watch-events", "-o", "json"]);
        command.args(args);
        Watch::start(command)
    }

    /// Watches one object until `seen` gives something; fails after `seconds`. A watch that breaks is started again.
    pub fn until<T>(
        &self,
        what: &str,
        seconds: u64,
        kind: &str,
        name: &str,
        mut seen: impl FnMut(&Value) -> Option<T>,
    ) -> T {
        let deadline = Instant::now() + Duration::from_secs(seconds);
        let mut last = Value::Null;
        while Instant::now() < deadline {
            let watch = self.watch(kind, &["--field-selector", &format!("metadata.name={name}")]);
            while let Some(event) = watch.next(deadline) {
                if let Some(found) = seen(&event.object) {
                    return found;
                }
                last = event.object;
            }
            // A watch that cannot even start is tried again at a moderate pace.
            std::thread::park_timeout(Duration::from_millis(200));
        }
        let status = &last["status"];
        panic!("{what}: not within {seconds} s; {kind}/{name} has status {status:#}");
    }

    /// Waits until the object is gone.
    pub fn until_gone(&self, kind: &str, name: &str, seconds: u64) {
        let timeout = format!("--timeout={seconds}s");
        self.ok(&["wait", &format!("{kind}/{name}"), "--for=delete", &timeout]);
    }
}

/// A running `kubectl proxy`: the API server on a loopback port, without TLS. Ends with its value.
pub struct Proxy {
    child: Child,
    address: String,
}

impl Kubectl {
    /// Starts `kubectl proxy` on a free port.
    pub fn proxy(&self) -> Proxy {
        let mut command = self.command(&["proxy", "--port=0"]);
        let mut child = command.stdout(Stdio::piped()).spawn().expect("kubectl starts");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("stdout is piped");
        BufReader::new(stdout)
            .read_line(&mut line)
            .expect("kubectl proxy speaks");
        let address = line
            .rsplit(' ')
            .next()
            .expect("it says where it listens")
            .trim()
            .to_owned();
        Proxy { child, address }
    }
}

impl Kubectl {
    /// Starts `kubectl port-forward` of a port to a free one of this machine.
    pub fn forward(&self, target: &str, port: u16) -> Proxy {
        let mut command = self.command(&["port-forward", target, &format!(":{port}")]);
        let mut child = command.stdout(Stdio::piped()).spawn().expect("kubectl starts");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("stdout is piped");
        let mut lines = BufReader::new(stdout);
        lines.read_line(&mut line).expect("kubectl port-forward speaks");
        // It reports each connection too, and ends when nothing listens.
        std::thread::spawn(move || std::io::copy(&mut lines, &mut std::io::sink()));
        let address = line
            .strip_prefix("Forwarding from ")
            .and_then(|rest| rest.split(' ').next());
        Proxy {
            child,
            address: address.expect("it says where it listens").to_owned(),
        }
    }
}

impl Proxy {
    /// `host:port`.
    pub fn address(&self) -> &str {
        &self.address
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One change of one object.
#[derive(Clone, Debug)]
pub struct WatchEvent {
    pub kind: String,
    pub object: Value,
}

/// A running watch; ends with its value.
pub struct Watch {
    child: Child,
    events: mpsc::Receiver<WatchEvent>,
}

impl Watch {
    fn start(mut command: Command) -> Self {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("kubectl starts");
        let stdout = child.stdout.take().expect("stdout is piped");
        let (sender, events) = mpsc::channel();
        std::thread::spawn(move || {
            let stream = serde_json::Deserializer::from_reader(BufReader::new(stdout)).into_iter::<Value>();
            for mut value in stream.map_while(Result::ok) {
                let kind = value["type"].as_str().unwrap_or_default().to_owned();
                let event = WatchEvent {
                    kind,
                    object: value["object"].take(),
                };
                if sender.send(event).is_err() {
                    return;
                }
            }
        });
        Self { child, events }
    }

    /// The next change, or `None` at the deadline or when the watch broke.
    pub fn next(&self, deadline: Instant) -> Option<WatchEvent> {
        let left = deadline.saturating_duration_since(Instant::now());
        self.events.recv_timeout(left).ok()
    }

    /// All changes that have come so far.
    pub fn drain(&self) -> Vec<WatchEvent> {
        self.events.try_iter().collect()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
