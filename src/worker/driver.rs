//! Drives the loop: waits for what happens, feeds it in step by step, does what follows from each.
//!
//! Holds no rule about loops. Nothing is done before its record is on disk.

mod actions;
mod sensor_events;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future;
use jiff::Timestamp;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinError, JoinSet};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::api::agent::ModelSpec;
use crate::api::failure::{CallFailure, FailureKind};
use crate::clock::ClockReading;
use crate::engine::lifetime_counts::LifetimeCounts;
use crate::engine::machine::Engine;
use crate::engine::message::ModelAnswer;
use crate::engine::tool::{ToolOutcome, ToolRunId};
use crate::engine::{CallId, EngineInput, KnownTotals, StopCause};
use crate::link::deliveries::Delivery;
use crate::link::messages::{Directives, LoopReport};
use crate::link::socket::WorkerSession;

use super::deliveries::DeliveryPoller;
use super::event_subscriptions::{EventPublisher, PageRequest};
use super::events;
use super::gateway_client::{GatewayClient, GatewayUpdate};
use super::instructions::InstructionSource;
use super::journal::{Journal, JournalError};
use super::journaled_engine::{JournaledEngine, StepOutcome};
use super::model::cache;
use super::report;
use super::reporter::GatewayReporter;
use super::run_lease::RunLease;
use super::sensors::LoopSensors;
use super::sensors::file_watcher::{FileWatchers, WatchReport};
use super::tool_source::{self, ToolOffer, ToolSource};

/// Longest sleep until the clocks are looked at again: a suspended machine or a clock that was set is noticed by then.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// What the driver hears of the world.
pub struct DriverInputs {
    /// The gateway's events.
    pub heard: watch::Receiver<Option<GatewayUpdate>>,
    /// SIGTERM.
    pub terminate: CancellationToken,
}

/// How a drive ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriveOutcome {
    /// The process ends with its pod.
    Exit,
    /// The loop has stopped by `spec.suspend`: the process idles until the pod goes.
    Suspended,
    /// The loop has ended for good: the process idles until the pod goes.
    Completed,
}

/// Drives one engine.
pub struct LoopDriver<'a> {
    agent: String,
    steps: JournaledEngine<'a>,
    tools: Option<Arc<dyn ToolSource>>,
    offered: Option<watch::Receiver<ToolOffer>>,
    runs: JoinSet<ToolOutcome>,
    running: BTreeMap<ToolRunId, AbortHandle>,
    model: &'a ModelSpec,
    light_model: Option<&'a ModelSpec>,
    /// How long the model's provider is asked to keep the conversation.
    cache: cache::CachePolicy,
    instructions: InstructionSource,
    gateway: &'a GatewayClient,
    outbox: &'a GatewayReporter,
    readings: EventPublisher,
    sensors: LoopSensors,
    deliveries: DeliveryPoller,
    lookouts: FileWatchers,
    timer: Option<Timestamp>,
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

/// What a driver is made of.
pub struct DriverParts<'a> {
    /// Uid of the Agent.
    pub agent: String,
    /// New or restored.
    pub engine: Engine,
    /// What is remembered of Sensors.
    pub sensors: LoopSensors,
    /// Who look at files for them.
    pub lookouts: FileWatchers,
    /// `None`: the Agent has no tools but the engine's own.
    pub tools: Option<Arc<dyn ToolSource>>,
    /// The model of the spec.
    pub model: &'a ModelSpec,
    /// The light model of the spec.
    pub light_model: Option<&'a ModelSpec>,
    /// The system prompt.
    pub instructions: InstructionSource,
    /// Claimed.
    pub journal: &'a mut Journal,
    /// For calls.
    pub gateway: &'a GatewayClient,
    /// For reports and errands.
    pub outbox: &'a GatewayReporter,
    /// How long a call in flight may go on after SIGTERM, and a run of a tool after any stop.
    pub drain: Duration,
}

/// What the engine knows of the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum LinkFreshness {
    /// Contact.
    Fresh,
    /// None for half the run lease.
    Silent,
    /// None for all of it.
    Lost,
}

/// What the driver waits for.
enum DriverEvent {
    Called(CallId, Result<ModelAnswer, CallFailure>),
    Ran(ToolRunId, ToolOutcome),
    Offered,
    Heard,
    Asked(PageRequest),
    Delivered(Delivery),
    Saw(WatchReport),
    Terminated,
    Moment,
}

impl<'a> LoopDriver<'a> {
    /// A driver whose engine has not been started.
    #[must_use]
    pub fn new(parts: DriverParts<'a>, first: &GatewayUpdate) -> Self {
        Self {
            agent: parts.agent,
            steps: JournaledEngine::new(parts.engine, parts.journal),
            offered: parts.tools.as_ref().map(|tools| tools.offered()),
            tools: parts.tools,
            runs: JoinSet::new(),
            running: BTreeMap::new(),
            model: parts.model,
            light_model: parts.light_model,
            cache: cache::CachePolicy::new(parts.model),
            instructions: parts.instructions,
            gateway: parts.gateway,
            outbox: parts.outbox,
            readings: EventPublisher::new(parts.gateway),
            sensors: parts.sensors,
            deliveries: DeliveryPoller::new(parts.gateway),
            lookouts: parts.lookouts,
            timer: None,
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

    /// Drives until the loop has stopped. An error is the journal's: then all that is under way is cut, and the report
    /// names the error.
    pub async fn run(mut self, session: &WorkerSession, mut world: DriverInputs) -> Result<DriveOutcome, JournalError> {
        let result = self.drive(session, &mut world).await;
        if let Err(error) = &result {
            self.cut_call();
            self.runs.abort_all();
            let mut last = self.report();
            last.last_error = Some(report::error(Timestamp::now(), error.kind(), error.to_string()));
            self.outbox.report(last);
        }
        result
    }

    async fn drive(&mut self, session: &WorkerSession, world: &mut DriverInputs) -> Result<DriveOutcome, JournalError> {
        let patience = if self.steps.view().turn == 0 {
            tool_source::FIRST_PATIENCE
        } else {
            tool_source::PATIENCE
        };
        if !tool_source::wait_for_tools(self.tools.clone(), patience, &world.terminate).await {
            return Ok(DriveOutcome::Exit);
        }
        if world.heard.borrow().as_ref().is_some_and(GatewayUpdate::suspends) {
            // A loop that is never started begins no turn.
            self.stop(StopCause::Suspend)?;
        } else {
            self.begin(session, world)?;
        }
        while !self.stopped {
            let happening = self.next(world).await;
            // Before: what lay ready while the process stood still is not taken in the name of a lease that ran out.
            self.check_link(ClockReading::now())?;
            if self.stopped {
                break;
            }
            self.handle_event(happening, world)?;
            self.check_clocks()?;
            self.check_scores()?;
        }
        self.readings.finish(&mut self.steps).await?;
        Ok(match self.stop {
            Some(StopCause::Suspend) => DriveOutcome::Suspended,
            None if self.steps.view().outcome.is_some() => DriveOutcome::Completed,
            // Without a cause the engine found out by itself that it is fenced.
            Some(StopCause::Drain | StopCause::Fenced) | None => DriveOutcome::Exit,
        })
    }

    /// Starts the engine with all that is known.
    fn begin(&mut self, session: &WorkerSession, world: &mut DriverInputs) -> Result<(), JournalError> {
        let budget = world.heard.borrow().as_ref().map(GatewayUpdate::budget);
        if self.contact.is_silent(ClockReading::now()) {
            self.link = LinkFreshness::Silent;
        }
        self.update_tools()?;
        self.steps.adopt(&LifetimeCounts {
            trips: session.known.usage.guardrail_trips.clone(),
            tools: session.known.usage.by_tool.clone(),
        });
        self.feed(EngineInput::Started {
            agent: self.agent.clone(),
            epoch: session.epoch,
            known: KnownTotals {
                turn: session.known.turn,
                tool_calls: session.known.usage.tool_calls,
                actions: session.known.usage.actions,
            },
            budget: budget.unwrap_or_default(),
            link_silent: self.link == LinkFreshness::Silent,
        })?;
        self.apply_gateway_update(&mut world.heard)?;
        // What the process before left waiting.
        self.check_scores()
    }

    fn handle_event(&mut self, happening: DriverEvent, world: &mut DriverInputs) -> Result<(), JournalError> {
        match happening {
            DriverEvent::Called(call, result) => self.call_ended(call, result),
            DriverEvent::Ran(run, outcome) => self.feed(EngineInput::ToolFinished { run, outcome }),
            DriverEvent::Offered => self.update_tools(),
            DriverEvent::Heard => self.apply_gateway_update(&mut world.heard),
            DriverEvent::Terminated => {
                self.terminated = true;
                self.stop(StopCause::Drain)
            }
            DriverEvent::Delivered(delivery) => self.take_delivery(&delivery),
            DriverEvent::Saw(sighting) => self.handle_watch_report(sighting),
            DriverEvent::Asked(ask) => self.readings.answer(ask, &self.steps),
            DriverEvent::Moment => Ok(()),
        }
    }

    async fn next(&mut self, world: &mut DriverInputs) -> DriverEvent {
        let moment = sleep(self.until_moment(ClockReading::now()));
        let listens = self.accepts_sensor_events();
        tokio::select! {
            biased;
            () = world.terminate.cancelled(), if !self.terminated => DriverEvent::Terminated,
            Ok(()) = world.heard.changed() => DriverEvent::Heard,
            Some(ended) = self.runs.join_next_with_id() => run_ended(ended, &mut self.running),
            true = offered(&mut self.offered) => DriverEvent::Offered,
            Some(called) = self.calls.join_next() => match (called, self.in_flight) {
                (Ok((call, result)), _) => DriverEvent::Called(call, result),
                (Err(_), Some(call)) => DriverEvent::Called(call, Err(broken())),
                (Err(_), None) => DriverEvent::Moment,
            },
            delivery = self.deliveries.next(), if listens => DriverEvent::Delivered(delivery),
            sighting = self.lookouts.next(), if listens => DriverEvent::Saw(sighting),
            // Last: who reads never holds up the loop.
            ask = self.readings.next_request() => DriverEvent::Asked(ask),
            () = moment => DriverEvent::Moment,
        }
    }

    /// How long nothing happens by the clocks alone.
    fn until_moment(&self, now: ClockReading) -> Duration {
        let timer = self
            .timer
            .map(|at| Duration::try_from(at.duration_since(now.wall)).unwrap_or_default());
        let silence = (self.link < LinkFreshness::Silent).then(|| self.contact.time_until_silent(now));
        let lease = (self.link < LinkFreshness::Lost).then(|| self.contact.time_until_lost(now));
        let drain = self.drain_from.map(|from| self.drain.saturating_sub(now.since(from)));
        let sensor = self.sensors.next(now.wall).filter(|_| self.accepts_sensor_events());
        let sensor = sensor.map(|at| Duration::try_from(at.duration_since(now.wall)).unwrap_or_default());
        [timer, silence, lease, drain, sensor]
            .into_iter()
            .flatten()
            .fold(LOOK_AGAIN, Duration::min)
    }

    fn check_clocks(&mut self) -> Result<(), JournalError> {
        let now = ClockReading::now();
        let set_back = now.was_set_back_since(self.looked);
        self.looked = now;
        if set_back || self.timer.is_some_and(|at| at <= now.wall) {
            // An early timer does no harm, and the engine looks at its deadlines again.
            self.feed(EngineInput::Timer)?;
        }
        self.check_link(now)?;
        if !self.stopped && self.drain_from.is_some_and(|from| now.since(from) >= self.drain) {
            self.feed(EngineInput::DrainEnded)?;
        }
        self.check_sensors(now.wall)
    }

    /// Tells the engine how long there was no contact.
    fn check_link(&mut self, now: ClockReading) -> Result<(), JournalError> {
        if self.link < LinkFreshness::Silent && self.contact.is_silent(now) {
            self.link = LinkFreshness::Silent;
            self.feed(EngineInput::LinkSilent)?;
        }
        if self.link < LinkFreshness::Lost && self.contact.is_lost(now) {
            self.link = LinkFreshness::Lost;
            self.feed(EngineInput::LinkLost)?;
        }
        Ok(())
    }

    /// Takes what the gateway said last.
    fn apply_gateway_update(&mut self, heard: &mut watch::Receiver<Option<GatewayUpdate>>) -> Result<(), JournalError> {
        let Some(heard) = heard.borrow_and_update().clone() else {
            return Ok(());
        };
        if heard.event.fenced {
            return self.stop(StopCause::Fenced);
        }
        let directives = heard.event.directives.clone();
        self.readings.set(&directives.readings);
        if heard.suspends() {
            self.stop(StopCause::Suspend)?;
        }
        self.contact = heard.contact();
        if self.link > LinkFreshness::Fresh && !self.contact.is_silent(ClockReading::now()) {
            self.link = LinkFreshness::Fresh;
            self.feed(EngineInput::LinkBack)?;
        }
        let before = std::mem::replace(&mut self.directives, directives.clone());
        if before.budget != directives.budget {
            self.feed(EngineInput::BudgetChanged { budget: heard.budget() })?;
        }
        if let Some(token) = directives.wake.filter(|token| before.wake.as_ref() != Some(token)) {
            self.feed(EngineInput::WakeRequested { token })?;
        }
        if let Some(token) = directives.resume.filter(|token| before.resume.as_ref() != Some(token)) {
            self.feed(EngineInput::ResumeRequested { token })?;
        }
        if before.wake_events != directives.wake_events
            && let Some(names) = directives.wake_events.clone()
        {
            self.feed(EngineInput::WakeEventsChanged { names })?;
        }
        if before.sensors != directives.sensors {
            let begun = self
                .sensors
                .apply_terms(Timestamp::now(), directives.sensors.as_deref());
            begun
                .into_iter()
                .try_for_each(|happened| self.apply_transition(happened))?;
            self.lookouts.set(&self.sensors);
            self.outbox.report(self.report());
        }
        Ok(())
    }

    /// Asks the engine to stop, once per cause; a process that is to end never idles.
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

    /// Tells the engine what the sources offer now.
    fn update_tools(&mut self) -> Result<(), JournalError> {
        let Some(offered) = &mut self.offered else {
            return Ok(());
        };
        let ToolOffer { specs, silent } = offered.borrow_and_update().clone();
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

    /// One step of the loop, and what follows from it.
    fn feed(&mut self, input: EngineInput) -> Result<(), JournalError> {
        self.refresh_instructions();
        let taken = self.steps.take(Timestamp::now(), input);
        self.apply_outcome(taken)
    }

    /// Takes the newest instructions.
    fn refresh_instructions(&mut self) {
        self.steps.set_instructions(self.instructions.newest().to_owned());
        self.steps.set_skills(self.instructions.newest_skills());
    }

    /// What follows from a step.
    fn apply_outcome(&mut self, taken: StepOutcome) -> Result<(), JournalError> {
        let StepOutcome { actions, lines, result } = taken;
        lines.iter().for_each(events::log_line);
        self.readings.announce_lines(&lines);
        for action in actions {
            self.perform(action);
        }
        result
    }

    fn report(&self) -> LoopReport {
        LoopReport {
            sensors: self.sensors.reports(),
            ..report::from_view(self.steps.view())
        }
    }
}

/// Which run ended, and how. One that was cut is no longer known.
fn run_ended(
    ended: Result<(tokio::task::Id, ToolOutcome), JoinError>,
    running: &mut BTreeMap<ToolRunId, AbortHandle>,
) -> DriverEvent {
    let (task, outcome) = match ended {
        Ok((task, outcome)) => (task, outcome),
        Err(error) => (
            error.id(),
            ToolOutcome::Unknown {
                message: "the worker failed while it read the result; this is a bug in agentloop".into(),
            },
        ),
    };
    let run = running
        .iter()
        .find(|(_, handle)| handle.id() == task)
        .map(|(run, _)| *run);
    match run {
        Some(run) => {
            running.remove(&run);
            DriverEvent::Ran(run, outcome)
        }
        None => DriverEvent::Moment,
    }
}

/// Waits until the sources offer something else. False: they never will.
async fn offered(offered: &mut Option<watch::Receiver<ToolOffer>>) -> bool {
    match offered {
        Some(offered) => offered.changed().await.is_ok(),
        None => future::pending().await,
    }
}

/// A call whose task was lost.
fn broken() -> CallFailure {
    CallFailure {
        kind: FailureKind::BadResponse,
        message: "the worker failed while it read the answer; this is a bug in agentloop".into(),
        retry_after_milliseconds: None,
        resumes_at: None,
    }
}
