//! Feeds the ledger: watches AgentBudgets and the labels of namespaces. Agents and pods come from the reconciler's own
//! watches.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::{StreamExt, future};
use k8s_openapi::api::core::v1::Namespace;
use kube::core::{DeserializeGuard, PartialObjectMeta};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Resource, ResourceExt};
use tokio_util::sync::CancellationToken;

use super::accounts::DocumentKind;
use super::facts::document;
use super::ledger::BudgetLedger;
use super::record_writer::RecordConflictError;
use crate::api::AgentBudget;
use crate::controller::connection::watching;

type GuardedBudget = DeserializeGuard<AgentBudget>;

impl BudgetLedger {
    /// Watches and writes until `stop`, or until another leader is found to have written.
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
        let api: Api<GuardedBudget> = match &namespace {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        };
        let stream = watcher(api, watching()).default_backoff();
        let mut stream = std::pin::pin!(stream);
        let mut listing = Vec::new();
        while let Some(event) = stream.next().await {
            match event {
                Ok(Event::Apply(budget)) => self.seen(budget),
                Ok(Event::Delete(budget)) => self.budget_gone(&document(DocumentKind::Budget, &budget)),
                Ok(Event::Init) => listing.clear(),
                Ok(Event::InitApply(budget)) => listing.push(budget),
                Ok(Event::InitDone) => {
                    let all = std::mem::take(&mut listing);
                    let present: BTreeSet<String> = all.iter().filter_map(ResourceExt::uid).collect();
                    for budget in all {
                        self.seen(budget);
                    }
                    self.budgets_listed(namespace.as_deref(), &present);
                }
                Err(error) => tracing::warn!(%error, "the watch of AgentBudgets was interrupted; it is resumed"),
            }
        }
    }

    fn seen(&self, guard: GuardedBudget) {
        match guard.0 {
            Ok(mut budget) => {
                budget.meta_mut().managed_fields = None;
                self.budget_seen(budget);
            }
            Err(invalid) => {
                let id = super::accounts::DocumentId {
                    kind: DocumentKind::Budget,
                    namespace: invalid.metadata.namespace.clone().unwrap_or_default(),
                    name: invalid.metadata.name.clone().unwrap_or_default(),
                    uid: invalid.metadata.uid.clone().unwrap_or_default(),
                };
                self.budget_unreadable(&id, &invalid.error);
            }
        }
    }

    async fn watch_namespaces(&self) {
        let api: Api<PartialObjectMeta<Namespace>> = Api::all(self.client.clone());
        let stream = watcher(api, watching()).default_backoff();
        let mut stream = std::pin::pin!(stream);
        let mut listing = BTreeMap::new();
        let mut told = false;
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
                    // An install for some namespaces only: budgets that select namespaces by label block their Agents.
                    self.namespaces_listed(None);
                    if !told {
                        tracing::warn!(
                            "namespaces may not be listed; budgets that select them by label cannot be kept"
                        );
                        told = true;
                    }
                }
                Err(error) => tracing::warn!(%error, "the watch of Namespaces was interrupted; it is resumed"),
            }
        }
    }
}

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
