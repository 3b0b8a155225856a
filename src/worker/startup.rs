//! The life of a worker process: journal, session, loop, last report.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::{Duration, timeout};
use tokio_util::sync::CancellationToken;

use crate::engine::machine::Engine;
use crate::engine::settings::{EngineSettings, SettingsError};
use crate::link::messages::LoopReport;
use crate::link::pod::PodConfig;
use crate::link::socket::WorkerSession;
use crate::otlp::LogSink;
use crate::telemetry::agent_spans;
use crate::telemetry::log_export::ProcessLog;

use super::artifacts::ArtifactStore;
use super::driver::{DriveOutcome, DriverInputs, DriverParts, LoopDriver};
use super::events;
use super::gateway_client::{GatewayClient, GatewayUpdate};
use super::instructions::InstructionSource;
use super::journal::{Journal, JournalError, JournalLine, JournalOwner, RestoredJournal};
use super::report;
use super::reporter::GatewayReporter;
use super::sensor_receiver::LoopSensors;
use super::sensor_receiver::file_watcher::FileWatchers;
use super::spans::LoopSpans;
use super::tool_source::ToolSource;
use super::tools::McpTools;
use super::turn_context::TurnContext;

/// Longest wait at exit for the gateway to take the last lines of the log.
const SHUTDOWN_LOGS_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a worker that cannot start waits for the gateway to report the reason.
const SAY_WHY: Duration = Duration::from_secs(10);

pub struct WorkerOptions {
    pub config: PodConfig,
    pub pod_uid: String,
    pub socket: PathBuf,
    pub journal_dir: PathBuf,
    /// The mounted instructions, read if the configuration has none inline.
    pub instructions_file: PathBuf,
    pub skills_dir: PathBuf,
    /// The Agent's workspace, used only if its spec has one.
    pub workspace_dir: PathBuf,
    /// How long a call in flight may continue after SIGTERM.
    pub drain: Duration,
    /// The log of the process, whose lines are sent to the gateway if it exports them.
    pub log: ProcessLog,
}

/// Why a worker ended on its own account.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The instructions or skills cannot be used.
    #[error("{0}")]
    Instructions(String),
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error("cannot create the client of the gateway's socket: {0}")]
    Client(#[from] reqwest::Error),
}

impl WorkerError {
    fn kind(&self) -> &'static str {
        match self {
            Self::Journal(error) => error.kind(),
            Self::Instructions(_) => "InstructionsUnreadable",
            Self::Settings(_) => "InvalidSpec",
            Self::Client(_) => "WorkerFailed",
        }
    }
}

/// Runs a worker until `terminate` is cancelled or its loop cannot continue.
pub async fn run(options: WorkerOptions, terminate: CancellationToken) -> Result<(), WorkerError> {
    let gateway = GatewayClient::new(&options.socket)?;
    let connections = watch::Sender::new(0);
    let updates = watch::Sender::new(None);
    let outbox = GatewayReporter::start(&gateway, connections.subscribe());
    let gateway_updates = updates.subscribe();
    let events = tokio::spawn(gateway.clone().run_events(updates, connections));
    let closing = CancellationToken::new();
    let mut logs = tokio::spawn(send_log(gateway.clone(), options.log.sink(), closing.clone()));
    let worker = WorkerProcess {
        options,
        gateway,
        outbox,
        gateway_updates,
        terminate,
    };
    let result = Box::pin(worker.run()).await;
    events.abort();
    closing.cancel();
    if timeout(SHUTDOWN_LOGS_TIMEOUT, &mut logs).await.is_err() {
        logs.abort();
    }
    result
}

/// Sends the lines of the log to the gateway until `closing`, if it exports them. Otherwise they are discarded.
async fn send_log(gateway: GatewayClient, lines: LogSink, closing: CancellationToken) {
    if !lines.is_on() {
        return;
    }
    let session = closing.run_until_cancelled(gateway.quiet_session()).await;
    if session.is_some_and(|session| session.logs) {
        gateway.run_logs(lines, closing).await;
    } else {
        lines.close();
    }
}

/// Starts connecting the tool servers of the spec.
fn tools(
    spec: &crate::api::tools::ToolsSpec,
    socket: &Path,
    artifacts: Arc<ArtifactStore>,
) -> Result<Option<Arc<dyn ToolSource>>, WorkerError> {
    if spec.all_servers().is_empty() {
        return Ok(None);
    }
    let tools = Arc::new(McpTools::new(spec, socket, artifacts)?);
    Ok(Some(Arc::new(tools)))
}

/// What the volume of a loop holds.
struct OpenedVolume {
    journal: Journal,
    restored: RestoredJournal,
    artifacts: Arc<ArtifactStore>,
}

struct WorkerProcess {
    options: WorkerOptions,
    gateway: GatewayClient,
    outbox: GatewayReporter,
    gateway_updates: watch::Receiver<Option<GatewayUpdate>>,
    terminate: CancellationToken,
}

impl WorkerProcess {
    async fn run(mut self) -> Result<(), WorkerError> {
        let owner = JournalOwner {
            agent_uid: self.options.config.uid.clone(),
            pod_uid: self.options.pod_uid.clone(),
            epoch: self.options.config.epoch,
        };
        let result = match self.prepare(&owner) {
            Ok((state, instructions)) => Box::pin(self.run_loop(state, instructions, &owner)).await,
            Err(error) => {
                self.report_error(&error).await;
                Err(error)
            }
        };
        self.outbox.finish().await;
        result
    }

    fn prepare(&self, owner: &JournalOwner) -> Result<(OpenedVolume, InstructionSource), WorkerError> {
        let (mut journal, restored) = Journal::open(&self.options.journal_dir, owner)?;
        // Before the journal takes its ballast: on a full volume this makes room.
        let artifacts = Arc::new(ArtifactStore::open(&self.options.journal_dir));
        // The previous process may have been killed between a commit and its log lines: log them again.
        restored
            .unlogged_lines
            .iter()
            .for_each(|line| events::log_line(line, None));
        journal.claim(owner)?;
        let spec = &self.options.config.spec;
        let skills = spec.skills.iter().map(|skill| skill.name.clone()).collect();
        let instructions = InstructionSource::load(spec.instructions.clone(), self.options.instructions_file.clone())
            .and_then(|texts| texts.with_skills(skills, self.options.skills_dir.clone()))
            .map_err(WorkerError::Instructions)?;
        let state = OpenedVolume {
            journal,
            restored,
            artifacts,
        };
        Ok((state, instructions))
    }

    /// Drives the loop, closes the [`Journal`], and then idles if the outcome calls for it.
    async fn run_loop(
        &mut self,
        state: OpenedVolume,
        instructions: InstructionSource,
        owner: &JournalOwner,
    ) -> Result<(), WorkerError> {
        let OpenedVolume {
            mut journal,
            restored,
            artifacts,
        } = state;
        let ended = match self.wait_for_gateway().await {
            Some((session, first)) => {
                let open = journal.newest_turn_lines()?;
                let spans = self.spans(&session, (&open, &restored), &journal);
                let turn = if session.traces || session.logs {
                    TurnContext::new(&self.options.config.uid, &open)
                } else {
                    TurnContext::default()
                };
                let spec = &self.options.config.spec;
                let settings = EngineSettings::try_from(spec)?;
                let workspace = spec.workspace.as_ref().map(|_| self.options.workspace_dir.clone());
                let sensors = LoopSensors::restore(restored.sensor_records).with_workspace(workspace.is_some());
                let mut engine = match restored.snapshot {
                    Some(snapshot) => Engine::restore(settings, snapshot, restored.transcript),
                    None => Engine::new(settings),
                };
                engine.restore_tasks(restored.tasks);
                journal.set_models(&spec.model, spec.light_model.as_ref());
                journal.set_response_receiver(spec.response_endpoint().is_some())?;
                for (field, value, at) in sensors.values() {
                    engine.restore_field(field, value.clone(), at);
                }
                let parts = DriverParts {
                    agent: self.options.config.uid.clone(),
                    engine,
                    sensors,
                    spans,
                    turn,
                    lookouts: FileWatchers::new(workspace),
                    sends_responses: spec.response_endpoint().is_some(),
                    tools: tools(&spec.tools, &self.options.socket, Arc::clone(&artifacts))?,
                    artifacts,
                    model: &spec.model,
                    light_model: spec.light_model.as_ref(),
                    instructions,
                    journal: &mut journal,
                    gateway: &self.gateway,
                    outbox: &self.outbox,
                    drain: self.options.drain,
                };
                let world = DriverInputs {
                    gateway_updates: self.gateway_updates.clone(),
                    terminate: self.terminate.clone(),
                };
                // Boxed because the future holds the whole loop.
                Box::pin(LoopDriver::new(parts, &first).run(&session, world)).await
            }
            None => Ok(DriveOutcome::Exit),
        };
        let closed = journal.close(owner);
        let ended = ended?;
        closed?;
        self.idle(ended).await;
        Ok(())
    }

    /// Starts the spans of the loop, if the gateway exports them.
    fn spans(
        &self,
        session: &WorkerSession,
        (open, restored): (&[JournalLine], &RestoredJournal),
        journal: &Journal,
    ) -> LoopSpans {
        if !session.traces {
            return LoopSpans::default();
        }
        let config = &self.options.config;
        let agent = agent_spans::identity((&config.namespace, &config.name, &config.uid), &config.spec.model);
        let spans = if session.content {
            LoopSpans::start_with_texts(&self.gateway, agent)
        } else {
            LoopSpans::start(&self.gateway, agent)
        };
        spans.resume((open, &restored.unlogged_lines), journal)
    }

    /// Waits for the session and the first [`GatewayUpdate`] with fresh contact: a loop that is to be suspended, or has
    /// no run lease, must not make a call first. `None`: fenced or terminated, so the loop is not driven.
    async fn wait_for_gateway(&mut self) -> Option<(WorkerSession, GatewayUpdate)> {
        let meeting = async {
            let session = self.gateway.session().await;
            let clear = |update: &GatewayUpdate| update.event.fenced || !update.contact().is_lost(update.at);
            let first = self
                .gateway_updates
                .wait_for(|update| update.as_ref().is_some_and(clear))
                .await;
            let first = first.ok()?.clone().filter(|update| !update.event.fenced)?;
            Some((session, first))
        };
        tokio::select! {
            met = meeting => met,
            () = self.terminate.cancelled() => None,
        }
    }

    /// Waits until the pod is deleted. Also exits when a suspension is lifted: the next start resumes the loop.
    async fn idle(&mut self, ended: DriveOutcome) {
        if ended == DriveOutcome::Exit {
            return;
        }
        let no_longer = |update: &Option<GatewayUpdate>| {
            update.as_ref().is_some_and(|update| {
                update.event.fenced || (ended == DriveOutcome::Suspended && !update.event.directives.suspend)
            })
        };
        tokio::select! {
            _ = self.gateway_updates.wait_for(no_longer) => {}
            () = self.terminate.cancelled() => {}
        }
    }

    /// Reports to the controller why the loop cannot run.
    async fn report_error(&self, error: &WorkerError) {
        let turn = tokio::select! {
            session = timeout(SAY_WHY, self.gateway.session()) => session.map_or(0, |session| session.known.turn),
            () = self.terminate.cancelled() => 0,
        };
        self.outbox.report(LoopReport {
            turn,
            last_error: Some(report::error(Timestamp::now(), error.kind(), error.to_string())),
            ..LoopReport::default()
        });
    }
}
