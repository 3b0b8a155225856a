//! A controller that leads without a cluster: no election, no probes, and an already open listener.
//!
//! Runs the same tasks as any leader. The caller provides the API and reads the reports of the pods.

use std::net::SocketAddr;
use std::sync::Arc;

use kube::Client;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::agent::ReconcilerSettings;
use super::auth::metrics_access::MetricsAuthentication;
use super::gates::webhook::initialize_webhook_metrics;
use super::history::initialize_history_metrics;
use super::leadership::election::LEASE_NAME;
use super::leadership::leader::{Leader, LeaderResources};
use super::link_service::initialize_refusal_metrics;
use super::pod_sessions::PodSessions;
use super::process::{ControllerError, ControllerOptions, ExportOptions};
use super::sensor::pod::SensorPodSettings;
use crate::api::NamespacedName;
use crate::telemetry::families::PerObject;
use crate::telemetry::http::Readiness;
use crate::telemetry::metrics::Metrics;

/// The dependencies of [`run`].
pub struct EmbeddedOptions {
    /// Client of the API.
    pub client: Client,
    /// Settings of the reconciler; `link_url` must lead to `listener`.
    pub settings: ReconcilerSettings,
    /// Settings of the pods of Sensors; their `link_url` must lead to `listener` too.
    pub sensor_pods: SensorPodSettings,
    /// Listener of the link. Its IP address is the host in the link's certificate.
    pub listener: TcpListener,
    /// The sessions of the pods; both values returned by [`PodSessions::new`].
    pub loops: (Arc<PodSessions>, mpsc::UnboundedReceiver<NamespacedName>),
    /// The metrics of the process, which the caller may serve.
    pub metrics: Arc<Metrics>,
}

/// Leads until `stop`.
pub async fn run(alone: EmbeddedOptions, stop: CancellationToken) -> Result<(), ControllerError> {
    let nowhere = SocketAddr::from(([127, 0, 0, 1], 0));
    let address = alone.listener.local_addr().map_err(|error| ControllerError::Listen {
        address: nowhere,
        error,
    })?;
    let metrics = alone.metrics;
    metrics.leader.with_label_values(&[LEASE_NAME]).set(1);
    initialize_refusal_metrics(&metrics);
    initialize_webhook_metrics(&metrics);
    initialize_history_metrics(&metrics);
    let leader = Leader {
        client: alone.client,
        metrics,
        readiness: Readiness::waiting("the caches to fill"),
        options: ControllerOptions {
            settings: alone.settings,
            sensor_pods: alone.sensor_pods,
            metrics_address: nowhere,
            metrics_authentication: MetricsAuthentication::None,
            metrics_hosts: Vec::new(),
            per_object: PerObject::Full,
            probe_address: nowhere,
            link_address: address,
            link_hosts: vec![address.ip().to_string()],
            page: None,
            pod_name: None,
            election: None,
            gate_webhook: None,
            history: None,
            telemetry: ExportOptions::default(),
        },
    };
    let ground = LeaderResources {
        loops: alone.loops,
        listener: alone.listener,
        page: None,
    };
    Box::pin(leader.lead(Some(ground), &stop)).await
}
