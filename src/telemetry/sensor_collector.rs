//! Metrics of Sensors, read from the controller's cache at each scrape; the counters equal the totals in the status.

use kube::ResourceExt;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;

use super::families::{MetricFamilies, bit, number};
use super::registry::{self, Metric, MetricSource};
use crate::api::Sensor;
use crate::api::sensor::SensorStatus;

/// The conditions that the controller writes.
const CONDITIONS: [&str; 5] = ["Ready", "Accepted", "Suspended", "Connected", "Durable"];

/// Calls its argument with each Sensor in the cache.
type ForEachSensor = Box<dyn Fn(&mut dyn FnMut(&Sensor)) + Send + Sync>;

/// Collects the Sensors in the cache at each scrape.
pub struct SensorCollector {
    for_each: ForEachSensor,
    descriptions: Vec<Desc>,
}

impl SensorCollector {
    /// `for_each` visits the Sensors at the time of a scrape.
    pub fn new(for_each: impl Fn(&mut dyn FnMut(&Sensor)) + Send + Sync + 'static) -> prometheus::Result<Self> {
        let metrics = registry::ALL
            .iter()
            .filter(|metric| metric.source == MetricSource::Sensors);
        Ok(Self {
            for_each: Box::new(for_each),
            descriptions: metrics.map(Metric::desc).collect::<Result<_, _>>()?,
        })
    }
}

impl Collector for SensorCollector {
    fn desc(&self) -> Vec<&Desc> {
        self.descriptions.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let mut families = MetricFamilies::default();
        (self.for_each)(&mut |sensor| sensor_series(&mut families, sensor));
        families.into_all()
    }
}

fn sensor_series(families: &mut MetricFamilies, sensor: &Sensor) {
    let (namespace, name) = (sensor.namespace().unwrap_or_default(), sensor.name_any());
    let id = [namespace.as_str(), name.as_str()];
    families.put(&registry::SENSOR_SUSPENDED, &id, bit(sensor.spec.suspend));
    let none = SensorStatus::default();
    let status = sensor.status.as_ref().unwrap_or(&none);
    let type_ = status.r#type.as_ref().map_or("", AsRef::as_ref);
    families.put(&registry::SENSOR_INFO, &[id[0], id[1], type_], 1.0);
    let totals = status.totals;
    for (outcome, count) in [
        ("accepted", totals.events),
        ("filtered", totals.filtered),
        ("dropped", totals.dropped),
        ("refused", totals.refused),
        ("error", totals.errors),
    ] {
        families.put(&registry::SENSOR_EVENTS, &[id[0], id[1], outcome], number(count));
    }
    families.put(&registry::SENSOR_UPDATES, &id, number(totals.updates));
    families.put(&registry::SENSOR_NOTIFICATIONS, &id, number(totals.notifications));
    if let Some(pending) = status.pending_deliveries {
        families.put(&registry::SENSOR_PENDING, &id, number(pending));
    }
    if let Some(at) = status.last_event_time {
        families.put(&registry::SENSOR_LAST_EVENT, &id, number(at.as_second()));
    }
    for condition in &status.conditions {
        if !CONDITIONS.contains(&condition.type_.as_str()) {
            continue;
        }
        for (label, status) in [("true", "True"), ("false", "False"), ("unknown", "Unknown")] {
            let labels = [id[0], id[1], condition.type_.as_str(), label];
            families.put(&registry::SENSOR_CONDITION, &labels, bit(condition.status == status));
        }
    }
}
