//! How long a gateway waits for a lease: `cargo bench --bench lease`, part of `make bench`.
//!
//! The whole way of `POST /v1/lease`: the gateway's client, TLS, a token that the API server has reviewed, the ledger
//! and, where something new is granted, the write of its record before the answer. Needs an API server
//! (`AGENTLOOP_TEST_KUBECONFIG`), whose etcd decides what a write takes.
#![allow(clippy::expect_used, reason = "a bench that cannot run ends")]

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use agentloop::api::amount::Amount;
use agentloop::api::{Agent, AgentBudget, LINK_AUDIENCE, NamespacedName, crd};
use agentloop::controller::agent::AgentsView;
use agentloop::controller::auth::access::ClientAuthorizer;
use agentloop::controller::auth::identity::PodAuthenticator;
use agentloop::controller::budget::presenter::BudgetPresenter;
use agentloop::controller::budget::{BudgetLedger, LedgerSetup};
use agentloop::controller::delivery_relay::DeliveryRelay;
use agentloop::controller::gates::answers::GateAnswerRecorder;
use agentloop::controller::link_service::ControllerLink;
use agentloop::controller::pod_sessions::{LivePod, PodSessions};
use agentloop::controller::policy::PlatformPolicy;
use agentloop::controller::runtime::EventSink;
use agentloop::controller::runtime::guarded::GuardedObject;
use agentloop::controller::tls::ca::CertificateAuthority;
use agentloop::controller::tls::certificates::server_config;
use agentloop::ledger::account::{GrantRequest, LeaseStatement};
use agentloop::link::client::LinkClient;
use agentloop::link::messages::{AccountRequest, Directives, LeaseGrant, LeaseRequest, LoopTotals};
use agentloop::link::pod::SERVICE_ACCOUNT;
use agentloop::link::server::{LinkLimits, serve};
use agentloop::telemetry::metrics::Metrics;
use axum_server::tls_rustls::RustlsConfig;
use jiff::Timestamp;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{Namespace, Pod, ServiceAccount};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::reflector;
use kube::runtime::wait::{await_condition, conditions};
use kube::runtime::watcher::Event;
use kube::{Api, Client, Config, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

#[path = "figures.rs"]
mod figures;

use figures::{figures, say};

const ROUNDS: usize = 500;
const WARM: usize = 20;
const EPOCH: i64 = 1;
const NAME: &str = "a";
/// What the gateway asks for, in tokens.
const CALL: i64 = 1_000;

#[tokio::main]
async fn main() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let Some(kubeconfig) = std::env::var_os("AGENTLOOP_TEST_KUBECONFIG") else {
        say("AGENTLOOP_TEST_KUBECONFIG names no API server; `make bench` starts one");
        return;
    };
    let kubeconfig = Kubeconfig::read_from(kubeconfig).expect("the kubeconfig can be read");
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
    let client = Client::try_from(config.expect("the kubeconfig is whole")).expect("a client is made");
    let namespace = namespace(&client).await;
    let gateway = Gateway::new(&client, &namespace).await;

    let mut lease = gateway.ask(&[], true).await.0;
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for round in 0..WARM + ROUNDS {
        let spent = lease.granted;
        let (_, told) = gateway.ask(&[said(&lease, Amount::ZERO)], false).await;
        // All of it is spent, so that the next call needs a grant.
        let (more, granted) = gateway.ask(&[said(&lease, spent)], true).await;
        assert!(
            more.lease != lease.lease || more.granted.tokens > spent.tokens,
            "something is granted"
        );
        lease = more;
        if round >= WARM {
            without.push(told);
            with.push(granted);
        }
    }
    figures("lease_without_a_write", without);
    figures("lease_with_a_write", with);
    let namespaces = Api::<Namespace>::all(client);
    let _ = namespaces.delete(&namespace, &DeleteParams::background()).await;
}

fn said(lease: &LeaseGrant, spent: Amount) -> LeaseStatement {
    LeaseStatement {
        lease: lease.lease,
        spent,
        returned: Amount::ZERO,
        closed: false,
    }
}

/// A gateway with a pod and a token, and the leader that it speaks to.
struct Gateway {
    link: LinkClient,
    account: String,
    _files: TempDir,
}

impl Gateway {
    async fn new(client: &Client, namespace: &str) -> Self {
        let budget: AgentBudget = object(json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "AgentBudget", "metadata": {"name": "team"},
            "spec": {"selector": {}, "limits": {"tokens": 1_000_000_000_000_i64}, "window": {"rolling": {"seconds": 3600}}},
        }));
        let agent: Agent = object(json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent", "metadata": {"name": NAME},
            "spec": {"instructions": "Be brief.", "model": {
                "api": "Scripted", "name": "small", "scripted": {"configMapKeyRef": {"name": "turns", "key": "turns"}},
            }},
        }));
        let account = create(client, namespace, &budget).await.uid().expect("it has a uid");
        let agent = create(client, namespace, &agent).await;
        let (pod_uid, token) = token(client, namespace).await;

        let key = NamespacedName::new(namespace, NAME);
        let (loops, changed) = PodSessions::new();
        // No reconciler runs in this bench.
        drop(changed);
        let loops = Arc::new(loops);
        let pod = LivePod {
            uid: pod_uid,
            epoch: EPOCH,
        };
        loops.expect_pod((&key, "uid"), pod, LoopTotals::default(), Directives::default());
        let metrics = Arc::new(Metrics::new().expect("metrics are made"));
        let budgets = Arc::new(BudgetLedger::new(LedgerSetup {
            client: client.clone(),
            policy: PlatformPolicy::default(),
            namespace: "agentloop-system".into(),
            watch_namespaces: vec![namespace.into()],
            loops: loops.clone(),
            presentation: Arc::new(BudgetPresenter::new("agentloop-system", EventSink::new().0)),
            metrics: metrics.clone(),
            wall: Timestamp::now(),
        }));
        budgets.agent_seen(&agent);
        budgets.agents_listed(Some(namespace), &BTreeSet::from([key.clone()]));
        tokio::spawn(budgets.clone().run(CancellationToken::new()));
        while budgets.terms(&key).is_none_or(|terms| terms.accounts.is_empty()) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let (store, mut writer) = reflector::store();
        writer.apply_watcher_event(&Event::Apply(GuardedObject(Ok(agent))));
        let link = ControllerLink {
            identities: PodAuthenticator::new(client.clone()),
            access: ClientAuthorizer::new(client.clone()),
            answers: GateAnswerRecorder::new(client.clone()),
            loops,
            agents: Arc::new(OnceLock::from(AgentsView::new(vec![store]))),
            budgets,
            relay: Arc::new(DeliveryRelay::new(Duration::from_secs(1)).0),
            tasks: Arc::new(agentloop::controller::task_relay::TaskRelay::new(Duration::from_secs(
                1,
            ))),
            history: None,
            metrics,
            events: EventSink::new().0,
            clock: Arc::new(Timestamp::now),
        };

        let authority = CertificateAuthority::make(Timestamp::now()).expect("a CA is made");
        let leaf = authority
            .sign(&["127.0.0.1".into()], Timestamp::now())
            .expect("the CA signs");
        let tls = RustlsConfig::from_config(server_config(&leaf).expect("its certificate serves"));
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .expect("loopback can be listened on");
        let url = format!("https://{}", listener.local_addr().expect("it has an address"));
        tokio::spawn(serve(
            listener,
            tls,
            Arc::new(link),
            LinkLimits::default(),
            CancellationToken::new(),
        ));
        let files = TempDir::new().expect("a directory is made");
        let file = |name: &str, text: &str| {
            let path = files.path().join(name);
            std::fs::write(&path, text).expect("a file is written");
            path
        };
        Self {
            link: LinkClient::new(&url, file("ca.crt", &authority.certificate), file("token", &token)),
            account,
            _files: files,
        }
    }

    /// Says this, and asks for room for a call; gives the newest lease, and what the answer took.
    async fn ask(&self, statements: &[LeaseStatement], wants: bool) -> (LeaseGrant, Duration) {
        let call = Amount {
            tokens: CALL,
            ..Amount::ZERO
        };
        let ask = wants.then(|| GrantRequest {
            lease: statements.last().map(|said| said.lease),
            open: Amount::ZERO,
            least: call,
            full: call,
        });
        let request = LeaseRequest {
            epoch: EPOCH,
            record: "0".repeat(32),
            accounts: vec![AccountRequest {
                account: self.account.clone(),
                statements: statements.to_vec(),
                ask,
            }],
        };
        let start = Instant::now();
        let mut answer = self.link.lease(&request).await.expect("the leader answers");
        let taken = start.elapsed();
        let lease = answer.accounts.remove(0).leases.pop().expect("a lease is held");
        (lease, taken)
    }
}

/// A namespace of its own, in a cluster that knows our kinds.
async fn namespace(client: &Client) -> String {
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    for definition in crd::all() {
        let name = definition.name_any();
        let params = PatchParams::apply("agentloop-bench").force();
        let applied = definitions.patch(&name, &params, &Patch::Apply(&definition)).await;
        applied.expect("the definitions are applied");
        let established = await_condition(definitions.clone(), &name, conditions::is_crd_established());
        established.await.expect("the definitions are established");
    }
    let mut object = Namespace::default();
    object.metadata.generate_name = Some("bench-".into());
    let namespaces = Api::<Namespace>::all(client.clone());
    let made = namespaces.create(&PostParams::default(), &object).await;
    made.expect("a namespace is made").name_any()
}

/// The uid of a pod of the Agent, and a token that is bound to it.
async fn token(client: &Client, namespace: &str) -> (String, String) {
    let account: ServiceAccount = object(json!({"metadata": {"name": SERVICE_ACCOUNT}}));
    create(client, namespace, &account).await;
    let pod: Pod = object(json!({"metadata": {"name": NAME}, "spec": {
        "serviceAccountName": SERVICE_ACCOUNT, "automountServiceAccountToken": false,
        "containers": [{"name": "a", "image": "none"}],
    }}));
    let uid = create(client, namespace, &pod).await.uid().expect("it has a uid");
    let request: TokenRequest = object(json!({"metadata": {}, "spec": {
        "audiences": [LINK_AUDIENCE], "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": NAME, "uid": uid},
    }}));
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    let made = accounts
        .create_token_request(SERVICE_ACCOUNT, &PostParams::default(), &request)
        .await;
    let status = made.expect("a token is made").status.expect("it is there");
    (uid, status.token)
}

fn object<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("the object is well written")
}

async fn create<T>(client: &Client, namespace: &str, object: &T) -> T
where
    T: kube::Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>
        + serde::Serialize
        + DeserializeOwned
        + Clone
        + std::fmt::Debug,
{
    let api = Api::<T>::namespaced(client.clone(), namespace);
    let made = api.create(&PostParams::default(), object).await;
    made.expect("the object is made")
}
