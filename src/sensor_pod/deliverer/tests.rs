//! Numbered events to three receivers over a transport that loses, duplicates, delays and reorders messages, while
//! sensor pod, leader and receivers are killed and frozen: each receiver applies each number once, in order.

use std::path::Path;

use jiff::Timestamp;
use pretty_assertions::assert_eq;
use serde_json::json;
use tempfile::TempDir;
use tokio::time::timeout;

use super::*;
use crate::api::SensorSpec;
use crate::sensor_pipeline::rules::SensorRules;
use crate::sensor_pipeline::source::{ArrivalOutcome, RepeatRule, SourceCursor, SourceMessage};
use crate::sensor_pod::ingest::EventIngester;
use crate::sensor_pod::test_directory::dir;

const NAMES: [&str; 3] = ["a", "b", "c"];

/// What a receiver has on disk; both fields are written in one transaction.
#[derive(Clone, Debug, Default)]
struct Journal {
    through: HashMap<String, i64>,
    received: Vec<String>,
}

impl Journal {
    fn apply(&mut self, delivery: &Delivery) -> DeliveryAck {
        let through = self.through.entry(delivery.outbox.clone()).or_default();
        for event in &delivery.events {
            if event.seq > *through {
                *through = event.seq;
                let texts = event.notifications.iter().map(|notice| notice.text.clone());
                self.received.extend(texts);
            }
        }
        DeliveryAck {
            sensor: delivery.sensor.clone(),
            outbox: delivery.outbox.clone(),
            through: *through,
        }
    }
}

/// The receivers and the transport to them. Random, from a seed.
struct DelivererHarness {
    random: Mutex<u64>,
    journals: Mutex<HashMap<String, Journal>>,
    late: Mutex<Vec<DeliveryRequest>>,
    /// Number of injected faults, by kind.
    fates: Mutex<HashMap<&'static str, u64>>,
}

impl DelivererHarness {
    fn new(seed: u64) -> Arc<Self> {
        Arc::new(Self {
            random: Mutex::new(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1),
            journals: Mutex::default(),
            late: Mutex::default(),
            fates: Mutex::default(),
        })
    }

    fn below(&self, limit: u64) -> u64 {
        let mut state = self.random.lock().unwrap();
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        (*state >> 11) % limit
    }

    fn apply(&self, deliver: &DeliveryRequest) -> DeliveryAck {
        let mut journals = self.journals.lock().unwrap();
        journals
            .entry(deliver.receiver.clone())
            .or_default()
            .apply(&deliver.delivery)
    }

    fn fate(&self) -> &'static str {
        let fate = match self.below(20) {
            0 => "lost",
            1 => "answer lost",
            2 => "late",
            3 => "frozen",
            4 => "twice",
            5 => "behind an old one",
            6 => "killed before its commit",
            _ => "fine",
        };
        *self.fates.lock().unwrap().entry(fate).or_default() += 1;
        fate
    }
}

impl DeliveryTransport for DelivererHarness {
    async fn send(&self, deliver: &DeliveryRequest) -> Result<DeliveryAck, String> {
        // Every message takes some time, in which others are sent.
        sleep(Duration::from_micros(self.below(500))).await;
        match self.fate() {
            "lost" | "killed before its commit" => return Err("lost".into()),
            "answer lost" => {
                self.apply(deliver);
                return Err("no leader".into());
            }
            "late" => {
                self.late.lock().unwrap().push(deliver.clone());
                return Err("timeout".into());
            }
            "frozen" => sleep(Duration::from_secs(self.below(20))).await,
            "twice" => drop(self.apply(deliver)),
            "behind an old one" => {
                let late = std::mem::take(&mut *self.late.lock().unwrap());
                for old in &late {
                    self.apply(old);
                }
            }
            _ => {}
        }
        Ok(self.apply(deliver))
    }
}

/// A sensor pod: everything that dies together.
struct Pod {
    keeper: EventIngester,
    outbox: SharedOutbox,
    task: tokio::task::JoinHandle<OutboxError>,
    level: watch::Sender<Option<Vec<ReceiverTerms>>>,
}

impl Drop for Pod {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// These receivers, which a leader announces for the `revision`th time.
fn terms(names: &[&str], revision: u64) -> Vec<ReceiverTerms> {
    let terms = names.iter().map(|name| ReceiverTerms {
        uid: (*name).into(),
        name: (*name).into(),
        revision,
    });
    terms.collect()
}

impl Pod {
    fn start<R: DeliveryTransport + 'static>(dir: &Path, names: &[&str], road: &Arc<R>) -> Self {
        let (mut outbox, restored) = Outbox::open(dir, "uid", Timestamp::from_second(1_000).unwrap()).unwrap();
        let terms = terms(names, 0);
        outbox.set_receivers(&receivers(&terms), Timestamp::UNIX_EPOCH).unwrap();
        let outbox = WatchedOutbox::share(outbox, restored.last);
        let level = watch::Sender::new(Some(terms));
        let deliverer = EventDeliverer {
            outbox: Arc::clone(&outbox),
            road: Arc::clone(road),
            sensor: "uid".into(),
            name: "s".into(),
        };
        let spec = json!({"agentNames": names, "source": {}, "limits": {"perMinute": 60_000}});
        let spec: SensorSpec = serde_json::from_value(spec).unwrap();
        Self {
            keeper: EventIngester::new(Arc::clone(&outbox), restored, SensorRules::compile("s", &spec).unwrap()),
            outbox,
            task: tokio::spawn(deliverer.run(level.subscribe())),
            level,
        }
    }

    /// Dies; another one starts with what it left on its volume.
    async fn kill(mut self, dir: TempDir, harness: &Arc<DelivererHarness>) -> (Self, TempDir) {
        let copy = self::dir();
        for name in ["outbox.sqlite", "outbox.sqlite-wal"] {
            if let Ok(bytes) = std::fs::read(dir.path().join(name)) {
                std::fs::write(copy.path().join(name), bytes).unwrap();
            }
        }
        self.task.abort();
        let _ = (&mut self.task).await;
        (Self::start(copy.path(), &NAMES, harness), copy)
    }
}

fn source_message(n: i64) -> SourceMessage {
    SourceMessage {
        id: Some(n.to_string()),
        payload: n.to_string().into_bytes(),
        cursor: SourceCursor::default(),
        repeat: RepeatRule::IdAndText,
    }
}

async fn run(seed: u64, events: i64) -> Arc<DelivererHarness> {
    let harness = DelivererHarness::new(seed);
    let mut dir = dir();
    let mut pod = Pod::start(dir.path(), &NAMES, &harness);
    let mut kills = 0;
    for n in 1..=events {
        let at = Timestamp::from_millisecond(1_000_000 + n * 10).unwrap();
        assert_eq!(
            pod.keeper.ingest(&source_message(n), at).unwrap(),
            ArrivalOutcome::OnDisk
        );
        if harness.below(50) == 0 {
            sleep(Duration::from_millis(harness.below(2_000))).await;
        }
        if harness.below(100) == 0 {
            (pod, dir) = pod.kill(dir, &harness).await;
            kills += 1;
            // The sender did not get the answer, and sends again.
            assert_eq!(
                pod.keeper.ingest(&source_message(n), at).unwrap(),
                ArrivalOutcome::Known
            );
        }
    }
    let all = async {
        while pod
            .outbox
            .lock()
            .pending()
            .unwrap()
            .values()
            .any(|pending| *pending > 0)
        {
            sleep(Duration::from_secs(1)).await;
        }
    };
    timeout(Duration::from_hours(24), all).await.unwrap();
    assert!(events < 1_000 || kills > 10, "{kills} kills");
    harness
}

fn assert_each_once(harness: &DelivererHarness, events: i64, seed: u64) {
    let expected: Vec<_> = (1..=events).map(|n| n.to_string()).collect();
    let journals = harness.journals.lock().unwrap();
    for name in NAMES {
        assert_eq!(journals[name].received, expected, "receiver {name}, seed {seed}");
    }
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_events_reach_three_receivers_each_once_and_in_order() {
    let harness = run(1, 10_000).await;
    assert_each_once(&harness, 10_000, 1);
    let fates = harness.fates.lock().unwrap();
    assert_eq!(fates.len(), 8, "{fates:?}");
}

#[tokio::test(start_paused = true)]
async fn so_do_two_hundred_of_each_of_twenty_seeds() {
    for seed in 2..22 {
        let harness = run(seed, 200).await;
        assert_each_once(&harness, 200, seed);
    }
}

/// Answers with an error until it is switched, and counts the attempts.
#[derive(Default)]
struct FailingTransport {
    tries: Mutex<u32>,
    back: Mutex<bool>,
}

impl DeliveryTransport for FailingTransport {
    async fn send(&self, deliver: &DeliveryRequest) -> Result<DeliveryAck, String> {
        *self.tries.lock().unwrap() += 1;
        let last = deliver.delivery.events.last().map(|event| event.seq);
        if *self.back.lock().unwrap() {
            Ok(DeliveryAck {
                outbox: deliver.delivery.outbox.clone(),
                through: last.unwrap_or_default(),
                ..DeliveryAck::default()
            })
        } else {
            Err("away".into())
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_unavailable_receiver_is_retried_with_backoff_and_at_once_when_it_may_be_back() {
    let (dir, road) = (dir(), Arc::new(FailingTransport::default()));
    let mut pod = Pod::start(dir.path(), &["a"], &road);
    pod.keeper
        .ingest(&source_message(1), Timestamp::from_second(1_000).unwrap())
        .unwrap();
    sleep(Duration::from_hours(1)).await;
    let tries = *road.tries.lock().unwrap();
    // A pause is finally 15 to 30 s, and shorter in the first minute.
    assert!((120..=260).contains(&tries), "{tries} attempts in an hour");
    *road.back.lock().unwrap() = true;
    pod.level.send_replace(Some(terms(&["a"], 1)));
    sleep(Duration::from_millis(1)).await;
    assert_eq!(pod.outbox.lock().pending().unwrap()["a"], 0);
    // With nothing to send it is quiet.
    let tries = *road.tries.lock().unwrap();
    sleep(Duration::from_hours(1)).await;
    assert_eq!(*road.tries.lock().unwrap(), tries);
}

/// Acknowledges numbers that were never sent, each time a higher one.
#[derive(Default)]
struct InvalidAckTransport(Mutex<Vec<String>>);

impl DeliveryTransport for InvalidAckTransport {
    async fn send(&self, deliver: &DeliveryRequest) -> Result<DeliveryAck, String> {
        let mut ids = self.0.lock().unwrap();
        ids.push(deliver.delivery.outbox.clone());
        Ok(DeliveryAck {
            outbox: deliver.delivery.outbox.clone(),
            through: i64::MAX - 1_000_000 + i64::try_from(ids.len()).unwrap(),
            ..DeliveryAck::default()
        })
    }
}

#[tokio::test(start_paused = true)]
async fn invalid_acknowledgements_cause_no_hot_loop() {
    let (dir, road) = (dir(), Arc::new(InvalidAckTransport::default()));
    let mut pod = Pod::start(dir.path(), &["a"], &road);
    pod.keeper
        .ingest(&source_message(1), Timestamp::from_second(1_000).unwrap())
        .unwrap();
    sleep(Duration::from_hours(1)).await;
    let ids = road.0.lock().unwrap().clone();
    assert!((120..=260).contains(&ids.len()), "{} attempts in an hour", ids.len());
    assert_eq!(ids[1], format!("{}.1", ids[0]));
    assert_eq!(pod.outbox.lock().pending().unwrap()["a"], 1, "what it never took waits");
}
