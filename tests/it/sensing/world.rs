//! A Sensor's pod, the road, and three receivers; one schedule from a seed.

use agentloop::api::SensorSpec;
use agentloop::link::deliveries::Delivery;
use agentloop::sensing::rules::Rules;
use agentloop::sensing::source::{Cursor, Heard, Taken};
use agentloop::sensor::deliverer::{Shared, Shelf};
use agentloop::sensor::keeper::Keeper;
use agentloop::sensor::outbox::{self, Outbox, OutboxError};
use jiff::{SignedDuration, Timestamp};
use serde_json::json;
use tempfile::TempDir;

use super::receiver::Receiver;
use crate::support::random::Random;

const UID: &str = "uid";
const RECEIVERS: usize = 3;
/// Bytes of one message.
const MOST: usize = 4096;

/// What is on its way.
#[derive(Clone)]
enum Mail {
    Delivery(usize, Delivery),
    Word(usize, i64),
}

pub struct World {
    random: Random,
    now: Timestamp,
    dir: TempDir,
    pod: Option<(Keeper, Shared)>,
    /// The number of the next event, which its sender repeats until it was taken.
    next: i64,
    most: i64,
    mail: Vec<Mail>,
    receivers: Vec<Receiver>,
    kills: usize,
}

fn rules() -> Rules {
    // Every third event is nothing to ask about.
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
    Rules::compile("buoy", &spec).unwrap()
}

/// Notifications of an event: see [`rules`] and the scores of receivers.
fn notices(n: i64) -> usize {
    usize::from(n % 3 != 0 && n % 4 != 0)
}

fn uid(place: usize) -> String {
    format!("agent-{place}")
}

impl World {
    pub fn new(seed: u64) -> Self {
        let now = Timestamp::from_second(1_767_596_400).unwrap();
        let mut random = Random::new(seed);
        let most = random.range(3, 33);
        Self {
            random,
            now,
            // In memory where the system has a place for that: syncing costs nothing there.
            dir: tempfile::tempdir_in("/dev/shm")
                .or_else(|_| tempfile::tempdir())
                .unwrap(),
            pod: None,
            next: 1,
            most,
            mail: Vec::new(),
            receivers: (0..RECEIVERS).map(|_| Receiver::new(now)).collect(),
            kills: 0,
        }
    }

    /// Events, effects, scores and kills.
    pub fn run(mut self) -> [usize; 4] {
        let steps = self.random.range(50, 450);
        for _ in 0..steps {
            self.step();
        }
        self.heal();
        self.judge()
    }

    fn outbox(&mut self) -> Shared {
        let (dir, now) = (self.dir.path(), self.now);
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
                .map(|place| outbox::Receiver {
                    uid: uid(place),
                    name: uid(place),
                })
                .collect();
            outbox.receive(&receivers).unwrap();
            let shared = Shelf::share(outbox, restored.last);
            (Keeper::new(shared.clone(), restored, rules()), shared)
        });
        shared.clone()
    }

    fn step(&mut self) {
        let receiver = self.random.index(RECEIVERS);
        match self.random.index(30) {
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
            _ => {
                if !self.mail.is_empty() {
                    let place = self.random.index(self.mail.len());
                    self.mail.swap_remove(place);
                }
            }
        }
    }

    /// The sender sends its event, and goes on to the next one when it was taken; the answer may get lost.
    fn hear(&mut self, may_get_lost: bool) {
        if self.next > self.most {
            return;
        }
        let heard = Heard {
            id: Some(format!("id-{}", self.next)),
            payload: json!({"n": self.next}).to_string().into_bytes(),
            cursor: Cursor::default(),
        };
        let _ = self.outbox();
        let (keeper, _) = self.pod.as_mut().unwrap();
        let taken = keeper.hear(&heard, self.now).unwrap();
        assert!(matches!(taken, Taken::OnDisk | Taken::Known), "{taken:?}");
        if !(may_get_lost && self.random.percent(20)) {
            self.next += 1;
        }
    }

    fn send(&mut self, receiver: usize) {
        let events = self.outbox().lock().next(&uid(receiver), MOST).unwrap();
        if !events.is_empty() {
            let delivery = Delivery {
                sensor: UID.into(),
                name: "buoy".into(),
                events,
            };
            self.mail.push(Mail::Delivery(receiver, delivery));
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
            Mail::Delivery(place, delivery) => {
                let receiver = &mut self.receivers[place];
                if receiver.frozen {
                    self.mail.push(Mail::Delivery(place, delivery));
                } else if let Some(through) = receiver.take(self.now, &delivery, &mut self.random) {
                    self.mail.push(Mail::Word(place, through));
                }
            }
            Mail::Word(place, through) => self.outbox().lock().acknowledge(&uid(place), through).unwrap(),
        }
    }

    fn pass(&mut self, seconds: i64) {
        self.now += SignedDuration::from_secs(seconds);
        for receiver in self.receivers.iter_mut().filter(|receiver| !receiver.frozen) {
            receiver.go_on(self.now, &mut self.random);
        }
    }

    /// Nothing more goes wrong but a worker that dies now and then: all must arrive.
    fn heal(&mut self) {
        while self.next <= self.most {
            self.hear(false);
        }
        for receiver in &mut self.receivers {
            receiver.frozen = false;
        }
        for _ in 0..2_000 {
            let waits = |world: &mut Self| {
                world
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
            let numbers: Vec<i64> = applied
                .iter()
                .map(|(id, _)| id[UID.len() + 1..].parse().unwrap())
                .collect();
            assert!(numbers.is_sorted_by(|one, other| one < other), "{numbers:?}");
            assert!(receiver.paid().values().all(|paid| *paid == 1), "{:?}", receiver.paid());
            let asked = events.iter().filter(|n| **n % 3 != 0).count();
            assert_eq!(receiver.paid().len(), asked);
            scores += asked;
        }
        let kills = self.kills + self.receivers.iter().map(|receiver| receiver.kills).sum::<usize>();
        [events.len(), events.len() * RECEIVERS, scores, kills]
    }
}
