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

/// A container that serves on a port of the pod.
fn on_port(name: &str, port: u16, path: Option<&str>) -> Value {
    json!({"name": name, "container": {"image": name, "port": port, "path": path}})
}

#[tokio::test(flavor = "multi_thread")]
async fn only_an_approver_adds_a_url_of_a_container_with_rules() {
    let Some(server) = with_tool_rules().await else { return };
    let url = |url: &str| json!({"name": "other", "url": url});
    let (default, rpc) = (on_port("files", 8000, None), on_port("files", 8000, Some("/rpc?v=2")));
    let same = [
        (&default, url("http://127.0.0.1:8000/mcp")),
        (&default, url("http://localhost:8000/mcp?x=1")),
        (&default, url("http://LOCALHOST.:8000/mcp")),
        (&default, url("http://[::1]:8000/mcp")),
        (&default, url("http://0:8000/mcp")),
        (&default, url("https://127.0.0.2:8000/mcp/")),
        (&rpc, url("http://127.0.0.1:8000/rpc")),
        (&default, on_port("other", 8000, Some("/mcp"))),
    ];
    let differ = [
        (&default, url("http://127.0.0.1:8001/mcp")),
        (&default, url("http://127.0.0.1/mcp")),
        (&default, url("http://127.0.0.1:8000/rpc")),
        (&rpc, url("http://127.0.0.1:8000/mcp")),
        (&default, url("http://files:8000/mcp")),
        (&default, on_port("other", 8001, None)),
    ];
    let samples = |(container, other): (&Value, Value), refuse: bool| {
        [(container.clone(), other.clone()), (other, container.clone())].map(|(mut first, second)| {
            first["definitionChanges"] = json!("Ask");
            (json!({"servers": [first]}), json!({"servers": [first, second]}), refuse)
        })
    };
    let refused = same.into_iter().flat_map(|pair| samples(pair, true));
    let kept = differ.into_iter().flat_map(|pair| samples(pair, false));
    for (before, after, refuse) in refused.chain(kept) {
        let said = server.replaces("edith", &before, &after).await;
        if refuse {
            assert!(said.contains("definitionChanges"), "{after}: {said}");
            assert_eq!(server.replaces("ann", &before, &after).await, "ok", "{after}");
        } else {
            assert_eq!(said, "ok", "{after}");
        }
    }
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn containers_that_have_always_had_the_same_image_do_not_hinder_other_changes() {
    let Some(server) = with_tool_rules().await else { return };
    let before = json!({"servers": [
        {"name": "files", "container": {"image": "node", "command": ["files"]}, "definitionChanges": "Ask"},
        {"name": "other", "container": {"image": "node", "command": ["other"]}},
    ]});
    let with = |field: &str, value: Value| {
        let mut after = before.clone();
        after["servers"][1]["container"][field] = value;
        after
    };
    let after = with("resources", json!({"limits": {"memory": "2Gi"}}));
    assert_eq!(server.replaces("edith", &before, &after).await, "ok");
    for after in [
        with("command", json!(["files"])),
        with("args", json!(["a"])),
        with("env", json!([{"name": "A", "value": "b"}])),
        with("envFrom", json!([{"secretRef": {"name": "of-files"}}])),
        with("port", json!(8000)),
    ] {
        let refused = server.replaces("edith", &before, &after).await;
        assert!(refused.contains("definitionChanges"), "{after}: {refused}");
        assert_eq!(server.replaces("ann", &before, &after).await, "ok", "{after}");
    }
    server.end().await;
}
