//! What really happened, recorded independently of the ledger: every call with its true times and its bill, the limits that
//! were in force, and the rules that must hold. Of the ledger it sees only the records at the API server.

use std::collections::BTreeMap;

use agentloop::api::amount::{Amount, AmountKind, LimitAmounts};
use agentloop::api::budget::{LeaseRecord, LedgerRecord};
use agentloop::ledger::account::{LeaseId, LedgerTerms};
use agentloop::ledger::window::WindowRule;
use jiff::Timestamp;

/// The kinds that schedules limit.
pub const KINDS: [AmountKind; 3] = [AmountKind::Tokens, AmountKind::Calls, AmountKind::Cost];
const NOT_YET: i64 = i64::MAX;

/// One call, as one account must see it. Times are milliseconds of the measure of the schedule: true time, or where
/// the leaders' clocks are wrong the time of the ledger.
#[derive(Clone, Debug)]
struct Entry {
    call: usize,
    agent: usize,
    reserved: i64,
    settled: i64,
    /// True time from which on limits may have allowed it.
    since: i64,
    /// The window that its lease was granted in.
    window: Timestamp,
    /// The kinds that its gateway knew to be limited.
    kinds: LimitAmounts,
}

/// One call.
#[derive(Clone, Debug)]
struct Call {
    /// What it may cost at most.
    bound: Amount,
    /// What the provider billed.
    billed: Amount,
    /// What its gateway counted; `None`: it died first, and its volume with it.
    counted: Option<Amount>,
}

/// A rule of windows, from when the first record was written under it.
#[derive(Clone, Debug)]
struct WindowPeriod {
    rule: WindowRule,
    from: i64,
    /// What was reserved, or settled, before this time no longer counted under an earlier rule.
    reserved_from: i64,
    settled_from: i64,
}

#[derive(Clone, Debug)]
struct AccountBookkeeping {
    entries: Vec<Entry>,
    leases: BTreeMap<LeaseId, (Timestamp, i64)>,
    regimes: Vec<WindowPeriod>,
    in_force: Vec<(i64, LimitAmounts)>,
    per_agent: LimitAmounts,
    last_write: i64,
}

/// The oracle of one schedule.
#[derive(Clone, Debug)]
pub struct SpendingOracle {
    calls: Vec<Call>,
    sheets: Vec<AccountBookkeeping>,
    /// Some bill was above its bound.
    pub violated: bool,
    /// A volume was lost, and with it what its gateway knew.
    pub lost: bool,
    by_window: bool,
}

/// A rule that did not hold.
pub type OracleVerdict = Result<(), String>;

/// A moment of the simulation as the ledger sees it.
pub fn at(milliseconds: i64) -> Timestamp {
    Timestamp::from_millisecond(milliseconds).unwrap()
}

impl SpendingOracle {
    /// Of schedules with these accounts. `by_window`: clocks are wrong, so calendar windows are identified by their name.
    pub fn new(terms: &[LedgerTerms], now: i64, by_window: bool) -> Self {
        let sheet = |terms: &LedgerTerms| AccountBookkeeping {
            entries: Vec::new(),
            leases: BTreeMap::new(),
            regimes: vec![WindowPeriod {
                rule: terms.window.clone(),
                from: i64::MIN,
                reserved_from: i64::MIN,
                settled_from: i64::MIN,
            }],
            in_force: vec![(now, terms.limits)],
            per_agent: terms.per_agent,
            last_write: now,
        };
        Self {
            calls: Vec::new(),
            sheets: terms.iter().map(sheet).collect(),
            violated: false,
            lost: false,
            by_window,
        }
    }

    /// Another account begins.
    pub fn add(&mut self, terms: &LedgerTerms, now: i64) {
        let sheets = Self::new(std::slice::from_ref(terms), now, self.by_window).sheets;
        self.sheets.extend(sheets);
    }

    /// The limits that hold for the leader from now on.
    pub fn limits(&mut self, account: usize, limits: LimitAmounts, now: i64) {
        let history = &mut self.sheets[account].in_force;
        if history.last().is_none_or(|(_, last)| *last != limits) {
            history.push((now, limits));
        }
    }

    /// A gateway reserved a call, and that is on its disk. `kinds` of each account and lease that it draws on.
    pub fn reserve(
        &mut self,
        agent: usize,
        bound: Amount,
        draws: impl Iterator<Item = (usize, LeaseId, LimitAmounts, i64)>,
    ) -> usize {
        let call = self.calls.len();
        self.calls.push(Call {
            bound,
            billed: Amount::ZERO,
            counted: None,
        });
        for (account, lease, kinds, now) in draws {
            let sheet = &mut self.sheets[account];
            let never = (Timestamp::UNIX_EPOCH, sheet.in_force[0].0);
            let (window, since) = *sheet.leases.get(&lease).unwrap_or(&never);
            sheet.entries.push(Entry {
                call,
                agent,
                reserved: now,
                settled: NOT_YET,
                since,
                window,
                kinds,
            });
        }
        call
    }

    /// The provider has the call, and bills it.
    pub fn bill(&mut self, call: usize, bill: Amount) {
        self.violated |= !self.calls[call].bound.covers(&bill);
        self.calls[call].billed = bill;
    }

    /// What was billed of a call.
    pub fn billed(&self, call: usize) -> Amount {
        self.calls[call].billed
    }

    /// The call is over: its gateway counts this much, or is dead with its volume.
    pub fn settle(&mut self, call: usize, counted: Option<Amount>, now: impl Fn(usize) -> i64) {
        self.calls[call].counted = counted;
        self.lost |= counted.is_none();
        for (account, sheet) in self.sheets.iter_mut().enumerate() {
            // A disk that was restored has calls open that were over.
            let open = |entry: &&mut Entry| entry.call == call && entry.settled == NOT_YET;
            for entry in sheet.entries.iter_mut().filter(open) {
                entry.settled = now(account);
            }
        }
    }

    /// A record was written by a leader that used `terms`; `highest` were its limits since the record before.
    pub fn accepted(
        &mut self,
        account: usize,
        old: Option<&LedgerRecord>,
        new: &LedgerRecord,
        terms: &LedgerTerms,
        highest: &LimitAmounts,
        now: i64,
    ) -> OracleVerdict {
        let violated = self.violated;
        let sheet = &mut self.sheets[account];
        for holder in &new.holders {
            let since = sheet.last_write;
            sheet.leases.entry(holder.lease).or_insert((holder.window, since));
        }
        sheet.last_write = now;
        if sheet.regimes.last().is_some_and(|last| last.rule != terms.window) {
            sheet.change_rule(&terms.window, now);
        }
        sheet.per_agent = terms.per_agent;
        let mut ids: Vec<_> = new.top_ups.iter().map(|top_up| &top_up.id).collect();
        ids.sort();
        ids.dedup();
        if ids.len() != new.top_ups.len() {
            return Err(format!("a top-up is counted twice in {:?}", new.top_ups));
        }
        // (b) settled + outstanding <= limit, or nothing more is granted.
        for kind in KINDS.into_iter().filter(|_| !violated) {
            let Some(limit) = highest.get(kind) else { continue };
            // Calls in flight hold nothing of a kind that was not limited.
            if sheet.in_force.iter().any(|(_, limits)| limits.get(kind).is_none()) {
                continue;
            }
            let settled: i64 = new.buckets.iter().map(|bucket| bucket.amount.get(kind)).sum();
            let outstanding: i64 = new.holders.iter().map(|holder| holder.amount.get(kind)).sum();
            if settled + outstanding > limit {
                let more = grown(old, new, kind);
                if more > 0 {
                    return Err(format!(
                        "{more} {kind} of account {account} were granted though {settled} are settled and \
                         {outstanding} outstanding of {limit}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// (a) No window was billed more than its limit.
    pub fn windows(&self) -> OracleVerdict {
        for (account, sheet) in self.sheets.iter().enumerate() {
            for kind in KINDS {
                self.window_of(account, sheet, kind, None)?;
                if sheet.per_agent.get(kind).is_some() {
                    for agent in 0..3 {
                        self.window_of(account, sheet, kind, Some(agent))?;
                    }
                }
            }
        }
        Ok(())
    }

    fn window_of(
        &self,
        account: usize,
        sheet: &AccountBookkeeping,
        kind: AmountKind,
        agent: Option<usize>,
    ) -> OracleVerdict {
        struct Item<'a> {
            entry: &'a Entry,
            amount: i64,
        }
        let items: Vec<Item<'_>> = sheet
            .entries
            .iter()
            .filter(|entry| agent.is_none_or(|agent| agent == entry.agent) && entry.kinds.get(kind).is_some())
            .map(|entry| {
                let call = &self.calls[entry.call];
                // Bills above the bound are not covered by the guarantee.
                let amount = call.billed.get(kind).min(call.bound.get(kind));
                Item { entry, amount }
            })
            .filter(|item| item.amount > 0)
            .collect();
        let total: i64 = items.iter().map(|item| item.amount).sum();
        let least = match agent {
            Some(_) => sheet.per_agent.get(kind),
            None => sheet.in_force.iter().filter_map(|(_, limits)| limits.get(kind)).min(),
        };
        // Nothing to check if all of it fits into the smallest limit.
        if least.is_none_or(|least| total <= least) {
            return Ok(());
        }
        for last in &items {
            let end = last.entry.reserved;
            let regime = sheet.regimes.iter().rev().find(|regime| regime.from <= end);
            let Some(regime) = regime.or(sheet.regimes.first()) else {
                continue;
            };
            let name = regime.rule.start(at(end));
            let mut sum = 0;
            let mut since = NOT_YET;
            for Item { entry, amount } in &items {
                let inside = entry.reserved <= end
                    && entry.reserved >= regime.reserved_from
                    && entry.settled > regime.settled_from
                    && match &regime.rule {
                        WindowRule::Rolling(length) => {
                            entry.settled > end - i64::try_from(length.as_millis()).unwrap_or(NOT_YET)
                        }
                        WindowRule::Calendar(..) if self.by_window => entry.window == last.entry.window,
                        WindowRule::Calendar(..) => entry.reserved >= name.as_millisecond(),
                        WindowRule::Lifetime => true,
                    };
                if inside {
                    sum += amount;
                    since = since.min(entry.since);
                }
            }
            let limit = match agent {
                Some(_) => sheet.per_agent.get(kind),
                None => sheet.limit_since(kind, since, end, self.by_window),
            };
            if limit.is_some_and(|limit| sum > limit) {
                return Err(format!(
                    "OVERSPENT: {sum} {kind} of account {account} were billed in the window at {} ({:?}), the limit \
                     is {limit:?}, agent {agent:?}",
                    at(end),
                    regime.rule
                ));
            }
        }
        Ok(())
    }

    /// (c) What all gateways counted in an account. `None`: unknown, since one of them is dead.
    pub fn counted(&self, account: usize) -> Option<Amount> {
        let mut sum = Amount::ZERO;
        for entry in &self.sheets[account].entries {
            sum = sum.checked_add(&self.calls[entry.call].counted?)?;
        }
        Some(sum)
    }

    /// The rules of an account's windows never changed.
    pub fn one_rule(&self, account: usize) -> bool {
        self.sheets[account].regimes.len() == 1
    }

    /// Calls that were made.
    pub fn calls(&self) -> usize {
        self.calls.iter().filter(|call| !call.billed.is_zero()).count()
    }
}

impl AccountBookkeeping {
    fn change_rule(&mut self, rule: &WindowRule, now: i64) {
        let Some(last) = self.regimes.last() else { return };
        let (mut reserved_from, mut settled_from) = (last.reserved_from, last.settled_from);
        match &last.rule {
            WindowRule::Rolling(length) => {
                let length = i64::try_from(length.as_millis()).unwrap_or(NOT_YET);
                settled_from = settled_from.max(now - length);
            }
            calendar @ WindowRule::Calendar(..) => {
                reserved_from = reserved_from.max(calendar.start(at(now)).as_millisecond());
            }
            WindowRule::Lifetime => {}
        }
        self.regimes.push(WindowPeriod {
            rule: rule.clone(),
            from: now,
            reserved_from,
            settled_from,
        });
    }

    /// The largest limit in force between two moments; in all when time is not true time. `None`: none at some moment.
    fn limit_since(&self, kind: AmountKind, since: i64, until: i64, always: bool) -> Option<i64> {
        let mut largest = 0;
        for (place, (from, limits)) in self.in_force.iter().enumerate() {
            let next = self.in_force.get(place + 1).map_or(NOT_YET, |(next, _)| *next);
            if always || (*from <= until && next >= since) {
                largest = largest.max(limits.get(kind)?);
            }
        }
        Some(largest)
    }
}

/// How much more the new record grants; what was spent without a grant, before the kind was limited, is none.
fn grown(old: Option<&LedgerRecord>, new: &LedgerRecord, kind: AmountKind) -> i64 {
    let base = |holder: &LeaseRecord| holder.spent.get(kind) + holder.returned.get(kind);
    let granted = |lease: LeaseId| {
        let holder = old.and_then(|old| old.holders.iter().find(|holder| holder.lease == lease));
        holder.map_or(0, |holder| holder.amount.get(kind) + base(holder))
    };
    let more = |holder: &LeaseRecord| {
        let before = granted(holder.lease).max(base(holder));
        (holder.amount.get(kind) + base(holder) - before).max(0)
    };
    new.holders.iter().map(more).sum()
}
