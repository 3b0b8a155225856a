//! Requests as a client sends them, and what hooks make of them.

use std::sync::{Mutex, PoisonError};

use axum::http::{Method, header};
use futures::StreamExt;
use jiff::Timestamp;
use pretty_assertions::assert_eq;
use tower::ServiceExt;

use super::object_key::{CONFIG_MAPS, SECRETS, TOKEN_REVIEWS};
use super::*;

const MAPS: &str = "/api/v1/namespaces/n/configmaps";
const MAP: &str = "/api/v1/namespaces/n/configmaps/a";

/// Records requests, rejects those for Secrets, answers reviews, and adds a field to what is stored.
#[derive(Default)]
struct Scripted(Mutex<Vec<String>>);

impl ServerHooks for Scripted {
    fn admit(&self, request: &ApiRequest) -> Result<(), ApiError> {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.push(format!("{} {}", request.verb.as_ref(), request.resource));
        if request.resource == SECRETS {
            return Err(ApiError::Unavailable("away".into()));
        }
        Ok(())
    }

    fn answer(&self, request: &ApiRequest, body: &Value) -> Option<Value> {
        (request.resource == TOKEN_REVIEWS).then(|| json!({ "reviewed": body["spec"]["token"] }))
    }

    fn mutate(&self, _: &ApiRequest, object: &mut Value) {
        object["mutated"] = json!(true);
    }

    fn delivers(&self, change: &ObjectChange) -> bool {
        change.key.name != "silent"
    }
}

fn server(hooks: Arc<dyn ServerHooks>) -> ApiServer {
    let clock = Arc::new(|| Timestamp::UNIX_EPOCH);
    ApiServer::new(Arc::new(ObjectStore::in_memory(clock)), hooks)
}

async fn send(server: &ApiServer, method: Method, path: &str, kind: &str, body: &Value) -> Response {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::CONTENT_TYPE, kind);
    let body = if body.is_null() {
        String::new()
    } else {
        body.to_string()
    };
    let request = request.body(Body::from(body)).unwrap();
    server.router().oneshot(request).await.unwrap()
}

async fn json_of(response: Response) -> (u16, Value) {
    let code = response.status().as_u16();
    let body = to_bytes(response.into_body(), MAX_BODY).await.unwrap();
    (code, serde_json::from_slice(&body).unwrap())
}

async fn call(server: &ApiServer, method: Method, path: &str, body: &Value) -> (u16, Value) {
    json_of(send(server, method, path, "application/json", body).await).await
}

fn map(name: &str) -> Value {
    json!({ "kind": "ConfigMap", "metadata": { "name": name, "labels": { "ours": "" } }, "data": { "k": "v" } })
}

#[tokio::test]
async fn an_object_is_created_read_listed_changed_and_deleted() {
    let server = server(Arc::new(Scripted::default()));
    let (code, made) = call(&server, Method::POST, MAPS, &map("a")).await;
    assert_eq!(
        (code, &made["metadata"]["namespace"], &made["mutated"]),
        (201, &json!("n"), &json!(true))
    );
    assert_eq!(
        call(&server, Method::POST, MAPS, &map("a")).await.1["reason"],
        "AlreadyExists"
    );
    assert_eq!(call(&server, Method::GET, MAP, &Value::Null).await, (200, made.clone()));
    for (selector, found) in [("ours", 1), ("other", 0)] {
        let path = format!("/api/v1/configmaps?labelSelector={selector}");
        let (_, list) = call(&server, Method::GET, &path, &Value::Null).await;
        assert_eq!(list["items"].as_array().unwrap().len(), found, "{selector}");
    }
    let patch = json!([{ "op": "test", "path": "/data/k", "value": "v" }, { "op": "remove", "path": "/data/k" }]);
    let patched = send(&server, Method::PATCH, MAP, "application/json-patch+json", &patch).await;
    assert_eq!(json_of(patched).await.1["data"], json!({}));
    assert_eq!(call(&server, Method::PUT, MAP, &made).await.1["reason"], "Conflict");
    let other = json!({ "preconditions": { "uid": "another" } });
    assert_eq!(call(&server, Method::DELETE, MAP, &other).await.0, 409);
    assert_eq!(call(&server, Method::DELETE, MAP, &Value::Null).await.0, 200);
    assert_eq!(
        call(&server, Method::GET, MAP, &Value::Null).await.1["reason"],
        "NotFound"
    );
}

#[tokio::test]
async fn hooks_see_every_request_and_may_refuse_or_answer_it() {
    let hooks = Arc::new(Scripted::default());
    let server = server(hooks.clone());
    let (code, refused) = call(&server, Method::GET, "/api/v1/secrets", &Value::Null).await;
    assert_eq!((code, &refused["message"]), (503, &json!("away")));
    let reviews = "/apis/authentication.k8s.io/v1/tokenreviews";
    let review = json!({ "spec": { "token": "t" } });
    assert_eq!(
        call(&server, Method::POST, reviews, &review).await.1,
        json!({ "reviewed": "t" })
    );
    let (_, list) = call(&server, Method::GET, reviews, &Value::Null).await;
    assert_eq!(list["items"], json!([]), "what a hook answers is not stored");
    let seen = hooks.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let reviews = format!(" {TOKEN_REVIEWS}");
    assert_eq!(
        seen,
        [
            format!("list {SECRETS}"),
            format!("create{reviews}"),
            format!("list{reviews}")
        ]
    );
}

#[tokio::test]
async fn a_watch_continues_from_a_version_until_all_watches_end() {
    let server = server(Arc::new(Scripted::default()));
    let (_, first) = call(&server, Method::POST, MAPS, &map("a")).await;
    let from = first["metadata"]["resourceVersion"].as_str().unwrap();
    let path = format!("{MAPS}?watch=true&resourceVersion={from}");
    let watch = send(&server, Method::GET, &path, "", &Value::Null).await;
    let mut lines = watch.into_body().into_data_stream();
    call(&server, Method::POST, MAPS, &map("silent")).await;
    call(&server, Method::DELETE, MAP, &Value::Null).await;
    let line = lines.next().await.unwrap().unwrap();
    let event: Value = serde_json::from_slice(&line).unwrap();
    assert_eq!(
        (&event["type"], &event["object"]["metadata"]["name"]),
        (&json!("DELETED"), &json!("a"))
    );
    server.end_watches();
    assert!(lines.next().await.is_none());

    // The history that it missed is gone: it has to list again.
    server.store.forget_changes(CONFIG_MAPS);
    let (_, event) = json_of(send(&server, Method::GET, &path, "", &Value::Null).await).await;
    assert_eq!(
        (&event["type"], &event["object"]["code"]),
        (&json!("ERROR"), &json!(410))
    );
}

#[tokio::test]
async fn a_malformed_request_is_refused() {
    let server = server(Arc::new(Scripted::default()));
    for (method, path, code) in [
        (Method::GET, "/version", 404),
        (Method::OPTIONS, MAP, 422),
        (Method::PUT, MAPS, 422),
    ] {
        assert_eq!(call(&server, method, path, &Value::Null).await.0, code, "{path}");
    }
    let broken = Request::builder()
        .method(Method::POST)
        .uri(MAPS)
        .body(Body::from("{"))
        .unwrap();
    assert_eq!(server.router().oneshot(broken).await.unwrap().status().as_u16(), 422);
}
