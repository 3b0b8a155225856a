//! The model servers of the tests: a real model behind a recording proxy, and a server that fails on purpose.
//!
//! They are the programs of `hack/model-server`; they end with this process. What the servers' own records say is the
//! judge of every count.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant, UNIX_EPOCH};

use serde::Deserialize;
use serde_json::Value;

use crate::support::clusters::has;
use crate::support::http;

/// A running server and its record.
pub struct ModelServer {
    url: String,
    record: PathBuf,
    _programs: Vec<Program>,
}

/// A program that ends when its standard input closes, which is when this process ends.
struct Program {
    _child: Child,
    _stdin: Option<ChildStdin>,
    url: String,
}

/// One line of a record.
#[derive(Deserialize, Clone, Debug)]
pub struct Line {
    pub event: String,
    pub id: u64,
    pub label: String,
    pub key: Option<String>,
    pub status: Option<u16>,
    pub usage: Option<Value>,
    #[serde(default)]
    pub complete: bool,
    /// Seconds since 1970.
    pub at: f64,
    /// A short hash of each message of the request (faulty server only).
    #[serde(default)]
    pub messages: Vec<String>,
    /// Lengths of the parts of the request, and whether each is a message (counting server only).
    #[serde(default)]
    pub parts: Vec<(i64, bool)>,
    /// Output limit of the request (counting server only).
    #[serde(default)]
    pub limit: i64,
}

/// Sums of what a server says its answers used, in agentloop's disjoint kinds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    pub calls: i64,
    pub unknown_calls: i64,
    pub input: i64,
    pub output: i64,
    pub cache_read: i64,
    pub cache_write: i64,
}

impl Line {
    /// What the server says this answer used.
    pub fn used(&self) -> Used {
        let count = |path: &str| {
            self.usage
                .as_ref()
                .and_then(|usage| usage.pointer(path))
                .and_then(Value::as_i64)
        };
        let cached = count("/prompt_tokens_details/cached_tokens").unwrap_or(0);
        // Anthropic messages say input beside what was cached, chat completions say all of it.
        let fresh = count("/input_tokens").unwrap_or_else(|| count("/prompt_tokens").unwrap_or(0) - cached);
        Used {
            calls: 1,
            // A refusal costs nothing; an answer that was cut, or that says nothing of its cost, is unknown.
            unknown_calls: i64::from(self.usage.is_none() && self.status.is_none_or(|status| status == 200)),
            input: fresh,
            output: count("/output_tokens").or(count("/completion_tokens")).unwrap_or(0),
            cache_read: count("/cache_read_input_tokens").unwrap_or(cached),
            cache_write: count("/cache_creation_input_tokens").unwrap_or(0),
        }
    }
}

impl std::iter::Sum for Used {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| Self {
            calls: sum.calls + one.calls,
            unknown_calls: sum.unknown_calls + one.unknown_calls,
            input: sum.input + one.input,
            output: sum.output + one.output,
            cache_read: sum.cache_read + one.cache_read,
            cache_write: sum.cache_write + one.cache_write,
        })
    }
}

/// The real model behind the recording proxy; `None`, said loudly, only where Python is absent.
pub fn real() -> Option<&'static ModelServer> {
    static REAL: OnceLock<Option<ModelServer>> = OnceLock::new();
    REAL.get_or_init(|| recorded("real", &[])).as_ref()
}

/// The same for clients of this machine alone: no cluster is needed.
pub fn local() -> Option<&'static ModelServer> {
    static LOCAL: OnceLock<Option<ModelServer>> = OnceLock::new();
    LOCAL
        .get_or_init(|| recorded("local", &["--host", "127.0.0.1"]))
        .as_ref()
}

fn recorded(name: &str, host: &[&str]) -> Option<ModelServer> {
    let model = Program::start("serve.py", &["--host", "127.0.0.1"])?;
    let record = record_file(name);
    let file = record.to_string_lossy();
    let proxy = [&["--upstream", &model.url, "--record", &file][..], host].concat();
    let proxy = Program::start("record.py", &proxy)?;
    Some(ModelServer {
        url: proxy.url.clone(),
        record,
        _programs: vec![proxy, model],
    })
}

/// The server that fails on purpose; `None`, said loudly, only where Python is absent.
pub fn faulty() -> Option<&'static ModelServer> {
    static FAULTY: OnceLock<Option<ModelServer>> = OnceLock::new();
    FAULTY
        .get_or_init(|| {
            let record = record_file("faulty");
            let program = Program::start("faults.py", &["--record", &record.to_string_lossy()])?;
            Some(ModelServer {
                url: program.url.clone(),
                record,
                _programs: vec![program],
            })
        })
        .as_ref()
}

/// The fast server that only counts; `None`, said loudly, only where Python is absent.
pub fn counting() -> Option<&'static ModelServer> {
    static COUNTING: OnceLock<Option<ModelServer>> = OnceLock::new();
    COUNTING
        .get_or_init(|| {
            let record = record_file("counting");
            let program = Program::start("count.py", &["--record", &record.to_string_lossy()])?;
            Some(ModelServer {
                url: program.url.clone(),
                record,
                _programs: vec![program],
            })
        })
        .as_ref()
}

fn record_file(name: &str) -> PathBuf {
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}.jsonl", std::process::id()));
    std::fs::write(&file, "").expect("the record can be written");
    file
}

/// The interpreter that has the model's packages, or `None` where Python is absent.
fn python() -> Option<&'static str> {
    static PYTHON: OnceLock<Option<String>> = OnceLock::new();
    PYTHON
        .get_or_init(|| {
            if let Ok(python) = std::env::var("AGENTLOOP_PYTHON") {
                return Some(python);
            }
            if !has("python3") {
                return None;
            }
            let script = concat!(env!("CARGO_MANIFEST_DIR"), "/hack/python-env.sh");
            let output = Command::new(script)
                .stderr(Stdio::inherit())
                .output()
                .expect("hack/python-env.sh starts");
            assert!(output.status.success(), "hack/python-env.sh failed");
            let text = String::from_utf8_lossy(&output.stdout);
            Some(text.lines().last().expect("it prints an interpreter").trim().to_owned())
        })
        .as_deref()
}

impl Program {
    fn start(name: &str, args: &[&str]) -> Option<Self> {
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/hack/model-server");
        let log = std::fs::File::create(record_file(name).with_extension("log")).expect("the log can be written");
        let mut child = Command::new(python()?)
            .arg("-B")
            .arg(format!("{directory}/{name}"))
            .arg("--stop-with-stdin")
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .expect("python starts");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("stdout is piped");
        BufReader::new(stdout).read_line(&mut line).expect("the program speaks");
        let url = line
            .strip_prefix("listening ")
            .unwrap_or_else(|| panic!("{name} did not start: {line}"));
        Some(Self {
            url: url.trim().to_owned(),
            _stdin: child.stdin.take(),
            _child: child,
        })
    }
}

impl ModelServer {
    /// The base address for a client whose calls are to be found under `label`.
    pub fn base_url(&self, label: &str) -> String {
        format!("{}/v1", self.anthropic_url(label))
    }

    /// The same for Anthropic messages, whose clients add `/v1` automatically.
    pub fn anthropic_url(&self, label: &str) -> String {
        format!("{}/{label}", self.url)
    }

    /// All lines of a label, oldest first.
    pub fn lines(&self, label: &str) -> Vec<Line> {
        let text = std::fs::read_to_string(&self.record).expect("the record can be read");
        // The last line may be half written.
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        // Most lines are of other labels, and not worth parsing.
        let mentions = whole.lines().filter(|line| line.contains(label));
        let lines = mentions.map(|line| serde_json::from_str::<Line>(line).expect("a whole line"));
        lines.filter(|line| line.label == label).collect()
    }

    /// The ends of all calls of a label.
    pub fn ends(&self, label: &str) -> Vec<Line> {
        self.lines(label)
            .into_iter()
            .filter(|line| line.event == "end")
            .collect()
    }

    /// What the server says the calls of a label used.
    pub fn used(&self, label: &str) -> Used {
        self.ends(label).iter().map(Line::used).sum()
    }

    /// The same if `unknown` calls are known only to the server, since they were cut after a moment: the server may have
    /// answered into a connection whose other end was gone.
    pub fn used_but_for_cut(&self, label: &str, since: f64, unknown: i64) -> Used {
        let mut unnoticed = unknown - self.used(label).unknown_calls;
        let used = |line: &Line| {
            let used = line.used();
            if unnoticed <= 0 || line.at < since || used.unknown_calls > 0 {
                return used;
            }
            unnoticed -= 1;
            Used {
                calls: 1,
                unknown_calls: 1,
                ..Used::default()
            }
        };
        self.ends(label).iter().map(used).sum()
    }

    /// Waits until the lines of a label show what is looked for.
    pub fn until<T>(&self, what: &str, label: &str, seconds: u64, mut seen: impl FnMut(&[Line]) -> Option<T>) -> T {
        let deadline = Instant::now() + Duration::from_secs(seconds);
        loop {
            let lines = self.lines(label);
            if let Some(found) = seen(&lines) {
                return found;
            }
            assert!(
                Instant::now() < deadline,
                "{what}: not within {seconds} s; the last lines: {:#?}",
                tail(&lines)
            );
            // The record is a file written by another program: looking again is the only event there is.
            std::thread::park_timeout(Duration::from_millis(10));
        }
    }

    /// Waits until a call of the label is under way: begun, not ended.
    pub fn until_in_call(&self, label: &str, seconds: u64) -> Line {
        self.until("a call in flight", label, seconds, |lines| {
            let begun = lines.iter().rev().find(|line| line.event == "begin")?;
            let ended = lines.iter().any(|line| line.event == "end" && line.id == begun.id);
            (!ended).then(|| begun.clone())
        })
    }

    /// Chooses how the faulty server answers a label from now on.
    pub fn choose(&self, label: &str, fault: &str) {
        let address = self.url.trim_start_matches("http://");
        let (status, _) = http::request(address, "PUT", &format!("/_control/{label}"), "text/plain", fault);
        assert_eq!(status, 204, "the faulty server takes orders");
    }
}

/// The time as the records write it: seconds since 1970.
pub fn now() -> f64 {
    UNIX_EPOCH.elapsed().expect("after 1970").as_secs_f64()
}

fn tail(lines: &[Line]) -> &[Line] {
    &lines[lines.len().saturating_sub(6)..]
}
