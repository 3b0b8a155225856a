//! The purposes of model calls. Every call is metered and limited alike, whatever its purpose.

use serde::{Deserialize, Serialize};

/// The purpose of a model call; journalled with it, and kept in the gateway's call store.
#[derive(
    Serialize,
    Deserialize,
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    strum::AsRefStr,
    strum::Display,
    strum::EnumString,
)]
pub enum CallPurpose {
    /// A call of a turn.
    #[default]
    Turn,
    /// A call of a heartbeat.
    Heartbeat,
    /// A call of a turn that answers a request beside the agent's own work.
    Chat,
    /// A summary of old turns, which replaces them in the prompt.
    Compaction,
    /// A pre-check: whether a turn is worth it.
    Precheck,
    /// The score of a signal of a Sensor.
    Signal,
    /// Whether the result of a loop in mode `Goal` meets a criterion.
    Judge,
    /// The confidence that a loop in mode `Goal` reaches its goal.
    Confidence,
    /// As `Judge`, with the light model.
    LightJudge,
    /// As `Confidence`, with the light model.
    LightConfidence,
}

impl CallPurpose {
    /// Whether the call uses `spec.lightModel` instead of `spec.model`.
    #[must_use]
    pub fn uses_light_model(self) -> bool {
        match self {
            Self::Turn | Self::Compaction | Self::Heartbeat | Self::Chat | Self::Judge | Self::Confidence => false,
            Self::Precheck | Self::Signal | Self::LightJudge | Self::LightConfidence => true,
        }
    }

    /// Whether it answers a question of the mode between two turns.
    #[must_use]
    pub fn is_of_mode(self) -> bool {
        matches!(self, Self::LightConfidence | Self::Confidence) || self.is_judge()
    }

    /// Whether it decides on a criterion.
    #[must_use]
    pub fn is_judge(self) -> bool {
        matches!(self, Self::Judge | Self::LightJudge)
    }
}
