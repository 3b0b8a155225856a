//! The engine: one loop's state, and the only function that changes it. This file dispatches inputs, owns the lifecycle
//! and does what comes next. The rules of modes, turns and pauses are in their own files.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;

pub use super::snapshot::EngineSnapshot;
pub use super::view::{DetectedRepetition, LoopView, ReportedPause};

use super::effects::{EffectBuffer, journal_line};
use super::guardrails::idle_timeout::IdleClock;
use super::hot_state::HotState;
use super::model_call::CallStep;
use super::modes::NextStep;
use super::pauses::{self, budget::BudgetState};
use super::snapshot::{CauseKind, ChosenSleep};
use super::stop_requests::OpenRequests;
use super::tasks::TaskQueue;
use super::tool::ToolRunId;
use super::tools::offer::{self, ToolOffer};
use super::turn::Turn;
use super::turn::kind::{TurnKind, TurnRules};
use super::{
    EngineEffect, EngineInput, KnownTotals, RecordKind, StopCause, message::Message, settings::EngineSettings,
};
use crate::context::{prompt, prompt::Skill};
use agentloop_api::status::PauseReason;

/// The state machine of one loop. Each input yields effects, which the driver carries out.
#[derive(Clone, Debug)]
pub struct Engine {
    pub(super) settings: EngineSettings,
    pub(super) instructions: String,
    pub(super) skills: Arc<[Skill]>,
    pub(super) transcript: Vec<Arc<Message>>,
    pub(super) state: EngineSnapshot,
    /// Whether this process has handed the open call to the driver and awaits its outcome.
    pub(super) in_flight: bool,
    /// The prompt last handed to the driver.
    pub(super) sent_prompt: Option<SentPrompt>,
    /// UID of the Agent.
    pub(super) agent: String,
    /// The tools that the model may call, now and from the next turn on.
    pub(super) offer: ToolOffer,
    /// Whether the pins and gates follow from the newest list of tools.
    pub(super) definitions_settled: bool,
    /// Values of the moment; not persisted.
    pub(super) hot: HotState,
    /// The tasks that wait; persisted as rows of the journal.
    pub(super) tasks: TaskQueue,
    /// Tool runs that this process has handed to the driver and awaits, with the time at which it did.
    pub(super) running: BTreeMap<ToolRunId, Timestamp>,
    /// The time of the driver's timer.
    timer: Option<Timestamp>,
    /// When a guardrail that depends only on the clock changes its decision.
    pub(super) clock_changes: Option<Timestamp>,
    /// Another pod runs the loop: inputs are ignored and nothing is written.
    pub(super) fenced: bool,
}

/// What the controller knows of a loop when a process starts.
struct KnownToController {
    totals: KnownTotals,
    budget: BudgetState,
    /// The requests that it does not know to be handled.
    open: OpenRequests,
}

/// The size of a prompt that was sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SentPrompt {
    /// Estimated tokens.
    pub(crate) tokens: u64,
    /// It shows images, for which the estimate is an upper bound.
    pub(crate) has_images: bool,
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
        let snapshot = EngineSnapshot {
            mode: snapshot.mode.in_mode(&settings.mode),
            ..snapshot
        };
        let own_tools = offer::own_tools(snapshot.mode.mode(), &settings, None);
        Self {
            hot: HotState::new(settings.hot_state.clone()),
            instructions: String::new(),
            skills: Arc::default(),
            transcript: transcript.into_iter().map(Into::into).collect(),
            state: snapshot,
            in_flight: false,
            sent_prompt: None,
            agent: String::new(),
            offer: ToolOffer::new(own_tools),
            definitions_settled: true,
            tasks: TaskQueue::default(),
            settings,
            running: BTreeMap::new(),
            timer: None,
            clock_changes: None,
            fenced: false,
        }
    }

    /// Sets the instructions, which apply from the next turn on: a change within a turn would miss the provider's
    /// prompt cache. Never journalled.
    pub fn set_instructions(&mut self, text: String) {
        if self.state.turn.is_none() || self.instructions.is_empty() {
            self.instructions = text;
        }
    }

    /// Sets the skills, in the order of the prompt; they apply from the next turn on. Never journalled.
    pub fn set_skills(&mut self, skills: Arc<[Skill]>) {
        if self.state.turn.is_none() || self.skills.is_empty() {
            self.skills = skills;
        }
    }

    /// The state to persist, see the module's contract.
    #[must_use]
    pub fn snapshot(&self) -> EngineSnapshot {
        self.state.clone()
    }

    /// The only transition function. `now` may be earlier than before, if the clock was set back.
    pub fn handle(&mut self, now: Timestamp, input: EngineInput) -> Vec<EngineEffect> {
        if let EngineInput::ToolsChanged { tools, silent } = input {
            self.tools_listed(tools, silent);
            return Vec::new();
        }
        if let EngineInput::WakeEventsChanged { names } = input {
            let own_tools = self.own_tools(Some(&names));
            let in_turn = self.state.turn.is_some();
            self.offer.wake_events_changed(names, own_tools, in_turn);
            return Vec::new();
        }
        let mut out = EffectBuffer::new(now);
        if self.fenced {
            if matches!(input, EngineInput::Stop { .. }) {
                out.stopped();
            }
            return out.into_effects();
        }
        // Taken first, so that a change by the clock alone is reported as well.
        let before = self.view();
        let last = self.state.life.last_now();
        self.handle_clock_rollback(now);
        self.dispatch(input, last, &mut out);
        self.advance(&mut out);
        // Before the comparison, so that a changed count is reported.
        self.state.totals.count_records(out.records());
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
                open,
            } => {
                self.agent = agent;
                self.state.reasons.set_link_silent(link_silent);
                let known = KnownToController {
                    totals: known,
                    budget,
                    open,
                };
                self.start(epoch, known, last, out);
            }
            EngineInput::Sensed(event) => self.receive_event(event, out),
            EngineInput::Score(question) => self.request_score(question, out),
            EngineInput::ScoreTaken { id } => self.acknowledge_score(&id),
            EngineInput::TaskOffered(offer) => self.accept_task(offer, out),
            EngineInput::ScaleDown => self.scale_down(out),
            EngineInput::SensorFailed { sensor } => self.sensor_failed(&sensor, out),
            EngineInput::ResourceUsed { resource, amount } => self.count_use(resource, amount, out),
            EngineInput::ToolFinished {
                run,
                outcome,
                artifacts,
            } => self.handle_tool_outcome(run, (outcome, artifacts), out),
            EngineInput::Answered { call, answer } => self.handle_answer(call, &answer, out),
            EngineInput::Failed { call, failure } => self.handle_call_failure(call, failure, out),
            EngineInput::Timer => self.timer = None,
            EngineInput::WakeRequested { token } => self.wake_requested(token, out),
            EngineInput::ResumeRequested { token } => self.resume_requested(token, out),
            EngineInput::StopRequested { token } => self.stop_requested(token, out),
            EngineInput::GateAnswered(answer) => {
                self.definition_gate_answered(&answer, out);
                self.mode_gate_answered(&answer, out);
                self.gate_answered(&answer, out);
            }
            EngineInput::BudgetChanged { budget } => self.budget_changed(budget, out),
            EngineInput::LinkSilent => self.state.reasons.set_link_silent(true),
            EngineInput::LinkLost => self.link_lost(),
            EngineInput::LinkBack => self.link_back(),
            EngineInput::Stop { cause } => self.stop(cause, live, out),
            EngineInput::DrainEnded if self.state.life.is_stopping() => self.cancel_all(out),
            // The others were handled above: levels without effects.
            EngineInput::DrainEnded | EngineInput::ToolsChanged { .. } | EngineInput::WakeEventsChanged { .. } => {}
        }
    }

    pub(super) fn is_live(&self) -> bool {
        self.state.life.is_active() || self.state.life.is_stopping()
    }

    fn start(&mut self, epoch: i64, known: KnownToController, last: Option<Timestamp>, out: &mut EffectBuffer) {
        if epoch < self.state.life.epoch() {
            self.fence(out);
            return;
        }
        let same_pod = self.state.life.taken_over(epoch);
        self.state.totals.merge(&known.totals);
        self.in_flight = false;
        self.running.clear();
        self.timer = None;
        self.budget_changed(known.budget, out);
        out.record(journal_line(
            RecordKind::Started,
            self.turn_number(),
            format!("epoch {epoch}"),
        ));
        let is_over = self.state.life.outcome().is_some();
        let is_unreported = known.open.stop.is_some() && known.open.stop == self.state.handled.stop;
        if is_over && (self.state.life.is_stopping() || same_pod && self.state.life.is_stopped() || is_unreported) {
            // A loop that was about to end does not begin again: only a pod that is started after its end does that, and
            // because the controller knows of the end.
            self.state.life.stopped();
            self.note_transition(out);
            out.stopped();
            return;
        }
        // The previous process did not stop its loop, so it crashed. A turn under a pause was not running and is not
        // blamed. Nor is it for the loss of the pod: evictions, drains and failed nodes say nothing about the turn.
        let crashed = same_pod && !self.state.life.is_stopped() && self.state.reasons.is_empty();
        let outdated = self.outdated_since_start(last, out.now);
        let restarted = self.state.life.starting();
        if restarted {
            self.state.counters.idle = IdleClock::default();
        }
        self.start_loop_detection(restarted);
        self.interrupt_task_clock();
        // What the previous process knew of the link is out of date; the driver reports it again.
        self.state.reasons.remove(PauseReason::LinkLost);
        self.state.used.retain_limits(&self.settings.windows());
        self.retry_light_model(out.now);
        self.note_transition(out);
        if crashed {
            self.count_crash(out);
        }
        if self.state.turn.is_none() && self.state.next_turn.is_none() {
            self.state.next_turn = Some(out.now);
            self.state.briefing.set_cause(CauseKind::Loop, prompt::STARTS);
        }
        if !same_pod {
            self.state.requests.pod_changed();
        }
        self.ask_mode(out.now, |mode, context| {
            mode.started(restarted, context);
            if !same_pod {
                // The files of a workspace without a volume are lost with the pod.
                mode.environment_changed(context);
            }
        });
        self.record_validation(out);
        self.state.life.active();
        self.offer_own_task(out);
        self.keep_gates_after_start(out.now);
        self.settle_interrupted_runs(outdated.as_deref(), out);
        self.stop_at_start(known.open, out);
    }

    fn stop(&mut self, cause: StopCause, live: bool, out: &mut EffectBuffer) {
        if cause == StopCause::Fenced {
            self.fence(out);
            return;
        }
        if live {
            self.state.life.stopping();
            self.cancel_runs(false, out);
        } else {
            out.stopped();
        }
        if cause == StopCause::Suspend {
            self.state.life.suspend();
            self.cancel_call(out);
        }
        self.note_transition(out);
    }

    /// A newer pod runs the loop: this one does nothing and writes nothing from now on. The state stays as it was
    /// journalled.
    pub(super) fn fence(&mut self, out: &mut EffectBuffer) {
        self.cancel_all(out);
        self.fenced = true;
        out.drop_records();
        out.stopped();
    }

    /// Cancels everything under way.
    fn cancel_all(&mut self, out: &mut EffectBuffer) {
        self.cancel_call(out);
        self.cancel_runs(true, out);
    }

    /// Cancels the call in flight. It stays open, so that the next process requests the same call: its answer may be
    /// kept.
    pub(super) fn cancel_call(&mut self, out: &mut EffectBuffer) {
        if let Some(call) = self.call_in_flight() {
            out.push(EngineEffect::CancelCall { call });
        }
        self.in_flight = false;
    }

    /// Does what is due, and sets the timer for what is due next.
    fn advance(&mut self, out: &mut EffectBuffer) {
        self.end_if_stop_requested(out);
        if self.state.life.is_active() && !self.fenced {
            self.expire_gates(out);
            self.settle_mode_gate(out);
            self.settle_definitions(out);
            self.clear_expired(out.now);
            // Pauses and the sleep end before anything starts, and the transition is journalled before what it allows.
            self.check_clock_guardrails(out.now);
            self.recheck_rate_limits(out);
            self.end_sleep_if_over(out);
            self.note_transition(out);
            self.repeat_own_task(out);
            self.advance_deferred(out);
            self.end_overdue_task(out);
            // That may have ended the turn.
            self.end_if_stop_requested(out);
            self.run_due_step(out);
            self.end_preparation();
            self.note_transition(out);
            self.end_if_stop_requested(out);
        }
        // The steps above may have ended the loop.
        if self.state.life.is_stopping() && !self.fenced {
            if !self.in_flight && self.running.is_empty() {
                self.state.life.stopped();
                out.stopped();
            }
            self.note_transition(out);
        }
        let timer = self.next_deadline(out.now);
        if timer != self.timer {
            self.timer = timer;
            out.push(EngineEffect::SetTimer(timer));
        }
    }

    fn run_due_step(&mut self, out: &mut EffectBuffer) {
        if self.due(out.now).is_none_or(|due| due > out.now) {
            return;
        }
        match self.state.call.step() {
            Some(step) => self.advance_call(step, out),
            None if self.state.turn.is_some() => self.advance_tools(out),
            None if self.score_due().is_some_and(|due| due <= out.now) => self.send_score(out),
            None => self.take_next_step(out),
        }
    }

    /// Does what the mode says comes next.
    fn take_next_step(&mut self, out: &mut EffectBuffer) {
        match self.next_step(out.now) {
            NextStep::Stop(outcome) => self.end_loop(outcome, out),
            NextStep::Begin { kind, at } if at <= out.now && self.may_attempt(out) => {
                if !kind.rules().is_prepared || (self.prepare_turn(out) && self.is_worth_a_turn(out)) {
                    self.begin_turn(kind, out);
                }
            }
            NextStep::Ask => self.ask_mode_question(out),
            NextStep::Check if self.is_deferred_under_way() => {}
            NextStep::Check => self.run_mode_check(out),
            NextStep::RequestApproval => self.open_mode_gate(out),
            NextStep::Begin { .. } | NextStep::Wait => {}
        }
    }

    /// When the loop acts next, as far as its pauses allow.
    fn due(&self, now: Timestamp) -> Option<Timestamp> {
        let free = self.state.life.is_active() && !self.in_flight;
        if !free {
            return None;
        }
        let free_from = self.state.reasons.free_from()?;
        let in_turn = self.state.turn.is_some();
        let due = match self.state.call.step() {
            _ if !in_turn && self.is_refreshing() => return None,
            Some(CallStep::Due(at)) => at,
            // The tool runs of a turn.
            None if in_turn => Timestamp::MIN,
            Some(CallStep::Open) => Timestamp::MIN,
            None => self.next_step_due(now).into_iter().chain(self.score_due()).min()?,
        };
        Some(due.max(free_from))
    }

    /// When the next turn begins or the loop ends, if no pause holds the loop.
    fn next_step_due(&self, now: Timestamp) -> Option<Timestamp> {
        match self.next_step(now) {
            NextStep::Begin { at, .. } => Some(at),
            // It may have side effects, and waits for the link and for a deferred run without a time.
            NextStep::Check if !self.state.reasons.allow_actions() || self.is_deferred_under_way() => None,
            NextStep::Check => Some(self.mode_check_due()),
            NextStep::Stop(_) | NextStep::RequestApproval => Some(Timestamp::MIN),
            NextStep::Ask => Some(self.mode_question_due()),
            NextStep::Wait => None,
        }
    }

    /// The earliest time at which something changes without an input.
    fn next_deadline(&self, now: Timestamp) -> Option<Timestamp> {
        if self.fenced || !self.state.life.is_active() {
            return None;
        }
        let holds = self.state.reasons.first_end().into_iter();
        let sleep = self.mode().sleep().map(ChosenSleep::ends);
        // Tool work that is possible now has been done; the rest waits for an input, not for a time.
        let due = self.due(now).filter(|due| self.tool_batch().is_none() || *due > now);
        let gates = self.first_gate_expiry();
        let task = self.task_deadline();
        holds
            .chain(sleep)
            .chain(self.clock_changes)
            .chain(due)
            .chain(gates)
            .chain(task)
            .chain(self.own_task_due())
            .min()
    }

    /// Deadlines are wall-clock times. If the clock was set back, delays move with it, and nothing lasts longer from
    /// now on than its own limit: a pod that started with a clock a year ahead must not sleep for a year.
    fn handle_clock_rollback(&mut self, now: Timestamp) {
        let back = self.state.life.input_at(now);
        if back.is_zero() {
            return;
        }
        self.timer = None;
        let moved = |moment: Timestamp| moment.checked_sub(back).unwrap_or(now);
        self.state.next_turn = self.state.next_turn.map(moved);
        self.state.counters.idle.moved(back);
        self.move_task_clock(back);
        self.state.used.handle_clock_rollback(now);
        self.state.scoring.moved(moved);
        self.state.requests.moved(moved);
        self.ask_mode(now, |mode, context| mode.clock_set_back(back, context));
        self.hot.moved(back);
        self.limit_light_wait(now);
        self.state.call.moved(moved);
        let settings = &self.settings;
        let longest = |reason| pauses::longest_hold(reason, settings);
        self.state.reasons.clock_set_back(now, longest);
        self.limit_gates(back, now);
    }

    /// The turn that a journal record belongs to.
    pub(super) fn turn_number(&self) -> i64 {
        self.state
            .turn
            .as_ref()
            .map_or(self.state.totals.turns_begun(), Turn::number)
    }

    /// The rules of the turn under way. Between turns, those of the agent's own turns.
    pub(super) fn turn_rules(&self) -> TurnRules {
        self.state.turn.as_ref().map_or(TurnKind::Own.rules(), Turn::rules)
    }
}
