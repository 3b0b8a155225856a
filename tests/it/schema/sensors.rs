//! Samples for the rules of Sensors.

use serde_json::{Value, json};

use super::budgets::selecting;
use super::samples::{Row, row, with};

/// The smallest Sensor: a clock for one Agent.
pub fn sensor() -> Value {
    json!({
        "apiVersion": "agentloop.dev/v1alpha1",
        "kind": "Sensor",
        "metadata": {"name": "s"},
        "spec": {
            "agentNames": ["x"],
            "source": {"schedule": {"cron": "0 8 * * 1-5"}},
        },
    })
}

/// `sensor` with a change to its spec.
pub fn spec(change: &Value) -> Value {
    with(sensor(), &json!({"spec": change}))
}

/// The rules of Sensors.
pub fn rows() -> Vec<Row> {
    let named = |name: &str| with(sensor(), &json!({"metadata": {"name": name}}));
    let receivers = |names: &Value, selector: &Value| spec(&json!({"agentNames": names, "agentSelector": selector}));
    let zone = |zone: &str| spec(&json!({"source": {"schedule": {"timeZone": zone}}}));
    vec![
        row(
            "metadata.name of a Sensor must be at most 63 characters",
            vec![named(&"a".repeat(63))],
            vec![named(&"a".repeat(64))],
        ),
        row(
            "spec names no receiver: set spec.agentNames, or spec.agentSelector",
            vec![
                receivers(&json!(["a", "b"]), &Value::Null),
                receivers(&Value::Null, &json!({})),
                receivers(&json!([]), &json!({"matchLabels": {"team": "a"}})),
            ],
            vec![
                receivers(&Value::Null, &Value::Null),
                receivers(&json!([]), &Value::Null),
            ],
        ),
        row(
            "spec.source must have exactly one source",
            vec![sensor()],
            vec![spec(&json!({"source": {"schedule": null}}))],
        ),
        row(
            "spec.source.schedule.timeZone must be a name of the IANA time zone database",
            vec![
                zone("UTC"),
                zone("Europe/Berlin"),
                zone("America/Argentina/Buenos_Aires"),
                zone("Etc/GMT+12"),
            ],
            vec![
                zone("+01:00"),
                zone("Europe/"),
                zone("../etc/localtime"),
                zone("Europe Berlin"),
            ],
        ),
        selecting("spec.agentSelector.matchExpressions[].values", |selector| {
            spec(&json!({"agentSelector": selector}))
        }),
    ]
}
