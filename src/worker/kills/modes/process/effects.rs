//! A step is committed and then carried out, or the process is killed somewhere in it.

use super::{End, Fate, LOST, Process, Stop};
use crate::api::agent::AgentMode;
use crate::engine::tool::{ToolOutcome, ToolRun};
use crate::engine::{EngineEffect, EngineInput, RecordKind};
use crate::worker::journaled_engine::StepOutcome;
use crate::worker::kills::files::Files;
use crate::worker::kills::modes::broken::Broken;
use crate::worker::kills::modes::outside::seconds;
use crate::worker::kills::modes::provider::Asked;
use crate::worker::kills::modes::referee::Heard;
use crate::worker::kills::modes::servers::{Moment, forged};
use crate::worker::kills::modes::story::Criterion;

impl Process<'_> {
    pub(super) fn fate(&mut self) -> Fate {
        self.world.figures.inputs += 1;
        let world = &mut *self.world;
        if world.figures.inputs >= world.story.steps && !world.calm {
            world.heal();
        }
        if world.calm || world.random.range(0, 1000) >= world.story.kills {
            return Fate::Lives;
        }
        match world.random.index(4) {
            0 => Fate::Before,
            1 => Fate::Torn(world.random.index(101)),
            _ => Fate::Done(world.random.index(3)),
        }
    }

    /// The files before a step, if it is torn.
    pub(super) fn before(&mut self, fate: Fate) -> Result<Option<Files>, Stop> {
        match fate {
            Fate::Before => Err(self.killed(Files::of(&self.dir))),
            Fate::Torn(_) => Ok(Some(Files::of(&self.dir))),
            Fate::Lives | Fate::Done(_) => Ok(None),
        }
    }

    pub(super) fn killed(&mut self, files: Files) -> Stop {
        self.world.figures.kills += 1;
        Stop(End::Killed(files))
    }

    pub(super) fn follow(
        &mut self,
        taken: StepOutcome,
        heard: &Heard,
        (fate, before): (Fate, Option<Files>),
    ) -> Result<(), Stop> {
        let StepOutcome { actions, lines, result } = taken;
        if let (Fate::Torn(percent), Some(before)) = (fate, before) {
            let left = before.torn(&Files::of(&self.dir), percent);
            if self.world.is_broken(Broken::RespondsBeforeCommit) {
                let waiting = self.steps.next_response().expect("a journal");
                waiting.map(|waiting| self.world.respond(&waiting.response));
            }
            if self.world.is_broken(Broken::ActsBeforeCommit) {
                for action in actions {
                    self.act(action, false);
                }
            }
            return Err(self.killed(left));
        }
        let begins = lines.iter().any(|line| line.kind == RecordKind::TurnStarted);
        assert!(
            !begins || !self.world.is_stopped,
            "a turn begins in a loop that a user has stopped"
        );
        if result.is_ok() || !lines.is_empty() {
            self.world.referee.committed(heard, &lines);
        }
        // A disk or a process can stand still between the commit and the effects.
        let is_slow = !self.world.calm && self.world.random.percent(1);
        if is_slow {
            let contact = (self.world.now, self.world.wall());
            self.world.contact.get_or_insert(contact);
            let to = self.world.now + seconds(self.world.random.range(5, 100));
            self.world.now = to;
            self.world.contact_at.get_or_insert(to);
        }
        let is_new = lines
            .iter()
            .any(|line| matches!(line.kind, RecordKind::CallStarted | RecordKind::ToolIntent));
        let lost = is_new && self.world.silence() >= seconds(LOST);
        let mut done = 0;
        for action in actions {
            let outward = !matches!(
                action,
                EngineEffect::SetTimer(_) | EngineEffect::Report | EngineEffect::Stopped
            );
            if fate == Fate::Done(done) {
                return Err(self.killed(Files::of(&self.dir)));
            }
            self.act(action, lost);
            done += usize::from(outward);
        }
        if is_slow {
            let now = self.world.now;
            self.world.pass(now);
        }
        if result.is_err() {
            return Err(Stop(End::Failed));
        }
        let ended = lines.iter().filter(|line| line.kind == RecordKind::TaskEnded).count();
        if ended > 0 {
            if self.story.mode == AgentMode::Task && self.story.has_receiver {
                self.waiting_responses += ended;
            }
            self.send_response();
        }
        if fate != Fate::Lives {
            return Err(self.killed(Files::of(&self.dir)));
        }
        let view = self.steps.view();
        let world = &mut *self.world;
        world.servers.see(&view, world.calm, world.now, &mut world.random);
        if world.is_broken(Broken::ForgesApproval)
            && let Some(open) = view.gates.first()
            && !self.told.contains(&forged(open))
        {
            let answer = forged(open);
            self.told.push(answer.clone());
            return self.feed(EngineInput::GateAnswered(answer));
        }
        let is_saved = !lines.is_empty() && !world.calm && world.random.range(0, 1000) < 15;
        if is_saved {
            let files = Files::of(&self.dir);
            self.world.save(files);
        }
        Ok(())
    }

    fn act(&mut self, action: EngineEffect, lost: bool) {
        let now = self.world.now;
        match action {
            EngineEffect::Record(_) => panic!("a record among the actions"),
            EngineEffect::CallModel {
                call,
                purpose,
                messages,
                ..
            } => {
                self.world.referee.called(call);
                let lost = lost || self.world.silence() >= seconds(LOST);
                let asked = Asked {
                    id: call,
                    purpose,
                    messages: &messages,
                    now,
                    story: &self.story,
                    calm: self.world.calm,
                    lost,
                };
                self.world.figures.calls += 1;
                self.world.provider.call(&asked, &mut self.world.random);
                let text = format!("{:?}", messages.last());
                let questions = self
                    .story
                    .criteria
                    .iter()
                    .filter(|one| matches!(one, Criterion::Judge(_)));
                let judged = questions.copied().find(|one| text.contains(&one.word()));
                self.call = Some((call, purpose, judged));
            }
            EngineEffect::CancelCall { call } => {
                self.world.provider.cancel(call);
                self.call = None;
            }
            EngineEffect::RunTool(run, _) => self.run(run, lost),
            EngineEffect::CancelTool(run) => {
                self.runs.remove(&run);
            }
            EngineEffect::Acknowledge { call } => self.world.provider.acknowledge(call),
            EngineEffect::SetTimer(at) => {
                let is_lost = self.world.is_broken(Broken::LosesTimer) && self.world.random.percent(20);
                self.timer.set(at.filter(|_| !is_lost));
            }
            EngineEffect::Report => {
                let view = self.steps.view();
                self.world.report(&view);
            }
            EngineEffect::Stopped => {
                self.stopped = true;
                let view = self.steps.view();
                self.world.report_end(&view);
            }
        }
    }

    fn run(&mut self, run: ToolRun, lost: bool) {
        let now = self.world.now;
        if lost {
            let message = "no contact".to_owned();
            self.runs
                .insert(run.id, (now, run, ToolOutcome::Unavailable { message }));
            return;
        }
        self.world.referee.sent(&run);
        self.world.figures.runs += 1;
        let world = &mut *self.world;
        let moment = Moment {
            now,
            calm: world.calm,
            lives: world.figures.lives,
        };
        let (takes, outcome) = world.servers.run(&run, moment, &mut world.random);
        if world.is_broken(Broken::RepeatsRun) && world.random.percent(10) {
            world.servers.run(&run, moment, &mut world.random);
        }
        self.runs.insert(run.id, (now + seconds(takes), run, outcome));
    }
}
