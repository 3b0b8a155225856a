//! How each command of a page is run by the test, or why it is not.
//!
//! What reads is run as it is, without following or watching. What changes something is run as a dry run of the server,
//! except for what the plugin does to an Agent, and what creates an object that other commands need.

use super::stage::{self, HELPER, WATCHER};
use crate::docs::PageCommand;

/// Commands that are not run, by their first words without a namespace, and why.
const NOT_RUN: [(&str, &str); 13] = [
    ("kubectl port-forward", "runs until it is interrupted"),
    ("kubectl run files", "its image is another project's"),
    ("kubectl cp letter.txt", "into the pod of another project's image"),
    ("kubectl exec files", "in the pod of another project's image"),
    ("kubectl patch configmap argocd-cm", "the ConfigMap is Argo CD's"),
    (
        "kubectl apply -f snapshot.yaml",
        "the definition is that of the CSI snapshotter",
    ),
    (
        "kubectl wait volumesnapshot",
        "the definition is that of the CSI snapshotter",
    ),
    (
        "kubectl agentloop approve",
        "needs an open gate; e2e::plugin approves one",
    ),
    (
        "kubectl agentloop deny",
        "needs an open gate; e2e::approvals denies one",
    ),
    ("helm test", "the release has one pod for it; e2e::quickstart runs it"),
    (
        "helm upgrade agentloop charts/agentloop --reset-then-reuse-values --set dashboards.enabled=true",
        "a ServiceMonitor is a kind of the Prometheus operator; tests of the chart render it",
    ),
    (
        "helm rollback",
        "needs an earlier revision of the release; e2e::release rolls one back",
    ),
    (
        "kubectl get configmap agentloop-metrics-ca",
        "exists with tokens for metrics only; metrics_tls reads it",
    ),
];

/// Words of pages that stand for a name, and what is there in the test.
const NAMES: [(&str, &str); 7] = [
    ("AGENT", WATCHER),
    ("quickstart", HELPER),
    ("triage", HELPER),
    ("BUDGET", stage::BUDGET),
    ("SENSOR", stage::SENSOR),
    ("SENSOR-sensor-0", stage::SENSOR_POD),
    ("SECRET", "agentloop-link-ca"),
];

/// Namespaces of pages in whose place the namespace of the test is.
const NAMESPACES: [&str; 2] = ["NAMESPACE", "team-a"];

/// Longest time that `kubectl wait` waits here.
const TIMEOUT: &str = "--timeout=60s";

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Program {
    Kubectl,
    Plugin,
    Helm,
}

/// A command as it is run.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) place: String,
    pub(super) program: Program,
    /// The arguments of the program.
    pub(super) words: Vec<String>,
    /// A namespace that the page names, other than that of the test.
    pub(super) namespace: Option<String>,
    /// It follows what is above it on its page: it changes what the loop does, or waits for that.
    pub(super) is_ordered: bool,
    /// It creates an object that other commands need.
    pub(super) is_first: bool,
}

/// All commands of the pages.
#[derive(Default)]
pub(super) struct Plan {
    pub(super) steps: Vec<Step>,
    /// Entries of [`NOT_RUN`] that no command begins with.
    pub(super) stale: Vec<&'static str>,
    /// Commands of which nothing here says how to run them.
    pub(super) unknown: Vec<String>,
}

impl Plan {
    pub(super) fn new(commands: Vec<PageCommand>) -> Self {
        let mut plan = Self {
            stale: NOT_RUN.map(|(start, _)| start).to_vec(),
            ..Self::default()
        };
        for command in commands {
            plan.add(command);
        }
        plan
    }

    fn add(&mut self, command: PageCommand) {
        let PageCommand { place, words } = command;
        if !["kubectl", "helm"].contains(&words[0].as_str()) {
            return;
        }
        let (words, namespace) = without_namespace(words);
        let text = words.join(" ");
        if let Some((start, _)) = NOT_RUN.iter().find(|(start, _)| text.starts_with(start)) {
            self.stale.retain(|other| other != start);
            return;
        }
        match Step::new(&place, &words, namespace) {
            Some(step) => self.steps.push(step),
            None => self.unknown.push(format!("{place}: {text}")),
        }
    }
}

impl Step {
    fn new(place: &str, words: &[String], namespace: Option<String>) -> Option<Self> {
        let (program, arguments) = match words {
            [first, second, rest @ ..] if first == "kubectl" && second == "agentloop" => (Program::Plugin, rest),
            [first, rest @ ..] if first == "kubectl" => (Program::Kubectl, rest),
            [_, rest @ ..] => (Program::Helm, rest),
            [] => return None,
        };
        let mut step = Self {
            place: place.to_owned(),
            program,
            words: arguments.iter().map(|word| named(word)).collect(),
            namespace,
            is_ordered: false,
            is_first: false,
        };
        let is_known = match program {
            Program::Kubectl => step.kubectl(),
            Program::Plugin => step.plugin(),
            Program::Helm => step.helm(),
        };
        is_known.then_some(step)
    }

    fn has(&self, word: &str) -> bool {
        self.words.iter().any(|other| other == word)
    }

    fn drop_words(&mut self, words: &[&str]) {
        self.words.retain(|word| !words.contains(&word.as_str()));
    }

    fn push(&mut self, word: impl Into<String>) {
        self.words.push(word.into());
    }

    fn kubectl(&mut self) -> bool {
        let verb = self.words[0].clone();
        match verb.as_str() {
            "get" | "describe" | "explain" | "exec" | "auth" | "rollout" => self.drop_words(&["--watch", "-w"]),
            "logs" => self.drop_words(&["--follow", "-f"]),
            "wait" => {
                self.is_ordered = true;
                self.words.retain(|word| !word.starts_with("--timeout"));
                self.push(TIMEOUT);
            }
            // A token is no object that stays.
            "create" if self.words[1] == "token" => {}
            "create" if self.words.iter().any(|word| word.starts_with("--dry-run")) => {}
            "create" if self.namespace.is_none() && self.words[1] != "clusterrolebinding" => self.is_first = true,
            "annotate" | "apply" | "create" | "delete" | "label" | "patch" => self.dry(&verb),
            _ => return false,
        }
        true
    }

    /// A change that is not made.
    fn dry(&mut self, verb: &str) {
        self.push("--dry-run=server");
        match verb {
            // Objects of other tests come and go.
            "delete" => self.drop_words(&["--all-namespaces"]),
            // The release here is Helm's.
            "apply" if self.has("--server-side") => {
                self.drop_words(&["--force-conflicts"]);
                self.push("--force-conflicts");
            }
            // Files of a page, which create what they name.
            "apply" => {
                self.namespace.get_or_insert_with(|| super::EMPTY.into());
                let folder = stage::folder_of(&self.place);
                let flag = self.words.iter().position(|word| word == "-f");
                let file = flag.and_then(|at| self.words.get_mut(at + 1));
                if let Some(file) = file.filter(|file| !file.contains('/')) {
                    *file = format!("{folder}/{file}");
                }
            }
            // Who approves does so under their own name.
            "annotate" => {
                let who = self
                    .words
                    .iter()
                    .find_map(|word| word.strip_prefix("agentloop.dev/approved-by="));
                if let Some(who) = who.map(|who| format!("--as={who}")) {
                    self.push(who);
                    self.push("--as-group=system:masters");
                }
            }
            _ => {}
        }
    }

    fn plugin(&mut self) -> bool {
        self.drop_words(&["--follow", "-f"]);
        // The names of all Agents.
        if let Some(at) = self.words.iter().position(|word| word == "substituted") {
            self.words.splice(at..=at, stage::AGENTS.map(String::from));
        }
        let verb = self.words[0].as_str();
        let changes = ["pause", "resume", "wake", "stop", "run"].contains(&verb);
        self.is_ordered = changes || self.has("top-up");
        true
    }

    fn helm(&mut self) -> bool {
        self.drop_words(&["--wait"]);
        match self.words[0].as_str() {
            "upgrade" => self.push("--dry-run=server"),
            "uninstall" => self.push("--dry-run"),
            "history" | "template" => {}
            _ => return false,
        }
        true
    }
}

/// The words without the flag of a namespace, and the namespace if it is another one than that of the test.
fn without_namespace(words: Vec<String>) -> (Vec<String>, Option<String>) {
    let (mut kept, mut namespace) = (Vec::new(), None);
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        match word.as_str() {
            "-n" | "--namespace" => namespace = words.next(),
            // What follows is a command of its own.
            "--" => {
                kept.push(word);
                kept.extend(words.by_ref());
            }
            _ => kept.push(word),
        }
    }
    (kept, namespace.filter(|name| !NAMESPACES.contains(&name.as_str())))
}

/// The word with the names of the test, also after `/` and `=`.
fn named(word: &str) -> String {
    let parts = word.split_inclusive(['/', '=']).map(|part| {
        let name = part.trim_end_matches(['/', '=']);
        let found = NAMES.iter().find(|(page, _)| *page == name);
        found.map_or(part.to_owned(), |(page, here)| part.replace(page, here))
    });
    parts.collect()
}

#[test]
fn placeholders_of_a_page_are_replaced_with_values_of_the_test() {
    let words = |text: &str| text.split(' ').map(String::from).collect::<Vec<_>>();
    let plan = |text: &str| {
        let (place, words) = ("docs/page.md:1".to_owned(), words(text));
        Plan::new(vec![PageCommand { place, words }]).steps.pop().unwrap()
    };
    let logs = plan("kubectl -n NAMESPACE logs -f -l agentloop.dev/agent=AGENT");
    assert_eq!(logs.words, words("logs -l agentloop.dev/agent=watcher"));
    assert_eq!((logs.namespace, logs.is_ordered), (None, false));
    let exec = plan("kubectl exec watcher -- sh -n x");
    assert_eq!(exec.words, words("exec watcher -- sh -n x"));
    let delete = plan("kubectl delete pods -n agentloop-system --all-namespaces quickstart");
    assert_eq!(delete.words, words("delete pods helper --dry-run=server"));
    assert_eq!(delete.namespace.as_deref(), Some("agentloop-system"));
    let apply = plan("kubectl apply -f x.yaml");
    assert_eq!(apply.words, words("apply -f docs-page.md/x.yaml --dry-run=server"));
    assert!(plan("kubectl agentloop pause AGENT").is_ordered);
    assert!(plan("kubectl create secret generic x").is_first);
}
