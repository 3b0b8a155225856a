//! The history of executions in Postgres: its tables, and how rows get there and leave.
//!
//! Owns the connections, the migrations, and the position of each Agent in its changes. Stores what it is given for the
//! Agent that the caller names, and never reads an identity from a row. Content of rows reaches the database and nothing
//! else: no error has it.

#![warn(missing_docs)]

#[cfg(test)]
#[macro_use]
extern crate agentloop_texts;

mod connection;
mod error;
mod migrations;
mod store;
mod target;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod text_tests;
mod tls;
mod write;

pub use error::{HistoryError, TargetError};
pub use store::{HistoryAgent, HistoryStore, RowCounts, StoredBatch};
pub use target::{DatabaseTarget, TlsMode};
