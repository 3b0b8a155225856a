//! The ledger against a real API server: what is written before what is answered, who may write, what is counted when.
//!
//! A leader here is a ledger with its watch and its writer. The tests pass Agents to it as the reconciler does, and requests
//! of gateways as the link does.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod http;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use agentloop::api::amount::Amount;
use agentloop::api::{Agent, AgentBudget, NamespacedName, crd};
use agentloop::controller::budget::presenter::BudgetPresenter;
use agentloop::controller::budget::record_writer::RecordConflictError;
use agentloop::controller::budget::{BudgetLedger, LedgerSetup};
use agentloop::controller::pod_sessions::PodSessions;
use agentloop::controller::policy::PlatformPolicy;
use agentloop::controller::runtime::EventSink;
use agentloop::ledger::account::{GrantRequest, LeaseHolder, LeaseStatement};
use agentloop::link::messages::{AccountRequest, AccountResponse, LeaseRequest, LimitName, PodRefusal};
use agentloop::telemetry::metrics::Metrics;
use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::api::admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding};
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::wait::{await_condition, conditions};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Config, ResourceExt};
use pretty_assertions::assert_eq;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::support::clusters::control_plane;

const SOON: Duration = Duration::from_secs(20);

struct BudgetHarness {
    client: Client,
    namespace: String,
}

/// One leader. Dropping it freezes nothing: it ends.
struct Leader {
    budgets: Arc<BudgetLedger>,
    loops: Arc<PodSessions>,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
    task: JoinHandle<Result<(), RecordConflictError>>,
}

impl BudgetHarness {
    async fn start() -> Option<Self> {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let kubeconfig = Kubeconfig::read_from(control_plane()?).unwrap();
        let options = KubeConfigOptions::default();
        let config = Config::from_custom_kubeconfig(kubeconfig, &options).await.unwrap();
        let client = Client::try_from(config).unwrap();
        let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
        for definition in crd::all() {
            let name = definition.name_any();
            let params = PatchParams::apply("agentloop-tests").force();
            let patch = Patch::Apply(&definition);
            definitions.patch(&name, &params, &patch).await.unwrap();
            let established = await_condition(definitions.clone(), &name, conditions::is_crd_established());
            established.await.unwrap();
        }
        let mut object = Namespace::default();
        object.metadata.generate_name = Some("budget-".into());
        let namespaces = Api::<Namespace>::all(client.clone());
        let made = namespaces.create(&PostParams::default(), &object).await.unwrap();
        Some(Self {
            client,
            namespace: made.name_any(),
        })
    }

    async fn end(self) {
        let namespaces = Api::<Namespace>::all(self.client);
        let params = DeleteParams::background();
        namespaces.delete(&self.namespace, &params).await.unwrap();
    }

    fn budgets(&self) -> Api<AgentBudget> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn agents(&self) -> Api<Agent> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Uid of a new budget.
    async fn budget(&self, name: &str, spec: &Value) -> String {
        let object = json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "AgentBudget", "metadata": {"name": name}, "spec": spec,
        });
        let budget = serde_json::from_value(object).unwrap();
        let made = self.budgets().create(&PostParams::default(), &budget).await.unwrap();
        made.uid().unwrap()
    }

    async fn agent(&self, name: &str, labels: &Value, spec: &Value) -> Agent {
        let mut object = json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent", "metadata": {"name": name, "labels": labels},
            "spec": {"instructions": "Be brief.", "model": {
                "api": "Scripted", "name": "small", "scripted": {"configMapKeyRef": {"name": "turns", "key": "turns"}},
            }},
        });
        for (key, value) in spec.as_object().unwrap() {
            object["spec"][key] = value.clone();
        }
        let agent = serde_json::from_value(object).unwrap();
        self.agents().create(&PostParams::default(), &agent).await.unwrap()
    }

    async fn edit_budget(&self, name: &str, spec: &Value) {
        let patch = Patch::Merge(json!({"spec": spec}));
        self.budgets()
            .patch(name, &PatchParams::default(), &patch)
            .await
            .unwrap();
    }

    async fn written(&self, name: &str) -> AgentBudget {
        self.budgets().get(name).await.unwrap()
    }

    async fn leader(&self, agents: &[&Agent]) -> Leader {
        let (loops, changed) = PodSessions::new();
        // No reconciler runs in this test.
        drop(changed);
        let (loops, stop) = (Arc::new(loops), CancellationToken::new());
        let metrics = Arc::new(Metrics::new().unwrap());
        let budgets = Arc::new(BudgetLedger::new(LedgerSetup {
            client: self.client.clone(),
            policy: PlatformPolicy::default(),
            namespace: "agentloop-system".into(),
            watch_namespaces: vec![self.namespace.clone()],
            loops: loops.clone(),
            presentation: Arc::new(BudgetPresenter::new("agentloop-system", EventSink::new().0)),
            metrics: metrics.clone(),
            wall: Timestamp::now(),
        }));
        let present: BTreeSet<NamespacedName> = agents.iter().map(|agent| self.key(&agent.name_any())).collect();
        for agent in agents {
            budgets.agent_seen(agent);
        }
        budgets.agents_listed(Some(&self.namespace), &present);
        let task = tokio::spawn(budgets.clone().run(stop.clone()));
        let leader = Leader {
            budgets,
            loops,
            metrics,
            stop,
            task,
        };
        for agent in agents {
            let key = self.key(&agent.name_any());
            leader
                .until("the terms are decided", || leader.budgets.terms(&key).is_some())
                .await;
        }
        leader
    }

    fn key(&self, agent: &str) -> NamespacedName {
        NamespacedName::new(&self.namespace, agent)
    }

    fn who(&self, agent: &str) -> LeaseHolder {
        LeaseHolder {
            record: format!("{:0<32}", agent.len()),
            agent: NamespacedName::new(&self.namespace, agent),
            pod_uid: format!("pod-of-{agent}"),
            epoch: 1,
        }
    }
}

impl Leader {
    async fn until(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let deadline = Instant::now() + SOON;
        while !holds() {
            assert!(Instant::now() < deadline, "{what}: not in time");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// What a gateway is answered about one account.
    async fn lease(
        &self,
        who: &LeaseHolder,
        account: &str,
        statements: &[LeaseStatement],
        ask: Option<i64>,
    ) -> Result<AccountResponse, PodRefusal> {
        let ask = ask.map(|least| GrantRequest {
            lease: statements
                .iter()
                .filter(|said| !said.closed)
                .map(|said| said.lease)
                .next_back(),
            open: Amount::ZERO,
            least: tokens(least),
            full: tokens(least.max(100)),
        });
        let request = LeaseRequest {
            epoch: who.epoch,
            record: who.record.clone(),
            accounts: vec![AccountRequest {
                account: account.into(),
                statements: statements.to_vec(),
                ask,
            }],
        };
        let mut answer = self.budgets.lease(who, &request).await?;
        Ok(answer.accounts.remove(0))
    }

    async fn end(self) {
        self.stop.cancel();
        timeout(SOON, self.task).await.unwrap().unwrap().unwrap();
    }

    fn limit_names(&self, agent: &NamespacedName) -> Vec<LimitName> {
        let terms = self.budgets.terms(agent).unwrap();
        terms.accounts.into_iter().map(|account| account.limit).collect()
    }

    fn obstacle(&self, agent: &NamespacedName) -> String {
        let obstacle = self.budgets.decision(agent).unwrap().obstacle;
        obstacle.map_or_else(String::new, |obstacle| obstacle.reason.as_ref().to_owned())
    }
}

/// Used and reserved.
fn figures(leader: &Leader, account: &str) -> (Amount, Amount) {
    leader.budgets.inspect(|state| {
        let (_, entry) = state.book.entry(account).unwrap();
        (entry.account().used(), entry.account().reserved())
    })
}

fn tokens(tokens: i64) -> Amount {
    Amount { tokens, ..Amount::ZERO }
}

fn said(lease: i64, spent: i64) -> LeaseStatement {
    LeaseStatement {
        lease,
        spent: tokens(spent),
        returned: Amount::ZERO,
        closed: false,
    }
}

fn closing(lease: i64, spent: i64) -> LeaseStatement {
    LeaseStatement {
        closed: true,
        ..said(lease, spent)
    }
}

fn hourly(limit: i64) -> Value {
    json!({"selector": {}, "limits": {"tokens": limit}, "window": {"rolling": {"seconds": 3600}}})
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_was_replaced_cannot_write_grants_nothing_and_ends() {
    let Some(harness) = BudgetHarness::start().await else {
        return;
    };
    let agent = harness.agent("a", &json!({}), &json!({})).await;
    let account = harness.budget("team", &hourly(10_000)).await;
    let old = harness.leader(&[&agent]).await;
    let who = harness.who("a");
    let told = old.lease(&who, &account, &[], Some(100)).await.unwrap();
    let lease = told.leases[0].clone();
    assert!(lease.granted.tokens >= 100, "{told:?}");
    let record = harness.written("team").await.status.unwrap().ledger.unwrap();
    assert_eq!(record.epoch, told.epoch);
    assert_eq!(record.holders[0].amount, lease.granted, "what is told is written");

    // It is frozen here; another leads.
    let new = harness.leader(&[&agent]).await;
    let reserved = figures(&new, &account).1;
    assert_eq!(
        reserved, lease.granted,
        "the holder's amount is out until its gateway speaks"
    );
    let asked = lease.granted.tokens + 500;
    let again = new
        .lease(&who, &account, &[said(lease.lease, 40)], Some(asked))
        .await
        .unwrap();
    assert!(again.leases[0].granted.tokens >= asked + 40, "{again:?}");
    assert!(again.epoch > told.epoch);

    // It continues as if nothing had happened.
    let refused = old.lease(&who, &account, &[said(lease.lease, 40)], Some(9_000)).await;
    let conflict = timeout(SOON, old.task).await.unwrap().unwrap().unwrap_err();
    assert!(refused.is_err(), "{refused:?}");
    assert!(
        conflict.to_string().contains("another leader has written it"),
        "{conflict}"
    );
    let record = harness.written("team").await.status.unwrap().ledger.unwrap();
    assert_eq!(record.epoch, again.epoch, "the old leader's record is nowhere");
    new.end().await;
    harness.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agents_own_limits_are_kept_in_its_status_and_count_across_leaders() {
    let Some(harness) = BudgetHarness::start().await else {
        return;
    };
    let limits = json!({"guardrails": {"tokensPerHour": 1000, "total": {"tokens": 1000}}});
    let agent = harness.agent("a", &json!({}), &limits).await;
    let first = harness.leader(&[&agent]).await;
    let key = harness.key("a");
    assert_eq!(first.limit_names(&key), [LimitName::TokensPerHour, LimitName::Total]);
    let who = harness.who("a");
    let account = format!("{}/total", agent.uid().unwrap());
    let lease = first
        .lease(&who, &account, &[], Some(100))
        .await
        .unwrap()
        .leases
        .remove(0);
    // Twice: the second write finds what the first has made.
    let more = lease.granted.tokens + 100;
    first
        .lease(&who, &account, &[said(lease.lease, 0)], Some(more))
        .await
        .unwrap();
    first.end().await;

    // What the reconciler writes beside it leaves it alone.
    let patch = Patch::Merge(json!({"status": {"observedGeneration": 1}}));
    harness
        .agents()
        .patch_status("a", &PatchParams::default(), &patch)
        .await
        .unwrap();
    let agent = harness.agents().get("a").await.unwrap();
    let ledger = agent.status.clone().unwrap().ledger.unwrap();
    assert_eq!(ledger.total.unwrap().epoch, 2);
    assert_eq!(ledger.tokens_per_hour.unwrap().epoch, 2, "one document, one write");
    let second = harness.leader(&[&agent]).await;
    let reply = second
        .lease(&who, &account, &[closing(lease.lease, 1000)], Some(1))
        .await
        .unwrap();
    let refused = reply.refused.unwrap();
    assert!(
        !refused.never && refused.resets_at.is_none(),
        "a lifetime never has room again: {refused:?}"
    );
    second.end().await;
    harness.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn labels_references_and_deleted_budgets_decide_which_agents_draw_on_a_budget() {
    let Some(harness) = BudgetHarness::start().await else {
        return;
    };
    let team_a =
        json!({"selector": {"matchLabels": {"team": "a"}}, "limits": {"tokens": 1000}, "window": {"lifetime": {}}});
    let account = harness.budget("team-a", &team_a).await;
    harness
        .budget(
            "named",
            &json!({"limits": {"tokens": 1000}, "window": {"lifetime": {}}}),
        )
        .await;
    let mut agent = harness.agent("a", &json!({"team": "a"}), &json!({})).await;
    let leader = harness.leader(&[&agent]).await;
    let (key, who) = (harness.key("a"), harness.who("a"));
    let name = |name: &str| LimitName::Budget(name.into());
    assert_eq!(leader.limit_names(&key), [name("team-a")]);
    let lease = leader
        .lease(&who, &account, &[], Some(100))
        .await
        .unwrap()
        .leases
        .remove(0);

    // A label changed under a lease: what it spends of it is still counted, more it does not get.
    agent.labels_mut().clear();
    leader.budgets.agent_seen(&agent);
    assert_eq!(leader.limit_names(&key), []);
    let reply = leader
        .lease(&who, &account, &[closing(lease.lease, 60)], Some(100))
        .await
        .unwrap();
    assert_eq!((reply.refused, reply.leases), (None, vec![]));
    let used = || figures(&leader, &account).0;
    assert_eq!(used(), tokens(60));

    agent.spec.budget_refs = serde_json::from_value(json!([{"name": "named"}, {"name": "absent"}])).unwrap();
    leader.budgets.agent_seen(&agent);
    assert_eq!(leader.obstacle(&key), "BudgetNotFound");
    let blocked = leader.budgets.terms(&key).unwrap().blocked.unwrap();
    assert!(
        blocked.message.contains("AgentBudget absent does not exist"),
        "{blocked}"
    );
    harness.budget("absent", &team_a).await;
    leader
        .until("the budget is found", || leader.obstacle(&key).is_empty())
        .await;

    // Deleted: who names it makes no call; made again it starts empty.
    harness
        .budgets()
        .delete("named", &DeleteParams::default())
        .await
        .unwrap();
    leader
        .until("the budget is missed", || leader.obstacle(&key) == "BudgetNotFound")
        .await;
    harness
        .budget("named", &json!({"limits": {"tokens": 5}, "window": {"lifetime": {}}}))
        .await;
    leader
        .until("the new one is found", || leader.obstacle(&key).is_empty())
        .await;

    // Deleted: who is merely selected is free of it.
    agent.spec.budget_refs.clear();
    agent.labels_mut().insert("team".into(), "a".into());
    leader.budgets.agent_seen(&agent);
    harness
        .budgets()
        .delete("team-a", &DeleteParams::default())
        .await
        .unwrap();
    harness
        .budgets()
        .delete("absent", &DeleteParams::default())
        .await
        .unwrap();
    leader.until("it is free", || leader.limit_names(&key).is_empty()).await;
    let reply = leader
        .lease(&who, &account, &[said(lease.lease, 60)], None)
        .await
        .unwrap();
    assert_eq!(
        reply.forgotten,
        [lease.lease],
        "all about a deleted budget is accounted for"
    );
    leader.end().await;
    harness.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_amount_held_by_a_lost_gateway_is_spent_and_counted() {
    let Some(harness) = BudgetHarness::start().await else {
        return;
    };
    let agent = harness.agent("a", &json!({}), &json!({})).await;
    let account = harness.budget("team", &hourly(10_000)).await;
    let leader = harness.leader(&[&agent]).await;
    leader.budgets.pods_listed(Some(&harness.namespace), &BTreeSet::new());
    let forfeited = |kind: &str| {
        let text = leader.metrics.text();
        let series = format!("agentloop_ledger_forfeited_{kind}_total ");
        let value = text.lines().find_map(|line| line.strip_prefix(&series)).unwrap();
        value.to_owned()
    };
    assert_eq!((forfeited("tokens"), forfeited("usd")), ("0".into(), "0".into()));
    let lost = harness.who("a");
    let lease = leader
        .lease(&lost, &account, &[], Some(100))
        .await
        .unwrap()
        .leases
        .remove(0);
    leader
        .lease(&lost, &account, &[said(lease.lease, 40)], None)
        .await
        .unwrap();
    // Its pod speaks with another record: the first one's volume is gone.
    let fresh = LeaseHolder {
        record: format!("{:0<32}", "fe"),
        ..lost
    };
    leader.lease(&fresh, &account, &[], Some(100)).await.unwrap();
    let used = || figures(&leader, &account).0;
    leader.until("it is forfeited", || used() == lease.granted).await;
    assert_eq!(forfeited("tokens"), (lease.granted.tokens - 40).to_string());
    leader.end().await;
    harness.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lowered_limit_recalls_leases_and_a_raised_one_notifies_the_refused_agent() {
    let Some(harness) = BudgetHarness::start().await else {
        return;
    };
    let agent = harness.agent("a", &json!({}), &json!({})).await;
    let account = harness.budget("team", &hourly(1000)).await;
    let leader = harness.leader(&[&agent]).await;
    let (key, who) = (harness.key("a"), harness.who("a"));
    let lease = leader
        .lease(&who, &account, &[], Some(400))
        .await
        .unwrap()
        .leases
        .remove(0);
    let terms = || leader.budgets.terms(&key).unwrap().accounts.remove(0);
    assert!(!terms().recall);
    harness.edit_budget("team", &json!({"limits": {"tokens": 300}})).await;
    leader.until("it is recalled", || terms().recall).await;
    assert_eq!(terms().limits.tokens, Some(300));
    let returned = LeaseStatement {
        returned: tokens(lease.granted.tokens - 250),
        ..said(lease.lease, 250)
    };
    let reply = leader.lease(&who, &account, &[returned], Some(100)).await.unwrap();
    assert!(!terms().recall);
    let refused = reply.refused.unwrap();
    assert!(!refused.contended && refused.resets_at.is_some(), "{refused:?}");
    let before = terms().revision;
    harness.edit_budget("team", &json!({"limits": {"tokens": 350}})).await;
    leader.until("room is told", || terms().revision > before).await;
    // A top-up counts once, however often it is seen.
    let top_ups = json!({"topUps": [{"id": "incident", "tokens": 50}]});
    harness.edit_budget("team", &top_ups).await;
    leader
        .until("it is topped up", || terms().limits.tokens == Some(400))
        .await;
    let written = || async {
        harness
            .written("team")
            .await
            .status
            .unwrap()
            .ledger
            .unwrap()
            .top_ups
            .len()
    };
    let deadline = Instant::now() + SOON;
    while written().await == 0 {
        assert!(Instant::now() < deadline, "the top-up is not written");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    leader.end().await;
    let next = harness.leader(&[&agent]).await;
    assert_eq!(next.budgets.terms(&key).unwrap().accounts[0].limits.tokens, Some(400));
    next.end().await;
    harness.end().await;
}

/// Counts the versions of a budget from now on.
async fn count_writes(harness: &BudgetHarness, name: &str) -> (Arc<AtomicUsize>, JoinHandle<()>) {
    let count = Arc::new(AtomicUsize::new(0));
    let (counted, api) = (count.clone(), harness.budgets());
    let first = api.get(name).await.unwrap().resource_version();
    let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let task = tokio::spawn(async move {
        let mut stream = std::pin::pin!(watcher(api, config).applied_objects());
        while let Some(Ok(object)) = stream.next().await {
            if object.resource_version() != first {
                counted.fetch_add(1, Ordering::SeqCst);
            }
        }
    });
    (count, task)
}

/// Waits until the record of a budget has this many spent tokens, and returns its version then.
async fn until_spent(harness: &BudgetHarness, name: &str, tokens: i64) -> Option<String> {
    let deadline = Instant::now() + Duration::from_mins(1);
    loop {
        let written = harness.written(name).await;
        let version = written.resource_version();
        let record = written.status.unwrap().ledger.unwrap();
        let spent: i64 = record.holders.iter().map(|holder| holder.spent.tokens).sum();
        if spent == tokens {
            return version;
        }
        assert!(Instant::now() < deadline, "{spent} of {tokens} tokens are written");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn steady_load_costs_one_write_in_fifteen_seconds_and_rest_none() {
    let Some(harness) = BudgetHarness::start().await else {
        return;
    };
    let mut agents = Vec::new();
    for n in 0..5 {
        agents.push(harness.agent(&"a".repeat(n + 1), &json!({}), &json!({})).await);
    }
    let account = harness.budget("team", &hourly(100_000_000)).await;
    let leader = harness.leader(&agents.iter().collect::<Vec<_>>()).await;
    let mut leases = Vec::new();
    for agent in &agents {
        let who = harness.who(&agent.name_any());
        let lease = leader
            .lease(&who, &account, &[], Some(100_000))
            .await
            .unwrap()
            .leases
            .remove(0);
        leases.push((who, lease, 0));
    }
    let (count, task) = count_writes(&harness, "team").await;
    let start = Instant::now();
    let mut requests = 0;
    while start.elapsed() < Duration::from_secs(31) {
        for (who, lease, spent) in &mut leases {
            *spent += 100;
            // Ahead: no call waits for it.
            leader
                .lease(who, &account, &[said(lease.lease, *spent)], Some(0))
                .await
                .unwrap();
            requests += 1;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let under_load = count.load(Ordering::SeqCst);
    assert!((1..=3).contains(&under_load), "{under_load} writes in 31 s");
    // What was said last is written once more, then nothing is.
    let spent: i64 = leases.iter().map(|(_, _, spent)| *spent).sum();
    let settled = until_spent(&harness, "team", spent).await;
    tokio::time::sleep(Duration::from_secs(17)).await;
    let rested = harness.written("team").await.resource_version();
    assert_eq!(rested, settled, "writes at rest");
    println!("FIGURE status writes of a budget under load: {under_load} in 31 s, {requests} requests of 5 gateways");
    task.abort();
    leader.end().await;
    harness.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_is_answered_within_a_second_with_and_without_a_write() {
    let Some(harness) = BudgetHarness::start().await else {
        return;
    };
    let agent = harness.agent("a", &json!({}), &json!({})).await;
    let account = harness.budget("team", &hourly(1_000_000_000)).await;
    let leader = harness.leader(&[&agent]).await;
    let who = harness.who("a");
    let mut lease = leader
        .lease(&who, &account, &[], Some(1))
        .await
        .unwrap()
        .leases
        .remove(0);
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for _ in 0..100 {
        let start = Instant::now();
        leader.lease(&who, &account, &[], None).await.unwrap();
        without.push(start.elapsed());
        let start = Instant::now();
        // Everything is spent, so that the next call needs a grant.
        let spent = lease.granted.tokens;
        let reply = leader
            .lease(&who, &account, &[said(lease.lease, spent)], Some(100))
            .await
            .unwrap();
        with.push(start.elapsed());
        assert!(reply.leases[0].granted.tokens >= spent + 100);
        lease = reply.leases[0].clone();
    }
    for (what, times) in [("with", &mut with), ("without", &mut without)] {
        times.sort();
        let (p50, p99) = (times[50], times[98]);
        println!("FIGURE lease answered by the leader {what} a write: p50 {p50:?}, p99 {p99:?}");
        assert!(p50 < Duration::from_secs(1), "{what} a write: {p50:?}");
    }
    leader.end().await;
    harness.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_refused_by_a_policy_is_reported_and_written_once_allowed() {
    let Some(harness) = BudgetHarness::start().await else {
        return;
    };
    let agent = harness.agent("a", &json!({}), &json!({})).await;
    let account = harness.budget("team", &hourly(10_000)).await;
    let leader = harness.leader(&[&agent]).await;
    let name = format!("agentloop-test-{}", harness.namespace);
    let policies: Api<ValidatingAdmissionPolicy> = Api::all(harness.client.clone());
    let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(harness.client.clone());
    let policy = json!({
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": harness.namespace}},
                "resourceRules": [{
                    "apiGroups": ["agentloop.dev"], "apiVersions": ["*"], "operations": ["UPDATE"],
                    "resources": ["agentbudgets/status"],
                }],
            },
            "validations": [{
                "expression": "!has(object.status.ledger) || has(oldObject.status) && has(oldObject.status.ledger) && object.status.ledger == oldObject.status.ledger",
                "message": "no ledger is kept here",
            }],
        },
    });
    let binding = json!({"metadata": {"name": name}, "spec": {"policyName": name, "validationActions": ["Deny"]}});
    let params = PostParams::default();
    policies
        .create(&params, &serde_json::from_value(policy).unwrap())
        .await
        .unwrap();
    bindings
        .create(&params, &serde_json::from_value(binding).unwrap())
        .await
        .unwrap();
    let probe = Patch::Merge(json!({"status": {"ledger": {"epoch": 0}}}));
    let dry = PatchParams {
        dry_run: true,
        ..PatchParams::default()
    };
    let deadline = Instant::now() + SOON;
    while harness.budgets().patch_status("team", &dry, &probe).await.is_ok() {
        assert!(Instant::now() < deadline, "the policy is not in force");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }

    let who = harness.who("a");
    leader.lease(&who, &account, &[], Some(100)).await.unwrap_err();
    let ready = async || {
        let status = harness.written("team").await.status.unwrap_or_default();
        let ready = status
            .conditions
            .into_iter()
            .find(|condition| condition.type_ == "Ready");
        ready.map_or_else(Default::default, |ready| (ready.reason, ready.message))
    };
    let reaches = async |reason: &str| {
        let deadline = Instant::now() + Duration::from_secs(40);
        loop {
            let (now, message) = ready().await;
            if now == reason {
                return message;
            }
            assert!(Instant::now() < deadline, "{reason}, but it is {now}: {message}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    assert!(reaches("RecordRefused").await.contains("no ledger is kept here"));
    bindings.delete(&name, &DeleteParams::default()).await.unwrap();
    policies.delete(&name, &DeleteParams::default()).await.unwrap();
    reaches("Accepted").await;
    let told = leader.lease(&who, &account, &[], Some(100)).await.unwrap();
    assert!(told.leases[0].granted.tokens >= 100, "{told:?}");
    leader.end().await;
    harness.end().await;
}
