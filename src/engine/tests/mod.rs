//! Drives the engine in simulated time as the worker would, and checks invariants on every step.

mod actions;
mod approvals;
mod budget;
mod budget_health;
mod builders;
mod compaction;
mod context;
mod corpus;
mod deferred;
mod definitions;
mod events;
mod expiry;
mod failures;
mod gate;
mod goal;
mod goal_artifacts;
mod goal_checks;
mod goal_denials;
mod goal_gates;
mod goal_history;
mod goal_light;
mod goal_outages;
mod goal_progress;
mod goal_recovery;
mod goal_requests;
mod goal_story;
mod goal_texts;
mod goal_totals;
mod heartbeat;
mod held_results;
mod history;
mod history_exclusion;
mod hot_state;
mod hours;
mod idle;
mod images;
mod injections;
mod lifecycle;
mod light_model;
mod limits;
mod loops;
mod memory;
mod modes;
mod notifications;
mod offers;
mod poison;
mod precheck;
mod prompt_rules;
mod random;
mod rates;
mod replay;
mod requests;
mod runtime_mark;
mod scoring;
mod sensors;
mod sleeping;
mod stop_requests;
mod stops;
mod structured_output;
mod task_failures;
mod task_intervals;
mod task_order;
mod tasks;
mod texts;
mod tool_failures;
mod tools;
mod trips;
mod untrusted;
mod window;
mod work;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};

use self::builders::{hours, settings};
use self::events::{happens, notified, try_everything_but, value_of, without_its_line};
use self::prompt_rules::check_prompt;
use super::context::prompt_size as sizes;
use super::guardrails::active_hours::WindowPosition;
use super::machine::{Engine, EngineSnapshot};
use super::message::{FinishReason, Message, ModelAnswer, ToolCall};
use super::pauses::budget::{BudgetState, ProbeState};
use super::pauses::holds::ActivePause;
use super::settings::{EngineSettings, ModeSettings};
use super::tool::{ResultArtifacts, ToolEffect, ToolOutcome, ToolRun, ToolRunId, ToolSpec, UnknownOutcomePolicy};
use super::{
    CallId, CallPurpose, EngineEffect, EngineGateAnswer, EngineInput, JournalRecord, KnownTotals, OpenRequests,
    RecordKind, StopCause,
};
use agentloop_api::agent::{DetectionMode, ExhaustionPolicy, LoopDetection, StructuredOutput};
use agentloop_api::failure::{CallFailure, FailureKind};
use agentloop_api::status::{LoopState, PauseReason};

fn detection(mode: DetectionMode) -> LoopDetection {
    LoopDetection {
        mode,
        ..LoopDetection::default()
    }
}

fn seconds(seconds: i64) -> SignedDuration {
    SignedDuration::from_secs(seconds)
}

fn calls(name: &str, arguments: &str) -> ModelAnswer {
    ModelAnswer {
        text: None,
        tool_calls: vec![ToolCall {
            id: "a".into(),
            name: name.into(),
            arguments: arguments.into(),
        }],
        finish: FinishReason::ToolCalls,
        ..ModelAnswer::default()
    }
}

fn says(text: &str) -> ModelAnswer {
    ModelAnswer {
        text: Some(text.into()),
        ..ModelAnswer::default()
    }
}

fn failure(kind: FailureKind) -> CallFailure {
    CallFailure::new(kind, "what to do")
}

fn resume(driver: &mut Driver, token: &str) {
    driver.feed(EngineInput::ResumeRequested { token: token.into() });
}

/// The worker's part: holds the journal, the timer and the call in flight.
#[derive(Clone, Debug)]
struct Driver {
    settings: EngineSettings,
    engine: Engine,
    now: Timestamp,
    epoch: i64,
    journal: Vec<JournalRecord>,
    transcript: Vec<Arc<Message>>,
    saved: EngineSnapshot,
    in_flight: Option<CallId>,
    issued: Vec<CallId>,
    prompt: Vec<Arc<Message>>,
    purpose: CallPurpose,
    block: Option<String>,
    answer_schema: Option<Arc<super::answer_schema::AnswerSchema>>,
    timer: Option<Timestamp>,
    acknowledged: Vec<CallId>,
    cancelled: Vec<CallId>,
    stopped: bool,
    restarted: bool,
    budget: BudgetState,
    tools: Vec<ToolSpec>,
    offered: Vec<String>,
    running: BTreeMap<ToolRunId, ToolRun>,
    sent: Vec<ToolRun>,
    cut: Vec<ToolRunId>,
    silent: bool,
    /// The requests that the controller does not know to be handled.
    open_requests: OpenRequests,
    /// Calls whose answers were given after untrusted content.
    untrusted: BTreeSet<(i64, u32)>,
    /// Messages that left without a summary since the last one.
    forgotten: usize,
    /// All definitions that were ever pinned, each with its tool.
    pinned: BTreeSet<(String, String)>,
    tasks: tasks::TaskTable,
}

impl Driver {
    /// A loop that was started for the first time.
    fn started(settings: EngineSettings) -> Self {
        let mut driver = Self::fresh(settings);
        driver.start(1);
        driver
    }

    fn fresh(settings: EngineSettings) -> Self {
        let mut engine = Engine::new(settings.clone());
        engine.set_instructions("Watch the stars.".into());
        Self {
            settings,
            engine,
            now: "2026-01-01T00:00:00Z".parse().unwrap(),
            epoch: 0,
            journal: Vec::new(),
            transcript: Vec::new(),
            saved: EngineSnapshot::default(),
            in_flight: None,
            issued: Vec::new(),
            prompt: Vec::new(),
            purpose: CallPurpose::Turn,
            block: None,
            answer_schema: None,
            timer: None,
            acknowledged: Vec::new(),
            cancelled: Vec::new(),
            stopped: false,
            restarted: false,
            budget: BudgetState::default(),
            tools: Vec::new(),
            offered: Vec::new(),
            running: BTreeMap::new(),
            sent: Vec::new(),
            cut: Vec::new(),
            silent: false,
            open_requests: OpenRequests::default(),
            untrusted: BTreeSet::new(),
            forgotten: 0,
            pinned: BTreeSet::new(),
            tasks: tasks::TaskTable::default(),
        }
    }

    fn start(&mut self, epoch: i64) -> Vec<EngineEffect> {
        self.start_with(epoch, KnownTotals::default())
    }

    /// The process starts with what the controller knows.
    fn start_with(&mut self, epoch: i64, known: KnownTotals) -> Vec<EngineEffect> {
        self.epoch = epoch;
        self.restarted = true;
        self.in_flight = None;
        self.timer = None;
        self.stopped = false;
        self.running.clear();
        let budget = self.budget.clone();
        self.feed(EngineInput::Started {
            agent: "agent".into(),
            epoch,
            known,
            budget,
            link_silent: self.silent,
            open: self.open_requests.clone(),
        })
    }

    /// The process ends, and another one continues from the journal.
    fn restart(&mut self, epoch: i64) -> Vec<EngineEffect> {
        let saved = serde_json::to_string(&self.saved).unwrap();
        let snapshot = serde_json::from_str(&saved).unwrap();
        self.engine = Engine::restore(self.settings.clone(), snapshot, self.transcript.clone());
        self.engine.set_instructions("Watch the stars.".into());
        self.engine.restore_tasks(self.tasks.waiting.clone());
        self.offer(self.tools.clone());
        self.start(epoch)
    }

    /// The sources offer these tools from now on.
    fn offer(&mut self, tools: Vec<ToolSpec>) -> Vec<EngineEffect> {
        self.tools.clone_from(&tools);
        self.feed(EngineInput::ToolsChanged {
            tools,
            silent: Vec::new(),
        })
    }

    fn feed(&mut self, input: EngineInput) -> Vec<EngineEffect> {
        if matches!(
            input,
            EngineInput::LinkSilent | EngineInput::LinkLost | EngineInput::LinkBack
        ) {
            self.silent = !matches!(input, EngineInput::LinkBack);
        }
        if let EngineInput::ToolFinished { run, .. } = &input {
            self.running.remove(run);
        }
        let before = self.engine.clone();
        let given = input.clone();
        if let EngineInput::BudgetChanged { budget } = &input {
            self.budget = budget.clone();
        }
        if let EngineInput::Answered { call, .. } = &given
            && before.view().untrusted.is_some()
            && before.call_in_flight() == Some(*call)
        {
            self.untrusted.insert((call.turn, call.call));
        }
        let effects = self.engine.handle(self.now, input);
        self.check_reasons(&before, &given);
        self.check_definitions(&before, &given);
        let before = before.view();
        let mut acted = false;
        for effect in &effects {
            match effect {
                EngineEffect::Record(record) => {
                    assert!(!acted, "journal records come before all other effects: {effects:?}");
                    self.journal(record);
                }
                EngineEffect::CallModel {
                    call,
                    purpose,
                    messages,
                    state,
                    tools,
                    answer_schema,
                } => {
                    self.answer_schema.clone_from(answer_schema);
                    self.purpose = *purpose;
                    self.block.clone_from(state);
                    self.check_offer(tools);
                    self.offered = tools.iter().map(|tool| tool.name.to_string()).collect();
                    self.call_model(*call, messages);
                }
                EngineEffect::RunTool(run, _) => self.run_tool(run),
                EngineEffect::CancelTool(run) => {
                    assert!(self.running.remove(run).is_some(), "{run} does not run");
                    self.cut.push(*run);
                }
                EngineEffect::CancelCall { call } => {
                    assert_eq!(self.in_flight.take(), Some(*call));
                    self.cancelled.push(*call);
                }
                EngineEffect::Acknowledge { call } => {
                    assert_eq!(self.in_flight.take(), Some(*call));
                    self.acknowledged.push(*call);
                }
                EngineEffect::SetTimer(timer) => self.timer = *timer,
                EngineEffect::Report => assert_ne!(self.engine.view(), before, "nothing to report"),
                EngineEffect::Stopped => self.stopped = true,
            }
            acted |= !matches!(effect, EngineEffect::Record(_));
        }
        if effects.iter().any(|effect| matches!(effect, EngineEffect::Record(_))) {
            self.saved = self.engine.snapshot();
        }
        let changed = self.engine.view() != before;
        assert_eq!(
            changed,
            effects.contains(&EngineEffect::Report),
            "each change is reported"
        );
        effects
    }

    fn journal(&mut self, record: &JournalRecord) {
        self.transcript.truncate(self.transcript.len() - record.retract);
        self.transcript.drain(record.forget.clone());
        if record.kind == RecordKind::Trimmed {
            self.forgotten += record.forget.len();
        } else if record.kind == RecordKind::Compacted {
            self.forgotten = 0;
        } else {
            assert!(record.forget.is_empty(), "{record:?}");
        }
        self.transcript.extend(record.messages.iter().cloned());
        self.tasks.change(record);
        self.journal.push(record.clone());
    }

    fn call_model(&mut self, call: CallId, messages: &[Arc<Message>]) {
        assert_eq!(self.in_flight, None, "one call at a time");
        // Only an approved run that was deferred may be under way.
        let is_deferred = |run: &ToolRunId| self.settings.defers_approvals && self.approvals(*run).count() > 0;
        assert!(self.running.keys().all(is_deferred), "a call while tools run");
        match self.issued.last() {
            Some(last) if *last == call => assert!(self.restarted, "{call} was sent twice by one process"),
            Some(last) => assert!(*last < call, "{call} after {last}"),
            None => {}
        }
        let heads = usize::from(self.engine.head().is_some());
        let sent = messages.get(1 + heads..).unwrap_or_default();
        let cleared = self.engine.cleared();
        let rendered = |messages: &[Arc<Message>]| sizes::rendered(messages, cleared).collect::<Vec<_>>();
        if matches!(self.purpose, CallPurpose::Turn | CallPurpose::Compaction) {
            self.check_head(&messages[1]);
        }
        match self.purpose {
            CallPurpose::Heartbeat | CallPurpose::Chat => {
                let own = self.engine.state.turn.as_ref().expect("a turn").messages();
                let before = self.transcript.len() - own;
                assert_eq!(
                    messages[1..],
                    rendered(&self.transcript[before..]),
                    "its own conversation"
                );
            }
            CallPurpose::Turn => {
                let left_out = self.engine.left_out();
                let mut kept = rendered(&self.transcript);
                kept.drain(left_out);
                crate::context::images::limit(&mut kept, self.settings.image_input);
                assert_eq!(
                    sent, kept,
                    "the prompt is what the journal holds, except for what is left out on trial, and for older images"
                );
            }
            CallPurpose::Compaction => {
                let (request, oldest) = sent.split_last().expect("a request");
                assert!(matches!(**request, Message::User { .. }) && !oldest.is_empty());
                assert!(
                    rendered(&self.transcript).starts_with(oldest),
                    "it is of what the journal holds"
                );
                let next = self.transcript.get(oldest.len());
                let parted = next.is_some_and(|next| matches!(**next, Message::Tool { .. }));
                assert!(!parted, "a call and its results leave together");
            }
            CallPurpose::Precheck
            | CallPurpose::Signal
            | CallPurpose::Judge
            | CallPurpose::Confidence
            | CallPurpose::LightJudge
            | CallPurpose::LightConfidence => {}
        }
        let is_between = self.purpose.uses_light_model() || self.purpose.is_of_mode();
        assert_eq!(call.call == 0, is_between);
        check_prompt(messages);
        self.in_flight = Some(call);
        self.issued.push(call);
        self.prompt = messages.to_vec();
        self.restarted = false;
    }

    /// Nothing leaves a prompt without a text in it that says so.
    fn check_head(&self, first: &Message) {
        let state = &self.engine.state;
        let Message::User { text } = first else {
            panic!("not the runtime's word: {first:?}");
        };
        if let Some(summary) = &state.summary {
            let beginning = &summary[..summary.floor_char_boundary(20)];
            assert!(text.contains(beginning), "the summary is gone: {text}");
        }
        let forgotten = self.forgotten + self.engine.left_out().len();
        if forgotten > 0 {
            let left = format!("{forgotten} messages left your context without a summary");
            assert!(text.contains(&left), "{left}: {text}");
        }
    }

    fn run_tool(&mut self, run: &ToolRun) {
        let intent = |record: &JournalRecord| {
            let of_run = record.tool.as_ref().filter(|tool| tool.run == run.id);
            record.kind == RecordKind::ToolIntent && of_run.is_some()
        };
        assert!(self.journal.iter().any(intent), "{} has no intent", run.id);
        let rule = |name: &str| self.tools.iter().find(|tool| tool.name == name);
        let reads = |name: &str| rule(name).is_some_and(|tool| tool.effect == ToolEffect::Read);
        if reads(&run.name) {
            assert!(self.running.len() < 4 && self.running.values().all(|other| reads(&other.name)));
        } else {
            assert!(self.running.is_empty(), "{} does not run alone", run.id);
            assert!(!self.silent, "{} was sent without the link", run.id);
        }
        for before in &self.sent {
            assert_eq!(before.id == run.id, before.idempotency_key == run.idempotency_key);
            if before.id == run.id {
                assert_eq!(before, run);
                let may = rule(&run.name).is_some_and(|tool| {
                    tool.effect == ToolEffect::Read
                        || tool.idempotent
                        || tool.on_unknown == UnknownOutcomePolicy::Retry
                        || self.engine.state.requests.runs(run.id)
                        || self.approvals(run.id).any(|note| note.contains("-try"))
                });
                assert!(may, "{} was sent twice", run.id);
            }
        }
        let is_after = self.untrusted.contains(&(run.id.turn, run.id.call));
        let is_of_user = self.engine.state.requests.runs(run.id);
        if !is_of_user
            && rule(&run.name)
                .is_some_and(|tool| tool.needs_approval || (is_after && tool.needs_approval_after_untrusted))
        {
            let tries = self.sent.iter().filter(|sent| sent.id == run.id).count();
            assert!(self.approvals(run.id).count() > tries, "{} was not approved", run.id);
        }
        assert!(self.running.insert(run.id, run.clone()).is_none());
        self.sent.push(run.clone());
    }

    /// The approvals of a run in the journal.
    fn approvals(&self, run: ToolRunId) -> impl Iterator<Item = &str> {
        let of_run = move |record: &&JournalRecord| {
            record.kind == RecordKind::GateResolved && record.tool.as_ref().is_some_and(|tool| tool.run == run)
        };
        let notes = self.journal.iter().filter(of_run).map(|record| record.note.as_str());
        notes.filter(|note| note.contains(" approved by "))
    }

    /// Reasons clear only by their own rule; held calls are probed by theirs.
    fn check_reasons(&self, before: &Engine, input: &EngineInput) {
        let after = &self.engine.state;
        let by_name = |call: &CallId| before.call_in_flight() == Some(*call);
        for held in before.view().reasons {
            let hold = before.state.reasons.get(held.reason);
            let probe = hold.and_then(ActivePause::probe);
            let sent = matches!(probe, Some(ProbeState::Sent(_)));
            if let Some(now) = after.reasons.get(held.reason) {
                let new_probe =
                    matches!(now.probe(), Some(ProbeState::At(_))) && !matches!(probe, Some(ProbeState::At(_)));
                let asked_again = matches!(
                    input,
                    EngineInput::BudgetChanged { .. } | EngineInput::Started { .. } | EngineInput::Failed { .. }
                );
                assert!(!new_probe || asked_again, "{:?} is tried for {input:?}", held.reason);
                continue;
            }
            if self
                .engine
                .view()
                .reasons
                .iter()
                .any(|other| other.reason == held.reason)
            {
                continue;
            }
            let by_time = held.until.is_some_and(|until| until <= self.now);
            let by_input = match held.reason {
                PauseReason::ConsecutiveErrors
                | PauseReason::ConsecutiveToolFailures
                | PauseReason::CrashLoop
                | PauseReason::ModelUnreachable
                | PauseReason::AuthenticationFailed
                | PauseReason::QuotaExceeded
                | PauseReason::ModelRefused => {
                    matches!(input, EngineInput::ResumeRequested { .. })
                }
                PauseReason::LowConfidence | PauseReason::Escalated => {
                    // A new process may run another mode.
                    matches!(input, EngineInput::GateAnswered(_) | EngineInput::Started { .. })
                        || before.first_gate_expiry().is_some_and(|at| at <= self.now)
                }
                PauseReason::ToolCallNeedsApproval | PauseReason::UnknownOutcome => {
                    // The end of a deferred call makes room for the one that the loop waits for.
                    let ended = matches!(input, EngineInput::ToolFinished { .. } | EngineInput::Started { .. })
                        || before.first_gate_expiry().is_some_and(|at| at <= self.now);
                    matches!(input, EngineInput::GateAnswered(_)) || (self.settings.defers_approvals && ended)
                }
                PauseReason::LinkLost => matches!(input, EngineInput::LinkBack | EngineInput::Started { .. }),
                PauseReason::SuspendedBySpec => matches!(input, EngineInput::Started { .. }),
                PauseReason::MaxConsecutiveTurns | PauseReason::ActionsPerMinute | PauseReason::ProviderRateLimit => {
                    false
                }
                PauseReason::RateWindow => {
                    let mut before = before.clone();
                    before.state.used.handle_clock_rollback(self.now);
                    before.settings = self.settings.clone();
                    before.trip_of_window(self.now).is_none()
                }
                // Only the clock decides, even if it was set back.
                PauseReason::OutsideActiveHours => {
                    let hours = self.settings.active_hours.as_ref();
                    hours.is_none_or(|hours| matches!(hours.at(self.now), WindowPosition::Inside { .. }))
                }
                // The attempt was let through: it ended, or was not refused in time.
                PauseReason::BudgetExhausted
                | PauseReason::TokensPerHour
                | PauseReason::TotalTokens
                | PauseReason::TotalCost
                | PauseReason::CallExceedsLimit
                | PauseReason::BudgetAsk
                | PauseReason::BudgetUnavailable => match input {
                    EngineInput::Answered { call, .. } | EngineInput::Failed { call, .. } => sent && by_name(call),
                    // It was cancelled.
                    EngineInput::BudgetChanged { budget } => sent && budget.stop.is_some(),
                    EngineInput::Started { .. }
                    | EngineInput::Timer
                    | EngineInput::ToolsChanged { .. }
                    | EngineInput::WakeEventsChanged { .. }
                    | EngineInput::ResourceUsed { .. }
                    | EngineInput::ToolFinished { .. }
                    | EngineInput::Sensed(_)
                    | EngineInput::TaskOffered(_)
                    | EngineInput::ScaleDown
                    | EngineInput::SensorFailed { .. }
                    | EngineInput::GateAnswered(_)
                    | EngineInput::Score(_)
                    | EngineInput::ScoreTaken { .. }
                    | EngineInput::LinkSilent
                    | EngineInput::WakeRequested { .. }
                    | EngineInput::ResumeRequested { .. }
                    | EngineInput::StopRequested { .. }
                    | EngineInput::LinkLost
                    | EngineInput::LinkBack
                    | EngineInput::Stop { .. }
                    | EngineInput::DrainEnded => matches!(probe, Some(ProbeState::Sent(moment)) if moment <= self.now),
                },
                PauseReason::LoopDetected => {
                    let unwanted = self.settings.loop_detection.mode != DetectionMode::Enforce;
                    matches!(input, EngineInput::ResumeRequested { .. })
                        || unwanted && matches!(input, EngineInput::Started { .. })
                }
                PauseReason::BoundViolated => matches!(input, EngineInput::ResumeRequested { .. }),
            };
            assert!(by_time || by_input, "{:?} cleared by {input:?}", held.reason);
        }
    }

    fn answer(&mut self, answer: ModelAnswer) -> Vec<EngineEffect> {
        let call = self.in_flight.expect("a call in flight");
        self.feed(EngineInput::Answered { call, answer })
    }

    fn fail(&mut self, kind: FailureKind) -> Vec<EngineEffect> {
        self.fail_with(failure(kind))
    }

    fn fail_with(&mut self, failure: CallFailure) -> Vec<EngineEffect> {
        let call = self.in_flight.expect("a call in flight");
        self.feed(EngineInput::Failed { call, failure })
    }

    /// Time passes; the timer fires when it is due.
    fn pass(&mut self, time: SignedDuration) {
        let end = self.now + time;
        for _ in 0..1000 {
            match self.timer.filter(|timer| *timer <= end) {
                Some(timer) => {
                    self.now = self.now.max(timer);
                    self.timer = None;
                    self.feed(EngineInput::Timer);
                }
                None => break,
            }
        }
        self.now = end;
    }

    /// Time passes until the next timer, and no further.
    fn next_timer(&mut self) -> SignedDuration {
        let timer = self.timer.expect("a timer");
        let wait = timer.duration_since(self.now);
        self.pass(wait);
        wait
    }

    /// A turn without a tool, and the delay after it.
    fn turn(&mut self) {
        self.answer(says("nothing new"));
        self.pass(SignedDuration::from_millis(100));
    }

    /// A turn that fails at once.
    fn failed_turn(&mut self) {
        self.fail(FailureKind::BadResponse);
    }

    /// A turn whose only answer is a refusal.
    fn refused_turn(&mut self) {
        self.answer(ModelAnswer {
            finish: FinishReason::Refused,
            ..ModelAnswer::default()
        });
    }

    fn state(&self) -> LoopState {
        self.engine.view().state
    }

    fn reasons(&self) -> Vec<PauseReason> {
        self.engine.view().reasons.iter().map(|held| held.reason).collect()
    }

    /// The newest message of the prompt last sent.
    fn observed(&self) -> &str {
        match self.prompt.last().map(|message| &**message) {
            Some(Message::User { text }) => text,
            other => panic!("no observe message: {other:?}"),
        }
    }

    fn result(&self) -> &str {
        match self.transcript.last().map(|message| &**message) {
            Some(Message::Tool { text, .. }) => text,
            other => panic!("no tool result: {other:?}"),
        }
    }

    fn notes(&self, kind: RecordKind) -> Vec<&str> {
        let of_kind = self.journal.iter().filter(|record| record.kind == kind);
        of_kind.map(|record| record.note.as_str()).collect()
    }
}
