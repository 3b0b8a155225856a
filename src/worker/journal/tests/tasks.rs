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
fn without_a_receiver_no_response_waits_also_for_one_that_comes_later() {
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
