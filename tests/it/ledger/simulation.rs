//! The simulation: an API server, controllers of which several may believe they lead, gateways with disks, a
//! provider that bills, and a network that loses, repeats, delays and reorders. Everything is drawn from one seed, and
//! one step does one thing, so a crash or a freeze can come between any two.

use std::collections::{BTreeMap, BTreeSet};

use agentloop::api::NamespacedName;
use agentloop::api::amount::{Amount, AmountKind, LimitAmounts};
use agentloop::api::budget::{CalendarPeriod, LedgerRecord};
use agentloop::ledger::account::{CONTENTION_WAIT, GATE_TOP_UP, LedgerTerms};
use agentloop::ledger::wallet::{AccountId, LeaseRow, Reservation};
use agentloop::ledger::window::WindowRule;
use agentloop::link::messages::{AccountRequest, LeaseRequest};
use agentloop::provider::WireFormat;
use agentloop::provider::usage::read_beside;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use serde_json::json;

use super::afterwards::Afterwards;
use super::gateway::{CallInFlight, Crash, Disk, Gateway, MAX_ACCOUNTS, account_id, account_index};
use super::leader::{Leader, LeaderRequest, LeaderResponse};
use super::mutation::Mutation;
use super::oracle::{OracleVerdict, SpendingOracle, at};
use crate::support::random::Random;

/// Midnights in UTC: of the Sunday on which Berlin's clocks go forward, of a Monday, of the first of a month.
const MIDNIGHTS: [i64; 3] = [1_774_742_400_000, 1_774_828_800_000, 1_775_001_600_000];
/// The unit by which a schedule may start before one of them, since Berlin's midnights are earlier.
const HOUR: i64 = 3_600_000;

/// Prints what happens, if a trace was requested.
macro_rules! say {
    ($simulation:expr, $($text:tt)*) => {
        if $simulation.setup.trace {
            println!("{:>9} {}", $simulation.now - $simulation.setup.start, format!($($text)*));
        }
    };
}

/// What can happen in a schedule.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "what a schedule may do, each for itself")]
pub struct Setup {
    mutation: Mutation,
    trace: bool,
    steps: usize,
    /// Wall clocks are right when a leader takes over. Otherwise the time of the ledger is used.
    clocks_right: bool,
    /// The provider bills above the bound at times.
    overbills: bool,
    /// Limits are edited, also to below what is used.
    edits: bool,
    /// Windows are changed.
    new_windows: bool,
    /// Budgets are deleted, and created again.
    remakes: bool,
    /// Percent of messages that are lost, and that are repeated.
    losses: i64,
    /// Percent of changes on a disk during which a crash occurs.
    crashes: i64,
    /// Largest call.
    call: i64,
    /// Usual time between two steps.
    pace: i64,
    /// Percent of steps that are faults.
    faults: usize,
    /// Most of them are new leaders.
    handovers: bool,
    /// Models cost differently, money is limited, and specs name other models than their pods run.
    prices: bool,
    /// The counts of some answers contradict each other, and are lower than the bill.
    contradicts: bool,
    /// Percent of writes that the API server refuses for certain: a policy, or an object that is too large.
    denials: i64,
    /// When it begins: shortly before a midnight, somewhere.
    start: i64,
}

struct Object {
    made: i64,
    deleted: bool,
    terms: LedgerTerms,
    revision: u64,
    top_ups: Vec<(String, Amount)>,
    record: Option<LedgerRecord>,
    /// The latest time of any record.
    latest: i64,
}

impl Object {
    fn new(terms: LedgerTerms) -> Self {
        Self {
            made: 0,
            deleted: false,
            terms,
            revision: 0,
            top_ups: Vec::new(),
            record: None,
            latest: 0,
        }
    }
}

/// The outcome of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteResult {
    Written,
    Refused,
    /// Refused for a reason other than the present record.
    Denied,
    /// There is no such object.
    Gone,
}

/// What a leader knows, by account; of budgets that it has not seen yet, nothing is sent.
struct LeaderTerm {
    leader: Leader,
    /// The wall clock when it took over; from then on the monotonic clock counts.
    base: i64,
    since: i64,
    known: Vec<u64>,
    /// The highest limits since the last record of each account.
    highest: Vec<LimitAmounts>,
    /// The same since the record under way was planned.
    planned: Vec<LimitAmounts>,
    /// Number of the write under way.
    write: Vec<u64>,
    /// The least of the last call that each Agent asked this leader for, by account.
    asks: BTreeMap<(usize, NamespacedName), Amount>,
}

impl LeaderTerm {
    /// The leader's time: the wall's when it took over, and the monotonic clock since.
    fn time(&self, now: i64) -> Timestamp {
        at(self.base + now - self.since)
    }
}

impl LeaderTerm {
    /// A budget is exhausted when no call fits any more that one of its Agents last asked for and still waits for or may
    /// repeat: one large call that was refused shows nothing.
    fn judge_exhaustion(&mut self, request: &LeaderRequest, draws: &[usize], agents: usize) -> OracleVerdict {
        for part in &request.body.accounts {
            let account = account_index(&part.account);
            if let Some(ask) = &part.ask
                && !request.last
                && !ask.least.is_zero()
                && draws.contains(&account)
                && self.leader.knows(account)
            {
                self.asks.insert((account, request.who.agent.clone()), ask.least);
            }
            let known = self
                .leader
                .knows(account)
                .then(|| self.leader.exhausted(account, agents));
            let Some((kind, awake)) = known.flatten() else {
                continue;
            };
            let book = self.leader.account(account);
            let left = book.limits().left_after(&book.used()).get(kind).unwrap_or(0);
            for agent in awake {
                let least = self.asks.get(&(account, agent.clone())).map(|least| least.get(kind));
                if least.is_some_and(|least| least <= left) {
                    return Err(format!(
                        "EXHAUSTED: account {account} with {left} {kind} left, and {} needs {least:?}",
                        agent.name
                    ));
                }
            }
        }
        Ok(())
    }
}

#[derive(Default)]
struct Controller {
    term: Option<LeaderTerm>,
    frozen_until: i64,
}

#[derive(Clone)]
enum Message {
    Request(usize, Box<LeaderRequest>),
    Answer(Box<LeaderResponse>),
    Write(usize, usize, u64, Box<(LedgerRecord, LedgerTerms, LimitAmounts)>),
    Wrote(usize, usize, u64, WriteResult),
}

/// The result of a schedule.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// Steps done.
    pub steps: usize,
    /// Calls that the provider billed.
    pub calls: usize,
    /// What accounting after the fact overspent, in percent of the limit.
    pub afterwards: f64,
}

/// The whole state of a schedule.
pub struct LedgerSimulation {
    setup: Setup,
    random: Random,
    now: i64,
    objects: Vec<Object>,
    controllers: Vec<Controller>,
    gateways: Vec<Gateway>,
    net: Vec<Message>,
    /// Records of gateways that are dead for certain.
    dead: Vec<String>,
    /// Records of pods that were asked to stop, and when they are gone.
    leaving: Vec<(i64, String)>,
    records: usize,
    writes: u64,
    oracle: SpendingOracle,
    afterwards: Afterwards,
    verdict: OracleVerdict,
    steps: usize,
    /// The network has recovered.
    quiet: bool,
}

/// Runs the schedule of a seed.
pub fn run(seed: u64, mutation: Mutation, trace: bool) -> Result<Outcome, String> {
    let mut simulation = LedgerSimulation::new(seed, mutation, trace);
    for _ in 0..simulation.setup.steps {
        simulation.step();
        if simulation.verdict.is_err() {
            break;
        }
    }
    let verdict = simulation.verdict.clone().and_then(|()| simulation.quiet());
    verdict.and_then(|()| simulation.oracle.windows())?;
    Ok(Outcome {
        steps: simulation.steps,
        calls: simulation.oracle.calls(),
        afterwards: simulation.afterwards.overspent(),
    })
}

fn tokens(tokens: i64) -> Amount {
    Amount {
        tokens,
        calls: 1,
        ..Amount::ZERO
    }
}

fn draw_window(random: &mut Random) -> WindowRule {
    match random.index(10) {
        0..6 => WindowRule::Rolling(SignedDuration::from_secs([2, 3, 5, 10, 600][random.index(5)])),
        6..8 => {
            let zone = if random.percent(50) {
                TimeZone::UTC
            } else {
                TimeZone::get("Europe/Berlin").unwrap()
            };
            let period = [CalendarPeriod::Daily, CalendarPeriod::Weekly, CalendarPeriod::Monthly][random.index(3)];
            WindowRule::Calendar(period, zone)
        }
        _ => WindowRule::Lifetime,
    }
}

fn draw_limits(random: &mut Random, setup: &Setup) -> LimitAmounts {
    let call = setup.call;
    LimitAmounts {
        tokens: Some(call * random.range(1, 6)),
        calls: random.percent(25).then(|| random.range(1, 10)),
        cost: (setup.prices && random.percent(70)).then(|| call * PRICES[1] * random.range(1, 4)),
        ..LimitAmounts::default()
    }
}

impl LedgerSimulation {
    fn new(seed: u64, mutation: Mutation, trace: bool) -> Self {
        let mut random = Random::new(seed);
        let clocks_right = random.percent(60);
        let rough = random.percent(70);
        let setup = Setup {
            mutation,
            trace,
            steps: usize::try_from(random.range(30, 110)).unwrap(),
            clocks_right,
            overbills: random.percent(10),
            edits: clocks_right && random.percent(30),
            new_windows: clocks_right && random.percent(20),
            remakes: random.percent(20),
            losses: if rough { random.range(0, 20) } else { 0 },
            crashes: if rough { random.range(0, 12) } else { 0 },
            call: random.range(10, 50),
            pace: [100, 500, 1500][random.index(3)],
            faults: [1, 4, 9][random.index(3)],
            handovers: random.percent(35),
            prices: random.percent(25),
            denials: if random.percent(20) { random.range(1, 30) } else { 0 },
            // From a generator of its own, so that the other schedules do not change.
            contradicts: Random::new(!seed).percent(25),
            start: MIDNIGHTS[random.index(3)] - HOUR * random.range(0, 3) - random.range(0, 30_000),
        };
        let accounts = if random.percent(25) { 2 } else { 1 };
        let objects: Vec<_> = (0..accounts)
            .map(|_| {
                Object::new(LedgerTerms {
                    limits: draw_limits(&mut random, &setup),
                    per_agent: LimitAmounts {
                        tokens: random.percent(20).then(|| setup.call * random.range(1, 4)),
                        ..LimitAmounts::default()
                    },
                    window: draw_window(&mut random),
                })
            })
            .collect();
        let terms: Vec<_> = objects.iter().map(|object| object.terms.clone()).collect();
        let count = random.index(2) + 2;
        let mut simulation = Self {
            oracle: SpendingOracle::new(&terms, setup.start, !setup.clocks_right),
            afterwards: Afterwards::new(&terms),
            now: setup.start,
            controllers: (0..random.index(2) + 2).map(|_| Controller::default()).collect(),
            gateways: Vec::new(),
            net: Vec::new(),
            dead: Vec::new(),
            leaving: Vec::new(),
            records: 0,
            writes: 0,
            verdict: Ok(()),
            steps: 0,
            quiet: false,
            objects,
            random,
            setup,
        };
        for agent in 0..count {
            let gateway = simulation.new_gateway(agent);
            simulation.gateways.push(gateway);
        }
        for gateway in 0..count {
            for account in 0..accounts {
                let limits = simulation.kinds(account);
                simulation.gateways[gateway].draws.push((account, limits));
            }
        }
        say!(simulation, "{:?}", simulation.setup);
        say!(simulation, "{terms:?}");
        simulation.take_over(0);
        simulation
    }

    fn new_gateway(&mut self, agent: usize) -> Gateway {
        self.records += 1;
        let price = if self.setup.prices {
            PRICES[self.random.index(PRICES.len())]
        } else {
            0
        };
        Gateway::new(agent, format!("r{}", self.records), price)
    }

    /// The kinds that an account limits, per Agent or in all, as sent to a gateway.
    fn kinds(&self, account: usize) -> LimitAmounts {
        self.objects[account].terms.limits
    }

    // Time ---------------------------------------------------------------------------------------------------------

    /// The oracle's time of an account.
    fn measure(&self, account: usize) -> i64 {
        if self.setup.clocks_right {
            return self.now;
        }
        self.objects[account].latest
    }

    fn measures(&self) -> Vec<i64> {
        (0..self.objects.len()).map(|account| self.measure(account)).collect()
    }

    /// Accounts of budgets that exist.
    fn there(&self) -> impl Iterator<Item = usize> {
        (0..self.objects.len()).filter(|account| !self.objects[*account].deleted)
    }

    fn pass_time(&mut self) {
        let random = &mut self.random;
        let span = match random.index(300) {
            0..4 => random.range(0, 20_000),
            4 => random.range(0, 4_000_000),
            5..8 if self.setup.pace > 1000 => random.range(0, 40_000_000),
            8..150 => 0,
            _ => random.range(0, self.setup.pace),
        };
        self.now += span;
    }

    // Steps --------------------------------------------------------------------------------------------------------

    fn step(&mut self) {
        self.steps += 1;
        self.pass_time();
        if self.random.index(100) < self.setup.faults {
            return self.fault();
        }
        match self.random.index(100) {
            0..36 => {
                for _ in 0..=self.random.index(4) {
                    self.network();
                }
            }
            36..76 => {
                let gateway = self.random.index(self.gateways.len());
                self.gateway(gateway);
            }
            76..94 => {
                let controller = self.random.index(self.controllers.len());
                self.controller(controller);
            }
            94..96 => self.admin(),
            _ => self.network(),
        }
    }

    fn crash(&mut self) -> Crash {
        if self.random.percent(self.setup.crashes) {
            if self.random.percent(50) {
                Crash::BeforeCommit
            } else {
                Crash::AfterCommit
            }
        } else {
            Crash::No
        }
    }

    fn fault(&mut self) {
        let gateway = self.random.index(self.gateways.len());
        let controller = self.random.index(self.controllers.len());
        if self.setup.handovers && self.random.percent(70) {
            return self.take_over(controller);
        }
        match self.random.index(14) {
            8 | 9 => self.go_back(gateway),
            10 => self.remake_agent(gateway),
            11..14 if self.setup.prices => {
                let price = PRICES[self.random.index(PRICES.len())];
                say!(self, "the spec of g{gateway} names a model of price {price}");
                self.gateways[gateway].spec_price = price;
            }
            0 => {
                say!(self, "g{gateway} crashes");
                self.gateways[gateway].die();
            }
            1 => self.lose_volume(gateway),
            2 | 3 => {
                let until = self.now + self.random.range(0, 30_000);
                say!(self, "g{gateway} is frozen");
                self.gateways[gateway].frozen_until = until;
            }
            4 | 5 => {
                let until = self.now + self.random.range(0, 60_000);
                say!(self, "c{controller} is frozen");
                self.controllers[controller].frozen_until = until;
            }
            6 => {
                say!(self, "c{controller} crashes");
                self.controllers[controller].term = None;
            }
            _ => self.take_over(controller),
        }
    }

    fn lose_volume(&mut self, gateway: usize) {
        let times = self.measures();
        let old = &self.gateways[gateway];
        say!(self, "g{gateway} loses its volume: {} is dead", old.disk.record);
        let calls: Vec<_> = old.disk.open.keys().copied().collect();
        for call in calls {
            self.oracle.settle(call, None, |account| times[account]);
        }
        self.oracle.lost = true;
        self.dead.push(old.disk.record.clone());
        let (agent, draws) = (old.agent, old.draws.clone());
        let fresh = self.new_gateway(agent);
        self.gateways[gateway] = Gateway { draws, ..fresh };
    }

    /// Takes a snapshot of a disk, or restores it. It is restored only where each lease that changed since shows that:
    /// spending that was not reported cannot be detected.
    fn go_back(&mut self, gateway: usize) {
        let of = &self.gateways[gateway];
        let kept = of.kept.clone().filter(|kept| kept.record == of.disk.record);
        let Some(kept) = kept.filter(|kept| self.no_leader_lags() && self.shows(&of.disk, kept)) else {
            say!(self, "the disk of g{gateway} is kept");
            let of = &mut self.gateways[gateway];
            of.kept = Some(of.disk.clone());
            return;
        };
        say!(self, "the disk of g{gateway} goes back");
        let times = self.measures();
        let lost = self.gateways[gateway].disk.open.keys().copied();
        let lost: Vec<_> = lost.filter(|call| !kept.open.contains_key(call)).collect();
        for call in lost {
            self.oracle.settle(call, None, |account| times[account]);
        }
        self.oracle.lost = true;
        let of = &mut self.gateways[gateway];
        of.die();
        of.went_back += 1;
        let record = kept.record.clone();
        of.disk = kept;
        // An answer reaches the process that asked, and no later one. Requests that are under way are still processed.
        self.net
            .retain(|packet| !matches!(packet, Message::Answer(answer) if answer.record == record));
    }

    /// Whether all presumed leaders know the current records.
    fn no_leader_lags(&self) -> bool {
        let terms = self
            .controllers
            .iter()
            .filter_map(|controller| controller.term.as_ref());
        let knows = |term: &LeaderTerm| {
            self.there().all(|account| {
                let epoch = self.objects[account].record.as_ref().map_or(0, |record| record.epoch);
                term.leader.knows(account) && term.leader.account(account).epoch() == epoch
            })
        };
        terms.into_iter().all(knows)
    }

    /// Whether the records show, for each lease that differs between two states of a disk, that more was reported of it than
    /// the older one knows. A gateway that starts counts its open calls as spent, so it knows of those too.
    fn shows(&self, now: &Disk, kept: &Disk) -> bool {
        let row = |disk: &Disk, of: &LeaseRow| {
            let mut rows = disk.rows.iter();
            let found = rows.find(|row| (&row.account, row.lease) == (&of.account, of.lease));
            found.map_or((Amount::ZERO, Amount::ZERO), |row| (row.spent, row.returned))
        };
        let open = |disk: &Disk, of: &LeaseRow| {
            let draws = |reservation: &&Reservation| reservation.leases.contains(&(of.account.clone(), of.lease));
            let open = disk.open.values().filter(draws);
            open.fold(Amount::ZERO, |sum, reservation| {
                sum.checked_add(&reservation.amount).unwrap()
            })
        };
        now.rows.iter().chain(&kept.rows).all(|of| {
            let (mut before, after) = (row(kept, of), row(now, of));
            if before == after && open(kept, of) == open(now, of) {
                return true;
            }
            before.0 = before.0.checked_add(&open(kept, of)).unwrap();
            let object = &self.objects[account_index(&of.account)];
            let mut holders = object.record.iter().flat_map(|record| &record.holders);
            let holder = holders.find(|holder| holder.lease == of.lease);
            holder.is_none_or(|holder| !before.0.covers(&holder.spent) || !before.1.covers(&holder.returned))
        })
    }

    /// An Agent is deleted and created again: its pod sends its final report, and the next one has an empty volume.
    fn remake_agent(&mut self, gateway: usize) {
        if !self.gateways[gateway].up || self.gateways[gateway].frozen_until > self.now {
            return;
        }
        say!(self, "the Agent of g{gateway} is deleted");
        while !self.gateways[gateway].flights.is_empty() {
            if !self.gateways[gateway].flights[0].sent {
                self.send_call(gateway, 0, None);
            }
            self.settle(gateway, 0, Some(Crash::No));
        }
        let mut wallet = self.gateways[gateway].wallet.clone();
        wallet.close_all();
        self.gateways[gateway].commit(wallet, None, Crash::No);
        self.gateways[gateway].wants = None;
        self.gateways[gateway].leaving = true;
        self.sync(gateway);
        self.oracle.lost = true;
        let old = &self.gateways[gateway];
        self.leaving.push((self.now + STOPS, old.disk.record.clone()));
        let (agent, draws, pod) = (old.agent, old.draws.clone(), old.pod);
        let fresh = self.new_gateway(agent);
        self.gateways[gateway] = Gateway {
            draws,
            pod: pod + 1,
            ..fresh
        };
    }

    /// Pods that are certain to be gone by now: what they did not return counts as spent.
    fn reap(&mut self) {
        let now = self.now;
        let (gone, leaving) = std::mem::take(&mut self.leaving)
            .into_iter()
            .partition::<Vec<_>, _>(|(at, _)| *at <= now);
        self.leaving = leaving;
        self.dead.extend(gone.into_iter().map(|(_, record)| record));
    }

    /// A call of this many tokens, by the model that the pod runs.
    fn call(&self, gateway: usize, tokens: i64) -> Amount {
        let cost = tokens * self.gateways[gateway].price;
        Amount {
            tokens,
            calls: 1,
            cost,
            ..Amount::ZERO
        }
    }

    /// The same, as the gateway counts it.
    fn counted(&self, gateway: usize, amount: &Amount) -> Amount {
        if self.setup.mutation == Mutation::PriceOfTheSpec && self.setup.prices {
            let cost = amount.tokens * self.gateways[gateway].spec_price;
            return Amount { cost, ..*amount };
        }
        *amount
    }

    fn admin(&mut self) {
        let account = self.random.index(self.objects.len());
        let (call, setup) = (self.setup.call, self.setup.clone());
        if self.objects[account].deleted {
            return;
        }
        if self.setup.remakes && self.random.percent(40) {
            return self.delete(account);
        }
        match self.random.index(6) {
            0 | 1 if self.setup.edits => {
                let limits = draw_limits(&mut self.random, &setup);
                say!(self, "a{account} is to have {limits:?}");
                let object = &mut self.objects[account];
                object.terms.limits = limits;
                object.revision += 1;
            }
            2 if self.setup.new_windows => {
                let window = draw_window(&mut self.random);
                say!(self, "a{account} is to have {window:?}");
                let object = &mut self.objects[account];
                object.terms.window = window;
                object.revision += 1;
            }
            3 => {
                let amount = tokens(self.random.range(1, call * 2));
                let object = &mut self.objects[account];
                let kind = if self.random.percent(30) { GATE_TOP_UP } else { "t" };
                let id = format!("{kind}{}", object.top_ups.len());
                object.top_ups.push((id, amount));
                object.revision += 1;
                say!(self, "a{account} is topped up by {}", amount.tokens);
            }
            4 if self.random.percent(50) => {
                // The label changes: the budget stops or starts to apply.
                let gateway = self.random.index(self.gateways.len());
                let kinds = self.kinds(account);
                let draws = &mut self.gateways[gateway].draws;
                if draws.iter().any(|(drawn, _)| *drawn == account) {
                    draws.retain(|(drawn, _)| *drawn != account);
                } else {
                    draws.push((account, kinds));
                }
                say!(
                    self,
                    "g{gateway} draws on {draws:?}",
                    draws = self.gateways[gateway].draws
                );
            }
            _ => {
                let gateway = self.random.index(self.gateways.len());
                self.tell_terms(gateway);
            }
        }
    }

    /// A budget is deleted, and in most cases created again: that is another account. Some gateways learn of it at once.
    fn delete(&mut self, account: usize) {
        let again = self.objects.len() < MAX_ACCOUNTS && self.random.percent(80);
        say!(self, "a{account} is deleted, made again: {again}");
        self.objects[account].deleted = true;
        if again {
            let terms = self.objects[account].terms.clone();
            self.oracle.add(&terms, self.now);
            self.afterwards.add(&terms);
            self.objects.push(Object {
                made: self.now,
                ..Object::new(terms)
            });
            let new = self.objects.len() - 1;
            for gateway in 0..self.gateways.len() {
                if self.gateways[gateway].draws.iter().any(|(drawn, _)| *drawn == account) {
                    let kinds = self.kinds(new);
                    self.gateways[gateway].draws.push((new, kinds));
                }
            }
        }
        for gateway in 0..self.gateways.len() {
            if self.random.percent(50) {
                self.tell_terms(gateway);
            }
        }
    }

    /// The gateway learns which kinds are limited, and of which budgets.
    fn tell_terms(&mut self, gateway: usize) {
        let objects = &self.objects;
        self.gateways[gateway]
            .draws
            .retain(|(account, _)| !objects[*account].deleted);
        for place in 0..self.gateways[gateway].draws.len() {
            let account = self.gateways[gateway].draws[place].0;
            self.gateways[gateway].draws[place].1 = self.kinds(account);
        }
    }

    // Network ------------------------------------------------------------------------------------------------------

    fn send(&mut self, packet: Message) {
        // In the quiet phase nothing is lost. A lost outcome of a write would block its account for good: a real leader
        // repeats a write until its outcome is known, a simulated one does not.
        if self.net.len() > 20 && !self.quiet {
            let lost = self.random.index(20);
            self.net.swap_remove(lost);
        }
        self.net.push(packet);
    }

    fn network(&mut self) {
        if self.net.is_empty() {
            return;
        }
        let place = self.random.index(self.net.len());
        let fate = self.random.range(0, 100);
        if fate >= 2 * self.setup.losses {
            let packet = self.net.swap_remove(place);
            self.deliver(packet);
        } else if fate >= self.setup.losses {
            let packet = self.net[place].clone();
            self.deliver(packet);
        } else {
            self.net.swap_remove(place);
        }
    }

    fn deliver(&mut self, packet: Message) {
        match packet {
            Message::Request(controller, request) => self.requested(controller, &request),
            Message::Answer(answer) => self.answered(&answer),
            Message::Write(controller, account, number, write) => self.write(controller, account, number, *write),
            Message::Wrote(controller, account, number, done) => self.wrote(controller, account, number, done),
        }
    }

    /// The API server: a record is written over exactly the epoch before.
    fn write(
        &mut self,
        controller: usize,
        account: usize,
        number: u64,
        (record, terms, highest): (LedgerRecord, LedgerTerms, LimitAmounts),
    ) {
        if self.objects[account].deleted {
            say!(self, "a{account} is gone, says the API server to c{controller}");
            return self.send(Message::Wrote(controller, account, number, WriteResult::Gone));
        }
        let old = self.objects[account].record.take();
        let over = old.as_ref().map_or(0, |record| record.epoch) + 1;
        let done = record.epoch == over || self.setup.mutation == Mutation::ForcedApply;
        let denied = self.random.percent(self.setup.denials);
        if done && denied {
            say!(self, "a{account} is refused to c{controller} for another reason");
            self.objects[account].record = old;
        } else if done {
            say!(self, "a{account} written by c{controller}: {}", brief(&record));
            let verdict = self
                .oracle
                .accepted(account, old.as_ref(), &record, &terms, &highest, self.now);
            self.verdict = self.verdict.clone().and(verdict);
            let object = &mut self.objects[account];
            // The answer to a gate is used up with the record that counts it.
            let counted = |id: &str| id.starts_with(GATE_TOP_UP) && record.top_ups.iter().any(|top_up| top_up.id == id);
            for (id, amount) in &mut object.top_ups {
                if counted(id) {
                    *amount = Amount::ZERO;
                }
            }
            object.latest = object.latest.max(record.watermark.as_millisecond());
            object.record = Some(record);
        } else {
            say!(
                self,
                "a{account} refuses c{controller}: {} is not over {}",
                record.epoch,
                over - 1
            );
            self.objects[account].record = old;
        }
        let fate = match done {
            true if denied => WriteResult::Denied,
            true => WriteResult::Written,
            false => WriteResult::Refused,
        };
        self.send(Message::Wrote(controller, account, number, fate));
    }

    // Controllers --------------------------------------------------------------------------------------------------

    fn take_over(&mut self, controller: usize) {
        let wall = if self.setup.clocks_right {
            self.now
        } else {
            self.now + self.random.range(-1, 2) * self.random.range(0, 60_000)
        };
        self.take_over_at(controller, wall);
    }

    /// The same, when the controller's clock shows this.
    fn take_over_at(&mut self, controller: usize, wall: i64) {
        let wall = if self.setup.mutation == Mutation::NeverHeal {
            let latest = self.objects.iter().map(|object| object.latest);
            latest.max().unwrap_or(0).max(wall)
        } else {
            wall
        };
        let records: Vec<_> = self.objects.iter().map(|object| self.read(object)).collect();
        let accounts = self
            .there()
            .map(|account| (account, self.objects[account].terms.clone(), records[account].as_ref()));
        let leader = Leader::take_over(accounts, at(wall), self.setup.mutation);
        let known = |account: usize| {
            if leader.knows(account) {
                leader.limits(account)
            } else {
                LimitAmounts::default()
            }
        };
        let limits: Vec<_> = (0..self.objects.len()).map(known).collect();
        let term = LeaderTerm {
            leader,
            base: wall,
            since: self.now,
            // Top-ups are read by the first observation.
            known: self
                .objects
                .iter()
                .map(|object| object.revision.wrapping_sub(1))
                .collect(),
            highest: limits.clone(),
            planned: limits,
            write: vec![0; self.objects.len()],
            asks: BTreeMap::new(),
        };
        say!(
            self,
            "c{controller} takes over, its clock is wrong by {}",
            wall - self.now
        );
        self.controllers[controller].term = Some(term);
        self.refresh_limits();
    }

    /// The record of an object, as a new leader reads it.
    #[expect(clippy::wildcard_enum_match_arm, reason = "the other mutations break other places")]
    fn read(&self, object: &Object) -> Option<LedgerRecord> {
        let mut record = object.record.clone()?;
        match self.setup.mutation {
            Mutation::IgnoreHolders => record.holders.clear(),
            Mutation::FreeByTime if self.now - record.watermark.as_millisecond() > 2000 => record.holders.clear(),
            Mutation::FreeTheDead => record.holders.retain(|holder| !self.dead.contains(&holder.record)),
            Mutation::FreeEarly => shift(&mut record, &object.terms.window, 90),
            Mutation::DropWatermark => record.watermark = Timestamp::UNIX_EPOCH,
            _ => {}
        }
        Some(record)
    }

    /// Gives the judge the limits used by leaders that can still write.
    fn refresh_limits(&mut self) {
        for account in 0..self.objects.len() {
            let epoch = self.objects[account].record.as_ref().map_or(0, |record| record.epoch);
            let limits = self
                .controllers
                .iter()
                .filter_map(|controller| controller.term.as_ref())
                .filter(|term| term.leader.knows(account) && term.leader.account(account).epoch() == epoch)
                .map(|term| term.highest[account])
                .reduce(|a, b| larger(&a, &b));
            if let Some(limits) = limits {
                self.oracle.limits(account, limits, self.now);
            }
        }
    }

    fn controller(&mut self, controller: usize) {
        if self.controllers[controller].frozen_until > self.now {
            return;
        }
        if self.controllers[controller].term.is_none() {
            if self.random.percent(30) || self.controllers.iter().all(|controller| controller.term.is_none()) {
                self.take_over(controller);
            }
            return;
        }
        match self.random.index(10) {
            0..2 => self.observe(controller),
            2..8 => self.flush(controller, false),
            8 => self.bury(controller),
            _ => self.no_word(controller),
        }
    }

    /// The leader sees what the budgets' specs say.
    fn observe(&mut self, controller: usize) {
        let now = self.now;
        let records: Vec<_> = self.objects.iter().map(|object| self.read(object)).collect();
        let Some(term) = &mut self.controllers[controller].term else {
            return;
        };
        let time = term.time(now);
        for (account, object) in self.objects.iter().enumerate() {
            if object.deleted {
                term.leader.remove(account);
            }
            if account >= term.known.len() {
                if !object.deleted {
                    let record = records[account].as_ref();
                    term.leader.add(account, object.terms.clone(), record, time);
                }
                term.known.push(object.revision.wrapping_sub(1));
                term.highest.push(object.terms.limits);
                term.planned.push(object.terms.limits);
                term.write.push(0);
            }
            if object.deleted || term.known[account] == object.revision {
                continue;
            }
            term.known[account] = object.revision;
            term.leader.set_terms(account, &object.terms, &object.top_ups, time);
            term.highest[account] = larger(&term.highest[account], &term.leader.limits(account));
        }
        self.refresh_limits();
    }

    fn bury(&mut self, controller: usize) {
        self.reap();
        let now = self.now;
        let Some(term) = &mut self.controllers[controller].term else {
            return;
        };
        let time = term.time(now);
        for account in 0..self.objects.len() {
            for record in &self.dead {
                term.leader.bury(account, record, time);
            }
        }
        term.leader.tick(time);
    }

    /// No outcome of a write for too long: the process ends, and the next leader reads the result.
    fn no_word(&mut self, controller: usize) {
        let Some(term) = &self.controllers[controller].term else {
            return;
        };
        if (0..self.objects.len()).any(|account| term.leader.is_writing(account)) && self.random.percent(20) {
            say!(self, "c{controller} ends: no word of its write");
            self.controllers[controller].term = None;
        }
    }

    /// Writes what changed. One write of an account at a time.
    fn flush(&mut self, controller: usize, only_due: bool) {
        let (now, mutation) = (self.now, self.setup.mutation);
        for account in 0..self.objects.len() {
            let skew = self.random.range(0, 100);
            let Some(term) = &mut self.controllers[controller].term else {
                return;
            };
            let time = term.time(now);
            if !term.leader.knows(account) {
                continue;
            }
            let Some(mut record) = term.leader.compose(account, only_due, time) else {
                continue;
            };
            let terms = term.leader.account(account).terms().clone();
            if mutation == Mutation::ChargeAtGatewaysClock {
                shift(&mut record, &terms.window, skew);
            }
            let limits = term.leader.limits(account);
            let highest = larger(&term.highest[account], &limits);
            (term.highest[account], term.planned[account]) = (highest, limits);
            self.writes += 1;
            term.write[account] = self.writes;
            if mutation == Mutation::TellBeforeWrite {
                let early = term.leader.clone().written(account, time);
                for answer in early {
                    self.send(Message::Answer(Box::new(answer)));
                }
            }
            say!(self, "c{controller} writes a{account}: {}", brief(&record));
            let write = Box::new((record, terms, highest));
            self.send(Message::Write(controller, account, self.writes, write));
        }
        self.refresh_limits();
    }

    fn wrote(&mut self, controller: usize, account: usize, number: u64, fate: WriteResult) {
        let now = self.now;
        let Some(term) = &mut self.controllers[controller].term else {
            return;
        };
        if term.write.get(account) != Some(&number) || !term.leader.is_writing(account) {
            return;
        }
        let time = term.time(now);
        if fate == WriteResult::Gone {
            return term.leader.lost(account, time);
        }
        if fate == WriteResult::Denied && self.setup.mutation != Mutation::TakeRefusedForWritten {
            return term.leader.denied(account);
        }
        if fate == WriteResult::Refused {
            say!(self, "c{controller} finds that another leads");
            self.controllers[controller].term = None;
            return;
        }
        let answers = term.leader.written(account, time);
        term.highest[account] = larger(&term.planned[account], &term.leader.limits(account));
        self.refresh_limits();
        for answer in answers {
            self.send(Message::Answer(Box::new(answer)));
        }
        self.flush(controller, true);
    }

    fn requested(&mut self, controller: usize, request: &LeaderRequest) {
        let now = self.now;
        if self.controllers[controller].frozen_until > now {
            return;
        }
        // Watches lag behind, but not forever.
        let seen = self.controllers[controller]
            .term
            .as_ref()
            .map_or(0, |term| term.known.len());
        if self.objects[seen..].iter().any(|object| now > object.made + LAG) {
            self.observe(controller);
        }
        let draws: Vec<usize> = self.gateways[request.gateway]
            .draws
            .iter()
            .map(|(account, _)| *account)
            .collect();
        let Some(term) = &mut self.controllers[controller].term else {
            return;
        };
        let time = term.time(now);
        let answer = term.leader.request(request, &draws, time);
        let verdict = term.judge_exhaustion(request, &draws, self.gateways.len());
        self.verdict = self.verdict.clone().and(verdict);
        for account in 0..term.highest.len() {
            if !term.leader.knows(account) {
                continue;
            }
            let limits = term.leader.limits(account);
            term.highest[account] = larger(&term.highest[account], &limits);
            term.planned[account] = larger(&term.planned[account], &limits);
        }
        if self.setup.trace {
            let waits = answer.is_none();
            say!(
                self,
                "c{controller} hears g{} {:?} waits {waits}",
                request.gateway,
                request.body.accounts
            );
        }
        if let Some(answer) = answer {
            self.send(Message::Answer(Box::new(answer)));
        }
        if self.random.percent(60) {
            self.flush(controller, true);
        }
    }

    // Gateways -----------------------------------------------------------------------------------------------------

    fn gateway(&mut self, gateway: usize) {
        if self.gateways[gateway].frozen_until > self.now {
            return;
        }
        if !self.gateways[gateway].up {
            self.start(gateway);
            return;
        }
        match self.random.index(40) {
            0..3 => self.sync(gateway),
            3 => self.change(gateway, "gives back", |wallet, _, _| wallet.give_back(None)),
            4 => self.change(gateway, "closes what is idle", |wallet, draws, now| {
                wallet.close_idle(draws, now)
            }),
            5 => self.change(gateway, "goes to sleep", |wallet, _, _| wallet.close_all()),
            6 | 7 if self.gateways[gateway].wants.is_none() => self.ask_ahead(gateway),
            _ => {
                let flights = self.gateways[gateway].flights.len();
                if flights > 0 && (flights > 1 || self.random.percent(70)) {
                    let place = self.random.index(flights);
                    if self.gateways[gateway].flights[place].sent {
                        self.settle(gateway, place, None);
                    } else {
                        self.send_call(gateway, place, None);
                    }
                } else {
                    self.try_call(gateway);
                }
            }
        }
    }

    fn start(&mut self, gateway: usize) {
        let crash = self.crash();
        let times = self.measures();
        self.gateways[gateway].pod += self.random.range(0, 2);
        let estimated = self.gateways[gateway].start(self.setup.mutation, crash);
        say!(self, "g{gateway} starts again ({crash:?}), open were {estimated:?}");
        for (call, amount) in estimated.unwrap_or_default() {
            self.oracle.settle(call, Some(amount), |account| times[account]);
        }
    }

    /// A change of the wallet, committed; then it is reported to the leader.
    fn change(
        &mut self,
        gateway: usize,
        what: &str,
        change: impl Fn(&mut agentloop::ledger::wallet::Wallet, &[agentloop::ledger::wallet::AccountDraw<'_>], u64) -> bool,
    ) {
        let crash = self.crash();
        let now = u64::try_from(self.now).unwrap();
        let of = &mut self.gateways[gateway];
        let mut wallet = of.wallet.clone();
        if change(&mut wallet, &of.wallet_draws(), now) {
            say!(self, "g{gateway} {what} ({crash:?})");
            if self.gateways[gateway].commit(wallet, None, crash) {
                self.sync(gateway);
            }
        }
    }

    /// Reports everything to the presumed leader.
    fn sync(&mut self, gateway: usize) {
        self.request(gateway, |_| false);
    }

    fn find_leader(&mut self) -> Option<usize> {
        let leading = |controller: &&usize| self.controllers[**controller].term.is_some();
        let all: Vec<_> = (0..self.controllers.len()).collect();
        let leaders: Vec<_> = all.iter().filter(leading).copied().collect();
        (!leaders.is_empty()).then(|| leaders[self.random.index(leaders.len())])
    }

    /// Requests room for later calls, so that no call waits for it.
    fn ask_ahead(&mut self, gateway: usize) {
        let draws = self.gateways[gateway].draws.clone();
        self.gateways[gateway].wants = Some((Amount::ZERO, self.call(gateway, self.setup.call - 1)));
        self.request(gateway, |id| {
            draws.iter().any(|(account, _)| account_id(*account) == id)
        });
        self.gateways[gateway].wants = None;
    }

    /// Requests for the accounts with something to report, and no others.
    fn request(&mut self, gateway: usize, asks: impl Fn(&str) -> bool) {
        let Some(controller) = self.find_leader() else { return };
        let now = u64::try_from(self.now).unwrap();
        let of = &self.gateways[gateway];
        let account = |account: usize| {
            let id = account_id(account);
            let statements = of.wallet.statements().filter(|(of, _)| *of == id);
            let statements: Vec<_> = statements.map(|(_, statement)| statement).collect();
            let ask = of.wants.filter(|_| asks(id));
            let ask = ask.map(|(least, full)| of.wallet.grant_request(id, least, full, now));
            (ask.is_some() || !statements.is_empty()).then(|| AccountRequest {
                account: id.into(),
                statements,
                ask,
            })
        };
        let request = LeaderRequest {
            who: of.who(),
            gateway,
            body: LeaseRequest {
                epoch: of.pod,
                record: of.disk.record.clone(),
                accounts: (0..self.objects.len()).filter_map(account).collect(),
            },
            sent: self.now,
            went_back: of.went_back,
            last: of.leaving,
        };
        self.send(Message::Request(controller, Box::new(request)));
    }

    /// Reserves the call that is wanted, or asks for what is missing.
    fn try_call(&mut self, gateway: usize) {
        if self.gateways[gateway].draws.is_empty() {
            return;
        }
        let (least, full) = if let Some(wants) = self.gateways[gateway].wants {
            wants
        } else {
            let full = self.random.range(self.setup.call / 2, self.setup.call);
            let least = self.random.range(1, full + 1);
            let wants = (self.call(gateway, least), self.call(gateway, full));
            let wants = (self.counted(gateway, &wants.0), self.counted(gateway, &wants.1));
            self.gateways[gateway].wants = Some(wants);
            let bill = self.random.range(1, full + 1);
            let lasts = self.random.range(0, 2 * self.setup.pace + 1);
            let of = &self.gateways[gateway];
            self.afterwards
                .attempt(self.now, lasts, bill, of.draws.iter().map(|(account, _)| *account));
            wants
        };
        if let Err(short) = self.reserve(gateway, &least, &full) {
            self.request(gateway, |id| short.contains(id));
        }
    }

    /// Reserves the call that is wanted; or the accounts that have too little.
    fn reserve(&mut self, gateway: usize, least: &Amount, full: &Amount) -> Result<(), BTreeSet<AccountId>> {
        let now = u64::try_from(self.now).unwrap();
        let of = &self.gateways[gateway];
        let draws = of.wallet_draws();
        let mut wallet = of.wallet.clone();
        let reservation = wallet
            .reserve(&draws, full, now)
            .or_else(|_| wallet.reserve(&draws, least, now))?;
        let crash = self.crash();
        let times = self.measures();
        // What it can cost, not what its gateway takes it to cost.
        let worst = self.call(gateway, reservation.amount.tokens);
        let of = &self.gateways[gateway];
        let early = self.setup.mutation == Mutation::SpendBeforeCommit && crash != Crash::No;
        let call = if crash == Crash::BeforeCommit && !early {
            usize::MAX
        } else {
            let on = reservation.leases.iter().map(|(id, lease)| {
                let account = account_index(id);
                let found = of.draws.iter().find(|(drawn, _)| *drawn == account);
                let kinds = found.map_or(LimitAmounts::default(), |(_, kinds)| *kinds);
                (account, *lease, kinds, times[account])
            });
            self.oracle.reserve(of.agent, worst, on)
        };
        say!(self, "g{gateway} reserves call {call}: {reservation:?} ({crash:?})");
        if early {
            // The call is sent although its reservation was never on disk.
            self.oracle.bill(call, reservation.amount);
            self.oracle.settle(call, Some(Amount::ZERO), |account| times[account]);
            self.gateways[gateway].die();
            return Ok(());
        }
        let mut open = of.disk.open.clone();
        open.insert(call, reservation.clone());
        let of = &mut self.gateways[gateway];
        of.wants = None;
        if of.commit(wallet, Some(open), crash) {
            of.flights.push(CallInFlight {
                call,
                reservation,
                sent: false,
            });
        }
        Ok(())
    }

    /// The request leaves; from now on the provider may bill it.
    fn send_call(&mut self, gateway: usize, place: usize, bill: Option<i64>) {
        let flight = &mut self.gateways[gateway].flights[place];
        flight.sent = true;
        let (call, bound) = (flight.call, flight.reservation.amount.tokens);
        let bill = bill.unwrap_or_else(|| {
            if self.setup.overbills && self.random.percent(15) {
                bound + self.random.range(1, 10)
            } else if self.random.percent(60) {
                bound
            } else {
                self.random.range(0, bound + 1)
            }
        });
        say!(self, "g{gateway} sends call {call}, the bill is {bill} of {bound}");
        let bill = self.call(gateway, bill);
        self.oracle.bill(call, bill);
    }

    /// The answer has arrived, or is known never to arrive.
    fn settle(&mut self, gateway: usize, place: usize, fixed: Option<Crash>) {
        let crash = fixed.unwrap_or_else(|| self.crash());
        let estimated = fixed.is_none() && self.random.percent(15);
        let times = self.measures();
        let of = &mut self.gateways[gateway];
        let flight = of.flights.swap_remove(place);
        let bill = self.oracle.billed(flight.call);
        let said = (self.setup.contradicts && fixed.is_none() && !estimated)
            .then(|| read_counts(flight.call, bill.tokens, self.setup.mutation));
        let price = of.price;
        let tokens_of = |tokens: i64| Amount {
            tokens,
            calls: 1,
            cost: tokens * price,
            ..Amount::ZERO
        };
        let counted = if estimated && self.setup.mutation == Mutation::ErrorsAreFree {
            Amount {
                calls: 1,
                ..Amount::ZERO
            }
        } else if estimated || said == Some(None) {
            flight.reservation.amount.max(&bill)
        } else if let Some(Some(tokens)) = said {
            tokens_of(tokens)
        } else {
            bill
        };
        let counted = self.counted(gateway, &counted);
        let of = &self.gateways[gateway];
        let mut wallet = of.wallet.clone();
        wallet.settle(&flight.reservation, &counted);
        let mut open = of.disk.open.clone();
        open.remove(&flight.call);
        say!(
            self,
            "g{gateway} settles call {} to {} ({crash:?})",
            flight.call,
            counted.tokens
        );
        self.gateways[gateway].commit(wallet, Some(open), crash);
        if crash != Crash::BeforeCommit {
            self.oracle.settle(flight.call, Some(counted), |account| times[account]);
        }
    }

    fn answered(&mut self, answer: &LeaderResponse) {
        let gateway = answer.gateway;
        let of = &self.gateways[gateway];
        let is_of_earlier = answer.went_back < of.went_back;
        if !of.up || of.frozen_until > self.now || of.disk.record != answer.record || is_of_earlier {
            return;
        }
        let crash = self.crash();
        say!(self, "g{gateway} hears {:?} ({crash:?})", answer.body.accounts);
        if !self.gateways[gateway].hear(answer, self.setup.mutation, crash) {
            return;
        }
        // As the gateway does at once: what only a lease of a past window has is reported as free.
        self.change(gateway, "drops what is over", |wallet, draws, now| {
            wallet.close_idle(draws, now)
        });
        if !self.gateways[gateway].up {
            return;
        }
        // A waiting call is tried again before the answer is used for anything else.
        if let Some((least, full)) = self.gateways[gateway].wants {
            let _ = self.reserve(gateway, &least, &full);
        }
    }

    // Quiet --------------------------------------------------------------------------------------------------------

    /// The network recovers, and nothing crashes any more. Then every rule about the end must hold.
    fn quiet(&mut self) -> OracleVerdict {
        say!(self, "--- quiet");
        self.quiet = true;
        (self.setup.losses, self.setup.crashes, self.setup.denials) = (0, 0, 0);
        let silent = (self.random.percent(30) && self.gateways[0].up).then_some(0);
        self.heal();
        let leader = self.pick_leader();
        self.settle_all(silent);
        self.talk(leader, silent, 2, false);
        self.verdict.clone()?;
        self.progress(leader, silent)?;
        self.verdict.clone()?;
        self.settle_all(silent);
        self.talk(leader, silent, 3, true);
        // A budget that was deleted while there was no leader is missed for some time.
        self.now += 2 * LAG;
        self.talk(leader, silent, 2, true);
        self.verdict.clone()?;
        self.no_leak(leader, silent)?;
        if let Some(silent) = silent {
            // It was alive all the time, and spends from its lease.
            say!(self, "--- g{silent} speaks again");
            for _ in 0..6 {
                self.try_call(silent);
                self.settle_all(None);
            }
            self.net.clear();
            self.talk(leader, None, 1, false);
            self.settle_all(None);
            self.talk(leader, None, 3, true);
            self.now += 2 * LAG;
            self.talk(leader, None, 2, true);
            self.no_leak(leader, None)?;
        }
        self.heals(leader)?;
        self.comes_back(leader)?;
        self.verdict.clone()
    }

    /// A clock that was wrong once does no lasting harm: under a leader with a right clock, the ledger's time agrees with it
    /// after twice the time by which it was ahead.
    fn heals(&mut self, leader: usize) -> OracleVerdict {
        self.take_over_at(leader, self.now);
        let there: Vec<_> = self.there().collect();
        for account in there {
            let Some(term) = &self.controllers[leader].term else {
                continue;
            };
            let mut book = term.leader.account(account).clone();
            // Half a millisecond counts as a whole one.
            let ahead = book.time().duration_since(at(self.now)).as_nanos().max(0);
            let wait = i64::try_from((2 * ahead + 999_999) / 1_000_000).unwrap();
            book.advance(term.time(self.now + wait));
            if book.time() != at(self.now + wait) {
                return Err(format!(
                    "NOT HEALED: account {account} is at {} after {wait} ms, the clock at {}",
                    book.time(),
                    at(self.now + wait)
                ));
            }
        }
        Ok(())
    }

    /// A deleted Agent returns its lease before its pod is gone.
    fn comes_back(&mut self, leader: usize) -> OracleVerdict {
        let gateway = self.gateways.len() - 1;
        self.observe(leader);
        self.tell_terms(gateway);
        self.gateways[gateway].wants = Some((self.call(gateway, 1), self.call(gateway, 1)));
        self.try_call(gateway);
        self.drain(None);
        // What a leader grants to a gateway that has left is held until the pod is gone: here its question is answered first.
        self.flush(leader, false);
        self.drain(None);
        self.settle_all(None);
        let record = self.gateways[gateway].disk.record.clone();
        say!(self, "--- g{gateway} goes for good");
        self.remake_agent(gateway);
        self.drain(None);
        let term = self.controllers[leader].term.as_ref();
        for account in self.there() {
            let holds = term.is_some_and(|term| term.leader.account(account).is_holder(&record));
            if holds {
                return Err(format!("LEAK: a deleted Agent gives nothing back of account {account}"));
            }
        }
        Ok(())
    }

    fn heal(&mut self) {
        for gateway in &mut self.gateways {
            gateway.frozen_until = 0;
        }
        for gateway in 0..self.gateways.len() {
            if !self.gateways[gateway].up {
                self.start(gateway);
            }
        }
        for controller in &mut self.controllers {
            controller.frozen_until = 0;
        }
        // Messages under way arrive late, or never.
        if self.random.percent(50) {
            self.net.clear();
        }
    }

    /// One leader remains: the present one, if it still may lead, or a new one.
    fn pick_leader(&mut self) -> usize {
        let stays = self.random.index(self.controllers.len());
        let may = self.controllers[stays].term.as_ref().is_some_and(|term| {
            self.there().all(|account| {
                let record = self.objects[account].record.as_ref();
                let epoch = record.map_or(0, |record| record.epoch);
                // It now sees a budget that it had not seen.
                !term.leader.knows(account)
                    || epoch == term.leader.account(account).epoch() && !term.leader.is_writing(account)
            })
        });
        for (place, controller) in self.controllers.iter_mut().enumerate() {
            if place != stays || !may {
                controller.term = None;
            }
        }
        // No write of earlier leaders is under way any more that could still take effect.
        self.net.retain(|packet| !matches!(packet, Message::Write(..)));
        if !may {
            self.take_over(stays);
        }
        self.observe(stays);
        stays
    }

    fn settle_all(&mut self, silent: Option<usize>) {
        for gateway in (0..self.gateways.len()).filter(|gateway| Some(*gateway) != silent) {
            self.gateways[gateway].wants = None;
            while !self.gateways[gateway].flights.is_empty() {
                if !self.gateways[gateway].flights[0].sent {
                    self.send_call(gateway, 0, None);
                }
                self.settle(gateway, 0, Some(Crash::No));
            }
        }
    }

    fn drain(&mut self, silent: Option<usize>) {
        for _ in 0..400 {
            let Some(packet) = (!self.net.is_empty()).then(|| self.net.swap_remove(0)) else {
                return;
            };
            let deaf = matches!(&packet, Message::Answer(answer) if Some(answer.gateway) == silent);
            if !deaf {
                self.deliver(packet);
            }
            if self.verdict.is_err() {
                return;
            }
        }
        self.verdict = Err("the network never comes to rest".into());
    }

    /// All gateways report their state, and it is written.
    fn talk(&mut self, leader: usize, silent: Option<usize>, rounds: usize, end: bool) {
        for _ in 0..rounds {
            for gateway in (0..self.gateways.len()).filter(|gateway| Some(*gateway) != silent) {
                self.sync(gateway);
                self.drain(silent);
                if end {
                    // Also what a late answer brought.
                    self.change(gateway, "closes all", |wallet, _, _| wallet.close_all());
                } else {
                    self.change(gateway, "closes what is idle", |wallet, draws, now| {
                        wallet.close_idle(draws, now)
                    });
                }
                self.drain(silent);
            }
            self.bury(leader);
            self.flush(leader, false);
            self.drain(silent);
        }
    }

    /// (c) and (d): everything that is not spent is free, and what is spent is counted once.
    fn no_leak(&self, leader: usize, silent: Option<usize>) -> OracleVerdict {
        let Some(term) = &self.controllers[leader].term else {
            return Err("the only leader gave up".into());
        };
        for (place, gateway) in self.gateways.iter().enumerate() {
            if Some(place) != silent && gateway.wallet.statements().next().is_some() {
                let left: Vec<_> = gateway.wallet.statements().collect();
                return Err(format!("LEAK: g{place} never comes to an end with {left:?}"));
            }
        }
        for account in self.there() {
            let book = term.leader.account(account);
            let silent = silent.map(|silent| self.gateways[silent].disk.record.as_str());
            let holder = book.holders().find(|who| Some(who.record.as_str()) != silent);
            if let Some(who) = holder {
                return Err(format!("LEAK: {} still holds of account {account}", who.record));
            }
            let lifetime = matches!(book.terms().window, WindowRule::Lifetime);
            if lifetime && silent.is_none() && self.oracle.one_rule(account) && !self.oracle.lost {
                let counted = self.oracle.counted(account);
                let used = book.used();
                if counted.is_some_and(|counted| counted != used) {
                    return Err(format!(
                        "COUNTED WRONG: account {account} has {used:?}, gateways {counted:?}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// (e) A call that fits is granted within few rounds, though others keep asking for small ones.
    fn progress(&mut self, leader: usize, silent: Option<usize>) -> OracleVerdict {
        let gateway = self.gateways.len() - 1;
        for other in 0..self.gateways.len() {
            self.tell_terms(other);
        }
        let Some(fits) = self.fits(leader, gateway) else {
            return Ok(());
        };
        if Some(gateway) == silent || self.gateways[gateway].draws.is_empty() {
            return Ok(());
        }
        let call = self.call(gateway, fits.max(1));
        say!(self, "--- g{gateway} wants {fits}, which fits");
        for other in 0..gateway {
            self.gateways[other].wants = None;
        }
        let start = self.now;
        for round in 0.. {
            if round > ROUNDS && self.now > start + GRANT_TIMEOUT_MILLISECONDS {
                break;
            }
            self.gateways[gateway].wants = Some((call, call));
            self.try_call(gateway);
            if !self.gateways[gateway].flights.is_empty() {
                self.send_call(gateway, 0, Some(0));
                self.settle(gateway, 0, Some(Crash::No));
                return Ok(());
            }
            for other in (0..gateway).filter(|other| Some(*other) != silent) {
                let small = self.random.range(1, 4);
                let small = self.call(other, small);
                if !self.gateways[other].draws.is_empty() {
                    self.gateways[other].wants = Some((small, small));
                    self.try_call(other);
                }
                if self.random.percent(50) {
                    self.settle_free(other);
                }
            }
            self.drain(silent);
            self.recall(leader, silent);
            self.drain(silent);
            self.now += self.random.range(0, 900);
        }
        Err(format!("NO PROGRESS: g{gateway} never gets {fits}, which fits"))
    }

    /// Calls that cost nothing in the end, so that what fits still fits.
    fn settle_free(&mut self, gateway: usize) {
        while !self.gateways[gateway].flights.is_empty() {
            if !self.gateways[gateway].flights[0].sent {
                let call = self.gateways[gateway].flights[0].call;
                self.gateways[gateway].flights[0].sent = true;
                self.oracle.bill(call, Amount::ZERO);
            }
            self.settle(gateway, 0, Some(Crash::No));
        }
    }

    /// The gateways return what they do not need, in the accounts where the leader recalls it.
    fn recall(&mut self, leader: usize, silent: Option<usize>) {
        let Some(term) = &self.controllers[leader].term else {
            return;
        };
        let recalled: Vec<_> = self
            .there()
            .filter(|account| term.leader.account(*account).recalls())
            .collect();
        for gateway in (0..self.gateways.len()).filter(|gateway| Some(*gateway) != silent) {
            for account in &recalled {
                let id = account_id(*account);
                self.change(gateway, "gives back what is recalled", |wallet, _, _| {
                    wallet.give_back(Some(id))
                });
            }
        }
    }

    /// A call that is certain to fit into what is neither spent nor held by a silent gateway. `None`: there is none.
    fn fits(&mut self, leader: usize, gateway: usize) -> Option<i64> {
        let now = self.now;
        let term = self.controllers[leader].term.as_mut()?;
        let agent = self.gateways[gateway].who().agent;
        let mut room = self.setup.call;
        let time = term.time(now);
        term.leader.tick(time);
        for (account, _) in &self.gateways[gateway].draws {
            let mut book = term.leader.account(*account).clone();
            book.advance(time);
            // Top-ups may leave their window before it is written.
            let (limits, used, reserved) = (book.terms().limits, book.used(), book.reserved());
            let mine = book.shares().into_iter().find(|(name, _)| *name == agent);
            let mine = mine.map_or(0, |(_, amount)| amount.tokens);
            room = room.min(limits.tokens? - used.tokens);
            if let Some(own) = book.per_agent().tokens {
                // What an earlier pod of this Agent still holds counts in the Agent's share.
                let record = &self.gateways[gateway].disk.record;
                if book.holders().any(|who| who.agent == agent && who.record != *record) {
                    return None;
                }
                room = room.min(own - mine);
            }
            // Each of the others may have a small call in flight, and the silent one returns nothing.
            let others = i64::try_from(self.gateways.len()).ok()?;
            room = room.min(limits.tokens? - used.tokens - reserved.tokens - 4 * others);
            if limits
                .calls
                .is_some_and(|calls| calls - used.calls - reserved.calls < 2 * others)
            {
                return None;
            }
            let money = (room.max(0) + 8 * others) * PRICES[1];
            if limits.cost.is_some_and(|cost| cost - used.cost - reserved.cost < money) {
                return None;
            }
        }
        (room > 0).then_some(room)
    }
}

/// What a token costs, by model.
const PRICES: [i64; 2] = [1, 7];
/// Milliseconds from the request to stop a pod until it is gone.
const STOPS: i64 = 60_000;
/// The rounds, and below the milliseconds, after which a call that fits must have been granted: a refused gateway is waited
/// for, also where it has gone.
const ROUNDS: usize = 12;
const GRANT_TIMEOUT_MILLISECONDS: i64 = 4 * CONTENTION_WAIT.as_secs() * 1000;
/// Milliseconds after which a leader has seen a new budget: less than an account is missed until it is gone.
const LAG: i64 = 50_000;

fn larger(a: &LimitAmounts, b: &LimitAmounts) -> LimitAmounts {
    let of = |kind: AmountKind| a.get(kind).zip(b.get(kind)).map(|(a, b)| a.max(b));
    LimitAmounts {
        tokens: of(AmountKind::Tokens),
        calls: of(AmountKind::Calls),
        cost: of(AmountKind::Cost),
        ..LimitAmounts::default()
    }
}

/// What a gateway takes from the counts of an answer with content that was billed this many tokens; `None`: they contradict
/// each other. Four of eight do, and each of those names less than the bill.
fn read_counts(call: usize, tokens: i64, mutation: Mutation) -> Option<i64> {
    let counts = |prompt: i64, completion: i64, total: i64, cached: i64| {
        json!({
            "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total,
            "prompt_tokens_details": {"cached_tokens": cached},
        })
    };
    let usage = match call % 8 {
        0 => counts(0, 0, 0, 0),
        1 => counts(1, 0, 1, 0),
        2 => counts(1, 1, 1, 0),
        3 => counts(1, 1, 2, 2),
        _ => counts(tokens - tokens / 2, tokens / 2, tokens, 0),
    };
    if mutation == Mutation::BelieveTheCounts {
        return Some(usage["prompt_tokens"].as_i64()? + usage["completion_tokens"].as_i64()?);
    }
    let bill = read_beside(true, WireFormat::OpenAiChat, &usage)?;
    Some(bill.all_input()? + bill.output)
}

/// Moves what is settled into the past of a rolling window, by this percentage of it.
fn shift(record: &mut LedgerRecord, window: &WindowRule, percent: i64) {
    let WindowRule::Rolling(length) = window else { return };
    let by = i64::try_from(length.as_millis()).unwrap() * percent / 100;
    for bucket in &mut record.buckets {
        bucket.start = at(bucket.start.as_millisecond() - by);
    }
}

fn brief(record: &LedgerRecord) -> String {
    let holders: Vec<_> = record
        .holders
        .iter()
        .map(|holder| {
            format!(
                "#{} {} {}/{} -{}",
                holder.lease, holder.record, holder.amount.tokens, holder.spent.tokens, holder.returned.tokens
            )
        })
        .collect();
    let settled: i64 = record.buckets.iter().map(|bucket| bucket.amount.tokens).sum();
    format!("epoch {} settled {settled} holders {holders:?}", record.epoch)
}
