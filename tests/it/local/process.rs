//! One directory with manifests and state, and the runs in it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::process::{Child, Command};

/// Longest wait for anything in these tests: a run of forty Agents took 55 s beside six busy processes on a fast machine.
pub const WAIT_TIMEOUT: Duration = Duration::from_mins(5);
/// Stands in every instruction, answer and secret; may stand in no output.
pub const CANARY: &str = "canary-3c9a";

/// A directory.
pub struct LocalHarness {
    pub dir: tempfile::TempDir,
    runs: u32,
}

impl LocalHarness {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("tmp")).unwrap();
        Self { dir, runs: 0 }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes manifests as one file of several documents.
    pub fn write(&self, name: &str, documents: &[Value]) {
        let text: Vec<String> = documents
            .iter()
            .map(|document| serde_yaml::to_string(document).unwrap())
            .collect();
        std::fs::write(self.path(name), text.join("---\n")).unwrap();
    }

    /// Starts a run of `all.yaml` with these further flags.
    pub fn run(&mut self, flags: &[&str]) -> Run {
        let file = self.path("all.yaml");
        self.recorded(&[&["-f", file.to_str().unwrap()], flags].concat(), &[], Stdio::null())
    }

    /// Starts a run of `all.yaml` whose standard output is not read.
    pub fn unread(&mut self) -> Run {
        let file = self.path("all.yaml");
        let mut run = self.launch(&["-f", file.to_str().unwrap()], &[], Stdio::null(), Stdio::piped());
        drop(run.child.stdout.take());
        run
    }

    /// Starts a run that reads its manifests from standard input.
    pub fn run_from_input(&mut self, flags: &[&str], input: &str) -> Run {
        let input = File::open(self.path(input)).unwrap();
        let flags = [&["-f", "-"], flags].concat();
        self.recorded(&flags, &[], input.into())
    }

    /// Starts a run of `all.yaml` with these flags and variables.
    pub fn run_with(&mut self, flags: &[&str], variables: &[(&str, &str)]) -> Run {
        let file = self.path("all.yaml");
        self.recorded(
            &[&["-f", file.to_str().unwrap()], flags].concat(),
            variables,
            Stdio::null(),
        )
    }

    fn recorded(&mut self, flags: &[&str], variables: &[(&str, &str)], input: Stdio) -> Run {
        let out = self.path(&format!("out-{}", self.runs + 1));
        self.launch(flags, variables, input, File::create(out).unwrap().into())
    }

    fn launch(&mut self, flags: &[&str], variables: &[(&str, &str)], input: Stdio, output: Stdio) -> Run {
        self.runs += 1;
        let (out, err) = (
            self.path(&format!("out-{}", self.runs)),
            self.path(&format!("err-{}", self.runs)),
        );
        let child = Command::new(env!("CARGO_BIN_EXE_agentloop"))
            .arg("run")
            .args(flags)
            .args(["--state".as_ref(), self.state().as_os_str()])
            .env("TMPDIR", self.path("tmp"))
            .env_remove("XDG_RUNTIME_DIR")
            .env_remove("RUST_LOG")
            .envs(variables.iter().copied())
            .stdin(input)
            .stdout(output)
            .stderr(File::create(&err).unwrap())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        Run { child, out, err }
    }

    pub fn state(&self) -> PathBuf {
        self.path("state")
    }

    /// What runs left in the directory for private things.
    pub fn left_over(&self) -> usize {
        std::fs::read_dir(self.path("tmp")).unwrap().count()
    }

    /// Kinds, turns and calls of the closed journal of an Agent.
    pub fn journal(&self, agent: &str) -> Vec<(String, i64, Option<String>)> {
        let file = self
            .state()
            .join(format!("volumes/default/{agent}-state/worker/journal.sqlite"));
        records(&file)
    }
}

/// Kinds, turns and calls of a closed journal.
pub fn records(file: &Path) -> Vec<(String, i64, Option<String>)> {
    let connection = rusqlite::Connection::open(file).unwrap();
    let mut select = connection
        .prepare("SELECT kind, turn, call FROM journal ORDER BY seq")
        .unwrap();
    let rows = select
        .query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
        .unwrap();
    rows.map(Result::unwrap).collect()
}

/// A running or ended run.
pub struct Run {
    child: Child,
    out: PathBuf,
    err: PathBuf,
}

impl Run {
    pub fn out(&self) -> String {
        std::fs::read_to_string(&self.out).unwrap()
    }

    pub fn err(&self) -> String {
        std::fs::read_to_string(&self.err).unwrap()
    }

    pub fn pid(&self) -> u32 {
        self.child.id().unwrap()
    }

    /// All whole lines so far.
    pub fn lines(&self) -> Vec<Value> {
        let text = self.out();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole
            .lines()
            .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
            .collect()
    }

    /// All lines about an Agent so far.
    fn about(&self, name: &str) -> impl DoubleEndedIterator<Item = Value> {
        let lines = self.lines().into_iter();
        lines.filter(move |line| line["type"] == "agent" && line["agent"] == name)
    }

    /// The last line about an Agent.
    pub fn agent(&self, name: &str) -> Value {
        self.about(name).next_back().unwrap_or(Value::Null)
    }

    /// Waits until the last line about an Agent is as it should be.
    pub async fn until(&mut self, name: &str, what: &str, is: impl Fn(&Value) -> bool) -> Value {
        let last = |run: &Self| {
            let line = run.agent(name);
            is(&line).then_some(line)
        };
        self.found(name, what, last).await
    }

    /// Waits until a line about an Agent is as it should be, also if others came after it. Returns the last such line.
    pub async fn until_once(&mut self, name: &str, what: &str, is: impl Fn(&Value) -> bool) -> Value {
        let any = |run: &Self| run.about(name).rfind(&is);
        self.found(name, what, any).await
    }

    async fn found(&mut self, name: &str, what: &str, find: impl Fn(&Self) -> Option<Value>) -> Value {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            // Before the lines are read: the last ones of a run come right before its end.
            let ended = self.child.try_wait().unwrap().is_some();
            if let Some(line) = find(self) {
                return line;
            }
            assert!(
                Instant::now() < deadline && !ended,
                "{name} is never {what}:\n{}\n{}",
                self.out(),
                self.err()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// SIGINT, as Ctrl-C sends it.
    pub async fn interrupt(&self) {
        let sent = Command::new("kill")
            .args(["-INT", &self.pid().to_string()])
            .status()
            .await
            .unwrap();
        assert!(sent.success());
    }

    /// Ends the run by SIGINT, unless it has ended itself.
    pub async fn end(&mut self) {
        if self.child.try_wait().unwrap().is_none() {
            self.interrupt().await;
        }
        self.ended().await;
    }

    /// SIGKILL.
    pub async fn kill(&mut self) {
        self.child.kill().await.unwrap();
    }

    pub async fn ended(&mut self) -> ExitStatus {
        let ended = tokio::time::timeout(WAIT_TIMEOUT, self.child.wait()).await;
        assert!(ended.is_ok(), "the run did not end:\n{}\n{}", self.out(), self.err());
        ended.unwrap().unwrap()
    }

    /// Waits for the end and says why it was.
    pub async fn cause(&mut self) -> String {
        let status = self.ended().await;
        assert!(status.success(), "{status}:\n{}\n{}", self.out(), self.err());
        let last = self.lines().pop().unwrap();
        assert_eq!(last["type"], "end", "{last}");
        last["cause"].as_str().unwrap().into()
    }
}

/// A ConfigMap with a script.
pub fn script(name: &str, turns: &Value) -> Value {
    let text = serde_yaml::to_string(&json!({ "turns": turns })).unwrap();
    json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name }, "data": { "turns": text } })
}

/// An Agent with the script of its name; `spec` is laid over.
pub fn agent(name: &str, spec: &Value) -> Value {
    let mut whole = json!({
        "instructions": format!("Be {CANARY}."),
        "model": {
            "api": "Scripted", "name": "scripted", "maxOutputTokens": 200,
            "scripted": { "configMapKeyRef": { "name": name, "key": "turns" } },
        },
        "loop": { "minDelayMilliseconds": 1, "maxDelayMilliseconds": 10 },
        "storage": { "size": "64Mi" },
    });
    for (field, value) in spec.as_object().unwrap() {
        whole[field] = value.clone();
    }
    // Scripts of tests say the same again and again.
    whole["guardrails"]["loopDetection"] = json!({ "mode": "Disabled" });
    json!({
        "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
        "metadata": { "name": name, "labels": { "of": "test" } }, "spec": whole,
    })
}

/// Script and Agent.
pub fn scripted(name: &str, turns: &Value) -> [Value; 2] {
    [script(name, turns), agent(name, &json!({}))]
}

/// Turns that are alike but for what they say: a loop that says the same again and again is detected.
pub fn various(turn: &Value) -> Value {
    let letters = || (b'a'..=b'e').map(char::from);
    let words = letters().flat_map(|one| letters().map(move |two| format!("{one}{two}{one}")));
    words
        .map(|word| {
            let mut turn = turn.clone();
            turn["text"] = json!(word);
            turn
        })
        .collect()
}
