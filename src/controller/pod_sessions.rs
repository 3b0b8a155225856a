//! What the controller knows of live loops: who may speak for an Agent, and what they last said.
//!
//! In memory only. The reconciler says which pod is the Agent's ([`PodSessions::expect_pod`]); the link server lets that pod and
//! no other speak; each accepted report wakes the reconciler of its Agent. After a restart it is empty until the
//! gateways have attached again, and status must keep what it says until then.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;
use tokio::sync::{mpsc, watch};

use super::event_subscriptions::{
    EventSubscriptions, PageOutcome, PageReceiver, READINGS_OF_ALL, READINGS_OF_ONE, too_many, unavailable,
};
use crate::link::events::{EventSubscription, EventsPage, ReadRefusal};
use crate::link::messages::{BudgetTerms, Directives, LoopTotals, PodRefusal, PodReport, RefusalCode};
use crate::link::sensor_messages::SensorTerms;

/// An Agent, by namespace and name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AgentKey {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
}

/// The pod that may speak for an Agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LivePod {
    /// Uid of the pod object.
    pub uid: String,
    /// Epoch the pod was created with.
    pub epoch: i64,
}

/// What a pod last said.
#[derive(Clone, Debug, PartialEq)]
pub struct ReceivedReport {
    /// The report.
    pub report: PodReport,
    /// When the last message of any kind came.
    pub at: Timestamp,
}

struct PodSession {
    pod: LivePod,
    known: LoopTotals,
    directives: watch::Sender<Directives>,
    heard: Option<ReceivedReport>,
    contact: Option<Timestamp>,
    readings: EventSubscriptions,
}

#[derive(Default)]
struct SessionTable {
    entries: HashMap<AgentKey, PodSession>,
    /// What limits each Agent's calls, whether its pod is there or not.
    limits: HashMap<AgentKey, BudgetTerms>,
    /// Number of the last reading.
    readings: u64,
    /// What runs in each Agent's pod, likewise.
    sensors: HashMap<AgentKey, Vec<SensorTerms>>,
    /// Which events can wake each Agent's loop, likewise.
    wake_events: HashMap<AgentKey, Vec<String>>,
}

/// The table of live loops.
pub struct PodSessions {
    table: Mutex<SessionTable>,
    changed: mpsc::UnboundedSender<AgentKey>,
}

impl PodSessions {
    /// An empty table, and the stream of Agents to reconcile because of what their pods said.
    #[must_use]
    pub fn new() -> (Self, mpsc::UnboundedReceiver<AgentKey>) {
        let (changed, stream) = mpsc::unbounded_channel();
        (
            Self {
                table: Mutex::default(),
                changed,
            },
            stream,
        )
    }

    /// Says which pod is the Agent's, what is known of it, and what it is to do. Idempotent; another pod than before
    /// starts a new entry, and the old pod is refused from then on. What limits its calls and which Sensors run in it is what
    /// [`PodSessions::set_budget_terms`] and [`PodSessions::set_sensors`] say, before or after: `directives` says nothing of these.
    pub fn expect_pod(&self, agent: &AgentKey, pod: LivePod, known: LoopTotals, directives: Directives) {
        let mut table = self.lock();
        let mut directives = Directives {
            budget: table.limits.get(agent).cloned(),
            sensors: table.sensors.get(agent).cloned(),
            wake_events: table.wake_events.get(agent).cloned(),
            ..directives
        };
        match table.entries.get_mut(agent) {
            Some(entry) if entry.pod == pod => {
                entry.known = known;
                directives.readings = entry.readings.requested();
                entry.directives.send_if_modified(|old| {
                    let new = *old != directives;
                    *old = directives;
                    new
                });
            }
            _ => {
                let entry = PodSession {
                    pod,
                    known,
                    directives: watch::Sender::new(directives),
                    heard: None,
                    contact: None,
                    readings: EventSubscriptions::default(),
                };
                table.entries.insert(agent.clone(), entry);
            }
        }
    }

    /// Says what limits an Agent's calls, at once. `None`: that is not decided, and no call is made.
    pub fn set_budget_terms(&self, agent: &AgentKey, limits: Option<BudgetTerms>) {
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

    /// Says which Sensors run in an Agent's pod and which events can wake its loop, at once. `None`: that is not decided,
    /// and what was said before goes on.
    pub fn set_sensors(&self, agent: &AgentKey, sensors: Option<Vec<SensorTerms>>, wake_events: Option<Vec<String>>) {
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

    /// Asks for a reconcile of an Agent.
    pub fn request_reconcile(&self, agent: &AgentKey) {
        // The receiver is gone only while the process ends.
        let _ = self.changed.send(agent.clone());
    }

    /// A pod speaks about its leases.
    pub fn record_contact(&self, agent: &AgentKey, pod: &LivePod, now: Timestamp) -> Result<(), PodRefusal> {
        let mut table = self.lock();
        authorized_session(&mut table.entries, agent, pod)?.contact = Some(now);
        Ok(())
    }

    /// The Agent has no pod: nobody may speak for it.
    pub fn forget(&self, agent: &AgentKey) {
        self.lock().entries.remove(agent);
    }

    /// The Agent's pod is `pod_uid` now, or there is none: another one that spoke is refused from now on. Which one that
    /// was, and its last word, which is given once.
    pub fn detach_other(&self, agent: &AgentKey, pod_uid: Option<&str>) -> Option<(LivePod, ReceivedReport)> {
        let mut table = self.lock();
        let entry = table.entries.get(agent)?;
        if Some(entry.pod.uid.as_str()) == pod_uid {
            return None;
        }
        let PodSession { pod, heard, .. } = table.entries.remove(agent)?;
        heard.map(|heard| (pod, heard))
    }

    /// What the pod with this uid last said; `None` when another pod spoke, or nobody yet.
    #[must_use]
    pub fn last_report(&self, agent: &AgentKey, pod_uid: &str) -> Option<ReceivedReport> {
        self.lock()
            .entries
            .get(agent)
            .filter(|entry| entry.pod.uid == pod_uid)
            .and_then(|entry| entry.heard.clone())
    }

    /// How many leases the Agent's gateway lost with its storage, as it last said; 0 until it has.
    #[must_use]
    pub fn lost_leases(&self, agent: &AgentKey) -> i64 {
        let table = self.lock();
        let heard = table.entries.get(agent).and_then(|entry| entry.heard.as_ref());
        heard.map_or(0, |heard| heard.report.budget.lost_leases)
    }

    /// How many calls limits refused to the Agent, as its gateway last said.
    #[must_use]
    pub fn refused_calls(&self, agent: &AgentKey) -> Option<i64> {
        let table = self.lock();
        let heard = table.entries.get(agent)?.heard.as_ref()?;
        Some(heard.report.budget.refused_calls)
    }

    /// When the pod with this uid last had contact of any kind.
    #[must_use]
    pub fn last_contact(&self, agent: &AgentKey, pod_uid: &str) -> Option<Timestamp> {
        self.lock()
            .entries
            .get(agent)
            .filter(|entry| entry.pod.uid == pod_uid)
            .and_then(|entry| entry.contact)
    }

    /// A pod introduces itself: what is known of its loop, and its directives.
    pub fn attach(
        &self,
        agent: &AgentKey,
        pod: &LivePod,
        now: Timestamp,
    ) -> Result<(LoopTotals, watch::Receiver<Directives>), PodRefusal> {
        let mut table = self.lock();
        let entry = authorized_session(&mut table.entries, agent, pod)?;
        entry.contact = Some(now);
        Ok((entry.known.clone(), entry.directives.subscribe()))
    }

    /// A pod reports. The reconciler is woken when what it says is new.
    pub fn report(&self, agent: &AgentKey, pod: &LivePod, report: PodReport, now: Timestamp) -> Result<(), PodRefusal> {
        let mut table = self.lock();
        let entry = authorized_session(&mut table.entries, agent, pod)?;
        entry.contact = Some(now);
        let news = entry.heard.as_ref().is_none_or(|heard| heard.report != report);
        entry.heard = Some(ReceivedReport { report, at: now });
        if news {
            // The receiver is gone only while the process ends.
            let _ = self.changed.send(agent.clone());
        }
        Ok(())
    }

    /// Somebody reads the Agent's events from here on; its pod is told at once.
    pub(super) fn open_subscription(
        &self,
        agent: &AgentKey,
        (after, words): (i64, bool),
    ) -> Result<(u64, PageReceiver), ReadRefusal> {
        let mut table = self.lock();
        if table.entries.values().map(|entry| entry.readings.len()).sum::<usize>() >= READINGS_OF_ALL {
            return Err(too_many(format!(
                "{READINGS_OF_ALL} readers are served already; try again later"
            )));
        }
        table.readings += 1;
        let id = table.readings;
        let entry = table
            .entries
            .get_mut(agent)
            .ok_or_else(|| unavailable("this Agent has no pod now, and its events are read from its pod"))?;
        if entry.readings.len() >= READINGS_OF_ONE {
            return Err(too_many(format!(
                "{READINGS_OF_ONE} read this Agent's events already; try again later"
            )));
        }
        let pages = entry.readings.open(EventSubscription { id, after, words });
        entry.publish_subscriptions();
        Ok((id, pages))
    }

    /// Nobody reads that any more.
    pub(super) fn close_subscription(&self, agent: &AgentKey, id: u64) {
        let mut table = self.lock();
        if let Some(entry) = table.entries.get_mut(agent)
            && entry.readings.close(id)
        {
            entry.publish_subscriptions();
        }
    }

    /// A pod sends events to one who reads them.
    pub(super) fn receive_page(
        &self,
        agent: &AgentKey,
        pod: &LivePod,
        page: EventsPage,
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

    fn lock(&self) -> MutexGuard<'_, SessionTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PodSession {
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
    entries: &'a mut HashMap<AgentKey, PodSession>,
    agent: &AgentKey,
    pod: &LivePod,
) -> Result<&'a mut PodSession, PodRefusal> {
    let entry = entries.get_mut(agent).ok_or_else(|| PodRefusal {
        code: RefusalCode::NotLeading,
        message: "the controller has not looked at this Agent yet; try again".into(),
    })?;
    if entry.pod != *pod {
        return Err(PodRefusal {
            code: RefusalCode::Fenced,
            message: format!("epoch {} of another pod holds this Agent", entry.pod.epoch),
        });
    }
    Ok(entry)
}
