//! A controller that leads without a cluster around it: no election, no probes, a listener that is open already.
//!
//! Runs what any leader runs. Whoever starts it brings the API and reads what the loops say.

use std::net::SocketAddr;
use std::sync::Arc;

use kube::Client;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::agent::Settings;
use super::leading::{Ground, Leader};
use super::loops::{AgentKey, Loops};
use super::process::{Error, Options};
use super::sensor::pod::SensorPodSettings;
use super::serve::show_codes;
use crate::telemetry::http::Readiness;
use crate::telemetry::metrics::Metrics;

/// What it works with.
pub struct Alone {
    /// The API.
    pub client: Client,
    /// Settings of the reconciler; `link_url` leads to `listener`.
    pub settings: Settings,
    /// What is decided for the pods of Sensors; its `link_url` too.
    pub sensor_pods: SensorPodSettings,
    /// Where the link is served; by address, which its certificate names.
    pub listener: TcpListener,
    /// The live loops; both ends of [`Loops::new`].
    pub loops: (Arc<Loops>, mpsc::UnboundedReceiver<AgentKey>),
}

/// Leads until `stop`.
pub async fn run(alone: Alone, stop: CancellationToken) -> Result<(), Error> {
    let nowhere = SocketAddr::from(([127, 0, 0, 1], 0));
    let address = alone.listener.local_addr().map_err(|error| Error::Listen {
        address: nowhere,
        error,
    })?;
    let metrics = Arc::new(Metrics::new()?);
    show_codes(&metrics);
    let leader = Leader {
        client: alone.client,
        metrics,
        readiness: Readiness::waiting("the caches to fill"),
        options: Options {
            settings: alone.settings,
            sensor_pods: alone.sensor_pods,
            metrics_address: nowhere,
            probe_address: nowhere,
            link_address: address,
            link_hosts: vec![address.ip().to_string()],
            pod_name: None,
            election: None,
        },
    };
    let ground = Ground {
        loops: alone.loops,
        listener: alone.listener,
    };
    Box::pin(leader.lead(Some(ground), &stop)).await
}
