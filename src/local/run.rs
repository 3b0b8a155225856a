//! One run from start to end: check, start, show, drain.

use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use k8s_openapi::api::core::v1::ResourceRequirements;
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use super::directories::{PrivateDirectory, StateDirectory};
use super::manifest::{self, CheckContext, ManifestError, SecretSource};
use super::output::RunOutput;
use super::page::Page;
use super::pod_tokens::PodTokens;
use super::pods::{self, PodRunner};
use super::roles::WebhookAddresses;
use super::sensor_rows;
use super::stateful_set;
use crate::api::{Agent, NamespacedName, Sensor, WORKSPACE_LABEL};
use crate::api_server::object_key::{AGENTS, BUDGETS, CLAIMS, PODS, SENSORS};
use crate::api_server::{ApiServer, ObjectKey, ObjectStore};
use crate::controller::agent::ReconcilerSettings;
use crate::controller::embedded::{self, EmbeddedOptions};
use crate::controller::pod_sessions::PodSessions;
use crate::controller::policy::PlatformPolicy;
use crate::controller::sensor::pod::SensorPodSettings;
use crate::link::messages::PodReport;
use crate::link::pod::AgentEgress;
use crate::page::agent_rows::{AgentRow, LoopActivity, StatusOrigin, row};
use crate::page::recent::RecentEvents;
use crate::page::sensor_rows::SensorRow;
use crate::page::view::{AgentView, BudgetRow, PageView};
use crate::telemetry::metrics::Metrics;

/// How often the rows are refreshed.
const LOOK: Duration = Duration::from_millis(250);
/// How long nothing may run before the run ends: a refusal may still clear when another loop releases a reserve.
const QUIET: Duration = Duration::from_secs(3);
/// The longest time from the request to stop until the end.
const LAST: Duration = Duration::from_secs(9);
/// The time of it that the controller gets.
const CONTROLLER_SHUTDOWN_TIMEOUT: Duration = Duration::from_millis(500);
/// Agents reconciled concurrently.
const WORKERS: u16 = 8;
/// Ranges that Sensors may reach here but not in a cluster: the author of the manifests is the user of this machine.
/// Link-local addresses stay closed: on cloud machines they serve credentials.
const OPEN: [&str; 7] = [
    "127.0.0.0/8",
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "100.64.0.0/10",
    "::1/128",
    "fc00::/7",
];
/// Namespace of the controller: AgentBudgets there may select other namespaces, as in a cluster.
const SYSTEM_NAMESPACE: &str = "agentloop-system";

pub struct RunOptions {
    pub files: Vec<PathBuf>,
    /// Keys of Secrets from the environment.
    pub secrets: Vec<SecretSource>,
    /// Directory of the state.
    pub state: PathBuf,
    /// The workspace of every Agent that has one; absent: the directory of its claim in the state.
    pub workspace: Option<PathBuf>,
    /// The duration of the run; absent: it ends when nothing runs.
    pub duration: Option<Duration>,
    /// Port of the first webhook; each further one uses the next.
    pub webhook_port: u16,
    /// Where the page listens; absent: there is none.
    pub page: Option<SocketAddr>,
    /// Prices and settings of the platform.
    pub policy: PlatformPolicy,
}

/// Why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::AsRefStr)]
pub enum RunEndCause {
    Interrupted,
    /// The duration is over.
    Duration,
    /// No loop does anything more without an input.
    NothingRuns,
}

impl RunEndCause {
    /// The cause as a sentence.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Interrupted => "Ended on request. The same command resumes the run.",
            Self::Duration => "Ended after --duration. The same command resumes the run.",
            Self::NothingRuns => "No loop is running any more.",
        }
    }
}

/// Why a run failed.
#[derive(thiserror::Error, Debug)]
pub enum RunError {
    /// Mistakes in the manifests: nothing was started.
    #[error(transparent)]
    Mistakes(#[from] ManifestError),
    /// Any other error.
    #[error("{0}")]
    Other(String),
}

fn failure(error: impl std::fmt::Display) -> RunError {
    RunError::Other(error.to_string())
}

/// A run whose manifests were checked.
pub struct LocalRun {
    store: Arc<ObjectStore>,
    agents: Vec<ObjectKey>,
    sensors: Vec<ObjectKey>,
    budgets: Vec<ObjectKey>,
    webhooks: WebhookAddresses,
    private: PrivateDirectory,
    state: StateDirectory,
    workspace: Option<PathBuf>,
    page: Option<Page>,
    settings: ReconcilerSettings,
    listener: std::net::TcpListener,
    duration: Option<Duration>,
}

/// A claim that an Agent names is a directory here, created when it is needed.
fn put_claim(store: &ObjectStore, agent: &ObjectKey, object: &serde_json::Value) -> Result<(), RunError> {
    if let Some(name) = object["spec"]["workspace"]["claimName"].as_str() {
        let (namespace, kind) = (&agent.namespace, "PersistentVolumeClaim");
        // Naming a claim on one's own machine permits its use.
        let metadata = json!({ "name": name, "namespace": namespace, "labels": { WORKSPACE_LABEL: "true" } });
        let claim = json!({ "apiVersion": "v1", "kind": kind, "metadata": metadata });
        store
            .add(ObjectKey::new(CLAIMS, namespace, name), claim)
            .map_err(failure)?;
    }
    Ok(())
}

/// Takes the address of the page.
fn bind_page(address: SocketAddr) -> Result<Page, RunError> {
    let token = pods::random().map_err(failure)?;
    Page::bind(address, token, TimeZone::system()).map_err(|error| {
        let mistake = format!(
            "--page: {address} cannot be used ({}); use another address",
            error.kind()
        );
        ManifestError(vec![mistake]).into()
    })
}

struct RunTasks {
    loops: Arc<PodSessions>,
    pods: JoinHandle<()>,
    controller: JoinHandle<Result<(), crate::controller::process::ControllerError>>,
    end_pods: CancellationToken,
    end_controller: CancellationToken,
}

impl LocalRun {
    /// Checks everything that can be checked before anything is started.
    pub fn prepare(options: RunOptions) -> Result<Self, RunError> {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).map_err(failure)?;
        listener.set_nonblocking(true).map_err(failure)?;
        let settings = ReconcilerSettings {
            image: "agentloop".into(),
            image_pull_policy: None,
            link_url: format!("https://{}", listener.local_addr().map_err(failure)?),
            egress: AgentEgress::default(),
            controller_namespace: SYSTEM_NAMESPACE.into(),
            watch_namespaces: Vec::new(),
            gateway_resources: ResourceRequirements::default(),
            worker_resources: ResourceRequirements::default(),
            image_pull_secrets: Vec::new(),
            // Gateways read the variables of this process.
            gateway_environment: Vec::new(),
            otlp_ca_secret: None,
            workers: WORKERS,
            policy: options.policy,
        };
        let texts = manifest::texts(&options.files);
        let read = |kept: &dyn Fn(&ObjectKey) -> Option<serde_json::Value>| {
            let variable = |name: &str| std::env::var(name).ok();
            let world = CheckContext {
                kept,
                variable: &variable,
                settings: &settings,
            };
            manifest::read(&texts, &options.secrets, &world)
        };
        // First check the files without the state, so that a mistake creates no directory.
        if !options.state.exists() {
            read(&|_| None)?;
        }
        let state = StateDirectory::open(&options.state).map_err(RunError::Other)?;
        let store = ObjectStore::open(&state.directory.join("objects.sqlite")).map_err(failure)?;
        let manifests = read(&|key| store.kept(key).ok().flatten())?;
        let objects = manifests.iter().map(|manifest| (&manifest.key, &manifest.object));
        let webhooks =
            sensor_rows::webhooks(objects, options.webhook_port).map_err(|mistake| ManifestError(vec![mistake]))?;
        let of_kind = |resource: &str| {
            let keys = manifests.iter().map(|manifest| &manifest.key);
            let mut keys: Vec<ObjectKey> = keys.filter(|key| key.resource == resource).cloned().collect();
            keys.sort();
            keys
        };
        let [agents, sensors, budgets] = [AGENTS, SENSORS, BUDGETS].map(of_kind);
        let page = options.page.map(bind_page).transpose()?;
        for manifest in manifests {
            if manifest.key.resource == AGENTS {
                put_claim(&store, &manifest.key, &manifest.object)?;
            }
            store.add(manifest.key, manifest.object).map_err(failure)?;
        }
        Ok(Self {
            store: Arc::new(store),
            agents,
            sensors,
            budgets,
            webhooks,
            private: PrivateDirectory::make(&state.directory).map_err(RunError::Other)?,
            state,
            workspace: options.workspace,
            page,
            settings,
            listener,
            duration: options.duration,
        })
    }

    /// Directory of the state.
    #[must_use]
    pub fn state_directory(&self) -> &std::path::Path {
        &self.state.directory
    }

    /// Where the page reads events; absent without a page.
    #[must_use]
    pub fn recent_events(&self) -> Option<Arc<RecentEvents>> {
        self.page.as_ref().map(|page| page.recent().clone())
    }

    /// The private directory, to be removed if the process exits early.
    #[must_use]
    pub fn private_directory(&self) -> PathBuf {
        self.private.path().into()
    }

    /// Runs until something ends it, then drains. Also returns the last rows.
    pub async fn run(
        self,
        mut output: RunOutput,
        out: &mut impl Write,
        interrupted: CancellationToken,
    ) -> Result<Vec<AgentRow>, RunError> {
        let mut parts = self.start()?;
        if let Some(page) = &self.page {
            output.page(out, &page.url(), Timestamp::now()).map_err(failure)?;
        }
        let until = self.duration.and_then(|duration| Instant::now().checked_add(duration));
        let result = self.watch(&mut parts, &mut output, out, until, &interrupted).await;
        let mut latest = self.look(&parts.loops);
        let end_by = Instant::now() + LAST;
        parts.end_pods.cancel();
        // Idle loops show to the end what they wait for.
        let shows = !matches!(result, Ok(RunEndCause::NothingRuns));
        while Instant::now() < end_by {
            if timeout(LOOK, &mut parts.pods).await.is_ok() {
                break;
            }
            if shows {
                // The run completes even if it can no longer be shown.
                let (rows, sensors) = self.look(&parts.loops);
                let _ = output.show(out, (&rows, &sensors), Timestamp::now());
            }
        }
        if shows {
            latest = self.look(&parts.loops);
        }
        parts.end_controller.cancel();
        let _ = timeout(CONTROLLER_SHUTDOWN_TIMEOUT, &mut parts.controller).await;
        let cause = result?;
        if let Some(page) = &self.page {
            page.end(cause.words()).await;
        }
        let (rows, sensors) = latest;
        output
            .show(out, (&rows, &sensors), Timestamp::now())
            .and_then(|()| output.end(out, cause.as_ref(), cause.words(), Timestamp::now()))
            .map_err(failure)?;
        Ok(rows)
    }

    fn start(&self) -> Result<RunTasks, RunError> {
        let tokens = Arc::new(PodTokens::default());
        let (loops, changed): (PodSessions, mpsc::UnboundedReceiver<NamespacedName>) = PodSessions::new();
        let loops = Arc::new(loops);
        let (end_pods, end_controller) = (CancellationToken::new(), CancellationToken::new());
        let listener = self.listener.try_clone().map_err(failure)?;
        let alone = EmbeddedOptions {
            client: ApiServer::new(self.store.clone(), tokens.clone()).client(),
            settings: self.settings.clone(),
            sensor_pods: SensorPodSettings {
                image: self.settings.image.clone(),
                link_url: self.settings.link_url.clone(),
                allowed_ranges: OPEN.map(str::to_owned).to_vec(),
                ..SensorPodSettings::default()
            },
            listener: tokio::net::TcpListener::from_std(listener).map_err(failure)?,
            loops: (loops.clone(), changed),
            metrics: Arc::new(Metrics::new().map_err(failure)?),
        };
        let pods = PodRunner {
            store: self.store.clone(),
            tokens,
            private: self.private.path().into(),
            claims: self.state.directory.join("volumes"),
            webhooks: self.webhooks.clone(),
            workspace: self.workspace.clone(),
            recent: self.recent_events(),
        };
        // From the first request on, the page has all its parts.
        self.look(&loops);
        if let Some(page) = &self.page {
            if !page.address().ip().is_loopback() {
                tracing::warn!("--page: other machines can connect to this address, and the page is not encrypted");
            }
            page.serve().map_err(failure)?;
        }
        let sets = stateful_set::run(self.store.clone(), end_pods.clone());
        let ends = end_pods.clone();
        let pods = async move {
            tokio::join!(pods.run(ends), sets);
        };
        Ok(RunTasks {
            loops,
            pods: tokio::spawn(pods),
            controller: tokio::spawn(embedded::run(alone, end_controller.clone())),
            end_pods,
            end_controller,
        })
    }

    /// Shows the rows until something ends the run.
    async fn watch(
        &self,
        parts: &mut RunTasks,
        output: &mut RunOutput,
        out: &mut impl Write,
        until: Option<Instant>,
        interrupted: &CancellationToken,
    ) -> Result<RunEndCause, RunError> {
        let mut resting_since = None;
        loop {
            let (rows, sensors) = self.look(&parts.loops);
            output.show(out, (&rows, &sensors), Timestamp::now()).map_err(failure)?;
            if rows.iter().any(|row| row.at_rest == LoopActivity::Alive) {
                resting_since = None;
            } else if resting_since.get_or_insert_with(Instant::now).elapsed() >= QUIET {
                return Ok(RunEndCause::NothingRuns);
            }
            let over = async {
                match until {
                    Some(moment) => tokio::time::sleep_until(moment).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = interrupted.cancelled() => return Ok(RunEndCause::Interrupted),
                () = over => return Ok(RunEndCause::Duration),
                ended = &mut parts.controller => return Err(match ended {
                    Ok(Err(error)) => failure(error),
                    Ok(Ok(())) | Err(_) => failure("the controller ended unexpectedly"),
                }),
                () = tokio::time::sleep(LOOK) => {}
            }
        }
    }

    /// Reads what is shown of the run, and puts it on the page.
    fn look(&self, loops: &PodSessions) -> (Vec<AgentRow>, Vec<SensorRow>) {
        let agents: Vec<(Agent, Option<PodReport>)> = self.agents(loops);
        let rows: Vec<AgentRow> = agents
            .iter()
            .map(|(agent, report)| row(agent, report.as_ref(), StatusOrigin::EarlierRun))
            .collect();
        let sensors = self.sensor_rows();
        if let Some(page) = &self.page {
            let agents = agents.iter().zip(&rows).map(|((agent, report), row)| {
                let history = Some(page.recent().of(&NamespacedName::of(agent)));
                AgentView::new(agent, row.clone(), report.as_ref(), history)
            });
            page.show(&PageView {
                agents: agents.collect(),
                budgets: self
                    .objects(&self.budgets)
                    .map(|budget| BudgetRow::new(&budget))
                    .collect(),
                sensors: sensors.clone(),
                notes: Vec::new(),
            });
        }
        (rows, sensors)
    }

    /// The objects of one kind that can be read.
    fn objects<T: DeserializeOwned>(&self, keys: &[ObjectKey]) -> impl Iterator<Item = T> {
        let objects = keys.iter().filter_map(|key| self.store.get(key));
        objects.filter_map(|object| serde_json::from_value(object).ok())
    }

    fn sensor_rows(&self) -> Vec<SensorRow> {
        let sensors = self.objects::<Sensor>(&self.sensors);
        let rows = sensors.map(|sensor| sensor_rows::row(&sensor, self.webhooks.get(&NamespacedName::of(&sensor))));
        rows.collect()
    }

    /// The Agents, each with the last report of its gateway.
    fn agents(&self, loops: &PodSessions) -> Vec<(Agent, Option<PodReport>)> {
        let agents = self.objects::<Agent>(&self.agents).map(|agent| {
            let key = NamespacedName::of(&agent);
            let pod = self.store.get(&ObjectKey::new(PODS, &key.namespace, &key.name));
            let uid = pod.as_ref().and_then(|pod| pod["metadata"]["uid"].as_str());
            let received = uid.and_then(|uid| loops.last_report(&key, uid));
            (agent, received.map(|received| received.report))
        });
        agents.collect()
    }
}
