//! The store on a real file system.

use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;

fn limits(bytes: u64, files: usize) -> StoreLimits {
    StoreLimits {
        artifact_bytes: 10,
        bytes,
        files,
    }
}

/// The names of all files in the directory of the store.
fn listed(dir: &Path) -> Vec<String> {
    let files = fs::read_dir(dir.join(DIRECTORY)).unwrap();
    let mut names: Vec<String> = files
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_content_is_stored_once_and_read_again_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let store = ArtifactStore::open(dir.path());
    assert!(
        !dir.path().join(DIRECTORY).exists(),
        "an Agent without results has none"
    );
    let name = store.store("image/png", b"abc").unwrap();
    assert_eq!(name.as_str(), "ba7816bf8f01cfea.png");
    assert_eq!(store.store("image/png", b"abc"), Ok(name.clone()));
    assert_eq!(listed(dir.path()), [name.as_str()]);
    let next = ArtifactStore::open(dir.path());
    assert_eq!(next.read(&name).unwrap(), b"abc");
    let mode = fs::metadata(dir.path().join(DIRECTORY).join(name.as_str())).unwrap();
    assert_eq!(mode.permissions().mode() & 0o111, 0, "data, not a program");
}

#[test]
fn an_artifact_has_a_maximum_size() {
    let dir = tempfile::tempdir().unwrap();
    let store = ArtifactStore::with_limits(dir.path(), limits(100, 5));
    assert!(store.store("text/plain", &[b'a'; 9]).is_ok());
    assert!(store.store("text/plain", &[b'a'; 10]).is_ok());
    assert_eq!(store.store("text/plain", &[b'a'; 11]), Err(NotStored::TooLarge));
    assert!(store.store("text/plain", b"b").is_ok(), "the next one is not affected");
}

#[test]
fn a_full_store_removes_the_artifact_that_was_stored_first_and_one_stored_again_counts_as_new() {
    let dir = tempfile::tempdir().unwrap();
    let store = ArtifactStore::with_limits(dir.path(), limits(100, 3));
    let put = |content: &[u8]| store.store("text/plain", content).unwrap();
    let first = [b"a", b"b", b"c"].map(|content| put(content));
    assert_eq!(listed(dir.path()).len(), 3, "full, and nothing is removed");
    put(b"a");
    let fourth = put(b"d");
    assert!(
        store
            .read(&first[1])
            .is_err_and(|error| error.kind() == io::ErrorKind::NotFound),
        "the oldest"
    );
    // The order survives a restart.
    let store = ArtifactStore::with_limits(dir.path(), limits(100, 3));
    let fifth = store.store("text/plain", b"e").unwrap();
    let left = |name: &ArtifactName| store.read(name).is_ok();
    assert_eq!(first.each_ref().map(left), [true, false, false]);
    assert!(left(&fourth) && left(&fifth));
}

#[test]
fn a_store_whose_bytes_are_used_up_removes_as_many_as_the_new_one_needs() {
    let dir = tempfile::tempdir().unwrap();
    let store = ArtifactStore::with_limits(dir.path(), limits(20, 99));
    let put = |content: &[u8]| store.store("text/plain", content).unwrap();
    let (a, b) = (put(&[b'a'; 5]), put(&[b'b'; 5]));
    let c = put(&[b'c'; 10]);
    assert_eq!(listed(dir.path()).len(), 3, "20 bytes of 20");
    let d = put(b"d");
    let left = |name: &ArtifactName| store.read(name).is_ok();
    assert_eq!([&a, &b, &c, &d].map(left), [false, true, true, true]);
}

#[test]
fn a_clock_that_is_set_back_does_not_make_the_newest_artifact_the_oldest() {
    let dir = tempfile::tempdir().unwrap();
    let store = ArtifactStore::with_limits(dir.path(), limits(100, 2));
    let a = store.store("text/plain", b"a").unwrap();
    let later = SystemTime::now() + Duration::from_hours(1);
    let path = dir.path().join(DIRECTORY).join(a.as_str());
    let file = File::options().append(true).open(path).unwrap();
    file.set_modified(later).unwrap();
    let b = store.store("text/plain", b"b").unwrap();
    let c = store.store("text/plain", b"c").unwrap();
    assert!(store.read(&a).is_err() && store.read(&b).is_ok() && store.read(&c).is_ok());
}

#[test]
fn a_file_that_a_crash_left_unfinished_is_no_artifact_and_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let store = ArtifactStore::open(dir.path());
    let name = store.store("text/plain", b"a").unwrap();
    let half = dir.path().join(DIRECTORY).join(UNFINISHED);
    fs::write(&half, "half of an art").unwrap();
    assert!(ArtifactName::parse(UNFINISHED).is_none());
    // Before and after the next start.
    let other = store.store("text/plain", b"b").unwrap();
    assert!(!half.exists(), "it was overwritten, and renamed");
    fs::write(&half, "half of an art").unwrap();
    let next = ArtifactStore::open(dir.path());
    let mut names = [name.as_str(), other.as_str()];
    names.sort_unstable();
    assert_eq!(listed(dir.path()), names);
    assert_eq!(next.read(&name).unwrap(), b"a");
}

#[test]
fn a_damaged_artifact_is_replaced_when_its_content_is_stored_again() {
    let dir = tempfile::tempdir().unwrap();
    let store = ArtifactStore::open(dir.path());
    let name = store.store("text/plain", b"abc").unwrap();
    fs::write(dir.path().join(DIRECTORY).join(name.as_str()), "ab").unwrap();
    assert_eq!(store.store("text/plain", b"abc"), Ok(name.clone()));
    assert_eq!(store.read(&name).unwrap(), b"abc");
}

#[test]
fn an_unwritable_directory_fails_with_an_error_and_works_again_when_writable() {
    let dir = tempfile::tempdir().unwrap();
    let store = ArtifactStore::open(dir.path());
    // Permissions do not stop root: a file in the place of the directory does.
    let place = dir.path().join(DIRECTORY);
    fs::write(&place, "").unwrap();
    assert_eq!(store.store("text/plain", b"a"), Err(NotStored::Failed));
    fs::remove_file(&place).unwrap();
    assert!(store.store("text/plain", b"a").is_ok());
}

#[test]
fn a_full_volume_stores_nothing_leaves_no_half_and_works_again_with_room() {
    // A device that is always full, in the place of the unfinished file.
    let dir = tempfile::tempdir().unwrap();
    let store = ArtifactStore::open(dir.path());
    let old = store.store("text/plain", b"old").unwrap();
    let unfinished = dir.path().join(DIRECTORY).join(UNFINISHED);
    symlink("/dev/full", &unfinished).unwrap();
    assert_eq!(store.store("text/plain", b"a"), Err(NotStored::Full));
    assert_eq!(listed(dir.path()), [old.as_str()]);
    assert_eq!(store.read(&old).unwrap(), b"old");
    assert!(store.store("text/plain", b"a").is_ok());
}

#[test]
fn artifacts_beyond_the_bounds_leave_at_the_next_start() {
    let dir = tempfile::tempdir().unwrap();
    let store = ArtifactStore::with_limits(dir.path(), limits(100, 5));
    let names = [b"a", b"b", b"c"].map(|content| store.store("text/plain", content).unwrap());
    let store = ArtifactStore::with_limits(dir.path(), limits(100, 2));
    let left = names.each_ref().map(|name| store.read(name).is_ok());
    assert_eq!(left, [false, true, true]);
}
