//! The export of metrics to collectors that accept, refuse, hang, or do not exist.

use std::net::SocketAddr;
use std::sync::Mutex;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use pretty_assertions::assert_eq;
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::*;
use crate::metric_points::{PointHead, PointKind};

const SECONDS: Duration = Duration::from_secs(30);

#[derive(Clone)]
struct Collector {
    /// Numbers of data points in the requests.
    seen: Arc<watch::Sender<Vec<usize>>>,
    /// Its next responses; afterwards it accepts. 0: it hangs.
    responses: Arc<Mutex<Vec<u16>>>,
}

async fn collect(State(collector): State<Collector>, body: Bytes) -> StatusCode {
    let request = ExportMetricsServiceRequest::decode(body).unwrap();
    let metrics = &request.resource_metrics[0].scope_metrics[0].metrics;
    let points = metrics.iter().map(|metric| match &metric.data {
        Some(opentelemetry_proto::tonic::metrics::v1::metric::Data::Gauge(gauge)) => gauge.data_points.len(),
        other => panic!("{other:?}"),
    });
    let points = points.sum();
    collector.seen.send_modify(|seen| seen.push(points));
    let next = {
        let mut responses = collector.responses.lock().unwrap();
        if responses.is_empty() { 200 } else { responses.remove(0) }
    };
    if next == 0 {
        std::future::pending::<()>().await;
    }
    StatusCode::from_u16(next).unwrap()
}

impl Collector {
    async fn start(responses: &[u16]) -> (Self, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let collector = Self {
            seen: Arc::default(),
            responses: Arc::new(Mutex::new(responses.to_vec())),
        };
        let router = Router::new()
            .route("/v1/metrics", post(collect))
            .with_state(collector.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        (collector, address)
    }

    async fn until_seen(&self, requests: usize) -> Vec<usize> {
        let mut seen = self.seen.subscribe();
        let reached = tokio::time::timeout(SECONDS, seen.wait_for(|seen| seen.len() >= requests));
        reached.await.expect("too few requests").unwrap().clone()
    }
}

fn settings(address: SocketAddr, interval: &str) -> MetricSettings {
    // The binary does this at its start; another test may have been first.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let read = MetricSettings::from_variables(|name| match name {
        "OTEL_METRICS_EXPORTER" => Some("otlp".into()),
        "OTEL_EXPORTER_OTLP_ENDPOINT" => Some(format!("http://{address}")),
        "OTEL_METRIC_EXPORT_INTERVAL" => Some(interval.into()),
        _ => None,
    });
    read.unwrap().unwrap()
}

/// Exports `points` data points each time.
fn start(settings: MetricSettings, points: usize) -> (ExportTask, DropCount) {
    let dropped = DropCount::default();
    let walk = Arc::new(move |out: &mut MetricPoints<'_>| {
        let head = PointHead {
            name: "g",
            description: "",
            unit: "",
            kind: PointKind::Gauge,
            since: None,
        };
        (0..points).for_each(|_| out.number(head, &[], 1.0, None));
    });
    let origin = TelemetryOrigin::controller("system", None);
    (
        ExportTask::of_metrics(settings, &origin, dropped.clone(), walk),
        dropped,
    )
}

#[tokio::test]
async fn all_series_are_exported_periodically_and_once_more_at_the_end() {
    let (collector, address) = Collector::start(&[]).await;
    let (export, dropped) = start(settings(address, "10"), 1_500);
    assert_eq!(collector.until_seen(4).await[..4], [1_000, 500, 1_000, 500]);
    export.finish(SECONDS).await;
    assert_eq!(dropped.get(), 0);
    let (collector, address) = Collector::start(&[]).await;
    let (export, _) = start(settings(address, "3600000"), 1);
    export.finish(SECONDS).await;
    assert_eq!(collector.until_seen(1).await, [1]);
}

#[tokio::test]
async fn an_export_that_fails_is_counted_and_not_retried_and_the_next_has_everything() {
    let (collector, address) = Collector::start(&[503]).await;
    let (export, dropped) = start(settings(address, "50"), 1_500);
    // Of the first export, only the request that failed was sent.
    assert_eq!(collector.until_seen(3).await[..3], [1_000, 1_000, 500]);
    assert_eq!(dropped.get(), 1_000);
    drop(export);
}

#[tokio::test]
async fn a_collector_that_hangs_costs_one_export_and_is_counted() {
    let (collector, address) = Collector::start(&[0]).await;
    let settings = MetricSettings {
        // Enough for the request to arrive on a machine that stalls.
        limit: Duration::from_secs(3),
        ..settings(address, "10")
    };
    let (export, dropped) = start(settings, 1);
    assert_eq!(collector.until_seen(2).await[..2], [1, 1]);
    assert_eq!(dropped.get(), 1);
    export.finish(SECONDS).await;
}

#[tokio::test]
async fn an_unreachable_collector_costs_nothing_but_a_count() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let settings = settings(listener.local_addr().unwrap(), "3600000");
    drop(listener);
    let (export, dropped) = start(settings, 3);
    export.finish(SECONDS).await;
    assert_eq!(dropped.get(), 3);
}
