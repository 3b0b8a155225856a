//! The metadata of the objects that all pods of a namespace share, and the CA bundle, which both kinds of pods mount. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::names;

/// Labels of the objects that all pods of a namespace share.
pub(in crate::controller) fn shared_labels() -> BTreeMap<String, String> {
    BTreeMap::from([
        ("app.kubernetes.io/part-of".into(), "agentloop".into()),
        ("app.kubernetes.io/managed-by".into(), names::MANAGER.into()),
    ])
}

/// Whether the controller created this object for all pods of a namespace.
pub(super) fn is_shared(meta: &ObjectMeta) -> bool {
    let has = |(key, value): (&String, &String)| {
        meta.labels
            .as_ref()
            .is_some_and(|labels| labels.get(key) == Some(value))
    };
    shared_labels().iter().all(has) && meta.owner_references.as_deref().unwrap_or_default().is_empty()
}

/// A ConfigMap with the CA bundle of the link.
pub(super) fn ca_bundle((namespace, name): (&str, &str), bundle: &str) -> ConfigMap {
    ConfigMap {
        metadata: shared_meta(namespace, name),
        data: Some(BTreeMap::from([("ca.crt".into(), bundle.into())])),
        ..ConfigMap::default()
    }
}

pub(in crate::controller) fn shared_meta(namespace: &str, name: &str) -> ObjectMeta {
    ObjectMeta {
        name: Some(name.into()),
        namespace: Some(namespace.into()),
        labels: Some(shared_labels()),
        ..ObjectMeta::default()
    }
}
