//! The Secrets of a source: the keys that they must have, and how they are mounted. Pure.

use k8s_openapi::api::core::v1::{KeyToPath, SecretVolumeSource, Volume, VolumeMount};

use crate::api::endpoint::{CERTIFICATE_KEY, PRIVATE_KEY_KEY, ROOTS_KEY};
use crate::api::sensor::SensorSource;
use crate::controller::pod_mounts::{GROUP_READABLE, directory, file, mount};
use crate::link::pod::{SENSOR_CA_DIR, SENSOR_CERTIFICATE_DIR, SENSOR_HEADERS_DIR, SENSOR_KEY_FILE};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequiredSecret<'a> {
    /// The field that references it.
    pub field: String,
    pub name: &'a str,
    what: SecretUse<'a>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SecretUse<'a> {
    /// Each key is the name of a header.
    Headers,
    /// The signing key of a webhook.
    Key(&'a str),
    /// A trusted certificate authority.
    Authority,
    /// A client certificate and its private key.
    Certificate,
}

#[must_use]
pub fn required(source: &SensorSource) -> Vec<RequiredSecret<'_>> {
    let Some(endpoint) = source.endpoint() else {
        let webhook = source.webhook.as_ref().map(|webhook| RequiredSecret {
            field: "spec.source.webhook.secretKeyRef".into(),
            name: &webhook.secret_key_ref.name,
            what: SecretUse::Key(&webhook.secret_key_ref.key),
        });
        return webhook.into_iter().collect();
    };
    let secrets = [
        (endpoint.headers_secret(), SecretUse::Headers),
        (endpoint.ca_secret(), SecretUse::Authority),
        (endpoint.certificate_secret(), SecretUse::Certificate),
    ];
    let needed = secrets.into_iter().filter_map(|(named, what)| {
        let named = named?;
        Some(RequiredSecret {
            field: named.field,
            name: &named.secret.name,
            what,
        })
    });
    needed.collect()
}

/// What was read of a required Secret, without its values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SecretLookup {
    Absent,
    Found {
        keys: Vec<String>,
        /// Why the signing key of the webhook is not valid for its scheme.
        key_problem: Option<String>,
    },
}

/// A problem with a required Secret, with the field and the fix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SecretProblem {
    /// The Secret or a key is missing.
    Missing(String),
    /// The signing key of the webhook is not valid.
    Unusable(String),
}

/// The first problem with the Secrets of a source. `found`: the result of reading each of [`required`].
pub(super) fn problem(source: &SensorSource, found: &[SecretLookup]) -> Option<SecretProblem> {
    let required = required(source);
    required.iter().zip(found).find_map(|(required, found)| match found {
        SecretLookup::Absent => Some(SecretProblem::Missing(required.absent())),
        SecretLookup::Found { keys, key_problem } => {
            required.missing_keys(keys).map(SecretProblem::Missing).or_else(|| {
                let problem = key_problem.as_ref()?;
                let message = format!("{}: Secret {}: the key {problem}", required.field, required.name);
                Some(SecretProblem::Unusable(message))
            })
        }
    })
}

impl<'a> SecretUse<'a> {
    /// The keys that the source reads; `None`: all.
    fn keys(self) -> Option<Vec<&'a str>> {
        match self {
            Self::Headers => None,
            Self::Key(key) => Some(vec![key]),
            Self::Authority => Some(vec![ROOTS_KEY]),
            Self::Certificate => Some(vec![CERTIFICATE_KEY, PRIVATE_KEY_KEY]),
        }
    }

    fn volume(self) -> &'static str {
        match self {
            Self::Headers => "headers",
            Self::Key(_) => "key",
            Self::Authority => "tls-ca",
            Self::Certificate => "tls-certificate",
        }
    }

    fn directory(self) -> &'static str {
        match self {
            Self::Headers => SENSOR_HEADERS_DIR,
            Self::Key(_) => directory(SENSOR_KEY_FILE),
            Self::Authority => SENSOR_CA_DIR,
            Self::Certificate => SENSOR_CERTIFICATE_DIR,
        }
    }
}

impl RequiredSecret<'_> {
    /// The message if the Secret does not exist.
    pub(super) fn absent(&self) -> String {
        let with = match self.what.keys() {
            None => "a key for each header, such as Authorization".to_owned(),
            Some(keys) => format!("the key {}", keys.join(" and the key ")),
        };
        format!(
            "{}: Secret {} does not exist in this namespace: create it with {with}, or correct the name",
            self.field, self.name
        )
    }

    /// The message if the Secret lacks a required key. `found`: its keys.
    #[must_use]
    pub fn missing_keys(&self, found: &[String]) -> Option<String> {
        let Self { field, name, what } = self;
        let Some(keys) = what.keys() else {
            return found
                .is_empty()
                .then(|| format!("{field}: Secret {name} has no key: add one for each header, such as Authorization"));
        };
        let key = keys.into_iter().find(|key| !found.iter().any(|found| found == key))?;
        let fix = match what {
            SecretUse::Key(_) => "correct the key",
            SecretUse::Headers | SecretUse::Authority | SecretUse::Certificate => "name another Secret",
        };
        Some(format!("{field}: Secret {name} has no key {key}: add it, or {fix}"))
    }

    /// Mounts only the keys that the source reads: the Secret of an authority may contain its private key too.
    pub(super) fn volume(&self) -> Volume {
        let item = |key: &str| KeyToPath {
            key: key.into(),
            path: if let SecretUse::Key(_) = self.what {
                file(SENSOR_KEY_FILE)
            } else {
                key
            }
            .into(),
            ..KeyToPath::default()
        };
        let items = self.what.keys().map(|keys| keys.into_iter().map(item).collect());
        Volume {
            name: self.what.volume().into(),
            secret: Some(SecretVolumeSource {
                secret_name: Some(self.name.into()),
                items,
                default_mode: Some(GROUP_READABLE),
                ..SecretVolumeSource::default()
            }),
            ..Volume::default()
        }
    }

    pub(super) fn mount(&self) -> VolumeMount {
        mount(self.what.volume(), self.what.directory(), true)
    }
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;
    use serde_json::{Value, json};

    use super::*;

    fn missing(source: Value, found: Option<&[&str]>) -> Vec<String> {
        let source: SensorSource = serde_json::from_value(source).unwrap();
        let found: Option<Vec<String>> = found.map(|keys| keys.iter().map(|key| (*key).to_owned()).collect());
        let missing = |needed: &RequiredSecret<'_>| match &found {
            None => Some(needed.absent()),
            Some(found) => needed.missing_keys(found),
        };
        required(&source).iter().filter_map(missing).collect()
    }

    #[test]
    fn a_missing_secret_or_key_is_reported_with_its_field_and_a_fix() {
        let tls = json!({"caSecretRef": {"name": "roots"}, "clientCertificateSecretRef": {"name": "me"}});
        let source =
            || json!({"stream": {"webSocket": {"url": "wss://a", "headersSecretRef": {"name": "keys"}, "tls": tls}}});
        let field = "spec.source.stream.webSocket";
        let absent = "does not exist in this namespace: create it with";
        assert_eq!(
            missing(source(), None),
            [
                format!(
                    "{field}.headersSecretRef: Secret keys {absent} a key for each header, such as Authorization, or correct the name"
                ),
                format!("{field}.tls.caSecretRef: Secret roots {absent} the key ca.crt, or correct the name"),
                format!(
                    "{field}.tls.clientCertificateSecretRef: Secret me {absent} the key tls.crt and the key tls.key, or correct the name"
                ),
            ]
        );
        assert_eq!(
            missing(source(), Some(&["ca.crt", "tls.crt"])),
            [format!(
                "{field}.tls.clientCertificateSecretRef: Secret me has no key tls.key: add it, or name another Secret"
            )]
        );
        assert_eq!(
            missing(source(), Some(&["ca.crt", "tls.crt", "tls.key"])),
            Vec::<String>::new()
        );
        let webhook = json!({"webhook": {"scheme": "GitHub", "secretKeyRef": {"name": "hooks", "key": "main"}}});
        let expected = "spec.source.webhook.secretKeyRef: Secret hooks has no key main: add it, or correct the key";
        assert_eq!(missing(webhook.clone(), Some(&[])), [expected]);
        assert_eq!(missing(webhook, Some(&["main"])), Vec::<String>::new());
        let page = json!({"poll": {"http": {"url": "https://a", "headersSecretRef": {"name": "keys"}}}});
        let expected = "spec.source.poll.http.headersSecretRef: Secret keys has no key: add one for each header, such as Authorization";
        assert_eq!(missing(page, Some(&[])), [expected]);
    }
}
