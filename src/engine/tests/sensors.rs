//! Events of Sensors: applied completely, always journalled, with the time at which they occurred.

use serde_json::{Value, json};

use super::super::hot_state::FieldSchema;
use super::super::notifications::NotificationPriority;
use super::super::sensor_events::{SensedEvent, SensedNotification};
use super::*;
use agentloop_api::hot_state::FieldType;

fn event(seq: u32, updates: Vec<(&str, Value)>, notices: &[(&str, NotificationPriority)]) -> EngineInput {
    EngineInput::Sensed(SensedEvent {
        id: format!("uid/{seq}"),
        sensor: "prices".into(),
        at: "2026-01-01T00:00:00Z".parse().unwrap(),
        updates: updates
            .into_iter()
            .map(|(field, value)| (field.into(), value))
            .collect(),
        notices: notices
            .iter()
            .map(|(source, priority)| SensedNotification {
                is_task: false,
                source: (*source).into(),
                priority: *priority,
                text: format!("news {seq}."),
            })
            .collect(),
        wakes: vec!["sensor/prices".into(), "signal/prices/spike".into()],
    })
}

fn with_field() -> EngineSettings {
    EngineSettings {
        hot_state: vec![FieldSchema {
            name: "last".into(),
            kind: FieldType::Number,
            ttl: Some(seconds(30)),
            max_items: None,
            refresh_tool: None,
        }],
        ..settings()
    }
}

fn asleep(wake_early_if: &str) -> Driver {
    let mut driver = Driver::started(settings());
    driver.answer(calls(
        "yield",
        &format!(r#"{{"sleep": 600, "wake_early_if": ["{wake_early_if}"]}}"#),
    ));
    assert_eq!(driver.state(), LoopState::Sleeping);
    driver
}

fn block(driver: &Driver) -> &str {
    driver.block.as_deref().unwrap_or_default()
}

#[test]
fn an_event_writes_fields_and_adds_notifications_in_one_step() {
    let mut driver = Driver::started(with_field());
    driver.feed(event(
        1,
        vec![("last", json!(7)), ("unknown", json!(1))],
        &[("sensor/prices", NotificationPriority::Normal)],
    ));
    assert_eq!(
        driver.notes(RecordKind::SensorUpdated),
        ["prices: 2 fields, 1 notifications"]
    );
    driver.turn();
    driver.answer(calls("yield", "nonsense"));
    assert!(block(&driver).contains("news 1."), "{}", block(&driver));
    assert!(block(&driver).contains('7'), "{}", block(&driver));
}

#[test]
fn an_event_without_effect_is_journalled_too_so_that_its_number_is_kept() {
    let mut driver = Driver::started(settings());
    driver.feed(event(1, Vec::new(), &[]));
    assert_eq!(
        driver.notes(RecordKind::SensorUpdated),
        ["prices: 0 fields, 0 notifications"]
    );
}

#[test]
fn each_name_of_an_event_ends_a_sleep_that_waits_for_it_and_no_other() {
    for (wanted, notices) in [
        ("sensor/prices", &[][..]),
        ("prices", &[]),
        ("spike", &[]),
        (
            "signal/prices/spike",
            &[("signal/prices/spike", NotificationPriority::Low)],
        ),
        ("sensor/prices", &[("signal/prices/spike", NotificationPriority::Low)]),
        ("notification", &[("sensor/prices", NotificationPriority::Normal)]),
        ("nothing", &[("sensor/prices", NotificationPriority::High)]),
    ] {
        let mut driver = asleep(wanted);
        driver.feed(event(1, Vec::new(), notices));
        assert_eq!(driver.state(), LoopState::Running, "{wanted}");
    }
    for (wanted, notices) in [
        ("nothing", &[("sensor/prices", NotificationPriority::Normal)][..]),
        ("notification", &[]),
    ] {
        let mut driver = asleep(wanted);
        driver.feed(event(1, Vec::new(), notices));
        assert_eq!(driver.state(), LoopState::Sleeping, "{wanted}");
    }
}

#[test]
fn a_recalled_value_has_its_age_and_values_invalid_by_the_schema_are_skipped() {
    let mut driver = Driver::fresh(with_field());
    let at: Timestamp = "2025-12-31T23:00:00Z".parse().unwrap();
    driver.engine.restore_field("last", json!(7), at);
    driver.engine.restore_field("last", json!("text"), at);
    driver.engine.restore_field("unknown", json!(7), at);
    driver.start(1);
    assert!(
        block(&driver).contains('7') && block(&driver).contains("stale"),
        "{}",
        block(&driver)
    );
    assert!(driver.notes(RecordKind::HotStateRefused).is_empty());
}

#[test]
fn a_sensor_that_fails_is_journalled_by_its_name() {
    let mut driver = Driver::started(settings());
    driver.feed(EngineInput::SensorFailed {
        sensor: "prices".into(),
    });
    assert_eq!(driver.notes(RecordKind::SensorFailed), ["prices"]);
}

#[test]
fn a_loop_that_is_not_running_accepts_no_input() {
    let mut driver = Driver::fresh(settings());
    assert!(!driver.engine.accepts_input());
    driver.start(1);
    assert!(driver.engine.accepts_input());
    driver.feed(EngineInput::Stop {
        cause: StopCause::Fenced,
    });
    assert!(!driver.engine.accepts_input());
}
