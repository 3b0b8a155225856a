//! A sensor pod's conversation with the controller: what it is to do, and how it is.
//!
//! Tries for ever, with growing pauses. Without contact the pod goes on listening: what it hears waits in the outbox.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::link::client::{LinkClient, LinkError};
use crate::link::deliveries::{SensorDirectives, SensorPodReport};
use crate::link::messages::{HEARTBEAT_SECONDS, REPORT_SECONDS};
use crate::sensing::source::backoff::jitter;

/// First and longest pause between two tries.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));
/// Shortest time between two reports.
const COALESCE: Duration = Duration::from_millis(250);
/// Two heartbeats missed and a little: the stream is dead.
const SILENCE: Duration = Duration::from_secs(2 * HEARTBEAT_SECONDS + 5);

/// The conversation.
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

    /// What the pod is to do, as far as it was said.
    pub fn directives(&self) -> watch::Receiver<SensorDirectives> {
        self.directives.subscribe()
    }

    /// Where the pod says how it is.
    pub fn report(&self) -> watch::Sender<Option<SensorPodReport>> {
        self.report.clone()
    }

    /// Speaks until it is dropped.
    pub async fn run(&self) {
        tokio::join!(self.follow(), self.report_on());
    }

    async fn follow(&self) {
        let mut pause = BACKOFF.0;
        loop {
            let since = Instant::now();
            match self.listen().await {
                Ok(()) => tracing::info!("the directives ended"),
                Err(error) => tracing::info!(%error, "the directives ended"),
            }
            if since.elapsed() > BACKOFF.1 {
                pause = BACKOFF.0;
            }
            wait(&mut pause).await;
        }
    }

    async fn listen(&self) -> Result<(), LinkError> {
        let events = self.client.sensor().await?;
        tokio::pin!(events);
        loop {
            let silent = |_| LinkError::Transport("silent for two heartbeats".into());
            match timeout(SILENCE, events.next()).await.map_err(silent)? {
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
        let mut pause = BACKOFF.0;
        loop {
            let now = report.borrow_and_update().clone();
            if let Some(now) = now {
                if let Err(error) = self.client.sensor_report(&now).await {
                    tracing::debug!(%error, "a report was not taken");
                    wait(&mut pause).await;
                    continue;
                }
                pause = BACKOFF.0;
                sleep(COALESCE).await;
            }
            // The sender is in `self`: it cannot be gone.
            let _ = timeout(Duration::from_secs(REPORT_SECONDS), report.changed()).await;
        }
    }
}

/// Waits, a little longer each time, with jitter.
async fn wait(pause: &mut Duration) {
    sleep(pause.mul_f64(0.5 + jitter() / 2.0)).await;
    *pause = (*pause * 2).min(BACKOFF.1);
}
