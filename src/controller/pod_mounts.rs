//! Mounts of volumes in pods, and the directories and files that they are made of; the volume that the pods of Agents and
//! Sensors have in common.

use k8s_openapi::api::core::v1::{KeyToPath, SecretVolumeSource, Volume, VolumeMount};

use crate::api::endpoint::ROOTS_KEY;
use crate::link::pod::OTLP_CA_FILE;

/// Mode of the files: readable only by the pod's group (and owner), because its containers have different UIDs.
pub(super) const GROUP_READABLE: i32 = 0o440;
/// The volume with the authorities of the OTLP collector.
const OTLP_CA: &str = "otlp-ca";

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

/// The authorities of the OTLP collector from this Secret. Without it, or without its key, the pod runs, and nothing is sent to a
/// collector at `https`. No other key is mounted: the Secret may contain the private key of an authority.
pub(super) fn otlp_ca_volume(secret: &str) -> Volume {
    Volume {
        name: OTLP_CA.into(),
        secret: Some(SecretVolumeSource {
            secret_name: Some(secret.into()),
            items: Some(vec![KeyToPath {
                key: ROOTS_KEY.into(),
                path: file(OTLP_CA_FILE).into(),
                ..KeyToPath::default()
            }]),
            default_mode: Some(GROUP_READABLE),
            optional: Some(true),
        }),
        ..Volume::default()
    }
}

/// The mount of [`otlp_ca_volume`].
pub(super) fn otlp_ca_mount() -> VolumeMount {
    mount(OTLP_CA, directory(OTLP_CA_FILE), true)
}
