//! One limit at the leader: what is settled, who holds leases, and who may get more.
//!
//! The guarantee rests on this order, which the caller must keep: [`Account::apply_statement`] and
//! [`Account::request_grant`] change the plan; [`Account::compose`] is written to the API server over exactly the
//! previous epoch; only then comes [`Account::confirm_record`]; and gateways get [`Account::durable_grants`], which
//! contains only what is written.
//!
//! # Effects of edits
//!
//! - A raised limit: the difference is available at once.
//! - A lowered limit, or a new limit of a kind: it holds for every call that is not in flight. Nothing is granted until
//!   settled and outstanding amounts are below it; gateways return what no call in flight needs. Grants that are
//!   planned but in no record yet are withdrawn.
//! - Another window: what still counts in the old one counts in the new one, as if settled at the latest possible time;
//!   what had left the old one stays out. Leases granted before count in whatever window they are spent.
//! - An Agent to which the account no longer applies: what it used stays used, and what it holds stays outstanding
//!   until its gateway closes the lease or is lost.
//! - `perAgent` is keyed by namespace and name: a recreated Agent continues with its usage. Top-ups do not raise it.
//! - An account with another id (a recreated budget has another uid) starts empty.

mod availability;
mod lease;
mod record;
mod record_size;
mod shares;
#[cfg(test)]
mod tests;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

pub use self::availability::AccountAvailability;
use self::availability::{LargeGrant, WaitingGateway};
use self::lease::{Lease, LeaseTable};
use self::shares::AgentShares;
pub use self::shares::MAX_SHARES;
use super::sum::saturating_sum;
use super::window::{SettledUsage, WindowRule};
use agentloop_api::NamespacedName;
use agentloop_api::amount::{Amount, AmountKind, LimitAmounts};
use agentloop_api::budget::CountedTopUp;

/// Number of a lease within its account; never reused.
pub type LeaseId = i64;

/// How long a refused gateway keeps its claim while nothing is returned, before others may take what it needs.
pub const CONTENTION_WAIT: SignedDuration = SignedDuration::from_secs(30);
/// How long a refused gateway keeps its place without a new request: one with a waiting call requests every second.
pub const WAITER_TIMEOUT: SignedDuration = SignedDuration::from_secs(10);
/// After an unsuccessful wait, others have priority for this multiple of the time waited.
pub const BACKOFF_FACTOR: i32 = 5;
/// A lease is filled for at most this many calls like the next one: enough to last a busy gateway from one regular
/// write to the next, so that a budget under load is not written for each of its gateways separately.
pub const PREFETCH_CALLS: i64 = 64;
/// Maximum number of leases; further gateways wait until some are closed. Fewer if names and amounts are long: the
/// record must stay far below what the API server accepts.
pub const MAX_LEASES: usize = 1_000;
/// Longest wait for the record of a stopped gateway, in a rolling window.
pub const MAX_RECORD_WAIT: SignedDuration = SignedDuration::from_hours(24);
/// Maximum number of top-ups remembered, far more than a spec may have.
pub const MAX_TOP_UPS: usize = 256;
/// Prefix of the ids of top-ups made by approvals; ids in a spec cannot have it.
pub const GATE_TOP_UP: &str = "gate/";

/// The limits and the window of an account.
#[derive(Clone, Debug, PartialEq)]
pub struct LedgerTerms {
    /// Shared limits, without top-ups.
    pub limits: LimitAmounts,
    /// Limits of each single Agent.
    pub per_agent: LimitAmounts,
    /// The window in which usage counts.
    pub window: WindowRule,
}

/// The holder of a lease.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeaseHolder {
    /// Name of the gateway's record, which stores its counts. Two gateways with one record run one after the other.
    pub record: String,
    /// The Agent.
    pub agent: NamespacedName,
    /// Uid of its pod.
    pub pod_uid: String,
    /// Epoch of its pod.
    pub epoch: i64,
}

/// A gateway's statement about one lease: totals that are on its disk.
#[derive(schemars::JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct LeaseStatement {
    /// Number of the lease.
    pub lease: LeaseId,
    /// Total settled, including amounts that merely count as spent.
    pub spent: Amount,
    /// Total returned unspent.
    pub returned: Amount,
    /// Nothing is open and the lease is never used again, so these numbers are final.
    pub closed: bool,
}

/// What a gateway needs for its next call.
#[derive(schemars::JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct GrantRequest {
    /// The lease that it would spend from.
    pub lease: Option<LeaseId>,
    /// Reservations open on that lease.
    pub open: Amount,
    /// The smallest amount with which the call is worth making. Zero: a prefetch for which no call waits; the lease is
    /// refilled with the next regular write, and a later answer contains the grant.
    pub least: Amount,
    /// The amount with which the call has its full output limit.
    pub full: Amount,
}

/// Why a gateway gets no grant.
#[derive(schemars::JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct GrantRefusal {
    /// The kind that is insufficient.
    pub kind: AmountKind,
    /// How much of it this gateway could still get, beyond what it holds.
    pub left: i64,
    /// Whether the limit per Agent (`perAgent`) is exhausted, rather than the shared one.
    pub per_agent: bool,
    /// The call can never fit, because it needs more than the whole limit.
    pub never: bool,
    /// When the call fits without user action, if no other Agent uses the room; `None`: never, or unknown.
    pub resets_at: Option<Timestamp>,
    /// Others hold enough unspent: a retry may soon succeed.
    pub contended: bool,
}

/// A lease as written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DurableGrant {
    /// Number of the lease.
    pub lease: LeaseId,
    /// Total granted.
    pub granted: Amount,
    /// Total spent, as reported to the leader. A gateway that knows less has lost data.
    pub spent: Amount,
    /// Total returned, as reported to the leader.
    pub returned: Amount,
    /// End of its window, after which it must not be used for new calls.
    pub ends: Option<Timestamp>,
}

/// The ledger's time while it is ahead of the leader's clock, for example after a leader with a wrong clock: it never
/// goes back, and runs at half speed until the clock has caught up. Settled usage then leaves its window later, never
/// earlier.
#[derive(Clone, Copy, Debug, PartialEq)]
struct CatchUpClock {
    /// The ledger's time, and the leader's, at the start of the term.
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
    /// Set while the last leader's time is ahead of this leader's clock.
    slow: Option<CatchUpClock>,
    /// Beginning and end of the current window, by [`Self::time`].
    window: (Timestamp, Option<Timestamp>),
    /// Time alone changes nothing before this moment.
    due: Timestamp,
    next_lease: LeaseId,
    settled: SettledUsage,
    /// All that was charged since this account was loaded, in whatever window.
    charged: Amount,
    shares: AgentShares,
    leases: LeaseTable,
    top_ups: Vec<CountedTopUp>,
    waiting: Vec<WaitingGateway>,
    /// The last time that others were held back for more than a gateway's fair share.
    large: Option<LargeGrant>,
    /// Whether a grant or a top-up waits for the next record.
    urgent: bool,
    /// Whether anything changed since the last record.
    changed: bool,
}

impl Account {
    /// Advances the time, never backwards, and drops what has left the window.
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
        // Top-ups of the spec stay known after they expire, otherwise they would count again.
        self.top_ups
            .retain(|top_up| rule.counts(top_up.at, time) || !top_up.id.starts_with(GATE_TOP_UP));
        availability::expire_waiters(&mut self.waiting, time);
        let gates = self.top_ups.iter().filter(|top_up| top_up.id.starts_with(GATE_TOP_UP));
        let moments = gates.filter_map(|top_up| rule.expires_at(top_up.at, time));
        let moments = moments.chain(self.waiting.iter().map(WaitingGateway::due));
        let moments = moments.chain(self.settled.expiries(rule).next());
        let next = moments.chain(shares).chain(self.window.1).min();
        self.due = next.unwrap_or(Timestamp::MAX);
    }

    /// Changes limits or window. In a new window everything counts that may lie in it.
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

    /// Converts what counted under one window rule to another.
    fn recount(&mut self, old: &WindowRule, new: &WindowRule) {
        self.settled.translate(old, new, self.time);
        self.shares.translate(old, new, self.time);
        self.leases.detach_windows();
    }

    /// Adds to the limits of the current window, once per id. `false`: it was counted before, or does not fit.
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

    /// Merges the two oldest approvals into one, which expires when the older one would: a gate is answered once, so
    /// its name need not be remembered.
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

    /// Whether the gateway's record holds leases of another Agent, because its volume is a copy of that Agent's.
    #[must_use]
    pub fn is_of_another(&self, who: &LeaseHolder) -> bool {
        let mut leases = self.leases.leases_of_record(&who.record);
        leases.any(|(_, lease)| lease.who.agent != who.agent)
    }

    /// Whether this pod was the last to report the lease, or to get a grant of it.
    #[must_use]
    pub fn is_held_by(&self, lease: LeaseId, who: &LeaseHolder) -> bool {
        let last = self.leases.get(lease).map(|lease| &lease.who);
        last.is_some_and(|last| (&last.record, &last.agent, &last.pod_uid) == (&who.record, &who.agent, &who.pod_uid))
    }

    /// Applies a gateway's statement about a lease. `false`: this gateway has no such lease (any more), so it is
    /// completely accounted for, and nothing may be spent from it.
    pub fn apply_statement(&mut self, who: &LeaseHolder, statement: &LeaseStatement, now: Timestamp) -> bool {
        self.advance(now);
        let Some(lease) = self.leases.get(statement.lease) else {
            return false;
        };
        if lease.who.record != who.record || lease.who.agent != who.agent {
            return false;
        }
        let (window, moved) = (lease.window, lease.who != *who);
        // Only the increase over the known totals counts, so repeated and reordered statements have no effect.
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

    /// Ensures that at least `used` is counted in all, in a window that never ends: what is neither settled nor held
    /// counts now.
    pub fn charge_at_least(&mut self, agent: &NamespacedName, used: &Amount, now: Timestamp) {
        self.advance(now);
        let more = used.saturating_sub(&self.taken());
        if !more.is_zero() {
            self.changed = true;
            self.charge(agent, Timestamp::UNIX_EPOCH, &more);
        }
    }

    /// How long the record of a gateway that has stopped is waited for before what it holds is forfeited. `None`: for
    /// as long as its volume exists, since nothing is gained: spent or reserved, there is no room.
    ///
    /// In a rolling window a forfeited amount counts for one more window. Waiting for one window first costs at most as
    /// much again, and usually the volume returns with the exact amount.
    #[must_use]
    pub fn forfeit_after(&self, record: &str) -> Option<SignedDuration> {
        match self.terms.window {
            WindowRule::Rolling(length) => Some(length.min(MAX_RECORD_WAIT)),
            WindowRule::Calendar(..) => {
                let mut live = self.leases.leases_of_record(record).filter(|(_, lease)| !lease.closed);
                let is_over = live.any(|(_, lease)| lease.window < self.window.0);
                is_over.then_some(SignedDuration::ZERO)
            }
            WindowRule::Lifetime => None,
        }
    }

    /// Counts everything that a lost gateway held as spent. Returns the amount lost.
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

    /// Drops the place of an Agent that no longer waits for room here.
    pub fn withdraw(&mut self, agent: &NamespacedName) {
        self.waiting.retain(|waiter| waiter.agent != *agent);
    }

    fn charge(&mut self, agent: &NamespacedName, window: Timestamp, amount: &Amount) {
        // Usage of a calendar window that has ended counts there, not here.
        let over = window != Timestamp::UNIX_EPOCH && window < self.window.0;
        self.charged = saturating_sum(&self.charged, amount);
        if over || amount.is_zero() {
            return;
        }
        let (rule, time) = (&self.terms.window, self.time);
        self.settled.add(rule, time, amount);
        self.shares.add(rule, time, agent, amount);
        // New usage expires after all older usage, so only the first usage of all can bring `due` forward.
        let first = self.settled.expiries(rule).next().into_iter();
        let first = first.chain(self.shares.of(agent).expiries(rule).next());
        self.due = first.fold(self.due, Timestamp::min);
    }

    /// The holders of all open leases, each with the pod that last reported.
    pub fn holders(&self) -> impl Iterator<Item = &LeaseHolder> {
        let live = self.leases.iter().filter(|(_, lease)| !lease.closed);
        live.map(|(_, lease)| &lease.who)
    }

    /// Whether this gateway's record has an open lease.
    #[must_use]
    pub fn is_holder(&self, record: &str) -> bool {
        self.leases.leases_of_record(record).any(|(_, lease)| !lease.closed)
    }

    /// Whether gateways must return what they do not need for calls in flight: someone waits for it, or more is
    /// outstanding than the limit allows.
    #[must_use]
    pub fn recalls(&self) -> bool {
        let waited_for = self.waiting.iter().any(WaitingGateway::goes_first);
        waited_for || self.limits().exceeded_by(&self.taken()).is_some()
    }

    /// Limits of the current window, including top-ups.
    #[must_use]
    pub fn limits(&self) -> LimitAmounts {
        self.limits_with(&Amount::ZERO, self.time).unwrap_or(self.terms.limits)
    }

    /// Limits of each single Agent.
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

    /// All that was charged since this account was loaded, in whatever window. Never decreases.
    #[must_use]
    pub fn charged(&self) -> Amount {
        self.charged
    }

    /// Settled in the current window.
    #[must_use]
    pub fn used(&self) -> Amount {
        self.settled.total()
    }

    /// Outstanding, of the limited kinds.
    #[must_use]
    pub fn reserved(&self) -> Amount {
        self.leases.outstanding().limited_by(&self.both_limits())
    }

    /// Usage of each Agent, in descending order by tokens, then by cost.
    #[must_use]
    pub fn shares(&self) -> Vec<(NamespacedName, Amount)> {
        self.shares.sorted()
    }

    /// Usage of this Agent.
    #[must_use]
    pub fn share_of(&self, agent: &NamespacedName) -> Amount {
        self.shares.of(agent).total()
    }

    /// The top-ups remembered.
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

    /// The limits at a time from now on, plus `more`.
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
