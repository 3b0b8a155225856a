//! The board *Sensors*: events from their source to the loops.

use super::board::{Board, Variable};
use super::panel::{Column, Panel, Unit, target};
use super::query::{increase, per_minute, rate, select, select_with, sum_by, total};
use crate::telemetry::registry;

/// Labels of a Sensor.
const SENSOR: &str = "namespace, sensor";

pub fn board() -> Board {
    Board {
        name: "sensors",
        title: "agentloop / Sensors",
        description: "Events of Sensors: received, filtered, delivered, and waiting.",
        variables: vec![
            Variable::namespace(&registry::SENSOR_INFO),
            Variable::in_namespace("sensor", "Sensor", &registry::SENSOR_INFO),
        ],
        annotations: Vec::new(),
        rows: vec![("Now", now()), ("Events", events())],
    }
}

fn now() -> Vec<Panel> {
    vec![
        Panel::stat(
            "Sensors",
            Unit::Count,
            "Number of Sensors.",
            total(&select(&registry::SENSOR_INFO)),
        ),
        Panel::warning(
            "Not ready",
            "Sensors whose condition Ready is false.",
            total(&select_with(
                &registry::SENSOR_CONDITION,
                "condition=\"Ready\",status=\"false\"",
            )),
            1.0,
        ),
        Panel::warning(
            "Suspended",
            "Sensors whose spec.suspend is true.",
            total(&select(&registry::SENSOR_SUSPENDED)),
            1.0,
        ),
        Panel::warning(
            "Waiting for receivers",
            "Events in outboxes that some receiver has not acknowledged.",
            total(&select(&registry::SENSOR_PENDING)),
            1.0,
        ),
        Panel::table(
            "Events by Sensor",
            "What each Sensor has received in the time shown, and when the last event was accepted.",
            vec![
                Column {
                    title: "Events",
                    query: sum_by(SENSOR, &increase(&registry::SENSOR_EVENTS)),
                    unit: Unit::Count,
                },
                Column {
                    title: "Last event",
                    query: format!("max by ({SENSOR}) ({}) * 1000", select(&registry::SENSOR_LAST_EVENT)),
                    unit: Unit::Moment,
                },
            ],
        ),
    ]
}

fn events() -> Vec<Panel> {
    vec![
        Panel::stacked(
            "Events",
            Unit::PerMinute,
            "Received events per minute by outcome.",
            vec![target(per_minute("outcome", &registry::SENSOR_EVENTS), "{{outcome}}")],
        ),
        Panel::lines(
            "Effects",
            Unit::PerMinute,
            "Fields of hot states written and notifications given per minute.",
            vec![
                target(format!("sum({}) * 60", rate(&registry::SENSOR_UPDATES)), "fields"),
                target(
                    format!("sum({}) * 60", rate(&registry::SENSOR_NOTIFICATIONS)),
                    "notifications",
                ),
            ],
        ),
        Panel::lines(
            "Time since the last event",
            Unit::Seconds,
            "Time since each Sensor accepted its last event.",
            vec![target(
                format!("time() - {}", select(&registry::SENSOR_LAST_EVENT)),
                "{{namespace}}/{{sensor}}",
            )],
        ),
    ]
}
