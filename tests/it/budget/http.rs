//! Leases over the real link: HTTPS and tokens before the ledger, a real API server behind it.

use std::path::Path;
use std::sync::OnceLock;

use agentloop::controller::auth::access::ClientAuthorizer;
use agentloop::controller::auth::identity::PodAuthenticator;
use agentloop::controller::delivery_relay::DeliveryRelay;
use agentloop::controller::gates::answers::GateAnswerRecorder;
use agentloop::controller::link_service::ControllerLink;
use agentloop::controller::pod_sessions::LivePod;
use agentloop::controller::runtime::EventSink;
use agentloop::controller::tls::ca::CertificateAuthority;
use agentloop::controller::tls::certificates::server_config;
use agentloop::link::client::{LinkClient, LinkError};
use agentloop::link::messages::{Directives, LoopTotals, RefusalCode};
use agentloop::link::server::{LinkLimits, serve};
use agentloop::telemetry::metrics::Metrics;
use axum_server::tls_rustls::RustlsConfig;
use pretty_assertions::assert_eq;
use tempfile::TempDir;

use super::*;
use crate::link::api_server;
use crate::support::agents::{agent, view};
use crate::support::tokens::token as token_of;

/// Epoch of every pod.
const EPOCH: i64 = 4;

/// The link's server, for the pods of these Agents.
struct Link {
    url: String,
    namespace: String,
    directory: TempDir,
    _stop: tokio_util::sync::DropGuard,
}

impl Link {
    async fn serve(harness: &BudgetHarness, leader: &Leader, agents: &[&str]) -> Self {
        let authority = CertificateAuthority::make(Timestamp::now()).unwrap();
        let leaf = authority.sign(&["127.0.0.1".into()], Timestamp::now()).unwrap();
        let tls = RustlsConfig::from_config(server_config(&leaf).unwrap());
        let directory = TempDir::new().unwrap();
        std::fs::write(directory.path().join("ca.crt"), &authority.certificate).unwrap();
        for name in agents {
            let pod = LivePod {
                uid: format!("pod-of-{name}"),
                epoch: EPOCH,
            };
            let key = harness.key(name);
            leader
                .loops
                .expect_pod((&key, "uid"), pod, LoopTotals::default(), Directives::default());
        }
        let objects: Vec<Value> = agents
            .iter()
            .map(|name| agent(&harness.namespace, name, &json!({})))
            .collect();
        let link = ControllerLink {
            identities: PodAuthenticator::new(api_server(Arc::default())),
            access: ClientAuthorizer::new(api_server(Arc::default())),
            answers: GateAnswerRecorder::new(api_server(Arc::default())),
            loops: leader.loops.clone(),
            relay: Arc::new(DeliveryRelay::new(Duration::from_secs(1)).0),
            tasks: Arc::new(agentloop::controller::task_relay::TaskRelay::new(Duration::from_secs(
                5,
            ))),
            agents: Arc::new(OnceLock::from(view(&objects))),
            budgets: leader.budgets.clone(),
            history: None,
            metrics: Arc::new(Metrics::new().unwrap()),
            events: EventSink::new().0,
            clock: Arc::new(Timestamp::now),
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://{}", listener.local_addr().unwrap());
        let stop = CancellationToken::new();
        tokio::spawn(serve(
            listener,
            tls,
            Arc::new(link),
            LinkLimits::default(),
            stop.clone(),
        ));
        Self {
            url,
            namespace: harness.namespace.clone(),
            directory,
            _stop: stop.drop_guard(),
        }
    }

    /// The gateway of this Agent's pod.
    fn gateway(&self, agent: &str) -> LinkClient {
        let token = format!(
            "agentloop.dev/link {} agentloop-agent {agent} pod-of-{agent}",
            self.namespace
        );
        self.with_token(agent, &token)
    }

    fn with_token(&self, name: &str, token: &str) -> LinkClient {
        let path = |name: &str| Path::join(self.directory.path(), name);
        std::fs::write(path(name), token_of(token)).unwrap();
        LinkClient::new(&self.url, path("ca.crt"), path(name))
    }
}

fn request(who: &LeaseHolder, account: &str, statements: &[LeaseStatement], ask: Option<i64>) -> LeaseRequest {
    let ask = ask.map(|least| GrantRequest {
        lease: None,
        open: Amount::ZERO,
        least: tokens(least),
        full: tokens(least),
    });
    LeaseRequest {
        epoch: EPOCH,
        record: who.record.clone(),
        accounts: vec![AccountRequest {
            account: account.into(),
            statements: statements.to_vec(),
            ask,
        }],
    }
}

fn refusal(answer: Result<agentloop::link::messages::LeaseResponse, LinkError>) -> PodRefusal {
    match answer {
        Err(LinkError::Refused(refusal)) => refusal,
        other => panic!("not refused: {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_is_repeated_and_a_repeated_request_is_counted_once() {
    let Some(harness) = BudgetHarness::start().await else {
        return;
    };
    let agent = harness.agent("a", &json!({}), &json!({})).await;
    let account = harness.budget("team", &hourly(10_000)).await;
    let leader = harness.leader(&[&agent]).await;
    let link = Link::serve(&harness, &leader, &["a"]).await;
    let (gateway, who) = (link.gateway("a"), harness.who("a"));

    let ask = request(&who, &account, &[], Some(100));
    let lost = gateway.lease(&ask).await.unwrap().accounts.remove(0);
    let again = gateway.lease(&ask).await.unwrap().accounts.remove(0);
    assert_eq!(again, lost);
    let lease = again.leases[0].clone();
    assert!(lease.granted.tokens >= 100, "{lease:?}");
    assert_eq!(figures(&leader, &account), (Amount::ZERO, lease.granted));

    // Said twice, and an older word after it.
    for spent in [60, 60, 10] {
        let said = request(&who, &account, &[said(lease.lease, spent)], None);
        gateway.lease(&said).await.unwrap();
        let left = tokens(lease.granted.tokens - 60);
        assert_eq!(figures(&leader, &account), (tokens(60), left));
    }
    let farewell = request(&who, &account, &[closing(lease.lease, 60)], None);
    for _ in 0..2 {
        gateway.lease(&farewell).await.unwrap();
        assert_eq!(figures(&leader, &account), (tokens(60), Amount::ZERO));
    }
    leader.end().await;
    harness.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unauthorized_lease_request_is_refused_and_changes_nothing() {
    let Some(harness) = BudgetHarness::start().await else {
        return;
    };
    let a = harness.agent("a", &json!({}), &json!({})).await;
    let b = harness.agent("bb", &json!({}), &json!({})).await;
    let account = harness.budget("team", &hourly(10_000)).await;
    let leader = harness.leader(&[&a, &b]).await;
    let link = Link::serve(&harness, &leader, &["a", "bb"]).await;
    let (gateway, who) = (link.gateway("a"), harness.who("a"));
    let ask = request(&who, &account, &[], Some(100));
    let lease = gateway.lease(&ask).await.unwrap().accounts.remove(0).leases.remove(0);
    let closing = request(&who, &account, &[closing(lease.lease, 90)], Some(100));

    let refused = refusal(link.with_token("wrong", "nonsense").lease(&closing).await);
    assert_eq!(refused.code, RefusalCode::Unauthenticated);
    for epoch in [EPOCH - 1, EPOCH + 1] {
        let of_another_time = LeaseRequest {
            epoch,
            ..closing.clone()
        };
        assert_eq!(refusal(gateway.lease(&of_another_time).await).code, RefusalCode::Fenced);
    }
    for record in ["", "abc", "not of hexadecimal digits at all"] {
        let nameless = LeaseRequest {
            record: record.into(),
            ..closing.clone()
        };
        let refused = refusal(gateway.lease(&nameless).await);
        assert_eq!(refused.code, RefusalCode::Malformed);
        assert!(refused.message.contains("32 hexadecimal digits"), "{refused}");
    }
    // The pod of another Agent, with the record of the first, as on a copy of its volume.
    let other = link.gateway("bb");
    let refused = refusal(other.lease(&closing).await);
    assert_eq!(refused.code, RefusalCode::Unknown);
    assert!(refused.message.contains("belongs to another Agent"), "{refused}");
    assert_eq!(figures(&leader, &account), (Amount::ZERO, lease.granted));

    // With its own record it knows nothing of that lease, and gets one of its own.
    let own = request(&harness.who("bb"), &account, &closing.accounts[0].statements, Some(100));
    let answer = other.lease(&own).await.unwrap().accounts.remove(0);
    assert_eq!(answer.forgotten, [lease.lease]);
    assert_ne!(answer.leases[0].lease, lease.lease);
    assert_eq!(figures(&leader, &account).0, Amount::ZERO);
    // The first continues.
    gateway.lease(&closing).await.unwrap();
    assert_eq!(figures(&leader, &account).0, tokens(90));
    leader.end().await;
    harness.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_pod_of_a_deleted_agent_returns_its_leases() {
    let Some(harness) = BudgetHarness::start().await else {
        return;
    };
    let agent = harness.agent("a", &json!({}), &json!({})).await;
    let account = harness.budget("team", &hourly(10_000)).await;
    let leader = harness.leader(&[&agent]).await;
    // The link does not know the Agent any more, as after its deletion; its pod still runs.
    let (known, unknown) = (
        Link::serve(&harness, &leader, &["a"]).await,
        Link::serve(&harness, &leader, &[]).await,
    );
    let who = harness.who("a");
    let ask = request(&who, &account, &[], Some(100));
    let answer = known.gateway("a").lease(&ask).await.unwrap().accounts.remove(0);
    let lease = answer.leases[0].clone();
    let (key, gateway) = (harness.key("a"), unknown.gateway("a"));
    leader.budgets.agent_gone(&key);
    leader.loops.forget(&key);

    assert_eq!(refusal(gateway.lease(&ask).await).code, RefusalCode::Unknown);
    let farewell = request(&who, &account, &[closing(lease.lease, 60)], None);
    // Another pod, with the same record.
    let stranger = unknown.with_token(
        "b",
        &format!("agentloop.dev/link {} agentloop-agent a pod-b", unknown.namespace),
    );
    assert_eq!(refusal(stranger.lease(&farewell).await).code, RefusalCode::Unknown);
    assert_eq!(figures(&leader, &account), (Amount::ZERO, lease.granted));
    gateway.lease(&farewell).await.unwrap();
    assert_eq!(figures(&leader, &account), (tokens(60), Amount::ZERO));
    leader.end().await;
    harness.end().await;
}
