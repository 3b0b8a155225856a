//! How much the artifacts may take of a volume, and which of them leave when they are too much. Pure.

use std::time::SystemTime;

use super::name::ArtifactName;

/// Maximum number of bytes of one artifact: no result of a tool has more on the wire.
pub const MAX_ARTIFACT_BYTES: usize = 4 * 1024 * 1024;
/// Maximum number of bytes of all artifacts: 16 of the largest, and a sixteenth of the default volume.
const MAX_BYTES: u64 = 64 * 1024 * 1024;
/// Maximum number of artifacts. The directory is listed for each new one.
const MAX_FILES: usize = 512;
/// Maximum share of a small volume that artifacts may take, as a divisor of its size: the journal needs the rest.
const SHARE: u64 = 8;
/// Bytes that stay free on the volume, and as a divisor of its size on a small one: a full volume ends the loop.
const RESERVE: (u64, u64) = (64 * 1024 * 1024, 16);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StoreLimits {
    pub(super) artifact_bytes: usize,
    pub(super) bytes: u64,
    pub(super) files: usize,
}

impl Default for StoreLimits {
    fn default() -> Self {
        Self {
            artifact_bytes: MAX_ARTIFACT_BYTES,
            bytes: MAX_BYTES,
            files: MAX_FILES,
        }
    }
}

/// A stored artifact. In order, the oldest is first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct StoredFile {
    pub(super) modified: SystemTime,
    pub(super) name: ArtifactName,
    pub(super) bytes: u64,
}

/// Bytes of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct VolumeSpace {
    pub(super) size: u64,
    pub(super) free: u64,
}

/// How many of the oldest files must leave so that one of `new` bytes fits; 0 bytes: so that the bounds hold. `None`: it
/// does not fit even without them.
pub(super) fn surplus(files: &[StoredFile], new: u64, volume: VolumeSpace, limits: StoreLimits) -> Option<usize> {
    let max_bytes = limits.bytes.min(volume.size / SHARE);
    let reserve = RESERVE.0.min(volume.size / RESERVE.1);
    let max_files = if new == 0 {
        limits.files
    } else {
        limits.files.saturating_sub(1)
    };
    let mut bytes: u64 = files.iter().map(|file| file.bytes).sum();
    let mut free = volume.free;
    for removed in 0..=files.len() {
        let fits = files.len() - removed <= max_files
            && bytes.saturating_add(new) <= max_bytes
            && free >= new.saturating_add(reserve);
        if fits {
            return Some(removed);
        }
        let freed = files.get(removed).map_or(0, |file| file.bytes);
        bytes = bytes.saturating_sub(freed);
        free = free.saturating_add(freed);
    }
    None
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const ROOM: VolumeSpace = VolumeSpace {
        size: 1 << 30,
        free: 1 << 29,
    };
    const LIMITS: StoreLimits = StoreLimits {
        artifact_bytes: 10,
        bytes: 100,
        files: 5,
    };

    fn files(sizes: &[u64]) -> Vec<StoredFile> {
        let file = |(place, bytes): (usize, &u64)| StoredFile {
            modified: SystemTime::UNIX_EPOCH + Duration::from_secs(place as u64),
            name: ArtifactName::of("text/plain", &[u8::try_from(place).unwrap()]),
            bytes: *bytes,
        };
        sizes.iter().enumerate().map(file).collect()
    }

    #[test]
    fn the_oldest_files_leave_above_the_most_bytes_and_not_at_them() {
        let files = files(&[10, 20, 60]);
        assert_eq!(surplus(&files, 9, ROOM, LIMITS), Some(0));
        assert_eq!(surplus(&files, 10, ROOM, LIMITS), Some(0));
        assert_eq!(surplus(&files, 11, ROOM, LIMITS), Some(1));
        assert_eq!(surplus(&files, 40, ROOM, LIMITS), Some(2));
        assert_eq!(surplus(&files, 100, ROOM, LIMITS), Some(3));
        assert_eq!(surplus(&files, 101, ROOM, LIMITS), None);
        // Once they have left, there is room.
        assert_eq!(surplus(&files[1..], 11, ROOM, LIMITS), Some(0));
    }

    #[test]
    fn the_oldest_files_leave_above_the_most_files_and_not_at_them() {
        assert_eq!(surplus(&files(&[1; 4]), 1, ROOM, LIMITS), Some(0));
        assert_eq!(surplus(&files(&[1; 5]), 1, ROOM, LIMITS), Some(1));
        assert_eq!(surplus(&files(&[1; 5]), 0, ROOM, LIMITS), Some(0));
        assert_eq!(surplus(&files(&[1; 7]), 0, ROOM, LIMITS), Some(2));
    }

    #[test]
    fn a_small_volume_keeps_seven_eighths_of_its_size_and_a_sixteenth_stays_free() {
        let limits = StoreLimits::default();
        let small = VolumeSpace {
            size: 16 << 20,
            free: 8 << 20,
        };
        assert_eq!(surplus(&[], 2 << 20, small, limits), Some(0));
        assert_eq!(surplus(&[], (2 << 20) + 1, small, limits), None);
        let nearly_full = |free: u64| VolumeSpace {
            free: (1 << 20) + free,
            ..small
        };
        let old = files(&[100, 100]);
        assert_eq!(surplus(&old, 50, nearly_full(50), limits), Some(0));
        assert_eq!(surplus(&old, 50, nearly_full(49), limits), Some(1));
        assert_eq!(surplus(&old, 251, nearly_full(50), limits), None);
        // A large volume is not kept empty: 64 MiB are enough.
        let large = VolumeSpace {
            size: 1 << 40,
            free: (64 << 20) + 50,
        };
        assert_eq!(surplus(&[], 50, large, limits), Some(0));
        assert_eq!(surplus(&[], 51, large, limits), None);
    }
}
