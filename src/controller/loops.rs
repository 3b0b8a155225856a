//! What the controller knows of live loops: who may speak for an Agent, and what they last said.
//!
//! In memory only. The reconciler says which pod is the Agent's ([`Loops::expect`]); the link server lets that pod and
//! no other speak; each accepted report wakes the reconciler of its Agent. After a restart it is empty until the
//! gateways have attached again, and status must keep what it says until then.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;
use tokio::sync::{mpsc, watch};

use crate::link::messages::{Directives, Known, Refusal, RefusalCode, Report};

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
pub struct Heard {
    /// The report.
    pub report: Report,
    /// When the last message of any kind came.
    pub at: Timestamp,
}

struct Entry {
    pod: LivePod,
    known: Known,
    directives: watch::Sender<Directives>,
    heard: Option<Heard>,
    contact: Option<Timestamp>,
}

/// The table of live loops.
pub struct Loops {
    entries: Mutex<HashMap<AgentKey, Entry>>,
    changed: mpsc::UnboundedSender<AgentKey>,
}

impl Loops {
    /// An empty table, and the stream of Agents to reconcile because of what their pods said.
    #[must_use]
    pub fn new() -> (Self, mpsc::UnboundedReceiver<AgentKey>) {
        let (changed, stream) = mpsc::unbounded_channel();
        (
            Self {
                entries: Mutex::default(),
                changed,
            },
            stream,
        )
    }

    /// Says which pod is the Agent's, what is known of it, and what it is to do. Idempotent; another pod than before
    /// starts a new entry, and the old pod is refused from then on.
    pub fn expect(&self, agent: &AgentKey, pod: LivePod, known: Known, directives: Directives) {
        let mut entries = self.lock();
        match entries.get_mut(agent) {
            Some(entry) if entry.pod == pod => {
                entry.known = known;
                entry.directives.send_if_modified(|old| {
                    let new = *old != directives;
                    *old = directives;
                    new
                });
            }
            _ => {
                let entry = Entry {
                    pod,
                    known,
                    directives: watch::Sender::new(directives),
                    heard: None,
                    contact: None,
                };
                entries.insert(agent.clone(), entry);
            }
        }
    }

    /// The Agent has no pod: nobody may speak for it.
    pub fn forget(&self, agent: &AgentKey) {
        self.lock().remove(agent);
    }

    /// What the pod with this uid last said; `None` when another pod spoke, or nobody yet.
    #[must_use]
    pub fn heard(&self, agent: &AgentKey, pod_uid: &str) -> Option<Heard> {
        self.lock()
            .get(agent)
            .filter(|entry| entry.pod.uid == pod_uid)
            .and_then(|entry| entry.heard.clone())
    }

    /// How many calls limits refused to the Agent, as its gateway last said.
    #[must_use]
    pub fn refused_calls(&self, agent: &AgentKey) -> Option<i64> {
        let entries = self.lock();
        let heard = entries.get(agent)?.heard.as_ref()?;
        Some(heard.report.budget.refused_calls)
    }

    /// When the pod with this uid last had contact of any kind.
    #[must_use]
    pub fn last_contact(&self, agent: &AgentKey, pod_uid: &str) -> Option<Timestamp> {
        self.lock()
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
    ) -> Result<(Known, watch::Receiver<Directives>), Refusal> {
        let mut entries = self.lock();
        let entry = speaker(&mut entries, agent, pod)?;
        entry.contact = Some(now);
        Ok((entry.known.clone(), entry.directives.subscribe()))
    }

    /// A pod reports. The reconciler is woken when what it says is new.
    pub fn report(&self, agent: &AgentKey, pod: &LivePod, report: Report, now: Timestamp) -> Result<(), Refusal> {
        let mut entries = self.lock();
        let entry = speaker(&mut entries, agent, pod)?;
        entry.contact = Some(now);
        let news = entry.heard.as_ref().is_none_or(|heard| heard.report != report);
        entry.heard = Some(Heard { report, at: now });
        if news {
            // The receiver is gone only while the process ends.
            let _ = self.changed.send(agent.clone());
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<AgentKey, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn speaker<'a>(
    entries: &'a mut HashMap<AgentKey, Entry>,
    agent: &AgentKey,
    pod: &LivePod,
) -> Result<&'a mut Entry, Refusal> {
    let entry = entries.get_mut(agent).ok_or_else(|| Refusal {
        code: RefusalCode::NotLeading,
        message: "the controller has not looked at this Agent yet; try again".into(),
    })?;
    if entry.pod != *pod {
        return Err(Refusal {
            code: RefusalCode::Fenced,
            message: format!("epoch {} of another pod holds this Agent", entry.pod.epoch),
        });
    }
    Ok(entry)
}
