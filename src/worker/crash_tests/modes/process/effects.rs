//! A step is committed and then carried out, or the process is killed somewhere in it.

use super::{EarlyEnd, KillPoint, LOST, Process, ProcessEnd};
use crate::api::agent::AgentMode;
use crate::engine::tool::{ToolOutcome, ToolRun};
use crate::engine::{EngineEffect, EngineInput, RecordKind};
use crate::worker::crash_tests::files::Files;
use crate::worker::crash_tests::modes::injected_bugs::Broken;
use crate::worker::crash_tests::modes::invariants::CheckInput;
use crate::worker::crash_tests::modes::loop_environment::seconds;
use crate::worker::crash_tests::modes::provider::CallRequest;
use crate::worker::crash_tests::modes::schedule::Criterion;
use crate::worker::crash_tests::modes::servers::{RunContext, forged};
use crate::worker::journaled_engine::StepOutcome;

impl Process<'_> {
    pub(super) fn fate(&mut self) -> KillPoint {
        self.environment.figures.inputs += 1;
        let environment = &mut *self.environment;
        if environment.figures.inputs >= environment.schedule.steps && !environment.calm {
            environment.heal();
        }
        if environment.calm || environment.random.range(0, 1000) >= environment.schedule.kills {
            return KillPoint::Lives;
        }
        match environment.random.index(4) {
            0 => KillPoint::Before,
            1 => KillPoint::Torn(environment.random.index(101)),
            _ => KillPoint::Done(environment.random.index(3)),
        }
    }

    /// The files before a step, if it is torn.
    pub(super) fn before(&mut self, fate: KillPoint) -> Result<Option<Files>, EarlyEnd> {
        match fate {
            KillPoint::Before => Err(self.killed(Files::of(&self.dir))),
            KillPoint::Torn(_) => Ok(Some(Files::of(&self.dir))),
            KillPoint::Lives | KillPoint::Done(_) => Ok(None),
        }
    }

    pub(super) fn killed(&mut self, files: Files) -> EarlyEnd {
        self.environment.figures.kills += 1;
        EarlyEnd(ProcessEnd::Killed(files))
    }

    pub(super) fn follow(
        &mut self,
        taken: StepOutcome,
        heard: &CheckInput,
        (fate, before): (KillPoint, Option<Files>),
    ) -> Result<(), EarlyEnd> {
        let StepOutcome { actions, lines, result } = taken;
        if let (KillPoint::Torn(percent), Some(before)) = (fate, before) {
            let left = before.torn(&Files::of(&self.dir), percent);
            if self.environment.is_broken(Broken::RespondsBeforeCommit) {
                let waiting = self.steps.next_response().expect("a journal");
                waiting.map(|waiting| self.environment.respond(&waiting.response));
            }
            if self.environment.is_broken(Broken::ActsBeforeCommit) {
                for action in actions {
                    self.act(action, false);
                }
            }
            return Err(self.killed(left));
        }
        let begins = lines.iter().any(|line| line.kind == RecordKind::TurnStarted);
        assert!(
            !begins || !self.environment.is_stopped,
            "a turn begins in a loop that a user has stopped"
        );
        if result.is_ok() || !lines.is_empty() {
            let invariants = &mut self.environment.invariants;
            let is_request = invariants.current().is_some();
            invariants.committed(heard, &lines);
            if self.schedule.mode == AgentMode::Goal {
                invariants.denials.committed(&lines, &self.steps.view(), is_request);
            }
        }
        // A disk or a process can stand still between the commit and the effects.
        let is_slow = !self.environment.calm && self.environment.random.percent(1);
        if is_slow {
            let contact = (self.environment.now, self.environment.wall());
            self.environment.contact.get_or_insert(contact);
            let to = self.environment.now + seconds(self.environment.random.range(5, 100));
            self.environment.now = to;
            self.environment.contact_at.get_or_insert(to);
        }
        let is_new = lines
            .iter()
            .any(|line| matches!(line.kind, RecordKind::CallStarted | RecordKind::ToolIntent));
        let lost = is_new && self.environment.silence() >= seconds(LOST);
        let mut done = 0;
        for action in actions {
            let outward = !matches!(
                action,
                EngineEffect::SetTimer(_) | EngineEffect::Report | EngineEffect::Stopped
            );
            if fate == KillPoint::Done(done) {
                return Err(self.killed(Files::of(&self.dir)));
            }
            self.act(action, lost);
            done += usize::from(outward);
        }
        if is_slow {
            let now = self.environment.now;
            self.environment.pass(now);
        }
        if result.is_err() {
            return Err(EarlyEnd(ProcessEnd::Failed));
        }
        let ended = lines.iter().filter(|line| line.kind == RecordKind::TaskEnded).count();
        if ended > 0 {
            if self.schedule.mode == AgentMode::Task && self.schedule.has_receiver {
                self.waiting_responses += ended;
            }
            self.send_response();
        }
        if fate != KillPoint::Lives {
            return Err(self.killed(Files::of(&self.dir)));
        }
        let view = self.steps.view();
        let environment = &mut *self.environment;
        environment
            .servers
            .see(&view, environment.person(), environment.now, &mut environment.random);
        if environment.is_broken(Broken::ForgesApproval)
            && let Some(open) = view.gates.first()
            && !self.given_answers.contains(&forged(open))
        {
            let answer = forged(open);
            self.given_answers.push(answer.clone());
            return self.feed(EngineInput::GateAnswered(answer));
        }
        let is_saved = !lines.is_empty() && !environment.calm && environment.random.range(0, 1000) < 15;
        if is_saved {
            let files = Files::of(&self.dir);
            self.environment.save(files);
        }
        Ok(())
    }

    fn act(&mut self, action: EngineEffect, lost: bool) {
        let now = self.environment.now;
        match action {
            EngineEffect::Record(_) => panic!("a record among the actions"),
            EngineEffect::CallModel {
                call,
                purpose,
                messages,
                ..
            } => {
                self.environment.invariants.called(call);
                let lost = lost || self.environment.silence() >= seconds(LOST);
                let asked = CallRequest {
                    id: call,
                    purpose,
                    messages: &messages,
                    now,
                    schedule: &self.schedule,
                    calm: self.environment.calm,
                    lost,
                };
                self.environment.figures.calls += 1;
                self.environment.provider.call(&asked, &mut self.environment.random);
                let text = format!("{:?}", messages.last());
                let questions = self
                    .schedule
                    .criteria
                    .iter()
                    .filter(|one| matches!(one, Criterion::Judge(_)));
                let judged = questions.copied().find(|one| text.contains(&one.word()));
                self.call = Some((call, purpose, judged));
            }
            EngineEffect::CancelCall { call } => {
                self.environment.provider.cancel(call);
                self.call = None;
            }
            EngineEffect::RunTool(run, _) => self.run(run, lost),
            EngineEffect::CancelTool(run) => {
                self.runs.remove(&run);
            }
            EngineEffect::Acknowledge { call } => self.environment.provider.acknowledge(call),
            EngineEffect::SetTimer(at) => {
                let is_lost = self.environment.is_broken(Broken::LosesTimer) && self.environment.random.percent(20);
                self.timer.set(at.filter(|_| !is_lost));
            }
            EngineEffect::Report => {
                let view = self.steps.view();
                self.environment.report(&view);
            }
            EngineEffect::Stopped => {
                self.stopped = true;
                let view = self.steps.view();
                self.environment.report_end(&view);
            }
        }
    }

    fn run(&mut self, run: ToolRun, lost: bool) {
        let now = self.environment.now;
        if lost {
            let message = "no contact".to_owned();
            self.runs
                .insert(run.id, (now, run, ToolOutcome::Unavailable { message }));
            return;
        }
        self.environment.invariants.sent(&run);
        self.environment.figures.runs += 1;
        let environment = &mut *self.environment;
        let moment = RunContext {
            now,
            calm: environment.calm,
            lives: environment.figures.lives,
        };
        let (takes, outcome) = environment.servers.run(&run, moment, &mut environment.random);
        if environment.is_broken(Broken::RepeatsRun) && environment.random.percent(10) {
            environment.servers.run(&run, moment, &mut environment.random);
        }
        self.runs.insert(run.id, (now + seconds(takes), run, outcome));
    }
}
