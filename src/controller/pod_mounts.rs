//! Mounts of volumes in pods, and the directories and files that they are made of.

use k8s_openapi::api::core::v1::VolumeMount;

pub(super) fn mount(volume: &str, path: &str, read_only: bool) -> VolumeMount {
    VolumeMount {
        name: volume.into(),
        mount_path: path.into(),
        read_only: read_only.then_some(true),
        ..VolumeMount::default()
    }
}

/// The directory of a path. Whole directories are mounted because the kubelet does not update `subPath` mounts.
pub(super) fn directory(path: &str) -> &str {
    path.rsplit_once('/').map_or("/", |(directory, _)| directory)
}

/// The name of a file in its directory.
pub(super) fn file(path: &str) -> &str {
    path.rsplit_once('/').map_or(path, |(_, file)| file)
}
