//! The journal: what one loop did, and all that it needs to continue after any crash. SQLite on the state volume.
//!
//! Owns the file, its lock, its owner and its bounds. One batch of the engine is one transaction, which is on disk when
//! [`Journal::commit`] returns. Does not decide anything about the loop, and never resets a file on its own.

mod audit_view;
mod copy;
mod error;
mod export;
mod goal_steps;
mod history;
mod line_usage;
mod lines;
mod schema;
mod sensor_records;
mod step_results;
mod tasks;
mod upload;
mod write;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::api::agent::ModelSpec;
use crate::engine::JournalRecord;
use crate::engine::machine::EngineSnapshot;
use crate::engine::message::Message;
use crate::engine::tasks::TaskOffer;
use crate::engine::tool::ToolRunId;
use crate::link::history::HistoryAck;
use crate::support::disk::{self, BallastFile, DatabaseError};
pub use copy::{CopyError, copy};
pub use error::JournalError;
pub use export::{ExportError, export, export_bytes};
use line_usage::AskedModels;
pub use line_usage::LineUsage;
pub use lines::{JournalLine, JournalPage, call_id, last_lines};
pub use sensor_records::SensorRecord;
pub use tasks::{KnownTask, WaitingResponse};
pub use upload::UploadBatch;
use write::{JournalBatch, JournalWriteError};

/// Turns whose messages are kept in the history.
pub const HISTORY_TURNS: i64 = 2_000;
/// Bytes of messages above which the older half of the history is dropped, however few turns it spans.
pub const HISTORY_BYTES: i64 = 64 * 1024 * 1024;
/// Bytes of texts in the history's steps above which the older half of the history is dropped, however few turns it
/// spans.
pub const STEP_BYTES: i64 = 32 * 1024 * 1024;
/// Lines of the [`Journal`] that are kept.
pub const JOURNAL_LINES: i64 = 50_000;
const PRUNE_EVERY_TURNS: i64 = 100;
/// Largest file that is checked completely after an unclean shutdown. Larger files are checked only as they are read.
const CHECK_BYTES: u64 = 128 * 1024 * 1024;

const FILE: &str = "journal.sqlite";
const LOCK_FILE: &str = "journal.lock";
const SNAPSHOT_KEY: &str = "snapshot";
const OWNER_KEY: &str = "owner";
const VALUE: &str = "SELECT value FROM kv WHERE key = ?1";
/// Format of the state that the tables hold as JSON: the snapshot, the messages and the Sensor records. Raise it with
/// each change that an older agentloop cannot read, such as a new value of an enum.
const FORMAT: i64 = 5;
/// The live transcript of the main member.
const TRANSCRIPT: &str = "SELECT json FROM messages WHERE live = 1 AND member = 0 ORDER BY id";

/// The writer of a [`Journal`].
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct JournalOwner {
    /// Uid of the Agent. Epochs are compared within one Agent only: an Agent that was deleted and recreated under the
    /// same name, with its volume retained, counts epochs from the start.
    pub agent_uid: String,
    pub pod_uid: String,
    pub epoch: i64,
}

/// The contents of a [`Journal`] when it was opened.
#[derive(Debug, Default, PartialEq)]
pub struct RestoredJournal {
    /// The engine's state; `None` if it has never run.
    pub snapshot: Option<EngineSnapshot>,
    /// The live transcript, oldest first.
    pub transcript: Vec<Message>,
    /// The last batch of a process that did not shut down cleanly: it may not have logged these [`JournalLine`]s.
    pub unlogged_lines: Vec<JournalLine>,
    /// One record per Sensor.
    pub sensor_records: Vec<SensorRecord>,
    /// The tasks that wait, oldest first.
    pub tasks: Vec<TaskOffer>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct CommittedBatch {
    pub lines: Vec<JournalLine>,
    /// True if the commit succeeded only because the ballast was released: the loop must now end, in order.
    pub on_ballast: bool,
}

pub struct Journal {
    connection: Connection,
    agent: String,
    ballast: Option<BallastFile>,
    dir: PathBuf,
    file: PathBuf,
    /// The version of agentloop that wrote the state, if its format is newer than [`FORMAT`].
    newer: Option<String>,
    /// Whether responses to tasks have a receiver.
    sends_responses: bool,
    /// The models that calls ask; `None`: not known yet.
    models: Option<AskedModels>,
    /// Identifies this process in what it uploads.
    writer: String,
    /// Held until the journal is dropped; the kernel releases it when the process ends.
    _lock: File,
}

#[derive(Serialize, Deserialize)]
struct JournalOwnerRow {
    #[serde(flatten)]
    owner: JournalOwner,
    /// Whether the owner closed the [`Journal`] cleanly.
    closed: bool,
    /// The version of agentloop that wrote the state, and its [`FORMAT`].
    #[serde(default)]
    writer: String,
    #[serde(default)]
    format: i64,
}

impl Journal {
    /// Opens the journal in `dir` and reads its contents. Creates both if they do not exist. Call [`Journal::claim`]
    /// before the first commit.
    pub fn open(dir: &Path, owner: &JournalOwner) -> Result<(Self, RestoredJournal), JournalError> {
        std::fs::create_dir_all(dir).map_err(|error| JournalError::from_io(dir, &error))?;
        if let Some(kind) = disk::network_file_system(dir) {
            return Err(JournalError::OnNetwork { dir: dir.into(), kind });
        }
        let lock = disk::lock(&dir.join(LOCK_FILE)).map_err(|error| JournalError::from_io(dir, &error))?;
        let lock = lock.ok_or_else(|| JournalError::Locked { dir: dir.into() })?;
        let file = dir.join(FILE);
        let connection =
            disk::connect(&file, Duration::ZERO).map_err(|error| JournalError::from_sqlite(&file, &error))?;
        let mut journal = Self {
            connection,
            agent: owner.agent_uid.clone(),
            ballast: None,
            dir: dir.into(),
            file,
            newer: None,
            sends_responses: false,
            models: None,
            writer: upload::new_writer(),
            _lock: lock,
        };
        let restored = journal.read(owner)?;
        Ok((journal, restored))
    }

    /// Records `owner` as the journal's writer, prunes the journal, and takes the ballast.
    pub fn claim(&mut self, owner: &JournalOwner) -> Result<(), JournalError> {
        // Sensors of a paused loop write lines as well, without a turn that would prune them.
        let pruned = write::prune_now(&mut self.connection, &self.agent);
        self.ballast = match BallastFile::take(&self.dir) {
            Ok(ballast) => Some(ballast),
            Err(error) if disk::is_full(&error) && self.has_room_within() => None,
            Err(error) => return Err(JournalError::from_io(&self.dir, &error)),
        };
        // Pruning may fail for lack of room: the ballast, or free pages in the file, still let the loop end in order.
        match pruned {
            Err(JournalWriteError::Sqlite(error)) if !error::may_lack_room(&error) => return Err(self.sqlite(&error)),
            Err(JournalWriteError::Json(error)) => return Err(self.failed(error.to_string())),
            Ok(()) | Err(JournalWriteError::Sqlite(_)) => {}
        }
        let last = self.last_agent()?;
        upload::begin(&self.connection, &self.agent, last.as_deref()).map_err(|error| self.unwritten(error))?;
        self.list_history()?;
        self.put_owner(owner, false)
    }

    /// Lists what is to be uploaded. Without room, nothing is uploaded until there is some.
    fn list_history(&mut self) -> Result<(), JournalError> {
        let listed = upload::list(&mut self.connection, &self.agent);
        self.unless_full(listed)
    }

    /// What may be left out on a full volume.
    fn unless_full(&self, done: Result<(), JournalWriteError>) -> Result<(), JournalError> {
        match done {
            Err(JournalWriteError::Sqlite(error)) if error::may_lack_room(&error) => Ok(()),
            done => done.map_err(|error| self.unwritten(error)),
        }
    }

    /// Uid of the Agent that last owned the journal.
    fn last_agent(&self) -> Result<Option<String>, JournalError> {
        let last: Option<JournalOwnerRow> = self.get(OWNER_KEY)?;
        Ok(last.map(|last| last.owner.agent_uid))
    }

    /// Returns the oldest changes of the history that have not been acknowledged, and records that they are sent; `None` if
    /// all are acknowledged.
    pub fn history_batch(&mut self) -> Result<Option<UploadBatch>, JournalError> {
        self.list_history()?;
        let next = upload::next_batch(&self.connection, &self.agent, &self.writer);
        let next = next.map_err(|error| self.unwritten(error))?;
        if let Some(next) = &next {
            // Without the record, all rows are sent again if the answer is lost with this process.
            self.unless_full(upload::sent(&self.connection, &self.agent, &next.batch))?;
        }
        Ok(next)
    }

    /// Records which changes of the history are stored.
    pub fn history_stored(&mut self, ack: HistoryAck) -> Result<(), JournalError> {
        let stored = upload::stored(&mut self.connection, &self.agent, ack);
        stored.map_err(|error| self.unwritten(error))
    }

    /// Whether the file on a full volume has as many free pages as the ballast would provide, dropping history if
    /// necessary.
    fn has_room_within(&mut self) -> bool {
        let free = |journal: &Self| -> rusqlite::Result<i64> {
            let pragma = |name: &str| {
                journal
                    .connection
                    .pragma_query_value(None, name, |row| row.get::<_, i64>(0))
            };
            Ok(pragma("freelist_count")? * pragma("page_size")?)
        };
        loop {
            if free(self).is_ok_and(|bytes| usize::try_from(bytes).is_ok_and(|bytes| bytes >= disk::BALLAST_BYTES)) {
                return true;
            }
            if !write::make_room(&mut self.connection, &self.agent).unwrap_or(false) {
                return false;
            }
        }
    }

    /// Writes one batch, and a Sensor's record with it. On `Ok`, the whole batch survives a crash of the machine.  On a
    /// full volume it first drops the older half of the history and tries again. If that does not help, it releases the
    /// ballast: enough room for the loop to end in order, and for nothing else.
    pub fn commit(
        &mut self,
        now: Timestamp,
        records: &[JournalRecord],
        snapshot: &EngineSnapshot,
        kept: Option<&SensorRecord>,
    ) -> Result<CommittedBatch, JournalError> {
        let (agent, models) = (self.agent.clone(), self.models.clone());
        let batch = JournalBatch {
            agent: &agent,
            now,
            records,
            snapshot,
            kept,
            sends_responses: self.sends_responses,
            models: models.as_ref(),
        };
        let error = match write::write_batch(&mut self.connection, batch) {
            Ok(lines) => {
                return Ok(CommittedBatch {
                    lines,
                    on_ballast: false,
                });
            }
            Err(JournalWriteError::Sqlite(error)) => error,
            Err(JournalWriteError::Json(error)) => return Err(self.failed(error.to_string())),
        };
        // Deleted rows free pages within the file, which needs no space on the volume.
        if error::may_lack_room(&error)
            && write::make_room(&mut self.connection, &self.agent).unwrap_or(false)
            && let Ok(lines) = write::write_batch(&mut self.connection, batch)
        {
            return Ok(CommittedBatch {
                lines,
                on_ballast: false,
            });
        }
        // The last reserve. It is taken again only by the next start, once the volume has room.
        let gave = error::may_lack_room(&error) && self.ballast.take().is_some_and(|ballast| ballast.release());
        if !gave {
            return Err(self.sqlite(&error));
        }
        match write::write_batch(&mut self.connection, batch) {
            Ok(lines) => Ok(CommittedBatch {
                lines,
                on_ballast: true,
            }),
            Err(JournalWriteError::Sqlite(error)) => Err(self.sqlite(&error)),
            Err(JournalWriteError::Json(error)) => Err(self.failed(error.to_string())),
        }
    }

    /// Returns the [`JournalLine`]s from the beginning of the newest turn on.
    pub fn newest_turn_lines(&self) -> Result<Vec<JournalLine>, JournalError> {
        lines::of_newest_turn(&self.connection).map_err(|error| self.sqlite(&error))
    }

    /// Returns at most `max` [`JournalLine`]s after line `seq`.
    pub fn lines_after(&self, seq: i64, max: usize) -> Result<JournalPage, JournalError> {
        lines::after(&self.connection, seq, max).map_err(|error| self.sqlite(&error))
    }

    /// Returns the messages of a turn of a member, oldest first.
    pub fn messages_of_turn(&self, turn: (u16, i64)) -> Result<Vec<Message>, JournalError> {
        lines::messages_of_turn(&self.connection, turn).map_err(|error| self.sqlite(&error))
    }

    /// Returns the last messages of the model and its tools up to this turn. `max`: their number, and the bytes of
    /// each.
    pub fn recent_messages(&self, turn: i64, max: (usize, usize)) -> Result<Vec<String>, JournalError> {
        lines::recent_messages(&self.connection, turn, max).map_err(|error| self.sqlite(&error))
    }

    /// Returns the call behind a tool run for a person who may approve it, truncated to `bytes`.
    pub fn requested_call(&self, run: ToolRunId, bytes: usize) -> Result<Option<String>, JournalError> {
        lines::requested_call(&self.connection, run, bytes).map_err(|error| self.sqlite(&error))
    }

    /// Returns the oldest response to a task that has not been delivered.
    pub fn next_response(&self) -> Result<Option<WaitingResponse>, JournalError> {
        tasks::first_undelivered(&self.connection).map_err(|error| self.unwritten(error))
    }

    /// Returns the task with this id; `None`: it is not known.
    pub fn find_task(&self, id: &str) -> Result<Option<KnownTask>, JournalError> {
        tasks::find(&self.connection, id).map_err(|error| self.sqlite(&error))
    }

    /// Returns the response to a task as JSON, with its result shortened to about `bytes` bytes; `None`: it is no longer
    /// kept.
    pub fn task_response(&self, id: &str, bytes: usize) -> Result<Option<String>, JournalError> {
        tasks::response(&self.connection, id, bytes).map_err(|error| self.unwritten(error))
    }

    /// Records that a response was delivered.
    pub fn response_delivered(&self, seq: i64) -> Result<(), JournalError> {
        tasks::delivered(&self.connection, seq).map_err(|error| self.sqlite(&error))
    }

    /// Names the models that calls ask from now on.
    pub fn set_models(&mut self, main: &ModelSpec, light: Option<&ModelSpec>) {
        self.models = Some(AskedModels::of(main, light));
    }

    /// Whether responses have a receiver from now on. Without one, those that wait are kept like delivered ones.
    pub fn set_response_receiver(&mut self, exists: bool) -> Result<(), JournalError> {
        self.sends_responses = exists;
        if exists {
            return Ok(());
        }
        tasks::drop_undelivered(&self.connection).map_err(|error| self.sqlite(&error))
    }

    /// Returns how many responses have not been delivered.
    pub fn count_responses(&self) -> Result<usize, JournalError> {
        tasks::count_undelivered(&self.connection).map_err(|error| self.sqlite(&error))
    }

    fn unwritten(&self, error: JournalWriteError) -> JournalError {
        match error {
            JournalWriteError::Sqlite(error) => self.sqlite(&error),
            JournalWriteError::Json(error) => self.failed(error.to_string()),
        }
    }

    /// Returns the error of a journal whose last commit used the ballast.
    #[must_use]
    pub fn full_error(&self) -> JournalError {
        JournalError::Full { dir: self.dir.clone() }
    }

    /// Checkpoints the write-ahead log whenever it has this many pages.
    #[cfg(test)]
    pub(super) fn checkpoint_every(&self, pages: u32) {
        let _ = self.connection.pragma_update(None, "wal_autocheckpoint", pages);
    }

    /// Lets the file grow by `more` pages: what SQLite sees on a full volume.
    #[cfg(test)]
    pub(super) fn limit_pages(&self, more: i64) {
        let pages = self
            .connection
            .pragma_query_value(None, "page_count", |row| row.get::<_, i64>(0));
        let max = pages.unwrap_or(0) + more;
        let _ = self
            .connection
            .pragma_update_and_check(None, "max_page_count", max, |_| Ok(()));
    }

    /// Closes the journal cleanly: the next start need not check the file.
    pub fn close(self, owner: &JournalOwner) -> Result<(), JournalError> {
        self.put_owner(owner, true)?;
        let Self {
            connection,
            file,
            _lock,
            ..
        } = self;
        connection
            .close()
            .map_err(|(_, error)| JournalError::from_sqlite(&file, &error))
    }

    fn read(&mut self, owner: &JournalOwner) -> Result<RestoredJournal, JournalError> {
        let found = schema::version(&self.connection).map_err(|error| self.sqlite(&error))?;
        if found > schema::VERSION {
            return Err(JournalError::Newer {
                file: self.file.clone(),
                found,
                known: schema::VERSION,
            });
        }
        if found == 0 {
            self.migrate(found)?;
            self.add_columns()?;
            self.renew_view();
            return Ok(RestoredJournal::default());
        }
        let last: Option<JournalOwnerRow> = self.get(OWNER_KEY)?;
        if let Some(last) = &last {
            refuse_older(&last.owner, owner)?;
            if last.format > FORMAT {
                self.newer = Some(last.writer.clone());
            }
            if !last.closed {
                self.check()?;
            }
        }
        // Migrate only after the checks above: a file of a newer owner, or a damaged one, is never changed.
        if found < schema::VERSION {
            self.migrate(found)?;
        }
        self.add_columns()?;
        self.renew_view();
        let mut snapshot: Option<EngineSnapshot> = self.get(SNAPSHOT_KEY)?;
        let in_order = last.as_ref().is_none_or(|last| last.closed);
        if last.is_some_and(|last| last.owner.agent_uid != owner.agent_uid) {
            snapshot = snapshot.map(EngineSnapshot::inherited);
        }
        Ok(RestoredJournal {
            snapshot,
            transcript: self.transcript()?,
            unlogged_lines: if in_order { Vec::new() } else { self.last_batch()? },
            sensor_records: sensor_records::read_all(&self.connection).map_err(|error| self.sqlite(&error))?,
            tasks: tasks::waiting(&self.connection).map_err(|error| self.unwritten(error))?,
        })
    }

    fn migrate(&mut self, found: i64) -> Result<(), JournalError> {
        schema::migrate(&mut self.connection, found).map_err(|error| self.sqlite(&error))
    }

    fn add_columns(&self) -> Result<(), JournalError> {
        line_usage::add_columns(&self.connection).map_err(|error| self.sqlite(&error))
    }

    /// The loop does not need the view: a full volume must not keep it from starting.
    fn renew_view(&self) {
        if let Err(error) = audit_view::renew(&self.connection) {
            tracing::warn!(%error, "failed to replace the view agent_execution_audit of the journal");
        }
    }

    fn get<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, JournalError> {
        let text: Option<String> = self
            .connection
            .query_row(VALUE, [key], |row| row.get(0))
            .optional()
            .map_err(|error| self.sqlite(&error))?;
        text.map(|text| serde_json::from_str(&text))
            .transpose()
            .map_err(|_| self.unreadable(format!("cannot read the row {key}")))
    }

    fn put_owner(&self, owner: &JournalOwner, closed: bool) -> Result<(), JournalError> {
        let row = JournalOwnerRow {
            owner: owner.clone(),
            closed,
            writer: env!("CARGO_PKG_VERSION").to_owned(),
            format: FORMAT,
        };
        let text = serde_json::to_string(&row).map_err(|error| self.failed(error.to_string()))?;
        write::put(&self.connection, OWNER_KEY, &text).map_err(|error| self.sqlite(&error))
    }

    fn last_batch(&self) -> Result<Vec<JournalLine>, JournalError> {
        lines::of_last_batch(&self.connection).map_err(|error| self.sqlite(&error))
    }

    fn transcript(&self) -> Result<Vec<Message>, JournalError> {
        let texts = self
            .connection
            .prepare(TRANSCRIPT)
            .and_then(|mut select| select.query_map([], |row| row.get(0))?.collect())
            .map_err(|error| self.sqlite(&error))?;
        let texts: Vec<String> = texts;
        texts
            .iter()
            .map(|text| serde_json::from_str(text).map_err(|_| self.unreadable("cannot read a message".into())))
            .collect()
    }

    /// Checks the file after an unclean shutdown, unless it is too large to check quickly.
    fn check(&self) -> Result<(), JournalError> {
        let size = self.file.metadata().map_or(0, |found| found.len());
        if size > CHECK_BYTES {
            return Ok(());
        }
        let verdict: String = self
            .connection
            .query_row("PRAGMA quick_check(1)", [], |row| row.get(0))
            .map_err(|error| self.sqlite(&error))?;
        if verdict == "ok" {
            Ok(())
        } else {
            Err(self.corrupted(verdict))
        }
    }

    fn sqlite(&self, error: &rusqlite::Error) -> JournalError {
        JournalError::from_sqlite(&self.file, error)
    }

    /// Reports text that this version cannot parse: written by a newer version, or damaged.
    fn unreadable(&self, detail: String) -> JournalError {
        match &self.newer {
            Some(writer) => JournalError::NewerState {
                file: self.file.clone(),
                writer: writer.clone(),
            },
            None => self.corrupted(detail),
        }
    }

    fn corrupted(&self, detail: String) -> JournalError {
        JournalError::Corrupted {
            file: self.file.clone(),
            detail,
        }
    }

    fn failed(&self, detail: String) -> JournalError {
        JournalError::Failed {
            dir: self.dir.clone(),
            detail,
        }
    }
}

/// Fences a pod that is older than the last writer. Epochs of different Agents are not compared.
fn refuse_older(last: &JournalOwner, owner: &JournalOwner) -> Result<(), JournalError> {
    if last.agent_uid == owner.agent_uid && last.epoch > owner.epoch {
        return Err(JournalError::Fenced {
            owner: last.pod_uid.clone(),
            found: last.epoch,
            epoch: owner.epoch,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
