//! Samples as data points of OTLP, encoded into requests of bounded size while they are written.

use jiff::Timestamp;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Exemplar, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint, ResourceMetrics,
    ScopeMetrics, Sum, Summary, SummaryDataPoint, exemplar, number_data_point,
};
use opentelemetry_proto::tonic::resource::v1::Resource;
use prost::Message;

use crate::resource::{scope, text};
use crate::spans::nanoseconds;

/// Data points of one request at most: about as large as a piece of a scrape with a few hundred of them.
const MAX_POINTS: usize = 1_000;

/// Type of a metric, as Prometheus defines it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PointKind {
    /// Only increases.
    Counter,
    /// Any number.
    Gauge,
    /// Always 1, with information in its labels.
    Info,
    /// With buckets, sum and count.
    Histogram,
    /// With sum and count.
    Summary,
}

/// The metadata of a metric.
#[derive(Clone, Copy, Debug)]
pub struct PointHead<'a> {
    /// The name, as in a scrape.
    pub name: &'a str,
    /// The help text.
    pub description: &'a str,
    /// The unit, as OpenTelemetry abbreviates it.
    pub unit: &'a str,
    /// The type.
    pub kind: PointKind,
    /// Since when the counts count; `None`: unknown.
    pub since: Option<Timestamp>,
}

/// A trace that contributed to a value.
#[derive(Clone, Debug, PartialEq)]
pub struct PointExemplar {
    /// Id of the trace, as bytes.
    pub trace_id: Vec<u8>,
    /// What was observed.
    pub value: f64,
    /// When, in seconds since the Unix epoch.
    pub seconds: f64,
}

/// The buckets of a histogram: upper bounds without the infinite one, cumulative counts, sum and count.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HistogramPoint {
    /// Upper bounds in ascending order.
    pub bounds: Vec<f64>,
    /// For each bound, how many values are not above it.
    pub cumulative: Vec<u64>,
    /// Sum of the values.
    pub sum: f64,
    /// Number of the values.
    pub count: u64,
    /// Traces that contributed.
    pub exemplars: Vec<PointExemplar>,
}

/// Takes the requests; `false`: it takes no more.
pub type RequestSink<'a> = &'a mut dyn FnMut(MetricRequest) -> bool;

/// An encoded request.
#[derive(Debug)]
pub struct MetricRequest {
    pub(crate) body: Vec<u8>,
    /// Number of its data points.
    pub(crate) points: usize,
}

/// Writes the data points of one export.
pub struct MetricPoints<'a> {
    resource: &'a Resource,
    at: u64,
    metrics: Vec<Metric>,
    points: usize,
    sink: RequestSink<'a>,
    is_open: bool,
}

impl<'a> MetricPoints<'a> {
    pub(crate) fn new(resource: &'a Resource, at: Timestamp, sink: RequestSink<'a>) -> Self {
        Self {
            resource,
            at: nanoseconds(at),
            metrics: Vec::new(),
            points: 0,
            sink,
            is_open: true,
        }
    }

    /// Whether the sink still takes requests.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// Adds the value of a counter, a gauge or an info.
    pub fn number(
        &mut self,
        head: PointHead<'_>,
        labels: &[(&str, &str)],
        value: f64,
        exemplar: Option<PointExemplar>,
    ) {
        let point = NumberDataPoint {
            attributes: attributes(labels),
            start_time_unix_nano: start(head),
            time_unix_nano: self.at,
            exemplars: exemplar.into_iter().map(to_exemplar).collect(),
            value: Some(number_data_point::Value::AsDouble(value)),
            ..NumberDataPoint::default()
        };
        let sum = |points, is_monotonic| {
            Data::Sum(Sum {
                data_points: points,
                aggregation_temporality: AggregationTemporality::Cumulative.into(),
                is_monotonic,
            })
        };
        match &mut self.metric(head).data {
            Some(Data::Gauge(gauge)) => gauge.data_points.push(point),
            Some(Data::Sum(sum)) => sum.data_points.push(point),
            other => {
                *other = Some(match head.kind {
                    PointKind::Counter => sum(vec![point], true),
                    PointKind::Info => sum(vec![point], false),
                    PointKind::Gauge | PointKind::Histogram | PointKind::Summary => Data::Gauge(Gauge {
                        data_points: vec![point],
                    }),
                });
            }
        }
        self.added();
    }

    /// Adds a summary without quantiles.
    pub fn summary(&mut self, head: PointHead<'_>, labels: &[(&str, &str)], sum: f64, count: u64) {
        let point = SummaryDataPoint {
            attributes: attributes(labels),
            start_time_unix_nano: start(head),
            time_unix_nano: self.at,
            sum,
            count,
            ..SummaryDataPoint::default()
        };
        match &mut self.metric(head).data {
            Some(Data::Summary(summary)) => summary.data_points.push(point),
            other => {
                *other = Some(Data::Summary(Summary {
                    data_points: vec![point],
                }));
            }
        }
        self.added();
    }

    /// Adds a histogram.
    pub fn histogram(&mut self, head: PointHead<'_>, labels: &[(&str, &str)], histogram: HistogramPoint) {
        let HistogramPoint {
            bounds,
            cumulative,
            sum,
            count,
            exemplars,
        } = histogram;
        // Those of OTLP count each value once, with a last bucket for what is above all bounds.
        let ends = cumulative.iter().copied().chain([count]);
        let begins = [0].into_iter().chain(cumulative.iter().copied());
        let bucket_counts = ends.zip(begins).map(|(end, begin)| end.saturating_sub(begin));
        let point = HistogramDataPoint {
            attributes: attributes(labels),
            start_time_unix_nano: start(head),
            time_unix_nano: self.at,
            count,
            sum: Some(sum),
            bucket_counts: bucket_counts.collect(),
            explicit_bounds: bounds,
            exemplars: exemplars.into_iter().map(to_exemplar).collect(),
            ..HistogramDataPoint::default()
        };
        match &mut self.metric(head).data {
            Some(Data::Histogram(histogram)) => histogram.data_points.push(point),
            other => {
                *other = Some(Data::Histogram(Histogram {
                    data_points: vec![point],
                    aggregation_temporality: AggregationTemporality::Cumulative.into(),
                }));
            }
        }
        self.added();
    }

    /// Hands on the last request.
    pub fn finish(mut self) {
        self.hand_on();
    }

    /// The metric that is being written, which is a new one if the name is another one.
    fn metric(&mut self, head: PointHead<'_>) -> &mut Metric {
        let is_new = self.metrics.last().is_none_or(|last| last.name != head.name);
        if is_new {
            let kind = match head.kind {
                PointKind::Counter => "counter",
                PointKind::Gauge => "gauge",
                PointKind::Info => "info",
                PointKind::Histogram => "histogram",
                PointKind::Summary => "summary",
            };
            self.metrics.push(Metric {
                name: head.name.to_owned(),
                description: head.description.to_owned(),
                unit: head.unit.to_owned(),
                metadata: vec![text("prometheus.type", kind)],
                data: None,
            });
        }
        let last = self.metrics.len() - 1;
        &mut self.metrics[last]
    }

    fn added(&mut self) {
        self.points += 1;
        if self.points >= MAX_POINTS {
            self.hand_on();
        }
    }

    fn hand_on(&mut self) {
        let metrics = std::mem::take(&mut self.metrics);
        let points = std::mem::take(&mut self.points);
        if !self.is_open || points == 0 {
            return;
        }
        let request = ExportMetricsServiceRequest {
            resource_metrics: vec![ResourceMetrics {
                resource: Some(self.resource.clone()),
                scope_metrics: vec![ScopeMetrics {
                    scope: Some(scope("agentloop")),
                    metrics,
                    ..ScopeMetrics::default()
                }],
                ..ResourceMetrics::default()
            }],
        };
        let body = request.encode_to_vec();
        self.is_open = (self.sink)(MetricRequest { body, points });
    }
}

fn attributes(labels: &[(&str, &str)]) -> Vec<KeyValue> {
    labels.iter().map(|(key, value)| text(key, *value)).collect()
}

fn start(head: PointHead<'_>) -> u64 {
    match head.kind {
        PointKind::Gauge => 0,
        PointKind::Counter | PointKind::Info | PointKind::Histogram | PointKind::Summary => {
            head.since.map_or(0, nanoseconds)
        }
    }
}

fn to_exemplar(exemplar: PointExemplar) -> Exemplar {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a time after 1970, to the microsecond"
    )]
    let microseconds = (exemplar.seconds * 1e6) as u64;
    Exemplar {
        time_unix_nano: microseconds.saturating_mul(1_000),
        trace_id: exemplar.trace_id,
        value: Some(exemplar::Value::AsDouble(exemplar.value)),
        ..Exemplar::default()
    }
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;

    use super::*;

    fn head(name: &str, kind: PointKind) -> PointHead<'_> {
        PointHead {
            name,
            description: "Help.",
            unit: "s",
            kind,
            since: Timestamp::from_second(5).ok(),
        }
    }

    /// The requests that these points become.
    fn requests(write: impl FnOnce(&mut MetricPoints<'_>)) -> Vec<(usize, Vec<Metric>)> {
        let mut requests = Vec::new();
        let mut sink = |request: MetricRequest| {
            let decoded = ExportMetricsServiceRequest::decode(&*request.body).unwrap();
            let scopes = &decoded.resource_metrics[0].scope_metrics;
            requests.push((request.points, scopes[0].metrics.clone()));
            true
        };
        let resource = Resource::default();
        let mut points = MetricPoints::new(&resource, Timestamp::from_second(9).unwrap(), &mut sink);
        write(&mut points);
        points.finish();
        requests
    }

    #[test]
    fn each_type_is_that_of_the_compatibility_rules() {
        let requests = requests(|points| {
            points.number(head("c_total", PointKind::Counter), &[("a", "b")], 2.0, None);
            points.number(head("g", PointKind::Gauge), &[], 1.5, None);
            points.number(head("x_info", PointKind::Info), &[], 1.0, None);
            points.summary(head("s", PointKind::Summary), &[], 3.0, 2);
        });
        assert_eq!(requests.len(), 1);
        let (count, metrics) = &requests[0];
        assert_eq!(*count, 4);
        let types: Vec<_> = metrics.iter().map(|metric| metric.metadata[0].clone()).collect();
        let expected = ["counter", "gauge", "info", "summary"].map(|kind| text("prometheus.type", kind));
        assert_eq!(types, expected);
        let cumulative: i32 = AggregationTemporality::Cumulative.into();
        let Some(Data::Sum(counter)) = &metrics[0].data else {
            panic!("{:?}", metrics[0])
        };
        assert_eq!(
            (counter.is_monotonic, counter.aggregation_temporality),
            (true, cumulative)
        );
        let point = &counter.data_points[0];
        assert_eq!(
            (point.start_time_unix_nano, point.time_unix_nano),
            (5_000_000_000, 9_000_000_000)
        );
        assert_eq!(point.attributes, [text("a", "b")]);
        let Some(Data::Gauge(gauge)) = &metrics[1].data else {
            panic!("{:?}", metrics[1])
        };
        assert_eq!(gauge.data_points[0].start_time_unix_nano, 0);
        let Some(Data::Sum(info)) = &metrics[2].data else {
            panic!("{:?}", metrics[2])
        };
        assert!(!info.is_monotonic);
        let Some(Data::Summary(summary)) = &metrics[3].data else {
            panic!("{:?}", metrics[3])
        };
        assert_eq!((summary.data_points[0].sum, summary.data_points[0].count), (3.0, 2));
    }

    #[test]
    fn cumulative_buckets_become_counts_of_their_own() {
        let exemplar = PointExemplar {
            trace_id: vec![7; 16],
            value: 0.2,
            seconds: 1.5,
        };
        let histogram = HistogramPoint {
            bounds: vec![0.1, 1.0],
            cumulative: vec![2, 5],
            sum: 4.0,
            count: 6,
            exemplars: vec![exemplar],
        };
        let requests = requests(|points| points.histogram(head("h", PointKind::Histogram), &[], histogram));
        let Some(Data::Histogram(histogram)) = &requests[0].1[0].data else {
            panic!("{requests:?}")
        };
        let point = &histogram.data_points[0];
        assert_eq!(point.bucket_counts, [2, 3, 1]);
        assert_eq!(point.explicit_bounds, [0.1, 1.0]);
        assert_eq!((point.sum, point.count), (Some(4.0), 6));
        let exemplar = &point.exemplars[0];
        assert_eq!(
            (exemplar.trace_id.clone(), exemplar.time_unix_nano),
            (vec![7; 16], 1_500_000_000)
        );
    }

    #[test]
    fn a_request_is_full_at_its_bound_and_a_metric_continues_in_the_next() {
        let write = |number: usize| {
            let requests = requests(|points| {
                for _ in 0..number {
                    points.number(head("g", PointKind::Gauge), &[], 1.0, None);
                }
            });
            requests
                .iter()
                .map(|(count, metrics)| (*count, metrics.len()))
                .collect::<Vec<_>>()
        };
        assert_eq!(write(0), []);
        assert_eq!(write(MAX_POINTS), [(MAX_POINTS, 1)]);
        assert_eq!(write(MAX_POINTS + 1), [(MAX_POINTS, 1), (1, 1)]);
    }

    #[test]
    fn nothing_is_encoded_for_a_closed_sink() {
        let mut taken = 0;
        let mut sink = |_| {
            taken += 1;
            false
        };
        let resource = Resource::default();
        let mut points = MetricPoints::new(&resource, Timestamp::UNIX_EPOCH, &mut sink);
        for _ in 0..3 * MAX_POINTS {
            points.number(head("g", PointKind::Gauge), &[], 1.0, None);
        }
        assert!(!points.is_open());
        points.finish();
        assert_eq!(taken, 1);
    }
}
