//! The life of one worker on a real journal: starts like the real worker, drives the real steps, and ends when its loop
//! ends or when it is killed.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use jiff::Timestamp;

use super::folder::Folder;
use super::world::{self, Word, World};
use crate::engine::machine::{Engine, LoopView};
use crate::engine::settings::ModeSettings;
use crate::engine::tool::{ToolOutcome, ToolRunId};
use crate::engine::{CallId, CallPurpose, EngineEffect, EngineInput, KnownTotals, OpenRequests, StopCause};
use crate::worker::journal::{Journal, JournalOwner};
use crate::worker::journaled_engine::{JournaledEngine, StepOutcome};
use crate::worker::sensors::{LoopSensors, ScoringStep, SensorTransition};

/// Maximum number of inputs in one life: a loop that needs more never ends.
const MOST_INPUTS: usize = 5_000;

/// A point at which a worker can be killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moment {
    /// After receiving an input, before committing anything.
    Before,
    /// After the commit, and after carrying out this many effects.
    Done(usize),
}

/// Observes a life, and may kill it.
pub(super) trait Watcher {
    /// Returns false to kill the worker now.
    fn lives(&mut self, moment: Moment, world: &World, dir: &Path) -> bool;

    /// Called when a turn's first call is sent, with the fingerprint of the loop. Returns false to end the observation.
    fn goes_on(&mut self, _fingerprint: u64) -> bool {
        true
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum End {
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
struct Stop(End);

struct Life<'a> {
    steps: JournaledEngine<'a>,
    sensors: LoopSensors,
    /// The workspace; `None` if no Sensor watches it.
    folder: Option<Folder>,
    world: &'a mut World,
    watcher: &'a mut dyn Watcher,
    dir: PathBuf,
    timer: Option<Timestamp>,
    asked: Option<CallId>,
    runs: BTreeMap<ToolRunId, (Timestamp, ToolOutcome)>,
    /// Gates whose answers this worker received.
    answered: BTreeSet<String>,
    stopped: bool,
}

/// Runs one life. Closes the journal unless the worker was killed.
pub(super) fn live(world: &mut World, dir: &Path, watcher: &mut dyn Watcher) -> End {
    let owner = JournalOwner {
        agent_uid: "agent".into(),
        pod_uid: format!("pod-{}", world.epoch),
        epoch: world.epoch,
    };
    let (mut journal, restored) = Journal::open(dir, &owner).expect("a journal");
    world.hear_told(&restored.untold);
    journal.claim(&owner).expect("a journal");
    // Checkpoint often, so that kills also hit logs that were just restarted.
    journal.checkpoint_every(60);
    let settings = world.script.settings.clone();
    let sensors = LoopSensors::restore(restored.kept).with_workspace(true);
    let mut engine = match restored.snapshot {
        Some(snapshot) => Engine::restore(settings, snapshot, restored.transcript),
        None => Engine::new(settings),
    };
    engine.restore_tasks(restored.tasks);
    let runs_tasks = matches!(world.script.settings.mode, ModeSettings::Task(_));
    journal.set_response_receiver(runs_tasks).expect("a journal");
    for (field, value, at) in sensors.values() {
        engine.restore_field(field, value.clone(), at);
    }
    let mut life = Life {
        sensors,
        folder: None,
        steps: JournaledEngine::new(engine, &mut journal),
        world,
        watcher,
        dir: dir.into(),
        timer: None,
        asked: None,
        runs: BTreeMap::new(),
        answered: BTreeSet::new(),
        stopped: false,
    };
    let end = match life.live() {
        Ok(view) if view.outcome.is_none() => End::Replaced,
        Ok(view) => End::Over(Box::new(view)),
        Err(Stop(end)) => end,
    };
    if end != End::Killed {
        journal.close(&owner).expect("an end in order");
    }
    end
}

impl Life<'_> {
    fn live(&mut self) -> Result<LoopView, Stop> {
        let tools = self.world.script.tools();
        self.feed(EngineInput::ToolsChanged {
            tools,
            silent: Vec::new(),
        })?;
        let budget = self.world.budget.clone();
        self.feed(EngineInput::Started {
            agent: "agent".into(),
            epoch: self.world.epoch,
            known: KnownTotals::default(),
            budget,
            link_silent: self.world.link_lost,
            open: OpenRequests::default(),
        })?;
        let (wake, resume, stop) = (
            self.world.wake.clone(),
            self.world.resume.clone(),
            self.world.stop.clone(),
        );
        let words = [wake.map(Word::Wake), resume.map(Word::Resume), stop.map(Word::Stop)];
        let lost = self.world.link_lost.then_some(Word::LinkLost);
        let notices: Vec<Word> = self.world.notices.iter().cloned().map(Word::Notice).collect();
        let asked: Vec<Word> = self.world.asked.iter().cloned().map(Word::Request).collect();
        for word in words.into_iter().flatten().chain(notices).chain(asked).chain(lost) {
            self.hear(word)?;
        }
        self.respond()?;
        let terms = self.world.script.sensors.clone();
        for begun in self.sensors.apply_terms(self.world.now, Some(&terms)) {
            self.sense(begun)?;
        }
        if terms.iter().any(|terms| terms.spec.source.watch.is_some()) {
            self.folder = Some(Folder::new(&self.sensors, &self.world.files));
        }
        for _ in 0..MOST_INPUTS {
            if self.stopped {
                return Ok(self.steps.view());
            }
            self.next()?;
        }
        panic!("the loop never ends: {:?}", self.steps.view());
    }

    /// Handles the next event in virtual time.
    fn next(&mut self) -> Result<(), Stop> {
        if let Some(sighting) = self.folder.as_mut().and_then(Folder::sees) {
            let happened = self.sensors.apply_watch_report(sighting);
            return happened.map_or(Ok(()), |happened| self.sense(happened));
        }
        let (scored, scoring) = (self.steps.scored(), self.steps.is_scoring());
        match self.sensors.step(self.world.now, scored, scoring) {
            Some(ScoringStep::Happened(happened)) => return self.sense(*happened),
            Some(ScoringStep::Hear(input)) => return self.feed(*input),
            None => {}
        }
        let moments = [
            self.asked.map(|id| self.world.ends_at(id)),
            self.runs.values().map(|(at, _)| *at).min(),
            self.world.next_happening(),
            self.world.next_answer(&self.answered),
            self.timer,
            self.sensors.next(self.world.now),
            self.steps.scale_down_due(),
        ];
        let Some(next) = moments.into_iter().flatten().min() else {
            panic!("the loop waits for nothing: {:?}", self.steps.view());
        };
        self.world.pass(next);
        if let Some(call) = self.asked
            && let Some(end) = self.world.end_of(call)
        {
            self.asked = None;
            return self.feed(match end {
                Ok(answer) => EngineInput::Answered { call, answer },
                Err(failure) => EngineInput::Failed { call, failure },
            });
        }
        let ended = self.runs.iter().find(|(_, (at, _))| *at <= self.world.now);
        if let Some(run) = ended.map(|(run, _)| *run)
            && let Some((_, outcome)) = self.runs.remove(&run)
        {
            return self.feed(EngineInput::ToolFinished {
                run,
                outcome,
                artifacts: crate::engine::tool::ResultArtifacts::default(),
            });
        }
        if let Some(answer) = self.world.answer_to_gate(&self.answered) {
            self.answered.insert(answer.gate.clone());
            return self.feed(EngineInput::GateAnswered(answer));
        }
        if let Some(word) = self.world.happen() {
            return self.hear(word);
        }
        if let Some(happened) = self.sensors.due(self.world.now) {
            return self.sense(happened);
        }
        if self.steps.scale_down_due().is_some_and(|due| due <= self.world.now) {
            return self.feed(EngineInput::ScaleDown);
        }
        self.timer = None;
        self.feed(EngineInput::Timer)
    }

    /// Does what the driver does.
    fn sense(&mut self, happened: SensorTransition) -> Result<(), Stop> {
        if !self.steps.accepts_sensor_events() {
            return Ok(());
        }
        if let Some(EngineInput::Sensed(event)) = happened.input() {
            self.world.tell(event);
        }
        self.pause(Moment::Before)?;
        let input = happened.input().cloned();
        let taken = self.steps.sense(self.world.now, input, &happened.kept());
        self.sensors.confirm(happened);
        if let Some(folder) = &mut self.folder {
            folder.look();
        }
        self.follow(taken)
    }

    fn hear(&mut self, word: Word) -> Result<(), Stop> {
        match word {
            Word::Wake(token) => self.feed(EngineInput::WakeRequested { token }),
            Word::Stop(token) => self.feed(EngineInput::StopRequested { token }),
            Word::Resume(token) => self.feed(EngineInput::ResumeRequested { token }),
            Word::Budget(budget) => self.feed(EngineInput::BudgetChanged { budget }),
            Word::Notice(notice) => self.feed(EngineInput::Sensed(world::event(notice))),
            Word::Request(offer) => {
                if self.steps.find_task(&offer.id).expect("a journal").is_none()
                    && self.steps.accepts_task_of(&offer.origin)
                {
                    self.feed(EngineInput::TaskOffered(offer))?;
                }
                Ok(())
            }
            Word::LinkLost => {
                self.feed(EngineInput::LinkSilent)?;
                self.feed(EngineInput::LinkLost)
            }
            Word::LinkBack => self.feed(EngineInput::LinkBack),
            Word::NewPod => self.feed(EngineInput::Stop {
                cause: StopCause::Drain,
            }),
            Word::Files => {
                if let Some(folder) = &mut self.folder {
                    folder.put(&self.world.files);
                }
                Ok(())
            }
        }
    }

    /// Responses of mode Task are delivered, one after the other.
    fn respond(&mut self) -> Result<(), Stop> {
        while let Some(waiting) = self.steps.next_response().expect("a journal") {
            self.pause(Moment::Before)?;
            self.world.receive(&waiting.response);
            self.steps.response_delivered(waiting.seq).expect("a journal");
            self.pause(Moment::Done(0))?;
        }
        Ok(())
    }

    fn feed(&mut self, input: EngineInput) -> Result<(), Stop> {
        self.pause(Moment::Before)?;
        let taken = self.steps.take(self.world.now, input);
        self.follow(taken)
    }

    fn follow(&mut self, taken: StepOutcome) -> Result<(), Stop> {
        let StepOutcome { actions, lines, result } = taken;
        result.expect("room on the volume");
        let mut done = 0;
        self.pause(Moment::Done(done))?;
        self.world.hear_told(&lines);
        for action in actions {
            let outward = !matches!(
                action,
                EngineEffect::SetTimer(_) | EngineEffect::Report | EngineEffect::Stopped
            );
            if outward && done > 0 {
                self.pause(Moment::Done(done))?;
            }
            self.act(action)?;
            done += usize::from(outward);
        }
        let view = self.steps.view();
        self.world.see(&view);
        self.respond()
    }

    fn pause(&mut self, moment: Moment) -> Result<(), Stop> {
        if self.watcher.lives(moment, self.world, &self.dir) {
            Ok(())
        } else {
            Err(Stop(End::Killed))
        }
    }

    fn act(&mut self, action: EngineEffect) -> Result<(), Stop> {
        match action {
            EngineEffect::Record(_) => panic!("a record among the actions"),
            EngineEffect::CallModel {
                call,
                purpose,
                messages,
                state,
                ..
            } => {
                self.world.show(call, state.as_deref());
                if call.call == 1 && call.attempt == 1 {
                    let mut hasher = DefaultHasher::new();
                    let snapshot = serde_json::to_string(&self.steps.snapshot()).expect("a snapshot");
                    let prompt = serde_json::to_string(&messages).expect("a prompt");
                    let sensors = serde_json::to_string(&self.sensors.reports()).expect("reports");
                    let files = self.sensors.files();
                    (snapshot, prompt, state, sensors, files, self.world.fingerprint()).hash(&mut hasher);
                    if !self.watcher.goes_on(hasher.finish()) {
                        return Err(Stop(End::Seen));
                    }
                }
                if purpose == CallPurpose::Signal {
                    self.world.score(call, &format!("{:?}", messages.last()));
                } else {
                    self.world.call(call, purpose);
                }
                self.asked = Some(call);
            }
            EngineEffect::CancelCall { call } => panic!("nothing in a script cuts {call}"),
            EngineEffect::RunTool(run, _) => {
                let ended = self.world.run(&run);
                self.runs.insert(run.id, ended);
            }
            EngineEffect::CancelTool(run) => {
                self.runs.remove(&run);
            }
            EngineEffect::Acknowledge { call } => self.world.acknowledge(call),
            EngineEffect::SetTimer(at) => self.timer = at,
            EngineEffect::Report => {}
            EngineEffect::Stopped => self.stopped = true,
        }
        Ok(())
    }
}
