//! `http_request`: one request to an allowed host. Redirects are not followed.
//!
//! Hosts are checked by name, and their addresses after they are resolved, by the policy of the Agent's other
//! connections. The list is no fence around a shell in the same container: that one has the pod's network.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use agentloop_egress::{AddressPolicy, Cidr, FilteringResolver};
use agentloop_support::text::{first_chars, root_cause};
use reqwest::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, LOCATION, RETRY_AFTER};
use reqwest::{Client, Method, Request, Response, Url};
use serde::Deserialize;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::answer::ToolAnswer;
use crate::excerpt::Excerpt;

pub(crate) const METHODS: [&str; 6] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"];
pub(crate) const MAX_URL: usize = 8192;
pub(crate) const MAX_BODY: usize = 256 * 1024;
pub(crate) const MAX_HEADERS: usize = 32;
const MAX_HEADER: usize = 8192;
/// Longest time of a request, with its answer.
pub(crate) const MAX_TIME: Duration = Duration::from_secs(50);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of bytes of an answer that are received.
const MAX_RECEIVED: u64 = 64 * 1024 * 1024;
const USER_AGENT: &str = concat!("agentloop/", env!("CARGO_PKG_VERSION"));
/// Headers of an answer that are shown.
const SHOWN: [HeaderName; 4] = [CONTENT_TYPE, CONTENT_ENCODING, LOCATION, RETRY_AFTER];
/// Headers that belong to the connection, and are not for the model to set.
const RESERVED: [&str; 9] = [
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Arguments of `http_request`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HttpRequest {
    url: String,
    #[serde(default = "get")]
    method: String,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    #[serde(default)]
    body: Option<String>,
}

fn get() -> String {
    "GET".into()
}

/// A host that requests may go to: `example.com`, `*.example.com`, `example.com:8443`, or `*` for all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllowedHost {
    name: String,
    port: Option<u16>,
}

/// A string is not an allowed host.
#[derive(thiserror::Error, Clone, Debug, PartialEq, Eq)]
#[error("'{0}' is not a host; write it as example.com, *.example.com or example.com:8443")]
pub struct AllowedHostError(String);

impl std::str::FromStr for AllowedHost {
    type Err = AllowedHostError;

    fn from_str(text: &str) -> Result<Self, AllowedHostError> {
        let wrong = || AllowedHostError(text.into());
        let (name, port) = match text.rsplit_once(':') {
            // An IPv6 address without a port ends in a bracket.
            Some((name, port)) if !text.ends_with(']') => (name, Some(port.parse().map_err(|_| wrong())?)),
            _ => (text, None),
        };
        let host = name.strip_prefix("*.").unwrap_or(name);
        // The same spelling as in URLs: lower case, Punycode, one form of each address.
        let known = Url::parse(&format!("http://{host}/")).ok();
        let known = known.filter(|url| url.path() == "/" && url.port().is_none() && url.username().is_empty());
        let known = known.as_ref().and_then(Url::host_str);
        let name = match (name, known) {
            ("*", _) => "*".to_owned(),
            (_, Some(host)) if !host.contains('*') && name.starts_with("*.") => format!("*.{host}"),
            (_, Some(host)) if !host.contains('*') => host.to_owned(),
            _ => return Err(wrong()),
        };
        Ok(Self { name, port })
    }
}

impl AllowedHost {
    /// Whether it allows this URL. Without a port, only the scheme's own port is allowed.
    fn allows(&self, url: &Url) -> bool {
        let Some(host) = url.host_str() else {
            return false;
        };
        let host = host.strip_suffix('.').unwrap_or(host);
        let is_named = match self.name.strip_prefix('*') {
            Some("") => true,
            // "*.example.com" does not allow "example.com".
            Some(suffix) => host.len() > suffix.len() && host.ends_with(suffix),
            None => host == self.name,
        };
        // `port()` is `None` for the port of the scheme.
        let is_port = match self.port {
            Some(port) => url.port_or_known_default() == Some(port),
            None => url.port().is_none(),
        };
        is_named && is_port
    }
}

/// Which addresses requests may go to.
#[derive(Clone, Debug)]
pub(crate) struct Egress {
    pub(crate) allowed: Vec<Cidr>,
    pub(crate) denied: Vec<Cidr>,
    pub(crate) private: bool,
}

impl Egress {
    /// The policy of Agents, without the loopback addresses of the pod, where servers with credentials may listen.
    fn policy(self) -> AddressPolicy {
        let loopback = [
            (IpAddr::from(Ipv4Addr::LOCALHOST), "127.0.0.0/8"),
            (IpAddr::from(Ipv6Addr::LOCALHOST), "::1/128"),
        ];
        let mut denied = self.denied;
        for (address, range) in loopback {
            if !self.allowed.iter().any(|cidr| cidr.contains(address)) {
                denied.extend(range.parse::<Cidr>());
            }
        }
        AddressPolicy::of_agents(self.allowed, denied, self.private)
    }
}

/// Sends requests.
pub(crate) struct HttpTool {
    hosts: Vec<AllowedHost>,
    policy: Arc<AddressPolicy>,
    /// Made with the first request: loading the trusted roots takes memory.
    client: OnceLock<Result<Client, String>>,
}

impl HttpTool {
    pub(crate) fn new(hosts: Vec<AllowedHost>, egress: Egress) -> Self {
        Self {
            hosts,
            policy: Arc::new(egress.policy()),
            client: OnceLock::new(),
        }
    }

    /// Sends a request and returns at most `limit` bytes of the answer's body.
    pub(crate) async fn run(&self, wanted: &HttpRequest, limit: usize, cancelled: &CancellationToken) -> ToolAnswer {
        let request = match self.request(wanted) {
            Ok(request) => request,
            Err(text) => return ToolAnswer::error(text),
        };
        let is_https = request.url().scheme() == "https";
        let client = match self.client(is_https) {
            Ok(client) => client,
            Err(text) => return ToolAnswer::error(text),
        };
        let sent = length(&request);
        let sending = timeout(MAX_TIME, exchange(&client, request, limit));
        let answer = tokio::select! {
            answer = sending => answer.unwrap_or_else(|_| {
                Err(format!("no complete answer within {} s; the request may have been processed", MAX_TIME.as_secs()))
            }),
            () = cancelled.cancelled() => Err("the call was cancelled; the request may have been processed".into()),
        };
        match answer {
            Ok(text) => ToolAnswer::text(text).sent(sent),
            Err(text) => ToolAnswer::error(text).sent(sent),
        }
    }

    fn client(&self, is_https: bool) -> Result<Client, String> {
        if !is_https {
            // Plain HTTP needs no roots, and none may be installed.
            return self.build(Client::builder().tls_certs_only([]));
        }
        self.client.get_or_init(|| self.build(Client::builder())).clone()
    }

    fn build(&self, builder: reqwest::ClientBuilder) -> Result<Client, String> {
        // Another part of the process may have installed it.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = builder
            .user_agent(USER_AGENT)
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT_TIMEOUT)
            .dns_resolver(Arc::new(FilteringResolver(Arc::clone(&self.policy))))
            .build();
        client.map_err(|error| format!("cannot create the HTTP client: {}", root_cause(&error)))
    }

    fn request(&self, wanted: &HttpRequest) -> Result<Request, String> {
        let url = self.url(&wanted.url)?;
        if !METHODS.contains(&&*wanted.method) {
            return Err(format!("method must be one of {}", METHODS.join(", ")));
        }
        let method = Method::from_bytes(wanted.method.as_bytes()).map_err(|_| "method is invalid".to_owned())?;
        let mut request = Request::new(method, url);
        *request.headers_mut() = headers(&wanted.headers)?;
        if let Some(body) = &wanted.body {
            if body.len() > MAX_BODY {
                return Err(format!("body is longer than {} KiB", MAX_BODY / 1024));
            }
            *request.body_mut() = Some(body.clone().into());
        }
        Ok(request)
    }

    fn url(&self, text: &str) -> Result<Url, String> {
        if text.len() > MAX_URL {
            return Err(format!("url is longer than {MAX_URL} bytes"));
        }
        let url = Url::parse(text).map_err(|error| format!("url is not valid: {error}"))?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err("url must begin with https:// or http://".into());
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err("url must not contain a user or password; use the Authorization header".into());
        }
        if !self.hosts.iter().any(|host| host.allows(&url)) {
            let host = first_chars(url.host_str().unwrap_or_default(), 200);
            let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
            return Err(format!(
                "{host}{port} is not in the list of allowed hosts; only an administrator can change it"
            ));
        }
        self.policy.check_url(&url).map_err(|denied| denied.to_string())?;
        Ok(url)
    }
}

fn headers(wanted: &BTreeMap<String, String>) -> Result<HeaderMap, String> {
    if wanted.len() > MAX_HEADERS {
        return Err(format!("headers has more than {MAX_HEADERS} entries"));
    }
    let mut headers = HeaderMap::new();
    for (name, value) in wanted {
        let shown = first_chars(name, 100);
        let name = HeaderName::try_from(name).map_err(|_| format!("headers.{shown} is not a valid header name"))?;
        if RESERVED.contains(&name.as_str()) || name.as_str().starts_with("proxy-") {
            return Err(format!("headers.{shown} is set by the connection; leave it out"));
        }
        let valid = HeaderValue::try_from(value).ok().filter(|_| value.len() <= MAX_HEADER);
        let Some(mut value) = valid else {
            return Err(format!(
                "headers.{shown} must be one line of at most {MAX_HEADER} bytes"
            ));
        };
        value.set_sensitive(true);
        headers.insert(name, value);
    }
    Ok(headers)
}

/// The bytes of a request, without TLS and what the connection adds.
fn length(request: &Request) -> u64 {
    let headers: usize = request
        .headers()
        .iter()
        .map(|(name, value)| name.as_str().len() + value.len() + 4)
        .sum();
    let body = request.body().and_then(reqwest::Body::as_bytes).map_or(0, <[u8]>::len);
    let line = request.method().as_str().len() + request.url().as_str().len() + 12;
    (line + headers + body) as u64
}

async fn exchange(client: &Client, request: Request, limit: usize) -> Result<String, String> {
    let response = client.execute(request).await.map_err(|error| {
        let cause = root_cause(&error);
        let cause = first_chars(&cause, 200);
        if error.is_connect() {
            format!("cannot connect: {cause}")
        } else {
            format!("no answer: {cause}; the request may have been processed")
        }
    })?;
    read(response, limit).await
}

async fn read(mut response: Response, limit: usize) -> Result<String, String> {
    let mut text = format!("status {}\n", response.status());
    for name in SHOWN {
        if let Some(value) = response.headers().get(&name) {
            let value = String::from_utf8_lossy(value.as_bytes());
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{name}: {}", first_chars(&value, 1000));
        }
    }
    let (mut body, mut is_binary) = (Excerpt::new(limit), false);
    loop {
        match response.chunk().await {
            Ok(Some(chunk)) => {
                is_binary = is_binary || (body.total() == 0 && chunk.contains(&0));
                body.push(&chunk);
                if body.total() > MAX_RECEIVED {
                    return Err(format!(
                        "{text}the body is longer than {} MiB",
                        MAX_RECEIVED / 1024 / 1024
                    ));
                }
            }
            Ok(None) => break,
            Err(error) => return Err(format!("{text}the answer ended early: {}", root_cause(&error))),
        }
    }
    let body = match body.total() {
        0 => "[no body]".to_owned(),
        bytes if is_binary => format!("[{bytes} bytes of binary data]"),
        _ => body.into_text(),
    };
    Ok(format!("{text}\n{body}"))
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;
    use rstest::rstest;

    use super::*;

    fn tool(hosts: &[&str]) -> HttpTool {
        let hosts = hosts.iter().map(|host| host.parse().unwrap()).collect();
        let egress = Egress {
            allowed: vec![],
            denied: vec![],
            private: true,
        };
        HttpTool::new(hosts, egress)
    }

    #[rstest]
    #[case("example.com", "https://example.com/x", true)]
    #[case("example.com", "http://EXAMPLE.com.", true)]
    #[case("example.com", "https://example.com:8443/", false)]
    #[case("example.com", "https://a.example.com/", false)]
    #[case("example.com", "https://example.com.evil.org/", false)]
    #[case("example.com", "https://evilexample.com/", false)]
    #[case("Example.COM:8443", "https://example.com:8443/", true)]
    #[case("example.com:8443", "https://example.com/", false)]
    #[case("example.com:443", "https://example.com/", true)]
    #[case("example.com:443", "http://example.com/", false)]
    #[case("*.example.com", "https://a.b.example.com/", true)]
    #[case("*.example.com", "https://example.com/", false)]
    #[case("*.example.com", "https://.example.com/", false)]
    #[case("*", "https://anything.org/", true)]
    #[case("*", "https://anything.org:81/", false)]
    #[case("*", "ftp://anything.org/", false)]
    #[case("*", "https://user:secret@anything.org/", false)]
    #[case("[fd00::1]:81", "http://[fd00:0::1]:81/", true)]
    #[case("münchen.de", "https://xn--mnchen-3ya.de/", true)]
    fn only_allowed_hosts_and_ports_are_reached(#[case] host: &str, #[case] url: &str, #[case] allowed: bool) {
        assert_eq!(tool(&[host]).url(url).is_ok(), allowed);
    }

    #[rstest]
    #[case("")]
    #[case("http://example.com")]
    #[case("example.com/path")]
    #[case("example.com:x")]
    #[case("a*.example.com")]
    #[case("user@example.com")]
    fn an_invalid_host_is_rejected(#[case] text: &str) {
        assert_eq!(text.parse::<AllowedHost>(), Err(AllowedHostError(text.into())));
    }

    #[rstest]
    #[case("http://169.254.169.254/")]
    #[case("http://[fe80::1]/")]
    #[case("http://127.0.0.1/")]
    #[case("http://[::1]/")]
    #[case("http://0x7f.1/")]
    fn link_local_and_loopback_addresses_are_refused_even_if_all_hosts_are_allowed(#[case] url: &str) {
        let refusal = tool(&["*"]).url(url).unwrap_err();
        assert!(refusal.contains("egress.agents.allowedCIDRs"), "{refusal}");
    }

    #[test]
    fn loopback_is_open_only_to_a_range_that_contains_it() {
        let policy = |allowed: &str| {
            let allowed = vec![allowed.parse().unwrap()];
            let (denied, private) = (vec![], true);
            Egress {
                allowed,
                denied,
                private,
            }
            .policy()
        };
        let check = |allowed: &str| policy(allowed).check("127.0.0.1".parse().unwrap()).is_ok();
        assert_eq!((check("127.0.0.0/8"), check("10.0.0.0/8")), (true, false));
    }

    #[test]
    fn headers_of_the_connection_and_headers_that_are_not_one_line_are_refused() {
        let one = |name: &str, value: &str| headers(&BTreeMap::from([(name.to_owned(), value.to_owned())])).is_ok();
        assert!(one("Authorization", "Bearer x") && one("X-A", &"x".repeat(MAX_HEADER)));
        assert!(!one("Host", "a") && !one("content-length", "1") && !one("Proxy-Authorization", "x"));
        assert!(!one("X-A", "a\r\nHost: b") && !one("X A", "a") && !one("X-A", &"x".repeat(MAX_HEADER + 1)));
        let many = |count: usize| {
            headers(
                &(0..count)
                    .map(|number| (format!("x-{number}"), String::new()))
                    .collect(),
            )
        };
        assert!(many(MAX_HEADERS).is_ok() && many(MAX_HEADERS + 1).is_err());
    }
}
