//! The call store of the gateway: every call from before it is sent until the worker's journal has its outcome, and the
//! totals.
//!
//! One SQLite file with one transaction per change, flushed before it takes effect (`synchronous=FULL`). A call is
//! recorded as open **before** it is sent, and settled together with its answer **before** the worker gets the end of
//! it: a call waits for these two flushes only. A call that was open when the gateway died is lost: it counts as sent
//! with unknown usage.
//!
//! Acknowledgements are not flushed: after a machine failure the record merely keeps an answer too many. They also
//! trigger the checkpoints of the log, which would otherwise happen while a call waits.
//!
//! The bound of a call is reserved in the wallet in the transaction that opens it, and settled in the one that ends it.
//! The wallet in memory always equals the one on disk: a copy is changed, written, and then replaces it.
//!
//! Counting: `calls` counts the requests sent, each attempt separately; an attempt that was never sent (no connection)
//! does not count. An HTTP error that means that the request was not processed bills nothing. Any other call without a
//! credible usage report counts in `unknownCalls` and its tokens in no other field; where a limit applies, its
//! reservation is charged to it, and it also counts in `estimatedCalls`.

mod acknowledgements;
mod basis;
mod meta;
mod models;
pub(super) mod schema;
mod totals;
mod wallet_table;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
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
use crate::api::amount::Amount;
use crate::api::failure::{CallFailure, FailureKind};
use crate::api::status::LoopUsage;
use crate::engine::{CallId, CallPurpose};
use crate::ledger::bound::CallBill;
use crate::ledger::wallet::{AccountDraw, AccountId, Reservation, Wallet};
use crate::link::messages::BudgetReport;

/// Name of the record's file in its directory.
pub const FILE_NAME: &str = "calls.db";
/// Number of ended calls that are kept for inspection.
const KEPT_CALLS: i64 = 1000;
/// Acknowledgements between two checkpoints of the log. The log then grows to about half the size at which SQLite
/// itself starts one.
const TIDY: u32 = 16;

/// Names of the positions in the scripts of `spec.model` and `spec.lightModel`.
const SCRIPTED: [&str; 2] = ["scripted", "scripted-light"];
const RECORD: &str = "record";
const VIOLATION: &str = "violation";
const BUDGET: &str = "budget";

/// Why the record cannot be used.
#[cfg_attr(test, derive(strum::EnumCount))]
#[derive(thiserror::Error, Debug)]
pub enum CallStoreError {
    /// It cannot be opened.
    #[error("the gateway's call store {path} cannot be opened: {source}; {advice}")]
    Open {
        path: PathBuf,
        advice: &'static str,
        source: rusqlite::Error,
    },
    /// A newer version wrote it.
    #[error(
        "the gateway's call store {path} has version {found}, and this gateway supports versions up to {known}: run the newer version"
    )]
    Version {
        path: PathBuf,
        /// Version of the file.
        found: i64,
        /// Newest version supported.
        known: i64,
    },
    /// A change cannot be written.
    #[error("the gateway's call store cannot be written: {0}")]
    Write(#[from] rusqlite::Error),
}

/// A call as the record knows it: its id, and what it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredCallKey {
    pub id: CallId,
    pub purpose: CallPurpose,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallEnd {
    /// With an answer.
    Answered {
        content_type: String,
        /// Its bytes, as the server sent them.
        body: axum::body::Bytes,
        /// Its cost in micro-dollars; `None`: its price or its usage is unknown.
        cost: Option<i64>,
    },
    /// Without an answer.
    Failed(CallFailure),
}

/// What is known of the usage of a call.
#[derive(Clone, Debug, PartialEq)]
pub enum CallUsage {
    /// The request was never sent.
    NotSent,
    /// The request was sent, and rejected with an HTTP error that means that nothing was done.
    Free,
    /// The request was sent, and no usage was reported.
    Unknown,
    /// The usage that the server reported: parsed, and as JSON.
    Billed(CallBill, String),
}

/// The server billed a call above its bound.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct BoundViolation {
    /// The [`CallFailure`] of every later call.
    pub failure: CallFailure,
    /// The value of `agentloop.dev/resume` at that time: another value ends the violation.
    pub resume: Option<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct CallSettlement {
    pub call: StoredCallKey,
    pub end: CallEnd,
    pub metered: CallUsage,
    /// What was reserved for the call.
    pub reservation: Reservation,
    /// What the call is charged in the limits.
    pub charge: Amount,
    /// Set if the [`CallBill`] exceeds the bound.
    pub violation: Option<BoundViolation>,
    /// The new basis of the next bound; `None`: unchanged.
    pub basis: Option<BoundBasis>,
    /// Whether the call consumed a turn of the script.
    pub scripted_turn: bool,
    pub at: Timestamp,
}

/// The state of a call in the record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordedCall {
    Open,
    /// It ended, and the worker has not acknowledged the outcome yet.
    Ended(CallEnd),
    /// The worker has the outcome; nothing is kept.
    Acknowledged,
}

/// The result of [`CallStore::begin`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BeginOutcome {
    /// The call is recorded and holds this reservation.
    Held(Reservation),
    /// Nothing was changed: these accounts hold too little.
    Short(BTreeSet<AccountId>),
}

pub struct CallStore {
    name: String,
    restored: bool,
    inner: Mutex<CallStoreInner>,
}

struct CallStoreInner {
    db: Connection,
    models: ModelNames,
    counts: CallStoreState,
    /// Outcomes that could not be written because the disk was full. They are written first once it is not.
    unsettled: VecDeque<CallSettlement>,
    budget: BudgetReport,
    /// Acknowledgements since the last checkpoint of the log.
    untidy: u32,
}

/// What a machine failure right after a change may lose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteDurability {
    /// Nothing: the change is flushed.
    LosesNothing,
    /// Only this change, which is flushed with the next one at the latest.
    MayLoseIt,
}

/// The part of the record kept in memory. It changes together with the disk, or not at all.
#[derive(Clone)]
struct CallStoreState {
    totals: UsageTotals,
    scripted_turns: [u64; 2],
    /// The last acknowledged call of each member.
    acked: BTreeMap<u16, CallId>,
    wallet: Wallet,
    violation: Option<BoundViolation>,
    basis: BoundBasis,
    /// As it is on disk; the copy in memory may be ahead of it.
    budget: BudgetReport,
}

impl CallStore {
    /// The models that calls are counted for.
    pub fn models(&self) -> ModelNames {
        self.lock().models.clone()
    }

    /// Opens or creates the record. Calls that were open count as lost.
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

    /// Continues the totals that the controller knows: adds them to those of a new record, and raises those of a record
    /// that went back with its volume.
    pub fn adopt(&self, known: &LoopUsage) -> Result<(), CallStoreError> {
        let mut inner = self.lock();
        if !inner.counts.totals.has_base() {
            return inner.change(|change, counts| counts.totals.adopt(change, known));
        }
        if inner.counts.totals.is_below(known) {
            return inner.change(|change, counts| counts.totals.raise(change, known));
        }
        Ok(())
    }

    pub fn find(&self, id: CallId) -> Result<Option<RecordedCall>, CallStoreError> {
        let mut inner = self.lock();
        inner.settle_rest()?;
        if inner.counts.is_acknowledged(id) {
            return Ok(Some(RecordedCall::Acknowledged));
        }
        let sql = "SELECT state, failure, content_type, answer, cost FROM calls
            WHERE member = ? AND turn = ? AND call = ? AND attempt = ?";
        Ok(inner.db.prepare_cached(sql)?.query_row(key(id), recorded).optional()?)
    }

    /// Reserves `amount` in each of `draws` and records that the call is about to be sent. `clock`: the wallet's time.
    pub fn begin(
        &self,
        StoredCallKey { id, purpose }: StoredCallKey,
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
                "INSERT INTO calls (member, turn, call, attempt, purpose, state, model, opened_at, reservation)
                 VALUES (?, ?, ?, ?, ?, 'Open', ?, ?, ?)",
            )?;
            insert.execute(params![
                id.member,
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

    /// The record's name, generated when the record is created.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether an earlier gateway created the record.
    pub fn is_restored(&self) -> bool {
        self.restored
    }

    pub fn with_wallet<T>(&self, at: impl FnOnce(&Wallet) -> T) -> T {
        at(&self.lock().counts.wallet)
    }

    /// Changes the [`Wallet`], on disk first.
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

    /// The pending violation of a bound, if any.
    pub fn violation(&self) -> Option<BoundViolation> {
        self.lock().counts.violation.clone()
    }

    /// Ends the violation, so that calls continue.
    pub fn clear_violation(&self) -> Result<(), CallStoreError> {
        self.lock().change(|change, counts| {
            counts.violation = None;
            change.execute("DELETE FROM meta WHERE name = ?", [VIOLATION])?;
            Ok(())
        })
    }

    /// The basis of the next bound.
    pub fn basis(&self) -> BoundBasis {
        self.lock().counts.basis.clone()
    }

    /// Counters of what the limits did.
    pub fn budget(&self) -> BudgetReport {
        self.lock().budget.clone()
    }

    /// Updates these counters; they reach the disk with the next change.
    pub fn count(&self, add: impl FnOnce(&mut BudgetReport)) {
        add(&mut self.lock().budget);
    }

    /// Records and counts the outcome of a call. An outcome that cannot be written stays in memory and is written first
    /// later.
    pub fn settle(&self, settlement: CallSettlement) -> Result<(), CallStoreError> {
        let mut inner = self.lock();
        inner.unsettled.push_back(settlement);
        inner.settle_rest()
    }

    /// Retries writing the outcomes that could not be written.
    pub fn settle_rest(&self) -> Result<(), CallStoreError> {
        self.lock().settle_rest()
    }

    /// The totals, without `turns`, which the worker counts.
    pub fn usage(&self) -> LoopUsage {
        self.lock().counts.totals.usage()
    }

    /// Turns of the script consumed so far.
    pub fn scripted_turns(&self, purpose: CallPurpose) -> u64 {
        self.lock().counts.scripted_turns[usize::from(purpose.uses_light_model())]
    }

    fn lock(&self) -> MutexGuard<'_, CallStoreInner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prevents the file from growing, like a full disk; `false` ends this.
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
        // Set for each change, because the connection keeps the setting of the previous one.
        let flush = match crash {
            WriteDurability::LosesNothing => "FULL",
            WriteDurability::MayLoseIt => "NORMAL",
        };
        self.db.pragma_update(None, "synchronous", flush)?;
        // A copy is changed, and replaces the state only after the commit: after an error memory and disk are still
        // equal.
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

    /// Checkpoints the log after every [`TIDY`] acknowledgements. A failure is harmless: it is retried, and the next
    /// change reports what is wrong.
    fn tidy(&mut self) {
        self.untidy += 1;
        if self.untidy < TIDY {
            return;
        }
        match self.db.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(())) {
            Ok(()) => self.untidy = 0,
            Err(error) => tracing::warn!(%error, "failed to checkpoint the log of the record; retrying"),
        }
    }

    fn settle_rest(&mut self) -> Result<(), CallStoreError> {
        let server = self.models.server().to_owned();
        while let Some(settlement) = self.unsettled.pop_front() {
            // Moved out and back instead of cloned, since an answer may be long.
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
    /// Loads the state. Calls that were open when the last gateway ended are lost, and their reservations are charged.
    /// Also returns the record's name and whether it existed.
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
            acked: acknowledgements::load(&change)?,
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
        // The requests may have been sent and billed, so their whole reservations are charged. Example: a crash right
        // after the request left would otherwise make that call free.
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
            } => ("Settled", None, Some(content_type), Some(body.as_ref()), *cost),
            CallEnd::Failed(failure) => ("Failed", Some(to_json(failure)?), None, None, None),
        };
        let mut update = change.prepare_cached(
            "UPDATE calls SET state = ?4, ended_at = ?5, usage = ?6, failure = ?7, content_type = ?8, answer = ?9, cost = ?10
             WHERE turn = ?1 AND call = ?2 AND attempt = ?3 AND member = ?11 RETURNING model",
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
                cost,
                id.member
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

fn key(id: CallId) -> (u16, i64, u32, u32) {
    (id.member, id.turn, id.call, id.attempt)
}

fn recorded(row: &Row<'_>) -> rusqlite::Result<RecordedCall> {
    let state: String = row.get("state")?;
    Ok(match state.as_str() {
        "Open" => RecordedCall::Open,
        "Settled" => RecordedCall::Ended(CallEnd::Answered {
            content_type: row.get("content_type")?,
            body: row.get::<_, Vec<u8>>("answer")?.into(),
            cost: row.get("cost")?,
        }),
        "Lost" => RecordedCall::Ended(CallEnd::Failed(CallFailure::new(
            FailureKind::Interrupted,
            "the gateway stopped during this call; its usage is unknown and its answer is lost",
        ))),
        _ => RecordedCall::Ended(CallEnd::Failed(from_json(&row.get::<_, String>("failure")?)?)),
    })
}

#[cfg(test)]
mod tests;
