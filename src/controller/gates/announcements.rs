//! Which gates are announced, and which announcements are due: one when a gate opens, one when it has closed. Pure.
//!
//! Built from the open gates as the statuses list them, so that nothing is missed and nothing has to be stored: a new
//! leader announces the open gates again, with the same ids. An announcement that fails is repeated with growing waits, for
//! as long as it is still useful. Facts of a gate are names, hashes and times; never arguments or other texts.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use serde::Serialize;
use tokio::time::Instant;

use crate::api::Agent;
use crate::api::status::{Gate, GateKind};
use crate::support::backoff::Backoff;

/// Most gates that are known at the same time; further ones are announced as these close.
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
}

impl GateAnnouncements {
    /// `waits`: the first and the longest wait between two attempts.
    pub(in crate::controller) fn new((first, longest): (Duration, Duration)) -> Self {
        Self {
            known: BTreeMap::new(),
            backoff: Backoff::new(first, longest),
        }
    }

    /// Takes note of all gates that are open now.
    pub(in crate::controller) fn observe(&mut self, open: BTreeMap<GateKey, GateFacts>, now: Instant, wall: Timestamp) {
        for (key, gate) in &mut self.known {
            gate.is_open = open.contains_key(key);
            gate.settle(now, wall);
        }
        self.known.retain(|_, gate| !gate.is_over(wall));
        for (key, facts) in open {
            // It can no longer be answered.
            if facts.is_over(wall) || self.known.contains_key(&key) {
                continue;
            }
            if self.known.len() >= MAX_KNOWN {
                break;
            }
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
    }

    /// The announcements to send now, at most this many, the one that is due for the longest time first.
    pub(in crate::controller) fn take_due(
        &mut self,
        most: usize,
        now: Instant,
        wall: Timestamp,
    ) -> Vec<DueAnnouncement> {
        if most == 0 {
            return Vec::new();
        }
        let known = self.known.iter_mut();
        let mut due: Vec<_> = known
            .filter_map(|(key, gate)| {
                let since = gate.due.filter(|due| *due <= now && !gate.is_over(wall))?;
                Some((since, key, gate))
            })
            .collect();
        due.sort_by_key(|(since, ..)| *since);
        due.truncate(most);
        due.into_iter().filter_map(|(_, key, gate)| gate.attempt(key)).collect()
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

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;
    use serde_json::{Value, json};

    use super::*;

    const WAITS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(5));

    /// A table with a clock that is moved by hand.
    struct AnnouncementHarness {
        table: GateAnnouncements,
        start: Instant,
        seconds: u64,
    }

    fn wall(seconds: u64) -> Timestamp {
        let base: Timestamp = "2026-11-22T14:00:00Z".parse().unwrap();
        base + Duration::from_secs(seconds)
    }

    /// An Agent with these gates, which expire an hour after the start.
    fn agent(gates: &[&str]) -> Agent {
        let gates: Vec<Value> = gates
            .iter()
            .map(|id| {
                json!({
                    "id": id, "kind": "UnknownOutcome", "tool": "bank__pay", "argumentsHash": "ab",
                    "openedAt": wall(0), "expiresAt": wall(3600), "untrustedContentSource": "server/web",
                })
            })
            .collect();
        serde_json::from_value(json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
            "metadata": {"namespace": "a", "name": "x", "uid": "u-1"},
            "spec": {"instructions": "canary", "model": {"api": "Scripted", "name": "small"}},
            "status": {"gates": gates},
        }))
        .unwrap()
    }

    impl AnnouncementHarness {
        fn new() -> Self {
            Self {
                table: GateAnnouncements::new(WAITS),
                start: Instant::now(),
                seconds: 0,
            }
        }

        fn now(&self) -> Instant {
            self.start + Duration::from_secs(self.seconds)
        }

        fn observe(&mut self, gates: &[&str]) {
            let open = open_gates(&agent(gates)).collect();
            self.table.observe(open, self.now(), wall(self.seconds));
        }

        fn due(&mut self, most: usize) -> Vec<DueAnnouncement> {
            self.table.take_due(most, self.now(), wall(self.seconds))
        }

        fn ids(&mut self) -> Vec<String> {
            self.due(100).into_iter().map(|due| due.id).collect()
        }

        fn finish(&mut self, gate: &str, sent: bool) {
            let key = ("u-1".to_owned(), gate.to_owned());
            self.table.finish(&key, sent, 1.0, self.now(), wall(self.seconds));
        }
    }

    #[test]
    fn each_opening_and_closing_is_announced_once_with_data_of_the_status_only() {
        let mut harness = AnnouncementHarness::new();
        harness.observe(&["g1"]);
        let due = harness.due(100).remove(0);
        assert_eq!((due.change, due.id.as_str()), (GateChange::Opened, "u-1_g1_opened"));
        let data = json!({
            "namespace": "a", "agent": "x", "uid": "u-1", "gate": "g1", "kind": "UnknownOutcome", "tool": "bank__pay",
            "argumentsHash": "ab", "openedAt": wall(0), "expiresAt": wall(3600), "untrustedContentSource": "server/web",
        });
        let body: Value = serde_json::from_str(&due.body).unwrap();
        assert_eq!(
            body,
            json!({"type": "agentloop.gate.opened", "timestamp": wall(0), "data": data})
        );
        harness.observe(&["g1"]);
        assert_eq!(harness.ids(), [""; 0], "an attempt is in progress");
        harness.finish("g1", true);
        harness.seconds = 600;
        harness.observe(&["g1"]);
        assert_eq!(harness.ids(), [""; 0]);
        harness.seconds = 700;
        harness.observe(&[]);
        let due = harness.due(100).remove(0);
        assert_eq!((due.change, due.id.as_str()), (GateChange::Closed, "u-1_g1_closed"));
        let body: Value = serde_json::from_str(&due.body).unwrap();
        assert_eq!(
            body,
            json!({"type": "agentloop.gate.closed", "timestamp": wall(700), "data": data})
        );
        harness.finish("g1", true);
        harness.observe(&[]);
        assert_eq!((harness.ids(), harness.table.known.len()), (vec![], 0));
    }

    #[test]
    fn attempts_that_fail_are_repeated_with_the_same_id_after_waits_that_grow_to_five_minutes() {
        let mut harness = AnnouncementHarness::new();
        harness.observe(&["g1"]);
        let mut waits = Vec::new();
        for attempt in 0..11 {
            let due = harness.due(100).remove(0);
            assert_eq!((due.id.as_str(), due.attempts), ("u-1_g1_opened", attempt));
            harness.finish("g1", false);
            let failed = harness.seconds;
            while harness.table.known.values().all(|gate| gate.due > Some(harness.now())) {
                assert_eq!(harness.ids(), [""; 0]);
                harness.seconds += 1;
                harness.observe(&["g1"]);
            }
            waits.push(harness.seconds - failed);
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
    }

    #[test]
    fn a_gate_that_closes_before_its_announcement_is_not_announced() {
        let mut harness = AnnouncementHarness::new();
        harness.observe(&["g1", "g2"]);
        assert_eq!(harness.ids(), ["u-1_g1_opened", "u-1_g2_opened"]);
        harness.finish("g1", false);
        harness.observe(&[]);
        // The attempt for g2 is in progress while it closes, and succeeds: its closing is announced.
        harness.finish("g2", true);
        harness.seconds = 60;
        assert_eq!(harness.ids(), ["u-1_g2_closed"]);
        harness.finish("g2", true);
        assert_eq!(harness.table.known.len(), 0);
    }

    #[test]
    fn an_opening_is_announced_until_the_gate_expires() {
        let mut harness = AnnouncementHarness::new();
        harness.observe(&["g1"]);
        assert_eq!(harness.ids(), ["u-1_g1_opened"]);
        harness.finish("g1", false);
        harness.seconds = 3599;
        harness.observe(&["g1"]);
        assert_eq!(harness.ids(), ["u-1_g1_opened"]);
        harness.finish("g1", false);
        harness.seconds = 3601;
        harness.observe(&["g1"]);
        assert_eq!((harness.ids(), harness.table.known.len()), (vec![], 0));
    }

    #[test]
    fn a_closing_is_announced_for_an_hour() {
        let mut harness = AnnouncementHarness::new();
        harness.observe(&["g1"]);
        assert_eq!(harness.ids().len(), 1);
        harness.finish("g1", true);
        harness.observe(&[]);
        assert_eq!(harness.ids(), ["u-1_g1_closed"]);
        harness.finish("g1", false);
        harness.seconds = 3599;
        harness.observe(&[]);
        assert_eq!(harness.ids(), ["u-1_g1_closed"]);
        harness.finish("g1", false);
        harness.seconds = 3602;
        harness.observe(&[]);
        assert_eq!((harness.ids(), harness.table.known.len()), (vec![], 0));
    }

    #[test]
    fn a_limited_number_is_sent_at_once_and_the_others_in_the_order_in_which_they_are_due() {
        let mut harness = AnnouncementHarness::new();
        harness.observe(&["g1", "g2", "g3"]);
        let first: Vec<_> = harness.due(2).into_iter().map(|due| due.key.1).collect();
        assert_eq!(first, ["g1", "g2"]);
        assert_eq!(harness.due(0), []);
        harness.finish("g1", false);
        harness.finish("g2", true);
        harness.seconds = 5;
        harness.observe(&["g1", "g2", "g3", "g4"]);
        let next: Vec<_> = harness.due(100).into_iter().map(|due| due.key.1).collect();
        assert_eq!(next, ["g3", "g1", "g4"]);
    }

    #[test]
    fn gates_beyond_the_limit_wait_until_others_close() {
        let mut harness = AnnouncementHarness::new();
        let key = |number: usize| ("u-1".to_owned(), format!("g{number:05}"));
        let fact = open_gates(&agent(&["g"])).next().unwrap().1;
        let gates = |from: usize, to: usize| -> BTreeMap<GateKey, GateFacts> {
            (from..to).map(|number| (key(number), fact.clone())).collect()
        };
        let (now, at) = (harness.now(), wall(0));
        harness.table.observe(gates(0, MAX_KNOWN), now, at);
        assert_eq!(harness.table.known.len(), MAX_KNOWN);
        harness.table.observe(gates(0, MAX_KNOWN + 1), now, at);
        assert!(!harness.table.known.contains_key(&key(MAX_KNOWN)));
        harness.table.observe(gates(1, MAX_KNOWN + 1), now, at);
        assert!(harness.table.known.contains_key(&key(MAX_KNOWN)));
        assert_eq!(harness.table.known.len(), MAX_KNOWN);
    }
}
