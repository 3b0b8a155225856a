//! The controller process: waits for leadership, leads, and shuts down.
//!
//! Wires election, certificates, link, reconcilers and telemetry, and owns the order of startup and shutdown. If the
//! Lease is lost, the process exits at once, because its caches may be outdated by then.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, Config};
use prometheus::IntGauge;
use tokio::net::TcpListener;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::agent::ReconcilerSettings;
use super::auth::metrics_access::{MetricsAuthentication, protect};
use super::budget::record_writer::RecordConflictError;
use super::connection::{READ_TIMEOUT, client};
use super::gates::webhook::{GateWebhook, initialize_webhook_metrics};
use super::history::{HistorySettings, initialize_history_metrics};
use super::leadership::election::{LEASE_NAME, LeaderCandidate, Leadership, LeaseTimes, set_leader_label};
use super::leadership::leader::Leader;
use super::link_service::initialize_refusal_metrics;
use super::page::PageSettings;
use super::sensor::pod::SensorPodSettings;
use super::tls::metrics::MetricsCertificate;
use crate::otlp::{DropCount, ExportTask, MetricPoints, MetricSettings, TelemetryOrigin, TraceSettings};
use crate::support::backoff::Backoff;
use crate::support::listener;
use crate::telemetry::families::PerObject;
use crate::telemetry::http::{self, HttpLimits, Readiness};
use crate::telemetry::log_export::ProcessLog;
use crate::telemetry::metrics::Metrics;

/// Read timeout of requests for the Lease. Short, so that a failed renewal leaves time for another attempt.
const LEASE_TIMEOUT: Duration = Duration::from_secs(3);
/// Longest delay between two attempts to reach the API server.
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// Time limit for each of the last requests at shutdown: label and Lease.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// Time limit for the last exports of telemetry.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(2);

/// Command-line options of the controller.
#[derive(Clone, Debug)]
pub struct ControllerOptions {
    /// Settings of the reconciler.
    pub settings: ReconcilerSettings,
    /// Settings of the pods of Sensors.
    pub sensor_pods: SensorPodSettings,
    /// Listen address of the metrics.
    pub metrics_address: SocketAddr,
    /// What a reader of /metrics must present.
    pub metrics_authentication: MetricsAuthentication,
    /// Host names and IP addresses in the certificate of the metrics, if they are served over TLS.
    pub metrics_hosts: Vec<String>,
    /// Which series of single objects /metrics has.
    pub per_object: PerObject,
    /// Listen address of the probes.
    pub probe_address: SocketAddr,
    /// Listen address of the link.
    pub link_address: SocketAddr,
    /// Host names and IP addresses in the link's certificate.
    pub link_hosts: Vec<String>,
    /// The page, if it is served.
    pub page: Option<PageSettings>,
    /// Name of this process's pod; absent outside a cluster.
    pub pod_name: Option<String>,
    /// Leader election; absent: this process leads without election.
    pub election: Option<ElectionOptions>,
    /// The webhook that announces gates.
    pub gate_webhook: Option<GateWebhook>,
    /// Where histories are stored, if anywhere.
    pub history: Option<HistorySettings>,
    /// What this process exports over OTLP.
    pub telemetry: ExportOptions,
}

/// What is exported over OTLP. The default: nothing.
#[derive(Clone, Debug, Default)]
pub struct ExportOptions {
    /// How traces of reconciles are exported.
    pub traces: Option<TraceSettings>,
    /// How metrics are exported.
    pub metrics: Option<MetricSettings>,
    /// The log of the process.
    pub log: ProcessLog,
}

/// The exports of this process.
struct TelemetryExports {
    metrics: ExportTask,
    spans: ExportTask,
    log: ExportTask,
}

impl TelemetryExports {
    /// Starts the exports, and creates the instruments that they show.
    fn start(options: &ControllerOptions) -> Result<(Arc<Metrics>, Self), ControllerError> {
        let ExportOptions { traces, metrics, log } = options.telemetry.clone();
        let namespace = &options.settings.controller_namespace;
        let origin = TelemetryOrigin::controller(namespace, options.pod_name.as_deref());
        let (spans, span_export) = ExportTask::of_spans(traces, &origin);
        let (logs, log_export) = log.start(&origin);
        let instruments = Arc::new(Metrics::new()?.with_traces(spans));
        instruments.show_drops("logs", logs.dropped());
        let metric_export = metrics.map(|settings| {
            let dropped = DropCount::default();
            instruments.show_drops("metrics", dropped.clone());
            let walked = Arc::clone(&instruments);
            let walk = Arc::new(move |points: &mut MetricPoints<'_>| walked.write_points(points));
            ExportTask::of_metrics(settings, &origin, dropped, walk)
        });
        let exports = Self {
            metrics: metric_export.unwrap_or_else(ExportTask::none),
            spans: span_export,
            log: log_export,
        };
        Ok((instruments, exports))
    }

    /// Exports what is left, unless the lead was lost: another leader may act already, so the process ends at once, and what is
    /// queued is lost. The log is last, with time of its own: it has lines about the others.
    async fn end(self, result: &Result<(), ControllerError>) {
        if matches!(result, Err(ControllerError::LeadLost(_) | ControllerError::Deposed(_))) {
            return;
        }
        tokio::join!(
            self.metrics.finish(EXPORT_TIMEOUT / 2),
            self.spans.finish(EXPORT_TIMEOUT / 2)
        );
        self.log.finish(EXPORT_TIMEOUT / 2).await;
    }
}

/// Options of the leader election.
#[derive(Clone, Debug)]
pub struct ElectionOptions {
    /// Identity of this replica: the pod's name.
    pub identity: String,
    /// Duration and renewal interval of the Lease.
    pub times: LeaseTimes,
}

/// Why the controller exited without being stopped.
#[cfg_attr(test, derive(strum::EnumCount))]
#[derive(thiserror::Error, Debug)]
pub enum ControllerError {
    /// The port is in use, or the address does not belong to this host.
    #[error("cannot listen on {address}: {error}")]
    Listen { address: SocketAddr, error: std::io::Error },
    /// The client configuration is invalid.
    #[error("Kubernetes client: {0}")]
    Client(#[from] kube::Error),
    /// Conflicting metric definitions.
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    /// Another replica may lead by now.
    #[error("lost leadership: {0}; exiting so that two leaders never act at the same time")]
    LeadLost(&'static str),
    /// Another leader has written the record of a budget.
    #[error("{0}; exiting so that two leaders never grant from the same budget")]
    Deposed(#[from] RecordConflictError),
    /// A task of the leader ended although it should run until shutdown.
    #[error("{0} ended unexpectedly")]
    PartEnded(&'static str),
}

/// Runs the controller until `stop`.
pub async fn run(options: ControllerOptions, config: Config, stop: CancellationToken) -> Result<(), ControllerError> {
    let (metrics, exports) = TelemetryExports::start(&options)?;
    initialize_refusal_metrics(&metrics);
    initialize_webhook_metrics(&metrics);
    initialize_history_metrics(&metrics);
    let leads = metrics.leader.with_label_values(&[LEASE_NAME]);
    let readiness = Readiness::waiting("contact with the Kubernetes API");
    let probes = http::probes(readiness.clone());
    let probes = http::serve(listen(options.probe_address)?, probes, HttpLimits::default());
    let client = client(config.clone(), READ_TIMEOUT, &metrics)?;
    let scrapes = http::metrics(metrics.clone(), http::SCRAPE_WAIT);
    let scrapes = protect(scrapes, options.metrics_authentication, client.clone());
    let scrapes = serve_metrics(
        listen(options.metrics_address)?,
        scrapes,
        options.clone(),
        client.clone(),
    );
    let served = [tokio::spawn(probes), tokio::spawn(scrapes)];
    let process = ControllerProcess {
        client,
        config,
        metrics,
        readiness,
        options,
    };
    let result = Box::pin(process.run(&leads, &stop)).await;
    leads.set(0);
    // Probes are served until the end, so that the kubelet sees an orderly shutdown.
    served.iter().for_each(tokio::task::JoinHandle::abort);
    exports.end(&result).await;
    result
}

/// Serves the metrics: over TLS if readers must present a token, which is not to cross the network in clear text. Until there
/// is a certificate, connections wait to be accepted.
async fn serve_metrics(
    listener: TcpListener,
    scrapes: Router,
    options: ControllerOptions,
    client: Client,
) -> Infallible {
    let limits = HttpLimits::default();
    if options.metrics_authentication == MetricsAuthentication::None {
        return http::serve(listener, scrapes, limits).await;
    }
    let namespace = &options.settings.controller_namespace;
    let clock = Arc::new(Timestamp::now);
    let certificate = MetricsCertificate::obtain(client, namespace, options.metrics_hosts, clock).await;
    let tls = certificate.tls();
    tokio::select! {
        never = http::serve_tls(listener, scrapes, limits, tls) => never,
        never = certificate.maintain() => never,
    }
}

struct ControllerProcess {
    client: Client,
    config: Config,
    metrics: Arc<Metrics>,
    readiness: Readiness,
    options: ControllerOptions,
}

impl ControllerProcess {
    /// Runs from the first contact with the API server to the last.
    async fn run(&self, leads: &IntGauge, stop: &CancellationToken) -> Result<(), ControllerError> {
        let candidate = self.candidate()?;
        let won = stop.run_until_cancelled(async {
            // A label left over from before a restart of this container would route the link's traffic to a follower.
            self.set_label(false).await;
            match candidate {
                Some(candidate) => Some(Box::pin(candidate.win(|| self.readiness.set(None))).await),
                None => None,
            }
        });
        let Some(leadership) = won.await else { return Ok(()) };
        leads.set(1);
        self.readiness.set(Some("the caches to fill"));
        let leader = Leader {
            client: self.client.clone(),
            metrics: self.metrics.clone(),
            readiness: self.readiness.clone(),
            options: self.options.clone(),
        };
        let labelling = stop.child_token();
        let lead = async {
            let (led, _) = tokio::join!(
                async {
                    let led = Box::pin(leader.lead(None, stop)).await;
                    labelling.cancel();
                    led
                },
                labelling.run_until_cancelled(self.set_label(true)),
            );
            led
        };
        let result = tokio::select! {
            lost = hold(leadership.as_ref()) => return Err(ControllerError::LeadLost(lost)),
            result = lead => result,
        };
        self.release_leadership(leadership.as_ref()).await;
        result
    }

    fn candidate(&self) -> Result<Option<LeaderCandidate>, ControllerError> {
        let Some(election) = &self.options.election else {
            return Ok(None);
        };
        let writer = client(self.config.clone(), LEASE_TIMEOUT, &self.metrics)?;
        Ok(Some(LeaderCandidate {
            client: self.client.clone(),
            writer,
            namespace: self.options.settings.controller_namespace.clone(),
            identity: election.identity.clone(),
            times: election.times,
        }))
    }

    /// Sets or removes the leader label on this process's own pod; retries until it succeeds.
    async fn set_label(&self, leads: bool) {
        let Some(pod) = &self.options.pod_name else { return };
        let pods = self.pods();
        retry("label the controller's own pod", async || {
            set_leader_label(&pods, pod, leads).await
        })
        .await;
    }

    /// Removes the label and releases the Lease, so that another replica leads at once.
    async fn release_leadership(&self, leadership: Option<&Leadership>) {
        if let Some(pod) = &self.options.pod_name {
            let _ = timeout(RELEASE_TIMEOUT, set_leader_label(&self.pods(), pod, false)).await;
        }
        if let Some(leadership) = leadership {
            match timeout(RELEASE_TIMEOUT, leadership.release()).await {
                Ok(Ok(())) => tracing::info!("released the Lease"),
                Ok(Err(error)) => tracing::warn!(%error, "failed to release the Lease; it will expire"),
                Err(_) => tracing::warn!("timed out releasing the Lease; it will expire"),
            }
        }
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.options.settings.controller_namespace)
    }
}

/// Returns when leadership is lost; never returns without election.
async fn hold(leadership: Option<&Leadership>) -> &'static str {
    match leadership {
        Some(leadership) => leadership.hold().await,
        None => std::future::pending().await,
    }
}

/// Retries with backoff until it succeeds, and logs each error. `what` completes the sentence "failed to ...".
pub(super) async fn retry<T, E, F>(what: &str, mut attempt: impl FnMut() -> F) -> T
where
    F: Future<Output = Result<T, E>>,
    E: std::fmt::Display,
{
    let mut backoff = Backoff::new(Duration::from_millis(500), MAX_PAUSE);
    loop {
        match attempt().await {
            Ok(done) => return done,
            Err(error) => {
                let pause = backoff.next_wait();
                tracing::warn!(%error, "failed to {what}; retrying in {:.1} s", pause.as_secs_f64());
                tokio::time::sleep(pause).await;
            }
        }
    }
}

/// Binds the listener at startup, so that a port in use ends the process with a clear error.
pub(super) fn listen(address: SocketAddr) -> Result<TcpListener, ControllerError> {
    let bound = listener::bind(address).and_then(TcpListener::from_std);
    bound.map_err(|error| ControllerError::Listen { address, error })
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;
    use tokio::time::Instant;

    use super::*;
    use crate::otlp::Span;

    /// How long the exports of spans take to end after this, to a collector that never answers.
    async fn end_of_exports(traces: &TraceSettings, result: &Result<(), ControllerError>) -> Duration {
        let origin = TelemetryOrigin::controller("system", None);
        let (sink, spans) = ExportTask::of_spans(Some(traces.clone()), &origin);
        sink.push(Span::default());
        let exports = TelemetryExports {
            metrics: ExportTask::none(),
            spans,
            log: ExportTask::none(),
        };
        let began = Instant::now();
        exports.end(result).await;
        began.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn an_orderly_end_waits_for_the_last_exports_and_one_after_a_lost_lead_for_nothing() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let endpoint = |name: &str| (name == "OTEL_EXPORTER_OTLP_ENDPOINT").then(|| endpoint.clone());
        let traces = TraceSettings::from_variables(endpoint).unwrap().unwrap();
        let deposed = RecordConflictError {
            kind: "AgentBudget",
            namespace: "shop".into(),
            name: "team".into(),
            expected: 3,
            found: 4,
        };
        for lost in [ControllerError::LeadLost("the Lease was deleted"), deposed.into()] {
            assert_eq!(end_of_exports(&traces, &Err(lost)).await, Duration::ZERO);
        }
        for result in [Ok(()), Err(ControllerError::PartEnded("the ledger"))] {
            let took = end_of_exports(&traces, &result).await;
            assert!((EXPORT_TIMEOUT / 2..=EXPORT_TIMEOUT).contains(&took), "{took:?}");
        }
    }
}
