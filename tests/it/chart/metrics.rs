//! How the chart has /metrics scraped, with and without tokens.

use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use super::render::{render, variable};

const TOKEN: &str = "metrics.authentication=Token";
/// Kind of a monitor, its values, and its list of endpoints.
const MONITORS: [(&str, &str, &str); 2] = [
    ("ServiceMonitor", "serviceMonitor", "endpoints"),
    ("PodMonitor", "podMonitor", "podMetricsEndpoints"),
];

/// The endpoint of a monitor with these settings.
fn endpoint((kind, values, list): (&str, &str, &str), more: &[&str]) -> Option<Value> {
    let enabled = format!("metrics.{values}.enabled=true");
    let secret = format!("metrics.{values}.bearerTokenSecret.name=prometheus-token");
    let rendered = render(&[&[enabled.as_str(), &secret][..], more].concat())?.unwrap();
    Some(rendered.one(kind, "agentloop")["spec"][list][0].clone())
}

#[test]
fn with_tokens_monitors_scrape_over_https_and_trust_a_configmap_without_a_key() {
    let trusted = json!({"configMap": {"name": "agentloop-metrics-ca", "key": "ca.crt"}});
    let authorization = json!({"type": "Bearer", "credentials": {"name": "prometheus-token", "key": "token"}});
    for monitor in MONITORS {
        let Some(found) = endpoint(monitor, &[TOKEN]) else {
            return;
        };
        assert_eq!(found["scheme"], "https");
        assert_eq!(
            found["tlsConfig"],
            json!({"ca": trusted, "serverName": "agentloop-metrics.agentloop-system.svc"})
        );
        assert_eq!(found["authorization"], authorization);
        let elsewhere = endpoint(monitor, &[TOKEN, "namespaceOverride=mark"]).unwrap();
        assert_eq!(elsewhere["tlsConfig"]["serverName"], "agentloop-metrics.mark.svc");
    }
}

#[test]
fn without_tokens_metrics_are_scraped_over_plain_http() {
    for monitor in MONITORS {
        let Some(found) = endpoint(monitor, &[]) else { return };
        assert_eq!((&found["scheme"], &found["tlsConfig"]), (&Value::Null, &Value::Null));
    }
    let objects = render(&[]).unwrap().unwrap();
    let text = serde_json::to_string(&objects.0).unwrap();
    assert!(!text.contains("AGENTLOOP_METRICS_HOSTS"));
    let port = &objects.one("Service", "agentloop-metrics")["spec"]["ports"][0];
    assert_eq!(port["appProtocol"], Value::Null);
    let role = &objects.one("Role", "agentloop")["rules"];
    assert!(!role.to_string().contains("configmaps"), "{role}");
}

#[test]
fn the_certificate_of_metrics_with_tokens_is_for_their_service() {
    let Some(rendered) = render(&[TOKEN]) else { return };
    let objects = rendered.unwrap();
    let controller = &objects.one("Deployment", "agentloop")["spec"]["template"]["spec"]["containers"][0];
    let hosts = &variable(controller, "AGENTLOOP_METRICS_HOSTS").unwrap()["value"];
    assert_eq!(hosts, "agentloop-metrics.agentloop-system.svc");
    let port = &objects.one("Service", "agentloop-metrics")["spec"]["ports"][0];
    assert_eq!(port["appProtocol"], "https");
    // Probes are on a port of their own, without TLS.
    for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
        let get = &controller[probe]["httpGet"];
        assert!(get["scheme"].is_null(), "{probe}");
        assert!(get.is_null() || get["port"] == "probes", "{probe}");
    }
}
