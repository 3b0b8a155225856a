//! The sensor pod: one Sensor that listens to the world for all its receivers.
//!
//! Owns the outbox: what was heard is on disk, with all that it does, before anybody is told that it was taken; and it
//! leaves the outbox once each receiver has it. Knows its receivers only through the link, and holds no Kubernetes token.

pub mod deliverer;
mod event_loop;
mod health;
pub mod ingest;
pub mod outbox;
mod source;
mod uplink;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

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
use crate::link::client::LinkClient;
use crate::link::deliveries::ReceiverTerms;
use crate::link::pod::SensorPodConfig;
use crate::sensing::SpecError;
use crate::sensing::address::{AddressPolicy, Cidr, CidrError};
use crate::sensing::rules::SensorRules;

/// What a sensor pod runs with.
#[derive(Clone, Debug)]
pub struct SensorPodOptions {
    /// Configuration of the pod.
    pub config: SensorPodConfig,
    /// Directory of the outbox.
    pub outbox_dir: PathBuf,
    /// Directory with a file for each header of a Secret.
    pub headers_dir: PathBuf,
    /// Directory with the authority that a source trusts.
    pub ca_dir: PathBuf,
    /// Directory with the certificate that a source is known by.
    pub certificate_dir: PathBuf,
    /// File of the webhook's key.
    pub key_file: PathBuf,
    /// Where the webhook listens.
    pub webhook_address: SocketAddr,
    /// Name of the abstract socket on which probes are answered.
    pub health_socket: String,
    /// File of the link's token.
    pub link_token_file: PathBuf,
    /// File of the link's CA bundle.
    pub link_ca_file: PathBuf,
}

/// Why a sensor pod cannot run.
#[derive(thiserror::Error, Debug)]
pub enum SensorError {
    /// Its outbox.
    #[error(transparent)]
    Outbox(#[from] OutboxError),
    /// Its rules; the controller makes no pod of such a Sensor.
    #[error(transparent)]
    Rules(#[from] SpecError),
    /// The ranges of addresses that its operator configured.
    #[error(transparent)]
    Ranges(#[from] CidrError),
}

/// Listens, keeps and delivers until `end`.
pub async fn run(options: SensorPodOptions, end: impl Future<Output = ()>) -> Result<(), SensorError> {
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
    // Those that are known go on until the controller says otherwise; a new outbox knows of none.
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
    let pulse = LoopLiveness::default();
    let health = health::listen(&options.health_socket).map_err(|error| {
        // Processes that share a network, as in `agentloop run`, share these names; nobody probes them.
        tracing::debug!(%error, "no probe will be answered");
    });
    let hearing = SensorEventLoop {
        pulse: pulse.clone(),
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
        () = probes(health.ok(), pulse) => {}
        () = end => {}
    }
    tracing::info!("ended");
    Ok(())
}

async fn probes(listener: Option<UnixListener>, pulse: LoopLiveness) {
    match listener {
        Some(listener) => health::serve(listener, pulse).await,
        None => std::future::pending().await,
    }
}

fn terms_of(EventReceiver { uid, name }: EventReceiver) -> ReceiverTerms {
    ReceiverTerms { uid, name, revision: 0 }
}

fn ranges(texts: &[String]) -> Result<Vec<Cidr>, CidrError> {
    texts.iter().map(|text| text.parse()).collect()
}
