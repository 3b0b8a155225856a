//! The Kubernetes API over the [`ObjectStore`], as far as the controller uses it. There is no socket: this is the
//! client's transport.
//!
//! Owns paths, verbs and responses. Serves only the controller of this process, so it checks no authorization.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};

use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use futures::{Stream, stream};
use jiff::Timestamp;
use kube::Client;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::object_store::{NAMESPACES, ObjectChange, ObjectKey, ObjectStore, ObjectStoreError};
use super::patch::ObjectPatch;
use crate::api::LINK_AUDIENCE;
use crate::link::pod::{SENSOR_SERVICE_ACCOUNT, SERVICE_ACCOUNT};
use crate::link::server::{PodIdentity, PodKind};

/// The longest body; the controller's own requests are far shorter.
const MAX_BODY: usize = 4 * 1024 * 1024;
/// Events are accepted and dropped.
const EVENTS: &str = "events.k8s.io/events";
const TOKEN_REVIEWS: &str = "authentication.k8s.io/tokenreviews";

/// The lifetime that a token states: longer than any run. It ends with its pod.
const TOKEN_SECONDS: i64 = 10 * 366 * 86_400;

/// The tokens of the pods.
#[derive(Default)]
pub struct PodTokens(Mutex<HashMap<String, PodIdentity>>);

impl PodTokens {
    /// Issues a token to this pod: in the form of a cluster's, with `secret` in place of a signature.
    pub fn issue(&self, secret: &str, pod: PodIdentity) -> String {
        let claims = json!({
            "aud": [LINK_AUDIENCE],
            "exp": Timestamp::now().as_second() + TOKEN_SECONDS,
            "sub": format!("system:serviceaccount:{}:{}", pod.namespace, account(pod.kind)),
        });
        let token = format!("e30.{}.{secret}", BASE64_URL_SAFE_NO_PAD.encode(claims.to_string()));
        self.put(token.clone(), pod);
        token
    }

    fn put(&self, token: String, pod: PodIdentity) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(token, pod);
    }

    /// The pod has ended: revokes its token.
    pub fn remove(&self, pod_uid: &str) {
        let mut tokens = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        tokens.retain(|_, pod| pod.uid != pod_uid);
    }

    fn get(&self, token: &str) -> Option<PodIdentity> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(token)
            .cloned()
    }
}

#[derive(Clone)]
struct LocalApiServer {
    store: Arc<ObjectStore>,
    tokens: Arc<PodTokens>,
}

/// A client of these objects.
#[must_use]
pub fn client(store: Arc<ObjectStore>, tokens: Arc<PodTokens>) -> Client {
    let server = LocalApiServer { store, tokens };
    Client::new(Router::new().fallback(answer).with_state(server), "default")
}

/// The target of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ResourcePath {
    resource: String,
    namespace: String,
    name: Option<String>,
    status: bool,
}

impl ResourcePath {
    fn of(path: &str) -> Option<Self> {
        let mut parts = path.trim_matches('/').split('/');
        let group = match parts.next()? {
            "api" => "",
            "apis" => parts.next()?,
            _ => return None,
        };
        let _version = parts.next()?;
        let (mut namespace, mut plural) = ("", parts.next()?);
        if plural == "namespaces"
            && let Some(name) = parts.next()
        {
            (namespace, plural) = (name, parts.next()?);
        }
        Some(Self {
            resource: format!("{group}/{plural}"),
            namespace: namespace.into(),
            name: parts.next().map(Into::into),
            status: parts.next() == Some("status"),
        })
    }

    fn key(&self, name: &str) -> ObjectKey {
        ObjectKey::new(&self.resource, &self.namespace, name)
    }
}

async fn answer(State(server): State<LocalApiServer>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let Some(target) = ResourcePath::of(parts.uri.path()) else {
        return refuse(&ObjectStoreError::NotFound(parts.uri.path().into()));
    };
    let query = pairs(parts.uri.query().unwrap_or_default());
    if query.get("watch").is_some_and(|value| value == "true" || value == "1") {
        return server.watch(target, &query);
    }
    let Ok(body) = to_bytes(body, MAX_BODY).await else {
        return refuse(&ObjectStoreError::Invalid("cannot read the body".into()));
    };
    let body: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
    let answered = match (parts.method, target.name.clone()) {
        (Method::GET, None) => Ok(server.listing(&target, &query)),
        (Method::GET, Some(name)) => server.read(&target.key(&name)),
        (Method::POST, None) => server.create(&target, body),
        (Method::PUT, Some(name)) => server.store.replace(&target.key(&name), body),
        (Method::PATCH, Some(name)) => server.patch(&target, &name, body, &parts.headers),
        (Method::DELETE, Some(name)) => {
            let uid = body["preconditions"]["uid"].as_str();
            let at_once = body["gracePeriodSeconds"] == 0;
            server.store.delete(&target.key(&name), uid, at_once)
        }
        (method, _) => Err(ObjectStoreError::Invalid(format!("{method} is not supported"))),
    };
    answered.map_or_else(|refusal| refuse(&refusal), |object| Json(object).into_response())
}

impl LocalApiServer {
    fn read(&self, key: &ObjectKey) -> Result<Value, ObjectStoreError> {
        self.store
            .get(key)
            .ok_or_else(|| ObjectStoreError::NotFound(key.name.clone()))
    }

    fn listing(&self, target: &ResourcePath, query: &BTreeMap<String, String>) -> Value {
        let (version, found) = self.store.list(&target.resource, &target.namespace);
        let selected = found.into_iter().filter(|(_, object)| selects(query, object));
        let items: Vec<Value> = selected.map(|(_, object)| object).collect();
        let meta = json!({ "resourceVersion": version.to_string() });
        json!({ "kind": "List", "apiVersion": "v1", "metadata": meta, "items": items })
    }

    fn create(&self, target: &ResourcePath, object: Value) -> Result<Value, ObjectStoreError> {
        match target.resource.as_str() {
            TOKEN_REVIEWS => Ok(self.review(object)),
            EVENTS => Ok(object),
            _ => {
                let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
                self.store.create(target.key(&name), object)
            }
        }
    }

    fn patch(
        &self,
        target: &ResourcePath,
        name: &str,
        body: Value,
        headers: &HeaderMap,
    ) -> Result<Value, ObjectStoreError> {
        if target.resource == EVENTS {
            return Ok(body);
        }
        let key = target.key(name);
        let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
        let kind = kind.unwrap_or_default();
        if kind.contains("apply-patch") && self.store.get(&key).is_none() {
            return self.store.create(key, body);
        }
        let patch = if kind.contains("json-patch") {
            ObjectPatch::Json(body)
        } else {
            ObjectPatch::Merge(body)
        };
        self.store.patch(&key, target.status, &patch)
    }

    /// The holder of a token.
    fn review(&self, mut review: Value) -> Value {
        let held = self.tokens.get(review["spec"]["token"].as_str().unwrap_or_default());
        review["status"] = match held {
            None => json!({ "authenticated": false }),
            Some(pod) => json!({
                "authenticated": true,
                "audiences": [LINK_AUDIENCE],
                "user": {
                    "username": format!("system:serviceaccount:{}:{}", pod.namespace, account(pod.kind)),
                    "extra": {
                        "authentication.kubernetes.io/pod-name": [pod.name],
                        "authentication.kubernetes.io/pod-uid": [pod.uid],
                    },
                },
            }),
        };
        review
    }

    fn watch(self, target: ResourcePath, query: &BTreeMap<String, String>) -> Response {
        let from = query.get("resourceVersion").and_then(|text| text.parse().ok());
        let follow = ObjectWatch {
            news: self.store.news(),
            store: self.store,
            target,
            query: query.clone(),
            version: from.unwrap_or(0),
            expired: false,
        };
        Response::new(Body::from_stream(follow.lines()))
    }
}

/// The service account that identifies the kind of a pod.
fn account(kind: PodKind) -> &'static str {
    match kind {
        PodKind::Agent => SERVICE_ACCOUNT,
        PodKind::Sensor => SENSOR_SERVICE_ACCOUNT,
    }
}

struct ObjectWatch {
    store: Arc<ObjectStore>,
    news: watch::Receiver<u64>,
    target: ResourcePath,
    query: BTreeMap<String, String>,
    version: u64,
    expired: bool,
}

impl ObjectWatch {
    fn lines(self) -> impl Stream<Item = Result<String, Infallible>> {
        stream::unfold(self, |mut follow| async move {
            loop {
                if follow.expired {
                    return None;
                }
                // Mark as seen before reading: a change in the meantime wakes this again.
                follow.news.mark_unchanged();
                let lines = follow.next();
                if !lines.is_empty() {
                    return Some((Ok(lines), follow));
                }
                follow.news.changed().await.ok()?;
            }
        })
    }

    fn next(&mut self) -> String {
        let Some((version, changes)) = self.store.changes(&self.target.resource, self.version) else {
            self.expired = true;
            let expired = status(StatusCode::GONE, "Expired", "too old resource version");
            return format!("{}\n", json!({ "type": "ERROR", "object": expired }));
        };
        self.version = version;
        let namespace = &self.target.namespace;
        let here = |change: &&ObjectChange| namespace.is_empty() || change.key.namespace == *namespace;
        let selected = changes
            .iter()
            .filter(here)
            .filter(|change| selects(&self.query, &change.object));
        selected.fold(String::new(), |mut lines, change| {
            let event = json!({ "type": change.kind.as_ref(), "object": change.object });
            let _ = writeln!(lines, "{event}");
            lines
        })
    }
}

/// The only form of label selectors that the controller uses: the label exists.
fn selects(query: &BTreeMap<String, String>, object: &Value) -> bool {
    let label = query.get("labelSelector");
    label.is_none_or(|label| object["metadata"]["labels"].get(label).is_some())
}

fn pairs(query: &str) -> BTreeMap<String, String> {
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs
        .map(|(key, value)| (key.into(), value.replace("%2F", "/")))
        .collect()
}

fn refuse(refusal: &ObjectStoreError) -> Response {
    let (code, reason) = match refusal {
        ObjectStoreError::NotFound(_) => (StatusCode::NOT_FOUND, "NotFound"),
        ObjectStoreError::AlreadyExists(_) => (StatusCode::CONFLICT, "AlreadyExists"),
        ObjectStoreError::Conflict(_) => (StatusCode::CONFLICT, "Conflict"),
        ObjectStoreError::Invalid(_) => (StatusCode::UNPROCESSABLE_ENTITY, "Invalid"),
        ObjectStoreError::Disk(_) | ObjectStoreError::Random => (StatusCode::INTERNAL_SERVER_ERROR, "InternalError"),
    };
    (code, Json(status(code, reason, &refusal.to_string()))).into_response()
}

fn status(code: StatusCode, reason: &str, message: &str) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "reason": reason, "message": message, "code": code.as_u16(),
    })
}

/// The key of a namespace, which is not in a namespace.
#[must_use]
pub fn namespace_key(name: &str) -> ObjectKey {
    ObjectKey::new(NAMESPACES, "", name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_name_kind_namespace_name_and_status() {
        let target = |path| ResourcePath::of(path).map(|t| (t.resource, t.namespace, t.name, t.status));
        let text = str::to_owned;
        assert_eq!(
            target("/apis/agentloop.dev/v1alpha1/namespaces/n/agents/a/status"),
            Some((text("agentloop.dev/agents"), text("n"), Some(text("a")), true))
        );
        assert_eq!(
            target("/api/v1/namespaces"),
            Some((text("/namespaces"), text(""), None, false))
        );
        assert_eq!(
            target("/api/v1/namespaces/n/pods"),
            Some((text("/pods"), text("n"), None, false))
        );
        assert_eq!(target("/version"), None);
    }

    #[test]
    fn a_token_speaks_for_its_pod_until_that_is_gone() {
        let directory = tempfile::tempdir().unwrap();
        let server = LocalApiServer {
            store: Arc::new(ObjectStore::open(&directory.path().join("objects.sqlite")).unwrap()),
            tokens: Arc::default(),
        };
        let pod = PodIdentity {
            namespace: "n".into(),
            name: "a".into(),
            uid: "u".into(),
            kind: PodKind::Sensor,
        };
        server.tokens.put("secret".into(), pod);
        let review = |token: &str| server.review(json!({ "spec": { "token": token } }));
        let held = review("secret");
        assert_eq!(held["status"]["authenticated"], true);
        assert_eq!(
            held["status"]["user"]["username"],
            "system:serviceaccount:n:agentloop-sensor"
        );
        assert_eq!(review("other")["status"]["authenticated"], false);
        server.tokens.remove("u");
        assert_eq!(review("secret")["status"]["authenticated"], false);
    }
}
