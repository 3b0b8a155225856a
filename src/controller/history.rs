//! Histories of Agents in a database: uploads of their workers, and the end of their retention.
//!
//! Owns the metrics, the log lines and the identity of the rows: namespace and name are those of the authenticated pod, and
//! the uid that of the Agent that it was created for, never one from a message. Nothing else in the controller waits for the
//! database.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::runtime::WallClock;
use crate::history::{HistoryAgent, HistoryError, HistoryStore, RowCounts, StoredBatch};
use crate::link::history::{
    ExecutionRow, HistoryAck, HistoryBatch, MAX_BATCH_ROWS, MAX_CHANGE_NUMBER, MAX_EXECUTION_STEPS,
};
use crate::link::messages::{PodRefusal, RefusalCode};
use crate::telemetry::metrics::Metrics;

/// How often old rows are deleted.
pub const DELETE_EVERY: Duration = Duration::from_hours(1);
/// Maximum number of executions, and of rows of the audit, in one deletion.
const PORTION: u32 = 1_000;
/// Batches that are stored at a time, as many as may wait for a connection. A namespace has at most as many as it leaves room for
/// others.
const MAX_BATCHES: usize = 64;
/// Values of the label `result` of the metric of batches.
const RESULTS: [&str; 5] = ["stored", "repeated", "restarted", "unavailable", "refused"];

/// Where histories are stored, and for how long.
#[derive(Clone)]
pub struct HistorySettings {
    pub store: Arc<HistoryStore>,
    /// Days after which rows are deleted; 0: never.
    pub retention_days: u32,
}

impl std::fmt::Debug for HistorySettings {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "HistorySettings({} days)", self.retention_days)
    }
}

/// Receives uploads.
pub struct HistoryReceiver {
    store: Arc<HistoryStore>,
    metrics: Arc<Metrics>,
    /// The last request failed: logged once, not per Agent.
    is_away: AtomicBool,
    /// The namespaces of the Agents whose batches are being stored, by uid.
    under_way: UnderWay,
}

type UnderWay = Mutex<HashMap<String, String>>;

/// The right of an Agent to store a batch, until it is dropped.
struct AgentTurn<'a> {
    under_way: &'a UnderWay,
    uid: String,
}

impl<'a> AgentTurn<'a> {
    fn begin(under_way: &'a UnderWay, (uid, namespace): (&str, &str)) -> Option<Self> {
        let mut agents = under_way.lock().unwrap_or_else(PoisonError::into_inner);
        let own = agents.values().filter(|other| *other == namespace).count();
        if agents.contains_key(uid) || own >= MAX_BATCHES.saturating_sub(agents.len()) {
            return None;
        }
        agents.insert(uid.to_owned(), namespace.to_owned());
        Some(Self {
            under_way,
            uid: uid.to_owned(),
        })
    }
}

impl Drop for AgentTurn<'_> {
    fn drop(&mut self) {
        let mut agents = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        agents.remove(&self.uid);
    }
}

impl HistoryReceiver {
    #[must_use]
    pub fn new(store: Arc<HistoryStore>, metrics: Arc<Metrics>) -> Self {
        Self {
            store,
            metrics,
            is_away: AtomicBool::new(false),
            under_way: UnderWay::default(),
        }
    }

    /// Stores a batch of this Agent; returns once its rows are durable.
    pub async fn receive(
        &self,
        agent: &HistoryAgent<'_>,
        batch: &HistoryBatch,
        now: Timestamp,
    ) -> Result<HistoryAck, PodRefusal> {
        let max = MAX_BATCH_ROWS;
        if batch.rows() > max || !(0..=MAX_CHANGE_NUMBER).contains(&batch.last) {
            return Err(PodRefusal {
                code: RefusalCode::Malformed,
                message: format!("a batch has at most {max} rows, and numbers up to {MAX_CHANGE_NUMBER}"),
            });
        }
        let has_steps = |row: &ExecutionRow| (0..=MAX_EXECUTION_STEPS).contains(&row.total_steps);
        if !batch.executions.iter().all(has_steps) {
            return Err(PodRefusal {
                code: RefusalCode::Malformed,
                message: format!("an execution has 0 to {MAX_EXECUTION_STEPS} steps"),
            });
        }
        // One at a time, and a share of all: neither an Agent nor a namespace may hold the connections that others wait for.
        let Some(_turn) = AgentTurn::begin(&self.under_way, (agent.uid, agent.namespace)) else {
            return Err(refusal(RefusalCode::Away, &HistoryError::Busy));
        };
        let stored = self.store.store(agent, batch).await;
        let result = match &stored {
            Ok(StoredBatch { ack, .. }) if ack.restart => "restarted",
            Ok(StoredBatch { rows, .. }) if *rows == RowCounts::default() => "repeated",
            Ok(_) => "stored",
            Err(HistoryError::Rejected(_)) => "refused",
            Err(_) => "unavailable",
        };
        self.metrics.history_batches.with_label_values(&[result]).inc();
        match stored {
            Ok(StoredBatch { ack, rows }) => {
                count(&self.metrics.history_rows, rows);
                self.metrics.history_last_success.set(now.as_second());
                if self.is_away.swap(false, Ordering::Relaxed) {
                    tracing::info!("the database of the history is available again");
                }
                Ok(ack)
            }
            Err(error @ HistoryError::Rejected(_)) => {
                tracing::warn!(namespace = agent.namespace, agent = agent.name, %error, "rejected rows of a history");
                Err(refusal(RefusalCode::Malformed, &error))
            }
            Err(error) => {
                if !matches!(error, HistoryError::Busy) && !self.is_away.swap(true, Ordering::Relaxed) {
                    tracing::warn!(%error, "failed to store histories; the workers keep them and retry");
                }
                Err(refusal(RefusalCode::Away, &error))
            }
        }
    }
}

/// Exports all series of histories with 0 before the first batch.
pub fn initialize_history_metrics(metrics: &Metrics) {
    for result in RESULTS {
        let _ = metrics.history_batches.with_label_values(&[result]);
    }
    count(&metrics.history_rows, RowCounts::default());
    count(&metrics.history_deleted_rows, RowCounts::default());
}

fn refusal(code: RefusalCode, error: &HistoryError) -> PodRefusal {
    // A pod learns that the database is unavailable, and not which one it is.
    let message = match error {
        HistoryError::Rejected(_) | HistoryError::Busy => error.to_string(),
        HistoryError::Target(_)
        | HistoryError::Unavailable(_)
        | HistoryError::NewerSchema { .. }
        | HistoryError::Statement(_) => "the database of the history is not available now".into(),
    };
    PodRefusal { code, message }
}

/// The answer to an upload when no database is configured.
#[must_use]
pub fn not_configured() -> PodRefusal {
    PodRefusal {
        code: RefusalCode::Away,
        message: "this controller stores no histories".into(),
    }
}

fn count(counter: &prometheus::IntCounterVec, rows: RowCounts) {
    for (record, rows) in [
        ("execution", rows.executions),
        ("step", rows.steps),
        ("audit", rows.audit),
    ] {
        counter.with_label_values(&[record]).inc_by(rows);
    }
}

/// Deletes rows at the end of their retention, until `stop`.
pub async fn delete_old_rows(
    settings: HistorySettings,
    (every, clock): (Duration, WallClock),
    metrics: Arc<Metrics>,
    stop: CancellationToken,
) {
    let mut due = interval(every);
    due.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = due.tick() => {}
        }
        if settings.retention_days == 0 {
            continue;
        }
        let cutoff = cutoff(clock(), settings.retention_days);
        loop {
            match settings.store.delete_before(cutoff, PORTION).await {
                Ok(deleted) if deleted == RowCounts::default() => break,
                Ok(deleted) => count(&metrics.history_deleted_rows, deleted),
                Err(error) => {
                    tracing::warn!(%error, "failed to delete old rows of the history; retrying later");
                    break;
                }
            }
            if stop.is_cancelled() {
                return;
            }
        }
    }
}

/// What began before this has been kept for `days`.
fn cutoff(now: Timestamp, days: u32) -> Timestamp {
    let kept = SignedDuration::from_hours(24).saturating_mul(i32::try_from(days).unwrap_or(i32::MAX));
    now.checked_sub(kept).unwrap_or(Timestamp::MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_kept_for_whole_days() {
        let now: Timestamp = "2026-11-22T14:00:00Z".parse().unwrap();
        assert_eq!(cutoff(now, 1).to_string(), "2026-11-21T14:00:00Z");
        assert_eq!(cutoff(now, 36_500).to_string(), "1926-12-17T14:00:00Z");
        assert_eq!(cutoff(now, u32::MAX), Timestamp::MIN);
    }

    #[test]
    fn an_agent_stores_one_batch_at_a_time_and_holds_up_no_other() {
        let under_way = UnderWay::default();
        let first = AgentTurn::begin(&under_way, ("a", "ns")).unwrap();
        assert!(AgentTurn::begin(&under_way, ("a", "ns")).is_none());
        assert!(AgentTurn::begin(&under_way, ("b", "ns")).is_some());
        drop(first);
        assert!(AgentTurn::begin(&under_way, ("a", "ns")).is_some());
    }

    #[test]
    fn a_namespace_stores_as_many_batches_at_a_time_as_it_leaves_room() {
        let under_way = UnderWay::default();
        let begin = |namespace: &'static str, number: usize| {
            let uid = format!("{namespace}-{number}");
            AgentTurn::begin(&under_way, (&uid, namespace))
        };
        let mut turns: Vec<_> = (0..MAX_BATCHES).map_while(|number| begin("noisy", number)).collect();
        assert_eq!(turns.len(), MAX_BATCHES / 2);
        turns.extend((0..MAX_BATCHES).map_while(|number| begin("loud", number)));
        assert_eq!(turns.len(), MAX_BATCHES / 2 + MAX_BATCHES / 4);
        assert!(begin("quiet", 0).is_some());
        turns.remove(0);
        assert!(begin("quiet", 0).is_some());
    }
}
