//! Tests of the computed status.

mod silence;
mod texts;

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use pretty_assertions::assert_eq;
use proptest::prelude::*;

use super::decide::SensorObstacle;
use super::events;
use super::index::{ReceiverFacts, SensorReceiver};
use super::status::{ComputedStatus, MAX_RECEIVERS, OwnPod, SensorStatusInput, compute, urgent};
use crate::api::Sensor;
use crate::api::condition::{ConditionType, find};
use crate::api::sensor::{SensorStatus, SensorTotals, SourceType};
use crate::controller::runtime::pod_state::PodState;
use crate::link::deliveries::SensorPodReport;
use crate::link::sensor_messages::{LastEvent, SensorReport};

fn now() -> Timestamp {
    "2026-11-22T14:00:00Z".parse().unwrap()
}

fn totals(events: i64) -> SensorTotals {
    SensorTotals {
        events,
        notifications: events / 2,
        ..SensorTotals::default()
    }
}

fn report(events: i64) -> SensorReport {
    SensorReport {
        uid: "s".into(),
        generation: 2,
        totals: totals(events),
        last: None,
        consecutive_failures: 0,
        failure: None,
        next_attempt_at: None,
    }
}

fn receiver(name: &str, report: Option<SensorReport>) -> SensorReceiver {
    SensorReceiver {
        name: name.into(),
        facts: ReceiverFacts {
            uid: format!("uid-of-{name}"),
            ..ReceiverFacts::default()
        },
        report,
    }
}

/// What a test may vary. The default is a schedule with one receiver, whose pod runs it.
struct Case {
    suspend: bool,
    /// Its signals.
    signals: serde_json::Value,
    problem: Option<&'static str>,
    receivers: Vec<SensorReceiver>,
    absent: Vec<String>,
    /// Existing Agents that are not receivers.
    others: Vec<&'static str>,
    beyond: BTreeMap<String, SensorTotals>,
    old: SensorStatus,
    /// The Sensor's own pod, if it has one.
    own: Option<Owned>,
}

/// The state of the Sensor's own pod.
#[derive(Default)]
struct Owned {
    pod: Option<PodState>,
    last_report: Option<SensorPodReport>,
    obstacle: Option<SensorObstacle>,
    silent: bool,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            suspend: false,
            signals: serde_json::json!([]),
            problem: None,
            receivers: vec![receiver("a", Some(report(0)))],
            absent: Vec::new(),
            others: Vec::new(),
            beyond: BTreeMap::new(),
            old: SensorStatus::default(),
            own: None,
        }
    }
}

impl Case {
    fn compute(&self) -> ComputedStatus {
        let mut sensor: Sensor = serde_json::from_value(serde_json::json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "Sensor",
            "metadata": {"name": "clock", "namespace": "n", "uid": "s", "generation": 2},
            "spec": {"agentNames": ["a"], "source": {"schedule": {"cron": "* * * * *"}}},
        }))
        .unwrap();
        sensor.spec.suspend = self.suspend;
        sensor.spec.signals = serde_json::from_value(self.signals.clone()).unwrap();
        let there = self.receivers.iter().map(|receiver| receiver.facts.uid.clone());
        let agents: BTreeSet<String> = there.chain(self.others.iter().map(|uid| (*uid).to_owned())).collect();
        compute(&SensorStatusInput {
            sensor: &sensor,
            old: &self.old,
            problem: self.problem,
            own: self.own.as_ref().map(|own| OwnPod {
                pod: own.pod.as_ref(),
                last_report: own.last_report.as_ref(),
                obstacle: own.obstacle.as_ref(),
                silent: own.silent,
            }),
            receivers: &self.receivers,
            absent: &self.absent,
            agents: &agents,
            beyond: &self.beyond,
            now: now(),
        })
    }

    fn status(&self) -> SensorStatus {
        self.compute().status
    }

    /// Computes the status and makes it the old one.
    fn write(&mut self) -> SensorStatus {
        let computed = self.compute();
        self.beyond = computed.beyond;
        self.old = computed.status.clone();
        computed.status
    }

    fn says(&self, type_: ConditionType) -> (String, String, String) {
        let status = self.status();
        let held = find(&status.conditions, type_).unwrap();
        (held.status.clone(), held.reason.clone(), held.message.clone())
    }

    fn reason(&self, type_: ConditionType) -> (String, String) {
        let (status, reason, _) = self.says(type_);
        (status, reason)
    }
}

fn event_reasons(old: &SensorStatus, new: &SensorStatus) -> Vec<String> {
    let notices = events::from_status(old, new);
    notices.into_iter().map(|notice| notice.reason).collect()
}

fn is(status: &str, reason: &str) -> (String, String) {
    (status.into(), reason.into())
}

#[test]
fn a_running_schedule_is_ready_and_a_repeated_status_changes_nothing() {
    let mut case = Case::default();
    let status = case.write();
    assert_eq!(case.reason(ConditionType::Ready), is("True", "Listening"));
    assert_eq!(case.reason(ConditionType::Durable), is("True", "Durable"));
    assert_eq!(status.r#type, Some(SourceType::Schedule));
    assert_eq!(case.write(), status);
    case.receivers[0].report = None;
    assert_eq!(case.write(), status, "after a restart no pod has reported yet");
}

#[test]
fn an_invalid_spec_is_stalled_and_causes_one_event() {
    let mut case = Case {
        problem: Some("spec.updates[0].value: no such function"),
        ..Case::default()
    };
    let refused = case.write();
    assert_eq!(case.reason(ConditionType::Accepted), is("False", "InvalidSpec"));
    assert_eq!(case.reason(ConditionType::Ready), is("False", "InvalidSpec"));
    assert_eq!(case.reason(ConditionType::Stalled), is("True", "InvalidSpec"));
    assert_eq!(case.reason(ConditionType::Connected), is("False", "InvalidSpec"));
    assert!(
        case.says(ConditionType::Accepted)
            .2
            .starts_with("spec.updates[0].value: ")
    );
    assert_eq!(event_reasons(&SensorStatus::default(), &refused), ["InvalidSpec"]);
    assert_eq!(event_reasons(&refused, &refused), [""; 0]);
    case.problem = None;
    let good = case.write();
    assert!(find(&good.conditions, ConditionType::Stalled).is_none());
    assert_eq!(case.reason(ConditionType::Ready), is("True", "Listening"));
}

#[test]
fn a_streak_of_failures_is_one_event_and_its_end_another() {
    let mut case = Case::default();
    let good = case.write();
    let fail = |case: &mut Case, failures: i64, message: &str| {
        let report = case.receivers[0].report.as_mut().unwrap();
        (report.consecutive_failures, report.failure) = (failures, (failures > 0).then(|| message.to_owned()));
        case.write()
    };
    let first = fail(&mut case, 1, "field change is missing");
    assert_eq!(case.reason(ConditionType::Ready), is("False", "SensorFailing"));
    assert_eq!(case.reason(ConditionType::Reconciling), is("True", "SensorFailing"));
    assert_eq!(
        case.says(ConditionType::Connected).2,
        "in the pod of Agent a: field change is missing"
    );
    assert_eq!(event_reasons(&good, &first), ["SensorFailing"]);
    let second = fail(&mut case, 2, "another word");
    assert_eq!(event_reasons(&first, &second), [""; 0]);
    assert_eq!(urgent(&first), urgent(&second), "the number of failures is not urgent");
    let again = fail(&mut case, 0, "");
    assert_eq!(event_reasons(&second, &again), ["Recovered"]);
    assert!(find(&again.conditions, ConditionType::Reconciling).is_none());
    assert_eq!(again.consecutive_failures, 0);
}

/// The Sensor's own pod, with a container that waits for this reason.
fn waits_for(reason: &str) -> PodState {
    let container = serde_json::json!({
        "name": "sensor", "image": "i", "imageID": "", "ready": false, "restartCount": 1,
        "state": {"waiting": {"reason": reason}},
    });
    let pod = serde_json::json!({"metadata": {"name": "s-sensor-0"}, "status": {"containerStatuses": [container]}});
    PodState::of(&serde_json::from_value(pod).unwrap())
}

#[test]
fn a_failure_of_its_own_pod_is_reported_once_and_persists_until_the_pod_reports() {
    let mut case = Case {
        own: Some(Owned::default()),
        ..Case::default()
    };
    let starting = case.write();
    assert_eq!(case.reason(ConditionType::Ready), is("False", "Starting"));
    let own = |case: &mut Case, reason: &str| case.own.as_mut().unwrap().pod = Some(waits_for(reason));
    own(&mut case, "ImagePullBackOff");
    let (status, reason, message) = case.says(ConditionType::Connected);
    assert_eq!((status.as_str(), reason.as_str()), ("False", "ImagePullFailed"));
    assert!(message.contains("sensor.imagePullSecrets"), "{message}");
    let failed = case.write();
    assert_eq!(event_reasons(&starting, &failed), ["ImagePullFailed"]);
    own(&mut case, "CrashLoopBackOff");
    let crashed = case.write();
    assert_eq!(event_reasons(&failed, &crashed), [""; 0], "the same streak");
    own(&mut case, "ContainerCreating");
    assert_eq!(
        case.reason(ConditionType::Connected),
        is("False", "CrashLooping"),
        "between two restarts"
    );
    case.own.as_mut().unwrap().last_report = Some(SensorPodReport {
        report: report(3),
        pending_deliveries: 2,
    });
    let well = case.write();
    assert_eq!(event_reasons(&crashed, &well), ["Recovered"]);
    assert_eq!((well.totals.events, well.pending_deliveries), (3, Some(2)));
    assert_eq!(
        (well.receivers.len(), well.receivers[0].uid.as_str()),
        (1, "s"),
        "the share of the Sensor's own pod"
    );
    case.own.as_mut().unwrap().last_report = None;
    assert_eq!(case.write(), well, "after a restart no pod has reported yet");
}

#[test]
fn scores_of_receivers_add_to_the_totals_and_do_not_affect_readiness() {
    let own = Owned {
        last_report: Some(SensorPodReport {
            report: report(3),
            pending_deliveries: 0,
        }),
        ..Owned::default()
    };
    let mut case = Case {
        own: Some(own),
        ..Case::default()
    };
    let scored = |notifications, errors| SensorReport {
        generation: 0,
        totals: SensorTotals {
            notifications,
            errors,
            ..SensorTotals::default()
        },
        ..report(0)
    };
    case.receivers = vec![receiver("a", Some(scored(2, 1))), receiver("b", Some(scored(0, 0)))];
    let status = case.write();
    let sum = |status: &SensorStatus| (status.totals.events, status.totals.notifications, status.totals.errors);
    assert_eq!(sum(&status), (3, 3, 1));
    assert_eq!(case.reason(ConditionType::Ready), is("True", "Listening"));
    assert_eq!(case.write(), status, "a repeated report counts nothing");
    case.receivers[1].report = Some(scored(1, 0));
    assert_eq!(sum(&case.write()), (3, 4, 1));
}

#[test]
fn suspended_it_is_ready_and_waits_for_nothing() {
    let mut case = Case::default();
    case.receivers[0].report.as_mut().unwrap().next_attempt_at = Some(now());
    let running = case.write();
    assert_eq!(running.next_attempt_at, Some(now()));
    case.suspend = true;
    let suspended = case.write();
    assert_eq!(case.reason(ConditionType::Ready), is("True", "SuspendedBySpec"));
    assert_eq!(suspended.next_attempt_at, None);
    assert_eq!(event_reasons(&running, &suspended), ["Suspended"]);
    case.suspend = false;
    let resumed = case.write();
    assert_eq!(event_reasons(&suspended, &resumed), ["Resumed"]);
}

#[test]
fn absent_or_suspended_receivers_are_reported_and_are_no_error() {
    let mut case = Case {
        receivers: Vec::new(),
        absent: vec!["a".into()],
        ..Case::default()
    };
    assert_eq!(case.reason(ConditionType::Ready), is("True", "NoReceiver"));
    assert_eq!(
        case.says(ConditionType::Accepted).2,
        "the spec is valid; Agent a does not exist and receives events once it is created"
    );
    case.absent = ["a", "b", "c", "d", "e"].map(str::to_owned).into();
    assert!(
        case.says(ConditionType::Accepted)
            .2
            .contains("a, b, c and 2 more do not exist")
    );
    case.receivers = vec![receiver("a", None)];
    assert_eq!(case.reason(ConditionType::Connected), is("Unknown", "Starting"));
    case.receivers[0].facts.suspended = true;
    case.receivers[0].report = Some(report(1));
    assert_eq!(case.reason(ConditionType::Connected), is("False", "ReceiversSuspended"));
    assert_eq!(case.status().totals.events, 1, "what it did before counts");
}

#[test]
fn a_report_for_an_older_spec_is_counted_and_does_not_affect_the_state_of_the_new_one() {
    let mut case = Case::default();
    let old = case.receivers[0].report.as_mut().unwrap();
    (old.generation, old.totals, old.failure) = (1, totals(3), Some("of the old one".into()));
    assert_eq!(case.reason(ConditionType::Connected), is("Unknown", "Starting"));
    assert_eq!(case.status().totals.events, 3);
}

#[test]
fn a_receiver_without_durable_state_is_named() {
    let mut case = Case::default();
    case.receivers[0].facts.ephemeral = true;
    let (status, reason, message) = case.says(ConditionType::Durable);
    assert_eq!((status.as_str(), reason.as_str()), ("False", "EphemeralReceiver"));
    assert!(
        message.starts_with("spec.storage.ephemeral is true for a:"),
        "{message}"
    );
    assert_eq!(case.reason(ConditionType::Ready), is("True", "Listening"));
}

#[test]
fn a_receiver_that_cannot_score_a_signal_is_named_with_the_fix_and_one_that_need_not_is_not() {
    let of = |model: serde_json::Value| {
        let mut case = Case {
            signals: serde_json::json!([{"name": "plain", "when": "true"}, {"name": "spike", "when": "true", "model": model}]),
            receivers: vec![receiver("a", Some(report(0))), receiver("b", Some(report(0)))],
            ..Case::default()
        };
        case.receivers[0].facts.scores = true;
        case
    };
    assert_eq!(
        of(serde_json::Value::Null).reason(ConditionType::Ready),
        is("True", "Listening")
    );
    let mut case = of(serde_json::json!({"prompt": "?"}));
    assert_eq!(case.reason(ConditionType::Ready), is("False", "NoLightModel"));
    let (status, _, message) = case.says(ConditionType::Stalled);
    assert_eq!(status, "True");
    assert!(
        message.starts_with("spec.signals[1].model: set spec.lightModel of b, or remove model"),
        "{message}"
    );
    case.receivers[1].facts.scores = true;
    assert_eq!(case.reason(ConditionType::Ready), is("True", "Listening"));
}

#[test]
fn totals_are_those_of_all_receivers_and_never_step_back() {
    let mut case = Case {
        receivers: vec![receiver("a", Some(report(5))), receiver("b", Some(report(2)))],
        ..Case::default()
    };
    let both = SensorTotals {
        events: 7,
        notifications: 3,
        ..SensorTotals::default()
    };
    assert_eq!(case.write().totals, both);
    case.receivers[0].report = Some(report(6));
    assert_eq!(case.write().totals.events, 8);
    case.receivers.remove(0);
    let status = case.write();
    assert_eq!(status.totals.events, 8, "a is gone");
    assert_eq!(status.receivers.len(), 1);
    case.receivers[0].report = Some(report(1));
    assert_eq!(case.write().totals.events, 9, "b has a new journal");
    case.receivers.insert(0, receiver("a", Some(report(1))));
    assert_eq!(case.write().totals.events, 10, "a recreated Agent begins at 0");
}

#[test]
fn a_former_receiver_is_counted_once_when_it_receives_again() {
    let mut case = Case::default();
    case.receivers[0].report = Some(report(5));
    case.write();
    let away = std::mem::take(&mut case.receivers);
    case.others = vec!["uid-of-a"];
    assert_eq!(case.write().totals.events, 5);
    case.receivers = away;
    case.receivers[0].report = Some(report(6));
    assert_eq!(case.write().totals.events, 6);
}

#[test]
fn the_last_event_is_the_newest_of_all_receivers() {
    let at = |second: i64, id: &str| {
        let at = Timestamp::from_second(second).unwrap();
        Some(LastEvent { at, id: id.into() })
    };
    let mut case = Case::default();
    case.receivers.push(receiver("b", Some(report(0))));
    case.receivers[0].report.as_mut().unwrap().last = at(7, "seven");
    case.receivers[1].report.as_mut().unwrap().last = at(9, &"é".repeat(200));
    let status = case.write();
    assert_eq!(status.last_event_time, Some(Timestamp::from_second(9).unwrap()));
    assert_eq!(status.last_delivery_id, Some("é".repeat(126)), "cut between characters");
    case.receivers.pop();
    assert_eq!(case.write().last_event_time, status.last_event_time);
}

#[test]
fn receivers_beyond_the_room_in_status_count_from_a_restart_on() {
    let many = |count: usize, events: i64| {
        let each = |number| receiver(&format!("a-{number}"), Some(report(events)));
        (0..count).map(each).collect::<Vec<_>>()
    };
    let full = i64::try_from(MAX_RECEIVERS).unwrap();
    let mut case = Case {
        receivers: many(MAX_RECEIVERS, 1),
        ..Case::default()
    };
    assert_eq!(case.write().totals.events, full);
    case.receivers = many(MAX_RECEIVERS + 1, 1);
    let status = case.write();
    assert_eq!((status.totals.events, status.receivers.len()), (full, MAX_RECEIVERS));
    case.receivers = many(MAX_RECEIVERS + 1, 2);
    assert_eq!(
        case.write().totals.events,
        2 * full + 1,
        "the one beyond the limit is remembered"
    );
    case.beyond.clear();
    case.receivers = many(MAX_RECEIVERS + 1, 3);
    assert_eq!(
        case.write().totals.events,
        3 * full + 1,
        "and starts over after a restart"
    );
}

proptest! {
    #[test]
    fn totals_only_grow_whatever_pods_report(reports in prop::collection::vec((0_usize..3, -3_i64..20, any::<bool>()), 1..40)) {
        let mut case = Case { receivers: Vec::new(), ..Case::default() };
        let mut before = 0;
        for (agent, events, there) in reports {
            let name = ["a", "b", "c"][agent];
            case.receivers.retain(|receiver| receiver.name != name);
            if there {
                case.receivers.push(receiver(name, Some(report(events))));
            }
            let now = case.write().totals.events;
            prop_assert!(now >= before);
            before = now;
            prop_assert_eq!(case.status(), case.old.clone());
        }
    }
}
