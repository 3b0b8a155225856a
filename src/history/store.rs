//! The store of histories: what the controller calls.

use std::path::PathBuf;
use std::time::Duration;

use agentloop_link::history::{HistoryAck, HistoryBatch};
use jiff::Timestamp;
use tokio::time::timeout;

use super::connection::ConnectionPool;
use super::error::{HistoryError, TargetError};
use super::write;

/// Longest time for one request, less than a pod waits for its answer.
const MAX_QUERY: Duration = Duration::from_secs(8);

/// The Agent whose rows are stored, as its pod has proved.
#[derive(Clone, Copy, Debug)]
pub struct HistoryAgent<'a> {
    /// Uid of the Agent.
    pub uid: &'a str,
    /// Its namespace.
    pub namespace: &'a str,
    /// Its name.
    pub name: &'a str,
}

/// What became of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredBatch {
    /// The answer to the worker.
    pub ack: HistoryAck,
    /// The rows that were written; none, if they were there already or do not follow what is stored.
    pub rows: RowCounts,
}

/// Numbers of rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowCounts {
    /// Executions.
    pub executions: u64,
    /// Steps.
    pub steps: u64,
    /// Rows of the audit.
    pub audit: u64,
}

/// A database with histories.
pub struct HistoryStore {
    pool: ConnectionPool,
}

impl HistoryStore {
    /// A store at the connection string in `file`, with an optional CA for its certificate. Both files are read again for
    /// each connection. Does not connect yet.
    pub fn new(file: PathBuf, ca_file: Option<PathBuf>) -> Result<Self, TargetError> {
        ConnectionPool::new(file, ca_file).map(|pool| Self { pool })
    }

    /// Stores the rows of a batch, completely or not at all. They are durable when it returns.
    pub async fn store(&self, agent: &HistoryAgent<'_>, batch: &HistoryBatch) -> Result<StoredBatch, HistoryError> {
        within_limit(async {
            let connection = self.pool.checkout().await?;
            let stored = write::store(&connection.client, agent, batch).await?;
            self.pool.put_back(connection);
            Ok(stored)
        })
        .await
    }

    /// Deletes at most `most` executions after their steps, of which there may be more than one call deletes, and at most `most`
    /// rows of the audit, that began before `cutoff`. Returns their number.
    pub async fn delete_before(&self, cutoff: Timestamp, most: u32) -> Result<RowCounts, HistoryError> {
        within_limit(async {
            let connection = self.pool.checkout().await?;
            let deleted = write::delete_before(&connection.client, cutoff, most).await?;
            self.pool.put_back(connection);
            Ok(deleted)
        })
        .await
    }
}

async fn within_limit<T>(work: impl Future<Output = Result<T, HistoryError>>) -> Result<T, HistoryError> {
    let timed_out = |_| HistoryError::Unavailable(format!("no answer within {} s", MAX_QUERY.as_secs()));
    timeout(MAX_QUERY, work).await.map_err(timed_out)?
}
