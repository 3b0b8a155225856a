//! What each command does with each of the chart's roles: it works, or the message names the permission that is missing.
//!
//! The rules are those of the rendered chart; a layer before the API server in memory and the controller's own check of
//! clients apply them as RBAC does. `cluster_roles` has a real API server decide. Admission policies are tested in
//! `chart/approval`.

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use agentloop::api::NamespacedName;
use agentloop::controller::auth::access::{ClientAction, ClientAuthorizer};
use agentloop::plugin::ExitStatus;
use axum::Json;
use axum::body::Body;
use axum::extract::RawQuery;
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, Method, Request, Response, StatusCode};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use futures::{StreamExt, stream};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::harness::{CommandOutput, NOW, PluginHarness};
use super::{GATE, gated};
use crate::chart::render::{Rendered, render};

/// What changing an Agent needs.
const PATCH_AGENT: &[&str] = &[r#"patch resource "agents""#, r#"get resource "agents""#];

/// The roles that may change Agents, and those that may read them.
const EDITORS: &[&str] = &["edit", "approver", "admin"];
const VIEWERS: &[&str] = &["view", "edit", "approver", "admin"];

/// The roles of a cluster, and the chart's roles that they consist of or that stand alone.
pub const ROLES: [(&str, &[&str]); 5] = [
    ("nobody", &[]),
    ("view", &["agentloop-view"]),
    ("edit", &["agentloop-edit"]),
    ("approver", &["agentloop-approver"]),
    (
        "admin",
        &["agentloop-admin", "agentloop-budget-admin", "agentloop-approver"],
    ),
];

/// For each command: the permissions of which a user lacks one whom it refuses, the first of which comes last; and the
/// roles that may.
pub const COMMANDS: [(&str, &[&str], &[&str]); 18] = [
    ("status", &[r#"list resource "agents""#], VIEWERS),
    ("status helper", &[r#"get resource "agents""#], VIEWERS),
    ("explain helper", &[r#"get resource "agents""#], VIEWERS),
    ("cost", &[r#"list resource "agents""#], VIEWERS),
    (
        "cost --by model --since 1h",
        &["get agents/events", r#"list resource "agents""#],
        VIEWERS,
    ),
    (
        "budget top",
        &[r#"list resource "agentbudgets""#],
        &["view", "edit", "admin"],
    ),
    ("events helper", &["get agents/events"], VIEWERS),
    (
        "logs helper",
        &["get agents/events", r#"get resource "agents""#],
        VIEWERS,
    ),
    ("history helper", &["get agents/events"], VIEWERS),
    (
        "events helper --messages",
        &["get agents/messages", "get agents/events"],
        EDITORS,
    ),
    ("pause helper", PATCH_AGENT, EDITORS),
    ("resume helper", PATCH_AGENT, EDITORS),
    ("wake helper", PATCH_AGENT, EDITORS),
    ("stop helper", PATCH_AGENT, EDITORS),
    // That editors need the verb approve as well is up to an admission policy.
    ("approve helper e3-t12c1r1", PATCH_AGENT, EDITORS),
    ("deny helper e3-t12c1r1", PATCH_AGENT, EDITORS),
    (
        "budget top-up team --tokens 7 --id new",
        &[r#"patch resource "agentbudgets""#, r#"get resource "agentbudgets""#],
        &["admin"],
    ),
    (
        "run helper -p x",
        &["create agents/tasks", "get agents/messages", "get agents/events"],
        &["edit", "admin"],
    ),
];

/// Rules of roles, and the question whether they allow something.
#[derive(Clone)]
pub struct RoleRules(Arc<Vec<Value>>);

impl RoleRules {
    pub fn of(objects: &Rendered, parts: &[&str]) -> Self {
        let rules = parts
            .iter()
            .flat_map(|role| objects.one("ClusterRole", role)["rules"].as_array().unwrap().clone());
        Self(Arc::new(rules.collect()))
    }

    /// The rules, as a role lists them.
    pub fn list(&self) -> &[Value] {
        &self.0
    }

    fn allow(&self, verb: &str, group: &str, resource: &str) -> bool {
        let lists = |rule: &Value, field: &str, value: &str| {
            rule[field]
                .as_array()
                .is_some_and(|values| values.iter().any(|one| one == value))
        };
        self.0.iter().any(|rule| {
            rule["resourceNames"].is_null()
                && lists(rule, "verbs", verb)
                && lists(rule, "apiGroups", group)
                && lists(rule, "resources", resource)
        })
    }

    /// Whether a request may be made of the API server; the words of its refusal.
    pub fn check(&self, method: &Method, path: &str) -> Result<(), String> {
        let words: Vec<&str> = path.trim_matches('/').split('/').collect();
        let [
            "apis",
            group @ "agentloop.dev",
            _,
            "namespaces",
            namespace,
            resource,
            name @ ..,
        ] = &words[..]
        else {
            return Ok(());
        };
        let verb = match (method.as_str(), name.is_empty()) {
            ("GET", true) => "list",
            ("GET", false) => "get",
            ("POST", _) => "create",
            ("PATCH", _) => "patch",
            ("DELETE", _) => "delete",
            _ => "update",
        };
        let full = name
            .get(1)
            .map_or_else(|| (*resource).to_owned(), |sub| format!("{resource}/{sub}"));
        if self.allow(verb, group, &full) {
            return Ok(());
        }
        Err(format!(
            "{resource}.{group} is forbidden: User \"ann\" cannot {verb} resource \"{full}\" in API group \"{group}\" in the \
             namespace \"{namespace}\""
        ))
    }

    /// Answers a review of access.
    pub fn review(&self, spec: &Value) -> bool {
        let asked = &spec["resourceAttributes"];
        let text = |name: &str| asked[name].as_str().unwrap_or_default();
        let resource = match text("subresource") {
            "" => text("resource").to_owned(),
            sub => format!("{}/{sub}", text("resource")),
        };
        self.allow(text("verb"), text("group"), &resource)
    }

    /// The controller's check of clients, with reviews by these rules.
    fn authorizer(&self) -> ClientAuthorizer {
        let rules = self.clone();
        let answer = tower::service_fn(move |request: Request<kube::client::Body>| {
            let rules = rules.clone();
            async move {
                let is_token = request.uri().path().ends_with("tokenreviews");
                let body = request.into_body().collect_bytes().await.unwrap();
                let mut review: Value = serde_json::from_slice(&body).unwrap();
                review["status"] = if is_token {
                    json!({"authenticated": true, "user": {"username": "ann"}})
                } else {
                    json!({"allowed": rules.review(&review["spec"])})
                };
                Ok::<_, Infallible>(Response::new(axum::body::Body::from(review.to_string())))
            }
        });
        ClientAuthorizer::new(kube::Client::new(answer, "default"))
    }
}

/// Checks what the client who sends this may do with Agent `helper` of a namespace.
async fn refusal(
    (access, namespace): &(ClientAuthorizer, String),
    headers: &HeaderMap,
    actions: &[ClientAction],
) -> Option<axum::response::Response> {
    let agent = NamespacedName::new(namespace, "helper");
    let header = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let token = header
        .and_then(|value| value.strip_prefix("Bearer "))
        .unwrap_or_default();
    for action in actions {
        let token = (token, IpAddr::V4(Ipv4Addr::LOCALHOST));
        if let Err(refusal) = access.check(token, &agent, *action).await {
            return Some((StatusCode::FORBIDDEN, Json(refusal)).into_response());
        }
    }
    None
}

/// A controller that authorizes clients as ours does, with an Agent that did one thing and takes no task; returns its URL.
pub async fn controller(access: ClientAuthorizer, namespace: &str) -> String {
    let access = Arc::new((access, namespace.to_owned()));
    let of_tasks = access.clone();
    let events = async move |headers: HeaderMap, RawQuery(query): RawQuery| {
        let query = query.unwrap_or_default();
        let mut actions = vec![ClientAction::ReadEvents];
        if query.contains("messages=true") {
            actions.push(ClientAction::ReadMessages);
        }
        if let Some(refusal) = refusal(&access, &headers, &actions).await {
            return refusal;
        }
        let started = json!({"seq": 1, "event": "loop:started", "at": NOW, "kind": "Started", "turn": 0, "note": ""});
        let (name, data) = if query.contains("after=latest") {
            ("start", json!({"seq": 1}))
        } else {
            ("loop:started", started)
        };
        let first = Ok::<_, Infallible>(format!("event: {name}\nid: 1\ndata: {data}\n\n"));
        let body = Body::from_stream(stream::iter([first]).chain(stream::pending()));
        ([("content-type", "text/event-stream")], body).into_response()
    };
    let tasks = async move |headers: HeaderMap| match refusal(&of_tasks, &headers, &[ClientAction::RequestTasks]).await
    {
        Some(refusal) => refusal,
        None => (
            StatusCode::NOT_FOUND,
            Json(json!({"code": "NotFound", "message": "no Agent"})),
        )
            .into_response(),
    };
    let router = axum::Router::new()
        .route(&format!("/v1/namespaces/{namespace}/agents/helper/events"), get(events))
        .route(&format!("/v1/namespaces/{namespace}/agents/helper/tasks"), post(tasks));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    url
}

/// The status of an Agent for which each command has something to do.
pub fn status() -> Value {
    let mut status = gated(&[GATE]);
    status["loop"]["reasons"] = json!(["ConsecutiveErrors"]);
    status
}

/// What is wrong with the end of a command, which is expected to work or to name one of these permissions.
pub fn mistake(done: &CommandOutput, expected: bool, missing: &[&str]) -> Option<String> {
    let said = format!("{}{}", done.out, done.err);
    let is_refused = said.contains("forbidden") || said.contains("may not");
    let is_named = missing.iter().any(|permission| said.contains(permission));
    let is_right = if expected {
        !is_refused
    } else {
        is_named && done.status != ExitStatus::Success
    };
    (!is_right).then(|| format!("{:?}: {said}", done.status))
}

#[tokio::test]
async fn each_command_works_with_its_roles_and_otherwise_names_the_permission_that_is_missing() {
    let Some(rendered) = render(&[]) else { return };
    let objects = rendered.unwrap();
    let mut wrong = Vec::new();
    for (role, parts) in ROLES {
        let rules = RoleRules::of(&objects, parts);
        let link = controller(rules.authorizer(), "team-a").await;
        for (command, missing, may) in COMMANDS {
            let harness = PluginHarness::with_rules(&link, rules.clone());
            harness.put_agent("helper", &status());
            harness.put_budget("team", &json!({}));
            let done = harness.run(command).await;
            let expected = may.contains(&role);
            wrong.extend(mistake(&done, expected, missing).map(|said| format!("{role}: {command}: {said}")));
            if !expected && !harness.server.take_writes().is_empty() {
                wrong.push(format!("{role}: {command}: something was written"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
