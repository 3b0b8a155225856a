//! The gateway's connection to the controller: attaches, follows directives and sends reports.
//!
//! Retries indefinitely with exponential backoff; [`LinkState`] decides how long calls continue without contact.
//! Fencing ends it permanently.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use tokio::sync::watch;
use tokio::time::sleep;

use super::budget::GatewayBudget;
use super::calls::ModelCalls;
use super::deliveries::DeliveryQueue;
use super::link_state::LinkState;
use super::requested_tasks::RequestedTasks;
use super::shutdown_retry;
use crate::link::client::{DirectiveEvent, LinkClient, LinkError};
use crate::link::messages::{
    AttachRequest, AttachResponse, LoopReport, OLDEST_CONTROLLER_PROTOCOL, PROTOCOL, PodRefusal, PodReport,
    PricedModel, REPORT_SECONDS, RefusalCode, TelemetryLoss,
};
use crate::link::socket::WorkerSession;
use crate::otlp::{DropCount, LogSink, SpanSink};
use crate::support::backoff::{Backoff, jitter};
use crate::support::clock::ClockReading;

/// Longest delay between two attempts.
const MAX_DELAY: Duration = Duration::from_secs(5);
/// Delays between two attempts, spread so that a returning controller is not called by all pods at once.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(200), MAX_DELAY);
/// Shortest interval between two reports.
const COALESCE: Duration = Duration::from_millis(250);

pub struct GatewayUplink {
    pub epoch: i64,
    /// The models that the gateway calls, with their prices in the spec.
    pub models: Vec<PricedModel>,
    pub client: Arc<LinkClient>,
    /// Receives the state of the link.
    pub contact: Arc<LinkState>,
    /// The calls to report on.
    pub calls: Arc<ModelCalls>,
    /// The budget to report on.
    pub budget: Arc<GatewayBudget>,
    /// Receives the events of Sensors.
    pub deliveries: Arc<DeliveryQueue>,
    pub tasks: Arc<RequestedTasks>,
    /// The [`LoopReport`]s of the worker.
    pub loop_report: watch::Receiver<Option<LoopReport>>,
    /// What the pod exports.
    pub exported: ExportedTelemetry,
}

/// Where the telemetry of the pod goes, the worker's included.
#[derive(Clone)]
pub struct ExportedTelemetry {
    pub spans: SpanSink,
    pub logs: LogSink,
}

impl ExportedTelemetry {
    /// Whether lines of the log get the ids of traces.
    pub fn has_ids(&self) -> bool {
        self.spans.is_on() || self.logs.is_on()
    }

    fn loss(&self) -> TelemetryLoss {
        let count = |dropped: DropCount| i64::try_from(dropped.get()).unwrap_or(i64::MAX);
        TelemetryLoss {
            spans: count(self.spans.dropped()),
            logs: count(self.logs.dropped()),
        }
    }
}

/// A newer pod has taken over.
#[derive(Debug)]
struct PodFenced;

impl GatewayUplink {
    /// Runs until the pod is fenced.
    pub async fn run(&self) {
        let fenced = tokio::select! {
            fenced = self.follow_directives() => fenced,
            fenced = self.report_changes() => fenced,
        };
        let PodFenced = fenced;
        tracing::warn!(epoch = self.epoch, "fenced: a newer pod runs this Agent's loop");
        self.contact.fence();
    }

    /// Sends the last report, within `limit`.
    pub async fn last_report(&self, limit: Duration) {
        if self.contact.subscribe().borrow().fenced {
            return;
        }
        let messages = ("failed to send the last report", "timed out sending the last report");
        shutdown_retry::retry_within(limit, messages, || async {
            self.client.report(&self.build_report()).await
        })
        .await;
    }

    /// Attaches and follows the directives until they end, in a loop.
    async fn follow_directives(&self) -> PodFenced {
        let mut backoff = BACKOFF;
        loop {
            match self.attach().await {
                Ok(()) => {
                    tracing::info!(epoch = self.epoch, "attached");
                    let since = Instant::now();
                    match self.listen().await {
                        Err(error) if error.is_fence() => return PodFenced,
                        Err(error) => tracing::info!(%error, "the stream of directives ended; attaching again"),
                        Ok(()) => tracing::info!("the stream of directives ended; attaching again"),
                    }
                    if since.elapsed() > MAX_DELAY {
                        backoff.reset();
                    }
                }
                Err(error) if error.is_fence() => return PodFenced,
                // The controller cannot read the request: their versions are too far apart.
                Err(
                    error @ LinkError::Refused(PodRefusal {
                        code: RefusalCode::Malformed,
                        ..
                    }),
                ) => tracing::error!(
                    %error,
                    protocol = PROTOCOL,
                    "the controller does not support this gateway's version, so no call is made: upgrade the controller, \
                     or delete the pod so that the controller creates one of its own version"
                ),
                Err(error) => tracing::info!(%error, "failed to attach to the controller; retrying"),
            }
            sleep(backoff.next_spread(jitter())).await;
        }
    }

    async fn attach(&self) -> Result<(), LinkError> {
        let attach = AttachRequest {
            protocol: PROTOCOL,
            oldest_protocol: Some(OLDEST_CONTROLLER_PROTOCOL),
            epoch: self.epoch,
            models: self.models.clone(),
        };
        let sent = ClockReading::now();
        let AttachResponse {
            protocol,
            known,
            directives,
            ..
        } = self.client.attach(&attach).await?;
        if !(OLDEST_CONTROLLER_PROTOCOL..=PROTOCOL).contains(&protocol) {
            return Err(LinkError::Unreadable(format!(
                "the controller uses protocol version {protocol}, and this gateway supports \
                 {OLDEST_CONTROLLER_PROTOCOL} to {PROTOCOL}"
            )));
        }
        // Without the known totals no call may be made: the counts of a new record would fall behind the status.
        self.calls
            .store()
            .adopt(&known.usage)
            .map_err(|error| LinkError::Unreadable(format!("the known totals could not be recorded: {error}")))?;
        let session = WorkerSession {
            epoch: self.epoch,
            known,
            traces: self.exported.spans.is_on(),
            content: self.exported.spans.takes_content(),
            logs: self.exported.logs.is_on(),
        };
        self.contact.attached(session, directives, (sent, ClockReading::now()));
        Ok(())
    }

    async fn listen(&self) -> Result<(), LinkError> {
        let events = self.client.directives(self.epoch).await?;
        tokio::pin!(events);
        while let Some(event) = events.next().await {
            match event? {
                DirectiveEvent::Directives(directives) => self.contact.directed(*directives),
                DirectiveEvent::Delivery(delivery) => self.deliveries.put(*delivery),
                DirectiveEvent::Task(task) => self.tasks.put(*task),
                DirectiveEvent::Heartbeat => {}
            }
        }
        Ok(())
    }

    /// Sends a report on every change, and at intervals without one.
    async fn report_changes(&self) -> PodFenced {
        let mut view = self.contact.subscribe();
        while view.borrow_and_update().session.is_none() {
            // The sender is in `contact`, so it cannot be dropped.
            let _ = view.changed().await;
        }
        let mut loop_report = self.loop_report.clone();
        let mut ended = self.calls.subscribe();
        let mut backoff = BACKOFF;
        // Answers to reports renew the run lease: four of them fit into it.
        let period = Duration::from_secs(REPORT_SECONDS).min(self.contact.lease() / 4);
        loop {
            loop_report.mark_unchanged();
            ended.mark_unchanged();
            let sent = ClockReading::now();
            match self.client.report(&self.build_report()).await {
                Ok(()) => self.contact.note_answer(sent, ClockReading::now()),
                Err(error) if error.is_fence() => return PodFenced,
                Err(error) => {
                    tracing::info!(%error, "failed to send a report; retrying");
                    sleep(backoff.next_spread(jitter())).await;
                    continue;
                }
            }
            backoff.reset();
            sleep(COALESCE).await;
            tokio::select! {
                _ = loop_report.changed() => {}
                _ = ended.changed() => {}
                () = sleep(period) => {}
            }
        }
    }

    fn build_report(&self) -> PodReport {
        let loop_ = self.loop_report.borrow().clone();
        let mut usage = self.calls.store().usage();
        let known = self.contact.subscribe();
        let known = known
            .borrow()
            .session
            .as_ref()
            .map(|session| session.known.usage.counts.clone());
        usage.counts = known.unwrap_or_default();
        if let Some(said) = &loop_ {
            usage.counts.merge(&said.counts);
        }
        PodReport {
            epoch: self.epoch,
            loop_,
            usage,
            model: self.calls.subscribe().borrow().1.clone(),
            budget: self.calls.store().budget(),
            pulse: self.budget.request_stats(),
            telemetry_loss: self.exported.loss(),
            call_durations: self.calls.times().report(),
        }
    }
}
