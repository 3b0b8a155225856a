//! Lines of the journal as they are told to others: numbers, names and hashes, and no word of a prompt or an answer.

use jiff::Timestamp;
use rusqlite::{Connection, Row};

use crate::engine::{JournalRecord, RecordKind};

/// All lines, the newest first.
pub(super) const NEWEST_FIRST: &str = "SELECT * FROM journal ORDER BY seq DESC";

/// One line of the journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalLine {
    /// Its number: one more than that of the line before, over the life of the journal.
    pub seq: i64,
    /// When its batch was committed.
    pub at: Timestamp,
    /// What.
    pub kind: RecordKind,
    /// The turn it belongs to.
    pub turn: i64,
    /// The model call it belongs to, such as `t12c1a1`.
    pub call: Option<String>,
    /// The run of a tool it belongs to, such as `t12c1r1`.
    pub run: Option<String>,
    /// Name of that tool.
    pub tool: Option<String>,
    /// What that tool may do.
    pub effect: Option<String>,
    /// What became of that run.
    pub outcome: Option<String>,
    /// A short note: `Running -> Sleeping`, a failure kind.
    pub note: String,
}

impl JournalLine {
    /// The line that was written of a record.
    pub(super) fn of(seq: i64, at: Timestamp, record: &JournalRecord) -> Self {
        let tool = record.tool.as_ref();
        Self {
            seq,
            at,
            kind: record.kind,
            turn: record.turn,
            call: record.call.map(|call| call.to_string()),
            run: tool.map(|tool| tool.run.to_string()),
            tool: tool.and_then(|tool| tool.tool.clone()),
            effect: tool.and_then(|tool| Some(tool.effect?.as_ref().to_owned())),
            outcome: tool.and_then(|tool| Some(tool.outcome?.as_ref().to_owned())),
            note: record.note.clone(),
        }
    }

    /// `None`: a kind or a moment that this version does not know.
    fn read(row: &Row<'_>) -> rusqlite::Result<Option<Self>> {
        let (at, kind): (String, String) = (row.get("at")?, row.get("kind")?);
        let (Ok(at), Ok(kind)) = (at.parse(), kind.parse()) else {
            return Ok(None);
        };
        Ok(Some(Self {
            seq: row.get("seq")?,
            at,
            kind,
            turn: row.get("turn")?,
            call: row.get("call")?,
            run: row.get("run")?,
            tool: row.get("tool")?,
            effect: row.get("effect")?,
            outcome: row.get("outcome")?,
            note: row.get("note")?,
        }))
    }
}

/// Lines after one, in order: the number of the last that was looked at, the newest there is, and what can be read of them.
pub(super) fn after(connection: &Connection, seq: i64, most: usize) -> rusqlite::Result<JournalPage> {
    let newest = connection.query_row("SELECT coalesce(max(seq), 0) FROM journal", [], |row| row.get(0))?;
    let mut found = JournalPage {
        next: seq,
        newest,
        lines: Vec::new(),
    };
    let mut select = connection.prepare_cached(
        "SELECT seq, at, kind, turn, call, run, tool, effect, outcome, note FROM journal
         WHERE seq > ?1 ORDER BY seq LIMIT ?2",
    )?;
    let mut rows = select.query([seq, i64::try_from(most).unwrap_or(i64::MAX)])?;
    while let Some(row) = rows.next()? {
        found.next = row.get("seq")?;
        found.lines.extend(JournalLine::read(row)?);
    }
    Ok(found)
}

/// The last so many messages of the model and its tools up to a turn, the newest last, each cut after so many bytes.
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
        text.truncate(text.floor_char_boundary(bytes));
        text.push('…');
    }
    texts.reverse();
    Ok(texts)
}

/// Some lines of the journal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JournalPage {
    /// The last that was looked at.
    pub next: i64,
    /// The newest there is.
    pub newest: i64,
    /// Those that this version can read.
    pub lines: Vec<JournalLine>,
}

/// The lines of the newest batch, and of those right before it that were committed at the same moment. Reads no further
/// back: the journal may be long.
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
