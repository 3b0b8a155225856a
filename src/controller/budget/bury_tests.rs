//! Burying through the ledger: who holds what, whose pod is where, and what counts as spent then.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use axum::http::{Request, Response};
use jiff::Timestamp;
use kube::Client;
use kube::client::Body;
use serde_json::json;

use super::book::{DocumentId, DocumentKind};
use super::face::Shown;
use super::{Budgets, Setup};
use crate::api::amount::Amount;
use crate::controller::agent::Sink;
use crate::controller::loops::{AgentKey, Loops};
use crate::controller::policy::Policy;
use crate::ledger::account::{AgentName, Ask, Statement, Who};
use crate::link::messages::{AccountRequest, LeaseRequest};
use crate::telemetry::metrics::Metrics;

const HELD: Amount = Amount {
    tokens: 100,
    ..Amount::ZERO
};

struct World {
    budgets: Budgets,
    metrics: Arc<Metrics>,
}

fn key() -> AgentKey {
    AgentKey {
        namespace: "ns".into(),
        name: "a".into(),
    }
}

fn who(record: &str, pod_uid: &str) -> Who {
    Who {
        record: record.into(),
        agent: AgentName {
            namespace: "ns".into(),
            name: "a".into(),
        },
        pod_uid: pod_uid.into(),
        epoch: 1,
    }
}

impl World {
    /// A ledger that knows a budget, an Agent and, when `listed`, every pod there is; a gateway in pod `pod-1` holds
    /// all that the budget has.
    fn new(ephemeral: bool, listed: bool) -> Self {
        let (loops, _) = Loops::new();
        let nobody = tower::service_fn(|_: Request<Body>| async {
            Err::<Response<Body>, _>(std::io::Error::other("there is no API server"))
        });
        let metrics = Arc::new(Metrics::new().unwrap());
        let budgets = Budgets::new(Setup {
            client: Client::new(nobody, "ns"),
            policy: Policy::default(),
            namespace: "system".into(),
            watch_namespaces: Vec::new(),
            loops: Arc::new(loops),
            face: Arc::new(Shown::new("system", Sink::new().0)),
            metrics: metrics.clone(),
            wall: Timestamp::constant(1_800_000_000, 0),
        });
        let object = |kind: &str, name: &str, spec: serde_json::Value| {
            json!({
                "apiVersion": "agentloop.dev/v1alpha1", "kind": kind,
                "metadata": {"name": name, "namespace": "ns", "uid": name}, "spec": spec,
            })
        };
        let budget = json!({"selector": {}, "limits": {"tokens": 100}, "window": {"lifetime": {}}});
        let agent = json!({
            "instructions": "x", "model": {"api": "Scripted", "name": "m"}, "storage": {"ephemeral": ephemeral},
        });
        budgets.namespaces_listed(Some(BTreeMap::new()));
        budgets.budget_seen(serde_json::from_value(object("AgentBudget", "b", budget)).unwrap());
        budgets.budgets_listed(None, &BTreeSet::from(["b".to_owned()]));
        budgets.agent_seen(&serde_json::from_value(object("Agent", "a", agent)).unwrap());
        budgets.agents_listed(None, &BTreeSet::from([key()]));
        let world = Self { budgets, metrics };
        world.pod("pod-1", "Running");
        if listed {
            world.budgets.pods_listed(None, &BTreeSet::from([key()]));
        }
        world.hold(&who("record", "pod-1"));
        world
    }

    fn pod(&self, uid: &str, phase: &str) {
        let pod = json!({"metadata": {"uid": uid, "name": "a", "namespace": "ns"}, "status": {"phase": phase}});
        self.budgets.pod_seen(&key(), &serde_json::from_value(pod).unwrap());
    }

    /// This gateway asks for everything, and that is written.
    fn hold(&self, who: &Who) {
        let ask = Ask {
            lease: None,
            open: Amount::ZERO,
            least: HELD,
            full: HELD,
        };
        let request = LeaseRequest {
            accounts: vec![AccountRequest {
                account: "b".into(),
                ask: Some(ask),
                ..AccountRequest::default()
            }],
            ..LeaseRequest::default()
        };
        self.budgets
            .change(|book, now| book.request(who, |_| true, &request, now));
        self.write();
        assert_eq!(self.figures(), (0, 100));
    }

    /// What is known is in the budget's record.
    fn write(&self) {
        let document = DocumentId {
            kind: DocumentKind::Budget,
            namespace: "ns".into(),
            name: "b".into(),
            uid: "b".into(),
        };
        self.budgets.change(|book, now| {
            let writes = book.compose(&document, now);
            book.written(&document, &writes, now);
        });
    }

    /// This gateway says what it spent. What the leader knows nothing of any more.
    async fn says(&self, who: &Who, spent: i64) -> Vec<i64> {
        let statement = Statement {
            lease: 1,
            spent: Amount {
                tokens: spent,
                ..Amount::ZERO
            },
            returned: Amount::ZERO,
            closed: false,
        };
        let request = LeaseRequest {
            accounts: vec![AccountRequest {
                account: "b".into(),
                statements: vec![statement],
                ask: None,
            }],
            ..LeaseRequest::default()
        };
        let answer = self.budgets.lease(who, &request).await.unwrap();
        answer.accounts[0].forgotten.clone()
    }

    /// Time goes on, second by second, as the writer's tick does.
    async fn wait(&self, seconds: u64) {
        for _ in 0..seconds {
            tokio::time::advance(Duration::from_secs(1)).await;
            self.budgets.tick();
        }
    }

    /// Tokens used and reserved.
    fn figures(&self) -> (i64, i64) {
        self.budgets.look(|state| {
            let account = state.book.entry("b").unwrap().1.account();
            (account.used().tokens, account.reserved().tokens)
        })
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_pod_held_that_ended_counts_as_spent_and_is_the_gateways_no_more() {
    for phase in ["Failed", "Succeeded"] {
        let world = World::new(true, true);
        world.says(&who("record", "pod-1"), 30).await;
        world.pod("pod-1", phase);
        world.budgets.tick();
        world.wait(9).await;
        assert_eq!(world.figures(), (30, 70), "its end may be a watch that lags behind");
        world.wait(1).await;
        assert_eq!(world.figures(), (100, 0), "{phase}");
        let counted = "agentloop_ledger_buried_total{kind=\"tokens\"} 70";
        let text = world.metrics.text().unwrap();
        assert!(text.lines().any(|line| line == counted), "{text}");
        let late = world.says(&who("record", "pod-1"), 40).await;
        assert_eq!(late, [0; 0], "it is forgotten once that is written");
        world.write();
        assert_eq!(world.says(&who("record", "pod-1"), 40).await, [1]);
        assert_eq!(world.figures(), (100, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_stays_is_waited_for_and_may_come_back() {
    let world = World::new(false, true);
    world.budgets.pod_gone(&key());
    world.budgets.tick();
    world.wait(299).await;
    assert_eq!(world.figures(), (0, 100));
    world.wait(1).await;
    assert_eq!(world.figures(), (100, 0));

    let world = World::new(false, true);
    world.budgets.pod_gone(&key());
    world.wait(200).await;
    world.pod("pod-2", "Running");
    world.says(&who("record", "pod-2"), 20).await;
    world.wait(1_000).await;
    assert_eq!(world.figures(), (20, 80), "the next pod found the record");
}

#[tokio::test(start_paused = true)]
async fn who_lives_is_never_buried_however_long_it_is_silent() {
    for ephemeral in [true, false] {
        let world = World::new(ephemeral, true);
        for phase in ["Pending", "Running", "Unknown"] {
            world.pod("pod-1", phase);
            world.wait(1_000).await;
            assert_eq!(world.figures(), (0, 100), "{phase}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn nobody_is_buried_while_it_is_not_known_which_pods_there_are() {
    let world = World::new(true, false);
    world.budgets.pod_gone(&key());
    world.wait(1_000).await;
    assert_eq!(world.figures(), (0, 100));
    world.budgets.pods_listed(None, &BTreeSet::new());
    world.budgets.tick();
    world.wait(9).await;
    assert_eq!(world.figures(), (0, 100), "the wait begins when it is known");
    world.wait(1).await;
    assert_eq!(world.figures(), (100, 0));
}

#[tokio::test(start_paused = true)]
async fn a_pod_of_another_uid_is_another_pod() {
    let world = World::new(true, true);
    world.pod("pod-2", "Running");
    world.budgets.tick();
    world.wait(10).await;
    assert_eq!(world.figures(), (100, 0), "pod-1 is gone, and its storage with it");

    // On a volume: only once the new pod speaks with another record is the old one lost.
    let world = World::new(false, true);
    world.pod("pod-2", "Running");
    world.wait(100).await;
    assert_eq!(world.figures(), (0, 100));
    world.says(&who("another", "pod-2"), 0).await;
    world.wait(1).await;
    assert_eq!(world.figures(), (100, 0));
}

#[tokio::test(start_paused = true)]
async fn the_gateway_of_an_agent_that_is_gone_is_buried_with_its_volume() {
    let world = World::new(false, true);
    world.budgets.pod_gone(&key());
    world.budgets.agent_gone(&key());
    world.budgets.tick();
    world.wait(9).await;
    assert_eq!(world.figures(), (0, 100));
    world.wait(1).await;
    assert_eq!(world.figures(), (100, 0));
}
