//! Metric families that are built at each scrape from the caches.

use std::collections::HashMap;

use prometheus::proto::{Counter, Gauge, LabelPair, Metric as Sample, MetricFamily, MetricType, Summary};

use super::registry::{Metric, MetricKind};

/// The metric families of one scrape, by name.
#[derive(Default)]
pub(super) struct MetricFamilies(HashMap<&'static str, MetricFamily>);

impl MetricFamilies {
    pub(super) fn put(&mut self, metric: &Metric, labels: &[&str], value: f64) {
        let mut sample = labelled(metric, labels);
        if metric.kind == MetricKind::Counter {
            let mut counter = Counter::default();
            counter.set_value(value);
            sample.set_counter(counter);
        } else {
            let mut gauge = Gauge::default();
            gauge.set_value(value);
            sample.set_gauge(gauge);
        }
        self.family(metric).mut_metric().push(sample);
    }

    /// Adds the sum and count of a summary.
    pub(super) fn put_summary(&mut self, metric: &Metric, labels: &[&str], (sum, count): (f64, u64)) {
        let mut summary = Summary::default();
        summary.set_sample_sum(sum);
        summary.set_sample_count(count);
        let mut sample = labelled(metric, labels);
        sample.set_summary(summary);
        self.family(metric).mut_metric().push(sample);
    }

    fn family(&mut self, metric: &Metric) -> &mut MetricFamily {
        self.0.entry(metric.name).or_insert_with(|| {
            let mut family = MetricFamily::default();
            family.set_name(metric.name.into());
            family.set_help(metric.help.into());
            family.set_field_type(match metric.kind {
                MetricKind::Counter => MetricType::COUNTER,
                MetricKind::Gauge => MetricType::GAUGE,
                MetricKind::Histogram => MetricType::HISTOGRAM,
                MetricKind::Summary => MetricType::SUMMARY,
            });
            family
        })
    }

    pub(super) fn into_all(self) -> Vec<MetricFamily> {
        self.0.into_values().collect()
    }
}

fn labelled(metric: &Metric, labels: &[&str]) -> Sample {
    let pairs = metric.labels.iter().zip(labels).map(|(name, value)| {
        let mut pair = LabelPair::default();
        pair.set_name((*name).into());
        pair.set_value((*value).into());
        pair
    });
    Sample::from_label(pairs.collect())
}

/// Prometheus has only floating-point numbers; they are exact up to 2^53.
#[allow(clippy::cast_precision_loss)]
pub(super) fn number(value: i64) -> f64 {
    value as f64
}

/// 1 for true, 0 for false.
pub(super) fn bit(value: bool) -> f64 {
    if value { 1.0 } else { 0.0 }
}
