//! Lines of the journal as shown to readers: numbers, names and hashes, and no text of a prompt or an answer.

use std::path::Path;

use jiff::Timestamp;
use rusqlite::{Connection, OpenFlags, OptionalExtension, Row};
use serde_json::{Value, json};

use super::FILE;
use super::line_usage::LineUsage;
use crate::engine::message::{self, Message};
use crate::engine::tool::ToolRunId;
use crate::engine::{JournalRecord, RecordKind};
use crate::support::text::{first_bytes, with_ellipsis};

pub(super) const NEWEST_FIRST: &str = "SELECT * FROM journal ORDER BY seq DESC";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalLine {
    /// Sequence number: that of the line before plus one, over the life of the journal.
    pub seq: i64,
    pub at: Timestamp,
    pub kind: RecordKind,
    /// The member of the Agent; 0 is the agent itself.
    pub member: u16,
    pub turn: i64,
    /// The model call, such as `t12c1a1`.
    pub call: Option<String>,
    /// The tool run, such as `t12c1r1`.
    pub run: Option<String>,
    pub tool: Option<String>,
    /// Effect of the tool: `Read`, `Write` or `Destructive`.
    pub effect: Option<String>,
    /// Outcome of the run.
    pub outcome: Option<String>,
    /// Of an answered call.
    pub usage: LineUsage,
    /// A short note, such as `Running -> Sleeping` or the kind of a failure.
    pub note: String,
}

impl JournalLine {
    /// The first line of a journal, with nothing but what is given.
    #[cfg(test)]
    #[must_use]
    pub fn bare(kind: RecordKind, turn: i64) -> Self {
        Self {
            seq: 1,
            at: Timestamp::UNIX_EPOCH,
            kind,
            member: 0,
            turn,
            call: None,
            run: None,
            tool: None,
            effect: None,
            outcome: None,
            usage: LineUsage::default(),
            note: String::new(),
        }
    }

    pub(super) fn of(seq: i64, at: Timestamp, record: &JournalRecord, usage: LineUsage) -> Self {
        let tool = record.tool.as_ref();
        Self {
            seq,
            at,
            kind: record.kind,
            member: record.member,
            turn: record.turn,
            call: record.call.map(|call| call.to_string()),
            run: tool.map(|tool| tool.run.to_string()),
            tool: tool.and_then(|tool| tool.tool.clone()),
            effect: tool.and_then(|tool| Some(tool.effect?.as_ref().to_owned())),
            outcome: tool.and_then(|tool| Some(tool.outcome?.as_ref().to_owned())),
            usage,
            note: record.note.clone(),
        }
    }

    /// Returns `None` for a kind or a time that this version does not know.
    fn read(row: &Row<'_>) -> rusqlite::Result<Option<Self>> {
        let (at, kind): (String, String) = (row.get("at")?, row.get("kind")?);
        let (Ok(at), Ok(kind)) = (at.parse(), kind.parse()) else {
            return Ok(None);
        };
        Ok(Some(Self {
            seq: row.get("seq")?,
            at,
            kind,
            member: row.get("member")?,
            turn: row.get("turn")?,
            call: row.get("call")?,
            run: row.get("run")?,
            tool: row.get("tool")?,
            effect: row.get("effect")?,
            outcome: row.get("outcome")?,
            usage: LineUsage::read(row)?,
            note: row.get("note")?,
        }))
    }
}

/// Reads at most `max` [`JournalLine`]s after line `seq`, in order. Skips lines that this version does not know.
pub(super) fn after(connection: &Connection, seq: i64, max: usize) -> rusqlite::Result<JournalPage> {
    let newest = connection.query_row("SELECT coalesce(max(seq), 0) FROM journal", [], |row| row.get(0))?;
    let mut found = JournalPage {
        next: seq,
        newest,
        lines: Vec::new(),
    };
    let mut select = connection.prepare_cached(
        "SELECT seq, at, kind, member, turn, call, run, tool, effect, outcome, note,
         model, input_tokens, output_tokens, cost_micro_usd FROM journal
         WHERE seq > ?1 ORDER BY seq LIMIT ?2",
    )?;
    let mut rows = select.query([seq, i64::try_from(max).unwrap_or(i64::MAX)])?;
    while let Some(row) = rows.next()? {
        found.next = row.get("seq")?;
        found.lines.extend(JournalLine::read(row)?);
    }
    Ok(found)
}

/// Maximum number of lines of a turn that are read again.
const MAX_TURN_LINES: usize = 10_000;

/// Returns the lines from the beginning of the newest turn on.
pub(super) fn of_newest_turn(connection: &Connection) -> rusqlite::Result<Vec<JournalLine>> {
    let mut select =
        connection.prepare_cached("SELECT seq FROM journal WHERE kind = 'TurnStarted' ORDER BY seq DESC LIMIT 1")?;
    let started: Option<i64> = select.query_row([], |row| row.get(0)).optional()?;
    match started {
        Some(seq) => Ok(after(connection, seq - 1, MAX_TURN_LINES)?.lines),
        None => Ok(Vec::new()),
    }
}

/// Reads the last lines of the journal in `dir`, at most `max`, while no worker has it open. Changes nothing.
pub fn last_lines(dir: &Path, max: usize) -> rusqlite::Result<Vec<JournalLine>> {
    let connection = Connection::open_with_flags(dir.join(FILE), OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    let newest = after(&connection, i64::MAX, 0)?.newest;
    let before = newest.saturating_sub(i64::try_from(max).unwrap_or(i64::MAX));
    Ok(after(&connection, before, max)?.lines)
}

/// Returns the last messages of the model and its tools up to a turn, the newest last, each truncated to `bytes`.
pub(super) fn recent_messages(
    connection: &Connection,
    turn: i64,
    (messages, bytes): (usize, usize),
) -> rusqlite::Result<Vec<String>> {
    let mut select = connection.prepare_cached(
        "SELECT json FROM messages WHERE turn <= ?1 AND json_extract(json, '$.role') IN ('assistant', 'tool')
         ORDER BY id DESC LIMIT ?2",
    )?;
    let texts = select.query_map((turn, i64::try_from(messages).unwrap_or(i64::MAX)), |row| row.get(0))?;
    let mut texts: Vec<String> = texts.collect::<Result<_, _>>()?;
    for text in texts.iter_mut().filter(|text| text.len() > bytes) {
        *text = with_ellipsis(first_bytes(text, bytes), text);
    }
    texts.reverse();
    Ok(texts)
}

/// Returns the messages of a turn of a member, oldest first, also those that have left the live transcript. Skips those that this
/// version does not know.
pub(super) fn messages_of_turn(connection: &Connection, (member, turn): (u16, i64)) -> rusqlite::Result<Vec<Message>> {
    let mut select =
        connection.prepare_cached("SELECT json FROM messages WHERE turn = ?1 AND member = ?2 ORDER BY id")?;
    let mut rows = select.query((turn, member))?;
    let mut messages = Vec::new();
    while let Some(row) = rows.next()? {
        let json: String = row.get(0)?;
        messages.extend(serde_json::from_str::<Message>(&json).ok());
    }
    Ok(messages)
}

/// The id that the messages have for the call of a run which the model requested.
#[must_use]
pub fn call_id(run: ToolRunId) -> String {
    let place = usize::try_from(run.index).unwrap_or(usize::MAX).saturating_sub(1);
    message::call_id(run.turn, run.call, place)
}

/// Returns the call behind a tool run, as JSON with its tool, its arguments, and the text of its answer; truncated to `bytes`. `None`: the call is no longer kept.
pub(super) fn requested_call(
    connection: &Connection,
    run: ToolRunId,
    bytes: usize,
) -> rusqlite::Result<Option<String>> {
    let wanted = call_id(run);
    let mut select = connection.prepare_cached(
        "SELECT json FROM messages WHERE turn = ?1 AND json_extract(json, '$.role') = 'assistant' ORDER BY id",
    )?;
    let mut rows = select.query([run.turn])?;
    while let Some(row) = rows.next()? {
        let json: String = row.get(0)?;
        let Ok(Message::Assistant { text, tool_calls, .. }) = serde_json::from_str(&json) else {
            continue;
        };
        if let Some(call) = tool_calls.into_iter().find(|call| call.id == wanted) {
            // As they are run: of a name that the model wrote twice, the last one counts.
            let mut arguments = Value::Object(message::arguments(&call.arguments).unwrap_or_default());
            arguments.sort_all_objects();
            let shown = json!({"tool": call.name, "arguments": arguments, "text": text}).to_string();
            let is_cut = shown.len() > bytes;
            return Ok(Some(if is_cut {
                with_ellipsis(first_bytes(&shown, bytes), &shown)
            } else {
                shown
            }));
        }
    }
    Ok(None)
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JournalPage {
    /// Number of the last [`JournalLine`] that was examined, whether it could be read or not. The next page continues
    /// after it.
    pub next: i64,
    /// Number of the newest [`JournalLine`] in the journal.
    pub newest: i64,
    pub lines: Vec<JournalLine>,
}

/// Returns the [`JournalLine`]s of the newest batch, and of batches right before it that were committed at the same
/// time. Stops there, because the journal may be long.
pub(super) fn of_last_batch(connection: &Connection) -> rusqlite::Result<Vec<JournalLine>> {
    let mut select = connection.prepare(NEWEST_FIRST)?;
    let mut rows = select.query([])?;
    let mut at: Option<String> = None;
    let mut lines = Vec::new();
    while let Some(row) = rows.next()? {
        let moment: String = row.get("at")?;
        if *at.get_or_insert_with(|| moment.clone()) != moment {
            break;
        }
        lines.extend(JournalLine::read(row)?);
    }
    lines.reverse();
    Ok(lines)
}
