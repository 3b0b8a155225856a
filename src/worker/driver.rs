//! Drives the loop: waits for what happens, feeds it in step by step, does what follows from each.
//!
//! Holds no rule about loops. Nothing is done before its record is on disk.

mod actions;
mod sensing;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future;
use jiff::Timestamp;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinError, JoinSet};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::api::agent::Model;
use crate::api::failure::{Failure, FailureKind};
use crate::clock::Clocks;
use crate::engine::machine::Engine;
use crate::engine::message::Answer;
use crate::engine::tally::Tally;
use crate::engine::tool::{ToolOutcome, ToolRunId};
use crate::engine::{CallId, Input, Known, StopCause};
use crate::link::deliveries::Delivery;
use crate::link::messages::{Directives, LoopReport};
use crate::link::socket::Session;

use super::contact::Contact;
use super::deliveries::Deliveries;
use super::events;
use super::gateway_client::{GatewayClient, Heard};
use super::instructions::Instructions;
use super::journal::{Journal, JournalError};
use super::model::cache;
use super::outbox::Outbox;
use super::readings::{Ask, Readings};
use super::report;
use super::sensors::Sensors;
use super::sensors::lookout::{Lookouts, Sighting};
use super::steps::{Steps, Taken};
use super::tool_source::{self, Offer, ToolSource};

/// Longest sleep until the clocks are looked at again: a suspended machine or a clock that was set is noticed by then.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// What the driver hears of the world.
pub struct World {
    /// The gateway's events.
    pub heard: watch::Receiver<Option<Heard>>,
    /// SIGTERM.
    pub terminate: CancellationToken,
}

/// How a drive ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The process ends with its pod.
    Exit,
    /// The loop has stopped by `spec.suspend`: the process idles until the pod goes.
    Suspended,
    /// The loop has ended for good: the process idles until the pod goes.
    Completed,
}

/// Drives one engine.
pub struct Driver<'a> {
    agent: String,
    steps: Steps<'a>,
    tools: Option<Arc<dyn ToolSource>>,
    offered: Option<watch::Receiver<Offer>>,
    runs: JoinSet<ToolOutcome>,
    running: BTreeMap<ToolRunId, AbortHandle>,
    model: &'a Model,
    light_model: Option<&'a Model>,
    /// How long the model's provider is asked to keep the conversation.
    cache: cache::Policy,
    instructions: Instructions,
    gateway: &'a GatewayClient,
    outbox: &'a Outbox,
    readings: Readings,
    sensors: Sensors,
    deliveries: Deliveries,
    lookouts: Lookouts,
    timer: Option<Timestamp>,
    calls: JoinSet<(CallId, Result<Answer, Failure>)>,
    in_flight: Option<CallId>,
    contact: Contact,
    link: Link,
    looked: Clocks,
    directives: Directives,
    stop: Option<StopCause>,
    drain: Duration,
    drain_from: Option<Clocks>,
    terminated: bool,
    stopped: bool,
}

/// What a driver is made of.
pub struct Parts<'a> {
    /// Uid of the Agent.
    pub agent: String,
    /// New or restored.
    pub engine: Engine,
    /// What is remembered of Sensors.
    pub sensors: Sensors,
    /// Who look at files for them.
    pub lookouts: Lookouts,
    /// `None`: the Agent has no tools but the engine's own.
    pub tools: Option<Arc<dyn ToolSource>>,
    /// The model of the spec.
    pub model: &'a Model,
    /// The light model of the spec.
    pub light_model: Option<&'a Model>,
    /// The system prompt.
    pub instructions: Instructions,
    /// Claimed.
    pub journal: &'a mut Journal,
    /// For calls.
    pub gateway: &'a GatewayClient,
    /// For reports and errands.
    pub outbox: &'a Outbox,
    /// How long a call in flight may go on after SIGTERM, and a run of a tool after any stop.
    pub drain: Duration,
}

/// What the engine knows of the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Link {
    /// Contact.
    Fresh,
    /// None for half the run lease.
    Silent,
    /// None for all of it.
    Lost,
}

/// What the driver waits for.
enum Happening {
    Called(CallId, Result<Answer, Failure>),
    Ran(ToolRunId, ToolOutcome),
    Offered,
    Heard,
    Asked(Ask),
    Delivered(Delivery),
    Saw(Sighting),
    Terminated,
    Moment,
}

impl<'a> Driver<'a> {
    /// A driver whose engine has not been started.
    #[must_use]
    pub fn new(parts: Parts<'a>, first: &Heard) -> Self {
        Self {
            agent: parts.agent,
            steps: Steps::new(parts.engine, parts.journal),
            offered: parts.tools.as_ref().map(|tools| tools.offered()),
            tools: parts.tools,
            runs: JoinSet::new(),
            running: BTreeMap::new(),
            model: parts.model,
            light_model: parts.light_model,
            cache: cache::Policy::new(parts.model),
            instructions: parts.instructions,
            gateway: parts.gateway,
            outbox: parts.outbox,
            readings: Readings::new(parts.gateway),
            sensors: parts.sensors,
            deliveries: Deliveries::new(parts.gateway),
            lookouts: parts.lookouts,
            timer: None,
            calls: JoinSet::new(),
            in_flight: None,
            contact: first.contact(),
            link: Link::Fresh,
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
    pub async fn run(mut self, session: &Session, mut world: World) -> Result<Ended, JournalError> {
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

    async fn drive(&mut self, session: &Session, world: &mut World) -> Result<Ended, JournalError> {
        let patience = if self.steps.view().turn == 0 {
            tool_source::FIRST_PATIENCE
        } else {
            tool_source::PATIENCE
        };
        if !tool_source::meet(self.tools.clone(), patience, &world.terminate).await {
            return Ok(Ended::Exit);
        }
        if world.heard.borrow().as_ref().is_some_and(Heard::suspends) {
            // A loop that is never started begins no turn.
            self.stop(StopCause::Suspend)?;
        } else {
            self.begin(session, world)?;
        }
        while !self.stopped {
            let happening = self.next(world).await;
            // Before: what lay ready while the process stood still is not taken in the name of a lease that ran out.
            self.look_at_link(Clocks::now())?;
            if self.stopped {
                break;
            }
            self.take(happening, world)?;
            self.look_at_clocks()?;
            self.look_at_scores()?;
        }
        self.readings.finish(&mut self.steps).await?;
        Ok(match self.stop {
            Some(StopCause::Suspend) => Ended::Suspended,
            None if self.steps.view().outcome.is_some() => Ended::Completed,
            // Without a cause the engine found out by itself that it is fenced.
            Some(StopCause::Drain | StopCause::Fenced) | None => Ended::Exit,
        })
    }

    /// Starts the engine with all that is known.
    fn begin(&mut self, session: &Session, world: &mut World) -> Result<(), JournalError> {
        let budget = world.heard.borrow().as_ref().map(Heard::budget);
        if self.contact.is_silent(Clocks::now()) {
            self.link = Link::Silent;
        }
        self.offer()?;
        self.steps.adopt(&Tally {
            trips: session.known.usage.guardrail_trips.clone(),
            tools: session.known.usage.by_tool.clone(),
        });
        self.feed(Input::Started {
            agent: self.agent.clone(),
            epoch: session.epoch,
            known: Known {
                turn: session.known.turn,
                tool_calls: session.known.usage.tool_calls,
                actions: session.known.usage.actions,
            },
            budget: budget.unwrap_or_default(),
            link_silent: self.link == Link::Silent,
        })?;
        self.listen(&mut world.heard)?;
        // What the process before left waiting.
        self.look_at_scores()
    }

    fn take(&mut self, happening: Happening, world: &mut World) -> Result<(), JournalError> {
        match happening {
            Happening::Called(call, result) => self.called(call, result),
            Happening::Ran(run, outcome) => self.feed(Input::ToolFinished { run, outcome }),
            Happening::Offered => self.offer(),
            Happening::Heard => self.listen(&mut world.heard),
            Happening::Terminated => {
                self.terminated = true;
                self.stop(StopCause::Drain)
            }
            Happening::Delivered(delivery) => self.take_delivery(&delivery),
            Happening::Saw(sighting) => self.see(sighting),
            Happening::Asked(ask) => self.readings.answer(ask, &self.steps),
            Happening::Moment => Ok(()),
        }
    }

    async fn next(&mut self, world: &mut World) -> Happening {
        let moment = sleep(self.until_moment(Clocks::now()));
        let listens = self.listens();
        tokio::select! {
            biased;
            () = world.terminate.cancelled(), if !self.terminated => Happening::Terminated,
            Ok(()) = world.heard.changed() => Happening::Heard,
            Some(ended) = self.runs.join_next_with_id() => ran(ended, &mut self.running),
            true = offered(&mut self.offered) => Happening::Offered,
            Some(called) = self.calls.join_next() => match (called, self.in_flight) {
                (Ok((call, result)), _) => Happening::Called(call, result),
                (Err(_), Some(call)) => Happening::Called(call, Err(broken())),
                (Err(_), None) => Happening::Moment,
            },
            delivery = self.deliveries.next(), if listens => Happening::Delivered(delivery),
            sighting = self.lookouts.next(), if listens => Happening::Saw(sighting),
            // Last: who reads never holds up the loop.
            ask = self.readings.asked() => Happening::Asked(ask),
            () = moment => Happening::Moment,
        }
    }

    /// How long nothing happens by the clocks alone.
    fn until_moment(&self, now: Clocks) -> Duration {
        let timer = self
            .timer
            .map(|at| Duration::try_from(at.duration_since(now.wall)).unwrap_or_default());
        let silence = (self.link < Link::Silent).then(|| self.contact.left_to_silence(now));
        let lease = (self.link < Link::Lost).then(|| self.contact.left(now));
        let drain = self.drain_from.map(|from| self.drain.saturating_sub(now.since(from)));
        let sensor = self.sensors.next(now.wall).filter(|_| self.listens());
        let sensor = sensor.map(|at| Duration::try_from(at.duration_since(now.wall)).unwrap_or_default());
        [timer, silence, lease, drain, sensor]
            .into_iter()
            .flatten()
            .fold(LOOK_AGAIN, Duration::min)
    }

    fn look_at_clocks(&mut self) -> Result<(), JournalError> {
        let now = Clocks::now();
        let set_back = now.was_set_back_since(self.looked);
        self.looked = now;
        if set_back || self.timer.is_some_and(|at| at <= now.wall) {
            // An early timer does no harm, and the engine looks at its deadlines again.
            self.feed(Input::Timer)?;
        }
        self.look_at_link(now)?;
        if !self.stopped && self.drain_from.is_some_and(|from| now.since(from) >= self.drain) {
            self.feed(Input::DrainEnded)?;
        }
        self.look_at_sensors(now.wall)
    }

    /// Tells the engine how long there was no contact.
    fn look_at_link(&mut self, now: Clocks) -> Result<(), JournalError> {
        if self.link < Link::Silent && self.contact.is_silent(now) {
            self.link = Link::Silent;
            self.feed(Input::LinkSilent)?;
        }
        if self.link < Link::Lost && self.contact.is_lost(now) {
            self.link = Link::Lost;
            self.feed(Input::LinkLost)?;
        }
        Ok(())
    }

    /// Takes what the gateway said last.
    fn listen(&mut self, heard: &mut watch::Receiver<Option<Heard>>) -> Result<(), JournalError> {
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
        if self.link > Link::Fresh && !self.contact.is_silent(Clocks::now()) {
            self.link = Link::Fresh;
            self.feed(Input::LinkBack)?;
        }
        let before = std::mem::replace(&mut self.directives, directives.clone());
        if before.budget != directives.budget {
            self.feed(Input::BudgetChanged { budget: heard.budget() })?;
        }
        if let Some(token) = directives.wake.filter(|token| before.wake.as_ref() != Some(token)) {
            self.feed(Input::WakeRequested { token })?;
        }
        if let Some(token) = directives.resume.filter(|token| before.resume.as_ref() != Some(token)) {
            self.feed(Input::ResumeRequested { token })?;
        }
        if before.wake_events != directives.wake_events
            && let Some(names) = directives.wake_events.clone()
        {
            self.feed(Input::WakeEventsChanged { names })?;
        }
        if before.sensors != directives.sensors {
            let begun = self.sensors.direct(Timestamp::now(), directives.sensors.as_deref());
            begun.into_iter().try_for_each(|happened| self.sense(happened))?;
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
        self.drain_from.get_or_insert(Clocks::now());
        self.feed(Input::Stop { cause })
    }

    /// Tells the engine what the sources offer now.
    fn offer(&mut self) -> Result<(), JournalError> {
        let Some(offered) = &mut self.offered else {
            return Ok(());
        };
        let Offer { specs, silent } = offered.borrow_and_update().clone();
        let tools = specs.to_vec();
        self.feed(Input::ToolsChanged { tools, silent })
    }

    fn called(&mut self, call: CallId, result: Result<Answer, Failure>) -> Result<(), JournalError> {
        self.in_flight = None;
        self.feed(match result {
            Ok(answer) => Input::Answered { call, answer },
            Err(failure) => Input::Failed { call, failure },
        })
    }

    /// One step of the loop, and what follows from it.
    fn feed(&mut self, input: Input) -> Result<(), JournalError> {
        self.freshen();
        let taken = self.steps.take(Timestamp::now(), input);
        self.follow(taken)
    }

    /// Takes the newest instructions.
    fn freshen(&mut self) {
        self.steps.set_instructions(self.instructions.newest().to_owned());
        self.steps.set_skills(self.instructions.newest_skills());
    }

    /// What follows from a step.
    fn follow(&mut self, taken: Taken) -> Result<(), JournalError> {
        let Taken { actions, lines, result } = taken;
        lines.iter().for_each(events::tell);
        self.readings.told(&lines);
        for action in actions {
            self.act(action);
        }
        result
    }

    fn report(&self) -> LoopReport {
        LoopReport {
            sensors: self.sensors.reports(),
            ..report::of(self.steps.view())
        }
    }
}

/// Which run ended, and how. One that was cut is no longer known.
fn ran(
    ended: Result<(tokio::task::Id, ToolOutcome), JoinError>,
    running: &mut BTreeMap<ToolRunId, AbortHandle>,
) -> Happening {
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
            Happening::Ran(run, outcome)
        }
        None => Happening::Moment,
    }
}

/// Waits until the sources offer something else. False: they never will.
async fn offered(offered: &mut Option<watch::Receiver<Offer>>) -> bool {
    match offered {
        Some(offered) => offered.changed().await.is_ok(),
        None => future::pending().await,
    }
}

/// A call whose task was lost.
fn broken() -> Failure {
    Failure {
        kind: FailureKind::BadResponse,
        message: "the worker failed while it read the answer; this is a bug in agentloop".into(),
        retry_after_milliseconds: None,
        resumes_at: None,
    }
}
