//! What an answered call used, in its line of the journal: which model was asked, its tokens and its cost.
//!
//! The columns are no version of the tables: they may be NULL, and releases that do not know them read and write all
//! others by name. So the worker that opens the journal adds them, and an earlier release opens it again.

use std::collections::HashMap;

use rusqlite::{Connection, Row};

use crate::api::agent::ModelSpec;
use crate::engine::{CallPurpose, RecordedUsage};

/// The columns of the table `journal`, with their types.
const COLUMNS: [(&str, &str); 4] = [
    ("model", "TEXT"),
    ("input_tokens", "INTEGER"),
    ("output_tokens", "INTEGER"),
    ("cost_micro_usd", "INTEGER"),
];

/// Adds the columns that the journal lacks.
pub(super) fn add_columns(connection: &Connection) -> rusqlite::Result<()> {
    let transaction = connection.unchecked_transaction()?;
    for (name, kind) in COLUMNS {
        if !has_column(&transaction, name)? {
            transaction.execute_batch(&format!("ALTER TABLE journal ADD COLUMN {name} {kind}"))?;
        }
    }
    transaction.commit()
}

fn has_column(connection: &Connection, name: &str) -> rusqlite::Result<bool> {
    const EXISTS: &str = "SELECT EXISTS (SELECT 1 FROM pragma_table_info('journal') WHERE name = ?1)";
    connection.query_row(EXISTS, [name], |row| row.get(0))
}

/// Input and output tokens of a call, as far as they are known.
pub(super) type InputAndOutput = (Option<i64>, Option<i64>);

/// The tokens of answered calls, by member and call. A journal that only an earlier release has opened has none.
pub(super) fn tokens_of_calls(connection: &Connection) -> rusqlite::Result<HashMap<(u16, String), InputAndOutput>> {
    if !has_column(connection, "input_tokens")? {
        return Ok(HashMap::new());
    }
    let mut select = connection.prepare(
        "SELECT member, call, input_tokens, output_tokens FROM journal
         WHERE kind = 'CallAnswered' AND call IS NOT NULL AND (input_tokens IS NOT NULL OR output_tokens IS NOT NULL)",
    )?;
    let rows = select.query_map([], |row| Ok(((row.get(0)?, row.get(1)?), (row.get(2)?, row.get(3)?))))?;
    rows.collect()
}

/// The models of an Agent, by their names in the spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AskedModels {
    main: String,
    light: Option<String>,
}

impl AskedModels {
    pub(super) fn of(main: &ModelSpec, light: Option<&ModelSpec>) -> Self {
        Self {
            main: main.name.clone(),
            light: light.map(|light| light.name.clone()),
        }
    }

    fn asked(&self, purpose: CallPurpose) -> &str {
        let light = self.light.as_deref().filter(|_| purpose.uses_light_model());
        light.unwrap_or(&self.main)
    }
}

/// What an answered call used, as far as it is known. Of all other lines nothing is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LineUsage {
    /// Name of the model that was asked.
    pub model: Option<String>,
    /// All input tokens, read from a cache or not.
    pub input_tokens: Option<i64>,
    pub output_tokens: Option<i64>,
    /// Micro-dollars.
    pub cost: Option<i64>,
}

impl LineUsage {
    pub(super) fn of(used: Option<RecordedUsage>, models: Option<&AskedModels>) -> Self {
        let Some(used) = used else {
            return Self::default();
        };
        let number = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
        let (input, output) = used.input_and_output.unzip();
        Self {
            model: models.map(|models| models.asked(used.purpose).to_owned()),
            input_tokens: input.map(number),
            output_tokens: output.map(number),
            cost: used.cost,
        }
    }

    pub(super) fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            model: row.get("model")?,
            input_tokens: row.get("input_tokens")?,
            output_tokens: row.get("output_tokens")?,
            cost: row.get("cost_micro_usd")?,
        })
    }
}
