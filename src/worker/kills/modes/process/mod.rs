//! One process of a worker on a real journal, in virtual time: keeps the order of the real driver, and ends when it is killed,
//! when it stops, or when everything is quiet.

mod effects;
mod exchanges;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use jiff::Timestamp;

use super::outside::{Event, World, seconds};
use super::patches;
use super::referee::Heard;
use super::story::{self, Criterion, Story};
use crate::api::agent::AgentMode;
use crate::api::status::LoopState;
use crate::engine::machine::{Engine, LoopView};
use crate::engine::tool::{ResultArtifacts, ToolOutcome, ToolRun, ToolRunId};
use crate::engine::{CallId, CallPurpose, EngineInput, KnownTotals, StopCause};
use crate::worker::driver::loop_timer::LoopTimer;
use crate::worker::journal::{Journal, JournalOwner, WaitingResponse};
use crate::worker::journaled_engine::JournaledEngine;
use crate::worker::kills::files::Files;
use crate::worker::sensors::LoopSensors;

/// Seconds without contact from which on no tool with side effects starts, and nothing starts.
const SILENT: i64 = 30;
const LOST: i64 = 60;
/// Seconds in which what is under way may end after SIGTERM.
const DRAIN: i64 = 60;
/// Inputs in which everything is quiet once everything works.
const MOST_CALM_INPUTS: usize = 1_500;

/// How a process ends.
#[derive(Debug)]
pub(super) enum End {
    /// It was killed, and left these files.
    Killed(Files),
    /// Its journal could not be written.
    Failed,
    /// Its loop has stopped.
    Stopped(Box<LoopView>),
    /// Nothing is left to do.
    Quiet(Box<LoopView>),
}

/// Ends a process early.
struct Stop(End);

/// When a process is killed, drawn for each input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Lives,
    /// Before anything is written.
    Before,
    /// In the middle of the transaction, after this percentage of it.
    Torn(usize),
    /// After the commit, and after so many effects.
    Done(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Link {
    Fresh,
    Silent,
    Lost,
}

struct Process<'a> {
    steps: JournaledEngine<'a>,
    sensors: LoopSensors,
    world: &'a mut World,
    story: Story,
    dir: PathBuf,
    /// By the clock of the node.
    timer: LoopTimer,
    looked: Timestamp,
    call: Option<(CallId, CallPurpose, Option<Criterion>)>,
    runs: BTreeMap<ToolRunId, (Timestamp, ToolRun, ToolOutcome)>,
    link: Link,
    /// Answers to gates of which the process was told.
    told: Vec<crate::engine::GateAnswer>,
    /// What could be told again.
    last: Option<EngineInput>,
    waiting_responses: usize,
    sending: Option<(Timestamp, WaitingResponse)>,
    stop: Option<StopCause>,
    drain_until: Option<Timestamp>,
    stopped: bool,
    calm_inputs: usize,
}

/// Runs one process. Closes the journal unless it was killed.
pub(super) fn live(world: &mut World, dir: &Path, trace: &mut dyn FnMut(String)) -> End {
    world.figures.lives += 1;
    if world.silence() >= seconds(LOST) {
        // A worker without a run lease waits.
        let at = world.contact_at.unwrap_or(world.now);
        world.pass(at);
    }
    let owner = JournalOwner {
        agent_uid: "agent".into(),
        pod_uid: format!("pod-{}", world.epoch),
        epoch: world.epoch,
    };
    let (mut journal, restored) = Journal::open(dir, &owner).expect("a journal that opens");
    journal.claim(&owner).expect("a journal");
    journal.checkpoint_every(60);
    let story = world.story.clone();
    let settings = patches::settings(world, &story);
    world.referee.restored(restored.snapshot.as_ref(), &restored.tasks);
    let restored = patches::restored(world, restored);
    let sensors = LoopSensors::restore(restored.kept);
    let mut engine = match restored.snapshot {
        Some(snapshot) => Engine::restore(settings, snapshot, restored.transcript),
        None => Engine::new(settings),
    };
    engine.restore_tasks(restored.tasks);
    let sends = story.mode == AgentMode::Task && story.has_receiver;
    journal.set_response_receiver(sends).expect("a journal");
    let looked = world.wall();
    let mut process = Process {
        steps: JournaledEngine::new(engine, &mut journal),
        sensors,
        world,
        story,
        dir: dir.into(),
        timer: LoopTimer::default(),
        looked,
        call: None,
        runs: BTreeMap::new(),
        link: Link::Fresh,
        told: Vec::new(),
        last: None,
        waiting_responses: 0,
        sending: None,
        stop: None,
        drain_until: None,
        stopped: false,
        calm_inputs: 0,
    };
    let end = match process.drive(trace) {
        Ok(view) => End::Stopped(Box::new(view)),
        Err(Stop(end)) => end,
    };
    if let Some((call, ..)) = process.call.take() {
        // A process that ends in an order cuts its call; one that is killed leaves it with the gateway.
        if !matches!(end, End::Killed(_)) {
            process.world.provider.cancel(call);
        }
    }
    if matches!(end, End::Stopped(_) | End::Quiet(_)) {
        journal.close(&owner).expect("an end in order");
    }
    end
}

impl Process<'_> {
    fn drive(&mut self, trace: &mut dyn FnMut(String)) -> Result<LoopView, Stop> {
        if self.world.suspended {
            self.stop(StopCause::Suspend)?;
        } else {
            self.begin()?;
        }
        while !self.stopped {
            trace(self.line());
            self.check_link()?;
            if self.stopped {
                break;
            }
            self.next()?;
            self.check_clocks()?;
            if self.world.calm {
                self.calm()?;
            }
        }
        Ok(self.steps.view())
    }

    /// What a person sees of the moment.
    fn line(&self) -> String {
        let view = self.steps.view();
        let reasons: Vec<&str> = view.reasons.iter().map(|held| held.reason.as_ref()).collect();
        format!(
            "{} skew {} timer {:?} epoch {} turn {} {:?} {reasons:?} call {:?} runs {:?} waiting {} {:?}",
            self.world.now,
            self.world.skew,
            self.timer.at().map(|at| at.to_string()),
            self.world.epoch,
            view.turn,
            view.state,
            self.call.map(|(id, ..)| id.to_string()),
            self.runs.keys().map(ToString::to_string).collect::<Vec<_>>(),
            view.waiting_tasks,
            view.goal.map(|goal| (goal.steps, goal.criteria)),
        )
    }

    /// Once everything works: helps a loop that waits for a person, and ends when nothing is left to do.
    fn calm(&mut self) -> Result<(), Stop> {
        let view = self.steps.view();
        self.calm_inputs += 1;
        assert!(
            self.calm_inputs < MOST_CALM_INPUTS,
            "the loop stands still or never ends: {view:?}"
        );
        let needs_help = view.state == LoopState::Paused && view.reasons.iter().any(|held| held.until.is_none());
        if needs_help && view.gates.is_empty() && self.calm_inputs.is_multiple_of(10) {
            for event in self.world.help() {
                self.handle(event)?;
            }
        }
        let is_busy = self.call.is_some()
            || !self.runs.is_empty()
            || self.sending.is_some()
            || self.waiting_responses > 0
            || self.world.has_pending()
            || self.world.referee.is_busy()
            || !view.gates.is_empty();
        let rests = view.state == LoopState::Sleeping && self.story.mode != AgentMode::Goal;
        if rests && !is_busy {
            return Err(Stop(End::Quiet(Box::new(view))));
        }
        Ok(())
    }

    fn begin(&mut self) -> Result<(), Stop> {
        if self.world.silence() >= seconds(SILENT) {
            self.link = Link::Silent;
        }
        let tools = story::tools();
        self.feed(EngineInput::ToolsChanged {
            tools,
            silent: Vec::new(),
        })?;
        self.feed(EngineInput::Started {
            agent: "agent".into(),
            epoch: self.world.epoch,
            known: KnownTotals {
                turn: self.world.known.turn,
                counts: self.world.known.counts.clone(),
            },
            budget: self.world.budget.clone(),
            link_silent: self.link == Link::Silent,
            stop: self.world.stop.clone(),
        })?;
        for level in self.world.levels() {
            self.handle(level)?;
        }
        self.waiting_responses = self.steps.count_responses().expect("a journal");
        self.send_response();
        Ok(())
    }

    /// Handles the next event: one from outside, or what is due first.
    fn next(&mut self) -> Result<(), Stop> {
        if let Some(event) = self.world.draw_event(self.stop.is_none()) {
            return self.handle(event);
        }
        let link_back = self.world.contact_at;
        let moments = [
            self.call.and_then(|(id, ..)| self.world.provider.ends_at(id)),
            self.runs.values().map(|(at, ..)| *at).min(),
            self.world
                .servers
                .next_answer(&self.told)
                .filter(|_| self.world.has_link()),
            self.timer.at().map(|at| at - self.world.skew),
            self.sending.as_ref().map(|(at, _)| *at),
            self.drain_until,
            self.scale_down_due().map(|at| at - self.world.skew),
            link_back,
            self.lease_ends(),
        ];
        let Some(next) = moments.into_iter().flatten().min() else {
            // Nothing is under way, and nothing will happen without an event from outside.
            assert!(
                !self.world.calm || !self.story_is_open(),
                "the loop waits for nothing: {:?}",
                self.steps.view()
            );
            let to = self.world.now + seconds(600);
            self.world.pass(to);
            return Ok(());
        };
        self.world.pass(next);
        self.check_link()?;
        self.due()
    }

    fn story_is_open(&self) -> bool {
        self.story.mode == AgentMode::Goal || self.world.referee.is_busy()
    }

    /// What has ended by now.
    fn due(&mut self) -> Result<(), Stop> {
        let now = self.world.now;
        if let Some((call, purpose, criterion)) = self.call
            && let Some(end) = self.world.provider.end_of(call)
        {
            self.call = None;
            return match end {
                Ok(answer) => {
                    let heard = Heard::Answer(call, purpose, Box::new(answer.clone()), criterion);
                    self.feed_heard(EngineInput::Answered { call, answer }, &heard)
                }
                Err(failure) => self.feed(EngineInput::Failed { call, failure }),
            };
        }
        let ended = self.runs.iter().find(|(_, (at, ..))| *at <= now).map(|(run, _)| *run);
        if let Some(run) = ended
            && let Some((_, sent, outcome)) = self.runs.remove(&run)
        {
            let heard = Heard::Ran(Box::new(sent), outcome.clone());
            let artifacts = ResultArtifacts::default();
            return self.feed_heard(
                EngineInput::ToolFinished {
                    run,
                    outcome,
                    artifacts,
                },
                &heard,
            );
        }
        if self.world.has_link()
            && let Some(answer) = self.world.servers.answer(&self.told, now)
        {
            self.told.push(answer.clone());
            return self.feed(EngineInput::GateAnswered(answer));
        }
        if self.sending.as_ref().is_some_and(|(at, _)| *at <= now) {
            return self.respond();
        }
        if self.drain_until.is_some_and(|at| at <= now) {
            self.drain_until = None;
            return self.feed(EngineInput::DrainEnded);
        }
        if self.scale_down_due().is_some_and(|at| at <= self.world.wall()) {
            return self.feed(EngineInput::ScaleDown);
        }
        Ok(())
    }

    fn handle(&mut self, event: Event) -> Result<(), Stop> {
        if let Event::Wake(_) | Event::Resume(_) | Event::Stop(_) = event {
            super::note(format!("a user: {event:?}"));
        }
        match event {
            Event::Request(offer) => self.take_task(offer),
            Event::Deliver(delivery) => self.take_delivery(&delivery),
            Event::Wake(token) => self.feed(EngineInput::WakeRequested { token }),
            Event::Resume(token) => self.feed(EngineInput::ResumeRequested { token }),
            Event::Stop(token) => self.feed(EngineInput::StopRequested { token }),
            Event::Budget(budget) => self.feed(EngineInput::BudgetChanged { budget }),
            Event::Terminate => self.stop(StopCause::Drain),
            Event::Suspend => self.stop(StopCause::Suspend),
            Event::Full(pages) => {
                self.steps.limit_pages(pages);
                self.world.was_full = true;
                Ok(())
            }
            Event::Again => match self.last.clone() {
                Some(input) => self.feed(input),
                None => Ok(()),
            },
            Event::Clock | Event::Nothing => self.due(),
        }
    }

    fn lease_ends(&self) -> Option<Timestamp> {
        let limit = match self.link {
            Link::Fresh => SILENT,
            Link::Silent => LOST,
            Link::Lost => return None,
        };
        let left = seconds(limit) - self.world.silence();
        (!self.world.has_link()).then(|| self.world.now + left)
    }

    /// Tells the loop of each threshold of the run lease that has passed.
    fn check_link(&mut self) -> Result<(), Stop> {
        if self.link > Link::Fresh && self.world.has_link() {
            self.link = Link::Fresh;
            self.feed(EngineInput::LinkBack)?;
        }
        if self.link < Link::Silent && self.world.silence() >= seconds(SILENT) {
            self.link = Link::Silent;
            self.feed(EngineInput::LinkSilent)?;
        }
        if self.link < Link::Lost && self.world.silence() >= seconds(LOST) {
            self.link = Link::Lost;
            self.feed(EngineInput::LinkLost)?;
        }
        Ok(())
    }

    fn check_clocks(&mut self) -> Result<(), Stop> {
        let wall = self.world.wall();
        let set_back = wall < self.looked;
        self.looked = wall;
        if self.timer.fires(wall) || set_back {
            self.feed(EngineInput::Timer)?;
        }
        self.check_link()
    }

    fn stop(&mut self, cause: StopCause) -> Result<(), Stop> {
        if self.stopped || self.stop == Some(cause) {
            return Ok(());
        }
        if self.stop != Some(StopCause::Drain) {
            self.stop = Some(cause);
        }
        let until = self.world.now + seconds(DRAIN);
        self.drain_until.get_or_insert(until);
        self.feed(EngineInput::Stop { cause })
    }

    fn scale_down_due(&self) -> Option<Timestamp> {
        let needs_pod = self.stop.is_some() || self.waiting_responses > 0 || self.sensors.needs_pod();
        self.steps.scale_down_due().filter(|_| !needs_pod)
    }

    fn feed(&mut self, input: EngineInput) -> Result<(), Stop> {
        self.feed_heard(input, &Heard::Nothing)
    }

    fn feed_heard(&mut self, input: EngineInput, heard: &Heard) -> Result<(), Stop> {
        if let EngineInput::Answered { .. } | EngineInput::ToolFinished { .. } | EngineInput::GateAnswered(_) = &input {
            self.last = Some(input.clone());
        }
        let fate = self.fate();
        let before = self.before(fate)?;
        let taken = self.steps.take(self.world.wall(), input);
        self.follow(taken, heard, (fate, before))
    }
}
