//! The time of the last turn.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::*;

#[test]
fn the_time_of_the_last_turn_changes_only_when_another_one_has_begun() {
    let mut case = Case::default();
    let time = |status: &AgentStatus| {
        status
            .r#loop
            .as_ref()
            .unwrap()
            .last_turn_time
            .clone()
            .map(|time| time.0)
    };
    assert_eq!(time(&case.status()), None, "no turn yet");
    let begun = |turn| {
        let mut last_report = reported(LoopState::Running);
        last_report.report.loop_.as_mut().unwrap().turn = turn;
        Some(last_report)
    };
    case.last_report = begun(1);
    let first = case.status();
    assert_eq!(time(&first), Some(now()));
    let earlier = now() - jiff::SignedDuration::from_mins(5);
    case.old = first;
    case.old.r#loop.as_mut().unwrap().last_turn_time = Some(Time(earlier));
    assert_eq!(time(&case.status()), Some(earlier), "the same turn");
    case.last_report = None;
    assert_eq!(time(&case.status()), Some(earlier), "no report");
    case.suspend = true;
    assert_eq!(time(&case.status()), Some(earlier));
    case.suspend = false;
    case.last_report = begun(2);
    assert_eq!(time(&case.status()), Some(now()));
}
