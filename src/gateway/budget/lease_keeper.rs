//! Maintains leases independently of calls: reports their state, returns recalled or unused amounts, and prefetches.
//!
//! Everything reported is a total, so lost or repeated messages are harmless. A closed lease is reported until the
//! leader has forgotten it: only then are its final numbers in the ledger's record. If an answer may have been lost,
//! the leader is asked again what it granted with it, because only this gateway can return that.

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
use crate::support::backoff::doubled;

/// Time without a call after which leases are returned.
const IDLE: Duration = Duration::from_secs(30);
/// Interval of reports about a lease in use.
const STATE: Duration = Duration::from_secs(15);
/// Shortest interval of prefetch requests.
const PREFETCH_INTERVAL: Duration = Duration::from_secs(5);
/// First and longest delay before a closed lease is reported again or a failed request is retried.
const REPEAT: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(15));

/// How often per minute a worker's [`LoopReport`] that it is idle closes leases at once. Each time costs the leader a
/// write.
const CLOSES_BY_WORD: u32 = 6;
const MINUTE: Duration = Duration::from_mins(1);

/// What the next call needs: at least [`Self::least`], at best [`Self::full`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LeaseDemand {
    pub(super) least: Amount,
    pub(super) full: Amount,
}

/// How busy the gateway is, and what it last reported.
pub(super) struct LeaseActivity {
    calls: usize,
    waiting: usize,
    /// When the last call ended.
    rested: Instant,
    /// The full amount of the last call.
    last: Amount,
    /// A call was made since the last prefetch.
    early: bool,
    /// Time of the last prefetch.
    asked_ahead: Option<Instant>,
    reported: BTreeMap<(String, i64), LeaseStatement>,
    reported_at: Option<Instant>,
    /// Number of the attach under which [`Self::reported`] was sent.
    attach: u64,
    /// The last [`DurableGrant`]s may not have been received.
    unheard: bool,
    /// Consecutive reports without a change.
    repeats: u32,
    /// Consecutive failed requests.
    failures: u32,
    /// How often idle [`LoopReport`]s of the worker closed leases, and since when that is counted.
    closes: (u32, Instant),
}

impl LeaseActivity {
    /// `restored`: a previous gateway may have requested [`DurableGrant`]s whose answer it never received.
    pub(super) fn new(restored: bool) -> Self {
        Self {
            calls: 0,
            waiting: 0,
            rested: Instant::now(),
            last: Amount::ZERO,
            early: false,
            asked_ahead: None,
            reported: BTreeMap::new(),
            reported_at: None,
            attach: 0,
            unheard: restored,
            repeats: 0,
            failures: 0,
            closes: (0, Instant::now()),
        }
    }

    /// Whether an idle [`LoopReport`] of the worker may close leases again. Rate-limited, because the worker is not
    /// trusted and can report as often as it likes.
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

    /// A call starts to wait for room.
    pub(super) fn wait_started(&mut self) {
        self.waiting += 1;
    }

    /// A call has stopped waiting: it got its reservation, with `full` as its full amount, or is not made.
    pub(super) fn wait_ended(&mut self, full: Option<Amount>) {
        self.waiting = self.waiting.saturating_sub(1);
        if let Some(full) = full {
            (self.last, self.early) = (full, true);
        }
    }

    pub(super) fn call_ended(&mut self) {
        self.calls = self.calls.saturating_sub(1);
        // The call may have been cut while it waited.
        self.waiting = self.waiting.min(self.calls);
        self.rested = Instant::now();
    }

    fn pause(&self, times: u32) -> Instant {
        let pause = doubled(REPEAT.0, times, REPEAT.1);
        self.reported_at.unwrap_or_else(Instant::now) + pause
    }
}

impl GatewayBudget {
    /// Runs the maintenance; never returns while `loop_report`, the [`LoopReport`]s of the worker, is open.
    pub async fn maintain_leases(self: Arc<Self>, mut loop_report: watch::Receiver<Option<LoopReport>>) {
        let mut view = self.contact.subscribe();
        let mut stirred = self.stirred.subscribe();
        loop {
            stirred.mark_unchanged();
            let now = view.borrow_and_update().clone();
            let rests = loop_report
                .borrow_and_update()
                .as_ref()
                .is_some_and(|report| is_at_rest(report, Timestamp::now()));
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
                changed = loop_report.changed() => if changed.is_err() { return },
                () = sleep_until(at) => {}
            }
        }
    }

    /// Returns all leases at the end of the pod.
    pub async fn return_leases(&self, limit: Duration) {
        let closed = self.store.change_wallet(Wallet::close_all);
        if let Err(error) = closed {
            tracing::warn!(%error, "failed to close the leases");
            return;
        }
        if self.store.with_wallet(|wallet| wallet.statements().next().is_none()) {
            return;
        }
        let messages = (
            "failed to return the leases to the leader",
            "timed out returning the leases to the leader",
        );
        shutdown_retry::retry_within(limit, messages, || self.exchange_leases(None)).await;
    }

    /// Closes idle leases, and returns recalled amounts.
    fn close_unused_leases(&self, terms: Option<&BudgetTerms>, rests: bool) {
        let Some(terms) = terms else {
            return;
        };
        let holds = self.statements().values().any(|statement| !statement.closed);
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
            // While a call waits for room, what is held is kept for it: returned now, others could take it, and the
            // call would wait longer.
            for account in terms.accounts.iter().filter(|account| account.recall && waiting == 0) {
                wallet.give_back(Some(&account.account));
            }
        });
        if let Err(error) = done {
            tracing::error!(%error, "failed to return leases");
        }
    }

    /// When the next exchange with the leader is due; `None`: only after a change.
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
            at(pace.asked_ahead.map_or(now, |asked| asked + PREFETCH_INTERVAL));
        }
        // A waiting call sends its own request, which also recovers lost grants.
        if pace.unheard && pace.waiting == 0 {
            at(now);
        }
        for (key, statement) in &statements {
            let before = pace.reported.get(key);
            let over = before.is_none_or(|before| before.closed != statement.closed);
            let back = before.map_or(Amount::ZERO, |before| before.returned) != statement.returned;
            // At once: returned amounts and closed leases are room for others, and after an attach a new leader may
            // know only what is in its record. Spending frees nothing, so it is reported at intervals.
            if back || (over && statement.closed) || pace.attach != view.attaches {
                at(now);
            } else if statement.closed {
                at(pace.pause(pace.repeats));
            } else if before != Some(statement) {
                at(pace.reported_at.map_or(now, |reported| reported + STATE));
            }
        }
        // Wakes up when unused leases become idle, to close them.
        let idle = pace.rested + IDLE;
        if pace.calls == 0 && !statements.is_empty() && idle > now {
            at(idle);
        }
        let soonest = (pace.failures > 0).then(|| pace.pause(pace.failures));
        due.map(|due| soonest.map_or(due, |soonest| due.max(soonest)))
    }

    /// Whether to prefetch more leases for calls like the last one, as soon as [`PREFETCH_INTERVAL`] allows.
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
                // Without any lease the next call requests one anyway.
                wallet.statements().any(|(_, statement)| !statement.closed)
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
            let due = pace
                .asked_ahead
                .is_none_or(|asked| asked.elapsed() >= PREFETCH_INTERVAL);
            let asks = due && std::mem::take(&mut pace.early);
            if asks {
                pace.asked_ahead = Some(Instant::now());
            }
            asks.then_some(wish)
        };
        let before = self.lease_activity().reported.clone();
        let result = self.exchange_leases(early).await;
        let mut pace = self.lease_activity();
        match result {
            Ok(_) => {
                (pace.attach, pace.failures) = (view.attaches, 0);
                pace.repeats = if pace.reported == before { pace.repeats + 1 } else { 0 };
            }
            Err(error) => {
                tracing::info!(%error, "failed to report leases to the leader; retrying");
                pace.failures += 1;
                pace.reported_at = Some(Instant::now());
            }
        }
    }

    fn statements(&self) -> BTreeMap<(String, i64), LeaseStatement> {
        self.store.with_wallet(|wallet| {
            let all = wallet.statements();
            all.map(|(account, statement)| ((account.to_owned(), statement.lease), statement))
                .collect()
        })
    }

    /// One request to the leader and its answer. Requests are serialized, so that an older answer never follows a newer
    /// one.
    pub(super) async fn exchange_leases(&self, wish: Option<LeaseDemand>) -> Result<LeaseResponse, LinkError> {
        let _turn = self.turn.lock().await;
        let terms = self.contact.subscribe().borrow().directives.budget.clone();
        let sent = self.clock.now();
        let request = self.build_request(terms.as_ref(), wish, sent);
        let reported = stated_leases(&request);
        // Set before sending: if the answer is lost, or this future is dropped, the next exchange recovers the grants.
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
                // Without terms it is unknown which accounts apply.
                if let Some(terms) = &terms {
                    wallet.close_idle(&draws(terms), now);
                }
                lost
            })
            .map_err(|error| LinkError::Unreadable(format!("its grants could not be recorded: {error}")))?;
        self.note_lost(lost);
        let mut pace = self.lease_activity();
        (pace.reported, pace.unheard) = (reported, false);
        pace.reported_at = Some(Instant::now());
        drop(pace);
        self.stirred.send_replace(());
        Ok(answer)
    }

    /// Reports that the leader knew more about `leases` leases than this gateway does.
    fn note_lost(&self, leases: usize) {
        if leases == 0 {
            return;
        }
        tracing::error!(
            leases,
            "the storage of this gateway was restored to an earlier state, for example from a snapshot; its leases are \
             closed and the rest of them counts as used"
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

/// The state of each lease that the leader knows after this request. A call settled while the request was in flight is
/// not in it and is still to be reported.
fn stated_leases(request: &LeaseRequest) -> BTreeMap<(String, i64), LeaseStatement> {
    let accounts = request.accounts.iter();
    accounts
        .flat_map(|part| part.statements.iter().map(|statement| (&part.account, statement)))
        .map(|(account, statement)| ((account.clone(), statement.lease), statement.clone()))
        .collect()
}

/// The amount to hold for coming calls: half a full lease.
fn prefetch_amount(call: &Amount) -> Amount {
    Amount::from_fn(|kind| call.get(kind).saturating_mul(PREFETCH_CALLS / 2))
}

/// Applies the [`DurableGrant`]s of an answer. Returns the number of leases about which the leader knew more.
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
                // Counted from the sending of the request, so that a slow answer shortens the validity and never
                // extends it.
                lease.valid_milliseconds.map(|valid| sent.saturating_add(valid)),
            )
        })
        .collect();
    wallet
        .apply_grants(&answer.account, answer.epoch, &granted, &answer.forgotten)
        .lost
        .len()
}

/// Whether the loop is idle for so long that its leases should be returned, although getting new ones costs a write.
fn is_at_rest(report: &LoopReport, now: Timestamp) -> bool {
    match report.state {
        LoopState::Sleeping => report
            .resumes_at
            .is_none_or(|resumes| resumes.duration_since(now).unsigned_abs() >= IDLE && resumes > now),
        LoopState::Paused | LoopState::Stopped => true,
        LoopState::Starting | LoopState::Running | LoopState::Stopping => false,
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_worker_that_repeatedly_reports_rest_closes_leases_six_times_a_minute() {
        let mut activity = LeaseActivity::new(false);
        for minute in 0..2 {
            for time in 0..6 {
                assert!(activity.may_close(), "minute {minute}, time {time}");
            }
            assert!(!activity.may_close(), "the seventh time in minute {minute}");
            advance(Duration::from_secs(59)).await;
            assert!(!activity.may_close(), "the minute is not over");
            advance(Duration::from_secs(1)).await;
        }
    }
}
