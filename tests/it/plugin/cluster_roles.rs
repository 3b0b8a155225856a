//! What each command does with each of the chart's roles, as a real API server decides it: the table of `roles`, with
//! service accounts and their tokens, and the controller's reviews of them.
//!
//! Admission policies are not installed: they are tested in `chart/approval`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use agentloop::api::status::AgentStatus;
use agentloop::api::{Agent, AgentBudget};
use agentloop::controller::auth::access::ClientAuthorizer;
use agentloop::plugin::PluginSession;
use agentloop::plugin::api_requests::ServerAddress;
use agentloop::plugin::link::{LinkRoute, UserToken};
use jiff::Timestamp;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::authorization::v1::SelfSubjectAccessReview;
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::config::{AuthInfo, KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::harness;
use super::roles::{COMMANDS, ROLES, RoleRules, controller, mistake, status};
use crate::chart::render::render;
use crate::sensors::on_a_real_server;
use crate::support::clusters::control_plane;

/// Longest time until the server knows a role and its binding.
const SOON: Duration = Duration::from_mins(1);

/// A namespace of a real API server, with its administrator.
struct Place<'a> {
    admin: &'a Client,
    namespace: &'a str,
    /// How the server is reached, without credentials.
    config: Config,
}

impl<'a> Place<'a> {
    async fn new(admin: &'a Client, namespace: &'a str) -> Self {
        let kubeconfig = Kubeconfig::read_from(control_plane().unwrap()).unwrap();
        let options = KubeConfigOptions::default();
        let mut config = Config::from_custom_kubeconfig(kubeconfig, &options).await.unwrap();
        config.auth_info = AuthInfo::default();
        Self {
            admin,
            namespace,
            config,
        }
    }

    fn objects<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.admin.clone(), self.namespace)
    }

    async fn make<K>(&self, object: Value) -> K
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + std::fmt::Debug
            + DeserializeOwned
            + serde::Serialize,
    {
        let object: K = serde_json::from_value(object).unwrap();
        self.objects().create(&PostParams::default(), &object).await.unwrap()
    }

    /// A ServiceAccount with these rules in the namespace; returns how it reaches the server.
    async fn account(&self, name: &str, rules: &[Value]) -> Config {
        self.make::<ServiceAccount>(json!({"metadata": {"name": name}})).await;
        self.make::<Role>(json!({"metadata": {"name": name}, "rules": rules}))
            .await;
        self.make::<RoleBinding>(json!({
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": self.namespace}],
        }))
        .await;
        let request: TokenRequest = serde_json::from_value(json!({"spec": {"audiences": []}})).unwrap();
        let accounts: Api<ServiceAccount> = self.objects();
        let params = PostParams::default();
        let made = accounts.create_token_request(name, &params, &request).await.unwrap();
        let token = made.status.unwrap().token;
        let mut config = self.config.clone();
        config.auth_info = serde_json::from_value(json!({ "token": token })).unwrap();
        config
    }

    /// The session of a user who reaches the server in this way, with a controller at this URL.
    fn session(&self, config: &Config, link: &str) -> PluginSession {
        PluginSession {
            client: Client::try_from(config.clone()).unwrap(),
            impersonated_user: None,
            address: ServerAddress::new(config, Some("test".into())),
            namespace: self.namespace.to_owned(),
            all_namespaces: false,
            format: None,
            controller_namespace: "agentloop-system".into(),
            route: LinkRoute::Direct(link.to_owned()),
            token: UserToken::Kubeconfig(Box::new(config.clone())),
            clock: Arc::new(Timestamp::now),
            export: agentloop::cli::history_of,
            is_terminal: false,
        }
    }

    /// Waits until the server knows the role and the binding of a user.
    async fn until_allowed(&self, config: &Config, rules: &[Value]) {
        let Some(rule) = rules.first() else { return };
        let reviews: Api<SelfSubjectAccessReview> = Api::all(Client::try_from(config.clone()).unwrap());
        let review: SelfSubjectAccessReview = serde_json::from_value(json!({"spec": {"resourceAttributes": {
            "namespace": self.namespace, "verb": rule["verbs"][0], "group": rule["apiGroups"][0],
            "resource": rule["resources"][0], "version": "*",
        }}}))
        .unwrap();
        let start = Instant::now();
        loop {
            let answer = reviews.create(&PostParams::default(), &review).await.unwrap();
            if answer.status.unwrap().allowed {
                return;
            }
            // Nothing says when the server knows it.
            assert!(start.elapsed() < SOON, "the role never holds");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Agent `helper` and AgentBudget `team`, as no command has changed them.
    async fn renew(&self) {
        let (agents, budgets): (Api<Agent>, Api<AgentBudget>) = (self.objects(), self.objects());
        let _ = agents.delete("helper", &DeleteParams::default()).await;
        let _ = budgets.delete("team", &DeleteParams::default()).await;
        let script = json!({"configMapKeyRef": {"name": "turns", "key": "turns"}});
        self.make::<Agent>(json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent", "metadata": {"name": "helper"},
            "spec": {"instructions": "Be brief.", "model": {"api": "Scripted", "name": "small", "scripted": script}},
        }))
        .await;
        // With all that the schema requires.
        let status: AgentStatus = serde_json::from_value(status()).unwrap();
        let patch = Patch::Merge(json!({ "status": status }));
        let params = PatchParams::default();
        agents.patch_status("helper", &params, &patch).await.unwrap();
        self.make::<AgentBudget>(json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "AgentBudget", "metadata": {"name": "team"},
            "spec": {"limits": {"tokens": 1_000}, "window": {"lifetime": {}}},
        }))
        .await;
    }

    /// What of the two objects a command may change.
    async fn specs(&self) -> [Value; 2] {
        let (agents, budgets): (Api<Agent>, Api<AgentBudget>) = (self.objects(), self.objects());
        let agent = agents.get("helper").await.unwrap();
        let budget = budgets.get("team").await.unwrap();
        [
            json!([agent.spec, agent.metadata.annotations]),
            json!([budget.spec, budget.metadata.annotations]),
        ]
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_real_api_server_allows_each_role_the_commands_in_the_table() {
    Box::pin(on_a_real_server(each_role)).await;
}

async fn each_role(admin: &Client, namespace: &str, _: &CancellationToken) {
    let Some(rendered) = render(&[]) else { return };
    let objects = rendered.unwrap();
    let place = Place::new(admin, namespace).await;
    let link = controller(ClientAuthorizer::new(admin.clone()), namespace).await;
    let mut wrong = Vec::new();
    for (role, parts) in ROLES {
        let rules = RoleRules::of(&objects, parts);
        let config = place.account(role, rules.list()).await;
        place.until_allowed(&config, rules.list()).await;
        place.renew().await;
        for (command, missing, may) in COMMANDS {
            let before = place.specs().await;
            let done = harness::run(place.session(&config, &link), command).await;
            let expected = may.contains(&role);
            wrong.extend(mistake(&done, expected, missing).map(|said| format!("{role}: {command}: {said}")));
            let is_changed = place.specs().await != before;
            if !expected && is_changed {
                wrong.push(format!("{role}: {command}: something was written"));
            }
            if is_changed {
                place.renew().await;
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
