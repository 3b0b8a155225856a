//! The `OTEL_*` environment variables, as the OpenTelemetry SDKs read them.

use std::time::Duration;

use percent_encoding::percent_decode_str;
use reqwest::Url;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};

use crate::sampler::TraceSampler;

/// The variables that the controller passes to the gateways that it creates. Those of headers are not among them: they
/// may hold a secret, and the manifest of a pod is no place for one.
pub const PASSED_VARIABLES: &[&str] = &[
    "OTEL_SDK_DISABLED",
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_PROTOCOL",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    "OTEL_EXPORTER_OTLP_TIMEOUT",
    "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT",
    "OTEL_SERVICE_NAME",
    "OTEL_RESOURCE_ATTRIBUTES",
    "OTEL_TRACES_SAMPLER",
    "OTEL_TRACES_SAMPLER_ARG",
    "OTEL_BSP_SCHEDULE_DELAY",
    "OTEL_BSP_MAX_QUEUE_SIZE",
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE",
];

const DEFAULT_ENDPOINT: &str = "http://localhost:4318";
const DEFAULT_SERVICE: &str = "agentloop";
const TRACES_PATH: &str = "v1/traces";
/// Largest queue that can be set: spans are in memory until they are exported.
const MOST_QUEUED: usize = 65_536;

/// How traces are exported.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceSettings {
    /// Where to.
    pub(crate) endpoint: Url,
    /// Headers of each request. Their values are marked as sensitive, so they are not printed.
    pub(crate) headers: HeaderMap,
    /// How long one request may take.
    pub(crate) timeout: Duration,
    pub(crate) sampler: TraceSampler,
    /// Attributes of the resource, `service.name` first.
    pub(crate) resource: Vec<(String, String)>,
    /// How long a span waits for others at most.
    pub(crate) delay: Duration,
    /// Spans that wait at most; more are dropped.
    pub(crate) queue: usize,
    /// Spans of one request at most.
    pub(crate) batch: usize,
}

/// Why nothing is exported although a variable asks for it. Names the variable and never its value, which may be a secret.
#[derive(thiserror::Error, Clone, Debug, PartialEq, Eq)]
#[error("no traces are exported: {variable} {problem}")]
pub struct SettingsProblem {
    variable: &'static str,
    problem: &'static str,
}

impl TraceSettings {
    /// Reads the settings from this process's environment. `None`: traces are not exported, which is the default.
    pub fn from_env() -> Result<Option<Self>, SettingsProblem> {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    /// Reads the settings from these variables. An empty variable counts as unset.
    pub fn from_variables(variables: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, SettingsProblem> {
        let get = |name: &str| variables(name).filter(|value| !value.trim().is_empty());
        let first = |names: [&'static str; 2]| names.into_iter().find_map(|name| Some((name, get(name)?)));
        if get("OTEL_SDK_DISABLED").is_some_and(|value| value.trim().eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        let Some(endpoint) = endpoint(&get)? else {
            return Ok(None);
        };
        if let Some((variable, protocol)) = first(["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"])
            && protocol.trim() != "http/protobuf"
        {
            return Err(problem(
                variable,
                "is not http/protobuf, the only protocol that is supported",
            ));
        }
        let headers = match first(["OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS"]) {
            Some((variable, text)) => headers(&text).ok_or_else(|| problem(variable, NO_LIST))?,
            None => HeaderMap::new(),
        };
        let sampler = match get("OTEL_TRACES_SAMPLER") {
            Some(name) => TraceSampler::parse(&name, get("OTEL_TRACES_SAMPLER_ARG").as_deref())
                .ok_or_else(|| problem("OTEL_TRACES_SAMPLER", "or OTEL_TRACES_SAMPLER_ARG is not supported"))?,
            None => TraceSampler::AlwaysOn,
        };
        let timeout = first(["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"]);
        let milliseconds = |text: Option<String>, default| number(text).unwrap_or(default);
        let queue = number(get("OTEL_BSP_MAX_QUEUE_SIZE")).map_or(2_048, to_size);
        let batch = number(get("OTEL_BSP_MAX_EXPORT_BATCH_SIZE")).map_or(512, to_size);
        Ok(Some(Self {
            endpoint,
            headers,
            timeout: Duration::from_millis(milliseconds(timeout.map(|(_, text)| text), 10_000)),
            sampler,
            resource: resource(&get)?,
            delay: Duration::from_millis(milliseconds(get("OTEL_BSP_SCHEDULE_DELAY"), 5_000)),
            queue,
            batch: batch.min(queue),
        }))
    }
}

/// Where traces go; `None`: nowhere. Unlike an SDK, no endpoint means that nothing is exported, unless
/// `OTEL_TRACES_EXPORTER` asks for it.
fn endpoint(get: &impl Fn(&str) -> Option<String>) -> Result<Option<Url>, SettingsProblem> {
    let exporters = get("OTEL_TRACES_EXPORTER");
    let names = || exporters.iter().flat_map(|list| list.split(',')).map(str::trim);
    let asked = names().any(|name| name == "otlp");
    if !asked && names().any(|name| name == "none") {
        return Ok(None);
    }
    if names().any(|name| !matches!(name, "otlp" | "none")) {
        return Err(problem("OTEL_TRACES_EXPORTER", "is neither otlp nor none"));
    }
    let url = |variable, text: &str| {
        let url = Url::parse(text.trim()).ok();
        url.filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
            .ok_or_else(|| problem(variable, "is not a URL with http or https"))
    };
    if let Some(own) = get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") {
        return url("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", &own).map(Some);
    }
    let base = match get("OTEL_EXPORTER_OTLP_ENDPOINT") {
        Some(base) => base,
        None if asked => DEFAULT_ENDPOINT.to_owned(),
        None => return Ok(None),
    };
    let mut url = url("OTEL_EXPORTER_OTLP_ENDPOINT", &base)?;
    let path = format!("{}/{TRACES_PATH}", url.path().trim_end_matches('/'));
    url.set_path(&path);
    Ok(Some(url))
}

const NO_LIST: &str = "is not a list such as key=value,key2=value2";

fn problem(variable: &'static str, problem: &'static str) -> SettingsProblem {
    SettingsProblem { variable, problem }
}

/// A positive number; anything else counts as unset, as in the SDKs.
fn number(text: Option<String>) -> Option<u64> {
    text?.trim().parse().ok().filter(|number| *number > 0)
}

fn to_size(number: u64) -> usize {
    usize::try_from(number).unwrap_or(MOST_QUEUED).min(MOST_QUEUED)
}

/// The pairs of a list in the format of W3C Baggage: `key=value,key2=value2`, percent-encoded.
fn pairs(text: &str) -> Option<Vec<(String, String)>> {
    let decode = |part: &str| Some(percent_decode_str(part.trim()).decode_utf8().ok()?.into_owned());
    let items = text.split(',').filter(|item| !item.trim().is_empty());
    items
        .map(|item| {
            let (key, value) = item.split_once('=')?;
            let key = decode(key).filter(|key| !key.is_empty())?;
            Some((key, decode(value)?))
        })
        .collect()
}

fn headers(text: &str) -> Option<HeaderMap> {
    let mut headers = HeaderMap::new();
    for (name, value) in pairs(text)? {
        let mut value = HeaderValue::try_from(value).ok()?;
        value.set_sensitive(true);
        headers.insert(HeaderName::try_from(name).ok()?, value);
    }
    Some(headers)
}

/// The attributes of the resource that the variables give.
fn resource(get: &impl Fn(&str) -> Option<String>) -> Result<Vec<(String, String)>, SettingsProblem> {
    let variable = "OTEL_RESOURCE_ATTRIBUTES";
    let given = get(variable).map(|text| pairs(&text).ok_or_else(|| problem(variable, NO_LIST)));
    let mut given = given.transpose()?.unwrap_or_default();
    let named = given.iter().position(|(key, _)| key == "service.name");
    let listed = named.map(|at| given.remove(at).1);
    let service = get("OTEL_SERVICE_NAME").or(listed);
    let service = service.unwrap_or_else(|| DEFAULT_SERVICE.into());
    given.insert(0, ("service.name".into(), service));
    Ok(given)
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;
    use rstest::rstest;

    use super::*;

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
        assert!(given(&[ENDPOINT, ("OTEL_SDK_DISABLED", "false")]).headers.is_empty());
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
        assert_eq!(given(variables).endpoint.as_str(), endpoint);
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
        assert_eq!(settings.headers["authorization"], "Basic canary=");
        assert_eq!(settings.headers["x-team"], "a");
        assert!(!format!("{settings:?}").contains("canary"));
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        let attributes = [
            pair("service.name", "listed"),
            pair("deployment.environment.name", "a,b"),
        ];
        assert_eq!(settings.resource, attributes);
        let named = given(&[
            ENDPOINT,
            ("OTEL_SERVICE_NAME", "own"),
            ("OTEL_RESOURCE_ATTRIBUTES", "service.name=x"),
        ]);
        assert_eq!(named.resource, [pair("service.name", "own")]);
        assert_eq!(given(&[ENDPOINT]).resource, [pair("service.name", "agentloop")]);
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
            (settings.headers.len(), settings.headers["b"].as_bytes()),
            (1, &b"2"[..])
        );
        assert_eq!(settings.timeout, Duration::from_secs(2));
    }

    #[test]
    fn queues_are_bounded_and_no_batch_is_larger() {
        let sizes = |queue, batch| {
            let settings = given(&[
                ENDPOINT,
                ("OTEL_BSP_MAX_QUEUE_SIZE", queue),
                ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", batch),
            ]);
            (settings.queue, settings.batch)
        };
        assert_eq!(sizes("", ""), (2_048, 512));
        assert_eq!(sizes("65536", "65536"), (65_536, 65_536));
        assert_eq!(sizes("65537", "65537"), (65_536, 65_536));
        assert_eq!(sizes("10", "11"), (10, 10));
        assert_eq!(sizes("0", "many"), (2_048, 512));
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
    fn an_invalid_variable_is_named_without_its_value(#[case] variable: &str, #[case] value: &str) {
        let mut variables = vec![(variable, value)];
        if variable != ENDPOINT.0 {
            variables.push(ENDPOINT);
        }
        let problem = read(&variables).unwrap_err().to_string();
        assert!(problem.contains(variable), "{problem}");
        assert!(!problem.contains("canary"), "{problem}");
    }
}
