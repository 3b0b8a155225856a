//! The gateway: the worker's only access to the network. Holds the provider key and the link token, and meters every call.
//!
//! Owns the store of calls and their usage, on which the status is based, and the client side of the link. Contains no
//! logic of loops: the worker decides when to call, and the controller whether the pod may.

mod budget;
mod call_durations;
mod call_spans;
mod calls;
mod deliveries;
mod failures;
mod headers_secret;
mod http;
mod images;
mod in_flight;
mod link_state;
mod mcp_proxy;
mod model_field;
mod raw_object;
mod redaction;
mod request;
mod requested_tasks;
mod server;
mod shutdown_retry;
mod store;
mod task_responses;
#[cfg(test)]
mod text_tests;
mod uplink;
mod upstream;
mod worker_queue;

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::watch;

use self::budget::GatewayBudget;
use self::call_spans::CallSpans;
use self::calls::ModelCalls;
use self::deliveries::DeliveryQueue;
use self::link_state::LinkState;
use self::mcp_proxy::McpProxy;
use self::model_field::ModelField;
use self::requested_tasks::RequestedTasks;
use self::server::GatewayState;
use self::store::{CallStore, ModelNames};
use self::uplink::{ExportedTelemetry, GatewayUplink};
use self::upstream::{ModelUpstream, ModelUpstreams, UpstreamConfig};
use crate::api::AgentSpec;
use crate::api::server_tls::{LIGHT_MODEL_CA, MODEL_CA};
use crate::egress::{AddressPolicy, Cidr, CidrError};
use crate::link::client::LinkClient;
use crate::link::messages::PricedModel;
use crate::link::pod::{AgentEgress, PodConfig, PrivateAddresses};
use crate::otlp::{ExportTask, TelemetryOrigin, TraceSettings};
use crate::support::clock::ClockReading;
use crate::support::unix_socket;
use crate::telemetry::agent_spans;
use crate::telemetry::log_export::ProcessLog;

pub use self::mcp_proxy::ServerDirs;
pub use self::store::CallStoreError;
use self::task_responses::ResponseSender;

/// Time for calls in flight when the pod ends. The worker has drained before, and 5 s remain for the pod in all.
const CLOSE_GRACE: Duration = Duration::from_secs(2);
/// Time for returning leases, sending the last report and exporting the last spans, concurrently.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_millis(2_500);
/// Time for exporting the last lines of the log, which are those about all of this: the rest of the pod's 5 s.
const SHUTDOWN_LOGS_TIMEOUT: Duration = Duration::from_millis(500);

#[derive(Clone, Debug)]
pub struct GatewayOptions {
    pub config: PodConfig,
    pub socket: PathBuf,
    pub record_dir: PathBuf,
    pub script_file: PathBuf,
    pub api_key_file: PathBuf,
    pub light_script_file: PathBuf,
    pub light_api_key_file: PathBuf,
    /// Headers, sockets and trusted certificates of servers.
    pub server_dirs: ServerDirs,
    pub link_token_file: PathBuf,
    pub link_ca_file: PathBuf,
    /// Time without contact after which no new call is made.
    pub run_lease: Duration,
    /// How traces are exported; `None`: they are not.
    pub traces: Option<TraceSettings>,
    /// The log of the process, if it has one of its own.
    pub log: ProcessLog,
}

/// Why a gateway cannot start.
#[derive(thiserror::Error, Debug)]
pub enum GatewayError {
    #[error(transparent)]
    Store(#[from] CallStoreError),
    /// The address ranges configured for the pod are invalid.
    #[error(transparent)]
    Ranges(#[from] CidrError),
    #[error("the socket {path} cannot be served: {source}")]
    Socket { path: PathBuf, source: std::io::Error },
}

/// Serves until `end`, then finishes the calls in flight, sends a last report and returns.
pub async fn run(options: GatewayOptions, end: impl Future<Output = ()>) -> Result<(), GatewayError> {
    let spec = &options.config.spec;
    let store = Arc::new(CallStore::open(
        &options.record_dir,
        ModelNames::from_spec(spec),
        Timestamp::now(),
    )?);
    let contact = Arc::new(LinkState::new(options.run_lease, ClockReading::now()));
    let policy = address_policy(&options.config.egress)?;
    let upstreams = upstreams(&options, &policy);
    let client = Arc::new(LinkClient::new(
        &options.config.link_url,
        options.link_ca_file.clone(),
        options.link_token_file.clone(),
    ));
    let budget = Arc::new(GatewayBudget::new(
        Arc::clone(&store),
        Arc::clone(&contact),
        Arc::clone(&client),
        options.config.epoch,
        ModelNames::from_spec(spec),
    ));
    let exports = PodExports::start(&options);
    let exported = exports.sinks.clone();
    let calls = Arc::new(ModelCalls::new(
        store,
        Arc::clone(&budget),
        Arc::clone(&contact),
        upstreams,
        CallSpans::new(&options.config, exported.spans.clone(), exported.has_ids()),
    ));
    let deliveries = Arc::new(DeliveryQueue::new(
        Arc::clone(&client),
        &options.config.uid,
        options.config.epoch,
    ));
    let tasks = Arc::new(RequestedTasks::new(
        Arc::clone(&client),
        &options.config.uid,
        options.config.epoch,
    ));
    let loop_report = watch::Sender::new(None);
    let link = (Arc::clone(&client), options.config.epoch);
    let uplink = GatewayUplink {
        epoch: options.config.epoch,
        models: priced_models(spec),
        client,
        contact: Arc::clone(&contact),
        calls: Arc::clone(&calls),
        budget: Arc::clone(&budget),
        deliveries: Arc::clone(&deliveries),
        tasks: Arc::clone(&tasks),
        loop_report: loop_report.subscribe(),
        exported: exported.clone(),
    };
    let keep = Arc::clone(&budget).maintain_leases(loop_report.subscribe());
    let socket_error = |source| GatewayError::Socket {
        path: options.socket.clone(),
        source,
    };
    let listener = unix_socket::bind(&options.socket).map_err(socket_error)?;
    let mcp = mcp_proxy(&options, &contact, &policy);
    let responses = Arc::new(ResponseSender::new(&options.config, &options.server_dirs, &policy));
    let router = server::router(GatewayState {
        calls: Arc::clone(&calls),
        contact,
        mcp: Arc::new(mcp),
        responses,
        link,
        deliveries,
        tasks,
        loop_report,
        exported,
    });
    let serve = async { axum::serve(listener, router).await };
    // The socket is served even when fenced: the worker has to learn about it.
    let speak = async {
        uplink.run().await;
        std::future::pending::<()>().await;
    };
    tracing::info!(agent = %options.config.name, epoch = options.config.epoch, "serving");
    tokio::select! {
        served = serve => return served.map_err(socket_error),
        () = calls.enforce_stops() => {}
        () = keep => {}
        () = speak => {}
        () = async { end.await; calls.close(CLOSE_GRACE).await } => {}
    }
    tokio::join!(
        budget.return_leases(SHUTDOWN_TIMEOUT),
        uplink.last_report(SHUTDOWN_TIMEOUT),
        exports.spans.finish(SHUTDOWN_TIMEOUT),
    );
    tracing::info!("ended");
    exports.lines.finish(SHUTDOWN_LOGS_TIMEOUT).await;
    Ok(())
}

fn mcp_proxy(options: &GatewayOptions, contact: &Arc<LinkState>, policy: &Arc<AddressPolicy>) -> McpProxy {
    McpProxy::new(
        &options.config.spec.tools.all_servers(),
        &options.server_dirs,
        vec![options.api_key_file.clone(), options.light_api_key_file.clone()],
        Arc::clone(contact),
        policy,
    )
}

/// The exports of the pod's telemetry.
struct PodExports {
    sinks: ExportedTelemetry,
    spans: ExportTask,
    lines: ExportTask,
}

impl PodExports {
    fn start(options: &GatewayOptions) -> Self {
        let config = &options.config;
        let names = (config.namespace.as_str(), config.name.as_str(), config.uid.as_str());
        let origin = TelemetryOrigin::agent(&agent_spans::identity(names, &config.spec.model));
        let (span_sink, spans) = ExportTask::of_spans(options.traces.clone(), &origin);
        let (log_sink, lines) = options.log.clone().start(&origin);
        let sinks = ExportedTelemetry {
            spans: span_sink,
            logs: log_sink,
        };
        Self { sinks, spans, lines }
    }
}

/// The models of a spec with their prices there.
fn priced_models(spec: &AgentSpec) -> Vec<PricedModel> {
    let models = [Some(&spec.model), spec.light_model.as_ref()];
    models
        .into_iter()
        .flatten()
        .map(|model| PricedModel {
            name: model.name.clone(),
            price: model.price.clone(),
        })
        .collect()
}

fn address_policy(egress: &AgentEgress) -> Result<Arc<AddressPolicy>, CidrError> {
    let ranges = |texts: &[String]| texts.iter().map(|text| text.parse()).collect::<Result<Vec<Cidr>, _>>();
    Ok(Arc::new(AddressPolicy::of_agents(
        ranges(&egress.allowed_ranges)?,
        ranges(&egress.denied_ranges)?,
        egress.private_addresses == PrivateAddresses::Allow,
    )))
}

fn upstreams(options: &GatewayOptions, policy: &Arc<AddressPolicy>) -> ModelUpstreams {
    let spec = &options.config.spec;
    let agent_uid = &options.config.uid;
    let ca_dir = &options.server_dirs.ca;
    let light = |model| {
        ModelUpstream::new(&UpstreamConfig {
            field: ModelField::Light,
            agent_uid,
            model,
            key_file: &options.light_api_key_file,
            ca_dir: &ca_dir.join(LIGHT_MODEL_CA),
            script_file: &options.light_script_file,
            policy,
        })
    };
    ModelUpstreams {
        main: ModelUpstream::new(&UpstreamConfig {
            field: ModelField::Main,
            agent_uid,
            model: &spec.model,
            key_file: &options.api_key_file,
            ca_dir: &ca_dir.join(MODEL_CA),
            script_file: &options.script_file,
            policy,
        }),
        light: spec.light_model.as_ref().map(light),
    }
}
