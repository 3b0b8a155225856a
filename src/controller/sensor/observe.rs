//! Reads the Secrets of a Sensor from the API server, and decides nothing. Their values are dropped at once.

use futures::future;
use k8s_openapi::api::core::v1::Secret;
use kube::api::Api;

use super::registry::SensorRegistry;
use super::secrets::{self, SecretLookup};
use super::snapshot::SensorSnapshot;
use crate::controller::runtime::error::{ReconcileError, find};
use crate::sensor_pipeline::source::webhook::signature::unusable;

/// Everything that was read for one reconcile.
pub(super) struct ObservedSensor {
    pub(super) snapshot: SensorSnapshot,
    /// The Secrets of the source, in the order of [`secrets::required`]; `None` if they were not needed.
    pub(super) secrets: Option<Vec<SecretLookup>>,
}

/// Completes the observation. `needs_secrets` follows from the snapshot.
pub(super) async fn observe(
    sensors: &SensorRegistry,
    snapshot: SensorSnapshot,
    needs_secrets: bool,
) -> Result<ObservedSensor, ReconcileError> {
    let secrets = if needs_secrets {
        let required = secrets::required(&snapshot.known.object.spec.source);
        let reads = required
            .iter()
            .map(|required| secret(sensors, &snapshot, required.name));
        Some(future::try_join_all(reads).await?)
    } else {
        None
    };
    Ok(ObservedSensor { snapshot, secrets })
}

async fn secret(
    sensors: &SensorRegistry,
    snapshot: &SensorSnapshot,
    name: &str,
) -> Result<SecretLookup, ReconcileError> {
    let api: Api<Secret> = Api::namespaced(sensors.setup.client.clone(), &snapshot.key.namespace);
    let Some(secret) = find("get a Secret", api.get(name)).await? else {
        return Ok(SecretLookup::Absent);
    };
    let found = secret.data.unwrap_or_default();
    let webhook = snapshot.known.object.spec.source.webhook.as_ref();
    Ok(SecretLookup::Found {
        key_problem: webhook.and_then(|webhook| {
            let key = &found.get(&webhook.secret_key_ref.key)?.0;
            unusable(webhook.scheme, key)
        }),
        keys: found.into_keys().collect(),
    })
}
