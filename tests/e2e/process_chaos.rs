//! Loops with real tools while workers, gateways, whole pods and the leader are killed at random: nothing is done twice that
//! may not be, nothing that happened is missing, and each total is exact.
//!
//! `AGENTLOOP_E2E_KILL_SECONDS` says for how long (60).

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use agentloop::engine::message::Message;
use pretty_assertions::assert_eq;
use rusqlite::Connection;
use serde_json::{Value, json};

use super::agents::{Agent, script, scripted};
use super::budget_chaos::{kill_pod, leading};
use super::cluster::{Namespace, alone, figure};
use super::node;
use crate::support::kubectl::Kubectl;
use crate::tools::python::{self, Edition, McpServer};

const COUNT: usize = 4;
/// Rounds between two kills of the leader: its successor has the Lease after some 15 s.
const LEADER_EVERY: u64 = 12;
/// What each answer of the script bills.
const INPUT: i64 = 10;

/// Two turns, again and again: a look, actions that may be repeated (`note`), and some that may not (`slow`).
fn turns() -> Value {
    let note = |text: &str| json!({"name": "hub__note", "arguments": {"text": text}});
    let slow = |seconds: f64| json!({"name": "hub__slow", "arguments": {"seconds": seconds}});
    let add = json!({"name": "hub__add", "arguments": {"a": 1, "b": 2}});
    let answers = [
        vec![note("one"), add],
        vec![slow(0.3)],
        vec![],
        vec![slow(0.2), note("two"), slow(0.1)],
        vec![],
    ];
    let answer = |(number, calls): (usize, Vec<Value>)| {
        json!({"text": format!("s{number}"), "toolCalls": calls, "delayMilliseconds": 200,
            "usage": {"inputTokens": INPUT, "outputTokens": 5}})
    };
    json!({"turns": answers.into_iter().enumerate().map(answer).collect::<Vec<_>>()})
}

/// Answers of the script, and then it starts again.
const ANSWERS: usize = 5;

#[test]
fn no_action_is_doubled_and_nothing_is_lost_while_every_process_is_killed_at_random() {
    let Some(cluster) = alone().filter(|_| python::is_there()) else {
        return;
    };
    let seconds = std::env::var("AGENTLOOP_E2E_KILL_SECONDS").ok();
    let seconds: u64 = seconds.map_or(60, |text| text.parse().expect("AGENTLOOP_E2E_KILL_SECONDS is a number"));
    let server = McpServer::for_pods(Edition::Newer);
    let namespace = Namespace::new(&cluster.system, "kills");
    let kubectl = &namespace.kubectl;
    kubectl.apply(&script("script", &turns()));
    let hub = json!({"name": "hub", "url": server.url(), "trusted": true});
    let spec = json!({
        "tools": {"servers": [hub], "approval": {"default": "Never"}}, "loop": {"minDelayMilliseconds": 1, "maxConsecutiveErrors": 20, "historyTokens": 1_000_000},
        "guardrails": {"maxConsecutiveTurns": 10_000, "actionsPerMinute": 600, "idleTimeoutSeconds": 86_400},
        "model": {"contextTokens": 1_000_000},
    });
    let names: Vec<String> = (0..COUNT).map(|number| format!("killed-{number}")).collect();
    let apply = |name: &String| Agent::apply(&namespace, name, &scripted("script"), &spec);
    let agents: Vec<_> = names.iter().map(apply).collect();
    kubectl.apply(&sensor(&names));
    for agent in &agents {
        agent.until_turns(1, 240);
    }
    let (kills, rounds) = kill_for(&cluster.system, &agents, Duration::from_secs(seconds));
    figure(
        "kills_worker_gateway_pod_leader",
        format!("{}/{}/{}/{}", kills[0], kills[1], kills[2], kills[3]),
        "kills",
    );
    // A pod that is being replaced has no process to kill.
    assert!(
        kills.iter().sum::<usize>() as u64 * 2 >= rounds && rounds >= 6,
        "{kills:?} in {rounds} rounds"
    );
    // A tick that was missed is made up for before the Sensor goes.
    for agent in &agents {
        wait_for_progress(agent, 2);
    }
    kubectl.ok(&["delete", "sensors.agentloop.dev/minutes"]);
    let found: Vec<_> = agents.iter().map(JournalFindings::after).collect();
    let sum = |of: fn(&JournalFindings) -> usize| found.iter().map(of).sum::<usize>();
    figure("kills_answers", sum(|found| found.answered.len()), "answers");
    figure("kills_tool_runs", sum(|found| found.runs.len()), "runs");
    figure("kills_unknown_outcomes", sum(|found| found.unknown), "runs");
    figure("kills_notifications", sum(|found| found.notified), "notifications");
    for found in &found {
        found.judge(&server);
    }
    nothing_ran_unjournalled_or_twice(&found, &server);
}

/// A tick a minute for all of them.
fn sensor(agents: &[String]) -> String {
    json!({"apiVersion": "agentloop.dev/v1alpha1", "kind": "Sensor", "metadata": {"name": "minutes"}, "spec": {
        "agentNames": agents, "source": {"schedule": {"cron": "* * * * *"}},
        "notification": {"text": "'It is ' + payload.scheduledTime + '.'"},
    }})
    .to_string()
}

/// Kills something about every second and a half; how many workers, gateways, pods and leaders.
fn kill_for(system: &Kubectl, agents: &[Agent<'_>], long: Duration) -> ([usize; 4], u64) {
    let seed = u64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap();
    eprintln!("the kills of this run have the seed {seed}");
    let mut state = seed;
    // A linear congruential generator is random enough for this, and its upper bits are good.
    let mut random = move |below: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let deadline = Instant::now() + long;
    let mut kills = [0; 4];
    let mut round = 0;
    while Instant::now() < deadline {
        round += 1;
        let agent = &agents[usize::try_from(random(COUNT as u64)).unwrap()];
        let pod = agent.kubectl.get("pod", &agent.name);
        let role = usize::try_from(random(2)).unwrap();
        let struck = pod
            .as_ref()
            .and_then(|pod| node::strike(pod, ["worker", "gateway"][role], "KILL"));
        kills[role] += usize::from(struck.is_some());
        // A container that was killed before is started with a delay that grows; a new pod has none.
        if pod.as_ref().is_some_and(|pod| restarts(pod) > 1) {
            let gone = [
                "delete",
                "pod",
                &agent.name,
                "--grace-period=0",
                "--force",
                "--wait=false",
            ];
            agent.kubectl.run(&gone);
            kills[2] += 1;
        }
        if round % LEADER_EVERY == 0
            && let Some(leader) = leading(system)
        {
            kill_pod(system, &leader);
            kills[3] += 1;
        }
        // The rhythm of the kills is the test's own: nothing is waited for.
        let pause = Duration::from_millis(500 + random(2_000));
        std::thread::park_timeout(pause.min(deadline.saturating_duration_since(Instant::now())));
    }
    (kills, round)
}

/// Waits for more turns, longer than any wait after a crash takes.
fn wait_for_progress(agent: &Agent<'_>, turns: i64) {
    let now = agent.object()["status"]["usage"]["turns"].as_i64().unwrap_or_default();
    agent.until_turns(now + turns, 400);
}

/// How often the container of a pod that started again most did so.
pub fn restarts(pod: &Value) -> i64 {
    let lists = ["containerStatuses", "initContainerStatuses"];
    let all = lists
        .iter()
        .flat_map(|list| pod["status"][list].as_array().into_iter().flatten());
    all.filter_map(|one| one["restartCount"].as_i64()).max().unwrap_or(0)
}

/// A run of a tool, by the journal.
#[derive(Debug, Default)]
struct Run {
    tool: String,
    effect: String,
    key: String,
    intents: usize,
    outcomes: Vec<String>,
}

/// What is left of a loop that was killed again and again, and has stopped.
struct JournalFindings {
    name: String,
    usage: Value,
    runs: BTreeMap<String, Run>,
    answered: Vec<String>,
    turns: usize,
    notified: usize,
    sensed: usize,
    dropped: usize,
    unknown: usize,
    messages: Vec<Message>,
    steps: usize,
    snapshot: Value,
}

impl JournalFindings {
    /// Lets the loop continue for a while, stops it, and reads its journal.
    fn after(agent: &Agent<'_>) -> Self {
        wait_for_progress(agent, 2);
        agent.stop(120);
        let usage = agent.object()["status"]["usage"].clone();
        let connection = Connection::open(node::journal(agent.kubectl, &agent.name)).unwrap();
        let mut found = Self {
            name: agent.name.clone(),
            usage,
            runs: BTreeMap::new(),
            answered: Vec::new(),
            turns: 0,
            notified: 0,
            sensed: 0,
            dropped: 0,
            unknown: 0,
            messages: messages(&connection),
            steps: usize::try_from(count(&connection, "agent_execution_steps")).unwrap(),
            snapshot: snapshot(&connection),
        };
        found.read_lines(&connection);
        found
    }

    fn read_lines(&mut self, connection: &Connection) {
        let mut select = connection
            .prepare("SELECT kind, call, run, tool, effect, key, outcome FROM journal ORDER BY seq")
            .unwrap();
        let mut rows = select.query([]).unwrap();
        while let Some(row) = rows.next().unwrap() {
            let text = |column: &str| row.get::<_, Option<String>>(column).unwrap().unwrap_or_default();
            match text("kind").as_str() {
                "CallAnswered" => self.answered.push(text("call")),
                "TurnCompleted" => self.turns += 1,
                "Notified" => self.notified += 1,
                "SensorUpdated" => self.sensed += 1,
                "NotificationDropped" => self.dropped += 1,
                "ToolIntent" => {
                    let run = self.runs.entry(text("run")).or_default();
                    run.intents += 1;
                    (run.tool, run.effect, run.key) = (text("tool"), text("effect"), text("key"));
                }
                "ToolOutcome" if !text("run").is_empty() => {
                    self.unknown += usize::from(text("outcome") == "Unknown");
                    self.runs.entry(text("run")).or_default().outcomes.push(text("outcome"));
                }
                _ => {}
            }
        }
    }

    fn judge(&self, server: &McpServer) {
        let name = &self.name;
        let count = |field: &str| self.usage[field].as_i64().unwrap_or_default();
        let length = |number: usize| i64::try_from(number).unwrap();
        assert_eq!(count("turns"), length(self.turns), "{name}: turns");
        assert!(!self.runs.is_empty(), "{name}: tools were run");
        assert_eq!(count("toolCalls"), length(self.runs.len()), "{name}: runs");
        let acts = self.runs.values().filter(|run| run.effect != "Read").count();
        assert_eq!(count("actions"), length(acts), "{name}: actions");
        let billed = count("calls") - count("unknownCalls");
        assert_eq!(count("inputTokens"), billed * INPUT, "{name}: {}", self.usage);
        // The last answer may have come when the loop had stopped already.
        let answered = length(self.answered.len());
        assert!(
            (answered..=answered + 1).contains(&billed),
            "{name}: {billed} paid, {answered} heard"
        );
        let distinct: BTreeSet<_> = self.answered.iter().collect();
        assert_eq!(distinct.len(), self.answered.len(), "{name}: no call is answered twice");
        assert_eq!(self.steps, self.answered.len(), "{name}: steps of the history");
        self.judge_runs(server);
        self.judge_messages();
        assert_eq!((self.notified, self.dropped), (self.sensed, 0), "{name}: notifications");
        assert!(self.notified > 0, "{name}: a minute has passed");
        let waiting = self.snapshot["inbox"]["waiting"].as_array().map(Vec::len);
        assert_eq!(waiting, Some(0), "{name}: all notifications were shown");
    }

    fn judge_runs(&self, server: &McpServer) {
        let records = server.records();
        let did = |key: &str, what: &str| {
            let of_key = records.iter().filter(|record| record["key"] == key);
            of_key
                .filter(|record| record["what"].as_str().unwrap().starts_with(what))
                .count()
        };
        let mut keys = BTreeSet::new();
        for (id, run) in &self.runs {
            let name = format!("{} {id} {run:?}", self.name);
            assert!(run.intents > 0, "{name}: an outcome without an intent");
            assert!(keys.insert(&run.key), "{name}: its key is another run's too");
            if run.tool == "hub__slow" {
                assert!(run.intents == 1 && run.outcomes.len() <= 1, "{name}: sent twice");
                if run.outcomes == ["Ok"] {
                    assert_eq!(
                        (did(&run.key, "slow began"), did(&run.key, "slow ended")),
                        (1, 1),
                        "{name}"
                    );
                }
            } else if run.outcomes.last().is_some_and(|outcome| outcome == "Ok") {
                assert!(did(&run.key, "") > 0, "{name}: said to have run");
            }
        }
    }

    /// The answers are those of the script, in its order, and each call of a tool has its result, in their order.
    fn judge_messages(&self) {
        let mut open: Vec<String> = Vec::new();
        let mut answers = 0;
        for message in &self.messages {
            match message {
                Message::Assistant { text, tool_calls, .. } => {
                    assert!(
                        open.is_empty(),
                        "{}: {open:?} have no result before answer {answers}",
                        self.name
                    );
                    let expected = format!("s{}", answers % ANSWERS);
                    assert_eq!(
                        text.as_deref(),
                        Some(expected.as_str()),
                        "{}: answer {answers}",
                        self.name
                    );
                    answers += 1;
                    open = tool_calls.iter().rev().map(|call| call.id.clone()).collect();
                }
                Message::Tool { id, .. } => assert_eq!(open.pop().as_ref(), Some(id), "{}", self.name),
                Message::System { .. } | Message::User { .. } => {}
            }
        }
        assert_eq!(
            answers,
            self.answered.len(),
            "{}: each answer is in the transcript",
            self.name
        );
    }
}

/// What the server was asked to do stands in a journal, and what may not be repeated was asked once.
fn nothing_ran_unjournalled_or_twice(found: &[JournalFindings], server: &McpServer) {
    let known: BTreeSet<&str> = found
        .iter()
        .flat_map(|found| found.runs.values().map(|run| run.key.as_str()))
        .collect();
    let mut began = BTreeSet::new();
    for record in server.records() {
        let key = record["key"].as_str().expect("each call has a key").to_owned();
        assert!(known.contains(key.as_str()), "{record}: no journal speaks of it");
        if record["what"] == "slow began" {
            assert!(began.insert(key), "{record}: done twice");
        }
    }
}

fn messages(connection: &Connection) -> Vec<Message> {
    let mut select = connection.prepare("SELECT json FROM messages ORDER BY id").unwrap();
    let texts = select.query_map([], |row| row.get::<_, String>(0)).unwrap();
    texts
        .map(|text| serde_json::from_str(&text.unwrap()).unwrap())
        .collect()
}

fn snapshot(connection: &Connection) -> Value {
    let text: String = connection
        .query_row("SELECT value FROM kv WHERE key = 'snapshot'", [], |row| row.get(0))
        .unwrap();
    serde_json::from_str(&text).unwrap()
}

fn count(connection: &Connection, table: &str) -> i64 {
    let sql = format!("SELECT count(*) FROM {table}");
    connection.query_row(&sql, [], |row| row.get(0)).unwrap()
}
