//! The volumes of a pod as directories, and which container path maps to which.
//!
//! Does what a kubelet does with the pod's manifest. Everything except the volume claims is in a private directory that
//! is removed with the pod.

use std::fs::{DirBuilder, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Container, KeyToPath, Pod, Volume};

use crate::api_server::object_key::{CONFIG_MAPS, SECRETS};
use crate::api_server::{ObjectKey, ObjectStore};
use crate::link::pod::WORKSPACE_VOLUME;

/// Why a volume cannot be created.
#[derive(thiserror::Error, Debug)]
pub enum VolumeError {
    /// An error of the file system.
    #[error("{path}: {source}")]
    File { path: PathBuf, source: std::io::Error },
    /// Its source is missing.
    #[error("volume {volume}: {what}")]
    Missing { volume: String, what: String },
}

/// Where volumes are created.
pub struct VolumeDirectories<'a> {
    /// Private directory of this pod.
    pub pod: &'a Path,
    /// Directory of the claims, which persist.
    pub claims: &'a Path,
    /// The workspace of every pod that has one; `None`: the directory of its claim.
    pub workspace: Option<&'a Path>,
    pub token: &'a str,
}

#[derive(Debug)]
pub struct PodVolumes(Vec<(String, PathBuf)>);

impl PodVolumes {
    /// Creates all volumes of a pod.
    pub fn make(store: &ObjectStore, pod: &Pod, directories: &VolumeDirectories<'_>) -> Result<Self, VolumeError> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
        let made = volumes.map(|volume| {
            let maker = VolumeMaker {
                store,
                namespace,
                volume,
                directories,
            };
            Ok((volume.name.clone(), maker.make()?))
        });
        let volumes = Self(made.collect::<Result<_, VolumeError>>()?);
        let spec = pod.spec.iter();
        let containers = spec.flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers));
        // A kubelet creates the directories of sub-paths too.
        for mount in containers.flat_map(|container| container.volume_mounts.iter().flatten()) {
            if let (Some(directory), Some(inner)) = (volumes.directory(&mount.name), &mount.sub_path) {
                make_directory(&directory.join(inner))?;
            }
        }
        Ok(volumes)
    }

    /// Maps a path of a container to this machine. A path that no mount covers maps to one that does not exist.
    #[must_use]
    pub fn resolve(&self, container: &Container, path: &str) -> PathBuf {
        let mounts = container.volume_mounts.iter().flatten();
        let covering = mounts.filter_map(|mount| {
            let rest = Path::new(path).strip_prefix(&mount.mount_path).ok()?;
            let (_, directory) = self.0.iter().find(|(name, _)| *name == mount.name)?;
            let inner = directory.join(mount.sub_path.as_deref().unwrap_or_default());
            Some((mount.mount_path.len(), inner.join(rest)))
        });
        let longest = covering.max_by_key(|(length, _)| *length);
        longest.map_or_else(|| PathBuf::from("/nonexistent"), |(_, found)| found)
    }

    /// The directory of a volume.
    #[must_use]
    pub fn directory(&self, volume: &str) -> Option<&Path> {
        let found = self.0.iter().find(|(name, _)| name == volume);
        found.map(|(_, directory)| directory.as_path())
    }
}

struct VolumeMaker<'a> {
    store: &'a ObjectStore,
    namespace: &'a str,
    volume: &'a Volume,
    directories: &'a VolumeDirectories<'a>,
}

impl VolumeMaker<'_> {
    fn make(&self) -> Result<PathBuf, VolumeError> {
        let volume = self.volume;
        if let Some(directory) = self.directories.workspace.filter(|_| volume.name == WORKSPACE_VOLUME) {
            return Ok(directory.into());
        }
        if let Some(claim) = &volume.persistent_volume_claim {
            let directory = self.directories.claims.join(self.namespace).join(&claim.claim_name);
            return make_directory(&directory).map(|()| directory);
        }
        let directory = self.directories.pod.join(&volume.name);
        make_directory(&directory)?;
        if let Some(source) = &volume.config_map {
            self.files(&directory, CONFIG_MAPS, &source.name, source.items.as_deref())?;
        }
        if let Some(source) = &volume.secret {
            let name = source.secret_name.as_deref().unwrap_or_default();
            self.files(&directory, SECRETS, name, source.items.as_deref())?;
        }
        let projected = volume
            .projected
            .iter()
            .flat_map(|projected| projected.sources.iter().flatten());
        for source in projected {
            if let Some(token) = &source.service_account_token {
                write(&directory.join(&token.path), self.directories.token.as_bytes())?;
            }
            if let Some(source) = &source.config_map {
                self.files(&directory, CONFIG_MAPS, &source.name, source.items.as_deref())?;
            }
            if let Some(source) = &source.secret {
                self.files(&directory, SECRETS, &source.name, source.items.as_deref())?;
            }
        }
        Ok(directory)
    }

    /// Writes the keys of an object as files: all, or the named ones.
    fn files(
        &self,
        directory: &Path,
        resource: &str,
        name: &str,
        items: Option<&[KeyToPath]>,
    ) -> Result<(), VolumeError> {
        let missing = |what: String| VolumeError::Missing {
            volume: self.volume.name.clone(),
            what,
        };
        let object = self.store.get(&ObjectKey::new(resource, self.namespace, name));
        let object = object.ok_or_else(|| missing(format!("object {name} not found")))?;
        let data = object["data"].as_object().cloned().unwrap_or_default();
        for (key, value) in &data {
            let path = match items {
                None => key,
                Some(items) => match items.iter().find(|item| item.key == *key) {
                    Some(item) => &item.path,
                    None => continue,
                },
            };
            let bytes = if resource == SECRETS {
                let decoded = serde_json::from_value::<ByteString>(value.clone());
                decoded
                    .map_err(|_| missing(format!("key {key} of {name} is not valid base64")))?
                    .0
            } else {
                value.as_str().unwrap_or_default().as_bytes().to_vec()
            };
            let file = directory.join(path);
            // The path of an item may have directories.
            make_directory(file.parent().unwrap_or(directory))?;
            write(&file, &bytes)?;
        }
        Ok(())
    }
}

/// Creates a directory that only its owner can access.
pub fn make_directory(path: &Path) -> Result<(), VolumeError> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(|source| VolumeError::File {
        path: path.into(),
        source,
    })
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), VolumeError> {
    let mut options = OpenOptions::new();
    let opened = options.write(true).create(true).truncate(true).mode(0o600).open(path);
    opened
        .and_then(|mut file| file.write_all(bytes))
        .map_err(|source| VolumeError::File {
            path: path.into(),
            source,
        })
}
