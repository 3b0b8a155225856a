//! `kubectl agentloop simulate AGENT` reads the journal of a loop that continues meanwhile: the program, an exec over a
//! WebSocket as an API server answers it, `agentloop journal`, and a worker that writes.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::{Arc, Mutex};

use futures::SinkExt;
use pretty_assertions::assert_eq;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::task::JoinHandle;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::server::{Request, Response};
use tokio_tungstenite::{WebSocketStream, accept_hdr_async};

use super::process::{CANARY, LocalHarness, agent, scripted, various};

/// How the API server answers an exec.
#[derive(Clone, Debug)]
enum Exec {
    /// With the output of `agentloop journal` in this directory.
    Journal(PathBuf),
    /// With these bytes, as if the command had written no more.
    Copy(Vec<u8>),
    /// The connection ends in the middle.
    Cut(Vec<u8>),
    /// The command fails with this on standard error.
    Fails(&'static str),
    /// It is refused with this status.
    Refused(&'static str),
}

/// A fake API server with Agent `a`, which ends when it is dropped. The last answer stays.
struct Api {
    address: SocketAddr,
    answers: Arc<Mutex<VecDeque<Exec>>>,
    server: JoinHandle<()>,
}

impl Drop for Api {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Api {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let answers: Arc<Mutex<VecDeque<Exec>>> = Arc::default();
        let of_server = Arc::clone(&answers);
        let server = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let answers = Arc::clone(&of_server);
                tokio::spawn(async move { serve(stream, &answers).await });
            }
        });
        Self {
            address,
            answers,
            server,
        }
    }

    fn answer(&self, answers: impl IntoIterator<Item = Exec>) {
        *self.answers.lock().unwrap() = answers.into_iter().collect();
    }

    /// Runs `kubectl agentloop simulate` with these words.
    async fn simulate(&self, harness: &LocalHarness, words: &[&str]) -> Output {
        let kubeconfig = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "c", "cluster": {"server": format!("http://{}", self.address)}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u", "namespace": "default"}}],
        });
        let file = harness.path("kubeconfig");
        std::fs::write(&file, kubeconfig.to_string()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_agentloop"));
        command
            .args(["kubectl", "simulate"])
            .args(words)
            .env("KUBECONFIG", file);
        command.env("TMPDIR", harness.path("tmp")).output().await.unwrap()
    }

    /// The report of a simulation that succeeds.
    async fn report(&self, harness: &LocalHarness, words: &[&str]) -> Value {
        let done = self.simulate(harness, &[words, &["-o", "json"]].concat()).await;
        assert!(done.status.success(), "{}", text(&done.stderr));
        serde_json::from_slice(&done.stdout).unwrap()
    }

    /// What is said about a simulation that fails.
    async fn refusal(&self, harness: &LocalHarness) -> String {
        let done = self.simulate(harness, &["a", "--set", "limits.calls=2"]).await;
        assert_eq!(done.status.code(), Some(1), "{}", text(&done.stdout));
        text(&done.stderr)
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

async fn serve(mut stream: TcpStream, answers: &Mutex<VecDeque<Exec>>) {
    let mut head = [0; 4096];
    let length = stream.peek(&mut head).await.unwrap();
    let head = String::from_utf8_lossy(&head[..length]).into_owned();
    let command = "/api/v1/namespaces/default/pods/a/exec?";
    let body = if head.contains(command) {
        assert!(
            head.contains("container=worker&command=%2Fagentloop&command=journal"),
            "{head}"
        );
        let answer = {
            let mut answers = answers.lock().unwrap();
            let next = answers.front().cloned().unwrap();
            if answers.len() > 1 {
                answers.pop_front();
            }
            next
        };
        let Exec::Refused(status) = answer else {
            return execute(stream, answer).await;
        };
        Err(status)
    } else if ["/namespaces/default/agents/a ", "/namespaces/default/agents/a?"]
        .iter()
        .any(|path| head.contains(path))
    {
        let mut agent = agent("a", &json!({}));
        agent["metadata"]["namespace"] = json!("default");
        Ok(agent.to_string())
    } else {
        Err("404 Not Found")
    };
    stream.read_exact(&mut vec![0; length]).await.unwrap();
    let (status, body) = match body {
        Ok(body) => ("200 OK", body),
        Err(status) => (status, String::new()),
    };
    let answer = format!(
        "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(answer.as_bytes()).await.unwrap();
}

/// The channel protocol of exec: the first byte of a message is its channel, 1 for standard output, 2 for standard error,
/// and 3 for the status at the end.
async fn execute(stream: TcpStream, answer: Exec) {
    #[allow(clippy::result_large_err, clippy::unnecessary_wraps)]
    fn protocol(_: &Request, mut answer: Response) -> Result<Response, axum::http::Response<Option<String>>> {
        let name = "v4.channel.k8s.io".parse().unwrap();
        answer.headers_mut().insert("sec-websocket-protocol", name);
        Ok(answer)
    }
    let mut socket = accept_hdr_async(stream, protocol).await.unwrap();
    let (out, err, success) = match answer {
        Exec::Journal(dir) => {
            let mut command = Command::new(env!("CARGO_BIN_EXE_agentloop"));
            let done = command.arg("journal").env("AGENTLOOP_JOURNAL_DIR", dir).output();
            let done = done.await.unwrap();
            (done.stdout, done.stderr, done.status.success())
        }
        Exec::Copy(bytes) => (bytes, Vec::new(), true),
        Exec::Fails(says) => (vec![1; 100], says.as_bytes().to_vec(), false),
        Exec::Cut(bytes) => return send(&mut socket, 1, &bytes).await,
        Exec::Refused(_) => unreachable!("answered before"),
    };
    send(&mut socket, 1, &out).await;
    send(&mut socket, 2, &err).await;
    let status = if success {
        json!({"metadata": {}, "status": "Success"})
    } else {
        json!({"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode",
            "message": "command terminated with non-zero exit code",
            "details": {"causes": [{"reason": "ExitCode", "message": "1"}]}})
    };
    send(&mut socket, 3, status.to_string().as_bytes()).await;
    // The client closes the connection once it has the status, maybe before all of this is said.
    let _ = socket.close(None).await;
}

async fn send(socket: &mut WebSocketStream<TcpStream>, channel: u8, bytes: &[u8]) {
    for chunk in bytes.chunks(16 << 10) {
        let message = [&[channel], chunk].concat();
        if socket.send(Message::binary(message)).await.is_err() {
            return;
        }
    }
}

fn journal_dir(harness: &LocalHarness) -> PathBuf {
    harness.state().join("volumes/default/a-state/worker")
}

/// A valid copy of the journal in this directory, of a loop that has ended.
async fn copy(dir: &Path) -> Vec<u8> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_agentloop"));
    let done = command.arg("journal").env("AGENTLOOP_JOURNAL_DIR", dir).output();
    let done = done.await.unwrap();
    assert!(done.status.success(), "{}", text(&done.stderr));
    done.stdout
}

#[tokio::test]
async fn a_simulation_of_an_agent_that_runs_is_that_of_its_history_and_leaves_the_loop_alone() {
    let mut harness = LocalHarness::new();
    let turns = various(&json!({ "delayMilliseconds": 20, "usage": { "inputTokens": 90, "outputTokens": 10 } }));
    let [script, mut spec] = scripted("a", &turns);
    spec["spec"]["model"]["price"] = json!({ "inputPerMillion": "1.00", "outputPerMillion": "3.00" });
    harness.write("all.yaml", &[script, spec]);
    let mut run = harness.run(&[]);
    let turn = |line: &Value| line["turnsCompleted"].as_i64().unwrap_or(0);
    run.until("a", "in turn 4", |line| turn(line) >= 3).await;
    let api = Api::start().await;
    api.answer([Exec::Journal(journal_dir(&harness))]);
    let words = ["a", "--set", "limits.calls=2"];
    let now = turn(&run.agent("a"));
    let before = harness.left_over();
    let report = api.report(&harness, &words).await;
    let made = report["made"]["calls"].as_i64().unwrap();
    assert!(made >= now, "{made} calls in {now} turns: {report}");
    assert_eq!(report["made"]["tokens"], made * 100);
    assert_eq!(report["made"]["costMicroUSD"], made * (90 + 30));
    assert_eq!(report["refused"]["calls"], made - 2);
    assert!(!report.to_string().contains(CANARY));
    assert_eq!(harness.left_over(), before, "no copy is on the disk");
    // The loop has not noticed.
    run.until("a", "further", |line| turn(line) > made).await;

    let hour = api
        .report(&harness, &["a", "--set", "limits.calls=2", "--since", "1h"])
        .await;
    assert_eq!(hour["stops"][0]["call"], report["stops"][0]["call"]);
    let differs = hour["approximations"].to_string();
    assert!(differs.contains("is not counted: windows start empty"), "{differs}");
    run.interrupt().await;
    assert_eq!(run.cause().await, "Interrupted");

    // What is exported by hand says the same about the same calls.
    let file = harness.path("a.jsonl");
    let journal = journal_dir(&harness).join("journal.sqlite");
    let mut command = Command::new(env!("CARGO_BIN_EXE_agentloop"));
    let exported = command.arg("history").arg(journal).output().await.unwrap();
    std::fs::write(&file, exported.stdout).unwrap();
    let by_hand = ["--file", file.to_str().unwrap(), "--set", "limits.calls=2"];
    let by_hand = api.report(&harness, &by_hand).await;
    for field in ["agent", "limit", "call", "number", "at"] {
        assert_eq!(by_hand["stops"][0][field], report["stops"][0][field], "{field}");
    }
    assert_eq!(
        by_hand,
        api.report(&harness, &words).await,
        "once it has ended, all is the same"
    );
}

#[tokio::test]
async fn a_copy_that_fails_is_made_again_and_what_is_no_whole_copy_is_refused() {
    let mut harness = LocalHarness::new();
    let end =
        json!([{"text": "one", "usage": {"inputTokens": 90, "outputTokens": 10}}, {"yield": {"mode": "shutdown"}}]);
    harness.write("all.yaml", &scripted("a", &end));
    let mut run = harness.run(&[]);
    assert_eq!(run.cause().await, "NothingRuns");
    let whole = copy(&journal_dir(&harness)).await;
    let busy = Exec::Fails("agentloop: the worker cleaned up the journal during the copy");
    let api = Api::start().await;

    api.answer([
        busy.clone(),
        Exec::Cut(whole[..5_000].to_vec()),
        Exec::Copy(whole.clone()),
    ]);
    let report = api.report(&harness, &["a", "--set", "limits.calls=1"]).await;
    assert_eq!(report["made"]["calls"], 2);
    // The fourth attempt is the last one.
    api.answer([busy.clone(), busy.clone(), busy.clone(), Exec::Copy(whole.clone())]);
    api.report(&harness, &["a", "--set", "limits.calls=1"]).await;
    api.answer([
        busy.clone(),
        busy.clone(),
        busy.clone(),
        busy,
        Exec::Copy(whole.clone()),
    ]);
    assert_eq!(
        api.refusal(&harness).await,
        "error: cannot copy the journal in pod a of namespace default: agentloop: the worker cleaned up the journal during the \
         copy\n"
    );

    for (answer, says) in [
        (
            Exec::Cut(whole[..5_000].to_vec()),
            "namespace default: the connection was lost",
        ),
        (Exec::Copy(Vec::new()), "the copy is empty"),
        (
            Exec::Copy(whole[..whole.len() - 4_096].to_vec()),
            "cannot read journal.sqlite of Agent a",
        ),
        (
            Exec::Copy(b"OCI runtime exec failed".repeat(99)),
            "cannot read journal.sqlite of Agent a",
        ),
        (
            Exec::Refused("403 Forbidden"),
            "needs the verbs get and create on pods/exec",
        ),
        (
            Exec::Refused("404 Not Found"),
            "Agent a has no pod in namespace default now",
        ),
        (Exec::Refused("400 Bad Request"), "accepts no command now (status 400)"),
    ] {
        api.answer([answer.clone()]);
        let said = api.refusal(&harness).await;
        assert!(said.contains(says), "{answer:?}: {said}");
    }
    let missing = api.simulate(&harness, &["b", "--set", "limits.calls=1"]).await;
    assert_eq!(missing.status.code(), Some(1), "{}", text(&missing.stderr));
}
