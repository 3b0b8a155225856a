//! The volumes of a pod as folders, and which path of a container leads where.
//!
//! What a kubelet does with the pod's manifest. Everything but the volume claims is in a private folder that goes with
//! the pod.

use std::fs::{DirBuilder, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Container, KeyToPath, Pod, Volume};

use super::object_store::{CONFIG_MAPS, ObjectKey, ObjectStore, SECRETS};
use crate::link::pod::WORKSPACE_VOLUME;

/// Why a volume cannot be made.
#[derive(thiserror::Error, Debug)]
pub enum VolumeError {
    /// The file system.
    #[error("{path}: {source}")]
    File {
        /// The path.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// What it is made of.
    #[error("volume {volume}: {what}")]
    Missing {
        /// The volume.
        volume: String,
        /// What is not there.
        what: String,
    },
}

/// Where volumes are made.
pub struct VolumeFolders<'a> {
    /// Private, of this pod alone.
    pub pod: &'a Path,
    /// Of the claims, which stay.
    pub claims: &'a Path,
    /// The workspace of every pod that has one; `None`: the folder of its claim.
    pub workspace: Option<&'a Path>,
    /// The pod's token.
    pub token: &'a str,
}

/// The volumes of one pod.
#[derive(Debug)]
pub struct PodVolumes(Vec<(String, PathBuf)>);

impl PodVolumes {
    /// Makes all volumes of a pod.
    pub fn make(store: &ObjectStore, pod: &Pod, folders: &VolumeFolders<'_>) -> Result<Self, VolumeError> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
        let made = volumes.map(|volume| {
            let maker = VolumeMaker {
                store,
                namespace,
                volume,
                folders,
            };
            Ok((volume.name.clone(), maker.make()?))
        });
        let volumes = Self(made.collect::<Result<_, VolumeError>>()?);
        let spec = pod.spec.iter();
        let containers = spec.flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers));
        // A kubelet makes the folders of sub-paths too.
        for mount in containers.flat_map(|container| container.volume_mounts.iter().flatten()) {
            if let (Some(folder), Some(inner)) = (volumes.folder(&mount.name), &mount.sub_path) {
                make_folder(&folder.join(inner))?;
            }
        }
        Ok(volumes)
    }

    /// Where a path of a container leads; a path that no mount covers leads nowhere.
    #[must_use]
    pub fn resolve(&self, container: &Container, path: &str) -> PathBuf {
        let mounts = container.volume_mounts.iter().flatten();
        let covering = mounts.filter_map(|mount| {
            let rest = Path::new(path).strip_prefix(&mount.mount_path).ok()?;
            let (_, folder) = self.0.iter().find(|(name, _)| *name == mount.name)?;
            let inner = folder.join(mount.sub_path.as_deref().unwrap_or_default());
            Some((mount.mount_path.len(), inner.join(rest)))
        });
        let longest = covering.max_by_key(|(length, _)| *length);
        longest.map_or_else(|| PathBuf::from("/nonexistent"), |(_, found)| found)
    }

    /// The folder of a volume.
    #[must_use]
    pub fn folder(&self, volume: &str) -> Option<&Path> {
        let found = self.0.iter().find(|(name, _)| name == volume);
        found.map(|(_, folder)| folder.as_path())
    }
}

struct VolumeMaker<'a> {
    store: &'a ObjectStore,
    namespace: &'a str,
    volume: &'a Volume,
    folders: &'a VolumeFolders<'a>,
}

impl VolumeMaker<'_> {
    fn make(&self) -> Result<PathBuf, VolumeError> {
        let volume = self.volume;
        if let Some(folder) = self.folders.workspace.filter(|_| volume.name == WORKSPACE_VOLUME) {
            return Ok(folder.into());
        }
        if let Some(claim) = &volume.persistent_volume_claim {
            let folder = self.folders.claims.join(self.namespace).join(&claim.claim_name);
            return make_folder(&folder).map(|()| folder);
        }
        let folder = self.folders.pod.join(&volume.name);
        make_folder(&folder)?;
        if let Some(source) = &volume.config_map {
            self.files(&folder, CONFIG_MAPS, &source.name, source.items.as_deref())?;
        }
        if let Some(source) = &volume.secret {
            let name = source.secret_name.as_deref().unwrap_or_default();
            self.files(&folder, SECRETS, name, source.items.as_deref())?;
        }
        let projected = volume
            .projected
            .iter()
            .flat_map(|projected| projected.sources.iter().flatten());
        for source in projected {
            if let Some(token) = &source.service_account_token {
                write(&folder.join(&token.path), self.folders.token.as_bytes())?;
            }
            if let Some(source) = &source.config_map {
                self.files(&folder, CONFIG_MAPS, &source.name, source.items.as_deref())?;
            }
        }
        Ok(folder)
    }

    /// The keys of an object as files: all, or those that are named.
    fn files(&self, folder: &Path, resource: &str, name: &str, items: Option<&[KeyToPath]>) -> Result<(), VolumeError> {
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
            write(&folder.join(path), &bytes)?;
        }
        Ok(())
    }
}

/// Makes a folder that only its owner may look into.
pub fn make_folder(path: &Path) -> Result<(), VolumeError> {
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
