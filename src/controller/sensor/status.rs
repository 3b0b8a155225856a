//! The status that a Sensor should have. Pure.
//!
//! What no pod has spoken of since this controller started stays as it was written, so that a restart writes nothing, and
//! no total ever steps back.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use kube::ResourceExt;

use super::apply::SensorObstacle;
use super::index::SensorReceiver;
use super::{conditions, pod};
use crate::api::Sensor;
use crate::api::condition::{self, ConditionType};
use crate::api::sensor::{ReceiverStatus, SensorSource, SensorStatus, SensorTotals, SourceType};
use crate::controller::agent::pod_state::PodState;
use crate::link::deliveries::SensorPodReport;
use crate::link::sensor_messages::SensorReport;

/// Receivers whose totals are kept in status, so that a restart of the controller counts nothing twice.
pub(super) const MOST_RECEIVERS: usize = 100;
/// Most bytes of `status.lastDeliveryId`.
const ID_BYTES: usize = 253;

/// What a status is made of.
pub(super) struct SensorStatusInput<'a> {
    /// The Sensor.
    pub(super) sensor: &'a Sensor,
    /// Its status as last written.
    pub(super) old: &'a SensorStatus,
    /// What is wrong with its spec.
    pub(super) problem: Option<&'a str>,
    /// Its own pod; `None`: it runs in its receivers' pods.
    pub(super) own: Option<OwnPod<'a>>,
    /// Who receives, and what their pods said.
    pub(super) receivers: &'a [SensorReceiver],
    /// Agents that it names and that are not there.
    pub(super) absent: &'a [String],
    /// Uids of all Agents of its namespace.
    pub(super) agents: &'a BTreeSet<String>,
    /// Totals of receivers for whom status has no room, as last counted.
    pub(super) beyond: &'a BTreeMap<String, SensorTotals>,
    /// Now.
    pub(super) now: Timestamp,
}

/// What is known of a Sensor's own pod.
#[derive(Clone, Copy)]
pub(super) struct OwnPod<'a> {
    /// The pod.
    pub(super) pod: Option<&'a PodState>,
    /// What it last said.
    pub(super) said: Option<&'a SensorPodReport>,
    /// It has said nothing for [`SILENCE`](crate::controller::delivery_relay::SILENCE), or there was none for as long.
    pub(super) silent: bool,
    /// Why there is none as the spec wants it.
    pub(super) obstacle: Option<&'a SensorObstacle>,
}

/// A pod in which it runs.
pub(super) struct ReportingPod<'a> {
    /// Uid by which its part of the totals is kept.
    uid: &'a str,
    /// Name of its Agent, or of the Sensor.
    pub(super) name: &'a str,
    /// Whether it should run now.
    awake: bool,
    /// What it said.
    pub(super) report: &'a SensorReport,
}

impl SensorStatusInput<'_> {
    /// What is wrong with its spec or what that refers to, and the reason.
    pub(super) fn mistake(&self) -> Option<(&'static str, &str)> {
        let problem = self.problem.map(|problem| (conditions::INVALID_SPEC, problem));
        let obstacle = self.own.and_then(|own| own.obstacle).filter(|found| found.of_spec);
        problem.or_else(|| obstacle.map(|found| (found.reason, found.message.as_str())))
    }

    /// Whether it is meant to listen.
    pub(super) fn listens(&self) -> bool {
        self.mistake().is_none() && !self.sensor.spec.suspend
    }

    /// Receivers that should run it.
    pub(super) fn awake(&self) -> impl Iterator<Item = &SensorReceiver> {
        self.receivers.iter().filter(|receiver| !receiver.facts.suspended)
    }

    /// What was said, and by whom.
    fn speakers(&self) -> impl Iterator<Item = ReportingPod<'_>> {
        let own = self.own.and_then(|own| own.said).map(|said| ReportingPod {
            uid: self.uid(),
            name: self.sensor.metadata.name.as_deref().unwrap_or_default(),
            awake: true,
            report: &said.report,
        });
        own.into_iter()
            .chain(self.in_receivers().filter(|_| self.own.is_none()))
    }

    /// What the pods of receivers said.
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

    /// Whose totals count. Of a Sensor with a pod of its own also receivers in whose pods scores did something.
    fn counting(&self) -> impl Iterator<Item = ReportingPod<'_>> {
        let scored = self.in_receivers().filter(|speaker| {
            let totals = speaker.report.totals;
            self.own.is_some() && totals != SensorTotals::default()
        });
        self.speakers().chain(scored)
    }

    /// What was said of the spec as it is now by pods that should run it.
    pub(super) fn spoken(&self) -> impl Iterator<Item = ReportingPod<'_>> {
        let generation = self.sensor.metadata.generation.unwrap_or_default();
        self.speakers()
            .filter(move |speaker| speaker.awake && speaker.report.generation == generation)
    }

    fn uid(&self) -> &str {
        self.sensor.metadata.uid.as_deref().unwrap_or_default()
    }
}

/// A status, and what is to be remembered once it is written.
pub(super) struct ComputedStatus {
    pub(super) status: SensorStatus,
    pub(super) beyond: BTreeMap<String, SensorTotals>,
}

/// The status that a Sensor should have.
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
        // Whole seconds, as everywhere in the cluster.
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

/// Events that some receiver does not have yet. Without a word of the pod it stays as it was.
fn pending(facts: &SensorStatusInput<'_>) -> Option<i64> {
    let said = facts.own?.said.map(|said| said.pending_deliveries.max(0));
    Some(said.or(facts.old.pending_deliveries).unwrap_or_default())
}

fn url(sensor: &Sensor) -> Option<String> {
    sensor.spec.source.webhook.as_ref()?;
    let (name, namespace) = (sensor.name_any(), sensor.namespace().unwrap_or_default());
    Some(format!("http://{}.{namespace}.svc/", pod::service_name(&name)))
}

/// The same without what is no news: a page that stays as it is counts up with each look, and strangers can have a webhook
/// refuse as much as they like.
pub(super) fn news(status: &SensorStatus) -> SensorStatus {
    let mut status = status.clone();
    let parts = status.receivers.iter_mut().map(|receiver| &mut receiver.totals);
    for totals in parts.chain([&mut status.totals]) {
        (totals.filtered, totals.refused) = (0, 0);
    }
    status
}

/// What people wait for; the rest is figures.
pub(super) fn urgent(status: &SensorStatus) -> (Option<i64>, Vec<(&str, &str, &str)>) {
    let conditions = status.conditions.iter();
    let conditions = conditions.map(|held| (held.type_.as_str(), held.status.as_str(), held.reason.as_str()));
    (status.observed_generation, conditions.collect())
}

/// Whether a condition of this type has this status.
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

/// Adds what each receiver has done beyond what is counted already. Receivers that are gone keep their part of the sum.
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
        let said = sane(report.totals);
        if let Some(known) = counted.receivers.iter_mut().find(|known| known.uid == uid) {
            counted.totals = add(counted.totals, since(known.totals, said));
            known.totals = said;
            continue;
        }
        let beyond = counted.beyond.remove(uid);
        if counted.receivers.len() < MOST_RECEIVERS {
            counted.totals = add(counted.totals, since(beyond.unwrap_or_default(), said));
            counted.receivers.push(ReceiverStatus {
                uid: uid.to_owned(),
                name: name.to_owned(),
                totals: said,
            });
        } else {
            // Whether what it did before was counted is not known: it counts from here on.
            let before = beyond.unwrap_or(said);
            counted.totals = add(counted.totals, since(before, said));
            counted.beyond.insert(uid.to_owned(), said);
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

/// No pod can have done less than nothing.
fn sane(totals: SensorTotals) -> SensorTotals {
    of_fields(fields(totals).map(|total| total.max(0)))
}

/// What came on top. A total that stepped back is that of a new journal, which began at 0.
fn since(before: SensorTotals, now: SensorTotals) -> SensorTotals {
    let (before, now) = (fields(before), fields(now));
    let anew = now.iter().zip(&before).any(|(now, before)| now < before);
    if anew {
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
    let mut end = id.len().min(ID_BYTES);
    while !id.is_char_boundary(end) {
        end -= 1;
    }
    id[..end].to_owned()
}
