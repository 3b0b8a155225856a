//! How `OTEL_*` variables are read: names by signal, endpoints, headers, lists and numbers.

use std::path::PathBuf;
use std::time::Duration;

use percent_encoding::percent_decode_str;
use reqwest::Url;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};

const DEFAULT_ENDPOINT: &str = "http://localhost:4318";
const DEFAULT_SERVICE: &str = "agentloop";
/// Largest queue that can be set: what is queued is in memory until it is exported.
const MAX_QUEUED: usize = 65_536;
const NO_LIST: &str = "is not a list such as key=value,key2=value2";

/// The environment variables of one signal, and its name in messages.
#[derive(Debug)]
pub(crate) struct SignalVariables {
    /// What the signal exports, in messages.
    pub(crate) name: &'static str,
    exporter: &'static str,
    /// Values of `exporter` beside `otlp` and `none`, which ask for nothing of this.
    others: &'static [&'static str],
    endpoint: &'static str,
    path: &'static str,
    protocol: &'static str,
    headers: &'static str,
    certificate: &'static str,
    timeout: &'static str,
    /// Whether an endpoint suffices to have it exported.
    by_endpoint: bool,
}

pub(crate) const TRACES: SignalVariables = SignalVariables {
    name: "traces",
    exporter: "OTEL_TRACES_EXPORTER",
    others: &[],
    endpoint: "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    path: "v1/traces",
    protocol: "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    headers: "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
    certificate: "OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE",
    timeout: "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT",
    by_endpoint: true,
};

pub(crate) const LOGS: SignalVariables = SignalVariables {
    name: "logs",
    exporter: "OTEL_LOGS_EXPORTER",
    others: &[],
    endpoint: "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT",
    path: "v1/logs",
    protocol: "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL",
    headers: "OTEL_EXPORTER_OTLP_LOGS_HEADERS",
    certificate: "OTEL_EXPORTER_OTLP_LOGS_CERTIFICATE",
    timeout: "OTEL_EXPORTER_OTLP_LOGS_TIMEOUT",
    by_endpoint: false,
};

pub(crate) const METRICS: SignalVariables = SignalVariables {
    name: "metrics",
    exporter: "OTEL_METRICS_EXPORTER",
    // Scrapes are always possible.
    others: &["prometheus"],
    endpoint: "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
    path: "v1/metrics",
    protocol: "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL",
    headers: "OTEL_EXPORTER_OTLP_METRICS_HEADERS",
    certificate: "OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE",
    timeout: "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT",
    by_endpoint: false,
};

/// Why nothing is exported although a variable asks for it. Names the variable and never its value, which may be a secret.
#[derive(thiserror::Error, Clone, Debug, PartialEq, Eq)]
#[error("no {signal} are exported: {variable} {problem}")]
pub struct SettingsProblem {
    pub(crate) signal: &'static str,
    pub(crate) variable: &'static str,
    pub(crate) problem: &'static str,
}

/// The file with the certificates that are trusted instead of the system's roots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RootsFile {
    /// The variable that names it, for messages.
    pub(crate) variable: &'static str,
    pub(crate) file: PathBuf,
}

/// Where and how the requests of a signal are sent.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ExportSettings {
    pub(crate) endpoint: Url,
    /// Headers of each request. Their values are marked as sensitive, so they are not printed.
    pub(crate) headers: HeaderMap,
    /// `None`: the system's roots are trusted.
    pub(crate) roots: Option<RootsFile>,
    /// How long one request may take.
    pub(crate) timeout: Duration,
    /// Attributes of the resource, `service.name` first.
    pub(crate) resource: Vec<(String, String)>,
}

/// How records are gathered into requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BatchSettings {
    /// How long a record waits for others at most.
    pub(crate) delay: Duration,
    /// Records that wait at most; beyond them the oldest are dropped.
    pub(crate) queue: usize,
    /// Records of one request at most.
    pub(crate) batch: usize,
}

/// The environment variables of a batch processor.
#[derive(Debug)]
pub(crate) struct BatchVariables {
    delay: &'static str,
    /// Milliseconds.
    default_delay: u64,
    queue: &'static str,
    batch: &'static str,
}

pub(crate) const SPAN_BATCHES: BatchVariables = BatchVariables {
    delay: "OTEL_BSP_SCHEDULE_DELAY",
    default_delay: 5_000,
    queue: "OTEL_BSP_MAX_QUEUE_SIZE",
    batch: "OTEL_BSP_MAX_EXPORT_BATCH_SIZE",
};

pub(crate) const LOG_BATCHES: BatchVariables = BatchVariables {
    delay: "OTEL_BLRP_SCHEDULE_DELAY",
    default_delay: 1_000,
    queue: "OTEL_BLRP_MAX_QUEUE_SIZE",
    batch: "OTEL_BLRP_MAX_EXPORT_BATCH_SIZE",
};

/// Variables of which an empty one counts as unset.
pub(crate) struct VariableReader<'a> {
    signal: &'static SignalVariables,
    variables: &'a dyn Fn(&str) -> Option<String>,
}

impl<'a> VariableReader<'a> {
    pub(crate) fn new(signal: &'static SignalVariables, variables: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self { signal, variables }
    }

    pub(crate) fn get(&self, name: &str) -> Option<String> {
        (self.variables)(name).filter(|value| !value.trim().is_empty())
    }

    pub(crate) fn problem(&self, variable: &'static str, problem: &'static str) -> SettingsProblem {
        SettingsProblem {
            signal: self.signal.name,
            variable,
            problem,
        }
    }

    /// A positive number. `None`: the variable is not set.
    fn number(&self, variable: &'static str) -> Result<Option<u64>, SettingsProblem> {
        let Some(text) = self.get(variable) else {
            return Ok(None);
        };
        let number = text.trim().parse().ok().filter(|number| *number > 0);
        number
            .map(Some)
            .ok_or_else(|| self.problem(variable, "is not a whole number greater than 0"))
    }

    pub(crate) fn milliseconds(&self, variable: &'static str, default: u64) -> Result<Duration, SettingsProblem> {
        Ok(Duration::from_millis(self.number(variable)?.unwrap_or(default)))
    }

    pub(crate) fn batch(&self, names: &BatchVariables) -> Result<BatchSettings, SettingsProblem> {
        let size = |variable, default| {
            let number = self.number(variable)?;
            Ok(number.map_or(default, |number| {
                usize::try_from(number).unwrap_or(MAX_QUEUED).min(MAX_QUEUED)
            }))
        };
        let queue = size(names.queue, 2_048)?;
        Ok(BatchSettings {
            delay: self.milliseconds(names.delay, names.default_delay)?,
            queue,
            batch: size(names.batch, 512)?.min(queue),
        })
    }

    /// Where the signal goes and how. `None`: it is not exported, which is the default.
    pub(crate) fn export(&self) -> Result<Option<ExportSettings>, SettingsProblem> {
        if self
            .get("OTEL_SDK_DISABLED")
            .is_some_and(|value| value.trim().eq_ignore_ascii_case("true"))
        {
            return Ok(None);
        }
        let Some(endpoint) = self.endpoint()? else {
            return Ok(None);
        };
        if let Some((variable, protocol)) = self.first([self.signal.protocol, "OTEL_EXPORTER_OTLP_PROTOCOL"])
            && protocol.trim() != "http/protobuf"
        {
            let only = "is not http/protobuf, the only protocol that is supported";
            return Err(self.problem(variable, only));
        }
        let headers = match self.first([self.signal.headers, "OTEL_EXPORTER_OTLP_HEADERS"]) {
            Some((variable, text)) => headers(&text).ok_or_else(|| self.problem(variable, NO_LIST))?,
            None => HeaderMap::new(),
        };
        let roots = self.first([self.signal.certificate, "OTEL_EXPORTER_OTLP_CERTIFICATE"]);
        let roots = roots.map(|(variable, file)| RootsFile {
            variable,
            file: file.trim().into(),
        });
        let common = "OTEL_EXPORTER_OTLP_TIMEOUT";
        let own = self.first([self.signal.timeout, common]);
        let timeout = own.map_or(common, |(variable, _)| variable);
        Ok(Some(ExportSettings {
            endpoint,
            headers,
            roots,
            timeout: self.milliseconds(timeout, 10_000)?,
            resource: self.resource()?,
        }))
    }

    fn first(&self, names: [&'static str; 2]) -> Option<(&'static str, String)> {
        names.into_iter().find_map(|name| Some((name, self.get(name)?)))
    }

    /// Where the signal goes; `None`: nowhere. Unlike an SDK, no endpoint means that nothing is exported, unless the
    /// variable of the exporter asks for it.
    fn endpoint(&self) -> Result<Option<Url>, SettingsProblem> {
        let signal = self.signal;
        let exporters = self.get(signal.exporter);
        let names = || exporters.iter().flat_map(|list| list.split(',')).map(str::trim);
        let asked = names().any(|name| name == "otlp");
        if !asked && names().any(|name| name == "none") {
            return Ok(None);
        }
        if names().any(|name| !matches!(name, "otlp" | "none") && !signal.others.contains(&name)) {
            return Err(self.problem(signal.exporter, "is neither otlp nor none"));
        }
        if !asked && !signal.by_endpoint {
            return Ok(None);
        }
        let url = |variable, text: &str| {
            let url = Url::parse(text.trim()).ok();
            url.filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
                .ok_or_else(|| self.problem(variable, "is not a URL with http or https"))
        };
        if let Some(own) = self.get(signal.endpoint) {
            return url(signal.endpoint, &own).map(Some);
        }
        let base = match self.get("OTEL_EXPORTER_OTLP_ENDPOINT") {
            Some(base) => base,
            None if asked => DEFAULT_ENDPOINT.to_owned(),
            None => return Ok(None),
        };
        let mut url = url("OTEL_EXPORTER_OTLP_ENDPOINT", &base)?;
        let path = format!("{}/{}", url.path().trim_end_matches('/'), signal.path);
        url.set_path(&path);
        Ok(Some(url))
    }

    /// The attributes of the resource that the variables give.
    fn resource(&self) -> Result<Vec<(String, String)>, SettingsProblem> {
        let variable = "OTEL_RESOURCE_ATTRIBUTES";
        let given = self.get(variable);
        let given = given.map(|text| pairs(&text).ok_or_else(|| self.problem(variable, NO_LIST)));
        let mut given = given.transpose()?.unwrap_or_default();
        let named = given.iter().position(|(key, _)| key == "service.name");
        let listed = named.map(|at| given.remove(at).1);
        let service = self.get("OTEL_SERVICE_NAME").or(listed);
        let service = service.unwrap_or_else(|| DEFAULT_SERVICE.into());
        given.insert(0, ("service.name".into(), service));
        Ok(given)
    }
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
