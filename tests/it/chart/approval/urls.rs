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
    ] {
        assert_eq!(
            server.replaces("edith", &before(url), &and(url, other)).await,
            "ok",
            "{other}"
        );
    }
    server.end().await;
}
