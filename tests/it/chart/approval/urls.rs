//! Another server at the place of one with rules, whichever way its URL is written.

use serde_json::{Value, json};

use super::with_tool_rules;

/// Two servers, the first one with a rule.
fn and(url: &str, other: &str) -> Value {
    json!({"servers": [
        {"name": "files", "url": url, "definitionChanges": "Ask"},
        {"name": "files2", "url": other},
    ]})
}

#[tokio::test(flavor = "multi_thread")]
async fn only_an_approver_adds_a_server_without_the_rules_of_another_one_at_the_same_place() {
    let Some(server) = with_tool_rules().await else { return };
    let before = |url: &str| json!({"servers": [{"name": "files", "url": url, "definitionChanges": "Ask"}]});
    for (url, other) in [
        ("http://127.0.0.1/mcp", "http://127.0.0.1:80/mcp"),
        ("http://files/mcp", "http://files:0080/mcp"),
        ("https://files/mcp", "https://files:443/mcp"),
        ("http://files/mcp", "http://FILES/mcp"),
        ("http://files/mcp", "http://files/mcp?x=1"),
        ("http://files/mcp", "http://files/mcp/"),
        ("http://files/mcp", "http://files/./mcp"),
        ("http://files/mcp", "http://files//mcp"),
        ("http://files/mcp", "http://files/a/../mcp"),
        ("http://files/mcp", "http://files/m%63p"),
        ("http://files/mcp", "http://files/mcp%zz"),
        ("http://files", "http://files/"),
        ("http://[::1]/mcp", "http://[::1]:80/mcp"),
        ("http://files:8000/mcp", "https://files:8000/mcp"),
        ("http://files/mcp", "http://files./mcp"),
        ("http://127.0.0.1/mcp", "http://localhost/mcp"),
        ("http://127.0.0.1/mcp", "http://[::1]/mcp"),
        ("http://127.0.0.1/mcp", "http://0.0.0.0/mcp"),
        ("http://127.0.0.1/mcp", "http://127.0.0.1./mcp"),
        ("http://127.0.0.1/mcp", "http://127.1/mcp"),
        ("http://10.1.2.3/mcp", "http://10.1.515/mcp"),
        ("http://10.1.2.3/mcp", "http://010.1.2.3/mcp"),
        ("http://10.1.2.3/mcp", "http://0x0A.1.2.0X3/mcp"),
        ("http://10.1.2.3/mcp", "http://167838211/mcp"),
        ("http://10.1.2.3/mcp", "http://[::ffff:10.1.2.3]/mcp"),
        ("http://[2001:db8::1]/mcp", "http://[2001:0DB8:0:0:0:0:0:1]/mcp"),
    ] {
        for (url, other) in [(url, other), (other, url)] {
            let after = and(url, other);
            let refused = server.replaces("edith", &before(url), &after).await;
            assert!(refused.contains("definitionChanges"), "{url} {other}: {refused}");
            assert_eq!(
                server.replaces("ann", &before(url), &after).await,
                "ok",
                "{url} {other}"
            );
        }
    }
    let url = "http://files/mcp";
    for other in [
        "http://files:8000/mcp",
        "https://files/mcp",
        "http://files2/mcp",
        "http://files/mcp2",
        "http://files/other?x=/mcp",
        "http://10.1.2.3/mcp",
        "http://10.1.2.files/mcp",
        "http://[2001:db8::1]/mcp",
        "http://localhost/mcp",
    ] {
        assert_eq!(
            server.replaces("edith", &before(url), &and(url, other)).await,
            "ok",
            "{other}"
        );
    }
    server.end().await;
}

/// A hosted server for two projects, of which only one has rules. These are fields of the other one.
fn projects(fields: Value) -> Value {
    let url = |project: &str| json!(format!("https://mcp.example.com/mcp?project={project}"));
    let mut other = fields;
    other["name"] = json!("dev");
    other["url"] = url("dev");
    json!({"servers": [
        {
            "name": "prod", "url": url("prod"), "definitionChanges": "Ask",
            "tools": [
                {"name": "drop", "approval": "Always"},
                {"name": "read", "approvalCondition": "arguments.a", "effect": "Destructive", "onUnknownOutcome": "Ask"},
            ],
        },
        other,
    ]})
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_that_have_always_been_at_the_same_place_do_not_hinder_other_changes() {
    let Some(server) = with_tool_rules().await else { return };
    let before = projects(json!({"only": ["a", "b"], "headersSecretRef": {"name": "of-dev"}}));
    let with = |field: &str, value: Value| {
        let mut after = before.clone();
        after["servers"][1][field] = value;
        after
    };
    let mut more = before.clone();
    let third = json!({"name": "third", "url": "http://third/mcp"});
    more["servers"].as_array_mut().unwrap().push(third);
    let mut strengthened = before.clone();
    strengthened["approval"] = json!({"default": "Write"});
    let mut fewer = before.clone();
    fewer["servers"].as_array_mut().unwrap().pop();
    for after in [
        more,
        strengthened,
        fewer,
        with("only", json!(["a"])),
        with("requiredGrant", json!("g")),
        with("tools", json!([{"name": "t", "approval": "Always"}])),
    ] {
        assert_eq!(server.replaces("edith", &before, &after).await, "ok", "{after}");
    }
    // With tools, credentials or a URL that it did not have, it is another server at that place.
    for after in [
        with("only", json!(["a", "drop"])),
        with("only", json!([])),
        with("headersSecretRef", json!({"name": "of-prod"})),
        with("url", json!("https://mcp.example.com/mcp?project=prod")),
        with("name", json!("dev2")),
    ] {
        let refused = server.replaces("edith", &before, &after).await;
        assert!(refused.contains("approval: Always"), "{after}: {refused}");
        assert_eq!(server.replaces("ann", &before, &after).await, "ok", "{after}");
    }
    // Its own rules hold, whatever the other one has.
    let before = projects(json!({"definitionChanges": "Ask"}));
    let refused = server.replaces("edith", &before, &projects(json!({}))).await;
    assert!(refused.contains("definitionChanges"), "{refused}");
    server.end().await;
}
