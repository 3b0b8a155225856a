//! The plugin as a program, without an API server that answers: what it says, and after which time.

use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use pretty_assertions::assert_eq;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::task::JoinSet;

use crate::support::ports::free_port;

/// Longest duration of a command with a time limit of a second on a machine that is busy.
const SOON: Duration = Duration::from_secs(20);

/// The program with a kubeconfig whose contexts lead to these servers.
pub struct Plugin {
    pub dir: TempDir,
}

impl Plugin {
    pub fn new(servers: &[(&str, String)]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let named = |value: &dyn Fn(&str, &str) -> Value| -> Vec<Value> {
            servers.iter().map(|(name, url)| value(name, url)).collect()
        };
        let kubeconfig = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": servers.first().map(|(name, _)| name),
            "clusters": named(&|name, url| json!({"name": name, "cluster": {"server": url}})),
            "users": [{"name": "u", "user": {"token": "token-of-ann"}}],
            "contexts": named(&|name, _| json!({"name": name, "context": {"cluster": name, "user": "u", "namespace": "team-a"}})),
        });
        std::fs::write(dir.path().join("config"), kubeconfig.to_string()).unwrap();
        symlink(env!("CARGO_BIN_EXE_agentloop"), dir.path().join("kubectl-agentloop")).unwrap();
        Self { dir }
    }

    pub fn command(&self, line: &str) -> Command {
        let mut command = Command::new(self.dir.path().join("kubectl-agentloop"));
        command
            .args(line.split(' '))
            .env("KUBECONFIG", self.dir.path().join("config"))
            .env_remove("KUBERNETES_SERVICE_HOST")
            .stdin(Stdio::null())
            .kill_on_drop(true);
        command
    }

    /// What the command says on standard error; it fails.
    pub async fn error(&self, line: &str) -> String {
        failed(&self.command(line).output().await.unwrap())
    }
}

fn failed(done: &Output) -> String {
    let error = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(done.status.code(), Some(1), "{error}");
    assert!(!error.contains("token-of-ann"), "{error}");
    error
}

/// A server that accepts connections, and does this with each. Returns its host and port.
pub async fn server<F>(serve: impl Fn(TcpStream) -> F + Send + 'static) -> (JoinSet<()>, String)
where
    F: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut serving = JoinSet::new();
    serving.spawn(async move {
        let mut open = JoinSet::new();
        while let Ok((stream, _)) = listener.accept().await {
            open.spawn(serve(stream));
        }
    });
    (serving, address)
}

/// Keeps a connection open and never answers.
async fn silence(stream: TcpStream) {
    let _stream = stream;
    std::future::pending::<()>().await;
}

/// Reads something, and answers this.
pub async fn answer(mut stream: TcpStream, text: &'static str) {
    let mut request = [0; 4_096];
    let _ = stream.read(&mut request).await;
    let _ = stream.write_all(text.as_bytes()).await;
}

#[tokio::test]
async fn a_server_that_accepts_and_never_answers_ends_a_command_after_the_time_limit() {
    let (_silent, address) = server(silence).await;
    let plugin = Plugin::new(&[
        ("prod", format!("http://{address}")),
        ("tls", format!("https://{address}")),
    ]);
    for (line, expected) in [
        (
            "status --request-timeout 1s",
            format!("error: cannot list Agents: http://{address} (context \"prod\")"),
        ),
        (
            "status --request-timeout=1s --context tls",
            format!("error: cannot list Agents: https://{address} (context \"tls\")"),
        ),
        (
            "pause helper --request-timeout=1s",
            format!("error: cannot read Agent team-a/helper: http://{address} (context \"prod\")"),
        ),
        (
            "check --request-timeout=1s",
            format!("error: cannot reach the API server: http://{address} (context \"prod\")"),
        ),
        (
            "logs helper --follow --request-timeout=1s",
            format!("error: cannot read Agent team-a/helper: http://{address} (context \"prod\")"),
        ),
    ] {
        let started = Instant::now();
        assert_eq!(
            plugin.error(line).await,
            format!("{expected}: no response within 1s (--request-timeout)\n")
        );
        assert!(started.elapsed() < SOON, "{line}: {:?}", started.elapsed());
    }
}

#[tokio::test]
async fn the_first_bytes_of_a_response_do_not_end_the_time_limit() {
    let (_slow, address) = server(|mut stream| async {
        let head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{";
        let _ = stream.read(&mut [0; 4_096]).await;
        let _ = stream.write_all(head).await;
        silence(stream).await;
    })
    .await;
    let plugin = Plugin::new(&[("prod", format!("http://{address}"))]);
    let error = plugin.error("status --request-timeout 1").await;
    assert!(error.contains("no response within 1s (--request-timeout)"), "{error}");
}

#[tokio::test]
async fn a_failed_connection_names_the_server_and_the_context() {
    let free = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let (_plain, plain) = server(|stream| answer(stream, "HTTP/1.1 400 Bad Request\r\n\r\n")).await;
    let (_closed, closed) = server(|stream| answer(stream, "")).await;
    let plugin = Plugin::new(&[
        ("prod", format!("https://{free}")),
        ("dns", "https://no-such-host.invalid:6443".into()),
        ("plain", format!("https://{plain}")),
        ("closed", format!("http://{closed}")),
    ]);
    assert_eq!(
        plugin.error("status").await,
        format!("error: cannot list Agents: https://{free} (context \"prod\"): connection refused\n")
    );
    let unresolved = plugin.error("status --context dns").await;
    let expected =
        "error: cannot list Agents: https://no-such-host.invalid:6443 (context \"dns\"): failed to lookup address";
    assert!(unresolved.starts_with(expected), "{unresolved}");
    assert_eq!(
        plugin.error("status --context plain").await,
        format!(
            "error: cannot list Agents: https://{plain} (context \"plain\"): the TLS connection failed: the server does not \
             speak TLS on this port\n"
        )
    );
    let closed = plugin.error("status --context closed").await;
    assert!(closed.contains("(context \"closed\"): connection closed"), "{closed}");
}

#[tokio::test]
async fn without_a_kubeconfig_the_message_names_the_fix() {
    let plugin = Plugin::new(&[]);
    let home = plugin.dir.path();
    let missing = home.join("missing");
    let fix = "set --kubeconfig or KUBECONFIG";
    let by_default = plugin
        .command("status")
        .env_remove("KUBECONFIG")
        .env("HOME", home)
        .output()
        .await
        .unwrap();
    let listed = plugin
        .command("status")
        .env("KUBECONFIG", &missing)
        .output()
        .await
        .unwrap();
    let named = plugin
        .error(&format!("status --kubeconfig {}", missing.display()))
        .await;
    for (error, path) in [
        (failed(&by_default), home.join(".kube/config")),
        (failed(&listed), missing.clone()),
        (named, missing.clone()),
    ] {
        let path = path.display();
        assert_eq!(
            error,
            format!("error: the kubeconfig cannot be used: {path} does not exist; {fix}\n")
        );
    }
}

#[tokio::test]
async fn a_check_of_another_server_says_that_it_was_reached_and_what_it_answered() {
    const NOT_FOUND: &str = "HTTP/1.1 404 Not Found\r\nconnection: close\r\n\r\nnf\nand more\n\n\n";
    const WRONG: &str = "HTTP/1.1 401 Unauthorized\r\nconnection: close\r\n\r\n\
        {\"kind\":\"Status\",\"apiVersion\":\"v1\",\"message\":\"Unauthorized\",\"code\":401,\"status\":\"Failure\"}";
    const PAGE: &str = "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n<html>";
    let (_missing, missing) = server(|stream| answer(stream, NOT_FOUND)).await;
    let (_wrong, wrong) = server(|stream| answer(stream, WRONG)).await;
    let (_page, page) = server(|stream| answer(stream, PAGE)).await;
    let plugin = Plugin::new(&[
        ("prod", format!("http://{missing}")),
        ("wrong", format!("http://{wrong}")),
        ("page", format!("http://{page}")),
    ]);
    assert_eq!(
        plugin.error("check").await,
        format!(
            "error: http://{missing} (context \"prod\") was reached, but answered the request for its version with status \
             404: nf; is it the URL of an API server?\n"
        )
    );
    assert_eq!(
        plugin.error("check --context wrong").await,
        format!(
            "error: http://{wrong} (context \"wrong\") was reached, but the API server rejects the credentials \
             (status 401: Unauthorized): they are wrong or have expired. Log in again, or name another --context or \
             --kubeconfig\n"
        )
    );
    assert_eq!(
        plugin.error("check --context page").await,
        format!(
            "error: http://{page} (context \"page\") was reached, but its version cannot be read: is it the URL of an API \
             server?\n"
        )
    );
}
