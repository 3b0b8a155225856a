//! The engine: one loop's state, and the one function that changes it. Here: who hears which input, the lifecycle, and
//! what the loop does next. The rules of turns, pauses and sleeps are in files of their own.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};

pub use super::snapshot::EngineSnapshot;
pub use super::view::{DetectedRepetition, LoopView, ReportedPause};

use super::budget::{BudgetState, PROBE_INTERVAL, PROBE_TIMEOUT, ProbeState};
use super::effects::{EffectBuffer, journal_line};
use super::guardrails::idle_timeout::IdleClock;
use super::hot_state::HotState;
use super::snapshot::{ActivePause, CallStep, ChosenSleep, LifecyclePhase};
use super::tool::ToolRunId;
use super::tool_admission::Toolbox;
use super::yield_tool;
use super::{
    CallId, EngineEffect, EngineInput, KnownTotals, RecordKind, StopCause, message::Message, prompt, prompt::Skill,
    settings::EngineSettings, time_math,
};
use crate::api::agent::ExhaustionPolicy;
use crate::api::status::PauseReason;

/// One loop.
#[derive(Clone, Debug)]
pub struct Engine {
    pub(super) settings: EngineSettings,
    pub(super) instructions: String,
    pub(super) skills: Arc<[Skill]>,
    pub(super) transcript: Vec<Arc<Message>>,
    pub(super) state: EngineSnapshot,
    /// This process has handed the open call to the driver and waits for its outcome.
    pub(super) in_flight: bool,
    /// Estimated tokens of the prompt that it handed over.
    pub(super) sent_tokens: Option<u64>,
    /// Uid of the Agent.
    pub(super) agent: String,
    /// What the model may call.
    pub(super) toolbox: Toolbox,
    /// What the sources offer from the next turn on.
    pub(super) next_toolbox: Option<Toolbox>,
    /// Events that can wake the loop; `None`: not known.
    pub(super) wake_events: Option<Vec<String>>,
    /// What is known of the present moment.
    pub(super) hot: HotState,
    /// Runs of tools that this process has handed to the driver and waits for, and when it did.
    pub(super) running: BTreeMap<ToolRunId, Timestamp>,
    /// No contact for so long that no tool with side effects starts.
    pub(super) link_silent: bool,
    /// The moment of the driver's timer.
    timer: Option<Timestamp>,
    /// When a guardrail that depends on the clock alone says something else.
    pub(super) clock_changes: Option<Timestamp>,
    /// Another pod runs the loop: nothing is heard or written any more.
    pub(super) fenced: bool,
}

impl Engine {
    /// A loop that has never run.
    #[must_use]
    pub fn new(settings: EngineSettings) -> Self {
        Self::restore(settings, EngineSnapshot::default(), Vec::<Message>::new())
    }

    /// A loop as its journal left it; feed [`EngineInput::Started`] next.
    #[must_use]
    pub fn restore(
        settings: EngineSettings,
        snapshot: EngineSnapshot,
        transcript: impl IntoIterator<Item = impl Into<Arc<Message>>>,
    ) -> Self {
        Self {
            hot: HotState::new(settings.hot_state.clone()),
            instructions: String::new(),
            skills: Arc::default(),
            transcript: transcript.into_iter().map(Into::into).collect(),
            state: snapshot,
            in_flight: false,
            sent_tokens: None,
            agent: String::new(),
            toolbox: Toolbox::before_any_offer(yield_tool::tool(&settings.rate_limits, None)),
            next_toolbox: None,
            wake_events: None,
            settings,
            running: BTreeMap::new(),
            link_silent: false,
            timer: None,
            clock_changes: None,
            fenced: false,
        }
    }

    /// Takes the newest instructions; used from the next turn on, since a change within a turn would cost all that the
    /// provider has of it in its cache. Never journalled.
    pub fn set_instructions(&mut self, text: String) {
        if self.state.turn.is_none() || self.instructions.is_empty() {
            self.instructions = text;
        }
    }

    /// Takes the newest skills, in the order of the prompt; used from the next turn on. Never journalled.
    pub fn set_skills(&mut self, skills: Arc<[Skill]>) {
        if self.state.turn.is_none() || self.skills.is_empty() {
            self.skills = skills;
        }
    }

    /// What to persist, see the module's contract.
    #[must_use]
    pub fn snapshot(&self) -> EngineSnapshot {
        self.state.clone()
    }

    /// The one transition function. `now` may be earlier than before (a clock that was set back).
    pub fn handle(&mut self, now: Timestamp, input: EngineInput) -> Vec<EngineEffect> {
        if let EngineInput::ToolsChanged { tools, silent } = input {
            self.tools_changed(tools, silent);
            return Vec::new();
        }
        if let EngineInput::WakeEventsChanged { names } = input {
            self.wake_events_changed(names);
            return Vec::new();
        }
        let mut out = EffectBuffer::new(now);
        if self.fenced {
            if matches!(input, EngineInput::Stop { .. }) {
                out.stopped();
            }
            return out.into_effects();
        }
        let before = self.view();
        let last = self.state.last_now;
        self.handle_clock_rollback(now);
        self.dispatch(input, last, &mut out);
        self.advance(&mut out);
        self.count_records(&out);
        self.report_change(&before, &mut out);
        out.into_effects()
    }

    fn dispatch(&mut self, input: EngineInput, last: Option<Timestamp>, out: &mut EffectBuffer) {
        let live = self.is_live();
        if !live && !matches!(input, EngineInput::Started { .. } | EngineInput::Stop { .. }) {
            return;
        }
        match input {
            EngineInput::Started {
                agent,
                epoch,
                known,
                budget,
                link_silent,
            } => {
                self.agent = agent;
                self.link_silent = link_silent;
                self.start(epoch, known, budget, last, out);
            }
            EngineInput::Sensed(event) => self.receive_event(event, out),
            EngineInput::Score(question) => self.request_score(question, out),
            EngineInput::ScoreTaken { id } => self.acknowledge_score(&id),
            EngineInput::SensorFailed { sensor } => self.sensor_failed(&sensor, out),
            EngineInput::ToolFinished { run, outcome } => self.handle_tool_outcome(run, outcome, out),
            EngineInput::Answered { call, answer } => self.handle_answer(call, &answer, out),
            EngineInput::Failed { call, failure } => self.handle_call_failure(call, failure, out),
            EngineInput::Timer => self.timer = None,
            EngineInput::WakeRequested { token } => self.wake_requested(token, out),
            EngineInput::ResumeRequested { token } => self.resume_requested(token, out),
            EngineInput::BudgetChanged { budget } => self.budget_changed(budget, out),
            EngineInput::LinkSilent => self.link_silent = true,
            EngineInput::LinkLost => self.link_lost(),
            EngineInput::LinkBack => self.link_back(),
            EngineInput::Stop { cause } => self.stop(cause, live, out),
            EngineInput::DrainEnded if self.state.lifecycle == LifecyclePhase::Stopping => self.cancel_all(out),
            // The others were heard before: levels without effects.
            EngineInput::DrainEnded | EngineInput::ToolsChanged { .. } | EngineInput::WakeEventsChanged { .. } => {}
        }
    }

    pub(super) fn is_live(&self) -> bool {
        matches!(self.state.lifecycle, LifecyclePhase::Active | LifecyclePhase::Stopping)
    }

    fn start(
        &mut self,
        epoch: i64,
        known: KnownTotals,
        budget: BudgetState,
        last: Option<Timestamp>,
        out: &mut EffectBuffer,
    ) {
        if epoch < self.state.epoch {
            self.fence(out);
            return;
        }
        let same_pod = epoch == self.state.epoch;
        self.state.epoch = epoch;
        self.state.turns_begun = self.state.turns_begun.max(known.turn);
        self.state.tool_calls = self.state.tool_calls.max(known.tool_calls);
        self.state.actions = self.state.actions.max(known.actions);
        self.in_flight = false;
        self.running.clear();
        self.timer = None;
        self.budget_changed(budget, out);
        out.record(journal_line(
            RecordKind::Started,
            self.turn_number(),
            format!("epoch {epoch}"),
        ));
        if same_pod && self.state.lifecycle == LifecyclePhase::Stopped && self.state.outcome.is_some() {
            out.stopped();
            return;
        }
        let crashed = self.state.lifecycle != LifecyclePhase::Stopped && self.state.reasons.is_empty();
        let anew = self.state.outcome.take().is_some();
        if anew {
            self.state.counters.idle = IdleClock::default();
        }
        self.start_loop_detection(anew);
        let outdated = self.outdated_since_start(last, out.now);
        self.state.suspended = false;
        // What the process before knew of the link is no longer known; the driver says so anew.
        self.state.reasons.remove(&PauseReason::LinkLost);
        self.state.used.retain_limits(&self.settings.windows());
        self.state.lifecycle = LifecyclePhase::Starting;
        self.note_transition(out);
        if crashed {
            self.count_crash(out);
        }
        if self.state.turn.is_none() && self.state.next_turn.is_none() {
            self.state.next_turn = Some(out.now);
            prompt::STARTS.clone_into(&mut self.state.briefing.cause);
        }
        self.schedule_heartbeat(out.now);
        self.state.lifecycle = LifecyclePhase::Active;
        self.settle_interrupted_runs(outdated.as_deref(), out);
    }

    fn stop(&mut self, cause: StopCause, live: bool, out: &mut EffectBuffer) {
        if cause == StopCause::Fenced {
            self.fence(out);
            return;
        }
        if live {
            self.state.lifecycle = LifecyclePhase::Stopping;
            self.cancel_runs(false, out);
        } else {
            out.stopped();
        }
        if cause == StopCause::Suspend {
            self.state.suspended = true;
            self.cancel_call(out);
        }
        self.note_transition(out);
    }

    /// A newer pod runs the loop: this one does, writes and hears nothing any more. The state stays as it was journalled.
    pub(super) fn fence(&mut self, out: &mut EffectBuffer) {
        self.cancel_all(out);
        self.fenced = true;
        out.drop_records();
        out.stopped();
    }

    /// Cuts all that is under way.
    fn cancel_all(&mut self, out: &mut EffectBuffer) {
        self.cancel_call(out);
        self.cancel_runs(true, out);
    }

    /// Cuts the call in flight. It stays open, so that the next process asks for the same one: its answer may be kept.
    fn cancel_call(&mut self, out: &mut EffectBuffer) {
        if let Some(call) = self.call_in_flight() {
            out.push(EngineEffect::CancelCall { call });
        }
        self.in_flight = false;
    }

    /// Does what is due, and sets the timer for what is due next.
    fn advance(&mut self, out: &mut EffectBuffer) {
        match self.state.lifecycle {
            _ if self.fenced => {}
            LifecyclePhase::Active => {
                self.clear_expired(out.now);
                self.check_clock_guardrails(out.now);
                self.recheck_rate_limits(out);
                self.end_sleep_if_over(out);
                self.note_transition(out);
                self.run_due_step(out);
                self.end_preparation();
                self.note_transition(out);
            }
            LifecyclePhase::Stopping if !self.in_flight && self.running.is_empty() => {
                self.state.lifecycle = LifecyclePhase::Stopped;
                self.note_transition(out);
                out.stopped();
            }
            LifecyclePhase::Stopping => self.note_transition(out),
            LifecyclePhase::Stopped | LifecyclePhase::Starting => {}
        }
        let timer = self.next_deadline(out.now);
        if timer != self.timer {
            self.timer = timer;
            out.push(EngineEffect::SetTimer(timer));
        }
    }

    fn run_due_step(&mut self, out: &mut EffectBuffer) {
        let Some(due) = self.due() else {
            return;
        };
        if due > out.now {
            return;
        }
        let turn = self.state.turn.as_ref();
        match turn.map(|turn| (turn.step, turn.call_id(), turn.own_call())) {
            None if self.state.pre_check.is_open() => self.issue_pre_check(out),
            None if self.state.scoring.is_open() => self.issue_score(out),
            None if self.score_due().is_some_and(|due| due <= out.now) => self.send_score(out),
            None if self.may_attempt(out) => self.begin_due_turn(out),
            Some((CallStep::Due(_), ..)) if self.may_attempt(out) => self.send_attempt(out),
            Some((CallStep::Due(_), _, own_call))
                if own_call > 1 && self.settings.exhaustion_policy == ExhaustionPolicy::Skip =>
            {
                self.skip_rest(out);
            }
            None | Some((CallStep::Due(_), ..)) => {}
            Some((CallStep::Open, call, _)) => self.dispatch_attempt(call, out),
            Some((CallStep::Tools, ..)) => self.advance_tools(out),
        }
    }

    /// Begins what is due: a heartbeat, or else the next turn. Where both are, they take turns.
    fn begin_due_turn(&mut self, out: &mut EffectBuffer) {
        let is_due = |moment: Option<Timestamp>| moment.is_some_and(|due| due <= out.now);
        let own = is_due(self.own_turn_due()) && self.state.beat.own_first;
        if is_due(self.heartbeat_due()) && !own {
            self.begin_heartbeat(out);
        } else if self.prepare_turn(out) && self.is_worth_a_turn(out) {
            self.begin_turn(out);
        }
    }

    /// When the loop acts next, if nothing holds it.
    fn due(&self) -> Option<Timestamp> {
        let free = self.state.lifecycle == LifecyclePhase::Active && !self.in_flight;
        if !free {
            return None;
        }
        let free_from = self.free_from()?;
        let due = match self.state.turn.as_ref().map(|turn| turn.step) {
            None if self.is_refreshing() => return None,
            None if self.state.pre_check.is_open() || self.state.scoring.is_open() => Timestamp::MIN,
            None => self.turn_due().into_iter().chain(self.score_due()).min()?,
            Some(CallStep::Due(at)) => at,
            Some(CallStep::Open | CallStep::Tools) => Timestamp::MIN,
        };
        Some(due.max(free_from))
    }

    /// When the next turn, heartbeats included, begins by itself, if nothing holds the loop.
    fn turn_due(&self) -> Option<Timestamp> {
        self.own_turn_due().into_iter().chain(self.heartbeat_due()).min()
    }

    fn own_turn_due(&self) -> Option<Timestamp> {
        self.state.next_turn.filter(|_| self.state.sleep.is_none())
    }

    /// The earliest moment at which something changes by itself.
    fn next_deadline(&self, now: Timestamp) -> Option<Timestamp> {
        if self.fenced || self.state.lifecycle != LifecyclePhase::Active {
            return None;
        }
        let holds = self.state.reasons.values().filter_map(ActivePause::ends);
        let sleep = self.state.sleep.iter().map(ChosenSleep::ends);
        // What can be done for tools now is done: the rest waits for something else than time.
        let due = self.due().filter(|due| self.tool_batch().is_none() || *due > now);
        holds.chain(sleep).chain(self.clock_changes).chain(due).min()
    }

    /// Deadlines are wall clock. When the clock was set back, delays move with it, and nothing lasts longer from now
    /// on than its own limit: a pod that started with a clock a year ahead must not sleep for a year.
    fn handle_clock_rollback(&mut self, now: Timestamp) {
        let back = self
            .state
            .last_now
            .map_or(SignedDuration::ZERO, |last| last.duration_since(now));
        self.state.last_now = Some(now);
        if !back.is_positive() {
            return;
        }
        self.timer = None;
        let moved = |moment: Timestamp| moment.checked_sub(back).unwrap_or(now);
        self.state.next_turn = self.state.next_turn.map(moved);
        self.state.counters.idle.moved(back);
        self.state.used.handle_clock_rollback(now);
        self.state.scoring.moved(moved);
        self.schedule_heartbeat(now);
        self.hot.moved(back);
        if let Some(turn) = &mut self.state.turn
            && let CallStep::Due(at) = turn.step
        {
            turn.step = CallStep::Due(moved(at));
        }
        if let Some(sleep) = &mut self.state.sleep {
            let latest = time_math::after(now, self.settings.max_sleep);
            sleep.until = sleep.until.min(latest);
            sleep.room_at = sleep.room_at.map(|room_at| room_at.min(latest));
        }
        let reasons: Vec<PauseReason> = self.state.reasons.keys().copied().collect();
        for reason in reasons {
            let latest = self.longest_hold(reason).map(|longest| time_math::after(now, longest));
            if let Some(hold) = self.state.reasons.get_mut(&reason) {
                hold.until = hold.until.map(|until| latest.map_or(until, |latest| until.min(latest)));
                hold.probe = hold.probe.map(|probe| match probe {
                    ProbeState::At(moment) => ProbeState::At(moment.min(time_math::after(now, PROBE_INTERVAL))),
                    ProbeState::Sent(moment) => ProbeState::Sent(moment.min(time_math::after(now, PROBE_TIMEOUT))),
                });
            }
        }
    }

    /// The attempt whose outcome this process waits for.
    pub(super) fn call_in_flight(&self) -> Option<CallId> {
        if !self.in_flight {
            return None;
        }
        Some(match &self.state.turn {
            Some(turn) => turn.call_id(),
            None => self.pre_check_call(),
        })
    }

    /// The turn that a journal line belongs to.
    pub(super) fn turn_number(&self) -> i64 {
        self.state
            .turn
            .as_ref()
            .map_or(self.state.turns_begun, |turn| turn.number)
    }
}
