//! Tests of /metrics in `OpenMetrics`, with a strict reader of that format.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use agentloop::telemetry::exposition::ExpositionFormat;
use agentloop::telemetry::http;
use agentloop::telemetry::metrics::Metrics;
use axum::body::Body;
use axum::http::Request;
use pretty_assertions::assert_eq;
use tower::ServiceExt;

use crate::metrics::{busy, controller};
use crate::support::agents::view;

/// The families of a text: type, unit and samples, which are series to values.
type Families = BTreeMap<String, Family>;

#[derive(Default, Debug)]
struct Family {
    kind: String,
    unit: String,
    has_help: bool,
    samples: BTreeMap<String, f64>,
}

/// Reads a text, and fails where it breaks a rule of the format.
fn read(text: &str) -> Families {
    let mut families = Families::new();
    let mut current = String::new();
    let body = text.strip_suffix("# EOF\n").expect("the text ends with # EOF");
    assert!(!body.contains("# EOF"), "once");
    for line in body.lines() {
        if let Some(comment) = line.strip_prefix("# ") {
            let mut words = comment.splitn(3, ' ');
            let (what, name, rest) = (words.next().unwrap(), words.next().unwrap(), words.next().unwrap());
            if name != current {
                assert!(!families.contains_key(name), "{name} is in two places");
                current = name.into();
            }
            let family = families.entry(name.into()).or_default();
            assert!(family.samples.is_empty(), "{line}: after a sample");
            match what {
                "HELP" => assert!(!std::mem::replace(&mut family.has_help, true), "{line}: twice"),
                "TYPE" => assert_eq!(std::mem::replace(&mut family.kind, rest.into()), "", "{line}: twice"),
                "UNIT" => {
                    assert!(name.ends_with(&format!("_{rest}")), "{line}: not the end of the name");
                    family.unit = rest.into();
                }
                _ => panic!("{line}: unknown"),
            }
            continue;
        }
        let (series, value) = line.rsplit_once(' ').unwrap();
        let name = series.split('{').next().unwrap();
        let family = families.get_mut(&current).expect(line);
        let suffixes: &[&str] = match family.kind.as_str() {
            "counter" => &["_total"],
            "gauge" => &[""],
            "info" => &["_info"],
            "summary" => &["_sum", "_count"],
            "histogram" => &["_bucket", "_sum", "_count"],
            other => panic!("{line}: type {other}"),
        };
        let suffix = name
            .strip_prefix(&current)
            .unwrap_or_else(|| panic!("{line}: in {current}"));
        assert!(suffixes.contains(&suffix), "{line}: suffix of a {}", family.kind);
        if suffix == "_bucket" {
            let bound = series.split("le=\"").nth(1).unwrap().split('"').next().unwrap();
            assert!(bound == "+Inf" || bound.contains('.'), "{line}: a bound is a float");
        }
        let value: f64 = value.parse().unwrap_or_else(|_| panic!("{line}: value"));
        if ["counter", "histogram", "summary"].contains(&family.kind.as_str()) {
            assert!(value >= 0.0, "{line}: negative");
        }
        assert!(family.samples.insert(series.into(), value).is_none(), "{line}: twice");
    }
    families
}

fn open_metrics(metrics: &Metrics) -> String {
    let mut text = Vec::new();
    metrics.write(ExpositionFormat::OpenMetrics, &mut |piece| {
        text.extend_from_slice(&piece);
        true
    });
    String::from_utf8(text).unwrap()
}

#[tokio::test]
async fn a_scrape_in_openmetrics_follows_its_rules_and_has_the_samples_of_the_text_format() {
    let (metrics, _) = controller(view(&[busy("x"), busy("y")])).await;
    let text = open_metrics(&metrics);
    let families = read(&text);
    for (name, family) in &families {
        assert!(family.has_help && !family.samples.is_empty(), "{name}");
    }
    assert_eq!(families["agentloop_agent"].kind, "info");
    assert_eq!(families["agentloop_agent_cost_usd"].unit, "usd");
    assert_eq!(families["agentloop_agent_last_turn_timestamp_seconds"].unit, "seconds");
    // What differs between two scrapes is the process itself.
    let series = |text: &str| -> BTreeSet<String> {
        let lines = text
            .lines()
            .filter(|line| !line.starts_with('#') && !line.contains("le=\""));
        let series = lines.map(|line| line.rsplit_once(' ').unwrap().0.to_owned());
        series.collect()
    };
    assert_eq!(series(&text), series(&metrics.text()));
}

/// Type and text of the response to a scrape that accepts this.
async fn scrape(metrics: Arc<Metrics>, accept: &str) -> (String, String) {
    let peer = IpAddr::from([127, 0, 0, 1]);
    let app = http::metrics(metrics, http::SCRAPE_WAIT).layer(axum::Extension(peer));
    let request = Request::get("/metrics").header("accept", accept);
    let response = app.oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
    let kind = response.headers()["content-type"].to_str().unwrap().to_owned();
    let body = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
    (kind, String::from_utf8(body.to_vec()).unwrap())
}

#[tokio::test]
async fn the_header_accept_decides_the_format() {
    let agents: Vec<_> = (0..300).map(|number| busy(&format!("agent-{number}"))).collect();
    let (metrics, _) = controller(view(&agents)).await;
    let (kind, text) = scrape(
        metrics.clone(),
        "application/openmetrics-text;version=1.0.0,text/plain;q=0.5",
    )
    .await;
    assert_eq!(kind, "application/openmetrics-text; version=1.0.0; charset=utf-8");
    // Several pieces are one text.
    assert!(text.len() > 200_000, "{}", text.len());
    assert_eq!(read(&text)["agentloop_agent_turns"].samples.len(), 300);
    let (kind, text) = scrape(metrics, "text/plain").await;
    assert_eq!(kind, "text/plain; version=0.0.4; charset=utf-8");
    assert!(!text.contains("# EOF"));
}
