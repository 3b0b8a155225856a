//! The errors of sources and expressions, and the mistakes in specs of Sensors, as users read them.

use agentloop_texts::TextRows;
use serde_json::{Value, json};

use super::expression::ExpressionError;
use super::source::webhook::signature::SignatureError;

/// Specs of Sensors with one mistake each.
fn mistakes() -> Vec<Value> {
    let schedule = json!({"schedule": {"cron": "0 8 * * *"}});
    let poll = |url: &str| json!({"poll": {"http": {"url": url}}});
    let when = |expression: &str| json!({"source": schedule, "signals": [{"name": "s", "when": expression}]});
    let update = |expression: &str| json!({"source": schedule, "updates": [{"field": "f", "value": expression}]});
    vec![
        json!({"source": {"schedule": {"cron": "0 8 31 2 *"}}}),
        json!({"source": {"schedule": {"cron": "61 8 * * *"}}}),
        json!({"source": {"schedule": {"cron": "0 8 * * *", "timeZone": "Mars/Base"}}}),
        json!({"source": poll("https://user:password@example.com/")}),
        json!({"source": poll("https://example.com/#top")}),
        json!({"source": poll("https://")}),
        json!({"source": {"watch": {"path": "../inbox"}}}),
        json!({"source": {"watch": {"path": "/inbox"}}}),
        when("payload.price >"),
        when("payload.price > 3 'a'"),
        when("price > 3"),
        when("has(payload)"),
        when("payload.filter(1, true)"),
        when("'a'.unknown()"),
        when("size(1, 2)"),
        when("payload.text.matches(payload.pattern)"),
        when("payload.text.matches('(')"),
        when("b'bytes' == payload"),
        update("Struct{}"),
        update("payload[9999999999999999999]"),
        update("(((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((payload)))))"),
    ]
}

#[test]
fn the_texts_of_sensors() {
    let mut rows: TextRows = Vec::new();
    for mut spec in mistakes() {
        spec["agentNames"] = json!(["a"]);
        let mistake = super::check(&serde_json::from_value(spec.clone()).unwrap());
        let mistake = mistake
            .err()
            .map_or_else(|| panic!("{spec} is valid"), |mistake| mistake.to_string());
        let (field, detail) = mistake.split_once(": ").unwrap();
        rows.push(text!("Mistakes in a spec", field, detail));
    }
    rows.extend(variants!(
        "Evaluation of an expression",
        [
            ExpressionError::TooCostly,
            ExpressionError::Missing,
            ExpressionError::Types,
            ExpressionError::Other,
        ]
    ));
    rows.extend(variants!(
        "Refused webhook requests",
        [
            SignatureError::Missing,
            SignatureError::Wrong,
            SignatureError::Replayed,
            SignatureError::Key,
        ]
    ));
    assert_texts!(
        "sensor-pipeline",
        "Mistakes in specs of Sensors, and errors of their sources",
        rows
    );
}
