//! Feeds the ledger from watches of AgentBudgets and of the labels of namespaces. Agents and pods come from the
//! reconciler's watches.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, future};
use k8s_openapi::api::core::v1::Namespace;
use kube::core::PartialObjectMeta;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, ResourceExt};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::accounts::DocumentKind;
use super::facts::document;
use super::ledger::BudgetLedger;
use super::record_writer::RecordConflictError;
use crate::api::unreadable::describe;
use crate::api::{AgentBudget, NamespacedName};
use crate::controller::connection::watching;
use crate::controller::runtime::guarded::GuardedObject;
use crate::controller::runtime::watch::{follow, scoped_api};

/// How long after a refusal namespaces are listed again: a missing permission is normal in a namespaced installation, and
/// should cost neither requests nor lines of the log.
const FORBIDDEN_RETRY: Duration = Duration::from_mins(10);

impl BudgetLedger {
    /// Watches and writes until `stop`, or until a record of another leader is found.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) -> Result<(), RecordConflictError> {
        let budgets = future::join_all(self.budget_scopes().into_iter().map(|scope| self.watch_budgets(scope)));
        tokio::select! {
            () = stop.cancelled() => Ok(()),
            conflict = self.clone().write() => Err(conflict),
            _ = budgets => Ok(()),
            () = self.watch_namespaces() => Ok(()),
        }
    }

    async fn watch_budgets(&self, namespace: Option<String>) {
        let stream = watcher(scoped_api(&self.client, namespace.as_deref()), watching()).default_backoff();
        let mut listing = Vec::new();
        let handle = |event: Event<GuardedObject<AgentBudget>>| match event {
            Event::Apply(budget) => self.seen(budget),
            Event::Delete(budget) => self.budget_gone(&document(DocumentKind::Budget, &budget)),
            Event::Init => listing.clear(),
            Event::InitApply(budget) => listing.push(budget),
            Event::InitDone => {
                let all = std::mem::take(&mut listing);
                let present: BTreeSet<String> = all.iter().filter_map(ResourceExt::uid).collect();
                for budget in all {
                    self.seen(budget);
                }
                self.budgets_listed(namespace.as_deref(), &present);
            }
        };
        follow(stream, "AgentBudgets", handle).await;
    }

    fn seen(&self, guard: GuardedObject<AgentBudget>) {
        match guard.0 {
            Ok(budget) => self.budget_seen(budget),
            Err(invalid) => {
                let id = super::accounts::DocumentId {
                    kind: DocumentKind::Budget,
                    object: NamespacedName::of_metadata(&invalid.metadata),
                    uid: invalid.metadata.uid.clone().unwrap_or_default(),
                };
                self.budget_unreadable(&id, &describe(&invalid.error));
            }
        }
    }

    async fn watch_namespaces(&self) {
        let mut warned = false;
        loop {
            if self.follow_namespaces().await.is_err() && !warned {
                tracing::warn!(
                    "listing namespaces is forbidden; AgentBudgets that select them by label cannot be enforced"
                );
                warned = true;
            }
            sleep(FORBIDDEN_RETRY).await;
        }
    }

    /// Follows the labels of namespaces until that is forbidden.
    async fn follow_namespaces(&self) -> Result<(), NamespacesForbidden> {
        let api: Api<PartialObjectMeta<Namespace>> = Api::all(self.client.clone());
        let stream = watcher(api, watching()).default_backoff();
        let mut stream = std::pin::pin!(stream);
        let mut listing = BTreeMap::new();
        let labels = |namespace: &PartialObjectMeta<Namespace>| namespace.labels().clone();
        while let Some(event) = stream.next().await {
            match event {
                Ok(Event::Apply(namespace)) => self.namespace_seen(&namespace.name_any(), Some(labels(&namespace))),
                Ok(Event::Delete(namespace)) => self.namespace_seen(&namespace.name_any(), None),
                Ok(Event::Init) => listing.clear(),
                Ok(Event::InitApply(namespace)) => {
                    listing.insert(namespace.name_any(), labels(&namespace));
                }
                Ok(Event::InitDone) => self.namespaces_listed(Some(std::mem::take(&mut listing))),
                Err(error) if is_forbidden(&error) => {
                    // The installation covers only some namespaces: budgets that select namespaces by label block their
                    // Agents.
                    self.namespaces_listed(None);
                    return Err(NamespacesForbidden);
                }
                Err(error) => tracing::warn!(%error, "the watch of Namespaces was interrupted; resuming"),
            }
        }
        Ok(())
    }
}

/// The controller may not list namespaces.
struct NamespacesForbidden;

fn is_forbidden(error: &watcher::Error) -> bool {
    use watcher::Error::{InitialListFailed, WatchFailed, WatchStartFailed};
    if let InitialListFailed(kube::Error::Api(status))
    | WatchStartFailed(kube::Error::Api(status))
    | WatchFailed(kube::Error::Api(status)) = error
    {
        return status.is_forbidden();
    }
    false
}
