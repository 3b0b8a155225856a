//! What the flags of `agentloop controller` mean: the options of the process, with what only several flags, or the files that
//! they name, can show to be wrong.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use axum::http::Uri;
use k8s_openapi::api::core::v1::LocalObjectReference;
use rustls::pki_types::ServerName;

use super::flags::ControllerArgs;
use crate::controller::agent::{ExportSecrets, ReconcilerSettings, log_variables, trace_variables};
use crate::controller::gates::webhook::{GateWebhook, WebhookTimes};
use crate::controller::history::HistorySettings;
use crate::controller::leadership::election::LeaseTimes;
use crate::controller::page::PageSettings;
use crate::controller::policy::{PlatformPolicy, PodPolicy, PriceTable};
use crate::controller::process::{ControllerOptions, ElectionOptions, ExportOptions};
use crate::controller::sensor::pod::SensorPodSettings;
use crate::history::HistoryStore;
use crate::link::pod::AgentEgress;
use crate::telemetry::agent_spans;
use crate::telemetry::log_export::ProcessLog;

impl ControllerArgs {
    pub(super) fn options(self, kubeconfig_namespace: &str) -> anyhow::Result<ControllerOptions> {
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
        let otlp_ca_secret = self.otlp_ca_secret.filter(|name| !name.is_empty());
        let variable = |name: &str| std::env::var(name).ok();
        let secrets = ExportSecrets {
            headers: self.otlp_headers_secret.as_deref(),
            authorities: otlp_ca_secret.as_deref(),
        };
        let sensor_pods = SensorPodSettings {
            image: self.image.clone(),
            image_pull_policy: self.image_pull_policy.clone(),
            link_url: link_url.clone(),
            resources: self.sensor_resources,
            template: self.sensor_pod,
            allowed_ranges: given(self.egress_allowed_cidrs),
            denied_ranges: given(self.egress_denied_cidrs),
            environment: log_variables(variable, secrets),
            otlp_ca_secret: otlp_ca_secret.clone(),
        };
        let page = page(self.page_address, given(self.page_hosts))?;
        let webhook_url = self.approval_webhook_url.filter(|url| !url.is_empty());
        let gate_webhook = webhook_url.map(|url| webhook(&url, self.approval_webhook_secret_file.as_deref()));
        let (ca_file, retention_days) = (self.history_postgres_ca_file, self.history_retention_days);
        let history = self
            .history_postgres_file
            .map(|file| history(file, ca_file, retention_days))
            .transpose()?;
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
                watch_namespaces: given(self.watch_namespaces),
                gateway_resources: self.gateway_resources,
                worker_resources: self.worker_resources,
                image_pull_secrets: references(given(self.agent_image_pull_secrets)),
                gateway_environment: trace_variables(variable, secrets),
                otlp_ca_secret,
                workers: self.workers,
                policy,
            },
            sensor_pods,
            metrics_address: self.metrics_address,
            metrics_authentication: self.metrics_authentication,
            metrics_hosts: metrics_hosts(given(self.metrics_hosts), pod_name.as_deref())?,
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

fn references(names: Vec<String>) -> Vec<LocalObjectReference> {
    let references = names.into_iter().map(|name| LocalObjectReference { name });
    references.collect()
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

/// The page, with the names in its certificate, if it is served.
fn page(address: Option<SocketAddr>, given: Vec<String>) -> anyhow::Result<Option<PageSettings>> {
    let Some(address) = address else { return Ok(None) };
    let hosts = certificate_hosts("--page-hosts", given)?;
    Ok(Some(PageSettings { address, hosts }))
}

/// The names in the certificate of the metrics.
fn metrics_hosts(given: Vec<String>, pod_name: Option<&str>) -> anyhow::Result<Vec<String>> {
    let mut hosts = certificate_hosts("--metrics-hosts", given)?;
    hosts.extend(pod_name.filter(|name| is_host(name)).map(str::to_owned));
    Ok(hosts)
}

/// The names in a certificate: those of this machine, for port-forwards, and those that the flag gives.
fn certificate_hosts(flag: &str, given: Vec<String>) -> anyhow::Result<Vec<String>> {
    let mut hosts = vec!["localhost".to_owned(), "127.0.0.1".into(), "::1".into()];
    for host in given {
        ensure!(
            is_host(&host),
            "{flag}: {host} is neither a host name nor an IP address"
        );
        hosts.push(host);
    }
    Ok(hosts)
}

fn is_host(name: &str) -> bool {
    ServerName::try_from(name).is_ok()
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
pub(in crate::cli) fn prices(file: &Path) -> anyhow::Result<PriceTable> {
    let text =
        std::fs::read_to_string(file).with_context(|| format!("cannot read --prices-file {}", file.display()))?;
    serde_json::from_str(&text).with_context(|| {
        format!(
            r#"--prices-file {} is not a table of prices, such as {{"a-model":{{"inputPerMillion":"3.00","outputPerMillion":"15.00"}}}}"#,
            file.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::controller::policy::AgentPrices;
    use crate::controller::sensor::pod::SensorPodTemplate;

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
    fn the_certificate_of_the_metrics_names_this_machine_the_service_and_the_pod() {
        let hosts = |flags: &[&str]| options(flags).map(|options| options.metrics_hosts);
        let service = "--metrics-hosts=agentloop-metrics.system.svc";
        assert_eq!(
            hosts(&["--pod-name=agentloop-7", service]).unwrap(),
            [
                "localhost",
                "127.0.0.1",
                "::1",
                "agentloop-metrics.system.svc",
                "agentloop-7"
            ]
        );
        let local = ["--pod-name=no host", "--leader-elect=false"];
        assert_eq!(hosts(&local).unwrap(), ["localhost", "127.0.0.1", "::1"]);
        let error = hosts(&["--pod-name=a", "--metrics-hosts=no host"])
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("--metrics-hosts: no host is neither a host name nor"),
            "{error}"
        );
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
    fn settings_of_pods_are_read_from_flags_and_empty_by_default() {
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
    fn the_secret_with_the_authorities_of_the_collector_is_one_for_all_pods_and_empty_means_none() {
        let secrets = |flags: &[&str]| {
            let options = options(&[&["--pod-name=a"][..], flags].concat()).unwrap();
            let environment = &options.settings.gateway_environment;
            let variable = "OTEL_EXPORTER_OTLP_CERTIFICATE";
            (
                options.settings.otlp_ca_secret.clone(),
                options.sensor_pods.otlp_ca_secret.clone(),
                environment.iter().any(|one| one.name == variable),
            )
        };
        let named = || Some("collector".to_owned());
        assert_eq!(secrets(&["--otlp-ca-secret=collector"]), (named(), named(), true));
        for none in [&[][..], &["--otlp-ca-secret="]] {
            assert_eq!(secrets(none), (None, None, false));
        }
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
