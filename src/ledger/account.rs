//! One limit at the leader: what is settled, who holds how much, and who may have more.
//!
//! The order that the promise rests on, for whoever drives this: [`Account::hear`] and [`Account::ask`] change what is
//! planned; [`Account::record`] is written to the API server over exactly the epoch before; only then
//! [`Account::written`]; and gateways are told [`Account::leases_of`], which speaks of what is written and no more.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::window::{PIECES, SHARE_PIECES, Settled, WindowRule};
use crate::api::amount::{Amount, Kind, LimitAmounts};
use crate::api::budget::{CountedTopUp, Holder, LedgerRecord, Share};

/// Number of a lease within its account; never used again.
pub type LeaseId = i64;

/// How long a refused gateway is waited for before others may take what it needs.
pub const WAIT: SignedDuration = SignedDuration::from_secs(5);
/// A grant is at most so many times what the next call needs.
pub const GENEROSITY: i64 = 8;
/// Stands for a sum that does not fit into 64 bits: there is no room for it anywhere.
const TOO_MUCH: Amount = Amount {
    tokens: i64::MAX,
    input_tokens: i64::MAX,
    output_tokens: i64::MAX,
    calls: i64::MAX,
    cost: i64::MAX,
};
/// Ids of top-ups that an approval made begin so; those of a spec cannot.
pub const GATE_TOP_UP: &str = "gate/";

/// The limits and the window of an account.
#[derive(Clone, Debug, PartialEq)]
pub struct Terms {
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
pub struct Who {
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
pub struct Statement {
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
pub struct Ask {
    /// The lease that it would spend from.
    pub lease: Option<LeaseId>,
    /// Reservations open on that lease.
    pub open: Amount,
    /// The least with which the call is worth making. Nothing: the gateway asks ahead, and no call waits for it; the
    /// answer comes at once and the grant with a later one.
    pub least: Amount,
    /// What the call is to have.
    pub full: Amount,
}

/// Why a gateway gets no more.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Refused {
    /// What there is not enough of.
    pub kind: Kind,
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
pub struct Granted {
    /// Its number.
    pub lease: LeaseId,
    /// Total granted of it.
    pub granted: Amount,
    /// When its window ends, and with it its use for new calls.
    pub ends: Option<Timestamp>,
}

#[derive(Clone, Debug, PartialEq)]
struct Lease {
    who: Who,
    window: Timestamp,
    granted: Amount,
    /// Of `granted`, what is written.
    durable: Amount,
    spent: Amount,
    returned: Amount,
    /// Over. It is kept until that is written: a gateway that forgot it earlier could not tell the next leader.
    closed: bool,
}

impl Lease {
    fn base(&self) -> Amount {
        // 64 bits are checked where a statement comes in.
        self.spent.checked_add(&self.returned).unwrap_or(TOO_MUCH)
    }

    fn outstanding(&self) -> Amount {
        if self.closed {
            Amount::ZERO
        } else {
            self.granted.without(&self.base())
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
struct Waiter {
    record: String,
    missing: Amount,
    until: Timestamp,
}

/// One limit at the leader.
#[derive(Clone, Debug, PartialEq)]
pub struct Account {
    terms: Terms,
    epoch: i64,
    time: Timestamp,
    /// By how much the last leader's time was ahead of this leader's clock: the ledger's time goes on from there.
    ahead: SignedDuration,
    next_lease: LeaseId,
    settled: Settled,
    shares: BTreeMap<AgentName, Settled>,
    leases: BTreeMap<LeaseId, Lease>,
    top_ups: Vec<CountedTopUp>,
    waiting: Vec<Waiter>,
    /// A grant or a top-up waits for the next record.
    urgent: bool,
    /// Something changed since the last record.
    changed: bool,
}

impl Account {
    /// An account as a leader finds it. Every holder's amount is outstanding until its gateway has spoken.
    #[must_use]
    pub fn restore(terms: Terms, record: &LedgerRecord, now: Timestamp) -> Self {
        let leases = record.holders.iter().map(|holder| {
            let granted = [holder.spent, holder.returned]
                .iter()
                .try_fold(holder.amount, |sum, part| sum.checked_add(part))
                .unwrap_or(TOO_MUCH);
            let lease = Lease {
                who: Who {
                    record: holder.record.clone(),
                    agent: AgentName {
                        namespace: holder.namespace.clone(),
                        name: holder.name.clone(),
                    },
                    pod_uid: holder.pod_uid.clone(),
                    epoch: holder.epoch,
                },
                window: holder.window,
                granted,
                durable: granted,
                spent: holder.spent,
                returned: holder.returned,
                closed: false,
            };
            (holder.lease, lease)
        });
        let shares = record.shares.iter().map(|share| {
            let agent = AgentName {
                namespace: share.namespace.clone(),
                name: share.name.clone(),
            };
            (agent, Settled::restore(SHARE_PIECES, &share.buckets))
        });
        let mut account = Self {
            epoch: record.epoch,
            time: record.watermark.max(now),
            ahead: record.watermark.duration_since(now).max(SignedDuration::ZERO),
            next_lease: record.next_lease,
            settled: Settled::restore(PIECES, &record.buckets),
            shares: shares.collect(),
            leases: leases.collect(),
            top_ups: record.top_ups.clone(),
            waiting: Vec::new(),
            urgent: false,
            changed: false,
            terms,
        };
        account.advance(now);
        account
    }

    /// Time goes on, and never back; what left the window counts no more.
    pub fn advance(&mut self, now: Timestamp) {
        self.time = self.time.max(now.checked_add(self.ahead).unwrap_or(now));
        let (rule, time) = (&self.terms.window, self.time);
        self.settled.advance(rule, time);
        self.shares.retain(|_, share| {
            share.advance(rule, time);
            !share.total().is_zero()
        });
        // Those of the spec stay known when they count no more, or they would count again.
        self.top_ups
            .retain(|top_up| rule.holds(top_up.at, time) || !top_up.id.starts_with(GATE_TOP_UP));
        self.waiting.retain(|waiter| time < waiter.until);
    }

    /// Other limits, or another window. Under a new window everything counts that can lie in it.
    pub fn set_terms(&mut self, terms: Terms, now: Timestamp) {
        self.advance(now);
        if terms == self.terms {
            return;
        }
        if terms.window != self.terms.window {
            let (old, new, time) = (&self.terms.window, &terms.window, self.time);
            self.settled.translate(old, new, time);
            for share in self.shares.values_mut() {
                share.translate(old, new, time);
            }
            for lease in self.leases.values_mut() {
                lease.window = Timestamp::UNIX_EPOCH;
            }
        }
        self.terms = terms;
        self.changed = true;
    }

    /// Adds to the limits of the window at hand, once per id. `false`: it was counted before, or does not fit.
    pub fn top_up(&mut self, id: &str, amount: Amount, now: Timestamp) -> bool {
        self.advance(now);
        if self.top_ups.iter().any(|counted| counted.id == id) || self.limits_with(&amount).is_none() {
            return false;
        }
        self.top_ups.push(CountedTopUp {
            id: id.into(),
            at: self.time,
            amount,
        });
        (self.changed, self.urgent) = (true, true);
        true
    }

    /// A gateway says what became of a lease. `false`: there is no such lease of this gateway (any more): everything
    /// about it is accounted for, and nothing may be spent from it.
    pub fn hear(&mut self, who: &Who, statement: &Statement, now: Timestamp) -> bool {
        self.advance(now);
        let Some(lease) = self.leases.get_mut(&statement.lease) else {
            return false;
        };
        // Sums that do not fit are no statement of a gateway of ours.
        if lease.who.record != who.record
            || lease.who.agent != who.agent
            || statement.spent.checked_add(&statement.returned).is_none()
        {
            return false;
        }
        let news = statement.spent.without(&lease.spent);
        let back = statement.returned.without(&lease.returned);
        lease.spent = lease.spent.max(&statement.spent);
        lease.returned = lease.returned.max(&statement.returned);
        let moved = lease.who.pod_uid != who.pod_uid || lease.who.epoch != who.epoch;
        lease.who = who.clone();
        self.changed |= moved || !news.is_zero() || !back.is_zero() || lease.closed != statement.closed;
        lease.closed |= statement.closed;
        let window = lease.window;
        self.charge(&who.agent, window, &news);
        true
    }

    /// A gateway wants to make a call. What it gets is planned, and said once it is written.
    pub fn ask(&mut self, who: &Who, ask: &Ask, now: Timestamp) -> Result<(), Refused> {
        self.advance(now);
        let current = self.current(&who.record);
        let lease = current.and_then(|id| self.leases.get(&id));
        // A kind that was not limited before has been granted nothing, whatever was spent of it.
        let held = lease.map_or(Amount::ZERO, |lease| lease.granted.max(&lease.base()));
        let (least, full) = (
            self.missing(&who.record, ask, &ask.least),
            self.missing(&who.record, ask, &ask.full),
        );
        if full.is_zero() {
            self.waiting.retain(|waiter| waiter.record != who.record);
            return Ok(());
        }
        let room = self.room_for(who);
        if let Some(kind) = lacking(&room, &least) {
            return Err(self.refuse(who, ask, kind, least));
        }
        self.waiting.retain(|waiter| waiter.record != who.record);
        let grant = if lacking(&room, &full).is_none() {
            full.checked_add(&self.extra(&room, &full, &ask.full)).unwrap_or(full)
        } else {
            full.min(&least.max(&clipped(&room, &full)))
        };
        if !grant.is_zero() {
            self.grant(who, current, held, &grant);
        }
        Ok(())
    }

    /// What the lease of a gateway lacks for a call.
    fn missing(&self, record: &str, ask: &Ask, call: &Amount) -> Amount {
        let current = self.current(record);
        let lease = current.and_then(|id| self.leases.get(&id));
        let base = lease.map_or(Amount::ZERO, Lease::base);
        let held = lease.map_or(Amount::ZERO, |lease| lease.granted.max(&base));
        let open = if current == ask.lease { ask.open } else { Amount::ZERO };
        [open, *call]
            .iter()
            .try_fold(base, |sum, part| sum.checked_add(part))
            .unwrap_or(TOO_MUCH)
            .without(&held)
            .limited_by(&self.both_limits())
    }

    /// Whether an ask that was refused would get its least now.
    #[must_use]
    pub fn has_room(&self, who: &Who, ask: &Ask) -> bool {
        let missing = self.missing(&who.record, ask, &ask.least);
        lacking(&self.room_for(who), &missing).is_none()
    }

    fn grant(&mut self, who: &Who, current: Option<LeaseId>, held: Amount, grant: &Amount) {
        let window = self.terms.window.start(self.time);
        let id = current.unwrap_or_else(|| {
            self.next_lease += 1;
            self.next_lease
        });
        let lease = self.leases.entry(id).or_insert_with(|| Lease {
            who: who.clone(),
            window,
            granted: Amount::ZERO,
            durable: Amount::ZERO,
            spent: Amount::ZERO,
            returned: Amount::ZERO,
            closed: false,
        });
        lease.granted = Amount::each(|kind| match grant.get(kind) {
            0 => lease.granted.get(kind),
            // It is within the room, and limits are far below 64 bits.
            more => held.get(kind).saturating_add(more),
        });
        (self.changed, self.urgent) = (true, true);
    }

    /// Leases of a gateway as they are written; those of past windows only so that they can be closed.
    #[must_use]
    pub fn leases_of(&self, record: &str) -> Vec<Granted> {
        let start = self.terms.window.start(self.time);
        let of = self
            .leases
            .iter()
            // One that no record has yet is not told: its number is not for certain.
            .filter(|(_, lease)| lease.who.record == record && !lease.closed && !lease.durable.is_zero());
        of.map(|(id, lease)| Granted {
            lease: *id,
            granted: lease.durable,
            ends: if lease.window == start {
                self.terms.window.end(self.time)
            } else {
                Some(self.time)
            },
        })
        .collect()
    }

    /// Whether the answer to an ask that was not refused must wait: more is planned for it than is written, and what is
    /// written is not enough. Who asks ahead (`least` is nothing) never waits.
    #[must_use]
    pub fn must_wait(&self, record: &str, ask: &Ask) -> bool {
        let current = self.current(record);
        let Some(lease) = current.and_then(|id| self.leases.get(&id)) else {
            return false;
        };
        if ask.least.is_zero() || lease.durable.covers(&lease.granted) {
            return false;
        }
        let open = if current == ask.lease { ask.open } else { Amount::ZERO };
        let needed = [open, ask.full]
            .iter()
            .try_fold(lease.base(), |sum, part| sum.checked_add(part))
            .unwrap_or(TOO_MUCH)
            .limited_by(&self.both_limits());
        !lease.durable.covers(&needed)
    }

    /// The gateway is dead for certain: all that it held counts as spent. What was lost.
    pub fn bury(&mut self, record: &str, now: Timestamp) -> Amount {
        self.advance(now);
        let mut lost = Amount::ZERO;
        let mut charges = Vec::new();
        for lease in self
            .leases
            .values_mut()
            .filter(|lease| lease.who.record == record && !lease.closed)
        {
            let rest = lease.outstanding();
            lost = lost.checked_add(&rest).unwrap_or(lost);
            charges.push((lease.who.agent.clone(), lease.window, rest));
            lease.spent = lease.spent.checked_add(&rest).unwrap_or(lease.spent);
            lease.closed = true;
            self.changed = true;
        }
        for (agent, window, rest) in charges {
            self.charge(&agent, window, &rest);
        }
        self.waiting.retain(|waiter| waiter.record != record);
        lost
    }

    /// The records of all holders, with the pod that was last heard with each.
    pub fn holders(&self) -> impl Iterator<Item = &Who> {
        self.leases
            .values()
            .filter(|lease| !lease.closed)
            .map(|lease| &lease.who)
    }

    /// Whether gateways are to give back what they do not need for calls in flight: somebody waits for it, or there is
    /// more out than the limit has.
    #[must_use]
    pub fn recalls(&self) -> bool {
        let taken = self.taken();
        !self.waiting.is_empty() || self.limits().exceeded_by(&taken).is_some()
    }

    /// Limits of the window at hand, top-ups included.
    #[must_use]
    pub fn limits(&self) -> LimitAmounts {
        self.limits_with(&Amount::ZERO).unwrap_or(self.terms.limits)
    }

    /// Limits of each Agent.
    #[must_use]
    pub fn per_agent(&self) -> LimitAmounts {
        self.terms.per_agent
    }

    /// The terms.
    #[must_use]
    pub fn terms(&self) -> &Terms {
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
        self.outstanding(|_| true).limited_by(&self.both_limits())
    }

    /// What each Agent settled, the greatest first by tokens, then by money.
    #[must_use]
    pub fn shares(&self) -> Vec<(AgentName, Amount)> {
        let mut shares: Vec<_> = self
            .shares
            .iter()
            .map(|(agent, share)| (agent.clone(), share.total()))
            .collect();
        shares.sort_by(|(a, x), (b, y)| (y.tokens, y.cost).cmp(&(x.tokens, x.cost)).then_with(|| a.cmp(b)));
        shares
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

    /// What is to be written over [`Account::epoch`], and over nothing else.
    #[must_use]
    pub fn record(&self) -> LedgerRecord {
        let live = self.leases.iter().filter(|(_, lease)| !lease.closed);
        let holders = live.map(|(id, lease)| Holder {
            lease: *id,
            record: lease.who.record.clone(),
            pod_uid: lease.who.pod_uid.clone(),
            epoch: lease.who.epoch,
            namespace: lease.who.agent.namespace.clone(),
            name: lease.who.agent.name.clone(),
            window: lease.window,
            amount: lease.outstanding(),
            spent: lease.spent,
            returned: lease.returned,
        });
        LedgerRecord {
            epoch: self.epoch + 1,
            watermark: self.time,
            next_lease: self.next_lease,
            buckets: self.settled.buckets(),
            holders: holders.collect(),
            top_ups: self.top_ups.clone(),
            shares: self
                .shares
                .iter()
                .map(|(agent, share)| Share {
                    namespace: agent.namespace.clone(),
                    name: agent.name.clone(),
                    buckets: share.buckets(),
                })
                .collect(),
        }
    }

    /// A record is written: what it grants may be said.
    pub fn written(&mut self, record: &LedgerRecord) {
        self.epoch = record.epoch;
        let written = |id: &LeaseId| record.holders.iter().any(|holder| holder.lease == *id);
        self.leases.retain(|id, lease| !lease.closed || written(id));
        for holder in &record.holders {
            if let Some(lease) = self.leases.get_mut(&holder.lease) {
                let granted = [holder.spent, holder.returned]
                    .iter()
                    .try_fold(holder.amount, |sum, part| sum.checked_add(part));
                lease.durable = granted.map_or(lease.durable, |granted| lease.durable.max(&granted));
            }
        }
        self.urgent = self.leases.values().any(|lease| !lease.durable.covers(&lease.granted));
        self.changed = self.urgent || self.record_again(record);
    }

    fn record_again(&self, record: &LedgerRecord) -> bool {
        let now = self.record();
        (&now.buckets, &now.holders, &now.top_ups, &now.shares)
            != (&record.buckets, &record.holders, &record.top_ups, &record.shares)
    }

    /// When a call of `least` would fit by itself, when it does not fit now.
    #[must_use]
    pub fn resets_at(&self, agent: &AgentName, least: &Amount) -> Option<Timestamp> {
        let of = |limits: &LimitAmounts, settled: &Settled, outstanding: Amount| {
            let least = least.limited_by(limits);
            if limits.exceeded_by(&least).is_some() {
                return None;
            }
            let taken = settled.total().checked_add(&outstanding)?.checked_add(&least)?;
            let missing = Amount::each(|kind| limits.get(kind).map_or(0, |limit| (taken.get(kind) - limit).max(0)));
            if missing.is_zero() {
                return Some(self.time);
            }
            settled.freed_at(&self.terms.window, &missing)
        };
        let all = of(&self.limits(), &self.settled, self.outstanding(|_| true))?;
        let empty = Settled::new(SHARE_PIECES);
        let share = self.shares.get(agent).unwrap_or(&empty);
        let own = of(
            &self.terms.per_agent,
            share,
            self.outstanding(|lease| lease.who.agent == *agent),
        )?;
        Some(all.max(own))
    }

    fn limits_with(&self, more: &Amount) -> Option<LimitAmounts> {
        let added = self
            .top_ups
            .iter()
            .filter(|top_up| self.terms.window.holds(top_up.at, self.time))
            .try_fold(*more, |sum, top_up| sum.checked_add(&top_up.amount))?;
        self.terms.limits.checked_add(&added)
    }

    fn both_limits(&self) -> LimitAmounts {
        let (all, own) = (self.terms.limits, self.terms.per_agent);
        LimitAmounts {
            tokens: all.tokens.or(own.tokens),
            input_tokens: all.input_tokens.or(own.input_tokens),
            output_tokens: all.output_tokens.or(own.output_tokens),
            calls: all.calls.or(own.calls),
            cost: all.cost.or(own.cost),
        }
    }

    fn outstanding(&self, of: impl Fn(&Lease) -> bool) -> Amount {
        self.leases
            .values()
            .filter(|lease| of(lease))
            .try_fold(Amount::ZERO, |sum, lease| sum.checked_add(&lease.outstanding()))
            .unwrap_or(TOO_MUCH)
    }

    fn taken(&self) -> Amount {
        self.used().checked_add(&self.outstanding(|_| true)).unwrap_or(TOO_MUCH)
    }

    /// What a gateway could get now: the room of all, less what others have waited for longer, and that of its Agent.
    fn room_for(&self, who: &Who) -> LimitAmounts {
        let mut taken = self.taken();
        for waiter in self.waiting.iter().take_while(|waiter| waiter.record != who.record) {
            taken = taken.checked_add(&waiter.missing).unwrap_or(TOO_MUCH);
        }
        let all = left(&self.limits(), &taken);
        let own = self.shares.get(&who.agent).map_or(Amount::ZERO, Settled::total);
        let own = own
            .checked_add(&self.outstanding(|lease| lease.who.agent == who.agent))
            .unwrap_or(TOO_MUCH);
        let own = left(&self.terms.per_agent, &own);
        let least = |kind| match (all.get(kind), own.get(kind)) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        LimitAmounts {
            tokens: least(Kind::Tokens),
            input_tokens: least(Kind::InputTokens),
            output_tokens: least(Kind::OutputTokens),
            calls: least(Kind::Calls),
            cost: least(Kind::Cost),
        }
    }

    fn refuse(&mut self, who: &Who, ask: &Ask, kind: Kind, missing: Amount) -> Refused {
        let least = ask.least;
        let room = self.room_for(who);
        let never = |limits: &LimitAmounts| limits.exceeded_by(&least.limited_by(limits));
        let own = self.terms.per_agent;
        if let Some((kind, per_agent)) = never(&self.limits())
            .map(|kind| (kind, false))
            .or_else(|| never(&own).map(|kind| (kind, true)))
        {
            self.waiting.retain(|waiter| waiter.record != who.record);
            return Refused {
                kind,
                left: room.get(kind).unwrap_or(0),
                per_agent,
                never: true,
                resets_at: None,
                contended: false,
            };
        }
        let share = self.shares.get(&who.agent).map_or(Amount::ZERO, Settled::total);
        let mine = self.outstanding(|lease| lease.who.agent == who.agent);
        let own_taken = share.checked_add(&mine).unwrap_or(TOO_MUCH);
        let own_lacks = lacking(&left(&own, &own_taken), &missing);
        let others = self.outstanding(|lease| lease.who.record != who.record);
        let without_others = left(&self.limits(), &self.taken().without(&others));
        let contended = own_lacks.is_none() && lacking(&without_others, &missing).is_none();
        if contended {
            let until = self.time.checked_add(WAIT).unwrap_or(self.time);
            match self.waiting.iter_mut().find(|waiter| waiter.record == who.record) {
                Some(waiter) => (waiter.missing, waiter.until) = (missing, until),
                None => self.waiting.push(Waiter {
                    record: who.record.clone(),
                    missing,
                    until,
                }),
            }
        } else {
            self.waiting.retain(|waiter| waiter.record != who.record);
        }
        let kind = own_lacks.unwrap_or(kind);
        Refused {
            kind,
            left: room.get(kind).unwrap_or(0),
            per_agent: own_lacks.is_some(),
            never: false,
            resets_at: self.resets_at(&who.agent, &ask.least),
            contended,
        }
    }

    /// What a gateway gets beyond its next call, so that it need not ask for each: less the less there is.
    fn extra(&self, room: &LimitAmounts, full: &Amount, call: &Amount) -> Amount {
        if !self.waiting.is_empty() {
            return Amount::ZERO;
        }
        let holders = i64::try_from(self.leases.len()).unwrap_or(i64::MAX).max(1);
        Amount::each(|kind| match room.get(kind) {
            Some(room) => {
                let spare = (room - full.get(kind)).max(0) / holders.saturating_mul(4);
                call.get(kind).saturating_mul(GENEROSITY - 1).min(spare)
            }
            None => 0,
        })
    }

    fn current(&self, record: &str) -> Option<LeaseId> {
        let window = self.terms.window.start(self.time);
        self.leases
            .iter()
            .rev()
            .find(|(_, lease)| lease.who.record == record && lease.window == window && !lease.closed)
            .map(|(id, _)| *id)
    }

    fn charge(&mut self, agent: &AgentName, window: Timestamp, amount: &Amount) {
        // Of a calendar window that is over: it counts there, and no more here.
        if window != Timestamp::UNIX_EPOCH && window < self.terms.window.start(self.time) {
            return;
        }
        let rule = &self.terms.window;
        // A sum that does not fit is refused before it can be spent: nobody is granted what does not fit.
        let _ = self.settled.add(rule, self.time, amount);
        let share = self
            .shares
            .entry(agent.clone())
            .or_insert_with(|| Settled::new(SHARE_PIECES));
        let _ = share.add(rule, self.time, amount);
    }
}

fn left(limits: &LimitAmounts, taken: &Amount) -> LimitAmounts {
    let left = |kind| {
        limits
            .get(kind)
            .map(|limit| (limit - taken.get(kind).min(limit)).max(0))
    };
    LimitAmounts {
        tokens: left(Kind::Tokens),
        input_tokens: left(Kind::InputTokens),
        output_tokens: left(Kind::OutputTokens),
        calls: left(Kind::Calls),
        cost: left(Kind::Cost),
    }
}

fn lacking(room: &LimitAmounts, needed: &Amount) -> Option<Kind> {
    room.exceeded_by(needed)
}

fn clipped(room: &LimitAmounts, wanted: &Amount) -> Amount {
    Amount::each(|kind| room.get(kind).map_or(0, |room| room.min(wanted.get(kind))))
}
