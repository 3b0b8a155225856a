//! Tests of the journal.

mod audit;
mod copy;
mod deliveries;
mod full_volume;
mod goal_steps;
mod history;
mod line_usage;
mod requested_call;
mod tasks;
mod turn_lines;
mod upload;

use std::io::{Read, Seek, SeekFrom, Write};

use super::*;
use crate::engine::tool::{ToolEffect, ToolRunId};
use crate::engine::{CallId, OutcomeKind, RecordDetail, RecordKind, ToolLine};
use crate::worker::journal::history::{NEWEST_STEP, PRECHECK, TURN};

fn owner(epoch: i64) -> JournalOwner {
    JournalOwner {
        agent_uid: "agent".into(),
        pod_uid: format!("pod-{epoch}"),
        epoch,
    }
}

fn user(text: &str) -> Message {
    Message::User { text: text.into() }
}

fn record(kind: RecordKind, turn: i64, messages: Vec<Message>) -> JournalRecord {
    JournalRecord {
        kind,
        member: 0,
        turn,
        call: Some(CallId {
            member: 0,
            turn,
            call: 1,
            attempt: 1,
        }),
        note: "note".into(),
        detail: RecordDetail::None,
        tool: None,
        used: None,
        messages: messages.into_iter().map(Into::into).collect(),
        retract: 0,
        forget: 0..0,
        task: None,
        validation: None,
    }
}

fn open(dir: &Path, epoch: i64) -> (Journal, RestoredJournal) {
    let (mut journal, restored) = Journal::open(dir, &owner(epoch)).unwrap();
    journal.claim(&owner(epoch)).unwrap();
    (journal, restored)
}

fn refusal(dir: &Path, epoch: i64) -> JournalError {
    Journal::open(dir, &owner(epoch)).map(|_| ()).unwrap_err()
}

fn write(journal: &mut Journal, records: &[JournalRecord]) {
    let committed = journal
        .commit(Timestamp::UNIX_EPOCH, records, &EngineSnapshot::default(), None)
        .unwrap();
    assert!(!committed.on_ballast);
}

fn count(journal: &Journal, sql: &str) -> i64 {
    journal.connection.query_row(sql, [], |row| row.get(0)).unwrap()
}

/// Creates a journal with one batch in it, and closes it.
fn written(dir: &Path) {
    let (mut journal, _) = open(dir, 1);
    write(&mut journal, &[record(RecordKind::TurnStarted, 1, vec![user("hello")])]);
    journal.close(&owner(1)).unwrap();
}

#[test]
fn a_new_journal_is_empty_and_a_written_one_is_restored_completely() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, restored) = open(dir.path(), 1);
    assert_eq!(restored, RestoredJournal::default());
    write(
        &mut journal,
        &[record(RecordKind::TurnStarted, 1, vec![user("a"), user("b")])],
    );
    write(&mut journal, &[record(RecordKind::CallAnswered, 1, vec![user("c")])]);
    assert_eq!(count(&journal, "SELECT count(*) FROM journal WHERE call = 't1c1a1'"), 2);
    journal.close(&owner(1)).unwrap();

    let (_, restored) = open(dir.path(), 2);
    assert_eq!(restored.transcript, [user("a"), user("b"), user("c")]);
    assert_eq!(restored.snapshot, Some(EngineSnapshot::default()));
}

#[test]
fn lines_after_a_number_come_in_order_and_one_of_a_later_version_is_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    assert_eq!(journal.lines_after(0, 10).unwrap(), JournalPage::default());
    for turn in 1..=5 {
        write(&mut journal, &[record(RecordKind::TurnStarted, turn, vec![])]);
    }
    let of_later = "UPDATE journal SET kind = 'OfALaterVersion' WHERE seq IN (4, 5)";
    journal.connection.execute(of_later, []).unwrap();
    let read = |after, max| {
        let found = journal.lines_after(after, max).unwrap();
        assert_eq!(found.newest, 5);
        let numbers: Vec<i64> = found.lines.iter().map(|line| line.seq).collect();
        (numbers, found.next)
    };
    assert_eq!(read(0, 2), (vec![1, 2], 2));
    assert_eq!(read(2, 2), (vec![3], 4));
    assert_eq!(read(4, 2), (vec![], 5));
    assert_eq!(read(5, 2), (vec![], 5));
}

#[test]
fn committed_records_survive_an_end_without_close() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    write(&mut journal, &[record(RecordKind::TurnStarted, 1, vec![user("a")])]);
    // A copy of the current files is what a killed process leaves.
    let copy = tempfile::tempdir().unwrap();
    for name in [FILE.to_owned(), format!("{FILE}-wal")] {
        std::fs::copy(dir.path().join(&name), copy.path().join(&name)).unwrap();
    }
    let (_, restored) = open(copy.path(), 1);
    assert_eq!(restored.transcript, [user("a")]);
}

#[test]
fn forgotten_and_retracted_messages_leave_the_transcript_and_stay_in_the_history() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    let all = ["a", "b", "c", "d"].map(user).to_vec();
    write(&mut journal, &[record(RecordKind::TurnStarted, 1, all)]);
    let mut failed = record(RecordKind::TurnFailed, 1, vec![user("e")]);
    failed.retract = 1;
    let mut trimmed = record(RecordKind::Trimmed, 1, vec![]);
    trimmed.forget = 0..2;
    write(&mut journal, &[failed, trimmed]);
    assert_eq!(journal.transcript().unwrap(), [user("c"), user("e")]);
    assert_eq!(count(&journal, "SELECT count(*) FROM messages"), 5);
}

#[test]
fn a_second_worker_is_refused_while_the_first_has_the_journal_and_not_after_it() {
    let dir = tempfile::tempdir().unwrap();
    let (journal, _) = open(dir.path(), 1);
    assert_eq!(refusal(dir.path(), 1).kind(), "JournalLocked");
    journal.close(&owner(1)).unwrap();
    open(dir.path(), 1);
}

#[test]
fn an_older_epoch_is_refused_and_the_same_or_a_newer_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path(), 5));
    let error = refusal(dir.path(), 4);
    assert_eq!(error.kind(), "Fenced");
    assert_eq!(
        error.to_string(),
        "pod pod-5 with epoch 5 has taken over this loop; this pod, with epoch 4, stops"
    );
    drop(open(dir.path(), 5));
    drop(open(dir.path(), 6));
}

#[test]
fn an_agent_made_again_on_a_retained_volume_counts_epochs_from_the_start() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path(), 5));
    let again = JournalOwner {
        agent_uid: "another".into(),
        ..owner(1)
    };
    let (mut journal, _) = Journal::open(dir.path(), &again).unwrap();
    journal.claim(&again).unwrap();
}

#[test]
fn a_newer_schema_is_refused_with_a_message_and_left_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path());
    let connection = Connection::open(dir.path().join(FILE)).unwrap();
    connection
        .pragma_update(None, "user_version", schema::VERSION + 1)
        .unwrap();
    drop(connection);
    let error = refusal(dir.path(), 1);
    assert_eq!(error.kind(), "JournalNewer");
    assert!(
        error
            .to_string()
            .contains("schema version 11 and this agentloop supports versions up to 10")
    );
    assert_eq!(refusal(dir.path(), 1).kind(), "JournalNewer");
}

fn set(dir: &Path, statement: &str) {
    let connection = Connection::open(dir.join(FILE)).unwrap();
    connection.execute_batch(statement).unwrap();
}

#[test]
fn an_unreadable_state_names_the_newer_version_that_wrote_it_or_is_reported_as_damaged() {
    let broken = "UPDATE kv SET value = json_set(value, '$.lifecycle', 'Dreaming') WHERE key = 'snapshot'";
    for (newer, kind) in [(true, "JournalNewer"), (false, "JournalCorrupted")] {
        for statement in [broken, r#"UPDATE messages SET json = '{"role":"oracle"}'"#] {
            let dir = tempfile::tempdir().unwrap();
            let (mut journal, _) = open(dir.path(), 1);
            write(&mut journal, &[record(RecordKind::TurnStarted, 1, vec![user("look")])]);
            journal.close(&owner(1)).unwrap();
            if newer {
                let format = format!(
                    "UPDATE kv SET value = json_set(value, '$.writer', '9.0.0', '$.format', {}) WHERE key = 'owner'",
                    FORMAT + 1
                );
                set(dir.path(), &format);
            }
            set(dir.path(), statement);
            let error = refusal(dir.path(), 1);
            assert_eq!(error.kind(), kind, "{error}");
            assert_eq!(error.to_string().contains("run 9.0.0 again"), newer, "{error}");
            assert_eq!(error.to_string().contains("move it away"), !newer, "{error}");
        }
    }
}

/// What early versions stored in another place. The tests of the engine's `early_snapshot` show that it gets to the new one.
const MOVED: [(&str, &[&str]); 4] = [
    ("", &["turns_completed", "tool_calls", "actions", "tally"]),
    (
        "/counters",
        &["errors", "error_cooldowns", "refusals", "crash_cooldowns"],
    ),
    ("/turn", &["attempt", "failures", "step", "asked_under", "compaction"]),
    ("/pre_check", &["attempts", "open", "asked_under"]),
];

/// Snapshots written by releases, named by their file: every later release must read them.
#[test]
fn the_snapshot_of_each_release_can_be_read_and_is_written_equally() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/journal/snapshots");
    let mut read = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let snapshot: EngineSnapshot = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        let mut golden: serde_json::Value = serde_json::from_str(&text).unwrap();
        for (owner, fields) in MOVED {
            if let Some(owner) = golden.pointer_mut(owner).and_then(serde_json::Value::as_object_mut) {
                owner.retain(|field, _| !fields.contains(&field.as_str()));
            }
        }
        let again = serde_json::to_value(&snapshot).unwrap();
        assert!(holds(&again, &golden), "{path:?} lost something: {again}");
        read += 1;
    }
    assert!(read >= 2, "{read}");
}

/// Whether `value` contains all of `golden`; additional fields are allowed.
fn holds(value: &serde_json::Value, golden: &serde_json::Value) -> bool {
    match (value, golden) {
        (serde_json::Value::Object(value), serde_json::Value::Object(golden)) => golden
            .iter()
            .all(|(name, golden)| value.get(name).is_some_and(|value| holds(value, golden))),
        (serde_json::Value::Array(value), serde_json::Value::Array(golden)) => {
            value.len() == golden.len() && value.iter().zip(golden).all(|(value, golden)| holds(value, golden))
        }
        (value, golden) => value == golden,
    }
}

/// A journal as written by version 0.1.0.
const OF_VERSION_1: &str = r#"
CREATE TABLE journal (seq INTEGER PRIMARY KEY, at TEXT NOT NULL, kind TEXT NOT NULL, turn INTEGER NOT NULL, call TEXT,
    note TEXT NOT NULL);
CREATE TABLE messages (id INTEGER PRIMARY KEY, turn INTEGER NOT NULL, live INTEGER NOT NULL, json TEXT NOT NULL);
CREATE INDEX messages_live ON messages (id) WHERE live = 1;
CREATE INDEX messages_turn ON messages (turn);
CREATE TABLE kv (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO journal VALUES (1, '2026-01-01T00:00:00Z', 'CallAnswered', 7, 't7c1a1', 'Stop');
INSERT INTO messages VALUES (1, 7, 1, '{"role":"user","text":"look"}'),
    (2, 7, 1, '{"role":"assistant","text":null,"tool_calls":[{"id":"a","name":"yield","arguments":"{}"}]}'),
    (3, 7, 1, '{"role":"tool","id":"a","text":"The next turn begins at once."}');
INSERT INTO kv VALUES
    ('owner', '{"agent_uid":"agent","pod_uid":"pod-1","epoch":1,"closed":true}'),
    ('snapshot', '{"epoch":1,"lifecycle":"Active","turns_begun":7,"turns_completed":6,"turn":{"number":7,"call":2,
        "attempt":1,"failures":0,"step":"Open","messages":3,"crashes":0,"asked_under":4,
        "briefing":{"cause":"it goes on","notes":[]}},"counters":{"turns":3}}');
PRAGMA user_version = 1;
"#;

#[test]
fn a_journal_of_version_1_continues_with_all_its_content() {
    let dir = tempfile::tempdir().unwrap();
    let connection = Connection::open(dir.path().join(FILE)).unwrap();
    connection.execute_batch(OF_VERSION_1).unwrap();
    drop(connection);
    let (mut journal, restored) = open(dir.path(), 2);
    assert_eq!(restored.transcript.len(), 3);
    let snapshot = restored.snapshot.unwrap();
    let text = serde_json::to_string(&snapshot).unwrap();
    assert!(
        text.contains(r#""turns_begun":7"#) && text.contains(r#""step":"Open""#),
        "{text}"
    );
    assert_eq!(count(&journal, "PRAGMA user_version"), schema::VERSION);
    assert_eq!(
        count(
            &journal,
            "SELECT count(*) FROM journal WHERE kind = 'CallAnswered' AND tool IS NULL"
        ),
        1
    );
    write(&mut journal, &[tool_record()]);
    assert_eq!(
        count(&journal, "SELECT count(*) FROM journal WHERE tool = 'files__write'"),
        1
    );
    journal.close(&owner(2)).unwrap();
    drop(open(dir.path(), 2));
}

#[test]
fn a_migration_that_fails_leaves_the_file_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let connection = Connection::open(dir.path().join(FILE)).unwrap();
    connection.execute_batch(OF_VERSION_1).unwrap();
    // The last of the new columns already exists.
    connection
        .execute_batch("ALTER TABLE journal ADD COLUMN outcome TEXT")
        .unwrap();
    drop(connection);
    refusal(dir.path(), 2);
    let connection = Connection::open(dir.path().join(FILE)).unwrap();
    let version: i64 = connection
        .pragma_query_value(None, "user_version", |row| row.get(0))
        .unwrap();
    assert_eq!(version, 1);
    assert!(connection.prepare("SELECT run FROM journal").is_err());
}

fn tool_record() -> JournalRecord {
    let mut record = record(RecordKind::ToolOutcome, 7, vec![]);
    record.tool = Some(ToolLine {
        run: ToolRunId {
            member: 0,
            turn: 7,
            call: 1,
            index: 2,
        },
        tool: Some("files__write".into()),
        effect: Some(ToolEffect::Write),
        key: Some("k".into()),
        arguments: Some("h".into()),
        outcome: Some(OutcomeKind::Unknown),
    });
    record
}

#[test]
fn a_line_about_a_tool_contains_its_run_effect_and_outcome() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    write(
        &mut journal,
        &[tool_record(), record(RecordKind::TurnStarted, 8, vec![])],
    );
    let told = "SELECT count(*) FROM journal WHERE kind = 'ToolOutcome' AND run = 't7c1r2' AND tool = 'files__write'
                AND effect = 'Write' AND key = 'k' AND arguments = 'h' AND outcome = 'Unknown'";
    assert_eq!(count(&journal, told), 1);
    assert_eq!(count(&journal, "SELECT count(*) FROM journal WHERE run IS NULL"), 1);
}

#[test]
fn a_damaged_file_is_refused_with_a_message_that_names_it_and_left_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path());
    let path = dir.path().join(FILE);
    let sound = std::fs::read(&path).unwrap();
    // The header, and the root page of the table of messages.
    for offset in [0, 2 * 4096] {
        let mut bytes = sound.clone();
        for byte in &mut bytes[offset..offset + 64] {
            *byte = !*byte;
        }
        std::fs::write(&path, &bytes).unwrap();
        let error = refusal(dir.path(), 1);
        assert_eq!(error.kind(), "JournalCorrupted", "offset {offset}: {error}");
        let words = error.to_string();
        assert!(
            words.contains(&path.display().to_string()) && words.contains("backup"),
            "{words}"
        );
        assert_eq!(std::fs::read(&path).unwrap(), bytes, "offset {offset}");
    }
    std::fs::write(&path, &sound).unwrap();
    assert_eq!(open(dir.path(), 1).1.transcript, [user("hello")]);
}

#[test]
fn a_file_of_another_kind_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(FILE), "once upon a time".repeat(400)).unwrap();
    assert_eq!(refusal(dir.path(), 1).kind(), "JournalCorrupted");
}

#[test]
fn an_unclean_end_makes_the_next_start_check_the_whole_file_and_a_clean_one_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    for turn in 1..200 {
        write(&mut journal, &[record(RecordKind::TurnStarted, turn, vec![])]);
    }
    // The first page of a table that is not read at the start.
    let root = "SELECT rootpage FROM sqlite_master WHERE name = 'agent_execution_history'";
    let at = SeekFrom::Start(u64::try_from((count(&journal, root) - 1) * 4096).unwrap());
    journal.close(&owner(1)).unwrap();
    let path = dir.path().join(FILE);
    let mut file = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    file.seek(at).unwrap();
    let mut page = [0; 8];
    file.read_exact(&mut page).unwrap();
    file.seek(at).unwrap();
    file.write_all(&page.map(|byte| !byte)).unwrap();
    drop(file);
    let (journal, _) = open(dir.path(), 1);
    drop(journal);
    assert_eq!(refusal(dir.path(), 1).kind(), "JournalCorrupted");
}

/// Lets the file grow by two more pages: what SQLite sees on a full volume, without root.
fn limit(journal: &Journal) {
    let pages = count(journal, "PRAGMA page_count");
    let _: i64 = journal
        .connection
        .query_row(&format!("PRAGMA max_page_count = {}", pages + 2), [], |row| row.get(0))
        .unwrap();
}

#[test]
fn a_batch_that_does_not_fit_is_refused_as_a_whole_and_releases_the_ballast() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    write(&mut journal, &[record(RecordKind::TurnStarted, 1, vec![user("a")])]);
    limit(&journal);
    let ballast = dir.path().join("ballast");
    assert_eq!(ballast.metadata().unwrap().len(), 1024 * 1024);
    let large = record(RecordKind::CallAnswered, 1, vec![user("b"), user(&"x".repeat(100_000))]);
    let error = journal
        .commit(Timestamp::UNIX_EPOCH, &[large], &EngineSnapshot::default(), None)
        .unwrap_err();
    assert_eq!(error.kind(), "JournalFull");
    assert!(error.to_string().contains("PersistentVolumeClaim"));
    assert!(!ballast.exists());
    drop(journal);
    let (_, restored) = open(dir.path(), 1);
    assert_eq!(restored.transcript, [user("a")]);
    assert!(ballast.exists());
}

#[test]
fn history_beyond_the_last_2000_turns_is_dropped_and_the_live_transcript_never_is() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    write(
        &mut journal,
        &[record(RecordKind::TurnStarted, 1, vec![user("live"), user("old")])],
    );
    let mut second = record(RecordKind::TurnStarted, 100, vec![user("kept")]);
    second.retract = 1;
    write(&mut journal, &[second]);
    let mut third = record(RecordKind::TurnStarted, 101, vec![]);
    third.retract = 1;
    write(&mut journal, &[third]);
    let history = "SELECT count(*) FROM messages WHERE live = 0";
    assert_eq!(count(&journal, history), 2);
    write(&mut journal, &[record(RecordKind::TurnStarted, 2_000, vec![])]);
    assert_eq!(count(&journal, history), 2);
    write(&mut journal, &[record(RecordKind::TurnStarted, 2_001, vec![])]);
    assert_eq!(count(&journal, history), 2, "pruned every 100 turns only");
    write(&mut journal, &[record(RecordKind::TurnStarted, 2_100, vec![])]);
    assert_eq!(count(&journal, history), 0);
    assert_eq!(journal.transcript().unwrap(), [user("live")]);
}

#[test]
fn lines_beyond_the_last_50000_are_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    let lines: Vec<JournalRecord> = (0..JOURNAL_LINES + 5)
        .map(|_| record(RecordKind::Transition, 1, vec![]))
        .collect();
    write(&mut journal, &lines);
    assert_eq!(count(&journal, "SELECT count(*) FROM journal"), JOURNAL_LINES + 5);
    write(&mut journal, &[record(RecordKind::TurnStarted, 100, vec![])]);
    assert_eq!(count(&journal, "SELECT count(*) FROM journal"), JOURNAL_LINES);
}

#[test]
fn the_older_half_of_a_history_above_64_mib_is_dropped_and_of_one_at_64_mib_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    let fill = "WITH RECURSIVE turns (turn) AS (SELECT 1 UNION ALL SELECT turn + 1 FROM turns WHERE turn < 64)
                INSERT INTO messages (turn, live, json) SELECT turn, 0, printf('%.*c', 1048576, 'x') FROM turns";
    journal.connection.execute(fill, []).unwrap();
    let history = "SELECT count(*) FROM messages WHERE live = 0";
    write(&mut journal, &[record(RecordKind::TurnStarted, 100, vec![])]);
    assert_eq!(count(&journal, history), 64);
    write(
        &mut journal,
        &[record(RecordKind::TurnStarted, 200, vec![user("one more")])],
    );
    assert_eq!(count(&journal, history), 32);
    assert_eq!(count(&journal, "SELECT min(turn) FROM messages"), 33);
    assert_eq!(journal.transcript().unwrap(), [user("one more")]);
    let started = std::time::Instant::now();
    drop(journal);
    open(dir.path(), 1);
    eprintln!("opening 64 MiB after an unclean end took {:?}", started.elapsed());
}

#[test]
fn only_the_last_batch_of_a_killed_process_is_reported_again() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    let batch = |journal: &mut Journal, second: i64, records: &[JournalRecord]| {
        let at = Timestamp::from_second(second).unwrap();
        journal
            .commit(at, records, &EngineSnapshot::default(), None)
            .unwrap()
            .lines
    };
    let turn = |kind| record(kind, 1, vec![user("canary")]);
    let first = batch(&mut journal, 1, &[turn(RecordKind::TurnStarted)]);
    let second = batch(
        &mut journal,
        2,
        &[turn(RecordKind::CallStarted), turn(RecordKind::GuardrailTriggered)],
    );
    assert_eq!(
        [&first[..], &second]
            .concat()
            .iter()
            .map(|line| line.seq)
            .collect::<Vec<_>>(),
        [1, 2, 3]
    );
    assert!(!format!("{second:?}").contains("canary"));
    drop(journal);
    let (journal, restored) = open(dir.path(), 1);
    assert_eq!(restored.unlogged_lines, second);
    journal.close(&owner(1)).unwrap();
    let (_, restored) = open(dir.path(), 1);
    assert_eq!(restored.unlogged_lines, []);
}

/// Returns SQLite's query plan for a statement, with those of its subqueries.
fn plan(journal: &Journal, sql: &str) -> Vec<String> {
    let mut explain = journal
        .connection
        .prepare(&format!("EXPLAIN QUERY PLAN {sql}"))
        .unwrap();
    // Only the number of the parameters matters.
    let values = vec![1; explain.parameter_count()];
    let rows = explain.query_map(rusqlite::params_from_iter(values), |row| row.get(3));
    rows.unwrap().map(Result::unwrap).collect()
}

/// The plan for removing messages from the live transcript.
fn retiring() -> Vec<String> {
    let steps = [
        "SEARCH messages USING INTEGER PRIMARY KEY (rowid=?)",
        "LIST SUBQUERY 1",
        "SEARCH messages USING COVERING INDEX messages_live (member=?)",
    ];
    steps.map(str::to_owned).to_vec()
}

#[test]
fn queries_of_each_step_and_start_read_a_bounded_number_of_rows() {
    let dir = tempfile::tempdir().unwrap();
    let (journal, _) = open(dir.path(), 1);
    let live = "messages USING INDEX messages_live";
    let of_a_turn =
        "SEARCH agent_execution_history USING INDEX sqlite_autoindex_agent_execution_history_1 (id>? AND id<?)";
    let (oldest, newest) = (write::retiring("ASC"), write::retiring("DESC"));
    for (sql, expected) in [
        (VALUE, vec!["SEARCH kv USING PRIMARY KEY (key=?)".to_owned()]),
        // The live transcript, which the context window bounds.
        (TRANSCRIPT, vec![format!("SEARCH {live} (member=?)")]),
        // From the end, as far as one batch.
        (lines::NEWEST_FIRST, vec!["SCAN journal".to_owned()]),
        (&oldest, retiring()),
        (&newest, retiring()),
        (TURN, vec![of_a_turn.to_owned()]),
        // Few: only those before one turn.
        (
            PRECHECK,
            vec![of_a_turn.to_owned(), "USE TEMP B-TREE FOR ORDER BY".to_owned()],
        ),
        (
            NEWEST_STEP,
            vec![
                "SEARCH agent_execution_steps USING INDEX sqlite_autoindex_agent_execution_steps_1 (id>? AND id<?)"
                    .to_owned(),
            ],
        ),
        (
            "UPDATE agent_execution_history SET total_steps = 1 WHERE id = ?1",
            vec![
                "SEARCH agent_execution_history USING INDEX sqlite_autoindex_agent_execution_history_1 (id=?)"
                    .to_owned(),
            ],
        ),
    ] {
        assert_eq!(plan(&journal, sql), expected, "{sql}");
    }
}

#[test]
fn each_member_has_a_live_transcript_of_its_own_and_the_main_one_is_restored() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    let of = |member, record: JournalRecord| JournalRecord { member, ..record };
    write(
        &mut journal,
        &[record(RecordKind::TurnStarted, 1, vec![user("a"), user("b")])],
    );
    write(
        &mut journal,
        &[of(3, record(RecordKind::TurnStarted, 1, vec![user("c"), user("d")]))],
    );
    let mut failed = of(3, record(RecordKind::TurnFailed, 1, vec![]));
    failed.retract = 1;
    write(&mut journal, &[failed]);
    let mut trimmed = record(RecordKind::Trimmed, 1, vec![]);
    trimmed.forget = 0..1;
    write(&mut journal, &[trimmed]);
    let live = "SELECT group_concat(json_extract(json, '$.text')) FROM messages WHERE live = 1 AND member = ?1";
    let live = |member: u16| -> String { journal.connection.query_row(live, [member], |row| row.get(0)).unwrap() };
    assert_eq!((live(0), live(3)), ("b".to_owned(), "c".to_owned()));
    assert_eq!(journal.transcript().unwrap(), [user("b")]);
}
