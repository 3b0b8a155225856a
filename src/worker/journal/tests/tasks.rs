//! Tests of the table of tasks.

use pretty_assertions::assert_eq;

use super::super::tasks::ENDED_TASKS;
use super::*;
use crate::api::task::TaskOutcome;
use crate::engine::tasks::{TaskChange, TaskOrigin, TaskResponse};

fn offer(id: i64) -> TaskOffer {
    TaskOffer {
        id: id.to_string(),
        origin: TaskOrigin::Spec,
        prompt: "look".into(),
        untrusted: None,
    }
}

fn response(id: i64) -> TaskResponse {
    TaskResponse {
        id: id.to_string(),
        outcome: TaskOutcome::Completed,
        result: Some("seen".into()),
        error: None,
        reason: None,
        iterations: 1,
        untrusted_content: None,
        tokens_used: 10,
    }
}

fn change(kind: RecordKind, change: TaskChange) -> JournalRecord {
    JournalRecord {
        task: Some(Box::new(change)),
        ..record(kind, 1, vec![])
    }
}

fn accept(journal: &mut Journal, id: i64) {
    write(
        journal,
        &[change(RecordKind::TaskAccepted, TaskChange::Accepted(offer(id)))],
    );
}

/// A task that waits is begun and answered.
fn end(journal: &mut Journal, id: i64) {
    write(
        journal,
        &[
            change(RecordKind::TaskStarted, TaskChange::Started(id.to_string())),
            change(RecordKind::TaskEnded, TaskChange::Ended(response(id))),
        ],
    );
}

/// A task from its acceptance to its response, in one batch.
fn answer(journal: &mut Journal, id: i64) {
    write(
        journal,
        &[
            change(RecordKind::TaskAccepted, TaskChange::Accepted(offer(id))),
            change(RecordKind::TaskStarted, TaskChange::Started(id.to_string())),
            change(RecordKind::TaskEnded, TaskChange::Ended(response(id))),
        ],
    );
}

#[test]
fn tasks_that_wait_are_restored_in_order_and_others_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, restored) = open(dir.path(), 1);
    assert_eq!(restored.tasks, []);
    answer(&mut journal, 1);
    for id in [7, 3, 5] {
        accept(&mut journal, id);
    }
    write(
        &mut journal,
        &[change(RecordKind::TaskStarted, TaskChange::Started("7".into()))],
    );
    drop(journal);
    let (_, restored) = open(dir.path(), 2);
    assert_eq!(restored.tasks, [offer(3), offer(5)]);
}

#[test]
fn tasks_are_begun_out_of_order_and_the_others_are_restored_in_that_of_their_arrival() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    for id in [7, 3, 5] {
        accept(&mut journal, id);
    }
    end(&mut journal, 3);
    accept(&mut journal, 1);
    end(&mut journal, 5);
    drop(journal);
    let (_, restored) = open(dir.path(), 2);
    assert_eq!(restored.tasks, [offer(7), offer(1)]);
}

#[test]
fn responses_are_delivered_in_the_order_in_which_the_tasks_ended() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    journal.set_response_receiver(true).unwrap();
    for id in [1, 2, 3] {
        accept(&mut journal, id);
    }
    end(&mut journal, 3);
    let first = journal.next_response().unwrap().unwrap();
    // While it is sent, earlier ones end.
    end(&mut journal, 1);
    accept(&mut journal, 4);
    end(&mut journal, 2);
    assert_eq!(journal.next_response().unwrap().as_ref(), Some(&first));
    let mut delivered = Vec::new();
    while let Some(next) = journal.next_response().unwrap() {
        delivered.push(next.response.id);
        journal.response_delivered(next.seq).unwrap();
    }
    assert_eq!(delivered, ["3", "1", "2"]);
}

#[test]
fn a_task_that_ends_after_many_later_ones_is_known_as_long_as_any() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    accept(&mut journal, 0);
    for id in 1..=ENDED_TASKS {
        answer(&mut journal, id);
    }
    end(&mut journal, 0);
    let known = |journal: &Journal, id: i64| journal.find_task(&id.to_string()).unwrap().is_some();
    assert_eq!(
        (known(&journal, 0), known(&journal, 1), known(&journal, 2)),
        (true, false, true)
    );
    for id in 1..ENDED_TASKS {
        answer(&mut journal, ENDED_TASKS + id);
    }
    assert!(known(&journal, 0));
    answer(&mut journal, 2 * ENDED_TASKS);
    assert!(!known(&journal, 0));
}

#[test]
fn responses_are_delivered_in_order_and_each_is_kept_until_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    journal.set_response_receiver(true).unwrap();
    answer(&mut journal, 2);
    answer(&mut journal, 1);
    let first = journal.next_response().unwrap().unwrap();
    assert_eq!(first.response, response(2));
    assert_eq!(journal.next_response().unwrap().unwrap(), first);
    journal.response_delivered(first.seq).unwrap();
    assert_eq!(journal.next_response().unwrap().unwrap().response, response(1));
    assert_eq!(journal.count_responses().unwrap(), 1);
}

#[test]
fn no_response_waits_without_a_receiver_not_even_for_a_later_one() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    journal.set_response_receiver(true).unwrap();
    answer(&mut journal, 1);
    journal.set_response_receiver(false).unwrap();
    answer(&mut journal, 2);
    journal.set_response_receiver(true).unwrap();
    assert_eq!(journal.next_response().unwrap(), None);
}

#[test]
fn the_oldest_ended_task_leaves_beyond_the_limit_and_none_that_waits_or_is_to_be_sent() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    accept(&mut journal, 0);
    journal.set_response_receiver(true).unwrap();
    answer(&mut journal, -1);
    journal.sends_responses = false;
    for id in 1..=ENDED_TASKS {
        answer(&mut journal, id);
    }
    assert_eq!(count(&journal, "SELECT count(*) FROM tasks"), ENDED_TASKS + 2);
    answer(&mut journal, ENDED_TASKS + 1);
    assert_eq!(count(&journal, "SELECT count(*) FROM tasks"), ENDED_TASKS + 2);
    assert_eq!(count(&journal, "SELECT count(*) FROM tasks WHERE id = '1'"), 0);
    assert_eq!(count(&journal, "SELECT count(*) FROM tasks WHERE id IN ('0', '-1')"), 2);
}

#[test]
fn the_id_of_a_request_stays_that_of_its_user_once_it_is_begun_and_once_it_is_answered() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    let requested = TaskOffer {
        origin: TaskOrigin::Request("ann".into()),
        ..offer(1)
    };
    let changes = [
        change(RecordKind::TaskAccepted, TaskChange::Accepted(requested)),
        change(RecordKind::TaskStarted, TaskChange::Started("1".into())),
        change(RecordKind::TaskEnded, TaskChange::Ended(response(1))),
    ];
    for step in changes {
        write(&mut journal, &[step]);
        let known = journal.find_task("1").unwrap().unwrap();
        assert_eq!((known.is_of_another("ann"), known.is_of_another("bob")), (false, true));
    }
    let kept: String = journal
        .connection
        .query_row("SELECT offer FROM tasks", [], |row| row.get(0))
        .unwrap();
    assert_eq!(kept, r#"{"origin":{"Request":"ann"}}"#, "and its text is gone");
    // A task of a Sensor or of the spec has no user.
    answer(&mut journal, 2);
    assert!(!journal.find_task("2").unwrap().unwrap().is_of_another("ann"));
}
