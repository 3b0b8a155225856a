//! One limit at the leader: what is settled, who holds how much, and who may have more.
//!
//! The order that the promise rests on, for whoever drives this: [`Account::apply_statement`] and [`Account::request_grant`] change what is
//! planned; [`Account::compose`] is written to the API server over exactly the epoch before; only then
//! [`Account::confirm_record`]; and gateways are told [`Account::durable_grants`], which speaks of what is written and no more.
//!
//! # What edits mean
//!
//! - A limit raised: there is room for the difference at once.
//! - A limit lowered, or a kind limited that was not: it holds for every call that is not in flight. Nothing is granted
//!   until settled and outstanding are below it; gateways give back what no call in flight needs. What is planned, and
//!   in no record yet, is granted no more.
//! - Another window: what the old one still counts, counts in the new one, as late as it can have been settled; what had
//!   left the old one stays out. Every lease granted before counts in whatever window it is spent.
//! - An Agent that the account does not apply to any more: what it used stays used, and what it holds stays outstanding
//!   until its gateway closes the lease, or is dead.
//! - `perAgent` goes by namespace and name: an Agent made again goes on where it was. Top-ups do not raise it.
//! - An account under another id (a budget made again has another uid) begins empty.

mod lease;
mod record;
mod record_size;
mod room;
mod shares;
#[cfg(test)]
mod tests;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use self::lease::{Lease, LeaseTable};
pub use self::room::AccountRoom;
use self::room::{LargeGrant, WaitingGateway};
use self::shares::AgentShares;
pub use self::shares::MAX_SHARES;
use super::sum::saturating_sum;
use super::window::{SettledUsage, WindowRule};
use crate::api::amount::{Amount, AmountKind, LimitAmounts};
use crate::api::budget::CountedTopUp;

/// Number of a lease within its account; never used again.
pub type LeaseId = i64;

/// How long a refused gateway is waited for while nothing comes back, before others may take what it needs.
pub const CONTENTION_WAIT: SignedDuration = SignedDuration::from_secs(30);
/// How long a refused gateway keeps its place without asking again: one whose call waits asks every second.
pub const WAITER_TIMEOUT: SignedDuration = SignedDuration::from_secs(10);
/// After a wait in vain others have their turn so many times as long.
pub const BACKOFF_FACTOR: i32 = 5;
/// A lease is filled for at most so many calls like the next one: enough for a busy gateway to go from one regular write
/// to the one after, so that a budget under load is not written for each of its gateways by itself.
pub const PREFETCH_CALLS: i64 = 64;
/// Gateways that hold leases at one time; more wait until some close theirs. Fewer where names and amounts are long: the
/// record must stay far below what the API server takes.
pub const MAX_LEASES: usize = 1_000;
/// Top-ups that are remembered, far above what a spec may have.
pub const MAX_TOP_UPS: usize = 256;
/// Ids of top-ups that an approval made begin so; those of a spec cannot.
pub const GATE_TOP_UP: &str = "gate/";

/// The limits and the window of an account.
#[derive(Clone, Debug, PartialEq)]
pub struct LedgerTerms {
    /// For all together; top-ups are not in it.
    pub limits: LimitAmounts,
    /// For each Agent.
    pub per_agent: LimitAmounts,
    /// When something counts.
    pub window: WindowRule,
}

/// An Agent, by namespace and name.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AgentName {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
}

/// Who draws on an account.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeaseHolder {
    /// The gateway's record: what its counts are kept in. Two gateways with one record are one after the other.
    pub record: String,
    /// The Agent.
    pub agent: AgentName,
    /// Uid of its pod.
    pub pod_uid: String,
    /// Epoch of its pod.
    pub epoch: i64,
}

/// What a gateway says of one lease: totals, on its disk.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct LeaseStatement {
    /// Which lease.
    pub lease: LeaseId,
    /// Settled, what counts as spent included.
    pub spent: Amount,
    /// Given back unspent.
    pub returned: Amount,
    /// Nothing is open and the lease is never used again: these are its last numbers.
    pub closed: bool,
}

/// What a gateway needs for its next call.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct GrantRequest {
    /// The lease that it would spend from.
    pub lease: Option<LeaseId>,
    /// Reservations open on that lease.
    pub open: Amount,
    /// The least with which the call is worth making. Nothing: the gateway asks ahead, and no call waits for it; its
    /// lease is filled up with the next regular write, and a later answer says so.
    pub least: Amount,
    /// What the call is to have.
    pub full: Amount,
}

/// Why a gateway gets no more.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct GrantRefusal {
    /// What there is not enough of.
    pub kind: AmountKind,
    /// How much of it there is for this gateway, beyond what it holds.
    pub left: i64,
    /// Whether it is the Agent's own part (`perAgent`) that is spent.
    pub per_agent: bool,
    /// The call can never fit: it needs more than the whole limit.
    pub never: bool,
    /// When there is room by itself, if nobody else takes it; `None`: not by itself, or not known.
    pub resets_at: Option<Timestamp>,
    /// Others hold enough unspent: asking again soon may help.
    pub contended: bool,
}

/// A lease, as it is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DurableGrant {
    /// Its number.
    pub lease: LeaseId,
    /// Total granted of it.
    pub granted: Amount,
    /// What the leader heard of it: spent, and given back. A gateway that knows less has lost what it wrote.
    pub spent: Amount,
    /// Given back.
    pub returned: Amount,
    /// When its window ends, and with it its use for new calls.
    pub ends: Option<Timestamp>,
}

/// The ledger's time while it is ahead of the leader's clock, as after a leader whose clock was wrong: it never goes back,
/// and runs half as fast until the clock has caught up. What is settled leaves its window later then, never earlier.
#[derive(Clone, Copy, Debug, PartialEq)]
struct CatchUpClock {
    /// The ledger's time at the take-over, and the leader's.
    from: Timestamp,
    since: Timestamp,
}

impl CatchUpClock {
    fn at(self, now: Timestamp) -> Timestamp {
        let half = now.duration_since(self.since) / 2;
        self.from.checked_add(half).unwrap_or(self.from).max(now)
    }
}

/// One limit at the leader.
#[derive(Clone, Debug, PartialEq)]
pub struct Account {
    terms: LedgerTerms,
    epoch: i64,
    time: Timestamp,
    /// The last leader's time was ahead of this leader's clock.
    slow: Option<CatchUpClock>,
    /// Ends of the window at hand, by `time`.
    window: (Timestamp, Option<Timestamp>),
    /// Before this moment nothing changes by time alone.
    due: Timestamp,
    next_lease: LeaseId,
    settled: SettledUsage,
    shares: AgentShares,
    leases: LeaseTable,
    top_ups: Vec<CountedTopUp>,
    waiting: Vec<WaitingGateway>,
    /// The last time that others were held back for more than a gateway's fair part.
    large: Option<LargeGrant>,
    /// A grant or a top-up waits for the next record.
    urgent: bool,
    /// Something changed since the last record.
    changed: bool,
}

impl Account {
    /// Time goes on, and never back; what left the window counts no more.
    pub fn advance(&mut self, now: Timestamp) {
        let time = self.slow.map_or(now, |slow| slow.at(now));
        if time <= now {
            self.slow = None;
        }
        self.time = self.time.max(time);
        if self.time >= self.due {
            self.refresh();
        }
    }

    fn refresh(&mut self) {
        let (rule, time) = (&self.terms.window, self.time);
        self.window = (rule.start(time), rule.end(time));
        self.settled.advance(rule, time);
        let shares = self.shares.advance(rule, time);
        // Those of the spec stay known when they count no more, or they would count again.
        self.top_ups
            .retain(|top_up| rule.counts(top_up.at, time) || !top_up.id.starts_with(GATE_TOP_UP));
        room::expire_waiters(&mut self.waiting, time);
        let gates = self.top_ups.iter().filter(|top_up| top_up.id.starts_with(GATE_TOP_UP));
        let moments = gates.filter_map(|top_up| rule.expires_at(top_up.at, time));
        let moments = moments.chain(self.waiting.iter().map(WaitingGateway::due));
        let moments = moments.chain(self.settled.expiries(rule).next());
        let next = moments.chain(shares).chain(self.window.1).min();
        self.due = next.unwrap_or(Timestamp::MAX);
    }

    /// Other limits, or another window. Under a new window everything counts that can lie in it.
    pub fn set_terms(&mut self, terms: LedgerTerms, now: Timestamp) {
        self.advance(now);
        if terms == self.terms {
            return;
        }
        if terms.window != self.terms.window {
            self.recount(&self.terms.window.clone(), &terms.window);
        }
        let old = std::mem::replace(&mut self.terms, terms);
        let lowered = |before: &LimitAmounts, now: &LimitAmounts| {
            now.kinds()
                .any(|kind| before.get(kind).is_none_or(|before| now.get(kind) < Some(before)))
        };
        if lowered(&old.limits, &self.terms.limits) || lowered(&old.per_agent, &self.terms.per_agent) {
            self.leases.drop_planned();
        }
        self.changed = true;
        self.refresh();
    }

    /// What one rule of windows counted, by another.
    fn recount(&mut self, old: &WindowRule, new: &WindowRule) {
        self.settled.translate(old, new, self.time);
        self.shares.translate(old, new, self.time);
        self.leases.detach_windows();
    }

    /// Adds to the limits of the window at hand, once per id. `false`: it was counted before, or does not fit.
    pub fn top_up(&mut self, id: &str, amount: Amount, now: Timestamp) -> bool {
        self.advance(now);
        let counted = self.top_ups.iter().any(|counted| counted.id == id);
        if !counted && self.top_ups.len() >= MAX_TOP_UPS {
            self.join_gates();
        }
        if counted || self.top_ups.len() >= MAX_TOP_UPS || self.limits_with(&amount, self.time).is_none() {
            return false;
        }
        self.top_ups.push(CountedTopUp {
            id: id.into(),
            at: self.time,
            amount,
        });
        (self.changed, self.urgent) = (true, true);
        self.refresh();
        true
    }

    /// The two oldest approvals become one, which counts as long as the older: a gate is answered once, so its name need not
    /// be known any more.
    fn join_gates(&mut self) {
        let is_gate = |top_up: &CountedTopUp| top_up.id.starts_with(GATE_TOP_UP);
        let Some(place) = self.top_ups.iter().position(is_gate) else {
            return;
        };
        let oldest = self.top_ups.remove(place);
        if let Some(next) = self.top_ups.iter_mut().find(|top_up| is_gate(top_up)) {
            next.at = next.at.min(oldest.at);
            next.amount = saturating_sum(&next.amount, &oldest.amount);
        }
    }

    /// Whether the record that this gateway names holds leases of another Agent: it has a copy of that one's volume.
    #[must_use]
    pub fn is_of_another(&self, who: &LeaseHolder) -> bool {
        let mut leases = self.leases.leases_of_record(&who.record);
        leases.any(|(_, lease)| lease.who.agent != who.agent)
    }

    /// Whether this pod was the last to speak of a lease, or to be granted of it.
    #[must_use]
    pub fn is_held_by(&self, lease: LeaseId, who: &LeaseHolder) -> bool {
        let last = self.leases.get(lease).map(|lease| &lease.who);
        last.is_some_and(|last| (&last.record, &last.agent, &last.pod_uid) == (&who.record, &who.agent, &who.pod_uid))
    }

    /// A gateway says what became of a lease. `false`: there is no such lease of this gateway (any more): everything
    /// about it is accounted for, and nothing may be spent from it.
    pub fn apply_statement(&mut self, who: &LeaseHolder, statement: &LeaseStatement, now: Timestamp) -> bool {
        self.advance(now);
        let Some(lease) = self.leases.get(statement.lease) else {
            return false;
        };
        if lease.who.record != who.record || lease.who.agent != who.agent {
            return false;
        }
        let (window, moved) = (lease.window, lease.who != *who);
        let news = statement.spent.saturating_sub(&lease.spent);
        let back = statement.returned.saturating_sub(&lease.returned);
        let closes = statement.closed && !lease.closed;
        if !moved && !closes && news.is_zero() && back.is_zero() {
            return true;
        }
        self.leases.change(statement.lease, |lease| {
            lease.spent = saturating_sum(&lease.spent, &news);
            lease.returned = saturating_sum(&lease.returned, &back);
            lease.who = who.clone();
            lease.closed |= closes;
        });
        self.changed = true;
        self.charge(&who.agent, window, &news);
        self.end_large_turn(&who.record);
        true
    }

    /// At least so much was used in all, of a window that never ends: what is neither settled nor held counts now.
    pub fn charge_at_least(&mut self, agent: &AgentName, used: &Amount, now: Timestamp) {
        self.advance(now);
        let more = used.saturating_sub(&self.taken());
        if !more.is_zero() {
            self.changed = true;
            self.charge(agent, Timestamp::UNIX_EPOCH, &more);
        }
    }

    /// Whether room comes of burying this gateway: of what it holds in a window that lasts, none does, and its own numbers
    /// are better than all that it held.
    #[must_use]
    pub fn frees_by_time(&self, record: &str) -> bool {
        match self.terms.window {
            WindowRule::Rolling(_) => true,
            WindowRule::Calendar(..) => {
                let mut live = self.leases.leases_of_record(record).filter(|(_, lease)| !lease.closed);
                live.any(|(_, lease)| lease.window < self.window.0)
            }
            WindowRule::Lifetime => false,
        }
    }

    /// The gateway is dead for certain: all that it held counts as spent. What was lost.
    pub fn forfeit(&mut self, record: &str, now: Timestamp) -> Amount {
        self.advance(now);
        let live = self.leases.leases_of_record(record).filter(|(_, lease)| !lease.closed);
        let live: Vec<LeaseId> = live.map(|(id, _)| id).collect();
        let mut lost = Amount::ZERO;
        for id in live {
            let buried = self.leases.change(id, |lease| {
                let rest = lease.outstanding();
                lease.spent = saturating_sum(&lease.spent, &rest);
                lease.closed = true;
                (lease.who.agent.clone(), lease.window, rest)
            });
            if let Some((agent, window, rest)) = buried {
                lost = saturating_sum(&lost, &rest);
                self.changed = true;
                self.charge(&agent, window, &rest);
            }
        }
        self.waiting.retain(|waiter| waiter.record != record);
        self.end_large_turn(record);
        lost
    }

    /// This Agent waits for nothing here any more.
    pub fn withdraw(&mut self, agent: &AgentName) {
        self.waiting.retain(|waiter| waiter.agent != *agent);
    }

    fn charge(&mut self, agent: &AgentName, window: Timestamp, amount: &Amount) {
        // Of a calendar window that is over: it counts there, and no more here.
        let over = window != Timestamp::UNIX_EPOCH && window < self.window.0;
        if over || amount.is_zero() {
            return;
        }
        let (rule, time) = (&self.terms.window, self.time);
        self.settled.add(rule, time, amount);
        self.shares.add(rule, time, agent, amount);
        // It leaves after whatever was there before: only the first of all brings a moment.
        let first = self.settled.expiries(rule).next().into_iter();
        let first = first.chain(self.shares.of(agent).expiries(rule).next());
        self.due = first.fold(self.due, Timestamp::min);
    }

    /// The records of all holders, with the pod that was last heard with each.
    pub fn holders(&self) -> impl Iterator<Item = &LeaseHolder> {
        let live = self.leases.iter().filter(|(_, lease)| !lease.closed);
        live.map(|(_, lease)| &lease.who)
    }

    /// Whether this gateway's record has a lease that is not closed.
    #[must_use]
    pub fn is_holder(&self, record: &str) -> bool {
        self.leases.leases_of_record(record).any(|(_, lease)| !lease.closed)
    }

    /// Whether gateways are to give back what they do not need for calls in flight: somebody waits for it, or there is
    /// more out than the limit has.
    #[must_use]
    pub fn recalls(&self) -> bool {
        let waited_for = self.waiting.iter().any(WaitingGateway::goes_first);
        waited_for || self.limits().exceeded_by(&self.taken()).is_some()
    }

    /// Limits of the window at hand, top-ups included.
    #[must_use]
    pub fn limits(&self) -> LimitAmounts {
        self.limits_with(&Amount::ZERO, self.time).unwrap_or(self.terms.limits)
    }

    /// Limits of each Agent.
    #[must_use]
    pub fn per_agent(&self) -> LimitAmounts {
        self.terms.per_agent
    }

    /// The terms.
    #[must_use]
    pub fn terms(&self) -> &LedgerTerms {
        &self.terms
    }

    /// The ledger's time.
    #[must_use]
    pub fn time(&self) -> Timestamp {
        self.time
    }

    /// Epoch of the last record.
    #[must_use]
    pub fn epoch(&self) -> i64 {
        self.epoch
    }

    /// Settled in the window at hand.
    #[must_use]
    pub fn used(&self) -> Amount {
        self.settled.total()
    }

    /// Outstanding, of the kinds that are limited.
    #[must_use]
    pub fn reserved(&self) -> Amount {
        self.leases.outstanding().limited_by(&self.both_limits())
    }

    /// What each Agent settled, the greatest first by tokens, then by money.
    #[must_use]
    pub fn shares(&self) -> Vec<(AgentName, Amount)> {
        self.shares.sorted()
    }

    /// What this Agent settled.
    #[must_use]
    pub fn share_of(&self, agent: &AgentName) -> Amount {
        self.shares.of(agent).total()
    }

    /// Top-ups that count.
    #[must_use]
    pub fn top_ups(&self) -> &[CountedTopUp] {
        &self.top_ups
    }

    /// Whether a grant or a top-up waits to be written.
    #[must_use]
    pub fn is_urgent(&self) -> bool {
        self.urgent
    }

    /// Whether anything changed since the last record.
    #[must_use]
    pub fn is_changed(&self) -> bool {
        self.changed
    }

    /// The limits at a moment, not before now, with something more.
    fn limits_with(&self, more: &Amount, at: Timestamp) -> Option<LimitAmounts> {
        let counted = |top_up: &&CountedTopUp| self.terms.window.counts(top_up.at, at);
        let added = self
            .top_ups
            .iter()
            .filter(counted)
            .try_fold(*more, |sum, top_up| sum.checked_add(&top_up.amount))?;
        self.terms.limits.checked_add(&added)
    }

    fn both_limits(&self) -> LimitAmounts {
        let (all, own) = (self.terms.limits, self.terms.per_agent);
        LimitAmounts::from_fn(|kind| all.get(kind).or(own.get(kind)))
    }

    fn taken(&self) -> Amount {
        saturating_sum(&self.used(), &self.leases.outstanding())
    }

    /// The lease that a gateway's next call would be spent from.
    fn current(&self, record: &str) -> Option<(LeaseId, &Lease)> {
        let window = self.window.0;
        self.leases
            .leases_of_record(record)
            .rev()
            .find(|(_, lease)| lease.window == window && !lease.closed)
    }
}
