//! The controller's process: wait for the lead, lead, and end well.
//!
//! Wires election, certificates, link, reconciler and telemetry; owns their order at start and at the end. A lost Lease
//! ends the process at once: whatever this replica still believes may be wrong by then.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, Config};
use prometheus::IntGauge;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::agent::ReconcilerSettings;
use super::budget::record_writer::RecordConflictError;
use super::connection::{READ_TIMEOUT, client};
use super::election::{LEASE_NAME, LeaderCandidate, Leadership, LeaseTimes, set_leader_label};
use super::leader::Leader;
use super::link_service::initialize_refusal_metrics;
use super::sensor::pod::SensorPodSettings;
use crate::telemetry::http::{self, HttpLimits, Readiness};
use crate::telemetry::metrics::Metrics;

/// Longest silence on a connection for requests about the Lease, which must fail early enough for another try.
const LEASE_TIMEOUT: Duration = Duration::from_secs(3);
/// Longest pause between two attempts to reach the API server.
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// How long each of the last requests (label, Lease) may take.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// What the command line decides.
#[derive(Clone, Debug)]
pub struct ControllerOptions {
    /// Settings of the reconciler.
    pub settings: ReconcilerSettings,
    /// What is decided for the pods of Sensors.
    pub sensor_pods: SensorPodSettings,
    /// Where metrics are served.
    pub metrics_address: SocketAddr,
    /// Where probes are served.
    pub probe_address: SocketAddr,
    /// Where the link is served.
    pub link_address: SocketAddr,
    /// Names and addresses in the link's certificate.
    pub link_hosts: Vec<String>,
    /// Name of this process's pod; absent outside a cluster.
    pub pod_name: Option<String>,
    /// Leader election, under this identity; absent: this process leads alone.
    pub election: Option<ElectionOptions>,
}

/// How this process stands for election.
#[derive(Clone, Debug)]
pub struct ElectionOptions {
    /// Who it is: the pod's name.
    pub identity: String,
    /// How long the Lease is valid.
    pub times: LeaseTimes,
}

/// Why the controller ended before it was told to.
#[derive(thiserror::Error, Debug)]
pub enum ControllerError {
    /// A port is taken, or the address is not of this host.
    #[error("cannot listen on {address}: {error}")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why.
        error: std::io::Error,
    },
    /// The configuration of the client is not usable.
    #[error("Kubernetes client: {0}")]
    Client(#[from] kube::Error),
    /// Metrics that contradict each other.
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    /// Somebody else may lead by now.
    #[error("the lead is lost: {0}; this process ends, so that it does nothing beside another leader")]
    LeadLost(&'static str),
    /// Another leader has written a budget's record.
    #[error("{0}; this process ends, so that it grants nothing beside it")]
    Deposed(#[from] RecordConflictError),
    /// A part of the leader ended by itself.
    #[error("{0} ended unexpectedly")]
    PartEnded(&'static str),
}

/// Runs the controller until `stop`.
pub async fn run(options: ControllerOptions, config: Config, stop: CancellationToken) -> Result<(), ControllerError> {
    let metrics = Arc::new(Metrics::new()?);
    initialize_refusal_metrics(&metrics);
    let leads = metrics.leader.with_label_values(&[LEASE_NAME]);
    let readiness = Readiness::waiting("contact with the Kubernetes API");
    let probes = http::probes(readiness.clone());
    let probes = http::serve(listen(options.probe_address)?, probes, HttpLimits::default());
    let scrapes = http::metrics(metrics.clone(), http::SCRAPE_WAIT);
    let scrapes = http::serve(listen(options.metrics_address)?, scrapes, HttpLimits::default());
    let served = [tokio::spawn(probes), tokio::spawn(scrapes)];
    let process = ControllerProcess {
        client: client(config.clone(), READ_TIMEOUT, &metrics)?,
        config,
        metrics,
        readiness,
        options,
    };
    let result = Box::pin(process.run(&leads, &stop)).await;
    leads.set(0);
    // Probes answer until the very end.
    served.iter().for_each(tokio::task::JoinHandle::abort);
    result
}

struct ControllerProcess {
    client: Client,
    config: Config,
    metrics: Arc<Metrics>,
    readiness: Readiness,
    options: ControllerOptions,
}

impl ControllerProcess {
    /// From the first contact with the API server to the last.
    async fn run(&self, leads: &IntGauge, stop: &CancellationToken) -> Result<(), ControllerError> {
        let candidate = self.candidate()?;
        let won = stop.run_until_cancelled(async {
            // A label from an earlier life of this pod would draw the link's traffic to a follower.
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

    /// Sets or removes the leader's label on this process's own pod, however long it takes.
    async fn set_label(&self, leads: bool) {
        let Some(pod) = &self.options.pod_name else { return };
        let pods = self.pods();
        retry("label the controller's own pod", async || {
            set_leader_label(&pods, pod, leads).await
        })
        .await;
    }

    /// Gives label and Lease back, so that another replica leads at once.
    async fn release_leadership(&self, leadership: Option<&Leadership>) {
        if let Some(pod) = &self.options.pod_name {
            let _ = timeout(RELEASE_TIMEOUT, set_leader_label(&self.pods(), pod, false)).await;
        }
        if let Some(leadership) = leadership {
            match timeout(RELEASE_TIMEOUT, leadership.release()).await {
                Ok(Ok(())) => tracing::info!("the Lease is released"),
                Ok(Err(error)) => tracing::warn!(%error, "the Lease is not released; it expires by itself"),
                Err(_) => tracing::warn!("the Lease is not released in time; it expires by itself"),
            }
        }
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.options.settings.controller_namespace)
    }
}

/// Ends when the lead is lost; never without election.
async fn hold(leadership: Option<&Leadership>) -> &'static str {
    match leadership {
        Some(leadership) => leadership.hold().await,
        None => std::future::pending().await,
    }
}

/// Tries until it works, and says why it does not.
pub(super) async fn retry<T, E, F>(what: &str, mut attempt: impl FnMut() -> F) -> T
where
    F: Future<Output = Result<T, E>>,
    E: std::fmt::Display,
{
    let mut pause = Duration::from_millis(250);
    loop {
        match attempt().await {
            Ok(done) => return done,
            Err(error) => {
                pause = (pause * 2).min(MAX_PAUSE);
                tracing::warn!(%error, "cannot {what}; trying again in {:.1} s", pause.as_secs_f64());
                tokio::time::sleep(pause).await;
            }
        }
    }
}

/// Opens a listener at once, so that a taken port ends the process with a clear word.
pub(super) fn listen(address: SocketAddr) -> Result<tokio::net::TcpListener, ControllerError> {
    let listen = || {
        let listener = std::net::TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        tokio::net::TcpListener::from_std(listener)
    };
    listen().map_err(|error| ControllerError::Listen { address, error })
}
