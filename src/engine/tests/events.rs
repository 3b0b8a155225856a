//! Sensor events with the parts that a test needs.

use super::{Driver, resume};
use jiff::Timestamp;
use serde_json::Value;

use super::{EngineEffect, EngineInput, RecordKind};
use crate::notifications::Notification;
use crate::sensor_events::{SensedEvent, SensedNotification};

/// An event of this name.
pub(super) fn happens(name: &str) -> EngineInput {
    EngineInput::Sensed(SensedEvent {
        wakes: vec![name.into()],
        ..event_of("event", Timestamp::MAX)
    })
}

/// A value for a field of the hot state, as of now.
pub(super) fn value_of(field: &str, value: Value) -> EngineInput {
    EngineInput::Sensed(SensedEvent {
        updates: vec![(field.into(), value)],
        ..event_of("event", Timestamp::MAX)
    })
}

/// A notification.
pub(super) fn notified(notification: Notification) -> EngineInput {
    let Notification {
        id,
        source,
        priority,
        text,
        at,
    } = notification;
    EngineInput::Sensed(SensedEvent {
        notices: vec![SensedNotification {
            source,
            priority,
            text,
            is_task: false,
        }],
        ..event_of(&id, at)
    })
}

/// An event of a Sensor that does nothing. A later time is replaced by the current one.
fn event_of(id: &str, at: Timestamp) -> SensedEvent {
    SensedEvent {
        id: id.into(),
        sensor: "outside".into(),
        at,
        updates: Vec::new(),
        notices: Vec::new(),
        wakes: Vec::new(),
    }
}

/// The effects of an event, except for the record of its arrival.
pub(super) fn without_its_line(effects: Vec<EngineEffect>) -> Vec<EngineEffect> {
    let came = |effect: &EngineEffect| matches!(effect, EngineEffect::Record(record) if record.kind == RecordKind::SensorUpdated);
    effects.into_iter().filter(|effect| !came(effect)).collect()
}

/// Inputs that must not end a pause that is not theirs.
pub(super) fn try_everything_but(driver: &mut Driver, resume_too: bool) {
    driver.feed(EngineInput::WakeRequested { token: "w".into() });
    driver.feed(happens("chat"));
    driver.feed(EngineInput::LinkBack);
    driver.feed(EngineInput::Timer);
    if resume_too {
        resume(driver, "r");
    }
}
