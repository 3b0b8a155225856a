//! The lines of the newest turn, from which a restarted worker continues its spans.

use tempfile::TempDir;

use super::*;

#[test]
fn the_lines_of_the_newest_turn_begin_with_its_start() {
    let dir = TempDir::new().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    assert_eq!(journal.newest_turn_lines().unwrap(), []);
    let line = |kind, turn| record(kind, turn, Vec::new());
    write(&mut journal, &[line(RecordKind::Started, 0)]);
    assert_eq!(journal.newest_turn_lines().unwrap(), []);
    write(
        &mut journal,
        &[
            line(RecordKind::TurnStarted, 1),
            line(RecordKind::TurnCompleted, 1),
            line(RecordKind::TurnStarted, 2),
            line(RecordKind::CallStarted, 2),
        ],
    );
    let lines = journal.newest_turn_lines().unwrap();
    let kinds: Vec<_> = lines.iter().map(|line| (line.kind, line.turn)).collect();
    assert_eq!(kinds, [(RecordKind::TurnStarted, 2), (RecordKind::CallStarted, 2)]);
}
