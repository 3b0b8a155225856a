//! An upgrade from an older version and the rollback, with Agents that work meanwhile: no pod is replaced or restarted, no turn is
//! lost or repeated, and nothing is paid twice.
//!
//! Not in `make test`, since an older image must be built for it: `make upgrade-test`. `AGENTLOOP_PREVIOUS_IMAGE` and
//! `AGENTLOOP_PREVIOUS_CHART` name image and chart of the older version.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use pretty_assertions::assert_eq;
use rusqlite::Connection;
use serde_json::{Value, json};

use super::agents::{Agent, script, scripted};
use super::budget_writes::adds_up;
use super::budgets::{self, BUDGETS};
use super::cluster::{self, CHART, Namespace, RELEASE, figure, without_release};
use super::node;
use super::responses::ResponseReceiver;
use super::sensor_pods::{KEY, POD, SENSORS, Sender, until_listening};
use super::task_chaos;
use crate::support::clusters;
use crate::support::kubectl::Kubectl;
use crate::tools::python::{self, Edition, McpServer};

/// What each answer of the script bills.
const INPUT: i64 = 10;
/// Longest time without a completed turn of a loop whose pod stays.
const MAX_GAP: f64 = 20.0;
/// Time between two tasks.
const RHYTHM: Duration = Duration::from_millis(500);

/// Chart and image of one version.
struct Version {
    chart: String,
    image: String,
}

impl Version {
    /// The older one; `None` (said loudly) where there is none.
    fn previous() -> Option<Self> {
        let setting = |name| std::env::var(name).ok();
        let (chart, image) = (setting("AGENTLOOP_PREVIOUS_CHART"), setting("AGENTLOOP_PREVIOUS_IMAGE"));
        if let (Some(chart), Some(image)) = (chart, image) {
            return Some(Self { chart, image });
        }
        clusters::skip("AGENTLOOP_PREVIOUS_CHART and AGENTLOOP_PREVIOUS_IMAGE are not set; `make upgrade-test` does");
        None
    }

    fn present() -> Self {
        Self {
            chart: CHART.into(),
            image: cluster::image(),
        }
    }

    /// Installs it, or upgrades to it as the manual says.
    fn apply(&self, system: &Kubectl) {
        cluster::release(system, &self.chart, &self.image, &["--reset-then-reuse-values"]);
        self.is_there(system);
    }

    /// The controller and the definitions are those of this version.
    fn is_there(&self, system: &Kubectl) {
        for pod in cluster::settled(system) {
            assert_eq!(pod["spec"]["containers"][0]["image"], self.image.as_str());
        }
        let files = std::fs::read_dir(Path::new(&self.chart).join("files/crds")).expect("the chart has definitions");
        for file in files {
            let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
            let expected: Value = serde_yaml::from_str(&text).unwrap();
            let name = expected["metadata"]["name"].as_str().unwrap();
            let found = system.get("customresourcedefinition", name).expect("it is defined");
            let schema = |definition: &Value| definition["spec"]["versions"][0]["schema"].clone();
            assert!(schema(&found) == schema(&expected), "{name} is that of another version");
        }
    }
}

/// What would change if a pod were replaced, or a container started again.
fn identity(pod: &Value) -> Vec<String> {
    let lists = ["containerStatuses", "initContainerStatuses"];
    let containers = lists
        .iter()
        .flat_map(|list| pod["status"][list].as_array().into_iter().flatten())
        .map(|one| format!("{} {} {}", one["name"], one["containerID"], one["restartCount"]));
    let mut parts: Vec<_> = containers.collect();
    parts.sort();
    parts.insert(0, pod["metadata"]["uid"].to_string());
    parts
}

fn turns(agent: &Agent<'_>) -> i64 {
    agent.object()["status"]["usage"]["turns"].as_i64().unwrap_or(0)
}

/// Agents of one budget: two that turn all the time, one that waits for approvals, and one with tasks.
struct UpgradeAgents<'a> {
    kubectl: &'a Kubectl,
    /// Keeps its pod.
    turning: Agent<'a>,
    /// Gets a new pod after the upgrade.
    moved: Agent<'a>,
    waiting: Agent<'a>,
    clerk: Agent<'a>,
    server: McpServer,
    receiver: ResponseReceiver,
}

impl<'a> UpgradeAgents<'a> {
    fn start(namespace: &'a Namespace) -> Self {
        let kubectl = &namespace.kubectl;
        let (server, receiver) = (McpServer::for_pods(Edition::Newer), ResponseReceiver::start(0));
        let budget =
            json!({"selector": {}, "limits": {"tokens": 100_000_000, "calls": 1_000_000}, "window": {"lifetime": {}}});
        kubectl.apply(&budgets::manifest("all", &budget));
        let usage = json!({"inputTokens": INPUT, "outputTokens": 5});
        let turn = json!({"text": "on", "delayMilliseconds": 300, "usage": usage});
        kubectl.apply(&script("turning", &json!({"turns": [turn]})));
        let note = |text: &str| json!({"name": "hub__note", "arguments": {"text": text}});
        let waits = json!({"turns": [
            {"text": "I write two notes.", "toolCalls": [note("canary-one"), note("canary-two")], "usage": usage},
            {"yield": {"mode": "shutdown", "reason": "all is done"}, "usage": usage},
            {"yield": {"mode": "shutdown", "reason": "all is done"}, "usage": usage},
        ]});
        kubectl.apply(&script("waiting", &waits));
        let task = json!({"text": "done", "delayMilliseconds": 20, "usage": usage});
        kubectl.apply(&script("answers", &json!({"turns": [task]})));

        // So long a history that nothing but the script's turns is called for.
        let busy = json!({
            "loop": {"minDelayMilliseconds": 1, "historyTokens": 1_000_000}, "model": {"contextTokens": 1_000_000},
            "guardrails": {"maxConsecutiveTurns": 10_000},
        });
        let apply = |name: &str, script: &str, spec: &Value| Agent::apply(namespace, name, &scripted(script), spec);
        let turning = apply("turning", "turning", &busy);
        let moved = apply("moved", "turning", &busy);
        let hub = json!({
            "name": "hub", "url": server.url(), "requiredGrant": "notes",
            "tools": [{"name": "note", "approval": "Always"}],
        });
        let asks = json!({"tools": {"servers": [hub], "grants": ["notes"]}});
        let waiting = apply("waiting", "waiting", &asks);
        let responses = json!({"http": {"url": receiver.url()}});
        let clerk = apply(
            "clerk",
            "answers",
            &json!({"mode": "Task", "task": {"responses": responses}}),
        );
        kubectl.apply(&task_chaos::sensor());
        until_listening(kubectl);
        waiting.until("two gates", 120, |agent| (gates(agent).len() == 2).then_some(()));
        clerk.until_state("Sleeping", 120);
        Self {
            kubectl,
            turning,
            moved,
            waiting,
            clerk,
            server,
            receiver,
        }
    }

    fn all(&self) -> [&Agent<'a>; 4] {
        [&self.turning, &self.moved, &self.waiting, &self.clerk]
    }

    /// What identifies the pods of all.
    fn pods(&self) -> Vec<Vec<String>> {
        self.all().map(|agent| identity(&agent.until_pod(None, 60))).to_vec()
    }

    /// Waits until each has done something more, and all are well.
    fn wait_for_progress(&self) {
        let answered = self.receiver.accepted().len();
        for agent in [&self.turning, &self.moved] {
            agent.until_turns(turns(agent) + 10, 60);
            agent.until_condition("Ready", "True", "LoopRunning", 60);
        }
        self.waiting.until_condition("Ready", "True", "AwaitingApproval", 60);
        self.receiver.until_accepted(answered + 5, 90);
    }

    /// Approves the first open gate.
    fn approve(&self) {
        let open = gates(&self.waiting.object());
        let text = |field: &str| open[0][field].as_str().unwrap().to_owned();
        let approve = format!("agentloop.dev/approve={}:{}", text("id"), text("argumentsHash"));
        let by = "agentloop.dev/approved-by=admin";
        let args = [
            "annotate",
            "--overwrite",
            cluster::AGENTS,
            &self.waiting.name,
            &approve,
            by,
        ];
        self.kubectl.ok(&args);
        self.waiting.until("the approval", 60, |agent| {
            (gates(agent).len() == open.len() - 1).then_some(())
        });
    }

    /// Waits until the pod of the Sensor has this image.
    fn until_sensor_pod(&self, image: &str) {
        self.kubectl
            .until("the image of the Sensor's pod", 180, "pods", POD, |pod| {
                let is_there = pod["metadata"]["deletionTimestamp"].is_null();
                (is_there && pod["spec"]["containers"][0]["image"] == image).then_some(())
            });
        until_listening(self.kubectl);
    }

    /// A new pod with the image for one that runs.
    fn replace(&self, agent: &Agent<'_>, image: &str) {
        let old = agent.until_pod(None, 30);
        self.kubectl.ok(&["delete", "pod", &agent.name, "--wait=false"]);
        let new = agent.until_pod(Some(&old), 120);
        for container in new["spec"]["containers"].as_array().unwrap() {
            assert_eq!(container["image"], image, "{}", container["name"]);
        }
    }

    /// Stops all, and compares what each did, what it says that it did, and what the budget counted.
    fn judge(&self, posted: usize) {
        let responses = self.receiver.until_accepted(posted, 60);
        assert_eq!(responses.len(), posted, "each task is answered");
        assert_eq!(self.receiver.all().len(), posted, "no response is sent twice");
        let acts: Vec<_> = self
            .server
            .records()
            .iter()
            .map(|record| record["what"].clone())
            .collect();
        assert_eq!(
            acts,
            ["note canary-one", "note canary-two"],
            "each approved call ran once"
        );
        for agent in self.all() {
            agent.stop(120);
        }
        let gap = judge_journal(&self.turning);
        judge_journal(&self.moved);
        figure("upgrade_longest_gap_between_turns", format!("{gap:.1}"), "s");
        assert!(gap < MAX_GAP, "no turn was completed for {gap} s");
        let budget = self.kubectl.until("nothing reserved", 120, BUDGETS, "all", |budget| {
            let reserved = |kind: &str| budget["status"]["reserved"][kind].as_i64().unwrap_or(0);
            (reserved("tokens") == 0 && reserved("calls") == 0).then(|| budget.clone())
        });
        let agents = self.all().map(|agent| Agent {
            kubectl: self.kubectl,
            name: agent.name.clone(),
        });
        adds_up(&budget, &agents);
    }
}

fn gates(agent: &Value) -> Vec<Value> {
    agent["status"]["gates"].as_array().cloned().unwrap_or_default()
}

/// Compares the journal of a stopped Agent with its status: turns without a gap or a repetition, and each call answered and paid
/// once. The longest time between two completed turns, in seconds.
fn judge_journal(agent: &Agent<'_>) -> f64 {
    let name = &agent.name;
    let usage = agent.object()["status"]["usage"].clone();
    let count = |field: &str| usage[field].as_i64().unwrap_or(0);
    let journal = Connection::open(node::journal(agent.kubectl, name)).unwrap();
    let read = |sql: &str| {
        let mut select = journal.prepare(sql).unwrap();
        let rows = select.query_map([], |row| Ok((row.get::<_, i64>(0)?, row.get::<_, String>(1)?)));
        rows.unwrap().map(Result::unwrap).collect::<Vec<_>>()
    };
    let completed = read("SELECT turn, at FROM journal WHERE kind = 'TurnCompleted' ORDER BY seq");
    let first = completed[0].0;
    let expected: Vec<_> = (first..).take(completed.len()).collect();
    let numbers: Vec<_> = completed.iter().map(|(turn, _)| *turn).collect();
    assert_eq!(numbers, expected, "{name}: each turn is completed once, in order");
    assert_eq!(count("turns"), i64::try_from(numbers.len()).unwrap(), "{name}: turns");
    let executed = read("SELECT turn, id FROM agent_execution_history WHERE completed_at IS NOT NULL ORDER BY turn");
    let executed: Vec<_> = executed.iter().map(|(turn, _)| *turn).collect();
    assert_eq!(executed, expected, "{name}: each turn is one execution");

    let answered = read("SELECT turn, call FROM journal WHERE kind = 'CallAnswered'");
    let distinct: BTreeSet<_> = answered.iter().map(|(_, call)| call).collect();
    assert_eq!(distinct.len(), answered.len(), "{name}: no call is answered twice");
    let (billed, heard) = (
        count("calls") - count("unknownCalls"),
        i64::try_from(answered.len()).unwrap(),
    );
    assert_eq!(count("inputTokens"), billed * INPUT, "{name}: {usage}");
    // The last answer may have come when the loop had stopped already.
    assert!(
        (heard..=heard + 1).contains(&billed),
        "{name}: {billed} paid, {heard} heard"
    );

    let times: Vec<Timestamp> = completed.iter().map(|(_, at)| at.parse().unwrap()).collect();
    let gaps = times
        .windows(2)
        .map(|pair| pair[1].duration_since(pair[0]).as_secs_f64());
    gaps.fold(0.0, f64::max)
}

/// Ends the tasks when the test ends, whatever happens.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Posts tasks, each until it is accepted; how many.
fn post_tasks(sender: &Sender, ends: &AtomicBool) -> usize {
    let mut posted = 0;
    while !ends.load(Ordering::Relaxed) {
        let (id, body) = (format!("task-{posted}"), json!({"task": format!("task {posted}")}));
        let status = sender.send(KEY, &id, &body.to_string());
        // 200: it was accepted, and the answer was lost with the Sensor's pod.
        assert!([202, 200].contains(&status), "{id}: {status}");
        posted += 1;
        // The rhythm is the test's own: nothing is waited for.
        std::thread::park_timeout(RHYTHM);
    }
    posted
}

#[test]
#[ignore = "needs an image and a chart of an older version: make upgrade-test"]
fn an_upgrade_from_an_older_version_and_its_rollback_restart_no_loop_and_lose_and_repeat_nothing() {
    let Some(cluster) = without_release().filter(|_| python::is_there()) else {
        return;
    };
    let Some(previous) = Version::previous() else { return };
    let (system, present) = (&cluster.system, Version::present());
    previous.apply(system);
    let namespace = Namespace::new(system, "upgrade");
    let crew = UpgradeAgents::start(&namespace);
    let ends = AtomicBool::new(false);
    let posted = std::thread::scope(|scope| {
        let sender = Sender::of(crew.kubectl);
        let ends = &ends;
        let tasks = scope.spawn(move || post_tasks(&sender, ends));
        let ending = StopOnDrop(ends);
        crew.wait_for_progress();
        let before = crew.pods();

        let begun = Instant::now();
        present.apply(system);
        figure("upgrade_seconds", begun.elapsed().as_secs(), "s");
        crew.wait_for_progress();
        assert_eq!(
            crew.pods(),
            before,
            "the upgrade replaced or restarted a pod of an Agent"
        );
        crew.approve();
        crew.until_sensor_pod(&present.image);
        crew.wait_for_progress();
        crew.replace(&crew.moved, &present.image);
        crew.wait_for_progress();
        let before = crew.pods();

        let begun = Instant::now();
        system.helm(&["rollback", RELEASE, "--wait", "--timeout", "120s"]);
        figure("rollback_seconds", begun.elapsed().as_secs(), "s");
        previous.is_there(system);
        crew.wait_for_progress();
        assert_eq!(
            crew.pods(),
            before,
            "the rollback replaced or restarted a pod of an Agent"
        );
        // Unless its store was migrated, which would be a reason to say so in the changelog.
        crew.until_sensor_pod(&previous.image);
        crew.wait_for_progress();

        present.apply(system);
        crew.wait_for_progress();
        assert_eq!(
            crew.pods(),
            before,
            "the second upgrade replaced or restarted a pod of an Agent"
        );
        crew.approve();
        crew.waiting.until("its end", 60, |agent| {
            (agent["status"]["loop"]["outcome"] == "Completed").then_some(())
        });
        drop(ending);
        tasks.join().unwrap()
    });
    crew.kubectl.until("no delivery", 60, SENSORS, "orders", |sensor| {
        (sensor["status"]["pendingDeliveries"] == 0).then_some(())
    });
    crew.judge(posted);
}
