//! The objects that all pods of one kind share in a namespace: their service account, the CA bundle of the link and,
//! for Agents, the NetworkPolicy that admits no connection to them.
//!
//! They are created before the first pod of a namespace, and the bundle is published again when it changes. An object
//! of the same name that the controller did not create is neither changed nor deleted: a service account is used as it
//! is, because pods mount no token of it; a NetworkPolicy is the user's decision; with another CA bundle no pod is
//! created.

use std::collections::HashSet;
use std::fmt::Debug;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{ConfigMap, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Api, DeleteParams, Patch, PatchParams, Preconditions};
use kube::core::Status;
use kube::{Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::{RwLock, RwLockWriteGuard, watch};

use super::error::{ReconcileError, call, find};
use super::{names, shared_objects};
use crate::link::pod::LINK_CA_CONFIGMAP;

/// Interval between two checks of these objects.
const LOOK: Duration = Duration::from_mins(10);
/// Delay after a failed write.
const RETRY: Duration = Duration::from_secs(30);

/// The objects of one kind of pod, for a namespace.
pub(in crate::controller) struct SharedObjects {
    /// The service account.
    pub(in crate::controller) account: fn(&str) -> ServiceAccount,
    /// The NetworkPolicy; `None`: each pod has its own.
    pub(in crate::controller) network_policy: Option<fn(&str) -> NetworkPolicy>,
}

/// The namespaces with pods of one kind, and what is known of the [`SharedObjects`] there.
pub(in crate::controller) struct NamespaceObjects {
    client: Client,
    shared: SharedObjects,
    bundle: watch::Receiver<String>,
    /// The bundle that every namespace has.
    published: watch::Sender<String>,
    known: Mutex<ProvisionedNamespaces>,
    /// Read-locked while objects are created, write-locked while they are deleted.
    making: RwLock<()>,
}

#[derive(Default)]
struct ProvisionedNamespaces {
    /// Namespaces that have all of them, with the present bundle.
    ready: HashSet<String>,
    /// Namespaces where at least one of them may exist.
    made: HashSet<String>,
}

impl NamespaceObjects {
    /// `published` receives the bundle that every namespace has.
    pub(in crate::controller) fn new(
        client: Client,
        bundle: watch::Receiver<String>,
        published: watch::Sender<String>,
        shared: SharedObjects,
    ) -> Self {
        Self {
            client,
            shared,
            bundle,
            published,
            known: Mutex::default(),
            making: RwLock::default(),
        }
    }

    /// Ensures that a namespace has all of them; sends no request when that is known. Returns what prevents it, in
    /// words.
    pub(in crate::controller) async fn ensure(&self, namespace: &str) -> Result<Option<String>, ReconcileError> {
        if self.lock().ready.contains(namespace) {
            return Ok(None);
        }
        let _making = self.making.read().await;
        // Recorded first, because a partial failure leaves an object behind too.
        self.lock().made.insert(namespace.into());
        let bundle = self.bundle.borrow().clone();
        // Boxed: each of these futures holds a request to the API server.
        let ((), (), taken) = tokio::try_join!(
            Box::pin(self.service_account(namespace)),
            Box::pin(self.network_policy(namespace)),
            Box::pin(publish_bundle(&self.client, (namespace, LINK_CA_CONFIGMAP), &bundle))
        )?;
        // A bundle that changed in the meantime has cleared the set; this entry is then outdated as well and must not
        // be added.
        if taken.is_none() && *self.bundle.borrow() == bundle {
            self.lock().ready.insert(namespace.into());
        }
        Ok(taken)
    }

    /// Namespaces where objects may have to be deleted.
    pub(in crate::controller) fn namespaces(&self) -> HashSet<String> {
        self.lock().made.clone()
    }

    /// Blocks the creation of objects while the guard is held.
    pub(in crate::controller) async fn lock_creation(&self) -> RwLockWriteGuard<'_, ()> {
        self.making.write().await
    }

    /// Deletes them. Only under [`Self::lock_creation`] of all kinds of pods, since they share the bundle.
    pub(in crate::controller) async fn clear(&self, namespace: &str) -> Result<(), ReconcileError> {
        let account = (self.shared.account)(namespace).name_any();
        let policy = self.shared.network_policy.map(|policy| policy(namespace).name_any());
        // Boxed: each of these futures holds a request to the API server.
        tokio::try_join!(
            Box::pin(self.delete::<ServiceAccount>(namespace, &account)),
            Box::pin(self.delete::<ConfigMap>(namespace, LINK_CA_CONFIGMAP)),
            Box::pin(async {
                match &policy {
                    Some(name) => self.delete::<NetworkPolicy>(namespace, name).await,
                    None => Ok(()),
                }
            })
        )?;
        self.lock().made.remove(namespace);
        Ok(())
    }

    /// Discards what is known of this namespace.
    pub(in crate::controller) fn forget(&self, namespace: &str) {
        self.lock().ready.remove(namespace);
    }

    /// Publishes the CA bundle in these namespaces: when it changes, and every 10 minutes in case it was deleted.
    /// `namespaces` returns `None` until all are known.
    pub(in crate::controller) async fn maintain(&self, namespaces: impl Fn() -> Option<HashSet<String>>) {
        let mut bundle = self.bundle.clone();
        loop {
            let pause = match namespaces() {
                None => RETRY,
                Some(namespaces) => match self.publish(namespaces).await {
                    Ok(()) => LOOK,
                    Err(error) => {
                        tracing::warn!(%error, "failed to publish the CA bundle of the link; retrying");
                        RETRY
                    }
                },
            };
            tokio::select! {
                changed = bundle.changed() => if changed.is_err() { tokio::time::sleep(pause).await },
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Publishes the current bundle in all these namespaces. A failure in one does not affect the others; the last
    /// failure is returned.
    async fn publish(&self, namespaces: HashSet<String>) -> Result<(), ReconcileError> {
        self.lock().ready.clear();
        let bundle = self.bundle.borrow().clone();
        let mut result = Ok(());
        for namespace in namespaces {
            match self.ensure(&namespace).await {
                Ok(None) => {}
                // A foreign object in one namespace must not delay the CA rotation of all others.
                Ok(Some(taken)) => tracing::warn!(
                    namespace,
                    taken,
                    "skipped publishing the CA bundle of the link in a namespace"
                ),
                // A terminating namespace rejects new objects, and its pods no longer need the bundle.
                Err(error) if error.is(is_terminating) => {}
                Err(error) => result = Err(error),
            }
        }
        if result.is_ok() {
            self.published.send_replace(bundle);
        }
        result
    }

    async fn service_account(&self, namespace: &str) -> Result<(), ReconcileError> {
        let api: Api<ServiceAccount> = Api::namespaced(self.client.clone(), namespace);
        let wanted = (self.shared.account)(namespace);
        let name = wanted.name_any();
        let known = find("get the service account", api.get(&name)).await?;
        let mounts = |account: &ServiceAccount| account.automount_service_account_token;
        if known.as_ref().is_some_and(|known| mounts(known) == mounts(&wanted)) {
            return Ok(());
        }
        let Some(params) = params(known.as_ref().map(Resource::meta)) else {
            return Ok(());
        };
        let patch = Patch::Apply(&wanted);
        call("apply the service account", api.patch(&name, &params, &patch))
            .await
            .map(|_| ())
    }

    async fn network_policy(&self, namespace: &str) -> Result<(), ReconcileError> {
        let Some(policy) = self.shared.network_policy else {
            return Ok(());
        };
        let api: Api<NetworkPolicy> = Api::namespaced(self.client.clone(), namespace);
        let wanted = policy(namespace);
        let name = wanted.name_any();
        let known = find("get the network policy", api.get(&name)).await?;
        // The API server omits an empty list.
        let spec = |policy: &NetworkPolicy| {
            let mut spec = policy.spec.clone().unwrap_or_default();
            spec.ingress = spec.ingress.filter(|rules| !rules.is_empty());
            spec
        };
        if known.as_ref().is_some_and(|known| spec(known) == spec(&wanted)) {
            return Ok(());
        }
        let Some(params) = params(known.as_ref().map(Resource::meta)) else {
            return Ok(());
        };
        let patch = Patch::Apply(&wanted);
        call("apply the network policy", api.patch(&name, &params, &patch))
            .await
            .map(|_| ())
    }

    /// Deletes an object if the controller created it.
    async fn delete<K>(&self, namespace: &str, name: &str) -> Result<(), ReconcileError>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + Debug + DeserializeOwned,
    {
        let api: Api<K> = Api::namespaced(self.client.clone(), namespace);
        let found = find("get the metadata of a shared object", api.get_metadata(name)).await?;
        let Some(found) = found.filter(|found| shared_objects::is_shared(&found.metadata)) else {
            return Ok(());
        };
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid: found.metadata.uid,
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        match find("delete a shared object", api.delete(name, &params)).await {
            Ok(_) => Ok(()),
            // A different object has that name: the intended one is gone.
            Err(error) if error.is(Status::is_conflict) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn lock(&self) -> MutexGuard<'_, ProvisionedNamespaces> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Applies the CA bundle of the link as a ConfigMap with this namespace and name. Returns a message if a foreign one has the name.
pub(in crate::controller) async fn publish_bundle(
    client: &Client,
    (namespace, name): (&str, &str),
    bundle: &str,
) -> Result<Option<String>, ReconcileError> {
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let wanted = shared_objects::ca_bundle((namespace, name), bundle);
    let known = find("get the CA bundle", api.get(name)).await?;
    if known.as_ref().is_some_and(|known| known.data == wanted.data) {
        return Ok(None);
    }
    let Some(params) = params(known.as_ref().map(Resource::meta)) else {
        return Ok(Some(format!(
            "ConfigMap {name} exists and was not created by the controller, which needs that name \
             for the CA bundle of its link: rename or delete it"
        )));
    };
    let patch = Patch::Apply(&wanted);
    call("apply the CA bundle", api.patch(name, &params, &patch))
        .await
        .map(|_| None)
}

fn is_terminating(status: &Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    status.is_forbidden() && causes.into_iter().any(|cause| cause.reason == "NamespaceTerminating")
}

/// The parameters to apply an object over an existing one; `None` if that one is foreign.
fn params(known: Option<&ObjectMeta>) -> Option<PatchParams> {
    let params = PatchParams::apply(names::MANAGER);
    match known {
        // Without force: another client may create one at this moment.
        None => Some(params),
        Some(meta) => shared_objects::is_shared(meta).then(|| params.force()),
    }
}
