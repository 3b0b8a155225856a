//! The sensor pod: runs the source of one Sensor for all its receivers.
//!
//! Owns the outbox: an arrival is on disk, with all its effects, before it is acknowledged to its sender, and it leaves
//! the outbox once each receiver has acknowledged it. Reaches its receivers only through the link, and holds no
//! Kubernetes token.

pub mod deliverer;
mod event_loop;
mod health;
pub mod ingest;
pub mod outbox;
mod source;
#[cfg(test)]
mod test_directory;
#[cfg(test)]
mod text_tests;
mod uplink;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use tokio::net::UnixListener;
use tokio::sync::watch;

use self::deliverer::{EventDeliverer, WatchedOutbox};
use self::event_loop::SensorEventLoop;
use self::health::LoopLiveness;
use self::ingest::EventIngester;
use self::outbox::{EventReceiver, Outbox, OutboxError};
use self::source::SourceContext;
use self::uplink::SensorUplink;
use crate::egress::{AddressPolicy, Cidr, CidrError};
use crate::link::client::LinkClient;
use crate::link::deliveries::ReceiverTerms;
use crate::link::pod::SensorPodConfig;
use crate::otlp::TelemetryOrigin;
use crate::sensor_pipeline::SpecError;
use crate::sensor_pipeline::rules::SensorRules;
use crate::telemetry::log_export::ProcessLog;

/// What the process of a sensor pod is started with.
#[derive(Clone, Debug)]
pub struct SensorPodOptions {
    pub config: SensorPodConfig,
    pub outbox_dir: PathBuf,
    /// Directory with one file per header of the Secret.
    pub headers_dir: PathBuf,
    /// Directory with the certificate authority that the source trusts.
    pub ca_dir: PathBuf,
    /// Directory with the client certificate of the source.
    pub certificate_dir: PathBuf,
    /// File with the webhook's key.
    pub key_file: PathBuf,
    /// Address that the webhook listens on.
    pub webhook_address: SocketAddr,
    /// Name of the abstract socket that serves probes.
    pub health_socket: String,
    /// File with the link's token.
    pub link_token_file: PathBuf,
    /// File with the link's CA bundle.
    pub link_ca_file: PathBuf,
    /// The log of the process, if it has one of its own.
    pub log: ProcessLog,
}

/// Time at the end of the pod for the last lines of the log.
const SHUTDOWN_LOGS_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(thiserror::Error, Debug)]
pub enum SensorError {
    /// The outbox cannot be used.
    #[error(transparent)]
    Outbox(#[from] OutboxError),
    /// The rules do not compile; the controller creates no pod for such a Sensor.
    #[error(transparent)]
    Rules(#[from] SpecError),
    /// A configured address range is invalid.
    #[error(transparent)]
    Ranges(#[from] CidrError),
}

/// Runs the source, stores and delivers its events until `end`, and exports the log if it is to be.
pub async fn run(options: SensorPodOptions, end: impl Future<Output = ()>) -> Result<(), SensorError> {
    let SensorPodConfig { namespace, terms, .. } = &options.config;
    let origin = TelemetryOrigin::sensor((namespace, &terms.name, &terms.uid));
    let (_, lines) = options.log.clone().start(&origin);
    let ended = run_source(options, end).await;
    lines.finish(SHUTDOWN_LOGS_TIMEOUT).await;
    ended
}

async fn run_source(options: SensorPodOptions, end: impl Future<Output = ()>) -> Result<(), SensorError> {
    let terms = options.config.terms.clone();
    let rules = SensorRules::compile(&terms.name, &terms.spec)?;
    let policy = AddressPolicy::new(
        ranges(&options.config.allowed_ranges)?,
        ranges(&options.config.denied_ranges)?,
    );
    let (mut outbox, restored) = Outbox::open(&options.outbox_dir, &terms.uid, Timestamp::now())?;
    outbox.fit_volume(source::bytes(&terms.spec.storage.size));
    let outbox = WatchedOutbox::share(outbox, restored.last);
    let client = Arc::new(LinkClient::new(
        &options.config.link_url,
        options.link_ca_file,
        options.link_token_file,
    ));
    let uplink = SensorUplink::new(Arc::clone(&client));
    // The known receivers stay until the controller sends others; a new outbox knows none.
    let known = outbox.lock().receivers()?;
    let known: Vec<_> = known.into_iter().map(|(receiver, _)| terms_of(receiver)).collect();
    let receivers = watch::Sender::new((!known.is_empty()).then_some(known));
    let deliverer = EventDeliverer {
        outbox: Arc::clone(&outbox),
        road: client,
        sensor: terms.uid.clone(),
        name: terms.name.clone(),
    };
    let mut keeper = EventIngester::new(Arc::clone(&outbox), restored, rules);
    keeper.set_source(&source::identity(&terms.spec.source))?;
    let liveness = LoopLiveness::default();
    let health = health::listen(&options.health_socket).map_err(|error| {
        // In `agentloop run`, processes share one network and thus this name; there are no probes there.
        tracing::debug!(%error, "failed to listen for probes; none will be answered");
    });
    let hearing = SensorEventLoop {
        liveness: liveness.clone(),
        keeper,
        outbox,
        sources: SourceContext {
            headers_dir: options.headers_dir,
            ca_dir: options.ca_dir,
            certificate_dir: options.certificate_dir,
            key_file: options.key_file,
            webhook_address: options.webhook_address,
            policy: Arc::new(policy),
        },
        terms,
        directives: uplink.directives(),
        receivers: receivers.clone(),
        report: uplink.report(),
    };
    tracing::info!(sensor = hearing.terms.name, "listening");
    tokio::select! {
        error = deliverer.run(receivers.subscribe()) => return Err(error.into()),
        error = hearing.run() => return Err(error.into()),
        () = uplink.run() => {}
        () = probes(health.ok(), liveness) => {}
        () = end => {}
    }
    tracing::info!("ended");
    Ok(())
}

async fn probes(listener: Option<UnixListener>, liveness: LoopLiveness) {
    match listener {
        Some(listener) => health::serve(listener, liveness).await,
        None => std::future::pending().await,
    }
}

fn terms_of(EventReceiver { uid, name }: EventReceiver) -> ReceiverTerms {
    ReceiverTerms { uid, name, revision: 0 }
}

fn ranges(texts: &[String]) -> Result<Vec<Cidr>, CidrError> {
    texts.iter().map(|text| text.parse()).collect()
}
