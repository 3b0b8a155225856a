//! What every namespace with pods of ours has once: the service account of a kind of pod and the CA bundle of the link.
//!
//! Made before the first pod of a namespace and remembered; published again when the bundle changes. An object of that name
//! that somebody else made is neither changed nor deleted: a service account is used as it is, since pods mount no token of it,
//! and beside another CA bundle there is no pod.

use std::collections::HashSet;
use std::fmt::Debug;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{ConfigMap, ServiceAccount};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Api, DeleteParams, Patch, PatchParams, Preconditions};
use kube::core::Status;
use kube::{Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::{RwLock, RwLockWriteGuard, watch};

use super::error::{ReconcileError, call, find};
use super::{names, objects};
use crate::link::pod::LINK_CA_CONFIGMAP;

/// Time between two looks at these objects.
const LOOK: Duration = Duration::from_mins(10);
/// Wait after they could not be written.
const RETRY: Duration = Duration::from_secs(30);

/// The namespaces with pods of one kind, and what is known of both objects there.
pub(in crate::controller) struct NamespaceObjects {
    client: Client,
    account: fn(&str) -> ServiceAccount,
    bundle: watch::Receiver<String>,
    /// The bundle that every namespace has.
    published: watch::Sender<String>,
    known: Mutex<ProvisionedNamespaces>,
    /// Held while objects are made, and alone while they are taken away.
    making: RwLock<()>,
}

#[derive(Default)]
struct ProvisionedNamespaces {
    /// Namespaces that have both objects, with the present bundle.
    ready: HashSet<String>,
    /// Namespaces where one of them may be.
    made: HashSet<String>,
}

impl NamespaceObjects {
    /// `account` is the service account of a namespace; `published` is told which bundle every namespace has.
    pub(in crate::controller) fn new(
        client: Client,
        bundle: watch::Receiver<String>,
        published: watch::Sender<String>,
        account: fn(&str) -> ServiceAccount,
    ) -> Self {
        Self {
            client,
            account,
            bundle,
            published,
            known: Mutex::default(),
            making: RwLock::default(),
        }
    }

    /// Makes sure that a namespace has both; no request when that is known. What stands in the way is said in words.
    pub(in crate::controller) async fn ensure(&self, namespace: &str) -> Result<Option<String>, ReconcileError> {
        if self.lock().ready.contains(namespace) {
            return Ok(None);
        }
        let _making = self.making.read().await;
        // First: what fails half way leaves something too.
        self.lock().made.insert(namespace.into());
        let bundle = self.bundle.borrow().clone();
        let ((), taken) = tokio::try_join!(self.service_account(namespace), self.ca_bundle(namespace, &bundle))?;
        // A bundle that changed meanwhile clears the set; this entry is then as old as the rest and must go too.
        if taken.is_none() && *self.bundle.borrow() == bundle {
            self.lock().ready.insert(namespace.into());
        }
        Ok(taken)
    }

    /// Namespaces where something may be to take away.
    pub(super) fn made(&self) -> HashSet<String> {
        self.lock().made.clone()
    }

    /// While this is held, nothing is made.
    pub(super) async fn lock_creation(&self) -> RwLockWriteGuard<'_, ()> {
        self.making.write().await
    }

    /// Takes both away. Only under [`Self::lock_creation`] of all kinds of pods, since they share the bundle.
    pub(super) async fn clear(&self, namespace: &str) -> Result<(), ReconcileError> {
        let account = (self.account)(namespace).name_any();
        tokio::try_join!(
            self.delete::<ServiceAccount>(namespace, &account),
            self.delete::<ConfigMap>(namespace, LINK_CA_CONFIGMAP)
        )?;
        self.lock().made.remove(namespace);
        Ok(())
    }

    /// Nothing is known of this namespace any more.
    pub(in crate::controller) fn forget(&self, namespace: &str) {
        self.lock().ready.remove(namespace);
    }

    /// Publishes the CA bundle in these namespaces: at once, when it changes, and now and then, should it be deleted.
    /// `namespaces` says nothing while not all are known.
    pub(in crate::controller) async fn maintain(&self, namespaces: impl Fn() -> Option<HashSet<String>>) {
        let mut bundle = self.bundle.clone();
        loop {
            let pause = match namespaces() {
                None => RETRY,
                Some(namespaces) => match self.publish(namespaces).await {
                    Ok(()) => LOOK,
                    Err(error) => {
                        tracing::warn!(%error, "the CA bundle of the link could not be published everywhere");
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

    /// Publishes the present bundle in all these namespaces. One that fails (it may be ending) keeps none of the others
    /// from theirs; the last failure is returned.
    async fn publish(&self, namespaces: HashSet<String>) -> Result<(), ReconcileError> {
        self.lock().ready.clear();
        let bundle = self.bundle.borrow().clone();
        let mut result = Ok(());
        for namespace in namespaces {
            match self.ensure(&namespace).await {
                Ok(None) => {}
                // One namespace must not hold up the others' next authority.
                Ok(Some(taken)) => tracing::warn!(namespace, taken, "the CA bundle of the link is not published there"),
                // Nothing is made in a namespace that is being deleted, and no pod of it needs the bundle.
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
        let wanted = (self.account)(namespace);
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

    /// Says so when there is another one.
    async fn ca_bundle(&self, namespace: &str, bundle: &str) -> Result<Option<String>, ReconcileError> {
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), namespace);
        let wanted = objects::ca_bundle(namespace, bundle);
        let known = find("get the CA bundle", api.get(LINK_CA_CONFIGMAP)).await?;
        if known.as_ref().is_some_and(|known| known.data == wanted.data) {
            return Ok(None);
        }
        let Some(params) = params(known.as_ref().map(Resource::meta)) else {
            return Ok(Some(format!(
                "ConfigMap {LINK_CA_CONFIGMAP} exists and was not made by the controller, which needs that name for the \
                 authority of its link: rename or delete it"
            )));
        };
        let patch = Patch::Apply(&wanted);
        call("apply the CA bundle", api.patch(LINK_CA_CONFIGMAP, &params, &patch))
            .await
            .map(|_| None)
    }

    /// Deletes an object of ours.
    async fn delete<K>(&self, namespace: &str, name: &str) -> Result<(), ReconcileError>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + Debug + DeserializeOwned,
    {
        let api: Api<K> = Api::namespaced(self.client.clone(), namespace);
        let found = find("get the metadata of what pods share", api.get_metadata(name)).await?;
        let Some(found) = found.filter(|found| objects::is_shared(&found.metadata)) else {
            return Ok(());
        };
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid: found.metadata.uid,
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        match find("delete what pods share", api.delete(name, &params)).await {
            Ok(_) => Ok(()),
            // Another object has that name by now: the one that was meant is gone.
            Err(error) if error.is(Status::is_conflict) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn lock(&self) -> MutexGuard<'_, ProvisionedNamespaces> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_terminating(status: &Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    status.is_forbidden() && causes.into_iter().any(|cause| cause.reason == "NamespaceTerminating")
}

/// How an object is applied in place of this one; `None`: that is somebody else's.
fn params(known: Option<&ObjectMeta>) -> Option<PatchParams> {
    let params = PatchParams::apply(names::MANAGER);
    match known {
        // Not by force: somebody may make one at this moment.
        None => Some(params),
        Some(meta) => objects::is_shared(meta).then(|| params.force()),
    }
}
