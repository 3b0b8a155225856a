//! What is exported and how, from the `OTEL_*` environment variables as the OpenTelemetry SDKs read them.

use std::time::Duration;

use crate::content;
use crate::sampler::TraceSampler;
use crate::variables::{
    BatchSettings, ExportSettings, LOG_BATCHES, LOGS, METRICS, SPAN_BATCHES, SettingsProblem, SignalVariables, TRACES,
    VariableReader,
};

/// The variables that the controller passes to the gateways that it creates. Those of headers are not among them: they
/// may hold a secret, and the manifest of a pod is no place for one. Nor are those of metrics, which gateways have none of.
pub const PASSED_VARIABLES: &[&str] = &[
    "OTEL_SDK_DISABLED",
    "OTEL_TRACES_EXPORTER",
    "OTEL_LOGS_EXPORTER",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT",
    "OTEL_EXPORTER_OTLP_PROTOCOL",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL",
    "OTEL_EXPORTER_OTLP_TIMEOUT",
    "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT",
    "OTEL_EXPORTER_OTLP_LOGS_TIMEOUT",
    "OTEL_SERVICE_NAME",
    "OTEL_RESOURCE_ATTRIBUTES",
    "OTEL_TRACES_SAMPLER",
    "OTEL_TRACES_SAMPLER_ARG",
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT",
    "OTEL_BSP_SCHEDULE_DELAY",
    "OTEL_BSP_MAX_QUEUE_SIZE",
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE",
    "OTEL_BLRP_SCHEDULE_DELAY",
    "OTEL_BLRP_MAX_QUEUE_SIZE",
    "OTEL_BLRP_MAX_EXPORT_BATCH_SIZE",
];

/// The variables that the controller does not pass on. Files of certificates are not in the pods that it creates.
pub const CONTROLLER_VARIABLES: &[&str] = &[
    "OTEL_METRICS_EXPORTER",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL",
    "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT",
    "OTEL_METRIC_EXPORT_INTERVAL",
    "OTEL_METRIC_EXPORT_TIMEOUT",
    "OTEL_EXPORTER_OTLP_HEADERS",
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
    "OTEL_EXPORTER_OTLP_LOGS_HEADERS",
    "OTEL_EXPORTER_OTLP_METRICS_HEADERS",
    "OTEL_EXPORTER_OTLP_CERTIFICATE",
    "OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE",
    "OTEL_EXPORTER_OTLP_LOGS_CERTIFICATE",
    "OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE",
];

/// How traces are exported.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceSettings {
    pub(crate) export: ExportSettings,
    pub(crate) batch: BatchSettings,
    pub(crate) sampler: TraceSampler,
    /// Whether spans may have texts of prompts, answers, arguments and results.
    pub(crate) has_content: bool,
}

/// How logs are exported.
#[derive(Clone, Debug, PartialEq)]
pub struct LogSettings {
    pub(crate) export: ExportSettings,
    pub(crate) batch: BatchSettings,
}

/// How metrics are exported.
#[derive(Clone, Debug, PartialEq)]
pub struct MetricSettings {
    pub(crate) export: ExportSettings,
    /// Time between the beginnings of two exports.
    pub(crate) interval: Duration,
    /// How long one export may take, with all its requests.
    pub(crate) limit: Duration,
}

impl TraceSettings {
    /// Reads the settings from this process's environment. `None`: traces are not exported, which is the default.
    pub fn from_env() -> Result<Option<Self>, SettingsProblem> {
        Self::from_variables(environment)
    }

    /// Reads the settings from these variables. An empty variable counts as unset.
    pub fn from_variables(variables: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, SettingsProblem> {
        read(&TRACES, &variables, |reader, export| {
            let sampler = match reader.get("OTEL_TRACES_SAMPLER") {
                Some(name) => {
                    TraceSampler::parse(&name, reader.get("OTEL_TRACES_SAMPLER_ARG").as_deref()).ok_or_else(|| {
                        reader.problem("OTEL_TRACES_SAMPLER", "or OTEL_TRACES_SAMPLER_ARG is not supported")
                    })?
                }
                None => TraceSampler::AlwaysOn,
            };
            Ok(Self {
                export,
                batch: reader.batch(&SPAN_BATCHES)?,
                sampler,
                // Traces without texts are better than none.
                has_content: content::is_asked_for(reader).unwrap_or_else(|problem| {
                    tracing::warn!("{problem}");
                    false
                }),
            })
        })
    }

    /// Which traces are exported.
    #[must_use]
    pub fn sampler(&self) -> TraceSampler {
        self.sampler
    }
}

impl LogSettings {
    /// Reads the settings from this process's environment. `None`: logs are not exported, which is the default.
    pub fn from_env() -> Result<Option<Self>, SettingsProblem> {
        Self::from_variables(environment)
    }

    /// Reads the settings from these variables. An empty variable counts as unset.
    pub fn from_variables(variables: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, SettingsProblem> {
        read(&LOGS, &variables, |reader, export| {
            Ok(Self {
                export,
                batch: reader.batch(&LOG_BATCHES)?,
            })
        })
    }
}

impl MetricSettings {
    /// Reads the settings from this process's environment. `None`: metrics are not exported, which is the default.
    pub fn from_env() -> Result<Option<Self>, SettingsProblem> {
        Self::from_variables(environment)
    }

    /// Reads the settings from these variables. An empty variable counts as unset.
    pub fn from_variables(variables: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, SettingsProblem> {
        read(&METRICS, &variables, |reader, export| {
            Ok(Self {
                export,
                interval: reader.milliseconds("OTEL_METRIC_EXPORT_INTERVAL", 60_000)?,
                limit: reader.milliseconds("OTEL_METRIC_EXPORT_TIMEOUT", 30_000)?,
            })
        })
    }
}

fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn read<T>(
    signal: &'static SignalVariables,
    variables: &dyn Fn(&str) -> Option<String>,
    finish: impl FnOnce(&VariableReader<'_>, ExportSettings) -> Result<T, SettingsProblem>,
) -> Result<Option<T>, SettingsProblem> {
    let reader = VariableReader::new(signal, variables);
    let export = reader.export()?;
    export.map(|export| finish(&reader, export)).transpose()
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;
    use rstest::rstest;

    use super::*;
    use crate::variables::RootsFile;

    fn read(variables: &[(&str, &str)]) -> Result<Option<TraceSettings>, SettingsProblem> {
        TraceSettings::from_variables(|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    fn given(variables: &[(&str, &str)]) -> TraceSettings {
        read(variables).unwrap().unwrap()
    }

    const ENDPOINT: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318");

    #[test]
    fn nothing_is_exported_by_default_or_if_disabled() {
        assert_eq!(read(&[]), Ok(None));
        assert_eq!(read(&[("OTEL_EXPORTER_OTLP_ENDPOINT", " ")]), Ok(None));
        assert_eq!(read(&[ENDPOINT, ("OTEL_SDK_DISABLED", "True")]), Ok(None));
        assert_eq!(read(&[ENDPOINT, ("OTEL_TRACES_EXPORTER", "none")]), Ok(None));
        assert!(
            given(&[ENDPOINT, ("OTEL_SDK_DISABLED", "false")])
                .export
                .headers
                .is_empty()
        );
    }

    #[rstest]
    #[case(&[ENDPOINT], "http://collector:4318/v1/traces")]
    #[case(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "https://c/otlp/")], "https://c/otlp/v1/traces")]
    #[case(&[ENDPOINT, ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://t:1/in")], "http://t:1/in")]
    #[case(&[("OTEL_TRACES_EXPORTER", "otlp")], "http://localhost:4318/v1/traces")]
    fn the_endpoint_is_that_of_traces_or_the_common_one_with_their_path(
        #[case] variables: &[(&str, &str)],
        #[case] endpoint: &str,
    ) {
        assert_eq!(given(variables).export.endpoint.as_str(), endpoint);
    }

    #[test]
    fn headers_and_attributes_are_decoded_and_headers_are_not_printed() {
        let settings = given(&[
            ENDPOINT,
            (
                "OTEL_EXPORTER_OTLP_HEADERS",
                "authorization=Basic%20canary%3D, x-team = a",
            ),
            (
                "OTEL_RESOURCE_ATTRIBUTES",
                "deployment.environment.name=a%2Cb,service.name=listed",
            ),
        ]);
        assert_eq!(settings.export.headers["authorization"], "Basic canary=");
        assert_eq!(settings.export.headers["x-team"], "a");
        assert!(!format!("{settings:?}").contains("canary"));
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        let attributes = [
            pair("service.name", "listed"),
            pair("deployment.environment.name", "a,b"),
        ];
        assert_eq!(settings.export.resource, attributes);
        let named = given(&[
            ENDPOINT,
            ("OTEL_SERVICE_NAME", "own"),
            ("OTEL_RESOURCE_ATTRIBUTES", "service.name=x"),
        ]);
        assert_eq!(named.export.resource, [pair("service.name", "own")]);
        assert_eq!(given(&[ENDPOINT]).export.resource, [pair("service.name", "agentloop")]);
    }

    #[test]
    fn the_file_of_certificates_is_that_of_traces_or_the_common_one() {
        let common = ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/ca.crt");
        let own = ("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", " /own.crt ");
        let of_logs = ("OTEL_EXPORTER_OTLP_LOGS_CERTIFICATE", "/logs.crt");
        let roots = |variables: &[(&str, &str)]| given(&[&[ENDPOINT][..], variables].concat()).export.roots;
        let file = |variable, file: &str| {
            Some(RootsFile {
                variable,
                file: file.into(),
            })
        };
        assert_eq!(roots(&[of_logs]), None);
        assert_eq!(roots(&[common, of_logs]), file(common.0, "/ca.crt"));
        assert_eq!(roots(&[common, own]), file(own.0, "/own.crt"));
    }

    #[test]
    fn those_of_traces_take_precedence() {
        let settings = given(&[
            ENDPOINT,
            ("OTEL_EXPORTER_OTLP_HEADERS", "a=1"),
            ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "b=2"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "1000"),
            ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "2000"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
            ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf"),
        ]);
        assert_eq!(
            (settings.export.headers.len(), settings.export.headers["b"].as_bytes()),
            (1, &b"2"[..])
        );
        assert_eq!(settings.export.timeout, Duration::from_secs(2));
    }

    #[test]
    fn queues_are_bounded_and_no_batch_is_larger() {
        let sizes = |queue, batch| {
            let settings = given(&[
                ENDPOINT,
                ("OTEL_BSP_MAX_QUEUE_SIZE", queue),
                ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", batch),
            ]);
            (settings.batch.queue, settings.batch.batch)
        };
        assert_eq!(sizes("", ""), (2_048, 512));
        assert_eq!(sizes("65536", "65536"), (65_536, 65_536));
        assert_eq!(sizes("65537", "65537"), (65_536, 65_536));
        assert_eq!(sizes("10", "11"), (10, 10));
    }

    #[rstest]
    #[case("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318")]
    #[case("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "ftp://canary")]
    #[case("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")]
    #[case("OTEL_EXPORTER_OTLP_HEADERS", "canary")]
    #[case("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "a b=canary")]
    #[case("OTEL_RESOURCE_ATTRIBUTES", "=canary")]
    #[case("OTEL_TRACES_SAMPLER", "canary")]
    #[case("OTEL_TRACES_EXPORTER", "zipkin")]
    #[case("OTEL_EXPORTER_OTLP_TIMEOUT", "10s canary")]
    #[case("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "-1")]
    #[case("OTEL_BSP_SCHEDULE_DELAY", "canary")]
    #[case("OTEL_BSP_MAX_QUEUE_SIZE", "0")]
    #[case("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1.5")]
    fn an_invalid_variable_is_named_without_its_value(#[case] variable: &str, #[case] value: &str) {
        let mut variables = vec![(variable, value)];
        if variable != ENDPOINT.0 {
            variables.push(ENDPOINT);
        }
        let problem = read(&variables).unwrap_err().to_string();
        assert!(problem.contains(variable), "{problem}");
        assert!(!problem.contains("canary"), "{problem}");
    }

    #[test]
    fn an_invalid_variable_for_content_is_named_and_leaves_the_traces() {
        let variable = ("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "canary");
        assert!(!given(&[ENDPOINT, variable]).has_content);
        let get = |_: &str| Some("canary".to_owned());
        let problem = content::is_asked_for(&VariableReader::new(&TRACES, &get)).unwrap_err();
        assert_eq!(
            problem.to_string(),
            "no texts in spans are exported: OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT is neither true nor false"
        );
    }

    #[rstest]
    #[case("OTEL_EXPORTER_OTLP_TIMEOUT", true, true)]
    #[case("OTEL_EXPORTER_OTLP_LOGS_TIMEOUT", true, false)]
    #[case("OTEL_BLRP_SCHEDULE_DELAY", true, false)]
    #[case("OTEL_BLRP_MAX_QUEUE_SIZE", true, false)]
    #[case("OTEL_BLRP_MAX_EXPORT_BATCH_SIZE", true, false)]
    #[case("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", false, true)]
    #[case("OTEL_METRIC_EXPORT_INTERVAL", false, true)]
    #[case("OTEL_METRIC_EXPORT_TIMEOUT", false, true)]
    fn an_invalid_number_of_a_signal_is_named(#[case] variable: &str, #[case] logs: bool, #[case] metrics: bool) {
        let get = |name: &str| match name {
            name if name == variable => Some("canary".to_owned()),
            name => name.ends_with("_EXPORTER").then(|| "otlp".to_owned()),
        };
        let named = |problem: Option<SettingsProblem>| {
            let text = problem.map(|problem| problem.to_string());
            assert!(!text.iter().any(|text| text.contains("canary")), "{text:?}");
            text.is_some_and(|text| text.contains(&format!(": {variable} ")))
        };
        let found = (
            named(LogSettings::from_variables(get).err()),
            named(MetricSettings::from_variables(get).err()),
        );
        assert_eq!(found, (logs, metrics));
    }

    #[test]
    fn logs_and_metrics_are_exported_only_if_their_exporter_is_named() {
        let of = |variables: &[(&str, &str)]| {
            let get = |name: &str| {
                let found = variables.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| (*value).to_owned())
            };
            let logs = LogSettings::from_variables(get).unwrap();
            let metrics = MetricSettings::from_variables(get).unwrap();
            (
                logs.map(|logs| logs.export.endpoint.to_string()),
                metrics.map(|metrics| metrics.export.endpoint.to_string()),
            )
        };
        let url = |url: &str| Some(url.to_owned());
        assert_eq!(of(&[ENDPOINT]), (None, None));
        let own = ("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", "http://l:1/in");
        assert_eq!(of(&[own, ("OTEL_METRICS_EXPORTER", "prometheus")]), (None, None));
        let logs = ("OTEL_LOGS_EXPORTER", "otlp");
        let metrics = ("OTEL_METRICS_EXPORTER", "prometheus,otlp");
        let both = (
            url("http://collector:4318/v1/logs"),
            url("http://collector:4318/v1/metrics"),
        );
        assert_eq!(of(&[ENDPOINT, logs, metrics]), both);
        assert_eq!(of(&[own, logs]), (url("http://l:1/in"), None));
        assert_eq!(of(&[logs]).0, url("http://localhost:4318/v1/logs"));
        assert_eq!(of(&[logs, metrics, ("OTEL_SDK_DISABLED", "true")]), (None, None));
    }

    #[test]
    fn each_signal_has_the_defaults_of_the_specification() {
        let get = |name: &str| name.ends_with("_EXPORTER").then(|| "otlp".to_owned());
        let logs = LogSettings::from_variables(get).unwrap().unwrap();
        let expected = BatchSettings {
            delay: Duration::from_secs(1),
            queue: 2_048,
            batch: 512,
        };
        assert_eq!(logs.batch, expected);
        let metrics = MetricSettings::from_variables(get).unwrap().unwrap();
        assert_eq!(
            (metrics.interval, metrics.limit, metrics.export.timeout),
            (Duration::from_mins(1), Duration::from_secs(30), Duration::from_secs(10))
        );
    }

    #[test]
    fn an_invalid_variable_of_logs_or_metrics_is_named_for_them() {
        let get = |name: &str| match name {
            "OTEL_LOGS_EXPORTER" => Some("console".to_owned()),
            "OTEL_METRICS_EXPORTER" => Some("otlp".into()),
            "OTEL_EXPORTER_OTLP_METRICS_HEADERS" => Some("canary".into()),
            _ => None,
        };
        let logs = LogSettings::from_variables(get).unwrap_err().to_string();
        assert_eq!(
            logs,
            "no logs are exported: OTEL_LOGS_EXPORTER is neither otlp nor none"
        );
        let metrics = MetricSettings::from_variables(get).unwrap_err().to_string();
        assert!(
            metrics.starts_with("no metrics are exported: OTEL_EXPORTER_OTLP_METRICS_HEADERS"),
            "{metrics}"
        );
        assert!(!metrics.contains("canary"), "{metrics}");
    }
}
