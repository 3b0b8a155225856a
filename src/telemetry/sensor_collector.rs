//! Metrics of Sensors, read from the controller's cache at each scrape; the counters equal the totals in the status.

use super::exposition::MetricWriter;
use super::families::{PerObject, Samples, SeriesSource, TakeSnapshot, bit, number, write_conditions};
use super::registry::{self, Metric};
use crate::api::Sensor;

/// Writes the series of the Sensors in the cache.
pub struct SensorCollector {
    sensors: TakeSnapshot<Sensor>,
    level: PerObject,
}

impl SensorCollector {
    /// `sensors` takes a snapshot of the Sensors at a scrape.
    #[must_use]
    pub fn new(sensors: TakeSnapshot<Sensor>, level: PerObject) -> Self {
        Self { sensors, level }
    }
}

impl SeriesSource for SensorCollector {
    fn write(&self, out: &mut MetricWriter<'_>) {
        let sensors = (self.sensors)();
        for (metric, write) in FAMILIES.iter().filter(|(metric, _)| self.level.includes(metric)) {
            let mut family = out.family((*metric).into());
            sensors(&mut |sensor| {
                let namespace = sensor.metadata.namespace.as_deref().unwrap_or_default();
                let name = sensor.metadata.name.as_deref().unwrap_or_default();
                write(sensor, &mut Samples::new(&mut family, metric, &[namespace, name]));
            });
        }
    }
}

/// Writes the series of one Sensor in one family.
type WriteSensor = fn(&Sensor, &mut Samples<'_, '_, '_>);

/// The families of Sensors, in the order of their names.
const FAMILIES: &[(&Metric, WriteSensor)] = &[
    (&registry::SENSOR_EVENTS, |sensor, out| {
        let totals = sensor.status.as_ref().map(|status| status.totals).unwrap_or_default();
        for (outcome, count) in [
            ("accepted", totals.events),
            ("filtered", totals.filtered),
            ("dropped", totals.dropped),
            ("refused", totals.refused),
            ("error", totals.errors),
        ] {
            out.put(&[outcome], number(count));
        }
    }),
    (&registry::SENSOR_INFO, |sensor, out| {
        let type_ = sensor.status.as_ref().and_then(|status| status.r#type.as_ref());
        out.put(&[type_.map_or("", AsRef::as_ref)], 1.0);
    }),
    (&registry::SENSOR_LAST_EVENT, |sensor, out| {
        if let Some(at) = sensor.status.as_ref().and_then(|status| status.last_event_time) {
            out.put(&[], number(at.as_second()));
        }
    }),
    (&registry::SENSOR_NOTIFICATIONS, |sensor, out| {
        let notifications = sensor.status.as_ref().map(|status| status.totals.notifications);
        out.put(&[], number(notifications.unwrap_or_default()));
    }),
    (&registry::SENSOR_PENDING, |sensor, out| {
        if let Some(pending) = sensor.status.as_ref().and_then(|status| status.pending_deliveries) {
            out.put(&[], number(pending));
        }
    }),
    (&registry::SENSOR_SUSPENDED, |sensor, out| {
        out.put(&[], bit(sensor.spec.suspend));
    }),
    (&registry::SENSOR_CONDITION, |sensor, out| {
        let status = sensor.status.as_ref();
        write_conditions(status.map_or(&[], |status| &status.conditions), out);
    }),
    (&registry::SENSOR_UPDATES, |sensor, out| {
        let updates = sensor.status.as_ref().map(|status| status.totals.updates);
        out.put(&[], number(updates.unwrap_or_default()));
    }),
];
