//! The gateway's record: every call from before it is sent until the worker's journal has its outcome, and the totals.
//!
//! One SQLite file, one transaction for each change, on disk before it counts (`synchronous=FULL`). A call is recorded
//! as open **before** it is sent, and settled together with its answer **before** the worker gets the end of it: two
//! flushes, all that a call waits for. What was open when the gateway died is lost: it counts as sent, its use as unknown.
//!
//! An acknowledgement is written without a flush: a machine that fails right after it keeps an answer too many. It is
//! also the time to tidy up: what the log holds goes into the tables then, since otherwise a call would have to wait.
//!
//! What a call may cost is reserved in the wallet in the transaction that opens it, and settled in the one that ends it.
//! The wallet in memory is what is on disk: it is changed as a copy, written, and then put in its place.
//!
//! What counts: `calls` are the requests sent, each attempt for itself; one that never left (no connection) is none. An
//! HTTP error that says that the request was not processed bills nothing. Any other call whose server did not say what
//! it used, in a believable way, counts in `unknownCalls`, and its tokens in no other field; where a limit applies, its
//! reservation counts there as spent, and it is one of `estimatedCalls` too.

mod basis;
mod meta;
mod models;
mod schema;
mod totals;
mod wallet_table;

use std::collections::{BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension, Row, Transaction, TransactionBehavior, params};
use serde::{Deserialize, Serialize};

pub use self::basis::BoundBasis;
use self::meta::{make_name, meta, set_meta};
pub use self::models::ModelNames;
use self::totals::UsageTotals;
use self::wallet_table::{from_json, to_json};
use super::failures::failure;
use crate::api::amount::Amount;
use crate::api::failure::{CallFailure, FailureKind};
use crate::api::status::LoopUsage;
use crate::engine::{CallId, CallPurpose};
use crate::ledger::bound::CallBill;
use crate::ledger::wallet::{AccountDraw, AccountId, Reservation, Wallet};
use crate::link::messages::BudgetReport;

/// Name of the record's file in its directory.
pub const FILE_NAME: &str = "calls.db";
/// Ended calls that are kept, for people who ask what a call used.
const KEPT_CALLS: i64 = 1000;
/// Acknowledgements between two times that the log is emptied. About half of what SQLite lets it grow to by itself.
const TIDY: u32 = 16;

const ACKED: &str = "acked";
/// Of `spec.model`, and of `spec.lightModel`.
const SCRIPTED: [&str; 2] = ["scripted", "scripted-light"];
const RECORD: &str = "record";
const VIOLATION: &str = "violation";
const BUDGET: &str = "budget";

/// Why the record cannot be used.
#[derive(thiserror::Error, Debug)]
pub enum CallStoreError {
    /// At the start.
    #[error("the gateway's record {path} cannot be opened: {source}; {advice}")]
    Open {
        /// The file.
        path: PathBuf,
        /// What to do.
        advice: &'static str,
        /// What happened.
        source: rusqlite::Error,
    },
    /// A newer version wrote it.
    #[error("the gateway's record {path} is of version {found}, this gateway knows {known}: use the newer image again")]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: i64,
        /// Ours.
        known: i64,
    },
    /// Later.
    #[error("the gateway's record cannot be written: {0}")]
    Write(#[from] rusqlite::Error),
}

/// A call that is to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelCall {
    /// Which.
    pub id: CallId,
    /// What it is for.
    pub purpose: CallPurpose,
}

/// How a call ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallEnd {
    /// With an answer.
    Answered {
        /// Its `Content-Type`.
        content_type: String,
        /// Its bytes, as the server sent them.
        body: Vec<u8>,
        /// What it cost in micro-dollars; `None`: its price or its use is unknown.
        cost: Option<i64>,
    },
    /// Without.
    Failed(CallFailure),
}

/// What is known of what a call used.
#[derive(Clone, Debug, PartialEq)]
pub enum CallUsage {
    /// It never left.
    NotSent,
    /// It was sent, and refused with an HTTP error that says that nothing was done.
    Free,
    /// It was sent; nobody said what it used.
    Unknown,
    /// The server said what it used: as read, and as said.
    Billed(CallBill, String),
}

/// The server billed a call above its bound.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct BoundViolation {
    /// What each call fails with from then on.
    pub failure: CallFailure,
    /// The request to resume that was known then: another one ends it.
    pub resume: Option<String>,
}

/// The outcome of a call.
#[derive(Clone, Debug, PartialEq)]
pub struct CallSettlement {
    /// Which call.
    pub call: ModelCall,
    /// How it ended.
    pub end: CallEnd,
    /// What it used.
    pub metered: CallUsage,
    /// What was reserved for it.
    pub reservation: Reservation,
    /// What it counts in the limits.
    pub charge: Amount,
    /// Set when it was billed above its bound.
    pub violation: Option<BoundViolation>,
    /// What the bound of the next request rests on; `None`: as before.
    pub basis: Option<BoundBasis>,
    /// Whether it took a turn of the script.
    pub scripted_turn: bool,
    /// When.
    pub at: Timestamp,
}

/// What the record holds of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordedCall {
    /// It is not over.
    Open,
    /// It ended, and the worker has not said that it has the outcome.
    Ended(CallEnd),
    /// The worker has the outcome; nothing is kept.
    Acknowledged,
}

/// What came of the wish to begin a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BeginOutcome {
    /// It is recorded, and holds this.
    Held(Reservation),
    /// Nothing happened: these accounts hold too little.
    Short(BTreeSet<AccountId>),
}

/// The record.
pub struct CallStore {
    name: String,
    restored: bool,
    inner: Mutex<CallStoreInner>,
}

struct CallStoreInner {
    db: Connection,
    models: ModelNames,
    counts: CallStoreState,
    /// Outcomes that could not be written yet: the disk was full. They go first as soon as it is not.
    unsettled: VecDeque<CallSettlement>,
    budget: BudgetReport,
    /// Acknowledgements since the log was emptied.
    untidy: u32,
}

/// What a crash of the machine right after a change may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteDurability {
    /// Nothing: the change is on the disk.
    LosesNothing,
    /// The change, and nothing else: it is on the disk with the next one at the latest.
    MayLoseIt,
}

/// What is kept in memory of what is on disk; both change together or not at all.
#[derive(Clone)]
struct CallStoreState {
    totals: UsageTotals,
    scripted_turns: [u64; 2],
    acked: Option<CallId>,
    wallet: Wallet,
    violation: Option<BoundViolation>,
    basis: BoundBasis,
    /// As it is on disk; what is in memory may be ahead of it.
    budget: BudgetReport,
}

impl CallStore {
    /// Opens or makes the record. Calls that were open are lost from now on.
    pub fn open(directory: &Path, models: ModelNames, now: Timestamp) -> Result<Self, CallStoreError> {
        let path = directory.join(FILE_NAME);
        let mut db = schema::open(&path)?;
        let (name, restored, counts) = CallStoreState::restore(&mut db, models.server(), now)
            .map_err(|source| schema::cannot_open(&path, source))?;
        let inner = CallStoreInner {
            db,
            models,
            budget: counts.budget.clone(),
            counts,
            unsettled: VecDeque::new(),
            untidy: 0,
        };
        Ok(Self {
            name,
            restored,
            inner: Mutex::new(inner),
        })
    }

    /// Gives a new record the totals to go on from. A record that has them already keeps its own.
    pub fn adopt(&self, known: &LoopUsage) -> Result<(), CallStoreError> {
        let mut inner = self.lock();
        if inner.counts.totals.has_base() {
            return Ok(());
        }
        inner.change(|change, counts| counts.totals.adopt(change, known))
    }

    /// What is recorded of a call.
    pub fn find(&self, id: CallId) -> Result<Option<RecordedCall>, CallStoreError> {
        let mut inner = self.lock();
        inner.settle_rest()?;
        if inner.counts.acked.is_some_and(|acked| id <= acked) {
            return Ok(Some(RecordedCall::Acknowledged));
        }
        let sql =
            "SELECT state, failure, content_type, answer, cost FROM calls WHERE turn = ? AND call = ? AND attempt = ?";
        Ok(inner.db.prepare_cached(sql)?.query_row(key(id), recorded).optional()?)
    }

    /// Reserves `amount` in each of `draws`, and records that the call is about to be sent. `clock`: the wallet's time.
    pub fn begin(
        &self,
        ModelCall { id, purpose }: ModelCall,
        (draws, amount): (&[AccountDraw<'_>], &Amount),
        clock: u64,
        now: Timestamp,
    ) -> Result<BeginOutcome, CallStoreError> {
        let mut inner = self.lock();
        inner.settle_rest()?;
        let mut wallet = inner.counts.wallet.clone();
        let reservation = match wallet.reserve(draws, amount, clock) {
            Ok(reservation) => reservation,
            Err(short) => return Ok(BeginOutcome::Short(short)),
        };
        let model = inner.models.of(purpose).to_owned();
        inner.change(|change, counts| {
            counts.wallet = wallet;
            let mut insert = change.prepare_cached(
                "INSERT INTO calls (turn, call, attempt, purpose, state, model, opened_at, reservation)
                 VALUES (?, ?, ?, ?, 'Open', ?, ?, ?)",
            )?;
            insert.execute(params![
                id.turn,
                id.call,
                id.attempt,
                purpose.as_ref(),
                model,
                now.to_string(),
                to_json(&reservation)?
            ])?;
            Ok(BeginOutcome::Held(reservation))
        })
    }

    /// The record's name: made once with it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether a gateway before this one made it.
    pub fn is_restored(&self) -> bool {
        self.restored
    }

    /// Looks into the wallet.
    pub fn with_wallet<T>(&self, at: impl FnOnce(&Wallet) -> T) -> T {
        at(&self.lock().counts.wallet)
    }

    /// Changes the wallet, on disk first.
    pub fn change_wallet<T>(&self, act: impl FnOnce(&mut Wallet) -> T) -> Result<T, CallStoreError> {
        let mut inner = self.lock();
        inner.settle_rest()?;
        let mut wallet = inner.counts.wallet.clone();
        let done = act(&mut wallet);
        let same_epochs = wallet.epochs().eq(inner.counts.wallet.epochs());
        if same_epochs && wallet.rows().eq(inner.counts.wallet.rows()) {
            inner.counts.wallet = wallet;
            return Ok(done);
        }
        inner.change(|_, counts| {
            counts.wallet = wallet;
            Ok(done)
        })
    }

    /// The server billed above a bound, and nobody has said to go on.
    pub fn violation(&self) -> Option<BoundViolation> {
        self.lock().counts.violation.clone()
    }

    /// Calls may go on after a violation.
    pub fn clear_violation(&self) -> Result<(), CallStoreError> {
        self.lock().change(|change, counts| {
            counts.violation = None;
            change.execute("DELETE FROM meta WHERE name = ?", [VIOLATION])?;
            Ok(())
        })
    }

    /// What the next bound rests on.
    pub fn basis(&self) -> BoundBasis {
        self.lock().counts.basis.clone()
    }

    /// What limits did so far.
    pub fn budget(&self) -> BudgetReport {
        self.lock().budget.clone()
    }

    /// Counts something of it; on disk with the next change.
    pub fn count(&self, add: impl FnOnce(&mut BudgetReport)) {
        add(&mut self.lock().budget);
    }

    /// Records the outcome of a call, and counts it. What cannot be written stays in memory and goes first later.
    pub fn settle(&self, settlement: CallSettlement) -> Result<(), CallStoreError> {
        let mut inner = self.lock();
        inner.unsettled.push_back(settlement);
        inner.settle_rest()
    }

    /// Tries again to write the outcomes that could not be.
    pub fn settle_rest(&self) -> Result<(), CallStoreError> {
        self.lock().settle_rest()
    }

    /// The worker has the outcomes of this call and of all before it: their answers leave.
    pub fn acknowledge(&self, id: CallId) -> Result<(), CallStoreError> {
        let mut inner = self.lock();
        inner.settle_rest()?;
        if inner.counts.acked.is_some_and(|acked| id <= acked) {
            return Ok(());
        }
        inner.write(WriteDurability::MayLoseIt, |change, counts| {
            set_meta(change, ACKED, &id.to_string())?;
            // Of the calls before the last acknowledgement nothing is kept any more.
            let before = counts.acked.map_or((0, 0, 0), key);
            let mut forget = change.prepare_cached(
                "UPDATE calls SET answer = NULL WHERE answer IS NOT NULL
                 AND (turn, call, attempt) <= (?, ?, ?) AND (turn, call, attempt) > (?, ?, ?)",
            )?;
            forget.execute(params![id.turn, id.call, id.attempt, before.0, before.1, before.2])?;
            let mut delete = change.prepare_cached(
                "DELETE FROM calls WHERE state <> 'Open' AND (turn, call, attempt) <= (?1, ?2, ?3)
                 AND number <= (SELECT max(number) FROM calls) - ?4",
            )?;
            delete.execute(params![id.turn, id.call, id.attempt, KEPT_CALLS])?;
            counts.acked = Some(id);
            Ok(())
        })?;
        inner.tidy();
        Ok(())
    }

    /// The totals. `turns` is not counted here.
    pub fn usage(&self) -> LoopUsage {
        self.lock().counts.totals.usage()
    }

    /// Turns of the script that were taken.
    pub fn scripted_turns(&self, purpose: CallPurpose) -> u64 {
        self.lock().counts.scripted_turns[usize::from(purpose.uses_light_model())]
    }

    fn lock(&self) -> MutexGuard<'_, CallStoreInner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the file grow no further, as a full disk would; `None` lifts it.
    #[cfg(test)]
    pub fn fill_disk(&self, full: bool) {
        let pages = if full { 1 } else { 1_000_000 };
        self.lock().db.pragma_update(None, "max_page_count", pages).unwrap();
    }
}

impl CallStoreInner {
    fn change<T>(
        &mut self,
        act: impl FnOnce(&Transaction<'_>, &mut CallStoreState) -> rusqlite::Result<T>,
    ) -> Result<T, CallStoreError> {
        self.write(WriteDurability::LosesNothing, act)
    }

    fn write<T>(
        &mut self,
        crash: WriteDurability,
        act: impl FnOnce(&Transaction<'_>, &mut CallStoreState) -> rusqlite::Result<T>,
    ) -> Result<T, CallStoreError> {
        // Said each time, so that no change is ever made under what another one left.
        let flush = match crash {
            WriteDurability::LosesNothing => "FULL",
            WriteDurability::MayLoseIt => "NORMAL",
        };
        self.db.pragma_update(None, "synchronous", flush)?;
        let mut counts = self.counts.clone();
        let change = self.db.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let done = act(&change, &mut counts)?;
        wallet_table::write(&change, &self.counts.wallet, &counts.wallet)?;
        if counts.budget != self.budget {
            counts.budget = self.budget.clone();
            set_meta(&change, BUDGET, &to_json(&counts.budget)?)?;
        }
        change.commit()?;
        self.counts = counts;
        Ok(done)
    }

    /// Now and then puts into the tables what the log holds. That it fails costs nothing: it is tried again, and the
    /// next change says what is wrong.
    fn tidy(&mut self) {
        self.untidy += 1;
        if self.untidy < TIDY {
            return;
        }
        match self.db.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(())) {
            Ok(()) => self.untidy = 0,
            Err(error) => tracing::warn!(%error, "the log of the record stays as it is"),
        }
    }

    fn settle_rest(&mut self) -> Result<(), CallStoreError> {
        let server = self.models.server().to_owned();
        while let Some(settlement) = self.unsettled.pop_front() {
            // Taken out and put back: an answer may be long, and is not copied.
            let settled = self.change(|change, counts| counts.settle(change, &server, &settlement));
            if let Err(error) = settled {
                self.unsettled.push_front(settlement);
                return Err(error);
            }
        }
        Ok(())
    }
}

impl CallStoreState {
    /// Reads them, and loses the calls that were open when the last gateway ended: what was reserved for them is spent.
    /// Gives the record's name too, and whether it had one.
    fn restore(db: &mut Connection, server: &str, now: Timestamp) -> rusqlite::Result<(String, bool, Self)> {
        let change = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let known = meta(&change, RECORD)?;
        let restored = known.is_some();
        let name = known.map_or_else(|| make_name(&change), Ok)?;
        let budget = meta::<String>(&change, BUDGET)?;
        let violation = meta::<String>(&change, VIOLATION)?;
        let mut counts = Self {
            totals: UsageTotals::load(&change)?,
            scripted_turns: [
                meta(&change, SCRIPTED[0])?.unwrap_or(0),
                meta(&change, SCRIPTED[1])?.unwrap_or(0),
            ],
            acked: meta(&change, ACKED)?,
            wallet: wallet_table::load(&change)?,
            violation: violation.map(|text| from_json(&text)).transpose()?,
            basis: basis::load(&change, server)?,
            budget: budget.map(|text| from_json(&text)).transpose()?.unwrap_or_default(),
        };
        let before = counts.wallet.clone();
        let mut open = change.prepare("SELECT model, reservation FROM calls WHERE state = 'Open'")?;
        let lost = open.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
        let lost: Vec<(String, Option<String>)> = lost.collect::<Result<_, _>>()?;
        drop(open);
        for (model, reservation) in lost {
            let reservation: Reservation = reservation.map_or(Ok(Reservation::default()), |text| from_json(&text))?;
            let estimated = !reservation.leases.is_empty();
            counts.wallet.reopen(&reservation);
            counts.wallet.settle(&reservation, &reservation.amount);
            counts
                .totals
                .count(&change, &model, &CallUsage::Unknown, (0, estimated))?;
        }
        wallet_table::write(&change, &before, &counts.wallet)?;
        change.execute(
            "UPDATE calls SET state = 'Lost', ended_at = ? WHERE state = 'Open'",
            [now.to_string()],
        )?;
        change.commit()?;
        Ok((name, restored, counts))
    }

    fn settle(&mut self, change: &Transaction<'_>, server: &str, settlement: &CallSettlement) -> rusqlite::Result<()> {
        let id = settlement.call.id;
        let usage = match &settlement.metered {
            CallUsage::Billed(_, raw) => Some(raw),
            CallUsage::NotSent | CallUsage::Free | CallUsage::Unknown => None,
        };
        let (state, failure, content_type, body, cost) = match &settlement.end {
            CallEnd::Answered {
                content_type,
                body,
                cost,
            } => ("Settled", None, Some(content_type), Some(body), *cost),
            CallEnd::Failed(failure) => ("Failed", Some(to_json(failure)?), None, None, None),
        };
        let mut update = change.prepare_cached(
            "UPDATE calls SET state = ?4, ended_at = ?5, usage = ?6, failure = ?7, content_type = ?8, answer = ?9, cost = ?10
             WHERE turn = ?1 AND call = ?2 AND attempt = ?3 RETURNING model",
        )?;
        let model: String = update.query_row(
            params![
                id.turn,
                id.call,
                id.attempt,
                state,
                settlement.at.to_string(),
                usage,
                failure,
                content_type,
                body,
                cost
            ],
            |row| row.get(0),
        )?;
        self.wallet.settle(&settlement.reservation, &settlement.charge);
        let estimated = settlement.metered == CallUsage::Unknown && !settlement.reservation.leases.is_empty();
        self.totals
            .count(change, &model, &settlement.metered, (settlement.charge.cost, estimated))?;
        if let Some(violation) = &settlement.violation {
            self.violation = Some(violation.clone());
            set_meta(change, VIOLATION, &to_json(violation)?)?;
        }
        if let Some(basis) = &settlement.basis {
            self.basis = basis.clone();
            basis::write(change, server, basis)?;
        }
        if settlement.scripted_turn {
            let script = usize::from(settlement.call.purpose.uses_light_model());
            self.scripted_turns[script] += 1;
            set_meta(change, SCRIPTED[script], &self.scripted_turns[script].to_string())?;
        }
        Ok(())
    }
}

fn key(id: CallId) -> (i64, u32, u32) {
    (id.turn, id.call, id.attempt)
}

fn recorded(row: &Row<'_>) -> rusqlite::Result<RecordedCall> {
    let state: String = row.get("state")?;
    Ok(match state.as_str() {
        "Open" => RecordedCall::Open,
        "Settled" => RecordedCall::Ended(CallEnd::Answered {
            content_type: row.get("content_type")?,
            body: row.get("answer")?,
            cost: row.get("cost")?,
        }),
        "Lost" => RecordedCall::Ended(CallEnd::Failed(failure(
            FailureKind::Interrupted,
            "the gateway ended in the middle of this call; what the call used is unknown, no answer was kept",
        ))),
        _ => RecordedCall::Ended(CallEnd::Failed(from_json(&row.get::<_, String>("failure")?)?)),
    })
}

#[cfg(test)]
mod tests;
