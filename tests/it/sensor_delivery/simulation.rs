//! A Sensor's pod, the network, and three receivers; one schedule from a seed.

use agentloop::api::SensorSpec;
use agentloop::link::deliveries::{Delivery, DeliveryAck};
use agentloop::sensor_pipeline::rules::SensorRules;
use agentloop::sensor_pipeline::source::{ArrivalOutcome, RepeatRule, SourceCursor, SourceMessage};
use agentloop::sensor_pod::deliverer::{SharedOutbox, WatchedOutbox};
use agentloop::sensor_pod::ingest::EventIngester;
use agentloop::sensor_pod::outbox::{self, AckOutcome, Outbox, OutboxError};
use jiff::{SignedDuration, Timestamp};
use serde_json::json;
use tempfile::TempDir;

use super::receiver::Receiver;
use crate::support::random::Random;

const UID: &str = "uid";
const RECEIVERS: usize = 3;
/// Bytes of one message.
const MAX_EVENTS_READ: usize = 4096;

/// What is on its way.
#[derive(Clone)]
enum InTransit {
    Delivery(usize, Delivery),
    Word(usize, DeliveryAck),
}

pub struct SensorSimulation {
    random: Random,
    now: Timestamp,
    dir: TempDir,
    pod: Option<(EventIngester, SharedOutbox)>,
    /// By how much the pod's clock is ahead of the right time.
    off: SignedDuration,
    /// The number of the next event, which its sender repeats until it was taken.
    next: i64,
    /// The next event may be on disk: its sender does not know.
    unanswered: bool,
    /// Events up to this one no longer count as repeats: their record is lost.
    forgotten: i64,
    /// The sender's ids start again with this one.
    source: i64,
    /// An earlier state of the volume.
    snapshot: Option<TempDir>,
    most: i64,
    mail: Vec<InTransit>,
    receivers: Vec<Receiver>,
    kills: usize,
}

fn rules() -> SensorRules {
    // Every third event needs no score.
    let spec: SensorSpec = serde_json::from_value(json!({
        "agentNames": ["a"],
        "source": {"schedule": {"cron": "* * * * *"}},
        "notification": {"text": "string(payload.n)"},
        "signals": [{
            "name": "storm", "when": "payload.n % 3 != 0", "model": {"prompt": "A storm?"}, "priority": "High",
        }],
        "limits": {"perMinute": 60_000},
    }))
    .unwrap();
    SensorRules::compile("buoy", &spec).unwrap()
}

/// Notifications of an event: see [`rules`] and the scores of receivers.
fn notices(n: i64) -> usize {
    usize::from(n % 3 != 0 && n % 4 != 0)
}

/// In memory where the system has a place for that: syncing costs nothing there.
fn volume() -> TempDir {
    tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .unwrap()
}

fn copy(dir: &TempDir) -> TempDir {
    let copy = volume();
    for entry in std::fs::read_dir(dir.path()).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    copy
}

fn uid(place: usize) -> String {
    format!("agent-{place}")
}

impl SensorSimulation {
    pub fn new(seed: u64) -> Self {
        let now = Timestamp::from_second(1_767_596_400).unwrap();
        let mut random = Random::new(seed);
        // Sometimes more than a memory of a few hundred ids would hold.
        let most = if random.percent(1) { 300 } else { random.range(3, 33) };
        Self {
            random,
            now,
            dir: volume(),
            pod: None,
            off: SignedDuration::ZERO,
            next: 1,
            unanswered: false,
            forgotten: 0,
            source: 0,
            snapshot: None,
            most,
            mail: Vec::new(),
            receivers: (0..RECEIVERS).map(|_| Receiver::new(now)).collect(),
            kills: 0,
        }
    }

    /// Events, effects, scores and kills.
    pub fn run(mut self) -> [usize; 4] {
        let steps = self.random.range(50, 450) + 5 * (self.most - 33).max(0);
        for _ in 0..steps {
            self.step();
        }
        self.heal();
        self.judge()
    }

    fn outbox(&mut self) -> SharedOutbox {
        let (dir, now, source) = (self.dir.path(), self.now + self.off, self.source);
        let (_, shared) = self.pod.get_or_insert_with(|| {
            let (mut outbox, restored) = loop {
                // A process that another test starts at this moment holds the lock of the killed one until it has become
                // its program.
                match Outbox::open(dir, UID, now) {
                    Err(OutboxError::Locked { .. }) => std::thread::yield_now(),
                    opened => break opened.unwrap(),
                }
            };
            let receivers: Vec<_> = (0..RECEIVERS)
                .map(|place| outbox::EventReceiver {
                    uid: uid(place),
                    name: uid(place),
                })
                .collect();
            outbox.set_receivers(&receivers, now).unwrap();
            let shared = WatchedOutbox::share(outbox, restored.last);
            let mut keeper = EventIngester::new(shared.clone(), restored, rules());
            keeper.set_source(&source.to_string()).unwrap();
            (keeper, shared)
        });
        shared.clone()
    }

    fn step(&mut self) {
        let receiver = self.random.index(RECEIVERS);
        match self.random.index(36) {
            0..5 => self.hear(true),
            5..10 => self.send(receiver),
            10..18 => self.carry(),
            18..22 => {
                let receiver = &mut self.receivers[receiver];
                if !receiver.frozen {
                    receiver.answer(self.now, &mut self.random, true);
                }
            }
            22 | 23 => {
                let seconds = self.random.range(1, 21);
                self.pass(seconds);
            }
            24 => self.pass(600),
            25 => {
                self.pod = None;
                self.kills += 1;
            }
            26 => self.receivers[receiver].kill(self.now),
            // The leader dies, with all that is on its way.
            27 => {
                self.mail.clear();
                self.kills += 1;
            }
            28 => self.receivers[receiver].frozen ^= true,
            29 => self.repeat(),
            30 => self.lie(receiver),
            31 => self.lose(),
            32 => self.keep(),
            33 => self.go_back(),
            34 => self.listen_elsewhere(),
            _ => {
                if !self.mail.is_empty() {
                    let place = self.random.index(self.mail.len());
                    self.mail.swap_remove(place);
                }
            }
        }
    }

    /// The sender sends its event, and continues to the next one when it was taken; the answer may get lost.
    fn hear(&mut self, may_get_lost: bool) {
        if self.next > self.most {
            return;
        }
        let taken = self.give(self.next);
        let expected = if self.unanswered {
            ArrivalOutcome::Known
        } else {
            ArrivalOutcome::OnDisk
        };
        assert_eq!(taken, expected, "{}", self.next);
        self.unanswered = may_get_lost && self.random.percent(20);
        if !self.unanswered {
            self.next += 1;
        }
    }

    /// The event with this number arrives. Its sender sometimes counts from 1 again, as servers of streams do.
    fn give(&mut self, n: i64) -> ArrivalOutcome {
        let heard = SourceMessage {
            id: Some(format!("id-{}", n % 7)),
            payload: json!({"n": n}).to_string().into_bytes(),
            cursor: SourceCursor {
                last_event_id: Some(n.to_string()),
                ..SourceCursor::default()
            },
            repeat: RepeatRule::IdAndText,
        };
        let _ = self.outbox();
        let (keeper, _) = self.pod.as_mut().unwrap();
        keeper.ingest(&heard, self.now + self.off).unwrap()
    }

    /// The sender sends an old event again, however many came after it.
    fn repeat(&mut self) {
        if self.next - 1 > self.forgotten {
            let n = self.random.range(self.forgotten + 1, self.next);
            assert_eq!(self.give(n), ArrivalOutcome::Known, "{n}");
        }
    }

    /// Whether each receiver has acknowledged all events, and the sender knows the outcome of each: a loss of the volume now
    /// loses nothing.
    fn is_quiet(&mut self) -> bool {
        let pending = self.outbox().lock().pending().unwrap();
        !self.unanswered && pending.values().all(|pending| *pending == 0)
    }

    /// A receiver acknowledges events that never existed.
    fn lie(&mut self, receiver: usize) {
        if !self.is_quiet() {
            return;
        }
        let outbox = self.outbox().lock().id_for(&uid(receiver)).unwrap();
        let through = if self.random.percent(50) {
            i64::MAX
        } else {
            self.now.as_millisecond() * 2
        };
        let word = DeliveryAck {
            sensor: UID.into(),
            outbox,
            through,
        };
        let meant = self
            .outbox()
            .lock()
            .acknowledge(&uid(receiver), &word.outbox, word.through);
        assert_eq!(meant.unwrap(), AckOutcome::Ahead);
    }

    /// The volume is lost, and the next pod runs where the clock shows another time.
    fn lose(&mut self) {
        if self.is_quiet() {
            self.pod = None;
            self.dir = volume();
            self.snapshot = None;
            self.off = SignedDuration::from_secs(self.random.range(0, 7_200) - 3_600);
            self.forgotten = self.next - 1;
            self.kills += 1;
        }
    }

    /// A snapshot of the volume is taken.
    fn keep(&mut self) {
        if self.is_quiet() {
            self.pod = None;
            self.snapshot = Some(copy(&self.dir));
        }
    }

    /// The volume is restored to its earlier state.
    fn go_back(&mut self) {
        if self.snapshot.is_some() && self.is_quiet() {
            self.pod = None;
            self.dir = self.snapshot.take().unwrap();
            self.forgotten = self.next - 1;
            self.kills += 1;
        }
    }

    /// The spec names another source.
    fn listen_elsewhere(&mut self) {
        if !self.unanswered {
            self.source += 1;
            let _ = self.outbox();
            let (keeper, _) = self.pod.as_mut().unwrap();
            keeper.set_source(&self.source.to_string()).unwrap();
            assert_eq!(*keeper.cursor(), SourceCursor::default());
            self.forgotten = self.next - 1;
        }
    }

    fn send(&mut self, receiver: usize) {
        let outbox = self.outbox();
        let outbox = outbox.lock();
        let events = outbox.next(&uid(receiver), MAX_EVENTS_READ).unwrap();
        if !events.is_empty() {
            let delivery = Delivery {
                sensor: UID.into(),
                name: "buoy".into(),
                receiver: uid(receiver),
                outbox: outbox.id_for(&uid(receiver)).unwrap(),
                per_minute: None,
                events,
            };
            self.mail.push(InTransit::Delivery(receiver, delivery));
        }
    }

    /// Something that is on its way arrives, in any order, and perhaps again later.
    fn carry(&mut self) {
        if self.mail.is_empty() {
            return;
        }
        let place = self.random.index(self.mail.len());
        let mail = if self.random.percent(25) {
            self.mail[place].clone()
        } else {
            self.mail.swap_remove(place)
        };
        match mail {
            InTransit::Delivery(place, delivery) => {
                let receiver = &mut self.receivers[place];
                if receiver.frozen {
                    self.mail.push(InTransit::Delivery(place, delivery));
                } else if let Some(word) = receiver.take(self.now, &delivery, &mut self.random) {
                    self.mail.push(InTransit::Word(place, word));
                }
            }
            InTransit::Word(place, word) => {
                let outbox = self.outbox();
                let meant = outbox.lock().acknowledge(&uid(place), &word.outbox, word.through);
                let _ = meant.unwrap();
            }
        }
    }

    fn pass(&mut self, seconds: i64) {
        self.now += SignedDuration::from_secs(seconds);
        for receiver in self.receivers.iter_mut().filter(|receiver| !receiver.frozen) {
            receiver.advance(self.now, &mut self.random);
        }
    }

    /// Nothing fails any more, except that a worker sometimes dies: all events must arrive.
    fn heal(&mut self) {
        while self.next <= self.most {
            self.hear(false);
        }
        for receiver in &mut self.receivers {
            receiver.frozen = false;
        }
        for _ in 0..2_000 {
            let waits = |simulation: &mut Self| {
                simulation
                    .outbox()
                    .lock()
                    .pending()
                    .unwrap()
                    .values()
                    .any(|pending| *pending > 0)
            };
            if !waits(self) && !self.receivers.iter().any(|receiver| receiver.is_busy(self.now)) {
                return;
            }
            for place in 0..RECEIVERS {
                self.send(place);
                self.carry();
                self.carry();
                self.receivers[place].answer(self.now, &mut self.random, false);
            }
            self.pass(20);
        }
        panic!("it stands still");
    }

    fn judge(&self) -> [usize; 4] {
        let events: Vec<i64> = (1..=self.most).collect();
        let mut scores = 0;
        for receiver in &self.receivers {
            let applied = receiver.applied();
            let given: Vec<usize> = applied.iter().map(|(_, notices)| *notices).collect();
            let expected: Vec<usize> = events.iter().map(|n| notices(*n)).collect();
            assert_eq!(given, expected, "{applied:?}");
            let numbered = |id: &str| {
                let (outbox, seq) = id.rsplit_once('/').unwrap();
                (outbox.to_owned(), seq.parse::<i64>().unwrap())
            };
            let numbers: Vec<_> = applied.iter().map(|(id, _)| numbered(id)).collect();
            let in_order = |one: &(String, i64), other: &(String, i64)| one.0 != other.0 || one.1 < other.1;
            assert!(numbers.is_sorted_by(in_order), "{numbers:?}");
            assert!(receiver.paid().values().all(|paid| *paid == 1), "{:?}", receiver.paid());
            let asked = events.iter().filter(|n| **n % 3 != 0).count();
            assert_eq!(receiver.paid().len(), asked);
            scores += asked;
        }
        let kills = self.kills + self.receivers.iter().map(|receiver| receiver.kills).sum::<usize>();
        [events.len(), events.len() * RECEIVERS, scores, kills]
    }
}
