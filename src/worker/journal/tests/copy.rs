//! Tests of copies of the journal.

use super::*;

fn copied(dir: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    copy(dir, &mut bytes).unwrap();
    bytes
}

/// Returns the number of lines and of messages in a valid copy.
fn read(bytes: &[u8]) -> (i64, i64) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("copy");
    std::fs::write(&path, bytes).unwrap();
    let connection = Connection::open(&path).unwrap();
    let verdict: String = connection
        .query_row("PRAGMA integrity_check", [], |row| row.get(0))
        .unwrap();
    assert_eq!(verdict, "ok");
    let count = |table| {
        let sql = format!("SELECT count(*) FROM {table}");
        connection.query_row(&sql, [], |row| row.get(0)).unwrap()
    };
    (count("journal"), count("messages"))
}

fn turn(journal: &mut Journal, number: i64) {
    let text = "x".repeat(usize::try_from(number % 7).unwrap() * 1_500);
    write(journal, &[record(RecordKind::TurnStarted, number, vec![user(&text)])]);
}

#[test]
fn a_copy_contains_all_committed_data_at_any_position_of_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    // The log is checkpointed and restarted repeatedly.
    journal.checkpoint_every(40);
    for number in 1..=120 {
        turn(&mut journal, number);
        assert_eq!(read(&copied(dir.path())), (number, number));
    }
    journal.close(&owner(1)).unwrap();
    assert_eq!(read(&copied(dir.path())), (120, 120));
    // The journal itself is unchanged.
    assert_eq!(open(dir.path(), 1).1.transcript.len(), 120);
}

#[test]
fn a_torn_end_of_the_log_is_not_in_the_copy() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    turn(&mut journal, 1);
    let log = dir.path().join(format!("{FILE}-wal"));
    let whole = log.metadata().unwrap().len();
    turn(&mut journal, 2);
    let torn = tempfile::tempdir().unwrap();
    for name in [FILE.to_owned(), format!("{FILE}-wal")] {
        std::fs::copy(dir.path().join(&name), torn.path().join(&name)).unwrap();
    }
    let path = torn.path().join(format!("{FILE}-wal"));
    let mut bytes = std::fs::read(&path).unwrap();
    assert_eq!(read(&copied(torn.path())), (2, 2));
    // Cut the last byte, and then half, of the last commit.
    for length in [bytes.len() - 1, usize::try_from(whole).unwrap() + 2_000] {
        bytes.truncate(length);
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(read(&copied(torn.path())), (1, 1));
    }
}

/// A writer that runs an action at the first byte.
struct ActOnFirstWrite<F>(Option<F>, Vec<u8>);

impl<F: FnOnce()> Write for ActOnFirstWrite<F> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if let Some(what) = self.0.take() {
            what();
        }
        self.1.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_commit_meanwhile_is_not_in_the_copy_and_one_that_changes_the_database_makes_it_fail() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    turn(&mut journal, 1);
    let mut to = ActOnFirstWrite(Some(|| turn(&mut journal, 2)), Vec::new());
    copy(dir.path(), &mut to).unwrap();
    assert_eq!(read(&to.1), (1, 1));
    journal.checkpoint_every(1);
    let mut to = ActOnFirstWrite(Some(|| turn(&mut journal, 3)), Vec::new());
    let error = copy(dir.path(), &mut to).unwrap_err();
    assert!(error.to_string().contains("run the command again"), "{error}");
    assert_eq!(read(&copied(dir.path())), (3, 3));
}

#[test]
fn a_file_that_is_no_journal_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = Vec::new();
    let mut refusal = || copy(dir.path(), &mut bytes).unwrap_err();
    assert!(matches!(refusal(), CopyError::Io(_)));
    for content in ["", "once upon a time", &"once upon a time".repeat(400)] {
        std::fs::write(dir.path().join(FILE), content).unwrap();
        assert!(matches!(refusal(), CopyError::NoJournal), "{content}");
    }
    assert!(bytes.is_empty());
}
