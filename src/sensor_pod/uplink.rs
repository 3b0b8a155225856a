//! A sensor pod's connection to the controller: receives directives and sends reports.
//!
//! Reconnects forever with growing pauses. Without contact the source keeps running, and its events wait in the outbox.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::link::client::{LinkClient, LinkError};
use crate::link::deliveries::{SensorDirectives, SensorPodReport};
use crate::link::messages::{HEARTBEAT_SECONDS, REPORT_SECONDS};
use crate::support::backoff::{Backoff, jitter};

/// Longest pause between two attempts.
const MAX_PAUSE: Duration = Duration::from_secs(5);
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(200), MAX_PAUSE);
/// Shortest time between two [`SensorPodReport`]s.
const COALESCE: Duration = Duration::from_millis(250);
/// Without data for two heartbeats and a little more, the stream is dead.
const READ_TIMEOUT: Duration = Duration::from_secs(2 * HEARTBEAT_SECONDS + 5);

pub struct SensorUplink {
    client: Arc<LinkClient>,
    directives: watch::Sender<SensorDirectives>,
    report: watch::Sender<Option<SensorPodReport>>,
}

impl SensorUplink {
    pub fn new(client: Arc<LinkClient>) -> Self {
        Self {
            client,
            directives: watch::Sender::default(),
            report: watch::Sender::new(None),
        }
    }

    pub fn directives(&self) -> watch::Receiver<SensorDirectives> {
        self.directives.subscribe()
    }

    /// Where the pod puts its [`SensorPodReport`].
    pub fn report(&self) -> watch::Sender<Option<SensorPodReport>> {
        self.report.clone()
    }

    /// Runs until it is dropped.
    pub async fn run(&self) {
        tokio::join!(self.follow(), self.report_on());
    }

    async fn follow(&self) {
        let mut backoff = BACKOFF;
        loop {
            let since = Instant::now();
            match self.listen().await {
                Ok(()) => tracing::info!("the stream of directives ended; reconnecting"),
                Err(error) => tracing::info!(%error, "the stream of directives ended; reconnecting"),
            }
            if since.elapsed() > MAX_PAUSE {
                backoff.reset();
            }
            sleep(backoff.next_spread(jitter())).await;
        }
    }

    async fn listen(&self) -> Result<(), LinkError> {
        let events = self.client.sensor().await?;
        tokio::pin!(events);
        loop {
            let silent = |_| LinkError::Transport("no data for two heartbeats".into());
            match timeout(READ_TIMEOUT, events.next()).await.map_err(silent)? {
                None => return Ok(()),
                Some(event) => {
                    if let Some(directives) = event? {
                        self.directives.send_if_modified(|old| {
                            let new = *old != directives;
                            *old = directives;
                            new
                        });
                    }
                }
            }
        }
    }

    async fn report_on(&self) {
        let mut report = self.report.subscribe();
        let mut backoff = BACKOFF;
        loop {
            let now = report.borrow_and_update().clone();
            if let Some(now) = now {
                if let Err(error) = self.client.sensor_report(&now).await {
                    tracing::debug!(%error, "failed to send a report; retrying");
                    sleep(backoff.next_spread(jitter())).await;
                    continue;
                }
                backoff.reset();
                sleep(COALESCE).await;
            }
            // The sender is in `self`, so the channel is open.
            let _ = timeout(Duration::from_secs(REPORT_SECONDS), report.changed()).await;
        }
    }
}
