//! Computes the status of a Sensor. Pure.
//!
//! Values that no pod has reported since this controller started keep their written value, so that a restart of the
//! controller writes nothing and no total ever decreases.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use kube::ResourceExt;

use super::decide::SensorObstacle;
use super::index::SensorReceiver;
use super::{conditions, pod};
use crate::api::Sensor;
use crate::api::condition::{self, ConditionType};
use crate::api::sensor::{ReceiverStatus, SensorSource, SensorStatus, SensorTotals, SourceType};
use crate::controller::runtime::pod_state::PodState;
use crate::link::deliveries::SensorPodReport;
use crate::link::sensor_messages::SensorReport;
use crate::support::text::first_bytes;

/// Receivers whose totals are kept in status, so that a restart of the controller counts nothing twice.
pub(super) const MAX_RECEIVERS: usize = 100;
/// Maximum number of bytes of `status.lastDeliveryId`.
const ID_BYTES: usize = 253;

pub(super) struct SensorStatusInput<'a> {
    pub(super) sensor: &'a Sensor,
    pub(super) old: &'a SensorStatus,
    /// What is wrong with the spec.
    pub(super) problem: Option<&'a str>,
    /// The Sensor's own pod; `None`: the Sensor runs in the pods of its receivers.
    pub(super) own: Option<OwnPod<'a>>,
    /// The receivers and the latest reports of their pods.
    pub(super) receivers: &'a [SensorReceiver],
    /// Agents that the spec names and that do not exist.
    pub(super) absent: &'a [String],
    /// Uids of all Agents of its namespace.
    pub(super) agents: &'a BTreeSet<String>,
    /// Totals, as last counted, of receivers beyond [`MAX_RECEIVERS`].
    pub(super) beyond: &'a BTreeMap<String, SensorTotals>,
    pub(super) now: Timestamp,
}

#[derive(Clone, Copy)]
pub(super) struct OwnPod<'a> {
    pub(super) pod: Option<&'a PodState>,
    /// Its latest report.
    pub(super) last_report: Option<&'a SensorPodReport>,
    /// No report for [`REPORT_TIMEOUT`](crate::controller::delivery_relay::REPORT_TIMEOUT), or no pod for as long.
    pub(super) silent: bool,
    /// Why there is no pod that matches the spec.
    pub(super) obstacle: Option<&'a SensorObstacle>,
}

/// A pod in which the Sensor runs.
pub(super) struct ReportingPod<'a> {
    /// Uid under which its share of the totals is kept.
    uid: &'a str,
    /// Name of the Agent, or of the Sensor for its own pod.
    pub(super) name: &'a str,
    /// Whether it should run now.
    awake: bool,
    pub(super) report: &'a SensorReport,
}

impl SensorStatusInput<'_> {
    /// The problem with the spec or an object it references, with its reason.
    pub(super) fn mistake(&self) -> Option<(&'static str, &str)> {
        let problem = self.problem.map(|problem| (conditions::INVALID_SPEC, problem));
        let obstacle = self.own.and_then(|own| own.obstacle).filter(|found| found.of_spec);
        problem.or_else(|| obstacle.map(|found| (found.reason, found.message.as_str())))
    }

    pub(super) fn listens(&self) -> bool {
        self.mistake().is_none() && !self.sensor.spec.suspend
    }

    /// Receivers that are not suspended, so that their pods should run the Sensor.
    pub(super) fn awake(&self) -> impl Iterator<Item = &SensorReceiver> {
        self.receivers.iter().filter(|receiver| !receiver.facts.suspended)
    }

    /// The reports on the source: of the Sensor's own pod, or else of the pods of its receivers.
    fn speakers(&self) -> impl Iterator<Item = ReportingPod<'_>> {
        let own = self.own.and_then(|own| own.last_report).map(|last| ReportingPod {
            uid: self.uid(),
            name: self.sensor.metadata.name.as_deref().unwrap_or_default(),
            awake: true,
            report: &last.report,
        });
        own.into_iter()
            .chain(self.in_receivers().filter(|_| self.own.is_none()))
    }

    fn in_receivers(&self) -> impl Iterator<Item = ReportingPod<'_>> {
        self.receivers.iter().filter_map(|receiver| {
            Some(ReportingPod {
                uid: &receiver.facts.uid,
                name: &receiver.name,
                awake: !receiver.facts.suspended,
                report: receiver.report.as_ref()?,
            })
        })
    }

    /// The reports whose totals count. For a Sensor with its own pod these include receivers whose pods scored a
    /// signal.
    fn counting(&self) -> impl Iterator<Item = ReportingPod<'_>> {
        let scored = self.in_receivers().filter(|speaker| {
            let totals = speaker.report.totals;
            self.own.is_some() && totals != SensorTotals::default()
        });
        self.speakers().chain(scored)
    }

    /// Reports on the current generation of the spec, from pods that should run it.
    pub(super) fn spoken(&self) -> impl Iterator<Item = ReportingPod<'_>> {
        let generation = self.sensor.metadata.generation.unwrap_or_default();
        self.speakers()
            .filter(move |speaker| speaker.awake && speaker.report.generation == generation)
    }

    fn uid(&self) -> &str {
        self.sensor.metadata.uid.as_deref().unwrap_or_default()
    }
}

/// A status, and what to remember once it is written.
pub(super) struct ComputedStatus {
    pub(super) status: SensorStatus,
    pub(super) beyond: BTreeMap<String, SensorTotals>,
}

pub(super) fn compute(facts: &SensorStatusInput<'_>) -> ComputedStatus {
    let old = facts.old;
    let counted = count(facts);
    let mut status = SensorStatus {
        observed_generation: facts.sensor.metadata.generation,
        conditions: conditions::compute(facts),
        r#type: Some(type_of(&facts.sensor.spec.source)),
        totals: counted.totals,
        receivers: counted.receivers,
        pending_deliveries: pending(facts),
        url: url(facts.sensor),
        ..old.clone()
    };
    let last = facts
        .speakers()
        .filter_map(|speaker| speaker.report.last.as_ref())
        .filter(|last| old.last_event_time.is_none_or(|known| last.at > known))
        .max_by(|a, b| (a.at, &a.id).cmp(&(b.at, &b.id)));
    if let Some(last) = last {
        // Whole seconds, as everywhere in Kubernetes.
        status.last_event_time = Timestamp::from_second(last.at.as_second()).ok();
        status.last_delivery_id = Some(truncate_id(&last.id));
    }
    if !facts.listens() {
        (status.consecutive_failures, status.next_attempt_at) = (0, None);
    } else if facts.spoken().next().is_some() {
        let failures = facts.spoken().map(|speaker| speaker.report.consecutive_failures);
        status.consecutive_failures = failures.max().unwrap_or_default().max(0);
        status.next_attempt_at = facts
            .spoken()
            .filter_map(|speaker| speaker.report.next_attempt_at)
            .min();
    }
    ComputedStatus {
        status,
        beyond: counted.beyond,
    }
}

/// Events that at least one receiver has not acknowledged. Without a report it keeps its written value.
fn pending(facts: &SensorStatusInput<'_>) -> Option<i64> {
    let reported = facts.own?.last_report.map(|last| last.pending_deliveries.max(0));
    Some(reported.or(facts.old.pending_deliveries).unwrap_or_default())
}

fn url(sensor: &Sensor) -> Option<String> {
    sensor.spec.source.webhook.as_ref()?;
    let (name, namespace) = (sensor.name_any(), sensor.namespace().unwrap_or_default());
    Some(format!("http://{}.{namespace}.svc/", pod::service_name(&name)))
}

/// The status without counters that may grow all the time: an unchanged page counts as filtered at each poll, and
/// anyone can make a webhook refuse requests. A change of these alone is written at a slower pace.
pub(super) fn news(status: &SensorStatus) -> SensorStatus {
    let mut status = status.clone();
    let parts = status.receivers.iter_mut().map(|receiver| &mut receiver.totals);
    for totals in parts.chain([&mut status.totals]) {
        (totals.filtered, totals.refused) = (0, 0);
    }
    status
}

/// The part of the status that users wait for: a change is written as soon as the throttle allows. The rest are
/// figures.
pub(super) fn urgent(status: &SensorStatus) -> (Option<i64>, Vec<(&str, &str, &str)>) {
    let conditions = status.conditions.iter();
    let conditions = conditions.map(|held| (held.type_.as_str(), held.status.as_str(), held.reason.as_str()));
    (status.observed_generation, conditions.collect())
}

pub(super) fn has_condition(status: &SensorStatus, type_: ConditionType, value: &str) -> bool {
    condition::find(&status.conditions, type_).is_some_and(|held| held.status == value)
}

fn type_of(source: &SensorSource) -> SourceType {
    match (&source.poll, &source.stream, &source.webhook) {
        (Some(_), _, _) => SourceType::Poll,
        (_, Some(_), _) => SourceType::Stream,
        (_, _, Some(_)) => SourceType::Webhook,
        (None, None, None) if source.watch.is_some() => SourceType::Watch,
        (None, None, None) => SourceType::Schedule,
    }
}

struct CountedTotals {
    totals: SensorTotals,
    receivers: Vec<ReceiverStatus>,
    beyond: BTreeMap<String, SensorTotals>,
}

/// Adds to the totals what each receiver reported since it was last counted. The share of deleted receivers stays in
/// the sum.
fn count(facts: &SensorStatusInput<'_>) -> CountedTotals {
    let kept = facts
        .old
        .receivers
        .iter()
        .filter(|known| facts.agents.contains(&known.uid) || known.uid == facts.uid());
    let mut counted = CountedTotals {
        totals: facts.old.totals,
        receivers: kept.cloned().collect(),
        beyond: facts.beyond.clone(),
    };
    counted.beyond.retain(|uid, _| facts.agents.contains(uid));
    for ReportingPod { uid, name, report, .. } in facts.counting() {
        let reported = sane(report.totals);
        if let Some(known) = counted.receivers.iter_mut().find(|known| known.uid == uid) {
            counted.totals = add(counted.totals, since(known.totals, reported));
            known.totals = reported;
            continue;
        }
        let beyond = counted.beyond.remove(uid);
        if counted.receivers.len() < MAX_RECEIVERS {
            counted.totals = add(counted.totals, since(beyond.unwrap_or_default(), reported));
            counted.receivers.push(ReceiverStatus {
                uid: uid.to_owned(),
                name: name.to_owned(),
                totals: reported,
            });
        } else {
            // It is unknown whether its total was counted before: count from here on.
            let before = beyond.unwrap_or(reported);
            counted.totals = add(counted.totals, since(before, reported));
            counted.beyond.insert(uid.to_owned(), reported);
        }
    }
    counted
}

fn fields(totals: SensorTotals) -> [i64; 7] {
    [
        totals.events,
        totals.updates,
        totals.notifications,
        totals.filtered,
        totals.dropped,
        totals.refused,
        totals.errors,
    ]
}

fn of_fields([events, updates, notifications, filtered, dropped, refused, errors]: [i64; 7]) -> SensorTotals {
    SensorTotals {
        events,
        updates,
        notifications,
        filtered,
        dropped,
        refused,
        errors,
    }
}

/// Negative totals of a pod count as 0.
fn sane(totals: SensorTotals) -> SensorTotals {
    of_fields(fields(totals).map(|total| total.max(0)))
}

/// The increase of the totals. If any total decreased, the journal is new and began at 0, so all of it counts.
fn since(before: SensorTotals, now: SensorTotals) -> SensorTotals {
    let (before, now) = (fields(before), fields(now));
    let restarted = now.iter().zip(&before).any(|(now, before)| now < before);
    if restarted {
        return of_fields(now);
    }
    let mut more = now;
    for (more, before) in more.iter_mut().zip(before) {
        *more -= before;
    }
    of_fields(more)
}

fn add(totals: SensorTotals, more: SensorTotals) -> SensorTotals {
    let mut sum = fields(totals);
    for (sum, more) in sum.iter_mut().zip(fields(more)) {
        *sum = sum.saturating_add(more);
    }
    of_fields(sum)
}

fn truncate_id(id: &str) -> String {
    first_bytes(id, ID_BYTES).to_owned()
}
