//! The admission policy of answers to a budget's question, on a real API server: who may answer, and as whom.

mod containers;
mod urls;

use std::time::{Duration, Instant};

use agentloop::api::{Agent, AgentBudget, crd};
use axum::http::{HeaderName, HeaderValue};
use k8s_openapi::api::admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding};
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::rbac::v1::{ClusterRole, RoleBinding};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::{conditions, wait::await_condition};
use kube::{Api, Client, Config, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::render::{Rendered, render};
use crate::support::clusters;

/// The policies of the chart that are about approvals.
const POLICIES: [&str; 2] = ["agentloop-approval", "agentloop-tool-rules"];
const SOON: Duration = Duration::from_mins(1);
const APPROVE: &str = "agentloop.dev/approve";
const APPROVED_BY: &str = "agentloop.dev/approved-by";
const DENY: &str = "agentloop.dev/deny";
const NO_VERB: &str = "need the verb approve on agentbudgets.agentloop.dev";

/// A namespace for which the chart's policy holds, with people who may do different things there.
pub(super) struct Server {
    config: Config,
    pub(super) admin: Client,
    /// Of the namespace, and of everything outside namespaces.
    pub(super) name: String,
}

impl Server {
    pub(super) async fn new(objects: &Rendered) -> Option<Self> {
        let kubeconfig = clusters::control_plane()?;
        let _ = rustls::crypto::ring::default_provider().install_default();
        let kubeconfig = Kubeconfig::read_from(kubeconfig).unwrap();
        let options = KubeConfigOptions::default();
        let config = Config::from_custom_kubeconfig(kubeconfig, &options).await.unwrap();
        let admin = Client::try_from(config.clone()).unwrap();
        let definitions: Api<CustomResourceDefinition> = Api::all(admin.clone());
        for definition in crd::all() {
            let (name, params) = (definition.name_any(), PatchParams::apply("agentloop-tests").force());
            let patch = Patch::Apply(&definition);
            definitions.patch(&name, &params, &patch).await.unwrap();
            let established = await_condition(definitions.clone(), &name, conditions::is_crd_established());
            established.await.unwrap();
        }
        let mut namespace = Namespace::default();
        namespace.metadata.generate_name = Some("approval-".into());
        let namespaces = Api::<Namespace>::all(admin.clone());
        let made = namespaces.create(&PostParams::default(), &namespace).await.unwrap();
        let server = Self {
            config,
            admin,
            name: made.name_any(),
        };
        server.install(objects).await;
        Some(server)
    }

    /// The chart's policy, bound to this namespace alone, since other tests use the same server.
    async fn install(&self, objects: &Rendered) {
        for (of_chart, name) in POLICIES.into_iter().zip(self.policies()) {
            let mut policy = objects.one("ValidatingAdmissionPolicy", of_chart).clone();
            policy["metadata"]["name"] = json!(name);
            let mut binding = objects.one("ValidatingAdmissionPolicyBinding", of_chart).clone();
            binding["metadata"]["name"] = json!(name);
            binding["spec"]["policyName"] = json!(name);
            binding["spec"]["matchResources"] = json!({
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": self.name}},
            });
            self.make::<ValidatingAdmissionPolicy>(&policy).await;
            self.make::<ValidatingAdmissionPolicyBinding>(&binding).await;
        }
        let rules = objects.one("ClusterRole", "agentloop-budget-admin")["rules"].clone();
        let mut editor = rules.clone();
        let verbs = editor[0]["verbs"].as_array_mut().unwrap();
        verbs.retain(|verb| verb != "approve");
        let mut of_one = editor.as_array().unwrap().clone();
        of_one.push(json!({
            "apiGroups": ["agentloop.dev"], "resources": ["agentbudgets"], "resourceNames": ["team"], "verbs": ["approve"],
        }));
        // Agents: all of them may edit, and ann may approve.
        let agents = objects.one("ClusterRole", "agentloop-edit")["rules"]
            .as_array()
            .unwrap()
            .clone();
        let approver = objects.one("ClusterRole", "agentloop-approver")["rules"]
            .as_array()
            .unwrap()
            .clone();
        for (user, rules) in [("ann", rules), ("edith", editor), ("nora", json!(of_one))] {
            let mut rules = rules.as_array().unwrap().clone();
            rules.extend(agents.clone());
            rules.extend(approver.iter().filter(|_| user == "ann").cloned());
            let name = format!("{}-{user}", self.name);
            let role = json!({"metadata": {"name": name}, "rules": rules});
            self.make::<ClusterRole>(&role).await;
            let binding = json!({
                "metadata": {"name": name},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
                "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
            });
            let bindings: Api<RoleBinding> = Api::namespaced(self.admin.clone(), &self.name);
            let binding = serde_json::from_value(binding).unwrap();
            bindings.create(&PostParams::default(), &binding).await.unwrap();
        }
    }

    /// Names of the policies here, in the order of [`POLICIES`].
    fn policies(&self) -> [String; 2] {
        [self.name.clone(), format!("{}-tools", self.name)]
    }

    pub(super) async fn make<K>(&self, object: &Value)
    where
        K: kube::Resource<DynamicType = ()> + Clone + std::fmt::Debug + DeserializeOwned + serde::Serialize,
    {
        let object: K = serde_json::from_value(object.clone()).unwrap();
        let api: Api<K> = Api::all(self.admin.clone());
        api.create(&PostParams::default(), &object).await.unwrap();
    }

    /// Budgets as another user sees them.
    fn budgets(&self, user: &str) -> Api<AgentBudget> {
        Api::namespaced(self.client(user), &self.name)
    }

    /// Agents as another user sees them.
    fn agents(&self, user: &str) -> Api<Agent> {
        Api::namespaced(self.client(user), &self.name)
    }

    /// What the server says to this user about an Agent with these tools in the place of those. Nothing is changed.
    async fn replaces(&self, user: &str, before: &Value, tools: &Value) -> String {
        let agents = self.agents("ann");
        let _ = agents.delete("watcher", &DeleteParams::default()).await;
        agents.create(&PostParams::default(), &agent(before)).await.unwrap();
        let params = PatchParams {
            dry_run: true,
            ..PatchParams::default()
        };
        let patch = Patch::Merge(json!({"spec": {"tools": tools}}));
        said(self.agents(user).patch("watcher", &params, &patch).await)
    }

    async fn creates_agent(&self, user: &str, tools: &Value) -> String {
        let params = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        let mut new = agent(tools);
        new.metadata.name = Some("new".into());
        said(self.agents(user).create(&params, &new).await)
    }

    pub(super) fn client(&self, user: &str) -> Client {
        let mut config = self.config.clone();
        let header = (
            HeaderName::from_static("impersonate-user"),
            HeaderValue::from_str(user).unwrap(),
        );
        config.headers.push(header);
        Client::try_from(config).unwrap()
    }

    /// What the server says to annotations that this user sets; `null` takes one away. Nothing is changed.
    async fn annotates(&self, user: &str, budget: &str, annotations: &Value) -> String {
        self.changes(user, budget, &json!({"metadata": {"annotations": annotations}}))
            .await
    }

    async fn changes(&self, user: &str, budget: &str, change: &Value) -> String {
        let params = PatchParams {
            dry_run: true,
            ..PatchParams::default()
        };
        let patch = Patch::Merge(change);
        said(self.budgets(user).patch(budget, &params, &patch).await)
    }

    async fn creates(&self, user: &str, annotations: &Value) -> String {
        let params = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        let made = self.budgets(user).create(&params, &budget("new", annotations)).await;
        said(made)
    }

    pub(super) async fn end(self) {
        let (admin, name) = (&self.admin, &self.name);
        let params = DeleteParams::background();
        for user in ["ann", "edith", "nora"] {
            let role = format!("{name}-{user}");
            Api::<ClusterRole>::all(admin.clone())
                .delete(&role, &params)
                .await
                .unwrap();
        }
        let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(admin.clone());
        let policies: Api<ValidatingAdmissionPolicy> = Api::all(admin.clone());
        for policy in self.policies() {
            bindings.delete(&policy, &params).await.unwrap();
            policies.delete(&policy, &params).await.unwrap();
        }
        let namespaces: Api<Namespace> = Api::all(admin.clone());
        namespaces.delete(name, &params).await.unwrap();
    }
}

pub(super) fn agent(tools: &Value) -> Agent {
    let object = json!({
        "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
        "metadata": {"name": "watcher"},
        "spec": {
            "instructions": "Watch.",
            "model": {"api": "Scripted", "name": "scripted", "scripted": {"configMapKeyRef": {"name": "s", "key": "k"}}},
            "tools": tools,
        },
    });
    serde_json::from_value(object).unwrap()
}

/// One server with these fields.
fn server(fields: Value) -> Value {
    let mut server = json!({"name": "files", "url": "http://files:8000/mcp"});
    let Value::Object(fields) = fields else {
        panic!("{fields}")
    };
    server.as_object_mut().unwrap().extend(fields);
    server
}

/// Tools with this default and this server.
fn tools(default: &str, fields: Value) -> Value {
    json!({"approval": {"default": default}, "servers": [server(fields)]})
}

/// The same with the usual default, and this rule for calls after untrusted content.
fn after(rule: &str, fields: Value) -> Value {
    json!({"approval": {"afterUntrustedContent": rule}, "servers": [server(fields)]})
}

fn budget(name: &str, annotations: &Value) -> AgentBudget {
    let object = json!({
        "apiVersion": "agentloop.dev/v1alpha1", "kind": "AgentBudget",
        "metadata": {"name": name, "annotations": annotations},
        "spec": {"limits": {"tokens": 1000}, "window": {"lifetime": {}}, "onExhausted": "Ask"},
    });
    serde_json::from_value(object).unwrap()
}

/// `ok`, or what the server has against it.
pub(super) fn said<K>(result: kube::Result<K>) -> String {
    match result {
        Ok(_) => "ok".into(),
        Err(kube::Error::Api(status)) => {
            assert_eq!(status.code, 403, "{status:?}");
            status.message.clone()
        }
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gate_of_a_budget_is_answered_with_the_verb_and_under_the_own_name() {
    let Some(objects) = render(&[]) else { return };
    let Some(server) = Server::new(&objects.unwrap()).await else {
        return;
    };
    for name in ["team", "other"] {
        let (budgets, budget) = (server.budgets("edith"), budget(name, &json!({})));
        budgets.create(&PostParams::default(), &budget).await.unwrap();
    }
    let answer = |by: &str| json!({APPROVE: "ask-1:ab", APPROVED_BY: by});
    // The server takes a moment to know the policy and the roles; nothing says when it does.
    let start = Instant::now();
    while server.annotates("edith", "team", &answer("edith")).await == "ok" {
        assert!(start.elapsed() < SOON, "the policy never holds");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let refused = |said: String, why: &str| assert!(said.contains(why), "{why}: {said}");

    // Without the verb: no part of an answer, also not taken away or in a new object; everything else goes.
    for part in [answer("edith"), json!({APPROVED_BY: "edith"}), json!({DENY: "ask-1"})] {
        refused(server.annotates("edith", "team", &part).await, NO_VERB);
        refused(server.creates("edith", &part).await, NO_VERB);
    }
    assert_eq!(server.creates("edith", &json!({"team": "a"})).await, "ok");
    let raise = json!({"spec": {"limits": {"tokens": 2000}}, "metadata": {"annotations": {"note": "b"}}});
    assert_eq!(server.changes("edith", "team", &raise).await, "ok");

    // With it: under the own name and no other.
    assert_eq!(server.annotates("ann", "team", &answer("ann")).await, "ok");
    for part in [answer("bob"), json!({APPROVE: "ask-1:ab"})] {
        refused(
            server.annotates("ann", "team", &part).await,
            "agentloop.dev/approved-by must be ann",
        );
    }
    assert_eq!(server.annotates("ann", "team", &json!({DENY: "ask-1"})).await, "ok");
    assert_eq!(server.creates("ann", &answer("ann")).await, "ok");

    // The verb on one budget is none on another.
    assert_eq!(server.annotates("nora", "team", &answer("nora")).await, "ok");
    refused(server.annotates("nora", "other", &answer("nora")).await, NO_VERB);

    // An answer that is there does no harm, and stays: an editor can neither change nor remove it.
    let patch = Patch::Merge(json!({"metadata": {"annotations": answer("ann")}}));
    let answered = server.budgets("ann");
    answered.patch("team", &PatchParams::default(), &patch).await.unwrap();
    assert_eq!(server.changes("edith", "team", &raise).await, "ok");
    for change in [
        json!({APPROVE: null}),
        json!({APPROVE: "ask-2:cd"}),
        json!({APPROVED_BY: "edith"}),
    ] {
        refused(server.annotates("edith", "team", &change).await, NO_VERB);
    }
    // A user who answers after another one must write their own name.
    refused(
        server.annotates("nora", "team", &json!({APPROVE: "ask-2:cd"})).await,
        "agentloop.dev/approved-by must be nora",
    );
    server.end().await;
}

/// A server of this chart that holds the rules of approval.
async fn with_tool_rules() -> Option<Server> {
    let objects = render(&[])?;
    let server = Server::new(&objects.unwrap()).await?;
    let start = Instant::now();
    while server
        .creates_agent("edith", &json!({"approval": {"default": "Never"}}))
        .await
        == "ok"
    {
        assert!(start.elapsed() < SOON, "the policy never holds");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Some(server)
}

fn asks(approval: &str) -> Value {
    json!({"tools": [{"name": "t", "approval": approval}]})
}

fn repeats(on_unknown: &str) -> Value {
    json!({"tools": [{"name": "t", "onUnknownOutcome": on_unknown}]})
}

fn asks_if(condition: &str) -> Value {
    json!({"tools": [{"name": "t", "approvalCondition": condition}]})
}

fn holds_changes(rule: &str) -> Value {
    json!({"definitionChanges": rule})
}

/// A server with these fields, and one without at this url.
fn and_another(fields: Value, url: &str) -> Value {
    json!({"servers": [server(fields), server(json!({"name": "files2", "url": url}))]})
}

fn effect(effect: &str) -> Value {
    json!({"tools": [{"name": "t", "effect": effect}]})
}

fn elsewhere(mut fields: Value) -> Value {
    fields["url"] = json!("http://other:8000/mcp");
    fields
}

fn trusted(mut fields: Value) -> Value {
    fields["trusted"] = json!(true);
    fields
}

#[tokio::test(flavor = "multi_thread")]
async fn only_an_approver_weakens_the_rules_of_approval() {
    let Some(server) = with_tool_rules().await else { return };
    let (none, by_default) = (|| json!({}), |fields: Value| tools("Destructive", fields));
    // Before, after, and what the message names.
    for (before, after, field) in [
        (tools("Write", none()), by_default(none()), "approval.default"),
        (tools("Always", none()), tools("Never", none()), "approval.default"),
        (after("Write", none()), after("Never", none()), "afterUntrustedContent"),
        (
            after("Write", none()),
            json!({"approval": {"afterUntrustedContent": null}}),
            "afterUntrustedContent",
        ),
        (after("Always", none()), after("Write", none()), "afterUntrustedContent"),
        (after("Write", none()), after("Write", trusted(none())), "trusted"),
        (after("Write", none()), after("Write", asks("Never")), "approval: Never"),
        (after("Write", none()), after("Write", effect("Read")), "lowering"),
        (by_default(none()), by_default(trusted(none())), "trusted"),
        (
            by_default(trusted(none())),
            by_default(trusted(json!({"url": "http://other:8000/mcp"}))),
            "another url or container of a trusted server",
        ),
        (by_default(none()), by_default(asks("Never")), "approval: Never"),
        (by_default(asks("Always")), by_default(none()), "approval: Always"),
        (by_default(asks_if("a")), by_default(none()), "approvalCondition"),
        (by_default(asks_if("a")), by_default(asks_if("b")), "approvalCondition"),
        (
            by_default(asks_if("a")),
            by_default(json!({"name": "files2"})),
            "approvalCondition",
        ),
        (
            by_default(asks("Always")),
            by_default(json!({"name": "files2"})),
            "approval: Always",
        ),
        (tools("Write", none()), tools("Write", effect("Read")), "lowering"),
        (
            by_default(trusted(none())),
            by_default(trusted(effect("Write"))),
            "lowering",
        ),
        (
            by_default(effect("Destructive")),
            by_default(effect("Write")),
            "effect: Destructive",
        ),
        (
            by_default(effect("Destructive")),
            by_default(none()),
            "effect: Destructive",
        ),
        (by_default(asks("Always")), json!({"servers": []}), "approval: Always"),
        (
            by_default(repeats("Ask")),
            by_default(repeats("Retry")),
            "onUnknownOutcome: Ask",
        ),
        (by_default(repeats("Ask")), by_default(none()), "onUnknownOutcome: Ask"),
        (
            by_default(repeats("Ask")),
            by_default(json!({"name": "files2"})),
            "onUnknownOutcome: Ask",
        ),
        (
            by_default(effect("Destructive")),
            json!({"servers": []}),
            "effect: Destructive",
        ),
        (
            tools("Write", asks("Never")),
            tools("Write", elsewhere(asks("Never"))),
            "approval: Never",
        ),
        (
            tools("Write", effect("Read")),
            tools("Write", elsewhere(effect("Read"))),
            "lowering",
        ),
    ] {
        let refused = server.replaces("edith", &before, &after).await;
        assert!(refused.contains(field), "{before} -> {after}: {refused}");
        assert!(
            refused.contains("needs the verb approve on agents.agentloop.dev"),
            "{refused}"
        );
        assert_eq!(
            server.replaces("ann", &before, &after).await,
            "ok",
            "{before} -> {after}"
        );
    }
    for new in [
        json!({"approval": {"default": "Never"}}),
        by_default(asks("Never")),
        tools("Write", trusted(none())),
    ] {
        assert_ne!(server.creates_agent("edith", &new).await, "ok", "{new}");
        assert_eq!(server.creates_agent("ann", &new).await, "ok", "{new}");
    }
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_an_approver_removes_the_rule_for_changed_tools() {
    let Some(server) = with_tool_rules().await else { return };
    let by_default = |fields: Value| tools("Destructive", fields);
    let before = by_default(holds_changes("Ask"));
    for after in [
        by_default(holds_changes("Allow")),
        by_default(json!({})),
        by_default(json!({"name": "files2"})),
        by_default(json!({"name": "files2", "definitionChanges": "Ask"})),
        json!({"servers": []}),
        // A second server at the same address without the rule.
        and_another(holds_changes("Ask"), "http://files:8000/mcp"),
    ] {
        let refused = server.replaces("edith", &before, &after).await;
        assert!(refused.contains("definitionChanges"), "{after}: {refused}");
        assert_eq!(server.replaces("ann", &before, &after).await, "ok", "{after}");
    }
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_editor_strengthens_the_rules_of_approval_and_changes_everything_else() {
    let Some(server) = with_tool_rules().await else { return };
    let (none, by_default) = (|| json!({}), |fields: Value| tools("Destructive", fields));
    for (before, after) in [
        (by_default(none()), tools("Always", none())),
        (by_default(none()), after("Write", none())),
        (after("Write", none()), after("Always", effect("Read"))),
        // The default asks for as much.
        (
            after("Write", none()),
            json!({"approval": {"default": "Write", "afterUntrustedContent": "Never"}}),
        ),
        (after("Write", none()), after("Write", effect("Destructive"))),
        (
            tools("Never", trusted(asks("Never"))),
            tools("Never", trusted(asks("Never"))),
        ),
        (by_default(trusted(asks("Never"))), by_default(none())),
        (by_default(none()), by_default(asks_if("a"))),
        (by_default(asks_if("a")), by_default(asks_if("a"))),
        (by_default(asks_if("a")), by_default(asks("Always"))),
        (by_default(none()), by_default(repeats("Ask"))),
        (by_default(repeats("Retry")), by_default(none())),
        (by_default(repeats("Ask")), tools("Write", repeats("Ask"))),
        // A person decides about each try.
        (by_default(repeats("Ask")), by_default(asks("Always"))),
        (by_default(none()), by_default(holds_changes("Ask"))),
        (by_default(none()), by_default(holds_changes("Allow"))),
        (by_default(holds_changes("Ask")), by_default(holds_changes("Ask"))),
        (
            by_default(holds_changes("Ask")),
            and_another(holds_changes("Ask"), "http://other:8000/mcp"),
        ),
        (
            by_default(holds_changes("Ask")),
            by_default(elsewhere(holds_changes("Ask"))),
        ),
        (by_default(effect("Write")), by_default(effect("Read"))),
        (by_default(effect("Destructive")), by_default(asks("Always"))),
        (
            by_default(none()),
            by_default(json!({"url": "http://other:8000/mcp", "only": ["t"]})),
        ),
    ] {
        assert_eq!(
            server.replaces("edith", &before, &after).await,
            "ok",
            "{before} -> {after}"
        );
    }
    for new in [
        after("Write", effect("Destructive")),
        tools("Always", effect("Read")),
        by_default(effect("Read")),
        by_default(holds_changes("Allow")),
        by_default(holds_changes("Ask")),
        none(),
    ] {
        assert_eq!(server.creates_agent("edith", &new).await, "ok", "{new}");
    }
    // As many servers and tools as there may be in practice are within the cost that the API server allows.
    let many = |trusted: bool, host: &str| {
        let tool = |of: usize| json!({"name": format!("tool{of}"), "effect": "Read", "approvalCondition": "arguments.a", "onUnknownOutcome": "Ask"});
        let rules: Vec<Value> = (0..40).map(tool).collect();
        let server = |of: usize| json!({"name": format!("s{of}"), "url": format!("http://{host}{of}:80/mcp"), "trusted": trusted, "definitionChanges": "Ask", "tools": rules});
        json!({"servers": (0..16).map(server).collect::<Vec<_>>()})
    };
    let many_before = many(false, "s");
    assert_eq!(server.replaces("edith", &many_before, &many(false, "s")).await, "ok");
    // All of them elsewhere, each of which could be at the place of each other one.
    let long = format!("{}s", "long.".repeat(40));
    for host in ["t", &long] {
        let after = many(false, host);
        assert_eq!(server.replaces("edith", &many_before, &after).await, "ok", "{host}");
    }
    // All of them at one place before and after.
    let one_place = many(false, "s/mcp?");
    let mut strengthened = one_place.clone();
    strengthened["approval"] = json!({"default": "Write"});
    assert_eq!(server.replaces("edith", &one_place, &strengthened).await, "ok");
    let refused = server.replaces("edith", &many_before, &many(true, "s")).await;
    assert!(refused.contains("trusted"), "{refused}");
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_to_gates_of_tool_calls_need_the_verb_on_agents() {
    let Some(server) = with_tool_rules().await else { return };
    let agents = server.agents("ann");
    agents.create(&PostParams::default(), &agent(&json!({}))).await.unwrap();
    let annotates = async |user: &str, key: &str| {
        let params = PatchParams {
            dry_run: true,
            ..PatchParams::default()
        };
        let answer = json!({"metadata": {"annotations": {key: "e1-t1c1r1:ab", APPROVED_BY: user}}});
        said(
            server
                .agents(user)
                .patch("watcher", &params, &Patch::Merge(answer))
                .await,
        )
    };
    for key in [APPROVE, DENY] {
        assert_eq!(annotates("ann", key).await, "ok");
        let refused = annotates("edith", key).await;
        assert!(
            refused.contains("need the verb approve on agents.agentloop.dev"),
            "{refused}"
        );
    }
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_finds_nothing_wrong_with_the_policys_expressions() {
    let Some(objects) = render(&[]) else { return };
    let Some(server) = Server::new(&objects.unwrap()).await else {
        return;
    };
    let policies: Api<ValidatingAdmissionPolicy> = Api::all(server.admin.clone());
    let checked = |policy: Option<&ValidatingAdmissionPolicy>| {
        policy
            .and_then(|policy| policy.status.as_ref())
            .is_some_and(|status| status.type_checking.is_some())
    };
    let policy = tokio::time::timeout(SOON, await_condition(policies, &server.name, checked));
    let status = policy.await.unwrap().unwrap().unwrap().status.unwrap();
    let warnings = status.type_checking.unwrap().expression_warnings;
    assert_eq!(warnings.unwrap_or_default(), []);
    server.end().await;
}
