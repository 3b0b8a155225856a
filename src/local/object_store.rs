//! The objects of a local run, as an API server stores them for a cluster.
//!
//! Owns versions, generations, uids and the history that watches read. Agents, AgentBudgets and Sensors are on disk
//! before a write is acknowledged, since the ledger's guarantees and the uids of Sensors depend on that; everything
//! else lives as long as the process. Knows neither HTTP nor the meaning of the objects.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;
use ring::rand::{SecureRandom, SystemRandom};
use rusqlite::{Connection, OptionalExtension, params};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::patch::{self, ObjectPatch};

/// Agents: group and plural.
pub const AGENTS: &str = "agentloop.dev/agents";
pub const BUDGETS: &str = "agentloop.dev/agentbudgets";
pub const SENSORS: &str = "agentloop.dev/sensors";
pub const PODS: &str = "/pods";
pub const CONFIG_MAPS: &str = "/configmaps";
pub const SECRETS: &str = "/secrets";
/// One for each Sensor that runs in its own pod.
pub const STATEFUL_SETS: &str = "apps/statefulsets";
pub const CLAIMS: &str = "/persistentvolumeclaims";
pub const NAMESPACES: &str = "/namespaces";
/// Changes that watches can still read; a slower watch lists again.
const HISTORY: usize = 4096;
/// The table on disk.
const TABLE: &str = "CREATE TABLE IF NOT EXISTS objects (
    resource TEXT NOT NULL, namespace TEXT NOT NULL, name TEXT NOT NULL, json TEXT NOT NULL,
    PRIMARY KEY (resource, namespace, name)
) WITHOUT ROWID";

/// Identity of an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectKey {
    /// Group and plural; the core group is empty.
    pub resource: String,
    /// Empty for kinds without namespaces.
    pub namespace: String,
    pub name: String,
}

impl ObjectKey {
    #[must_use]
    pub fn new(resource: &str, namespace: &str, name: &str) -> Self {
        Self {
            resource: resource.into(),
            namespace: namespace.into(),
            name: name.into(),
        }
    }

    fn is_kept(&self) -> bool {
        [AGENTS, BUDGETS, SENSORS].contains(&self.resource.as_str())
    }
}

/// The kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::AsRefStr)]
#[strum(serialize_all = "UPPERCASE")]
pub enum ChangeKind {
    /// The object was created.
    Added,
    /// The object was modified.
    Modified,
    /// The object was deleted; this is its last state.
    Deleted,
}

/// One change, for watches.
#[derive(Clone, Debug)]
pub struct ObjectChange {
    /// Version of the store after the change.
    pub version: u64,
    pub key: ObjectKey,
    pub kind: ChangeKind,
    pub object: Value,
}

/// Why a request is rejected.
#[derive(thiserror::Error, Debug)]
pub enum ObjectStoreError {
    #[error("{0} not found")]
    NotFound(String),
    #[error("{0} already exists")]
    AlreadyExists(String),
    /// The object differs from what the request expects.
    #[error("{0}")]
    Conflict(String),
    /// The request does not apply to the object.
    #[error("{0}")]
    Invalid(String),
    /// The state directory cannot be written.
    #[error("cannot write the state: {0}")]
    Disk(#[from] rusqlite::Error),
    /// No random numbers for a new uid.
    #[error("cannot get random numbers from the system")]
    Random,
}

struct ObjectStoreInner {
    version: u64,
    objects: BTreeMap<ObjectKey, Value>,
    changes: VecDeque<ObjectChange>,
    disk: Connection,
}

pub struct ObjectStore {
    inner: Mutex<ObjectStoreInner>,
    news: watch::Sender<u64>,
    random: SystemRandom,
}

impl ObjectStore {
    /// Opens the file of the persisted objects; none of them exists before it is applied again.
    pub fn open(file: &Path) -> rusqlite::Result<Self> {
        let disk = Connection::open(file)?;
        disk.pragma_update(None, "journal_mode", "WAL")?;
        disk.pragma_update(None, "synchronous", "FULL")?;
        disk.execute(TABLE, [])?;
        Ok(Self {
            inner: Mutex::new(ObjectStoreInner {
                version: 1,
                objects: BTreeMap::new(),
                changes: VecDeque::new(),
                disk,
            }),
            news: watch::Sender::new(1),
            random: SystemRandom::new(),
        })
    }

    /// Notifies of every change; the value is the version.
    #[must_use]
    pub fn news(&self) -> watch::Receiver<u64> {
        self.news.subscribe()
    }

    /// An object as an earlier run left it, whether or not it is applied in this one.
    pub fn kept(&self, key: &ObjectKey) -> Result<Option<Value>, ObjectStoreError> {
        let text: Option<String> = self
            .lock()
            .disk
            .query_row(
                "SELECT json FROM objects WHERE resource = ?1 AND namespace = ?2 AND name = ?3",
                params![key.resource, key.namespace, key.name],
                |row| row.get(0),
            )
            .optional()?;
        Ok(text.and_then(|text| serde_json::from_str(&text).ok()))
    }

    /// Applies an object as a user does: status, uid and age of an earlier run stay, and a changed spec increments the
    /// generation.
    pub fn apply(&self, key: ObjectKey, mut object: Value) -> Result<Value, ObjectStoreError> {
        let before = if key.is_kept() { self.kept(&key)? } else { None };
        self.fill_metadata(&key, &mut object)?;
        if let Some(before) = before {
            for field in ["uid", "creationTimestamp", "generation"] {
                object["metadata"][field] = before["metadata"][field].clone();
            }
            if object.get("spec") != before.get("spec") {
                bump_generation(&mut object);
            }
            if let Some(status) = before.get("status") {
                object["status"] = status.clone();
            }
        }
        self.store_object(&mut self.lock(), key, object)
    }

    #[must_use]
    pub fn get(&self, key: &ObjectKey) -> Option<Value> {
        self.lock().objects.get(key).cloned()
    }

    /// All objects of a kind in one namespace, or in all if it is empty, and the version of the list.
    #[must_use]
    pub fn list(&self, resource: &str, namespace: &str) -> (u64, Vec<(ObjectKey, Value)>) {
        let inner = self.lock();
        let all = inner.objects.iter();
        let found =
            all.filter(|(key, _)| key.resource == resource && (namespace.is_empty() || key.namespace == namespace));
        (
            inner.version,
            found.map(|(key, object)| (key.clone(), object.clone())).collect(),
        )
    }

    /// Changes of a kind after a version, and the version that they lead to; `None`: they are no longer in the history.
    #[must_use]
    pub fn changes(&self, resource: &str, after: u64) -> Option<(u64, Vec<ObjectChange>)> {
        let inner = self.lock();
        let oldest = inner.changes.front().map_or(inner.version + 1, |change| change.version);
        if after + 1 < oldest && after < inner.version {
            return None;
        }
        let new = inner.changes.iter().filter(|change| change.version > after);
        let of_kind = new.filter(|change| change.key.resource == resource);
        Some((inner.version, of_kind.cloned().collect()))
    }

    pub fn create(&self, key: ObjectKey, mut object: Value) -> Result<Value, ObjectStoreError> {
        if !object.is_object() {
            return Err(ObjectStoreError::Invalid("the body is not an object".into()));
        }
        self.fill_metadata(&key, &mut object)?;
        let mut inner = self.lock();
        if inner.objects.contains_key(&key) {
            return Err(ObjectStoreError::AlreadyExists(key.name));
        }
        self.store_object(&mut inner, key, object)
    }

    /// Replaces an object at the version that the new one names.
    pub fn replace(&self, key: &ObjectKey, mut object: Value) -> Result<Value, ObjectStoreError> {
        let mut inner = self.lock();
        let old = inner.objects.get(key).ok_or_else(|| not_found(key))?;
        let (had, has) = (&old["metadata"], &object["metadata"]);
        if has["resourceVersion"] != had["resourceVersion"] {
            return Err(ObjectStoreError::Conflict(format!("{} has been modified", key.name)));
        }
        for field in ["uid", "creationTimestamp", "generation"] {
            object["metadata"][field] = had[field].clone();
        }
        self.store_object(&mut inner, key.clone(), object)
    }

    /// Patches an object, or only its status.
    pub fn patch(&self, key: &ObjectKey, status: bool, patch: &ObjectPatch) -> Result<Value, ObjectStoreError> {
        let mut inner = self.lock();
        let old = inner.objects.get(key).ok_or_else(|| not_found(key))?.clone();
        let mut new = old.clone();
        patch::change(&mut new, patch).map_err(ObjectStoreError::Invalid)?;
        let other = if status { "spec" } else { "status" };
        match old.get(other) {
            Some(part) => new[other] = part.clone(),
            None => drop(new.as_object_mut().map(|fields| fields.remove(other))),
        }
        if status {
            new["metadata"] = old["metadata"].clone();
        }
        if new == old {
            return Ok(old);
        }
        if new.get("spec") != old.get("spec") {
            bump_generation(&mut new);
        }
        self.store_object(&mut inner, key.clone(), new)
    }

    /// Marks a pod as terminating; the runner of pods removes it. Any other object is removed. `uid`: only if it
    /// matches.
    pub fn delete(&self, key: &ObjectKey, uid: Option<&str>, at_once: bool) -> Result<Value, ObjectStoreError> {
        let mut inner = self.lock();
        let mut object = inner.objects.get(key).ok_or_else(|| not_found(key))?.clone();
        if uid.is_some_and(|uid| object["metadata"]["uid"] != uid) {
            return Err(ObjectStoreError::Conflict(
                "the uid in the precondition does not match".into(),
            ));
        }
        if key.resource == PODS && !at_once {
            if !object["metadata"]["deletionTimestamp"].is_null() {
                return Ok(object);
            }
            object["metadata"]["deletionTimestamp"] = json!(second(Timestamp::now()));
            return self.store_object(&mut inner, key.clone(), object);
        }
        inner.objects.remove(key);
        self.record_change(&mut inner, key.clone(), ChangeKind::Deleted, object.clone());
        Ok(object)
    }

    /// Sets the fields that an API server adds to a new object.
    fn fill_metadata(&self, key: &ObjectKey, object: &mut Value) -> Result<(), ObjectStoreError> {
        let uid = self.uid()?;
        let meta = &mut object["metadata"];
        if !key.namespace.is_empty() {
            meta["namespace"] = json!(key.namespace);
        }
        meta["name"] = json!(key.name);
        meta["uid"] = json!(uid);
        meta["creationTimestamp"] = json!(second(Timestamp::now()));
        meta["generation"] = json!(1);
        Ok(())
    }

    /// A random UUID (version 4).
    fn uid(&self) -> Result<String, ObjectStoreError> {
        let mut bytes = [0_u8; 16];
        self.random.fill(&mut bytes).map_err(|_| ObjectStoreError::Random)?;
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        Ok(bytes.iter().enumerate().fold(String::new(), |mut text, (at, byte)| {
            let dash = if [4, 6, 8, 10].contains(&at) { "-" } else { "" };
            let _ = write!(text, "{dash}{byte:02x}");
            text
        }))
    }

    fn store_object(
        &self,
        inner: &mut ObjectStoreInner,
        key: ObjectKey,
        mut object: Value,
    ) -> Result<Value, ObjectStoreError> {
        object["metadata"]["resourceVersion"] = json!((inner.version + 1).to_string());
        if key.is_kept() {
            inner.disk.execute(
                "INSERT OR REPLACE INTO objects (resource, namespace, name, json) VALUES (?1, ?2, ?3, ?4)",
                params![key.resource, key.namespace, key.name, object.to_string()],
            )?;
        }
        let before = inner.objects.insert(key.clone(), object.clone());
        let kind = before.map_or(ChangeKind::Added, |_| ChangeKind::Modified);
        self.record_change(inner, key, kind, object.clone());
        Ok(object)
    }

    fn record_change(&self, inner: &mut ObjectStoreInner, key: ObjectKey, kind: ChangeKind, object: Value) {
        inner.version += 1;
        if inner.changes.len() >= HISTORY {
            inner.changes.pop_front();
        }
        inner.changes.push_back(ObjectChange {
            version: inner.version,
            key,
            kind,
            object,
        });
        self.news.send_replace(inner.version);
    }

    fn lock(&self) -> MutexGuard<'_, ObjectStoreInner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn not_found(key: &ObjectKey) -> ObjectStoreError {
    ObjectStoreError::NotFound(key.name.clone())
}

fn bump_generation(object: &mut Value) {
    let generation = object["metadata"]["generation"].as_i64().unwrap_or(0);
    object["metadata"]["generation"] = json!(generation + 1);
}

/// A time as Kubernetes writes it: in whole seconds.
#[must_use]
pub fn second(moment: Timestamp) -> String {
    moment.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(directory: &Path) -> ObjectStore {
        ObjectStore::open(&directory.join("objects.sqlite")).unwrap()
    }

    fn agent() -> ObjectKey {
        ObjectKey::new(AGENTS, "default", "a")
    }

    #[test]
    fn an_agent_keeps_uid_and_status_over_a_restart_and_another_spec_is_a_new_generation() {
        let directory = tempfile::tempdir().unwrap();
        let first = store(directory.path());
        let made = first.apply(agent(), json!({"spec": {"x": 1}})).unwrap();
        let status = ObjectPatch::Merge(json!({"status": {"y": 2}}));
        first.patch(&agent(), true, &status).unwrap();
        drop(first);

        let second = store(directory.path());
        assert!(
            second.get(&agent()).is_none(),
            "an Agent that is not applied does not exist"
        );
        let same = second.apply(agent(), json!({"spec": {"x": 1}})).unwrap();
        assert_eq!(same["metadata"]["uid"], made["metadata"]["uid"]);
        assert_eq!(
            (&same["metadata"]["generation"], &same["status"]["y"]),
            (&json!(1), &json!(2))
        );
        let other = second.apply(agent(), json!({"spec": {"x": 3}})).unwrap();
        assert_eq!(other["metadata"]["generation"], 2);
    }

    #[test]
    fn a_status_patch_changes_neither_spec_nor_metadata_and_any_other_no_status() {
        let directory = tempfile::tempdir().unwrap();
        let store = store(directory.path());
        store.apply(agent(), json!({"spec": {"x": 1}})).unwrap();
        let everything = ObjectPatch::Merge(json!({"spec": {"x": 9}, "status": {"y": 9}, "metadata": {"name": "z"}}));
        let patched = store.patch(&agent(), true, &everything).unwrap();
        assert_eq!(
            (&patched["spec"]["x"], &patched["metadata"]["name"]),
            (&json!(1), &json!("a"))
        );
        let patched = store
            .patch(&agent(), false, &ObjectPatch::Merge(json!({"status": {"y": 1}})))
            .unwrap();
        assert_eq!(patched["status"]["y"], 9);
    }

    #[test]
    fn a_watch_sees_each_change_of_its_kind_once_and_one_that_is_too_slow_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let store = store(directory.path());
        let map = |name: &str| ObjectKey::new(CONFIG_MAPS, "default", name);
        let (version, _) = store.list(CONFIG_MAPS, "");
        store.create(map("a"), json!({})).unwrap();
        store
            .create(ObjectKey::new(SECRETS, "default", "s"), json!({}))
            .unwrap();
        store.delete(&map("a"), None, false).unwrap();
        let (reached, changes) = store.changes(CONFIG_MAPS, version).unwrap();
        let kinds: Vec<_> = changes.iter().map(|change| change.kind).collect();
        assert_eq!(kinds, [ChangeKind::Added, ChangeKind::Deleted]);
        assert!(store.changes(CONFIG_MAPS, reached).unwrap().1.is_empty());

        for count in 0..HISTORY - 3 {
            store.create(map(&count.to_string()), json!({})).unwrap();
        }
        assert!(store.changes(CONFIG_MAPS, version).is_some());
        store.create(map("one-more"), json!({})).unwrap();
        assert!(store.changes(CONFIG_MAPS, version).is_none());
        assert!(store.changes(CONFIG_MAPS, reached).is_some());
    }

    #[test]
    fn a_pod_is_marked_first_and_removed_by_whoever_runs_it() {
        let directory = tempfile::tempdir().unwrap();
        let store = store(directory.path());
        let pod = ObjectKey::new(PODS, "default", "a");
        let made = store.create(pod.clone(), json!({})).unwrap();
        assert!(matches!(
            store.delete(&pod, Some("another"), false),
            Err(ObjectStoreError::Conflict(_))
        ));
        let uid = made["metadata"]["uid"].as_str().unwrap();
        let marked = store.delete(&pod, Some(uid), false).unwrap();
        assert!(marked["metadata"]["deletionTimestamp"].is_string());
        store.delete(&pod, Some(uid), true).unwrap();
        assert!(store.get(&pod).is_none());
    }

    #[test]
    fn of_two_that_replace_one_version_the_second_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let store = store(directory.path());
        let key = ObjectKey::new(SECRETS, "default", "s");
        let read = store.create(key.clone(), json!({"data": {}})).unwrap();
        store.replace(&key, read.clone()).unwrap();
        assert!(matches!(store.replace(&key, read), Err(ObjectStoreError::Conflict(_))));
    }
}
