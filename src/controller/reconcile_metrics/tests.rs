//! Tests of what a leader exports about namespaces, also after another one.

use kube::runtime::reflector;
use kube::runtime::reflector::store::Writer;
use kube::runtime::watcher::Event;
use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use super::*;
use crate::controller::pod_sessions::LivePod;
use crate::controller::runtime::guarded::GuardedObject;
use crate::link::messages::{Directives, LoopTotals, PodReport};
use crate::telemetry::exposition::ExpositionFormat;

/// A replica that leads, and what it exports about namespace `ns`.
struct LeaderHarness {
    metrics: Arc<Metrics>,
    loops: Arc<PodSessions>,
    observer: MetricsObserver,
    store: reflector::Store<GuardedObject<Agent>>,
    writer: Writer<GuardedObject<Agent>>,
}

impl LeaderHarness {
    /// Its caches are not filled yet.
    fn starting() -> Self {
        let (loops, metrics) = (Arc::new(PodSessions::new().0), Arc::new(Metrics::new().unwrap()));
        let observer = MetricsObserver::new(
            metrics.clone(),
            Arc::default(),
            loops.clone(),
            Readiness::waiting("the caches to fill"),
            1,
            PerObject::Disabled,
        );
        let (store, writer) = reflector::store();
        Self {
            metrics,
            loops,
            observer,
            store,
            writer,
        }
    }

    fn ready(&self) {
        self.observer.agents(AgentsView::new(vec![self.store.clone()]));
    }

    /// Its caches are filled with these Agents.
    fn with_agents(names: &[&str]) -> Self {
        let mut leader = Self::starting();
        for name in names {
            leader.see(name, &json!({}));
        }
        leader.ready();
        leader
    }

    fn see(&mut self, name: &str, status: &Value) {
        let agent = agent(name, status);
        self.writer
            .apply_watcher_event(&Event::Apply(GuardedObject(Ok(agent.clone()))));
        self.observer.agent_seen(&agent);
    }

    /// The Agent is gone, also from the cache.
    fn delete(&mut self, name: &str) {
        let gone = agent(name, &json!({}));
        self.writer.apply_watcher_event(&Event::Delete(GuardedObject(Ok(gone))));
        self.observer.agent_deleted(&key(name));
        self.loops.forget(&key(name));
    }

    /// A reconcile finds this pod, or none.
    fn find_pod(&self, name: &str, uid: Option<&str>) {
        let Some(uid) = uid else {
            return self.loops.forget(&key(name));
        };
        let (known, directives) = (LoopTotals::default(), Directives::default());
        self.loops.expect_pod((&key(name), name), pod(uid), known, directives);
    }

    /// A reconcile creates this pod, and the next one finds it.
    fn create_pod(&self, name: &str, uid: &str) {
        self.find_pod(name, None);
        self.loops.pod_created(&key(name), uid);
        self.find_pod(name, Some(uid));
    }

    fn report(&self, name: &str, uid: &str, report: &Value) {
        let mut report: PodReport = serde_json::from_value(report.clone()).unwrap();
        report.epoch = 1;
        let now = jiff::Timestamp::UNIX_EPOCH;
        self.loops.report(&key(name), &pod(uid), report, now).unwrap();
    }

    /// The value of a series `agentloop_namespace_…{namespace="ns"…}`, as a scrape shows it.
    fn read(&self, name: &str, labels: &str) -> Option<String> {
        let mut text = Vec::new();
        let mut sink = |piece: Vec<u8>| {
            text.extend(piece);
            true
        };
        self.metrics.write(ExpositionFormat::Text, &mut sink);
        let text = String::from_utf8(text).unwrap();
        let series = format!("agentloop_namespace_{name}{{namespace=\"ns\"{labels}}} ");
        let mut lines = text.lines();
        lines.find_map(|line| line.strip_prefix(&series).map(str::to_owned))
    }

    fn approved(&self) -> Option<String> {
        self.read("approval_wait_seconds_count", ",decision=\"Approved\"")
    }

    fn refused(&self) -> Option<String> {
        self.read("refused_calls_total", "")
    }
}

fn agent(name: &str, status: &Value) -> Agent {
    let object = json!({
        "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
        "metadata": {"namespace": "ns", "name": name, "uid": name},
        "spec": {"model": {"api": "Scripted", "name": "m"}}, "status": status,
    });
    serde_json::from_value(object).unwrap()
}

fn key(name: &str) -> NamespacedName {
    NamespacedName::new("ns", name)
}

fn pod(uid: &str) -> LivePod {
    LivePod {
        uid: uid.into(),
        epoch: 1,
    }
}

/// What the gateway reports before its worker has.
fn of_gateway() -> Value {
    json!({})
}

/// A worker that started at this second has seen this many approvals.
fn approvals(second: u32, count: u64) -> Value {
    let approved = json!({"buckets": [count], "sumMicroseconds": count * 1_000});
    let start = format!("2026-01-02T03:04:{second:02}Z");
    json!({"loop": {"durations": {"start": start, "approvals": {"approved": approved}}}})
}

fn refusals(count: i64) -> Value {
    json!({"budget": {"refusedCalls": count}})
}

fn calls(count: u64) -> Value {
    json!({"callDurations": [{"model": "m", "counts": {"buckets": [count]}}]})
}

#[test]
fn the_sums_of_namespaces_are_exported_once_all_agents_are_known_and_grow_from_there() {
    let mut leader = LeaderHarness::starting();
    for (name, calls_of) in [("a", 1_000), ("b", 200)] {
        assert_eq!(leader.read("calls_total", ""), None);
        leader.see(name, &json!({"usage": {"calls": calls_of}}));
    }
    assert_eq!(leader.metrics.caches_filled.get(), 0);
    leader.ready();
    assert_eq!(leader.metrics.caches_filled.get(), 1);
    assert_eq!(leader.read("calls_total", "").as_deref(), Some("0"));
    leader.see("a", &json!({"usage": {"calls": 1_001}}));
    leader.see("c", &json!({"usage": {"calls": 30}}));
    assert_eq!(leader.read("calls_total", "").as_deref(), Some("31"));
}

#[test]
fn a_container_that_starts_again_counts_from_0_whatever_deleted_agents_had() {
    let calls = |leader: &LeaderHarness| leader.read("calls_total", "");
    let mut first = LeaderHarness::with_agents(&[]);
    first.see("a", &json!({"usage": {"calls": 500}}));
    first.see("b", &json!({"usage": {"calls": 1}}));
    first.delete("b");
    assert_eq!(calls(&first).as_deref(), Some("501"));
    // 500 would be a reset of the counter, after which all of them are growth.
    let mut second = LeaderHarness::starting();
    second.see("a", &json!({"usage": {"calls": 500}}));
    second.ready();
    assert_eq!(calls(&second).as_deref(), Some("0"));
    second.see("a", &json!({"usage": {"calls": 502}}));
    assert_eq!(calls(&second).as_deref(), Some("2"));
}

#[test]
fn the_durations_of_a_namespace_last_as_long_as_it_has_agents_and_begin_again_at_0() {
    let mut leader = LeaderHarness::with_agents(&["a", "b"]);
    let count = |leader: &LeaderHarness| leader.read("call_duration_seconds_count", ",model=\"m\"");
    leader.create_pod("a", "p1");
    leader.report("a", "p1", &calls(0));
    assert_eq!(count(&leader), None);
    leader.report("a", "p1", &calls(7));
    leader.report("a", "p1", &approvals(1, 3));
    assert_eq!(count(&leader).as_deref(), Some("7"));
    leader.delete("a");
    assert_eq!(count(&leader).as_deref(), Some("7"), "another Agent is there");
    leader.observer.agents_listed(None, &BTreeSet::from([key("b")]));
    assert_eq!(count(&leader).as_deref(), Some("7"));
    leader.find_pod("b", Some("p2"));
    leader.delete("b");
    assert_eq!((count(&leader), leader.approved()), (None, None));
    leader.see("b", &json!({}));
    leader.create_pod("b", "p3");
    leader.report("b", "p3", &calls(2));
    leader.report("b", "p3", &approvals(9, 1));
    assert_eq!(
        (count(&leader).as_deref(), leader.approved().as_deref()),
        (Some("2"), Some("1"))
    );
    leader.observer.agents_listed(Some("ns"), &BTreeSet::new());
    assert_eq!((count(&leader), leader.approved()), (None, None));
}

#[test]
fn a_pod_that_is_still_there_after_the_last_agent_brings_no_durations_back() {
    let mut leader = LeaderHarness::with_agents(&["a"]);
    leader.create_pod("a", "p1");
    leader.report("a", "p1", &approvals(1, 3));
    assert_eq!(leader.approved().as_deref(), Some("3"));
    leader
        .writer
        .apply_watcher_event(&Event::Delete(GuardedObject(Ok(agent("a", &json!({}))))));
    leader.observer.agent_deleted(&key("a"));
    leader.report("a", "p1", &approvals(1, 4));
    assert_eq!(leader.approved(), None);
}

#[test]
fn gates_that_were_answered_without_a_pod_count_with_the_first_report_of_the_next_one() {
    let leader = LeaderHarness::with_agents(&["a"]);
    leader.create_pod("a", "p1");
    leader.report("a", "p1", &of_gateway());
    leader.report("a", "p1", &approvals(1, 2));
    assert_eq!(leader.approved().as_deref(), Some("2"));
    // The node is lost, and somebody approves twice; the next worker reads that before its first report.
    leader.create_pod("a", "p2");
    leader.report("a", "p2", &of_gateway());
    leader.report("a", "p2", &approvals(2, 2));
    assert_eq!(leader.approved().as_deref(), Some("4"));
    // The worker starts again in its pod, and has one more to read.
    leader.report("a", "p2", &approvals(3, 1));
    assert_eq!(leader.approved().as_deref(), Some("5"));
}

#[test]
fn a_change_of_the_leader_counts_no_approval_twice() {
    // The first leader creates the pod, and adds its counts.
    let first = LeaderHarness::with_agents(&["a"]);
    first.create_pod("a", "p1");
    first.report("a", "p1", &approvals(1, 3));
    assert_eq!(first.approved().as_deref(), Some("3"));
    // The next one cannot know that.
    let second = LeaderHarness::with_agents(&["a"]);
    second.find_pod("a", Some("p1"));
    second.report("a", "p1", &approvals(1, 3));
    assert_eq!(second.approved().as_deref(), Some("0"), "there are gates");
    second.report("a", "p1", &approvals(1, 4));
    assert_eq!(second.approved().as_deref(), Some("1"));
    // It changes once more while there is no pod: the third one creates it, so nothing is lost.
    let third = LeaderHarness::with_agents(&["a"]);
    third.create_pod("a", "p2");
    third.report("a", "p2", &of_gateway());
    third.report("a", "p2", &approvals(2, 2));
    assert_eq!(third.approved().as_deref(), Some("2"));
    // And once more before the first report of a pod that the third one has created: undecidable, so it is lost.
    let fourth = LeaderHarness::with_agents(&["a"]);
    fourth.find_pod("a", Some("p2"));
    fourth.report("a", "p2", &approvals(2, 2));
    assert_eq!(fourth.approved().as_deref(), Some("0"));
}

#[test]
fn refused_calls_do_not_jump_at_a_change_of_the_leader_or_of_the_pod() {
    let first = LeaderHarness::with_agents(&["a", "b"]);
    first.create_pod("a", "p1");
    first.find_pod("b", Some("q1"));
    assert_eq!(first.refused().as_deref(), Some("0"));
    first.report("a", "p1", &refusals(0));
    first.report("a", "p1", &refusals(500));
    first.report("b", "q1", &refusals(20));
    assert_eq!(first.refused().as_deref(), Some("500"));

    let mut second = LeaderHarness::with_agents(&["a", "b"]);
    assert_eq!(second.refused().as_deref(), Some("0"));
    second.find_pod("a", Some("p1"));
    second.find_pod("b", Some("q1"));
    second.report("a", "p1", &refusals(501));
    second.report("b", "q1", &refusals(20));
    assert_eq!(
        second.refused().as_deref(),
        Some("0"),
        "nothing that the first one has added"
    );
    second.report("a", "p1", &refusals(503));
    second.report("b", "q1", &refusals(21));
    assert_eq!(second.refused().as_deref(), Some("3"));
    // The next pod has the same record.
    second.create_pod("a", "p2");
    second.see("a", &json!({}));
    assert_eq!(second.refused().as_deref(), Some("3"));
    second.report("a", "p2", &refusals(503));
    assert_eq!(second.refused().as_deref(), Some("3"));
    second.report("a", "p2", &refusals(504));
    assert_eq!(second.refused().as_deref(), Some("4"));
    second.delete("a");
    assert_eq!(second.refused().as_deref(), Some("4"));
    second.delete("b");
    assert_eq!(
        second.refused().as_deref(),
        Some("4"),
        "the sums of an empty namespace are kept"
    );
}
