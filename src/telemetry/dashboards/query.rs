//! Queries of Prometheus as text, composed from metrics of the registry.

use crate::telemetry::registry::{Metric, MetricKind, MetricSource};

/// A query that selects the series of a metric for the variables of its dashboard, with additional matchers such as
/// `state="Paused"`.
pub fn select_with(metric: &Metric, matchers: &str) -> String {
    selector(metric, "", matchers)
}

/// A query that selects the series of a metric for the variables of its dashboard.
pub fn select(metric: &Metric) -> String {
    select_with(metric, "")
}

/// Per-second rate of a counter.
pub fn rate(metric: &Metric) -> String {
    over(metric, "rate", "$__rate_interval", "")
}

/// Per-second rate of a counter whose series have also these matchers.
pub fn rate_with(metric: &Metric, matchers: &str) -> String {
    over(metric, "rate", "$__rate_interval", matchers)
}

/// Increase of a counter over the time that the dashboard shows.
pub fn increase(metric: &Metric) -> String {
    over(metric, "increase", "$__range", "")
}

/// Sum by labels, such as `"namespace, agent"`.
pub fn sum_by(labels: &str, query: &str) -> String {
    format!("sum by ({labels}) ({query})")
}

/// Sum by labels; 0 for what has series of `present`, so that an object whose series is absent at 0 is shown as well.
pub fn sum_or_zero_by(labels: &str, query: &str, present: &Metric) -> String {
    format!("{} or 0 * {}", sum_by(labels, query), sum_by(labels, &select(present)))
}

/// Rate of a counter per minute, as a sum by labels.
pub fn per_minute(labels: &str, metric: &Metric) -> String {
    format!("{} * 60", sum_by(labels, &rate(metric)))
}

/// Sum of all series; 0 if there are none, as for a metric that is absent at 0.
pub fn total(query: &str) -> String {
    format!("sum({query}) or vector(0)")
}

/// Per-minute sum of rates; 0 if there are none, as for a metric that is absent at 0.
pub fn total_per_minute(rate: &str) -> String {
    format!("({}) * 60", total(rate))
}

/// Mean of a histogram or summary over the rate interval, by labels.
pub fn mean_by(labels: &str, metric: &Metric) -> String {
    let part = |suffix: &str| {
        let series = selector(metric, suffix, "");
        format!("sum by ({labels}) (rate({series}[$__rate_interval]))")
    };
    format!("{} / {}", part("_sum"), part("_count"))
}

/// Number of values of a histogram per minute, as a sum by labels.
pub fn count_per_minute(labels: &str, metric: &Metric) -> String {
    assert_eq!(metric.kind, MetricKind::Histogram, "{}", metric.name);
    let series = selector(metric, "_count", "");
    format!("sum by ({labels}) (rate({series}[$__rate_interval])) * 60")
}

/// Quantile of a histogram over the rate interval, by labels.
pub fn quantile_by(labels: &str, quantile: &str, metric: &Metric) -> String {
    assert_eq!(metric.kind, MetricKind::Histogram, "{}", metric.name);
    let series = selector(metric, "_bucket", "");
    format!("histogram_quantile({quantile}, sum by (le, {labels}) (rate({series}[$__rate_interval])))")
}

/// Quantile of a histogram over the rate interval, of all series of the dashboard.
pub fn quantile(quantile: &str, metric: &Metric) -> String {
    assert_eq!(metric.kind, MetricKind::Histogram, "{}", metric.name);
    let series = selector(metric, "_bucket", "");
    format!("histogram_quantile({quantile}, sum by (le) (rate({series}[$__rate_interval])))")
}

fn over(metric: &Metric, function: &str, window: &str, matchers: &str) -> String {
    assert_eq!(metric.kind, MetricKind::Counter, "{}", metric.name);
    format!("{function}({}[{window}])", selector(metric, "", matchers))
}

fn selector(metric: &Metric, suffix: &str, matchers: &str) -> String {
    let variables: &[&str] = match metric.source {
        MetricSource::Agents => &["namespace", "agent"],
        MetricSource::Namespaces => &["namespace"],
        MetricSource::Budgets => &["namespace", "budget"],
        MetricSource::Sensors => &["namespace", "sensor"],
        MetricSource::Controller | MetricSource::Process => &["job", "instance"],
    };
    let mut all: Vec<String> = variables
        .iter()
        .map(|variable| format!("{variable}=~\"${variable}\""))
        .collect();
    if !matchers.is_empty() {
        all.push(matchers.to_owned());
    }
    format!("{}{suffix}{{{}}}", metric.name, all.join(","))
}
