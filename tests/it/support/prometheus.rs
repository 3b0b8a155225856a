//! A Prometheus of one test, on loopback.
#![allow(dead_code)]

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::http;
use super::ports::free_port;

/// The time between two looks at Prometheus: it scrapes once a second, and tells nobody when.
const LOOK: Duration = Duration::from_millis(200);

/// Debian's Prometheus, which scrapes and evaluates rules once a second; ends with its value.
pub struct Prometheus {
    child: Child,
    address: String,
    _data: tempfile::TempDir,
}

impl Prometheus {
    /// Starts with these scrapes, and the rules of this file.
    pub fn start(scrapes: &Value, rules: Option<&Value>) -> Self {
        let data = tempfile::tempdir().expect("a temporary directory");
        let mut config = json!({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "scrape_configs": scrapes,
        });
        let write = |name: &str, text: String| {
            let file = data.path().join(name);
            std::fs::write(&file, text).expect("a file of Prometheus can be written");
            file
        };
        if let Some(rules) = rules {
            config["rule_files"] = json!([write("rules.yml", rules.to_string())]);
        }
        let file = write("prometheus.yml", config.to_string());
        let address = format!("127.0.0.1:{}", free_port());
        let child = Command::new("prometheus")
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", data.path().join("tsdb").display()))
            .arg(format!("--web.listen-address={address}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("prometheus is installed");
        Self {
            child,
            address,
            _data: data,
        }
    }

    /// The value of a query that gives one sample, once there is one.
    pub fn until_value(&self, query: &str) -> String {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let answer = self.query(query);
            let results = answer["data"]["result"].as_array().cloned().unwrap_or_default();
            if let [only] = results.as_slice() {
                return only["value"][1].as_str().expect("a sample has a value").to_owned();
            }
            assert!(Instant::now() < deadline, "{query} gave {answer}");
            std::thread::park_timeout(LOOK);
        }
    }

    /// Whether one of the queries gives any samples.
    pub fn has_any(&self, queries: &[String]) -> bool {
        queries.iter().any(|query| {
            let answer = self.query(query);
            answer["data"]["result"]
                .as_array()
                .is_some_and(|samples| !samples.is_empty())
        })
    }

    /// Waits until a query gives any samples.
    pub fn until_some(&self, what: &str, query: &str) {
        let deadline = Instant::now() + Duration::from_secs(90);
        while !self.has_any(&[query.to_owned()]) {
            assert!(Instant::now() < deadline, "{what} shows nothing: {query}");
            std::thread::park_timeout(LOOK);
        }
    }

    /// What Prometheus says to a query; null while it does not listen.
    pub fn query(&self, query: &str) -> Value {
        let form = format!("query={}", percent(query));
        self.ask("POST", "/api/v1/query", &form)
    }

    /// What Prometheus says to a GET of its API; null while it does not listen.
    pub fn get(&self, path: &str) -> Value {
        self.ask("GET", path, "")
    }

    fn ask(&self, method: &str, path: &str, form: &str) -> Value {
        let listens = std::net::TcpStream::connect(&self.address).is_ok();
        let answer =
            listens.then(|| http::request(&self.address, method, path, "application/x-www-form-urlencoded", form));
        answer
            .and_then(|(_, body)| serde_json::from_str(&body).ok())
            .unwrap_or_default()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn percent(text: &str) -> String {
    text.bytes()
        .fold(String::new(), |all, byte| all + &format!("%{byte:02X}"))
}
