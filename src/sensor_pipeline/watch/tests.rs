//! Tests of change detection.

use pretty_assertions::assert_eq;
use rstest::rstest;

use super::*;

fn scope(path: &str, recursive: bool) -> Result<WatchScope, String> {
    let watch = WatchSource {
        path: path.into(),
        recursive,
    };
    WatchScope::of(&watch).map_err(|invalid| invalid.to_string())
}

#[rstest]
#[case("inbox/", true, "inbox/a", true)]
#[case("inbox/", true, "inbox/b/c", true)]
#[case("inbox/", false, "inbox/a", true)]
#[case("inbox/", false, "inbox/b/c", false)]
#[case("inbox", true, "inbox2/a", false)]
#[case("inbox/a", true, "inbox/a", true)]
#[case("./inbox//b/", true, "inbox/b/c", true)]
#[case(".", true, "a/b", true)]
#[case("", false, "a", true)]
#[case("", false, "a/b", false)]
fn a_scope_covers_what_is_in_its_folder_or_is_its_file(
    #[case] path: &str,
    #[case] recursive: bool,
    #[case] file: &str,
    #[case] expected: bool,
) {
    assert_eq!(scope(path, recursive).expect("a scope").covers(file), expected);
}

#[rstest]
#[case("/etc", "without a leading /")]
#[case("../journal", "without ..")]
#[case("inbox/../../journal", "without ..")]
#[case("in\0box", "a NUL character")]
fn a_path_that_leads_out_of_the_workspace_is_refused(#[case] path: &str, #[case] why: &str) {
    let refused = scope(path, true).expect_err("a refusal");
    assert!(
        refused.starts_with("spec.source.watch.path: ") && refused.contains(why),
        "{refused}"
    );
    assert!(scope("inbox/..a", true).is_ok());
}

fn look(size: u64, modified: i64) -> FileStat {
    FileStat {
        size,
        modified,
        stamp: 0,
    }
}

fn print(size: u64, modified: i64, hash: &str) -> FileFingerprint {
    FileFingerprint {
        look: look(size, modified),
        hash: Some(hash.into()),
    }
}

fn found(files: &[(&str, FileStat)]) -> BTreeMap<String, FileStat> {
    files.iter().map(|(path, look)| ((*path).to_owned(), *look)).collect()
}

const NOBODY: BTreeSet<String> = BTreeSet::new();
const MILLISECOND: Duration = Duration::from_millis(1);

#[test]
fn another_file_of_the_same_size_and_time_is_read_and_one_that_a_journal_knew_is_not() {
    let mut watcher = ChangeDetector::new(BTreeMap::from([("a".to_owned(), print(1, 1, "x"))]));
    let at = Duration::from_secs;
    let stamped = |stamp| FileStat { stamp, ..look(1, 1) };
    let mut compare = |second, stamp| watcher.compare(at(second), &found(&[("a", stamped(stamp))]), &NOBODY);
    assert_eq!(compare(0, 7), []);
    assert_eq!(compare(9, 7), []);
    assert_eq!(compare(10, 8), []);
    assert_eq!(compare(11, 8), [FileTask::Read("a".into(), stamped(8))]);
}

#[test]
fn the_known_files_below_a_folder_are_those_in_it() {
    let known = ["in", "in/a", "in/b/c", "inner"].map(|path| (path.to_owned(), print(1, 1, "x")));
    let watcher = ChangeDetector::new(BTreeMap::from(known));
    let below = watcher.below("in").into_iter().map(|(path, _)| path);
    assert_eq!(below.collect::<Vec<_>>(), ["in", "in/a", "in/b/c"]);
}

#[test]
fn a_file_is_read_once_it_was_unchanged_for_a_second_and_not_before() {
    let mut watcher = ChangeDetector::default();
    let at = Duration::from_secs;
    let read = |size| vec![FileTask::Read("a".into(), look(size, 1))];
    assert_eq!(watcher.compare(at(0), &found(&[("a", look(1, 1))]), &NOBODY), []);
    assert_eq!(watcher.settles_at(at(0), &NOBODY), Some(at(1)));
    assert_eq!(
        watcher.compare(at(1).saturating_sub(MILLISECOND), &found(&[("a", look(2, 1))]), &NOBODY),
        []
    );
    assert_eq!(watcher.compare(at(1), &found(&[("a", look(2, 1))]), &NOBODY), []);
    let settled = found(&[("a", look(2, 1))]);
    assert_eq!(
        watcher.compare(at(2).saturating_sub(MILLISECOND), &settled, &NOBODY),
        read(2)
    );
    watcher.learn("a", Some(print(2, 1, "x")));
    assert_eq!(watcher.compare(at(9), &settled, &NOBODY), []);
    assert_eq!(watcher.settles_at(at(9), &NOBODY), None);
}

#[test]
fn a_file_that_is_being_written_is_waited_for_up_to_a_minute() {
    let mut watcher = ChangeDetector::default();
    let files = found(&[("a", look(1, 1))]);
    let open = BTreeSet::from(["a".to_owned()]);
    assert_eq!(watcher.compare(Duration::ZERO, &files, &open), []);
    assert_eq!(
        watcher.compare(ABANDONED.saturating_sub(MILLISECOND), &files, &open),
        []
    );
    assert_eq!(watcher.settles_at(Duration::ZERO, &open), Some(ABANDONED));
    assert_eq!(watcher.compare(ABANDONED, &files, &open).len(), 1);
    assert_eq!(watcher.compare(ABANDONED, &files, &NOBODY).len(), 1);
}

#[test]
fn removed_files_are_reported_first_and_then_the_oldest() {
    let known = BTreeMap::from([
        ("gone".to_owned(), print(1, 1, "x")),
        ("same".to_owned(), print(1, 1, "y")),
    ]);
    let mut watcher = ChangeDetector::new(known);
    let files = found(&[("a", look(1, 9)), ("b", look(1, 8)), ("same", look(1, 1))]);
    assert_eq!(watcher.compare(Duration::ZERO, &files, &NOBODY), []);
    assert_eq!(
        watcher.compare(SETTLED, &files, &NOBODY),
        [
            FileTask::Forget("gone".into()),
            FileTask::Read("b".into(), look(1, 8)),
            FileTask::Read("a".into(), look(1, 9)),
        ]
    );
    // A file that is back within the second does not count as removed.
    let mut watcher = ChangeDetector::new(BTreeMap::from([("a".to_owned(), print(1, 1, "x"))]));
    assert_eq!(watcher.compare(Duration::ZERO, &found(&[]), &NOBODY), []);
    assert_eq!(watcher.compare(SETTLED, &found(&[("a", look(1, 1))]), &NOBODY), []);
    assert_eq!(watcher.compare(SETTLED * 2, &found(&[]), &NOBODY), []);
}

#[test]
fn an_event_contains_the_text_of_the_file_where_it_fits() {
    let change = |print: Option<FileFingerprint>, was_there, text: &str| FileChange {
        path: "inbox/a".into(),
        print,
        was_there,
        text: Some(text.into()).filter(|text: &String| !text.is_empty()),
    };
    let made = change(Some(print(2, 1_700_000_000_000_000_000, "ab")), false, "hi");
    let whole = made.payload(1024);
    assert_eq!(
        serde_json::from_str::<Value>(&whole).expect("JSON"),
        json!({
            "path": "inbox/a", "kind": "Created", "size": 2, "modified": "2023-11-14T22:13:20Z", "sha256": "ab",
            "content": "hi",
        })
    );
    assert_eq!(made.payload(whole.len()), whole);
    let without: Value = serde_json::from_str(&made.payload(whole.len() - 1)).expect("JSON");
    assert_eq!((&without["content"], &without["size"]), (&Value::Null, &json!(2)));
    let changed: Value = serde_json::from_str(&change(made.print.clone(), true, "").payload(1024)).expect("JSON");
    assert_eq!(changed["kind"], "Modified");
    assert_eq!(
        change(None, true, "").payload(1024),
        json!({"path": "inbox/a", "kind": "Removed"}).to_string()
    );
}

#[test]
fn files_are_compared_by_content_or_by_metadata_where_they_are_too_large() {
    assert!(print(1, 1, "x").says_the_same_as(&print(1, 2, "x")));
    assert!(!print(1, 1, "x").says_the_same_as(&print(1, 1, "y")));
    let large = |modified| FileFingerprint {
        look: look(1, modified),
        hash: None,
    };
    assert!(large(1).says_the_same_as(&large(1)));
    assert!(!large(1).says_the_same_as(&large(2)));
    assert!(!large(1).says_the_same_as(&print(1, 1, "x")));
}
