//! Mode `Goal`: the agent works in steps until all criteria are met, or a limit or a person ends the loop.
//!
//! A step is one turn in the agent's lasting conversation, then the check of the criteria, then, now and then, a confidence
//! check. A step whose calls all fail is attempted again, later and differently. Owns the order of these, what ends the loop,
//! and what each of them means; the engine makes the calls, the tool runs and the gates.

mod artifacts;
mod attempts;
mod denials;
#[cfg(test)]
mod end_tests;
mod progress;
mod run_totals;
mod settings;
mod texts;
mod tools;
mod validation;
mod verdicts;

use std::collections::{BTreeMap, VecDeque};

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use self::artifacts::ArtifactsState;
pub use self::artifacts::CheckedArtifacts;
use self::attempts::{AttemptFailure, MAX_AVOIDED, StepAttempt, StepRecord};
use self::denials::{DenialCounts, EscalationCause};
#[cfg(test)]
pub use self::denials::{ESCALATED_AFTER, HIDDEN_AFTER};
pub use self::progress::{GoalProgress, GoalView};
use self::run_totals::RunTotals;
pub use self::settings::{CommandCheck, GoalSettings};
#[cfg(test)]
pub use self::settings::{Criterion, CriterionCheck, JudgeCheck};
pub use self::texts::RUNTIME;
pub use self::validation::{CheckedCriterion, StepValidation, Verdict};
use self::validation::{CriterionResult, CriterionState, PendingCheck, Validation};
use self::verdicts::{read_confidence, read_progress, read_verdict};
use super::{
    CheckEnd, LoopMode, LoopPace, ModeApproval, ModeCallDecision, ModeCheck, ModeContext, ModeQuestion, NextStep,
    TurnEnd, TurnOpening,
};
use crate::GateCause;
use crate::context::prompt;
use crate::loop_detection::{CallSignature, ShortHash, signature};
use crate::message::{ModelAnswer, ToolCall, ToolDefinition};
use crate::settings::{EngineSettings, ModeSettings};
use crate::time_math;
use crate::tools::admission::{DenialReason, DeniedCall};
use crate::turn::kind::{ModeTurnKind, TurnKind};
use agentloop_api::goal::GoalEnd;
use agentloop_api::status::{GateKind, LoopOutcome};

/// Equal errors in a row that are a loop.
pub const EQUAL_ERRORS: u32 = 3;
/// The tool that runs the commands of criteria.
const SHELL: &str = "toolbox__shell";
/// Attempts that a confidence check sees.
const MAX_HISTORY: usize = 5;
/// Maximum number of bytes of an error, of what a check said and of what the agent wrote.
const MAX_SAID: usize = 600;

/// The state between the turns.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(default)]
pub struct GoalState {
    /// When the loop began; later by the time in which it waited for a person or answered requests.
    started_at: Option<Timestamp>,
    /// Completed steps.
    steps: u32,
    /// Failed attempts at the current step.
    failed_attempts: u32,
    /// When the next attempt may begin.
    retry_at: Option<Timestamp>,
    /// How the last attempt or step failed; empty: it did not.
    last_error: String,
    /// The attempt under way.
    attempt: StepAttempt,
    /// Calls that failed in the failed attempts at this step.
    avoided: Vec<ShortHash>,
    /// The error of the last failed attempt, and how often in a row.
    same_error: (ShortHash, u32),
    /// The result that was last handed in.
    result: String,
    criteria: BTreeMap<String, CriterionState>,
    artifacts: ArtifactsState,
    /// Hash of the definitions of the goal and its criteria that the states are about.
    definition: String,
    /// The check of the criteria that is under way.
    validation: Option<Validation>,
    /// All criteria were met in one check, and all artifacts existed.
    met: bool,
    /// Completed steps at the last confidence check.
    checked_at: u32,
    last_confidence: Option<u8>,
    /// The progress that the last confidence check has estimated.
    estimate: Option<u8>,
    /// Why the agent has requested a confidence check.
    requested: Option<String>,
    /// What has to be approved before the next step.
    approval: Option<GateKind>,
    /// Why, if its kind is `Escalated`.
    because: EscalationCause,
    /// What was not approved.
    denied: Option<GateKind>,
    denials: DenialCounts,
    /// Cost of all answered calls, in micro-dollars.
    cost: i64,
    /// A call was answered whose cost is unknown.
    unknown_cost: bool,
    /// The last attempts, oldest first.
    history: VecDeque<StepRecord>,
    /// What ended the loop.
    ended: Option<GoalEnd>,
    /// What the run took; `None`: a version that did not count it has begun it.
    totals: Option<RunTotals>,
    /// The attempt that is over and not recorded yet, which it is with the same input.
    #[serde(skip)]
    report: Option<StepValidation>,
}

fn goal(settings: &EngineSettings) -> Option<&GoalSettings> {
    if let ModeSettings::Goal(goal) = &settings.mode {
        Some(goal)
    } else {
        None
    }
}

impl GoalState {
    /// What ends the loop, in this order.
    fn end(&self, context: &ModeContext<'_>) -> Option<GoalEnd> {
        let goal = goal(context.settings)?;
        let age = self
            .started_at
            .map_or(SignedDuration::ZERO, |at| context.now.duration_since(at));
        let is_over_cost = |max| self.unknown_cost || self.cost >= max;
        let escalated = self.denied == Some(GateKind::Escalated);
        let for_denials = matches!(self.because, EscalationCause::Denials(_));
        // A step that meets the goal may reach a limit as well: its check is completed first.
        let checking = self.validation.is_some();
        [
            (self.met, GoalEnd::CriteriaMet),
            (escalated && !for_denials, GoalEnd::LoopDetected),
            (escalated && for_denials, GoalEnd::CallsDenied),
            (self.denied == Some(GateKind::LowConfidence), GoalEnd::LowConfidence),
            (!checking && age >= goal.timeout, GoalEnd::Timeout),
            (!checking && goal.max_cost.is_some_and(is_over_cost), GoalEnd::CostLimit),
            (self.steps >= goal.max_steps, GoalEnd::StepLimit),
        ]
        .into_iter()
        .find_map(|(ends, end)| ends.then_some(end))
    }

    /// The criteria that were not met at their last check.
    fn unmet<'a>(&self, goal: &'a GoalSettings) -> Vec<&'a str> {
        let is_met = |name: &str| self.criteria.get(name).is_some_and(|criterion| criterion.met);
        let names = goal.criteria.iter().map(|criterion| &*criterion.name);
        names.filter(|name| !is_met(name)).collect()
    }

    /// What the last check of a criterion found.
    fn said(&self, name: &str) -> Option<&str> {
        let criterion = self.criteria.get(name)?;
        (!criterion.said.is_empty()).then_some(&*criterion.said)
    }

    fn is_confidence_due(&self, goal: &GoalSettings) -> bool {
        let since = self.steps.saturating_sub(self.checked_at);
        self.failed_attempts == 0 && (self.requested.is_some() || since >= goal.confidence_every)
    }

    fn confidence_answered(&mut self, answer: Option<&str>, goal: &GoalSettings) {
        self.checked_at = self.steps;
        self.requested = None;
        self.last_confidence = answer.and_then(read_confidence);
        self.estimate = answer.and_then(read_progress);
        if self
            .last_confidence
            .is_none_or(|percent| percent < goal.confidence_threshold)
        {
            self.approval = Some(GateKind::LowConfidence);
            self.show_usage();
        }
    }
}

impl LoopMode for GoalState {
    fn runtime_text(&self) -> &'static str {
        RUNTIME
    }

    fn assignment(&self, settings: &EngineSettings) -> Option<String> {
        goal(settings).map(texts::assignment)
    }

    fn started(&mut self, restarted: bool, context: &ModeContext<'_>) {
        if restarted {
            *self = Self::default();
        }
        if self.started_at.is_none() {
            self.totals = Some(RunTotals::default());
        }
        self.started_at.get_or_insert(context.now);
        let definition = goal(context.settings).map_or_else(String::new, GoalSettings::definition);
        if std::mem::replace(&mut self.definition, definition) != self.definition {
            self.check_again(context);
        }
    }

    fn clock_set_back(&mut self, back: SignedDuration, _context: &ModeContext<'_>) {
        self.started_at = self.started_at.map(|at| time_math::before(at, back));
        self.retry_at = self.retry_at.map(|at| time_math::before(at, back));
        let ended = self.validation.as_mut().map(|validation| &mut validation.of.began_at);
        for began_at in ended.into_iter().chain([&mut self.attempt.began_at]) {
            *began_at = began_at.map(|at| time_math::before(at, back));
        }
        if let Some(totals) = &mut self.totals {
            totals.clock_set_back(back);
        }
    }

    fn next(&self, context: &ModeContext<'_>) -> NextStep {
        let Some(goal) = goal(context.settings) else {
            return NextStep::Wait;
        };
        match self.end(context) {
            Some(GoalEnd::CriteriaMet) => return NextStep::Stop(LoopOutcome::Completed),
            Some(GoalEnd::LoopDetected | GoalEnd::CallsDenied | GoalEnd::LowConfidence) => {
                return NextStep::Stop(LoopOutcome::Escalated);
            }
            Some(GoalEnd::Timeout | GoalEnd::CostLimit | GoalEnd::StepLimit) => {
                return NextStep::Stop(LoopOutcome::Failed);
            }
            None => {}
        }
        match self.pending(context.settings) {
            Some(PendingCheck::Command(..) | PendingCheck::Artifacts(_)) => return NextStep::Check,
            Some(PendingCheck::Judge(..)) => return NextStep::Ask,
            None => {}
        }
        if self.approval.is_some() {
            return NextStep::RequestApproval;
        }
        if self.is_confidence_due(goal) {
            return NextStep::Ask;
        }
        let at = context.next_turn.unwrap_or(context.now);
        NextStep::Begin {
            kind: TurnKind::Own,
            at: self.retry_at.map_or(at, |retry_at| retry_at.max(at)),
        }
    }

    fn begin_turn(&mut self, _kind: ModeTurnKind, opening: &TurnOpening<'_>, context: &ModeContext<'_>) -> String {
        if let Some(totals) = &mut self.totals {
            totals.turn_begins(context.now);
        }
        self.attempt = StepAttempt {
            turn: opening.number,
            began_at: Some(context.now),
            ..StepAttempt::default()
        };
        goal(context.settings).map_or_else(String::new, |goal| texts::step_opening(self, goal, opening, context))
    }

    fn turn_ended(&mut self, _kind: ModeTurnKind, end: &TurnEnd<'_>, context: &ModeContext<'_>) -> NextStep {
        self.show_usage();
        let attempt = std::mem::take(&mut self.attempt);
        let failed = attempt.calls > 0 && attempt.failed == attempt.calls;
        match end {
            TurnEnd::Completed {
                pace: LoopPace::Continue,
                last_text,
            } if failed => {
                let error = attempt.error.clone();
                let failure = AttemptFailure {
                    kind: AttemptFailure::CALLS,
                    error: &error,
                    text: last_text,
                };
                self.attempt_failed(attempt, failure, context);
            }
            TurnEnd::Completed { pace, last_text } => {
                let ended = self.ended(&attempt);
                self.record(None, last_text);
                self.same_error = (0, 0);
                self.next_step();
                if let LoopPace::CheckConfidence { reason } = pace {
                    self.requested = Some(reason.clone());
                }
                let result = if let LoopPace::Finish { result } = pace {
                    result.as_str()
                } else {
                    None
                };
                self.validate(ended, result, context);
            }
            TurnEnd::Failed { .. } => {
                let error = context.last_failure.map_or_else(String::new, ToString::to_string);
                let failure = AttemptFailure {
                    kind: context.last_failure.map_or("", |failure| failure.kind.as_ref()),
                    error: &error,
                    text: "",
                };
                self.attempt_failed(attempt, failure, context);
            }
        }
        self.next(context)
    }

    fn tools(&self, _settings: &EngineSettings, _events: Option<&[String]>) -> Vec<ToolDefinition> {
        tools::definitions()
    }

    fn decide_call(
        &self,
        _kind: ModeTurnKind,
        call: &ToolCall,
        _context: &ModeContext<'_>,
    ) -> Option<ModeCallDecision> {
        if let Some(decision) = tools::decide(call) {
            return Some(decision);
        }
        let CallSignature { raw, .. } = signature::call(&call.name, &call.arguments);
        let repeats = self.attempt.admitted == 0 && self.avoided.contains(&raw);
        repeats.then(|| {
            ModeCallDecision::Rejected(format!(
                "not run: {} with these arguments has already failed in an earlier attempt at this step; an attempt must begin \
                 differently: use another tool, other arguments, or another way",
                call.name
            ))
        })
    }

    fn call_ended(&mut self, call: &ToolCall, text: &str, was_admitted: bool, has_failed: bool) {
        if tools::decide(call).is_some() {
            return;
        }
        let attempt = &mut self.attempt;
        attempt.calls = attempt.calls.saturating_add(1);
        attempt.admitted = attempt.admitted.saturating_add(u32::from(was_admitted));
        if has_failed {
            attempt.failed = attempt.failed.saturating_add(1);
            attempt.error = prompt::truncate(text, MAX_SAID);
            if attempt.failures.len() < MAX_AVOIDED {
                attempt.failures.push(signature::call(&call.name, &call.arguments).raw);
            }
        }
    }

    fn environment_changed(&mut self, context: &ModeContext<'_>) {
        self.restart_check(context);
    }

    fn interrupted(&mut self, time: SignedDuration, context: &ModeContext<'_>) {
        // The loop may have ended and begun again while the request was open.
        let later = |at| time_math::after(at, time).min(context.now);
        self.started_at = self.started_at.map(later);
    }

    fn call_sent(&mut self) {
        if let Some(totals) = &mut self.totals {
            totals.call_sent();
        }
    }

    fn call_refused(&mut self) {
        if let Some(totals) = &mut self.totals {
            totals.call_refused();
        }
    }

    fn call_answered(&mut self, answer: &ModelAnswer) {
        if let Some(totals) = &mut self.totals {
            totals.call_answered(answer);
        }
        match answer.cost {
            Some(cost) => self.cost = self.cost.saturating_add(cost),
            None => self.unknown_cost = true,
        }
    }

    fn escalates_loops(&self) -> bool {
        true
    }

    fn loop_detected(&mut self) {
        self.repeats();
    }

    fn denies(&self, call: &ToolCall) -> Option<DeniedCall> {
        self.denials.denies(call)
    }

    fn call_denied(&mut self, call: &ToolCall, why: DenialReason) {
        self.count_denial(call, why);
    }

    fn question(&self, context: &ModeContext<'_>) -> Option<ModeQuestion> {
        let goal = goal(context.settings)?;
        match self.pending(context.settings) {
            Some(PendingCheck::Judge(_, check)) => Some(texts::judge(goal, check, &self.result, context.settings)),
            Some(_) => None,
            None => self
                .is_confidence_due(goal)
                .then(|| texts::confidence(self, goal, context.settings)),
        }
    }

    fn answered(&mut self, answer: Option<&str>, context: &ModeContext<'_>) -> bool {
        let Some(goal) = goal(context.settings) else {
            return false;
        };
        match self.pending(context.settings) {
            Some(PendingCheck::Judge(name, _)) => {
                let verdict = answer.and_then(read_verdict);
                let is_readable = verdict.is_some();
                let unread = || CriterionResult::unknown("the judge gave no clear answer");
                self.verdict(name, verdict.unwrap_or_else(unread));
                self.settle(context);
                is_readable
            }
            Some(_) => false,
            None => {
                self.confidence_answered(answer, goal);
                self.last_confidence.is_some()
            }
        }
    }

    fn check(&self, context: &ModeContext<'_>) -> Option<ModeCheck> {
        match self.pending(context.settings)? {
            PendingCheck::Command(_, CommandCheck { run, junit, .. }) => {
                let arguments = [("command", Some(run)), ("junit", junit.as_ref())].into_iter();
                let set = arguments.filter_map(|(name, value)| Some((name.to_owned(), value?.clone().into())));
                Some(ModeCheck {
                    tool: SHELL,
                    arguments: set.collect(),
                })
            }
            PendingCheck::Artifacts(declared) => Some(artifacts::check(declared)),
            PendingCheck::Judge(..) => None,
        }
    }

    fn checked(&mut self, end: CheckEnd<'_>, context: &ModeContext<'_>) {
        let Some(goal) = goal(context.settings) else {
            return;
        };
        let toolbox = context.settings.toolbox_name();
        match self.pending(context.settings) {
            Some(PendingCheck::Command(name, command)) => {
                let verdict = match end {
                    CheckEnd::Ran(text) => verdicts::of_command(command, text, &toolbox),
                    CheckEnd::NotRun(why) => CriterionResult::unknown(why),
                };
                self.verdict(name, verdict);
            }
            Some(PendingCheck::Artifacts(_)) => self.artifacts_checked(goal, end, &toolbox),
            Some(PendingCheck::Judge(..)) | None => return,
        }
        self.settle(context);
    }

    fn approval(&self, context: &ModeContext<'_>) -> Option<ModeApproval> {
        let goal = goal(context.settings)?;
        let kind = self.approval?;
        let message = match (kind, self.last_confidence) {
            (GateKind::LowConfidence, Some(percent)) => format!(
                "after {} of {} steps the confidence that the goal will be reached is {percent} %, below {} % \
                 (goal.confidence.thresholdPercent); the loop waits for an approval to continue",
                self.steps, goal.max_steps, goal.confidence_threshold
            ),
            (GateKind::LowConfidence, None) => format!(
                "after {} of {} steps the confidence that the goal will be reached could not be read; the loop waits for an \
                 approval to continue",
                self.steps, goal.max_steps
            ),
            _ => {
                let (steps, max) = (self.steps, goal.max_steps);
                let what = match &self.because {
                    EscalationCause::Repetition => "the loop repeats itself".to_owned(),
                    EscalationCause::Denials(tool) => {
                        format!("{} calls of {tool} were denied", self.denials.in_loop(tool))
                    }
                };
                format!("after {steps} of {max} steps {what}; it waits for an approval to continue")
            }
        };
        let cause = match (kind, &self.because) {
            (GateKind::LowConfidence, _) => GateCause::LowConfidence,
            (_, EscalationCause::Repetition) => GateCause::LoopDetected,
            (_, EscalationCause::Denials(_)) => GateCause::CallsDenied,
        };
        Some(ModeApproval { kind, cause, message })
    }

    fn approval_answered(&mut self, approved: bool, waited: SignedDuration) {
        let Some(kind) = self.approval.take() else {
            return;
        };
        self.started_at = self.started_at.map(|at| time_math::after(at, waited));
        if !approved {
            self.denied = Some(kind);
        } else if kind == GateKind::Escalated && self.because == EscalationCause::Repetition {
            self.same_error = (0, 0);
        }
    }

    fn take_validation(&mut self) -> Option<StepValidation> {
        self.report.take()
    }

    fn loop_ended(&mut self, context: &ModeContext<'_>) {
        self.ended = self.end(context);
        if let Some(totals) = &mut self.totals {
            totals.loop_ended(context.now);
        }
    }

    fn goal_view(&self, settings: &EngineSettings) -> Option<GoalView> {
        let goal = goal(settings)?;
        let unmet = self.unmet(goal);
        let names = goal.criteria.iter().map(|criterion| &*criterion.name);
        Some(GoalView {
            steps: self.steps,
            progress: self.progress(goal),
            criteria: names.map(|name| (name.to_owned(), !unmet.contains(&name))).collect(),
            artifacts: self.artifacts.statuses(&goal.artifacts),
            last_confidence: self.last_confidence,
            started_at: self.totals.and_then(|totals| totals.started_at()),
            ended_at: self.totals.and_then(|totals| totals.ended_at()),
            usage: self.totals.and_then(|totals| totals.usage()),
            end: self.ended,
        })
    }
}
