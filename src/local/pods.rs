//! Runs pods like a kubelet, with tasks of this process in place of containers.
//!
//! Starts the roles of each pod in the store (gateway and worker, or sensor), restarts a role that exits, and stops
//! them in the order of a real pod: the worker first. Decides nothing about pods; the controller does.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use super::page::add_journal;
use super::pod_tokens::PodTokens;
use super::roles::{self, AgentRoles, PodRoles, WebhookAddresses};
use super::volumes::{PodVolumes, VolumeDirectories, VolumeError, make_directory};
use crate::api::NamespacedName;
use crate::api_server::object_key::PODS;
use crate::api_server::{ApiError, ObjectKey, ObjectPatch, ObjectStore, PatchRequest, PatchScope};
use crate::link::server::PodIdentity;
use crate::page::recent::RecentEvents;
use crate::support::clock::rfc3339_seconds;
use crate::support::random::random_hex;
use crate::telemetry::log_export::ProcessLog;
use crate::worker::startup;
use crate::{gateway, sensor_pod};

/// Seconds for which a call in flight may continue once a pod terminates.
pub const DRAIN: Duration = Duration::from_secs(5);
/// The first and the longest delay before a role that exited is restarted.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));
/// The node of all pods.
const NODE: &str = "local";

/// What is needed to run pods.
pub struct PodRunner {
    /// The objects.
    pub store: Arc<ObjectStore>,
    /// The holders of tokens.
    pub tokens: Arc<PodTokens>,
    /// Private directory of this process, with a short name: it contains sockets.
    pub private: PathBuf,
    /// Directory of the volume claims.
    pub claims: PathBuf,
    /// Where webhooks listen.
    pub webhooks: WebhookAddresses,
    /// The workspace of every pod that has one; `None`: the directory of its claim.
    pub workspace: Option<PathBuf>,
    /// Where the page reads what loops did last; absent without a page.
    pub recent: Option<Arc<RecentEvents>>,
}

/// Why a pod cannot start.
#[derive(thiserror::Error, Debug)]
pub(super) enum PodError {
    #[error(transparent)]
    Volume(#[from] VolumeError),
    #[error("cannot read the pod: {0}")]
    Unreadable(String),
    #[error("cannot get random numbers from the system")]
    Random,
}

impl PodRunner {
    /// Runs pods until `stop`, and then until the last one has ended.
    pub async fn run(self, stop: CancellationToken) {
        let mut news = self.store.news();
        let mut running: BTreeMap<String, CancellationToken> = BTreeMap::new();
        let mut tasks = JoinSet::new();
        let mut started = 0;
        loop {
            news.mark_unchanged();
            let (_, pods) = self.store.list(PODS, "");
            for (key, object) in &pods {
                let uid = object["metadata"]["uid"].as_str().unwrap_or_default();
                let ending = !object["metadata"]["deletionTimestamp"].is_null();
                match running.get(uid) {
                    Some(terminate) if ending => terminate.cancel(),
                    Some(_) => {}
                    None if ending => self.remove(key, uid),
                    None if stop.is_cancelled() => {}
                    // It may have been removed in the meantime.
                    None if self.bind(key, uid).is_err() => {}
                    None => {
                        started += 1;
                        let terminate = stop.child_token();
                        tasks.spawn(self.start(key.clone(), object.clone(), started, terminate.clone()));
                        running.insert(uid.into(), terminate);
                    }
                }
            }
            for (uid, terminate) in &running {
                if !pods.iter().any(|(_, object)| object["metadata"]["uid"] == uid.as_str()) {
                    terminate.cancel();
                }
            }
            if stop.is_cancelled() && tasks.is_empty() {
                return;
            }
            tokio::select! {
                Ok(()) = news.changed() => {}
                Some(ended) = tasks.join_next() => if let Ok((key, uid)) = ended {
                    running.remove(&uid);
                    self.tokens.remove(&uid);
                    // At the end of the run no other pod replaces it.
                    if !stop.is_cancelled() {
                        self.remove(&key, &uid);
                    }
                },
                () = stop.cancelled(), if !stop.is_cancelled() => {}
            }
        }
    }

    /// The pod has ended. It is removed even if its controller has not deleted it: another one replaces it.
    fn remove(&self, key: &ObjectKey, uid: &str) {
        let _ = self.store.delete(key, Some(uid), Some(0));
    }

    /// Assigns a pod to the node, before anything of it starts: from now on its deletion waits for its end.
    fn bind(&self, key: &ObjectKey, uid: &str) -> Result<(), ApiError> {
        let node = json!({ "metadata": { "uid": uid }, "spec": { "nodeName": NODE } });
        patch(&self.store, key, PatchScope::Object, node)
    }

    fn start(
        &self,
        key: ObjectKey,
        object: Value,
        number: u32,
        terminate: CancellationToken,
    ) -> impl Future<Output = (ObjectKey, String)> + Send + use<> {
        let uid = object["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
        let directory = self.private.join(number.to_string());
        let roles = self.prepare(object, &uid, &directory);
        let listens = matches!(roles, Ok(PodRoles::Sensor(_)));
        if let (Some(recent), Ok(PodRoles::Agent(roles))) = (&self.recent, &roles) {
            // Before the worker opens the journal and locks it against other readers.
            let agent = NamespacedName::new(&key.namespace, &key.name);
            add_journal(recent, &agent, &roles.worker.journal_dir);
        }
        let status = PodStatusWriter {
            store: self.store.clone(),
            key: key.clone(),
            containers: if listens { &["sensor"] } else { &["gateway", "worker"] },
        };
        let span = if listens {
            tracing::info_span!("sensor", namespace = key.namespace, pod = key.name)
        } else {
            tracing::info_span!("loop", namespace = key.namespace, agent = key.name)
        };
        let life = async move {
            match roles {
                Ok(PodRoles::Agent(roles)) => Box::pin(live(*roles, &status, &terminate)).await,
                Ok(PodRoles::Sensor(options)) => listen(*options, &status, &terminate).await,
                Err(error) => {
                    tracing::error!(%error, "failed to start a pod");
                    status.failed(&error.to_string());
                    terminate.cancelled().await;
                }
            }
            let _ = std::fs::remove_dir_all(&directory);
            (key, uid)
        };
        life.instrument(span)
    }

    fn prepare(&self, object: Value, uid: &str, directory: &PathBuf) -> Result<PodRoles, PodError> {
        let pod: Pod = serde_json::from_value(object).map_err(|error| PodError::Unreadable(error.to_string()))?;
        let identity = PodIdentity {
            namespace: pod.metadata.namespace.clone().unwrap_or_default(),
            name: pod.metadata.name.clone().unwrap_or_default(),
            uid: uid.into(),
            kind: roles::kind(&pod),
        };
        let token = self.tokens.issue(&random()?, identity);
        make_directory(directory)?;
        let directories = VolumeDirectories {
            pod: directory,
            claims: &self.claims,
            workspace: self.workspace.as_deref(),
            token: &token,
        };
        let volumes = PodVolumes::make(&self.store, &pod, &directories)?;
        roles::roles(&pod, uid, &volumes, &self.webhooks)
    }
}

/// 64 random hexadecimal digits.
pub(super) fn random() -> Result<String, PodError> {
    random_hex::<32>().ok_or(PodError::Random)
}

/// Runs both roles until `terminate`: then the worker drains, and the gateway stops after it.
async fn live(roles: AgentRoles, status: &PodStatusWriter, terminate: &CancellationToken) {
    let gateway_end = CancellationToken::new();
    let AgentRoles { gateway, worker } = roles;
    let mut tasks = JoinSet::new();
    let end = gateway_end.clone();
    let gateway = keep_up("gateway", status.clone(), gateway_end.clone(), move || {
        let (options, end) = (gateway.clone(), end.clone());
        async move {
            Box::pin(gateway::run(options, end.cancelled_owned()))
                .await
                .map_err(|error| error.to_string())
        }
    });
    tasks.spawn(gateway.in_current_span());
    let end = terminate.clone();
    let worker = keep_up("worker", status.clone(), terminate.clone(), move || {
        let (options, end) = (worker.clone(), end.clone());
        let options = startup::WorkerOptions {
            config: options.config,
            pod_uid: options.pod_uid,
            socket: options.socket,
            journal_dir: options.journal_dir,
            instructions_file: options.instructions_file,
            skills_dir: options.skills_dir,
            workspace_dir: options.workspace_dir,
            drain: DRAIN,
            log: ProcessLog::default(),
        };
        async move { startup::run(options, end).await.map_err(|error| error.to_string()) }
    });
    status.runs(0);
    worker.await;
    gateway_end.cancel();
    while tasks.join_next().await.is_some() {}
}

/// Runs the one role of a Sensor's pod until `terminate`.
async fn listen(options: sensor_pod::SensorPodOptions, status: &PodStatusWriter, terminate: &CancellationToken) {
    let end = terminate.clone();
    let role = keep_up("sensor", status.clone(), terminate.clone(), move || {
        let (options, end) = (options.clone(), end.clone());
        async move {
            Box::pin(sensor_pod::run(options, end.cancelled_owned()))
                .await
                .map_err(|error| error.to_string())
        }
    });
    status.runs(0);
    role.await;
}

/// Runs a role and restarts it until it is cancelled.
async fn keep_up<F>(role: &'static str, status: PodStatusWriter, end: CancellationToken, mut run: impl FnMut() -> F)
where
    F: Future<Output = Result<(), String>> + Send + 'static,
{
    let mut pause = PAUSE.0;
    let mut restarts = 0;
    loop {
        let started = Instant::now();
        // Its own task: a panic ends the role and not the pod.
        let ended = tokio::spawn(run().in_current_span()).await;
        if end.is_cancelled() {
            return;
        }
        match ended {
            Ok(Ok(())) => tracing::info!(role, "ended; restarting"),
            Ok(Err(error)) => tracing::error!(role, error, "failed; restarting"),
            Err(_) => tracing::error!(role, "panicked; restarting"),
        }
        if started.elapsed() > PAUSE.1 {
            pause = PAUSE.0;
        }
        if end.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
            return;
        }
        pause = (pause * 2).min(PAUSE.1);
        restarts += 1;
        status.runs(restarts);
    }
}

#[derive(Clone)]
struct PodStatusWriter {
    store: Arc<ObjectStore>,
    key: ObjectKey,
    containers: &'static [&'static str],
}

impl PodStatusWriter {
    fn runs(&self, restarts: u32) {
        let now = rfc3339_seconds(Timestamp::now());
        let container = |name: &&str| {
            json!({
                "name": name, "image": "agentloop", "imageID": "", "ready": true, "restartCount": restarts,
                "state": { "running": { "startedAt": now } },
            })
        };
        // The last one is the main container; the others start before it.
        let (main, first) = self
            .containers
            .split_last()
            .map_or((None, &[][..]), |(last, first)| (Some(last), first));
        let first: Vec<Value> = first.iter().map(container).collect();
        let main: Vec<Value> = main.into_iter().map(container).collect();
        self.put(&json!({ "status": {
            "phase": "Running", "startTime": now,
            "conditions": [{ "type": "Ready", "status": "True" }],
            "initContainerStatuses": first, "containerStatuses": main,
        } }));
    }

    fn failed(&self, message: &str) {
        self.put(&json!({ "status": { "phase": "Failed", "reason": "CannotStart", "message": message } }));
    }

    fn put(&self, status: &Value) {
        // A pod that was removed in the meantime needs no status.
        let _ = patch(&self.store, &self.key, PatchScope::Status, status.clone());
    }
}

fn patch(store: &ObjectStore, key: &ObjectKey, scope: PatchScope, patch: Value) -> Result<(), ApiError> {
    let patch = &ObjectPatch::Merge(patch);
    let manager = "kubelet";
    store.patch(key, &PatchRequest { scope, patch, manager }).map(drop)
}
