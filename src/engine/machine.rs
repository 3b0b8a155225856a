//! The engine: one loop's state, and the one function that changes it. Here: who hears which input, the lifecycle, and
//! what the loop does next. The rules of turns, pauses and sleeps are in files of their own.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};

pub use super::snapshot::Snapshot;
pub use super::view::{Detected, Held, View};

use super::budget::{Budget, LET_THROUGH, PROBE, Probe};
use super::gate::Toolbox;
use super::guardrails::idle_timeout::IdleClock;
use super::hot_state::HotState;
use super::outbox::{Outbox, line};
use super::snapshot::{Hold, Lifecycle, Sleep, Step};
use super::tool::ToolRunId;
use super::yield_tool;
use super::{
    CallId, Effect, Input, Known, RecordKind, StopCause, clock, message::Message, prompt, prompt::Skill,
    settings::Settings,
};
use crate::api::agent::ExhaustionPolicy;
use crate::api::status::PauseReason;

/// One loop.
#[derive(Clone, Debug)]
pub struct Engine {
    pub(super) settings: Settings,
    pub(super) instructions: String,
    pub(super) skills: Arc<[Skill]>,
    pub(super) transcript: Vec<Arc<Message>>,
    pub(super) state: Snapshot,
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
    pub fn new(settings: Settings) -> Self {
        Self::restore(settings, Snapshot::default(), Vec::<Message>::new())
    }

    /// A loop as its journal left it; feed [`Input::Started`] next.
    #[must_use]
    pub fn restore(
        settings: Settings,
        snapshot: Snapshot,
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
    pub fn snapshot(&self) -> Snapshot {
        self.state.clone()
    }

    /// The one transition function. `now` may be earlier than before (a clock that was set back).
    pub fn handle(&mut self, now: Timestamp, input: Input) -> Vec<Effect> {
        if let Input::ToolsChanged { tools, silent } = input {
            self.tools_changed(tools, silent);
            return Vec::new();
        }
        if let Input::WakeEventsChanged { names } = input {
            self.wake_events_changed(names);
            return Vec::new();
        }
        let mut out = Outbox::new(now);
        if self.fenced {
            if matches!(input, Input::Stop { .. }) {
                out.stopped();
            }
            return out.into_effects();
        }
        let before = self.view();
        let last = self.state.last_now;
        self.heed_clock(now);
        self.dispatch(input, last, &mut out);
        self.advance(&mut out);
        self.count(&out);
        self.report_change(&before, &mut out);
        out.into_effects()
    }

    fn dispatch(&mut self, input: Input, last: Option<Timestamp>, out: &mut Outbox) {
        let live = self.is_live();
        if !live && !matches!(input, Input::Started { .. } | Input::Stop { .. }) {
            return;
        }
        match input {
            Input::Started {
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
            Input::Sensed(event) => self.sensed(event, out),
            Input::Score(question) => self.score(question, out),
            Input::ScoreTaken { id } => self.score_taken(&id),
            Input::SensorFailed { sensor } => self.sensor_failed(&sensor, out),
            Input::ToolFinished { run, outcome } => self.tool_finished(run, outcome, out),
            Input::Answered { call, answer } => self.answered(call, &answer, out),
            Input::Failed { call, failure } => self.failed(call, failure, out),
            Input::Timer => self.timer = None,
            Input::WakeRequested { token } => self.wake_requested(token, out),
            Input::ResumeRequested { token } => self.resume_requested(token, out),
            Input::BudgetChanged { budget } => self.budget_changed(budget, out),
            Input::LinkSilent => self.link_silent = true,
            Input::LinkLost => self.link_lost(),
            Input::LinkBack => self.link_back(),
            Input::Stop { cause } => self.stop(cause, live, out),
            Input::DrainEnded if self.state.lifecycle == Lifecycle::Stopping => self.cut(out),
            // The others were heard before: levels without effects.
            Input::DrainEnded | Input::ToolsChanged { .. } | Input::WakeEventsChanged { .. } => {}
        }
    }

    pub(super) fn is_live(&self) -> bool {
        matches!(self.state.lifecycle, Lifecycle::Active | Lifecycle::Stopping)
    }

    fn start(&mut self, epoch: i64, known: Known, budget: Budget, last: Option<Timestamp>, out: &mut Outbox) {
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
        out.record(line(RecordKind::Started, self.turn_number(), format!("epoch {epoch}")));
        if same_pod && self.state.lifecycle == Lifecycle::Stopped && self.state.outcome.is_some() {
            out.stopped();
            return;
        }
        let crashed = self.state.lifecycle != Lifecycle::Stopped && self.state.reasons.is_empty();
        let anew = self.state.outcome.take().is_some();
        if anew {
            self.state.counters.idle = IdleClock::default();
        }
        self.start_watch(anew);
        let outdated = self.outdated_since_start(last, out.now);
        self.state.suspended = false;
        // What the process before knew of the link is no longer known; the driver says so anew.
        self.state.reasons.remove(&PauseReason::LinkLost);
        self.state.used.keep(&self.settings.windows());
        self.state.lifecycle = Lifecycle::Starting;
        self.note_transition(out);
        if crashed {
            self.count_crash(out);
        }
        if self.state.turn.is_none() && self.state.next_turn.is_none() {
            self.state.next_turn = Some(out.now);
            prompt::STARTS.clone_into(&mut self.state.briefing.cause);
        }
        self.schedule_heartbeat(out.now);
        self.state.lifecycle = Lifecycle::Active;
        self.settle_cut_runs(outdated.as_deref(), out);
    }

    fn stop(&mut self, cause: StopCause, live: bool, out: &mut Outbox) {
        if cause == StopCause::Fenced {
            self.fence(out);
            return;
        }
        if live {
            self.state.lifecycle = Lifecycle::Stopping;
            self.cut_runs(false, out);
        } else {
            out.stopped();
        }
        if cause == StopCause::Suspend {
            self.state.suspended = true;
            self.cut_call(out);
        }
        self.note_transition(out);
    }

    /// A newer pod runs the loop: this one does, writes and hears nothing any more. The state stays as it was journalled.
    pub(super) fn fence(&mut self, out: &mut Outbox) {
        self.cut(out);
        self.fenced = true;
        out.drop_records();
        out.stopped();
    }

    /// Cuts all that is under way.
    fn cut(&mut self, out: &mut Outbox) {
        self.cut_call(out);
        self.cut_runs(true, out);
    }

    /// Cuts the call in flight. It stays open, so that the next process asks for the same one: its answer may be kept.
    fn cut_call(&mut self, out: &mut Outbox) {
        if let Some(call) = self.call_in_flight() {
            out.push(Effect::CancelCall { call });
        }
        self.in_flight = false;
    }

    /// Does what is due, and sets the timer for what is due next.
    fn advance(&mut self, out: &mut Outbox) {
        match self.state.lifecycle {
            _ if self.fenced => {}
            Lifecycle::Active => {
                self.clear_expired(out.now);
                self.ask_the_clock(out.now);
                self.ask_for_room(out);
                self.end_sleep_if_over(out);
                self.note_transition(out);
                self.act(out);
                self.end_preparation();
                self.note_transition(out);
            }
            Lifecycle::Stopping if !self.in_flight && self.running.is_empty() => {
                self.state.lifecycle = Lifecycle::Stopped;
                self.note_transition(out);
                out.stopped();
            }
            Lifecycle::Stopping => self.note_transition(out),
            Lifecycle::Stopped | Lifecycle::Starting => {}
        }
        let timer = self.next_moment(out.now);
        if timer != self.timer {
            self.timer = timer;
            out.push(Effect::SetTimer(timer));
        }
    }

    fn act(&mut self, out: &mut Outbox) {
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
            None if self.may_attempt(out) => self.begin(out),
            Some((Step::Due(_), ..)) if self.may_attempt(out) => self.send_attempt(out),
            Some((Step::Due(_), _, own_call))
                if own_call > 1 && self.settings.exhaustion_policy == ExhaustionPolicy::Skip =>
            {
                self.skip_rest(out);
            }
            None | Some((Step::Due(_), ..)) => {}
            Some((Step::Open, call, _)) => self.issue(call, out),
            Some((Step::Tools, ..)) => self.go_on(out),
        }
    }

    /// Begins what is due: a heartbeat, or else the next turn. Where both are, they take turns.
    fn begin(&mut self, out: &mut Outbox) {
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
        let free = self.state.lifecycle == Lifecycle::Active && !self.in_flight;
        if !free {
            return None;
        }
        let free_from = self.free_from()?;
        let due = match self.state.turn.as_ref().map(|turn| turn.step) {
            None if self.is_refreshing() => return None,
            None if self.state.pre_check.is_open() || self.state.scoring.is_open() => Timestamp::MIN,
            None => self.turn_due().into_iter().chain(self.score_due()).min()?,
            Some(Step::Due(at)) => at,
            Some(Step::Open | Step::Tools) => Timestamp::MIN,
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
    fn next_moment(&self, now: Timestamp) -> Option<Timestamp> {
        if self.fenced || self.state.lifecycle != Lifecycle::Active {
            return None;
        }
        let holds = self.state.reasons.values().filter_map(Hold::ends);
        let sleep = self.state.sleep.iter().map(Sleep::ends);
        // What can be done for tools now is done: the rest waits for something else than time.
        let due = self.due().filter(|due| self.work().is_none() || *due > now);
        holds.chain(sleep).chain(self.clock_changes).chain(due).min()
    }

    /// Deadlines are wall clock. When the clock was set back, delays move with it, and nothing lasts longer from now
    /// on than its own limit: a pod that started with a clock a year ahead must not sleep for a year.
    fn heed_clock(&mut self, now: Timestamp) {
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
        self.state.used.heed_clock(now);
        self.state.scoring.moved(moved);
        self.schedule_heartbeat(now);
        self.hot.moved(back);
        if let Some(turn) = &mut self.state.turn
            && let Step::Due(at) = turn.step
        {
            turn.step = Step::Due(moved(at));
        }
        if let Some(sleep) = &mut self.state.sleep {
            let latest = clock::after(now, self.settings.max_sleep);
            sleep.until = sleep.until.min(latest);
            sleep.room_at = sleep.room_at.map(|room_at| room_at.min(latest));
        }
        let reasons: Vec<PauseReason> = self.state.reasons.keys().copied().collect();
        for reason in reasons {
            let latest = self.longest_hold(reason).map(|longest| clock::after(now, longest));
            if let Some(hold) = self.state.reasons.get_mut(&reason) {
                hold.until = hold.until.map(|until| latest.map_or(until, |latest| until.min(latest)));
                hold.probe = hold.probe.map(|probe| match probe {
                    Probe::At(moment) => Probe::At(moment.min(clock::after(now, PROBE))),
                    Probe::Sent(moment) => Probe::Sent(moment.min(clock::after(now, LET_THROUGH))),
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
