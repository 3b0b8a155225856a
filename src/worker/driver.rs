//! Drives the loop: waits for input, feeds it to the engine step by step, and carries out the resulting effects.
//!
//! Holds no rule about loops. No effect is carried out before its record is on disk.

mod actions;
mod clocks;
mod directives;
pub mod loop_timer;
mod sensor_events;
mod tasks;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future;
use jiff::Timestamp;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinError, JoinSet};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use crate::api::agent::ModelSpec;
use crate::api::failure::{CallFailure, FailureKind};
use crate::engine::machine::Engine;
use crate::engine::message::ModelAnswer;
use crate::engine::tool::{ToolOutcome, ToolRunId};
use crate::engine::{CallId, EngineInput, KnownTotals, RecordKind, StopCause};
use crate::link::deliveries::Delivery;
use crate::link::messages::{Directives, LoopReport};
use crate::link::socket::WorkerSession;
use crate::link::task_requests::RequestedTask;
use crate::support::clock::ClockReading;

use self::loop_timer::LoopTimer;
use super::artifacts::ArtifactStore;
use super::durations::LoopTimes;
use super::event_subscriptions::{EventPublisher, PageRequest};
use super::events;
use super::gateway_client::{GatewayClient, GatewayUpdate};
use super::history_upload::{HistoryUpload, UploadEvent};
use super::instructions::InstructionSource;
use super::journal::{Journal, JournalError};
use super::journaled_engine::{JournaledEngine, StepOutcome};
use super::long_poller::LongPoller;
use super::prompt_cache;
use super::report;
use super::reporter::GatewayReporter;
use super::run_lease::RunLease;
use super::sensor_receiver::LoopSensors;
use super::sensor_receiver::file_watcher::{FileWatchers, WatchReport};
use super::spans::LoopSpans;
use super::task_responses::ResponseDelivery;
use super::tool_source::{self, FinishedToolRun, ListedTools, ToolSource};
use super::turn_context::TurnContext;

/// Longest sleep before the clocks are checked again. Bounds how late a suspended machine or a changed clock is
/// noticed.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

pub struct DriverInputs {
    /// Updates from the gateway's event stream.
    pub gateway_updates: watch::Receiver<Option<GatewayUpdate>>,
    /// SIGTERM.
    pub terminate: CancellationToken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriveOutcome {
    /// The process exits with its pod.
    Exit,
    /// The loop was stopped by `spec.suspend`: the process idles until the pod is deleted.
    Suspended,
    /// The loop has completed: the process idles until the pod is deleted.
    Completed,
}

/// Drives one engine.
pub struct LoopDriver<'a> {
    agent: String,
    steps: JournaledEngine<'a>,
    tools: Option<Arc<dyn ToolSource>>,
    artifacts: Arc<ArtifactStore>,
    offered: Option<watch::Receiver<ListedTools>>,
    runs: JoinSet<FinishedToolRun>,
    running: BTreeMap<ToolRunId, AbortHandle>,
    model: &'a ModelSpec,
    light_model: Option<&'a ModelSpec>,
    cache: prompt_cache::CachePolicy,
    instructions: InstructionSource,
    gateway: &'a GatewayClient,
    outbox: &'a GatewayReporter,
    readings: EventPublisher,
    spans: LoopSpans,
    times: LoopTimes,
    turn: TurnContext,
    sensors: LoopSensors,
    deliveries: LongPoller<Delivery>,
    tasks: LongPoller<RequestedTask>,
    responses: ResponseDelivery,
    history: HistoryUpload,
    lookouts: FileWatchers,
    timer: LoopTimer,
    calls: JoinSet<(CallId, Result<ModelAnswer, CallFailure>)>,
    in_flight: Option<CallId>,
    contact: RunLease,
    link: LinkFreshness,
    looked: ClockReading,
    directives: Directives,
    stop: Option<StopCause>,
    drain: Duration,
    drain_from: Option<ClockReading>,
    terminated: bool,
    stopped: bool,
}

pub struct DriverParts<'a> {
    /// Uid of the Agent.
    pub agent: String,
    pub engine: Engine,
    pub sensors: LoopSensors,
    pub lookouts: FileWatchers,
    /// The spans of the loop.
    pub spans: LoopSpans,
    /// The trace of the open turn.
    pub turn: TurnContext,
    /// Whether responses to tasks have a receiver.
    pub sends_responses: bool,
    /// `None`: the Agent has only the engine's built-in tools.
    pub tools: Option<Arc<dyn ToolSource>>,
    /// Where the images are that prompts show.
    pub artifacts: Arc<ArtifactStore>,
    pub model: &'a ModelSpec,
    pub light_model: Option<&'a ModelSpec>,
    pub instructions: InstructionSource,
    /// Must be claimed.
    pub journal: &'a mut Journal,
    pub gateway: &'a GatewayClient,
    pub outbox: &'a GatewayReporter,
    /// How long a call in flight may continue after SIGTERM, and a tool run after any stop.
    pub drain: Duration,
}

/// Freshness of the last contact with the controller, as the engine knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum LinkFreshness {
    Fresh,
    /// No contact for half of the [`RunLease`].
    Silent,
    /// No contact for the whole [`RunLease`].
    Lost,
}

enum DriverEvent {
    Called(CallId, Result<ModelAnswer, CallFailure>),
    Ran(ToolRunId, FinishedToolRun),
    Offered,
    GatewayUpdated,
    Asked(PageRequest),
    Delivered(Delivery),
    Requested(RequestedTask),
    Saw(WatchReport),
    /// The response at this position is delivered.
    Responded(i64),
    Uploaded(UploadEvent),
    Terminated,
    Moment,
}

impl<'a> LoopDriver<'a> {
    #[must_use]
    pub fn new(parts: DriverParts<'a>, first: &GatewayUpdate) -> Self {
        let steps = JournaledEngine::new(parts.engine, parts.journal);
        let times = LoopTimes::new(&steps.view().gates, Timestamp::now());
        Self {
            agent: parts.agent,
            steps,
            offered: parts.tools.as_ref().map(|tools| tools.offered()),
            tools: parts.tools,
            artifacts: parts.artifacts,
            runs: JoinSet::new(),
            running: BTreeMap::new(),
            model: parts.model,
            light_model: parts.light_model,
            cache: prompt_cache::CachePolicy::new(parts.model),
            instructions: parts.instructions,
            gateway: parts.gateway,
            outbox: parts.outbox,
            readings: EventPublisher::new(parts.gateway, parts.turn.agent().map(str::to_owned)),
            spans: parts.spans,
            times,
            turn: parts.turn,
            sensors: parts.sensors,
            deliveries: LongPoller::of_deliveries(parts.gateway),
            tasks: LongPoller::of_tasks(parts.gateway),
            responses: ResponseDelivery::new(parts.gateway, parts.sends_responses),
            history: HistoryUpload::new(parts.gateway),
            lookouts: parts.lookouts,
            timer: LoopTimer::default(),
            calls: JoinSet::new(),
            in_flight: None,
            contact: first.contact(),
            link: LinkFreshness::Fresh,
            looked: first.at,
            directives: Directives::default(),
            stop: None,
            drain: parts.drain,
            drain_from: None,
            terminated: false,
            stopped: false,
        }
    }

    /// Drives until the loop has stopped. Fails only with errors of the [`Journal`]: then calls and tool runs in flight
    /// are cancelled, and the last report names the error.
    pub async fn run(mut self, session: &WorkerSession, mut world: DriverInputs) -> Result<DriveOutcome, JournalError> {
        let turn = self.turn.span();
        let result = self.drive(session, &mut world).instrument(turn).await;
        if let Err(error) = &result {
            self.cut_call();
            self.runs.abort_all();
            let mut last = self.report();
            last.last_error = Some(report::error(Timestamp::now(), error.kind(), error.to_string()));
            self.outbox.report(last);
        }
        self.spans.finish().await;
        result
    }

    async fn drive(&mut self, session: &WorkerSession, world: &mut DriverInputs) -> Result<DriveOutcome, JournalError> {
        let tools_timeout = tool_source::tools_timeout(self.steps.view().turn);
        if !tool_source::wait_for_tools(self.tools.clone(), tools_timeout, &world.terminate).await {
            return Ok(DriveOutcome::Exit);
        }
        if world
            .gateway_updates
            .borrow()
            .as_ref()
            .is_some_and(GatewayUpdate::suspends)
        {
            // Stop before `Started`: an engine that was never started begins no turn.
            self.stop(StopCause::Suspend)?;
        } else {
            self.begin(session, world)?;
        }
        while !self.stopped {
            let happening = self.next(world).await;
            // Check the lease before the event: input that queued up while the process was suspended must not be
            // handled under a lease that has expired.
            self.check_link(ClockReading::now())?;
            if self.stopped {
                break;
            }
            self.handle_event(happening, world)?;
            self.check_clocks()?;
            self.check_scores()?;
        }
        // The pod that has fenced this one delivers them.
        let is_fenced = self.stop.is_none() && self.steps.view().outcome.is_none();
        if !is_fenced && self.stop != Some(StopCause::Fenced) {
            // What comes after it, in this process and in the gateway, has the rest of the pod's grace period.
            let now = ClockReading::now();
            let left = |from| self.drain.saturating_sub(now.since(from));
            let left = self.drain_from.map_or(Duration::MAX, left);
            self.responses.finish(left, &mut self.steps).await?;
        }
        self.readings.finish(&mut self.steps).await?;
        self.history.finish(&mut self.steps).await;
        Ok(match self.stop {
            Some(StopCause::Suspend) => DriveOutcome::Suspended,
            None if self.steps.view().outcome.is_some() => DriveOutcome::Completed,
            // Without a cause, the engine itself found that it is fenced.
            Some(StopCause::Drain | StopCause::Fenced) | None => DriveOutcome::Exit,
        })
    }

    fn begin(&mut self, session: &WorkerSession, world: &mut DriverInputs) -> Result<(), JournalError> {
        let (budget, open) = {
            let update = world.gateway_updates.borrow();
            (
                update.as_ref().map(GatewayUpdate::budget),
                update.as_ref().map(GatewayUpdate::open_requests),
            )
        };
        if self.contact.is_silent(ClockReading::now()) {
            self.link = LinkFreshness::Silent;
        }
        self.update_tools()?;
        self.feed(EngineInput::Started {
            agent: self.agent.clone(),
            epoch: session.epoch,
            known: KnownTotals {
                turn: session.known.turn,
                counts: Box::new(session.known.usage.counts.clone()),
            },
            budget: budget.unwrap_or_default(),
            link_silent: self.link == LinkFreshness::Silent,
            open: open.unwrap_or_default(),
        })?;
        self.apply_gateway_update(&mut world.gateway_updates)?;
        // Responses that the previous process has not delivered.
        self.responses.resume(&self.steps)?;
        // Events that the previous process left waiting for a score.
        self.check_scores()
    }

    fn finish_run(&mut self, run: ToolRunId, finished: FinishedToolRun) -> Result<(), JournalError> {
        for (resource, amount) in finished.used {
            self.feed(EngineInput::ResourceUsed { resource, amount })?;
        }
        self.feed(EngineInput::ToolFinished {
            run,
            outcome: finished.outcome,
            artifacts: finished.artifacts,
        })
    }

    fn handle_event(&mut self, happening: DriverEvent, world: &mut DriverInputs) -> Result<(), JournalError> {
        match happening {
            DriverEvent::Called(call, result) => self.call_ended(call, result),
            DriverEvent::Ran(run, finished) => self.finish_run(run, finished),
            DriverEvent::Offered => {
                self.update_tools()?;
                // What follows from other definitions is journalled with the next input.
                self.feed(EngineInput::Timer)
            }
            DriverEvent::GatewayUpdated => self.apply_gateway_update(&mut world.gateway_updates),
            DriverEvent::Terminated => {
                self.terminated = true;
                self.stop(StopCause::Drain)
            }
            DriverEvent::Delivered(delivery) => self.take_delivery(&delivery),
            DriverEvent::Requested(task) => self.take_task(task),
            DriverEvent::Saw(sighting) => self.handle_watch_report(sighting),
            DriverEvent::Responded(seq) => self.responses.delivered(seq, &self.steps),
            DriverEvent::Uploaded(event) => {
                self.history.advance(event, &mut self.steps);
                Ok(())
            }
            DriverEvent::Asked(ask) => self.readings.answer(ask, &self.steps),
            DriverEvent::Moment => Ok(()),
        }
    }

    async fn next(&mut self, world: &mut DriverInputs) -> DriverEvent {
        let moment = sleep(self.until_moment(ClockReading::now()));
        let (listens, takes) = (self.takes_records(), self.accepts_deliveries());
        tokio::select! {
            biased;
            () = world.terminate.cancelled(), if !self.terminated => DriverEvent::Terminated,
            Ok(()) = world.gateway_updates.changed() => DriverEvent::GatewayUpdated,
            Some(ended) = self.runs.join_next_with_id() => run_ended(ended, &mut self.running),
            true = offered(&mut self.offered) => DriverEvent::Offered,
            Some(called) = self.calls.join_next() => match (called, self.in_flight) {
                (Ok((call, result)), _) => DriverEvent::Called(call, result),
                (Err(_), Some(call)) => DriverEvent::Called(call, Err(broken())),
                (Err(_), None) => DriverEvent::Moment,
            },
            delivery = self.deliveries.next(), if takes => DriverEvent::Delivered(delivery),
            task = self.tasks.next() => DriverEvent::Requested(task),
            sighting = self.lookouts.next(), if listens => DriverEvent::Saw(sighting),
            seq = self.responses.next() => DriverEvent::Responded(seq),
            // Last, so that uploads and readers of events never delay the loop.
            event = self.history.next() => DriverEvent::Uploaded(event),
            ask = self.readings.next_request() => DriverEvent::Asked(ask),
            () = moment => DriverEvent::Moment,
        }
    }

    /// Asks the engine to stop, once per cause. A drain is not replaced by a suspension: a process that must exit never
    /// idles.
    fn stop(&mut self, cause: StopCause) -> Result<(), JournalError> {
        if self.stopped || self.stop == Some(cause) {
            return Ok(());
        }
        if self.stop != Some(StopCause::Drain) || cause == StopCause::Fenced {
            self.stop = Some(cause);
        }
        self.drain_from.get_or_insert(ClockReading::now());
        self.feed(EngineInput::Stop { cause })
    }

    fn update_tools(&mut self) -> Result<(), JournalError> {
        let Some(offered) = &mut self.offered else {
            return Ok(());
        };
        let ListedTools { specs, silent } = offered.borrow_and_update().clone();
        let tools = specs.to_vec();
        self.feed(EngineInput::ToolsChanged { tools, silent })
    }

    fn call_ended(&mut self, call: CallId, result: Result<ModelAnswer, CallFailure>) -> Result<(), JournalError> {
        self.in_flight = None;
        self.feed(match result {
            Ok(answer) => EngineInput::Answered { call, answer },
            Err(failure) => EngineInput::Failed { call, failure },
        })
    }

    /// Runs one step with the newest instructions, and carries out what follows.
    fn feed(&mut self, input: EngineInput) -> Result<(), JournalError> {
        self.refresh_instructions();
        let taken = self.steps.take(Timestamp::now(), input);
        self.apply_outcome(taken)
    }

    fn refresh_instructions(&mut self) {
        self.steps.set_instructions(self.instructions.newest().to_owned());
        self.steps.set_skills(self.instructions.newest_skills());
    }

    /// Logs the committed lines, then carries out the actions.
    fn apply_outcome(&mut self, taken: StepOutcome) -> Result<(), JournalError> {
        let StepOutcome { actions, lines, result } = taken;
        for line in &lines {
            events::log_line(line, self.turn.ids(line).as_ref());
            self.turn.follow(line);
        }
        self.spans.observe(&lines, self.steps.journal());
        self.times.observe(&lines);
        self.readings.announce_lines(&lines);
        if !lines.is_empty() {
            self.history.changed();
        }
        let lost = self.is_lost_since(&lines);
        for action in actions {
            self.perform(action, lost);
        }
        let ended = lines.iter().filter(|line| line.kind == RecordKind::TaskEnded).count();
        if ended > 0 {
            self.responses.added(ended, &self.steps)?;
        }
        result
    }

    fn report(&self) -> LoopReport {
        LoopReport {
            sensors: self.sensors.reports(),
            durations: self.times.report(),
            ..report::from_view(self.steps.view())
        }
    }
}

/// Identifies the run that ended, and its [`DriveOutcome`]. A cancelled run is no longer in `running` and is ignored.
fn run_ended(
    ended: Result<(tokio::task::Id, FinishedToolRun), JoinError>,
    running: &mut BTreeMap<ToolRunId, AbortHandle>,
) -> DriverEvent {
    let (task, finished) = match ended {
        Ok((task, finished)) => (task, finished),
        Err(error) => (
            error.id(),
            ToolOutcome::Unknown {
                message: "the worker failed while reading the result; this is a bug in agentloop".into(),
            }
            .into(),
        ),
    };
    let run = running
        .iter()
        .find(|(_, handle)| handle.id() == task)
        .map(|(run, _)| *run);
    match run {
        Some(run) => {
            running.remove(&run);
            DriverEvent::Ran(run, finished)
        }
        None => DriverEvent::Moment,
    }
}

/// Waits until the offered tools change. Returns false if they never will.
async fn offered(offered: &mut Option<watch::Receiver<ListedTools>>) -> bool {
    match offered {
        Some(offered) => offered.changed().await.is_ok(),
        None => future::pending().await,
    }
}

/// The [`CallFailure`] of a call whose task panicked.
fn broken() -> CallFailure {
    CallFailure::new(
        FailureKind::BadResponse,
        "the worker failed while reading the answer; this is a bug in agentloop",
    )
}
