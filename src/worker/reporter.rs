//! What the worker has to tell the gateway, sent in the background: the newest report, and errands about calls.

use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::link::messages::LoopReport;

use super::gateway_client::{CallNotice, GatewayClient};

/// Longest wait for the gateway to take the last report and the last errands of a worker that ends.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// The way to the gateway.
pub struct GatewayReporter {
    errands: mpsc::UnboundedSender<CallNotice>,
    report: watch::Sender<Option<LoopReport>>,
    tasks: [JoinHandle<()>; 2],
}

impl GatewayReporter {
    /// Starts sending. `connections` counts the connections made to the gateway.
    #[must_use]
    pub fn start(gateway: &GatewayClient, connections: watch::Receiver<u64>) -> Self {
        let (errands, to_run) = mpsc::unbounded_channel();
        let report = watch::Sender::new(None);
        let reports = gateway.clone().run_reports(report.subscribe(), connections);
        let tasks = [tokio::spawn(gateway.clone().run_notices(to_run)), tokio::spawn(reports)];
        Self { errands, report, tasks }
    }

    /// Sends this report, and none that waits before it.
    pub fn report(&self, report: LoopReport) {
        self.report.send_replace(Some(report));
    }

    /// Runs this errand.
    pub fn notify_call(&self, errand: CallNotice) {
        // The task ends only after this sender.
        let _ = self.errands.send(errand);
    }

    /// Waits a moment until the gateway has taken everything.
    pub async fn finish(self) {
        let Self {
            errands,
            report,
            mut tasks,
        } = self;
        drop((errands, report));
        let all = futures::future::join_all(tasks.iter_mut());
        if timeout(LAST_WORDS, all).await.is_err() {
            tracing::warn!("the gateway did not take the last report in time");
            tasks.iter().for_each(JoinHandle::abort);
        }
    }
}
