//! Tests of the sums of namespaces.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use super::super::exposition::ExpositionFormat;
use super::*;

/// The sums of namespace `a`.
struct TotalsHarness {
    totals: NamespaceTotals,
}

impl Default for TotalsHarness {
    /// There was no Agent when this process began.
    fn default() -> Self {
        let harness = Self::starting();
        harness.totals.caches_filled(Timestamp::UNIX_EPOCH);
        harness
    }
}

impl TotalsHarness {
    /// The caches are not filled yet.
    fn starting() -> Self {
        Self {
            totals: NamespaceTotals::default(),
        }
    }

    /// The gateway of the Agent with this uid reports its refused calls. Returns the sum.
    fn refuse(&self, agent: &str, uid: &str, calls: i64) -> String {
        let agent = NamespacedName::new("a", agent);
        self.totals.refused_reported((&agent, uid), calls);
        self.refused()
    }

    fn refused(&self) -> String {
        self.read("agentloop_namespace_refused_calls_total{namespace=\"a\"}")
    }

    fn seen(&self, agent: &str, uid: &str, turns: i64) {
        self.totals
            .agent_seen(&an_agent(agent, uid, &json!({"usage": {"turns": turns}})));
    }

    /// Returns whether it was the last one.
    fn delete(&self, agent: &str) -> bool {
        self.totals.agent_deleted(&NamespacedName::new("a", agent))
    }

    fn text(&self) -> String {
        let mut text = Vec::new();
        let mut sink = |piece: Vec<u8>| {
            text.extend(piece);
            true
        };
        let mut out = MetricWriter::new(ExpositionFormat::Text, &mut sink);
        self.totals.write(&mut out);
        out.finish();
        String::from_utf8(text).unwrap()
    }

    /// The value of a series.
    fn read(&self, series: &str) -> String {
        let text = self.text();
        let line = text.lines().find_map(|line| line.strip_prefix(series));
        line.unwrap_or_else(|| panic!("no {series} in {text}"))
            .trim()
            .parse()
            .unwrap()
    }

    fn turns(&self) -> String {
        self.read("agentloop_namespace_turns_total{namespace=\"a\",outcome=\"Completed\"}")
    }
}

fn an_agent(name: &str, uid: &str, status: &Value) -> Agent {
    serde_json::from_value(json!({
        "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
        "metadata": {"namespace": "a", "name": name, "uid": uid},
        "spec": {"model": {"api": "Scripted", "name": "m"}}, "status": status,
    }))
    .unwrap()
}

/// A container that starts again is the same target, so a sum of all Agents would jump back by what deleted ones had.
#[test]
fn what_agents_had_when_this_process_began_is_in_no_sum() {
    let harness = TotalsHarness::starting();
    harness.seen("x", "1", 500);
    assert_eq!(harness.turns(), "0");
    // A reconcile that does not wait for all caches.
    harness.seen("x", "1", 501);
    assert_eq!(harness.turns(), "1");
    harness.seen("y", "2", -7);
    harness.seen("y", "2", 0);
    assert_eq!(harness.turns(), "1");
    harness.seen("x", "3", 4);
    assert_eq!(harness.turns(), "5", "created again since");
    harness.totals.caches_filled(Timestamp::UNIX_EPOCH);
    assert_eq!(harness.turns(), "5");
    harness.seen("y", "2", 3);
    harness.seen("z", "4", 20);
    assert_eq!(harness.turns(), "28", "an Agent that is new");
}

#[test]
fn an_agent_that_could_not_be_read_when_this_process_began_adds_only_its_growth() {
    let harness = TotalsHarness::starting();
    let filled = Timestamp::from_second(1_000).unwrap();
    harness.totals.caches_filled(filled);
    let created = |second: i64, name: &str, turns: i64| {
        let mut agent = an_agent(name, name, &json!({"usage": {"turns": turns}}));
        agent.metadata.creation_timestamp = Some(Time(Timestamp::from_second(second).unwrap()));
        harness.totals.agent_seen(&agent);
        harness.turns()
    };
    assert_eq!(created(999, "x", 500), "0");
    assert_eq!(created(999, "x", 503), "3");
    assert_eq!(created(1_000, "y", 20), "23");
}

#[test]
fn a_deleted_agent_stays_in_the_sum_with_what_it_counted_last() {
    let harness = TotalsHarness::default();
    harness.seen("x", "1", 5);
    harness.seen("y", "2", 7);
    assert_eq!(harness.turns(), "12");
    // Nothing reads the metrics between these.
    harness.seen("x", "1", 9);
    assert!(!harness.delete("x"));
    assert_eq!(harness.turns(), "16");
    assert!(harness.delete("y"));
    assert_eq!(harness.turns(), "16", "the namespace is empty");
    harness.seen("x", "3", 2);
    assert_eq!(harness.turns(), "18", "another Agent of that name");
}

#[test]
fn an_agent_that_was_recreated_or_deleted_while_the_watch_was_interrupted_is_not_lost() {
    let harness = TotalsHarness::default();
    harness.seen("x", "1", 5);
    harness.seen("y", "2", 7);
    harness.seen("x", "3", 1);
    assert_eq!(harness.turns(), "13");
    let x = BTreeSet::from([NamespacedName::new("a", "x")]);
    harness.totals.agents_listed(Some("b"), &BTreeSet::new());
    harness.totals.agents_listed(Some("a"), &x);
    assert_eq!(harness.turns(), "13");
    assert_eq!(
        harness.read("agentloop_namespace_agents{namespace=\"a\",state=\"None\"}"),
        "1"
    );
    harness.totals.agents_listed(None, &BTreeSet::new());
    assert_eq!(
        harness.read("agentloop_namespace_agents{namespace=\"a\",state=\"None\"}"),
        "0"
    );
    assert_eq!(harness.turns(), "13");
}

#[test]
fn no_sum_decreases_if_somebody_edits_a_status() {
    let harness = TotalsHarness::default();
    harness.seen("x", "1", 5);
    harness.seen("x", "1", 2);
    assert_eq!(harness.turns(), "5");
    harness.seen("x", "1", 6);
    assert_eq!(harness.turns(), "6");
}

#[test]
fn refused_calls_count_from_the_first_report_to_this_leader_on() {
    let harness = TotalsHarness::default();
    harness.seen("x", "1", 0);
    assert_eq!(harness.refused(), "0");
    // A former leader has added these.
    assert_eq!(harness.refuse("x", "1", 500), "0");
    assert_eq!(harness.refuse("x", "1", 500), "0");
    assert_eq!(harness.refuse("x", "1", 501), "1");
    harness.seen("x", "1", 1);
    assert_eq!(harness.refused(), "1", "not changed by a version of the Agent");
    assert_eq!(harness.refuse("x", "1", 503), "3");
    harness.delete("x");
    assert_eq!(harness.refuse("x", "1", 600), "3", "it is gone");
    harness.seen("x", "2", 0);
    assert_eq!(harness.refuse("x", "1", 600), "3", "the pod of the Agent before");
    assert_eq!(harness.refuse("x", "2", 40), "3");
    assert_eq!(harness.refuse("x", "2", 41), "4");
}

#[test]
fn a_lower_count_of_refused_calls_adds_nothing_and_is_where_counting_goes_on() {
    let harness = TotalsHarness::default();
    harness.seen("x", "1", 0);
    for (said, sum) in [(500, "0"), (502, "2"), (501, "2"), (503, "4"), (0, "4"), (3, "7")] {
        assert_eq!(harness.refuse("x", "1", said), sum);
    }
}

#[test]
fn refused_calls_of_an_agent_that_was_recreated_while_the_watch_was_interrupted_are_counted_once() {
    let harness = TotalsHarness::default();
    harness.seen("x", "1", 5);
    harness.refuse("x", "1", 0);
    assert_eq!(harness.refuse("x", "1", 7), "7");
    harness.seen("x", "2", 1);
    assert_eq!(harness.turns(), "6");
    assert_eq!(harness.refuse("x", "1", 7), "7", "a late report of the earlier one");
    assert_eq!(harness.refuse("x", "2", 0), "7");
    assert_eq!(harness.refuse("x", "2", 2), "9");
}

#[test]
fn numbers_that_no_gateway_has_decrease_no_sum() {
    let harness = TotalsHarness::default();
    harness.seen("x", "1", 5);
    harness.refuse("x", "1", 0);
    assert_eq!(harness.refuse("x", "1", 4), "4");
    for wrong in [-1, i64::MIN] {
        assert_eq!(harness.refuse("x", "1", wrong), "4");
        harness.seen("x", "1", wrong);
        assert_eq!(harness.turns(), "5");
    }
}

#[test]
fn every_series_of_a_namespace_is_there_with_zeros_and_only_these() {
    let harness = TotalsHarness::default();
    harness.totals.agent_seen(&an_agent("x", "1", &json!({})));
    let text = harness.text();
    let lines: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let states = LoopState::iter().count() + 1;
    // approvals, calls, cost, refused calls; two outcomes of turns, three of tasks; four types of tokens; five outcomes of tools.
    let expected = states + GuardrailTrip::all().count() + 4 + 2 + 3 + 4 + 5;
    assert_eq!(lines.len(), expected);
    for line in lines {
        let is_the_agent = line.starts_with("agentloop_namespace_agents{namespace=\"a\",state=\"None\"}");
        assert!(line.ends_with(if is_the_agent { " 1" } else { " 0" }), "{line}");
    }
}

#[test]
fn each_count_of_an_agent_is_in_its_sum() {
    let harness = TotalsHarness::default();
    harness.totals.agent_seen(&an_agent(
        "x",
        "1",
        &json!({
            "loop": {"state": "Paused"},
            "gates": [{"id": "g", "kind": "LowConfidence", "tool": "goal", "argumentsHash": "h", "openedAt": "2026-01-02T03:04:05Z"}],
            "usage": {
                "calls": 3, "inputTokens": 4, "outputTokens": 5, "cacheReadTokens": 6, "cacheWriteTokens": 7,
                "costMicroUSD": 2_500_000, "turns": 9, "failedTurns": 3, "tasks": {"failed": 2},
                "byTool": [{"tool": "one", "ok": 1, "unknown": 2}, {"tool": "two", "ok": 10}],
                "guardrailTrips": [{"guardrail": "LoopDetected", "action": "warn", "count": 8}],
            },
        }),
    ));
    for (series, value) in [
        ("agents{namespace=\"a\",state=\"Paused\"}", "1"),
        ("pending_approvals{namespace=\"a\"}", "1"),
        ("calls_total{namespace=\"a\"}", "3"),
        ("cost_usd_total{namespace=\"a\"}", "2.5"),
        ("tokens_total{namespace=\"a\",type=\"input\"}", "4"),
        ("tokens_total{namespace=\"a\",type=\"output\"}", "5"),
        ("tokens_total{namespace=\"a\",type=\"cache_read\"}", "6"),
        ("tokens_total{namespace=\"a\",type=\"cache_write\"}", "7"),
        ("tasks_total{namespace=\"a\",outcome=\"Failed\"}", "2"),
        ("turns_total{namespace=\"a\",outcome=\"Completed\"}", "9"),
        ("turns_total{namespace=\"a\",outcome=\"Failed\"}", "3"),
        ("tool_outcomes_total{namespace=\"a\",outcome=\"ok\"}", "11"),
        ("tool_outcomes_total{namespace=\"a\",outcome=\"unknown\"}", "2"),
        (
            "guardrail_trips_total{namespace=\"a\",guardrail=\"LoopDetected\",action=\"warn\"}",
            "8",
        ),
    ] {
        assert_eq!(
            harness.read(&format!("agentloop_namespace_{series}")),
            value,
            "{series}"
        );
    }
}

#[test]
fn a_thousand_empty_namespaces_are_kept_and_then_the_oldest_is_dropped() {
    let harness = TotalsHarness::default();
    let visit = |number: usize| {
        let mut agent = an_agent("x", &number.to_string(), &json!({}));
        agent.metadata.namespace = Some(format!("n{number}"));
        harness.totals.agent_seen(&agent);
        assert!(harness.totals.agent_deleted(&NamespacedName::of(&agent)));
    };
    (0..MAX_EMPTY).for_each(visit);
    assert_eq!(harness.totals.lock().namespaces.len(), MAX_EMPTY);
    visit(MAX_EMPTY);
    let table = harness.totals.lock();
    assert_eq!(table.namespaces.len(), MAX_EMPTY);
    assert!(!table.namespaces.contains_key("n0"));
}
