//! Debian's Chromium without a window, driven by its `DevTools` protocol.
#![allow(dead_code)]

use std::process::Stdio;
use std::time::Duration;

use futures::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{WebSocketStream, client_async};

pub const CHROMIUM: &str = "chromium-headless-shell";
/// Longest wait for an answer of the browser.
const WAIT_TIMEOUT: Duration = Duration::from_secs(30);

/// A browser with one page.
pub struct Browser {
    socket: WebSocketStream<TcpStream>,
    /// Session of the page.
    session: Option<String>,
    /// Number of the last command.
    sent: u64,
    /// The URL that the page shows since [`Browser::leave`], and whether it was loaded.
    shown: (String, bool),
    process: Child,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// Starts a browser that shows nothing yet.
    pub async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// The same with more flags.
    pub async fn start_with(flags: &[&str]) -> Self {
        let profile = tempfile::tempdir().unwrap();
        let mut process = Command::new(CHROMIUM)
            // The tests may run as root, in a container.
            .args([
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--remote-debugging-port=0",
            ])
            .args(flags)
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let url = debugger(&mut process).await;
        let address = url.strip_prefix("ws://").and_then(|url| url.split('/').next()).unwrap();
        let connection = TcpStream::connect(address).await.unwrap();
        let (socket, _) = client_async(&url, connection).await.unwrap();
        let mut browser = Self {
            socket,
            session: None,
            sent: 0,
            shown: Default::default(),
            process,
            _profile: profile,
        };
        let target = browser
            .command("Target.createTarget", json!({ "url": "about:blank" }))
            .await;
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let attached = browser.command("Target.attachToTarget", attach).await;
        browser.session = attached["sessionId"].as_str().map(Into::into);
        browser.command("Page.enable", json!({})).await;
        browser
    }

    /// Runs a script before those of each page.
    pub async fn before_pages(&mut self, script: &str) {
        let source = json!({ "source": script });
        self.command("Page.addScriptToEvaluateOnNewDocument", source).await;
    }

    pub async fn open(&mut self, url: &str) {
        let opened = self.command("Page.navigate", json!({ "url": url })).await;
        assert!(opened["errorText"].is_null(), "{opened}");
        // A page that has loaded would not report that again.
        self.value(
            "new Promise(done => document.readyState === 'complete' && location.href !== 'about:blank'
                ? done(1) : addEventListener('load', () => done(1)))",
        )
        .await;
    }

    /// Runs a script that leads to another page, and waits until that is loaded.
    pub async fn leave(&mut self, script: &str, url: &str) {
        self.shown = Default::default();
        self.value(&format!("setTimeout(() => {{ {script} }}); 1")).await;
        let loaded = async {
            while !(self.shown.0 == url && self.shown.1) {
                self.next().await;
            }
        };
        let loaded = timeout(WAIT_TIMEOUT, loaded).await;
        assert!(loaded.is_ok(), "{url} was not loaded");
    }

    /// The value of an expression in the page, once its promise is kept.
    pub async fn value(&mut self, expression: &str) -> Value {
        let ask = json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let answer = self.command("Runtime.evaluate", ask).await;
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {answer}");
        answer["result"]["value"].clone()
    }

    /// Waits for changes of the document until an expression is true.
    pub async fn until(&mut self, expression: &str) {
        self.value(&format!(
            "new Promise(done => {{
                const look = () => {{ if ({expression}) {{ observer.disconnect(); done(1); }} }};
                const observer = new MutationObserver(look);
                observer.observe(document, {{ childList: true, subtree: true, characterData: true }});
                look();
            }})"
        ))
        .await;
    }

    /// The next message of the browser.
    async fn next(&mut self) -> Value {
        let message = self.socket.next().await.unwrap().unwrap();
        let message: Value = serde_json::from_str(message.to_text().unwrap()).unwrap();
        match message["method"].as_str() {
            Some("Page.frameNavigated") => {
                let url = message["params"]["frame"]["url"].as_str().unwrap_or_default();
                self.shown = (url.to_owned(), false);
            }
            Some("Page.loadEventFired") => self.shown.1 = true,
            _ => {}
        }
        message
    }

    async fn command(&mut self, method: &str, params: Value) -> Value {
        self.sent += 1;
        let mut command = json!({ "id": self.sent, "method": method, "params": params });
        if let Some(session) = &self.session {
            command["sessionId"] = json!(session);
        }
        self.socket.send(Message::text(command.to_string())).await.unwrap();
        let answered = async {
            loop {
                let message = self.next().await;
                if message["id"] == self.sent {
                    assert!(message["error"].is_null(), "{command}: {message}");
                    return message["result"].clone();
                }
            }
        };
        let answered = timeout(WAIT_TIMEOUT, answered).await;
        answered.unwrap_or_else(|_| panic!("no answer to {command}"))
    }
}

/// The program is a script that starts the browser: ending the script alone would leave it.
impl Drop for Browser {
    fn drop(&mut self) {
        if let Some(id) = self.process.id() {
            let group = format!("-{id}");
            let _ = std::process::Command::new("kill")
                .args(["-KILL", "--", &group])
                .status();
        }
    }
}

/// The address of the protocol, which the browser prints when it is ready.
async fn debugger(process: &mut Child) -> String {
    let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
    let found = async {
        while let Some(line) = lines.next_line().await.unwrap() {
            if let Some(url) = line.strip_prefix("DevTools listening on ") {
                return url.to_owned();
            }
        }
        panic!("the browser ended at once");
    };
    let url = timeout(WAIT_TIMEOUT, found).await.unwrap();
    // What it prints later is read, so that it never waits for a reader.
    tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
    url
}
