//! Queries of Prometheus as text, composed from metrics of the registry.

use crate::telemetry::registry::{self, Metric, MetricKind, MetricSource};

/// How long a change of the leader may take, with the scrape before and the one after it. Not `$__rate_interval`: of an annotation, that
/// is four of its steps.
const LEADER_CHANGE: &str = "3m";

/// Labels of a replica of the controller, and the variables with their values. The namespace is the controller's, so its
/// variable is another one than that of the dashboards about objects, which the links between dashboards pass on.
pub const TARGET: &[(&str, &str)] = &[
    ("namespace", "controller_namespace"),
    ("job", "job"),
    ("instance", "instance"),
];

/// A query that selects the series of a metric for the variables of its dashboard, with additional matchers such as
/// `state="Paused"`.
///
/// Around a change of the leader, Prometheus has the facts about objects of two replicas; this has each once.
pub fn select_with(metric: &Metric, matchers: &str) -> String {
    let series = selector(metric, "", matchers);
    if is_of_leader(metric) {
        format!("max by ({}) ({series})", metric.labels.join(", "))
    } else {
        series
    }
}

/// A query that selects the series of a metric for the variables of its dashboard.
pub fn select(metric: &Metric) -> String {
    select_with(metric, "")
}

/// Whether only the leader exports the metric.
const fn is_of_leader(metric: &Metric) -> bool {
    !matches!(metric.source, MetricSource::Controller | MetricSource::Process)
}

/// Whether each leader exports the same total of an object, which it reads from the status.
fn is_total(metric: &Metric) -> bool {
    let of_ledger = [&registry::BUDGET_LEASES, &registry::BUDGET_WRITES];
    matches!(metric.source, MetricSource::Agents | MetricSource::Sensors) || of_ledger.contains(&metric)
}

/// Per-second rate of a counter.
pub fn rate(metric: &Metric) -> String {
    rate_with(metric, "")
}

/// Per-second rate of a counter whose series have also these matchers.
///
/// The steps of a total are those in which Prometheus evaluates rules, by default a minute: two or more of them are in the rate interval,
/// which is two minutes or longer. Steps of `$__interval` are nearly as long as that, so that there may be one in it, and no rate.
pub fn rate_with(metric: &Metric, matchers: &str) -> String {
    over(metric, "rate", ("$__rate_interval", ""), matchers)
}

/// Increase of a counter over the time that the dashboard shows.
pub fn increase(metric: &Metric) -> String {
    over(metric, "increase", ("$__range", "$__interval"), "")
}

/// Increase of a counter over the last hour.
pub fn increase_of_an_hour(metric: &Metric) -> String {
    over(metric, "increase", ("1h", ""), "")
}

/// What a gauge of the leader was an hour ago. It is looked for as long as a change of the leader may take.
pub fn an_hour_ago(metric: &Metric) -> String {
    let series = selector(metric, "", "");
    let labels = metric.labels.join(", ");
    format!("max by ({labels}) (last_over_time({series}[{LEADER_CHANGE}] offset 1h))")
}

/// Sum by labels, such as `"namespace, agent"`.
pub fn sum_by(labels: &str, query: &str) -> String {
    format!("sum by ({labels}) ({query})")
}

/// Sum by labels; 0 for what has series of `present`, so that an object whose series is absent at 0 is shown as well.
pub fn sum_or_zero_by(labels: &str, query: &str, present: &Metric) -> String {
    format!(
        "{} or 0 * count by ({labels}) ({})",
        sum_by(labels, query),
        selector(present, "", "")
    )
}

/// Sum by a label, and 0 for its value "none" if there are series of `present`.
pub fn sum_by_or_none(label: &str, query: &str, present: &Metric) -> String {
    let none = format!("0 * count({})", selector(present, "", ""));
    format!(
        "{} or label_replace({none}, \"{label}\", \"none\", \"\", \"\")",
        sum_by(label, query)
    )
}

/// Rate of a counter per minute, as a sum by labels.
pub fn per_minute(labels: &str, metric: &Metric) -> String {
    format!("{} * 60", sum_by(labels, &rate(metric)))
}

/// Sum of all series. There is no data if there are none: without a leader, and with a level of `metrics.perObject` at which
/// they are not exported.
pub fn total(query: &str) -> String {
    format!("sum({query})")
}

/// The value; 0 if it has none and there are series of `present`.
///
/// For a metric that is absent at 0. `present` is one that is there whenever an object is, at the same levels of
/// `metrics.perObject`: otherwise 0 would be said of what is not known.
pub fn or_zero(query: &str, present: &Metric) -> String {
    format!("{query} or 0 * count({})", selector(present, "", ""))
}

/// Per-minute sum of rates of a metric that is absent at 0, as [`or_zero`].
pub fn total_per_minute(rate: &str, present: &Metric) -> String {
    format!("({}) * 60", or_zero(&total(rate), present))
}

/// What a gauge of the leader has now and had not a step ago, by labels: an event. Before that, it is looked for as long as
/// a change of the leader may take. Nothing is new if `present`, which is there whenever an object is, was not: the controller was not scraped then.
pub fn begins(labels: &str, (metric, matchers): (&Metric, &str), present: &Metric) -> String {
    let before = a_step_ago(labels, metric, matchers);
    format!(
        "max by ({labels}) ({}) unless {before} and on () {}",
        selector(metric, "", matchers),
        known_a_step_ago(present)
    )
}

/// By how much a total that is persisted in the status has grown within a step, by labels; its first value counts. Like
/// [`begins`].
pub fn grows(labels: &str, (metric, matchers): (&Metric, &str), present: &Metric) -> String {
    let now = format!("max by ({labels}) ({})", selector(metric, "", matchers));
    let before = a_step_ago(labels, metric, matchers);
    format!(
        "{now} - ({before} or 0 * {now}) > 0 and on () {}",
        known_a_step_ago(present)
    )
}

/// By how much a count of the process has grown within a step, by labels. A replica that has just become the leader has no
/// value from before.
pub fn counted(labels: &str, metric: &Metric, matchers: &str) -> String {
    let series = selector(metric, "", matchers);
    format!("sum by ({labels}) ({series} - {series} offset $__interval > 0)")
}

/// The largest value before the last step, by labels.
pub fn a_step_ago(labels: &str, metric: &Metric, matchers: &str) -> String {
    let series = selector(metric, "", matchers);
    format!("max by ({labels}) (max_over_time({series}[{LEADER_CHANGE}] offset $__interval))")
}

fn known_a_step_ago(present: &Metric) -> String {
    let series = selector(present, "", "");
    format!("count(max_over_time({series}[{LEADER_CHANGE}] offset $__interval))")
}

/// How much one counter grows for each one of another, whose series have also these matchers, by labels. No data while
/// neither grows.
pub fn mean_by(labels: &str, sum: &Metric, (count, matchers): (&Metric, &str)) -> String {
    let count = rate_with(count, matchers);
    format!("{} / {}", sum_by(labels, &rate(sum)), sum_by(labels, &count))
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

/// A function of a counter over a window. The totals of an object outlast a leader: if one leads again later, its own series rises by
/// what the leader in between counted too, so the highest value of all replicas is used, at each step of the window.
fn over(metric: &Metric, function: &str, (window, step): (&str, &str), matchers: &str) -> String {
    assert_eq!(metric.kind, MetricKind::Counter, "{}", metric.name);
    if is_total(metric) {
        return format!("{function}(({})[{window}:{step}])", select_with(metric, matchers));
    }
    format!("{function}({}[{window}])", selector(metric, "", matchers))
}

fn selector(metric: &Metric, suffix: &str, matchers: &str) -> String {
    // A label, and the variable with its values.
    let variables: &[(&str, &str)] = match metric.source {
        MetricSource::Agents => &[("namespace", "namespace"), ("agent", "agent")],
        MetricSource::Namespaces => &[("namespace", "namespace")],
        MetricSource::Budgets => &[("namespace", "namespace"), ("budget", "budget")],
        MetricSource::Sensors => &[("namespace", "namespace"), ("sensor", "sensor")],
        MetricSource::Controller | MetricSource::Process => TARGET,
    };
    let mut all: Vec<String> = variables
        .iter()
        .map(|(label, variable)| format!("{label}=~\"${variable}\""))
        .collect();
    if metric.name == registry::LEADER.name {
        // Other Leases, in the same process and elsewhere, have the same metric.
        all.push("name=\"agentloop-controller\"".to_owned());
    }
    if !matchers.is_empty() {
        all.push(matchers.to_owned());
    }
    format!("{}{suffix}{{{}}}", metric.name, all.join(","))
}

/// The metrics that a query selects, in its order.
pub fn metrics_in(query: &str) -> Vec<&'static Metric> {
    let selected = query.split('{').filter_map(|before| {
        let start = before.rfind(|character: char| !character.is_ascii_alphanumeric() && character != '_');
        let name = before.get(start.map_or(0, |start| start + 1)..)?;
        let is_of = |metric: &&Metric| {
            let suffix = name.strip_prefix(metric.name);
            suffix.is_some_and(|suffix| ["", "_bucket", "_sum", "_count"].contains(&suffix))
        };
        registry::ALL.iter().find(is_of)
    });
    selected.collect()
}
