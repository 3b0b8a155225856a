//! Single values of the record: its name, the position in the script.

use std::str::FromStr;

use rusqlite::{OptionalExtension, Transaction};

use crate::support::random::random_hex;

pub(super) fn meta<T: FromStr>(change: &Transaction<'_>, name: &str) -> rusqlite::Result<Option<T>> {
    let value: Option<String> = change
        .query_row("SELECT value FROM meta WHERE name = ?", [name], |row| row.get(0))
        .optional()?;
    value
        .map(|value| value.parse().map_err(|_| rusqlite::Error::InvalidQuery))
        .transpose()
}

pub(super) fn set_meta(change: &Transaction<'_>, name: &str, value: &str) -> rusqlite::Result<()> {
    let mut insert = change.prepare_cached("INSERT OR REPLACE INTO meta (name, value) VALUES (?, ?)")?;
    insert.execute([name, value])?;
    Ok(())
}

/// A random name, unique among records.
pub(super) fn make_name(change: &Transaction<'_>) -> rusqlite::Result<String> {
    let no_randomness = || rusqlite::Error::ToSqlConversionFailure("the system has no randomness".into());
    let name = random_hex::<16>().ok_or_else(no_randomness)?;
    set_meta(change, super::RECORD, &name)?;
    Ok(name)
}
