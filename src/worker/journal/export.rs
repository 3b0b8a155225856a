//! Exports what an Agent did as JSON lines: its executions, their steps, the attempts at steps of its goal, and the audit
//! of its tool calls.
//!
//! Reads a copy of a journal, and never changes it. The journal itself is locked while its worker runs, and a second copy of
//! it has no room in the pod.

use std::collections::HashMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rusqlite::types::ValueRef;
use rusqlite::{Connection, MAIN_DB, OpenFlags, Row};
use serde_json::{Map, Value};

use super::line_usage::{InputAndOutput, tokens_of_calls};
use super::{schema, upload};
use crate::otlp::TurnName;
use crate::support::hash::hex;

/// What is exported, in this order: the value of `record` in its lines, the table, the column with the id of the
/// execution, and the order of its rows.
const TABLES: [(&str, &str, &str, &str); 4] = [
    ("execution", "agent_execution_history", "id", "id"),
    ("step", "agent_execution_steps", "execution_id", "id"),
    ("goalStep", "agent_goal_steps", "execution_id", "execution_id"),
    ("audit", "agent_execution_audit", "execution_id", "seq"),
];
/// Columns of a query after those of the table: uid of the Agent, member and turn of the execution.
const OF_EXECUTION: usize = 3;
/// Columns whose text is JSON.
const JSON_COLUMNS: [&str; 5] = ["action", "result", "validation", "criteria", "state_snapshot"];

#[cfg_attr(test, derive(strum::EnumCount))]
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The file cannot be read, or is not a database.
    #[error("cannot read {} as a journal ({detail}): give the file that `agentloop journal` has written", .file.display())]
    Unreadable {
        file: PathBuf,
        /// The error of SQLite.
        detail: String,
    },
    /// Its tables are those of another version of agentloop.
    #[error(
        "the journal {} has schema version {found} and this agentloop exports version {known}: use the agentloop of its \
         worker, or copy the journal again after an update of the worker",
        .file.display()
    )]
    OtherVersion {
        file: PathBuf,
        /// Schema version of the file.
        found: i64,
        /// Schema version of this agentloop.
        known: i64,
    },
    /// The lines could not be written.
    #[error("cannot write the history: {0}")]
    Io(#[from] io::Error),
}

impl ExportError {
    fn unreadable(file: &Path, error: &rusqlite::Error) -> Self {
        Self::Unreadable {
            file: file.into(),
            detail: error.to_string(),
        }
    }
}

/// Writes the history in this copy of a journal as JSON lines.
pub fn export(copy: &Path, to: &mut impl Write) -> Result<(), ExportError> {
    let unreadable = |error: rusqlite::Error| ExportError::unreadable(copy, &error);
    let connection = Connection::open_with_flags(copy, OpenFlags::SQLITE_OPEN_READ_ONLY).map_err(unreadable)?;
    export_from(&connection, copy, to)
}

/// The same of a copy in memory, so that its texts reach no disk. `name`: what errors call it.
pub fn export_bytes(copy: &[u8], name: &Path, to: &mut impl Write) -> Result<(), ExportError> {
    let unreadable = |error: rusqlite::Error| ExportError::unreadable(name, &error);
    let mut connection = Connection::open_in_memory().map_err(unreadable)?;
    connection
        .deserialize_read_exact(MAIN_DB, copy, copy.len(), true)
        .map_err(unreadable)?;
    export_from(&connection, name, to)
}

fn export_from(connection: &Connection, name: &Path, to: &mut impl Write) -> Result<(), ExportError> {
    let unreadable = |error: rusqlite::Error| ExportError::unreadable(name, &error);
    let found = schema::version(connection).map_err(unreadable)?;
    if found != schema::VERSION {
        return Err(ExportError::OtherVersion {
            file: name.into(),
            found,
            known: schema::VERSION,
        });
    }
    let tokens = tokens_of_calls(connection).map_err(unreadable)?;
    for (record, table, execution, order) in TABLES {
        let sql = format!(
            "SELECT exported.*, execution.agent_id, execution.member, execution.turn FROM {table} AS exported
             LEFT JOIN agent_execution_history AS execution ON execution.id = exported.{execution}
             ORDER BY exported.{order}"
        );
        let mut select = connection.prepare(&sql).map_err(unreadable)?;
        let mut columns: Vec<String> = select.column_names().map(str::to_owned).collect();
        columns.truncate(columns.len() - OF_EXECUTION);
        let mut rows = select.query([]).map_err(unreadable)?;
        while let Some(row) = rows.next().map_err(unreadable)? {
            let mut line = Map::from_iter([("record".to_owned(), record.into())]);
            for (place, column) in columns.iter().enumerate() {
                line.insert(column.clone(), value(row, place, column).map_err(unreadable)?);
            }
            if record == "audit" {
                line.insert("cause".into(), upload::gate_cause(row).map_err(unreadable)?.into());
            }
            if record == "step" {
                let (input, output) = step_tokens(row, &tokens).map_err(unreadable)?;
                line.insert("input_tokens".into(), input.into());
                line.insert("output_tokens".into(), output.into());
            }
            let trace = trace_id(row, columns.len()).map_err(unreadable)?;
            line.insert("trace_id".into(), trace.into());
            writeln!(to, "{}", Value::Object(line))?;
        }
    }
    to.flush()?;
    Ok(())
}

/// What the call of a step used, which its line of the journal has.
fn step_tokens(row: &Row<'_>, known: &HashMap<(u16, String), InputAndOutput>) -> rusqlite::Result<InputAndOutput> {
    let call = (row.get("member")?, row.get("call")?);
    Ok(known.get(&call).copied().unwrap_or_default())
}

/// The id of the trace of the row's execution, from its columns that begin at `place`. Those of the table do not have it:
/// it follows from them.
fn trace_id(row: &Row<'_>, place: usize) -> rusqlite::Result<Option<String>> {
    let (agent, member): (Option<String>, Option<u16>) = (row.get(place)?, row.get(place + 1)?);
    let turn: Option<i64> = row.get(place + 2)?;
    let (Some(agent), Some(member), Some(turn)) = (agent, member, turn) else {
        return Ok(None);
    };
    let name = TurnName {
        agent: &agent,
        member,
        turn,
    };
    Ok((turn > 0).then(|| hex(&name.trace_id())))
}

fn value(row: &Row<'_>, place: usize, column: &str) -> rusqlite::Result<Value> {
    Ok(match row.get_ref(place)? {
        ValueRef::Integer(number) => number.into(),
        ValueRef::Real(number) => number.into(),
        ValueRef::Text(text) => {
            let text = String::from_utf8_lossy(text).into_owned();
            let json = JSON_COLUMNS.contains(&column).then(|| serde_json::from_str(&text).ok());
            json.flatten().unwrap_or(Value::String(text))
        }
        // No table has any.
        ValueRef::Blob(_) | ValueRef::Null => Value::Null,
    })
}
