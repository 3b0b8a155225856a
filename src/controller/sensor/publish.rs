//! Writes the status when it is due, as a patch of the differences, sends Events for its transitions, and requests reconciles
//! of the receivers.

use std::time::Duration;

use kube::Resource;
use kube::api::Api;
use serde_json::json;

use super::apply::AppliedSteps;
use super::conditions;
use super::decide::{RelayStep, SensorObstacle, SensorPlan};
use super::events;
use super::observe::ObservedSensor;
use super::pod;
use super::reconcile_state::PodHealth;
use super::registry::SensorRegistry;
use super::snapshot::SensorSnapshot;
use super::status::{self, ComputedStatus, OwnPod, SensorStatusInput, compute, urgent};
use crate::api::condition::{self, ConditionType};
use crate::api::sensor::SensorStatus;
use crate::api::{NamespacedName, Sensor};
use crate::controller::delivery_relay::{REPORT_TIMEOUT, SensorSession};
use crate::controller::runtime::backoff::{REFERENCES, until};
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::status_throttle::StatusStep;
use crate::controller::runtime::status_writer::{CONFLICT_RETRY, StatusWrite, merge_patch, write_status};

/// What is published about a Sensor.
pub(super) struct Publication {
    computed: ComputedStatus,
    step: StatusStep,
    pub(super) pod_health: PodHealth,
    /// A failure of the Sensor's own pod is a condition of its receivers too: they are reconciled when it begins and ends.
    requests_receivers: bool,
    /// Consecutive reconciles that found an obstacle.
    pub(super) obstructed: u32,
    /// Time until obstacles and waiting objects are checked again.
    pub(super) recheck: Option<Duration>,
    /// Time until the pod would be silent.
    silence_check: Option<Duration>,
}

impl Publication {
    /// Computes the status, and what follows from it. Pure.
    pub(super) fn of(observed: &ObservedSensor, plan: &SensorPlan, applied: &AppliedSteps) -> Self {
        let snapshot = &observed.snapshot;
        let obstacle = plan.obstacle.as_ref().or(applied.obstacle.as_ref());
        let session = session(snapshot, plan);
        let (silent, silence_check) = silence(snapshot, session.as_ref());
        let computed = status(snapshot, session.as_ref(), silent, obstacle);
        let has_pod = pod::has_pod(&snapshot.known.object.spec.source);
        let pod_health = pod_health(has_pod, &computed.status);
        let obstructed = obstacle.map_or(0, |_| snapshot.memory.obstructed.saturating_add(1));
        // Obstacles are not watched, so they are checked again with backoff.
        let obstacle_check = obstacle.map(|_| REFERENCES.delay(obstructed, &snapshot.memory.uid));
        let rechecks = [obstacle_check, plan.objects.recheck, applied.recheck];
        Self {
            step: step(snapshot, &computed.status),
            requests_receivers: snapshot.memory.pod_health != pod_health,
            pod_health,
            obstructed,
            recheck: rechecks.into_iter().flatten().min(),
            silence_check: silence_check.filter(|_| has_pod),
            computed,
        }
    }
}

/// The session of the Sensor's pod once the plan is carried out.
fn session(snapshot: &SensorSnapshot, plan: &SensorPlan) -> Option<SensorSession> {
    let before = snapshot.session.as_ref();
    let RelayStep::Expect { pod_uid, .. } = &plan.relay else {
        return before.cloned();
    };
    let same = before.filter(|session| session.pod_uid == *pod_uid);
    Some(same.cloned().unwrap_or_else(|| SensorSession {
        pod_uid: pod_uid.clone(),
        last_report: None,
        silent: false,
    }))
}

/// Whether the Sensor's own pod is silent, and when to check again: the sweep covers no pod that never came up.
fn silence(snapshot: &SensorSnapshot, session: Option<&SensorSession>) -> (bool, Option<Duration>) {
    if let Some(session) = session {
        return (session.silent, None);
    }
    let waited = snapshot.at.saturating_duration_since(snapshot.memory.since);
    let left = REPORT_TIMEOUT.saturating_sub(waited);
    (left.is_zero(), (!left.is_zero()).then_some(left))
}

fn status(
    snapshot: &SensorSnapshot,
    session: Option<&SensorSession>,
    silent: bool,
    obstacle: Option<&SensorObstacle>,
) -> ComputedStatus {
    let sensor = &snapshot.known.object;
    let own = pod::has_pod(&sensor.spec.source).then(|| OwnPod {
        silent,
        pod: snapshot.children.as_ref().and_then(|children| children.pod.as_ref()),
        last_report: session.and_then(|session| session.last_report.as_ref()),
        obstacle,
    });
    compute(&SensorStatusInput {
        sensor,
        old: &snapshot.last.status,
        problem: snapshot.known.problem(),
        own,
        receivers: &snapshot.receivers,
        absent: &snapshot.absent,
        agents: &snapshot.agents,
        beyond: &snapshot.memory.beyond,
        now: snapshot.now,
    })
}

fn pod_health(has_pod: bool, status: &SensorStatus) -> PodHealth {
    let connected = condition::find(&status.conditions, ConditionType::Connected).filter(|_| has_pod);
    match connected.filter(|connected| conditions::is_failing(&connected.reason)) {
        Some(failing) => PodHealth::Failing(failing.message.clone()),
        None => PodHealth::Healthy,
    }
}

/// Whether the status is written now. Three speeds: conditions as soon as the throttle allows, figures after 15 s, and
/// counters that may grow without news after 5 min. So neither a busy source nor refused requests cause a write each.
fn step(snapshot: &SensorSnapshot, new: &SensorStatus) -> StatusStep {
    let (old, pace) = (&snapshot.last.status, snapshot.memory.pace);
    if old == new {
        return StatusStep::Keep;
    }
    let due = if status::news(old) == status::news(new) {
        pace.next_minor()
    } else {
        pace.next(urgent(old) != urgent(new))
    };
    if due > snapshot.now {
        StatusStep::Postpone(until(due, snapshot.now))
    } else {
        StatusStep::Write
    }
}

/// The result of [`publish`].
pub(super) struct PublishedSensorStatus {
    /// Time until the status is to be computed again.
    pub(super) next: Option<Duration>,
    /// The status that was written, and the resource version that the Sensor has since.
    pub(super) written: Option<(Option<String>, ComputedStatus)>,
}

impl PublishedSensorStatus {
    fn nothing(next: Option<Duration>) -> Self {
        Self { next, written: None }
    }
}

/// Writes the status if it is due and sends the Events.
pub(super) async fn publish(
    sensors: &SensorRegistry,
    observed: &ObservedSensor,
    publication: Publication,
) -> Result<PublishedSensorStatus, ReconcileError> {
    let (snapshot, key) = (&observed.snapshot, &observed.snapshot.key);
    if publication.requests_receivers {
        for receiver in &snapshot.receivers {
            sensors
                .setup
                .loops
                .request_reconcile(&NamespacedName::new(&key.namespace, &receiver.name));
        }
    }
    let silence_check = publication.silence_check;
    match publication.step {
        StatusStep::Keep => return Ok(PublishedSensorStatus::nothing(silence_check)),
        StatusStep::Postpone(delay) => return Ok(PublishedSensorStatus::nothing(Some(earliest(delay, silence_check)))),
        StatusStep::Write => {}
    }
    let (last, computed) = (&snapshot.last, publication.computed);
    // The first write is complete, so that no printer column is empty where it should say 0.
    let before = if last.status.observed_generation.is_some() {
        json!(last.status)
    } else {
        json!({})
    };
    let api: Api<Sensor> = Api::namespaced(sensors.setup.client.clone(), &key.namespace);
    let changes = merge_patch(&before, &json!(computed.status));
    let written = write_status(&api, &key.name, last.version.as_deref(), changes).await?;
    if written == StatusWrite::Conflict {
        return Ok(PublishedSensorStatus::nothing(Some(CONFLICT_RETRY)));
    }
    // Sent after the write: a failed write is computed again, and its Events are not sent twice.
    let about = snapshot.known.object.object_ref(&());
    sensors
        .setup
        .events
        .send(events::from_status(&last.status, &computed.status), &about);
    Ok(PublishedSensorStatus {
        next: silence_check,
        written: match written {
            StatusWrite::Written(version) => Some((version, computed)),
            StatusWrite::Gone | StatusWrite::Conflict => None,
        },
    })
}

/// When to reconcile again: for the write that is due, or for the check that comes first. A status whose counters may
/// wait for minutes must not delay the report of a silent pod.
fn earliest(write: Duration, silence_check: Option<Duration>) -> Duration {
    silence_check.map_or(write, |check| check.min(write))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_that_wait_for_minutes_do_not_delay_the_check_for_a_silent_pod() {
        let (minutes, seconds) = (Duration::from_mins(5), Duration::from_secs(20));
        assert_eq!(earliest(minutes, Some(seconds)), seconds);
        assert_eq!(earliest(seconds, Some(minutes)), seconds);
        assert_eq!(earliest(minutes, None), minutes);
    }
}
