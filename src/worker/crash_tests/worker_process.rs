//! The life of one worker on a real journal: starts like the real worker, drives the real steps, and ends when its loop
//! ends or when it is killed.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use jiff::Timestamp;

use super::environment::{self, DriverInput, SimulatedEnvironment};
use super::folder::Folder;
use crate::engine::machine::{Engine, LoopView};
use crate::engine::settings::ModeSettings;
use crate::engine::tool::{ToolOutcome, ToolRunId};
use crate::engine::{CallId, CallPurpose, EngineEffect, EngineInput, KnownTotals, OpenRequests, StopCause};
use crate::worker::journal::JournalOwner;
use crate::worker::journaled_engine::{JournaledEngine, StepOutcome};
use crate::worker::sensor_receiver::{LoopSensors, ScoringStep, SensorTransition};

/// Maximum number of inputs in one life: a loop that needs more never ends.
const MAX_INPUTS: usize = 5_000;

/// A point at which a worker can be killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KillPoint {
    /// After receiving an input, before committing anything.
    Before,
    /// After the commit, and after carrying out this many effects.
    AfterEffects(usize),
}

/// Observes a life, and may kill it.
pub(super) trait LifeObserver {
    /// Returns false to kill the worker now.
    fn lives(&mut self, moment: KillPoint, environment: &SimulatedEnvironment, dir: &Path) -> bool;

    /// Called when a turn's first call is sent, with the fingerprint of the loop. Returns false to end the observation.
    fn goes_on(&mut self, _fingerprint: u64) -> bool {
        true
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum LifeEnd {
    /// The loop has ended.
    Over(Box<LoopView>),
    /// The watcher killed the worker.
    Killed,
    /// The watcher has seen enough.
    Seen,
    /// The pod was replaced.
    Replaced,
}

/// Ends a life early.
struct EarlyEnd(LifeEnd);

struct WorkerLife<'a> {
    steps: JournaledEngine<'a>,
    sensors: LoopSensors,
    /// The workspace; `None` if no Sensor watches it.
    folder: Option<Folder>,
    environment: &'a mut SimulatedEnvironment,
    watcher: &'a mut dyn LifeObserver,
    dir: PathBuf,
    timer: Option<Timestamp>,
    asked: Option<CallId>,
    runs: BTreeMap<ToolRunId, (Timestamp, ToolOutcome)>,
    /// Gates whose answers this worker received.
    answered: BTreeSet<String>,
    stopped: bool,
}

/// Runs one life. Closes the journal unless the worker was killed.
pub(super) fn live(environment: &mut SimulatedEnvironment, dir: &Path, watcher: &mut dyn LifeObserver) -> LifeEnd {
    let owner = JournalOwner {
        agent_uid: "agent".into(),
        pod_uid: format!("pod-{}", environment.epoch),
        epoch: environment.epoch,
    };
    let (mut journal, restored) = super::reopened(dir, &owner);
    environment.hear_told(&restored.unlogged_lines);
    journal.claim(&owner).expect("a journal");
    // Checkpoint often, so that kills also hit logs that were just restarted.
    journal.checkpoint_every(60);
    let settings = environment.script.settings.clone();
    let sensors = LoopSensors::restore(restored.sensor_records).with_workspace(true);
    let mut engine = match restored.snapshot {
        Some(snapshot) => Engine::restore(settings, snapshot, restored.transcript),
        None => Engine::new(settings),
    };
    engine.restore_tasks(restored.tasks);
    let runs_tasks = matches!(environment.script.settings.mode, ModeSettings::Task(_));
    journal.set_response_receiver(runs_tasks).expect("a journal");
    for (field, value, at) in sensors.values() {
        engine.restore_field(field, value.clone(), at);
    }
    let mut life = WorkerLife {
        sensors,
        folder: None,
        steps: JournaledEngine::new(engine, &mut journal),
        environment,
        watcher,
        dir: dir.into(),
        timer: None,
        asked: None,
        runs: BTreeMap::new(),
        answered: BTreeSet::new(),
        stopped: false,
    };
    let end = match life.live() {
        Ok(view) if view.outcome.is_none() => LifeEnd::Replaced,
        Ok(view) => LifeEnd::Over(Box::new(view)),
        Err(EarlyEnd(end)) => end,
    };
    if end != LifeEnd::Killed {
        journal.close(&owner).expect("an end in order");
    }
    end
}

impl WorkerLife<'_> {
    fn live(&mut self) -> Result<LoopView, EarlyEnd> {
        let tools = self.environment.script.tools();
        self.feed(EngineInput::ToolsChanged {
            tools,
            silent: Vec::new(),
        })?;
        let budget = self.environment.budget.clone();
        self.feed(EngineInput::Started {
            agent: "agent".into(),
            epoch: self.environment.epoch,
            known: KnownTotals::default(),
            budget,
            link_silent: self.environment.link_lost,
            open: OpenRequests::default(),
        })?;
        let (wake, resume, stop) = (
            self.environment.wake.clone(),
            self.environment.resume.clone(),
            self.environment.stop.clone(),
        );
        let words = [
            wake.map(DriverInput::Wake),
            resume.map(DriverInput::Resume),
            stop.map(DriverInput::Stop),
        ];
        let lost = self.environment.link_lost.then_some(DriverInput::LinkLost);
        let notices: Vec<DriverInput> = self
            .environment
            .notices
            .iter()
            .cloned()
            .map(DriverInput::Notice)
            .collect();
        let asked: Vec<DriverInput> = self
            .environment
            .asked
            .iter()
            .cloned()
            .map(DriverInput::Request)
            .collect();
        for word in words.into_iter().flatten().chain(notices).chain(asked).chain(lost) {
            self.hear(word)?;
        }
        self.respond()?;
        let terms = self.environment.script.sensors.clone();
        for begun in self.sensors.apply_terms(self.environment.now, Some(&terms)) {
            self.sense(begun)?;
        }
        if terms.iter().any(|terms| terms.spec.source.watch.is_some()) {
            self.folder = Some(Folder::new(&self.sensors, &self.environment.files));
        }
        for _ in 0..MAX_INPUTS {
            if self.stopped {
                return Ok(self.steps.view());
            }
            self.next()?;
        }
        panic!("the loop never ends: {:?}", self.steps.view());
    }

    /// Handles the next event in virtual time.
    fn next(&mut self) -> Result<(), EarlyEnd> {
        if let Some(sighting) = self.folder.as_mut().and_then(Folder::sees) {
            let happened = self.sensors.apply_watch_report(sighting);
            return happened.map_or(Ok(()), |happened| self.sense(happened));
        }
        let scoring = (self.steps.scored(), self.steps.is_scoring());
        let has_room = |name: &str| self.steps.accepts_events_of(name);
        match self.sensors.step(self.environment.now, scoring, has_room) {
            Some(ScoringStep::Happened(happened)) => return self.sense(*happened),
            Some(ScoringStep::Hear(input)) => return self.feed(*input),
            None => {}
        }
        let moments = [
            self.asked.map(|id| self.environment.ends_at(id)),
            self.runs.values().map(|(at, _)| *at).min(),
            self.environment.next_happening(),
            self.environment.next_answer(&self.answered),
            self.timer,
            self.sensors
                .next(self.environment.now, |name| self.steps.accepts_events_of(name)),
            self.steps.scale_down_due(),
        ];
        let Some(next) = moments.into_iter().flatten().min() else {
            panic!("the loop waits for nothing: {:?}", self.steps.view());
        };
        self.environment.pass(next);
        if let Some(call) = self.asked
            && let Some(end) = self.environment.end_of(call)
        {
            self.asked = None;
            return self.feed(match end {
                Ok(answer) => EngineInput::Answered { call, answer },
                Err(failure) => EngineInput::Failed { call, failure },
            });
        }
        let ended = self.runs.iter().find(|(_, (at, _))| *at <= self.environment.now);
        if let Some(run) = ended.map(|(run, _)| *run)
            && let Some((_, outcome)) = self.runs.remove(&run)
        {
            return self.feed(EngineInput::ToolFinished {
                run,
                outcome,
                artifacts: crate::engine::tool::ResultArtifacts::default(),
            });
        }
        if let Some(answer) = self.environment.answer_to_gate(&self.answered) {
            self.answered.insert(answer.gate.clone());
            return self.feed(EngineInput::GateAnswered(answer));
        }
        if let Some(word) = self.environment.happen() {
            return self.hear(word);
        }
        let steps = &self.steps;
        let due = self
            .sensors
            .due(self.environment.now, |name| steps.accepts_events_of(name));
        if let Some(happened) = due {
            return self.sense(happened);
        }
        if self
            .steps
            .scale_down_due()
            .is_some_and(|due| due <= self.environment.now)
        {
            return self.feed(EngineInput::ScaleDown);
        }
        self.timer = None;
        self.feed(EngineInput::Timer)
    }

    /// Does what the driver does.
    fn sense(&mut self, happened: SensorTransition) -> Result<(), EarlyEnd> {
        if !self.steps.is_live() {
            return Ok(());
        }
        if let Some(EngineInput::Sensed(event)) = happened.input() {
            self.environment.tell(event);
        }
        self.pause(KillPoint::Before)?;
        let input = happened.input().cloned();
        let taken = self.steps.sense(self.environment.now, input, &happened.record());
        self.sensors.confirm(happened);
        if let Some(folder) = &mut self.folder {
            folder.look();
        }
        self.follow(taken)
    }

    fn hear(&mut self, word: DriverInput) -> Result<(), EarlyEnd> {
        match word {
            DriverInput::Wake(token) => self.feed(EngineInput::WakeRequested { token }),
            DriverInput::Stop(token) => self.feed(EngineInput::StopRequested { token }),
            DriverInput::Resume(token) => self.feed(EngineInput::ResumeRequested { token }),
            DriverInput::Budget(budget) => self.feed(EngineInput::BudgetChanged { budget }),
            DriverInput::Notice(notice) => self.feed(EngineInput::Sensed(environment::event(notice))),
            DriverInput::Request(offer) => {
                if self.steps.find_task(&offer.id).expect("a journal").is_none()
                    && self.steps.accepts_task_of(&offer.origin)
                {
                    self.feed(EngineInput::TaskOffered(offer))?;
                }
                Ok(())
            }
            DriverInput::LinkLost => {
                self.feed(EngineInput::LinkSilent)?;
                self.feed(EngineInput::LinkLost)
            }
            DriverInput::LinkBack => self.feed(EngineInput::LinkBack),
            DriverInput::NewPod => self.feed(EngineInput::Stop {
                cause: StopCause::Drain,
            }),
            DriverInput::Files => {
                if let Some(folder) = &mut self.folder {
                    folder.put(&self.environment.files);
                }
                Ok(())
            }
        }
    }

    /// Responses of mode Task are delivered, one after the other.
    fn respond(&mut self) -> Result<(), EarlyEnd> {
        while let Some(waiting) = self.steps.next_response().expect("a journal") {
            self.pause(KillPoint::Before)?;
            self.environment.receive(&waiting.response);
            self.steps.response_delivered(waiting.seq).expect("a journal");
            self.pause(KillPoint::AfterEffects(0))?;
        }
        Ok(())
    }

    fn feed(&mut self, input: EngineInput) -> Result<(), EarlyEnd> {
        self.pause(KillPoint::Before)?;
        let taken = self.steps.take(self.environment.now, input);
        self.follow(taken)
    }

    fn follow(&mut self, taken: StepOutcome) -> Result<(), EarlyEnd> {
        let StepOutcome { actions, lines, result } = taken;
        result.expect("room on the volume");
        let mut done = 0;
        self.pause(KillPoint::AfterEffects(done))?;
        self.environment.hear_told(&lines);
        for action in actions {
            let outward = !matches!(
                action,
                EngineEffect::SetTimer(_) | EngineEffect::Report | EngineEffect::Stopped
            );
            if outward && done > 0 {
                self.pause(KillPoint::AfterEffects(done))?;
            }
            self.act(action)?;
            done += usize::from(outward);
        }
        let view = self.steps.view();
        self.environment.see(&view);
        self.respond()
    }

    fn pause(&mut self, moment: KillPoint) -> Result<(), EarlyEnd> {
        if self.watcher.lives(moment, self.environment, &self.dir) {
            Ok(())
        } else {
            Err(EarlyEnd(LifeEnd::Killed))
        }
    }

    fn act(&mut self, action: EngineEffect) -> Result<(), EarlyEnd> {
        match action {
            EngineEffect::Record(_) => panic!("a record among the actions"),
            EngineEffect::CallModel {
                call,
                purpose,
                messages,
                state,
                ..
            } => {
                self.environment.show(call, state.as_deref());
                if call.call == 1 && call.attempt == 1 {
                    let mut hasher = DefaultHasher::new();
                    let snapshot = serde_json::to_string(&self.steps.snapshot()).expect("a snapshot");
                    let prompt = serde_json::to_string(&messages).expect("a prompt");
                    let sensors = serde_json::to_string(&self.sensors.reports()).expect("reports");
                    let files = self.sensors.files();
                    (snapshot, prompt, state, sensors, files, self.environment.fingerprint()).hash(&mut hasher);
                    if !self.watcher.goes_on(hasher.finish()) {
                        return Err(EarlyEnd(LifeEnd::Seen));
                    }
                }
                if purpose == CallPurpose::Signal {
                    self.environment.score(call, &format!("{:?}", messages.last()));
                } else {
                    self.environment.call(call, purpose);
                }
                self.asked = Some(call);
            }
            EngineEffect::CancelCall { call } => panic!("nothing in a script cuts {call}"),
            EngineEffect::RunTool(run, _) => {
                let ended = self.environment.run(&run);
                self.runs.insert(run.id, ended);
            }
            EngineEffect::CancelTool(run) => {
                self.runs.remove(&run);
            }
            EngineEffect::Acknowledge { call } => self.environment.acknowledge(call),
            EngineEffect::SetTimer(at) => self.timer = at,
            EngineEffect::Report => {}
            EngineEffect::Stopped => self.stopped = true,
        }
        Ok(())
    }
}
