//! The commands of the pages that are not kubectl's or helm's, which `e2e::docs` runs on a cluster: those of the binary,
//! of `sqlite3` and of `jq` are run here, with the journal of a local run; of each other one it is said why it is not run.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;

use serde_json::{Value, json};

use super::commands::shell_blocks;
use super::page::{Page, current_pages};
use super::shell;
use crate::local::process::{agent, script};
use crate::schema::reader::repository;
use crate::support::clusters::has;

/// A line with one of these programs is run.
const RUN: [&str; 5] = ["agentloop", "target/debug/agentloop", "sqlite3", "jq", "ln"];
/// Programs whose lines another test plans, by their first words: `e2e::docs::plan`.
const ON_A_CLUSTER: [&str; 2] = ["kubectl", "helm"];
/// What a kubectl command contains that writes a file which other lines read. It is run here too, with the binary in
/// place of the pod.
const OF_THE_POD: &str = "/agentloop journal";
/// Files whose lines are records of a history.
const HISTORY: &str = ".jsonl";

/// Commands that are not run, by their first words, and why.
const NOT_RUN: [(&str, &str); 23] = [
    ("make try", "docs/tasks/local.md runs the same file, for a shorter time"),
    ("make check", "this test is a part of it"),
    ("make lint", "make check runs the checks, and CI all checkers"),
    ("make test", "this test is a part of it"),
    (
        "make upgrade-test",
        "two builds and a node; its test is e2e::upgrade, which the soak runs",
    ),
    (
        "make image",
        "a release build; make test makes the same image for its node",
    ),
    ("make demo", "a cluster; its steps are those of e2e::quickstart"),
    (
        "make dashboards-shot",
        "a cluster, a Prometheus and a browser for 12 minutes",
    ),
    ("skopeo copy", "needs a registry"),
    ("cargo build", "has built what runs here"),
    ("cargo install", "needs crates.io"),
    ("cargo mutants", "hours"),
    ("cargo test", "a test of a test; the names are checked"),
    ("export", "sets a variable for the commands below it"),
    (
        "curl --cacert",
        "the controller of a cluster; e2e::page, e2e::approvals and e2e::tasks send these requests",
    ),
    ("curl -N --cacert", "the same; e2e::events reads them"),
    ("curl -N …", "a part of a command"),
    (
        "curl -i http://127.0.0.1:8080/",
        "a port-forward; local::examples sends signed ones to a local run",
    ),
    ("date", "in the arguments of kubectl, where e2e::docs has a word"),
    ("base64 -d", "the same"),
    ("cut -d", "the same"),
    ("openssl", "the same, and beside the curl to a port-forward"),
    ("printf %s", "the same"),
];

/// What is done with the line of a page.
enum Plan {
    Run,
    /// Another test has it, or [`NOT_RUN`] says why nobody does.
    Leave,
}

#[derive(Default)]
struct Plans {
    /// The lines that are run, in their order, by page.
    pages: Vec<(String, Vec<(String, String)>)>,
    /// Entries of [`NOT_RUN`] that no command begins with.
    stale: Vec<&'static str>,
    unknown: Vec<String>,
}

impl Plans {
    fn new(pages: Vec<Page>) -> Self {
        let mut plans = Self {
            stale: NOT_RUN.map(|(start, _)| start).to_vec(),
            ..Self::default()
        };
        for page in pages {
            let mut run = Vec::new();
            for block in shell_blocks(&page) {
                for line in shell::lines(&block.text) {
                    if let Plan::Run = plans.plan(&block.place, &line) {
                        run.push((block.place.clone(), line));
                    }
                }
            }
            if !run.is_empty() {
                plans.pages.push((page.path, run));
            }
        }
        plans
    }

    fn plan(&mut self, place: &str, line: &str) -> Plan {
        let commands = shell::commands(line);
        if line.contains(OF_THE_POD) || commands.iter().any(|words| RUN.contains(&words[0].as_str())) {
            return Plan::Run;
        }
        for words in commands
            .iter()
            .filter(|words| !ON_A_CLUSTER.contains(&words[0].as_str()))
        {
            let text = words.join(" ");
            let found = NOT_RUN.iter().find(|(start, _)| text.starts_with(start));
            match found {
                Some((start, _)) => self.stale.retain(|other| other != start),
                // What it looks for is checked, not the log.
                None if words[0] == "grep" => {}
                None => self.unknown.push(format!("{place}: {text}")),
            }
        }
        Plan::Leave
    }
}

/// What the commands of the pages assume to be there.
struct Stage {
    dir: tempfile::TempDir,
}

impl Stage {
    /// A run with tool calls and a goal leaves the journal that the pages read.
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let stage = Self { dir };
        let programs = stage.path("bin");
        std::fs::create_dir_all(&programs).unwrap();
        symlink(env!("CARGO_BIN_EXE_agentloop"), programs.join("agentloop")).unwrap();
        // Only what a line reads of a cluster: a journal, a log and a list.
        let kubectl = format!(
            "#!/bin/sh\ncase \"$*\" in\n\
             *'{OF_THE_POD}') exec agentloop journal --journal-dir '{}' ;;\n\
             *logs*) cat '{log}' ;;\n*json*) cat '{list}' ;;\n*) exit 1 ;;\nesac\n",
            stage.path("state/volumes/default/watcher-state/worker").display(),
            log = stage.path("worker.log").display(),
            list = stage.path("agents.json").display(),
        );
        std::fs::write(programs.join("kubectl"), kubectl).unwrap();
        std::fs::set_permissions(programs.join("kubectl"), PermissionsExt::from_mode(0o755)).unwrap();
        let events = Page::read("docs/reference/events.md");
        let lines = events
            .blocks()
            .into_iter()
            .find(|block| block.language.as_deref() == Some("json"));
        std::fs::write(stage.path("worker.log"), lines.unwrap().text).unwrap();
        let stalled = json!({"items": [{
            "metadata": {"namespace": "team-a", "name": "watcher"},
            "status": {"conditions": [{"type": "Ready"}, {"type": "Stalled"}]},
        }]});
        std::fs::write(stage.path("agents.json"), stalled.to_string()).unwrap();

        let turns = json!([
            {"text": "I look.", "toolCalls": [{"name": "unknown"}]},
            {"text": "Done.", "toolCalls": [{"name": "finish", "arguments": {"result": "12 stars"}}]},
        ]);
        let goal = json!({"description": "d", "acceptanceCriteria": [{"name": "number", "regex": "[0-9]+"}]});
        let spec = json!({"mode": "Goal", "goal": goal});
        let objects = [script("watcher", &turns), agent("watcher", &spec)];
        let text = objects
            .map(|object| serde_json::to_string(&object).unwrap())
            .join("\n---\n");
        std::fs::write(stage.path("goal.yaml"), text).unwrap();
        let ended = stage.shell(
            stage.dir.path(),
            "agentloop run -f goal.yaml --duration 30 --state state",
        );
        assert!(ended.status.success(), "{}", said(&ended));
        stage
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A directory with what the commands of a page name.
    fn folder(&self, page: &str, lines: &[(String, String)]) -> PathBuf {
        let has = |flag: &str| lines.iter().any(|(_, line)| line.contains(flag));
        let folder = self.path(&page.replace('/', "-"));
        std::fs::create_dir(&folder).unwrap();
        symlink(repository("examples"), folder.join("examples")).unwrap();
        std::fs::create_dir_all(folder.join(".local/bin")).unwrap();
        for path in ["agentloop", "target/debug/agentloop", "target/image/rootfs/agentloop"] {
            std::fs::create_dir_all(folder.join(path).parent().unwrap()).unwrap();
            symlink(env!("CARGO_BIN_EXE_agentloop"), folder.join(path)).unwrap();
        }
        // Models that nobody reaches.
        for (name, secret, key) in [("agent", "openai", "api-key"), ("watcher", "model-key", "key")] {
            let model = json!({
                "api": "OpenAIChat", "name": "m", "baseURL": "http://127.0.0.1:9/v1", "contextTokens": 100_000,
                "apiKeySecretRef": {"name": secret, "key": key},
            });
            let mut text = agent(name, &json!({"model": model})).to_string();
            if !has("--secret-from-env") {
                let object = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": secret}, "stringData": {key: "key"}});
                let _ = write!(text, "\n---\n{object}\n");
            }
            std::fs::write(folder.join(format!("{name}.yaml")), text).unwrap();
        }
        // A page that starts a run has its own state.
        if !has("agentloop run") {
            symlink(self.path("state"), folder.join(".agentloop")).unwrap();
        }
        folder
    }

    /// Runs a line as a user's shell does, with an end.
    fn shell(&self, folder: &Path, line: &str) -> Output {
        let path = std::env::var("PATH").unwrap();
        let path = format!("{}:{path}", self.path("bin").display());
        Command::new("timeout")
            .args(["60", "bash", "-c", &format!("set -eo pipefail\n{line}")])
            .current_dir(folder)
            .envs([
                ("MODEL_KEY", "key"),
                ("OPENAI_API_KEY", "key"),
                ("AGENTLOOP_DURATION_SECONDS", "2"),
            ])
            .env("HOME", folder)
            .env("PATH", path)
            .env_remove("XDG_RUNTIME_DIR")
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }

    /// What is wrong with a line; `None`: nothing.
    fn mistake(&self, folder: &Path, line: &str) -> Option<String> {
        let mut run = line.replace("--duration 30", "--duration 2");
        if let Some(link) = line.strip_prefix("ln ").and_then(|rest| rest.split_whitespace().last()) {
            let _ = write!(run, "\n{link} --version");
        }
        let ended = self.shell(folder, &run);
        if !ended.status.success() {
            return Some(said(&ended));
        }
        let queries = shell::commands(line).into_iter().filter(|words| words[0] == "jq");
        queries.into_iter().find_map(|words| {
            let (program, file) = (&words[words.len() - 2], words.last().unwrap());
            if file.ends_with(HISTORY) {
                return unknown_names(program, &folder.join(file));
            }
            ended.stdout.is_empty().then(|| "jq finds nothing".into())
        })
    }
}

fn said(ended: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    format!("{}: {}{}", ended.status, text(&ended.stdout), text(&ended.stderr))
}

/// Names in a program of jq that no record of the history has: it reads them as null.
fn unknown_names(program: &str, file: &Path) -> Option<String> {
    let text = std::fs::read_to_string(file).unwrap();
    let records = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let known: BTreeSet<String> = records
        .flat_map(|record| record.as_object().unwrap().keys().cloned().collect::<Vec<_>>())
        .collect();
    assert!(known.contains("decision"), "the history has no decision: {known:?}");
    let code: String = program.split('"').step_by(2).collect::<Vec<_>>().join(" ");
    let names = code.split(|letter: char| !(letter.is_alphanumeric() || letter == '_'));
    let words = ["", "select", "and", "or", "not", "null"];
    let unknown: Vec<_> = names
        .filter(|name| !words.contains(name) && !known.contains(*name))
        .collect();
    (!unknown.is_empty()).then(|| format!("no record has {unknown:?}"))
}

#[test]
fn every_command_that_needs_no_cluster_is_run_or_has_a_reason_why_not() {
    let plans = Plans::new(current_pages());
    let count: usize = plans.pages.iter().map(|(_, lines)| lines.len()).sum();
    assert!(plans.unknown.is_empty(), "{}", plans.unknown.join("\n"));
    assert!(plans.stale.is_empty(), "no page has these any more: {:?}", plans.stale);
    assert!(count > 20, "only {count} lines were found");
}

#[test]
fn commands_of_the_pages_that_need_no_cluster_work() {
    if !has("sqlite3") || !has("jq") {
        return;
    }
    let (plans, stage) = (Plans::new(current_pages()), Stage::new());
    let mistakes: Vec<String> = thread::scope(|scope| {
        let pages: Vec<_> = plans
            .pages
            .iter()
            .map(|(page, lines)| {
                let stage = &stage;
                scope.spawn(move || {
                    let folder = stage.folder(page, lines);
                    let found = lines.iter().filter_map(|(place, line)| {
                        let found = stage.mistake(&folder, line)?;
                        Some(format!("{place}: {line}: {found}"))
                    });
                    found.collect::<Vec<_>>()
                })
            })
            .collect();
        pages.into_iter().flat_map(|page| page.join().unwrap()).collect()
    });
    assert!(mistakes.is_empty(), "{}", mistakes.join("\n"));
}

/// All of the sources, in small letters.
fn sources(folder: &Path) -> String {
    let mut text = String::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            text.push_str(&sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text.push_str(&std::fs::read_to_string(&path).unwrap().to_lowercase());
        }
    }
    text
}

#[test]
fn log_patterns_of_the_pages_occur_in_the_sources() {
    let sources = sources(&repository("src"));
    let mut count = 0;
    for page in current_pages() {
        for block in shell_blocks(&page) {
            for words in shell::commands(&block.text)
                .into_iter()
                .filter(|words| words[0] == "grep")
            {
                let pattern = words.iter().skip(1).find(|word| !word.starts_with('-')).unwrap();
                for text in pattern.split("\\|") {
                    assert!(
                        sources.contains(&text.to_lowercase()),
                        "{}: no log has «{text}»",
                        block.place
                    );
                    count += 1;
                }
            }
        }
    }
    assert!(count > 3, "only {count} patterns were found");
}

#[test]
fn an_unused_command_and_an_unknown_field_name_are_detected() {
    let page = Page {
        path: "docs/page.md".into(),
        text: "# Page\n\n    yq . x.yaml\n    kubectl get pods | awk 1\n    jq . x.jsonl\n    curl -N …\n".into(),
    };
    let plans = Plans::new(vec![page]);
    assert_eq!(plans.unknown, ["docs/page.md:3: yq . x.yaml", "docs/page.md:3: awk 1"]);
    assert_eq!(plans.pages.len(), 1);
    assert_eq!(plans.stale.len(), NOT_RUN.len() - 1);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "{\"record\": \"audit\", \"decision\": null}\n").unwrap();
    let check = |program| unknown_names(program, file.path());
    assert_eq!(check("select(.record == \"x\") | {decision}"), None);
    assert!(check("{decided}").unwrap().contains("decided"));
}
