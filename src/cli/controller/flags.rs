//! The flags of `agentloop controller`: names, environment variables, defaults, and the values that a flag accepts on its own.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{ArgAction, Args as ClapArgs};
use k8s_openapi::api::core::v1::ResourceRequirements;

use crate::controller::auth::metrics_access::MetricsAuthentication;
use crate::controller::policy::{ANY, AgentPrices, MIN_OUTPUT_TOKENS};
use crate::controller::sensor::pod::SensorPodTemplate;
use crate::egress::Cidr;
use crate::link::pod::PrivateAddresses;
use crate::telemetry::families::PerObject;

/// Default resources of a gateway.
const GATEWAY_RESOURCES: &str = r#"{"requests":{"cpu":"10m","memory":"32Mi"},"limits":{"memory":"128Mi"}}"#;
/// Default resources of a worker.
const WORKER_RESOURCES: &str = r#"{"requests":{"cpu":"10m","memory":"64Mi"},"limits":{"memory":"256Mi"}}"#;
/// Default resources of a sensor pod.
const SENSOR_RESOURCES: &str = r#"{"requests":{"cpu":"10m","memory":"32Mi"},"limits":{"memory":"128Mi"}}"#;

/// Flags of `agentloop controller`.
#[derive(ClapArgs, Debug)]
pub(in crate::cli) struct ControllerArgs {
    /// Image of the Agents' pods, that of the controller.
    #[arg(long, env = "AGENTLOOP_IMAGE")]
    pub(super) image: String,
    /// `imagePullPolicy` of the Agents' pods; defaults to that of the cluster.
    #[arg(long, env = "AGENTLOOP_IMAGE_PULL_POLICY", value_parser = ["Always", "IfNotPresent", "Never"])]
    pub(super) image_pull_policy: Option<String>,
    /// Name of this pod (downward API); required for leader election.
    #[arg(long, env = "POD_NAME")]
    pub(super) pod_name: Option<String>,
    /// Namespace of this pod (downward API); defaults to the namespace of the kubeconfig.
    #[arg(long, env = "POD_NAMESPACE")]
    pub(super) pod_namespace: Option<String>,
    /// Comma-separated namespaces whose Agents are reconciled; empty: all.
    #[arg(long, env = "AGENTLOOP_WATCH_NAMESPACES", value_delimiter = ',')]
    pub(super) watch_namespaces: Vec<String>,
    /// Maximum number of concurrent reconciles of Agents.
    #[arg(long, env = "AGENTLOOP_WORKERS", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(super) workers: u16,
    /// Resources of the gateway container, as JSON.
    #[arg(long, env = "AGENTLOOP_GATEWAY_RESOURCES", default_value = GATEWAY_RESOURCES, value_parser = resources)]
    pub(super) gateway_resources: ResourceRequirements,
    /// Resources of the worker container of Agents without spec.pod.resources, as JSON.
    #[arg(long, env = "AGENTLOOP_WORKER_RESOURCES", default_value = WORKER_RESOURCES, value_parser = resources)]
    pub(super) worker_resources: ResourceRequirements,
    /// Resources of the sensor pods, as JSON.
    #[arg(long, env = "AGENTLOOP_SENSOR_RESOURCES", default_value = SENSOR_RESOURCES, value_parser = resources)]
    pub(super) sensor_resources: ResourceRequirements,
    /// Comma-separated Secrets with which the images of the Agents' pods are pulled, besides those of an Agent.
    #[arg(long, env = "AGENTLOOP_AGENT_IMAGE_PULL_SECRETS", value_delimiter = ',')]
    pub(super) agent_image_pull_secrets: Vec<String>,
    /// Scheduling, pull secrets and annotations of the sensor pods, as JSON: nodeSelector, tolerations, affinity,
    /// priorityClassName, imagePullSecrets and podAnnotations.
    #[arg(long, env = "AGENTLOOP_SENSOR_POD", default_value = "{}", value_parser = sensor_pod_template)]
    pub(super) sensor_pod: SensorPodTemplate,
    /// Secret in the namespaces of Agents with the headers of OTLP requests under the key `headers`; empty: none.
    #[arg(long, env = "AGENTLOOP_OTLP_HEADERS_SECRET")]
    pub(super) otlp_headers_secret: Option<String>,
    /// Secret in the namespaces of Agents and Sensors with the authorities of the OTLP collector, in PEM, under the key
    /// `ca.crt`; empty: none.
    #[arg(long, env = "AGENTLOOP_OTLP_CA_SECRET")]
    pub(super) otlp_ca_secret: Option<String>,
    /// Comma-separated CIDRs to which Sensors may connect although they are blocked by default, such as 10.1.0.0/16.
    #[arg(long, env = "AGENTLOOP_EGRESS_ALLOWED_CIDRS", value_delimiter = ',', value_parser = range)]
    pub(super) egress_allowed_cidrs: Vec<String>,
    /// Comma-separated further CIDRs to which Sensors may not connect.
    #[arg(long, env = "AGENTLOOP_EGRESS_DENIED_CIDRS", value_delimiter = ',', value_parser = range)]
    pub(super) egress_denied_cidrs: Vec<String>,
    /// Whether Agents may connect to private addresses, which pods and Services usually have: Allow or Deny.
    #[arg(long, env = "AGENTLOOP_AGENT_EGRESS_PRIVATE_ADDRESSES", default_value_t = PrivateAddresses::Allow)]
    pub(super) agent_egress_private_addresses: PrivateAddresses,
    /// Comma-separated CIDRs to which Agents may connect although they are blocked by default.
    #[arg(long, env = "AGENTLOOP_AGENT_EGRESS_ALLOWED_CIDRS", value_delimiter = ',', value_parser = range)]
    pub(super) agent_egress_allowed_cidrs: Vec<String>,
    /// Comma-separated further CIDRs to which Agents may not connect.
    #[arg(long, env = "AGENTLOOP_AGENT_EGRESS_DENIED_CIDRS", value_delimiter = ',', value_parser = range)]
    pub(super) agent_egress_denied_cidrs: Vec<String>,
    /// URL at which pods reach the link; defaults to port 8443 of the Service `agentloop-link` in this namespace.
    #[arg(long, env = "AGENTLOOP_LINK_URL")]
    pub(super) link_url: Option<String>,
    /// Listen address of the link.
    #[arg(long, env = "AGENTLOOP_LINK_ADDRESS", default_value = "[::]:8443")]
    pub(super) link_address: SocketAddr,
    /// Serve a page with loops, their usage and last turns at this address over HTTPS, for users with a token of the
    /// Kubernetes API; absent: there is no page.
    #[arg(long, env = "AGENTLOOP_PAGE_ADDRESS")]
    pub(super) page_address: Option<SocketAddr>,
    /// Comma-separated host names in the certificate of the page, besides localhost.
    #[arg(long, env = "AGENTLOOP_PAGE_HOSTS", value_delimiter = ',', requires = "page_address")]
    pub(super) page_hosts: Vec<String>,
    /// Listen address of /metrics.
    #[arg(long, env = "AGENTLOOP_METRICS_ADDRESS", default_value = "[::]:8080")]
    pub(super) metrics_address: SocketAddr,
    /// What a reader of /metrics must present: nothing, or a token whose user may get the URL /metrics.
    #[arg(long, value_enum, env = "AGENTLOOP_METRICS_AUTHENTICATION", default_value = "None")]
    pub(super) metrics_authentication: MetricsAuthentication,
    /// Comma-separated host names in the certificate of /metrics, besides localhost and the name of the pod. With
    /// --metrics-authentication Token, /metrics is served over HTTPS only.
    #[arg(long, env = "AGENTLOOP_METRICS_HOSTS", value_delimiter = ',')]
    pub(super) metrics_hosts: Vec<String>,
    /// Series of single Agents, AgentBudgets and Sensors in /metrics.
    #[arg(long, value_enum, env = "AGENTLOOP_METRICS_PER_OBJECT", default_value = "Full")]
    pub(super) metrics_per_object: PerObject,
    /// Listen address of /healthz and /readyz.
    #[arg(long, env = "AGENTLOOP_PROBE_ADDRESS", default_value = "[::]:8081")]
    pub(super) probe_address: SocketAddr,
    /// Use leader election, so that several replicas may run; false: this process always leads.
    #[arg(
        long, env = "AGENTLOOP_LEADER_ELECT", action = ArgAction::Set, default_value_t = true,
        num_args = 0..=1, default_missing_value = "true"
    )]
    pub(super) leader_elect: bool,
    /// Validity of the leader election Lease in seconds, after which a failed leader is replaced.
    #[arg(long, env = "AGENTLOOP_LEASE_DURATION_SECONDS", default_value_t = 15)]
    pub(super) lease_duration_seconds: u32,
    /// Interval in seconds at which the leader renews the Lease.
    #[arg(long, env = "AGENTLOOP_LEASE_RENEW_SECONDS", default_value_t = 5)]
    pub(super) lease_renew_seconds: u32,
    /// JSON file with the prices of models: {"<model>": {"inputPerMillion": "3.00", "outputPerMillion": "15.00"}}.
    #[arg(long, env = "AGENTLOOP_PRICES_FILE")]
    pub(super) prices_file: Option<PathBuf>,
    /// Make no calls for an Agent that neither matches nor names an AgentBudget.
    #[arg(
        long, env = "AGENTLOOP_REQUIRE_BUDGET", action = ArgAction::Set, default_value_t = false,
        num_args = 0..=1, default_missing_value = "true"
    )]
    pub(super) require_budget: bool,
    /// Whether the price in an Agent is used if the prices file has none: Allow or Deny.
    #[arg(long, env = "AGENTLOOP_AGENT_PRICES", default_value_t = AgentPrices::Allow)]
    pub(super) agent_prices: AgentPrices,
    /// Minimum number of output tokens to which the answer of a call is reduced when a limit has little left.
    #[arg(
        long, env = "AGENTLOOP_MIN_OUTPUT_TOKENS", default_value_t = MIN_OUTPUT_TOKENS,
        value_parser = clap::value_parser!(u32).range(1..=1_000_000)
    )]
    pub(super) min_output_tokens: u32,
    /// Comma-separated priority classes that Agents may use; *: all except system-*, which must be listed.
    #[arg(long, env = "AGENTLOOP_ALLOWED_PRIORITY_CLASSES", value_delimiter = ',', default_value = ANY)]
    pub(super) allowed_priority_classes: Vec<String>,
    /// Comma-separated prefixes of annotations that Agents may set on their pods; *: all.
    #[arg(long, env = "AGENTLOOP_ALLOWED_ANNOTATION_PREFIXES", value_delimiter = ',', default_value = ANY)]
    pub(super) allowed_annotation_prefixes: Vec<String>,
    /// Comma-separated prefixes of images that Agents may use for containers of tools; *: all.
    #[arg(long, env = "AGENTLOOP_ALLOWED_TOOL_IMAGES", value_delimiter = ',', default_value = ANY)]
    pub(super) allowed_tool_images: Vec<String>,
    /// URL to which signed webhooks about gates of Agents are sent; empty: none.
    #[arg(long, env = "AGENTLOOP_APPROVAL_WEBHOOK_URL")]
    pub(super) approval_webhook_url: Option<String>,
    /// File with the key that signs them: whsec_ and base64, or raw bytes.
    #[arg(long, env = "AGENTLOOP_APPROVAL_WEBHOOK_SECRET_FILE")]
    pub(super) approval_webhook_secret_file: Option<PathBuf>,
    /// File with the connection string of the Postgres database that stores the histories of Agents; absent: histories
    /// are not stored in a database.
    #[arg(long, env = "AGENTLOOP_HISTORY_POSTGRES_FILE")]
    pub(super) history_postgres_file: Option<PathBuf>,
    /// PEM file with the CA of that database's certificate; takes precedence over sslrootcert in the connection string.
    #[arg(long, env = "AGENTLOOP_HISTORY_POSTGRES_CA_FILE")]
    pub(super) history_postgres_ca_file: Option<PathBuf>,
    /// Days after which executions and rows of the audit are deleted from that database; 0: never.
    #[arg(
        long, env = "AGENTLOOP_HISTORY_RETENTION_DAYS", default_value_t = 90,
        value_parser = clap::value_parser!(u32).range(0..=36_500)
    )]
    pub(super) history_retention_days: u32,
}

/// A CIDR; None for the empty string of an unset variable.
fn range(text: &str) -> Result<String, String> {
    let range = text.trim();
    if !range.is_empty() {
        range.parse::<Cidr>().map_err(|error| error.to_string())?;
    }
    Ok(range.to_owned())
}

fn resources(json: &str) -> Result<ResourceRequirements, String> {
    serde_json::from_str(json).map_err(|error| {
        format!(r#"not resource requirements as JSON, such as {{"requests":{{"cpu":"10m"}}}}: {error}"#)
    })
}

fn sensor_pod_template(json: &str) -> Result<SensorPodTemplate, String> {
    serde_json::from_str(json).map_err(|error| {
        format!(r#"not settings of a pod as JSON, such as {{"nodeSelector":{{"pool":"small"}}}}: {error}"#)
    })
}
