//! What the watches of all kinds share.

use futures::future::BoxFuture;
use futures::{Stream, StreamExt};
use k8s_openapi::NamespaceResourceScope;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Resource};
use std::borrow::BorrowMut;
use tokio::task::JoinSet;

/// The scopes to watch: each of these namespaces, or `None` for all of them.
pub(in crate::controller) fn scopes(namespaces: &[String]) -> Vec<Option<String>> {
    match namespaces {
        [] => vec![None],
        some => some.iter().cloned().map(Some).collect(),
    }
}

/// The API of a kind in a scope.
pub(in crate::controller) fn scoped_api<K>(client: &Client, scope: Option<&str>) -> Api<K>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
{
    match scope {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

/// Passes on the events of a watch. `what` names the objects in the log. Boxed, because a stream is as large as several of
/// its objects.
pub(in crate::controller) fn follow<'a, K: 'a>(
    stream: impl Stream<Item = watcher::Result<Event<K>>> + Send + 'a,
    what: &'a str,
    mut handle: impl FnMut(Event<K>) + Send + 'a,
) -> BoxFuture<'a, ()> {
    Box::pin(async move {
        let mut stream = std::pin::pin!(stream);
        while let Some(event) = stream.next().await {
            match event {
                Ok(event) => handle(event),
                Err(error) => tracing::warn!(%error, "the watch of {what} was interrupted; resuming"),
            }
        }
    })
}

/// Waits for tasks that return only at shutdown. A panic of one is a panic of all.
pub(in crate::controller) async fn join(mut tasks: impl BorrowMut<JoinSet<()>>) {
    while let Some(ended) = tasks.borrow_mut().join_next().await {
        if let Err(error) = ended
            && let Ok(panic) = error.try_into_panic()
        {
            std::panic::resume_unwind(panic);
        }
    }
}
