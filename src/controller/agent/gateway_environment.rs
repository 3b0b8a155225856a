//! The `OTEL_*` variables of gateways and sensor pods: those of the controller, and beside them what is in Secrets: the
//! headers, and the file of the collector's authorities.

use k8s_openapi::api::core::v1::{EnvVar, EnvVarSource, SecretKeySelector};

use crate::link::pod::OTLP_CA_FILE;
use crate::otlp::PASSED_VARIABLES;

const HEADERS: &str = "OTEL_EXPORTER_OTLP_HEADERS";
const CERTIFICATE: &str = "OTEL_EXPORTER_OTLP_CERTIFICATE";
const LOGS_EXPORTER: &str = "OTEL_LOGS_EXPORTER";
/// In the names of variables that say how traces are exported.
const OF_TRACES: [&str; 3] = ["_TRACES_", "_BSP_", "_GENAI_"];
/// Key of the headers in their Secret.
const HEADERS_KEY: &str = "headers";

/// Names of Secrets in the namespaces of Agents and Sensors. An empty name counts as none.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExportSecrets<'a> {
    /// That of the headers. Without the Secret, pods export without headers.
    pub headers: Option<&'a str>,
    /// That of the collector's authorities, which is mounted at [`OTLP_CA_FILE`]. Without the Secret, pods export nothing to a
    /// collector at `https`.
    pub authorities: Option<&'a str>,
}

/// The variables that gateways get: those that `variable` has a value for, and those of the Secrets.
#[must_use]
pub fn trace_variables(variable: impl Fn(&str) -> Option<String>, secrets: ExportSecrets<'_>) -> Vec<EnvVar> {
    let given = PASSED_VARIABLES.iter().filter_map(|name| {
        let value = variable(name).filter(|value| !value.is_empty())?;
        Some(EnvVar {
            name: (*name).into(),
            // The kubelet expands `$(NAME)`; `$$` is a literal `$`.
            value: Some(value.replace('$', "$$")),
            ..EnvVar::default()
        })
    });
    let headers = secrets.headers.filter(|name| !name.is_empty()).map(|name| EnvVar {
        name: HEADERS.into(),
        value_from: Some(EnvVarSource {
            secret_key_ref: Some(SecretKeySelector {
                name: name.into(),
                key: HEADERS_KEY.into(),
                optional: Some(true),
            }),
            ..EnvVarSource::default()
        }),
        ..EnvVar::default()
    });
    let authorities = secrets.authorities.filter(|name| !name.is_empty());
    let certificate = authorities.map(|_| EnvVar {
        name: CERTIFICATE.into(),
        value: Some(OTLP_CA_FILE.into()),
        ..EnvVar::default()
    });
    given.chain(headers).chain(certificate).collect()
}

/// The variables that sensor pods get: none if no logs are exported, since they export nothing else.
#[must_use]
pub fn log_variables(variable: impl Fn(&str) -> Option<String>, secrets: ExportSecrets<'_>) -> Vec<EnvVar> {
    if variable(LOGS_EXPORTER).as_deref() != Some("otlp") {
        return Vec::new();
    }
    let mut all = trace_variables(variable, secrets);
    all.retain(|given| !OF_TRACES.iter().any(|part| given.name.contains(part)));
    all
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;

    use super::*;

    const SECRETS: ExportSecrets<'static> = ExportSecrets {
        headers: Some("otlp"),
        authorities: Some("collector"),
    };

    /// Names and values of variables.
    fn values(given: &[EnvVar]) -> Vec<(&str, Option<&str>)> {
        let each = given.iter();
        each.map(|variable| (variable.name.as_str(), variable.value.as_deref()))
            .collect()
    }

    #[test]
    fn gateways_receive_the_variables_that_are_set_and_no_headers_or_files_of_the_controller() {
        let variable = |name: &str| match name {
            "OTEL_EXPORTER_OTLP_ENDPOINT" => Some("http://collector:4318".to_owned()),
            "OTEL_RESOURCE_ATTRIBUTES" => Some("price=$(HOME)".into()),
            "OTEL_SERVICE_NAME" => Some(String::new()),
            "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT" => Some("true".into()),
            "OTEL_EXPORTER_OTLP_HEADERS" => Some("authorization=canary".into()),
            "OTEL_EXPORTER_OTLP_CERTIFICATE" => Some("/of/the/controller".into()),
            _ => None,
        };
        let given = trace_variables(variable, ExportSecrets::default());
        assert_eq!(
            values(&given),
            [
                ("OTEL_EXPORTER_OTLP_ENDPOINT", Some("http://collector:4318")),
                ("OTEL_RESOURCE_ATTRIBUTES", Some("price=$$(HOME)")),
                ("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", Some("true")),
            ]
        );
    }

    #[test]
    fn headers_come_from_a_secret_that_may_be_missing() {
        let headers = |name| ExportSecrets {
            headers: Some(name),
            authorities: None,
        };
        let given = trace_variables(|_| None, headers("otlp"));
        let from = given[0].value_from.as_ref().unwrap().secret_key_ref.as_ref().unwrap();
        assert_eq!((given.len(), given[0].name.as_str()), (1, "OTEL_EXPORTER_OTLP_HEADERS"));
        assert_eq!(
            (from.name.as_str(), from.key.as_str(), from.optional),
            ("otlp", "headers", Some(true))
        );
        assert!(trace_variables(|_| None, headers("")).is_empty());
    }

    #[test]
    fn the_file_of_authorities_is_named_if_there_is_a_secret_for_it() {
        let authorities = |name| ExportSecrets {
            headers: None,
            authorities: Some(name),
        };
        let given = trace_variables(|_| None, authorities("collector"));
        assert_eq!(
            values(&given),
            [("OTEL_EXPORTER_OTLP_CERTIFICATE", Some("/etc/agentloop/otlp-ca/ca.crt"))]
        );
        assert!(trace_variables(|_| None, authorities("")).is_empty());
    }

    #[test]
    fn sensor_pods_receive_the_variables_for_logs_once_logs_are_exported() {
        let variable = |logs: &'static str| {
            move |name: &str| match name {
                "OTEL_EXPORTER_OTLP_ENDPOINT" => Some("http://collector:4318".to_owned()),
                "OTEL_LOGS_EXPORTER" => Some(logs.into()),
                "OTEL_TRACES_SAMPLER_ARG" | "OTEL_BSP_MAX_QUEUE_SIZE" | "OTEL_BLRP_MAX_QUEUE_SIZE" => Some("1".into()),
                "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT" => Some("true".into()),
                _ => None,
            }
        };
        let given = log_variables(variable("otlp"), SECRETS);
        let names: Vec<_> = given.iter().map(|given| given.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "OTEL_LOGS_EXPORTER",
                "OTEL_EXPORTER_OTLP_ENDPOINT",
                "OTEL_BLRP_MAX_QUEUE_SIZE",
                "OTEL_EXPORTER_OTLP_HEADERS",
                "OTEL_EXPORTER_OTLP_CERTIFICATE"
            ]
        );
        assert!(log_variables(variable("none"), SECRETS).is_empty());
        assert!(log_variables(|_| None, SECRETS).is_empty());
    }
}
