//! The conversation about leases beside the calls: says what became of them, gives back what is recalled or not needed,
//! and asks early.
//!
//! All that is said are totals, so that a lost or repeated word does no harm. A closed lease is said again until the
//! leader knows nothing of it any more: then its last numbers are in the ledger's record. Where an answer may have been
//! lost, the leader is asked what it granted with it: nobody else can give that back.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::GatewayBudget;
use super::call_bound::draws;
use crate::api::amount::Amount;
use crate::api::status::LoopState;
use crate::gateway::link_state::LinkView;
use crate::gateway::shutdown_retry;
use crate::ledger::account::{DurableGrant, LeaseStatement, PREFETCH_CALLS};
use crate::ledger::wallet::Wallet;
use crate::link::client::LinkError;
use crate::link::messages::{AccountRequest, AccountResponse, BudgetTerms, LeaseRequest, LeaseResponse, LoopReport};

/// Time without a call after which leases are given back.
const IDLE: Duration = Duration::from_secs(30);
/// Time between two statements of a lease that is spent from.
const STATE: Duration = Duration::from_secs(15);
/// Time between two questions that no call waits for.
const AHEAD: Duration = Duration::from_secs(5);
/// First and longest wait before a closed lease is said again, or what failed is tried again.
const REPEAT: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(15));

/// How often in a minute the worker's word that it rests closes leases at once. Each time is a write of the leader's.
const CLOSES_BY_WORD: u32 = 6;
const MINUTE: Duration = Duration::from_mins(1);

/// What one more call needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LeaseDemand {
    pub(super) least: Amount,
    pub(super) full: Amount,
}

/// How busy the gateway is, and what it said last.
pub(super) struct LeaseActivity {
    calls: usize,
    waiting: usize,
    /// When the last call ended.
    rested: Instant,
    /// What the last call was to have.
    last: Amount,
    /// A call was made since calls were asked for ahead.
    early: bool,
    /// When they were.
    asked_ahead: Option<Instant>,
    said: BTreeMap<(String, i64), LeaseStatement>,
    said_at: Option<Instant>,
    /// The attach at which it was said.
    attach: u64,
    /// What was granted last may not have been heard.
    unheard: bool,
    /// Times in a row that nothing new was said.
    repeats: u32,
    /// Times in a row that nothing could be said.
    failures: u32,
    /// How often the worker's word closed leases, and since when that is counted.
    closes: (u32, Instant),
}

impl LeaseActivity {
    /// `restored`: a gateway before this one may have asked for what it never heard of.
    pub(super) fn new(restored: bool) -> Self {
        Self {
            calls: 0,
            waiting: 0,
            rested: Instant::now(),
            last: Amount::ZERO,
            early: false,
            asked_ahead: None,
            said: BTreeMap::new(),
            said_at: None,
            attach: 0,
            unheard: restored,
            repeats: 0,
            failures: 0,
            closes: (0, Instant::now()),
        }
    }

    /// Whether the worker's word that it rests may close leases once more: it is the worker's to say, as often as it likes.
    fn may_close(&mut self) -> bool {
        if self.closes.1.elapsed() >= MINUTE {
            self.closes = (0, Instant::now());
        }
        let may = self.closes.0 < CLOSES_BY_WORD;
        self.closes.0 += u32::from(may);
        may
    }

    pub(super) fn call_started(&mut self) {
        self.calls += 1;
    }

    /// A call waits for room.
    pub(super) fn wait_started(&mut self) {
        self.waiting += 1;
    }

    /// It waits no more: it holds what it needs, which may have been `full`, or is not made.
    pub(super) fn wait_ended(&mut self, full: Option<Amount>) {
        self.waiting = self.waiting.saturating_sub(1);
        if let Some(full) = full {
            (self.last, self.early) = (full, true);
        }
    }

    pub(super) fn call_ended(&mut self) {
        self.calls = self.calls.saturating_sub(1);
        // One that was cut while it waited.
        self.waiting = self.waiting.min(self.calls);
        self.rested = Instant::now();
    }

    fn pause(&self, times: u32) -> Instant {
        let pause = REPEAT.0.saturating_mul(1 << times.min(10)).min(REPEAT.1);
        self.said_at.unwrap_or_else(Instant::now) + pause
    }
}

impl GatewayBudget {
    /// Keeps the conversation up. Never ends. `said`: what the worker says of its loop.
    pub async fn maintain_leases(self: Arc<Self>, mut said: watch::Receiver<Option<LoopReport>>) {
        let mut view = self.contact.subscribe();
        let mut stirred = self.stirred.subscribe();
        loop {
            stirred.mark_unchanged();
            let now = view.borrow_and_update().clone();
            let rests = said
                .borrow_and_update()
                .as_ref()
                .is_some_and(|said| is_at_rest(said, Timestamp::now()));
            if now.session.is_some() && !now.fenced {
                self.close_unused_leases(now.directives.budget.as_ref(), rests);
            }
            let due = self.next_exchange_at(&now, rests);
            if due.is_some_and(|due| due <= Instant::now()) {
                self.report_leases(&now).await;
                continue;
            }
            let at = due.unwrap_or_else(|| Instant::now() + STATE);
            tokio::select! {
                _ = view.changed() => {}
                _ = stirred.changed() => {}
                changed = said.changed() => if changed.is_err() { return },
                () = sleep_until(at) => {}
            }
        }
    }

    /// Gives everything back: the pod ends.
    pub async fn return_leases(&self, limit: Duration) {
        let closed = self.store.change_wallet(Wallet::close_all);
        if let Err(error) = closed {
            tracing::warn!(%error, "leases are not closed");
            return;
        }
        if self.store.with_wallet(|wallet| wallet.statements().next().is_none()) {
            return;
        }
        let words = (
            "the leader did not take the leases back",
            "giving leases back took too long",
        );
        shutdown_retry::retry_within(limit, words, || self.exchange_leases(None)).await;
    }

    /// What should be closed or given back by now is.
    fn close_unused_leases(&self, terms: Option<&BudgetTerms>, rests: bool) {
        let Some(terms) = terms else {
            return;
        };
        let holds = self.statements().values().any(|said| !said.closed);
        let (waiting, closes) = {
            let mut pace = self.lease_activity();
            let idle = pace.rested.elapsed() >= IDLE;
            let closes = holds && pace.calls == 0 && (idle || (rests && pace.may_close()));
            (pace.waiting, closes)
        };
        let now = self.clock.now();
        let done = self.store.change_wallet(|wallet| {
            wallet.close_idle(&draws(terms), now);
            if closes {
                wallet.close_all();
            }
            for account in terms.accounts.iter().filter(|account| account.recall && waiting == 0) {
                wallet.give_back(Some(&account.account));
            }
        });
        if let Err(error) = done {
            tracing::error!(%error, "leases cannot be given back");
        }
    }

    /// When something is to be said; `None`: nothing, unless something changes.
    fn next_exchange_at(&self, view: &LinkView, rests: bool) -> Option<Instant> {
        if view.session.is_none() || view.fenced {
            return None;
        }
        let now = Instant::now();
        let statements = self.statements();
        let wishes = self.should_prefetch(view, rests);
        let mut pace = self.lease_activity();
        if !wishes {
            pace.early = false;
        }
        let mut due = None;
        let mut at = |moment: Instant| due = Some(due.map_or(moment, |due: Instant| due.min(moment)));
        if wishes {
            at(pace.asked_ahead.map_or(now, |asked| asked + AHEAD));
        }
        // A call that waits asks by itself.
        if pace.unheard && pace.waiting == 0 {
            at(now);
        }
        for (key, statement) in &statements {
            let before = pace.said.get(key);
            let over = before.is_none_or(|before| before.closed != statement.closed);
            let back = before.map_or(Amount::ZERO, |before| before.returned) != statement.returned;
            if back || (over && statement.closed) || pace.attach != view.attaches {
                at(now);
            } else if statement.closed {
                at(pace.pause(pace.repeats));
            } else if before != Some(statement) {
                at(pace.said_at.map_or(now, |said| said + STATE));
            }
        }
        // Leases that nobody uses are closed then.
        let idle = pace.rested + IDLE;
        if pace.calls == 0 && !statements.is_empty() && idle > now {
            at(idle);
        }
        let soonest = (pace.failures > 0).then(|| pace.pause(pace.failures));
        due.map(|due| soonest.map_or(due, |soonest| due.max(soonest)))
    }

    /// Whether more calls like the last one should be asked for, as soon as that was not done for a while.
    fn should_prefetch(&self, view: &LinkView, rests: bool) -> bool {
        let (early, last) = {
            let pace = self.lease_activity();
            (pace.early && pace.waiting == 0, pace.last)
        };
        let Some(terms) = view.directives.budget.as_ref().filter(|_| early && !rests) else {
            return false;
        };
        let recalled = terms
            .accounts
            .iter()
            .any(|account| account.recall || account.held.is_some());
        let now = self.clock.now();
        let enough = prefetch_amount(&last);
        !recalled
            && self.store.with_wallet(|wallet| {
                // With nothing held at all the next call asks.
                wallet.statements().any(|(_, said)| !said.closed)
                    && draws(terms)
                        .iter()
                        .any(|draw| wallet.lacking(draw, &enough, now).is_some())
            })
    }

    async fn report_leases(&self, view: &LinkView) {
        let early = {
            let mut pace = self.lease_activity();
            let wish = LeaseDemand {
                least: Amount::ZERO,
                full: pace.last,
            };
            let due = pace.asked_ahead.is_none_or(|asked| asked.elapsed() >= AHEAD);
            let asks = due && std::mem::take(&mut pace.early);
            if asks {
                pace.asked_ahead = Some(Instant::now());
            }
            asks.then_some(wish)
        };
        let before = self.lease_activity().said.clone();
        let result = self.exchange_leases(early).await;
        let mut pace = self.lease_activity();
        match result {
            Ok(_) => {
                (pace.attach, pace.failures) = (view.attaches, 0);
                pace.repeats = if pace.said == before { pace.repeats + 1 } else { 0 };
            }
            Err(error) => {
                tracing::info!(%error, "the leader was not told of leases");
                pace.failures += 1;
                pace.said_at = Some(Instant::now());
            }
        }
    }

    fn statements(&self) -> BTreeMap<(String, i64), LeaseStatement> {
        self.store.with_wallet(|wallet| {
            let all = wallet.statements();
            all.map(|(account, said)| ((account.to_owned(), said.lease), said))
                .collect()
        })
    }

    /// One question and its answer; only one at a time.
    pub(super) async fn exchange_leases(&self, wish: Option<LeaseDemand>) -> Result<LeaseResponse, LinkError> {
        let _turn = self.turn.lock().await;
        let terms = self.contact.subscribe().borrow().directives.budget.clone();
        let sent = self.clock.now();
        let request = self.build_request(terms.as_ref(), wish, sent);
        let said = stated_leases(&request);
        if request.accounts.iter().any(|account| account.ask.is_some()) {
            self.lease_activity().unheard = true;
        }
        let answer = self.client.lease(&request).await?;
        let now = self.clock.now();
        let lost = self
            .store
            .change_wallet(|wallet| {
                let lost: usize = answer
                    .accounts
                    .iter()
                    .map(|account| apply_answer(wallet, account, sent))
                    .sum();
                // Without terms it is not known which accounts apply.
                if let Some(terms) = &terms {
                    wallet.close_idle(&draws(terms), now);
                }
                lost
            })
            .map_err(|error| LinkError::Unreadable(format!("its grants are not recorded: {error}")))?;
        self.note_lost(lost);
        let mut pace = self.lease_activity();
        (pace.said, pace.unheard) = (said, false);
        pace.said_at = Some(Instant::now());
        drop(pace);
        self.stirred.send_replace(());
        Ok(answer)
    }

    /// The leader knew more of so many leases than this gateway.
    fn note_lost(&self, leases: usize) {
        if leases == 0 {
            return;
        }
        tracing::error!(
            leases,
            "the storage of this gateway went back to an earlier state, such as a snapshot: the leases that it held are \
             closed, and all that was left of them counts as spent"
        );
        let leases = i64::try_from(leases).unwrap_or(i64::MAX);
        self.store
            .count(|budget| budget.lost_leases = budget.lost_leases.saturating_add(leases));
    }

    fn build_request(&self, terms: Option<&BudgetTerms>, wish: Option<LeaseDemand>, now: u64) -> LeaseRequest {
        let mut accounts: BTreeMap<String, AccountRequest> = BTreeMap::new();
        let account = |id: &str| AccountRequest {
            account: id.to_owned(),
            ..AccountRequest::default()
        };
        self.store.with_wallet(|wallet| {
            for (id, statement) in wallet.statements() {
                let request = accounts.entry(id.to_owned()).or_insert_with(|| account(id));
                request.statements.push(statement);
            }
            let Some((wish, terms)) = wish.zip(terms) else {
                return;
            };
            let enough = if wish.least.is_zero() {
                prefetch_amount(&wish.full)
            } else {
                wish.full
            };
            for draw in draws(terms) {
                if wallet.lacking(&draw, &enough, now).is_some() {
                    let ask = wallet.grant_request(draw.account, wish.least, wish.full, now);
                    let request = accounts
                        .entry(draw.account.to_owned())
                        .or_insert_with(|| account(draw.account));
                    request.ask = Some(ask);
                }
            }
        });
        LeaseRequest {
            epoch: self.epoch,
            record: self.store.name().to_owned(),
            accounts: accounts.into_values().collect(),
        }
    }
}

/// What the leader knows of each lease once it has this request. A call that is settled after it was made is not in it,
/// and has still to be said.
fn stated_leases(request: &LeaseRequest) -> BTreeMap<(String, i64), LeaseStatement> {
    let accounts = request.accounts.iter();
    accounts
        .flat_map(|part| part.statements.iter().map(|said| (&part.account, said)))
        .map(|(account, said)| ((account.clone(), said.lease), said.clone()))
        .collect()
}

/// What should be held for calls to come: half a full lease.
fn prefetch_amount(call: &Amount) -> Amount {
    Amount::from_fn(|kind| call.get(kind).saturating_mul(PREFETCH_CALLS / 2))
}

/// How many leases the leader knew more of.
fn apply_answer(wallet: &mut Wallet, answer: &AccountResponse, sent: u64) -> usize {
    let granted: Vec<(DurableGrant, Option<u64>)> = answer
        .leases
        .iter()
        .map(|lease| {
            let granted = DurableGrant {
                lease: lease.lease,
                granted: lease.granted,
                spent: lease.spent,
                returned: lease.returned,
                ends: None,
            };
            (
                granted,
                lease.valid_milliseconds.map(|valid| sent.saturating_add(valid)),
            )
        })
        .collect();
    wallet
        .apply_grants(&answer.account, answer.epoch, &granted, &answer.forgotten)
        .lost
        .len()
}

/// Whether the loop will make no call for long enough that its leases are better given back: each lease costs a write.
fn is_at_rest(said: &LoopReport, now: Timestamp) -> bool {
    match said.state {
        LoopState::Sleeping => said
            .resumes_at
            .is_none_or(|resumes| resumes.duration_since(now).unsigned_abs() >= IDLE && resumes > now),
        LoopState::Paused | LoopState::Stopped => true,
        LoopState::Starting | LoopState::Running | LoopState::Stopping => false,
    }
}
