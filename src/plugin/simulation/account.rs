//! One account of the ledger on the calls of histories, with what the leader and the gateways know at each moment.
//!
//! Each call is a lease of its own, held from its beginning to its end, so that calls of several Agents that overlap are
//! charged in the order of time. Decides when the account is exhausted by the rules of the controller.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};

use crate::api::NamespacedName;
use crate::api::amount::{Amount, AmountKind};
use crate::api::budget::{LedgerRecord, OnExhausted};
use crate::ledger::account::{Account, GrantRefusal, GrantRequest, LeaseHolder, LeaseId, LeaseStatement, LedgerTerms};

/// While more than this part of a limit is left, it is exhausted only if all Agents have made calls; with less left, Agents
/// that are not awake are ignored. As in the controller.
const LAST_FRACTION: i64 = 4;
/// How long a gateway keeps its leases after the last call, and the shortest sleep for which it closes them at once.
pub const IDLE: SignedDuration = SignedDuration::from_secs(30);
/// How long a gateway waits for what others hold, before the loop pauses.
const WAIT: SignedDuration = SignedDuration::from_secs(10);

/// Why a call was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BudgetStop {
    /// The limit.
    pub limit: String,
    /// When a call like it fits. `None`: when the limit is raised.
    pub until: Option<Timestamp>,
}

/// What is known of an Agent.
struct KnownAgent {
    /// What it needed for its last call.
    requested: Amount,
    /// Between calls, its gateway holds a lease until then.
    holds_until: Timestamp,
    /// Its last call was refused and still has no room.
    blocked: bool,
}

/// A call that has begun and not ended.
#[derive(Clone)]
struct CallInFlight {
    who: LeaseHolder,
    /// The lease, and what was granted. `None`: the call uses nothing that is limited.
    lease: Option<(LeaseId, Amount)>,
    amount: Amount,
    ends: Timestamp,
}

/// One account.
pub struct SimulatedAccount {
    account: Account,
    /// Name of a limit by its kind, and whether it is of each Agent.
    named: fn(AmountKind, bool) -> String,
    on_exhausted: OnExhausted,
    /// Number of Agents that draw on it.
    agents: usize,
    known: BTreeMap<String, KnownAgent>,
    in_flight: Vec<CallInFlight>,
    /// Number of calls that have begun.
    begun: u64,
    /// What holds all Agents now; with `Stop`, for good.
    holds_all: Option<BudgetStop>,
}

impl SimulatedAccount {
    /// An empty account.
    pub fn new(terms: LedgerTerms, named: fn(AmountKind, bool) -> String, now: Timestamp) -> Self {
        Self {
            account: Account::restore(terms, &LedgerRecord::default(), now),
            named,
            on_exhausted: OnExhausted::Pause,
            agents: 1,
            known: BTreeMap::new(),
            in_flight: Vec::new(),
            begun: 0,
            holds_all: None,
        }
    }

    /// The same of a budget that so many Agents share.
    #[must_use]
    pub fn shared(self, agents: usize, on_exhausted: OnExhausted) -> Self {
        Self {
            on_exhausted,
            agents,
            ..self
        }
    }

    /// Adds to the limits.
    pub fn top_up(&mut self, id: &str, amount: Amount, now: Timestamp) {
        self.account.top_up(id, amount, now);
    }

    /// Whether it has a limit of this kind.
    #[must_use]
    pub fn has_limit(&self, kind: AmountKind) -> bool {
        let limits = [self.account.limits(), self.account.per_agent()];
        limits.iter().any(|limits| limits.get(kind).is_some())
    }

    /// Why a call is not made, if so.
    pub fn refusal(&mut self, agent: &str, amount: &Amount, now: Timestamp) -> Option<BudgetStop> {
        self.advance(now);
        if self.holds_all.is_some() {
            return self.holds_all.clone();
        }
        let refused = self.request(agent, amount, now);
        let known = self.known.entry(agent.to_owned()).or_insert(KnownAgent {
            requested: *amount,
            holds_until: Timestamp::MIN,
            blocked: false,
        });
        (known.requested, known.blocked) = (*amount, refused.is_some());
        let mut stop = refused?;
        self.assess();
        if self.on_exhausted == OnExhausted::Stop && self.holds_all.is_some() {
            stop.until = None;
        }
        Some(stop)
    }

    fn request(&mut self, agent: &str, amount: &Amount, now: Timestamp) -> Option<BudgetStop> {
        let (who, ask) = (self.holder(agent), asked(amount));
        if self.account.has_room(&who, &ask) {
            return None;
        }
        let refusal = refused(&mut self.account, &who, &ask, now)?;
        let waited = self.settled(later(now, WAIT));
        if refusal.contended && waited.has_room(&who, &ask) {
            // The call waits until those in flight have ended.
            self.advance(waited.time());
            return None;
        }
        let fits = |account: &Account| account.resets_at(&who, &ask).filter(|_| !refusal.never);
        let moments = [fits(&self.account), fits(&self.settled(Timestamp::MAX))];
        Some(BudgetStop {
            limit: (self.named)(refusal.kind, refusal.per_agent),
            until: moments.into_iter().flatten().min(),
        })
    }

    /// Begins a call that had room.
    pub fn begin(&mut self, agent: &str, amount: &Amount, (starts, ends): (Timestamp, Timestamp)) {
        self.advance(starts);
        let who = self.holder(agent);
        self.begun += 1;
        let granted = self.account.request_grant(&who, &asked(amount), starts).is_ok();
        write(&mut self.account);
        let grants = self.account.durable_grants(&who.record);
        let lease = grants.first().filter(|_| granted);
        self.in_flight.push(CallInFlight {
            lease: lease.map(|grant| (grant.lease, grant.granted)),
            who,
            amount: *amount,
            ends: ends.max(starts),
        });
    }

    /// The loop of an Agent has begun to sleep or to wait, for [`IDLE`] or longer.
    pub fn rest(&mut self, agent: &str, now: Timestamp) {
        self.advance(now);
        if let Some(known) = self.known.get_mut(agent) {
            known.holds_until = known.holds_until.min(now);
        }
        self.assess();
    }

    /// What happens by then, in order: calls end, and gateways close leases that are idle.
    fn advance(&mut self, now: Timestamp) {
        while let Some(at) = self.next_change(now) {
            self.account.advance(at);
            self.end_calls(at);
            self.assess();
        }
        self.account.advance(now);
        self.assess();
    }

    /// The first change after the present time, if it is not after `now`.
    fn next_change(&self, now: Timestamp) -> Option<Timestamp> {
        let time = self.account.time();
        let ends = self.in_flight.iter().map(|call| call.ends);
        let idle = self.known.values().map(|known| known.holds_until);
        ends.chain(idle.filter(|at| *at > time)).filter(|at| *at <= now).min()
    }

    fn end_calls(&mut self, now: Timestamp) {
        let ended: Vec<CallInFlight> = self.in_flight.extract_if(.., |call| call.ends <= now).collect();
        for call in ended {
            call.settle(&mut self.account);
            if let Some(known) = self.known.get_mut(&call.who.agent.name) {
                known.holds_until = later(call.ends, IDLE);
            }
        }
    }

    /// The account once all calls in flight that end by then have ended.
    fn settled(&self, by: Timestamp) -> Account {
        let mut account = self.account.clone();
        let mut in_flight = self.in_flight.clone();
        in_flight.retain(|call| call.ends <= by);
        in_flight.sort_by_key(|call| call.ends);
        for call in &in_flight {
            call.settle(&mut account);
        }
        account
    }

    /// Decides whether all Agents are held.
    fn assess(&mut self) {
        let stopped = self.on_exhausted == OnExhausted::Stop && self.holds_all.is_some();
        if stopped || self.on_exhausted == OnExhausted::Pause {
            return;
        }
        for (agent, known) in &mut self.known {
            let ask = asked(&known.requested);
            known.blocked = known.blocked && !self.account.has_room(&holder(agent, 0), &ask);
        }
        self.holds_all = self.exhaustion();
        if let Some(stop) = &mut self.holds_all
            && self.on_exhausted == OnExhausted::Stop
        {
            stop.until = None;
        }
    }

    /// Whether the account as a whole is exhausted: a limit is used up, or less is left than any call needs. An Agent that
    /// has used its own share, or whose call can never fit, does not stop the others. Of several refusals, the one that has
    /// room last.
    fn exhaustion(&mut self) -> Option<BudgetStop> {
        let limits = self.account.limits();
        if limits.zero_kind().or(self.account.per_agent().zero_kind()).is_some() {
            return None;
        }
        let now = self.account.time();
        let blocked = self.known.iter().filter(|(_, known)| known.blocked);
        let blocked: Vec<(String, Amount)> = blocked.map(|(agent, known)| (agent.clone(), known.requested)).collect();
        let mut latest: Option<BudgetStop> = None;
        for (agent, amount) in blocked {
            let Some(refusal) = refused(&mut self.account, &holder(&agent, 0), &asked(&amount), now) else {
                continue;
            };
            let own = refusal.per_agent || refusal.never || refusal.contended;
            let until = refusal.resets_at;
            if !own
                && self.fits_no_call(refusal.kind)
                && latest.as_ref().is_none_or(|found| is_later(until, found.until))
            {
                let limit = (self.named)(refusal.kind, false);
                latest = Some(BudgetStop { limit, until });
            }
        }
        latest.or_else(|| {
            let used = self.account.used();
            let kind = limits
                .kinds()
                .find(|kind| limits.get(*kind).is_some_and(|limit| used.get(*kind) >= limit))?;
            let one = Amount::from_fn(|each| i64::from(each == kind));
            Some(BudgetStop {
                limit: (self.named)(kind, false),
                until: self.account.resets_at(&LeaseHolder::default(), &asked(&one)),
            })
        })
    }

    /// Whether less of a kind is left than the smallest call that was last requested.
    fn fits_no_call(&self, kind: AmountKind) -> bool {
        let limits = self.account.limits();
        let left = limits.left_after(&self.account.used());
        let (Some(limit), Some(left)) = (limits.get(kind), left.get(kind)) else {
            return false;
        };
        let fits_none = |of: &dyn Fn(&str, &KnownAgent) -> bool| {
            let requests = self.known.iter().filter(|(agent, known)| of(agent, known));
            let smallest = requests.map(|(_, known)| known.requested.get(kind)).min();
            smallest.is_some_and(|smallest| left < smallest)
        };
        (self.known.len() >= self.agents && fits_none(&|_, _| true))
            || (left <= limit / LAST_FRACTION && fits_none(&|agent, known| self.is_awake(agent, known)))
    }

    /// Whether the leader sees that an Agent makes calls: its gateway holds a lease, or waits for room.
    fn is_awake(&self, agent: &str, known: &KnownAgent) -> bool {
        known.blocked
            || self.account.time() < known.holds_until
            || self.in_flight.iter().any(|call| call.who.agent.name == agent)
    }

    /// The holder of the lease of the next call.
    fn holder(&self, agent: &str) -> LeaseHolder {
        holder(agent, self.begun + 1)
    }
}

impl CallInFlight {
    /// Charges the call at its end.
    fn settle(&self, account: &mut Account) {
        if let Some((lease, granted)) = self.lease {
            let statement = LeaseStatement {
                lease,
                spent: self.amount,
                returned: granted.saturating_sub(&self.amount),
                closed: true,
            };
            account.apply_statement(&self.who, &statement, self.ends);
            write(account);
        }
        account.advance(self.ends);
    }
}

/// A time without an end is the latest.
#[must_use]
pub fn is_later(one: Option<Timestamp>, other: Option<Timestamp>) -> bool {
    one.unwrap_or(Timestamp::MAX) > other.unwrap_or(Timestamp::MAX)
}

fn later(time: Timestamp, span: SignedDuration) -> Timestamp {
    time.checked_add(span).unwrap_or(Timestamp::MAX)
}

/// Why a request gets no grant. It waits for none.
fn refused(account: &mut Account, who: &LeaseHolder, ask: &GrantRequest, now: Timestamp) -> Option<GrantRefusal> {
    let refusal = account.request_grant(who, ask, now).err();
    account.withdraw(&who.agent);
    refusal
}

/// Each call has a record of its own, since calls of one Agent may overlap.
fn holder(agent: &str, call: u64) -> LeaseHolder {
    LeaseHolder {
        record: format!("{agent}/{call}"),
        agent: NamespacedName::new("simulated", agent),
        pod_uid: agent.to_owned(),
        epoch: 1,
    }
}

fn asked(amount: &Amount) -> GrantRequest {
    GrantRequest {
        lease: None,
        open: Amount::ZERO,
        least: *amount,
        full: *amount,
    }
}

/// What a leader writes before a gateway gets a grant.
fn write(account: &mut Account) {
    let record = account.compose();
    account.confirm_record(&record);
}
