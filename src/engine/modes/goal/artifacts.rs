//! The artifacts of a goal: files that must exist in the workspace of the toolbox when the criteria are met.
//!
//! Owns the request to the toolbox, what its answer means, and what is kept and shown of it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::settings::GoalSettings;
use super::validation::Verdict;
use super::{GoalState, MAX_SAID};
use crate::context::prompt;
use crate::modes::{CheckEnd, ModeCheck};
use crate::runtime_mark::without_marks;
use agentloop_api::goal::{ArtifactStatus, GoalArtifact, MAX_ARTIFACTS};
use agentloop_toolbox_protocol::file_report::{FileFinding, FileReport, MAX_FILES};

// One call of the tool reports all artifacts.
const _: () = assert!(
    MAX_ARTIFACTS <= MAX_FILES,
    "a goal has more artifacts than a report has files"
);

/// The tool that finds them. It opens no file and runs no command, so that a path can do no harm.
const LIST: &str = "toolbox__list_directory";

/// What the last check of the artifacts found.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(default)]
pub(super) struct ArtifactsState {
    /// By path; empty: nothing is known.
    found: BTreeMap<String, FileFinding>,
    /// Why nothing is known.
    said: String,
}

/// Where the check of the artifacts after a step stands.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum ArtifactsCheck {
    /// The goal has none.
    #[default]
    NotDue,
    Due,
    Done(Verdict),
}

/// What is recorded of the check of the artifacts. Has no path.
#[derive(Serialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckedArtifacts {
    /// `Met` if all exist.
    pub verdict: Verdict,
    /// How many exist.
    pub met: usize,
    pub declared: usize,
}

/// The request to the toolbox.
pub(super) fn check(declared: &[GoalArtifact]) -> ModeCheck {
    let files: Vec<Value> = declared.iter().map(|artifact| artifact.path.clone().into()).collect();
    ModeCheck {
        tool: LIST,
        arguments: [("files".to_owned(), files.into())].into_iter().collect(),
    }
}

impl ArtifactsState {
    /// What the end of the run says. `toolbox`: what has run it.
    pub(super) fn read(declared: &[GoalArtifact], end: CheckEnd<'_>, toolbox: &str) -> Self {
        let text = match end {
            CheckEnd::Ran(text) => text,
            CheckEnd::NotRun(why) => return Self::unknown(why),
        };
        let report = FileReport::parse(text.trim_end()).filter(|report| report.0.len() == declared.len());
        let Some(FileReport(findings)) = report else {
            return Self::unknown(&format!("{toolbox} did not report which of the files exist"));
        };
        let paths = declared.iter().map(|artifact| artifact.path.clone());
        Self {
            found: paths.zip(findings).collect(),
            said: String::new(),
        }
    }

    fn unknown(why: &str) -> Self {
        Self {
            found: BTreeMap::new(),
            said: prompt::truncate(without_marks(why).trim(), MAX_SAID),
        }
    }

    pub(super) fn is_known(&self) -> bool {
        !self.found.is_empty()
    }

    fn has(&self, artifact: &GoalArtifact) -> bool {
        let found = self.found.get(&artifact.path);
        matches!(found, Some(FileFinding::Bytes(bytes)) if *bytes >= artifact.min_bytes.into())
    }

    /// How many of the artifacts exist.
    pub(super) fn count(&self, declared: &[GoalArtifact]) -> usize {
        declared.iter().filter(|artifact| self.has(artifact)).count()
    }

    pub(super) fn has_all(&self, declared: &[GoalArtifact]) -> bool {
        declared.iter().all(|artifact| self.has(artifact))
    }

    fn verdict(&self, declared: &[GoalArtifact]) -> Verdict {
        let is_missing = |artifact: &GoalArtifact| {
            let found = self.found.get(&artifact.path);
            !self.has(artifact) && !matches!(found, None | Some(FileFinding::Unreadable))
        };
        if self.has_all(declared) {
            Verdict::Met
        } else if declared.iter().any(is_missing) {
            Verdict::Unmet
        } else {
            Verdict::Unknown
        }
    }

    /// What a model sees of the last check; `None`: there was none, or it has found all.
    pub(super) fn summary_for_model(&self, declared: &[GoalArtifact]) -> Option<String> {
        if !self.said.is_empty() {
            return Some(format!("Last check of the artifacts: {}", self.said));
        }
        let missing = |artifact: &GoalArtifact| {
            let why = match self.found.get(&artifact.path)? {
                FileFinding::Bytes(_) if self.has(artifact) => return None,
                FileFinding::Bytes(bytes) => format!("{bytes} of at least {} bytes", artifact.min_bytes),
                FileFinding::Absent => "no such file".to_owned(),
                FileFinding::NotRegular => "not a regular file".to_owned(),
                FileFinding::Outside => {
                    "it leads out of the workspace, as each absolute link does; a relative link may be used".to_owned()
                }
                FileFinding::Unreadable => "it could not be looked up".to_owned(),
            };
            Some(format!("`{}` ({why})", artifact.path))
        };
        let missing: Vec<String> = declared.iter().filter_map(missing).collect();
        (!missing.is_empty()).then(|| {
            let missing = prompt::truncate(&missing.join(", "), MAX_SAID);
            format!("Missing artifacts: {missing}.")
        })
    }

    /// The artifacts for people.
    pub(super) fn statuses(&self, declared: &[GoalArtifact]) -> Vec<ArtifactStatus> {
        let status = |artifact: &GoalArtifact| ArtifactStatus {
            path: artifact.path.clone(),
            met: self.has(artifact),
            bytes: match self.found.get(&artifact.path) {
                Some(FileFinding::Bytes(bytes)) => Some(i64::try_from(*bytes).unwrap_or(i64::MAX)),
                _ => None,
            },
        };
        declared.iter().map(status).collect()
    }
}

impl GoalState {
    /// The run that finds the artifacts has ended.
    pub(super) fn artifacts_checked(&mut self, goal: &GoalSettings, end: CheckEnd<'_>, toolbox: &str) {
        self.artifacts = ArtifactsState::read(&goal.artifacts, end, toolbox);
        let verdict = self.artifacts.verdict(&goal.artifacts);
        if let Some(validation) = &mut self.validation {
            validation.artifacts_checked(verdict);
        }
    }

    /// What is recorded of the check of the artifacts.
    pub(super) fn checked_artifacts(&self, check: ArtifactsCheck, goal: &GoalSettings) -> Option<CheckedArtifacts> {
        let ArtifactsCheck::Done(verdict) = check else {
            return None;
        };
        Some(CheckedArtifacts {
            verdict,
            met: self.artifacts.count(&goal.artifacts),
            declared: goal.artifacts.len(),
        })
    }
}
