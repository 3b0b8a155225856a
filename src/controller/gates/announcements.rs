//! Which gates are announced, and which announcements are due: one when a gate opens, one when it has closed. Pure.
//!
//! Built from the open gates as the statuses list them, so that nothing is missed and nothing has to be stored: a new
//! leader announces the open gates again, with the same ids. An announcement that fails is repeated with growing waits, for
//! as long as it is still useful. Namespaces share the room and take turns, so that many gates of one delay none of another.
//! Facts of a gate are names, hashes and times; never arguments or other texts.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use serde::Serialize;
use tokio::time::Instant;

use crate::api::Agent;
use crate::api::status::{Gate, GateKind};
use crate::support::backoff::Backoff;

/// Most gates that are known at the same time, shared by the namespaces: beyond it, those of the namespaces that have the most
/// give way, and are announced as others of their namespace close. Each namespace has room for one. Gates whose opening was announced
/// stay until their closing is, even if the share of their namespace has become smaller since.
const MAX_KNOWN: usize = 10_000;
/// How long it is tried to announce that a gate has closed.
const CLOSED_FOR: SignedDuration = SignedDuration::from_hours(1);

/// The data of a gate in an announcement.
#[derive(Serialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub(in crate::controller) struct GateFacts {
    namespace: String,
    agent: String,
    /// Uid of the Agent.
    uid: String,
    gate: String,
    kind: GateKind,
    tool: String,
    arguments_hash: String,
    opened_at: Timestamp,
    /// `None`: it does not expire.
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    untrusted_content_source: Option<String>,
}

impl GateFacts {
    /// Whether it has expired.
    fn is_over(&self, now: Timestamp) -> bool {
        self.expires_at.is_some_and(|at| at <= now)
    }
}

/// Identifies a gate: the uid of its Agent, and its id.
pub(in crate::controller) type GateKey = (String, String);

/// The gates of an Agent that are open.
pub(in crate::controller) fn open_gates(agent: &Agent) -> impl Iterator<Item = (GateKey, GateFacts)> {
    let gates = agent.status.iter().flat_map(|status| &status.gates);
    gates.filter_map(|gate| {
        let facts = facts(agent, gate)?;
        Some(((facts.uid.clone(), facts.gate.clone()), facts))
    })
}

fn facts(agent: &Agent, gate: &Gate) -> Option<GateFacts> {
    Some(GateFacts {
        namespace: agent.namespace()?,
        agent: agent.name_any(),
        uid: agent.uid()?,
        gate: gate.id.clone(),
        kind: gate.kind,
        tool: gate.tool.clone(),
        arguments_hash: gate.arguments_hash.clone(),
        opened_at: gate.opened_at.0,
        expires_at: gate.expires_at.as_ref().map(|at| at.0),
        untrusted_content_source: gate.untrusted_content_source.clone(),
    })
}

/// What is announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, strum::EnumIter, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub(in crate::controller) enum GateChange {
    Opened,
    Closed,
}

/// An attempt that is due.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::controller) struct DueAnnouncement {
    pub(in crate::controller) key: GateKey,
    pub(in crate::controller) change: GateChange,
    /// The same for each attempt, also of another leader.
    pub(in crate::controller) id: String,
    pub(in crate::controller) body: String,
    /// Number of attempts before this one.
    pub(in crate::controller) attempts: u32,
}

/// How an announcement is getting on.
#[derive(Clone, Debug)]
enum AnnouncementStage {
    /// Its opening is to be announced.
    Opening,
    /// Its opening is announced, and it is open.
    Announced,
    /// It closed at this time, which is to be announced.
    Closing(Timestamp),
}

struct KnownGate {
    facts: GateFacts,
    is_open: bool,
    stage: AnnouncementStage,
    /// `None`: an attempt is in progress, or there is nothing to announce.
    due: Option<Instant>,
    backoff: Backoff,
    attempts: u32,
}

/// The gates that are known, and what is to be announced of them.
pub(in crate::controller) struct GateAnnouncements {
    known: BTreeMap<GateKey, KnownGate>,
    backoff: Backoff,
    /// The turn in which each namespace was served last; one without an entry is next.
    served: BTreeMap<String, u64>,
    turn: u64,
}

impl GateAnnouncements {
    /// `waits`: the first and the longest wait between two attempts.
    pub(in crate::controller) fn new((first, longest): (Duration, Duration)) -> Self {
        Self {
            known: BTreeMap::new(),
            backoff: Backoff::new(first, longest),
            served: BTreeMap::new(),
            turn: 0,
        }
    }

    /// Takes note of all gates that are open now.
    pub(in crate::controller) fn observe(
        &mut self,
        mut open: BTreeMap<GateKey, GateFacts>,
        now: Instant,
        wall: Timestamp,
    ) {
        for (key, gate) in &mut self.known {
            gate.is_open = open.contains_key(key);
            gate.settle(now, wall);
        }
        self.known.retain(|_, gate| !gate.is_over(wall));
        // One that is over can no longer be answered.
        open.retain(|key, facts| !facts.is_over(wall) && !self.known.contains_key(key));
        let share = share(self.demand(&open).into_values());
        self.keep_share(share);
        let mut counts = self.demand(&BTreeMap::new());
        for (key, facts) in open {
            let count = counts.entry(facts.namespace.clone()).or_default();
            if *count >= share {
                continue;
            }
            *count += 1;
            let gate = KnownGate {
                facts,
                is_open: true,
                stage: AnnouncementStage::Opening,
                due: Some(now),
                backoff: self.backoff,
                attempts: 0,
            };
            self.known.insert(key, gate);
        }
        self.served.retain(|namespace, _| counts.contains_key(namespace));
    }

    /// How many gates of each namespace there are to know.
    fn demand(&self, wanted: &BTreeMap<GateKey, GateFacts>) -> BTreeMap<String, usize> {
        let mut demand = BTreeMap::new();
        for facts in self.known.values().map(|gate| &gate.facts).chain(wanted.values()) {
            *demand.entry(facts.namespace.clone()).or_default() += 1;
        }
        demand
    }

    /// Forgets gates of namespaces that have more than this many, the last ones first: only those whose opening waits, as they are
    /// found again later. That a gate which was announced has closed is known nowhere else.
    fn keep_share(&mut self, share: usize) {
        let mut excess = self.demand(&BTreeMap::new());
        let mut forgotten: Vec<GateKey> = Vec::new();
        for (key, gate) in self.known.iter().rev().filter(|(_, gate)| gate.may_wait()) {
            let Some(count) = excess.get_mut(&gate.facts.namespace).filter(|count| **count > share) else {
                continue;
            };
            *count -= 1;
            forgotten.push(key.clone());
        }
        for key in forgotten {
            self.known.remove(&key);
        }
    }

    /// The announcements to send now, at most this many. The namespace that was served longest ago is next, with the
    /// announcement that is due for the longest time.
    pub(in crate::controller) fn take_due(
        &mut self,
        most: usize,
        now: Instant,
        wall: Timestamp,
    ) -> Vec<DueAnnouncement> {
        if most == 0 {
            return Vec::new();
        }
        let mut due: BTreeMap<&str, Vec<(Instant, &GateKey)>> = BTreeMap::new();
        for (key, gate) in &self.known {
            if let Some(since) = gate.due.filter(|due| *due <= now && !gate.is_over(wall)) {
                due.entry(&gate.facts.namespace).or_default().push((since, key));
            }
        }
        for gates in due.values_mut() {
            gates.sort_by_key(|due| Reverse(*due));
        }
        let mut taken: Vec<GateKey> = Vec::new();
        while taken.len() < most {
            let next = due.iter_mut().filter(|(_, gates)| !gates.is_empty());
            let next = next.min_by_key(|(namespace, gates)| (self.served.get(**namespace), gates.last().copied()));
            let Some((namespace, gates)) = next else { break };
            self.turn += 1;
            self.served.insert((*namespace).to_owned(), self.turn);
            taken.extend(gates.pop().map(|(_, key)| key.clone()));
        }
        let attempt = |key: GateKey| self.known.get_mut(&key)?.attempt(&key);
        taken.into_iter().filter_map(attempt).collect()
    }

    /// An attempt has ended. `spread` is a random number from 0 to 1.
    pub(in crate::controller) fn finish(
        &mut self,
        key: &GateKey,
        sent: bool,
        spread: f64,
        now: Instant,
        wall: Timestamp,
    ) {
        let Some(gate) = self.known.get_mut(key) else {
            return;
        };
        match (&gate.stage, sent) {
            (AnnouncementStage::Opening, true) => {
                gate.stage = AnnouncementStage::Announced;
                gate.settle(now, wall);
            }
            (AnnouncementStage::Closing(_), true) => {
                self.known.remove(key);
                return;
            }
            (AnnouncementStage::Opening | AnnouncementStage::Closing(_), false) => {
                gate.attempts = gate.attempts.saturating_add(1);
                gate.due = Some(now + gate.backoff.next_spread(spread));
            }
            (AnnouncementStage::Announced, _) => {}
        }
        if gate.is_over(wall) {
            self.known.remove(key);
        }
    }
}

impl KnownGate {
    /// A gate whose opening was announced has closed: that is announced too.
    fn settle(&mut self, now: Instant, wall: Timestamp) {
        if !self.is_open && matches!(self.stage, AnnouncementStage::Announced) {
            self.stage = AnnouncementStage::Closing(wall);
            self.due = Some(now);
            self.backoff.reset();
            self.attempts = 0;
        }
    }

    /// Whether its opening waits, and can be announced later as well.
    fn may_wait(&self) -> bool {
        matches!(self.stage, AnnouncementStage::Opening) && self.due.is_some()
    }

    /// Whether there is nothing more to announce. An attempt in progress is waited for.
    fn is_over(&self, wall: Timestamp) -> bool {
        match self.stage {
            // Its opening was not announced, so its closing is not either.
            AnnouncementStage::Opening => self.due.is_some() && (!self.is_open || self.facts.is_over(wall)),
            AnnouncementStage::Announced => false,
            AnnouncementStage::Closing(at) => self.due.is_some() && wall.duration_since(at) >= CLOSED_FOR,
        }
    }

    fn attempt(&mut self, key: &GateKey) -> Option<DueAnnouncement> {
        let (change, at) = match self.stage {
            AnnouncementStage::Opening => (GateChange::Opened, self.facts.opened_at),
            AnnouncementStage::Closing(at) => (GateChange::Closed, at),
            AnnouncementStage::Announced => return None,
        };
        self.due = None;
        let name: &str = change.into();
        let body = serde_json::json!({
            "type": format!("agentloop.gate.{name}"), "timestamp": at, "data": self.facts,
        });
        Some(DueAnnouncement {
            key: key.clone(),
            change,
            id: format!("{}_{}_{name}", self.facts.uid, self.facts.gate),
            body: body.to_string(),
            attempts: self.attempts,
        })
    }
}

/// How many gates each namespace may have, so that all together have at most [`MAX_KNOWN`] and none has to give way that has
/// fewer than another one; at least one.
fn share(demand: impl Iterator<Item = usize>) -> usize {
    let mut demand: Vec<usize> = demand.collect();
    demand.sort_unstable();
    let mut left = MAX_KNOWN;
    let mut namespaces = demand.len();
    for gates in demand {
        // The rest is divided among those that want more than an equal part of it.
        let part = left / namespaces;
        if gates > part {
            return part.max(1);
        }
        left -= gates;
        namespaces -= 1;
    }
    MAX_KNOWN
}

#[cfg(test)]
mod tests;
