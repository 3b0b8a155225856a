//! Tests of the sessions with pods.

use super::*;
use crate::link::messages::BudgetReport;

#[test]
fn a_pod_belongs_to_the_agent_that_it_was_created_for_until_another_pod_is_expected() {
    let (sessions, _changed) = PodSessions::new();
    let (agent, now) = (NamespacedName::new("team-a", "x"), Timestamp::UNIX_EPOCH);
    let pod = |uid: &str, epoch| LivePod { uid: uid.into(), epoch };
    let expect = |owner: &str, pod: LivePod| {
        sessions.expect_pod((&agent, owner), pod, LoopTotals::default(), Directives::default());
    };
    let owner_of = |pod: &LivePod| sessions.owner_of(&agent, pod, now).map_err(|refusal| refusal.code);
    assert_eq!(owner_of(&pod("p1", 1)), Err(RefusalCode::NotLeading));
    expect("first", pod("p1", 1));
    expect("first", pod("p1", 1));
    assert_eq!(owner_of(&pod("p1", 1)).as_deref(), Ok("first"));
    // The Agent was created again under its name, and so was its pod, with the first epoch.
    expect("second", pod("p2", 1));
    assert_eq!(owner_of(&pod("p1", 1)), Err(RefusalCode::Fenced));
    assert_eq!(owner_of(&pod("p2", 1)).as_deref(), Ok("second"));
    assert_eq!(sessions.last_contact(&agent, "p2"), Some(now));
}

#[test]
fn lost_leases_are_counted_once_per_pod_up_to_a_bound_and_not_backwards() {
    let (sessions, _changed) = PodSessions::new();
    let agent = NamespacedName::new("team-a", "x");
    let pod = |epoch| LivePod {
        uid: format!("p{epoch}"),
        epoch,
    };
    let report = |epoch, lost_leases| {
        let budget = BudgetReport {
            lost_leases,
            ..BudgetReport::default()
        };
        let report = PodReport {
            budget,
            ..PodReport::default()
        };
        sessions
            .report(&agent, &pod(epoch), report, Timestamp::UNIX_EPOCH)
            .unwrap()
    };
    let expect = |epoch| {
        sessions.expect_pod(
            (&agent, "uid"),
            pod(epoch),
            LoopTotals::default(),
            Directives::default(),
        );
    };
    expect(1);
    let max = i64::try_from(MAX_LOST_LEASES).unwrap();
    let counted = [i64::MIN, i64::MAX, 3, 2, 5, max].map(|lost| report(1, lost));
    assert_eq!(
        counted,
        [0, MAX_LOST_LEASES, 0, 0, 0, 0],
        "one pod reports as much as it likes"
    );
    expect(2);
    let counted = [max, max - 1, 2 * max - 2, 2 * max - 1, 2 * max].map(|lost| report(2, lost));
    assert_eq!(counted, [0, 0, MAX_LOST_LEASES - 1, 1, 0]);
}

/// The subscriptions to `agents` Agents of a namespace, as many as each may have.
fn subscribe_all(sessions: &PodSessions, namespace: &str, agents: usize) -> Vec<PageReceiver> {
    let mut readers = Vec::new();
    for number in 0..agents {
        let agent = NamespacedName::new(namespace, number.to_string());
        let pod = LivePod {
            uid: format!("{agent}"),
            epoch: 1,
        };
        sessions.expect_pod((&agent, "uid"), pod, LoopTotals::default(), Directives::default());
        for _ in 0..READINGS_OF_ONE {
            readers.push(subscribe(sessions, &agent).unwrap());
        }
    }
    readers
}

fn subscribe(sessions: &PodSessions, agent: &NamespacedName) -> Result<PageReceiver, ClientRefusal> {
    let opened = sessions.open_subscription(agent, EventSubscription::default());
    opened.map(|(_, pages)| pages)
}

#[test]
fn a_tenant_that_uses_all_reader_slots_loses_one_to_another_tenant() {
    let (sessions, _changed) = PodSessions::new();
    let agents = READINGS_OF_ALL / READINGS_OF_ONE;
    let _other = subscribe_all(&sessions, "team-b", 1);
    let held = subscribe_all(&sessions, "team-a", agents - 1);
    let gone = |readers: &[PageReceiver]| readers.iter().filter(|reader| reader.is_displaced()).count();
    assert_eq!(gone(&held), 0, "no place is lost when the last one is taken");
    // Another Agent of the same namespace takes none.
    let (more, new) = (
        NamespacedName::new("team-a", "more"),
        NamespacedName::new("team-c", "new"),
    );
    for agent in [&more, &new] {
        let pod = LivePod {
            uid: format!("{agent}"),
            epoch: 1,
        };
        sessions.expect_pod((agent, "uid"), pod, LoopTotals::default(), Directives::default());
    }
    assert!(subscribe(&sessions, &more).is_err());
    let mut admitted = Vec::new();
    for count in 1..=READINGS_OF_ONE {
        admitted.push(subscribe(&sessions, &new).unwrap());
        assert_eq!(gone(&held), count);
    }
    assert!(held[0].is_displaced(), "the oldest first");
    assert_eq!(gone(&admitted), 0);
    // It is not taken back.
    assert!(subscribe(&sessions, &more).is_err());
}

#[test]
fn only_the_first_session_of_a_pod_that_this_leader_has_created_counts_its_first_report() {
    let agent = NamespacedName::new("team-a", "x");
    let pod = |uid: &str| LivePod {
        uid: uid.into(),
        epoch: 1,
    };
    let (sessions, _changed) = PodSessions::new();
    let expect = |uid: &str| {
        sessions.expect_pod((&agent, "uid"), pod(uid), LoopTotals::default(), Directives::default());
    };
    let is_new = || sessions.lock().entries[&agent].durations == ReportedDurations::of_new_pod();
    expect("p1");
    assert!(!is_new(), "this leader found it");
    sessions.forget(&agent);
    sessions.pod_created(&agent, "p2");
    expect("p2");
    assert!(is_new());
    expect("p2");
    assert!(is_new(), "the same session");
    sessions.forget(&agent);
    expect("p2");
    assert!(!is_new(), "it may have reported");
    // Another pod than the one that it was created.
    sessions.pod_created(&agent, "p3");
    expect("p4");
    assert!(!is_new());
    expect("p3");
    assert!(!is_new());
    sessions.pod_created(&agent, "p5");
    sessions.forget(&agent);
    assert!(sessions.lock().created.is_empty(), "the Agent is gone");
}
