//! Samples of a walk over all families as data points of OTLP, by the rules for compatibility with Prometheus.

use jiff::Timestamp;

use super::exposition::{Exemplar, FamilyHead, Labels, SampleTarget};
use super::log_export::bytes;
use super::registry::MetricKind;
use crate::otlp::{HistogramPoint, MetricPoints, PointExemplar, PointHead, PointKind};

/// Writes data points.
pub(super) struct PointTarget<'m, 'p> {
    points: &'m mut MetricPoints<'p>,
    /// When the process began to count.
    since: Timestamp,
}

impl<'m, 'p> PointTarget<'m, 'p> {
    pub(super) fn new(points: &'m mut MetricPoints<'p>, since: Timestamp) -> Self {
        Self { points, since }
    }

    /// Names stay as they are; units are abbreviated.
    fn head<'a>(&self, head: FamilyHead<'a>) -> PointHead<'a> {
        let unit = match head.unit() {
            Some("seconds") => "s",
            Some("bytes") => "By",
            Some(other) => other,
            None => "",
        };
        PointHead {
            name: head.name,
            description: head.help,
            unit,
            kind: match head.kind {
                MetricKind::Counter => PointKind::Counter,
                MetricKind::Gauge if head.name.ends_with("_info") => PointKind::Info,
                MetricKind::Gauge => PointKind::Gauge,
                MetricKind::Histogram => PointKind::Histogram,
                MetricKind::Summary => PointKind::Summary,
            },
            since: head.is_of_process.then_some(self.since),
        }
    }
}

impl SampleTarget for PointTarget<'_, '_> {
    fn is_open(&self) -> bool {
        self.points.is_open()
    }

    fn value(&mut self, head: FamilyHead<'_>, labels: &Labels<'_>, value: f64, exemplar: Option<&Exemplar>) {
        let head = self.head(head);
        self.points.number(head, labels, value, exemplar.and_then(to_point));
    }

    fn summary(&mut self, head: FamilyHead<'_>, labels: &Labels<'_>, sum: f64, count: u64) {
        let head = self.head(head);
        self.points.summary(head, labels, sum, count);
    }

    fn histogram(
        &mut self,
        head: FamilyHead<'_>,
        labels: &Labels<'_>,
        buckets: &[(f64, u64, Option<Exemplar>)],
        (sum, count): (f64, u64),
    ) {
        let head = self.head(head);
        let bounded = buckets.iter().filter(|(bound, ..)| bound.is_finite());
        let exemplars = buckets.iter().filter_map(|(.., exemplar)| to_point(exemplar.as_ref()?));
        let histogram = HistogramPoint {
            bounds: bounded.clone().map(|(bound, ..)| *bound).collect(),
            cumulative: bounded.map(|(_, cumulative, _)| *cumulative).collect(),
            sum,
            count,
            exemplars: exemplars.collect(),
        };
        self.points.histogram(head, labels, histogram);
    }
}

fn to_point(exemplar: &Exemplar) -> Option<PointExemplar> {
    Some(PointExemplar {
        trace_id: bytes(&exemplar.trace_id)?,
        value: exemplar.value,
        seconds: exemplar.seconds,
    })
}
