//! Families of series about objects, and how they are written from the caches at each scrape.

use std::str::FromStr as _;

use clap::ValueEnum;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::exposition::{Exemplar, FamilyWriter, MetricWriter};
use super::registry::Metric;
use crate::api::condition::ConditionType;

/// Most labels of a metric.
const MAX_LABELS: usize = 5;

/// Which series of single objects are exported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "PascalCase")]
pub enum PerObject {
    /// All.
    #[default]
    Full,
    /// State, usage, cost and limits.
    Minimal,
    /// None: only the sums of each namespace.
    Disabled,
}

impl PerObject {
    /// Whether this metric of single objects is exported.
    #[must_use]
    pub fn includes(self, metric: &Metric) -> bool {
        match self {
            Self::Full => true,
            Self::Minimal => metric.is_minimal(),
            Self::Disabled => false,
        }
    }
}

/// Something that has series, read at each scrape.
pub trait SeriesSource: Send + Sync {
    /// Writes all families, one after the other.
    fn write(&self, out: &mut MetricWriter<'_>);
}

/// Calls its argument with each object of one snapshot, as often as it is called.
pub type ObjectVisitor<T> = Box<dyn Fn(&mut dyn FnMut(&T)) + Send>;

/// Takes a snapshot of the objects in a cache: every family of a scrape shows the same ones.
pub type TakeSnapshot<T> = Box<dyn Fn() -> ObjectVisitor<T> + Send + Sync>;

/// Writes the samples of one object in one family.
pub(super) struct Samples<'f, 'w, 'a> {
    family: &'f mut FamilyWriter<'w, 'a>,
    metric: &'static Metric,
    /// Namespace and name of the object, or its namespace.
    base: &'f [&'f str],
}

impl<'f, 'w, 'a> Samples<'f, 'w, 'a> {
    pub(super) fn new(family: &'f mut FamilyWriter<'w, 'a>, metric: &'static Metric, base: &'f [&'f str]) -> Self {
        Self { family, metric, base }
    }

    /// Writes one sample. `more` are the values of the labels after those of the object.
    pub(super) fn put(&mut self, more: &[&str], value: f64) {
        self.put_with(more, value, None);
    }

    /// Writes one sample of a counter with an exemplar.
    pub(super) fn put_with(&mut self, more: &[&str], value: f64, exemplar: Option<&Exemplar>) {
        let (labels, count) = self.labels(more);
        self.family.value(&labels[..count], value, exemplar);
    }

    fn labels<'l>(&self, more: &'l [&'l str]) -> ([(&'static str, &'l str); MAX_LABELS], usize)
    where
        'f: 'l,
    {
        let mut labels = [("", ""); MAX_LABELS];
        let values = self.base.iter().chain(more);
        let mut count = 0;
        for ((label, name), value) in labels.iter_mut().zip(self.metric.labels).zip(values) {
            *label = (name, value);
            count += 1;
        }
        (labels, count)
    }
}

/// Writes the conditions of an object: one series each, those other than `Ready` only while they are not False. Those
/// of other writers are skipped, because they would make the label unbounded.
pub(super) fn write_conditions(conditions: &[Condition], out: &mut Samples<'_, '_, '_>) {
    let ready = ConditionType::Ready.as_ref();
    let mut is_ready_known = false;
    for condition in conditions {
        if ConditionType::from_str(&condition.type_).is_err() {
            continue;
        }
        let is_ready = condition.type_ == ready;
        is_ready_known |= is_ready;
        let status = match condition.status.as_str() {
            "True" => "true",
            "False" => "false",
            _ => "unknown",
        };
        if is_ready || status != "false" {
            out.put(&[&condition.type_, status], 1.0);
        }
    }
    if !is_ready_known {
        out.put(&[ready, "unknown"], 1.0);
    }
}

/// Prometheus has only floating-point numbers; they are exact up to 2^53.
#[allow(clippy::cast_precision_loss)]
pub(super) fn number(value: i64) -> f64 {
    value as f64
}

/// Millionths of a US dollar in dollars.
pub(super) fn dollars(micro: i64) -> f64 {
    number(micro) / 1e6
}

/// 1 for true, 0 for false.
pub(super) fn bit(value: bool) -> f64 {
    if value { 1.0 } else { 0.0 }
}
