//! The conditions and Events of Sensors, and the messages about their Secrets, as users read them.

use agentloop_texts::TextRows;
use serde_json::{Value, json};
use strum::IntoEnumIterator;

use super::super::conditions::{NAME_TAKEN, REFUSED, SECRET_NOT_FOUND};
use super::super::secrets;
use super::*;
use crate::api::sensor::SensorSource;
use crate::controller::kstatus::{KstatusVerdict, assert_computed};

fn pod(status: &Value) -> PodState {
    let pod = json!({"metadata": {"name": "clock-sensor-0"}, "status": status});
    PodState::of(&serde_json::from_value(pod).unwrap())
}

fn with_own(own: Owned) -> Case {
    Case {
        own: Some(own),
        ..Case::default()
    }
}

fn pod_report(failure: Option<&str>) -> SensorPodReport {
    let report = SensorReport {
        failure: failure.map(Into::into),
        ..report(1)
    };
    SensorPodReport {
        report,
        pending_deliveries: 0,
    }
}

/// Sensors that run in the pods of their receivers.
fn in_receivers() -> Vec<Case> {
    let failing = |name: &str| {
        let report = SensorReport {
            failure: Some("<message of the source>".into()),
            ..report(0)
        };
        receiver(name, Some(report))
    };
    let with = |change: fn(&mut SensorReceiver)| {
        let mut one = receiver("a", Some(report(0)));
        change(&mut one);
        Case {
            receivers: vec![one],
            ..Case::default()
        }
    };
    let of = |receivers| Case {
        receivers,
        ..Case::default()
    };
    vec![
        Case::default(),
        Case {
            problem: Some("spec.updates[0].value: <mistake>"),
            ..Case::default()
        },
        Case {
            suspend: true,
            ..Case::default()
        },
        Case {
            receivers: Vec::new(),
            absent: vec!["a".into()],
            ..Case::default()
        },
        Case {
            absent: ["b", "c", "d", "e"].map(Into::into).into(),
            ..Case::default()
        },
        with(|one| one.facts.suspended = true),
        with(|one| one.facts.ephemeral = true),
        of(vec![receiver("a", None)]),
        of(vec![failing("a")]),
        of(vec![failing("a"), failing("b")]),
        Case {
            signals: json!([{"name": "urgent", "model": {"prompt": "How urgent is it?"}}]),
            ..Case::default()
        },
    ]
}

/// Sensors with their own pod.
fn in_own_pod() -> Vec<Case> {
    let obstacle = |reason, message: &str, of_spec| Owned {
        obstacle: Some(SensorObstacle {
            reason,
            message: message.into(),
            of_spec,
        }),
        ..Owned::default()
    };
    let running = json!({"conditions": [{"type": "Ready", "status": "True"}]});
    let silent = |pod: Option<PodState>| Owned {
        pod,
        last_report: Some(pod_report(None)),
        silent: true,
        ..Owned::default()
    };
    let ending = json!({"metadata": {"deletionTimestamp": now().to_string()}});
    let ending = PodState::of(&serde_json::from_value(ending).unwrap());
    let unschedulable = pod(&json!({"conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"},
    ]}));
    let mut cases: Vec<Case> = [
        obstacle(SECRET_NOT_FOUND, "<message about the Secret>", true),
        obstacle(NAME_TAKEN, "<message about the object>", false),
        obstacle(
            REFUSED,
            "the API server rejected StatefulSet clock-sensor: exceeded quota",
            false,
        ),
        Owned::default(),
        Owned {
            pod: Some(unschedulable),
            ..Owned::default()
        },
        Owned {
            pod: Some(waits_for("ImagePullBackOff")),
            ..Owned::default()
        },
        Owned {
            pod: Some(waits_for("CrashLoopBackOff")),
            ..Owned::default()
        },
        Owned {
            pod: Some(pod(
                &json!({"phase": "Failed", "reason": "Evicted", "message": "the node was low on memory"}),
            )),
            ..Owned::default()
        },
        Owned {
            pod: Some(pod(&running)),
            last_report: Some(pod_report(Some("<message of the source>"))),
            ..Owned::default()
        },
        silent(Some(pod(&running))),
        silent(Some(ending)),
        silent(Some(pod(&json!({})))),
        silent(None),
    ]
    .into_iter()
    .map(with_own)
    .collect();
    cases.push(Case {
        receivers: Vec::new(),
        ..with_own(Owned {
            last_report: Some(pod_report(None)),
            ..Owned::default()
        })
    });
    cases
}

#[test]
fn kstatus_reads_each_status_of_a_sensor_as_its_conditions_mean_it() {
    use KstatusVerdict::{Current, Failed, InProgress};
    let statuses: Vec<_> = in_receivers()
        .into_iter()
        .chain(in_own_pod())
        .map(|case| case.status())
        .collect();
    assert_computed("Sensor", &statuses, &[Current, Failed, InProgress]);
}

#[test]
fn the_texts_of_conditions_of_sensors() {
    let mut rows = TextRows::new();
    let kstatus = [ConditionType::Reconciling, ConditionType::Stalled];
    for case in in_receivers().into_iter().chain(in_own_pod()) {
        let status = case.status();
        for type_ in ConditionType::iter().filter(|type_| !kstatus.contains(type_)) {
            let Some(held) = find(&status.conditions, type_) else {
                continue;
            };
            let also = kstatus
                .into_iter()
                .find(|also| find(&status.conditions, *also).is_some());
            let (also, copied) = match (type_, also) {
                (ConditionType::Ready, also) => {
                    let others = [ConditionType::Connected, ConditionType::Accepted];
                    let same = |type_: &ConditionType| {
                        find(&status.conditions, *type_).is_some_and(|other| other.message == held.message)
                    };
                    (also, others.into_iter().find(same))
                }
                _ => (None, None),
            };
            let also = also.map_or_else(String::new, |also| format!(", {}", also.as_ref()));
            let message = copied.map_or_else(
                || held.message.clone(),
                |of| format!("(the message of {})", of.as_ref()),
            );
            rows.push(text!(
                type_.as_ref(),
                format!("{} {}{also}", held.status, held.reason),
                message
            ));
        }
    }
    assert_texts!("sensor-conditions", "Conditions of Sensors", rows);
}

#[test]
fn the_texts_of_events_of_sensors() {
    let mut rows = TextRows::new();
    let calm = Case::default().status();
    for case in in_receivers().into_iter().chain(in_own_pod()) {
        let status = case.status();
        for (old, new) in [(&calm, &status), (&status, &calm)] {
            for event in events::from_status(old, new) {
                let type_ = if event.warning { "Warning" } else { "Normal" };
                rows.push(text!(type_, format!("{} {}", event.reason, event.action), event.note));
            }
        }
    }
    rows.sort_by_key(|(type_, ..)| type_ == "Warning");
    assert_texts!("sensor-events", "Events of Sensors", rows);
}

#[test]
fn the_texts_about_secrets_of_sensors() {
    let mut rows = TextRows::new();
    let tls = json!({"caSecretRef": {"name": "x"}, "clientCertificateSecretRef": {"name": "x"}});
    for source in [
        json!({"webhook": {"scheme": "GitHub", "secretKeyRef": {"name": "x", "key": "k"}}}),
        json!({"poll": {"http": {"url": "https://a/", "headersSecretRef": {"name": "x"}, "tls": tls}}}),
    ] {
        let source: SensorSource = serde_json::from_value(source).unwrap();
        for needed in secrets::required(&source) {
            rows.push(text!("Accepted=False", "SecretNotFound", needed.absent()));
            rows.push(text!(
                "Accepted=False",
                "SecretNotFound",
                needed.missing_keys(&[]).unwrap()
            ));
        }
    }
    assert_texts!("sensor-secrets", "Messages about the Secrets of Sensors", rows);
}
