//! Uploads the history of the loop, while the controller stores histories: the rows that have changed, batch by batch,
//! each until it is stored.
//!
//! Keeps nothing: rows stay in the journal until they are acknowledged. The loop never waits for an upload, and no error
//! of an upload ends it.

use std::time::Duration;

use futures::FutureExt;
use futures::future::{self, BoxFuture};
use tokio::time::{Instant, sleep, timeout_at};

use super::gateway_client::GatewayClient;
use super::journal::UploadBatch;
use super::journaled_engine::JournaledEngine;
use crate::link::history::{HistoryAck, HistoryBatch};
use crate::support::backoff::{Backoff, jitter};

/// Time from a change to its upload, in which further changes join it. A row changes several times in a turn.
const GATHER: Duration = Duration::from_secs(2);
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// Longest wait between two attempts: how long a database that has returned is not noticed.
const MAX_RETRY: Duration = Duration::from_secs(30);
/// How long a loop that has ended continues to upload.
const SHUTDOWN_UPLOAD_TIMEOUT: Duration = Duration::from_secs(2);

/// What happened to an upload.
#[derive(Clone, Copy)]
pub enum UploadEvent {
    /// It is time to read a batch.
    Due,
    /// A batch was answered.
    Answered(HistoryAck),
}

/// The upload of one loop's history.
pub struct HistoryUpload {
    gateway: GatewayClient,
    is_wanted: bool,
    /// The journal could not be read or written: not tried again by this process.
    has_failed: bool,
    /// What is awaited; `None`: every change is acknowledged.
    pending: Option<BoxFuture<'static, UploadEvent>>,
}

impl HistoryUpload {
    #[must_use]
    pub fn new(gateway: &GatewayClient) -> Self {
        Self {
            gateway: gateway.clone(),
            is_wanted: false,
            has_failed: false,
            pending: None,
        }
    }

    /// Whether the controller stores histories.
    pub fn set_wanted(&mut self, is_wanted: bool) {
        if is_wanted != self.is_wanted {
            self.is_wanted = is_wanted;
            self.pending = None;
            // What earlier processes have left.
            self.changed();
        }
    }

    /// Rows may have changed.
    pub fn changed(&mut self) {
        if self.is_wanted && !self.has_failed && self.pending.is_none() {
            self.pending = Some(sleep(GATHER).map(|()| UploadEvent::Due).boxed());
        }
    }

    /// The next event. Cancel safe.
    pub async fn next(&mut self) -> UploadEvent {
        let Some(pending) = &mut self.pending else {
            return future::pending().await;
        };
        let event = pending.await;
        self.pending = None;
        event
    }

    /// Continues after an event.
    pub fn advance(&mut self, event: UploadEvent, steps: &mut JournaledEngine<'_>) {
        let is_due = matches!(event, UploadEvent::Due);
        let next = match event {
            UploadEvent::Due => steps.history_batch(),
            UploadEvent::Answered(ack) => steps.history_stored(ack).and_then(|()| steps.history_batch()),
        };
        match next {
            Ok(Some(next)) if is_due || next.has_more => {
                self.pending = Some(upload(self.gateway.clone(), next.batch).boxed());
            }
            // What changed during an upload waits for more.
            Ok(Some(_)) => self.changed(),
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(%error, "failed to read the history for its upload, which ends until the next start");
                self.has_failed = true;
            }
        }
    }

    /// Uploads what is left, for at most [`SHUTDOWN_UPLOAD_TIMEOUT`]. The rest stays in the journal for the next start.
    pub async fn finish(&mut self, steps: &mut JournaledEngine<'_>) {
        if !self.is_wanted || self.has_failed {
            return;
        }
        self.pending = None;
        let deadline = Instant::now() + SHUTDOWN_UPLOAD_TIMEOUT;
        let mut next = steps.history_batch();
        while let Ok(Some(UploadBatch { batch, .. })) = next {
            let Ok(Ok(ack)) = timeout_at(deadline, self.gateway.upload_history(&batch)).await else {
                return;
            };
            next = steps.history_stored(ack).and_then(|()| steps.history_batch());
        }
    }
}

async fn upload(gateway: GatewayClient, batch: HistoryBatch) -> UploadEvent {
    let mut backoff = Backoff::new(FIRST_RETRY, MAX_RETRY);
    let mut failures = 0_u32;
    loop {
        match gateway.upload_history(&batch).await {
            Ok(ack) => {
                if failures > 0 {
                    tracing::info!(failures, "uploaded the history again");
                }
                return UploadEvent::Answered(ack);
            }
            Err(detail) => {
                if failures == 0 {
                    tracing::warn!(detail, "failed to upload the history; retrying");
                }
                failures = failures.saturating_add(1);
            }
        }
        sleep(backoff.next_spread(jitter())).await;
    }
}
