//! Settings and status of mode `Goal`.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use strum::{AsRefStr, EnumIter, IntoStaticStr};

use super::bounds::{DNS_LABEL, free_object};
use super::first_elements::first_elements;

/// Maximum number of artifacts of a goal.
pub const MAX_ARTIFACTS: usize = 32;
/// Maximum number of criteria of a goal.
const MAX_CRITERIA: usize = 16;

/// What the agent of mode `Goal` is to achieve, how that is checked, and when the loop ends without it.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.maxCostUSD) || self.maxCostUSD.matches('^[0-9]{1,9}([.][0-9]{1,6})?$')").message(
        "spec.goal.maxCostUSD must be a decimal number in quotes with at most six decimals, such as \"2.50\""
    )
)]
pub struct GoalSpec {
    /// The goal, at most 8,192 characters. It is part of the system prompt, after the instructions.
    #[schemars(length(min = 1, max = 8192))]
    pub description: String,
    /// Checks that must all be met in the same step, together with `artifacts`, 1 to 16. `command` is checked after each step that did not fail; `regex`,
    /// `jsonSchema` and `judge` only after a call of `finish`, against its result. If all criteria are commands, the goal
    /// can be met without `finish`.
    #[schemars(
        length(min = 1, max = MAX_CRITERIA),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"])
    )]
    pub acceptance_criteria: Vec<AcceptanceCriterion>,
    /// Files that must exist in the workspace of the toolbox when the criteria are met, at most 32. Checked after each step
    /// that did not fail, after the commands of criteria. The share of those that exist is the progress if no tests are
    /// reported. Needs `Files` in `spec.tools.builtin`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_ARTIFACTS), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["path"]))]
    pub artifacts: Vec<GoalArtifact>,
    /// Constraints on the way to the goal, by name, at most 16 of at most 1,024 characters. Shown to the model and to the
    /// confidence check; nothing enforces them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 16, "additionalProperties" = {"type": "string", "maxLength": 1024}))]
    pub constraints: BTreeMap<String, String>,
    /// Maximum number of steps, 1 to 1,000; then the loop ends with outcome `Failed`. A step is one turn of the agent; all
    /// attempts at it count as one. Defaults to 20.
    #[serde(default = "default_max_steps")]
    #[schemars(range(min = 1, max = 1000))]
    pub max_steps: u32,
    /// Maximum number of attempts at one step, 1 to 10. An attempt fails if all of its tool calls fail, or if its turn
    /// fails. The next one begins 2, 4, 8, … seconds later, receives the error, and may not begin with a call that has
    /// already failed. Defaults to 3.
    #[serde(default = "default_max_attempts")]
    #[schemars(range(min = 1, max = 10))]
    pub max_attempts: u32,
    /// Maximum time from the start of the loop, in seconds, 1 to 2,592,000; then the loop ends with outcome `Failed`.
    /// Evaluated between steps and while nothing pauses the loop. The time in which a confidence check or a detected loop
    /// waits for an approval does not count. Defaults to 3,600.
    #[serde(default = "default_timeout")]
    #[schemars(range(min = 1, max = 2_592_000))]
    pub timeout_seconds: u32,
    /// Maximum cost of the calls of this loop in US dollars, a decimal string with at most six decimals, such as "2.50". Once
    /// it is reached, the loop ends with outcome `Failed` after the step in progress. An answered call whose cost is unknown
    /// ends the loop as well. An AgentBudget pauses the loop instead. Absent: no limit.
    #[serde(default, rename = "maxCostUSD", skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 20))]
    pub max_cost_usd: Option<String>,
    /// When the model is asked how confident it is that the goal will be reached.
    #[serde(default)]
    pub confidence: ConfidenceSpec,
}

fn default_max_steps() -> u32 {
    20
}

fn default_max_attempts() -> u32 {
    3
}

fn default_timeout() -> u32 {
    3600
}

/// One check. Set exactly one of `regex`, `jsonSchema`, `judge` and `command`.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("[has(self.regex), has(self.jsonSchema), has(self.judge), has(self.command)].filter(set, set).size() == 1").message(
        "each of spec.goal.acceptanceCriteria needs exactly one check: set regex, jsonSchema, judge or command, and remove the others"
    ),
    validation = Rule::new("!has(self.judgeModel) || self.judgeModel == 'Main' || has(self.judge)").message(
        "spec.goal.acceptanceCriteria[].judgeModel has no effect without judge: set judge, or remove judgeModel"
    )
)]
pub struct AcceptanceCriterion {
    /// Name of the criterion, shown to the model and in the status.
    #[schemars(length(min = 1, max = 63), regex(pattern = DNS_LABEL))]
    pub name: String,
    /// Regular expression, at most 1,024 characters, that matches anywhere in the result of `finish`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub regex: Option<String>,
    /// JSON schema that the result of `finish` fits, which is then JSON. References to other documents are not resolved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "free_object")]
    pub json_schema: Option<Value>,
    /// Question about the result of `finish`, at most 4,096 characters, which a separate call of a model answers with
    /// yes or no. Asked only once all other criteria are met.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 4096))]
    pub judge: Option<String>,
    /// The model that answers the question of `judge`: `Main` is `spec.model`, `Light` is `spec.lightModel`, which must be set
    /// and to which the calls are billed. Defaults to `Main`.
    #[serde(default, skip_serializing_if = "QuestionModel::is_main")]
    pub judge_model: QuestionModel,
    /// Shell command that succeeds. Needs `Shell` in `spec.tools.builtin`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<CommandCriterion>,
}

/// A file that the agent must produce. A file that was there before the loop counts as well.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct GoalArtifact {
    /// Path of a regular file, relative to the workspace, at most 256 characters, such as `dist/report.pdf`. Links are followed
    /// within the workspace.
    #[schemars(length(min = 1, max = 256))]
    #[x_kube(validation = Rule::new("!('/' + self + '/').matches('/[.]{0,2}/') && !self.matches('[[:cntrl:]]')").message(
        "spec.goal.artifacts[].path must be the path of one file relative to the workspace, such as dist/report.pdf: remove a / at its beginning or end, empty segments, the segments . and .., and control characters"
    ))]
    pub path: String,
    /// Minimum size of the file in bytes, 0 to 1,073,741,824. Defaults to 1: an empty file does not count.
    #[serde(default = "default_min_bytes", skip_serializing_if = "is_default_min_bytes")]
    #[schemars(range(min = 0, max = 1_073_741_824))]
    pub min_bytes: u32,
}

fn default_min_bytes() -> u32 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde needs")]
fn is_default_min_bytes(bytes: &u32) -> bool {
    *bytes == default_min_bytes()
}

/// Which model of the Agent answers a question about its goal.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QuestionModel {
    /// `spec.model`.
    #[default]
    Main,
    /// `spec.lightModel`.
    Light,
}

impl QuestionModel {
    /// Whether it is the default.
    #[must_use]
    pub fn is_main(&self) -> bool {
        *self == Self::Main
    }
}

/// A shell command as a check. It runs in the toolbox without an approval. A run that a restart interrupts is repeated, so
/// the command must be safe to repeat.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct CommandCriterion {
    /// The command, at most 4,096 characters.
    #[schemars(length(min = 1, max = 4096))]
    pub run: String,
    /// Regular expression, at most 1,024 characters, that matches anywhere in the output of the command. Without it and
    /// without `junit`, the exit code must be 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub pass_regex: Option<String>,
    /// Path in the workspace of a JUnit XML report, at most 1,024 characters and 8 MiB, that the command writes. At least one
    /// test must have run, and none may have failed; the exit code does not matter. A report that the command has not
    /// written is not used. With `passRegex`, both must hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub junit: Option<String>,
}

/// When the model is asked how confident it is.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct ConfidenceSpec {
    /// Number of steps, 1 to 1,000, after which a separate call of a model estimates the confidence that the goal will
    /// be reached. The agent can request it earlier with the tool `request_confidence_check`. Defaults to 5.
    #[schemars(range(min = 1, max = 1000))]
    pub every_steps: u32,
    /// Confidence in percent, 0 to 100, below which the loop waits for an approval. An estimate that cannot be read counts as
    /// 0. If the approval is denied or expires, the loop ends with outcome `Escalated`. Defaults to 50.
    #[schemars(range(min = 0, max = 100))]
    pub threshold_percent: u32,
    /// The model that is asked: `Main` is `spec.model`, `Light` is `spec.lightModel`, which must be set. Defaults to `Main`.
    #[serde(skip_serializing_if = "QuestionModel::is_main")]
    pub model: QuestionModel,
}

impl Default for ConfidenceSpec {
    fn default() -> Self {
        Self {
            every_steps: 5,
            threshold_percent: 50,
            model: QuestionModel::Main,
        }
    }
}

/// Progress of a loop in mode `Goal`.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct GoalStatus {
    /// Progress in percent: of the first of these that is known, the share of tests that passed in JUnit reports, the share of
    /// artifacts that exist, the share of criteria that were met, and the estimate of the last confidence check. 100 only if all
    /// criteria were met and all artifacts existed at their last check.
    #[schemars(range(min = 0, max = 100))]
    pub progress_percent: i32,
    /// What the progress is measured by. Absent: nothing is known yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress_source: Option<ProgressSource>,
    /// Number of completed steps.
    #[schemars(range(min = 0))]
    pub steps: i32,
    /// The criteria.
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "first_elements::<MAX_CRITERIA, _, _>"
    )]
    #[schemars(
        length(max = MAX_CRITERIA),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"])
    )]
    pub criteria: Vec<CriterionStatus>,
    /// The artifacts.
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "first_elements::<MAX_ARTIFACTS, _, _>"
    )]
    #[schemars(length(max = MAX_ARTIFACTS), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["path"]))]
    pub artifacts: Vec<ArtifactStatus>,
    /// Confidence at the last confidence check, in percent. Absent: there was none, or its answer could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 100))]
    pub last_confidence_percent: Option<i32>,
    /// Time at which the first turn of this run began. A run is everything from the first step to the end of the loop: an edit
    /// of the goal in between is part of it, as for `steps`. Absent: no turn has begun, or it did so under a version without
    /// this field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Time>,
    /// Time at which the loop ended, in whichever way. Absent while it runs. Without `startedAt`: the loop ended before its first turn.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<Time>,
    /// What this run has used, as of the last start or end of a turn or a check. The answers to requests of users are not part
    /// of it. Absent with `startedAt`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<GoalUsage>,
    /// What ended the loop. Absent while it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end: Option<GoalEnd>,
}

/// What the model calls of a run used: those of its turns, those that judge and estimate, and those that score events of Sensors.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct GoalUsage {
    /// Number of model calls sent; each attempt counts.
    #[schemars(range(min = 0))]
    pub calls: i64,
    /// Tokens of its calls as far as the server reported them: uncached input, cache writes and output.
    #[schemars(range(min = 0))]
    pub tokens: i64,
    /// Cost of its calls in millionths of a US dollar, as far as prices are known. `maxCostUSD` limits it.
    #[serde(rename = "costMicroUSD")]
    #[schemars(range(min = 0))]
    pub cost: i64,
}

/// What the progress of a goal is measured by, the best first.
#[derive(
    Serialize,
    Deserialize,
    JsonSchema,
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    AsRefStr,
    IntoStaticStr,
    EnumIter,
    strum::Display,
)]
pub enum ProgressSource {
    /// The tests that passed, of those that ran, in the last JUnit reports of the criteria.
    Tests,
    /// The artifacts that existed at their last check, of all.
    Artifacts,
    /// The criteria that were met at their last check, of all.
    Criteria,
    /// The estimate of a model, in the last confidence check.
    Estimate,
}

/// A criterion, and whether it was met.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct CriterionStatus {
    /// Name of the criterion.
    #[schemars(length(max = 63))]
    pub name: String,
    /// Whether it was met at its last check.
    pub met: bool,
}

/// An artifact, and whether it was there.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ArtifactStatus {
    /// Path of the file, relative to the workspace.
    #[schemars(length(max = 256))]
    pub path: String,
    /// Whether it existed at its last check and had its minimum size.
    pub met: bool,
    /// Its size in bytes at the last check. Absent: there was no such file, or none was found yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub bytes: Option<i64>,
}

/// What ends a loop in mode `Goal`. Of several that apply, the first one counts.
#[derive(
    Serialize,
    Deserialize,
    JsonSchema,
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    AsRefStr,
    IntoStaticStr,
    EnumIter,
    strum::Display,
)]
pub enum GoalEnd {
    /// All criteria were met, and all artifacts existed.
    CriteriaMet,
    /// The loop repeated itself, and its continuation was not approved.
    LoopDetected,
    /// Calls of one tool were denied too often, and the continuation of the loop was not approved.
    CallsDenied,
    /// The confidence was too low, and the continuation was not approved.
    LowConfidence,
    /// `timeoutSeconds` was reached.
    Timeout,
    /// `maxCostUSD` was reached, or the cost of a call is unknown.
    CostLimit,
    /// `maxSteps` was reached.
    StepLimit,
}
