//! The plugin as another user: what the API server receives, and what is refused because the controller would receive it
//! from the user of the kubeconfig.

use std::process::Output;
use std::sync::{Arc, Mutex};

use agentloop::plugin::{ExitStatus, PluginSession};
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::HeaderMap;
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use super::harness::{self, NOW, TOKEN};
use super::link::FakeController;
use super::program::{Program, text};

/// What a request has of an impersonation, in the order of the headers' names.
fn impersonated(headers: &HeaderMap) -> Vec<String> {
    let found = headers
        .iter()
        .filter(|(name, _)| name.as_str().starts_with("impersonate-"));
    let mut found: Vec<String> = found
        .map(|(name, value)| format!("{name}: {}", std::str::from_utf8(value.as_bytes()).unwrap()))
        .collect();
    found.sort();
    found
}

/// Method and path of a request with its headers that impersonate.
type NotedRequests = Arc<Mutex<Vec<(String, Vec<String>)>>>;

/// The program with an API server that notes the impersonation of each request, and knows a user by it.
struct Observed {
    program: Program,
    requests: NotedRequests,
}

impl Observed {
    async fn start(user: &Value) -> Self {
        let fake = FakeController::start(Vec::new()).await;
        let requests: Arc<Mutex<Vec<_>>> = Arc::default();
        let seen = Arc::clone(&requests);
        let note = from_fn(move |request: Request, next: Next| {
            let found = impersonated(request.headers());
            let path = request.uri().path().to_owned();
            seen.lock().unwrap().push((path.clone(), found.clone()));
            async move {
                let user = found.iter().find_map(|line| line.strip_prefix("impersonate-user: "));
                let answer = match path.rsplit('/').next() {
                    Some("selfsubjectreviews") => {
                        json!({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview",
                        "metadata": {}, "status": {"userInfo": {"username": user.unwrap_or("ann")}}})
                    }
                    Some("version") => harness::version(),
                    _ => return next.run(request).await,
                };
                Response::new(Body::from(answer.to_string()))
            }
        });
        let router: Router = fake.harness.server.router().layer(note);
        let program = Program::serving(fake, router, user).await;
        Self { program, requests }
    }

    async fn run(&self, line: &str) -> Output {
        let arguments: Vec<&str> = line.split(' ').collect();
        self.program.run("kubectl-agentloop", &arguments, "").await
    }

    /// The requests since the last call of this.
    fn take_requests(&self) -> Vec<(String, Vec<String>)> {
        std::mem::take(&mut self.requests.lock().unwrap())
    }
}

#[tokio::test]
async fn each_request_to_the_api_server_has_the_user_and_the_groups_of_the_flags() {
    let observed = Observed::start(&json!({"token": TOKEN})).await;
    let harness = &observed.program.fake.harness;
    let gate = json!({"id": "g1", "kind": "ToolCallNeedsApproval", "tool": "a", "argumentsHash": "h", "openedAt": NOW});
    harness.put_agent("helper", &json!({"gates": [gate]}));
    harness.put_budget("team", &json!({}));
    let flags = "--as bob --as-group dev --as-group Entwickler,München --as-uid 7";
    let expected = [
        "impersonate-group: Entwickler,München",
        "impersonate-group: dev",
        "impersonate-uid: 7",
        "impersonate-user: bob",
    ];
    for line in [
        "status",
        "status helper",
        "explain helper",
        "approvals",
        "approve helper",
        "pause helper",
        "cost --since 1h",
        "budget top",
        "budget top-up team --tokens 5",
        "check",
        "report --dry-run",
    ] {
        let done = observed.run(&format!("{line} {flags}")).await;
        let requests = observed.take_requests();
        assert!(!requests.is_empty(), "{line}: {}", text(&done.stderr));
        for (path, found) in requests {
            assert_eq!(found, expected, "{line}: {path}");
        }
    }
    let annotations = harness.agent("helper")["metadata"]["annotations"].clone();
    assert_eq!(annotations["agentloop.dev/approved-by"], "bob");
    assert_eq!(harness.agent("helper")["spec"]["suspend"], true);
    observed.run("status").await;
    assert_eq!(observed.take_requests()[0].1, Vec::<String>::new());
}

#[tokio::test]
async fn flags_without_a_user_send_nothing_and_those_of_the_kubeconfig_are_used() {
    let observed = Observed::start(&json!({"token": TOKEN})).await;
    let refused = observed.run("status --as-group dev").await;
    assert_eq!(refused.status.code(), Some(64));
    assert_eq!(
        text(&refused.stderr),
        "error: --as-group and --as-uid are of a user: name one with --as too\n"
    );
    assert!(observed.take_requests().is_empty());

    let observed = Observed::start(&json!({"token": TOKEN, "as": "kate", "as-groups": ["dev"]})).await;
    let done = observed.run("status").await;
    assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
    assert_eq!(
        observed.take_requests()[0].1,
        ["impersonate-group: dev", "impersonate-user: kate"]
    );
    let refused = observed.run("events helper").await;
    assert_eq!(refused.status.code(), Some(64));
    assert!(text(&refused.stderr).contains("kate"), "{}", text(&refused.stderr));
}

#[tokio::test]
async fn what_the_controller_would_receive_from_the_user_of_the_kubeconfig_is_refused() {
    let fake = FakeController::start(Vec::new()).await;
    let session = || PluginSession {
        impersonated_user: Some("bob".into()),
        ..fake.harness.session()
    };
    for line in [
        "logs helper",
        "events helper -f",
        "history helper",
        "cost --by model --since 1h",
        "run helper -p x",
        "chat helper",
    ] {
        let refused = harness::run(session(), line).await;
        assert_eq!(refused.status, ExitStatus::Usage, "{line}");
        assert_eq!(
            refused.err,
            "error: this command cannot impersonate bob (--as, or as in the kubeconfig): it sends the token of the kubeconfig to \
             the controller, which would take the request for one of your own user. Leave out --as, or name a ServiceAccount of \
             namespace team-a with --service-account NAME: bob then requests a token for it, and the controller receives the \
             request from the ServiceAccount\n"
        );
    }
    assert_eq!(fake.controller.lines(), Vec::<String>::new());
}

#[tokio::test]
async fn a_run_is_refused_before_its_prompt_is_read() {
    let observed = Observed::start(&json!({"token": TOKEN})).await;
    let arguments = ["run", "helper", "-p", "-", "--as", "bob"];
    let mut child = observed.program.spawn("kubectl-agentloop", &arguments);
    // Standard input stays open.
    let input = child.stdin.take();
    assert_eq!(child.wait().await.unwrap().code(), Some(64));
    drop(input);
}
