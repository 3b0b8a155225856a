//! The controller's sessions with the pods of Agents: which pod may act for an Agent, and its last report.
//!
//! In memory only. The reconciler registers the Agent's pod ([`PodSessions::expect_pod`]); the link serves that pod and
//! no other; each report with changes triggers a reconcile of its Agent. After a restart the table is empty until the
//! gateways have attached again, and the status must keep its values until then.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use jiff::Timestamp;
use tokio::sync::{OwnedSemaphorePermit, mpsc, watch};

use super::durations::reports::ReportedDurations;
use super::durations::totals::DurationTotals;
use super::event_subscriptions::{
    EventSubscriptions, PageOutcome, PageReceiver, READINGS_OF_ALL, READINGS_OF_ONE, too_many, unavailable,
};
use crate::api::NamespacedName;
use crate::api::status::LoopOutcome;
use crate::link::events::{ClientRefusal, EventSubscription, EventsPage};
use crate::link::messages::{BudgetTerms, Directives, LoopTotals, PodRefusal, PodReport, RefusalCode, TelemetryLoss};
use crate::link::sensor_messages::SensorTerms;
use crate::link::text_fragments::TextFragment;
use crate::telemetry::namespace_totals::NamespaceTotals;

/// Maximum number of lost leases of one pod that are counted. A volume is reset while no pod uses it, and an Agent
/// holds few leases; but the number is what a gateway says, and the sum is that of all tenants.
pub const MAX_LOST_LEASES: u64 = 64;

/// The pod that may act for an Agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LivePod {
    /// UID of the pod object.
    pub uid: String,
    /// Epoch that the pod was created with.
    pub epoch: i64,
}

/// The last report of a pod.
#[derive(Clone, Debug, PartialEq)]
pub struct ReceivedReport {
    pub report: PodReport,
    /// When it was received.
    pub at: Timestamp,
}

struct PodSession {
    pod: LivePod,
    /// Uid of the Agent that the pod was created for.
    agent_uid: String,
    known: LoopTotals,
    directives: watch::Sender<Directives>,
    last_report: Option<ReceivedReport>,
    contact: Option<Timestamp>,
    readings: EventSubscriptions,
    durations: ReportedDurations,
    /// Lost leases of this pod that were counted, at most [`MAX_LOST_LEASES`].
    counted_losses: u64,
}

#[derive(Default)]
struct PodSessionTable {
    entries: HashMap<NamespacedName, PodSession>,
    /// The [`BudgetTerms`] of each Agent, whether it has a pod or not.
    limits: HashMap<NamespacedName, BudgetTerms>,
    /// Id of the last subscription.
    readings: u64,
    /// Number of leases that each Agent's gateway has lost with its storage. Outlives the sessions, because the record
    /// of a gateway does too.
    lost_leases: HashMap<NamespacedName, i64>,
    /// The Sensors that run in each Agent's pod, whether it has one or not.
    sensors: HashMap<NamespacedName, Vec<SensorTerms>>,
    /// Uid of the pod that this leader has created for each Agent, until its session begins.
    created: HashMap<NamespacedName, String>,
    /// Agents without a pod for which something has arrived.
    wanted: HashSet<NamespacedName>,
    /// The events that can wake each Agent's loop, whether it has a pod or not.
    wake_events: HashMap<NamespacedName, Vec<String>>,
}

pub struct PodSessions {
    table: Mutex<PodSessionTable>,
    changed: mpsc::UnboundedSender<NamespacedName>,
    /// Whether pods upload their histories.
    stores_history: bool,
    /// Takes what the pods report about durations.
    durations: OnceLock<Arc<DurationTotals>>,
    /// Takes what the gateways report about refused calls.
    sums: OnceLock<Arc<NamespaceTotals>>,
}

impl PodSessions {
    /// Creates an empty table, and the stream of Agents to reconcile after new reports.
    #[must_use]
    pub fn new() -> (Self, mpsc::UnboundedReceiver<NamespacedName>) {
        let (changed, stream) = mpsc::unbounded_channel();
        (
            Self {
                table: Mutex::default(),
                changed,
                stores_history: false,
                durations: OnceLock::new(),
                sums: OnceLock::new(),
            },
            stream,
        )
    }

    /// Whether pods upload their histories; by default not.
    #[must_use]
    pub fn with_history(self, stores_history: bool) -> Self {
        Self { stores_history, ..self }
    }

    /// Adds what pods report about durations to these totals from now on. Has an effect once.
    pub fn count_durations(&self, totals: Arc<DurationTotals>) {
        if self.durations.set(totals).is_err() {
            tracing::error!("the durations that pods report are counted already");
        }
    }

    /// Adds the refused calls that gateways report to these sums from now on. Has an effect once.
    pub fn count_refused_calls(&self, sums: Arc<NamespaceTotals>) {
        if self.sums.set(sums).is_err() {
            tracing::error!("the refused calls that gateways report are counted already");
        }
    }

    /// This leader has created the pod with this uid for the Agent. No other leader can have received a report of it, so that
    /// its first one counts in full. A pod whose creation had no answer counts as one of a former leader.
    pub(super) fn pod_created(&self, agent: &NamespacedName, pod_uid: &str) {
        self.lock().created.insert(agent.clone(), pod_uid.to_owned());
    }

    /// Registers the pod of the Agent with this uid, with the known totals and its directives. Idempotent; a different pod starts a new
    /// session, and the old pod is refused from then on. Budget terms and Sensors are set separately, before or after,
    /// by [`PodSessions::set_budget_terms`] and [`PodSessions::set_sensors`]; those in `directives` are ignored.
    pub fn expect_pod(
        &self,
        (agent, agent_uid): (&NamespacedName, &str),
        pod: LivePod,
        known: LoopTotals,
        directives: Directives,
    ) {
        let mut table = self.lock();
        let mut directives = Directives {
            budget: table.limits.get(agent).cloned(),
            sensors: table.sensors.get(agent).cloned(),
            wake_events: table.wake_events.get(agent).cloned(),
            history: self.stores_history,
            ..directives
        };
        match table.entries.get_mut(agent) {
            Some(entry) if entry.pod == pod && entry.agent_uid == agent_uid => {
                entry.known = known;
                directives.readings = entry.readings.requested();
                entry.directives.send_if_modified(|old| {
                    let new = *old != directives;
                    *old = directives;
                    new
                });
            }
            // A different pod: replacing the session closes the old pod's directives and subscriptions.
            _ => {
                // Once: if this session ends before its pod does, the next one of that pod does not begin at 0.
                let is_new = table.created.remove(agent).is_some_and(|uid| uid == pod.uid);
                let entry = PodSession {
                    pod,
                    agent_uid: agent_uid.to_owned(),
                    known,
                    directives: watch::Sender::new(directives),
                    last_report: None,
                    contact: None,
                    readings: EventSubscriptions::default(),
                    durations: if is_new {
                        ReportedDurations::of_new_pod()
                    } else {
                        ReportedDurations::default()
                    },
                    counted_losses: 0,
                };
                table.entries.insert(agent.clone(), entry);
                table.wanted.remove(agent);
            }
        }
    }

    /// Sets an Agent's [`BudgetTerms`] and sends them at once. `None`: undecided, so no calls are made.
    pub fn set_budget_terms(&self, agent: &NamespacedName, limits: Option<BudgetTerms>) {
        let mut table = self.lock();
        if let Some(entry) = table.entries.get(agent) {
            entry.directives.send_if_modified(|directives| {
                let new = directives.budget != limits;
                directives.budget.clone_from(&limits);
                new
            });
        }
        match limits {
            Some(limits) => table.limits.insert(agent.clone(), limits),
            None => table.limits.remove(agent),
        };
    }

    /// Sets the Sensors that run in an Agent's pod and the events that can wake its loop, and sends them at once.
    /// `None`: undecided, so the pod keeps the previous ones.
    pub fn set_sensors(
        &self,
        agent: &NamespacedName,
        sensors: Option<Vec<SensorTerms>>,
        wake_events: Option<Vec<String>>,
    ) {
        let mut table = self.lock();
        if let Some(entry) = table.entries.get(agent) {
            entry.directives.send_if_modified(|directives| {
                let new = (&directives.sensors, &directives.wake_events) != (&sensors, &wake_events);
                directives.sensors.clone_from(&sensors);
                directives.wake_events.clone_from(&wake_events);
                new
            });
        }
        match wake_events {
            Some(names) => table.wake_events.insert(agent.clone(), names),
            None => table.wake_events.remove(agent),
        };
        match sensors {
            Some(sensors) => table.sensors.insert(agent.clone(), sensors),
            None => table.sensors.remove(agent),
        };
    }

    /// Requests a reconcile of an Agent.
    pub fn request_reconcile(&self, agent: &NamespacedName) {
        // Fails only during shutdown.
        let _ = self.changed.send(agent.clone());
    }

    /// Records contact with a pod; an error if it may not act for the Agent.
    pub fn record_contact(&self, agent: &NamespacedName, pod: &LivePod, now: Timestamp) -> Result<(), PodRefusal> {
        let mut table = self.lock();
        authorized_session(&mut table.entries, agent, pod)?.contact = Some(now);
        Ok(())
    }

    /// Records contact with a pod. Returns the uid of the Agent that it was created for, which may have been deleted and created
    /// again since; an error if the pod may not act for it.
    pub fn owner_of(&self, agent: &NamespacedName, pod: &LivePod, now: Timestamp) -> Result<String, PodRefusal> {
        let mut table = self.lock();
        let entry = authorized_session(&mut table.entries, agent, pod)?;
        entry.contact = Some(now);
        Ok(entry.agent_uid.clone())
    }

    /// Uid of the Agent that the pod with the session was created for.
    #[must_use]
    pub fn owner(&self, agent: &NamespacedName) -> Option<String> {
        let table = self.lock();
        Some(table.entries.get(agent)?.agent_uid.clone())
    }

    /// Removes the Agent's session: no pod may act for it.
    pub fn forget(&self, agent: &NamespacedName) {
        let mut table = self.lock();
        table.entries.remove(agent);
        table.lost_leases.remove(agent);
        table.created.remove(agent);
    }

    /// Something has arrived for an Agent that was scaled to zero: the reconciler creates its pod. Lost with this process;
    /// the sender repeats what it has.
    pub fn want_pod(&self, agent: &NamespacedName) {
        if self.lock().wanted.insert(agent.clone()) {
            // Fails only during shutdown.
            let _ = self.changed.send(agent.clone());
        }
    }

    /// Whether the last report of the pod that has the session says that the loop has ended for lack of tasks.
    #[must_use]
    pub fn reports_scaled_to_zero(&self, agent: &NamespacedName) -> bool {
        let table = self.lock();
        let report = table.entries.get(agent).and_then(|entry| entry.last_report.as_ref());
        let outcome = report.and_then(|last| last.report.loop_.as_ref()?.outcome);
        outcome == Some(LoopOutcome::ScaledToZero)
    }

    /// Whether something waits for the pod of an Agent.
    #[must_use]
    pub fn is_wanted(&self, agent: &NamespacedName) -> bool {
        self.lock().wanted.contains(agent)
    }

    /// The last report of a pod other than `pod_uid` that still has the session, with that pod. `None` for `pod_uid`:
    /// the Agent has no pod.
    #[must_use]
    pub fn final_report(&self, agent: &NamespacedName, pod_uid: Option<&str>) -> Option<(LivePod, ReceivedReport)> {
        let table = self.lock();
        let entry = table.entries.get(agent)?;
        let other = pod_uid != Some(entry.pod.uid.as_str());
        let report = entry.last_report.clone().filter(|_| other)?;
        Some((entry.pod.clone(), report))
    }

    /// The last report of the pod with this UID; `None` if the session belongs to another pod, or has no report yet.
    #[must_use]
    pub fn last_report(&self, agent: &NamespacedName, pod_uid: &str) -> Option<ReceivedReport> {
        self.lock()
            .entries
            .get(agent)
            .filter(|entry| entry.pod.uid == pod_uid)
            .and_then(|entry| entry.last_report.clone())
    }

    /// The last report of the pod that has the session.
    #[must_use]
    pub fn newest_report(&self, agent: &NamespacedName) -> Option<PodReport> {
        let table = self.lock();
        let received = table.entries.get(agent)?.last_report.as_ref()?;
        Some(received.report.clone())
    }

    /// Number of the Agent's calls that limits refused, from the last report of its gateway.
    #[must_use]
    pub fn refused_calls(&self, agent: &NamespacedName) -> Option<i64> {
        let table = self.lock();
        let last = table.entries.get(agent)?.last_report.as_ref()?;
        Some(last.report.budget.refused_calls.max(0))
    }

    /// What the Agent's pod has not exported, from the last report of its gateway.
    #[must_use]
    pub fn telemetry_loss(&self, agent: &NamespacedName) -> Option<TelemetryLoss> {
        let table = self.lock();
        let last = table.entries.get(agent)?.last_report.as_ref()?;
        Some(last.report.telemetry_loss)
    }

    /// Time of the last contact with the pod with this UID.
    #[must_use]
    pub fn last_contact(&self, agent: &NamespacedName, pod_uid: &str) -> Option<Timestamp> {
        self.lock()
            .entries
            .get(agent)
            .filter(|entry| entry.pod.uid == pod_uid)
            .and_then(|entry| entry.contact)
    }

    /// Attaches a pod: returns the known totals of its loop, and its [`Directives`].
    pub fn attach(
        &self,
        agent: &NamespacedName,
        pod: &LivePod,
        now: Timestamp,
    ) -> Result<(LoopTotals, watch::Receiver<Directives>), PodRefusal> {
        let mut table = self.lock();
        let entry = authorized_session(&mut table.entries, agent, pod)?;
        entry.contact = Some(now);
        Ok((entry.known.clone(), entry.directives.subscribe()))
    }

    /// Stores the report of a pod. Triggers a reconcile if it differs from the last one. Returns how many leases the gateway has
    /// lost with its storage since the last report of any pod of the Agent. None before the first report, since a former
    /// leader may have noticed those, and none after a lower number.
    pub fn report(
        &self,
        agent: &NamespacedName,
        pod: &LivePod,
        mut report: PodReport,
        now: Timestamp,
    ) -> Result<u64, PodRefusal> {
        let mut guard = self.lock();
        let table = &mut *guard;
        let entry = authorized_session(&mut table.entries, agent, pod)?;
        entry.contact = Some(now);
        // Not kept with the report: what it adds to the totals is no reason for a reconcile.
        let growth = entry.durations.take(&mut report);
        let owner = entry.agent_uid.clone();
        let news = entry.last_report.as_ref().is_none_or(|last| last.report != report);
        let lost = report.budget.lost_leases;
        if let Some(sums) = self.sums.get() {
            // Under the lock, so that two reports are added in the order in which they were received.
            sums.refused_reported((agent, &owner), report.budget.refused_calls);
        }
        let before = table.lost_leases.insert(agent.clone(), lost).unwrap_or(lost);
        let newly_lost = entry.count_losses(lost.saturating_sub(before));
        entry.last_report = Some(ReceivedReport { report, at: now });
        if news {
            // Fails only during shutdown.
            let _ = self.changed.send(agent.clone());
        }
        drop(guard);
        if let Some(totals) = self.durations.get() {
            totals.add((agent, &owner), &growth, now);
        }
        Ok(newly_lost)
    }

    /// Opens a subscription to the Agent's events; the pod receives it with its [`Directives`] at once.
    pub(super) fn open_subscription(
        &self,
        agent: &NamespacedName,
        wanted: EventSubscription,
    ) -> Result<(u64, PageReceiver), ClientRefusal> {
        let mut table = self.lock();
        let no_pod = || unavailable("this Agent has no pod now; its events are available once it runs again");
        let readers = table.entries.get(agent).ok_or_else(no_pod)?.readings.len();
        if readers >= READINGS_OF_ONE {
            return Err(too_many(format!(
                "{READINGS_OF_ONE} readers of this Agent's events are connected, which is the limit; retry later"
            )));
        }
        if !table.make_room(&agent.namespace) {
            return Err(too_many(format!(
                "{READINGS_OF_ALL} readers are connected, which is the limit; retry later"
            )));
        }
        table.readings += 1;
        let id = table.readings;
        let entry = table.entries.get_mut(agent).ok_or_else(no_pod)?;
        let pages = entry.readings.open(EventSubscription { id, ..wanted });
        entry.publish_subscriptions();
        Ok((id, pages))
    }

    pub(super) fn close_subscription(&self, agent: &NamespacedName, id: u64) {
        let mut table = self.lock();
        if let Some(entry) = table.entries.get_mut(agent)
            && entry.readings.close(id)
        {
            entry.publish_subscriptions();
        }
    }

    /// The right of a page from the Agent's pod to wait for its reader; `None` while another one has it.
    pub(super) fn page_turn(&self, agent: &NamespacedName, reading: u64) -> Option<OwnedSemaphorePermit> {
        self.lock().entries.get(agent)?.readings.page_turn(reading)
    }

    /// Accepts a page of events from a pod, and takes its lines if there is room for them.
    pub(super) fn receive_page(
        &self,
        agent: &NamespacedName,
        pod: &LivePod,
        page: &mut EventsPage,
        now: Timestamp,
    ) -> Result<PageOutcome, PodRefusal> {
        let mut table = self.lock();
        let entry = authorized_session(&mut table.entries, agent, pod)?;
        entry.contact = Some(now);
        let taken = entry.readings.accept_page(page, tokio::time::Instant::now());
        if taken == PageOutcome::Over {
            entry.publish_subscriptions();
        }
        Ok(taken)
    }

    /// Passes text of an answer on to the subscriptions that want it.
    pub(super) fn receive_text(
        &self,
        agent: &NamespacedName,
        pod: &LivePod,
        fragment: TextFragment,
        now: Timestamp,
    ) -> Result<(), PodRefusal> {
        let mut table = self.lock();
        let entry = authorized_session(&mut table.entries, agent, pod)?;
        entry.contact = Some(now);
        entry.readings.pass_text(&Arc::new(fragment));
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, PodSessionTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PodSessionTable {
    /// Whether one more subscription to an Agent of this namespace has a place. If all are taken, the namespace that has the most
    /// loses its oldest one, provided that it has more than this one also with the new one: so no tenant can hold all places, and
    /// two never take them from each other in turn.
    fn make_room(&mut self, namespace: &str) -> bool {
        let mut taken = 0;
        let mut namespaces: HashMap<&str, (usize, Reverse<u64>)> = HashMap::new();
        for (agent, session) in &self.entries {
            let Some(oldest) = session.readings.oldest() else {
                continue;
            };
            taken += session.readings.len();
            let (count, first) = namespaces.entry(&agent.namespace).or_insert((0, Reverse(oldest)));
            *count += session.readings.len();
            *first = (*first).max(Reverse(oldest));
        }
        if taken < READINGS_OF_ALL {
            return true;
        }
        let own = namespaces.get(namespace).map_or(0, |(count, _)| *count);
        let Some((_, Reverse(id))) = namespaces.into_values().max().filter(|(count, _)| *count > own + 1) else {
            return false;
        };
        let holds = |session: &&mut PodSession| session.readings.oldest() == Some(id);
        if let Some(session) = self.entries.values_mut().find(holds) {
            session.readings.give_way(id);
            session.publish_subscriptions();
        }
        true
    }
}

impl PodSession {
    /// How much of what the pod reports to have lost is counted.
    fn count_losses(&mut self, lost: i64) -> u64 {
        let remaining = MAX_LOST_LEASES.saturating_sub(self.counted_losses);
        let counted = u64::try_from(lost).unwrap_or(0).min(remaining);
        self.counted_losses += counted;
        counted
    }

    fn publish_subscriptions(&self) {
        let wanted = self.readings.requested();
        self.directives.send_if_modified(|directives| {
            let new = directives.readings != wanted;
            directives.readings = wanted;
            new
        });
    }
}

fn authorized_session<'a>(
    entries: &'a mut HashMap<NamespacedName, PodSession>,
    agent: &NamespacedName,
    pod: &LivePod,
) -> Result<&'a mut PodSession, PodRefusal> {
    let entry = entries.get_mut(agent).ok_or_else(|| PodRefusal {
        code: RefusalCode::NotLeading,
        message: "the controller has not reconciled this Agent yet; retry".into(),
    })?;
    if entry.pod != *pod {
        return Err(PodRefusal {
            code: RefusalCode::Fenced,
            message: format!("another pod with epoch {} holds this Agent", entry.pod.epoch),
        });
    }
    Ok(entry)
}

#[cfg(test)]
mod tests;
