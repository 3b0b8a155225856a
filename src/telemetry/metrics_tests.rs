//! What the instruments export beside their values: exemplars, and what exports have dropped.

use std::time::Duration;

use pretty_assertions::assert_eq;

use super::*;
use crate::otlp::{AgentIdentity, ExportTask, TelemetryOrigin, TraceSettings};
use crate::telemetry::reconcile_traces::ReconcileEnd;

/// Metrics whose reconciles are traced. The collector is gone, which costs nothing.
fn traced(sampler: &'static str) -> (Metrics, ExportTask) {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let settings = TraceSettings::from_variables(|name| match name {
        "OTEL_EXPORTER_OTLP_ENDPOINT" => Some("http://127.0.0.1:9".into()),
        "OTEL_TRACES_SAMPLER" => Some(sampler.into()),
        _ => None,
    });
    let origin = TelemetryOrigin::agent(&AgentIdentity {
        namespace: "n".into(),
        name: "a".into(),
        uid: "u".into(),
        provider: "openai",
        model: "m".into(),
    });
    let (sink, export) = ExportTask::of_spans(settings.unwrap(), &origin);
    (Metrics::new().unwrap().with_traces(sink), export)
}

fn reconciled(metrics: &Metrics, took: f64) {
    let tracer = metrics.reconcile_traces.of("agent");
    let trace = tracer.begin(Timestamp::now());
    let end = ReconcileEnd {
        object: ("n", "a"),
        result: "success",
        error: None,
        took: Duration::from_secs_f64(took),
    };
    tracer.end(trace, end);
    metrics.reconcile_seconds.with_label_values(&["agent"]).observe(took);
}

/// The buckets of the durations of reconciles that have an exemplar.
fn with_exemplars(metrics: &Metrics, format: ExpositionFormat) -> Vec<String> {
    let mut text = Vec::new();
    metrics.write(format, &mut |piece| {
        text.extend_from_slice(&piece);
        true
    });
    let text = String::from_utf8(text).unwrap();
    let found = text.lines().filter(|line| line.contains(" # {trace_id="));
    found.map(|line| line.split(" # ").next().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn the_last_trace_of_each_bucket_is_an_exemplar_in_open_metrics_only() {
    let (metrics, _export) = traced("always_on");
    for took in [0.05, 0.05, 61.0] {
        reconciled(&metrics, took);
    }
    let name = "controller_runtime_reconcile_time_seconds_bucket";
    assert_eq!(
        with_exemplars(&metrics, ExpositionFormat::OpenMetrics),
        [
            format!("{name}{{controller=\"agent\",le=\"0.05\"}} 2"),
            format!("{name}{{controller=\"agent\",le=\"+Inf\"}} 3"),
        ]
    );
    assert_eq!(with_exemplars(&metrics, ExpositionFormat::Text), [""; 0]);
}

#[tokio::test]
async fn a_trace_that_is_not_exported_is_no_exemplar() {
    let (metrics, _export) = traced("always_off");
    reconciled(&metrics, 0.05);
    assert_eq!(with_exemplars(&metrics, ExpositionFormat::OpenMetrics), [""; 0]);
    let untraced = Metrics::new().unwrap();
    reconciled(&untraced, 0.05);
    assert!(untraced.reconcile_traces.of("agent").begin(Timestamp::now()).is_none());
    assert_eq!(with_exemplars(&untraced, ExpositionFormat::OpenMetrics), [""; 0]);
}

#[test]
fn what_exports_drop_is_counted_once_however_often_it_is_read() {
    let metrics = Metrics::new().unwrap();
    let count = DropCount::default();
    metrics.show_drops("logs", count.clone());
    let read = || {
        let text = metrics.text();
        let lines = text
            .lines()
            .filter(|line| line.starts_with("agentloop_telemetry_dropped_total"));
        lines
            .map(|line| line.rsplit(' ').next().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(read(), ["0", "0", "0"]);
    count.add(2);
    assert_eq!(read(), ["2", "0", "0"]);
    count.add(1);
    assert_eq!(
        (read(), read()),
        (
            vec!["3".into(), "0".into(), "0".into()],
            vec!["3".into(), "0".into(), "0".into()]
        )
    );
}
