//! Tests of what of the history is uploaded, and when.

use jiff::SignedDuration;
use pretty_assertions::assert_eq;

use super::history::{answered, call, plain, result, run, says};
use super::*;
use crate::api::status::GateKind;
use crate::engine::CallPurpose;
use crate::link::history::{HistoryAck, HistoryBatch, MAX_HISTORY_ROWS, SentChanges};

fn next(journal: &mut Journal) -> Option<(HistoryBatch, bool)> {
    let next = journal.history_batch().unwrap();
    next.map(|next| (next.batch, next.has_more))
}

/// The next batch, which must be the last one.
fn last(journal: &mut Journal) -> HistoryBatch {
    let (batch, has_more) = next(journal).unwrap();
    assert!(!has_more);
    batch
}

fn acknowledge(journal: &mut Journal, stored: i64) {
    journal.history_stored(HistoryAck { stored, restart: false }).unwrap();
}

/// One turn with one step and a tool run, completed.
fn turn(journal: &mut Journal, turn: i64) {
    write(journal, &[plain(RecordKind::TurnStarted, turn, "")]);
    let wants = says("look", &[("files__write", "{}")]);
    write(
        journal,
        &[answered(call(turn, 1), CallPurpose::Turn, Some(5), vec![wants])],
    );
    write(journal, &[run(RecordKind::ToolIntent, turn, 1, None)]);
    write(
        journal,
        &[run(RecordKind::ToolOutcome, turn, 1, Some(OutcomeKind::Error))],
    );
    let done = JournalRecord {
        messages: vec![result("no").into()],
        ..plain(RecordKind::TurnCompleted, turn, "continue")
    };
    write(journal, &[done]);
}

fn turns(batch: &HistoryBatch) -> Vec<i64> {
    batch.executions.iter().map(|execution| execution.turn).collect()
}

#[test]
fn each_row_is_uploaded_as_it_is_now_and_again_only_if_it_changes() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    assert_eq!(next(&mut journal), None);
    turn(&mut journal, 1);
    let first = last(&mut journal);
    assert_eq!(
        (first.executions.len(), first.steps.len(), first.audit.len()),
        (1, 1, 2)
    );
    let execution = &first.executions[0];
    assert_eq!(
        (execution.final_status.as_deref(), execution.total_steps),
        (Some("success"), 1)
    );
    let step = &first.steps[0];
    assert_eq!(step.execution_id, execution.id);
    assert_eq!(
        (step.success, step.error.as_deref(), step.attempt),
        (Some(false), Some("Error"), Some(1))
    );
    assert_eq!(step.result[0]["outcome"], "Error");
    let decisions: Vec<_> = first.audit.iter().map(|line| line.decision.as_deref()).collect();
    assert_eq!(decisions, [Some("Allowed"), None]);
    assert_eq!(first.audit[0].execution_id.as_ref(), Some(&execution.id));
    assert_eq!(first.after, 0);
    assert_eq!(last(&mut journal), first, "without an acknowledgement, the same again");

    acknowledge(&mut journal, first.last);
    assert_eq!(next(&mut journal), None);
    turn(&mut journal, 2);
    let second = last(&mut journal);
    assert_eq!((turns(&second), second.after), (vec![2], first.last));
    assert!(second.last > first.last);
    // What changes during an upload has a higher number.
    write(&mut journal, &[plain(RecordKind::TurnFailed, 2, "Timeout")]);
    acknowledge(&mut journal, second.last);
    let third = last(&mut journal);
    assert_eq!((turns(&third), third.steps.len(), third.audit.len()), (vec![2], 0, 0));
    assert_eq!(third.executions[0].final_status.as_deref(), Some("failed"));
}

#[test]
fn a_step_records_the_duration_of_its_call_and_the_answered_attempt() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    let attempt = |attempt| CallId { attempt, ..call(1, 1) };
    let started = |call: CallId| JournalRecord {
        call: Some(call),
        ..plain(RecordKind::CallStarted, 1, "")
    };
    let commit = |journal: &mut Journal, milliseconds, records: &[JournalRecord]| {
        let now = Timestamp::UNIX_EPOCH + SignedDuration::from_millis(milliseconds);
        let _ = journal.commit(now, records, &EngineSnapshot::default(), None).unwrap();
    };
    commit(
        &mut journal,
        0,
        &[plain(RecordKind::TurnStarted, 1, ""), started(attempt(1))],
    );
    commit(&mut journal, 5_000, &[started(attempt(2))]);
    let mut answer = answered(attempt(2), CallPurpose::Turn, None, vec![says("", &[])]);
    answer.detail = RecordDetail::UselessAnswer;
    answer.note = "EmptyAnswer".into();
    commit(&mut journal, 6_250, &[answer]);
    let step = &last(&mut journal).steps[0];
    assert_eq!((step.attempt, step.duration_milliseconds), (Some(2), Some(1250)));
    assert_eq!(
        (step.success, step.error.as_deref()),
        (Some(false), Some("EmptyAnswer"))
    );
}

#[test]
fn an_execution_followed_by_a_gate_records_the_reason_and_the_answer() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    turn(&mut journal, 1);
    let gate = |kind, detail| JournalRecord {
        detail,
        ..plain(kind, 1, "goal-e1-1 LowConfidence")
    };
    let escalated = gate(RecordKind::GateOpened, RecordDetail::Escalated(GateKind::LowConfidence));
    write(&mut journal, &[escalated]);
    let asked = last(&mut journal).audit.pop().unwrap();
    let found = (asked.decision.as_deref(), asked.gate.as_deref(), asked.cause.as_deref());
    assert_eq!(found, (Some("Asked"), Some("goal-e1-1"), Some("LowConfidence")));
    let status = |journal: &mut Journal| {
        let execution = last(journal).executions.remove(0);
        (execution.final_status.unwrap(), execution.escalation_reason)
    };
    let reason = Some("LowConfidence".to_owned());
    assert_eq!(status(&mut journal), ("success".into(), reason.clone()));
    write(&mut journal, &[gate(RecordKind::GateResolved, RecordDetail::None)]);
    assert_eq!(status(&mut journal), ("success".into(), reason.clone()));
    let denied = gate(
        RecordKind::GateResolved,
        RecordDetail::NotApproved(GateKind::LowConfidence),
    );
    write(&mut journal, &[denied]);
    assert_eq!(status(&mut journal), ("escalated".into(), reason));
}

#[test]
fn a_batch_ends_at_its_rows_and_a_step_brings_its_execution() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    let max = i64::try_from(MAX_HISTORY_ROWS).unwrap();
    for number in 1..max {
        write(&mut journal, &[plain(RecordKind::TurnStarted, number, "")]);
    }
    let (batch, has_more) = next(&mut journal).unwrap();
    assert_eq!((batch.rows(), has_more), (MAX_HISTORY_ROWS - 1, false));
    turn(&mut journal, max);
    let (batch, has_more) = next(&mut journal).unwrap();
    assert_eq!((batch.rows(), has_more), (MAX_HISTORY_ROWS, true));
    assert_eq!(batch.audit.len(), 1);
    acknowledge(&mut journal, batch.last);
    let rest = last(&mut journal);
    assert_eq!((turns(&rest), rest.steps.len(), rest.audit.len()), (vec![max], 1, 1));
    acknowledge(&mut journal, rest.last);
    // A change of the step alone.
    write(
        &mut journal,
        &[run(RecordKind::ToolOutcome, max, 1, Some(OutcomeKind::Unknown))],
    );
    let step = last(&mut journal);
    assert_eq!((turns(&step), step.steps.len()), (vec![max], 1));
}

#[test]
fn a_batch_ends_at_its_bytes_and_an_oversized_step_is_sent_without_its_texts() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    let long = "x".repeat(4 * 1024);
    let calls: Vec<_> = (0..7).map(|_| ("a__b", long.as_str())).collect();
    for number in 1..=8 {
        let answer = answered(call(number, 1), CallPurpose::Turn, None, vec![says(&long, &calls)]);
        write(&mut journal, &[plain(RecordKind::TurnStarted, number, ""), answer]);
    }
    let mut batches = Vec::new();
    while let Some((batch, _)) = next(&mut journal) {
        let bytes = serde_json::to_vec(&batch).unwrap().len();
        assert!(bytes <= 160 * 1024, "{bytes}");
        acknowledge(&mut journal, batch.last);
        batches.push(batch.steps.len());
    }
    assert!(batches.len() > 1 && batches.iter().sum::<usize>() == 8, "{batches:?}");

    let control = "\u{1}".repeat(4 * 1024);
    let calls: Vec<_> = (0..7).map(|_| ("a__b", control.as_str())).collect();
    let answer = answered(call(9, 1), CallPurpose::Turn, Some(3), vec![says(&control, &calls)]);
    write(&mut journal, &[plain(RecordKind::TurnStarted, 9, ""), answer]);
    let batch = last(&mut journal);
    let step = &batch.steps[0];
    assert_eq!(
        (step.reasoning.as_deref(), step.action.is_null(), step.tokens_used),
        (None, true, Some(3))
    );
}

#[test]
fn a_database_with_fewer_or_other_changes_receives_all_rows_again_with_higher_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    turn(&mut journal, 1);
    turn(&mut journal, 2);
    let sent = last(&mut journal).last;
    acknowledge(&mut journal, sent);
    for stored in [3, sent + 1_000, 0] {
        journal.history_stored(HistoryAck { stored, restart: true }).unwrap();
        let again = last(&mut journal);
        assert_eq!(
            (turns(&again), again.steps.len(), again.audit.len()),
            (vec![1, 2], 2, 4)
        );
        assert_eq!(again.after, stored);
        assert!(again.last > sent.max(stored), "{}", again.last);
    }
    // A restart as the first answer of all, before any change.
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    journal
        .history_stored(HistoryAck {
            stored: 70,
            restart: true,
        })
        .unwrap();
    turn(&mut journal, 1);
    assert!(last(&mut journal).last > 70);
}

#[test]
fn rows_dropped_before_their_upload_are_not_uploaded() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    turn(&mut journal, 1);
    turn(&mut journal, HISTORY_TURNS + 100);
    assert_eq!(turns(&last(&mut journal)), [HISTORY_TURNS + 100]);
    assert_eq!(last(&mut journal).steps.len(), 1);
    journal
        .connection
        .execute("DELETE FROM journal WHERE turn = 1", [])
        .unwrap();
    assert_eq!(last(&mut journal).audit.len(), 2);
    let changes = count(&journal, "SELECT count(*) FROM history_changes");
    assert_eq!(changes, 4);
}

#[test]
fn a_restart_continues_and_another_process_has_another_name() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    turn(&mut journal, 1);
    acknowledge(&mut journal, 2);
    let before = last(&mut journal);
    journal.close(&owner(1)).unwrap();
    let (mut journal, _) = open(dir.path(), 2);
    let after = last(&mut journal);
    assert_ne!(after.writer, before.writer);
    assert_eq!(
        HistoryBatch {
            writer: before.writer.clone(),
            sent_before: Vec::new(),
            ..after
        },
        before
    );
}

#[test]
fn a_sent_batch_is_known_to_the_next_process_until_it_is_answered() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    turn(&mut journal, 1);
    let first = last(&mut journal);
    assert_eq!(first.sent_before, []);
    turn(&mut journal, 2);
    let stored = last(&mut journal);
    assert!(stored.last > first.last && stored.sent_before.is_empty());
    // It is stored, and the process ends before the answer.
    journal.close(&owner(1)).unwrap();
    let (mut journal, _) = open(dir.path(), 2);
    turn(&mut journal, 3);
    let again = last(&mut journal);
    let sent = SentChanges {
        writer: stored.writer,
        last: stored.last,
    };
    assert_eq!((again.after, again.sent_before), (0, vec![sent.clone()]));
    journal.close(&owner(2)).unwrap();
    let (mut journal, _) = open(dir.path(), 3);
    assert_eq!(last(&mut journal).sent_before[0], sent);
    assert_eq!(last(&mut journal).sent_before.len(), 2);
    acknowledge(&mut journal, sent.last);
    let rest = last(&mut journal);
    assert_eq!(
        (turns(&rest), rest.after, rest.sent_before),
        (vec![3], sent.last, Vec::new())
    );
}

#[test]
fn a_bounded_number_of_earlier_senders_is_remembered() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    turn(&mut journal, 1);
    for epoch in 2..=20 {
        let batch = last(&mut journal);
        journal.close(&owner(epoch - 1)).unwrap();
        journal = open(dir.path(), epoch).0;
        let known = last(&mut journal).sent_before;
        assert_eq!(known.len(), usize::try_from(epoch - 1).unwrap().min(16));
        assert_eq!(known.iter().any(|sent| sent.writer == batch.writer), epoch <= 17);
    }
}

#[test]
fn the_history_of_an_earlier_agent_is_not_that_of_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    turn(&mut journal, 1);
    journal.close(&owner(1)).unwrap();
    let recreated = JournalOwner {
        agent_uid: "recreated".into(),
        ..owner(1)
    };
    let (mut journal, _) = Journal::open(dir.path(), &recreated).unwrap();
    journal.claim(&recreated).unwrap();
    assert_eq!(next(&mut journal), None);
    turn(&mut journal, 2);
    let own = last(&mut journal);
    assert_eq!((turns(&own), own.steps.len(), own.audit.len()), (vec![2], 1, 2));
    journal
        .history_stored(HistoryAck {
            stored: 0,
            restart: true,
        })
        .unwrap();
    let own = last(&mut journal);
    assert_eq!((turns(&own), own.steps.len(), own.audit.len()), (vec![2], 1, 2));
}

/// The first claim of a recreated Agent finds no room for its upload, and another process follows.
#[test]
fn the_audit_of_an_earlier_agent_is_not_that_of_the_next_also_if_its_upload_began_without_room() {
    for restarts in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, _) = open(dir.path(), 1);
        turn(&mut journal, 1);
        journal.close(&owner(1)).unwrap();
        let recreated = JournalOwner {
            agent_uid: "recreated".into(),
            ..owner(1)
        };
        let (mut journal, _) = Journal::open(dir.path(), &recreated).unwrap();
        // Each change of what is to be uploaded takes more room than there is.
        let full = "CREATE TABLE filler (text); CREATE TRIGGER fill BEFORE DELETE ON history_changes
            BEGIN INSERT INTO filler VALUES (zeroblob(1000000)); END";
        journal.connection.execute_batch(full).unwrap();
        limit(&journal);
        journal.claim(&recreated).unwrap();
        assert_eq!(next(&mut journal), None);
        let unblock = "DROP TABLE filler; PRAGMA max_page_count = 1000000";
        let unblock = format!("DROP TRIGGER fill; {unblock}");
        journal.connection.execute_batch(&unblock).unwrap();
        turn(&mut journal, 2);
        if restarts {
            journal.close(&recreated).unwrap();
            journal = Journal::open(dir.path(), &recreated).unwrap().0;
            journal.claim(&recreated).unwrap();
        }
        for _ in 0..2 {
            let own = last(&mut journal);
            assert_eq!((turns(&own), own.steps.len(), own.audit.len()), (vec![2], 1, 2));
            assert_eq!(own.after, 0);
            let restart = HistoryAck {
                stored: 0,
                restart: true,
            };
            journal.history_stored(restart).unwrap();
        }
    }
}

#[test]
fn a_journal_of_version_8_is_uploaded_from_its_beginning() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    turn(&mut journal, 1);
    journal.close(&owner(1)).unwrap();
    let connection = Connection::open(dir.path().join(FILE)).unwrap();
    connection
        .execute_batch("DELETE FROM kv WHERE key = 'upload'; PRAGMA user_version = 8")
        .and_then(|()| connection.execute_batch(super::deliveries::WITHOUT_UPLOADS))
        .unwrap();
    connection.close().unwrap();
    let (mut journal, _) = open(dir.path(), 2);
    assert_eq!(count(&journal, "PRAGMA user_version"), schema::VERSION);
    let batch = last(&mut journal);
    assert_eq!((turns(&batch), batch.steps.len(), batch.audit.len()), (vec![1], 1, 2));
    assert_eq!(
        (batch.steps[0].attempt, batch.steps[0].duration_milliseconds),
        (None, None)
    );
}
