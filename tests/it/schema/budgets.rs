//! Samples for the rules of AgentBudgets.

use serde_json::{Value, json};

use super::samples::{Row, change, row, with};

/// The smallest AgentBudget.
pub fn budget() -> Value {
    json!({
        "apiVersion": "agentloop.dev/v1alpha1",
        "kind": "AgentBudget",
        "metadata": {"name": "b"},
        "spec": {
            "limits": {"tokens": 1000},
            "window": {"rolling": {"seconds": 3600}},
        },
    })
}

/// `budget` with a change to its spec.
pub fn spec(change: &Value) -> Value {
    with(budget(), &json!({"spec": change}))
}

fn window(window: &Value) -> Value {
    with(spec(&json!({"window": null})), &json!({"spec": {"window": window}}))
}

fn zone(zone: &str) -> Value {
    window(&json!({"calendar": {"period": "Daily", "timeZone": zone}}))
}

fn every_kind() -> Value {
    json!({"tokens": 1, "inputTokens": 1, "outputTokens": 1, "calls": 1, "costUSD": "1"})
}

fn asking(top_up: &Value) -> Value {
    spec(&json!({"limits": every_kind(), "onExhausted": "Ask", "ask": {"topUp": top_up}}))
}

fn topped_up(top_ups: &Value) -> Value {
    spec(&json!({"topUps": top_ups}))
}

/// Amounts that name a kind, and such that do not.
fn amounts(of: impl Fn(&Value) -> Value) -> (Vec<Value>, Vec<Value>) {
    let kinds = ["tokens", "inputTokens", "outputTokens", "calls"];
    let mut good: Vec<Value> = kinds.iter().map(|kind| of(&json!({*kind: 0}))).collect();
    good.push(of(&json!({"costUSD": "0.01"})));
    (good, vec![of(&json!({}))])
}

/// For each kind what leaves it alone unlimited, and adds of it.
fn each_kind_alone(of: impl Fn(&Value, &Value) -> Value) -> Vec<Value> {
    let all = every_kind();
    let kinds = all.as_object().unwrap().iter();
    let each = kinds.map(|(kind, amount)| {
        let mut without = all.clone();
        without[kind] = Value::Null;
        of(&without, &json!({ kind: amount }))
    });
    each.collect()
}

/// Samples for the expressions of a selector.
pub fn selecting(says: &'static str, of: impl Fn(&Value) -> Value) -> Row {
    let select = |expression: Value| of(&json!({"matchExpressions": [with(json!({"key": "team"}), &expression)]}));
    row(
        says,
        vec![
            select(json!({"operator": "In", "values": ["a"]})),
            select(json!({"operator": "NotIn", "values": ["a", "b"]})),
            select(json!({"operator": "Exists"})),
            select(json!({"operator": "DoesNotExist", "values": []})),
        ],
        vec![
            select(json!({"operator": "In"})),
            select(json!({"operator": "NotIn", "values": []})),
            select(json!({"operator": "Exists", "values": ["a"]})),
        ],
    )
}

/// Money as it may be written, and as it may not.
fn money(of: impl Fn(&Value) -> Value) -> (Vec<Value>, Vec<Value>) {
    let each = |texts: &[&str]| texts.iter().map(|text| of(&json!({"costUSD": *text}))).collect();
    (
        each(&["0", "25", "25.00", "0.000001", "999999999.999999"]),
        each(&["25.0000001", "1000000000", "$25", "-1", ".5", "1.", "1e3", "1,5", "25 "]),
    )
}

/// The rules of AgentBudgets.
pub fn rows() -> Vec<Row> {
    let mut rows = shape();
    let limits = |amount: &Value| with(spec(&json!({"limits": null})), &json!({"spec": {"limits": amount}}));
    let per_agent = |amount: &Value| spec(&json!({"perAgent": amount}));
    let top_up = |amount: &Value| topped_up(&json!([with(json!({"id": "a"}), amount)]));
    let none = |says, (passes, fails)| row(says, passes, fails);
    rows.extend([
        none("spec.limits is empty", amounts(limits)),
        none("spec.limits.costUSD must be", money(limits)),
        none("spec.perAgent is empty", amounts(per_agent)),
        none("spec.perAgent.costUSD must be", money(per_agent)),
        none("spec.topUps[] has no amount", amounts(top_up)),
        none("spec.topUps[].costUSD must be", money(top_up)),
        none("spec.ask.topUp is empty", amounts(asking)),
        none("spec.ask.topUp.costUSD must be", money(asking)),
        selecting("spec.selector.matchExpressions[].values", |selector| {
            spec(&json!({"selector": selector}))
        }),
        selecting("spec.namespaceSelector.matchExpressions[].values", |selector| {
            spec(&json!({"selector": {}, "namespaceSelector": selector}))
        }),
    ]);
    rows
}

fn shape() -> Vec<Row> {
    let named = |name: &str| with(budget(), &json!({"metadata": {"name": name}}));
    let id = |id: &str| topped_up(&json!([{"id": id, "tokens": 1}]));
    let first = json!({"id": "a", "tokens": 1, "reason": "fire"});
    let second = json!({"id": "b", "tokens": 2});
    vec![
        row(
            "metadata.name of an AgentBudget must be at most 63 characters",
            vec![named(&"a".repeat(63)), named("team.a")],
            vec![named(&"a".repeat(64))],
        ),
        row(
            "spec.namespaceSelector requires spec.selector",
            vec![spec(&json!({"selector": {}, "namespaceSelector": {}}))],
            vec![spec(&json!({"namespaceSelector": {"matchLabels": {"team": "a"}}}))],
        ),
        row(
            "spec.ask is supported with onExhausted Ask only",
            vec![asking(&json!({"tokens": 5}))],
            vec![
                spec(&json!({"ask": {"topUp": {"tokens": 5}}})),
                spec(&json!({"onExhausted": "Stop", "ask": {"topUp": {"tokens": 5}}})),
            ],
        ),
        row(
            "spec.window must have exactly one of",
            vec![
                window(&json!({"rolling": {"seconds": 1}})),
                window(&json!({"calendar": {"period": "Monthly"}})),
                window(&json!({"lifetime": {}})),
            ],
            vec![
                window(&json!({})),
                window(&json!({"rolling": {"seconds": 60}, "lifetime": {}})),
                window(&json!({"rolling": {"seconds": 60}, "calendar": {"period": "Daily"}})),
            ],
        ),
        row(
            "spec.window.calendar.timeZone must be a name",
            vec![
                zone("UTC"),
                zone("Europe/Berlin"),
                zone("America/Argentina/Buenos_Aires"),
                zone("Etc/GMT+5"),
                zone("America/Port-au-Prince"),
            ],
            vec![
                zone("+02:00"),
                zone("Europe/"),
                zone("Europe Berlin"),
                zone("../etc/passwd"),
            ],
        ),
        row(
            "spec.topUps[].id must consist of letters",
            vec![id("2026-11-fire"), id("a"), id(&"a".repeat(58))],
            vec![id("gate/1"), id("-a"), id("a b"), id("a.")],
        ),
        row(
            "spec.ask.topUp contains a kind that spec.limits does not limit",
            vec![asking(&every_kind())],
            each_kind_alone(|limits, one| {
                spec(&json!({"limits": limits, "onExhausted": "Ask", "ask": {"topUp": one}}))
            }),
        ),
        change(
            "spec.topUps has a new entry with a kind that spec.limits does not limit",
            topped_up(&json!([{"id": "a", "calls": 1}])),
            vec![
                topped_up(&json!([{"id": "a", "calls": 1}, {"id": "b", "tokens": 1}])),
                spec(&json!({
                    "limits": every_kind(),
                    "topUps": [{"id": "a", "calls": 1}, with(json!({"id": "b"}), &every_kind())],
                })),
            ],
            each_kind_alone(|limits, one| {
                let entry = with(json!({"id": "b"}), one);
                with(
                    spec(&json!({"limits": limits})),
                    &json!({"spec": {"topUps": [{"id": "a", "calls": 1}, entry]}}),
                )
            }),
        ),
        change(
            "spec.topUps is append-only",
            topped_up(&json!([first])),
            vec![topped_up(&json!([first])), topped_up(&json!([second, first]))],
            vec![
                budget(),
                topped_up(&json!([])),
                topped_up(&json!([second])),
                topped_up(&json!([with(first.clone(), &json!({"tokens": 2}))])),
                topped_up(&json!([with(first.clone(), &json!({"reason": "water"}))])),
                topped_up(&json!([with(first.clone(), &json!({"id": "c"}))])),
            ],
        ),
    ]
}
