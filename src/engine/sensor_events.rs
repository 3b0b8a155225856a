//! Events of Sensors in the loop: the values, notifications and wakes of one event at a time.
//!
//! An event is applied completely in one step, so that it is journalled completely. The caller must feed each event
//! once.

use jiff::Timestamp;
use serde_json::Value;

use super::RecordKind;
use super::effects::{EffectBuffer, journal_line};
use super::machine::Engine;
use super::notifications::{self, Notification, NotificationOrigin, NotificationPriority};
use super::tasks::{TaskOffer, TaskOrigin};
use super::turn::Turn;

/// The source of untrusted content from Sensors; with the name of the Sensor, if that is known.
const SENSOR: &str = "sensor";

/// Prefix of a task that is shown as a notification.
const TASK_PREFIX: &str = "Task: ";

/// One event of a Sensor.
#[derive(Clone, Debug, PartialEq)]
pub struct SensedEvent {
    /// The same for each delivery of the event, and unique to it.
    pub id: String,
    /// Name of the Sensor.
    pub sensor: String,
    /// When the event occurred.
    pub at: Timestamp,
    /// Fields of the hot state and their new values. Each is accepted or refused separately.
    pub updates: Vec<(String, Value)>,
    /// The notifications for the model.
    pub notices: Vec<SensedNotification>,
    /// Names of events that `wake_early_if` can contain.
    pub wakes: Vec<String>,
}

/// A notification of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SensedNotification {
    /// Its event, such as `sensor/prices`.
    pub source: String,
    /// How urgent it is.
    pub priority: NotificationPriority,
    /// Data, never an instruction.
    pub text: String,
    /// It is a task. In a mode without tasks it is a notification.
    pub is_task: bool,
}

impl Engine {
    /// Whether the engine accepts inputs: the loop is up or stopping.
    #[must_use]
    pub fn accepts_input(&self) -> bool {
        !self.fenced && self.is_live()
    }

    /// Whether the engine accepts events of the Sensor of this name.
    #[must_use]
    pub fn accepts_events_of(&self, sensor: &str) -> bool {
        let origin = || TaskOrigin::Sensor(sensor.to_owned());
        self.accepts_input() && (!self.runs_tasks() || self.accepts_task_of(&origin()))
    }

    /// Whether the engine accepts events of a Sensor of which no task waits.
    #[must_use]
    pub fn accepts_events_beyond(&self) -> bool {
        self.accepts_input() && (!self.runs_tasks() || self.accepts_tasks_beyond())
    }

    /// Restores a value that a Sensor set before this process began, with its age. A value that does not fit the schema
    /// is skipped.
    pub fn restore_field(&mut self, field: &str, value: Value, at: Timestamp) {
        if self.hot.write(field, value, at).is_ok() {
            self.hot.set_untrusted(field, SENSOR.to_owned());
        }
    }

    pub(super) fn receive_event(&mut self, event: SensedEvent, out: &mut EffectBuffer) {
        let (fields, notices) = (event.updates.len(), event.notices.len());
        let note = format!("{}: {fields} fields, {notices} notifications", event.sensor);
        out.record(journal_line(RecordKind::SensorUpdated, self.turn_number(), note));
        let at = event.at.min(out.now);
        for (field, value) in event.updates {
            self.write_field(&field, value, at, Some(format!("{SENSOR}/{}", event.sensor)), out);
        }
        let notified_sources: Vec<String> = event.notices.iter().map(|notice| notice.source.clone()).collect();
        for (place, notice) in event.notices.into_iter().enumerate() {
            if notice.is_task && self.runs_tasks() {
                let offer = TaskOffer {
                    id: format!("{}/{place}", event.id),
                    origin: TaskOrigin::Sensor(event.sensor.clone()),
                    prompt: notice.text,
                    untrusted: None,
                };
                self.accept_task(offer, out);
                continue;
            }
            let notification = Notification {
                id: format!("{}/{place}", event.id),
                source: notice.source,
                priority: notice.priority,
                text: if notice.is_task {
                    format!("{TASK_PREFIX}{}", notice.text)
                } else {
                    notice.text
                },
                at,
            };
            self.receive_notification(&notification, NotificationOrigin::Sensor, out);
        }
        for name in event.wakes.iter().filter(|name| !notified_sources.contains(name)) {
            self.wake_on_event(name, out);
        }
    }

    pub(super) fn sensor_failed(&mut self, sensor: &str, out: &mut EffectBuffer) {
        out.record(journal_line(RecordKind::SensorFailed, self.turn_number(), sensor));
    }

    /// A notification arrived, for the first time or again.
    pub(super) fn receive_notification(
        &mut self,
        notification: &Notification,
        origin: NotificationOrigin,
        out: &mut EffectBuffer,
    ) {
        let shown = self.state.turn.as_ref().map(Turn::shown);
        let Some(received) = self.state.inbox.receive(notification, origin, shown) else {
            return;
        };
        let priority = notification.priority;
        out.record(journal_line(
            RecordKind::Notified,
            self.turn_number(),
            priority.as_ref(),
        ));
        if received.dropped > 0 {
            let note = format!("{} dropped", received.dropped);
            out.record(journal_line(RecordKind::NotificationDropped, self.turn_number(), note));
        }
        if !received.waits {
            return;
        }
        self.hasten_next_turn(out.now);
        if priority == NotificationPriority::High {
            self.wake_on_urgent(out);
        } else {
            self.wake_on_event(&received.source, out);
            self.wake_on_event(notifications::EVENT, out);
        }
    }
}
