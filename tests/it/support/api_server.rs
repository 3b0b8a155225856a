//! A Kubernetes API server in this process: enough of one to run a whole controller against, with faults on demand.
//!
//! Versioned objects, list and watch, merge patch, server-side apply as a merge with its owners of fields, the status
//! subresource, generations, preconditions, graceful pod deletion, cascading deletion by owner references. It counts every request.
#![allow(dead_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use jiff::Timestamp;
use kube::Client;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::managed_fields;

/// One request, as RBAC sees it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Call {
    pub verb: &'static str,
    /// `group/resource` or `group/resource/status`; the core group is empty.
    pub resource: String,
    pub name: String,
}

impl Call {
    pub fn is_write(&self) -> bool {
        matches!(self.verb, "create" | "update" | "patch" | "delete")
    }
}

/// Identity of an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    resource: String,
    namespace: String,
    name: String,
}

struct Change {
    version: u64,
    resource: String,
    kind: &'static str,
    object: Value,
}

#[derive(Default)]
struct Store {
    version: u64,
    objects: BTreeMap<Key, Value>,
    changes: Vec<Change>,
    calls: Vec<Call>,
    away: bool,
    /// Time between a request that is done and its answer.
    slow: Duration,
    /// Watches that began before this number are cut.
    cut: u64,
    /// Resources whose watches deliver nothing.
    deaf: BTreeSet<String>,
    /// Resources whose watches deliver no deletion.
    deaf_to_deletions: BTreeSet<String>,
    /// Resources whose changes before this version are forgotten.
    forgotten: BTreeMap<String, u64>,
    /// Resources of which nothing is served.
    closed: BTreeSet<String>,
    /// Fields of a status that the schema does not know.
    pruned: BTreeSet<String>,
    /// What a webhook makes of what is applied, by resource.
    webhooks: BTreeMap<String, Value>,
}

/// The server. Clones share their objects.
#[derive(Clone)]
pub struct ApiServer {
    store: Arc<Mutex<Store>>,
    news: watch::Sender<u64>,
    clock: Arc<dyn Fn() -> Timestamp + Send + Sync>,
}

/// What a path names.
struct Target {
    resource: String,
    namespace: String,
    name: Option<String>,
    status: bool,
}

impl ApiServer {
    pub fn new(clock: Arc<dyn Fn() -> Timestamp + Send + Sync>) -> Self {
        Self {
            store: Arc::default(),
            news: watch::Sender::new(0),
            clock,
        }
    }

    /// A client whose transport is this server: no socket.
    pub fn client(&self) -> Client {
        Client::new(self.router(), "default")
    }

    /// Its routes, to serve them on a socket.
    pub fn router(&self) -> Router {
        Router::new().fallback(serve).with_state(self.clone())
    }

    /// All requests since the last call of this.
    pub fn take_calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.lock().calls)
    }

    /// The writes among them, Events left out: they are sent beside the work.
    pub fn take_writes(&self) -> Vec<String> {
        let calls = self.take_calls();
        let writes = calls
            .iter()
            .filter(|call| call.is_write() && !call.resource.contains("events"));
        writes.map(|call| format!("{} {}", call.verb, call.resource)).collect()
    }

    /// Answers everything with 503 and ends all watches, or serves again.
    pub fn set_away(&self, away: bool) {
        let mut store = self.lock();
        store.away = away;
        store.cut += 1;
        drop(store);
        self.tell();
    }

    /// Does what it is asked, and answers so much later; watches are told at once.
    pub fn set_slow(&self, slow: Duration) {
        self.lock().slow = slow;
    }

    /// Answers requests for a resource with 503, or serves it again.
    pub fn set_closed(&self, resource: &str, closed: bool) {
        let mut store = self.lock();
        if closed {
            store.closed.insert(resource.into());
        } else {
            store.closed.remove(resource);
        }
    }

    /// Drops this field of every status that is written, as a schema does that does not know it.
    pub fn prune(&self, field: &str) {
        self.lock().pruned.insert(field.into());
    }

    /// From now on a webhook merges this into whatever is applied of a resource.
    pub fn mutate(&self, resource: &str, patch: Value) {
        self.lock().webhooks.insert(resource.into(), patch);
    }

    /// From now on the watches of a resource deliver nothing, and stay open.
    pub fn deafen(&self, resource: &str) {
        self.lock().deaf.insert(resource.into());
    }

    /// From now on the watches of a resource deliver no deletion.
    pub fn deafen_to_deletions(&self, resource: &str) {
        self.lock().deaf_to_deletions.insert(resource.into());
    }

    /// Ends the watches of a deaf resource. What they missed is forgotten: who goes on from there must list anew.
    pub fn expire(&self, resource: &str) {
        let mut store = self.lock();
        store.deaf.remove(resource);
        store.deaf_to_deletions.remove(resource);
        let version = store.version;
        store.forgotten.insert(resource.into(), version);
        store.cut += 1;
        drop(store);
        self.tell();
    }

    /// Ends all watches; they may be opened again at once.
    pub fn cut_watches(&self) {
        self.lock().cut += 1;
        self.tell();
    }

    pub fn get(&self, resource: &str, namespace: &str, name: &str) -> Option<Value> {
        self.lock().objects.get(&key(resource, namespace, name)).cloned()
    }

    pub fn list(&self, resource: &str) -> Vec<Value> {
        let store = self.lock();
        let items = store.objects.iter().filter(|(key, _)| key.resource == resource);
        items.map(|(_, object)| object.clone()).collect()
    }

    /// Puts an object as somebody else would; not counted.
    pub fn put(&self, resource: &str, mut object: Value) -> Value {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let key = key(
            resource,
            &text(&object["metadata"]["namespace"]),
            &text(&object["metadata"]["name"]),
        );
        let mut store = self.lock();
        if let Some(old) = store.objects.get(&key) {
            let old = old.clone();
            let mut merged = old.clone();
            merge(&mut merged, &object);
            if merged.get("spec") != old.get("spec") {
                bump_generation(&mut merged);
            }
            // Of what nobody applies nobody asks.
            if !old["metadata"]["managedFields"].is_null() {
                managed_fields::note(&old, &mut merged, "somebody", None, (self.clock)());
            }
            object = merged;
        } else {
            self.dress(&store, &mut object);
        }
        let stored = Self::keep(&mut store, key, object);
        drop(store);
        self.tell();
        stored
    }

    /// Removes an object as somebody else would; not counted. Pods on a node end gracefully.
    pub fn delete(&self, resource: &str, namespace: &str, name: &str) {
        let mut store = self.lock();
        self.remove(&mut store, &key(resource, namespace, name), None);
        drop(store);
        self.tell();
    }

    /// What a kubelet does last: an ending pod is gone.
    pub fn finish_pod(&self, namespace: &str, name: &str) {
        let mut store = self.lock();
        self.remove(&mut store, &key("/pods", namespace, name), Some(0));
        drop(store);
        self.tell();
    }

    fn lock(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap()
    }

    fn tell(&self) {
        self.news.send_modify(|count| *count += 1);
    }

    /// What the server adds to a new object.
    fn dress(&self, store: &Store, object: &mut Value) {
        let next = store.version + 1;
        let meta = &mut object["metadata"];
        meta["uid"] = json!(format!("uid-{next}"));
        meta["creationTimestamp"] = json!((self.clock)().strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
        meta["generation"] = json!(1);
    }

    fn keep(store: &mut Store, key: Key, mut object: Value) -> Value {
        store.version += 1;
        object["metadata"]["resourceVersion"] = json!(store.version.to_string());
        let kind = if store.objects.contains_key(&key) {
            "MODIFIED"
        } else {
            "ADDED"
        };
        store.changes.push(Change {
            version: store.version,
            resource: key.resource.clone(),
            kind,
            object: object.clone(),
        });
        store.objects.insert(key, object.clone());
        object
    }

    fn remove(&self, store: &mut Store, key: &Key, grace: Option<i64>) -> Option<Value> {
        let mut object = store.objects.get(key)?.clone();
        let over = ["Failed", "Succeeded"]
            .map(Value::from)
            .contains(&object["status"]["phase"]);
        let graceful = key.resource == "/pods" && object["spec"]["nodeName"].is_string() && grace != Some(0) && !over;
        if graceful {
            if object["metadata"]["deletionTimestamp"].is_null() {
                let seconds = grace
                    .or(object["spec"]["terminationGracePeriodSeconds"].as_i64())
                    .unwrap_or(30);
                let gone_by = (self.clock)() + jiff::SignedDuration::from_secs(seconds);
                object["metadata"]["deletionTimestamp"] = json!(gone_by.strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
                return Some(Self::keep(store, key.clone(), object));
            }
            return Some(object);
        }
        store.version += 1;
        object["metadata"]["resourceVersion"] = json!(store.version.to_string());
        store.objects.remove(key);
        store.changes.push(Change {
            version: store.version,
            resource: key.resource.clone(),
            kind: "DELETED",
            object: object.clone(),
        });
        let uid = object["metadata"]["uid"].clone();
        let owned = |object: &Value| {
            let owners = object["metadata"]["ownerReferences"].as_array();
            owners.is_some_and(|owners| owners.iter().any(|owner| owner["uid"] == uid))
        };
        let children: Vec<Key> = store
            .objects
            .iter()
            .filter(|(_, object)| owned(object))
            .map(|(key, _)| key.clone())
            .collect();
        for child in children {
            self.remove(store, &child, None);
        }
        Some(object)
    }

    async fn answer(&self, request: Request) -> Response {
        let (parts, body) = request.into_parts();
        let Some(target) = target(parts.uri.path()) else {
            return failure(StatusCode::NOT_FOUND, "NotFound", "no such path");
        };
        let query: BTreeMap<String, String> = parts.uri.query().map(pairs).unwrap_or_default();
        let watching = query.get("watch").is_some_and(|value| value == "true" || value == "1");
        let call = Call {
            verb: verb(&parts.method, &target, watching),
            resource: format!("{}{}", target.resource, if target.status { "/status" } else { "" }),
            name: target.name.clone().unwrap_or_default(),
        };
        let away = {
            let mut store = self.lock();
            store.calls.push(call);
            store.away || store.closed.contains(&target.resource)
        };
        if away {
            return failure(
                StatusCode::SERVICE_UNAVAILABLE,
                "ServiceUnavailable",
                "the server is away",
            );
        }
        if watching {
            return self.watch(&target, &query);
        }
        let body = to_bytes(body, usize::MAX).await.unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
        let apply = parts
            .headers
            .get(header::CONTENT_TYPE)
            .is_some_and(|value| value.to_str().unwrap().contains("apply-patch"));
        let response = match (parts.method, target.name.clone()) {
            (Method::GET, None) => self.listing(&target, &query),
            (Method::GET, Some(name)) => self.read(&target, &name),
            (Method::POST, None) => self.create(&target, body),
            (Method::PATCH, Some(name)) => {
                let applier = query.get("fieldManager").filter(|_| apply);
                self.patch(&target, &name, &body, applier.map(String::as_str))
            }
            (Method::PUT, Some(name)) => self.replace(&target, &name, body),
            (Method::DELETE, Some(name)) => self.erase(&target, &name, &body),
            (method, name) => panic!("the server does not know {method} on {name:?}"),
        };
        self.tell();
        let slow = self.lock().slow;
        if !slow.is_zero() {
            tokio::time::sleep(slow).await;
        }
        response
    }

    fn listing(&self, target: &Target, query: &BTreeMap<String, String>) -> Response {
        let store = self.lock();
        let items: Vec<&Value> = store
            .objects
            .iter()
            .filter(|(key, _)| key.resource == target.resource)
            .filter(|(key, _)| target.namespace.is_empty() || key.namespace == target.namespace)
            .map(|(_, object)| object)
            .filter(|object| selected(object, query))
            .collect();
        let version = store.version.to_string();
        axum::Json(
            json!({ "kind": "List", "apiVersion": "v1", "metadata": { "resourceVersion": version }, "items": items }),
        )
        .into_response()
    }

    fn watch(&self, target: &Target, query: &BTreeMap<String, String>) -> Response {
        let from: u64 = query
            .get("resourceVersion")
            .and_then(|text| text.parse().ok())
            .unwrap_or(0);
        if self
            .lock()
            .forgotten
            .get(&target.resource)
            .is_some_and(|version| from < *version)
        {
            let status = json!({ "kind": "Status", "status": "Failure", "reason": "Expired", "message": "too old resource version", "code": 410 });
            return Response::new(Body::from(format!(
                "{}\n",
                json!({ "type": "ERROR", "object": status })
            )));
        }
        let (server, query) = (self.clone(), query.clone());
        let (resource, namespace) = (target.resource.clone(), target.namespace.clone());
        let cut = self.lock().cut;
        let mut news = self.news.subscribe();
        let stream = async_stream(move |sender| async move {
            let mut version = from;
            loop {
                let lines: Vec<String> = {
                    let store = server.lock();
                    if store.cut != cut {
                        return;
                    }
                    let heard = !store.deaf.contains(&resource);
                    let deaf = store.deaf_to_deletions.contains(&resource);
                    let new = store
                        .changes
                        .iter()
                        .filter(|change| heard && change.version > version && change.resource == resource);
                    let lines = new
                        .filter(|change| namespace.is_empty() || change.object["metadata"]["namespace"] == namespace)
                        .filter(|change| selected(&change.object, &query))
                        .filter(|change| !deaf || change.kind != "DELETED")
                        .map(|change| format!("{}\n", json!({ "type": change.kind, "object": change.object })))
                        .collect();
                    version = store.version;
                    lines
                };
                for line in lines {
                    if sender.send(Ok::<_, std::io::Error>(line)).await.is_err() {
                        return;
                    }
                }
                if news.changed().await.is_err() {
                    return;
                }
            }
        });
        Response::new(Body::from_stream(stream))
    }

    fn read(&self, target: &Target, name: &str) -> Response {
        match self.get(&target.resource, &target.namespace, name) {
            Some(object) => axum::Json(object).into_response(),
            None => failure(StatusCode::NOT_FOUND, "NotFound", &format!("{name} not found")),
        }
    }

    fn create(&self, target: &Target, mut object: Value) -> Response {
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        let key = key(&target.resource, &target.namespace, &name);
        let mut store = self.lock();
        if store.objects.contains_key(&key) {
            return failure(StatusCode::CONFLICT, "AlreadyExists", &format!("{name} exists"));
        }
        object["metadata"]["namespace"] = json!(target.namespace);
        self.dress(&store, &mut object);
        let stored = Self::keep(&mut store, key.clone(), object);
        // What a garbage collector does soon: whose owner is gone goes too.
        let owners = stored["metadata"]["ownerReferences"].as_array();
        let is_there = |owner: &Value| {
            store
                .objects
                .values()
                .any(|object| object["metadata"]["uid"] == owner["uid"])
        };
        if owners.is_some_and(|owners| !owners.is_empty() && !owners.iter().any(is_there)) {
            self.remove(&mut store, &key, None);
        }
        (StatusCode::CREATED, axum::Json(stored)).into_response()
    }

    fn replace(&self, target: &Target, name: &str, object: Value) -> Response {
        let key = key(&target.resource, &target.namespace, name);
        let mut store = self.lock();
        let Some(old) = store.objects.get(&key) else {
            return failure(StatusCode::NOT_FOUND, "NotFound", &format!("{name} not found"));
        };
        if object["metadata"]["resourceVersion"] != old["metadata"]["resourceVersion"] {
            return failure(StatusCode::CONFLICT, "Conflict", "the object has been modified");
        }
        axum::Json(Self::keep(&mut store, key, object)).into_response()
    }

    fn patch(&self, target: &Target, name: &str, patch: &Value, applier: Option<&str>) -> Response {
        let key = key(&target.resource, &target.namespace, name);
        let mut store = self.lock();
        let old = match store.objects.get(&key) {
            Some(old) => old.clone(),
            None if applier.is_some() => {
                let mut object = json!({});
                self.dress(&store, &mut object);
                object
            }
            None => return failure(StatusCode::NOT_FOUND, "NotFound", &format!("{name} not found")),
        };
        let mut new = old.clone();
        if target.status {
            merge(&mut new, &json!({ "status": patch["status"] }));
            for field in &store.pruned {
                new["status"].as_object_mut().map(|status| status.remove(field));
            }
        } else {
            merge(&mut new, patch);
            if let Some(applier) = applier {
                let webhook = store.webhooks.get(&target.resource);
                merge(&mut new, webhook.unwrap_or(&json!({})));
                managed_fields::note(&old, &mut new, applier, Some(patch), (self.clock)());
            }
            if let Some(status) = old.get("status") {
                new["status"] = status.clone();
            }
        }
        if old.get("spec").is_some() && new.get("spec") != old.get("spec") {
            bump_generation(&mut new);
        }
        let precondition = &patch["metadata"]["resourceVersion"];
        if !precondition.is_null() && *precondition != old["metadata"]["resourceVersion"] {
            return failure(StatusCode::CONFLICT, "Conflict", "the object has been modified");
        }
        if new == old {
            return axum::Json(old).into_response();
        }
        axum::Json(Self::keep(&mut store, key, new)).into_response()
    }

    fn erase(&self, target: &Target, name: &str, options: &Value) -> Response {
        let key = key(&target.resource, &target.namespace, name);
        let mut store = self.lock();
        let Some(object) = store.objects.get(&key) else {
            return failure(StatusCode::NOT_FOUND, "NotFound", &format!("{name} not found"));
        };
        let wanted = &options["preconditions"]["uid"];
        if !wanted.is_null() && *wanted != object["metadata"]["uid"] {
            return failure(
                StatusCode::CONFLICT,
                "Conflict",
                "the uid in the precondition is another",
            );
        }
        let removed = self.remove(&mut store, &key, options["gracePeriodSeconds"].as_i64());
        axum::Json(removed).into_response()
    }
}

async fn serve(State(server): State<ApiServer>, request: Request) -> Response {
    server.answer(request).await
}

fn async_stream<T, F>(work: impl FnOnce(tokio::sync::mpsc::Sender<T>) -> F) -> tokio_stream::wrappers::ReceiverStream<T>
where
    T: Send + 'static,
    F: Future<Output = ()> + Send + 'static,
{
    let (sender, receiver) = tokio::sync::mpsc::channel(16);
    tokio::spawn(work(sender));
    tokio_stream::wrappers::ReceiverStream::new(receiver)
}

fn key(resource: &str, namespace: &str, name: &str) -> Key {
    Key {
        resource: resource.into(),
        namespace: namespace.into(),
        name: name.into(),
    }
}

fn verb(method: &Method, target: &Target, watching: bool) -> &'static str {
    match (method.as_str(), target.name.is_some()) {
        ("GET", _) if watching => "watch",
        ("GET", true) => "get",
        ("GET", false) => "list",
        ("POST", _) => "create",
        ("PUT", _) => "update",
        ("PATCH", _) => "patch",
        ("DELETE", _) => "delete",
        (other, _) => panic!("unknown method {other}"),
    }
}

fn target(path: &str) -> Option<Target> {
    let mut parts = path.trim_matches('/').split('/').peekable();
    let group = match parts.next()? {
        "api" => "",
        "apis" => parts.next()?,
        _ => return None,
    };
    let _version = parts.next()?;
    let mut namespace = "";
    let mut plural = parts.next()?;
    if plural == "namespaces"
        && let Some(name) = parts.next()
    {
        namespace = name;
        plural = parts.next()?;
    }
    let name = parts.next().map(str::to_owned);
    let status = parts.next() == Some("status");
    Some(Target {
        resource: format!("{group}/{plural}"),
        namespace: namespace.into(),
        name,
        status,
    })
}

fn pairs(query: &str) -> BTreeMap<String, String> {
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs
        .map(|(key, value)| (key.into(), value.replace("%2F", "/")))
        .collect()
}

/// Only the form that the controller uses: the label exists.
fn selected(object: &Value, query: &BTreeMap<String, String>) -> bool {
    query
        .get("labelSelector")
        .is_none_or(|label| object["metadata"]["labels"].get(label).is_some())
}

fn bump_generation(object: &mut Value) {
    let generation = object["metadata"]["generation"].as_i64().unwrap_or(0);
    object["metadata"]["generation"] = json!(generation + 1);
}

/// RFC 7386.
fn merge(old: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *old = patch.clone();
        return;
    };
    if !old.is_object() {
        *old = json!({});
    }
    let old = old.as_object_mut().unwrap();
    for (key, value) in patch {
        if value.is_null() {
            old.remove(key);
        } else {
            merge(old.entry(key.clone()).or_insert(Value::Null), value);
        }
    }
}

fn failure(code: StatusCode, reason: &str, message: &str) -> Response {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure",
        "reason": reason, "message": message, "code": code.as_u16(),
    });
    (code, axum::Json(status)).into_response()
}
