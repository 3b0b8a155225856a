//! The warning about Secrets that are sent without TLS, for Agents and Sensors. Pure.

/// What the condition `Accepted` adds for a field with an `http://` or `ws://` URL to which a Secret is sent.
pub(super) fn plain_http_warning(field: &str, scheme: &str, secret: &str) -> String {
    format!(
        "; {field} starts with {scheme}://, so the values of Secret {secret} cross the network in clear text: use {scheme}s://"
    )
}
