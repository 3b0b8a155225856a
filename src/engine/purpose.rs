//! What a model call is for. Every call is metered and limited alike, whatever its purpose.

use serde::{Deserialize, Serialize};

/// What a model call is for; journalled with it, and kept in the gateway's record.
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
    /// A summary of old turns, which takes their place in the prompt.
    Compaction,
    /// The question whether a turn is worth it.
    Precheck,
    /// The score of a signal of a Sensor.
    Signal,
}

impl CallPurpose {
    /// Whether `spec.lightModel` serves it, and not `spec.model`.
    #[must_use]
    pub fn uses_light_model(self) -> bool {
        match self {
            Self::Turn | Self::Compaction | Self::Heartbeat => false,
            Self::Precheck | Self::Signal => true,
        }
    }
}
