//! The Secrets of `tls.caSecretRef` of models, tool servers and the receiver of responses: the key that they must have,
//! and how the gateway gets it. Pure.

use k8s_openapi::api::core::v1::{KeyToPath, SecretProjection, Volume, VolumeMount, VolumeProjection};

use super::manifest;
use super::validate::{InvalidAgent, InvalidReason, ReferenceLookup};
use crate::api::AgentSpec;
use crate::api::agent::KeyRef;
use crate::api::endpoint::ROOTS_KEY;
use crate::api::server_tls::CaSecret;
use crate::controller::pod_mounts::mount;
use crate::link::pod::SERVER_CA_DIR;

const VOLUME: &str = "server-ca";

/// The key that the Secret must have.
pub(super) fn required_key(authority: &CaSecret<'_>) -> KeyRef {
    KeyRef {
        name: authority.secret.to_owned(),
        key: ROOTS_KEY.to_owned(),
    }
}

/// Whether the Secret has its key, by the result of reading it.
pub(super) fn check(authority: &CaSecret<'_>, looked: &ReferenceLookup<()>) -> Result<(), InvalidAgent> {
    let CaSecret { field, secret, .. } = authority;
    let message = match looked {
        ReferenceLookup::Found(()) => return Ok(()),
        ReferenceLookup::NoObject => format!(
            "{field}: Secret {secret} does not exist in this namespace: create it with the key {ROOTS_KEY}, or correct the \
             name"
        ),
        ReferenceLookup::NoKey => {
            format!("{field}: Secret {secret} has no key {ROOTS_KEY}: add it, or name another Secret")
        }
    };
    Err(InvalidAgent {
        reason: InvalidReason::SecretNotFound,
        message,
    })
}

/// One volume with the key of each Secret in a directory of its own; `None`: there are no such Secrets. No other key is
/// mounted: the Secret of an authority may contain its private key too.
pub(super) fn volume(spec: &AgentSpec) -> Option<Volume> {
    let sources = spec.ca_secrets().into_iter().map(|authority| VolumeProjection {
        secret: Some(SecretProjection {
            name: authority.secret.to_owned(),
            items: Some(vec![KeyToPath {
                key: ROOTS_KEY.to_owned(),
                path: format!("{}/{ROOTS_KEY}", authority.dir),
                ..KeyToPath::default()
            }]),
            ..SecretProjection::default()
        }),
        ..VolumeProjection::default()
    });
    let sources: Vec<_> = sources.collect();
    (!sources.is_empty()).then(|| manifest::projected(VOLUME, sources))
}

/// The mount in the gateway.
pub(super) fn gateway_mount(spec: &AgentSpec) -> Option<VolumeMount> {
    (!spec.ca_secrets().is_empty()).then(|| mount(VOLUME, SERVER_CA_DIR, true))
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;
    use serde_json::{Value, json};

    use super::*;
    use crate::api::Agent;
    use crate::controller::agent::decide_tests::settings;

    fn agent(tls: &Value) -> Agent {
        let model = json!({"api": "OpenAIChat", "name": "m", "baseURL": "https://m/v1", "tls": tls});
        let server = json!({"name": "hub", "url": "https://hub/mcp", "tls": tls});
        let receiver = json!({"url": "https://receiver/", "tls": tls});
        serde_json::from_value(json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
            "metadata": {"name": "a", "namespace": "n", "uid": "u"},
            "spec": {
                "model": model, "lightModel": model, "tools": {"builtin": ["Files"], "servers": [server]},
                "mode": "Task", "task": {"responses": {"http": receiver}},
            },
        }))
        .unwrap()
    }

    fn pod(tls: &Value) -> Value {
        let pod = manifest::pod(&agent(tls), 1, &settings());
        serde_json::to_value(pod).unwrap()["spec"].clone()
    }

    /// The containers with a mount of the volume, and where.
    fn mounted(pod: &Value) -> Vec<(String, Value)> {
        let containers = ["initContainers", "containers"].map(|list| pod[list].as_array().unwrap());
        let mut found = Vec::new();
        for container in containers.into_iter().flatten() {
            for mount in container["volumeMounts"].as_array().into_iter().flatten() {
                if mount["name"] == VOLUME {
                    found.push((container["name"].as_str().unwrap().to_owned(), mount.clone()));
                }
            }
        }
        found
    }

    #[test]
    fn only_the_gateway_gets_the_certificates_and_only_them() {
        let pod = pod(&json!({"caSecretRef": {"name": "roots"}}));
        let mount = json!({"name": VOLUME, "mountPath": "/etc/agentloop/server-ca", "readOnly": true});
        assert_eq!(mounted(&pod), [("gateway".to_owned(), mount)]);
        let volumes = pod["volumes"].as_array().unwrap();
        let volumes: Vec<_> = volumes.iter().filter(|volume| volume["name"] == VOLUME).collect();
        let source = |path: &str| json!({"secret": {"name": "roots", "items": [{"key": "ca.crt", "path": path}]}});
        let paths = [
            "model/ca.crt",
            "light-model/ca.crt",
            "tools/hub/ca.crt",
            "task.responses/ca.crt",
        ];
        let sources = paths.map(source);
        let expected = json!({"name": VOLUME, "projected": {"defaultMode": 0o440, "sources": sources}});
        assert_eq!(volumes, [&expected]);
    }

    #[test]
    fn without_an_authority_a_pod_has_no_volume_for_one() {
        let pod = pod(&Value::Null);
        assert_eq!(mounted(&pod), []);
        assert!(!pod.to_string().contains(VOLUME), "{pod}");
    }

    #[test]
    fn a_missing_secret_or_key_is_told_with_its_field_and_the_fix() {
        let agent = agent(&json!({"caSecretRef": {"name": "roots"}}));
        let authorities = agent.spec.ca_secrets();
        let server = &authorities[2];
        assert_eq!(required_key(server).key, "ca.crt");
        assert_eq!(check(server, &ReferenceLookup::Found(())), Ok(()));
        let field = "spec.tools.servers[hub].tls.caSecretRef: Secret roots";
        for (looked, says) in [
            (
                ReferenceLookup::NoObject,
                "does not exist in this namespace: create it with the key ca.crt, or correct the name",
            ),
            (
                ReferenceLookup::NoKey,
                "has no key ca.crt: add it, or name another Secret",
            ),
        ] {
            let invalid = check(server, &looked).unwrap_err();
            assert_eq!(invalid.reason, InvalidReason::SecretNotFound);
            assert_eq!(invalid.message, format!("{field} {says}"));
        }
    }
}
