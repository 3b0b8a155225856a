//! The admission policy of answers to a budget's question, on a real API server: who may answer, and as whom.

use std::time::{Duration, Instant};

use agentloop::api::{AgentBudget, crd};
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

const SOON: Duration = Duration::from_mins(1);
const APPROVE: &str = "agentloop.dev/approve";
const APPROVED_BY: &str = "agentloop.dev/approved-by";
const DENY: &str = "agentloop.dev/deny";
const NO_VERB: &str = "need the verb approve on agentbudgets.agentloop.dev";

/// A namespace for which the chart's policy holds, with people who may do different things there.
struct Server {
    config: Config,
    admin: Client,
    /// Of the namespace, and of everything outside namespaces.
    name: String,
}

impl Server {
    async fn new(objects: &Rendered) -> Option<Self> {
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
        let mut policy = objects.one("ValidatingAdmissionPolicy", "agentloop-approval").clone();
        policy["metadata"]["name"] = json!(self.name);
        let mut binding = objects
            .one("ValidatingAdmissionPolicyBinding", "agentloop-approval")
            .clone();
        binding["metadata"]["name"] = json!(self.name);
        binding["spec"]["policyName"] = json!(self.name);
        binding["spec"]["matchResources"] = json!({
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": self.name}},
        });
        self.make::<ValidatingAdmissionPolicy>(&policy).await;
        self.make::<ValidatingAdmissionPolicyBinding>(&binding).await;
        let rules = objects.one("ClusterRole", "agentloop-budget-admin")["rules"].clone();
        let mut editor = rules.clone();
        let verbs = editor[0]["verbs"].as_array_mut().unwrap();
        verbs.retain(|verb| verb != "approve");
        let mut of_one = editor.as_array().unwrap().clone();
        of_one.push(json!({
            "apiGroups": ["agentloop.dev"], "resources": ["agentbudgets"], "resourceNames": ["team"], "verbs": ["approve"],
        }));
        for (user, rules) in [("ann", rules), ("edith", editor), ("nora", json!(of_one))] {
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

    async fn make<K>(&self, object: &Value)
    where
        K: kube::Resource<DynamicType = ()> + Clone + std::fmt::Debug + DeserializeOwned + serde::Serialize,
    {
        let object: K = serde_json::from_value(object.clone()).unwrap();
        let api: Api<K> = Api::all(self.admin.clone());
        api.create(&PostParams::default(), &object).await.unwrap();
    }

    /// Budgets as somebody else sees them.
    fn budgets(&self, user: &str) -> Api<AgentBudget> {
        let mut config = self.config.clone();
        let header = (
            HeaderName::from_static("impersonate-user"),
            HeaderValue::from_str(user).unwrap(),
        );
        config.headers.push(header);
        Api::namespaced(Client::try_from(config).unwrap(), &self.name)
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

    async fn end(self) {
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
        bindings.delete(name, &params).await.unwrap();
        let policies: Api<ValidatingAdmissionPolicy> = Api::all(admin.clone());
        policies.delete(name, &params).await.unwrap();
        let namespaces: Api<Namespace> = Api::all(admin.clone());
        namespaces.delete(name, &params).await.unwrap();
    }
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
fn said(result: kube::Result<AgentBudget>) -> String {
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
async fn a_budgets_question_is_answered_by_who_has_the_verb_and_under_the_own_name() {
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

    // An answer that is there is in nobody's way, and stays: an editor neither changes it nor takes it away.
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
    // Who answers after somebody else says so.
    refused(
        server.annotates("nora", "team", &json!({APPROVE: "ask-2:cd"})).await,
        "agentloop.dev/approved-by must be nora",
    );
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
