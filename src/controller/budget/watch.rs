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
use crate::controller::runtime::watch_backoff::WatchBackoff;

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
        let stream =
            watcher(scoped_api(&self.client, namespace.as_deref()), watching()).backoff(WatchBackoff::default());
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
        let stream = watcher(api, watching()).backoff(WatchBackoff::default());
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::http::{Request, Response};
    use jiff::Timestamp;
    use kube::Client;
    use kube::client::Body;
    use serde_json::json;
    use tokio::time::timeout;

    use super::*;
    use crate::controller::budget::LedgerSetup;
    use crate::controller::budget::presenter::BudgetPresenter;
    use crate::controller::pod_sessions::PodSessions;
    use crate::controller::policy::PlatformPolicy;
    use crate::controller::runtime::EventSink;
    use crate::telemetry::metrics::Metrics;

    /// A ledger that may not list namespaces, and how often it asked.
    fn forbidden() -> (BudgetLedger, Arc<AtomicUsize>) {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        let server = tower::service_fn(move |request: Request<Body>| {
            assert_eq!(request.uri().path(), "/api/v1/namespaces");
            count.fetch_add(1, Ordering::SeqCst);
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "forbidden",
                "reason": "Forbidden", "code": 403});
            let answer = Response::builder()
                .status(403)
                .body(Body::from(status.to_string().into_bytes()));
            async { answer }
        });
        let (loops, _) = PodSessions::new();
        let budgets = BudgetLedger::new(LedgerSetup {
            client: Client::new(server, "ns"),
            policy: PlatformPolicy::default(),
            namespace: "system".into(),
            watch_namespaces: vec!["ns".into()],
            loops: Arc::new(loops),
            presentation: Arc::new(BudgetPresenter::new("system", EventSink::new().0)),
            metrics: Arc::new(Metrics::new().unwrap()),
            wall: Timestamp::constant(1_800_000_000, 0),
        });
        (budgets, asked)
    }

    #[tokio::test(start_paused = true)]
    async fn forbidden_namespace_lists_are_retried_every_ten_minutes() {
        for (seconds, times) in [(1, 1), (599, 1), (601, 2), (1_201, 3)] {
            let (budgets, asked) = forbidden();
            let ended = timeout(Duration::from_secs(seconds), budgets.watch_namespaces()).await;
            assert!(ended.is_err(), "it never ends");
            assert_eq!(asked.load(Ordering::SeqCst), times, "within {seconds} s");
        }
    }
}
