//! Snapshots of the screens, from fixed objects.

use jiff::{SignedDuration, Timestamp};
use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use super::costs::{CostNotes, CostSum};
use super::status::StatusColumns;
use super::{approvals, budgets, costs, status};
use crate::api::{Agent, AgentBudget};

const NOW: &str = "2026-11-22T14:00:00Z";

fn now() -> Timestamp {
    NOW.parse().unwrap()
}

fn agent(namespace: &str, name: &str, spec: &Value, status: &Value) -> Agent {
    let mut object = json!({
        "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
        "metadata": {"namespace": namespace, "name": name, "creationTimestamp": "2026-11-20T13:00:00Z"},
        "spec": {"instructions": "Be brief.", "model": {"api": "Scripted", "name": "small"}},
        "status": status,
    });
    for (field, value) in spec.as_object().unwrap() {
        object["spec"][field] = value.clone();
    }
    serde_json::from_value(object).unwrap()
}

fn agents() -> Vec<Agent> {
    let ready = |status: &str| json!([{"type": "Ready", "status": status, "reason": "x", "message": "", "lastTransitionTime": NOW}]);
    let model = |name: &str, calls, cost| json!({"model": name, "calls": calls, "inputTokens": 900, "cacheReadTokens": 100, "outputTokens": 50, "costMicroUSD": cost});
    let watcher = json!({
        "conditions": ready("True"),
        "loop": {"state": "Sleeping", "resumesAt": "2026-11-22T14:12:00Z", "wake": {"type": "Event", "value": "sensor/prices"}},
        "usage": {"turns": 41, "calls": 50, "unknownCalls": 1, "inputTokens": 90_000, "cacheReadTokens": 10_000, "outputTokens": 5_000,
            "costMicroUSD": 7_420_000, "byModel": [model("large", 30, 7_000_000), model("small", 15, 400_000)]},
        "summary": {"tokens": "105k", "cost": "$7.42", "budget": "62%"},
        "pod": {"name": "watcher", "node": "node-1", "restarts": 2},
        "lastError": {"at": "2026-11-22T13:00:00Z", "kind": "Timeout", "message": "no answer"},
    });
    let goal = json!({
        "conditions": ready("True"),
        "loop": {"state": "Paused", "reasons": ["ToolCallNeedsApproval", "RateWindow"]},
        "goal": {"progressPercent": 66, "steps": 4, "lastConfidencePercent": 70, "criteria": [],
            "startedAt": "2026-11-22T13:15:00Z"},
        "usage": {"turns": 4, "calls": 9, "inputTokens": 2_000, "outputTokens": 300, "byModel": [model("small", 9, 0)]},
        "summary": {"tokens": "2.3k"},
        "gates": [
            {"id": "e3-t12c1r1", "kind": "ToolCallNeedsApproval", "tool": "bank__pay", "argumentsHash": "5f0c",
             "openedAt": "2026-11-22T13:05:00Z", "expiresAt": "2026-11-22T14:05:00Z", "untrustedContentSource": "server/web"},
            {"id": "tools-github-e3-1", "kind": "ToolDefinitionsChanged", "tool": "github", "argumentsHash": "aa01",
             "openedAt": "2026-11-21T13:05:00Z"},
        ],
    });
    let task = json!({
        "conditions": ready("True"),
        "loop": {"state": "Stopped", "waitingTasks": 3},
    });
    let refused = json!({"conditions": [{"type": "Accepted", "status": "False", "reason": "SecretNotFound", "message": "", "lastTransitionTime": NOW}]});
    let ended = json!({"conditions": ready("True"), "loop": {"state": "Stopped", "outcome": "Completed"}});
    let pending = json!({"loop": {"state": "Starting"}, "conditions": [
        {"type": "PodReady", "status": "False", "reason": "Unschedulable", "message": "", "lastTransitionTime": NOW}]});
    vec![
        agent("team-a", "watcher", &json!({}), &watcher),
        agent("team-a", "builder", &json!({"mode": "Goal"}), &goal),
        agent("team-b", "triage", &json!({"mode": "Task", "suspend": true}), &task),
        agent("team-b", "refused", &json!({}), &refused),
        agent("team-b", "ended", &json!({}), &ended),
        agent("team-b", "pending", &json!({}), &pending),
        agent("team-b", "new", &json!({}), &Value::Null),
    ]
}

fn budget(namespace: &str, name: &str, window: &Value, status: &Value) -> AgentBudget {
    serde_json::from_value(json!({
        "apiVersion": "agentloop.dev/v1alpha1", "kind": "AgentBudget",
        "metadata": {"namespace": namespace, "name": name, "creationTimestamp": "2026-11-01T00:00:00Z"},
        "spec": {"limits": {"tokens": 1_000_000}, "window": window},
        "status": status,
    }))
    .unwrap()
}

fn budgets_() -> Vec<AgentBudget> {
    let exhausted = json!({
        "conditions": [{"type": "Exhausted", "status": "True", "reason": "x", "message": "", "lastTransitionTime": NOW}],
        "window": {"resetsAt": "2026-11-22T14:30:00Z"},
        "limits": {"tokens": 1_000_000, "costMicroUSD": 25_000_000},
        "used": {"tokens": 999_999, "costMicroUSD": 7_420_000},
        "reserved": {"tokens": 1},
        "remaining": {"tokens": 0, "costMicroUSD": 17_580_000},
        "summary": {"window": "1h"},
        "topAgents": [{"namespace": "team-a", "name": "watcher", "tokens": 900_000, "costMicroUSD": 7_000_000}],
        "gates": [{"id": "b-7", "kind": "BudgetAsk", "argumentsHash": "c0de", "openedAt": "2026-11-22T13:50:00Z"}],
    });
    let invalid = json!({"conditions": [{"type": "Ready", "status": "False", "reason": "InvalidSpec", "message": "", "lastTransitionTime": NOW}],
        "limits": {"calls": 0}});
    vec![
        budget("team-a", "team", &json!({"rolling": {"seconds": 3600}}), &exhausted),
        budget("team-b", "none", &json!({"lifetime": {}}), &invalid),
        budget("team-b", "new", &json!({"lifetime": {}}), &Value::Null),
    ]
}

#[test]
fn the_screen_of_agents() {
    insta::assert_snapshot!("status", status::table(&agents(), StatusColumns::default(), now()));
    let wide = StatusColumns {
        namespaces: true,
        wide: true,
    };
    insta::assert_snapshot!("status_wide", status::table(&agents(), wide, now()));
}

/// Widths of columns follow from the rows, so the three are a table of their own.
#[test]
fn the_readme_shows_the_screen_of_agents() {
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).unwrap();
    let (_, after) = readme.split_once("$ kubectl agentloop status\n").unwrap();
    let (shown, _) = after.split_once("```").unwrap();
    let table = status::table(&agents()[..3], StatusColumns::default(), now());
    assert_eq!(shown, table.to_string());
}

#[test]
fn the_screen_of_gates() {
    let mut gates: Vec<_> = agents().iter().flat_map(approvals::of_agent).collect();
    gates.extend(budgets_().iter().flat_map(approvals::of_budget));
    insta::assert_snapshot!("approvals", approvals::text(&gates, now()));
    insta::assert_json_snapshot!("approvals_json", gates);
    assert_eq!(approvals::text(&[], now()), "No gate is open.\n");
}

#[test]
fn the_screen_of_budgets() {
    let rows: Vec<_> = budgets_().iter().flat_map(budgets::rows).collect();
    insta::assert_snapshot!("budgets", budgets::text(&rows, now()));
    assert_eq!(budgets::text(&[], now()), "There are no AgentBudgets.\n");
}

#[test]
fn the_screens_of_usage() {
    let screen = |by| costs::text(&costs::of_agents(&agents(), by), by, CostNotes::default());
    let screens = [CostSum::Agent, CostSum::Model, CostSum::Namespace].map(screen);
    insta::assert_snapshot!("costs", screens.join("\n"));
}

/// A budget with these buckets of `team-a/watcher`, by their start and number of calls.
fn recorded(window: &Value, started: &str, buckets: &[(&str, i64)]) -> AgentBudget {
    let buckets = buckets.iter().map(|(start, calls)| {
        json!({"start": start, "amount": {"calls": calls, "inputTokens": 10, "outputTokens": 5, "costMicroUSD": 1_000}})
    });
    let shares = json!([{"namespace": "team-a", "name": "watcher", "buckets": buckets.collect::<Vec<_>>()}]);
    let status = json!({"window": {"startedAt": started}, "ledger": {"watermark": NOW, "shares": shares}});
    budget("team-a", "team", window, &status)
}

/// Calls of the watcher in the last hour, and from when on they count.
fn last_hour(budgets: &[AgentBudget]) -> Option<(i64, String)> {
    let agents = &agents()[..1];
    let (rows, unknown) = costs::of_budgets(
        (agents, budgets),
        Some("team-a"),
        CostSum::Agent,
        (SignedDuration::from_hours(1), now()),
    );
    assert_eq!(rows.len() + unknown.len(), 1);
    rows.first().map(|row| (row.calls, row.from.unwrap().to_string()))
}

#[test]
fn usage_of_a_period_is_that_of_the_buckets_that_reach_into_it() {
    let buckets = [
        ("2026-11-22T11:00:00Z", 1),
        ("2026-11-22T12:30:00Z", 2),
        ("2026-11-22T13:30:00Z", 4),
    ];
    let started = "2026-11-22T00:00:00Z";
    let rolling = |seconds: i64| recorded(&json!({"rolling": {"seconds": seconds}}), started, &buckets);
    let expected = Some((6, "2026-11-22T12:30:00Z".to_owned()));
    assert_eq!(last_hour(&[rolling(3_600)]), expected);
    assert_eq!(last_hour(&[rolling(3_599)]), None, "its window is too short");
    let calendar = |started: &str| recorded(&json!({"calendar": {"period": "Daily"}}), started, &[(started, 9)]);
    assert_eq!(
        last_hour(&[calendar("2026-11-22T13:00:00Z")]),
        Some((9, "2026-11-22T13:00:00Z".into()))
    );
    assert_eq!(
        last_hour(&[calendar("2026-11-22T13:00:01Z")]),
        None,
        "its window has just begun"
    );
    let lifetime = recorded(&json!({"lifetime": {}}), started, &[("1970-01-01T00:00:00Z", 50)]);
    assert_eq!(
        last_hour(std::slice::from_ref(&lifetime)),
        Some((50, "2026-11-01T00:00:00Z".into()))
    );
    assert_eq!(
        last_hour(&[lifetime, rolling(3_600)]),
        expected,
        "the closest one counts"
    );
    assert_eq!(last_hour(&[]), None);
}

#[test]
fn an_agent_that_was_idle_used_nothing_of_a_budget_that_selects_it() {
    let idle = |spec: &Value, namespace: &str, watcher: &Value| {
        let ledger = json!({"watermark": NOW, "shares": [{"namespace": "team-a", "name": "other", "buckets": []}]});
        let mut budget = budget(
            namespace,
            "team",
            &json!({"rolling": {"seconds": 3600}}),
            &json!({"ledger": ledger}),
        );
        budget.spec.selector = serde_json::from_value(spec["selector"].clone()).unwrap();
        budget.spec.namespace_selector = serde_json::from_value(spec["namespaceSelector"].clone()).unwrap();
        let refs = spec.get("refs").cloned().unwrap_or(json!([]));
        let mut agent = agent("team-a", "watcher", &json!({"budgetRefs": refs}), watcher);
        agent.metadata.labels = Some([("team".to_owned(), "a".to_owned())].into());
        (agent, budget)
    };
    let hour = (SignedDuration::from_hours(1), now());
    let calls = |(agent, budget): &(Agent, AgentBudget)| {
        let (rows, _) = costs::of_budgets(
            (std::slice::from_ref(agent), std::slice::from_ref(budget)),
            Some("team-a"),
            CostSum::Agent,
            hour,
        );
        rows.first().map(|row| (row.calls, row.from.unwrap().to_string()))
    };
    let zero = Some((0, "2026-11-22T13:00:00Z".to_owned()));
    let (none, listed) = (json!({}), |name: &str| json!({"budgets": [{"name": name}]}));
    let worked = |at: &str| {
        let state = json!({"state": "Sleeping", "turn": 1, "turns": 1, "lastTurnTime": at, "consecutiveErrors": 0});
        json!({"budgets": [{"name": "team"}], "loop": state})
    };
    for (spec, namespace, status, expected) in [
        (json!({}), "team-a", &none, None),
        (json!({}), "team-a", &listed("team"), zero.clone()),
        // It drew on another budget, or on none.
        (json!({}), "team-a", &worked("2026-11-22T13:00:00Z"), None),
        (json!({}), "team-a", &worked("2026-11-22T12:59:59Z"), zero.clone()),
        (json!({"refs": [{"name": "team"}]}), "team-a", &none, zero.clone()),
        (
            json!({"selector": {"matchLabels": {"team": "a"}}}),
            "team-a",
            &none,
            zero.clone(),
        ),
        (
            json!({"selector": {"matchLabels": {"team": "b"}}}),
            "team-a",
            &none,
            None,
        ),
        (json!({"selector": {}}), "team-b", &none, None),
        (
            json!({"selector": {}, "namespaceSelector": {}}),
            "agentloop-system",
            &none,
            None,
        ),
        (json!({}), "agentloop-system", &listed("team"), None),
        (
            json!({}),
            "agentloop-system",
            &listed("agentloop-system/team"),
            zero.clone(),
        ),
    ] {
        assert_eq!(
            calls(&idle(&spec, namespace, status)),
            expected,
            "{spec} {namespace} {status}"
        );
    }
    let (agent, mut full) = idle(&json!({"selector": {}}), "team-a", &none);
    let lifetime = recorded(&json!({"lifetime": {}}), NOW, &[("1970-01-01T00:00:00Z", 50)]);
    let both = [lifetime, full.clone()];
    let (rows, _) = costs::of_budgets((std::slice::from_ref(&agent), &both), None, CostSum::Agent, hour);
    assert_eq!(rows[0].calls, 0, "the life of the Agent is not what was asked for");
    let late = recorded(
        &json!({"rolling": {"seconds": 7200}}),
        NOW,
        &[("2026-11-22T13:30:00Z", 4)],
    );
    let both = [late, full.clone()];
    let (rows, _) = costs::of_budgets((std::slice::from_ref(&agent), &both), None, CostSum::Agent, hour);
    assert_eq!(
        rows[0].calls, 4,
        "a budget that has not counted the Agent for so long knows less"
    );
    let shares = &mut full.status.as_mut().unwrap().ledger.as_mut().unwrap().shares;
    shares[0].name.clear();
    assert_eq!(
        calls(&(agent, full)),
        None,
        "the Agents with the least usage share a line"
    );
}

#[test]
fn the_screen_of_usage_in_a_period() {
    let budget = recorded(
        &json!({"rolling": {"seconds": 3600}}),
        NOW,
        &[("2026-11-22T13:00:00Z", 7)],
    );
    let period = (SignedDuration::from_hours(1), now());
    let (rows, unknown) = costs::of_budgets((&agents()[..2], &[budget]), None, CostSum::Agent, period);
    let notes = CostNotes {
        source: "AgentBudget",
        unknown: &unknown,
        counts_deleted: true,
    };
    insta::assert_snapshot!("costs_since", costs::text(&rows, CostSum::Agent, notes));
}

#[test]
fn deleted_agents_count_as_far_as_a_budget_recorded_them() {
    let share = |namespace: &str, name: &str, start: &str, calls: i64| {
        let amount = json!({"calls": calls, "inputTokens": 10, "outputTokens": 5, "costMicroUSD": 1_000});
        json!({"namespace": namespace, "name": name, "buckets": [{"start": start, "amount": amount}]})
    };
    let hourly = |seconds: i64, shares: &Value| {
        let status = json!({"window": {"startedAt": NOW}, "ledger": {"watermark": NOW, "shares": shares}});
        budget("team-a", "team", &json!({"rolling": {"seconds": seconds}}), &status)
    };
    let at = "2026-11-22T13:30:00Z";
    let budgets = [
        hourly(
            3_600,
            &json!([
                share("team-a", "watcher", at, 1),
                share("team-a", "old", at, 7),
                share("team-b", "other", at, 9),
                // The Agents with the least usage.
                share("", "", at, 50),
            ]),
        ),
        // Counts the same calls, and does not reach back to that time.
        hourly(
            60,
            &json!([share("team-a", "old", at, 3), share("team-a", "short", at, 4)]),
        ),
    ];
    let used = |namespace: Option<&str>, by| {
        let hour = (SignedDuration::from_hours(1), now());
        let (rows, unknown) = costs::of_budgets((&agents()[..1], &budgets), namespace, by, hour);
        let mut rows: Vec<_> = rows.into_iter().map(|row| (row.of, row.calls, row.deleted)).collect();
        rows.sort();
        (rows, unknown)
    };
    let row = |of: &str, calls: i64, deleted: bool| (of.to_owned(), calls, deleted);
    let short = vec!["team-a/short (deleted)".to_owned()];
    let (old, watcher) = (row("team-a/old (deleted)", 7, true), row("team-a/watcher", 1, false));
    let other = row("team-b/other (deleted)", 9, true);
    assert_eq!(
        used(Some("team-a"), CostSum::Agent),
        (vec![old.clone(), watcher.clone()], short.clone())
    );
    assert_eq!(used(None, CostSum::Agent), (vec![old, watcher, other], short.clone()));
    assert_eq!(
        used(None, CostSum::Namespace),
        (vec![row("team-a", 8, false), row("team-b", 9, false)], short)
    );
    let (rows, _) = costs::of_budgets(
        (&[], &budgets),
        Some("team-b"),
        CostSum::Agent,
        (SignedDuration::from_hours(1), now()),
    );
    let json = serde_json::to_value(&rows).unwrap();
    assert_eq!(
        (&json[0]["of"], &json[0]["deleted"]),
        (&json!("team-b/other (deleted)"), &json!(true))
    );
    let notes = CostNotes {
        counts_deleted: true,
        ..CostNotes::default()
    };
    let text = costs::text(&rows, CostSum::Agent, notes);
    assert!(
        text.contains("\nTOTAL                    9 ") && !text.contains("not counted"),
        "{text}"
    );
    let text = costs::text(&rows, CostSum::Agent, CostNotes::default());
    assert!(text.contains("\n\nDeleted Agents are not counted. "), "{text}");
}
