//! Answers to gates over the link, on a real API server with the chart's roles and policies: who may answer, and that only
//! the controller writes the names of others.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use agentloop::api::Agent;
use agentloop::controller::auth::access::ClientAuthorizer;
use agentloop::controller::auth::identity::PodAuthenticator;
use agentloop::controller::delivery_relay::DeliveryRelay;
use agentloop::controller::gates::answers::GateAnswerRecorder;
use agentloop::controller::link_service::ControllerLink;
use agentloop::controller::pod_sessions::PodSessions;
use agentloop::controller::runtime::EventSink;
use agentloop::link::answers::{AnsweredGate, GateAnswerBody, GateAnswerRequest, GateVerdict};
use agentloop::link::events::{ClientRefusal, ClientRefusalCode};
use agentloop::link::server::LinkHandler;
use agentloop::telemetry::metrics::Metrics;
use jiff::Timestamp;
use k8s_openapi::api::admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding};
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::rbac::v1::{ClusterRole, RoleBinding};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use super::approval::{Server, agent, said};
use super::render::{Rendered, render};
use crate::support::agents::{idle_ledger, view};

const ACCOUNT: &str = "system:serviceaccount:agentloop-system:agentloop";
const CONTROLLER_POLICY: &str = "agentloop-controller-agents";
const ANSWERS: &str = "agentloop.dev/answers";
const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// A server with people, who are service accounts here, and the link of a controller with the chart's permissions.
struct Platform {
    server: Server,
    link: ControllerLink,
}

impl Platform {
    async fn start() -> Option<Self> {
        let objects = render(&[])?.unwrap();
        let server = Server::new(&objects).await?;
        let platform = Self {
            link: Self::link(&server).await,
            server,
        };
        platform.install(&objects).await;
        platform.wait_for_policies().await;
        Some(platform)
    }

    /// The link of a controller that knows Agent `watcher`, which has two gates.
    async fn link(server: &Server) -> ControllerLink {
        let agents: Api<Agent> = Api::namespaced(server.admin.clone(), &server.name);
        agents.create(&PostParams::default(), &agent(&json!({}))).await.unwrap();
        let gate = |id: &str, hash: &str| {
            json!({
                "id": id, "kind": "ToolCallNeedsApproval", "tool": "bank__pay", "argumentsHash": hash,
                "openedAt": "2026-11-22T13:05:00Z", "expiresAt": "2026-11-22T14:05:00Z",
            })
        };
        let status = json!({"status": {"gates": [gate("e1-t1c1r1", "aa"), gate("e1-t1c1r2", "bb")]}});
        let (params, status) = (PatchParams::default(), Patch::Merge(status));
        let written = agents.patch_status("watcher", &params, &status).await.unwrap();
        let object = serde_json::to_value(written).unwrap();
        let (loops, _) = PodSessions::new();
        let loops = Arc::new(loops);
        let controller = server.client(ACCOUNT);
        ControllerLink {
            identities: PodAuthenticator::new(server.admin.clone()),
            // Reviews are outside namespaces, where this test binds no role.
            access: ClientAuthorizer::new(server.admin.clone()),
            answers: GateAnswerRecorder::new(controller),
            loops: loops.clone(),
            relay: Arc::new(DeliveryRelay::new(Duration::from_secs(1)).0),
            tasks: Arc::new(agentloop::controller::task_relay::TaskRelay::new(Duration::from_secs(
                5,
            ))),
            agents: Arc::new(OnceLock::from(view(&[object]))),
            budgets: idle_ledger(server.admin.clone(), &loops),
            history: None,
            metrics: Arc::new(Metrics::new().unwrap()),
            events: EventSink::new().0,
            clock: Arc::new(Timestamp::now),
        }
    }

    /// Accounts of people and of a pod, and the controller's permissions and policy, in this namespace alone.
    async fn install(&self, objects: &Rendered) {
        let (server, name) = (&self.server, &self.server.name);
        let mut policy = objects.one("ValidatingAdmissionPolicy", CONTROLLER_POLICY).clone();
        policy["metadata"]["name"] = json!(self.policy());
        let mut binding = objects
            .one("ValidatingAdmissionPolicyBinding", CONTROLLER_POLICY)
            .clone();
        binding["metadata"]["name"] = json!(self.policy());
        binding["spec"]["policyName"] = json!(self.policy());
        binding["spec"]["matchResources"] = json!({
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}},
        });
        server.make::<ValidatingAdmissionPolicy>(&policy).await;
        server.make::<ValidatingAdmissionPolicyBinding>(&binding).await;
        let rules = objects.one("ClusterRole", "agentloop")["rules"].clone();
        let role = json!({"metadata": {"name": self.policy()}, "rules": rules});
        server.make::<ClusterRole>(&role).await;
        let only_approve = json!([{"apiGroups": ["agentloop.dev"], "resources": ["agents"], "verbs": ["approve"]}]);
        let role = json!({"metadata": {"name": format!("{name}-answers")}, "rules": only_approve});
        server.make::<ClusterRole>(&role).await;
        let accounts: Api<ServiceAccount> = Api::namespaced(server.admin.clone(), name);
        for (user, role) in [
            ("ann", "answers"),
            ("bob", "answers"),
            ("edith", "edith"),
            ("agentloop-agent", "answers"),
        ] {
            let account = serde_json::from_value(json!({"metadata": {"name": user}})).unwrap();
            accounts.create(&PostParams::default(), &account).await.unwrap();
            let subject = json!({"kind": "ServiceAccount", "name": user, "namespace": name});
            self.bind(&format!("account-{user}"), &format!("{name}-{role}"), &subject)
                .await;
        }
        let subject = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": ACCOUNT});
        self.bind("controller", &self.policy(), &subject).await;
    }

    async fn bind(&self, name: &str, role: &str, subject: &Value) {
        let binding = json!({
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [subject],
        });
        let bindings: Api<RoleBinding> = Api::namespaced(self.server.admin.clone(), &self.server.name);
        let binding = serde_json::from_value(binding).unwrap();
        bindings.create(&PostParams::default(), &binding).await.unwrap();
    }

    fn policy(&self) -> String {
        format!("{}-controller", self.server.name)
    }

    /// The server takes a moment to know policies and roles; nothing says when it does.
    async fn wait_for_policies(&self) {
        let start = Instant::now();
        loop {
            let label = json!({"metadata": {"labels": {"a": "b"}}});
            let controller = self.changes(ACCOUNT, &label).await;
            let by_editor = self.changes("edith", &answers("edith")).await;
            let by_controller = self.changes(ACCOUNT, &answers("edith")).await;
            if controller.contains("changes nothing of an Agent")
                && by_editor.contains("only the controller")
                && by_controller == "ok"
            {
                return;
            }
            assert!(
                start.elapsed() < Duration::from_mins(1),
                "{controller}; {by_editor}; {by_controller}"
            );
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// What the server says to a change of the Agent by this user. Nothing is changed.
    async fn changes(&self, user: &str, change: &Value) -> String {
        let params = PatchParams {
            dry_run: true,
            ..PatchParams::default()
        };
        let agents: Api<Agent> = Api::namespaced(self.server.client(user), &self.server.name);
        said(agents.patch("watcher", &params, &Patch::Merge(change)).await)
    }

    async fn token(&self, account: &str) -> String {
        let accounts: Api<ServiceAccount> = Api::namespaced(self.server.admin.clone(), &self.server.name);
        let (params, request) = (PostParams::default(), TokenRequest::default());
        let answer = accounts.create_token_request(account, &params, &request).await;
        answer.unwrap().status.unwrap().token
    }

    async fn answers(
        &self,
        account: &str,
        gate: &str,
        answer: GateVerdict,
        hash: &str,
    ) -> Result<AnsweredGate, ClientRefusal> {
        let token = self.token(account).await;
        let request = GateAnswerRequest {
            namespace: self.server.name.clone(),
            name: "watcher".into(),
            gate: gate.into(),
            body: GateAnswerBody {
                answer,
                arguments_hash: hash.into(),
            },
        };
        self.link.answer(&token, HERE, &request).await
    }

    async fn recorded(&self) -> Value {
        let agents: Api<Agent> = Api::namespaced(self.server.admin.clone(), &self.server.name);
        let live = agents.get("watcher").await.unwrap();
        let value = live.annotations().get(ANSWERS);
        value.map_or(Value::Null, |json| serde_json::from_str(json).unwrap())
    }

    async fn end(self) {
        let admin = &self.server.admin;
        let params = DeleteParams::background();
        let roles: Api<ClusterRole> = Api::all(admin.clone());
        for role in [self.policy(), format!("{}-answers", self.server.name)] {
            roles.delete(&role, &params).await.unwrap();
        }
        let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(admin.clone());
        bindings.delete(&self.policy(), &params).await.unwrap();
        let policies: Api<ValidatingAdmissionPolicy> = Api::all(admin.clone());
        policies.delete(&self.policy(), &params).await.unwrap();
        self.server.end().await;
    }
}

/// A change that answers the first gate as this user.
fn answers(by: &str) -> Value {
    let answer = json!({"answer": "Approve", "argumentsHash": "aa", "by": by, "at": "2026-11-22T13:06:00Z"});
    json!({"metadata": {"annotations": {ANSWERS: json!({"e1-t1c1r1": answer}).to_string()}}})
}

#[tokio::test(flavor = "multi_thread")]
async fn gates_are_answered_over_the_link_with_the_verb_and_only_the_controller_writes_the_names() {
    let Some(platform) = Platform::start().await else {
        return;
    };
    let user = |account: &str| format!("system:serviceaccount:{}:{account}", platform.server.name);

    // No other user writes the names of others: neither an editor nor an approver, under any name.
    for (who, by) in [("edith", "edith"), ("edith", "ann"), ("ann", "bob"), ("ann", "ann")] {
        let refused = platform.changes(who, &answers(by)).await;
        assert!(
            refused.contains("only the controller of agentloop sets it"),
            "{who}: {refused}"
        );
    }
    // The controller writes them, and nothing else of an Agent.
    assert_eq!(platform.changes(ACCOUNT, &answers("ann")).await, "ok");
    let nothing_else = "changes nothing of an Agent but its status";
    let own = json!({"agentloop.dev/approve": "e1-t1c1r1:aa", "agentloop.dev/approved-by": ACCOUNT});
    for (change, words) in [
        (
            json!({"metadata": {"annotations": {"agentloop.dev/wake": "1"}}}),
            nothing_else,
        ),
        (json!({"metadata": {"labels": {"team": "b"}}}), nothing_else),
        (json!({"metadata": {"finalizers": ["example.com/stay"]}}), nothing_else),
        (json!({"spec": {"suspend": true}}), nothing_else),
        // It has no verb of its own: two policies refuse these.
        (
            json!({"metadata": {"annotations": own}}),
            "the verb approve on agents.agentloop.dev",
        ),
        (
            json!({"spec": {"tools": {"approval": {"default": "Never"}}}}),
            "the verb approve on agents.agentloop.dev",
        ),
    ] {
        let refused = platform.changes(ACCOUNT, &change).await;
        assert!(
            refused.contains(words) || refused.contains(nothing_else),
            "{change}: {refused}"
        );
    }

    // An editor does not answer, and neither does an Agent's own pod, although it was given the verb.
    for (account, words) in [
        ("edith", "needs the verb approve on agents.agentloop.dev"),
        ("agentloop-agent", "account of pods of Agents or Sensors"),
    ] {
        let refused = platform.answers(account, "e1-t1c1r1", GateVerdict::Approve, "aa").await;
        let refused = refused.unwrap_err();
        assert_eq!(refused.code, ClientRefusalCode::Forbidden);
        assert!(refused.message.contains(words), "{refused}");
    }
    let forged = GateAnswerRequest {
        namespace: platform.server.name.clone(),
        name: "watcher".into(),
        gate: "e1-t1c1r1".into(),
        body: GateAnswerBody {
            answer: GateVerdict::Approve,
            arguments_hash: "aa".into(),
        },
    };
    let refused = platform.link.answer("nonsense", HERE, &forged).await.unwrap_err();
    assert_eq!(refused.code, ClientRefusalCode::Unauthenticated);
    assert_eq!(platform.recorded().await, Value::Null);

    // Two people with the verb and no other right answer two gates at once, and both answers have their names.
    let (first, second) = tokio::join!(
        platform.answers("ann", "e1-t1c1r1", GateVerdict::Approve, "aa"),
        platform.answers("bob", "e1-t1c1r2", GateVerdict::Deny, "bb"),
    );
    assert_eq!(first.unwrap().by, Some(user("ann")));
    assert_eq!(second.unwrap().by, Some(user("bob")));
    let recorded = platform.recorded().await;
    let answer = |gate: &str| (recorded[gate]["answer"].clone(), recorded[gate]["by"].clone());
    assert_eq!(answer("e1-t1c1r1"), (json!("Approve"), json!(user("ann"))));
    assert_eq!(answer("e1-t1c1r2"), (json!("Deny"), json!(user("bob"))));

    // They are in no one's way, and an editor cannot remove them.
    let suspend = json!({"spec": {"suspend": true}});
    assert_eq!(platform.changes("edith", &suspend).await, "ok");
    let removed = json!({"metadata": {"annotations": {ANSWERS: null}}});
    let refused = platform.changes("edith", &removed).await;
    assert!(
        refused.contains("need the verb approve on agents.agentloop.dev"),
        "{refused}"
    );
    assert_eq!(platform.changes("ann", &removed).await, "ok");
    platform.end().await;
}
