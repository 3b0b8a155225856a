//! What time does, through the ledger: who holds what and which pods exist, what is forfeited then, and which refusals
//! hold a budget.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use axum::http::{Request, Response};
use jiff::Timestamp;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};

use super::accounts::{DocumentId, DocumentKind};
use super::presenter::BudgetPresenter;
use super::{BudgetLedger, LedgerSetup};
use crate::api::NamespacedName;
use crate::api::amount::Amount;
use crate::api::price::ModelPrice;
use crate::controller::pod_sessions::PodSessions;
use crate::controller::policy::PlatformPolicy;
use crate::controller::runtime::EventSink;
use crate::ledger::account::{GrantRequest, LeaseHolder, LeaseStatement};
use crate::link::messages::{AccountRequest, LeaseRequest, PricedModel};
use crate::telemetry::metrics::Metrics;

const HELD: Amount = Amount {
    tokens: 100,
    ..Amount::ZERO
};

struct MaintenanceHarness {
    budgets: BudgetLedger,
    metrics: Arc<Metrics>,
    ephemeral: bool,
}

fn key() -> NamespacedName {
    NamespacedName::new("ns", "a")
}

fn holder(record: &str, pod_uid: &str) -> LeaseHolder {
    LeaseHolder {
        record: record.into(),
        agent: NamespacedName::new("ns", "a"),
        pod_uid: pod_uid.into(),
        epoch: 1,
    }
}

/// A request for this much of account `b`, all of it or nothing.
pub(super) fn asking_for(amount: Amount) -> LeaseRequest {
    let ask = GrantRequest {
        lease: None,
        open: Amount::ZERO,
        least: amount,
        full: amount,
    };
    LeaseRequest {
        accounts: vec![AccountRequest {
            account: "b".into(),
            ask: Some(ask),
            ..AccountRequest::default()
        }],
        ..LeaseRequest::default()
    }
}

impl MaintenanceHarness {
    /// A ledger with a budget, an Agent and, if `listed`, all pods; a gateway in pod `pod-1` holds the whole budget.
    fn new(ephemeral: bool, listed: bool) -> Self {
        let harness = Self::with(ephemeral, &json!({}));
        if listed {
            harness.budgets.pods_listed(None, &BTreeSet::from([key()]));
        }
        harness.hold(&holder("record", "pod-1"));
        harness
    }

    /// No leases are held yet.
    fn with(ephemeral: bool, edits: &Value) -> Self {
        let (loops, _) = PodSessions::new();
        let nobody = tower::service_fn(|_: Request<Body>| async {
            Err::<Response<Body>, _>(std::io::Error::other("there is no API server"))
        });
        let metrics = Arc::new(Metrics::new().unwrap());
        let budgets = BudgetLedger::new(LedgerSetup {
            client: Client::new(nobody, "ns"),
            policy: PlatformPolicy::default(),
            namespace: "system".into(),
            watch_namespaces: Vec::new(),
            loops: Arc::new(loops),
            presentation: Arc::new(BudgetPresenter::new("system", EventSink::new().0)),
            metrics: metrics.clone(),
            wall: Timestamp::constant(1_800_000_000, 0),
        });
        let harness = Self {
            budgets,
            metrics,
            ephemeral,
        };
        harness.budgets.namespaces_listed(Some(BTreeMap::new()));
        harness.budget(edits);
        harness.budgets.budgets_listed(None, &BTreeSet::from(["b".to_owned()]));
        harness.agent(&json!({}));
        harness.budgets.agents_listed(None, &BTreeSet::from([key()]));
        harness.pod("pod-1", "Running");
        harness
    }

    fn object<T: serde::de::DeserializeOwned>(kind: &str, name: &str, mut object: Value, edits: &Value) -> T {
        object["apiVersion"] = json!("agentloop.dev/v1alpha1");
        object["kind"] = json!(kind);
        for (key, value) in [("name", name), ("namespace", "ns"), ("uid", name)] {
            object["metadata"][key] = json!(value);
        }
        for (key, value) in edits.as_object().unwrap() {
            object["spec"][key] = value.clone();
        }
        serde_json::from_value(object).unwrap()
    }

    /// The budget is seen, with 100 tokens for its lifetime except for the edits.
    fn budget(&self, edits: &Value) {
        let spec = json!({"selector": {"matchLabels": {"team": "x"}}, "limits": {"tokens": 100},
            "window": {"lifetime": {}}});
        let budget = Self::object("AgentBudget", "b", json!({"spec": spec}), edits);
        self.budgets.budget_seen(budget);
    }

    /// The Agent is seen, which draws on the budget except for the edits.
    fn agent(&self, edits: &Value) {
        self.agent_in(&json!({"team": "x"}), edits);
    }

    fn agent_in(&self, labels: &Value, edits: &Value) {
        let spec = json!({
            "instructions": "x", "model": {"api": "Scripted", "name": "m"}, "storage": {"ephemeral": self.ephemeral},
        });
        let object = json!({"metadata": {"labels": labels}, "spec": spec});
        self.budgets.agent_seen(&Self::object("Agent", "a", object, edits));
    }

    /// A gateway requests this amount. Returns whether it is refused.
    fn asks(&self, holder: &LeaseHolder, tokens: i64) -> bool {
        let amount = Amount { tokens, ..Amount::ZERO };
        let request = asking_for(amount);
        self.budgets.update_accounts(|book, now| {
            let pending = book.apply_request(holder, |_| true, &request, now);
            book.response(holder, &request, pending).accounts[0].refused.is_some()
        })
    }

    /// Whether calls are cut, as an exhausted budget with `onExhausted: Stop` requires.
    fn stops(&self) -> bool {
        self.budgets.terms(&key()).unwrap().cut
    }

    fn pod(&self, uid: &str, phase: &str) {
        let pod = json!({"metadata": {"uid": uid, "name": "a", "namespace": "ns"}, "status": {"phase": phase}});
        self.budgets.pod_seen(&key(), &serde_json::from_value(pod).unwrap());
    }

    /// This gateway requests everything, and that is written.
    fn hold(&self, holder: &LeaseHolder) {
        let request = asking_for(HELD);
        self.budgets
            .update_accounts(|book, now| book.apply_request(holder, |_| true, &request, now));
        self.write();
        assert_eq!(self.figures(), (0, 100));
    }

    /// The state is in the budget's record.
    fn write(&self) {
        let document = DocumentId {
            kind: DocumentKind::Budget,
            object: NamespacedName::new("ns", "b"),
            uid: "b".into(),
        };
        self.budgets.update_accounts(|book, now| {
            let writes = book.compose(&document, now);
            book.written(&document, &writes, now);
        });
    }

    /// This gateway reports what it spent. Returns the leases that the leader no longer knows.
    async fn says(&self, holder: &LeaseHolder, spent: i64) -> Vec<i64> {
        let statement = LeaseStatement {
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
        let answer = self.budgets.lease(holder, &request).await.unwrap();
        answer.accounts[0].forgotten.clone()
    }

    /// Advances the time second by second, as the writer's tick does.
    async fn wait(&self, seconds: u64) {
        for _ in 0..seconds {
            tokio::time::advance(Duration::from_secs(1)).await;
            self.budgets.tick();
        }
    }

    /// Tokens used and reserved.
    fn figures(&self) -> (i64, i64) {
        self.budgets.inspect(|state| {
            let account = state.book.entry("b").unwrap().1.account();
            (account.used().tokens, account.reserved().tokens)
        })
    }
}

#[tokio::test]
async fn a_pod_receives_the_price_of_the_model_it_calls_whatever_the_spec_names_now() {
    let harness = MaintenanceHarness::new(false, true);
    let dollar = || ModelPrice {
        input_per_million: "1".into(),
        output_per_million: "1".into(),
        ..ModelPrice::default()
    };
    let called = PricedModel {
        name: "old".into(),
        price: Some(dollar()),
    };
    harness.budgets.models_seen(&key(), &[called]);
    let prices = harness.budgets.terms(&key()).unwrap().prices;
    assert_eq!(prices, BTreeMap::from([("old".to_owned(), dollar())]));
}

#[tokio::test]
async fn a_gateway_of_version_1_receives_the_prices_of_the_models_of_the_spec_without_names() {
    let price = |dollars: &str| json!({"inputPerMillion": dollars, "outputPerMillion": dollars});
    let harness = MaintenanceHarness::new(false, true);
    let model = |name: &str, dollars: &str| json!({"api": "Scripted", "name": name, "price": price(dollars)});
    harness.agent(&json!({"model": model("m", "3"), "lightModel": model("l", "1")}));
    let unnamed = || {
        let terms = serde_json::to_value(harness.budgets.terms(&key()).unwrap()).unwrap();
        (terms["price"].clone(), terms["lightPrice"].clone())
    };
    // Version 1 names no models when it attaches.
    harness.budgets.models_seen(&key(), &[]);
    assert_eq!(unnamed(), (price("3"), price("1")));
    harness.agent(&json!({"model": model("m", "4")}));
    assert_eq!(unnamed(), (price("4"), Value::Null), "there is no light model any more");
    let named = PricedModel {
        name: "m".into(),
        price: None,
    };
    harness.budgets.models_seen(&key(), &[named]);
    assert_eq!(unnamed(), (Value::Null, Value::Null), "its pod is of version 2");
}

#[tokio::test(start_paused = true)]
async fn leases_of_an_ended_pod_count_as_spent_and_are_lost_to_its_gateway() {
    for phase in ["Failed", "Succeeded"] {
        let harness = MaintenanceHarness::new(true, true);
        harness.says(&holder("record", "pod-1"), 30).await;
        harness.pod("pod-1", phase);
        harness.budgets.tick();
        harness.wait(9).await;
        assert_eq!(harness.figures(), (30, 70), "the watch may lag behind");
        harness.wait(1).await;
        assert_eq!(harness.figures(), (100, 0), "{phase}");
        let counted = "agentloop_ledger_forfeited_tokens_total 70";
        let text = harness.metrics.text();
        assert!(text.lines().any(|line| line == counted), "{text}");
        let late = harness.says(&holder("record", "pod-1"), 40).await;
        assert_eq!(late, [0; 0], "it is forgotten once its end is written");
        harness.write();
        assert_eq!(harness.says(&holder("record", "pod-1"), 40).await, [1]);
        assert_eq!(harness.figures(), (100, 0));
    }
}

/// The budget has a rolling window of `seconds` seconds.
fn rolling(seconds: u64) -> MaintenanceHarness {
    let harness = MaintenanceHarness::with(false, &json!({"window": {"rolling": {"seconds": seconds}}}));
    harness.budgets.pods_listed(None, &BTreeSet::from([key()]));
    harness.hold(&holder("record", "pod-1"));
    harness
}

/// The run lease, and the longest call of the Agent.
const PARTITIONED: u64 = 60 + 300;

#[tokio::test(start_paused = true)]
async fn a_volume_is_waited_for_as_long_as_the_rolling_window_but_at_most_a_day() {
    const DAY: u64 = 86_400;
    for (window, wait) in [(60, PARTITIONED), (3_600, 3_600), (DAY, DAY), (30 * DAY, DAY)] {
        let harness = rolling(window);
        harness.budgets.pod_gone(&key());
        harness.budgets.tick();
        harness.wait(wait - 1).await;
        assert_eq!(
            harness.figures(),
            (0, 100),
            "window of {window} s, one second before the end of the wait"
        );
        harness.wait(1).await;
        assert_eq!(
            harness.figures(),
            (100, 0),
            "window of {window} s, at the end of the wait"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_returns_within_the_wait_reports_the_exact_amount() {
    let harness = rolling(3_600);
    harness.budgets.pod_gone(&key());
    harness.budgets.tick();
    harness.wait(3_599).await;
    harness.pod("pod-2", "Running");
    harness.says(&holder("record", "pod-2"), 20).await;
    harness.wait(3_500).await;
    assert_eq!(harness.figures(), (20, 80), "the next pod found the record");
}

#[tokio::test(start_paused = true)]
async fn a_lease_in_a_permanent_window_waits_for_exact_numbers_as_long_as_its_volume_exists() {
    let harness = MaintenanceHarness::new(false, true);
    harness.budgets.pod_gone(&key());
    harness.wait(100_000).await;
    assert_eq!(harness.figures(), (0, 100), "spent or not, there is no room");
    harness.pod("pod-2", "Running");
    harness.says(&holder("record", "pod-2"), 20).await;
    assert_eq!(harness.figures(), (20, 80));
}

#[tokio::test(start_paused = true)]
async fn the_lease_of_a_live_pod_is_never_forfeited_however_long_it_is_silent() {
    for ephemeral in [true, false] {
        let harness = MaintenanceHarness::new(ephemeral, true);
        for phase in ["Pending", "Running", "Unknown"] {
            harness.pod("pod-1", phase);
            harness.wait(1_000).await;
            assert_eq!(harness.figures(), (0, 100), "{phase}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn no_lease_is_forfeited_while_the_list_of_pods_is_unknown() {
    let harness = MaintenanceHarness::new(true, false);
    harness.budgets.pod_gone(&key());
    harness.wait(1_000).await;
    assert_eq!(harness.figures(), (0, 100));
    harness.budgets.pods_listed(None, &BTreeSet::new());
    harness.budgets.tick();
    harness.wait(PARTITIONED - 1).await;
    assert_eq!(harness.figures(), (0, 100), "the wait begins when the end is known");
    harness.wait(1).await;
    assert_eq!(harness.figures(), (100, 0));
}

#[tokio::test(start_paused = true)]
async fn a_pod_of_another_uid_is_another_pod() {
    let harness = MaintenanceHarness::new(true, true);
    harness.pod("pod-2", "Running");
    harness.budgets.tick();
    harness.wait(PARTITIONED).await;
    assert_eq!(harness.figures(), (100, 0), "pod-1 and its storage are gone");

    // On a volume: the old gateway is lost only once the new pod uses another record.
    let harness = MaintenanceHarness::new(false, true);
    harness.pod("pod-2", "Running");
    harness.wait(100).await;
    assert_eq!(harness.figures(), (0, 100));
    harness.says(&holder("another", "pod-2"), 0).await;
    harness.wait(PARTITIONED).await;
    assert_eq!(harness.figures(), (100, 0));
}

#[tokio::test(start_paused = true)]
async fn the_lease_of_a_deleted_agent_is_forfeited_with_its_volume() {
    let harness = MaintenanceHarness::new(false, true);
    harness.budgets.pod_gone(&key());
    harness.budgets.agent_gone(&key());
    harness.budgets.tick();
    harness.wait(PARTITIONED - 1).await;
    assert_eq!(harness.figures(), (0, 100));
    harness.wait(1).await;
    assert_eq!(harness.figures(), (100, 0));
}

/// The final statement of a pod: this much was spent, the rest is returned.
fn closing(spent: i64) -> LeaseRequest {
    let tokens = |tokens| Amount { tokens, ..Amount::ZERO };
    LeaseRequest {
        accounts: vec![AccountRequest {
            account: "b".into(),
            statements: vec![LeaseStatement {
                lease: 1,
                spent: tokens(spent),
                returned: tokens(100 - spent),
                closed: true,
            }],
            ask: None,
        }],
        ..LeaseRequest::default()
    }
}

#[tokio::test(start_paused = true)]
async fn a_pod_whose_agent_was_deleted_returns_its_leases() {
    let harness = MaintenanceHarness::new(false, true);
    harness.budgets.agent_gone(&key());
    let first = holder("record", "pod-1");
    let answer = harness.budgets.accept_returns(&first, &closing(30)).unwrap();
    assert_eq!(answer.accounts[0].leases, [], "the lease is closed");
    assert_eq!(harness.figures(), (30, 0));
    harness.budgets.pod_gone(&key());
    harness.wait(10_000).await;
    assert_eq!(harness.figures(), (30, 0), "nothing is left to forfeit");
    harness.write();
    let answer = harness.budgets.accept_returns(&first, &closing(30));
    assert_eq!(answer, None, "it is completely accounted for");
}

#[tokio::test(start_paused = true)]
async fn only_the_pod_that_held_a_lease_can_return_it() {
    let harness = MaintenanceHarness::new(false, true);
    harness.budgets.agent_gone(&key());
    for stranger in [holder("record", "pod-2"), holder("another", "pod-1")] {
        assert_eq!(harness.budgets.accept_returns(&stranger, &closing(0)), None);
    }
    let mut asks = closing(0);
    asks.accounts[0].ask = Some(GrantRequest {
        lease: None,
        open: Amount::ZERO,
        least: HELD,
        full: HELD,
    });
    let first = holder("record", "pod-1");
    assert_eq!(
        harness.budgets.accept_returns(&first, &asks),
        None,
        "nothing is granted to it"
    );
    assert_eq!(harness.figures(), (0, 100));
    // The Agent's next pod holds the lease by now: its volume knows more than statements of the previous pod.
    let harness = MaintenanceHarness::new(false, true);
    harness.pod("pod-2", "Running");
    harness.says(&holder("record", "pod-2"), 20).await;
    assert_eq!(harness.budgets.accept_returns(&first, &closing(0)), None);
    assert_eq!(harness.figures(), (20, 80));
}

/// 90 of 100 are spent; a gateway in `pod-1` was refused 20.
fn refused(on_exhausted: &str) -> MaintenanceHarness {
    let harness = MaintenanceHarness::with(false, &json!({"onExhausted": on_exhausted}));
    harness.budgets.pods_listed(None, &BTreeSet::from([key()]));
    let record = holder("record", "pod-1");
    assert!(!harness.asks(&record, 90));
    harness.write();
    harness
        .budgets
        .update_accounts(|book, now| book.forfeit("b", "record", now));
    harness.write();
    assert!(harness.asks(&record, 20));
    harness
}

fn exhausted(harness: &MaintenanceHarness) -> bool {
    harness
        .budgets
        .inspect(|state| state.book.entry("b").unwrap().1.exhausted(1).is_some())
}

#[tokio::test(start_paused = true)]
async fn a_refused_agent_that_stopped_waiting_exhausts_nothing() {
    type Change = fn(&MaintenanceHarness);
    let changes: [(&str, Change); 5] = [
        ("suspended", |harness| harness.agent(&json!({"suspend": true}))),
        ("relabelled", |harness| {
            harness.agent_in(&json!({"team": "y"}), &json!({}));
        }),
        ("another pod", |harness| harness.pod("pod-2", "Running")),
        ("no pod", |harness| harness.budgets.pod_gone(&key())),
        ("deleted", |harness| harness.budgets.agent_gone(&key())),
    ];
    for (what, change) in changes {
        for on_exhausted in ["Stop", "Pause"] {
            let harness = refused(on_exhausted);
            assert!(exhausted(&harness));
            assert_eq!(harness.stops(), on_exhausted == "Stop");
            harness.wait(5).await;
            assert!(exhausted(&harness), "it still waits");
            change(&harness);
            harness.wait(1).await;
            assert!(!exhausted(&harness), "{what}");
            let blocked = harness
                .budgets
                .inspect(|state| state.book.entry("b").unwrap().1.blocked().len());
            assert_eq!(blocked, 0, "{what}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_does_not_retry_is_dropped_after_twice_its_pause() {
    let harness = refused("Pause");
    harness.wait(29).await;
    assert!(exhausted(&harness));
    harness.asks(&holder("record", "pod-1"), 20);
    harness.wait(29).await;
    assert!(exhausted(&harness), "it requested again");
    harness.wait(1).await;
    assert!(!exhausted(&harness));
    // An Agent that is held by a stop or a gate does not retry.
    let harness = refused("Stop");
    harness.wait(1_000).await;
    assert!(exhausted(&harness) && harness.stops());
}

#[tokio::test(start_paused = true)]
async fn a_life_total_counts_cache_writes_and_what_was_used_while_nothing_limited_it() {
    let harness = MaintenanceHarness::with(false, &json!({}));
    let used = |limit: Option<i64>, usage: i64| {
        let total = limit.map(|tokens| json!({"tokens": tokens}));
        let spec = json!({"instructions": "x", "model": {"api": "Scripted", "name": "m"},
            "guardrails": {"total": total}});
        let status = json!({"usage": {"inputTokens": 1, "cacheWriteTokens": usage, "outputTokens": 2,
            "cacheReadTokens": 500, "costMicroUSD": 7}});
        let agent = json!({"metadata": {}, "spec": spec, "status": status});
        harness
            .budgets
            .agent_seen(&MaintenanceHarness::object("Agent", "a", agent, &json!({})));
        harness.budgets.inspect(|state| {
            let account = state.book.entry("a/total")?.1.account();
            Some((account.used().tokens, account.used().cost))
        })
    };
    assert_eq!(used(None, 10), None, "there is no limit");
    assert_eq!(used(Some(1_000), 10), Some((13, 7)));
    assert_eq!(
        used(Some(1_000), 20),
        Some((13, 7)),
        "the gateway reports what it spent"
    );
    assert_eq!(used(None, 500), Some((13, 7)));
    assert_eq!(used(Some(1_000), 500), Some((503, 7)));
    assert_eq!(used(Some(2_000), 500), Some((503, 7)));
}
