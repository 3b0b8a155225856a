//! Tasks of three clients for one Agent, as signed webhooks and as requests over the link, while every five seconds its worker,
//! its gateway, the Sensor's pod or the leader is killed: each is answered once, and the Sensor and the users take turns.
//!
//! `AGENTLOOP_E2E_TASKS` says how many (1,000), `AGENTLOOP_E2E_CHAOS_SEED` replays what was killed in which order.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant, UNIX_EPOCH};

use jiff::Timestamp;
use pretty_assertions::assert_eq;
use rusqlite::{Connection, Row};
use serde_json::{Value, json};

use super::agents::{Agent, script, scripted};
use super::cluster::{Namespace, SettingsGuard, alone, figure};
use super::link_client::{LinkUser, block_on};
use super::node;
use super::responses::{ReceivedResponse, ResponseReceiver};
use super::sensor_chaos::{InjectedFaults, LEADER, LEASE, PARTS, leader_without_delay, setting};
use super::sensor_pods::{KEY, POD, Sender, until_listening};
use crate::support::kubectl::Kubectl;
use crate::support::random::Random;

/// How many without the setting.
const TASKS: u64 = 1_000;
/// How many without kills, with [`OPEN`] open at a time, and with one.
const UNDISTURBED: [usize; 2] = [300, 100];
/// As what a client's tasks go out, in turn.
const CLIENTS: [(&str, &[TaskChannel]); 3] = [
    ("hooks", &[TaskChannel::Webhook]),
    ("requests", &[TaskChannel::Request]),
    ("both", &[TaskChannel::Webhook, TaskChannel::Request]),
];
/// Tasks without a response from which on no client sends another one: so the time until a task begins is about the kills and
/// not about the length of the queue.
const OPEN: usize = 12;
/// Time between two kills.
const RHYTHM: Duration = Duration::from_secs(5);
/// Longest time of one task until it is accepted, and of all until they are answered.
const WAIT_TIMEOUT: Duration = Duration::from_mins(5);
/// Each request of this number is refused once by the receiver.
const REFUSES_EACH: usize = 40;

/// A table of the test's own in the journal, filled by SQLite in the very transaction in which a task is accepted: the row
/// of the task loses its text once the work on it begins. A worker never reads it.
const WITNESS: &str = "
CREATE TABLE offers (seq INTEGER PRIMARY KEY, id TEXT NOT NULL, prompt TEXT NOT NULL, origin TEXT NOT NULL);
CREATE TRIGGER offer AFTER INSERT ON tasks BEGIN
    INSERT INTO offers (seq, id, prompt, origin)
    VALUES (new.seq, new.id, json_extract(new.offer, '$.prompt'), json_extract(new.offer, '$.origin'));
END;
";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TaskChannel {
    Webhook,
    Request,
}

#[test]
fn each_task_of_three_clients_is_answered_once_and_in_turn_while_every_part_is_killed() {
    let Some(cluster) = alone() else { return };
    let count = usize::try_from(setting("AGENTLOOP_E2E_TASKS").unwrap_or(TASKS)).unwrap();
    let _short = SettingsGuard::short_lease(&cluster.system, LEASE);
    let namespace = Namespace::new(&cluster.system, "task-chaos");
    let kubectl = &namespace.kubectl;
    let receiver = ResponseReceiver::start(REFUSES_EACH);
    let agent = answering(&namespace, &receiver, Duration::from_millis(20));
    kubectl.apply(&sensor());
    until_listening(kubectl);

    let begun = Instant::now();
    let (sent, faults) = post(&cluster.system, &agent, &receiver, (count, OPEN), |is_sending| {
        kill_parts(&cluster.system, kubectl, &agent, is_sending)
    });
    let accepted = receiver.until_accepted(count, WAIT_TIMEOUT.as_secs());
    let took = begun.elapsed();
    say_kills(&faults, &sent);
    say_rate("task_chaos", count, took);
    figure(
        "task_chaos_responses_sent_again",
        receiver.all().len() - count,
        "responses",
    );
    agent.stop(120);
    let found = JournalFindings::after(&agent);
    found.say("task_chaos");
    found.judge(&sent, &accepted, &receiver.all());
    let kills = faults.kills.iter().sum::<usize>();
    assert!(
        kills * 2 >= faults.rounds && kills > 0,
        "{faults:?} in {took:?}: nearly nothing was killed"
    );
}

#[test]
fn tasks_of_three_clients_are_answered_by_one_agent_and_one_leader_without_faults() {
    let Some(cluster) = alone() else { return };
    // The rate with several open; the time until the first call with one, for which no other task has to end first.
    for (run, count, open) in [("task_rate", UNDISTURBED[0], OPEN), ("task_single", UNDISTURBED[1], 1)] {
        let namespace = Namespace::new(&cluster.system, &run.replace('_', "-"));
        let receiver = ResponseReceiver::start(0);
        let agent = answering(&namespace, &receiver, Duration::ZERO);
        namespace.kubectl.apply(&sensor());
        until_listening(&namespace.kubectl);
        let begun = Instant::now();
        let (sent, ()) = post(&cluster.system, &agent, &receiver, (count, open), |_| ());
        let accepted = receiver.until_accepted(count, WAIT_TIMEOUT.as_secs());
        say_rate(run, count, begun.elapsed());
        agent.stop(120);
        let found = JournalFindings::after(&agent);
        found.say(run);
        found.judge(&sent, &accepted, &receiver.all());
    }
}

/// Posts `count` tasks by all clients at a time, with at most `open` open, and runs `meanwhile`, which can ask whether the
/// clients still post.
fn post<T>(
    system: &Kubectl,
    agent: &Agent<'_>,
    receiver: &ResponseReceiver,
    (count, open): (usize, usize),
    meanwhile: impl FnOnce(&dyn Fn() -> bool) -> T,
) -> (BTreeMap<String, Sent>, T) {
    let clients = CLIENTS.map(|(name, ways)| TaskClient {
        name,
        ways,
        sender: Sender::of(agent.kubectl),
        user: LinkUser::editor(system, agent.kubectl, name),
    });
    let posted = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let start = |(place, client)| {
            let numbers = (place..count).step_by(CLIENTS.len());
            let posted = &posted;
            scope.spawn(move || TaskClient::post_all(client, agent, numbers, (receiver, open), posted))
        };
        let threads: Vec<_> = clients.iter().enumerate().map(start).collect();
        let done = meanwhile(&|| !threads.iter().all(ScopedJoinHandle::is_finished));
        let sent = threads.into_iter().flat_map(|thread| thread.join().unwrap());
        (sent.collect(), done)
    })
}

/// An Agent whose responses go to the receiver, with a witness in its journal.
fn answering<'a>(namespace: &'a Namespace, receiver: &ResponseReceiver, call: Duration) -> Agent<'a> {
    let delay = u64::try_from(call.as_millis()).unwrap();
    let turn = json!({"text": "done", "delayMilliseconds": delay});
    namespace.kubectl.apply(&script("answers", &json!({"turns": [turn]})));
    let spec = json!({
        "mode": "Task", "loop": {"maxConsecutiveErrors": 20},
        "task": {"responses": {"http": {"url": receiver.url()}}},
    });
    let agent = Agent::apply(namespace, "clerk", &scripted("answers"), &spec);
    agent.until_state("Sleeping", 240);
    agent.stop(120);
    let journal = Connection::open(node::journal(agent.kubectl, &agent.name)).unwrap();
    journal.execute_batch(WITNESS).unwrap();
    drop(journal);
    agent.suspend(false);
    agent.until_pod(None, 120);
    agent
}

/// A Sensor whose webhooks are tasks of Agent `clerk`: the field `task` is the text.
pub fn sensor() -> String {
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "orders"},
        "stringData": {"webhook": KEY}});
    let webhook = json!({"scheme": "GitHub", "secretKeyRef": {"name": "orders", "key": "webhook"}});
    let sensor = json!({"apiVersion": "agentloop.dev/v1alpha1", "kind": "Sensor", "metadata": {"name": "orders"}, "spec": {
        "agentNames": ["clerk"], "source": {"webhook": webhook},
        "task": {"prompt": "payload.task"}, "limits": {"perMinute": 60_000},
    }});
    json!({"apiVersion": "v1", "kind": "List", "items": [secret, sensor]}).to_string()
}

struct TaskClient {
    name: &'static str,
    ways: &'static [TaskChannel],
    sender: Sender,
    user: LinkUser,
}

/// How a task was accepted.
#[derive(Clone, Copy, Debug)]
struct Sent {
    way: TaskChannel,
    tries: usize,
}

impl TaskClient {
    /// Posts its tasks, each until it is accepted and before the next one. Their texts are their names.
    fn post_all(
        &self,
        agent: &Agent<'_>,
        numbers: impl Iterator<Item = usize>,
        (receiver, open): (&ResponseReceiver, usize),
        posted: &AtomicUsize,
    ) -> Vec<(String, Sent)> {
        let post = |(turn, number): (usize, usize)| {
            let before = posted.fetch_add(1, Ordering::SeqCst);
            let has_room = receiver.wait_for((before + 1).saturating_sub(open), WAIT_TIMEOUT);
            assert!(has_room, "no response within {WAIT_TIMEOUT:?}");
            // Names sort in the order in which they are posted.
            let (name, way) = (format!("{}-{number:06}", self.name), self.ways[turn % self.ways.len()]);
            let tries = match way {
                TaskChannel::Webhook => self.post_webhook(&name),
                TaskChannel::Request => block_on(self.user.until_accepted(agent, &name, &name, WAIT_TIMEOUT)).1,
            };
            (name, Sent { way, tries })
        };
        numbers.enumerate().map(post).collect()
    }

    /// Sends a webhook until it is taken; how often.
    fn post_webhook(&self, name: &str) -> usize {
        let (deadline, body) = (Instant::now() + WAIT_TIMEOUT, json!({"task": name}).to_string());
        for tries in 1.. {
            let status = self.sender.post(KEY, name, &body);
            match status {
                Some(200 | 202) => return tries,
                Some(status @ (400..=403 | 413 | 429)) => panic!("{name} is refused: {status}"),
                _ => assert!(Instant::now() < deadline, "{name} is not taken: {status:?}"),
            }
            // The pace of a sender is its own: nothing is waited for.
            std::thread::park_timeout(Duration::from_millis(200));
        }
        unreachable!("tries do not end")
    }
}

/// Kills one part after the other, in an order that is drawn again each time.
fn kill_parts(system: &Kubectl, kubectl: &Kubectl, agent: &Agent<'_>, is_sending: impl Fn() -> bool) -> InjectedFaults {
    let now = || u64::try_from(UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap();
    let seed = setting("AGENTLOOP_E2E_CHAOS_SEED").unwrap_or_else(now);
    eprintln!("the kills of this run have the seed {seed}");
    let mut random = Random::new(seed);
    let (mut faults, mut deck) = (InjectedFaults::default(), Vec::new());
    while is_sending() {
        // The rhythm of the kills is the test's own: nothing is waited for.
        std::thread::park_timeout(RHYTHM);
        faults.rounds += 1;
        if deck.is_empty() {
            deck = (0..PARTS.len()).collect();
        }
        let part = deck.swap_remove(random.index(deck.len()));
        let pod = match part {
            0 => kubectl.get("pod", POD),
            LEADER => leader_without_delay(system),
            _ => kubectl.get("pod", &agent.name),
        };
        match pod {
            Some(pod) if part == LEADER => faults.kill_leader(system, &pod),
            Some(pod) => faults.kill(kubectl, &pod, part),
            None => {}
        }
    }
    faults
}

/// What the journal says of the tasks, after the end.
struct JournalFindings {
    /// Id and text of each task, in the order of acceptance.
    offers: Vec<(String, String)>,
    /// Origin of each task, by its id.
    origins: BTreeMap<String, String>,
    /// Kind and id of each line that says that a task was accepted or started.
    changes: Vec<(String, String)>,
    /// Notes of the ends of tasks.
    ends: Vec<String>,
    /// Seconds from the acceptance of a task to its first model call.
    waits: Vec<f64>,
    undelivered: i64,
}

impl JournalFindings {
    fn after(agent: &Agent<'_>) -> Self {
        let journal = Connection::open(node::journal(agent.kubectl, &agent.name)).unwrap();
        let texts = |sql: &str| {
            let mut select = journal.prepare(sql).unwrap();
            let row = |row: &Row<'_>| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?));
            let rows = select.query_map([], row).unwrap();
            rows.map(Result::unwrap).collect::<Vec<_>>()
        };
        let waits = texts(
            "SELECT accepted.at, min(call.at) FROM journal accepted
             JOIN journal started ON started.kind = 'TaskStarted' AND started.note = accepted.note
             JOIN journal call ON call.kind = 'CallStarted' AND call.turn = started.turn
             WHERE accepted.kind = 'TaskAccepted' GROUP BY accepted.seq",
        );
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        let waits = waits.iter().map(|(from, to)| at(to).duration_since(at(from)));
        let mut waits: Vec<f64> = waits.map(|wait| wait.as_secs_f64()).collect();
        waits.sort_by(f64::total_cmp);
        let ends = texts("SELECT note, kind FROM journal WHERE kind = 'TaskEnded' ORDER BY seq");
        let undelivered = "SELECT count(*) FROM tasks WHERE undelivered = 1";
        Self {
            offers: texts("SELECT id, prompt FROM offers ORDER BY seq"),
            origins: texts("SELECT id, origin FROM offers").into_iter().collect(),
            changes: texts("SELECT kind, note FROM journal WHERE kind IN ('TaskAccepted', 'TaskStarted') ORDER BY seq"),
            ends: ends.into_iter().map(|(note, _)| note).collect(),
            waits,
            undelivered: journal.query_row(undelivered, [], |row| row.get(0)).unwrap(),
        }
    }

    fn say(&self, run: &str) {
        for percent in [50, 99] {
            if let Some(seconds) = self.waits.get(self.waits.len() * percent / 100) {
                let name = format!("{run}_accepted_to_first_call_p{percent}");
                figure(&name, format!("{:.0}", seconds * 1000.0), "ms");
            }
        }
    }

    fn judge(&self, sent: &BTreeMap<String, Sent>, accepted: &[ReceivedResponse], all: &[ReceivedResponse]) {
        let mut texts: Vec<&String> = self.offers.iter().map(|(_, text)| text).collect();
        for (name, _) in CLIENTS {
            for way in [TaskChannel::Webhook, TaskChannel::Request] {
                let mut its = texts
                    .iter()
                    .filter(|text| text.starts_with(name) && sent[**text].way == way);
                assert!(its.by_ref().is_sorted(), "the order of {name} by {way:?}");
            }
        }
        texts.sort();
        assert_eq!(texts, sent.keys().collect::<Vec<_>>(), "each was accepted once");
        let end = |response: &ReceivedResponse| {
            let (body, text) = (&response.body, |field: &str| {
                response.body[field].as_str().unwrap_or_default()
            });
            // Documented: kills that follow each other faster than the loop continues can hit one task three times.
            let is_crash = text("error").contains("the worker ended 3 times");
            assert!(body["outcome"] == "Completed" || is_crash, "{body}");
            format!("{}: {}", text("id"), text("outcome"))
        };
        let ends: Vec<String> = accepted.iter().map(end).collect();
        let failed = ends.iter().filter(|end| end.ends_with("Failed")).count();
        figure("tasks_failed_by_three_kills", failed, "tasks");
        assert!(failed * 100 <= ends.len(), "{failed} tasks failed");
        assert_eq!(
            self.ends, ends,
            "each has ended once, as its response says, and responses are in the order of the ends"
        );
        assert_eq!(self.waits.len(), sent.len(), "each had a call");
        let id = |response: &ReceivedResponse| response.body["id"].as_str().unwrap_or_default().to_owned();
        let answered: BTreeSet<String> = accepted.iter().map(id).collect();
        assert!(answered.iter().eq(self.origins.keys()), "each was answered");
        self.judge_turns();
        let mut bodies: BTreeMap<&str, &Value> = BTreeMap::new();
        for response in all {
            assert!(response.key.ends_with(&id(response)), "{response:?}");
            let first = bodies.entry(&response.key).or_insert(&response.body);
            assert_eq!(**first, response.body, "another response under the same key");
        }
        assert_eq!(self.undelivered, 0);
    }

    /// Of the origins with tasks that wait, the one whose last task was started longest ago is next, and of its tasks the first.
    fn judge_turns(&self) {
        let (mut waiting, mut served) = (Vec::new(), Vec::new());
        for (kind, id) in &self.changes {
            if kind == "TaskAccepted" {
                waiting.push(id);
                continue;
            }
            let staleness = |id: &&String| served.iter().position(|origin| *origin == &self.origins[*id]);
            let next = (0..waiting.len()).min_by_key(|place| (staleness(&waiting[*place]), *place));
            let next = waiting.remove(next.unwrap_or_else(|| panic!("{id} was started and not accepted")));
            assert_eq!(next, id, "started in turn");
            served.retain(|origin| *origin != &self.origins[id]);
            served.push(&self.origins[id]);
        }
        assert_eq!(served.len(), 1 + 2, "the Sensor, and two users who send requests");
    }
}

fn say_kills(faults: &InjectedFaults, sent: &BTreeMap<String, Sent>) {
    let kills = faults.kills.map(|kills| kills.to_string()).join("/");
    figure("task_chaos_kills_sensor_leader_worker_gateway", kills, "kills");
    figure("task_chaos_pods_deleted", faults.pods, "pods");
    let again: usize = sent.values().map(|sent| sent.tries - 1).sum();
    figure("task_chaos_posted_again", again, "posts");
}

fn say_rate(run: &str, count: usize, took: Duration) {
    figure(&format!("{run}_tasks"), count, "tasks");
    let tasks = f64::from(u32::try_from(count).unwrap());
    let rate = format!("{:.1}", tasks / took.as_secs_f64());
    figure(&format!("{run}_rate"), rate, "tasks/s");
}
