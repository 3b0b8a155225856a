//! The API server in memory, as a user reaches it, and the plugin's commands with captured output.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use agentloop::api::crd;
use agentloop::plugin::api_requests::ServerAddress;
use agentloop::plugin::link::{LinkRoute, UserToken};
use agentloop::plugin::{ExitStatus, PluginArgs, PluginSession, Screen, commands};
use axum::http::{Method, Request, Response};
use clap::FromArgMatches;
use kube::Config;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::roles::RoleRules;
use crate::support::agents::agent;
use crate::support::api_server::ApiServer;

pub const NOW: &str = "2026-11-22T14:00:00Z";
/// When the objects of the server are created.
const CREATED: &str = "2026-11-01T00:00:00Z";
const AGENTS: &str = "agentloop.dev/agents";
const BUDGETS: &str = "agentloop.dev/agentbudgets";
/// Text in each log of a container.
pub const LOG_CANARY: &str = "canary-5e1d";
/// The token of the kubeconfig.
pub const TOKEN: &str = "token-of-ann";

/// What a command printed and returned.
#[derive(Debug)]
pub struct CommandOutput {
    pub status: ExitStatus,
    pub out: String,
    pub err: String,
}

pub struct PluginHarness {
    pub server: ApiServer,
    client: kube::Client,
    /// Annotations that another client sets on Agent `helper` or AgentBudget `team` after the next read of it.
    interference: Arc<Mutex<Option<Value>>>,
    /// What admission says against new Agents.
    refusal: Arc<Mutex<Option<String>>>,
    pub link: String,
}

impl PluginHarness {
    pub fn start() -> Self {
        Self::with_link("http://127.0.0.1:1")
    }

    /// With a controller at this URL.
    pub fn with_link(link: &str) -> Self {
        Self::of(link, None)
    }

    /// The same for a user who has these rules and no others.
    pub fn with_rules(link: &str, rules: RoleRules) -> Self {
        Self::of(link, Some(rules))
    }

    fn of(link: &str, rules: Option<RoleRules>) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let server = ApiServer::new(Arc::new(|| CREATED.parse().unwrap()));
        let (interference, refusal) = (Arc::default(), Arc::default());
        Self {
            client: client(&server, Arc::clone(&interference), Arc::clone(&refusal), rules),
            server,
            interference,
            refusal,
            link: link.to_owned(),
        }
    }

    pub fn put_agent(&self, name: &str, status: &Value) {
        // A merge would keep what an earlier status had.
        if let Some(old) = self.server.get(AGENTS, "team-a", name) {
            let mut cleared = json!({"metadata": {"namespace": "team-a", "name": name}, "status": status});
            for field in old["status"].as_object().into_iter().flatten().map(|(field, _)| field) {
                if status.get(field).is_none() {
                    cleared["status"][field] = Value::Null;
                }
            }
            self.server.put(AGENTS, cleared);
            return;
        }
        self.server.put(AGENTS, agent("team-a", name, status));
    }

    pub fn put_budget(&self, name: &str, status: &Value) {
        let object = json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "AgentBudget",
            "metadata": {"namespace": "team-a", "name": name},
            "spec": {"limits": {"tokens": 1_000}, "window": {"lifetime": {}}}, "status": status,
        });
        self.server.put(BUDGETS, object);
    }

    pub fn agent(&self, name: &str) -> Value {
        self.server.get(AGENTS, "team-a", name).unwrap()
    }

    pub fn budget(&self, name: &str) -> Value {
        self.server.get(BUDGETS, "team-a", name).unwrap()
    }

    pub fn interfere(&self, annotations: Value) {
        *self.interference.lock().unwrap() = Some(annotations);
    }

    /// From now on, admission rejects new Agents.
    pub fn refuse_new_agents(&self, message: &str) {
        *self.refusal.lock().unwrap() = Some(message.to_owned());
    }

    /// The CRDs and the Deployment of the controller.
    pub fn install(&self) {
        for definition in crd::all() {
            let mut object = serde_json::to_value(definition).unwrap();
            object["status"] = json!({"acceptedNames": {"kind": "x", "plural": "x"}, "storedVersions": [],
                "conditions": [{"type": "Established", "status": "True"}]});
            self.server
                .put("apiextensions.k8s.io/customresourcedefinitions", object);
        }
        let deployment = json!({
            "apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": {"namespace": "agentloop-system", "name": "agentloop"},
            "spec": {"replicas": 2, "selector": {}, "template": {}}, "status": {"availableReplicas": 2},
        });
        self.server.put("apps/deployments", deployment);
    }

    /// Runs a command line.
    pub async fn run(&self, line: &str) -> CommandOutput {
        run(self.session(), line).await
    }

    pub fn session(&self) -> PluginSession {
        let mut config = Config::new("http://127.0.0.1:1".parse().unwrap());
        config.auth_info = serde_json::from_value(json!({"token": TOKEN})).unwrap();
        PluginSession {
            client: self.client.clone(),
            impersonated_user: None,
            address: ServerAddress::new(&config, Some("test".into())),
            namespace: "team-a".into(),
            all_namespaces: false,
            format: None,
            controller_namespace: "agentloop-system".into(),
            route: LinkRoute::Direct(self.link.clone()),
            token: UserToken::Kubeconfig(Box::new(config)),
            clock: Arc::new(|| NOW.parse().unwrap()),
            export: agentloop::cli::history_of,
            is_terminal: false,
        }
    }
}

/// Runs a command line, whose flags change the session.
pub async fn run(session: PluginSession, line: &str) -> CommandOutput {
    let arguments = parse(line);
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let mut screen = Screen {
        out: &mut out,
        err: &mut err,
    };
    let session = session.with_flags(&arguments.connection);
    let status = match commands::execute(&session, arguments.command, &mut screen).await {
        Ok(status) => status,
        Err(error) => {
            screen.note(&format!("error: {error}"));
            error.exit_status()
        }
    };
    CommandOutput {
        status,
        out: String::from_utf8(out).unwrap(),
        err: String::from_utf8(err).unwrap(),
    }
}

/// The arguments of a command line; text in quotes is one word.
pub fn parse(line: &str) -> PluginArgs {
    let quoted = line.split('"').enumerate();
    let words = quoted.flat_map(|(index, part)| match index % 2 {
        0 => part.split_whitespace().map(str::to_owned).collect(),
        _ => vec![part.to_owned()],
    });
    let words = std::iter::once("kubectl-agentloop".to_owned()).chain(words);
    let matches = agentloop::plugin::command().try_get_matches_from(words).unwrap();
    PluginArgs::from_arg_matches(&matches).unwrap()
}

/// A client of the API server that has doubles for what the server in memory does not serve.
fn client(
    server: &ApiServer,
    interference: Arc<Mutex<Option<Value>>>,
    refusal: Arc<Mutex<Option<String>>>,
    rules: Option<RoleRules>,
) -> kube::Client {
    let server = server.clone();
    let answer = tower::service_fn(move |request: Request<kube::client::Body>| {
        let (server, interference) = (server.clone(), Arc::clone(&interference));
        let refusal = refusal.lock().unwrap().clone();
        let rules = rules.clone();
        async move {
            let path = request.uri().path().to_owned();
            if let Some(Err(message)) = rules.as_ref().map(|rules| rules.check(request.method(), &path)) {
                return Ok(forbidden(&message));
            }
            let is_read = request.method() == Method::GET;
            let read = [(AGENTS, "/agents/helper"), (BUDGETS, "/agentbudgets/team")];
            let read = read.into_iter().find(|(_, end)| is_read && path.ends_with(end));
            if path.contains("/namespaces/forbidden/") && is_read {
                return Ok(forbidden("ann may not list in forbidden"));
            }
            if request.uri().query().is_some_and(|query| query.contains("dryRun=All")) {
                return Ok(dry_run(request, refusal).await);
            }
            if path.ends_with("/log") {
                return Ok(log(request.uri().query().unwrap_or_default()));
            }
            let double = match path.rsplit('/').next().unwrap() {
                "version" => Some(version()),
                "selfsubjectreviews" => Some(
                    json!({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview",
                    "metadata": {}, "status": {"userInfo": {"username": "ann@example.com"}}}),
                ),
                // Its selector has values, which the server in memory does not know.
                "deployments" => Some(
                    json!({"apiVersion": "apps/v1", "kind": "DeploymentList", "metadata": {},
                    "items": server.list("apps/deployments")}),
                ),
                "selfsubjectaccessreviews" => None,
                _ => {
                    let answer = server.router().oneshot(request.map(axum::body::Body::new)).await;
                    let annotations = interference.lock().unwrap().take_if(|_| read.is_some());
                    if let (Some((kind, end)), Some(annotations)) = (read, annotations) {
                        let name = end.rsplit('/').next();
                        let object =
                            json!({"metadata": {"namespace": "team-a", "name": name, "annotations": annotations}});
                        server.put(kind, object);
                    }
                    return answer;
                }
            };
            let answer = if let Some(answer) = double {
                answer
            } else {
                let body = request.into_body().collect_bytes().await.unwrap();
                let mut review: Value = serde_json::from_slice(&body).unwrap();
                let verb = review["spec"]["resourceAttributes"]["verb"].clone();
                let allowed = rules.map_or(verb != "approve", |rules| rules.review(&review["spec"]));
                review["status"] = json!({"allowed": allowed});
                review
            };
            Ok::<_, Infallible>(Response::new(axum::body::Body::from(answer.to_string())))
        }
    });
    kube::Client::new(answer, "default")
}

fn forbidden(message: &str) -> Response<axum::body::Body> {
    let status = json!({"apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure", "code": 403,
        "reason": "Forbidden", "message": message});
    Response::builder().status(403).body(status.to_string().into()).unwrap()
}

/// The log of a container: a line of a controller, whose number says whether it is of an earlier run, and one of anything.
fn log(query: &str) -> Response<axum::body::Body> {
    let earlier = u8::from(query.contains("previous=true"));
    let line =
        json!({"ts": NOW, "level": "error", "target": "agentloop::controller", "msg": LOG_CANARY, "earlier": earlier});
    Response::new(format!("{line}\nthread panicked at {LOG_CANARY}\n").into())
}

/// The answer to a dry run, which the server in memory would carry out.
async fn dry_run(request: Request<kube::client::Body>, refusal: Option<String>) -> Response<axum::body::Body> {
    let body = request.into_body().collect_bytes().await.unwrap();
    let (code, answer) = match refusal {
        None => (201, String::from_utf8(body.to_vec()).unwrap()),
        Some(message) => {
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message,
                "reason": "Forbidden", "code": 403});
            (403, status.to_string())
        }
    };
    Response::builder().status(code).body(answer.into()).unwrap()
}

pub fn version() -> Value {
    json!({"major": "1", "minor": "33", "gitVersion": "v1.33.0", "gitCommit": "", "gitTreeState": "", "buildDate": "",
        "goVersion": "", "compiler": "", "platform": ""})
}
