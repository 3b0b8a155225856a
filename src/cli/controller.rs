//! `agentloop controller`.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use axum::http::Uri;
use clap::{ArgAction, Args as ClapArgs};
use k8s_openapi::api::core::v1::{LocalObjectReference, ResourceRequirements};
use kube::Config;
use rustls::pki_types::ServerName;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::controller::agent::{ReconcilerSettings, log_variables, trace_variables};
use crate::controller::auth::metrics_access::MetricsAuthentication;
use crate::controller::gates::webhook::{GateWebhook, WebhookTimes};
use crate::controller::history::HistorySettings;
use crate::controller::leadership::election::LeaseTimes;
use crate::controller::page::PageSettings;
use crate::controller::policy::{ANY, AgentPrices, MIN_OUTPUT_TOKENS, PlatformPolicy, PodPolicy, PriceTable};
use crate::controller::process::{self, ControllerOptions, ElectionOptions, ExportOptions};
use crate::controller::sensor::pod::{SensorPodSettings, SensorPodTemplate};
use crate::history::HistoryStore;
use crate::link::pod::{AgentEgress, PrivateAddresses};
use crate::sensing::address::Cidr;
use crate::telemetry::agent_spans;
use crate::telemetry::families::PerObject;
use crate::telemetry::log_export::ProcessLog;

/// Threads of the async runtime.
const THREADS: usize = 2;
/// Default resources of a gateway.
const GATEWAY_RESOURCES: &str = r#"{"requests":{"cpu":"10m","memory":"32Mi"},"limits":{"memory":"128Mi"}}"#;
/// Default resources of a worker.
const WORKER_RESOURCES: &str = r#"{"requests":{"cpu":"10m","memory":"64Mi"},"limits":{"memory":"256Mi"}}"#;

/// Default resources of a sensor pod.
const SENSOR_RESOURCES: &str = r#"{"requests":{"cpu":"10m","memory":"32Mi"},"limits":{"memory":"128Mi"}}"#;

/// Flags of `agentloop controller`.
#[derive(ClapArgs, Debug)]
pub(super) struct ControllerArgs {
    /// Image of the Agents' pods, that of the controller.
    #[arg(long, env = "AGENTLOOP_IMAGE")]
    image: String,
    /// `imagePullPolicy` of the Agents' pods; defaults to that of the cluster.
    #[arg(long, env = "AGENTLOOP_IMAGE_PULL_POLICY", value_parser = ["Always", "IfNotPresent", "Never"])]
    image_pull_policy: Option<String>,
    /// Name of this pod (downward API); required for leader election.
    #[arg(long, env = "POD_NAME")]
    pod_name: Option<String>,
    /// Namespace of this pod (downward API); defaults to the namespace of the kubeconfig.
    #[arg(long, env = "POD_NAMESPACE")]
    pod_namespace: Option<String>,
    /// Comma-separated namespaces whose Agents are reconciled; empty: all.
    #[arg(long, env = "AGENTLOOP_WATCH_NAMESPACES", value_delimiter = ',')]
    watch_namespaces: Vec<String>,
    /// Maximum number of concurrent reconciles of Agents.
    #[arg(long, env = "AGENTLOOP_WORKERS", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    workers: u16,
    /// Resources of the gateway container, as JSON.
    #[arg(long, env = "AGENTLOOP_GATEWAY_RESOURCES", default_value = GATEWAY_RESOURCES, value_parser = resources)]
    gateway_resources: ResourceRequirements,
    /// Resources of the worker container of Agents without spec.pod.resources, as JSON.
    #[arg(long, env = "AGENTLOOP_WORKER_RESOURCES", default_value = WORKER_RESOURCES, value_parser = resources)]
    worker_resources: ResourceRequirements,
    /// Resources of the sensor pods, as JSON.
    #[arg(long, env = "AGENTLOOP_SENSOR_RESOURCES", default_value = SENSOR_RESOURCES, value_parser = resources)]
    sensor_resources: ResourceRequirements,
    /// Comma-separated Secrets with which the images of the Agents' pods are pulled, besides those of an Agent.
    #[arg(long, env = "AGENTLOOP_AGENT_IMAGE_PULL_SECRETS", value_delimiter = ',')]
    agent_image_pull_secrets: Vec<String>,
    /// Scheduling, pull secrets and annotations of the sensor pods, as JSON: nodeSelector, tolerations, affinity,
    /// priorityClassName, imagePullSecrets and podAnnotations.
    #[arg(long, env = "AGENTLOOP_SENSOR_POD", default_value = "{}", value_parser = sensor_pod_template)]
    sensor_pod: SensorPodTemplate,
    /// Secret in the namespaces of Agents with the headers of OTLP requests under the key `headers`; empty: none.
    #[arg(long, env = "AGENTLOOP_OTLP_HEADERS_SECRET")]
    otlp_headers_secret: Option<String>,
    /// Comma-separated CIDRs to which Sensors may connect although they are blocked by default, such as 10.1.0.0/16.
    #[arg(long, env = "AGENTLOOP_EGRESS_ALLOWED_CIDRS", value_delimiter = ',', value_parser = range)]
    egress_allowed_cidrs: Vec<String>,
    /// Comma-separated further CIDRs to which Sensors may not connect.
    #[arg(long, env = "AGENTLOOP_EGRESS_DENIED_CIDRS", value_delimiter = ',', value_parser = range)]
    egress_denied_cidrs: Vec<String>,
    /// Whether Agents may connect to private addresses, which pods and Services usually have: Allow or Deny.
    #[arg(long, env = "AGENTLOOP_AGENT_EGRESS_PRIVATE_ADDRESSES", default_value_t = PrivateAddresses::Allow)]
    agent_egress_private_addresses: PrivateAddresses,
    /// Comma-separated CIDRs to which Agents may connect although they are blocked by default.
    #[arg(long, env = "AGENTLOOP_AGENT_EGRESS_ALLOWED_CIDRS", value_delimiter = ',', value_parser = range)]
    agent_egress_allowed_cidrs: Vec<String>,
    /// Comma-separated further CIDRs to which Agents may not connect.
    #[arg(long, env = "AGENTLOOP_AGENT_EGRESS_DENIED_CIDRS", value_delimiter = ',', value_parser = range)]
    agent_egress_denied_cidrs: Vec<String>,
    /// URL at which pods reach the link; defaults to port 8443 of the Service `agentloop-link` in this namespace.
    #[arg(long, env = "AGENTLOOP_LINK_URL")]
    link_url: Option<String>,
    /// Listen address of the link.
    #[arg(long, env = "AGENTLOOP_LINK_ADDRESS", default_value = "[::]:8443")]
    link_address: SocketAddr,
    /// Serve a page with loops, their usage and last turns at this address over HTTPS, for users with a token of the
    /// Kubernetes API; absent: there is no page.
    #[arg(long, env = "AGENTLOOP_PAGE_ADDRESS")]
    page_address: Option<SocketAddr>,
    /// Comma-separated host names in the certificate of the page, besides localhost.
    #[arg(long, env = "AGENTLOOP_PAGE_HOSTS", value_delimiter = ',', requires = "page_address")]
    page_hosts: Vec<String>,
    /// Listen address of /metrics.
    #[arg(long, env = "AGENTLOOP_METRICS_ADDRESS", default_value = "[::]:8080")]
    metrics_address: SocketAddr,
    /// What a reader of /metrics must present: nothing, or a token whose user may get the URL /metrics.
    #[arg(long, value_enum, env = "AGENTLOOP_METRICS_AUTHENTICATION", default_value = "None")]
    metrics_authentication: MetricsAuthentication,
    /// Series of single Agents, AgentBudgets and Sensors in /metrics.
    #[arg(long, value_enum, env = "AGENTLOOP_METRICS_PER_OBJECT", default_value = "Full")]
    metrics_per_object: PerObject,
    /// Listen address of /healthz and /readyz.
    #[arg(long, env = "AGENTLOOP_PROBE_ADDRESS", default_value = "[::]:8081")]
    probe_address: SocketAddr,
    /// Use leader election, so that several replicas may run; false: this process always leads.
    #[arg(
        long, env = "AGENTLOOP_LEADER_ELECT", action = ArgAction::Set, default_value_t = true,
        num_args = 0..=1, default_missing_value = "true"
    )]
    leader_elect: bool,
    /// Validity of the leader election Lease in seconds, after which a failed leader is replaced.
    #[arg(long, env = "AGENTLOOP_LEASE_DURATION_SECONDS", default_value_t = 15)]
    lease_duration_seconds: u32,
    /// Interval in seconds at which the leader renews the Lease.
    #[arg(long, env = "AGENTLOOP_LEASE_RENEW_SECONDS", default_value_t = 5)]
    lease_renew_seconds: u32,
    /// JSON file with the prices of models: {"<model>": {"inputPerMillion": "3.00", "outputPerMillion": "15.00"}}.
    #[arg(long, env = "AGENTLOOP_PRICES_FILE")]
    prices_file: Option<PathBuf>,
    /// Make no calls for an Agent that neither matches nor names an AgentBudget.
    #[arg(
        long, env = "AGENTLOOP_REQUIRE_BUDGET", action = ArgAction::Set, default_value_t = false,
        num_args = 0..=1, default_missing_value = "true"
    )]
    require_budget: bool,
    /// Whether the price in an Agent is used if the prices file has none: Allow or Deny.
    #[arg(long, env = "AGENTLOOP_AGENT_PRICES", default_value_t = AgentPrices::Allow)]
    agent_prices: AgentPrices,
    /// Minimum number of output tokens to which the answer of a call is reduced when a limit has little left.
    #[arg(
        long, env = "AGENTLOOP_MIN_OUTPUT_TOKENS", default_value_t = MIN_OUTPUT_TOKENS,
        value_parser = clap::value_parser!(u32).range(1..=1_000_000)
    )]
    min_output_tokens: u32,
    /// Comma-separated priority classes that Agents may use; *: all except system-*, which must be listed.
    #[arg(long, env = "AGENTLOOP_ALLOWED_PRIORITY_CLASSES", value_delimiter = ',', default_value = ANY)]
    allowed_priority_classes: Vec<String>,
    /// Comma-separated prefixes of annotations that Agents may set on their pods; *: all.
    #[arg(long, env = "AGENTLOOP_ALLOWED_ANNOTATION_PREFIXES", value_delimiter = ',', default_value = ANY)]
    allowed_annotation_prefixes: Vec<String>,
    /// Comma-separated prefixes of images that Agents may use for containers of tools; *: all.
    #[arg(long, env = "AGENTLOOP_ALLOWED_TOOL_IMAGES", value_delimiter = ',', default_value = ANY)]
    allowed_tool_images: Vec<String>,
    /// URL to which signed webhooks about gates of Agents are sent; empty: none.
    #[arg(long, env = "AGENTLOOP_APPROVAL_WEBHOOK_URL")]
    approval_webhook_url: Option<String>,
    /// File with the key that signs them: whsec_ and base64, or raw bytes.
    #[arg(long, env = "AGENTLOOP_APPROVAL_WEBHOOK_SECRET_FILE")]
    approval_webhook_secret_file: Option<PathBuf>,
    /// File with the connection string of the Postgres database that stores the histories of Agents; absent: histories
    /// are not stored in a database.
    #[arg(long, env = "AGENTLOOP_HISTORY_POSTGRES_FILE")]
    history_postgres_file: Option<PathBuf>,
    /// PEM file with the CA of that database's certificate; takes precedence over sslrootcert in the connection string.
    #[arg(long, env = "AGENTLOOP_HISTORY_POSTGRES_CA_FILE")]
    history_postgres_ca_file: Option<PathBuf>,
    /// Days after which executions and rows of the audit are deleted from that database; 0: never.
    #[arg(
        long, env = "AGENTLOOP_HISTORY_RETENTION_DAYS", default_value_t = 90,
        value_parser = clap::value_parser!(u32).range(0..=36_500)
    )]
    history_retention_days: u32,
}

impl ControllerArgs {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let log = ProcessLog::init("controller");
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .enable_all()
            .build()
            .context("cannot start the async runtime")?;
        let ended = runtime.block_on(async {
            let stop = CancellationToken::new();
            end_on_signals(&stop).context("cannot install signal handlers")?;
            let config = Config::infer()
                .await
                .context("cannot read a service account or a kubeconfig")?;
            let mut options = self.options(&config.default_namespace)?;
            options.telemetry.log = log;
            tracing::info!(
                version = env!("CARGO_PKG_VERSION"),
                election = options.election.is_some(),
                "starting the controller"
            );
            Box::pin(process::run(options, config, stop))
                .await
                .map_err(anyhow::Error::from)
        });
        // What still hangs on the API server may not keep the process alive.
        runtime.shutdown_timeout(Duration::ZERO);
        ended
    }

    fn options(self, kubeconfig_namespace: &str) -> anyhow::Result<ControllerOptions> {
        let namespace = self.pod_namespace.unwrap_or_else(|| kubeconfig_namespace.into());
        let pod_name = self.pod_name.filter(|name| !name.is_empty());
        let election = match (self.leader_elect, &pod_name) {
            (false, _) => None,
            (true, Some(identity)) => Some(ElectionOptions {
                identity: identity.clone(),
                times: LeaseTimes::new(self.lease_duration_seconds, self.lease_renew_seconds)
                    .map_err(anyhow::Error::msg)?,
            }),
            (true, None) => bail!(
                "leader election requires --pod-name (in a pod: POD_NAME from the downward API); \
                 outside a cluster set --leader-elect=false"
            ),
        };
        let service = format!("agentloop-link.{namespace}.svc");
        let link_url = self.link_url.unwrap_or_else(|| format!("https://{service}:8443"));
        let mut link_hosts = vec![service.clone(), format!("{service}.cluster.local")];
        let host = link_host(&link_url)?;
        if !link_hosts.contains(&host) {
            link_hosts.push(host);
        }
        // A variable without any value gives one empty one.
        let given = |list: Vec<String>| -> Vec<String> {
            let values = list.iter().map(|value| value.trim().to_owned());
            values.filter(|value| !value.is_empty()).collect()
        };
        let policy = PlatformPolicy {
            prices: self.prices_file.as_deref().map(prices).transpose()?.unwrap_or_default(),
            require_budget: self.require_budget,
            agent_prices: self.agent_prices,
            min_output_tokens: self.min_output_tokens,
            pods: PodPolicy {
                priority_classes: given(self.allowed_priority_classes),
                annotation_prefixes: given(self.allowed_annotation_prefixes),
                tool_images: given(self.allowed_tool_images),
            },
        };
        let sensor_pods = SensorPodSettings {
            image: self.image.clone(),
            image_pull_policy: self.image_pull_policy.clone(),
            link_url: link_url.clone(),
            resources: self.sensor_resources,
            template: self.sensor_pod,
            allowed_ranges: given(self.egress_allowed_cidrs),
            denied_ranges: given(self.egress_denied_cidrs),
            environment: log_variables(|name| std::env::var(name).ok(), self.otlp_headers_secret.as_deref()),
        };
        let page_hosts = given(self.page_hosts);
        let page = self.page_address.map(|address| page(address, page_hosts)).transpose()?;
        let webhook_url = self.approval_webhook_url.filter(|url| !url.is_empty());
        let gate_webhook = webhook_url.map(|url| webhook(&url, self.approval_webhook_secret_file.as_deref()));
        let (ca_file, retention_days) = (self.history_postgres_ca_file, self.history_retention_days);
        let history = self
            .history_postgres_file
            .map(|file| history(file, ca_file, retention_days))
            .transpose()?;
        let mut watch_namespaces = self.watch_namespaces;
        watch_namespaces.retain(|namespace| !namespace.trim().is_empty());
        Ok(ControllerOptions {
            settings: ReconcilerSettings {
                image: self.image,
                image_pull_policy: self.image_pull_policy,
                link_url,
                egress: AgentEgress {
                    private_addresses: self.agent_egress_private_addresses,
                    allowed_ranges: given(self.agent_egress_allowed_cidrs),
                    denied_ranges: given(self.agent_egress_denied_cidrs),
                },
                controller_namespace: namespace,
                watch_namespaces: watch_namespaces.iter().map(|name| name.trim().into()).collect(),
                gateway_resources: self.gateway_resources,
                worker_resources: self.worker_resources,
                image_pull_secrets: given(self.agent_image_pull_secrets)
                    .into_iter()
                    .map(|name| LocalObjectReference { name })
                    .collect(),
                gateway_environment: trace_variables(
                    |name| std::env::var(name).ok(),
                    self.otlp_headers_secret.as_deref(),
                ),
                workers: self.workers,
                policy,
            },
            sensor_pods,
            metrics_address: self.metrics_address,
            metrics_authentication: self.metrics_authentication,
            per_object: self.metrics_per_object,
            probe_address: self.probe_address,
            link_address: self.link_address,
            link_hosts,
            page,
            pod_name,
            election,
            gate_webhook: gate_webhook.transpose()?,
            history,
            telemetry: ExportOptions {
                traces: agent_spans::settings(),
                metrics: agent_spans::metric_settings(),
                log: ProcessLog::default(),
            },
        })
    }
}

/// Host of the link's URL, for its certificate.
fn link_host(url: &str) -> anyhow::Result<String> {
    let uri: Uri = url
        .parse()
        .with_context(|| format!("--link-url {url} is not a valid URL"))?;
    ensure!(
        uri.scheme_str() == Some("https"),
        "--link-url {url} must start with https://, as pods send their tokens to it"
    );
    let host = uri.host().with_context(|| format!("--link-url {url} has no host"))?;
    Ok(host.trim_matches(['[', ']']).into())
}

/// The page, with the names in its certificate.
fn page(address: SocketAddr, given: Vec<String>) -> anyhow::Result<PageSettings> {
    let mut hosts = vec!["localhost".to_owned(), "127.0.0.1".into(), "::1".into()];
    for host in given {
        ensure!(
            ServerName::try_from(host.as_str()).is_ok(),
            "--page-hosts: {host} is neither a host name nor an IP address"
        );
        hosts.push(host);
    }
    Ok(PageSettings { address, hosts })
}

/// The webhook that announces gates. Errors do not repeat the URL, whose path may be a secret.
fn webhook(url: &str, secret_file: Option<&Path>) -> anyhow::Result<GateWebhook> {
    let file = secret_file.context("--approval-webhook-url requires --approval-webhook-secret-file")?;
    let secret = std::fs::read(file)
        .with_context(|| format!("cannot read --approval-webhook-secret-file {}", file.display()))?;
    GateWebhook::new(url, &secret, WebhookTimes::default()).map_err(|why| {
        anyhow::anyhow!(
            "--approval-webhook-url with --approval-webhook-secret-file {}: {why}",
            file.display()
        )
    })
}

/// The database of the histories. Errors do not repeat its connection string, which has a password.
fn history(file: PathBuf, ca_file: Option<PathBuf>, retention_days: u32) -> anyhow::Result<HistorySettings> {
    let store = HistoryStore::new(file, ca_file).context("--history-postgres-file")?;
    Ok(HistorySettings {
        store: Arc::new(store),
        retention_days,
    })
}

/// The price table in a file.
pub(super) fn prices(file: &Path) -> anyhow::Result<PriceTable> {
    let text =
        std::fs::read_to_string(file).with_context(|| format!("cannot read --prices-file {}", file.display()))?;
    serde_json::from_str(&text).with_context(|| {
        format!(
            r#"--prices-file {} is not a table of prices, such as {{"a-model":{{"inputPerMillion":"3.00","outputPerMillion":"15.00"}}}}"#,
            file.display()
        )
    })
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

/// SIGTERM, and SIGINT at a terminal, request a graceful shutdown; a second one terminates at once.
fn end_on_signals(stop: &CancellationToken) -> std::io::Result<()> {
    let mut term = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let stop = stop.clone();
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = term.recv() => {}
                _ = interrupt.recv() => {}
            }
            if stop.is_cancelled() {
                std::process::exit(1);
            }
            stop.cancel();
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: ControllerArgs,
    }

    fn options(flags: &[&str]) -> anyhow::Result<ControllerOptions> {
        let line = ["controller", "--image=agentloop:1", "--pod-namespace=system"];
        Line::try_parse_from(line.iter().chain(flags))?.args.options("default")
    }

    #[test]
    fn the_certificate_names_the_service_and_the_host_of_the_link_url() {
        let defaults = options(&["--pod-name=a"]).unwrap();
        assert_eq!(defaults.settings.link_url, "https://agentloop-link.system.svc:8443");
        assert_eq!(
            defaults.link_hosts,
            ["agentloop-link.system.svc", "agentloop-link.system.svc.cluster.local"]
        );
        let other = options(&["--pod-name=a", "--link-url=https://[::1]:9443"]).unwrap();
        assert_eq!(other.link_hosts.last().unwrap(), "::1");
    }

    #[test]
    fn the_page_is_off_by_default_and_its_names_are_checked() {
        assert!(options(&["--pod-name=a"]).unwrap().page.is_none());
        let page = |hosts: &str| {
            let flags = ["--pod-name=a", "--page-address=[::]:8444", hosts];
            options(&flags).map(|options| options.page.unwrap())
        };
        let settings = page("--page-hosts=loops.example.com, 192.0.2.1,").unwrap();
        assert_eq!(settings.address.port(), 8444);
        assert_eq!(
            settings.hosts,
            ["localhost", "127.0.0.1", "::1", "loops.example.com", "192.0.2.1"]
        );
        let error = page("--page-hosts=loops example").unwrap_err().to_string();
        assert!(error.contains("loops example is neither a host name nor"), "{error}");
    }

    #[test]
    fn election_requires_a_name_and_the_error_explains_how_to_disable_it() {
        let error = options(&[]).unwrap_err().to_string();
        assert!(
            error.contains("POD_NAME") && error.contains("--leader-elect=false"),
            "{error}"
        );
        assert!(options(&["--leader-elect=false"]).unwrap().election.is_none());
        assert_eq!(options(&["--pod-name=a"]).unwrap().election.unwrap().identity, "a");
    }

    #[test]
    fn namespaces_are_separated_by_commas_and_empty_means_all() {
        let namespaces = |value: &str| {
            options(&["--leader-elect=false", value])
                .unwrap()
                .settings
                .watch_namespaces
        };
        assert_eq!(namespaces("--watch-namespaces=a, b,"), ["a", "b"]);
        assert!(namespaces("--watch-namespaces=").is_empty());
    }

    #[test]
    fn what_the_chart_sets_on_pods_is_read_from_flags_and_is_nothing_by_default() {
        let defaults = options(&["--pod-name=a"]).unwrap();
        assert!(defaults.settings.image_pull_secrets.is_empty());
        assert_eq!(defaults.sensor_pods.template, SensorPodTemplate::default());
        let flags = [
            "--pod-name=a",
            "--agent-image-pull-secrets=registry, mirror,",
            r#"--sensor-pod={"priorityClassName":"low","imagePullSecrets":[{"name":"registry"}]}"#,
        ];
        let set = options(&flags).unwrap();
        let names: Vec<_> = set
            .settings
            .image_pull_secrets
            .iter()
            .map(|secret| &secret.name)
            .collect();
        assert_eq!(names, ["registry", "mirror"]);
        let template = set.sensor_pods.template;
        assert_eq!(template.priority_class_name.as_deref(), Some("low"));
        assert_eq!(template.image_pull_secrets[0].name, "registry");
    }

    #[test]
    fn the_policy_is_read_from_flags_and_the_price_table_from_its_file() {
        let defaults = options(&["--pod-name=a"]).unwrap().settings.policy;
        assert_eq!(defaults, PlatformPolicy::default());
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(
            file.path(),
            r#"{"m:1": {"inputPerMillion": "3.00", "outputPerMillion": "15.00"}}"#,
        )
        .unwrap();
        let flag = format!("--prices-file={}", file.path().display());
        let flags = [
            "--pod-name=a",
            &flag,
            "--require-budget",
            "--agent-prices=Deny",
            "--min-output-tokens=9",
            "--allowed-priority-classes=a, b",
            "--allowed-annotation-prefixes=",
            "--allowed-tool-images=registry.example.com/, mcp/",
        ];
        let policy = options(&flags).unwrap().settings.policy;
        assert_eq!(policy.prices["m:1"].output_per_million, "15.00");
        assert!(policy.require_budget && policy.agent_prices == AgentPrices::Deny);
        assert_eq!(policy.min_output_tokens, 9);
        assert_eq!(policy.pods.priority_classes, ["a", "b"]);
        assert!(policy.pods.annotation_prefixes.is_empty());
        assert_eq!(policy.pods.tool_images, ["registry.example.com/", "mcp/"]);
        std::fs::write(file.path(), r#"{"m": {"inputPerMillion": "3.00"}}"#).unwrap();
        let error = format!("{:#}", options(&["--pod-name=a", &flag]).unwrap_err());
        assert!(
            error.contains("--prices-file") && error.contains("outputPerMillion"),
            "{error}"
        );
    }

    #[test]
    fn the_webhook_about_gates_needs_a_url_and_a_key_that_can_sign() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let file = tempfile::NamedTempFile::new().unwrap();
        let secret = format!("--approval-webhook-secret-file={}", file.path().display());
        let with = |url: &str, secret: &str| {
            let url = format!("--approval-webhook-url={url}");
            options(&["--pod-name=a", &url, secret]).map(|options| options.gate_webhook)
        };
        std::fs::write(file.path(), "whsec_MTIzNDU2Nzg5MDEyMzQ1Ng==\n").unwrap();
        let webhook = with("http://bridge.chat.svc/in?token=canary", &secret)
            .unwrap()
            .unwrap();
        assert_eq!(format!("{webhook:?}"), "GateWebhook(bridge.chat.svc)");
        assert!(with("", &secret).unwrap().is_none());
        assert!(options(&["--pod-name=a"]).unwrap().gate_webhook.is_none());
        for (url, secret, words) in [
            ("http://x/", "--workers=1", "requires --approval-webhook-secret-file"),
            (
                "http://x/",
                "--approval-webhook-secret-file=/absent",
                "cannot read --approval-webhook-secret-file /absent",
            ),
            ("ftp://x/canary", &secret, "must start with https://"),
            ("canary", &secret, "the URL is malformed"),
            ("http://canary:p@x/", &secret, "must not contain credentials"),
        ] {
            let error = format!("{:#}", with(url, secret).unwrap_err());
            assert!(error.contains(words) && !error.contains("canary"), "{url}: {error}");
        }
        for malformed in ["", "whsec_", "whsec_$UNSET", "canary-is-short"] {
            std::fs::write(file.path(), malformed).unwrap();
            let error = format!("{:#}", with("http://x/", &secret).unwrap_err());
            assert!(
                error.contains("the secret is not a Standard Webhooks key") && !error.contains("canary"),
                "{error}"
            );
        }
    }

    #[test]
    fn the_database_of_histories_is_named_in_a_file_whose_content_is_not_repeated() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let flag = format!("--history-postgres-file={}", file.path().display());
        let with = |flags: &[&str]| {
            let flags = ["--pod-name=a"].iter().chain(flags).copied().collect::<Vec<_>>();
            options(&flags).map(|options| options.history)
        };
        assert!(with(&[]).unwrap().is_none());
        std::fs::write(
            file.path(),
            "postgresql://u:canary@db.example.com/history?sslmode=require",
        )
        .unwrap();
        assert_eq!(with(&[&flag]).unwrap().unwrap().retention_days, 90);
        let never = with(&[&flag, "--history-retention-days=0"]).unwrap().unwrap();
        assert_eq!(format!("{never:?}"), "HistorySettings(0 days)");
        for (text, words) in [
            (
                "postgresql://u:canary@h/d?sslmode=verify-full",
                "sslmode=verify-full requires a CA",
            ),
            ("postgresql://u:canary@h/d?sslmode=on", "the value of sslmode"),
            ("canary", "history.postgres.key"),
        ] {
            std::fs::write(file.path(), text).unwrap();
            let error = format!("{:#}", with(&[&flag]).unwrap_err());
            assert!(
                error.contains("--history-postgres-file") && error.contains(words) && !error.contains("canary"),
                "{error}"
            );
        }
    }

    #[test]
    fn invalid_values_are_refused_with_a_message() {
        for (flag, word) in [
            ("--gateway-resources=cpu=1", "not resource requirements as JSON"),
            (r#"--sensor-pod={"hostNetwork":true}"#, "unknown field `hostNetwork`"),
            ("--workers=0", "0 is not in 1..=256"),
            ("--link-url=http://x:1", "https://"),
            ("--link-url=x y", "is not a valid URL"),
            ("--lease-duration-seconds=8", "is not safe"),
            ("--prices-file=/absent", "cannot read --prices-file /absent"),
            ("--agent-prices=Maybe", "--agent-prices"),
            ("--history-postgres-file=/absent", "cannot read /absent"),
            ("--history-retention-days=36501", "36501 is not in 0..=36500"),
            ("--min-output-tokens=0", "0 is not in 1..=1000000"),
        ] {
            let error = format!("{:#}", options(&["--pod-name=a", flag]).unwrap_err());
            assert!(error.contains(word), "{flag}: {error}");
        }
    }
}
