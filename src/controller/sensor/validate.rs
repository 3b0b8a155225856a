//! Validates what admission cannot see of a Sensor. Pure.

use kube::core::Selector;

use crate::api::SensorSpec;
use crate::controller::plain_http::plain_http_warning;
use crate::sensor_pipeline;

/// The Agents that a spec selects by labels. `None`: none, or by a selector that [`validate`] refuses.
pub(super) fn selector(spec: &SensorSpec) -> Option<Selector> {
    spec.agent_selector.clone()?.try_into().ok()
}

/// What is wrong with a spec, with field and fix. Takes up to a second of CPU time for the worst spec that admission lets
/// through, so it runs on a thread for blocking work, and once for each generation.
pub(super) fn validate(spec: &SensorSpec) -> Option<String> {
    let selector = spec.agent_selector.clone().map(Selector::try_from).transpose();
    let unselected = selector
        .err()
        .map(|error| format!("spec.agentSelector.matchExpressions: {error}; In and NotIn need values"));
    let mistakes = sensor_pipeline::check(spec).err().map(|mistakes| mistakes.to_string());
    let problems: Vec<String> = unselected.into_iter().chain(mistakes).collect();
    (!problems.is_empty()).then(|| problems.join("; "))
}

/// What `Accepted` adds when a Secret is sent without TLS. A client certificate is not: it belongs to TLS.
pub(super) fn plain_http(spec: &SensorSpec) -> Option<String> {
    let endpoint = spec.source.endpoint()?;
    let secret = endpoint.headers?;
    let scheme = ["http", "ws"].into_iter().find(|scheme| {
        let rest = endpoint.url.strip_prefix(scheme);
        rest.is_some_and(|rest| rest.starts_with("://"))
    })?;
    let field = format!("{}.url", endpoint.field);
    Some(plain_http_warning(&field, scheme, &secret.name))
}

/// Whether [`validate`] says the same of two specs because they differ only in what it does not look at.
pub(super) fn is_checked_alike(one: &SensorSpec, other: &SensorSpec) -> bool {
    let looked_at = |spec: &SensorSpec| SensorSpec {
        agent_names: Vec::new(),
        suspend: false,
        ..spec.clone()
    };
    looked_at(one) == looked_at(other)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;

    fn spec(source: &Value) -> SensorSpec {
        serde_json::from_value(json!({"agentNames": ["a"], "source": source})).unwrap()
    }

    #[rstest]
    #[case(json!({"poll": {"http": {"url": "SCHEME://a/", "headersSecretRef": {"name": "key"}}}}), "http", "spec.source.poll.http.url")]
    #[case(
        json!({"poll": {"prometheus": {"url": "SCHEME://a/", "query": "up", "headersSecretRef": {"name": "key"}}}}),
        "http",
        "spec.source.poll.prometheus.url"
    )]
    #[case(
        json!({"poll": {"tool": {"server": {"url": "SCHEME://a/", "headersSecretRef": {"name": "key"}}, "name": "t"}}}),
        "http",
        "spec.source.poll.tool.server.url"
    )]
    #[case(json!({"stream": {"sse": {"url": "SCHEME://a/", "headersSecretRef": {"name": "key"}}}}), "http", "spec.source.stream.sse.url")]
    #[case(
        json!({"stream": {"webSocket": {"url": "SCHEME://a/", "headersSecretRef": {"name": "key"}}}}),
        "ws",
        "spec.source.stream.webSocket.url"
    )]
    fn a_secret_that_is_sent_over_plain_http_is_reported_with_its_field(
        #[case] source: Value,
        #[case] scheme: &str,
        #[case] field: &str,
    ) {
        let with = |scheme: &str| {
            let source = source.to_string().replace("SCHEME", scheme);
            plain_http(&spec(&serde_json::from_str(&source).unwrap()))
        };
        let warning = with(scheme).unwrap();
        assert!(
            warning.starts_with(&format!("; {field} starts with {scheme}://")),
            "{warning}"
        );
        assert!(
            warning.contains("Secret key") && warning.ends_with(&format!("use {scheme}s://")),
            "{warning}"
        );
        assert_eq!(with(&format!("{scheme}s")), None);
        let mut nothing_sent = source.to_string().replace("SCHEME", scheme);
        nothing_sent = nothing_sent.replace(
            r#""headersSecretRef":{"name":"key"}"#,
            r#""tls":{"clientCertificateSecretRef":{"name":"key"}}"#,
        );
        assert_eq!(plain_http(&spec(&serde_json::from_str(&nothing_sent).unwrap())), None);
    }
}
