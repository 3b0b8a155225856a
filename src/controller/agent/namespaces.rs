//! What every namespace with pods of ours has once: the service account of a kind of pod and the CA bundle of the link.
//!
//! Made before the first pod of a namespace and remembered; published again when the bundle changes. They stay when the
//! last pod goes: they hold no secret and no right, and whoever deletes the namespace deletes them.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, ServiceAccount};
use kube::api::{Api, Patch, PatchParams};
use kube::core::Status;
use kube::{Client, ResourceExt};
use tokio::sync::watch;

use super::error::{Error, call, find};
use super::{names, objects};
use crate::link::pod::LINK_CA_CONFIGMAP;

/// Time between two looks at these objects.
const LOOK: Duration = Duration::from_mins(10);
/// Wait after they could not be written.
const RETRY: Duration = Duration::from_secs(30);

/// The namespaces that are known to have both objects, with the present bundle.
pub(in crate::controller) struct Namespaces {
    client: Client,
    account: fn(&str) -> ServiceAccount,
    bundle: watch::Receiver<String>,
    /// The bundle that every namespace has.
    published: watch::Sender<String>,
    ready: Mutex<HashSet<String>>,
}

impl Namespaces {
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
            ready: Mutex::default(),
        }
    }

    /// Makes sure that a namespace has both; no request when that is known.
    pub(in crate::controller) async fn ensure(&self, namespace: &str) -> Result<(), Error> {
        if self.lock().contains(namespace) {
            return Ok(());
        }
        let bundle = self.bundle.borrow().clone();
        tokio::try_join!(self.service_account(namespace), self.ca_bundle(namespace, &bundle))?;
        // A bundle that changed meanwhile clears the set; this entry is then as old as the rest and must go too.
        if *self.bundle.borrow() == bundle {
            self.lock().insert(namespace.into());
        }
        Ok(())
    }

    /// Nothing is known of this namespace any more.
    pub(in crate::controller) fn forget(&self, namespace: &str) {
        self.lock().remove(namespace);
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
    async fn publish(&self, namespaces: HashSet<String>) -> Result<(), Error> {
        self.lock().clear();
        let bundle = self.bundle.borrow().clone();
        let mut result = Ok(());
        for namespace in namespaces {
            match self.ensure(&namespace).await {
                Ok(()) => {}
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

    async fn service_account(&self, namespace: &str) -> Result<(), Error> {
        let api: Api<ServiceAccount> = Api::namespaced(self.client.clone(), namespace);
        let wanted = (self.account)(namespace);
        let name = wanted.name_any();
        let known = find("get the service account", api.get(&name)).await?;
        if known.is_some_and(|known| known.automount_service_account_token == wanted.automount_service_account_token) {
            return Ok(());
        }
        let (params, patch) = (applied(), Patch::Apply(&wanted));
        call("apply the service account", api.patch(&name, &params, &patch))
            .await
            .map(|_| ())
    }

    async fn ca_bundle(&self, namespace: &str, bundle: &str) -> Result<(), Error> {
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), namespace);
        let wanted = objects::ca_bundle(namespace, bundle);
        let known = find("get the CA bundle", api.get(LINK_CA_CONFIGMAP)).await?;
        if known.is_some_and(|known| known.data == wanted.data) {
            return Ok(());
        }
        let (params, patch) = (applied(), Patch::Apply(&wanted));
        call("apply the CA bundle", api.patch(LINK_CA_CONFIGMAP, &params, &patch))
            .await
            .map(|_| ())
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<String>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_terminating(status: &Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    status.is_forbidden() && causes.into_iter().any(|cause| cause.reason == "NamespaceTerminating")
}

fn applied() -> PatchParams {
    PatchParams::apply(names::MANAGER).force()
}
