//! The check of the criteria and the artifacts after a step: what is checked next, what was found, and what is recorded of it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::artifacts::{ArtifactsCheck, ArtifactsState, CheckedArtifacts};
use super::progress::TestCounts;
use super::settings::{self, CommandCheck, Criterion, CriterionCheck, GoalSettings, JudgeCheck};
use super::{GoalState, MAX_SAID, goal};
use crate::context::prompt;
use crate::modes::ModeContext;
use crate::runtime_mark::without_marks;
use crate::settings::EngineSettings;
use agentloop_api::goal::{GoalArtifact, ProgressSource};

/// The last check of a criterion.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(default)]
pub(super) struct CriterionState {
    pub(super) met: bool,
    /// What it found.
    pub(super) said: String,
    /// The tests of the report of a command; `None`: there is no usable one.
    pub(super) tests: Option<TestCounts>,
}

/// What the check of a criterion found.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, strum::AsRefStr)]
pub enum Verdict {
    /// It is met.
    Met,
    /// It is not met.
    Unmet,
    /// The check gave no answer: the judge was not clear, or the command could not be run. Counts as not met.
    Unknown,
}

/// Which attempt at a step is over.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq)]
#[serde(default)]
pub(super) struct EndedAttempt {
    /// The number of its turn.
    pub(super) turn: i64,
    /// From 1.
    pub(super) attempt: u32,
    pub(super) began_at: Option<Timestamp>,
}

/// The check of the criteria after a step.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(default)]
pub(super) struct Validation {
    /// The attempt that has ended the step.
    pub(super) of: EndedAttempt,
    /// A result was handed in with `finish`.
    has_result: bool,
    /// Names of criteria that are still to be checked, in order.
    pending: VecDeque<String>,
    /// Names of those that are met.
    met: BTreeSet<String>,
    /// One is not met, or an artifact is missing.
    failed: bool,
    /// Those that are not met.
    not_met: BTreeMap<String, Verdict>,
    artifacts: ArtifactsCheck,
}

impl Validation {
    pub(super) fn artifacts_checked(&mut self, verdict: Verdict) {
        self.artifacts = ArtifactsCheck::Done(verdict);
        self.failed |= verdict != Verdict::Met;
    }
}

/// What is checked next by a model or a tool.
#[derive(Clone, Copy, Debug)]
pub(super) enum PendingCheck<'a> {
    /// The command of the criterion of this name.
    Command(&'a str, &'a CommandCheck),
    /// All artifacts at once.
    Artifacts(&'a [GoalArtifact]),
    /// The question of the criterion of this name.
    Judge(&'a str, &'a JudgeCheck),
}

/// What is recorded of an attempt at a step once it is over. Has no text of a model or a tool.
#[derive(Serialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct StepValidation {
    /// The number of its turn, under which it is recorded.
    #[serde(skip)]
    pub turn: i64,
    /// Number of the step, from 1.
    pub step: u32,
    /// Number of the attempt, from 1.
    pub attempt: u32,
    /// Time from the start of the attempt to the end of the check, with all pauses in between.
    pub duration_milliseconds: i64,
    /// The progress after it.
    pub progress_percent: u8,
    /// What it is measured by.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress_source: Option<ProgressSource>,
    /// The criteria that were checked, in the order of the spec.
    pub criteria: Vec<CheckedCriterion>,
    /// The artifacts; absent: they were not checked, or the goal has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub artifacts: Option<CheckedArtifacts>,
    /// The kind of the failure; absent: the attempt did not fail.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A criterion that was checked.
#[derive(Serialize, Clone, Debug, PartialEq, Eq)]
pub struct CheckedCriterion {
    pub name: String,
    pub verdict: Verdict,
}

/// How the check of a criterion ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CriterionResult {
    pub(super) verdict: Verdict,
    /// What was found; empty if it is met.
    pub(super) said: String,
    pub(super) tests: Option<TestCounts>,
}

impl CriterionResult {
    pub(super) const MET: Self = Self {
        verdict: Verdict::Met,
        said: String::new(),
        tests: None,
    };

    pub(super) fn unmet(said: impl Into<String>) -> Self {
        Self {
            verdict: Verdict::Unmet,
            said: said.into(),
            tests: None,
        }
    }

    pub(super) fn unknown(said: impl Into<String>) -> Self {
        Self {
            verdict: Verdict::Unknown,
            said: said.into(),
            tests: None,
        }
    }
}

impl StepValidation {
    /// The same in one line.
    #[must_use]
    pub fn note(&self) -> String {
        let mut note = format!(
            "step {}, attempt {}, {} ms, progress {} %",
            self.step, self.attempt, self.duration_milliseconds, self.progress_percent
        );
        if let Some(source) = &self.progress_source {
            let _ = write!(note, " by {}", source.as_ref());
        }
        if let Some(error) = &self.error {
            let _ = write!(note, ", failed: {error}");
        }
        for CheckedCriterion { name, verdict } in &self.criteria {
            let _ = write!(note, ", {name}={}", verdict.as_ref());
        }
        if let Some(CheckedArtifacts { verdict, met, declared }) = self.artifacts {
            let _ = write!(note, ", {met} of {declared} artifacts={}", verdict.as_ref());
        }
        note
    }
}

impl GoalState {
    /// What is checked next by a model or a tool. Commands may write artifacts, and judges decide last.
    pub(super) fn pending<'a>(&self, settings: &'a EngineSettings) -> Option<PendingCheck<'a>> {
        let validation = self.validation.as_ref()?;
        let goal = goal(settings)?;
        let named = |name: &String| goal.criteria.iter().find(|criterion| criterion.name == *name);
        let pending = validation.pending.iter().filter_map(named);
        let mut commands = pending.clone().filter_map(|criterion| match &criterion.check {
            CriterionCheck::Command(command) => Some(PendingCheck::Command(&criterion.name, command)),
            CriterionCheck::Regex(_) | CriterionCheck::Schema(_) | CriterionCheck::Judge(_) => None,
        });
        if let Some(command) = commands.next() {
            return Some(command);
        }
        if validation.artifacts == ArtifactsCheck::Due && !goal.artifacts.is_empty() {
            return Some(PendingCheck::Artifacts(&goal.artifacts));
        }
        let mut judges = pending.filter_map(|criterion| match &criterion.check {
            CriterionCheck::Judge(judge) => Some(PendingCheck::Judge(&criterion.name, judge)),
            CriterionCheck::Regex(_) | CriterionCheck::Schema(_) | CriterionCheck::Command(_) => None,
        });
        // A call is worth it only if it decides.
        if validation.failed { None } else { judges.next() }
    }

    /// A step has ended without an error: its criteria are checked. `result`: what was handed in with `finish`.
    pub(super) fn validate(&mut self, of: EndedAttempt, result: Option<&str>, context: &ModeContext<'_>) {
        let Some(goal) = goal(context.settings) else {
            return;
        };
        if let Some(result) = result {
            result.clone_into(&mut self.result);
        }
        let is_checked = |criterion: &&Criterion| result.is_some() || !criterion.check.needs_result();
        let pending: Vec<&Criterion> = goal.criteria.iter().filter(is_checked).collect();
        self.validation = Some(Validation {
            of,
            has_result: result.is_some(),
            pending: pending.iter().map(|criterion| criterion.name.clone()).collect(),
            artifacts: if goal.artifacts.is_empty() {
                ArtifactsCheck::NotDue
            } else {
                ArtifactsCheck::Due
            },
            ..Validation::default()
        });
        for criterion in pending {
            let verdict = match &criterion.check {
                CriterionCheck::Regex(regex) if settings::matches(regex, &self.result) => CriterionResult::MET,
                CriterionCheck::Regex(regex) => CriterionResult::unmet(format!("the result does not match {regex}")),
                CriterionCheck::Schema(schema) => {
                    settings::fits(schema, &self.result).map_or_else(CriterionResult::unmet, |()| CriterionResult::MET)
                }
                CriterionCheck::Judge(_) | CriterionCheck::Command(_) => continue,
            };
            self.verdict(&criterion.name, verdict);
        }
        self.settle(context);
    }

    /// A criterion was checked.
    pub(super) fn verdict(&mut self, name: &str, CriterionResult { verdict, said, tests }: CriterionResult) {
        let met = verdict == Verdict::Met;
        let said = prompt::truncate(without_marks(&said).trim(), MAX_SAID);
        self.criteria
            .insert(name.to_owned(), CriterionState { met, said, tests });
        let Some(validation) = &mut self.validation else {
            return;
        };
        validation.pending.retain(|pending| pending != name);
        if met {
            validation.met.insert(name.to_owned());
        } else {
            validation.failed = true;
            validation.not_met.insert(name.to_owned(), verdict);
        }
    }

    /// Ends the step if all that can be checked was.
    pub(super) fn settle(&mut self, context: &ModeContext<'_>) {
        if self.validation.is_none() || self.pending(context.settings).is_some() {
            return;
        }
        let (Some(validation), Some(goal)) = (self.validation.take(), goal(context.settings)) else {
            return;
        };
        self.steps = self.steps.saturating_add(1);
        self.show_usage();
        let mut criteria = goal.criteria.iter();
        self.met = criteria.all(|criterion| validation.met.contains(&criterion.name))
            && (goal.artifacts.is_empty() || validation.artifacts == ArtifactsCheck::Done(Verdict::Met));
        let verdict = |name: &str| match validation.not_met.get(name) {
            Some(verdict) => Some(*verdict),
            None => validation.met.contains(name).then_some(Verdict::Met),
        };
        let checked = goal.criteria.iter().filter_map(|criterion| {
            Some(CheckedCriterion {
                verdict: verdict(&criterion.name)?,
                name: criterion.name.clone(),
            })
        });
        self.report = Some(StepValidation {
            step: self.steps,
            criteria: checked.collect(),
            artifacts: self.checked_artifacts(validation.artifacts, goal),
            ..self.ended_attempt(validation.of, goal, context)
        });
    }

    /// The goal or its criteria were edited: what was met before says nothing about them. A check that was under way starts
    /// over.
    pub(super) fn check_again(&mut self, context: &ModeContext<'_>) {
        self.met = false;
        self.criteria.clear();
        self.artifacts = ArtifactsState::default();
        self.restart_check(context);
    }

    /// A check that is under way starts over with all criteria.
    pub(super) fn restart_check(&mut self, context: &ModeContext<'_>) {
        if let Some(validation) = self.validation.take() {
            let result = validation.has_result.then(|| self.result.clone());
            self.validate(validation.of, result.as_deref(), context);
        }
    }

    /// An attempt has failed, which checks nothing.
    pub(super) fn report_failure(&mut self, of: EndedAttempt, error: &str, context: &ModeContext<'_>) {
        if let Some(goal) = goal(context.settings) {
            self.report = Some(StepValidation {
                step: self.steps.saturating_add(1),
                error: Some(error.to_owned()),
                ..self.ended_attempt(of, goal, context)
            });
        }
    }

    /// What is recorded of any attempt.
    fn ended_attempt(&self, of: EndedAttempt, goal: &GoalSettings, context: &ModeContext<'_>) -> StepValidation {
        let progress = self.progress(goal);
        let took = of.began_at.map(|at| context.now.duration_since(at).as_millis().max(0));
        StepValidation {
            turn: of.turn,
            step: self.steps,
            attempt: of.attempt,
            duration_milliseconds: took.map_or(0, |took| i64::try_from(took).unwrap_or(i64::MAX)),
            progress_percent: progress.percent,
            progress_source: progress.source,
            criteria: Vec::new(),
            artifacts: None,
            error: None,
        }
    }
}
