//! Allocation: what is available in total and per Agent, who goes first, and when more will be available.

use jiff::{SignedDuration, Timestamp};

use super::lease::Lease;
use super::{
    Account, BACKOFF_FACTOR, CONTENTION_WAIT, GrantRefusal, GrantRequest, LeaseHolder, LeaseId, PREFETCH_CALLS,
    WAITER_TIMEOUT,
};
use crate::sum::saturating_sum;
use agentloop_api::NamespacedName;
use agentloop_api::amount::{Amount, AmountKind, LimitAmounts};

/// A gateway whose request others hold enough for. What it lacks is kept for it as long as something is returned. If
/// nothing is returned for [`CONTENTION_WAIT`], the holders may be lost: others then have priority, for
/// [`BACKOFF_FACTOR`] times the time waited. The same happens if it sends no request for [`WAITER_TIMEOUT`].
#[derive(Clone, Debug, PartialEq)]
pub(super) struct WaitingGateway {
    pub(super) record: String,
    pub(super) agent: NamespacedName,
    missing: Amount,
    since: Timestamp,
    asked: Timestamp,
    /// The lowest total taken of the account so far, and when it was reached.
    taken: Amount,
    moved: Timestamp,
    /// Others have priority until then.
    steps_back: Option<Timestamp>,
}

impl WaitingGateway {
    pub(super) fn goes_first(&self) -> bool {
        self.steps_back.is_none()
    }

    /// When its state changes by time alone.
    pub(super) fn due(&self) -> Timestamp {
        let tires = later(self.moved, CONTENTION_WAIT).min(later(self.asked, WAITER_TIMEOUT));
        self.steps_back.unwrap_or(tires)
    }

    fn note_progress(&mut self, taken: &Amount, now: Timestamp) {
        if !taken.covers(&self.taken) {
            self.taken = self.taken.min(taken);
            self.moved = now;
        }
    }
}

/// Set when a gateway got more than its fair share of what is left, after others had returned theirs. The next such
/// grant, to any gateway, is made only after others had priority for [`BACKOFF_FACTOR`] times as long, but at most
/// [`CONTENTION_WAIT`]: calls that reserve everything and cost little in the end must not block all others forever.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct LargeGrant {
    record: String,
    since: Timestamp,
    granted: Timestamp,
    ended: Option<Timestamp>,
}

impl LargeGrant {
    /// When the next large grant may begin.
    fn next(&self) -> Timestamp {
        let Some(ended) = self.ended else {
            return later(self.granted, CONTENTION_WAIT);
        };
        let lasted = ended.duration_since(self.since);
        later(ended, lasted.saturating_mul(BACKOFF_FACTOR).min(CONTENTION_WAIT))
    }
}

/// Everything that determines who has room, and when: while it is unchanged, the same [`GrantRequest`]s are refused.
#[derive(Clone, Debug, PartialEq)]
pub struct AccountAvailability {
    limits: LimitAmounts,
    per_agent: LimitAmounts,
    used: Amount,
    outstanding: Amount,
    leases: usize,
    window: Timestamp,
    due: Timestamp,
    kept: Vec<(String, Amount)>,
}

fn later(time: Timestamp, span: SignedDuration) -> Timestamp {
    time.checked_add(span).unwrap_or(Timestamp::MAX)
}

/// Ends waits that are due: a waiter that got nothing steps back, and may wait again once it has stepped back for long
/// enough.
///
/// A wait ends when it is due, not when the account is next advanced: otherwise a gateway that asks once, and then
/// again an hour later, would step back for five hours.
pub(super) fn expire_waiters(waiting: &mut Vec<WaitingGateway>, now: Timestamp) {
    waiting.retain_mut(|waiter| {
        let due = waiter.due();
        if now < due {
            return true;
        }
        if waiter.steps_back.is_some() {
            return false;
        }
        let waited = due.duration_since(waiter.since);
        let until = later(due, waited.saturating_mul(BACKOFF_FACTOR));
        waiter.steps_back = Some(until);
        now < until
    });
}

/// What a [`GrantRequest`] needs beyond what its gateway holds.
struct GrantNeed {
    current: Option<LeaseId>,
    /// The usable part of what was granted: of a kind that was not limited before nothing was granted, whatever was
    /// spent of it.
    held: Amount,
    /// Settled and returned of the current lease; [`Self::open`]: reserved on it.
    base: Amount,
    open: Amount,
    least: Amount,
    full: Amount,
}

impl Account {
    /// Requests a grant for a call. What is granted is planned, and answered once it is written.
    pub fn request_grant(&mut self, who: &LeaseHolder, ask: &GrantRequest, now: Timestamp) -> Result<(), GrantRefusal> {
        self.advance(now);
        let need = self.need(&who.record, ask);
        if ask.least.is_zero() {
            self.refill(who, ask, &need);
            return Ok(());
        }
        let taken = self.taken();
        for waiter in &mut self.waiting {
            waiter.note_progress(&taken, self.time);
        }
        if let Some(kind) = self.limits().zero_kind().or(self.terms.per_agent.zero_kind()) {
            return Err(self.refuse(who, ask, &need, kind));
        }
        if !need.full.is_zero() {
            let available = self.room_for(who);
            let crowded = need.current.is_none() && self.leases.are_full();
            if let Some(kind) = available.exceeded_by(&need.least) {
                return Err(self.refuse(who, ask, &need, kind));
            }
            if crowded {
                return Err(Self::refuse_for_now(&available));
            }
            // With room for the full amount, grant it and a prefetch; otherwise what is left, which is at least
            // `least`. The gateway then lowers the output limit of the call.
            let grant = if available.exceeded_by(&need.full).is_none() {
                saturating_sum(&need.full, &self.extra(&available, &need.full, &ask.full))
            } else {
                need.full.min(&need.least.max(&clipped(&available, &need.full)))
            };
            self.note_large_turn(who, &need);
            self.grant(who, &need, &grant);
        }
        self.waiting.retain(|waiter| waiter.record != who.record);
        Ok(())
    }

    /// Refills a lease that is less than half full, if there is plenty: no call waits for it, and the last room is kept
    /// for calls that do wait.
    fn refill(&mut self, who: &LeaseHolder, ask: &GrantRequest, need: &GrantNeed) {
        let gone = saturating_sum(&need.base, &need.open);
        let lacks = Amount::from_fn(|kind| {
            let aim = ask.full.get(kind).saturating_mul(PREFETCH_CALLS);
            let free = need.held.get(kind) - gone.get(kind).min(need.held.get(kind));
            if free < aim / 2 { aim - free } else { 0 }
        });
        let lacks = lacks.limited_by(&self.both_limits());
        let crowded = need.current.is_none() && self.leases.are_full();
        let spare = self.spare(&self.room_for(who));
        let more = lacks.min(&spare);
        // Less than a whole call of any kind would be of no use.
        let of_use = Amount::from_fn(|kind| if lacks.get(kind) > 0 { ask.full.get(kind) } else { 0 });
        if !crowded && more.covers(&of_use) {
            self.grant(who, need, &more);
        }
    }

    fn need(&self, record: &str, ask: &GrantRequest) -> GrantNeed {
        let current = self.current(record);
        let base = current.map_or(Amount::ZERO, |(_, lease)| lease.base());
        let held = current.map_or(Amount::ZERO, |(_, lease)| lease.granted.max(&base));
        let current = current.map(|(id, _)| id);
        let open = if current == ask.lease { ask.open } else { Amount::ZERO };
        let limited = self.both_limits();
        let missing = |call: &Amount| {
            saturating_sum(&base, &saturating_sum(&open, call))
                .saturating_sub(&held)
                .limited_by(&limited)
        };
        GrantNeed {
            current,
            held,
            base,
            open,
            least: missing(&ask.least),
            full: missing(&ask.full),
        }
    }

    /// Whether a refused [`GrantRequest`] would get its least amount now.
    #[must_use]
    pub fn has_room(&self, who: &LeaseHolder, ask: &GrantRequest) -> bool {
        let need = self.need(&who.record, ask);
        let crowded = need.current.is_none() && self.leases.are_full();
        let blocks = self.limits().zero_kind().or(self.terms.per_agent.zero_kind()).is_some();
        !crowded && !blocks && self.room_for(who).exceeded_by(&need.least).is_none()
    }

    fn grant(&mut self, who: &LeaseHolder, need: &GrantNeed, grant: &Amount) {
        if grant.is_zero() {
            return;
        }
        let id = need.current.unwrap_or_else(|| {
            self.next_lease += 1;
            let lease = Lease::new(who.clone(), self.window.0);
            self.leases.insert(self.next_lease, lease);
            self.next_lease
        });
        self.leases.change(id, |lease| {
            lease.granted = Amount::from_fn(|kind| match grant.get(kind) {
                0 => lease.granted.get(kind),
                // Within the room, and limits are far below 64 bits.
                more => need.held.get(kind).saturating_add(more),
            });
        });
        (self.changed, self.urgent) = (true, true);
    }

    /// Whether the answer to a granted [`GrantRequest`] must wait for a write: more is planned than written, and what
    /// is written is not enough. A prefetch (`least` is zero) never waits.
    #[must_use]
    pub fn must_wait(&self, record: &str, ask: &GrantRequest) -> bool {
        let Some((id, lease)) = self.current(record) else {
            return false;
        };
        if ask.least.is_zero() || lease.durable.covers(&lease.granted) {
            return false;
        }
        let open = if Some(id) == ask.lease { ask.open } else { Amount::ZERO };
        let needed = saturating_sum(&lease.base(), &saturating_sum(&open, &ask.full)).limited_by(&self.both_limits());
        !lease.durable.covers(&needed)
    }

    /// What a gateway could get now: the shared room less what earlier waiters lack, limited by the room of its Agent.
    fn room_for(&self, who: &LeaseHolder) -> LimitAmounts {
        let mut taken = self.taken();
        for waiter in self.waiting.iter().filter(|waiter| waiter.goes_first()) {
            if waiter.record == who.record {
                break;
            }
            taken = saturating_sum(&taken, &waiter.missing);
        }
        let own = self.terms.per_agent.left_after(&self.taken_by(who));
        self.limits().left_after(&taken).min(&own)
    }

    /// Settled and outstanding of one Agent.
    fn taken_by(&self, who: &LeaseHolder) -> Amount {
        let used = self.shares.of(&who.agent).total();
        saturating_sum(&used, &self.leases.outstanding_of(&who.agent))
    }

    fn refuse(&mut self, who: &LeaseHolder, ask: &GrantRequest, need: &GrantNeed, kind: AmountKind) -> GrantRefusal {
        let own = self.terms.per_agent;
        let available = self.room_for(who);
        // A limit of 0 allows no call, not even one that costs nothing of that kind.
        let never = |limits: &LimitAmounts| limits.zero_kind().or_else(|| limits.exceeded_by(&ask.least));
        let beyond = never(&self.limits()).map(|kind| (kind, false));
        if let Some((kind, per_agent)) = beyond.or_else(|| never(&own).map(|kind| (kind, true))) {
            self.waiting.retain(|waiter| waiter.record != who.record);
            return GrantRefusal {
                kind,
                left: available.get(kind).unwrap_or(0),
                per_agent,
                never: true,
                resets_at: None,
                contended: false,
            };
        }
        let own_lacks = own.left_after(&self.taken_by(who)).exceeded_by(&need.least);
        let mine = self.leases.outstanding_at(&who.record);
        let without_others = self.limits().left_after(&saturating_sum(&self.used(), &mine));
        let contended = own_lacks.is_none() && without_others.exceeded_by(&need.least).is_none();
        if contended && self.may_wait(who, &need.least) {
            self.wait(who, need.least);
        } else {
            self.waiting.retain(|waiter| waiter.record != who.record);
        }
        let kind = own_lacks.unwrap_or(kind);
        GrantRefusal {
            kind,
            left: available.get(kind).unwrap_or(0),
            per_agent: own_lacks.is_some(),
            never: false,
            resets_at: self.resets_at(who, ask),
            contended,
        }
    }

    /// Refusal although there is room, because there are too many leases.
    fn refuse_for_now(available: &LimitAmounts) -> GrantRefusal {
        let kind = available.kinds().next().unwrap_or(AmountKind::Calls);
        GrantRefusal {
            kind,
            left: available.get(kind).unwrap_or(0),
            per_agent: false,
            never: false,
            resets_at: None,
            contended: true,
        }
    }

    fn wait(&mut self, who: &LeaseHolder, missing: Amount) {
        if let Some(waiter) = self.waiting.iter_mut().find(|waiter| waiter.record == who.record) {
            (waiter.missing, waiter.asked) = (missing, self.time);
            return;
        }
        let waiter = WaitingGateway {
            record: who.record.clone(),
            agent: who.agent.clone(),
            missing,
            since: self.time,
            asked: self.time,
            taken: self.taken(),
            moved: self.time,
            steps_back: None,
        };
        self.due = self.due.min(waiter.due());
        self.waiting.push(waiter);
    }

    /// Everything that determines who has room.
    #[must_use]
    pub fn availability(&self) -> AccountAvailability {
        let first = self.waiting.iter().filter(|waiter| waiter.goes_first());
        AccountAvailability {
            limits: self.limits(),
            per_agent: self.per_agent(),
            used: self.used(),
            outstanding: self.leases.outstanding(),
            leases: self.leases.len(),
            window: self.window.0,
            due: self.due,
            kept: first.map(|waiter| (waiter.record.clone(), waiter.missing)).collect(),
        }
    }

    /// What is left, divided by the number of Agents.
    fn fair_part(&self, agents: usize) -> LimitAmounts {
        let agents = i64::try_from(agents).unwrap_or(i64::MAX).max(1);
        let left = self.limits().left_after(&self.used());
        LimitAmounts::from_fn(|kind| left.get(kind).map(|left| left / agents))
    }

    /// Whether an amount exceeds a fair share of what is left, among all Agents that hold something. An Agent that is
    /// alone takes nothing from others.
    fn is_large(&self, who: &LeaseHolder, amount: &Amount) -> bool {
        let agents = self.leases.agents_with(&who.agent);
        agents > 1 && self.fair_part(agents).exceeded_by(amount).is_some()
    }

    /// Whether others may be held back until this gateway has what it lacks.
    fn may_wait(&self, who: &LeaseHolder, missing: &Amount) -> bool {
        let next = self.large.as_ref().map(LargeGrant::next);
        next.is_none_or(|next| next <= self.time) || !self.is_large(who, missing)
    }

    fn note_large_turn(&mut self, who: &LeaseHolder, need: &GrantNeed) {
        let mine = self.waiting.iter().find(|waiter| waiter.record == who.record);
        let Some(waiter) = mine.filter(|waiter| waiter.goes_first()) else {
            return;
        };
        let turn = LargeGrant {
            record: who.record.clone(),
            since: waiter.since,
            granted: self.time,
            ended: None,
        };
        if self.is_large(who, &need.least) {
            self.large = Some(turn);
        }
    }

    /// Ends the [`LargeGrant`] of a gateway once it holds at most a fair share.
    pub(super) fn end_large_turn(&mut self, record: &str) {
        let held = self.leases.outstanding_at(record);
        let (time, part) = (self.time, self.fair_part(self.leases.agents().max(2)));
        if let Some(turn) = self.large.as_mut().filter(|turn| turn.record == record)
            && turn.ended.is_none()
            && part.exceeded_by(&held).is_none()
        {
            turn.ended = Some(time);
        }
    }

    /// The first time from now on at which a [`GrantRequest`] fits without user action, if no other Agent uses the room
    /// and the gateway closes its leases of past windows. `None`: never.
    #[must_use]
    pub fn resets_at(&self, who: &LeaseHolder, ask: &GrantRequest) -> Option<Timestamp> {
        let rule = &self.terms.window;
        let share = self.shares.of(&who.agent);
        let (all, own) = (self.settled.forecast(rule), share.forecast(rule));
        let need = self.need(&who.record, ask);
        let held = (self.leases.outstanding(), self.leases.outstanding_of(&who.agent));
        let mine = self.leases.outstanding_at(&who.record);
        let fits = |at: &Timestamp| {
            // In the next calendar window the current lease is useless, and what no call needs is returned.
            let (needed, back) = match self.window.1 {
                Some(end) if *at >= end => (
                    ask.least.limited_by(&self.both_limits()),
                    mine.saturating_sub(&ask.open),
                ),
                _ => (need.least, Amount::ZERO),
            };
            // `used` is a step function ordered by time: the last step at or before `at` applies.
            let available = |limits: &LimitAmounts, used: &[(Timestamp, Amount)], held: &Amount| {
                let used = used[used.partition_point(|(from, _)| from <= at).max(1) - 1].1;
                limits
                    .left_after(&saturating_sum(&used, &held.saturating_sub(&back)))
                    .exceeded_by(&needed)
                    .is_none()
            };
            self.limits_with(&Amount::ZERO, *at).is_some_and(|limits| {
                available(&limits, &all, &held.0) && available(&self.terms.per_agent, &own, &held.1)
            })
        };
        let mut moments: Vec<Timestamp> = all.iter().chain(&own).map(|(from, _)| *from).collect();
        moments.push(self.time);
        moments.extend(self.window.1);
        moments.sort_unstable();
        moments.into_iter().filter(|at| *at >= self.time).find(fits)
    }

    /// What a gateway gets beyond its next call, so that it need not request each call separately; less room, less
    /// extra.
    fn extra(&self, available: &LimitAmounts, full: &Amount, call: &Amount) -> Amount {
        let beyond = available.left_after(full);
        let more = Amount::from_fn(|kind| call.get(kind).saturating_mul(PREFETCH_CALLS - 1));
        more.min(&self.spare(&beyond))
    }

    /// What may be granted beyond waiting calls: an equal share per lease of a quarter of the room.
    fn spare(&self, available: &LimitAmounts) -> Amount {
        if self.waiting.iter().any(WaitingGateway::goes_first) {
            return Amount::ZERO;
        }
        let holders = i64::try_from(self.leases.len()).unwrap_or(i64::MAX).max(1);
        Amount::from_fn(|kind| available.get(kind).unwrap_or(0) / holders.saturating_mul(4))
    }
}

fn clipped(available: &LimitAmounts, wanted: &Amount) -> Amount {
    Amount::from_fn(|kind| {
        available
            .get(kind)
            .map_or(0, |available| available.min(wanted.get(kind)))
    })
}
