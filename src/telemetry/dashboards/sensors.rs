//! The dashboard *Sensors*: events from their source to the loops.

use super::dashboard::{Dashboard, DashboardVariable};
use super::panel::{DashboardPanel, PanelUnit, TableColumn, panel_query};
use super::query::{increase, or_zero, per_minute, rate, select, select_with, sum_by, total};
use crate::telemetry::registry;

/// Labels of a Sensor.
const SENSOR: &str = "namespace, sensor";

pub fn board() -> Dashboard {
    Dashboard {
        name: "sensors",
        title: "agentloop / Sensors",
        description: "Events of Sensors: received, filtered, delivered, and waiting. Most panels require `metrics.perObject: Full`.",
        variables: vec![
            DashboardVariable::namespace(&registry::SENSOR_INFO),
            DashboardVariable::in_namespace("sensor", "Sensor", &registry::SENSOR_INFO),
        ],
        annotations: Vec::new(),
        rows: vec![("Now", now()), ("Events", events())],
    }
}

fn now() -> Vec<DashboardPanel> {
    let not_ready = select_with(&registry::SENSOR_CONDITION, "condition=\"Ready\",status!=\"true\"");
    let waiting = total(&select(&registry::SENSOR_PENDING));
    vec![
        DashboardPanel::stat(
            "Sensors",
            PanelUnit::Count,
            "Number of Sensors.",
            total(&select(&registry::SENSOR_INFO)),
        ),
        DashboardPanel::warning(
            "Not ready",
            "Sensors whose condition Ready is not true, as for the alert AgentloopSensorNotReady.",
            or_zero(&total(&not_ready), &registry::SENSOR_CONDITION),
            1.0,
        ),
        DashboardPanel::warning(
            "Suspended",
            "Sensors whose spec.suspend is true.",
            total(&select(&registry::SENSOR_SUSPENDED)),
            1.0,
        ),
        DashboardPanel::warning(
            "Waiting for receivers",
            "Events in outboxes that some receiver has not acknowledged.",
            or_zero(&waiting, &registry::SENSOR_SUSPENDED),
            1.0,
        ),
        DashboardPanel::table(
            "Events by Sensor",
            "What each Sensor has received in the time shown, and when the last event was accepted.",
            vec![
                TableColumn {
                    title: "Events",
                    query: sum_by(SENSOR, &increase(&registry::SENSOR_EVENTS)),
                    unit: PanelUnit::Count,
                },
                TableColumn {
                    title: "Last event",
                    query: format!("{} * 1000", select(&registry::SENSOR_LAST_EVENT)),
                    unit: PanelUnit::Timestamp,
                },
            ],
        ),
    ]
}

fn events() -> Vec<DashboardPanel> {
    vec![
        DashboardPanel::stacked(
            "Events",
            PanelUnit::PerMinute,
            "Received events per minute by outcome.",
            vec![panel_query(
                per_minute("outcome", &registry::SENSOR_EVENTS),
                "{{outcome}}",
            )],
        ),
        DashboardPanel::lines(
            "Effects",
            PanelUnit::PerMinute,
            "Fields of hot states written and notifications given per minute.",
            vec![
                panel_query(format!("sum({}) * 60", rate(&registry::SENSOR_UPDATES)), "fields"),
                panel_query(
                    format!("sum({}) * 60", rate(&registry::SENSOR_NOTIFICATIONS)),
                    "notifications",
                ),
            ],
        ),
        DashboardPanel::lines(
            "Time since the last event",
            PanelUnit::Seconds,
            "Time since each Sensor accepted its last event.",
            vec![panel_query(
                format!("time() - {}", select(&registry::SENSOR_LAST_EVENT)),
                "{{namespace}}/{{sensor}}",
            )],
        ),
    ]
}
