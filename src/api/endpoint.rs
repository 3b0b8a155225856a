//! Where the source of a Sensor connects to, and its TLS settings.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::sensor::SensorSource;
use super::source::StreamSource;
use super::tools::SecretRef;

/// Key of the trusted certificates, as Kubernetes names it.
pub const ROOTS_KEY: &str = "ca.crt";
/// Key of the certificate in a Secret of type `kubernetes.io/tls`.
pub const CERTIFICATE_KEY: &str = "tls.crt";
/// Key of the private key in a Secret of type `kubernetes.io/tls`.
pub const PRIVATE_KEY_KEY: &str = "tls.key";

/// TLS settings, for servers whose certificate is not signed by a system root or that require a client certificate.
/// Changed Secrets take effect with the next connection.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(validation = Rule::new("has(self.caSecretRef) || has(self.clientCertificateSecretRef)").message(
    "tls of a source must have caSecretRef, clientCertificateSecretRef or both: set one, or remove tls to use the system's roots"
))]
#[serde(rename_all = "camelCase")]
pub struct TlsSpec {
    /// A Secret with the key `ca.crt`: PEM certificates that are trusted instead of the system's roots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_secret_ref: Option<SecretRef>,
    /// A Secret with the keys `tls.crt` and `tls.key` in PEM, such as one of type `kubernetes.io/tls`, with which the
    /// Sensor authenticates to the server. If set, redirects to another host are not followed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_certificate_secret_ref: Option<SecretRef>,
}

/// Where a source connects to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceEndpoint<'a> {
    /// Field of the spec that describes it, such as `spec.source.poll.http`.
    pub field: &'static str,
    /// The URL.
    pub url: &'a str,
    /// Secret with headers.
    pub headers: Option<&'a SecretRef>,
    /// TLS settings.
    pub tls: Option<&'a TlsSpec>,
}

/// A Secret of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedSecret<'a> {
    /// Field of the spec that names it.
    pub field: String,
    /// The Secret.
    pub secret: &'a SecretRef,
}

impl<'a> SourceEndpoint<'a> {
    /// The Secret of `headersSecretRef`.
    #[must_use]
    pub fn headers_secret(&self) -> Option<NamedSecret<'a>> {
        self.named("headersSecretRef", self.headers)
    }

    /// The Secret of `tls.caSecretRef`.
    #[must_use]
    pub fn ca_secret(&self) -> Option<NamedSecret<'a>> {
        self.named("tls.caSecretRef", self.tls?.ca_secret_ref.as_ref())
    }

    /// The Secret of `tls.clientCertificateSecretRef`.
    #[must_use]
    pub fn certificate_secret(&self) -> Option<NamedSecret<'a>> {
        let secret = self.tls?.client_certificate_secret_ref.as_ref();
        self.named("tls.clientCertificateSecretRef", secret)
    }

    fn named(&self, name: &str, secret: Option<&'a SecretRef>) -> Option<NamedSecret<'a>> {
        Some(NamedSecret {
            field: format!("{}.{name}", self.field),
            secret: secret?,
        })
    }
}

impl SensorSource {
    /// The endpoint of the source. None for sources that do not connect to one.
    #[must_use]
    pub fn endpoint(&self) -> Option<SourceEndpoint<'_>> {
        let poll = self.poll.as_ref();
        if let Some(http) = poll.and_then(|poll| poll.http.as_ref()) {
            return Some(SourceEndpoint {
                field: "spec.source.poll.http",
                url: &http.url,
                headers: http.headers_secret_ref.as_ref(),
                tls: http.tls.as_ref(),
            });
        }
        if let Some(prometheus) = poll.and_then(|poll| poll.prometheus.as_ref()) {
            return Some(SourceEndpoint {
                field: "spec.source.poll.prometheus",
                url: &prometheus.url,
                headers: prometheus.headers_secret_ref.as_ref(),
                tls: prometheus.tls.as_ref(),
            });
        }
        if let Some(tool) = poll.and_then(|poll| poll.tool.as_ref()) {
            return Some(SourceEndpoint {
                field: "spec.source.poll.tool.server",
                url: &tool.server.url,
                headers: tool.server.headers_secret_ref.as_ref(),
                tls: tool.server.tls.as_ref(),
            });
        }
        self.stream.as_ref()?.endpoint()
    }
}

impl StreamSource {
    fn endpoint(&self) -> Option<SourceEndpoint<'_>> {
        if let Some(sse) = &self.sse {
            return Some(SourceEndpoint {
                field: "spec.source.stream.sse",
                url: &sse.url,
                headers: sse.headers_secret_ref.as_ref(),
                tls: sse.tls.as_ref(),
            });
        }
        if let Some(ndjson) = &self.ndjson {
            return Some(SourceEndpoint {
                field: "spec.source.stream.ndjson",
                url: &ndjson.url,
                headers: ndjson.headers_secret_ref.as_ref(),
                tls: ndjson.tls.as_ref(),
            });
        }
        let socket = self.web_socket.as_ref()?;
        Some(SourceEndpoint {
            field: "spec.source.stream.webSocket",
            url: &socket.url,
            headers: socket.headers_secret_ref.as_ref(),
            tls: socket.tls.as_ref(),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn source(source: Value) -> SensorSource {
        serde_json::from_value(source).unwrap()
    }

    #[test]
    fn each_connecting_source_names_its_address_and_its_secrets() {
        let tls = json!({"caSecretRef": {"name": "ca"}, "clientCertificateSecretRef": {"name": "me"}});
        let place = |url: &str| json!({"url": url, "headersSecretRef": {"name": "keys"}, "tls": tls});
        let query = json!({"url": "https://p", "query": "up", "headersSecretRef": {"name": "keys"}, "tls": tls});
        let sources = [
            (
                "spec.source.poll.http",
                "https://h",
                json!({"poll": {"http": place("https://h")}}),
            ),
            (
                "spec.source.poll.prometheus",
                "https://p",
                json!({"poll": {"prometheus": query}}),
            ),
            (
                "spec.source.poll.tool.server",
                "https://t",
                json!({"poll": {"tool": {"server": place("https://t"), "name": "t"}}}),
            ),
            (
                "spec.source.stream.ndjson",
                "https://n",
                json!({"stream": {"ndjson": place("https://n")}}),
            ),
            (
                "spec.source.stream.sse",
                "https://s",
                json!({"stream": {"sse": place("https://s")}}),
            ),
            (
                "spec.source.stream.webSocket",
                "wss://w",
                json!({"stream": {"webSocket": place("wss://w")}}),
            ),
        ];
        for (field, url, spec) in sources {
            let source = source(spec);
            let endpoint = source.endpoint().unwrap();
            assert_eq!((endpoint.field, endpoint.url), (field, url));
            let secrets = [
                endpoint.headers_secret(),
                endpoint.ca_secret(),
                endpoint.certificate_secret(),
            ];
            let secrets = secrets.into_iter().flatten();
            let secrets: Vec<_> = secrets.map(|named| (named.field, named.secret.name.as_str())).collect();
            let expected = [
                (format!("{field}.headersSecretRef"), "keys"),
                (format!("{field}.tls.caSecretRef"), "ca"),
                (format!("{field}.tls.clientCertificateSecretRef"), "me"),
            ];
            assert_eq!(secrets, expected);
        }
    }

    #[test]
    fn a_clock_and_a_webhook_connect_to_nothing() {
        let webhook = json!({"scheme": "GitHub", "secretKeyRef": {"name": "k", "key": "k"}});
        assert_eq!(source(json!({"webhook": webhook})).endpoint(), None);
        assert_eq!(source(json!({"schedule": {"cron": "* * * * *"}})).endpoint(), None);
    }
}
