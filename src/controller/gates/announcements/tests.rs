//! Tests of the announcements: what is announced, how often, and which gates are known at the same time.

use std::ops::Range;

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

/// Gates of an Agent with the name of its namespace.
fn gates_of(namespace: &str, numbers: Range<usize>) -> BTreeMap<GateKey, GateFacts> {
    let facts = open_gates(&agent(&["g"])).next().unwrap().1;
    let gate = |number| {
        let facts = GateFacts {
            namespace: namespace.to_owned(),
            gate: format!("g{number:05}"),
            ..facts.clone()
        };
        ((format!("uid-{namespace}"), facts.gate.clone()), facts)
    };
    numbers.map(gate).collect()
}

/// Which gates are known, by namespace.
fn known(harness: &AnnouncementHarness) -> BTreeMap<&str, usize> {
    let mut counts = BTreeMap::new();
    for gate in harness.table.known.values() {
        *counts.entry(&*gate.facts.namespace).or_default() += 1;
    }
    counts
}

impl AnnouncementHarness {
    fn observe_all<const N: usize>(&mut self, open: [BTreeMap<GateKey, GateFacts>; N]) {
        let open = open.into_iter().flatten().collect();
        self.table.observe(open, self.now(), wall(self.seconds));
    }

    /// The namespaces of the announcements that are due, in order.
    fn due_namespaces(&mut self, most: usize) -> Vec<String> {
        let namespace = |due: DueAnnouncement| due.key.0.replace("uid-", "");
        self.due(most).into_iter().map(namespace).collect()
    }
}

#[test]
fn gates_beyond_the_limit_wait_until_others_close() {
    let mut harness = AnnouncementHarness::new();
    let is_known = |harness: &AnnouncementHarness, number: usize| {
        let key = ("uid-a".to_owned(), format!("g{number:05}"));
        harness.table.known.contains_key(&key)
    };
    harness.observe_all([gates_of("a", 0..MAX_KNOWN)]);
    assert_eq!(harness.table.known.len(), MAX_KNOWN);
    harness.observe_all([gates_of("a", 0..MAX_KNOWN + 1)]);
    assert!(!is_known(&harness, MAX_KNOWN));
    harness.observe_all([gates_of("a", 1..MAX_KNOWN + 1)]);
    assert!(is_known(&harness, MAX_KNOWN));
    assert_eq!(harness.table.known.len(), MAX_KNOWN);
}

#[test]
fn the_namespaces_with_the_most_gates_give_way_to_others() {
    let mut harness = AnnouncementHarness::new();
    harness.observe_all([gates_of("a", 0..MAX_KNOWN - 1)]);
    harness.observe_all([gates_of("a", 0..MAX_KNOWN - 1), gates_of("b", 0..1)]);
    assert_eq!(known(&harness), BTreeMap::from([("a", MAX_KNOWN - 1), ("b", 1)]));
    let flooded = [
        gates_of("a", 0..MAX_KNOWN),
        gates_of("b", 0..2),
        gates_of("c", 0..MAX_KNOWN),
    ];
    for _ in 0..2 {
        harness.observe_all(flooded.clone());
        let half = (MAX_KNOWN - 2) / 2;
        assert_eq!(known(&harness), BTreeMap::from([("a", half), ("b", 2), ("c", half)]));
    }
    // What gave way is known again once there is room.
    harness.observe_all([gates_of("a", 0..MAX_KNOWN), gates_of("b", 0..2)]);
    harness.observe_all([gates_of("a", 0..MAX_KNOWN), gates_of("b", 0..2)]);
    assert_eq!(known(&harness), BTreeMap::from([("a", MAX_KNOWN - 2), ("b", 2)]));
}

#[test]
fn only_gates_whose_opening_waits_give_way_so_that_no_closing_is_lost() {
    let mut harness = AnnouncementHarness::new();
    let share = MAX_KNOWN / 3;
    let key = |number: usize| ("uid-a".to_owned(), format!("g{number:05}"));
    harness.observe_all([gates_of("a", 0..MAX_KNOWN)]);
    // More than the later share are announced, and one of them has closed since; the first two are being announced.
    let announced = MAX_KNOWN - share..MAX_KNOWN;
    for number in announced.clone() {
        let gate = harness.table.known.get_mut(&key(number)).unwrap();
        (gate.stage, gate.due) = (AnnouncementStage::Announced, None);
    }
    assert_eq!(harness.due(2).len(), 2);
    let many = |namespace: &str| gates_of(namespace, 0..MAX_KNOWN);
    harness.observe_all([gates_of("a", 0..MAX_KNOWN - 1), many("b"), many("c")]);
    let of_a: Vec<_> = harness
        .table
        .known
        .keys()
        .filter(|key| key.0 == "uid-a")
        .cloned()
        .collect();
    let expected: Vec<_> = (0..2).chain(announced.clone()).map(key).collect();
    assert_eq!(of_a, expected);
    assert_eq!((known(&harness)["b"], known(&harness)["c"]), (share, share));
    // They all close, and each closing is announced.
    harness.observe_all([many("b"), many("c")]);
    let closed = harness
        .due(usize::MAX)
        .into_iter()
        .filter(|due| due.change == GateChange::Closed);
    assert!(closed.map(|due| due.key).eq(announced.map(key)));
}

#[test]
fn the_room_is_divided_among_namespaces_and_each_has_room_for_one() {
    let of = |demand: &[usize]| share(demand.iter().copied());
    assert_eq!(of(&[]), MAX_KNOWN);
    assert_eq!(of(&[MAX_KNOWN]), MAX_KNOWN);
    assert_eq!(of(&[MAX_KNOWN + 1]), MAX_KNOWN);
    assert_eq!(of(&[MAX_KNOWN, 1]), MAX_KNOWN - 1);
    assert_eq!(of(&[6_000, 1_000, 3_000]), MAX_KNOWN, "all fit");
    assert_eq!(of(&[6_001, 1_000, 3_000]), 6_000);
    assert_eq!(of(&[20_000, 20_000, 20_000, 1_000]), 3_000);
    assert_eq!(share(std::iter::repeat_n(2, MAX_KNOWN)), 1);
    assert_eq!(share(std::iter::repeat_n(2, MAX_KNOWN + 1)), 1);
}

#[test]
fn namespaces_take_turns_so_that_a_flood_of_one_does_not_delay_another() {
    let mut harness = AnnouncementHarness::new();
    let floods = || [gates_of("a", 0..1_000), gates_of("b", 0..1_000)];
    harness.observe_all(floods());
    assert_eq!(harness.due_namespaces(3), ["a", "b", "a"]);
    // One place for a request at a time, and announcements that are due for much longer.
    harness.seconds = 60;
    let [a, b] = floods();
    harness.observe_all([a, b, gates_of("quiet", 0..2)]);
    let turns: Vec<_> = (0..6).flat_map(|_| harness.due_namespaces(1)).collect();
    assert_eq!(turns, ["quiet", "b", "a", "quiet", "b", "a"]);
    assert_eq!(harness.table.served.len(), 3);
    harness.seconds = 4_000;
    harness.observe_all([]);
    for namespace in ["a", "b", "quiet"] {
        for number in 0..4 {
            let key = (format!("uid-{namespace}"), format!("g{number:05}"));
            harness.table.finish(&key, false, 1.0, harness.start, wall(4_000));
        }
    }
    harness.observe_all([]);
    assert_eq!((harness.table.known.len(), harness.table.served.len()), (0, 0));
}
