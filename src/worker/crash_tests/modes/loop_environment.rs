//! Everything that outlives a worker: clocks, the link, the gateway, servers, clients, a Sensor, a receiver, and the volume.
//!
//! Draws what happens. Time is virtual; the clock of the node may differ from it.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};

use super::super::files::Files;
use super::counts::SimulationCounts;
use super::injected_bugs::Broken;
use super::invariants::InvariantChecker;
use super::provider::Provider;
use super::random::Random;
use super::schedule::ScheduleSpec;
use super::servers::{Person, Servers};
use super::task_origins::{OUTBOX, SENSOR, request, task_of};
use crate::api::agent::AgentMode;
use crate::api::annotations::STOP_NOW;
use crate::api::sensor::SignalPriority;
use crate::engine::budget::BudgetState;
use crate::engine::machine::LoopView;
use crate::engine::tasks::{TaskOffer, TaskResponse};
use crate::engine::{KnownTotals, OpenRequests};
use crate::link::deliveries::{Delivery, SensorEvent};
use crate::link::task_requests::TaskReceipt;
use crate::sensor_pipeline::delivery::SensorNotification;
use crate::sensor_pipeline::rules::TASK_PREFIX;

/// What happens to a loop, from outside.
#[derive(Clone, Debug)]
pub(super) enum OutsideEvent {
    Request(TaskOffer),
    Deliver(Delivery),
    Wake(String),
    Resume(String),
    Stop(String),
    Budget(BudgetState),
    /// The clock of the node was set.
    Clock,
    /// SIGTERM.
    Terminate,
    Suspend,
    /// The volume has room for this many more pages.
    Full(i64),
    /// The last input is repeated.
    Again,
    /// Only time has passed.
    Nothing,
}

/// The clients' requests, by their numbers.
#[derive(Clone, Debug, Default)]
pub(super) struct Clients {
    /// Whether the client knows that it is accepted.
    settled: Vec<bool>,
}

/// The outbox of a Sensor with its own pod: events stay until they are acknowledged.
#[derive(Clone, Debug, Default)]
pub(super) struct Outbox {
    events: Vec<SensorEvent>,
    pub(super) through: i64,
}

/// The receiver of responses, which ignores a key that it has seen.
#[derive(Clone, Debug, Default)]
pub(super) struct Receiver {
    pub(super) received: BTreeMap<String, String>,
    /// Place of the last new response among the tasks.
    last: Option<usize>,
}

/// The volume as it was, and what belongs to it.
#[derive(Clone, Debug)]
pub(super) struct SavedVolume {
    pub(super) files: Files,
    provider: Provider,
    effects: BTreeMap<String, usize>,
    invariants: InvariantChecker,
    receiver: Receiver,
    clients: Clients,
}

impl SavedVolume {
    /// A new volume.
    fn empty() -> Self {
        Self {
            files: Files::default(),
            provider: Provider::default(),
            effects: BTreeMap::new(),
            invariants: InvariantChecker::default(),
            receiver: Receiver::default(),
            clients: Clients::default(),
        }
    }
}

#[expect(clippy::struct_excessive_bools, reason = "independent facts, each asked by its name")]
pub(super) struct LoopEnvironment {
    pub(super) random: Random,
    pub(super) schedule: ScheduleSpec,
    pub(super) broken: Option<Broken>,
    pub(super) now: Timestamp,
    /// By how much the clock of the node is ahead.
    pub(super) skew: SignedDuration,
    pub(super) epoch: i64,
    /// Everything works from now on.
    pub(super) calm: bool,
    pub(super) provider: Provider,
    pub(super) servers: Servers,
    pub(super) clients: Clients,
    pub(super) outbox: Outbox,
    pub(super) receiver: Receiver,
    pub(super) invariants: InvariantChecker,
    /// The last contact with the controller, by both clocks; `None`: just now.
    pub(super) contact: Option<(Timestamp, Timestamp)>,
    /// When there is contact again.
    pub(super) contact_at: Option<Timestamp>,
    pub(super) budget: BudgetState,
    /// The requests that the controller does not know to be handled.
    pub(super) wake: Option<String>,
    pub(super) resume: Option<String>,
    pub(super) stop: Option<String>,
    /// The last request of a user is to stop the loop, and nothing has started it again.
    wants_stop: bool,
    /// The same, and the loop has received it.
    pub(super) is_stopped: bool,
    /// There are requests that the loop has not received, since it has no link.
    pub(super) has_news: bool,
    /// The controller knows that the loop has ended.
    pub(super) knows_end: bool,
    tokens: u32,
    pub(super) suspended: bool,
    /// The spec was edited: the next pod has the new one.
    pub(super) edited: bool,
    pub(super) known: KnownTotals,
    pub(super) saved: Option<SavedVolume>,
    /// A broken rule: criteria that were ever met.
    pub(super) once_met: BTreeSet<String>,
    /// A broken rule: a response that is sent after the one behind it.
    pub(super) held_back: Option<TaskResponse>,
    /// The volume was full: the journal may have dropped the older half of its history.
    pub(super) was_full: bool,
    pub(super) figures: SimulationCounts,
}

pub(super) fn seconds(seconds: i64) -> SignedDuration {
    SignedDuration::from_secs(seconds)
}

impl LoopEnvironment {
    pub(super) fn new(seed: u64, broken: Option<Broken>) -> Self {
        let mut random = Random::new(seed);
        let mut schedule = ScheduleSpec::draw(&mut random);
        schedule.is_denied = schedule.mode == AgentMode::Goal && seed % 4 == 2;
        Self {
            random,
            schedule,
            broken,
            now: "2026-01-05T07:00:00Z".parse().expect("a moment"),
            skew: SignedDuration::ZERO,
            epoch: 1,
            calm: false,
            provider: Provider::default(),
            servers: Servers::default(),
            clients: Clients::default(),
            outbox: Outbox::default(),
            receiver: Receiver::default(),
            invariants: InvariantChecker::default(),
            contact: None,
            contact_at: None,
            budget: BudgetState::default(),
            wake: None,
            resume: None,
            stop: None,
            wants_stop: false,
            is_stopped: false,
            has_news: false,
            knows_end: false,
            tokens: 0,
            suspended: false,
            edited: false,
            known: KnownTotals::default(),
            saved: None,
            once_met: BTreeSet::new(),
            held_back: None,
            was_full: false,
            figures: SimulationCounts::default(),
        }
    }

    /// Who answers gates.
    pub(super) const fn person(&self) -> Person {
        match (self.calm, self.schedule.is_denied) {
            (true, _) => Person::Helpful,
            (false, false) => Person::Kind,
            (false, true) => Person::Strict,
        }
    }

    /// The clock of the node.
    pub(super) fn wall(&self) -> Timestamp {
        self.now + self.skew
    }

    pub(super) fn is_broken(&self, broken: Broken) -> bool {
        self.broken == Some(broken)
    }

    pub(super) fn pass(&mut self, to: Timestamp) {
        self.now = self.now.max(to);
        self.provider.pass(self.now);
        if self.contact_at.is_some_and(|at| at <= self.now) {
            self.contact = None;
            self.contact_at = None;
        }
    }

    /// Time since the last contact with the controller, the longer one of both clocks.
    pub(super) fn silence(&self) -> SignedDuration {
        let Some((now, wall)) = self.contact else {
            return SignedDuration::ZERO;
        };
        self.now.duration_since(now).max(self.wall().duration_since(wall))
    }

    /// Whether clients, Sensors and users reach the loop.
    pub(super) fn has_link(&self) -> bool {
        self.contact.is_none()
    }

    fn token(&mut self) -> String {
        self.tokens += 1;
        self.tokens.to_string()
    }

    /// Everything works from now on.
    pub(super) fn heal(&mut self) {
        self.calm = true;
        self.contact_at = self.contact.map(|_| self.now);
        self.suspended = false;
        self.provider.outage_until = None;
        self.provider.no_room_until = None;
    }

    /// What a user does about a loop that waits for one.
    pub(super) fn help(&mut self) -> Vec<OutsideEvent> {
        let token = self.token();
        self.goes_on();
        self.resume = Some(token.clone());
        self.budget.revision += 1;
        vec![OutsideEvent::Budget(self.budget.clone()), OutsideEvent::Resume(token)]
    }

    /// What happens now, before anything that is due. `listens`: the loop is not about to stop.
    pub(super) fn draw_event(&mut self, listens: bool) -> Option<OutsideEvent> {
        if self.calm {
            let comes = listens && self.has_link() && self.random.percent(50);
            return comes.then(|| self.pending_event()).flatten();
        }
        if !self.random.percent(self.schedule.events) {
            return None;
        }
        let draw = self.random.index(40);
        let event = match draw {
            0..=8 if self.has_link() => OutsideEvent::Request(self.draw_request()),
            9..=14 if self.has_link() => self.draw_delivery(),
            15 => {
                self.goes_on();
                self.wake = Some(self.token());
                OutsideEvent::Wake(self.wake.clone()?)
            }
            16 | 17 => {
                self.goes_on();
                self.resume = Some(self.token());
                OutsideEvent::Resume(self.resume.clone()?)
            }
            18 => {
                let until = self.now + seconds(self.random.range(60, 4000));
                self.provider.no_room_until = Some(until);
                return None;
            }
            19 if self.has_link() => {
                self.provider.no_room_until = None;
                self.budget.revision += 1;
                OutsideEvent::Budget(self.budget.clone())
            }
            20 => {
                let until = self.now + seconds(self.random.range(10, 3000));
                self.provider.outage_until = Some(until);
                return None;
            }
            21 | 22 if self.has_link() => {
                self.contact = Some((self.now, self.wall()));
                self.contact_at = Some(self.now + seconds(self.random.range(5, 300)));
                return None;
            }
            23 | 24 => self.draw_clock(),
            25 => {
                self.provider.lose_gateway();
                return None;
            }
            26 | 27 if self.has_link() => {
                self.edited |= self.random.percent(50);
                OutsideEvent::Terminate
            }
            28 if self.has_link() => {
                self.suspended = true;
                self.edited |= self.random.percent(30);
                OutsideEvent::Suspend
            }
            29 => OutsideEvent::Full(self.random.range(0, 6)),
            30..=32 => OutsideEvent::Again,
            33 => {
                let now = if self.random.percent(30) { STOP_NOW } else { "" };
                let token = format!("{now}{}", self.token());
                self.wants_stop = true;
                let is_kept = !self.has_link() || !self.is_broken(Broken::ForgetsStop);
                self.stop = Some(token.clone()).filter(|_| is_kept);
                OutsideEvent::Stop(token)
            }
            _ => {
                let to = self.now + seconds(self.random.range(0, 400));
                self.pass(to);
                OutsideEvent::Nothing
            }
        };
        if let OutsideEvent::Wake(_) | OutsideEvent::Resume(_) | OutsideEvent::Stop(_) = event
            && !self.has_link()
        {
            self.has_news = true;
            return None;
        }
        Some(event)
    }

    /// A user wants the loop to continue.
    fn goes_on(&mut self) {
        (self.wants_stop, self.is_stopped) = (false, false);
    }

    /// The loop has received all requests, of which the last one counts.
    pub(super) fn loop_learns_of_requests(&mut self) {
        self.is_stopped = self.wants_stop;
        self.has_news = false;
    }

    /// The requests that each new process receives until they are handled.
    pub(super) fn open_requests(&self) -> OpenRequests {
        OpenRequests {
            wake: self.wake.clone(),
            resume: self.resume.clone(),
            stop: self.stop.clone(),
        }
    }

    /// Only what has been begun is completed.
    fn pending_event(&mut self) -> Option<OutsideEvent> {
        if let Some(number) = self.clients.settled.iter().position(|settled| !settled) {
            return Some(OutsideEvent::Request(request(number)));
        }
        let through = self.outbox.through;
        let is_open = self.outbox.events.last().is_some_and(|last| last.seq > through);
        is_open.then(|| OutsideEvent::Deliver(self.outbox.delivery()))
    }

    /// Whether something waits that needs a loop.
    pub(super) fn has_pending(&self) -> bool {
        let open = self
            .outbox
            .events
            .last()
            .is_some_and(|last| last.seq > self.outbox.through);
        open || self.clients.settled.iter().any(|settled| !settled)
    }

    fn draw_request(&mut self) -> TaskOffer {
        let open: Vec<usize> = (0..self.clients.settled.len())
            .filter(|number| !self.clients.settled[*number])
            .collect();
        let number = if !open.is_empty() && self.random.percent(50) {
            open[self.random.index(open.len())]
        } else if !self.clients.settled.is_empty() && self.random.percent(20) {
            self.random.index(self.clients.settled.len())
        } else {
            self.clients.settled.push(false);
            self.clients.settled.len() - 1
        };
        let offer = request(number);
        self.invariants.ask(&offer.id, &offer.id);
        offer
    }

    /// The client gets the receipt, unless it is lost.
    pub(super) fn receipt(&mut self, id: &str, receipt: TaskReceipt) {
        let is_lost = !self.calm && self.random.percent(20);
        let accepted = matches!(receipt, TaskReceipt::Accepted | TaskReceipt::Repeated);
        if is_lost || !accepted {
            return;
        }
        self.invariants.promise(id);
        let number = id.trim_start_matches("request-").parse::<usize>().expect("a number");
        self.clients.settled[number] = true;
    }

    fn draw_delivery(&mut self) -> OutsideEvent {
        if self.random.percent(80) {
            let seq = i64::try_from(self.outbox.events.len()).expect("few") + 1;
            let is_task = self.random.percent(60);
            let text = if is_task {
                format!("{TASK_PREFIX}task=s{seq}; Look.")
            } else {
                format!("news {seq}")
            };
            let notification = SensorNotification {
                source: format!("sensor/{SENSOR}"),
                text,
                priority: [SignalPriority::Normal, SignalPriority::High][self.random.index(2)],
                is_task,
            };
            self.outbox.events.push(SensorEvent {
                seq,
                outbox: String::new(),
                id: format!("n{seq}"),
                at: self.now,
                updates: Vec::new(),
                notifications: vec![notification],
                wakes: vec![format!("sensor/{SENSOR}")],
                trial: None,
            });
            self.invariants.ask(&task_of(seq), &format!("s{seq}"));
        }
        OutsideEvent::Deliver(self.outbox.delivery())
    }

    /// The Sensor learns up to which event the loop has them, unless the acknowledgement is lost.
    pub(super) fn acknowledge(&mut self, through: i64, runs_tasks: bool) {
        if !self.calm && self.random.percent(20) {
            return;
        }
        for event in self
            .outbox
            .events
            .iter()
            .filter(|event| event.seq <= through && event.seq > self.outbox.through)
        {
            if runs_tasks && event.notifications[0].is_task {
                self.invariants.promise(&task_of(event.seq));
            }
        }
        self.outbox.through = self.outbox.through.max(through);
    }

    fn draw_clock(&mut self) -> OutsideEvent {
        let jumps = [-7200, -600, -30, -2, 2, 30, 90, 600, 7200];
        let jump = seconds(jumps[self.random.index(jumps.len())]);
        if self.contact.is_none() {
            self.contact = Some((self.now, self.wall()));
            self.contact_at = Some(self.now + seconds(5));
        }
        self.skew += jump;
        OutsideEvent::Clock
    }

    /// A response arrives at its receiver. Whether the worker learns that it was accepted.
    pub(super) fn respond(&mut self, response: &TaskResponse) -> bool {
        let draw = if self.calm { 9 } else { self.random.index(10) };
        if draw < 2 {
            return false;
        }
        self.invariants.compare_response(response);
        let place = self.invariants.has_ended(&response.id);
        let place = place.unwrap_or_else(|| panic!("the response {} was sent before it was on disk", response.id));
        let body = serde_json::to_string(response).expect("a response");
        if let Some(first) = self.receiver.received.get(&response.id) {
            assert_eq!(*first, body, "one key, one response");
        } else {
            assert!(
                self.receiver.last.is_none_or(|last| last < place),
                "{} is out of order",
                response.id
            );
            self.receiver.last = Some(place);
            self.receiver.received.insert(response.id.clone(), body);
        }
        draw > 2
    }

    pub(super) fn report(&mut self, view: &LoopView) {
        if !self.has_link() {
            return;
        }
        self.known.turn = self.known.turn.max(view.turn);
        self.known.counts.merge(&view.counts);
        for (open, handled) in [
            (&mut self.wake, &view.handled.wake),
            (&mut self.resume, &view.handled.resume),
            (&mut self.stop, &view.handled.stop),
        ] {
            open.take_if(|token| Some(&*token) == handled.as_ref());
        }
        self.knows_end = view.outcome.is_some();
    }

    /// The last report of a process, which is sometimes lost.
    pub(super) fn report_end(&mut self, view: &LoopView) {
        if self.calm || !self.random.percent(20) {
            self.report(view);
        }
    }

    /// A user, an edit or a task starts the loop again, of whose end the controller knows.
    pub(super) fn start_again(&mut self) {
        if self.knows_end && self.stop.is_some() {
            // The controller records it with the requests before it: there is nothing to stop.
            (self.wake, self.resume, self.stop) = (None, None, None);
        }
        let starts = self.wake.is_some() || self.resume.is_some();
        assert!(
            !(self.knows_end && self.is_stopped && starts),
            "a request from before the stop starts the loop again"
        );
        self.goes_on();
        self.knows_end = false;
    }

    /// The volume is lost, and the next one is empty.
    pub(super) fn lose_volume(&mut self) -> Files {
        self.saved = None;
        self.go_back(SavedVolume::empty())
    }

    /// A snapshot of the volume is taken.
    pub(super) fn save(&mut self, files: Files) {
        self.saved = Some(SavedVolume {
            files,
            provider: self.provider.clone(),
            effects: self.servers.effects.clone(),
            invariants: self.invariants.clone(),
            receiver: self.receiver.clone(),
            clients: self.clients.clone(),
        });
    }

    /// The volume is restored from that snapshot: what the loop did since is missing from it.
    pub(super) fn go_back(&mut self, saved: SavedVolume) -> Files {
        self.figures.rollbacks += 1;
        let asked = std::mem::take(&mut self.invariants);
        self.invariants = saved.invariants;
        self.invariants.still_asked(asked);
        self.provider = saved.provider;
        self.servers.go_back(saved.effects);
        self.receiver = saved.receiver;
        // A client that has a receipt does not ask again.
        let later = self.clients.settled.split_off(saved.clients.settled.len());
        for (number, settled) in saved.clients.settled.iter().enumerate() {
            self.clients.settled[number] |= settled;
        }
        self.clients.settled.extend(later);
        saved.files
    }
}

impl Outbox {
    pub(super) fn count(&self) -> i64 {
        i64::try_from(self.events.len()).expect("few")
    }

    fn delivery(&self) -> Delivery {
        let events = self.events.iter().filter(|event| event.seq > self.through);
        Delivery {
            sensor: SENSOR.into(),
            name: SENSOR.into(),
            receiver: "agent".into(),
            outbox: OUTBOX.into(),
            per_minute: None,
            events: events.cloned().collect(),
        }
    }
}
