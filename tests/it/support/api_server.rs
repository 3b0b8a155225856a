//! The API server in memory, with a record of its requests and faults on demand.
#![allow(dead_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use agentloop::api_server::object_store::ServerClock;
use agentloop::api_server::{
    self, ApiError, ApiRequest, ApiVerb, ChangeKind, ObjectChange, ObjectKey, ObjectPatch, ObjectStore, PatchRequest,
    PatchScope, ServerHooks,
};
use axum::Router;
use kube::Client;
use serde_json::Value;

/// One request, as RBAC sees it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Call {
    pub verb: ApiVerb,
    /// `group/resource` or `group/resource/status`; the core group is empty.
    pub resource: String,
    pub name: String,
}

/// The server. Clones share their objects.
#[derive(Clone)]
pub struct ApiServer {
    server: api_server::ApiServer,
    store: Arc<ObjectStore>,
    faults: Arc<Faults>,
}

#[derive(Default)]
struct Faults(Mutex<FaultScript>);

#[derive(Default)]
struct FaultScript {
    calls: Vec<Call>,
    away: bool,
    /// Time between a request that is done and its answer.
    slow: Duration,
    /// Resources of which nothing is served.
    closed: BTreeSet<String>,
    /// Resources whose watches deliver nothing.
    deaf: BTreeSet<String>,
    /// Resources whose watches deliver no deletion.
    deaf_to_deletions: BTreeSet<String>,
    /// Fields of a status that the schema does not have.
    pruned: BTreeSet<String>,
    /// What a webhook merges into the objects of a resource.
    webhooks: BTreeMap<String, Value>,
}

impl Faults {
    fn lock(&self) -> MutexGuard<'_, FaultScript> {
        self.0.lock().unwrap()
    }
}

impl ServerHooks for Faults {
    fn admit(&self, request: &ApiRequest) -> Result<(), ApiError> {
        let mut script = self.lock();
        script.calls.push(Call {
            verb: request.verb,
            resource: format!("{}{}", request.resource, if request.status { "/status" } else { "" }),
            name: request.name.clone(),
        });
        if script.away || script.closed.contains(&request.resource) {
            return Err(ApiError::Unavailable("the server is away".into()));
        }
        Ok(())
    }

    fn mutate(&self, request: &ApiRequest, object: &mut Value) {
        let script = self.lock();
        if request.status {
            for field in &script.pruned {
                object["status"].as_object_mut().map(|status| status.remove(field));
            }
        } else if let Some(webhook) = script.webhooks.get(&request.resource) {
            api_server::patch::merge(object, webhook);
        }
    }

    fn delay(&self) -> Duration {
        self.lock().slow
    }

    fn delivers(&self, change: &ObjectChange) -> bool {
        let (script, resource) = (self.lock(), &change.key.resource);
        let deletion_is_lost = change.kind == ChangeKind::Deleted && script.deaf_to_deletions.contains(resource);
        !script.deaf.contains(resource) && !deletion_is_lost
    }
}

impl ApiServer {
    pub fn new(clock: ServerClock) -> Self {
        let (store, faults) = (Arc::new(ObjectStore::in_memory(clock)), Arc::new(Faults::default()));
        Self {
            server: api_server::ApiServer::new(store.clone(), faults.clone()),
            store,
            faults,
        }
    }

    /// A client whose transport is this server: no socket.
    pub fn client(&self) -> Client {
        self.server.client()
    }

    /// Its routes, to serve them on a socket.
    pub fn router(&self) -> Router {
        self.server.router()
    }

    /// All requests since the last call of this.
    pub fn take_calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.faults.lock().calls)
    }

    /// The writes among them, without Events: they are sent in the background.
    pub fn take_writes(&self) -> Vec<String> {
        let calls = self.take_calls();
        let writes = calls
            .iter()
            .filter(|call| call.verb.is_write() && !call.resource.contains("events"));
        writes
            .map(|call| format!("{} {}", call.verb.as_ref(), call.resource))
            .collect()
    }

    /// Answers everything with 503 and ends all watches, or serves again.
    pub fn set_away(&self, away: bool) {
        self.faults.lock().away = away;
        self.server.end_watches();
    }

    /// Serves requests immediately, and answers them only after this time; watches are not delayed.
    pub fn set_slow(&self, slow: Duration) {
        self.faults.lock().slow = slow;
    }

    /// Answers requests for a resource with 503, or serves it again.
    pub fn set_closed(&self, resource: &str, closed: bool) {
        let closed_resources = &mut self.faults.lock().closed;
        if closed {
            closed_resources.insert(resource.into());
        } else {
            closed_resources.remove(resource);
        }
    }

    /// Drops this field of every status that is written, as a schema does that does not have it.
    pub fn prune(&self, field: &str) {
        self.faults.lock().pruned.insert(field.into());
    }

    /// From now on a webhook merges this into every object of a resource that is written.
    pub fn mutate(&self, resource: &str, patch: Value) {
        self.faults.lock().webhooks.insert(resource.into(), patch);
    }

    /// From now on the watches of a resource deliver nothing, and stay open.
    pub fn deafen(&self, resource: &str) {
        self.faults.lock().deaf.insert(resource.into());
    }

    /// From now on the watches of a resource deliver no deletion.
    pub fn deafen_to_deletions(&self, resource: &str) {
        self.faults.lock().deaf_to_deletions.insert(resource.into());
    }

    /// Ends the watches of a deaf resource. The history that they missed is gone, so that they have to list again.
    pub fn expire(&self, resource: &str) {
        {
            let mut script = self.faults.lock();
            script.deaf.remove(resource);
            script.deaf_to_deletions.remove(resource);
        }
        self.store.forget_changes(resource);
        self.server.end_watches();
    }

    /// Ends all watches; they may be opened again immediately.
    pub fn cut_watches(&self) {
        self.server.end_watches();
    }

    pub fn get(&self, resource: &str, namespace: &str, name: &str) -> Option<Value> {
        self.store.get(&ObjectKey::new(resource, namespace, name))
    }

    pub fn list(&self, resource: &str) -> Vec<Value> {
        let (_, objects) = self.store.list(resource, "");
        objects.into_iter().map(|(_, object)| object).collect()
    }

    /// Adds an object, or merges it into the existing one whatever its version, as another client does; not counted.
    pub fn put(&self, resource: &str, mut object: Value) -> Value {
        let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
        let key = ObjectKey::new(resource, &text("namespace"), &text("name"));
        if self.store.get(&key).is_none() {
            return self.store.add(key, object).unwrap();
        }
        object["metadata"]["resourceVersion"] = Value::Null;
        let (scope, patch, manager) = (PatchScope::Whole, &ObjectPatch::Merge(object), "somebody");
        self.store.patch(&key, &PatchRequest { scope, patch, manager }).unwrap()
    }

    /// Deletes an object, as another client does; not counted. Pods on a node end gracefully.
    pub fn delete(&self, resource: &str, namespace: &str, name: &str) {
        let _ = self
            .store
            .delete(&ObjectKey::new(resource, namespace, name), None, None);
    }

    /// Removes a terminating pod, as its kubelet does.
    pub fn finish_pod(&self, namespace: &str, name: &str) {
        let _ = self
            .store
            .delete(&ObjectKey::new("/pods", namespace, name), None, Some(0));
    }
}
