//! One process of a worker on a real journal, in virtual time: keeps the order of the real driver, and ends when it is killed,
//! when it stops, or when everything is quiet.

mod effects;
mod exchanges;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use jiff::Timestamp;

use super::invariants::CheckInput;
use super::loop_environment::{LoopEnvironment, OutsideEvent, seconds};
use super::patches;
use super::schedule::{self, Criterion, ScheduleSpec};
use crate::api::agent::AgentMode;
use crate::api::status::LoopState;
use crate::engine::machine::{Engine, LoopView};
use crate::engine::tool::{ResultArtifacts, ToolOutcome, ToolRun, ToolRunId};
use crate::engine::{CallId, CallPurpose, EngineInput, KnownTotals, OpenRequests, StopCause};
use crate::worker::crash_tests::files::Files;
use crate::worker::crash_tests::reopened;
use crate::worker::driver::loop_timer::LoopTimer;
use crate::worker::journal::{JournalOwner, WaitingResponse};
use crate::worker::journaled_engine::JournaledEngine;
use crate::worker::sensor_receiver::LoopSensors;

/// Seconds without contact from which on no tool with side effects starts, and nothing starts.
const SILENT: i64 = 30;
const LOST: i64 = 60;
/// Seconds in which what is under way may end after SIGTERM.
const DRAIN: i64 = 60;
/// Inputs in which everything is quiet once everything works.
const MAX_CALM_INPUTS: usize = 1_500;

/// How a process ends.
#[derive(Debug)]
pub(super) enum ProcessEnd {
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
struct EarlyEnd(ProcessEnd);

/// When a process is killed, drawn for each input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KillPoint {
    Lives,
    /// Before anything is written.
    Before,
    /// In the middle of the transaction, after this percentage of it.
    Torn(usize),
    /// After the commit, and after this many effects.
    Done(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum LinkPhase {
    Fresh,
    Silent,
    Lost,
}

struct Process<'a> {
    steps: JournaledEngine<'a>,
    sensors: LoopSensors,
    environment: &'a mut LoopEnvironment,
    schedule: ScheduleSpec,
    dir: PathBuf,
    /// By the clock of the node.
    timer: LoopTimer,
    looked: Timestamp,
    call: Option<(CallId, CallPurpose, Option<Criterion>)>,
    runs: BTreeMap<ToolRunId, (Timestamp, ToolRun, ToolOutcome)>,
    link: LinkPhase,
    /// Answers to gates that the process has received.
    given_answers: Vec<crate::engine::EngineGateAnswer>,
    /// The last input, which may be repeated.
    last: Option<EngineInput>,
    waiting_responses: usize,
    sending: Option<(Timestamp, WaitingResponse)>,
    stop: Option<StopCause>,
    drain_until: Option<Timestamp>,
    stopped: bool,
    calm_inputs: usize,
}

/// Runs one process. Closes the journal unless it was killed.
pub(super) fn live(environment: &mut LoopEnvironment, dir: &Path, trace: &mut dyn FnMut(String)) -> ProcessEnd {
    environment.figures.lives += 1;
    if environment.silence() >= seconds(LOST) {
        // A worker without a run lease waits.
        let at = environment.contact_at.unwrap_or(environment.now);
        environment.pass(at);
    }
    let owner = JournalOwner {
        agent_uid: "agent".into(),
        pod_uid: format!("pod-{}", environment.epoch),
        epoch: environment.epoch,
    };
    let (mut journal, restored) = reopened(dir, &owner);
    journal.claim(&owner).expect("a journal");
    journal.checkpoint_every(60);
    let schedule = environment.schedule.clone();
    let settings = patches::settings(environment, &schedule);
    environment
        .invariants
        .restored(restored.snapshot.as_ref(), &restored.tasks);
    let restored = patches::restored(environment, restored);
    let sensors = LoopSensors::restore(restored.sensor_records);
    let mut engine = match restored.snapshot {
        Some(snapshot) => Engine::restore(settings, snapshot, restored.transcript),
        None => Engine::new(settings),
    };
    engine.restore_tasks(restored.tasks);
    let sends = schedule.mode == AgentMode::Task && schedule.has_receiver;
    journal.set_response_receiver(sends).expect("a journal");
    let looked = environment.wall();
    let mut process = Process {
        steps: JournaledEngine::new(engine, &mut journal),
        sensors,
        environment,
        schedule,
        dir: dir.into(),
        timer: LoopTimer::default(),
        looked,
        call: None,
        runs: BTreeMap::new(),
        link: LinkPhase::Fresh,
        given_answers: Vec::new(),
        last: None,
        waiting_responses: 0,
        sending: None,
        stop: None,
        drain_until: None,
        stopped: false,
        calm_inputs: 0,
    };
    let end = match process.drive(trace) {
        Ok(view) => ProcessEnd::Stopped(Box::new(view)),
        Err(EarlyEnd(end)) => end,
    };
    if let Some((call, ..)) = process.call.take() {
        // A process that ends in an order cuts its call; one that is killed leaves it with the gateway.
        if !matches!(end, ProcessEnd::Killed(_)) {
            process.environment.provider.cancel(call);
        }
    }
    if matches!(end, ProcessEnd::Stopped(_) | ProcessEnd::Quiet(_)) {
        journal.close(&owner).expect("an end in order");
    }
    end
}

impl Process<'_> {
    fn drive(&mut self, trace: &mut dyn FnMut(String)) -> Result<LoopView, EarlyEnd> {
        if self.environment.suspended {
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
            if self.environment.calm {
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
            self.environment.now,
            self.environment.skew,
            self.timer.at().map(|at| at.to_string()),
            self.environment.epoch,
            view.turn,
            view.state,
            self.call.map(|(id, ..)| id.to_string()),
            self.runs.keys().map(ToString::to_string).collect::<Vec<_>>(),
            view.waiting_tasks,
            view.goal.map(|goal| (goal.steps, goal.criteria)),
        )
    }

    /// Once everything works: helps a loop that waits for a person, and ends when nothing is left to do.
    fn calm(&mut self) -> Result<(), EarlyEnd> {
        let view = self.steps.view();
        self.calm_inputs += 1;
        assert!(
            self.calm_inputs < MAX_CALM_INPUTS,
            "the loop stands still or never ends: {view:?}"
        );
        let needs_help = view.state == LoopState::Paused && view.reasons.iter().any(|held| held.until.is_none());
        if needs_help && view.gates.is_empty() && self.calm_inputs.is_multiple_of(10) {
            for event in self.environment.help() {
                self.handle(event)?;
            }
        }
        let is_busy = self.call.is_some()
            || !self.runs.is_empty()
            || self.sending.is_some()
            || self.waiting_responses > 0
            || self.environment.has_pending()
            || self.environment.invariants.is_busy()
            || !view.gates.is_empty();
        let rests = view.state == LoopState::Sleeping && self.schedule.mode != AgentMode::Goal;
        if rests && !is_busy {
            return Err(EarlyEnd(ProcessEnd::Quiet(Box::new(view))));
        }
        Ok(())
    }

    fn begin(&mut self) -> Result<(), EarlyEnd> {
        if self.environment.silence() >= seconds(SILENT) {
            self.link = LinkPhase::Silent;
        }
        let tools = schedule::tools();
        self.feed(EngineInput::ToolsChanged {
            tools,
            silent: Vec::new(),
        })?;
        let open = self.environment.open_requests();
        self.environment.loop_learns_of_requests();
        self.feed(EngineInput::Started {
            agent: "agent".into(),
            epoch: self.environment.epoch,
            known: KnownTotals {
                turn: self.environment.known.turn,
                counts: self.environment.known.counts.clone(),
            },
            budget: self.environment.budget.clone(),
            link_silent: self.link == LinkPhase::Silent,
            open,
        })?;
        self.repeat_requests()?;
        self.waiting_responses = self.steps.count_responses().expect("a journal");
        self.send_response();
        Ok(())
    }

    /// The loop receives the open requests, in the order of the directives.
    fn repeat_requests(&mut self) -> Result<(), EarlyEnd> {
        let OpenRequests { wake, resume, stop } = self.environment.open_requests();
        let wake = wake.map(OutsideEvent::Wake);
        let resume = resume.map(OutsideEvent::Resume);
        let stop = stop.map(OutsideEvent::Stop);
        for request in wake.into_iter().chain(resume).chain(stop) {
            self.handle(request)?;
        }
        Ok(())
    }

    /// Handles the next event: one from outside, or what is due first.
    fn next(&mut self) -> Result<(), EarlyEnd> {
        if let Some(event) = self.environment.draw_event(self.stop.is_none()) {
            return self.handle(event);
        }
        let link_back = self.environment.contact_at;
        let moments = [
            self.call.and_then(|(id, ..)| self.environment.provider.ends_at(id)),
            self.runs.values().map(|(at, ..)| *at).min(),
            self.environment
                .servers
                .next_answer(&self.given_answers)
                .filter(|_| self.environment.has_link()),
            self.timer.at().map(|at| at - self.environment.skew),
            self.sending.as_ref().map(|(at, _)| *at),
            self.drain_until,
            self.scale_down_due().map(|at| at - self.environment.skew),
            link_back,
            self.lease_ends(),
        ];
        let Some(next) = moments.into_iter().flatten().min() else {
            // Nothing is under way, and nothing will happen without an event from outside.
            assert!(
                !self.environment.calm || !self.is_schedule_open(),
                "the loop waits for nothing: {:?}",
                self.steps.view()
            );
            let to = self.environment.now + seconds(600);
            self.environment.pass(to);
            return Ok(());
        };
        self.environment.pass(next);
        self.check_link()?;
        self.due()
    }

    fn is_schedule_open(&self) -> bool {
        self.schedule.mode == AgentMode::Goal || self.environment.invariants.is_busy()
    }

    /// What has ended by now.
    fn due(&mut self) -> Result<(), EarlyEnd> {
        let now = self.environment.now;
        if let Some((call, purpose, criterion)) = self.call
            && let Some(end) = self.environment.provider.end_of(call)
        {
            self.call = None;
            return match end {
                Ok(answer) => {
                    let heard = CheckInput::Answer(call, purpose, Box::new(answer.clone()), criterion);
                    self.feed_heard(EngineInput::Answered { call, answer }, &heard)
                }
                Err(failure) => self.feed(EngineInput::Failed { call, failure }),
            };
        }
        let ended = self.runs.iter().find(|(_, (at, ..))| *at <= now).map(|(run, _)| *run);
        if let Some(run) = ended
            && let Some((_, sent, outcome)) = self.runs.remove(&run)
        {
            let heard = CheckInput::Ran(Box::new(sent), outcome.clone());
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
        if self.environment.has_link()
            && let Some(answer) = self.environment.servers.answer(&self.given_answers, now)
        {
            self.given_answers.push(answer.clone());
            return self.feed(EngineInput::GateAnswered(answer));
        }
        if self.sending.as_ref().is_some_and(|(at, _)| *at <= now) {
            return self.respond();
        }
        if self.drain_until.is_some_and(|at| at <= now) {
            self.drain_until = None;
            return self.feed(EngineInput::DrainEnded);
        }
        if self.scale_down_due().is_some_and(|at| at <= self.environment.wall()) {
            return self.feed(EngineInput::ScaleDown);
        }
        Ok(())
    }

    fn handle(&mut self, event: OutsideEvent) -> Result<(), EarlyEnd> {
        if let OutsideEvent::Wake(_) | OutsideEvent::Resume(_) | OutsideEvent::Stop(_) = event {
            super::note(format!("a user: {event:?}"));
        }
        match event {
            OutsideEvent::Request(offer) => self.take_task(offer),
            OutsideEvent::Deliver(delivery) => self.take_delivery(&delivery),
            OutsideEvent::Wake(token) => self.feed(EngineInput::WakeRequested { token }),
            OutsideEvent::Resume(token) => self.feed(EngineInput::ResumeRequested { token }),
            OutsideEvent::Stop(token) => {
                self.environment.loop_learns_of_requests();
                self.feed(EngineInput::StopRequested { token })
            }
            OutsideEvent::Budget(budget) => self.feed(EngineInput::BudgetChanged { budget }),
            OutsideEvent::Terminate => self.stop(StopCause::Drain),
            OutsideEvent::Suspend => self.stop(StopCause::Suspend),
            OutsideEvent::Full(pages) => {
                self.steps.limit_pages(pages);
                self.environment.was_full = true;
                Ok(())
            }
            OutsideEvent::Again => match self.last.clone() {
                Some(input) => self.feed(input),
                None => Ok(()),
            },
            OutsideEvent::Clock | OutsideEvent::Nothing => self.due(),
        }
    }

    fn lease_ends(&self) -> Option<Timestamp> {
        let limit = match self.link {
            LinkPhase::Fresh => SILENT,
            LinkPhase::Silent => LOST,
            LinkPhase::Lost => return None,
        };
        let left = seconds(limit) - self.environment.silence();
        (!self.environment.has_link()).then(|| self.environment.now + left)
    }

    /// Tells the loop of each threshold of the run lease that has passed.
    fn check_link(&mut self) -> Result<(), EarlyEnd> {
        if self.link > LinkPhase::Fresh && self.environment.has_link() {
            self.link = LinkPhase::Fresh;
            self.feed(EngineInput::LinkBack)?;
        }
        if self.environment.has_link() && std::mem::take(&mut self.environment.has_news) {
            self.repeat_requests()?;
        }
        if self.link < LinkPhase::Silent && self.environment.silence() >= seconds(SILENT) {
            self.link = LinkPhase::Silent;
            self.feed(EngineInput::LinkSilent)?;
        }
        if self.link < LinkPhase::Lost && self.environment.silence() >= seconds(LOST) {
            self.link = LinkPhase::Lost;
            self.feed(EngineInput::LinkLost)?;
        }
        Ok(())
    }

    fn check_clocks(&mut self) -> Result<(), EarlyEnd> {
        let wall = self.environment.wall();
        let set_back = wall < self.looked;
        self.looked = wall;
        if self.timer.fires(wall) || set_back {
            self.feed(EngineInput::Timer)?;
        }
        self.check_link()
    }

    fn stop(&mut self, cause: StopCause) -> Result<(), EarlyEnd> {
        if self.stopped || self.stop == Some(cause) {
            return Ok(());
        }
        if self.stop != Some(StopCause::Drain) {
            self.stop = Some(cause);
        }
        let until = self.environment.now + seconds(DRAIN);
        self.drain_until.get_or_insert(until);
        self.feed(EngineInput::Stop { cause })
    }

    fn scale_down_due(&self) -> Option<Timestamp> {
        let needs_pod = self.stop.is_some() || self.waiting_responses > 0 || self.sensors.needs_pod();
        self.steps.scale_down_due().filter(|_| !needs_pod)
    }

    fn feed(&mut self, input: EngineInput) -> Result<(), EarlyEnd> {
        self.feed_heard(input, &CheckInput::Nothing)
    }

    fn feed_heard(&mut self, input: EngineInput, heard: &CheckInput) -> Result<(), EarlyEnd> {
        if let EngineInput::Answered { .. } | EngineInput::ToolFinished { .. } | EngineInput::GateAnswered(_) = &input {
            self.last = Some(input.clone());
        }
        let fate = self.fate();
        let before = self.before(fate)?;
        let taken = self.steps.take(self.environment.wall(), input);
        self.follow(taken, heard, (fate, before))
    }
}
