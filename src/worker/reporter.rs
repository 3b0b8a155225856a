//! Messages to the gateway, sent in the background: the newest report, and notices about calls.

use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::link::messages::LoopReport;

use super::gateway_client::{CallMessage, GatewayClient};

/// Longest wait at exit for the gateway to accept the last report and the last notices.
const FINAL_REPORT_TIMEOUT: Duration = Duration::from_secs(2);

pub struct GatewayReporter {
    errands: mpsc::UnboundedSender<CallMessage>,
    report: watch::Sender<Option<LoopReport>>,
    tasks: [JoinHandle<()>; 2],
}

impl GatewayReporter {
    /// Starts the sending tasks. `connections` counts the connections made to the gateway.
    #[must_use]
    pub fn start(gateway: &GatewayClient, connections: watch::Receiver<u64>) -> Self {
        let (errands, to_run) = mpsc::unbounded_channel();
        let report = watch::Sender::new(None);
        let reports = gateway.clone().run_reports(report.subscribe(), connections);
        let tasks = [tokio::spawn(gateway.clone().run_notices(to_run)), tokio::spawn(reports)];
        Self { errands, report, tasks }
    }

    /// Queues this [`LoopReport`]. Replaces an earlier one that is still unsent.
    pub fn report(&self, report: LoopReport) {
        self.report.send_replace(Some(report));
    }

    pub fn notify_call(&self, errand: CallMessage) {
        // Cannot fail: the task ends only after this sender.
        let _ = self.errands.send(errand);
    }

    /// Waits until the gateway has accepted everything, for at most [`FINAL_REPORT_TIMEOUT`].
    pub async fn finish(self) {
        let Self {
            errands,
            report,
            mut tasks,
        } = self;
        drop((errands, report));
        let all = futures::future::join_all(tasks.iter_mut());
        if timeout(FINAL_REPORT_TIMEOUT, all).await.is_err() {
            tracing::warn!("timed out sending the last report to the gateway");
            tasks.iter().for_each(JoinHandle::abort);
        }
    }
}
