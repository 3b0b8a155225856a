//! Recorded messages of version 1 of the protocol, against the present controller. A gateway of version 1 knows neither
//! `prices` nor `oldestProtocol`, and reads `price` and `lightPrice`.

use agentloop::link::messages::{Directives, LeaseGrant, LeaseRequest, LeaseResponse, RefusalCode};
use axum::http::StatusCode;
use pretty_assertions::assert_eq;
use serde_json::Value;

use super::deliveries::{SENSOR_TOKEN, directives, sensor, webhook};
use super::{LinkHarness, TOKEN, expected, refusal, x};

const ATTACH: &str = include_str!("version_1/attach.json");
const ATTACHED: &str = include_str!("version_1/attached.json");
const REPORT: &str = include_str!("version_1/report.json");
const LEASE: &str = include_str!("version_1/lease.json");
const LEASED: &str = include_str!("version_1/leased.json");
const DELIVERED: &str = include_str!("version_1/delivered.json");
const DELIVER: &str = include_str!("version_1/deliver.json");

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

/// Whether a peer that reads `recorded` finds all of it in `present`, which may say more.
#[track_caller]
fn assert_contains(present: &Value, recorded: &Value, path: &str) {
    match (present, recorded) {
        (Value::Object(present), Value::Object(recorded)) => {
            for (name, value) in recorded {
                let path = format!("{path}.{name}");
                let found = present.get(name).unwrap_or_else(|| panic!("{path} is missing"));
                assert_contains(found, value, &path);
            }
        }
        (Value::Array(present), Value::Array(recorded)) => {
            assert_eq!(present.len(), recorded.len(), "{path}");
            for (place, (present, recorded)) in present.iter().zip(recorded).enumerate() {
                assert_contains(present, recorded, &format!("{path}[{place}]"));
            }
        }
        _ => assert_eq!(present, recorded, "{path}"),
    }
}

#[tokio::test]
async fn a_gateway_of_version_1_attaches_and_finds_every_field_that_it_reads() {
    let harness = LinkHarness::start().await;
    let recorded = json(ATTACHED);
    let known = serde_json::from_value(recorded["known"].clone()).unwrap();
    let said: Directives = serde_json::from_value(recorded["directives"].clone()).unwrap();
    harness.loops.set_budget_terms(&x(), said.budget.clone());
    harness.loops.expect_pod((&x(), "uid-of-x"), expected(), known, said);
    let answer = harness.post("/v1/attach", TOKEN, ATTACH).await;
    assert_eq!(answer.status(), StatusCode::OK);
    let answer: Value = answer.json().await.unwrap();
    assert_eq!(answer["protocol"], 1, "the version that both support");
    assert_contains(&answer, &recorded, "");
}

#[tokio::test]
async fn a_report_of_a_gateway_of_version_1_is_read_completely() {
    let harness = LinkHarness::start().await;
    let answer = harness.post("/v1/report", TOKEN, REPORT).await;
    assert_eq!(answer.status(), StatusCode::NO_CONTENT);
    let heard = harness.loops.last_report(&x(), "u2").unwrap().report;
    let mut recorded = json(REPORT);
    // Version 2 calls it `turns`.
    let loop_ = recorded["loop"].as_object_mut().unwrap();
    let turns = loop_.remove("turnsCompleted").unwrap();
    loop_.insert("turns".to_owned(), turns);
    assert_contains(&serde_json::to_value(heard).unwrap(), &recorded, "");
    let answer = harness.post("/v1/delivered", TOKEN, DELIVERED).await;
    assert_eq!(answer.status(), StatusCode::NO_CONTENT);
}

#[tokio::test]
async fn leases_of_version_1_are_read_and_written_as_then() {
    let request: LeaseRequest = serde_json::from_str(LEASE).unwrap();
    assert_contains(&serde_json::to_value(&request).unwrap(), &json(LEASE), "");
    let mut answer: LeaseResponse = serde_json::from_str(LEASED).unwrap();
    // What version 2 adds: a gateway of version 1 ignores it.
    let grant = answer.accounts[0].leases[0].granted;
    answer.accounts[0].leases[0] = LeaseGrant {
        spent: grant,
        returned: grant,
        ..answer.accounts[0].leases[0].clone()
    };
    assert_contains(&serde_json::to_value(&answer).unwrap(), &json(LEASED), "");
    // The ledger of this server is not loaded; it understands the request.
    let harness = LinkHarness::start().await;
    let (_, refused) = refusal(harness.post("/v1/lease", TOKEN, LEASE).await).await;
    assert_eq!(refused.code, RefusalCode::NotLeading);
}

#[tokio::test]
async fn events_of_a_sensor_pod_of_version_1_are_understood() {
    let harness = LinkHarness::start().await;
    harness.relay.expect_pod(&sensor(), "p1", directives(&webhook()));
    let (_, refused) = refusal(harness.post("/v1/deliver", SENSOR_TOKEN, DELIVER).await).await;
    assert_eq!(refused.code, RefusalCode::Away, "its receiver is not there");
}
