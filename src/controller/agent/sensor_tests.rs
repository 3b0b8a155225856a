//! Tests of the condition `SensorsHealthy`.

use super::status_tests::Case;
use crate::api::condition::{ConditionType, find};
use crate::api::sensor::SensorTotals;
use crate::link::sensor_messages::SensorReport;

#[test]
fn sensors_are_healthy_until_one_fails_and_again_once_it_recovers() {
    let report = |uid: &str, failure: Option<&str>| SensorReport {
        uid: uid.into(),
        generation: 1,
        totals: SensorTotals::default(),
        last: None,
        consecutive_failures: 0,
        failure: failure.map(Into::into),
        next_attempt_at: None,
    };
    let says = |case: &Case| {
        let status = case.status();
        let held = find(&status.conditions, ConditionType::SensorsHealthy).unwrap().clone();
        assert_eq!(find(&status.conditions, ConditionType::Ready).unwrap().status, "True");
        (held.status, held.reason, held.message)
    };
    let mut case = Case {
        sensors: [
            ("u".to_owned(), "prices".to_owned()),
            ("v".to_owned(), "mails".to_owned()),
        ]
        .into(),
        ..Case::default()
    };
    let say = |case: &mut Case, reports: Vec<SensorReport>| {
        case.last_report
            .as_mut()
            .unwrap()
            .report
            .loop_
            .as_mut()
            .unwrap()
            .sensors = reports;
    };
    let last_report = case.last_report.take();
    assert_eq!(
        find(&case.status().conditions, ConditionType::SensorsHealthy),
        None,
        "before the first report"
    );
    case.last_report = last_report;
    case.sensor_problems = None;
    assert_eq!(
        find(&case.status().conditions, ConditionType::SensorsHealthy),
        None,
        "not all Sensors were read"
    );
    case.sensor_problems = Some(Vec::new());
    assert_eq!(says(&case).0, "True", "no Sensor was reported");
    say(&mut case, vec![report("u", Some("why")), report("v", None)]);
    assert_eq!(
        says(&case),
        ("False".into(), "SensorFailing".into(), "Sensor prices: why".into())
    );
    case.old = case.status();
    let last_report = case.last_report.take();
    assert_eq!(says(&case).0, "False", "kept without a report");
    case.last_report = last_report;
    say(&mut case, vec![report("u", Some("why")), report("v", Some("so"))]);
    assert_eq!(says(&case).2, "Sensor prices: why (1 of 2 failing Sensors)");
    say(&mut case, vec![]);
    case.sensor_problems = Some(vec![("page".into(), "its pod: no image".into())]);
    assert_eq!(
        says(&case).2,
        "Sensor page: its pod: no image",
        "a Sensor with its own pod"
    );
    case.sensor_problems = Some(Vec::new());
    say(&mut case, vec![report("u", None), report("gone", Some("why"))]);
    assert_eq!(says(&case).0, "True", "a deleted Sensor does not count");
}
