//! The objects of a server: versions, generations, uids, deletion, and the history that watches read.
//!
//! All kinds are stored alike, except that a pod on a node ends in two steps. Nothing is validated here, and no
//! permissions are checked. Knows neither HTTP nor the meaning of the objects.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use jiff::{SignedDuration, Timestamp};
use ring::rand::{SecureRandom, SystemRandom};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::error::ApiError;
use super::kept_objects::KeptObjects;
use super::managed_fields;
use super::object_key::{ObjectKey, PODS};
use super::patch::{self, ObjectPatch};
use agentloop_support::clock::rfc3339_seconds;

/// Changes that watches can still read; a slower watch lists again.
const HISTORY: usize = 4096;
/// Seconds that a pod gets to end when neither its spec nor the request says more.
const GRACE_SECONDS: i64 = 30;
/// Metadata that only the server sets.
const OF_SERVER: [&str; 8] = [
    "namespace",
    "name",
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "generation",
    "resourceVersion",
    "managedFields",
];

/// The time for timestamps.
pub type ServerClock = Arc<dyn Fn() -> Timestamp + Send + Sync>;

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

/// What of an object a patch changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PatchScope {
    /// Everything but the status.
    Object,
    /// The status only.
    Status,
    /// Both at once, as no request can: for what runs the pods, and for tests.
    Whole,
}

/// A patch and its sender.
#[derive(Clone, Copy, Debug)]
pub struct PatchRequest<'a> {
    pub scope: PatchScope,
    pub patch: &'a ObjectPatch,
    /// The sender, for `managedFields`.
    pub manager: &'a str,
}

/// Where uids come from.
enum UidSource {
    Random(SystemRandom),
    /// Numbered, so that a test repeats exactly.
    Versions,
}

struct ObjectStoreInner {
    version: u64,
    objects: BTreeMap<ObjectKey, Value>,
    changes: VecDeque<ObjectChange>,
    /// Kinds whose changes up to a version are no longer available.
    forgotten: BTreeMap<String, u64>,
    kept: Option<KeptObjects>,
}

pub struct ObjectStore {
    inner: Mutex<ObjectStoreInner>,
    news: watch::Sender<u64>,
    clock: ServerClock,
    uids: UidSource,
}

impl ObjectStore {
    /// Opens the file of the persisted objects; none of them exists before it is added again.
    pub fn open(file: &Path) -> rusqlite::Result<Self> {
        let kept = KeptObjects::open(file)?;
        let uids = UidSource::Random(SystemRandom::new());
        Ok(Self::with(Some(kept), Arc::new(Timestamp::now), uids))
    }

    /// A store without a file. With the same clock and requests, its objects are the same.
    #[must_use]
    pub fn in_memory(clock: ServerClock) -> Self {
        Self::with(None, clock, UidSource::Versions)
    }

    fn with(kept: Option<KeptObjects>, clock: ServerClock, uids: UidSource) -> Self {
        Self {
            inner: Mutex::new(ObjectStoreInner {
                version: 1,
                objects: BTreeMap::new(),
                changes: VecDeque::new(),
                forgotten: BTreeMap::new(),
                kept,
            }),
            news: watch::Sender::new(1),
            clock,
            uids,
        }
    }

    /// Notifies of every change; the value is the version.
    #[must_use]
    pub fn news(&self) -> watch::Receiver<u64> {
        self.news.subscribe()
    }

    /// An object as an earlier run left it, whether or not it is added in this one.
    pub fn kept(&self, key: &ObjectKey) -> Result<Option<Value>, ApiError> {
        let inner = self.lock();
        let read = inner.kept.as_ref().map(|kept| kept.read(key));
        Ok(read.transpose()?.flatten())
    }

    /// Adds an object of a user: status, uid and age of an earlier run stay, and a changed spec increments the
    /// generation.
    pub fn add(&self, key: ObjectKey, mut object: Value) -> Result<Value, ApiError> {
        check_shape(&object)?;
        let before = self.kept(&key)?;
        let mut inner = self.lock();
        self.fill_metadata(&inner, &key, &mut object)?;
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
        self.store_object(&mut inner, key, object)
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
        let forgotten = inner.forgotten.get(resource).is_some_and(|version| after < *version);
        if forgotten || after + 1 < oldest && after < inner.version {
            return None;
        }
        let new = inner.changes.iter().filter(|change| change.version > after);
        let of_kind = new.filter(|change| change.key.resource == resource);
        Some((inner.version, of_kind.cloned().collect()))
    }

    /// Drops the history of a kind, as a compaction does. For tests of clients.
    pub fn forget_changes(&self, resource: &str) {
        let mut inner = self.lock();
        let version = inner.version;
        inner.forgotten.insert(resource.into(), version);
    }

    /// Creates an object. One whose owners do not exist is deleted again, as a garbage collector does.
    pub fn create(&self, key: ObjectKey, mut object: Value) -> Result<Value, ApiError> {
        check_shape(&object)?;
        let mut inner = self.lock();
        if inner.objects.contains_key(&key) {
            return Err(ApiError::AlreadyExists(key.name));
        }
        self.fill_metadata(&inner, &key, &mut object)?;
        let stored = self.store_object(&mut inner, key.clone(), object)?;
        let owners = owners(&stored);
        let exists = |uid: &&str| inner.objects.values().any(|object| object["metadata"]["uid"] == *uid);
        if !owners.is_empty() && !owners.iter().any(exists) {
            self.remove(&mut inner, &key, None)?;
        }
        Ok(stored)
    }

    /// Replaces an object at the version that the new one names.
    pub fn replace(&self, key: &ObjectKey, mut object: Value) -> Result<Value, ApiError> {
        check_shape(&object)?;
        let mut inner = self.lock();
        let old = inner.objects.get(key).ok_or_else(|| not_found(key))?.clone();
        if object["metadata"]["resourceVersion"] != old["metadata"]["resourceVersion"] {
            return Err(modified(key));
        }
        keep_metadata(&old, &mut object);
        self.store_change(&mut inner, key, &old, object)
    }

    pub fn patch(&self, key: &ObjectKey, request: &PatchRequest<'_>) -> Result<Value, ApiError> {
        self.patch_with(key, request, &|_| {})
    }

    /// Patches an object, or creates the one that is applied; `mutate` changes it before it is stored.
    pub fn patch_with(
        &self,
        key: &ObjectKey,
        request: &PatchRequest<'_>,
        mutate: &dyn Fn(&mut Value),
    ) -> Result<Value, ApiError> {
        let mut inner = self.lock();
        let applied = match request.patch {
            ObjectPatch::Apply(applied) => Some(applied),
            ObjectPatch::Merge(_) | ObjectPatch::Json(_) => None,
        };
        let old = match inner.objects.get(key) {
            Some(old) => old.clone(),
            None if applied.is_some() && request.scope != PatchScope::Status => Value::Null,
            None => return Err(not_found(key)),
        };
        let mut new = if old.is_null() { json!({}) } else { old.clone() };
        patch::change(&mut new, request.patch).map_err(ApiError::Invalid)?;
        check_shape(&new)?;
        check_preconditions(key, &old, &new)?;
        match request.scope {
            PatchScope::Object => set_or_remove(&mut new, "status", old.get("status")),
            PatchScope::Status => {
                let status = new.get("status").cloned();
                new.clone_from(&old);
                set_or_remove(&mut new, "status", status.as_ref());
            }
            PatchScope::Whole => {}
        }
        if old.is_null() {
            self.fill_metadata(&inner, key, &mut new)?;
        } else {
            keep_metadata(&old, &mut new);
        }
        mutate(&mut new);
        if request.scope != PatchScope::Status && (applied.is_some() || !old["metadata"]["managedFields"].is_null()) {
            managed_fields::record(&old, &mut new, request.manager, applied, (self.clock)());
        }
        if old.is_null() {
            return self.store_object(&mut inner, key.clone(), new);
        }
        self.store_change(&mut inner, key, &old, new)
    }

    /// Deletes an object, and what it owns. A pod on a node is marked as terminating; what runs it removes it, with
    /// a
    /// `grace` of 0 seconds. `uid`: only if it matches.
    pub fn delete(&self, key: &ObjectKey, uid: Option<&str>, grace: Option<i64>) -> Result<Value, ApiError> {
        let mut inner = self.lock();
        let object = inner.objects.get(key).ok_or_else(|| not_found(key))?;
        if uid.is_some_and(|uid| object["metadata"]["uid"] != uid) {
            let message = "the uid in the precondition does not match";
            return Err(ApiError::Conflict(message.into()));
        }
        self.remove(&mut inner, key, grace)
    }

    fn remove(&self, inner: &mut ObjectStoreInner, key: &ObjectKey, grace: Option<i64>) -> Result<Value, ApiError> {
        let mut object = inner.objects.get(key).ok_or_else(|| not_found(key))?.clone();
        if key.resource == PODS && grace != Some(0) && runs(&object) {
            if !object["metadata"]["deletionTimestamp"].is_null() {
                return Ok(object);
            }
            let own = object["spec"]["terminationGracePeriodSeconds"].as_i64();
            let seconds = grace.or(own).unwrap_or(GRACE_SECONDS);
            let gone_by = (self.clock)().saturating_add(SignedDuration::from_secs(seconds));
            object["metadata"]["deletionTimestamp"] = json!(rfc3339_seconds(gone_by.unwrap_or(Timestamp::MAX)));
            return self.store_object(inner, key.clone(), object);
        }
        inner.objects.remove(key);
        object["metadata"]["resourceVersion"] = json!((inner.version + 1).to_string());
        self.record_change(inner, key.clone(), ChangeKind::Deleted, object.clone());
        let uid = object["metadata"]["uid"].as_str().unwrap_or_default();
        let owned = inner.objects.iter().filter(|(_, other)| owners(other).contains(&uid));
        let owned: Vec<ObjectKey> = owned.map(|(key, _)| key.clone()).collect();
        for key in owned {
            // An earlier one may have owned it too.
            if inner.objects.contains_key(&key) {
                self.remove(inner, &key, None)?;
            }
        }
        Ok(object)
    }

    /// Sets the fields that an API server adds to a new object.
    fn fill_metadata(&self, inner: &ObjectStoreInner, key: &ObjectKey, object: &mut Value) -> Result<(), ApiError> {
        let uid = match &self.uids {
            UidSource::Random(random) => random_uid(random)?,
            UidSource::Versions => format!("uid-{}", inner.version + 1),
        };
        let meta = &mut object["metadata"];
        if !key.namespace.is_empty() {
            meta["namespace"] = json!(key.namespace);
        }
        meta["name"] = json!(key.name);
        meta["uid"] = json!(uid);
        meta["creationTimestamp"] = json!(rfc3339_seconds((self.clock)()));
        meta["generation"] = json!(1);
        Ok(())
    }

    /// Stores another state of an object, if it differs.
    fn store_change(
        &self,
        inner: &mut ObjectStoreInner,
        key: &ObjectKey,
        old: &Value,
        mut new: Value,
    ) -> Result<Value, ApiError> {
        if new == *old {
            return Ok(new);
        }
        if new.get("spec") != old.get("spec") {
            bump_generation(&mut new);
        }
        self.store_object(inner, key.clone(), new)
    }

    fn store_object(&self, inner: &mut ObjectStoreInner, key: ObjectKey, mut object: Value) -> Result<Value, ApiError> {
        object["metadata"]["resourceVersion"] = json!((inner.version + 1).to_string());
        if let Some(kept) = &inner.kept {
            kept.write(&key, &object)?;
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

/// A random UUID (version 4).
fn random_uid(random: &SystemRandom) -> Result<String, ApiError> {
    let mut bytes = [0_u8; 16];
    random.fill(&mut bytes).map_err(|_| ApiError::Random)?;
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    Ok(bytes.iter().enumerate().fold(String::new(), |mut text, (at, byte)| {
        let dash = if [4, 6, 8, 10].contains(&at) { "-" } else { "" };
        let _ = write!(text, "{dash}{byte:02x}");
        text
    }))
}

fn not_found(key: &ObjectKey) -> ApiError {
    ApiError::NotFound(key.name.clone())
}

fn modified(key: &ObjectKey) -> ApiError {
    ApiError::Conflict(format!("{} has been modified", key.name))
}

fn check_shape(object: &Value) -> Result<(), ApiError> {
    let meta = &object["metadata"];
    if object.is_object() && (meta.is_null() || meta.is_object()) {
        return Ok(());
    }
    Err(ApiError::Invalid("the body is not an object with metadata".into()))
}

/// A patch that names a version or a uid applies to that one only.
fn check_preconditions(key: &ObjectKey, old: &Value, new: &Value) -> Result<(), ApiError> {
    let names_other = |field: &str| {
        let named = new["metadata"].get(field);
        named.is_some_and(|named| *named != old["metadata"][field])
    };
    let other = ["resourceVersion", "uid"].into_iter().any(names_other);
    if other { Err(modified(key)) } else { Ok(()) }
}

/// Metadata that only the server sets stays.
fn keep_metadata(old: &Value, new: &mut Value) {
    for field in OF_SERVER {
        set_or_remove(&mut new["metadata"], field, old["metadata"].get(field));
    }
}

fn set_or_remove(object: &mut Value, field: &str, value: Option<&Value>) {
    match value {
        Some(value) => object[field] = value.clone(),
        None => drop(object.as_object_mut().map(|fields| fields.remove(field))),
    }
}

/// The uids of its owners.
fn owners(object: &Value) -> Vec<&str> {
    let owners = object["metadata"]["ownerReferences"].as_array();
    let uids = owners.into_iter().flatten().map(|owner| owner["uid"].as_str());
    uids.flatten().collect()
}

/// Whether a pod is on a node and has not ended: a kubelet has to end it first.
fn runs(pod: &Value) -> bool {
    let phase = pod["status"]["phase"].as_str().unwrap_or_default();
    pod["spec"]["nodeName"].is_string() && !["Failed", "Succeeded"].contains(&phase)
}

fn bump_generation(object: &mut Value) {
    let generation = object["metadata"]["generation"].as_i64().unwrap_or(0);
    object["metadata"]["generation"] = json!(generation + 1);
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;

    use super::super::object_key::{AGENTS, CONFIG_MAPS, SECRETS};
    use super::*;

    fn store(directory: &Path) -> ObjectStore {
        ObjectStore::open(&directory.join("objects.sqlite")).unwrap()
    }

    fn memory() -> ObjectStore {
        ObjectStore::in_memory(Arc::new(|| Timestamp::UNIX_EPOCH))
    }

    /// Merges a patch as a user, not as the controller.
    fn merged(store: &ObjectStore, key: &ObjectKey, scope: PatchScope, patch: Value) -> Result<Value, ApiError> {
        let (patch, manager) = (&ObjectPatch::Merge(patch), "user");
        store.patch(key, &PatchRequest { scope, patch, manager })
    }

    fn agent() -> ObjectKey {
        ObjectKey::new(AGENTS, "default", "a")
    }

    #[test]
    fn an_agent_keeps_uid_and_status_over_a_restart_and_another_spec_is_a_new_generation() {
        let directory = tempfile::tempdir().unwrap();
        let first = store(directory.path());
        let made = first.add(agent(), json!({"spec": {"x": 1}})).unwrap();
        merged(&first, &agent(), PatchScope::Status, json!({"status": {"y": 2}})).unwrap();
        drop(first);

        let second = store(directory.path());
        assert!(
            second.get(&agent()).is_none(),
            "an Agent that is not added does not exist"
        );
        let same = second.add(agent(), json!({"spec": {"x": 1}})).unwrap();
        assert_eq!(same["metadata"]["uid"], made["metadata"]["uid"]);
        assert_eq!(
            (&same["metadata"]["generation"], &same["status"]["y"]),
            (&json!(1), &json!(2))
        );
        let other = second.add(agent(), json!({"spec": {"x": 3}})).unwrap();
        assert_eq!(other["metadata"]["generation"], 2);
    }

    #[test]
    fn a_status_patch_changes_neither_spec_nor_metadata_and_any_other_no_status() {
        let store = memory();
        store.add(agent(), json!({"spec": {"x": 1}})).unwrap();
        let everything = json!({"spec": {"x": 9}, "status": {"y": 9}, "metadata": {"name": "z"}});
        let patched = merged(&store, &agent(), PatchScope::Status, everything).unwrap();
        assert_eq!(
            (&patched["spec"]["x"], &patched["metadata"]["name"]),
            (&json!(1), &json!("a"))
        );
        let patched = merged(&store, &agent(), PatchScope::Object, json!({"status": {"y": 1}})).unwrap();
        assert_eq!(patched["status"]["y"], 9);
        let patched = merged(
            &store,
            &agent(),
            PatchScope::Whole,
            json!({"spec": {"x": 2}, "status": {"y": 2}}),
        )
        .unwrap();
        assert_eq!((&patched["spec"]["x"], &patched["status"]["y"]), (&json!(2), &json!(2)));
    }

    #[test]
    fn a_patch_that_names_another_version_or_uid_is_refused_and_one_without_effect_is_not_a_change() {
        let store = memory();
        let added = store.add(agent(), json!({"spec": {"x": 1}})).unwrap();
        let version = &added["metadata"]["resourceVersion"];
        for scope in [PatchScope::Object, PatchScope::Status] {
            for other in [json!({"resourceVersion": "1"}), json!({"uid": "another"})] {
                let refused = merged(&store, &agent(), scope, json!({"metadata": other, "status": {}}));
                assert!(matches!(refused, Err(ApiError::Conflict(_))), "{scope:?}: {refused:?}");
            }
            let same = json!({"metadata": {"resourceVersion": version}, "spec": {"x": 1}});
            assert_eq!(merged(&store, &agent(), scope, same).unwrap(), added);
        }
    }

    #[test]
    fn an_apply_creates_the_object_and_records_the_manager_of_its_fields() {
        let store = memory();
        let applied = ObjectPatch::Apply(json!({"spec": {"x": 1}}));
        let request = PatchRequest {
            scope: PatchScope::Object,
            patch: &applied,
            manager: "controller",
        };
        let made = store.patch(&agent(), &request).unwrap();
        assert_eq!(
            (&made["metadata"]["name"], &made["metadata"]["generation"]),
            (&json!("a"), &json!(1))
        );
        let managers = |object: &Value| {
            let entries = object["metadata"]["managedFields"].as_array().unwrap().iter();
            entries
                .map(|entry| entry["manager"].as_str().unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(managers(&made), ["controller"]);
        assert_eq!(
            store.patch(&agent(), &request).unwrap(),
            made,
            "applied again, nothing changes"
        );
        let changed = merged(&store, &agent(), PatchScope::Object, json!({"spec": {"x": 2}})).unwrap();
        assert_eq!(managers(&changed), ["user"]);
    }

    #[test]
    fn owned_objects_are_deleted_with_their_owner_and_orphans_do_not_stay() {
        let store = memory();
        let agent_object = store.create(agent(), json!({})).unwrap();
        let with_owner = |uid: &Value| json!({"metadata": {"ownerReferences": [{"uid": uid}]}});
        let map = |name: &str| ObjectKey::new(CONFIG_MAPS, "default", name);
        store
            .create(map("owned"), with_owner(&agent_object["metadata"]["uid"]))
            .unwrap();
        store.create(map("free"), json!({})).unwrap();
        store.create(map("orphan"), with_owner(&json!("another"))).unwrap();
        let names = || {
            store
                .list(CONFIG_MAPS, "")
                .1
                .into_iter()
                .map(|(key, _)| key.name)
                .collect::<Vec<_>>()
        };
        assert_eq!(names(), ["free", "owned"]);
        store.delete(&agent(), None, None).unwrap();
        assert_eq!(names(), ["free"]);
    }

    #[test]
    fn a_body_without_the_shape_of_an_object_is_refused() {
        let store = memory();
        for body in [json!("text"), json!({"metadata": "text"})] {
            assert!(matches!(store.create(agent(), body), Err(ApiError::Invalid(_))));
        }
    }

    #[test]
    fn a_watch_returns_each_change_of_its_kind_once_and_a_slow_one_expires() {
        let store = memory();
        let map = |name: &str| ObjectKey::new(CONFIG_MAPS, "default", name);
        let (version, _) = store.list(CONFIG_MAPS, "");
        store.create(map("a"), json!({})).unwrap();
        store
            .create(ObjectKey::new(SECRETS, "default", "s"), json!({}))
            .unwrap();
        store.delete(&map("a"), None, None).unwrap();
        let (reached, changes) = store.changes(CONFIG_MAPS, version).unwrap();
        assert_eq!(changes[1].object["metadata"]["resourceVersion"], reached.to_string());
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
        store.forget_changes(CONFIG_MAPS);
        assert!(store.changes(CONFIG_MAPS, reached).is_none());
    }

    #[test]
    fn a_pod_on_a_node_is_marked_first_and_removed_by_its_kubelet() {
        let store = memory();
        let pod = ObjectKey::new(PODS, "default", "a");
        let made = store
            .create(pod.clone(), json!({"spec": {"nodeName": "node"}}))
            .unwrap();
        assert!(matches!(
            store.delete(&pod, Some("another"), None),
            Err(ApiError::Conflict(_))
        ));
        let uid = made["metadata"]["uid"].as_str();
        let marked = store.delete(&pod, uid, Some(5)).unwrap();
        assert_eq!(marked["metadata"]["deletionTimestamp"], "1970-01-01T00:00:05Z");
        assert_eq!(store.delete(&pod, uid, None).unwrap(), marked);
        store.delete(&pod, uid, Some(0)).unwrap();
        assert!(store.get(&pod).is_none());
    }

    #[test]
    fn a_pod_without_a_node_or_that_has_ended_is_removed_immediately() {
        let store = memory();
        let pod = ObjectKey::new(PODS, "default", "a");
        for object in [
            json!({}),
            json!({"spec": {"nodeName": "node"}, "status": {"phase": "Failed"}}),
        ] {
            store.create(pod.clone(), object).unwrap();
            store.delete(&pod, None, None).unwrap();
            assert!(store.get(&pod).is_none());
        }
    }

    #[test]
    fn the_second_replace_of_the_same_version_is_refused() {
        let store = memory();
        let key = ObjectKey::new(SECRETS, "default", "s");
        let read = store.create(key.clone(), json!({"data": {}})).unwrap();
        let mut next = read.clone();
        next["data"]["a"] = json!("b");
        store.replace(&key, next.clone()).unwrap();
        assert!(matches!(store.replace(&key, next), Err(ApiError::Conflict(_))));
    }
}
