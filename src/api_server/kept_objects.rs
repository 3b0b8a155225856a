//! Agents, AgentBudgets and Sensors on disk, from one run to the next.
//!
//! A write returns once it is on disk: the guarantees of the ledger and the uids of Sensors depend on that.

use std::path::Path;

use rusqlite::{Connection, OptionalExtension, params};
use serde_json::Value;

use super::object_key::{AGENTS, BUDGETS, ObjectKey, SENSORS};

const TABLE: &str = "CREATE TABLE IF NOT EXISTS objects (
    resource TEXT NOT NULL, namespace TEXT NOT NULL, name TEXT NOT NULL, json TEXT NOT NULL,
    PRIMARY KEY (resource, namespace, name)
) WITHOUT ROWID";

pub(super) struct KeptObjects(Connection);

impl KeptObjects {
    pub(super) fn open(file: &Path) -> rusqlite::Result<Self> {
        let disk = Connection::open(file)?;
        disk.pragma_update(None, "journal_mode", "WAL")?;
        disk.pragma_update(None, "synchronous", "FULL")?;
        disk.execute(TABLE, [])?;
        Ok(Self(disk))
    }

    pub(super) fn read(&self, key: &ObjectKey) -> rusqlite::Result<Option<Value>> {
        let text: Option<String> = self
            .0
            .query_row(
                "SELECT json FROM objects WHERE resource = ?1 AND namespace = ?2 AND name = ?3",
                params![key.resource, key.namespace, key.name],
                |row| row.get(0),
            )
            .optional()?;
        Ok(text.and_then(|text| serde_json::from_str(&text).ok()))
    }

    /// Writes an object of a kind that is kept, and no other.
    pub(super) fn write(&self, key: &ObjectKey, object: &Value) -> rusqlite::Result<()> {
        if ![AGENTS, BUDGETS, SENSORS].contains(&key.resource.as_str()) {
            return Ok(());
        }
        self.0.execute(
            "INSERT OR REPLACE INTO objects (resource, namespace, name, json) VALUES (?1, ?2, ?3, ?4)",
            params![key.resource, key.namespace, key.name, object.to_string()],
        )?;
        Ok(())
    }
}
