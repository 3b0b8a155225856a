//! A Prometheus of one test, on loopback.
#![allow(dead_code)]

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::http;
use super::ports::free_port;

/// The time between two looks at Prometheus: it scrapes once a second, without announcing it.
const LOOK: Duration = Duration::from_millis(200);

/// Debian's Prometheus, which scrapes and evaluates rules once a second; ends with its value.
pub struct Prometheus {
    child: Child,
    address: String,
    data: tempfile::TempDir,
    config: Value,
}

impl Prometheus {
    /// Starts with these scrapes and no rules.
    pub fn start(scrapes: &Value) -> Self {
        let data = tempfile::tempdir().expect("a temporary directory");
        let config = json!({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "scrape_configs": scrapes,
        });
        let file = write(&data, "prometheus.yml", &config);
        let address = format!("127.0.0.1:{}", free_port());
        let child = Command::new("prometheus")
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", data.path().join("tsdb").display()))
            .arg(format!("--web.listen-address={address}"))
            .arg("--web.enable-lifecycle")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("prometheus is installed");
        Self {
            child,
            address,
            data,
            config,
        }
    }

    /// Evaluates these rules from now on, once a second. Prometheus learns of its targets five seconds after it starts, so
    /// that rules evaluated from the start may find a target absent for that long.
    pub fn load_rules(&mut self, rules: &Value) {
        self.config["rule_files"] = json!([write(&self.data, "rules.yml", rules)]);
        write(&self.data, "prometheus.yml", &self.config);
        let (status, message) = http::request(&self.address, "POST", "/-/reload", "text/plain", "");
        assert_eq!(status, 200, "{message}");
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

    /// Whether the query gives any samples.
    pub fn has_any(&self, query: &str) -> bool {
        let answer = self.query(query);
        let samples = answer["data"]["result"].as_array();
        samples.is_some_and(|samples| !samples.is_empty())
    }

    /// Whether the query has a number at one time, of each second since then.
    pub fn has_number_since(&self, query: &str, start: SystemTime) -> bool {
        let since = |time: SystemTime| time.duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
        let (start, end) = (since(start), since(SystemTime::now()));
        let form = format!("query={}&start={start}&end={end}&step=1", percent(query));
        let answer = self.ask("POST", "/api/v1/query_range", &form);
        let series = answer["data"]["result"].as_array().into_iter().flatten();
        let mut samples = series.flat_map(|series| series["values"].as_array().into_iter().flatten());
        samples.any(|sample| sample[1] != "NaN")
    }

    /// Whether the query has a number now.
    pub fn has_number(&self, query: &str) -> bool {
        let answer = self.query(query);
        let mut samples = answer["data"]["result"].as_array().into_iter().flatten();
        samples.any(|sample| sample["value"][1] != "NaN")
    }

    /// Waits until a query gives any samples.
    pub fn until_some(&self, what: &str, query: &str) {
        let deadline = Instant::now() + Duration::from_secs(90);
        while !self.has_any(query) {
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

/// Writes a file of Prometheus. JSON is YAML.
fn write(directory: &tempfile::TempDir, name: &str, content: &Value) -> PathBuf {
    let file = directory.path().join(name);
    std::fs::write(&file, content.to_string()).expect("a file of Prometheus can be written");
    file
}

fn percent(text: &str) -> String {
    text.bytes()
        .fold(String::new(), |all, byte| all + &format!("%{byte:02X}"))
}
