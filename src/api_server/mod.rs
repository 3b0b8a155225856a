//! An API server in memory, for `agentloop run` and for tests: the Kubernetes API as far as the controller uses it.
//!
//! Owns paths, verbs and answers; the [`object_store`] owns the objects. Serves the controller of this process, so it
//! authenticates and authorizes no request. What else its owner needs, such as reviews of tokens or injected faults, is
//! behind [`ServerHooks`]. Depends only on the custom resources, whose [`schema`] it checks.

pub mod error;
pub mod hooks;
mod kept_objects;
mod managed_fields;
pub mod object_key;
pub mod object_store;
pub mod patch;
pub mod request;
pub mod schema;
mod watch;

use std::sync::Arc;

use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use kube::Client;
use serde_json::{Value, json};
use tokio::sync::watch as channel;

pub use error::ApiError;
pub use hooks::ServerHooks;
pub use object_key::ObjectKey;
pub use object_store::{ChangeKind, ObjectChange, ObjectStore, PatchRequest, PatchScope};
pub use patch::ObjectPatch;
pub use request::{ApiRequest, ApiVerb};
pub use schema::ObjectSchema;

use watch::ObjectWatch;

/// The longest body; the controller's own requests are far shorter.
const MAX_BODY: usize = 4 * 1024 * 1024;

/// The server. Clones share their objects.
#[derive(Clone)]
pub struct ApiServer {
    store: Arc<ObjectStore>,
    hooks: Arc<dyn ServerHooks>,
    /// Changes when the open watches are to end.
    watches: channel::Sender<()>,
}

impl ApiServer {
    #[must_use]
    pub fn new(store: Arc<ObjectStore>, hooks: Arc<dyn ServerHooks>) -> Self {
        Self {
            store,
            hooks,
            watches: channel::Sender::new(()),
        }
    }

    /// A client whose transport is this server: no socket.
    #[must_use]
    pub fn client(&self) -> Client {
        Client::new(self.router(), "default")
    }

    /// Its routes, to serve them on a socket.
    pub fn router(&self) -> Router {
        Router::new().fallback(answer).with_state(self.clone())
    }

    /// Ends all open watches, as an API server does that restarts. For tests of clients.
    pub fn end_watches(&self) {
        self.watches.send_replace(());
    }

    async fn serve(&self, request: Request) -> Result<Response, ApiError> {
        let (parts, body) = request.into_parts();
        let request = ApiRequest::of(&parts)?;
        self.hooks.admit(&request)?;
        if request.verb == ApiVerb::Watch {
            return Ok(self.watch(request));
        }
        let body = to_bytes(body, MAX_BODY).await;
        let body = body.map_err(|_| ApiError::Invalid("cannot read the body".into()))?;
        let body = if body.is_empty() {
            Value::Null
        } else {
            serde_json::from_slice(&body).map_err(|_| ApiError::Invalid("the body is not JSON".into()))?
        };
        let answered = self.answered(&request, body, &parts.headers);
        let delay = self.hooks.delay();
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        let code = if request.verb == ApiVerb::Create {
            StatusCode::CREATED
        } else {
            StatusCode::OK
        };
        answered.map(|object| (code, Json(object)).into_response())
    }

    fn answered(&self, request: &ApiRequest, mut body: Value, headers: &HeaderMap) -> Result<Value, ApiError> {
        if request.verb.is_write()
            && let Some(answer) = self.hooks.answer(request, &body)
        {
            return Ok(answer);
        }
        let mutate = |object: &mut Value| self.hooks.mutate(request, object);
        match request.verb {
            ApiVerb::Get => {
                let found = self.store.get(&request.key());
                found.ok_or_else(|| ApiError::NotFound(request.name.clone()))
            }
            ApiVerb::List | ApiVerb::Watch => Ok(self.listing(request)),
            ApiVerb::Create => {
                let name = body["metadata"]["name"].as_str().unwrap_or_default().to_owned();
                mutate(&mut body);
                let key = ObjectKey { name, ..request.key() };
                self.store.create(key, body)
            }
            ApiVerb::Update => {
                mutate(&mut body);
                self.store.replace(&request.key(), body)
            }
            ApiVerb::Patch => {
                let patch = request::patch_of(headers, body);
                let patch = PatchRequest {
                    scope: if request.status {
                        PatchScope::Status
                    } else {
                        PatchScope::Object
                    },
                    patch: &patch,
                    manager: request.manager(),
                };
                self.store.patch_with(&request.key(), &patch, &mutate)
            }
            ApiVerb::Delete => {
                let uid = body["preconditions"]["uid"].as_str();
                let grace = body["gracePeriodSeconds"].as_i64();
                self.store.delete(&request.key(), uid, grace)
            }
        }
    }

    fn listing(&self, request: &ApiRequest) -> Value {
        let (version, found) = self.store.list(&request.resource, &request.namespace);
        let objects = found.into_iter().map(|(_, object)| object);
        let items: Vec<Value> = objects.filter(|object| request.selects(object)).collect();
        let meta = json!({ "resourceVersion": version.to_string() });
        json!({ "kind": "List", "apiVersion": "v1", "metadata": meta, "items": items })
    }

    fn watch(&self, request: ApiRequest) -> Response {
        let watch = ObjectWatch {
            news: self.store.news(),
            ended: self.watches.subscribe(),
            server: self.clone(),
            version: request.version(),
            request,
            expired: false,
        };
        Response::new(Body::from_stream(watch.lines()))
    }
}

async fn answer(State(server): State<ApiServer>, request: Request) -> Response {
    server.serve(request).await.unwrap_or_else(ApiError::into_response)
}

#[cfg(test)]
mod tests;
