//! Tools that sources offer, and runs of them, as the engine and the worker exchange them. Plain data; calls are
//! admitted in `tools::admission`.

use std::fmt;
use std::sync::Arc;

use jiff::SignedDuration;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use super::definition_parts::DefinitionParts;
pub use super::ids::ToolRunId;

/// The side effects of a tool.
#[derive(
    Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, strum::AsRefStr, strum::Display,
)]
pub enum ToolEffect {
    /// It has no side effects: a run can be repeated or cancelled without harm.
    Read,
    /// It changes something.
    Write,
    /// It changes something irreversibly.
    Destructive,
}

/// What follows a run of unknown outcome. A run that may be repeated in any case is repeated, whatever the policy.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnknownOutcomePolicy {
    /// The model sees that it may or may not have happened.
    #[default]
    TellModel,
    /// The same run is sent again, with the same key.
    Retry,
    /// A person decides whether the same run is sent again, with the same key.
    Ask,
}

/// Decides by its arguments whether a call needs an approval. Owned by the source, which reads the expression; two are equal
/// if they have the same text.
#[derive(Clone)]
pub struct ApprovalCondition {
    text: Arc<str>,
    holds: Arc<ArgumentsTest>,
}

/// Whether a condition holds for arguments, or cannot be evaluated for them.
type ArgumentsTest = dyn Fn(&Value) -> bool + Send + Sync;

impl ApprovalCondition {
    /// `holds` must be true if the condition cannot be evaluated: then a person decides.
    pub fn new(text: &str, holds: impl Fn(&Value) -> bool + Send + Sync + 'static) -> Self {
        Self {
            text: text.into(),
            holds: Arc::new(holds),
        }
    }

    /// Whether a call with these arguments needs an approval.
    #[must_use]
    pub fn holds(&self, arguments: &Value) -> bool {
        (self.holds)(arguments)
    }
}

impl fmt::Debug for ApprovalCondition {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("ApprovalCondition").field(&self.text).finish()
    }
}

impl PartialEq for ApprovalCondition {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

/// A tool that a source offers, with its rules.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "independent rules, each asked by its name")]
pub struct ToolSpec {
    /// As the model calls it: `<server>__<tool>`, 1 to 64 of `a-z`, `A-Z`, `0-9`, `_` and `-`.
    pub name: String,
    /// What it does, for the model.
    pub description: String,
    /// JSON schema of its arguments.
    pub parameters: Value,
    pub effect: ToolEffect,
    /// A second run with the same key has no further effect.
    pub idempotent: bool,
    /// The longest that a run may take.
    pub timeout: SignedDuration,
    /// What follows a run of unknown outcome.
    pub on_unknown: UnknownOutcomePolicy,
    /// Identifies what a run reaches: the server's address and credentials, and its own name of the tool. A run is sent only
    /// while it is the same.
    pub target: String,
    /// A person must approve each run.
    pub needs_approval: bool,
    /// A person must approve each run that the model requests once it has been shown untrusted content.
    pub needs_approval_after_untrusted: bool,
    /// A person must approve each run for whose arguments it holds, whatever the other rules say.
    pub approval_condition: Option<ApprovalCondition>,
    /// Its server is trusted: its results are not untrusted content.
    pub trusted: bool,
    /// A grant that its server requires and the Agent does not have: its calls are denied.
    pub missing_grant: Option<String>,
    /// What its server declared it to be. `None`: not pinned, since the definition is the runtime's own.
    pub definition: Option<DeclaredDefinition>,
}

impl ToolSpec {
    /// Name of its server, which contains no `_`.
    #[must_use]
    pub fn server(&self) -> &str {
        self.name.split_once("__").map_or(&*self.name, |(server, _)| server)
    }
}

/// What a server declared a tool to be, and the rules for a change of that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeclaredDefinition {
    /// Hash of the whole definition, before anything is truncated.
    pub hash: String,
    /// Its parts, to say which of them differ.
    pub parts: DefinitionParts,
    /// Identifies the server's address, image and credentials; the same for all of its tools. If it changes, a person has
    /// edited the spec.
    pub server: String,
    /// A person must approve another definition.
    pub holds_changes: bool,
    /// A person must approve the tool if its server adds it.
    pub holds_new: bool,
}

/// One tool run, as the worker executes it.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolRun {
    pub id: ToolRunId,
    /// [`ToolSpec::name`].
    pub name: String,
    /// [`ToolSpec::target`] when the model requested it.
    pub target: String,
    /// [`DeclaredDefinition::hash`] of what the model was shown when it requested it; empty: it is not pinned.
    pub definition: String,
    /// Arguments that match the tool's schema.
    pub arguments: Map<String, Value>,
    /// The same for each repeat of this run, and for no other run of any Agent: 32 hexadecimal digits.
    pub idempotency_key: String,
    /// Maximum number of bytes of its text that a prompt has room for: of a longer one the middle is left out. 0: the result is
    /// not for a prompt.
    pub max_result_bytes: usize,
}

/// What the worker has stored of a result, by the names of its artifacts.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub struct ResultArtifacts {
    /// Its whole text, if it was longer than [`ToolRun::max_result_bytes`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Its images, in order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<StoredImage>,
}

/// An image that models can be shown.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct StoredImage {
    /// Name of the artifact.
    pub name: String,
    /// In pixels.
    pub width: u32,
    pub height: u32,
    pub bytes: usize,
}

impl ResultArtifacts {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The outcome of one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolOutcome {
    /// It ran.
    Done {
        /// The result, for the model.
        text: String,
    },
    /// It reported a failure or a refusal.
    Failed {
        /// The result, for the model.
        text: String,
    },
    /// It certainly did not run: nothing was sent. Before this is reported, a source that has not answered yet is
    /// awaited within the run's timeout, since a restart repeats runs before the sources are known.
    Unavailable {
        /// Why, for the model.
        message: String,
    },
    /// It was sent and not answered: it may have run.
    Unknown {
        /// Why, for the model.
        message: String,
    },
}
