//! The same rules for the built-in tools, and for servers that are containers.

use serde_json::{Value, json};

use super::{asks, holds_changes, trusted, with_tool_rules};

/// The built-in tools in an image, with rules for `shell`.
fn toolbox(image: &str, default: &str, rules: &Value) -> Value {
    let tools: Vec<Value> = rules
        .as_object()
        .filter(|rules| !rules.is_empty())
        .cloned()
        .into_iter()
        .map(|mut rules| {
            rules.insert("name".into(), json!("shell"));
            Value::Object(rules)
        })
        .collect();
    json!({"approval": {"default": default}, "builtin": ["Shell"], "toolbox": {"image": image, "tools": tools}})
}

/// A server that is a container.
fn in_container(image: &str, mut fields: Value) -> Value {
    fields["name"] = json!("files");
    fields["container"] = json!({"image": image, "command": ["serve"]});
    json!({"servers": [fields]})
}

#[tokio::test(flavor = "multi_thread")]
async fn only_an_approver_weakens_the_rules_of_containers() {
    let Some(server) = with_tool_rules().await else { return };
    for (before, after, field) in weakened() {
        let refused = server.replaces("edith", &before, &after).await;
        assert!(refused.contains(field), "{before} -> {after}: {refused}");
        assert_eq!(
            server.replaces("ann", &before, &after).await,
            "ok",
            "{before} -> {after}"
        );
    }
    for (before, after) in kept() {
        assert_eq!(
            server.replaces("edith", &before, &after).await,
            "ok",
            "{before} -> {after}"
        );
    }
    server.end().await;
}

/// Changes that weaken a rule, and the part of the message that names it.
fn weakened() -> Vec<(Value, Value, &'static str)> {
    let none = || json!({});
    vec![
        (
            toolbox("a", "Destructive", &none()),
            toolbox("a", "Destructive", &json!({"approval": "Never"})),
            "approval: Never",
        ),
        (
            toolbox("a", "Destructive", &json!({"approval": "Never"})),
            toolbox("b", "Destructive", &json!({"approval": "Never"})),
            "approval: Never",
        ),
        (
            toolbox("a", "Never", &json!({"approval": "Always"})),
            toolbox("a", "Never", &none()),
            "approval: Always",
        ),
        (
            toolbox("a", "Never", &json!({"approval": "Always"})),
            json!({"builtin": [], "toolbox": null}),
            "approval: Always",
        ),
        (
            toolbox("a", "Never", &json!({"approvalCondition": "a"})),
            toolbox("a", "Never", &json!({"approvalCondition": "b"})),
            "approvalCondition",
        ),
        (
            toolbox("a", "Never", &json!({"onUnknownOutcome": "Ask"})),
            toolbox("a", "Never", &json!({"onUnknownOutcome": "Retry"})),
            "onUnknownOutcome: Ask",
        ),
        (
            toolbox("a", "Never", &json!({"onUnknownOutcome": "Ask"})),
            json!({"builtin": [], "toolbox": null}),
            "onUnknownOutcome: Ask",
        ),
        (
            toolbox("a", "Destructive", &none()),
            toolbox("a", "Destructive", &json!({"effect": "Write"})),
            "lowering",
        ),
        (
            toolbox("a", "Write", &none()),
            toolbox("a", "Write", &json!({"effect": "Read"})),
            "lowering",
        ),
        (in_container("a", none()), in_container("a", trusted(none())), "trusted"),
        (
            in_container("a", trusted(none())),
            in_container("b", trusted(none())),
            "container of a trusted server",
        ),
        (
            in_container("a", holds_changes("Ask")),
            in_container("a", none()),
            "definitionChanges",
        ),
        (
            in_container("a", asks("Never")),
            in_container("b", asks("Never")),
            "approval: Never",
        ),
        (
            in_container("a", asks("Always")),
            json!({"servers": [{"name": "files2", "container": {"image": "a", "command": ["x"]}}]}),
            "approval: Always",
        ),
    ]
}

/// Changes that weaken no rule.
fn kept() -> Vec<(Value, Value)> {
    let none = || json!({});
    vec![
        (
            toolbox("a", "Destructive", &none()),
            toolbox("b", "Destructive", &json!({"approval": "Always"})),
        ),
        (
            toolbox("a", "Write", &none()),
            toolbox("a", "Write", &json!({"effect": "Write", "timeoutSeconds": 90})),
        ),
        (
            toolbox("a", "Never", &json!({"approval": "Never"})),
            toolbox("a", "Never", &json!({"approval": "Never"})),
        ),
        (
            toolbox("a", "Never", &json!({"onUnknownOutcome": "Ask"})),
            toolbox("a", "Never", &json!({"onUnknownOutcome": "Ask", "timeoutSeconds": 90})),
        ),
        (
            toolbox("a", "Never", &json!({"onUnknownOutcome": "Ask"})),
            toolbox("a", "Never", &json!({"approval": "Always"})),
        ),
        (in_container("a", none()), in_container("b", json!({"only": ["t"]}))),
    ]
}
