//! Events of a Sensor of which a test needs one part.

use jiff::Timestamp;
use serde_json::Value;

use super::{Effect, Input, RecordKind};
use crate::engine::notifications::Notification;
use crate::engine::sensors::{Notice, Sensed};

/// An event of this name.
pub(super) fn happens(name: &str) -> Input {
    Input::Sensed(Sensed {
        wakes: vec![name.into()],
        ..event_of("event", Timestamp::MAX)
    })
}

/// A value for a field of the hot state, as of now.
pub(super) fn value_of(field: &str, value: Value) -> Input {
    Input::Sensed(Sensed {
        updates: vec![(field.into(), value)],
        ..event_of("event", Timestamp::MAX)
    })
}

/// A notification.
pub(super) fn notified(notification: Notification) -> Input {
    let Notification {
        id,
        source,
        priority,
        text,
        at,
    } = notification;
    Input::Sensed(Sensed {
        notices: vec![Notice { source, priority, text }],
        ..event_of(&id, at)
    })
}

/// An event of a Sensor that does nothing. One of a later moment is of now.
fn event_of(id: &str, at: Timestamp) -> Sensed {
    Sensed {
        id: id.into(),
        sensor: "outside".into(),
        at,
        updates: Vec::new(),
        notices: Vec::new(),
        wakes: Vec::new(),
    }
}

/// What an event did, but for the line that it came.
pub(super) fn without_its_line(effects: Vec<Effect>) -> Vec<Effect> {
    let came = |effect: &Effect| matches!(effect, Effect::Record(record) if record.kind == RecordKind::SensorUpdated);
    effects.into_iter().filter(|effect| !came(effect)).collect()
}
