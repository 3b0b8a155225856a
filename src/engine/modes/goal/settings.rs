//! What the engine needs of `spec.goal`.

use std::fmt::Write as _;

use jiff::SignedDuration;
use serde_json::{Value, json};

use crate::settings::SettingsError;
use agentloop_api::goal::{AcceptanceCriterion, GoalArtifact, GoalSpec, QuestionModel};
use agentloop_api::money::micro_usd;
use agentloop_support::hash::sha256_hex;
use agentloop_support::json_schema;

/// The goal, how it is checked, and its limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GoalSettings {
    pub description: String,
    pub criteria: Vec<Criterion>,
    /// Files that must exist.
    pub artifacts: Vec<GoalArtifact>,
    /// Names and texts.
    pub constraints: Vec<(String, String)>,
    pub max_steps: u32,
    pub max_attempts: u32,
    pub timeout: SignedDuration,
    /// In micro-dollars; `None`: no limit.
    pub max_cost: Option<i64>,
    /// Steps between two confidence checks.
    pub confidence_every: u32,
    /// In percent.
    pub confidence_threshold: u8,
    pub confidence_model: QuestionModel,
}

impl GoalSettings {
    /// A hash of what the states of criteria are about.
    pub fn definition(&self) -> String {
        let mut definition = format!("{:?} {:?}", self.description, self.criteria);
        // The hash of a goal without artifacts is in journals that are older than they.
        if !self.artifacts.is_empty() {
            let _ = write!(definition, " {:?}", self.artifacts);
        }
        sha256_hex(definition, 16)
    }
}

/// One criterion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Criterion {
    pub name: String,
    pub check: CriterionCheck,
}

/// How a criterion is checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CriterionCheck {
    /// The result of `finish` matches this regular expression.
    Regex(String),
    /// The result of `finish` is JSON and fits this schema.
    Schema(Value),
    /// A model answers this question about the result of `finish` with yes.
    Judge(JudgeCheck),
    /// This shell command succeeds.
    Command(CommandCheck),
}

/// A question to a model, with the answer yes or no.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JudgeCheck {
    pub question: String,
    pub model: QuestionModel,
}

/// A shell command, and when it succeeds: if what is set here holds, or, if nothing is, with exit code 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandCheck {
    pub run: String,
    /// Its output matches this regular expression.
    pub pass_regex: Option<String>,
    /// The JUnit report that it writes at this path has tests, and no failures.
    pub junit: Option<String>,
}

impl CriterionCheck {
    /// Whether it is about the result of `finish`.
    pub const fn needs_result(&self) -> bool {
        !matches!(self, Self::Command(_))
    }
}

impl TryFrom<&GoalSpec> for GoalSettings {
    type Error = SettingsError;

    fn try_from(goal: &GoalSpec) -> Result<Self, SettingsError> {
        let criteria: Result<Vec<Criterion>, SettingsError> =
            goal.acceptance_criteria.iter().map(Criterion::try_from).collect();
        let max_cost = goal.max_cost_usd.as_deref();
        let max_cost = max_cost.map(|text| micro_usd(text).map_err(|_| SettingsError::GoalCost));
        Ok(Self {
            description: goal.description.clone(),
            criteria: criteria?,
            artifacts: goal.artifacts.clone(),
            constraints: goal.constraints.clone().into_iter().collect(),
            max_steps: goal.max_steps,
            max_attempts: goal.max_attempts,
            timeout: SignedDuration::from_secs(goal.timeout_seconds.into()),
            max_cost: max_cost.transpose()?,
            confidence_every: goal.confidence.every_steps,
            confidence_threshold: u8::try_from(goal.confidence.threshold_percent).unwrap_or(100),
            confidence_model: goal.confidence.model,
        })
    }
}

impl TryFrom<&AcceptanceCriterion> for Criterion {
    type Error = SettingsError;

    fn try_from(criterion: &AcceptanceCriterion) -> Result<Self, SettingsError> {
        let unusable = |field: &str, problem: String| SettingsError::GoalCriterion {
            name: criterion.name.clone(),
            field: field.to_owned(),
            problem,
        };
        let check = if let Some(regex) = &criterion.regex {
            json_schema::check(&matching(regex)).map_err(|problem| unusable("regex", problem))?;
            CriterionCheck::Regex(regex.clone())
        } else if let Some(schema) = &criterion.json_schema {
            json_schema::check(schema).map_err(|problem| unusable("jsonSchema", problem))?;
            CriterionCheck::Schema(schema.clone())
        } else if let Some(question) = &criterion.judge {
            CriterionCheck::Judge(JudgeCheck {
                question: question.clone(),
                model: criterion.judge_model,
            })
        } else if let Some(command) = &criterion.command {
            if let Some(regex) = &command.pass_regex {
                json_schema::check(&matching(regex)).map_err(|problem| unusable("command.passRegex", problem))?;
            }
            CriterionCheck::Command(CommandCheck {
                run: command.run.clone(),
                pass_regex: command.pass_regex.clone(),
                junit: command.junit.clone(),
            })
        } else {
            return Err(unusable("regex", "no check is set".to_owned()));
        };
        Ok(Self {
            name: criterion.name.clone(),
            check,
        })
    }
}

/// A schema of the texts in which this regular expression matches somewhere.
fn matching(regex: &str) -> Value {
    json!({"type": "string", "pattern": regex})
}

/// Whether a regular expression matches anywhere in a text.
pub fn matches(regex: &str, text: &str) -> bool {
    json_schema::violation(&matching(regex), &Value::String(text.to_owned())).is_none()
}

/// Checks a result against a schema. The error says what does not fit.
pub fn fits(schema: &Value, result: &str) -> Result<(), String> {
    let value: Value = serde_json::from_str(result.trim()).map_err(|error| format!("it is not JSON: {error}"))?;
    json_schema::violation(schema, &value).map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_regular_expression_matches_anywhere_and_a_schema_reports_mismatches() {
        assert!(matches("[0-9]+ passed", "test result: ok. 12 passed"));
        assert!(!matches("^[0-9]+ passed", "test result: ok. 12 passed"));
        let schema = json!({"type": "object", "required": ["url"]});
        assert_eq!(fits(&schema, " {\"url\": \"x\"}\n"), Ok(()));
        assert!(fits(&schema, "{}").unwrap_err().contains("url"));
        assert!(fits(&schema, "done").unwrap_err().contains("not JSON"));
    }
}
