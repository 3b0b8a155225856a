//! The state of Sensors at one moment, from their status: one row for each.
//!
//! Contains no text of a payload.

use crate::api::Sensor;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SensorRow {
    pub namespace: String,
    pub sensor: String,
    /// The type of its source.
    pub source: String,
    /// The URL of its webhook.
    pub url: Option<String>,
    /// Whether it works: `True`, `False` or `Unknown`.
    pub ready: String,
    /// Why it does not work, and how to fix it.
    pub message: Option<String>,
    /// Events accepted, and failures.
    pub counts: (i64, i64),
}

impl SensorRow {
    /// The row of a Sensor, without a URL.
    #[must_use]
    pub fn of(sensor: &Sensor) -> Self {
        let status = sensor.status.clone().unwrap_or_default();
        let ready = status.conditions.iter().find(|condition| condition.type_ == "Ready");
        let broken = ready.filter(|condition| condition.status == "False");
        let message = broken.map(|condition| format!("{}: {}", condition.reason, condition.message));
        Self {
            namespace: sensor.metadata.namespace.clone().unwrap_or_default(),
            sensor: sensor.metadata.name.clone().unwrap_or_default(),
            source: status.r#type.map(|kind| kind.to_string()).unwrap_or_default(),
            url: None,
            ready: ready.map_or_else(|| "Unknown".into(), |condition| condition.status.clone()),
            message,
            counts: (status.totals.events, status.totals.errors),
        }
    }
}
