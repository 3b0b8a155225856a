//! Numbered webhooks through one Sensor to three Agents while its pod, the leader, workers and gateways are killed and
//! frozen at random: each number that was answered 2xx has one effect in each receiver, and each sender's order is kept.
//!
//! `AGENTLOOP_E2E_CHAOS_SECONDS` says for how long (30), `AGENTLOOP_E2E_CHAOS_SEED` replays what was hit in which order.

use std::collections::{BTreeMap, BTreeSet};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant, UNIX_EPOCH};

use pretty_assertions::assert_eq;
use rusqlite::Connection;
use serde_json::{Value, json};

use super::agents::{Agent, script, scripted};
use super::budget_chaos::{kill_pod, leading};
use super::cluster::{Namespace, SettingsGuard, alone, figure};
use super::node::{self, Frozen};
use super::process_chaos::restarts;
use super::sensor_pods::{KEY, POD, SENSORS, Sender, until_listening};
use crate::support::kubectl::Kubectl;
use crate::support::random::Random;

/// Who has five minutes gets all of them, however long a busy machine takes; in less, as many as fit are sent.
const EVENTS: i64 = 10_000;
/// Seconds from which on all are sent, and the longest time that this takes.
const ALL: (u64, u64) = (300, 1_200);
/// Senders, each of which waits for the answer to one number before it sends its next one.
const LANES: usize = 8;
/// Seconds of the leader's Lease, and after how many it is renewed: short, and long enough for a machine that is busy.
pub const LEASE: (u64, u64) = (6, 2);
/// Longest time of a process that stands still, in milliseconds: a leader may lose its Lease in it.
const FREEZE: i64 = 8_000;
/// Milliseconds between two blows.
const RHYTHM: (i64, i64) = (1_000, 4_000);
/// How long it may take until every receiver has every event.
const CALM_SECONDS: u64 = 300;

/// Parts and the roles of their processes.
pub const PARTS: [&str; 4] = ["sensor", "controller", "worker", "gateway"];
/// The leader among them: with its pod goes the kubelet's delay.
pub const LEADER: usize = 1;
/// Part, and whether it is frozen, of each blow; when all were drawn, they are shuffled again.
const DECK: [(usize, bool); 12] = [
    (0, false),
    (0, false),
    (0, true),
    (1, false),
    (1, true),
    (2, false),
    (2, false),
    (2, true),
    (2, true),
    (3, false),
    (3, false),
    (3, true),
];

/// A table of the test's own in a receiver's journal, filled by SQLite in the very transaction in which an event takes
/// effect: which number the newest notification has then, and when that was. A worker never reads it.
const WITNESS: &str = "
CREATE TABLE effects (id INTEGER PRIMARY KEY, seq INTEGER NOT NULL, at REAL NOT NULL, text TEXT);
CREATE TRIGGER first_effect AFTER INSERT ON deliveries BEGIN
    INSERT INTO effects (seq, at) VALUES (new.seq, unixepoch('now', 'subsec'));
END;
CREATE TRIGGER effect AFTER UPDATE ON deliveries BEGIN
    INSERT INTO effects (seq, at) VALUES (new.seq, unixepoch('now', 'subsec'));
END;
CREATE TRIGGER effect_text AFTER UPDATE ON kv WHEN new.key = 'snapshot' BEGIN
    UPDATE effects SET text = json_extract(new.value, '$.inbox.waiting[#-1].text')
    WHERE id = (SELECT max(id) FROM effects) AND text IS NULL;
END;
";

#[test]
fn each_of_ten_thousand_webhooks_takes_effect_once_per_agent_under_kills_and_freezes() {
    let Some(cluster) = alone() else { return };
    let seconds = setting("AGENTLOOP_E2E_CHAOS_SECONDS").unwrap_or(30);
    let _short = SettingsGuard::short_lease(&cluster.system, LEASE);
    let namespace = Namespace::new(&cluster.system, "sensor-chaos");
    let kubectl = &namespace.kubectl;
    let agents = receivers(&namespace);
    kubectl.apply(&sensor());
    until_listening(kubectl);

    let sender = Sender::of(kubectl);
    let (begun, long) = (Instant::now(), Duration::from_secs(seconds));
    let (sent, faults) = std::thread::scope(|scope| {
        let start = |lane| {
            let sender = &sender;
            scope.spawn(move || send(sender, lane, long))
        };
        let lanes: Vec<_> = (0..LANES).map(start).collect();
        let is_sending = || !lanes.iter().all(ScopedJoinHandle::is_finished);
        let faults = inject_faults(&cluster.system, kubectl, &agents, is_sending);
        let sent = lanes.into_iter().flat_map(|lane| lane.join().unwrap());
        (sent.collect::<BTreeMap<_, _>>(), faults)
    });
    let (took, ended) = (begun.elapsed(), Instant::now());
    let all = i64::try_from(sent.len()).unwrap();
    let status = kubectl.until("all have everything", CALM_SECONDS, SENSORS, "orders", |sensor| {
        let status = &sensor["status"];
        (status["events"] == all && status["pendingDeliveries"] == 0).then(|| status.clone())
    });
    let calmed = ended.elapsed();
    for agent in &agents {
        agent.suspend(true);
    }
    let found: Vec<_> = agents.iter().map(JournalFindings::after).collect();
    report_faults(&faults);
    say_events(&sent, took, calmed);
    say_effects(&found, &sent);
    assert_eq!(status["dropped"].as_i64().unwrap_or(0), 0, "no limit was in the way");
    for receiver in &found {
        receiver.judge(&sent);
        // The order among senders is the Sensor's.
        assert_eq!(receiver.numbers, found[0].numbers, "{}", receiver.name);
    }
    let (floor, strikes) = (seconds * 5, faults.kills.iter().chain(&faults.freezes).sum::<usize>());
    assert!(sent.len() as u64 >= floor, "{all} events: nearly nothing went on");
    assert!(seconds < ALL.0 || all == EVENTS, "{all} events in {took:?}");
    assert!(strikes * 2 >= faults.rounds && faults.rounds >= 4, "{faults:?}");
}

/// A setting of a test, from the environment.
pub fn setting(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}

/// Three Agents whose loops turn all the time, each with a witness in its journal.
fn receivers(namespace: &Namespace) -> Vec<Agent<'_>> {
    let turn = json!({"text": "I look.", "delayMilliseconds": 400});
    namespace.kubectl.apply(&script("looks", &json!({"turns": [turn]})));
    let spec = json!({
        "hotState": {"fields": [{"name": "newest", "type": "Number"}]},
        "loop": {"minDelayMilliseconds": 1, "maxConsecutiveErrors": 20},
        "guardrails": {"maxConsecutiveTurns": 10_000, "idleTimeoutSeconds": 86_400},
        "model": {"contextTokens": 20_000},
    });
    let apply = |name| Agent::apply(namespace, name, &scripted("looks"), &spec);
    let agents: Vec<_> = ["one", "two", "three"].map(apply).into();
    for agent in &agents {
        agent.until_turns(1, 240);
        agent.suspend(true);
    }
    for agent in &agents {
        agent.stop(120);
        let journal = Connection::open(node::journal(agent.kubectl, &agent.name)).unwrap();
        journal.execute_batch(WITNESS).unwrap();
        drop(journal);
        agent.suspend(false);
    }
    for agent in &agents {
        agent.until_pod(None, 120);
    }
    agents
}

/// Each event writes a field and gives a notification.
fn sensor() -> String {
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "orders"},
        "stringData": {"webhook": KEY}});
    let webhook = json!({"scheme": "GitHub", "secretKeyRef": {"name": "orders", "key": "webhook"}});
    let sensor = json!({"apiVersion": "agentloop.dev/v1alpha1", "kind": "Sensor", "metadata": {"name": "orders"}, "spec": {
        "agentNames": ["one", "two", "three"], "source": {"webhook": webhook},
        "updates": [{"field": "newest", "value": "payload.n"}],
        "notification": {"text": "string(payload.n)"},
        "limits": {"perMinute": 60_000},
    }});
    json!({"apiVersion": "v1", "kind": "List", "items": [secret, sensor]}).to_string()
}

/// A number that was taken.
#[derive(Clone, Copy, Debug)]
struct Sent {
    /// When it was sent for the first time, in seconds since 1970.
    at: f64,
    tries: usize,
    /// The answer was 200, since that to an earlier try got lost.
    known: bool,
}

/// Every `LANES`th number, in order, each until it is taken.
fn send(sender: &Sender, lane: usize, long: Duration) -> Vec<(i64, Sent)> {
    let begun = Instant::now();
    // In four fifths of the time: the last one makes up for what was down.
    let pace = long.mul_f64(0.8) / u32::try_from(EVENTS).unwrap();
    let most = if long.as_secs() < ALL.0 {
        long
    } else {
        Duration::from_secs(ALL.1)
    };
    let mut sent = Vec::new();
    for number in (1..=EVENTS).skip(lane).step_by(LANES) {
        let due = pace * u32::try_from(number).unwrap();
        // The pace of the senders is the test's own: nothing is waited for.
        std::thread::park_timeout(due.saturating_sub(begun.elapsed()));
        if begun.elapsed() > most {
            break;
        }
        sent.push((number, until_taken(sender, number)));
    }
    sent
}

fn until_taken(sender: &Sender, number: i64) -> Sent {
    let at = UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
    let deadline = Instant::now() + Duration::from_secs(CALM_SECONDS);
    let body = json!({"n": number}).to_string();
    for tries in 1.. {
        let status = sender.post(KEY, &number.to_string(), &body);
        match status {
            Some(202) => {
                return Sent {
                    at,
                    tries,
                    known: false,
                };
            }
            Some(200) => {
                assert!(tries > 1, "{number} is said to be known, and was never sent before");
                return Sent { at, tries, known: true };
            }
            Some(status @ (400..=403 | 413 | 429)) => panic!("{number} is refused: {status}"),
            // Not reachable, or the event could not be stored.
            _ => assert!(Instant::now() < deadline, "{number} is not taken: {status:?}"),
        }
        std::thread::park_timeout(Duration::from_millis(100));
    }
    unreachable!("tries do not end")
}

/// What was hit how often, by part.
#[derive(Debug, Default)]
pub struct InjectedFaults {
    pub kills: [usize; PARTS.len()],
    freezes: [usize; PARTS.len()],
    /// Pods that were deleted with the process killed in them.
    pub pods: usize,
    /// How often a part was chosen; one that is being restarted is not hit.
    pub rounds: usize,
}

/// Kills and freezes while the senders send; then everything continues.
fn inject_faults(
    system: &Kubectl,
    kubectl: &Kubectl,
    agents: &[Agent<'_>],
    is_sending: impl Fn() -> bool,
) -> InjectedFaults {
    let now = || u64::try_from(UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap();
    let seed = setting("AGENTLOOP_E2E_CHAOS_SEED").unwrap_or_else(now);
    eprintln!("the blows of this run have the seed {seed}");
    let mut random = Random::new(seed);
    let (mut faults, mut deck, mut frozen) = (InjectedFaults::default(), Vec::new(), Vec::new());
    while is_sending() {
        faults.rounds += 1;
        if deck.is_empty() {
            deck = DECK.to_vec();
        }
        let (part, freezes) = deck.swap_remove(random.index(deck.len()));
        let agent = &agents[random.index(agents.len())];
        let mut milliseconds = |from, to| Duration::from_millis(random.range(from, to).cast_unsigned());
        let (still, pause) = (milliseconds(500, FREEZE), milliseconds(RHYTHM.0, RHYTHM.1));
        let pod = match part {
            0 => kubectl.get("pod", POD),
            LEADER => leader_without_delay(system),
            _ => kubectl.get("pod", &agent.name),
        };
        match pod {
            Some(pod) if freezes => {
                let process = Frozen::of(&pod, PARTS[part]);
                faults.freezes[part] += usize::from(process.is_some());
                frozen.extend(process.map(|process| (Instant::now() + still, process)));
            }
            Some(pod) if part == LEADER => faults.kill_leader(system, &pod),
            Some(pod) => faults.kill(kubectl, &pod, part),
            None => {}
        }
        // The rhythm of the blows is the test's own: nothing is waited for.
        std::thread::park_timeout(pause);
        frozen.retain(|(until, _)| *until > Instant::now());
    }
    faults
}

/// The replica that leads. A leader that stood still for too long ends, and the kubelet lets it wait longer each time; a new
/// pod need not.
pub fn leader_without_delay(system: &Kubectl) -> Option<Value> {
    for pod in system.list("pods", "app.kubernetes.io/component=controller") {
        let waits = pod["status"]["containerStatuses"][0]["state"]["waiting"].is_object();
        if waits && restarts(&pod) > 0 {
            delete(system, &pod);
        }
    }
    leading(system)
}

fn delete(kubectl: &Kubectl, pod: &Value) {
    let name = pod["metadata"]["name"].as_str().expect("a pod has a name");
    kubectl.run(&["delete", "pod", name, "--grace-period=0", "--force", "--wait=false"]);
}

impl InjectedFaults {
    /// SIGKILL to the leader, and deletion of its pod.
    pub fn kill_leader(&mut self, system: &Kubectl, pod: &Value) {
        kill_pod(system, pod);
        self.kills[LEADER] += 1;
    }

    /// SIGKILL to a part in a pod.
    pub fn kill(&mut self, kubectl: &Kubectl, pod: &Value, part: usize) {
        self.kills[part] += usize::from(node::strike(pod, PARTS[part], "KILL").is_some());
        // A container that was killed before is started with a delay that grows; a new pod has none.
        if restarts(pod) > 0 {
            delete(kubectl, pod);
            self.pods += 1;
        }
    }
}

/// What a receiver's journal says of the events, after its end.
struct JournalFindings {
    name: String,
    /// Numbers in the order in which they took effect, and when each did.
    numbers: Vec<i64>,
    at: Vec<f64>,
    sensed: i64,
    notified: i64,
    /// Notifications beyond what may wait for the loop's next turns.
    dropped: i64,
    newest: Value,
}

impl JournalFindings {
    fn after(agent: &Agent<'_>) -> Self {
        agent.stop(120);
        let journal = Connection::open(node::journal(agent.kubectl, &agent.name)).unwrap();
        let mut select = journal.prepare("SELECT text, at FROM effects ORDER BY id").unwrap();
        let row = |row: &rusqlite::Row<'_>| Ok((row.get::<_, Option<String>>(0)?, row.get::<_, f64>(1)?));
        let effects = select.query_map([], row).unwrap().map(Result::unwrap);
        let number = |text: Option<String>| text.and_then(|text| text.parse::<i64>().ok());
        let effects = effects.map(|(text, at)| (number(text).expect("an effect has a number"), at));
        let (numbers, at) = effects.unzip();
        let sum = |what: &str, kind: &str| {
            let sql = format!("SELECT {what} FROM journal WHERE kind = ?1");
            journal.query_row(&sql, [kind], |row| row.get::<_, i64>(0)).unwrap()
        };
        let memory = "SELECT memory FROM deliveries";
        let memory: String = journal.query_row(memory, [], |row| row.get(0)).unwrap();
        let memory: Value = serde_json::from_str(&memory).unwrap();
        Self {
            name: agent.name.clone(),
            numbers,
            at,
            sensed: sum("count(*)", "SensorUpdated"),
            notified: sum("count(*)", "Notified"),
            // The note begins with their number.
            dropped: sum("coalesce(sum(CAST(note AS INTEGER)), 0)", "NotificationDropped"),
            newest: memory["values"]["newest"]["value"].clone(),
        }
    }

    /// Numbers that took effect more than once.
    fn doubled(&self) -> Vec<i64> {
        let mut seen = BTreeSet::new();
        let again = self.numbers.iter().filter(|number| !seen.insert(**number));
        again.copied().collect()
    }

    /// Numbers that were taken and never took effect.
    fn missing(&self, sent: &BTreeMap<i64, Sent>) -> Vec<i64> {
        let had: BTreeSet<_> = self.numbers.iter().collect();
        sent.keys().filter(|number| !had.contains(number)).copied().collect()
    }

    fn judge(&self, sent: &BTreeMap<i64, Sent>) {
        let (name, all) = (&self.name, i64::try_from(sent.len()).unwrap());
        assert_eq!(
            (self.doubled(), self.missing(sent)),
            (vec![], vec![]),
            "{name}: twice, and never"
        );
        assert_eq!(self.numbers.len(), sent.len(), "{name}: nothing that nobody sent");
        let lanes = i64::try_from(LANES).unwrap();
        for lane in 0..lanes {
            let its = self.numbers.iter().filter(|number| **number % lanes == lane);
            assert!(its.is_sorted(), "{name}: the order of sender {lane}");
        }
        assert_eq!((self.sensed, self.notified), (all, all), "{name}: lines of the journal");
        let last = self.numbers.last().copied();
        assert_eq!(self.newest.as_i64(), last, "{name}: the hot state");
    }
}

fn report_faults(faults: &InjectedFaults) {
    let kills = faults.kills.map(|kills| kills.to_string()).join("/");
    figure("sensor_chaos_kills_sensor_leader_worker_gateway", kills, "kills");
    figure("sensor_chaos_pods_deleted", faults.pods, "pods");
    let freezes = faults.freezes.map(|freezes| freezes.to_string()).join("/");
    figure("sensor_chaos_freezes_sensor_leader_worker_gateway", freezes, "freezes");
}

fn say_events(sent: &BTreeMap<i64, Sent>, took: Duration, calmed: Duration) {
    let again: usize = sent.values().map(|sent| sent.tries - 1).sum();
    let known = sent.values().filter(|sent| sent.known).count();
    figure("sensor_chaos_events", sent.len(), "events");
    let count = f64::from(u32::try_from(sent.len()).unwrap());
    figure(
        "sensor_chaos_rate",
        format!("{:.1}", count / took.as_secs_f64()),
        "events/s",
    );
    figure("sensor_chaos_sent_again", again, "requests");
    figure("sensor_chaos_answers_lost_after_taking", known, "events");
    figure(
        "sensor_chaos_all_have_everything_after",
        format!("{:.1}", calmed.as_secs_f64()),
        "s",
    );
}

fn say_effects(found: &[JournalFindings], sent: &BTreeMap<i64, Sent>) {
    let sum = |of: &dyn Fn(&JournalFindings) -> usize| found.iter().map(of).sum::<usize>();
    figure("sensor_chaos_effects", sum(&|found| found.numbers.len()), "effects");
    figure("sensor_chaos_doubled", sum(&|found| found.doubled().len()), "effects");
    figure(
        "sensor_chaos_missing",
        sum(&|found| found.missing(sent).len()),
        "effects",
    );
    let dropped: i64 = found.iter().map(|found| found.dropped).sum();
    figure(
        "sensor_chaos_notifications_beyond_what_may_wait",
        dropped,
        "notifications",
    );
    let took = |found: &JournalFindings| {
        let effects = found.numbers.iter().zip(&found.at);
        let took = effects.filter_map(|(number, at)| Some(at - sent.get(number)?.at));
        took.collect::<Vec<_>>()
    };
    let mut took: Vec<f64> = found.iter().flat_map(took).collect();
    took.sort_by(f64::total_cmp);
    for percent in [50, 99] {
        if let Some(seconds) = took.get(took.len() * percent / 100) {
            let name = format!("sensor_chaos_sent_to_effect_p{percent}");
            figure(&name, format!("{seconds:.2}"), "s");
        }
    }
}
