//! What the pages assume to be in the cluster, and a person who runs their commands.

use std::collections::BTreeSet;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

use super::plan::{Plan, Program, Step};
use crate::docs::page_manifests;
use crate::e2e::agents::{self, Agent, script, scripted};
use crate::e2e::budgets;
use crate::e2e::cluster::Namespace;
use crate::e2e::plugin_user::PluginUser;
use crate::e2e::sensor_pods;
use crate::support::clusters;
use crate::support::kubectl::{Ended, Kubectl, tool};

/// An Agent whose pod runs.
pub(super) const WATCHER: &str = "watcher";
/// Another one.
pub(super) const HELPER: &str = "helper";
/// One that is suspended.
const CRAWLER: &str = "crawler";
/// One that has reached its goal.
const WRITER: &str = "release-notes";
pub(super) const AGENTS: [&str; 4] = [WATCHER, HELPER, CRAWLER, WRITER];
/// A budget that may be topped up.
pub(super) const BUDGET: &str = "research";
/// The budget of the page about budgets.
const TEAM: &str = "team-a";
/// A Sensor with a pod of its own.
pub(super) const SENSOR: &str = "orders";
pub(super) const SENSOR_POD: &str = "orders-sensor-0";
/// A Sensor with a schedule.
const SCHEDULE: &str = "morning";
/// Directories of the repository that commands name.
const FOLDERS: [&str; 4] = ["charts", "crds", "deploy", "examples"];
/// Service accounts whose tokens pages request.
const ACCOUNTS: [&str; 3] = ["ann", "operator", "reader"];
/// The role of people who approve.
const APPROVER: &str = "agentloop-approver";

/// The namespace with all of it. Its directory is that of a person who has cloned the repository and written the files
/// of the pages.
pub(super) struct Stage {
    // Before the namespace, which goes last.
    person: PluginUser,
    kubeconfig: PathBuf,
    namespace: Namespace,
}

impl Stage {
    pub(super) fn new(system: &Kubectl, plan: &Plan) -> Self {
        let namespace = Namespace::new(system, "docs");
        let kubectl = &namespace.kubectl;
        let person = PluginUser::new(system, kubectl, "person", &["admin", APPROVER]);
        let kubeconfig = person.folder().join("administrator");
        std::fs::write(&kubeconfig, administrator(kubectl.namespace())).unwrap();
        for name in FOLDERS {
            symlink(crate::schema::reader::repository(name), person.folder().join(name)).unwrap();
        }
        std::fs::write(person.folder().join("ca.crt"), "a certificate").unwrap();
        let stage = Self {
            person,
            kubeconfig,
            namespace,
        };
        stage.set(plan);
        stage
    }

    fn set(&self, plan: &Plan) {
        let kubectl = &self.namespace.kubectl;
        // Several pages create the same object.
        let mut created = BTreeSet::new();
        for step in plan.steps.iter().filter(|step| step.is_first) {
            if !created.insert(&step.words) {
                continue;
            }
            let ended = self.end(step);
            let text = step.words.join(" ");
            assert!(ended.success, "{}: {text}: {}", step.place, ended.stderr);
        }
        let objects: Vec<Value> = objects().collect();
        kubectl.apply(&json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string());
        for name in [WATCHER, HELPER] {
            kubectl.wait(&format!("agents.agentloop.dev/{name}"), "condition=Ready", 120);
        }
        self.until_pods(&[WATCHER, HELPER]);
        sensor_pods::until_sensor_listens(kubectl, SENSOR);
        self.write_files();
    }

    /// The files that commands name: manifests of the pages, a budget, and the history of an Agent.
    fn write_files(&self) {
        let folder = self.person.folder();
        for manifest in page_manifests() {
            let Some(name) = manifest.object["metadata"]["name"].as_str() else {
                continue;
            };
            let of_page = folder.join(folder_of(&manifest.place));
            std::fs::create_dir_all(&of_page).unwrap();
            std::fs::write(of_page.join(format!("{name}.yaml")), manifest.object.to_string()).unwrap();
        }
        std::fs::write(folder.join("team.yaml"), budget(TEAM).to_string()).unwrap();
        // A first task, so that there is a history.
        self.person.until_ok(&["run", HELPER, "--prompt", "How many?"]);
        let args = ["exec", HELPER, "-c", "worker", "--", "/agentloop", "journal"];
        let copy = self.namespace.kubectl.command(&args).output().expect("kubectl starts");
        std::fs::write(folder.join("helper.sqlite"), copy.stdout).unwrap();
        let history = Command::new(env!("CARGO_BIN_EXE_agentloop"))
            .args(["history", "helper.sqlite"])
            .current_dir(folder)
            .output()
            .expect("agentloop starts");
        assert!(history.status.success(), "{}", String::from_utf8_lossy(&history.stderr));
        std::fs::write(folder.join("helper.jsonl"), history.stdout).unwrap();
    }

    /// Runs a command; what is wrong with it, if anything.
    pub(super) fn run(&self, step: &Step) -> Option<String> {
        if step.is_first {
            return None;
        }
        let ended = self.end(step);
        if step.program == Program::Plugin {
            self.settle(&step.words);
        }
        let finds_nothing = ended.stderr.contains("No resources found");
        (!ended.success || finds_nothing).then(|| {
            let (program, text) = (step.program, step.words.join(" "));
            format!("{}: {program:?} {text}: {}{}", step.place, ended.stdout, ended.stderr)
        })
    }

    /// Waits for the pods of Agents that were paused or resumed: later commands are about loops that run.
    fn settle(&self, words: &[String]) {
        let kubectl = &self.namespace.kubectl;
        let names = [WATCHER, HELPER]
            .into_iter()
            .filter(|name| words.iter().any(|word| word == name));
        let names: Vec<&str> = names.collect();
        let is_all = words.len() > 2;
        match words[0].as_str() {
            "pause" => names.iter().for_each(|name| kubectl.until_gone("pod", name, 60)),
            "resume" => return self.until_pods(&names),
            _ => return,
        }
        // No command of the page resumes all of them.
        if is_all {
            self.person.ok(&[&["resume"], names.as_slice()].concat());
            self.until_pods(&names);
        }
    }

    fn until_pods(&self, names: &[&str]) {
        for name in names {
            Agent::named(&self.namespace, name).until_pod(None, 60);
        }
    }

    fn end(&self, step: &Step) -> Ended {
        // Service accounts of the namespace `default` are in that of the test.
        let of_default = "--serviceaccount=default:";
        let account = format!("--serviceaccount={}:", self.namespace.kubectl.namespace());
        let words = step.words.iter().map(|word| word.replace(of_default, &account));
        let words: Vec<String> = words.collect();
        let mut words: Vec<&str> = words.iter().map(String::as_str).collect();
        // The person is one of the namespace, and not of all.
        let is_of_all = words.contains(&"-A");
        let program = match step.program {
            Program::Plugin if !is_of_all => return self.person.run(&words),
            Program::Plugin => {
                words.insert(0, "kubectl");
                PathBuf::from(env!("CARGO_BIN_EXE_agentloop"))
            }
            Program::Kubectl => tool("kubectl"),
            Program::Helm => tool("helm"),
        };
        let namespace = step.namespace.iter().flat_map(|name| ["--namespace", name.as_str()]);
        let output = Command::new(program)
            .args(namespace)
            .args(words)
            .env("KUBECONFIG", &self.kubeconfig)
            .current_dir(self.person.folder())
            .output();
        output.expect("the program starts").into()
    }
}

/// Where the files of a page are, by the place of a block.
pub(super) fn folder_of(place: &str) -> String {
    let page = place.split(':').next().unwrap_or(place);
    page.replace('/', "-")
}

/// The kubeconfig of the administrator of the cluster, whose current namespace is this one.
fn administrator(namespace: &str) -> String {
    let text = std::fs::read_to_string(clusters::node().unwrap()).unwrap();
    let mut config: Value = serde_yaml::from_str(&text).unwrap();
    for context in config["contexts"].as_array_mut().unwrap() {
        context["context"]["namespace"] = namespace.into();
    }
    config.to_string()
}

fn object(kind: &str, name: &str, spec: &Value) -> Value {
    json!({"apiVersion": "agentloop.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec})
}

fn budget(name: &str) -> Value {
    let limits = json!({"tokens": 1_000_000, "costUSD": "10.00"});
    let spec = json!({"selector": {}, "limits": limits, "window": {"rolling": {"seconds": 86400}}});
    serde_json::from_str(&budgets::manifest(name, &spec)).unwrap()
}

fn objects() -> impl Iterator<Item = Value> {
    let parsed = |text: String| serde_json::from_str::<Value>(&text).unwrap();
    let model = |script: &str| {
        let mut model = scripted(script);
        model["price"] = json!({"inputPerMillion": "0.40", "outputPerMillion": "1.60"});
        model
    };
    let agent = move |name: &str, spec: Value| parsed(agents::manifest(name, &model("plan"), &spec));
    let answer = json!({"name": "finish", "arguments": {"result": "Three headings."}});
    let turns = json!({"atEnd": "RepeatLast", "turns": [{"text": "All is quiet."}]});
    let done = json!({"atEnd": "RepeatLast", "turns": [{"toolCalls": [answer]}]});
    let goal = json!({"description": "Write.", "acceptanceCriteria": [{"name": "headings", "regex": "headings"}]});
    let mut writer = agent(WRITER, json!({"mode": "Goal", "goal": goal}));
    writer["spec"]["model"] = model("done");
    let receivers = json!({"agentNames": [WATCHER], "notification": {"text": "'Look.'"}});
    let sensor = move |name: &str, source: Value| {
        let mut spec = receivers.clone();
        spec["source"] = source;
        object("Sensor", name, &spec)
    };
    let key = json!({"scheme": "GitHub", "secretKeyRef": {"name": SENSOR, "key": "webhook"}});
    let claim = json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}});
    let account = |name| json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}});
    let accounts = ACCOUNTS.map(account);
    let here = [
        parsed(script("plan", &turns)),
        parsed(script("done", &done)),
        budget(TEAM),
        budget(BUDGET),
        agent(WATCHER, json!({"mode": "Task", "task": {}})),
        agent(HELPER, json!({"mode": "Task", "task": {}})),
        agent(CRAWLER, json!({"suspend": true})),
        writer,
        sensor(SENSOR, json!({"webhook": key})),
        sensor(SCHEDULE, json!({"schedule": {"cron": "0 8 * * 1-5"}})),
        json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "shared"}, "spec": claim}),
    ];
    here.into_iter().chain(accounts)
}
