//! The `OTEL_*` variables of gateways and sensor pods: those of the controller, and the headers from a Secret beside them.

use k8s_openapi::api::core::v1::{EnvVar, EnvVarSource, SecretKeySelector};

use crate::otlp::PASSED_VARIABLES;

const HEADERS: &str = "OTEL_EXPORTER_OTLP_HEADERS";
const LOGS_EXPORTER: &str = "OTEL_LOGS_EXPORTER";
/// In the names of variables that say how traces are exported.
const OF_TRACES: [&str; 3] = ["_TRACES_", "_BSP_", "_GENAI_"];
/// Key of the headers in their Secret.
const HEADERS_KEY: &str = "headers";

/// The variables that gateways get: those that `variable` has a value for, and the headers in the Secret of this name in
/// the namespace of the Agent. Without that Secret a gateway exports without headers.
#[must_use]
pub fn trace_variables(variable: impl Fn(&str) -> Option<String>, headers_secret: Option<&str>) -> Vec<EnvVar> {
    let given = PASSED_VARIABLES.iter().filter_map(|name| {
        let value = variable(name).filter(|value| !value.is_empty())?;
        Some(EnvVar {
            name: (*name).into(),
            // The kubelet expands `$(NAME)`; `$$` is a literal `$`.
            value: Some(value.replace('$', "$$")),
            ..EnvVar::default()
        })
    });
    let headers = headers_secret.filter(|name| !name.is_empty()).map(|name| EnvVar {
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
    given.chain(headers).collect()
}

/// The variables that sensor pods get: none if no logs are exported, since they export nothing else.
#[must_use]
pub fn log_variables(variable: impl Fn(&str) -> Option<String>, headers_secret: Option<&str>) -> Vec<EnvVar> {
    if variable(LOGS_EXPORTER).as_deref() != Some("otlp") {
        return Vec::new();
    }
    let mut all = trace_variables(variable, headers_secret);
    all.retain(|given| !OF_TRACES.iter().any(|part| given.name.contains(part)));
    all
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;

    use super::*;

    #[test]
    fn gateways_receive_the_variables_that_are_set_and_no_headers_of_the_controller() {
        let variable = |name: &str| match name {
            "OTEL_EXPORTER_OTLP_ENDPOINT" => Some("http://collector:4318".to_owned()),
            "OTEL_RESOURCE_ATTRIBUTES" => Some("price=$(HOME)".into()),
            "OTEL_SERVICE_NAME" => Some(String::new()),
            "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT" => Some("true".into()),
            "OTEL_EXPORTER_OTLP_HEADERS" => Some("authorization=canary".into()),
            _ => None,
        };
        let given = trace_variables(variable, None);
        let given: Vec<_> = given
            .iter()
            .map(|variable| (variable.name.as_str(), variable.value.as_deref()))
            .collect();
        assert_eq!(
            given,
            [
                ("OTEL_EXPORTER_OTLP_ENDPOINT", Some("http://collector:4318")),
                ("OTEL_RESOURCE_ATTRIBUTES", Some("price=$$(HOME)")),
                ("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", Some("true")),
            ]
        );
    }

    #[test]
    fn headers_come_from_a_secret_that_may_be_missing() {
        let given = trace_variables(|_| None, Some("otlp"));
        let from = given[0].value_from.as_ref().unwrap().secret_key_ref.as_ref().unwrap();
        assert_eq!((given.len(), given[0].name.as_str()), (1, "OTEL_EXPORTER_OTLP_HEADERS"));
        assert_eq!(
            (from.name.as_str(), from.key.as_str(), from.optional),
            ("otlp", "headers", Some(true))
        );
        assert!(trace_variables(|_| None, Some("")).is_empty());
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
        let given = log_variables(variable("otlp"), Some("otlp"));
        let names: Vec<_> = given.iter().map(|given| given.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "OTEL_LOGS_EXPORTER",
                "OTEL_EXPORTER_OTLP_ENDPOINT",
                "OTEL_BLRP_MAX_QUEUE_SIZE",
                "OTEL_EXPORTER_OTLP_HEADERS"
            ]
        );
        assert!(log_variables(variable("none"), Some("otlp")).is_empty());
        assert!(log_variables(|_| None, Some("otlp")).is_empty());
    }
}
